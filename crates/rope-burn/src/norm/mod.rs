//! RMSNorm of each head of q and k and their rotation as one differentiable operation.

mod backward;
pub(crate) mod composed;
mod module;
mod ops;

pub use module::{NormRotary, NormRotaryConfig, NormWeight};
pub use ops::{NormRotaryOp, NormRotaryOps};
