//! The backends of burn's dispatch.

burn_fused::reaches!(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
);

/// True for CubeCL's devices, on which a concatenation launches a copy of each part.
pub(crate) fn copies_parts(device: &burn::backend::DispatchDevice) -> bool {
    use burn::backend::DispatchDevice;
    match device {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        DispatchDevice::Autodiff(device) => copies_parts(device),
        _ => false,
    }
}
