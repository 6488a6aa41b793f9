//! Operations on tensors of truth values.

use super::{elementwise, index, movement, operations, reduce, views};
use crate::fallback::{FromHost as _, ToHost as _, Trip};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::flex::Flex;
use burn::backend::ops::BoolTensorOps;
use burn::backend::{
    BoolDType, DType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata,
};
use rope_ascend::aclnn::Operators;

operations! {
    BoolTensorOps;
    native {
        fn bool_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [copy] {
            views::reshape(tensor, &shape)
        }
        fn bool_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor; ALL [] {
            views::swap(&tensor, dim1, dim2)
        }
        fn bool_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [] {
            views::permute(&tensor, axes)
        }
        fn bool_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [] {
            views::expand(&tensor, &shape)
        }
        fn bool_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor; ALL [] {
            views::unfold(&tensor, dim, size, step)
        }
        fn bool_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor; ALL [flip] {
            movement::slice(&tensor, slices)
        }
        fn bool_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor; ALL [copy, flip] {
            movement::slice_assign(tensor, slices, value)
        }
        fn bool_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor; ALL [] {
            tensor.moved(device)
        }
        fn bool_empty(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor; ALL [] {
            AscendTensor::empty(device, shape, DType::Bool(dtype))
        }
        fn bool_repeat_dim(tensor: AscendTensor, dim: usize, times: usize) -> AscendTensor; ALL [repeat] {
            movement::repeat(tensor, dim, times)
        }
        fn bool_cat(tensors: Vec<AscendTensor>, dim: usize) -> AscendTensor; ALL [cat, copy] {
            movement::cat(tensors, dim)
        }
        fn bool_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [flip] {
            movement::flip(tensor, axes)
        }
        fn bool_zeros(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor; BOOL [] {
            movement::zeros(device, shape, DType::Bool(dtype))
        }
        fn bool_ones(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor; BOOL [fill] {
            movement::full(device, shape, Scalar::Bool(true), DType::Bool(dtype))
        }
        fn bool_into_int(tensor: AscendTensor, out_dtype: IntDType) -> AscendTensor; BOOL_INDEX [cast] {
            elementwise::cast(tensor, out_dtype.into())
        }
        fn bool_into_float(tensor: AscendTensor, out_dtype: FloatDType) -> AscendTensor; FLOAT_BOOL [cast] {
            elementwise::cast(tensor, out_dtype.into())
        }
        fn bool_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor; BOOL [select_where] {
            elementwise::mask_where(tensor, mask, value)
        }
        fn bool_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor; BOOL [masked_fill, copy] {
            elementwise::mask_fill(tensor, &mask, value)
        }
        fn bool_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor; BOOL_INDEX [gather] {
            index::gather(tensor, dim, &indices)
        }
        fn bool_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor; BOOL_INDEX [index_select] {
            index::select(tensor, dim, indices)
        }
        fn bool_and(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; BOOL [logical_and] {
            elementwise::binary(Operators::logical_and, lhs, rhs)
        }
        fn bool_or(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; BOOL [logical_or] {
            elementwise::binary(Operators::logical_or, lhs, rhs)
        }
        fn bool_xor(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; BOOL [logical_xor] {
            elementwise::binary(Operators::logical_xor, lhs, rhs)
        }
        fn bool_not_equal(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; BOOL [logical_xor] {
            elementwise::binary(Operators::logical_xor, lhs, rhs)
        }
        fn bool_equal(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; BOOL [eq] {
            elementwise::binary(Operators::eq, lhs, rhs)
        }
        fn bool_not(tensor: AscendTensor) -> AscendTensor; BOOL [logical_not] {
            elementwise::unary(Operators::logical_not, tensor)
        }
        fn bool_equal_elem(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; BOOL [logical_not] {
            if rhs.elem::<bool>() {
                lhs
            } else {
                elementwise::unary(Operators::logical_not, lhs)
            }
        }
        fn bool_not_equal_elem(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; BOOL [logical_not] {
            if rhs.elem::<bool>() {
                elementwise::unary(Operators::logical_not, lhs)
            } else {
                lhs
            }
        }
        fn bool_any(tensor: AscendTensor) -> AscendTensor; BOOL [any] {
            reduce::whole(Operators::any, &tensor, tensor.dtype())
        }
        fn bool_any_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; BOOL [any] {
            reduce::along(Operators::any, &tensor, &[dim], tensor.dtype())
        }
        fn bool_all(tensor: AscendTensor) -> AscendTensor; BOOL [all] {
            reduce::whole(Operators::all, &tensor, tensor.dtype())
        }
        fn bool_all_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; BOOL [all] {
            reduce::along(Operators::all, &tensor, &[dim], tensor.dtype())
        }
    }
    fallback {
        fn bool_scatter_or(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn bool_select_or(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor) -> AscendTensor;
    }
    other {
        fn bool_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }

        async fn bool_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }

        async fn bool_argwhere(tensor: AscendTensor, out_dtype: IntDType) -> AscendTensor {
            let mut trip = Trip::new("bool_argwhere");
            let host = tensor.to_host(&mut trip);
            let places = Flex::bool_argwhere(host, out_dtype).await;
            let places = AscendTensor::from_host(places, &mut trip);
            trip.end();
            places
        }
    }
}
