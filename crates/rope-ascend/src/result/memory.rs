//! Memory and copies.

use super::{check, check_allocation};
use crate::error::Result;
use crate::sys::{AclRt, aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtStream};
use std::ffi::c_void;

/// Allocates memory on the current device.
///
/// # Errors
/// [`OutOfMemory`](crate::AscendError::OutOfMemory), else the runtime's.
#[doc(alias = "aclrtMalloc")]
pub fn malloc(rt: &AclRt, bytes: usize) -> Result<*mut c_void> {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: a local is written during the call; the memory is the caller's to free.
    let result =
        unsafe { (rt.aclrtMalloc)(&raw mut pointer, bytes, aclrtMemMallocPolicy::HUGE_FIRST) };
    check_allocation(rt, "aclrtMalloc", bytes, result)?;
    Ok(pointer)
}

/// Frees memory of the current device.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `pointer` came from [`malloc`] and no queued work touches it.
#[doc(alias = "aclrtFree")]
pub unsafe fn free(rt: &AclRt, pointer: *mut c_void) -> Result<()> {
    // SAFETY: the caller's allocation, given up.
    check(rt, "aclrtFree", unsafe { (rt.aclrtFree)(pointer) })
}

/// Allocates pinned host memory.
///
/// # Errors
/// [`OutOfMemory`](crate::AscendError::OutOfMemory), else the runtime's.
#[doc(alias = "aclrtMallocHost")]
pub fn malloc_host(rt: &AclRt, bytes: usize) -> Result<*mut c_void> {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: a local is written during the call; the memory is the caller's to free.
    let result = unsafe { (rt.aclrtMallocHost)(&raw mut pointer, bytes) };
    check_allocation(rt, "aclrtMallocHost", bytes, result)?;
    Ok(pointer)
}

/// Frees pinned host memory.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `pointer` came from [`malloc_host`] and no queued copy touches it.
#[doc(alias = "aclrtFreeHost")]
pub unsafe fn free_host(rt: &AclRt, pointer: *mut c_void) -> Result<()> {
    // SAFETY: the caller's allocation, given up.
    check(rt, "aclrtFreeHost", unsafe { (rt.aclrtFreeHost)(pointer) })
}

/// Copies `bytes` from `src` to `dst` before it returns. It is not ordered with any stream.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - Both ranges are valid for `bytes` in the spaces that `kind` names, and no queued work uses
///   them during the call.
#[doc(alias = "aclrtMemcpy")]
pub unsafe fn copy(
    rt: &AclRt,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    kind: aclrtMemcpyKind,
) -> Result<()> {
    // SAFETY: extents are the caller's.
    check(rt, "aclrtMemcpy", unsafe {
        (rt.aclrtMemcpy)(dst, bytes, src, bytes, kind)
    })
}

/// Queues a copy of `bytes` from `src` to `dst` on `stream`.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - Both ranges are valid for `bytes` in the spaces that `kind` names, and stay so, unread or
///   unwritten by the host as applies, until the stream has passed the copy.
/// - `stream` is live and of the current device.
#[doc(alias = "aclrtMemcpyAsync")]
pub unsafe fn copy_async(
    rt: &AclRt,
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    kind: aclrtMemcpyKind,
    stream: aclrtStream,
) -> Result<()> {
    // SAFETY: extents and lifetimes are the caller's.
    let result = unsafe { (rt.aclrtMemcpyAsync)(dst, bytes, src, bytes, kind, stream) };
    check(rt, "aclrtMemcpyAsync", result)
}

/// Queues the filling of `bytes` at `dst` with the low byte of `value`.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - As for [`copy_async`].
#[doc(alias = "aclrtMemsetAsync")]
pub unsafe fn set_async(
    rt: &AclRt,
    dst: *mut c_void,
    value: i32,
    bytes: usize,
    stream: aclrtStream,
) -> Result<()> {
    // SAFETY: extent and lifetime are the caller's.
    let result = unsafe { (rt.aclrtMemsetAsync)(dst, bytes, value, bytes, stream) };
    check(rt, "aclrtMemsetAsync", result)
}
