//! Checkpoint folders with surplus files and tensors: the index alone selects the file of a tensor.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::json;
use vlm_models::{VlmConfig, VlmError};

const EMBEDDING: &str = "model.language_model.embed_tokens.weight";
/// The same parameter, as checkpoints of Qwen2-VL spell it.
const OTHER_SPELLING: &str = "model.embed_tokens.weight";
const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";
const SINGLE: &str = "model.safetensors";
/// Repeated runs, since a hash map's order could decide.
const RUNS: usize = 20;

/// Type, shape and bytes by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;
/// The shard of each tensor.
type Index = BTreeMap<String, &'static str>;

fn tiny() -> PathBuf {
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    fixtures.join("models/qwen3_vl_tiny")
}

fn tensors() -> Tensors {
    let bytes = fs::read(tiny().join(SINGLE)).expect("the file reads");
    let file = SafeTensors::deserialize(&bytes).expect("the file parses");
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(name, view)| {
            let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, tensor)
        })
        .collect()
}

/// The embedding as an earlier save left it: 9 everywhere.
fn stale() -> (String, (Dtype, Vec<usize>, Vec<u8>)) {
    let (dtype, shape, mut bytes) = tensors()[EMBEDDING].clone();
    for value in bytes.chunks_exact_mut(4) {
        value.copy_from_slice(&9.0_f32.to_le_bytes());
    }
    (EMBEDDING.to_owned(), (dtype, shape, bytes))
}

/// The tensors in two parts, and their index; the embedding is in the first.
fn halves() -> ([Tensors; 2], Index) {
    let is_first = |name: &str| name < "model.language_model.layers.1";
    let (first, second): (Tensors, Tensors) =
        tensors().into_iter().partition(|(name, _)| is_first(name));
    assert!(first.contains_key(EMBEDDING) && second.len() > 1);
    let index = [(&first, ONE), (&second, TWO)].into_iter();
    let index = index.flat_map(|(part, file)| part.keys().map(move |name| (name.clone(), file)));
    let index = index.collect();
    ([first, second], index)
}

/// A checkpoint folder of these files.
fn folder(label: &str, files: &[(&str, &Tensors)], index: Option<&Index>) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(label);
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("an earlier run's folder goes");
    }
    fs::create_dir_all(&folder).expect("the folder is made");
    fs::copy(tiny().join("config.json"), folder.join("config.json")).expect("it copies");
    for (file, tensors) in files {
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("it is whole");
            (name, view)
        });
        safetensors::serialize_to_file(views, None, &folder.join(file)).expect("it is written");
    }
    if let Some(index) = index {
        let index = json!({ "metadata": {}, "weight_map": index }).to_string();
        fs::write(folder.join("model.safetensors.index.json"), index).expect("it is written");
    }
    folder
}

fn load(folder: &Path) -> Result<BTreeMap<String, TensorData>, VlmError> {
    let model = VlmConfig::from_folder(folder)?.load(folder, &Device::flex())?;
    model.checkpoint_tensors()
}

fn refuse(folder: &Path) -> VlmError {
    let loaded = load(folder).map(drop);
    loaded.expect_err("files and index do not fit")
}

fn expect_as_published(folder: &Path) {
    let found = load(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let published = load(&tiny()).expect("the fixture loads");
    assert!(found == published, "{}", folder.display());
}

#[test]
fn a_tensor_comes_from_the_shard_that_the_index_names() {
    let ([first, mut second], index) = halves();
    second.extend([stale()]);
    let later = folder(
        "stale_later",
        &[(ONE, &first), (TWO, &second)],
        Some(&index),
    );
    expect_as_published(&later);

    // A file of what was trained last over a base that stays as it was, before and after it.
    let mut base = tensors();
    base.extend([stale()]);
    let mut overlay = tensors();
    overlay.retain(|name, _| name == EMBEDDING);
    for (label, file) in [
        ("overlay_before", "embedding.safetensors"),
        ("overlay_after", "newest.safetensors"),
    ] {
        let shard = |name: &String| if name == EMBEDDING { file } else { ONE };
        let index = base.keys().map(|name| (name.clone(), shard(name)));
        let index: Index = index.collect();
        expect_as_published(&folder(
            label,
            &[(ONE, &base), (file, &overlay)],
            Some(&index),
        ));
    }
}

#[test]
fn a_shard_is_a_file_of_the_folder() {
    let all = tensors();
    for shard in ["/etc/passwd", "../model.safetensors", "a/../../b"] {
        let index = all.keys().map(|name| (name.clone(), shard)).collect();
        let error = refuse(&folder("outside", &[(ONE, &all)], Some(&index))).to_string();
        let expected = format!("in {shard:?}, expected a file of this folder");
        assert!(error.contains(&expected), "{error}");
    }
    #[cfg(unix)]
    for file in ["config.json", SINGLE, ONE] {
        let index = all.keys().map(|name| (name.clone(), ONE)).collect();
        let folder = folder("pipe", &[], Some(&index));
        let _absent = fs::remove_file(folder.join(file));
        let made = std::process::Command::new("mkfifo")
            .arg(folder.join(file))
            .status();
        assert!(made.expect("mkfifo runs").success());
        // Opening it would wait for a writer.
        let error = refuse(&folder).to_string();
        assert!(
            error.contains(file) && error.contains("not a regular file"),
            "{error}"
        );
    }
}

#[test]
fn what_the_index_does_not_name_is_left_alone() {
    let extra = "mtp.fc.weight".to_owned();
    let ([first, mut second], mut index) = halves();
    second.insert(extra.clone(), (Dtype::F32, vec![2, 2], vec![0; 16]));
    second.insert(OTHER_SPELLING.to_owned(), stale().1);
    let files = [(ONE, &first), (TWO, &second)];
    for _ in 0..RUNS {
        expect_as_published(&folder("unindexed", &files, Some(&index)));
    }

    index.insert(extra.clone(), TWO);
    let error = refuse(&folder("indexed_extra", &files, Some(&index)));
    assert!(
        matches!(&error, VlmError::UnusedTensors { names } if names[..] == [extra]),
        "{error}"
    );

    let ([first, second], mut index) = halves();
    index.remove(EMBEDDING);
    let files = [(ONE, &first), (TWO, &second)];
    let error = refuse(&folder("incomplete_index", &files, Some(&index)));
    assert!(
        matches!(&error, VlmError::MissingTensors { names } if names[..] == [EMBEDDING]),
        "{error}"
    );
}

#[test]
fn two_spellings_of_one_tensor_are_refused_in_every_run() {
    let expect_refused = |folder: &Path, names: [&str; 2], files: [&str; 2]| {
        for run in 0..RUNS {
            let error = refuse(folder);
            let VlmError::TwoSpellings {
                names: found,
                files: found_files,
            } = &error
            else {
                panic!("run {run}: {error}");
            };
            assert_eq!(found.each_ref().map(String::as_str), names, "run {run}");
            let expected = files.map(|file| folder.join(file));
            assert_eq!(found_files, &expected, "run {run}");
            let message = error.to_string();
            for shown in names.iter().chain(&files) {
                assert!(message.contains(shown), "{message}");
            }
        }
    };
    let both = [OTHER_SPELLING, EMBEDDING];
    let mut single = tensors();
    single.insert(OTHER_SPELLING.to_owned(), stale().1);
    let folder_of_one = folder("two_spellings", &[(SINGLE, &single)], None);
    expect_refused(&folder_of_one, both, [SINGLE, SINGLE]);

    let ([first, mut second], mut index) = halves();
    second.insert(OTHER_SPELLING.to_owned(), stale().1);
    index.insert(OTHER_SPELLING.to_owned(), TWO);
    let files = [(ONE, &first), (TWO, &second)];
    let sharded = folder("two_spellings_in_shards", &files, Some(&index));
    expect_refused(&sharded, [EMBEDDING, OTHER_SPELLING], [ONE, TWO]);
}

#[test]
fn an_index_that_places_a_tensor_in_a_shard_that_lacks_it_is_refused() {
    let ([first, second], mut index) = halves();
    index.insert(EMBEDDING.to_owned(), TWO);
    index.insert("model.visual.nowhere.weight".to_owned(), TWO);
    let files = [(ONE, &first), (TWO, &second)];
    let folder = folder("not_in_shard", &files, Some(&index));
    let error = refuse(&folder);
    let VlmError::NotInShard { shard, names } = &error else {
        panic!("{error}");
    };
    assert_eq!(shard, &folder.join(TWO));
    assert_eq!(names[..], [EMBEDDING, "model.visual.nowhere.weight"]);
    let message = error.to_string();
    assert!(
        message.contains(TWO) && message.contains(EMBEDDING),
        "{message}"
    );
}
