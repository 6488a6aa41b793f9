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
    Rope(#[from] rope_core::RopeError),
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

/// A result of this module.
pub(crate) type Result<T> = std::result::Result<T, TrainError>;
