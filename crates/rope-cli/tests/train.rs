//! `mrope train` as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::program::{mrope, says, text};
use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

#[test]
fn json_is_one_object_with_the_promised_keys_and_the_files_exist() {
    let out = folder("json");
    let path = out.to_str().expect("UTF-8");
    let run = |last: &[&str]| {
        let options = "train --json --steps 3 --batch 2 --test-questions 20 --out";
        let options: Vec<&str> = options.split(' ').chain([path]).collect();
        mrope(&[&options, last].concat())
    };
    let done = run(&[]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report: Value = serde_json::from_slice(&done.stdout).expect("one object");
    for key in ["accuracy", "loss", "steps", "seconds", "tokens_per_second"] {
        assert!(report[key].is_number(), "{key}");
    }
    assert_eq!(report["losses"].as_array().map(Vec::len), Some(3));
    assert!(!done.stderr.is_empty(), "progress goes to standard error");

    for (_, file) in report["files"].as_object().expect("files") {
        let file = PathBuf::from(file.as_str().expect("a path"));
        assert!(file.exists(), "{}", file.display());
    }
    for plot in ["curves.svg", "attention.svg"] {
        let svg = std::fs::read_to_string(out.join(plot)).expect("a plot");
        assert!(svg.contains("<text") && svg.trim_end().ends_with("</svg>"));
    }
    let model = std::fs::read(out.join("model.safetensors")).expect("a model");
    let model = safetensors::SafeTensors::deserialize(&model).expect("safetensors");
    assert!(model.names().contains(&"word.weight"));

    // A finished run that is resumed has nothing left to do and says the same.
    let again = run(&["--resume"]);
    let again: Value = serde_json::from_slice(&again.stdout).expect("one object");
    assert_eq!(again["losses"], report["losses"]);
    assert_eq!(again["accuracy"], report["accuracy"]);
}

/// The bytes of a path that are no text are shown as such, and the report is whole.
#[cfg(target_os = "linux")]
#[test]
fn json_is_whole_where_the_folder_is_no_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    let out = folder("no-text").join(OsStr::from_bytes(b"run-\xff"));
    let options = "train --json --quiet --steps 2 --batch 2 --test-questions 20 --out";
    let done = Command::new(env!("CARGO_BIN_EXE_mrope"))
        .args(options.split(' '))
        .arg(&out)
        .output()
        .expect("the program starts");
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert_eq!(text(&done.stderr), "", "--quiet prints no progress");
    assert!(out.join("model.safetensors").exists());
    let report: Value = serde_json::from_slice(&done.stdout).expect("one object");
    let model = report["files"]["model"].as_str().expect("a path");
    assert!(model.ends_with("run-\u{fffd}/model.safetensors"), "{model}");
}

#[test]
fn a_new_run_leaves_the_earlier_checkpoint_until_its_own_is_whole() {
    let out = folder("anew");
    let path = out.to_str().expect("UTF-8");
    let run = |steps: &str, last: &[&str]| {
        let options = ["train", "--batch", "2", "--test-questions", "2", "--out"];
        mrope(&[&options, &[path, "--steps", steps][..], last].concat())
    };
    let checkpoints = || {
        let entries = std::fs::read_dir(&out).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| text(entry.expect("an entry").file_name().as_encoded_bytes()))
            .filter(|name| name.contains("checkpoint"))
            .collect();
        names.sort();
        names
    };
    assert!(run("3", &[]).status.success());
    assert_eq!(checkpoints(), ["checkpoint-000003"]);

    // This one cannot save: a file is where its folder should be.
    let obstacle = out.join("mrope-checkpoint.partial");
    std::fs::write(&obstacle, "").expect("writes");
    assert_eq!(run("2", &[]).status.code(), Some(1));
    std::fs::remove_file(&obstacle).expect("removes");
    assert_eq!(checkpoints(), ["checkpoint-000003"]);
    assert!(run("3", &["--resume"]).status.success());

    // Of the same name, and of a lower one.
    for steps in ["3", "2"] {
        let anew = run(steps, &[]);
        assert!(anew.status.success(), "{}", text(&anew.stderr));
        let said = text(&anew.stderr);
        says(&said, "checkpoint-000003 is of an earlier run");
        assert_eq!(checkpoints(), [format!("checkpoint-00000{steps}")]);
    }
}

const STEPS: &str =
    "train --json --steps 6 --checkpoint-every 3 --batch 2 --test-questions 2 --out";
const FILES: [&str; 3] = ["model.bpk", "optimizer.bpk", "run.json"];
const PARTIAL: &str = "mrope-checkpoint.partial";
const REPLACED: &str = "mrope-checkpoint.replaced";

fn copy(from: &Path, to: &Path, files: &[&str]) {
    std::fs::create_dir_all(to).expect("creates");
    for file in files {
        std::fs::copy(from.join(file), to.join(file)).expect("copies");
    }
}

/// The losses of a run that continues the one in a folder, and leaves one checkpoint there.
fn resumed(out: &Path, state: &str) -> Value {
    let path = out.to_str().expect("UTF-8");
    let options: Vec<&str> = STEPS.split(' ').chain([path, "--resume"]).collect();
    let run = mrope(&options);
    assert!(run.status.success(), "{state}: {}", text(&run.stderr));
    assert!(out.join("checkpoint-000006").is_dir(), "{state}");
    for gone in ["checkpoint-000003", PARTIAL, REPLACED] {
        assert!(!out.join(gone).exists(), "{state}: {gone}");
    }
    let report: Value = serde_json::from_slice(&run.stdout).expect("one object");
    report["losses"].clone()
}

/// Two checkpoints of one run, after 3 steps and after 6, and the losses of all steps. The earlier
/// one is left by a run that was killed.
fn two_checkpoints(name: &str) -> ([PathBuf; 2], Value) {
    let (whole, killed) = (
        folder(&format!("{name}-whole")),
        folder(&format!("{name}-killed")),
    );
    let options = |out: &Path| -> Vec<String> {
        let words = STEPS.split(' ').map(str::to_owned);
        words.chain([out.display().to_string()]).collect()
    };
    let run = Command::new(env!("CARGO_BIN_EXE_mrope"))
        .args(options(&whole))
        .output()
        .expect("the program starts");
    let report: Value = serde_json::from_slice(&run.stdout).expect("one object");
    let earlier = killed.join("checkpoint-000003");
    for _ in 0..20 {
        std::fs::remove_dir_all(&killed).ok();
        let mut child = Command::new(env!("CARGO_BIN_EXE_mrope"))
            .args(options(&killed))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        while !earlier.is_dir() && child.try_wait().expect("it started").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().ok();
        child.wait().expect("it ends");
        if earlier.is_dir() {
            return (
                [earlier, whole.join("checkpoint-000006")],
                report["losses"].clone(),
            );
        }
    }
    panic!("every run ended before it was killed");
}

/// Every state of the folder that a kill can leave, from the first byte that is written to the last
/// file that is removed.
#[test]
fn a_run_that_is_killed_while_it_saves_continues_with_the_same_numbers() {
    let ([earlier, later], losses) = two_checkpoints("states");
    let mut states: Vec<(String, PathBuf)> = Vec::new();
    let mut state = |label: String, make: &dyn Fn(&Path)| {
        let out = folder(&format!("state-{}", states.len()));
        make(&out);
        states.push((label, out));
    };
    for (count, file) in FILES.iter().enumerate() {
        let bytes = std::fs::read(later.join(file)).expect("reads");
        for written in [bytes.len() / 3, bytes.len()] {
            state(format!("{written} bytes of {file}"), &|out: &Path| {
                copy(&earlier, &out.join("checkpoint-000003"), &FILES);
                copy(&later, &out.join(PARTIAL), &FILES[..count]);
                std::fs::write(out.join(PARTIAL).join(file), &bytes[..written]).expect("writes");
            });
        }
    }
    state("renamed".to_owned(), &|out: &Path| {
        copy(&earlier, &out.join("checkpoint-000003"), &FILES);
        copy(&later, &out.join("checkpoint-000006"), &FILES);
    });
    for kept in [1, 3] {
        state(format!("{kept} files of the one before"), &|out: &Path| {
            copy(&earlier, &out.join(REPLACED), &FILES[..kept]);
            copy(&later, &out.join("checkpoint-000006"), &FILES);
        });
    }
    // A run that starts anew in the folder of an earlier one replaces a checkpoint of its own name.
    state("between two names".to_owned(), &|out: &Path| {
        copy(&earlier, &out.join(REPLACED), &FILES);
        copy(&earlier, &out.join(PARTIAL), &FILES);
    });
    for (label, out) in states {
        assert_eq!(resumed(&out, &label), losses, "{label}");
        std::fs::remove_dir_all(out).expect("removes");
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_the_name_of_its_file() {
    let ([earlier, _], _) = two_checkpoints("damaged");
    let out = earlier.parent().expect("a folder").to_owned();
    for name in &FILES[..2] {
        let file = earlier.join(name);
        let whole = std::fs::read(&file).expect("reads");
        for (at, bit) in [(0, 1), (whole.len() / 2, 0x40), (whole.len() - 1, 0x80)] {
            let mut damaged = whole.clone();
            damaged[at] ^= bit;
            std::fs::write(&file, &damaged).expect("writes");
            let path = out.to_str().expect("UTF-8");
            let options: Vec<&str> = STEPS.split(' ').chain([path, "--resume"]).collect();
            let refused = mrope(&options);
            let message = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{message}");
            says(&message, name);
            says(&message, "damaged");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
        std::fs::write(&file, &whole).expect("writes");
    }
    resumed(&out, "whole again");
}

#[test]
fn a_history_of_fewer_steps_than_its_checkpoint_is_refused() {
    let ([earlier, _], _) = two_checkpoints("history");
    let file = earlier.join("run.json");
    let whole = std::fs::read_to_string(&file).expect("reads");
    let mut run: Value = serde_json::from_str(&whole).expect("an object");
    let losses = run["history"]["losses"].as_array_mut().expect("losses");
    losses.truncate(1);
    std::fs::write(&file, run.to_string()).expect("writes");
    let out = earlier.parent().expect("a folder");
    let path = out.to_str().expect("UTF-8");
    let refused = mrope(
        &STEPS
            .split(' ')
            .chain([path, "--resume"])
            .collect::<Vec<_>>(),
    );
    let message = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{message}");
    says(&message, "it has 1 losses and 3 accuracies");
    std::fs::write(&file, whole).expect("writes");
    resumed(out, "whole again");
}

/// The system ends a process at the byte by which a file becomes longer than the process may write.
#[cfg(unix)]
#[test]
fn a_write_that_ends_the_process_costs_the_steps_since_the_last_checkpoint_only() {
    use std::os::unix::process::ExitStatusExt;
    const SIGXFSZ: i32 = 25;
    let ([earlier, later], losses) = two_checkpoints("limit");
    let out = folder("limited");
    let path = out.to_str().expect("UTF-8");
    // `ulimit -f` counts blocks of 512 bytes.
    let blocks = |file: &str| later.join(file).metadata().expect("it is there").len() / 512;
    for most in [
        1,
        blocks(FILES[0]) / 2,
        blocks(FILES[0]) + 2,
        blocks(FILES[1]) - 2,
    ] {
        std::fs::remove_dir_all(&out).ok();
        copy(&earlier, &out.join("checkpoint-000003"), &FILES);
        let words = format!("ulimit -c 0 && ulimit -f {most} && exec \"$0\" \"$@\"");
        let ended = Command::new("sh")
            .args(["-c", &words, env!("CARGO_BIN_EXE_mrope")])
            .args(STEPS.split(' ').chain([path, "--resume"]))
            .output()
            .expect("a shell of each Unix");
        let said = text(&ended.stderr);
        assert_eq!(
            ended.status.signal(),
            Some(SIGXFSZ),
            "{most} blocks: {said}"
        );
        assert!(
            out.join(PARTIAL).is_dir(),
            "{most} blocks: it was not while saving: {said}"
        );
        assert_eq!(resumed(&out, "after the limit"), losses, "{most} blocks");
    }
}

#[test]
fn what_other_programs_saved_stays() {
    let out = folder("others");
    let path = out.to_str().expect("UTF-8");
    let theirs = |name: &str| {
        let file = out.join(name);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("creates");
        std::fs::write(&file, "theirs").expect("writes");
        file
    };
    let run = || {
        let options = "train --steps 2 --batch 2 --test-questions 2 --out";
        mrope(&options.split(' ').chain([path]).collect::<Vec<_>>())
    };
    let weights = theirs("checkpoint-500/model.safetensors");
    let done = run();
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(out.join("checkpoint-000002/run.json").is_file());
    assert!(weights.exists());

    // Where it would write: refused before the first step.
    for name in ["checkpoint-000002/optimizer.pt", "model.safetensors"] {
        std::fs::remove_dir_all(&out).expect("removes");
        let file = theirs(name);
        let refused = run();
        assert_eq!(refused.status.code(), Some(1), "{name}");
        let message = text(&refused.stderr);
        says(&message, "no run of mrope train wrote it");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert_eq!(std::fs::read_to_string(file).expect("a file"), "theirs");
    }
}

/// With the addresses that a process may have cut to 4 GB.
#[cfg(target_os = "linux")]
#[test]
fn a_step_that_the_memory_does_not_hold_is_refused_before_anything_is_written() {
    let out = folder("too-large");
    let path = out.to_str().expect("UTF-8");
    let options = "train --batch 4096 --frames 8 --rows 8 --columns 8 --steps 1 --out";
    let refused = Command::new("sh")
        .args(["-c", "ulimit -v 4000000 && exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_mrope"))
        .args(options.split(' ').chain([path]))
        .output()
        .expect("a shell of each Unix");
    let message = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(
        message.starts_with("error: a step of --batch 4096 with 517 tokens each needs at least ")
            && message.contains("choose a smaller --batch"),
        "{message}"
    );
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(!out.exists());
}

/// The test would take hours, and once took gigabytes before its first batch.
#[test]
fn what_was_trained_is_saved_before_the_last_test() {
    let out = folder("long-test");
    let path = out.to_str().expect("UTF-8");
    let options = "train --steps 1 --batch 1 --frames 8 --rows 8 --columns 8 \
                   --test-questions 1000000 --out";
    let mut child = Command::new(env!("CARGO_BIN_EXE_mrope"))
        .args(options.split_whitespace().chain([path]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let saved =
        || out.join("checkpoint-000001").is_dir() && out.join("model.safetensors").is_file();
    let mut waited = 0;
    while !saved() && waited < 6000 && child.try_wait().expect("it started").is_none() {
        std::thread::sleep(Duration::from_millis(10));
        waited += 1;
    }
    let is_testing = child.try_wait().expect("it started").is_none();
    child.kill().ok();
    child.wait().expect("it ends");
    assert!(saved() && is_testing);
}

#[test]
fn a_folder_that_takes_no_files_is_refused_before_the_first_step() {
    let out = folder("taken");
    let path = out.to_str().expect("UTF-8");
    let run = |path: &str| {
        let options = "train --steps 400 --batch 1 --test-questions 1 --out";
        let refused = mrope(&options.split(' ').chain([path]).collect::<Vec<_>>());
        let message = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert_eq!(message.lines().count(), 1, "no progress: {message}");
        message
    };
    std::fs::create_dir_all(&out).expect("creates");
    std::fs::write(out.join(PARTIAL), "").expect("writes");
    let message = run(path);
    says(&message, "cannot remove");
    says(&message, PARTIAL);
    std::fs::remove_file(out.join(PARTIAL)).expect("removes");
    std::fs::create_dir(out.join("curves.svg")).expect("creates");
    let message = run(path);
    says(&message, "curves.svg: it is a folder; move it away");
    if cfg!(target_os = "linux") {
        let message = run("/proc");
        assert!(
            message.starts_with("error: cannot create /proc/"),
            "{message}"
        );
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_plot_that_cannot_be_written_costs_neither_the_report_nor_the_other_plot() {
    let out = folder("no-plot");
    let path = out.to_str().expect("UTF-8");
    std::fs::create_dir_all(&out).expect("creates");
    std::os::unix::fs::symlink("/dev/full", out.join("curves.svg")).expect("links");
    let options = "train --json --steps 1 --batch 1 --test-questions 1 --out";
    let ended = mrope(&options.split(' ').chain([path]).collect::<Vec<_>>());
    assert_eq!(ended.status.code(), Some(1));
    assert!(
        text(&ended.stderr).contains("curves.svg"),
        "{}",
        text(&ended.stderr)
    );
    let report: Value = serde_json::from_slice(&ended.stdout).expect("one object");
    assert_eq!(report["steps"], 1);
    assert!(out.join("attention.svg").is_file());
}

#[test]
fn mistakes_get_one_line_and_an_exit_code() {
    let out = folder("mistakes");
    let path = out.to_str().expect("UTF-8");
    let failed = mrope(&["train", "--resume", "--out", path]);
    assert_eq!(failed.status.code(), Some(1));
    let message = text(&failed.stderr);
    assert!(message.starts_with("error: no checkpoint in "), "{message}");
    assert_eq!(message.lines().count(), 1);

    for (arguments, expected) in [
        (["train", "--device", "cuda"], "expected cpu, gpu"),
        (["train", "--columns", "0"], "from 1 to 8"),
        (["train", "--learning-rate", "nan"], "above 0"),
        (["learn", "--steps", "3"], "unrecognized subcommand"),
    ] {
        let failed = mrope(&arguments);
        assert_eq!(failed.status.code(), Some(2), "{arguments:?}");
        let message = text(&failed.stderr);
        assert!(message.starts_with("error: "), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}
