//! Sixteen f32 in an AVX-512 register.

use core::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::F32x8;
use crate::kernels::vector::Vector;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct F32x16(__m512);

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is left over.
///
/// Not `VCVTNEPS2BF16`: that one flushes subnormal numbers to zero.
#[inline(always)]
unsafe fn round_bf16(values: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512F.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // Rounding could carry a NaN to infinity: set its quiet bit instead.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

const UPPER_HALF: i32 = 0xffff_0000_u32.cast_signed();

macro_rules! arithmetic {
    () => {
        #[inline(always)]
        unsafe fn load_acc(from: *const f32) -> Self {
            // SAFETY: N values at `from`, and AVX-512F, by the caller.
            Self(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512F.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512F.
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512F.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
    };
}

impl Vector<f32> for F32x16 {
    const N: usize = 16;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512F, by the caller.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: 16 elements at `to`, and AVX-512F, by the caller.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512F, by the caller.
        unsafe {
            let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            (
                Self(_mm512_permutex2var_ps(a, even, b)),
                Self(_mm512_permutex2var_ps(a, odd, b)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, to: *mut f32) {
        // SAFETY: 32 elements at `to`, and AVX-512F, by the caller.
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high =
                _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(first.0, low, second.0));
            _mm512_storeu_ps(to.add(16), _mm512_permutex2var_ps(first.0, high, second.0));
        }
    }
}

impl Vector<bf16> for F32x16 {
    const N: usize = 16;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512F, by the caller.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut bf16) {
        // SAFETY: 16 elements at `to`, and AVX-512F, by the caller.
        unsafe {
            let words = _mm512_srli_epi32::<16>(round_bf16(self.0));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512F, by the caller. A pair is one little-endian word whose
        // halves are the upper halves of two f32.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            let first = _mm512_slli_epi32::<16>(words);
            let second = _mm512_and_si512(words, _mm512_set1_epi32(UPPER_HALF));
            (
                Self(_mm512_castsi512_ps(first)),
                Self(_mm512_castsi512_ps(second)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, to: *mut bf16) {
        // SAFETY: 32 elements at `to`, and AVX-512F, by the caller.
        unsafe {
            let first = _mm512_srli_epi32::<16>(round_bf16(first.0));
            let second = _mm512_and_si512(round_bf16(second.0), _mm512_set1_epi32(UPPER_HALF));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(first, second));
        }
    }
}

impl Vector<f16> for F32x16 {
    const N: usize = 16;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f16) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512F, by the caller.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f16) {
        // SAFETY: 16 elements at `to`, and AVX-512F, by the caller.
        unsafe {
            _mm256_storeu_si256(
                to.cast(),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512F, by the caller.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            let first = _mm512_cvtepi32_epi16(words);
            let second = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(words));
            (Self(_mm512_cvtph_ps(first)), Self(_mm512_cvtph_ps(second)))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, to: *mut f16) {
        // SAFETY: 32 elements at `to`, and AVX-512F, by the caller.
        unsafe {
            let widen =
                |v: Self| _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0));
            let words = _mm512_or_si512(widen(first), _mm512_slli_epi32::<16>(widen(second)));
            _mm512_storeu_si512(to.cast(), words);
        }
    }
}
