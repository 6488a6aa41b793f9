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

/// Why no kernel or operator computed an operation.
#[derive(Debug)]
enum Refusal {
    /// It is beyond their limits: ordinary operations compute.
    Limit,
    /// The device, or what the tensors were computed from, failed.
    Failed(ExecutionError),
}

impl Refusal {
    /// The vendor's operators say before anything is queued which devices have them in which types,
    /// and installations may lack them.
    fn operator(error: AscendError) -> Self {
        match error {
            AscendError::Call { .. } | AscendError::SymbolUnavailable { .. } => Self::Limit,
            error => Self::Failed(execution(&error)),
        }
    }
}

/// Of our kernels, whose limits are known before they are launched.
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

/// The outputs of a kernel or an operator; if it refuses, the inputs again.
type Outcome<I, const N: usize> = Result<[AscendTensor; N], (Refusal, I)>;

/// The outputs of an operation, before it is computed.
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

    /// The outputs of a kernel or an operator. Beyond its limits they are composed; of a failure
    /// they are tensors that carry it, and the device reports it at its next synchronisation.
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
