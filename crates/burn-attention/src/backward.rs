//! The backward, for autodiff over any backend.
//!
//! The node keeps q, k, v, the bias, the output and two numbers for each row of scores; the scores
//! themselves are computed again. It is compute-bound: what it keeps is other operations' output,
//! and computing that again would cost more than the memory it takes.

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend};

use crate::ops::{AttentionOp, AttentionOps, Bias, Kept};

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionOps> Backward<B, 3> for AttentionBackward {
    type State = (Kept<B>, AttentionOp);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (kept, op) = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let (dq, dk, dv, _) = B::attention_backward(kept, gradient, false, op);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register::<B>(grads, parents.into_iter().zip([dq, dk, dv]));
    }
}

/// With a bias, whose gradient is computed if it is wanted.
#[derive(Debug)]
struct BiasedAttentionBackward;

impl<B: AttentionOps> Backward<B, 4> for BiasedAttentionBackward {
    type State = (Kept<B>, AttentionOp);

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (kept, op) = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let [q, k, v, bias] = ops.parents.map(|node| node.map(|node| node.id));
        let (dq, dk, dv, dbias) = B::attention_backward(kept, gradient, bias.is_some(), op);
        register::<B>(grads, [q, k, v].into_iter().zip([dq, dk, dv]));
        register::<B>(grads, [bias].into_iter().zip(dbias));
    }
}

/// Hands each gradient to its tensor, if that is tracked.
pub(crate) fn register<B: Backend>(
    grads: &mut Gradients,
    pairs: impl Iterator<Item = (Option<NodeId>, FloatTensor<B>)>,
) {
    for (node, gradient) in pairs {
        if let Some(node) = node {
            grads.register::<B>(node, gradient);
        }
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: Bias<Self>,
        op: AttentionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ((q, q_node), (k, k_node), (v, v_node)) =
            (q.into_parts(), k.into_parts(), v.into_parts());
        let bias = bias.into_option().map(|bias| bias.into_parts());
        let (bias, bias_node) = bias.unzip();
        let bias = Bias::from(bias);
        let (out, softmax) =
            B::attention_forward(q.clone(), k.clone(), v.clone(), bias.clone(), op.clone());
        let kept = Kept {
            q,
            k,
            v,
            bias,
            out: out.clone(),
            softmax: softmax.clone(),
        };
        let out = match bias_node {
            None => {
                let nodes = [q_node, k_node, v_node];
                match Backward::<B, 3>::prepare::<C>(AttentionBackward, nodes)
                    .compute_bound()
                    .stateful()
                {
                    OpsKind::Tracked(prep) => prep.finish((kept, op), out),
                    OpsKind::UnTracked(prep) => prep.finish(out),
                }
            }
            Some(bias_node) => {
                let nodes = [q_node, k_node, v_node, bias_node];
                match Backward::<B, 4>::prepare::<C>(BiasedAttentionBackward, nodes)
                    .compute_bound()
                    .stateful()
                {
                    OpsKind::Tracked(prep) => prep.finish((kept, op), out),
                    OpsKind::UnTracked(prep) => prep.finish(out),
                }
            }
        };
        (out, Self::from_inner(softmax))
    }
}
