//! Numbers as they are stored, numbers as operators compute with them, and the strided runs that
//! lead from one to the other.

use half::{bf16, f16};

use super::dtype::DataType;
use crate::abi::sys::error_function;

/// A number of an element type.
pub(crate) trait Element: Copy {
    const BYTES: usize;
    fn decode(bytes: &[u8]) -> Self;
    fn encode(self, bytes: &mut [u8]);
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    fn to_i64(self) -> i64;
    fn from_f32(x: f32) -> Self;
    fn from_f64(x: f64) -> Self;
    fn from_i64(x: i64) -> Self;
}

/// bool: one byte, true if not zero.
#[derive(Clone, Copy)]
pub(crate) struct Flag(bool);

macro_rules! bytes {
    ($t:ty) => {
        const BYTES: usize = size_of::<$t>();
        fn decode(bytes: &[u8]) -> Self {
            let mut word = [0; Self::BYTES];
            word.copy_from_slice(bytes);
            Self::from_le_bytes(word)
        }
        fn encode(self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.to_le_bytes());
        }
    };
}

// Floats become integers by truncation, NaN becomes 0; integers become narrower ones by keeping
// their low bits.
macro_rules! native {
    ($($t:ty)*) => { $(
        impl Element for $t {
            bytes!($t);
            fn to_f32(self) -> f32 { self as f32 }
            fn to_f64(self) -> f64 { self as f64 }
            fn to_i64(self) -> i64 { self as i64 }
            fn from_f32(x: f32) -> Self { x as $t }
            fn from_f64(x: f64) -> Self { x as $t }
            fn from_i64(x: i64) -> Self { x as $t }
        }
    )* };
}
native!(f32 f64 i8 i16 i32 i64 u8 u16 u32 u64);

macro_rules! halves {
    ($($t:ty)*) => { $(
        impl Element for $t {
            bytes!($t);
            fn to_f32(self) -> f32 { self.to_f32() }
            fn to_f64(self) -> f64 { self.to_f64() }
            fn to_i64(self) -> i64 { self.to_f32() as i64 }
            fn from_f32(x: f32) -> Self { <$t>::from_f32(x) }
            fn from_f64(x: f64) -> Self { <$t>::from_f64(x) }
            fn from_i64(x: i64) -> Self { <$t>::from_f64(x as f64) }
        }
    )* };
}
halves!(f16 bf16);

macro_rules! flags {
    ($($t:ty: $to:ident $from:ident),*) => { $(
        fn $to(self) -> $t { u8::from(self.0).into() }
        fn $from(x: $t) -> Self { Self(x != <$t>::default()) }
    )* };
}

impl Element for Flag {
    const BYTES: usize = 1;
    fn decode(bytes: &[u8]) -> Self {
        Self(bytes[0] != 0)
    }
    fn encode(self, bytes: &mut [u8]) {
        bytes[0] = u8::from(self.0);
    }
    flags!(f32: to_f32 from_f32, f64: to_f64 from_f64, i64: to_i64 from_i64);
}

/// A number that operators compute with: f32, f64, or i64 for all integers and bool.
pub(crate) trait Lane: Copy + PartialOrd + Default + Send + Sync + 'static {
    fn of<E: Element>(element: E) -> Self;
    fn to<E: Element>(self) -> E;
    fn from_f64(x: f64) -> Self;
    fn from_i64(x: i64) -> Self;
    fn to_f64(self) -> f64;
    fn is_nan(self) -> bool;
    fn add(self, y: Self) -> Self;
    fn sub(self, y: Self) -> Self;
    fn mul(self, y: Self) -> Self;
    /// The true quotient of floats; of integers, truncated, and 0 for a divisor of 0.
    fn div(self, y: Self) -> Self;
    /// The remainder with the divisor's sign.
    fn rem_floor(self, y: Self) -> Self;
    fn pow(self, y: Self) -> Self;
    fn neg(self) -> Self;
    fn abs(self) -> Self;
    /// -1, 0 or 1; NaN stays.
    fn sign(self) -> Self;
    /// The sum: of floats in f64, of integers in i64.
    fn sum(row: &[Self]) -> Self;
    fn one() -> Self {
        Self::from_i64(1)
    }
    /// The larger; NaN if one is.
    fn larger(self, y: Self) -> Self {
        if self.is_nan() || self > y { self } else { y }
    }
    /// The smaller; NaN if one is.
    fn smaller(self, y: Self) -> Self {
        if self.is_nan() || self < y { self } else { y }
    }
    fn truth(self) -> bool {
        self != Self::default()
    }
}

/// Declares [`Real`] with these functions of the standard library, by their names.
macro_rules! real_trait {
    ($($f:ident)*) => {
        /// A floating-point lane.
        pub(crate) trait Real: Lane {
            $( fn $f(self) -> Self; )*
            fn erf(self) -> Self;
            /// To the nearest whole number, halves to the even one.
            fn round(self) -> Self;
        }
        real_trait!(@ f32 $($f)*);
        real_trait!(@ f64 $($f)*);
    };
    (@ $t:ident $($f:ident)*) => {
        impl Real for $t {
            $( fn $f(self) -> Self { self.$f() } )*
            fn erf(self) -> Self { error_function(f64::from(self)) as $t }
            fn round(self) -> Self { self.round_ties_even() }
        }
    };
}
real_trait!(sqrt exp ln ln_1p tanh sin cos floor ceil);

macro_rules! conversions {
    ($t:ty, $to:ident $from:ident) => {
        fn of<E: Element>(element: E) -> Self {
            element.$to()
        }
        fn to<E: Element>(self) -> E {
            E::$from(self)
        }
        fn from_f64(x: f64) -> Self {
            x as $t
        }
        fn from_i64(x: i64) -> Self {
            x as $t
        }
        fn to_f64(self) -> f64 {
            self as f64
        }
    };
}

macro_rules! real {
    ($($t:ident $to:ident $from:ident),*) => { $(
        impl Lane for $t {
            conversions!($t, $to $from);
            fn is_nan(self) -> bool { self.is_nan() }
            fn add(self, y: Self) -> Self { self + y }
            fn sub(self, y: Self) -> Self { self - y }
            fn mul(self, y: Self) -> Self { self * y }
            fn div(self, y: Self) -> Self { self / y }
            fn rem_floor(self, y: Self) -> Self {
                let rest = self % y;
                if rest != 0.0 && (rest < 0.0) != (y < 0.0) { rest + y } else { rest }
            }
            fn pow(self, y: Self) -> Self { self.powf(y) }
            fn neg(self) -> Self { -self }
            fn sum(row: &[Self]) -> Self { row.iter().map(|x| f64::from(*x)).sum::<f64>() as $t }
            fn abs(self) -> Self { self.abs() }
            fn sign(self) -> Self {
                if self > 0.0 { 1.0 } else if self < 0.0 { -1.0 } else { self * 0.0 }
            }
        }
    )* };
}
real!(f32 to_f32 from_f32, f64 to_f64 from_f64);

macro_rules! forwarded {
    ($($name:ident = $function:ident($($y:ident)?)),*) => {
        $( fn $name(self $(, $y: Self)?) -> Self { self.$function($($y)?) } )*
    };
}

impl Lane for i64 {
    conversions!(i64, to_i64 from_i64);
    fn is_nan(self) -> bool {
        false
    }
    forwarded!(
        add = wrapping_add(y),
        sub = wrapping_sub(y),
        mul = wrapping_mul(y)
    );
    fn div(self, y: Self) -> Self {
        self.checked_div(y).unwrap_or(0)
    }
    fn rem_floor(self, y: Self) -> Self {
        // By the documentation the remainder of a division by 0 is the dividend.
        let rest = self.checked_rem(y).unwrap_or(if y == 0 { self } else { 0 });
        if rest != 0 && y != 0 && (rest < 0) != (y < 0) {
            rest + y
        } else {
            rest
        }
    }
    fn pow(self, y: Self) -> Self {
        match (self, u32::try_from(y)) {
            (_, Ok(exponent)) => self.wrapping_pow(exponent),
            (1, _) => 1,
            (-1, _) => 1 - 2 * (y & 1),
            _ => 0,
        }
    }
    forwarded!(neg = wrapping_neg(), abs = wrapping_abs(), sign = signum());
    fn sum(row: &[Self]) -> Self {
        row.iter().fold(0, |total, x| total.wrapping_add(*x))
    }
}

/// Runs `$body` with `$element` standing for the type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        with_element!(@ $dtype, $element => $body,
            Float f32, Double f64, Float16 f16, Bf16 bf16, Int8 i8, Int16 i16, Int32 i32, Int64 i64,
            Uint8 u8, Uint16 u16, Uint32 u32, Uint64 u64, Bool Flag)
    };
    (@ $dtype:expr, $element:ident => $body:expr, $($name:ident $t:ty),*) => {
        match $dtype { $( DataType::$name => { type $element = $t; $body } )* }
    };
}

/// The value of a number after it was stored as an element type.
pub(crate) fn stored<L: Lane>(x: L, dtype: DataType) -> L {
    with_element!(dtype, E => L::of(x.to::<E>()))
}

/// Runs `$body` with `$lane` standing for the type of a class.
macro_rules! with_lane {
    ($class:expr, $lane:ident => $body:expr) => {
        match $class {
            $crate::aclnn::dtype::Class::I64 => {
                type $lane = i64;
                $body
            }
            class => $crate::aclnn::element::with_real!(class, $lane => $body),
        }
    };
}

/// Runs `$body` with `$lane` standing for the float type of a class: integers were refused before.
macro_rules! with_real {
    ($class:expr, $lane:ident => $body:expr) => {
        if $class == $crate::aclnn::dtype::Class::F64 {
            type $lane = f64;
            $body
        } else {
            type $lane = f32;
            $body
        }
    };
}
pub(crate) use {with_lane, with_real};

/// A strided box of elements, with neighbouring axes joined where one stride steps through both.
#[derive(PartialEq, Eq)]
pub(crate) struct Strided {
    outer: Vec<(usize, usize)>,
    run: (usize, usize),
}

impl Strided {
    /// `None` for a box without elements.
    pub(crate) fn new(dims: &[usize], strides: &[i64]) -> Option<Self> {
        if dims.contains(&0) {
            return None;
        }
        let mut axes: Vec<(usize, usize)> = Vec::with_capacity(dims.len());
        for (&dim, &stride) in dims.iter().zip(strides).filter(|(dim, _)| **dim != 1) {
            let stride = stride as usize;
            match axes.last_mut() {
                Some(last) if last.1 == stride * dim => *last = (last.0 * dim, stride),
                _ => axes.push((dim, stride)),
            }
        }
        let run = axes.pop().unwrap_or((1, 1));
        Some(Self { outer: axes, run })
    }

    /// The offset of the last element.
    pub(crate) fn last(&self) -> usize {
        self.outer
            .iter()
            .chain([&self.run])
            .map(|(dim, stride)| (dim - 1) * stride)
            .sum()
    }

    /// Visits the runs of the last axis, in order: where each starts, its length and its stride.
    pub(crate) fn runs(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let mut index = vec![0; self.outer.len()];
        let mut start = 0;
        loop {
            visit(start, self.run.0, self.run.1);
            let mut axis = self.outer.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                let (dim, stride) = self.outer[axis];
                index[axis] += 1;
                start += stride;
                if index[axis] < dim {
                    break;
                }
                index[axis] = 0;
                start -= dim * stride;
            }
        }
    }

    /// Visits the offset of each element, in order.
    pub(crate) fn offsets(&self, mut visit: impl FnMut(usize)) {
        self.runs(|start, len, stride| (0..len).for_each(|i| visit(start + i * stride)));
    }
}

/// The elements of a box that begins at the first of `bytes`, in order.
pub(crate) fn gather<L: Lane>(bytes: &[u8], dtype: DataType, at: &Strided, count: usize) -> Vec<L> {
    fn typed<L: Lane, E: Element>(bytes: &[u8], at: &Strided, count: usize) -> Vec<L> {
        let mut values = Vec::with_capacity(count);
        at.runs(|start, len, stride| {
            let from = &bytes[start * E::BYTES..];
            if stride == 1 {
                let run = from[..len * E::BYTES].chunks_exact(E::BYTES);
                values.extend(run.map(|element| L::of(E::decode(element))));
            } else {
                let element = |i: usize| &from[i * stride * E::BYTES..][..E::BYTES];
                values.extend((0..len).map(|i| L::of(E::decode(element(i)))));
            }
        });
        values
    }
    with_element!(dtype, E => typed::<L, E>(bytes, at, count))
}

/// Writes values over the elements of a box that begins at the first of `bytes`, rounding once.
pub(crate) fn scatter<L: Lane>(bytes: &mut [u8], dtype: DataType, at: &Strided, values: &[L]) {
    fn typed<L: Lane, E: Element>(bytes: &mut [u8], at: &Strided, values: &[L]) {
        let mut rest = values;
        at.runs(|start, len, stride| {
            let (run, after) = rest.split_at(len);
            rest = after;
            let to = &mut bytes[start * E::BYTES..];
            for (i, value) in run.iter().enumerate() {
                let element = &mut to[i * stride * E::BYTES..][..E::BYTES];
                value.to::<E>().encode(element);
            }
        });
    }
    with_element!(dtype, E => typed::<L, E>(bytes, at, values));
}

/// Strides of a dense box, the last axis fastest.
pub(crate) fn dense_strides(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis].max(1) as i64;
    }
    strides
}
