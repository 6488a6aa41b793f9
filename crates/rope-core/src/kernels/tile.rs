//! The algorithm, once.
//!
//! Problem: for each token of a tile, each head and each pair of channels (x1, x2), with the token's
//! coefficients (c1, s1, c2, s2), write
//!
//! ```text
//! y1 = c1 * x1 - s1 * x2
//! y2 = s2 * x1 + c2 * x2
//! ```
//!
//! The adjoint of that map is the map with s1 and s2 swapped and negated: the caller swaps the pointers, and the sign
//! is taken as the sines are loaded. Where the members of a pair share their angle, c2 = c1 and s2 = s1 are not loaded.
//!
//! Data: a row is the rotated part of one head of one token. A pairing reads and writes a row either *split*
//! (x1 and x2 at a distance: Half, Quarter in two segments) or *zipped* (x1 and x2 adjacent). InterleaveHalf
//! reads one way and writes the other; in place, a row that does not fit the registers goes through a scratch row.
//!
//! Traffic: x once in, once out. Coefficients are loaded once for a group of heads, kept in registers, and met by one
//! head after another; read from the cache for each head, they would be twice the bytes of 16-bit data.

use super::portable::Array;
use super::vector::Vector;
use crate::element::Element;

/// Heads that meet a token's coefficients together where heads lie outside tokens: as many stretches of memory are read,
/// and as many written. They often lie a power of two apart and then share a set of the first-level cache, which has
/// eight ways, with each other and with a neighbour on the same core. Where a token's heads lie together, all of them do.
const HEADS_OUTSIDE_GROUP: usize = 4;

/// How a pairing reads or writes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// First and second members at a distance.
    Split,
    /// First and second members side by side.
    Zipped,
}

/// A block of tokens by heads of one tensor, to be rotated by one token's coefficients after another.
pub(crate) struct Tile<E: Element> {
    /// First element of the first head of the first token.
    pub(crate) src: *const E,
    /// Likewise; equal to `src` when in place.
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
    /// Pairs of a run: all, or a half of them. The first members of a split run lie before its second ones.
    pub(crate) run: usize,
    /// How rows are read.
    pub(crate) read: Access,
    /// How rows are written.
    pub(crate) write: Access,
    /// c1, s1, c2, s2.
    pub(crate) coefficients: Coefficients<E::Acc>,
    /// Whether to write past the caches, where that can be done.
    pub(crate) stream: bool,
    /// Room for a row; used when `read` and `write` differ and `dst` is `src`.
    pub(crate) scratch: *mut E,
}

impl<E: Element> Tile<E> {
    /// Whether every run of every row starts a cache line and fills its lines.
    fn starts_lines(&self) -> bool {
        const LINE: usize = 64;
        let elements = [
            self.token_strides[1],
            self.head_strides[1],
            self.offset,
            self.run,
        ];
        self.dst.addr().is_multiple_of(LINE)
            && elements.map(|n| n * size_of::<E>() % LINE) == [0; 4]
    }
}

/// Where c1, s1, c2, s2 of the tile's first token lie: `pairs` values each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coefficients<A> {
    /// c1 and c2.
    pub(crate) cos: [*const A; 2],
    /// s1 and s2.
    pub(crate) sin: [*const A; 2],
    /// Values between tokens.
    pub(crate) stride: usize,
    /// Whether the sines are taken negative.
    pub(crate) negate: bool,
    /// Whether the members of a pair share their angle, so that c2, s2 are c1, s1.
    pub(crate) shared: bool,
}

/// Rotates a tile.
///
/// # Safety
/// - the processor has the instructions of `V`
/// - `src` is valid for reads and `dst` for writes of `head_dim` elements at every token and head by the
///   strides; `dst` is `src` with the same strides, or does not overlap it
/// - `offset + 2 * pairs <= head_dim`; `run` is `pairs` or half of it
/// - the four coefficients are valid for `pairs` values at every token by their stride
/// - `scratch` is valid for `2 * pairs` elements if `read` and `write` differ and `dst` is `src`
#[inline(always)]
pub(crate) unsafe fn rotate_tile<V: Vector<E>, E: Element>(tile: &Tile<E>) {
    use Access::{Split, Zipped};
    let stream = V::STREAMS && tile.stream && tile.starts_lines();
    // SAFETY: the caller's conditions are those of `rotate_groups`.
    unsafe {
        match (tile.read, tile.write, tile.coefficients.shared) {
            (Split, Split, true) if stream => {
                rotate_groups::<V, E, false, false, true, true>(tile);
                V::fence();
            }
            (Zipped, Zipped, true) if stream => {
                rotate_groups::<V, E, true, true, true, true>(tile);
                V::fence();
            }
            (Split, Split, true) => rotate_groups::<V, E, false, false, true, false>(tile),
            (Split, Split, false) => rotate_groups::<V, E, false, false, false, false>(tile),
            (Zipped, Zipped, true) => rotate_groups::<V, E, true, true, true, false>(tile),
            (Zipped, Zipped, false) => rotate_groups::<V, E, true, true, false, false>(tile),
            (Zipped, Split, true) => rotate_groups::<V, E, true, false, true, false>(tile),
            (Zipped, Split, false) => rotate_groups::<V, E, true, false, false, false>(tile),
            (Split, Zipped, true) => rotate_groups::<V, E, false, true, true, false>(tile),
            (Split, Zipped, false) => rotate_groups::<V, E, false, true, false, false>(tile),
        }
    }
}

/// Rotates a tile in the order in which it lies in memory, a group of heads at a time.
///
/// # Safety
/// As [`rotate_tile`], and the flags are the tile's; with `STREAM` it starts lines, so that every store of a whole vector is
/// aligned.
#[inline(always)]
unsafe fn rotate_groups<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
>(
    tile: &Tile<E>,
) {
    let one_run = tile.run == tile.pairs;
    // Each in a loop of its own, which prepares nothing that only the others need.
    // SAFETY: by the caller.
    unsafe {
        if tile.pairs == 4 * V::N && one_run {
            each_group::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, 4, 1>(tile);
        } else if tile.pairs == 4 * V::N {
            each_group::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, 4, 2>(tile);
        } else if tile.pairs == 2 * V::N && one_run {
            each_group::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, 2, 1>(tile);
        } else {
            each_group::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, 0, 1>(tile);
        }
    }
}

/// [`rotate_groups`] of rows of `B` vectors of pairs, two or four, in `RUNS` runs, or of other rows if `B` is zero.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn each_group<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
    const B: usize,
    const RUNS: usize,
>(
    tile: &Tile<E>,
) {
    let strides = tile.head_strides;
    let in_place = tile.src == tile.dst.cast_const();
    let group = if strides[0] <= tile.token_strides[0] {
        tile.heads
    } else {
        HEADS_OUTSIDE_GROUP
    };
    let mut first = 0;
    while first < tile.heads {
        // SAFETY: the first rows of the heads lie within the tensors, by the caller's conditions on strides and `offset`.
        let mut rows = unsafe {
            Rows {
                from: tile.src.add(first * strides[0] + tile.offset),
                to: tile.dst.add(first * strides[1] + tile.offset),
                strides,
                heads: group.min(tile.heads - first),
            }
        };
        let mut angles = Angles {
            cos: tile.coefficients.cos,
            sin: tile.coefficients.sin,
            negate: tile.coefficients.negate,
        };
        for _ in 0..tile.tokens {
            // SAFETY: the rows of a token lie within the tensors and its coefficients within theirs, by the caller's
            // conditions on strides, `offset` and `pairs`.
            unsafe {
                rotate_heads::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, B, RUNS>(
                    tile, rows, angles, in_place,
                );
            }
            rows = rows.skip(tile.token_strides);
            angles = angles.skip(tile.coefficients.stride);
        }
        first += group;
    }
}

/// The rotated parts of a group of heads of one token.
#[derive(Clone, Copy)]
struct Rows<E> {
    from: *const E,
    to: *mut E,
    strides: [usize; 2],
    heads: usize,
}

impl<E> Rows<E> {
    /// Those so many elements further on, if there are any.
    #[inline(always)]
    fn skip(self, elements: [usize; 2]) -> Self {
        Self {
            from: self.from.wrapping_add(elements[0]),
            to: self.to.wrapping_add(elements[1]),
            ..self
        }
    }

    /// Goes on to the next head, if there is one.
    #[inline(always)]
    fn next(&mut self) {
        self.from = self.from.wrapping_add(self.strides[0]);
        self.to = self.to.wrapping_add(self.strides[1]);
    }
}

/// Coefficients of one token.
#[derive(Clone, Copy)]
struct Angles<A> {
    cos: [*const A; 2],
    sin: [*const A; 2],
    negate: bool,
}

impl<A> Angles<A> {
    /// Those so many values further on, if there are any.
    #[inline(always)]
    fn skip(self, values: usize) -> Self {
        let [c1, c2] = self.cos;
        let [s1, s2] = self.sin;
        Self {
            cos: [c1.wrapping_add(values), c2.wrapping_add(values)],
            sin: [s1.wrapping_add(values), s2.wrapping_add(values)],
            negate: self.negate,
        }
    }

    /// Those from a pair on.
    ///
    /// # Safety
    /// There are coefficients for that many pairs.
    #[inline(always)]
    unsafe fn at_pair(self, pair: usize) -> Self {
        let [c1, c2] = self.cos;
        let [s1, s2] = self.sin;
        // SAFETY: by the caller.
        unsafe {
            Self {
                cos: [c1.add(pair), c2.add(pair)],
                sin: [s1.add(pair), s2.add(pair)],
                negate: self.negate,
            }
        }
    }
}

/// Rotates a group of heads of one token.
///
/// # Safety
/// As [`each_group`]; the rows and their coefficients are the tile's, which is rotated `in_place` or not.
#[inline(always)]
unsafe fn rotate_heads<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
    const B: usize,
    const RUNS: usize,
>(
    tile: &Tile<E>,
    mut rows: Rows<E>,
    angles: Angles<E::Acc>,
    in_place: bool,
) {
    let pairs = tile.pairs;
    // SAFETY: by the caller; a row starts `offset` elements behind its head.
    unsafe {
        if !in_place && tile.head_dim != 2 * pairs {
            let behind = tile.head_dim - tile.offset - 2 * pairs;
            let mut rows = rows;
            for _ in 0..rows.heads {
                let (from, to) = (rows.from.sub(tile.offset), rows.to.sub(tile.offset));
                from.copy_to_nonoverlapping(to, tile.offset);
                let (from, to) = (rows.from.add(2 * pairs), rows.to.add(2 * pairs));
                from.copy_to_nonoverlapping(to, behind);
                rows.next();
            }
        }
        if B == 0 {
            for _ in 0..rows.heads {
                let mut from = rows.from;
                if ZIP_IN != ZIP_OUT && in_place {
                    from.copy_to_nonoverlapping(tile.scratch, 2 * pairs);
                    from = tile.scratch;
                }
                rotate_row::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM>(
                    from, rows.to, angles, pairs, tile.run,
                );
                rows.next();
            }
        } else {
            rotate_rows::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM, B, RUNS>(rows, angles);
        }
    }
}

/// Rotates a row run by run: by vectors, by narrower ones, one by one.
///
/// # Safety
/// - the row is valid for reads and writes of `2 * pairs` elements, the coefficients for `pairs` values; `run` divides
///   `pairs`
/// - `from` is `to` only if `ZIP_IN == ZIP_OUT`
#[inline(always)]
unsafe fn rotate_row<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
>(
    from: *const E,
    to: *mut E,
    angles: Angles<E::Acc>,
    pairs: usize,
    run: usize,
) {
    let mut start = 0;
    while start < pairs {
        // SAFETY: a run's pairs lie together in the row, whichever way, from twice its start on; each vector fits between
        // `at` and the run's end.
        unsafe {
            let (from, to) = (from.add(2 * start), to.add(2 * start));
            let angles = angles.at_pair(start);
            let mut at = 0;
            at = rotate_run::<V, E, ZIP_IN, ZIP_OUT, SHARED, STREAM>(from, to, angles, at, run);
            at = rotate_run::<V::Narrower, E, ZIP_IN, ZIP_OUT, SHARED, false>(
                from, to, angles, at, run,
            );
            rotate_run::<Array<E::Acc, 1>, E, ZIP_IN, ZIP_OUT, SHARED, false>(
                from, to, angles, at, run,
            );
        }
        start += run;
    }
}

/// Rotates the whole vectors between pair `at` and the end of a run; returns where it stopped.
///
/// # Safety
/// As [`rotate_row`], of the run.
#[inline(always)]
unsafe fn rotate_run<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
>(
    from: *const E,
    to: *mut E,
    angles: Angles<E::Acc>,
    mut at: usize,
    run: usize,
) -> usize {
    // SAFETY: by the caller.
    unsafe {
        while V::DOUBLES && ZIP_IN == ZIP_OUT && at + 2 * V::N <= run {
            let [c1, s1, c2, s2] =
                load_coefficients::<V, E, SHARED, 2>(angles.at_pair(at), !ZIP_IN);
            let coefficients = [[c1[0], s1[0], c2[0], s2[0]], [c1[1], s1[1], c2[1], s2[1]]];
            rotate_double::<V, E, ZIP_IN, STREAM>(from, to, coefficients, at, run);
            at += 2 * V::N;
        }
        while at + V::N <= run {
            let [c1, s1, c2, s2] = load_coefficients::<V, E, SHARED, 1>(angles.at_pair(at), false);
            let x = load_vector::<V, E, ZIP_IN>(from, at, run);
            let y = rotate::<V, E>(x, [c1[0], s1[0], c2[0], s2[0]]);
            store_vector::<V, E, ZIP_OUT, STREAM>(y, to, at, run);
            at += V::N;
        }
        at
    }
}

/// Rotates rows of `B` vectors of pairs, two or four, in `RUNS` runs, with the coefficients in registers.
///
/// # Safety
/// Every row is valid for reads and writes of its `2 * B * N` elements, the coefficients for `B * N` values.
#[inline(always)]
unsafe fn rotate_rows<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const STREAM: bool,
    const B: usize,
    const RUNS: usize,
>(
    mut rows: Rows<E>,
    angles: Angles<E::Acc>,
) {
    let run = B / RUNS * V::N;
    // SAFETY: all accesses lie within the row. All its loads precede its stores where they touch other elements than
    // those just loaded.
    unsafe {
        // Two members of one order need not be brought into the natural one.
        let doubles = !ZIP_IN && !ZIP_OUT;
        let [c1, s1, c2, s2] = load_coefficients::<V, E, SHARED, B>(angles, doubles);
        if ZIP_IN && ZIP_OUT && V::SWAPS {
            return swap_rows::<V, E, STREAM, B>(rows, [c1, s1, c2, s2]);
        }
        for _ in 0..rows.heads {
            let (from, to) = (rows.from, rows.to);
            if ZIP_IN == ZIP_OUT {
                for v in (0..B).step_by(2) {
                    let w = v + 1;
                    let coefficients = [[c1[v], s1[v], c2[v], s2[v]], [c1[w], s1[w], c2[w], s2[w]]];
                    let (start, at) = in_run(v * V::N, run);
                    let (from, to) = (from.add(start), to.add(start));
                    rotate_double::<V, E, ZIP_IN, STREAM>(from, to, coefficients, at, run);
                }
            } else {
                let mut x = [load_vector::<V, E, ZIP_IN>(from, 0, run); B];
                for (v, x) in x.iter_mut().enumerate().skip(1) {
                    let (start, at) = in_run(v * V::N, run);
                    *x = load_vector::<V, E, ZIP_IN>(from.add(start), at, run);
                }
                for (v, x) in x.into_iter().enumerate() {
                    let (start, at) = in_run(v * V::N, run);
                    let y = rotate::<V, E>(x, [c1[v], s1[v], c2[v], s2[v]]);
                    store_vector::<V, E, ZIP_OUT, STREAM>(y, to.add(start), at, run);
                }
            }
            rows.next();
        }
    }
}

/// [`rotate_rows`] of adjacent pairs that stay side by side: x times c, plus its neighbours times s.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn swap_rows<V: Vector<E>, E: Element, const STREAM: bool, const B: usize>(
    mut rows: Rows<E>,
    [c1, s1, c2, s2]: [[V; B]; 4],
) {
    // SAFETY: by the caller; what is stored was just loaded from the same place.
    unsafe {
        let negative = V::signs(true);
        let mut coefficients = [[V::zip(c1[0], c2[0]); 2]; B];
        for (v, [cos, sin]) in coefficients.iter_mut().enumerate() {
            *cos = V::zip(c1[v], c2[v]);
            *sin = V::zip(s1[v].flip(negative), s2[v]);
        }
        for _ in 0..rows.heads {
            for (v, [cos, sin]) in coefficients.iter().enumerate() {
                let (from, to) = (rows.from.add(2 * v * V::N), rows.to.add(2 * v * V::N));
                let [a, b] = V::load_double(from);
                let (a, b) = (
                    a.mul(cos[0]).add(a.swap().mul(sin[0])),
                    b.mul(cos[1]).add(b.swap().mul(sin[1])),
                );
                a.store::<STREAM>(to);
                b.store::<STREAM>(to.add(V::N));
            }
            rows.next();
        }
    }
}

// No closures from here on: they do not inherit the caller's instructions, and their bodies would become calls.

/// Rotates `2 N` pairs of a run, from its pair `at` on, by coefficients in the order of the members.
///
/// # Safety
/// They lie within the run, which is valid for reads and writes.
#[inline(always)]
unsafe fn rotate_double<V: Vector<E>, E: Element, const ZIP: bool, const STREAM: bool>(
    from: *const E,
    to: *mut E,
    coefficients: [[V; 4]; 2],
    at: usize,
    run: usize,
) {
    // SAFETY: by the caller.
    unsafe {
        let x = if ZIP {
            let x = V::load_pairs(from.add(2 * at));
            [x, V::load_pairs(from.add(2 * (at + V::N)))]
        } else {
            let x1 = V::load_double(from.add(at));
            let x2 = V::load_double(from.add(at + run));
            [(x1[0], x2[0]), (x1[1], x2[1])]
        };
        let a = rotate::<V, E>(x[0], coefficients[0]);
        let b = rotate::<V, E>(x[1], coefficients[1]);
        if ZIP {
            V::store_pairs_double::<STREAM>([a, b], to.add(2 * at));
        } else {
            V::store_doubles::<STREAM>([[a.0, b.0], [a.1, b.1]], [to.add(at), to.add(at + run)]);
        }
    }
}

/// c1, s1, c2, s2 of the first `B` vectors of pairs.
///
/// # Safety
/// The coefficients are valid for reads of `B * N` values.
#[inline(always)]
unsafe fn load_coefficients<V: Vector<E>, E: Element, const SHARED: bool, const B: usize>(
    angles: Angles<E::Acc>,
    doubles: bool,
) -> [[V; B]; 4] {
    // SAFETY: by the caller.
    unsafe {
        let c1 = load_row::<V, E, B>(angles.cos[0], false, doubles);
        let s1 = load_row::<V, E, B>(angles.sin[0], angles.negate, doubles);
        if SHARED {
            return [c1, s1, c1, s1];
        }
        let c2 = load_row::<V, E, B>(angles.cos[1], false, doubles);
        let s2 = load_row::<V, E, B>(angles.sin[1], angles.negate, doubles);
        [c1, s1, c2, s2]
    }
}

/// `B` vectors of coefficients, in the order of double vectors if asked for.
///
/// # Safety
/// `from` is valid for reads of `B * N` values.
#[inline(always)]
unsafe fn load_row<V: Vector<E>, E: Element, const B: usize>(
    from: *const E::Acc,
    negate: bool,
    doubles: bool,
) -> [V; B] {
    // SAFETY: by the caller; doubles come in twos.
    unsafe {
        let mut row = [V::load_acc(from); B];
        if doubles {
            for v in (0..B).step_by(2) {
                let double = V::load_acc_double(from.add(v * V::N));
                row[v] = double[0];
                row[v + 1] = double[1];
            }
        } else {
            for (v, to) in row.iter_mut().enumerate() {
                *to = V::load_acc(from.add(v * V::N));
            }
        }
        let signs = V::signs(negate);
        for v in &mut row {
            *v = v.flip(signs);
        }
        row
    }
}

/// Where in a row the run of a pair starts, and which of the run's pairs it is.
#[inline(always)]
fn in_run(pair: usize, run: usize) -> (usize, usize) {
    let start = if pair < run { 0 } else { run };
    (2 * start, pair - start)
}

/// The members of `N` pairs of a run, from its pair `at` on.
///
/// # Safety
/// They lie within the run, which is valid for reads.
#[inline(always)]
unsafe fn load_vector<V: Vector<E>, E: Element, const ZIP: bool>(
    of: *const E,
    at: usize,
    run: usize,
) -> (V, V) {
    // SAFETY: by the caller.
    unsafe {
        if ZIP {
            V::load_pairs(of.add(2 * at))
        } else {
            (V::load(of.add(at)), V::load(of.add(at + run)))
        }
    }
}

/// Writes the members of `N` pairs of a run, from its pair `at` on.
///
/// # Safety
/// They lie within the run, which is valid for writes.
#[inline(always)]
unsafe fn store_vector<V: Vector<E>, E: Element, const ZIP: bool, const STREAM: bool>(
    (first, second): (V, V),
    of: *mut E,
    at: usize,
    run: usize,
) {
    // SAFETY: by the caller.
    unsafe {
        if ZIP {
            V::store_pairs::<STREAM>(first, second, of.add(2 * at));
        } else {
            first.store::<STREAM>(of.add(at));
            second.store::<STREAM>(of.add(at + run));
        }
    }
}

/// The map, by `[c1, s1, c2, s2]`.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn rotate<V: Vector<E>, E: Element>((x1, x2): (V, V), [c1, s1, c2, s2]: [V; 4]) -> (V, V) {
    // SAFETY: by the caller.
    unsafe { (c1.mul(x1).sub(s1.mul(x2)), c2.mul(x2).add(s2.mul(x1))) }
}
