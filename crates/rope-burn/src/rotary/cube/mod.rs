//! Every runtime of CubeCL (CUDA, ROCm, Metal, Vulkan, wgpu, its CPU): kernels from one source,
//! compiled for the device on first use.
//!
//! A tensor that nothing else holds is rotated in place, whatever its strides; any other is read by
//! its strides and written to a new one. q and k share one launch. Pairings that read one way and
//! write the other always write a new tensor.
//!
//! The norm of the heads with their rotation is one launch per tensor, forward and backward.
//!
//! The composed body serves runtimes that cannot store or convert the tensors' type, and tensors of
//! more than 2^31 units of work.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

pub(crate) mod kernels;
pub(crate) mod launch;

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use rope_core::Direction;

use crate::rotary::composed;
use crate::rotary::{RotaryOp, RotaryOps};

impl RotaryOps for CubeBackend {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        checked(op.check(&q, Some(&k), &angles));
        launch::rotate([q, k], angles, &op).into()
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        checked(op.check(&x, None, &angles));
        let [rotated] = launch::rotate([x], angles, &op);
        rotated
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        checked(op.check_gradient(&x, &gradient, &angles));
        // The adjoint's angles are the forward's: <dy, R' g> = <R dy, g>, so x and gradient swap.
        let forward = RotaryOp {
            direction: Direction::Forward,
            ..op
        };
        let operands = match op.direction {
            Direction::Forward => [&x, &gradient],
            Direction::Adjoint => [&gradient, &x],
        };
        launch::angle_gradients(operands, &angles, &forward)
            .unwrap_or_else(|| composed::angle_gradients::<Self>(x, gradient, angles, op))
    }
}

/// An operation of a burn backend cannot return an error; [`crate::Rotary`] checks before it calls.
pub(crate) fn checked(result: crate::Result<()>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}
