//! The backward, for autodiff over any backend: the node keeps the weight, which others hold too,
//! and x if the weight is tracked.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::{GroupedLinearOp, GroupedLinearOps};

impl<B: GroupedLinearOps, C: CheckpointStrategy> GroupedLinearOps for Autodiff<B, C> {
    fn grouped_linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let keeps_x = weight.is_tracked();
        let ([x, weight], nodes) = parts([x, weight]);
        let kept = (keeps_x.then(|| x.clone()), weight, op);
        node::<B, C, _, 2>(
            nodes,
            kept,
            |(_, weight, op)| B::grouped_linear_forward(x, weight, op),
            |(x, weight, op), gradient, [wants_x, wants_weight]| {
                let of_x = || B::grouped_linear_x_gradient(weight, gradient.clone(), op.clone());
                let dx = wants_x.then(of_x);
                let of_weight =
                    |x| B::grouped_linear_weight_gradient(x, gradient.clone(), op.clone());
                [dx, x.filter(|_| wants_weight).map(of_weight)]
            },
        )
    }

    fn grouped_linear_x_gradient(
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let [weight, gradient] = [weight, gradient].map(Self::inner);
        Self::from_inner(B::grouped_linear_x_gradient(weight, gradient, op))
    }

    fn grouped_linear_weight_gradient(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let [x, gradient] = [x, gradient].map(Self::inner);
        Self::from_inner(B::grouped_linear_weight_gradient(x, gradient, op))
    }
}
