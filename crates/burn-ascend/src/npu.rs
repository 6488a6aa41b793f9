//! NPUs by number, and those that are open.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use burn::backend::flex::FlexDevice;
use burn::backend::{Device, DeviceId, DeviceOps, DeviceSettings};
use rope_ascend::rope::Npu;
use rope_ascend::safe::MemoryUse;
use rope_ascend::{AscendError, Result};

use crate::context::Context;

/// The driver of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Target {
    #[default]
    Installed,
    #[cfg(feature = "ascend-sim")]
    Simulated,
}

/// An NPU, by number.
///
/// The device is opened at its first use, with one stream for all its work, and stays open until
/// [`close`](Self::close). Call [`open`](Self::open) to detect a missing device early.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct AscendDevice {
    target: Target,
    ordinal: u16,
}

static OPEN: RwLock<Option<HashMap<AscendDevice, Arc<Context>>>> = RwLock::new(None);

impl AscendDevice {
    /// Selects NPU `ordinal` of the installed CANN.
    pub fn new(ordinal: u16) -> Self {
        Self {
            target: Target::Installed,
            ordinal,
        }
    }

    /// Selects device `ordinal` of the simulator.
    #[cfg(feature = "ascend-sim")]
    pub fn simulated(ordinal: u16) -> Self {
        Self {
            target: Target::Simulated,
            ordinal,
        }
    }

    /// Opens the device, unless it is open.
    ///
    /// # Errors
    /// [`AscendError::Load`] if CANN is missing; [`AscendError::InvalidArgument`] if there is no
    /// such device; otherwise those of the runtime.
    pub fn open(&self) -> Result<()> {
        self.context().map(|_| ())
    }

    /// Returns the memory of the device's tensors: bytes in use, the peak since the start or the
    /// last [`reset_peak_memory`](Self::reset_peak_memory), and bytes allocated from the runtime.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn memory(&self) -> Result<MemoryUse> {
        Ok(self.context()?.stream().device().memory_use())
    }

    /// Resets the peak of [`memory`](Self::memory) to the bytes currently in use.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn reset_peak_memory(&self) -> Result<()> {
        self.context()?.stream().device().reset_peak();
        Ok(())
    }

    /// Returns the error of a failed device, if it is open and one of its kernels has failed. Every
    /// wait for the device returns this error until [`close`](Self::close) and the next use.
    pub fn failure(&self) -> Option<AscendError> {
        self.opened().and_then(|context| context.failure())
    }

    /// As [`close`](Self::close), without a server.
    pub(crate) fn forget(&self) -> Result<()> {
        let context = OPEN
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .and_then(|open| open.remove(self));
        context.map_or(Ok(()), |context| context.trim())
    }

    /// Closes the device and waits, within a limit, until nothing of it is in use: a session's
    /// thread may still be releasing it.
    pub(crate) fn release(&self) {
        let alive = self.opened().map(|context| context.alive());
        // Failures of operations still queued concern tensors that can no longer be read.
        let _failed = self.forget();
        let Some(alive) = alive else {
            return;
        };
        let limit = Instant::now() + Duration::from_secs(10);
        while Arc::strong_count(&alive) > 1 && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The open device.
    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        let found = OPEN
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .and_then(|open| open.get(self).cloned());
        if let Some(context) = found {
            return Ok(context);
        }
        let mut open = OPEN.write().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        // Another thread may have opened it meanwhile.
        if let Some(context) = open.get(self) {
            return Ok(context.clone());
        }
        let context = Arc::new(Context::new(*self, self.npu()?)?);
        open.insert(*self, context.clone());
        Ok(context)
    }

    /// The open device, if it is open.
    pub(crate) fn opened(&self) -> Option<Arc<Context>> {
        let open = OPEN.read().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().and_then(|open| open.get(self).cloned())
    }

    /// Returns the device without burn, for rope-ascend's functions.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn npu(&self) -> Result<Npu> {
        let ordinal = u32::from(self.ordinal);
        match self.target {
            Target::Installed => Npu::open(ordinal),
            #[cfg(feature = "ascend-sim")]
            Target::Simulated => Npu::simulated_device(ordinal),
        }
    }

    /// Number of devices of one kind, by the kind's number in [`DeviceId`].
    pub(crate) fn count(kind: u16) -> Result<usize, AscendError> {
        let device = Self::from_id(DeviceId::new(kind, 0));
        let runtime = match device.target {
            Target::Installed => Npu::runtime()?,
            #[cfg(feature = "ascend-sim")]
            Target::Simulated => Npu::simulated()?.device().runtime().clone(),
        };
        Ok(runtime.device_count()? as usize)
    }
}

impl fmt::Display for AscendDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.target {
            Target::Installed => "ascend",
            #[cfg(feature = "ascend-sim")]
            Target::Simulated => "ascend-sim",
        };
        write!(f, "{kind}:{}", self.ordinal)
    }
}

impl fmt::Debug for AscendDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Device for AscendDevice {
    fn to_id(&self) -> DeviceId {
        let kind = match self.target {
            Target::Installed => 0,
            #[cfg(feature = "ascend-sim")]
            Target::Simulated => 1,
        };
        DeviceId::new(kind, self.ordinal)
    }

    fn from_id(id: DeviceId) -> Self {
        match id.type_id {
            #[cfg(feature = "ascend-sim")]
            1 => Self::simulated(id.index_id),
            _ => Self::new(id.index_id),
        }
    }
}

impl DeviceOps for AscendDevice {
    fn defaults(&self) -> DeviceSettings {
        // The fallback knows the same default types.
        FlexDevice.defaults()
    }
}
