//! The rotation of q and k by rope-ascend's kernels, on the tensors' own memory.
//!
//! One launch rotates q and k. Tensors that nobody else holds are overwritten; others are read by
//! their strides and written to new ones, strides that the kernels cannot follow are copied first.
//! Nothing waits for the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};
use rope_ascend::AscendError;
use rope_ascend::rope::{
    AngleGradient, AngleRows, Heads, KernelType, Npu, Operand, Rotation, Rotator,
};
use rope_ascend::safe::{DeviceMemory, Stream};
use rope_burn::{RotaryOp, RotaryOps, composed};
use rope_core::{Direction, Geometry, HeadsLayout};

use crate::Ascend;
use crate::context::Context;
use crate::error::execution;
use crate::tensor::AscendTensor;

mod norm;

/// A device's rotators, one for each geometry: they keep what the kernels look up.
#[derive(Debug, Default)]
pub(crate) struct Rotators(Mutex<HashMap<Geometry, Arc<Rotator>>>);

impl Rotators {
    fn get(&self, npu: &Npu, stream: &Stream, geometry: Geometry) -> Result<Arc<Rotator>, Refusal> {
        let mut rotators = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rotator) = rotators.get(&geometry) {
            return Ok(rotator.clone());
        }
        let rotator = Arc::new(npu.rotator(stream, geometry)?);
        rotators.insert(geometry, rotator.clone());
        Ok(rotator)
    }
}

/// Why a rotation did not run.
enum Refusal {
    /// It is beyond the kernels: ordinary operations do it.
    Limit,
    /// The device, or what the tensors were computed from, failed.
    Failed(ExecutionError),
}

impl From<AscendError> for Refusal {
    fn from(error: AscendError) -> Self {
        match error {
            AscendError::TileTooLarge { .. } | AscendError::KernelLimit { .. } => Self::Limit,
            error => Self::Failed(execution(&error)),
        }
    }
}

impl From<ExecutionError> for Refusal {
    fn from(error: ExecutionError) -> Self {
        Self::Failed(error)
    }
}

fn kernel_type(dtype: DType) -> Result<KernelType, Refusal> {
    match dtype {
        DType::F32 => Ok(KernelType::F32),
        DType::F16 => Ok(KernelType::F16),
        DType::BF16 => Ok(KernelType::Bf16),
        _ => Err(Refusal::Limit),
    }
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
        match angle_gradients([x.clone(), gradient.clone()], angles.shape(), op) {
            Ok(gradients) => gradients,
            Err(Refusal::Limit) => composed::angle_gradients::<Self>(x, gradient, angles, op),
            Err(Refusal::Failed(error)) => failed_like(&angles, &error),
        }
    }
}

/// Stands for a result that was not computed; the device reports the failure at its next
/// synchronisation.
fn failed_like(x: &AscendTensor, error: &ExecutionError) -> AscendTensor {
    if let Ok(context) = x.context() {
        context.failed(error);
    }
    AscendTensor::failed(&x.device(), x.shape(), x.dtype(), error.clone())
}

/// Rotates q, or q and k.
fn rotate<const N: usize>(
    x: [AscendTensor; N],
    angles: AscendTensor,
    op: RotaryOp,
) -> [AscendTensor; N] {
    let run = match Run::new(&x, &angles, op) {
        Ok(Some(run)) => run,
        Ok(None) => return x,
        Err(refusal) => return refused(x, angles, op, refusal),
    };
    let mut placed = x.map(|x| Placed::new(x, &op));
    let in_place = placed.iter().all(Placed::may_be_overwritten);
    if !in_place {
        placed.iter_mut().for_each(Placed::put_elsewhere);
    }
    match run.launch(&mut placed) {
        Ok(()) => placed.map(|placed| placed.target.unwrap_or(placed.source)),
        Err(refusal) => refused(placed.map(|placed| placed.source), angles, op, refusal),
    }
}

/// Composed where the kernels have a limit, else failed.
fn refused<const N: usize>(
    x: [AscendTensor; N],
    angles: AscendTensor,
    op: RotaryOp,
    refusal: Refusal,
) -> [AscendTensor; N] {
    x.map(|x| match &refusal {
        Refusal::Limit => composed::rotate::<Ascend>(x, angles.clone(), op),
        Refusal::Failed(error) => failed_like(&x, error),
    })
}

/// What a rotation needs besides q and k.
struct Run {
    op: RotaryOp,
    element: KernelType,
    rotator: Arc<Rotator>,
    rows: AscendTensor,
}

impl Run {
    /// Nothing if there is nothing to rotate.
    fn new(
        x: &[AscendTensor],
        angles: &AscendTensor,
        op: RotaryOp,
    ) -> Result<Option<Self>, Refusal> {
        op.check(&x[0], x.get(1), angles)
            .map_err(|error| ExecutionError::with_context(error.to_string()))?;
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

    fn angles(&self) -> Result<AngleRows<'_>, Refusal> {
        Ok(AngleRows {
            memory: self.rows.buffer()?,
            offset_bytes: self.rows.offset() * size_of::<f32>(),
            rows: self.rows.dims()[0],
        })
    }

    fn launch(&self, placed: &mut [Placed]) -> Result<(), Refusal> {
        let mut operands = placed.iter_mut().map(Placed::operand);
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

fn rotator(context: &Context, geometry: Geometry) -> Result<Arc<Rotator>, Refusal> {
    let (npu, stream) = (context.npu(), context.stream());
    context.rotators().get(npu, stream, geometry)
}

/// The tensor's layout, where the kernels can follow its strides.
fn layout_of(x: &AscendTensor, op: &RotaryOp) -> Option<HeadsLayout> {
    let layout = HeadsLayout::strided(op.layout, x.dims(), x.strides()).ok()?;
    layout.is_injective().then_some(layout)
}

/// A tensor as the kernels take it, and the one that is written if that is another.
struct Placed {
    source: AscendTensor,
    layout: HeadsLayout,
    target: Option<AscendTensor>,
    op: RotaryOp,
}

impl Placed {
    fn new(x: AscendTensor, op: &RotaryOp) -> Self {
        let strided = layout_of(&x, op);
        let source = if strided.is_some() { x } else { x.contiguous() };
        let layout = strided.or_else(|| layout_of(&source, op));
        Self {
            // A dense tensor whose rank was checked has a layout.
            layout: layout.unwrap_or_else(|| HeadsLayout::contiguous(op.layout, 0, 0, 0, 0)),
            source,
            target: None,
            op: *op,
        }
    }

    fn may_be_overwritten(&self) -> bool {
        self.source.is_unique()
    }

    fn put_elsewhere(&mut self) {
        let (device, shape) = (self.source.device(), self.source.shape());
        self.target = Some(AscendTensor::empty(&device, shape, self.source.dtype()));
    }

    fn read(&self) -> Result<Heads<&DeviceMemory>, Refusal> {
        Ok(Heads {
            memory: self.source.buffer()?,
            offset: self.source.offset(),
            layout: self.layout,
        })
    }

    fn operand(&mut self) -> Result<Operand<'_>, Refusal> {
        let (offset, layout) = (self.source.offset(), self.layout);
        let Some(to) = &mut self.target else {
            return Ok(Operand::InPlace(Heads {
                memory: self.source.buffer_mut()?,
                offset,
                layout,
            }));
        };
        let layout = layout_of(to, &self.op).ok_or(Refusal::Limit)?;
        Ok(Operand::Into {
            from: Heads {
                memory: self.source.buffer()?,
                offset,
                layout: self.layout,
            },
            to: Heads {
                offset: to.offset(),
                memory: to.buffer_mut()?,
                layout,
            },
        })
    }
}

/// Shaped as the angles, which have a row for each token, or for each token of one sample.
fn angle_gradients(
    x: [AscendTensor; 2],
    angles: Shape,
    op: RotaryOp,
) -> Result<AscendTensor, Refusal> {
    let element = kernel_type(x[0].dtype())?;
    if x[0].is_empty() {
        return Err(Refusal::Limit);
    }
    let context = x[0].context()?.clone();
    let rotator = rotator(&context, op.geometry)?;
    let [x, gradient] = x.map(|x| Placed::new(x, &op));
    // The adjoint's cos and sin are the forward's: <dy, R' g> = <R dy, g>, so x and gradient change
    // places.
    let (x, gradient) = match op.direction {
        Direction::Forward => (x, gradient),
        Direction::Adjoint => (gradient, x),
    };
    let (batch, seq) = (x.layout.batch, x.layout.seq);
    let (tokens, width) = (angles.as_slice()[0], angles.as_slice()[1]);
    let mut found = context
        .stream()
        .alloc::<u8>(batch * seq * width * size_of::<f32>())?;
    rotator.angle_gradient(AngleGradient {
        element,
        q: [x.read()?, gradient.read()?],
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
