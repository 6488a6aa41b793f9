//! Operators with indices as data. The device does not check that indices are in range.

use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{DType, Scalar, Shape, TensorMetadata};
use rope_ascend::aclnn::{Number, Operators};

use super::elementwise::{cast, compare_number};
use super::launch::{Out, compute};
use super::movement::{as_bits, owned, unless};
use super::views;
use crate::tensor::AscendTensor;

/// Number of the "replace" mode of scatter.
const REPLACE: i64 = 0;

/// The elements at the indices `index` of an axis.
pub(crate) fn gather(x: AscendTensor, axis: usize, index: &AscendTensor) -> AscendTensor {
    as_bits(x, |x| {
        let out = Out::New(index.shape(), x.dtype());
        compute([&x, index], out, |ops, [x, index], out| {
            ops.gather(x, axis as i64, index, out)
        })
    })
}

/// Writes or adds `value` at the indices `index` of an axis.
pub(crate) fn scatter(
    x: AscendTensor,
    axis: usize,
    index: AscendTensor,
    value: AscendTensor,
    update: IndexingUpdateOp,
) -> AscendTensor {
    // The operators take dense values and write dense results.
    let (x, index, value) = (owned(x), index.contiguous(), value.contiguous());
    if index.is_empty() && index.failure().is_none() {
        return x;
    }
    let dim = axis as i64;
    if update == IndexingUpdateOp::Add {
        let out = Out::Over(x.clone());
        return compute([&x, &index, &value], out, |ops, [x, index, value], out| {
            ops.scatter_add(x, dim, index, value, out)
        });
    }
    // 64-bit elements are written as two halves: the AI Core writes at most 32 bits.
    let (target, index, value) = if x.dtype() == DType::I64 {
        (
            x.split(DType::I32),
            for_halves(index),
            value.split(DType::I32),
        )
    } else {
        (x.clone(), index, value)
    };
    let out = Out::Over(target.clone());
    let written = compute([&target, &index, &value], out, |ops, views, out| {
        let [_, index, value] = views;
        ops.scatter(out, dim, index, value, REPLACE)
    });
    unless(written.failure().cloned(), x)
}

/// Indices of whole elements as indices of both their halves, on a new last axis.
fn for_halves(index: AscendTensor) -> AscendTensor {
    let [one, both] = [1, 2].map(|halves| Shape::from([index.dims(), &[halves]].concat()));
    views::expand(&views::reshape(index, &one), &both).contiguous()
}

/// The slices at the indices `index` of an axis.
pub(crate) fn select(x: AscendTensor, axis: usize, index: AscendTensor) -> AscendTensor {
    let index = index.contiguous();
    as_bits(x, |x| {
        let mut dims = x.dims().to_vec();
        dims[axis] = index.len();
        let out = Out::New(Shape::from(dims), x.dtype());
        compute([&x, &index], out, |ops, [x, index], out| {
            ops.index_select(x, axis as i64, index, out)
        })
    })
}

/// Writes or adds slices at the indices `index` of an axis.
pub(crate) fn select_assign(
    x: AscendTensor,
    axis: usize,
    index: AscendTensor,
    value: AscendTensor,
    update: IndexingUpdateOp,
) -> AscendTensor {
    if index.is_empty() && index.failure().is_none() {
        return x;
    }
    if update == IndexingUpdateOp::Add {
        let (index, value) = (index.contiguous(), value.contiguous());
        let out = Out::New(x.shape(), x.dtype());
        return compute([&x, &index, &value], out, |ops, [x, index, value], out| {
            ops.index_add(x, axis as i64, index, value, Number::Int(1), out)
        });
    }
    // The same index for every element of a slice.
    let mut dims = vec![1; value.dims().len()];
    dims[axis] = index.len();
    let index = views::reshape(index, &Shape::from(dims));
    let index = views::expand(&index, &value.shape());
    scatter(x, axis, index, value, update)
}

/// Combines truth values with others at some indices: true if either is, from the sum computed by
/// `add`.
pub(crate) fn or(
    x: AscendTensor,
    value: AscendTensor,
    add: impl FnOnce(AscendTensor, AscendTensor) -> AscendTensor,
) -> AscendTensor {
    let dtype = x.dtype().into();
    let [x, value] = [x, value].map(|x| cast(x, DType::I32));
    compare_number(Operators::ne_scalar, add(x, value), Scalar::Int(0), dtype)
}

/// Rows of the weight, shape of the indices and the row's length.
pub(crate) fn embedding(weight: &AscendTensor, indices: &AscendTensor) -> AscendTensor {
    let mut dims = indices.dims().to_vec();
    dims.push(weight.dims()[1]);
    let out = Out::New(Shape::from(dims), weight.dtype());
    compute([weight, indices], out, |ops, [weight, indices], out| {
        ops.embedding(weight, indices, out)
    })
}

/// Gradient of the weight: rows of the gradient, added up by index.
pub(crate) fn embedding_backward(
    weight: &AscendTensor,
    grad: AscendTensor,
    indices: AscendTensor,
) -> AscendTensor {
    const NO_PADDING: u64 = (-1_i64).cast_unsigned();
    let rows = weight.dims()[0] as u64;
    let (grad, indices) = (grad.contiguous(), indices.contiguous());
    if grad.is_empty() && grad.failure().is_none() {
        return super::movement::zeros(&weight.device(), weight.shape(), grad.dtype());
    }
    let out = Out::New(weight.shape(), grad.dtype());
    compute([&grad, &indices], out, |ops, [grad, indices], out| {
        ops.embedding_backward(grad, indices, rows, NO_PADDING, false, out)
    })
}
