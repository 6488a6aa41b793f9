//! Elements of collectives, and how those of the ranks are combined: in their own type, one after
//! the other.

use half::{bf16, f16};

use crate::aclnn::DataType::{self, *};

/// Element types in the order of the library's numbers.
const NUMBERS: [DataType; 12] = [
    Int8, Int16, Int32, Float16, Float, Int64, Uint64, Uint8, Uint16, Uint32, Double, Bf16,
];

/// The element type with the library's number.
pub(crate) fn number(code: i32) -> Option<DataType> {
    NUMBERS.get(usize::try_from(code).ok()?).copied()
}

/// The library's number of an element type that it has.
pub(crate) fn code(of: DataType) -> Option<i32> {
    NUMBERS
        .iter()
        .position(|number| *number == of)
        .map(|code| code as i32)
}

/// How elements are combined, by the library's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum = 0,
    Product = 1,
    Maximum = 2,
    Minimum = 3,
}

impl Reduction {
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        let all = [Self::Sum, Self::Product, Self::Maximum, Self::Minimum];
        all.into_iter().find(|how| *how as i32 == code)
    }
}

macro_rules! combine {
    ($number:expr, $how:expr, $into:expr, $from:expr; $($name:ident: $type:ty, $add:expr, $multiply:expr;)*) => {
        match $number {
            $( DataType::$name => {
                const SIZE: usize = size_of::<$type>();
                let add: fn($type, $type) -> $type = $add;
                let multiply: fn($type, $type) -> $type = $multiply;
                for (into, from) in $into.chunks_exact_mut(SIZE).zip($from.chunks_exact(SIZE)) {
                    let read = |bytes: &[u8]| {
                        let mut raw = [0; SIZE];
                        raw.copy_from_slice(bytes);
                        <$type>::from_le_bytes(raw)
                    };
                    let (a, b) = (read(into), read(from));
                    let combined = match $how {
                        Reduction::Sum => add(a, b),
                        Reduction::Product => multiply(a, b),
                        Reduction::Maximum => if b > a { b } else { a },
                        Reduction::Minimum => if b < a { b } else { a },
                    };
                    into.copy_from_slice(&combined.to_le_bytes());
                }
            } )*
            Bool => unreachable!("not among the library's numbers"),
        }
    };
}

/// Combines the elements of another rank into `into`.
pub(crate) fn combine(number: DataType, how: Reduction, into: &mut [u8], from: &[u8]) {
    combine! { number, how, into, from;
        Int8: i8, i8::wrapping_add, i8::wrapping_mul;
        Int16: i16, i16::wrapping_add, i16::wrapping_mul;
        Int32: i32, i32::wrapping_add, i32::wrapping_mul;
        Int64: i64, i64::wrapping_add, i64::wrapping_mul;
        Uint8: u8, u8::wrapping_add, u8::wrapping_mul;
        Uint16: u16, u16::wrapping_add, u16::wrapping_mul;
        Uint32: u32, u32::wrapping_add, u32::wrapping_mul;
        Uint64: u64, u64::wrapping_add, u64::wrapping_mul;
        Float16: f16, |a, b| a + b, |a, b| a * b;
        Bf16: bf16, |a, b| a + b, |a, b| a * b;
        Float: f32, |a, b| a + b, |a, b| a * b;
        Double: f64, |a, b| a + b, |a, b| a * b;
    }
}
