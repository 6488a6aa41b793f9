#![doc = include_str!("../README.md")]
//!
//! # Concepts
//!
//! | item | meaning |
//! |---|---|
//! | [`RotarySpec`](rope_core::RotarySpec) | the rotation of a model's configuration |
//! | [`Rotary`] | the burn module, one per model; it has no parameters |
//! | [`Positions`](rope_core::Positions) | the ids of a step's tokens, `[axes, tokens]` |
//! | [`RotaryAngles`] | their cos and sin on the device, shared or per head, computed once per step |
//! | [`Rotary::forward`] | the operation on q and k, in each layer |
//! | [`NormRotary`], [`Rotary::try_forward_norm`] | the same with RMSNorm of each head of q and k |
//! | [`Implementation`] | the choice between a backend's kernels and ordinary operations |
//! | [`RotaryOps`], [`RotaryOp`] | the operation as backends implement it |
//! | [`NormRotaryOps`], [`NormRotaryOp`] | the operation with the norm, as backends implement it |
//! | [`PreparedTensor`] | a tensor prepared for a backend's kernel |
//! | [`composed`] | the operation composed of ordinary operations, for every backend |
//!
//! # Errors
//! As in burn, `forward` panics with the message of the [`RotaryError`] that `try_forward` returns;
//! rarer methods have only the `try_` form. Shapes and types are checked before any computation:
//! here, and again by the server of a device, which cannot trust its clients. Backends whose
//! kernels take untyped memory check too, because programs can call them without this crate's
//! modules.

// Without a backend the macro of the operations writes functions that use none of their arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables)
)]

mod angles;
mod error;
mod heads;
mod norm_rotary;
mod prepared;
#[cfg(feature = "remote-server")]
pub mod remote;
mod rotary;

pub use angles::RotaryAngles;
pub use burn_fused::{Implementation, OpError};
pub use error::{Result, RotaryError};
pub use norm_rotary::{NormRotary, NormRotaryConfig, NormRotaryOp, NormRotaryOps, NormWeight};
pub use prepared::{HeadsTensor, PreparedTensor};
pub use rope_core;
pub use rotary::{Rotary, RotaryConfig, RotaryOp, RotaryOps};

/// The operations composed of ordinary tensor operations: every backend can run them, and tests
/// compare the fused kernels with them.
pub mod composed {
    pub use crate::norm_rotary::composed::{Rotate, norm_rotate, norm_rotate_backward};
    pub use crate::rotary::composed::{angle_gradients, rotate};
}
