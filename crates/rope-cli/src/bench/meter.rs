//! Counting the bytes of a device.

use std::error::Error;

use burn::tensor::Device as BurnDevice;
use rope_bench::rows::Source;
use rope_check::alloc::Usage;
use rope_check::buffer::DType;

use super::memory::float;
use crate::ALLOCATOR;
use crate::device::{Compute, Device, TokenArgs};
use crate::gpu;
use crate::stdio::note;

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
    counter: Counter,
}

/// Who counts what is not on an NPU, whose pool counts bytes alone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counter {
    /// The program's allocator: every allocation.
    Allocator,
    /// The pools of a GPU's runtime: bytes in use, and bytes that they hold.
    Pools,
}

impl Meter {
    /// Opens the device.
    ///
    /// # Errors
    /// If the device is not there, or is not in this process.
    pub(crate) fn open(device: &Device) -> Result<Self, Box<dyn Error>> {
        let (name, source) = match device {
            Device::Cpu => ("flex".to_owned(), Source::Measured),
            Device::Gpu(_) | Device::Ascend(_) => (device.to_string(), Source::Measured),
            Device::AscendSim(_) => (device.to_string(), Source::CountedOnTheSimulator),
            Device::Remote { .. } => {
                return Err(format!(
                    "the memory of {device} cannot be counted from here; expected --device cpu, \
                     gpu, gpu:N, ascend, ascend:N or ascend-sim"
                )
                .into());
            }
        };
        let compute = Compute::open(device, &TokenArgs::default())?;
        let counter = if matches!(device, Device::Gpu(_)) {
            gpu::note_software(compute.device(), device);
            Counter::Pools
        } else {
            Counter::Allocator
        };
        Ok(Self {
            counter,
            compute,
            name,
            source,
        })
    }

    /// The device, without autodiff.
    pub(crate) fn device(&self) -> BurnDevice {
        self.compute.device().clone()
    }

    /// True if the device has an element type; a GPU may lack one, which is said on standard error.
    pub(crate) fn has(&self, dtype: DType) -> bool {
        let is_gpu = self.counter == Counter::Pools;
        let has = !is_gpu || self.device().supports_dtype(float(dtype));
        if !has {
            note(format_args!(
                "skipped: {} has no {}",
                self.name,
                dtype.name()
            ));
        }
        has
    }

    /// The name in results.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How the counts come about.
    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// True if the device counts allocations, not only their bytes.
    pub(crate) fn counts_allocations(&self) -> bool {
        self.counter == Counter::Allocator && self.compute.npu().is_none()
    }

    /// Counts while `work` runs and until the device has done it.
    ///
    /// On an NPU everything is data. The peak on a GPU is what its pools grew by, after they have
    /// given back what was free.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn count(
        &self,
        sizes: Sizes,
        work: &mut dyn FnMut(),
    ) -> Result<Usage, Box<dyn Error>> {
        let device = self.compute.device();
        let (peak_bytes, retained_bytes, retained_data_bytes) =
            match (self.compute.npu(), self.counter) {
                (None, Counter::Allocator) => {
                    let usage =
                        ALLOCATOR.measure_classes(sizes.data_bytes, sizes.large_bytes, work);
                    return Ok(usage.1);
                }
                (Some(npu), _) => {
                    device.sync()?;
                    npu.reset_peak_memory()?;
                    let before = npu.memory()?.live_bytes;
                    work();
                    device.sync()?;
                    let after = npu.memory()?;
                    let retained = after.live_bytes.cast_signed() - before.cast_signed();
                    (after.peak_bytes - before, retained, retained)
                }
                (None, Counter::Pools) => {
                    device.sync()?;
                    device.memory_cleanup();
                    let before = pools(device)?;
                    work();
                    device.sync()?;
                    let after = pools(device)?;
                    let [retained, grown] = [0, 1].map(|i| after[i] - before[i]);
                    // Less than an allocation of data is none of data.
                    let holds_data = retained.max(0).cast_unsigned() >= sizes.data_bytes;
                    let data = if holds_data { retained } else { 0 };
                    (grown.max(retained).max(0).cast_unsigned(), retained, data)
                }
            };
        Ok(Usage {
            peak_bytes,
            retained_bytes,
            retained_data_bytes,
            allocations: 0,
            large_allocations: 0,
            large_peak_bytes: 0,
        })
    }
}

/// Bytes that a GPU's tensors use, and bytes that the pools hold for them.
fn pools(device: &BurnDevice) -> Result<[isize; 2], String> {
    let usage = device.memory_pool_usage();
    let usage = usage.ok_or("the GPU's runtime does not report its memory")?;
    Ok([usage.bytes_in_use, usage.bytes_reserved].map(|bytes| bytes as isize))
}
