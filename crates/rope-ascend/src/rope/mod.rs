//! Rotation of q and k, optionally with their RMSNorm, and its gradients, by this crate's kernels.
//!
//! [`Npu`] opens a device and finds its [`Kernels`]; a [`Rotator`] runs them for one
//! [`Geometry`](rope_core::Geometry). Tensors are [`Heads`]: device memory and a
//! [`HeadsLayout`](rope_core::HeadsLayout). No framework is involved.

mod args;
mod coefficients;
mod compile;
mod delta;
#[cfg(fuzzing)]
pub mod fuzz;
mod kernel_files;
mod kernels;
mod layer;
mod norm;
mod norm_tiling;
mod npu;
mod rotator;
mod tiling;

pub use args::{KernelType, UpdateFactors};
pub use delta::{DeltaGradient, DeltaLocal, DeltaPrepare, DeltaSizes};
pub(crate) use kernel_files::CACHE_VARIABLE;
pub use kernels::Kernels;
pub use layer::{
    Gate, GateBackward, LayerKernels, LowRankTerm, MemoryPart, OutputGradient, ShortConvolution,
    ShortConvolutionGradients, Update,
};
pub use norm::{ChannelWeights, NormBackward, NormBackwardTensor, NormRotation, NormTensor};
pub(crate) use npu::KERNELS_VARIABLE;
pub use npu::{Npu, violations};
pub use rotator::{AngleGradient, AngleRows, Heads, Operand, Rotation, Rotator, Unit};
