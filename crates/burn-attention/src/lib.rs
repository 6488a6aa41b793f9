//! Attention as one differentiable [burn](https://burn.dev) operation whose memory grows with the
//! tokens, not with their square.
//!
//! burn's own attention keeps the matrix of scores, queries x keys in each head, for its backward.
//! This one keeps q, k, v, the output and one number for each row of scores (the logarithm of the
//! sum of their exponentials), and computes the scores again, block by block.
//!
//! # Example
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_attention::{Attention, AttentionMask, MaskRules};
//!
//! // Once a step: two sequences of 3 and 5 tokens, packed, each of them causal.
//! let rules = MaskRules {
//!     causal: true,
//!     cu_seqlens: Some(&[0, 3, 8]),
//!     ..Default::default()
//! };
//! let attention = Attention::new(AttentionMask::new(&rules, 1, 8, 8)?);
//!
//! // In each layer: [batch, heads, tokens, head_dim]; two query heads share each key head.
//! let device = Device::flex().autodiff();
//! let random = |heads| {
//!     Tensor::<4>::random([1, heads, 8, 16], Distribution::Default, &device).require_grad()
//! };
//! let (q, k, v) = (random(4), random(2), random(2));
//! let out = attention.forward(q.clone(), k.clone(), v);
//! assert_eq!(out.dims(), [1, 4, 8, 16]);
//! let gradients = out.sum().backward();
//! assert_eq!(k.grad(&gradients).unwrap().dims(), [1, 2, 8, 16]);
//! # Ok::<(), burn_attention::AttentionError>(())
//! ```
//!
//! Two more operations of a training step are of the same kind: [`rms_norm`], which keeps its input
//! and a number for each row, and [`CrossEntropy`], the loss of a language model's head, whose
//! logits exist in blocks of the vocabulary.
//!
//! # Backends
//!
//! | feature | backend | implementation |
//! |---|---|---|
//! | `flex` (default) | Flex, burn's CPU backend | kernels of this crate on all threads |
//! | `remote` | devices of a server, by burn-remote | the server's backend, if the server registered the operation |
//! | `cpu`, `cuda`, `metal`, `rocm`, `vulkan`, `wgpu` | CubeCL's | blocks of ordinary operations |
//!
//! On a backend that no feature names, autodiff keeps the blocks' scores: the same results, without
//! the saving of memory.

mod attention;
mod backends;
mod backward;
pub mod blocks;
pub mod composed;
mod error;
mod loss;
mod mask;
pub mod norm;
mod ops;
mod primitives;

pub use attention::Attention;
#[cfg(feature = "remote-server")]
pub use backends::remote;
pub use error::{AttentionError, Result};
pub use loss::{CrossEntropy, CrossEntropyOp, CrossEntropyOps, IGNORED};
pub use mask::{AttentionMask, MaskRules, Pattern, Window};
pub use norm::{RmsNormOps, rms_norm};
pub use ops::{AttentionOp, AttentionOps, Bias, Kept, Method};
