//! RMSNorm as one operation.

mod backward;
pub mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use burn_fused::primitive::zeros_from;
use burn_fused::{accumulator, expect, least, rounded};

use crate::backends;
use crate::error::{AttentionError, Result, equal};

pub use op::RmsNormOps;

/// Computes x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension.
///
/// # Shapes
/// - x, out: `[.., channels]`; weight: `[channels]`, in the type of x, or in f32 beside 16-bit x
///
/// # Numerics
/// 16-bit tensors are computed in f32 and each result is rounded once; f64 is computed in f64.
///
/// A row whose squares overflow that type is NaN, not 0: in f32, elements of about 1e19 and more.
/// With an epsilon of 0, so is a row whose squares underflow: elements of about 1e-19 and less. On
/// an NPU, the vendor's kernels decide these cases.
///
/// # Memory
/// The autodiff graph keeps x, the weight and one number per row.
///
/// # Errors
/// [`Size`](AttentionError::Size), [`Op`](AttentionError::Op),
/// [`Epsilon`](AttentionError::Epsilon).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[3.0, 4.0]], &device).require_grad();
/// let y = burn_attention::rms_norm(x.clone(), Tensor::ones([2], &device), 1e-6)?;
/// // 3 / sqrt(12.5)
/// assert!((y.clone().inner().into_data().iter::<f32>().next().unwrap() - 0.8485).abs() < 1e-4);
/// assert!(x.grad(&y.sum().backward()).is_some());
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
) -> Result<Tensor<D>> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    check(
        &x,
        &[("weight", &weight)],
        weight_type(&x, &weight),
        epsilon,
    )?;
    if x.shape().num_elements() == 0 {
        let (shape, dtype) = (x.shape(), x.dtype().into());
        let zeros = zeros_from::<Dispatch>(shape, dtype, vec![x, weight]);
        return Ok(Tensor::from_dispatch(zeros));
    }
    let out = if backends::reaches(&x.device()) {
        Dispatch::rms_norm_forward(x, weight, epsilon).0
    } else {
        composed::forward::<Dispatch>(x, weight, epsilon).0
    };
    Ok(Tensor::from_dispatch(out))
}

/// The shape and type of a number for each row of x.
pub(crate) fn rows(x: &Shape, dtype: DType) -> (Shape, DType) {
    let mut shape = x.clone();
    if let Some(channels) = shape.last_mut() {
        *channels = 1;
    }
    (shape, accumulator(dtype).map_or(DType::F32, DType::from))
}

/// The type that a weight must have: that of x, or the one that x is computed in.
fn weight_type<T: TensorMetadata>(x: &T, weight: &T) -> DType {
    match accumulator(x.dtype()).map(DType::from) {
        Ok(wide) if weight.dtype() == wide => wide,
        _ => x.dtype(),
    }
}

/// Checks the inputs of a norm; the weights, by name, have a number for each channel.
pub(crate) fn check<T: TensorMetadata>(
    x: &T,
    weights: &[(&'static str, &T)],
    of_weights: DType,
    epsilon: f64,
) -> Result<()> {
    let wide = accumulator(x.dtype())?;
    let channels = x.shape().last().copied().unwrap_or(1);
    for (name, weight) in weights {
        expect(name, *weight, of_weights, x)?;
        let [weight_channels] = weight.shape().dims();
        equal(["x", name], "channels", channels, weight_channels)?;
    }
    let computed = rounded(epsilon, wide);
    if epsilon != 0.0 && !(computed.is_finite() && computed >= least(wide)) {
        return Err(AttentionError::Epsilon { found: epsilon });
    }
    Ok(())
}
