//! Activation functions.

use burn::backend::ops::ActivationOps;
use rope_ascend::aclnn::Operators;

use super::{elementwise, operations, reduce};
use crate::tensor::AscendTensor as T;

operations! {
    ActivationOps;
    native {
        fn relu(tensor: T) -> T; FLOAT [relu] { elementwise::unary(Operators::relu, tensor) }
        fn gelu(tensor: T) -> T; FLOAT [gelu] { elementwise::unary(elementwise::gelu, tensor) }
        fn gelu_backward(x: T, grad: T) -> T;
            FLOAT [gelu_backward] { elementwise::paired(elementwise::gelu_backward, &grad, &x) }
        fn sigmoid(tensor: T) -> T;
            FLOAT [sigmoid] { elementwise::unary(Operators::sigmoid, tensor) }
        fn sigmoid_backward(output: T, grad: T) -> T; FLOAT [sigmoid_backward] {
            elementwise::paired(Operators::sigmoid_backward, &grad, &output)
        }
        fn softmax(tensor: T, dim: usize) -> T;
            FLOAT [softmax] { reduce::softmax(Operators::softmax, tensor, dim) }
        fn log_softmax(tensor: T, dim: usize) -> T;
            FLOAT [log_softmax] { reduce::softmax(Operators::log_softmax, tensor, dim) }
    }
    fallback {}
    other {}
}
