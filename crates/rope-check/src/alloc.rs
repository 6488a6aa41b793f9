//! A counting allocator: exact bytes of the whole process, to be installed as the global allocator
//! of a program or a test that measures memory.

#![allow(
    unsafe_code,
    reason = "GlobalAlloc is an unsafe trait; each call is passed on to the system's allocator"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize};

/// Passes every call on to the system's allocator and, while something is measured, counts.
/// Otherwise it costs one load and one branch a call, so a program can carry it always.
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
    measuring: AtomicBool,
    /// True if it counts one thread alone.
    one_thread: AtomicBool,
    all: Class,
    data: Class,
    large: Class,
}

thread_local! {
    /// True if this thread is the one that is counted. It has no destructor and takes no memory, so
    /// that an allocator may read it.
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Allocations from some size up.
#[derive(Debug)]
struct Class {
    threshold: AtomicUsize,
    allocations: AtomicUsize,
    live: AtomicIsize,
    peak: AtomicIsize,
}

/// Allocations and live bytes while a closure ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The most bytes live at one time, beyond those that were live before.
    pub peak_bytes: usize,
    /// Bytes live afterwards, less those live before.
    pub retained_bytes: isize,
    /// Of these, in allocations of at least the size that was called data.
    pub retained_data_bytes: isize,
    /// Allocations.
    pub allocations: usize,
    /// Allocations of at least the size that was called large.
    pub large_allocations: usize,
    /// The most bytes of these live at one time, beyond those that were live before.
    pub large_peak_bytes: usize,
}

impl Class {
    const fn new() -> Self {
        Self {
            threshold: AtomicUsize::new(usize::MAX),
            allocations: AtomicUsize::new(0),
            live: AtomicIsize::new(0),
            peak: AtomicIsize::new(0),
        }
    }

    fn reset(&self, threshold: usize) {
        self.threshold.store(threshold, Relaxed);
        self.allocations.store(0, Relaxed);
        self.live.store(0, Relaxed);
        self.peak.store(0, Relaxed);
    }

    fn allocated(&self, bytes: usize) {
        if bytes >= self.threshold.load(Relaxed) {
            self.allocations.fetch_add(1, Relaxed);
            let added = bytes.cast_signed();
            let live = self.live.fetch_add(added, Relaxed) + added;
            self.peak.fetch_max(live, Relaxed);
        }
    }

    fn freed(&self, bytes: usize) {
        if bytes >= self.threshold.load(Relaxed) {
            self.live.fetch_sub(bytes.cast_signed(), Relaxed);
        }
    }

    fn peak_bytes(&self) -> usize {
        self.peak.load(Relaxed).max(0).cast_unsigned()
    }
}

impl CountingAllocator {
    /// Nothing measured yet.
    pub const fn new() -> Self {
        Self {
            measuring: AtomicBool::new(false),
            one_thread: AtomicBool::new(false),
            all: Class::new(),
            data: Class::new(),
            large: Class::new(),
        }
    }

    /// Runs `work` and counts what all threads of the process allocate meanwhile; allocations of
    /// `large_bytes` and more are counted apart, and are called data. One measurement at a time.
    pub fn measure<T>(&self, large_bytes: usize, work: impl FnOnce() -> T) -> (T, Usage) {
        self.measure_classes(large_bytes, large_bytes, work)
    }

    /// As [`measure`](Self::measure), with a size of its own from which allocations are data.
    pub fn measure_classes<T>(
        &self,
        data_bytes: usize,
        large_bytes: usize,
        work: impl FnOnce() -> T,
    ) -> (T, Usage) {
        self.reset(data_bytes, large_bytes);
        let stop = Measuring::start(self);
        let result = work();
        drop(stop);
        (result, self.usage())
    }

    /// Counts from now on what the calling thread allocates, and it alone, until
    /// [`stop`](Self::stop). What it frees counts whichever thread allocated it.
    pub fn start_thread(&self) {
        self.reset(1, 1);
        IS_COUNTED.set(true);
        self.one_thread.store(true, SeqCst);
        self.measuring.store(true, SeqCst);
    }

    /// Ends the count that [`start_thread`](Self::start_thread) began, in the same thread.
    pub fn stop(&self) -> Usage {
        self.measuring.store(false, SeqCst);
        self.one_thread.store(false, SeqCst);
        IS_COUNTED.set(false);
        self.usage()
    }

    fn reset(&self, data_bytes: usize, large_bytes: usize) {
        self.all.reset(0);
        self.data.reset(data_bytes);
        self.large.reset(large_bytes);
    }

    fn usage(&self) -> Usage {
        Usage {
            peak_bytes: self.all.peak_bytes(),
            retained_bytes: self.all.live.load(Relaxed),
            retained_data_bytes: self.data.live.load(Relaxed),
            allocations: self.all.allocations.load(Relaxed),
            large_allocations: self.large.allocations.load(Relaxed),
            large_peak_bytes: self.large.peak_bytes(),
        }
    }

    fn classes(&self) -> impl Iterator<Item = &Class> {
        let is_measuring = self.measuring.load(Relaxed)
            && (!self.one_thread.load(Relaxed) || IS_COUNTED.try_with(Cell::get).unwrap_or(false));
        let classes = [&self.all, &self.data, &self.large];
        classes.into_iter().filter(move |_| is_measuring)
    }

    fn allocated(&self, bytes: usize) {
        self.classes().for_each(|class| class.allocated(bytes));
    }

    fn freed(&self, bytes: usize) {
        self.classes().for_each(|class| class.freed(bytes));
    }
}

/// Ends the measurement, also where the work panics.
struct Measuring<'a>(&'a CountingAllocator);

impl<'a> Measuring<'a> {
    fn start(allocator: &'a CountingAllocator) -> Self {
        allocator.measuring.store(true, SeqCst);
        Self(allocator)
    }
}

impl Drop for Measuring<'_> {
    fn drop(&mut self) {
        self.0.measuring.store(false, SeqCst);
    }
}

impl Default for CountingAllocator {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: every method passes its arguments unchanged to `System`, whose contract is this trait's;
// counting touches atomics alone and does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocated(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.allocated(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.freed(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.allocated(new_size);
        self.freed(layout.size());
        // SAFETY: the caller's obligations are System's.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
