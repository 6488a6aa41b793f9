//! What can go wrong in a training run.

use std::path::PathBuf;

/// A failed training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TrainError {
    /// The scans that are built into the program are damaged.
    #[error("the built-in digits cannot be read: {0}")]
    Digits(String),
    /// The rotation was refused.
    #[error(transparent)]
    Rotary(#[from] rope_burn::RotaryError),
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {reason}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        reason: String,
    },
    /// There is nothing to resume.
    #[error("no checkpoint in {}; run without --resume to start one", folder.display())]
    NoCheckpoint { folder: PathBuf },
    /// The checkpoint belongs to another run.
    #[error(
        "the checkpoint was made with --{option} {found}, not {expected}; repeat its options, or \
         choose another --out"
    )]
    OtherRun {
        option: String,
        expected: String,
        found: String,
    },
    /// The loss is no longer a number.
    #[error("the loss is {loss} at step {step}; try a smaller --learning-rate")]
    Diverged { step: usize, loss: f32 },
}

impl From<rope_burn::rope_core::RopeError> for TrainError {
    fn from(error: rope_burn::rope_core::RopeError) -> Self {
        Self::Rotary(error.into())
    }
}

impl TrainError {
    /// For `map_err`: what was being done to which file.
    pub(crate) fn file<E: std::fmt::Display>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |error| Self::File {
            action,
            path,
            reason: error.to_string(),
        }
    }
}

/// A result of this module.
pub(crate) type Result<T> = std::result::Result<T, TrainError>;
