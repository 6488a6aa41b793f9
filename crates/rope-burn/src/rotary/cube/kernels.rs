//! The kernels.
//!
//! A *unit* (a thread) takes one token's coefficients for N pairs of channels into registers and
//! rotates those pairs of one head after another: x is read once and written once, cos and sin are
//! read once for all heads that the unit serves. N channels are one load, of 16 bytes where strides
//! and offsets allow. Neighbouring units take neighbouring channels of a head.
//!
//! ```text
//! for each head, [HEADS_AT_ONCE] of them loaded before the first is written:
//!     y1 = c1 * x1 - s1 * x2
//!     y2 = s2 * x1 + c2 * x2
//! ```
//!
//! The adjoint is that map with s1 and s2 swapped and negated, once per unit. Products and sums
//! have the angles' type; a GPU compiler may contract them.
//!
//! Channels of a head and strides are counted in vectors of N. A pairing reads and writes a head's
//! rotated part *split* (x1 and x2 a run apart) or *zipped* (x1 and x2 adjacent: two vectors hold N
//! pairs), as in the CPU kernels.
//!
//! In place, a unit writes only elements that it alone has read. This excludes pairings that read
//! one way and write the other.

use burn_cubecl::cubecl;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// Heads whose loads are in flight together, to hide the memory's latency.
const HEADS_AT_ONCE: u32 = 4;

/// Half as many where registers hold no more: with the coefficients of eight pairs, two a pair, or
/// with the addresses of rows that are read in one order and written in another.
fn heads_at_once(n: usize, access: Specialization) -> u32 {
    if n >= 8 && (access.per_channel || access.zipped_read != access.zipped_write) {
        HEADS_AT_ONCE / 2
    } else {
        HEADS_AT_ONCE
    }
}

/// Vectors from one sample, token or head to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Steps {
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    pub(crate) head: usize,
}

/// How a tensor is read and written.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadSteps {
    pub(crate) heads: u32,
    pub(crate) from: Steps,
    pub(crate) to: Steps,
    /// True if `from` and `to` are one tensor, so that channels outside the rotated part stay.
    #[cube(comptime)]
    in_place: bool,
}

/// A head's channels and a token's angles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowParts {
    /// Vectors before the rotated part.
    pub(crate) offset: u32,
    /// Units that rotate, N pairs each.
    pub(crate) rotating: u32,
    /// Vectors from a first member to its second where they lie split; with one run, `rotating`.
    run: u32,
    /// Vectors of angles from one token to the next.
    angle_step: usize,
    /// Vectors of angles from the cosines to the sines.
    angle_lanes: usize,
}

/// How units are numbered: lanes of a head innermost.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct UnitGrid {
    units: u32,
    /// Units of a token's row: those that rotate, then those that copy.
    pub(crate) lanes: FastDivmod<u32>,
    /// Groups of heads, or with `heads_outside` tokens: what lies inside the other.
    inner: FastDivmod<u32>,
    seq: FastDivmod<u32>,
    /// Heads that a unit serves, counted over q and then k.
    pub(crate) heads: u32,
}

/// Constants that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Specialization {
    /// True if members are adjacent in what is read.
    pub(crate) zipped_read: bool,
    /// True if members are adjacent in what is written.
    pub(crate) zipped_write: bool,
    /// True if the adjoint is applied.
    pub(crate) adjoint: bool,
    /// True if the members of a pair have angles of their own.
    pub(crate) per_channel: bool,
    /// True if a head's tokens are neighbours in memory, not a token's heads.
    pub(crate) heads_outside: bool,
    /// True if all samples share the angles of one sequence.
    pub(crate) shared_rows: bool,
}

/// The work of a unit.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Task {
    lane: u32,
    pub(crate) sample: usize,
    pub(crate) token: usize,
    pub(crate) angle_row: usize,
    pub(crate) first_head: u32,
}

#[cube]
fn task(grid: &UnitGrid, #[comptime] access: Specialization) -> Task {
    let (row, lane) = grid.lanes.div_mod(ABSOLUTE_POS as u32);
    row_task(grid, lane, row, access)
}

/// The work of a unit on a token's group of heads.
#[cube]
pub(crate) fn row_task(
    grid: &UnitGrid,
    lane: u32,
    row: u32,
    #[comptime] access: Specialization,
) -> Task {
    let (outside, inside) = grid.inner.div_mod(row);
    let (group, token) = if comptime![access.heads_outside] {
        (outside, inside)
    } else {
        (inside, outside)
    };
    let (sample, at) = grid.seq.div_mod(token);
    let angle_row = if comptime![access.shared_rows] {
        at
    } else {
        token
    };
    Task {
        lane,
        sample: sample as usize,
        token: at as usize,
        angle_row: angle_row as usize,
        first_head: group * grid.heads,
    }
}

/// The coefficients of N pairs.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Coefficients<A: Float, N: Size> {
    pub(crate) c1: Vector<A, N>,
    pub(crate) s1: Vector<A, N>,
    pub(crate) c2: Vector<A, N>,
    pub(crate) s2: Vector<A, N>,
}

/// N angles from vector `at` of W of them.
#[cube]
pub(crate) fn wide<A: Float, N: Size, W: Size>(angles: &[Vector<A, W>], at: usize) -> Vector<A, N> {
    let (size, width) = (N::value(), W::value());
    let mut gathered = Vector::<A, N>::empty();
    #[unroll]
    for part in 0..comptime![size / width] {
        let loaded = angles[at + part];
        #[unroll]
        for i in 0..width {
            gathered.insert(comptime![part * width + i], loaded.extract(i));
        }
    }
    gathered
}

/// A unit that does not rotate reads those of the first pairs, and does not use them.
#[cube]
pub(crate) fn coefficients<A: Float, N: Size, W: Size>(
    angles: &[Vector<A, W>],
    row: &RowParts,
    angle_row: usize,
    lane: u32,
    #[comptime] access: Specialization,
) -> Coefficients<A, N> {
    let (size, width) = (N::value(), W::value());
    let ratio = comptime![size / width];
    let lane = select(lane < row.rotating, lane, 0u32);
    let cos = angle_row * row.angle_step + lane as usize * ratio;
    let sin = cos + row.angle_lanes;
    let c1 = wide::<A, N, W>(angles, cos);
    let s1 = wide::<A, N, W>(angles, sin);
    let (c2, s2) = if comptime![access.per_channel] {
        let second = row.rotating as usize * ratio;
        (
            wide::<A, N, W>(angles, cos + second),
            wide::<A, N, W>(angles, sin + second),
        )
    } else {
        (c1, s1)
    };
    if comptime![access.adjoint] {
        Coefficients::<A, N> {
            c1,
            s1: -s2,
            c2,
            s2: -s1,
        }
    } else {
        Coefficients::<A, N> { c1, s1, c2, s2 }
    }
}

/// Where a unit's two vectors lie in a head.
#[cube]
pub(crate) fn offsets(row: &RowParts, lane: u32, #[comptime] zipped: bool) -> (usize, usize) {
    if comptime![zipped] {
        let first = (row.offset + 2 * lane) as usize;
        (first, first + 1)
    } else {
        // The second half of two runs follows the first half's second members.
        let skipped = select(lane >= row.run, row.run, 0u32);
        let first = (row.offset + lane + skipped) as usize;
        (first, first + row.run as usize)
    }
}

/// Channel `at` of two neighbouring vectors.
#[cube]
fn channel<A: Float, N: Size>(a: Vector<A, N>, b: Vector<A, N>, #[comptime] at: usize) -> A {
    let size = N::value();
    if comptime![at < size] {
        a.extract(at)
    } else {
        b.extract(comptime![at - size])
    }
}

/// The first and the second members of the pairs in two loaded vectors.
#[cube]
pub(crate) fn members<A: Float, N: Size>(
    a: Vector<A, N>,
    b: Vector<A, N>,
    #[comptime] zipped: bool,
) -> (Vector<A, N>, Vector<A, N>) {
    if comptime![zipped] {
        let mut first = Vector::<A, N>::empty();
        let mut second = Vector::<A, N>::empty();
        #[unroll]
        for pair in 0..N::value() {
            first.insert(pair, channel::<A, N>(a, b, comptime![2 * pair]));
            second.insert(pair, channel::<A, N>(a, b, comptime![2 * pair + 1]));
        }
        (first, second)
    } else {
        (a, b)
    }
}

/// The inverse of [`members`].
#[cube]
pub(crate) fn joined<A: Float, N: Size>(
    first: Vector<A, N>,
    second: Vector<A, N>,
    #[comptime] zipped: bool,
) -> (Vector<A, N>, Vector<A, N>) {
    if comptime![zipped] {
        let size = N::value();
        let mut a = Vector::<A, N>::empty();
        let mut b = Vector::<A, N>::empty();
        #[unroll]
        for at in 0..size {
            let (left, right) = (comptime![at / 2], comptime![(size + at) / 2]);
            if comptime![at % 2 == 0] {
                a.insert(at, first.extract(left));
            } else {
                a.insert(at, second.extract(left));
            }
            if comptime![(size + at) % 2 == 0] {
                b.insert(at, first.extract(right));
            } else {
                b.insert(at, second.extract(right));
            }
        }
        (a, b)
    } else {
        (first, second)
    }
}

/// Rotates a unit's pairs of `count` heads from `first` on: all are loaded before one is written.
#[cube]
fn rotate_block<E: Numeric, A: Float, N: Size>(
    from: &[Vector<E, N>],
    to: &mut [Vector<E, N>],
    from_at: (usize, usize),
    to_at: (usize, usize),
    steps: (usize, usize),
    first: u32,
    by: Coefficients<A, N>,
    #[comptime] count: u32,
    #[comptime] access: Specialization,
) {
    let first = first as usize;
    let mut loaded = Sequence::<(Vector<E, N>, Vector<E, N>)>::new();
    #[unroll]
    for i in 0..comptime![count as usize] {
        let skipped = (first + i) * steps.0;
        loaded.push((from[from_at.0 + skipped], from[from_at.1 + skipped]));
    }
    #[unroll]
    for i in 0..comptime![count as usize] {
        let x = loaded[i];
        let (x1, x2) = members::<A, N>(
            Vector::cast_from(x.0),
            Vector::cast_from(x.1),
            access.zipped_read,
        );
        let y1 = by.c1 * x1 - by.s1 * x2;
        let y2 = by.s2 * x1 + by.c2 * x2;
        let (a, b) = joined::<A, N>(y1, y2, access.zipped_write);
        let skipped = (first + i) * steps.1;
        to[to_at.0 + skipped] = Vector::cast_from(a);
        to[to_at.1 + skipped] = Vector::cast_from(b);
    }
}

/// The steps of what is written; in place those of what is read, so that registers hold one set.
#[cube]
pub(crate) fn written_steps(operand: &HeadSteps) -> Steps {
    if comptime![operand.in_place] {
        operand.from
    } else {
        operand.to
    }
}

/// Where a token starts.
#[cube]
pub(crate) fn start(steps: Steps, task: &Task) -> usize {
    task.sample * steps.batch + task.token * steps.seq
}

/// Rotates, or copies, a unit's channels of `heads` heads from `first` on.
#[allow(
    clippy::collapsible_if,
    reason = "of two, the outer is decided when the kernel is compiled"
)]
#[cube]
fn rotate_heads<E: Numeric, A: Float, N: Size>(
    from: &[Vector<E, N>],
    to: &mut [Vector<E, N>],
    operand: &HeadSteps,
    row: &RowParts,
    task: &Task,
    by: Coefficients<A, N>,
    first: u32,
    heads: u32,
    #[comptime] access: Specialization,
) {
    let (from_step, to_step) = (operand.from.head, written_steps(operand).head);
    let from_start = start(operand.from, task) + first as usize * from_step;
    let to_start = start(written_steps(operand), task) + first as usize * to_step;
    if task.lane < row.rotating {
        let read = offsets(row, task.lane, access.zipped_read);
        let write = offsets(row, task.lane, access.zipped_write);
        let (from_at, to_at) = (
            (from_start + read.0, from_start + read.1),
            (to_start + write.0, to_start + write.1),
        );
        let steps = (from_step, to_step);
        let size = N::value();
        let at_once = comptime![heads_at_once(size, access)];
        for block in 0..heads / at_once {
            let head = block * at_once;
            rotate_block::<E, A, N>(from, to, from_at, to_at, steps, head, by, at_once, access);
        }
        // The rest is no loop, which compilers would unroll and find registers for.
        let rest = heads % at_once;
        if comptime![at_once > 2] {
            if rest >= 2 {
                let head = heads - rest;
                rotate_block::<E, A, N>(from, to, from_at, to_at, steps, head, by, 2u32, access);
            }
        }
        if rest % 2 == 1 {
            let head = heads - 1;
            rotate_block::<E, A, N>(from, to, from_at, to_at, steps, head, by, 1u32, access);
        }
    } else if comptime![!operand.in_place] {
        // Channels before the rotated part, then those after it.
        let unit = task.lane - row.rotating;
        let skipped = select(unit >= row.offset, 2 * row.rotating, 0u32);
        let vector = (unit + skipped) as usize;
        for head in 0..heads {
            let loaded = from[from_start + head as usize * from_step + vector];
            to[to_start + head as usize * to_step + vector] = loaded;
        }
    }
}

/// Rotates q and k.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rotate_pair<E: Numeric, A: Float, N: Size, W: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    angles: &[Vector<A, W>],
    q_rotated: &mut [Vector<E, N>],
    k_rotated: &mut [Vector<E, N>],
    q_operand: HeadSteps,
    k_operand: HeadSteps,
    row: RowParts,
    grid: UnitGrid,
    #[comptime] access: Specialization,
    #[define(E, A)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS >= grid.units as usize {
        terminate!();
    }
    let task = task(&grid, access);
    let by = coefficients::<A, N, W>(angles, &row, task.angle_row, task.lane, access);
    let (q_heads, heads) = (q_operand.heads, q_operand.heads + k_operand.heads);
    let first = task.first_head;
    let last = min(first + grid.heads, heads);
    if first < q_heads {
        let count = min(last, q_heads) - first;
        rotate_heads::<E, A, N>(
            q, q_rotated, &q_operand, &row, &task, by, first, count, access,
        );
    }
    if last > q_heads {
        let first = max(first, q_heads) - q_heads;
        let count = last - q_heads - first;
        rotate_heads::<E, A, N>(
            k, k_rotated, &k_operand, &row, &task, by, first, count, access,
        );
    }
}

/// Rotates one tensor.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rotate_single<E: Numeric, A: Float, N: Size, W: Size>(
    x: &[Vector<E, N>],
    angles: &[Vector<A, W>],
    rotated: &mut [Vector<E, N>],
    operand: HeadSteps,
    row: RowParts,
    grid: UnitGrid,
    #[comptime] access: Specialization,
    #[define(E, A)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS >= grid.units as usize {
        terminate!();
    }
    let task = task(&grid, access);
    let by = coefficients::<A, N, W>(angles, &row, task.angle_row, task.lane, access);
    let first = task.first_head;
    let count = min(first + grid.heads, operand.heads) - first;
    rotate_heads::<E, A, N>(x, rotated, &operand, &row, &task, by, first, count, access);
}

/// How the terms of the angles' gradients are divided: a row of angles sums over the heads, and
/// over the samples if they share it.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SumGrid {
    units: u32,
    lanes: FastDivmod<u32>,
    rows: FastDivmod<u32>,
    seq: FastDivmod<u32>,
    heads: FastDivmod<u32>,
    /// Terms of a row, and of a part of it.
    terms: u32,
    part: u32,
    row_count: u32,
}

/// SumGrid a part of each row's terms: c's gradient has g1 x1 and g2 x2, s's -g1 x2 and g2 x1.
///
/// Writes `[parts, rows, 2 * lanes]`. Each sum is in the order of heads, sample by sample.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn angle_sums<E: Numeric, A: Float, N: Size>(
    x: &[Vector<E, N>],
    gradient: &[Vector<E, N>],
    sums: &mut [A],
    x_steps: Steps,
    gradient_steps: Steps,
    row: RowParts,
    grid: SumGrid,
    #[comptime] access: Specialization,
    #[define(E, A)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS >= grid.units as usize {
        terminate!();
    }
    let (rest, lane) = grid.lanes.div_mod(ABSOLUTE_POS as u32);
    let (part, angle_row) = grid.rows.div_mod(rest);
    let read = offsets(&row, lane, access.zipped_read);
    let write = offsets(&row, lane, access.zipped_write);
    let mut c1 = Vector::<A, N>::zeroed();
    let mut s1 = Vector::<A, N>::zeroed();
    let mut c2 = Vector::<A, N>::zeroed();
    let mut s2 = Vector::<A, N>::zeroed();
    let first = part * grid.part;
    for term in first..min(first + grid.part, grid.terms) {
        let (shared, head) = grid.heads.div_mod(term);
        let (own, at) = grid.seq.div_mod(angle_row);
        let sample = if comptime![access.shared_rows] {
            shared
        } else {
            own
        };
        let x_at = sample as usize * x_steps.batch
            + at as usize * x_steps.seq
            + head as usize * x_steps.head;
        let g_at = sample as usize * gradient_steps.batch
            + at as usize * gradient_steps.seq
            + head as usize * gradient_steps.head;
        let (x1, x2) = members::<A, N>(
            Vector::cast_from(x[x_at + read.0]),
            Vector::cast_from(x[x_at + read.1]),
            access.zipped_read,
        );
        let (g1, g2) = members::<A, N>(
            Vector::cast_from(gradient[g_at + write.0]),
            Vector::cast_from(gradient[g_at + write.1]),
            access.zipped_write,
        );
        c1 += g1 * x1;
        s1 -= g1 * x2;
        c2 += g2 * x2;
        s2 += g2 * x1;
    }
    let start = rest_start(part, angle_row, &grid, row.angle_step);
    let cos = start + lane as usize * N::value();
    let sin = cos + row.angle_lanes;
    if comptime![access.per_channel] {
        let second = row.rotating as usize * N::value();
        scatter::<A, N>(sums, cos, c1);
        scatter::<A, N>(sums, cos + second, c2);
        scatter::<A, N>(sums, sin, s1);
        scatter::<A, N>(sums, sin + second, s2);
    } else {
        scatter::<A, N>(sums, cos, c1 + c2);
        scatter::<A, N>(sums, sin, s1 + s2);
    }
}

#[cube]
fn rest_start(part: u32, row: u32, grid: &SumGrid, step: usize) -> usize {
    (part as usize * grid.row_count as usize + row as usize) * step
}

#[cube]
fn scatter<A: Float, N: Size>(to: &mut [A], at: usize, values: Vector<A, N>) {
    #[unroll]
    for i in 0..N::value() {
        to[at + i] = values.extract(i);
    }
}
