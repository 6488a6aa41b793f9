//! Several devices, and their memory after the last tensor is dropped.

use std::sync::Once;

use ascend_sim::{Machine, Session, control};
use burn::backend::{Backend, DType, Scalar, TensorMetadata};
use burn_ascend::{Ascend, AscendDevice};

use super::cases::shapes::SAMPLES;
use super::compare::{Tolerance, compare};
use super::handles;
use super::input::{FLAGS, Input, Random, Range, SPREAD, Value};
use super::suite::{Failures, caught};

type B = Ascend;

/// Device `ordinal` of a simulated machine with two, the same for all tests of the process.
pub(crate) fn simulated(ordinal: u16) -> AscendDevice {
    static MACHINE: Once = Once::new();
    MACHINE.call_once(|| {
        let machine = Machine {
            devices: 2,
            ..Machine::default()
        };
        // A session resets the machine when it ends: this one lasts as long as the process.
        std::mem::forget(Session::with_machine(machine));
    });
    AscendDevice::simulated(ordinal)
}

/// # Panics
/// If the simulator saw its interface misused, by whichever test.
pub(crate) fn no_violations() {
    let violations = control::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// To another device, through an operation there, and back.
fn transfer(input: &Input, from: AscendDevice, to: AscendDevice) -> Result<(), String> {
    let there_and_back = caught(|| {
        let x = input.upload::<B>(&from).1;
        let (moved_to, back) = match x.clone() {
            Value::Float(x) => {
                use burn::backend::ops::FloatTensorOps;
                let moved = B::float_to_device(x, &to);
                let back = B::float_to_device(B::float_neg(moved.clone()), &from);
                (moved.device(), Value::Float(B::float_neg(back)))
            }
            Value::Int(x) => {
                use burn::backend::ops::IntTensorOps;
                let moved = B::int_to_device(x, &to);
                let back =
                    B::int_to_device(B::int_add_scalar(moved.clone(), Scalar::Int(1)), &from);
                (
                    moved.device(),
                    Value::Int(B::int_sub_scalar(back, Scalar::Int(1))),
                )
            }
            Value::Bool(x) => {
                use burn::backend::ops::BoolTensorOps;
                let moved = B::bool_to_device(x, &to);
                let back = B::bool_to_device(B::bool_not(moved.clone()), &from);
                (moved.device(), Value::Bool(B::bool_not(back)))
            }
        };
        (moved_to, [x, back].map(Value::read))
    });
    let (moved_to, reads) = there_and_back?;
    if moved_to != to {
        return Err(format!("{input}: expected on {to}, found on {moved_to}"));
    }
    for (what, read) in ["the original", "there and back"].into_iter().zip(reads) {
        let found = read.map_err(|error| format!("{input}: {what}: read failed: {error:?}"))?;
        compare(&input.data(), &found, Tolerance::Exact)
            .map_err(|difference| format!("{input}: {what}: {difference}"))?;
    }
    Ok(())
}

/// No other test uses the second device, so that all memory on it is this test's.
#[test]
fn a_second_device() {
    let (first, second) = (simulated(0), simulated(1));
    let mut failures = Failures::default();
    let mut random = Random(11);
    for (shape, view) in SAMPLES {
        for (dtype, range) in [
            (DType::F32, SPREAD),
            (DType::BF16, SPREAD),
            (DType::I64, Range::Whole(-9, 9)),
            (DType::Bool(burn::backend::BoolStore::Native), FLAGS),
        ] {
            let input = Input::new(shape, *view, dtype, &range, &mut random);
            failures.check("to another device", transfer(&input, first, second));
        }
    }
    failures.report("two devices");

    handles::programs::<B>(&second);
    B::sync(&second).expect("synchronises");
    let memory = second.memory().expect("counts");
    assert!(
        memory.peak_bytes > 0,
        "the programs ran on the second device"
    );
    assert_eq!(
        memory.live_bytes, 0,
        "held after every tensor is gone: {memory:?}"
    );
    no_violations();
}
