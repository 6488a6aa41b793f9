//! Pinned host memory.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::device::Device;
use crate::error::Result;
use crate::result;

/// Bytes of host memory that the device copies without a staging buffer.
#[derive(Debug)]
pub(super) struct PinnedBuffer {
    pointer: NonNull<u8>,
    bytes: usize,
    device: Device,
}

// SAFETY: ordinary host memory, owned by this value alone.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(super) fn new(device: Device, bytes: usize) -> Result<Self> {
        device.inner.enter()?;
        let raw = result::malloc_host(device.inner.rt(), bytes.max(1))?;
        let pointer = NonNull::new(raw.cast::<u8>()).ok_or_else(|| {
            crate::AscendError::argument("pinned", "bytes", "an amount the host has", bytes)
        })?;
        // SAFETY: freshly allocated with at least `bytes` bytes; no reference exists yet.
        unsafe { pointer.as_ptr().write_bytes(0, bytes) };
        Ok(Self {
            pointer,
            bytes,
            device,
        })
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this size and initialised in `new`; copies to and from slices
        // are waited for before their borrow ends.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size and initialised in `new`; `self` is borrowed alone, and
        // copies to and from slices are waited for before their borrow ends.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let inner = &self.device.inner;
        // SAFETY: from `malloc_host`; no copy is pending, since copies are waited for.
        inner.teardown(|| unsafe { result::free_host(inner.rt(), self.pointer.as_ptr().cast()) });
    }
}
