//! Run-time compiler: `libacl_rtc.so` (CANN 8.5 and later).

use std::ffi::c_char;

use super::types::{aclError, aclrtcProg};

super::functions! {
    /// Functions of the run-time compiler.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    AclRtc {
        required {
            fn aclrtcCreateProg(
                program: *mut aclrtcProg, source: *const c_char, name: *const c_char,
                headers: i32, header_sources: *const *const c_char,
                header_names: *const *const c_char
            ) -> aclError;
            fn aclrtcCompileProg(
                program: aclrtcProg, option_count: i32, options: *const *const c_char
            ) -> aclError;
            fn aclrtcGetBinDataSize(program: aclrtcProg, bytes: *mut usize) -> aclError;
            fn aclrtcGetBinData(program: aclrtcProg, data: *mut c_char) -> aclError;
            fn aclrtcGetCompileLogSize(program: aclrtcProg, bytes: *mut usize) -> aclError;
            fn aclrtcGetCompileLog(program: aclrtcProg, log: *mut c_char) -> aclError;
            fn aclrtcDestroyProg(program: *mut aclrtcProg) -> aclError;
        }
        optional {}
    }
}
