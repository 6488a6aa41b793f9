//! LayerNorm as one operation.

mod backward;
pub mod composed;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::Tensor;
use burn_fused::primitive::zeros_from;

use crate::backends;
use crate::error::Result;
use crate::rms_norm::check;

pub use op::LayerNormOps;

/// Computes (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, over the last dimension.
///
/// # Shapes
/// - x, out: `[.., channels]`; weight, bias: `[channels]`, in the type of x
///
/// # Numerics
/// 16-bit tensors are computed in f32 and each result is rounded once; f64 is computed in f64. A
/// row whose centred squares leave that type is NaN, as of [`rms_norm`](crate::rms_norm()).
///
/// # Memory
/// The autodiff graph keeps x, the weight and two numbers per row.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`Op`](crate::AttentionError::Op),
/// [`Epsilon`](crate::AttentionError::Epsilon).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[1.0, 3.0]], &device).require_grad();
/// let (weight, bias) = (Tensor::ones([2], &device), Tensor::zeros([2], &device));
/// let y = burn_attention::layer_norm(x, weight, bias, 3.0)?;
/// // (1 - 2) / sqrt(1 + 3)
/// assert_eq!(y.inner().into_data().iter::<f32>().next(), Some(-0.5));
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
) -> Result<Tensor<D>> {
    let (x, weight, bias) = (
        x.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
    );
    check(
        &x,
        &[("weight", &weight), ("bias", &bias)],
        x.dtype(),
        epsilon,
    )?;
    let out = if x.shape().num_elements() == 0 {
        let (shape, dtype) = (x.shape(), x.dtype().into());
        zeros_from::<Dispatch>(shape, dtype, vec![x, weight, bias])
    } else if backends::reaches(&x.device()) {
        Dispatch::layer_norm_forward(x, weight, bias, epsilon).0
    } else {
        composed::forward::<Dispatch>(x, weight, bias, epsilon).0
    };
    Ok(Tensor::from_dispatch(out))
}
