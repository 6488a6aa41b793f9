//! The backward, for autodiff over any backend: the node keeps x.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::GeluOps;

impl<B: GeluOps, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn gelu_forward(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([x], nodes) = parts([x]);
        node::<B, C, _, _>(nodes, x, B::gelu_forward, |x, gradient, _| {
            [Some(B::gelu_gradient(x, gradient))]
        })
    }

    fn gelu_tanh_forward(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([x], nodes) = parts([x]);
        node::<B, C, _, _>(nodes, x, B::gelu_tanh_forward, |x, gradient, _| {
            [Some(B::gelu_tanh_gradient(x, gradient))]
        })
    }
}
