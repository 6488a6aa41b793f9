//! aarch64: NEON, four f32 a register.

use core::arch::aarch64::*;

use half::{bf16, f16};

use super::portable::Array;
use super::tile::{Tile, rotate_tile};
use super::vector::Vector;
use crate::element::Element;

/// Four f32.
#[derive(Clone, Copy)]
pub(super) struct F32x4(float32x4_t);

/// [`rotate_tile`] with NEON.
///
/// # Safety
/// The processor has NEON; otherwise as [`rotate_tile`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon_tile<E: Element<Acc = f32>>(tile: &Tile<E>)
where
    F32x4: Vector<E>,
{
    // SAFETY: passed on to the caller.
    unsafe { rotate_tile::<F32x4, E>(tile) }
}

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is left over.
#[inline(always)]
unsafe fn round_bf16(values: float32x4_t) -> uint32x4_t {
    // SAFETY: the caller has NEON.
    unsafe {
        let bits = vreinterpretq_u32_f32(values);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        // Rounding could carry a NaN to infinity: set its quiet bit instead.
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vbslq_u32(vceqq_f32(values, values), rounded, quiet)
    }
}

macro_rules! arithmetic {
    () => {
        #[inline(always)]
        unsafe fn load_acc(from: *const f32) -> Self {
            // SAFETY: N values at `from`, and NEON, by the caller.
            Self(unsafe { vld1q_f32(from) })
        }
        #[inline(always)]
        unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
            // SAFETY: the caller has NEON.
            unsafe {
                let low = vzip1q_f32(first.0, second.0);
                [Self(low), Self(vzip2q_f32(first.0, second.0))]
            }
        }
        #[inline(always)]
        unsafe fn swap(self) -> Self {
            // SAFETY: the caller has NEON.
            Self(unsafe { vrev64q_f32(self.0) })
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller has NEON.
            Self(unsafe { vaddq_f32(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller has NEON.
            Self(unsafe { vsubq_f32(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn signs(negative: bool) -> Self {
            // SAFETY: the caller has NEON.
            Self(unsafe { vdupq_n_f32(if negative { -0.0 } else { 0.0 }) })
        }
        #[inline(always)]
        unsafe fn flip(self, signs: Self) -> Self {
            // SAFETY: the caller has NEON.
            unsafe {
                let (bits, signs) = (
                    vreinterpretq_u32_f32(self.0),
                    vreinterpretq_u32_f32(signs.0),
                );
                Self(vreinterpretq_f32_u32(veorq_u32(bits, signs)))
            }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller has NEON.
            Self(unsafe { vmulq_f32(self.0, other.0) })
        }
    };
}

impl Vector<f32> for F32x4 {
    const N: usize = 4;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: 4 elements at `from`, and NEON, by the caller.
        Self(unsafe { vld1q_f32(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f32) {
        // SAFETY: 4 elements at `to`, and NEON, by the caller.
        unsafe { vst1q_f32(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: 8 elements at `from`, and NEON, by the caller.
        let pairs = unsafe { vld2q_f32(from) };
        (Self(pairs.0), Self(pairs.1))
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f32) {
        // SAFETY: 8 elements at `to`, and NEON, by the caller.
        unsafe { vst2q_f32(to, float32x4x2_t(first.0, second.0)) }
    }
}

impl Vector<bf16> for F32x4 {
    const N: usize = 4;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: 4 elements at `from`, and NEON, by the caller.
        Self(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut bf16) {
        // SAFETY: 4 elements at `to`, and NEON, by the caller.
        unsafe { vst1_u16(to.cast(), vshrn_n_u32::<16>(round_bf16(self.0))) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: 8 elements at `from`, and NEON, by the caller.
        unsafe {
            let pairs = vld2_u16(from.cast());
            let widen = |v| Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(v)));
            (widen(pairs.0), widen(pairs.1))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut bf16) {
        // SAFETY: 8 elements at `to`, and NEON, by the caller.
        unsafe {
            let narrow = |v: Self| vshrn_n_u32::<16>(round_bf16(v.0));
            vst2_u16(to.cast(), uint16x4x2_t(narrow(first), narrow(second)));
        }
    }
}

/// f16 is converted element by element: the vector conversions are not stable in Rust 1.95, and `half` uses the
/// scalar instruction where there is one.
impl Vector<f16> for F32x4 {
    const N: usize = 4;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f16) -> Self {
        // SAFETY: 4 elements at `from`, and NEON, by the caller.
        unsafe {
            let wide: [f32; 4] = core::array::from_fn(|i| from.add(i).read().to_f32());
            Self(vld1q_f32(wide.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f16) {
        let mut wide = [0f32; 4];
        // SAFETY: 4 elements at `to`, and NEON, by the caller.
        unsafe {
            vst1q_f32(wide.as_mut_ptr(), self.0);
            for (i, value) in wide.into_iter().enumerate() {
                to.add(i).write(f16::from_f32(value));
            }
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> (Self, Self) {
        // SAFETY: 8 elements at `from`, and NEON, by the caller.
        unsafe {
            let member = |m: usize| {
                let wide: [f32; 4] = core::array::from_fn(|i| from.add(2 * i + m).read().to_f32());
                Self(vld1q_f32(wide.as_ptr()))
            };
            (member(0), member(1))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f16) {
        for (m, vector) in [first, second].into_iter().enumerate() {
            let mut wide = [0f32; 4];
            // SAFETY: 8 elements at `to`, and NEON, by the caller.
            unsafe {
                vst1q_f32(wide.as_mut_ptr(), vector.0);
                for (i, value) in wide.into_iter().enumerate() {
                    to.add(2 * i + m).write(f16::from_f32(value));
                }
            }
        }
    }
}
