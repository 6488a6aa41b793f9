//! The 16-bit kernels bit by bit: every pattern goes in, and one rounding, to nearest even, comes
//! out.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use ascend_sim::Machine;
use half::{bf16, f16};
use rope_ascend::rope::{Heads, Operand, Rotation, Rotator};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing};
use support::{At, Bench, Number, Numbers, angles, index, pair_channels};

const TOKENS: usize = 64;
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const PAIRS: usize = HEAD_DIM / 2;

trait Bits: Number {
    fn from_bits(bits: u16) -> Self;
    fn bits(self) -> u16;
    fn single(self) -> f32;
}
impl Bits for f16 {
    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn single(self) -> f32 {
        self.to_f32()
    }
}
impl Bits for bf16 {
    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn single(self) -> f32 {
        self.to_f32()
    }
}

/// Angles of a token: the identity, products that end halfway between two results, and any.
fn angle(token: usize, numbers: &mut Numbers) -> (f32, f32) {
    match token % 4 {
        0 => (1.0, 0.0),
        1 => (1.0 + 2_f32.powi(-8), 0.5),
        2 => (1.0 + 2_f32.powi(-11), -0.5),
        _ => (numbers.unit() as f32, numbers.unit() as f32),
    }
}

fn check<T: Bits>(bench: &Bench, pairing: Pairing, direction: Direction) {
    let stream = &bench.stream;
    let mut numbers = Numbers(0x51_7c_c1_b7);
    let geometry = Geometry::new(HEAD_DIM, HEAD_DIM, 0, pairing, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let drawn: Vec<(f32, f32)> = (0..TOKENS).map(|t| angle(t, &mut numbers)).collect();
    let rows: Vec<f32> = drawn
        .iter()
        .flat_map(|(cos, sin)| [[*cos; PAIRS], [*sin; PAIRS]].concat())
        .collect();
    let on_device = stream.upload(&rows).unwrap();
    // An odd factor visits every pattern once, and pairs patterns that differ in every field.
    let x: Vec<T> = (0..=u16::MAX)
        .map(|i| T::from_bits(i.wrapping_mul(40_503)))
        .collect();
    let mut on_npu = stream.upload(&x).unwrap();
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, TOKENS, HEADS, HEAD_DIM);
    rotator
        .rotate(Rotation {
            element: T::TYPE,
            direction,
            q: Operand::InPlace(Heads {
                memory: &mut on_npu,
                offset: 0,
                layout,
            }),
            k: None,
            angles: angles(&on_device, TOKENS),
        })
        .unwrap();
    let got = stream.download(&on_npu).unwrap();
    let at: At = (0, layout);
    for (token, (cos, sin)) in drawn.into_iter().enumerate() {
        for head in 0..HEADS {
            for j in 0..PAIRS {
                let (read, write) = pair_channels(pairing, HEAD_DIM, j);
                let (from, to, sin) = match direction {
                    Direction::Forward => (read, write, sin),
                    Direction::Adjoint => (write, read, -sin),
                };
                let place = |c| index(&at, 0, token, head, c);
                let [first, second] = from.map(|c| x[place(c)].single());
                let truth = [cos * first - sin * second, cos * second + sin * first];
                for (c, truth) in to.into_iter().zip(truth) {
                    let (got, truth) = (got[place(c)], T::rounded(truth));
                    assert!(
                        got.bits() == truth.bits()
                            || got.single().is_nan() && truth.single().is_nan(),
                        "{:?} {pairing:?} {direction:?}: ({first}, {second}) by ({cos}, {sin}) \
                         gives {:#06x} instead of {:#06x}",
                        T::TYPE,
                        got.bits(),
                        truth.bits()
                    );
                }
            }
        }
    }
}

#[test]
fn every_pattern_is_rounded_once() {
    // Infinities stay, as in the mode in which Atlas A2 starts.
    for machine in [Machine::ascend_910b(), Machine::ascend_950()] {
        let bench = Bench::new(Machine {
            saturate: false,
            ..machine
        });
        for pairing in [
            Pairing::Half,
            Pairing::Quarter,
            Pairing::Adjacent,
            Pairing::InterleaveHalf,
        ] {
            for direction in [Direction::Forward, Direction::Adjoint] {
                check::<f16>(&bench, pairing, direction);
                check::<bf16>(&bench, pairing, direction);
            }
        }
        bench.finish();
    }
}
