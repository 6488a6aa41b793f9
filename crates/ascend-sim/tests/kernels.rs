//! Kernels on the simulator: a correct one is not reported, and each fault is named.

#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

mod support;

use std::ffi::c_void;

use ascend_sim::abi::runtime::*;
use ascend_sim::{Machine, control};
use support::{Device, compile, compile_for, one_violation};

#[test]
fn a_correct_kernel_computes_and_reports_nothing() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let elements = 1000_u32;
    let x: Vec<f32> = (0..elements).map(|i| i as f32).collect();
    let (input, output) = (device.upload(&x), device.alloc(4 * elements as usize));
    device
        .launch(
            &library,
            "add_tiles",
            3,
            &[input, output, u64::from(elements) | 128 << 32],
        )
        .expect("runs");
    let y: Vec<f32> = device.download(output, elements as usize);
    for (i, y) in y.iter().enumerate() {
        assert_eq!(*y, 2.0 * i as f32 + 1.0);
    }
    let report = control::launches().pop().expect("one launch");
    assert_eq!(report.counters.gm_bytes_read, 4000);
    assert_eq!(report.counters.gm_bytes_written, 4000);
    assert_eq!(report.counters.gm_transfers_in, 8);
    assert_eq!(report.counters.vector_instructions, 16);
    assert_eq!(report.counters.vector_repeats, 2 * (7 * 2 + 2));
    assert_eq!(report.counters.ub_high_water_bytes, 4 * 128 * 4);
    let first: Vec<_> = report
        .first_block
        .iter()
        .map(|c| (c.what.as_str(), c.types.as_str(), c.amount, c.times))
        .collect();
    assert_eq!(
        first,
        [
            ("Add", "f32", 2, 3),
            ("Adds", "f32", 2, 3),
            ("GM -> UB", "", 512, 3),
            ("PipeBarrier<PIPE_V>", "", 0, 3),
            ("UB -> GM", "", 512, 3),
        ]
    );
    assert_eq!(control::violations(), []);
}

/// Two binaries are two libraries, although the second may be loaded from the descriptor that the
/// first had.
#[test]
fn two_loaded_binaries_are_not_one() {
    let device = Device::new();
    let load = |kernel: &str| device.load(&compile("reference.cpp", &[kernel]));
    let kernels = ["add_tiles", "scale_in_place"];
    let binaries = kernels.map(|kernel| load(kernel).expect("loads"));
    for (binary, kernel) in binaries.into_iter().zip(kernels) {
        device.function(binary, kernel).expect("is there");
    }
}

#[test]
fn flags_order_an_in_place_kernel_over_blocks() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let x: Vec<half::bf16> = (0..1024).map(|i| half::bf16::from_f32(i as f32)).collect();
    let data = device.upload(&x);
    let factor = u64::from(0.3_f32.to_bits());
    device
        .launch(&library, "scale_in_place", 8, &[data, factor, 128])
        .expect("runs");
    let y: Vec<half::bf16> = device.download(data, 1024);
    for (x, y) in x.iter().zip(y) {
        assert_eq!(y, half::bf16::from_f32(x.to_f32() * 0.3));
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn launches_run_on_the_stream_not_at_the_call() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let data = device.upload(&[half::bf16::ONE; 128]);
    let binary = device.load(&library).expect("loads");
    let function = device.function(binary, "scale_in_place").expect("is there");
    control::hold_streams(true);
    device
        .submit(function, 1, &[data, u64::from(2.0_f32.to_bits()), 128])
        .expect("is accepted");
    assert_eq!(control::launches(), []);
    control::hold_streams(false);
    device.synchronize().expect("runs");
    assert_eq!(control::launches().len(), 1);
    assert_eq!(device.download::<half::bf16>(data, 128)[0].to_f32(), 2.0);
}

fn described_parameters(function: *mut c_void) -> usize {
    let mut count = 99;
    // SAFETY: a live function, and a valid out parameter.
    let code = unsafe { aclrtFunctionGetParamCount(function, &raw mut count) };
    assert_eq!(code, 0);
    count
}

/// One of the three ways of launching.
type Submit = fn(&Device, *mut c_void, u32, &[u64]) -> Result<(), (i32, String)>;
const WAYS: [Submit; 3] = [
    Device::submit,
    Device::submit_array,
    Device::submit_completed,
];

#[test]
fn a_kernel_gets_its_arguments_by_each_way_of_launching() {
    for submit in WAYS {
        let device = Device::new();
        let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
        let binary = device.load(&library).expect("loads");
        let function = device.function(binary, "scale_in_place").expect("is there");
        assert_eq!(described_parameters(function), 3);
        let data = device.upload(&[half::bf16::ONE; 128]);
        let args = [data, u64::from(2.0_f32.to_bits()), 128];
        submit(&device, function, 1, &args).expect("is accepted");
        device.synchronize().expect("runs");
        assert_eq!(
            device.download::<half::bf16>(data, 128),
            [half::bf16::from_f32(2.0); 128]
        );
        assert_eq!(control::violations(), []);
    }
}

/// A kernel of both kinds of cores that stores its argument from the first vector core.
fn mix_kernel() -> Vec<u8> {
    let source = "#include \"kernel_operator.h\"\n\
         extern \"C\" __mix__(1, 2) __global__ __aicore__ void mix(GM_ADDR y) {\n\
             KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);\n\
             AscendC::TPipe pipe;\n\
             if ASCEND_IS_AIC { return; }\n\
             if (AscendC::GetBlockIdx() != 0) return;\n\
             AscendC::GlobalTensor<float> gm;\n\
             gm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), 8);\n\
             AscendC::TQue<AscendC::TPosition::VECOUT, 1> queue;\n\
             pipe.InitBuffer(queue, 1, 32);\n\
             auto out = queue.AllocTensor<float>();\n\
             AscendC::Duplicate(out, 3.0f, 8);\n\
             queue.EnQue(out);\n\
             out = queue.DeQue<float>();\n\
             AscendC::DataCopy(gm, out, 8);\n\
             queue.FreeTensor(out);\n\
         }\n";
    ascend_sim::build::KernelSource::from_texts([("mix.cpp", source)])
        .kernels(["mix"])
        .compile()
        .expect("compiles")
}

#[test]
fn a_kernel_of_both_kinds_of_cores_needs_its_sync_address() {
    let library = mix_kernel();
    for sync_in_binary in [false, true] {
        for submit in WAYS {
            let completed = std::ptr::fn_addr_eq(submit, Device::submit_completed as Submit);
            let device = Device::on(Machine {
                sync_in_binary,
                ..Machine::ascend_910b()
            });
            let binary = device.load(&library).expect("loads");
            let function = device.function(binary, "mix").expect("is there");
            let y = device.upload(&[0.0_f32; 8]);
            submit(&device, function, 1, &[y]).expect("is accepted");
            if completed || sync_in_binary {
                device.synchronize().expect("runs");
                assert_eq!(device.download::<f32>(y, 8), [3.0; 8]);
                assert_eq!(control::violations(), []);
                continue;
            }
            let (code, message) = device.synchronize().expect_err("no sync address");
            assert_eq!(code, 507035, "{message}");
            one_violation("sync-address", "reads every argument eight bytes late");
            let kernel = control::launches().pop().expect("one launch").kernel;
            assert_eq!(kernel, "mix");
        }
    }
}

#[test]
fn argument_lists_that_are_no_use_are_refused() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let binary = device.load(&library).expect("loads");
    let [function, other] = ["scale_in_place", "add_tiles"]
        .map(|name| device.function(binary, name).expect("is there"));
    let list = || {
        let mut list = std::ptr::null_mut();
        // SAFETY: a live function, and a valid out parameter.
        assert_eq!(unsafe { aclrtKernelArgsInit(function, &raw mut list) }, 0);
        list
    };
    let append = |list| {
        let (mut value, mut place) = (0_u64, std::ptr::null_mut());
        // SAFETY: eight readable bytes, and a valid out parameter.
        unsafe { aclrtKernelArgsAppend(list, (&raw mut value).cast(), 8, &raw mut place) }
    };
    let launch = |function, list| {
        let none = std::ptr::null_mut();
        // SAFETY: handles, and no configuration.
        unsafe { aclrtLaunchKernelWithConfig(function, 1, device.stream, none, list, none.cast()) }
    };
    let refused = |code: i32, expected: i32, says: &str| {
        let message = support::recent_message();
        assert!(
            code == expected && message.contains(says),
            "{code}: {message}"
        );
    };
    let address = function as usize;
    let of_thread = std::thread::spawn(move || {
        let (function, mut list) = (address as *mut std::ffi::c_void, std::ptr::null_mut());
        // SAFETY: a live function, and a valid out parameter.
        assert_eq!(unsafe { aclrtKernelArgsInit(function, &raw mut list) }, 0);
        list as usize
    });
    let ended = of_thread.join().expect("no panic") as *mut std::ffi::c_void;
    refused(append(ended), 107017, "was destroyed before");
    let first = list();
    assert_eq!(append(first), 0);
    refused(
        launch(function, first),
        107000,
        "lack aclrtKernelArgsFinalize",
    );
    // SAFETY: a list of this thread.
    assert_eq!(unsafe { aclrtKernelArgsFinalize(first) }, 0);
    refused(append(first), 207000, "was completed");
    refused(launch(other, first), 107000, "for another kernel");
    refused(
        launch(function, first),
        107000,
        "takes 24 bytes of arguments, 8 were given",
    );
    let second = list();
    refused(launch(function, first), 107017, "destroyed before");
    for _ in 0..128 {
        assert_eq!(append(second), 0);
    }
    refused(append(second), 107000, "128 arguments already");
}

#[test]
fn a_binary_that_does_not_describe_its_parameters_takes_no_array() {
    let device = Device::on(Machine {
        describes_parameters: false,
        ..Machine::ascend_910b()
    });
    let binary = device.load(&compile("reference.cpp", &["add_tiles", "scale_in_place"]));
    let function = device.function(binary.expect("loads"), "scale_in_place");
    let function = function.expect("is there");
    assert_eq!(described_parameters(function), 0);
    let (code, message) = device
        .submit_array(function, 1, &[0, 0, 0])
        .expect_err("refused");
    assert!(
        code == 107000 && message.contains("does not describe"),
        "{message}"
    );
}

#[test]
fn wrong_launches_are_refused_at_the_call() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let binary = device.load(&library).expect("loads");
    let (code, message) = device
        .function(binary, "missing")
        .expect_err("no such kernel");
    assert_eq!(code, 507027);
    assert!(
        message.contains("`missing` is not in the binary, which has add_tiles, scale_in_place")
    );
    let function = device.function(binary, "scale_in_place").expect("is there");
    let (code, message) = device
        .submit(function, 1, &[0, 0])
        .expect_err("an argument is missing");
    assert!(
        code == 107000 && message.contains("takes 24 bytes of arguments, 16 were given"),
        "{message}"
    );
    for blocks in [0, 65536] {
        let (code, message) = device
            .submit(function, blocks, &[0, 0, 0])
            .expect_err("blocks out of range");
        assert!(code == 107000 && message.contains("1..=65535"), "{message}");
    }
    // SAFETY: a live binary.
    assert_eq!(unsafe { aclrtBinaryUnLoad(binary) }, 0);
    let (code, message) = device
        .submit(function, 1, &[0, 0, 0])
        .expect_err("the binary is gone");
    assert!(code == 107017 && message.contains("unloaded"), "{message}");
}

#[test]
fn a_binary_for_the_other_architecture_is_refused() {
    let library = compile_for("reference.cpp", &["add_tiles", "scale_in_place"], 3510, &[])
        .expect("compiles");
    let (code, message) = Device::new().load(&library).expect_err("dav-2201");
    assert!(
        code == 207000 && message.contains("compiled for dav-3510, the device is dav-2201"),
        "{message}"
    );
    let device = Device::on(Machine::ascend_950());
    let (x, y) = (device.upload(&[1.5_f32; 64]), device.alloc(256));
    device
        .launch(&library, "add_tiles", 2, &[x, y, 64 | 32 << 32])
        .expect("runs");
    assert_eq!(device.download::<f32>(y, 64), [4.0; 64]);
}

/// A launch of `add_tiles` that the host has not waited for: queued, or done.
fn unwaited_launch(held: bool) -> (Device, *mut c_void, [u64; 2]) {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let binary = device.load(&library).expect("loads");
    let function = device.function(binary, "add_tiles").expect("is there");
    let (x, y) = (device.upload(&[1.0_f32; 64]), device.alloc(256));
    control::hold_streams(held);
    device
        .submit(function, 1, &[x, y, 64 | 64 << 32])
        .expect("is accepted");
    while !held && control::launches().is_empty() {
        std::thread::yield_now();
    }
    (device, binary, [x, y])
}

#[test]
fn freeing_what_a_launch_uses_is_found() {
    let (device, _, [x, _]) = unwaited_launch(true);
    device.free(x).expect("is accepted");
    one_violation("stream-order", "is freed while kernel `add_tiles`");
    control::hold_streams(false);
    let (code, message) = device
        .synchronize()
        .expect_err("the kernel reads freed memory");
    assert!(
        code == 507035 && message.contains("reference.cpp") && message.contains("were freed"),
        "{message}"
    );
    drop(device);
    // It may have run or not: the host cannot know before it waits.
    let (device, _, [x, y]) = unwaited_launch(false);
    device.free(y).expect("is accepted");
    one_violation("stream-order", "is freed while kernel `add_tiles`");
    device.synchronize().expect("ran");
    device.free(x).expect("is accepted");
    assert_eq!(control::violations(), []);
}

#[test]
fn a_binary_is_unloaded_after_the_last_launch() {
    for held in [true, false] {
        let (device, binary, _) = unwaited_launch(held);
        // SAFETY: a live binary.
        assert_eq!(unsafe { aclrtBinaryUnLoad(binary) }, 0);
        one_violation("binary-unloaded-busy", "while kernel `add_tiles`");
        control::hold_streams(false);
        device.synchronize().expect("runs");
    }
    let (device, binary, _) = unwaited_launch(false);
    device.synchronize().expect("runs");
    // SAFETY: a live binary.
    assert_eq!(unsafe { aclrtBinaryUnLoad(binary) }, 0);
    assert_eq!(control::violations(), []);
}

#[test]
fn a_source_that_does_not_compile_is_a_typed_error() {
    let missing = compile_for("reference.cpp", &["no_such_kernel"], 2201, &[]);
    let Err(ascend_sim::build::BuildError::Compile { output, .. }) = missing else {
        panic!("{missing:?}")
    };
    assert!(output.contains("no_such_kernel"));
    for braces in ["{}", "()"] {
        let (open, close) = braces.split_at(1);
        let narrowing = format!(
            "#include \"kernel_operator.h\"\n\
             extern \"C\" void k(uint32_t n) {{\n\
                 AscendC::DataCopyExtParams p{open}n, 4, 0, 0, 0{close};\n\
                 (void)p;\n\
             }}\n"
        );
        let result = ascend_sim::build::KernelSource::from_texts([("narrowing.cpp", narrowing)])
            .kernels(["k"])
            .compile();
        let Err(ascend_sim::build::BuildError::Compile { output, .. }) = result else {
            panic!("{braces}: {result:?}")
        };
        assert!(output.contains("conversion"), "{output}");
    }
}
