//! The rotation as a product with a constant matrix, for units that multiply matrices.

use crate::rotate::Direction;
use crate::spec::{Geometry, Pairing};

/// A permutation of the rotated channels with signs: channel `c` of `x @ M` is
/// `signs[c] * x[sources[c]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedPermutation {
    sources: Vec<u32>,
    signs: Vec<i8>,
}

impl SignedPermutation {
    fn new(dim: usize) -> Self {
        Self {
            sources: vec![0; dim],
            signs: vec![1; dim],
        }
    }

    fn set(&mut self, channel: usize, source: usize, sign: i8) {
        self.sources[channel] = source as u32;
        self.signs[channel] = sign;
    }

    /// The source channel of each channel of the result, counted within the rotated part.
    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    /// The sign of each channel of the result, 1 or -1.
    pub fn signs(&self) -> &[i8] {
        &self.signs
    }

    /// True if no channel moves and no sign changes.
    pub fn is_identity(&self) -> bool {
        let kept = self.sources.iter().zip(0..).all(|(from, to)| *from == to);
        kept && self.signs.iter().all(|sign| *sign == 1)
    }

    /// Computes M, `[dim, dim]` row by row, with entries -1, 0 and 1. Row `k` holds the
    /// contribution of channel `k` of x to each channel of the result. Its transpose is its
    /// inverse.
    pub fn matrix(&self) -> Vec<i8> {
        let dim = self.sources.len();
        let mut matrix = vec![0; dim * dim];
        for (channel, (source, sign)) in self.sources.iter().zip(&self.signs).enumerate() {
            matrix[*source as usize * dim + channel] = *sign;
        }
        matrix
    }
}

/// The rotation of one head as products with constant matrices and full-width rows of cos and sin:
///
/// y = (x @ P)∘cos + (x @ R)∘sin over the rotated channels, ∘ elementwise
///
/// P is the identity, except if pairs move to other channels (interleave-half). The adjoint is dx =
/// (dy∘cos) @ P^T + (dy∘sin) @ R^T. A product with R^T only moves channels, so the adjoint keeps
/// the first form, with the matrices transposed and the row of sines permuted like dy. dy then
/// enters the product directly, without a rounding of dy∘sin before it, and one kernel serves both
/// directions.
///
/// # Source
/// y = x*cos + (x @ R)*sin: rope_matrix of gitcode.com/cann/ops-transformer (experimental), forward
/// only. The adjoint is derived here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixForm {
    own: SignedPermutation,
    partner: SignedPermutation,
    cos_lanes: Vec<u32>,
    sin_lanes: Vec<u32>,
}

impl MatrixForm {
    /// Computes the matrices of a geometry in one direction.
    pub fn new(geometry: Geometry, direction: Direction) -> Self {
        let dim = geometry.rotary_dim();
        let mut form = Self {
            own: SignedPermutation::new(dim),
            partner: SignedPermutation::new(dim),
            cos_lanes: vec![0; dim],
            sin_lanes: vec![0; dim],
        };
        for pair in 0..geometry.pairs() {
            let (read, written) = members(geometry.pairing(), dim, pair);
            let second = if geometry.per_channel() {
                geometry.pairs() + pair
            } else {
                pair
            };
            let lanes = [pair, second];
            // Forward: y1 = c1*x1 - s1*x2, y2 = c2*x2 + s2*x1.
            // Adjoint: dx1 = c1*g1 + s2*g2, dx2 = c2*g2 - s1*g1.
            let (from, to, sines, signs) = match direction {
                Direction::Forward => (read, written, lanes, [-1, 1]),
                Direction::Adjoint => (written, read, [second, pair], [1, -1]),
            };
            for member in 0..2 {
                let channel = to[member];
                form.own.set(channel, from[member], 1);
                form.partner.set(channel, from[1 - member], signs[member]);
                form.cos_lanes[channel] = lanes[member] as u32;
                form.sin_lanes[channel] = sines[member] as u32;
            }
        }
        form
    }

    /// P, or its transpose.
    pub fn own(&self) -> &SignedPermutation {
        &self.own
    }

    /// R, or its transpose.
    pub fn partner(&self) -> &SignedPermutation {
        &self.partner
    }

    /// The lane of the cosine of each channel of the result.
    pub fn cos_lanes(&self) -> &[u32] {
        &self.cos_lanes
    }

    /// The lane of the sine of each channel of the result.
    pub fn sin_lanes(&self) -> &[u32] {
        &self.sin_lanes
    }
}

/// The channels that a pair is read from and written to. The oracle has a separate function.
fn members(pairing: Pairing, dim: usize, pair: usize) -> ([usize; 2], [usize; 2]) {
    let halves = [pair, pair + dim / 2];
    let neighbours = [2 * pair, 2 * pair + 1];
    let quarters = {
        let first = pair + pair / (dim / 4).max(1) * (dim / 4);
        [first, first + dim / 4]
    };
    match pairing {
        Pairing::Half => (halves, halves),
        Pairing::Adjacent => (neighbours, neighbours),
        Pairing::Quarter => (quarters, quarters),
        Pairing::InterleaveHalf => (neighbours, halves),
    }
}
