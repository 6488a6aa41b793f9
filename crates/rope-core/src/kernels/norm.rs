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
//! Before the rotation, the kernel makes h = g * w at once, with weights among the factors of R^T,
//! and what it adds to dw is h * n: the caller divides by w. That saves two of nine products of a
//! channel, which is what the backward in 16 bits is made of.
//!
//! With the norm after the rotation, y = norm(R x): the same formulas hold between z = R x and y,
//! with g = dy, and dx = R^T dz. There dw is as above.
//!
//! Data: a row is one head of one token. It is read twice, and written once; the second time it is
//! in the first-level cache. What a row is multiplied by, cos and sin times the weights before the
//! rotation, is prepared once for a token's group of heads, in the order in which the kernel meets
//! it. What the rotation makes for the norm, g or z, lies in a scratch row, widened.
//!
//! Order: the roots of the sums of a few rows, then the sums of the next rows, then what is written
//! for the first ones; meanwhile later rows are fetched. So neither the roots' latency nor memory's
//! is waited for ([`Queue`]). What pairs are multiplied by is read once for these rows.
//!
//! Sums: value i of a row is added to partial sum i mod 32, whatever the register's width, and the
//! partial sums are added in a fixed order. The sum of squares is recomputed in the backward,
//! which reads x anyway: nothing but x is kept.

use std::hint::black_box;
use std::marker::PhantomData;
use std::mem::replace;
use std::ops::Range;

use super::portable::Portable;
use super::tile::{
    Coefficients, HEADS_OUTSIDE_GROUP, LINE_BYTES, Order, Split, Zipped, starts_lines,
};
use super::vector::{self, Instructions, Memory, Register};
use crate::element::{Element, Real};
use crate::spec::{Geometry, Pairing};

/// Partial sums of a row: two of the widest registers, so that sums do not wait for each other.
const SUMS: usize = 32;
/// Registers that hold them, at most: those of four values.
const SUM_REGISTERS: usize = 8;

/// Heads whose sums are made before the first of them is written. Their stores are a burst that
/// loads wait for: eight take longer than four where stores bypass the caches.
pub(crate) const AHEAD: usize = 4;

/// Tokens whose gradients of the weights are summed before they are added to those of others.
/// Fixed, so that sums do not depend on the number of threads.
pub(crate) const BLOCK_TOKENS: usize = 32;

/// Bytes from a row that is read to the one that is fetched with it, into the second-level cache:
/// the processor's own look-ahead is too short for what is computed in between, and the first level
/// has too few lines under way at a time to wait for memory with them. The forward of f32 and f64
/// does without.
const PREFETCHED: usize = 4096;

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

impl<E: Element> Part<*const E> {
    /// Has the row of `dim` elements fetched that lies [`PREFETCHED`] bytes after one of these, be
    /// it another head's or another token's.
    #[inline(always)]
    fn prefetch<M: Memory<E>>(&self, token: usize, head: usize, dim: usize) {
        let rows = PREFETCHED.div_ceil(dim * size_of::<E>());
        let later = rows.wrapping_mul(self.token.min(self.head));
        let row = self.offset(token, head).wrapping_add(later);
        for at in (0..dim).step_by(LINE_BYTES / size_of::<E>()) {
            M::Register::prefetch::<false, _>(self.start.wrapping_add(row.wrapping_add(at)));
        }
    }
}

/// Values that the factors of a row take: four a pair, forward and adjoint.
pub(crate) fn factors_len(geometry: Geometry) -> usize {
    2 * 4 * geometry.pairs()
}

/// A block of tokens by heads of one tensor.
pub(crate) struct NormTile<E: Element> {
    /// What is, or was, normalised and rotated.
    pub(crate) x: Part<*const E>,
    /// The gradient of y, in the backward.
    pub(crate) dy: Option<Part<*const E>>,
    /// y, or dx in the backward. It may be x in the forward, and dy in the backward.
    pub(crate) to: Part<*mut E>,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Heads.
    pub(crate) heads: usize,
    /// Which channels are rotated.
    pub(crate) geometry: Geometry,
    /// Whether the norm comes after the rotation.
    pub(crate) after: bool,
    /// What is added to the mean of the squares.
    pub(crate) eps: E::Acc,
    /// The forward's c1, s1, c2, s2 of the first token.
    pub(crate) coefficients: Coefficients<E::Acc>,
    /// Values between the coefficients of heads; 0 if all heads of a token share them.
    pub(crate) head_coefficients: usize,
    /// The weights of all channels, then those of the pairs' first members, then of the second
    /// ones, as the forward reads pairs.
    pub(crate) weight: *const E::Acc,
    /// What the gradients of the weights are added to in the backward, of all channels: those, or
    /// with the norm before the rotation those times the weights.
    /// Of the first token's block of [`BLOCK_TOKENS`].
    pub(crate) dweight: *mut E::Acc,
    /// Values from one block's to the next one's.
    pub(crate) dweight_stride: usize,
    /// Tokens of the first block that are before the tile.
    pub(crate) in_block: usize,
    /// Whether to bypass the caches on writing `to`, where that is possible.
    pub(crate) stream: bool,
    /// Room for twice [`TURNS`] times [`AHEAD`] rows.
    pub(crate) scratch: *mut E::Acc,
    /// Room for [`TURNS`] times [`factors_len`] values.
    pub(crate) factors: *mut E::Acc,
}

impl<E: Element> NormTile<E> {
    /// Whether every run of every row of y starts a cache line and fills its lines.
    fn starts_lines(&self) -> bool {
        let Part { start, token, head } = self.to;
        starts_lines(
            start,
            [token, head, self.geometry.rotary_offset(), self.run()],
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

    /// Whether pointers are aligned, as far as the tile itself shows what [`norm_tile`] demands.
    fn is_sound(&self) -> bool {
        self.x.start.is_aligned()
            && self.to.start.is_aligned()
            && self.dy.is_none_or(|dy| dy.start.is_aligned())
            && self.weight.is_aligned()
            && self.scratch.is_aligned()
    }
}

/// Normalises and rotates a tile, or takes its gradients back.
///
/// # Safety
/// - the processor has the instructions of `M`
/// - `x` and `dy` are valid for reads and `to` for writes of `head_dim` elements at every token and
///   head by their strides; `to` overlaps neither, or is x in the forward, or is dy in the
///   backward, with the same strides
/// - the four coefficients are valid for as many values as there are pairs at every token and head
///   by their strides
/// - `weight` is valid for reads of `head_dim + rotary_dim` values, `scratch` for reads and writes
///   of twice [`TURNS`] times [`AHEAD`] times `head_dim`, `factors` of [`TURNS`] times
///   [`factors_len`], and in the backward `dweight` of `head_dim` for each block of tokens by its
///   stride; none overlaps anything else
pub(crate) unsafe fn norm_tile<M: Memory<E>, E: Element>(tile: &NormTile<E>) {
    debug_assert!(tile.is_sound());
    // SAFETY: the caller guarantees what the kernels demand of a tile.
    unsafe {
        match tile.geometry.pairing() {
            Pairing::Half | Pairing::Quarter => Kernel::<M, M::Wide, E, Split, Split>::tile(tile),
            Pairing::Adjacent => Kernel::<M, M::Wide, E, Zipped, Zipped>::tile(tile),
            Pairing::InterleaveHalf => Kernel::<M, M::Wide, E, Zipped, Split>::tile(tile),
        }
    }
}

/// The length of a row, and where in it which pairs are.
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
    /// The tile's; if `DIM` is not zero, that of one run of `DIM` rotated channels, which the
    /// compiler then knows.
    #[inline(always)]
    fn of<const DIM: usize, E: Element>(tile: &NormTile<E>) -> Self {
        let geometry = tile.geometry;
        let shape = Self {
            dim: geometry.head_dim(),
            start: geometry.rotary_offset(),
            pairs: geometry.pairs(),
            run: tile.run(),
        };
        if DIM == 0 {
            return shape;
        }
        debug_assert!((shape.dim, shape.run) == (DIM, DIM / 2));
        Self {
            dim: DIM,
            start: 0,
            pairs: DIM / 2,
            run: DIM / 2,
        }
    }

    /// Whether it is one run of `DIM` rotated channels.
    fn is<const DIM: usize>(&self) -> bool {
        (self.dim, self.run) == (DIM, DIM / 2)
    }

    /// The end of the rotated channels.
    fn end(&self) -> usize {
        self.start + 2 * self.pairs
    }
}

/// One row's pointers; those of the rotated part are `offset` elements further on.
struct Row<E: Element> {
    shape: Shape,
    x: *const E,
    dy: *const E,
    to: *mut E,
    /// What the pairs are multiplied by, as [`Turn::prepare`] writes it.
    factors: *const E::Acc,
    /// Room for the row.
    scratch: *mut E::Acc,
}

/// Heads of one token, at most [`AHEAD`].
#[derive(Clone)]
struct Rows<'t, E: Element> {
    tile: &'t NormTile<E>,
    shape: Shape,
    token: usize,
    heads: Range<usize>,
    /// What the pairs of these heads are multiplied by.
    factors: *mut E::Acc,
    /// Room for twice [`AHEAD`] rows.
    scratch: *mut E::Acc,
}

impl<E: Element> Rows<'_, E> {
    /// What the gradients of the weights are added to.
    #[inline(always)]
    fn dweight(&self) -> *mut E::Acc {
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
    unsafe fn row(&self, i: usize) -> Row<E> {
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
/// Of every function: the processor has the instructions of `M`; a tile is as [`norm_tile`]
/// demands, and a row is one of its rows.
struct Kernel<M, W, E, Read, Write>(PhantomData<(M, W, E, Read, Write)>);

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
    unsafe fn tile(tile: &NormTile<E>) {
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
        let (group, ahead) = match (tile.x.head > tile.x.token, own) {
            (_, true) => (1, 1),
            // Twice as many where one tensor is read, not two, as their rows share cache sets, and
            // where registers are widest: with AVX2, eight took longer than four (on Zen 3).
            (true, false) if BACKWARD || M::N < WIDEST => (HEADS_OUTSIDE_GROUP, AHEAD),
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
                // Wide elements have the forward wait for memory alone, and there the processor's
                // own look-ahead is faster (measured on Zen 4).
                if BACKWARD || size_of::<E>() < 4 {
                    tile.x.prefetch::<M>(rows.token, head, dim);
                }
                if let (true, Some(dy)) = (BACKWARD, &tile.dy) {
                    dy.prefetch::<M>(rows.token, head, dim);
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
                (true, false) if Self::READS_AGAIN => {
                    let (x, g) = ((first.x, tile.x.head), (scratch.0.cast_const(), dim));
                    let to = (first.to, tile.to.head);
                    norm_backward::<M, W, M, E, E::Acc, E, STREAM>(
                        x,
                        g,
                        to,
                        None,
                        rows.dweight(),
                        dim,
                        scales,
                    );
                }
                (true, false) => {
                    let x = (scratch.0.add(AHEAD * dim).cast_const(), dim);
                    let g = (scratch.0.cast_const(), dim);
                    let to = (first.to, tile.to.head);
                    norm_backward::<W, W, M, E::Acc, E::Acc, E, STREAM>(
                        x,
                        g,
                        to,
                        None,
                        rows.dweight(),
                        dim,
                        scales,
                    );
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

/// Rotation of a row of `A`, read by `I` in the order `Read`, into one of `B`, written by `O` in
/// the order `Write`.
///
/// A row is taken run by run, from its start: double registers of pairs, then single ones, then
/// one pair at a time. What the pairs are multiplied by is prepared in the order in which it is
/// met, so that a row needs one address for it: c1, s1, c2, s2 of a register, of both registers of
/// a double one; or, where members are swapped within a register, what an element and its
/// neighbour are multiplied by.
///
/// # Safety
/// Of every function: the processor has the instructions. `from` and `to` are valid for the tile's
/// rotated channels and do not overlap, or are one and the orders are too; factors are valid for
/// `4 * pairs` values. With `STREAM` the runs start and fill cache lines.
struct Turn<I, O, A, B, Read, Write>(PhantomData<(I, O, A, B, Read, Write)>);

impl<I, O, A, B, Read, Write> Turn<I, O, A, B, Read, Write>
where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    Read: Order,
    Write: Order,
{
    const SAME_ORDER: bool = Read::ZIPPED == Write::ZIPPED;
    const SWAPS: bool = Read::ZIPPED && Write::ZIPPED && I::SWAPS && O::SWAPS;
    const DOUBLES: bool = Self::SAME_ORDER && !Self::SWAPS && I::DOUBLES && O::DOUBLES;
    /// Bytes that [`runs`](Self::runs) writes side by side before it turns to another row.
    const WRITTEN: usize = {
        let registers = if Write::ZIPPED { 2 } else { 1 } * if Self::DOUBLES { 2 } else { 1 };
        registers * O::N * size_of::<B>()
    };

    /// Writes the factors of a row, or of the transpose if `ADJOINT`. With `WEIGHT` what the
    /// forward reads is weighted, and so is what the transpose writes.
    #[inline(always)]
    unsafe fn prepare<const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weight: *const A::Acc,
        factors: *mut A::Acc,
        shape: Shape,
    ) {
        let Shape { pairs, run, .. } = shape;
        let weights = [weight, weight.wrapping_add(pairs)];
        // SAFETY: the caller guarantees coefficients and weights of all pairs, of which the loops
        // take what is left of each run, and room for four values a pair.
        unsafe {
            for start in (0..pairs).step_by(run.max(1)) {
                let mut at = start;
                while Self::DOUBLES && at + 2 * I::N <= start + run {
                    let f = Self::factors::<2, ADJOINT, WEIGHT>(by, weights, at);
                    for (i, f) in f.into_iter().enumerate() {
                        f[0].write(factors.add(4 * at + 2 * i * I::N));
                        f[1].write(factors.add(4 * at + (2 * i + 1) * I::N));
                    }
                    at += 2 * I::N;
                }
                while at + I::N <= start + run {
                    let [[c1], [s1], [c2], [s2]] =
                        Self::factors::<1, ADJOINT, WEIGHT>(by, weights, at);
                    let mut f = [c1, s1, c2, s2];
                    if Self::SWAPS {
                        let cos = I::Register::zip(c1, c2);
                        let sin = I::Register::zip(s1, s2);
                        f = [cos[0], sin[0], cos[1], sin[1]];
                    }
                    for (i, f) in f.into_iter().enumerate() {
                        f.write(factors.add(4 * at + i * I::N));
                    }
                    at += I::N;
                }
                if at < start + run {
                    Turn::<Portable<1>, Portable<1>, A, B, Split, Split>::prepare_rest::<
                        ADJOINT,
                        WEIGHT,
                    >(by, weights, factors, at..start + run);
                }
            }
        }
    }

    /// [`prepare`](Self::prepare) of a run's last pairs, in a function of its own, compiled once
    /// for all instructions.
    #[inline(never)]
    unsafe fn prepare_rest<const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weights: [*const A::Acc; 2],
        factors: *mut A::Acc,
        pairs: Range<usize>,
    ) {
        for at in pairs {
            // SAFETY: the caller guarantees coefficients and weights of these pairs, and room.
            unsafe {
                let f = Self::factors::<1, ADJOINT, WEIGHT>(by, weights, at);
                for (i, [f]) in f.into_iter().enumerate() {
                    f.write(factors.add(4 * at + i));
                }
            }
        }
    }

    /// c1, -s1, c2, s2 of `D` times `N` pairs, one or two, from pair `at` on; y1 = c1 x1 - s1 x2
    /// and y2 = c2 x2 + s2 x1.
    #[inline(always)]
    unsafe fn factors<const D: usize, const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weights: [*const A::Acc; 2],
        at: usize,
    ) -> [[I::Register; D]; 4] {
        // SAFETY: the caller guarantees `D * N` values from `at` on in each; weights are read only
        // if they are wanted.
        unsafe {
            let c1 = Self::values::<D>(by.cos[0].add(at));
            let mut s1 = Self::values::<D>(by.sin[0].add(at));
            let c2 = Self::values::<D>(by.cos[1].add(at));
            let mut s2 = Self::values::<D>(by.sin[1].add(at));
            let negative = I::Register::signs(true);
            for i in 0..D {
                let minus_s1 = s1[i].flip(negative);
                (s1[i], s2[i]) = if ADJOINT {
                    (s2[i], minus_s1)
                } else {
                    (minus_s1, s2[i])
                };
            }
            let mut f = [c1, s1, c2, s2];
            if WEIGHT {
                let w1 = Self::values::<D>(weights[0].add(at));
                let w2 = Self::values::<D>(weights[1].add(at));
                let weights = if ADJOINT {
                    [w1, w1, w2, w2]
                } else {
                    [w1, w2, w2, w1]
                };
                for (f, w) in f.iter_mut().zip(weights) {
                    for i in 0..D {
                        f[i] = f[i].mul(w[i]);
                    }
                }
            }
            f
        }
    }

    /// `D * N` values, two times `N` in the order of [`Order::load_double`].
    #[inline(always)]
    unsafe fn values<const D: usize>(from: *const A::Acc) -> [I::Register; D] {
        // SAFETY: the caller guarantees `D * N` values.
        unsafe {
            let mut values = [I::Register::load(from); D];
            if D == 2 && !Read::ZIPPED {
                let double = I::load_coefficients_double(from);
                values.copy_from_slice(&double);
            } else {
                for (i, value) in values.iter_mut().enumerate().skip(1) {
                    *value = I::Register::load(from.add(i * I::N));
                }
            }
            values
        }
    }

    /// Rotates rows that are a number of elements apart, each times its scale if `SCALE`.
    #[inline(always)]
    unsafe fn rows<const SCALE: bool, const STREAM: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        shape: Shape,
    ) {
        let Shape { pairs, run, .. } = shape;
        // Lines that bypass the caches are filled before those of the next row are begun: a
        // processor collects few at a time, and one that it writes half full costs several times
        // as much.
        let together = if STREAM && Self::WRITTEN < LINE_BYTES {
            1
        } else {
            AHEAD
        };
        for (group, scales) in scales.chunks(together).enumerate() {
            for start in (0..pairs).step_by(run.max(1)) {
                // SAFETY: the caller guarantees as many rows as scales, of `2 * pairs` elements,
                // and four factors a pair; a run's elements are contiguous in either order, from
                // twice its first pair on.
                unsafe {
                    let row = group * together;
                    let from = (from.0.add(row * from.1 + 2 * start), from.1);
                    let to = (to.0.add(row * to.1 + 2 * start), to.1);
                    let factors = factors.add(4 * start);
                    let at = Self::runs::<SCALE, STREAM>(from, to, factors, scales, 0, run);
                    if at < run {
                        Turn::<Portable<1>, Portable<1>, A, B, Read, Write>::rest::<SCALE>(
                            from, to, factors, scales, at, run,
                        );
                    }
                }
            }
        }
    }

    /// Rotates the pairs of each row's run from `at` on as far as whole registers reach; returns
    /// where it stopped. The factors stay in registers while all rows meet them.
    #[inline(always)]
    unsafe fn runs<const SCALE: bool, const STREAM: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        mut at: usize,
        run: usize,
    ) -> usize {
        // SAFETY: the caller guarantees rows with a run of `run` pairs and four factors for each;
        // the loops take as many pairs as are left between `at` and its end.
        unsafe {
            while Self::DOUBLES && at + 2 * I::N <= run {
                let f = factors.add(4 * at);
                let [fa, fb] = [Self::four::<2>(f), Self::four::<2>(f.add(I::N))];
                for (i, scale) in scales.iter().enumerate() {
                    let scale = I::Register::splat(*scale);
                    let [a, b] = Read::load_double::<I, A>(from.0.add(i * from.1), at, run);
                    let y = [
                        Self::pairs::<SCALE>(a, fa, scale),
                        Self::pairs::<SCALE>(b, fb, scale),
                    ];
                    Write::store_double::<O, B, STREAM>(y, to.0.add(i * to.1), at, run);
                }
                at += 2 * I::N;
            }
            while at + I::N <= run {
                let f = Self::four::<1>(factors.add(4 * at));
                for (i, scale) in scales.iter().enumerate() {
                    let scale = I::Register::splat(*scale);
                    let (from, to) = (from.0.add(i * from.1), to.0.add(i * to.1));
                    if Self::SWAPS {
                        let (from, to) = (from.add(2 * at), to.add(2 * at));
                        let [a, b] = I::load_double(from);
                        let a = Self::swapped::<SCALE>(a, [f[0], f[1]], scale);
                        O::store::<STREAM>(a, to);
                        let b = Self::swapped::<SCALE>(b, [f[2], f[3]], scale);
                        O::store::<STREAM>(b, to.add(I::N));
                    } else {
                        let x = Read::load::<I, A>(from, at, run);
                        let y = Self::pairs::<SCALE>(x, f, scale);
                        Write::store::<O, B, STREAM>(y, to, at, run);
                    }
                }
                at += I::N;
            }
            at
        }
    }

    /// [`runs`](Self::runs) in a function of its own, compiled once for all instructions.
    #[inline(never)]
    unsafe fn rest<const SCALE: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        at: usize,
        run: usize,
    ) {
        // SAFETY: the caller guarantees what `runs` demands.
        unsafe { Self::runs::<SCALE, false>(from, to, factors, scales, at, run) };
    }

    /// The four factors of `N` pairs, which are `D` registers apart.
    #[inline(always)]
    unsafe fn four<const D: usize>(factors: *const A::Acc) -> [I::Register; 4] {
        // SAFETY: the caller guarantees the factors and the instructions.
        unsafe {
            let mut four = [I::Register::load(factors); 4];
            for (i, f) in four.iter_mut().enumerate().skip(1) {
                *f = I::Register::load(factors.add(i * D * I::N));
            }
            four
        }
    }

    /// Rotates `N` pairs.
    #[inline(always)]
    unsafe fn pairs<const SCALE: bool>(
        [mut x1, mut x2]: [I::Register; 2],
        [c1, s1, c2, s2]: [I::Register; 4],
        scale: I::Register,
    ) -> [I::Register; 2] {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            if SCALE {
                (x1, x2) = (x1.mul(scale), x2.mul(scale));
            }
            [x2.mul_add(s1, c1.mul(x1)), x1.mul_add(s2, c2.mul(x2))]
        }
    }

    /// Rotates the adjacent pairs of one register.
    #[inline(always)]
    unsafe fn swapped<const SCALE: bool>(
        mut x: I::Register,
        [cos, sin]: [I::Register; 2],
        scale: I::Register,
    ) -> I::Register {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            if SCALE {
                x = x.mul(scale);
            }
            x.swap().mul_add(sin, x.mul(cos))
        }
    }
}

/// Values of the widest register.
const WIDEST: usize = 16;

/// What is left of the partial sums of rows, of squares and of h * x, when each row's are added up
/// to one register.
#[repr(align(64))]
struct Partials<A>([[[A; WIDEST]; AHEAD]; 2]);

/// The sums of rows' squares and of h * x; then what rows are multiplied by, see [`scales`]. Of
/// rows that there are not, any number.
type Scales<A> = [[A; AHEAD]; 2];

/// Turns of rows under way at a time, at most: one whose sums are made, one whose roots are taken,
/// and one that is written.
pub(crate) const TURNS: usize = 3;

/// Rows whose sums are made, and whose results are not written yet.
struct Queue<'t, E: Element, const BACKWARD: bool, const AFTER: bool> {
    /// The latest rows, then those before them.
    rows: [Option<Rows<'t, E>>; 2],
    /// The sums of the rows before the latest, added up.
    totals: Scales<E::Acc>,
}

impl<'t, E: Element, const BACKWARD: bool, const AFTER: bool> Queue<'t, E, BACKWARD, AFTER> {
    /// Whether sums are added up in one turn, and their roots taken in the next: the processor
    /// keeps what waits for a chain of instructions, and there is room for one chain or the other,
    /// not for both, beside what narrow elements take to convert. Those of 32 bits and the backward
    /// have more in between; there rows that are under way longer only leave the first-level cache.
    const APART: bool = !BACKWARD && !AFTER && size_of::<E>() < 4;
    /// Turns of rows under way at a time.
    const UNDER_WAY: usize = if Self::APART { TURNS } else { 2 };

    fn new() -> Self {
        Self {
            rows: [None, None],
            totals: [[E::Acc::ZERO; AHEAD]; 2],
        }
    }

    /// Takes the next rows, whose sums are to be made now; returns the rows that are due and their
    /// scales.
    ///
    /// # Safety
    /// The processor has the instructions of `M`, whose registers wrote the partial sums.
    #[inline(always)]
    unsafe fn turn<M: Memory<E>>(
        &mut self,
        rows: Option<Rows<'t, E>>,
        partials: &Partials<E::Acc>,
        tile: &NormTile<E>,
        dim: usize,
    ) -> (Option<Rows<'t, E>>, Scales<E::Acc>) {
        let latest = replace(&mut self.rows[0], rows);
        // The compiler would move these to where they are used. Apart from each other, as it would
        // read them across the ends of what it wrote.
        // SAFETY: the caller guarantees the instructions.
        let totals = unsafe { totals::<M, E>(partials) };
        if Self::APART {
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
unsafe fn totals<M: Memory<E>, E: Element>(partials: &Partials<E::Acc>) -> Scales<E::Acc> {
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

/// The partial sums in one register: each half is added to the other until one is left. If they are
/// `unzipped`, every two registers hold those of values at even and at odd indices; the last two
/// are brought into the order of the values.
///
/// # Safety
/// The processor has the instructions of `R`.
#[inline(always)]
unsafe fn total<R: Register>(mut sums: [R; SUM_REGISTERS], unzipped: bool) -> R {
    const { assert!(R::N < SUMS) };
    let mut half = SUMS / R::N / 2;
    // SAFETY: the caller guarantees the instructions.
    unsafe {
        while half > 1 {
            for i in 0..half {
                sums[i] = sums[i].add(sums[i + half]);
            }
            half /= 2;
        }
        let [first, second] = if unzipped {
            R::zip(sums[0], sums[1])
        } else {
            [sums[0], sums[1]]
        };
        first.add(second)
    }
}

/// The last elements of a row, fewer than [`SUMS`], and zeros.
///
/// # Safety
/// `from` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn padded<E: Element>(from: *const E, len: usize) -> [E; SUMS] {
    let mut all = [E::narrow(E::Acc::ZERO); SUMS];
    for (i, to) in all.iter_mut().take(len).enumerate() {
        // SAFETY: the caller guarantees `len` elements.
        *to = unsafe { from.add(i).read() };
    }
    all
}

/// The sum of the squares of `len` values, as partial sums of one register.
///
/// # Safety
/// The processor has the instructions of `M`; `x` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn squares<M: Memory<E>, E: Element>(
    x: *const E,
    wide: Option<*mut E::Acc>,
    len: usize,
) -> M::Register {
    const { assert!(SUMS.is_multiple_of(M::N) && SUMS / M::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loop takes what is left, and the
    // instructions.
    unsafe {
        let mut sums = [M::Register::splat(E::Acc::ZERO); SUM_REGISTERS];
        let rest = len % SUMS;
        for at in (0..len - rest).step_by(SUMS) {
            let wide = wide.map(|wide| wide.wrapping_add(at));
            add_squares::<M, E>(&mut sums, x.add(at), wide);
        }
        if rest > 0 {
            let at = len - rest;
            let x = padded(x.add(at), rest);
            let mut values = [E::Acc::ZERO; SUMS];
            add_squares::<M, E>(&mut sums, x.as_ptr(), Some(values.as_mut_ptr()));
            if let Some(wide) = wide {
                wide.add(at).copy_from_nonoverlapping(values.as_ptr(), rest);
            }
        }
        total(sums, M::UNZIPS)
    }
}

/// Adds the squares of [`SUMS`] values to the partial sums.
///
/// # Safety
/// The processor has the instructions of `M`; `x` is valid for reads of `SUMS` elements.
#[inline(always)]
unsafe fn add_squares<M: Memory<E>, E: Element>(
    sums: &mut [M::Register; SUM_REGISTERS],
    x: *const E,
    wide: Option<*mut E::Acc>,
) {
    for (k, sums) in sums[..SUMS / M::N].chunks_exact_mut(2).enumerate() {
        // SAFETY: the caller guarantees `SUMS` elements, and the instructions.
        unsafe {
            let x = two::<M, E>(x.add(2 * k * M::N), M::UNZIPS);
            for (i, (sum, x)) in sums.iter_mut().zip(x).enumerate() {
                if let Some(wide) = wide {
                    x.write(wide.add((2 * k + i) * M::N));
                }
                *sum = x.mul_add(x, *sum);
            }
        }
    }
}

/// The sums of x * x, and of h * x, as partial sums of one register, where h is g, or g * w if
/// there are weights; writes x widened if there is room.
///
/// # Safety
/// The processor has the instructions; `x`, `g` and `weight` are valid for reads of `len` elements,
/// `wide` for writes of as many.
#[inline(always)]
unsafe fn products<X, G, A, B>(
    x: *const A,
    g: *const B,
    weight: Option<*const A::Acc>,
    wide: Option<*mut A::Acc>,
    len: usize,
) -> [X::Register; 2]
where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    const { assert!(SUMS.is_multiple_of(X::N) && SUMS / X::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loop takes what is left, and the
    // instructions.
    unsafe {
        let mut sums = [[X::Register::splat(A::Acc::ZERO); SUM_REGISTERS]; 2];
        let rest = len % SUMS;
        for at in (0..len - rest).step_by(SUMS) {
            let weight = weight.map(|weight| weight.wrapping_add(at));
            let wide = wide.map(|wide| wide.wrapping_add(at));
            add_products::<X, G, A, B>(&mut sums, x.add(at), g.add(at), weight, wide);
        }
        debug_assert!(rest == 0 || !unzips::<X, G, A, B>());
        if rest > 0 {
            let at = len - rest;
            let (x, g) = (padded(x.add(at), rest), padded(g.add(at), rest));
            let weight = weight.map(|weight| padded(weight.add(at), rest));
            let weight = weight.as_ref().map(|weight| weight.as_ptr());
            let mut values = [A::Acc::ZERO; SUMS];
            let to = Some(values.as_mut_ptr());
            add_products::<X, G, A, B>(&mut sums, x.as_ptr(), g.as_ptr(), weight, to);
            if let Some(wide) = wide {
                wide.add(at).copy_from_nonoverlapping(values.as_ptr(), rest);
            }
        }
        let apart = unzips::<X, G, A, B>();
        [total(sums[0], apart), total(sums[1], apart)]
    }
}

/// Whether values at even and at odd indices stay apart: both operands have them so.
const fn unzips<X: Memory<A>, G: Memory<B>, A: Element, B: Element>() -> bool {
    X::UNZIPS && G::UNZIPS
}

/// Adds [`SUMS`] values to the sums of [`products`].
///
/// # Safety
/// As [`products`] of `SUMS` elements.
#[inline(always)]
unsafe fn add_products<X, G, A, B>(
    [squares, products]: &mut [[X::Register; SUM_REGISTERS]; 2],
    x: *const A,
    g: *const B,
    weight: Option<*const A::Acc>,
    wide: Option<*mut A::Acc>,
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // By index: the compiler then keeps the sums in registers.
    for k in (0..SUMS / X::N).step_by(2) {
        // SAFETY: the caller guarantees `SUMS` elements, and the instructions.
        unsafe {
            let apart = unzips::<X, G, A, B>();
            let x = two::<X, A>(x.add(k * X::N), apart);
            let g = two::<G, B>(g.add(k * X::N), apart);
            for i in 0..2 {
                let at = (k + i) * X::N;
                if let Some(wide) = wide {
                    x[i].write(wide.add(at));
                }
                squares[k + i] = x[i].mul_add(x[i], squares[k + i]);
                let h = match weight {
                    Some(weight) => g[i].mul(X::Register::load(weight.add(at))),
                    None => g[i],
                };
                products[k + i] = h.mul_add(x[i], products[k + i]);
            }
        }
    }
}

/// Two registers of `2 N` elements: in their order, or those at even and at odd indices apart.
///
/// # Safety
/// The processor has the instructions; `x` is valid for reads of `2 N` elements.
#[inline(always)]
unsafe fn two<M: Memory<E>, E: Element>(x: *const E, apart: bool) -> [M::Register; 2] {
    // SAFETY: the caller guarantees the elements and the instructions.
    unsafe {
        if apart {
            M::load_pairs(x)
        } else {
            [M::load(x), M::load(x.add(M::N))]
        }
    }
}

/// Writes x * rstd * w for the channels from `at` to `end`.
///
/// # Safety
/// The processor has the instructions; `x` and `weight` are valid for reads and `to` for writes of
/// these channels; `to` is x, or does not overlap it.
#[inline(always)]
unsafe fn normalise<I, O, A, B>(
    x: *const A,
    to: *mut B,
    weight: *const A::Acc,
    rstd: A::Acc,
    mut at: usize,
    end: usize,
) where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels, of which the loops take what is left.
    unsafe {
        let all = I::Register::splat(rstd);
        while at + I::N <= end {
            let x = I::load(x.add(at)).mul(all);
            O::store::<false>(x.mul(I::Register::load(weight.add(at))), to.add(at));
            at += I::N;
        }
        while at < end {
            let x = x.add(at).read().widen() * rstd;
            to.add(at).write(B::narrow(x * weight.add(at).read()));
            at += 1;
        }
    }
}

/// Widens or rounds the channels from `at` to `end`.
///
/// # Safety
/// The processor has the instructions; `x` is valid for reads and `to` for writes of these
/// channels, and they do not overlap.
#[inline(always)]
unsafe fn convert<I, O, A, B>(x: *const A, to: *mut B, mut at: usize, end: usize)
where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels, of which the loops take what is left.
    unsafe {
        while at + I::N <= end {
            O::store::<false>(I::load(x.add(at)), to.add(at));
            at += I::N;
        }
        while at < end {
            to.add(at).write(B::narrow(x.add(at).read().widen()));
            at += 1;
        }
    }
}

/// The backward of x * rstd * w alone, of rows a number of elements apart: writes
/// dx = rstd * (h - n * mean(h * n)) = rstd * h + x * by_x with n = x * rstd, and adds
/// g * n = rstd * g * x to dw; h is g, or g * w if there are weights.
///
/// # Safety
/// The processor has the instructions; there are as many rows as `scales`, rstd and by_x; in
/// each row `x` and `g` are valid for reads and `to` for writes of `dim` elements; `to` is one of
/// them, or overlaps neither; there are `dim` weights and gradients of weights.
#[inline(always)]
unsafe fn norm_backward<X, G, O, A, B, C, const STREAM: bool>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    dim: usize,
    scales: [&[A::Acc]; 2],
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    O: Memory<C, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    let whole = dim - dim % X::N;
    // SAFETY: the caller guarantees rows of `dim` elements, and as many weights and gradients of
    // weights; the second loop takes what the first one leaves of them.
    unsafe {
        let fours = if unzips::<X, G, A, B>() || STREAM && 2 * X::N * size_of::<C>() < LINE_BYTES {
            dim - dim % (4 * X::N)
        } else {
            0
        };
        debug_assert!(fours == dim || !unzips::<X, G, A, B>());
        for at in (0..fours).step_by(4 * X::N) {
            channels::<X, G, O, A, B, C, 4, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        let doubles = dim - dim % (2 * X::N);
        for at in (fours..doubles).step_by(2 * X::N) {
            channels::<X, G, O, A, B, C, 2, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        for at in (doubles..whole).step_by(X::N) {
            channels::<X, G, O, A, B, C, 1, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        if whole < dim {
            rest_of_channels(x, g, to, weight, dweight, scales, whole..dim);
        }
    }
}

/// [`norm_backward`] of a row's last channels, in a function of its own, compiled once for all
/// instructions.
///
/// # Safety
/// As [`norm_backward`]; the channels are within `dim`.
#[inline(never)]
unsafe fn rest_of_channels<A, B, C>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    scales: [&[A::Acc]; 2],
    channels: Range<usize>,
) where
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    type One = Portable<1>;
    for at in channels {
        // SAFETY: the caller guarantees the channel in every row, in the weights and in their
        // gradients.
        unsafe {
            self::channels::<One, One, One, A, B, C, 1, false>(
                x, g, to, weight, dweight, scales, at,
            );
        }
    }
}

/// [`norm_backward`] of `D` times `N` channels: one, two or four; four if those at even and at odd
/// indices are apart, or if it takes as many to fill a cache line.
///
/// # Safety
/// As [`norm_backward`]; the channels from `at` on are within `dim`.
#[inline(always)]
unsafe fn channels<X, G, O, A, B, C, const D: usize, const STREAM: bool>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    scales: [&[A::Acc]; 2],
    at: usize,
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    O: Memory<C, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels in every row, in the weights and in their
    // gradients, and the instructions.
    unsafe {
        let zero = X::Register::splat(A::Acc::ZERO);
        let (mut w, mut dw) = ([zero; D], [zero; D]);
        for d in 0..D {
            if let Some(weight) = weight {
                w[d] = X::Register::load(weight.add(at + d * X::N));
            }
            dw[d] = X::Register::load(dweight.add(at + d * X::N).cast_const());
        }
        let apart = unzips::<X, G, A, B>();
        if apart && D > 1 {
            debug_assert!(weight.is_none());
            for d in (0..D).step_by(2) {
                let both = dweight.add(at + d * X::N).cast_const();
                [dw[d], dw[d + 1]] = X::load_coefficients_double(both);
            }
        }
        for (i, (rstd, by_x)) in scales[0].iter().zip(scales[1]).enumerate() {
            let (rstd, by_x) = (X::Register::splat(*rstd), X::Register::splat(*by_x));
            let (from, of) = (x.0.add(i * x.1 + at), g.0.add(i * g.1 + at));
            let (mut x, mut g) = ([zero; D], [zero; D]);
            if D == 1 {
                (x[0], g[0]) = (X::load(from), G::load(of));
            } else {
                for d in (0..D).step_by(2) {
                    [x[d], x[d + 1]] = two::<X, A>(from.add(d * X::N), apart);
                    [g[d], g[d + 1]] = two::<G, B>(of.add(d * X::N), apart);
                }
            }
            let mut dx = [zero; D];
            for d in 0..D {
                let g = g[d].mul(rstd);
                dw[d] = g.mul_add(x[d], dw[d]);
                dx[d] = match weight {
                    Some(_) => g.mul_add(w[d], x[d].mul(by_x)),
                    None => x[d].mul_add(by_x, g),
                };
            }
            let to = to.0.add(i * to.1 + at);
            match D {
                4 if apart => {
                    O::store_pairs_double::<STREAM>([[dx[0], dx[1]], [dx[2], dx[3]]], to);
                }
                4 => {
                    O::store_both::<STREAM>([dx[0], dx[1]], to);
                    O::store_both::<STREAM>([dx[2], dx[3]], to.add(2 * X::N));
                }
                2 => O::store_both::<STREAM>([dx[0], dx[1]], to),
                _ => O::store::<STREAM>(dx[0], to),
            }
        }
        if apart && D > 1 {
            for d in (0..D).step_by(2) {
                [dw[d], dw[d + 1]] = X::Register::zip(dw[d], dw[d + 1]);
            }
        }
        for (d, dw) in dw.into_iter().enumerate() {
            dw.write(dweight.add(at + d * X::N));
        }
    }
}
