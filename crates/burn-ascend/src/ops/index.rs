//! Operators with indices as data. The device does not check that they are in range.

use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{Shape, TensorMetadata};
use rope_ascend::aclnn::Number;

use super::launch::{Out, compute};
use super::movement::{as_bits, owned};
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
    let out = Out::Over(x.clone());
    let dim = axis as i64;
    match update {
        IndexingUpdateOp::Add => {
            compute([&x, &index, &value], out, |ops, [x, index, value], out| {
                ops.scatter_add(x, dim, index, value, out)
            })
        }
        _ => compute([&x, &index, &value], out, |ops, [_, index, value], out| {
            ops.scatter(out, dim, index, value, REPLACE)
        }),
    }
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
