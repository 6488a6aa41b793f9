//! An output that tasks on several threads write together.

use std::marker::PhantomData;
use std::ops::Range;

/// Rows of an output, of which tasks write columns.
pub(crate) struct Target<'a, E> {
    start: *mut E,
    rows: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [E]>,
}

#[allow(unsafe_code, reason = "tasks write columns of the same rows")]
// SAFETY: it is the only way to the elements while it lives, and `part` demands that no two tasks
// have the same.
unsafe impl<E: Send> Sync for Target<'_, E> {}

impl<'a, E> Target<'a, E> {
    pub(crate) fn new(out: &'a mut [E], columns: usize) -> Self {
        Self {
            rows: out.len() / columns,
            columns,
            start: out.as_mut_ptr(),
            borrowed: PhantomData,
        }
    }

    /// Some columns of a row.
    ///
    /// # Safety
    /// The row and the columns must exist, and no other part with one of these elements be in use.
    #[allow(unsafe_code, reason = "tasks write columns of the same rows")]
    #[allow(clippy::mut_from_ref, reason = "the parts are disjoint")]
    pub(crate) unsafe fn part(&self, row: usize, columns: Range<usize>) -> &mut [E] {
        debug_assert!(row < self.rows && columns.end <= self.columns);
        // SAFETY: the elements are within the borrowed rows, and nothing else refers to them, as
        // the caller ensures.
        unsafe {
            let first = self.start.add(row * self.columns + columns.start);
            std::slice::from_raw_parts_mut(first, columns.len())
        }
    }
}
