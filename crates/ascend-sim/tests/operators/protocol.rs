//! Rules for every operator: limits, lifetimes, faults.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

#[test]
fn empty_tensors_plan_without_workspace_and_run() {
    let device = Device::new();
    let (x, out) = (
        device.tensor(F32, &[0, 3], &[]),
        device.tensor(F32, &[0, 3], &[]),
    );
    let (bytes, executor) = plan!(aclnnExp(x.raw, out.raw)).expect("plans");
    assert_eq!(bytes, 0);
    finish(&device, bytes, executor, aclnnExp::run).expect("runs");
    check! { device;
        aclnnMul(x.raw, x.raw, out.raw);
        aclnnSoftmax(x.raw, 1, out.raw);
        aclnnInplaceCopy(out.raw, x.raw);
    }
    assert_eq!(control::live().descriptors, 2, "no executor is left");
    assert_eq!(control::violations(), []);
}

#[test]
fn documented_limits_are_enforced() {
    let device = Device::new();
    let one = scalar(F32, 1.0);
    let (x, y) = (
        device.tensor(F32, &[2, 3], &[0.0; 6]),
        device.tensor(F32, &[2], &[0.0; 2]),
    );
    let out = device.out(F32, &[2, 3]);
    check! { device;
        aclnnAdd(x.raw, x.raw, null(), out.raw) refuses NULL_POINTER, "alpha is null";
        aclnnAdd(null(), x.raw, one, out.raw) refuses NULL_POINTER, "self is null";
        aclnnAdd(x.raw, y.raw, one, out.raw) refuses PARAM_INVALID, "do not broadcast";
        aclnnAdd(x.raw, x.raw, one, y.raw)
            refuses PARAM_INVALID, "out has shape [2], [2, 3] is expected";
    }
    let whole = device.out(I32, &[2, 3]);
    check! { device;
        aclnnAdd(whole.raw, whole.raw, scalar(F64, 0.5), whole.raw)
            refuses PARAM_INVALID, "alpha is Double";
    }
    let truth = device.out(Bool, &[2, 3]);
    check! { device;
        aclnnMul(x.raw, x.raw, truth.raw) refuses PARAM_INVALID, "out is Bool";
        aclnnSigmoid(whole.raw, whole.raw)
            refuses PARAM_INVALID, "self is Int32, one of [Float, Float16, Bf16] is expected";
    }
    let half = device.out(Bf16, &[2, 3]);
    check! { device;
        aclnnErf(half.raw, half.raw) refuses PARAM_INVALID, "self is Bf16";
        aclnnClamp(x.raw, null(), null(), out.raw) refuses NULL_POINTER, "both null";
        aclnnMuls(x.raw, null(), out.raw) refuses NULL_POINTER, "other is null";
    }
    let point = device.tensor(F32, &[], &[1.0]);
    check! { device;
        aclnnSign(point.raw, point.raw)
            refuses PARAM_INVALID, "self has rank 0, 1 to 8 is expected";
    }
    let deep = device.view(F32, &[0.0], &[1; 9], None, 0);
    check! { device;
        aclnnExp(deep.raw, deep.raw) refuses PARAM_INVALID, "self has rank 9, 0 to 8 is expected";
    }
    // Broadcasts over six separate axes are not offered in f64 and i16, and are in f32.
    for (dtype, offered) in [(F32, true), (F64, false), (I16, false)] {
        let a = device.tensor(dtype, &[1, 2, 1, 2, 1, 2], &[0.0; 8]);
        let b = device.tensor(dtype, &[2, 1, 2, 1, 2, 1], &[0.0; 8]);
        let out = device.out(dtype, &[2; 6]);
        assert_eq!(
            plan!(aclnnMul(a.raw, b.raw, out.raw)).is_ok(),
            offered,
            "{dtype:?}"
        );
    }
    let expanded = device.view(F32, &[0.0; 3], &[2, 3], Some(&[0, 1]), 0);
    check! { device;
        aclnnExp(x.raw, expanded.raw) refuses PARAM_INVALID, "elements share memory";
    }
    assert!(describe(&[2], Some(&[-1]), 1, F32, 2, 0).is_null());
    assert!(recent_message().contains("stride -1 is negative"));
    assert!(describe(&[2], None, 1, F32, 2, 0).is_null());
    assert!(recent_message().contains("reaches element 2"));
    // A strided view costs workspace.
    let strided = device.view(F32, &[0.0; 12], &[2, 3], Some(&[6, 2]), 0);
    let dense = plan!(aclnnExp(x.raw, out.raw)).expect("plans").0;
    assert!(plan!(aclnnExp(strided.raw, out.raw)).expect("plans").0 > dense);
}

#[test]
fn memory_is_checked_when_the_operator_runs() {
    let device = Device::new();
    let (x, out) = (device.tensor(F32, &[4], &[1.0; 4]), device.out(F32, &[4]));
    let (bytes, executor) = plan!(aclnnExp(x.raw, out.raw)).expect("plans");
    device.free(x.address).expect("frees");
    assert_refused(
        finish(&device, bytes, executor, aclnnExp::run),
        EXCEPTION,
        "were freed",
    );
    assert_eq!(control::violations().len(), 1);
}

#[test]
fn outputs_share_memory_with_inputs_only_exactly() {
    let overlapping = |offset: i64, stride: i64| {
        let device = Device::new();
        let x = device.view(F32, &[1.0; 8], &[3], Some(&[stride]), 0);
        let out = describe(&[3], Some(&[stride]), offset, F32, 8, x.address);
        let outcome = run!(device, aclnnExp(x.raw, out));
        assert_eq!(control::violations().len(), usize::from(outcome.is_err()));
        outcome
    };
    overlapping(0, 1).expect("the same view");
    overlapping(3, 1).expect("next to each other");
    overlapping(1, 2).expect("between each other");
    assert_refused(overlapping(2, 1), EXCEPTION, "share memory");
    assert_refused(overlapping(2, 2), EXCEPTION, "share memory");
    // Operators that are not of one element at a time do not even take the same view.
    let device = Device::new();
    let x = device.tensor(F32, &[2, 2], &[1.0; 4]);
    assert_refused(
        run!(device, aclnnMm(x.raw, x.raw, x.raw, 0)),
        EXCEPTION,
        "out and self share memory",
    );
}

#[test]
fn executors_are_used_up_or_repeated_with_other_addresses() {
    let device = Device::new();
    let (x, y) = (
        device.tensor(F32, &[2], &[1.0, 2.0]),
        device.tensor(F32, &[2], &[10.0, 20.0]),
    );
    let (out, other) = (device.out(F32, &[2]), device.out(F32, &[2]));
    let second = device.tensor(F32, &[2], &[5.0, 6.0]);
    let one = scalar(F32, 1.0);
    let add = || plan!(aclnnAdd(x.raw, y.raw, one, out.raw)).expect("plans");
    // SAFETY: live handles; wrong ones are errors.
    unsafe {
        let (bytes, executor) = add();
        assert_eq!(
            aclSetInputTensorAddr(executor, 0, x.raw, second.address as *mut c_void),
            PARAM_INVALID
        );
        assert!(recent_message().contains("only a repeatable executor"));
        assert_eq!(aclSetAclOpExecutorRepeatable(executor), 0);
        finish(&device, bytes, executor, aclnnAdd::run).expect("runs");
        assert_eq!(
            aclSetInputTensorAddr(executor, 0, x.raw, second.address as *mut c_void),
            0
        );
        assert_eq!(
            aclSetOutputTensorAddr(executor, 0, out.raw, other.address as *mut c_void),
            0
        );
        finish(&device, bytes, executor, aclnnAdd::run).expect("runs again");
        assert_eq!(
            (out.values(), other.values()),
            (vec![11.0, 22.0], vec![15.0, 26.0])
        );
        assert_eq!(
            aclSetOutputTensorAddr(executor, 0, out.raw, out.address as *mut c_void),
            0
        );
        finish(&device, bytes, executor, aclnnAdd::run).expect("runs again");
        assert_eq!(out.values(), [15.0, 26.0]);
        assert_eq!(
            aclSetInputTensorAddr(executor, 2, x.raw, null_mut()),
            PARAM_INVALID
        );
        assert_eq!(
            aclSetInputTensorAddr(executor, 0, y.raw, null_mut()),
            PARAM_INVALID
        );
        assert_eq!(aclDestroyAclOpExecutor(executor), 0);
        assert_eq!(
            aclnnAdd::run(null_mut(), 0, executor, device.stream),
            107017
        );
        // Tensors and scalars have to live until the second phase.
        let (bytes, executor) = add();
        assert_eq!(aclDestroyScalar(one), 0);
        assert_refused(
            finish(&device, bytes, executor, aclnnAdd::run),
            PARAM_INVALID,
            "alpha has to live",
        );
        assert_eq!(control::take_violations().len(), 1);
        assert_eq!(aclDestroyTensor(null()), 0);
        assert_eq!(aclDestroyAclOpExecutor(null_mut()), 0);
    }
}

#[test]
fn memory_of_an_operator_is_freed_after_a_wait() {
    for held in [true, false] {
        let device = Device::new();
        let (x, out) = (device.tensor(F32, &[2], &[4.0, 9.0]), device.out(F32, &[2]));
        let (bytes, executor) = plan!(aclnnSqrt(x.raw, out.raw)).expect("plans");
        let workspace = device.alloc(bytes as usize);
        control::hold_streams(held);
        // SAFETY: a live executor and a workspace of the size that it asked for.
        let code =
            unsafe { aclnnSqrt::run(workspace as *mut c_void, bytes, executor, device.stream) };
        assert_eq!(code, 0);
        for address in [workspace, x.address, out.address] {
            device.free(address).expect("is accepted");
            // A stream that is not held may come to the operator meanwhile, and find no memory.
            let found = control::take_violations();
            let (freed, late): (Vec<_>, Vec<_>) =
                found.iter().partition(|found| found.kind == "stream-order");
            assert_eq!(freed.len(), 1, "{found:#?}");
            assert!(
                freed[0].message.contains("is freed while aclnnSqrt"),
                "{}",
                freed[0]
            );
            let says_freed = |found: &&ascend_sim::Violation| found.message.contains("were freed");
            assert!(
                late.iter().all(says_freed) && (late.is_empty() || !held),
                "{found:#?}"
            );
        }
        control::hold_streams(false);
    }
}

#[test]
fn faults_stubs_and_counts() {
    let device = Device::new();
    let (x, out) = (device.tensor(F32, &[2], &[4.0, 9.0]), device.out(F32, &[2]));
    let sqrt = || run!(device, aclnnSqrt(x.raw, out.raw));
    control::stub_operators(true);
    sqrt().expect("runs");
    assert_eq!(out.values(), [77.0, 77.0], "nothing was computed");
    control::stub_operators(false);
    sqrt().expect("runs");
    assert_eq!(out.values(), [2.0, 3.0]);
    assert_eq!(control::operator_runs().get("aclnnSqrt"), Some(&2));
    control::inject_fault("aclnnSqrtGetWorkspaceSize", 2, 561003);
    control::inject_fault("aclnnSqrt", 2, 361001);
    sqrt().expect("the first call");
    assert_refused(sqrt(), 561003, "injected");
    assert_refused(sqrt(), 361001, "injected");
    control::inject_stream_fault("aclnnSqrt", 2, 507014);
    sqrt().expect("the first run");
    assert_refused(
        sqrt(),
        507014,
        "aclnnSqrt: this failure on the stream was injected",
    );
    assert_eq!(control::operator_runs().get("aclnnSqrt"), Some(&5));
}

/// Runs itself in another process, because the variable is read once in each.
#[test]
fn first_phases_are_recorded_with_their_codes_and_arguments() {
    const VARIABLE: &str = "ASCEND_SIM_OPERATORS";
    if std::env::var_os(VARIABLE).is_none() {
        let name = format!("ascend-sim-recorded-{}", std::process::id());
        let file = std::env::temp_dir().join(name);
        let output = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "protocol::first_phases_are_recorded_with_their_codes_and_arguments",
            ])
            .env(VARIABLE, &file)
            .output()
            .expect("runs itself");
        assert!(output.status.success(), "{output:?}");
        let recorded = std::fs::read_to_string(&file).expect("the file of the recording");
        std::fs::remove_file(&file).expect("removes it");
        let lines: Vec<&str> = recorded.lines().collect();
        let expected = [
            "0 aclnnAdd f32[2,3]/[1,2]+1 f32[3] f64:0.5 f32[2,3]",
            "0 aclnnMuls i64[2,3] i64:-7 i64[2,3]",
            "0 aclnnCat (bf16[2];bf16[1]) 0 bf16[3]",
            "0 aclnnReduceSum f32[2,3]/[1,2]+1 {0,-1} 1 0 f32[1,1]",
            "0 aclnnGeluBackwardV2 f32[2,3] f32[2,3] \"none\" f32[2,3]",
            "0 aclnnInplaceUniform f32[2,3] 0 0.5 7 4",
            "161002 aclnnNeg i64[2,3] bool[]",
            "161001 aclnnNeg null f32[2,3]",
        ];
        assert_eq!(lines, expected);
        return;
    }
    let device = Device::new();
    let x = device.view(F32, &[0.0; 8], &[2, 3], Some(&[1, 2]), 1);
    let (row, out) = (
        device.tensor(F32, &[3], &[0.0; 3]),
        device.out(F32, &[2, 3]),
    );
    let (dense, none) = (device.out(F32, &[2, 3]), c"none".as_ptr());
    let whole = device.out(I64, &[2, 3]);
    let parts = [device.out(Bf16, &[2]).raw, device.out(Bf16, &[1]).raw];
    // SAFETY: two live tensors, which the list owns from here on.
    let parts = unsafe { aclCreateTensorList(parts.as_ptr().cast(), 2) };
    check! { device;
        aclnnAdd(x.raw, row.raw, scalar(F64, 0.5), out.raw);
        aclnnMuls(whole.raw, scalar(I64, -7.0), device.out(I64, &[2, 3]).raw);
        aclnnCat(parts, 0, device.out(Bf16, &[3]).raw);
        aclnnReduceSum(x.raw, ints(&[0, -1]), true, F32 as i32, device.out(F32, &[1, 1]).raw);
        aclnnGeluBackwardV2(dense.raw, dense.raw, none, out.raw);
        aclnnInplaceUniform(out.raw, 0.0, 0.5, 7, 4);
        aclnnNeg(whole.raw, device.out(Bool, &[]).raw) refuses PARAM_INVALID, "out has shape";
        aclnnNeg(null(), out.raw) refuses NULL_POINTER, "self is null";
    }
}

/// The cost of one operator on the host and on the stream, with tensors that cost nothing. Not a
/// measurement of any device.
#[test]
#[ignore = "prints times of this host"]
fn the_cost_of_a_call() {
    let device = Device::new();
    let (x, out) = (device.tensor(F32, &[4], &[1.0; 4]), device.out(F32, &[4]));
    let workspace = device.alloc(4096) as *mut c_void;
    let rounds = 100_000;
    for stubbed in [false, true] {
        control::stub_operators(stubbed);
        let start = std::time::Instant::now();
        for _ in 0..rounds {
            let (bytes, executor) = plan!(aclnnExp(x.raw, out.raw)).expect("plans");
            // SAFETY: a live executor and a workspace that is large enough.
            let code = unsafe { aclnnExp::run(workspace, bytes, executor, device.stream) };
            assert_eq!(code, 0);
        }
        device.synchronize().expect("runs");
        println!("stubbed {stubbed}: {:?} a call", start.elapsed() / rounds);
    }
    control::stub_operators(false);
    let n = 512;
    let (x, out) = (
        device.tensor(F32, &[n, n], &vec![1.0; (n * n) as usize]),
        device.out(F32, &[n, n]),
    );
    let start = std::time::Instant::now();
    check! { device;
        aclnnMm(x.raw, x.raw, out.raw, 0);
    }
    println!("{n}x{n}x{n}: {:?}", start.elapsed());
}
