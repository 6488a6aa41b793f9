//! The GPU of the suites `gpu` and `gpu_memory`.

use burn::tensor::{Device, DeviceKind, DeviceType};

/// The first GPU: by CUDA if the suite was built with it and finds one, else by wgpu.
pub(crate) fn device() -> Device {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = Device::enumerate(DeviceType::Cuda).to_vec().first() {
        return gpu.clone();
    }
    assert!(
        !Device::enumerate(DeviceType::Wgpu).is_empty(),
        "no GPU and no software driver; install one: apt-get install mesa-vulkan-drivers"
    );
    Device::wgpu(DeviceKind::DefaultDevice)
}
