//! What a user can choose.

use clap::{Args, ValueEnum};
use rope_core::{AxisLayout, Pairing, RotarySpec};
use serde::{Deserialize, Serialize};

use super::clip::Clip;

/// How q and k are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rotation {
    Fused,
    Composed,
    None,
}

/// What a position is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Axes {
    #[serde(rename = "mrope")]
    Mrope,
    #[value(name = "1d")]
    #[serde(rename = "1d")]
    OneD,
}

#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct RunConfig {
    #[arg(long, value_enum, default_value = "fused")]
    pub(crate) rotary: Rotation,
    #[arg(long, value_enum, default_value = "mrope")]
    pub(crate) axes: Axes,
    #[arg(long, default_value_t = 1000)]
    pub(crate) steps: usize,
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    #[arg(long, default_value_t = 2)]
    pub(crate) frames: usize,
    #[arg(long, default_value_t = 2)]
    pub(crate) rows: usize,
    #[arg(long, default_value_t = 2)]
    pub(crate) columns: usize,
    #[arg(long, default_value_t = 64)]
    pub(crate) batch: usize,
    #[arg(long, default_value_t = 3e-3)]
    pub(crate) lr: f64,
    #[arg(long, default_value_t = 100.0)]
    pub(crate) theta: f64,
    #[arg(long, default_value_t = 64)]
    pub(crate) width: usize,
    #[arg(long, default_value_t = 2)]
    pub(crate) layers: usize,
    #[arg(long, default_value_t = 0.01)]
    pub(crate) decay: f32,
}

impl RunConfig {
    pub(crate) fn clip(&self) -> Clip {
        Clip {
            frames: self.frames,
            rows: self.rows,
            columns: self.columns,
        }
    }
    pub(crate) fn spec(&self, head_dim: usize) -> rope_core::Result<RotarySpec> {
        RotarySpec::builder(head_dim)
            .pairing(Pairing::Half)
            .axes(match self.axes {
                Axes::Mrope => AxisLayout::Striped(vec![6, 5, 5]),
                Axes::OneD => AxisLayout::Single,
            })
            .theta(self.theta)
            .build()
    }
}
