//! The backward, for autodiff over any backend: the node keeps x, the weight, mean and rstd.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, TensorMetadata};
use burn_fused::primitive::cast;
use burn_fused::{node, parts};

use super::op::LayerNormOps;

impl<B: LayerNormOps, C: CheckpointStrategy> LayerNormOps for Autodiff<B, C> {
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let ([x, weight, bias], nodes) = parts([x, weight, bias]);
        let (out, mean, rstd) = B::layer_norm_forward(x.clone(), weight.clone(), bias, epsilon);
        let out = node::<B, C, _, _>(
            nodes,
            [x, weight, mean.clone(), rstd.clone()],
            |_| out,
            |[x, weight, mean, rstd], gradient, [_, wants_weight, wants_bias]| {
                let dtype = weight.dtype().into();
                let (dx, dweight, dbias) = B::layer_norm_backward(x, weight, mean, rstd, gradient);
                let [dweight, dbias] = [dweight, dbias].map(|x| cast::<B>(x, dtype));
                [
                    Some(dx),
                    wants_weight.then_some(dweight),
                    wants_bias.then_some(dbias),
                ]
            },
        );
        (out, Self::from_inner(mean), Self::from_inner(rstd))
    }
}
