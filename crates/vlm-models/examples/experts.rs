//! Times the experts of a checkpoint's first layer on the CPU: for each line of the input, such as
//! `forward 2048`, `inputs 512` or `weights 512`, the seconds of one run and the square root of the
//! mean square of its output, and of the gradient of its input. `benches/torch_experts.py` takes
//! turns with it.
//!
//! `cargo run --release -p vlm-models --example experts -- FOLDER f32` or `bf16`

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_attention::{GradientSource, backward_from};
use vlm_models::rope_core::position_ids::Prompt;
use vlm_models::{Inputs, Vlm, VlmConfig};

/// What a run computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    /// And the gradient of the input.
    Inputs,
    /// And those of all weights.
    Weights,
}

/// `[1, tokens, channels]`: sines of the squares of the elements' indices, which choose all experts
/// about as often, times a factor.
fn sines(factor: f64, [tokens, channels]: [usize; 2], device: &Device, dtype: DType) -> Tensor<3> {
    let sine = |index| (factor * (0.1 * (index as f64).powi(2)).sin()) as f32;
    let sines: Vec<f32> = (0..tokens * channels).map(sine).collect();
    let sines = TensorData::new(sines, [1, tokens, channels]);
    Tensor::from_data(sines, (device, dtype))
}

fn size(x: Tensor<3>) -> f32 {
    let x = x.inner().cast(DType::F32);
    (x.clone() * x).mean().sqrt().into_scalar()
}

/// An input, and a gradient of the output.
struct Data {
    sizes: [usize; 2],
    input: Tensor<3>,
    gradient: Tensor<3>,
}

impl Data {
    fn new(model: &Vlm, sizes: [usize; 2]) -> Self {
        let (device, dtype) = (model.device(), model.dtype());
        Self {
            sizes,
            input: sines(1.0, sizes, &device, dtype),
            gradient: sines(1e-3, sizes, &device, dtype).inner(),
        }
    }
}

fn run(model: &Vlm, pass: Pass, data: &Data) -> Result<(f64, f32), Box<dyn Error>> {
    let [tokens, _] = data.sizes;
    let model = match pass {
        Pass::Weights => model.clone(),
        Pass::Forward | Pass::Inputs => model.clone().no_grad(),
    };
    let ids: Vec<i64> = (0..tokens as i64).map(|token| token % 100).collect();
    let prompt = Prompt {
        input_ids: &ids,
        ..Prompt::default()
    };
    let batch = model.batch(&Inputs {
        prompt,
        image_patches: None,
        video_patches: None,
        shown: None,
    })?;
    let x = data.input.clone().set_require_grad(pass != Pass::Forward);
    let gradient = data.gradient.clone();
    let start = Instant::now();
    let out = model.through_experts(0, x.clone(), &batch)?;
    if pass == Pass::Forward {
        return Ok((start.elapsed().as_secs_f64(), size(out)));
    }
    let gradients = backward_from([GradientSource::new(out, gradient)?]);
    let seconds = start.elapsed().as_secs_f64();
    let gradient = x.grad(&gradients).ok_or("the input has no gradient")?;
    Ok((seconds, size(Tensor::from_inner(gradient))))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut device = Device::flex();
    let folder = match &arguments[..] {
        [folder, dtype] if dtype == "f32" => folder,
        [folder, dtype] if dtype == "bf16" => {
            device.configure(FloatDType::BF16)?;
            folder
        }
        _ => return Err("expected FOLDER and f32 or bf16".into()),
    };
    let config = VlmConfig::from_folder(folder)?;
    let model = config.load(folder, &device.autodiff())?;
    let mut data: Option<Data> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (pass, tokens) = match line.split_once(' ') {
            Some(("forward", tokens)) => (Pass::Forward, tokens),
            Some(("inputs", tokens)) => (Pass::Inputs, tokens),
            Some(("weights", tokens)) => (Pass::Weights, tokens),
            _ => return Err(format!("expected a pass and a number, found `{line}`").into()),
        };
        let sizes = [tokens.parse()?, config.text.hidden_size];
        let data = match data.take() {
            Some(found) if found.sizes == sizes => data.insert(found),
            _ => data.insert(Data::new(&model, sizes)),
        };
        let (seconds, size) = run(&model, pass, data)?;
        println!("{seconds} {size}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
