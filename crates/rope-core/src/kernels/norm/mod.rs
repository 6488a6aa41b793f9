//! RMSNorm of each head fused with its rotation, forward and backward, once for every register,
//! element type and pairing.
//!
//! Problem: for each head x of D channels, with the token's rotation R and the channels' weights w,
//!
//! ```text
//! rstd = 1 / sqrt(mean(x^2) + eps)
//! y    = R (x * rstd * w)                                            norm before the rotation
//! ```
//!
//! and backward, given dy, with g = R^T dy and n = x * rstd,
//!
//! ```text
//! dx   = rstd * (g * w - n * mean(g * w * n))
//! dw   = sum over heads and tokens of g * n
//! ```
//!
//! Before the rotation, the kernel computes h = g * w directly, with weights among the factors of
//! R^T, and adds h * n to dw: the caller divides by w. That saves two of a channel's nine products,
//! which dominate the backward in 16 bits.
//!
//! With the norm after the rotation, y = norm(R x): the same formulas hold between z = R x and y,
//! with g = dy, and dx = R^T dz. dw is as above.
//!
//! Data: a row is one head of one token. It is read twice, the second time from the first-level
//! cache, and written once. The factors of a row (before the rotation, cos and sin times the
//! weights) are prepared once for a token's group of heads, in the order in which the kernel uses
//! them. The rotation's result for the norm, g or z, is in a scratch row, widened.
//!
//! Order: the roots of the sums of a few rows, then the sums of the next rows, then the writes of
//! the first ones; meanwhile later rows are prefetched. This hides the latency of both the roots
//! and memory ([`rows::Queue`]). The factors of pairs are read once for these rows.
//!
//! Sums: value i of a row is added to partial sum i mod 32, whatever the register's width, and the
//! partial sums are added in a fixed order. The sum of squares is recomputed in the backward, which
//! reads x anyway: only x is kept.

mod channels;
mod kernel;
mod rotation;
mod rows;
mod sums;

use self::kernel::Kernel;
use super::order::{Split, Zipped};
use super::portable::Portable;
use super::tile::{Coefficients, LINE_BYTES, starts_lines};
use super::vector::Memory;
use crate::element::Element;
use crate::spec::{Geometry, Pairing};

/// Heads whose sums are computed before the first of them is written. Their stores form a burst
/// that delays loads: eight heads take longer than four where stores bypass the caches.
pub(crate) const AHEAD: usize = 4;

/// Tokens in a block whose weight gradients are summed before they are added to other blocks'.
/// Fixed, so that sums do not depend on the number of threads.
pub(crate) const BLOCK_TOKENS: usize = 32;

/// Groups of rows in progress at a time, at most: one at its sums, one at its roots, and one being
/// written.
pub(crate) const TURNS: usize = 3;

/// A tensor's share of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Part<P> {
    /// First element of the first head of the first token.
    pub(crate) start: P,
    /// Elements between tokens.
    pub(crate) token: usize,
    /// Elements between heads.
    pub(crate) head: usize,
}

impl<P> Part<P> {
    fn offset(&self, token: usize, head: usize) -> usize {
        token * self.token + head * self.head
    }
}

/// Number of factors of a row: four per pair, forward and adjoint.
pub(crate) fn factors_len(geometry: Geometry) -> usize {
    2 * 4 * geometry.pairs()
}

/// A block of tokens by heads of one tensor.
pub(crate) struct NormTile<E: Element> {
    /// The tensor that is, or was, normalised and rotated.
    pub(crate) x: Part<*const E>,
    /// The gradient of y, in the backward.
    pub(crate) dy: Option<Part<*const E>>,
    /// y, or dx in the backward. It may be x in the forward, and dy in the backward.
    pub(crate) to: Part<*mut E>,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Heads.
    pub(crate) heads: usize,
    /// The channels that are rotated.
    pub(crate) geometry: Geometry,
    /// True if the norm comes after the rotation.
    pub(crate) after: bool,
    /// The number added to the mean of the squares.
    pub(crate) eps: E::Acc,
    /// The forward's c1, s1, c2, s2 of the first token.
    pub(crate) coefficients: Coefficients<E::Acc>,
    /// Values between the coefficients of heads; 0 if all heads of a token share them.
    pub(crate) head_coefficients: usize,
    /// The weights of all channels, then those of the pairs' first members, then of the second
    /// ones, as the forward reads pairs.
    pub(crate) weight: *const E::Acc,
    /// The sums, of all channels, to which the backward adds the gradients of the weights, or with
    /// the norm before the rotation those times the weights. Of the first token's block of
    /// [`BLOCK_TOKENS`].
    pub(crate) dweight: *mut E::Acc,
    /// Values from one block's to the next one's.
    pub(crate) dweight_stride: usize,
    /// Tokens of the first block that are before the tile.
    pub(crate) in_block: usize,
    /// True to bypass the caches on writing `to`, where that is possible.
    pub(crate) stream: bool,
    /// Room for twice [`TURNS`] times [`AHEAD`] rows.
    pub(crate) scratch: *mut E::Acc,
    /// Room for [`TURNS`] times [`factors_len`] values.
    pub(crate) factors: *mut E::Acc,
}

impl<E: Element> NormTile<E> {
    /// True if tokens are the inner dimension.
    fn is_heads_outside(&self) -> bool {
        self.x.head > self.x.token
    }

    /// True if every run of every row of y, and the row, starts a cache line and fills its lines.
    fn starts_lines(&self) -> bool {
        let Part { start, token, head } = self.to;
        starts_lines(
            start,
            [
                token,
                head,
                self.geometry.rotary_offset(),
                self.run(),
                self.geometry.head_dim(),
            ],
        )
    }

    /// Pairs of a run, as in [`Tile`](super::tile::Tile).
    fn run(&self) -> usize {
        let pairs = self.geometry.pairs();
        if self.geometry.pairing() == Pairing::Quarter {
            pairs / 2
        } else {
            pairs
        }
    }

    /// True if pointers are aligned, as far as the tile itself shows what [`norm_tile`] demands.
    fn is_sound(&self) -> bool {
        self.x.start.is_aligned()
            && self.to.start.is_aligned()
            && self.dy.is_none_or(|dy| dy.start.is_aligned())
            && self.weight.is_aligned()
            && self.scratch.is_aligned()
    }
}

/// Normalises and rotates a tile, or propagates its gradients.
///
/// # Safety
/// - the processor has the instructions of `M`
/// - `x` and `dy` are valid for reads and `to` for writes of `head_dim` elements at every token and
///   head by their strides; `to` overlaps neither, or is x in the forward, or is dy in the
///   backward, with the same strides
/// - the four coefficients are valid for the pairs' values at every token and head by their strides
/// - `weight` is valid for reads of `head_dim + rotary_dim` values, `scratch` for reads and writes
///   of twice [`TURNS`] times [`AHEAD`] times `head_dim`, `factors` of [`TURNS`] times
///   [`factors_len`], and in the backward `dweight` of `head_dim` for each block of tokens by its
///   stride; none overlaps anything else
pub(crate) unsafe fn norm_tile<M: Memory<E>, E: Element>(tile: &NormTile<E>) {
    type Any<E, Read, Write> = Kernel<Portable<4>, Portable<4>, E, Read, Write>;
    debug_assert!(tile.is_sound());
    // SAFETY: the caller guarantees what the kernels demand of a tile.
    unsafe {
        match (tile.geometry.pairing(), tile.after) {
            (Pairing::Half | Pairing::Quarter, false) => {
                Kernel::<M, M::Wide, E, Split, Split>::common_before(tile);
            }
            (Pairing::Half | Pairing::Quarter, true) => {
                Kernel::<M, M::Wide, E, Split, Split>::after(tile);
            }
            (Pairing::Adjacent, false) => {
                Kernel::<M, M::Wide, E, Zipped, Zipped>::common_before(tile);
            }
            (Pairing::InterleaveHalf, false) => {
                Kernel::<M, M::Wide, E, Zipped, Split>::before(tile);
            }
            // No known model has these, so they have no code for vector instructions.
            (Pairing::Adjacent, true) => Any::<E, Zipped, Zipped>::after(tile),
            (Pairing::InterleaveHalf, true) => Any::<E, Zipped, Split>::after(tile),
        }
    }
}

/// The length of a row, and the places of the pairs in it.
#[derive(Clone, Copy)]
struct Shape {
    /// Channels of a head.
    dim: usize,
    /// First rotated channel.
    start: usize,
    /// Pairs of channels.
    pairs: usize,
    /// Pairs of a run.
    run: usize,
}

impl Shape {
    /// One run of 128 rotated channels, as most models have.
    const COMMON: Self = Self {
        dim: 128,
        start: 0,
        pairs: 64,
        run: 64,
    };

    /// The tile's.
    fn of<E: Element>(tile: &NormTile<E>) -> Self {
        let geometry = tile.geometry;
        Self {
            dim: geometry.head_dim(),
            start: geometry.rotary_offset(),
            pairs: geometry.pairs(),
            run: tile.run(),
        }
    }

    /// True if it is [`COMMON`](Self::COMMON).
    fn is_common(self) -> bool {
        (self.dim, self.run) == (Self::COMMON.dim, Self::COMMON.run)
    }

    /// The end of the rotated channels.
    fn end(&self) -> usize {
        self.start + 2 * self.pairs
    }
}
