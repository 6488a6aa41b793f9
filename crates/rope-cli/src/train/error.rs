//! Errors of a training run.

use std::path::PathBuf;

use burn::backend::ExecutionError;
use mrope_digits::DigitsError;
use plain_files::FileError;

use crate::device::explained;

/// A failed training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TrainError {
    /// The training failed.
    #[error("{}", told(_0))]
    Run(#[from] DigitsError),
    /// A file or folder could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
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

impl TrainError {
    /// For `map_err`: the failed action and its file.
    pub(crate) fn file<E: std::fmt::Display>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let failed = FileError::during(action, path);
        move |error| Self::File(failed(error))
    }
}

/// A result of this module.
pub(crate) type Result<T> = std::result::Result<T, TrainError>;
