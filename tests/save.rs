//! Saving into the folder of a sharded checkpoint: the trained weights are read back, also over a
//! connection and in pieces, and after that connection breaks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::backend::flex::{Flex, FlexDevice};
use burn::tensor::Device;
use burn_ascend::operations;
use burn_ascend::serve::Server;
use safetensors::SafeTensors;
use serde_json::json;
use vlm_models::{Transfer, Vlm, VlmConfig, VlmError};

const SHARD: &str = "model-00001-of-00001.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A copy of a tiny model with its weights in a shard.
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
    let bytes = fs::read(folder.join(SHARD)).expect("reads");
    let shard = SafeTensors::deserialize(&bytes).expect("parses");
    let map: BTreeMap<_, _> = shard.iter().map(|(name, _)| (name, SHARD)).collect();
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join(INDEX), index.to_string()).expect("index is written");
}

fn load(folder: &Path) -> Vlm {
    let config = VlmConfig::from_folder(folder).expect("config reads");
    config.load(folder, &Device::flex()).expect("weights load")
}

/// A model of the same configuration with other weights.
fn trained(folder: &Path) -> Vlm {
    let config = VlmConfig::from_folder(folder).expect("config reads");
    config.init(&Device::flex()).expect("builds")
}

fn same_weights(left: &Vlm, right: &Vlm) -> bool {
    let tensors = |model: &Vlm| model.checkpoint_tensors().expect("reads");
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

/// Pieces far smaller than the tensors, so that most of them cross in several.
const PIECE_BYTES: usize = 1000;

#[cfg(unix)]
#[test]
fn a_save_writes_through_no_link_and_its_file_has_the_mode_of_any_new_one() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let folder = sharded("saved_beside_links");
    let model = load(&folder);
    let victim = folder.join("victim");
    fs::write(&victim, "kept").expect("writes");
    symlink(&victim, folder.join("model.safetensors.partial")).expect("links");
    model.save(&folder).expect("saves");
    assert_eq!(fs::read(&victim).expect("reads"), b"kept");
    let path = folder.join("model.safetensors");
    assert!(!path.is_symlink());
    let mode = |path: &Path| path.metadata().expect("is there").permissions().mode();
    assert_eq!(mode(&path), mode(&victim));
    // The partial file of a save that was cut makes room for the next one.
    fs::write(folder.join("model.safetensors.partial"), "half").expect("writes");
    model.save(&folder).expect("saves");
    assert!(same_weights(&load(&folder), &model));
}

#[test]
fn a_checkpoint_crosses_in_pieces_of_the_size_asked_for() {
    let folder = sharded("pieces");
    let expected = load(&folder);
    let config = VlmConfig::from_folder(&folder).expect("config reads");
    let bytes = |tensors: &Vlm| -> u64 {
        let tensors = tensors.checkpoint_tensors().expect("reads");
        tensors.values().map(|data| data.bytes().len() as u64).sum()
    };
    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let device = server.connect(0).expect("it answers");
    let mut reports = Vec::new();
    let transfer = Transfer::default()
        .piece_bytes(PIECE_BYTES)
        .on_progress(|at| reports.push((at.bytes, at.total)));
    let found = config.load_with(&folder, &device, transfer).expect("loads");
    assert!(same_weights(&found, &expected));
    expect_pieces(&reports, bytes(&expected));

    let mut reports = Vec::new();
    let transfer = Transfer::default()
        .piece_bytes(PIECE_BYTES)
        .on_progress(|at| reports.push((at.bytes, at.total)));
    found.save_with(&folder, transfer).expect("saves");
    expect_pieces(&reports, bytes(&expected));
    assert!(same_weights(&load(&folder), &expected));
}

/// Reports of bytes moved that grow by at most a piece, up to `total`.
fn expect_pieces(reports: &[(u64, u64)], total: u64) {
    let longest = PIECE_BYTES as u64;
    let mut before = 0;
    for &(moved, of) in reports {
        assert!(
            moved > before && moved - before <= longest,
            "{before} {moved}"
        );
        assert_eq!(of, total);
        before = moved;
    }
    assert_eq!(before, total);
    assert!(reports.len() as u64 > total / longest, "{}", reports.len());
}

#[test]
fn a_device_lost_midway_leaves_no_half_loaded_model_and_no_half_written_file() {
    let folder = sharded("lost_midway");
    let config = VlmConfig::from_folder(&folder).expect("config reads");
    // Ends the server once half of the bytes have crossed.
    let breaking = |server: Server| {
        let mut server = Some(server);
        Transfer::default()
            .piece_bytes(PIECE_BYTES)
            .on_progress(move |at| {
                if at.bytes > at.total / 2 {
                    drop(server.take());
                }
            })
    };
    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let device = server.connect(0).expect("it answers");
    let error = config
        .load_with(&folder, &device, breaking(server))
        .map(drop);
    let error = error.expect_err("the device is gone");
    let VlmError::Transfer { moved, total, .. } = error else {
        panic!("{error}");
    };
    assert!(total / 2 < moved && moved < total, "{moved} of {total}");

    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let device = server.connect(0).expect("it answers");
    let model = config.load(&folder, &device).expect("loads");
    let error = model.save_with(&folder, breaking(server));
    let error = error.expect_err("the device is gone");
    assert!(matches!(error, VlmError::Transfer { .. }), "{error}");
    let names = fs::read_dir(&folder).expect("lists").map(|entry| {
        let name = entry.expect("lists").file_name();
        name.into_string().expect("UTF-8")
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert_eq!(names, ["config.json", SHARD, INDEX]);
}

#[test]
fn a_file_that_its_header_does_not_describe_is_refused() {
    let folder = sharded("cut_short");
    let shard = folder.join(SHARD);
    let bytes = fs::read(&shard).expect("reads");
    let config = VlmConfig::from_folder(&folder).expect("config reads");
    for (end, reason) in [
        (bytes.len() - 4, "its header describes"),
        (100, "its header alone takes"),
        (4, "it has 4 bytes, its header alone takes 8"),
    ] {
        fs::write(&shard, &bytes[..end]).expect("writes");
        let error = config.load(&folder, &Device::flex()).map(drop);
        let error = error.expect_err("a part is missing").to_string();
        assert!(error.contains(SHARD) && error.contains(reason), "{error}");
    }
}
