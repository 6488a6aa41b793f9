//! Saving into the folder of a sharded checkpoint: what was trained is what is read back.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use qwen_vl::{QwenVl, QwenVlConfig};
use serde_json::json;

const SHARD: &str = "model-00001-of-00001.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A copy of a tiny model whose weights lie in a shard.
fn sharded(label: &str) -> PathBuf {
    let tiny = rope_check::fixtures()
        .expect("the test runs in the workspace")
        .join("models/qwen2_vl_tiny");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(label);
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("an earlier run's folder goes");
    }
    fs::create_dir_all(&folder).expect("folder is made");
    fs::copy(tiny.join("config.json"), folder.join("config.json")).expect("copies");
    fs::copy(tiny.join("model.safetensors"), folder.join(SHARD)).expect("copies");
    write_index(&folder);
    folder
}

fn write_index(folder: &Path) {
    let index = json!({ "metadata": {}, "weight_map": { "lm_head.weight": SHARD } });
    fs::write(folder.join(INDEX), index.to_string()).expect("index is written");
}

fn load(folder: &Path) -> QwenVl {
    let config = QwenVlConfig::from_folder(folder).expect("config reads");
    config.load(folder, &Device::flex()).expect("weights load")
}

/// A model of the same configuration with other weights.
fn trained(folder: &Path) -> QwenVl {
    let config = QwenVlConfig::from_folder(folder).expect("config reads");
    config.init(&Device::flex()).expect("builds")
}

fn same_weights(left: &QwenVl, right: &QwenVl) -> bool {
    let tensors = |model: &QwenVl| model.checkpoint_tensors().expect("reads");
    tensors(left) == tensors(right)
}

#[test]
fn what_was_saved_is_what_is_loaded() {
    let folder = sharded("saved_over_shards");
    let published = load(&folder);
    let trained = trained(&folder);
    assert!(!same_weights(&published, &trained));

    trained.save(&folder).expect("saves");
    assert!(same_weights(&load(&folder), &trained));
    // Other programs read the index first, so it must not outlive its weights; shards are not ours.
    assert!(!folder.join(INDEX).exists());
    assert!(folder.join(SHARD).exists());
}

#[test]
fn an_older_index_does_not_hide_the_single_file() {
    let folder = sharded("older_index");
    let trained = trained(&folder);
    trained.save(&folder).expect("saves");
    write_index(&folder);
    assert!(same_weights(&load(&folder), &trained));
}

#[test]
fn a_save_that_fails_leaves_the_shards_readable() {
    let folder = sharded("failed_save");
    let published = load(&folder);
    // A folder in the file's place cannot be replaced by it.
    fs::create_dir(folder.join("model.safetensors")).expect("folder is made");
    assert!(published.save(&folder).is_err());
    assert!(folder.join(INDEX).exists());
    fs::remove_dir(folder.join("model.safetensors")).expect("folder goes");
    assert!(same_weights(&load(&folder), &published));
}
