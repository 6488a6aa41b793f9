//! The rotation of q and k, by rope-ascend's kernels on the tensors' memory.
//!
//! One launch rotates q and k. Tensors that nothing else holds are overwritten; others are read by
//! their strides and written to new ones. Tensors whose strides the kernels cannot follow are
//! copied first. Nothing waits for the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use burn_fused::like;
use rope_ascend::rope::{AngleGradient, AngleRows, Heads, KernelType, Operand, Rotation, Rotator};
use rope_ascend::safe::DeviceMemory;
use rope_burn::{HeadsTensor, PreparedTensor, RotaryOp, RotaryOps, composed};
use rope_core::{Direction, Geometry, HeadsLayout, Layout};

use super::{Outcome, Outputs, Refusal, kernel_type};
use crate::Ascend;
use crate::context::Context;
use crate::tensor::AscendTensor;

/// A device's rotators, one per geometry: they keep the kernels' lookup tables.
#[derive(Debug, Default)]
struct Rotators(Mutex<HashMap<Geometry, Arc<Rotator>>>);

fn rotator(context: &Context, geometry: Geometry) -> Result<Arc<Rotator>, Refusal> {
    let rotators = context.cache::<Rotators>();
    let mut rotators = rotators.0.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(rotator) = rotators.get(&geometry) {
        return Ok(rotator.clone());
    }
    let rotator = Arc::new(context.npu().rotator(context.stream(), geometry)?);
    rotators.insert(geometry, rotator.clone());
    Ok(rotator)
}

/// The error of an inconsistent call; checked here since the kernels take untyped memory.
pub(super) fn wrong(error: rope_burn::RotaryError) -> Refusal {
    Refusal::Failed(ExecutionError::with_context(error.to_string()))
}

impl RotaryOps for Ascend {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rotate([q, k], angles, op).into()
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let [x] = rotate([x], angles, op);
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let outputs = Outputs::new(&angles, [like(&angles)]);
        let gradients = angle_gradients([x.clone(), gradient.clone()], &angles, op);
        let outcome = gradients.map(|gradients| [gradients]);
        let [gradients] = outputs.or_composed(outcome.map_err(|refusal| (refusal, ())), |()| {
            [composed::angle_gradients::<Self>(x, gradient, angles, op)]
        });
        gradients
    }
}

/// Rotates q, or q and k.
fn rotate<const N: usize>(
    x: [AscendTensor; N],
    angles: AscendTensor,
    op: RotaryOp,
) -> [AscendTensor; N] {
    let outputs = Outputs::new(&x[0], x.each_ref().map(like));
    outputs.or_composed(launch(x, &angles, op), |x| {
        x.map(|x| composed::rotate::<Ascend>(x, angles.clone(), op))
    })
}

fn launch<const N: usize>(
    x: [AscendTensor; N],
    angles: &AscendTensor,
    op: RotaryOp,
) -> Outcome<[AscendTensor; N], N> {
    let run = match Run::new(&x, angles, op) {
        Ok(Some(run)) => run,
        Ok(None) => return Ok(x),
        Err(refusal) => return Err((refusal, x)),
    };
    let mut prepared = x.map(|x| PreparedTensor::readable(x, &op));
    // A launch overwrites both or none.
    if !prepared.iter().all(PreparedTensor::may_be_overwritten) {
        prepared.iter_mut().for_each(|x| x.allocate_output(&op));
    }
    match run.launch(&mut prepared) {
        Ok(()) => Ok(prepared.map(PreparedTensor::into_output)),
        Err(refusal) => Err((refusal, prepared.map(|x| x.source))),
    }
}

/// The arguments of a rotation besides q and k.
pub(super) struct Run {
    pub(super) op: RotaryOp,
    pub(super) element: KernelType,
    pub(super) rotator: Arc<Rotator>,
    rows: AscendTensor,
}

impl Run {
    /// Nothing if there is nothing to rotate.
    pub(super) fn new(
        x: &[AscendTensor],
        angles: &AscendTensor,
        op: RotaryOp,
    ) -> Result<Option<Self>, Refusal> {
        op.check(&x[0], x.get(1), angles).map_err(wrong)?;
        if x.iter().all(AscendTensor::is_empty) {
            return Ok(None);
        }
        let element = kernel_type(x[0].dtype())?;
        let context = x[0].context()?;
        Ok(Some(Self {
            op,
            element,
            rotator: rotator(context, op.geometry)?,
            rows: angles.clone().contiguous(),
        }))
    }

    pub(super) fn angles(&self) -> Result<AngleRows<'_>, Refusal> {
        Ok(AngleRows {
            memory: self.rows.buffer()?,
            offset_bytes: self.rows.offset() * size_of::<f32>(),
            rows: self.rows.dims()[0],
        })
    }

    fn launch(&self, prepared: &mut [PreparedTensor<AscendTensor>]) -> Result<(), Refusal> {
        let mut operands = prepared.iter_mut().map(operand);
        let Some(q) = operands.next() else {
            return Ok(());
        };
        self.rotator.rotate(Rotation {
            element: self.element,
            direction: self.op.direction,
            q: q?,
            k: operands.next().transpose()?,
            angles: self.angles()?,
        })?;
        Ok(())
    }
}

impl HeadsTensor for AscendTensor {
    /// The kernels support strides that address each element once.
    fn heads_layout(&self, layout: Layout) -> Option<HeadsLayout> {
        let layout = HeadsLayout::strided(layout, self.dims(), self.strides()).ok()?;
        layout.is_injective().then_some(layout)
    }

    fn into_contiguous(self) -> Self {
        self.contiguous()
    }

    fn is_unique(&self) -> bool {
        self.is_unique()
    }

    fn empty_like(&self) -> Self {
        AscendTensor::empty(&self.device(), self.shape(), self.dtype())
    }
}

pub(super) fn read(x: &PreparedTensor<AscendTensor>) -> Result<Heads<&DeviceMemory>, Refusal> {
    Ok(Heads {
        memory: x.source.buffer()?,
        offset: x.source.offset(),
        layout: x.from,
    })
}

pub(super) fn operand(x: &mut PreparedTensor<AscendTensor>) -> Result<Operand<'_>, Refusal> {
    let (offset, layout) = (x.source.offset(), x.from);
    let Some((target, to)) = &mut x.target else {
        return Ok(Operand::InPlace(Heads {
            memory: x.source.buffer_mut()?,
            offset,
            layout,
        }));
    };
    Ok(Operand::Into {
        from: Heads {
            memory: x.source.buffer()?,
            offset,
            layout,
        },
        to: Heads {
            offset: target.offset(),
            memory: target.buffer_mut()?,
            layout: *to,
        },
    })
}

/// Returns gradients in the shape of the angles, which have one row per token, or per token of one
/// sample.
fn angle_gradients(
    x: [AscendTensor; 2],
    angles: &AscendTensor,
    op: RotaryOp,
) -> Result<AscendTensor, Refusal> {
    op.check_gradient(&x[0], &x[1], angles).map_err(wrong)?;
    let angles = angles.shape();
    let element = kernel_type(x[0].dtype())?;
    if x[0].is_empty() {
        return Err(Refusal::Limit);
    }
    let context = x[0].context()?.clone();
    let rotator = rotator(&context, op.geometry)?;
    let [x, gradient] = x.map(|x| PreparedTensor::readable(x, &op));
    // The adjoint's cos and sin are the forward's: <dy, R' g> = <R dy, g>, so x and gradient are
    // exchanged.
    let (x, gradient) = match op.direction {
        Direction::Forward => (x, gradient),
        Direction::Adjoint => (gradient, x),
    };
    let (batch, seq) = (x.from.batch, x.from.seq);
    let (tokens, width) = (angles.as_slice()[0], angles.as_slice()[1]);
    let mut found = context
        .stream()
        .alloc::<u8>(batch * seq * width * size_of::<f32>())?;
    rotator.angle_gradient(AngleGradient {
        element,
        q: [read(&x)?, read(&gradient)?],
        k: None,
        out: &mut found,
    })?;
    let shape = Shape::from([batch, seq, width]);
    let mut rows = AscendTensor::dense(context, found, shape, DType::F32);
    if tokens != batch * seq {
        rows = Ascend::float_sum_dim(rows, 0);
    }
    Ok(Ascend::float_reshape(rows, angles))
}
