//! Counting the bytes of a device.

use std::error::Error;

use burn::tensor::Device as BurnDevice;
use rope_bench::burn::{Meter, Sizes, float};
use rope_bench::rows::Source;
use rope_check::alloc::Usage;
use rope_check::buffer::DType;

use crate::ALLOCATOR;
use crate::device::{Compute, Device, TokenArgs};
use crate::gpu;
use crate::stdio::note;

/// A device whose bytes can be counted.
pub(crate) struct OpenMeter {
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

impl OpenMeter {
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
}

impl Meter for OpenMeter {
    fn device(&self) -> BurnDevice {
        self.compute.device().clone()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn source(&self) -> Source {
        self.source
    }

    fn counts_allocations(&self) -> bool {
        self.counter == Counter::Allocator && self.compute.npu().is_none()
    }

    /// On an NPU everything is data. The peak on a GPU is what its pools grew by, after they have
    /// given back what was free.
    fn count(&self, sizes: Sizes, work: &mut dyn FnMut()) -> Result<Usage, Box<dyn Error>> {
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
