//! The inverse cosine transform of a block: columns, then rows, in integers.
//!
//! Constants have 13 fractional bits, the values between both passes 2. Sums wrap and saturate at
//! 16 bits where registers of x86-64 do, which only coefficients beyond those of any 8-bit picture
//! show.
//!
//! # Source
//! C. Loeffler, A. Ligtenberg and G. Moschytz, Practical fast 1-D DCT algorithms with 11
//! multiplications, ICASSP 1989, figure 1; the constants are 2 cos or sums of them, as in
//! libjpeg-turbo's accurate integer method

use super::segments::BLOCK;

/// Fractional bits of the constants.
const FRACTION: u32 = 13;
/// Fractional bits of the values between the passes.
const BETWEEN: u32 = 2;

/// Round(x 2^13).
const fn fixed(x: f64) -> i32 {
    (x * (1 << FRACTION) as f64 + 0.5) as i32
}

/// Eight values that are transformed side by side.
type Lanes = [i32; 8];

/// Applies a function to each lane. `map` and `from_fn` of arrays may become functions without the
/// instructions of their caller.
#[inline(always)]
fn each(a: Lanes, f: impl Fn(i32) -> i32) -> Lanes {
    map(a, a, |value, _| f(value))
}

#[inline(always)]
fn map(a: Lanes, b: Lanes, f: impl Fn(i32, i32) -> i32) -> Lanes {
    let mut out = [0; 8];
    for lane in 0..8 {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

#[inline(always)]
fn add(a: Lanes, b: Lanes) -> Lanes {
    map(a, b, i32::wrapping_add)
}

#[inline(always)]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    map(a, b, i32::wrapping_sub)
}

#[inline(always)]
fn times(a: Lanes, factor: f64) -> Lanes {
    let factor = if factor < 0.0 {
        -fixed(-factor)
    } else {
        fixed(factor)
    };
    each(a, |value| value.wrapping_mul(factor))
}

/// The lower 16 bits.
#[inline(always)]
fn wrapped(a: Lanes) -> Lanes {
    each(a, |value| i32::from(value as i16))
}

/// One pass over columns, with `shift` bits rounded off and 16 left.
#[inline(always)]
fn pass(rows: &[Lanes; 8], shift: u32) -> [Lanes; 8] {
    let middle = times(add(rows[2], rows[6]), 0.541_196_100);
    let even = [
        add(middle, times(rows[2], 0.765_366_865)),
        sub(middle, times(rows[6], 1.847_759_065)),
    ];
    let sum = each(wrapped(add(rows[0], rows[4])), |value| value << FRACTION);
    let difference = each(wrapped(sub(rows[0], rows[4])), |value| value << FRACTION);
    let upper = [
        add(sum, even[0]),
        add(difference, even[1]),
        sub(difference, even[1]),
        sub(sum, even[0]),
    ];

    let [first, third, fifth, seventh] = [rows[1], rows[3], rows[5], rows[7]];
    let outer = times(add(seventh, first), -0.899_976_223);
    let inner = times(add(fifth, third), -2.562_915_447);
    let [low, high] = [wrapped(add(seventh, third)), wrapped(add(fifth, first))];
    let both = times(add(low, high), 1.175_875_602);
    let low = add(both, times(low, -1.961_570_560));
    let high = add(both, times(high, -0.390_180_644));
    let lower = [
        add(times(first, 1.501_321_110), add(outer, high)),
        add(times(third, 3.072_711_026), add(inner, low)),
        add(times(fifth, 2.053_119_869), add(inner, high)),
        add(times(seventh, 0.298_631_336), add(outer, low)),
    ];

    let round = |value: i32| {
        let rounded = value.wrapping_add(1 << (shift - 1)) >> shift;
        rounded.clamp(i32::from(i16::MIN), i32::from(i16::MAX))
    };
    let mut out = [[0; 8]; 8];
    for (index, (upper, lower)) in upper.into_iter().zip(lower).enumerate() {
        out[index] = each(add(upper, lower), round);
        out[7 - index] = each(sub(upper, lower), round);
    }
    out
}

#[inline(always)]
fn transposed(rows: &[Lanes; 8]) -> [Lanes; 8] {
    let mut out = [[0; 8]; 8];
    for (row, out) in out.iter_mut().enumerate() {
        for (column, out) in out.iter_mut().enumerate() {
            *out = rows[column][row];
        }
    }
    out
}

#[inline(always)]
fn level(value: i32) -> u8 {
    (value.clamp(-128, 127) + 128) as u8
}

#[inline(always)]
fn full(coefficients: &[i16; BLOCK], quant: &[u16; BLOCK]) -> [[u8; 8]; 8] {
    let mut rows = [[0; 8]; 8];
    let products = coefficients.iter().zip(quant);
    for (value, (&coefficient, &step)) in rows.as_flattened_mut().iter_mut().zip(products) {
        *value = i32::from(coefficient.wrapping_mul(step as i16));
    }
    let columns = if coefficients[8..].iter().all(|&value| value == 0) {
        [wrapped(each(rows[0], |value| value << BETWEEN)); 8]
    } else {
        pass(&rows, FRACTION - BETWEEN)
    };
    let levels = pass(&transposed(&columns), FRACTION + BETWEEN + 3);
    let levels = transposed(&levels);
    let mut out = [[0; 8]; 8];
    for (out, &value) in out.as_flattened_mut().iter_mut().zip(levels.as_flattened()) {
        *out = level(value);
    }
    out
}

/// The same, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn full_avx2(coefficients: &[i16; BLOCK], quant: &[u16; BLOCK]) -> [[u8; 8]; 8] {
    full(coefficients, quant)
}

/// Computes the samples of a block, row by row, from coefficients in natural order.
#[allow(unsafe_code, reason = "a function is compiled for AVX2")]
pub(super) fn inverse(coefficients: &[i16; BLOCK], quant: &[u16; BLOCK]) -> [[u8; 8]; 8] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected, the only condition of `full_avx2`.
        return unsafe { full_avx2(coefficients, quant) };
    }
    full(coefficients, quant)
}

/// The level of all samples of a block of only a first coefficient.
pub(super) fn flat(first: i16, quant: &[u16; BLOCK]) -> u8 {
    let between = i32::from(first.wrapping_mul(quant[0] as i16) << BETWEEN);
    level((between + (1 << (BETWEEN + 2))) >> (BETWEEN + 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of the standard, A.3.3, in f64.
    fn defined(coefficients: &[i16; BLOCK], quant: &[u16; BLOCK]) -> [[f64; 8]; 8] {
        let scale = |k: usize| if k == 0 { 0.5_f64.sqrt() } else { 1.0 };
        let wave = |x: usize, u: usize| {
            ((2 * x + 1) as f64 * u as f64 * std::f64::consts::PI / 16.0).cos()
        };
        std::array::from_fn(|y| {
            std::array::from_fn(|x| {
                let terms = (0..BLOCK).map(|place| {
                    let (v, u) = (place / 8, place % 8);
                    let value = f64::from(coefficients[place]) * f64::from(quant[place]);
                    scale(u) * scale(v) * value * wave(x, u) * wave(y, v)
                });
                terms.sum::<f64>() / 4.0 + 128.0
            })
        })
    }

    #[test]
    fn it_is_the_transform_of_the_standard() {
        let mut state = 1_u32;
        let mut random = |bound: i32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as i32 % (2 * bound + 1) - bound
        };
        let quant: [u16; BLOCK] = std::array::from_fn(|place| 1 + place as u16 / 3);
        for round in 0..500 {
            let mut block = [0; BLOCK];
            block[0] = random(1000) as i16;
            for place in (1..BLOCK).filter(|_| round > 0) {
                if random(100) > 60 - 30 * (round % 3) {
                    block[place] = (random(300) / i32::from(quant[place])) as i16;
                }
            }
            let found = inverse(&block, &quant);
            assert_eq!(found, full(&block, &quant), "the kernels differ");
            let defined = defined(&block, &quant);
            for (found, defined) in found.iter().flatten().zip(defined.iter().flatten()) {
                let defined = defined.clamp(0.0, 255.0);
                assert!(
                    (f64::from(*found) - defined).abs() < 0.6,
                    "{found} {defined}"
                );
            }
            if round == 0 {
                assert_eq!(found, [[flat(block[0], &quant); 8]; 8]);
            }
        }
    }
}
