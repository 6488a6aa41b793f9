//! Rotary position embedding as one differentiable burn operation on q and k.
//!
//! [`Rotary`] is the module to put into a model; [`RotaryOps`] the backend extension under it, for backends and
//! autodiff engines outside burn's dispatch. With the feature `ascend`, `ascend` takes host tensors through an Ascend NPU.

mod angles;
#[cfg(feature = "ascend")]
pub mod ascend;
mod backends;
mod backward;
pub mod composed;
mod error;
mod module;
mod ops;

pub use angles::RotaryAngles;
#[cfg(feature = "remote-server")]
pub use backends::remote;
pub use error::{Result, RotaryError};
pub use module::{Implementation, Rotary, RotaryConfig};
pub use ops::{RotaryOp, RotaryOps};
pub use rope_core;

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct ReadmeDoctests;
