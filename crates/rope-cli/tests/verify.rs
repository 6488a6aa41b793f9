//! `mrope verify` as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::program::{command, objects, says, text};
use serde_json::Value;

fn fixtures() -> PathBuf {
    rope_check::fixtures().expect("the test runs in the workspace")
}

fn mrope(arguments: &[&str], paths: &[&Path]) -> Output {
    let output = command(&["verify"]).args(arguments).args(paths).output();
    output.expect("the program starts")
}

fn stdout(output: &Output) -> String {
    text(&output.stdout)
}

fn json(output: &Output) -> Vec<Value> {
    objects(&output.stdout)
}

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("old folder goes");
    }
    std::fs::create_dir_all(folder.join("inner")).expect("folder is made");
    folder
}

#[test]
fn the_fixtures_pass_and_what_is_not_golden_is_listed() {
    let output = mrope(&[], &[&fixtures()]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("skipped") && text.contains("MANIFEST: expected .safetensors or .json"));
    // New fixtures add to it.
    let (rows, rest) = text
        .split_once(" files: 0 out of tolerance; 0 files cannot be verified")
        .unwrap();
    let (_, files) = rows.rsplit_once(' ').unwrap();
    assert!(files.parse::<usize>().unwrap() >= 47, "{files} files{rest}");
    let longest = text
        .lines()
        .filter(|line| line.starts_with("  "))
        .map(str::len)
        .max();
    assert!(longest <= Some(100), "{longest:?}");
}

/// Neither is read to its end, which it has not.
#[cfg(unix)]
#[test]
fn pipes_devices_and_impossible_headers_are_refused_at_once() {
    let folder = folder("endless");
    let pipe = folder.join("pipe.safetensors");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo runs").success());
    let device = folder.join("device.json");
    std::os::unix::fs::symlink("/dev/zero", &device).expect("it links");
    for path in [&pipe, &device] {
        let output = mrope(&["--json"], &[path]);
        assert_eq!(output.status.code(), Some(1), "{path:?}");
        let error = json(&output)[0]["error"].to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }
    let listed = stdout(&mrope(
        &[],
        &[&folder, &fixtures().join("inv_freq_tables.json")],
    ));
    for name in ["pipe.safetensors", "device.json"] {
        let expected = format!("{name}: it is not a regular file");
        assert!(listed.contains(&expected), "{listed}");
    }
    let header = folder.join("header.safetensors");
    let file = std::fs::File::create(&header).expect("it is made");
    std::io::Write::write_all(&mut &file, &(1_u64 << 63).to_le_bytes()).expect("it is written");
    // Zeros that take no space on the disk.
    file.set_len(20 << 30).expect("it grows");
    let output = mrope(&["--json"], &[&header]);
    std::fs::remove_file(&header).expect("it goes");
    let error = json(&output)[0]["error"].to_string();
    assert!(error.contains("expected 100000000 at most"), "{error}");
}

#[test]
fn json_prints_one_object_per_row() {
    // Of the models, one.
    let files = std::fs::read_dir(fixtures()).expect("fixtures");
    let files = files.map(|entry| entry.expect("an entry").path());
    let is_golden = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
    let mut files: Vec<PathBuf> = files.filter(is_golden).collect();
    files.push(fixtures().join("models/qwen2_5_vl_tiny"));
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let output = mrope(&["--json"], &files);
    assert_eq!(output.status.code(), Some(0));
    let rows = json(&output);
    for row in &rows {
        assert!(row["file"].is_string() && row["tensor"].is_string() && row["engine"].is_string());
        assert!(
            row["max_abs"].as_f64() <= row["tolerance"].as_f64(),
            "{row}"
        );
        assert_eq!(row["pass"], true, "{row}");
    }
    for dtype in ["f64", "f32", "f16", "bf16"] {
        let is_dq = |row: &&Value| row["dtype"] == dtype && row["tensor"] == "dq";
        assert_eq!(rows.iter().filter(is_dq).count(), 30, "{dtype}");
    }
    let skipped = String::from_utf8(output.stderr).expect("output is text");
    assert!(
        skipped.lines().all(|line| line.starts_with("skipped ")),
        "{skipped}"
    );
}

#[test]
fn one_altered_value_fails_and_its_tensor_is_named() {
    let folder = folder("altered");
    let mut bytes = std::fs::read(fixtures().join("glm4v_mrope_8_12_12_partial_pairs.safetensors"))
        .expect("fixture reads");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("fixture parses");
    let dk = tensors.tensor("dk.f64").expect("tensor is there").data();
    let at = dk.as_ptr() as usize - bytes.as_ptr() as usize + 8 * 300;
    let value = f64::from_le_bytes(dk[2400..2408].try_into().expect("eight bytes"));
    bytes[at..at + 8].copy_from_slice(&(value + 0.25).to_le_bytes());
    let file = folder.join("inner/altered.safetensors");
    std::fs::write(&file, bytes).expect("file is written");

    let output = mrope(&[], &[&folder]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let failed: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("  FAIL"))
        .collect();
    assert_eq!(failed.len(), 4, "{text}");
    assert!(failed.iter().all(|line| line.contains(" dk ")), "{text}");
    assert!(text.contains("dk at [0, 0, 2, 44]: computed"), "{text}");

    let rows = json(&mrope(&["--json"], &[&file]));
    for row in rows {
        assert_eq!(row["pass"], row["tensor"] != "dk", "{row}");
        assert_eq!(row.get("worst").is_some(), row["tensor"] == "dk", "{row}");
    }
}

/// `llama_rope_half.safetensors` with q[0] set, and all of q_out zero where `wrong`.
fn with_q(name: &str, q: f32, wrong: bool) -> PathBuf {
    let mut bytes = std::fs::read(fixtures().join("llama_rope_half.safetensors")).expect("reads");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("fixture parses");
    let range = |name: &str| {
        let data = tensors.tensor(name).expect("tensor is there").data();
        let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
        start..start + data.len()
    };
    let (input, output) = (range("q.bf16"), range("q_out.f64"));
    let value = half::bf16::from_f32(q);
    bytes[input.start..input.start + 2].copy_from_slice(&value.to_le_bytes());
    let first = output.start..output.start + 8;
    bytes[first].copy_from_slice(&value.to_f64().to_le_bytes());
    if wrong {
        bytes[output].fill(0);
    }
    let file = folder(name).join("altered.safetensors");
    std::fs::write(&file, bytes).expect("file is written");
    file
}

#[test]
fn an_infinite_input_excuses_nothing() {
    let output = mrope(&["--json"], &[&with_q("infinite", f32::INFINITY, true)]);
    assert_eq!(output.status.code(), Some(1));
    for row in json(&output) {
        assert_eq!(row["pass"], row["tensor"] != "q_out", "{row}");
        assert!(row["tolerance"].is_f64(), "{row}");
    }
}

#[test]
fn what_overflows_a_type_is_skipped_in_it_and_said() {
    let file = with_q("overflow", 1e5, false);
    let output = mrope(&["--json"], &[&file]);
    assert_eq!(output.status.code(), Some(0));
    let (skipped, rows): (Vec<_>, Vec<_>) = json(&output)
        .into_iter()
        .partition(|row| row["skipped"].is_string());
    assert!(
        rows.iter()
            .all(|row| row["pass"] == true && row["dtype"] != "f16")
    );
    assert_eq!(skipped.len(), 1);
    assert_eq!(skipped[0]["dtype"], "f16");
    let text = stdout(&mrope(&[], &[&file]));
    assert!(text.contains("q holds 99840"), "{text}");
    assert!(text.contains("1 comparison skipped"), "{text}");

    let wrong = mrope(&["--json"], &[&with_q("overflow_wrong", 1e5, true)]);
    assert_eq!(wrong.status.code(), Some(1));
}

#[test]
fn what_cannot_be_read_fails_beside_what_can() {
    let folder = folder("unreadable");
    let whole =
        std::fs::read(fixtures().join("llama_rope_half.safetensors")).expect("fixture reads");
    std::fs::write(folder.join("cut.safetensors"), &whole[..1000]).expect("file is written");
    std::fs::write(folder.join("whole.safetensors"), &whole).expect("file is written");
    std::fs::write(folder.join("notes.md"), "not a golden file").expect("file is written");
    let output = mrope(&[], &[&folder, &folder.join("absent.safetensors")]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    says(&text, "FAIL is not a complete safetensors file");
    says(&text, "FAIL cannot be read");
    says(&text, "expected a golden file, or a");
    says(
        &text,
        "of 1 file: 0 out of tolerance; 2 files cannot be verified, 1 skipped",
    );
    let rows = json(&mrope(&["--json"], &[&folder.join("cut.safetensors")]));
    assert_eq!(rows.len(), 1);
    assert!(
        rows[0]["pass"] == false && rows[0]["error"].is_string(),
        "{}",
        rows[0]
    );

    // Asked for by name, another kind of file is an error, not a skip; and so is a folder without
    // golden files.
    let notes = mrope(&[], &[&folder.join("notes.md")]);
    assert_eq!(notes.status.code(), Some(1));
    assert!(stdout(&notes).contains("is not a golden file: expected .safetensors or .json"));
    let nothing = mrope(&[], &[&folder.join("inner")]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("nothing to verify"));
}

#[test]
fn engines_are_chosen_by_name_or_part() {
    let file = fixtures().join("qwen3_5_mrope_11_11_10_partial.safetensors");
    let engines = |name: &str| {
        let output = mrope(&["--json", "--engine", name], &[&file]);
        assert_eq!(output.status.code(), Some(0), "{name}");
        let mut names: Vec<String> = json(&output)
            .iter()
            .filter(|row| row["tensor"] == "q_out" && row["dtype"] == "f32")
            .map(|row| row["engine"].as_str().expect("a name").to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(engines("burn-composed"), ["burn/composed"]);
    assert_eq!(engines("burn"), ["burn/composed", "burn/fused"]);
    assert_eq!(engines("cpu/portable"), ["cpu/portable"]);
    assert_eq!(engines("best").len(), 1);
    assert!(
        engines("portable")
            .iter()
            .all(|name| name.starts_with("cpu/portable"))
    );
    assert!(engines("all").len() >= 5);
    let unknown = mrope(&["--engine", "abacus"], &[&file]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("burn/fused"));
}

#[test]
fn the_format_has_an_option_of_its_own() {
    let text = stdout(&mrope(&["--format"], &[]));
    for word in [
        "position_ids",
        "rope_parameters",
        "q_out.X",
        "inv_freq_f64",
        "save_file",
    ] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn a_head_too_wide_for_frequencies_is_refused_before_they_are_made() {
    let folder = folder("tables");
    let file = folder.join("tables.json");
    let table = |head_dim: u64| {
        serde_json::json!({"cases": [{
            "name": "wide", "seq_len": null, "head_dim": head_dim,
            "max_position_embeddings": null, "attention_scaling": 1.0, "inv_freq_f64": [1.0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }]})
    };
    for head_dim in [1 << 63, 2_000_000_000] {
        std::fs::write(&file, table(head_dim).to_string()).expect("file is written");
        let output = mrope(&[], &[&file]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = stdout(&output);
        let expected = "FAIL head_dim must be between 1 and 65536, found";
        assert!(text.contains(expected), "{text}");
    }
}
