//! Merged checkpoints against PEFT's: tests/fixtures/generate/merge.py.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device};
use serde_json::{Value, json};
use vlm_models::file::{Entry, Sink, TensorFile};
use vlm_models::{Merge, MergeCheck, MergedTensor, VlmConfig, VlmError};

const FAMILIES: [&str; 8] = [
    "qwen2_vl_tiny",
    "qwen2_5_vl_tiny",
    "qwen3_vl_tiny",
    "glm4v_tiny",
    "qwen3_5_tiny",
    "qwen3_vl_moe_tiny",
    "qwen3_5_moe_tiny",
    "glm4v_moe_tiny",
];
const WEIGHTS: &str = "model.safetensors";
const ADAPTER: &str = "adapter_model.safetensors";
const ADAPTER_CONFIG: &str = "adapter_config.json";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn model(family: &str) -> PathBuf {
    fixtures().join("models").join(family)
}

fn adapter(family: &str) -> PathBuf {
    fixtures().join("finetune").join(family)
}

/// An empty folder of a test.
fn fresh(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn copied(from: &Path, to: &Path, names: &[&str]) {
    for name in names {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

fn digest(bytes: &[u8]) -> String {
    let mut hash = plain_files::Fingerprint::default();
    hash.add(bytes);
    format!("{:016x}", hash.value())
}

/// The bytes of each tensor of a file.
fn tensors(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = TensorFile::open(path).unwrap();
    let read = |(name, stored): (String, vlm_models::file::Stored)| {
        let data = file.read(&stored, stored.dtype().unwrap(), 0..stored.elements());
        (name, data.unwrap().bytes().to_vec())
    };
    file.tensors().into_iter().map(read).collect()
}

/// Writes some tensors of a file into another, in a type.
fn rewrite(from: &Path, to: &Path, dtype: DType, is_kept: impl Fn(&str) -> bool) {
    let source = TensorFile::open(from).unwrap();
    let kept: Vec<_> = source
        .tensors()
        .into_iter()
        .filter(|(name, _)| is_kept(name))
        .collect();
    let entry = |(name, stored): &(String, vlm_models::file::Stored)| Entry {
        name: name.clone(),
        shape: stored.shape.clone(),
        dtype,
    };
    let entries: Vec<Entry> = kept.iter().map(entry).collect();
    let mut sink = Sink::create(to, &entries).unwrap();
    for (_, stored) in &kept {
        let data = source
            .read(stored, stored.dtype().unwrap(), 0..stored.elements())
            .unwrap();
        sink.write(data.convert_dtype(dtype).bytes()).unwrap();
    }
    sink.commit().unwrap();
}

/// The adapter of a family, with other values in its configuration.
fn changed(family: &str, folder: &Path, changes: &Value) {
    copied(&adapter(family), folder, &[ADAPTER]);
    let text = fs::read_to_string(adapter(family).join(ADAPTER_CONFIG)).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(folder.join(ADAPTER_CONFIG), config.to_string()).unwrap();
}

fn merge(
    base: &Path,
    adapters: &[(PathBuf, f64)],
    out: &Path,
) -> Result<(MergeCheck, Vec<MergedTensor>), VlmError> {
    let merge = Merge::open(base, adapters, false, &Device::flex())?;
    let mut merged = Vec::new();
    let check = merge.write(out, &mut |tensor| merged.push(tensor.clone()))?;
    Ok((check, merged))
}

#[test]
fn merged_weights_are_those_of_peft_to_the_bit() {
    let text = fs::read_to_string(fixtures().join("finetune/merged.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> =
        serde_json::from_str(&text).unwrap();
    for family in FAMILIES {
        let folder = fresh(&format!("merge-{family}"));
        let [narrow, rslora] = ["narrow", "other"].map(|name| folder.join(name));
        fs::create_dir_all(&narrow).unwrap();
        fs::create_dir_all(&rslora).unwrap();
        copied(&model(family), &narrow, &["config.json"]);
        let [from, to] = [model(family), narrow.clone()].map(|folder| folder.join(WEIGHTS));
        rewrite(&from, &to, DType::BF16, |_| true);
        changed(
            family,
            &rslora,
            &json!({ "use_rslora": true, "lora_alpha": 3 }),
        );
        let (first, second) = ((adapter(family), 1.0), (rslora, 1.0));
        for (case, base, adapters) in [
            ("f32", &model(family), vec![first.clone()]),
            ("bf16", &narrow, vec![first.clone()]),
            ("rslora", &model(family), vec![second.clone()]),
            ("two", &model(family), vec![first, second]),
        ] {
            let out = folder.join(case);
            let (check, merged) = merge(base, &adapters, &out).unwrap();
            println!("{family} {case}: {check:?}");
            assert!(
                check.effect > 1e-3 * check.largest,
                "{family} {case}: {check:?}"
            );
            let [before, after] = [base, &out].map(|folder| tensors(&folder.join(WEIGHTS)));
            let mut compared = 0;
            for (name, bytes) in &after {
                let layers = name.find("layers.").map_or("", |at| &name[at..]);
                if let Some(expected) = expected[family][case].get(layers) {
                    assert_eq!(&digest(bytes), expected, "{family} {case}: {name}");
                    compared += 1;
                } else {
                    assert_eq!(bytes, &before[name], "{family} {case}: {name}");
                }
            }
            assert_eq!(compared, expected[family][case].len(), "{family} {case}");
            assert_eq!((merged.len(), before.len()), (compared, after.len()));
            let lost = merged.iter().map(|tensor| tensor.lost).fold(0.0, f64::max);
            let (least, most) = if case == "bf16" {
                (1e-3, 1.0)
            } else {
                (1e-9, 1e-5)
            };
            assert!((least..most).contains(&lost), "{family} {case}: {lost}");
        }
    }
}

/// The adapters of finetune_parts.py, with word embeddings, head and merger.
#[test]
fn weights_trained_whole_replace_those_of_the_base_as_in_peft() {
    // Without the prefixes that differ between checkpoints and classes.
    fn short(name: &str) -> &str {
        let name = name.trim_start_matches("model.");
        name.trim_start_matches("language_model.")
    }
    // Those with parts trained whole.
    for family in &FAMILIES[..5] {
        let folder = fresh(&format!("merge-whole-{family}"));
        let parts = adapter(family).join("parts");
        let text = fs::read_to_string(parts.join("merged.json")).unwrap();
        let expected: BTreeMap<String, BTreeMap<String, String>> =
            serde_json::from_str(&text).unwrap();
        for (case, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
            let (base, out) = (folder.join(format!("{case}-base")), folder.join(case));
            fs::create_dir_all(&base).unwrap();
            copied(&model(family), &base, &["config.json"]);
            let [from, to] = [model(family), base.clone()].map(|folder| folder.join(WEIGHTS));
            rewrite(&from, &to, dtype, |_| true);
            let (check, merged) = merge(&base, &[(parts.clone(), 1.0)], &out).unwrap();
            assert!(check.effect > 1e-3 * check.largest, "{family}: {check:?}");
            let [before, after] = [&base, &out].map(|folder| tensors(&folder.join(WEIGHTS)));
            let expected: BTreeMap<&str, &String> = expected[case]
                .iter()
                .map(|(name, digest)| (short(name), digest))
                .collect();
            let mut changed = 0;
            for (name, bytes) in &after {
                if let Some(expected) = expected.get(short(name)) {
                    assert_eq!(&&digest(bytes), expected, "{family} {case}: {name}");
                    changed += 1;
                } else {
                    assert_eq!(bytes, &before[name], "{family} {case}: {name}");
                }
            }
            // The state of a model has a tied head, too.
            let tied = usize::from(!after.contains_key("lm_head.weight"));
            assert_eq!(changed, expected.len() - tied, "{family} {case}");
            assert_eq!(merged.len(), changed, "{family} {case}");
            let exact = merged
                .iter()
                .filter(|tensor| tensor.rounding == 0.0)
                .count();
            assert_eq!(exact > 2, dtype == DType::F32, "{family} {case}: {exact}");
        }
    }
}

/// Older checkpoints store the weight of a tied head twice.
#[test]
fn a_stored_tied_head_is_replaced_with_the_embeddings() {
    let family = "qwen2_5_vl_tiny";
    let folder = fresh("merge-tied");
    let (base, out) = (folder.join("base"), folder.join("out"));
    fs::create_dir_all(&base).unwrap();
    copied(&model(family), &base, &["config.json"]);
    let source = TensorFile::open(&model(family).join(WEIGHTS)).unwrap();
    let mut all: Vec<_> = source.tensors().into_iter().collect();
    let table = all
        .iter()
        .find(|(name, _)| name.ends_with("embed_tokens.weight"));
    let (table, head) = (table.unwrap().0.clone(), "lm_head.weight".to_owned());
    all.push((head.clone(), source.tensors()[&table].clone()));
    let entries = all.iter().map(|(name, stored)| Entry {
        name: name.clone(),
        shape: stored.shape.clone(),
        dtype: DType::F32,
    });
    let entries: Vec<Entry> = entries.collect();
    let mut sink = Sink::create(&base.join(WEIGHTS), &entries).unwrap();
    for (_, stored) in &all {
        let data = source.read(stored, DType::F32, 0..stored.elements());
        sink.write(data.unwrap().bytes()).unwrap();
    }
    sink.commit().unwrap();
    merge(&base, &[(adapter(family).join("parts"), 1.0)], &out).unwrap();
    let [before, after] = [base, out].map(|folder| tensors(&folder.join(WEIGHTS)));
    assert_ne!(after[&table], before[&table]);
    assert!(after[&head] == after[&table]);
}

#[test]
fn weights_trained_whole_are_neither_scaled_nor_changed_twice() {
    let family = FAMILIES[0];
    let folder = fresh("merge-whole-refused");
    let (parts, plain) = (adapter(family).join("parts"), adapter(family));
    for (adapters, says) in [
        (vec![(parts.clone(), 0.5)], "modules_to_save = 0.5"),
        (
            vec![(parts.clone(), 1.0), (parts.clone(), 1.0)],
            "each of its modules in one adapter",
        ),
    ] {
        let error = merge(&model(family), &adapters, &folder.join("out")).unwrap_err();
        assert!(
            error.to_string().contains(says),
            "{says:?} is not in: {error}"
        );
    }
    // Another adapter beside it is added.
    let adapters = [(parts, 1.0), (plain, 0.5)];
    merge(&model(family), &adapters, &folder.join("both")).unwrap();
}

/// A checkpoint in two shards, the second in a folder, with files that a merge copies or leaves.
fn sharded(family: &str, folder: &Path) {
    fs::create_dir_all(folder.join("parts")).unwrap();
    copied(&model(family), folder, &["config.json"]);
    let whole = model(family).join(WEIGHTS);
    let is_first = |name: &str| name.len().is_multiple_of(2);
    rewrite(&whole, &folder.join("a.safetensors"), DType::F32, is_first);
    let second = folder.join("parts/b.safetensors");
    rewrite(&whole, &second, DType::F32, |name| !is_first(name));
    let names = TensorFile::open(&whole).unwrap().tensors().into_keys();
    let shard = |name: &String| {
        if is_first(name) {
            "a.safetensors"
        } else {
            "parts/b.safetensors"
        }
    };
    let map: BTreeMap<String, &str> = names.map(|name| (name.clone(), shard(&name))).collect();
    let index = json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    for name in ["tokenizer.json", "README.md", "old.bin", ADAPTER_CONFIG] {
        fs::write(folder.join(name), name).unwrap();
    }
}

fn listed(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn shards_index_and_other_files_stay_and_no_folder_loads_before_the_end() {
    let family = FAMILIES[2];
    let folder = fresh("merge-sharded");
    let (base, out) = (folder.join("base"), folder.join("out"));
    sharded(family, &base);
    let merge = Merge::open(&base, &[(adapter(family), 1.0)], false, &Device::flex()).unwrap();
    let mut writes = 0;
    merge
        .write(&out, &mut |_| {
            writes += 1;
            for name in listed(&folder) {
                let loads = VlmConfig::from_folder(folder.join(&name)).is_ok();
                assert!(
                    !loads || name == "base",
                    "{name} loads after {writes} weights"
                );
            }
        })
        .unwrap();
    assert!(writes > 0);
    assert_eq!(listed(&folder), ["base", "out"]);
    let kept = [
        "README.md",
        "a.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ];
    assert_eq!(
        listed(&out),
        [&kept[..], &["parts", "tokenizer.json"]].concat()
    );
    for name in [
        "README.md",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ] {
        assert_eq!(
            fs::read(out.join(name)).unwrap(),
            fs::read(base.join(name)).unwrap()
        );
    }
    let whole = folder.join("whole");
    merge_one(&model(family), family, &whole);
    let expected = tensors(&whole.join(WEIGHTS));
    let mut found = tensors(&out.join("a.safetensors"));
    found.extend(tensors(&out.join("parts/b.safetensors")));
    assert_eq!(found, expected);
}

fn merge_one(base: &Path, family: &str, out: &Path) {
    merge(base, &[(adapter(family), 1.0)], out).unwrap();
}

#[test]
fn weights_of_adapters_scale_their_effect() {
    let family = FAMILIES[0];
    let folder = fresh("merge-weights");
    let [twice, opposite] = ["twice", "opposite"].map(|name| folder.join(name));
    let one = adapter(family);
    merge(
        &model(family),
        &[(one.clone(), 0.5), (one.clone(), 0.5)],
        &twice,
    )
    .unwrap();
    merge_one(&model(family), family, &folder.join("once"));
    let read = |folder: &Path| {
        let path = folder.join(WEIGHTS);
        let file = TensorFile::open(&path).unwrap();
        let mut all = Vec::new();
        for stored in file.tensors().values() {
            let data = file.read(stored, DType::F32, 0..stored.elements()).unwrap();
            all.extend(data.iter::<f32>());
        }
        all
    };
    let pairs = read(&twice).into_iter().zip(read(&folder.join("once")));
    let apart = pairs
        .map(|(left, right)| (left - right).abs())
        .fold(0.0, f32::max);
    assert!(apart < 1e-6, "{apart}");
    let (check, _) = merge(
        &model(family),
        &[(one.clone(), 1.0), (one, -1.0)],
        &opposite,
    )
    .unwrap();
    assert!(check.effect < 1e-4 * check.largest, "{check:?}");
}

#[test]
fn adapters_of_another_base_are_refused() {
    let family = FAMILIES[0];
    let folder = fresh("merge-refused");
    let refused = |base: &Path, adapter: &Path, factor: f64, parts: &[&str]| {
        let error = merge(base, &[(adapter.to_owned(), factor)], &folder.join("out")).unwrap_err();
        let message = error.to_string();
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
        assert!(!folder.join("out").exists(), "{message}");
        assert!(
            listed(&folder).iter().all(|name| !name.contains("partial")),
            "{message}"
        );
    };
    refused(
        &model(family),
        &adapter(FAMILIES[2]),
        1.0,
        &["lora_", "shape"],
    );
    refused(
        &model(family),
        &adapter(family),
        0.0,
        &["weight of an adapter"],
    );
    refused(&model(family), &folder, 1.0, &[ADAPTER_CONFIG]);

    // One that records its base.
    let config = VlmConfig::from_folder(model(family)).unwrap();
    let trained = config.load(model(family), &Device::flex()).unwrap();
    let own = folder.join("own");
    fs::create_dir_all(&own).unwrap();
    trained
        .load_adapter(adapter(family))
        .unwrap()
        .save_adapter(&own, "base")
        .unwrap();
    merge(&model(family), &[(own.clone(), 1.0)], &folder.join("fits")).unwrap();
    let merged = folder.join("fits");
    refused(&merged, &own, 1.0, &["fingerprint", "take the checkpoint"]);
    let other = config.load(&merged, &Device::flex()).unwrap();
    let error = other.clone().load_adapter(&own).unwrap_err();
    assert!(matches!(error, VlmError::OtherBase { .. }), "{error}");
    other.of_any_base().load_adapter(&own).unwrap();
    let any = Merge::open(&merged, &[(own.clone(), 1.0)], true, &Device::flex());
    any.unwrap().write(folder.join("any"), &mut |_| ()).unwrap();

    // A sum that its type cannot hold.
    let huge = folder.join("huge");
    fs::create_dir_all(&huge).unwrap();
    changed(family, &huge, &json!({ "lora_alpha": 1e300 }));
    refused(&model(family), &huge, 1.0, &["infinite or NaN", "diverged"]);

    let error = merge(&model(family), &[(adapter(family), 1.0)], &merged).unwrap_err();
    assert!(error.to_string().contains("it exists"), "{error}");
}
