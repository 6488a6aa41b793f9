//! Operations on bool tensors.

use super::{operations, views};
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;
use burn::backend::ops::BoolTensorOps;
use burn::backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};

operations! {
    BoolTensorOps;
    views {
        fn bool_reshape(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::reshape(tensor, &shape)
        }
        fn bool_swap_dims(tensor: AscendTensor, dim1: usize, dim2: usize) -> AscendTensor {
            views::swap(&tensor, dim1, dim2)
        }
        fn bool_permute(tensor: AscendTensor, axes: &[usize]) -> AscendTensor {
            views::permute(&tensor, axes)
        }
        fn bool_expand(tensor: AscendTensor, shape: Shape) -> AscendTensor {
            views::expand(&tensor, &shape)
        }
        fn bool_unfold(tensor: AscendTensor, dim: usize, size: usize, step: usize) -> AscendTensor {
            views::unfold(&tensor, dim, size, step)
        }
        fn bool_from_data(data: TensorData, device: &AscendDevice) -> AscendTensor {
            AscendTensor::upload(device, data)
        }
        fn bool_to_device(tensor: AscendTensor, device: &AscendDevice) -> AscendTensor {
            tensor.moved(device)
        }
    }
    fallback {
        fn bool_slice(tensor: AscendTensor, slices: &[Slice]) -> AscendTensor;
        fn bool_empty(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor;
        fn bool_zeros(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor;
        fn bool_ones(shape: Shape, device: &AscendDevice, dtype: BoolDType) -> AscendTensor;
        fn bool_into_int(tensor: AscendTensor, out_dtype: IntDType) -> AscendTensor;
        fn bool_into_float(tensor: AscendTensor, out_dtype: FloatDType) -> AscendTensor;
        fn bool_slice_assign(tensor: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor;
        fn bool_mask_where(tensor: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn bool_mask_fill(tensor: AscendTensor, mask: AscendTensor, value: Scalar) -> AscendTensor;
        fn bool_gather(dim: usize, tensor: AscendTensor, indices: AscendTensor) -> AscendTensor;
        fn bool_scatter_or(dim: usize, tensor: AscendTensor, indices: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn bool_select(tensor: AscendTensor, dim: usize, indices: AscendTensor) -> AscendTensor;
        fn bool_select_or(tensor: AscendTensor, dim: usize, indices: AscendTensor, value: AscendTensor) -> AscendTensor;
        fn bool_equal(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bool_equal_elem(lhs: AscendTensor, rhs: Scalar) -> AscendTensor;
        fn bool_not(tensor: AscendTensor) -> AscendTensor;
        fn bool_and(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bool_or(lhs: AscendTensor, rhs: AscendTensor) -> AscendTensor;
        fn bool_flip(tensor: AscendTensor, axes: &[usize]) -> AscendTensor;
    }
    other {
        async fn bool_into_data(tensor: AscendTensor) -> Result<TensorData, ExecutionError> {
            tensor.read()
        }
    }
}
