//! `mrope train` as a user runs it.

use std::path::PathBuf;
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
    let options = "train --json --steps 3 --batch 2 --test-questions 20 --out";
    let options: Vec<&str> = options.split(' ').chain([path]).collect();
    let done = mrope(&options);
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
    // A model of another program is refused before the first step; that of an earlier run is not.
    let file = theirs("model.safetensors");
    let refused = run();
    assert_eq!(refused.status.code(), Some(1));
    let message = text(&refused.stderr);
    says(&message, "no run of mrope train wrote it");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "theirs");
    std::fs::remove_file(file).expect("removes");
    for _ in 0..2 {
        let done = run();
        assert!(done.status.success(), "{}", text(&done.stderr));
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
    let saved = || out.join("model.safetensors").is_file();
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
    std::fs::create_dir(out.join("curves.svg")).expect("creates");
    let message = run(path);
    says(&message, "curves.svg: it is a folder; move it away");
    if cfg!(target_os = "linux") {
        let message = run("/proc");
        assert!(
            message.starts_with("error: cannot write /proc/"),
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
