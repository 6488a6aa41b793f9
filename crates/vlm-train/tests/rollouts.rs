//! Runs over answers that the model samples, with rewards.

use std::path::Path;

use burn::tensor::Device;
use serde_json::Value;
use vlm_train::job::{Finetune, FinetuneConfig, LossChoice, RuleChoice, ScheduleChoice, TooLong};
use vlm_train::{PolicyLoss, RewardRule};

use crate::common::{fixtures, timeless_log};

/// Rewards short answers, and keeps what it reads.
const SHORT: &str = r#"while read -r line; do
printf '%s\n' "$line" >> "$SEEN"
text=${line#*'"completion": "'}; text=${text%%'", "answer"'*}
echo "-${#text}"
done"#;

/// A run over the questions of the example about colours.
fn over_rewards(out: &Path) -> FinetuneConfig {
    let shapes = fixtures().join("../../examples/shapes");
    let data = shapes.join("colour.jsonl");
    let mut config = FinetuneConfig::new(shapes.join("model"), data, out).unwrap();
    config.loss.loss = LossChoice::Policy(PolicyLoss::Dapo);
    config.loss.policy.reward = Some(RewardRule::Exact);
    config.loss.policy.group = Some(4);
    config.loss.policy.max_new = Some(6);
    config.trained.full = true;
    config.trained.random_weights = true;
    config.batch.batch = 3;
    config.batch.steps = Some(1);
    config.optimizer.schedule = ScheduleChoice::Constant;
    config.optimizer.learning_rate = Some(5e-3);
    config.optimizer.warmup_steps = Some(0);
    config
}

fn steps(log: &str) -> Vec<Value> {
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
    lines
        .filter(|line: &Value| line["gradient_norm"].is_number())
        .collect()
}

/// A run of a reward that a model without any training can get learns, and is the same in one part
/// and in two.
#[test]
fn a_run_learns_from_rewards_and_continues_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    // A step of rate 0, in which the rate begins to rise, stores the weights: they are drawn from the
    // process's one generator.
    let start = folder.path().join("start");
    let mut config = over_rewards(&start);
    config.batch.steps = Some(1);
    config.optimizer.warmup_steps = None;
    config.optimizer.warmup = 0.5;
    Finetune::open(config)
        .unwrap()
        .run(&Device::flex())
        .unwrap();
    let seen = folder.path().join("seen.jsonl");
    let run = |name: &str, steps: usize, resume: bool| {
        let out = folder.path().join(name);
        let mut config = over_rewards(&out);
        config.folder = start.join("model");
        config.trained.random_weights = false;
        config.loss.policy.reward = None;
        config.loss.policy.reward_command = Some(SHORT.replace("$SEEN", seen.to_str().unwrap()));
        config.loss.policy.updates = Some(2);
        config.loss.beta = Some(0.01);
        config.batch.steps = Some(steps);
        config.data.val = vec![fixtures().join("../../examples/shapes/test.jsonl")];
        config.optimizer.learning_rate = Some(1e-2);
        config.output.validate_every = 8;
        config.output.resume = resume;
        Finetune::open(config)
            .unwrap()
            .run(&Device::flex())
            .unwrap();
        timeless_log(&out)
    };
    let whole = run("whole", 20, false);
    run("parts", 4, false);
    let parts = run("parts", 8, true);
    let found = steps(&whole);
    assert_eq!(steps(&parts), found[..8]);
    let mean = |range: std::ops::Range<usize>| {
        let of = |step: &Value| step["reward"].as_f64().unwrap();
        found[range.clone()].iter().map(of).sum::<f64>() / range.len() as f64
    };
    let (first, last) = (mean(0..3), mean(17..20));
    assert!(first < 0.0 && last > 0.8 * first, "from {first} to {last}");
    println!("from {first:.2} to {last:.2}");
    assert!(whole.contains("\"validation_reward\":"), "{whole}");
    assert_eq!(found[0]["kl"].as_f64().map(|kl| kl >= 0.0), Some(true));

    let seen = std::fs::read_to_string(seen).unwrap();
    let asked: Value = serde_json::from_str(seen.lines().next().unwrap()).unwrap();
    assert_eq!(asked["prompt"], "What colour is the figure?");
    let is_colour = |answer: &Value| {
        ["red", "green", "blue", "yellow"]
            .map(Value::from)
            .contains(answer)
    };
    assert!(is_colour(&asked["answer"]), "{asked}");
    assert!(asked["completion"].is_string());
    assert_eq!(asked["messages"][1]["content"], asked["answer"]);
    assert_eq!(asked["images"].as_array().map(Vec::len), Some(1));
    // The answers to a question follow each other, and are drawn one by one.
    let seen: Vec<Value> = seen
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut varies = 0;
    for group in seen[..12].chunks(4) {
        let of = |name: &str| -> Vec<&Value> { group.iter().map(|asked| &asked[name]).collect() };
        let are_equal = |values: &[&Value]| values.iter().all(|value| *value == values[0]);
        assert!(are_equal(&of("images")), "{group:?}");
        varies += usize::from(!are_equal(&of("completion")));
    }
    assert_eq!(varies, 3, "{:?}", &seen[..12]);
}

#[test]
fn options_that_give_no_rewards_are_refused() {
    type Change = fn(&mut FinetuneConfig);
    let cases: [(&str, Change); 14] = [
        ("needs --reward (exact, number, boxes)", |config| {
            config.loss.policy.reward = None;
        }),
        ("--group is for losses of rewarded answers", |config| {
            config.loss.loss = LossChoice::Sft;
            config.loss.policy.reward = None;
        }),
        ("--reward is for losses of rewarded answers", |config| {
            config.loss.loss = LossChoice::Preference(vlm_train::PreferenceLoss::Dpo);
        }),
        ("--gamma is for losses of preferences", |config| {
            config.loss.gamma = Some(1.0);
        }),
        ("--tolerance is for --reward number", |config| {
            config.loss.policy.tolerance = Some(0.1);
        }),
        ("--group is 1; expected at least 2", |config| {
            config.loss.policy.group = Some(1);
        }),
        ("--clip is 2; expected a number from 0 to 1", |config| {
            config.loss.policy.clip = vec![2.0, 0.2];
        }),
        ("--clip has 3 numbers; expected two", |config| {
            config.loss.policy.clip = vec![0.2; 3];
        }),
        ("--clip has no effect on the first update", |config| {
            config.loss.policy.clip = vec![0.1, 0.2];
        }),
        ("--reference has no effect without --beta", |config| {
            config.loss.reference = Some(config.folder.clone());
        }),
        ("--max-new 5000", |config| {
            config.loss.policy.max_new = Some(5000);
        }),
        ("--record-step is for --loss sft", |config| {
            config.output.record_step = Some(1);
        }),
        ("--loss-rule micro-batches is for --loss sft", |config| {
            config.batch.loss_rule = RuleChoice::MicroBatches;
        }),
        ("--too-long drop-turns is for --loss sft", |config| {
            config.data.records.too_long = TooLong::DropTurns;
        }),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (expected, change) in cases {
        let mut config = over_rewards(folder.path());
        change(&mut config);
        let error = Finetune::open(config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// An answer of the data without what is compared, and a command that fails, end the run before its
/// first update.
#[test]
fn rewards_that_cannot_be_given_end_the_run() {
    type Change = fn(&mut FinetuneConfig);
    let cases: [(&str, Change); 3] = [
        ("--reward number needs a number in each answer", |config| {
            config.loss.policy.reward = Some(RewardRule::Number);
        }),
        ("--reward boxes needs a box", |config| {
            config.loss.policy.reward = Some(RewardRule::Boxes);
        }),
        ("ended (exit status: 3) after 0 of 12 rewards", |config| {
            config.loss.policy.reward = None;
            config.loss.policy.reward_command = Some("exit 3".to_owned());
        }),
    ];
    for (expected, change) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut config = over_rewards(&folder.path().join("out"));
        change(&mut config);
        let run = Finetune::open(config).unwrap();
        let error = run.run(&Device::flex()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(
            !folder
                .path()
                .join("out/log.jsonl")
                .metadata()
                .is_ok_and(|of| of.len() > 0)
        );
    }
}
