//! The hand-written backward, for autodiff over any backend.
//!
//! The rotation is linear in x, so its backward applies the adjoint to the incoming gradient and
//! needs no x: the node keeps the angles, which all layers of a step share. x is kept only if the
//! angles themselves require a gradient.
//!
//! q' depends on q alone and k' on k alone, so one fused forward registers two nodes.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy, ops::NodeGuard};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::{RotaryOp, RotaryOps};

fn register<B: RotaryOps, C: CheckpointStrategy>(
    x: NodeGuard,
    angles: FloatTensor<B>,
    op: RotaryOp,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    node::<B, C, _, _>(
        [x],
        (angles, op),
        |_| output,
        // If nothing else holds the gradient, it is rotated in place.
        |(angles, op), gradient, _| [Some(B::rotary_single(gradient, angles, op.transposed()))],
    )
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
        let ([q, k, angles], [q_node, k_node, _]) = parts([q, k, angles]);
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
        let ([x, angles], [x_node, angles_node]) = parts([x, angles]);
        if !learned {
            let output = B::rotary_single(x, angles.clone(), op);
            return register::<B, C>(x_node, angles, op, output);
        }
        node::<B, C, _, _>(
            [x_node, angles_node],
            (x, angles, op),
            |(x, angles, op)| B::rotary_single(x, angles, op),
            |(x, angles, op), gradient, [x_wanted, _]| {
                // x last: its gradient is then the only one to hold `gradient`, as in `register`.
                let dangles = B::rotary_angle_gradients(x, gradient.clone(), angles.clone(), op);
                let dx = x_wanted.then(|| B::rotary_single(gradient, angles, op.transposed()));
                [dx, Some(dangles)]
            },
        )
    }
}
