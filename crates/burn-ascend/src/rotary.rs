//! The rotation of q and k by rope-ascend's kernels, on the tensors' own memory.
//!
//! One launch rotates q and k. Tensors that nobody else holds are rotated where they lie; others are read as they lie and
//! written to new ones. Strides that the kernels can follow are followed. Nothing waits for the device.

use crate::Ascend;
use crate::context::Context;
use crate::error::execution;
use crate::tensor::AscendTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, ExecutionError, Shape, Slice, TensorMetadata};
use rope_ascend::AscendError;
use rope_ascend::rope::{AngleGradient, Angles, KernelType, Npu, Operand, Rotation, Rotator, View};
use rope_ascend::safe::{DeviceBuffer, Stream};
use rope_burn::ascend::{kernel_direction, kernel_geometry};
use rope_burn::{RotaryOp, RotaryOps, composed};
use rope_core::{Direction, Geometry, HeadsLayout};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A device's rotators, one for each geometry: they keep what the kernels look up.
#[derive(Debug, Default)]
pub(crate) struct Rotators(Mutex<HashMap<Geometry, Arc<Rotator>>>);

impl Rotators {
    fn get(&self, npu: &Npu, stream: &Stream, geometry: Geometry) -> Result<Arc<Rotator>, Refusal> {
        let mut rotators = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rotator) = rotators.get(&geometry) {
            return Ok(rotator.clone());
        }
        // The kernels take heads up to a size.
        let rotary = kernel_geometry(geometry).map_err(|_| Refusal::Limit)?;
        let rotator = Arc::new(npu.rotator(stream, rotary)?);
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
            AscendError::TileTooLarge { .. } => Self::Limit,
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

fn number(value: usize) -> Result<u32, Refusal> {
    u32::try_from(value).map_err(|_| Refusal::Limit)
}

impl RotaryOps for Ascend {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rotate([q, k], cos, sin, op).into()
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let [x] = rotate([x], cos, sin, op);
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match angle_gradients([x.clone(), gradient.clone()], cos.shape(), op) {
            Ok(gradients) => gradients,
            Err(Refusal::Limit) => composed::angle_gradients::<Self>(x, gradient, cos, op),
            Err(Refusal::Failed(error)) => {
                let failed = failed_like(&cos, &error);
                (failed.clone(), failed)
            }
        }
    }
}

/// Stands for a result that was not computed; the device reports the failure at its next synchronisation.
fn failed_like(x: &AscendTensor, error: &ExecutionError) -> AscendTensor {
    if let Ok(context) = x.context() {
        context.failed(error);
    }
    AscendTensor::failed(&x.place(), x.shape(), x.dtype(), error.clone())
}

/// Rotates q, or q and k.
fn rotate<const N: usize>(
    x: [AscendTensor; N],
    cos: AscendTensor,
    sin: AscendTensor,
    op: RotaryOp,
) -> [AscendTensor; N] {
    let run = match Run::new(&x, &cos, &sin, op) {
        Ok(Some(run)) => run,
        Ok(None) => return x,
        Err(refusal) => return refused(x, cos, sin, op, refusal),
    };
    let mut placed = x.map(|x| Placed::new(x, &op));
    let in_place = placed.iter().all(Placed::may_be_overwritten);
    if !in_place {
        placed.iter_mut().for_each(Placed::put_elsewhere);
    }
    match run.launch(&mut placed) {
        Ok(()) => placed.map(|placed| placed.target.unwrap_or(placed.source)),
        Err(refusal) => refused(placed.map(|placed| placed.source), cos, sin, op, refusal),
    }
}

/// Composed where the kernels have a limit, else failed.
fn refused<const N: usize>(
    x: [AscendTensor; N],
    cos: AscendTensor,
    sin: AscendTensor,
    op: RotaryOp,
    refusal: Refusal,
) -> [AscendTensor; N] {
    x.map(|x| match &refusal {
        Refusal::Limit => composed::rotate::<Ascend>(x, cos.clone(), sin.clone(), op),
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
        cos: &AscendTensor,
        sin: &AscendTensor,
        op: RotaryOp,
    ) -> Result<Option<Self>, Refusal> {
        let described: Vec<(Shape, DType)> = x.iter().map(|x| (x.shape(), x.dtype())).collect();
        let (cos_shape, sin_shape) = (cos.shape(), sin.shape());
        op.check(
            (&described[0].0, described[0].1),
            described.get(1).map(|(shape, dtype)| (shape, *dtype)),
            (&cos_shape, cos.dtype()),
            (&sin_shape, sin.dtype()),
        )
        .map_err(|error| ExecutionError::with_context(error.to_string()))?;
        if x.iter().all(AscendTensor::is_empty) {
            return Ok(None);
        }
        let element = kernel_type(described[0].1)?;
        let context = x[0].context()?;
        Ok(Some(Self {
            op,
            element,
            rotator: rotator(context, op.geometry)?,
            rows: rows(cos, sin),
        }))
    }

    fn launch(&self, placed: &mut [Placed]) -> Result<(), Refusal> {
        let layout = placed[0].layout;
        let row_bytes = size_of::<f32>() as u64;
        let angles = Angles::Rows {
            buffer: self.rows.buffer()?,
            offset_bytes: self.rows.offset() as u64 * row_bytes,
            rows: self.rows.dims()[0] as u64,
        };
        let mut operands = placed.iter_mut().map(Placed::operand);
        let Some(q) = operands.next() else {
            return Ok(());
        };
        self.rotator.rotate_bytes(
            self.element,
            &mut Rotation {
                direction: kernel_direction(self.op.direction),
                batch: number(layout.batch)?,
                seq: number(layout.seq)?,
                q: q?,
                k: operands.next().transpose()?,
                angles,
            },
        )?;
        Ok(())
    }
}

fn rotator(context: &Context, geometry: Geometry) -> Result<Arc<Rotator>, Refusal> {
    let (npu, stream) = (context.npu(), context.stream());
    context.rotators().get(npu, stream, geometry)
}

/// Each token's cosines, then its sines, densely. Where cos and sin are halves of such rows, as
/// [`Rotary::angles`](rope_burn::Rotary::angles) makes them, those rows.
fn rows(cos: &AscendTensor, sin: &AscendTensor) -> AscendTensor {
    let lanes = cos.dims()[1];
    let halves = [cos, sin].map(AscendTensor::strides) == [[2 * lanes, 1]; 2]
        && sin.offset() == cos.offset() + lanes
        && cos.shares_block(sin);
    if halves {
        let shape = Shape::from([cos.dims()[0], 2 * lanes]);
        return cos.view(shape, cos.strides().to_vec(), cos.offset());
    }
    Ascend::float_cat(vec![cos.clone(), sin.clone()], 1).contiguous()
}

/// How a tensor lies, where the kernels can follow its strides.
fn layout_of(x: &AscendTensor, op: &RotaryOp) -> Option<HeadsLayout> {
    let layout = HeadsLayout::strided(op.layout, x.dims(), x.strides()).ok()?;
    layout.is_injective().then_some(layout)
}

fn view_of(x: &AscendTensor, layout: &HeadsLayout) -> Result<View, Refusal> {
    Ok(View {
        offset: x.offset() as u64,
        heads: number(layout.heads)?,
        batch_stride: layout.strides.batch as u64,
        token_stride: layout.strides.seq as u64,
        head_stride: layout.strides.head as u64,
    })
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
        let (device, shape) = (self.source.place(), self.source.shape());
        self.target = Some(AscendTensor::empty(&device, shape, self.source.dtype()));
    }

    fn operand(&mut self) -> Result<Operand<'_, u8>, Refusal> {
        let from_view = view_of(&self.source, &self.layout)?;
        let Some(to) = &mut self.target else {
            return Ok(Operand::InPlace(self.source.buffer_mut()?, from_view));
        };
        let to_layout = layout_of(to, &self.op).ok_or(Refusal::Limit)?;
        let to_view = view_of(to, &to_layout)?;
        Ok(Operand::Into {
            from: self.source.buffer()?,
            from_view,
            to: to.buffer_mut()?,
            to_view,
        })
    }
}

/// Shaped as cos, which has a row for each token, or for each token of one sample.
fn angle_gradients(
    x: [AscendTensor; 2],
    cos: Shape,
    op: RotaryOp,
) -> Result<(AscendTensor, AscendTensor), Refusal> {
    let element = kernel_type(x[0].dtype())?;
    if x[0].is_empty() {
        return Err(Refusal::Limit);
    }
    let context = x[0].context()?.clone();
    let rotator = rotator(&context, op.geometry)?;
    let [x, gradient] = x.map(|x| Placed::new(x, &op));
    // The adjoint's cos and sin are the forward's: <dy, R' g> = <R dy, g>, so x and gradient change places.
    let (x, gradient) = match op.direction {
        Direction::Forward => (x, gradient),
        Direction::Adjoint => (gradient, x),
    };
    let (batch, seq, lanes) = (x.layout.batch, x.layout.seq, op.geometry.lanes());
    fn part(x: &Placed) -> Result<(&DeviceBuffer<u8>, View), Refusal> {
        Ok((x.source.buffer()?, view_of(&x.source, &x.layout)?))
    }
    let found = rotator.angle_gradient_bytes(
        element,
        &AngleGradient {
            batch: number(batch)?,
            seq: number(seq)?,
            q: part(&x)?,
            k: None,
            q_grad: part(&gradient)?,
            k_grad: None,
        },
    )?;
    let shape = Shape::from([batch, seq, 2 * lanes]);
    let mut rows = AscendTensor::dense(context, found, shape, DType::F32);
    let tokens = cos.as_slice()[0];
    if tokens != batch * seq {
        rows = Ascend::float_sum_dim(rows, 0);
    }
    let rows = Ascend::float_reshape(rows, Shape::from([tokens, 2 * lanes]));
    let half = |first: usize| {
        let slices = [Slice::from(0..tokens), Slice::from(first..first + lanes)];
        Ascend::float_slice(rows.clone(), &slices)
    };
    Ok((half(0), half(lanes)))
}
