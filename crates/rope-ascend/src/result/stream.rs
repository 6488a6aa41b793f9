//! Streams. Handles belong to the device that was current at their creation.

use super::{check, check_synchronisation, optional};
use crate::error::Result;
use crate::sys::{AclRt, aclrtEvent, aclrtStream};

/// Creates a stream on the current device.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclrtCreateStream")]
pub fn create(rt: &AclRt) -> Result<aclrtStream> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a local is written during the call.
    check(rt, "aclrtCreateStream", unsafe {
        (rt.aclrtCreateStream)(&raw mut stream)
    })?;
    Ok(stream)
}

/// Destroys a stream.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `stream` is a live stream of the current device and is not used afterwards.
#[doc(alias = "aclrtDestroyStream")]
pub unsafe fn destroy(rt: &AclRt, stream: aclrtStream) -> Result<()> {
    // SAFETY: a live handle, given up by the caller.
    check(rt, "aclrtDestroyStream", unsafe {
        (rt.aclrtDestroyStream)(stream)
    })
}

/// Waits until all work queued on `stream` is done.
///
/// # Errors
/// [`Execution`](crate::AscendError::Execution) if that work failed, else the call's own.
///
/// # Safety
/// - `stream` is a live stream of the current device.
#[doc(alias = "aclrtSynchronizeStream")]
pub unsafe fn synchronize(rt: &AclRt, stream: aclrtStream) -> Result<()> {
    // SAFETY: a live handle.
    let result = unsafe { (rt.aclrtSynchronizeStream)(stream) };
    check_synchronisation(rt, "aclrtSynchronizeStream", result)
}

/// As [`synchronize`], for at most `timeout_ms`.
///
/// # Errors
/// As [`synchronize`]; also that the function is missing.
///
/// # Safety
/// - `stream` is a live stream of the current device.
#[doc(alias = "aclrtSynchronizeStreamWithTimeout")]
pub unsafe fn synchronize_for(
    rt: &AclRt,
    library: &str,
    stream: aclrtStream,
    timeout_ms: i32,
) -> Result<()> {
    let function = optional(
        rt.aclrtSynchronizeStreamWithTimeout,
        "aclrtSynchronizeStreamWithTimeout",
        library,
        "waiting with a limit",
    )?;
    // SAFETY: a live handle.
    let result = unsafe { function(stream, timeout_ms) };
    check_synchronisation(rt, "aclrtSynchronizeStreamWithTimeout", result)
}

/// Makes `stream` wait for `event`.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `stream` and `event` are live.
#[doc(alias = "aclrtStreamWaitEvent")]
pub unsafe fn wait_event(rt: &AclRt, stream: aclrtStream, event: aclrtEvent) -> Result<()> {
    // SAFETY: live handles.
    check(rt, "aclrtStreamWaitEvent", unsafe {
        (rt.aclrtStreamWaitEvent)(stream, event)
    })
}
