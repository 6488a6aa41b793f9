//! Sixteen f32 in an AVX-512 register.

use core::arch::asm;
use core::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::{F32x8, put as put_half};
use crate::kernels::vector::Vector;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct F32x16(__m512);

/// Sixteen f32, on a processor that converts to bf16 itself.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct WithBf16(__m512);

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is left over.
#[inline(always)]
unsafe fn round_bf16(values: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        // Rounding could carry a NaN to infinity: set its quiet bit instead.
        let bits = _mm512_castps_si512(values);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        let quiet = _mm512_set1_epi32(0x0040_0000);
        _mm512_mask_or_epi32(round_number_bf16(values), nan, bits, quiet)
    }
}

/// [`round_bf16`] of values among which there is no NaN.
#[inline(always)]
unsafe fn round_number_bf16(values: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
    }
}

/// Whether a NaN is among the values.
#[inline(always)]
unsafe fn any_nan(values: [(F32x16, F32x16); 2]) -> bool {
    let [(a, b), (c, d)] = values;
    // SAFETY: the caller has AVX-512.
    unsafe {
        let first = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a.0, b.0);
        let second = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(c.0, d.0);
        first | second != 0
    }
}

/// Rounds two times two vectors and writes each two side by side, without the conversions of BF16.
///
/// # Safety
/// 32 elements at each place, and AVX-512.
#[inline(always)]
unsafe fn round_zipped<const STREAM: bool>(values: [(F32x16, F32x16); 2], to: [*mut bf16; 2]) {
    let [(a, b), (c, d)] = values;
    // SAFETY: by the caller.
    unsafe {
        if any_nan(values) {
            Vector::<bf16>::store_pairs::<STREAM>(a, b, to[0]);
            Vector::<bf16>::store_pairs::<STREAM>(c, d, to[1]);
            return;
        }
        put::<STREAM>(to[0].cast(), zip_bf16(a.0, b.0));
        put::<STREAM>(to[1].cast(), zip_bf16(c.0, d.0));
    }
}

/// bf16 of the first beside those of the second; no NaN among them.
#[inline(always)]
unsafe fn zip_bf16(first: __m512, second: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512 BW.
    unsafe {
        let first = _mm512_srli_epi32::<16>(round_number_bf16(first));
        _mm512_mask_blend_epi16(0xaaaa_aaaa, first, round_number_bf16(second))
    }
}

const UPPER_HALF: i32 = 0xffff_0000_u32.cast_signed();

/// Writes 512 bits, past the caches if asked to.
///
/// # Safety
/// 64 bytes at `to`, aligned to 64 if `STREAM`; AVX-512; then a fence before another thread reads them.
#[inline(always)]
unsafe fn put<const STREAM: bool>(to: *mut __m512i, bits: __m512i) {
    // SAFETY: by the caller.
    unsafe {
        if STREAM {
            _mm512_stream_si512(to, bits);
        } else {
            _mm512_storeu_si512(to, bits);
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
            // SAFETY: N values at `from`, and AVX-512, by the caller.
            Self(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
            // SAFETY: the caller has AVX-512.
            unsafe {
                let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                let high =
                    _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
                let low = _mm512_permutex2var_ps(first.0, low, second.0);
                [
                    Self(low),
                    Self(_mm512_permutex2var_ps(first.0, high, second.0)),
                ]
            }
        }
        #[inline(always)]
        unsafe fn swap(self) -> Self {
            // SAFETY: the caller has AVX-512.
            Self(unsafe { _mm512_permute_ps::<0b10_11_00_01>(self.0) })
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512.
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn signs(negative: bool) -> Self {
            // SAFETY: the caller has AVX-512.
            Self(unsafe { _mm512_set1_ps(if negative { -0.0 } else { 0.0 }) })
        }
        #[inline(always)]
        unsafe fn flip(self, signs: Self) -> Self {
            // SAFETY: the caller has AVX-512 DQ.
            Self(unsafe { _mm512_xor_ps(self.0, signs.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller has AVX-512.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
    };
}

impl Vector<f32> for F32x16 {
    const N: usize = 16;
    const SWAPS: bool = true;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512, by the caller.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f32) {
        // SAFETY: 16 elements at `to`, and AVX-512, by the caller.
        unsafe { put::<STREAM>(to.cast(), _mm512_castps_si512(self.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512, by the caller.
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
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f32) {
        // SAFETY: 32 elements at `to`, and AVX-512, by the caller.
        unsafe {
            let [low, high] = <Self as Vector<f32>>::zip(first, second);
            Vector::<f32>::store::<STREAM>(low, to);
            Vector::<f32>::store::<STREAM>(high, to.add(16));
        }
    }
}

impl Vector<bf16> for F32x16 {
    const N: usize = 16;
    const DOUBLES: bool = true;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512, by the caller.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut bf16) {
        // SAFETY: 16 elements at `to`, and AVX-512, by the caller.
        unsafe {
            let words = _mm512_srli_epi32::<16>(round_bf16(self.0));
            put_half::<STREAM>(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn load_double(from: *const bf16) -> [Self; 2] {
        // SAFETY: 32 elements at `from`, and AVX-512, by the caller. As of pairs: even elements, then odd ones.
        let (even, odd) = unsafe { <Self as Vector<bf16>>::load_pairs(from) };
        [even, odd]
    }
    #[inline(always)]
    unsafe fn load_acc_double(from: *const f32) -> [Self; 2] {
        // SAFETY: 32 values at `from`, and AVX-512, by the caller.
        let (even, odd) = unsafe { <F32x16 as Vector<f32>>::load_pairs(from) };
        [Self(even.0), Self(odd.0)]
    }
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>(values: [[Self; 2]; 2], to: [*mut bf16; 2]) {
        let [[a, b], [c, d]] = values;
        // SAFETY: 32 elements at each place, and AVX-512, by the caller.
        unsafe { round_zipped::<STREAM>([(a, b), (c, d)], to) }
    }
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(values: [(Self, Self); 2], to: *mut bf16) {
        // SAFETY: 64 elements at `to`, and AVX-512, by the caller.
        unsafe { round_zipped::<STREAM>(values, [to, to.add(32)]) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512, by the caller. A pair is one little-endian word whose
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
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut bf16) {
        // SAFETY: 32 elements at `to`, and AVX-512, by the caller.
        unsafe {
            let first = _mm512_srli_epi32::<16>(round_bf16(first.0));
            let second = _mm512_and_si512(round_bf16(second.0), _mm512_set1_epi32(UPPER_HALF));
            put::<STREAM>(to.cast(), _mm512_or_si512(first, second));
        }
    }
}

impl Vector<f16> for F32x16 {
    const N: usize = 16;
    const SWAPS: bool = true;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const f16) -> Self {
        // SAFETY: 16 elements at `from`, and AVX-512, by the caller.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut f16) {
        // SAFETY: 16 elements at `to`, and AVX-512, by the caller.
        unsafe {
            put_half::<STREAM>(
                to.cast(),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> (Self, Self) {
        // SAFETY: 32 elements at `from`, and AVX-512, by the caller.
        unsafe {
            let apart = _mm512_permutexvar_epi16(unzip(), _mm512_loadu_si512(from.cast()));
            let first = _mm512_castsi512_si256(apart);
            let second = _mm512_extracti64x4_epi64::<1>(apart);
            (Self(_mm512_cvtph_ps(first)), Self(_mm512_cvtph_ps(second)))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut f16) {
        // SAFETY: 32 elements at `to`, and AVX-512, by the caller.
        unsafe {
            let first = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(first.0);
            let second = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(second.0);
            let apart = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            put::<STREAM>(to.cast(), _mm512_permutexvar_epi16(zip(), apart));
        }
    }
}

/// Brings the 32 halves of 16 pairs apart: first members, then second ones.
#[inline(always)]
unsafe fn unzip() -> __m512i {
    const ORDER: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 16 {
            order[i] = 2 * i as u16;
            order[16 + i] = 2 * i as u16 + 1;
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes are read, and the caller has AVX-512.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// Brings first members, then second ones, side by side.
#[inline(always)]
unsafe fn zip() -> __m512i {
    const ORDER: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 16 {
            order[2 * i] = i as u16;
            order[2 * i + 1] = 16 + i as u16;
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes are read, and the caller has AVX-512.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// The processor's conversion rounds to nearest even and keeps NaN quiet, as ours does, but takes subnormal numbers for
/// zero: vectors in which something came out as zero are left to ours.
impl Vector<bf16> for WithBf16 {
    const N: usize = 16;
    const DOUBLES: bool = true;
    type Narrower = F32x8;
    arithmetic!();

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: as there.
        Self(unsafe { <F32x16 as Vector<bf16>>::load(from) }.0)
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut bf16) {
        // SAFETY: as there.
        unsafe { Vector::<bf16>::store::<STREAM>(F32x16(self.0), to) }
    }
    #[inline(always)]
    unsafe fn load_double(from: *const bf16) -> [Self; 2] {
        // SAFETY: 32 elements at `from`, and AVX-512, by the caller. As of pairs: even elements, then odd ones.
        let (even, odd) = unsafe { <Self as Vector<bf16>>::load_pairs(from) };
        [even, odd]
    }
    #[inline(always)]
    unsafe fn load_acc_double(from: *const f32) -> [Self; 2] {
        // SAFETY: 32 values at `from`, and AVX-512, by the caller.
        let (even, odd) = unsafe { <F32x16 as Vector<f32>>::load_pairs(from) };
        [Self(even.0), Self(odd.0)]
    }
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>(values: [[Self; 2]; 2], to: [*mut bf16; 2]) {
        let [[a, b], [c, d]] = values;
        // SAFETY: 32 elements at each place, and AVX-512 with BF16, by the caller.
        unsafe { store_zipped::<STREAM>([(a, b), (c, d)], to) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> (Self, Self) {
        // SAFETY: as there.
        let (first, second) = unsafe { <F32x16 as Vector<bf16>>::load_pairs(from) };
        (Self(first.0), Self(second.0))
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut bf16) {
        // SAFETY: as there.
        unsafe { Vector::<bf16>::store_pairs::<STREAM>(F32x16(first.0), F32x16(second.0), to) }
    }
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(values: [(Self, Self); 2], to: *mut bf16) {
        // SAFETY: 64 elements at `to`, and AVX-512 with BF16, by the caller.
        unsafe { store_zipped::<STREAM>(values, [to, to.add(32)]) }
    }
}

/// Rounds two times two vectors and writes each two side by side.
///
/// # Safety
/// 32 elements at each place, and AVX-512 with BF16.
#[inline(always)]
unsafe fn store_zipped<const STREAM: bool>(values: [(WithBf16, WithBf16); 2], to: [*mut bf16; 2]) {
    let [(a, b), (c, d)] = values;
    // SAFETY: by the caller.
    unsafe {
        let (first, second) = (narrow(a.0, b.0), narrow(c.0, d.0));
        if any_zero(first, second) {
            Vector::<bf16>::store_pairs::<STREAM>(F32x16(a.0), F32x16(b.0), to[0]);
            Vector::<bf16>::store_pairs::<STREAM>(F32x16(c.0), F32x16(d.0), to[1]);
            return;
        }
        put::<STREAM>(to[0].cast(), _mm512_permutexvar_epi16(zip(), first));
        put::<STREAM>(to[1].cast(), _mm512_permutexvar_epi16(zip(), second));
    }
}

/// Whether conversion may have taken a subnormal number for zero: if any element came out as zero. A true zero is as
/// rare, and is worth a second look.
#[inline(always)]
unsafe fn any_zero(first: __m512i, second: __m512i) -> bool {
    // The compiler is not to know the mask: it would take all bits but the sign for an absolute value of bf16, which it
    // compiles element by element.
    let mut magnitude = i32::from(i16::MAX);
    // SAFETY: there is no instruction in it.
    unsafe {
        asm!("/* {0:e} */", inout(reg) magnitude, options(pure, nomem, nostack, preserves_flags));
    }
    // SAFETY: the caller has AVX-512 BW.
    unsafe {
        let magnitude = _mm512_set1_epi16(magnitude as i16);
        let first = _mm512_testn_epi16_mask(first, magnitude);
        let second = _mm512_testn_epi16_mask(second, magnitude);
        first | second != 0
    }
}

/// bf16 of the first, then of the second.
#[inline(always)]
unsafe fn narrow(first: __m512, second: __m512) -> __m512i {
    // SAFETY: the caller has AVX-512 BF16. Both types are 64 bytes of plain numbers.
    unsafe { core::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) }
}
