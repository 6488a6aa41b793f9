//! Operators over axes.

use burn::backend::{BoolDType, DType, Shape, Slice, TensorMetadata};
use rope_ascend::Result;
use rope_ascend::aclnn::{Operators, View};

use super::elementwise::{binary, cast, plus};
use super::launch::{Out, compute, data_type};
use super::movement::{cat, unless};
use super::views;
use crate::tensor::AscendTensor;

/// An operator over axes: the operators, the tensor, the axes, true to keep them, and the result.
pub(crate) type Reduce = fn(&Operators, View<'_>, &[i64], bool, View<'_>) -> Result<()>;
/// An operator along one axis that gives indices.
pub(crate) type IndexAlong = fn(&Operators, View<'_>, i64, bool, View<'_>) -> Result<()>;

/// Sum in the tensor's type.
pub(crate) fn sum(
    ops: &Operators,
    x: View<'_>,
    dims: &[i64],
    keep: bool,
    out: View<'_>,
) -> Result<()> {
    ops.reduce_sum(x, dims, keep, out.dtype, out)
}

/// Mean in the tensor's type.
pub(crate) fn mean(
    ops: &Operators,
    x: View<'_>,
    dims: &[i64],
    keep: bool,
    out: View<'_>,
) -> Result<()> {
    ops.mean(x, dims, keep, out.dtype, out)
}

/// The whole tensor to one element, shape `[1]`.
pub(crate) fn whole(operator: Reduce, x: &AscendTensor, dtype: DType) -> AscendTensor {
    let out = Out::New(Shape::from([1]), dtype);
    compute([x], out, |ops, [x], out| {
        let out = View {
            dims: &[],
            strides: &[],
            ..out
        };
        operator(ops, x, &[], false, out)
    })
}

/// Some axes, which become 1 long.
pub(crate) fn along(
    operator: Reduce,
    x: &AscendTensor,
    axes: &[usize],
    dtype: DType,
) -> AscendTensor {
    let list: Vec<i64> = axes.iter().map(|&axis| axis as i64).collect();
    compute([x], Out::New(kept(x, axes), dtype), |ops, [x], out| {
        operator(ops, x, &list, true, out)
    })
}

/// The index of an element along an axis, which becomes 1 long.
pub(crate) fn index_along(
    operator: IndexAlong,
    x: &AscendTensor,
    axis: usize,
    dtype: DType,
) -> AscendTensor {
    compute([x], Out::New(kept(x, &[axis]), dtype), |ops, [x], out| {
        operator(ops, x, axis as i64, true, out)
    })
}

/// An operator that computes the extreme along an axis and its index.
pub(crate) type Extreme = fn(&Operators, View<'_>, i64, bool, View<'_>, View<'_>) -> Result<()>;

/// The extreme along an axis and its index.
pub(crate) fn extreme(
    operator: Extreme,
    x: &AscendTensor,
    axis: usize,
    dtype: DType,
) -> (AscendTensor, AscendTensor) {
    let shape = kept(x, &[axis]);
    let values = AscendTensor::empty(&x.device(), shape.clone(), x.dtype());
    let indices = compute(
        [x, &values],
        Out::New(shape, dtype),
        |ops, [x, values], out| operator(ops, x, axis as i64, true, values, out),
    );
    (unless(indices.failure().cloned(), values), indices)
}

/// As [`extreme`], for integers: 32-bit ones are computed in 64 bits, which the operators support.
pub(crate) fn integer_extreme(
    operator: Extreme,
    x: AscendTensor,
    axis: usize,
) -> (AscendTensor, AscendTensor) {
    let dtype = x.dtype();
    let (values, indices) = extreme(operator, &cast(x, DType::I64), axis, DType::I64);
    (cast(values, dtype), indices)
}

/// Product along an axis.
pub(crate) fn product(x: &AscendTensor, axis: usize) -> AscendTensor {
    let dtype = x.dtype();
    compute([x], Out::New(kept(x, &[axis]), dtype), |ops, [x], out| {
        ops.prod_dim(x, axis as i64, true, data_type(dtype)?, out)
    })
}

/// All elements in one axis.
pub(crate) fn flat(x: AscendTensor) -> AscendTensor {
    let shape = Shape::from([x.len()]);
    views::reshape(x, &shape)
}

/// Running sum along an axis.
pub(crate) fn cumsum(x: AscendTensor, axis: usize) -> AscendTensor {
    let dtype = x.dtype();
    if dtype == DType::I64 {
        return cumsum_by_doubling(x, axis);
    }
    compute([&x], Out::New(x.shape(), dtype), |ops, [x], out| {
        ops.cumsum(x, axis as i64, data_type(dtype)?, out)
    })
}

/// As [`cumsum`], for 64-bit integers, which the AI Core's running sum lacks: adds to each element
/// the one before, then the one two before, four before, and so on.
fn cumsum_by_doubling(mut x: AscendTensor, axis: usize) -> AscendTensor {
    let length = x.dims()[axis];
    let part = |x: &AscendTensor, from: usize, to: usize| {
        let all = [Slice::new(0, None, 1)].repeat(axis);
        let part = Slice::new(from as isize, Some(to as isize), 1);
        views::slice(x, &[&all[..], &[part]].concat()).0
    };
    let mut step = 1;
    while step < length {
        let sums = binary(plus, part(&x, step, length), part(&x, 0, length - step));
        x = cat(vec![part(&x, 0, step), sums], axis);
        step *= 2;
    }
    x
}

/// Any, or all, of the whole tensor.
pub(crate) fn truth(operator: Reduce, x: AscendTensor, dtype: BoolDType) -> AscendTensor {
    let x = cast(x, DType::Bool(dtype));
    whole(operator, &x, DType::Bool(dtype))
}

/// Any, or all, along an axis.
pub(crate) fn truth_along(
    operator: Reduce,
    x: AscendTensor,
    axis: usize,
    dtype: BoolDType,
) -> AscendTensor {
    let x = cast(x, DType::Bool(dtype));
    along(operator, &x, &[axis], DType::Bool(dtype))
}

fn kept(x: &AscendTensor, axes: &[usize]) -> Shape {
    let mut dims = x.dims().to_vec();
    for &axis in axes {
        dims[axis] = 1;
    }
    Shape::from(dims)
}

/// A normalisation along an axis.
pub(crate) fn softmax(
    operator: fn(&Operators, View<'_>, i64, View<'_>) -> Result<()>,
    x: AscendTensor,
    axis: usize,
) -> AscendTensor {
    let out = Out::New(x.shape(), x.dtype());
    compute([&x], out, |ops, [x], out| {
        operator(ops, x, axis as i64, out)
    })
}
