//! Parquet files of Hugging Face's `datasets`, against the records that it reads.

#![cfg(feature = "parquet")]
#![allow(clippy::disallowed_methods, clippy::unwrap_used, reason = "test code")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use vlm_data::parquet::convert;
use vlm_data::text::{DataIndex, FileOptions};

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
    folder.join(name)
}

fn fresh(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    folder
}

#[test]
fn records_and_pictures_are_those_of_datasets() {
    let folder = fresh("parquet");
    let converted = convert(&fixture("data.parquet"), &folder, &|_, _| {}).unwrap();
    assert_eq!((converted.records, converted.pictures), (3, 3));
    let lines = |text: String| -> Vec<Value> {
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.collect()
    };
    let mut found = lines(fs::read_to_string(&converted.data).unwrap());
    for picture in found.iter_mut().flat_map(|record| {
        let pictures = record["images"].as_array_mut();
        pictures.into_iter().flatten()
    }) {
        let bytes = fs::read(folder.join(picture.as_str().unwrap())).unwrap();
        let digest: String = Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        *picture = format!("sha256:{digest}").into();
    }
    let expected = lines(fs::read_to_string(fixture("records.jsonl")).unwrap());
    assert_eq!(found, expected);
    // A data file like any other.
    let index = DataIndex::open(&converted.data, FileOptions::default()).unwrap();
    assert_eq!(index.len(), 3);
}

#[test]
fn damaged_files_and_taken_folders_are_refused() {
    let folder = fresh("parquet-damaged");
    fs::create_dir_all(&folder).unwrap();
    let whole = fs::read(fixture("data.parquet")).unwrap();
    let (mut refused, mut read) = (0, 0);
    for cut in (0..whole.len()).step_by(97) {
        let path = folder.join("cut.parquet");
        fs::write(&path, &whole[..cut]).unwrap();
        let out = fresh("parquet-cut");
        let error = convert(&path, &out, &|_, _| {}).unwrap_err().to_string();
        assert!(error.contains("cut.parquet"), "{error}");
        assert!(!out.join("data.jsonl").exists());
    }
    // Changed bytes give another text, or an error, and never a panic.
    for at in (4..whole.len() - 8).step_by(31) {
        let mut changed = whole.clone();
        changed[at] ^= 0x5a;
        let path = folder.join("changed.parquet");
        fs::write(&path, &changed).unwrap();
        match convert(&path, &fresh("parquet-changed"), &|_, _| {}) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 10 && read > 10, "{refused} {read}");
    let taken = fresh("parquet-taken");
    convert(&fixture("data.parquet"), &taken, &|_, _| {}).unwrap();
    let error = convert(&fixture("data.parquet"), &taken, &|_, _| {});
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("cannot write") && error.contains("data.jsonl"),
        "{error}"
    );
}
