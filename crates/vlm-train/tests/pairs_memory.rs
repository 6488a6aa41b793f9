//! A step over pairs takes the memory of a step over the same tokens.

use burn::tensor::Device;
use vlm_data::text::{AnswerPair, IGNORED};
use vlm_models::VlmConfig;
use vlm_train::{PreferenceLoss, Recipe, Trainer};

use crate::common::{self, lora, packed, recipe, sample};
use crate::{ALLOCATOR, ALONE};

/// The reference is the model without its adapters, and its pass keeps nothing for a backward.
#[test]
fn pairs_take_the_memory_of_answers_with_the_same_tokens() {
    let _alone = ALONE.lock();
    let folder = common::fixtures().join("models/qwen2_5_vl_tiny");
    let mut config = VlmConfig::from_folder(folder).unwrap();
    config.text.layers = 8;
    let model = config.init(&Device::flex().autodiff()).unwrap();
    let samples = (0..4).map(|index| {
        let mut sample = sample(index, &config);
        let text = &mut sample.text;
        let prompt = text
            .labels
            .iter()
            .filter(|label| **label == IGNORED)
            .count();
        let begin = text.input_ids.len();
        text.input_ids.extend_from_within(..);
        text.labels.extend_from_within(..);
        let last = text.labels.len() - 1;
        (text.labels[last], text.input_ids[last]) = (7, 7);
        text.pair = Some(AnswerPair {
            second: begin,
            answers: [prompt, begin + prompt],
            is_good: None,
        });
        sample
    });
    let batch = [packed(samples.collect())];
    let peak = |loss: Option<PreferenceLoss>| {
        let recipe = Recipe {
            preference: loss.map(PreferenceLoss::with_defaults),
            ..recipe(lora())
        };
        let mut trainer = Trainer::new(model.clone(), recipe).unwrap();
        trainer.step(&batch).unwrap();
        ALLOCATOR.start_thread();
        trainer.step(&batch).unwrap();
        ALLOCATOR.stop().peak_bytes as f64
    };
    let imitated = peak(None);
    for loss in [PreferenceLoss::Dpo, PreferenceLoss::Kto] {
        let compared = peak(Some(loss));
        println!("{}: {:.4}", loss.name(), compared / imitated);
        assert!(compared <= 1.02 * imitated, "{compared} {imitated}");
    }
}
