//! The hand-written backward, for autodiff over any backend.
//!
//! The node keeps x, the weight and the angles: the backward recomputes the root mean square from
//! x, which it reads anyway. x is the output of a projection, which no longer needs it. One fused
//! forward of q and k registers two nodes, as for the rotation alone.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{Gradients, node, parts};

use super::composed;
use super::{NormRotaryOp, NormRotaryOps};
use crate::rotary::RotaryOps;

/// x, the weight, the angles and the operation.
type Kept<B> = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, NormRotaryOp);

/// If nothing else holds the gradient, that of x overwrites it.
fn gradients<B: NormRotaryOps>(
    (x, weight, angles, op): Kept<B>,
    gradient: FloatTensor<B>,
    [_, wants_weight]: [bool; 2],
) -> Gradients<B, 2> {
    let op = NormRotaryOp {
        skips_weight: !wants_weight,
        ..op
    };
    let (dx, dweight) = B::norm_rotary_backward(x, weight, angles, gradient, op);
    [Some(dx), Some(dweight)]
}

impl<B: NormRotaryOps, C: CheckpointStrategy> NormRotaryOps for Autodiff<B, C> {
    fn norm_rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if angles.is_tracked() {
            let k = Self::norm_rotary(k, k_weight, angles.clone(), op);
            return (Self::norm_rotary(q, q_weight, angles, op), k);
        }
        let tracked = [&q, &k, &q_weight, &k_weight];
        let is_tracked = tracked.iter().any(|tensor| tensor.is_tracked());
        let ([q, k, q_weight, k_weight, angles], nodes) = parts([q, k, q_weight, k_weight, angles]);
        if !is_tracked {
            // Nothing is kept, so that a kernel may overwrite q and k.
            let (q, k) = B::norm_rotary_pair(q, k, q_weight, k_weight, angles, op);
            return (Self::from_inner(q), Self::from_inner(k));
        }
        let [q_node, k_node, q_weight_node, k_weight_node, _] = nodes;
        let (q_out, k_out) = B::norm_rotary_pair(
            q.clone(),
            k.clone(),
            q_weight.clone(),
            k_weight.clone(),
            angles.clone(),
            op,
        );
        let register = |parents, kept, output| {
            node::<B, C, Kept<B>, 2>(parents, kept, |_| output, gradients::<B>)
        };
        let q_kept = (q, q_weight, angles.clone(), op);
        (
            register([q_node, q_weight_node], q_kept, q_out),
            register([k_node, k_weight_node], (k, k_weight, angles, op), k_out),
        )
    }

    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        if angles.is_tracked() {
            // The backward above gives learned angles no gradient.
            return composed::norm_rotate::<Self>(x, weight, angles, op, Self::rotary_single);
        }
        let ([x, weight, angles], [x_node, weight_node, _]) = parts([x, weight, angles]);
        node::<B, C, Kept<B>, 2>(
            [x_node, weight_node],
            (x, weight, angles, op),
            |(x, weight, angles, op)| B::norm_rotary(x, weight, angles, op),
            gradients::<B>,
        )
    }
}
