//! Operations on integer tensors.

use super::{elementwise, index, movement, operations, reduce, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::ops::IntTensorOps;
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use rope_ascend::aclnn::Operators;
use std::ops::Range;

operations! {
    IntTensorOps;
    native {
        fn int_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [copy] {
            views::reshape(tensor, &shape)
        }
        fn int_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor; ALL [] {
            views::swap(&tensor, dim1, dim2)
        }
        fn int_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [] {
            views::permute(&tensor, axes)
        }
        fn int_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [] {
            views::expand(&tensor, &shape)
        }
        fn int_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor; ALL [] {
            views::unfold(&tensor, dim, size, step)
        }
        fn int_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor; ALL [flip] {
            movement::slice(&tensor, slices)
        }
        fn int_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor; ALL [copy, flip] {
            movement::slice_assign(tensor, slices, value)
        }
        fn int_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor; ALL [] {
            tensor.moved(device)
        }
        fn int_empty(shape: Shape, device: &AscendDevice, dtype: IntDType) -> AscendTensor; ALL [] {
            AscendTensor::empty(device, shape, dtype.into())
        }
        fn int_repeat_dim(tensor: AscendTensor, dim: usize, times: usize) -> AscendTensor; ALL [repeat] {
            movement::repeat(tensor, dim, times)
        }
        fn int_cat(tensors: Vec<AscendTensor>, dim: usize) -> AscendTensor; ALL [cat, copy] {
            movement::cat(tensors, dim)
        }
        fn int_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [flip] {
            movement::flip(tensor, axes)
        }
        fn int_zeros(shape: Shape, device: &AscendDevice, dtype: IntDType) -> AscendTensor; ALL [] {
            movement::zeros(device, shape, dtype.into())
        }
        fn int_ones(shape: Shape, device: &AscendDevice, dtype: IntDType) -> AscendTensor; INT [fill] {
            movement::full(device, shape, Scalar::Int(1), dtype.into())
        }
        fn int_full(shape: Shape, fill_value: Scalar, device: &AscendDevice, dtype: IntDType) -> AscendTensor; INT [fill] {
            movement::full(device, shape, fill_value, dtype.into())
        }
        fn int_arange_step(range: Range<i64>, step: usize, device: &AscendDevice, dtype: IntDType) -> AscendTensor; INDEX [arange] {
            movement::arange(device, &range, step, dtype.into())
        }
        fn int_into_float(tensor: AscendTensor, out_dtype: FloatDType) -> AscendTensor; FLOAT_INDEX [cast] {
            elementwise::cast(tensor, out_dtype.into())
        }
        fn int_cast(tensor: AscendTensor, dtype: IntDType) -> AscendTensor; INDEX [cast] {
            elementwise::cast(tensor, dtype.into())
        }
        fn int_add(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; INT [add] {
            elementwise::binary(elementwise::plus, lhs, rhs)
        }
        fn int_sub(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; INT [sub] {
            elementwise::binary(elementwise::minus, lhs, rhs)
        }
        fn int_mul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; INT [mul] {
            elementwise::binary(Operators::mul, lhs, rhs)
        }
        fn int_add_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; INT [adds, add, fill] {
            elementwise::by_integer(Some(elementwise::plus_number), elementwise::plus, lhs, rhs)
        }
        fn int_sub_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; INT [adds, sub, fill] {
            let negative = Scalar::Int(-rhs.elem::<i64>());
            elementwise::by_integer(Some(elementwise::plus_number), elementwise::plus, lhs, negative)
        }
        fn int_mul_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; INT [mul, fill] {
            elementwise::by_integer(None, Operators::mul, lhs, rhs)
        }
        fn int_neg(tensor: AscendTensor) -> AscendTensor; INDEX [neg] {
            elementwise::unary(Operators::neg, tensor)
        }
        fn int_abs(tensor: AscendTensor) -> AscendTensor; INDEX [abs] {
            elementwise::unary(Operators::abs, tensor)
        }
        fn int_sign(tensor: AscendTensor) -> AscendTensor; INDEX [sign] {
            elementwise::unary(Operators::sign, tensor)
        }
        fn int_clamp_min(tensor: AscendTensor, min: Scalar) -> AscendTensor; INDEX [clamp] {
            elementwise::clamp(tensor, Some(min), None)
        }
        fn int_clamp_max(tensor: AscendTensor, max: Scalar) -> AscendTensor; INDEX [clamp] {
            elementwise::clamp(tensor, None, Some(max))
        }
        fn int_clamp(tensor: AscendTensor, min: Scalar, max: Scalar) -> AscendTensor; INDEX [clamp] {
            elementwise::clamp(tensor, Some(min), Some(max))
        }
        fn int_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor; INDEX [gather] {
            index::gather(tensor, dim, &indices)
        }
        fn int_scatter(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor; INDEX [scatter_add, scatter] {
            index::scatter(tensor, dim, indices, value, update)
        }
        fn int_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor; INDEX [index_select] {
            index::select(tensor, dim, indices)
        }
        fn int_select_assign(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor; INDEX [index_add, scatter] {
            index::select_assign(tensor, dim, indices, value, update)
        }
        fn int_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor; INT_BOOL [select_where] {
            elementwise::mask_where(tensor, mask, value)
        }
        fn int_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor; BOOL_INDEX [masked_fill, copy] {
            elementwise::mask_fill(tensor, &mask, value)
        }
        fn int_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [eq] {
            elementwise::compare(Operators::eq, &lhs, &rhs, out_dtype)
        }
        fn int_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [eq_scalar] {
            elementwise::compare_number(Operators::eq_scalar, &lhs, rhs, out_dtype)
        }
        fn int_not_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [ne] {
            elementwise::compare(Operators::ne, &lhs, &rhs, out_dtype)
        }
        fn int_not_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [ne_scalar] {
            elementwise::compare_number(Operators::ne_scalar, &lhs, rhs, out_dtype)
        }
        fn int_greater(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [gt] {
            elementwise::compare(Operators::gt, &lhs, &rhs, out_dtype)
        }
        fn int_greater_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [gt_scalar] {
            elementwise::compare_number(Operators::gt_scalar, &lhs, rhs, out_dtype)
        }
        fn int_greater_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [ge] {
            elementwise::compare(Operators::ge, &lhs, &rhs, out_dtype)
        }
        fn int_greater_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [ge_scalar] {
            elementwise::compare_number(Operators::ge_scalar, &lhs, rhs, out_dtype)
        }
        fn int_lower(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [lt] {
            elementwise::compare(Operators::lt, &lhs, &rhs, out_dtype)
        }
        fn int_lower_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [lt_scalar] {
            elementwise::compare_number(Operators::lt_scalar, &lhs, rhs, out_dtype)
        }
        fn int_lower_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [le] {
            elementwise::compare(Operators::le, &lhs, &rhs, out_dtype)
        }
        fn int_lower_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; INDEX [le_scalar] {
            elementwise::compare_number(Operators::le_scalar, &lhs, rhs, out_dtype)
        }
        fn int_sum(tensor: AscendTensor) -> AscendTensor; INDEX [reduce_sum] {
            reduce::whole(reduce::sum, &tensor, tensor.dtype())
        }
        fn int_sum_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [reduce_sum] {
            reduce::along(reduce::sum, &tensor, &[dim], tensor.dtype())
        }
        fn int_cumsum(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [cumsum] {
            reduce::cumsum(&tensor, dim)
        }
        fn int_max(tensor: AscendTensor) -> AscendTensor; INDEX [amax] {
            reduce::whole(Operators::amax, &tensor, tensor.dtype())
        }
        fn int_max_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [amax] {
            reduce::along(Operators::amax, &tensor, &[dim], tensor.dtype())
        }
        fn int_argmax(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [argmax] {
            // As on the host: places are 64-bit whatever the tensor is.
            reduce::place(Operators::argmax, &tensor, dim, DType::I64)
        }
        fn int_min(tensor: AscendTensor) -> AscendTensor; INDEX [amin] {
            reduce::whole(Operators::amin, &tensor, tensor.dtype())
        }
        fn int_min_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [amin] {
            reduce::along(Operators::amin, &tensor, &[dim], tensor.dtype())
        }
        fn int_argmin(tensor: AscendTensor, dim: usize) -> AscendTensor; INDEX [argmin] {
            // As on the host: places are 64-bit whatever the tensor is.
            reduce::place(Operators::argmin, &tensor, dim, DType::I64)
        }
        fn int_any(tensor: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [any, cast] {
            reduce::truth(Operators::any, tensor, out_dtype)
        }
        fn int_any_dim(tensor: AscendTensor, dim: usize, out_dtype: BoolDType) -> AscendTensor; INDEX [any, cast] {
            reduce::truth_along(Operators::any, tensor, dim, out_dtype)
        }
        fn int_all(tensor: AscendTensor, out_dtype: BoolDType) -> AscendTensor; INDEX [all, cast] {
            reduce::truth(Operators::all, tensor, out_dtype)
        }
        fn int_all_dim(tensor: AscendTensor, dim: usize, out_dtype: BoolDType) -> AscendTensor; INDEX [all, cast] {
            reduce::truth_along(Operators::all, tensor, dim, out_dtype)
        }
    }
    fallback {
        fn int_div(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_div_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_remainder(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_remainder_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_matmul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_prod(tensor: AscendTensor) -> AscendTensor;
        fn int_prod_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_mean_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cumprod(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cummin(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cummax(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_random(shape: Shape, distribution: Distribution, device: &AscendDevice, dtype: IntDType) -> AscendTensor;
        fn bitwise_and(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bitwise_and_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn bitwise_or(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bitwise_or_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn bitwise_xor(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bitwise_xor_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn bitwise_not(tensor: AscendTensor) -> AscendTensor;
        fn bitwise_left_shift(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bitwise_left_shift_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn bitwise_right_shift(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bitwise_right_shift_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_sort(tensor: AscendTensor, dim: usize, descending: bool) -> AscendTensor;
        fn int_sort_with_indices(tensor: AscendTensor, dim: usize, descending: bool) -> (AscendTensor, AscendTensor);
        fn int_argsort(tensor: AscendTensor, dim: usize, descending: bool) -> AscendTensor;
        fn int_scatter_nd(data: AscendTensor, indices: AscendTensor, values: AscendTensor, reduction: IndexingUpdateOp) -> AscendTensor;
        fn int_gather_nd(data: AscendTensor, indices: AscendTensor) -> AscendTensor;
        fn int_max_dim_with_indices(tensor: AscendTensor, dim: usize) -> (AscendTensor, AscendTensor);
        fn int_min_dim_with_indices(tensor: AscendTensor, dim: usize) -> (AscendTensor, AscendTensor);
        fn int_powi(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_powi_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
    }
    other {
        fn int_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }

        async fn int_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }
    }
}
