//! Kernels against the oracle, and dumps. One program: each would link all of burn.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod differential;
mod dumps;
#[path = "../../rope-core/tests/odd.rs"]
mod odd;
mod properties;
