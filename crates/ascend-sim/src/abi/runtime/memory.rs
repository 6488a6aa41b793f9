//! Device memory, page-locked host memory, copies and fills.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::c_void;
use std::sync::Arc;

use super::{handle, pointer, put};
use crate::abi::export::export;
use crate::abi::sys::{Engine, HostBlock, read_host, write_host};
use crate::clock::Actor;
use crate::codes::*;
use crate::state::{HostAllocation, Sim, sim};
use crate::stream::{Work, engine};
use crate::trace::Violation;

const KIND_NAMES: [&str; 4] = [
    "host to host",
    "host to device",
    "device to host",
    "device to device",
];

fn require_aligned_host(state: &Sim, address: u64, what: &str) -> Outcome {
    if address == 0 {
        return Err(Failure::new(RT_PARAM_INVALID, format!("{what} is null")));
    }
    if state.memory.is_device_address(address) {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!(
                "{what} 0x{address:x} is a device address, the kind of copy needs a host address"
            ),
        ));
    }
    Ok(())
}

/// The device allocation of a copy, which must be of the thread's device.
fn require_device(state: &Sim, address: u64, len: u64, what: &str) -> Outcome {
    let current = state.current_device()?;
    let allocation = state
        .memory
        .find(address, len)
        .map_err(|failure| Failure::new(failure.code, format!("{what}: {}", failure.message)))?;
    if allocation.device != current {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!(
                "{what} 0x{address:x} is memory of device {}, the thread's current device is {current}",
                allocation.device
            ),
        ));
    }
    Ok(())
}

fn check_copy(dest_max: usize, count: usize, kind: i32) -> Outcome {
    if count > dest_max {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!("{count} bytes are to be copied into {dest_max}"),
        ));
    }
    if !(0..4).contains(&kind) {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!("copy kind {kind} does not exist"),
        ));
    }
    Ok(())
}

/// One end of a copy.
#[derive(Clone, Copy)]
enum End {
    Host(usize),
    Device(u64),
}

fn ends(state: &Sim, dst: u64, src: u64, count: usize, kind: i32) -> Outcome<(End, End)> {
    let end = |address: u64, on_device: bool, what: &str| {
        if on_device {
            require_device(state, address, count as u64, what).map(|()| End::Device(address))
        } else {
            require_aligned_host(state, address, what).map(|()| End::Host(address as usize))
        }
    };
    let with_kind = |failure: Failure| {
        Failure::new(
            failure.code,
            format!("{} ({} copy)", failure.message, KIND_NAMES[kind as usize]),
        )
    };
    let to = end(dst, kind == 1 || kind == 3, "dst").map_err(with_kind)?;
    let from = end(src, kind == 2 || kind == 3, "src").map_err(with_kind)?;
    Ok((to, from))
}

/// Moves bytes now. The caller holds the engine and has checked both ends.
fn move_bytes(engine: &mut Engine<'_>, to: End, from: End, count: usize) -> Outcome {
    let bytes = match from {
        // SAFETY: the program says that `count` bytes are readable at its host address.
        End::Host(address) => unsafe { read_host(address, count) },
        End::Device(address) => {
            let (bytes, offset) = {
                let state = sim();
                let allocation = state.memory.find(address, count as u64)?;
                (
                    Arc::clone(&allocation.bytes),
                    (address - allocation.start) as usize,
                )
            };
            let mut read = vec![0; count];
            bytes.read(engine, offset, &mut read);
            read
        }
    };
    match to {
        // SAFETY: the program says that `count` bytes are writable at its host address.
        End::Host(address) => unsafe { write_host(address, &bytes) },
        End::Device(address) => {
            let (target, offset) = {
                let state = sim();
                let allocation = state.memory.find(address, count as u64)?;
                (
                    Arc::clone(&allocation.bytes),
                    (address - allocation.start) as usize,
                )
            };
            target.write(engine, offset, &bytes);
        }
    }
    Ok(())
}

fn set_bytes(engine: &mut Engine<'_>, address: u64, value: u8, count: usize) -> Outcome {
    let (target, offset) = {
        let state = sim();
        let allocation = state.memory.find(address, count as u64)?;
        (
            Arc::clone(&allocation.bytes),
            (address - allocation.start) as usize,
        )
    };
    target.write(engine, offset, &vec![value; count]);
    Ok(())
}

export! {
    status {
        fn aclrtMalloc(devPtr: *mut *mut c_void, size: usize, policy: i32) {
            let mut state = sim();
            let device = state.current_device()?;
            if devPtr.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, "devPtr is null"));
            }
            if size == 0 {
                return Err(Failure::new(RT_PARAM_INVALID, "0 bytes requested"));
            }
            if !(0..=2).contains(&policy) {
                return Err(Failure::new(RT_PARAM_INVALID, format!("allocation policy {policy} does not exist")));
            }
            let limit = state.memory_limit.unwrap_or(state.machine.memory_bytes);
            let address = state.memory.allocate(size as u64, device, limit)?;
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(devPtr, pointer(address), "devPtr") }
        }
        fn aclrtFree(devPtr: *mut c_void) {
            let mut state = sim();
            let address = devPtr as u64;
            require_device(&state, address, 0, "devPtr")?;
            let allocation = state.memory.find(address, 0)?;
            let (start, size) = (allocation.start, allocation.size);
            if start != address {
                return Err(Failure::new(
                    RT_PARAM_INVALID,
                    format!("0x{address:x} lies inside allocation 0x{start:x} and is not its start"),
                ));
            }
            state.host_touch(address, size, true, "aclrtFree");
            state.memory.release(address).map(drop)
        }
        fn aclrtMallocHost(hostPtr: *mut *mut c_void, size: usize) {
            let mut state = sim();
            state.current_device()?;
            if hostPtr.is_null() || size == 0 {
                return Err(Failure::new(RT_PARAM_INVALID, format!("hostPtr is {hostPtr:p} and size {size}: neither may be 0")));
            }
            let block = HostBlock::new(size)?;
            let address = block.address();
            state.host_blocks.insert(address, HostAllocation { block: Arc::new(block), uses: Default::default() });
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(hostPtr, address as *mut c_void, "hostPtr") }
        }
        fn aclrtFreeHost(hostPtr: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            let address = hostPtr as usize;
            let freed = state.host_blocks.remove(&address).ok_or_else(|| {
                Failure::new(RT_PARAM_INVALID, format!("0x{address:x} is not a live block of aclrtMallocHost: freed before, or not its start"))
            })?;
            if !freed.block.guards_intact() {
                state.violate(Violation::host("host-overrun", format!("the program wrote outside the {} bytes of host block 0x{address:x}", freed.block.size())));
            }
            let busy = freed.uses.iter().find(|(actor, epoch)| state.host_clock.get(**actor) < **epoch).map(|(actor, _)| *actor);
            if let Some(actor) = busy {
                state.violate(Violation::host(
                    "stream-order",
                    format!("host block 0x{address:x} is freed while a copy on {actor} may still use it: synchronise first"),
                ));
            }
            Ok(())
        }
        fn aclrtMemcpy(dst: *mut c_void, destMax: usize, src: *const c_void, count: usize, kind: i32) {
            check_copy(destMax, count, kind)?;
            let mut engine = engine();
            let (to, from) = {
                let mut state = sim();
                state.current_device()?;
                if count == 0 {
                    return Ok(());
                }
                let (to, from) = ends(&state, dst as u64, src as u64, count, kind)?;
                for (end, write) in [(from, false), (to, true)] {
                    if let End::Device(address) = end {
                        state.host_touch(address, count as u64, write, "aclrtMemcpy");
                    }
                }
                (to, from)
            };
            move_bytes(&mut engine, to, from, count)
        }
        fn aclrtMemcpyAsync(dst: *mut c_void, destMax: usize, src: *const c_void, count: usize, kind: i32, stream: *mut c_void) {
            check_copy(destMax, count, kind)?;
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            if count == 0 {
                return Ok(());
            }
            let (to, from) = ends(&state, dst as u64, src as u64, count, kind)?;
            let mut kept = Vec::new();
            for (end, what) in [(to, "dst"), (from, "src")] {
                if let End::Host(address) = end {
                    kept.push((address, Arc::clone(&state.host_block(address, count, what)?.block)));
                }
            }
            let blocks: Vec<usize> = kept.iter().map(|(_, block)| block.address()).collect();
            let epoch = state.submit(stream, Work::Run(Box::new(move |engine, context| {
                let _keep_alive = kept;
                {
                    let mut state = sim();
                    for (end, write) in [(from, false), (to, true)] {
                        if let End::Device(address) = end {
                            state.task_touch(address, count as u64, write, context, "aclrtMemcpyAsync");
                        }
                    }
                }
                move_bytes(engine, to, from, count)
            })))?;
            for block in blocks {
                state.host_block(block, 0, "block")?.uses.insert(Actor::Stream(stream), epoch);
            }
            Ok(())
        }
        fn aclrtMemset(devPtr: *mut c_void, maxCount: usize, value: i32, count: usize) {
            check_copy(maxCount, count, 3)?;
            let mut engine = engine();
            {
                let mut state = sim();
                require_device(&state, devPtr as u64, count as u64, "devPtr")?;
                state.host_touch(devPtr as u64, count as u64, true, "aclrtMemset");
            }
            set_bytes(&mut engine, devPtr as u64, value as u8, count)
        }
        fn aclrtMemsetAsync(devPtr: *mut c_void, maxCount: usize, value: i32, count: usize, stream: *mut c_void) {
            check_copy(maxCount, count, 3)?;
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            let address = devPtr as u64;
            require_device(&state, address, count as u64, "devPtr")?;
            state.submit(stream, Work::Run(Box::new(move |engine, context| {
                sim().task_touch(address, count as u64, true, context, "aclrtMemsetAsync");
                set_bytes(engine, address, value as u8, count)
            }))).map(drop)
        }
    }
    value {}
}
