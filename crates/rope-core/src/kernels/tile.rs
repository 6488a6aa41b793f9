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

use core::ops::Range;

use super::portable::Array;
use super::vector::Vector;
use crate::element::Element;

/// Heads that meet a token's coefficients together where heads lie outside tokens, in place and into another buffer: as
/// many stretches of memory are read, and as many written. They often lie a power of two apart and then share a set of
/// the first-level cache, which has eight ways.
const HEADS_OUTSIDE_GROUP: [usize; 2] = [6, 4];
/// Likewise where a token's heads lie together: its rows stay in the first level while they are gone through.
const HEADS_INSIDE_GROUP: usize = 16;

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
    /// Room for a row; used when `read` and `write` differ and `dst` is `src`.
    pub(crate) scratch: *mut E,
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
    // SAFETY: the caller's conditions are those of `rotate_groups`.
    unsafe {
        match (tile.read, tile.write, tile.coefficients.shared) {
            (Split, Split, true) => rotate_groups::<V, E, false, false, true>(tile),
            (Split, Split, false) => rotate_groups::<V, E, false, false, false>(tile),
            (Zipped, Zipped, true) => rotate_groups::<V, E, true, true, true>(tile),
            (Zipped, Zipped, false) => rotate_groups::<V, E, true, true, false>(tile),
            (Zipped, Split, true) => rotate_groups::<V, E, true, false, true>(tile),
            (Zipped, Split, false) => rotate_groups::<V, E, true, false, false>(tile),
            (Split, Zipped, true) => rotate_groups::<V, E, false, true, true>(tile),
            (Split, Zipped, false) => rotate_groups::<V, E, false, true, false>(tile),
        }
    }
}

/// Rotates a tile in the order in which it lies in memory, a group of heads at a time.
///
/// # Safety
/// As [`rotate_tile`], and the flags are the tile's.
#[inline(always)]
unsafe fn rotate_groups<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    tile: &Tile<E>,
) {
    let heads_inside = tile.head_strides[0] <= tile.token_strides[0];
    // Vectors of pairs of a row whose coefficients the registers hold.
    let block = [2, 4]
        .into_iter()
        .find(|vectors| tile.pairs == vectors * V::N && tile.run.is_multiple_of(2 * V::N));
    let group = match (block, heads_inside) {
        (None, _) => 1,
        (_, true) => HEADS_INSIDE_GROUP,
        (_, false) => HEADS_OUTSIDE_GROUP[usize::from(tile.src != tile.dst.cast_const())],
    };
    let groups = tile.heads.div_ceil(group);
    let (outer, inner) = if heads_inside {
        (tile.tokens, groups)
    } else {
        (groups, tile.tokens)
    };
    for o in 0..outer {
        for i in 0..inner {
            let (token, g) = if heads_inside { (o, i) } else { (i, o) };
            let heads = g * group..((g + 1) * group).min(tile.heads);
            // SAFETY: token < tokens and heads lie in 0..heads, for which the caller vouches; one head at a time
            // unless a row fits the registers.
            unsafe { rotate_heads::<V, E, ZIP_IN, ZIP_OUT, SHARED>(tile, token, heads, block) };
        }
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

/// Coefficients of one token.
#[derive(Clone, Copy)]
struct Angles<A> {
    cos: [*const A; 2],
    sin: [*const A; 2],
    negate: bool,
}

/// Rotates a group of heads of one token.
///
/// # Safety
/// As [`rotate_groups`]; `token` and `heads` lie within the tile; a row is `block` vectors, or `heads` is one head.
#[inline(always)]
unsafe fn rotate_heads<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    tile: &Tile<E>,
    token: usize,
    heads: Range<usize>,
    block: Option<usize>,
) {
    let (pairs, strides) = (tile.pairs, tile.head_strides);
    // SAFETY: the rows lie within the tensors and their coefficients within theirs, by the caller's conditions on
    // strides, `offset` and `pairs`.
    unsafe {
        let src = tile
            .src
            .add(token * tile.token_strides[0] + heads.start * strides[0]);
        let dst = tile
            .dst
            .add(token * tile.token_strides[1] + heads.start * strides[1]);
        let in_place = src == dst.cast_const();
        let rotated_end = tile.offset + 2 * pairs;
        if !in_place && tile.head_dim != 2 * pairs {
            for head in 0..heads.len() {
                let (src, dst) = (src.add(head * strides[0]), dst.add(head * strides[1]));
                src.copy_to_nonoverlapping(dst, tile.offset);
                src.add(rotated_end)
                    .copy_to_nonoverlapping(dst.add(rotated_end), tile.head_dim - rotated_end);
            }
        }
        let mut rows = Rows {
            from: src.add(tile.offset),
            to: dst.add(tile.offset),
            strides,
            heads: heads.len(),
        };
        let at_token = |p: *const E::Acc| p.add(token * tile.coefficients.stride);
        let angles = Angles {
            cos: tile.coefficients.cos.map(at_token),
            sin: tile.coefficients.sin.map(at_token),
            negate: tile.coefficients.negate,
        };
        let one_run = tile.run == pairs;
        // Given the block, the run is known, and with it every offset within a row.
        match (block, one_run) {
            (Some(4), true) => {
                rotate_block::<V, E, ZIP_IN, ZIP_OUT, SHARED, 4>(rows, angles, 0, 4 * V::N)
            }
            (Some(4), false) => {
                rotate_block::<V, E, ZIP_IN, ZIP_OUT, SHARED, 4>(rows, angles, 0, 2 * V::N)
            }
            (Some(_), _) => {
                rotate_block::<V, E, ZIP_IN, ZIP_OUT, SHARED, 2>(rows, angles, 0, 2 * V::N)
            }
            (None, _) => {
                if ZIP_IN != ZIP_OUT && in_place {
                    rows.from.copy_to_nonoverlapping(tile.scratch, 2 * pairs);
                    rows.from = tile.scratch;
                }
                rotate_row::<V, E, ZIP_IN, ZIP_OUT, SHARED>(rows, angles, pairs, tile.run);
            }
        }
    }
}

/// Rotates a row run by run: by vectors, by narrower ones, one by one.
///
/// # Safety
/// As [`rotate_block`] for every block within `pairs`, which `run` divides; `from` is `to` only if
/// `ZIP_IN == ZIP_OUT`.
#[inline(always)]
unsafe fn rotate_row<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
>(
    rows: Rows<E>,
    angles: Angles<E::Acc>,
    pairs: usize,
    run: usize,
) {
    let mut at = 0;
    // SAFETY: each block fits between `at` and the end of its run.
    unsafe {
        while at < pairs {
            let end = at + run;
            while at + V::N <= end {
                rotate_block::<V, E, ZIP_IN, ZIP_OUT, SHARED, 1>(rows, angles, at, run);
                at += V::N;
            }
            while at + V::Narrower::N <= end {
                rotate_block::<V::Narrower, E, ZIP_IN, ZIP_OUT, SHARED, 1>(rows, angles, at, run);
                at += V::Narrower::N;
            }
            while at < end {
                rotate_block::<Array<E::Acc, 1>, E, ZIP_IN, ZIP_OUT, SHARED, 1>(
                    rows, angles, at, run,
                );
                at += 1;
            }
        }
    }
}

/// Rotates `B` vectors of pairs, from pair `at` on, of every row.
///
/// # Safety
/// - every row is valid for reads and writes of the `2 * B * N` elements of these pairs, and each vector lies within one
///   of at most two runs
/// - the coefficients are valid for these pairs
/// - `from` is `to` only if `ZIP_IN == ZIP_OUT`, or if the block is the row
#[inline(always)]
unsafe fn rotate_block<
    V: Vector<E>,
    E: Element,
    const ZIP_IN: bool,
    const ZIP_OUT: bool,
    const SHARED: bool,
    const B: usize,
>(
    rows: Rows<E>,
    angles: Angles<E::Acc>,
    at: usize,
    run: usize,
) {
    // SAFETY: all accesses lie within the block. All its loads precede its stores where they touch other elements than
    // those just loaded.
    unsafe {
        // Two members of one order need not be brought into the natural one.
        let doubles = !ZIP_IN && !ZIP_OUT && B > 1;
        let (c1, s1) = (
            load_row::<V, E, B>(angles.cos[0].add(at), false, doubles),
            load_row::<V, E, B>(angles.sin[0].add(at), angles.negate, doubles),
        );
        let (c2, s2) = if SHARED {
            (c1, s1)
        } else {
            (
                load_row::<V, E, B>(angles.cos[1].add(at), false, doubles),
                load_row::<V, E, B>(angles.sin[1].add(at), angles.negate, doubles),
            )
        };
        let (mut from, mut to) = (rows.from, rows.to);
        for _ in 0..rows.heads {
            if doubles {
                for v in (0..B).step_by(2) {
                    let first = split_at(at + v * V::N, run);
                    let x1 = V::load_double(from.add(first));
                    let x2 = V::load_double(from.add(first + run));
                    let a = rotate::<V, E>((x1[0], x2[0]), [c1[v], s1[v], c2[v], s2[v]]);
                    let w = v + 1;
                    let b = rotate::<V, E>((x1[1], x2[1]), [c1[w], s1[w], c2[w], s2[w]]);
                    V::store_doubles(
                        [[a.0, b.0], [a.1, b.1]],
                        [to.add(first), to.add(first + run)],
                    );
                }
            } else if ZIP_IN && ZIP_OUT && B > 1 {
                for v in (0..B).step_by(2) {
                    let (at, w) = (at + v * V::N, v + 1);
                    let x = load_vector::<V, E, ZIP_IN>(from, at, run);
                    let a = rotate::<V, E>(x, [c1[v], s1[v], c2[v], s2[v]]);
                    let x = load_vector::<V, E, ZIP_IN>(from, at + V::N, run);
                    let b = rotate::<V, E>(x, [c1[w], s1[w], c2[w], s2[w]]);
                    V::store_pairs_double([a, b], to.add(2 * at));
                }
            } else if ZIP_IN == ZIP_OUT {
                for v in 0..B {
                    let x = load_vector::<V, E, ZIP_IN>(from, at + v * V::N, run);
                    let y = rotate::<V, E>(x, [c1[v], s1[v], c2[v], s2[v]]);
                    store_vector::<V, E, ZIP_OUT>(y, to, at + v * V::N, run);
                }
            } else {
                let mut x = [load_vector::<V, E, ZIP_IN>(from, at, run); B];
                for (v, x) in x.iter_mut().enumerate().skip(1) {
                    *x = load_vector::<V, E, ZIP_IN>(from, at + v * V::N, run);
                }
                for (v, x) in x.into_iter().enumerate() {
                    let y = rotate::<V, E>(x, [c1[v], s1[v], c2[v], s2[v]]);
                    store_vector::<V, E, ZIP_OUT>(y, to, at + v * V::N, run);
                }
            }
            from = from.wrapping_add(rows.strides[0]);
            to = to.wrapping_add(rows.strides[1]);
        }
    }
}

// No closures from here on: they do not inherit the caller's instructions, and their bodies would become calls.

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
        if negate {
            for v in &mut row {
                *v = v.neg();
            }
        }
        row
    }
}

/// Where the first member of pair `at` of a split row lies.
#[inline(always)]
fn split_at(at: usize, run: usize) -> usize {
    at + if at < run { 0 } else { run }
}

/// The members of `N` pairs from `at` on.
///
/// # Safety
/// As [`rotate_block`].
#[inline(always)]
unsafe fn load_vector<V: Vector<E>, E: Element, const ZIP: bool>(
    row: *const E,
    at: usize,
    run: usize,
) -> (V, V) {
    // SAFETY: by the caller.
    unsafe {
        if ZIP {
            V::load_pairs(row.add(2 * at))
        } else {
            let first = row.add(split_at(at, run));
            (V::load(first), V::load(first.add(run)))
        }
    }
}

/// Writes the members of `N` pairs from `at` on.
///
/// # Safety
/// As [`rotate_block`].
#[inline(always)]
unsafe fn store_vector<V: Vector<E>, E: Element, const ZIP: bool>(
    (first, second): (V, V),
    row: *mut E,
    at: usize,
    run: usize,
) {
    // SAFETY: by the caller.
    unsafe {
        if ZIP {
            V::store_pairs(first, second, row.add(2 * at));
        } else {
            let to = row.add(split_at(at, run));
            first.store(to);
            second.store(to.add(run));
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
