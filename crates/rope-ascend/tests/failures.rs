//! Each runtime call made to fail in turn, memory that runs out, and libraries that are missing.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(unsafe_code, reason = "a resolver of our own")]

mod support;

use ascend_sim::{Session, control};
use half::bf16;
use rope_ascend::loader::Api;
use rope_ascend::rope::{
    AngleGradient, Angles, Direction, Kernels, Layout, Operand, Pairing, Positions, Rotary,
    Rotation, Rotator, Table, View,
};
use rope_ascend::safe::Runtime;
use rope_ascend::{AscendError, LoadError};
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use support::{api, kernel_binary, striped};

const INJECTED: i32 = 500_000;
const TEARDOWN: [&str; 6] = [
    "aclrtFree",
    "aclrtDestroyStream",
    "aclrtDestroyEvent",
    "aclrtBinaryUnLoad",
    "aclrtResetDevice",
    "aclFinalize",
];

/// Forward, adjoint and angle gradient of q and k.
fn train_step(runtime: &Runtime, binary: &[u8]) -> rope_ascend::Result<Vec<bf16>> {
    let stream = runtime.device(0)?.stream()?;
    let kernels = Arc::new(Kernels::load(&stream, binary)?);
    let rotary = Rotary::new(32, Pairing::Adjacent)?.with_lanes(striped(16, 3))?;
    let rotator = Rotator::new(&stream, kernels, rotary);
    let table = Table::new(&stream, &[0.5; 16 * 8], &[0.25; 16 * 8], 16)?;
    let positions = Positions::new(&stream, &[1; 3 * 6], 3)?;
    let view = |heads| View::contiguous(Layout::Tnd, 1, 6, heads, 32);
    let x = stream.upload(&vec![bf16::ONE; 6 * 2 * 32])?;
    let mut q = stream.zeros::<bf16>(6 * 2 * 32)?;
    stream.copy(&x, &mut q)?;
    let mut k = stream.upload(&vec![bf16::ONE; 6 * 32])?;
    for direction in [Direction::Forward, Direction::Adjoint] {
        rotator.rotate(&mut Rotation {
            direction,
            batch: 1,
            seq: 6,
            q: Operand::InPlace(&mut q, view(2)),
            k: Some(Operand::InPlace(&mut k, view(1))),
            angles: Angles::Table(&table, &positions),
        })?;
    }
    let event = stream.event()?;
    stream.record(&event)?;
    stream.wait_for(&event)?;
    event.synchronize()?;
    let gradient = rotator.angle_gradient(&AngleGradient {
        batch: 1,
        seq: 6,
        q: (&x, view(2)),
        k: None,
        q_grad: (&q, view(2)),
        k_grad: None,
    })?;
    stream.synchronize()?;
    drop(gradient);
    stream.trim()?;
    stream.download(&q)
}

#[test]
fn every_call_fails_in_turn() {
    let binary = kernel_binary(2201);
    let _session = Session::begin();
    let calls = {
        let runtime = Runtime::start(api()).unwrap();
        train_step(&runtime, &binary).unwrap();
        runtime.close().unwrap();
        control::calls()
    };
    let mut nth = std::collections::HashMap::<&str, u64>::new();
    let mut tried = 0;
    for call in calls {
        if call.function == "aclGetRecentErrMsg" {
            continue;
        }
        let nth = nth.entry(call.function).or_default();
        *nth += 1;
        control::reset();
        control::inject_fault(call.function, *nth, INJECTED);
        let outcome = Runtime::start(api()).and_then(|runtime| {
            let step = train_step(&runtime, &binary).map(drop);
            step.and(runtime.close())
        });
        // An error from it says that the thread has no device yet: it is given one.
        if call.function == "aclrtGetDevice" {
            outcome.expect("the device is set once more");
            continue;
        }
        let error =
            outcome.expect_err(&format!("call {nth} of {} failed unnoticed", call.function));
        let text = error.to_string();
        let named = text.contains(call.function)
            || (call.function == "aclrtLaunchKernelWithHostArgs"
                && matches!(error, AscendError::Launch { .. }));
        assert!(named, "call {nth} of {}: {text}", call.function);
        if !TEARDOWN.contains(&call.function) {
            let live = control::live();
            let left = (
                live.allocations,
                live.streams,
                live.events,
                live.binaries,
                live.host_blocks,
            );
            assert_eq!(
                left,
                (0, 0, 0, 0, 0),
                "left behind after call {nth} of {} failed",
                call.function
            );
        }
        tried += 1;
    }
    assert!(tried > 60, "only {tried} calls were tried");
}

#[test]
fn memory_that_runs_out_is_retried_after_trimming() {
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.stream().unwrap();
    control::set_memory_limit(Some(12 << 20));
    let first = stream.alloc::<u8>(8 << 20).unwrap();
    assert_eq!(device.memory_use().live_bytes, 8 << 20);
    drop(first);
    assert_eq!(device.memory_use().cached_bytes, 8 << 20);
    // Fits only once the cached block is given back.
    let second = stream.alloc::<u8>(11 << 20).unwrap();
    let memory = device.memory_use();
    assert_eq!((memory.live_bytes, memory.cached_bytes), (11 << 20, 0));
    assert_eq!(
        (memory.peak_bytes, memory.reserved_bytes),
        (11 << 20, 11 << 20)
    );
    match stream.alloc::<u8>(4 << 20) {
        Err(AscendError::OutOfMemory {
            requested_bytes,
            live_bytes,
            ..
        }) => {
            assert_eq!((requested_bytes, live_bytes), (4 << 20, 11 << 20));
        }
        other => panic!("{other:?}"),
    }
    drop(second);
    stream.alloc::<u8>(4 << 20).unwrap();
    drop((stream, device));
    runtime.close().unwrap();
}

#[test]
fn a_teardown_failure_comes_out_of_the_next_call() {
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.stream().unwrap();
    let event = stream.event().unwrap();
    control::inject_fault("aclrtDestroyEvent", 1, INJECTED);
    drop(event);
    let error = stream.synchronize().unwrap_err();
    assert!(error.to_string().contains("aclrtDestroyEvent"), "{error}");
    stream.synchronize().unwrap();
    assert!(matches!(
        runtime.clone().close(),
        Err(AscendError::StillInUse { .. })
    ));
}

#[test]
fn missing_libraries_name_what_was_tried() {
    let error = Runtime::open(Some(Path::new("/nonexistent/cann"))).unwrap_err();
    let AscendError::Load(LoadError::LibraryNotFound { tried, .. }) = &error else {
        panic!("{error:?}")
    };
    let names: Vec<String> = tried
        .iter()
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert_eq!(
        names,
        [
            "/nonexistent/cann/libacl_rt.so",
            "/nonexistent/cann/libascendcl.so"
        ]
    );
    assert!(error.to_string().contains("ASCEND_HOME_PATH"), "{error}");
}

#[test]
fn compiling_without_the_compiler_library_names_its_functions() {
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let error = Kernels::compile(&stream).unwrap_err();
    assert!(matches!(error, AscendError::Load(_)), "{error:?}");
    assert!(error.to_string().contains("aclrtcCompileProg"), "{error}");
    drop(stream);
    runtime.close().unwrap();
}

#[test]
fn missing_symbols_are_named() {
    let without = |missing: &'static str| {
        // SAFETY: the simulator's functions, less one.
        unsafe {
            Api::from_resolver("a stub", move |name| {
                if name.to_bytes() == missing.as_bytes() {
                    std::ptr::null::<c_void>()
                } else {
                    ascend_sim::symbol(name)
                }
            })
        }
    };
    match without("aclrtMalloc") {
        Err(LoadError::SymbolsMissing { symbols, .. }) => assert_eq!(symbols, ["aclrtMalloc"]),
        other => panic!("{other:?}"),
    }
    let binary = kernel_binary(2201);
    let _session = Session::begin();
    let runtime = Runtime::start(without("aclrtLaunchKernelWithHostArgs").unwrap()).unwrap();
    assert!(
        runtime
            .api()
            .missing_symbols()
            .contains(&"aclrtLaunchKernelWithHostArgs")
    );
    match train_step(&runtime, &binary) {
        Err(AscendError::SymbolUnavailable {
            symbol, library, ..
        }) => {
            assert_eq!(
                (symbol, library.as_str()),
                ("aclrtLaunchKernelWithHostArgs", "a stub")
            );
        }
        other => panic!("{other:?}"),
    }
    runtime.close().unwrap();
}

#[test]
fn shapes_that_do_not_fit_are_refused_before_anything_is_queued() {
    let binary = kernel_binary(2201);
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let kernels = Arc::new(Kernels::load(&stream, &binary).unwrap());
    let rotator = Rotator::new(
        &stream,
        kernels.clone(),
        Rotary::new(32, Pairing::Half).unwrap(),
    );
    let angles = stream.zeros::<f32>(6 * 32).unwrap();
    let few = stream.zeros::<f32>(5 * 32).unwrap();
    let mut q = stream.zeros::<f32>(6 * 2 * 32).unwrap();
    let view = View::contiguous(Layout::Tnd, 1, 6, 2, 32);
    let attempts = [
        ("within its buffer", View { offset: 1, ..view }, &angles),
        (
            "within its buffer",
            View {
                token_stride: u64::MAX,
                ..view
            },
            &angles,
        ),
        (
            "without overlap",
            View {
                head_stride: 31,
                ..view
            },
            &angles,
        ),
        ("at least one head", View { heads: 0, ..view }, &angles),
        ("6 rows", view, &few),
    ];
    for (expected, view, angles) in attempts {
        let error = rotator
            .rotate(&mut Rotation {
                direction: Direction::Forward,
                batch: 1,
                seq: 6,
                q: Operand::InPlace(&mut q, view),
                k: None,
                angles: Angles::PerToken(angles),
            })
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(Rotary::partial(32, 0..7, Pairing::Half).is_err());
    assert!(Rotary::partial(32, 0..6, Pairing::Quarter).is_err());
    assert!(Rotary::partial(32, 16..48, Pairing::Half).is_err());
    assert!(Positions::new(&stream, &[0, -1], 1).is_err());
    let wrong_lanes = Rotary::new(32, Pairing::Half)
        .unwrap()
        .with_lanes(striped(15, 3));
    assert!(wrong_lanes.is_err());
    // A position beyond the table.
    let rotary = Rotary::new(32, Pairing::Half)
        .unwrap()
        .with_lanes(striped(16, 1))
        .unwrap();
    let gathering = Rotator::new(&stream, kernels, rotary);
    let table = Table::new(&stream, &[1.0; 64], &[1.0; 64], 16).unwrap();
    let positions = Positions::new(&stream, &[0, 1, 2, 3, 4, 0], 1).unwrap();
    let error = gathering
        .rotate(&mut Rotation {
            direction: Direction::Forward,
            batch: 1,
            seq: 6,
            q: Operand::InPlace(&mut q, view),
            k: None,
            angles: Angles::Table(&table, &positions),
        })
        .unwrap_err();
    assert!(
        error.to_string().contains("below the table's 4 rows"),
        "{error}"
    );
    assert!(control::launches().is_empty());
}
