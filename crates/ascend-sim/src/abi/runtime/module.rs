//! Kernel binaries and launches.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::{get_text, handle, invalid, pointer, put};
use crate::abi::export::export;
use crate::abi::kernel::KernelLibrary;
use crate::abi::sys::read_host;
use crate::codes::*;
use crate::launch::{self, Way};
use crate::state::{Arguments, Function, sim};
use crate::trace::Violation;

/// `aclrtLaunchKernelAttr`: an id and a 16-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtLaunchKernelAttr {
    /// The attribute.
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

/// The most arguments of a list.
const MOST_ARGUMENTS: usize = 128;

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
            launch::submit(handle(funcHandle), numBlocks, handle(stream), args, Way::Copied)
        }
        fn aclrtFunctionGetParamCount(func: *const c_void, paramCount: *mut usize) {
            let state = sim();
            let function = state.functions.get(func as u64)?;
            let parameters = &function.library.kernels[function.kernel].parameters;
            let described = state.machine.describes_parameters;
            let count = if described { parameters.len() } else { 0 };
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(paramCount, count, "paramCount") }
        }
        fn aclrtLaunchKernelWithArgsArray(
            func: *mut c_void, numBlocks: u32, stream: *mut c_void,
            cfg: *mut AclrtLaunchKernelCfg, args: *mut *mut c_void,
        ) {
            // SAFETY: null or valid by the C declaration.
            unsafe { check_launch_config(cfg) }?;
            let parameters = {
                let state = sim();
                let function = state.functions.get(handle(func))?;
                if !state.machine.describes_parameters {
                    return invalid("the binary does not describe the kernel's parameters");
                }
                function.library.kernels[function.kernel].parameters.clone()
            };
            if args.is_null() && !parameters.is_empty() {
                return invalid("args is null");
            }
            let mut block = Vec::new();
            for (i, bytes) in parameters.into_iter().enumerate() {
                // SAFETY: by the C declaration `args` has an element for each parameter.
                let parameter = unsafe { *args.add(i) };
                if parameter.is_null() {
                    return invalid(format!("parameter {i} is null"));
                }
                // SAFETY: not null, and the program states that the parameter is there.
                let bytes = unsafe { read_host(parameter as usize, bytes) };
                launch::append(&mut block, &bytes);
            }
            launch::submit(handle(func), numBlocks, handle(stream), block, Way::Copied)
        }
        fn aclrtKernelArgsInit(funcHandle: *mut c_void, argsHandle: *mut *mut c_void) {
            if argsHandle.is_null() {
                return invalid("argsHandle is null");
            }
            let mut state = sim();
            let function = handle(funcHandle);
            state.functions.get(function)?;
            let begun = state.begin_arguments(Arguments {
                function,
                block: Vec::new(),
                count: 0,
                completed: false,
            });
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(argsHandle, pointer(begun), "argsHandle") }
        }
        fn aclrtKernelArgsAppend(
            argsHandle: *mut c_void, param: *mut c_void, paramSize: usize,
            paramHandle: *mut *mut c_void,
        ) {
            if param.is_null() || paramSize == 0 || paramHandle.is_null() {
                return invalid(format!(
                    "param is {param:p}, paramSize {paramSize}, paramHandle {paramHandle:p}: none \
                     may be 0"
                ));
            }
            // SAFETY: the program states that `paramSize` bytes are readable at `param`, which is
            // not null.
            let bytes = unsafe { read_host(param as usize, paramSize) };
            let mut state = sim();
            let arguments = state.arguments.get_mut(handle(argsHandle))?;
            if arguments.completed {
                let message = "the list was completed by aclrtKernelArgsFinalize";
                return Err(Failure::new(RT_FEATURE_NOT_SUPPORTED, message));
            }
            if arguments.count == MOST_ARGUMENTS {
                return invalid(format!("the list has {MOST_ARGUMENTS} arguments already"));
            }
            launch::append(&mut arguments.block, &bytes);
            arguments.count += 1;
            // A handle that nothing here takes: arguments are not changed in place.
            // SAFETY: an out parameter, not null and valid by the C declaration.
            unsafe { put(paramHandle, pointer(arguments.count as u64), "paramHandle") }
        }
        fn aclrtKernelArgsFinalize(argsHandle: *mut c_void) {
            sim().arguments.get_mut(handle(argsHandle))?.completed = true;
            Ok(())
        }
        fn aclrtLaunchKernelWithConfig(
            funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void,
            cfg: *mut AclrtLaunchKernelCfg, argsHandle: *mut c_void, reserve: *mut c_void,
        ) {
            // SAFETY: null or valid by the C declaration.
            unsafe { check_launch_config(cfg) }?;
            if !reserve.is_null() {
                return invalid("reserve must be null");
            }
            let block = {
                let state = sim();
                let arguments = state.arguments.get(handle(argsHandle))?;
                if arguments.function != handle(funcHandle) {
                    return invalid("the arguments were begun for another kernel");
                }
                if !arguments.completed {
                    return invalid("the arguments lack aclrtKernelArgsFinalize");
                }
                arguments.block.clone()
            };
            launch::submit(handle(funcHandle), numBlocks, handle(stream), block, Way::Completed)
        }
    }
    value {}
}
