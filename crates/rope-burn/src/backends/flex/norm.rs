//! The norm with the rotation, by rope-core's kernels on the tensors' own storage.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use half::{bf16, f16};
use rope_core::{Angles, Direction, HeadsRef, NormGradient, NormInput, Rotator};

use super::{Placed, Shared, or_panic, strides, values, zeros};
use crate::error::{Result, RotaryError};
use crate::norm::{NormRotaryOp, NormRotaryOps};

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
    let mut placed = Placed::new(x, &rotary);
    let input = NormInput {
        x: placed.operand::<E>(&rotary)?,
        weight: Some(values::<E::Acc>(&weight)),
    };
    rotator.norm_rotate(&op.norm, input, None)?;
    Ok(placed.into_output())
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
    let (x, layout) = match strides(&x, &rotary) {
        Some(layout) => (x, layout),
        None => {
            let layout = rotary.heads("x", x.layout().shape())?;
            (x.to_contiguous(), layout)
        }
    };
    let mut placed = Placed::new(gradient, &rotary);
    let channels = Shape::from([op.geometry.head_dim()]);
    let mut weight_gradient = zeros(channels, weight.dtype());
    let gradient = NormGradient {
        x: HeadsRef::new(&x.storage::<E>()[x.layout().start_offset()..], layout)?,
        weight: Some(values::<E::Acc>(&weight)),
        gradient: placed.operand::<E>(&rotary)?,
        weight_gradient: Some(weight_gradient.storage_mut::<E::Acc>()),
    };
    rotator.norm_rotate_backward(&op.norm, gradient, None)?;
    Ok((placed.into_output(), weight_gradient))
}
