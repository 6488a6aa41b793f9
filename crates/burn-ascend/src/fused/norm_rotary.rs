//! The norm with the rotation, by rope-ascend's kernels on the tensors' own memory.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_fused::like;
use rope_ascend::rope::{
    ChannelWeights, NormBackward, NormBackwardTensor, NormRotation, NormTensor,
};
use rope_burn::{NormRotaryOp, NormRotaryOps, PreparedTensor, RotaryOp, RotaryOps, composed};
use rope_core::Direction;

use super::rotary::{Run, operand, read, wrong};
use super::{Outcome, Outputs, Refusal};
use crate::Ascend;
use crate::tensor::AscendTensor;

impl NormRotaryOps for Ascend {
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let outputs = Outputs::new(&x, [like(&x)]);
        let [x] = outputs.or_composed(forward(x, &weight, &angles, op), |x| {
            let rotate = Ascend::rotary_single;
            [composed::norm_rotate::<Ascend>(
                x, weight, angles, op, rotate,
            )]
        });
        x
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&x, [like(&x), like(&weight)]);
        let outcome = backward([x, gradient], &weight, &angles, op);
        let gradients = outputs.or_composed(outcome, |[x, gradient]| {
            let rotate = Ascend::rotary_single;
            composed::norm_rotate_backward::<Ascend>(x, weight, angles, gradient, op, rotate).into()
        });
        gradients.into()
    }
}

#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the inputs back to be composed"
)]
fn forward(
    x: AscendTensor,
    weight: &AscendTensor,
    angles: &AscendTensor,
    op: NormRotaryOp,
) -> Outcome<AscendTensor, 1> {
    let run = match NormRun::new(&x, weight, angles, op) {
        Ok(Some(run)) => run,
        Ok(None) => return Ok([x]),
        Err(refusal) => return Err((refusal, x)),
    };
    let mut prepared = PreparedTensor::new(x, &run.rotation.op);
    match run.forward(&mut prepared) {
        Ok(()) => Ok([prepared.into_output()]),
        Err(refusal) => Err((refusal, prepared.source)),
    }
}

#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the inputs back to be composed"
)]
fn backward(
    [x, gradient]: [AscendTensor; 2],
    weight: &AscendTensor,
    angles: &AscendTensor,
    op: NormRotaryOp,
) -> Outcome<[AscendTensor; 2], 2> {
    let run = match NormRun::new(&x, weight, angles, op) {
        Ok(Some(run)) => run,
        // No head has a share in the gradient of the weight.
        Ok(None) => return Ok([gradient, zeros_like(weight)]),
        Err(refusal) => return Err((refusal, [x, gradient])),
    };
    let x = PreparedTensor::readable(x, &run.rotation.op);
    let mut prepared = PreparedTensor::new(gradient, &run.rotation.op);
    match run.backward(&x, &mut prepared) {
        Ok(sums) => Ok([prepared.into_output(), sums]),
        Err(refusal) => Err((refusal, [x.source, prepared.source])),
    }
}

fn zeros_like(weight: &AscendTensor) -> AscendTensor {
    let dtype = FloatDType::from(weight.dtype());
    Ascend::float_zeros(weight.shape(), &weight.device(), dtype)
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
            .map_err(wrong)?;
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

    fn forward(&self, prepared: &mut PreparedTensor<AscendTensor>) -> Result<(), Refusal> {
        self.rotation.rotator.norm_rotate(NormRotation {
            element: self.rotation.element,
            norm: self.op.norm,
            q: NormTensor {
                x: operand(prepared)?,
                weight: self.weights()?,
            },
            k: None,
            angles: self.rotation.angles()?,
        })?;
        Ok(())
    }

    /// The gradient of the weight; that of x is in `prepared`.
    fn backward(
        &self,
        x: &PreparedTensor<AscendTensor>,
        prepared: &mut PreparedTensor<AscendTensor>,
    ) -> Result<AscendTensor, Refusal> {
        let (rotator, channels) = (&self.rotation.rotator, self.op.geometry.head_dim());
        let context = x.source.context()?.clone();
        let most = rotator.most_weight_sums() * channels;
        let mut sums = context.stream().alloc::<u8>(most * size_of::<f32>())?;
        let rows = rotator.norm_rotate_backward(NormBackward {
            element: self.rotation.element,
            norm: self.op.norm,
            q: NormBackwardTensor {
                x: read(x)?,
                gradient: operand(prepared)?,
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
