//! Operations on backends' tensors that several of this crate's operations are composed of.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{FloatDType, Shape, Slice};

/// The ranges of a whole tensor.
pub(crate) fn whole(shape: &Shape) -> Vec<Slice> {
    let sizes = shape.as_slice().iter();
    sizes.map(|size| Slice::from(0..*size)).collect()
}

/// A range of one dimension.
pub(crate) fn slice<B: Backend>(
    x: FloatTensor<B>,
    dim: usize,
    range: Range<usize>,
) -> FloatTensor<B> {
    let shape = x.shape();
    if range == (0..shape[dim]) {
        return x;
    }
    let mut slices = whole(&shape);
    slices[dim] = range.into();
    B::float_slice(x, &slices)
}

pub(crate) fn cast<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if x.dtype() == dtype.into() {
        x
    } else {
        B::float_cast(x, dtype)
    }
}
