#![doc = include_str!("../README.md")]
//!
//! # Concepts
//!
//! | item | what it is |
//! |---|---|
//! | [`RotarySpec`](rope_core::RotarySpec) | what a model's configuration says about rotation |
//! | [`Rotary`] | the burn module, made once a model; it has no parameters |
//! | [`Positions`](rope_core::Positions) | the ids of a step's tokens, `[axes, tokens]` |
//! | [`RotaryAngles`] | their cos and sin on the device, shared or per head, made once a step |
//! | [`Rotary::forward`] | the operation on q and k, in each layer |
//! | [`NormRotary`], [`Rotary::try_forward_norm`] | the same with RMSNorm of each head of q and k |
//! | [`Implementation`] | the choice between a backend's kernels and ordinary operations |
//! | [`RotaryOps`], [`RotaryOp`] | the operation as backends implement it |
//! | [`NormRotaryOps`], [`NormRotaryOp`] | that with the norm, as backends implement it |
//! | [`PreparedTensor`] | a tensor as a backend's kernel takes it |
//! | [`composed`] | the operation from ordinary operations, which every backend has |
//!
//! # Errors
//! As in burn, `forward` panics with the message of the [`RotaryError`] that `try_forward` returns;
//! rarer methods exist only as `try_`. Shapes and types are checked before anything is computed:
//! here, and by the server of a device again, for it cannot trust its clients. Backends whose kernels
//! take memory without a type check too, for they can be called without this crate's modules.

// Without a backend the macro of the operations writes functions that use none of their arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables)
)]

mod angles;
mod backends;
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

/// The operations from ordinary tensor operations: what every backend can run, and what the fused
/// kernels are compared with.
pub mod composed {
    pub use crate::norm_rotary::composed::{Rotate, norm_rotate, norm_rotate_backward};
    pub use crate::rotary::composed::{angle_gradients, rotate};
}
