//! `mrope finetune` as a user runs it, on the example's model and data.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

pub(crate) fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes")
}

pub(crate) fn command(out: &Path, options: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
    command.current_dir(example());
    let fixed = "finetune model --random-weights --data train.jsonl --batch 4 --steps 6 \
                 --checkpoint-every 2 --learning-rate 1e-2 --micro-tokens 512";
    command.args(fixed.split_whitespace());
    command
        .arg("--out")
        .arg(out)
        .args(options.split_whitespace());
    command
}

pub(crate) fn run(out: &Path, options: &str) -> Output {
    command(out, options).output().expect("the program starts")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

/// A number of each step, by the log.
fn column(out: &Path, name: &str) -> Vec<f64> {
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let lines = log.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line[name].as_f64().expect("a number")
    });
    lines.collect()
}

/// Log, checkpoint and trained weights; the log without the fields of clock and machine.
pub(crate) fn files(out: &Path, trained: &str) -> Vec<Vec<u8>> {
    let state = "checkpoint-00000006/state.safetensors";
    let paths = ["checkpoint-00000006/run.json", state, trained];
    let read = |path: &str| std::fs::read(out.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut files = paths.map(read).to_vec();
    let log = text(&read("log.jsonl"));
    files.extend(log.lines().map(|line| {
        let mut line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let fields = line.as_object_mut().expect("an object");
        if fields.contains_key("loss") {
            fields.remove("tokens_per_second").expect("the speed");
            fields.remove("memory_bytes").expect("the memory");
        }
        line.to_string().into_bytes()
    }));
    files
}

/// The answers of a run to its questions, for the first and the last time: those that are right.
fn right_answers(out: &Path) -> [usize; 2] {
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let count = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let answers = line["answers"].as_array()?.clone();
        let right = answers
            .iter()
            .filter(|answer| answer["expected"] == answer["found"]);
        Some(right.count())
    };
    let counts: Vec<usize> = log.lines().filter_map(count).collect();
    [counts[0], counts[counts.len() - 1]]
}

/// The commands of docs/finetune.md and docs/rewards.md.
#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn the_example_learns_from_rewards() {
    let out = folder("finetune-rewards");
    let [shapes, colours, rewarded] = ["shapes", "colours", "rewarded"].map(|name| out.join(name));
    let all = "--parts tower,merger,decoder";
    let of_colours = format!("{all} --data colour.jsonl --val colour_test.jsonl --samples 32");
    let path = |folder: &Path| folder.display().to_string();
    for (folder, model, options) in [
        (
            &shapes,
            "model".to_owned(),
            format!(
                "--random-weights --full {all} --data train.jsonl --val test.jsonl \
                 --learning-rate 2e-3 --epochs 20"
            ),
        ),
        (
            &colours,
            path(&shapes.join("model")),
            format!("{of_colours} --rank 16 --learning-rate 5e-3 --epochs 15"),
        ),
        (
            &rewarded,
            path(&shapes.join("model")),
            format!(
                "{of_colours} --adapter {} --loss grpo --reward exact --group 16 --max-new 8 \
                 --learning-rate 1e-3 --epochs 6",
                path(&colours.join("adapter"))
            ),
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
        command.current_dir(example());
        command.args(["finetune", &model]).arg("--out").arg(folder);
        let done = command.args(options.split_whitespace()).output();
        let done = done.expect("the program starts");
        assert!(done.status.success(), "{}", text(&done.stderr));
    }
    let [before, after] = right_answers(&rewarded);
    println!("{before} of 32 answers were right, and {after} are");
    assert!(
        (15..25).contains(&before) && after >= 28,
        "{before} {after}"
    );
}

/// The first update's ratios are 1, the curves have the rewards, and a command that fails is one
/// error.
#[test]
fn a_run_over_rewarded_answers_logs_their_means() {
    let out = folder("finetune-rewarded");
    let options = "--loss grpo --group 3 --max-new 4 --beta 0.1 --val test.jsonl --samples 1";
    let rewarded = |out: &Path, reward: &str| {
        let mut command = command(out, options);
        command.args(["--reward-timeout", "1", "--reward-command", reward]);
        command.output().expect("the program starts")
    };
    // A number that depends on the answer.
    let done = rewarded(&out, "while read -r line; do echo $((${#line} % 5)); done");
    let told = text(&done.stderr);
    assert!(done.status.success(), "{told}");
    assert!(
        told.contains(" reward ") && told.contains("validation reward "),
        "{told}"
    );
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let first = log
        .lines()
        .find(|line| line.contains("gradient_norm"))
        .expect("a step");
    let first: serde_json::Value = serde_json::from_str(first).expect("JSON");
    for (name, expected) in [
        ("ratio_min", 1.0),
        ("ratio_max", 1.0),
        ("kl", 0.0),
        ("sampled_apart", 0.0),
    ] {
        assert_eq!(first[name].as_f64(), Some(expected), "{name}: {first}");
    }
    for name in [
        "reward",
        "reward_std",
        "entropy",
        "answer_tokens",
        "clipped_low",
    ] {
        assert!(first[name].is_number(), "{name}: {first}");
    }
    let curves = std::fs::read_to_string(out.join("curves.svg")).expect("curves");
    assert!(curves.contains("sampled answers") && !curves.contains("chosen"));

    let done = rewarded(&folder("finetune-unrewarded"), "cat > /dev/null");
    let told = text(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{told}");
    assert!(
        told.contains("wrote nothing for 1 s after 0 of 12 rewards"),
        "{told}"
    );
}

#[cfg(feature = "ascend-sim")]
#[test]
fn a_run_on_an_npu_ends_with_its_memory_and_where_operations_ran() {
    let done = run(&folder("finetune-usage"), "--device ascend-sim");
    let told = text(&done.stderr);
    assert!(done.status.success(), "{told}");
    for part in ["peak device memory: ", "on the host or the AI CPU: none"] {
        assert!(told.contains(part), "{told}");
    }
}

/// Operators and launches of this crate's kernels in a step, by a run of two steps and one of one.
#[cfg(feature = "ascend-sim")]
fn operators_of_a_step(layers: usize, options: &str) -> i64 {
    let count = |steps: usize| {
        let out = folder(&format!("finetune-operators-{layers}-{steps}"));
        std::fs::create_dir_all(&out).expect("a folder");
        let model = out.join("model");
        std::fs::create_dir(&model).expect("a folder");
        for file in std::fs::read_dir(example().join("model")).expect("the model") {
            let file = file.expect("a file").path();
            let name = file.file_name().expect("a name").to_owned();
            std::fs::copy(&file, model.join(name)).expect("a copy");
        }
        let config = std::fs::read_to_string(model.join("config.json")).expect("a config");
        let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
        config["text_config"]["num_hidden_layers"] = layers.into();
        std::fs::write(model.join("config.json"), config.to_string()).expect("written");
        let files = ["operators", "launches"].map(|name| out.join(name));
        let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
        let done = command
            .current_dir(example())
            .env("ASCEND_SIM_OPERATORS", &files[0])
            .env("ASCEND_SIM_LAUNCHES", &files[1])
            // Each call has a first phase, which is what is recorded.
            .env("ASCEND_SIM_LACKS", "aclSetAclOpExecutorRepeatable")
            .args([
                "finetune",
                "--random-weights",
                "--data",
                "train.jsonl",
                "--batch",
                "2",
            ])
            .args(["--device", "ascend-sim", "--precision", "bf16", "--steps"])
            .arg(steps.to_string())
            .arg("--out")
            .arg(out.join("run"))
            .arg(&model)
            .args(options.split_whitespace())
            .output()
            .expect("the program starts");
        assert!(done.status.success(), "{}", text(&done.stderr));
        let [operators, launches] = files.map(|file| std::fs::read_to_string(file).expect("lines"));
        let launches = launches.lines().filter(|line| line.contains(" rope_"));
        (operators.lines().count() + launches.count()) as i64
    };
    count(2) - count(1)
}

/// `benches/npu_step.py` lists them.
#[cfg(feature = "ascend-sim")]
#[test]
fn a_decoder_layer_in_a_step_on_an_npu_takes_a_hundred_operators_and_launches() {
    let [two, four] = [2, 4].map(|layers| operators_of_a_step(layers, ""));
    let of_layer = (four - two) / 2;
    assert!(
        (50..=100).contains(&of_layer),
        "{of_layer}, of two layers {two}, of four {four}"
    );
}

#[test]
fn a_run_leaves_an_adapter_and_another_does_not_replace_it() {
    let out = folder("finetune-adapter");
    let done = run(&out, "--val test.jsonl --samples 1");
    let told = text(&done.stderr);
    assert!(done.status.success(), "{told}");
    assert!(told.contains("peak memory of a step: "), "{told}");
    let saved = text(&done.stdout);
    assert!(saved.trim_end().ends_with("adapter"), "{saved}");
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(
        lines.len(),
        9,
        "answers, steps, a validation, answers: {log}"
    );
    assert!(
        lines[0].starts_with("{\"step\":0,\"answers\":[{\"line\":1,"),
        "{log}"
    );
    assert!(lines[7].contains("validation_loss"), "{log}");
    assert!(lines[8].contains("\"expected\":\"yellow\""), "{log}");
    assert!(out.join("adapter/adapter_config.json").is_file());
    let curves = std::fs::read_to_string(out.join("curves.svg")).expect("curves");
    assert!(curves.contains("validation") && curves.trim_end().ends_with("</svg>"));

    let again = text(&run(&out, "--val test.jsonl").stderr);
    for part in ["is of an earlier run", "--resume"] {
        assert!(again.contains(part), "{again}");
    }
    let other = run(&out, "--resume --dropout 0.1");
    assert!(
        text(&other.stderr).contains("dropout was 0.0 and is 0.1 now"),
        "{}",
        text(&other.stderr)
    );
    let same = run(&out, "--resume --quiet");
    assert!(same.status.success(), "{}", text(&same.stderr));
    assert_eq!(text(&same.stderr), "");
}

/// Of each option that says what is trained, the trained parameters, and a second run that starts
/// from its adapter.
#[test]
fn what_is_trained_is_saved_and_trained_on() {
    let base = folder("finetune-trained-base");
    let done = run(&base, "--full --parts tower,merger,decoder --layers 0");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let model = base.join("model");
    let go = |out: &Path, options: &str| {
        let fixed = "--data train.jsonl --batch 4 --steps 4 --checkpoint-every 2 \
                     --learning-rate 1e-2 --micro-tokens 512";
        let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
        let command = command.current_dir(example()).arg("finetune").arg(&model);
        let command = command.args(fixed.split_whitespace()).arg("--out").arg(out);
        let command = command.args(options.split_whitespace());
        command.output().expect("the program starts")
    };
    let first = folder("finetune-trained-1");
    let options = "--rank 4 --train-embeddings --full-parts merger --layers 1-";
    let done = go(&first, options);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let config = std::fs::read_to_string(first.join("adapter/adapter_config.json"));
    let config = config.expect("a configuration");
    for part in [
        "embed_tokens",
        "model.visual.merger",
        "layers.1.",
        "\"r\": 4",
    ] {
        assert!(config.contains(part), "{part}: {config}");
    }
    assert!(!config.contains("layers.0."), "{config}");

    // It starts where the first ended, and again where it was stopped.
    let adapter = first.join("adapter").display().to_string();
    let second = folder("finetune-trained-2");
    let done = go(&second, &format!("--adapter {adapter} --seed 0"));
    assert!(done.status.success(), "{}", text(&done.stderr));
    let [before, after] = [&first, &second].map(|out| column(out, "loss"));
    assert!(after[0] < before[0] - 0.3, "{before:?} {after:?}");
    let done = go(&second, &format!("--adapter {adapter} --resume --quiet"));
    assert!(done.status.success(), "{}", text(&done.stderr));
    let other = go(&second, "--rank 4 --resume");
    assert!(!other.status.success());

    for (options, says) in [
        ("--rank 8", "--rank differs"),
        ("--alpha 1", "--alpha differs"),
        ("--dropout 0.1", "--dropout differs"),
        ("--rslora", "--rslora differs"),
        ("--parts tower", "--parts differs"),
        ("--targets q_proj", "--targets differs"),
        ("--layers 0", "--layers differs"),
        ("--full-parts tower", "--full-parts differs"),
        ("--layers 0-9", "those of the decoder are 0 to 1"),
        ("--full", "cannot be used with"),
        ("--random-weights", "cannot be used with"),
    ] {
        let refused = go(
            &folder("finetune-refused"),
            &format!("--adapter {adapter} {options}"),
        );
        let told = text(&refused.stderr);
        assert!(
            !refused.status.success() && told.contains(says),
            "{options}: {told}"
        );
    }
    // What is equal may be given.
    let same =
        "--rank 4 --alpha 8 --parts decoder --layers 1 --train-embeddings --full-parts merger";
    let planned = go(
        &folder("finetune-same"),
        &format!("--adapter {adapter} {same} --plan"),
    );
    assert!(planned.status.success(), "{}", text(&planned.stderr));

    for (options, says) in [
        ("--full --rank 4", "cannot be used with"),
        ("--full --full-parts tower", "cannot be used with"),
        ("--parts tower --layers 0", "add decoder to --parts"),
        ("--full-parts decoder", "name each part in one of them"),
        ("--layers 1-0", "0 is below 1"),
    ] {
        let refused = go(&folder("finetune-refused"), options);
        let told = text(&refused.stderr);
        assert!(
            !refused.status.success() && told.contains(says),
            "{options}: {told}"
        );
    }
    for (command, options) in [
        ("generate", "--prompt a --max-new 2 --adapter"),
        ("merge", "--out MERGED --adapter"),
    ] {
        let merged = folder("finetune-trained-merged").display().to_string();
        let options = options.replace("MERGED", &merged);
        let mut program = Command::new(env!("CARGO_BIN_EXE_mrope"));
        let program = program.current_dir(example()).arg(command).arg(&model);
        let done = program
            .args(options.split_whitespace())
            .arg(second.join("adapter"))
            .output();
        let done = done.expect("the program starts");
        assert!(done.status.success(), "{command}: {}", text(&done.stderr));
    }
}

/// GLM-4.1V and Qwen3.5, by tests/fixtures/generate/finetune_command.py: the largest relative
/// differences of losses and norms. All records are one batch, so that their order makes no
/// difference.
fn follow_transformers(steps: usize) {
    const MODES: [(&str, &str); 2] = [
        ("lora", "--rank 4 --alpha 8 --learning-rate 2e-3"),
        (
            "full",
            "--full --parts tower,merger,decoder --learning-rate 2e-4",
        ),
    ];
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for (family, layer) in [
        ("glm4v_tiny", "layers.0.mlp.gate_up_proj.lora_A.weight"),
        (
            "qwen3_5_tiny",
            "layers.0.linear_attn.in_proj_qkv.lora_A.weight",
        ),
    ] {
        let path = fixtures.join("finetune").join(family).join("command.json");
        let curves = std::fs::read_to_string(path).expect("losses");
        let curves: serde_json::Value = serde_json::from_str(&curves).expect("JSON");
        for (mode, options) in MODES {
            let out = folder(&format!("finetune-{family}-{mode}-{steps}"));
            let fixed = format!(
                "finetune models/{family} --data finetune/command.jsonl --batch 4 --steps {steps} \
                 --schedule constant --warmup 0 --weight-decay 0.01 --seed 11 --micro-tokens 128"
            );
            let done = Command::new(env!("CARGO_BIN_EXE_mrope"))
                .current_dir(&fixtures)
                .args(fixed.split_whitespace())
                .args(options.split_whitespace())
                .arg("--out")
                .arg(&out)
                .output()
                .expect("the program starts");
            assert!(done.status.success(), "{}", text(&done.stderr));
            // Norms grow apart before losses, most of all with states. A whole model may leave
            // transformers as far as that leaves itself from weights that differ in their last bit:
            // Qwen3.5 after ten steps.
            for (log_name, reference_name, within) in [
                ("loss", "losses", 1e-4),
                ("gradient_norm", "gradient_norms", 1e-2),
            ] {
                let found = column(&out, log_name);
                let expected = curves[mode][reference_name].as_array().expect("numbers");
                assert!(found.len() == steps && expected.len() >= steps);
                let spread = &curves[mode][format!("{reference_name}_spread")];
                for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let apart = (found / expected.as_f64().expect("a number") - 1.0).abs();
                    println!("{family} {mode} {log_name}, step {step}: {apart:.1e}");
                    let within = spread[step]
                        .as_f64()
                        .map_or(within, |spread| spread.max(within));
                    assert!(
                        within < 1.0 && apart < within,
                        "{family} {mode} {log_name}, step {step}: {apart}"
                    );
                }
            }
            if mode == "lora" {
                let path = out.join("adapter/adapter_model.safetensors");
                let adapter = std::fs::read(path).expect("an adapter");
                assert!(text(&adapter).contains(layer));
            }
        }
    }
}

#[test]
fn first_losses_of_other_families_are_those_of_transformers() {
    follow_transformers(3);
}

#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn all_losses_of_other_families_are_those_of_transformers() {
    follow_transformers(20);
}

#[test]
fn a_plan_needs_no_weights_and_says_what_fits() {
    let out = folder("finetune-plan");
    let done = run(&out, "--plan --memory 0.01");
    let shown = text(&done.stdout);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let most = shown
        .split("micro-batches of at most ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let most: usize = most.and_then(|most| most.parse().ok()).expect("a number");
    assert!((300..3000).contains(&most), "{shown}");
    assert!(!out.exists());
}

/// `ulimit -f` stands for a full disk; ignored, its signal becomes an error of the write.
#[cfg(unix)]
#[test]
fn ctrl_c_and_a_full_disk_lose_no_step() {
    let (straight, broken) = (folder("finetune-whole"), folder("finetune-broken"));
    let done = run(&straight, "");
    assert!(done.status.success(), "{}", text(&done.stderr));

    let mut child = command(&broken, "").spawn().expect("the program starts");
    let log = broken.join("log.jsonl");
    while std::fs::metadata(&log).map_or(0, |log| log.len()) == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status();
    assert!(sent.is_ok_and(|sent| sent.success()));
    let ended = child.wait().expect("it ends");
    assert_eq!(
        ended.code(),
        Some(130),
        "the code of an interrupted program"
    );
    let steps = || {
        std::fs::read_to_string(&log)
            .expect("a log")
            .lines()
            .count()
    };
    let stopped = steps();
    assert!((1..6).contains(&stopped), "{stopped}");

    let program = command(&broken, "--resume");
    let full = Command::new("sh")
        .current_dir(example())
        .args(["-c", "trap '' XFSZ; ulimit -f 64 && exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args())
        .output()
        .expect("a shell");
    let told = text(&full.stderr);
    assert!(
        !full.status.success() && !told.contains("panicked"),
        "{told}"
    );
    assert!(
        told.contains("state.safetensors") && told.contains("too large"),
        "{told}"
    );
    assert!(
        broken
            .join(format!("checkpoint-{stopped:08}/run.json"))
            .is_file()
    );

    let done = run(&broken, "--resume");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let trained = "adapter/adapter_model.safetensors";
    assert!(files(&straight, trained) == files(&broken, trained));
}

#[test]
fn one_step_is_the_same_in_four_cuts() {
    let done = run(
        &folder("finetune-cut"),
        "--prove-cut --full --parts tower,merger,decoder",
    );
    assert!(done.status.success(), "{}", text(&done.stderr));
    let shown = text(&done.stdout);
    let numbers = shown
        .split_whitespace()
        .filter_map(|word| word.trim_end_matches([',', '.']).parse::<f64>().ok());
    let small: Vec<f64> = numbers.filter(|number| *number < 1.0).collect();
    assert_eq!(small.len(), 3, "{shown}");
    assert!(small.iter().all(|number| *number < 1e-5), "{shown}");
}

#[test]
fn wrong_inputs_are_one_clear_error() {
    let out = folder("finetune-wrong");
    for (options, expected) in [
        ("--targets q_prog", "no layer for adapters is called q_prog"),
        ("--data nothing.jsonl", "nothing.jsonl"),
        ("--micro-tokens 3", "tokens"),
        ("--resume", "no complete checkpoint"),
        ("--dropout 1.5", "dropout"),
        ("--max-norm=-1", "--max-norm is -1; expected"),
        ("--learning-rate=-1", "--learning-rate is -1; expected"),
        (
            "--max-tokens 3 --on-error stop",
            "the limit is 3 (--max-tokens)",
        ),
        ("--max-norm NaN", "--max-norm is NaN; expected"),
    ] {
        let failed = Command::new(env!("CARGO_BIN_EXE_mrope"))
            .current_dir(example())
            .args("finetune model --random-weights --out".split_whitespace())
            .arg(&out)
            .args(options.split_whitespace())
            .args((!options.contains("--data")).then_some("--data=train.jsonl"))
            .output()
            .expect("the program starts");
        let shown = text(&failed.stderr);
        assert!(!failed.status.success(), "{options}");
        assert!(
            shown.contains(expected) && !shown.contains("panicked"),
            "{options}: {shown}"
        );
    }
}

/// A run that is killed at any moment and continued ends with the bytes of one that was not.
#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn a_killed_run_continues_to_the_bit() {
    for (options, trained) in [
        ("--dropout 0.1", "adapter/adapter_model.safetensors"),
        ("--full", "model/model.safetensors"),
    ] {
        let straight = folder("finetune-straight");
        let started = std::time::Instant::now();
        let done = run(&straight, options);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let whole = started.elapsed();
        let expected = files(&straight, trained);
        let killed = folder("finetune-killed");
        for kill in 1..=15 {
            // Moments that fall into all parts of a run, over and over.
            let after = whole.mul_f64((f64::from(kill) * 0.618_034).fract());
            let _none = std::fs::remove_dir_all(&killed);
            let mut child = command(&killed, options)
                .spawn()
                .expect("the program starts");
            std::thread::sleep(after);
            let _ended = child.kill();
            child.wait().expect("it ends");
            let mut child = command(&killed, &format!("{options} --resume"));
            let mut done = child.output().expect("the program starts");
            if text(&done.stderr).contains("no complete checkpoint") {
                done = run(&killed, options);
            }
            assert!(done.status.success(), "{after:?}: {}", text(&done.stderr));
            assert!(
                files(&killed, trained) == expected,
                "killed after {after:?}"
            );
        }
        assert!(whole > Duration::ZERO);
    }
}

#[cfg(all(feature = "ascend-sim", feature = "wgpu"))]
#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn other_devices_follow_the_losses_of_the_cpu() {
    for options in ["", "--full --parts tower,merger,decoder"] {
        let on = |device: &str| {
            let out = folder(&format!("finetune-{device}"));
            let done = run(&out, &format!("--device {device} {options}"));
            assert!(done.status.success(), "{device}: {}", text(&done.stderr));
            column(&out, "loss")
        };
        let expected = on("cpu");
        for device in ["gpu", "ascend-sim"] {
            let found = on(device);
            let apart = expected.iter().zip(&found);
            let apart = apart.map(|(cpu, other)| ((cpu - other) / cpu).abs());
            let apart = apart.fold(0.0, f64::max);
            println!("{device} {options}: {apart:.1e} over {} steps", found.len());
            assert!(
                apart < 1e-3 && found.len() == expected.len(),
                "{device}: {apart}"
            );
        }
    }
}
