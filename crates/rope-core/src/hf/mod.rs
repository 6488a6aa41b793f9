//! Hugging Face configurations: converts the keys of a `config.json` to a
//! [`RotarySpec`](crate::RotarySpec).

use std::fmt;

mod config;
mod defaults;
mod error;
mod family;
pub(crate) mod fields;
mod find;
mod json;
mod layers;
mod parameters;
mod rotations;

pub use config::parse_config;
pub use error::{ConfigError, Stated};
pub use family::model_tables;
pub use layers::LayerSpecs;
pub use parameters::{RopeContext, RopeParameters};

/// The part of a model that rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// The language model or audio encoder, or the one transformer of a diffusion model.
    Text,
    /// The vision tower.
    Vision,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Vision => "vision",
        })
    }
}
