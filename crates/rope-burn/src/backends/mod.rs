//! The backends of burn's dispatch.

use burn::tensor::Device;

#[cfg(feature = "flex")]
mod flex;

/// CubeCL backends compose the rotation; a kernel of their own is to come.
#[cfg(feature = "cube")]
impl crate::RotaryOps for burn::backend::Cube {}

/// Rotating tensors that a server holds.
#[cfg(feature = "remote-server")]
pub mod remote;
#[cfg(all(feature = "remote", not(feature = "remote-server")))]
mod remote;

/// Whether [`RotaryOps`](crate::RotaryOps) reaches the backend of a device: burn's dispatch has an arm for those that this
/// crate's features name, and would panic for others.
pub(crate) fn extends(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        burn::backend::DispatchDevice::Cube(_) => true,
        #[cfg(feature = "remote")]
        burn::backend::DispatchDevice::Remote(_) => true,
        #[allow(
            unreachable_patterns,
            reason = "unless burn has other backends enabled"
        )]
        _ => false,
    }
}

/// Whether a token's cosines and sines are to lie in one row, of which the tensors of cos and sin are views: the form that
/// Ascend's kernels read. CPU kernels read each as a whole.
pub(crate) fn wants_angles_together(device: &Device) -> bool {
    #[cfg(feature = "remote")]
    if let burn::backend::DispatchDevice::Remote(_) = device.clone().inner().as_dispatch() {
        return true;
    }
    let _ = device;
    false
}
