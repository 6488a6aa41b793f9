//! Pinned host memory between the host's data and queued copies to the device.

use super::pinned::PinnedBuffer;

/// The limit on bytes in queued copies; beyond it, an upload waits for the stream.
const LIMIT_BYTES: usize = 64 << 20;

/// Smallest block.
const SMALLEST_BYTES: usize = 4 << 10;

/// The staging memory of one stream.
#[derive(Debug, Default)]
pub(super) struct Staging {
    in_flight: Vec<PinnedBuffer>,
    in_flight_bytes: usize,
    free: Vec<PinnedBuffer>,
}

impl Staging {
    /// Most bytes of one copy.
    pub(super) const PIECE_BYTES: usize = LIMIT_BYTES / 4;

    /// Size of the block for `bytes` of a piece.
    pub(super) fn block_bytes(bytes: usize) -> usize {
        bytes.next_power_of_two().max(SMALLEST_BYTES)
    }

    /// True if the stream must be waited for before more is queued.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight_bytes >= LIMIT_BYTES
    }

    /// A free block of this size.
    pub(super) fn take(&mut self, bytes: usize) -> Option<PinnedBuffer> {
        let index = self.free.iter().position(|block| block.len() == bytes)?;
        Some(self.free.swap_remove(index))
    }

    /// Holds a block until the stream has been waited for.
    pub(super) fn queued(&mut self, block: PinnedBuffer) {
        self.in_flight_bytes += block.len();
        self.in_flight.push(block);
    }

    /// Releases the free blocks.
    pub(super) fn free(&mut self) -> Vec<PinnedBuffer> {
        std::mem::take(&mut self.free)
    }

    /// The stream has passed all copies: their blocks are free again.
    pub(super) fn passed(&mut self) {
        self.free.append(&mut self.in_flight);
        self.in_flight_bytes = 0;
    }
}
