//! The backward, for autodiff over any backend.
//!
//! The node keeps the hidden states, the weight and one number for each row; the logits are
//! computed again. It is compute-bound, as attention's is.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;

use super::ops::{CrossEntropyOp, CrossEntropyOps};
use crate::backward::register;

#[derive(Debug)]
struct CrossEntropyBackward;

impl<B: CrossEntropyOps> Backward<B, 2> for CrossEntropyBackward {
    /// Hidden, weight and log_sum_exp.
    type State = ([FloatTensor<B>; 3], CrossEntropyOp);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let ([hidden, weight, log_sum_exp], op) = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let [of_hidden, of_weight] = ops.parents.map(|node| node.map(|node| node.id));
        let wanted = of_weight.is_some();
        let (dhidden, dweight) =
            B::cross_entropy_backward(hidden, weight, log_sum_exp, gradient, wanted, op);
        register::<B>(grads, [(of_hidden, dhidden)].into_iter());
        register::<B>(
            grads,
            dweight.map(|dweight| (of_weight, dweight)).into_iter(),
        );
    }
}

impl<B: CrossEntropyOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn cross_entropy_forward(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: CrossEntropyOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ((hidden, hidden_node), (weight, weight_node)) =
            (hidden.into_parts(), weight.into_parts());
        let (loss, log_sum_exp) =
            B::cross_entropy_forward(hidden.clone(), weight.clone(), op.clone());
        let kept = [hidden, weight, log_sum_exp.clone()];
        let nodes = [hidden_node, weight_node];
        let loss = match Backward::<B, 2>::prepare::<C>(CrossEntropyBackward, nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((kept, op), loss),
            OpsKind::UnTracked(prep) => prep.finish(loss),
        };
        (loss, Self::from_inner(log_sum_exp))
    }
}
