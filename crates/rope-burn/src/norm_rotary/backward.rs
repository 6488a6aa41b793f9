//! The hand-written backward, for autodiff over any backend.
//!
//! The node keeps x, the weight and the angles: the backward computes the root of the mean of the
//! squares again, from the x that it reads anyway. x is the output of a projection, which needs it
//! no more.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::composed;
use super::{NormRotaryOp, NormRotaryOps};
use crate::rotary::RotaryOps;

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
        let ([x, weight, angles], [x_node, weight_node, _]) = parts([x, weight, angles]);
        node::<B, C, _, _>(
            [x_node, weight_node],
            (x, weight, angles, op),
            |(x, weight, angles, op)| B::norm_rotary(x, weight, angles, op),
            // If nothing else holds the gradient, that of x overwrites it.
            |(x, weight, angles, op), gradient, _| {
                let (dx, dweight) = B::norm_rotary_backward(x, weight, angles, gradient, op);
                [Some(dx), Some(dweight)]
            },
        )
    }
}
