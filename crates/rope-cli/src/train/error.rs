//! Errors of a training run.

use std::path::PathBuf;

use burn::backend::ExecutionError;
use mrope_digits::DigitsError;

use crate::device::explained;

/// A failed training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TrainError {
    /// The training failed.
    #[error("{}", told(_0))]
    Run(#[from] DigitsError),
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
    /// The report could not be written.
    #[error("{0}")]
    Output(#[source] std::io::Error),
    /// A step would need more memory than there is.
    #[error("{0}")]
    Memory(String),
    /// The device is not there.
    #[error(transparent)]
    Open(Box<dyn std::error::Error>),
}

impl From<ExecutionError> for TrainError {
    fn from(error: ExecutionError) -> Self {
        Self::Run(error.into())
    }
}

/// The message of an error; for that of a device, what it means.
fn told(error: &DigitsError) -> String {
    match error {
        DigitsError::Device(error) => format!("the device failed: {}", explained(error)),
        error => error.to_string(),
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
