//! The crate's error type.

use std::path::PathBuf;

use burn::tensor::DType;
use burn_attention::AttentionError;
use plain_files::FileError;
use rope_burn::RotaryError;
use rope_core::RopeError;
use vlm_family::UnknownModelType;

/// The result of this crate's functions.
pub type Result<T, E = VlmError> = std::result::Result<T, E>;

/// An error in a configuration, checkpoint, adapter, prompt or labels, or of a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VlmError {
    /// The configuration's rotation or the prompt's positions are wrong.
    #[error(transparent)]
    Rope(Box<RopeError>),
    /// The rotation rejected its arguments.
    #[error(transparent)]
    Rotary(Box<RotaryError>),
    /// The attention rejected its arguments.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A file could not be read, written or removed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A part of the configuration that lacks a key or holds the wrong type.
    #[error("{part} cannot be read: {detail}; take it from the checkpoint's config.json")]
    Config {
        /// `config.json`, `text_config` or `vision_config`.
        part: &'static str,
        /// The message of the parser.
        detail: String,
    },
    /// A model of an unknown family.
    #[error(transparent)]
    UnknownFamily(#[from] UnknownModelType),
    /// A value that this crate does not support.
    #[error("{key} = {found} is not supported; expected {expected}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// The value found, as JSON.
        found: String,
        /// A description of the supported values.
        expected: &'static str,
    },
    /// Sizes that contradict each other.
    #[error("{left} = {left_value} and {right} = {right_value} do not fit: {rule}")]
    Sizes {
        /// One key.
        left: &'static str,
        /// Its value.
        left_value: usize,
        /// The other key.
        right: &'static str,
        /// Its value.
        right_value: usize,
        /// The rule violated.
        rule: &'static str,
    },
    /// Tensors that the index of a sharded checkpoint places in a shard that lacks them.
    #[error(
        "the index says that {} holds {} tensors that it lacks: {}; \
         take the index and its shards from one checkpoint",
        shard.display(), names.len(), some(names)
    )]
    NotInShard {
        /// The shard.
        shard: PathBuf,
        /// The names of the tensors.
        names: Vec<String>,
    },
    /// Two tensors of a checkpoint for one parameter.
    #[error(
        "{} in {} and {} in {} are two spellings of one tensor of the model; keep one: \
         remove the other from its file, or from the index of a sharded checkpoint",
        names[0], files[0].display(), names[1], files[1].display()
    )]
    TwoSpellings {
        /// The names of the tensors.
        names: [String; 2],
        /// The file of each.
        files: [PathBuf; 2],
    },
    /// Parameters that the checkpoint lacks.
    #[error(
        "the checkpoint lacks {} of the model's tensors: {}; \
         its config.json may be another model's, or the index of its shards incomplete",
        names.len(), some(names)
    )]
    MissingTensors {
        /// Their names, as in a checkpoint.
        names: Vec<String>,
    },
    /// Tensors of the checkpoint without a parameter in the model.
    #[error(
        "the checkpoint has {} tensors that the model does not: {}; \
         its config.json may be another model's",
        names.len(), some(names)
    )]
    UnusedTensors {
        /// Their names.
        names: Vec<String>,
    },
    /// A tensor whose shape differs from the configuration's.
    #[error("tensor {name} has shape {found:?}, the configuration gives {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// The shape according to the configuration.
        expected: Vec<usize>,
        /// The shape found.
        found: Vec<usize>,
    },
    /// A tensor whose elements cannot be read.
    #[error("tensor {name} cannot be read: {reason}")]
    TensorUnreadable {
        /// The tensor.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A device that failed during the transfer of a checkpoint.
    #[error(
        "the device failed after {moved} of the checkpoint's {total} bytes, at tensor {tensor}: \
         {reason}; the partial result is dropped, begin again"
    )]
    Transfer {
        /// The tensor in transfer.
        tensor: String,
        /// Bytes moved before.
        moved: u64,
        /// Bytes of the checkpoint.
        total: u64,
        /// The message of the device or the connection.
        reason: String,
    },
    /// A target of adapters that matches no layer.
    #[error(
        "no layer for adapters is called {target}; give the end of a name or a regular expression \
         for the whole of it (no look-around): the names of the trained parts end with {}",
        some(layers)
    )]
    NoTarget {
        /// The target.
        target: String,
        /// Ends of the names in transformers of the layers that can have adapters.
        layers: Vec<String>,
    },
    /// A name that matches no module.
    #[error(
        "no module is called {module}; give the end of a name or a regular expression for the \
         whole of it (no look-around): the model has {}",
        some(modules)
    )]
    NoModule {
        /// The name.
        module: String,
        /// The modules, by their names in transformers.
        modules: Vec<String>,
    },
    /// A layer that the decoder does not have.
    #[error("the decoder has no layer {layer}; its layers are 0 to {}", depth - 1)]
    NoLayer {
        /// The index of the layer.
        layer: usize,
        /// The number of layers.
        depth: usize,
    },
    /// A model without adapters.
    #[error("the model has no adapter to save; place one first")]
    NoAdapter,
    /// Tensors of an adapter that do not fit the model.
    #[error("{} tensors of {} {reason}: {}", names.len(), path.display(), some(names))]
    AdapterKeys {
        /// The file.
        path: PathBuf,
        /// Their names.
        names: Vec<String>,
        /// The cause.
        reason: &'static str,
    },
    /// An adapter trained with a different checkpoint.
    #[error(
        "the adapter in {} was trained beside a checkpoint with the fingerprint {found}, this one \
         has {expected}: take the checkpoint that it belongs to",
        folder.display()
    )]
    OtherBase {
        /// Its folder.
        folder: PathBuf,
        /// The fingerprint of the checkpoint.
        expected: String,
        /// The fingerprint recorded in the adapter.
        found: String,
    },
    /// A sum of weight and adapters that overflows its type, or an adapter with infinite elements.
    #[error(
        "{name} with the adapters has an element that is infinite or NaN in {dtype:?}; an adapter \
         diverged, or its weight is too large"
    )]
    NotFinite {
        /// The weight, or `logits`.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// A merged model with logits that differ from the base with its adapters.
    #[error(
        "the merged model gives other logits than the base with its adapters, one by {difference} \
         where {allowed} is allowed; the output is dropped"
    )]
    MergeDiffers {
        /// The largest difference.
        difference: f64,
        /// The largest difference explained by rounding.
        allowed: f64,
    },
    /// Logits that are infinite or NaN.
    #[error(
        "the logits of row {row} are infinite or NaN after {step} new tokens; look at the weights, \
         or compute in f32"
    )]
    Logits {
        /// The row of the batch.
        row: usize,
        /// The number of tokens generated before.
        step: usize,
    },
    /// A prompt without tokens.
    #[error("the prompt has no tokens")]
    NoTokens,
    /// A token beyond the vocabulary.
    #[error("token {token} is {found}, the vocabulary has 0 to {}", vocab_size - 1)]
    Token {
        /// Index of the token.
        token: usize,
        /// The id found.
        found: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Frames that do not divide into patches.
    #[error(
        "frames {found:?} (frames, colours, height, width) do not divide; \
         expected {colours} colours, height and width multiples of {side}: resize first"
    )]
    Frames {
        /// Shape of the frames.
        found: [usize; 4],
        /// Colours expected.
        colours: usize,
        /// Pixels along each side of a square of merged patches.
        side: usize,
    },
    /// Patches that do not match the grids.
    #[error("{kind} patches have shape {found:?}, the grids {grids:?} take {expected:?}")]
    Patches {
        /// `image` or `video`.
        kind: &'static str,
        /// The grids, T, H and W in patches.
        grids: Vec<[usize; 3]>,
        /// Patches and channels expected.
        expected: [usize; 2],
        /// Patches and channels found.
        found: [usize; 2],
    },
    /// Numbers of pictures or videos that do not fit the grids.
    #[error("the numbers of the {kind}s that the grids show are wrong: {reason}")]
    Shown {
        /// `image` or `video`.
        kind: &'static str,
        /// The rule violated.
        reason: &'static str,
    },
    /// A number of placeholders different from the number of merged patches.
    #[error(
        "the prompt has {found} {kind} placeholder tokens, the grids {grids:?} make {expected}; \
         do the token types call text vision?"
    )]
    Placeholders {
        /// `image` or `video`.
        kind: &'static str,
        /// The grids, T, H and W in patches.
        grids: Vec<[usize; 3]>,
        /// Merged patches.
        expected: usize,
        /// Placeholders found.
        found: usize,
    },
    /// A number of labels different from the number of tokens.
    #[error("{found} labels for {expected} tokens; give one per token, -100 where none counts")]
    LabelCount {
        /// Tokens of the batch.
        expected: usize,
        /// Labels found.
        found: usize,
    },
    /// A number of seeds different from the number of sequences.
    #[error("{found} seeds of dropout for {expected} sequences; give one for each")]
    SeedCount {
        /// Sequences of the batch.
        expected: usize,
        /// Seeds found.
        found: usize,
    },
    /// A step without labels.
    #[error("no token has a label to predict: all are -100, padding, or first in their sequence")]
    NoTargets,
    /// A pass that its [`Walk`](crate::Walk) ended.
    #[error("{0}")]
    Walk(String),
    /// A prompt that cannot be continued.
    #[error("{reason}; generation continues the rows of a batch, each with at least one token")]
    NotContinuable {
        /// The reason.
        reason: &'static str,
    },
}

impl From<RopeError> for VlmError {
    fn from(error: RopeError) -> Self {
        Self::Rope(Box::new(error))
    }
}

impl From<RotaryError> for VlmError {
    fn from(error: RotaryError) -> Self {
        match error {
            RotaryError::Rope(error) => error.into(),
            error => Self::Rotary(Box::new(error)),
        }
    }
}

impl VlmError {
    /// For `map_err`: the action and the file that failed.
    pub(crate) fn file<E: std::fmt::Display>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let failed = FileError::during(action, path);
        move |error| Self::File(failed(error))
    }
}

/// The first names of a list, for a message.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        format!("{shown}, ...")
    } else {
        shown
    }
}
