//! The runtime of the process.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Device;
use crate::error::{AscendError, Result};
use crate::loader::Api;
use crate::result;

/// The runtimes that this process uses. The runtime belongs to the process, so the last of its
/// users ends it, and only if one of them started it.
static IN_USE: Mutex<Vec<InUse>> = Mutex::new(Vec::new());

struct InUse {
    /// The address of `aclInit`, by which one runtime differs from another, as a simulated one.
    init: usize,
    users: usize,
    started_here: bool,
}

fn in_use() -> MutexGuard<'static, Vec<InUse>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(super) struct RuntimeInner {
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
        if again {
            return Ok(());
        }
        let mut runtimes = in_use();
        let init = self.api.rt.aclInit as usize;
        let Some(index) = runtimes.iter().position(|runtime| runtime.init == init) else {
            return Ok(());
        };
        runtimes[index].users -= 1;
        if runtimes[index].users > 0 || !runtimes.swap_remove(index).started_here {
            return Ok(());
        }
        // SAFETY: every handle holds a structure like this one by reference count, and this is the
        // last of them, so no handle is left. No other is made meanwhile: the list is locked.
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
    /// Opens the vendor's libraries, in `folder` if given, and initialises the runtime.
    ///
    /// # Errors
    /// [`AscendError::Load`] if CANN is missing, otherwise those of the runtime.
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        Self::start(Api::open(folder)?)
    }

    /// Initialises the runtime of `api`, for example the simulator's.
    ///
    /// # Errors
    /// Those of the runtime.
    #[doc(alias = "aclInit")]
    pub fn start(api: Api) -> Result<Self> {
        let mut runtimes = in_use();
        let started_here = result::init(&api.rt)?;
        let init = api.rt.aclInit as usize;
        match runtimes.iter_mut().find(|runtime| runtime.init == init) {
            Some(runtime) => {
                runtime.users += 1;
                runtime.started_here |= started_here;
            }
            None => runtimes.push(InUse {
                init,
                users: 1,
                started_here,
            }),
        }
        drop(runtimes);
        let inner = RuntimeInner {
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

    /// Version of the runtime, if it reports one.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn version(&self) -> Result<Option<(i32, i32, i32)>> {
        self.inner.earlier_failure()?;
        result::version(&self.inner.api.rt)
    }

    /// Number of devices.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn device_count(&self) -> Result<u32> {
        self.inner.earlier_failure()?;
        result::device_count(&self.inner.api.rt)
    }

    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        Device::open(self.clone(), ordinal)
    }

    /// Returns the calling thread's current device, in a process where other code, such as another
    /// framework, owns it. Context and device of the thread do not change. A thread with a
    /// different current device sets this one at its first call; dropping the last handle undoes
    /// that.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the thread has set no device.
    #[doc(alias = "aclrtGetDevice")]
    pub fn current_device(&self) -> Result<Device> {
        Device::current(self.clone())
    }

    /// Ends the runtime and reports the first failure of any teardown. If the process has started
    /// the runtime more than once and still uses it, it stays open.
    ///
    /// # Errors
    /// [`AscendError::StillInUse`] while other handles are alive; a recorded failure; those of the
    /// runtime.
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
