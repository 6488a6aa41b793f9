//! The crate's error type.

use std::path::PathBuf;

use plain_files::FileError;
use vlm_data::VlmDataError;
use vlm_models::VlmError;

/// The result of this crate's functions.
pub type Result<T, E = VlmTrainError> = std::result::Result<T, E>;

/// The reason why a run does not start, or stops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VlmTrainError {
    /// An error of the model, its files or its device.
    #[error(transparent)]
    Model(#[from] VlmError),
    /// An error in the data.
    #[error("no batch for step {step}: {source}")]
    Data {
        /// The step, from 1.
        step: usize,
        /// The error.
        source: VlmDataError,
    },
    /// A data file or a record that cannot be read.
    #[error(transparent)]
    Records(#[from] VlmDataError),
    /// Options of a run that contradict each other, the model or the data.
    #[error("{0}")]
    Options(String),
    /// Data that end before the last step.
    #[error("the data end after {step} of {steps} steps; raise the number of epochs")]
    NoData {
        /// Steps completed.
        step: usize,
        /// Steps of the run.
        steps: usize,
    },
    /// A file or folder that could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The failure of a rank in this or another process.
    #[error(
        "rank {rank} stopped the run: {cause}; continue from the last checkpoint, if there is one"
    )]
    Rank {
        /// The rank, from 0.
        rank: usize,
        /// Its error.
        cause: String,
    },
    /// Ranks of different runs.
    #[error("rank {rank} is of another run: {option} is {found}, and {expected} on rank 0")]
    OtherRank {
        /// The rank, from 0.
        rank: usize,
        /// The option that differs.
        option: String,
        /// Its value on rank 0.
        expected: String,
        /// Its value on the other rank.
        found: String,
    },
    /// A number of the recipe that is out of range.
    #[error("`{key}` is {found}; expected {expected}")]
    Recipe {
        /// Its path in [`Recipe`](crate::Recipe).
        key: &'static str,
        /// As found.
        found: String,
        /// A description of the allowed values.
        expected: &'static str,
    },
    /// A recipe that trains no parameter.
    #[error("nothing is trained: choose at least one of tower, merger and decoder")]
    NothingTrained,
    /// A batch in which no token has a label.
    #[error(
        "no token of the batch of step {step} has a label, in its samples at line {lines}; \
         leave such samples out"
    )]
    NoLabels {
        /// The step, from 1.
        step: usize,
        /// The lines of its samples.
        lines: String,
    },
    /// A loss or gradient norm that is infinite or NaN.
    #[error(
        "the {quantity} is {value} in step {step}, over the samples at line {lines} ({place}); the \
         model keeps the weights of the step before: look at these samples, or lower the learning \
         rate"
    )]
    Diverged {
        /// `loss` or `gradient norm`.
        quantity: &'static str,
        /// As found.
        value: f64,
        /// The step, from 1.
        step: usize,
        /// The lines of the samples.
        lines: String,
        /// The first activation that is infinite or NaN, if any.
        place: String,
    },
    /// A command that gives no rewards.
    #[error("the reward command `{command}` {reason}")]
    Reward {
        /// The command.
        command: String,
        /// What happened, and what to do.
        reason: String,
    },
    /// A gradient that could not be read from the device.
    #[error(
        "the device failed in step {step}: {reason}; continue from the last checkpoint, if there \
         is one"
    )]
    Device {
        /// The step, from 1.
        step: usize,
        /// Its message.
        reason: String,
    },
    /// A file that is not a record of a step.
    #[error(
        "{} is not a record of a step: {reason}; `mrope finetune --record-step` writes one",
        path.display()
    )]
    NoRecord {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// A folder with an earlier run, which the new run would replace.
    #[error(
        "{} is of an earlier run; continue it (`mrope finetune --resume`), or choose another \
         folder",
        path.display()
    )]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// A folder that another run writes.
    #[error(
        "{} is written by another run ({holder}); wait for its end, or choose another folder",
        folder.display()
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
        /// The process and its host.
        holder: String,
    },
    /// A folder without a checkpoint.
    #[error(
        "{} has no complete checkpoint to continue from; start a new run there (`mrope finetune` \
         without --resume)",
        folder.display()
    )]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
    },
    /// A checkpoint of a different run.
    #[error(
        "the checkpoint is of another run: {option} was {found} and is {expected} now; \
         restore it to continue, or choose another folder"
    )]
    OtherRun {
        /// The option that differs.
        option: String,
        /// Its value in this run.
        expected: String,
        /// Its value in the checkpoint.
        found: String,
    },
    /// A run continued with another number of steps, on which rates of completed steps depend.
    #[error(
        "the checkpoint's run had {found} steps and this one has {expected}, but the rates of the \
         {done} steps it took depend on that number; restore it, or choose a schedule whose past \
         does not depend on its end (constant or wsd, with a warm-up given in steps)"
    )]
    OtherRates {
        /// Steps of this run.
        expected: usize,
        /// Steps of the checkpoint's.
        found: usize,
        /// Steps completed.
        done: usize,
    },
    /// A checkpoint with damaged bytes.
    #[error("{} is damaged: {reason}; remove it to continue from the one before", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// A saved adapter that does not change the model's logits.
    #[error(
        "the adapter in {} changes none of {logits} logits; it has not been trained: \
         take more steps, or raise the learning rate", path.display()
    )]
    NoEffect {
        /// Its folder.
        path: PathBuf,
        /// The logits compared.
        logits: usize,
    },
    /// A saved adapter that differs from the trained one.
    #[error(
        "the adapter in {} gives other logits than the trained model, one by {difference}; \
         its files differ from the saved tensors: save it again", path.display()
    )]
    OtherAdapter {
        /// Its folder.
        path: PathBuf,
        /// The first difference above the limit.
        difference: f64,
    },
}

impl VlmTrainError {
    /// For `map_err`: the action and the file that failed.
    pub(crate) fn file<E: std::fmt::Display>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let failed = FileError::during(action, path);
        move |error| Self::File(failed(error))
    }
}
