//! Failures and memory as users see them, on the simulated device.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ascend_sim::control;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{Backend, DType, ExecutionError, Scalar, Shape, TensorData, TensorMetadata};

use crate::{Ascend, AscendDevice, AscendTensor, Fallback, Processor, fallbacks, reset_fallbacks};

/// Exclusive use of the device, initially without allocated memory; closed at the end, without a
/// violation.
pub(crate) struct Alone(
    pub(crate) AscendDevice,
    #[allow(dead_code, reason = "held, not read")] MutexGuard<'static, ()>,
);

impl Alone {
    pub(crate) fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let device = AscendDevice::simulated(0);
        device.open().expect("the simulated device opens");
        let _ = Ascend::sync(&device);
        Self(device, turn)
    }

    pub(crate) fn vector(&self, values: &[f32]) -> AscendTensor {
        Ascend::float_from_data(TensorData::from(values), &self.0)
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        control::clear_faults();
        control::set_memory_limit(None);
        let _ = self.0.close();
        let violations = control::take_violations();
        if !std::thread::panicking() {
            assert_eq!(violations, []);
        }
    }
}

pub(crate) fn values(tensor: AscendTensor) -> Result<Vec<f32>, ExecutionError> {
    Ok(tensor
        .read()?
        .try_to_vec::<f32>()
        .expect("a tensor of 32-bit floats"))
}

pub(crate) fn message(tensor: AscendTensor) -> String {
    values(tensor).expect_err("a failed tensor").to_string()
}

#[test]
fn a_refused_operator_fails_what_is_computed_from_it_and_nothing_else() {
    let alone = Alone::new();
    let x = alone.vector(&[1.0, 2.0]);
    control::inject_fault("aclnnExpGetWorkspaceSize", 1, 561_003);
    let failed = Ascend::float_exp(x.clone());
    let later = Ascend::float_sum(Ascend::float_add(failed, x.clone()));
    let text = message(later);
    assert!(
        text.contains("aclnnExpGetWorkspaceSize") && text.contains("561003"),
        "{text}"
    );
    assert_eq!(values(x.clone()).expect("its operand is whole"), [1.0, 2.0]);
    assert_eq!(
        values(Ascend::float_neg(x)).expect("the device goes on"),
        [-1.0, -2.0]
    );
    Ascend::sync(&alone.0).expect("a failure that was read is not reported again");
}

#[test]
fn a_second_phase_that_fails_is_named() {
    let alone = Alone::new();
    control::inject_fault("aclnnMul", 1, 361_001);
    let x = alone.vector(&[3.0]);
    let text = message(Ascend::float_mul(x.clone(), x));
    assert!(
        text.contains("aclnnMul ") && text.contains("361001"),
        "{text}"
    );
}

#[test]
fn a_failure_that_nobody_reads_comes_out_of_sync_once() {
    let alone = Alone::new();
    control::inject_fault("aclnnTanhGetWorkspaceSize", 1, 161_002);
    drop(Ascend::float_tanh(alone.vector(&[1.0])));
    let text = Ascend::sync(&alone.0).expect_err("the failure").to_string();
    assert!(text.contains("aclnnTanhGetWorkspaceSize"), "{text}");
    Ascend::sync(&alone.0).expect("reported once");
}

#[test]
fn a_fault_on_the_device_comes_out_of_the_read_with_the_operators_before_it() {
    let alone = Alone::new();
    control::inject_stream_fault("aclnnSqrt", 1, 507_015);
    let y = Ascend::float_sqrt(alone.vector(&[4.0]));
    let text = message(y);
    assert!(
        text.contains("507015") && text.contains("aclnnSqrt"),
        "{text}"
    );
}

#[test]
fn memory_that_is_not_there_is_an_error_and_passes() {
    let alone = Alone::new();
    let x = alone.vector(&[1.0]);
    control::set_memory_limit(Some(1 << 20));
    let big = Shape::from([1 << 22]);
    let text = message(Ascend::float_exp(Ascend::float_zeros(
        big.clone(),
        &alone.0,
        burn::backend::FloatDType::F32,
    )));
    assert!(
        text.contains("out of memory") && text.contains("16777216"),
        "{text}"
    );
    assert_eq!(values(x).expect("what was there stays"), [1.0]);
    control::set_memory_limit(None);
    let big = Ascend::float_zeros(big, &alone.0, burn::backend::FloatDType::F32);
    assert!(big.failure().is_none());
}

/// A result takes the place of a tensor that is nearly all of its block, and lets go of a block of
/// which it would need little.
#[test]
fn a_result_does_not_keep_a_block_by_a_small_part_of_it() {
    let alone = Alone::new();
    let live = || alone.0.memory().expect("open").live_bytes;
    for (part, is_in_place) in [(1024, true), (1000, true), (512, false), (8, false)] {
        let whole = alone.vector(&[1.0; 1024]);
        let before = whole.address().expect("uploaded");
        let part = Ascend::float_slice(whole, &[(0..part).into()]);
        let sum = Ascend::float_exp(part);
        let elements = sum.dims()[0];
        let held = [elements, 1024][usize::from(is_in_place)];
        let is_there = sum.address().expect("computed") == before;
        assert_eq!((is_there, live()), (is_in_place, 4 * held), "{elements}");
    }
}

#[test]
fn a_trip_to_the_host_is_counted_and_passes_failures_on() {
    let alone = Alone::new();
    reset_fallbacks();
    let x = alone.vector(&[0.0, 0.0, 0.0]);
    assert_eq!(values(Ascend::float_tan(x.clone())).expect("tan"), [0.0; 3]);
    let trips = fallbacks();
    let expected = Fallback {
        op: "float_tan",
        processor: Processor::Host,
        calls: 1,
        bytes: 24,
    };
    assert_eq!(trips, [expected]);
    control::inject_fault("aclnnExpGetWorkspaceSize", 1, 161_002);
    let failed = Ascend::float_tan(Ascend::float_exp(x));
    assert_eq!((failed.dims(), failed.dtype()), (&[3][..], DType::F32));
    assert!(message(failed).contains("aclnnExpGetWorkspaceSize"));
}

#[test]
fn calls_on_the_ai_cpu_are_counted_whether_planned_or_repeated() {
    let alone = Alone::new();
    let integers = |values: &[i64]| Ascend::int_from_data(TensorData::from(values), &alone.0);
    let [x, at] = [[5, 6, 7], [2, 0, 2]].map(|values| integers(&values));
    reset_fallbacks();
    // Operations that the AI Core lacks for 64 bits, written another way.
    let signs = Ascend::int_sign(Ascend::int_neg(x.clone()));
    let sums = Ascend::int_cumsum(signs, 0);
    let chosen = Ascend::int_scatter(0, sums, at.clone(), x.clone(), IndexingUpdateOp::Assign);
    let read = chosen.read().expect("sums, two of them replaced");
    assert_eq!(read.as_slice::<i64>().expect("64 bits")[..2], [6, -2]);
    assert_eq!(fallbacks(), []);
    // An operation that it lacks, and that nothing else does exactly.
    for _ in 0..4 {
        let sums = Ascend::int_scatter(0, x.clone(), at.clone(), x.clone(), IndexingUpdateOp::Add);
        let read = sums.read().expect("sums");
        assert_eq!(read.as_slice::<i64>().expect("64 bits"), [11, 6, 19]);
    }
    let sums = Ascend::int_select_assign(x.clone(), 0, at, x, IndexingUpdateOp::Add);
    let read = sums.read().expect("sums");
    assert_eq!(read.as_slice::<i64>().expect("64 bits"), [11, 6, 19]);
    let on_ai_cpu = |op, calls| Fallback {
        op,
        processor: Processor::AiCpu,
        calls,
        bytes: 0,
    };
    let expected = [
        on_ai_cpu("aclnnScatterAdd", 4),
        on_ai_cpu("aclnnIndexAdd", 1),
    ];
    assert_eq!(fallbacks(), expected);
}

#[test]
fn the_second_call_of_a_kind_is_kept_and_gives_each_its_own_result() {
    let alone = Alone::new();
    let context = alone.0.context().expect("open");
    let before = context.operators().kept_plans();
    let results: Vec<AscendTensor> = (0..5_u8)
        .map(|n| {
            let x = alone.vector(&[f32::from(n), 1.0, 2.0]);
            // Held twice, so that nothing happens in place.
            let y = Ascend::float_mul(x.clone(), x.clone());
            drop(x);
            y
        })
        .collect();
    assert_eq!(context.operators().kept_plans(), before + 1);
    for (n, y) in (0..5_u8).zip(results) {
        assert_eq!(values(y).expect("a square"), [f32::from(n * n), 1.0, 4.0]);
    }
}

#[test]
fn a_tensor_beyond_the_address_space_is_a_failure() {
    let alone = Alone::new();
    for dims in [[1 << 40, 1 << 40], [usize::MAX / 8, 4]] {
        let dtype = burn::backend::FloatDType::F32;
        let text = message(Ascend::float_zeros(Shape::from(dims), &alone.0, dtype));
        assert!(text.contains("within the address space"), "{text}");
    }
}

#[test]
fn divisions_by_other_numbers_share_a_plan() {
    let alone = Alone::new();
    let context = alone.0.context().expect("open");
    let before = context.operators().kept_plans();
    control::clear_calls();
    // More numbers than are kept in device memory.
    for n in 1..=40_u8 {
        let x = alone.vector(&[f32::from(n), 1.0, 2.0]);
        let y = Ascend::float_div_scalar(x, Scalar::Float(f64::from(n)));
        let n = f32::from(n);
        assert_eq!(values(y).expect("a quotient"), [1.0, 1.0 / n, 2.0 / n]);
    }
    let calls = control::calls();
    let planned = calls
        .iter()
        .filter(|call| call.function == "aclnnDivGetWorkspaceSize");
    assert_eq!(planned.count(), 2);
    assert_eq!(context.operators().kept_plans(), before + 1);
}

#[test]
fn an_operand_that_nobody_else_holds_is_overwritten() {
    let alone = Alone::new();
    let x = alone.vector(&[1.0; 1024]);
    alone.0.reset_peak_memory().expect("open");
    let at_rest = alone.0.memory().expect("open").live_bytes;
    let mut y = Ascend::float_neg(x);
    let address = y.address().expect("memory");
    for _ in 0..100 {
        y = Ascend::float_add_scalar(y, 1.0.into());
    }
    assert_eq!(y.address().expect("memory"), address);
    let peak = alone.0.memory().expect("open").peak_bytes;
    // Workspace is the only memory beside the tensor.
    assert!(
        peak < 2 * at_rest,
        "{peak} bytes at the peak, {at_rest} at rest"
    );
    assert_eq!(values(y).expect("99"), [99.0; 1024]);
}

#[test]
fn nothing_is_left_of_a_closed_device() {
    let alone = Alone::new();
    // A failed second phase of another test has not released its executor.
    let abandoned = control::live().descriptors;
    let x = alone.vector(&[1.0, 2.0, 3.0, 4.0]);
    for _ in 0..3 {
        values(Ascend::float_matmul(
            Ascend::float_reshape(x.clone(), Shape::from([2, 2])),
            Ascend::float_reshape(x.clone(), Shape::from([2, 2])),
        ))
        .expect("a product");
    }
    drop(x);
    assert_eq!(alone.0.memory().expect("open").live_bytes, 0);
    alone.0.close().expect("it closes");
    let live = control::live();
    let left = (
        live.allocations,
        live.bytes,
        live.host_blocks,
        live.streams,
        live.descriptors - abandoned,
    );
    assert_eq!(left, (0, 0, 0, 0, 0));
}
