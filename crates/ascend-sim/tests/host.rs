//! The runtime as seen by a host program: seeded faults in the program, and results of correct use.
#![allow(clippy::disallowed_methods, reason = "test code")]
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

mod support;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ascend_sim::abi::runtime::*;
use ascend_sim::{Machine, Session, control};
use support::{DEVICE_TO_HOST, Device, HOST_TO_DEVICE, one_violation, recent_message};

const INVALID_PARAM: i32 = 107000;
const INVALID_DEVICE: i32 = 107001;
const NO_CONTEXT: i32 = 107002;
const WRONG_CONTEXT: i32 = 107003;
const INVALID_HANDLE: i32 = 107017;
const NOT_SUPPORTED: i32 = 207000;
const OUT_OF_MEMORY: i32 = 207001;
const TIMEOUT: i32 = 507046;

/// Asserts that a call failed with a code and a message that names the function and the reason.
#[track_caller]
fn refused(code: i32, expected: i32, says: &str) {
    let message = recent_message();
    assert_eq!(code, expected, "{message}");
    assert!(
        message.starts_with("acl") && message.contains(says),
        "`{message}` says `{says}`"
    );
}

fn host_block(bytes: usize) -> *mut u8 {
    let mut block = null_mut();
    // SAFETY: a valid out parameter.
    assert_eq!(unsafe { aclrtMallocHost(&raw mut block, bytes) }, 0);
    block.cast()
}

fn new_stream() -> *mut c_void {
    let mut stream = null_mut();
    // SAFETY: a valid out parameter.
    assert_eq!(unsafe { aclrtCreateStream(&raw mut stream) }, 0);
    stream
}

#[test]
fn the_runtime_wants_to_be_initialised_once() {
    let _session = Session::begin();
    // SAFETY: plain calls.
    unsafe {
        refused(aclrtSetDevice(0), 100001, "aclInit was not called");
        assert_eq!(aclInit(null()), 0);
        refused(aclInit(null()), 100002, "called before");
        refused(aclrtSetDevice(1), INVALID_DEVICE, "device 1 does not exist");
        assert_eq!(aclFinalize(), 0);
        refused(aclFinalize(), 100001, "aclInit was not called");
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn each_thread_needs_its_own_device() {
    let device = Device::new();
    let address = device.alloc(64);
    std::thread::spawn(move || {
        // SAFETY: a wrong call is an error.
        let code = unsafe { aclrtFree(address as *mut c_void) };
        refused(code, NO_CONTEXT, "this thread has no current device");
        let mut stream = null_mut();
        // SAFETY: a valid out parameter.
        let code = unsafe { aclrtCreateStream(&raw mut stream) };
        refused(code, NO_CONTEXT, "call aclrtSetDevice on it");
    })
    .join()
    .expect("the thread's assertions hold");
}

#[test]
fn objects_belong_to_the_device_they_were_made_on() {
    let device = Device::on(Machine {
        devices: 2,
        ..Machine::default()
    });
    let address = device.alloc(64);
    // SAFETY: wrong calls are errors.
    unsafe {
        assert_eq!(aclrtSetDevice(1), 0);
        refused(
            aclrtSynchronizeStream(device.stream),
            WRONG_CONTEXT,
            "belongs to device 0, the thread's current device is 1",
        );
        refused(
            aclrtMemsetAsync(address as *mut c_void, 64, 0, 64, null_mut()),
            INVALID_PARAM,
            "is memory of device 0",
        );
        refused(
            aclrtFree(address as *mut c_void),
            INVALID_PARAM,
            "is memory of device 0",
        );
    }
}

#[test]
fn device_addresses_cannot_be_followed_on_the_host() {
    let device = Device::new();
    let address = device.alloc(4096);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
    let mapping = maps
        .lines()
        .find(|line| {
            let (start, rest) = line.split_once('-').expect("a range");
            let end = rest.split_whitespace().next().expect("an end");
            let parse = |text| u64::from_str_radix(text, 16).expect("a number");
            (parse(start)..parse(end)).contains(&address)
        })
        .expect("the address is mapped");
    assert!(mapping.contains(" ---p "), "{mapping}");
}

#[test]
fn memory_misuse_is_refused() {
    let device = Device::new();
    let address = device.upload(&[1_u8; 100]);
    let mut buffer = [0_u8; 200];
    // SAFETY: host buffers are as long as the calls state; wrong device addresses are errors.
    unsafe {
        let target = buffer.as_mut_ptr().cast::<c_void>();
        refused(
            aclrtMemcpy(target, 200, address as *const c_void, 101, DEVICE_TO_HOST),
            INVALID_PARAM,
            "reach outside allocation",
        );
        refused(
            aclrtMemcpy(
                target,
                200,
                (address + 90) as *const c_void,
                20,
                DEVICE_TO_HOST,
            ),
            INVALID_PARAM,
            "reach outside allocation",
        );
        refused(
            aclrtMemcpy(target, 10, address as *const c_void, 20, DEVICE_TO_HOST),
            INVALID_PARAM,
            "20 bytes are to be copied into 10",
        );
        refused(
            aclrtMemcpy(target, 200, address as *const c_void, 20, HOST_TO_DEVICE),
            INVALID_PARAM,
            "host to device",
        );
        refused(
            aclrtMemcpy(target, 200, address as *const c_void, 20, 0),
            INVALID_PARAM,
            "is a device address",
        );
        refused(
            aclrtFree((address + 1) as *mut c_void),
            INVALID_PARAM,
            "is not its start",
        );
        assert_eq!(aclrtFree(address as *mut c_void), 0);
        refused(
            aclrtFree(address as *mut c_void),
            INVALID_PARAM,
            "were freed",
        );
        refused(
            aclrtMemcpy(target, 200, address as *const c_void, 20, DEVICE_TO_HOST),
            INVALID_PARAM,
            "were freed",
        );
        refused(
            aclrtMemsetAsync(address as *mut c_void, 100, 0, 100, null_mut()),
            INVALID_PARAM,
            "were freed",
        );
        refused(aclrtFree(null_mut()), INVALID_PARAM, "null");
        refused(aclrtFree(target), INVALID_PARAM, "is not a device address");
        let mut nothing = null_mut();
        refused(
            aclrtMalloc(&raw mut nothing, 0, 0),
            INVALID_PARAM,
            "0 bytes",
        );
        refused(
            aclrtMalloc(&raw mut nothing, 64, 9),
            INVALID_PARAM,
            "policy 9",
        );
    }
    assert_eq!(control::live().allocations, 0);
}

#[test]
fn memory_to_be_divided_is_rounded_to_32_bytes() {
    let device = Device::new();
    let mut block = null_mut();
    // SAFETY: a valid out parameter.
    unsafe {
        assert_eq!(aclrtMallocAlign32(&raw mut block, 33, 0), 0);
        assert_eq!(control::live().bytes, 64);
        refused(
            aclrtMallocAlign32(&raw mut block, 0, 0),
            INVALID_PARAM,
            "0 bytes",
        );
        assert_eq!(aclrtFree(block), 0);
    }
    drop(device);
}

#[test]
fn streams_take_the_flags_for_quick_launches_and_waits() {
    let device = Device::new();
    let mut stream = null_mut();
    // SAFETY: a valid out parameter, and a stream that was created.
    unsafe {
        assert_eq!(aclrtCreateStreamWithConfig(&raw mut stream, 0, 3), 0);
        assert_eq!(aclrtSynchronizeStream(stream), 0);
        assert_eq!(aclrtDestroyStream(stream), 0);
        // A persistent one runs nothing by itself.
        refused(
            aclrtCreateStreamWithConfig(&raw mut stream, 0, 4),
            NOT_SUPPORTED,
            "flag 0x4",
        );
    }
    drop(device);
}

#[test]
fn memory_is_limited_and_counted() {
    let device = Device::new();
    control::set_memory_limit(Some(1000));
    let first = device.alloc(600);
    let mut second = null_mut();
    let (mut free, mut total) = (0, 0);
    // SAFETY: valid out parameters.
    unsafe {
        refused(
            aclrtMalloc(&raw mut second, 401, 0),
            OUT_OF_MEMORY,
            "600 of 1000 bytes",
        );
        assert_eq!(aclrtGetMemInfo(1, &raw mut free, &raw mut total), 0);
    }
    assert_eq!((free, total), (400, 1000));
    device.free(first).expect("free");
    device.alloc(401);
    let live = control::live();
    assert_eq!(
        (live.allocations, live.bytes, live.peak_bytes),
        (1, 401, 600)
    );
}

#[test]
fn what_is_alive_at_the_end_is_reported() {
    let device = Device::new();
    device.alloc(100);
    host_block(10);
    let mut event = null_mut();
    // SAFETY: a valid out parameter.
    unsafe {
        assert_eq!(aclrtCreateEvent(&raw mut event), 0);
        assert_eq!(aclFinalize(), 0);
    }
    let messages: Vec<String> = control::take_violations()
        .into_iter()
        .map(|v| v.to_string())
        .collect();
    assert_eq!(messages.len(), 5, "{messages:#?}");
    for what in [
        "1 device allocations",
        "1 page-locked host blocks",
        "1 streams",
        "1 events",
        "1 uses of a device",
    ] {
        assert!(
            messages
                .iter()
                .any(|message| message.starts_with("[leak]") && message.contains(what)),
            "{what}: {messages:#?}"
        );
    }
}

#[test]
fn handles_know_what_they_are() {
    let device = Device::new();
    let mut event = null_mut();
    let stale = new_stream();
    // SAFETY: wrong handles are errors.
    unsafe {
        assert_eq!(aclrtCreateEvent(&raw mut event), 0);
        refused(
            aclrtSynchronizeStream(event),
            INVALID_HANDLE,
            "is a event handle, a stream is expected",
        );
        assert_eq!(aclrtDestroyStream(stale), 0);
        refused(
            aclrtSynchronizeStream(stale),
            INVALID_HANDLE,
            "was destroyed before",
        );
        refused(
            aclrtDestroyStream(stale),
            INVALID_HANDLE,
            "was destroyed before",
        );
        refused(
            aclrtRecordEvent(0x1234 as *mut c_void, device.stream),
            INVALID_HANDLE,
            "no such handle was ever made",
        );
        assert_eq!(aclrtDestroyEvent(event), 0);
        refused(
            aclrtDestroyEvent(event),
            INVALID_HANDLE,
            "was destroyed before",
        );
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn streams_defer_and_time_out() {
    let device = Device::new();
    let address = device.upload(&[1_u8; 64]);
    let host = host_block(64);
    control::hold_streams(true);
    // SAFETY: the host block has 64 bytes and lives until the stream is done.
    unsafe {
        host.write_bytes(7, 64);
        assert_eq!(
            aclrtMemcpyAsync(
                host.cast(),
                64,
                address as *const c_void,
                64,
                DEVICE_TO_HOST,
                device.stream
            ),
            0
        );
        refused(
            aclrtSynchronizeStreamWithTimeout(device.stream, 20),
            TIMEOUT,
            "still busy",
        );
        assert_eq!(host.read(), 7, "nothing has run");
        control::hold_streams(false);
        assert_eq!(aclrtSynchronizeStream(device.stream), 0);
        assert_eq!(host.read(), 1);
        assert_eq!(aclrtFreeHost(host.cast()), 0);
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn errors_of_work_surface_at_synchronisation() {
    let device = Device::new();
    let address = device.alloc(64);
    control::hold_streams(true);
    // SAFETY: wrong use is an error or a violation.
    unsafe {
        assert_eq!(
            aclrtMemsetAsync(address as *mut c_void, 64, 0, 64, device.stream),
            0,
            "the call itself succeeds"
        );
        assert_eq!(aclrtFree(address as *mut c_void), 0);
        one_violation("stream-order", "is freed while aclrtMemsetAsync");
        control::hold_streams(false);
        refused(
            aclrtSynchronizeStream(device.stream),
            INVALID_PARAM,
            "were freed",
        );
        refused(
            aclrtSynchronizeStream(device.stream),
            INVALID_PARAM,
            "were freed",
        );
    }
}

#[test]
fn a_copy_that_does_not_wait_for_the_stream_is_reported() {
    let device = Device::new();
    let address = device.upload(&[1_u8; 64]);
    // SAFETY: a device range of 64 bytes.
    let code = unsafe { aclrtMemsetAsync(address as *mut c_void, 64, 5, 64, device.stream) };
    assert_eq!(code, 0);
    // Whichever runs first, the program has no right to rely on it.
    let _: Vec<u8> = device.download(address, 64);
    device.synchronize().expect("synchronises");
    one_violation("stream-order", "synchronise or wait for an event");
    let set: Vec<u8> = device.download(address, 64);
    assert_eq!(set, [5; 64]);
    assert_eq!(control::violations(), []);
}

#[test]
fn streams_are_ordered_by_events_only() {
    let device = Device::new();
    let address = device.upload(&[1_u8; 64]);
    let other = new_stream();
    let mut event = null_mut();
    // SAFETY: a device range of 64 bytes; valid handles.
    unsafe {
        assert_eq!(aclrtCreateEvent(&raw mut event), 0);
        let set = |stream, value| {
            assert_eq!(
                aclrtMemsetAsync(address as *mut c_void, 64, value, 64, stream),
                0
            )
        };
        set(device.stream, 2);
        assert_eq!(aclrtRecordEvent(event, device.stream), 0);
        assert_eq!(aclrtStreamWaitEvent(other, event), 0);
        set(other, 3);
        assert_eq!(aclrtSynchronizeStream(other), 0);
        assert_eq!(device.download::<u8>(address, 64), [3; 64]);
        assert_eq!(control::violations(), []);

        // The same without the event.
        set(device.stream, 4);
        set(other, 5);
        assert_eq!(aclrtSynchronizeStream(other), 0);
        assert_eq!(aclrtSynchronizeStream(device.stream), 0);
        one_violation("stream-order", "aclrtMemsetAsync writes bytes [0, 64)");
        assert_eq!(aclrtSynchronizeEvent(event), 0);
        assert_eq!(aclrtDestroyEvent(event), 0);
    }
}

#[test]
fn asynchronous_copies_need_page_locked_memory_that_stays() {
    let device = Device::new();
    let address = device.upload(&[1_u8; 64]);
    let mut pageable = [0_u8; 64];
    let host = host_block(64);
    // SAFETY: host buffers are as long as the calls state.
    unsafe {
        let copy = |to: *mut c_void| {
            aclrtMemcpyAsync(
                to,
                64,
                address as *const c_void,
                64,
                DEVICE_TO_HOST,
                device.stream,
            )
        };
        refused(
            copy(pageable.as_mut_ptr().cast()),
            INVALID_PARAM,
            "aclrtMallocHost",
        );
        assert_eq!(copy(host.cast()), 0);
        assert_eq!(aclrtFreeHost(host.cast()), 0);
        one_violation("stream-order", "may still use it");
        refused(aclrtFreeHost(host.cast()), INVALID_PARAM, "freed before");
    }
    device.synchronize().expect("synchronises");
}

#[test]
fn page_locked_memory_is_not_rewritten_under_a_queued_copy() {
    let device = Device::new();
    let address = device.alloc(64);
    let host = host_block(128);
    for held in [true, false] {
        control::hold_streams(held);
        // SAFETY: the block has 128 bytes and lives until the stream is done.
        unsafe {
            let copy = |from: *mut u8| {
                aclrtMemcpyAsync(
                    address as *mut c_void,
                    64,
                    from.cast(),
                    64,
                    HOST_TO_DEVICE,
                    device.stream,
                )
            };
            assert_eq!(copy(host), 0);
            // The host may write beside the copied bytes.
            host.add(64).write(!host.add(64).read());
            host.add(63).write(!host.add(63).read());
            control::hold_streams(false);
            device.synchronize().expect("synchronises");
            one_violation("host-rewritten", "64 page-locked bytes");
            // After the wait it may.
            host.write(!host.read());
            assert_eq!(copy(host), 0);
            device.synchronize().expect("synchronises");
            // A write there by the device itself is no fault.
            control::hold_streams(held);
            assert_eq!(copy(host), 0);
            let back = aclrtMemcpyAsync(
                host.cast(),
                64,
                address as *const c_void,
                64,
                DEVICE_TO_HOST,
                device.stream,
            );
            assert_eq!(back, 0);
            assert_eq!(copy(host), 0);
            control::hold_streams(false);
            device.synchronize().expect("synchronises");
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn a_wait_that_is_ignored_counts_as_none() {
    let device = Device::new();
    let other = new_stream();
    let (address, mut event) = (device.upload(&[1_u8; 64]), null_mut());
    // SAFETY: a device range of 64 bytes; valid handles.
    unsafe {
        let set = |stream| aclrtMemsetAsync(address as *mut c_void, 64, 5, 64, stream);
        assert_eq!(aclrtCreateEvent(&raw mut event), 0);
        control::ignore_calls("aclrtStreamWaitEvent");
        assert_eq!(set(device.stream), 0);
        assert_eq!(aclrtRecordEvent(event, device.stream), 0);
        assert_eq!(aclrtStreamWaitEvent(other, event), 0);
        assert_eq!(set(other), 0);
        assert_eq!(aclrtSynchronizeStream(device.stream), 0);
        assert_eq!(aclrtSynchronizeStream(other), 0);
        one_violation("stream-order", "wait for an event");
        control::ignore_calls("aclrtSynchronizeStream");
        assert_eq!(set(other), 0);
        assert_eq!(aclrtSynchronizeStream(other), 0);
        assert_eq!(aclrtFree(address as *mut c_void), 0);
        one_violation("stream-order", "is freed while aclrtMemsetAsync");
        assert_eq!(aclrtDestroyStream(other), 0);
        one_violation("stream-destroyed-busy", "call aclrtSynchronizeStream first");
    }
}

#[test]
fn writing_past_a_host_block_is_found_when_it_is_freed() {
    let _device = Device::new();
    let host = host_block(10);
    // SAFETY: the byte after the block is a guard byte of the simulator's own allocation.
    unsafe {
        host.add(10).write(0);
        assert_eq!(aclrtFreeHost(host.cast()), 0);
    }
    one_violation("host-overrun", "outside the 10 bytes");
}

#[test]
fn destroying_a_busy_stream_is_reported() {
    let device = Device::new();
    let address = device.alloc(64);
    let other = new_stream();
    // SAFETY: a device range of 64 bytes.
    unsafe {
        assert_eq!(
            aclrtMemsetAsync(address as *mut c_void, 64, 0, 64, other),
            0
        );
        assert_eq!(aclrtDestroyStream(other), 0);
    }
    one_violation("stream-destroyed-busy", "call aclrtSynchronizeStream first");
}

/// A server has a thread for each session, with its own part of the host's memory.
#[cfg(target_os = "linux")]
#[test]
fn freed_memory_of_other_threads_returns_to_the_system() {
    const THREADS: usize = 8;
    fn resident_kib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").expect("proc");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1));
        kib.and_then(|kib| kib.parse().ok()).expect("kB")
    }
    let _device = Device::new();
    let before = resident_kib();
    let (all, round) = (std::sync::Barrier::new(THREADS), 0..3);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in round.clone() {
                    // SAFETY: a device of the machine, and valid out parameters; each block is freed
                    // once.
                    unsafe {
                        assert_eq!(aclrtSetDevice(0), 0);
                        let blocks = [(); 8].map(|()| {
                            let mut block = null_mut();
                            assert_eq!(aclrtMalloc(&raw mut block, 2 << 20, 0), 0);
                            block
                        });
                        all.wait();
                        for block in blocks {
                            assert_eq!(aclrtFree(block), 0);
                        }
                    }
                    all.wait();
                }
            });
        }
    });
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 24 << 10, "{grown} KiB of {}", (THREADS * 16) << 10);
}

/// A server makes any number of calls.
#[test]
fn the_last_calls_are_kept_and_no_more() {
    const KEPT: usize = 1 << 16;
    let _device = Device::new();
    control::clear_calls();
    let mut count = 0;
    for _ in 0..KEPT {
        // SAFETY: a valid out parameter.
        assert_eq!(unsafe { aclrtGetDeviceCount(&raw mut count) }, 0);
    }
    assert_eq!(control::calls().len(), KEPT);
    let mut device = -1;
    // SAFETY: a valid out parameter.
    assert_eq!(unsafe { aclrtGetDevice(&raw mut device) }, 0);
    let calls = control::calls();
    assert_eq!(calls.len(), KEPT);
    assert_eq!(calls[KEPT - 1].function, "aclrtGetDevice");
}

#[test]
fn the_nth_call_fails_on_request() {
    let device = Device::new();
    control::inject_fault("aclrtMalloc", 2, OUT_OF_MEMORY);
    let first = device.alloc(8);
    let mut second = null_mut();
    // SAFETY: a valid out parameter.
    let code = unsafe { aclrtMalloc(&raw mut second, 8, 0) };
    refused(code, OUT_OF_MEMORY, "injected");
    let third = device.alloc(8);
    assert_ne!(first, third);
    let calls = control::calls();
    let codes: Vec<i32> = calls
        .iter()
        .filter(|call| call.function == "aclrtMalloc")
        .map(|call| call.code)
        .collect();
    assert_eq!(codes, [0, OUT_OF_MEMORY, 0]);
}

#[test]
fn times_are_not_reported() {
    let device = Device::new();
    let mut event = null_mut();
    let mut ms = 0.0;
    // SAFETY: valid handles and out parameters.
    unsafe {
        assert_eq!(aclrtCreateEvent(&raw mut event), 0);
        assert_eq!(aclrtRecordEvent(event, device.stream), 0);
        assert_eq!(aclrtSynchronizeEvent(event), 0);
        refused(
            aclrtEventElapsedTime(&raw mut ms, event, event),
            NOT_SUPPORTED,
            "reports no times",
        );
    }
}

#[test]
fn binaries_for_another_machine_are_refused() {
    let device = Device::new();
    let mut elf = vec![0_u8; 64];
    let says = |bytes: &[u8]| device.load(bytes).expect_err("refused").1;
    assert!(says(&elf).contains("not an ELF object"));
    elf[..4].copy_from_slice(b"\x7fELF");
    elf[18..20].copy_from_slice(&0x1029_u16.to_le_bytes());
    assert!(says(&elf).contains("compiled for the device"));
    elf[18..20].copy_from_slice(&8_u16.to_le_bytes());
    assert!(says(&elf).contains("ELF machine 8"));
}

#[test]
fn every_exported_function_is_found_by_name() {
    for export in ascend_sim::exports() {
        let name = std::ffi::CString::new(export.name).expect("a C name");
        assert_eq!(ascend_sim::symbol(&name), export.address);
        assert!(!export.address.is_null());
    }
    assert!(ascend_sim::symbol(c"aclrtNoSuchFunction").is_null());
}

#[test]
fn signatures_name_types_whose_passing_is_known() {
    let known = [
        "i8", "u8", "i32", "u32", "i64", "u64", "usize", "f32", "f64", "bool",
    ];
    for export in ascend_sim::exports() {
        let (parameters, returns) = export
            .signature
            .strip_prefix("fn(")
            .and_then(|rest| rest.rsplit_once(')'))
            .expect("a function type");
        let returns = returns.trim().trim_start_matches("->").trim();
        let types = parameters.split(',').chain([returns]).map(str::trim);
        for ty in types.filter(|ty| !ty.is_empty()) {
            assert!(ty.starts_with('*') || known.contains(&ty), "{export:?}");
        }
    }
}
