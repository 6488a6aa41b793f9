//! Parameters in 16 bits: bf16 with and without masters in f32, f16 with a factor of the loss.

#![allow(clippy::unwrap_used, reason = "test code")]

use burn::module::Module;
use burn::tensor::DType;
use vlm_models::Vlm;
use vlm_train::{Rates, Recipe, Schedule, TrainedParts, Trainer};

use crate::common::{ALL, Halve, load, packed, recipe, samples};

/// Steps with updates mostly below half a unit in the last place of a bf16 weight.
fn last_loss(model: Vlm, masters: bool, (steps, rate): (usize, f64)) -> f64 {
    let (config, _) = load("qwen2_5_vl_tiny");
    let recipe = Recipe {
        steps,
        rates: Rates::all(rate),
        schedule: Schedule::Constant,
        masters,
        ..recipe(TrainedParts::Full(ALL.to_vec().into()))
    };
    let mut trainer = Trainer::new(model, recipe).unwrap();
    let batches = [0, 1].map(|step| [packed(samples(step, &config))]);
    for step in 0..steps {
        let done = trainer.step(&batches[step % 2]).unwrap();
        if let Some(lost) = done.lost_updates {
            println!("step {}: {lost} of the updates are lost", done.step);
            assert!(!masters && lost > 0.5);
        }
    }
    trainer
        .validate(batches.concat().into_iter().map(Ok))
        .unwrap()
}

/// Takes a step with a factor of the loss that overflows f16, and then some that do not.
#[test]
fn steps_that_overflow_f16_are_skipped_and_others_follow_f32() {
    let losses = |dtype: DType, loss_scale| {
        let (config, model) = load("qwen2_5_vl_tiny");
        let recipe = Recipe {
            steps: 4,
            warmup_steps: 0,
            loss_scale,
            ..recipe(TrainedParts::Full(ALL.to_vec().into()))
        };
        let model = model.map(&mut Halve::to(dtype));
        let mut trainer = Trainer::new(model, recipe).unwrap();
        let batch = [packed(samples(0, &config))];
        let reports = (0..4).map(|_| trainer.step(&batch).unwrap());
        reports.collect::<Vec<_>>()
    };
    let whole = losses(DType::F32, None);
    let half = losses(DType::F16, Some(1024.0));
    for (whole, half) in whole.iter().zip(&half) {
        assert!(!half.skipped);
        let apart = (whole.loss - half.loss).abs() / whole.loss;
        let norm = (whole.gradient_norm / half.gradient_norm - 1.0).abs();
        assert!(apart < 5e-3 && norm < 5e-2, "{apart} {norm}");
    }
    let scaled = losses(DType::F16, Some(2_f64.powi(40)));
    assert!(scaled[0].skipped && scaled[1].skipped);
    assert_eq!(scaled[1].loss_scale, Some(2_f64.powi(39)));
    assert_eq!(scaled[0].loss, scaled[1].loss, "no update was taken");
}

fn compare(run: (usize, f64)) -> [f64; 3] {
    let load = || load("qwen2_5_vl_tiny").1;
    let losses = [
        last_loss(load(), true, run),
        last_loss(load().map(&mut Halve::to(DType::BF16)), true, run),
        last_loss(load().map(&mut Halve::to(DType::BF16)), false, run),
    ];
    println!("f32, bf16 with masters, bf16 without: {losses:?}");
    losses
}

#[test]
fn masters_keep_what_bf16_loses() {
    let [whole, masters, without] = compare((20, 5e-5));
    let apart = |loss: f64| (loss - whole).abs() / whole;
    assert!(apart(masters) < 0.01, "{}", apart(masters));
    assert!(apart(without) > 3.0 * apart(masters), "{}", apart(without));
}

#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn two_hundred_steps_end_within_a_percent_with_masters_alone() {
    let [whole, masters, without] = compare((200, 1e-5));
    let apart = |loss: f64| (loss - whole).abs() / whole;
    assert!(
        apart(masters) < 0.01 && apart(without) > 0.01,
        "{masters} {without}"
    );
}
