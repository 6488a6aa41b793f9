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
//! The adjoint of that map is the map with s1 and s2 swapped and negated, so whoever prepares the coefficients
//! chooses the direction and this file knows only one. Where the members of a pair share their angle, c2 = c1
//! and s2 = s1 are not stored.
//!
//! Data: a row is the rotated part of one head of one token. A pairing reads and writes a row either *split*
//! (x1 and x2 at a distance: Half, Quarter in two segments) or *zipped* (x1 and x2 adjacent). InterleaveHalf
//! reads one way and writes the other; in place it goes through a scratch row.
//!
//! Traffic: x once in, once out; coefficients once per token from the cache, for all heads.

use super::vector::Vector;
use crate::element::Element;

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
    /// Runs of pairs, each split or zipped by itself.
    pub(crate) segments: usize,
    /// How rows are read.
    pub(crate) read: Access,
    /// How rows are written.
    pub(crate) write: Access,
    /// Whether the members of a pair share their coefficients.
    pub(crate) shared: bool,
    /// Per token c1, s1 and, unless shared, c2, s2; `pairs` values each.
    pub(crate) coefficients: *const E::Acc,
    /// Room for a row; used when `read` and `write` differ and `dst` is `src`.
    pub(crate) scratch: *mut E,
}

/// Coefficients of a run of pairs.
#[derive(Clone, Copy)]
struct Coefficients<A> {
    c1: *const A,
    s1: *const A,
    c2: *const A,
    s2: *const A,
}

/// Rotates a tile.
///
/// # Safety
/// - the processor has the instructions of `V`
/// - `src` is valid for reads and `dst` for writes of `head_dim` elements at every token and head by the
///   strides; `dst` is `src` with the same strides, or does not overlap it
/// - `offset + 2 * pairs <= head_dim`, and `segments` divides `pairs`
/// - `coefficients` is valid for `tokens` rows of `2 * pairs` values if shared, else `4 * pairs`
/// - `scratch` is valid for `2 * pairs` elements if `read` and `write` differ and `dst` is `src`
#[inline(always)]
pub(crate) unsafe fn rotate_tile<V: Vector<E>, E: Element>(tile: &Tile<E>) {
    use Access::{Split, Zipped};
    // SAFETY: the caller's conditions are those of `rotate_rows`.
    unsafe {
        match (tile.read, tile.write, tile.shared) {
            (Split, Split, true) => rotate_rows::<V, E, false, false, true>(tile),
            (Split, Split, false) => rotate_rows::<V, E, false, false, false>(tile),
            (Zipped, Zipped, true) => rotate_rows::<V, E, true, true, true>(tile),
            (Zipped, Zipped, false) => rotate_rows::<V, E, true, true, false>(tile),
            (Zipped, Split, true) => rotate_rows::<V, E, true, false, true>(tile),
            (Zipped, Split, false) => rotate_rows::<V, E, true, false, false>(tile),
            (Split, Zipped, true) => rotate_rows::<V, E, false, true, true>(tile),
            (Split, Zipped, false) => rotate_rows::<V, E, false, true, false>(tile),
        }
    }
}

/// Rotates a tile in the order in which it lies in memory.
///
/// # Safety
/// As [`rotate_tile`], and the flags are the tile's.
#[inline(always)]
unsafe fn rotate_rows<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    tile: &Tile<E>,
) {
    let heads_inside = tile.head_strides[0] <= tile.token_strides[0];
    let (outer, inner) = if heads_inside {
        (tile.tokens, tile.heads)
    } else {
        (tile.heads, tile.tokens)
    };
    for o in 0..outer {
        for i in 0..inner {
            let (token, head) = if heads_inside { (o, i) } else { (i, o) };
            // SAFETY: token < tokens and head < heads, for which the caller vouches.
            unsafe { rotate_row::<V, E, ZIP_IN, ZIP_OUT, SHARED>(tile, token, head) };
        }
    }
}

/// Rotates one head of one token.
///
/// # Safety
/// As [`rotate_rows`]; `token` and `head` lie within the tile.
#[inline(always)]
unsafe fn rotate_row<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    tile: &Tile<E>,
    token: usize,
    head: usize,
) {
    let pairs = tile.pairs;
    let per_token = if SHARED { 2 * pairs } else { 4 * pairs };
    // SAFETY: the row lies within the tensors and its coefficients within their buffer, by the caller's
    // conditions on strides, `offset` and `pairs`.
    unsafe {
        let src = tile
            .src
            .add(token * tile.token_strides[0] + head * tile.head_strides[0]);
        let dst = tile
            .dst
            .add(token * tile.token_strides[1] + head * tile.head_strides[1]);
        let rotated_end = tile.offset + 2 * pairs;
        let in_place = src == dst.cast_const();
        if !in_place {
            src.copy_to_nonoverlapping(dst, tile.offset);
            src.add(rotated_end)
                .copy_to_nonoverlapping(dst.add(rotated_end), tile.head_dim - rotated_end);
        }
        let mut from = src.add(tile.offset);
        if ZIP_IN != ZIP_OUT && in_place {
            from.copy_to_nonoverlapping(tile.scratch, 2 * pairs);
            from = tile.scratch;
        }
        let to = dst.add(tile.offset);
        let c1 = tile.coefficients.add(token * per_token);
        let s1 = c1.add(pairs);
        let (c2, s2) = if SHARED {
            (c1, s1)
        } else {
            (s1.add(pairs), s1.add(2 * pairs))
        };
        let run = pairs / tile.segments;
        for segment in 0..tile.segments {
            let at = segment * run;
            let angles = Coefficients {
                c1: c1.add(at),
                s1: s1.add(at),
                c2: c2.add(at),
                s2: s2.add(at),
            };
            rotate_run::<V, E, ZIP_IN, ZIP_OUT, SHARED>(
                from.add(2 * at),
                to.add(2 * at),
                angles,
                run,
            );
        }
    }
}

/// Rotates `run` pairs: with vectors, then with narrower ones, then one by one.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `2 * run` elements; the coefficients of `run` values. `from` is
/// `to` only if `ZIP_IN == ZIP_OUT`.
#[inline(always)]
unsafe fn rotate_run<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    from: *const E,
    to: *mut E,
    angles: Coefficients<E::Acc>,
    run: usize,
) {
    // SAFETY: each call handles the vectors that fit between `at` and `run`.
    unsafe {
        let at = rotate_vectors::<V, E, ZIP_IN, ZIP_OUT, SHARED>(from, to, angles, 0, run);
        let at =
            rotate_vectors::<V::Narrower, E, ZIP_IN, ZIP_OUT, SHARED>(from, to, angles, at, run);
        rotate_vectors::<super::portable::Array<E::Acc, 1>, E, ZIP_IN, ZIP_OUT, SHARED>(
            from, to, angles, at, run,
        );
    }
}

/// Rotates as many whole vectors of pairs as fit between `at` and `run`; returns where it stopped.
///
/// # Safety
/// As [`rotate_run`]; `at <= run`.
#[inline(always)]
unsafe fn rotate_vectors<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    from: *const E,
    to: *mut E,
    angles: Coefficients<E::Acc>,
    mut at: usize,
    run: usize,
) -> usize {
    while at + V::N <= run {
        // SAFETY: `at + N <= run`, so all accesses lie within the run. Both loads precede both stores, which
        // touch the same elements when in place.
        unsafe {
            let (x1, x2) = if ZIP_IN {
                V::load_pairs(from.add(2 * at))
            } else {
                (V::load(from.add(at)), V::load(from.add(run + at)))
            };
            let (c1, s1) = (
                V::load_acc(angles.c1.add(at)),
                V::load_acc(angles.s1.add(at)),
            );
            let (c2, s2) = if SHARED {
                (c1, s1)
            } else {
                (
                    V::load_acc(angles.c2.add(at)),
                    V::load_acc(angles.s2.add(at)),
                )
            };
            let y1 = c1.mul(x1).sub(s1.mul(x2));
            let y2 = c2.mul(x2).add(s2.mul(x1));
            if ZIP_OUT {
                V::store_pairs(y1, y2, to.add(2 * at));
            } else {
                y1.store(to.add(at));
                y2.store(to.add(run + at));
            }
        }
        at += V::N;
    }
    at
}
