//! Operations on float tensors.

use super::{operations, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};

operations! {
    FloatTensorOps;
    views {
        fn float_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::reshape(tensor, &shape)
        }
        fn float_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor {
            views::swap(&tensor, dim1, dim2)
        }
        fn float_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor {
            views::permute(&tensor, axes)
        }
        fn float_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::expand(&tensor, &shape)
        }
        fn float_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor {
            views::unfold(&tensor, dim, size, step)
        }
        fn float_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }
        fn float_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor {
            tensor.moved(device)
        }
    }
    fallback {
        fn float_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor;
        fn float_random(shape: Shape, distribution: Distribution, device: &AscendDevice, dtype: FloatDType) -> AscendTensor;
        fn float_into_int(tensor: AscendTensor, out_dtype: IntDType) -> AscendTensor;
        fn float_empty(shape: Shape, device: &AscendDevice, dtype: FloatDType) -> AscendTensor;
        fn float_add(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_add_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn float_sub(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_sub_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn float_mul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_mul_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn float_div(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_div_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn float_remainder(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_remainder_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn float_matmul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_cross(lhs: AscendTensor, rhs: AscendTensor, dim: usize) -> AscendTensor;
        fn float_recip(tensor: AscendTensor) -> AscendTensor;
        fn float_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor;
        fn float_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor;
        fn float_scatter(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor;
        fn float_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor;
        fn float_select_assign(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor;
        fn float_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor;
        fn float_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn float_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor;
        fn float_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn float_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn float_greater(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn float_greater_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn float_greater_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn float_greater_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn float_lower(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn float_lower_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn float_lower_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn float_lower_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn float_sum(tensor: AscendTensor) -> AscendTensor;
        fn float_sum_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_mean_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cumsum(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cumprod(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cummin(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cummax(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn float_cast(tensor: AscendTensor, dtype: FloatDType) -> AscendTensor;
        fn float_exp(tensor: AscendTensor) -> AscendTensor;
        fn float_log(tensor: AscendTensor) -> AscendTensor;
        fn float_log1p(tensor: AscendTensor) -> AscendTensor;
        fn float_powf(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_powf_scalar_impl(tensor: AscendTensor, value: Scalar) -> AscendTensor;
        fn float_sqrt(tensor: AscendTensor) -> AscendTensor;
        fn float_abs(tensor: AscendTensor) -> AscendTensor;
        fn float_cos(tensor: AscendTensor) -> AscendTensor;
        fn float_sin(tensor: AscendTensor) -> AscendTensor;
        fn float_tan(tensor: AscendTensor) -> AscendTensor;
        fn float_cosh(tensor: AscendTensor) -> AscendTensor;
        fn float_sinh(tensor: AscendTensor) -> AscendTensor;
        fn float_tanh(tensor: AscendTensor) -> AscendTensor;
        fn float_acos(tensor: AscendTensor) -> AscendTensor;
        fn float_acosh(tensor: AscendTensor) -> AscendTensor;
        fn float_asin(tensor: AscendTensor) -> AscendTensor;
        fn float_asinh(tensor: AscendTensor) -> AscendTensor;
        fn float_atan(tensor: AscendTensor) -> AscendTensor;
        fn float_atanh(tensor: AscendTensor) -> AscendTensor;
        fn float_atan2(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn float_round(tensor: AscendTensor) -> AscendTensor;
        fn float_floor(tensor: AscendTensor) -> AscendTensor;
        fn float_ceil(tensor: AscendTensor) -> AscendTensor;
        fn float_trunc(tensor: AscendTensor) -> AscendTensor;
        fn float_erf(tensor: AscendTensor) -> AscendTensor;
        fn float_argmax(tensor: AscendTensor, dim: usize, out_dtype: IntDType) -> AscendTensor;
        fn float_argmin(tensor: AscendTensor, dim: usize, out_dtype: IntDType) -> AscendTensor;
    }
    other {
        async fn float_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }
    }
}
