//! Counting the bytes of a device.

use std::error::Error;

use burn::tensor::Device as BurnDevice;
use rope_bench::rows::Source;
use rope_check::alloc::Usage;

use crate::ALLOCATOR;
use crate::device::{Compute, Device, TokenArgs};

/// Sizes from which allocations are counted separately.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Large enough to hold tensor data.
    pub(crate) data_bytes: usize,
    /// As large as the smaller of q and k.
    pub(crate) large_bytes: usize,
}

/// A device whose bytes can be counted.
pub(crate) struct Meter {
    compute: Compute,
    name: String,
    source: Source,
}

impl Meter {
    /// Opens the device.
    ///
    /// # Errors
    /// If the device is not there, or is not in this process.
    pub(crate) fn open(device: &Device) -> Result<Self, Box<dyn Error>> {
        let (name, source) = match device {
            Device::Cpu => ("flex".to_owned(), Source::Measured),
            Device::Ascend(_) => (device.to_string(), Source::Measured),
            Device::AscendSim => (device.to_string(), Source::CountedOnTheSimulator),
            Device::Gpu(_) | Device::Remote { .. } => {
                return Err(format!(
                    "the memory of {device} cannot be counted from here; expected --device cpu, \
                     ascend, ascend:N or ascend-sim"
                )
                .into());
            }
        };
        Ok(Self {
            compute: Compute::open(device, &TokenArgs::default())?,
            name,
            source,
        })
    }

    /// The device, without autodiff.
    pub(crate) fn device(&self) -> BurnDevice {
        self.compute.device().clone()
    }

    /// The name in results.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How the counts come about.
    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Whether the device counts allocations, not only their bytes.
    pub(crate) fn counts_allocations(&self) -> bool {
        self.compute.npu().is_none()
    }

    /// Counts while `work` runs and until the device has done it. On an NPU everything is data.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn count(
        &self,
        sizes: Sizes,
        work: &mut dyn FnMut(),
    ) -> Result<Usage, Box<dyn Error>> {
        let Some(npu) = self.compute.npu() else {
            let usage = ALLOCATOR.measure_classes(sizes.data_bytes, sizes.large_bytes, work);
            return Ok(usage.1);
        };
        let sync = || self.compute.device().sync();
        sync()?;
        npu.reset_peak_memory()?;
        let before = npu.memory()?.live_bytes;
        work();
        sync()?;
        let after = npu.memory()?;
        let retained_bytes = after.live_bytes.cast_signed() - before.cast_signed();
        Ok(Usage {
            peak_bytes: after.peak_bytes - before,
            retained_bytes,
            retained_data_bytes: retained_bytes,
            allocations: 0,
            large_allocations: 0,
            large_peak_bytes: 0,
        })
    }
}
