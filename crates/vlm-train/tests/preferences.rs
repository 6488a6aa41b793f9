//! Losses of preferences against TRL's: tests/fixtures/generate/preferences.py.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::DType;
use vlm_data::text::{AnswerPair, IGNORED};
use vlm_data::{MicroBatch, TrainingSample};
use vlm_models::{ModelPart, VlmConfig};
use vlm_train::{Preference, PreferenceLoss, Rates, Recipe, TrainedParts, Trainer, inputs};

use crate::common::{Numbers, fixtures, load, lora, packed, padded, recipe, sample};
use crate::reference::wide;

const FAMILY: &str = "qwen2_5_vl_tiny";
const SAMPLES: usize = 8;
const BATCH: usize = 4;

/// The options of the reference.
fn preference(loss: PreferenceLoss) -> Preference {
    let mut preference = loss.with_defaults();
    match loss {
        PreferenceLoss::DpoNorm => preference.beta = 2.0,
        PreferenceLoss::DpoRobust => preference.label_smoothing = 0.2,
        PreferenceLoss::Kto => preference.mark_weights = [1.0, 0.75],
        PreferenceLoss::Simpo => (preference.beta, preference.label_smoothing) = (2.0, 0.1),
        _ => {}
    }
    preference
}

fn recipe_of(loss: PreferenceLoss, trained: TrainedParts) -> Recipe {
    Recipe {
        steps: 20,
        warmup_steps: 2,
        rates: Rates::all(2e-3),
        preference: Some(preference(loss)),
        ..recipe(trained)
    }
}

/// Every fourth sample is text alone.
fn index_of(kind: &str, index: usize) -> usize {
    match kind {
        "text" => 4 * index + 3,
        _ => index,
    }
}

/// The prompt of a sample with its answer and another one: the second of its pair, or the answer of
/// the sample before.
fn pair(kind: &str, index: usize, config: &VlmConfig, loss: PreferenceLoss) -> TrainingSample {
    let number = index_of(kind, index);
    let mut sample = sample(number, config);
    let is_prompt = |label: &&i64| **label == IGNORED;
    let prompt = sample.text.labels.iter().take_while(is_prompt).count();
    let mut second = sample.text.input_ids[..prompt].to_vec();
    let mut is_good = None;
    if loss.is_of_marks() {
        let before = index_of(kind, (index + SAMPLES - 1) % SAMPLES);
        let before = crate::common::sample(before, config).text;
        second.extend(before.labels.iter().filter(|label| **label != IGNORED));
        is_good = Some(index.is_multiple_of(2));
    } else {
        let mut draw = Numbers(5000 + number as u64);
        second.extend(draw.text(2 + 2 * (number % 3)));
    }
    let text = &mut sample.text;
    let begin = text.input_ids.len();
    text.pair = Some(AnswerPair {
        second: begin,
        answers: [prompt, begin + prompt],
        is_good,
    });
    text.labels.extend(vec![IGNORED; prompt]);
    text.labels.extend(&second[prompt..]);
    text.input_ids.extend(second);
    if loss == PreferenceLoss::Orpo {
        // As TRL, which imitates the prompt, too.
        let image_token = config.vision.as_ref().unwrap().image_token;
        let tokens = text.input_ids.iter().zip(&mut text.labels);
        for (id, label) in tokens.filter(|(id, _)| **id != image_token) {
            *label = *id;
        }
    }
    sample
}

fn pairs(kind: &str, step: usize, config: &VlmConfig, loss: PreferenceLoss) -> Vec<TrainingSample> {
    let index = |i: usize| (step * BATCH + i) % SAMPLES;
    (0..BATCH)
        .map(|i| pair(kind, index(i), config, loss))
        .collect()
}

type Way = fn(Vec<TrainingSample>) -> Vec<MicroBatch>;

const CUTS: [Way; 3] = [
    |samples| vec![packed(samples)],
    |samples| vec![padded(samples)],
    |samples| {
        let one = |sample| packed(vec![sample]);
        samples.into_iter().map(one).collect()
    },
];

type Curves = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

fn curves() -> Curves {
    let path = fixtures().join("finetune/preferences.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The largest differences from a curve of TRL, relative to 1 or the value, by name.
fn follow(
    kind: &str,
    loss: PreferenceLoss,
    dtype: DType,
    cut: Way,
    steps: usize,
) -> BTreeMap<String, f64> {
    let curve = &curves()[&format!("{kind} {}", loss.name())];
    assert_eq!(curve["loss"].len(), 20);
    let (config, mut model) = load(FAMILY);
    if dtype != DType::F32 {
        model = wide(model);
    }
    let mut trainer = Trainer::new(model, recipe_of(loss, lora())).unwrap();
    let mut apart = BTreeMap::<String, f64>::new();
    for step in 0..steps {
        let found = trainer
            .step(&cut(pairs(kind, step, &config, loss)))
            .unwrap();
        let found = serde_json::to_value(&found).unwrap();
        for (name, expected) in curve {
            let (found, expected) = (found[name].as_f64().expect(name), expected[step]);
            // Rewards are differences of log-probabilities.
            let factor = match &name[..] {
                "kl" => 1.0,
                name if name.starts_with("reward") => preference(loss).beta,
                _ => 0.0,
            };
            let size = factor * curve["logp_chosen"][step].abs();
            let difference = (found - expected).abs() / expected.abs().max(size).max(1.0);
            let apart = apart.entry(name.clone()).or_default();
            *apart = apart.max(difference);
        }
    }
    apart
}

/// The bound of a difference: in float32, TRL's own norms of SimPO are 1.5e-6 from those in float64. In
/// float64, ours are within 1e-6.
fn bound(loss: PreferenceLoss, name: &str) -> f64 {
    let is_of_means = matches!(loss, PreferenceLoss::Simpo | PreferenceLoss::DpoNorm);
    if is_of_means && name == "gradient_norm" {
        2e-6
    } else {
        1e-6
    }
}

fn follows(cuts: &[Way], steps: usize) {
    for kind in ["text", "pictures"] {
        for loss in PreferenceLoss::ALL {
            for cut in cuts {
                let apart = follow(kind, loss, DType::F32, *cut, steps);
                let shown = apart
                    .iter()
                    .map(|(name, apart)| format!("{name} {apart:.1e}"));
                let shown: Vec<String> = shown.collect();
                println!("{kind} {}: {}", loss.name(), shown.join(", "));
                let is_near = apart.iter().all(|(name, apart)| *apart < bound(loss, name));
                assert!(is_near, "{kind} {}: {apart:?}", loss.name());
            }
        }
    }
}

#[test]
fn losses_rewards_and_norms_are_those_of_trl() {
    follows(&CUTS[..1], 3);
}

#[test]
#[ignore = "a minute: the table of docs/preferences.md"]
fn losses_rewards_and_norms_of_all_steps_are_those_of_trl_in_any_cut() {
    follows(&CUTS, 20);
    // Where float32 does not reach the bound, float64 does.
    for kind in ["text", "pictures"] {
        for loss in [PreferenceLoss::Simpo, PreferenceLoss::DpoNorm] {
            let apart = follow(kind, loss, DType::F64, CUTS[0], 20);
            println!("{kind} {} in float64: {apart:?}", loss.name());
            assert!(apart.values().all(|apart| *apart < 1e-6), "{apart:?}");
        }
    }
}

#[test]
fn the_cut_of_pairs_has_no_effect() {
    for loss in PreferenceLoss::ALL {
        let (config, model) = load(FAMILY);
        let trainer = Trainer::new(model, recipe_of(loss, lora())).unwrap();
        let found = trainer
            .prove_cut(&pairs("pictures", 0, &config, loss))
            .unwrap();
        let largest = found.loss.max(found.gradient_norm).max(found.gradient);
        assert!(largest < 2e-6, "{}: {found:?}", loss.name());
    }
}

/// A picture that both answers see passes the tower once, and gives the same gradients as twice.
#[test]
fn shared_pictures_give_the_gradients_of_pictures_of_their_own() {
    for family in [FAMILY, "qwen3_vl_tiny", "glm4v_tiny"] {
        let loss = PreferenceLoss::Dpo;
        let (config, model) = load(family);
        let parts = vec![ModelPart::Tower, ModelPart::Merger, ModelPart::Decoder];
        let mut recipe = recipe_of(loss, TrainedParts::Full(parts.into()));
        for recompute in [true, false] {
            recipe.recompute = recompute;
            let trainer = Trainer::new(model.clone(), recipe.clone()).unwrap();
            let shared = packed(pairs("pictures", 0, &config, loss));
            let mut own = shared.clone();
            let [shown, _] = own.shown.take().unwrap();
            let elements = config.vision.as_ref().unwrap().patch_elems();
            let mut starts = vec![0];
            let mut grids = Vec::new();
            for (grid, number) in own.image_grids.iter().zip(&shown) {
                if *number == grids.len() {
                    grids.push(*grid);
                    starts.push(starts[*number] + grid.iter().product::<usize>() * elements);
                }
            }
            let patches = shown.iter().flat_map(|number| {
                shared.image_patches[starts[*number]..starts[number + 1]].to_vec()
            });
            own.image_patches = patches.collect();
            assert_eq!(own.image_patches.len(), 2 * shared.image_patches.len());
            let mut reports = Vec::new();
            for micro in [shared, own] {
                let mut trainer = trainer.clone();
                let report = trainer.step(&[micro]).unwrap();
                reports.push([report.loss, report.gradient_norm]);
            }
            for (one, other) in reports[0].iter().zip(&reports[1]) {
                let apart = (one - other).abs() / other;
                assert!(apart < 1e-6, "{family}: {reports:?}");
            }
        }
    }
}

/// Without its adapters the model has the bits of the model at the start, so that the first margins
/// are 0.
#[test]
fn the_reference_is_the_model_without_its_adapters() {
    let loss = PreferenceLoss::Dpo;
    let (config, model) = load(FAMILY);
    let micro = packed(pairs("pictures", 0, &config, loss));
    let scores = |model: &vlm_models::Vlm| {
        let model = model.valid();
        let batch = model.batch(&inputs(&micro, &model.device())).unwrap();
        model.token_losses(&batch, &micro.labels).unwrap()
    };
    let at_start = scores(&model);
    let mut trainer = Trainer::new(model, recipe_of(loss, lora())).unwrap();
    let first = trainer.step(std::slice::from_ref(&micro)).unwrap();
    let first = first.preference.unwrap();
    assert_eq!([first.reward_chosen, first.reward_margin], [0.0; 2]);
    // The rate of the first step is 0.
    trainer.step(std::slice::from_ref(&micro)).unwrap();
    let third = trainer.step(std::slice::from_ref(&micro)).unwrap();
    assert!(third.preference.unwrap().reward_margin != 0.0);
    assert_ne!(scores(trainer.model()), at_start);
    assert_eq!(scores(&trainer.model().clone().without_lora()), at_start);
}

#[test]
fn samples_of_one_answer_are_refused() {
    let (config, model) = load(FAMILY);
    let mut trainer = Trainer::new(model, recipe_of(PreferenceLoss::Dpo, lora())).unwrap();
    let micro = packed(vec![sample(0, &config)]);
    let error = trainer.step(std::slice::from_ref(&micro)).unwrap_err();
    assert!(
        error.to_string().contains("1 sequences in 0 pairs"),
        "{error}"
    );
    trainer.validate_pairs([Ok(micro)]).unwrap_err();
}

#[test]
fn validation_has_the_loss_and_the_means_of_a_step() {
    for loss in [
        PreferenceLoss::Dpo,
        PreferenceLoss::Kto,
        PreferenceLoss::Orpo,
    ] {
        let (config, model) = load(FAMILY);
        let mut trainer = Trainer::new(model, recipe_of(loss, lora())).unwrap();
        let batch = || pairs("pictures", 0, &config, loss);
        trainer.step(&[packed(batch())]).unwrap();
        let one_by_one = CUTS[2](batch()).into_iter().map(Ok);
        let (found, means) = trainer.validate_pairs(one_by_one).unwrap();
        let expected = trainer.step(&[packed(batch())]).unwrap();
        assert!(
            (found - expected.loss).abs() < 1e-6 * expected.loss,
            "{loss:?}"
        );
        let [found, expected] =
            [means, expected.preference.unwrap()].map(|means| means.reward_margin);
        assert!((found - expected).abs() < 1e-6, "{loss:?}");
    }
}
