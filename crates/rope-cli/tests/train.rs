//! The program as a user runs it.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn mrope(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mrope"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
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
        assert!(
            said.contains("checkpoint-000003 is of an earlier run"),
            "{said}"
        );
        assert_eq!(checkpoints(), [format!("checkpoint-00000{steps}")]);
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
        assert!(
            message.contains("no run of mrope train made it"),
            "{message}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
        assert_eq!(std::fs::read_to_string(file).expect("a file"), "theirs");
    }
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
        (["train", "--columns", "0"], "1..=8"),
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
