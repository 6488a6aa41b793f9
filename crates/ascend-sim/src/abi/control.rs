//! The simulator's own C functions, for programs that load it as a shared library.
#![allow(non_snake_case, reason = "one spelling for all exported functions")]

use std::ffi::c_char;

use crate::abi::export::export;
use crate::abi::runtime::{get_text, put};
use crate::codes::{Failure, Outcome, RT_PARAM_INVALID};
use crate::control;
use crate::trace::Counters;

/// Runs a control function: neither logged nor open to injected failures.
fn code(outcome: Outcome) -> i32 {
    outcome.map_or_else(|failure| failure.code, |()| 0)
}

export! {
    status {}
    value {
        fn ascendSimReset() -> i32 {
            control::reset();
            0
        }
        fn ascendSimSetMemoryLimit(bytes: u64) -> i32 {
            control::set_memory_limit(Some(bytes));
            0
        }
        fn ascendSimInjectFault(function: *const c_char, nth: u64, result: i32) -> i32 {
            // SAFETY: null or a C string by the C declaration.
            code(unsafe { get_text(function, "function") }.map(|function| control::inject_fault(&function, nth, result)))
        }
        fn ascendSimInjectStreamFault(operator: *const c_char, nth: u64, result: i32) -> i32 {
            // SAFETY: null or a C string by the C declaration.
            code(unsafe { get_text(operator, "operator") }.map(|operator| control::inject_stream_fault(&operator, nth, result)))
        }
        fn ascendSimOperatorRuns(operator: *const c_char, runs: *mut u64) -> i32 {
            // SAFETY: null or a C string, and an out parameter, null or valid, by the C declaration.
            code(unsafe { get_text(operator, "operator").and_then(|operator| put(runs, control::operator_runs().get(operator.as_str()).copied().unwrap_or(0), "runs")) })
        }
        fn ascendSimStubOperators(stub: i32) -> i32 {
            control::stub_operators(stub != 0);
            0
        }
        fn ascendSimHoldStreams(hold: i32) -> i32 {
            control::hold_streams(hold != 0);
            0
        }
        fn ascendSimLastLaunch(counters: *mut Counters) -> i32 {
            let last = control::launches().pop().ok_or_else(|| Failure::new(RT_PARAM_INVALID, "no kernel has run"));
            // SAFETY: an out parameter, null or valid by the C declaration.
            code(last.and_then(|report| unsafe { put(counters, report.counters, "counters") }))
        }
        fn ascendSimLiveAllocations(count: *mut u64, bytes: *mut u64) -> i32 {
            let live = control::live();
            // SAFETY: out parameters, null or valid by the C declaration.
            code(unsafe { put(count, live.allocations as u64, "count").and_then(|()| put(bytes, live.bytes, "bytes")) })
        }
        fn ascendSimViolationCount() -> u64 {
            control::violations().len() as u64
        }
        fn ascendSimViolationMessage(index: u64, buffer: *mut c_char, capacity: usize) -> i32 {
            let Some(violation) = control::violations().into_iter().nth(index as usize) else { return RT_PARAM_INVALID };
            if buffer.is_null() || capacity == 0 {
                return RT_PARAM_INVALID;
            }
            let text = violation.to_string();
            let length = text.len().min(capacity - 1);
            // SAFETY: `buffer` holds `capacity` bytes by the C declaration; `length + 1` are written.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), length);
                buffer.add(length).write(0);
            }
            0
        }
    }
}
