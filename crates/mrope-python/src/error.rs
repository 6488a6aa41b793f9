//! Errors, and the Python exceptions that they become.

use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use rope_ascend::AscendError;
use rope_core::RopeError;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a call from Python.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Rope(#[from] RopeError),
    #[error(transparent)]
    Ascend(#[from] AscendError),
    /// A value in it that does not fit says so itself.
    #[error("{kind}{0}", kind = if .0.is_data() { "" } else { "not JSON: " })]
    Json(#[from] serde_json::Error),
    #[error("layout must be one of bsnd, bnsd, sbnd and tnd, found {found:?}")]
    Layout { found: String },
    #[error("{what}: found elements of type {found}, expected {expected}")]
    Dtype {
        what: &'static str,
        found: String,
        expected: &'static str,
    },
    #[error("{what}: expected a contiguous tensor, found strides {strides:?} for shape {shape:?}")]
    NotContiguous {
        what: &'static str,
        shape: Vec<usize>,
        strides: Vec<usize>,
    },
    #[error("{what}: found shape {shape:?}, expected {expected}")]
    Shape {
        what: &'static str,
        shape: Vec<usize>,
        expected: &'static str,
    },
    #[error(
        "{what}: found an address that is not a multiple of its elements' {bytes} bytes; clone it"
    )]
    Misaligned { what: &'static str, bytes: usize },
    #[error("{0}: found a tensor without memory (meta or fake), expected values")]
    NoMemory(&'static str),
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Dtype { .. } => PyTypeError::new_err(message),
            Error::Ascend(AscendError::Rope(_) | AscendError::InvalidArgument { .. }) => {
                PyValueError::new_err(message)
            }
            Error::Ascend(_) => PyRuntimeError::new_err(message),
            _ => PyValueError::new_err(message),
        }
    }
}
