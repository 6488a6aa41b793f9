//! One C call, one `Result`: no ownership, no policy.
//!
//! The functions take the table of the runtime and raw handles. Pointers that they write through
//! are locals; handles are the caller's, and a stale one is the runtime's to refuse. What device
//! memory may be touched until when is said where a function queues work.
#![allow(unsafe_code, reason = "each function is one foreign call")]

pub mod device;
pub mod event;
pub mod init;
pub mod memory;
pub mod module;
pub mod stream;

use crate::error::{AscendError, Result};
use crate::sys::{AclRt, aclError, code};
use std::ffi::CStr;

/// The runtime's last message on this thread, trimmed; empty where there is none.
#[must_use]
pub fn recent_message(rt: &AclRt) -> String {
    // SAFETY: takes nothing; returns null or a nul-terminated string that the runtime owns and
    // keeps until the next call on this thread; it is copied at once.
    let message = unsafe { (rt.aclGetRecentErrMsg)() };
    if message.is_null() {
        return "no message".to_owned();
    }
    // SAFETY: not null, nul-terminated and alive, as above.
    let text = unsafe { CStr::from_ptr(message) }
        .to_string_lossy()
        .trim()
        .to_owned();
    if text.is_empty() {
        "no message".to_owned()
    } else {
        text
    }
}

/// Turns the result of `function` into a [`Result`].
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

/// As [`check`], for a call that reports the failures of work queued before it.
///
/// The call's own errors (codes of parameters, handles and state, below 200000) stay errors of
/// the call.
pub(crate) fn check_synchronisation(
    rt: &AclRt,
    function: &'static str,
    result: aclError,
) -> Result<()> {
    check(rt, function, result).map_err(|error| match error {
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

/// As [`check`], for an allocation of `requested_bytes`.
pub(crate) fn check_allocation(
    rt: &AclRt,
    function: &'static str,
    requested_bytes: usize,
    result: aclError,
) -> Result<()> {
    check(rt, function, result).map_err(|error| match error {
        AscendError::Call {
            function,
            code,
            detail,
            ..
        } if code == code::RT_MEMORY_ALLOCATION || code == 200_000 => AscendError::OutOfMemory {
            function,
            requested_bytes,
            live_bytes: 0,
            detail,
        },
        other => other,
    })
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
