//! Operations on float tensors.

use super::matmul::matmul;
use super::{elementwise, index, movement, operations, reduce, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::ops::{FloatTensorOps, GridSampleOptions};
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use rope_ascend::aclnn::Operators;

operations! {
    FloatTensorOps;
    native {
        fn float_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [copy] {
            views::reshape(tensor, &shape)
        }
        fn float_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor; ALL [] {
            views::swap(&tensor, dim1, dim2)
        }
        fn float_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [] {
            views::permute(&tensor, axes)
        }
        fn float_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor; ALL [] {
            views::expand(&tensor, &shape)
        }
        fn float_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor; ALL [] {
            views::unfold(&tensor, dim, size, step)
        }
        fn float_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor; ALL [flip] {
            movement::slice(&tensor, slices)
        }
        fn float_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor; ALL [copy, flip] {
            movement::slice_assign(tensor, slices, value)
        }
        fn float_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor; ALL [] {
            tensor.moved(device)
        }
        fn float_empty(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> AscendTensor; ALL [] {
            AscendTensor::empty(device, shape, dtype.into())
        }
        fn float_repeat_dim(tensor: AscendTensor, dim: usize, times: usize) -> AscendTensor; ALL [repeat] {
            movement::repeat(tensor, dim, times)
        }
        fn float_cat(tensors: Vec<AscendTensor>, dim: usize) -> AscendTensor; ALL [cat, copy] {
            movement::cat(tensors, dim)
        }
        fn float_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor; ALL [flip] {
            movement::flip(tensor, axes)
        }
        fn float_random(shape: Shape, distribution: Distribution, device: &AscendDevice, dtype: FloatDType) -> AscendTensor; FLOAT [uniform, normal, bernoulli] {
            movement::random(device, shape, distribution, dtype.into())
        }
        fn float_zeros(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> AscendTensor; ALL [] {
            movement::zeros(device, shape, dtype.into())
        }
        fn float_ones(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> AscendTensor; FLOAT [fill] {
            movement::full(device, shape, Scalar::Float(1.0), dtype.into())
        }
        fn float_full(shape: Shape, fill_value: Scalar, device: &AscendDevice, dtype: FloatDType) -> AscendTensor; FLOAT [fill] {
            movement::full(device, shape, fill_value, dtype.into())
        }
        fn float_into_int(tensor: AscendTensor, out_dtype: IntDType) -> AscendTensor; FLOAT_INDEX [cast] {
            elementwise::cast(tensor, out_dtype.into())
        }
        fn float_cast(tensor: AscendTensor, dtype: FloatDType) -> AscendTensor; FLOAT [cast] {
            elementwise::cast(tensor, dtype.into())
        }
        fn float_add(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [add] {
            elementwise::binary(elementwise::plus, lhs, rhs)
        }
        fn float_sub(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [sub] {
            elementwise::binary(elementwise::minus, lhs, rhs)
        }
        fn float_mul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [mul] {
            elementwise::binary(Operators::mul, lhs, rhs)
        }
        fn float_div(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [div] {
            elementwise::binary(Operators::div, lhs, rhs)
        }
        fn float_remainder(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [remainder] {
            elementwise::binary(Operators::remainder, lhs, rhs)
        }
        fn float_powf(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [pow] {
            elementwise::binary(Operators::pow, lhs, rhs)
        }
        fn float_add_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; FLOAT [adds] {
            elementwise::by_number(elementwise::plus_number, lhs, rhs)
        }
        fn float_sub_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; FLOAT [adds] {
            elementwise::by_number(elementwise::plus_number, lhs, Scalar::Float(-rhs.elem::<f64>()))
        }
        fn float_mul_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; FLOAT [muls] {
            elementwise::by_number(Operators::muls, lhs, rhs)
        }
        fn float_div_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; FLOAT [divs] {
            elementwise::by_number(Operators::divs, lhs, rhs)
        }
        fn float_remainder_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor; FLOAT [remainder_scalar] {
            elementwise::by_number(Operators::remainder_scalar, lhs, rhs)
        }
        fn float_powf_scalar_impl(tensor: AscendTensor, value: Scalar) -> AscendTensor; FLOAT [pow_scalar] {
            elementwise::by_number(Operators::pow_scalar, tensor, value)
        }
        fn float_clamp_min(tensor: AscendTensor, min: Scalar) -> AscendTensor; FLOAT [clamp] {
            elementwise::clamp(tensor, Some(min), None)
        }
        fn float_clamp_max(tensor: AscendTensor, max: Scalar) -> AscendTensor; FLOAT [clamp] {
            elementwise::clamp(tensor, None, Some(max))
        }
        fn float_clamp(tensor: AscendTensor, min: Scalar, max: Scalar) -> AscendTensor; FLOAT [clamp] {
            elementwise::clamp(tensor, Some(min), Some(max))
        }
        fn float_matmul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor; FLOAT [mm, batch_mm] {
            matmul(lhs, rhs)
        }
        fn float_neg(tensor: AscendTensor) -> AscendTensor; FLOAT [neg] {
            elementwise::unary(Operators::neg, tensor)
        }
        fn float_recip(tensor: AscendTensor) -> AscendTensor; FLOAT [reciprocal] {
            elementwise::unary(Operators::reciprocal, tensor)
        }
        fn float_exp(tensor: AscendTensor) -> AscendTensor; FLOAT [exp] {
            elementwise::unary(Operators::exp, tensor)
        }
        fn float_log(tensor: AscendTensor) -> AscendTensor; FLOAT [log] {
            elementwise::unary(Operators::log, tensor)
        }
        fn float_log1p(tensor: AscendTensor) -> AscendTensor; FLOAT [log1p] {
            elementwise::unary(Operators::log1p, tensor)
        }
        fn float_sqrt(tensor: AscendTensor) -> AscendTensor; FLOAT [sqrt] {
            elementwise::unary(Operators::sqrt, tensor)
        }
        fn float_abs(tensor: AscendTensor) -> AscendTensor; FLOAT [abs] {
            elementwise::unary(Operators::abs, tensor)
        }
        fn float_cos(tensor: AscendTensor) -> AscendTensor; FLOAT [cos] {
            elementwise::unary(Operators::cos, tensor)
        }
        fn float_sin(tensor: AscendTensor) -> AscendTensor; FLOAT [sin] {
            elementwise::unary(Operators::sin, tensor)
        }
        fn float_tanh(tensor: AscendTensor) -> AscendTensor; FLOAT [tanh] {
            elementwise::unary(Operators::tanh, tensor)
        }
        fn float_round(tensor: AscendTensor) -> AscendTensor; FLOAT [round] {
            elementwise::unary(Operators::round, tensor)
        }
        fn float_floor(tensor: AscendTensor) -> AscendTensor; FLOAT [floor] {
            elementwise::unary(Operators::floor, tensor)
        }
        fn float_ceil(tensor: AscendTensor) -> AscendTensor; FLOAT [ceil] {
            elementwise::unary(Operators::ceil, tensor)
        }
        fn float_sign(tensor: AscendTensor) -> AscendTensor; FLOAT [sign] {
            elementwise::unary(Operators::sign, tensor)
        }
        fn float_erf(tensor: AscendTensor) -> AscendTensor; FLOAT [erf, cast] {
            elementwise::unary_in_f32(Operators::erf, DType::BF16, tensor)
        }
        fn float_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor; FLOAT_INDEX [gather] {
            index::gather(tensor, dim, &indices)
        }
        fn float_scatter(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor; FLOAT_INDEX [scatter_add, scatter] {
            index::scatter(tensor, dim, indices, value, update)
        }
        fn float_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor; FLOAT_INDEX [index_select] {
            index::select(tensor, dim, indices)
        }
        fn float_select_assign(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor; FLOAT_INDEX [index_add, scatter] {
            index::select_assign(tensor, dim, indices, value, update)
        }
        fn float_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor; FLOAT_BOOL [select_where] {
            elementwise::mask_where(tensor, mask, value)
        }
        fn float_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor; FLOAT_BOOL [masked_fill, copy] {
            elementwise::mask_fill(tensor, &mask, value)
        }
        fn float_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [eq] {
            elementwise::compare(Operators::eq, &lhs, &rhs, out_dtype)
        }
        fn float_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [eq_scalar] {
            elementwise::compare_number(Operators::eq_scalar, &lhs, rhs, out_dtype)
        }
        fn float_not_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [ne] {
            elementwise::compare(Operators::ne, &lhs, &rhs, out_dtype)
        }
        fn float_not_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [ne_scalar] {
            elementwise::compare_number(Operators::ne_scalar, &lhs, rhs, out_dtype)
        }
        fn float_greater(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [gt] {
            elementwise::compare(Operators::gt, &lhs, &rhs, out_dtype)
        }
        fn float_greater_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [gt_scalar] {
            elementwise::compare_number(Operators::gt_scalar, &lhs, rhs, out_dtype)
        }
        fn float_greater_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [ge] {
            elementwise::compare(Operators::ge, &lhs, &rhs, out_dtype)
        }
        fn float_greater_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [ge_scalar] {
            elementwise::compare_number(Operators::ge_scalar, &lhs, rhs, out_dtype)
        }
        fn float_lower(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [lt] {
            elementwise::compare(Operators::lt, &lhs, &rhs, out_dtype)
        }
        fn float_lower_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [lt_scalar] {
            elementwise::compare_number(Operators::lt_scalar, &lhs, rhs, out_dtype)
        }
        fn float_lower_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [le] {
            elementwise::compare(Operators::le, &lhs, &rhs, out_dtype)
        }
        fn float_lower_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor; FLOAT [le_scalar] {
            elementwise::compare_number(Operators::le_scalar, &lhs, rhs, out_dtype)
        }
        fn float_sum(tensor: AscendTensor) -> AscendTensor; FLOAT [reduce_sum] {
            reduce::whole(reduce::sum, &tensor, tensor.dtype())
        }
        fn float_sum_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [reduce_sum] {
            reduce::along(reduce::sum, &tensor, &[dim], tensor.dtype())
        }
        fn float_sum_dims(tensor: AscendTensor, dims: &[usize]) -> AscendTensor; FLOAT [reduce_sum] {
            // No axes would mean all to the operator.
            if dims.is_empty() {
                return tensor;
            }
            reduce::along(reduce::sum, &tensor, dims, tensor.dtype())
        }
        fn float_mean(tensor: AscendTensor) -> AscendTensor; FLOAT [mean] {
            reduce::whole(reduce::mean, &tensor, tensor.dtype())
        }
        fn float_mean_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [mean] {
            reduce::along(reduce::mean, &tensor, &[dim], tensor.dtype())
        }
        fn float_prod(tensor: AscendTensor) -> AscendTensor; FLOAT [prod_dim] {
            reduce::product(&reduce::flat(tensor), 0)
        }
        fn float_prod_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [prod_dim] {
            reduce::product(&tensor, dim)
        }
        fn float_cumsum(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [cumsum] {
            reduce::cumsum(&tensor, dim)
        }
        fn float_max(tensor: AscendTensor) -> AscendTensor; FLOAT [amax] {
            reduce::whole(Operators::amax, &tensor, tensor.dtype())
        }
        fn float_max_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [amax] {
            reduce::along(Operators::amax, &tensor, &[dim], tensor.dtype())
        }
        fn float_max_dim_with_indices(tensor: AscendTensor, dim: usize, indices_dtype: IntDType) -> (AscendTensor, AscendTensor); FLOAT_INDEX [max_dim] {
            reduce::extreme(Operators::max_dim, &tensor, dim, indices_dtype.into())
        }
        fn float_argmax(tensor: AscendTensor, dim: usize, out_dtype: IntDType) -> AscendTensor; FLOAT_INDEX [argmax] {
            reduce::place(Operators::argmax, &tensor, dim, out_dtype.into())
        }
        fn float_min(tensor: AscendTensor) -> AscendTensor; FLOAT [amin] {
            reduce::whole(Operators::amin, &tensor, tensor.dtype())
        }
        fn float_min_dim(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [amin] {
            reduce::along(Operators::amin, &tensor, &[dim], tensor.dtype())
        }
        fn float_min_dim_with_indices(tensor: AscendTensor, dim: usize, indices_dtype: IntDType) -> (AscendTensor, AscendTensor); FLOAT_INDEX [min_dim] {
            reduce::extreme(Operators::min_dim, &tensor, dim, indices_dtype.into())
        }
        fn float_argmin(tensor: AscendTensor, dim: usize, out_dtype: IntDType) -> AscendTensor; FLOAT_INDEX [argmin] {
            reduce::place(Operators::argmin, &tensor, dim, out_dtype.into())
        }
        fn float_any(tensor: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [any, ne_scalar] {
            reduce::truth(Operators::any, tensor, out_dtype)
        }
        fn float_any_dim(tensor: AscendTensor, dim: usize, out_dtype: BoolDType) -> AscendTensor; FLOAT [any, ne_scalar] {
            reduce::truth_along(Operators::any, tensor, dim, out_dtype)
        }
        fn float_all(tensor: AscendTensor, out_dtype: BoolDType) -> AscendTensor; FLOAT [all, ne_scalar] {
            reduce::truth(Operators::all, tensor, out_dtype)
        }
        fn float_all_dim(tensor: AscendTensor, dim: usize, out_dtype: BoolDType) -> AscendTensor; FLOAT [all, ne_scalar] {
            reduce::truth_along(Operators::all, tensor, dim, out_dtype)
        }
    }
    fallback {
        fn float_cross(lhs: AscendTensor, rhs: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cumprod(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cummin(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cummax(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_tan(tensor: AscendTensor) -> AscendTensor;
        fn float_cosh(tensor: AscendTensor) -> AscendTensor;
        fn float_sinh(tensor: AscendTensor) -> AscendTensor;
        fn float_acos(tensor: AscendTensor) -> AscendTensor;
        fn float_acosh(tensor: AscendTensor) -> AscendTensor;
        fn float_asin(tensor: AscendTensor) -> AscendTensor;
        fn float_asinh(tensor: AscendTensor) -> AscendTensor;
        fn float_atan(tensor: AscendTensor) -> AscendTensor;
        fn float_atanh(tensor: AscendTensor) -> AscendTensor;
        fn float_atan2(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_trunc(tensor: AscendTensor) -> AscendTensor;
        fn float_sort(tensor: AscendTensor, dim: usize, descending: bool) -> AscendTensor;
        fn float_sort_with_indices(tensor: AscendTensor, dim: usize, descending: bool, indices_dtype: IntDType) -> (AscendTensor, AscendTensor);
        fn float_argsort(tensor: AscendTensor, dim: usize, descending: bool, out_dtype: IntDType) -> AscendTensor;
        fn float_grid_sample_2d(tensor: AscendTensor, grid: AscendTensor, options: GridSampleOptions) -> AscendTensor;
        fn float_scatter_nd(data: AscendTensor, indices: AscendTensor, values: AscendTensor, reduction: IndexingUpdateOp) -> AscendTensor;
        fn float_gather_nd(data: AscendTensor, indices: AscendTensor) -> AscendTensor;
    }
    other {
        fn float_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }

        async fn float_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }
    }
}
