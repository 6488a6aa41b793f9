//! Marks in streams.

use super::device::Device;
use crate::error::Result;
use crate::result;
use crate::sys::aclrtEvent;

/// A mark in a stream that other streams and the host can wait for.
#[derive(Debug)]
pub struct Event {
    raw: aclrtEvent,
    device: Device,
}

// SAFETY: as for streams: any thread may use the handle while its device is current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    #[doc(alias = "aclrtCreateEvent")]
    pub(super) fn create(device: Device) -> Result<Self> {
        device.inner.enter()?;
        let raw = result::event::create(device.inner.rt())?;
        Ok(Self { raw, device })
    }

    pub(super) fn raw(&self) -> aclrtEvent {
        self.raw
    }

    /// Waits until the event has been passed.
    ///
    /// # Errors
    /// [`Execution`](crate::AscendError::Execution) if the work before it failed.
    #[doc(alias = "aclrtSynchronizeEvent")]
    pub fn synchronize(&self) -> Result<()> {
        self.device.inner.enter()?;
        // SAFETY: the handle lives as long as `self`.
        unsafe { result::event::synchronize(self.device.inner.rt(), self.raw) }
    }

    /// Milliseconds from `start` to this event, both passed.
    ///
    /// # Errors
    /// The runtime's.
    #[doc(alias = "aclrtEventElapsedTime")]
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32> {
        let inner = &self.device.inner;
        inner.enter()?;
        // SAFETY: both handles live as long as the borrowed values.
        unsafe { result::event::elapsed_ms(inner.rt(), inner.library(), start.raw, self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let inner = &self.device.inner;
        // SAFETY: the handle is this value's own and given up here.
        inner.teardown(|| unsafe { result::event::destroy(inner.rt(), self.raw) });
    }
}
