//! What is trained, against PEFT and torch: tests/fixtures/generate/finetune_parts.py.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::DType;
use serde::Deserialize;
use vlm_models::file::{Entry, Sink, TensorFile};
use vlm_models::{LoraConfig, ModelPart, TrainedWeights, Vlm, VlmConfig};
use vlm_train::{Rates, Recipe, Schedule, TrainedParts, Trainer};

use crate::common::{
    FAMILIES, Folder, Halve, beside, fixtures, load, packed, recipe, sample, samples,
};
use crate::reference::{apart, logits, rounding, stored, wide, write_adapter};

#[derive(Deserialize)]
struct Curve {
    losses: Vec<f64>,
    gradient_norms: Vec<f64>,
    /// The last elements of each tensor of the adapter after these steps.
    #[serde(default)]
    weights: BTreeMap<String, Vec<f64>>,
}

const TOWER: ModelPart = ModelPart::Tower;
const MERGER: ModelPart = ModelPart::Merger;
const DECODER: ModelPart = ModelPart::Decoder;

fn curves(family: &str) -> BTreeMap<String, Curve> {
    let path = fixtures().join("finetune").join(family).join("parts.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn peft(family: &str) -> PathBuf {
    fixtures().join("finetune").join(family)
}

fn embeddings() -> Vec<String> {
    TrainedWeights::EMBEDDINGS.map(str::to_owned).to_vec()
}

fn lora(parts: &[ModelPart], layers: &[usize], whole: TrainedWeights) -> TrainedParts {
    TrainedParts::Lora(LoraConfig {
        rank: 4,
        alpha: 8.0,
        parts: parts.to_vec(),
        layers: layers.to_vec(),
        whole,
        ..LoraConfig::default()
    })
}

/// That of the reference.
fn short(trained: TrainedParts) -> Recipe {
    Recipe {
        steps: 5,
        rates: Rates::all(1e-3),
        schedule: Schedule::Constant,
        warmup_steps: 0,
        ..recipe(trained)
    }
}

/// True if a run is that of the reference: with states, two runs in f32 grow apart faster.
fn is_near(family: &str, [loss, norm, weights]: [f64; 3]) -> bool {
    match family {
        "qwen3_5_tiny" => loss < 1e-4 && norm < 1e-2 && weights < 2e-4,
        _ => loss < 1e-6 && norm < 1e-4 && weights < 1e-4,
    }
}

/// An empty folder.
/// Trains along a curve, and returns the largest relative difference of losses and of norms.
fn follow(trainer: &mut Trainer, config: &VlmConfig, curve: &Curve) -> [f64; 2] {
    assert_eq!(curve.losses.len(), 5);
    let mut largest = [0.0_f64; 2];
    for (loss, norm) in curve.losses.iter().zip(&curve.gradient_norms) {
        let batch = [packed(samples(trainer.steps(), config))];
        let found = trainer.step(&batch).unwrap();
        let found = [(found.loss, loss), (found.gradient_norm, norm)];
        for (largest, (found, expected)) in largest.iter_mut().zip(found) {
            *largest = largest.max((found - expected).abs() / expected.abs());
        }
    }
    largest
}

/// The last elements of each tensor in a file.
fn ends(path: &Path, count: usize) -> BTreeMap<String, Vec<f64>> {
    let file = TensorFile::open(path).unwrap();
    let read = |(name, stored): (String, vlm_models::file::Stored)| {
        let all = stored.elements();
        let data = file.read(&stored, stored.dtype().unwrap(), all - count.min(all)..all);
        (name, data.unwrap().iter::<f64>().collect())
    };
    file.tensors().into_iter().map(read).collect()
}

/// Saves the adapter, and compares its tensors with the reference's.
fn same_weights(trainer: &Trainer, config: &VlmConfig, curve: &Curve) -> f64 {
    let folder = Folder::new(&format!("{:?}", std::thread::current().id()));
    let probe = packed(vec![sample(1, config)]);
    let base = Path::new("base");
    trainer.save_adapter(&folder.0, base, &probe).unwrap();
    let found = ends(&folder.0.join("adapter_model.safetensors"), 5);
    let names = |of: &BTreeMap<String, Vec<f64>>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&curve.weights));
    let mut largest = 0.0_f64;
    for (name, expected) in &curve.weights {
        assert_eq!(found[name].len(), expected.len(), "{name}");
        for (found, expected) in found[name].iter().zip(expected) {
            largest = largest.max((found - expected).abs());
        }
    }
    largest
}

#[test]
fn adapters_of_a_folder_train_on_as_in_peft() {
    for family in FAMILIES {
        let curves = curves(family);
        for (name, folder) in [
            ("on", peft(family)),
            ("on_beside", peft(family).join("parts")),
        ] {
            let (config, model) = load(family);
            let made = config.adapter_config(&folder).unwrap();
            let recipe = short(TrainedParts::Lora(made));
            let mut trainer = Trainer::from_adapter(model, recipe.clone(), &folder).unwrap();
            assert_eq!(trainer.recipe(), &recipe, "{family} {name}");
            let curve = &curves[name];
            let [loss, norm] = follow(&mut trainer, &config, curve);
            let weights = same_weights(&trainer, &config, curve);
            println!("{family} {name}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}");
            assert!(is_near(family, [loss, norm, weights]), "{family} {name}");
        }
    }
}

#[test]
fn modules_trained_whole_beside_adapters_are_those_of_peft() {
    for family in FAMILIES {
        let (config, model) = load(family);
        let mut trainer = Trainer::new(model, short(beside())).unwrap();
        let curve = &curves(family)["beside"];
        let [loss, norm] = follow(&mut trainer, &config, curve);
        let weights = same_weights(&trainer, &config, curve);
        println!("{family}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}");
        assert!(is_near(family, [loss, norm, weights]), "{family}");

        // PEFT's files give PEFT's logits.
        let folder = peft(family).join("parts");
        let loaded = load(family).1.valid().load_adapter(&folder).unwrap();
        let expected = stored(&folder.join("logits.safetensors"));
        let wrong = apart(&logits(&loaded, &config), &expected);
        let exact = apart(&logits(&wide(loaded), &config), &expected);
        println!("{family}: logits {wrong:.1e}, in f64 {exact:.1e}");
        let is_near = wrong < rounding(family, 1e-3) && exact < 5e-7;
        assert!(is_near, "{family}: {wrong} {exact}");
    }
}

#[test]
fn a_whole_tower_and_single_layers_train_as_in_peft_and_torch() {
    for family in FAMILIES {
        let tower = TrainedWeights::from(vec![TOWER]);
        let layer = TrainedWeights {
            parts: Vec::new(),
            modules: TrainedWeights::decoder_layers([1]),
        };
        for (name, trained) in [
            ("tower", lora(&[DECODER], &[], tower)),
            (
                "layer_lora",
                lora(&[DECODER], &[1], TrainedWeights::default()),
            ),
            ("layer_full", TrainedParts::Full(layer)),
        ] {
            let (config, model) = load(family);
            let mut trainer = Trainer::new(model, short(trained)).unwrap();
            let [loss, norm] = follow(&mut trainer, &config, &curves(family)[name]);
            println!("{family} {name}: loss {loss:.1e}, norm {norm:.1e}");
            assert!(is_near(family, [loss, norm, 0.0]), "{family} {name}");
        }
    }
}

/// Modules in the way of PEFT, which keeps each of these names.
#[test]
fn saved_modules_are_the_outermost_that_peft_can_replace() {
    for (family, whole, expected) in [
        (
            "qwen2_vl_tiny",
            vec![TOWER, MERGER].into(),
            &["model.visual"][..],
        ),
        (
            "qwen3_vl_tiny",
            TrainedWeights {
                parts: vec![MERGER],
                modules: embeddings(),
            },
            &[
                "lm_head",
                "model.language_model.embed_tokens",
                "model.visual.deepstack_merger_list.0",
                "model.visual.merger",
            ],
        ),
        (
            "glm4v_tiny",
            vec![MERGER].into(),
            &[
                "model.visual.downsample",
                "model.visual.merger",
                "model.visual.post_layernorm",
            ],
        ),
        (
            "qwen3_5_tiny",
            TrainedWeights {
                parts: vec![],
                modules: embeddings(),
            },
            &["model.language_model.embed_tokens"],
        ),
    ] {
        let folder = Folder::new(&format!("names-{family}"));
        let (config, model) = load(family);
        let TrainedParts::Lora(lora) = lora(&[DECODER], &[0], whole) else {
            unreachable!();
        };
        let model = model.with_lora(&lora, 0).unwrap();
        model.save_adapter(&folder.0, family).unwrap();
        let text = std::fs::read_to_string(folder.0.join("adapter_config.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            json["modules_to_save"],
            serde_json::json!(expected),
            "{family}"
        );
        let is_tied = expected == ["model.language_model.embed_tokens"];
        assert_eq!(json["ensure_weight_tying"] == true, is_tied, "{family}");
        // All layers of one decoder layer, and those alone.
        let made = config.adapter_config(&folder.0).unwrap();
        let mut plain = load(family).1;
        let layers = plain.adapted_layers(&made).unwrap();
        assert_eq!(layers, plain.adapted_layers(&lora).unwrap());
        assert!(!layers.is_empty() && layers.iter().all(|name| name.contains(".layers.0.")));
        let whole = plain.whole_weights(&made.whole).unwrap();
        assert_eq!(whole, plain.whole_weights(&lora.whole).unwrap());
    }
}

/// Copies the adapter of a family with some tensors, and another configuration.
fn changed(family: &str, out: &Path, keep: impl Fn(&str) -> bool, extra: &[(&str, f32)]) {
    let from = peft(family).join("parts");
    let text = std::fs::read_to_string(from.join("adapter_config.json")).unwrap();
    let text = text.replace(
        "\"ensure_weight_tying\": true",
        "\"ensure_weight_tying\": false",
    );
    std::fs::write(out.join("adapter_config.json"), text).unwrap();
    let source = TensorFile::open(&from.join("adapter_model.safetensors")).unwrap();
    let kept: Vec<_> = source
        .tensors()
        .into_iter()
        .filter(|(name, _)| keep(name))
        .collect();
    let entries: Vec<Entry> = kept
        .iter()
        .map(|(name, stored)| Entry {
            name: name.clone(),
            shape: stored.shape.clone(),
            dtype: stored.dtype().unwrap(),
        })
        .collect();
    let mut sink = Sink::create(&out.join("adapter_model.safetensors"), &entries).unwrap();
    for (name, stored) in &kept {
        let data = source
            .read(stored, DType::F32, 0..stored.elements())
            .unwrap();
        let mut numbers: Vec<f32> = data.iter::<f32>().collect();
        for (end, number) in extra {
            if name.ends_with(end) {
                numbers[0] = *number;
            }
        }
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        sink.write(&bytes).unwrap();
    }
    sink.commit().unwrap();
}

#[test]
fn modules_that_the_model_cannot_hold_are_refused_by_name() {
    let tied = "qwen2_5_vl_tiny";
    let untied = "qwen2_vl_tiny";
    let all = |_: &str| true;
    let refused = |family: &str, folder: &Folder, says: &[&str]| {
        let error = load(family)
            .1
            .load_adapter(&folder.0)
            .unwrap_err()
            .to_string();
        for part in says {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    };
    // Both weights are there and equal, whatever the flag says.
    let folder = Folder::new("tied");
    changed(tied, &folder.0, all, &[]);
    load(tied).1.load_adapter(&folder.0).unwrap();
    changed(tied, &folder.0, all, &[("lm_head.weight", 7.0)]);
    refused(tied, &folder, &["lm_head", "ensure_weight_tying"]);
    changed(tied, &folder.0, |name| !name.contains("lm_head"), &[]);
    refused(tied, &folder, &["lm_head", "ensure_weight_tying"]);
    changed(tied, &folder.0, |name| !name.contains("embed_tokens"), &[]);
    refused(tied, &folder, &["lm_head", "ensure_weight_tying"]);
    changed(untied, &folder.0, |name| !name.contains("lm_head"), &[]);
    refused(untied, &folder, &["lm_head.weight", "modules_to_save"]);
    changed(untied, &folder.0, |name| !name.ends_with("mlp.0.bias"), &[]);
    refused(untied, &folder, &["merger.mlp.0.bias", "modules_to_save"]);
    // Of another family.
    changed("glm4v_tiny", &folder.0, all, &[]);
    refused(untied, &folder, &["downsample", "another model"]);
}

/// In 16 bits a module trained whole has an f32 master, and adapters are f32; both are saved in
/// their types.
#[test]
fn whole_modules_follow_the_rule_of_masters_and_adapters_are_f32() {
    for masters in [true, false] {
        let (config, model) = load("qwen3_vl_tiny");
        let model = model.map(&mut Halve::to(DType::BF16));
        let recipe = Recipe {
            masters,
            rates: Rates::all(1e-5),
            ..short(beside())
        };
        let mut trainer = Trainer::new(model, recipe).unwrap();
        let mut lost = None;
        for step in 0..3 {
            let report = trainer.step(&[packed(samples(step, &config))]).unwrap();
            lost = lost.or(report.lost_updates);
        }
        // Updates of 1e-5 are below the resolution of most weights.
        assert_eq!(lost.is_some_and(|lost| lost > 0.5), !masters, "{lost:?}");
        for parameter in trainer.parameters() {
            let is_adapter = parameter.name.contains("lora_");
            let expected = if is_adapter { DType::F32 } else { DType::BF16 };
            assert_eq!(parameter.dtype, expected, "{}", parameter.name);
        }
        let folder = Folder::new(&format!("types-{masters}"));
        trainer.model().save_adapter(&folder.0, "base").unwrap();
        let file = TensorFile::open(&folder.0.join("adapter_model.safetensors")).unwrap();
        let (mut narrow, mut wide) = (0, 0);
        for (name, stored) in file.tensors() {
            match stored.dtype() {
                Some(DType::F32) if name.contains("lora_") => wide += 1,
                Some(DType::BF16) if !name.contains("lora_") => narrow += 1,
                other => panic!("{name} has {other:?}"),
            }
        }
        assert!(wide > 0 && narrow > 2, "{wide} {narrow}");
    }
}

fn blank(trained: TrainedParts) -> (VlmConfig, Vlm, Recipe) {
    let (config, model) = load("qwen2_vl_tiny");
    (config, model, short(trained))
}

#[test]
fn names_that_match_nothing_and_layers_trained_twice_are_refused() {
    let whole = |modules: &[&str]| TrainedWeights {
        parts: Vec::new(),
        modules: modules.iter().map(|name| (*name).to_owned()).collect(),
    };
    for (trained, says) in [
        (TrainedParts::Full(whole(&["embed_token"])), "embed_token;"),
        (
            TrainedParts::Full(whole(&["language_model.layers.2"])),
            "language_model.layers.2;",
        ),
        (
            lora(&[DECODER], &[2], TrainedWeights::default()),
            "no layer 2; its layers are 0 to 1",
        ),
        (
            lora(&[DECODER], &[], vec![DECODER].into()),
            "one without an adapter",
        ),
        (
            lora(&[DECODER], &[1], whole(&["layers.1.mlp"])),
            "one without an adapter",
        ),
    ] {
        let (_, model, recipe) = blank(trained);
        let error = Trainer::new(model, recipe).map(drop).unwrap_err();
        assert!(
            error.to_string().contains(says),
            "{says:?} is not in: {error}"
        );
    }
    // Beside a layer with adapters, another may be trained whole.
    let (_, model, recipe) = blank(lora(&[DECODER], &[1], whole(&["layers.0"])));
    let trainer = Trainer::new(model, recipe).unwrap();
    let layer_0 = |name: &str| name.contains("layers.0.") && !name.contains("lora_");
    let names = trainer.parameters().iter().map(|parameter| &parameter.name);
    assert!(names.clone().any(|name| layer_0(name)));
    assert!(
        names
            .clone()
            .all(|name| layer_0(name) || name.contains("lora_"))
    );
}

/// For `finetune_parts.py check FOLDER`, which loads them with PEFT.
#[test]
#[ignore = "writes files for another program"]
fn write_adapters_with_modules() {
    let out = PathBuf::from(std::env::var("FINETUNE_OUT").unwrap());
    for family in FAMILIES {
        let whole = |parts: &[ModelPart], modules| TrainedWeights {
            parts: parts.to_vec(),
            modules,
        };
        for (name, trained) in [
            ("beside", beside()),
            ("tower", lora(&[DECODER], &[1], whole(&[TOWER], Vec::new()))),
            (
                "visual",
                lora(&[DECODER], &[], whole(&[TOWER, MERGER], Vec::new())),
            ),
            (
                "decoder",
                lora(&[TOWER], &[], whole(&[DECODER], Vec::new())),
            ),
        ] {
            let (config, model) = load(family);
            let mut trainer = Trainer::new(model, short(trained)).unwrap();
            for step in 0..3 {
                trainer.step(&[packed(samples(step, &config))]).unwrap();
            }
            let folder = out.join(format!("{family}-{name}"));
            write_adapter(&trainer, &config, &folder, family);
        }
    }
}
