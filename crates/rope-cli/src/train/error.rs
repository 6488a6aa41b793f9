//! Errors of a training run.

use std::path::PathBuf;

use burn::backend::ExecutionError;

use crate::device::explained;

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
    /// The run would overwrite what another program has written.
    #[error(
        "{} exists, and no run of mrope train wrote it; choose another --out, or move it away",
        path.display()
    )]
    NotOurs { path: PathBuf },
    /// There is nothing to resume.
    #[error("no checkpoint in {}; run without --resume to start one", folder.display())]
    NoCheckpoint { folder: PathBuf },
    /// The checkpoint belongs to another run.
    #[error(
        "the checkpoint is of a run with --{option} {found}, not {expected}: a run that continues \
         needs the options it started with (its learning rate falls until the last of its --steps); \
         repeat them, or choose another --out"
    )]
    OtherRun {
        option: String,
        expected: String,
        found: String,
    },
    /// The report could not be written.
    #[error("{0}")]
    Output(#[source] std::io::Error),
    /// A step would need more memory than there is.
    #[error("{0}")]
    Memory(String),
    /// The device is not there.
    #[error(transparent)]
    Open(Box<dyn std::error::Error>),
    /// The device failed.
    #[error(
        "the device failed: {}; --resume continues from the last checkpoint, if there is one",
        explained(_0)
    )]
    Device(#[from] ExecutionError),
    /// The device returned values of another number than expected.
    #[error("the device returned {found} values, expected {expected}")]
    Read { expected: usize, found: usize },
    /// The loss is no longer finite.
    #[error("the loss is {loss} in step {step}; try a smaller --learning-rate")]
    Diverged { step: usize, loss: f32 },
}

impl From<rope_core::RopeError> for TrainError {
    fn from(error: rope_core::RopeError) -> Self {
        Self::Rotary(error.into())
    }
}

impl From<plain_files::FileError> for TrainError {
    fn from(error: plain_files::FileError) -> Self {
        Self::File {
            action: error.action,
            path: error.path,
            reason: error.cause.to_string(),
        }
    }
}

impl TrainError {
    /// For `map_err`: the failed action and its file.
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
