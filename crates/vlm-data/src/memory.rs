//! Memory of large buffers.

#![allow(unsafe_code, reason = "the system is advised by a call of C")]

use crate::{Result, VlmDataError};

/// An empty vector with room for `elements`.
///
/// # Errors
/// [`VlmDataError::Memory`] if the allocation fails
pub(crate) fn reserve<T>(what: &'static str, elements: u128) -> Result<Vec<T>> {
    let error = VlmDataError::Memory {
        what,
        bytes: elements.saturating_mul(size_of::<T>() as u128),
    };
    let mut vector = Vec::new();
    match usize::try_from(elements).map(|elements| vector.try_reserve_exact(elements)) {
        Ok(Ok(())) => {
            advise(&vector);
            Ok(vector)
        }
        _ => Err(error),
    }
}

/// A vector of `elements` zeros.
///
/// # Errors
/// as [`reserve`]
pub(crate) fn zeros<T: Clone + Default>(what: &'static str, elements: u128) -> Result<Vec<T>> {
    // Reserved, freed and allocated again as zeros. Zeroed allocation aborts instead of returning
    // an error when memory is short, but it gives pages that need no writing.
    drop(reserve::<T>(what, elements)?);
    let vector = vec![T::default(); elements as usize];
    advise(&vector);
    Ok(vector)
}

/// Bytes of a large page of x86-64, and of AArch64 with pages of 4 KiB.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

/// Requests large pages for a large buffer. The patches of a picture of 12 million pixels take 288
/// MB: 70,000 pages of 4 KiB, each with a page fault on the first write.
#[cfg(target_os = "linux")]
fn advise<T>(buffer: &Vec<T>) {
    let start = buffer.as_ptr().cast_mut().cast::<libc::c_void>();
    let before = start.align_offset(LARGE_PAGE);
    let bytes = buffer.capacity() * size_of::<T>();
    let length = bytes.saturating_sub(before) / LARGE_PAGE * LARGE_PAGE;
    if length > 0 {
        // SAFETY: the pages from `before` on, `length` bytes of them, lie within the allocation of
        // `buffer`, which is borrowed for this call. MADV_HUGEPAGE changes neither their contents
        // nor who may access them, only the size of the pages that the kernel may put behind them.
        // That it fails, as on a kernel without them, changes nothing.
        unsafe { libc::madvise(start.wrapping_byte_add(before), length, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_: &Vec<T>) {}
