//! Points in streams that other streams wait for.

use super::device::Device;
use super::stream::Stream;
use crate::error::Result;
use crate::result;
use crate::sys::aclrtEvent;

/// A point of a stream. It outlives the work that waits for it: see [`Stream::retire`].
#[derive(Debug)]
pub(super) struct Event {
    raw: aclrtEvent,
    device: Device,
}

// SAFETY: the runtime lets any thread of the process use an event while the event's device is the
// thread's current one, as streams.
unsafe impl Send for Event {}
// SAFETY: the methods that take a shared reference only read the handle.
unsafe impl Sync for Event {}

impl Event {
    /// Records the end of the work currently queued on `stream`.
    #[doc(alias = "aclrtRecordEvent")]
    pub(super) fn record(stream: &Stream) -> Result<Self> {
        let device = stream.device().clone();
        device.inner.enter()?;
        let raw = result::create_event(device.inner.rt())?;
        let event = Self { raw, device };
        // SAFETY: both are live, and of the device that was entered.
        unsafe { result::record_event(event.device.inner.rt(), event.raw, stream.raw()) }?;
        Ok(event)
    }

    /// Makes all work queued later on `stream` wait for this point.
    #[doc(alias = "aclrtStreamWaitEvent")]
    pub(super) fn let_wait(&self, stream: &Stream) -> Result<()> {
        self.device.inner.enter()?;
        // SAFETY: both are live, and of the device that was entered; recorded in `record`.
        unsafe { result::wait_for_event(self.device.inner.rt(), stream.raw(), self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let inner = &self.device.inner;
        // SAFETY: the last handle; nothing queued waits for the event (`Stream::retire`).
        inner.teardown(|| unsafe { result::destroy_event(inner.rt(), self.raw) });
    }
}
