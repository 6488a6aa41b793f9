//! The update composed of ordinary operations.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_fused::primitive::{cast, slice, widen};

use super::SQUARES;
use super::op::{AdamWOp, AdamWOps};

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
    let gradient = widen::<B>(gradient);
    let gradient = if by.scale == 1.0 {
        gradient
    } else {
        times(gradient, by.scale)
    };
    let change = times(
        B::float_sub(gradient.clone(), first.clone()),
        by.of_gradient,
    );
    let first = B::float_add(first, change);
    let square = times(B::float_mul(gradient.clone(), gradient), by.of_square);
    let second = B::float_add(times(second, by.kept), square);
    let root = B::float_div_scalar(B::float_sqrt(second.clone()), by.correction.into());
    let root = B::float_add_scalar(root, by.epsilon.into());
    let step = times(B::float_div(first.clone(), root), by.step);
    let value = if op.decay == 0.0 {
        value
    } else {
        times(value, by.stay)
    };
    (B::float_sub(value, step), first, second)
}

/// Computes the same as [`AdamWOps::square_sums`](crate::AdamWOps::square_sums).
pub fn square_sums<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let x = widen::<B>(x);
    let elements = x.shape().num_elements();
    let whole = elements - elements % SQUARES;
    let of_rows = |x: FloatTensor<B>, rows: usize| {
        let columns = x.shape().num_elements() / rows;
        let x = B::float_reshape(x, [rows, columns].into());
        let sums = B::float_sum_dim(B::float_mul(x.clone(), x), 1);
        B::float_reshape(sums, [rows].into())
    };
    match (whole, elements - whole) {
        (0, 0) => x,
        (0, _) => of_rows(x, 1),
        (whole, 0) => of_rows(x, whole / SQUARES),
        (whole, _) => {
            let tail = of_rows(slice::<B>(x.clone(), 0, whole..elements), 1);
            let head = of_rows(slice::<B>(x, 0, 0..whole), whole / SQUARES);
            B::float_cat(vec![head, tail], 0)
        }
    }
}

/// Computes the same as [`AdamWOps::square_sums_into`](crate::AdamWOps::square_sums_into).
pub fn square_sums_into<B: AdamWOps>(
    sums: FloatTensor<B>,
    x: FloatTensor<B>,
    start: usize,
) -> FloatTensor<B> {
    let part = cast::<B>(B::square_sums(x), sums.dtype().into());
    let range = start..start + part.shape().num_elements();
    B::float_slice_assign(sums, &[range.into()], part)
}
