//! Why a file could not be compared.

use rope_core::RopeError;

use crate::engine::EngineError;

/// A golden file that is unreadable, incomplete or contradicts itself. The message continues a
/// path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GoldenError {
    /// The operating system refused.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// A broken or truncated container.
    #[error(
        "is not a complete safetensors file ({detail}); it may be truncated: copy or dump it again"
    )]
    Container {
        /// The message of the parser.
        detail: String,
    },
    /// JSON that does not parse, or a frequency table without a field.
    #[error(
        "is not a complete JSON file of cases ({detail}); it may be truncated: copy or dump it \
         again"
    )]
    Json {
        /// The message of the parser, with line and column.
        detail: String,
    },
    /// A file of another kind, where a golden one was asked for.
    #[error("is not a golden file: {reason}")]
    NotGolden {
        /// The reason why it is not golden.
        reason: &'static str,
    },
    /// A metadata key that everything else needs.
    #[error("has no metadata {key:?}, expected {expected}; state it when saving")]
    MissingMetadata {
        /// The key.
        key: &'static str,
        /// The value that it should have, in words.
        expected: &'static str,
    },
    /// A metadata value that cannot be used.
    #[error("metadata {key:?} must be {expected}, found {found:?}")]
    Metadata {
        /// The key.
        key: &'static str,
        /// The values that it may have, in words.
        expected: &'static str,
        /// The value that it has.
        found: String,
    },
    /// A key of the rotation that nothing reads.
    #[error("metadata \"rotation\" has a key {key} that is not read; expected {expected}{advice}")]
    RotationKey {
        /// Path of the key.
        key: String,
        /// The keys that are read there.
        expected: String,
        /// The key that was probably meant.
        advice: String,
    },
    /// A model type whose rotation cannot be made of its parameters.
    #[error(
        "metadata \"model_type\" is {model_type}, and {reason}; state its \"rotation\" instead, or \
         \"pairing\" with a tensor head_frequencies"
    )]
    ModelType {
        /// The model type.
        model_type: String,
        /// Why.
        reason: &'static str,
    },
    /// A tensor that is needed and absent.
    #[error("has no tensor {name}, {needed_by} needs it; found {found}")]
    MissingTensor {
        /// The tensor, with the types that would do.
        name: String,
        /// The comparison that needs it.
        needed_by: String,
        /// The tensors present.
        found: String,
    },
    /// A tensor of an element type that is not read.
    #[error("tensor {name} holds {found}, expected {expected}; convert it before saving")]
    TensorType {
        /// The tensor.
        name: String,
        /// The types that are read.
        expected: &'static str,
        /// Its type.
        found: String,
    },
    /// A tensor whose shape does not follow from q and the metadata.
    #[error("tensor {name} has shape {found:?}, expected {expected}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// The shapes that would do.
        expected: String,
        /// Its shape.
        found: Vec<usize>,
    },
    /// An infinity or a NaN where no gradient can be checked.
    #[error(
        "tensor {name} holds {found} at {index}, expected finite values: no gradient can be \
         checked there; dump finite q and gq, and look where the program overflows"
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// The indices of the first such value.
        index: String,
        /// The value.
        found: f64,
    },
    /// A finite value that an element type cannot hold: nothing is compared in that type.
    #[error("{name} holds {found}, which is infinite in {dtype}; it is not compared in {dtype}")]
    Overflow {
        /// The tensor.
        name: String,
        /// The value.
        found: f64,
        /// The element type.
        dtype: &'static str,
    },
    /// Inputs whose rounding errors overflow f64.
    #[error(
        "tensor {name} has no finite tolerance: a value of it times the attention scaling \
         {scaling:e} overflows f64; scale it down before the run"
    )]
    Unbounded {
        /// The tensor.
        name: String,
        /// The attention scaling.
        scaling: f64,
    },
    /// The metadata does not make a rotation, or the positions are out of range.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// The engine failed.
    #[error("{engine} failed: {source}")]
    Engine {
        /// The engine's name.
        engine: String,
        /// Why.
        source: Box<EngineError>,
    },
}

/// The diagnosis of a file with the upstream gradient of q or k, and without the gradient computed
/// from it.
pub(crate) fn lost_gradient(of: &str) -> String {
    format!(
        "no gradient: the operator that wrote this file has none, or the gradient of {of} is lost \
         between {of} and {of}_out (a detach, a copy without a graph); there is g{of} and no d{of}"
    )
}

impl GoldenError {
    /// The limit of the engine or of the element type that ruled the comparison out, where it is
    /// one that is known; see [`EngineError::limit`].
    pub fn limit(&self) -> Option<String> {
        match self {
            Self::Overflow { .. } => Some(self.to_string()),
            Self::Engine { source, .. } => source.limit(),
            _ => None,
        }
    }
}

impl From<plain_files::FileError> for GoldenError {
    fn from(error: plain_files::FileError) -> Self {
        Self::Io(error.cause.into())
    }
}
