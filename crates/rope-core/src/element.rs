//! Element types of q and k, and the types used to compute their rotation.

use half::{bf16, f16};

use crate::kernels::KernelElement;

/// The type of the arithmetic, and of cos and sin: f32 or f64.
pub trait Real:
    Element<Acc = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
{
    /// Zero.
    const ZERO: Self;
    /// Rounds to nearest, ties to even.
    fn from_f64(value: f64) -> Self;
    /// Converts without loss.
    fn to_f64(self) -> f64;
    /// 1 / sqrt of the value. The root and the quotient are each rounded to nearest.
    fn reciprocal_root(self) -> Self;
    /// The value times `factor` plus `term`, rounded once.
    fn mul_add(self, factor: Self, term: Self) -> Self;
}

/// The element type of q and k: f32, f64, f16 or bf16.
#[allow(
    private_bounds,
    reason = "the private bound seals the trait: each element has its kernels"
)]
pub trait Element: Copy + Send + Sync + 'static + std::fmt::Debug + KernelElement {
    /// The type of its arithmetic.
    type Acc: Real;
    /// The name in messages and tables.
    const NAME: &'static str;
    /// Converts without loss.
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest, ties to even.
    fn narrow(value: Self::Acc) -> Self;
}

macro_rules! real {
    ($type:ty, $name:literal) => {
        impl Element for $type {
            type Acc = $type;
            const NAME: &'static str = $name;
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(value: $type) -> $type {
                value
            }
        }
        impl Real for $type {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn reciprocal_root(self) -> Self {
                1.0 / self.sqrt()
            }
            #[inline(always)]
            fn mul_add(self, factor: Self, term: Self) -> Self {
                <$type>::mul_add(self, factor, term)
            }
        }
    };
}

/// Conversions are calls: without a conversion instruction that the compiler may assume, one is
/// longer than the loop around it. Kernels with vector instructions call them for row tails.
impl Element for f16 {
    type Acc = f32;
    const NAME: &'static str = "f16";
    #[inline(never)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(never)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// Without branches, so that the compiler vectorises loops over it.
impl Element for bf16 {
    type Acc = f32;
    const NAME: &'static str = "bf16";
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + odd);
        // Rounding could carry a NaN to infinity: set its quiet bit instead.
        let quiet = bits | 0x0040_0000;
        let chosen = if value.is_nan() { quiet } else { rounded };
        Self::from_bits((chosen >> 16) as u16)
    }
}

real!(f32, "f32");
real!(f64, "f64");
