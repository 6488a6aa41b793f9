//! The norm with the rotation, by rope-ascend's kernels on the tensors' memory.

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
    fn norm_rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        norm_rotate([q, k], [q_weight, k_weight], &angles, op).into()
    }

    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let [x] = norm_rotate([x], [weight], &angles, op);
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
        let outcome = backward([x, gradient], weight.clone(), &angles, op);
        let gradients = outputs.or_composed(outcome, |[x, gradient]| {
            let rotate = Ascend::rotary_single;
            composed::norm_rotate_backward::<Ascend>(x, weight, angles, gradient, op, rotate).into()
        });
        gradients.into()
    }
}

/// Of q, or of q and k.
fn norm_rotate<const N: usize>(
    x: [AscendTensor; N],
    weights: [AscendTensor; N],
    angles: &AscendTensor,
    op: NormRotaryOp,
) -> [AscendTensor; N] {
    let outputs = Outputs::new(&x[0], x.each_ref().map(like));
    outputs.or_composed(forward(x, weights.clone(), angles, op), |x| {
        let mut weights = weights.into_iter();
        x.map(|x| {
            let weight = weights.next().expect("a weight for each tensor");
            let rotate = Ascend::rotary_single;
            composed::norm_rotate::<Ascend>(x, weight, angles.clone(), op, rotate)
        })
    })
}

fn forward<const N: usize>(
    x: [AscendTensor; N],
    weights: [AscendTensor; N],
    angles: &AscendTensor,
    op: NormRotaryOp,
) -> Outcome<[AscendTensor; N], N> {
    let run = match NormRun::new(&x, weights, angles, op) {
        Ok(Some(run)) => run,
        Ok(None) => return Ok(x),
        Err(refusal) => return Err((refusal, x)),
    };
    let rotation = &run.rotation.op;
    let mut prepared = x.map(|x| PreparedTensor::readable(x, rotation));
    // A launch overwrites both or none.
    if !prepared.iter().all(PreparedTensor::may_be_overwritten) {
        prepared
            .iter_mut()
            .for_each(|x| x.allocate_output(rotation));
    }
    match run.forward(&mut prepared) {
        Ok(()) => Ok(prepared.map(PreparedTensor::into_output)),
        Err(refusal) => Err((refusal, prepared.map(|x| x.source))),
    }
}

#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the inputs back to be composed"
)]
fn backward(
    [x, gradient]: [AscendTensor; 2],
    weight: AscendTensor,
    angles: &AscendTensor,
    op: NormRotaryOp,
) -> Outcome<[AscendTensor; 2], 2> {
    let run = match NormRun::new(std::slice::from_ref(&x), [weight.clone()], angles, op) {
        Ok(Some(run)) => run,
        // No head contributes to the gradient of the weight.
        Ok(None) => return Ok([gradient, zeros_like(&weight)]),
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

/// The arguments of a norm with its rotation besides q and k.
struct NormRun<const N: usize> {
    rotation: Run,
    op: NormRotaryOp,
    weights: [AscendTensor; N],
}

impl<const N: usize> NormRun<N> {
    /// Returns `None` if there is nothing to normalise.
    fn new(
        x: &[AscendTensor],
        weights: [AscendTensor; N],
        angles: &AscendTensor,
        op: NormRotaryOp,
    ) -> Result<Option<Self>, Refusal> {
        for (x, weight) in x.iter().zip(&weights) {
            op.check_weight("the weight of the norm", weight, x)
                .map_err(wrong)?;
        }
        let rotation = RotaryOp {
            geometry: op.geometry,
            layout: op.layout,
            direction: Direction::Forward,
        };
        let rotation = Run::new(x, angles, rotation)?;
        Ok(rotation.map(|rotation| Self {
            rotation,
            op,
            weights: weights.map(AscendTensor::contiguous),
        }))
    }

    fn forward(&self, prepared: &mut [PreparedTensor<AscendTensor>]) -> Result<(), Refusal> {
        let mut tensors = prepared.iter_mut().zip(&self.weights).map(|(x, weight)| {
            Ok::<_, Refusal>(NormTensor {
                x: operand(x)?,
                weight: channel_weights(weight)?,
            })
        });
        let Some(q) = tensors.next() else {
            return Ok(());
        };
        self.rotation.rotator.norm_rotate(NormRotation {
            element: self.rotation.element,
            norm: self.op.norm,
            q: q?,
            k: tensors.next().transpose()?,
            angles: self.rotation.angles()?,
        })?;
        Ok(())
    }
}

fn channel_weights(weight: &AscendTensor) -> Result<ChannelWeights<'_>, Refusal> {
    Ok(ChannelWeights {
        memory: weight.buffer()?,
        offset_bytes: weight.offset() * size_of::<f32>(),
        channels: weight.dims()[0],
    })
}

impl NormRun<1> {
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
                weight: channel_weights(&self.weights[0])?,
            },
            k: None,
            angles: self.rotation.angles()?,
            weight_sums: &mut sums,
        })?;
        if self.op.skips_weight {
            let shape = Shape::from([channels]);
            return Ok(AscendTensor::empty_in(&context, shape, DType::F32));
        }
        let sums = AscendTensor::dense(context, sums, Shape::from([rows, channels]), DType::F32);
        let sum = Ascend::float_sum_dim(sums, 0);
        Ok(Ascend::float_reshape(sum, Shape::from([channels])))
    }
}
