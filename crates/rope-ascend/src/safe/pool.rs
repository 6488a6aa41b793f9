//! Device memory: segments, the blocks in them, and accounting.
//!
//! The runtime allocates pages of 2 MiB, slowly. The pool therefore requests segments and cuts
//! blocks from them: small ones from segments of 2 MiB, larger ones from segments of 64 MiB, and
//! each of the largest from a separate segment. A block is cut from the first hole that fits it, in
//! the order of the segments' allocation, so that later segments become empty; a freed block joins
//! the holes beside it. Frameworks do much the same (`NPUCachingAllocator` of Ascend/pytorch at
//! 9e73e708ab93), with large segments of 20 MiB: these fit no more than four tensors of 4 MiB,
//! because of the bytes after each.
//!
//! Lengths that change from step to step leave segments that no later step fills. The pool
//! therefore does not grow beyond its peak while whole segments are free: see
//! [`Pool::should_shrink`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::loader::Pooling;

/// The crate's use of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Requested by live buffers.
    pub live_bytes: usize,
    /// Largest `live_bytes` since the start or the last reset.
    pub peak_bytes: usize,
    /// Allocated from the runtime: live buffers, rounded up, and cached memory.
    pub reserved_bytes: usize,
    /// Largest `reserved_bytes` since the start or the last reset.
    pub peak_reserved_bytes: usize,
    /// Bytes cached for reuse.
    pub cached_bytes: usize,
    /// Largest cached piece; a larger buffer increases `reserved_bytes`.
    pub largest_cached_bytes: usize,
    /// Used internally by communicators, in addition to `reserved_bytes`.
    pub communicator_bytes: usize,
}

/// Counters of one device, shared by its streams.
#[derive(Debug, Default)]
pub(super) struct Counters {
    live: AtomicUsize,
    peak: AtomicUsize,
    reserved: AtomicUsize,
    peak_reserved: AtomicUsize,
    cached: AtomicUsize,
    communicators: AtomicUsize,
}

impl Counters {
    /// All but the largest cached piece, which the pools know.
    pub(super) fn read(&self) -> MemoryUse {
        MemoryUse {
            live_bytes: self.live.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
            reserved_bytes: self.reserved.load(Ordering::Relaxed),
            peak_reserved_bytes: self.peak_reserved.load(Ordering::Relaxed),
            cached_bytes: self.cached.load(Ordering::Relaxed),
            largest_cached_bytes: 0,
            communicator_bytes: self.communicators.load(Ordering::Relaxed),
        }
    }

    pub(super) fn reset_peak(&self) {
        let now = |peak: &AtomicUsize, value: &AtomicUsize| {
            peak.store(value.load(Ordering::Relaxed), Ordering::Relaxed);
        };
        now(&self.peak, &self.live);
        now(&self.peak_reserved, &self.reserved);
    }

    pub(super) fn buffer_made(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    pub(super) fn buffer_dropped(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn communicator_made(&self, bytes: usize) {
        self.communicators.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn communicator_dropped(&self, bytes: usize) {
        self.communicators.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn segment_made(&self, bytes: usize) {
        let reserved = self.reserved.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_reserved.fetch_max(reserved, Ordering::Relaxed);
        self.cached.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn segment_freed(&self, bytes: usize) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A block of device memory, cut from a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) pointer: *mut c_void,
    segment: u64,
    offset: usize,
    bytes: usize,
}

// SAFETY: the pointer is a device address, an integer to the host.
unsafe impl Send for Block {}
// SAFETY: the pointer is a device address, an integer to the host.
unsafe impl Sync for Block {}

/// Memory allocated from the runtime.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) pointer: *mut c_void,
    pub(super) bytes: usize,
    kind: Kind,
    /// Bytes of each hole, by its offset. Holes do not touch each other.
    holes: BTreeMap<usize, usize>,
    /// Bytes of the largest hole.
    largest: usize,
}

// SAFETY: the pointer is a device address, an integer to the host.
unsafe impl Send for Segment {}

impl Segment {
    fn is_whole(&self) -> bool {
        self.largest == self.bytes
    }

    fn measure(&mut self) {
        self.largest = self.holes.values().copied().max().unwrap_or(0);
    }
}

const MIB: usize = 1 << 20;
/// Offsets of blocks in their segment are multiples of this. The runtime asks for 64 (its
/// documentation of aclrtMallocAlign32), and frameworks use 512.
const GRANULE: usize = 512;
/// Unused bytes after each block: operators of Atlas A2 and A3 may access this number of bytes
/// beyond the end of a tensor (the same documentation).
const PADDING: usize = 32;
/// A huge page; segments consist of these.
const PAGE: usize = 2 * MIB;
/// Largest block of a small segment.
const SMALL: usize = MIB;
/// A segment for many large blocks.
const LARGE_SEGMENT: usize = 64 * MIB;
/// From this size on, a block gets a separate segment.
const OWN_SEGMENT: usize = 32 * MIB;
/// Largest buffer: the address space, with room to round up.
const LARGEST: usize = isize::MAX as usize - PAGE;

/// The kind of blocks in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Small,
    Large,
}

impl Kind {
    fn of(block_bytes: usize) -> Self {
        if block_bytes <= SMALL {
            Self::Small
        } else {
            Self::Large
        }
    }

    /// The smallest remainder of a hole that is kept as a hole.
    fn least_hole(self) -> usize {
        match self {
            Self::Small => GRANULE,
            Self::Large => 64 << 10,
        }
    }
}

impl Pooling {
    /// Size of the block for a buffer of `bytes`; none if there can be no such buffer.
    fn block_bytes(self, bytes: usize) -> Option<usize> {
        let bytes = Some(bytes.max(1)).filter(|bytes| *bytes <= LARGEST)?;
        Some(match self {
            Self::Segments => (bytes + PADDING).next_multiple_of(GRANULE),
            // The runtime's own padding is used.
            Self::Blocks => bytes,
        })
    }
}

/// The memory of one stream, with freed blocks available for reuse.
///
/// The pool belongs to one stream: reuse is ordered after the work that used the block before.
#[derive(Debug, Default)]
pub(super) struct Pool {
    pooling: Pooling,
    /// By age.
    segments: BTreeMap<u64, Segment>,
    /// Size and key of the segments that are one hole.
    whole: BTreeSet<(usize, u64)>,
    next: u64,
}

impl Pool {
    pub(super) fn new(pooling: Pooling) -> Self {
        Self {
            pooling,
            ..Self::default()
        }
    }

    /// Sizes of the segment to request if no hole holds `bytes`: the size that serves later blocks
    /// too, and the smallest. `None` if such a buffer is impossible.
    pub(super) fn segment_bytes(&self, bytes: usize) -> Option<[usize; 2]> {
        let block = self.pooling.block_bytes(bytes)?;
        if self.pooling == Pooling::Blocks {
            return Some([block; 2]);
        }
        let least = block.next_multiple_of(PAGE);
        let shared = Kind::of(block) == Kind::Large && block < OWN_SEGMENT;
        Some([if shared { LARGE_SEGMENT } else { least }, least])
    }

    /// True if a segment of `bytes` is better requested after [`take_whole`](Self::take_whole): it
    /// would raise the device's reserved memory to a new peak, and enough whole segments are free
    /// to justify the wait.
    pub(super) fn should_shrink(&self, bytes: usize, counters: &Counters) -> bool {
        let memory = counters.read();
        let free: usize = self.whole.iter().map(|(bytes, _)| bytes).sum();
        self.pooling == Pooling::Segments
            && memory.reserved_bytes + bytes > memory.peak_reserved_bytes
            && free > memory.reserved_bytes / 50
    }

    /// A block for `bytes`, if a hole holds it.
    pub(super) fn take(&mut self, bytes: usize, counters: &Counters) -> Option<Block> {
        let block = self.pooling.block_bytes(bytes)?;
        let segment = match self.pooling {
            Pooling::Segments => {
                let kind = Kind::of(block);
                let mut segments = self.segments.iter();
                segments
                    .find(|(_, segment)| segment.kind == kind && segment.largest >= block)
                    .map(|(key, _)| *key)
            }
            // At most an eighth of it is wasted.
            Pooling::Blocks => {
                let fitting = (block, 0)..=(block + block / 7, u64::MAX);
                self.whole.range(fitting).next().map(|(_, key)| *key)
            }
        };
        self.cut(segment?, block, counters)
    }

    /// Adds a segment from the runtime and takes a block for `bytes` from it.
    pub(super) fn grow(
        &mut self,
        pointer: *mut c_void,
        segment_bytes: usize,
        bytes: usize,
        counters: &Counters,
    ) -> Option<Block> {
        let block = self.pooling.block_bytes(bytes)?;
        counters.segment_made(segment_bytes);
        let key = self.next;
        self.next += 1;
        self.add(
            key,
            Segment {
                pointer,
                bytes: segment_bytes,
                kind: Kind::of(block),
                holes: BTreeMap::from([(0, segment_bytes)]),
                largest: segment_bytes,
            },
        );
        self.cut(key, block, counters)
    }

    fn add(&mut self, key: u64, segment: Segment) {
        self.whole.insert((segment.bytes, key));
        self.segments.insert(key, segment);
    }

    /// The block from the segment's first hole that holds it.
    fn cut(&mut self, key: u64, block: usize, counters: &Counters) -> Option<Block> {
        let segment = self.segments.get_mut(&key)?;
        let mut holes = segment.holes.iter();
        let (&offset, &hole) = holes.find(|(_, hole)| **hole >= block)?;
        if segment.is_whole() {
            self.whole.remove(&(segment.bytes, key));
        }
        segment.holes.remove(&offset);
        let rest = hole - block;
        let divided = self.pooling == Pooling::Segments && rest >= segment.kind.least_hole();
        let bytes = if divided {
            segment.holes.insert(offset + block, rest);
            block
        } else {
            hole
        };
        segment.measure();
        counters.cached.fetch_sub(bytes, Ordering::Relaxed);
        Some(Block {
            pointer: segment.pointer.wrapping_byte_add(offset),
            segment: key,
            offset,
            bytes,
        })
    }

    /// Takes a block back.
    pub(super) fn put(&mut self, block: Block, counters: &Counters) {
        counters.cached.fetch_add(block.bytes, Ordering::Relaxed);
        let key = block.segment;
        let Some(segment) = self.segments.get_mut(&key) else {
            unreachable!("a segment with a block in use is kept");
        };
        let (mut offset, mut bytes) = (block.offset, block.bytes);
        if let Some(after) = segment.holes.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((&start, &before)) = segment.holes.range(..offset).next_back()
            && start + before == offset
        {
            (offset, bytes) = (start, before + bytes);
        }
        segment.holes.insert(offset, bytes);
        segment.measure();
        if segment.is_whole() {
            self.whole.insert((segment.bytes, key));
        }
    }

    /// Takes out every segment that is one hole, to be freed.
    pub(super) fn take_whole(&mut self, counters: &Counters) -> Vec<(u64, Segment)> {
        let keys = std::mem::take(&mut self.whole);
        let taken = |(_, key)| self.segments.remove(&key).map(|segment| (key, segment));
        let segments: Vec<_> = keys.into_iter().filter_map(taken).collect();
        for (_, segment) in &segments {
            counters.cached.fetch_sub(segment.bytes, Ordering::Relaxed);
        }
        segments
    }

    /// Puts segments back that [`take_whole`](Self::take_whole) took out.
    pub(super) fn restore(&mut self, segments: Vec<(u64, Segment)>, counters: &Counters) {
        for (key, segment) in segments {
            counters.cached.fetch_add(segment.bytes, Ordering::Relaxed);
            self.add(key, segment);
        }
    }

    /// Bytes of the largest hole.
    pub(super) fn largest(&self) -> usize {
        let largest = self.segments.values().map(|segment| segment.largest);
        largest.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool over made-up addresses.
    #[derive(Default)]
    struct Device {
        pool: Pool,
        counters: Counters,
        next: usize,
    }

    impl Device {
        fn new(pooling: Pooling) -> Self {
            Self {
                pool: Pool::new(pooling),
                next: 1 << 30,
                ..Self::default()
            }
        }

        fn take(&mut self, bytes: usize) -> Block {
            if let Some(block) = self.pool.take(bytes, &self.counters) {
                return block;
            }
            let [segment, _] = self.pool.segment_bytes(bytes).unwrap();
            let pointer = std::ptr::without_provenance_mut(self.next);
            // Segments lie side by side: blocks must not join across them.
            self.next += segment;
            self.pool
                .grow(pointer, segment, bytes, &self.counters)
                .unwrap()
        }

        fn put(&mut self, block: Block) {
            self.pool.put(block, &self.counters);
        }

        fn reserved(&self) -> usize {
            self.counters.read().reserved_bytes
        }
    }

    #[test]
    fn segments_fit_their_blocks() {
        let pool = Pool::new(Pooling::Segments);
        let segment = |bytes| pool.segment_bytes(bytes).unwrap();
        assert_eq!(segment(0), [2 * MIB; 2]);
        assert_eq!(segment(MIB - PADDING), [2 * MIB; 2]);
        assert_eq!(segment(MIB), [64 * MIB, 2 * MIB]);
        assert_eq!(segment(2 * MIB), [64 * MIB, 4 * MIB]);
        assert_eq!(segment(32 * MIB), [34 * MIB; 2]);
        assert_eq!(pool.segment_bytes(usize::MAX), None);
        let blocks = Pool::new(Pooling::Blocks);
        assert_eq!(blocks.segment_bytes(33), Some([33; 2]));
    }

    #[test]
    fn blocks_never_overlap_and_holes_join() {
        let mut device = Device::new(Pooling::Segments);
        let mut live: Vec<(Block, usize)> = Vec::new();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % n as u64) as usize
        };
        let mut held = BTreeMap::new();
        for _ in 0..20_000 {
            if live.len() < 40 || random(2) == 0 && live.len() < 200 {
                let scale = 5 + random(22);
                let bytes = 1 + random(1 << scale);
                let block = device.take(bytes);
                let start = block.pointer.addr();
                assert_eq!(start % GRANULE, 0);
                assert!(block.bytes >= bytes + PADDING);
                let before = held.range(..start + block.bytes).next_back();
                assert!(before.is_none_or(|(start_before, bytes)| start_before + bytes <= start));
                held.insert(start, block.bytes);
                live.push((block, bytes));
            } else {
                let (block, _) = live.swap_remove(random(live.len()));
                held.remove(&block.pointer.addr());
                device.put(block);
            }
            let in_use: usize = held.values().sum();
            let memory = device.counters.read();
            assert_eq!(memory.reserved_bytes, in_use + memory.cached_bytes);
        }
        let all = device.pool.segments.len();
        assert!(all > 10, "{all}");
        for (block, _) in live.drain(..) {
            device.put(block);
        }
        let segments = device.pool.take_whole(&device.counters);
        assert_eq!(segments.len(), all);
        let bytes: usize = segments.iter().map(|(_, segment)| segment.bytes).sum();
        assert_eq!(
            (bytes, device.counters.read().cached_bytes),
            (device.reserved(), 0)
        );
    }

    #[test]
    fn a_segment_with_a_block_in_use_is_not_taken_out() {
        let mut device = Device::new(Pooling::Segments);
        let first = device.take(40 * MIB);
        let second = device.take(48 * MIB);
        device.put(first);
        let taken = device.pool.take_whole(&device.counters);
        assert_eq!(taken.len(), 1);
        // Meanwhile it cannot be handed out.
        let other = device.take(40 * MIB);
        assert_ne!(other.pointer, first.pointer);
        device.pool.restore(taken, &device.counters);
        assert_eq!(device.take(40 * MIB).pointer, first.pointer);
        assert!(device.pool.take_whole(&device.counters).is_empty());
        device.put(second);
        assert_eq!(device.pool.take_whole(&device.counters).len(), 1);
    }

    #[test]
    fn memory_shrinks_before_it_reaches_a_new_peak() {
        let mut device = Device::new(Pooling::Segments);
        let block = device.take(40 * MIB);
        assert!(!device.pool.should_shrink(PAGE, &device.counters));
        device.put(block);
        assert!(device.pool.should_shrink(PAGE, &device.counters));
        for (_, segment) in device.pool.take_whole(&device.counters) {
            device.counters.segment_freed(segment.bytes);
        }
        // Below the peak there is no need to wait.
        let block = device.take(2 * MIB);
        device.put(block);
        assert_eq!(device.reserved(), 64 * MIB);
        assert_eq!(device.counters.read().peak_reserved_bytes, 64 * MIB);
        assert!(!device.pool.should_shrink(0, &device.counters));
    }

    #[test]
    fn a_block_of_its_own_serves_sizes_just_below_it_only() {
        let mut device = Device::new(Pooling::Blocks);
        let block = device.take(4096);
        device.put(block);
        assert_eq!(device.counters.read().cached_bytes, 4096);
        for bytes in [512, 4097] {
            assert!(device.pool.take(bytes, &device.counters).is_none());
        }
        assert_eq!(device.take(3584).pointer, block.pointer);
        assert_eq!(device.counters.read().cached_bytes, 0);
        assert_eq!(device.reserved(), 4096);
    }
}
