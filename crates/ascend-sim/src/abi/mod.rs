//! The C ABI: exported functions, and the raw operations below them. All unsafe code is here.
#![allow(
    unsafe_code,
    reason = "a C ABI takes pointers, maps memory and loads libraries"
)]

pub mod aclnn;
pub mod collective;
mod export;
pub(crate) mod kernel;
pub mod operators;
pub mod runtime;
pub(crate) mod sys;

pub use export::{Export, exports, symbol};
