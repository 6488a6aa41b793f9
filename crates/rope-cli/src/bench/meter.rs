//! Counting the bytes of a device.

use std::error::Error;

use burn::tensor::Device as BurnDevice;
use rope_bench::burn::{Meter, Sizes, float, gpu as gpu_memory};
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

    /// On an NPU everything is data.
    fn count(&self, sizes: Sizes, work: &mut dyn FnMut()) -> Result<Usage, Box<dyn Error>> {
        let device = self.compute.device();
        match (self.compute.npu(), self.counter) {
            (None, Counter::Allocator) => {
                let Sizes {
                    data_bytes,
                    large_bytes,
                } = sizes;
                Ok(ALLOCATOR.measure_classes(data_bytes, large_bytes, work).1)
            }
            (None, Counter::Pools) => gpu_memory::count(device, sizes, work),
            (Some(npu), _) => {
                device.sync()?;
                npu.reset_peak_memory()?;
                let before = npu.memory()?.live_bytes;
                work();
                device.sync()?;
                let after = npu.memory()?;
                let retained = after.live_bytes.cast_signed() - before.cast_signed();
                Ok(Usage {
                    peak_bytes: after.peak_bytes - before,
                    retained_bytes: retained,
                    retained_data_bytes: retained,
                    ..Usage::default()
                })
            }
        }
    }
}
