//! Device memory.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::pool::Block;
use super::stream::Stream;
use crate::error::{AscendError, Result};

/// A plain number with the same representation on host and device.
///
/// # Safety
/// - Every bit pattern is a value, there are no padding bytes, and both sides agree on the bytes.
pub unsafe trait Element: Copy + Default + Send + Sync + 'static {}

macro_rules! elements {
    ($($number:ty),*) => { $(
        // SAFETY: a number of one, two, four or eight bytes, every pattern of which is a value,
        // little-endian on the host as on the device.
        unsafe impl Element for $number {}
    )* };
}

elements!(u8, u32, i64, f32, half::f16, half::bf16);

pub(super) fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: `Element` has no padding; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

pub(super) fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: any bytes make an `Element`; the length is that of the slice.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Bytes of device memory, for use on the stream that allocated or borrowed them.
///
/// Dropping returns pool memory to the stream's pool. This is safe while queued work still uses it,
/// since only later work of the same stream can reuse it.
#[derive(Debug)]
pub struct DeviceMemory {
    origin: Origin,
    bytes: usize,
    stream: Stream,
}

#[derive(Debug)]
enum Origin {
    /// Memory of the stream's pool, to which it returns.
    Pool(Block),
    /// Memory with another owner: a device address, an integer to the host.
    Borrowed(usize),
}

impl DeviceMemory {
    /// Borrows memory with another owner, such as another framework's tensor, for use on `stream`.
    /// It is not counted in [`MemoryUse`](super::MemoryUse), and dropping the handle does not free
    /// it.
    ///
    /// # Safety
    /// - `bytes` from `pointer` are allocated memory of the stream's device
    /// - they stay allocated until the stream has passed all work queued with this handle
    /// - until then other streams do not write them, nor read what that work writes
    pub unsafe fn borrowed(stream: &Stream, pointer: *mut c_void, bytes: usize) -> Self {
        Self {
            origin: Origin::Borrowed(pointer.addr()),
            bytes,
            stream: stream.clone(),
        }
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The stream of the memory.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device address, valid while the memory lives; the host cannot read through it.
    pub fn pointer(&self) -> *mut c_void {
        match &self.origin {
            Origin::Pool(block) => block.pointer,
            Origin::Borrowed(address) => std::ptr::without_provenance_mut(*address),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Origin::Pool(block) = self.origin {
            let counters = &self.stream.device().inner.counters;
            counters.buffer_dropped(self.bytes);
            self.stream.inner.give_back(block);
        }
    }
}

/// A typed buffer in device memory.
#[derive(Debug)]
pub struct DeviceBuffer<T: Element> {
    memory: DeviceMemory,
    _elements: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    pub(super) fn new(stream: Stream, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            let found = format!("{len} of {} bytes each", size_of::<T>());
            let expected = "within the address space";
            AscendError::argument("allocate", "elements", expected, found)
        })?;
        let block = stream.inner.block(bytes)?;
        stream.device().inner.counters.buffer_made(bytes);
        Ok(Self {
            memory: DeviceMemory {
                origin: Origin::Pool(block),
                bytes,
                stream,
            },
            _elements: PhantomData,
        })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl<T: Element> Deref for DeviceBuffer<T> {
    type Target = DeviceMemory;

    fn deref(&self) -> &DeviceMemory {
        &self.memory
    }
}

impl<T: Element> DerefMut for DeviceBuffer<T> {
    fn deref_mut(&mut self) -> &mut DeviceMemory {
        &mut self.memory
    }
}
