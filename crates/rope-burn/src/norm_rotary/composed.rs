//! The norm composed of ordinary tensor operations, around a rotation, for every backend.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_fused::{primitive::cast, rms_norm};
use rope_core::{Direction, NormOrder};

use super::NormRotaryOp;
use crate::rotary::RotaryOp;

/// A function that rotates one tensor by angles.
pub type Rotate<B> = fn(FloatTensor<B>, FloatTensor<B>, RotaryOp) -> FloatTensor<B>;

/// Computes the same as [`NormRotaryOps::norm_rotary`](super::NormRotaryOps::norm_rotary), in the
/// type of the angles, rounded once.
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
            let normalised = normalise::<B>(x, weight, &op);
            rotate(normalised, angles, rotary)
        }
        NormOrder::AfterRotation => normalise::<B>(rotate(x, angles, rotary), weight, &op),
    };
    cast::<B>(y, dtype)
}

/// Computes the same as
/// [`NormRotaryOps::norm_rotary_backward`](super::NormRotaryOps::norm_rotary_backward).
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
    // The norm's input, and the gradient of its weighted output.
    let (x, g) = if before {
        (x, rotate(dy, angles.clone(), adjoint))
    } else {
        let forward = op.rotary(Direction::Forward);
        (rotate(x, angles.clone(), forward), dy)
    };
    let rstd = rms_norm::rstd::<B>(x.clone(), op.norm.eps());
    let weight = scale::<B>(weight, &op, rank);
    let (dx, dweight) = rms_norm::gradients::<B>(x, weight, rstd, g);
    let dx = if before {
        dx
    } else {
        rotate(dx, angles, adjoint)
    };
    (cast::<B>(dx, dtype), dweight)
}

fn normalise<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    op: &NormRotaryOp,
) -> FloatTensor<B> {
    let rstd = rms_norm::rstd::<B>(x.clone(), op.norm.eps());
    B::float_mul(B::float_mul(x, rstd), weight)
}

/// The factors of channels, of the rank of x.
fn scale<B: Backend>(weight: FloatTensor<B>, op: &NormRotaryOp, rank: usize) -> FloatTensor<B> {
    let weight = rms_norm::with_rank::<B>(weight, rank);
    if op.norm.unit_offset() {
        B::float_add_scalar(weight, 1.0.into())
    } else {
        weight
    }
}
