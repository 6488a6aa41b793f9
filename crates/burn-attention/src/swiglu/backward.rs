//! The backward, for autodiff over any backend: the node keeps gate and up.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::SwiGluOps;

impl<B: SwiGluOps, C: CheckpointStrategy> SwiGluOps for Autodiff<B, C> {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let (tensors, nodes) = parts([gate, up]);
        node::<B, C, _, _>(
            nodes,
            tensors,
            |[gate, up]| B::swiglu_forward(gate, up),
            |[gate, up], gradient, _| {
                let (dgate, dup) = B::swiglu_backward(gate, up, gradient);
                [Some(dgate), Some(dup)]
            },
        )
    }
}
