//! Eight f32 in an AVX2 register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::kernels::portable::Portable;
use crate::kernels::vector::{Instructions, Kernel, Memory, Register};

/// Eight f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct F32x8(pub(super) __m256);

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is
/// undefined.
#[inline(always)]
unsafe fn round_bf16(values: __m256) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let bits = _mm256_castps_si256(values);
        debug_assert!(is_kept(values), "a NaN that rounding may carry to zero");
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)))
    }
}

/// True if no NaN has bits in the lower half of its word, as [`Memory::store`] demands.
#[inline(always)]
unsafe fn is_kept(values: __m256) -> bool {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        let lower = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0xffff));
        _mm256_testz_si256(nan, lower) != 0
    }
}

/// bf16 of the first, then of the second.
#[inline(always)]
unsafe fn pack_bf16(first: __m256, second: __m256) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let first = _mm256_srli_epi32::<16>(round_bf16(first));
        let second = _mm256_srli_epi32::<16>(round_bf16(second));
        // Packing works within 128 bits; the permutation restores the order of the quarters.
        let packed = _mm256_packus_epi32(first, second);
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

/// Packs the lower halves of eight words, each at most 0xffff, into 128 bits.
#[inline(always)]
unsafe fn pack_low(words: __m256i) -> __m128i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let packed = _mm256_packus_epi32(words, words);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b00_00_10_00>(packed))
    }
}

/// Writes 256 bits, bypassing the caches if `STREAM`.
///
/// # Safety
/// `to` is valid for writes of 32 bytes, aligned to 32 if `STREAM`; the processor has AVX2; a fence
/// precedes reads by another thread.
#[inline(always)]
pub(super) unsafe fn put<const STREAM: bool>(to: *mut __m256i, bits: __m256i) {
    debug_assert!(!STREAM || to.is_aligned());
    // SAFETY: the caller guarantees 32 writable bytes, aligned where that is needed, and AVX2.
    unsafe {
        if STREAM {
            _mm256_stream_si256(to, bits);
        } else {
            _mm256_storeu_si256(to, bits);
        }
    }
}

/// Writes 128 bits, bypassing the caches if `STREAM`.
///
/// # Safety
/// `to` is valid for writes of 16 bytes, aligned to 16 if `STREAM`; a fence precedes reads by
/// another thread.
#[inline(always)]
unsafe fn put_half<const STREAM: bool>(to: *mut __m128i, bits: __m128i) {
    debug_assert!(!STREAM || to.is_aligned());
    // SAFETY: the caller guarantees 16 writable bytes, aligned where that is needed.
    unsafe {
        if STREAM {
            _mm_stream_si128(to, bits);
        } else {
            _mm_storeu_si128(to, bits);
        }
    }
}

/// Of each register, the sums of every other value, in the order of [`Register::total`].
#[inline(always)]
unsafe fn two_sums(a: __m256, b: __m256) -> __m128 {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let b = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps::<1>(b));
        _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a))
    }
}

impl Register for F32x8 {
    type Value = f32;
    const N: usize = 8;
    const STREAMS: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 readable values.
        Self(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 writable values.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let low = _mm256_unpacklo_ps(first.0, second.0);
            let high = _mm256_unpackhi_ps(first.0, second.0);
            let first = _mm256_permute2f128_ps::<0x20>(low, high);
            [Self(first), Self(_mm256_permute2f128_ps::<0x31>(low, high))]
        }
    }
    #[inline(always)]
    unsafe fn swap(self) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_permute_ps::<0b10_11_00_01>(self.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let upper = _mm256_extractf128_ps::<1>(self.0);
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), upper);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn totals([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller guarantees AVX2, and the array has room for four values.
        unsafe {
            let (ab, cd) = (two_sums(a.0, b.0), two_sums(c.0, d.0));
            let first = _mm_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let second = _mm_shuffle_ps::<0b11_01_11_01>(ab, cd);
            let mut totals = [0.0; 4];
            _mm_storeu_ps(totals.as_mut_ptr(), _mm_add_ps(first, second));
            totals
        }
    }
    #[inline(always)]
    unsafe fn signs(negative: bool) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_set1_ps(if negative { -0.0 } else { 0.0 }) })
    }
    #[inline(always)]
    unsafe fn flip(self, signs: Self) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_xor_ps(self.0, signs.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX2.
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller guarantees FMA.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    fn prefetch<const NEAR: bool, T>(from: *const T) {
        // SAFETY: every x86-64 processor has SSE; the instruction is a hint, valid of any address.
        unsafe {
            if NEAR {
                _mm_prefetch::<_MM_HINT_T0>(from.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T1>(from.cast());
            }
        }
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() }
    }
}

/// AVX2, FMA and F16C.
pub(in crate::kernels) struct Avx2;

impl Avx2 {
    /// True if the processor has the instructions.
    pub(in crate::kernels) fn is_available() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
}

impl Instructions for Avx2 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn run<K: Kernel>(args: K::Args<'_>) {
        // SAFETY: the caller guarantees the instructions, and what the kernel demands.
        unsafe { K::run(args) }
    }
}

impl Memory<f32> for Avx2 {
    type Register = F32x8;
    const SWAPS: bool = true;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> F32x8 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 readable elements.
        F32x8(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x8, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 writable elements.
        unsafe { put::<STREAM>(to.cast(), _mm256_castps_si256(x.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> [F32x8; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 16 readable elements.
        unsafe {
            // Shuffles work within 128 bits: each half of a register receives the inputs of its
            // half of the results.
            let a = _mm256_set_m128(_mm_loadu_ps(from.add(8)), _mm_loadu_ps(from));
            let b = _mm256_set_m128(_mm_loadu_ps(from.add(12)), _mm_loadu_ps(from.add(4)));
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
            [F32x8(even), F32x8(odd)]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x8; 2], to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 16 writable elements.
        unsafe {
            let [low, high] = Register::zip(first, second);
            Self::store::<STREAM>(low, to);
            Self::store::<STREAM>(high, to.add(8));
        }
    }
}

impl Memory<bf16> for Avx2 {
    type Register = F32x8;
    const DOUBLES: bool = true;
    const UNZIPS: bool = true;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> F32x8 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 readable elements.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x8, to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 8 writable elements.
        unsafe {
            let words = _mm256_srli_epi32::<16>(round_bf16(x.0));
            put_half::<STREAM>(to.cast(), pack_low(words));
        }
    }
    #[inline(always)]
    unsafe fn store_both<const STREAM: bool>([a, b]: [F32x8; 2], to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 16 writable elements, aligned for a whole register
        // if `STREAM`.
        unsafe { put::<STREAM>(to.cast(), pack_bf16(a.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn load_double(from: *const bf16) -> [F32x8; 2] {
        // SAFETY: the caller guarantees AVX2 and 16 readable elements. As of pairs: the elements
        // at even indices, then those at odd ones.
        unsafe { Self::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn load_coefficients_double(from: *const f32) -> [F32x8; 2] {
        // SAFETY: the caller guarantees AVX2 and 16 readable values. Values at even indices, then
        // those at odd ones, as `load_double`.
        unsafe { <Self as Memory<f32>>::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>([a, b]: [[F32x8; 2]; 2], to: [*mut bf16; 2]) {
        // SAFETY: the caller guarantees AVX2 and 16 writable elements at each destination, aligned
        // for whole registers if `STREAM`.
        unsafe {
            Self::store_pairs::<STREAM>(a, to[0]);
            Self::store_pairs::<STREAM>(b, to[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [F32x8; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 16 readable elements. A pair is one little-endian
        // word whose halves are the upper halves of two f32.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            let first = _mm256_slli_epi32::<16>(words);
            let second = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            [
                F32x8(_mm256_castsi256_ps(first)),
                F32x8(_mm256_castsi256_ps(second)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x8; 2], to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and 16 writable elements, aligned for a whole register
        // if `STREAM`.
        unsafe {
            let first = _mm256_srli_epi32::<16>(round_bf16(first.0));
            let both = _mm256_blend_epi16::<0b1010_1010>(first, round_bf16(second.0));
            put::<STREAM>(to.cast(), both);
        }
    }
}

impl Memory<f16> for Avx2 {
    type Register = F32x8;
    const SWAPS: bool = true;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const f16) -> F32x8 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees F16C and 8 readable elements.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x8, to: *mut f16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees F16C and 8 writable elements.
        unsafe { put_half::<STREAM>(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> [F32x8; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX2 and F16C and 16 readable elements.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            let first = pack_low(_mm256_and_si256(words, _mm256_set1_epi32(0xffff)));
            let second = pack_low(_mm256_srli_epi32::<16>(words));
            [
                F32x8(_mm256_cvtph_ps(first)),
                F32x8(_mm256_cvtph_ps(second)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x8; 2], to: *mut f16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX2 and F16C and 16 writable elements.
        unsafe {
            let first = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(first.0);
            let second = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(second.0);
            put_half::<STREAM>(to.cast(), _mm_unpacklo_epi16(first, second));
            put_half::<STREAM>(to.add(8).cast(), _mm_unpackhi_epi16(first, second));
        }
    }
}
