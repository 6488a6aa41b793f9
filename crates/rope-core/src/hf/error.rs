//! What can be wrong with a configuration.

use std::fmt;

use serde_json::Value;

/// A key of a configuration and what it says there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stated {
    /// Path of the key from the top of the file, as in `text_config.rope_parameters.factor`.
    pub key: String,
    /// The value found, as JSON.
    pub value: String,
}

impl Stated {
    pub(super) fn new(key: impl Into<String>, value: impl fmt::Display) -> Self {
        Self {
            key: key.into(),
            value: value.to_string(),
        }
    }
}

impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.key, self.value)
    }
}

/// A configuration that is broken, incomplete or contradicts itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("the configuration is not JSON: {detail}")]
    Json {
        /// What the parser says, with line and column.
        detail: String,
    },
    /// A key holds a value of another type.
    #[error("{key} must be {expected}, found {found}")]
    WrongType {
        /// Path of the key.
        key: String,
        /// The type expected.
        expected: &'static str,
        /// The value found, as JSON.
        found: String,
    },
    /// A key that something else in the configuration needs.
    #[error(
        "{key} is missing, and {needed_by} needs it; take it from the checkpoint's config.json"
    )]
    MissingKey {
        /// Path of the key.
        key: String,
        /// What needs it.
        needed_by: String,
    },
    /// A scaling that this crate does not know.
    #[error("{key} = {found:?} is not a known rope type; known are {}", known.join(", "))]
    UnknownRopeType {
        /// Path of the key.
        key: String,
        /// The name found.
        found: String,
        /// The names known.
        known: &'static [&'static str],
    },
    /// A share of the head that cannot be rotated.
    #[error(
        "partial_rotary_factor {share} of head_dim {head_dim} gives {rotary_dim} rotated channels; \
         expected a share in (0, 1] that gives an even number"
    )]
    PartialRotary {
        /// The share found.
        share: f64,
        /// Channels per head.
        head_dim: usize,
        /// What they make.
        rotary_dim: usize,
    },
    /// Two keys that say different things about the same quantity.
    #[error("{left} contradicts {right}; {remedy}")]
    Contradiction {
        /// One side.
        left: Stated,
        /// The other side.
        right: Stated,
        /// What to do.
        remedy: &'static str,
    },
}

impl ConfigError {
    pub(super) fn wrong_type(key: &str, expected: &'static str, found: &Value) -> Self {
        Self::WrongType {
            key: if key.is_empty() {
                "the configuration".to_owned()
            } else {
                key.to_owned()
            },
            expected,
            found: found.to_string(),
        }
    }
}
