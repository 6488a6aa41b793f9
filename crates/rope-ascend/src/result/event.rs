//! Events.

use super::{check, check_synchronisation, optional};
use crate::error::Result;
use crate::sys::{AclRt, aclrtEvent, aclrtStream};

/// Creates an event on the current device.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclrtCreateEvent")]
pub fn create(rt: &AclRt) -> Result<aclrtEvent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a local is written during the call.
    check(rt, "aclrtCreateEvent", unsafe {
        (rt.aclrtCreateEvent)(&raw mut event)
    })?;
    Ok(event)
}

/// Destroys an event.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `event` is live and is not used afterwards.
#[doc(alias = "aclrtDestroyEvent")]
pub unsafe fn destroy(rt: &AclRt, event: aclrtEvent) -> Result<()> {
    // SAFETY: a live handle, given up by the caller.
    check(rt, "aclrtDestroyEvent", unsafe {
        (rt.aclrtDestroyEvent)(event)
    })
}

/// Records `event` behind the work queued on `stream`.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - `event` and `stream` are live.
#[doc(alias = "aclrtRecordEvent")]
pub unsafe fn record(rt: &AclRt, event: aclrtEvent, stream: aclrtStream) -> Result<()> {
    // SAFETY: live handles.
    check(rt, "aclrtRecordEvent", unsafe {
        (rt.aclrtRecordEvent)(event, stream)
    })
}

/// Waits until `event` has been passed.
///
/// # Errors
/// [`Execution`](crate::AscendError::Execution) if the work before it failed.
///
/// # Safety
/// - `event` is live.
#[doc(alias = "aclrtSynchronizeEvent")]
pub unsafe fn synchronize(rt: &AclRt, event: aclrtEvent) -> Result<()> {
    // SAFETY: a live handle.
    let result = unsafe { (rt.aclrtSynchronizeEvent)(event) };
    check_synchronisation(rt, "aclrtSynchronizeEvent", result)
}

/// Milliseconds between two recorded events.
///
/// # Errors
/// The runtime's, or that the function is missing.
///
/// # Safety
/// - Both events are live.
#[doc(alias = "aclrtEventElapsedTime")]
pub unsafe fn elapsed_ms(
    rt: &AclRt,
    library: &str,
    start: aclrtEvent,
    end: aclrtEvent,
) -> Result<f32> {
    let function = optional(
        rt.aclrtEventElapsedTime,
        "aclrtEventElapsedTime",
        library,
        "timing with events",
    )?;
    let mut ms = 0.0;
    // SAFETY: a local is written during the call; live handles.
    check(rt, "aclrtEventElapsedTime", unsafe {
        function(&raw mut ms, start, end)
    })?;
    Ok(ms)
}
