//! Operators of each element by itself.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

type OneToOne = unsafe extern "C" fn(
    *const aclTensor,
    *mut aclTensor,
    *mut u64,
    *mut *mut aclOpExecutor,
) -> i32;

/// The error function by its Maclaurin series, which converges well below 4.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..80 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

#[test]
fn functions_of_one_number() {
    let device = Device::new();
    type Row = (&'static str, OneToOne, Second, fn(f64) -> f64);
    let table: &[Row] = &[
        ("neg", aclnnNegGetWorkspaceSize, aclnnNeg, |x| -x),
        ("abs", aclnnAbsGetWorkspaceSize, aclnnAbs, f64::abs),
        ("sign", aclnnSignGetWorkspaceSize, aclnnSign, |x| {
            if x == 0.0 { 0.0 } else { x.signum() }
        }),
        ("sqrt", aclnnSqrtGetWorkspaceSize, aclnnSqrt, f64::sqrt),
        ("rsqrt", aclnnRsqrtGetWorkspaceSize, aclnnRsqrt, |x| {
            1.0 / x.sqrt()
        }),
        (
            "reciprocal",
            aclnnReciprocalGetWorkspaceSize,
            aclnnReciprocal,
            |x| 1.0 / x,
        ),
        ("exp", aclnnExpGetWorkspaceSize, aclnnExp, f64::exp),
        ("log", aclnnLogGetWorkspaceSize, aclnnLog, f64::ln),
        ("log1p", aclnnLog1pGetWorkspaceSize, aclnnLog1p, |x| {
            (1.0 + x).ln()
        }),
        ("tanh", aclnnTanhGetWorkspaceSize, aclnnTanh, f64::tanh),
        ("sin", aclnnSinGetWorkspaceSize, aclnnSin, f64::sin),
        ("cos", aclnnCosGetWorkspaceSize, aclnnCos, f64::cos),
        ("floor", aclnnFloorGetWorkspaceSize, aclnnFloor, f64::floor),
        ("ceil", aclnnCeilGetWorkspaceSize, aclnnCeil, f64::ceil),
        (
            "round",
            aclnnRoundGetWorkspaceSize,
            aclnnRound,
            f64::round_ties_even,
        ),
        (
            "sigmoid",
            aclnnSigmoidGetWorkspaceSize,
            aclnnSigmoid,
            sigmoid,
        ),
        ("silu", aclnnSiluGetWorkspaceSize, aclnnSilu, |x| {
            x * sigmoid(x)
        }),
        ("gelu", aclnnGeluGetWorkspaceSize, aclnnGelu, gelu_tanh),
        ("relu", aclnnReluGetWorkspaceSize, aclnnRelu, |x| {
            if x > 0.0 { x } else { 0.0 }
        }),
    ];
    let data = numbers(24, 1);
    for &(name, first, second, expected) in table {
        for dtype in [F32, F16, Bf16] {
            let (x, out) = (
                device.tensor(dtype, &[4, 6], &data),
                device.out(dtype, &[4, 6]),
            );
            run!(device, second first(x.raw, out.raw)).expect(name);
            let expected: Vec<f64> = data.iter().map(|x| expected(*x)).collect();
            assert_close(
                &out.values(),
                &expected,
                2.0 * dtype.step(),
                &format!("{name} {dtype:?}"),
            );
        }
    }
    for dtype in [F32, F16] {
        let (x, out) = (device.tensor(dtype, &[24], &data), device.out(dtype, &[24]));
        check! { device;
            aclnnErf aclnnErfGetWorkspaceSize(x.raw, out.raw);
        }
        let expected: Vec<f64> = data.iter().map(|x| erf(*x)).collect();
        assert_close(&out.values(), &expected, 2.0 * dtype.step(), "erf");
        check! { device;
            aclnnGeluV2 aclnnGeluV2GetWorkspaceSize(x.raw, 0, out.raw);
        }
        let expected: Vec<f64> = data
            .iter()
            .map(|x| 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt())))
            .collect();
        assert_close(&out.values(), &expected, 2.0 * dtype.step(), "gelu");
    }
    // Integers are computed as floats, or as they are.
    let (x, out) = (
        device.tensor(I32, &[3], &[-4.0, 0.0, 9.0]),
        device.out(F32, &[3]),
    );
    check! { device;
        aclnnSqrt aclnnSqrtGetWorkspaceSize(x.raw, out.raw) => out near [f64::NAN, 0.0, 3.0], 0.0;
        aclnnInplaceNeg aclnnInplaceNegGetWorkspaceSize(x.raw) => x is [4.0, 0.0, -9.0];
    }
    assert_eq!(control::violations(), []);
}

/// Derivatives by central differences of the functions above.
#[test]
fn gradients_of_activations_are_their_derivatives() {
    let device = Device::new();
    let (x, g) = (numbers(20, 2), numbers(20, 3));
    let slope = |f: fn(f64) -> f64, x: f64| (f(x + 1e-6) - f(x - 1e-6)) / 2e-6;
    let expect = |f: fn(f64) -> f64| -> Vec<f64> {
        x.iter().zip(&g).map(|(x, g)| g * slope(f, *x)).collect()
    };
    let outputs = |f: fn(f64) -> f64| -> Vec<f64> { x.iter().map(|x| f(*x)).collect() };
    let silu: fn(f64) -> f64 = |x| x * sigmoid(x);
    let gelu: fn(f64) -> f64 = |x| 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()));
    let (grad, out) = (device.tensor(F32, &[20], &g), device.out(F32, &[20]));
    let saved = device.tensor(F32, &[20], &outputs(sigmoid));
    check! { device;
        aclnnSigmoidBackward aclnnSigmoidBackwardGetWorkspaceSize(grad.raw, saved.raw, out.raw) => out near expect(sigmoid), 1e-6;
    }
    let saved = device.tensor(F32, &[20], &outputs(f64::tanh));
    check! { device;
        aclnnTanhBackward aclnnTanhBackwardGetWorkspaceSize(grad.raw, saved.raw, out.raw) => out near expect(f64::tanh), 1e-6;
    }
    let saved = device.tensor(F32, &[20], &x);
    check! { device;
        aclnnSiluBackward aclnnSiluBackwardGetWorkspaceSize(grad.raw, saved.raw, out.raw) => out near expect(silu), 1e-6;
    }
    for (name, f) in [(c"none", gelu), (c"tanh", gelu_tanh)] {
        check! { device;
            aclnnGeluBackwardV2 aclnnGeluBackwardV2GetWorkspaceSize(grad.raw, saved.raw, name.as_ptr(), out.raw) => out near expect(f), 1e-6;
        }
    }
    check! { device;
        aclnnGeluBackwardV2GetWorkspaceSize(grad.raw, saved.raw, c"erf".as_ptr(), out.raw) refuses PARAM_INVALID, "`none` or `tanh` is expected";
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
        check! { device;
            aclnnAdd aclnnAddGetWorkspaceSize(x.raw, y.raw, half, out.raw) => out is spread(|a, b| a + 0.5 * b);
            aclnnSub aclnnSubGetWorkspaceSize(x.raw, y.raw, half, out.raw) => out is spread(|a, b| a - 0.5 * b);
            aclnnMul aclnnMulGetWorkspaceSize(x.raw, y.raw, out.raw) => out is spread(|a, b| a * b);
            aclnnDiv aclnnDivGetWorkspaceSize(x.raw, y.raw, out.raw) => out near spread(|a, b| a / b), to.step();
            aclnnMaximum aclnnMaximumGetWorkspaceSize(x.raw, y.raw, out.raw) => out is spread(f64::max);
        }
    }
    // True division of integers gives floats; trunc and floor differ below zero.
    let (x, y) = (
        device.tensor(I32, &[4], &[7.0, -7.0, 7.0, -7.0]),
        device.tensor(I32, &[4], &[2.0, 2.0, -2.0, -2.0]),
    );
    let (floats, whole) = (device.out(F32, &[4]), device.out(I32, &[4]));
    check! { device;
        aclnnDiv aclnnDivGetWorkspaceSize(x.raw, y.raw, floats.raw) => floats is [3.5, -3.5, -3.5, 3.5];
        aclnnDivGetWorkspaceSize(x.raw, y.raw, whole.raw) refuses PARAM_INVALID, "out is Int32";
    }
    for (mode, expected) in [(1, [3.0, -3.0, -3.0, 3.0]), (2, [3.0, -4.0, -4.0, 3.0])] {
        check! { device;
            aclnnDivMod aclnnDivModGetWorkspaceSize(x.raw, y.raw, mode, whole.raw) => whole is expected;
        }
    }
    check! { device;
        aclnnRemainderTensorTensor aclnnRemainderTensorTensorGetWorkspaceSize(x.raw, y.raw, whole.raw) => whole is [1.0, 1.0, -1.0, -1.0];
        aclnnRemainderTensorScalar aclnnRemainderTensorScalarGetWorkspaceSize(x.raw, scalar(I64, 0.0), whole.raw);
    }
    assert_eq!(whole.values(), x.values(), "x mod 0 is x");
    check! { device;
        aclnnPowTensorScalar aclnnPowTensorScalarGetWorkspaceSize(x.raw, scalar(I64, 2.0), whole.raw) => whole is [49.0; 4];
        aclnnPowScalarTensor aclnnPowScalarTensorGetWorkspaceSize(scalar(F64, 2.0), x.raw, floats.raw) => floats is [128.0, 0.0078125, 128.0, 0.0078125];
        aclnnPowTensorScalarGetWorkspaceSize(x.raw, scalar(I64, -1.0), whole.raw) refuses PARAM_INVALID, "exponent is -1";
    }
    // A float scalar never widens; an integer tensor with a float scalar becomes f32.
    let x = device.tensor(I64, &[3], &[1.0, 2.0, 3.0]);
    let out = device.out(F32, &[3]);
    check! { device;
        aclnnMuls aclnnMulsGetWorkspaceSize(x.raw, half, out.raw) => out is [0.5, 1.0, 1.5];
        aclnnRsubs aclnnRsubsGetWorkspaceSize(x.raw, half, scalar(I64, 2.0), out.raw) => out is [-1.5, -3.5, -5.5];
        aclnnInplaceAdds aclnnInplaceAddsGetWorkspaceSize(x.raw, scalar(I64, 4.0), scalar(I64, 1.0)) => x is [5.0, 6.0, 7.0];
    }
    // Integers wrap in the type that is computed in, also where the output is wider.
    let (x, out) = (device.tensor(U8, &[1], &[200.0]), device.out(I64, &[1]));
    check! { device;
        aclnnMuls aclnnMulsGetWorkspaceSize(x.raw, scalar(I64, 2.0), out.raw) => out is [144.0];
    }
    // NaN passes through extremes and bounds.
    let (x, out) = (
        device.tensor(F32, &[3], &[f64::NAN, -5.0, 5.0]),
        device.out(F32, &[3]),
    );
    check! { device;
        aclnnClamp aclnnClampGetWorkspaceSize(x.raw, scalar(F64, -1.0), scalar(F64, 2.0), out.raw) => out near [f64::NAN, -1.0, 2.0], 0.0;
        aclnnMinimum aclnnMinimumGetWorkspaceSize(x.raw, x.raw, out.raw);
    }
    assert!(out.values()[0].is_nan());
    assert_eq!(control::violations(), []);
}

#[test]
fn comparison_logic_and_selection() {
    let device = Device::new();
    let (x, y) = (
        device.tensor(F32, &[2, 2], &[1.0, f64::NAN, 3.0, -1.0]),
        device.tensor(F32, &[2], &[1.0, 2.0]),
    );
    let out = device.out(Bool, &[2, 2]);
    type Compare = unsafe extern "C" fn(
        *const aclTensor,
        *const aclTensor,
        *mut aclTensor,
        *mut u64,
        *mut *mut aclOpExecutor,
    ) -> i32;
    let table: [(Compare, Second, [f64; 4]); 9] = [
        (
            aclnnEqTensorGetWorkspaceSize,
            aclnnEqTensor,
            [1.0, 0.0, 0.0, 0.0],
        ),
        (
            aclnnNeTensorGetWorkspaceSize,
            aclnnNeTensor,
            [0.0, 1.0, 1.0, 1.0],
        ),
        (
            aclnnGtTensorGetWorkspaceSize,
            aclnnGtTensor,
            [0.0, 0.0, 1.0, 0.0],
        ),
        (
            aclnnGeTensorGetWorkspaceSize,
            aclnnGeTensor,
            [1.0, 0.0, 1.0, 0.0],
        ),
        (
            aclnnLtTensorGetWorkspaceSize,
            aclnnLtTensor,
            [0.0, 0.0, 0.0, 1.0],
        ),
        (
            aclnnLeTensorGetWorkspaceSize,
            aclnnLeTensor,
            [1.0, 0.0, 0.0, 1.0],
        ),
        (aclnnLogicalAndGetWorkspaceSize, aclnnLogicalAnd, [1.0; 4]),
        (aclnnLogicalOrGetWorkspaceSize, aclnnLogicalOr, [1.0; 4]),
        (aclnnLogicalXorGetWorkspaceSize, aclnnLogicalXor, [0.0; 4]),
    ];
    for (i, (first, second, expected)) in table.into_iter().enumerate() {
        run!(device, second first(x.raw, y.raw, out.raw)).expect("runs");
        assert_eq!(out.values(), expected, "row {i}");
    }
    check! { device;
        aclnnGtScalar aclnnGtScalarGetWorkspaceSize(x.raw, scalar(F64, 0.5), out.raw) => out is [1.0, 0.0, 1.0, 0.0];
        aclnnLogicalNot aclnnLogicalNotGetWorkspaceSize(out.raw, out.raw) => out is [0.0, 1.0, 0.0, 1.0];
    }
    let result = device.out(F32, &[2, 2]);
    check! { device;
        aclnnSWhere aclnnSWhereGetWorkspaceSize(out.raw, x.raw, y.raw, result.raw) => result near [1.0, f64::NAN, 1.0, -1.0], 0.0;
        aclnnIsFinite aclnnIsFiniteGetWorkspaceSize(x.raw, out.raw) => out is [1.0, 0.0, 1.0, 1.0];
    }
    let mask = device.tensor(Bool, &[2], &[0.0, 1.0]);
    check! { device;
        aclnnInplaceMaskedFillScalar aclnnInplaceMaskedFillScalarGetWorkspaceSize(x.raw, mask.raw, scalar(F64, f64::NEG_INFINITY)) => x is [1.0, f64::NEG_INFINITY, 3.0, f64::NEG_INFINITY];
    }
    let mask = device.tensor(U8, &[2], &[0.0, 1.0]);
    check! { device;
        aclnnInplaceMaskedFillScalarGetWorkspaceSize(x.raw, mask.raw, scalar(F64, 0.0)) refuses PARAM_INVALID, "mask is Uint8, one of [Bool] is expected";
    }
}

#[test]
fn copies_casts_and_fills() {
    let device = Device::new();
    let data: Vec<f64> = (0..24).map(f64::from).collect();
    // A transposed slice of a larger tensor into every second column of another, with a cast.
    let source = device.view(F32, &data, &[3, 2], Some(&[1, 6]), 7);
    let target = device.view(I32, &[9.0; 12], &[3, 2], Some(&[4, 2]), 1);
    check! { device;
        aclnnInplaceCopy aclnnInplaceCopyGetWorkspaceSize(target.raw, source.raw) => target is [9.0, 7.0, 9.0, 13.0, 9.0, 8.0, 9.0, 14.0, 9.0, 9.0, 9.0, 15.0];
    }
    // Broadcast, also by a stride of 0.
    let target = device.out(F32, &[2, 3]);
    for (dims, strides) in [([1, 3], [3, 1]), ([2, 3], [0, 1])] {
        let row = device.view(Bf16, &[1.0, 2.0, 3.0], &dims, Some(&strides), 0);
        check! { device;
            aclnnInplaceCopy aclnnInplaceCopyGetWorkspaceSize(target.raw, row.raw) => target is [1.0, 2.0, 3.0, 1.0, 2.0, 3.0];
        }
    }
    // Casts cut towards zero, NaN becomes 0, halves round to nearest.
    let x = device.tensor(F32, &[4], &[1.9, -1.9, f64::NAN, 0.0]);
    for (dtype, expected) in [(I32, [1.0, -1.0, 0.0, 0.0]), (Bool, [1.0, 1.0, 1.0, 0.0])] {
        let out = device.out(dtype, &[4]);
        check! { device;
            aclnnCast aclnnCastGetWorkspaceSize(x.raw, dtype as i32, out.raw) => out is expected;
        }
    }
    let (x, out) = (
        device.tensor(F32, &[2], &[1.0 + 3.0 / 256.0, 65520.0]),
        device.out(Bf16, &[2]),
    );
    check! { device;
        aclnnCast aclnnCastGetWorkspaceSize(x.raw, Bf16 as i32, out.raw) => out is [1.015625, 65536.0];
        aclnnCastGetWorkspaceSize(x.raw, F16 as i32, out.raw) refuses PARAM_INVALID, "out is Bf16, one of [Float16] is expected";
    }

    let x = device.view(I16, &[5.0; 6], &[3], Some(&[2]), 1);
    check! { device;
        aclnnInplaceZero aclnnInplaceZeroGetWorkspaceSize(x.raw) => x is [5.0, 0.0, 5.0, 0.0, 5.0, 0.0];
        aclnnInplaceOne aclnnInplaceOneGetWorkspaceSize(x.raw);
        aclnnInplaceFillScalar aclnnInplaceFillScalarGetWorkspaceSize(x.raw, scalar(I64, -3.0)) => x is [5.0, -3.0, 5.0, -3.0, 5.0, -3.0];
    }
    let out = device.out(F32, &[4]);
    check! { device;
        aclnnArange aclnnArangeGetWorkspaceSize(scalar(F64, 1.0), scalar(F64, 3.0), scalar(F64, 0.5), out.raw) => out is [1.0, 1.5, 2.0, 2.5];
    }
    assert_eq!(control::violations(), []);
}
