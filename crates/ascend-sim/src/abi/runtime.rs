//! The runtime functions: `acl*` and `aclrt*`.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use crate::abi::export::export;
use crate::abi::kernel::KernelLibrary;
use crate::abi::sys::{HostBlock, read_host, write_host};
use crate::clock::{Actor, Clock};
use crate::codes::*;
use crate::launch::{self, PlaceHolder};
use crate::state::{
    Arguments, Event, Function, HostAllocation, Sim, recent_message, set_recent_message, sim,
};
use crate::stream::{Stream, Ticket, Work, engine};
use crate::trace::Violation;

/// Version that `aclrtGetVersion` reports: the headers the declarations were checked against.
const VERSION: (i32, i32, i32) = (1, 17, 0);

const ATTRIBUTE_VECTOR_CORES: i32 = 201;
const ATTRIBUTE_UB_BYTES: i32 = 204;
const ATTRIBUTE_MEMORY_BYTES: i32 = 301;
const ATTRIBUTE_L2_BYTES: i32 = 302;
const ATTRIBUTE_ARCHITECTURE: i32 = 601;
const HBM_MEMORY: i32 = 1;
const MAX_KERNEL_ARGUMENTS: usize = 128;
const ARGUMENT_ALIGNMENT: usize = 8;
const KIND_NAMES: [&str; 4] = [
    "host to host",
    "host to device",
    "device to host",
    "device to device",
];

/// `aclrtPlaceHolderInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtPlaceHolderInfo {
    /// Where in the arguments the device address goes.
    pub addr_offset: u32,
    /// Where in the host buffer the data begins.
    pub data_offset: u32,
}

/// `aclrtLaunchKernelAttr`: an id and a 16-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtLaunchKernelAttr {
    /// Which attribute.
    pub id: i32,
    /// Its value.
    pub value: [u32; 4],
}

/// `aclrtLaunchKernelCfg`: a list of attributes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtLaunchKernelCfg {
    /// The attributes.
    pub attrs: *const AclrtLaunchKernelAttr,
    /// How many.
    pub num_attrs: usize,
}

/// `aclrtBinaryLoadOption`: a kind and a 16-byte union.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtBinaryLoadOption {
    /// Which option.
    pub kind: i32,
    /// Its value.
    pub value: [u32; 4],
}

/// `aclrtBinaryLoadOptions`: a list of options.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtBinaryLoadOptions {
    /// The options.
    pub options: *const AclrtBinaryLoadOption,
    /// How many.
    pub num_opt: usize,
}

const _: () = assert!(size_of::<AclrtPlaceHolderInfo>() == 8);
const _: () = assert!(size_of::<AclrtLaunchKernelAttr>() == 20);
const _: () = assert!(size_of::<AclrtLaunchKernelCfg>() == 16);
const _: () = assert!(size_of::<AclrtBinaryLoadOption>() == 20);
const _: () = assert!(size_of::<AclrtBinaryLoadOptions>() == 16);

/// Writes an out parameter.
///
/// # Safety
/// - `target` is null or valid for writing one `T`.
pub(crate) unsafe fn put<T>(target: *mut T, value: T, name: &str) -> Outcome {
    if target.is_null() {
        return Err(Failure::new(RT_PARAM_INVALID, format!("{name} is null")));
    }
    // SAFETY: not null, and valid for writing by the function's own condition.
    unsafe { target.write(value) };
    Ok(())
}

/// Reads a C string parameter.
///
/// # Safety
/// - `text` is null or a C string.
pub(crate) unsafe fn get_text(text: *const c_char, name: &str) -> Outcome<String> {
    if text.is_null() {
        return Err(Failure::new(RT_PARAM_INVALID, format!("{name} is null")));
    }
    // SAFETY: not null, and a C string by the function's own condition.
    Ok(unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned())
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer as u64
}

fn pointer(handle: u64) -> *mut c_void {
    handle as *mut c_void
}

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
fn move_bytes(engine: &crate::abi::sys::Engine<'_>, to: End, from: End, count: usize) -> Outcome {
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

fn set_bytes(
    engine: &crate::abi::sys::Engine<'_>,
    address: u64,
    value: u8,
    count: usize,
) -> Outcome {
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

/// Waits for a stream; its failure, if it has one, becomes the call's.
fn synchronize(stream: *mut c_void, timeout: Option<Duration>) -> Outcome {
    let (stream, waiter, clock) = {
        let mut state = sim();
        let stream = state.stream_handle(handle(stream))?;
        let found = state.streams.get(stream)?;
        (stream, found.waiter(), found.clock.clone())
    };
    let Some(failure) = waiter.wait(timeout) else {
        return Err(Failure::new(
            RT_STREAM_SYNC_TIMEOUT,
            format!("stream 0x{stream:x} is still busy"),
        ));
    };
    let mut state = sim();
    state.host_clock.join(&clock);
    state
        .host_clock
        .raise(Actor::Stream(stream), waiter.target());
    failure.map_or(Ok(()), Err)
}

fn check_launch_config(config: *const AclrtLaunchKernelCfg) -> Outcome {
    if config.is_null() {
        return Ok(());
    }
    // SAFETY: not null, and valid by the C declaration.
    let config = unsafe { &*config };
    if config.num_attrs != 0 && config.attrs.is_null() {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            "the launch configuration has attributes at null",
        ));
    }
    Ok(())
}

fn load_binary(bytes: &[u8]) -> Outcome<u64> {
    let machine = {
        let state = sim();
        state.current_device()?;
        state.machine.clone()
    };
    let library = KernelLibrary::load(bytes, &machine)?;
    Ok(sim().binaries.insert(Arc::new(library)))
}

fn report_leaks(state: &mut Sim) {
    let allocations: Vec<String> = state
        .memory
        .live()
        .map(|a| format!("0x{:x} ({} bytes, device {})", a.start, a.size, a.device))
        .collect();
    let leaks = [
        (
            allocations.len(),
            "device allocations",
            format!(
                ": {}",
                allocations
                    .iter()
                    .take(8)
                    .cloned()
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        ),
        (
            state.host_blocks.len(),
            "page-locked host blocks",
            String::new(),
        ),
        (
            state.streams.len() - state.default_streams.len(),
            "streams",
            String::new(),
        ),
        (state.events.len(), "events", String::new()),
        (state.binaries.len(), "binaries", String::new()),
        (
            state.descriptors.live(),
            "operator descriptors",
            String::new(),
        ),
    ];
    for (count, what, detail) in leaks.into_iter().filter(|(count, ..)| *count != 0) {
        state.violate(Violation::host(
            "leak",
            format!("{count} {what} are still alive at aclFinalize{detail}"),
        ));
    }
}

export! {
    status {
        fn aclInit(configPath: *const c_char) {
            let _ = configPath;
            let mut state = sim();
            if state.initialized {
                return Err(Failure::new(REPEAT_INITIALIZE, "aclInit was called before"));
            }
            state.initialized = true;
            Ok(())
        }
        fn aclFinalize() {
            let mut state = sim();
            state.require_initialized()?;
            report_leaks(&mut state);
            state.initialized = false;
            state.device_users.clear();
            let defaults: Vec<u64> = state.default_streams.drain().map(|(_, handle)| handle).collect();
            let streams = defaults.into_iter().map(|handle| state.streams.remove(handle)).collect::<Outcome<Vec<_>>>()?;
            drop(state);
            streams.into_iter().for_each(|stream| stream.close(false));
            Ok(())
        }
        fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                put(major, VERSION.0, "majorVersion")?;
                put(minor, VERSION.1, "minorVersion")?;
                put(patch, VERSION.2, "patchVersion")
            }
        }
        fn aclrtSetDevice(deviceId: i32) {
            let mut state = sim();
            state.require_initialized()?;
            let device = u32::try_from(deviceId).ok().filter(|device| *device < state.machine.devices).ok_or_else(|| {
                Failure::new(RT_INVALID_DEVICE, format!("device {deviceId} does not exist, there are {}", state.machine.devices))
            })?;
            *state.device_users.entry(device).or_default() += 1;
            state.set_current_device(device);
            Ok(())
        }
        fn aclrtResetDevice(deviceId: i32) {
            let mut state = sim();
            state.require_initialized()?;
            let device = u32::try_from(deviceId).unwrap_or(u32::MAX);
            let users = state.device_users.get_mut(&device).ok_or_else(|| {
                Failure::new(RT_INVALID_DEVICE, format!("device {deviceId} is not in use: no aclrtSetDevice is left to undo"))
            })?;
            *users -= 1;
            if *users != 0 {
                return Ok(());
            }
            state.device_users.remove(&device);
            let default = state.default_streams.remove(&device).map(|handle| state.streams.remove(handle)).transpose()?;
            drop(state);
            if let Some(stream) = default {
                stream.close(false);
            }
            Ok(())
        }
        fn aclrtGetDeviceCount(count: *mut u32) {
            let devices = sim().machine.devices;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(count, devices, "count") }
        }
        fn aclrtGetDeviceInfo(deviceId: u32, attr: i32, value: *mut i64) {
            let machine = sim().machine.clone();
            if deviceId >= machine.devices {
                return Err(Failure::new(RT_INVALID_DEVICE, format!("device {deviceId} does not exist, there are {}", machine.devices)));
            }
            let found = match attr {
                ATTRIBUTE_VECTOR_CORES => i64::from(machine.vector_cores),
                ATTRIBUTE_UB_BYTES => machine.ub_bytes as i64,
                ATTRIBUTE_MEMORY_BYTES => machine.memory_bytes as i64,
                ATTRIBUTE_L2_BYTES => machine.l2_bytes as i64,
                ATTRIBUTE_ARCHITECTURE => i64::from(machine.architecture),
                _ => return Err(Failure::new(RT_PARAM_INVALID, format!("device attribute {attr} is not modelled"))),
            };
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(value, found, "value") }
        }
        fn aclrtGetMemInfo(attr: i32, free: *mut usize, total: *mut usize) {
            let state = sim();
            let device = state.current_device()?;
            if attr != HBM_MEMORY {
                return Err(Failure::new(RT_PARAM_INVALID, format!("memory attribute {attr} is not modelled, only {HBM_MEMORY} (HBM)")));
            }
            let limit = state.memory_limit.unwrap_or(state.machine.memory_bytes);
            let left = limit.saturating_sub(state.memory.used_bytes(device));
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                put(free, left as usize, "free")?;
                put(total, limit as usize, "total")
            }
        }
        fn aclrtCreateStream(stream: *mut *mut c_void) {
            let mut state = sim();
            let device = state.current_device()?;
            if stream.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, "stream is null"));
            }
            let created = state.streams.insert(Stream::new(device)?);
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(stream, pointer(created), "stream") }
        }
        fn aclrtDestroyStream(stream: *mut c_void) {
            let destroyed = {
                let mut state = sim();
                if stream.is_null() {
                    return Err(Failure::new(RT_INVALID_HANDLE, "the default stream cannot be destroyed"));
                }
                let stream = state.stream_handle(handle(stream))?;
                let destroyed = state.streams.remove(stream)?;
                let unfinished = destroyed.waiter().target() > state.host_clock.get(Actor::Stream(stream));
                if unfinished {
                    state.violate(Violation::host(
                        "stream-destroyed-busy",
                        format!("stream 0x{stream:x} is destroyed without waiting for its work: call aclrtSynchronizeStream first"),
                    ));
                }
                destroyed
            };
            destroyed.close(false);
            Ok(())
        }
        fn aclrtSynchronizeStream(stream: *mut c_void) {
            synchronize(stream, None)
        }
        fn aclrtSynchronizeStreamWithTimeout(stream: *mut c_void, timeout: i32) {
            // -1 waits for ever, as the runtime's other timeouts do.
            let timeout = match timeout {
                -1 => None,
                ms => Some(Duration::from_millis(u64::try_from(ms).map_err(|_| Failure::new(RT_PARAM_INVALID, format!("timeout of {ms} ms")))?)),
            };
            synchronize(stream, timeout)
        }
        fn aclrtCreateEvent(event: *mut *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            if event.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, "event is null"));
            }
            let created = state.events.insert(Event { recorded: None });
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(event, pointer(created), "event") }
        }
        fn aclrtDestroyEvent(event: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            state.events.remove(handle(event)).map(drop)
        }
        fn aclrtRecordEvent(event: *mut c_void, stream: *mut c_void) {
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            state.events.get(handle(event))?;
            let ticket = Arc::new(Ticket::default());
            state.submit(stream, Work::Record(Arc::clone(&ticket)))?;
            let clock = state.streams.get(stream)?.clock.clone();
            state.events.get_mut(handle(event))?.recorded = Some((ticket, clock));
            Ok(())
        }
        fn aclrtStreamWaitEvent(stream: *mut c_void, event: *mut c_void) {
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            let Some((ticket, clock)) = state.events.get(handle(event))?.recorded.as_ref().map(|(t, c)| (Arc::clone(t), c.clone())) else {
                return Ok(());
            };
            state.streams.get_mut(stream)?.clock.join(&clock);
            state.submit(stream, Work::Wait(ticket)).map(drop)
        }
        fn aclrtSynchronizeEvent(event: *mut c_void) {
            let recorded: Option<(Arc<Ticket>, Clock)> = {
                let state = sim();
                state.current_device()?;
                state.events.get(handle(event))?.recorded.as_ref().map(|(t, c)| (Arc::clone(t), c.clone()))
            };
            let Some((ticket, clock)) = recorded else { return Ok(()) };
            let failure = ticket.wait();
            sim().host_clock.join(&clock);
            failure.map_or(Ok(()), Err)
        }
        fn aclrtEventElapsedTime(ms: *mut f32, start: *mut c_void, end: *mut c_void) {
            let state = sim();
            state.current_device()?;
            state.events.get(handle(start))?;
            state.events.get(handle(end))?;
            let _ = ms;
            Err(Failure::new(RT_FEATURE_NOT_SUPPORTED, "the simulator reports no times"))
        }
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
            let engine = engine();
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
            move_bytes(&engine, to, from, count)
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
            let engine = engine();
            {
                let mut state = sim();
                require_device(&state, devPtr as u64, count as u64, "devPtr")?;
                state.host_touch(devPtr as u64, count as u64, true, "aclrtMemset");
            }
            set_bytes(&engine, devPtr as u64, value as u8, count)
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
        fn aclrtBinaryLoadFromData(data: *const c_void, length: usize, options: *const AclrtBinaryLoadOptions, binHandle: *mut *mut c_void) {
            let _ = options;
            if data.is_null() || length == 0 || binHandle.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, format!("data is {data:p}, length {length}, binHandle {binHandle:p}: none may be 0")));
            }
            // SAFETY: the program says that `length` bytes are readable at `data`.
            let bytes = unsafe { read_host(data as usize, length) };
            let loaded = load_binary(&bytes)?;
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(binHandle, pointer(loaded), "binHandle") }
        }
        fn aclrtBinaryLoadFromFile(binPath: *const c_char, options: *mut AclrtBinaryLoadOptions, binHandle: *mut *mut c_void) {
            let _ = options;
            // SAFETY: null or a C string by the C declaration.
            let path = unsafe { get_text(binPath, "binPath") }?;
            let bytes = std::fs::read(&path).map_err(|error| Failure::new(RT_PARAM_INVALID, format!("{path}: {error}")))?;
            let loaded = load_binary(&bytes)?;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(binHandle, pointer(loaded), "binHandle") }
        }
        fn aclrtBinaryUnLoad(binHandle: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            state.binaries.remove(handle(binHandle))?;
            Ok(())
        }
        fn aclrtBinaryGetFunction(binHandle: *mut c_void, kernelName: *const c_char, funcHandle: *mut *mut c_void) {
            // SAFETY: null or a C string by the C declaration.
            let name = unsafe { get_text(kernelName, "kernelName") }?;
            let mut state = sim();
            let library = Arc::clone(state.binaries.get(handle(binHandle))?);
            let kernel = library.kernels.iter().position(|kernel| kernel.name == name).ok_or_else(|| {
                let names: Vec<&str> = library.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
                Failure::new(RT_KERNEL_NOT_FOUND, format!("kernel `{name}` is not in the binary, which has {}", names.join(", ")))
            })?;
            let function = state.functions.insert(Function { library, kernel, binary: handle(binHandle) });
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(funcHandle, pointer(function), "funcHandle") }
        }
        fn aclrtLaunchKernelWithHostArgs(funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void, cfg: *mut AclrtLaunchKernelCfg, hostArgs: *mut c_void, argsSize: usize, placeHolderArray: *mut AclrtPlaceHolderInfo, placeHolderNum: usize) {
            check_launch_config(cfg)?;
            if (hostArgs.is_null() && argsSize != 0) || (placeHolderArray.is_null() && placeHolderNum != 0) {
                return Err(Failure::new(RT_PARAM_INVALID, "arguments or placeholders are null but have a size"));
            }
            // SAFETY: the program says that `argsSize` bytes are readable at `hostArgs`.
            let args = if argsSize == 0 { Vec::new() } else { unsafe { read_host(hostArgs as usize, argsSize) } };
            let place_holders: Vec<PlaceHolder> = if placeHolderNum == 0 {
                Vec::new()
            } else {
                // SAFETY: not null, and `placeHolderNum` entries long by the C declaration.
                unsafe { std::slice::from_raw_parts(placeHolderArray, placeHolderNum) }
                    .iter()
                    .map(|p| PlaceHolder { address_offset: p.addr_offset as usize, data_offset: p.data_offset as usize })
                    .collect()
            };
            let stream = start_launch(handle(funcHandle), handle(stream))?;
            launch::submit(handle(funcHandle), numBlocks, stream, args, &place_holders)
        }
        fn aclrtKernelArgsInit(funcHandle: *mut c_void, argsHandle: *mut *mut c_void) {
            let mut state = sim();
            state.functions.get(handle(funcHandle))?;
            let arguments = state.arguments.insert(Arguments { function: handle(funcHandle), bytes: Vec::new(), finalized: false });
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(argsHandle, pointer(arguments), "argsHandle") }
        }
        fn aclrtKernelArgsAppend(argsHandle: *mut c_void, param: *mut c_void, paramSize: usize, paramHandle: *mut *mut c_void) {
            if param.is_null() || paramSize == 0 {
                return Err(Failure::new(RT_PARAM_INVALID, format!("param is {param:p} of {paramSize} bytes: neither may be 0")));
            }
            // SAFETY: the program says that `paramSize` bytes are readable at `param`.
            let bytes = unsafe { read_host(param as usize, paramSize) };
            let mut state = sim();
            let arguments = state.arguments.get_mut(handle(argsHandle))?;
            if arguments.finalized {
                return Err(Failure::new(RT_PARAM_INVALID, "the arguments are finalized already"));
            }
            if arguments.bytes.len() / ARGUMENT_ALIGNMENT >= MAX_KERNEL_ARGUMENTS {
                return Err(Failure::new(RT_PARAM_INVALID, format!("a kernel takes at most {MAX_KERNEL_ARGUMENTS} arguments")));
            }
            let offset = arguments.bytes.len();
            arguments.bytes.extend_from_slice(&bytes);
            arguments.bytes.resize(arguments.bytes.len().next_multiple_of(ARGUMENT_ALIGNMENT), 0);
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(paramHandle, pointer(offset as u64), "paramHandle") }
        }
        fn aclrtKernelArgsFinalize(argsHandle: *mut c_void) {
            let mut state = sim();
            state.arguments.get_mut(handle(argsHandle))?.finalized = true;
            Ok(())
        }
        fn aclrtLaunchKernelWithConfig(funcHandle: *mut c_void, numBlocks: u32, stream: *mut c_void, cfg: *mut AclrtLaunchKernelCfg, argsHandle: *mut c_void, reserve: *mut c_void) {
            check_launch_config(cfg)?;
            if !reserve.is_null() {
                return Err(Failure::new(RT_PARAM_INVALID, "reserve must be null"));
            }
            let bytes = {
                let state = sim();
                let arguments = state.arguments.get(handle(argsHandle))?;
                if !arguments.finalized {
                    return Err(Failure::new(RT_PARAM_INVALID, "aclrtKernelArgsFinalize was not called"));
                }
                if arguments.function != handle(funcHandle) {
                    return Err(Failure::new(RT_PARAM_INVALID, "the arguments were made for another kernel"));
                }
                arguments.bytes.clone()
            };
            let stream = start_launch(handle(funcHandle), handle(stream))?;
            launch::submit(handle(funcHandle), numBlocks, stream, bytes, &[])
        }
    }
    value {
        fn aclGetRecentErrMsg() -> *const c_char {
            recent_message()
        }
        fn aclrtGetSocName() -> *const c_char {
            sim().machine.soc_name.as_ptr()
        }
    }
}

/// The stream of a launch, once function and binary are known to be alive.
fn start_launch(function: u64, stream: u64) -> Outcome<u64> {
    let mut state = sim();
    let stream = state.stream_handle(stream)?;
    let binary = state.functions.get(function)?.binary;
    if state.binaries.get(binary).is_err() {
        set_recent_message("the kernel's binary was unloaded");
        return Err(Failure::new(
            RT_INVALID_HANDLE,
            "the kernel's binary was unloaded: keep it until the last launch",
        ));
    }
    Ok(stream)
}
