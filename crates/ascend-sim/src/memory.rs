//! Device memory: addresses, the bytes of each allocation, and who used which bytes when.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::abi::sys::{Reservation, SharedBytes};
use crate::clock::{Actor, Clock};
use crate::codes::{Failure, Outcome, RT_MEMORY_ALLOCATION, RT_PARAM_INVALID};

/// Addresses between two allocations that belong to neither.
const GUARD_BYTES: u64 = 64 * 1024;
const ALIGNMENT_BYTES: u64 = 512;
const ADDRESS_SPACE_BYTES: u64 = 1 << 40;
const FREED_REMEMBERED: usize = 4096;
const USES_REMEMBERED: usize = 64;

/// Bytes of an allocation that a task or the host touched.
#[derive(Clone, Debug)]
struct Use {
    actor: Actor,
    epoch: u64,
    start: u64,
    end: u64,
    write: bool,
    what: String,
}

/// One live allocation.
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) device: u32,
    bytes: Arc<SharedBytes>,
    uses: Vec<Use>,
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
                uses: Vec::new(),
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

    /// What is known about an address that no live allocation holds.
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

    /// Whether the address is in the range that device addresses come from.
    pub(crate) fn is_device_address(&self, address: u64) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|r| (r.start()..r.start() + r.size()).contains(&address))
    }

    /// Records a use; the earlier use with which it is not ordered, if there is one.
    pub(crate) fn touch(
        &mut self,
        address: u64,
        len: u64,
        write: bool,
        by: &Toucher<'_>,
    ) -> Option<String> {
        let allocation = self
            .live
            .range_mut(..=address)
            .next_back()
            .map(|(_, a)| a)?;
        let start = address - allocation.start;
        let end = start + len;
        let conflict = allocation
            .uses
            .iter()
            .find(|u| {
                let common = u.start < end && start < u.end && (u.write || write);
                common && u.actor != by.actor && by.clock.get(u.actor) < u.epoch
            })
            .map(|u| {
                format!(
                    "{} {} bytes [{start}, {end}) of allocation 0x{:x} while {}, on {}, may still \
                     be {} them: synchronise or wait for an event between the two",
                    by.what,
                    if write { "writes" } else { "reads" },
                    allocation.start,
                    u.what,
                    u.actor,
                    if u.write { "writing" } else { "reading" },
                )
            });
        allocation.uses.retain(|u| {
            !(u.actor == by.actor && start <= u.start && u.end <= end && (write || !u.write))
        });
        if allocation.uses.len() == USES_REMEMBERED {
            allocation.uses.remove(0);
        }
        allocation.uses.push(Use {
            actor: by.actor,
            epoch: by.epoch,
            start,
            end,
            write,
            what: by.what.to_owned(),
        });
        conflict
    }
}
