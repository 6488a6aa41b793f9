//! Kernel binaries, arguments and launches.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::{get_text, handle, pointer, put};
use crate::abi::export::export;
use crate::abi::kernel::KernelLibrary;
use crate::abi::sys::read_host;
use crate::codes::*;
use crate::launch::{self, PlaceHolder};
use crate::state::{Arguments, Function, set_recent_message, sim};

const MAX_KERNEL_ARGUMENTS: usize = 128;
const ARGUMENT_ALIGNMENT: usize = 8;

/// `aclrtPlaceHolderInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtPlaceHolderInfo {
    /// Where in the arguments the device address goes.
    pub addr_offset: u32,
    /// Where in the host buffer the data begins.
    pub data_offset: u32,
}

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
    /// How many.
    pub num_attrs: usize,
}

/// `aclrtBinaryLoadOption`: a kind and a 16-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtBinaryLoadOption {
    /// Which option.
    pub kind: i32,
    /// Its value.
    pub value: [u32; 4],
}

/// `aclrtBinaryLoadOptions`: a list of options.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtBinaryLoadOptions {
    /// The options.
    pub options: *const AclrtBinaryLoadOption,
    /// How many.
    pub num_opt: usize,
}

const _: () = assert!(size_of::<AclrtPlaceHolderInfo>() == 8);
const _: () = assert!(size_of::<AclrtLaunchKernelAttr>() == 20);
const _: () = assert!(size_of::<AclrtLaunchKernelCfg>() == 16);
const _: () = assert!(size_of::<AclrtBinaryLoadOption>() == 20);
const _: () = assert!(size_of::<AclrtBinaryLoadOptions>() == 16);

fn check_launch_config(config: *const AclrtLaunchKernelCfg) -> Outcome {
    if config.is_null() {
        return Ok(());
    }
    // SAFETY: not null, and valid by the C declaration.
    let config = unsafe { &*config };
    if config.num_attrs != 0 && config.attrs.is_null() {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            "the launch configuration has attributes at null",
        ));
    }
    Ok(())
}

fn load_binary(bytes: &[u8]) -> Outcome<u64> {
    let machine = {
        let state = sim();
        state.current_device()?;
        state.machine.clone()
    };
    let library = KernelLibrary::load(bytes, &machine)?;
    Ok(sim().binaries.insert(Arc::new(library)))
}

export! {
    status {
        fn aclrtBinaryLoadFromData(data: *const c_void, length: usize, options: *const AclrtBinaryLoadOptions, binHandle: *mut *mut c_void) {
            let _ = options;
            if data.is_null() || length == 0 || binHandle.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, format!("data is {data:p}, length {length}, binHandle {binHandle:p}: none may be 0")));
            }
            // SAFETY: the program says that `length` bytes are readable at `data`.
            let bytes = unsafe { read_host(data as usize, length) };
            let loaded = load_binary(&bytes)?;
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(binHandle, pointer(loaded), "binHandle") }
        }
        fn aclrtBinaryLoadFromFile(binPath: *const c_char, options: *mut AclrtBinaryLoadOptions, binHandle: *mut *mut c_void) {
            let _ = options;
            // SAFETY: null or a C string by the C declaration.
            let path = unsafe { get_text(binPath, "binPath") }?;
            let bytes = std::fs::read(&path).map_err(|error| Failure::new(RT_PARAM_INVALID, format!("{path}: {error}")))?;
            let loaded = load_binary(&bytes)?;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(binHandle, pointer(loaded), "binHandle") }
        }
        fn aclrtBinaryUnLoad(binHandle: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            state.binaries.remove(handle(binHandle))?;
            Ok(())
        }
        fn aclrtBinaryGetFunction(binHandle: *mut c_void, kernelName: *const c_char, funcHandle: *mut *mut c_void) {
            // SAFETY: null or a C string by the C declaration.
            let name = unsafe { get_text(kernelName, "kernelName") }?;
            let mut state = sim();
            let library = Arc::clone(state.binaries.get(handle(binHandle))?);
            let kernel = library.kernels.iter().position(|kernel| kernel.name == name).ok_or_else(|| {
                let names: Vec<&str> = library.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
                Failure::new(RT_KERNEL_NOT_FOUND, format!("kernel `{name}` is not in the binary, which has {}", names.join(", ")))
            })?;
            let function = state.functions.insert(Function { library, kernel, binary: handle(binHandle) });
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(funcHandle, pointer(function), "funcHandle") }
        }
        fn aclrtLaunchKernelWithHostArgs(funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void, cfg: *mut AclrtLaunchKernelCfg, hostArgs: *mut c_void, argsSize: usize, placeHolderArray: *mut AclrtPlaceHolderInfo, placeHolderNum: usize) {
            check_launch_config(cfg)?;
            if (hostArgs.is_null() && argsSize != 0) || (placeHolderArray.is_null() && placeHolderNum != 0) {
                return Err(Failure::new(RT_PARAM_INVALID, "arguments or placeholders are null but have a size"));
            }
            // SAFETY: the program says that `argsSize` bytes are readable at `hostArgs`.
            let args = if argsSize == 0 { Vec::new() } else { unsafe { read_host(hostArgs as usize, argsSize) } };
            let place_holders: Vec<PlaceHolder> = if placeHolderNum == 0 {
                Vec::new()
            } else {
                // SAFETY: not null, and `placeHolderNum` entries long by the C declaration.
                unsafe { std::slice::from_raw_parts(placeHolderArray, placeHolderNum) }
                    .iter()
                    .map(|p| PlaceHolder { address_offset: p.addr_offset as usize, data_offset: p.data_offset as usize })
                    .collect()
            };
            let stream = start_launch(handle(funcHandle), handle(stream))?;
            launch::submit(handle(funcHandle), numBlocks, stream, args, &place_holders)
        }
        fn aclrtKernelArgsInit(funcHandle: *mut c_void, argsHandle: *mut *mut c_void) {
            let mut state = sim();
            state.functions.get(handle(funcHandle))?;
            let arguments = state.arguments.insert(Arguments { function: handle(funcHandle), bytes: Vec::new(), finalized: false });
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(argsHandle, pointer(arguments), "argsHandle") }
        }
        fn aclrtKernelArgsAppend(argsHandle: *mut c_void, param: *mut c_void, paramSize: usize, paramHandle: *mut *mut c_void) {
            if param.is_null() || paramSize == 0 {
                return Err(Failure::new(RT_PARAM_INVALID, format!("param is {param:p} of {paramSize} bytes: neither may be 0")));
            }
            // SAFETY: the program says that `paramSize` bytes are readable at `param`.
            let bytes = unsafe { read_host(param as usize, paramSize) };
            let mut state = sim();
            let arguments = state.arguments.get_mut(handle(argsHandle))?;
            if arguments.finalized {
                return Err(Failure::new(RT_PARAM_INVALID, "the arguments are finalized already"));
            }
            if arguments.bytes.len() / ARGUMENT_ALIGNMENT >= MAX_KERNEL_ARGUMENTS {
                return Err(Failure::new(RT_PARAM_INVALID, format!("a kernel takes at most {MAX_KERNEL_ARGUMENTS} arguments")));
            }
            let offset = arguments.bytes.len();
            arguments.bytes.extend_from_slice(&bytes);
            arguments.bytes.resize(arguments.bytes.len().next_multiple_of(ARGUMENT_ALIGNMENT), 0);
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(paramHandle, pointer(offset as u64), "paramHandle") }
        }
        fn aclrtKernelArgsFinalize(argsHandle: *mut c_void) {
            let mut state = sim();
            state.arguments.get_mut(handle(argsHandle))?.finalized = true;
            Ok(())
        }
        fn aclrtLaunchKernelWithConfig(funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void, cfg: *mut AclrtLaunchKernelCfg, argsHandle: *mut c_void, reserve: *mut c_void) {
            check_launch_config(cfg)?;
            if !reserve.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, "reserve must be null"));
            }
            let bytes = {
                let state = sim();
                let arguments = state.arguments.get(handle(argsHandle))?;
                if !arguments.finalized {
                    return Err(Failure::new(RT_PARAM_INVALID, "aclrtKernelArgsFinalize was not called"));
                }
                if arguments.function != handle(funcHandle) {
                    return Err(Failure::new(RT_PARAM_INVALID, "the arguments were made for another kernel"));
                }
                arguments.bytes.clone()
            };
            let stream = start_launch(handle(funcHandle), handle(stream))?;
            launch::submit(handle(funcHandle), numBlocks, stream, bytes, &[])
        }
    }
    value {}
}

/// The stream of a launch, once function and binary are known to be alive.
fn start_launch(function: u64, stream: u64) -> Outcome<u64> {
    let mut state = sim();
    let stream = state.stream_handle(stream)?;
    let binary = state.functions.get(function)?.binary;
    if state.binaries.get(binary).is_err() {
        set_recent_message("the kernel's binary was unloaded");
        return Err(Failure::new(
            RT_INVALID_HANDLE,
            "the kernel's binary was unloaded: keep it until the last launch",
        ));
    }
    Ok(stream)
}
