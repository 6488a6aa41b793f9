//! The backward, for autodiff over any backend.
//!
//! The node keeps q, k, v, g, beta and the state before each chunk; everything else is recomputed,
//! one block of chunks at a time.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::{GatedDeltaOp, GatedDeltaOps, KeptStates};

impl<B: GatedDeltaOps, C: CheckpointStrategy> GatedDeltaOps for Autodiff<B, C> {
    fn gated_delta_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ([q, k, v, g, beta], nodes) = parts([q, k, v, g, beta]);
        let (out, states) = B::gated_delta_forward(
            q.clone(),
            k.clone(),
            v.clone(),
            g.clone(),
            beta.clone(),
            op.clone(),
        );
        let kept = KeptStates {
            q,
            k,
            v,
            g,
            beta,
            states: states.clone(),
        };
        let out = node::<B, C, _, _>(
            nodes,
            (kept, op),
            |_| out,
            |(kept, op), gradient, _| {
                let (dq, dk, dv, dg, dbeta) = B::gated_delta_backward(kept, gradient, op);
                [dq, dk, dv, dg, dbeta].map(Some)
            },
        );
        (out, Self::from_inner(states))
    }
}
