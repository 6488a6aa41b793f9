//! A strict simulator of the Ascend runtime, for tests and for trying programs without hardware.
//!
//! It exports the C functions of the vendor's runtime that training with custom kernels needs, as a
//! shared library and, for programs that link it, through [`symbol`]. Kernels are Ascend C sources
//! compiled for the host against the headers in `include/`: module `build`, feature `host-kernels`.
//!
//! Where the vendor leaves behaviour open, the simulator takes the strictest reading and reports a
//! [`Violation`] with file and line. It counts bytes, transfers and instructions; it never reports
//! times. `docs/ascend-sim.md` lists what is modelled, the known gaps, and what cannot be shown.

pub mod abi;
mod aclnn;
#[cfg(feature = "host-kernels")]
pub mod build;
mod clock;
mod codes;
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
pub use control::Session;
pub use machine::Machine;
pub use trace::{Call, Counted, Counters, LaunchReport, Violation};
