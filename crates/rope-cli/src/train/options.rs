//! The options of `mrope train`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rope_core::{AxisLayout, Pairing, RotarySpec};
use serde::{Deserialize, Serialize};

use super::clip::{Axes, Clip};
use super::model::ModelConfig;
use crate::arguments::{count_in, seed};
use crate::device::{Device, TokenArgs};

/// Options of `mrope train`.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunConfig,

    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N,
    /// ascend-sim (a simulated NPU), or remote:ws://HOST:PORT (a device that `mrope serve` serves)
    #[arg(long, default_value = "cpu")]
    pub(crate) device: Device,

    #[command(flatten)]
    pub(crate) token: TokenArgs,

    /// Folder for the model, the checkpoints and the plots [default: out/ and the rotation, as in
    /// out/fused]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Save a checkpoint every STEPS steps
    #[arg(long, value_name = "STEPS", default_value_t = 200, value_parser = count_in(1..=MAX_STEPS))]
    pub(crate) checkpoint_every: usize,

    /// Number of questions about unseen digits, for the accuracy
    #[arg(long, value_name = "QUESTIONS", default_value_t = 2048)]
    #[arg(value_parser = count_in(1..=1_000_000))]
    pub(crate) test_questions: usize,

    /// Continue from the last checkpoint in the folder, with the same options
    #[arg(long)]
    pub(crate) resume: bool,

    /// Print no progress; warnings and errors remain
    #[arg(long)]
    pub(crate) quiet: bool,

    /// Print one JSON object, and nothing else, on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

impl TrainArgs {
    /// The folder that the run writes to.
    pub(crate) fn out(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| {
            let rotary = self.run.rotary.to_possible_value();
            PathBuf::from("out").join(rotary.map_or_else(String::new, |v| v.get_name().to_owned()))
        })
    }
}

/// Everything that determines the numbers of a run: two runs with equal configurations have the
/// same losses.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RunConfig {
    /// Rotation of q and k: fused, composed of ordinary operations, or none (no positions)
    #[arg(long, value_enum, default_value_t = RotaryChoice::Fused)]
    pub(crate) rotary: RotaryChoice,

    /// Positions: time, height and width (mrope), or the index in the sequence (1d)
    #[arg(long, value_enum, default_value_t = Axes::Mrope)]
    pub(crate) axes: Axes,

    /// Channels that form a pair: j and j + half a head (half: Llama, Qwen), 2j and 2j + 1
    /// (adjacent: GPT-J, ERNIE), halves within each half (quarter), or interleave-half
    #[arg(long, value_enum, default_value_t = PairingChoice::Half)]
    pub(crate) pairing: PairingChoice,

    /// Number of training steps
    #[arg(long, default_value_t = 1500, value_parser = count_in(1..=MAX_STEPS))]
    pub(crate) steps: usize,

    /// Seed of the weights and of the questions
    #[arg(long, default_value_t = 0, value_parser = seed())]
    pub(crate) seed: u64,

    /// Frames per clip
    #[arg(long, default_value_t = 2, value_parser = count_in(1..=MAX_SIDE))]
    pub(crate) frames: usize,

    /// Rows per frame
    #[arg(long, default_value_t = 2, value_parser = count_in(1..=MAX_SIDE))]
    pub(crate) rows: usize,

    /// Columns per frame
    #[arg(long, default_value_t = 2, value_parser = count_in(1..=MAX_SIDE))]
    pub(crate) columns: usize,

    /// Questions per step
    #[arg(long, default_value_t = 32, value_parser = count_in(1..=4096))]
    pub(crate) batch: usize,

    /// Peak learning rate
    #[arg(long, default_value_t = 8e-4, value_parser = learning_rate)]
    pub(crate) learning_rate: f64,
}

const MAX_STEPS: usize = 10_000_000;
const MAX_SIDE: usize = 8;

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("a number above 0 and up to 1 is expected".to_owned()),
    }
}

/// How q and k are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RotaryChoice {
    Fused,
    Composed,
    None,
}

/// The pairing of a head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PairingChoice {
    Half,
    Adjacent,
    Quarter,
    InterleaveHalf,
}

impl From<PairingChoice> for Pairing {
    fn from(choice: PairingChoice) -> Self {
        match choice {
            PairingChoice::Half => Self::Half,
            PairingChoice::Adjacent => Self::Adjacent,
            PairingChoice::Quarter => Self::Quarter,
            PairingChoice::InterleaveHalf => Self::InterleaveHalf,
        }
    }
}

/// The base of the frequencies: wavelengths run from 2 pi tokens down to 2 pi theta, 2.5 tokens.
/// The angles of neighbouring cells of a clip should differ much. With a base of 10,000 or more,
/// which language models use for long texts, most lanes would hardly rotate over a few cells.
const THETA: f64 = 0.4;

impl RunConfig {
    /// The shape of a clip.
    pub(crate) fn clip(&self) -> Clip {
        Clip {
            frames: self.frames,
            rows: self.rows,
            columns: self.columns,
        }
    }

    /// Bytes that a step holds at least at its peak: the attention of each layer that the backward
    /// needs, its gradient and what that is made of, and the activations.
    pub(crate) fn least_step_bytes(&self) -> f64 {
        let sizes = ModelConfig::new(self.clip().vocabulary());
        let [tokens, heads, layers] = [self.clip().tokens(), sizes.heads, sizes.layers];
        let activations = 5 * (sizes.width + sizes.heads * sizes.head_dim + sizes.hidden);
        let token_values = heads * tokens * (layers + 4) + layers * activations;
        (self.batch * tokens) as f64 * (token_values * size_of::<f32>()) as f64
    }

    /// The rotation of heads of `head_dim` channels. The axes are striped over the lanes as in
    /// Qwen3-VL, so that each axis has fast and slow lanes.
    pub(crate) fn spec(&self, head_dim: usize) -> rope_core::Result<RotarySpec> {
        let third = head_dim / 6;
        RotarySpec::builder(head_dim)
            .pairing(self.pairing.into())
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
    pub(crate) fn learning_rate_at(&self, step: usize) -> f64 {
        let done = step as f64 / self.steps as f64;
        let warmup = (self.steps as f64 / 10.0).clamp(1.0, 100.0);
        let rise = ((step + 1) as f64 / warmup).min(1.0);
        let fall = 0.5 * (1.0 + (std::f64::consts::PI * (2.0 * done - 1.0).max(0.0)).cos());
        self.learning_rate * rise * fall
    }
}

#[cfg(test)]
mod tests {
    use super::super::trainer::tests::options;
    use super::*;

    #[test]
    fn a_configuration_comes_back_from_json_to_the_last_bit() {
        // Rates of 17 digits that serde_json reads one unit off without `float_roundtrip`.
        for rate in ["0.00047274908866546685", "0.00023135770071150698"] {
            let config = options(&format!("--learning-rate {rate}"));
            let text = serde_json::to_string(&config).unwrap();
            let read: RunConfig = serde_json::from_str(&text).unwrap();
            assert_eq!(read, config, "{text}");
        }
    }
}
