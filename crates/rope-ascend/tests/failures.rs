//! Each runtime call fails in turn, memory runs out, and libraries are missing.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(unsafe_code, reason = "a resolver of our own")]

mod support;

use ascend_sim::{Session, control};
use half::bf16;
use rope_ascend::loader::Api;
use rope_ascend::rope::{
    AngleGradient, Heads, KernelType, Kernels, Operand, Rotation, Rotator, Unit,
};
use rope_ascend::safe::{Pooling, Runtime};
use rope_ascend::{AscendError, LoadError};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing, Strides};
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use support::{Bench, angles, api, api_with, kernel_binary};

const INJECTED: i32 = 500_000;
const TEARDOWN: [&str; 5] = [
    "aclrtFree",
    "aclrtDestroyStream",
    "aclrtBinaryUnLoad",
    "aclrtResetDevice",
    "aclFinalize",
];

/// Six tokens of 32 channels a head.
fn heads<M>(memory: M, heads: usize) -> Heads<M> {
    Heads {
        memory,
        offset: 0,
        layout: HeadsLayout::contiguous(Layout::Tnd, 1, 6, heads, 32),
    }
}

/// Forward, adjoint and angle gradient of q and k.
fn train_step(runtime: &Runtime, binary: &[u8]) -> rope_ascend::Result<Vec<bf16>> {
    let stream = runtime.device(0)?.stream()?;
    let kernels = Arc::new(Kernels::load(&stream, binary)?);
    let geometry = Geometry::new(32, 32, 0, Pairing::Adjacent, false)?;
    let rotator = Rotator::new(&stream, kernels.clone(), geometry)?;
    let rows = stream.upload(&[[0.5_f32; 16], [0.25; 16]].concat().repeat(6))?;
    let x = stream.upload(&vec![bf16::ONE; 6 * 2 * 32])?;
    let mut q = stream.zeros::<bf16>(6 * 2 * 32)?;
    stream.copy(&x, &mut q)?;
    let mut k = stream.upload(&vec![bf16::ONE; 6 * 32])?;
    for direction in [Direction::Forward, Direction::Adjoint] {
        rotator.rotate(Rotation {
            element: KernelType::Bf16,
            direction,
            q: Operand::InPlace(heads(&mut q, 2)),
            k: Some(Operand::InPlace(heads(&mut k, 1))),
            angles: angles(&rows, 6),
        })?;
    }
    rotator.rotate(Rotation {
        element: KernelType::Bf16,
        direction: Direction::Forward,
        q: Operand::Into {
            from: heads(&x, 2),
            to: heads(&mut q, 2),
        },
        k: None,
        angles: angles(&rows, 6),
    })?;
    drop((stream.download(&x)?, stream.download(&rows)?));
    rotator.by(Unit::Cube).rotate(Rotation {
        element: KernelType::Bf16,
        direction: Direction::Forward,
        q: Operand::InPlace(heads(&mut k, 1)),
        k: None,
        angles: angles(&rows, 6),
    })?;
    let rotator = Rotator::new(&stream, kernels, geometry)?;
    let mut gradient = stream.alloc::<f32>(6 * 2 * 16)?;
    rotator.angle_gradient(AngleGradient {
        element: KernelType::Bf16,
        q: [heads(&x, 2), heads(&q, 2)],
        k: None,
        out: &mut gradient,
    })?;
    stream.synchronize()?;
    drop((stream.download(&gradient)?, stream.download(&k)?));
    stream.trim()?;
    stream.download(&q)
}

#[test]
fn every_call_fails_in_turn() {
    every_call_fails_with(Pooling::Blocks);
}

#[test]
fn every_call_fails_in_turn_with_segments() {
    every_call_fails_with(Pooling::Segments);
}

fn every_call_fails_with(pooling: Pooling) {
    let api = || api_with(pooling);
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
            || (call.function.starts_with("aclrtLaunchKernelWith")
                && matches!(error, AscendError::Launch { .. }));
        assert!(named, "call {nth} of {}: {text}", call.function);
        if !TEARDOWN.contains(&call.function) {
            let live = control::live();
            let left = (
                live.allocations,
                live.streams,
                live.binaries,
                live.host_blocks,
            );
            assert_eq!(
                left,
                (0, 0, 0, 0),
                "not freed after call {nth} of {} failed",
                call.function
            );
        }
        tried += 1;
    }
    assert!(tried > 40, "only {tried} calls were tried");
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
    control::inject_fault("aclrtDestroyStream", 1, INJECTED);
    drop(device.stream().unwrap());
    let error = stream.synchronize().unwrap_err();
    assert!(error.to_string().contains("aclrtDestroyStream"), "{error}");
    stream.synchronize().unwrap();
    assert!(matches!(
        runtime.clone().close(),
        Err(AscendError::StillInUse { .. })
    ));
}

/// The runtime belongs to the process: it ends with the last of its users.
#[test]
fn a_runtime_that_was_started_twice_ends_once() {
    let _session = Session::begin();
    let [first, second] = [(); 2].map(|()| Runtime::start(api()).unwrap());
    first.close().unwrap();
    let stream = second.device(0).unwrap().stream().unwrap();
    assert_eq!(
        stream.download(&stream.upload(&[1.5f32]).unwrap()).unwrap(),
        [1.5]
    );
    drop(stream);
    second.close().unwrap();
    let calls = control::calls().into_iter();
    assert_eq!(
        calls.filter(|call| call.function == "aclFinalize").count(),
        1
    );
    assert_eq!(control::violations(), []);
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
}

/// Launches a kernel with an array of its arguments.
const ARRAY: &str = "aclrtLaunchKernelWithArgsArray";
/// The functions of both ways to launch.
static NEITHER: [&str; 5] = [
    ARRAY,
    "aclrtKernelArgsInit",
    "aclrtKernelArgsAppend",
    "aclrtKernelArgsFinalize",
    "aclrtLaunchKernelWithConfig",
];
/// Those that launch a kernel with its arguments in a list.
static LIST: &[&str] = NEITHER.split_at(1).1;

/// The simulator, less some functions.
fn lacking(functions: &'static [&'static str]) -> Api {
    // SAFETY: the simulator's functions, less some.
    let api = unsafe {
        Api::from_resolver("a stub", |name| {
            if functions.iter().any(|f| f.as_bytes() == name.to_bytes()) {
                std::ptr::null::<c_void>()
            } else {
                ascend_sim::symbol(name)
            }
        })
    };
    api.unwrap().with_pooling(Pooling::Blocks)
}

/// Rotates a head on `unit` with a runtime that lacks some functions: the functions of launches
/// that were called.
fn launches_lacking(
    machine: ascend_sim::Machine,
    functions: &'static [&'static str],
    unit: Unit,
) -> rope_ascend::Result<Vec<&'static str>> {
    let binary = kernel_binary(2201);
    let _session = Session::with_machine(machine);
    let runtime = Runtime::start(lacking(functions)).unwrap();
    let stream = runtime.device(0)?.stream()?;
    let kernels = Arc::new(Kernels::load(&stream, &binary)?);
    let geometry = Geometry::new(32, 32, 0, Pairing::Half, false)?;
    let rotator = Rotator::new(&stream, kernels, geometry)?.by(unit);
    // A quarter turn: x1 = -x2, x2 = x1.
    let rows = stream.upload(&[[0.0_f32; 16], [1.0; 16]].concat().repeat(6))?;
    let mut q = stream.upload(
        &[[bf16::ONE; 16], [bf16::from_f32(2.0); 16]]
            .concat()
            .repeat(6),
    )?;
    let rotated = rotator.rotate(Rotation {
        element: KernelType::Bf16,
        direction: Direction::Forward,
        q: Operand::InPlace(heads(&mut q, 1)),
        k: None,
        angles: angles(&rows, 6),
    });
    let found = rotated.and_then(|()| stream.download(&q));
    drop((rotator, rows, q, stream));
    runtime.close()?;
    assert_eq!(control::violations(), []);
    let expected = [[bf16::from_f32(-2.0); 16], [bf16::ONE; 16]].concat();
    assert_eq!(found?, expected.repeat(6));
    let calls = control::calls().into_iter().map(|call| call.function);
    Ok(calls
        .filter(|name| name.starts_with("aclrtLaunch"))
        .collect())
}

#[test]
fn each_kind_of_kernel_is_launched_by_the_way_that_gives_it_its_arguments() {
    use ascend_sim::Machine;
    let with = || Machine {
        sync_in_binary: true,
        ..Machine::ascend_910b()
    };
    let undescribed = || Machine {
        describes_parameters: false,
        ..Machine::ascend_910b()
    };
    let plain = Machine::ascend_910b;
    let list = "aclrtLaunchKernelWithConfig";
    for (machine, functions, unit, expected) in [
        (plain(), &[] as &[&str], Unit::Vector, ARRAY),
        (with(), &[], Unit::Vector, ARRAY),
        (undescribed(), &[], Unit::Vector, list),
        (plain(), &[ARRAY], Unit::Vector, list),
        (plain(), &["aclrtFunctionGetParamCount"], Unit::Vector, list),
        (plain(), LIST, Unit::Vector, ARRAY),
        (plain(), &[], Unit::Cube, list),
        (with(), &[], Unit::Cube, list),
        (plain(), &[ARRAY], Unit::Cube, list),
    ] {
        let what = format!("{machine:?} without {functions:?} on {unit:?}");
        let calls = launches_lacking(machine, functions, unit);
        assert_eq!(calls.unwrap(), [expected], "{what}");
    }
}

#[test]
fn kernels_that_cannot_be_launched_are_refused_by_name() {
    for (functions, unit, kernel, says) in [
        (
            &NEITHER[..],
            Unit::Vector,
            "rope_rotate_split_bf16",
            "lacks aclrtLaunchKernelWithArgsArray, aclrtKernelArgsInit, aclrtKernelArgsAppend, \
             aclrtKernelArgsFinalize, aclrtLaunchKernelWithConfig; install CANN 8.5 or later",
        ),
        (
            &LIST[2..3],
            Unit::Cube,
            "rope_matrix_bf16",
            "lacks aclrtKernelArgsFinalize; install CANN 8.5 or later, or rotate by the vector \
             cores",
        ),
    ] {
        let error = launches_lacking(ascend_sim::Machine::ascend_910b(), functions, unit);
        let error = error.unwrap_err();
        assert!(
            matches!(&error, AscendError::NoLaunch { kernel: found, library, .. }
                if found == kernel && library == "a stub"),
            "{error:?}"
        );
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_before_anything_is_queued() {
    let binary = kernel_binary(2201);
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let kernels = Arc::new(Kernels::load(&stream, &binary).unwrap());
    let geometry = |head_dim| Geometry::new(head_dim, 32, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(&stream, kernels.clone(), geometry(32)).unwrap();
    let rows = stream.zeros::<f32>(6 * 32).unwrap();
    let mut q = stream.zeros::<f32>(6 * 2 * 32).unwrap();
    let layout = HeadsLayout::contiguous(Layout::Tnd, 1, 6, 2, 32);
    let with = |strides: Strides| HeadsLayout { strides, ..layout };
    let far = Strides {
        seq: usize::MAX,
        ..layout.strides
    };
    let overlapping = Strides {
        head: 31,
        ..layout.strides
    };
    let attempts = [
        ("its buffer holds", 1, layout, angles(&rows, 6)),
        ("its buffer holds", 0, with(far), angles(&rows, 6)),
        ("overlap", 0, with(overlapping), angles(&rows, 6)),
        (
            "token and head",
            0,
            HeadsLayout { heads: 0, ..layout },
            angles(&rows, 6),
        ),
        (
            "head_dim",
            0,
            HeadsLayout {
                head_dim: 31,
                ..layout
            },
            angles(&rows, 6),
        ),
        ("6 rows", 0, layout, angles(&rows, 5)),
        // More than one batch's rows, and less than one for each token.
        (
            "6 rows, one for each token, or 3 shared",
            0,
            HeadsLayout::contiguous(Layout::Bsnd, 2, 3, 2, 32),
            angles(&rows, 4),
        ),
        (
            "within their memory",
            0,
            layout,
            rope_ascend::rope::AngleRows {
                offset_bytes: 4,
                ..angles(&rows, 6)
            },
        ),
    ];
    for (expected, offset, layout, angles) in attempts {
        let error = rotator
            .rotate(Rotation {
                element: KernelType::F32,
                direction: Direction::Forward,
                q: Operand::InPlace(Heads {
                    memory: &mut q,
                    offset,
                    layout,
                }),
                k: None,
                angles,
            })
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let x = stream.zeros::<f32>(6 * 2 * 32).unwrap();
    let mut other = stream.zeros::<f32>(6 * 2 * 32).unwrap();
    let of = |seq, heads| HeadsLayout::contiguous(Layout::Tnd, 1, seq, heads, 32);
    for (expected, into, layout) in [
        ("k has seq 5, q has 6", false, of(5, 2)),
        ("its output or gradient has 1", true, of(6, 1)),
    ] {
        let other = Heads {
            memory: &mut *other,
            offset: 0,
            layout,
        };
        let (q, k) = if into {
            let (from, to) = (heads(&*x, 2), other);
            (Operand::Into { from, to }, None)
        } else {
            let k = Operand::InPlace(other);
            (Operand::InPlace(heads(&mut q, 2)), Some(k))
        };
        let rotated = rotator.rotate(Rotation {
            element: KernelType::F32,
            direction: Direction::Forward,
            q,
            k,
            angles: angles(&rows, 6),
        });
        let error = rotated.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(matches!(
        Rotator::new(&stream, kernels, geometry(1025)),
        Err(AscendError::KernelLimit { found: 1025, .. })
    ));
    assert!(control::launches().is_empty());
}

#[test]
fn trimming_frees_nothing_that_another_thread_has_just_used() {
    for pooling in [Pooling::Blocks, Pooling::Segments] {
        let _session = Session::begin();
        let runtime = Runtime::start(api_with(pooling)).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let other = stream.clone();
        std::thread::scope(|scope| {
            let user = scope.spawn(move || {
                for _ in 0..20_000 {
                    // Queued on the stream, and back in its pool before it has run.
                    drop(other.zeros::<f32>(256).unwrap());
                }
            });
            while !user.is_finished() {
                stream.trim().unwrap();
            }
        });
        assert_eq!(control::violations(), [], "{pooling:?}");
    }
}

#[test]
fn trimming_frees_nothing_that_came_back_during_its_wait() {
    for pooling in [Pooling::Blocks, Pooling::Segments] {
        let _session = Session::begin();
        let runtime = Runtime::start(api_with(pooling)).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        control::hold_streams(true);
        let from = stream.zeros::<f32>(256).unwrap();
        let mut to = stream.zeros::<f32>(256).unwrap();
        let other = stream.clone();
        let trimming = std::thread::spawn(move || other.trim());
        // Long enough for it to wait for the two fillings, and for nothing after them.
        std::thread::sleep(std::time::Duration::from_millis(200));
        stream.copy(&from, &mut to).unwrap();
        drop((from, to));
        control::hold_streams(false);
        trimming.join().unwrap().unwrap();
        assert_eq!(control::violations(), [], "{pooling:?}");
    }
}

#[test]
fn memory_of_another_stream_is_refused() {
    let binary = kernel_binary(2201);
    let _session = Session::begin();
    let runtime = Runtime::start(api()).unwrap();
    let device = runtime.device(0).unwrap();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let kernels = Arc::new(Kernels::load(&stream, &binary).unwrap());
    let geometry = Geometry::new(32, 32, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(&stream, kernels, geometry).unwrap();
    let refused = |outcome: rope_ascend::Result<()>| {
        let error = outcome.expect_err("the memory is another stream's");
        assert!(error.to_string().contains("another stream's"), "{error}");
    };
    let rows = [&stream, &other].map(|of| of.upload(&[0.5_f32; 6 * 32]).unwrap());
    let mut tensors = [&stream, &other].map(|of| of.zeros::<bf16>(6 * 2 * 32).unwrap());
    other.synchronize().unwrap();
    for (q, angle) in [(0, 1), (1, 0)] {
        refused(rotator.rotate(Rotation {
            element: KernelType::Bf16,
            direction: Direction::Forward,
            q: Operand::InPlace(heads(&mut tensors[q], 2)),
            k: None,
            angles: angles(&rows[angle], 6),
        }));
    }
    let [own, foreign] = &mut tensors;
    refused(stream.copy(foreign, own));
    refused(stream.download(foreign).map(drop));
    assert!(control::launches().is_empty());
}

#[test]
fn what_the_cube_cores_do_not_rotate_is_refused_by_name() {
    let a2 = ascend_sim::Machine::ascend_910b;
    let a5 = ascend_sim::Machine::ascend_950;
    for (machine, element, pairing, channels, says) in [
        (
            a2(),
            KernelType::F32,
            Pairing::Half,
            64,
            "f16 and bf16, found f32",
        ),
        (
            a5(),
            KernelType::Bf16,
            Pairing::Half,
            64,
            "on dav-2201, found dav-3510",
        ),
        (
            a2(),
            KernelType::Bf16,
            Pairing::Half,
            178,
            "at most 176 channels with Half pairs",
        ),
        (
            a2(),
            KernelType::F16,
            Pairing::InterleaveHalf,
            130,
            "at most 128 channels",
        ),
    ] {
        let bench = Bench::new(machine);
        let stream = &bench.stream;
        let geometry = Geometry::new(channels, channels, 0, pairing, false).unwrap();
        let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
        let rotator = rotator.by(Unit::Cube);
        let rows = stream.upload(&vec![0.5_f32; 6 * channels]).unwrap();
        let mut q = stream.zeros::<f32>(6 * channels).unwrap();
        let layout = HeadsLayout::contiguous(Layout::Tnd, 1, 6, 1, channels);
        let outcome = rotator.rotate(Rotation {
            element,
            direction: Direction::Forward,
            q: Operand::InPlace(Heads {
                memory: &mut q,
                offset: 0,
                layout,
            }),
            k: None,
            angles: angles(&rows, 6),
        });
        let error = outcome.expect_err(says);
        assert!(matches!(error, AscendError::CubeLimit { .. }), "{error:?}");
        assert!(error.to_string().contains(says), "{error}");
        assert!(control::launches().is_empty());
        drop((rotator, q, rows));
        bench.finish();
    }
}

/// Programs that forgot to wait: the calls that this crate makes for them are ignored.
#[test]
fn memory_that_is_given_up_without_a_wait_is_found() {
    let trained = |ignored: &str| {
        let binary = kernel_binary(2201);
        let _session = Session::begin();
        control::ignore_calls(ignored);
        let runtime = Runtime::start(api()).unwrap();
        train_step(&runtime, &binary).unwrap();
        runtime.close().unwrap();
        let kinds = control::violations().into_iter().map(|v| v.kind);
        kinds.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(trained("aclrtEventElapsedTime").len(), 0);
    let found = trained("aclrtSynchronizeStream");
    for kind in [
        "stream-order",
        "binary-unloaded-busy",
        "stream-destroyed-busy",
    ] {
        assert!(found.contains(kind), "{kind}: {found:?}");
    }
}
