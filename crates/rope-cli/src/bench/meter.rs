//! Counting the bytes of a device.

use std::error::Error;

use burn::tensor::Device as BurnDevice;
use burn_ascend::AscendDevice;
use rope_benches::rows::Source;
use rope_check::alloc::Usage;

use super::ALLOCATOR;
use crate::device::{Compute, Device, TokenArgs, npu_of};

/// Sizes from which allocations are counted apart.
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
    /// Its tensors live there; on the host where there is none.
    npu: Option<AscendDevice>,
    name: String,
    source: Source,
}

impl Meter {
    /// Opens the device.
    ///
    /// # Errors
    /// If it is not there, or is no device of this process.
    pub(crate) fn open(device: &Device) -> Result<Self, Box<dyn Error>> {
        let (npu, name, source) = match device {
            Device::Cpu => (None, "flex".to_owned(), Source::Measured),
            Device::AscendSim => (
                Some(npu_of(device)?),
                device.to_string(),
                Source::CountedOnTheSimulator,
            ),
            _ => (Some(npu_of(device)?), device.to_string(), Source::Measured),
        };
        let compute = Compute::open(device, &TokenArgs::default())?;
        Ok(Self {
            compute,
            npu,
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
        self.npu.is_none()
    }

    /// Counts while `work` runs and until the device has done it. On an NPU everything is data.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn count(
        &self,
        sizes: Sizes,
        work: &mut dyn FnMut(),
    ) -> Result<Usage, Box<dyn Error>> {
        let Some(npu) = self.npu else {
            let Sizes {
                data_bytes,
                large_bytes,
            } = sizes;
            return Ok(ALLOCATOR.measure_classes(data_bytes, large_bytes, work).1);
        };
        let sync = || self.compute.device().sync();
        sync()?;
        npu.reset_peak_memory()?;
        let before = npu.memory()?.live_bytes;
        work();
        sync()?;
        let after = npu.memory()?;
        let retained_bytes = after.live_bytes.cast_signed() - before.cast_signed();
        let peak_bytes = after.peak_bytes - before;
        Ok(Usage {
            peak_bytes,
            retained_bytes,
            retained_data_bytes: retained_bytes,
            allocations: 0,
            large_allocations: 0,
            large_peak_bytes: 0,
        })
    }
}
