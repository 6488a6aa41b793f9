//! Device memory.

use super::pool::Block;
use super::stream::Stream;
use crate::error::Result;
use std::ffi::c_void;
use std::marker::PhantomData;

/// A plain number that host and device hold alike.
///
/// # Safety
/// - Every bit pattern is a value, there are no padding bytes, and both sides agree on the bytes.
pub unsafe trait Element: Copy + Default + Send + Sync + 'static {}

// SAFETY: plain numbers, little-endian on the host as on the device.
unsafe impl Element for u8 {}
// SAFETY: as above.
unsafe impl Element for u16 {}
// SAFETY: as above.
unsafe impl Element for i32 {}
// SAFETY: as above.
unsafe impl Element for u32 {}
// SAFETY: as above.
unsafe impl Element for i64 {}
// SAFETY: as above.
unsafe impl Element for f32 {}
// SAFETY: two bytes, every pattern valid.
unsafe impl Element for half::f16 {}
// SAFETY: two bytes, every pattern valid.
unsafe impl Element for half::bf16 {}

pub(super) fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: `Element` has no padding; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: any bytes make an `Element`; the length is that of the slice.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// `len` elements in device memory, used on the stream that made them.
///
/// Dropping returns the memory to the stream's cache. That is safe while queued work still uses
/// it, because only later work of the same stream gets it again.
#[derive(Debug)]
pub struct DeviceBuffer<T: Element> {
    block: Block,
    len: usize,
    stream: Stream,
    _elements: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    pub(super) fn new(stream: Stream, len: usize) -> Result<Self> {
        let bytes = len * size_of::<T>();
        let block = stream.inner.block(bytes)?;
        stream.device().inner.counters.buffer_made(bytes);
        Ok(Self {
            block,
            len,
            stream,
            _elements: PhantomData,
        })
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The stream that made the buffer.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device address, valid while the buffer lives; the host cannot read through it.
    #[must_use]
    pub fn pointer(&self) -> *mut c_void {
        self.block.pointer
    }
}

impl<T: Element> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        self.stream
            .device()
            .inner
            .counters
            .buffer_dropped(self.bytes());
        self.stream.inner.give_back(self.block);
    }
}
