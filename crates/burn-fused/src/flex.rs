//! Flex, burn's CPU backend: kernels on the tensors' memory.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};

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
