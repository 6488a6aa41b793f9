//! Operations on boolean tensors.

use burn::backend::flex::Flex;
use burn::backend::ops::BoolTensorOps;
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, DType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata,
};
use burn_fused::serve;
use rope_ascend::aclnn::Operators;

use super::{elementwise, index, movement, operations, reduce, views};
use crate::fallback::{FromHost as _, ToHost as _, Trip};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor as T;

operations! {
    BoolTensorOps;
    native {
        fn bool_reshape(tensor: T, shape: Shape) -> T; ALL [copy] { views::reshape(tensor, &shape) }
        fn bool_swap_dims(tensor: T, dim1: usize, dim2: usize) -> T;
            ALL [] { views::swap(&tensor, dim1, dim2) }
        fn bool_permute(tensor: T, axes: &[usize]) -> T; ALL [] { views::permute(&tensor, axes) }
        fn bool_expand(tensor: T, shape: Shape) -> T; ALL [] { views::expand(&tensor, &shape) }
        fn bool_unfold(tensor: T, dim: usize, size: usize, step: usize) -> T;
            ALL [] { views::unfold(&tensor, dim, size, step) }
        fn bool_slice(tensor: T, slices: &[Slice]) -> T;
            ALL [flip, index_select, arange] { movement::slice(&tensor, slices) }
        fn bool_slice_assign(tensor: T, slices: &[Slice], value: T) -> T;
            ALL [copy, flip, index_select, arange] { movement::slice_assign(tensor, slices, value) }
        fn bool_to_device(tensor: T, device: &AscendDevice) -> T; ALL [] { tensor.moved(device) }
        fn bool_empty(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> T;
            ALL [] { T::empty(device, shape, DType::Bool(dtype)) }
        fn bool_repeat_dim(tensor: T, dim: usize, times: usize) -> T;
            ALL [repeat] { movement::repeat(tensor, dim, times) }
        fn bool_cat(tensors: Vec<T>, dim: usize) -> T;
            ALL [cat, copy] { movement::cat(tensors, dim) }
        fn bool_flip(tensor: T, axes: &[usize]) -> T;
            ALL [flip, index_select, arange] { movement::flip(tensor, axes) }
        fn bool_zeros(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> T;
            BOOL [] { movement::zeros(device, shape, DType::Bool(dtype)) }
        fn bool_ones(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> T;
            BOOL [fill] { movement::full(device, shape, Scalar::Bool(true), DType::Bool(dtype)) }
        fn bool_into_int(tensor: T, out_dtype: IntDType) -> T;
            INT_BOOL [cast] { elementwise::cast(tensor, out_dtype.into()) }
        fn bool_into_float(tensor: T, out_dtype: FloatDType) -> T;
            FLOAT_BOOL [cast] { elementwise::cast(tensor, out_dtype.into()) }
        fn bool_mask_where(tensor: T, mask: T, value: T) -> T;
            BOOL [select_where] { elementwise::mask_where(tensor, mask, value) }
        fn bool_mask_fill(tensor: T, mask: T, value: Scalar) -> T;
            BOOL [masked_fill, copy] { elementwise::mask_fill(tensor, &mask, value) }
        fn bool_gather(dim: usize, tensor: T, indices: T) -> T;
            BOOL_INDEX [gather] { index::gather(tensor, dim, &indices) }
        fn bool_select(tensor: T, dim: usize, indices: T) -> T;
            BOOL_INDEX [index_select] { index::select(tensor, dim, indices) }
        fn bool_scatter_or(dim: usize, tensor: T, indices: T, value: T) -> T;
            BOOL_INDEX [cast, scatter_add, ne_scalar] {
                index::or(tensor, value, |x, value| {
                    index::scatter(x, dim, indices, value, IndexingUpdateOp::Add)
                })
            }
        fn bool_select_or(tensor: T, dim: usize, indices: T, value: T) -> T;
            BOOL_INDEX [cast, index_add, ne_scalar] {
                index::or(tensor, value, |x, value| {
                    index::select_assign(x, dim, indices, value, IndexingUpdateOp::Add)
                })
            }
        fn bool_and(lhs: T, rhs: T) -> T;
            BOOL [logical_and] { elementwise::binary(Operators::logical_and, lhs, rhs) }
        fn bool_or(lhs: T, rhs: T) -> T;
            BOOL [logical_or] { elementwise::binary(Operators::logical_or, lhs, rhs) }
        fn bool_xor(lhs: T, rhs: T) -> T;
            BOOL [logical_xor] { elementwise::binary(Operators::logical_xor, lhs, rhs) }
        fn bool_not_equal(lhs: T, rhs: T) -> T;
            BOOL [logical_xor] { elementwise::binary(Operators::logical_xor, lhs, rhs) }
        fn bool_equal(lhs: T, rhs: T) -> T;
            BOOL [eq] { elementwise::binary(Operators::eq, lhs, rhs) }
        fn bool_not(tensor: T) -> T;
            BOOL [logical_not] { elementwise::unary(Operators::logical_not, tensor) }
        fn bool_equal_elem(lhs: T, rhs: Scalar) -> T; BOOL [logical_not] {
            if rhs.elem::<bool>() {
                lhs
            } else {
                elementwise::unary(Operators::logical_not, lhs)
            }
        }
        fn bool_not_equal_elem(lhs: T, rhs: Scalar) -> T; BOOL [logical_not] {
            if rhs.elem::<bool>() {
                elementwise::unary(Operators::logical_not, lhs)
            } else {
                lhs
            }
        }
        fn bool_any(tensor: T) -> T;
            BOOL [any] { reduce::whole(Operators::any, &tensor, tensor.dtype()) }
        fn bool_any_dim(tensor: T, dim: usize) -> T;
            BOOL [any] { reduce::along(Operators::any, &tensor, &[dim], tensor.dtype()) }
        fn bool_all(tensor: T) -> T;
            BOOL [all] { reduce::whole(Operators::all, &tensor, tensor.dtype()) }
        fn bool_all_dim(tensor: T, dim: usize) -> T;
            BOOL [all] { reduce::along(Operators::all, &tensor, &[dim], tensor.dtype()) }
    }
    fallback {}
    other {
        fn bool_from_data(data: TensorData, device: &AscendDevice) -> T {
            T::upload(device, data)
        }

        async fn bool_into_data(tensor: T) -> Result<TensorData, ExecutionError> {
            serve::wait(|| tensor.read())
        }

        async fn bool_argwhere(tensor: T, out_dtype: IntDType) -> T {
            let mut trip = Trip::new("bool_argwhere");
            let host = tensor.to_host(&mut trip);
            let indices = Flex::bool_argwhere(host, out_dtype).await;
            let indices = T::from_host(indices, &mut trip);
            trip.end();
            indices
        }
    }
}
