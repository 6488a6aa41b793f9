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
    let fixed = "finetune model --random-weights --micro-tokens 512";
    command.args(fixed.split_whitespace());
    command.arg("--out").arg(out);
    for default in [
        ["--data", "train.jsonl"],
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
    let data = above.join("lines.jsonl");
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "what is this ".repeat(24)},
        {"role": "assistant", "content": "a red circle ".repeat(12)},
    ]});
    std::fs::write(&data, format!("{line}\n").repeat(8)).expect("written");
    // Of a model this small, adapters are a larger part than of one that people train, and so is the
    // copy of them that no plan has: 3.5 of 55 MiB.
    for sharding in ["none", "optimizer", "gradients", "all"] {
        let out = folder("several-planned");
        // Two micro-batches of each rank, so that the first one's sums are there.
        let options = format!(
            "--full --precision bf16 --steps 2 --batch 4 --checkpoint-every 9 --device \
             ascend-sim:0 --device ascend-sim:1 --shard {sharding} --data {}",
            data.display()
        );
        let mut command = command(&out, &options);
        let said = done(&command.current_dir(&above).output().expect("starts"));
        let line = said.lines().find(|line| line.contains("peak memory"));
        let line = line.expect("a line");
        println!("--shard {sharding}: {line}");
        let mib = |after: &str| {
            let number = line.split(after).nth(1);
            let number = number.and_then(|rest| rest.trim().split(' ').next());
            let number = number.and_then(|number| number.parse::<f64>().ok());
            number.expect("MiB")
        };
        let (counted, planned) = (mib("of a step:"), mib("since the start,"));
        let is_near = (0.95 * counted..=1.05 * counted).contains(&planned);
        assert!(is_near, "--shard {sharding}: {line}");
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
