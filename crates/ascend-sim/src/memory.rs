//! Device memory: addresses, the bytes of each allocation, and who used which bytes when.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::abi::sys::{Reservation, SharedBytes};
use crate::clock::{Actor, Clock};
use crate::codes::{Failure, Outcome, RT_MEMORY_ALLOCATION, RT_PARAM_INVALID};

/// Addresses between two allocations that belong to neither.
pub(crate) const GUARD_BYTES: u64 = 64 * 1024;
const ALIGNMENT_BYTES: u64 = 512;
const ADDRESS_SPACE_BYTES: u64 = 1 << 40;
const FREED_REMEMBERED: usize = 4096;

/// A use of bytes of an allocation, up to `end`.
#[derive(Clone, Debug)]
struct Use {
    end: u64,
    epoch: u64,
    what: Arc<str>,
}

/// The last use of each byte by one actor: disjoint runs by their first byte.
#[derive(Debug, Default)]
struct Track(BTreeMap<u64, Use>);

impl Track {
    /// The runs that touch `[start, end)`.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Use)> {
        let runs = self
            .0
            .range(..end)
            .rev()
            .map(|(first, used)| (*first, used));
        runs.take_while(move |(_, used)| used.end > start)
    }

    /// Removes `[start, end)` from the runs.
    fn cut(&mut self, start: u64, end: u64) {
        let touched: Vec<u64> = self
            .overlapping(start, end)
            .map(|(first, _)| first)
            .collect();
        for first in touched {
            let Some(used) = self.0.remove(&first) else {
                continue;
            };
            if used.end > end {
                self.0.insert(end, used.clone());
            }
            if first < start {
                self.0.insert(first, Use { end: start, ..used });
            }
        }
    }
}

/// One live allocation.
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) device: u32,
    bytes: Arc<SharedBytes>,
    /// By actor, and whether it wrote.
    tracks: BTreeMap<(Actor, bool), Track>,
    /// The last work on each stream that names this memory, from when it was queued.
    queued: BTreeMap<Actor, (u64, Arc<str>)>,
}

impl Allocation {
    /// The bytes, kept alive by the caller.
    pub(crate) fn share(&self) -> Arc<SharedBytes> {
        Arc::clone(&self.bytes)
    }
}

/// Who touches memory, for the check that streams and the host are ordered.
pub(crate) struct Toucher<'a> {
    pub(crate) actor: Actor,
    pub(crate) epoch: u64,
    pub(crate) clock: &'a Clock,
    pub(crate) what: &'a str,
}

#[derive(Default)]
pub(crate) struct Memory {
    reservation: Option<Reservation>,
    cursor: u64,
    live: BTreeMap<u64, Allocation>,
    freed: VecDeque<(u64, u64)>,
    used: BTreeMap<u32, u64>,
    peak: u64,
}

impl Memory {
    pub(crate) fn live(&self) -> impl Iterator<Item = &Allocation> {
        self.live.values()
    }

    pub(crate) fn used_bytes(&self, device: u32) -> u64 {
        self.used.get(&device).copied().unwrap_or(0)
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.used.values().sum()
    }

    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak
    }

    pub(crate) fn allocate(&mut self, size: u64, device: u32, limit: u64) -> Outcome<u64> {
        let used = self.used_bytes(device);
        if size > limit.saturating_sub(used) {
            return Err(Failure::new(
                RT_MEMORY_ALLOCATION,
                format!(
                    "{size} bytes requested, {used} of {limit} bytes of device {device} are in use"
                ),
            ));
        }
        let start = self.next_address(size)?;
        let bytes = SharedBytes::new(
            usize::try_from(size).map_err(|error| Failure::new(RT_MEMORY_ALLOCATION, error))?,
        )?;
        self.live.insert(
            start,
            Allocation {
                start,
                size,
                device,
                bytes: Arc::new(bytes),
                tracks: BTreeMap::new(),
                queued: BTreeMap::new(),
            },
        );
        *self.used.entry(device).or_default() += size;
        self.peak = self.peak.max(self.live_bytes());
        Ok(start)
    }

    /// Addresses are not used again until the whole range has been handed out once, so that a stale
    /// address names nothing rather than something else.
    fn next_address(&mut self, size: u64) -> Outcome<u64> {
        if self.reservation.is_none() {
            let reservation = Reservation::new(ADDRESS_SPACE_BYTES)?;
            self.cursor = reservation.start() + GUARD_BYTES;
            self.reservation = Some(reservation);
        }
        let Some(reservation) = &self.reservation else {
            return Err(Failure::new(RT_MEMORY_ALLOCATION, "no device addresses"));
        };
        let end = reservation.start() + reservation.size();
        let step = size.next_multiple_of(ALIGNMENT_BYTES) + GUARD_BYTES;
        let align = |address: u64| address.next_multiple_of(ALIGNMENT_BYTES);
        let mut start = align(self.cursor);
        if start + step > end {
            // Second round: the first gap between live allocations that is large enough.
            start = align(reservation.start() + GUARD_BYTES);
            for allocation in self.live.values() {
                if start + step <= allocation.start {
                    break;
                }
                start = align(allocation.start + allocation.size + GUARD_BYTES);
            }
            if start + step > end {
                return Err(Failure::new(
                    RT_MEMORY_ALLOCATION,
                    "no device addresses left",
                ));
            }
        }
        self.cursor = start + step;
        Ok(start)
    }

    /// Removes the allocation that starts at `address`.
    pub(crate) fn release(&mut self, address: u64) -> Outcome<Allocation> {
        let Some(allocation) = self.live.remove(&address) else {
            return Err(Failure::new(RT_PARAM_INVALID, self.why_not(address, 0)));
        };
        if let Some(used) = self.used.get_mut(&allocation.device) {
            *used -= allocation.size;
        }
        if self.freed.len() == FREED_REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back((allocation.start, allocation.size));
        Ok(allocation)
    }

    /// The allocation that holds `[address, address + len)`.
    pub(crate) fn find(&self, address: u64, len: u64) -> Outcome<&Allocation> {
        self.live
            .range(..=address)
            .next_back()
            .map(|(_, allocation)| allocation)
            .filter(|a| address < a.start + a.size.max(1) && len <= a.start + a.size - address)
            .ok_or_else(|| Failure::new(RT_PARAM_INVALID, self.why_not(address, len)))
    }

    /// The bytes of the allocation that holds `[address, address + len)`, and the offset in it.
    pub(crate) fn share(&self, address: u64, len: u64) -> Outcome<(Arc<SharedBytes>, usize)> {
        let allocation = self.find(address, len)?;
        Ok((allocation.share(), (address - allocation.start) as usize))
    }

    /// Describes an address that no live allocation holds.
    pub(crate) fn why_not(&self, address: u64, len: u64) -> String {
        let range = format!(
            "device bytes [0x{address:x}, 0x{:x})",
            address.wrapping_add(len)
        );
        if address == 0 {
            return "the device pointer is null".to_owned();
        }
        let mut freed = self.freed.iter().rev();
        let inside =
            |(start, size): &&(u64, u64)| (*start..start + size.max(&1)).contains(&address);
        if let Some((start, size)) = freed.find(inside) {
            return format!("{range} were freed (allocation 0x{start:x} of {size} bytes)");
        }
        let before = self.live.range(..=address).next_back();
        if let Some((_, a)) = before.filter(|(_, a)| address < a.start + a.size + GUARD_BYTES) {
            return format!(
                "{range} reach outside allocation 0x{:x} of {} bytes",
                a.start, a.size
            );
        }
        if self.is_device_address(address) {
            format!("{range} belong to no allocation")
        } else {
            format!("0x{address:x} is not a device address")
        }
    }

    /// True if the address is in the range that device addresses come from.
    pub(crate) fn is_device_address(&self, address: u64) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|r| (r.start()..r.start() + r.size()).contains(&address))
    }

    /// The allocation that holds the byte at `address`.
    fn holder(&mut self, address: u64) -> Option<&mut Allocation> {
        let before = self.live.range_mut(..=address).next_back();
        before
            .map(|(_, allocation)| allocation)
            .filter(|a| address < a.start + a.size.max(1))
    }

    /// Notes that work just queued names memory, which then has to stay until the work is done.
    pub(crate) fn reserve(&mut self, address: u64, actor: Actor, epoch: u64, what: &Arc<str>) {
        if let Some(allocation) = self.holder(address) {
            allocation.queued.insert(actor, (epoch, Arc::clone(what)));
        }
    }

    /// Work that names the allocation at `address` and that `known` does not show to be done.
    pub(crate) fn pending(&mut self, address: u64, known: &Clock) -> Option<(Actor, Arc<str>)> {
        let mut queued = self.holder(address)?.queued.iter();
        let (actor, (_, what)) = queued.find(|(actor, (epoch, _))| known.get(**actor) < *epoch)?;
        Some((*actor, Arc::clone(what)))
    }

    /// Records a use; the earlier use with which it is not ordered, if there is one.
    pub(crate) fn touch(
        &mut self,
        address: u64,
        len: u64,
        write: bool,
        by: &Toucher<'_>,
    ) -> Option<String> {
        let allocation = self.holder(address)?;
        let start = address - allocation.start;
        let end = start + len;
        if start == end {
            return None;
        }
        let others = allocation.tracks.iter();
        let others = others.filter(|((actor, wrote), _)| *actor != by.actor && (*wrote || write));
        let mut unordered = others.filter_map(|((actor, wrote), track)| {
            let known = by.clock.get(*actor);
            let (_, used) = track
                .overlapping(start, end)
                .find(|(_, used)| known < used.epoch)?;
            Some(format!(
                "{} {} bytes [{start}, {end}) of allocation 0x{:x} while {}, on {actor}, may still \
                 be {} them: synchronise or wait for an event between the two",
                by.what,
                if write { "writes" } else { "reads" },
                allocation.start,
                used.what,
                if *wrote { "writing" } else { "reading" },
            ))
        });
        let conflict = unordered.next();
        // Uses ordered after this one are ordered after the actor's earlier ones.
        for covered in [false, true].into_iter().filter(|wrote| write || !wrote) {
            let track = allocation.tracks.get_mut(&(by.actor, covered));
            if let Some(track) = track {
                track.cut(start, end);
            }
        }
        let what = Arc::from(by.what);
        let epoch = by.epoch;
        let own = allocation.tracks.entry((by.actor, write)).or_default();
        own.0.insert(start, Use { end, epoch, what });
        conflict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte by byte, by definition.
    #[test]
    fn a_track_keeps_the_last_use_of_every_byte() {
        let mut track = Track::default();
        let mut bytes = [0_u64; 64];
        let mut state = 1_u64;
        for epoch in 1..200 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let start = state >> 33 & 63;
            let end = (start + 1 + (state >> 40 & 15)).min(64);
            let what = Arc::from("");
            track.cut(start, end);
            if epoch % 3 != 0 {
                track.0.insert(start, Use { end, epoch, what });
            }
            let value = if epoch % 3 == 0 { 0 } else { epoch };
            bytes[start as usize..end as usize].fill(value);
            for (byte, expected) in bytes.iter().enumerate() {
                let byte = byte as u64;
                let found = track.overlapping(byte, byte + 1).next();
                assert_eq!(
                    found.map_or(0, |(_, used)| used.epoch),
                    *expected,
                    "byte {byte}"
                );
            }
        }
    }
}
