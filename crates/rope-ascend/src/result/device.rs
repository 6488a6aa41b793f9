//! Devices.

use super::{check, optional};
use crate::error::Result;
use crate::sys::{AclRt, aclrtDevAttr, aclrtMemAttr};
use std::ffi::CStr;

/// Number of devices.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclrtGetDeviceCount")]
pub fn count(rt: &AclRt) -> Result<u32> {
    let mut count = 0;
    // SAFETY: a local is written during the call.
    check(rt, "aclrtGetDeviceCount", unsafe {
        (rt.aclrtGetDeviceCount)(&raw mut count)
    })?;
    Ok(count)
}

/// The calling thread's current device, if it has one.
#[doc(alias = "aclrtGetDevice")]
#[must_use]
pub fn current(rt: &AclRt) -> Option<i32> {
    let mut device = 0;
    // SAFETY: a local is written during the call.
    let code = unsafe { (rt.aclrtGetDevice)(&raw mut device) };
    (code == 0).then_some(device)
}

/// Makes `device` the calling thread's current device. The runtime counts: as many [`reset`]s release the device.
///
/// # Errors
/// The runtime's.
#[doc(alias = "aclrtSetDevice")]
pub fn set(rt: &AclRt, device: i32) -> Result<()> {
    // SAFETY: takes a number.
    check(rt, "aclrtSetDevice", unsafe { (rt.aclrtSetDevice)(device) })
}

/// Takes back one [`set`]; the last one releases what the process holds on `device`.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// - No stream, event or memory of the device is used after the last one.
#[doc(alias = "aclrtResetDevice")]
pub unsafe fn reset(rt: &AclRt, device: i32) -> Result<()> {
    // SAFETY: the caller gives up everything on the device.
    check(rt, "aclrtResetDevice", unsafe {
        (rt.aclrtResetDevice)(device)
    })
}

/// A property of `device`.
///
/// # Errors
/// The runtime's, or that the function is missing.
#[doc(alias = "aclrtGetDeviceInfo")]
pub fn attribute(rt: &AclRt, library: &str, device: u32, attribute: aclrtDevAttr) -> Result<i64> {
    let function = optional(
        rt.aclrtGetDeviceInfo,
        "aclrtGetDeviceInfo",
        library,
        "reading the device's sizes",
    )?;
    let mut value = 0;
    // SAFETY: a local is written during the call.
    check(rt, "aclrtGetDeviceInfo", unsafe {
        function(device, attribute, &raw mut value)
    })?;
    Ok(value)
}

/// Free and total bytes of the current device's memory.
///
/// # Errors
/// The runtime's, or that the function is missing.
#[doc(alias = "aclrtGetMemInfo")]
pub fn memory(rt: &AclRt, library: &str) -> Result<(usize, usize)> {
    let function = optional(
        rt.aclrtGetMemInfo,
        "aclrtGetMemInfo",
        library,
        "reading free memory",
    )?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: two locals are written during the call.
    check(rt, "aclrtGetMemInfo", unsafe {
        function(aclrtMemAttr::HBM, &raw mut free, &raw mut total)
    })?;
    Ok((free, total))
}

/// Product name of the chip, where it can be asked.
#[must_use]
#[doc(alias = "aclrtGetSocName")]
pub fn soc_name(rt: &AclRt) -> Option<String> {
    // SAFETY: takes nothing.
    let name = unsafe { rt.aclrtGetSocName?() };
    if name.is_null() {
        return None;
    }
    // SAFETY: not null (checked), nul-terminated, owned by the runtime and constant.
    Some(
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned(),
    )
}
