//! Names of implementations in results.

/// The kernels by themselves.
pub const KERNELS: &str = "rope-core";
/// One differentiable operation in burn.
pub const FUSED: &str = "fused";
/// Ordinary operations of burn.
pub const COMPOSED: &str = "composed";
/// burn's own norm, then the fused rotation.
pub const FUSED_ROTATION: &str = "composed norm, fused rotation";
/// The backward's seed alone.
pub const NONE: &str = "no rotation";
/// burn's own.
pub const ROTARY_ENCODING: &str = "burn::nn::RotaryEncoding";
