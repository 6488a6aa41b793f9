//! Pictures against transformers: every pixel that is read and every bit of every patch.
//!
//! tests/fixtures/generate/pictures.py wrote the files, and describes their hashes.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use vlm_data::VlmDataError;
use vlm_data::picture::{Alpha, Backend, Picture, PictureConfig, PictureProcessor, ReadOptions};

/// The largest and the mean difference of a level of a JPEG from PIL's, of 255. Decoders may
/// round the inverse cosine transform and the interpolation of colours as they like.
const JPEG: (u8, f64) = (4, 0.6);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/pictures")
}

fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn expected() -> Value {
    read_json(&folder().join("pictures.json"))
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn hash_values(values: &[f32]) -> String {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    hash(&bytes)
}

/// Width, height and a hash, as the fixture writes them.
fn describe(picture: &Picture) -> String {
    format!(
        "{}x{} {}",
        picture.width(),
        picture.height(),
        hash(picture.rgb())
    )
}

/// The pictures that are computed; `draw` of pictures.py.
fn draw(width: u32, height: u32, kind: &str) -> Picture {
    let level = |x: u32, y: u32, c: u32| match kind {
        "noise" => {
            let n = x.wrapping_mul(2_654_435_761)
                ^ y.wrapping_mul(2_246_822_519)
                ^ c.wrapping_mul(3_266_489_917);
            let n = (n ^ n >> 15).wrapping_mul(2_246_822_519);
            ((n ^ n >> 13) >> 24) as u8
        }
        "edges" => 255 * (((x / (3 + c)) ^ (y / (2 + 2 * c))) & 1) as u8,
        "smooth" => ((x * x * 3 + y * y * 5 + x * y * (c + 1)) / 512) as u8,
        other => panic!("pictures of kind {other} cannot be drawn"),
    };
    let rows = (0..height).flat_map(|y| (0..width).flat_map(move |x| [0, 1, 2].map(|c| (x, y, c))));
    let rgb = rows.map(|(x, y, c)| level(x, y, c)).collect();
    Picture::from_rgb(width as usize, height as usize, rgb).expect("as many bytes as pixels")
}

/// The picture that an entry of the fixture describes.
fn draw_entry(entry: &Value) -> Picture {
    let side = |key: &str| {
        entry[key]
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .expect("a side")
    };
    draw(
        side("width"),
        side("height"),
        entry["kind"].as_str().expect("a kind"),
    )
}

/// The processors of the fixture, for both backends.
fn processors(expected: &Value) -> Vec<(String, &'static str, PictureProcessor)> {
    let processors = expected["processors"].as_object().expect("an object");
    let both = [("torchvision", Backend::Torchvision), ("pil", Backend::Pil)];
    let made = processors.iter().flat_map(|(name, json)| {
        both.map(|(label, backend)| {
            let config = PictureConfig::from_json(&json.to_string(), None).expect("it is read");
            let config = PictureConfig { backend, ..config };
            (
                name.clone(),
                label,
                PictureProcessor::new(config).expect("it is sound"),
            )
        })
    });
    made.collect()
}

/// Compares the patches of a picture with all entries of `patches`; returns how many there are.
fn compare(
    name: &str,
    picture: &Picture,
    entry: &Value,
    processors: &[(String, &str, PictureProcessor)],
    wrong: &mut Vec<String>,
) -> usize {
    for (family, backend, processor) in processors {
        let expected = &entry["patches"][family][backend];
        let found = processor.patches(picture);
        if expected.is_null() {
            if !matches!(found, Err(VlmDataError::AspectRatio { .. })) {
                wrong.push(format!("{name}, {family}, {backend}: it is not refused"));
            }
            continue;
        }
        let found = found.expect("patches");
        let last = found.values.len() - 1;
        let bits = [0, (last + 1) / 3, 2 * (last + 1) / 3, last].map(|i| found.values[i].to_bits());
        if serde_json::json!(found.grid) != expected["grid"]
            || hash_values(&found.values) != expected["hash"]
        {
            wrong.push(format!(
                "{name}, {family}, {backend}: grid {:?} and bits {bits:?}, expected {} and {}",
                found.grid, expected["grid"], expected["bits"],
            ));
        }
    }
    processors.len()
}

fn open(name: &str, options: &ReadOptions) -> Picture {
    Picture::open(folder().join(name), options).expect("it is read")
}

#[test]
fn files_are_those_of_pil_and_transformers() {
    let expected = expected();
    let processors = processors(&expected);
    let stored = ReadOptions {
        upright: false,
        ..ReadOptions::default()
    };
    let on_white = ReadOptions {
        alpha: Alpha::OnWhite,
        ..ReadOptions::default()
    };
    let (mut wrong, mut exact, mut compared) = (Vec::new(), 0, 0);
    for entry in expected["files"].as_array().expect("a list") {
        let name = entry["name"].as_str().expect("a name");
        let variants = [
            ("rgb", ReadOptions::default()),
            ("stored", stored.clone()),
            ("on_white", on_white.clone()),
        ];
        if name.ends_with(".jpg") {
            // The pixels of a JPEG are processed as those of any picture.
            let reference = open(
                entry["reference"].as_str().expect("a name"),
                &ReadOptions::default(),
            );
            compared += compare(name, &reference, entry, &processors, &mut wrong);
            continue;
        }
        for (key, options) in variants {
            let found = describe(&open(name, &options));
            let expected = entry.get(key).unwrap_or(&entry["rgb"]);
            if found != *expected {
                wrong.push(format!("{name}: {key} is {found}, expected {expected}"));
            }
        }
        exact += 1;
        compared += compare(
            name,
            &open(name, &ReadOptions::default()),
            entry,
            &processors,
            &mut wrong,
        );
    }
    println!("{exact} files read exactly, {compared} patchings compared");
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(exact >= 40, "only {exact} files");
}

#[test]
fn drawn_pictures_are_those_of_transformers() {
    let expected = expected();
    let processors = processors(&expected);
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for entry in expected["drawn"].as_array().expect("a list") {
        let picture = draw_entry(entry);
        let name = format!(
            "{} x {}, {}",
            entry["width"], entry["height"], entry["kind"]
        );
        assert_eq!(
            describe(&picture),
            entry["rgb"],
            "{name} is drawn otherwise"
        );
        compared += compare(&name, &picture, entry, &processors, &mut wrong);
    }
    println!("{compared} patchings compared");
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn jpeg_is_close_to_pil() {
    let expected = expected();
    let files = expected["files"].as_array().expect("a list");
    for entry in files {
        let name = entry["name"].as_str().expect("a name");
        let Some(reference) = entry["reference"]
            .as_str()
            .filter(|_| name.ends_with(".jpg"))
        else {
            continue;
        };
        let options = ReadOptions::default();
        let (found, reference) = (open(name, &options), open(reference, &options));
        assert_eq!(
            [found.width(), found.height()],
            [reference.width(), reference.height()]
        );
        let differences = found
            .rgb()
            .iter()
            .zip(reference.rgb())
            .map(|(a, b)| a.abs_diff(*b));
        let largest = differences.clone().max().unwrap_or(0);
        let sum: u64 = differences.map(u64::from).sum();
        let mean = sum as f64 / found.rgb().len() as f64;
        println!("{name}: levels differ by at most {largest}, {mean:.3} in the mean");
        assert!(
            largest <= JPEG.0 && mean <= JPEG.1,
            "{name}: {largest}, {mean}"
        );
    }
}

#[test]
fn older_versions_of_pillow_are_known() {
    let json = expected()["processors"]["qwen2_vl_few_tokens"].to_string();
    let config = PictureConfig::from_json(&json, None).expect("it is read");
    let processor = |backend| {
        let config = PictureConfig {
            backend,
            ..config.clone()
        };
        PictureProcessor::new(config).expect("it is sound")
    };
    let newest = processor(Backend::Pil);
    for (file, backend) in [
        ("pillow_12.1.1.json", Backend::PilBefore12_2),
        ("pillow_12.2.0.json", Backend::Pil12_2),
    ] {
        let older = processor(backend);
        let mut changed = 0;
        for entry in read_json(&folder().join(file)).as_array().expect("a list") {
            let picture = draw_entry(entry);
            let [old, new] = [&older, &newest]
                .map(|made| hash_values(&made.patches(&picture).expect("patches").values));
            assert_eq!(old, entry["hash"], "{file}: {entry}");
            changed += usize::from(old != new);
        }
        // Else the versions would not be told apart.
        assert!(
            changed > 2,
            "{file}: {changed} pictures are others with Pillow 13"
        );
    }
}
