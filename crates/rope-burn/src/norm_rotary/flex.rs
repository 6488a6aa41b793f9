//! The norm with the rotation, by rope-core's kernels on the tensors' own storage.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_fused::{for_dtype, zeros};
use rope_core::{Angles, Direction, NormGradient, NormInput, Rotator};

use super::{NormRotaryOp, NormRotaryOps};
use crate::error::Result;
use crate::prepared::PreparedTensor;
use crate::rotary::flex::{Shared, or_panic, values};

impl NormRotaryOps for Flex {
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        or_panic(for_dtype!(x.dtype(), E => forward::<E>(x, &weight, &angles, op)))
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        or_panic(for_dtype!(x.dtype(), E => backward::<E>(x, &weight, &angles, gradient, op)))
    }
}

fn forward<E: Shared>(
    x: FlexTensor,
    weight: &FlexTensor,
    angles: &FlexTensor,
    op: NormRotaryOp,
) -> Result<FlexTensor> {
    let (weight, angles) = (weight.to_contiguous(), angles.to_contiguous());
    let rotator = Rotator::new(op.geometry, Angles::Tokens(values::<E::Acc>(&angles)))?;
    let rotary = op.rotary(Direction::Forward);
    let mut prepared = PreparedTensor::new(x, &rotary);
    let input = NormInput {
        x: prepared.operand::<E>()?,
        weight: Some(values::<E::Acc>(&weight)),
    };
    rotator.norm_rotate(&op.norm, input, None)?;
    Ok(prepared.into_output())
}

fn backward<E: Shared>(
    x: FlexTensor,
    weight: &FlexTensor,
    angles: &FlexTensor,
    gradient: FlexTensor,
    op: NormRotaryOp,
) -> Result<(FlexTensor, FlexTensor)> {
    let (weight, angles) = (weight.to_contiguous(), angles.to_contiguous());
    let rotator = Rotator::new(op.geometry, Angles::Tokens(values::<E::Acc>(&angles)))?;
    let rotary = op.rotary(Direction::Forward);
    let x = PreparedTensor::readable(x, &rotary);
    let mut prepared = PreparedTensor::new(gradient, &rotary);
    let channels = Shape::from([op.geometry.head_dim()]);
    let mut weight_gradient = zeros(channels, weight.dtype());
    let gradient = NormGradient {
        x: x.read::<E>()?,
        weight: Some(values::<E::Acc>(&weight)),
        gradient: prepared.operand::<E>()?,
        weight_gradient: Some(weight_gradient.storage_mut::<E::Acc>()),
    };
    rotator.norm_rotate_backward(&op.norm, gradient, None)?;
    Ok((prepared.into_output(), weight_gradient))
}
