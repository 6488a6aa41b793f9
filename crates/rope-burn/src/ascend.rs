//! Rotary embedding on an Ascend NPU, for tensors that live on the host.
//!
//! q and k are copied to the device, rotated by one launch, and copied back; so is the gradient. The copies cost more than
//! the rotation, so this is for checking a device and for models whose attention runs elsewhere, not for speed.
//!
//! # Examples
//! ```no_run
//! use burn::tensor::{Device, Distribution, Tensor};
//! use rope_ascend::rope::Npu;
//! use rope_burn::{Rotary, ascend::AscendRotary, rope_core::{Layout, Positions, RotarySpec}};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let rotary = Rotary::new(RotarySpec::builder(128).build()?, Layout::Bsnd);
//! let rotary = AscendRotary::try_new(rotary, &Npu::open(0)?)?;
//! let angles = rotary.try_angles(&Positions::text(1, 0, 5)?)?; // once a step
//! let device = Device::flex().autodiff();
//! let q = Tensor::<4>::random([2, 5, 4, 128], Distribution::Default, &device).require_grad();
//! let k = Tensor::<4>::random([2, 5, 2, 128], Distribution::Default, &device);
//! let (q_rotated, k_rotated) = rotary.try_forward(q.clone(), k, &angles)?; // in each layer
//! let gradients = (q_rotated.sum() + k_rotated.sum()).backward();
//! rotary.backward_result()?;
//! # Ok(()) }
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor, TensorData};
use half::{bf16, f16};
use rope_ascend::AscendError;
use rope_ascend::rope::{
    self as npu, Angles, KernelElement, Npu, Operand, Rotation, Rotator, View,
};
use rope_ascend::safe::DeviceBuffer;
use rope_core::{Direction, Geometry, Pairing, Positions};

use crate::angles::RotaryAngles;
use crate::error::{Result, RotaryError};
use crate::module::Rotary;
use crate::ops::RotaryOp;

/// The kernels' form of a geometry.
///
/// # Errors
/// [`AscendError::InvalidArgument`] for heads of more than 1024 channels.
pub fn kernel_geometry(geometry: Geometry) -> Result<npu::Rotary, AscendError> {
    let pairing = match geometry.pairing() {
        Pairing::Half => npu::Pairing::Half,
        Pairing::Adjacent => npu::Pairing::Adjacent,
        Pairing::Quarter => npu::Pairing::Quarter,
        Pairing::InterleaveHalf => npu::Pairing::InterleaveHalf,
    };
    let end = geometry.rotary_offset() + geometry.rotary_dim();
    let channels = number("channel", geometry.rotary_offset())?..number("channel", end)?;
    let rotary = npu::Rotary::partial(number("head_dim", geometry.head_dim())?, channels, pairing)?;
    Ok(if geometry.per_channel() {
        rotary.per_channel()
    } else {
        rotary
    })
}

/// The kernels' form of a direction.
pub fn kernel_direction(direction: Direction) -> npu::Direction {
    match direction {
        Direction::Forward => npu::Direction::Forward,
        Direction::Adjoint => npu::Direction::Adjoint,
    }
}

/// A size as the kernels count.
fn number(argument: &'static str, value: usize) -> Result<u32, AscendError> {
    u32::try_from(value).map_err(|_| AscendError::InvalidArgument {
        operation: "rotate",
        argument,
        expected: "below 2^32".into(),
        found: value.to_string(),
    })
}

/// Where the work runs, and what went wrong where nobody could be told.
#[derive(Debug)]
struct Worker {
    rotator: Rotator,
    failure: Mutex<Option<AscendError>>,
}

/// cos and sin of a step's tokens in device memory, shared by all layers. Cloning shares them.
#[derive(Clone, Debug)]
pub struct AscendAngles {
    rows: Arc<DeviceBuffer<f32>>,
    tokens: usize,
}

impl AscendAngles {
    /// The number of tokens served.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Rotates host tensors on an Ascend NPU, forward and backward. Cloning shares device and stream.
///
/// # Memory
/// The autodiff graph keeps the step's angles, in device memory, and never q or k.
#[derive(Clone, Debug)]
pub struct AscendRotary {
    rotary: Rotary,
    worker: Arc<Worker>,
}

impl AscendRotary {
    /// `rotary` on `npu`, on a stream of its own.
    ///
    /// # Errors
    /// [`RotaryError::Ascend`] if there are no kernels for the device, or the runtime fails.
    pub fn try_new(rotary: Rotary, npu: &Npu) -> Result<Self> {
        let stream = npu.stream()?;
        let rotator = npu.rotator(&stream, kernel_geometry(rotary.spec().geometry())?)?;
        let worker = Worker {
            rotator,
            failure: Mutex::default(),
        };
        Ok(Self {
            rotary,
            worker: Arc::new(worker),
        })
    }

    /// The rotation on the host that this one is the same as.
    pub fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    /// cos and sin for the tokens of a step, in device memory.
    ///
    /// # Errors
    /// As [`Rotary::try_angles`]; [`RotaryError::Ascend`].
    pub fn try_angles(&self, positions: &Positions) -> Result<AscendAngles> {
        let angles = self.rotary.token_angles(positions)?;
        self.upload(angles.cos(), angles.sin(), angles.tokens())
    }

    /// cos and sin of one's own, `[tokens, lanes]` each, in f32. They receive no gradients.
    ///
    /// # Errors
    /// [`RotaryError::AngleDType`]; [`RotaryError::Ascend`] if their shapes do not fit, or the runtime fails.
    pub fn try_angles_from(&self, angles: &RotaryAngles) -> Result<AscendAngles> {
        let values = |what, x: &Tensor<2>| {
            let found = x.dtype();
            let wrong = |_| RotaryError::AngleDType {
                what,
                found,
                expected: DType::F32,
            };
            x.to_data().try_into_vec::<f32>().map_err(wrong)
        };
        let (cos, sin) = (values("cos", &angles.cos)?, values("sin", &angles.sin)?);
        self.upload(&cos, &sin, angles.tokens())
    }

    fn upload(&self, cos: &[f32], sin: &[f32], tokens: usize) -> Result<AscendAngles> {
        Ok(AscendAngles {
            rows: Arc::new(self.worker.rotator.upload_angles(cos, sin)?),
            tokens,
        })
    }

    /// Rotates q and k, in one launch.
    ///
    /// # Errors
    /// As [`Rotary::try_forward`]; [`RotaryError::Ascend`] for f64, for what the device refused, and for a backward that
    /// failed earlier.
    pub fn try_forward<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        angles: &AscendAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let mut results = self.forward([q, k].into(), angles)?.into_iter();
        match (results.next(), results.next()) {
            (Some(q), Some(k)) => Ok((q, k)),
            _ => unreachable!("two tensors come back"),
        }
    }

    /// Rotates one tensor.
    ///
    /// # Errors
    /// As [`try_forward`](Self::try_forward).
    pub fn try_forward_single<const D: usize>(
        &self,
        x: Tensor<D>,
        angles: &AscendAngles,
    ) -> Result<Tensor<D>> {
        let results = self.forward(vec![x], angles)?;
        match results.into_iter().next() {
            Some(x) => Ok(x),
            None => unreachable!("one tensor comes back"),
        }
    }

    /// Whether the backward passes since the last call succeeded.
    ///
    /// burn's backward has no error of its own: where the device fails, the gradients that it owes are NaN, and the error
    /// comes out here, or of the next forward.
    ///
    /// # Errors
    /// [`RotaryError::Ascend`], the first failure.
    pub fn backward_result(&self) -> Result<()> {
        let mut failure = (self.worker.failure.lock()).unwrap_or_else(PoisonError::into_inner);
        failure.take().map_or(Ok(()), |error| Err(error.into()))
    }

    fn forward<const D: usize>(
        &self,
        inputs: Vec<Tensor<D>>,
        angles: &AscendAngles,
    ) -> Result<Vec<Tensor<D>>> {
        self.backward_result()?;
        let op = self.rotary.op(Direction::Forward);
        let described: Vec<(Shape, DType)> =
            inputs.iter().map(|x| (x.shape(), x.dtype())).collect();
        let rows = Shape::new([angles.tokens, op.geometry.lanes()]);
        let Some(((q, dtype), k)) = described.split_first() else {
            return Ok(inputs);
        };
        if *dtype == DType::F64 {
            return Err(refused("q", "f32, f16 or bf16", "f64").into());
        }
        let k = k.first().map(|(shape, dtype)| (shape, *dtype));
        op.check((q, *dtype), k, (&rows, DType::F32), (&rows, DType::F32))?;
        let data = inputs.iter().map(Tensor::to_data).collect();
        let results = self.worker.rotate(op, data, angles)?;
        let adjoint = Adjoint {
            worker: Arc::clone(&self.worker),
            angles: angles.clone(),
            op: op.transposed(),
        };
        let results = inputs.into_iter().zip(results).map(|(x, y)| {
            let y = Dispatch::ascend_result(x.into_dispatch(), y, adjoint.clone());
            Tensor::from_dispatch(y)
        });
        Ok(results.collect())
    }
}

fn refused(argument: &'static str, expected: &str, found: &str) -> AscendError {
    AscendError::InvalidArgument {
        operation: "rotate",
        argument,
        expected: expected.into(),
        found: found.into(),
    }
}

impl Worker {
    fn rotate(
        &self,
        op: RotaryOp,
        x: Vec<TensorData>,
        angles: &AscendAngles,
    ) -> Result<Vec<TensorData>> {
        if x.iter().any(|x| x.shape().num_elements() == 0) {
            return Ok(x);
        }
        match x.first().map(TensorData::dtype) {
            Some(DType::F32) => self.rotate_as::<f32>(op, x, angles),
            Some(DType::F16) => self.rotate_as::<f16>(op, x, angles),
            Some(DType::BF16) => self.rotate_as::<bf16>(op, x, angles),
            Some(found) => Err(RotaryError::UnsupportedDType { found }),
            None => Ok(x),
        }
    }

    fn rotate_as<E: KernelElement + burn::backend::Element>(
        &self,
        op: RotaryOp,
        x: Vec<TensorData>,
        angles: &AscendAngles,
    ) -> Result<Vec<TensorData>> {
        let stream = self.rotator.stream();
        let (mut buffers, mut views, mut sizes) = (Vec::new(), Vec::new(), (0, 0));
        for x in &x {
            let heads = op.heads("x", x.shape())?;
            sizes = (number("batch", heads.batch)?, number("seq", heads.seq)?);
            views.push(View {
                offset: 0,
                heads: number("heads", heads.heads)?,
                batch_stride: heads.strides.batch as u64,
                token_stride: heads.strides.seq as u64,
                head_stride: heads.strides.head as u64,
            });
            let wrong = |_| RotaryError::UnsupportedDType { found: x.dtype() };
            buffers.push(stream.upload(x.as_slice::<E>().map_err(wrong)?)?);
        }
        let mut operands = buffers
            .iter_mut()
            .zip(views)
            .map(|(buffer, view)| Operand::InPlace(buffer, view));
        if let Some(q) = operands.next() {
            self.rotator.rotate(&mut Rotation {
                direction: kernel_direction(op.direction),
                batch: sizes.0,
                seq: sizes.1,
                q,
                k: operands.next(),
                angles: Angles::PerToken(&angles.rows),
            })?;
        }
        let results = buffers.iter().zip(&x).map(|(buffer, x)| {
            let values = stream.download(buffer)?;
            Ok(TensorData::new(values, x.shape()))
        });
        results.collect()
    }

    /// The gradient, or NaN and a failure to report later.
    fn gradient(&self, op: RotaryOp, gradient: TensorData, angles: &AscendAngles) -> TensorData {
        let (shape, dtype) = (gradient.shape().clone(), gradient.dtype());
        let found = self.rotate(op, vec![gradient], angles);
        match found.map(|found| found.into_iter().next()) {
            Ok(Some(gradient)) => gradient,
            other => {
                let error = match other {
                    Err(RotaryError::Ascend(error)) => error,
                    Err(error) => refused("gradient", "as q or k", &error.to_string()),
                    Ok(_) => refused("gradient", "one tensor", "none"),
                };
                let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                failure.get_or_insert(error);
                TensorData::full(shape, f32::NAN).convert_dtype(dtype)
            }
        }
    }
}

/// What a node keeps: how to take a gradient back, and the angles for it.
#[derive(Clone, Debug)]
pub struct Adjoint {
    worker: Arc<Worker>,
    angles: AscendAngles,
    op: RotaryOp,
}

/// Tensors that a device outside burn computed, on a backend.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait AscendOps: Backend {
    /// `y` beside `x`; for autodiff, a result of `x` whose gradient `adjoint` takes back.
    fn ascend_result(x: FloatTensor<Self>, y: TensorData, adjoint: Adjoint) -> FloatTensor<Self> {
        let _ = adjoint;
        Self::float_from_data(y, &x.device())
    }
}

#[cfg(feature = "flex")]
impl AscendOps for burn::backend::flex::Flex {}

#[cfg(feature = "cube")]
impl AscendOps for burn::backend::Cube {}

#[cfg(feature = "remote")]
impl AscendOps for burn::backend::Remote {}

#[derive(Debug)]
struct AscendBackward;

impl<B: AscendOps> Backward<B, 1> for AscendBackward {
    type State = Adjoint;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Adjoint { worker, angles, op } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            let device = gradient.device();
            let data = burn::tensor::try_read_sync(B::float_into_data(gradient));
            let data = match data {
                Some(Ok(data)) => data,
                Some(Err(error)) => panic!("the gradient cannot be read: {error:?}"),
                None => panic!("the gradient cannot be read without waiting"),
            };
            B::float_from_data(worker.gradient(op, data, &angles), &device)
        });
    }
}

impl<B: AscendOps, C: CheckpointStrategy> AscendOps for Autodiff<B, C> {
    fn ascend_result(x: FloatTensor<Self>, y: TensorData, adjoint: Adjoint) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let y = B::ascend_result(x, y, adjoint.clone());
        match Backward::<B, 1>::prepare::<C>(AscendBackward, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(adjoint, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
