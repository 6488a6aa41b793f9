//! Hugging Face configurations: from the keys of a `config.json` to a
//! [`RotarySpec`](crate::RotarySpec).

mod config;
mod error;
mod family;
pub(crate) mod fields;
mod layers;
mod parameters;

pub use error::{ConfigError, Stated};
pub use family::Component;
pub use layers::LayerSpecs;
pub use parameters::{RopeContext, RopeParameters};

use serde_json::Value;

pub(crate) fn parse(json: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(json).map_err(|error| ConfigError::Json {
        detail: error.to_string(),
    })
}
