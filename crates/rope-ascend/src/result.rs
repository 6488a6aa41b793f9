//! One C call, one `Result`: no ownership, no policy.
//!
//! The functions take the runtime's function table and raw handles. Pointers that they write
//! through are locals; handles are the caller's, and the runtime refuses stale ones. Functions that
//! queue work state the device memory in use and the end of this use. Each error is the runtime's,
//! or states that the installation lacks the function.
#![allow(unsafe_code, reason = "each function is one foreign call")]

pub(crate) mod collective;

use std::ffi::{CStr, c_void};

use crate::error::{AscendError, Cores, Result};
use crate::sys::{
    AclRt, BINARY_MAGIC_VECTOR, STREAM_FAST_LAUNCH, STREAM_FAST_SYNC, aclError, aclrtArgsHandle,
    aclrtBinHandle, aclrtBinaryLoadOption, aclrtBinaryLoadOptionType, aclrtBinaryLoadOptions,
    aclrtDevAttr, aclrtEvent, aclrtFuncHandle, aclrtLaunchKernelCfg, aclrtMemAttr,
    aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtParamHandle, aclrtStream, code,
};

/// The runtime's last message on this thread, trimmed.
pub(crate) fn recent_message(rt: &AclRt) -> String {
    const NONE: &str = "no message";
    // SAFETY: takes nothing; returns null or a nul-terminated string that the runtime owns and
    // keeps until the next call on this thread; it is copied at once.
    let message = unsafe { (rt.aclGetRecentErrMsg)() };
    if message.is_null() {
        return NONE.to_owned();
    }
    // SAFETY: not null (checked); nul-terminated and alive until the next call of the runtime.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    match text.trim() {
        "" => NONE.to_owned(),
        text => text.to_owned(),
    }
}

/// Converts the result of `function` to a [`Result`].
pub(crate) fn check(rt: &AclRt, function: &'static str, result: aclError) -> Result<()> {
    match result {
        code::SUCCESS => Ok(()),
        code => Err(AscendError::Call {
            function,
            code,
            meaning: code::meaning(code),
            detail: recent_message(rt),
        }),
    }
}

/// The optional function, or an error that names it.
pub(crate) fn optional<F>(
    function: Option<F>,
    symbol: &'static str,
    library: &str,
    purpose: &'static str,
) -> Result<F> {
    function.ok_or_else(|| AscendError::SymbolUnavailable {
        symbol,
        library: library.to_owned(),
        purpose,
    })
}

/// The value that `call` of `function` writes over `value`.
fn written<T>(
    rt: &AclRt,
    function: &'static str,
    mut value: T,
    call: impl FnOnce(*mut T) -> aclError,
) -> Result<T> {
    check(rt, function, call(&raw mut value))?;
    Ok(value)
}

/// Calls that return a code and nothing else.
macro_rules! calls {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($parameter:ident: $ty:ty),*) = $function:ident($($argument:ident),*);
    )*) => { $(
        $(#[$meta])*
        pub(crate) unsafe fn $name(rt: &AclRt, $($parameter: $ty),*) -> Result<()> {
            // SAFETY: the caller's pointers and handles are live and large enough, as this
            // function asks of its caller.
            let code = unsafe { (rt.$function)($($argument),*) };
            check(rt, stringify!($function), code)
        }
    )* };
}

calls! {
    /// Ends the runtime.
    ///
    /// # Safety
    /// - No handle of the runtime is used afterwards.
    fn finalize() = aclFinalize();

    /// Makes `device` the calling thread's current device. The runtime counts calls: the same
    /// number of [`reset_device`] calls releases the device.
    ///
    /// # Safety
    /// - None: it takes a number.
    fn set_device(device: i32) = aclrtSetDevice(device);

    /// Undoes one [`set_device`]; the last one releases the process's resources on `device`.
    ///
    /// # Safety
    /// - No stream or memory of the device is used after the last one.
    fn reset_device(device: i32) = aclrtResetDevice(device);

    /// Destroys a stream.
    ///
    /// # Safety
    /// - `stream` is a live stream of the current device and is not used afterwards.
    fn destroy_stream(stream: aclrtStream) = aclrtDestroyStream(stream);

    /// Destroys an event.
    ///
    /// # Safety
    /// - `event` is a live event of the current device; no queued work waits for it, and it is not
    ///   used afterwards.
    fn destroy_event(event: aclrtEvent) = aclrtDestroyEvent(event);

    /// Queues the completion of an event on `stream`, after the work before.
    ///
    /// # Safety
    /// - Both are live and of the current device.
    fn record_event(event: aclrtEvent, stream: aclrtStream) = aclrtRecordEvent(event, stream);

    /// Makes all work queued later on `stream` wait for an event.
    ///
    /// # Safety
    /// - Both are live and of the current device, and the event was recorded.
    fn wait_for_event(stream: aclrtStream, event: aclrtEvent)
        = aclrtStreamWaitEvent(stream, event);

    /// Frees memory of the current device.
    ///
    /// # Safety
    /// - `pointer` came from [`malloc`] or [`malloc_unpadded`] and no queued work touches it.
    fn free(pointer: *mut c_void) = aclrtFree(pointer);

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// - `pointer` came from [`malloc_host`] and no queued copy touches it.
    fn free_host(pointer: *mut c_void) = aclrtFreeHost(pointer);

    /// Copies `bytes` from `src` to `dst` before it returns. It is not ordered with any stream.
    ///
    /// # Safety
    /// - Both ranges are valid for `bytes` in the spaces that `kind` names, and no queued work uses
    ///   them during the call.
    fn copy(dst: *mut c_void, src: *const c_void, bytes: usize, kind: aclrtMemcpyKind)
        = aclrtMemcpy(dst, bytes, src, bytes, kind);

    /// Queues a copy of `bytes` from `src` to `dst` on `stream`.
    ///
    /// # Safety
    /// - Both ranges are valid for `bytes` in the spaces that `kind` names, and stay so, unread or
    ///   unwritten by the host as applies, until the stream has passed the copy.
    /// - `stream` is live and of the current device.
    fn copy_async(
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        kind: aclrtMemcpyKind,
        stream: aclrtStream
    ) = aclrtMemcpyAsync(dst, bytes, src, bytes, kind, stream);

    /// Queues the filling of `bytes` at `dst` with the low byte of `value`.
    ///
    /// # Safety
    /// - The range is valid for `bytes` on the device, and stays so until the stream has passed the
    ///   filling.
    /// - `stream` is live and of the current device.
    fn set_async(dst: *mut c_void, value: i32, bytes: usize, stream: aclrtStream)
        = aclrtMemsetAsync(dst, bytes, value, bytes, stream);
}

/// Initialises the runtime. Returns true if this call did so, and false if other code in the
/// process had; that code then also ends it.
#[doc(alias = "aclInit")]
pub(crate) fn init(rt: &AclRt) -> Result<bool> {
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

/// Version of the runtime: major, minor, patch; `None` where the runtime cannot report it.
#[doc(alias = "aclrtGetVersion")]
pub(crate) fn version(rt: &AclRt) -> Result<Option<(i32, i32, i32)>> {
    let Some(function) = rt.aclrtGetVersion else {
        return Ok(None);
    };
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three locals are written during the call.
    let code = unsafe { function(&raw mut major, &raw mut minor, &raw mut patch) };
    check(rt, "aclrtGetVersion", code)?;
    Ok(Some((major, minor, patch)))
}

/// Number of devices.
#[doc(alias = "aclrtGetDeviceCount")]
pub(crate) fn device_count(rt: &AclRt) -> Result<u32> {
    // SAFETY: a local of `written` is written during the call.
    let call = |count| unsafe { (rt.aclrtGetDeviceCount)(count) };
    written(rt, "aclrtGetDeviceCount", 0, call)
}

/// The calling thread's current device, if it has one.
#[doc(alias = "aclrtGetDevice")]
pub(crate) fn current_device(rt: &AclRt) -> Option<i32> {
    let mut device = 0;
    // SAFETY: a local is written during the call.
    let code = unsafe { (rt.aclrtGetDevice)(&raw mut device) };
    (code == code::SUCCESS).then_some(device)
}

/// A property of `device`.
#[doc(alias = "aclrtGetDeviceInfo")]
pub(crate) fn attribute(
    rt: &AclRt,
    library: &str,
    device: u32,
    attribute: aclrtDevAttr,
) -> Result<i64> {
    const NAME: &str = "aclrtGetDeviceInfo";
    let purpose = "reading the device's sizes";
    let function = optional(rt.aclrtGetDeviceInfo, NAME, library, purpose)?;
    // SAFETY: a local of `written` is written during the call.
    let call = |value| unsafe { function(device, attribute, value) };
    written(rt, NAME, 0, call)
}

/// Free and total bytes of the current device's memory.
#[doc(alias = "aclrtGetMemInfo")]
pub(crate) fn device_memory(rt: &AclRt, library: &str) -> Result<(usize, usize)> {
    const NAME: &str = "aclrtGetMemInfo";
    let function = optional(rt.aclrtGetMemInfo, NAME, library, "reading free memory")?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: two locals are written during the call.
    let code = unsafe { function(aclrtMemAttr::HBM, &raw mut free, &raw mut total) };
    check(rt, NAME, code)?;
    Ok((free, total))
}

/// Product name of the chip, where the runtime reports it.
#[doc(alias = "aclrtGetSocName")]
pub(crate) fn soc_name(rt: &AclRt) -> Option<String> {
    // SAFETY: takes nothing.
    let name = unsafe { rt.aclrtGetSocName?() };
    if name.is_null() {
        return None;
    }
    // SAFETY: not null (checked), nul-terminated, owned by the runtime and constant.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// Creates a stream on the current device, with fast launches and waits if the installation
/// supports them, as frameworks do (`NPUStream.cpp` of Ascend/pytorch at 9e73e708ab93). The
/// priority is reserved.
#[doc(alias = "aclrtCreateStream")]
#[doc(alias = "aclrtCreateStreamWithConfig")]
pub(crate) fn create_stream(rt: &AclRt) -> Result<aclrtStream> {
    let Some(with_config) = rt.aclrtCreateStreamWithConfig else {
        // SAFETY: a local of `written` is written during the call.
        let call = |stream| unsafe { (rt.aclrtCreateStream)(stream) };
        return written(rt, "aclrtCreateStream", std::ptr::null_mut(), call);
    };
    let (priority, flags) = (0, STREAM_FAST_LAUNCH | STREAM_FAST_SYNC);
    // SAFETY: a local of `written` is written during the call.
    let call = |stream| unsafe { with_config(stream, priority, flags) };
    written(
        rt,
        "aclrtCreateStreamWithConfig",
        std::ptr::null_mut(),
        call,
    )
}

/// Creates an event on the current device.
#[doc(alias = "aclrtCreateEvent")]
pub(crate) fn create_event(rt: &AclRt) -> Result<aclrtEvent> {
    // SAFETY: a local of `written` is written during the call.
    let call = |event| unsafe { (rt.aclrtCreateEvent)(event) };
    written(rt, "aclrtCreateEvent", std::ptr::null_mut(), call)
}

/// Waits until all work queued on `stream` is done. Failures of that work are
/// [`AscendError::Execution`]; the call's own errors (codes of parameters, handles and state, below
/// 300000) stay errors of the call.
///
/// # Safety
/// - `stream` is a live stream of the current device.
#[doc(alias = "aclrtSynchronizeStream")]
pub(crate) unsafe fn synchronize(rt: &AclRt, stream: aclrtStream) -> Result<()> {
    // SAFETY: a live handle, as this function asks of its caller.
    let code = unsafe { (rt.aclrtSynchronizeStream)(stream) };
    check(rt, "aclrtSynchronizeStream", code).map_err(|error| match error {
        AscendError::Call {
            function,
            code,
            meaning,
            detail,
        } if code >= 300_000 => AscendError::Execution {
            function,
            code,
            meaning,
            detail,
        },
        other => other,
    })
}

/// Allocates memory on the current device for the caller to divide, without padding by the runtime
/// if the installation supports it.
#[doc(alias = "aclrtMallocAlign32")]
pub(crate) fn malloc_unpadded(rt: &AclRt, bytes: usize) -> Result<*mut c_void> {
    let Some(unpadded) = rt.aclrtMallocAlign32 else {
        return malloc(rt, bytes);
    };
    allocate(rt, "aclrtMallocAlign32", bytes, |pointer| {
        // SAFETY: a local is written during the call; the memory is the caller's to free.
        unsafe { unpadded(pointer, bytes, aclrtMemMallocPolicy::HUGE_FIRST) }
    })
}

/// Allocates memory on the current device, with the padding that operators require.
#[doc(alias = "aclrtMalloc")]
pub(crate) fn malloc(rt: &AclRt, bytes: usize) -> Result<*mut c_void> {
    allocate(rt, "aclrtMalloc", bytes, |pointer| {
        // SAFETY: a local is written during the call; the memory is the caller's to free.
        unsafe { (rt.aclrtMalloc)(pointer, bytes, aclrtMemMallocPolicy::HUGE_FIRST) }
    })
}

/// Allocates pinned host memory.
#[doc(alias = "aclrtMallocHost")]
pub(crate) fn malloc_host(rt: &AclRt, bytes: usize) -> Result<*mut c_void> {
    allocate(rt, "aclrtMallocHost", bytes, |pointer| {
        // SAFETY: a local is written during the call; the memory is the caller's to free.
        unsafe { (rt.aclrtMallocHost)(pointer, bytes) }
    })
}

/// The pointer that `call` writes; exhausted memory is [`AscendError::OutOfMemory`].
fn allocate(
    rt: &AclRt,
    function: &'static str,
    requested_bytes: usize,
    call: impl FnOnce(*mut *mut c_void) -> aclError,
) -> Result<*mut c_void> {
    written(rt, function, std::ptr::null_mut(), call).map_err(|error| match error {
        AscendError::Call { code, detail, .. }
            if code == code::RT_MEMORY_ALLOCATION || code == 200_000 =>
        {
            AscendError::OutOfMemory {
                function,
                requested_bytes,
                live_bytes: 0,
                cached_bytes: 0,
                largest_cached_bytes: 0,
                detail,
            }
        }
        other => other,
    })
}

/// Loads a binary of vector kernels on the current device.
#[doc(alias = "aclrtBinaryLoadFromData")]
pub(crate) fn load(rt: &AclRt, library: &str, binary: &[u8]) -> Result<aclrtBinHandle> {
    const NAME: &str = "aclrtBinaryLoadFromData";
    let purpose = "loading this crate's kernels";
    let function = optional(rt.aclrtBinaryLoadFromData, NAME, library, purpose)?;
    let mut option = aclrtBinaryLoadOption {
        kind: aclrtBinaryLoadOptionType::MAGIC,
        value: [BINARY_MAGIC_VECTOR, 0, 0, 0],
    };
    let options = aclrtBinaryLoadOptions {
        options: &raw mut option,
        count: 1,
    };
    let (data, bytes) = (binary.as_ptr().cast(), binary.len());
    // SAFETY: data, options and result are locals or borrowed for the call; the runtime copies the
    // binary.
    let call = |handle| unsafe { function(data, bytes, &raw const options, handle) };
    written(rt, NAME, std::ptr::null_mut(), call)
}

/// Unloads a binary.
///
/// # Safety
/// - `binary` is live, and no kernel of it is queued or used afterwards.
#[doc(alias = "aclrtBinaryUnLoad")]
pub(crate) unsafe fn unload(rt: &AclRt, library: &str, binary: aclrtBinHandle) -> Result<()> {
    const NAME: &str = "aclrtBinaryUnLoad";
    let function = optional(rt.aclrtBinaryUnLoad, NAME, library, "unloading kernels")?;
    // SAFETY: a live handle, given up by the caller.
    check(rt, NAME, unsafe { function(binary) })
}

/// Finds a kernel by its name.
///
/// # Safety
/// - `binary` is live.
#[doc(alias = "aclrtBinaryGetFunction")]
pub(crate) unsafe fn kernel(
    rt: &AclRt,
    library: &str,
    binary: aclrtBinHandle,
    name: &CStr,
) -> Result<aclrtFuncHandle> {
    const NAME: &str = "aclrtBinaryGetFunction";
    let function = optional(rt.aclrtBinaryGetFunction, NAME, library, "finding a kernel")?;
    // SAFETY: a live handle (the caller's), a nul-terminated name, a local for the result.
    let call = |handle| unsafe { function(binary, name.as_ptr(), handle) };
    written(rt, NAME, std::ptr::null_mut(), call)
}

/// The method of passing a launch's arguments to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaunchWay {
    /// An array, with `aclrtLaunchKernelWithArgsArray`: the runtime places the arguments as the
    /// kernel's binary describes its parameters. Only for kernels of vector cores alone, from CANN
    /// 9.1 on.
    Array,
    /// A list of the runtime, with `aclrtKernelArgsInit` and related functions: each argument takes
    /// the next eight bytes, after the sync address if the kernel has one.
    List,
}

impl LaunchWay {
    /// The C function that launches.
    pub fn function(self) -> &'static str {
        match self {
            Self::Array => "aclrtLaunchKernelWithArgsArray",
            Self::List => "aclrtLaunchKernelWithConfig",
        }
    }
}

/// The functions that a launch with a list of arguments takes, as this runtime has them.
#[derive(Clone, Copy)]
struct ListFunctions {
    init: unsafe extern "C" fn(aclrtFuncHandle, *mut aclrtArgsHandle) -> aclError,
    append: unsafe extern "C" fn(
        aclrtArgsHandle,
        *mut c_void,
        usize,
        *mut aclrtParamHandle,
    ) -> aclError,
    finalize: unsafe extern "C" fn(aclrtArgsHandle) -> aclError,
    launch: unsafe extern "C" fn(
        aclrtFuncHandle,
        u32,
        aclrtStream,
        *mut aclrtLaunchKernelCfg,
        aclrtArgsHandle,
        *mut c_void,
    ) -> aclError,
}

impl ListFunctions {
    /// # Errors
    /// The names of those that are not there.
    fn of(rt: &AclRt) -> Result<Self, Vec<&'static str>> {
        let functions = (
            rt.aclrtKernelArgsInit,
            rt.aclrtKernelArgsAppend,
            rt.aclrtKernelArgsFinalize,
            rt.aclrtLaunchKernelWithConfig,
        );
        if let (Some(init), Some(append), Some(finalize), Some(launch)) = functions {
            return Ok(Self {
                init,
                append,
                finalize,
                launch,
            });
        }
        let there = [
            ("aclrtKernelArgsInit", functions.0.is_some()),
            ("aclrtKernelArgsAppend", functions.1.is_some()),
            ("aclrtKernelArgsFinalize", functions.2.is_some()),
            ("aclrtLaunchKernelWithConfig", functions.3.is_some()),
        ];
        let lacking = there.iter().filter(|(_, there)| !there);
        Err(lacking.map(|(name, _)| *name).collect())
    }
}

/// A kernel with its name and launch method.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launched<'a> {
    /// Its handle.
    pub(crate) kernel: aclrtFuncHandle,
    /// Its name, for errors.
    pub(crate) name: &'a str,
    /// The method of passing its arguments.
    pub(crate) way: LaunchWay,
}

/// The launch method of `kernel` on `cores` with `parameters` parameters.
///
/// # Errors
/// [`AscendError::NoLaunch`] if the runtime has no launch method for such a kernel, and
/// [`AscendError::InvalidArgument`] if the binary describes a different number of parameters.
///
/// # Safety
/// - `kernel` is live.
#[doc(alias = "aclrtFunctionGetParamCount")]
pub(crate) unsafe fn launch_way(
    rt: &AclRt,
    library: &str,
    name: &str,
    kernel: aclrtFuncHandle,
    cores: Cores,
    parameters: usize,
) -> Result<LaunchWay> {
    // The array gives a kernel of both kinds of cores no sync address: with a binary that has no
    // variable for it, the kernel would read every argument eight bytes late.
    if cores == Cores::Vector && rt.aclrtLaunchKernelWithArgsArray.is_some() {
        // SAFETY: a live kernel, as this function asks of its caller.
        let described = unsafe { described_parameters(rt, kernel) }?;
        if described == parameters {
            return Ok(LaunchWay::Array);
        }
        if described != 0 {
            return Err(AscendError::argument(
                "launch",
                "the kernels' binary",
                format!("one of this version, whose {name} has {parameters} parameters"),
                format!("{described} parameters"),
            ));
        }
    }
    match ListFunctions::of(rt) {
        Ok(_) => Ok(LaunchWay::List),
        Err(mut lacking) => {
            let array = cores == Cores::Vector && rt.aclrtLaunchKernelWithArgsArray.is_none();
            if array {
                lacking.insert(0, "aclrtLaunchKernelWithArgsArray");
            }
            Err(AscendError::NoLaunch {
                kernel: name.to_owned(),
                cores,
                needed: match cores {
                    Cores::Vector => EITHER_WAY,
                    Cores::CubeAndVector => BY_LIST,
                },
                library: library.to_owned(),
                lacking,
            })
        }
    }
}

const EITHER_WAY: &str = "\
    aclrtLaunchKernelWithArgsArray and a binary that describes its parameters, or \
    aclrtKernelArgsInit, aclrtKernelArgsAppend, aclrtKernelArgsFinalize and \
    aclrtLaunchKernelWithConfig";
const BY_LIST: &str = "\
    aclrtKernelArgsInit, aclrtKernelArgsAppend, aclrtKernelArgsFinalize and \
    aclrtLaunchKernelWithConfig";

/// The number of parameters of `kernel` according to the binary; 0 if it does not state it.
///
/// # Safety
/// - `kernel` is live.
unsafe fn described_parameters(rt: &AclRt, kernel: aclrtFuncHandle) -> Result<usize> {
    const NAME: &str = "aclrtFunctionGetParamCount";
    let Some(count) = rt.aclrtFunctionGetParamCount else {
        return Ok(0);
    };
    // SAFETY: a live handle (the caller's), a local for the result.
    match written(rt, NAME, 0, |found| unsafe { count(kernel, found) }) {
        Err(AscendError::Call {
            code: code::RT_FEATURE_NOT_SUPPORT,
            ..
        }) => Ok(0),
        found => found,
    }
}

/// Queues a kernel with `blocks` blocks. The parameters are copied during the call. A refusal of
/// the launch is [`AscendError::Launch`].
///
/// # Safety
/// - `parameters` are those of the kernel's declaration, in order, each readable for its length;
///   none is empty.
/// - The device memory that they name is valid until the stream has passed the launch.
/// - The kernel and `stream` are live and of the current device; the kernel's way is that of
///   [`launch_way`].
#[doc(alias = "aclrtLaunchKernelWithArgsArray")]
#[doc(alias = "aclrtKernelArgsInit")]
#[doc(alias = "aclrtKernelArgsAppend")]
#[doc(alias = "aclrtKernelArgsFinalize")]
#[doc(alias = "aclrtLaunchKernelWithConfig")]
pub(crate) unsafe fn launch(
    rt: &AclRt,
    library: &str,
    launched: Launched<'_>,
    blocks: u32,
    stream: aclrtStream,
    parameters: &mut [&mut [u8]],
) -> Result<()> {
    let Launched { kernel, name, way } = launched;
    debug_assert!(!kernel.is_null(), "a live kernel");
    debug_assert!(parameters.iter().all(|bytes| !bytes.is_empty()));
    let no_config = std::ptr::null_mut();
    let code = match way {
        LaunchWay::Array => {
            const NAME: &str = "aclrtLaunchKernelWithArgsArray";
            let purpose = "launching this crate's kernels";
            let launch = optional(rt.aclrtLaunchKernelWithArgsArray, NAME, library, purpose)?;
            let pointers = parameters.iter_mut();
            let mut pointers: Vec<*mut c_void> =
                pointers.map(|bytes| bytes.as_mut_ptr().cast()).collect();
            // SAFETY: no configuration; a pointer to each parameter of the kernel, in order, as
            // many as the binary describes (`launch_way` compared them), all valid during the call,
            // which copies what they point to; handles and the memory that the parameters name are
            // the caller's.
            unsafe { launch(kernel, blocks, stream, no_config, pointers.as_mut_ptr()) }
        }
        LaunchWay::List => {
            let functions = ListFunctions::of(rt).map_err(|lacking| AscendError::NoLaunch {
                kernel: name.to_owned(),
                cores: Cores::CubeAndVector,
                needed: BY_LIST,
                library: library.to_owned(),
                lacking,
            })?;
            // SAFETY: a live kernel; a local of `written` is written during the call. The list is
            // the calling thread's own until it begins another one.
            let begin = |list| unsafe { (functions.init)(kernel, list) };
            let list = written(rt, "aclrtKernelArgsInit", std::ptr::null_mut(), begin)?;
            for parameter in parameters {
                let (pointer, bytes) = (parameter.as_mut_ptr().cast(), parameter.len());
                // SAFETY: the list that was begun above on this thread; the parameter is valid for
                // its length during the call, which copies it; a local of `written` is written.
                let append = |handle| unsafe { (functions.append)(list, pointer, bytes, handle) };
                written(rt, "aclrtKernelArgsAppend", std::ptr::null_mut(), append)?;
            }
            // SAFETY: the list that was begun above on this thread.
            let completed = unsafe { (functions.finalize)(list) };
            check(rt, "aclrtKernelArgsFinalize", completed)?;
            // SAFETY: no configuration, nothing reserved; the list is complete and of this kernel
            // and thread; handles and the memory that the parameters name are the caller's.
            unsafe { (functions.launch)(kernel, blocks, stream, no_config, list, no_config.cast()) }
        }
    };
    match code {
        code::SUCCESS => Ok(()),
        code => Err(AscendError::Launch {
            kernel: name.to_owned(),
            code,
            meaning: code::meaning(code),
            detail: recent_message(rt),
        }),
    }
}
