//! Where results go, and what becomes of them where they cannot.

use std::path::PathBuf;
use std::process::{Command, Output};

fn mrope(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
    command.args(arguments).env_remove("MROPE_TOKEN");
    command
}

fn run(arguments: &[&str]) -> Output {
    mrope(arguments).output().expect("the program starts")
}

/// With a standard output that nobody reads.
fn unread(arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let child = mrope(arguments)
        .stdout(writer)
        .stderr(std::process::Stdio::piped())
        .spawn();
    let output = child.and_then(std::process::Child::wait_with_output);
    output.expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn file(name: &str) -> PathBuf {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_file(&file).ok();
    file
}

const ONE_CASE: [&str; 7] = [
    "bench", "speed", "--quick", "--group", "decode", "--dtype", "f32",
];

#[test]
fn a_reader_that_has_seen_enough_ends_a_command_quietly() {
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    let fixture = fixtures.join("models/qwen2_vl_tiny").display().to_string();
    for arguments in [
        &["gradcheck", "--filter", "quarter/single", "--verbose"][..],
        &["gradcheck", "--filter", "quarter/single", "--json"],
        &["bench", "speed", "--full", "--list"],
        &[&ONE_CASE[..], &["--json"]].concat(),
        &["verify", &fixture],
        &["doctor", "--device", "ascend"],
    ] {
        let ended = unread(arguments);
        assert_eq!(text(&ended.stderr), "", "{arguments:?}");
        assert_eq!(ended.status.code(), Some(141), "{arguments:?}");
    }
}

#[test]
fn a_trained_model_is_kept_where_nobody_reads_the_report() {
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unread");
    std::fs::remove_dir_all(&out).ok();
    let options = "train --steps 1 --batch 1 --test-questions 1 --out";
    let path = out.to_str().expect("UTF-8");
    let ended = unread(&options.split(' ').chain([path]).collect::<Vec<_>>());
    assert_eq!(ended.status.code(), Some(141), "{}", text(&ended.stderr));
    assert!(out.join("attention.svg").is_file());
}

#[test]
fn a_benchmark_refuses_a_file_before_it_measures() {
    let missing = file("no-such-folder").join("x");
    let missing = missing.to_str().expect("UTF-8");
    let earlier = file("earlier.csv");
    std::fs::write(&earlier, "earlier").expect("writes");
    let earlier = earlier.to_str().expect("UTF-8");
    // Without --quick a program built for tests warns when it begins to measure; a missing NPU is
    // found then.
    for arguments in [
        &["bench", "speed", "--group", "decode", "--csv", missing][..],
        &["bench", "speed", "--svg", missing, "--csv", earlier],
        &["bench", "step", "--csv", missing],
        &[
            "bench", "memory", "--dtype", "f32", "--device", "ascend", "--csv", missing,
        ],
    ] {
        let refused = run(arguments);
        assert_eq!(refused.status.code(), Some(1), "{arguments:?}");
        let message = text(&refused.stderr);
        let expected = format!("error: cannot write {missing}: ");
        assert!(message.starts_with(&expected), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    assert_eq!(std::fs::read_to_string(earlier).expect("a file"), "earlier");
}

#[test]
fn one_output_that_fails_takes_no_other_with_it() {
    let csv = file("unread.csv");
    let arguments = ["--csv", csv.to_str().expect("UTF-8")];
    std::fs::write(&csv, "longer than what comes ".repeat(1000)).expect("writes");
    let ended = unread(&[&ONE_CASE[..], &arguments].concat());
    assert_eq!(ended.status.code(), Some(141));
    let rows = std::fs::read_to_string(&csv).expect("a file");
    assert!(
        rows.starts_with("case,") && rows.lines().count() > 1,
        "{rows}"
    );
    assert!(!rows.contains("longer"), "{rows}");

    if cfg!(target_os = "linux") {
        let full = run(&[&ONE_CASE[..], &["--csv", "/dev/full"]].concat());
        assert_eq!(full.status.code(), Some(1));
        let message = text(&full.stderr);
        assert!(
            message.starts_with("error: cannot write /dev/full: "),
            "{message}"
        );
        assert!(
            text(&full.stdout).contains("Qwen3-VL-8B"),
            "{}",
            text(&full.stdout)
        );
    }
}

#[test]
fn a_picture_that_cannot_be_written_is_an_error() {
    let missing = file("no-such-folder").join("x.svg");
    for path in [missing.to_str().expect("UTF-8"), "/dev/full"] {
        if path == "/dev/full" && !cfg!(target_os = "linux") {
            continue;
        }
        let failed = run(&["positions", "text:4", "--svg", path]);
        assert_eq!(failed.status.code(), Some(1), "{path}");
        let message = text(&failed.stderr);
        let expected = format!("error: cannot draw {path}: ");
        assert!(message.starts_with(&expected), "{message}");
    }
}

#[test]
fn a_way_to_rotate_on_an_npu_is_refused_elsewhere() {
    for device in ["cpu", "remote:ws://127.0.0.1:1"] {
        let refused = run(&["verify", "--device", device, "--path", "aclnn", "x"]);
        assert_eq!(refused.status.code(), Some(1));
        let message = text(&refused.stderr);
        let expected = format!(
            "error: --path chooses among the ways to rotate on an NPU of this machine, and \
             {device} is none"
        );
        assert!(message.starts_with(&expected), "{message}");
        assert!(message.contains("add --device ascend"), "{message}");
    }
}
