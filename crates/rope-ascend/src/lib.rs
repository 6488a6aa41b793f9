#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! - [`sys`]: the C interface of the runtime, as declared by the vendor.
//! - [`loader`]: finds the vendor's libraries, or takes the simulator's functions instead.
//! - [`safe`]: owned runtime, devices, streams, buffers and kernels.
//! - [`rope`]: this crate's kernels: rotation of q and k, its adjoint, the gradient of the angles,
//!   RMSNorm with the rotation, and the rotation on the cube cores.
//! - [`diagnosis`]: the parts that work on this machine, and remedies for the others.
//! - [`aclnn`]: the stock operators, each within its documented limits.
//!
//! [`safe::Runtime::open`] returns a [`LoadError`] if CANN is missing.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "test code"))]

pub mod aclnn;
pub mod diagnosis;
mod error;
pub mod loader;
mod result;
pub mod rope;
pub mod safe;
pub mod sys;

pub use error::{AscendError, Cores, LoadError, Result};
