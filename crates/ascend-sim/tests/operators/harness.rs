//! Tensors on the device, both phases of a call, and their checks.

use std::ffi::c_void;
use std::ptr::null;

use ascend_sim::abi::aclnn::*;
use half::{bf16, f16};

use crate::support::{Device, recent_message};

pub(crate) const NULL_POINTER: i32 = 161001;
pub(crate) const PARAM_INVALID: i32 = 161002;
/// A step inside an operator refused a call that the checks before it had let through.
pub(crate) const INNER: i32 = 561103;
pub(crate) const TILING: i32 = 561002;
pub(crate) const EXCEPTION: i32 = 507015;

/// The element types of the tests, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    F32 = 0,
    F16 = 1,
    I8 = 2,
    I32 = 3,
    U8 = 4,
    I16 = 6,
    U16 = 7,
    I64 = 9,
    U64 = 10,
    F64 = 11,
    Bool = 12,
    Bf16 = 27,
}

pub(crate) use Type::*;

impl Type {
    pub(crate) fn encode(self, x: f64) -> Vec<u8> {
        match self {
            F32 => (x as f32).to_le_bytes().to_vec(),
            F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            F64 => x.to_le_bytes().to_vec(),
            I8 => (x as i8).to_le_bytes().to_vec(),
            I16 => (x as i16).to_le_bytes().to_vec(),
            I32 => (x as i32).to_le_bytes().to_vec(),
            I64 => (x as i64).to_le_bytes().to_vec(),
            U16 => (x as u16).to_le_bytes().to_vec(),
            U64 => (x as u64).to_le_bytes().to_vec(),
            U8 | Bool => vec![x as u8],
        }
    }

    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<f64> {
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
            U16 => f64::from(u16::from_le_bytes(b.try_into().expect("2 bytes"))),
            U64 => u64::from_le_bytes(b.try_into().expect("8 bytes")) as f64,
            U8 | Bool => f64::from(b[0]),
        };
        bytes.chunks_exact(size).map(one).collect()
    }

    /// The distance from 1 to the next number, for tolerances.
    pub(crate) fn step(self) -> f64 {
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
pub(crate) struct Tensor<'d> {
    pub(crate) device: &'d Device,
    pub(crate) raw: *mut aclTensor,
    pub(crate) address: u64,
    pub(crate) count: usize,
    pub(crate) dtype: Type,
}

impl Tensor<'_> {
    /// All values of the storage.
    pub(crate) fn values(&self) -> Vec<f64> {
        let bytes: Vec<u8> = self
            .device
            .download(self.address, self.count * self.dtype.encode(0.0).len());
        self.dtype.decode(&bytes)
    }
}

const ND: i32 = 2;

/// A descriptor over memory.
pub(crate) fn describe(
    dims: &[i64],
    strides: Option<&[i64]>,
    offset: i64,
    dtype: Type,
    storage: usize,
    address: u64,
) -> *mut aclTensor {
    let storage = storage as i64;
    // SAFETY: the lists have the given lengths.
    unsafe {
        aclCreateTensor(
            dims.as_ptr(),
            dims.len() as u64,
            dtype as i32,
            strides.map_or(null(), <[i64]>::as_ptr),
            offset,
            ND,
            &raw const storage,
            1,
            address as *mut c_void,
        )
    }
}

impl Device {
    /// Memory of a type, and a view of it.
    pub(crate) fn view(
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
        let raw = describe(dims, strides, offset, dtype, data.len(), address);
        assert!(!raw.is_null(), "{}", recent_message());
        Tensor {
            device: self,
            raw,
            address,
            count: data.len(),
            dtype,
        }
    }

    pub(crate) fn tensor(&self, dtype: Type, dims: &[i64], data: &[f64]) -> Tensor<'_> {
        assert_eq!(dims.iter().product::<i64>() as usize, data.len());
        self.view(dtype, data, dims, None, 0)
    }

    /// A tensor to overwrite.
    pub(crate) fn out(&self, dtype: Type, dims: &[i64]) -> Tensor<'_> {
        let count = dims.iter().product::<i64>() as usize;
        self.tensor(dtype, dims, &vec![77.0; count])
    }
}

pub(crate) fn scalar(dtype: Type, x: f64) -> *mut aclScalar {
    let mut bytes = dtype.encode(x);
    // SAFETY: one value of the type.
    unsafe { aclCreateScalar(bytes.as_mut_ptr().cast(), dtype as i32) }
}

pub(crate) fn ints(values: &[i64]) -> *mut aclIntArray {
    // SAFETY: a list of the given length.
    unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) }
}

pub(crate) type Failed = (i32, String);
pub(crate) type Second =
    unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, *mut c_void) -> i32;

/// Runs a second phase with the workspace that was asked for, and waits.
pub(crate) fn finish(
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

/// Calls the first phase of an operator with these arguments and returns its results.
macro_rules! plan {
    ($operator:ident($($arg:expr),* $(,)?)) => {{
        let (mut bytes, mut executor) = (0_u64, null_mut::<aclOpExecutor>());
        // SAFETY: live handles and valid out parameters; wrong ones are errors.
        let code = unsafe { $operator::plan($($arg,)* &raw mut bytes, &raw mut executor) };
        if code == 0 { Ok((bytes, executor)) } else { Err((code, recent_message())) }
    }};
}

/// Calls both phases.
macro_rules! run {
    ($device:expr, $operator:ident($($arg:expr),* $(,)?)) => {
        plan!($operator($($arg),*))
            .and_then(|(bytes, executor)| finish(&$device, bytes, executor, $operator::run))
    };
}

/// Calls operators in order: each runs and leaves values, exactly or within a relative tolerance,
/// or its first phase refuses.
macro_rules! check {
    (
        $device:expr;
        $op:ident($($arg:expr),* $(,)?) => $out:ident is $expected:expr;
        $($rest:tt)*
    ) => {
        check! { $device; $op($($arg),*); }
        assert_eq!($out.values(), $expected, stringify!($op));
        check! { $device; $($rest)* }
    };
    (
        $device:expr;
        $op:ident($($arg:expr),* $(,)?) => $out:ident near $expected:expr, $tolerance:expr;
        $($rest:tt)*
    ) => {
        check! { $device; $op($($arg),*); }
        assert_close(&$out.values(), &$expected, $tolerance, stringify!($op));
        check! { $device; $($rest)* }
    };
    ($device:expr; $op:ident($($arg:expr),* $(,)?); $($rest:tt)*) => {
        run!($device, $op($($arg),*)).expect(stringify!($op));
        check! { $device; $($rest)* }
    };
    (
        $device:expr;
        $op:ident($($arg:expr),* $(,)?) refuses $code:expr, $says:expr;
        $($rest:tt)*
    ) => {
        assert_refused(plan!($op($($arg),*)), $code, $says);
        check! { $device; $($rest)* }
    };
    ($device:expr;) => {};
}

#[track_caller]
pub(crate) fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
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
pub(crate) fn assert_refused(outcome: Result<impl Sized, Failed>, code: i32, says: &str) {
    let (found, message) = outcome.err().expect("refused");
    assert!(found == code && message.contains(says), "{found} {message}");
}

/// Numbers that look random and are the same every time.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f64> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Sixteenths between -4 and 4: exact in every float type.
            f64::from((state >> 25) as i32 - 64) / 16.0
        })
        .collect()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The gradient of Σ g·f at a point, by central differences.
pub(crate) fn numeric(f: &dyn Fn(&[f64]) -> Vec<f64>, at: &[f64], g: &[f64]) -> Vec<f64> {
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
