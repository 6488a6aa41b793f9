//! Errors of the device as burn's errors.

use burn::backend::ExecutionError;
use rope_ascend::AscendError;

/// Converts the device's error to burn's; the message has the function and its code.
pub(crate) fn execution(error: &AscendError) -> ExecutionError {
    ExecutionError::with_context(error.to_string())
}
