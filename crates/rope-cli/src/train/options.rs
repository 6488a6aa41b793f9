//! The options of `mrope train`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use mrope_digits::{Clip, Config};
use rope_burn::Implementation;
use rope_core::Pairing;
use serde::Serialize;

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

    /// Folder for the model and the plots [default: out/ and the rotation, as in
    /// out/fused]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Number of questions about unseen digits, for the accuracy
    #[arg(long, value_name = "QUESTIONS", default_value_t = 2048)]
    #[arg(value_parser = count_in(1..=1_000_000))]
    pub(crate) test_questions: usize,

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
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RunConfig {
    /// Rotation of q and k: fused, composed of ordinary operations, or none (no positions)
    #[arg(long, value_enum, default_value_t = RotaryChoice::Fused)]
    pub(crate) rotary: RotaryChoice,

    /// Positions: time, height and width (mrope), or the index in the sequence (1d)
    #[arg(long, value_enum, default_value_t = AxesChoice::Mrope)]
    pub(crate) axes: AxesChoice,

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RotaryChoice {
    Fused,
    Composed,
    None,
}

/// The axes of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AxesChoice {
    Mrope,
    #[value(name = "1d")]
    #[serde(rename = "1d")]
    OneD,
}

/// The pairing of a head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
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

impl RunConfig {
    /// The same for the example.
    pub(crate) fn config(&self) -> Config {
        Config {
            rotary: match self.rotary {
                RotaryChoice::Fused => Some(Implementation::Fused),
                RotaryChoice::Composed => Some(Implementation::Composed),
                RotaryChoice::None => None,
            },
            axes: match self.axes {
                AxesChoice::Mrope => mrope_digits::Axes::Mrope,
                AxesChoice::OneD => mrope_digits::Axes::OneD,
            },
            pairing: self.pairing.into(),
            steps: self.steps,
            seed: self.seed,
            clip: Clip {
                frames: self.frames,
                rows: self.rows,
                columns: self.columns,
            },
            batch: self.batch,
            learning_rate: self.learning_rate,
        }
    }
}
