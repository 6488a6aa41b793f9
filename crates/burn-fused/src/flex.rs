//! Flex, burn's CPU backend: kernels on the tensors' memory.

use burn::backend::Element;
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

/// Returns the elements of a contiguous tensor.
pub fn elements<E: Element + bytemuck::Pod>(x: &FlexTensor) -> &[E] {
    let start = x.layout().start_offset();
    &x.storage::<E>()[start..start + x.layout().num_elements()]
}

/// Returns true if a kernel may overwrite all the memory of a tensor: nothing else holds it, and it
/// has the elements and nothing else.
pub fn is_free<E: Element + bytemuck::Pod>(x: &FlexTensor) -> bool {
    let layout = x.layout();
    x.is_unique()
        && layout.is_contiguous()
        && layout.start_offset() == 0
        && x.storage::<E>().len() == layout.num_elements()
}
