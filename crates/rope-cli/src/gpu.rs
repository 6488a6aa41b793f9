//! `--device gpu`: GPUs by their index among those that this program can reach.

use burn::tensor::Device;
#[cfg(any(
    feature = "cuda",
    feature = "rocm",
    feature = "metal",
    feature = "vulkan",
    feature = "wgpu"
))]
use burn::tensor::DeviceType;

use crate::device::built_without;

/// A runtime's feature, and how its GPUs are found.
type Runtime = (&'static str, fn() -> Vec<Device>);

/// Those that this program was built with. A card's own runtime comes before the portable ones.
const RUNTIMES: &[Runtime] = &[
    #[cfg(feature = "cuda")]
    ("cuda", || Device::enumerate(DeviceType::Cuda).to_vec()),
    #[cfg(feature = "rocm")]
    ("rocm", || Device::enumerate(DeviceType::Rocm).to_vec()),
    #[cfg(feature = "metal")]
    ("metal", || Device::enumerate(DeviceType::Metal).to_vec()),
    #[cfg(feature = "vulkan")]
    ("vulkan", || Device::enumerate(DeviceType::Vulkan).to_vec()),
    #[cfg(feature = "wgpu")]
    ("wgpu", || Device::enumerate(DeviceType::Wgpu).to_vec()),
];

/// Opens a GPU.
///
/// # Errors
/// If this program was built without a GPU's runtime, or there is no such GPU; with what was found.
pub(crate) fn open(index: usize) -> Result<Device, String> {
    let found = RUNTIMES.iter().flat_map(|(runtime, devices)| {
        let devices = devices().into_iter();
        devices.map(move |device| (*runtime, device))
    });
    select(index, found.collect())
}

fn select(index: usize, mut found: Vec<(&str, Device)>) -> Result<Device, String> {
    if RUNTIMES.is_empty() {
        let lacking = "a GPU's runtime (cuda, metal, rocm, vulkan or wgpu)";
        return Err(built_without(lacking, "vulkan"));
    }
    if index < found.len() {
        return Ok(found.swap_remove(index).1);
    }
    let runtimes: Vec<&str> = RUNTIMES.iter().map(|(name, _)| *name).collect();
    let found: Vec<String> = (0..).zip(&found).map(listed).collect();
    Err(format!(
        "gpu:{index} is not there; looked in {}, found {}",
        runtimes.join(", "),
        if found.is_empty() {
            "no GPU".to_owned()
        } else {
            found.join(", ")
        }
    ))
}

fn listed((index, (runtime, device)): (usize, &(&str, Device))) -> String {
    format!("gpu:{index} ({runtime}: {device:?})")
}
