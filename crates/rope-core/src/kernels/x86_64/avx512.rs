//! Sixteen f32 in an AVX-512 register.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::cold_path;
use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16};

use super::avx2::{Avx2, F32x8, put as put_half};
use crate::kernels::vector::{Instructions, Kernel, Memory, Register};

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct F32x16(__m512);

/// AVX-512 F, BW and DQ, AVX2, FMA and F16C; and AVX-512's conversions to bf16 if [`CONVERTS_BF16`]
/// is set.
pub(in crate::kernels) struct Avx512;

/// True if the processor has AVX-512's conversions to bf16. A branch at run time, since separate
/// kernels would be compiled twice.
static CONVERTS_BF16: AtomicBool = AtomicBool::new(false);

impl Avx512 {
    /// True if the processor has the instructions. Called before any kernel runs with them.
    pub(in crate::kernels) fn is_available() -> bool {
        let available = Avx2::is_available()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq");
        let converts = available && is_x86_feature_detected!("avx512bf16");
        CONVERTS_BF16.store(converts, Ordering::Relaxed);
        available
    }
}

impl Instructions for Avx512 {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn run<K: Kernel>(args: K::Args<'_>) {
        // SAFETY: the caller guarantees the instructions, and what the kernel demands.
        unsafe { K::run(args) }
    }
}

/// Rounds each f32 to bf16, nearest even, in the upper half of its word; the lower half is
/// undefined.
#[inline(always)]
unsafe fn round_bf16(values: __m512) -> __m512i {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
    }
}

/// Rounds two times two registers and writes each two interleaved.
///
/// # Safety
/// Both destinations are valid for writes of 32 elements, aligned to 64 bytes if `STREAM`; the
/// processor has AVX-512.
#[inline(always)]
unsafe fn store_zipped<const STREAM: bool>(x: [[F32x16; 2]; 2], to: [*mut bf16; 2]) {
    debug_assert!(to.iter().all(|to| to.is_aligned()));
    let [[a, b], [c, d]] = x;
    // SAFETY: the caller guarantees the instructions and 32 writable elements at each destination,
    // aligned for whole registers if `STREAM`.
    unsafe {
        if CONVERTS_BF16.load(Ordering::Relaxed) {
            let (first, second) = (narrow(a.0, b.0), narrow(c.0, d.0));
            if !any_zero(first, second) {
                put::<STREAM>(to[0].cast(), _mm512_permutexvar_epi16(zip(), first));
                put::<STREAM>(to[1].cast(), _mm512_permutexvar_epi16(zip(), second));
                return;
            }
            cold_path();
        }
        Avx512::store_pairs::<STREAM>(x[0], to[0]);
        Avx512::store_pairs::<STREAM>(x[1], to[1]);
    }
}

const UPPER_HALF: i32 = 0xffff_0000_u32.cast_signed();

/// Writes 512 bits, bypassing the caches if `STREAM`.
///
/// # Safety
/// `to` is valid for writes of 64 bytes, aligned to 64 if `STREAM`; the processor has AVX-512; a
/// fence precedes reads by another thread.
#[inline(always)]
unsafe fn put<const STREAM: bool>(to: *mut __m512i, bits: __m512i) {
    debug_assert!(!STREAM || to.is_aligned());
    // SAFETY: the caller guarantees 64 writable bytes, aligned where that is needed, and AVX-512.
    unsafe {
        if STREAM {
            _mm512_stream_si512(to, bits);
        } else {
            _mm512_storeu_si512(to, bits);
        }
    }
}

impl Register for F32x16 {
    type Value = f32;
    const N: usize = 16;
    const STREAMS: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 readable values.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 writable values.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
        // SAFETY: the caller guarantees AVX-512.
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
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_permute_ps::<0b10_11_00_01>(self.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller guarantees AVX-512 DQ and AVX2.
        unsafe {
            let upper = _mm512_extractf32x8_ps::<1>(self.0);
            F32x8(_mm256_add_ps(_mm512_castps512_ps256(self.0), upper)).total()
        }
    }
    #[inline(always)]
    unsafe fn totals([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller guarantees AVX-512, and the array has room for four values.
        unsafe {
            // Lanes of four values: two a register, then one, the sums of halves each time.
            let ab = add_halves::<0b01_00_01_00, 0b11_10_11_10>(a.0, b.0);
            let cd = add_halves::<0b01_00_01_00, 0b11_10_11_10>(c.0, d.0);
            let fours = add_halves::<0b10_00_10_00, 0b11_01_11_01>(ab, cd);
            let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0b01_00_11_10>(fours));
            let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b10_11_00_01>(twos));
            let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut totals = [0.0; 4];
            let four = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, ones));
            _mm_storeu_ps(totals.as_mut_ptr(), four);
            totals
        }
    }
    #[inline(always)]
    unsafe fn signs(negative: bool) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_set1_ps(if negative { -0.0 } else { 0.0 }) })
    }
    #[inline(always)]
    unsafe fn flip(self, signs: Self) -> Self {
        // SAFETY: the caller guarantees AVX-512 DQ.
        Self(unsafe { _mm512_xor_ps(self.0, signs.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller guarantees AVX-512.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    fn prefetch<const NEAR: bool, T>(from: *const T) {
        F32x8::prefetch::<NEAR, T>(from);
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() }
    }
}

/// The lanes of both that `LOWER` selects, plus those that `UPPER` does.
#[inline(always)]
unsafe fn add_halves<const LOWER: i32, const UPPER: i32>(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<LOWER>(a, b),
            _mm512_shuffle_f32x4::<UPPER>(a, b),
        )
    }
}

impl Memory<f32> for Avx512 {
    type Register = F32x16;
    const SWAPS: bool = true;
    type Narrower = Avx2;
    type Wide = Avx512;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> F32x16 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 readable elements.
        F32x16(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x16, to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 writable elements.
        unsafe { put::<STREAM>(to.cast(), _mm512_castps_si512(x.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> [F32x16; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 readable elements.
        unsafe {
            let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            [
                F32x16(_mm512_permutex2var_ps(a, even, b)),
                F32x16(_mm512_permutex2var_ps(a, odd, b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x16; 2], to: *mut f32) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 writable elements.
        unsafe {
            let [low, high] = Register::zip(first, second);
            Self::store::<STREAM>(low, to);
            Self::store::<STREAM>(high, to.add(16));
        }
    }
}

impl Memory<bf16> for Avx512 {
    type Register = F32x16;
    const DOUBLES: bool = true;
    const UNZIPS: bool = true;
    type Narrower = Avx2;
    type Wide = Avx512;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> F32x16 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 readable elements.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x16, to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 writable elements.
        unsafe {
            let words = _mm512_srli_epi32::<16>(round_bf16(x.0));
            put_half::<STREAM>(to.cast(), _mm512_cvtepi32_epi16(words));
        }
    }
    #[inline(always)]
    unsafe fn store_both<const STREAM: bool>([low, high]: [F32x16; 2], to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees the instructions and 32 writable elements.
        unsafe {
            if CONVERTS_BF16.load(Ordering::Relaxed) {
                let both = narrow(low.0, high.0);
                if !any_zero(both, both) {
                    return put::<STREAM>(to.cast(), both);
                }
            }
            Self::store::<STREAM>(low, to);
            Self::store::<STREAM>(high, to.add(16));
        }
    }
    #[inline(always)]
    unsafe fn load_double(from: *const bf16) -> [F32x16; 2] {
        // SAFETY: the caller guarantees AVX-512 and 32 readable elements. As of pairs: the elements
        // at even indices, then those at odd ones.
        unsafe { Self::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn load_coefficients_double(from: *const f32) -> [F32x16; 2] {
        // SAFETY: the caller guarantees AVX-512 and 32 readable values. Values at even indices,
        // then those at odd ones, as `load_double`.
        unsafe { <Self as Memory<f32>>::load_pairs(from) }
    }
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>(x: [[F32x16; 2]; 2], to: [*mut bf16; 2]) {
        // SAFETY: the caller guarantees the instructions and 32 writable elements at each
        // destination, aligned for whole registers if `STREAM`.
        unsafe { store_zipped::<STREAM>(x, to) }
    }
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(x: [[F32x16; 2]; 2], to: *mut bf16) {
        // SAFETY: the caller guarantees the instructions and 64 writable elements, aligned for
        // whole registers if `STREAM`: the second 32 follow the first.
        unsafe { store_zipped::<STREAM>(x, [to, to.add(32)]) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [F32x16; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 readable elements. A pair is one
        // little-endian word whose halves are the upper halves of two f32.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            let first = _mm512_slli_epi32::<16>(words);
            let second = _mm512_and_si512(words, _mm512_set1_epi32(UPPER_HALF));
            [
                F32x16(_mm512_castsi512_ps(first)),
                F32x16(_mm512_castsi512_ps(second)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x16; 2], to: *mut bf16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 writable elements.
        unsafe {
            let first = _mm512_srli_epi32::<16>(round_bf16(first.0));
            let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, first, round_bf16(second.0));
            put::<STREAM>(to.cast(), both);
        }
    }
}

impl Memory<f16> for Avx512 {
    type Register = F32x16;
    const SWAPS: bool = true;
    const KEEPS_WIDE: bool = true;
    type Narrower = Avx2;
    type Wide = Avx512;

    #[inline(always)]
    unsafe fn load(from: *const f16) -> F32x16 {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 readable elements.
        F32x16(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: F32x16, to: *mut f16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 16 writable elements.
        unsafe { put_half::<STREAM>(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f16) -> [F32x16; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 readable elements.
        unsafe {
            let apart = _mm512_permutexvar_epi16(unzip(), _mm512_loadu_si512(from.cast()));
            let first = _mm512_castsi512_si256(apart);
            let second = _mm512_extracti64x4_epi64::<1>(apart);
            [
                F32x16(_mm512_cvtph_ps(first)),
                F32x16(_mm512_cvtph_ps(second)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>([first, second]: [F32x16; 2], to: *mut f16) {
        debug_assert!(to.is_aligned());
        // SAFETY: the caller guarantees AVX-512 and 32 writable elements.
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
    // SAFETY: the array is 64 bytes long, and the caller guarantees AVX-512.
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
    // SAFETY: the array is 64 bytes long, and the caller guarantees AVX-512.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// True if any element is zero, so that conversion may have flushed a subnormal number. True zeros
/// are as rare, and rounding them again does no harm.
#[inline(always)]
unsafe fn any_zero(first: __m512i, second: __m512i) -> bool {
    // Hides the mask from the compiler, which would recognise "all bits but the sign" as the
    // absolute value of bf16 and compile that element by element.
    let mut magnitude = i32::from(i16::MAX);
    // SAFETY: the assembly is a comment: no instruction.
    unsafe {
        asm!("/* {0:e} */", inout(reg) magnitude, options(pure, nomem, nostack, preserves_flags));
    }
    // SAFETY: the caller guarantees AVX-512 BW.
    unsafe {
        let magnitude = _mm512_set1_epi16(magnitude as i16);
        let first = _mm512_testn_epi16_mask(first, magnitude);
        let second = _mm512_testn_epi16_mask(second, magnitude);
        first | second != 0
    }
}

/// bf16 of the first, then of the second, rounded to nearest even as by our code, except that
/// subnormal numbers become zero. Our code converts registers with any zero in the result.
///
/// # Safety
/// The processor has AVX-512 F, and [`CONVERTS_BF16`] is set.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn narrow(first: __m512, second: __m512) -> __m512i {
    let both: __m512i;
    // SAFETY: the caller guarantees the instruction, VCVTNE2PS2BF16, which reads and writes
    // registers alone. As assembly, since the code around it is compiled for processors without it.
    unsafe {
        asm!(
            "vcvtne2ps2bf16 {both}, {second}, {first}",
            both = lateout(zmm_reg) both,
            first = in(zmm_reg) first,
            second = in(zmm_reg) second,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    both
}
