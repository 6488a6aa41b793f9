//! The model before and after training.

use std::error::Error;
use std::fs;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use qwen_vl::{QwenVl, QwenVlConfig};

use super::options::{FinetuneArgs, Precision};
use crate::device::Device as Named;

/// Files of a model's folder that hold weights, or say where they are.
const WEIGHTS: [&str; 3] = [".safetensors", ".safetensors.index.json", ".bin"];

/// The model in its precision, on a device that it configures.
pub(super) fn load(
    args: &FinetuneArgs,
    config: &QwenVlConfig,
    device: &Device,
) -> Result<QwenVl, Box<dyn Error>> {
    let mut device = device.clone();
    // Drawn on the host, whose generator is the same everywhere.
    let mut host = Device::flex();
    if args.precision == Precision::Bf16 {
        device.configure(FloatDType::BF16)?;
        if args.random_weights && args.device != Named::Cpu {
            host.configure(FloatDType::BF16)?;
        }
    }
    if !args.random_weights {
        return Ok(config.load(&args.folder, &device.autodiff())?);
    }
    host.seed(args.seed);
    let model = config.init(&host)?.map(&mut DrawWeights::default());
    Ok(model.fork(&device).train())
}

/// Copies what a folder of a model holds besides weights.
pub(super) fn copy_others(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if path.is_file() && !WEIGHTS.iter().any(|end| name.ends_with(end)) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Draws the weights now; otherwise each is drawn at first use, in an order that the first forward
/// pass decides. Word embeddings, which may also be the head, are made as small as transformers
/// draws them, or the first losses would be far above those of a guess.
#[derive(Default)]
struct DrawWeights {
    is_table: bool,
}

impl ModuleMapper for DrawWeights {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.is_table = name == "embed_tokens" || (self.is_table && name == "weight");
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let scale = if self.is_table { 0.02 } else { 1.0 };
        param.map(|drawn| drawn * scale)
    }
}
