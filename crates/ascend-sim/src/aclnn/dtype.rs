//! Element types: which there are, how two of them promote, and which convert to which.

use super::refuse;
use crate::codes::Outcome;

/// Element types by their documented values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataType {
    Float = 0,
    Float16 = 1,
    Int8 = 2,
    Int32 = 3,
    Uint8 = 4,
    Int16 = 6,
    Uint16 = 7,
    Uint32 = 8,
    Int64 = 9,
    Uint64 = 10,
    Double = 11,
    Bool = 12,
    Bf16 = 27,
}

use DataType::*;

const ALL: [DataType; 13] = [
    Float, Float16, Int8, Int32, Uint8, Int16, Uint16, Uint32, Int64, Uint64, Double, Bool, Bf16,
];

/// The type that an operator computes in: f16 and bf16 are widened, integers and bool are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    F32,
    F64,
    I64,
}

impl DataType {
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        ALL.into_iter().find(|t| *t as i32 == code)
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Int8 | Uint8 | Bool => 1,
            Float16 | Bf16 | Int16 | Uint16 => 2,
            Float | Int32 | Uint32 => 4,
            Int64 | Uint64 | Double => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        FLOATS.has(self)
    }

    pub(crate) fn class(self) -> Class {
        match self {
            Double => Class::F64,
            Float | Float16 | Bf16 => Class::F32,
            _ => Class::I64,
        }
    }
}

/// A set of element types that an operator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u32);

impl Types {
    pub(crate) const fn of(list: &[DataType]) -> Self {
        let (mut set, mut i) = (0, 0);
        while i < list.len() {
            set |= 1 << list[i] as u32;
            i += 1;
        }
        Self(set)
    }

    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn has(self, dtype: DataType) -> bool {
        self.0 >> dtype as u32 & 1 == 1
    }

    pub(crate) fn list(self) -> Vec<DataType> {
        ALL.into_iter().filter(|dtype| self.has(*dtype)).collect()
    }
}

/// f32, f16 and bf16.
pub(crate) const FLT: Types = Types::of(&[Float, Float16, Bf16]);
/// The same and f64.
pub(crate) const FLOATS: Types = FLT.and(Types::of(&[Double]));
/// The integers that promote with others.
pub(crate) const INTS: Types = Types::of(&[Int8, Int16, Int32, Int64, Uint8]);
/// The same and the floats.
pub(crate) const NUMBERS: Types = FLOATS.and(INTS);
/// bool.
pub(crate) const BOOL: Types = Types::of(&[Bool]);
/// The types that most documents list, without complex numbers.
pub(crate) const ARITH: Types = NUMBERS.and(BOOL);
/// Index types.
pub(crate) const INDEX: Types = Types::of(&[Int32, Int64]);
/// The integers that promote with themselves only.
pub(crate) const UNSIGNED: Types = Types::of(&[Uint16, Uint32, Uint64]);
/// All types that are modelled.
pub(crate) const ANY: Types = ARITH.and(UNSIGNED);

/// The type that two tensors compute in.
pub(crate) fn promote(a: DataType, b: DataType) -> Outcome<DataType> {
    if a == b {
        return Ok(a);
    }
    for alone in [a, b] {
        if UNSIGNED.has(alone) {
            return refuse(format!(
                "{a:?} and {b:?} do not promote: {alone:?} only with itself"
            ));
        }
    }
    let pair = |x: DataType, y: DataType| (a, b) == (x, y) || (a, b) == (y, x);
    Ok(match (a.is_float(), b.is_float()) {
        (true, false) => a,
        (false, true) => b,
        (true, true) if a == Double || b == Double => Double,
        (true, true) => Float,
        _ if a == Bool => b,
        _ if b == Bool => a,
        _ if pair(Int8, Uint8) => Int16,
        _ if a == Uint8 => b,
        _ if b == Uint8 => a,
        _ if a.bytes() > b.bytes() => a,
        _ => b,
    })
}

/// The type that a tensor and a number compute in, on A2 and A3, where an operator has no rule of
/// its own: a float tensor keeps its type, and an integer tensor does beside an integer.
pub(crate) fn promote_number(tensor: DataType, number: DataType) -> Outcome<DataType> {
    if tensor.is_float() || (tensor != Bool && !number.is_float()) {
        return Ok(tensor);
    }
    promote(tensor, number)
}

/// Refuses a result that may not be given out as another type: floats as integers, and numbers as
/// truth values.
pub(crate) fn expect_castable(from: DataType, to: DataType, name: &str) -> Outcome {
    if (from.is_float() && !to.is_float()) || (to == Bool && from != Bool) {
        return refuse(format!(
            "{name} is {to:?}, the result is {from:?} and does not convert to it"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_follows_the_table_of_torch() {
        for (a, b, expected) in [
            (Float16, Bf16, Float),
            (Float16, Float, Float),
            (Bf16, Double, Double),
            (Int64, Float16, Float16),
            (Bool, Bf16, Bf16),
            (Int8, Uint8, Int16),
            (Uint8, Int32, Int32),
            (Int16, Int64, Int64),
            (Bool, Uint8, Uint8),
        ] {
            assert_eq!(promote(a, b).expect("promotes"), expected);
            assert_eq!(promote(b, a).expect("promotes"), expected);
        }
        assert!(promote(Uint32, Int64).is_err());
    }
}
