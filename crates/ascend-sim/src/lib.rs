#![doc = include_str!("../README.md")]
//!
//! # Items
//!
//! - [`symbol`]: a C function by its name.
//! - [`Session`]: the simulated machine of this process, held by one test at a time.
//! - [`control`]: injected faults, counters, and reported [`Violation`]s.
//! - module `build` (feature `host-kernels`): compiling kernels.
#![allow(
    clippy::disallowed_methods,
    reason = "it shares no code with its users"
)]

pub mod abi;
mod aclnn;
#[cfg(feature = "host-kernels")]
pub mod build;
mod clock;
mod codes;
mod collective;
mod conflicts;
pub mod control;
mod fault;
mod launch;
mod machine;
mod memory;
mod record;
mod registry;
mod state;
mod stream;
mod trace;

pub use abi::{Export, exports, symbol};
pub use collective::Collective;
pub use control::Session;
pub use machine::Machine;
pub use trace::{Call, Counted, Counters, LaunchReport, Violation};
