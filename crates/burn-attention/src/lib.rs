#![doc = include_str!("../README.md")]
// Without a backend the macro of the operations writes functions that use none of their arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables)
)]

mod attention;
mod backends;
mod backward;
pub mod blocks;
pub mod composed;
mod error;
mod gate;
mod loss;
mod mask;
pub mod norm;
mod ops;

pub use attention::Attention;
#[cfg(feature = "remote-server")]
pub use backends::remote;
pub use burn_fused::OpError;
pub use error::{AttentionError, Result};
pub use gate::{SwiGluOps, swiglu};
pub use loss::{CrossEntropy, CrossEntropyOp, CrossEntropyOps, IGNORED};
pub use mask::{AttentionMask, MaskRules, Pattern, Window};
pub use norm::{RmsNormOps, rms_norm};
pub use ops::{AttentionOp, AttentionOps, Bias, Kept, Method};
