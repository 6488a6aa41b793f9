//! Element types of q and k, and the types that they are computed in.

use half::{bf16, f16};

use crate::kernels::KernelElement;

/// A type that rotation is computed in, and that cos and sin are kept in: f32 or f64.
pub trait Real:
    Element<Acc = Self>
    + core::ops::Neg<Output = Self>
    + core::ops::Add<Output = Self>
    + core::ops::Sub<Output = Self>
    + core::ops::Mul<Output = Self>
{
    /// Zero.
    const ZERO: Self;
    /// Rounds to nearest, ties to even.
    fn from_f64(value: f64) -> Self;
    /// Converts without loss.
    fn to_f64(self) -> f64;
}

/// A type that q and k are kept in: f32, f64, f16 or bf16.
#[allow(
    private_bounds,
    reason = "the private bound seals the trait: each element has its kernels"
)]
pub trait Element: Copy + Send + Sync + 'static + core::fmt::Debug + KernelElement {
    /// The type that it is computed in.
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
        }
    };
}

macro_rules! half_width {
    ($type:ty, $name:literal) => {
        impl Element for $type {
            type Acc = f32;
            const NAME: &'static str = $name;
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(value: f32) -> $type {
                <$type>::from_f32(value)
            }
        }
    };
}

real!(f32, "f32");
real!(f64, "f64");
half_width!(f16, "f16");
half_width!(bf16, "bf16");
