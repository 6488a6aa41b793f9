#![doc = include_str!("../README.md")]
// Without a backend the macro of the operations writes functions that use none of their arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "cube", feature = "remote")),
    allow(unused_variables)
)]

#[macro_use]
mod operation;

mod adamw;
mod adapter;
mod attention;
mod backends;
mod cross_entropy;
mod error;
mod gated_delta;
mod gelu;
mod gradients;
mod grouped_linear;
mod layer_norm;
mod linear;
#[cfg(feature = "remote-server")]
pub mod remote;
mod rms_norm;
mod routes;
mod rows;
mod sequences;
mod short_convolution;
mod swiglu;
mod views;

pub use adamw::{
    AdamWFactors, AdamWOp, AdamWOps, AdamWRounded, AdamWUpdate, SQUARES, adamw, square_sums,
};
pub use adapter::{
    Adapter, AdapterOps, adapted_linear_source, adapted_linears, concatenates_at_once,
    has_adapter_kernels, scaled_parts, wide_linear, wide_linear_onto, wide_linear_source,
    wide_linears,
};
pub use attention::{
    Attention, AttentionGradients, AttentionMask, AttentionOp, AttentionOps, Bias, Kept, MaskRules,
    Pattern, Window,
};
pub use burn_fused::{Implementation, OpError};
pub use cross_entropy::{CrossEntropy, CrossEntropyOp, CrossEntropyOps, IGNORED};
pub use error::{AttentionError, Result};
pub use gated_delta::{GatedDelta, GatedDeltaOp, GatedDeltaOps, KeptStates, gated_delta_step};
pub use gelu::{GeluOps, gelu, gelu_tanh};
pub use gradients::{GradientSource, backward_from, stand_in};
pub use grouped_linear::{GroupedLinearOp, GroupedLinearOps, grouped_linear};
pub use layer_norm::{LayerNormOps, layer_norm};
pub use linear::{LinearOps, has_linear_kernel, linear, linear_source};
pub use rms_norm::{RmsNormOps, rms_norm};
pub use routes::{Routes, RoutesOps, routed_rows, routed_sum};
pub use sequences::Sequences;
pub use short_convolution::{ShortConvolutionOp, ShortConvolutionOps, short_convolution};
pub use swiglu::{
    GatedLinearOps, SwiGluHalvesOps, SwiGluOps, gated_linear, gated_linear_source, swiglu,
    swiglu_halves,
};
pub use views::{divided, flattened, reshaped};

/// The operations composed of ordinary tensor operations, for backends whose kernels have limits.
pub mod composed {
    pub use crate::adamw::composed as adamw;
    pub use crate::adapter::composed as adapter;
    pub use crate::attention::blocks as attention;
    pub use crate::gated_delta::composed as gated_delta;
    pub use crate::grouped_linear::composed as grouped_linear;
    pub use crate::layer_norm::composed as layer_norm;
    pub use crate::rms_norm::composed as rms_norm;
    pub use crate::routes::composed as routes;
    pub use crate::short_convolution::composed as short_convolution;
    pub use crate::swiglu::composed as swiglu;
}
