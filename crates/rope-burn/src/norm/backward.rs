//! The hand-written backward, for autodiff over any backend.
//!
//! The node keeps x, the weight and the angles: the backward computes the root of the mean of the
//! squares again, from the x that it reads anyway. x is the output of a projection, which needs it
//! no more.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;

use super::composed;
use super::ops::{NormRotaryOp, NormRotaryOps};
use crate::ops::RotaryOps;

#[derive(Debug)]
struct NormRotaryBackward;

impl<B: NormRotaryOps> Backward<B, 2> for NormRotaryBackward {
    /// x, the weight, the angles, and the forward operation.
    type State = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, NormRotaryOp);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (x, weight, angles, op) = ops.state;
        // If nothing else holds the gradient, that of x overwrites it.
        let gradient = grads.consume::<B>(&ops.node);
        let (dx, dweight) = B::norm_rotary_backward(x, weight, angles, gradient, op);
        for (node, gradient) in ops.parents.into_iter().zip([dx, dweight]) {
            if let Some(node) = node {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: NormRotaryOps, C: CheckpointStrategy> NormRotaryOps for Autodiff<B, C> {
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        if angles.is_tracked() {
            // The backward below gives learned angles no gradient.
            return composed::norm_rotate::<Self>(x, weight, angles, op, Self::rotary_single);
        }
        let angles = angles.into_primitive();
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        match Backward::<B, 2>::prepare::<C>(NormRotaryBackward, [x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let output = B::norm_rotary(x.clone(), weight.clone(), angles.clone(), op);
                prep.finish((x, weight, angles, op), output)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::norm_rotary(x, weight, angles, op)),
        }
    }
}
