//! Ascend NPUs, real or simulated, as engines: the project's kernels and the stock operators.

pub mod doctor;
mod gradcheck;
mod kernels;
mod stock;

pub use gradcheck::check;
pub use kernels::Kernels;
pub use stock::{Operator, Stock};

use half::{bf16, f16};
use rope_ascend::rope::{KernelType, Npu, Unit};
use rope_ascend::sys::aclDataType;

use crate::buffer::{Buffer, DType};
use crate::engine::{Engine, EngineError};

/// The device code that rotates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// This project's kernels.
    #[default]
    Kernels,
    /// The one of them that rotates by a product with a matrix.
    Matrix,
    /// The operators that the vendor ships, as far as they go.
    Aclnn,
}

/// The engines of a path.
pub fn engines(npu: &Npu, path: Path) -> Vec<Box<dyn Engine>> {
    match path {
        Path::Kernels => vec![Box::new(Kernels::new(npu, Unit::Vector))],
        Path::Matrix => vec![Box::new(Kernels::new(npu, Unit::Cube))],
        Path::Aclnn => Operator::ALL
            .map(|operator| Box::new(Stock::new(npu, operator)) as Box<dyn Engine>)
            .into(),
    }
}

/// An element type of the device and of [`Buffer`].
trait Number: rope_core::Element<Acc = f32> + rope_ascend::safe::Element {
    const TYPE: KernelType;
    const ACL: aclDataType;
    fn of(buffer: &Buffer) -> Option<&[Self]>;
    fn wrap(values: Vec<Self>) -> Buffer;
}

macro_rules! number {
    ($type:ty, $variant:ident, $acl:ident) => {
        impl Number for $type {
            const TYPE: KernelType = KernelType::$variant;
            const ACL: aclDataType = aclDataType::$acl;
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
number!(f32, F32, FLOAT);
number!(f16, F16, FLOAT16);
number!(bf16, Bf16, BF16);

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

/// True if an element has 16 bits: what the cube unit multiplies.
fn is_short(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16)
}
