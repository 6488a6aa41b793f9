//! The model of commands that run one without training it.

use std::error::Error;
use std::path::PathBuf;

use burn::tensor::{Device as HostDevice, FloatDType};
use clap::{Args, ValueHint};
use vlm_models::{Vlm, VlmConfig};
use vlm_train::job::{PositionRule, Precision};

use crate::device::{Compute, Device, TokenArgs};

/// Options of a model and its device.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// Model folder: config.json, weights, tokenizer, chat template, preprocessor
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) folder: PathBuf,

    /// Adapter folder, applied beside the weights
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    adapter: Option<PathBuf>,

    /// Accept an adapter that records another checkpoint; its names and shapes must still fit
    #[arg(long, requires = "adapter")]
    any_base: bool,

    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, ascend-sim (a
    /// simulated NPU), or remote:ws://HOST:PORT (a device that `mrope serve` serves)
    #[arg(long, default_value = "cpu")]
    device: Device,

    #[command(flatten)]
    token: TokenArgs,

    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,

    #[command(flatten)]
    position_rule: PositionRule,
}

impl ModelArgs {
    /// Opens the device, which must be kept while the model is used, and loads the model.
    ///
    /// # Errors
    /// Those of the device, the folder and the adapter.
    pub(crate) fn load(&self) -> Result<(Compute, Vlm), Box<dyn Error>> {
        let compute = Compute::open(&self.device, &self.token)?;
        let model = self.load_to(compute.device())?;
        Ok((compute, model))
    }

    fn load_to(&self, device: &HostDevice) -> Result<Vlm, Box<dyn Error>> {
        let config = self.position_rule.of(VlmConfig::from_folder(&self.folder)?);
        let mut device = device.clone();
        match self.precision {
            Precision::F32 => {}
            Precision::Bf16 => device.configure(FloatDType::BF16)?,
            Precision::F16 => device.configure(FloatDType::F16)?,
        }
        let model = config.load(&self.folder, &device)?;
        Ok(match &self.adapter {
            Some(adapter) if self.any_base => model.of_any_base().load_adapter(adapter)?,
            Some(adapter) => model.load_adapter(adapter)?,
            None => model,
        })
    }
}
