//! One device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::machine::Machine;
use super::pool::{Counters, MemoryUse, Pool};
use super::runtime::Runtime;
use super::stream::Stream;
use crate::error::{AscendError, Result};
use crate::result;
use crate::sys::{AclRt, aclrtDevAttr, code};

#[derive(Debug)]
pub(super) struct DeviceInner {
    pub(super) ordinal: i32,
    /// The number of times the device was set, about once per thread: the runtime releases it after
    /// the same number of resets.
    sets: AtomicU32,
    pub(super) counters: Counters,
    /// The pools of the streams, for values that the counters lack.
    pools: Mutex<Vec<Weak<Mutex<Pool>>>>,
    /// Held during each call of the collective library: a device makes one at a time.
    pub(super) collective_calls: Mutex<()>,
    // Last: the device goes before the runtime.
    pub(super) runtime: Runtime,
}

impl DeviceInner {
    pub(super) fn rt(&self) -> &AclRt {
        &self.runtime.inner.api.rt
    }

    pub(super) fn library(&self) -> &str {
        &self.runtime.inner.api.origin
    }

    /// Reports an earlier teardown failure, and makes this the thread's current device.
    pub(super) fn enter(&self) -> Result<()> {
        self.runtime.inner.earlier_failure()?;
        self.make_current()
    }

    /// A pool for a new stream.
    pub(super) fn new_pool(&self) -> Arc<Mutex<Pool>> {
        let pool = Arc::new(Mutex::new(Pool::new(self.runtime.inner.api.pooling)));
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(&pool));
        pool
    }

    pub(super) fn memory_use(&self) -> MemoryUse {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let pools = pools.iter().filter_map(Weak::upgrade);
        let largest = pools.map(|pool| {
            pool.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .largest()
        });
        MemoryUse {
            largest_cached_bytes: largest.max().unwrap_or(0),
            ..self.counters.read()
        }
    }

    fn make_current(&self) -> Result<()> {
        if result::current_device(self.rt()) == Some(self.ordinal) {
            return Ok(());
        }
        // SAFETY: takes a number.
        unsafe { result::set_device(self.rt(), self.ordinal) }?;
        self.sets.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// As [`Self::enter`], for teardowns: their failures are recorded, not returned.
    pub(super) fn teardown(&self, work: impl FnOnce() -> Result<()>) {
        let outcome = self.make_current();
        // The teardown is tried even if the device could not be set: it may still succeed.
        self.runtime.inner.record(outcome);
        self.runtime.inner.record(work());
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        for _ in 0..*self.sets.get_mut() {
            // SAFETY: streams, events and buffers hold this structure, so none is left.
            let outcome = unsafe { result::reset_device(self.rt(), self.ordinal) };
            self.runtime.inner.record(outcome);
        }
    }
}

/// A device of the runtime. Clones share it; it is reset when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct Device {
    pub(super) inner: Arc<DeviceInner>,
}

impl Device {
    #[doc(alias = "aclrtSetDevice")]
    pub(super) fn open(runtime: Runtime, ordinal: u32) -> Result<Self> {
        let count = runtime.device_count()?;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let ordinal = number.ok_or_else(|| {
            AscendError::argument("open device", "ordinal", format!("below {count}"), ordinal)
        })?;
        // SAFETY: takes a number.
        unsafe { result::set_device(&runtime.inner.api.rt, ordinal) }?;
        Ok(Self {
            inner: Arc::new(DeviceInner {
                ordinal,
                sets: AtomicU32::new(1),
                counters: Counters::default(),
                pools: Mutex::default(),
                collective_calls: Mutex::default(),
                runtime,
            }),
        })
    }

    /// The calling thread's current device, which is neither set nor reset: its owner does that.
    pub(super) fn current(runtime: Runtime) -> Result<Self> {
        let ordinal = result::current_device(&runtime.inner.api.rt).ok_or_else(|| {
            let expected = "one that the calling thread has set (aclrtSetDevice)";
            AscendError::argument("current device", "device", expected, "none")
        })?;
        Ok(Self {
            inner: Arc::new(DeviceInner {
                ordinal,
                sets: AtomicU32::new(0),
                counters: Counters::default(),
                pools: Mutex::default(),
                collective_calls: Mutex::default(),
                runtime,
            }),
        })
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.inner.ordinal.unsigned_abs()
    }

    /// The runtime that the device belongs to.
    pub fn runtime(&self) -> &Runtime {
        &self.inner.runtime
    }

    /// Product name of the chip, if the runtime reports it.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn soc_name(&self) -> Result<Option<String>> {
        self.inner.enter()?;
        Ok(result::soc_name(self.inner.rt()))
    }

    /// A property of the device.
    ///
    /// # Errors
    /// Those of the runtime.
    fn attribute(&self, attribute: aclrtDevAttr) -> Result<i64> {
        self.inner.enter()?;
        result::attribute(
            self.inner.rt(),
            self.inner.library(),
            self.ordinal(),
            attribute,
        )
    }

    /// The properties of the device that tiling needs.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn machine(&self) -> Result<Machine> {
        let cores = self.attribute(aclrtDevAttr::VECTOR_CORES)?;
        // Releases and products that do not know one of the others refuse it or answer zero; the
        // one of the unified buffer is for Ascend 950 only.
        let known = |attribute| match self.attribute(attribute) {
            Ok(number) => Ok(Some(number).filter(|number| *number != 0)),
            Err(AscendError::Call {
                code:
                    code::INVALID_PARAM
                    | code::RT_PARAM_INVALID
                    | code::API_NOT_SUPPORT
                    | code::RT_FEATURE_NOT_SUPPORT,
                ..
            }) => Ok(None),
            Err(other) => Err(other),
        };
        let ub_bytes = known(aclrtDevAttr::UB_BYTES)?;
        let architecture = known(aclrtDevAttr::NPU_ARCH)?;
        Machine::new(cores, ub_bytes, architecture)
    }

    /// Free and total bytes of the device's memory, as the runtime sees it.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.inner.enter()?;
        result::device_memory(self.inner.rt(), self.inner.library())
    }

    /// This crate's use of the device's memory.
    pub fn memory_use(&self) -> MemoryUse {
        self.inner.memory_use()
    }

    /// Resets the peaks to the bytes currently in use and reserved.
    pub fn reset_peak(&self) {
        self.inner.counters.reset_peak();
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self.clone())
    }
}
