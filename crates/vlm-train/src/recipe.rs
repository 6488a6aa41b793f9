//! Everything that determines the numbers of a run.

use serde::{Deserialize, Serialize};
use vlm_models::{LoraConfig, ModelPart, TrainedWeights};

use crate::error::{Result, VlmTrainError};
use crate::policy::Policy;
use crate::preference::Preference;
use crate::schedule::{Schedule, Span};

/// The trained parts, the hyperparameters and the number of steps. Two runs with equal recipes,
/// models and batches are bit-identical on the same device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Steps, each over one batch.
    pub steps: usize,
    /// The trained parts.
    pub trained: TrainedParts,
    /// Peak learning rates.
    pub rates: Rates,
    /// The decay of the rates.
    pub schedule: Schedule,
    /// Steps of warm-up, in which rates rise from 0.
    pub warmup_steps: usize,
    /// Steps of decay at the end, for [`Schedule::Wsd`].
    #[serde(default)]
    pub decay_steps: usize,
    /// The share of the peak rates at which decay ends.
    #[serde(default)]
    pub least_share: f64,
    /// Decay of the moments per step.
    pub betas: [f64; 2],
    /// The number added to the root of the second moment.
    pub epsilon: f64,
    /// Decay of matrices per step, times the rate; norms and biases do not decay.
    pub weight_decay: f64,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub max_norm: Option<f64>,
    /// The divisor of the losses of a batch's tokens.
    pub loss_rule: LossRule,
    /// True to keep an f32 copy of each 16-bit parameter, in which updates accumulate.
    pub masters: bool,
    /// The initial factor on losses for models in f16. It is halved in a step whose gradients
    /// overflow, which is skipped, and doubled after 2,000 steps without an overflow.
    pub loss_scale: Option<f64>,
    /// True to recompute each layer in the backward pass instead of keeping its activations.
    pub recompute: bool,
    /// The seed of adapters and dropout.
    pub seed: u64,
    /// The factor on the auxiliary loss of the routers of a model with experts; `None` for none. It
    /// is of the whole batch, whatever its cut, and takes a forward pass more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
    /// The loss of preferences; `None` to imitate answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<Preference>,
    /// The loss of sampled answers with rewards, instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
}

/// The trained parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedParts {
    /// Adapters, and weights trained whole beside them; the rest of the model is frozen.
    Lora(LoraConfig),
    /// These weights of the model.
    Full(TrainedWeights),
}

/// Peak learning rates of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// The rate of the vision tower.
    pub tower: f64,
    /// The rate of the merger.
    pub merger: f64,
    /// The rate of the decoder.
    pub decoder: f64,
}

impl Rates {
    /// Sets one rate for all parts.
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
    /// The labelled tokens of the whole batch: each has equal weight, independent of the division
    /// into micro-batches.
    Tokens,
    /// The labelled tokens of each micro-batch; the means are then divided by the number of
    /// micro-batches, as transformers 5.24.0 does for all Qwen-VL models.
    MicroBatches,
}

impl Default for Recipe {
    /// Trains adapters of [`LoraConfig::default`] for 100 steps: rates of 1e-4 with 3 steps of
    /// warm-up and cosine decay, betas 0.9 and 0.999, epsilon 1e-8, no weight decay, norms clipped
    /// at 1.
    fn default() -> Self {
        Self {
            steps: 100,
            trained: TrainedParts::Lora(LoraConfig::default()),
            rates: Rates::all(1e-4),
            schedule: Schedule::Cosine,
            warmup_steps: 3,
            decay_steps: 0,
            least_share: 0.0,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_norm: Some(1.0),
            loss_rule: LossRule::Tokens,
            masters: true,
            loss_scale: None,
            recompute: true,
            seed: 0,
            router_loss: None,
            preference: None,
            policy: None,
        }
    }
}

impl Recipe {
    /// True if the loss is relative to a reference.
    pub(crate) fn has_reference(&self) -> bool {
        let of_pairs = |preference: Preference| preference.loss.has_reference();
        self.preference.is_some_and(of_pairs) || self.policy.is_some_and(|of| of.beta > 0.0)
    }

    /// True if the reference is not the model without its adapters, and so has weights of its own.
    pub(crate) fn keeps_reference(&self) -> bool {
        let is_base = match &self.trained {
            TrainedParts::Lora(config) => config.whole == TrainedWeights::default(),
            TrainedParts::Full(_) => false,
        };
        self.has_reference() && !is_base
    }

    /// The updates in a step.
    pub(crate) fn updates(&self) -> usize {
        self.policy.map_or(1, |policy| policy.updates)
    }

    /// The factor on the peak rates in a step, counted from 0.
    pub(crate) fn factor(&self, step: usize) -> f64 {
        let span = Span {
            warmup: self.warmup_steps,
            decay: self.decay_steps,
            all: self.steps,
            least: self.least_share,
        };
        self.schedule.factor(step, span)
    }

    /// True if a run of `done` steps of `earlier` had the rates of this recipe.
    pub(crate) fn had_rates_of(&self, earlier: &Self, done: usize) -> bool {
        let same = |step| self.factor(step) == earlier.factor(step);
        self.steps >= done && (0..done).all(same)
    }

    /// # Errors
    /// [`VlmTrainError::Recipe`]
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(preference) = &self.preference {
            preference.check()?;
        }
        if let Some(policy) = &self.policy {
            policy.check()?;
        }
        let rate = "a finite number of at least 0";
        let beta = "at least 0 and below 1";
        let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
        let is_beta = |beta: f64| (0.0..1.0).contains(&beta);
        let max_norm = self.max_norm.unwrap_or(1.0);
        let above = "a finite number above 0";
        for (key, found, is_right, expected) in [
            // Checked first, since the others follow it by default.
            (
                "rates.decoder",
                self.rates.decoder,
                is_rate(self.rates.decoder),
                rate,
            ),
            (
                "rates.tower",
                self.rates.tower,
                is_rate(self.rates.tower),
                rate,
            ),
            (
                "rates.merger",
                self.rates.merger,
                is_rate(self.rates.merger),
                rate,
            ),
            (
                "weight_decay",
                self.weight_decay,
                is_rate(self.weight_decay),
                rate,
            ),
            (
                "epsilon",
                self.epsilon,
                // A moment of 0 would be divided by it.
                is_rate(self.epsilon) && self.epsilon > 0.0,
                above,
            ),
            (
                "loss_scale",
                self.loss_scale.unwrap_or(1.0),
                is_rate(self.loss_scale.unwrap_or(1.0)) && self.loss_scale != Some(0.0),
                above,
            ),
            (
                "router_loss",
                self.router_loss.unwrap_or(0.0),
                is_rate(self.router_loss.unwrap_or(0.0)),
                rate,
            ),
            (
                "least_share",
                self.least_share,
                (0.0..=1.0).contains(&self.least_share),
                "0 to 1",
            ),
            ("betas[0]", self.betas[0], is_beta(self.betas[0]), beta),
            ("betas[1]", self.betas[1], is_beta(self.betas[1]), beta),
            (
                "max_norm",
                max_norm,
                is_rate(max_norm) && max_norm > 0.0,
                above,
            ),
        ] {
            if !is_right {
                return Err(VlmTrainError::Recipe {
                    key,
                    found: found.to_string(),
                    expected,
                });
            }
        }
        if (0..self.steps).all(|step| self.factor(step) == 0.0) {
            return Err(VlmTrainError::Recipe {
                key: "warmup_steps",
                found: format!("{} of {} steps", self.warmup_steps, self.steps),
                expected: "a step with a rate above 0, since a warm-up begins at 0",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As checkpoints of earlier versions have them.
    #[test]
    fn earlier_recipes_are_read() {
        for (text, expected) in [
            (
                r#"{"full":["tower","decoder"]}"#,
                TrainedParts::Full(vec![ModelPart::Tower, ModelPart::Decoder].into()),
            ),
            (
                r#"{"lora":{"rank":8,"alpha":16.0,"dropout":0.0,"rslora":false,"parts":["decoder"],
                    "targets":[]}}"#,
                TrainedParts::Lora(LoraConfig::default()),
            ),
        ] {
            let found: TrainedParts = serde_json::from_str(text).expect("a recipe");
            assert_eq!(found, expected);
            let again = serde_json::to_string(&found).expect("JSON");
            assert_eq!(
                serde_json::from_str::<TrainedParts>(&again).expect("a recipe"),
                expected
            );
        }
    }
}
