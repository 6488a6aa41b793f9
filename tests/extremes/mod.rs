//! Attention, losses and norms of large, tiny, infinite and NaN values, against plain computations
//! in f64 and closed forms: on Flex, on a simulated NPU and, with the feature `wgpu`, on a GPU or
//! Mesa's software driver.

mod attention;
mod layers;

use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Device};
use burn_ascend::{AscendDevice, AscendHost};

const GPU: &str = "the GPU";

/// A device with autodiff.
struct Place {
    name: &'static str,
    device: Device,
}

impl Place {
    fn new(name: &'static str, device: Device) -> Self {
        let device = device.autodiff();
        Self { name, device }
    }

    /// True if the device computes in a type, as all do in f32. On a GPU by WGSL, burn's exponential
    /// of f64 is wrong.
    fn has(&self, dtype: DType) -> bool {
        let has_exponential = self.name != GPU || dtype != DType::F64;
        let has = has_exponential && self.device.supports_dtype(dtype);
        assert!(has || dtype != DType::F32, "{}", self.name);
        if !has {
            println!("skipped: {dtype:?} on {}", self.name);
        }
        has
    }
}

/// Runs a check on each device. It fails if the simulator finds violations.
fn on_each_device(check: impl Fn(&Place)) {
    // The simulator counts for the whole process, and a software GPU takes all threads.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    check(&Place::new("Flex", Device::flex()));
    #[cfg(feature = "wgpu")]
    check(&Place::new(
        GPU,
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
    ));
    let npu = AscendDevice::simulated(0);
    let host = AscendHost::start(&[npu]).expect("the simulated device opens");
    check(&Place::new("the NPU", host.devices()[0].clone()));
    drop(host);
    let violations = rope_ascend::rope::violations();
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}
