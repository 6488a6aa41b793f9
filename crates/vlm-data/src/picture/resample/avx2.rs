//! The sums in AVX2: 16-bit products, added in pairs to 32 bits.
//!
//! A weight of PIL has two parts, low + 2^12 high, whose sums are separate and added at the end;
//! integers wrap the same in any order.

#![allow(
    unsafe_code,
    reason = "functions compiled for AVX2 are called where it was detected"
)]

use std::arch::x86_64::*;

use super::{Axis, COLOURS, GROUP, LOW_BITS};

/// Rows that share a load of weights.
const ROWS: usize = 4;
/// Bytes of a row summed at a time.
const BLOCK: usize = 32;

/// Makes a zero of a byte.
const ZERO: u8 = 0x80;
/// Bytes of four pixels of RGB as pairs of 16 bits, taps 0 and 1 in one half of a register, 2 and 3
/// in the other: red 0, red 1, green 0, green 1, blue 0, blue 1, two zeros.
#[rustfmt::skip]
const PAIRS: [[u8; 16]; 2] = [
    [0, ZERO, 3, ZERO, 1, ZERO, 4, ZERO, 2, ZERO, 5, ZERO, ZERO, ZERO, ZERO, ZERO],
    [6, ZERO, 9, ZERO, 7, ZERO, 10, ZERO, 8, ZERO, 11, ZERO, ZERO, ZERO, ZERO, ZERO],
];

/// Resizes rows, or returns `false` if the portable kernel must.
pub(super) fn resize_rows(axis: &Axis, input: &[u8], output: &mut [u8]) -> bool {
    if !is_x86_feature_detected!("avx2") || !axis.taps.is_multiple_of(GROUP) {
        return false;
    }
    // SAFETY: AVX2 was detected.
    unsafe {
        match axis.high.is_empty() {
            true => all_rows::<1>(axis, input, output),
            false => all_rows::<2>(axis, input, output),
        }
    }
    true
}

/// Computes an output row of the vertical resize, or returns `false` if the portable kernel must.
pub(super) fn resize_columns(axis: &Axis, input: &[u8], row: usize, output: &mut [u8]) -> bool {
    if !is_x86_feature_detected!("avx2") || output.len() < BLOCK {
        return false;
    }
    // SAFETY: AVX2 was detected.
    unsafe {
        match axis.high.is_empty() {
            true => columns::<1>(axis, input, row, output),
            false => columns::<2>(axis, input, row, output),
        }
    }
    true
}

#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 16]) -> __m128i {
    let value = u128::from_le_bytes(*bytes);
    _mm_set_epi64x((value >> 64) as i64, value as i64)
}

#[target_feature(enable = "avx2")]
fn store(value: __m128i) -> [u8; 16] {
    let [low, high] = [
        _mm_extract_epi64::<0>(value) as u64,
        _mm_extract_epi64::<1>(value) as u64,
    ];
    (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
}

/// The sum of both parts, rounded to integers.
#[target_feature(enable = "avx2")]
fn finish<const PARTS: usize>(sums: [__m256i; PARTS], half: __m256i, shift: __m128i) -> __m256i {
    let mut sum = _mm256_add_epi32(sums[0], half);
    if PARTS == 2 {
        sum = _mm256_add_epi32(
            sum,
            _mm256_slli_epi32::<{ LOW_BITS as i32 }>(sums[PARTS - 1]),
        );
    }
    _mm256_sra_epi32(sum, shift)
}

/// Sixteen bytes and more of `input` from a row on, for each row of a group.
#[target_feature(enable = "avx2")]
fn all_rows<const PARTS: usize>(axis: &Axis, input: &[u8], output: &mut [u8]) {
    let (from, to) = (axis.inputs * COLOURS, axis.outputs * COLOURS);
    // A load reads four bytes beyond its four pixels.
    let readable = |row: usize| (row + 1) * from + 4 <= input.len();
    for (group, outputs) in output.chunks_mut(to * ROWS).enumerate() {
        let row = group * ROWS;
        if outputs.len() == to * ROWS && readable(row + ROWS - 1) {
            rows::<ROWS, PARTS>(
                axis,
                std::array::from_fn(|i| &input[(row + i) * from..]),
                outputs,
            );
            continue;
        }
        for (i, outputs) in outputs.chunks_mut(to).enumerate() {
            let bytes = &input[(row + i) * from..];
            match readable(row + i) {
                true => rows::<1, PARTS>(axis, [bytes], outputs),
                false => super::portable::resize_rows(axis, &bytes[..from], outputs),
            }
        }
    }
}

/// Resizes `R` rows.
// Loops over arrays of registers: `map` and `from_fn` are functions without AVX2, and registers
// would pass to and from them through memory.
#[target_feature(enable = "avx2")]
fn rows<const R: usize, const PARTS: usize>(axis: &Axis, input: [&[u8]; R], output: &mut [u8]) {
    let [lower, upper] = PAIRS;
    let pairs = _mm256_set_m128i(load(&upper), load(&lower));
    let halves = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    let half = _mm_cvtsi32_si128(1 << (axis.precision - 1));
    // The halves of a register are added later, so only one gets the rounding term.
    let half = _mm256_zextsi128_si256(_mm_shuffle_epi32::<0>(half));
    let shift = _mm_cvtsi32_si128(axis.precision as i32);
    let to = axis.outputs * COLOURS;
    for x in 0..axis.outputs {
        let [low, high] = axis.weights(x);
        let all_weights = [low.as_chunks::<GROUP>().0, high.as_chunks::<GROUP>().0];
        let mut sums = [[_mm256_setzero_si256(); PARTS]; R];
        let start = axis.first[x] * COLOURS;
        for group in 0..axis.taps / GROUP {
            let mut weights = [_mm256_setzero_si256(); PARTS];
            for (register, part) in weights.iter_mut().zip(all_weights) {
                let [a, b, c, d] = part[group];
                let [a, b, c, d] = [a as u16, b as u16, c as u16, d as u16];
                let low = i64::from(a) | i64::from(b) << 16;
                let four = low | i64::from(c) << 32 | i64::from(d) << 48;
                let four = _mm256_castsi128_si256(_mm_cvtsi64_si128(four));
                *register = _mm256_permutevar8x32_epi32(four, halves);
            }
            let at = start + group * GROUP * COLOURS;
            for (row, sums) in input.iter().zip(&mut sums) {
                let Some(bytes) = row[at..].first_chunk() else {
                    return;
                };
                let pixels = _mm256_broadcastsi128_si256(load(bytes));
                let pixels = _mm256_shuffle_epi8(pixels, pairs);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pixels, weights));
                }
            }
        }
        for (row, mut sums) in sums.into_iter().enumerate() {
            for sum in &mut sums {
                let other = _mm256_permute2x128_si256::<0x81>(*sum, *sum);
                *sum = _mm256_add_epi32(*sum, other);
            }
            let levels = _mm256_castsi256_si128(finish(sums, half, shift));
            let levels = _mm_packs_epi32(levels, levels);
            let [red, green, blue, _] =
                _mm_cvtsi128_si32(_mm_packus_epi16(levels, levels)).to_le_bytes();
            output[row * to + x * COLOURS..][..COLOURS].copy_from_slice(&[red, green, blue]);
        }
    }
}

/// Computes one row of the output.
#[target_feature(enable = "avx2")]
fn columns<const PARTS: usize>(axis: &Axis, input: &[u8], row: usize, output: &mut [u8]) {
    let length = output.len();
    let input = &input[axis.first[row] * length..][..axis.taps * length];
    let all_weights = axis.weights(row);
    let rounding = _mm256_set1_epi32(1 << (axis.precision - 1));
    let shift = _mm_cvtsi32_si128(axis.precision as i32);
    let mut start = 0;
    loop {
        let mut sums = [[_mm256_setzero_si256(); PARTS]; 4];
        let mut tap = 0;
        while tap < axis.taps {
            // An odd last tap is paired with itself, with a weight of 0.
            let next = tap + usize::from(tap + 1 < axis.taps);
            let mut weights = [_mm256_setzero_si256(); PARTS];
            for (register, part) in weights.iter_mut().zip(all_weights) {
                let low = i32::from(part[tap]) & 0xffff;
                let high = if next > tap {
                    i32::from(part[next]) << 16
                } else {
                    0
                };
                *register = _mm256_set1_epi32(low | high);
            }
            let first: Option<&[u8; BLOCK]> = input[tap * length + start..].first_chunk();
            let second: Option<&[u8; BLOCK]> = input[next * length + start..].first_chunk();
            let (Some(first), Some(second)) = (first, second) else {
                return;
            };
            let both = first
                .as_chunks::<16>()
                .0
                .iter()
                .zip(second.as_chunks::<16>().0);
            for (sums, (first, second)) in sums.as_chunks_mut::<2>().0.iter_mut().zip(both) {
                let [first, second] = [load(first), load(second)];
                let pairs = [
                    _mm_unpacklo_epi8(first, second),
                    _mm_unpackhi_epi8(first, second),
                ];
                for (pairs, sums) in pairs.into_iter().zip(sums) {
                    let pairs = _mm256_cvtepu8_epi16(pairs);
                    for (sum, weights) in sums.iter_mut().zip(weights) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, weights));
                    }
                }
            }
            tap += 2;
        }
        let [a, b, c, d] = sums;
        // Packing works within 128 bits: 0 4 1 5 of eight quarters each time.
        let low = _mm256_packs_epi32(finish(a, rounding, shift), finish(b, rounding, shift));
        let high = _mm256_packs_epi32(finish(c, rounding, shift), finish(d, rounding, shift));
        let low = _mm256_permute4x64_epi64::<0b11_01_10_00>(low);
        let high = _mm256_permute4x64_epi64::<0b11_01_10_00>(high);
        let levels = _mm256_packus_epi16(low, high);
        let levels = _mm256_permute4x64_epi64::<0b11_01_10_00>(levels);
        let (low, high) = output[start..][..BLOCK].split_at_mut(16);
        low.copy_from_slice(&store(_mm256_castsi256_si128(levels)));
        high.copy_from_slice(&store(_mm256_extracti128_si256::<1>(levels)));
        if start + BLOCK == length {
            return;
        }
        // The last block overlaps the one before.
        start = (start + BLOCK).min(length - BLOCK);
    }
}
