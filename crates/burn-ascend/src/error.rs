//! Errors of the device as burn's errors.

use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use rope_ascend::AscendError;

use crate::tensor::AscendTensor;

/// The device's error as burn carries it: the message has the function and its code.
pub(crate) fn execution(error: &AscendError) -> ExecutionError {
    ExecutionError::with_context(error.to_string())
}

/// Why the vendor's operator for a whole operation did not run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It is beyond its limits, or the installation lacks it: ordinary operations compute.
    Limit,
    /// The device, or what the tensors were computed from, failed.
    Failed(ExecutionError),
}

impl From<AscendError> for Refusal {
    fn from(error: AscendError) -> Self {
        match error {
            // Which devices have the operators in which types is theirs to say, before anything is
            // queued.
            AscendError::Call { .. } | AscendError::SymbolUnavailable { .. } => Self::Limit,
            error => Self::Failed(execution(&error)),
        }
    }
}

impl From<ExecutionError> for Refusal {
    fn from(error: ExecutionError) -> Self {
        Self::Failed(error)
    }
}

/// Stands for a result that was not computed; the device reports the failure at its next
/// synchronisation.
pub(crate) fn failed(
    x: &AscendTensor,
    shape: Shape,
    dtype: DType,
    error: &ExecutionError,
) -> AscendTensor {
    if let Ok(context) = x.context() {
        context.failed(error);
    }
    AscendTensor::failed(&x.device(), shape, dtype, error.clone())
}
