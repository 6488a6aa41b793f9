//! The destinations of results, and the errors if they cannot be written.

use std::path::PathBuf;
use std::process::Output;

use crate::program::{command, mrope, says, text};

/// With a standard output that nobody reads.
fn unread(arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let child = command(arguments)
        .stdout(writer)
        .stderr(std::process::Stdio::piped())
        .spawn();
    let output = child.and_then(std::process::Child::wait_with_output);
    output.expect("the program runs")
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
        &["bench", "speed", "--list"],
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

/// As if the disk were full, or the reader had gone.
#[test]
fn a_run_does_not_end_where_its_progress_cannot_be_written() {
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unheard");
    std::fs::remove_dir_all(&out).ok();
    let path = out.to_str().expect("UTF-8");
    let unheard = |arguments: &str| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = command(&arguments.split(' ').chain([path]).collect::<Vec<_>>());
        command.stderr(writer).output().expect("the program runs")
    };
    let ended = unheard("train --steps 2 --batch 1 --test-questions 1 --out");
    assert_eq!(ended.status.code(), Some(0));
    assert!(out.join("attention.svg").is_file());
    std::fs::write(out.join("model.safetensors"), "of another program").expect("writes");
    let failed = unheard("train --steps 2 --batch 1 --test-questions 1 --out");
    assert_eq!(failed.status.code(), Some(1), "refused, in a message");
}

#[test]
fn a_file_that_is_read_is_not_written_over() {
    let prompt = file("prompt.json");
    std::fs::write(&prompt, r#"{"sequences": [[{"text": 2}]]}"#).expect("writes");
    let path = prompt.to_str().expect("UTF-8");
    let refused = mrope(&["positions", path, "--svg", path]);
    assert_eq!(refused.status.code(), Some(1));
    let expected = format!("error: --svg would replace {path}, which this command reads");
    assert!(
        text(&refused.stderr).starts_with(&expected),
        "{}",
        text(&refused.stderr)
    );
    let kept = std::fs::read_to_string(prompt).expect("a file");
    assert_eq!(kept, r#"{"sequences": [[{"text": 2}]]}"#);
}

#[test]
fn an_empty_sequence_shifts_no_heading() {
    let prompt = file("empty_sequence.json");
    let sequences = r#"{"sequences": [[{"text": 0}], [{"text": 3}], [], [{"text": 2}]]}"#;
    std::fs::write(&prompt, sequences).expect("writes");
    let shown = mrope(&["positions", prompt.to_str().expect("UTF-8")]);
    let shown = text(&shown.stdout);
    let parts: Vec<&str> = shown
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("sequence") || line.starts_with("text"))
        .map(|line| line.split("  ").next().unwrap_or(line))
        .collect();
    assert_eq!(
        parts,
        ["sequence 1", "text", "sequence 3", "text"],
        "{shown}"
    );
}

/// A map of 1,200 columns was cut off at the edge; every token of a long prompt was drawn.
#[test]
fn a_picture_has_room_for_any_grid() {
    for (prompt, drawn) in [
        ("image:4x2400", "1 in 8 columns drawn"),
        ("image:2400x4", "1 in 8 rows drawn"),
        ("image:2x800000", "1 in 2425 columns drawn"),
    ] {
        let picture = file("wide.svg");
        let path = picture.to_str().expect("UTF-8");
        let done = mrope(&["positions", prompt, "--svg", path]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let svg = std::fs::read_to_string(&picture).expect("a picture");
        assert!(svg.contains(drawn), "{prompt}");
        assert!(svg.len() < 2 << 20, "{prompt}: {} bytes", svg.len());
        let numbers = |name: &str| -> Vec<i64> {
            let name = format!(" {name}=\"");
            let found = svg.split(&name).skip(1);
            let number = |text: &str| text.split('"').next().and_then(|text| text.parse().ok());
            found.filter_map(number).collect()
        };
        let furthest = numbers("x").into_iter().max();
        assert!(furthest < Some(1100), "{prompt}: {furthest:?}");
    }
}

#[test]
fn standard_output_on_a_full_disk_is_named() {
    if !cfg!(target_os = "linux") {
        return;
    }
    for arguments in [
        &["positions", "text:4"][..],
        &["positions", "text:4", "--json"],
        &["doctor", "--json"],
        &["bench", "speed", "--list"],
        &["gradcheck", "--filter", "quarter/single", "--json"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let mut command = command(arguments);
        command.stdout(full.expect("Linux has it"));
        let failed = command.output().expect("the program runs");
        assert_eq!(failed.status.code(), Some(1), "{arguments:?}");
        let message = text(&failed.stderr);
        says(&message, "error: cannot write to standard output: ");
    }
}

#[test]
fn what_a_file_says_does_not_command_the_terminal() {
    let prompt = file("escape.json");
    std::fs::write(&prompt, r#"{"\u001b[31mred": 1}"#).expect("writes");
    let refused = mrope(&["positions", prompt.to_str().expect("UTF-8")]);
    let message = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(
        message.contains("red") && !message.contains('\u{1b}'),
        "{message}"
    );
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    for arguments in [
        &["bench", "speed", "--list", "--json"][..],
        &["gradcheck", "x.safetensors", "--path", "matrix"],
        &["gradcheck", "x.safetensors", "--token-file", "x"],
    ] {
        let refused = mrope(arguments);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}");
        let message = text(&refused.stderr);
        assert!(message.contains("cannot be used with"), "{message}");
    }
    for (arguments, expected) in [
        (
            &["bench", "speed", "--list", "--device", "ascend"][..],
            "expected --device cpu, gpu or gpu:N",
        ),
        (
            &["verify", "x", "--token-file", "t"],
            "--token-file t is for --device remote",
        ),
        (
            &["gradcheck", "--token-file", "t"],
            "--token-file t is for --device remote",
        ),
    ] {
        let refused = mrope(arguments);
        assert_eq!(refused.status.code(), Some(1), "{arguments:?}");
        says(&text(&refused.stderr), expected);
    }
}

#[test]
fn a_negative_number_is_out_of_range_not_an_unknown_option() {
    for (arguments, expected) in [
        (
            &["train", "--steps", "-3"][..],
            "expected a whole number from 1 to 10000000",
        ),
        (&["train", "--learning-rate", "-0.1"], "above 0"),
        (
            &["bench", "speed", "--tokens", "-1"],
            "expected a whole number from 1 to 1048576",
        ),
        (
            &["train", "--seed", "-1"],
            "expected a whole number from 0 to",
        ),
        (
            &["positions", "text:1", "--timestamp-tokens", "-1"],
            "from 0 to",
        ),
        (&["train", "-3"], "unexpected argument '-3'"),
    ] {
        let refused = mrope(arguments);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}");
        let message = text(&refused.stderr);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn help_fits_two_screens() {
    // Two screens of 50 lines and 100 columns; four where headings divide the options.
    let mut commands = vec![vec![]];
    let mut seen = 0;
    while let Some(command) = commands.pop() {
        let arguments: Vec<&str> = command
            .iter()
            .map(String::as_str)
            .chain(["--help"])
            .collect();
        let help = text(&mrope(&arguments).stdout);
        let longest = help.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(100), "{arguments:?}: {longest:?} columns");
        let lines = help.lines().count();
        let is_headed = help.contains("\nData:\n");
        let most = if is_headed { 200 } else { 100 };
        assert!((5..=most).contains(&lines), "{arguments:?}: {lines} lines");
        if is_headed {
            let rest = help.split_once("\nOptions:\n").map_or("", |(_, rest)| rest);
            let rest = rest.split("\n\n").next().unwrap_or_default();
            assert_eq!(
                rest.matches("--").count(),
                1,
                "--help alone has no heading: {rest}"
            );
        }
        let listed = help.split_once("Commands:\n").map_or("", |(_, rest)| rest);
        let listed = listed.lines().take_while(|line| line.starts_with("  "));
        let names = listed.filter(|line| !line.starts_with("    "));
        for name in names.filter_map(|line| line.split_whitespace().next()) {
            if name != "help" {
                commands.push([command.clone(), vec![name.to_owned()]].concat());
            }
        }
        seen += 1;
    }
    assert!(seen > 10, "{seen} commands");
}

#[test]
fn a_picture_that_cannot_be_written_is_an_error() {
    let missing = file("no-such-folder").join("x.svg");
    for path in [missing.to_str().expect("UTF-8"), "/dev/full"] {
        if path == "/dev/full" && !cfg!(target_os = "linux") {
            continue;
        }
        let failed = mrope(&["positions", "text:4", "--svg", path]);
        assert_eq!(failed.status.code(), Some(1), "{path}");
        let message = text(&failed.stderr);
        let expected = format!("error: cannot draw {path}: ");
        assert!(message.starts_with(&expected), "{message}");
    }
}

#[test]
fn a_way_to_rotate_on_an_npu_is_refused_elsewhere() {
    for device in ["cpu", "remote:ws://127.0.0.1:1"] {
        let refused = mrope(&["verify", "--device", device, "--path", "aclnn", "x"]);
        assert_eq!(refused.status.code(), Some(1));
        let message = text(&refused.stderr);
        let expected = format!(
            "error: --path chooses the rotation path of an NPU of this machine, and \
             {device} is none"
        );
        assert!(message.starts_with(&expected), "{message}");
        assert!(message.contains("add --device ascend"), "{message}");
    }
}
