//! The backends of burn's dispatch.

#[cfg(feature = "flex")]
mod flex;

/// CubeCL's backends have no kernel of their own: blocks of ordinary operations.
#[cfg(feature = "cube")]
impl crate::AttentionOps for burn::backend::Cube {}

/// Computing on tensors that a server holds.
#[cfg(feature = "remote-server")]
pub mod remote;
#[cfg(all(feature = "remote", not(feature = "remote-server")))]
mod remote;

burn_fused::reaches!();
