//! A limit on the bytes held by all threads together.

use parking_lot::{Condvar, Mutex};

/// A number of bytes from which threads take and return parts.
pub(super) struct Budget {
    most: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A part of a budget, returned when dropped.
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

    /// Waits until the bytes are free. A request above the whole budget waits until no part is
    /// taken. The calling thread must not hold another part.
    pub(super) fn take(&self, bytes: u64) -> Part<'_> {
        let bytes = bytes.min(self.most);
        let mut used = self.used.lock();
        let is_taken = |used: &mut u64| *used + bytes > self.most;
        self.freed.wait_while(&mut used, is_taken);
        *used += bytes;
        Part {
            budget: self,
            bytes,
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        *self.budget.used.lock() -= self.bytes;
        self.budget.freed.notify_all();
    }
}
