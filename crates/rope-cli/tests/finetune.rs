//! `mrope finetune` as a user runs it, on the example's model and data.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes")
}

fn command(out: &Path, options: &str) -> Command {
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

fn run(out: &Path, options: &str) -> Output {
    command(out, options).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

/// Log, checkpoint and what was trained.
fn files(out: &Path, trained: &str) -> Vec<Vec<u8>> {
    let state = "checkpoint-00000006/state.safetensors";
    let paths = ["log.jsonl", state, "checkpoint-00000006/run.json", trained];
    let read = |path: &str| std::fs::read(out.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    paths.map(read).to_vec()
}

#[test]
fn a_run_leaves_an_adapter_and_another_does_not_replace_it() {
    let out = folder("finetune-adapter");
    let done = run(&out, "--val test.jsonl");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let saved = text(&done.stdout);
    assert!(saved.trim_end().ends_with("adapter"), "{saved}");
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    assert_eq!(log.lines().count(), 7, "six steps and a validation: {log}");
    assert!(
        log.lines()
            .last()
            .is_some_and(|line| line.contains("validation_loss"))
    );
    assert!(out.join("adapter/adapter_config.json").is_file());

    let again = run(&out, "--val test.jsonl");
    assert!(
        text(&again.stderr).contains("is of an earlier run"),
        "{}",
        text(&again.stderr)
    );
    let other = run(&out, "--resume --dropout 0.1");
    assert!(
        text(&other.stderr).contains("dropout was 0.0 and is 0.1 now"),
        "{}",
        text(&other.stderr)
    );
    let same = run(&out, "--resume");
    assert!(same.status.success(), "{}", text(&same.stderr));
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
        ("--targets q_prog", "no linear layer is called q_prog"),
        ("--data nothing.jsonl", "nothing.jsonl"),
        ("--micro-tokens 3", "tokens"),
        ("--resume", "no complete checkpoint"),
        ("--dropout 1.5", "dropout"),
        ("--max-norm=-1", "norm to clip at = -1"),
        ("--max-norm NaN", "norm to clip at = NaN"),
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

/// Losses of the steps, by the log.
#[cfg(all(feature = "ascend-sim", feature = "wgpu"))]
fn losses(out: &Path) -> Vec<f64> {
    let log = std::fs::read_to_string(out.join("log.jsonl")).expect("a log");
    let lines = log.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line["loss"].as_f64().expect("a loss")
    });
    lines.collect()
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
            losses(&out)
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
