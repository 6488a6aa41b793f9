//! Random numbers. The vendor's generator is not documented; this one is counter-based too, and an
//! offset is a place in the seed's one sequence: draws whose counters overlap repeat each other's
//! numbers. They are not those of any other generator.

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::Scalar;
use super::dtype::{ARITH, Class, FLOATS, NUMBERS};
use super::refuse;
use crate::codes::Outcome;

const UNREPEATABLE: &str = "it uses the random engine";
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sixty-four bits of a seed and a counter, which counts on from the offset: the finaliser of
/// splitmix64 over a sum of odd multiples.
fn bits(seed: u64, counter: u64) -> u64 {
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    mix(mix(seed).wrapping_add(counter.wrapping_mul(STEP)))
}

/// A number in [0, 1) of 53 bits.
fn uniform(seed: u64, offset: u64, index: u64) -> f64 {
    (bits(seed, offset.wrapping_add(index)) >> 11) as f64 / (1_u64 << 53) as f64
}

/// Fills a tensor with a function of the element's index.
fn draw(
    call: &mut Call,
    target: Operand,
    number: impl Fn(u64) -> f64 + Send + Sync + 'static,
) -> Outcome<Kernel> {
    call.unrepeatable(UNREPEATABLE);
    kernel(move |data| {
        let values: Vec<f64> = (0..target.elements() as u64).map(&number).collect();
        data.write(&target, &values)
    })
}

/// Uniform numbers in [from, to).
pub(crate) fn uniform_in_place(
    call: &mut Call,
    target: Operand,
    [from, to]: [f64; 2],
    [seed, offset]: [u64; 2],
) -> Outcome<Kernel> {
    target.expect_type(NUMBERS)?;
    if from > to {
        return refuse(format!(
            "from is {from} and to is {to}: from has to be the smaller"
        ));
    }
    let class = target.dtype.class();
    draw(call, target, move |i| {
        let value = from + uniform(seed, offset, i) * (to - from);
        // Rounding to f32 may reach the bound, which is not part of the range.
        let rounded = if class == Class::F32 {
            f64::from(value as f32)
        } else {
            value
        };
        if rounded >= to { from } else { rounded }
    })
}

/// Normal numbers, two of each pair of uniform ones (Box and Muller 1958).
pub(crate) fn normal(
    call: &mut Call,
    target: Operand,
    [mean, deviation]: [f32; 2],
    [seed, offset]: [i64; 2],
) -> Outcome<Kernel> {
    target.expect_type(FLOATS)?;
    if deviation < 0.0 {
        return refuse(format!("std is {deviation}, 0 or more is expected"));
    }
    let (mean, deviation) = (f64::from(mean), f64::from(deviation));
    let (seed, offset) = (seed as u64, offset as u64);
    draw(call, target, move |i| {
        let pair = i & !1;
        let radius = (-2.0 * (1.0 - uniform(seed, offset, pair)).ln()).sqrt();
        let angle = std::f64::consts::TAU * uniform(seed, offset, pair + 1);
        let unit = if i == pair { angle.cos() } else { angle.sin() };
        mean + deviation * radius * unit
    })
}

/// One with probability `prob`, else zero.
pub(crate) fn bernoulli(
    call: &mut Call,
    probability: Scalar,
    [seed, offset]: [i64; 2],
    out: Operand,
) -> Outcome<Kernel> {
    out.expect_type(ARITH)?;
    if !probability.dtype.is_float() {
        return refuse(format!(
            "prob is {:?}, a float is expected",
            probability.dtype
        ));
    }
    let probability = probability.real();
    if !(0.0..=1.0).contains(&probability) {
        return refuse(format!("prob is {probability}, 0 to 1 is expected"));
    }
    if offset % 4 != 0 {
        return refuse(format!("offset is {offset}, a multiple of 4 is expected"));
    }
    let (seed, offset) = (seed as u64, offset as u64);
    draw(call, out, move |i| {
        f64::from(u8::from(uniform(seed, offset, i) < probability))
    })
}
