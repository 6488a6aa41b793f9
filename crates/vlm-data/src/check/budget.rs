//! A limit on the bytes that threads hold together.

use std::sync::{Condvar, Mutex, PoisonError};

/// A number of bytes, of which threads take parts and give them back.
pub(super) struct Budget {
    most: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A part, given back when it is dropped.
pub(super) struct Part<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most,
            used: Mutex::new(0),
            freed: Condvar::new(),
        }
    }

    /// Waits until the bytes are free; more than there are at all, until nothing is taken. A thread
    /// may not hold another part meanwhile.
    pub(super) fn take(&self, bytes: u64) -> Part<'_> {
        let bytes = bytes.min(self.most);
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let is_taken = |used: &mut u64| *used + bytes > self.most;
        let mut used = self
            .freed
            .wait_while(used, is_taken)
            .unwrap_or_else(PoisonError::into_inner);
        *used += bytes;
        Part {
            budget: self,
            bytes,
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        let used = self.budget.used.lock();
        *used.unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        self.budget.freed.notify_all();
    }
}
