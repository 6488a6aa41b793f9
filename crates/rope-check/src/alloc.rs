//! A counting allocator: exact bytes of the whole process, to be installed as the global allocator of a program or a
//! test that measures memory.

#![allow(
    unsafe_code,
    reason = "GlobalAlloc is an unsafe trait; each call is passed on to the system's allocator"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Passes every call on to the system's allocator and counts.
///
/// ```
/// use rope_check::alloc::{CountingAllocator, Usage};
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator::new();
/// let (values, usage) = ALLOCATOR.measure(1000, || vec![0u8; 4096]);
/// assert_eq!(usage.peak_bytes, 4096);
/// assert_eq!(usage.large_allocations, 1);
/// # drop(values);
/// ```
#[derive(Debug)]
pub struct CountingAllocator {
    live: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
    large: AtomicUsize,
    large_threshold: AtomicUsize,
}

/// What happened while something ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The most bytes live at one time, beyond those that were live before.
    pub peak_bytes: usize,
    /// Bytes live afterwards, less those live before.
    pub retained_bytes: isize,
    /// Allocations.
    pub allocations: usize,
    /// Allocations of at least the size that was called large.
    pub large_allocations: usize,
}

impl CountingAllocator {
    /// Counts from zero.
    pub const fn new() -> Self {
        Self {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            allocations: AtomicUsize::new(0),
            large: AtomicUsize::new(0),
            large_threshold: AtomicUsize::new(usize::MAX),
        }
    }

    /// Runs `work` and counts what all threads of the process allocate meanwhile; allocations of `large_bytes` and more
    /// are counted apart. One measurement at a time.
    pub fn measure<T>(&self, large_bytes: usize, work: impl FnOnce() -> T) -> (T, Usage) {
        let before = self.live.load(Relaxed);
        self.peak.store(before, Relaxed);
        self.allocations.store(0, Relaxed);
        self.large.store(0, Relaxed);
        self.large_threshold.store(large_bytes, Relaxed);
        let result = work();
        let usage = Usage {
            peak_bytes: self.peak.load(Relaxed).saturating_sub(before),
            retained_bytes: self.live.load(Relaxed).wrapping_sub(before).cast_signed(),
            allocations: self.allocations.load(Relaxed),
            large_allocations: self.large.load(Relaxed),
        };
        (result, usage)
    }

    fn count(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
        self.allocations.fetch_add(1, Relaxed);
        if bytes >= self.large_threshold.load(Relaxed) {
            self.large.fetch_add(1, Relaxed);
        }
    }
}

impl Default for CountingAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: every method passes its arguments unchanged to `System`, whose contract is this trait's; counting touches
// atomics alone and does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's obligations are System's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.count(new_size);
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's obligations are System's.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
