//! Element types and devices of tensors.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType};

use crate::OpError;

/// Returns the computation type for tensors of a type: f32 for 16-bit types, otherwise the type
/// itself.
///
/// # Errors
/// [`OpError::UnsupportedDType`] for other types than f32, f16, bf16 and f64.
pub fn accumulator(x: DType) -> Result<FloatDType, OpError> {
    match x {
        DType::F32 | DType::F16 | DType::BF16 => Ok(FloatDType::F32),
        DType::F64 => Ok(FloatDType::F64),
        found => Err(OpError::UnsupportedDType { found }),
    }
}

/// Evaluates an expression with `$e` as the element type that a dtype names.
///
/// # Panics
/// For an unsupported type, which [`accumulator`](crate::accumulator) rejects: an operation of a
/// burn backend cannot return an error.
#[macro_export]
macro_rules! for_dtype {
    ($dtype:expr, $e:ident => $body:expr) => {{
        macro_rules! with {
            ($type:ty) => {{
                type $e = $type;
                $body
            }};
        }
        match $dtype {
            ::burn::tensor::DType::F32 => with!(f32),
            ::burn::tensor::DType::F16 => with!($crate::half::f16),
            ::burn::tensor::DType::BF16 => with!($crate::half::bf16),
            ::burn::tensor::DType::F64 => with!(f64),
            found => panic!("{}", $crate::OpError::UnsupportedDType { found }),
        }
    }};
}

/// Rounds a number to the computation type.
pub fn rounded(number: f64, wide: FloatDType) -> f64 {
    match wide {
        FloatDType::F64 => number,
        _ => f64::from(number as f32),
    }
}

/// Returns the smallest positive normal number of the computation type.
pub fn least(wide: FloatDType) -> f64 {
    match wide {
        FloatDType::F64 => f64::MIN_POSITIVE,
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Checks that a tensor has the type `expected` and is on the device of `first`.
///
/// # Errors
/// [`OpError::MixedDTypes`], [`OpError::Device`].
pub fn expect<T: TensorMetadata>(
    what: &'static str,
    tensor: &T,
    expected: DType,
    first: &T,
) -> Result<(), OpError> {
    let found = tensor.dtype();
    if found != expected {
        return Err(OpError::MixedDTypes {
            what,
            found,
            expected,
        });
    }
    expect_device(what, tensor, first)
}

/// Checks that a tensor is on the device of `first`, whether or not either is tracked.
///
/// # Errors
/// [`OpError::Device`].
pub fn expect_device<T: TensorMetadata>(
    what: &'static str,
    tensor: &T,
    first: &T,
) -> Result<(), OpError> {
    let (found, expected) = (tensor.device(), first.device());
    if found == expected {
        return Ok(());
    }
    Err(OpError::Device {
        what,
        found: format!("{found:?}"),
        expected: format!("{expected:?}"),
    })
}
