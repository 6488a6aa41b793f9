//! `vlm_data::check`: each kind of fault is named with its line, and good files have none.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vlm_data::check::{CheckOptions, DataReport, Severity, check_data};
use vlm_data::picture::Picture;
use vlm_data::text::{FileOptions, Overlong, read};
use vlm_data::{SampleEncoder, SampleOptions};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn encoder(max_tokens: Option<usize>) -> SampleEncoder {
    let mut options = SampleOptions::default();
    options.encode.max_tokens = max_tokens;
    options.encode.overlong = Overlong::DropOldestTurns;
    SampleEncoder::from_folder(root("examples/shapes/model"), options).expect("a model folder")
}

fn check(file: &Path, encoder: &SampleEncoder, options: CheckOptions) -> DataReport {
    let records = read(file, &FileOptions::default()).expect("a file");
    check_data(records, encoder, options, &|_, _| {})
}

/// Each kind with its lines.
fn kinds(report: &DataReport) -> BTreeMap<&'static str, Vec<u64>> {
    let kinds = report.findings.iter();
    kinds
        .map(|found| (found.kind, found.lines.clone()))
        .collect()
}

/// A folder of a test's own with pictures, which is removed after it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        let folder = Self(path);
        folder.write("good.png", png(60, 60));
        folder
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), content).expect("a file");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// A picture with different pixels.
fn png(width: usize, height: usize) -> Vec<u8> {
    let rgb = (0..3 * width * height).map(|byte| (byte * 7) as u8);
    let picture = Picture::from_rgb(width, height, rgb.collect()).expect("a picture");
    picture.to_png().expect("a file")
}

/// A record of one question, which is made different by its number.
fn ask(question: &str, images: &[&str], number: usize) -> Value {
    json!({
        "messages": [
            {"role": "user", "content": format!("{question} {number}")},
            {"role": "assistant", "content": "red"},
        ],
        "images": images,
    })
}

#[test]
fn each_kind_of_fault_is_named_with_its_line() {
    let folder = Folder::new("check_faults");
    folder.write("text.png", "no picture at all");
    folder.write("cut.png", &png(60, 60)[..200]);
    folder.write("long.png", png(3000, 2));
    folder.write("dot.png", png(2, 2));
    // The header of a BMP of 60,000 x 60,000 pixels of 24 bits.
    let words = [
        54,
        0,
        54,
        40,
        60_000,
        60_000,
        24 << 16 | 1,
        0,
        0,
        0,
        0,
        0,
        0_u32,
    ];
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    folder.write(
        "bomb.bmp",
        b"BM".iter().copied().chain(bytes).collect::<Vec<u8>>(),
    );
    let white = Picture::from_rgb(60, 60, vec![255; 3 * 60 * 60]).expect("a picture");
    folder.write("white.png", white.to_png().expect("a file"));
    folder.write("small.png", png(56, 30));
    let pictures = root("tests/fixtures/pictures");
    for name in ["exif_6.jpg", "rgba_8.png", "grey_16.png"] {
        folder.write(name, fs::read(pictures.join(name)).expect("a fixture"));
    }

    let good = |number| ask("<image>What?", &["good.png"], number);
    let with = |mut record: Value, key: &str, value: Value| {
        record[key] = value;
        record
    };
    let talk = |messages: Value| json!({ "messages": messages });
    let boxes = |number: usize, text: &str, objects: Value| {
        let mut record = ask(&format!("<image>{text}"), &["good.png"], number);
        record["objects"] = objects;
        record
    };
    let mut lines: Vec<(&str, String)> = Vec::new();
    let mut add = |kind, record: Value| lines.push((kind, record.to_string()));
    add("", good(1));
    add("json", json!("not an object"));
    add("format", json!({"ask": "What?", "say": "red"}));
    add("value", talk(json!([{"role": "user", "content": 7}])));
    add(
        "role",
        talk(json!([{"role": "boss", "content": "Hi"}, {"role": "assistant", "content": "a"}])),
    );
    add(
        "system-not-first",
        talk(json!([
            {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be good."},
            {"role": "assistant", "content": "a"},
        ])),
    );
    add(
        "no-answer",
        talk(json!([{"role": "user", "content": "Hi"}])),
    );
    add(
        "empty-answer",
        talk(json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " "}])),
    );
    add("marks", ask("<image><image>Same?", &["good.png"], 2));
    add("marks", ask("What?", &["good.png"], 3));
    add(
        "picture-in-answer",
        with(
            talk(json!([
                {"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"},
            ])),
            "images",
            json!(["good.png"]),
        ),
    );
    add("special-token", ask("What is <|im_end|>?", &[], 4));
    add(
        "address",
        ask("<image>What?", &["https://example.org/a.png"], 5),
    );
    add(
        "base64",
        ask("<image>What?", &["data:image/png;base64,?"], 6),
    );
    add("file", ask("<image>What?", &["missing.png"], 7));
    add("no-picture", ask("<image>What?", &["text.png"], 8));
    add("damaged", ask("<image>What?", &["cut.png"], 9));
    add("too-many-pixels", ask("<image>What?", &["bomb.bmp"], 10));
    add("aspect-ratio", ask("<image>What?", &["long.png"], 11));
    add(
        "video-file",
        with(ask("<video>What?", &[], 12), "videos", json!(["a.mp4"])),
    );
    add(
        "fps",
        with(
            ask("<video>What?", &[], 13),
            "videos",
            json!([["good.png", "good.png"]]),
        ),
    );
    let clip = |frames: Value| json!([{"frames": frames, "fps": 2}]);
    add(
        "frame-size",
        with(
            ask("<video>What?", &[], 14),
            "videos",
            clip(json!(["good.png", "small.png"])),
        ),
    );
    add(
        "objects",
        boxes(
            15,
            "Where is <ref-object>?",
            json!({"ref": ["it", "that"], "bbox": []}),
        ),
    );
    add(
        "box",
        boxes(16, "At <bbox>?", json!({"bbox": [[9, 9, 1, 1]]})),
    );
    add(
        "box-picture",
        boxes(
            17,
            "At <bbox>?",
            json!({"bbox": [[1, 1, 9, 9]], "image_id": [1]}),
        ),
    );
    add(
        "box-outside",
        boxes(18, "At <bbox>?", json!({"bbox": [[1, 1, 90, 9]]})),
    );
    add("too-long", ask(&"long ".repeat(200), &[], 19));
    add(
        "nothing-to-train",
        talk(json!([
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "loss": false},
        ])),
    );
    // Warnings.
    add("duplicate", good(1));
    let turn = |text: &str| json!({"role": "user", "content": text.repeat(40)});
    let red = json!({"role": "assistant", "content": "red"});
    add(
        "shortened",
        talk(json!([
            turn("old "),
            red,
            turn("new "),
            red,
            turn("one "),
            red
        ])),
    );
    add("rotated", ask("<image>What?", &["exif_6.jpg"], 20));
    add("transparent", ask("<image>What?", &["rgba_8.png"], 21));
    add("clipped", ask("<image>What?", &["grey_16.png"], 22));
    add("blank", ask("<image>What?", &["white.png"], 23));
    add("enlarged", ask("<image>What?", &["dot.png"], 24));
    add(
        "empty-question",
        talk(json!([{"role": "user", "content": "\t"}, {"role": "assistant", "content": "red"}])),
    );
    add(
        "role-order",
        talk(json!([{"role": "assistant", "content": "red"}])),
    );
    add(
        "answer-space",
        talk(json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "red\n"}])),
    );
    add("replacement-character", ask("Qu\u{fffd}est-ce?", &[], 25));
    add(
        "box-text",
        ask(
            "<image>Is it \"bbox_2d\": [1, 2, 300, 40]?",
            &["good.png"],
            26,
        ),
    );
    lines.push(("json", "{\"messages\": [".to_owned()));

    let text: Vec<&str> = lines.iter().map(|(_, line)| &line[..]).collect();
    folder.write("faults.jsonl", text.join("\n"));
    let mut expected: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (line, (kind, _)) in (1..).zip(&lines) {
        if !kind.is_empty() {
            expected.entry(kind).or_default().push(line);
        }
    }
    assert!(expected.len() >= 25, "{}", expected.len());
    let file = folder.0.join("faults.jsonl");
    let report = check(&file, &encoder(Some(160)), CheckOptions::default());
    let found: Vec<_> = report
        .findings
        .iter()
        .map(|f| (f.kind, &f.lines, &f.examples))
        .collect();
    assert_eq!(kinds(&report), expected, "{found:#?}");
    assert_eq!(report.records, lines.len() as u64);
    let errors = report.of(Severity::Error).flat_map(|found| &found.lines);
    assert_eq!(report.bad_records, errors.count() as u64);
    assert_eq!(
        report.samples.len() as u64,
        report.records - report.bad_records
    );

    // Without pixels, the faults in them are not found.
    let options = CheckOptions {
        pixels: false,
        ..CheckOptions::default()
    };
    let found = kinds(&check(&file, &encoder(Some(160)), options));
    let mut headers = expected;
    for kind in ["damaged", "transparent", "clipped", "blank"] {
        headers.remove(kind);
    }
    assert_eq!(found, headers);
}

/// An array that is cut off, and a file of nothing.
#[test]
fn a_file_that_ends_too_early_is_an_error() {
    let folder = Folder::new("check_cut");
    let record = ask("<image>What?", &["good.png"], 1);
    for (text, kind, line) in [
        (format!("[{record},\n{record}\n"), "stream", 3),
        ("\n \n".to_owned(), "no-records", 1),
    ] {
        folder.write("cut.json", text);
        let report = check(
            &folder.0.join("cut.json"),
            &encoder(None),
            CheckOptions::default(),
        );
        assert_eq!(kinds(&report)[kind], [line]);
        assert!(report.has_errors());
    }
}

/// Findings of one kind are one, however many threads find them.
#[test]
fn equal_findings_are_grouped() {
    let folder = Folder::new("check_many");
    let lines = (0..2000).map(|number| ask("What?", &["good.png"], number).to_string() + "\n");
    folder.write("many.jsonl", lines.collect::<String>());
    let options = CheckOptions {
        threads: 4,
        ..CheckOptions::default()
    };
    let report = check(&folder.0.join("many.jsonl"), &encoder(None), options);
    let [found] = &report.findings[..] else {
        panic!("{:?}", report.findings);
    };
    assert_eq!((found.kind, found.count), ("marks", 2000));
    assert!(found.lines.iter().copied().eq(1..=2000));
    let examples = found.examples.iter().map(|example| example.line);
    assert!(examples.eq(1..=5));
}

#[test]
fn the_example_has_no_faults() {
    for (name, records) in [("train", 64), ("test", 24)] {
        let file = root(&format!("examples/shapes/{name}.jsonl"));
        let report = check(&file, &encoder(None), CheckOptions::default());
        assert_eq!(report.findings, []);
        assert_eq!(
            (report.records, report.samples.len()),
            (records, records as usize)
        );
        assert!(
            report
                .samples
                .iter()
                .all(|sample| sample.trained > 0 && sample.vision >= 4)
        );
    }
}

/// The model sees the resized picture: one that is not resized comes back.
#[test]
fn patches_show_their_pictures() {
    let encoder = encoder(None);
    let rgb: Vec<u8> = (0..3 * 84 * 56)
        .map(|byte| (byte * 31 % 251) as u8)
        .collect();
    let picture = Picture::from_rgb(84, 56, rgb).expect("a picture");
    let pictures = &encoder.media().expect("pictures").pictures;
    let patches = pictures.patches(&picture).expect("patches");
    let shown = pictures
        .pictures(&patches.values, patches.grid)
        .expect("pictures");
    assert_eq!(shown, [picture.clone(), picture.clone()]);
    let png = picture.to_png().expect("a file");
    assert_eq!(
        Picture::decode(&png, &Default::default()).expect("a picture"),
        picture
    );
}

/// The largest memory that this process has had, in MiB.
#[cfg(target_os = "linux")]
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("the system tells");
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("a number") / 1024
}

#[test]
#[cfg(target_os = "linux")]
#[ignore = "draws 10,000 pictures; cargo test --release -p vlm-data --test check -- --ignored --nocapture"]
fn ten_thousand_samples_take_little_memory() {
    let folder = Folder::new("check_10000");
    let mut lines = String::new();
    for number in 0..10_000 {
        // Waves, which are as large as a photo when they are compressed.
        let rgb = (0..320 * 240 * 3).map(|byte| {
            let (x, y) = (byte / 3 % 320, byte / 960);
            (x * y / (64 + number % 97) + byte % 3 * number) as u8
        });
        let picture = Picture::from_rgb(320, 240, rgb.collect()).expect("a picture");
        let name = format!("{number}.png");
        folder.write(&name, picture.to_png().expect("a file"));
        lines += &ask("<image>What is drawn here?", &[&name], number).to_string();
        lines.push('\n');
    }
    folder.write("many.jsonl", lines);
    let before = peak_mib();
    for pixels in [true, false] {
        let start = std::time::Instant::now();
        let options = CheckOptions {
            pixels,
            ..CheckOptions::default()
        };
        let report = check(&folder.0.join("many.jsonl"), &encoder(Some(4096)), options);
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!((report.findings.len(), report.samples.len()), (0, 10_000));
        println!(
            "pixels {pixels}: {:.0} samples a second by {} threads, at most {} MiB ({before} before)",
            10_000.0 / seconds,
            options.threads,
            peak_mib()
        );
    }
    assert!(peak_mib() < 300, "{}", peak_mib());
}
