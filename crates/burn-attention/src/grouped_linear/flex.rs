//! Flex, burn's CPU backend: each thread of rayon's pool computes products of groups alone, in the
//! memory of the result. A product on all threads would wait for the slowest of them, and experts
//! have few rows.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_fused::{elements, zeros};
use rayon::prelude::*;

use super::composed;
use super::op::{GroupedLinearOp, GroupedLinearOps};
use crate::attention::flex::matrix::{Matrix, Write, product};
use crate::attention::flex::number::{Number, Real};
use crate::rows::kernel::has_instructions;

/// The most rows of a task, unless there are many groups with as many: each packs the matrix.
const TASK_ROWS: usize = 256;
/// Tasks of a thread that would keep all threads busy until the last is done.
const TASKS: usize = 6;
/// Outputs of a task that computes a gradient of a weight.
const TASK_OUTPUTS: usize = 256;

impl GroupedLinearOps for Flex {
    fn grouped_linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        match x.dtype() {
            DType::F32 if has_instructions() => wide::<f32>(&x, &weight, &op, Side::Inputs),
            DType::F64 => wide::<f64>(&x, &weight, &op, Side::Inputs),
            _ => narrow::rows(&x, &weight, &op, Side::Inputs)
                .unwrap_or_else(|| composed::forward::<Self>(x, weight, &op)),
        }
    }

    fn grouped_linear_x_gradient(
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        match gradient.dtype() {
            DType::F32 if has_instructions() => wide::<f32>(&gradient, &weight, &op, Side::Outputs),
            DType::F64 => wide::<f64>(&gradient, &weight, &op, Side::Outputs),
            _ => narrow::rows(&gradient, &weight, &op, Side::Outputs)
                .unwrap_or_else(|| composed::x_gradient::<Self>(weight, gradient, &op)),
        }
    }

    fn grouped_linear_weight_gradient(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        match x.dtype() {
            DType::F32 => wide_weight_gradient::<f32>(&x, &gradient, &op),
            DType::F64 => wide_weight_gradient::<f64>(&x, &gradient, &op),
            _ => narrow::weight_gradient(&x, &gradient, &op)
                .unwrap_or_else(|| composed::weight_gradient::<Self>(x, gradient, &op)),
        }
    }
}

/// The side of a weight `[groups, outputs, inputs]` that a product sums over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Outputs,
    Inputs,
}

impl Side {
    /// The other side.
    fn rest(self) -> Self {
        match self {
            Self::Outputs => Self::Inputs,
            Self::Inputs => Self::Outputs,
        }
    }

    fn of(self, weight: &FlexTensor) -> usize {
        let [_, outputs, inputs] = weight.shape().dims();
        match self {
            Self::Outputs => outputs,
            Self::Inputs => inputs,
        }
    }
}

/// Cuts each range of rows into equal ones of at most a size, with their part of the output.
fn tasks<'a, E>(
    op: &GroupedLinearOp,
    most: usize,
    mut out: &'a mut [E],
    columns: usize,
) -> Vec<(usize, Range<usize>, &'a mut [E])> {
    let mut tasks = Vec::new();
    for (group, rows) in op.ranges().enumerate() {
        let count = rows.len().div_ceil(most);
        for index in 0..count {
            let edge = |index: usize| rows.start + rows.len() * index / count;
            let rows = edge(index)..edge(index + 1);
            let part;
            (part, out) = out.split_at_mut(rows.len() * columns);
            tasks.push((group, rows, part));
        }
    }
    tasks
}

/// Rows times the matrix of their group, or its transposed.
fn wide<R: Real + Number>(
    x: &FlexTensor,
    weight: &FlexTensor,
    op: &GroupedLinearOp,
    over: Side,
) -> FlexTensor {
    let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
    let (inner, columns) = (over.of(&weight), over.rest().of(&weight));
    let mut out = zeros(Shape::new([x.shape()[0], columns]), x.dtype());
    let most = x.shape()[0] / (TASKS * rayon::current_num_threads());
    let tasks = tasks(op, most.max(TASK_ROWS), out.storage_mut::<R>(), columns);
    let (of_x, of_weight) = (elements::<R>(&x), elements::<R>(&weight));
    tasks.into_par_iter().for_each(|(group, rows, out)| {
        let x = &of_x[rows.start * inner..rows.end * inner];
        let weight = &of_weight[group * inner * columns..][..inner * columns];
        let strides = match over {
            Side::Inputs => [1, inner],
            Side::Outputs => [columns, 1],
        };
        if R::multiply(x, [rows.len(), inner, columns], (weight, strides), out) {
            return;
        }
        let x = Matrix::new(x, rows.len(), inner, inner);
        let weight = match over {
            Side::Inputs => Matrix::new(weight, columns, inner, inner).transposed(),
            Side::Outputs => Matrix::new(weight, inner, columns, columns),
        };
        product(out, columns, Write::Replace, R::ONE, x, weight);
    });
    out
}

/// The gradients of the groups' matrices. Those of groups without rows stay untouched zeros.
fn wide_weight_gradient<R: Real + Number>(
    x: &FlexTensor,
    gradient: &FlexTensor,
    op: &GroupedLinearOp,
) -> FlexTensor {
    let (x, gradient) = (x.to_contiguous(), gradient.to_contiguous());
    let ([_, inputs], [_, outputs]) = (x.shape().dims(), gradient.shape().dims());
    let mut out = zeros(Shape::new([op.rows.len(), outputs, inputs]), x.dtype());
    let (of_x, of_gradient) = (elements::<R>(&x), elements::<R>(&gradient));
    let groups: Vec<Range<usize>> = op.ranges().collect();
    let groups = groups
        .into_par_iter()
        .zip(out.storage_mut::<R>().par_chunks_mut(outputs * inputs));
    let groups = groups.filter(|(rows, _)| !rows.is_empty());
    groups.for_each(|(rows, out)| {
        let x = Matrix::new(&of_x[rows.start * inputs..], rows.len(), inputs, inputs);
        let parts = out.par_chunks_mut(TASK_OUTPUTS * inputs).enumerate();
        parts.for_each(|(part, out)| {
            let gradient = &of_gradient[rows.start * outputs + part * TASK_OUTPUTS..];
            let gradient = Matrix::new(gradient, rows.len(), out.len() / inputs, outputs);
            product(
                out,
                inputs,
                Write::Replace,
                R::ONE,
                gradient.transposed(),
                x,
            );
        });
    });
    out
}

/// By the processor's products of bf16.
#[cfg(target_arch = "x86_64")]
mod narrow {
    use std::borrow::Cow;

    use half::bf16;

    use super::*;
    use crate::linear::avx512::{Product, Weight, is_available};

    /// Rows of the gradient that are transposed at once.
    const TRANSPOSED: usize = 32;

    /// A product of matrices, of which the second has these strides.
    fn product<'a>(
        x: &'a [bf16],
        [rows, inputs, outputs]: [usize; 3],
        data: &'a [bf16],
        strides: [usize; 2],
    ) -> Product<'a> {
        Product {
            rows,
            inputs,
            outputs,
            rank: 0,
            x,
            weight: Weight { data, strides },
            bias: &[],
            u: &[],
            b: &[],
        }
    }

    /// As [`wide`](super::wide), or `None` for another type, processor, or an odd sum.
    pub(super) fn rows(
        x: &FlexTensor,
        weight: &FlexTensor,
        op: &GroupedLinearOp,
        over: Side,
    ) -> Option<FlexTensor> {
        let (inner, columns) = (over.of(weight), over.rest().of(weight));
        if x.dtype() != DType::BF16 || !inner.is_multiple_of(2) || !is_available() {
            return None;
        }
        let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
        let mut out = zeros(Shape::new([x.shape()[0], columns]), x.dtype());
        // A product divides its rows among threads.
        let tasks = tasks(op, usize::MAX, out.storage_mut::<bf16>(), columns);
        let strides = match over {
            Side::Inputs => [1, inner],
            Side::Outputs => [columns, 1],
        };
        let (x, weight) = (elements(&x), elements(&weight));
        tasks.into_par_iter().for_each(|(group, rows, out)| {
            let sizes = [rows.len(), inner, columns];
            let x = &x[rows.start * inner..rows.end * inner];
            let weight = &weight[group * inner * columns..];
            product(x, sizes, weight, strides).write(out);
        });
        Some(out)
    }

    /// As [`wide_weight_gradient`](super::wide_weight_gradient), or `None` for another type or
    /// processor.
    pub(super) fn weight_gradient(
        x: &FlexTensor,
        gradient: &FlexTensor,
        op: &GroupedLinearOp,
    ) -> Option<FlexTensor> {
        if x.dtype() != DType::BF16 || !is_available() {
            return None;
        }
        let (x, gradient) = (x.to_contiguous(), gradient.to_contiguous());
        let ([_, inputs], [_, outputs]) = (x.shape().dims(), gradient.shape().dims());
        let mut out = zeros(Shape::new([op.rows.len(), outputs, inputs]), x.dtype());
        let (x, gradient) = (elements(&x), elements(&gradient));
        let groups: Vec<Range<usize>> = op.ranges().collect();
        let groups = groups
            .into_par_iter()
            .zip(out.storage_mut::<bf16>().par_chunks_mut(outputs * inputs));
        let groups = groups.filter(|(rows, _)| !rows.is_empty());
        groups.for_each(|(rows, out)| {
            // The sum is over pairs of rows.
            let even = rows.len().next_multiple_of(2);
            let mut x = Cow::Borrowed(&x[rows.start * inputs..rows.end * inputs]);
            if even > rows.len() {
                x.to_mut().resize(even * inputs, bf16::ZERO);
            }
            let gradient = &gradient[rows.start * outputs..rows.end * outputs];
            let gradient = transposed(gradient, outputs, even);
            let sizes = [outputs, even, inputs];
            product(&gradient, sizes, &x, [inputs, 1]).write(out);
        });
        Some(out)
    }

    /// The transposed matrix of rows of `columns`, with zeros after the rows up to `length`.
    fn transposed(x: &[bf16], columns: usize, length: usize) -> Vec<bf16> {
        let mut out = vec![bf16::ZERO; columns * length];
        for (index, x) in x.chunks(TRANSPOSED * columns).enumerate() {
            for (column, out) in out.chunks_exact_mut(length).enumerate() {
                let values = x[column..].iter().step_by(columns);
                let places = out[index * TRANSPOSED..].iter_mut();
                places.zip(values).for_each(|(to, x)| *to = *x);
            }
        }
        out
    }
}

/// Other processors have no products of bf16 here.
#[cfg(not(target_arch = "x86_64"))]
mod narrow {
    use super::*;

    pub(super) fn rows(
        _x: &FlexTensor,
        _weight: &FlexTensor,
        _op: &GroupedLinearOp,
        _over: Side,
    ) -> Option<FlexTensor> {
        None
    }

    pub(super) fn weight_gradient(
        _x: &FlexTensor,
        _gradient: &FlexTensor,
        _op: &GroupedLinearOp,
    ) -> Option<FlexTensor> {
        None
    }
}
