//! The backward, for autodiff over any backend: the node keeps x and the weight.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::op::{ShortConvolutionOp, ShortConvolutionOps};

impl<B: ShortConvolutionOps, C: CheckpointStrategy> ShortConvolutionOps for Autodiff<B, C> {
    fn short_convolution_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: ShortConvolutionOp,
    ) -> FloatTensor<Self> {
        let ([x, weight], nodes) = parts([x, weight]);
        node::<B, C, _, _>(
            nodes,
            ([x, weight], op),
            |([x, weight], op)| B::short_convolution_forward(x, weight, op),
            |([x, weight], op), gradient, _| {
                let (dx, dweight) = B::short_convolution_backward(x, weight, gradient, op);
                [Some(dx), Some(dweight)]
            },
        )
    }
}
