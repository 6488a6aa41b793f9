//! The backends of burn's dispatch.

use burn::backend::DispatchDevice;
use burn::tensor::Device;

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

/// Rotating tensors that a server holds.
#[cfg(feature = "remote-server")]
pub mod remote;
#[cfg(all(feature = "remote", not(feature = "remote-server")))]
mod remote;

/// Whether [`RotaryOps`](crate::RotaryOps) reaches the backend of a device: burn's dispatch knows
/// those that this crate's features name, and would panic for others.
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

/// Whether a device's memory is the host's, so that nothing has to be sent there.
pub(crate) fn in_host_memory(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => false,
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => false,
        _ => true,
    }
}
