//! The algorithm, once, for every register, element type and pairing.
//!
//! Problem: for each token of a tile, each head and each pair of channels (x1, x2), with the
//! token's coefficients (c1, s1, c2, s2), write
//!
//! ```text
//! y1 = c1 * x1 - s1 * x2
//! y2 = s2 * x1 + c2 * x2
//! ```
//!
//! The adjoint of that map is the map with s1 and s2 swapped and negated: the caller swaps the
//! pointers, and the sign is applied as the sines are loaded. If the members of a pair share their
//! angle, c2 = c1 and s2 = s1 are not loaded.
//!
//! Data: a row is the rotated part of one head of one token. A pairing reads and writes a row
//! either *split* (x1 and x2 apart: Half, and Quarter in two runs) or *zipped* (x1 and x2
//! adjacent). InterleaveHalf reads one way and writes the other; in place, a row passes through a
//! scratch row.
//!
//! Traffic: x once in, once out. Coefficients are loaded once for a group of heads and stay in
//! registers while the heads are rotated; reading them from the cache for each head would move
//! twice the bytes of 16-bit data.

use std::marker::PhantomData;

use super::order::{Order, Split, Zipped};
use super::portable::Portable;
use super::vector::{self, Memory, Register};
use crate::element::Element;

/// Heads rotated together by a token's coefficients if tokens are the inner dimension. Each head is
/// one stream of memory to read and one to write. Heads are often a power of two apart and then
/// share a set of the first-level cache, which has eight ways, with each other and with another
/// thread of the core. If heads are the inner dimension, all of them form one group.
pub(super) const HEADS_OUTSIDE_GROUP: usize = 4;

/// How a pairing reads or writes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// First and second members apart.
    Split,
    /// First and second members adjacent.
    Zipped,
}

/// A block of tokens by heads of one tensor, to be rotated by one token's coefficients after
/// another.
pub(crate) struct Tile<E: Element> {
    /// First element of the first head of the first token.
    pub(crate) src: *const E,
    /// Destination of that element; equal to `src` when in place.
    pub(crate) dst: *mut E,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Heads.
    pub(crate) heads: usize,
    /// Elements between tokens, in source and destination.
    pub(crate) token_strides: [usize; 2],
    /// Elements between heads, in source and destination.
    pub(crate) head_strides: [usize; 2],
    /// Channels of a head.
    pub(crate) head_dim: usize,
    /// First rotated channel.
    pub(crate) offset: usize,
    /// Pairs of channels.
    pub(crate) pairs: usize,
    /// Pairs of a run: all, or a half of them. A split run is its first members, then its second
    /// ones.
    pub(crate) run: usize,
    /// How rows are read.
    pub(crate) read: Access,
    /// How rows are written.
    pub(crate) write: Access,
    /// c1, s1, c2, s2 of the first token.
    pub(crate) coefficients: Coefficients<E::Acc>,
    /// True if writes bypass the caches, where that is possible.
    pub(crate) stream: bool,
    /// Room for a row; used when `read` and `write` differ and `dst` is `src`.
    pub(crate) scratch: *mut E,
}

impl<E: Element> Tile<E> {
    /// Divides this tile's rows, in memory order, into tiles for heads with separate coefficients.
    /// The coefficients of a token's heads follow one another. Each tile has one head; its tokens
    /// are the heads of one token or the tokens of one head.
    pub(crate) fn each_head(&self) -> impl Iterator<Item = Self> {
        let per_head = self.coefficients.stride;
        let head = (self.heads, self.head_strides, per_head);
        let token = (self.tokens, self.token_strides, self.heads * per_head);
        let (outer, inner) = if self.head_strides[0] <= self.token_strides[0] {
            (token, head)
        } else {
            (head, token)
        };
        let ((outer, skipped, values), (tokens, token_strides, stride)) = (outer, inner);
        (0..outer).map(move |i| Self {
            src: self.src.wrapping_add(i * skipped[0]),
            dst: self.dst.wrapping_add(i * skipped[1]),
            tokens,
            heads: 1,
            token_strides,
            coefficients: Coefficients {
                stride,
                ..self.coefficients.skip(i * values)
            },
            ..*self
        })
    }

    fn in_place(&self) -> bool {
        self.src == self.dst.cast_const()
    }

    /// True if every run of every row starts a cache line and fills its lines.
    fn starts_lines(&self) -> bool {
        let (token, head) = (self.token_strides[1], self.head_strides[1]);
        starts_lines(self.dst, [token, head, self.offset, self.run])
    }

    /// True if tokens are the inner dimension.
    fn is_heads_outside(&self) -> bool {
        self.head_strides[0] > self.token_strides[0]
    }

    /// The addresses from the first element to the last one, in source (0) or destination (1).
    fn addresses(&self, which: usize) -> [usize; 2] {
        let start = [self.src.addr(), self.dst.addr()][which];
        let last = self.tokens.saturating_sub(1) * self.token_strides[which]
            + self.heads.saturating_sub(1) * self.head_strides[which];
        [start, start + (last + self.head_dim) * size_of::<E>()]
    }

    /// True if [`rotate_tile`]'s conditions hold, as far as the tile itself shows.
    fn is_sound(&self) -> bool {
        let rows = self.src.is_aligned()
            && self.dst.is_aligned()
            && self.offset + 2 * self.pairs <= self.head_dim
            && (self.run == self.pairs || 2 * self.run == self.pairs);
        let apart = || {
            let [from, to] = [0, 1].map(|which| self.addresses(which));
            from[1] <= to[0] || to[1] <= from[0]
        };
        let overlap = if self.in_place() {
            self.token_strides[0] == self.token_strides[1]
                && self.head_strides[0] == self.head_strides[1]
                && (self.read == self.write || self.scratch.is_aligned())
        } else {
            apart()
        };
        let Coefficients { cos, sin, .. } = self.coefficients;
        rows && overlap && cos.into_iter().chain(sin).all(|values| values.is_aligned())
    }
}

/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// True if `start`, and every address a multiple of these numbers of elements after it, start a
/// cache line.
pub(super) fn starts_lines<E>(start: *const E, elements: impl IntoIterator<Item = usize>) -> bool {
    let per_line = LINE_BYTES / size_of::<E>();
    start.addr().is_multiple_of(LINE_BYTES)
        && elements.into_iter().all(|n| n.is_multiple_of(per_line))
}

/// The addresses of c1, s1, c2, s2 of a token: `pairs` values each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coefficients<A> {
    /// c1 and c2.
    pub(crate) cos: [*const A; 2],
    /// s1 and s2.
    pub(crate) sin: [*const A; 2],
    /// Values between tokens.
    pub(crate) stride: usize,
    /// True if the sines are negated.
    pub(crate) negate: bool,
    /// True if the members of a pair share their angle, so that c2, s2 are c1, s1.
    pub(crate) shared: bool,
}

impl<A> Coefficients<A> {
    /// The coefficients `values` further on; reading them requires values there.
    #[inline(always)]
    pub(super) fn skip(self, values: usize) -> Self {
        let [c1, c2] = self.cos;
        let [s1, s2] = self.sin;
        Self {
            cos: [c1.wrapping_add(values), c2.wrapping_add(values)],
            sin: [s1.wrapping_add(values), s2.wrapping_add(values)],
            ..self
        }
    }
}

/// Bytes from the row being read to the prefetched one, if heads are the inner dimension: the
/// hardware prefetcher keeps too few requests outstanding and stops at a page boundary. If tokens
/// are the inner dimension, it follows the streams of a group.
const PREFETCHED: usize = 4096;

/// The rotated parts of a group of heads of one token.
#[derive(Clone, Copy)]
struct Rows<E> {
    from: *const E,
    to: *mut E,
    strides: [usize; 2],
    heads: usize,
    /// Elements from a row to the row prefetched with it; 0 where prefetching does not help.
    ahead: usize,
}

impl<E: Copy> Rows<E> {
    /// The rows `elements` further on in source and destination, if any.
    #[inline(always)]
    fn skip(self, elements: [usize; 2]) -> Self {
        Self {
            from: self.from.wrapping_add(elements[0]),
            to: self.to.wrapping_add(elements[1]),
            ..self
        }
    }

    /// Prefetches the cache lines of a later row of `elements`.
    #[inline(always)]
    fn fetch<M: Memory<E>>(&self, elements: usize)
    where
        E: Element,
    {
        if self.ahead > 0 {
            let later = self.from.wrapping_add(self.ahead);
            for at in (0..elements).step_by(LINE_BYTES / size_of::<E>()) {
                M::Register::prefetch::<true, _>(later.wrapping_add(at));
            }
        }
    }

    /// Moves to the next head, if there is one.
    #[inline(always)]
    fn next(&mut self) {
        *self = self.skip(self.strides);
    }
}

/// Rotates a tile.
///
/// # Safety
/// - the processor has the instructions of `M`
/// - `src` is valid for reads and `dst` for writes of `head_dim` elements at every token and head
///   by the strides; `dst` is `src` with the same strides, or does not overlap it
/// - `offset + 2 * pairs <= head_dim`; `run` is `pairs` or half of it
/// - the four coefficients are valid for `pairs` values at every token by their stride
/// - `scratch` is valid for `2 * pairs` elements if `read` and `write` differ and `dst` is `src`
pub(crate) unsafe fn rotate_tile<M: Memory<E>, E: Element>(tile: &Tile<E>) {
    use Access::{Split as S, Zipped as Z};
    debug_assert!(tile.is_sound());
    let stream = M::Register::STREAMS && tile.stream && tile.starts_lines();
    // SAFETY: the caller guarantees what the kernels demand of a tile; `stream` implies that rows
    // start and fill cache lines.
    unsafe {
        match (tile.read, tile.write, tile.coefficients.shared) {
            (S, S, true) if stream => Kernel::<M, E, Split, Split, true, true>::rotate(tile),
            (Z, Z, true) if stream => Kernel::<M, E, Zipped, Zipped, true, true>::rotate(tile),
            (S, S, true) => Kernel::<M, E, Split, Split, true, false>::rotate(tile),
            (Z, Z, true) => Kernel::<M, E, Zipped, Zipped, true, false>::rotate(tile),
            (Z, S, true) => Kernel::<M, E, Zipped, Split, true, false>::rotate_any(tile),
            (S, Z, true) => Kernel::<M, E, Split, Zipped, true, false>::rotate_any(tile),
            (S, S, false) => Kernel::<M, E, Split, Split, false, false>::rotate_any(tile),
            (Z, Z, false) => Kernel::<M, E, Zipped, Zipped, false, false>::rotate_any(tile),
            // No known model has these, so they have no code for vector instructions.
            (Z, S, false) => {
                Kernel::<Portable<4>, E, Zipped, Split, false, false>::rotate_any(tile)
            }
            (S, Z, false) => {
                Kernel::<Portable<4>, E, Split, Zipped, false, false>::rotate_any(tile)
            }
        }
    }
}

/// The algorithm for one way of reading and writing rows.
///
/// `SHARED`: the members of a pair share their angle. `STREAM`: stores bypass the caches.
///
/// # Safety
/// Of every function: the processor has the instructions of `M`. A tile is as [`rotate_tile`]
/// demands, has the kernel's orders and sharing, and with `STREAM` its runs start and fill cache
/// lines, so that every store of a whole register is aligned. Rows are valid for reads in `from`
/// and for writes in `to`, coefficients for reads of as many values as the row has pairs.
struct Kernel<M, E, Read, Write, const SHARED: bool, const STREAM: bool>(
    PhantomData<(M, E, Read, Write)>,
);

/// [`Kernel::each_group`] of a tile, with the same conditions.
struct Groups<K, const B: usize>(PhantomData<K>);

impl<M, E, Read, Write, const SHARED: bool, const STREAM: bool, const B: usize> vector::Kernel
    for Groups<Kernel<M, E, Read, Write, SHARED, STREAM>, B>
where
    M: Memory<E>,
    E: Element,
    Read: Order,
    Write: Order,
{
    type Args<'a> = &'a Tile<E>;

    #[inline(always)]
    unsafe fn run(tile: &Tile<E>) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe { Kernel::<M, E, Read, Write, SHARED, STREAM>::each_group::<B>(tile) }
    }
}

// No closures around loads, stores and arithmetic: a closure does not inherit its caller's
// instructions, and its body would become a call.
impl<M, E, Read, Write, const SHARED: bool, const STREAM: bool>
    Kernel<M, E, Read, Write, SHARED, STREAM>
where
    M: Memory<E>,
    E: Element,
    Read: Order,
    Write: Order,
{
    /// True if rows are written in the order in which they are read.
    const SAME_ORDER: bool = Read::ZIPPED == Write::ZIPPED;

    /// Rotates a tile, with separate code for 64 and 128 rotated channels.
    unsafe fn rotate(tile: &Tile<E>) {
        let pairs = if tile.run == tile.pairs {
            tile.pairs
        } else {
            0
        };
        // SAFETY: the caller guarantees the tile and the instructions; each case's number of
        // registers is the tile's.
        unsafe {
            match (M::N, pairs) {
                (16, 64) => M::run::<Groups<Self, 4>>(tile),
                (16, 32) => M::run::<Groups<Self, 2>>(tile),
                (8, 64) => M::run::<Groups<Self, 8>>(tile),
                (8, 32) => M::run::<Groups<Self, 4>>(tile),
                _ => Self::rotate_any(tile),
            }
        }
    }

    /// Rotates a tile of any length.
    unsafe fn rotate_any(tile: &Tile<E>) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe { M::run::<Groups<Self, 0>>(tile) }
    }

    /// Rotates a tile in memory order, a group of heads at a time. Rows are one run of `B` registers
    /// of pairs, two, four or eight; or of any length if `B` is zero.
    #[inline(always)]
    unsafe fn each_group<const B: usize>(tile: &Tile<E>) {
        debug_assert!(B == 0 || tile.pairs == B * M::N && tile.pairs == tile.run);
        let strides = tile.head_strides;
        let in_place = tile.in_place();
        let (group, ahead) = match (tile.is_heads_outside(), tile.tokens > 1) {
            (true, _) => (HEADS_OUTSIDE_GROUP, 0),
            (false, true) => (tile.heads, PREFETCHED / size_of::<E>()),
            (false, false) => (tile.heads, 0),
        };
        let mut first = 0;
        while first < tile.heads {
            // SAFETY: the caller guarantees that the strides reach only into the tensors for each
            // of the tile's heads, and that rows start within their heads.
            let mut rows = unsafe {
                Rows {
                    from: tile.src.add(first * strides[0] + tile.offset),
                    to: tile.dst.add(first * strides[1] + tile.offset),
                    strides,
                    heads: group.min(tile.heads - first),
                    ahead,
                }
            };
            let mut coefficients = tile.coefficients;
            for _ in 0..tile.tokens {
                // SAFETY: the caller guarantees that token and head strides reach only into the
                // tensors, and the coefficients' stride only into theirs, for each of the tokens.
                unsafe { Self::heads::<B>(tile, rows, coefficients, in_place) };
                rows = rows.skip(tile.token_strides);
                coefficients = coefficients.skip(coefficients.stride);
            }
            first += group;
        }
        if STREAM {
            // SAFETY: the caller guarantees the instructions.
            unsafe { M::Register::fence() }
        }
    }

    /// Rotates a group of heads of one token, and copies what is outside the rotated part unless
    /// `in_place`.
    #[inline(always)]
    unsafe fn heads<const B: usize>(
        tile: &Tile<E>,
        mut rows: Rows<E>,
        coefficients: Coefficients<E::Acc>,
        in_place: bool,
    ) {
        let pairs = tile.pairs;
        // SAFETY: the caller guarantees that the rows, which start `offset` elements after their
        // heads, are the tile's: heads of `head_dim` elements that hold the rotated part, in a
        // destination that is the source or apart from it. `scratch` holds a row where it is used.
        unsafe {
            if !in_place && tile.head_dim != 2 * pairs {
                let after = tile.head_dim - tile.offset - 2 * pairs;
                let mut rows = rows;
                for _ in 0..rows.heads {
                    let (from, to) = (rows.from.sub(tile.offset), rows.to.sub(tile.offset));
                    from.copy_to_nonoverlapping(to, tile.offset);
                    let (from, to) = (rows.from.add(2 * pairs), rows.to.add(2 * pairs));
                    from.copy_to_nonoverlapping(to, after);
                    rows.next();
                }
            }
            if B == 0 {
                for _ in 0..rows.heads {
                    let mut from = rows.from;
                    if !Self::SAME_ORDER && in_place {
                        from.copy_to_nonoverlapping(tile.scratch, 2 * pairs);
                        from = tile.scratch;
                    }
                    Self::row(from, rows.to, coefficients, pairs, tile.run);
                    rows.next();
                }
            } else {
                Self::rows::<B>(rows, coefficients);
            }
        }
    }

    /// Rotates a row run by run: by registers, by narrower ones, one by one.
    ///
    /// # Safety
    /// Also: `run` divides `pairs`; `from` is `to` only if the order stays the same.
    #[inline(always)]
    unsafe fn row(
        from: *const E,
        to: *mut E,
        coefficients: Coefficients<E::Acc>,
        pairs: usize,
        run: usize,
    ) {
        debug_assert!(pairs.is_multiple_of(run));
        debug_assert!(Self::SAME_ORDER || from != to.cast_const());
        let mut start = 0;
        while start < pairs {
            // SAFETY: the caller guarantees a row of `2 * pairs` elements and coefficients for its
            // pairs. In either order a run's elements are contiguous, from twice its first pair on.
            unsafe {
                let (from, to) = (from.add(2 * start), to.add(2 * start));
                let coefficients = coefficients.skip(start);
                let at = Self::run(from, to, coefficients, 0, run);
                let at = Kernel::<M::Narrower, E, Read, Write, SHARED, false>::run(
                    from,
                    to,
                    coefficients,
                    at,
                    run,
                );
                if at < run {
                    Kernel::<Portable<1>, E, Read, Write, SHARED, false>::rest(
                        from,
                        to,
                        coefficients,
                        at,
                        run,
                    );
                }
            }
            start += run;
        }
    }

    /// Rotates the pairs of a run from `at` on, as far as whole registers reach, and returns the
    /// end.
    #[inline(always)]
    unsafe fn run(
        from: *const E,
        to: *mut E,
        coefficients: Coefficients<E::Acc>,
        mut at: usize,
        run: usize,
    ) -> usize {
        // SAFETY: the caller guarantees a run of `run` pairs with coefficients for each; the loops
        // take as many pairs as are left between `at` and its end.
        unsafe {
            while M::DOUBLES && Self::SAME_ORDER && at + 2 * M::N <= run {
                let by = Self::load_coefficients::<2>(coefficients.skip(at), !Read::ZIPPED);
                let x = Read::load_double::<M, E>(from, at, run);
                let y = [Self::pairs(x[0], &by, 0), Self::pairs(x[1], &by, 1)];
                Write::store_double::<M, E, STREAM>(y, to, at, run);
                at += 2 * M::N;
            }
            while at + M::N <= run {
                let by = Self::load_coefficients::<1>(coefficients.skip(at), false);
                let x = Read::load::<M, E>(from, at, run);
                let y = Self::pairs(x, &by, 0);
                Write::store::<M, E, STREAM>(y, to, at, run);
                at += M::N;
            }
            at
        }
    }

    /// [`run`](Self::run) in a separate function, compiled once for all instruction sets.
    #[inline(never)]
    unsafe fn rest(
        from: *const E,
        to: *mut E,
        coefficients: Coefficients<E::Acc>,
        at: usize,
        run: usize,
    ) {
        // SAFETY: the caller guarantees what `run` demands.
        unsafe { Self::run(from, to, coefficients, at, run) };
    }

    /// Rotates rows of `B` registers of pairs that keep their order, with the coefficients in
    /// registers, or in the order of registers on the stack where there are too few of these.
    #[inline(always)]
    unsafe fn rows<const B: usize>(mut rows: Rows<E>, coefficients: Coefficients<E::Acc>) {
        debug_assert!(Self::SAME_ORDER);
        let run = B * M::N;
        // SAFETY: the caller guarantees rows of `2 * B * N` elements and coefficients for `B * N`
        // pairs. What is stored was just loaded from the same elements.
        unsafe {
            // Where neither side separates members, double registers may keep their own order.
            let by = Self::load_coefficients::<B>(coefficients, !Read::ZIPPED);
            if Read::ZIPPED && M::SWAPS {
                return Self::swap_rows::<B>(rows, by);
            }
            for _ in 0..rows.heads {
                rows.fetch::<M>(2 * B * M::N);
                for v in (0..B).step_by(2) {
                    let x = Read::load_double::<M, E>(rows.from, v * M::N, run);
                    let y = [Self::pairs(x[0], &by, v), Self::pairs(x[1], &by, v + 1)];
                    Write::store_double::<M, E, STREAM>(y, rows.to, v * M::N, run);
                }
                rows.next();
            }
        }
    }

    /// [`rows`](Self::rows) of adjacent pairs that stay adjacent: x times c, plus x with its
    /// neighbours swapped times s.
    #[inline(always)]
    unsafe fn swap_rows<const B: usize>(
        mut rows: Rows<E>,
        [c1, s1, c2, s2]: [[M::Register; B]; 4],
    ) {
        // SAFETY: the caller guarantees rows of `2 * B * N` elements, and the instructions. What
        // is stored was just loaded from the same elements.
        unsafe {
            let negative = M::Register::signs(true);
            let mut coefficients = [[M::Register::zip(c1[0], c2[0]); 2]; B];
            for (v, [cos, sin]) in coefficients.iter_mut().enumerate() {
                *cos = M::Register::zip(c1[v], c2[v]);
                *sin = M::Register::zip(s1[v].flip(negative), s2[v]);
            }
            for _ in 0..rows.heads {
                rows.fetch::<M>(2 * B * M::N);
                for (v, [cos, sin]) in coefficients.iter().enumerate() {
                    let (from, to) = (rows.from.add(2 * v * M::N), rows.to.add(2 * v * M::N));
                    let [a, b] = M::load_double(from);
                    let (a, b) = (
                        a.mul(cos[0]).add(a.swap().mul(sin[0])),
                        b.mul(cos[1]).add(b.swap().mul(sin[1])),
                    );
                    M::store::<STREAM>(a, to);
                    M::store::<STREAM>(b, to.add(M::N));
                }
                rows.next();
            }
        }
    }

    /// Rotates `N` pairs by register `v` of c1, s1, c2, s2.
    #[inline(always)]
    unsafe fn pairs<const B: usize>(
        [x1, x2]: [M::Register; 2],
        [c1, s1, c2, s2]: &[[M::Register; B]; 4],
        v: usize,
    ) -> [M::Register; 2] {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            [
                c1[v].mul(x1).sub(s1[v].mul(x2)),
                c2[v].mul(x2).add(s2[v].mul(x1)),
            ]
        }
    }

    /// Reads c1, s1, c2, s2 of the first `B` registers of pairs.
    #[inline(always)]
    unsafe fn load_coefficients<const B: usize>(
        from: Coefficients<E::Acc>,
        doubles: bool,
    ) -> [[M::Register; B]; 4] {
        // SAFETY: the caller guarantees coefficients for `B * N` pairs, and the instructions.
        unsafe {
            let c1 = Self::load_values::<B>(from.cos[0], false, doubles);
            let s1 = Self::load_values::<B>(from.sin[0], from.negate, doubles);
            if SHARED {
                return [c1, s1, c1, s1];
            }
            let c2 = Self::load_values::<B>(from.cos[1], false, doubles);
            let s2 = Self::load_values::<B>(from.sin[1], from.negate, doubles);
            [c1, s1, c2, s2]
        }
    }

    /// Reads `B` registers of coefficients, in the order of double registers if `doubles`.
    #[inline(always)]
    unsafe fn load_values<const B: usize>(
        from: *const E::Acc,
        negate: bool,
        doubles: bool,
    ) -> [M::Register; B] {
        debug_assert!(!doubles || B.is_multiple_of(2));
        // SAFETY: the caller guarantees `B * N` values at `from`, and the instructions; doubles
        // are asked for with even `B` only.
        unsafe {
            let mut values = [M::Register::load(from); B];
            if doubles {
                for v in (0..B).step_by(2) {
                    let double = M::load_coefficients_double(from.add(v * M::N));
                    values[v] = double[0];
                    values[v + 1] = double[1];
                }
            } else {
                for (v, to) in values.iter_mut().enumerate() {
                    *to = M::Register::load(from.add(v * M::N));
                }
            }
            let signs = M::Register::signs(negate);
            for v in &mut values {
                *v = v.flip(signs);
            }
            values
        }
    }
}
