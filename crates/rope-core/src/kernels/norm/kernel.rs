//! The order in which a tile's rows are taken, and what is done with each: once for every way in
//! which pairs are read and written.

use std::marker::PhantomData;

use super::channels::{convert, norm_backward, normalise};
use super::rows::{Partials, Queue, Row, Rows, Scales, WIDEST};
use super::sums::{products, squares};
use super::turn::Turn;
use super::{AHEAD, LINE_BYTES, NormTile, Part, Shape, factors_len};
use crate::element::{Element, Real};
use crate::kernels::order::Order;
use crate::kernels::tile::{Coefficients, HEADS_OUTSIDE_GROUP};
use crate::kernels::vector::{self, Instructions, Memory, Register};

impl<E: Element> Part<*const E> {
    /// Has the row of `dim` elements fetched that lies a number of bytes after one of these, be it
    /// another head's or another token's.
    #[inline(always)]
    fn prefetch<M: Memory<E>>(&self, token: usize, head: usize, dim: usize, bytes: usize) {
        let rows = bytes.div_ceil(dim * size_of::<E>());
        let later = rows.wrapping_mul(self.token.min(self.head));
        let row = self.offset(token, head).wrapping_add(later);
        for at in (0..dim).step_by(LINE_BYTES / size_of::<E>()) {
            M::Register::prefetch::<false, _>(self.start.wrapping_add(row.wrapping_add(at)));
        }
    }
}

/// Registers of values as `W` has them, whatever the order of what is in them: two that hold the
/// first members of pairs, and the second ones, are written and read one after the other.
struct Raw<W>(PhantomData<W>);

impl<W: Instructions> Instructions for Raw<W> {
    #[inline(always)]
    unsafe fn run<K: vector::Kernel>(kernel: K) {
        // SAFETY: the caller guarantees the instructions, and what the kernel demands.
        unsafe { W::run(kernel) }
    }
}

impl<W: Memory<A>, A: Real> Memory<A> for Raw<W> {
    type Register = W::Register;
    type Narrower = W::Narrower;
    type Wide = W::Wide;
    const DOUBLES: bool = true;
    const UNZIPS: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const A) -> Self::Register {
        // SAFETY: the caller guarantees what the inner one demands.
        unsafe { W::load(from) }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: Self::Register, to: *mut A) {
        // SAFETY: as above.
        unsafe { W::store::<STREAM>(x, to) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const A) -> [Self::Register; 2] {
        // SAFETY: the caller guarantees `2 N` values; each load takes `N` of them.
        unsafe { [W::load(from), W::load(from.add(Self::N))] }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(pairs: [Self::Register; 2], to: *mut A) {
        // SAFETY: the caller guarantees room for `2 N` values; `store_both` takes as many.
        unsafe { W::store_both::<STREAM>(pairs, to) }
    }
}

/// The algorithm for one way in which the forward reads and writes pairs, with scratch rows as `W`
/// reads and writes them.
///
/// # Safety
/// Of every function: the processor has the instructions of `M`; a tile is as
/// [`norm_tile`](super::norm_tile) demands, and a row is one of its rows.
pub(super) struct Kernel<M, W, E, Read, Write>(PhantomData<(M, W, E, Read, Write)>);

/// [`Kernel::each_row`] of a tile, with the same conditions.
struct EachRow<
    't,
    K,
    E: Element,
    const DIM: usize,
    const BACKWARD: bool,
    const AFTER: bool,
    const STREAM: bool,
>(&'t NormTile<E>, PhantomData<K>);

impl<
    M,
    W,
    E,
    Read,
    Write,
    const DIM: usize,
    const BACKWARD: bool,
    const AFTER: bool,
    const STREAM: bool,
> vector::Kernel for EachRow<'_, Kernel<M, W, E, Read, Write>, E, DIM, BACKWARD, AFTER, STREAM>
where
    M: Memory<E>,
    W: Memory<E::Acc, Register = M::Register>,
    E: Element,
    Read: Order,
    Write: Order,
{
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            Kernel::<M, W, E, Read, Write>::each_row::<DIM, BACKWARD, AFTER, STREAM>(self.0);
        }
    }
}

// No closures around loads, stores and arithmetic: see `tile`.
impl<M, E, Read, Write> Kernel<M, M::Wide, E, Read, Write>
where
    M: Memory<E>,
    E: Element,
    Read: Order,
    Write: Order,
{
    pub(super) unsafe fn tile(tile: &NormTile<E>) {
        let stream = M::Register::STREAMS
            && Read::ZIPPED == Write::ZIPPED
            && tile.stream
            && tile.starts_lines();
        // The length of most models in code of its own.
        let common = M::Register::LONGEST > 0
            && Read::ZIPPED == Write::ZIPPED
            && Shape::of::<0, E>(tile).is::<128>();
        // SAFETY: the caller guarantees the tile and the instructions; `stream` implies that runs
        // start and fill cache lines.
        unsafe {
            match (tile.dy, tile.after) {
                (None, false) if common && stream => Self::launch::<128, false, false, true>(tile),
                (None, false) if common => Self::launch::<128, false, false, false>(tile),
                (None, false) if stream => Self::launch::<0, false, false, true>(tile),
                (None, false) => Self::launch::<0, false, false, false>(tile),
                (None, true) => Self::launch::<0, false, true, false>(tile),
                (Some(_), false) if common && M::UNZIPS => {
                    let raw = Kernel::<M, Raw<M::Wide>, E, Read, Write>::common_backward;
                    raw(tile, stream);
                }
                (Some(_), false) if common => Self::common_backward(tile, stream),
                (Some(_), false) if stream => Self::launch::<0, true, false, true>(tile),
                (Some(_), false) => Self::launch::<0, true, false, false>(tile),
                (Some(_), true) => Self::launch::<0, true, true, false>(tile),
            }
        }
    }
}

impl<M, W, E, Read, Write> Kernel<M, W, E, Read, Write>
where
    M: Memory<E>,
    W: Memory<E::Acc, Register = M::Register>,
    E: Element,
    Read: Order,
    Write: Order,
{
    /// Whether x is read again where it is needed again, not written widened.
    const READS_AGAIN: bool = M::UNZIPS && W::UNZIPS;
    /// Whether the forward writes x widened with its squares, and rotates that.
    const KEEPS_WIDE: bool = M::KEEPS_WIDE && Read::ZIPPED == Write::ZIPPED;

    /// Whether registers are not the widest. Where tokens are inside, other orders are then faster:
    /// measured on Zen 3, where AVX2 rotates, and on Zen 4 and Xeons, where AVX-512 does; not with
    /// NEON.
    const NARROW: bool = M::N < WIDEST;

    /// Bytes from a row that is read to the one that is fetched with it, into the second-level
    /// cache, if one is: the processor's own look-ahead is too short for what is computed in
    /// between, and the first level has too few lines under way at a time to wait for memory with
    /// them.
    #[inline(always)]
    fn fetched<const BACKWARD: bool>(tile: &NormTile<E>) -> Option<usize> {
        let narrow_outside = Self::NARROW && tile.is_heads_outside();
        match BACKWARD {
            // Wide elements have the forward wait for memory alone, and there the processor's own
            // look-ahead is faster.
            false if size_of::<E>() >= 4 => None,
            false if narrow_outside => Some(1024),
            // Four heads of two tensors are eight stretches of memory: the processor follows them
            // as long as nothing else asks for their lines first.
            true if narrow_outside => None,
            _ => Some(4096),
        }
    }

    /// The backward of rows of 128 channels, the norm before the rotation.
    unsafe fn common_backward(tile: &NormTile<E>, stream: bool) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            if stream {
                Self::launch::<128, true, false, true>(tile);
            } else {
                Self::launch::<128, true, false, false>(tile);
            }
        }
    }

    /// [`each_row`](Self::each_row), in a function of its own.
    unsafe fn launch<
        const DIM: usize,
        const BACKWARD: bool,
        const AFTER: bool,
        const STREAM: bool,
    >(
        tile: &NormTile<E>,
    ) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            M::run(EachRow::<Self, E, DIM, BACKWARD, AFTER, STREAM>(
                tile,
                PhantomData,
            ))
        }
    }

    /// Takes the rows in memory order, a group of heads at a time, as the rotation does.
    #[inline(always)]
    unsafe fn each_row<
        const DIM: usize,
        const BACKWARD: bool,
        const AFTER: bool,
        const STREAM: bool,
    >(
        tile: &NormTile<E>,
    ) {
        let shape = Shape::of::<DIM, E>(tile);
        let own = tile.head_coefficients > 0;
        let (group, ahead) = match (tile.is_heads_outside(), own) {
            (_, true) => (1, 1),
            // Twice as many where one tensor is read, not two, as their rows share cache sets, and
            // where registers are widest.
            (true, false) if BACKWARD || Self::NARROW => (HEADS_OUTSIDE_GROUP, AHEAD),
            (true, false) => (2 * HEADS_OUTSIDE_GROUP, AHEAD),
            (false, false) => (tile.heads.max(1), AHEAD),
        };
        // Factors and scratch rows of these rows, and of those before them.
        let (mut slot, mut turn) = (0, 0);
        let under_way = Queue::<E, BACKWARD, AFTER>::UNDER_WAY;
        let mut queue = Queue::<E, BACKWARD, AFTER>::new();
        let mut partials = Partials([[[E::Acc::ZERO; WIDEST]; AHEAD]; 2]);
        for first in (0..tile.heads).step_by(group) {
            let end = (first + group).min(tile.heads);
            for token in 0..tile.tokens {
                let values = token * tile.coefficients.stride + first * tile.head_coefficients;
                let coefficients = tile.coefficients.skip(values);
                let factors = tile.factors.wrapping_add(slot * factors_len(tile.geometry));
                slot = (slot + 1) % under_way;
                // SAFETY: the caller guarantees the tile, whose tokens and heads these are, with
                // room for the factors of as many tokens, and the scratch rows of as many turns, as
                // are under way.
                unsafe {
                    Self::prepare::<BACKWARD, AFTER>(coefficients, factors, tile, shape);
                    for head in (first..end).step_by(ahead) {
                        let rows = Rows {
                            tile,
                            shape,
                            token,
                            heads: head..(head + ahead).min(end),
                            factors,
                            scratch: tile.scratch.wrapping_add(turn * 2 * AHEAD * shape.dim),
                        };
                        turn = (turn + 1) % under_way;
                        let next = Some(rows.clone());
                        let (due, scales) = queue.turn::<M>(next, &partials, tile, shape.dim);
                        // A known number of rows, in the code that most models run.
                        if DIM > 0 && rows.heads.len() == AHEAD {
                            Self::sums::<BACKWARD, AFTER>(&rows, AHEAD, &mut partials);
                        } else {
                            Self::sums::<BACKWARD, AFTER>(&rows, rows.heads.len(), &mut partials);
                        }
                        match due {
                            Some(rows) if DIM > 0 && rows.heads.len() == AHEAD => {
                                Self::results::<BACKWARD, AFTER, STREAM>(&rows, AHEAD, scales);
                            }
                            Some(rows) => {
                                let count = rows.heads.len();
                                Self::results::<BACKWARD, AFTER, STREAM>(&rows, count, scales);
                            }
                            None => {}
                        }
                    }
                }
            }
        }
        for _ in 1..under_way {
            // SAFETY: these are the last rows of the caller's tile.
            unsafe {
                if let (Some(rows), scales) = queue.turn::<M>(None, &partials, tile, shape.dim) {
                    let count = rows.heads.len();
                    Self::results::<BACKWARD, AFTER, STREAM>(&rows, count, scales);
                }
            }
        }
        if STREAM {
            // SAFETY: the caller guarantees the instructions.
            unsafe { M::Register::fence() }
        }
    }

    /// Writes what the pairs of rows with these coefficients are multiplied by.
    #[inline(always)]
    unsafe fn prepare<const BACKWARD: bool, const AFTER: bool>(
        by: Coefficients<E::Acc>,
        factors: *mut E::Acc,
        tile: &NormTile<E>,
        shape: Shape,
    ) {
        // SAFETY: the caller guarantees coefficients of all pairs, and room; the weights of pairs
        // follow those of channels.
        unsafe {
            let weight = tile.weight.add(shape.dim);
            match (BACKWARD, AFTER) {
                (false, false) => {
                    Turn::<M, M, E, E, Read, Write>::prepare::<false, true>(
                        by, weight, factors, shape,
                    );
                }
                (_, true) => {
                    Turn::<M, W, E, E::Acc, Read, Write>::prepare::<false, false>(
                        by, weight, factors, shape,
                    );
                    if BACKWARD {
                        let factors = factors.add(4 * shape.pairs);
                        Turn::<W, M, E::Acc, E, Write, Read>::prepare::<true, false>(
                            by, weight, factors, shape,
                        );
                    }
                }
                (true, false) => {
                    Turn::<M, W, E, E::Acc, Write, Read>::prepare::<true, true>(
                        by, weight, factors, shape,
                    );
                }
            }
        }
    }

    /// Writes the partial sums of each of `count` rows: of its squares, and in the backward of its
    /// products.
    #[inline(always)]
    unsafe fn sums<const BACKWARD: bool, const AFTER: bool>(
        rows: &Rows<'_, E>,
        count: usize,
        partials: &mut Partials<E::Acc>,
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: the caller guarantees rows of `head_dim` elements, as many weights and their
        // gradients, and scratch rows. In the backward these hold g = R^T dy, or z = R x and then
        // dz; dy is not read after it was overwritten.
        unsafe {
            let zero = M::Register::splat(E::Acc::ZERO);
            for i in 0..count {
                let row = rows.row(i);
                let head = rows.heads.start + i;
                if let Some(bytes) = Self::fetched::<BACKWARD>(tile) {
                    tile.x.prefetch::<M>(rows.token, head, dim, bytes);
                    if let (true, Some(dy)) = (BACKWARD, &tile.dy) {
                        dy.prefetch::<M>(rows.token, head, dim, bytes);
                    }
                }
                let [square, product] = match (BACKWARD, AFTER) {
                    (false, false) => {
                        let wide = Self::KEEPS_WIDE.then_some(row.scratch);
                        [squares::<M, E>(row.x, wide, dim), zero]
                    }
                    (false, true) => {
                        Self::widen::<Read, Write>(row.x, None, &row);
                        [squares::<W, E::Acc>(row.scratch, None, dim), zero]
                    }
                    (true, false) => {
                        Self::widen::<Write, Read>(row.dy, Some(tile.weight), &row);
                        let wide =
                            (!Self::READS_AGAIN).then_some(row.scratch.wrapping_add(AHEAD * dim));
                        products::<M, W, E, E::Acc>(row.x, row.scratch, None, wide, dim)
                    }
                    (true, true) => {
                        Self::widen::<Read, Write>(row.x, None, &row);
                        let weight = Some(tile.weight);
                        products::<W, M, E::Acc, E>(row.scratch, row.dy, weight, None, dim)
                    }
                };
                square.write(partials.0[0][i].as_mut_ptr());
                if BACKWARD {
                    product.write(partials.0[1][i].as_mut_ptr());
                }
            }
        }
    }

    /// Writes the results of `count` rows by their scales.
    #[inline(always)]
    unsafe fn results<const BACKWARD: bool, const AFTER: bool, const STREAM: bool>(
        rows: &Rows<'_, E>,
        count: usize,
        [rstds, by_x]: Scales<E::Acc>,
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: as in `sums`, whose scratch rows these are.
        unsafe {
            let first = rows.row(0);
            let scratch = (first.scratch, dim);
            let scales = [&rstds[..count], &by_x[..count]];
            match (BACKWARD, AFTER) {
                (false, false) => Self::before::<STREAM>(rows, scales[0]),
                (false, true) => {
                    for (i, rstd) in scales[0].iter().enumerate() {
                        let Row { scratch, to, .. } = rows.row(i);
                        normalise::<W, M, E::Acc, E>(scratch, to, tile.weight, *rstd, 0, dim);
                    }
                }
                (true, false) => {
                    if STREAM && Self::NARROW && tile.is_heads_outside() {
                        // The start of g's rows, which are read before they are overwritten.
                        let apart = dim * size_of::<E::Acc>() / size_of::<E>();
                        Self::gradients::<false>(rows, (scratch.0.cast(), apart), scales);
                        for i in 0..count {
                            let Row { scratch, to, .. } = rows.row(i);
                            Self::past_caches(scratch.cast_const().cast(), to, dim);
                        }
                    } else {
                        Self::gradients::<STREAM>(rows, (first.to, tile.to.head), scales);
                    }
                }
                (true, true) => {
                    let z = (scratch.0.cast_const(), dim);
                    let dy = (first.dy, tile.dy.unwrap_or(tile.x).head);
                    norm_backward::<W, M, W, E::Acc, E, E::Acc, false>(
                        z,
                        dy,
                        scratch,
                        Some(tile.weight),
                        rows.dweight(),
                        dim,
                        scales,
                    );
                    for i in 0..count {
                        Self::turn_back(&rows.row(i));
                    }
                }
            }
        }
    }

    /// Writes dx and adds to dw, of rows whose g lies in scratch rows.
    #[inline(always)]
    unsafe fn gradients<const STREAM: bool>(
        rows: &Rows<'_, E>,
        to: (*mut E, usize),
        scales: [&[E::Acc]; 2],
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: the caller guarantees the rows, whose sums were made.
        unsafe {
            let first = rows.row(0);
            let g = (first.scratch.cast_const(), dim);
            let dweight = rows.dweight();
            if Self::READS_AGAIN {
                let x = (first.x, tile.x.head);
                norm_backward::<M, W, M, E, E::Acc, E, STREAM>(
                    x, g, to, None, dweight, dim, scales,
                );
            } else {
                let x = (first.scratch.add(AHEAD * dim).cast_const(), dim);
                norm_backward::<W, W, M, E::Acc, E::Acc, E, STREAM>(
                    x, g, to, None, dweight, dim, scales,
                );
            }
        }
    }

    /// Writes a row past the caches, one line after the other: rows far from each other, a line of
    /// each at a time, take 1.7 to 2.7 times as long (on Zen 3). The row at `to` starts a cache line
    /// and fills its lines.
    #[inline(always)]
    unsafe fn past_caches(from: *const E, to: *mut E, dim: usize) {
        let (from, to) = (from.cast::<E::Acc>(), to.cast::<E::Acc>());
        let words = dim * size_of::<E>() / size_of::<E::Acc>();
        debug_assert!(to.addr().is_multiple_of(LINE_BYTES) && words.is_multiple_of(M::N));
        for at in (0..words).step_by(M::N) {
            // SAFETY: the caller guarantees rows of `dim` elements, which fill cache lines, and `to`
            // at the start of one; registers divide lines, so that each store is aligned.
            unsafe { W::store::<true>(W::load(from.add(at)), to.add(at)) }
        }
    }

    /// y = R (x * rstd * w).
    #[inline(always)]
    unsafe fn before<const STREAM: bool>(rows: &Rows<'_, E>, rstds: &[E::Acc]) {
        let (tile, shape) = (rows.tile, rows.shape);
        let Shape { dim, start, .. } = shape;
        let end = shape.end();
        // SAFETY: the caller guarantees rows of `head_dim` elements, in which `start..end` is the
        // rotated part, weights for all of them, and scratch rows.
        unsafe {
            if end - start < dim {
                for (i, rstd) in rstds.iter().enumerate() {
                    let Row { x, to, .. } = rows.row(i);
                    normalise::<M, M, E, E>(x, to, tile.weight, *rstd, 0, start);
                    normalise::<M, M, E, E>(x, to, tile.weight, *rstd, end, dim);
                }
            }
            let first = rows.row(0);
            let from = (first.x.add(start), tile.x.head);
            let to = (first.to.add(start), tile.to.head);
            if Self::KEEPS_WIDE {
                Turn::<W, M, E::Acc, E, Read, Write>::rows::<true, STREAM>(
                    (first.scratch.add(start).cast_const(), dim),
                    to,
                    rows.factors,
                    rstds,
                    shape,
                );
            } else if Read::ZIPPED == Write::ZIPPED || from.0 != to.0.cast_const() {
                Turn::<M, M, E, E, Read, Write>::rows::<true, STREAM>(
                    from,
                    to,
                    rows.factors,
                    rstds,
                    shape,
                );
            } else {
                Turn::<M, W, E, E::Acc, Read, Write>::rows::<true, false>(
                    from,
                    (first.scratch, dim),
                    rows.factors,
                    rstds,
                    shape,
                );
                for i in 0..rstds.len() {
                    let (from, to) = (first.scratch.add(i * dim), to.0.add(i * to.1));
                    convert::<W, M, E::Acc, E>(from, to, 0, end - start);
                }
            }
        }
    }

    /// dx = R^T dz, from the scratch row.
    #[inline(always)]
    unsafe fn turn_back(row: &Row<E>) {
        let (shape, scratch) = (row.shape, row.scratch);
        let Shape { dim, start, .. } = shape;
        // SAFETY: the caller guarantees rows of `head_dim` elements, in which `start..end` is the
        // rotated part; the adjoint's factors follow the forward's.
        unsafe {
            convert::<W, M, E::Acc, E>(scratch, row.to, 0, start);
            convert::<W, M, E::Acc, E>(scratch, row.to, shape.end(), dim);
            Turn::<W, M, E::Acc, E, Write, Read>::rows::<false, false>(
                (scratch.add(start), 0),
                (row.to.add(start), 0),
                row.factors.add(4 * shape.pairs),
                &[E::Acc::ZERO],
                shape,
            );
        }
    }

    /// Writes x times the row's factors into the scratch row: R x, or R^T x times the weights
    /// if there are any.
    #[inline(always)]
    unsafe fn widen<From: Order, To: Order>(
        x: *const E,
        weight: Option<*const E::Acc>,
        row: &Row<E>,
    ) {
        let (shape, scratch) = (row.shape, row.scratch);
        let Shape { dim, start, .. } = shape;
        let end = shape.end();
        // SAFETY: the caller guarantees `head_dim` elements at x and in the scratch row, in which
        // `start..end` is the rotated part, and as many weights.
        unsafe {
            if end - start < dim {
                for (at, end) in [(0, start), (end, dim)] {
                    match weight {
                        None => convert::<M, W, E, E::Acc>(x, scratch, at, end),
                        Some(w) => {
                            let one = E::Acc::from_f64(1.0);
                            normalise::<M, W, E, E::Acc>(x, scratch, w, one, at, end);
                        }
                    }
                }
            }
            Turn::<M, W, E, E::Acc, From, To>::rows::<false, false>(
                (x.add(start), 0),
                (scratch.add(start), 0),
                row.factors,
                &[E::Acc::ZERO],
                shape,
            );
        }
    }
}
