//! The groups' linear layers composed of ordinary tensor operations, for every backend: a product of
//! each group that has rows.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use burn_fused::primitive::slice;

use super::op::GroupedLinearOp;
use crate::rows;

impl GroupedLinearOp {
    /// The range of rows of each group.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.rows.iter().scan(0, |end, rows| {
            let start = *end;
            *end += rows;
            Some(start..*end)
        })
    }
}

/// The matrix of a group.
pub(super) fn matrix<B: Backend>(weight: &FloatTensor<B>, group: usize) -> FloatTensor<B> {
    let [_, outputs, inputs] = weight.shape().dims();
    let matrix = slice::<B>(weight.clone(), 0, group..group + 1);
    B::float_reshape(matrix, Shape::new([outputs, inputs]))
}

/// Concatenates what `of` computes for the groups that have rows.
fn by_group<B: Backend>(
    op: &GroupedLinearOp,
    of: impl Fn(usize, Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let groups = op.ranges().enumerate();
    let groups = groups.filter(|(_, rows)| !rows.is_empty());
    let mut parts: Vec<FloatTensor<B>> = groups.map(|(group, rows)| of(group, rows)).collect();
    match parts.len() {
        1 => parts.remove(0),
        _ => B::float_cat(parts, 0),
    }
}

/// Computes the same as
/// [`grouped_linear_forward`](crate::GroupedLinearOps::grouped_linear_forward).
///
/// # Panics
/// If the groups have no rows, or shapes or types disagree.
pub fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    op: &GroupedLinearOp,
) -> FloatTensor<B> {
    by_group::<B>(op, |group, range| {
        let matrix = B::float_transpose(matrix::<B>(&weight, group));
        rows::product::<B>(slice::<B>(x.clone(), 0, range), matrix)
    })
}

/// Computes the same as
/// [`grouped_linear_x_gradient`](crate::GroupedLinearOps::grouped_linear_x_gradient).
///
/// # Panics
/// As [`forward`].
pub fn x_gradient<B: Backend>(
    weight: FloatTensor<B>,
    gradient: FloatTensor<B>,
    op: &GroupedLinearOp,
) -> FloatTensor<B> {
    by_group::<B>(op, |group, rows| {
        let gradient = slice::<B>(gradient.clone(), 0, rows);
        B::float_matmul(gradient, matrix::<B>(&weight, group))
    })
}

/// Computes the same as
/// [`grouped_linear_weight_gradient`](crate::GroupedLinearOps::grouped_linear_weight_gradient).
///
/// # Panics
/// As [`forward`].
pub fn weight_gradient<B: Backend>(
    x: FloatTensor<B>,
    gradient: FloatTensor<B>,
    op: &GroupedLinearOp,
) -> FloatTensor<B> {
    let [_, inputs] = x.shape().dims();
    let [_, outputs] = gradient.shape().dims();
    let groups = op.ranges().map(|rows| {
        let shape = |groups| Shape::new([groups, outputs, inputs]);
        if rows.is_empty() {
            return B::float_zeros(shape(1), &x.device(), x.dtype().into());
        }
        let [x, gradient] = [&x, &gradient].map(|all| slice::<B>(all.clone(), 0, rows.clone()));
        let product = B::float_matmul(B::float_transpose(gradient), x);
        B::float_reshape(product, shape(1))
    });
    B::float_cat(groups.collect(), 0)
}
