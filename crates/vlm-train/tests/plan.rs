//! The planned memory of a step against the counted one.

use burn::tensor::{DType, Device};
use vlm_data::{MicroBatch, TrainingSample};
use vlm_models::{LoraConfig, VlmConfig};
use vlm_train::{MemoryPlan, MicroShape, Recipe, TrainedParts, Trainer};

use crate::common::{self, ALL, packed, recipe, sample};
use crate::{ALLOCATOR, ALONE};

/// Samples laid end to end, as long as they are.
fn long(config: &VlmConfig, count: usize) -> MicroBatch {
    let samples = (0..count).map(|index| sample(index % 8, config));
    let samples: Vec<TrainingSample> = samples.collect();
    packed(samples)
}

/// Planned and counted bytes of the second step.
fn compare(config: &VlmConfig, recipe: &Recipe, count: usize) -> (usize, usize) {
    let batch = [long(config, count), long(config, count)];
    let shape = MicroShape::of(&batch[0]);
    let plan = MemoryPlan::new(config, recipe, DType::F32).unwrap();
    let planned = plan.step(shape);
    let make = || {
        let model = config.init(&Device::flex().autodiff()).unwrap();
        let mut trainer = Trainer::new(model, recipe.clone()).unwrap();
        trainer.step(&batch).unwrap();
        trainer
    };
    // The first call makes the values that a process makes once.
    drop(make());
    let (mut trainer, before) = ALLOCATOR.measure(1, make);
    let (done, usage) = ALLOCATOR.measure(1, || trainer.step(&batch));
    done.unwrap();
    let held = before.retained_bytes.max(0).cast_unsigned();
    let counted = held + usage.peak_bytes;
    println!(
        "{shape:?}: planned {} counted {counted} = {held} + {}: {planned:?}",
        planned.peak(),
        usage.peak_bytes
    );
    (planned.peak(), counted)
}

#[test]
fn the_plan_is_near_what_is_counted() {
    let _alone = ALONE.lock();
    let folder = common::fixtures().join("models/qwen2_5_vl_tiny");
    let config = VlmConfig::from_folder(&folder).unwrap();
    for trained in [
        TrainedParts::Lora(LoraConfig::default()),
        TrainedParts::Full(ALL.to_vec().into()),
    ] {
        let recipe = recipe(trained);
        // With fewer samples, the buffers of a second thread are several hundredths.
        let (planned, counted) = compare(&config, &recipe, 48);
        let ratio = planned as f64 / counted as f64;
        assert!(
            (0.95..1.05).contains(&ratio),
            "{planned} of {counted}: {ratio}"
        );
    }
}
