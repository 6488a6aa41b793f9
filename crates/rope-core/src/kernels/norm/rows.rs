//! Rows in progress: their sums, their roots, and their writes.

use std::hint::black_box;
use std::mem::replace;
use std::ops::Range;

use super::{AHEAD, BLOCK_TOKENS, NormTile, Shape, TURNS};
use crate::element::{Element, Real};
use crate::kernels::vector::{Memory, Register};

/// One row's pointers; those of the rotated part are `offset` elements further on.
pub(super) struct Row<E: Element> {
    pub(super) shape: Shape,
    pub(super) x: *const E,
    pub(super) dy: *const E,
    pub(super) to: *mut E,
    /// The factors of the pairs, as [`RowRotation::prepare`](super::rotation::RowRotation::prepare) writes it.
    pub(super) factors: *const E::Acc,
    /// Room for the row.
    pub(super) scratch: *mut E::Acc,
}

/// Heads of one token, at most [`AHEAD`].
#[derive(Clone)]
pub(super) struct Rows<'t, E: Element> {
    pub(super) tile: &'t NormTile<E>,
    pub(super) shape: Shape,
    pub(super) token: usize,
    pub(super) heads: Range<usize>,
    /// The factors of the pairs of these heads.
    pub(super) factors: *mut E::Acc,
    /// Room for twice [`AHEAD`] rows.
    pub(super) scratch: *mut E::Acc,
}

impl<'t, E: Element> Rows<'t, E> {
    /// These, of a length that the compiler knows.
    #[inline(always)]
    pub(super) fn common(&self) -> Rows<'t, E> {
        debug_assert!(self.shape.is_common());
        Rows {
            shape: Shape::COMMON,
            ..self.clone()
        }
    }

    /// The sums of the weights' gradients.
    #[inline(always)]
    pub(super) fn dweight(&self) -> *mut E::Acc {
        let block = (self.tile.in_block + self.token) / BLOCK_TOKENS;
        self.tile
            .dweight
            .wrapping_add(block * self.tile.dweight_stride)
    }

    /// The row of one head.
    ///
    /// # Safety
    /// The head and the token are the tile's.
    #[inline(always)]
    pub(super) unsafe fn row(&self, i: usize) -> Row<E> {
        let (tile, token, head) = (self.tile, self.token, self.heads.start + i);
        debug_assert!(self.heads.contains(&head) && i < AHEAD);
        let dy = tile.dy.unwrap_or(tile.x);
        // SAFETY: the caller guarantees that the strides reach only into the tensors; `scratch`
        // has rows for `AHEAD` heads.
        unsafe {
            Row {
                shape: self.shape,
                x: tile.x.start.add(tile.x.offset(token, head)),
                dy: dy.start.add(dy.offset(token, head)),
                to: tile.to.start.add(tile.to.offset(token, head)),
                factors: self.factors,
                scratch: self.scratch.add(i * self.shape.dim),
            }
        }
    }
}

/// Values of the widest register.
pub(super) const WIDEST: usize = 16;

/// The partial sums of rows, of squares and of h * x, with each row's added up to one register.
#[repr(align(64))]
pub(super) struct Partials<A>(pub(super) [[[A; WIDEST]; AHEAD]; 2]);

/// The sums of rows' squares and of h * x, later replaced by the rows' factors (see [`scales`]).
/// Entries of missing rows are unspecified.
pub(super) type Scales<A> = [[A; AHEAD]; 2];

/// Rows with computed sums whose results are not yet written.
pub(super) struct Queue<'t, E: Element> {
    /// The latest rows, then the previous ones.
    rows: [Option<Rows<'t, E>>; 2],
    /// The sums of the rows before the latest, added up.
    totals: Scales<E::Acc>,
    /// True if sums are added up in one iteration and their roots taken in the next.
    apart: bool,
}

impl<'t, E: Element> Queue<'t, E> {
    /// A queue for one direction and order of the norm.
    ///
    /// The processor buffers instructions that wait for a dependency chain. Beside the conversions
    /// of narrow elements, it has room for one chain, not for both. 32-bit elements and the
    /// backward have more work in between; rows in progress longer would only leave the first-level
    /// cache.
    #[inline(always)]
    pub(super) fn new(backward: bool, after: bool) -> Self {
        Self {
            rows: [None, None],
            totals: [[E::Acc::ZERO; AHEAD]; 2],
            apart: !backward && !after && size_of::<E>() < 4,
        }
    }

    /// Groups of rows in progress at a time.
    #[inline(always)]
    pub(super) fn under_way(&self) -> usize {
        if self.apart { TURNS } else { 2 }
    }

    /// Takes the next rows, whose sums are computed now, and the totals of the previous ones.
    /// Returns the rows to be written and their scales.
    #[inline(always)]
    pub(super) fn turn(
        &mut self,
        rows: Option<Rows<'t, E>>,
        totals: Scales<E::Acc>,
        tile: &NormTile<E>,
        dim: usize,
    ) -> (Option<Rows<'t, E>>, Scales<E::Acc>) {
        let latest = replace(&mut self.rows[0], rows);
        // Keeps the compiler from moving these to their uses. Separately, as it would otherwise
        // read them across the boundaries of its writes.
        if self.apart {
            let scales = scales(self.totals, tile, dim).map(black_box);
            self.totals = totals.map(black_box);
            (replace(&mut self.rows[1], latest), scales)
        } else {
            (latest, scales(totals, tile, dim).map(black_box))
        }
    }
}

/// The partial sums of each row added up.
///
/// # Safety
/// The processor has the instructions of `M`, whose registers wrote the partial sums.
#[inline(always)]
pub(super) unsafe fn totals<M: Memory<E>, E: Element>(
    partials: &Partials<E::Acc>,
) -> Scales<E::Acc> {
    const { assert!(M::N <= WIDEST) };
    let mut totals = [[E::Acc::ZERO; AHEAD]; 2];
    for (totals, [a, b, c, d]) in totals.iter_mut().zip(&partials.0) {
        // SAFETY: a register has at most as many values, and the caller guarantees the
        // instructions.
        unsafe {
            let row = |sums: &[E::Acc; WIDEST]| M::Register::load(sums.as_ptr());
            *totals = M::Register::totals([row(a), row(b), row(c), row(d)]);
        }
    }
    totals
}

/// rstd = 1 / sqrt(mean(x^2) + eps) of each row, and -rstd^2 * mean(h * n) with n = x * rstd, by
/// which x is multiplied in dx.
#[inline(always)]
fn scales<E: Element>(
    [mut squares, mut products]: Scales<E::Acc>,
    tile: &NormTile<E>,
    dim: usize,
) -> Scales<E::Acc> {
    let mean = E::Acc::from_f64(1.0 / dim as f64);
    for (rstd, by) in squares.iter_mut().zip(&mut products) {
        *rstd = (*rstd * mean + tile.eps).reciprocal_root();
        *by = -(*by * *rstd * mean * *rstd * *rstd);
    }
    [squares, products]
}
