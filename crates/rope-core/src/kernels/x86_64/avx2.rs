//! Eight f32 in an AVX2 register.

use core::arch::x86_64::*;

use half::{bf16, f16};

use crate::kernels::portable::Array;
use crate::kernels::vector::Vector;

/// Eight f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct F32x8(__m256);

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is left over.
#[inline(always)]
unsafe fn round_bf16(values: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        // Rounding could carry a NaN to infinity: set its quiet bit instead.
        let bits = _mm256_castps_si256(values);
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_blendv_epi8(round_number_bf16(values), quiet, nan)
    }
}

/// [`round_bf16`] of values among which there is no NaN.
#[inline(always)]
unsafe fn round_number_bf16(values: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
    }
}

/// bf16 of the first, then of the second; no NaN among them.
#[inline(always)]
unsafe fn pack_bf16(first: __m256, second: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let first = _mm256_srli_epi32::<16>(round_number_bf16(first));
        let second = _mm256_srli_epi32::<16>(round_number_bf16(second));
        // Packing works within 128 bits: bring the quarters in order.
        let packed = _mm256_packus_epi32(first, second);
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

/// bf16 of the first beside those of the second; no NaN among them.
#[inline(always)]
unsafe fn zip_bf16(first: __m256, second: __m256) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let first = _mm256_srli_epi32::<16>(round_number_bf16(first));
        _mm256_blend_epi16::<0b1010_1010>(first, round_number_bf16(second))
    }
}

/// Whether a NaN is among the values.
#[inline(always)]
unsafe fn any_nan(values: [__m256; 4]) -> bool {
    let [a, b, c, d] = values;
    // SAFETY: the caller has AVX2.
    unsafe {
        let first = _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b);
        let second = _mm256_cmp_ps::<_CMP_UNORD_Q>(c, d);
        _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0
    }
}

/// Packs the lower halves of eight words, each at most 0xffff, into 128 bits.
#[inline(always)]
unsafe fn pack_low(words: __m256i) -> __m128i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let packed = _mm256_packus_epi32(words, words);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b00_00_10_00>(packed))
    }
}

/// Writes 256 bits, past the caches if asked to.
///
/// # Safety
/// 32 bytes at `to`, aligned to 32 if `STREAM`; AVX2; then a fence before another thread reads them.
#[inline(always)]
pub(super) unsafe fn put<const STREAM: bool>(to: *mut __m256i, bits: __m256i) {
    // SAFETY: by the caller.
    unsafe {
        if STREAM {
            _mm256_stream_si256(to, bits);
        } else {
            _mm256_storeu_si256(to, bits);
        }
    }
}

/// Writes 128 bits, likewise.
///
/// # Safety
/// As [`put`], of 16 bytes.
#[inline(always)]
unsafe fn put_half<const STREAM: bool>(to: *mut __m128i, bits: __m128i) {
    // SAFETY: by the caller.
    unsafe {
        if STREAM {
            _mm_stream_si128(to, bits);
        } else {
            _mm_storeu_si128(to, bits);
        }
    }
}

macro_rules! arithmetic {
    () => {
        const STREAMS: bool = true;

        #[inline(always)]
        unsafe fn fence() {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { _mm_sfence() }
        }
        #[inline(always)]
        unsafe fn load_acc(from: *const f32) -> Self {
            // SAFETY: N values at `from`, and AVX2, by the caller.
            Self(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
            // SAFETY: the caller has AVX2.
            unsafe {
                let low = _mm256_unpacklo_ps(first.0, second.0);
                let high = _mm256_unpackhi_ps(first.0, second.0);
                let first = _mm256_permute2f128_ps::<0x20>(low, high);
                [Self(first), Self(_mm256_permute2f128_ps::<0x31>(low, high))]
            }
        }
        #[inline(always)]
        unsafe fn swap(self) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_permute_ps::<0b10_11_00_01>(self.0) })
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn signs(negative: bool) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_set1_ps(if negative { -0.0 } else { 0.0 }) })
        }
        #[inline(always)]
        unsafe fn flip(self, signs: Self) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_xor_ps(self.0, signs.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller has AVX2.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
    };
}

impl Vector<f32> for F32x8 {
    const N: usize = 8;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: 8 elements at `from`, and AVX2, by the caller.
        Self(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f32) {
        // SAFETY: 8 elements at `to`, and AVX2, by the caller.
        unsafe { put::<STREAM>(to.cast(), _mm256_castps_si256(self.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: 16 elements at `from`, and AVX2, by the caller.
        unsafe {
            let (a, b) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)));
            // Shuffles work within 128 bits: collect there, then bring the quarters in order.
            let in_order =
                |v| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
            let even = in_order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
            let odd = in_order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
            (Self(even), Self(odd))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f32) {
        // SAFETY: 16 elements at `to`, and AVX2, by the caller.
        unsafe {
            let [low, high] = <Self as Vector<f32>>::zip(first, second);
            Vector::<f32>::store::<STREAM>(low, to);
            Vector::<f32>::store::<STREAM>(high, to.add(8));
        }
    }
}

impl Vector<bf16> for F32x8 {
    const N: usize = 8;
    const DOUBLES: bool = true;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: 8 elements at `from`, and AVX2, by the caller.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut bf16) {
        // SAFETY: 8 elements at `to`, and AVX2, by the caller.
        unsafe {
            let words = _mm256_srli_epi32::<16>(round_bf16(self.0));
            put_half::<STREAM>(to.cast(), pack_low(words));
        }
    }
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>(values: [[Self; 2]; 2], to: [*mut bf16; 2]) {
        let [[a, b], [c, d]] = values;
        // SAFETY: 16 elements at each place, and AVX2, by the caller.
        unsafe {
            if any_nan([a.0, b.0, c.0, d.0]) {
                Vector::<bf16>::store::<STREAM>(a, to[0]);
                Vector::<bf16>::store::<STREAM>(b, to[0].add(8));
                Vector::<bf16>::store::<STREAM>(c, to[1]);
                Vector::<bf16>::store::<STREAM>(d, to[1].add(8));
                return;
            }
            put::<STREAM>(to[0].cast(), pack_bf16(a.0, b.0));
            put::<STREAM>(to[1].cast(), pack_bf16(c.0, d.0));
        }
    }
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(values: [(Self, Self); 2], to: *mut bf16) {
        let [(a, b), (c, d)] = values;
        // SAFETY: 32 elements at `to`, and AVX2, by the caller.
        unsafe {
            if any_nan([a.0, b.0, c.0, d.0]) {
                Vector::<bf16>::store_pairs::<STREAM>(a, b, to);
                Vector::<bf16>::store_pairs::<STREAM>(c, d, to.add(16));
                return;
            }
            put::<STREAM>(to.cast(), zip_bf16(a.0, b.0));
            put::<STREAM>(to.add(16).cast(), zip_bf16(c.0, d.0));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: 16 elements at `from`, and AVX2, by the caller. A pair is one little-endian word whose halves
        // are the upper halves of two f32.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            let first = _mm256_slli_epi32::<16>(words);
            let second = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            (
                Self(_mm256_castsi256_ps(first)),
                Self(_mm256_castsi256_ps(second)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut bf16) {
        // SAFETY: 16 elements at `to`, and AVX2, by the caller.
        unsafe {
            let first = _mm256_srli_epi32::<16>(round_bf16(first.0));
            put::<STREAM>(
                to.cast(),
                _mm256_blend_epi16::<0b1010_1010>(first, round_bf16(second.0)),
            );
        }
    }
}

impl Vector<f16> for F32x8 {
    const N: usize = 8;
    type Narrower = Array<f32, 1>;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f16) -> Self {
        // SAFETY: 8 elements at `from`, and F16C, by the caller.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f16) {
        // SAFETY: 8 elements at `to`, and F16C, by the caller.
        unsafe {
            put_half::<STREAM>(
                to.cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> (Self, Self) {
        // SAFETY: 16 elements at `from`, AVX2 and F16C, by the caller.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            let first = pack_low(_mm256_and_si256(words, _mm256_set1_epi32(0xffff)));
            let second = pack_low(_mm256_srli_epi32::<16>(words));
            (Self(_mm256_cvtph_ps(first)), Self(_mm256_cvtph_ps(second)))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f16) {
        // SAFETY: 16 elements at `to`, AVX2 and F16C, by the caller.
        unsafe {
            let first = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(first.0);
            let second = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(second.0);
            put_half::<STREAM>(to.cast(), _mm_unpacklo_epi16(first, second));
            put_half::<STREAM>(to.add(8).cast(), _mm_unpackhi_epi16(first, second));
        }
    }
}
