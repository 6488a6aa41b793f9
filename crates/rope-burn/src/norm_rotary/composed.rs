//! The norm from ordinary tensor operations, around a rotation: what every backend can run.

use burn::backend::{Backend, Scalar, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::primitive::cast;
use rope_core::{Direction, NormOrder};

use super::NormRotaryOp;
use crate::rotary::RotaryOp;

/// What rotates one tensor by angles.
pub type Rotate<B> = fn(FloatTensor<B>, FloatTensor<B>, RotaryOp) -> FloatTensor<B>;

/// As [`NormRotaryOps::norm_rotary`](super::NormRotaryOps::norm_rotary): computed in the type of
/// the angles, and rounded once.
pub fn norm_rotate<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    angles: FloatTensor<B>,
    op: NormRotaryOp,
    rotate: Rotate<B>,
) -> FloatTensor<B> {
    let (dtype, wide) = (x.dtype().into(), angles.dtype().into());
    let x = cast::<B>(x, wide);
    let rotary = op.rotary(Direction::Forward);
    let weight = scale::<B>(weight, &op, x.shape().num_dims());
    let y = match op.norm.order() {
        NormOrder::BeforeRotation => {
            let normalised = B::float_mul(normalise::<B>(x, &op).0, weight);
            rotate(normalised, angles, rotary)
        }
        NormOrder::AfterRotation => {
            let rotated = rotate(x, angles, rotary);
            B::float_mul(normalise::<B>(rotated, &op).0, weight)
        }
    };
    cast::<B>(y, dtype)
}

/// As [`NormRotaryOps::norm_rotary_backward`](super::NormRotaryOps::norm_rotary_backward).
pub fn norm_rotate_backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    angles: FloatTensor<B>,
    gradient: FloatTensor<B>,
    op: NormRotaryOp,
    rotate: Rotate<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (dtype, wide) = (x.dtype().into(), angles.dtype().into());
    let rank = x.shape().num_dims();
    let x = cast::<B>(x, wide);
    let dy = cast::<B>(gradient, wide);
    let adjoint = op.rotary(Direction::Adjoint);
    let before = op.norm.order() == NormOrder::BeforeRotation;
    // What is normalised, and the gradient of the normalised times the weight.
    let (x, g) = if before {
        (x, rotate(dy, angles.clone(), adjoint))
    } else {
        let forward = op.rotary(Direction::Forward);
        (rotate(x, angles.clone(), forward), dy)
    };
    let (n, root) = normalise::<B>(x, &op);
    let products = B::float_mul(g.clone(), n.clone());
    let weight_gradient = (0..rank - 1).fold(products, B::float_sum_dim);
    let weight_gradient = B::float_reshape(weight_gradient, Shape::from([op.geometry.head_dim()]));
    let h = B::float_mul(g, scale::<B>(weight, &op, rank));
    let mean = B::float_mean_dim(B::float_mul(h.clone(), n.clone()), rank - 1);
    let dx = B::float_div(B::float_sub(h, B::float_mul(n, mean)), root);
    let dx = if before {
        dx
    } else {
        rotate(dx, angles, adjoint)
    };
    (cast::<B>(dx, dtype), weight_gradient)
}

/// n = x / root with root = sqrt(mean(x^2) + eps), and the root.
fn normalise<B: Backend>(x: FloatTensor<B>, op: &NormRotaryOp) -> (FloatTensor<B>, FloatTensor<B>) {
    let last = x.shape().num_dims() - 1;
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), last);
    let eps = Scalar::from(op.norm.eps());
    let root = B::float_sqrt(B::float_add_scalar(mean, eps));
    (B::float_div(x, root.clone()), root)
}

/// What channels are multiplied by, of the rank of x.
fn scale<B: Backend>(weight: FloatTensor<B>, op: &NormRotaryOp, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[rank - 1] = op.geometry.head_dim();
    let weight = B::float_reshape(weight, Shape::from(shape));
    if op.norm.unit_offset() {
        B::float_add_scalar(weight, Scalar::from(1.0))
    } else {
        weight
    }
}
