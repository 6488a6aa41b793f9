//! The backward, for autodiff over any backend.
//!
//! The node keeps q, k, v, the bias, the output and two numbers per row of scores; the scores are
//! recomputed.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::{AttentionOp, AttentionOps, Bias, Kept};

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: Bias<Self>,
        op: AttentionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ([q, k, v], [q_node, k_node, v_node]) = parts([q, k, v]);
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
            None => node::<B, C, _, _>(
                [q_node, k_node, v_node],
                (kept, op),
                |_| out,
                |(kept, op), gradient, _| {
                    let (dq, dk, dv, _) = B::attention_backward(kept, gradient, false, op);
                    [dq, dk, dv].map(Some)
                },
            ),
            Some(bias_node) => node::<B, C, _, _>(
                [q_node, k_node, v_node, bias_node],
                (kept, op),
                |_| out,
                |(kept, op), gradient, [.., wanted]| {
                    let (dq, dk, dv, dbias) = B::attention_backward(kept, gradient, wanted, op);
                    [Some(dq), Some(dk), Some(dv), dbias]
                },
            ),
        };
        (out, Self::from_inner(softmax))
    }
}
