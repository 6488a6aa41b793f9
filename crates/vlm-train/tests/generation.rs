//! Greedy generation against transformers and PEFT: tests/fixtures/generate/generation.py.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;

use burn::module::Module;
use vlm_data::{MicroBatch, TrainingSample};
use vlm_models::{GenerateOptions, Sampling, Vlm, VlmConfig};
use vlm_train::{inputs, score};

use crate::common::{FAMILIES, WITH_EXPERTS, fixtures, load, packed, padded, sample};

const NEW: usize = 12;

/// The prompt of a sample: all before its answer.
fn prompt(index: usize, config: &VlmConfig) -> TrainingSample {
    let mut prompt = sample(index, config);
    let length = prompt
        .text
        .labels
        .iter()
        .filter(|label| **label < 0)
        .count();
    prompt.text.input_ids.truncate(length);
    prompt.text.labels.truncate(length);
    prompt
}

fn continued(
    model: &Vlm,
    prompts: Vec<TrainingSample>,
    options: &GenerateOptions,
) -> Vec<Vec<i64>> {
    let micro: MicroBatch = padded(prompts);
    let batch = model.batch(&inputs(&micro, &model.device())).unwrap();
    model.generate_with(&batch, options, &mut |_| ()).unwrap()
}

fn greedy() -> GenerateOptions {
    GenerateOptions {
        count: NEW,
        ..GenerateOptions::default()
    }
}

/// In batches and alone, from a cache, as given answers have them in a pass of training, and beside
/// those of the likeliest tokens. `score` takes them apart.
#[test]
fn log_probabilities_are_those_of_the_answers_as_labels() {
    for family in FAMILIES.into_iter().chain(WITH_EXPERTS) {
        let (config, model) = load(family);
        let model = model.valid();
        let prompts: Vec<TrainingSample> = (0..4).map(|index| prompt(index, &config)).collect();
        let batch = padded(prompts.clone());
        let batch = model.batch(&inputs(&batch, &model.device())).unwrap();
        let options = GenerateOptions {
            likeliest: Some(2),
            ..greedy()
        };
        let mut found = vec![Vec::new(); prompts.len()];
        let rows = model
            .generate_with(&batch, &options, &mut |choice| {
                let given = choice.log_probabilities.unwrap();
                let [first, second] = given.likeliest[..] else {
                    panic!("{given:?}");
                };
                assert_eq!(first.0, choice.token);
                assert!((first.1 - given.chosen).abs() < 1e-5 && second.1 <= first.1);
                found[choice.row].push(given.chosen);
            })
            .unwrap();
        let answered = prompts.into_iter().zip(&rows).map(|(mut sample, row)| {
            sample.text.input_ids.extend(row);
            sample.text.labels.extend(row);
            sample
        });
        let answered: Vec<TrainingSample> = answered.collect();
        for micro in [packed(answered.clone()), padded(answered)] {
            let scores = score(&model, &micro).unwrap();
            assert_eq!(scores.len(), rows.len());
            for ((of_answer, row), found) in scores.iter().zip(&rows).zip(&found) {
                assert_eq!(&of_answer.tokens, row, "{family}");
                let given = of_answer.log_probabilities.iter().zip(found);
                let apart = given.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < rounding(family), "{family}: {apart}");
            }
        }
    }
}

/// States amplify rounding, and with experts it sends a token to others.
fn rounding(family: &str) -> f32 {
    if family.contains("qwen3_5") {
        5e-3
    } else {
        2e-5
    }
}

fn are_those_of_transformers(prompts: impl Iterator<Item = usize> + Clone, at_once: &[usize]) {
    let text = std::fs::read_to_string(fixtures().join("finetune/generated.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Vec<Vec<i64>>>> =
        serde_json::from_str(&text).unwrap();
    assert_eq!(expected.len(), 3, "the Qwen-VL families");
    for (family, expected) in &expected {
        let (config, plain) = load(family);
        let plain = plain.valid();
        let folder = fixtures().join("finetune").join(family);
        let adapted = plain.clone().load_adapter(folder).unwrap();
        for (model, name) in [(plain, "plain"), (adapted, "adapter")] {
            let expected = &expected[name];
            for size in at_once {
                let indices: Vec<usize> = prompts.clone().collect();
                for indices in indices.chunks(*size) {
                    let prompts = indices
                        .iter()
                        .map(|index| prompt(*index, &config))
                        .collect();
                    let found = continued(&model, prompts, &greedy());
                    for (index, found) in indices.iter().zip(found) {
                        assert_eq!(found, expected[*index], "{family} {name} {index} of {size}");
                    }
                }
            }
        }
    }
}

#[test]
fn tokens_are_those_of_transformers_batched_and_alone() {
    are_those_of_transformers(0..4, &[1, 4]);
}

#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn all_tokens_are_those_of_transformers_batched_and_alone() {
    are_those_of_transformers(0..50, &[1, 3, 8]);
}

#[test]
fn what_is_drawn_depends_on_the_seed_and_not_on_the_batch() {
    let (config, model) = load(FAMILIES[0]);
    let model = model.valid();
    let options = |rows: &[u64], seed| GenerateOptions {
        repetition_penalty: 1.3,
        sampling: Some(Sampling {
            temperature: 0.8,
            top_k: Some(40),
            top_p: 0.9,
            seed,
            rows: rows.to_vec(),
        }),
        ..greedy()
    };
    let prompts = |indices: &[usize]| {
        indices
            .iter()
            .map(|index| prompt(*index, &config))
            .collect()
    };
    let both = continued(&model, prompts(&[1, 3]), &options(&[1, 3], 5));
    assert_eq!(
        both,
        continued(&model, prompts(&[1, 3]), &options(&[1, 3], 5))
    );
    let alone = continued(&model, prompts(&[3]), &options(&[3], 5));
    assert_eq!(alone[0], both[1]);
    assert_ne!(alone, continued(&model, prompts(&[3]), &options(&[3], 6)));
    // With a penalty beyond all logits, no token comes twice.
    let strong = GenerateOptions {
        repetition_penalty: 1e6,
        ..greedy()
    };
    let mut tokens = continued(&model, prompts(&[3]), &strong).remove(0);
    tokens.extend(prompt(3, &config).text.input_ids);
    let all = tokens.len();
    let distinct: std::collections::HashSet<i64> = tokens.into_iter().collect();
    let given: std::collections::HashSet<i64> =
        prompt(3, &config).text.input_ids.into_iter().collect();
    assert_eq!(distinct.len(), NEW + given.len(), "{all}");

    let micro = packed(vec![prompt(1, &config)]);
    let batch = model.batch(&inputs(&micro, &model.device())).unwrap();
    for (key, wrong) in [("top_p", options(&[], 0)), ("temperature", options(&[], 0))] {
        let mut wrong = wrong;
        if let Some(sampling) = &mut wrong.sampling {
            match key {
                "top_p" => sampling.top_p = 1.5,
                _ => sampling.temperature = f64::NAN,
            }
        }
        let error = model
            .generate_with(&batch, &wrong, &mut |_| ())
            .unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains(key) || message.contains("packed"),
            "{message}"
        );
    }
}
