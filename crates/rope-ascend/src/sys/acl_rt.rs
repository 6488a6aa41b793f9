//! Runtime: `libacl_rt.so`, or `libascendcl.so` by its older name.

use std::ffi::{c_char, c_void};

use super::types::{
    aclError, aclrtArgsHandle, aclrtBinHandle, aclrtBinaryLoadOptions, aclrtDevAttr, aclrtEvent,
    aclrtFuncHandle, aclrtLaunchKernelCfg, aclrtMemAttr, aclrtMemMallocPolicy, aclrtMemcpyKind,
    aclrtParamHandle, aclrtStream,
};

super::functions! {
    /// Functions of the runtime. Those that older installations lack are optional.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    AclRt {
        required {
            fn aclInit(config_path: *const c_char) -> aclError;
            fn aclFinalize() -> aclError;
            fn aclGetRecentErrMsg() -> *const c_char;
            fn aclrtSetDevice(device: i32) -> aclError;
            fn aclrtResetDevice(device: i32) -> aclError;
            fn aclrtGetDevice(device: *mut i32) -> aclError;
            fn aclrtGetDeviceCount(count: *mut u32) -> aclError;
            fn aclrtCreateStream(stream: *mut aclrtStream) -> aclError;
            fn aclrtDestroyStream(stream: aclrtStream) -> aclError;
            fn aclrtSynchronizeStream(stream: aclrtStream) -> aclError;
            fn aclrtCreateEvent(event: *mut aclrtEvent) -> aclError;
            fn aclrtDestroyEvent(event: aclrtEvent) -> aclError;
            fn aclrtRecordEvent(event: aclrtEvent, stream: aclrtStream) -> aclError;
            fn aclrtStreamWaitEvent(stream: aclrtStream, event: aclrtEvent) -> aclError;
            fn aclrtMalloc(
                device_ptr: *mut *mut c_void, bytes: usize, policy: aclrtMemMallocPolicy
            ) -> aclError;
            fn aclrtFree(device_ptr: *mut c_void) -> aclError;
            fn aclrtMallocHost(host_ptr: *mut *mut c_void, bytes: usize) -> aclError;
            fn aclrtFreeHost(host_ptr: *mut c_void) -> aclError;
            fn aclrtMemcpy(
                dst: *mut c_void, dst_bytes: usize, src: *const c_void, bytes: usize,
                kind: aclrtMemcpyKind
            ) -> aclError;
            fn aclrtMemcpyAsync(
                dst: *mut c_void, dst_bytes: usize, src: *const c_void, bytes: usize,
                kind: aclrtMemcpyKind, stream: aclrtStream
            ) -> aclError;
            fn aclrtMemsetAsync(
                dst: *mut c_void, dst_bytes: usize, value: i32, bytes: usize, stream: aclrtStream
            ) -> aclError;
        }
        optional {
            fn aclrtGetSocName() -> *const c_char;
            fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> aclError;
            fn aclrtGetDeviceInfo(
                device: u32, attribute: aclrtDevAttr, value: *mut i64
            ) -> aclError;
            fn aclrtGetMemInfo(
                attribute: aclrtMemAttr, free: *mut usize, total: *mut usize
            ) -> aclError;
            fn aclrtCreateStreamWithConfig(
                stream: *mut aclrtStream, priority: u32, flags: u32
            ) -> aclError;
            fn aclrtMallocAlign32(
                device_ptr: *mut *mut c_void, bytes: usize, policy: aclrtMemMallocPolicy
            ) -> aclError;
            fn aclrtBinaryLoadFromData(
                data: *const c_void, bytes: usize, options: *const aclrtBinaryLoadOptions,
                binary: *mut aclrtBinHandle
            ) -> aclError;
            fn aclrtBinaryUnLoad(binary: aclrtBinHandle) -> aclError;
            fn aclrtBinaryGetFunction(
                binary: aclrtBinHandle, name: *const c_char, function: *mut aclrtFuncHandle
            ) -> aclError;
            fn aclrtKernelArgsInit(
                function: aclrtFuncHandle, args: *mut aclrtArgsHandle
            ) -> aclError;
            fn aclrtKernelArgsAppend(
                args: aclrtArgsHandle, param: *mut c_void, bytes: usize,
                handle: *mut aclrtParamHandle
            ) -> aclError;
            fn aclrtKernelArgsFinalize(args: aclrtArgsHandle) -> aclError;
            fn aclrtLaunchKernelWithConfig(
                function: aclrtFuncHandle, blocks: u32, stream: aclrtStream,
                config: *mut aclrtLaunchKernelCfg, args: aclrtArgsHandle, reserve: *mut c_void
            ) -> aclError;
            fn aclrtFunctionGetParamCount(
                function: *const c_void, count: *mut usize
            ) -> aclError;
            fn aclrtLaunchKernelWithArgsArray(
                function: *mut c_void, blocks: u32, stream: aclrtStream,
                config: *mut aclrtLaunchKernelCfg, args: *mut *mut c_void
            ) -> aclError;
        }
    }
}
