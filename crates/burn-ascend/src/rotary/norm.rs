//! The norm with the rotation, by rope-ascend's kernels on the tensors' own memory.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use burn::tensor::FloatDType;
use rope_ascend::rope::{
    ChannelWeights, NormBackward, NormBackwardTensor, NormRotation, NormTensor,
};
use rope_burn::{NormRotaryOp, NormRotaryOps, RotaryOp, RotaryOps, composed};
use rope_core::Direction;

use super::{Placed, Refusal, Run, failed_like};
use crate::Ascend;
use crate::tensor::AscendTensor;

impl NormRotaryOps for Ascend {
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let run = match NormRun::new(&x, &weight, &angles, op) {
            Ok(Some(run)) => run,
            Ok(None) => return x,
            Err(refusal) => return refused(x, weight, angles, op, refusal),
        };
        let mut placed = Placed::new(x, &run.rotation.op);
        if !placed.may_be_overwritten() {
            placed.put_elsewhere();
        }
        match run.forward(&mut placed) {
            Ok(()) => placed.target.unwrap_or(placed.source),
            Err(refusal) => refused(placed.source, weight, angles, op, refusal),
        }
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let run = match NormRun::new(&x, &weight, &angles, op) {
            Ok(Some(run)) => run,
            // No head has a share in the gradient of the weight.
            Ok(None) => return (gradient, zeros_like(&weight)),
            Err(refusal) => return refused_backward(x, weight, angles, gradient, op, refusal),
        };
        let x = Placed::new(x, &run.rotation.op);
        let mut placed = Placed::new(gradient, &run.rotation.op);
        if !placed.may_be_overwritten() {
            placed.put_elsewhere();
        }
        match run.backward(&x, &mut placed) {
            Ok(sums) => (placed.target.unwrap_or(placed.source), sums),
            Err(refusal) => refused_backward(x.source, weight, angles, placed.source, op, refusal),
        }
    }
}

fn zeros_like(weight: &AscendTensor) -> AscendTensor {
    let dtype = FloatDType::from(weight.dtype());
    Ascend::float_zeros(weight.shape(), &weight.device(), dtype)
}

/// Composed where the kernels have a limit, else failed.
fn refused(
    x: AscendTensor,
    weight: AscendTensor,
    angles: AscendTensor,
    op: NormRotaryOp,
    refusal: Refusal,
) -> AscendTensor {
    match refusal {
        Refusal::Limit => {
            let rotate = Ascend::rotary_single;
            composed::norm_rotate::<Ascend>(x, weight, angles, op, rotate)
        }
        Refusal::Failed(error) => failed_like(&x, &error),
    }
}

/// As [`refused`], of the backward.
fn refused_backward(
    x: AscendTensor,
    weight: AscendTensor,
    angles: AscendTensor,
    gradient: AscendTensor,
    op: NormRotaryOp,
    refusal: Refusal,
) -> (AscendTensor, AscendTensor) {
    match refusal {
        Refusal::Limit => {
            let rotate = Ascend::rotary_single;
            composed::norm_rotate_backward::<Ascend>(x, weight, angles, gradient, op, rotate)
        }
        Refusal::Failed(error) => (failed_like(&x, &error), failed_like(&weight, &error)),
    }
}

/// What a norm with its rotation needs besides x.
struct NormRun {
    rotation: Run,
    op: NormRotaryOp,
    weight: AscendTensor,
}

impl NormRun {
    /// Nothing if there is nothing to normalise.
    fn new(
        x: &AscendTensor,
        weight: &AscendTensor,
        angles: &AscendTensor,
        op: NormRotaryOp,
    ) -> Result<Option<Self>, Refusal> {
        op.check_weight("the weight of the norm", weight, x)
            .map_err(|error| ExecutionError::with_context(error.to_string()))?;
        let rotation = RotaryOp {
            geometry: op.geometry,
            layout: op.layout,
            direction: Direction::Forward,
        };
        let rotation = Run::new(std::slice::from_ref(x), angles, rotation)?;
        Ok(rotation.map(|rotation| Self {
            rotation,
            op,
            weight: weight.clone().contiguous(),
        }))
    }

    fn weights(&self) -> Result<ChannelWeights<'_>, Refusal> {
        Ok(ChannelWeights {
            memory: self.weight.buffer()?,
            offset_bytes: self.weight.offset() * size_of::<f32>(),
            channels: self.weight.dims()[0],
        })
    }

    fn forward(&self, placed: &mut Placed) -> Result<(), Refusal> {
        self.rotation.rotator.norm_rotate(NormRotation {
            element: self.rotation.element,
            norm: self.op.norm,
            q: NormTensor {
                x: placed.operand()?,
                weight: self.weights()?,
            },
            k: None,
            angles: self.rotation.angles()?,
        })?;
        Ok(())
    }

    /// The gradient of the weight; that of x is in `placed`.
    fn backward(&self, x: &Placed, placed: &mut Placed) -> Result<AscendTensor, Refusal> {
        let (rotator, channels) = (&self.rotation.rotator, self.op.geometry.head_dim());
        let context = x.source.context()?.clone();
        let most = rotator.most_weight_sums() * channels;
        let mut sums = context.stream().alloc::<u8>(most * size_of::<f32>())?;
        let rows = rotator.norm_rotate_backward(NormBackward {
            element: self.rotation.element,
            norm: self.op.norm,
            q: NormBackwardTensor {
                x: x.read()?,
                gradient: placed.operand()?,
                weight: self.weights()?,
            },
            k: None,
            angles: self.rotation.angles()?,
            weight_sums: &mut sums,
        })?;
        let sums = AscendTensor::dense(context, sums, Shape::from([rows, channels]), DType::F32);
        let sum = Ascend::float_sum_dim(sums, 0);
        Ok(Ascend::float_reshape(sum, Shape::from([channels])))
    }
}
