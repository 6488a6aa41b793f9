//! Losses of rewarded answers against TRL's: tests/fixtures/generate/policies.py.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;

use burn::tensor::DType;
use vlm_data::Cut;
use vlm_data::text::IGNORED;
use vlm_models::{ModelPart, VlmConfig};
use vlm_train::{
    AnswerGroup, Policy, PolicyLoss, Rates, Recipe, RewardScale, RewardedAnswer, StepReport,
    TrainedParts, Trainer, VlmTrainError,
};

use crate::common::{Numbers, fixtures, load, lora, packed, recipe, sample};
use crate::reference::wide;

const FAMILY: &str = "qwen2_5_vl_tiny";
const SAMPLES: usize = 8;
const PROMPTS: usize = 2;
const BATCHES: usize = 4;

/// The policies of the reference.
fn policies() -> [(&'static str, Policy); 6] {
    let of = |loss: PolicyLoss, beta, scale, temperature| Policy {
        beta,
        scale,
        temperature,
        group: 4,
        max_new: 16,
        updates: 3,
        clip: [0.02, 0.03],
        ..loss.with_defaults()
    };
    let group = RewardScale::Group;
    [
        ("grpo", of(PolicyLoss::Grpo, 0.0, group, 1.0)),
        ("grpo kl", of(PolicyLoss::Grpo, 0.04, group, 1.0)),
        ("bnpo", of(PolicyLoss::Bnpo, 0.1, RewardScale::Batch, 1.0)),
        ("dapo", of(PolicyLoss::Dapo, 0.0, group, 1.0)),
        ("dapo warm", of(PolicyLoss::Dapo, 0.04, group, 0.7)),
        (
            "dr-grpo",
            of(PolicyLoss::DrGrpo, 0.04, RewardScale::None, 1.0),
        ),
    ]
}

fn recipe_of(policy: Policy, trained: TrainedParts) -> Recipe {
    Recipe {
        steps: BATCHES,
        warmup_steps: 0,
        rates: Rates::all(2e-3),
        policy: Some(policy),
        ..recipe(trained)
    }
}

/// The prompt of a sample with four answers, whose rewards are equal for every third sample.
fn group(kind: &str, index: usize, config: &VlmConfig) -> AnswerGroup {
    let number = match kind {
        "text" => 4 * index + 3,
        _ => index,
    };
    let mut prompt = sample(number, config);
    let is_prompt = |label: &&i64| **label == IGNORED;
    let tokens = prompt.text.labels.iter().take_while(is_prompt).count();
    prompt.text.input_ids.truncate(tokens);
    prompt.text.labels.truncate(tokens);
    let answer = |place: usize| RewardedAnswer {
        tokens: Numbers(7000 + (100 * index + place) as u64).text(1 + (3 * index + 2 * place) % 7),
        reward: match index % 3 {
            2 => 0.5,
            _ => ((3 * index + 5 * place) % 4) as f64 / 4.0,
        },
        ..RewardedAnswer::default()
    };
    let answers = (0..4).map(answer).collect();
    AnswerGroup { prompt, answers }
}

fn groups(kind: &str, batch: usize, config: &VlmConfig) -> Vec<AnswerGroup> {
    let index = |i: usize| (batch * PROMPTS + i) % SAMPLES;
    (0..PROMPTS)
        .map(|i| group(kind, index(i), config))
        .collect()
}

const CUTS: [Cut; 3] = [
    Cut::Packed { tokens: 1000 },
    Cut::Padded { tokens: 1000 },
    // Groups are divided, and groups share micro-batches.
    Cut::Packed { tokens: 40 },
];

/// The largest differences from a curve of TRL by name: of norms relative to that of the batch's first
/// update, of others to 1 or the value.
fn follow(kind: &str, name: &str, policy: Policy, dtype: DType, cut: Cut) -> BTreeMap<String, f64> {
    let path = fixtures().join("finetune/policies.json");
    let curves: BTreeMap<String, BTreeMap<String, Vec<f64>>> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let curve = &curves[&format!("{kind} {name}")];
    let (config, mut model) = load(FAMILY);
    if dtype != DType::F32 {
        model = wide(model);
    }
    let mut trainer = Trainer::new(model, recipe_of(policy, lora())).unwrap();
    let mut reports: Vec<StepReport> = Vec::new();
    for batch in 0..BATCHES {
        let groups = groups(kind, batch, &config);
        reports.extend(trainer.step_over_groups(&groups, cut).unwrap());
    }
    assert_eq!(reports.len(), curve["loss"].len());
    let mut apart = BTreeMap::<String, f64>::new();
    for (step, report) in reports.iter().enumerate() {
        let found = serde_json::to_value(report).unwrap();
        for (name, expected) in curve {
            let first = expected[step - step % policy.updates];
            let expected = expected[step];
            let found = found[name].as_f64().expect(name);
            let size = match &name[..] {
                // Later updates lack the terms of clipped tokens.
                "gradient_norm" => first.max(expected),
                _ => expected.abs().max(1.0),
            };
            let difference = (found - expected).abs() / size;
            let apart = apart.entry(name.clone()).or_default();
            *apart = apart.max(difference);
        }
    }
    apart
}

/// The bound of a difference.
fn bound(dtype: DType, name: &str) -> f64 {
    match (dtype, name) {
        (DType::F32, "gradient_norm") => 2e-6,
        (DType::F32, _) | (_, "gradient_norm") => 5e-7,
        _ => 2e-7,
    }
}

fn follows(cuts: &[Cut], dtype: DType) {
    for kind in ["text", "pictures"] {
        for (name, policy) in policies() {
            for cut in cuts {
                let apart = follow(kind, name, policy, dtype, *cut);
                let shown = apart
                    .iter()
                    .map(|(name, apart)| format!("{name} {apart:.1e}"));
                let shown = shown.collect::<Vec<_>>().join(", ");
                println!("{kind} {name}: {shown}");
                let is_near = apart
                    .iter()
                    .all(|(name, apart)| *apart < bound(dtype, name));
                assert!(is_near, "{kind} {name} {cut:?}: {apart:?}");
            }
        }
    }
}

#[test]
fn losses_and_norms_of_rewarded_answers_are_those_of_trl() {
    follows(&CUTS[..1], DType::F32);
}

#[test]
#[ignore = "a minute: the table of docs/tables/preferences.md"]
fn losses_and_norms_of_rewarded_answers_are_those_of_trl_in_any_cut_and_in_float64() {
    follows(&CUTS, DType::F32);
    follows(&CUTS[2..], DType::F64);
}

/// The ratios of the first update are exactly 1, whatever the cut, and those of the second are not.
#[test]
fn the_first_update_has_ratios_of_exactly_1() {
    for cut in CUTS {
        for (_, policy) in policies() {
            let (config, model) = load(FAMILY);
            let mut trainer = Trainer::new(model, recipe_of(policy, lora())).unwrap();
            for batch in 0..2 {
                let groups = groups("pictures", batch, &config);
                let reports = trainer.step_over_groups(&groups, cut).unwrap();
                let ratios = reports.iter().map(|report| {
                    let means = report.policy.unwrap();
                    assert_eq!(means.kl.is_some(), policy.beta > 0.0);
                    [means.ratio_min, means.ratio_max]
                });
                let ratios: Vec<[f64; 2]> = ratios.collect();
                assert_eq!(ratios[0], [1.0; 2]);
                assert!(ratios[1][0] < 1.0 && ratios[1][1] > 1.0, "{ratios:?}");
            }
        }
    }
}

/// Without its adapters the model has the bits of the model at the start, so that the first
/// divergence is 0; so has a whole model's copy.
#[test]
fn the_divergence_from_the_reference_is_0_at_the_start() {
    let parts = vec![ModelPart::Decoder];
    for trained in [lora(), TrainedParts::Full(parts.into())] {
        let (config, model) = load(FAMILY);
        let policy = policies()[1].1;
        let mut trainer = Trainer::new(model, recipe_of(policy, trained)).unwrap();
        let groups = groups("pictures", 0, &config);
        let reports = trainer.step_over_groups(&groups, CUTS[0]).unwrap();
        let kl = |update: usize| reports[update].policy.unwrap().kl.unwrap();
        assert_eq!(kl(0), 0.0);
        assert!(kl(1) > 0.0);
    }
}

/// Answers without tokens count in the advantages of their group, and have no gradient.
#[test]
fn answers_without_tokens_count_by_their_rewards() {
    let (config, model) = load(FAMILY);
    let mut policy = policies()[3].1;
    policy.updates = 1;
    let mut groups = groups("pictures", 0, &config);
    groups[0].answers[1].tokens.clear();
    let step = |groups: &[AnswerGroup]| {
        let mut trainer = Trainer::new(model.clone(), recipe_of(policy, lora())).unwrap();
        trainer.step_over_groups(groups, CUTS[0])
    };
    let report = step(&groups).unwrap().remove(0);
    let tokens: usize = groups
        .iter()
        .flat_map(|group| group.answers.iter().map(|answer| answer.tokens.len()))
        .sum();
    let means = report.policy.unwrap();
    assert_eq!(report.labelled, tokens);
    assert_eq!(means.answer_tokens, tokens as f64 / 8.0);
    let mut other = groups.clone();
    other[0].answers[1].reward += 1.0;
    let other = step(&other).unwrap().remove(0);
    assert!((other.gradient_norm - report.gradient_norm).abs() > 1e-3);
    for answer in groups.iter_mut().flat_map(|group| &mut group.answers) {
        answer.tokens.clear();
    }
    let error = step(&groups).unwrap_err();
    assert!(matches!(error, VlmTrainError::NoLabels { .. }), "{error}");
    groups[1].prompt.text.input_ids.clear();
    let error = step(&groups).unwrap_err().to_string();
    assert!(error.contains("the prompt at line"), "{error}");
}

#[test]
fn steps_of_other_losses_and_batches_are_refused() {
    let (config, model) = load(FAMILY);
    let policy = policies()[0].1;
    let groups = groups("pictures", 0, &config);
    let mut trainer = Trainer::new(model.clone(), recipe_of(policy, lora())).unwrap();
    let error = trainer.step(&[packed(vec![sample(0, &config)])]);
    assert!(error.unwrap_err().to_string().contains("sampled answers"));
    let mut trainer = Trainer::new(model, recipe(lora())).unwrap();
    let error = trainer.step_over_groups(&groups, CUTS[0]).unwrap_err();
    assert!(error.to_string().contains("no loss of rewarded answers"));
}
