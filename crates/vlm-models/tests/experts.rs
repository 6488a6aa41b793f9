//! Files of a model with experts: fused in either order of dimensions, and single in two shards.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, TensorData};
use serde_json::json;
use vlm_models::VlmConfig;
use vlm_models::file::{Entry, Sink, TensorFile};

const FAMILY: &str = "qwen3_vl_moe_tiny";

fn fixture(part: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    fixtures.join(part).join(FAMILY)
}

/// A folder with a configuration and nothing else.
fn fresh(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).unwrap();
    let config = "config.json";
    fs::copy(fixture("models").join(config), folder.join(config)).unwrap();
    folder
}

/// A tensor: its shape and its values.
type Values = (Vec<usize>, Vec<f32>);

fn tensors(path: &Path) -> BTreeMap<String, Values> {
    let file = TensorFile::open(path).unwrap();
    let read = |(name, stored): (String, vlm_models::file::Stored)| {
        let data = file
            .read(&stored, DType::F32, 0..stored.elements())
            .unwrap();
        (name, (stored.shape, data.iter::<f32>().collect()))
    };
    file.tensors().into_iter().map(read).collect()
}

fn write(path: &Path, tensors: &BTreeMap<String, Values>) {
    let entry = |(name, (shape, _)): (&String, &Values)| Entry {
        name: name.clone(),
        shape: shape.clone(),
        dtype: DType::F32,
    };
    let entries: Vec<Entry> = tensors.iter().map(entry).collect();
    let mut sink = Sink::create(path, &entries).unwrap();
    for (_, values) in tensors.values() {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        sink.write(&bytes).unwrap();
    }
    sink.commit().unwrap();
}

fn loaded(folder: &Path) -> Result<BTreeMap<String, TensorData>, String> {
    let config = VlmConfig::from_folder(folder).unwrap();
    let model = config.load(folder, &Device::flex());
    let model = model.map_err(|error| error.to_string())?;
    Ok(model.checkpoint_tensors().unwrap())
}

/// The matrices of each expert, as a file names and transposes them.
fn single(tensors: &BTreeMap<String, Values>) -> BTreeMap<String, Values> {
    let mut found = BTreeMap::new();
    for (name, (shape, values)) in tensors {
        let Some((network, matrix)) = name.split_once(".experts.") else {
            found.insert(name.clone(), (shape.clone(), values.clone()));
            continue;
        };
        let parts: &[&str] = match matrix {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            _ => &["down_proj"],
        };
        let (rows, columns) = (shape[1] / parts.len(), shape[2]);
        let matrices = values.chunks_exact(rows * columns).enumerate();
        for (index, values) in matrices {
            let (expert, part) = (index / parts.len(), parts[index % parts.len()]);
            let name = format!("{network}.experts.{expert}.{part}.weight");
            found.insert(name, (vec![rows, columns], values.to_vec()));
        }
    }
    found
}

#[test]
fn each_layout_of_experts_gives_the_same_model() {
    let base = fixture("models");
    let expected = loaded(&base).unwrap();
    let fused = tensors(&base.join("model.safetensors"));

    // As transformers 4 saved them.
    let mut swapped = fused.clone();
    for (name, (shape, values)) in &mut swapped {
        if name.contains(".experts.") {
            let [_, rows, columns] = shape[..] else {
                panic!("{name}: {shape:?}");
            };
            shape.swap(1, 2);
            for matrix in values.chunks_exact_mut(rows * columns) {
                let stored = matrix.to_vec();
                for (to, value) in matrix.iter_mut().enumerate() {
                    *value = stored[to % rows * columns + to / rows];
                }
            }
        }
    }
    assert!(swapped != fused);
    let folder = fresh("experts-swapped");
    write(&folder.join("model.safetensors"), &swapped);
    assert!(loaded(&folder).unwrap() == expected, "swapped");

    // Experts in two shards.
    let folder = fresh("experts-single");
    let single = single(&fused);
    assert!(single.len() > fused.len() + 20);
    let shard = |name: &str| ["a.safetensors", "b.safetensors"][name.len() % 2];
    for file in ["a.safetensors", "b.safetensors"] {
        let mut part = single.clone();
        part.retain(|name, _| shard(name) == file);
        write(&folder.join(file), &part);
    }
    let map: BTreeMap<_, _> = single.keys().map(|name| (name, shard(name))).collect();
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    assert!(loaded(&folder).unwrap() == expected, "single");

    // One expert less.
    let folder = fresh("experts-missing");
    let mut missing = single;
    missing.retain(|name, _| !name.contains("layers.1.mlp.experts.3.up_proj"));
    write(&folder.join("model.safetensors"), &missing);
    let error = loaded(&folder).unwrap_err();
    assert!(
        error.contains("layers.1.mlp.experts.gate_up_proj"),
        "{error}"
    );
}

/// PEFT's adapters of experts are refused, not left out.
#[test]
fn adapters_of_experts_are_refused() {
    let (from, folder) = (fixture("finetune"), fresh("experts-adapter"));
    let config = "adapter_config.json";
    fs::copy(from.join(config), folder.join(config)).unwrap();
    let mut adapter = tensors(&from.join("adapter_model.safetensors"));
    let name = "base_model.model.model.language_model.layers.1.mlp.experts.lora_A.weight";
    adapter.insert(name.to_owned(), (vec![32, 16], vec![0.5; 512]));
    write(&folder.join("adapter_model.safetensors"), &adapter);
    let base = fixture("models");
    let model = VlmConfig::from_folder(&base).unwrap();
    let model = model.load(&base, &Device::flex().autodiff()).unwrap();
    let error = model.load_adapter(&folder).unwrap_err().to_string();
    assert!(error.contains("mlp.experts.lora_A"), "{error}");
}
