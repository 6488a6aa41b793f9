//! LayerNorm composed of ordinary tensor operations, for every backend: the centred row, normalised
//! as RMSNorm normalises it.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::primitive::{cast, widen};
use burn_fused::rms_norm::{self, with_rank};

use crate::rms_norm::composed::rstd_or_nan;

/// Computes the same as
/// [`LayerNormOps::layer_norm_forward`](crate::LayerNormOps::layer_norm_forward).
///
/// # Panics
/// If x has an unsupported element type.
pub fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: FloatTensor<B>,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (dtype, rank) = (x.dtype().into(), x.shape().num_dims());
    let [weight, bias] = [weight, bias].map(|x| with_rank::<B>(widen::<B>(x), rank));
    let x = widen::<B>(x);
    let mean = B::float_mean_dim(x.clone(), rank - 1);
    let centred = B::float_sub(x, mean.clone());
    let rstd = rstd_or_nan::<B>(centred.clone(), epsilon);
    let normalised = B::float_mul(centred, rstd.clone());
    let out = B::float_add(B::float_mul(normalised, weight), bias);
    (cast::<B>(out, dtype), mean, rstd)
}

/// Computes the same as
/// [`LayerNormOps::layer_norm_backward`](crate::LayerNormOps::layer_norm_backward).
///
/// The gradient of the centred row is that of an RMSNorm; dx is that without its mean.
///
/// # Panics
/// If x has an unsupported element type.
pub fn backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    mean: FloatTensor<B>,
    rstd: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (dtype, shape) = (x.dtype().into(), x.shape());
    let last = shape.num_dims() - 1;
    let channels = shape[last];
    let [x, weight, gradient] = [x, weight, gradient].map(widen::<B>);
    let rows = Shape::new([shape.num_elements() / channels, channels]);
    let dbias = B::float_sum_dim(B::float_reshape(gradient.clone(), rows), 0);
    let dbias = B::float_reshape(dbias, Shape::new([channels]));
    let weight = with_rank::<B>(weight, last + 1);
    let centred = B::float_sub(x, mean);
    let (dx, dweight) = rms_norm::gradients::<B>(centred, weight, rstd, gradient);
    let dx = B::float_sub(dx.clone(), B::float_mean_dim(dx, last));
    (cast::<B>(dx, dtype), dweight, dbias)
}
