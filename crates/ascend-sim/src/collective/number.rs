//! Elements of collectives, and how those of the ranks are combined: in their own type, one after
//! the other.

use half::{bf16, f16};

/// Element types by the library's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    I8 = 0,
    I16 = 1,
    I32 = 2,
    F16 = 3,
    F32 = 4,
    I64 = 5,
    U64 = 6,
    U8 = 7,
    U16 = 8,
    U32 = 9,
    F64 = 10,
    Bf16 = 11,
}

impl Number {
    const ALL: [Self; 12] = [
        Self::I8,
        Self::I16,
        Self::I32,
        Self::F16,
        Self::F32,
        Self::I64,
        Self::U64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::F64,
        Self::Bf16,
    ];

    pub(crate) fn from_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|number| *number as i32 == code)
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
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
            $( Number::$name => {
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
        }
    };
}

/// Combines the elements of another rank into `into`.
pub(crate) fn combine(number: Number, how: Reduction, into: &mut [u8], from: &[u8]) {
    combine! { number, how, into, from;
        I8: i8, i8::wrapping_add, i8::wrapping_mul;
        I16: i16, i16::wrapping_add, i16::wrapping_mul;
        I32: i32, i32::wrapping_add, i32::wrapping_mul;
        I64: i64, i64::wrapping_add, i64::wrapping_mul;
        U8: u8, u8::wrapping_add, u8::wrapping_mul;
        U16: u16, u16::wrapping_add, u16::wrapping_mul;
        U32: u32, u32::wrapping_add, u32::wrapping_mul;
        U64: u64, u64::wrapping_add, u64::wrapping_mul;
        F16: f16, |a, b| a + b, |a, b| a * b;
        Bf16: bf16, |a, b| a + b, |a, b| a * b;
        F32: f32, |a, b| a + b, |a, b| a * b;
        F64: f64, |a, b| a + b, |a, b| a * b;
    }
}
