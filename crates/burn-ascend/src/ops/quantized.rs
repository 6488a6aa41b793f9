//! Operations on quantised tensors, which live on the host.

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ops::QTensorOps;
use burn::backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn::backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
};

use super::operations;
use crate::Ascend;
use crate::npu::AscendDevice;
use crate::quantized::AscendQTensor;
use crate::tensor::AscendTensor as T;

operations! {
    QTensorOps;
    native {
    }
    fallback {
        fn quantize(tensor: T, scheme: &QuantScheme,
            qparams: QuantizationParametersPrimitive<Ascend>) -> AscendQTensor;
        fn quantize_dynamic(tensor: T, scheme: &QuantScheme) -> AscendQTensor;
        fn dequantize(tensor: AscendQTensor, dtype: FloatDType) -> T;
        fn q_reshape(tensor: AscendQTensor, shape: Shape) -> AscendQTensor;
        fn q_expand(tensor: AscendQTensor, shape: Shape) -> AscendQTensor;
        fn q_transpose(tensor: AscendQTensor) -> AscendQTensor;
        fn q_swap_dims(tensor: AscendQTensor, dim1: usize, dim2: usize) -> AscendQTensor;
        fn q_permute(tensor: AscendQTensor, axes: &[usize]) -> AscendQTensor;
        fn q_flip(tensor: AscendQTensor, axes: &[usize]) -> AscendQTensor;
        fn q_select(tensor: AscendQTensor, dim: usize, indices: T) -> AscendQTensor;
        fn q_slice(tensor: AscendQTensor, slices: &[Slice]) -> AscendQTensor;
        fn q_gather(dim: usize, tensor: AscendQTensor, indices: T) -> AscendQTensor;
        fn q_repeat_dim(tensor: AscendQTensor, dim: usize, times: usize) -> AscendQTensor;
        fn q_add(lhs: AscendQTensor, rhs: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_add_scalar(lhs: AscendQTensor, rhs: Scalar) -> TensorPrimitive<Ascend>;
        fn q_clamp_min(tensor: AscendQTensor, min: Scalar) -> TensorPrimitive<Ascend>;
        fn q_clamp_max(tensor: AscendQTensor, max: Scalar) -> TensorPrimitive<Ascend>;
        fn q_clamp(tensor: AscendQTensor, min: Scalar, max: Scalar) -> TensorPrimitive<Ascend>;
        fn q_sub(lhs: AscendQTensor, rhs: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_sub_scalar(lhs: AscendQTensor, rhs: Scalar) -> TensorPrimitive<Ascend>;
        fn q_mul(lhs: AscendQTensor, rhs: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_mul_scalar(lhs: AscendQTensor, rhs: Scalar) -> TensorPrimitive<Ascend>;
        fn q_div(lhs: AscendQTensor, rhs: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_div_scalar(lhs: AscendQTensor, rhs: Scalar) -> TensorPrimitive<Ascend>;
        fn q_matmul(lhs: TensorPrimitive<Ascend>,
            rhs: TensorPrimitive<Ascend>) -> TensorPrimitive<Ascend>;
        fn q_neg(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_recip(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_sum(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_sum_dim(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_prod(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_prod_dim(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_mean(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_mean_dim(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_cumsum(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_cumprod(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_cummin(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_cummax(tensor: AscendQTensor, dim: usize) -> TensorPrimitive<Ascend>;
        fn q_exp(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_log(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_log1p(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_powf(lhs: AscendQTensor, rhs: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_powi(lhs: AscendQTensor, rhs: T) -> TensorPrimitive<Ascend>;
        fn q_powi_scalar(lhs: AscendQTensor, rhs: Scalar) -> TensorPrimitive<Ascend>;
        fn q_powf_scalar(tensor: AscendQTensor, value: Scalar) -> TensorPrimitive<Ascend>;
        fn q_sqrt(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_abs(tensor: AscendQTensor) -> AscendQTensor;
        fn q_cos(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_sin(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_tan(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_cosh(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_sinh(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_tanh(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_erf(tensor: AscendQTensor) -> TensorPrimitive<Ascend>;
        fn q_cat(tensors: Vec<AscendQTensor>, dim: usize) -> AscendQTensor;
        fn q_argmax(tensor: AscendQTensor, dim: usize, out_dtype: IntDType) -> T;
        fn q_argtopk(tensor: AscendQTensor, dim: usize, k: usize, out_dtype: IntDType) -> T;
        fn q_topk(tensor: AscendQTensor, dim: usize, k: usize) -> AscendQTensor;
        fn q_topk_with_indices(tensor: AscendQTensor, dim: usize, k: usize,
            out_dtype: IntDType) -> (AscendQTensor, T);
        fn q_argmin(tensor: AscendQTensor, dim: usize, out_dtype: IntDType) -> T;
        fn q_max(tensor: AscendQTensor) -> AscendQTensor;
        fn q_max_dim(tensor: AscendQTensor, dim: usize) -> AscendQTensor;
        fn q_max_dim_with_indices(tensor: AscendQTensor, dim: usize,
            out_dtype: IntDType) -> (AscendQTensor, T);
        fn q_min(tensor: AscendQTensor) -> AscendQTensor;
        fn q_min_dim(tensor: AscendQTensor, dim: usize) -> AscendQTensor;
        fn q_min_dim_with_indices(tensor: AscendQTensor, dim: usize,
            out_dtype: IntDType) -> (AscendQTensor, T);
        fn q_max_abs(tensor: AscendQTensor) -> AscendQTensor;
        fn q_max_abs_dim(tensor: AscendQTensor, dim: usize) -> AscendQTensor;
        fn q_any(tensor: AscendQTensor, out_dtype: BoolDType) -> T;
        fn q_any_dim(tensor: AscendQTensor, dim: usize, out_dtype: BoolDType) -> T;
        fn q_all(tensor: AscendQTensor, out_dtype: BoolDType) -> T;
        fn q_all_dim(tensor: AscendQTensor, dim: usize, out_dtype: BoolDType) -> T;
        fn q_sort(tensor: AscendQTensor, dim: usize, descending: bool) -> AscendQTensor;
        fn q_sort_with_indices(tensor: AscendQTensor, dim: usize, descending: bool,
            out_dtype: IntDType) -> (AscendQTensor, T);
        fn q_argsort(tensor: AscendQTensor, dim: usize, descending: bool, out_dtype: IntDType) -> T;
    }
    other {
        fn q_from_data(data: TensorData, device: &AscendDevice) -> AscendQTensor {
            AscendQTensor {
                host: Flex::q_from_data(data, &FlexDevice),
                device: *device,
                failure: None,
            }
        }
        fn q_to_device(tensor: AscendQTensor, device: &AscendDevice) -> AscendQTensor {
            AscendQTensor {
                device: *device,
                ..tensor
            }
        }

        async fn q_into_data(tensor: AscendQTensor) -> Result<TensorData, ExecutionError> {
            match tensor.failure {
                Some(error) => Err(error),
                None => Flex::q_into_data(tensor.host).await,
            }
        }
    }
}
