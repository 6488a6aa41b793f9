//! Files of a model with experts: fused in either order of dimensions, and single in two shards; the
//! adapters of experts.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde_json::json;
use vlm_models::file::{Entry, Sink, TensorFile};
use vlm_models::rope_core::position_ids::Prompt;
use vlm_models::{Inputs, LoraConfig, Merge, TrainedWeights, Vlm, VlmConfig};

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

/// Copies of the checkpoint: with dimensions exchanged, as transformers 4 saved them, and with single
/// experts in two shards.
fn layouts(test: &str) -> [PathBuf; 2] {
    let fused = tensors(&fixture("models").join("model.safetensors"));
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
    let of_swapped = fresh(&format!("{test}-swapped"));
    write(&of_swapped.join("model.safetensors"), &swapped);

    let folder = fresh(&format!("{test}-single"));
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
    [of_swapped, folder]
}

#[test]
fn each_layout_of_experts_gives_the_same_model() {
    let expected = loaded(&fixture("models")).unwrap();
    for folder in layouts("experts") {
        assert!(loaded(&folder).unwrap() == expected, "{}", folder.display());
    }
    let single = single(&tensors(&fixture("models").join("model.safetensors")));

    // One matrix less, and one of another shape: each is named as in the file.
    let folder = fresh("experts-wrong");
    let name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight";
    let refused = |change: &dyn Fn(&mut BTreeMap<String, Values>)| {
        let mut wrong = single.clone();
        change(&mut wrong);
        write(&folder.join("model.safetensors"), &wrong);
        loaded(&folder).unwrap_err()
    };
    let error = refused(&|wrong| _ = wrong.remove(name));
    assert!(error.contains("lacks 1") && error.contains(name), "{error}");
    let error = refused(&|wrong| wrong.get_mut(name).unwrap().0.swap(0, 1));
    assert!(
        error.contains(name) && error.contains("[48, 16]"),
        "{error}"
    );
    let error = refused(&|wrong| {
        let more = wrong[name].clone();
        wrong.insert(name.replace(".3.", ".8."), more);
    });
    assert!(error.contains("experts.8.up_proj"), "{error}");
}

/// The keys that decide about experts, and those that no model can follow.
#[test]
fn configurations_of_experts_are_checked() {
    let text = fs::read_to_string(fixture("models").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let with = |changes: &[(&str, serde_json::Value)]| {
        let mut config = config.clone();
        for (key, value) in changes {
            config["text_config"][key] = value.clone();
        }
        VlmConfig::from_hf_config(&config.to_string()).map_err(|error| error.to_string())
    };
    let dense = |changes: &[(&str, serde_json::Value)]| {
        let config = with(changes).unwrap();
        config.text.experts.unwrap().dense_layers
    };
    let step = |step: usize| ("decoder_sparse_step", json!(step));
    assert_eq!(dense(&[]), [0; 0]);
    assert_eq!(
        dense(&[step(2), ("num_hidden_layers", json!(5))]),
        [0, 2, 4]
    );
    assert_eq!(dense(&[("mlp_only_layers", json!([1, 7]))]), [1]);
    let router_loss = |changes: &[(&str, serde_json::Value)]| {
        let config = with(changes).unwrap();
        config.text.experts.unwrap().router_loss
    };
    let asked = ("output_router_logits", json!(true));
    assert_eq!(router_loss(&[]), None);
    let factor = ("router_aux_loss_coef", json!(0.25));
    assert_eq!(router_loss(&[asked.clone(), factor]), Some(0.25));
    let none = ("router_aux_loss_coef", json!(null));
    assert_eq!(router_loss(&[asked, none]), Some(1e-3));
    for (key, value, says) in [
        ("decoder_sparse_step", json!(0), "1 or more"),
        ("num_local_experts", json!(2), "num_experts_per_tok"),
        ("num_local_experts", json!(1 << 24), "1 to 65536"),
        ("moe_intermediate_size", json!(1 << 30), "1 to 1048576"),
        ("num_experts_per_tok", json!(0), "num_experts_per_tok"),
    ] {
        let error = with(&[(key, value)]).unwrap_err();
        assert!(error.contains(says), "{key}: {error}");
    }
}

#[test]
fn groups_of_experts_that_no_token_can_choose_are_refused() {
    let path = fixture("models")
        .with_file_name("glm4v_moe_tiny")
        .join("config.json");
    let text = fs::read_to_string(path).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut config = config.clone();
        config["text_config"][key] = value;
        VlmConfig::from_hf_config(&config.to_string()).map_err(|error| error.to_string())
    };
    let experts = with("n_shared_experts", json!(3)).unwrap();
    let experts = experts.text.experts.unwrap();
    assert_eq!(
        (experts.shared_size, experts.dense_layers),
        (Some(48), vec![0])
    );
    let groups = experts.groups.unwrap();
    assert_eq!((groups.groups, groups.per_token, groups.scale), (2, 1, 1.5));
    for (key, value, says) in [
        ("n_group", json!(3), "equally large"),
        ("n_group", json!(8), "two best"),
        ("n_group", json!(0), "n_group"),
        ("topk_group", json!(3), "different groups"),
        ("topk_group", json!(0), "topk_group"),
        ("num_experts_per_tok", json!(5), "topk_group groups"),
        (
            "n_shared_experts",
            json!(0),
            "shared_expert_intermediate_size",
        ),
    ] {
        let error = with(key, value).unwrap_err();
        assert!(error.contains(says), "{key}: {error}");
    }
}

/// Changes a configuration and tensors.
type Change = dyn Fn(&mut serde_json::Value, &mut BTreeMap<String, Values>);

/// A copy of an adapter's folder with a change of its configuration and its tensors.
fn adapter(name: &str, from: &Path, change: &Change) -> PathBuf {
    let folder = fresh(name);
    let file = "adapter_config.json";
    let text = fs::read_to_string(from.join(file)).unwrap();
    let mut config = serde_json::from_str(&text).unwrap();
    let mut adapter = tensors(&from.join("adapter_model.safetensors"));
    change(&mut config, &mut adapter);
    fs::write(folder.join(file), config.to_string()).unwrap();
    write(&folder.join("adapter_model.safetensors"), &adapter);
    folder
}

fn with_adapter(base: &Path, folder: &Path) -> Result<Vlm, String> {
    let model = VlmConfig::from_folder(base).unwrap();
    let model = model.load(base, &Device::flex().autodiff()).unwrap();
    let model = model.load_adapter(folder);
    model.map_err(|error| error.to_string())
}

/// What PEFT would train without effect, or silently without some experts, has one error.
#[test]
fn adapters_that_no_expert_has_are_refused() {
    let (base, from) = (fixture("models"), fixture("finetune").join("experts"));
    let name = "base_model.model.model.language_model.layers.1.mlp.experts.lora_A.weight";
    let cases: [(&str, &Change); 8] = [
        ("regular expression without look-around", &|config, _| {
            config["alpha_pattern"] = json!({ "(": 4 });
        }),
        ("one pattern for each layer", &|config, _| {
            config["alpha_pattern"] = json!({ "down_proj": 4, "experts.down_proj": 8 });
        }),
        ("lora_A or lora_B", &|_, adapter| {
            adapter.retain(|name, _| !name.ends_with("layers.1.mlp.experts.lora_A.weight"));
        }),
        ("target_parameters, but", &|_, adapter| {
            adapter.retain(|name, _| !name.contains(".experts."));
        }),
        ("name it in target_parameters", &|config, adapter| {
            config["target_parameters"] = json!(null);
            adapter.retain(|name, _| !name.contains("base_layer"));
        }),
        ("[32, 16]", &|_, adapter| {
            let found = adapter.iter_mut();
            let mut found = found.filter(|(name, _)| name.contains("1.mlp.experts.lora_A"));
            found.next().unwrap().1.0.swap(0, 1);
        }),
        ("1 to 65536", &|config, _| {
            config["rank_pattern"] = json!({ "experts.gate_up_proj": 1 << 20 });
        }),
        ("fit nothing in this model", &|_, adapter| {
            let found = adapter
                .keys()
                .find(|name| name.contains("1.mlp.experts.lora_A"));
            let values = adapter.remove(&found.unwrap().clone()).unwrap();
            let other = "base_model.model.model.language_model.layers.1.mlp.others";
            for half in ["lora_A", "lora_B"] {
                adapter.insert(format!("{other}.{half}.weight"), values.clone());
            }
            adapter.retain(|name, _| !name.contains("1.mlp.experts.lora_B"));
        }),
    ];
    for (index, (says, change)) in cases.into_iter().enumerate() {
        let folder = adapter(&format!("experts-refused-{index}"), &from, change);
        let error = with_adapter(&base, &folder).unwrap_err();
        println!("{error}");
        assert!(error.contains(says), "{says}: {error}");
    }
    assert!(tensors(&from.join("adapter_model.safetensors")).contains_key(name));
    // As PEFT, which cannot drop inputs of experts.
    let model = VlmConfig::from_folder(&base).unwrap();
    let model = model.load(&base, &Device::flex().autodiff()).unwrap();
    let config = LoraConfig {
        targets: vec!["experts.down_proj".to_owned()],
        dropout: 0.1,
        ..LoraConfig::default()
    };
    let error = model.with_lora(&config, 0).unwrap_err().to_string();
    assert!(
        error.contains("dropout") && error.contains("experts"),
        "{error}"
    );
}

/// Adapters beside each set of parameters come back from a file as they were, and a merged model has
/// W + s B A in each layout of its base.
#[test]
fn adapters_of_experts_are_saved_and_merged() {
    let (base, device) = (fixture("models"), Device::flex());
    let targets: [&[&str]; 5] = [
        &["experts.gate_up_proj"],
        &["experts.down_proj", "mlp.gate"],
        &["experts.gate_up_proj", "experts.down_proj", "q_proj"],
        &[r".*layers\.1\.mlp\.experts\..*"],
        &[
            r".*layers\.0\.mlp\.experts\.gate.*",
            "layers.1.mlp.experts.down_proj",
        ],
    ];
    for (index, targets) in targets.into_iter().enumerate() {
        let config = LoraConfig {
            rank: 3,
            targets: targets.iter().map(|text| (*text).to_owned()).collect(),
            rank_pattern: [("experts.down_proj".to_owned(), 2)].into(),
            ..LoraConfig::default()
        };
        let model = VlmConfig::from_folder(&base).unwrap();
        let model = model.load(&base, &device.clone().autodiff()).unwrap();
        let model = model.with_lora(&config, 7).unwrap();
        let made = fresh(&format!("experts-made-{index}"));
        model.save_adapter(&made, "base").unwrap();
        // B is 0 at first.
        let folder = adapter(&format!("experts-drawn-{index}"), &made, &|_, adapter| {
            let names = adapter.iter_mut();
            for (_, (_, values)) in names.filter(|(name, _)| name.contains("lora_B")) {
                let drawn = values.iter_mut().enumerate();
                drawn.for_each(|(at, value)| *value = (at % 13) as f32 / 64.0 - 0.1);
            }
        });
        let saved = fresh(&format!("experts-saved-{index}"));
        let model = with_adapter(&base, &folder).unwrap();
        model.save_adapter(&saved, "base").unwrap();
        let file = "adapter_model.safetensors";
        let adapters = tensors(&folder.join(file));
        assert_eq!(tensors(&saved.join(file)), adapters, "{targets:?}");

        let [swapped, single] = layouts(&format!("experts-merged-{index}"));
        let mut merged = Vec::new();
        for base in [&base, &swapped, &single] {
            let out = base.with_extension(format!("merged-{index}"));
            let out = fresh("experts-out").with_file_name(out.file_name().unwrap());
            fs::remove_dir_all(&out).ok();
            let adapters = [(folder.clone(), 1.0)];
            let merge = Merge::open(base, &adapters, true, &device).unwrap();
            let check = merge.write(&out, &mut |_| {}).unwrap();
            assert!(check.effect > 1e-3, "{targets:?}: {check:?}");
            merged.push(loaded(&out).unwrap());
        }
        let [fused, others @ ..] = &merged[..] else {
            unreachable!("three layouts");
        };
        assert!(others.iter().all(|other| other == fused), "{targets:?}");
        let base = loaded(&base).unwrap();
        let changed = fused
            .iter()
            .filter(|(name, values)| base[*name] != **values);
        let changed: Vec<_> = changed.collect();
        assert_eq!(changed.len(), adapters.len() / 2, "{targets:?}");
        for (name, values) in changed {
            let Some((network, parameter)) = name.split_once(".experts.") else {
                continue;
            };
            let nested = format!("base_model.model.{network}.experts.base_layer");
            let is_inner = parameter == "gate_up_proj"
                && adapters.contains_key(&format!("{nested}.lora_A.weight"));
            let layer = match is_inner {
                true => nested,
                false => format!("base_model.model.{network}.experts"),
            };
            let (a, b) = (
                &adapters[&format!("{layer}.lora_A.weight")],
                &adapters[&format!("{layer}.lora_B.weight")],
            );
            let [experts, outputs, inputs] = values.shape().dims();
            let rank = a.0[0] / experts;
            assert_eq!(rank, if parameter == "down_proj" { 2 } else { 3 });
            let scale = 16.0 / rank as f64;
            let old: Vec<f64> = base[name].iter().collect();
            for (index, found) in values.iter::<f64>().enumerate() {
                let [expert, output, input] = [
                    index / inputs / outputs,
                    index / inputs % outputs,
                    index % inputs,
                ];
                let products = (0..rank).map(|of_rank| {
                    let a = a.1[(expert * rank + of_rank) * inputs + input];
                    let b = b.1[(output * rank + of_rank) * experts + expert];
                    f64::from(a) * f64::from(b)
                });
                let expected = old[index] + scale * products.sum::<f64>();
                assert!((found - expected).abs() < 1e-6, "{name}[{index}]");
            }
        }
    }
}

/// Experts trained whole replace those of each layout.
#[test]
fn experts_trained_whole_are_merged() {
    let (base, device) = (fixture("models"), Device::flex());
    let config = LoraConfig {
        targets: vec!["q_proj".to_owned()],
        whole: TrainedWeights {
            parts: Vec::new(),
            modules: vec!["layers.1.mlp.experts".to_owned()],
        },
        ..LoraConfig::default()
    };
    let model = VlmConfig::from_folder(&base).unwrap();
    let model = model.load(&base, &device.clone().autodiff()).unwrap();
    let model = model.with_lora(&config, 7).unwrap();
    let made = fresh("experts-whole-made");
    model.save_adapter(&made, "base").unwrap();
    let folder = adapter("experts-whole", &made, &|_, adapter| {
        let tensors = adapter.iter_mut();
        for (_, (_, values)) in tensors.filter(|(name, _)| name.contains(".experts.")) {
            let all = values.iter_mut().enumerate();
            all.for_each(|(at, value)| *value = (at % 251) as f32 / 512.0 - 0.2);
        }
    });
    let expected = tensors(&folder.join("adapter_model.safetensors"));
    let [swapped, single] = layouts("experts-whole-base");
    let before = loaded(&base).unwrap();
    for base in [&base, &swapped, &single] {
        let out = fresh("experts-whole-out").join("merged");
        let adapters = [(folder.clone(), 1.0)];
        let merge = Merge::open(base, &adapters, true, &device).unwrap();
        merge.write(&out, &mut |_| {}).unwrap();
        let merged = loaded(&out).unwrap();
        for (name, values) in &merged {
            let whole = expected.get(&format!("base_model.model.{name}"));
            let is_equal = match whole {
                Some((_, whole)) => values.iter::<f32>().eq(whole.iter().copied()),
                None => before[name] == *values,
            };
            assert!(is_equal, "{name} of {}", base.display());
        }
        let changed = merged
            .iter()
            .filter(|(name, values)| before[*name] != **values);
        assert_eq!(changed.count(), 2);
    }
}

/// Adapters of single experts, with the names of transformers 4, have the effect that they have in
/// PEFT.
#[test]
fn adapters_of_single_experts_are_joined() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let base = fixtures.join("models/qwen3_moe_tiny");
    let folder = fixtures.join("finetune/qwen3_moe_tiny/single");
    let logits = |model: Vlm| {
        let inputs = Inputs {
            prompt: Prompt {
                input_ids: &[5, 9, 17, 33, 65, 129, 3, 7],
                ..Prompt::default()
            },
            image_patches: None,
            video_patches: None,
            shown: None,
        };
        let model = model.map(&mut Wide).valid();
        let logits = model.forward(&model.batch(&inputs).unwrap()).unwrap();
        logits.into_data().iter::<f64>().collect::<Vec<_>>()
    };
    let file = TensorFile::open(&folder.join("logits.safetensors")).unwrap();
    let stored = &file.tensors()["logits"];
    let read = file.read(stored, DType::F64, 0..stored.elements()).unwrap();
    let apart = |found: Vec<f64>| {
        let pairs = found.iter().zip(read.iter::<f64>());
        pairs.fold(0.0_f64, |most, (left, right)| {
            most.max((left - right).abs())
        })
    };
    let plain = VlmConfig::from_folder(&base).unwrap();
    let plain = plain.load(&base, &Device::flex()).unwrap();
    assert!(apart(logits(plain)) > 0.1);
    let model = with_adapter(&base, &folder).unwrap();
    let wrong = apart(logits(model.clone()));
    assert!(wrong < 1e-6, "{wrong}");
    // Saved as one of each parameter.
    let saved = fresh("experts-joined");
    model.save_adapter(&saved, "base").unwrap();
    let again = with_adapter(&base, &saved).unwrap();
    assert!(apart(logits(again)) < 1e-6);
    const ONE: &str = "model.layers.1.mlp.experts.2.up_proj";
    let refused = |says: &str, change: &Change| {
        let folder = adapter("experts-partial", &folder, change);
        let error = with_adapter(&base, &folder).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    };
    refused("lack the adapters of other experts", &|_, adapter| {
        adapter.retain(|name, _| !name.contains(ONE));
    });
    refused("one of all experts", &|config, _| {
        config["alpha_pattern"] = json!({ "up_proj": 3 });
    });
    refused(&format!("{ONE}.lora_B"), &|_, adapter| {
        let mut tensors = adapter.iter_mut();
        let wrong = tensors.find(|(name, _)| name.contains(&format!("{ONE}.lora_B")));
        wrong.unwrap().1.0.swap(0, 1);
    });
}

struct Wide;

impl ModuleMapper for Wide {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(DType::F64))
    }
}
