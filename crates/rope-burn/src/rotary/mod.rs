//! The rotation of q and k as one differentiable operation.

mod backward;
pub(crate) mod composed;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod module;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

pub use module::{Rotary, RotaryConfig};
pub use op::{RotaryOp, RotaryOps};
