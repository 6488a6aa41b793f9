//! Start and end of the runtime.

use super::check;
use crate::error::{AscendError, Result};
use crate::sys::{AclRt, code};

/// Initialises the runtime. Returns whether this call did it: false if something else in the
/// process had, which then also ends it.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclInit")]
pub fn init(rt: &AclRt) -> Result<bool> {
    // SAFETY: a null path selects the defaults.
    match check(rt, "aclInit", unsafe { (rt.aclInit)(std::ptr::null()) }) {
        Ok(()) => Ok(true),
        Err(AscendError::Call {
            code: code::REPEAT_INITIALIZE,
            ..
        }) => Ok(false),
        Err(other) => Err(other),
    }
}

/// Ends the runtime.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - No handle of the runtime is used afterwards.
#[doc(alias = "aclFinalize")]
pub unsafe fn finalize(rt: &AclRt) -> Result<()> {
    // SAFETY: the caller gives up all handles.
    check(rt, "aclFinalize", unsafe { (rt.aclFinalize)() })
}

/// Version of the runtime: major, minor, patch; `None` where it cannot be asked.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclrtGetVersion")]
pub fn version(rt: &AclRt) -> Result<Option<(i32, i32, i32)>> {
    let Some(function) = rt.aclrtGetVersion else {
        return Ok(None);
    };
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three locals are written during the call.
    check(rt, "aclrtGetVersion", unsafe {
        function(&raw mut major, &raw mut minor, &raw mut patch)
    })?;
    Ok(Some((major, minor, patch)))
}
