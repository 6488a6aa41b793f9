//! Rotations and attention in burn: their bytes and their time.

pub mod attention;
pub mod device;
pub mod gpu;
pub mod memory;
pub mod norm;
mod norm_scheme;
mod scheme;
pub mod speed;

use std::error::Error;

use burn::tensor::{Device, FloatDType};
use rope_check::alloc::Usage;
use rope_check::buffer::DType;

use crate::rows::Source;

/// burn's name of an element type.
pub fn float(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F32 => FloatDType::F32,
        DType::Bf16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
    }
}

/// Sizes from which allocations are counted separately.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Large enough to hold tensor data.
    pub data_bytes: usize,
    /// As large as the smaller of q and k.
    pub large_bytes: usize,
}

/// A device whose bytes can be counted.
pub trait Meter {
    /// The device, without autodiff.
    fn device(&self) -> Device;

    /// The name in results.
    fn name(&self) -> &str;

    /// How the counts come about.
    fn source(&self) -> Source;

    /// True if the device counts allocations, not only their bytes.
    fn counts_allocations(&self) -> bool;

    /// Counts while `work` runs and until the device has done it.
    ///
    /// # Errors
    /// Those of the device.
    fn count(&self, sizes: Sizes, work: &mut dyn FnMut()) -> Result<Usage, Box<dyn Error>>;
}
