//! Ordinary operations on the tensors of any backend, from which operations are composed.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{FloatDType, Shape, Slice, TensorData};

use crate::accumulator;

/// Returns the ranges of a whole tensor.
pub fn whole(shape: &Shape) -> Vec<Slice> {
    let sizes = shape.as_slice().iter();
    sizes.map(|size| Slice::from(0..*size)).collect()
}

/// Slices one dimension.
pub fn slice<B: Backend>(x: FloatTensor<B>, dim: usize, range: Range<usize>) -> FloatTensor<B> {
    let shape = x.shape();
    if range == (0..shape[dim]) {
        return x;
    }
    let mut slices = whole(&shape);
    slices[dim] = range.into();
    B::float_slice(x, &slices)
}

/// Converts a tensor to another type.
pub fn cast<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if x.dtype() == dtype.into() {
        x
    } else {
        B::float_cast(x, dtype)
    }
}

/// Converts a tensor to its computation type.
///
/// # Panics
/// If the type is not a supported float.
pub fn widen<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let wide = accumulator(x.dtype()).unwrap_or_else(|error| panic!("{error}"));
    cast::<B>(x, wide)
}

/// Negates flags on a device, as a fill mask.
pub fn not<B: Backend>(
    flags: &[bool],
    shape: impl Into<Shape>,
    device: &B::Device,
) -> BoolTensor<B> {
    let flags: Vec<bool> = flags.iter().map(|flag| !flag).collect();
    let dtype = get_or_init_device_settings::<B>(device).bool_dtype;
    let data = TensorData::new(flags, shape.into()).convert_dtype(dtype.into());
    B::bool_from_data(data, device)
}

/// Creates zeros that are tracked to the tensors, with zero gradients: the result of an operation
/// with nothing to compute. Unlike a product with 0, it does not propagate NaN.
pub fn zeros_from<B: Backend>(
    shape: Shape,
    dtype: FloatDType,
    inputs: Vec<FloatTensor<B>>,
) -> FloatTensor<B> {
    let elems = shape.num_elements();
    let zeros = B::float_zeros(Shape::new([elems]), &inputs[0].device(), dtype);
    let flat = |x: FloatTensor<B>| {
        let len = x.shape().num_elements();
        B::float_reshape(cast::<B>(x, dtype), Shape::new([len]))
    };
    let parts = std::iter::once(zeros).chain(inputs.into_iter().map(flat));
    let all = B::float_cat(parts.collect(), 0);
    B::float_reshape(slice::<B>(all, 0, 0..elems), shape)
}
