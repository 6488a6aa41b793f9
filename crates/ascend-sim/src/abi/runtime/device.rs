//! Initialisation, devices and what they report.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::c_char;

use super::{invalid, put};
use crate::abi::export::export;
use crate::codes::*;
use crate::state::{Sim, recent_message, sim};
use crate::trace::Violation;

/// The version that `aclrtGetVersion` reports: that of the headers that the declarations were
/// checked against.
const VERSION: (i32, i32, i32) = (1, 17, 0);

const ATTRIBUTE_VECTOR_CORES: i32 = 201;
const ATTRIBUTE_UB_BYTES: i32 = 204;
const ATTRIBUTE_MEMORY_BYTES: i32 = 301;
const ATTRIBUTE_L2_BYTES: i32 = 302;
const ATTRIBUTE_ARCHITECTURE: i32 = 601;
const HBM_MEMORY: i32 = 1;
/// Leaked allocations that a report lists.
const LEAKS_LISTED: usize = 8;

fn report_leaks(state: &mut Sim) {
    let live = state.memory.live().take(LEAKS_LISTED);
    let listed: Vec<String> = live
        .map(|a| format!("0x{:x} ({} bytes, device {})", a.start, a.size, a.device))
        .collect();
    let users: u32 = state.device_users.values().sum();
    let leaks = [
        (state.memory.live().count(), "device allocations"),
        (state.host_blocks.len(), "page-locked host blocks"),
        (state.streams.len() - state.default_streams.len(), "streams"),
        (state.events.len(), "events"),
        (state.binaries.len(), "binaries"),
        (state.descriptors.live(), "operator descriptors"),
        (state.communicators.len(), "communicators"),
        (users as usize, "uses of a device"),
    ];
    for (count, what) in leaks.into_iter().filter(|(count, _)| *count != 0) {
        let detail = match what {
            "device allocations" => format!(": {}", listed.join(", ")),
            "uses of a device" => ": aclrtSetDevice without aclrtResetDevice".to_owned(),
            _ => String::new(),
        };
        let message = format!("{count} {what} are still alive at aclFinalize{detail}");
        state.violate(Violation::host("leak", message));
    }
}

/// Refuses a device that does not exist.
fn expect_device(state: &Sim, id: u32) -> Outcome {
    let devices = state.machine.devices;
    if id < devices {
        return Ok(());
    }
    // As the program gave it: negative ids are wrapped here.
    let message = format!(
        "device {} does not exist, there are {devices}",
        id.cast_signed()
    );
    Err(Failure::new(RT_INVALID_DEVICE, message))
}

export! {
    status {
        fn aclInit(_configPath: *const c_char) {
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
            let defaults: Vec<u64> = state.default_streams.drain().map(|(_, id)| id).collect();
            let streams = defaults.into_iter().map(|stream| state.streams.remove(stream));
            let streams = streams.collect::<Outcome<Vec<_>>>()?;
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
            let device = deviceId.cast_unsigned();
            expect_device(&state, device)?;
            *state.device_users.entry(device).or_default() += 1;
            state.set_current_device(device);
            Ok(())
        }
        fn aclrtResetDevice(deviceId: i32) {
            let mut state = sim();
            state.require_initialized()?;
            let device = deviceId.cast_unsigned();
            let users = state.device_users.get_mut(&device).ok_or_else(|| {
                let message = format!(
                    "device {deviceId} is not in use: no aclrtSetDevice is left to undo"
                );
                Failure::new(RT_INVALID_DEVICE, message)
            })?;
            *users -= 1;
            if *users != 0 {
                return Ok(());
            }
            state.device_users.remove(&device);
            if state.communicators.live().any(|communicator| communicator.device == device) {
                let message = format!(
                    "device {deviceId} is reset while a communicator of it is alive: call \
                     HcclCommDestroy first"
                );
                state.violate(Violation::host("collective", message));
            }
            if let Some(default) = state.default_streams.remove(&device) {
                let stream = state.streams.remove(default)?;
                drop(state);
                stream.close(false);
            }
            Ok(())
        }
        fn aclrtGetDevice(deviceId: *mut i32) {
            let device = sim().current_device()?;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(deviceId, device.cast_signed(), "deviceId") }
        }
        fn aclrtGetDeviceCount(count: *mut u32) {
            let devices = sim().machine.devices;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(count, devices, "count") }
        }
        fn aclrtGetDeviceInfo(deviceId: u32, attr: i32, value: *mut i64) {
            let state = sim();
            expect_device(&state, deviceId)?;
            let machine = &state.machine;
            let found = match attr {
                ATTRIBUTE_VECTOR_CORES => i64::from(machine.vector_cores),
                ATTRIBUTE_UB_BYTES => machine.ub_bytes as i64,
                ATTRIBUTE_MEMORY_BYTES => machine.memory_bytes as i64,
                ATTRIBUTE_L2_BYTES => machine.l2_bytes as i64,
                ATTRIBUTE_ARCHITECTURE => i64::from(machine.architecture),
                _ => return invalid(format!("device attribute {attr} is not modelled")),
            };
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(value, found, "value") }
        }
        fn aclrtGetMemInfo(attr: i32, free: *mut usize, total: *mut usize) {
            let state = sim();
            let device = state.current_device()?;
            if attr != HBM_MEMORY {
                return invalid(format!(
                    "memory attribute {attr} is not modelled, only {HBM_MEMORY} (HBM)"
                ));
            }
            let limit = state.memory_limit();
            let used = state.memory.used_bytes(device);
            let left = state.allocation_limit(device).saturating_sub(used);
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                put(free, left as usize, "free")?;
                put(total, limit as usize, "total")
            }
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
