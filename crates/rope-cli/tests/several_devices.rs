//! `mrope finetune` on several devices: simulated NPUs of one process and of two, and the CPU as
//! several ranks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{HANG, free_address, within};
use crate::ended::expect_ended;

const STEPS: usize = 3;

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

fn command(out: &Path, options: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes"));
    let fixed = "finetune model --random-weights";
    command.args(fixed.split_whitespace());
    command.arg("--out").arg(out);
    for default in [
        ["--data", "train.jsonl"],
        ["--micro-tokens", "512"],
        ["--batch", "4"],
        ["--checkpoint-every", "1"],
        ["--learning-rate", "1e-2"],
    ] {
        if !options.contains(default[0]) {
            command.args(default);
        }
    }
    command.args(options.split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn done(output: &Output) -> String {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    said
}

/// Losses and norms of a log.
fn numbers(out: &Path) -> Vec<f64> {
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        ["loss", "gradient_norm"].map(|name| line[name].as_f64().expect(name))
    };
    log.lines().flat_map(line).collect()
}

fn apart(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    let pairs = left.iter().zip(right);
    pairs
        .map(|(l, r)| (l - r).abs() / l.abs())
        .fold(0.0, f64::max)
}

/// True if the folder of a run has a complete checkpoint.
fn has_checkpoint(out: &Path) -> bool {
    let entries = std::fs::read_dir(out).into_iter().flatten().flatten();
    let mut checkpoints = entries.filter(|entry| {
        entry
            .file_name()
            .to_string_lossy()
            .starts_with("checkpoint-")
    });
    checkpoints.any(|checkpoint| checkpoint.path().join("run.json").is_file())
}

/// Options of two processes that meet.
fn hosts(name: &str) -> [String; 2] {
    let (token, address) = (token(name), free_address());
    [0, 1].map(|host| {
        format!(
            "--device ascend-sim --hosts 2 --host {host} --rendezvous {address} --token-file {}",
            token.display()
        )
    })
}

/// A token that its owner alone can read.
fn token(name: &str) -> PathBuf {
    let path = folder(&format!("{name}.token"));
    std::fs::remove_file(&path).ok();
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&path).expect("a file");
    file.write_all(b"0123456789abcdef0123\n").expect("written");
    path
}

fn end(child: Child) -> Output {
    within(HANG, move || child.wait_with_output().expect("it ends"))
}

#[test]
fn two_npus_of_a_process_and_two_processes_learn_what_one_learns() {
    let steps = format!("--steps {STEPS}");
    let alone = folder("several-one");
    done(
        &command(&alone, &format!("{steps} --device ascend-sim"))
            .output()
            .expect("starts"),
    );
    let expected = numbers(&alone);

    let both = folder("several-two");
    let options = format!("{steps} --device ascend-sim:0 --device ascend-sim:1");
    let said = done(&command(&both, &options).output().expect("starts"));
    let traffic =
        "took part in 3 collective operations on 192 KiB in all, and sent at least 192 KiB";
    assert!(said.contains(traffic), "{said}");
    assert!(said.contains("in a fixed order"), "{said}");
    let found = apart(&expected, &numbers(&both));
    assert!(found <= 1e-6, "{found:.1e}");

    for (sharding, traffic) in [
        // Block by block; one operation for each of the moments at a checkpoint.
        (
            "--shard gradients",
            "24 collective operations on 768 KiB in all, and sent at least 384 KiB",
        ),
        // And the weights, of the frozen model too: twice a step, adapters at a checkpoint and at
        // the end.
        (
            "--shard all",
            "74 collective operations on 6.40 MiB in all, and sent at least 3.20 MiB",
        ),
    ] {
        let sharded = folder("several-sharded");
        let options = format!("{options} {sharding}");
        let said = done(&command(&sharded, &options).output().expect("starts"));
        assert!(said.contains(traffic), "{sharding}: {said}");
        let found = apart(&expected, &numbers(&sharded));
        assert!(found <= 1e-6, "{sharding}: {found:.1e}");
    }

    let out = folder("several-hosts");
    let (token, port) = (token("several-hosts"), free_address().port());
    // As a launcher starts them that leaves the port to its processes.
    let children = ["0", "1"].map(|rank| {
        let options = format!("{steps} --device ascend-sim --rendezvous env --token-file");
        let mut command = command(&out, &options);
        command.arg(&token).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string());
        command.env("WORLD_SIZE", "2").env("RANK", rank);
        command.env("LOCAL_RANK", rank).spawn().expect("starts")
    });
    for child in children {
        let said = done(&end(child));
        assert!(
            said.contains(&format!("took part in {STEPS} collective operations")),
            "{said}"
        );
    }
    // The same ranks on other hosts: the same sums.
    assert_eq!(numbers(&out), numbers(&both));
}

#[test]
fn two_npus_learn_from_pairs_what_the_processor_learns() {
    let options = format!("--steps {STEPS} --loss dpo --data prefer.jsonl");
    let (alone, both) = (folder("pairs-one"), folder("pairs-two"));
    done(&command(&alone, &options).output().expect("starts"));
    let options = format!("{options} --device ascend-sim:0 --device ascend-sim:1");
    done(&command(&both, &options).output().expect("starts"));
    let found = apart(&numbers(&alone), &numbers(&both));
    assert!(found <= 1e-6, "{found:.1e}");
    let margin = |out: &Path| {
        let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
        let last = log.lines().last().expect("a step").to_owned();
        let last: serde_json::Value = serde_json::from_str(&last).expect("a line of JSON");
        last["reward_margin"].as_f64().expect("a margin")
    };
    let [alone, both] = [margin(&alone), margin(&both)];
    assert!(
        (alone - both).abs() < 1e-6 && alone != 0.0,
        "{alone} {both}"
    );
}

/// Each NPU samples the answers to its own questions, with the numbers that one device has for them.
#[test]
fn two_npus_learn_from_rewards_what_the_processor_learns() {
    let options = format!("--steps {STEPS} --loss grpo --data colour.jsonl --group 3 --max-new 4");
    // A number that depends on all that it reads.
    let reward = [
        "--reward-command",
        "while read -r line; do echo $((${#line} % 5)); done",
    ];
    let run = |out: &Path, options: &str| {
        let ended = command(out, options).args(reward).output();
        ended.expect("starts")
    };
    let (alone, both) = (folder("rewards-one"), folder("rewards-two"));
    done(&run(&alone, &options));
    let both_npus = format!("{options} --device ascend-sim:0 --device ascend-sim:1");
    done(&run(&both, &both_npus));
    let [one, two] = [&alone, &both].map(|out| numbers(out));
    // The losses of answers of equal lengths are 0.
    let norms = |numbers: &[f64]| {
        numbers
            .iter()
            .copied()
            .skip(1)
            .step_by(2)
            .collect::<Vec<_>>()
    };
    let found = apart(&norms(&one), &norms(&two));
    let near = one
        .iter()
        .zip(&two)
        .all(|(one, two)| (one - two).abs() < 1e-6);
    assert!(found <= 1e-6 && near, "{found:.1e} {one:?} {two:?}");
    let said = failed(run(
        &folder("rewards-shards"),
        &format!("{both_npus} --shard all"),
    ));
    assert!(said.contains("--shard all samples no answers"), "{said}");
}

#[test]
fn the_processor_may_be_several_ranks_some_of_which_have_no_conversation() {
    for (batch, sharding) in [
        ("", ""),
        // No batch has one for the second.
        (
            "--batch 1 --full --parts tower,decoder",
            "--shard-optimizer",
        ),
        ("--batch 1 --parts tower,decoder", "--shard all"),
        // Of some batches the first has all.
        ("--batch-tokens 60 --full", "--shard gradients"),
        // Each has half of the tokens of all.
        ("--full", "--shard all --context 2"),
    ] {
        let options = format!("--steps {STEPS} --record-step 1 {batch}");
        let (alone, both) = (folder("several-cpu-one"), folder("several-cpu-two"));
        done(&command(&alone, &options).output().expect("starts"));
        let options = format!("{options} --device cpu --device cpu {sharding}");
        done(&command(&both, &options).output().expect("starts"));
        let found = apart(&numbers(&alone), &numbers(&both));
        assert!(found <= 1e-6, "{batch}: {found:.1e}");
        let records = ["step-1.rank-1.safetensors", "step-1.safetensors"];
        let records = [both.join(records[0]), alone.join(records[1])];
        let mut compare = Command::new(env!("CARGO_BIN_EXE_mrope"));
        let compared = compare.arg("compare").args(records).output();
        let compared = compared.expect("starts");
        let said = text(&compared.stdout);
        assert!(compared.status.success(), "{batch}, {sharding}: {said}");
    }
    // Ranks on one device give it the same type.
    let out = folder("several-cpu-bf16");
    let options = "--steps 2 --precision bf16 --device cpu --device cpu";
    done(&command(&out, options).output().expect("starts"));
}

/// The folder of a model with eight experts, which reads the example's data.
fn model_with_experts(name: &str) -> PathBuf {
    let model = folder(name);
    std::fs::create_dir_all(&model).expect("a folder");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for file in std::fs::read_dir(root.join("examples/shapes/model")).expect("the example") {
        let path = file.expect("a file").path();
        std::fs::copy(&path, model.join(path.file_name().expect("a name"))).expect("copied");
    }
    let json = |path: &Path| -> serde_json::Value {
        let text = std::fs::read_to_string(path).expect("a file");
        serde_json::from_str(&text).expect("JSON")
    };
    let fixture = "tests/fixtures/models/qwen3_vl_moe_tiny/config.json";
    let mut config = json(&root.join(fixture));
    for (name, token) in [
        ("vision_start_token_id", 379),
        ("vision_end_token_id", 380),
        ("image_token_id", 382),
        ("video_token_id", 383),
    ] {
        config[name] = token.into();
    }
    config["text_config"]["vocab_size"] = 384.into();
    config["tie_word_embeddings"] = true.into();
    std::fs::write(model.join("config.json"), config.to_string()).expect("written");
    let path = model.join("preprocessor_config.json");
    let mut pictures = json(&path);
    pictures["patch_size"] = 8.into();
    pictures["size"] = serde_json::json!({"shortest_edge": 256, "longest_edge": 4096});
    let keys = pictures.as_object_mut().expect("an object");
    keys.retain(|key, _| !key.ends_with("_pixels"));
    std::fs::write(&path, pictures.to_string()).expect("written");
    model
}

/// As [`command`], of another model; with `random`, of random weights.
fn command_of(model: &Path, random: bool, out: &Path, options: &str) -> Command {
    let with_example = command(out, options);
    let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
    command.current_dir(with_example.get_current_dir().expect("the example"));
    let rest = with_example.get_args().skip(if random { 2 } else { 3 });
    command.arg("finetune").arg(model).args(rest);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The options of NPUs by number, some of which divide the experts.
fn dividing(npus: std::ops::Range<usize>, expert_parallel: usize) -> String {
    let devices = npus.map(|npu| format!(" --device ascend-sim:{npu}"));
    let devices: String = devices.collect();
    format!("{devices} --expert-parallel {expert_parallel}")
}

const BESIDE_EXPERTS: &str = "--targets experts.gate_up_proj,experts.down_proj,q_proj";

/// The simulated NPUs exchange the tokens of each of two layers twice in the pass that counts loads,
/// and six times in that of gradients; three checkpoints gather four parameters with their moments,
/// and the result gathers them once. A run from the saved model reads each NPU's part alone.
#[test]
fn npus_that_divide_experts_learn_what_one_learns() {
    let model = model_with_experts("several-experts");
    let whole = format!("--steps {STEPS} --full --router-loss 0.1");
    let run = |model: &Path, random: bool, name: &str, options: &str| {
        let out = folder(name);
        let mut command = command_of(model, random, &out, options);
        let said = within(HANG, move || done(&command.output().expect("starts")));
        (out, said)
    };
    let near = |expected: &Path, found: &Path, case: &str| {
        let found = apart(&numbers(expected), &numbers(found));
        assert!(found <= 1e-6, "{case}: {found:.1e}");
    };
    let (alone, _) = run(&model, true, "several-experts-one", &whole);
    let options = format!("{whole} {}", dividing(0..2, 2));
    let (two, said) = run(&model, true, "several-experts-two", &options);
    let operations = STEPS * (2 * 2 + 2 * 6 + 1) + (3 * STEPS + 1) * 4;
    let says = format!("took part in {operations} collective operations");
    assert!(said.contains(&says), "{said}");
    near(&alone, &two, "two NPUs");

    let [alone, two] = [alone, two].map(|out| out.join("model"));
    let again = format!("--steps {STEPS} {BESIDE_EXPERTS}");
    let (of_one, _) = run(&alone, false, "several-experts-again", &again);
    let options = format!("{again} {}", dividing(0..4, 2));
    let (of_four, _) = run(&two, false, "several-experts-four", &options);
    near(&of_one, &of_four, "four NPUs from the saved model");
    let out = folder("several-experts-hosts");
    let children = hosts("several-experts-hosts").map(|host| {
        let options = format!("{again} {host} --expert-parallel 2");
        let mut command = command_of(&two, false, &out, &options);
        command.spawn().expect("starts")
    });
    let _said = children.map(|child| done(&end(child)));
    near(&of_one, &out, "two processes");
    let weights = |out: &Path| out.join("adapter/adapter_model.safetensors");
    let sizes =
        [&of_one, &of_four, &out].map(|out| std::fs::metadata(weights(out)).expect("saved").len());
    assert_eq!(sizes, [sizes[0]; 3]);
}

/// Two NPUs with one micro-batch, four with two and in shards, and two processes.
#[test]
fn npus_that_divide_tokens_learn_what_one_learns() {
    let run = |name: &str, options: &str| {
        let out = folder(name);
        let mut command = command(&out, &format!("--steps {STEPS} {options}"));
        let said = within(HANG, move || done(&command.output().expect("starts")));
        (out, said)
    };
    let npus = |count: usize, options: &str| {
        let devices = (0..count).map(|npu| format!(" --device ascend-sim:{npu}"));
        format!("{} --context 2 {options}", devices.collect::<String>())
    };
    let near = |expected: &Path, found: &Path, case: &str| {
        let found = apart(&numbers(expected), &numbers(found));
        assert!(found <= 1e-6, "{case}: {found:.1e}");
    };
    let (alone, _) = run("several-tokens-one", "--device ascend-sim");
    let (two, said) = run("several-tokens-two", &npus(2, ""));
    // In each of two layers, two exchanges forward, and four with gradients.
    let operations = STEPS * (2 * 6 + 1);
    let says = format!("took part in {operations} collective operations");
    assert!(said.contains(&says), "{said}");
    near(&alone, &two, "two NPUs");
    let (whole, _) = run("several-tokens-whole", "--full --device ascend-sim");
    let (four, _) = run("several-tokens-four", &npus(4, "--full --shard gradients"));
    near(&whole, &four, "four NPUs");

    let out = folder("several-tokens-hosts");
    let children = hosts("several-tokens-hosts").map(|host| {
        let options = format!("--steps {STEPS} {host} --context 2 --shard all");
        command(&out, &options).spawn().expect("starts")
    });
    let _said = children.map(|child| done(&end(child)));
    near(&alone, &out, "two processes");
}

#[test]
fn divisions_of_tokens_that_a_run_cannot_have_are_refused() {
    let two = "--device cpu --device cpu --context 2";
    for (options, says) in [
        ("--context 2", "does not divide the 1 devices"),
        (&format!("{two} --no-recompute"), "leave out --no-recompute"),
        (&format!("{two} --expert-parallel 2"), "--expert-parallel"),
        (
            &format!("{two} --loss dpo"),
            "a loss of preferences or rewards",
        ),
    ] {
        let out = folder("several-tokens-never");
        let output = command(&out, options).output().expect("starts");
        let said = failed(output);
        assert!(said.contains(says), "{options}: {said}");
    }
    let out = folder("several-tokens-short");
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("several-tokens-short.jsonl");
    let record = serde_json::json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    ]});
    std::fs::write(&path, format!("{record}\n")).expect("written");
    let devices = "--device cpu ".repeat(60);
    let options = format!("{devices} --context 60 --data {}", path.display());
    let said = failed(command(&out, &options).output().expect("starts"));
    assert!(said.contains("as many devices as tokens"), "{said}");
}

#[test]
fn divisions_of_experts_that_a_run_cannot_have_are_refused() {
    let model = model_with_experts("several-experts-refused");
    let two = "--device cpu --device cpu --expert-parallel 2";
    for (options, says) in [
        ("--expert-parallel 2", "does not divide the 1 devices"),
        (
            "--device cpu --device cpu --device cpu --expert-parallel 3",
            "the 8 experts of a layer",
        ),
        (&format!("{two} --shard all"), "does not go with --shard"),
        (
            &format!("{two} --loss dpo"),
            "a loss of preferences or rewards",
        ),
        (
            &format!("{two} --loss grpo --reward exact"),
            "a loss of preferences or rewards",
        ),
        (&format!("{two} --no-recompute"), "leave out --no-recompute"),
        (&format!("{two} --samples 2"), "which --samples needs"),
        (
            &format!("{two} --record-step 1"),
            "which --record-step needs",
        ),
    ] {
        let out = folder("several-experts-never");
        let output = command_of(&model, true, &out, options)
            .output()
            .expect("starts");
        let said = failed(output);
        assert!(said.contains(says), "{options}: {said}");
    }
    let out = folder("several-experts-none");
    let said = failed(command(&out, two).output().expect("starts"));
    assert!(said.contains("the model has none"), "{said}");
}

/// Adapters beside experts and whole models, on several numbers of NPUs and in two processes:
/// against one NPU.
#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_npus_that_divide_experts_learn_what_one_learns() {
    let model = model_with_experts("several-experts-deep");
    for (name, options) in [
        ("adapters", BESIDE_EXPERTS),
        (
            "whole",
            "--full --parts tower,merger,decoder --router-loss 0.1 --learning-rate 1e-3",
        ),
    ] {
        let options = format!("--steps 20 {options} --checkpoint-every 20 --batch 8");
        let alone = folder("several-experts-deep-one");
        let of_one = format!("{options} --device ascend-sim");
        done(
            &command_of(&model, true, &alone, &of_one)
                .output()
                .expect("starts"),
        );
        let expected = numbers(&alone);
        for (npus, size) in [(2, 2), (4, 2), (4, 4), (8, 4), (8, 8)] {
            let out = folder("several-experts-deep-several");
            let options = format!("{options} {}", dividing(0..npus, size));
            let said = done(
                &command_of(&model, true, &out, &options)
                    .output()
                    .expect("starts"),
            );
            let traffic = said.lines().find(|line| line.contains("took part"));
            println!("{}", traffic.unwrap_or_default());
            expect_near(
                &format!("{name}, {size} of {npus} NPUs"),
                &expected,
                &numbers(&out),
            );
        }
    }
}

#[test]
fn a_process_that_is_killed_ends_the_other_with_its_rank() {
    let out = folder("several-killed");
    let [first, second] = hosts("several-killed").map(|host| {
        let mut command = command(&out, &format!("--steps 100000 {host}"));
        command.spawn().expect("starts")
    });
    let limit = Instant::now() + Duration::from_secs(120);
    while !has_checkpoint(&out) && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut second = second;
    second.kill().expect("killed");
    let killed = Instant::now();
    let said = failed(end(first));
    expect_ended(
        killed,
        &[said],
        "rank 1 stopped the run",
        "its process is gone",
    );
    assert!(has_checkpoint(&out), "the last checkpoint is there");
    end(second);
}

/// The errors that a failed process prints.
fn failed(output: Output) -> String {
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    said
}

/// Two processes of a run, of which the second has a variable, NAME=VALUE, or more options.
fn pair(name: &str, options: &str, of_second: &str) -> [Child; 2] {
    let out = folder(name);
    let [first, second] = hosts(name).map(|host| format!("--steps {STEPS} {options} {host}"));
    let second = match of_second.split_once('=') {
        Some((variable, value)) => command(&out, &second).env(variable, value).spawn(),
        None => command(&out, &format!("{second} {of_second}")).spawn(),
    };
    let first = command(&out, &first).spawn();
    [first, second].map(|child| child.expect("starts"))
}

/// At the call of a function: of the first step, of the second's forward, backward and sum, for which
/// the other waits on its device.
#[test]
fn a_process_that_is_killed_at_any_point_of_a_step_ends_the_other() {
    let gone = ("rank 1 stopped the run", "its process is gone");
    for (call, (who, cause), has_begun) in [
        ("aclInit:1", ("hosts 1", "did not connect"), false),
        ("aclnnFlashAttentionVarLenScore:7", gone, true),
        ("aclnnFlashAttentionUnpaddingScoreGrad:3", gone, true),
        ("HcclAllReduce:2", gone, true),
    ] {
        let name = "several-killed-in-step";
        let abort = format!("ASCEND_SIM_ABORT={call}");
        let [first, second] = pair(name, "--rank-timeout 20", &abort);
        let killed = end(second);
        let since = Instant::now();
        assert_eq!(killed.status.code(), None, "{}", text(&killed.stderr));
        expect_ended(since, &[failed(end(first))], who, cause);
        let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        assert_eq!(has_checkpoint(&out), has_begun, "{call}");
    }
}

#[test]
fn a_process_without_collectives_or_of_other_data_ends_both_with_its_rank() {
    for (of_second, who, cause) in [
        (
            "ASCEND_SIM_LACKS=HcclAllReduce",
            "rank 1 stopped the run",
            "lacks HcclAllReduce",
        ),
        ("--rank 4", "rank 1 is of another run", "rank is 4, and "),
        (
            "--data colour.jsonl",
            "rank 1 is of another run",
            "data is ",
        ),
    ] {
        let begun = Instant::now();
        let said = pair("several-other", "", of_second).map(|child| failed(end(child)));
        expect_ended(begun, &said, who, cause);
    }
}

/// The other waits inside the operation.
#[test]
#[ignore = "half a minute of waiting: in the deep checks"]
fn a_process_that_does_not_come_to_the_sum_ends_both() {
    let begun = Instant::now();
    let ignore = "ASCEND_SIM_IGNORE=HcclAllReduce";
    let children = pair("several-ignores", "--rank-timeout 8", ignore);
    let said = children.map(|child| failed(end(child)));
    expect_ended(begun, &said, "stopped the run", "it did not reach");
}

/// Compares a run of twenty steps with that of one NPU: losses within 1e-6. Gradient norms drift
/// apart by the rounding of the updates before, at the rate of 1e-2 by 1.9e-6 on four NPUs.
fn expect_near(name: &str, expected: &[f64], found: &[f64]) {
    let losses = |numbers: &[f64]| -> Vec<f64> { numbers.iter().step_by(2).copied().collect() };
    let of_losses = apart(&losses(expected), &losses(found));
    let of_all = apart(expected, found);
    println!("{name}: losses {of_losses:.1e}, with norms {of_all:.1e}");
    assert!(of_losses <= 1e-6, "{name}: losses {of_losses:.1e}");
    assert!(of_all <= 4e-6, "{name}: with norms {of_all:.1e}");
}

/// Adapters and whole models, sharded and not, on several numbers of NPUs and in two processes:
/// against one NPU, and those with all in shards twice.
#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_up_to_eight_npus_learn_what_one_learns() {
    let whole = "--full --parts tower,merger,decoder --learning-rate 1e-3";
    for (name, options) in [("adapters", "--parts tower,decoder"), ("whole", whole)] {
        // A checkpoint takes longer than a step.
        let options = format!("--steps 20 {options} --checkpoint-every 20 --batch 8");
        let alone = folder("several-deep-one");
        let mut one = command(&alone, &format!("{options} --device ascend-sim"));
        done(&one.output().expect("starts"));
        let expected = numbers(&alone);
        let shardings = ["none", "optimizer", "gradients", "all"];
        let runs = shardings.map(|sharding| {
            let times = 1 + usize::from(sharding == "all");
            [(2, sharding, times), (4, sharding, 1), (8, sharding, 1)]
        });
        for (npus, sharding, times) in runs.into_iter().flatten() {
            let devices = (0..npus).map(|npu| format!(" --device ascend-sim:{npu}"));
            let devices: String = devices.collect();
            let logs = (0..times).map(|again| {
                let out = folder(&format!("several-deep-{again}"));
                let options = format!("{options}{devices} --shard {sharding}");
                let said = done(&command(&out, &options).output().expect("starts"));
                let traffic = said.lines().find(|line| line.contains("took part"));
                println!("{}", traffic.unwrap_or_default());
                let state = "checkpoint-00000020/state.safetensors";
                (
                    numbers(&out),
                    std::fs::read(out.join(state)).expect("a checkpoint"),
                )
            });
            let logs: Vec<_> = logs.collect();
            assert!(logs[0] == logs[times - 1], "{name}, {npus} NPUs, twice");
            expect_near(
                &format!("{name}, {npus} NPUs {sharding}"),
                &expected,
                &logs[0].0,
            );
        }
        for sharding in shardings {
            let out = folder("several-deep-hosts");
            let children = hosts("several-deep-hosts").map(|host| {
                let options = format!("{options} {host} --device ascend-sim:1 --shard {sharding}");
                command(&out, &options).spawn().expect("starts")
            });
            let _said = children.map(|child| done(&end(child)));
            let name = format!("{name}, 2 processes of 2 NPUs {sharding}");
            expect_near(&name, &expected, &numbers(&out));
        }
    }
}

/// A whole model of 16 million parameters in bf16, on two NPUs.
#[test]
#[ignore = "minutes: in the deep checks"]
fn plans_of_shards_are_near_what_the_pools_of_npus_count() {
    let above = folder("several-model");
    let model = above.join("model");
    std::fs::create_dir_all(&model).expect("a folder");
    let shapes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes/model");
    for file in std::fs::read_dir(shapes).expect("the example") {
        let path = file.expect("a file").path();
        std::fs::copy(&path, model.join(path.file_name().expect("a name"))).expect("copied");
    }
    let path = model.join("config.json");
    let text = std::fs::read_to_string(&path).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (name, number) in [
        ("hidden_size", 384),
        ("intermediate_size", 1024),
        ("num_hidden_layers", 10),
        ("num_attention_heads", 6),
    ] {
        config["text_config"][name] = number.into();
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12].into();
    config["vision_config"]["out_hidden_size"] = 384.into();
    std::fs::write(&path, config.to_string()).expect("written");
    let data = lines(&above);
    // Of a model this small, adapters are a larger part than of one that people train, and so is the
    // copy of them that no plan has: 3.5 of 55 MiB.
    let batch = "--batch 4";
    // Of few tokens, weights are most of the memory.
    let long = "--batch 32 --micro-tokens 2048";
    for (sharding, context, batch) in [
        ("none", 1, batch),
        ("optimizer", 1, batch),
        ("gradients", 1, batch),
        ("all", 1, batch),
        ("all", 1, long),
        ("none", 2, batch),
        ("all", 2, batch),
        ("all", 2, long),
    ] {
        let out = folder("several-planned");
        // Two micro-batches of each rank, so that the first one's sums are there.
        let divided = format!("--shard {sharding} --context {context}");
        let options = format!(
            "--full --precision bf16 --steps 2 --checkpoint-every 9 --device ascend-sim:0 --device \
             ascend-sim:1 {divided} {batch} --data {}",
            data.display()
        );
        let mut command = command(&out, &options);
        let said = done(&command.current_dir(&above).output().expect("starts"));
        expect_planned(&said, &format!("{divided} {batch}"));
    }
}

/// A text of lines of training.
fn lines(above: &Path) -> PathBuf {
    let data = above.join("lines.jsonl");
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "what is this ".repeat(24)},
        {"role": "assistant", "content": "a red circle ".repeat(12)},
    ]});
    std::fs::write(&data, format!("{line}\n").repeat(64)).expect("written");
    data
}

/// Compares the planned peak that a run prints with the one that the pools of its NPUs count.
fn expect_planned(said: &str, case: &str) {
    let line = said.lines().find(|line| line.contains("peak memory"));
    let line = line.expect("a line");
    println!("{case}: {line}");
    let mib = |after: &str| {
        let number = line.split(after).nth(1);
        let number = number.and_then(|rest| rest.trim().split(' ').next());
        let number = number.and_then(|number| number.parse::<f64>().ok());
        number.expect("MiB")
    };
    let (counted, planned) = (mib("of a step:"), mib("since the start,"));
    let is_near = (0.95 * counted..=1.05 * counted).contains(&planned);
    assert!(is_near, "{case}: {line}");
}

/// A whole model of 19 million parameters, most of them of 32 experts, in bf16 on two NPUs.
#[test]
#[ignore = "minutes: in the deep checks"]
fn plans_of_divided_experts_are_near_what_the_pools_of_npus_count() {
    let model = model_with_experts("several-experts-planned");
    let path = model.join("config.json");
    let text = std::fs::read_to_string(&path).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (name, number) in [
        ("hidden_size", 192),
        ("num_hidden_layers", 4),
        ("num_attention_heads", 6),
        ("head_dim", 32),
        ("moe_intermediate_size", 256),
        ("num_local_experts", 32),
        ("num_experts_per_tok", 4),
    ] {
        config["text_config"][name] = number.into();
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 4, 4].into();
    config["vision_config"]["out_hidden_size"] = 192.into();
    std::fs::write(&path, config.to_string()).expect("written");
    for size in [1, 2] {
        let options = format!(
            "--full --precision bf16 --steps 2 --batch 4 --checkpoint-every 9 --data {} {}",
            lines(&model).display(),
            dividing(0..2, size)
        );
        let out = folder("several-experts-planned-run");
        let output = command_of(&model, true, &out, &options).output();
        let said = done(&output.expect("starts"));
        expect_planned(&said, &format!("--expert-parallel {size}"));
    }
}

/// As `mrope serve` does.
#[test]
#[cfg(unix)]
fn a_token_that_others_may_read_opens_no_rendezvous() {
    use std::os::unix::fs::PermissionsExt as _;
    let [first, _] = hosts("several-open");
    let token = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("several-open.token");
    let mode = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(&token, mode).expect("set");
    let mut command = command(&folder("several-open"), &format!("--steps 1 {first}"));
    let refused = command.output().expect("starts");
    let said = text(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("chmod 600"),
        "{said}"
    );
}

#[test]
fn what_makes_no_run_is_refused() {
    let out = folder("several-refused");
    for (options, says) in [
        ("--device ascend-sim --device ascend-sim", "is named twice"),
        (
            "--device ascend-sim --device cpu",
            "do not sum with other devices",
        ),
        ("--hosts 2", "--rendezvous"),
        (
            "--hosts 2 --rendezvous 127.0.0.1:1",
            "several hosts need NPUs",
        ),
        (
            "--hosts 2 --rendezvous 127.0.0.1:1 --device ascend-sim",
            "--hosts needs --token-file",
        ),
        (
            "--device ascend-sim --rendezvous env",
            "needs the variable MASTER_PORT",
        ),
        (
            "--device cpu --device cpu --prove-cut",
            "computes on one device",
        ),
        ("--shard-optimizer", "name several with --device"),
        (
            "--shard gradients --device cpu --device cpu --no-recompute",
            "block by block; leave out --no-recompute",
        ),
        (
            "--shard all --device cpu --device cpu --samples 1",
            "leave out --samples",
        ),
        (
            "--shard all --device cpu --device cpu --loss dpo",
            "has no loss of preferences",
        ),
    ] {
        let refused = command(&out, &format!("--steps 1 {options}"))
            .output()
            .expect("starts");
        let said = text(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains(says),
            "{options}: {said}"
        );
    }
}
