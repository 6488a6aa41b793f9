//! Rotary position embedding (RoPE) and its multimodal form (MRoPE) as one differentiable
//! [burn](https://burn.dev) operation on q and k.
//!
//! Attention that knows no positions gets them by rotating q and k: the channels of a head form
//! pairs, and each pair turns by an angle that grows with the token's position. This crate rotates
//! q and k in one pass over memory, in place if nothing else holds them, and its backward needs
//! neither: the gradient turns back by the same angles.
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
//! | [`composed`] | the operation from ordinary operations, which every backend has |
//!
//! # Example
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use rope_burn::{Rotary, rope_core::{AxisLayout, Layout, Positions, RotarySpec}};
//!
//! // Once a model: 32 channels, their pairs split over the axes time, height and width.
//! let axes = AxisLayout::Contiguous(vec![4, 6, 6]);
//! let spec = RotarySpec::builder(32).axes(axes).theta(1e6).build()?;
//! let rotary = Rotary::new(spec, Layout::Bsnd);
//!
//! // Once a step: five text tokens, whose ids are the same on each axis.
//! let device = Device::flex().autodiff();
//! let angles = rotary.angles(&Positions::text(3, 0, 5)?, &device);
//!
//! // In each layer: q and k, [batch, seq, heads, head_dim], with head counts of their own.
//! let q = Tensor::<4>::random([2, 5, 4, 32], Distribution::Default, &device).require_grad();
//! let k = Tensor::<4>::random([2, 5, 2, 32], Distribution::Default, &device);
//! let (q_rotated, k_rotated) = rotary.forward(q.clone(), k, &angles);
//!
//! let gradients = (q_rotated.sum() + k_rotated.sum()).backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [2, 5, 4, 32]);
//! # Ok::<(), rope_burn::RotaryError>(())
//! ```
//!
//! # Backends
//!
//! | feature | backend | implementation |
//! |---|---|---|
//! | `flex` (default) | Flex, burn's CPU backend | rope-core's kernels, in place |
//! | `remote` | devices of a server, by burn-remote | the server's backend's, as one operation |
//! | `remote-server` | | lets a server run that operation: [`remote`] |
//! | `cpu`, `cuda`, `metal`, `rocm`, `vulkan`, `wgpu` | CubeCL's | one kernel for all, in place |
//! | `fusion` | CubeCL's, through burn's fusion | the same, as one operation |
//!
//! On a backend that no feature names, the operation is composed: the same results, more passes.
//!
//! # Errors
//! Methods come in pairs, as in burn: `forward` panics with the message of the [`RotaryError`] that
//! `try_forward` returns. Shapes and types are checked once, before anything is computed.

mod angles;
mod backends;
mod backward;
pub mod composed;
mod error;
mod heads;
mod module;
mod norm;
mod ops;

pub use angles::RotaryAngles;
#[cfg(feature = "remote-server")]
pub use backends::remote;
pub use error::{Result, RotaryError};
pub use module::{Implementation, Rotary, RotaryConfig};
pub use norm::{NormRotary, NormRotaryConfig, NormRotaryOp, NormRotaryOps, NormWeight};
pub use ops::{RotaryOp, RotaryOps};
pub use rope_core;

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct ReadmeDoctests;
