//! The number types of the kernels: those of tensors, and those of computation.

use burn::backend::Element as BurnElement;
use half::{bf16, f16};

use crate::attention::blocks::FLOOR;
use crate::rows::kernel;

/// An element of q, k, v and the output.
pub(crate) trait Number: BurnElement + bytemuck::Pod + Send + Sync {
    /// The type that it is computed in.
    type Wide: Real;

    fn widen(self) -> Self::Wide;
    fn round(wide: Self::Wide) -> Self;

    /// Elements that need no conversion.
    fn as_wide(_: &[Self]) -> Option<&[Self::Wide]> {
        None
    }
}

macro_rules! wide_number {
    ($type:ty) => {
        impl Number for $type {
            type Wide = Self;

            fn widen(self) -> Self {
                self
            }

            fn round(wide: Self) -> Self {
                wide
            }

            fn as_wide(values: &[Self]) -> Option<&[Self]> {
                Some(values)
            }
        }
    };
}
wide_number!(f32);
wide_number!(f64);

macro_rules! narrow_number {
    ($type:ty) => {
        impl Number for $type {
            type Wide = f32;

            fn widen(self) -> f32 {
                self.to_f32()
            }

            fn round(wide: f32) -> Self {
                Self::from_f32(wide)
            }
        }
    };
}
narrow_number!(f16);

/// Without branches, so that loops become vector instructions.
impl Number for bf16 {
    type Wide = f32;

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn round(wide: f32) -> Self {
        let bits = wide.to_bits();
        let half = 0x7fff + (bits >> 16 & 1);
        let rounded = match wide.is_nan() {
            true => bits | 1 << 22,
            false => bits.wrapping_add(half),
        };
        Self::from_bits((rounded >> 16) as u16)
    }
}

/// A type that scores, weights and sums are computed in.
pub(crate) trait Real:
    BurnElement
    + bytemuck::Pod
    + Send
    + Sync
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::AddAssign
    + std::ops::MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const HIDDEN: Self;

    fn of(value: f64) -> Self;
    fn exp(self) -> Self;
    fn sqrt(self) -> Self;
    fn mul_add(self, factor: Self, term: Self) -> Self;

    /// Writes a product by the kernel of products, or returns false for a type that it has none for.
    fn multiply(
        _x: &[Self],
        _sizes: [usize; 3],
        _weight: (&[Self], [usize; 2]),
        _out: &mut [Self],
    ) -> bool {
        false
    }

    /// Replaces each x by e^(x - shift), and returns their sum.
    fn exponentials(row: &mut [Self], shift: Self) -> Self;

    /// The largest of a row that is above [`FLOOR`], or that.
    fn largest(row: &[Self]) -> Self {
        let mut lanes = [Self::of(FLOOR); LANES];
        let chunks = row.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = if *x > *lane { *x } else { *lane };
            }
        }
        let all = lanes.iter().chain(rest);
        all.fold(lanes[0], |max, x| if *x > max { *x } else { max })
    }
}

/// Numbers that are summed side by side: two vectors of the widest instructions.
const LANES: usize = 16;

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const HIDDEN: Self = Self::NEG_INFINITY;

    fn of(value: f64) -> Self {
        value
    }

    fn exp(self) -> Self {
        self.exp()
    }

    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }

    fn exponentials(row: &mut [Self], shift: Self) -> Self {
        let mut sum = 0.0;
        for x in row {
            *x = (*x - shift).exp();
            sum += *x;
        }
        sum
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const HIDDEN: Self = Self::NEG_INFINITY;

    fn of(value: f64) -> Self {
        value as f32
    }

    fn exp(self) -> Self {
        self.exp()
    }

    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }

    fn multiply(
        x: &[Self],
        sizes: [usize; 3],
        weight: (&[Self], [usize; 2]),
        out: &mut [Self],
    ) -> bool {
        kernel::write(x, sizes, weight, out)
    }

    fn exponentials(row: &mut [Self], shift: Self) -> Self {
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code, reason = "the functions are compiled with wider vectors")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has AVX-512F, which was just detected.
                return unsafe { exponentials_avx512(row, shift) };
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has AVX2, which was just detected.
                return unsafe { exponentials_avx2(row, shift) };
            }
        }
        exponentials(row, shift)
    }
}

/// The portable loop with wider vectors: the same operations, and so the same bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn exponentials_avx2(row: &mut [f32], shift: f32) -> f32 {
    exponentials(row, shift)
}

/// As [`exponentials_avx2`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn exponentials_avx512(row: &mut [f32], shift: f32) -> f32 {
    exponentials(row, shift)
}

#[inline(always)]
fn exponentials(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exponential(*x - shift);
            *lane += *x;
        }
    }
    let mut total = 0.0;
    for x in rest {
        *x = exponential(*x - shift);
        total += *x;
    }
    for lane in lanes {
        total += lane;
    }
    total
}

/// e^x within 2 units in the last place, 0 below -87 and at most e^88: without a branch, so that
/// loops over it become vector instructions.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^n e^r, where e^r is a polynomial.
///
/// # Source
/// The coefficients are those of `expf` in S. L. Moshier, Cephes Mathematical Library, 1989.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    /// Below, 2^n is no normal number.
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.0;
    /// Added to a small number, it leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    /// ln 2 in two parts; products of the first with n are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const COEFFICIENTS: [f32; 6] = [
        1.987_569_1e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        5e-1,
    ];
    // Comparisons that let NaN through.
    let clamped = if x < LOWEST { LOWEST } else { x };
    let clamped = if clamped > HIGHEST { HIGHEST } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2[0] - n * LN_2[1];
    let mut polynomial = COEFFICIENTS[0];
    for coefficient in &COEFFICIENTS[1..] {
        polynomial = polynomial * r + coefficient;
    }
    let power = polynomial * (r * r) + r + 1.0;
    // 2^n: n, in the lowest bits of `shifted`, is added to the exponent. NaN stays NaN.
    let scaled = f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < LOWEST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for step in -870_000..880_000 {
            let x = step as f32 / 10_000.0;
            let expected = f64::from(x).exp();
            let unit = expected * f64::from(f32::EPSILON);
            worst = worst.max((f64::from(exponential(x)) - expected).abs() / unit);
        }
        assert!(worst < 2.0, "{worst} units");
        assert_eq!(exponential(0.0), 1.0);
        for x in [-87.1, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exponential(x), 0.0);
        }
        assert!(exponential(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_is_rounded_to_the_nearest() {
        for high in 0..=u16::MAX {
            let x = bf16::from_bits(high);
            assert!(x.widen() == x.to_f32() || x.is_nan() && x.widen().is_nan());
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (found, expected) = (<bf16 as Number>::round(x), bf16::from_f32(x));
                assert_eq!(found.to_bits(), expected.to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn rows_of_any_length_are_summed() {
        for len in 0..40 {
            let row: Vec<f32> = (0..len).map(|i| (i * 7 % 11) as f32).collect();
            let mut found = row.clone();
            let sum = f32::exponentials(&mut found, 10.0);
            let expected: f64 = row.iter().map(|x| (f64::from(*x) - 10.0).exp()).sum();
            assert!((f64::from(sum) - expected).abs() < 1e-6, "{len}");
            let largest = row.iter().copied().fold(FLOOR as f32, f32::max);
            assert_eq!(f32::largest(&row), largest);
        }
    }
}
