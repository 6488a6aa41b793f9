//! The backends of burn's dispatch.

use burn::backend::DispatchDevice;

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

/// Whether [`AttentionOps`](crate::AttentionOps) reaches the backend of a device: burn's dispatch
/// knows those that this crate's features name, and would panic for others.
pub(crate) fn extends(device: &DispatchDevice) -> bool {
    match device {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => true,
        DispatchDevice::Autodiff(device) => extends(device),
        #[allow(
            unreachable_patterns,
            reason = "unless burn has other backends enabled"
        )]
        _ => false,
    }
}
