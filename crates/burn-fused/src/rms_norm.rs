//! RMSNorm over the last dimension, composed of ordinary operations: x rstd weight, in the
//! computation type.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// Computes rstd = 1 / sqrt(mean(x²) + epsilon) of each row, `[.., 1]`.
pub fn rstd<B: Backend>(x: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    let last = x.shape().num_dims() - 1;
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x), last);
    B::float_recip(B::float_sqrt(B::float_add_scalar(mean, epsilon.into())))
}

/// Reshapes the weight, `[channels]`, to `rank` dimensions with leading dimensions of size 1.
pub fn with_rank<B: Backend>(weight: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[rank - 1] = weight.shape().num_elements();
    B::float_reshape(weight, Shape::from(shape))
}

/// Computes the gradients of x and of the weight, `[channels]`, from the gradient of the output.
/// The weight must be [`with_rank`] of x.
///
/// With n = x rstd and h = gradient weight: dx = (h - n mean(h n)) rstd, and dweight the sum of
/// gradient n over the rows.
pub fn gradients<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    rstd: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let shape = x.shape();
    let last = shape.num_dims() - 1;
    let channels = shape[last];
    let normalised = B::float_mul(x, rstd.clone());
    let products = B::float_mul(gradient.clone(), normalised.clone());
    let rows = Shape::new([shape.num_elements() / channels, channels]);
    let dweight = B::float_sum_dim(B::float_reshape(products.clone(), rows), 0);
    let mean = B::float_mean_dim(B::float_mul(products, weight.clone()), last);
    let dx = B::float_sub(
        B::float_mul(gradient, weight),
        B::float_mul(normalised, mean),
    );
    let dweight = B::float_reshape(dweight, Shape::new([channels]));
    (B::float_mul(dx, rstd), dweight)
}
