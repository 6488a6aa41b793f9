//! Operations on quantised tensors, which live on the host.

use super::operations;
use crate::Ascend;
use crate::npu::AscendDevice;
use crate::quantized::AscendQTensor;
use crate::tensor::AscendTensor;
use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ops::QTensorOps;
use burn::backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn::backend::{ExecutionError, FloatDType, Shape, TensorData};

operations! {
    QTensorOps;
    views {
        fn q_from_data(data: TensorData, device: &AscendDevice) -> AscendQTensor {
            AscendQTensor {
                host: Flex::q_from_data(data, &FlexDevice),
                device: *device,
            }
        }
        fn q_to_device(tensor: AscendQTensor, device: &AscendDevice) -> AscendQTensor {
            AscendQTensor {
                device: *device,
                ..tensor
            }
        }
    }
    fallback {
        fn quantize(tensor: AscendTensor, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Ascend>) -> AscendQTensor;
        fn dequantize(tensor: AscendQTensor, dtype: FloatDType) -> AscendTensor;
        fn q_reshape(tensor: AscendQTensor, shape: Shape) -> AscendQTensor;
        fn q_swap_dims(tensor: AscendQTensor, dim1: usize, dim2: usize) -> AscendQTensor;
        fn q_permute(tensor: AscendQTensor, axes: &[usize]) -> AscendQTensor;
        fn q_flip(tensor: AscendQTensor, axes: &[usize]) -> AscendQTensor;
    }
    other {
        async fn q_into_data(tensor: AscendQTensor) -> Result<TensorData, ExecutionError> {
            Flex::q_into_data(tensor.host).await
        }
    }
}
