//! The error of all functions: action, path and cause.

use std::io;
use std::path::{Path, PathBuf};

/// A result with this crate's error.
pub type Result<T> = std::result::Result<T, FileError>;

/// A file or folder that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {cause}", path.display())]
#[non_exhaustive]
pub struct FileError {
    /// `read`, `write`, or what the caller did.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The cause, which does not name the path.
    pub cause: Cause,
}

/// The cause of a [`FileError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// A pipe, device, socket or folder.
    #[error("it is not a regular file")]
    Irregular,
    /// A file above the limit of the caller.
    #[error("it has {bytes} bytes, expected at most {limit_bytes}")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Too little memory for the contents.
    #[error("its {bytes} bytes do not fit into memory")]
    Memory {
        /// Its size.
        bytes: u64,
    },
    /// Bytes that are not UTF-8.
    #[error("it is not text: byte {offset} is not UTF-8")]
    NotText {
        /// The number of valid bytes before it.
        offset: usize,
    },
    /// An error of the system.
    #[error("{0}")]
    System(#[from] io::Error),
    /// A cause found by the caller, such as a parser's message.
    #[error("{0}")]
    Other(String),
}

impl FileError {
    /// True if there is nothing at the path.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(&self.cause, Cause::System(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// For `map_err`: the error of a caller's action on a path.
    pub fn during<E: std::fmt::Display>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |cause| Self {
            action,
            path,
            cause: Cause::Other(cause.to_string()),
        }
    }

    /// For `map_err`: the error of an action on a path.
    pub(crate) fn of<E: Into<Cause>>(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(E) -> Self + use<E> {
        let path = path.to_owned();
        move |cause| Self {
            action,
            path,
            cause: cause.into(),
        }
    }
}

impl From<Cause> for io::Error {
    fn from(cause: Cause) -> Self {
        let kind = match cause {
            Cause::System(error) => return error,
            Cause::Irregular => io::ErrorKind::InvalidInput,
            Cause::TooLarge { .. } => io::ErrorKind::FileTooLarge,
            Cause::Memory { .. } => io::ErrorKind::OutOfMemory,
            Cause::NotText { .. } | Cause::Other(_) => io::ErrorKind::InvalidData,
        };
        Self::new(kind, cause)
    }
}
