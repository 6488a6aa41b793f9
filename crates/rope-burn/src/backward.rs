//! The hand-written backward, for autodiff over any backend.
//!
//! The rotation is linear in x, so its backward applies the adjoint to the incoming gradient and needs no x: the node
//! keeps cos and sin, which all layers of a step share. Only where cos or sin want gradients themselves is x kept.
//!
//! q' depends on q alone and k' on k alone, so one fused forward registers two nodes. They are compute-bound: to
//! keep an input for recomputing what needs no input would only cost memory.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind, unary},
};
use burn::backend::tensor::FloatTensor;

use crate::ops::{RotaryOp, RotaryOps};

/// cos and sin as the nodes keep them, and the operation to apply to the gradient.
#[derive(Clone, Debug)]
struct Angles<F> {
    cos: F,
    sin: F,
    op: RotaryOp,
}

#[derive(Debug)]
struct RotaryBackward;

impl<B: RotaryOps> Backward<B, 1> for RotaryBackward {
    type State = Angles<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Angles { cos, sin, op } = ops.state;
        // `unary` hands the gradient over: where nothing else holds it, it is rotated where it lies.
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            B::rotary_single(gradient, cos, sin, op.transposed())
        });
    }
}

/// With learned angles; `x` is there because dcos and dsin need it.
#[derive(Debug)]
struct LearnedRotaryBackward;

impl<B: RotaryOps> Backward<B, 3> for LearnedRotaryBackward {
    type State = (FloatTensor<B>, Angles<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [x_parent, cos_parent, sin_parent] = ops.parents;
        let (x, Angles { cos, sin, op }) = ops.state;
        if cos_parent.is_some() || sin_parent.is_some() {
            let (dcos, dsin) = B::rotary_angle_gradients(x, gradient.clone(), cos.clone(), op);
            for (parent, gradient) in [(cos_parent, dcos), (sin_parent, dsin)] {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, gradient);
                }
            }
        }
        if let Some(parent) = x_parent {
            let dx = B::rotary_single(gradient, cos, sin, op.transposed());
            grads.register::<B>(parent.id, dx);
        }
    }
}

fn register<B: RotaryOps, C: CheckpointStrategy>(
    x: NodeGuard,
    angles: Angles<FloatTensor<B>>,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match Backward::<B, 1>::prepare::<C>(RotaryBackward, [x])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(angles, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

impl<B: RotaryOps, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if cos.is_tracked() || sin.is_tracked() {
            let k = Self::rotary_single(k, cos.clone(), sin.clone(), op);
            return (Self::rotary_single(q, cos, sin, op), k);
        }
        let angles = Angles {
            cos: cos.into_primitive(),
            sin: sin.into_primitive(),
            op,
        };
        let ((q, q_node), (k, k_node)) = (q.into_parts(), k.into_parts());
        let (q, k) = B::rotary_pair(q, k, angles.cos.clone(), angles.sin.clone(), op);
        (
            register::<B, C>(q_node, angles.clone(), q),
            register::<B, C>(k_node, angles, k),
        )
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let learned = cos.is_tracked() || sin.is_tracked();
        let ((x, x_node), (cos, cos_node), (sin, sin_node)) =
            (x.into_parts(), cos.into_parts(), sin.into_parts());
        let angles = Angles { cos, sin, op };
        let forward = |x| B::rotary_single(x, angles.cos.clone(), angles.sin.clone(), op);
        if !learned {
            let output = forward(x);
            return register::<B, C>(x_node, angles, output);
        }
        let nodes = [x_node, cos_node, sin_node];
        match Backward::<B, 3>::prepare::<C>(LearnedRotaryBackward, nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let output = forward(x.clone());
                prep.finish((x, angles), output)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward(x)),
        }
    }
}
