//! The backward, for autodiff over any backend: the node keeps x, the weight and rstd.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, TensorMetadata};
use burn_fused::primitive::cast;
use burn_fused::{node, parts};

use super::op::RmsNormOps;

impl<B: RmsNormOps, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ([x, weight], nodes) = parts([x, weight]);
        let (out, rstd) = B::rms_norm_forward(x.clone(), weight.clone(), epsilon);
        let out = node::<B, C, _, _>(
            nodes,
            [x, weight, rstd.clone()],
            |_| out,
            |[x, weight, rstd], gradient, [_, wants_weight]| {
                if !wants_weight {
                    return [
                        Some(B::rms_norm_input_gradient(x, weight, rstd, gradient)),
                        None,
                    ];
                }
                let dtype = weight.dtype().into();
                let (dx, dweight) = B::rms_norm_backward(x, weight, rstd, gradient);
                [Some(dx), Some(cast::<B>(dweight, dtype))]
            },
        );
        (out, Self::from_inner(rstd))
    }
}
