//! The runtime of the process.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Device;
use crate::error::{AscendError, Result};
use crate::loader::Api;
use crate::result;

#[derive(Debug)]
pub(super) struct RuntimeInner {
    started_here: bool,
    finalized: std::sync::atomic::AtomicBool,
    teardown: Mutex<Option<AscendError>>,
    pub(super) api: Api,
}

impl RuntimeInner {
    /// Keeps the first failure of a teardown.
    pub(super) fn record(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.teardown
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(error);
        }
    }

    /// The failure of an earlier teardown, once.
    pub(super) fn earlier_failure(&self) -> Result<()> {
        match self
            .teardown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn finalize(&self) -> Result<()> {
        let again = self
            .finalized
            .swap(true, std::sync::atomic::Ordering::AcqRel);
        if again || !self.started_here {
            return Ok(());
        }
        // SAFETY: every handle holds this structure by reference count, so when it is dropped or
        // closed as the last one, none is left.
        unsafe { result::finalize(&self.api.rt) }
    }
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        // No caller is left to return this failure to; `Runtime::close` returns it instead.
        let _ = self.finalize();
    }
}

/// The initialised Ascend runtime. Clones share it.
#[derive(Clone, Debug)]
pub struct Runtime {
    pub(super) inner: Arc<RuntimeInner>,
}

impl Runtime {
    /// Opens the vendor's libraries, in `folder` if one is given, and initialises the runtime.
    ///
    /// # Errors
    /// [`AscendError::Load`] where there is no CANN, else the runtime's.
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        Self::start(Api::open(folder)?)
    }

    /// Initialises the runtime of `api`, for example the simulator's.
    ///
    /// # Errors
    /// The runtime's.
    #[doc(alias = "aclInit")]
    pub fn start(api: Api) -> Result<Self> {
        let started_here = result::init(&api.rt)?;
        let inner = RuntimeInner {
            started_here,
            finalized: false.into(),
            teardown: Mutex::new(None),
            api,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The function tables.
    pub fn api(&self) -> &Api {
        &self.inner.api
    }

    /// Version of the runtime, where it can be asked.
    ///
    /// # Errors
    /// The runtime's.
    pub(crate) fn version(&self) -> Result<Option<(i32, i32, i32)>> {
        self.inner.earlier_failure()?;
        result::version(&self.inner.api.rt)
    }

    /// Number of devices.
    ///
    /// # Errors
    /// The runtime's.
    pub fn device_count(&self) -> Result<u32> {
        self.inner.earlier_failure()?;
        result::device_count(&self.inner.api.rt)
    }

    /// The device of number `ordinal`.
    ///
    /// # Errors
    /// The runtime's.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        Device::open(self.clone(), ordinal)
    }

    /// Ends the runtime and reports the first failure of any teardown.
    ///
    /// # Errors
    /// [`AscendError::StillInUse`] while other handles are alive; a recorded failure; the
    /// runtime's.
    #[doc(alias = "aclFinalize")]
    pub fn close(self) -> Result<()> {
        let inner = Arc::try_unwrap(self.inner).map_err(|inner| AscendError::StillInUse {
            handles: Arc::strong_count(&inner) - 1,
        })?;
        let earlier = inner.earlier_failure();
        let finalized = inner.finalize();
        earlier.and(finalized)
    }
}
