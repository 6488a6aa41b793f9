//! Ascend NPUs, real or simulated, as engines: the project's kernels and the stock operators.

mod gradcheck;
mod kernels;
mod stock;

pub use gradcheck::check;
pub use kernels::Kernels;
pub use stock::{Operator, Stock};

use half::{bf16, f16};
use rope_ascend::rope::Npu;

use crate::buffer::{Buffer, DType};
use crate::engine::{AngleSource, Engine, EngineError};

/// Which code of the device rotates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// This project's kernels.
    #[default]
    Kernels,
    /// The operators that the vendor ships, as far as they go.
    Aclnn,
}

/// The engines of a path.
pub fn engines(npu: &Npu, path: Path) -> Vec<Box<dyn Engine>> {
    match path {
        Path::Kernels => [AngleSource::Tokens, AngleSource::Table]
            .map(|angles| Box::new(Kernels::new(npu, angles)) as Box<dyn Engine>)
            .into(),
        Path::Aclnn => Operator::ALL
            .map(|operator| Box::new(Stock::new(npu, operator)) as Box<dyn Engine>)
            .into(),
    }
}

/// The simulated NPU.
///
/// # Errors
/// [`NoSimulator`] in a program that was built without it, else the simulator's.
pub fn simulated() -> Result<Npu, Box<dyn std::error::Error + Send + Sync>> {
    #[cfg(feature = "ascend-sim")]
    return Ok(Npu::simulated()?);
    #[cfg(not(feature = "ascend-sim"))]
    return Err(Box::new(NoSimulator));
}

/// The program was built without the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this program has no simulated device; build it with the feature ascend-sim")]
pub struct NoSimulator;

/// An element type of the device and of [`Buffer`].
trait Number:
    rope_core::Element<Acc = f32>
    + rope_ascend::rope::KernelElement
    + rope_ascend::aclnn::OperatorElement
{
    fn of(buffer: &Buffer) -> Option<&[Self]>;
    fn wrap(values: Vec<Self>) -> Buffer;
}

macro_rules! number {
    ($type:ty, $variant:ident) => {
        impl Number for $type {
            fn of(buffer: &Buffer) -> Option<&[Self]> {
                match buffer {
                    Buffer::$variant(values) => Some(values),
                    _ => None,
                }
            }
            fn wrap(values: Vec<Self>) -> Buffer {
                Buffer::$variant(values)
            }
        }
    };
}
number!(f32, F32);
number!(f16, F16);
number!(bf16, Bf16);

/// Calls a function generic over the element type with the type of a buffer.
macro_rules! for_dtype {
    ($engine:expr, $buffer:expr, $method:ident($($argument:expr),*)) => {
        match $buffer.dtype() {
            $crate::buffer::DType::F32 => $engine.$method::<f32>($($argument),*),
            $crate::buffer::DType::F16 => $engine.$method::<half::f16>($($argument),*),
            $crate::buffer::DType::Bf16 => $engine.$method::<half::bf16>($($argument),*),
            dtype => Err($crate::engine::EngineError::Unsupported { engine: $engine.name(), dtype }),
        }
    };
}
use for_dtype;

fn values<'a, E: Number>(engine: &dyn Engine, buffer: &'a Buffer) -> Result<&'a [E], EngineError> {
    E::of(buffer).ok_or_else(|| EngineError::Unsupported {
        engine: engine.name(),
        dtype: buffer.dtype(),
    })
}

fn has_kernels(dtype: DType) -> bool {
    dtype != DType::F64
}

/// A size as the device counts.
fn number(value: usize) -> Result<u32, EngineError> {
    let too_large = |_| rope_ascend::AscendError::InvalidArgument {
        operation: "rotate",
        argument: "size",
        expected: "below 2^32".into(),
        found: value.to_string(),
    };
    Ok(u32::try_from(value).map_err(too_large)?)
}
