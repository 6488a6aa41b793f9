//! Checks of many cases: side by side, and counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use super::Row;
use crate::buffer::DType;
use crate::cases::NamedCase;

/// Computes something of each item on `threads` threads and takes the results one by one in the
/// order of the items. After an error of `take`, threads end with the item that they are at.
///
/// # Errors
/// Those of `take`.
pub fn in_order<T: Sync, R: Send, E>(
    items: &[T],
    threads: usize,
    compute: impl Fn(&T) -> R + Sync,
    mut take: impl FnMut(&T, R) -> Result<(), E>,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (done, results) = channel();
        for _ in 0..threads.min(items.len()) {
            let (done, next, compute) = (done.clone(), &next, &compute);
            scope.spawn(move || {
                while let Some((index, item)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    items.get(index).map(|item| (index, item))
                } {
                    // Nobody receives after an error.
                    if done.send((index, compute(item))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(done);
        let mut early = BTreeMap::new();
        let mut waiting = items.iter().enumerate();
        let mut due = waiting.next();
        for (index, result) in results {
            early.insert(index, result);
            while let Some((index, item)) = due
                && let Some(result) = early.remove(&index)
            {
                take(item, result)?;
                due = waiting.next();
            }
        }
        Ok(())
    })
}

/// Counts of checks per pairing and axis layout.
#[derive(Clone, Debug, Default)]
pub struct CheckSummary {
    groups: Vec<CheckGroup>,
    /// Checks beyond the limits of an operator or a device.
    pub skipped: usize,
}

/// The checks of a pairing and an axis layout.
#[derive(Clone, Debug)]
pub struct CheckGroup {
    /// The pairing.
    pub pairing: String,
    /// The axis layout.
    pub axis_layout: String,
    /// Checks.
    pub checks: usize,
    /// Checks that failed.
    pub failed: usize,
    /// The largest errors in f64 and in f32. In f16 and bf16 the rounding on store hides the rest.
    pub worst: [Option<f64>; 2],
}

impl CheckSummary {
    /// Counts a row of a case.
    pub fn add(&mut self, named: &NamedCase, row: &Row) {
        if row.skipped.is_some() {
            self.skipped += 1;
            return;
        }
        let (pairing, axis_layout) = named.group();
        let known =
            |group: &CheckGroup| group.pairing == pairing && group.axis_layout == axis_layout;
        let at = self.groups.iter().position(known).unwrap_or_else(|| {
            self.groups.push(CheckGroup {
                pairing: pairing.into(),
                axis_layout: axis_layout.into(),
                checks: 0,
                failed: 0,
                worst: [None; 2],
            });
            self.groups.len() - 1
        });
        let group = &mut self.groups[at];
        group.checks += 1;
        group.failed += usize::from(!row.pass);
        for (worst, dtype) in group.worst.iter_mut().zip([DType::F64, DType::F32]) {
            if row.dtype == dtype {
                *worst = Some(worst.unwrap_or(0.0).max(row.max_error));
            }
        }
    }

    /// The groups by pairing and axis layout.
    pub fn groups(&self) -> Vec<&CheckGroup> {
        let mut groups: Vec<_> = self.groups.iter().collect();
        groups.sort_by_key(|group| (&group.pairing, &group.axis_layout));
        groups
    }

    /// The number of checks that were not skipped.
    pub fn checks(&self) -> usize {
        self.groups.iter().map(|group| group.checks).sum()
    }
}
