//! The backward, for autodiff over any backend: the node keeps x, the weight and rstd.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;

use super::ops::RmsNormOps;
use crate::backward::register;

#[derive(Debug)]
struct RmsNormBackward;

impl<B: RmsNormOps> Backward<B, 2> for RmsNormBackward {
    /// x, weight and rstd.
    type State = [FloatTensor<B>; 3];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [x, weight, rstd] = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let (dx, dweight) = B::rms_norm_backward(x, weight, rstd, gradient);
        let parents = ops.parents.map(|node| node.map(|node| node.id));
        register::<B>(grads, parents.into_iter().zip([dx, dweight]));
    }
}

impl<B: RmsNormOps, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let (out, rstd) = B::rms_norm_forward(x.clone(), weight.clone(), epsilon);
        let kept = [x, weight, rstd.clone()];
        let out = match Backward::<B, 2>::prepare::<C>(RmsNormBackward, [x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(kept, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        };
        (out, Self::from_inner(rstd))
    }
}
