//! RMSNorm composed of ordinary tensor operations, for every backend.

use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};
use burn_fused::least;
use burn_fused::primitive::{cast, widen};
use burn_fused::rms_norm::{self, with_rank};

/// Computes the same as [`RmsNormOps::rms_norm_forward`](crate::RmsNormOps::rms_norm_forward).
///
/// # Panics
/// If x has an unsupported element type.
pub fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = x.dtype().into();
    let last = x.shape().num_dims() - 1;
    let weight = with_rank::<B>(widen::<B>(weight), last + 1);
    let x = widen::<B>(x);
    let rstd = rstd_or_nan::<B>(x.clone(), epsilon);
    let out = B::float_mul(B::float_mul(x, rstd.clone()), weight);
    (cast::<B>(out, dtype), rstd)
}

/// Computes the same as [`RmsNormOps::rms_norm_backward`](crate::RmsNormOps::rms_norm_backward).
///
/// # Panics
/// If x has an unsupported element type.
pub fn backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    rstd: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (dtype, rank) = (x.dtype().into(), x.shape().num_dims());
    let [x, weight, gradient] = [x, weight, gradient].map(widen::<B>);
    let weight = with_rank::<B>(weight, rank);
    let (dx, dweight) = rms_norm::gradients::<B>(x, weight, rstd, gradient);
    (cast::<B>(dx, dtype), dweight)
}

/// rstd, or NaN for a row whose squares leave the type: their mean is infinite, and the row would
/// silently be 0; or without an epsilon it has lost digits or all of them.
pub(crate) fn rstd_or_nan<B: Backend>(x: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    let rstd = rms_norm::rstd::<B>(x, epsilon);
    let bools = get_or_init_device_settings::<B>(&rstd.device()).bool_dtype;
    let mut outside = B::float_equal_elem(rstd.clone(), 0.0.into(), bools);
    if epsilon == 0.0 {
        let most = 1.0 / least(rstd.dtype().into()).sqrt();
        let small = B::float_greater_elem(rstd.clone(), most.into(), bools);
        outside = B::bool_or(outside, small);
    }
    B::float_mask_fill(rstd, outside, f64::NAN.into())
}
