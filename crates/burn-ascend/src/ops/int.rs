//! Operations on int tensors.

use super::{operations, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::ops::IntTensorOps;
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};

operations! {
    IntTensorOps;
    views {
        fn int_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::reshape(tensor, &shape)
        }
        fn int_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor {
            views::swap(&tensor, dim1, dim2)
        }
        fn int_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor {
            views::permute(&tensor, axes)
        }
        fn int_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::expand(&tensor, &shape)
        }
        fn int_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor {
            views::unfold(&tensor, dim, size, step)
        }
        fn int_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }
        fn int_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor {
            tensor.moved(device)
        }
    }
    fallback {
        fn int_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor;
        fn int_empty(shape: Shape, device: &AscendDevice, dtype: IntDType) -> AscendTensor;
        fn int_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor;
        fn int_into_float(tensor: AscendTensor, out_dtype: FloatDType) -> AscendTensor;
        fn int_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn int_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor;
        fn int_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor;
        fn int_scatter(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor;
        fn int_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor;
        fn int_select_assign(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor, update: IndexingUpdateOp) -> AscendTensor;
        fn int_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn int_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn int_greater(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn int_greater_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn int_greater_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn int_greater_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn int_lower(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn int_lower_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn int_lower_equal(lhs: AscendTensor, rhs: AscendTensor, out_dtype: BoolDType) -> AscendTensor;
        fn int_lower_equal_elem(lhs: AscendTensor, rhs: Scalar, out_dtype: BoolDType) -> AscendTensor;
        fn int_add(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_add_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_sub(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_sub_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_mul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_mul_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_div(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_div_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_remainder(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_remainder_scalar(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn int_matmul(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn int_sum(tensor: AscendTensor) -> AscendTensor;
        fn int_sum_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_prod(tensor: AscendTensor) -> AscendTensor;
        fn int_prod_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_mean_dim(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cumsum(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cumprod(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cummin(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_cummax(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_argmax(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_argmin(tensor: AscendTensor, dim: usize) -> AscendTensor;
        fn int_abs(tensor: AscendTensor) -> AscendTensor;
        fn int_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor;
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
        fn int_cast(tensor: AscendTensor, dtype: IntDType) -> AscendTensor;
    }
    other {
        async fn int_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }
    }
}
