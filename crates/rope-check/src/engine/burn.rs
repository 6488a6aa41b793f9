//! rope-burn's operation.

use ::burn::tensor::{self, Device, Tensor, TensorData};
use half::{bf16, f16};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_core::{Direction, Layout, Real};

use super::{Case, Engine, EngineError};
use crate::buffer::{Buffer, DType};

/// rope-burn on a device: fused, and composed.
pub fn burn_engines(device: &Device) -> impl Iterator<Item = Box<dyn Engine>> {
    [Implementation::Fused, Implementation::Composed]
        .into_iter()
        .map(|implementation| {
            let device = device.clone();
            Box::new(Burn {
                operation: Direction::Forward,
                implementation,
                device,
            }) as Box<dyn Engine>
        })
}

/// The name of [`Burn`] in tables.
pub(crate) fn engine_name(implementation: Implementation) -> String {
    match implementation {
        Implementation::Fused => "burn/fused".into(),
        Implementation::Composed => "burn/composed".into(),
    }
}

/// rope-burn, through burn's tensors. The adjoint is what autodiff makes of the forward.
#[derive(Clone, Debug)]
pub struct Burn {
    /// The forward: the rotation, or the inverse as an operation of its own.
    pub operation: Direction,
    /// Fused or composed.
    pub implementation: Implementation,
    /// Where, without autodiff.
    pub device: Device,
}

impl Engine for Burn {
    fn name(&self) -> String {
        engine_name(self.implementation)
    }

    fn supports(&self, dtype: DType) -> bool {
        expect_dtype(&self.device, self.implementation, dtype).is_ok()
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        expect_dtype(&self.device, self.implementation, q.dtype())?;
        if case.layout == Layout::Tnd {
            self.run::<3>(case, direction, q, k)
        } else {
            self.run::<4>(case, direction, q, k)
        }
    }
}

impl Burn {
    fn run<const D: usize>(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        let device = self.device.clone().autodiff();
        let rotary = rotary(case, self.implementation)?;
        let angles = match q {
            Buffer::F64(_) => angle_tensors::<f64>(case, &device)?,
            _ => angle_tensors::<f32>(case, &device)?,
        };
        let rotate = |q, k| rotate(&rotary, self.operation, q, k, &angles);
        let place = |x: &Buffer, heads: usize| place::<D>(case, x, heads, &device);
        let (q, k) = (place(q, case.heads), k.map(|k| place(k, case.kv_heads)));
        let (q, k) = match direction {
            // Held twice, a tensor cannot be overwritten.
            Direction::Forward if case.in_place => rotate(q, k)?,
            Direction::Forward => rotate(q.clone(), k.clone())?,
            Direction::Adjoint => {
                // <R x, g> has the gradient R' g, whatever x and R.
                let leaf = |g: &Tensor<D>| g.zeros_like().require_grad();
                let (x, xk) = (leaf(&q), k.as_ref().map(leaf));
                let (y, yk) = rotate(x.clone(), xk.clone())?;
                let mut loss = sum(y * q);
                if let (Some(yk), Some(k)) = (yk, k) {
                    loss = loss + sum(yk * k);
                }
                let gradients = loss.backward();
                let gradient = |x: Tensor<D>| {
                    let missing = || EngineError::Burn("the backward gave no gradient".into());
                    x.grad(&gradients).ok_or_else(missing)
                };
                (gradient(x)?, xk.map(gradient).transpose()?)
            }
        };
        Ok((read(q)?, k.map(read).transpose()?))
    }
}

/// The module of a case.
pub(crate) fn rotary(case: &Case, implementation: Implementation) -> Result<Rotary, EngineError> {
    RotaryConfig::new(case.spec.clone())
        .with_layout(case.layout)
        .with_implementation(implementation)
        .try_init()
        .map_err(burn_error)
}

/// `operation` on q, and on k where there is one.
pub(crate) fn rotate<const D: usize>(
    rotary: &Rotary,
    operation: Direction,
    q: Tensor<D>,
    k: Option<Tensor<D>>,
    angles: &RotaryAngles,
) -> Result<(Tensor<D>, Option<Tensor<D>>), EngineError> {
    let rotated = match (operation, k) {
        (Direction::Forward, Some(k)) => rotary.try_forward(q, k, angles),
        (Direction::Adjoint, Some(k)) => rotary.try_adjoint(q, k, angles),
        (operation, None) => {
            let q = match operation {
                Direction::Forward => rotary.try_forward_single(q, angles),
                Direction::Adjoint => rotary.try_adjoint_single(q, angles),
            };
            return q.map(|q| (q, None)).map_err(burn_error);
        }
    };
    rotated.map(|(q, k)| (q, Some(k))).map_err(burn_error)
}

/// The sum of all elements. As a sum over one dimension, which GPUs reduce in a fixed order, where
/// `Tensor::sum` adds by atomics.
pub(crate) fn sum<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.flatten::<1>(0, D - 1).sum_dim(0)
}

/// The type in burn.
fn burn_dtype(dtype: DType) -> tensor::DType {
    match dtype {
        DType::F64 => tensor::DType::F64,
        DType::F32 => tensor::DType::F32,
        DType::F16 => tensor::DType::F16,
        DType::Bf16 => tensor::DType::BF16,
    }
}

/// Checks that a device computes in a type.
pub(crate) fn expect_dtype(
    device: &Device,
    implementation: Implementation,
    dtype: DType,
) -> Result<(), EngineError> {
    if device.supports_dtype(burn_dtype(dtype)) {
        return Ok(());
    }
    let engine = engine_name(implementation);
    Err(EngineError::Unsupported { engine, dtype })
}

pub(crate) fn burn_error(error: rope_burn::RotaryError) -> EngineError {
    EngineError::Burn(error.to_string())
}

pub(crate) fn angle_tensors<A: Real + tensor::Element>(
    case: &Case,
    device: &Device,
) -> Result<RotaryAngles, EngineError> {
    Ok(RotaryAngles::upload(case.angles::<A>()?, device))
}

/// A burn tensor; strided ones are views of a tensor with its first two dimensions exchanged.
pub(crate) fn place<const D: usize>(
    case: &Case,
    x: &Buffer,
    heads: usize,
    device: &Device,
) -> Tensor<D> {
    let dims = case.dims(heads);
    let dtype = burn_dtype(x.dtype());
    let data = match x {
        Buffer::F64(values) => TensorData::new(values.clone(), dims),
        Buffer::F32(values) => TensorData::new(values.clone(), dims),
        Buffer::F16(values) => TensorData::new(values.clone(), dims),
        Buffer::Bf16(values) => TensorData::new(values.clone(), dims),
    };
    let x = Tensor::<D>::from_data(data, (device, dtype));
    if case.strided {
        // By way of the host, not of arithmetic: NaN payloads stay.
        let exchanged = x.swap_dims(0, 1).into_data();
        Tensor::<D>::from_data(exchanged, (device, dtype)).swap_dims(0, 1)
    } else {
        x
    }
}

pub(crate) fn read<const D: usize>(x: Tensor<D>) -> Result<Buffer, EngineError> {
    let failed =
        |error: &dyn std::fmt::Debug| EngineError::Burn(format!("reading the result: {error:?}"));
    let data = x.try_into_data().map_err(|error| failed(&error))?;
    match data.dtype() {
        tensor::DType::F64 => data.try_into_vec().map(Buffer::F64).map_err(|e| failed(&e)),
        tensor::DType::F32 => data.try_into_vec().map(Buffer::F32).map_err(|e| failed(&e)),
        tensor::DType::F16 => data
            .try_into_vec::<f16>()
            .map(Buffer::F16)
            .map_err(|e| failed(&e)),
        tensor::DType::BF16 => data
            .try_into_vec::<bf16>()
            .map(Buffer::Bf16)
            .map_err(|e| failed(&e)),
        other => Err(EngineError::Burn(format!(
            "the result came back as {other:?}"
        ))),
    }
}
