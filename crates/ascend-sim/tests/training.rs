//! The operators of training: values by their mathematical definition in f64, shapes, types, views,
//! refusals and lifetimes.
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

mod support;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;
use half::{bf16, f16};
use support::{Device, recent_message};

const NULL_POINTER: i32 = 161001;
const PARAM_INVALID: i32 = 161002;
const TILING: i32 = 561002;
const INNER_NULLPTR: i32 = 561103;
const EXCEPTION: i32 = 507015;

const ND: i32 = 2;
const NCHW: i32 = 0;

/// The element types of the tests, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    F32 = 0,
    F16 = 1,
    I8 = 2,
    I32 = 3,
    U8 = 4,
    I16 = 6,
    I64 = 9,
    F64 = 11,
    Bool = 12,
    Bf16 = 27,
}

use Type::*;

impl Type {
    fn encode(self, x: f64) -> Vec<u8> {
        match self {
            F32 => (x as f32).to_le_bytes().to_vec(),
            F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            F64 => x.to_le_bytes().to_vec(),
            I8 => (x as i8).to_le_bytes().to_vec(),
            I16 => (x as i16).to_le_bytes().to_vec(),
            I32 => (x as i32).to_le_bytes().to_vec(),
            I64 => (x as i64).to_le_bytes().to_vec(),
            U8 | Bool => vec![x as u8],
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<f64> {
        let size = self.encode(0.0).len();
        let one = |b: &[u8]| match self {
            F32 => f64::from(f32::from_le_bytes(b.try_into().expect("4 bytes"))),
            F16 => f16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64(),
            Bf16 => bf16::from_le_bytes(b.try_into().expect("2 bytes")).to_f64(),
            F64 => f64::from_le_bytes(b.try_into().expect("8 bytes")),
            I8 => f64::from(b[0] as i8),
            I16 => f64::from(i16::from_le_bytes(b.try_into().expect("2 bytes"))),
            I32 => f64::from(i32::from_le_bytes(b.try_into().expect("4 bytes"))),
            I64 => i64::from_le_bytes(b.try_into().expect("8 bytes")) as f64,
            U8 | Bool => f64::from(b[0]),
        };
        bytes.chunks_exact(size).map(one).collect()
    }

    /// The distance from 1 to the next number, for tolerances.
    fn step(self) -> f64 {
        match self {
            F32 => f64::from(f32::EPSILON),
            F16 => 2.0_f64.powi(-10),
            Bf16 => 2.0_f64.powi(-7),
            F64 => f64::EPSILON,
            _ => 0.0,
        }
    }
}

/// A tensor on the device, dense unless made a view.
#[derive(Clone, Copy)]
struct Tensor<'d> {
    device: &'d Device,
    raw: *mut aclTensor,
    address: u64,
    count: usize,
    dtype: Type,
}

impl Tensor<'_> {
    /// All that lies in the storage.
    fn values(&self) -> Vec<f64> {
        let bytes: Vec<u8> = self
            .device
            .download(self.address, self.count * self.dtype.encode(0.0).len());
        self.dtype.decode(&bytes)
    }
}

/// A descriptor over memory.
fn describe(
    dims: &[i64],
    strides: Option<&[i64]>,
    offset: i64,
    dtype: Type,
    format: i32,
    storage: usize,
    address: u64,
) -> *mut aclTensor {
    let storage = storage as i64;
    // SAFETY: the lists are as long as the counts say.
    unsafe {
        aclCreateTensor(
            dims.as_ptr(),
            dims.len() as u64,
            dtype as i32,
            strides.map_or(null(), <[i64]>::as_ptr),
            offset,
            format,
            &raw const storage,
            1,
            address as *mut c_void,
        )
    }
}

impl Device {
    /// Memory of a type, and a view of it.
    fn view(
        &self,
        dtype: Type,
        data: &[f64],
        dims: &[i64],
        strides: Option<&[i64]>,
        offset: i64,
    ) -> Tensor<'_> {
        let bytes: Vec<u8> = data.iter().flat_map(|x| dtype.encode(*x)).collect();
        let address = if bytes.is_empty() {
            0
        } else {
            self.upload(&bytes)
        };
        let raw = describe(dims, strides, offset, dtype, ND, data.len(), address);
        assert!(!raw.is_null(), "{}", recent_message());
        Tensor {
            device: self,
            raw,
            address,
            count: data.len(),
            dtype,
        }
    }

    fn tensor(&self, dtype: Type, dims: &[i64], data: &[f64]) -> Tensor<'_> {
        assert_eq!(dims.iter().product::<i64>() as usize, data.len());
        self.view(dtype, data, dims, None, 0)
    }

    /// A tensor whose values are to be overwritten.
    fn out(&self, dtype: Type, dims: &[i64]) -> Tensor<'_> {
        let count = dims.iter().product::<i64>() as usize;
        self.tensor(dtype, dims, &vec![77.0; count])
    }
}

fn scalar(dtype: Type, x: f64) -> *mut aclScalar {
    let mut bytes = dtype.encode(x);
    // SAFETY: one value of the type.
    unsafe { aclCreateScalar(bytes.as_mut_ptr().cast(), dtype as i32) }
}

fn ints(values: &[i64]) -> *mut aclIntArray {
    // SAFETY: a list of the given length.
    unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) }
}

fn bools(values: &[bool]) -> *mut aclBoolArray {
    // SAFETY: a list of the given length.
    unsafe { aclCreateBoolArray(values.as_ptr(), values.len() as u64) }
}

type Failed = (i32, String);
type Second = unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, *mut c_void) -> i32;

/// Runs a second phase with the workspace that was asked for, and waits.
fn finish(
    device: &Device,
    bytes: u64,
    executor: *mut aclOpExecutor,
    second: Second,
) -> Result<(), Failed> {
    let workspace = if bytes == 0 {
        0
    } else {
        device.alloc(bytes as usize)
    };
    // SAFETY: the executor of the first phase, and a workspace of the size it asked for.
    let code = unsafe { second(workspace as *mut c_void, bytes, executor, device.stream) };
    if code != 0 {
        return Err((code, recent_message()));
    }
    device.synchronize()?;
    if workspace == 0 {
        Ok(())
    } else {
        device.free(workspace)
    }
}

/// Calls the first phase of an operator with these arguments; what it gave out.
macro_rules! plan {
    ($first:ident($($arg:expr),* $(,)?)) => {{
        let (mut bytes, mut executor) = (0_u64, null_mut::<aclOpExecutor>());
        // SAFETY: live handles and valid out parameters; wrong ones are errors.
        let code = unsafe { $first($($arg,)* &raw mut bytes, &raw mut executor) };
        if code == 0 { Ok((bytes, executor)) } else { Err((code, recent_message())) }
    }};
}

/// Both phases.
macro_rules! run {
    ($device:expr, $second:ident $first:ident($($arg:expr),* $(,)?)) => {
        plan!($first($($arg),*)).and_then(|(bytes, executor)| finish(&$device, bytes, executor, $second))
    };
}

/// Operators in order: each runs and leaves values, exactly or within a relative tolerance, or its
/// first phase refuses.
macro_rules! check {
    ($device:expr; $second:ident $first:ident($($arg:expr),*) => $out:ident is $expected:expr; $($rest:tt)*) => {
        run!($device, $second $first($($arg),*)).expect(stringify!($second));
        assert_eq!($out.values(), $expected, stringify!($second));
        check! { $device; $($rest)* }
    };
    ($device:expr; $second:ident $first:ident($($arg:expr),*) => $out:ident near $expected:expr, $tolerance:expr; $($rest:tt)*) => {
        run!($device, $second $first($($arg),*)).expect(stringify!($second));
        assert_close(&$out.values(), &$expected, $tolerance, stringify!($second));
        check! { $device; $($rest)* }
    };
    ($device:expr; $second:ident $first:ident($($arg:expr),*); $($rest:tt)*) => {
        run!($device, $second $first($($arg),*)).expect(stringify!($second));
        check! { $device; $($rest)* }
    };
    ($device:expr; $first:ident($($arg:expr),*) refuses $code:expr, $says:expr; $($rest:tt)*) => {
        assert_refused(plan!($first($($arg),*)), $code, $says);
        check! { $device; $($rest)* }
    };
    ($device:expr;) => {};
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        let near = (x - y).abs() <= tolerance * (1.0 + y.abs());
        assert!(
            near || (x.is_nan() && y.is_nan()) || x == y,
            "{what}: element {i} is {x}, {y} is expected"
        );
    }
}

#[track_caller]
fn assert_refused(outcome: Result<impl Sized, Failed>, code: i32, says: &str) {
    let (found, message) = outcome.err().expect("refused");
    assert!(found == code && message.contains(says), "{found} {message}");
}

/// Numbers that look random and are the same every time.
fn numbers(count: usize, seed: u32) -> Vec<f64> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Sixteenths between -4 and 4: exact in every float type.
            f64::from((state >> 25) as i32 - 64) / 16.0
        })
        .collect()
}

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

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
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

#[test]
fn reductions_along_axes() {
    let device = Device::new();
    let data: Vec<f64> = vec![1.0, -2.0, 3.0, 4.0, 5.0, -6.0];
    for dtype in [F32, F16, Bf16] {
        let x = device.tensor(dtype, &[2, 3], &data);
        let (all, rows, columns) = (
            device.out(dtype, &[]),
            device.out(dtype, &[2, 1]),
            device.out(dtype, &[3]),
        );
        let id = dtype as i32;
        check! { device;
            aclnnReduceSum aclnnReduceSumGetWorkspaceSize(x.raw, ints(&[]), false, id, all.raw) => all is [5.0];
            aclnnReduceSum aclnnReduceSumGetWorkspaceSize(x.raw, ints(&[-1]), true, id, rows.raw) => rows is [2.0, 3.0];
            aclnnMean aclnnMeanGetWorkspaceSize(x.raw, ints(&[1]), true, id, rows.raw) => rows near [2.0 / 3.0, 1.0], dtype.step();
            aclnnAmax aclnnAmaxGetWorkspaceSize(x.raw, ints(&[0]), false, columns.raw) => columns is [4.0, 5.0, 3.0];
            aclnnAmin aclnnAminGetWorkspaceSize(x.raw, ints(&[0, 1]), false, all.raw) => all is [-6.0];
        }
        let (best, places) = (device.out(dtype, &[3]), device.out(I64, &[3]));
        check! { device;
            aclnnMaxDim aclnnMaxDimGetWorkspaceSize(x.raw, 0, false, best.raw, places.raw);
        }
        assert_eq!(
            (best.values(), places.values()),
            (vec![4.0, 5.0, 3.0], vec![1.0, 1.0, 0.0])
        );
        let places = device.out(I32, &[2, 1]);
        check! { device;
            aclnnArgMin aclnnArgMinGetWorkspaceSize(x.raw, 1, true, places.raw) => places is [1.0, 2.0];
        }
        let out = device.out(dtype, &[2, 3]);
        check! { device;
            aclnnCumsum aclnnCumsumGetWorkspaceSize(x.raw, 1, id, out.raw) => out is [1.0, -1.0, 2.0, 4.0, 9.0, 3.0];
        }
    }
    // Sums of many halves do not stick: 4096 times 1 in f16, and bool counted in i64.
    let (x, out) = (
        device.tensor(F16, &[4096], &[1.0; 4096]),
        device.out(F16, &[]),
    );
    check! { device;
        aclnnReduceSum aclnnReduceSumGetWorkspaceSize(x.raw, ints(&[0]), false, F16 as i32, out.raw) => out is [4096.0];
    }
    let (x, out) = (
        device.tensor(Bool, &[2, 2], &[1.0, 0.0, 1.0, 1.0]),
        device.out(I64, &[]),
    );
    check! { device;
        aclnnReduceSum aclnnReduceSumGetWorkspaceSize(x.raw, ints(&[]), false, I64 as i32, out.raw) => out is [3.0];
    }
    let out = device.out(Bool, &[2]);
    check! { device;
        aclnnAll aclnnAllGetWorkspaceSize(x.raw, ints(&[1]), false, out.raw) => out is [0.0, 1.0];
        aclnnAny aclnnAnyGetWorkspaceSize(x.raw, ints(&[1]), false, out.raw) => out is [1.0, 1.0];
    }
    let (x, out) = (
        device.tensor(F32, &[4], &[1.0, 2.0, 3.0, 4.0]),
        device.out(F32, &[1]),
    );
    check! { device;
        aclnnProd aclnnProdGetWorkspaceSize(x.raw, F32 as i32, out.raw) => out is [24.0];
    }
    // NaN is more extreme than all; of equals the first counts.
    let x = device.tensor(F32, &[5], &[1.0, f64::NAN, 9.0, f64::NAN, 9.0]);
    let (out, place) = (device.out(F32, &[]), device.out(I64, &[]));
    check! { device;
        aclnnMinDim aclnnMinDimGetWorkspaceSize(x.raw, 0, false, out.raw, place.raw);
    }
    assert!(out.values()[0].is_nan() && place.values() == [1.0]);
    check! { device;
        aclnnMax aclnnMaxGetWorkspaceSize(x.raw, out.raw);
    }
    assert!(out.values()[0].is_nan());
    let x = device.tensor(I32, &[3], &[1.0, 9.0, 9.0]);
    check! { device;
        aclnnArgMax aclnnArgMaxGetWorkspaceSize(x.raw, 0, false, place.raw) => place is [1.0];
    }
    // Of nothing: a sum is 0, a mean NaN, an extreme an error.
    let (x, out) = (device.tensor(F32, &[0, 2], &[]), device.out(F32, &[2]));
    check! { device;
        aclnnReduceSum aclnnReduceSumGetWorkspaceSize(x.raw, ints(&[0]), false, 0, out.raw) => out is [0.0, 0.0];
        aclnnMean aclnnMeanGetWorkspaceSize(x.raw, ints(&[0]), false, 0, out.raw);
    }
    assert!(out.values().iter().all(|x| x.is_nan()));
    check! { device;
        aclnnAmaxGetWorkspaceSize(x.raw, ints(&[0]), false, out.raw) refuses PARAM_INVALID, "no extreme";
    }
    let (x, places) = (device.tensor(I32, &[2], &[1.0, 2.0]), device.out(I64, &[]));
    let out = device.out(I32, &[]);
    check! { device;
        aclnnMaxDimGetWorkspaceSize(x.raw, 0, false, out.raw, places.raw) refuses PARAM_INVALID, "self is Int32";
        aclnnReduceSumGetWorkspaceSize(x.raw, null(), false, 3, out.raw) refuses NULL_POINTER, "dims is null";
        aclnnAmaxGetWorkspaceSize(x.raw, ints(&[0, -1]), false, out.raw) refuses PARAM_INVALID, "axis 0 twice";
    }
}

fn dense_product(a: &[f64], b: &[f64], [rows, depth, columns]: [usize; 3]) -> Vec<f64> {
    (0..rows * columns)
        .map(|i| {
            (0..depth)
                .map(|k| a[i / columns * depth + k] * b[k * columns + i % columns])
                .sum()
        })
        .collect()
}

#[test]
fn products_of_matrices() {
    let device = Device::new();
    let (rows, depth, columns) = (5, 70, 300);
    let (a, b) = (numbers(2 * rows * depth, 4), numbers(depth * columns, 5));
    for dtype in [F32, F16, Bf16] {
        let (x, y) = (
            device.tensor(dtype, &[rows as i64, depth as i64], &a[..rows * depth]),
            device.tensor(dtype, &[depth as i64, columns as i64], &b),
        );
        let out = device.out(dtype, &[rows as i64, columns as i64]);
        check! { device;
            aclnnMm aclnnMmGetWorkspaceSize(x.raw, y.raw, out.raw, 0);
        }
        let expected = dense_product(&a[..rows * depth], &b, [rows, depth, columns]);
        assert_close(&out.values(), &expected, dtype.step(), "mm");
    }
    // The same with the second matrix stored transposed, in a batch that it broadcasts over.
    let turned: Vec<f64> = (0..depth * columns)
        .map(|i| b[i % depth * columns + i / depth])
        .collect();
    let x = device.tensor(F32, &[2, rows as i64, depth as i64], &a);
    let y = device.view(
        F32,
        &turned,
        &[1, depth as i64, columns as i64],
        Some(&[0, 1, depth as i64]),
        0,
    );
    let out = device.out(F32, &[2, rows as i64, columns as i64]);
    check! { device;
        aclnnBatchMatMul aclnnBatchMatMulGetWorkspaceSize(x.raw, y.raw, out.raw, 1);
    }
    let expected = [
        dense_product(&a[..rows * depth], &b, [rows, depth, columns]),
        dense_product(&a[rows * depth..], &b, [rows, depth, columns]),
    ]
    .concat();
    assert_close(&out.values(), &expected, F32.step(), "bmm");
    check! { device;
        aclnnMatmul aclnnMatmulGetWorkspaceSize(x.raw, y.raw, out.raw, 0) => out near expected, F32.step();
    }
    // Vectors, and a product of no depth.
    let (v, w) = (
        device.tensor(F32, &[2], &[2.0, 3.0]),
        device.tensor(F32, &[2, 2], &[1.0, 10.0, 100.0, 1000.0]),
    );
    let (row, one) = (device.out(F32, &[2]), device.out(F32, &[]));
    check! { device;
        aclnnMatmul aclnnMatmulGetWorkspaceSize(v.raw, w.raw, row.raw, 0) => row is [302.0, 3020.0];
        aclnnMatmul aclnnMatmulGetWorkspaceSize(v.raw, v.raw, one.raw, 0) => one is [13.0];
    }
    let (x, y, out) = (
        device.tensor(F32, &[2, 0], &[]),
        device.tensor(F32, &[0, 2], &[]),
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnMm aclnnMmGetWorkspaceSize(x.raw, y.raw, out.raw, 0) => out is [0.0; 4];
    }
    // 1·C + 2·A@B, in place.
    check! { device;
        aclnnInplaceAddmm aclnnInplaceAddmmGetWorkspaceSize(out.raw, w.raw, w.raw, scalar(F32, 1.0), scalar(F32, 2.0), 0) => out is [2002.0, 20020.0, 200_200.0, 2_002_000.0];
    }

    let half = device.tensor(Bf16, &[2, 2], &[0.0; 4]);
    check! { device;
        aclnnMmGetWorkspaceSize(half.raw, w.raw, out.raw, 0) refuses PARAM_INVALID, "Bf16 is only multiplied with Bf16";
        aclnnMmGetWorkspaceSize(half.raw, half.raw, half.raw, 3) refuses PARAM_INVALID, "cubeMathType is 3";
        aclnnMmGetWorkspaceSize(w.raw, w.raw, out.raw, 7) refuses PARAM_INVALID, "cubeMathType is 7";
        aclnnMmGetWorkspaceSize(w.raw, v.raw, out.raw, 0) refuses PARAM_INVALID, "mat2 has rank 1";
    }
    let strided = device.view(F32, &[0.0; 8], &[2, 2], Some(&[4, 1]), 0);
    check! { device;
        aclnnMmGetWorkspaceSize(w.raw, w.raw, strided.raw, 0) refuses PARAM_INVALID, "a contiguous tensor is expected";
    }
    // A transposed matrix is read as it is, other views are copied into the workspace.
    let turned = device.view(F32, &[0.0; 4], &[2, 2], Some(&[1, 2]), 0);
    let dense = plan!(aclnnMmGetWorkspaceSize(w.raw, w.raw, out.raw, 0))
        .expect("plans")
        .0;
    assert_eq!(
        plan!(aclnnMmGetWorkspaceSize(w.raw, turned.raw, out.raw, 0))
            .expect("plans")
            .0,
        dense
    );
    assert!(
        plan!(aclnnMmGetWorkspaceSize(w.raw, strided.raw, out.raw, 0))
            .expect("plans")
            .0
            > dense
    );
    assert_eq!(control::violations(), []);
}

#[test]
fn elements_move() {
    let device = Device::new();
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    for dtype in [F32, Bf16, I64, I32, U8] {
        let x = device.tensor(dtype, &[2, 3], &data);
        let out = device.out(dtype, &[3, 2]);
        check! { device;
            aclnnPermute aclnnPermuteGetWorkspaceSize(x.raw, ints(&[1, -2]), out.raw) => out is [0.0, 3.0, 1.0, 4.0, 2.0, 5.0];
        }
        let out = device.out(dtype, &[2, 3]);
        check! { device;
            aclnnFlip aclnnFlipGetWorkspaceSize(x.raw, ints(&[1]), out.raw) => out is [2.0, 1.0, 0.0, 5.0, 4.0, 3.0];
            aclnnTril aclnnTrilGetWorkspaceSize(x.raw, 0, out.raw) => out is [0.0, 0.0, 0.0, 3.0, 4.0, 0.0];
            aclnnTriu aclnnTriuGetWorkspaceSize(x.raw, 1, out.raw) => out is [0.0, 1.0, 2.0, 0.0, 0.0, 5.0];
        }
        let out = device.out(dtype, &[2, 2, 3]);
        check! { device;
            aclnnRepeat aclnnRepeatGetWorkspaceSize(x.raw, ints(&[2, 1, 1]), out.raw) => out is [data.clone(), data.clone()].concat();
            aclnnExpand aclnnExpandGetWorkspaceSize(x.raw, ints(&[2, -1, 3]), out.raw) => out is [data.clone(), data.clone()].concat();
        }
        let out = device.out(dtype, &[2, 1]);
        check! { device;
            aclnnSlice aclnnSliceGetWorkspaceSize(x.raw, 1, -2, 9, 2, out.raw) => out is [1.0, 4.0];
        }
        let out = device.out(dtype, &[3, 3]);
        check! { device;
            aclnnConstantPadNd aclnnConstantPadNdGetWorkspaceSize(x.raw, ints(&[-1, 1, 1, 0]), scalar(F64, 7.0), out.raw) => out is [7.0, 7.0, 7.0, 1.0, 2.0, 7.0, 4.0, 5.0, 7.0];
        }
        // A list owns its members: they are destroyed with it.
        let parts = [
            device.tensor(dtype, &[2, 3], &data).raw,
            device.tensor(dtype, &[2, 0], &[]).raw,
            device.tensor(dtype, &[2, 1], &[8.0, 9.0]).raw,
        ];
        // SAFETY: a list of the given length.
        let list = unsafe { aclCreateTensorList(parts.as_ptr().cast(), 3) };
        let out = device.out(dtype, &[2, 4]);
        check! { device;
            aclnnCat aclnnCatGetWorkspaceSize(list, -1, out.raw) => out is [0.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0, 9.0];
        }
        let before = control::live().descriptors;
        // SAFETY: a live list, destroyed once; then a member of it.
        unsafe {
            assert_eq!(aclDestroyTensorList(list), 0);
            assert_eq!(control::live().descriptors, before - 4);
            assert_eq!(aclDestroyTensor(parts[0]), 107017);
        }
    }
    let (x, out) = (
        device.tensor(F32, &[1, 1], &[1.0]),
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnConstantPadNdGetWorkspaceSize(x.raw, ints(&[1]), scalar(F64, 0.0), out.raw) refuses INNER_NULLPTR, "an even count";
        aclnnRepeatGetWorkspaceSize(x.raw, ints(&[2; 5]), out.raw) refuses PARAM_INVALID, "at most 4 of them above 1";
    }
    let data = [3.0, f64::NAN, 1.0, 2.0];
    let (x, values, places) = (
        device.tensor(F32, &[4], &data),
        device.out(F32, &[2]),
        device.out(I64, &[2]),
    );
    check! { device;
        aclnnTopk aclnnTopkGetWorkspaceSize(x.raw, 2, 0, false, true, values.raw, places.raw);
    }
    assert_eq!(
        (values.values(), places.values()),
        (vec![1.0, 2.0], vec![2.0, 3.0])
    );
    let (values, places) = (device.out(F32, &[4]), device.out(I64, &[4]));
    check! { device;
        aclnnSort aclnnSortGetWorkspaceSize(x.raw, true, 0, true, values.raw, places.raw) => places is [1.0, 0.0, 3.0, 2.0];
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn indices_pick_and_add() {
    let device = Device::new();
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    let x = device.tensor(F32, &[2, 3], &data);
    let (index, out) = (
        device.tensor(I64, &[2, 2], &[2.0, -1.0, 0.0, 1.0]),
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnGather aclnnGatherGetWorkspaceSize(x.raw, 1, index.raw, out.raw) => out is [2.0, 2.0, 3.0, 4.0];
    }
    let (index, src) = (
        device.tensor(I32, &[2, 2], &[0.0, 0.0, 2.0, 1.0]),
        device.tensor(F32, &[2, 2], &[10.0, 20.0, 30.0, 40.0]),
    );
    let out = device.out(F32, &[2, 3]);
    for (reduce, expected) in [
        (0, [20.0, 1.0, 2.0, 3.0, 40.0, 30.0]),
        (1, [30.0, 1.0, 2.0, 3.0, 44.0, 35.0]),
        (2, [0.0, 1.0, 2.0, 3.0, 160.0, 150.0]),
    ] {
        check! { device;
            aclnnScatter aclnnScatterGetWorkspaceSize(x.raw, 1, index.raw, src.raw, reduce, out.raw) => out is expected;
        }
    }
    check! { device;
        aclnnScatterAdd aclnnScatterAddGetWorkspaceSize(out.raw, 1, index.raw, src.raw, out.raw) => out is [30.0, 1.0, 2.0, 3.0, 200.0, 180.0];
    }
    let (index, out) = (
        device.tensor(I64, &[3], &[2.0, 0.0, 2.0]),
        device.out(F32, &[2, 3]),
    );
    check! { device;
        aclnnIndexSelect aclnnIndexSelectGetWorkspaceSize(x.raw, -1, index.raw, out.raw) => out is [2.0, 0.0, 2.0, 5.0, 3.0, 5.0];
    }
    let source = device.tensor(F32, &[2, 3], &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    check! { device;
        aclnnIndexAdd aclnnIndexAddGetWorkspaceSize(x.raw, 1, index.raw, source.raw, scalar(F32, 10.0), out.raw) => out is [10.0, 1.0, 22.0, 23.0, 4.0, 45.0];
    }
    let out = device.out(F32, &[3, 3]);
    let index = device.tensor(I32, &[3], &[1.0, 0.0, 1.0]);
    check! { device;
        aclnnEmbedding aclnnEmbeddingGetWorkspaceSize(x.raw, index.raw, out.raw) => out is [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    }
    let gradient = device.tensor(F32, &[3, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    let sums = device.out(F32, &[2, 3]);
    for (padding, by_frequency, expected) in [
        (u64::MAX, false, [4.0, 5.0, 6.0, 8.0, 10.0, 12.0]),
        (u64::MAX, true, [4.0, 5.0, 6.0, 4.0, 5.0, 6.0]),
        (0, false, [0.0, 0.0, 0.0, 8.0, 10.0, 12.0]),
    ] {
        check! { device;
            aclnnEmbeddingDenseBackward aclnnEmbeddingDenseBackwardGetWorkspaceSize(gradient.raw, index.raw, 2, padding, by_frequency, sums.raw) => sums is expected;
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn a_wrong_index_is_an_exception_on_the_stream() {
    for value in [3.0, -1.0] {
        let device = Device::new();
        let (weight, out) = (
            device.tensor(F32, &[3, 2], &[0.0; 6]),
            device.out(F32, &[1, 2]),
        );
        let index = device.tensor(I64, &[1], &[value]);
        assert_refused(
            run!(device, aclnnEmbedding aclnnEmbeddingGetWorkspaceSize(weight.raw, index.raw, out.raw)),
            EXCEPTION,
            &format!("indices {value} is outside of 0..3"),
        );
        assert_eq!(control::violations().len(), 1);
    }
}

#[test]
fn softmax_and_its_gradient() {
    let device = Device::new();
    let (x, g) = (numbers(12, 6), numbers(12, 7));
    // Along the first axis of [3, 4].
    let soft = |x: &[f64]| -> Vec<f64> {
        let total = |column: usize| (0..3).map(|row| x[row * 4 + column].exp()).sum::<f64>();
        (0..12).map(|i| x[i].exp() / total(i % 4)).collect()
    };
    let log = |x: &[f64]| -> Vec<f64> { soft(x).into_iter().map(f64::ln).collect() };
    let slope = |f: &dyn Fn(&[f64]) -> Vec<f64>| -> Vec<f64> {
        (0..12)
            .map(|i| {
                let at = |d: f64| {
                    let mut x = x.clone();
                    x[i] += d;
                    f(&x).iter().zip(&g).map(|(y, g)| y * g).sum::<f64>()
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            })
            .collect()
    };
    let dims = [3, 4];
    let (input, gradient) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
    let (out, dx) = (device.out(F32, &dims), device.out(F32, &dims));
    check! { device;
        aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(input.raw, 0, out.raw) => out near soft(&x), 1e-6;
        aclnnSoftmaxBackward aclnnSoftmaxBackwardGetWorkspaceSize(gradient.raw, out.raw, 0, dx.raw) => dx near slope(&soft), 1e-6;
        aclnnLogSoftmax aclnnLogSoftmaxGetWorkspaceSize(input.raw, -2, out.raw) => out near log(&x), 1e-6;
        aclnnLogSoftmaxBackward aclnnLogSoftmaxBackwardGetWorkspaceSize(gradient.raw, out.raw, 0, out.raw) => out near slope(&log), 1e-6;
    }
    // Large numbers do not overflow.
    let (input, out) = (
        device.tensor(F32, &[2], &[1000.0, 999.0]),
        device.out(F32, &[2]),
    );
    check! { device;
        aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(input.raw, 0, out.raw) => out near [sigmoid(1.0), sigmoid(-1.0)], 1e-6;
    }
    assert_eq!(control::violations(), []);
}

/// The gradient of Σ g·f at a point, by central differences.
fn numeric(f: &dyn Fn(&[f64]) -> Vec<f64>, at: &[f64], g: &[f64]) -> Vec<f64> {
    (0..at.len())
        .map(|i| {
            let value = |d: f64| {
                let mut x = at.to_vec();
                x[i] += d;
                f(&x).iter().zip(g).map(|(y, g)| y * g).sum::<f64>()
            };
            (value(1e-5) - value(-1e-5)) / 2e-5
        })
        .collect()
}

#[test]
fn normalisations_and_their_gradients() {
    let device = Device::new();
    let (rows, width, eps) = (3, 4, 1e-3);
    let (x, g, w, b) = (
        numbers(12, 8),
        numbers(12, 9),
        numbers(4, 10),
        numbers(4, 11),
    );
    let layer = |x: &[f64], w: &[f64], b: &[f64]| -> Vec<f64> {
        x.chunks(width)
            .flat_map(|row| {
                let mean = row.iter().sum::<f64>() / width as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                row.iter()
                    .zip(w.iter().zip(b))
                    .map(move |(x, (w, b))| (x - mean) / (variance + eps).sqrt() * w + b)
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let rms = |x: &[f64], w: &[f64]| -> Vec<f64> {
        x.chunks(width)
            .flat_map(|row| {
                let square = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                row.iter()
                    .zip(w)
                    .map(move |(x, w)| x / (square + eps).sqrt() * w)
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let dims = [rows as i64, width as i64];
    let (input, gradient) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
    let (weight, bias) = (device.tensor(F32, &[4], &w), device.tensor(F32, &[4], &b));
    let (out, dx) = (device.out(F32, &dims), device.out(F32, &dims));
    let (mean, rstd) = (device.out(F32, &[3, 1]), device.out(F32, &[3, 1]));
    let (dw, db) = (device.out(F32, &[4]), device.out(F32, &[4]));
    check! { device;
        aclnnLayerNorm aclnnLayerNormGetWorkspaceSize(input.raw, ints(&[4]), weight.raw, bias.raw, eps, out.raw, mean.raw, rstd.raw) => out near layer(&x, &w, &b), 1e-6;
        aclnnLayerNormBackward aclnnLayerNormBackwardGetWorkspaceSize(gradient.raw, input.raw, ints(&[4]), mean.raw, rstd.raw, weight.raw, bias.raw, bools(&[true; 3]), dx.raw, dw.raw, db.raw) => dx near numeric(&|x| layer(x, &w, &b), &x, &g), 1e-5;
    }
    assert_close(
        &dw.values(),
        &numeric(&|w| layer(&x, w, &b), &w, &g),
        1e-5,
        "dw",
    );
    assert_close(
        &db.values(),
        &numeric(&|b| layer(&x, &w, b), &b, &g),
        1e-5,
        "db",
    );
    check! { device;
        aclnnLayerNormBackwardGetWorkspaceSize(gradient.raw, input.raw, ints(&[4]), mean.raw, rstd.raw, weight.raw, bias.raw, bools(&[true; 3]), dx.raw, null_mut(), db.raw) refuses NULL_POINTER, "gradWeightOut is null";
    }
    let gamma = device.out(F32, &[4]);
    check! { device;
        aclnnRmsNorm aclnnRmsNormGetWorkspaceSize(input.raw, weight.raw, eps, out.raw, rstd.raw) => out near rms(&x, &w), 1e-6;
        aclnnRmsNormGrad aclnnRmsNormGradGetWorkspaceSize(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, gamma.raw) => dx near numeric(&|x| rms(x, &w), &x, &g), 1e-5;
    }
    assert_close(
        &gamma.values(),
        &numeric(&|w| rms(&x, w), &w, &g),
        1e-5,
        "dgamma",
    );
    let wide = device.tensor(F32, &[3], &[1.0; 3]);
    check! { device;
        aclnnRmsNormGetWorkspaceSize(input.raw, wide.raw, eps, out.raw, rstd.raw) refuses TILING, "gamma has shape [3]";
    }
    let half = device.out(Bf16, &[4]);
    check! { device;
        aclnnRmsNormGradGetWorkspaceSize(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, half.raw) refuses PARAM_INVALID, "dgammaOut is Bf16";
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn random_numbers_have_their_distribution_and_are_never_repeatable() {
    let device = Device::new();
    let count = 20_000;
    let x = device.out(F32, &[count]);
    let moments = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        (
            mean,
            x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64,
        )
    };
    check! { device;
        aclnnInplaceUniform aclnnInplaceUniformGetWorkspaceSize(x.raw, -1.0, 3.0, 1, 0);
    }
    let first = x.values();
    let (mean, variance) = moments(&first);
    assert!(
        (mean - 1.0).abs() < 0.04 && (variance - 16.0 / 12.0).abs() < 0.04,
        "{mean} {variance}"
    );
    assert!(first.iter().all(|x| (-1.0..3.0).contains(x)));
    check! { device;
        aclnnInplaceUniform aclnnInplaceUniformGetWorkspaceSize(x.raw, -1.0, 3.0, 1, 0) => x is first;
        aclnnInplaceUniform aclnnInplaceUniformGetWorkspaceSize(x.raw, -1.0, 3.0, 1, 10);
    }
    assert_ne!(x.values(), first, "another offset");
    check! { device;
        aclnnInplaceNormal aclnnInplaceNormalGetWorkspaceSize(x.raw, 2.0, 0.5, 7, 0);
    }
    let (mean, variance) = moments(&x.values());
    assert!(
        (mean - 2.0).abs() < 0.02 && (variance - 0.25).abs() < 0.01,
        "{mean} {variance}"
    );
    check! { device;
        aclnnInplaceBernoulli aclnnInplaceBernoulliGetWorkspaceSize(x.raw, scalar(F64, 0.3), 7, 4);
    }
    assert!(
        (moments(&x.values()).0 - 0.3).abs() < 0.02
            && x.values().iter().all(|x| *x == 0.0 || *x == 1.0)
    );
    check! { device;
        aclnnInplaceBernoulliGetWorkspaceSize(x.raw, scalar(F64, 0.3), 7, 2) refuses PARAM_INVALID, "a multiple of 4";
    }
    let (_, executor) =
        plan!(aclnnInplaceNormalGetWorkspaceSize(x.raw, 2.0, 0.5, 7, 0)).expect("plans");
    // SAFETY: a live executor.
    unsafe {
        assert_eq!(aclSetAclOpExecutorRepeatable(executor), 561000);
        assert_eq!(aclDestroyAclOpExecutor(executor), 0);
    }
}

/// A convolution of two axes by its definition.
struct Definition {
    dims: [usize; 4],
    weight: [usize; 4],
    stride: usize,
    padding: usize,
    dilation: usize,
    groups: usize,
}

impl Definition {
    fn out(&self) -> [usize; 4] {
        let size = |axis: usize| {
            (self.dims[axis] + 2 * self.padding - self.dilation * (self.weight[axis] - 1) - 1)
                / self.stride
                + 1
        };
        [self.dims[0], self.weight[0], size(2), size(3)]
    }

    fn apply(&self, x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
        let [_, channels, height, width] = self.dims;
        let [given, taken, kh, kw] = self.weight;
        let [batch, _, rows, columns] = self.out();
        let mut y = Vec::new();
        for n in 0..batch {
            for o in 0..given {
                let group = o / (given / self.groups);
                for r in 0..rows {
                    for c in 0..columns {
                        let mut sum = b[o];
                        for i in 0..taken {
                            for p in 0..kh {
                                for q in 0..kw {
                                    let (h, v) = (
                                        r * self.stride + p * self.dilation,
                                        c * self.stride + q * self.dilation,
                                    );
                                    let (Some(h), Some(v)) =
                                        (h.checked_sub(self.padding), v.checked_sub(self.padding))
                                    else {
                                        continue;
                                    };
                                    if h < height && v < width {
                                        sum += x[((n * channels + group * taken + i) * height + h)
                                            * width
                                            + v]
                                            * w[((o * taken + i) * kh + p) * kw + q];
                                    }
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
            }
        }
        y
    }
}

#[test]
fn convolutions_and_their_gradients() {
    let device = Device::new();
    let image = |dtype: Type, dims: [usize; 4], data: &[f64]| {
        let dims = dims.map(|dim| dim as i64);
        let plain = device.tensor(dtype, &dims, data);
        Tensor {
            raw: describe(&dims, None, 0, dtype, NCHW, data.len(), plain.address),
            ..plain
        }
    };
    let count = |dims: [usize; 4]| dims.iter().product::<usize>();
    for case in [
        Definition {
            dims: [2, 3, 4, 4],
            weight: [5, 3, 2, 2],
            stride: 2,
            padding: 0,
            dilation: 1,
            groups: 1,
        },
        Definition {
            dims: [1, 4, 5, 6],
            weight: [6, 2, 3, 3],
            stride: 1,
            padding: 1,
            dilation: 2,
            groups: 2,
        },
    ] {
        let out_dims = case.out();
        let (x, w, b) = (
            numbers(count(case.dims), 12),
            numbers(count(case.weight), 13),
            numbers(case.weight[0], 14),
        );
        let g = numbers(count(out_dims), 15);
        let (input, weight) = (image(F32, case.dims, &x), image(F32, case.weight, &w));
        let (bias, output) = (
            device.tensor(F32, &[b.len() as i64], &b),
            image(F32, out_dims, &vec![0.0; g.len()]),
        );
        let pair = |x: usize| ints(&[x as i64; 2]);
        let (stride, padding, dilation) =
            (pair(case.stride), pair(case.padding), pair(case.dilation));
        check! { device;
            aclnnConvolution aclnnConvolutionGetWorkspaceSize(input.raw, weight.raw, bias.raw, stride, padding, dilation, false, pair(0), case.groups as i64, output.raw, 1) => output near case.apply(&x, &w, &b), 1e-5;
        }
        let gradient = image(F32, out_dims, &g);
        let (dx, dw, db) = (
            image(F32, case.dims, &x),
            image(F32, case.weight, &w),
            device.out(F32, &[b.len() as i64]),
        );
        check! { device;
            aclnnConvolutionBackward aclnnConvolutionBackwardGetWorkspaceSize(gradient.raw, input.raw, weight.raw, ints(&[b.len() as i64]), stride, padding, dilation, false, pair(0), case.groups as i32, bools(&[true; 3]), 0, dx.raw, dw.raw, db.raw) => dx near numeric(&|x| case.apply(x, &w, &b), &x, &g), 1e-5;
        }
        assert_close(
            &dw.values(),
            &numeric(&|w| case.apply(&x, w, &b), &w, &g),
            1e-5,
            "dw",
        );
        assert_close(
            &db.values(),
            &numeric(&|b| case.apply(&x, &w, b), &b, &g),
            1e-5,
            "db",
        );
        // A transposed convolution is the gradient of the input of the plain one.
        if case.groups == 1 {
            check! { device;
                aclnnConvolution aclnnConvolutionGetWorkspaceSize(gradient.raw, weight.raw, null(), stride, padding, dilation, true, pair(0), 1, dx.raw, 1) => dx near numeric(&|x| case.apply(x, &w, &b), &x, &g), 1e-5;
            }
        }
        let forward = |format: *mut aclTensor, math: i8| {
            plan!(aclnnConvolutionGetWorkspaceSize(
                format,
                weight.raw,
                bias.raw,
                stride,
                padding,
                dilation,
                false,
                pair(0),
                case.groups as i64,
                output.raw,
                math
            ))
        };
        assert_refused(forward(input.raw, 0), PARAM_INVALID, "cubeMathType is 0");
        let plain = device.tensor(F32, &case.dims.map(|dim| dim as i64), &x);
        assert_refused(forward(plain.raw, 1), INNER_NULLPTR, "NCHW (0)");
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn losses_and_the_optimiser() {
    let device = Device::new();
    let x = [-0.1, -2.0, -3.0, -0.5, -1.0, -4.0];
    let (input, target) = (
        device.tensor(F32, &[3, 2], &x),
        device.tensor(I64, &[3], &[1.0, -100.0, 0.0]),
    );
    let weight = device.tensor(F32, &[2], &[0.5, 2.0]);
    let (total, dx) = (device.out(F32, &[1]), device.out(F32, &[3, 2]));
    for (reduction, dims, expected, gradient) in [
        (
            0,
            vec![3],
            vec![4.0, 0.0, 0.5],
            [0.0, -2.0, 0.0, 0.0, -0.5, 0.0],
        ),
        (1, vec![1], vec![1.8], [0.0, -0.8, 0.0, 0.0, -0.2, 0.0]),
        (2, vec![1], vec![4.5], [0.0, -2.0, 0.0, 0.0, -0.5, 0.0]),
    ] {
        let out = device.out(F32, &dims);
        check! { device;
            aclnnNLLLoss aclnnNLLLossGetWorkspaceSize(input.raw, target.raw, weight.raw, reduction, -100, out.raw, total.raw) => out near expected, 1e-6;
        }
        assert_close(&total.values(), &[2.5], 0.0, "total");
        let ones = device.tensor(F32, &dims, &vec![1.0; expected.len()]);
        check! { device;
            aclnnNLLLossBackward aclnnNLLLossBackwardGetWorkspaceSize(ones.raw, input.raw, target.raw, weight.raw, reduction, -100, total.raw, dx.raw) => dx near gradient, 1e-6;
        }
    }
    check! { device;
        aclnnNLLLossGetWorkspaceSize(input.raw, target.raw, null(), 1, -100, dx.raw, total.raw) refuses NULL_POINTER, "weight is null";
    }

    // Two steps by hand; the operator takes the number of steps done before.
    let (lr, beta1, beta2, decay, eps) = (0.1, 0.9, 0.99, 0.01, 1e-8);
    let (mut p, mut m, mut v, g) = (2.0_f64, 0.0, 0.0, 0.5);
    let tensors = [p, m, v].map(|x| device.tensor(F32, &[1], &[x]));
    let gradient = device.tensor(F32, &[1], &[g]);
    for t in 1..=2 {
        let step = device.tensor(I64, &[1], &[f64::from(t - 1)]);
        check! { device;
            aclnnApplyAdamWV2 aclnnApplyAdamWV2GetWorkspaceSize(tensors[0].raw, tensors[1].raw, tensors[2].raw, null_mut(), gradient.raw, step.raw, lr as f32, beta1 as f32, beta2 as f32, decay as f32, eps as f32, false, false);
        }
        p *= 1.0 - lr * decay;
        m = beta1 * m + (1.0 - beta1) * g;
        v = beta2 * v + (1.0 - beta2) * g * g;
        p -= lr * (m / (1.0 - beta1.powi(t))) / ((v / (1.0 - beta2.powi(t))).sqrt() + eps);
        for (tensor, expected) in tensors.iter().zip([p, m, v]) {
            assert_close(&tensor.values(), &[expected], 1e-6, "adamw");
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn empty_tensors_plan_without_workspace_and_run() {
    let device = Device::new();
    let (x, out) = (
        device.tensor(F32, &[0, 3], &[]),
        device.tensor(F32, &[0, 3], &[]),
    );
    let (bytes, executor) = plan!(aclnnExpGetWorkspaceSize(x.raw, out.raw)).expect("plans");
    assert_eq!(bytes, 0);
    finish(&device, bytes, executor, aclnnExp).expect("runs");
    check! { device;
        aclnnMul aclnnMulGetWorkspaceSize(x.raw, x.raw, out.raw);
        aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(x.raw, 1, out.raw);
        aclnnInplaceCopy aclnnInplaceCopyGetWorkspaceSize(out.raw, x.raw);
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
        aclnnAddGetWorkspaceSize(x.raw, x.raw, null(), out.raw) refuses NULL_POINTER, "alpha is null";
        aclnnAddGetWorkspaceSize(null(), x.raw, one, out.raw) refuses NULL_POINTER, "self is null";
        aclnnAddGetWorkspaceSize(x.raw, y.raw, one, out.raw) refuses PARAM_INVALID, "do not broadcast";
        aclnnAddGetWorkspaceSize(x.raw, x.raw, one, y.raw) refuses PARAM_INVALID, "out has shape [2], [2, 3] is expected";
    }
    let whole = device.out(I32, &[2, 3]);
    check! { device;
        aclnnAddGetWorkspaceSize(whole.raw, whole.raw, scalar(F64, 0.5), whole.raw) refuses PARAM_INVALID, "alpha is Double";
    }
    let truth = device.out(Bool, &[2, 3]);
    check! { device;
        aclnnMulGetWorkspaceSize(x.raw, x.raw, truth.raw) refuses PARAM_INVALID, "out is Bool";
        aclnnSiluGetWorkspaceSize(whole.raw, whole.raw) refuses PARAM_INVALID, "self is Int32, one of [Float, Float16, Bf16] is expected";
    }
    let half = device.out(Bf16, &[2, 3]);
    check! { device;
        aclnnErfGetWorkspaceSize(half.raw, half.raw) refuses PARAM_INVALID, "self is Bf16";
        aclnnClampGetWorkspaceSize(x.raw, null(), null(), out.raw) refuses NULL_POINTER, "both null";
        aclnnClampMinGetWorkspaceSize(x.raw, null(), out.raw) refuses NULL_POINTER, "clipValueMin is null";
    }
    let point = device.tensor(F32, &[], &[1.0]);
    check! { device;
        aclnnSignGetWorkspaceSize(point.raw, point.raw) refuses PARAM_INVALID, "self has rank 0, 1 to 8 is expected";
    }
    let deep = device.view(F32, &[0.0], &[1; 9], None, 0);
    check! { device;
        aclnnExpGetWorkspaceSize(deep.raw, deep.raw) refuses PARAM_INVALID, "self has rank 9, 0 to 8 is expected";
    }
    // Broadcasts over six separate axes are not offered in f64 and i16, and are in f32.
    for (dtype, offered) in [(F32, true), (F64, false), (I16, false)] {
        let a = device.tensor(dtype, &[1, 2, 1, 2, 1, 2], &[0.0; 8]);
        let b = device.tensor(dtype, &[2, 1, 2, 1, 2, 1], &[0.0; 8]);
        let out = device.out(dtype, &[2; 6]);
        assert_eq!(
            plan!(aclnnMulGetWorkspaceSize(a.raw, b.raw, out.raw)).is_ok(),
            offered,
            "{dtype:?}"
        );
    }
    let expanded = device.view(F32, &[0.0; 3], &[2, 3], Some(&[0, 1]), 0);
    check! { device;
        aclnnExpGetWorkspaceSize(x.raw, expanded.raw) refuses PARAM_INVALID, "elements share memory";
    }
    assert!(describe(&[2], Some(&[-1]), 1, F32, ND, 2, 0).is_null());
    assert!(recent_message().contains("stride -1 is negative"));
    assert!(describe(&[2], None, 1, F32, ND, 2, 0).is_null());
    assert!(recent_message().contains("reaches element 2"));
    // A strided view costs workspace.
    let strided = device.view(F32, &[0.0; 12], &[2, 3], Some(&[6, 2]), 0);
    let dense = plan!(aclnnExpGetWorkspaceSize(x.raw, out.raw))
        .expect("plans")
        .0;
    assert!(
        plan!(aclnnExpGetWorkspaceSize(strided.raw, out.raw))
            .expect("plans")
            .0
            > dense
    );
}

#[test]
fn memory_is_checked_when_the_operator_runs() {
    let device = Device::new();
    let (x, out) = (device.tensor(F32, &[4], &[1.0; 4]), device.out(F32, &[4]));
    let (bytes, executor) = plan!(aclnnExpGetWorkspaceSize(x.raw, out.raw)).expect("plans");
    device.free(x.address).expect("frees");
    assert_refused(
        finish(&device, bytes, executor, aclnnExp),
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
        let out = describe(&[3], Some(&[stride]), offset, F32, ND, 8, x.address);
        let outcome = run!(device, aclnnExp aclnnExpGetWorkspaceSize(x.raw, out));
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
        run!(device, aclnnMm aclnnMmGetWorkspaceSize(x.raw, x.raw, x.raw, 0)),
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
    let add = || plan!(aclnnAddGetWorkspaceSize(x.raw, y.raw, one, out.raw)).expect("plans");
    // SAFETY: live handles; wrong ones are errors.
    unsafe {
        let (bytes, executor) = add();
        assert_eq!(
            aclSetInputTensorAddr(executor, 0, x.raw, second.address as *mut c_void),
            PARAM_INVALID
        );
        assert!(recent_message().contains("only a repeatable executor"));
        assert_eq!(aclSetAclOpExecutorRepeatable(executor), 0);
        finish(&device, bytes, executor, aclnnAdd).expect("runs");
        assert_eq!(
            aclSetInputTensorAddr(executor, 0, x.raw, second.address as *mut c_void),
            0
        );
        assert_eq!(
            aclSetOutputTensorAddr(executor, 0, out.raw, other.address as *mut c_void),
            0
        );
        finish(&device, bytes, executor, aclnnAdd).expect("runs again");
        assert_eq!(
            (out.values(), other.values()),
            (vec![11.0, 22.0], vec![15.0, 26.0])
        );
        assert_eq!(
            aclSetTensorAddr(executor, 2, out.raw, out.address as *mut c_void),
            0
        );
        finish(&device, bytes, executor, aclnnAdd).expect("runs again");
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
        assert_eq!(aclnnAdd(null_mut(), 0, executor, device.stream), 107017);
        // Tensors and scalars have to live until the second phase.
        let (bytes, executor) = add();
        assert_eq!(aclDestroyScalar(one), 0);
        assert_refused(
            finish(&device, bytes, executor, aclnnAdd),
            PARAM_INVALID,
            "alpha has to live",
        );
        assert_eq!(control::take_violations().len(), 1);
        assert_eq!(aclDestroyTensor(null()), 0);
        assert_eq!(aclDestroyAclOpExecutor(null_mut()), 0);
    }
}

#[test]
fn faults_stubs_and_counts() {
    let device = Device::new();
    let (x, out) = (device.tensor(F32, &[2], &[4.0, 9.0]), device.out(F32, &[2]));
    let sqrt = || run!(device, aclnnSqrt aclnnSqrtGetWorkspaceSize(x.raw, out.raw));
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
    // The same from C.
    let mut runs = 0;
    // SAFETY: C strings and a valid out parameter.
    unsafe {
        use ascend_sim::abi::control::*;
        assert_eq!(
            ascendSimOperatorRuns(c"aclnnSqrt".as_ptr(), &raw mut runs),
            0
        );
        assert_eq!(runs, 5);
        assert_eq!(ascendSimStubOperators(1), 0);
        assert_eq!(
            ascendSimInjectStreamFault(c"aclnnSqrt".as_ptr(), 1, 507014),
            0
        );
    }
}

/// What one operator costs on the host and on the stream, with tensors that cost nothing.
/// Not a measurement of any device.
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
            let (bytes, executor) = plan!(aclnnExpGetWorkspaceSize(x.raw, out.raw)).expect("plans");
            // SAFETY: a live executor and a workspace that is large enough.
            let code = unsafe { aclnnExp(workspace, bytes, executor, device.stream) };
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
        aclnnMm aclnnMmGetWorkspaceSize(x.raw, x.raw, out.raw, 0);
    }
    println!("{n}x{n}x{n}: {:?}", start.elapsed());
}
