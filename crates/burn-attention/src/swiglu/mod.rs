//! The gate of a feed-forward network as one operation.

mod backward;
pub mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod halves;
mod linear;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::Tensor;
use burn_fused::{accumulator, expect};

use crate::backends;
use crate::error::{AttentionError, Result};

pub use halves::{SwiGluHalvesOps, swiglu_halves};
pub use linear::{GatedLinearOps, gated_linear, gated_linear_source};
pub use op::SwiGluOps;

/// Computes silu(gate) * up with silu(x) = x / (1 + e^-x), the activation of a gated feed-forward
/// network (SwiGLU).
///
/// # Shapes
/// gate, up, out: the same shape and type
///
/// # Numerics
/// 16-bit tensors are computed in f32 and each result is rounded once; f64 is computed in f64.
///
/// # Memory
/// The autodiff graph keeps gate and up; with ordinary operations it also keeps the sigmoid and the
/// SiLU.
///
/// # Errors
/// [`Shapes`](AttentionError::Shapes), [`Op`](AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let gate = Tensor::<1>::from_floats([0.0, 100.0], &device).require_grad();
/// let y = burn_attention::swiglu(gate.clone(), Tensor::ones([2], &device))?;
/// assert_eq!(y.clone().inner().into_data().iter::<f32>().collect::<Vec<_>>(), [0.0, 100.0]);
/// let slopes = gate.grad(&y.sum().backward()).unwrap();
/// assert_eq!(slopes.into_data().iter::<f32>().collect::<Vec<_>>(), [0.5, 1.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Result<Tensor<D>> {
    let (gate, up) = (gate.into_dispatch(), up.into_dispatch());
    check(&gate, &up)?;
    let out = if backends::reaches(&gate.device()) {
        Dispatch::swiglu_forward(gate, up)
    } else {
        composed::forward::<Dispatch>(gate, up)
    };
    Ok(Tensor::from_dispatch(out))
}

pub(crate) fn check<T: TensorMetadata>(gate: &T, up: &T) -> Result<()> {
    accumulator(gate.dtype())?;
    expect("up", up, gate.dtype(), gate)?;
    let (left, right) = (gate.shape(), up.shape());
    if left != right {
        return Err(AttentionError::Shapes {
            left: "gate",
            right: "up",
            left_shape: left.to_vec(),
            right_shape: right.to_vec(),
        });
    }
    Ok(())
}
