//! Flex, burn's CPU backend: kernels on the tensors' memory.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};

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

/// Creates a tensor of zeros in untouched pages.
///
/// `FlexTensor::empty` allocates bytes and then copies them to memory aligned for any type, which
/// costs a pass over the tensor and twice its memory.
pub fn zeros(shape: Shape, dtype: DType) -> FlexTensor {
    match dtype.size() {
        2 => FlexTensor::filled_typed(shape, dtype, 0u16),
        4 => FlexTensor::filled_typed(shape, dtype, 0u32),
        8 => FlexTensor::filled_typed(shape, dtype, 0u64),
        _ => FlexTensor::empty(shape, dtype),
    }
}
