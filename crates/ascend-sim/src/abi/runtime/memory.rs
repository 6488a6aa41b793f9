//! Device memory, page-locked host memory, copies and fills.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use super::{handle, invalid, pointer, put};
use crate::abi::export::export;
use crate::abi::sys::{Engine, HostBlock, read_host, write_host};
use crate::clock::Actor;
use crate::codes::*;
use crate::state::{HostAllocation, Sim, Source, sim};
use crate::stream::{Work, engine};
use crate::trace::Violation;

/// The kinds of a copy, by number: whether the source and the destination are on the device.
const KINDS: [(&str, bool, bool); 4] = [
    ("host to host", false, false),
    ("host to device", false, true),
    ("device to host", true, false),
    ("device to device", true, true),
];

fn require_host(state: &Sim, address: u64, what: &str) -> Outcome {
    if address == 0 {
        return invalid(format!("{what} is null"));
    }
    if state.memory.is_device_address(address) {
        return invalid(format!(
            "{what} 0x{address:x} is a device address, the kind of copy needs a host address"
        ));
    }
    Ok(())
}

/// Refuses bytes outside of an allocation of the thread's device.
fn require_device(state: &Sim, address: u64, len: u64, what: &str) -> Outcome {
    let current = state.current_device()?;
    let found = state.memory.find(address, len);
    let allocation = found
        .map_err(|failure| Failure::new(failure.code, format!("{what}: {}", failure.message)))?;
    if allocation.device != current {
        return invalid(format!(
            "{what} 0x{address:x} is memory of device {}, the thread's current device is {current}",
            allocation.device
        ));
    }
    Ok(())
}

fn check_count(dest_max: usize, count: usize) -> Outcome {
    if count > dest_max {
        return invalid(format!("{count} bytes are to be copied into {dest_max}"));
    }
    Ok(())
}

/// One end of a copy.
#[derive(Clone, Copy)]
enum End {
    Host(usize),
    Device(u64),
}

impl End {
    fn device(self) -> Option<u64> {
        match self {
            Self::Host(_) => None,
            Self::Device(address) => Some(address),
        }
    }
}

/// Where a copy goes to and where it comes from.
fn ends(state: &Sim, dst: u64, src: u64, count: usize, kind: i32) -> Outcome<[End; 2]> {
    let Some((name, from_device, to_device)) = KINDS.get(kind as usize) else {
        return invalid(format!("copy kind {kind} does not exist"));
    };
    let end = |address: u64, on_device: bool, what: &str| {
        let (checked, end) = if on_device {
            let checked = require_device(state, address, count as u64, what);
            (checked, End::Device(address))
        } else {
            let checked = require_host(state, address, what);
            (checked, End::Host(address as usize))
        };
        checked.map(|()| end).map_err(|failure| {
            Failure::new(failure.code, format!("{} ({name} copy)", failure.message))
        })
    };
    Ok([end(dst, *to_device, "dst")?, end(src, *from_device, "src")?])
}

/// Where the page-locked bytes of a copy lie in their block, and their hash; none while another
/// copy may be writing to the block.
fn source(
    state: &mut Sim,
    address: usize,
    len: usize,
) -> Outcome<Option<(usize, u64, Arc<HostBlock>)>> {
    let known = state.host_clock.clone();
    let found = state.host_block(address, len, "src")?;
    let mut written = found.written.iter();
    if written.any(|(actor, epoch)| known.get(*actor) < *epoch) {
        return Ok(None);
    }
    let start = address - found.block.address();
    let hash = found.block.hash(start, len);
    Ok(Some((start, hash, Arc::clone(&found.block))))
}

/// Moves bytes now. The caller holds the engine and has checked both ends.
fn move_bytes(engine: &mut Engine<'_>, [to, from]: [End; 2], count: usize) -> Outcome {
    let bytes = match from {
        // SAFETY: the program states that `count` bytes are readable at its host address.
        End::Host(address) => unsafe { read_host(address, count) },
        End::Device(address) => {
            let (bytes, offset) = sim().memory.share(address, count as u64)?;
            bytes.slice(engine, offset, count).to_vec()
        }
    };
    match to {
        // SAFETY: the program states that `count` bytes are writable at its host address.
        End::Host(address) => unsafe { write_host(address, &bytes) },
        End::Device(address) => {
            let (target, offset) = sim().memory.share(address, count as u64)?;
            target.write(engine, offset, &bytes);
        }
    }
    Ok(())
}

/// Allocates on the thread's device.
fn allocate(devPtr: *mut *mut c_void, size: usize, policy: i32) -> Outcome {
    let mut state = sim();
    let device = state.current_device()?;
    if devPtr.is_null() {
        return invalid("devPtr is null");
    }
    if size == 0 {
        return invalid("0 bytes requested");
    }
    if !(0..=2).contains(&policy) {
        return invalid(format!("allocation policy {policy} does not exist"));
    }
    let limit = state.allocation_limit(device);
    let address = state.memory.allocate(size as u64, device, limit)?;
    // SAFETY: not null, and valid for writing by the C declaration.
    unsafe { put(devPtr, pointer(address), "devPtr") }
}

export! {
    status {
        fn aclrtMalloc(devPtr: *mut *mut c_void, size: usize, policy: i32) {
            allocate(devPtr, size, policy)
        }
        fn aclrtMallocAlign32(devPtr: *mut *mut c_void, size: usize, policy: i32) {
            allocate(devPtr, size.checked_next_multiple_of(32).unwrap_or(size), policy)
        }
        fn aclrtFree(devPtr: *mut c_void) {
            let mut state = sim();
            let address = devPtr as u64;
            require_device(&state, address, 0, "devPtr")?;
            let allocation = state.memory.find(address, 0)?;
            let (start, size) = (allocation.start, allocation.size);
            if start != address {
                return invalid(format!(
                    "0x{address:x} is inside allocation 0x{start:x} and is not its start"
                ));
            }
            let known = state.host_clock.clone();
            if let Some((actor, what)) = state.memory.pending(address, &known) {
                let message = format!(
                    "allocation 0x{address:x} of {size} bytes is freed while {what}, on {actor}, may \
                     still use it: synchronise first"
                );
                state.violate(Violation::host("stream-order", message));
            }
            state.memory.release(address).map(drop)
        }
        fn aclrtMallocHost(hostPtr: *mut *mut c_void, size: usize) {
            let mut state = sim();
            state.current_device()?;
            if hostPtr.is_null() || size == 0 {
                return invalid(format!(
                    "hostPtr is {hostPtr:p} and size {size}: neither may be 0"
                ));
            }
            let block = Arc::new(HostBlock::new(size)?);
            let address = block.address();
            let allocation = HostAllocation {
                block,
                uses: BTreeMap::new(),
                written: BTreeMap::new(),
                sources: Vec::new(),
            };
            state.host_blocks.insert(address, allocation);
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(hostPtr, address as *mut c_void, "hostPtr") }
        }
        fn aclrtFreeHost(hostPtr: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            let address = hostPtr as usize;
            let Some(HostAllocation { block, uses, .. }) = state.host_blocks.remove(&address) else {
                return invalid(format!(
                    "0x{address:x} is not a live block of aclrtMallocHost: \
                     freed before, or not its start"
                ));
            };
            if !block.guards_intact() {
                let message = format!(
                    "the program wrote outside the {} bytes of host block 0x{address:x}",
                    block.size()
                );
                state.violate(Violation::host("host-overrun", message));
            }
            let mut uses = uses.iter();
            let busy = uses.find(|(actor, epoch)| state.host_clock.get(**actor) < **epoch);
            if let Some((actor, _)) = busy {
                let message = format!(
                    "host block 0x{address:x} is freed while a copy on {actor} may still use it: \
                     synchronise first"
                );
                state.violate(Violation::host("stream-order", message));
            }
            Ok(())
        }
        fn aclrtMemcpy(
            dst: *mut c_void, destMax: usize, src: *const c_void, count: usize, kind: i32,
        ) {
            check_count(destMax, count)?;
            let mut engine = engine();
            let ends = {
                let mut state = sim();
                state.current_device()?;
                if count == 0 {
                    return Ok(());
                }
                let [to, from] = ends(&state, dst as u64, src as u64, count, kind)?;
                for (end, write) in [(from, false), (to, true)] {
                    if let End::Device(address) = end {
                        state.host_touch(address, count as u64, write, "aclrtMemcpy");
                    }
                }
                [to, from]
            };
            move_bytes(&mut engine, ends, count)
        }
        fn aclrtMemcpyAsync(
            dst: *mut c_void, destMax: usize, src: *const c_void, count: usize, kind: i32,
            stream: *mut c_void,
        ) {
            check_count(destMax, count)?;
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            if count == 0 {
                return Ok(());
            }
            let [to, from] = ends(&state, dst as u64, src as u64, count, kind)?;
            let mut blocks = Vec::new();
            for (end, what) in [(to, "dst"), (from, "src")] {
                if let End::Host(address) = end {
                    blocks.push(Arc::clone(&state.host_block(address, count, what)?.block));
                }
            }
            let kept = blocks.clone();
            let work = Work::Run(Box::new(move |engine, context| {
                let _keep_alive = kept;
                {
                    let mut state = sim();
                    for (end, write) in [(from, false), (to, true)] {
                        if let End::Device(address) = end {
                            let len = count as u64;
                            state.task_touch(address, len, write, context, "aclrtMemcpyAsync");
                        }
                    }
                }
                move_bytes(engine, [to, from], count)
            }));
            let addresses = [to, from].into_iter().filter_map(End::device);
            let source = match from {
                End::Host(address) => source(&mut state, address, count)?,
                End::Device(_) => None,
            };
            let epoch = state.submit_using(stream, work, "aclrtMemcpyAsync", addresses)?;
            let actor = Actor::Stream(stream);
            for block in blocks {
                let allocation = state.host_block(block.address(), 0, "block")?;
                allocation.uses.insert(actor, epoch);
            }
            if let End::Host(address) = to {
                // From here on the runtime writes there itself.
                let target = state.host_block(address, count, "dst")?;
                target.written.insert(actor, epoch);
                let start = address - target.block.address();
                target.sources.retain(|s| s.start + s.len <= start || start + count <= s.start);
            }
            if let Some((start, hash, block)) = source {
                let sources = &mut state.host_block(block.address() + start, count, "src")?.sources;
                sources.push(Source { actor, epoch, start, len: count, hash, block });
            }
            Ok(())
        }
        fn aclrtMemsetAsync(
            devPtr: *mut c_void, maxCount: usize, value: i32, count: usize, stream: *mut c_void,
        ) {
            check_count(maxCount, count)?;
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            let (address, len) = (devPtr as u64, count as u64);
            require_device(&state, address, len, "devPtr")?;
            let work = Work::Run(Box::new(move |engine, context| {
                sim().task_touch(address, len, true, context, "aclrtMemsetAsync");
                let (target, offset) = sim().memory.share(address, len)?;
                target.slice_mut(engine, offset, count).fill(value as u8);
                Ok(())
            }));
            state.submit_using(stream, work, "aclrtMemsetAsync", [address]).map(drop)
        }
    }
    value {}
}
