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
