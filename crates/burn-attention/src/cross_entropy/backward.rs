//! The backward, for autodiff over any backend.
//!
//! The node keeps the hidden states, the weight and one number per row; the logits are recomputed.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::{CrossEntropyOp, CrossEntropyOps};

impl<B: CrossEntropyOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn cross_entropy_forward(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: CrossEntropyOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ([hidden, weight], nodes) = parts([hidden, weight]);
        let (loss, log_sum_exp) =
            B::cross_entropy_forward(hidden.clone(), weight.clone(), op.clone());
        let loss = node::<B, C, _, _>(
            nodes,
            ([hidden, weight, log_sum_exp.clone()], op),
            |_| loss,
            |([hidden, weight, log_sum_exp], op), gradient, [_, wanted]| {
                let (dhidden, dweight) =
                    B::cross_entropy_backward(hidden, weight, log_sum_exp, gradient, wanted, op);
                [Some(dhidden), dweight]
            },
        );
        (loss, Self::from_inner(log_sum_exp))
    }
}
