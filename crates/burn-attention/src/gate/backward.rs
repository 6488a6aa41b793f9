//! The backward, for autodiff over any backend: the node keeps gate and up.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;

use super::ops::SwiGluOps;
use crate::backward::register;

#[derive(Debug)]
struct SwiGluBackward;

impl<B: SwiGluOps> Backward<B, 2> for SwiGluBackward {
    /// gate and up.
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [gate, up] = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let (dgate, dup) = B::swiglu_backward(gate, up, gradient);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register::<B>(grads, parents.into_iter().zip([dgate, dup]));
    }
}

impl<B: SwiGluOps, C: CheckpointStrategy> SwiGluOps for Autodiff<B, C> {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((gate, gate_node), (up, up_node)) = (gate.into_parts(), up.into_parts());
        match Backward::<B, 2>::prepare::<C>(SwiGluBackward, [gate_node, up_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let out = B::swiglu_forward(gate.clone(), up.clone());
                prep.finish([gate, up], out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::swiglu_forward(gate, up)),
        }
    }
}
