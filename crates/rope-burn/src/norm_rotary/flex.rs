//! The norm with the rotation: rope-core's kernels on the tensors' storage.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_fused::{for_dtype, zeros};
use rope_core::{Angles, Direction, NormGradient, NormInput, Rotator};

use super::{NormRotaryOp, NormRotaryOps};
use crate::error::{Result, RotaryError};
use crate::prepared::PreparedTensor;
use crate::rotary::flex::{Shared, or_panic, values};

impl NormRotaryOps for Flex {
    fn norm_rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let weights = [&q_weight, &k_weight];
        or_panic(for_dtype!(q.dtype(), E => forward::<E, 2>([q, k], weights, &angles, op))).into()
    }

    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let [x] =
            or_panic(for_dtype!(x.dtype(), E => forward::<E, 1>([x], [&weight], &angles, op)));
        x
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

/// Of q, or of q and k.
fn forward<E: Shared, const N: usize>(
    x: [FlexTensor; N],
    weights: [&FlexTensor; N],
    angles: &FlexTensor,
    op: NormRotaryOp,
) -> Result<[FlexTensor; N]> {
    let (weights, angles) = (
        weights.map(FlexTensor::to_contiguous),
        angles.to_contiguous(),
    );
    let rotator = Rotator::new(op.geometry, Angles::Tokens(values::<E::Acc>(&angles)))?;
    let rotary = op.rotary(Direction::Forward);
    let mut prepared = x.map(|x| PreparedTensor::new(x, &rotary));
    let mut inputs = prepared.iter_mut().zip(&weights).map(|(x, weight)| {
        Ok::<_, RotaryError>(NormInput {
            x: x.operand::<E>()?,
            weight: Some(values::<E::Acc>(weight)),
        })
    });
    if let Some(first) = inputs.next() {
        rotator.norm_rotate(&op.norm, first?, inputs.next().transpose()?)?;
    }
    drop(inputs);
    Ok(prepared.map(PreparedTensor::into_output))
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
