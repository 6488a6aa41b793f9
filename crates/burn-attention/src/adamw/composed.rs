//! The update composed of ordinary operations.

use burn::backend::{Backend, tensor::FloatTensor};

use super::op::AdamWOp;

/// Computes the same as [`AdamWOps::adamw`](crate::AdamWOps::adamw).
pub fn update<B: Backend>(
    value: FloatTensor<B>,
    gradient: FloatTensor<B>,
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    op: AdamWOp,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let by = op.factors();
    let times = |x, factor: f64| B::float_mul_scalar(x, factor.into());
    let change = times(B::float_sub(gradient.clone(), first.clone()), by.first);
    let first = B::float_add(first, change);
    let square = times(B::float_mul(gradient.clone(), gradient), by.second);
    let second = B::float_add(times(second, by.kept), square);
    let root = B::float_div_scalar(B::float_sqrt(second.clone()), by.correction.into());
    let root = B::float_add_scalar(root, by.epsilon.into());
    let step = times(B::float_div(first.clone(), root), by.step_size);
    let value = if op.decay == 0.0 {
        value
    } else {
        times(value, by.stay)
    };
    (B::float_sub(value, step), first, second)
}
