//! Errors of configurations.

use std::fmt;

use serde_json::Value;

use super::Component;
use super::json::float;

/// A key of a configuration and its value.
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

/// A configuration that is invalid, incomplete or contradicts itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    #[error(
        "the configuration is not JSON: {detail}{}",
        if detail.ends_with("line 1 column 1") {
            "; expected the text of config.json, not its path"
        } else { "" }
    )]
    Json {
        /// The parser's message, with line and column.
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
    /// A missing key that another part of the configuration needs.
    #[error(
        "{key} is missing, and {needed_by} needs it; take it from the checkpoint's config.json"
    )]
    MissingKey {
        /// Path of the key.
        key: String,
        /// The part that needs it.
        needed_by: String,
    },
    /// A key that is read only elsewhere and would be ignored here.
    #[error("{key} is not read there; move it to {belongs_in}")]
    MisplacedKey {
        /// Path of the key.
        key: String,
        /// Path at which it is read.
        belongs_in: String,
    },
    /// A component other than `text` and `vision`.
    #[error("component {found:?} is not known; expected \"text\" or \"vision\"")]
    UnknownComponent {
        /// The name found.
        found: String,
    },
    /// A model with a rotation unknown to this crate, or without a rotation.
    #[error(
        "no rotation is known for the {component} component of model type {}; \
         build it with RotarySpec::builder if you know its pairing and axis layout",
        found.join(" / ")
    )]
    UnknownModelType {
        /// The model types found, innermost first.
        found: Vec<String>,
        /// The component requested.
        component: Component,
    },
    /// A known model with a rotation that a specification cannot express, or without a rotation.
    #[error("model type {model_type} is not supported: {reason}")]
    UnsupportedModelType {
        /// The model type.
        model_type: String,
        /// The reason.
        reason: &'static str,
    },
    /// A position embedding other than a rotation.
    #[error("{stated} is not a rotary embedding; expected \"rope\" or \"mrope\"")]
    NotRotary {
        /// The key as the configuration states it.
        stated: Stated,
    },
    /// A model with several position axes and a configuration that selects the one-axis path.
    ///
    /// Other implementations fail with `... has no attribute get_rotary_seq_len`, or silently.
    #[error(
        "{model_type} rotates by {axes} position axes (mrope_section), but {plain} sends it down \
         the plain path with one position per token; set it to \"mrope\" and pass position ids \
         [{axes}, tokens]"
    )]
    PlainPath {
        /// The family, by its first model type.
        model_type: &'static str,
        /// Its position axes.
        axes: usize,
        /// The key that selects the one-axis path.
        plain: Stated,
    },
    /// Sections for a model without sections.
    #[error(
        "{sections} divides the frequencies among position axes, but {model_type} has {axes} and \
         no sections; take the model type of the multimodal model, or remove the sections for text \
         alone"
    )]
    SectionsOnPlainModel {
        /// The sections.
        sections: Stated,
        /// The model type.
        model_type: Stated,
        /// Its position axes.
        axes: usize,
    },
    /// A model with several position axes and no sections to divide the frequencies among them.
    #[error(
        "{model_type} rotates by {axes} position axes, but {key} is missing, which would send it \
         down the plain path; take it from the checkpoint's config.json"
    )]
    MissingSections {
        /// Path at which the sections belong.
        key: String,
        /// The model type.
        model_type: Stated,
        /// Its position axes.
        axes: usize,
    },
    /// A number of sections different from the model's number of position axes.
    #[error(
        "{key} = {found:?} has {} sections, but {model_type} rotates by {axes} position axes; \
         give one section per axis",
        found.len()
    )]
    SectionAxes {
        /// Path of the sections.
        key: String,
        /// The sections.
        found: Vec<usize>,
        /// The model type.
        model_type: Stated,
        /// Its position axes.
        axes: usize,
    },
    /// An axis with an odd number of channels.
    #[error(
        "the axes take {channels:?} channels of a head, but channels rotate in pairs and {odd} is \
         odd"
    )]
    OddAxis {
        /// Channels of each axis.
        channels: Vec<usize>,
        /// The odd number of channels.
        odd: usize,
    },
    /// An object that both states parameters and maps layer types to parameters.
    #[error(
        "{key} holds parameters for all layers beside parameters for layer types; \
         move all of them into the layer types"
    )]
    MixedParameters {
        /// Path of the object.
        key: String,
    },
    /// Parameters for layer types where one set of parameters was requested.
    #[error("{stated} maps layer types to parameters; pass the parameters of one layer type")]
    PerLayerParameters {
        /// The object.
        stated: Stated,
    },
    /// A layer of a type without stated parameters.
    #[error(
        "layer {layer} is of type {layer_type:?}, but rope parameters are stated for {} only; \
         add them, or correct layer_types",
        known.join(", ")
    )]
    LayerWithoutParameters {
        /// Index of the layer.
        layer: usize,
        /// Its type.
        layer_type: String,
        /// The layer types that have parameters.
        known: Vec<String>,
    },
    /// A model with several rotations where one was requested.
    #[error(
        "the layers of this model rotate differently ({}); \
         read it with LayerSpecs::from_hf_config and take each layer's own",
        names.join(", ")
    )]
    SeveralRotations {
        /// Names of the rotations.
        names: Vec<String>,
    },
    /// A scaling unknown to this crate.
    #[error("{key} = {found:?} is not a known rope type; known are {}", known.join(", "))]
    UnknownRopeType {
        /// Path of the key.
        key: String,
        /// The name found.
        found: String,
        /// The known names.
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
        /// Their product.
        rotary_dim: usize,
    },
    /// Two keys with different values for the same quantity.
    #[error("{left} contradicts {right}; {remedy}")]
    Contradiction {
        /// One side.
        left: Stated,
        /// The other side.
        right: Stated,
        /// The remedy.
        remedy: &'static str,
    },
}

impl ConfigError {
    pub(super) fn contradiction(left: Stated, right: Stated, remedy: &'static str) -> Self {
        Self::Contradiction {
            left,
            right,
            remedy,
        }
    }

    pub(super) fn wrong_type(key: &str, expected: &'static str, found: &Value) -> Self {
        Self::WrongType {
            key: if key.is_empty() {
                "the configuration".to_owned()
            } else {
                key.to_owned()
            },
            expected,
            found: float(found).map_or_else(|| found.to_string(), str::to_owned),
        }
    }
}
