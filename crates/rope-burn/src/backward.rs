//! The hand-written backward, for autodiff over any backend.
//!
//! The rotation is linear in x, so its backward applies the adjoint to the incoming gradient and
//! needs no x: the node keeps the angles, which all layers of a step share. Only where the angles
//! want a gradient themselves is x kept.
//!
//! q' depends on q alone and k' on k alone, so one fused forward registers two nodes. They are
//! compute-bound: keeping an input for recomputing what needs no input would only cost memory.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, NodeGuard, Ops, OpsKind, binary, unary},
};
use burn::backend::tensor::FloatTensor;

use crate::ops::{RotaryOp, RotaryOps};

#[derive(Debug)]
struct RotaryBackward;

impl<B: RotaryOps> Backward<B, 1> for RotaryBackward {
    /// The angles, and the forward operation.
    type State = (FloatTensor<B>, RotaryOp);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (angles, op) = ops.state;
        // `unary` hands the gradient over: if nothing else holds it, it is rotated in place.
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            B::rotary_single(gradient, angles, op.transposed())
        });
    }
}

/// With learned angles, whose gradient needs x.
#[derive(Debug)]
struct LearnedRotaryBackward;

impl<B: RotaryOps> Backward<B, 2> for LearnedRotaryBackward {
    /// The angles, x, and the forward operation.
    type State = (FloatTensor<B>, FloatTensor<B>, RotaryOp);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (angles, x, op) = ops.state;
        // x second: its gradient is then the only one to hold `gradient`, as in `RotaryBackward`.
        binary::<B, _, _>(
            ops.parents,
            ops.node,
            grads,
            |gradient| B::rotary_angle_gradients(x, gradient, angles.clone(), op),
            |gradient| B::rotary_single(gradient, angles.clone(), op.transposed()),
        );
    }
}

fn register<B: RotaryOps, C: CheckpointStrategy>(
    x: NodeGuard,
    angles: FloatTensor<B>,
    op: RotaryOp,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    match Backward::<B, 1>::prepare::<C>(RotaryBackward, [x])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((angles, op), output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

impl<B: RotaryOps, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if angles.is_tracked() {
            let k = Self::rotary_single(k, angles.clone(), op);
            return (Self::rotary_single(q, angles, op), k);
        }
        let angles = angles.into_primitive();
        let ((q, q_node), (k, k_node)) = (q.into_parts(), k.into_parts());
        let (q, k) = B::rotary_pair(q, k, angles.clone(), op);
        (
            register::<B, C>(q_node, angles.clone(), op, q),
            register::<B, C>(k_node, angles, op, k),
        )
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let learned = angles.is_tracked();
        let ((x, x_node), (angles, angles_node)) = (x.into_parts(), angles.into_parts());
        if !learned {
            let output = B::rotary_single(x, angles.clone(), op);
            return register::<B, C>(x_node, angles, op, output);
        }
        match Backward::<B, 2>::prepare::<C>(LearnedRotaryBackward, [angles_node, x_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let output = B::rotary_single(x.clone(), angles.clone(), op);
                prep.finish((angles, x, op), output)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rotary_single(x, angles, op)),
        }
    }
}
