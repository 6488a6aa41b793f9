//! A run as a library call.

use std::fs;
use std::path::PathBuf;

use burn::tensor::Device;
use vlm_models::VlmConfig;
use vlm_train::job::{Finetune, FinetuneConfig, LossChoice, RuleChoice, ScheduleChoice, TooLong};
use vlm_train::{PreferenceLoss, VlmTrainError};

use crate::common::{fixtures, timeless_log};

#[path = "../examples/finetune.rs"]
#[allow(dead_code, reason = "the program around the function")]
mod example;

/// A model's folder with a tokenizer and a template, 8 conversations, and a folder that is gone
/// when this is dropped.
struct Run {
    model: PathBuf,
    data: PathBuf,
    folder: tempfile::TempDir,
}

fn run() -> Run {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for part in ["models/qwen3_vl_tiny", "workflow/qwen3_vl"] {
        for file in fs::read_dir(fixtures().join(part)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), model.join(file.file_name())).unwrap();
        }
    }
    let data = fixtures().join("workflow/text.jsonl");
    Run {
        model,
        data,
        folder,
    }
}

#[test]
fn the_example_fine_tunes_a_folder() {
    let run = run();
    let out = run.folder.path().join("out");
    let [model, data, out] = [&run.model, &run.data, &out].map(|path| path.to_str().unwrap());
    let adapter = example::finetune(model, data, out).unwrap();
    let config = VlmConfig::from_folder(&run.model).unwrap();
    assert_eq!(config.adapter_config(&adapter).unwrap().rank, 16);
    let log = fs::read_to_string(format!("{out}/log.jsonl")).unwrap();
    let losses: Vec<f64> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64())
        .map(Option::unwrap)
        .collect();
    assert!(
        losses.len() > 1 && losses[losses.len() - 1] < losses[0],
        "{losses:?}"
    );
}

#[test]
fn options_that_make_no_run_are_refused_before_it() {
    let run = run();
    let config = FinetuneConfig::new(&run.model, &run.data, run.folder.path().join("out"));
    let config = config.unwrap();
    type Change = fn(&mut FinetuneConfig);
    let cases: [(&str, Change); 5] = [
        ("--max-tokens 5000 is above", |config| {
            config.data.records.max_tokens = Some(5000);
        }),
        ("--patience needs validation data", |config| {
            config.output.patience = Some(1);
        }),
        ("those of the decoder are 0 to", |config| {
            config.trained.layers = vec!["2-99".parse().unwrap()];
        }),
        ("--full-parts has a part of --parts", |config| {
            config.trained.full_parts = vec![vlm_train::job::PartChoice::Decoder];
        }),
        ("--betas has two numbers", |config| {
            config.optimizer.betas.pop();
        }),
    ];
    for (says, change) in cases {
        let mut config = config.clone();
        change(&mut config);
        match Finetune::open(config) {
            Err(VlmTrainError::Options(text)) => assert!(text.contains(says), "{text}"),
            other => panic!("{says}: {other:?}"),
        }
    }
    // A share that no file can have.
    let name = format!("{}#2000x", run.data.display());
    let error = FinetuneConfig::new(&run.model, name, "out").unwrap_err();
    assert!(
        error.to_string().contains("expected FILE, FILE#500"),
        "{error}"
    );
}

/// A run over the pairs of the example.
fn over_pairs(out: &std::path::Path) -> FinetuneConfig {
    let shapes = fixtures().join("../../examples/shapes");
    let data = shapes.join("prefer.jsonl");
    let mut config = FinetuneConfig::new(shapes.join("model"), data, out).unwrap();
    config.loss.loss = LossChoice::Preference(PreferenceLoss::Dpo);
    config.data.val = vec![shapes.join("prefer_test.jsonl")];
    config.trained.random_weights = true;
    config.batch.steps = Some(4);
    config.optimizer.schedule = ScheduleChoice::Constant;
    config.optimizer.learning_rate = Some(1e-3);
    config.output.validate_every = 2;
    config
}

/// The reference of a whole model is the one at the start, also if the run is continued.
#[test]
fn a_continued_run_over_pairs_has_the_reference_of_its_start() {
    let folder = tempfile::tempdir().unwrap();
    // A step of rate 0 stores the weights. Drawn for each run, they would depend on other tests, which
    // draw from the process's one generator too.
    let start = folder.path().join("start");
    let mut config = over_pairs(&start);
    config.trained.full = true;
    config.batch.steps = Some(1);
    let drawn = Finetune::open(config).unwrap();
    drawn.run(&Device::flex()).unwrap();
    let run = |name: &str, steps: usize, resume: bool| {
        let out = folder.path().join(name);
        let mut config = over_pairs(&out);
        config.folder = start.join("model");
        config.trained.random_weights = false;
        config.trained.full = true;
        config.batch.steps = Some(steps);
        config.output.resume = resume;
        Finetune::open(config)
            .unwrap()
            .run(&Device::flex())
            .unwrap();
        timeless_log(&out)
    };
    let whole = run("whole", 4, false);
    run("parts", 2, false);
    let parts = run("parts", 4, true);
    let without_end = |log: &str| -> Vec<String> {
        let is_step = |line: &&str| line.contains("gradient_norm");
        log.lines().filter(is_step).map(str::to_owned).collect()
    };
    assert_eq!(without_end(&parts), without_end(&whole));
    let steps = without_end(&whole);
    assert!(steps[0].contains("\"reward_margin\":0.0,"), "{}", steps[0]);
    assert!(!steps[3].contains("\"reward_margin\":0.0,"), "{}", steps[3]);
    assert!(whole.contains("\"validation\":{"), "{whole}");
}

#[test]
fn options_of_another_loss_are_refused() {
    type Change = fn(&mut FinetuneConfig);
    let cases: [(&str, Change); 7] = [
        ("--beta is for losses of preferences", |config| {
            config.loss.loss = LossChoice::Sft;
            config.loss.beta = Some(0.2);
        }),
        ("--reference has no effect on orpo", |config| {
            config.loss.loss = LossChoice::Preference(PreferenceLoss::Orpo);
            config.loss.reference = Some(config.folder.clone());
        }),
        ("--record-step is for --loss sft", |config| {
            config.output.record_step = Some(1);
        }),
        ("--loss-rule micro-batches is for --loss sft", |config| {
            config.batch.loss_rule = RuleChoice::MicroBatches;
        }),
        ("--label-smoothing is 0.7; expected at least 0", |config| {
            config.loss.label_smoothing = Some(0.7);
        }),
        (
            "--gamma is 1; expected 0, or a number above 0 for simpo",
            |config| {
                config.loss.gamma = Some(1.0);
            },
        ),
        ("--too-long drop-turns is for --loss sft", |config| {
            config.data.records.too_long = TooLong::DropTurns;
        }),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (expected, change) in cases {
        let mut config = over_pairs(folder.path());
        change(&mut config);
        let error = Finetune::open(config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Pairs are no answers to imitate.
    let mut config = over_pairs(&folder.path().join("out"));
    config.loss.loss = LossChoice::Sft;
    let error = Finetune::open(config)
        .unwrap()
        .run(&Device::flex())
        .unwrap_err();
    assert!(error.to_string().contains("preference data"), "{error}");
}
