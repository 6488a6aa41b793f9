//! RMSNorm of each head of q and k and their rotation as one differentiable operation.

mod backward;
pub(crate) mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod module;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

pub use module::{NormRotary, NormRotaryConfig, NormWeight};
pub use op::{NormRotaryOp, NormRotaryOps};
