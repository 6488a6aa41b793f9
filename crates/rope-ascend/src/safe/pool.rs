//! Device memory: caching and accounting.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What the crate uses of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Asked for by live buffers.
    pub live_bytes: usize,
    /// Largest `live_bytes` since the start or the last reset.
    pub peak_bytes: usize,
    /// Held from the runtime: live buffers, rounded up, and cached blocks.
    pub reserved_bytes: usize,
    /// Cached for reuse.
    pub cached_bytes: usize,
}

/// Counters of one device, shared by its streams.
#[derive(Debug, Default)]
pub(super) struct Counters {
    live: AtomicUsize,
    peak: AtomicUsize,
    reserved: AtomicUsize,
    cached: AtomicUsize,
}

impl Counters {
    pub(super) fn read(&self) -> MemoryUse {
        MemoryUse {
            live_bytes: self.live.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
            reserved_bytes: self.reserved.load(Ordering::Relaxed),
            cached_bytes: self.cached.load(Ordering::Relaxed),
        }
    }

    pub(super) fn reset_peak(&self) {
        self.peak
            .store(self.live.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn buffer_made(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    pub(super) fn buffer_dropped(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn block_made(&self, bytes: usize) {
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn block_freed(&self, bytes: usize) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A block of device memory: its address and its size as allocated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) pointer: *mut c_void,
    pub(super) bytes: usize,
}

// SAFETY: the pointer is a device address, an integer to the host.
unsafe impl Send for Block {}
// SAFETY: the pointer is a device address, an integer to the host.
unsafe impl Sync for Block {}

/// Blocks that a stream has finished allocating and may hand out again.
///
/// The cache belongs to one stream: reuse is ordered after the work that used the block before.
#[derive(Debug, Default)]
pub(super) struct Cache {
    free: BTreeMap<usize, Vec<Block>>,
}

/// Allocation granularity: the runtime aligns to 512 bytes; above 1 MiB, coarser steps make
/// blocks of slightly different sizes exchangeable.
pub(super) fn rounded(bytes: usize) -> usize {
    const SMALL: usize = 512;
    const LARGE: usize = 1 << 20;
    let step = if bytes <= LARGE { SMALL } else { LARGE };
    bytes.max(1).next_multiple_of(step)
}

impl Cache {
    /// The smallest cached block that holds `bytes` and wastes at most an eighth of itself.
    pub(super) fn take(&mut self, bytes: usize, counters: &Counters) -> Option<Block> {
        let size = *self.free.range(bytes..=bytes + bytes / 7).next()?.0;
        let blocks = self.free.get_mut(&size)?;
        let block = blocks.pop()?;
        if blocks.is_empty() {
            self.free.remove(&size);
        }
        counters.cached.fetch_sub(block.bytes, Ordering::Relaxed);
        Some(block)
    }

    pub(super) fn put(&mut self, block: Block, counters: &Counters) {
        counters.cached.fetch_add(block.bytes, Ordering::Relaxed);
        self.free.entry(block.bytes).or_default().push(block);
    }

    /// Takes every block out, to be freed.
    pub(super) fn drain(&mut self, counters: &Counters) -> Vec<Block> {
        let blocks: Vec<Block> = std::mem::take(&mut self.free)
            .into_values()
            .flatten()
            .collect();
        for block in &blocks {
            counters.cached.fetch_sub(block.bytes, Ordering::Relaxed);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_the_step() {
        assert_eq!(rounded(0), 512);
        assert_eq!(rounded(512), 512);
        assert_eq!(rounded(513), 1024);
        assert_eq!(rounded((1 << 20) + 1), 2 << 20);
    }

    #[test]
    fn a_cached_block_serves_sizes_just_below_it_only() {
        let counters = Counters::default();
        let mut cache = Cache::default();
        let block = Block {
            pointer: std::ptr::null_mut(),
            bytes: 8 * 512,
        };
        counters.block_made(block.bytes);
        cache.put(block, &counters);
        assert_eq!(counters.read().cached_bytes, 8 * 512);
        assert!(cache.take(512, &counters).is_none());
        assert!(cache.take(9 * 512, &counters).is_none());
        assert!(cache.take(7 * 512, &counters).is_some());
        assert_eq!(
            counters.read(),
            MemoryUse {
                reserved_bytes: 8 * 512,
                ..MemoryUse::default()
            }
        );
        cache.put(block, &counters);
        assert_eq!(cache.drain(&counters).len(), 1);
        // Out of the cache, but not yet freed.
        assert_eq!(counters.read().reserved_bytes, 8 * 512);
        counters.block_freed(block.bytes);
        assert_eq!(counters.read(), MemoryUse::default());
    }
}
