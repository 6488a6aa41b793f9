//! `mrope data`: the report and the drawings of the example, and of a file with faults.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::program::{mrope, says, text};
use serde_json::Value;

fn root(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    path.display().to_string()
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::remove_dir_all(&folder).ok();
    folder
}

fn check(file: &str, out: &Path, options: &[&str]) -> Output {
    let (model, out) = (root("examples/shapes/model"), out.display().to_string());
    let arguments = ["data", "check", file, "--model", &model, "--out", &out];
    mrope(&[&arguments, options].concat())
}

#[test]
fn the_example_is_counted_and_drawn() {
    let out = folder("data_example");
    let file = root("examples/shapes/train.jsonl");
    let ended = check(&file, &out, &[]);
    assert_eq!(
        (text(&ended.stderr), ended.status.code()),
        (String::new(), Some(0))
    );
    let printed = text(&ended.stdout);
    for part in [
        "64 samples can be trained on",
        "rows of 4096 tokens, packed: 1,",
        "without errors",
    ] {
        says(&printed, part);
    }
    let svg = std::fs::read_to_string(out.join("lengths.svg")).expect("a picture");
    says(&svg, "64 samples of 64 records");

    let ended = check(&file, &out, &["--json"]);
    let json: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    let records = std::fs::read_to_string(&file).expect("the example");
    assert_eq!(json["records"], records.lines().count());
    assert_eq!(json["findings"], Value::Array(Vec::new()));
    assert_eq!(json["pictures"]["most"], 2);
    assert_eq!(json["packing"]["packed_rows"], 1);
    let (tokens, trained) = (&json["tokens"]["total"], &json["trained_tokens"]["total"]);
    let share = trained.as_f64().expect("a number") / tokens.as_f64().expect("a number");
    assert!((json["trained_share"].as_f64().expect("a share") - share).abs() < 1e-12);
}

#[test]
fn errors_are_named_with_their_lines_and_the_exit_code() {
    let out = folder("data_faults");
    std::fs::create_dir_all(&out).expect("a folder");
    let faulty = r#"{"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "a"}]}"#;
    let file = out.join("faults.jsonl");
    std::fs::write(&file, format!("{faulty}\n").repeat(10_000)).expect("a file");
    let ended = check(&file.display().to_string(), &out, &[]);
    assert_eq!(ended.status.code(), Some(1));
    let printed = text(&ended.stdout);
    says(&printed, "marks: 10000 in lines 1-10000");
    assert!(printed.lines().count() < 20, "{printed}");
    let ended = check("no/such/file.jsonl", &out, &[]);
    assert_eq!(ended.status.code(), Some(2));
    let message = text(&ended.stderr);
    says(&message, "'no/such/file.jsonl' for '<FILE>': no such file");
}

/// All kinds of media, and a record that holds markup.
#[test]
fn a_sample_is_shown_token_by_token() {
    let out = folder("data_show");
    let file = root("examples/shapes/train.jsonl");
    let records = std::fs::read_to_string(&file).expect("the example");
    let line_of = |part: &str| {
        let found = records.lines().position(|line| line.contains(part));
        (found.expect("a record") + 1).to_string()
    };
    for (part, shown) in [
        ("<image><image>", "picture 2"),
        ("bbox", "class=\"box\""),
        ("<video>", "video 1, frame 4"),
    ] {
        let line = line_of(part);
        let ended = check(&file, &out, &["--show", &line]);
        assert_eq!(
            (text(&ended.stderr), ended.status.code()),
            (String::new(), Some(0))
        );
        let page = out.join(format!("line-{line}.html"));
        let page = std::fs::read_to_string(page).expect("a page");
        for part in [shown, "data:image/png;base64,iVBORw0KGgo", "trained on"] {
            says(&page, part);
        }
    }
    let hostile = out.join("hostile.jsonl");
    let record = r#"{"messages": [{"role": "user", "content": "<script>alert(1)</script>\u202e<b onload='x'>"}, {"role": "assistant", "content": "a"}]}"#;
    std::fs::write(&hostile, record).expect("a file");
    let ended = check(&hostile.display().to_string(), &out, &["--show", "1"]);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    let page = std::fs::read_to_string(out.join("line-1.html")).expect("a page");
    assert!(!page.contains("<script") && !page.contains("<b onload") && !page.contains('\u{202e}'));
    // The lines after a record are its own, up to the next one.
    check(&file, &out, &["--show", "65"]);
    assert!(out.join("line-64.html").is_file());
}

/// A folder with a stand-in for ffmpeg, which notes each call and whose videos have eight black
/// frames of 64 x 48 pixels, of which four are taken.
#[cfg(unix)]
struct Decoder(PathBuf);

#[cfg(unix)]
impl Decoder {
    fn new(name: &str) -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = folder(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let frames: String = (0..8)
            .map(|frame| {
                format!("0, {frame}, {frame}, 1, 9216, 0\\n1, {frame}, {frame}, 1, 9216, 0\\n")
            })
            .collect();
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n*framecrc*) echo count >> calls; \
             printf '#tb 0: 1/4\\n#dimensions 0: 64x48\\n{frames}';;\n\
             *) echo pixels >> calls; head -c 36864 /dev/zero;;\nesac\n"
        );
        let program = folder.join("ffmpeg");
        std::fs::write(&program, script).expect("a script");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("it may run");
        for name in ["a.mp4", "b.mp4"] {
            std::fs::write(folder.join(name), "a video").expect("a file");
        }
        let record = |name: &str| {
            format!(
                r#"{{"messages": [{{"role": "user", "content": "<video>What?"}}, {{"role": "assistant", "content": "That."}}], "videos": ["{name}"]}}"#
            )
        };
        let records = ["a.mp4", "b.mp4", "a.mp4"].map(record).join("\n");
        std::fs::write(folder.join("videos.jsonl"), records).expect("a file");
        Self(folder)
    }

    /// How often a run counts frames and how often it reads pixels.
    fn calls(&self, arguments: &str) -> [usize; 2] {
        std::fs::remove_file(self.0.join("calls")).ok();
        let path = format!("{}:/usr/bin:/bin", self.0.display());
        let model = root("examples/shapes/model");
        let arguments = arguments.replace("MODEL", &model);
        let ended = crate::program::command(&arguments.split(' ').collect::<Vec<_>>())
            .current_dir(&self.0)
            .env("PATH", path)
            .output()
            .expect("the program starts");
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        let calls = std::fs::read_to_string(self.0.join("calls")).expect("calls");
        ["count", "pixels"].map(|call| calls.lines().filter(|line| *line == call).count())
    }
}

/// Of three records with two videos. A step reads the pixels of each of its records once.
#[cfg(unix)]
#[test]
fn a_video_is_counted_once_and_its_pixels_are_decoded_once() {
    let decoder = Decoder::new("data_decoder");
    let check = "data check videos.jsonl --model MODEL --out checked";
    assert_eq!(decoder.calls(check), [2, 0], "{check}");
    for (batch, survey, pixels) in [
        ("--batch 3", "headers", 0),
        ("--batch-tokens 4096", "headers", 0),
        ("--batch 3", "pixels", 3),
    ] {
        let train = format!(
            "finetune MODEL --random-weights --data videos.jsonl {batch} --epochs 1 \
             --survey {survey} --out {}-{survey}",
            batch.len()
        );
        // Those of the survey, of the step, and of the record that shows the adapter's effect.
        assert_eq!(decoder.calls(&train), [2, pixels + 3 + 1], "{train}");
    }
}
