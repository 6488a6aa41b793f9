//! Hugging Face configurations: from the keys of a `config.json` to a
//! [`RotarySpec`](crate::RotarySpec).

mod config;
mod defaults;
mod error;
mod family;
pub(crate) mod fields;
mod json;
mod layers;
mod parameters;

pub use error::{ConfigError, Stated};
pub use family::{Component, model_tables};
pub use json::parse_config;
pub use layers::LayerSpecs;
pub use parameters::{RopeContext, RopeParameters};
