//! How far a result may lie from the exact one: one function of the element type.

use crate::buffer::DType;

/// The largest allowed distance of a rotated value of type `dtype` from `exact`, for inputs of order 1 and at most
/// `attention_scaling` in cos and sin.
///
/// f32: 2e-6, which covers the roundings of cos, sin, two products and a sum. f16 and bf16: half a unit in the last
/// place of the exact value, for the one rounding on store, and the same 2e-6 for what lies before it. f64: as f32 with
/// f64's unit, where cos and sin are f64 too.
pub fn rotated(dtype: DType, exact: f64) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 2e-6,
        DType::F16 => half_ulp(exact, 10, -14) + 2e-6,
        DType::Bf16 => half_ulp(exact, 7, -126) + 2e-6,
    }
}

/// As [`rotated`], where cos and sin were rounded to `angles`, and are at most `scaling`.
pub fn rotated_by(dtype: DType, angles: DType, scaling: f64, exact: f64) -> f64 {
    let granted = if angles == DType::F64 {
        unit(DType::F64)
    } else {
        unit(DType::F32)
    };
    // Two products, each with a factor of order 1.
    rotated(dtype, exact) + 2.0 * scaling * (unit(angles) - granted)
}

/// The largest relative error of one rounding to nearest.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.0,
        DType::F32 => f64::from(f32::EPSILON) / 2.0,
        DType::F16 => 2f64.powi(-11),
        DType::Bf16 => 2f64.powi(-8),
    }
}

/// Half the distance between neighbours around `value`, with `mantissa` explicit bits and normal numbers from
/// 2^`min_exponent`.
///
/// The result may round into the next binade, whose unit is twice as large, when the exact value lies just below it.
fn half_ulp(value: f64, mantissa: i32, min_exponent: i32) -> f64 {
    let exponent = if value == 0.0 {
        min_exponent
    } else {
        value.abs().log2().floor() as i32
    };
    2f64.powi(exponent.max(min_exponent) - mantissa - 1)
}
