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
//! With the norm after the rotation, y = norm(R x): the same formulas hold between z = R x and y,
//! with g = dy, and dx = R^T dz.
//!
//! Data: a row is one head of one token. It is read twice, and written once; the second time it is
//! in the first-level cache. The norm is taken of x before the products with cos and sin, as a
//! composition would: in f32 and f64 the results are bit for bit those of the norm followed by the
//! rotation. What the rotation makes for the norm, g or z, lies in a scratch row, widened.
//!
//! Sums: value i of a row is added to partial sum i mod 32, whatever the register's width, and the
//! partial sums are added in a fixed order. The sum of squares is recomputed in the backward,
//! which reads x anyway: nothing but x is kept.

use std::marker::PhantomData;

use super::portable::Portable;
use super::tile::{Coefficients, HEADS_OUTSIDE_GROUP, Order, Split, Zipped, starts_lines};
use super::vector::{Memory, Register};
use crate::element::{Element, Real};
use crate::spec::{Geometry, Pairing};

/// Partial sums of a row: two of the widest registers, so that sums do not wait for each other.
const SUMS: usize = 32;
/// Registers that hold them, at most: those of four values.
const SUM_REGISTERS: usize = 8;

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
    /// The gradients of the weights of all channels, to be added to; used in the backward.
    pub(crate) dweight: *mut E::Acc,
    /// Whether to bypass the caches on writing y, where that is possible.
    pub(crate) stream: bool,
    /// Room for a row.
    pub(crate) scratch: *mut E::Acc,
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
///   of `head_dim`, and in the backward `dweight` too; neither overlaps anything else
#[inline(always)]
pub(crate) unsafe fn norm_tile<M: Memory<E>, E: Element>(tile: &NormTile<E>) {
    debug_assert!(tile.is_sound());
    // SAFETY: the caller guarantees what the kernels demand of a tile.
    unsafe {
        match tile.geometry.pairing() {
            Pairing::Half | Pairing::Quarter => Kernel::<M, E, Split, Split>::tile(tile),
            Pairing::Adjacent => Kernel::<M, E, Zipped, Zipped>::tile(tile),
            Pairing::InterleaveHalf => Kernel::<M, E, Zipped, Split>::tile(tile),
        }
    }
}

/// One row's pointers; those of the rotated part are `offset` elements further on.
struct Row<'t, E: Element> {
    tile: &'t NormTile<E>,
    x: *const E,
    dy: *const E,
    to: *mut E,
    coefficients: Coefficients<E::Acc>,
}

/// The algorithm for one way in which the forward reads and writes pairs.
///
/// # Safety
/// Of every function: the processor has the instructions of `M`; a tile is as [`norm_tile`]
/// demands, and a row is one of its rows.
struct Kernel<M, E, Read, Write>(PhantomData<(M, E, Read, Write)>);

// No closures around loads, stores and arithmetic: see `tile`.
impl<M: Memory<E>, E: Element, Read: Order, Write: Order> Kernel<M, E, Read, Write> {
    #[inline(always)]
    unsafe fn tile(tile: &NormTile<E>) {
        let stream = M::Register::STREAMS
            && Read::ZIPPED == Write::ZIPPED
            && tile.stream
            && tile.starts_lines();
        // SAFETY: the caller guarantees the tile and the instructions; `stream` implies that runs
        // start and fill cache lines.
        unsafe {
            match (tile.dy, tile.after) {
                (None, false) if stream => Self::each_row::<false, false, true>(tile),
                (None, false) => Self::each_row::<false, false, false>(tile),
                (None, true) => Self::each_row::<false, true, false>(tile),
                (Some(_), false) => Self::each_row::<true, false, false>(tile),
                (Some(_), true) => Self::each_row::<true, true, false>(tile),
            }
            if stream {
                M::Register::fence();
            }
        }
    }

    /// Takes the rows in memory order, a group of heads at a time, as the rotation does.
    #[inline(always)]
    unsafe fn each_row<const BACKWARD: bool, const AFTER: bool, const STREAM: bool>(
        tile: &NormTile<E>,
    ) {
        let group = if tile.x.head <= tile.x.token {
            tile.heads
        } else {
            HEADS_OUTSIDE_GROUP
        };
        let dy = tile.dy.unwrap_or(tile.x);
        let mut first = 0;
        while first < tile.heads {
            let mut coefficients = tile.coefficients;
            for token in 0..tile.tokens {
                for head in first..(first + group).min(tile.heads) {
                    // SAFETY: the caller guarantees that the strides reach only into the tensors
                    // for each of the tile's tokens and heads.
                    unsafe {
                        let row = Row {
                            tile,
                            x: tile.x.start.add(tile.x.offset(token, head)),
                            dy: dy.start.add(dy.offset(token, head)),
                            to: tile.to.start.add(tile.to.offset(token, head)),
                            coefficients: coefficients.skip(head * tile.head_coefficients),
                        };
                        match (BACKWARD, AFTER) {
                            (false, false) => Self::before::<STREAM>(&row),
                            (false, true) => Self::after(&row),
                            (true, false) => Self::before_backward(&row),
                            (true, true) => Self::after_backward(&row),
                        }
                    }
                }
                coefficients = coefficients.skip(coefficients.stride);
            }
            first += group;
        }
    }

    /// y = R (x * rstd * w).
    #[inline(always)]
    unsafe fn before<const STREAM: bool>(row: &Row<'_, E>) {
        let (tile, geometry) = (row.tile, row.tile.geometry);
        let (start, dim) = (geometry.rotary_offset(), geometry.head_dim());
        let end = start + geometry.rotary_dim();
        // SAFETY: the caller guarantees rows of `head_dim` elements, in which `start..end` is the
        // rotated part, weights for all of them, and a scratch row.
        unsafe {
            let rstd = rstd(squares::<M, E>(row.x, dim), tile);
            normalise::<M, M, E, E>(row.x, row.to, tile.weight, rstd, 0, start);
            normalise::<M, M, E, E>(row.x, row.to, tile.weight, rstd, end, dim);
            let by = Factors {
                coefficients: row.coefficients,
                weight: tile.weight.add(dim),
                rstd,
            };
            let (from, to) = (row.x.add(start), row.to.add(start));
            if Read::ZIPPED == Write::ZIPPED || from != to.cast_const() {
                Turn::<M, M, E, E, Read, Write, false, true, STREAM>::row(from, to, by, tile);
            } else {
                Turn::<M, M::Wide, E, E::Acc, Read, Write, false, true, false>::row(
                    from,
                    tile.scratch,
                    by,
                    tile,
                );
                convert::<M::Wide, M, E::Acc, E>(tile.scratch, to, 0, end - start);
            }
        }
    }

    /// y = norm(R x) * w.
    #[inline(always)]
    unsafe fn after(row: &Row<'_, E>) {
        let (tile, dim) = (row.tile, row.tile.geometry.head_dim());
        // SAFETY: the caller guarantees rows of `head_dim` elements, weights for all of them, and a
        // scratch row, which holds z here.
        unsafe {
            Self::widen::<Read, Write, false>(row.x, row);
            let rstd = rstd(squares::<M::Wide, E::Acc>(tile.scratch, dim), tile);
            normalise::<M::Wide, M, E::Acc, E>(tile.scratch, row.to, tile.weight, rstd, 0, dim);
        }
    }

    /// dx of y = R (x * rstd * w), and its share of dw.
    #[inline(always)]
    unsafe fn before_backward(row: &Row<'_, E>) {
        // SAFETY: the caller guarantees rows of `head_dim` elements, as many weights and their
        // gradients, and a scratch row, which holds g = R^T dy here; dy is not read after that.
        unsafe {
            Self::widen::<Write, Read, true>(row.dy, row);
            norm_backward::<M, M::Wide, M, E, E::Acc, E>(row.x, row.tile.scratch, row.to, row.tile);
        }
    }

    /// dx of y = norm(R x) * w, and its share of dw.
    #[inline(always)]
    unsafe fn after_backward(row: &Row<'_, E>) {
        let (tile, geometry) = (row.tile, row.tile.geometry);
        let (start, scratch) = (geometry.rotary_offset(), row.tile.scratch);
        let end = start + geometry.rotary_dim();
        // SAFETY: the caller guarantees rows of `head_dim` elements, as many weights and their
        // gradients, and a scratch row, which holds first z = R x, then dz; dy is not read after
        // that.
        unsafe {
            Self::widen::<Read, Write, false>(row.x, row);
            norm_backward::<M::Wide, M, M::Wide, E::Acc, E, E::Acc>(scratch, row.dy, scratch, tile);
            convert::<M::Wide, M, E::Acc, E>(scratch, row.to, 0, start);
            convert::<M::Wide, M, E::Acc, E>(scratch, row.to, end, geometry.head_dim());
            Turn::<M::Wide, M, E::Acc, E, Write, Read, true, false, false>::row(
                scratch.add(start),
                row.to.add(start),
                Factors::of(row),
                tile,
            );
        }
    }

    /// Writes R x, or R^T x if `ADJOINT`, into the scratch row.
    #[inline(always)]
    unsafe fn widen<From: Order, To: Order, const ADJOINT: bool>(x: *const E, row: &Row<'_, E>) {
        let (tile, geometry) = (row.tile, row.tile.geometry);
        let (start, scratch) = (geometry.rotary_offset(), row.tile.scratch);
        let end = start + geometry.rotary_dim();
        // SAFETY: the caller guarantees `head_dim` elements at x and in the scratch row, in which
        // `start..end` is the rotated part.
        unsafe {
            convert::<M, M::Wide, E, E::Acc>(x, scratch, 0, start);
            convert::<M, M::Wide, E, E::Acc>(x, scratch, end, geometry.head_dim());
            Turn::<M, M::Wide, E, E::Acc, From, To, ADJOINT, false, false>::row(
                x.add(start),
                scratch.add(start),
                Factors::of(row),
                tile,
            );
        }
    }
}

/// What pairs are multiplied by: c1, s1, c2, s2; and, if they are normalised, the weights of first
/// members, those of second ones, and rstd.
#[derive(Clone, Copy)]
struct Factors<A> {
    coefficients: Coefficients<A>,
    weight: *const A,
    rstd: A,
}

impl<A: Real> Factors<A> {
    /// Those of a row that is not normalised.
    fn of<E: Element<Acc = A>>(row: &Row<'_, E>) -> Self {
        Self {
            coefficients: row.coefficients,
            weight: row.tile.weight,
            rstd: A::ZERO,
        }
    }
}

/// Rotation of a row of `A`, read by `I` in the order `Read`, into one of `B`, written by `O` in
/// the order `Write`; of x * rstd * w if `NORM`, by the transpose if `ADJOINT`, past the caches if
/// `STREAM`.
///
/// # Safety
/// Of every function: the processor has the instructions. `from` and `to` are valid for the tile's
/// rotated channels and do not overlap, or are one and the orders are too; the coefficients are
/// valid for all pairs, with `NORM` the weights for twice as many. With `STREAM` the runs start and
/// fill cache lines.
#[allow(
    clippy::type_complexity,
    reason = "a list of what the algorithm is generic in"
)]
struct Turn<I, O, A, B, Read, Write, const ADJOINT: bool, const NORM: bool, const STREAM: bool>(
    PhantomData<(I, O, A, B, Read, Write)>,
);

impl<I, O, A, B, Read, Write, const ADJOINT: bool, const NORM: bool, const STREAM: bool>
    Turn<I, O, A, B, Read, Write, ADJOINT, NORM, STREAM>
where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    Read: Order,
    Write: Order,
{
    /// Rotates a row run by run.
    #[inline(always)]
    unsafe fn row<E: Element>(from: *const A, to: *mut B, by: Factors<A::Acc>, tile: &NormTile<E>) {
        let (pairs, run) = (tile.geometry.pairs(), tile.run());
        let mut start = 0;
        while start < pairs {
            // SAFETY: the caller guarantees `2 * pairs` elements; a run's are contiguous in either
            // order, from twice its first pair on.
            unsafe {
                let (from, to) = (from.add(2 * start), to.add(2 * start));
                let at = Self::run(from, to, by, [start, pairs], 0, run);
                Turn::<Portable<1>, Portable<1>, A, B, Read, Write, ADJOINT, NORM, false>::run(
                    from,
                    to,
                    by,
                    [start, pairs],
                    at,
                    run,
                );
            }
            start += run;
        }
    }

    /// Rotates the pairs of a run, which starts at pair `start` of `pairs`, from `at` on as far as
    /// whole registers reach; returns where it stopped.
    #[inline(always)]
    unsafe fn run(
        from: *const A,
        to: *mut B,
        by: Factors<A::Acc>,
        [start, pairs]: [usize; 2],
        mut at: usize,
        run: usize,
    ) -> usize {
        // SAFETY: the caller guarantees a run of `run` pairs with coefficients and weights for
        // each; the loops take as many pairs as are left between `at` and its end.
        unsafe {
            while I::DOUBLES && O::DOUBLES && Read::ZIPPED == Write::ZIPPED && at + 2 * I::N <= run
            {
                let f = Self::factors_double(by, start + at, pairs);
                let [a, b] = Read::load_double::<I, A>(from, at, run);
                let y = [
                    Self::pairs(a, f.map(|f| f[0]), by.rstd),
                    Self::pairs(b, f.map(|f| f[1]), by.rstd),
                ];
                Write::store_double::<O, B, STREAM>(y, to, at, run);
                at += 2 * I::N;
            }
            while at + I::N <= run {
                let f = Self::factors(by, start + at, pairs);
                let x = Read::load::<I, A>(from, at, run);
                let y = Self::pairs(x, f, by.rstd);
                Write::store::<O, B, STREAM>(y, to, at, run);
                at += I::N;
            }
            at
        }
    }

    /// c1, s1, c2, s2, w1, w2 of `N` pairs from pair `at` on.
    #[inline(always)]
    unsafe fn factors(by: Factors<A::Acc>, at: usize, pairs: usize) -> [I::Register; 6] {
        let Coefficients { cos, sin, .. } = by.coefficients;
        // SAFETY: the caller guarantees `N` values from `at` on in each; weights are read only if
        // there are those of pairs.
        unsafe {
            let c1 = I::Register::load(cos[0].add(at));
            let s1 = I::Register::load(sin[0].add(at));
            let c2 = I::Register::load(cos[1].add(at));
            let s2 = I::Register::load(sin[1].add(at));
            if !NORM {
                return [c1, s1, c2, s2, c1, c1];
            }
            let w1 = I::Register::load(by.weight.add(at));
            let w2 = I::Register::load(by.weight.add(pairs + at));
            [c1, s1, c2, s2, w1, w2]
        }
    }

    /// [`factors`](Self::factors) of two times `N` pairs, in the order of [`Order::load_double`].
    #[inline(always)]
    unsafe fn factors_double(
        by: Factors<A::Acc>,
        at: usize,
        pairs: usize,
    ) -> [[I::Register; 2]; 6] {
        let Coefficients { cos, sin, .. } = by.coefficients;
        // SAFETY: the caller guarantees `2 N` values from `at` on in each; weights are read only if
        // there are those of pairs.
        unsafe {
            let c1 = Self::values_double(cos[0].add(at));
            let s1 = Self::values_double(sin[0].add(at));
            let c2 = Self::values_double(cos[1].add(at));
            let s2 = Self::values_double(sin[1].add(at));
            if !NORM {
                return [c1, s1, c2, s2, c1, c1];
            }
            let w1 = Self::values_double(by.weight.add(at));
            let w2 = Self::values_double(by.weight.add(pairs + at));
            [c1, s1, c2, s2, w1, w2]
        }
    }

    #[inline(always)]
    unsafe fn values_double(from: *const A::Acc) -> [I::Register; 2] {
        // SAFETY: the caller guarantees `2 N` values.
        unsafe {
            if Read::ZIPPED {
                [I::Register::load(from), I::Register::load(from.add(I::N))]
            } else {
                I::load_coefficients_double(from)
            }
        }
    }

    /// Rotates `N` pairs.
    #[inline(always)]
    unsafe fn pairs(
        [x1, x2]: [I::Register; 2],
        [c1, s1, c2, s2, w1, w2]: [I::Register; 6],
        rstd: A::Acc,
    ) -> [I::Register; 2] {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            let (x1, x2) = if NORM {
                let rstd = I::Register::splat(rstd);
                (x1.mul(rstd).mul(w1), x2.mul(rstd).mul(w2))
            } else {
                (x1, x2)
            };
            if ADJOINT {
                [c1.mul(x1).add(s2.mul(x2)), c2.mul(x2).sub(s1.mul(x1))]
            } else {
                [c1.mul(x1).sub(s1.mul(x2)), c2.mul(x2).add(s2.mul(x1))]
            }
        }
    }
}

/// 1 / sqrt(mean + eps), from the sum of a row's squares.
#[inline(always)]
fn rstd<E: Element>(squares: E::Acc, tile: &NormTile<E>) -> E::Acc {
    let mean = squares.to_f64() / tile.geometry.head_dim() as f64;
    E::Acc::from_f64(1.0 / (mean + tile.eps.to_f64()).sqrt())
}

/// The sum of partial sums: each half is added to the other until one is left.
#[inline(always)]
fn total<A: Real>(mut sums: [A; SUMS]) -> A {
    let mut half = SUMS / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] = sums[i] + sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Adds the sums in registers to those of an array.
///
/// # Safety
/// The processor has the instructions of `R`.
#[inline(always)]
unsafe fn spread<R: Register>(sums: [R; SUM_REGISTERS]) -> [R::Value; SUMS] {
    let mut all = [R::Value::ZERO; SUMS];
    for (k, sum) in sums.into_iter().take(SUMS / R::N).enumerate() {
        // SAFETY: `SUMS / N` registers of N values fill the array; the caller guarantees the
        // instructions.
        unsafe { sum.write(all.as_mut_ptr().add(k * R::N)) };
    }
    all
}

/// The sum of the squares of `len` values.
///
/// # Safety
/// The processor has the instructions of `M`; `x` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn squares<M: Memory<E>, E: Element>(x: *const E, len: usize) -> E::Acc {
    const { assert!(SUMS.is_multiple_of(M::N) && SUMS / M::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loops take what is left.
    unsafe {
        let mut sums = [M::Register::splat(E::Acc::ZERO); SUM_REGISTERS];
        let mut at = 0;
        while at + SUMS <= len {
            for (k, sum) in sums.iter_mut().take(SUMS / M::N).enumerate() {
                let x = M::load(x.add(at + k * M::N));
                *sum = sum.add(x.mul(x));
            }
            at += SUMS;
        }
        let mut all = spread(sums);
        for (i, sum) in all.iter_mut().take(len - at).enumerate() {
            let x = x.add(at + i).read().widen();
            *sum = *sum + x * x;
        }
        total(all)
    }
}

/// The sums of x * x, and of g * w * x.
///
/// # Safety
/// The processor has the instructions; `x`, `g` and `weight` are valid for reads of `len` elements.
#[inline(always)]
unsafe fn products<X, G, A, B>(
    x: *const A,
    g: *const B,
    weight: *const A::Acc,
    len: usize,
) -> [A::Acc; 2]
where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    const { assert!(SUMS.is_multiple_of(X::N) && SUMS / X::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loops take what is left.
    unsafe {
        let mut squares = [X::Register::splat(A::Acc::ZERO); SUM_REGISTERS];
        let mut products = squares;
        let mut at = 0;
        while at + SUMS <= len {
            let sums = squares.iter_mut().zip(&mut products);
            for (k, (square, product)) in sums.take(SUMS / X::N).enumerate() {
                let i = at + k * X::N;
                let (x, g) = (X::load(x.add(i)), G::load(g.add(i)));
                *square = square.add(x.mul(x));
                *product = product.add(g.mul(X::Register::load(weight.add(i))).mul(x));
            }
            at += SUMS;
        }
        let (mut squares, mut products) = (spread(squares), spread(products));
        for i in 0..len - at {
            let (x, g) = (x.add(at + i).read().widen(), g.add(at + i).read().widen());
            squares[i] = squares[i] + x * x;
            products[i] = products[i] + g * weight.add(at + i).read() * x;
        }
        [total(squares), total(products)]
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

/// The backward of x * rstd * w alone: writes dx = rstd * (h - n * mean(h * n)) with n = x * rstd
/// and h = g * w, and adds g * n to dw.
///
/// # Safety
/// The processor has the instructions; `x` and `g` are valid for reads and `to` for writes of the
/// tile's `head_dim` elements; `to` is one of them, or overlaps neither.
#[inline(always)]
unsafe fn norm_backward<X, G, O, A, B, C>(
    x: *const A,
    g: *const B,
    to: *mut C,
    tile: &NormTile<impl Element<Acc = A::Acc>>,
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    O: Memory<C, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    let (weight, dweight, dim) = (tile.weight, tile.dweight, tile.geometry.head_dim());
    // SAFETY: the caller guarantees `head_dim` elements, and the tile as many weights and their
    // gradients; the loops take what is left of them.
    unsafe {
        let [squares, products] = products::<X, G, A, B>(x, g, weight, dim);
        let rstd = rstd(squares, tile);
        // mean(h * n), where n = x * rstd.
        let mean = products.to_f64() * rstd.to_f64() / dim as f64;
        let mean = A::Acc::from_f64(mean);
        let (all_rstd, all_mean) = (X::Register::splat(rstd), X::Register::splat(mean));
        let mut at = 0;
        while at + X::N <= dim {
            let g = G::load(g.add(at));
            let n = X::load(x.add(at)).mul(all_rstd);
            let h = g.mul(X::Register::load(weight.add(at)));
            let sum = X::Register::load(dweight.add(at).cast_const()).add(g.mul(n));
            sum.write(dweight.add(at));
            O::store::<false>(h.sub(n.mul(all_mean)).mul(all_rstd), to.add(at));
            at += X::N;
        }
        while at < dim {
            let g = g.add(at).read().widen();
            let n = x.add(at).read().widen() * rstd;
            let h = g * weight.add(at).read();
            dweight.add(at).write(dweight.add(at).read() + g * n);
            to.add(at).write(C::narrow((h - n * mean) * rstd));
            at += 1;
        }
    }
}
