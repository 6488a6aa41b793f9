//! Errors of the example.

use burn::backend::ExecutionError;

/// An error of the example.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigitsError {
    /// The built-in scans are damaged.
    #[error("the built-in digits cannot be read: {0}")]
    Digits(String),
    /// The rotation was refused.
    #[error(transparent)]
    Rotary(#[from] rope_burn::RotaryError),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(#[from] ExecutionError),
    /// The device returned values of another number than expected.
    #[error("the device returned {found} values, expected {expected}")]
    Read {
        /// The number expected.
        expected: usize,
        /// The number found.
        found: usize,
    },
    /// The loss is no longer finite.
    #[error("the loss is {loss} in step {step}; try a smaller learning rate")]
    Diverged {
        /// The step, from 1.
        step: usize,
        /// The loss.
        loss: f32,
    },
}

impl From<rope_core::RopeError> for DigitsError {
    fn from(error: rope_core::RopeError) -> Self {
        Self::Rotary(error.into())
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, DigitsError>;
