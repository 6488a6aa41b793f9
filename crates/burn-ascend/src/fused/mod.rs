//! Operations of rope-burn and burn-attention, each by one kernel or operator, and by ordinary
//! operations beyond its limits.

mod adamw;
mod adapter;
mod attention;
mod gated_delta;
mod grouped_linear;
mod norm_rotary;
mod norms;
mod rotary;
mod routes;
mod short_convolution;
mod swiglu;

use std::sync::{Arc, OnceLock};

use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use rope_ascend::AscendError;
use rope_ascend::rope::{KernelType, LayerKernels, MemoryPart};
use rope_ascend::safe::DeviceMemory;

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

/// The kernels of layers on a device.
#[derive(Debug, Default)]
struct Kernels(OnceLock<Arc<LayerKernels>>);

fn layer_kernels(context: &Context) -> Result<Arc<LayerKernels>, Refusal> {
    let cache = context.cache::<Kernels>();
    if let Some(kernels) = cache.0.get() {
        return Ok(kernels.clone());
    }
    let kernels = LayerKernels::new(context.stream(), context.npu().kernels()?);
    Ok(cache.0.get_or_init(|| Arc::new(kernels)).clone())
}

/// The kernels' name of an element type.
fn kernel_type(dtype: DType) -> Result<KernelType, Refusal> {
    match dtype {
        DType::F32 => Ok(KernelType::F32),
        DType::F16 => Ok(KernelType::F16),
        DType::BF16 => Ok(KernelType::Bf16),
        _ => Err(Refusal::Limit),
    }
}

/// The elements of a dense tensor.
fn read(x: &AscendTensor) -> Result<MemoryPart<&DeviceMemory>, Refusal> {
    Ok(MemoryPart {
        memory: x.buffer()?,
        offset: x.offset(),
    })
}

/// The elements of a dense tensor that nothing else holds.
fn write(x: &mut AscendTensor) -> Result<MemoryPart<&mut DeviceMemory>, Refusal> {
    let offset = x.offset();
    Ok(MemoryPart {
        memory: x.buffer_mut()?,
        offset,
    })
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
