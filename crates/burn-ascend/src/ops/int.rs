//! Operations on integer tensors.

use std::ops::Range;

use burn::backend::ops::IntTensorOps;
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use burn_fused::serve;
use rope_ascend::aclnn::Operators;

use super::{elementwise, index, movement, operations, reduce, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor as T;

operations! {
    IntTensorOps;
    native {
        fn int_reshape(tensor: T, shape: Shape) -> T; ALL [copy] { views::reshape(tensor, &shape) }
        fn int_swap_dims(tensor: T, dim1: usize, dim2: usize) -> T;
            ALL [] { views::swap(&tensor, dim1, dim2) }
        fn int_permute(tensor: T, axes: &[usize]) -> T; ALL [] { views::permute(&tensor, axes) }
        fn int_expand(tensor: T, shape: Shape) -> T; ALL [] { views::expand(&tensor, &shape) }
        fn int_unfold(tensor: T, dim: usize, size: usize, step: usize) -> T;
            ALL [] { views::unfold(&tensor, dim, size, step) }
        fn int_slice(tensor: T, slices: &[Slice]) -> T;
            ALL [flip, index_select, arange] { movement::slice(&tensor, slices) }
        fn int_slice_assign(tensor: T, slices: &[Slice], value: T) -> T;
            ALL [copy, flip, index_select, arange] { movement::slice_assign(tensor, slices, value) }
        fn int_to_device(tensor: T, device: &AscendDevice) -> T; ALL [] { tensor.moved(device) }
        fn int_empty(shape: Shape, device: &AscendDevice, dtype: IntDType) -> T;
            ALL [] { T::empty(device, shape, dtype.into()) }
        fn int_repeat_dim(tensor: T, dim: usize, times: usize) -> T;
            ALL [repeat] { movement::repeat(tensor, dim, times) }
        fn int_cat(tensors: Vec<T>, dim: usize) -> T;
            ALL [cat, copy] { movement::cat(tensors, dim) }
        fn int_flip(tensor: T, axes: &[usize]) -> T;
            ALL [flip, index_select, arange] { movement::flip(tensor, axes) }
        fn int_zeros(shape: Shape, device: &AscendDevice, dtype: IntDType) -> T;
            ALL [] { movement::zeros(device, shape, dtype.into()) }
        fn int_ones(shape: Shape, device: &AscendDevice, dtype: IntDType) -> T;
            INT [fill] { movement::full(device, shape, Scalar::Int(1), dtype.into()) }
        fn int_full(shape: Shape, fill_value: Scalar, device: &AscendDevice, dtype: IntDType) -> T;
            INT [fill] { movement::full(device, shape, fill_value, dtype.into()) }
        fn int_arange_step(range: Range<i64>, step: usize, device: &AscendDevice,
            dtype: IntDType) -> T;
            INDEX [arange] { movement::arange(device, &range, step, dtype.into()) }
        fn int_into_float(tensor: T, out_dtype: FloatDType) -> T;
            FLOAT_INT [cast] { elementwise::cast(tensor, out_dtype.into()) }
        fn int_cast(tensor: T, dtype: IntDType) -> T;
            INDEX [cast] { elementwise::cast(tensor, dtype.into()) }
        fn int_add(lhs: T, rhs: T) -> T;
            INT [add, cast, copy] { elementwise::integers(elementwise::plus, lhs, rhs) }
        fn int_sub(lhs: T, rhs: T) -> T;
            INT [sub, cast, copy] { elementwise::integers(elementwise::minus, lhs, rhs) }
        fn int_mul(lhs: T, rhs: T) -> T;
            INT [mul, cast, copy] { elementwise::integers(Operators::mul, lhs, rhs) }
        fn int_add_scalar(lhs: T, rhs: Scalar) -> T; INT [adds, add, fill, cast, copy] {
            elementwise::by_integer(Some(elementwise::plus_number), elementwise::plus, lhs, rhs)
        }
        fn int_sub_scalar(lhs: T, rhs: Scalar) -> T; INT [adds, add, fill, cast, copy] {
            let rhs = Scalar::Int(rhs.elem::<i64>().wrapping_neg());
            elementwise::by_integer(Some(elementwise::plus_number), elementwise::plus, lhs, rhs)
        }
        fn int_mul_scalar(lhs: T, rhs: Scalar) -> T;
            INT [mul, fill, cast, copy] { elementwise::by_integer(None, Operators::mul, lhs, rhs) }
        fn int_neg(tensor: T) -> T; INDEX [neg] { elementwise::unary(Operators::neg, tensor) }
        fn int_abs(tensor: T) -> T; INDEX [abs] { elementwise::unary(Operators::abs, tensor) }
        fn int_sign(tensor: T) -> T; INDEX [clamp] {
            elementwise::clamp(tensor, Some(Scalar::Int(-1)), Some(Scalar::Int(1)))
        }
        fn int_clamp_min(tensor: T, min: Scalar) -> T;
            INDEX [clamp] { elementwise::clamp(tensor, Some(min), None) }
        fn int_clamp_max(tensor: T, max: Scalar) -> T;
            INDEX [clamp] { elementwise::clamp(tensor, None, Some(max)) }
        fn int_clamp(tensor: T, min: Scalar, max: Scalar) -> T;
            INDEX [clamp] { elementwise::clamp(tensor, Some(min), Some(max)) }
        fn int_gather(dim: usize, tensor: T, indices: T) -> T;
            INDEX [gather] { index::gather(tensor, dim, &indices) }
        fn int_scatter(dim: usize, tensor: T, indices: T, value: T, update: IndexingUpdateOp) -> T;
            INDEX [scatter_add, scatter] { index::scatter(tensor, dim, indices, value, update) }
        fn int_select(tensor: T, dim: usize, indices: T) -> T;
            INDEX [index_select] { index::select(tensor, dim, indices) }
        fn int_select_assign(tensor: T, dim: usize, indices: T, value: T,
            update: IndexingUpdateOp) -> T;
            INDEX [index_add, scatter] { index::select_assign(tensor, dim, indices, value, update) }
        fn int_mask_where(tensor: T, mask: T, value: T) -> T;
            INT_BOOL [select_where, cast, copy] { elementwise::mask_where(tensor, mask, value) }
        fn int_mask_fill(tensor: T, mask: T, value: Scalar) -> T;
            INT_BOOL [masked_fill, select_where, fill, cast, copy] {
                elementwise::mask_fill(tensor, &mask, value)
            }
        fn int_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [eq, cast] { elementwise::compare(Operators::eq, lhs, rhs, out_dtype) }
        fn int_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; INT [eq_scalar, cast] {
            elementwise::compare_number(Operators::eq_scalar, lhs, rhs, out_dtype)
        }
        fn int_not_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [ne, cast] { elementwise::compare(Operators::ne, lhs, rhs, out_dtype) }
        fn int_not_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T;
            INT [ne_scalar, cast] {
                elementwise::compare_number(Operators::ne_scalar, lhs, rhs, out_dtype)
            }
        fn int_greater(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [gt, cast] { elementwise::compare(Operators::gt, lhs, rhs, out_dtype) }
        fn int_greater_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; INT [gt_scalar, cast] {
            elementwise::compare_number(Operators::gt_scalar, lhs, rhs, out_dtype)
        }
        fn int_greater_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [ge, cast] { elementwise::compare(Operators::ge, lhs, rhs, out_dtype) }
        fn int_greater_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T;
            INT [ge_scalar, cast] {
                elementwise::compare_number(Operators::ge_scalar, lhs, rhs, out_dtype)
            }
        fn int_lower(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [lt, cast] { elementwise::compare(Operators::lt, lhs, rhs, out_dtype) }
        fn int_lower_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; INT [lt_scalar, cast] {
            elementwise::compare_number(Operators::lt_scalar, lhs, rhs, out_dtype)
        }
        fn int_lower_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            INT [le, cast] { elementwise::compare(Operators::le, lhs, rhs, out_dtype) }
        fn int_lower_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T;
            INT [le_scalar, cast] {
                elementwise::compare_number(Operators::le_scalar, lhs, rhs, out_dtype)
            }
        fn int_sum(tensor: T) -> T;
            INDEX [reduce_sum] { reduce::whole(reduce::sum, &tensor, tensor.dtype()) }
        fn int_sum_dim(tensor: T, dim: usize) -> T;
            INDEX [reduce_sum] { reduce::along(reduce::sum, &tensor, &[dim], tensor.dtype()) }
        fn int_prod(tensor: T) -> T;
            INDEX [prod_dim] { reduce::product(&reduce::flat(tensor), 0) }
        fn int_prod_dim(tensor: T, dim: usize) -> T;
            INDEX [prod_dim] { reduce::product(&tensor, dim) }
        fn int_powi_scalar(lhs: T, rhs: Scalar) -> T; INT [mul, fill, cast, copy] {
            // As on the host: the exponent has 32 bits.
            elementwise::power(lhs, rhs.elem::<i64>() as u32)
        }
        fn int_cumsum(tensor: T, dim: usize) -> T;
            INDEX [cumsum, add, cat] { reduce::cumsum(tensor, dim) }
        fn int_max(tensor: T) -> T;
            INDEX [amax] { reduce::whole(Operators::amax, &tensor, tensor.dtype()) }
        fn int_max_dim(tensor: T, dim: usize) -> T;
            INDEX [amax] { reduce::along(Operators::amax, &tensor, &[dim], tensor.dtype()) }
        fn int_max_dim_with_indices(tensor: T, dim: usize) -> (T, T);
            INDEX [max_dim, cast] { reduce::integer_extreme(Operators::max_dim, tensor, dim) }
        fn int_argmax(tensor: T, dim: usize) -> T; INDEX [argmax] {
            // As on the host: indices are 64-bit whatever the tensor is.
            reduce::index_along(Operators::argmax, &tensor, dim, DType::I64)
        }
        fn int_min(tensor: T) -> T;
            INDEX [amin] { reduce::whole(Operators::amin, &tensor, tensor.dtype()) }
        fn int_min_dim(tensor: T, dim: usize) -> T;
            INDEX [amin] { reduce::along(Operators::amin, &tensor, &[dim], tensor.dtype()) }
        fn int_min_dim_with_indices(tensor: T, dim: usize) -> (T, T);
            INDEX [min_dim, cast] { reduce::integer_extreme(Operators::min_dim, tensor, dim) }
        fn int_argmin(tensor: T, dim: usize) -> T; INDEX [argmin] {
            // As on the host: indices are 64-bit whatever the tensor is.
            reduce::index_along(Operators::argmin, &tensor, dim, DType::I64)
        }
        fn int_any(tensor: T, out_dtype: BoolDType) -> T;
            INDEX [any, cast] { reduce::truth(Operators::any, tensor, out_dtype) }
        fn int_any_dim(tensor: T, dim: usize, out_dtype: BoolDType) -> T;
            INDEX [any, cast] { reduce::truth_along(Operators::any, tensor, dim, out_dtype) }
        fn int_all(tensor: T, out_dtype: BoolDType) -> T;
            INDEX [all, cast] { reduce::truth(Operators::all, tensor, out_dtype) }
        fn int_all_dim(tensor: T, dim: usize, out_dtype: BoolDType) -> T;
            INDEX [all, cast] { reduce::truth_along(Operators::all, tensor, dim, out_dtype) }
    }
    fallback {
        fn int_div(lhs: T, rhs: T) -> T;
        fn int_div_scalar(lhs: T, rhs: Scalar) -> T;
        fn int_remainder(lhs: T, rhs: T) -> T;
        fn int_remainder_scalar(lhs: T, rhs: Scalar) -> T;
        fn int_matmul(lhs: T, rhs: T) -> T;
        fn int_mean_dim(tensor: T, dim: usize) -> T;
        fn int_cumprod(tensor: T, dim: usize) -> T;
        fn int_cummin(tensor: T, dim: usize) -> T;
        fn int_cummax(tensor: T, dim: usize) -> T;
        fn int_random(shape: Shape, distribution: Distribution, device: &AscendDevice,
            dtype: IntDType) -> T;
        fn bitwise_and(lhs: T, rhs: T) -> T;
        fn bitwise_and_scalar(lhs: T, rhs: Scalar) -> T;
        fn bitwise_or(lhs: T, rhs: T) -> T;
        fn bitwise_or_scalar(lhs: T, rhs: Scalar) -> T;
        fn bitwise_xor(lhs: T, rhs: T) -> T;
        fn bitwise_xor_scalar(lhs: T, rhs: Scalar) -> T;
        fn bitwise_not(tensor: T) -> T;
        fn bitwise_left_shift(lhs: T, rhs: T) -> T;
        fn bitwise_left_shift_scalar(lhs: T, rhs: Scalar) -> T;
        fn bitwise_right_shift(lhs: T, rhs: T) -> T;
        fn bitwise_right_shift_scalar(lhs: T, rhs: Scalar) -> T;
        fn int_sort(tensor: T, dim: usize, descending: bool) -> T;
        fn int_sort_with_indices(tensor: T, dim: usize, descending: bool) -> (T, T);
        fn int_argsort(tensor: T, dim: usize, descending: bool) -> T;
        fn int_scatter_nd(data: T, indices: T, values: T, reduction: IndexingUpdateOp) -> T;
        fn int_gather_nd(data: T, indices: T) -> T;
        fn int_powi(lhs: T, rhs: T) -> T;
    }
    other {
        fn int_from_data(data: TensorData, device: &AscendDevice) -> T {
            T::upload(device, data)
        }

        async fn int_into_data(tensor: T) -> Result<TensorData, ExecutionError> {
            serve::wait(|| tensor.read())
        }
    }
}
