//! Parameters in bf16, with and without masters in f32.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use qwen_vl::QwenVl;
use vlm_train::{Rates, Recipe, Schedule, TrainedParts, Trainer};

use common::{ALL, load, packed, recipe, samples};

struct Halve;

impl ModuleMapper for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val().inner().cast(DType::BF16);
        Param::initialized(param.id, Tensor::from_inner(value).require_grad())
    }
}

/// Steps whose updates are mostly below half a unit in the last place of a bf16 weight.
fn last_loss(model: QwenVl, masters: bool, steps: usize) -> f64 {
    let (config, _) = load("qwen2_5_vl_tiny");
    let recipe = Recipe {
        steps,
        rates: Rates::all(5e-5),
        schedule: Schedule::Constant,
        masters,
        ..recipe(TrainedParts::Full(ALL.to_vec()))
    };
    let mut trainer = Trainer::new(model, recipe).unwrap();
    let batches = [0, 1].map(|step| [packed(samples(step, &config))]);
    for step in 0..steps {
        trainer.step(&batches[step % 2]).unwrap();
    }
    trainer.validate(&batches.concat()).unwrap()
}

fn compare(steps: usize) -> [f64; 3] {
    let load = || load("qwen2_5_vl_tiny").1;
    let losses = [
        last_loss(load(), true, steps),
        last_loss(load().map(&mut Halve), true, steps),
        last_loss(load().map(&mut Halve), false, steps),
    ];
    println!("f32, bf16 with masters, bf16 without: {losses:?}");
    losses
}

#[test]
fn masters_keep_what_bf16_loses() {
    let [whole, masters, without] = compare(20);
    let apart = |loss: f64| (loss - whole).abs() / whole;
    assert!(apart(masters) < 0.01, "{}", apart(masters));
    assert!(apart(without) > 3.0 * apart(masters), "{}", apart(without));
}

#[test]
#[ignore = "minutes: a part of `cargo xtask deep training`"]
fn two_hundred_steps_end_within_a_percent_with_masters_alone() {
    let [whole, masters, without] = compare(200);
    let apart = |loss: f64| (loss - whole).abs() / whole;
    assert!(
        apart(masters) < 0.01 && apart(without) > 0.01,
        "{masters} {without}"
    );
}
