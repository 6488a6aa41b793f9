//! Everything that determines the numbers of a run.

use rope_burn::Implementation;
use rope_core::{AxisLayout, Pairing, RotarySpec};

use crate::clip::{Axes, Clip};
use crate::model::ModelConfig;

/// Everything that determines the numbers of a run: two runs with equal configurations have the same
/// losses.
#[derive(Clone, Debug)]
pub struct Config {
    /// The rotation of q and k; `None` for no positions.
    pub rotary: Option<Implementation>,
    /// The axes of positions.
    pub axes: Axes,
    /// The pairing of a head's channels.
    pub pairing: Pairing,
    /// Training steps.
    pub steps: usize,
    /// Seed of the weights and of the questions.
    pub seed: u64,
    /// The shape of a clip.
    pub clip: Clip,
    /// Questions per step.
    pub batch: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            rotary: Some(Implementation::Fused),
            axes: Axes::Mrope,
            pairing: Pairing::Half,
            steps: 1500,
            seed: 0,
            clip: Clip {
                frames: 2,
                rows: 2,
                columns: 2,
            },
            batch: 32,
            learning_rate: 8e-4,
        }
    }
}

/// The base of the frequencies: wavelengths run from 2 pi tokens down to 2 pi theta, 2.5 tokens.
/// The angles of neighbouring cells of a clip should differ much. With a base of 10,000 or more,
/// which language models use for long texts, most lanes would hardly rotate over a few cells.
const THETA: f64 = 0.4;

impl Config {
    /// Bytes that a step holds at least at its peak: the attention of each layer that the backward
    /// needs, its gradient and what that is made of, and the activations.
    pub fn least_step_bytes(&self) -> f64 {
        let sizes = ModelConfig::new(self.clip.vocabulary());
        let [tokens, heads, layers] = [self.clip.tokens(), sizes.heads, sizes.layers];
        let activations = 5 * (sizes.width + sizes.heads * sizes.head_dim + sizes.hidden);
        let token_values = heads * tokens * (layers + 4) + layers * activations;
        (self.batch * tokens) as f64 * (token_values * size_of::<f32>()) as f64
    }

    /// The rotation of heads of `head_dim` channels. The axes are striped over the lanes as in
    /// Qwen3-VL, so that each axis has fast and slow lanes.
    pub fn spec(&self, head_dim: usize) -> rope_core::Result<RotarySpec> {
        let third = head_dim / 6;
        RotarySpec::builder(head_dim)
            .pairing(self.pairing)
            .axis_layout(match self.axes {
                Axes::Mrope => AxisLayout::Striped(vec![head_dim / 2 - 2 * third, third, third]),
                Axes::OneD => AxisLayout::Single,
            })
            .theta(THETA)
            .build()
    }

    /// The learning rate at `step`: it rises linearly over at most 100 steps, stays level to the
    /// middle of the run, then falls along a cosine. It stays level for long because the model
    /// learns an axis suddenly, and with a falling rate might never do so.
    pub fn learning_rate_at(&self, step: usize) -> f64 {
        let done = step as f64 / self.steps as f64;
        let warmup = (self.steps as f64 / 10.0).clamp(1.0, 100.0);
        let rise = ((step + 1) as f64 / warmup).min(1.0);
        let fall = 0.5 * (1.0 + (std::f64::consts::PI * (2.0 * done - 1.0).max(0.0)).cos());
        self.learning_rate * rise * fall
    }
}
