//! Operators of one element at a time.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

/// The error function by its Maclaurin series, which converges well below 4.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..80 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

fn sign(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.signum() }
}

/// Runs operators of one tensor and holds each to its function, in some types.
macro_rules! functions {
    ($device:expr, $types:expr; $($op:ident($($more:expr)?) $f:expr;)*) => {
        let data = numbers(24, 1);
        for dtype in $types {
            let (x, out) = ($device.tensor(dtype, &[4, 6], &data), $device.out(dtype, &[4, 6]));
            $(
                let f: fn(f64) -> f64 = $f;
                let expected: Vec<f64> = data.iter().map(|x| f(*x)).collect();
                check! { $device;
                    $op(x.raw, $($more,)? out.raw) => out near expected, 2.0 * dtype.step();
                }
            )*
        }
    };
}

#[test]
fn functions_of_one_number() {
    let device = Device::new();
    functions! { device, [F32, F16, Bf16];
        aclnnNeg() |x| -x;
        aclnnAbs() f64::abs;
        aclnnSign() sign;
        aclnnSqrt() f64::sqrt;
        aclnnReciprocal() |x| 1.0 / x;
        aclnnExp() f64::exp;
        aclnnLog() f64::ln;
        aclnnLog1p() f64::ln_1p;
        aclnnTanh() f64::tanh;
        aclnnSin() f64::sin;
        aclnnCos() f64::cos;
        aclnnFloor() f64::floor;
        aclnnCeil() f64::ceil;
        aclnnRound() f64::round_ties_even;
        aclnnSigmoid() sigmoid;
        aclnnGeluV2(1) gelu_tanh;
        aclnnRelu() |x| if x > 0.0 { x } else { 0.0 };
    }
    functions! { device, [F32, F16];
        aclnnErf() erf;
        aclnnGeluV2(0) gelu;
    }
    // Integers are computed as floats, or as they are.
    let x = device.tensor(I32, &[3], &[-4.0, 0.0, 9.0]);
    let out = device.out(F32, &[3]);
    check! { device;
        aclnnSqrt(x.raw, out.raw) => out near [f64::NAN, 0.0, 3.0], 0.0;
        aclnnNeg(x.raw, x.raw) => x is [4.0, 0.0, -9.0];
    }
    assert_eq!(control::violations(), []);
}

/// Derivatives by central differences of the functions above.
#[test]
fn gradients_of_activations_are_their_derivatives() {
    let device = Device::new();
    let (x, g) = (numbers(20, 2), numbers(20, 3));
    let expect = |f: fn(f64) -> f64| -> Vec<f64> {
        let slope = |x: f64| (f(x + 1e-6) - f(x - 1e-6)) / 2e-6;
        x.iter().zip(&g).map(|(x, g)| g * slope(*x)).collect()
    };
    let outputs: Vec<f64> = x.iter().map(|x| sigmoid(*x)).collect();
    let (grad, out) = (device.tensor(F32, &[20], &g), device.out(F32, &[20]));
    let (saved, y) = (
        device.tensor(F32, &[20], &x),
        device.tensor(F32, &[20], &outputs),
    );
    let (none, tanh, other) = (c"none".as_ptr(), c"tanh".as_ptr(), c"erf".as_ptr());
    check! { device;
        aclnnSigmoidBackward(grad.raw, y.raw, out.raw) => out near expect(sigmoid), 1e-6;
        aclnnGeluBackwardV2(grad.raw, saved.raw, none, out.raw) => out near expect(gelu), 1e-6;
        aclnnGeluBackwardV2(grad.raw, saved.raw, tanh, out.raw) => out near expect(gelu_tanh), 1e-6;
        aclnnGeluBackwardV2(grad.raw, saved.raw, other, out.raw)
            refuses PARAM_INVALID, "`none` or `tanh` is expected";
    }
    // The gradient of a sigmoid is computed in f64, too, and broadcasts.
    let column = device.tensor(F64, &[2, 1], &[1.0, 2.0]);
    let (row, wide) = (
        device.tensor(F32, &[2], &[0.5, 0.25]),
        device.out(F64, &[2, 2]),
    );
    check! { device;
        aclnnSigmoidBackward(column.raw, row.raw, wide.raw) => wide is [0.25, 0.1875, 0.5, 0.375];
    }
}

#[test]
fn arithmetic_promotes_and_broadcasts() {
    let device = Device::new();
    let half = scalar(F64, 0.5);
    let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0, -20.0, 30.0]);
    let spread =
        |f: fn(f64, f64) -> f64| -> Vec<f64> { (0..6).map(|i| f(a[i], b[i % 3])).collect() };
    for (ta, tb, to) in [
        (F32, F32, F32),
        (F16, Bf16, F32),
        (I32, F16, F16),
        (Bf16, I64, Bf16),
        (F64, F32, F64),
        (I8, F32, F32),
    ] {
        let (x, y) = (device.tensor(ta, &[2, 3], &a), device.tensor(tb, &[3], &b));
        let out = device.out(to, &[2, 3]);
        let quotients = spread(|a, b| a / b);
        check! { device;
            aclnnAdd(x.raw, y.raw, half, out.raw) => out is spread(|a, b| a + 0.5 * b);
            aclnnSub(x.raw, y.raw, half, out.raw) => out is spread(|a, b| a - 0.5 * b);
            aclnnMul(x.raw, y.raw, out.raw) => out is spread(|a, b| a * b);
            aclnnDiv(x.raw, y.raw, out.raw) => out near quotients, to.step();
        }
    }
    // True division of integers gives floats.
    let x = device.tensor(I32, &[4], &[7.0, -7.0, 7.0, -7.0]);
    let y = device.tensor(I32, &[4], &[2.0, 2.0, -2.0, -2.0]);
    let (floats, whole) = (device.out(F32, &[4]), device.out(I32, &[4]));
    let (zero, two, negative) = (scalar(I64, 0.0), scalar(I64, 2.0), scalar(I64, -1.0));
    check! { device;
        aclnnDiv(x.raw, y.raw, floats.raw) => floats is [3.5, -3.5, -3.5, 3.5];
        aclnnDiv(x.raw, y.raw, whole.raw) => whole is [3.0, -3.0, -3.0, 3.0];
        aclnnRemainderTensorTensor(x.raw, y.raw, whole.raw) => whole is [1.0, 1.0, -1.0, -1.0];
        aclnnRemainderTensorScalar(x.raw, zero, whole.raw) => whole is x.values();
        aclnnPowTensorScalar(x.raw, two, whole.raw) => whole is [49.0; 4];
        aclnnPowTensorScalar(x.raw, negative, whole.raw) refuses PARAM_INVALID, "exponent is -1";
        aclnnPowTensorTensor(y.raw, y.raw, floats.raw) => floats is [4.0, 4.0, 0.0, 0.0];
    }
    // A float scalar never widens; an integer tensor with a float scalar becomes f32.
    let x = device.tensor(I64, &[3], &[1.0, 2.0, 3.0]);
    let out = device.out(F32, &[3]);
    check! { device;
        aclnnMuls(x.raw, half, out.raw) => out is [0.5, 1.0, 1.5];
        aclnnDivs(x.raw, half, out.raw) => out is [2.0, 4.0, 6.0];
        aclnnAdds(x.raw, scalar(I64, 4.0), scalar(I64, 1.0), x.raw) => x is [5.0, 6.0, 7.0];
    }
    // Integers wrap in the type that is computed in, also where the output is wider.
    let (x, out) = (device.tensor(U8, &[1], &[200.0]), device.out(I64, &[1]));
    check! { device;
        aclnnMuls(x.raw, scalar(I64, 2.0), out.raw) => out is [144.0];
    }
    // Bounds become numbers of the output's type, as the tensor does.
    let (x, out) = (
        device.tensor(I32, &[3], &[-5.0, 0.0, 5.0]),
        device.out(F16, &[3]),
    );
    let (low, high) = (scalar(F32, -1.5), scalar(F64, 2.5));
    check! { device;
        aclnnClamp(x.raw, low, high, out.raw) => out is [-1.5, 0.0, 2.5];
        aclnnClamp(x.raw, low, high, x.raw) => x is [-1.0, 0.0, 2.0];
    }
    // NaN passes through bounds.
    let x = device.tensor(F32, &[3], &[f64::NAN, -5.0, 5.0]);
    let (low, high, out) = (scalar(F64, -1.0), scalar(F64, 2.0), device.out(F32, &[3]));
    check! { device;
        aclnnClamp(x.raw, low, high, out.raw) => out near [f64::NAN, -1.0, 2.0], 0.0;
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn comparison_logic_and_selection() {
    let device = Device::new();
    let x = device.tensor(F32, &[2, 2], &[1.0, f64::NAN, 3.0, -1.0]);
    let y = device.tensor(F32, &[2], &[1.0, 2.0]);
    let (out, result) = (device.out(Bool, &[2, 2]), device.out(F32, &[2, 2]));
    let one = scalar(F64, 1.0);
    check! { device;
        aclnnEqTensor(x.raw, y.raw, out.raw) => out is [1.0, 0.0, 0.0, 0.0];
        aclnnNeTensor(x.raw, y.raw, out.raw) => out is [0.0, 1.0, 1.0, 1.0];
        aclnnGtTensor(x.raw, y.raw, out.raw) => out is [0.0, 0.0, 1.0, 0.0];
        aclnnGeTensor(x.raw, y.raw, out.raw) => out is [1.0, 0.0, 1.0, 0.0];
        aclnnLtTensor(x.raw, y.raw, out.raw) => out is [0.0, 0.0, 0.0, 1.0];
        aclnnLeTensor(x.raw, y.raw, out.raw) => out is [1.0, 0.0, 0.0, 1.0];
        aclnnLogicalAnd(x.raw, y.raw, out.raw) => out is [1.0; 4];
        aclnnLogicalOr(x.raw, y.raw, out.raw) => out is [1.0; 4];
        aclnnLogicalXor(x.raw, y.raw, out.raw) => out is [0.0; 4];
        aclnnEqScalar(x.raw, one, out.raw) => out is [1.0, 0.0, 0.0, 0.0];
        aclnnNeScalar(x.raw, one, out.raw) => out is [0.0, 1.0, 1.0, 1.0];
        aclnnGeScalar(x.raw, one, out.raw) => out is [1.0, 0.0, 1.0, 0.0];
        aclnnLtScalar(x.raw, one, out.raw) => out is [0.0, 0.0, 0.0, 1.0];
        aclnnLeScalar(x.raw, one, out.raw) => out is [1.0, 0.0, 0.0, 1.0];
        aclnnGtScalar(x.raw, scalar(F64, 0.5), out.raw) => out is [1.0, 0.0, 1.0, 0.0];
        aclnnLogicalNot(out.raw, out.raw) => out is [0.0, 1.0, 0.0, 1.0];
        aclnnSWhere(out.raw, x.raw, y.raw, result.raw)
            => result near [1.0, f64::NAN, 1.0, -1.0], 0.0;
    }
    let (mask, lowest) = (device.tensor(Bool, &[2], &[0.0, 1.0]), f64::NEG_INFINITY);
    let bytes = device.tensor(U8, &[2], &[0.0, 1.0]);
    check! { device;
        aclnnInplaceMaskedFillScalar(x.raw, mask.raw, scalar(F64, lowest))
            => x is [1.0, lowest, 3.0, lowest];
        aclnnInplaceMaskedFillScalar(x.raw, bytes.raw, scalar(F64, 0.0))
            refuses PARAM_INVALID, "mask is Uint8, one of [Bool] is expected";
    }
}

/// Each operator makes a tensor of a number first, of the type that both are computed in.
#[test]
fn a_number_becomes_the_type_that_is_computed_in() {
    let device = Device::new();
    let (x, seven) = (
        device.tensor(F16, &[1], &[0.1]),
        device.tensor(F16, &[1], &[7.0]),
    );
    let (truth, half, single) = (
        device.out(Bool, &[1]),
        device.out(F16, &[1]),
        device.out(F32, &[1]),
    );
    let (double, float) = (scalar(F64, 0.1), scalar(F32, f64::from(0.1_f32)));
    let rounded = x.values()[0];
    check! { device;
        // f16(0.1) is below 0.1 and equal to f16(0.1).
        aclnnEqScalar(x.raw, double, truth.raw) => truth is [1.0];
        aclnnNeScalar(x.raw, double, truth.raw) => truth is [0.0];
        aclnnLtScalar(x.raw, double, truth.raw) => truth is [0.0];
        aclnnLeScalar(x.raw, double, truth.raw) => truth is [1.0];
        // These two compare unrounded where the tensor's type loses something: in f64, and in f32
        // with a number of that type.
        aclnnGeScalar(x.raw, double, truth.raw) => truth is [0.0];
        aclnnGtScalar(x.raw, scalar(F64, 0.0999), truth.raw) => truth is [1.0];
        aclnnGeScalar(x.raw, float, truth.raw) => truth is [0.0];
        aclnnGeScalar(x.raw, scalar(F64, f64::INFINITY), truth.raw) => truth is [0.0];
        aclnnLeScalar(x.raw, float, truth.raw) => truth is [1.0];
        // f16 of 7 times f16(0.1), where f16 of 7 times 0.1 is 0.7001953125.
        aclnnMuls(seven.raw, double, half.raw) => half is [0.69970703125];
        aclnnAdds(seven.raw, double, scalar(I64, 1.0), half.raw) => half is [7.1015625];
        // A 16-bit result stays one in a wider output.
        aclnnMuls(seven.raw, double, single.raw) => single is [0.69970703125];
        aclnnDivs(seven.raw, double, half.raw) => half near [7.0 / rounded], F16.step();
    }
    // bf16 is multiplied in f32.
    let (x, out) = (device.tensor(Bf16, &[1], &[13.0]), device.out(Bf16, &[1]));
    check! { device;
        aclnnMuls(x.raw, double, out.raw) => out is [1.296875];
    }
    // f32 loses less than the limit of 2^-23 of 0.1, and more of 12345.678.
    let x = device.tensor(F32, &[2], &[0.1, 12345.678]);
    let truth = device.out(Bool, &[2]);
    check! { device;
        aclnnGtScalar(x.raw, double, truth.raw) => truth is [0.0, 1.0];
        aclnnGeScalar(x.raw, scalar(F64, 12345.678), truth.raw) => truth is [0.0, 0.0];
        aclnnLeScalar(x.raw, scalar(F64, 12345.678), truth.raw) => truth is [1.0, 1.0];
    }
    // Integers meet an f64 number in f64 where they are tested for equality, and in f32 below it.
    let x = device.tensor(I32, &[2], &[16_777_216.0, 16_777_217.0]);
    let number = scalar(F64, 16_777_217.0);
    check! { device;
        aclnnEqScalar(x.raw, number, truth.raw) => truth is [0.0, 1.0];
        aclnnLtScalar(x.raw, number, truth.raw) => truth is [0.0, 0.0];
        aclnnLeScalar(x.raw, scalar(F64, 16_777_216.0), truth.raw) => truth is [1.0, 1.0];
        aclnnGeScalar(x.raw, number, truth.raw) => truth is [0.0, 1.0];
    }
    // Tensors are converted before they meet, too: 2049 is not a number of f16.
    let x = device.tensor(I32, &[1], &[2049.0]);
    let zero = device.tensor(F16, &[1], &[0.0]);
    check! { device;
        aclnnAdd(x.raw, zero.raw, scalar(I64, 1.0), single.raw) => single is [2048.0];
    }
    // The upper half of u64 is above the lower.
    let x = device.tensor(U64, &[2], &[1.0, 2.0_f64.powi(63)]);
    check! { device;
        aclnnGtTensor(x.raw, x.raw, truth.raw) => truth is [0.0, 0.0];
        aclnnGtScalar(x.raw, scalar(U64, 2.0), truth.raw) => truth is [0.0, 1.0];
    }
    assert_eq!(control::violations(), []);
}

/// Refusals of the first phases, with their codes, rule by rule.
#[test]
fn results_convert_to_some_outputs() {
    let device = Device::new();
    let [f32s, f16s, bf16s, i8s, i16s, i32s, u16s, bools] =
        [F32, F16, Bf16, I8, I16, I32, U16, Bool].map(|dtype| device.out(dtype, &[2]).raw);
    let none = device.out(F32, &[0]).raw;
    let [one, whole, unsigned, truth] = [F32, I64, U16, Bool].map(|dtype| scalar(dtype, 1.0));
    check! { device;
        // A float result is no integer, a number no truth value.
        aclnnAdd(f32s, f32s, one, i32s) refuses PARAM_INVALID, "does not convert";
        aclnnAdd(i32s, i32s, whole, bools) refuses PARAM_INVALID, "does not convert";
        aclnnAdd(i32s, i32s, one, i32s) refuses PARAM_INVALID, "alpha is Float";
        aclnnMul(bf16s, i8s, i8s) refuses PARAM_INVALID, "does not convert";
        aclnnMuls(i8s, one, i8s) refuses PARAM_INVALID, "does not convert";
        aclnnDiv(f32s, i32s, i32s) refuses PARAM_INVALID, "does not convert";
        aclnnDivs(i32s, one, i32s) refuses PARAM_INVALID, "does not convert";
        aclnnNeg(f32s, i32s) refuses PARAM_INVALID, "does not convert";
        aclnnClamp(f32s, one, one, i32s) refuses PARAM_INVALID, "does not convert";
        // These give the input's type or a float.
        aclnnAbs(f32s, f16s) refuses PARAM_INVALID, "out is Float16";
        aclnnRelu(f32s, f16s) refuses PARAM_INVALID, "out is Float16";
        aclnnRelu(i16s, i16s) refuses PARAM_INVALID, "self is Int16";
        aclnnSigmoid(f32s, i32s) refuses PARAM_INVALID, "out is Int32";
        aclnnGeluBackwardV2(f32s, f16s, c"none".as_ptr(), f16s)
            refuses PARAM_INVALID, "gradInput is Float16";
        // Unsigned integers promote with themselves only.
        aclnnMul(f32s, f32s, u16s) refuses PARAM_INVALID, "out is Uint16";
        aclnnEqTensor(u16s, u16s, bools) refuses PARAM_INVALID, "self is Uint16";
        aclnnGtScalar(f32s, unsigned, bools) refuses PARAM_INVALID, "do not promote";
        aclnnEqScalar(f32s, unsigned, bools) refuses PARAM_INVALID, "the number is Uint16";
        aclnnInplaceFillScalar(f32s, unsigned) refuses PARAM_INVALID, "do not promote";
        aclnnPowTensorScalar(bools, truth, i32s) refuses PARAM_INVALID, "both Bool";
        // A fault found inside of the operator has another code, and is not found in empty tensors.
        aclnnMuls(bools, unsigned, f32s) refuses INNER, "do not promote";
        aclnnSWhere(bools, f32s, u16s, f32s) refuses INNER, "do not promote";
        aclnnSWhere(bools, bools, bools, f32s) refuses INNER, "out is Float";
        aclnnSign(bf16s, f32s) refuses INNER, "result is Float";
        aclnnSign(f32s, bf16s) refuses PARAM_INVALID, "result is Bf16";
        aclnnCast(f32s, F16 as i32, bf16s) refuses INNER, "out is Bf16";
        aclnnCast(none, F16 as i32, none);
    }
    // Types taken beside those that most operators take.
    let (x, out) = (device.tensor(U16, &[2], &[1.0, 2.0]), device.out(U16, &[2]));
    let flags = device.tensor(Bool, &[2], &[1.0, 0.0]);
    let numbers = device.tensor(F32, &[2], &[0.5, 0.0]);
    let truths = device.out(Bool, &[2]);
    check! { device;
        aclnnFloor(x.raw, out.raw) => out is [1.0, 2.0];
        aclnnSWhere(flags.raw, x.raw, out.raw, out.raw) => out is [1.0, 2.0];
        aclnnLeScalar(x.raw, scalar(U16, 1.0), truths.raw) => truths is [1.0, 0.0];
        aclnnSWhere(flags.raw, numbers.raw, numbers.raw, truths.raw) => truths is [1.0, 0.0];
        aclnnInplaceFillScalar(truths.raw, scalar(F32, 0.5)) => truths is [1.0, 1.0];
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn copies_casts_and_fills() {
    let device = Device::new();
    let data: Vec<f64> = (0..24).map(f64::from).collect();
    // A transposed slice of a larger tensor into every second column of another, with a cast.
    let source = device.view(F32, &data, &[3, 2], Some(&[1, 6]), 7);
    let target = device.view(I32, &[9.0; 12], &[3, 2], Some(&[4, 2]), 1);
    check! { device;
        aclnnInplaceCopy(target.raw, source.raw)
            => target is [9.0, 7.0, 9.0, 13.0, 9.0, 8.0, 9.0, 14.0, 9.0, 9.0, 9.0, 15.0];
    }
    // The AI Core writes gaps that are one axis's alone, and any gaps between 32 neighbours; other
    // views are the AI CPU's, which knows no unsigned integers but u8.
    for (dims, strides, taken) in [
        (&[3, 2][..], &[4, 2][..], true),
        (&[3, 2], &[5, 1], true),
        (&[2, 3], &[1, 2], true),
        (&[3, 2], &[8, 2], false),
        (&[2, 3, 2], &[13, 4, 1], false),
        (&[2, 3, 40], &[130, 42, 1], true),
    ] {
        let source = device.out(F32, dims);
        for (dtype, taken) in [(U16, taken), (F32, true)] {
            let target = device.view(dtype, &[0.0; 300], dims, Some(strides), 0);
            let outcome = plan!(aclnnInplaceCopy(target.raw, source.raw));
            if taken {
                outcome.expect("taken");
            } else {
                assert_refused(outcome, INNER, "only the AI CPU writes");
            }
        }
    }
    // Broadcast, also by a stride of 0.
    let target = device.out(F32, &[2, 3]);
    for (dims, strides) in [([1, 3], [3, 1]), ([2, 3], [0, 1])] {
        let row = device.view(Bf16, &[1.0, 2.0, 3.0], &dims, Some(&strides), 0);
        check! { device;
            aclnnInplaceCopy(target.raw, row.raw) => target is [1.0, 2.0, 3.0, 1.0, 2.0, 3.0];
        }
    }
    // Casts truncate, NaN becomes 0, 16-bit floats round to nearest.
    let x = device.tensor(F32, &[4], &[1.9, -1.9, f64::NAN, 0.0]);
    for (dtype, expected) in [(I32, [1.0, -1.0, 0.0, 0.0]), (Bool, [1.0, 1.0, 1.0, 0.0])] {
        let out = device.out(dtype, &[4]);
        check! { device;
            aclnnCast(x.raw, dtype as i32, out.raw) => out is expected;
        }
    }
    let x = device.tensor(F32, &[2], &[1.0 + 3.0 / 256.0, 65520.0]);
    let out = device.out(Bf16, &[2]);
    check! { device;
        aclnnCast(x.raw, Bf16 as i32, out.raw) => out is [1.015625, 65536.0];
        aclnnCast(x.raw, F16 as i32, out.raw)
            refuses INNER, "out is Bf16, one of [Float16] is expected";
    }
    let x = device.view(I16, &[5.0; 6], &[3], Some(&[2]), 1);
    let (one, three, step) = (scalar(F64, 1.0), scalar(F64, 3.0), scalar(F64, 0.5));
    let out = device.out(F32, &[4]);
    check! { device;
        aclnnInplaceFillScalar(x.raw, scalar(I64, -3.0)) => x is [5.0, -3.0, 5.0, -3.0, 5.0, -3.0];
        aclnnArange(one, three, step, out.raw) => out is [1.0, 1.5, 2.0, 2.5];
        // The step of integers is one, and half of it nothing.
        aclnnArange(one, three, step, device.out(I64, &[4]).raw) refuses PARAM_INVALID, "step 0";
        aclnnArange(three, one, step, out.raw) refuses PARAM_INVALID, "does not lead to the end";
        aclnnArange(one, scalar(U16, 3.0), step, out.raw) refuses PARAM_INVALID, "end is Uint16";
    }
    assert_eq!(control::violations(), []);
}
