//! Rotary embedding on Ascend NPUs.
//!
//! - [`sys`]: the C interface of the runtime, as declared by the vendor.
//! - [`loader`]: finding the vendor's libraries, or taking the simulator's functions instead.
//! - [`safe`]: owned runtime, devices, streams, buffers and kernels.
//! - [`rope`]: this crate's kernels: rotation of q and k, its adjoint, the gradient of the angles.
//! - [`diagnosis`]: what of all this works here, and what to do about the rest.
//! - [`aclnn`]: the stock operators, each within its documented limits.
//!
//! Nothing is linked: without CANN the crate builds and loads, and [`safe::Runtime::open`] returns
//! a [`LoadError`] that names what was tried. No code here has run on a device yet; the tests run
//! it on a simulator of the runtime.

pub mod aclnn;
pub mod diagnosis;
mod error;
pub mod loader;
mod result;
pub mod rope;
pub mod safe;
pub mod sys;

pub use error::{AscendError, LoadError, Result};
