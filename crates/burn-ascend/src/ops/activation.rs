//! Activation functions.

use super::{elementwise, operations, reduce};
use crate::tensor::AscendTensor;
use burn::backend::ops::ActivationOps;
use rope_ascend::aclnn::Operators;

operations! {
    ActivationOps;
    native {
        fn relu(tensor: AscendTensor) -> AscendTensor; FLOAT [relu] {
            elementwise::unary(Operators::relu, tensor)
        }
        fn gelu(tensor: AscendTensor) -> AscendTensor; FLOAT [gelu] {
            elementwise::unary(elementwise::gelu, tensor)
        }
        fn gelu_backward(x: AscendTensor, grad: AscendTensor) -> AscendTensor; FLOAT [gelu_backward] {
            elementwise::paired(elementwise::gelu_backward, &grad, &x)
        }
        fn sigmoid(tensor: AscendTensor) -> AscendTensor; FLOAT [sigmoid] {
            elementwise::unary(Operators::sigmoid, tensor)
        }
        fn sigmoid_backward(output: AscendTensor, grad: AscendTensor) -> AscendTensor; FLOAT [sigmoid_backward] {
            elementwise::paired(Operators::sigmoid_backward, &grad, &output)
        }
        fn softmax(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [softmax] {
            reduce::softmax(Operators::softmax, tensor, dim)
        }
        fn log_softmax(tensor: AscendTensor, dim: usize) -> AscendTensor; FLOAT [log_softmax] {
            reduce::softmax(Operators::log_softmax, tensor, dim)
        }
    }
    fallback {

    }
    other {

    }
}
