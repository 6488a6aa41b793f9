//! The stock rotary operators, each behind its documented limits.
//!
//! What an operator would refuse, or compute wrongly without saying so, is refused before the
//! call, with the operator's limit in the message. Each call has two phases: the operator plans
//! and names its workspace, then runs on the stream. Outputs are defined once the stream has
//! passed the call.
//!
//! | function | operator | limits |
//! |---|---|---|
//! | [`rotary_position_embedding`] | `npu_rotary_mul` | D even and below 896; broadcast patterns; modes 2 and 3 on Ascend 950 |
//! | [`rotary_position_embedding_grad`] | its gradient | as forward; B·N at most 1024 with gradients of cos and sin |
//! | [`rope_with_sin_cos_cache`] | `npu_mrope` | four section lists; aligned sizes; contiguous, checked positions |
//! | [`apply_rotary_pos_emb`] | in place on q and k | D of 64 or 128; half on A2 and A3 |
//! | [`interleave_rope`] | de-interleaving | BNSD, D of 64 |
//!
//! `npu_mrope` has no gradient of its own. Where a pair shares its angle, the gradient is the same
//! operator with the sines negated: [`CacheDirection::Gradient`].
//!
//! [`Operators`] has the operators of training: arithmetic, comparisons, reductions, data movement, matrix products.
//!
//! # Source
//! Public documentation of the operators (hicann/ops-transformer, `posembedding`; hicann/ops-math and hicann/ops-nn).
#![allow(unsafe_code, reason = "calls of the operator library")]

mod apply;
mod cache;
mod call;
mod operators;
mod plans;
mod rotary;
mod tensor;

pub use apply::{apply_rotary_pos_emb, interleave_rope};
pub use cache::{
    CacheDirection, MropeCall, SectionOrder, SinCosCache, StockPositions, rope_with_sin_cos_cache,
};
pub use operators::{Number, OPERATORS, OperatorInfo, Operators, View};
pub use rotary::{
    GradOutputs, Mode, OperatorLayout, rotary_position_embedding, rotary_position_embedding_grad,
};
pub use tensor::{OperatorElement, Output, Tensor};
