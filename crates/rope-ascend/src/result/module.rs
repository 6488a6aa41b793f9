//! Kernel binaries and launches.

use super::{check, optional, recent_message};
use crate::error::{AscendError, Result};
use crate::sys::{
    AclRt, BINARY_MAGIC_VECTOR, aclrtBinHandle, aclrtBinaryLoadOption, aclrtBinaryLoadOptionType,
    aclrtBinaryLoadOptions, aclrtFuncHandle, aclrtStream, code,
};
use std::ffi::{CStr, c_void};

/// Loads a binary of vector kernels on the current device.
///
/// # Errors
/// The runtime's, or that the function is missing.
#[doc(alias = "aclrtBinaryLoadFromData")]
pub fn load(rt: &AclRt, library: &str, binary: &[u8]) -> Result<aclrtBinHandle> {
    let function = optional(
        rt.aclrtBinaryLoadFromData,
        "aclrtBinaryLoadFromData",
        library,
        "loading this crate's kernels",
    )?;
    let mut option = aclrtBinaryLoadOption {
        kind: aclrtBinaryLoadOptionType::MAGIC,
        value: [BINARY_MAGIC_VECTOR, 0, 0, 0],
    };
    let options = aclrtBinaryLoadOptions {
        options: &raw mut option,
        count: 1,
    };
    let mut handle = std::ptr::null_mut();
    // SAFETY: data, options and result are locals or borrowed for the call; the runtime copies
    // the binary.
    let result = unsafe {
        function(
            binary.as_ptr().cast(),
            binary.len(),
            &raw const options,
            &raw mut handle,
        )
    };
    check(rt, "aclrtBinaryLoadFromData", result)?;
    Ok(handle)
}

/// Unloads a binary.
///
/// # Errors
/// The runtime's, or that the function is missing.
///
/// # Safety
/// - No kernel of the binary is queued or used afterwards.
#[doc(alias = "aclrtBinaryUnLoad")]
pub unsafe fn unload(rt: &AclRt, library: &str, binary: aclrtBinHandle) -> Result<()> {
    let function = optional(
        rt.aclrtBinaryUnLoad,
        "aclrtBinaryUnLoad",
        library,
        "unloading kernels",
    )?;
    // SAFETY: a live handle, given up by the caller.
    check(rt, "aclrtBinaryUnLoad", unsafe { function(binary) })
}

/// Finds a kernel by its name.
///
/// # Errors
/// The runtime's, or that the function is missing.
///
/// # Safety
/// - `binary` is live.
#[doc(alias = "aclrtBinaryGetFunction")]
pub unsafe fn function(
    rt: &AclRt,
    library: &str,
    binary: aclrtBinHandle,
    name: &CStr,
) -> Result<aclrtFuncHandle> {
    let function = optional(
        rt.aclrtBinaryGetFunction,
        "aclrtBinaryGetFunction",
        library,
        "finding a kernel",
    )?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: live handle, nul-terminated name, a local for the result.
    let result = unsafe { function(binary, name.as_ptr(), &raw mut handle) };
    check(rt, "aclrtBinaryGetFunction", result)?;
    Ok(handle)
}

/// Queues `kernel` with `blocks` blocks. The arguments are copied during the call.
///
/// # Errors
/// [`Launch`](AscendError::Launch) if it is refused, or that the function is missing.
///
/// # Safety
/// - `args` is the kernel's argument block as its declaration wants it.
/// - The device memory that the arguments name is valid until the stream has passed the launch.
/// - `function` and `stream` are live and of the current device.
#[doc(alias = "aclrtLaunchKernelWithHostArgs")]
pub unsafe fn launch(
    rt: &AclRt,
    library: &str,
    kernel: &str,
    function: aclrtFuncHandle,
    blocks: u32,
    stream: aclrtStream,
    args: &mut [u8],
) -> Result<()> {
    let launch = optional(
        rt.aclrtLaunchKernelWithHostArgs,
        "aclrtLaunchKernelWithHostArgs",
        library,
        "launching this crate's kernels",
    )?;
    // SAFETY: no configuration and no place holders; `args` is valid for its length during the
    // call and copied by it; the rest is the caller's.
    let result = unsafe {
        launch(
            function,
            blocks,
            stream,
            std::ptr::null_mut(),
            args.as_mut_ptr().cast::<c_void>(),
            args.len(),
            std::ptr::null_mut(),
            0,
        )
    };
    match result {
        code::SUCCESS => Ok(()),
        code => Err(AscendError::Launch {
            kernel: kernel.to_owned(),
            code,
            meaning: code::meaning(code),
            detail: recent_message(rt),
        }),
    }
}
