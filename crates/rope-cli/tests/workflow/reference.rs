//! The inputs and references of tests/fixtures, and folders of weights in each type.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn::tensor::{bf16, f16};
use serde_json::{Map, Value, json};

use super::Cell;

pub(super) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

pub(super) fn json_of(path: &Path) -> Value {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).expect("JSON")
}

/// A part of workflow/expected.json for the cell's family.
pub(super) fn expected(cell: &Cell, part: &str) -> &'static Value {
    static FILE: OnceLock<Value> = OnceLock::new();
    let file = FILE.get_or_init(|| json_of(&fixtures().join("workflow/expected.json")));
    let found = &file[cell.family][part];
    assert!(!found.is_null(), "no {part} of {}", cell.family);
    found
}

/// Digests of the weights that PEFT merges into a base of the cell's precision.
pub(super) fn merged(cell: &Cell) -> Map<String, Value> {
    let file = json_of(&fixtures().join("finetune/merged.json"));
    let found = match cell.precision {
        "f16" => &expected(cell, "merged")["f16"],
        _ => &file[format!("{}_tiny", cell.family)][cell.precision],
    };
    found.as_object().expect("digests").clone()
}

/// The records of the cell's data.
pub(super) fn records(cell: &Cell) -> Vec<Value> {
    let path = fixtures().join(format!("workflow/{}.jsonl", cell.data));
    let text = std::fs::read_to_string(path).expect("records");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("JSON")
}

/// A model folder of the cell's own: config.json, changed, the tokenizer and processor of the
/// family, and unless it is to have random weights the model's, in f32.
pub(super) fn model(cell: &Cell, has_weights: bool, change: impl Fn(&mut Value)) -> PathBuf {
    let (folder, fixtures) = (cell.fresh("model"), fixtures());
    let tiny = fixtures
        .join("models")
        .join(format!("{}_tiny", cell.family));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut config = json_of(&tiny.join("config.json"));
    change(&mut config);
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    for name in [
        "chat_template.jinja",
        "generation_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let from = fixtures.join("workflow").join(cell.family).join(name);
        if name == "processor_config.json" && !cell.sees() {
            continue;
        }
        std::fs::copy(&from, folder.join(name)).unwrap_or_else(|e| panic!("{from:?}: {e}"));
    }
    if has_weights {
        let name = "model.safetensors";
        std::fs::copy(tiny.join(name), folder.join(name)).expect("weights");
    }
    folder
}

/// A tensor of a safetensors file.
pub(super) struct Stored {
    pub(super) name: String,
    kind: String,
    shape: Value,
    pub(super) bytes: Vec<u8>,
}

/// The tensors of a safetensors file.
pub(super) fn tensors(path: &Path) -> Vec<Stored> {
    let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes"));
    let (header, data) = rest.split_at(usize::try_from(length).expect("a length"));
    let header: Map<String, Value> = serde_json::from_slice(header).expect("JSON");
    let read = |(name, entry): (String, Value)| {
        let at = |end: usize| entry["data_offsets"][end].as_u64().expect("an offset") as usize;
        Stored {
            kind: entry["dtype"].as_str().expect("a type").to_owned(),
            shape: entry["shape"].clone(),
            bytes: data[at(0)..at(1)].to_vec(),
            name,
        }
    };
    let entries = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__");
    entries.map(read).collect()
}

/// Rounds the weights of a folder to the precision, as torch does.
pub(super) fn round(folder: &Path, precision: &str) {
    let path = folder.join("model.safetensors");
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors(&path) {
        assert_eq!(tensor.kind, "F32", "{}", tensor.name);
        let start = data.len();
        for bytes in tensor.bytes.chunks_exact(4) {
            let x = f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
            match precision {
                "bf16" => data.extend(bf16::from_f32(x).to_le_bytes()),
                "f16" => data.extend(f16::from_f32(x).to_le_bytes()),
                _ => data.extend(bytes),
            }
        }
        let entry = json!({
            "dtype": precision.to_uppercase(),
            "shape": tensor.shape,
            "data_offsets": [start, data.len()],
        });
        header.insert(tensor.name, entry);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &data].concat()).expect("written");
}

/// A tensor's fingerprint.
pub(super) fn digest(bytes: &[u8]) -> String {
    let mut hash = plain_files::Fingerprint::default();
    hash.add(bytes);
    format!("{:016x}", hash.value())
}
