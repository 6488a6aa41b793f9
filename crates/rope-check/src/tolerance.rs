//! How far a result may be from the exact one: one function of operation and element type.

use crate::buffer::DType;

/// The operation that a compared value results from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// A rotation of inputs of order 1, by cos and sin of at most 1 in the type that is computed
    /// in.
    ///
    /// f32: 2e-6, which covers the roundings of cos, sin, two products and a sum. f16 and bf16:
    /// half a unit in the last place of the exact value, for the one rounding on store, and the
    /// same 2e-6 for what precedes it. f64: as f32 with f64's unit.
    Rotation,
    /// A rotation by cos and sin that were rounded to another type.
    RotationBy {
        /// The type of cos and sin.
        angles: DType,
        /// The most that cos and sin can be.
        scaling: f64,
    },
    /// Rotations of inputs below 1, one after the other, each stored.
    Passes(usize),
    /// A rotation by angles in f32, against exact ones: the truth of a file without f64.
    RoundedAngles,
    /// A frequency or an attention scaling, computed in the element type; relative to it.
    ///
    /// An angle is made of it in f64 and rounded to f32 after cos and sin, so 1e-7 is an error of
    /// two units of f32 per radian. In f32: powers, wavelengths and Llama 3's blend of two.
    Frequency,
    /// An activation, a logit or a loss of a model, of order 1.
    Activation,
    /// The gradient of a parameter, by the norm of the difference; the exact value is its norm.
    Gradient,
    /// An element of a gradient that is zero except for rounding.
    ZeroGradient,
}

/// The largest allowed distance of a result of type `dtype` from `exact`.
pub fn allowed(operation: Operation, dtype: DType, exact: f64) -> f64 {
    match operation {
        Operation::Rotation => match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 2e-6,
            DType::F16 => half_ulp(exact, 10, -14) + 2e-6,
            DType::Bf16 => half_ulp(exact, 7, -126) + 2e-6,
        },
        // Two products, each with a factor of order 1.
        Operation::RotationBy { angles, scaling } => {
            allowed(Operation::Rotation, dtype, exact)
                + 2.0 * scaling * (unit(angles) - unit(dtype.computed_in()))
        }
        Operation::Passes(passes) => {
            // A rounding error of the first pass is turned by the second: it may come from any
            // channel of the pair.
            let reach = if passes == 1 { exact.abs() } else { 2.0 };
            // The last term is half the spacing of f16's subnormal numbers.
            passes as f64 * (2e-6 + reach * unit(dtype) + f64::EPSILON + 2f64.powi(-25))
        }
        Operation::RoundedAngles => 1e-3,
        Operation::Frequency if dtype == DType::F64 => 1e-7 * exact.abs(),
        Operation::Frequency => 1e-6 * exact.abs(),
        Operation::Activation => 1e-4,
        Operation::Gradient => 1e-3 * exact,
        Operation::ZeroGradient => 1e-6,
    }
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

/// Half the distance between neighbours around `value`, with `mantissa` explicit bits and normal
/// numbers from 2^`min_exponent`.
///
/// The result may round into the next binade, whose unit is twice as large, when the exact value is
/// just below it.
fn half_ulp(value: f64, mantissa: i32, min_exponent: i32) -> f64 {
    let exponent = if value == 0.0 {
        min_exponent
    } else {
        value.abs().log2().floor() as i32
    };
    2f64.powi(exponent.max(min_exponent) - mantissa - 1)
}
