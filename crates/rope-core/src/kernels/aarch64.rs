//! aarch64: NEON, four f32 per register.

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::portable::Portable;
use super::vector::{Instructions, Kernel, Memory, Register};

/// Four f32.
#[derive(Clone, Copy)]
pub(super) struct F32x4(float32x4_t);

/// NEON.
pub(super) struct Neon;

impl Instructions for Neon {
    #[target_feature(enable = "neon")]
    #[inline(never)]
    unsafe fn run<K: Kernel>(args: K::Args<'_>) {
        // SAFETY: the caller guarantees NEON, and what the kernel demands.
        unsafe { K::run(args) }
    }
}

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is
/// undefined.
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

impl Register for F32x4 {
    type Value = f32;
    const N: usize = 4;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 readable values.
        Self(unsafe { vld1q_f32(from) })
    }
    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 writable values.
        unsafe { vst1q_f32(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has NEON.
        Self(unsafe { vdupq_n_f32(value) })
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
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            let two = vadd_f32(vget_low_f32(self.0), vget_high_f32(self.0));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
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
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller has NEON.
        Self(unsafe { vfmaq_f32(term.0, self.0, factor.0) })
    }
}

impl Memory<f32> for Neon {
    type Register = F32x4;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> F32x4 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 readable elements.
        F32x4(unsafe { vld1q_f32(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x4, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 writable elements.
        unsafe { vst1q_f32(to, x.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> [F32x4; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 8 readable elements.
        let pairs = unsafe { vld2q_f32(from) };
        [F32x4(pairs.0), F32x4(pairs.1)]
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x4; 2], to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees NEON and 8 writable elements.
        unsafe { vst2q_f32(to, float32x4x2_t(first.0, second.0)) }
    }
}

impl Memory<bf16> for Neon {
    type Register = F32x4;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> F32x4 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 readable elements.
        F32x4(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x4, to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 writable elements.
        unsafe { vst1_u16(to.cast(), vshrn_n_u32::<16>(round_bf16(x.0))) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [F32x4; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 8 readable elements.
        unsafe {
            let pairs = vld2_u16(from.cast());
            let widen = |v| F32x4(vreinterpretq_f32_u32(vshll_n_u16::<16>(v)));
            [widen(pairs.0), widen(pairs.1)]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x4; 2], to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees NEON and 8 writable elements.
        unsafe {
            let narrow = |v: F32x4| vshrn_n_u32::<16>(round_bf16(v.0));
            vst2_u16(to.cast(), uint16x4x2_t(narrow(first), narrow(second)));
        }
    }
}

/// f16 is converted element by element: the vector conversions are not stable in Rust 1.95, and
/// `half` uses the scalar instruction where there is one.
impl Memory<f16> for Neon {
    type Register = F32x4;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const f16) -> F32x4 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 4 readable elements.
        unsafe {
            let wide: [f32; 4] = std::array::from_fn(|i| from.add(i).read().to_f32());
            F32x4(vld1q_f32(wide.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x4, to: *mut f16) {
        debug_assert!(to.is_aligned());
        let mut wide = [0f32; 4];
        // SAFETY: the caller guarantees NEON and 4 writable elements.
        unsafe {
            vst1q_f32(wide.as_mut_ptr(), x.0);
            for (i, value) in wide.into_iter().enumerate() {
                to.add(i).write(f16::from_f32(value));
            }
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> [F32x4; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees NEON and 8 readable elements.
        unsafe {
            let member = |m: usize| {
                let wide: [f32; 4] = std::array::from_fn(|i| from.add(2 * i + m).read().to_f32());
                F32x4(vld1q_f32(wide.as_ptr()))
            };
            [member(0), member(1)]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x4; 2], to: *mut f16) {
        debug_assert!(to.is_aligned());
        for (m, x) in [first, second].into_iter().enumerate() {
            let mut wide = [0f32; 4];
            // SAFETY: the caller guarantees NEON and 8 writable elements.
            unsafe {
                vst1q_f32(wide.as_mut_ptr(), x.0);
                for (i, value) in wide.into_iter().enumerate() {
                    to.add(2 * i + m).write(f16::from_f32(value));
                }
            }
        }
    }
}
