//! Kernel binaries and launches.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::{get_text, handle, invalid, pointer, put};
use crate::abi::export::export;
use crate::abi::kernel::KernelLibrary;
use crate::abi::sys::read_host;
use crate::codes::*;
use crate::launch;
use crate::state::{Function, sim};
use crate::trace::Violation;

/// `aclrtLaunchKernelAttr`: an id and a 16-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtLaunchKernelAttr {
    /// Which attribute.
    pub id: i32,
    /// Its value.
    pub value: [u32; 4],
}

/// `aclrtLaunchKernelCfg`: a list of attributes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtLaunchKernelCfg {
    /// The attributes.
    pub attrs: *const AclrtLaunchKernelAttr,
    /// The number of attributes.
    pub num_attrs: usize,
}

const _: () = assert!(size_of::<AclrtLaunchKernelAttr>() == 20);
const _: () = assert!(size_of::<AclrtLaunchKernelCfg>() == 16);

/// Refuses a list of attributes at null.
///
/// # Safety
/// - `config` is null or valid for reading.
unsafe fn check_launch_config(config: *const AclrtLaunchKernelCfg) -> Outcome {
    // SAFETY: null or valid by the function's own condition.
    let config = unsafe { config.as_ref() };
    if config.is_some_and(|config| config.num_attrs != 0 && config.attrs.is_null()) {
        return invalid("the launch configuration has attributes at null");
    }
    Ok(())
}

export! {
    status {
        fn aclrtBinaryLoadFromData(
            data: *const c_void, length: usize, _options: *const c_void,
            binHandle: *mut *mut c_void,
        ) {
            if data.is_null() || length == 0 || binHandle.is_null() {
                return invalid(format!(
                    "data is {data:p}, length {length}, binHandle {binHandle:p}: none may be 0"
                ));
            }
            // SAFETY: the program states that `length` bytes are readable at `data`.
            let bytes = unsafe { read_host(data as usize, length) };
            let machine = {
                let state = sim();
                state.current_device()?;
                state.machine.clone()
            };
            let library = KernelLibrary::load(&bytes, &machine)?;
            let loaded = sim().binaries.insert(Arc::new(library));
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(binHandle, pointer(loaded), "binHandle") }
        }
        fn aclrtBinaryUnLoad(binHandle: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            let binary = handle(binHandle);
            let launched = state.launched.remove(&binary).unwrap_or_default();
            let mut launched = launched.iter();
            let busy = launched.find(|(actor, (epoch, _))| state.host_clock.get(**actor) < *epoch);
            if let Some((actor, (_, kernel))) = busy {
                let message = format!(
                    "binary 0x{binary:x} is unloaded while kernel `{kernel}`, on {actor}, may still \
                     run: synchronise first"
                );
                state.violate(Violation::host("binary-unloaded-busy", message));
            }
            state.binaries.remove(binary).map(drop)
        }
        fn aclrtBinaryGetFunction(
            binHandle: *mut c_void, kernelName: *const c_char, funcHandle: *mut *mut c_void,
        ) {
            // SAFETY: null or a C string by the C declaration.
            let name = unsafe { get_text(kernelName, "kernelName") }?;
            let mut state = sim();
            let binary = handle(binHandle);
            let library = Arc::clone(state.binaries.get(binary)?);
            let mut names = library.kernels.iter().map(|kernel| kernel.name.as_str());
            let Some(kernel) = names.clone().position(|found| found == name) else {
                let names = names.by_ref().collect::<Vec<_>>().join(", ");
                let message = format!("kernel `{name}` is not in the binary, which has {names}");
                return Err(Failure::new(RT_KERNEL_NOT_FOUND, message));
            };
            let function = state.functions.insert(Function { library, kernel, binary });
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(funcHandle, pointer(function), "funcHandle") }
        }
        fn aclrtLaunchKernelWithHostArgs(
            funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void,
            cfg: *mut AclrtLaunchKernelCfg, hostArgs: *mut c_void, argsSize: usize,
            placeHolderArray: *mut c_void, placeHolderNum: usize,
        ) {
            // SAFETY: null or valid by the C declaration.
            unsafe { check_launch_config(cfg) }?;
            if hostArgs.is_null() && argsSize != 0 {
                return invalid(format!("{argsSize} bytes of arguments are at null"));
            }
            if !placeHolderArray.is_null() || placeHolderNum != 0 {
                return invalid("placeholders in the arguments are not modelled");
            }
            let args = if argsSize == 0 {
                Vec::new()
            } else {
                // SAFETY: the program states that `argsSize` bytes are readable at `hostArgs`,
                // which is not null.
                unsafe { read_host(hostArgs as usize, argsSize) }
            };
            launch::submit(handle(funcHandle), numBlocks, handle(stream), args)
        }
    }
    value {}
}
