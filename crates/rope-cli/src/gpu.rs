//! `--device gpu`: GPUs by their index among those that this program can reach.

use std::fmt::Display;

use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn::tensor::DeviceType;

use crate::device::built_without;
use crate::stdio::note;

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

/// Says on standard error if a GPU is none, but software on this machine's processor; returns
/// whether it is.
pub(crate) fn note_software(device: &Device, name: &dyn Display) -> bool {
    let is_software = is_software(device);
    if is_software {
        note(format_args!(
            "{name} is a software driver on this machine's processor: its times and bytes say \
             nothing about a GPU"
        ));
    }
    is_software
}

#[cfg(feature = "cube")]
fn is_software(device: &Device) -> bool {
    let identity = device.identity();
    identity.is_some_and(|identity| identity.physical.is_none())
}

/// Without a runtime there is no GPU.
#[cfg(not(feature = "cube"))]
fn is_software(_: &Device) -> bool {
    false
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
