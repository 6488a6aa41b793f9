//! Hugging Face configurations: from the keys of a `config.json` to a [`RotarySpec`](crate::RotarySpec).

mod error;
mod fields;
mod parameters;

pub use error::{ConfigError, Stated};
pub use parameters::{RopeContext, RopeParameters};

use serde_json::Value;

fn parse(json: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(json).map_err(|error| ConfigError::Json {
        detail: error.to_string(),
    })
}
