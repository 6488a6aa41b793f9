//! The items of `served.rs`, in a program without it.

use std::error::Error;
use std::sync::Arc;

use burn::tensor::Device as BurnDevice;
use rope_ascend::AscendError;
use rope_ascend::safe::{MemoryUse, Traffic};
use vlm_train::Collective;

use super::{Device, Elsewhere, TokenArgs, built_without};

/// An NPU to models; there is none.
pub(crate) enum ServedNpu {}

impl ServedNpu {
    pub(super) fn start(devices: &[Device]) -> Result<Self, Box<dyn Error>> {
        Err(match devices.first() {
            Some(Device::AscendSim(_)) => built_without("a simulated device", "ascend-sim"),
            _ => built_without("NPUs for models", "ascend"),
        }
        .into())
    }

    pub(super) fn devices(&self) -> Vec<BurnDevice> {
        match *self {}
    }

    pub(super) fn ranks(&self) -> Option<NpuRanks> {
        match *self {}
    }

    pub(crate) fn memory(&self) -> Result<MemoryUse, AscendError> {
        match *self {}
    }

    pub(crate) fn reset_peak_memory(&self) -> Result<(), AscendError> {
        match *self {}
    }
}

/// NPUs as ranks; there are none.
#[derive(Clone)]
pub(crate) enum NpuRanks {}

impl NpuRanks {
    pub(crate) fn root_info(&self) -> Result<Vec<u8>, AscendError> {
        match *self {}
    }

    pub(crate) fn join(&self, _: usize, _: usize, _: &[u8]) -> Result<(), AscendError> {
        match *self {}
    }

    pub(crate) fn collective(&self, _: usize, _: usize, _: &[BurnDevice]) -> Arc<dyn Collective> {
        match *self {}
    }

    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        match *self {}
    }

    pub(crate) fn traffic(&self) -> (Traffic, bool) {
        match *self {}
    }
}

impl TokenArgs {
    pub(crate) fn shared_token(&self) -> Result<Vec<u8>, Box<dyn Error>> {
        Err(built_without("several hosts", "ascend").into())
    }
}

pub(super) fn connect(_: &str, _: u32, _: &TokenArgs) -> Result<BurnDevice, Box<dyn Error>> {
    Err(built_without("devices of other machines", "ascend").into())
}

pub(super) fn elsewhere() -> Vec<Elsewhere> {
    Vec::new()
}

pub(super) fn reset_elsewhere() {}
