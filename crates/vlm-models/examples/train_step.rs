//! Loads a checkpoint folder, takes training steps, and generates an answer.
//!
//! Run `cargo run -p vlm-models --example train_step -- FOLDER` from the root of the repository.
//! Without FOLDER, it uses a tiny random model of the tests.

use std::error::Error;

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor};
use vlm_models::rope_core::position_ids::Prompt;
use vlm_models::{Inputs, VlmConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let tiny = "tests/fixtures/models/qwen3_vl_tiny";
    let folder = std::env::args().nth(1).unwrap_or_else(|| tiny.to_owned());

    let device = Device::flex().autodiff();
    let config = VlmConfig::from_folder(&folder)?;
    let mut model = config.load(&folder, &device)?;

    // A normalised picture and a tokenised prompt: <image> <question> <answer>.
    let vision = config
        .vision
        .as_ref()
        .ok_or("a model with pictures is needed")?;
    let side = vision.patch[2] * vision.spatial_merge;
    let picture = Tensor::random([1, 3, 2 * side, 3 * side], Distribution::Default, &device);
    let (patches, grid) = vision.patches(picture)?;
    let image = [vision.image_token; 2 * 3];
    let (question, answer) = ([11, 12, 13], [21, 22]);
    let input_ids = [&image[..], &question, &answer].concat();
    let labels = [&[-100; 6 + 3][..], &answer].concat();
    let inputs = Inputs {
        prompt: Prompt {
            input_ids: &input_ids,
            image_grids: &[grid],
            ..Prompt::default()
        },
        image_patches: Some(patches),
        video_patches: None,
        shown: None,
    };

    let batch = model.batch(&inputs)?;
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).init();
    for step in 0..20 {
        let loss;
        (model, loss) = model.train_step(&mut optimizer, 3e-3, &batch, &labels)?;
        println!("step {step}: loss {loss:.4}");
    }

    let model = model.valid();
    let asked = &input_ids[..input_ids.len() - answer.len()];
    let inputs = Inputs {
        prompt: Prompt {
            input_ids: asked,
            ..inputs.prompt
        },
        ..inputs
    };
    println!(
        "answer: {:?}",
        model.generate(&model.batch(&inputs)?, answer.len(), &[])?
    );
    Ok(())
}
