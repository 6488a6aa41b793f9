//! The backends of burn's dispatch.

#[cfg(any(feature = "cube", feature = "remote"))]
use burn::backend::DispatchDevice;
use burn::tensor::Device;

burn_fused::reaches!(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
);

/// True if a device shares the host's memory, so that nothing must be sent to it.
pub(crate) fn in_host_memory(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => false,
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => false,
        _ => true,
    }
}
