//! RMSNorm of ordinary tensor operations: what every backend can run.

use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::least;
use burn_fused::primitive::{cast, widen};

/// As [`RmsNormOps::rms_norm_forward`](crate::RmsNormOps::rms_norm_forward).
///
/// # Panics
/// If x is no float that is computed with.
pub fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = x.dtype().into();
    let last = x.shape().num_dims() - 1;
    let weight = of_rank::<B>(widen::<B>(weight), last + 1);
    let x = widen::<B>(x);
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), last);
    let rstd = B::float_recip(B::float_sqrt(B::float_add_scalar(mean, epsilon.into())));
    let rstd = refused::<B>(rstd, epsilon);
    let out = B::float_mul(B::float_mul(x, rstd.clone()), weight);
    (cast::<B>(out, dtype), rstd)
}

/// As [`RmsNormOps::rms_norm_backward`](crate::RmsNormOps::rms_norm_backward).
///
/// With n = x rstd and h = gradient weight: dx = (h - n mean(h n)) rstd, and dweight the sum of
/// gradient n over the rows.
///
/// # Panics
/// If x is no float that is computed with.
pub fn backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    rstd: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = x.dtype().into();
    let shape = x.shape();
    let last = shape.num_dims() - 1;
    let channels = shape[last];
    let normalised = B::float_mul(widen::<B>(x), rstd.clone());
    let gradient = widen::<B>(gradient);
    let products = B::float_mul(gradient.clone(), normalised.clone());
    let rows = Shape::new([shape.num_elements() / channels, channels]);
    let dweight = B::float_sum_dim(B::float_reshape(products.clone(), rows), 0);
    let dweight = cast::<B>(B::float_reshape(dweight, Shape::new([channels])), dtype);
    let weight = of_rank::<B>(widen::<B>(weight), last + 1);
    let mean = B::float_mean_dim(B::float_mul(products, weight.clone()), last);
    let dx = B::float_sub(
        B::float_mul(gradient, weight),
        B::float_mul(normalised, mean),
    );
    (cast::<B>(B::float_mul(dx, rstd), dtype), dweight)
}

/// NaN for a row whose squares leave the type: their mean is infinite, and the row would silently be
/// 0; or without an epsilon it has lost digits or all of them.
fn refused<B: Backend>(rstd: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&rstd.device()).bool_dtype;
    let mut outside = B::float_equal_elem(rstd.clone(), 0.0.into(), bools);
    if epsilon == 0.0 {
        let most = 1.0 / least(rstd.dtype().into()).sqrt();
        let small = B::float_greater_elem(rstd.clone(), most.into(), bools);
        outside = B::bool_or(outside, small);
    }
    B::float_mask_fill(rstd, outside, f64::NAN.into())
}

/// The weight with dimensions of size 1 in front.
fn of_rank<B: Backend>(weight: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[rank - 1] = weight.shape().num_elements();
    B::float_reshape(weight, Shape::from(shape))
}
