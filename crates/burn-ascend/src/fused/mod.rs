//! Operations of rope-burn and burn-attention, each by one kernel or operator, and by ordinary
//! operations beyond its limits.

mod adamw;
mod attention;
mod norm_rotary;
mod rms_norm;
mod rotary;

use std::sync::Arc;

use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use rope_ascend::AscendError;

use crate::context::Context;
use crate::error::execution;
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;

pub use attention::{AttentionRuns, attention_runs, reset_attention_runs};

/// The reason why no kernel or operator computed an operation.
#[derive(Debug)]
enum Refusal {
    /// It is beyond their limits, so ordinary operations compute it.
    Limit,
    /// The device, or the computation of an input tensor, failed.
    Failed(ExecutionError),
}

impl Refusal {
    /// The vendor's operators report unsupported devices and types before anything is queued, and
    /// installations may lack operators.
    fn operator(error: AscendError) -> Self {
        match error {
            AscendError::Call { .. } | AscendError::SymbolUnavailable { .. } => Self::Limit,
            error => Self::Failed(execution(&error)),
        }
    }
}

/// For this crate's kernels, whose limits are known before the launch.
impl From<AscendError> for Refusal {
    fn from(error: AscendError) -> Self {
        match error {
            AscendError::TileTooLarge { .. } | AscendError::KernelLimit { .. } => Self::Limit,
            error => Self::Failed(execution(&error)),
        }
    }
}

impl From<ExecutionError> for Refusal {
    fn from(error: ExecutionError) -> Self {
        Self::Failed(error)
    }
}

/// The outputs of a kernel or an operator; if it rejects the call, the inputs.
type Outcome<I, const N: usize> = Result<[AscendTensor; N], (Refusal, I)>;

/// The outputs of an operation before its computation.
struct Outputs<const N: usize> {
    device: AscendDevice,
    context: Option<Arc<Context>>,
    described: [(Shape, DType); N],
}

impl<const N: usize> Outputs<N> {
    /// On the device of `x`.
    fn new(x: &AscendTensor, described: [(Shape, DType); N]) -> Self {
        Self {
            device: x.device(),
            context: x.context().ok().cloned(),
            described,
        }
    }

    /// Returns the outputs of a kernel or an operator. Beyond its limits, they are composed. After
    /// a failure, they are tensors that carry it, and the device reports it at its next
    /// synchronisation.
    fn or_composed<I>(
        self,
        outcome: Outcome<I, N>,
        composed: impl FnOnce(I) -> [AscendTensor; N],
    ) -> [AscendTensor; N] {
        match outcome {
            Ok(outputs) => outputs,
            Err((Refusal::Limit, inputs)) => composed(inputs),
            Err((Refusal::Failed(error), _)) => {
                if let Some(context) = self.context {
                    context.failed(&error);
                }
                self.described.map(|(shape, dtype)| {
                    AscendTensor::failed(&self.device, shape, dtype, error.clone())
                })
            }
        }
    }
}
