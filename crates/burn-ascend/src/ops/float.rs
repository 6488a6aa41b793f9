//! Operations on float tensors.

use burn::backend::ops::{FloatTensorOps, GridSampleOptions};
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use burn_fused::serve;
use rope_ascend::aclnn::Operators;

use super::matmul::matmul;
use super::{elementwise, index, movement, operations, reduce, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor as T;

operations! {
    FloatTensorOps;
    native {
        fn float_reshape(tensor: T, shape: Shape) -> T;
            ALL [copy] { views::reshape(tensor, &shape) }
        fn float_swap_dims(tensor: T, dim1: usize, dim2: usize) -> T;
            ALL [] { views::swap(&tensor, dim1, dim2) }
        fn float_permute(tensor: T, axes: &[usize]) -> T; ALL [] { views::permute(&tensor, axes) }
        fn float_expand(tensor: T, shape: Shape) -> T; ALL [] { views::expand(&tensor, &shape) }
        fn float_unfold(tensor: T, dim: usize, size: usize, step: usize) -> T;
            ALL [] { views::unfold(&tensor, dim, size, step) }
        fn float_slice(tensor: T, slices: &[Slice]) -> T;
            ALL [flip] { movement::slice(&tensor, slices) }
        fn float_slice_assign(tensor: T, slices: &[Slice], value: T) -> T;
            ALL [copy, flip] { movement::slice_assign(tensor, slices, value) }
        fn float_to_device(tensor: T, device: &AscendDevice) -> T; ALL [] { tensor.moved(device) }
        fn float_empty(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> T;
            ALL [] { T::empty(device, shape, dtype.into()) }
        fn float_repeat_dim(tensor: T, dim: usize, times: usize) -> T;
            ALL [repeat] { movement::repeat(tensor, dim, times) }
        fn float_cat(tensors: Vec<T>, dim: usize) -> T;
            ALL [cat, copy] { movement::cat(tensors, dim) }
        fn float_flip(tensor: T, axes: &[usize]) -> T; ALL [flip] { movement::flip(tensor, axes) }
        fn float_random(shape: Shape, distribution: Distribution, device: &AscendDevice,
            dtype: FloatDType) -> T;
            FLOAT [uniform, normal, bernoulli] {
                movement::random(device, shape, distribution, dtype.into())
            }
        fn float_zeros(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> T;
            ALL [] { movement::zeros(device, shape, dtype.into()) }
        fn float_ones(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> T;
            FLOAT [fill] { movement::full(device, shape, Scalar::Float(1.0), dtype.into()) }
        fn float_full(shape: Shape, fill_value: Scalar, device: &AscendDevice,
            dtype: FloatDType) -> T;
            FLOAT [fill] { movement::full(device, shape, fill_value, dtype.into()) }
        fn float_into_int(tensor: T, out_dtype: IntDType) -> T;
            FLOAT_INDEX [cast] { elementwise::cast(tensor, out_dtype.into()) }
        fn float_cast(tensor: T, dtype: FloatDType) -> T;
            FLOAT [cast] { elementwise::cast(tensor, dtype.into()) }
        fn float_add(lhs: T, rhs: T) -> T;
            FLOAT [add] { elementwise::binary(elementwise::plus, lhs, rhs) }
        fn float_sub(lhs: T, rhs: T) -> T;
            FLOAT [sub] { elementwise::binary(elementwise::minus, lhs, rhs) }
        fn float_mul(lhs: T, rhs: T) -> T;
            FLOAT [mul] { elementwise::binary(Operators::mul, lhs, rhs) }
        fn float_div(lhs: T, rhs: T) -> T;
            FLOAT [div] { elementwise::binary(Operators::div, lhs, rhs) }
        fn float_remainder(lhs: T, rhs: T) -> T;
            FLOAT [remainder] { elementwise::binary(Operators::remainder, lhs, rhs) }
        fn float_powf(lhs: T, rhs: T) -> T;
            FLOAT [pow] { elementwise::binary(Operators::pow, lhs, rhs) }
        fn float_add_scalar(lhs: T, rhs: Scalar) -> T;
            FLOAT [adds] { elementwise::by_number(elementwise::plus_number, lhs, rhs) }
        fn float_sub_scalar(lhs: T, rhs: Scalar) -> T; FLOAT [adds] {
            elementwise::by_number(elementwise::plus_number, lhs, Scalar::Float(-rhs.elem::<f64>()))
        }
        fn float_mul_scalar(lhs: T, rhs: Scalar) -> T;
            FLOAT [muls] { elementwise::by_number(elementwise::times_number, lhs, rhs) }
        fn float_div_scalar(lhs: T, rhs: Scalar) -> T;
            FLOAT [divs, div] { elementwise::divide(lhs, rhs) }
        fn float_remainder_scalar(lhs: T, rhs: Scalar) -> T; FLOAT [remainder_scalar] {
            elementwise::by_number(Operators::remainder_scalar, lhs, rhs)
        }
        fn float_powf_scalar_impl(tensor: T, value: Scalar) -> T;
            FLOAT [pow_scalar] { elementwise::by_number(Operators::pow_scalar, tensor, value) }
        fn float_clamp_min(tensor: T, min: Scalar) -> T;
            FLOAT [clamp] { elementwise::clamp(tensor, Some(min), None) }
        fn float_clamp_max(tensor: T, max: Scalar) -> T;
            FLOAT [clamp] { elementwise::clamp(tensor, None, Some(max)) }
        fn float_clamp(tensor: T, min: Scalar, max: Scalar) -> T;
            FLOAT [clamp] { elementwise::clamp(tensor, Some(min), Some(max)) }
        fn float_matmul(lhs: T, rhs: T) -> T; FLOAT [mm, batch_mm] { matmul(lhs, rhs) }
        fn float_neg(tensor: T) -> T; FLOAT [neg] { elementwise::unary(Operators::neg, tensor) }
        fn float_recip(tensor: T) -> T;
            FLOAT [reciprocal] { elementwise::unary(Operators::reciprocal, tensor) }
        fn float_exp(tensor: T) -> T; FLOAT [exp] { elementwise::unary(Operators::exp, tensor) }
        fn float_log(tensor: T) -> T; FLOAT [log] { elementwise::unary(Operators::log, tensor) }
        fn float_log1p(tensor: T) -> T;
            FLOAT [log1p] { elementwise::unary(Operators::log1p, tensor) }
        fn float_sqrt(tensor: T) -> T; FLOAT [sqrt] { elementwise::unary(Operators::sqrt, tensor) }
        fn float_abs(tensor: T) -> T; FLOAT [abs] { elementwise::unary(Operators::abs, tensor) }
        fn float_cos(tensor: T) -> T; FLOAT [cos] { elementwise::unary(Operators::cos, tensor) }
        fn float_sin(tensor: T) -> T; FLOAT [sin] { elementwise::unary(Operators::sin, tensor) }
        fn float_tanh(tensor: T) -> T; FLOAT [tanh] { elementwise::unary(Operators::tanh, tensor) }
        fn float_round(tensor: T) -> T;
            FLOAT [round] { elementwise::unary(Operators::round, tensor) }
        fn float_floor(tensor: T) -> T;
            FLOAT [floor] { elementwise::unary(Operators::floor, tensor) }
        fn float_ceil(tensor: T) -> T; FLOAT [ceil] { elementwise::unary(Operators::ceil, tensor) }
        fn float_trunc(tensor: T) -> T;
            FLOAT [floor, ceil, lt_scalar, select_where] { elementwise::truncate(tensor) }
        fn float_sign(tensor: T) -> T; FLOAT [sign] { elementwise::unary(Operators::sign, tensor) }
        fn float_erf(tensor: T) -> T;
            FLOAT [erf, cast] { elementwise::unary_in_f32(Operators::erf, DType::BF16, tensor) }
        fn float_gather(dim: usize, tensor: T, indices: T) -> T;
            FLOAT_INDEX [gather] { index::gather(tensor, dim, &indices) }
        fn float_scatter(dim: usize, tensor: T, indices: T, value: T,
            update: IndexingUpdateOp) -> T;
            FLOAT_INDEX [scatter_add, scatter] {
                index::scatter(tensor, dim, indices, value, update)
            }
        fn float_select(tensor: T, dim: usize, indices: T) -> T;
            FLOAT_INDEX [index_select] { index::select(tensor, dim, indices) }
        fn float_select_assign(tensor: T, dim: usize, indices: T, value: T,
            update: IndexingUpdateOp) -> T;
            FLOAT_INDEX [index_add, scatter] {
                index::select_assign(tensor, dim, indices, value, update)
            }
        fn float_mask_where(tensor: T, mask: T, value: T) -> T;
            FLOAT_BOOL [select_where] { elementwise::mask_where(tensor, mask, value) }
        fn float_mask_fill(tensor: T, mask: T, value: Scalar) -> T;
            FLOAT_BOOL [masked_fill, copy] { elementwise::mask_fill(tensor, &mask, value) }
        fn float_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [eq] { elementwise::compare(Operators::eq, lhs, rhs, out_dtype) }
        fn float_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; FLOAT [eq_scalar] {
            elementwise::compare_number(Operators::eq_scalar, lhs, rhs, out_dtype)
        }
        fn float_not_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [ne] { elementwise::compare(Operators::ne, lhs, rhs, out_dtype) }
        fn float_not_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; FLOAT [ne_scalar] {
            elementwise::compare_number(Operators::ne_scalar, lhs, rhs, out_dtype)
        }
        fn float_greater(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [gt] { elementwise::compare(Operators::gt, lhs, rhs, out_dtype) }
        fn float_greater_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; FLOAT [gt_scalar] {
            elementwise::compare_number(Operators::gt_scalar, lhs, rhs, out_dtype)
        }
        fn float_greater_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [ge] { elementwise::compare(Operators::ge, lhs, rhs, out_dtype) }
        fn float_greater_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T;
            FLOAT [ge_scalar] {
                elementwise::compare_number(Operators::ge_scalar, lhs, rhs, out_dtype)
            }
        fn float_lower(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [lt] { elementwise::compare(Operators::lt, lhs, rhs, out_dtype) }
        fn float_lower_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T; FLOAT [lt_scalar] {
            elementwise::compare_number(Operators::lt_scalar, lhs, rhs, out_dtype)
        }
        fn float_lower_equal(lhs: T, rhs: T, out_dtype: BoolDType) -> T;
            FLOAT [le] { elementwise::compare(Operators::le, lhs, rhs, out_dtype) }
        fn float_lower_equal_elem(lhs: T, rhs: Scalar, out_dtype: BoolDType) -> T;
            FLOAT [le_scalar] {
                elementwise::compare_number(Operators::le_scalar, lhs, rhs, out_dtype)
            }
        fn float_sum(tensor: T) -> T;
            FLOAT [reduce_sum] { reduce::whole(reduce::sum, &tensor, tensor.dtype()) }
        fn float_sum_dim(tensor: T, dim: usize) -> T;
            FLOAT [reduce_sum] { reduce::along(reduce::sum, &tensor, &[dim], tensor.dtype()) }
        fn float_sum_dims(tensor: T, dims: &[usize]) -> T; FLOAT [reduce_sum] {
            // No axes would mean all to the operator.
            if dims.is_empty() {
                return tensor;
            }
            reduce::along(reduce::sum, &tensor, dims, tensor.dtype())
        }
        fn float_mean(tensor: T) -> T;
            FLOAT [mean] { reduce::whole(reduce::mean, &tensor, tensor.dtype()) }
        fn float_mean_dim(tensor: T, dim: usize) -> T;
            FLOAT [mean] { reduce::along(reduce::mean, &tensor, &[dim], tensor.dtype()) }
        fn float_prod(tensor: T) -> T;
            FLOAT [prod_dim] { reduce::product(&reduce::flat(tensor), 0) }
        fn float_prod_dim(tensor: T, dim: usize) -> T;
            FLOAT [prod_dim] { reduce::product(&tensor, dim) }
        fn float_cumsum(tensor: T, dim: usize) -> T; FLOAT [cumsum] { reduce::cumsum(tensor, dim) }
        fn float_max(tensor: T) -> T;
            FLOAT [amax] { reduce::whole(Operators::amax, &tensor, tensor.dtype()) }
        fn float_max_dim(tensor: T, dim: usize) -> T;
            FLOAT [amax] { reduce::along(Operators::amax, &tensor, &[dim], tensor.dtype()) }
        fn float_max_dim_with_indices(tensor: T, dim: usize, indices_dtype: IntDType) -> (T, T);
            FLOAT_INDEX [max_dim] {
                reduce::extreme(Operators::max_dim, &tensor, dim, indices_dtype.into())
            }
        fn float_argmax(tensor: T, dim: usize, out_dtype: IntDType) -> T; FLOAT_INDEX [argmax] {
            reduce::index_along(Operators::argmax, &tensor, dim, out_dtype.into())
        }
        fn float_min(tensor: T) -> T;
            FLOAT [amin] { reduce::whole(Operators::amin, &tensor, tensor.dtype()) }
        fn float_min_dim(tensor: T, dim: usize) -> T;
            FLOAT [amin] { reduce::along(Operators::amin, &tensor, &[dim], tensor.dtype()) }
        fn float_min_dim_with_indices(tensor: T, dim: usize, indices_dtype: IntDType) -> (T, T);
            FLOAT_INDEX [min_dim] {
                reduce::extreme(Operators::min_dim, &tensor, dim, indices_dtype.into())
            }
        fn float_argmin(tensor: T, dim: usize, out_dtype: IntDType) -> T; FLOAT_INDEX [argmin] {
            reduce::index_along(Operators::argmin, &tensor, dim, out_dtype.into())
        }
        fn float_any(tensor: T, out_dtype: BoolDType) -> T;
            FLOAT [any, ne_scalar] { reduce::truth(Operators::any, tensor, out_dtype) }
        fn float_any_dim(tensor: T, dim: usize, out_dtype: BoolDType) -> T;
            FLOAT [any, ne_scalar] { reduce::truth_along(Operators::any, tensor, dim, out_dtype) }
        fn float_all(tensor: T, out_dtype: BoolDType) -> T;
            FLOAT [all, ne_scalar] { reduce::truth(Operators::all, tensor, out_dtype) }
        fn float_all_dim(tensor: T, dim: usize, out_dtype: BoolDType) -> T;
            FLOAT [all, ne_scalar] { reduce::truth_along(Operators::all, tensor, dim, out_dtype) }
    }
    fallback {
        fn float_cross(lhs: T, rhs: T, dim: usize) -> T;
        fn float_cumprod(tensor: T, dim: usize) -> T;
        fn float_cummin(tensor: T, dim: usize) -> T;
        fn float_cummax(tensor: T, dim: usize) -> T;
        fn float_tan(tensor: T) -> T;
        fn float_cosh(tensor: T) -> T;
        fn float_sinh(tensor: T) -> T;
        fn float_acos(tensor: T) -> T;
        fn float_acosh(tensor: T) -> T;
        fn float_asin(tensor: T) -> T;
        fn float_asinh(tensor: T) -> T;
        fn float_atan(tensor: T) -> T;
        fn float_atanh(tensor: T) -> T;
        fn float_atan2(lhs: T, rhs: T) -> T;
        fn float_sort(tensor: T, dim: usize, descending: bool) -> T;
        fn float_sort_with_indices(tensor: T, dim: usize, descending: bool,
            indices_dtype: IntDType) -> (T, T);
        fn float_argsort(tensor: T, dim: usize, descending: bool, out_dtype: IntDType) -> T;
        fn float_grid_sample_2d(tensor: T, grid: T, options: GridSampleOptions) -> T;
        fn float_scatter_nd(data: T, indices: T, values: T, reduction: IndexingUpdateOp) -> T;
        fn float_gather_nd(data: T, indices: T) -> T;
    }
    other {
        fn float_from_data(data: TensorData, device: &AscendDevice) -> T {
            T::upload(device, data)
        }

        async fn float_into_data(tensor: T) -> Result<TensorData, ExecutionError> {
            serve::wait(|| tensor.read())
        }
    }
}
