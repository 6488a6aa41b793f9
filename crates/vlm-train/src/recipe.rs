//! Everything that determines the numbers of a run.

use serde::{Deserialize, Serialize};
use vlm_models::{LoraConfig, ModelPart};

use crate::error::{Result, VlmTrainError};
use crate::schedule::Schedule;

/// The trained parts, the hyperparameters and the number of steps. Two runs with equal recipes,
/// models and batches have equal numbers on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Steps, each over one batch.
    pub steps: usize,
    /// The parts that are trained.
    pub trained: TrainedParts,
    /// Peak learning rates.
    pub rates: Rates,
    /// How rates fall.
    pub schedule: Schedule,
    /// Steps in which rates rise from 0.
    pub warmup_steps: usize,
    /// Decay of the moments in a step.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decay of matrices in a step, times the rate; norms and biases do not decay.
    pub weight_decay: f64,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub max_norm: Option<f64>,
    /// The divisor of the losses of a batch's tokens.
    pub loss_rule: LossRule,
    /// Keeps an f32 copy of each parameter in 16 bits, which updates add up in.
    pub masters: bool,
    /// The factor that losses are multiplied with at first for models in f16. It is halved in a
    /// step whose gradients overflow, which takes no update, and doubled after 2,000 steps without
    /// one.
    pub loss_scale: Option<f64>,
    /// Runs each layer again in the backward pass, instead of keeping what its backward needs.
    pub recompute: bool,
    /// Of adapters and dropout.
    pub seed: u64,
}

/// The parts that are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedParts {
    /// Adapters; the model is frozen.
    Lora(LoraConfig),
    /// These parts of the model.
    Full(Vec<ModelPart>),
}

/// Peak learning rates of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Of the vision tower.
    pub tower: f64,
    /// Of the merger.
    pub merger: f64,
    /// Of the decoder.
    pub decoder: f64,
}

impl Rates {
    /// One rate for all parts.
    pub fn all(rate: f64) -> Self {
        Self {
            tower: rate,
            merger: rate,
            decoder: rate,
        }
    }

    pub(crate) fn of(&self, part: ModelPart) -> f64 {
        match part {
            ModelPart::Tower => self.tower,
            ModelPart::Merger => self.merger,
            ModelPart::Decoder => self.decoder,
        }
    }
}

/// The divisor of the losses of a batch's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossRule {
    /// The labelled tokens of the whole batch: each counts the same, however the batch is cut.
    Tokens,
    /// Those of its micro-batch, and then the means by the number of micro-batches, as transformers
    /// 5.24.0 does for all Qwen-VL models.
    MicroBatches,
}

impl Default for Recipe {
    /// Adapters of [`LoraConfig::default`], rates of 1e-4 that rise for 3 steps of 100 and fall
    /// along a cosine, betas 0.9 and 0.999, epsilon 1e-8, no decay, norms clipped at 1.
    fn default() -> Self {
        Self {
            steps: 100,
            trained: TrainedParts::Lora(LoraConfig::default()),
            rates: Rates::all(1e-4),
            schedule: Schedule::Cosine,
            warmup_steps: 3,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_norm: Some(1.0),
            loss_rule: LossRule::Tokens,
            masters: true,
            loss_scale: None,
            recompute: true,
            seed: 0,
        }
    }
}

impl Recipe {
    /// # Errors
    /// [`VlmTrainError::Recipe`]
    pub(crate) fn check(&self) -> Result<()> {
        let rate = "a finite number, at least 0";
        let beta = "at least 0 and below 1";
        let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
        let is_beta = |beta: f64| (0.0..1.0).contains(&beta);
        let max_norm = self.max_norm.unwrap_or(1.0);
        let above = "a finite number above 0";
        for (option, found, is_right, expected) in [
            // First, for the others follow it by default.
            (
                "decoder rate",
                self.rates.decoder,
                is_rate(self.rates.decoder),
                rate,
            ),
            (
                "tower rate",
                self.rates.tower,
                is_rate(self.rates.tower),
                rate,
            ),
            (
                "merger rate",
                self.rates.merger,
                is_rate(self.rates.merger),
                rate,
            ),
            (
                "weight decay",
                self.weight_decay,
                is_rate(self.weight_decay),
                rate,
            ),
            (
                "epsilon",
                self.epsilon,
                // A moment of 0 is divided by it.
                is_rate(self.epsilon) && self.epsilon > 0.0,
                above,
            ),
            (
                "loss scale",
                self.loss_scale.unwrap_or(1.0),
                is_rate(self.loss_scale.unwrap_or(1.0)) && self.loss_scale != Some(0.0),
                above,
            ),
            ("first beta", self.betas[0], is_beta(self.betas[0]), beta),
            ("second beta", self.betas[1], is_beta(self.betas[1]), beta),
            (
                "norm to clip at",
                max_norm,
                is_rate(max_norm) && max_norm > 0.0,
                above,
            ),
        ] {
            if !is_right {
                return Err(VlmTrainError::Recipe {
                    option,
                    found: found.to_string(),
                    expected,
                });
            }
        }
        Ok(())
    }
}
