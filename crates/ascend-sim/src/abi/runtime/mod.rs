//! The runtime functions: `acl*` and `aclrt*`.

mod device;
mod memory;
mod module;
mod stream;

use std::ffi::{CStr, c_char, c_void};
use std::fmt::Display;

use crate::codes::{Failure, Outcome, RT_PARAM_INVALID};

pub use device::*;
pub use memory::*;
pub use module::*;
pub use stream::*;

pub(crate) fn table() -> Vec<crate::abi::Export> {
    [
        device::table(),
        stream::table(),
        memory::table(),
        module::table(),
    ]
    .concat()
}

/// Refuses a parameter of a runtime call.
fn invalid<T>(message: impl Display) -> Outcome<T> {
    Err(Failure::new(RT_PARAM_INVALID, message))
}

/// Writes an out parameter.
///
/// # Safety
/// - `target` is null or valid for writing one `T`.
pub(crate) unsafe fn put<T>(target: *mut T, value: T, name: &str) -> Outcome {
    if target.is_null() {
        return invalid(format!("{name} is null"));
    }
    // SAFETY: not null, and valid for writing by the function's own condition.
    unsafe { target.write(value) };
    Ok(())
}

/// Reads a C string parameter.
///
/// # Safety
/// - `text` is null or a C string.
pub(crate) unsafe fn get_text(text: *const c_char, name: &str) -> Outcome<String> {
    if text.is_null() {
        return invalid(format!("{name} is null"));
    }
    // SAFETY: not null, and a C string by the function's own condition.
    Ok(unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned())
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer as u64
}

fn pointer(handle: u64) -> *mut c_void {
    handle as *mut c_void
}
