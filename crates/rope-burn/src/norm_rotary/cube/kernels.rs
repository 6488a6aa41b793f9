//! The kernels.
//!
//! A *team* of units, a power of two, holds one head: each unit the N pairs that it rotates, or N
//! channels outside the rotated part. Sums over the head are computed in shared memory, in an order
//! that depends only on the team's size. A team processes one *row* after another, a token with
//! some of its heads, and reads the token's angles once for them.
//!
//! All units of a cube take the same number of steps, because they wait for each other: those
//! without a row or a head read the last one, and write nothing.

use burn_cubecl::cubecl;
use cubecl::prelude::*;

use crate::rotary::cube::kernels::{
    Coefficients, HeadSteps, RowParts, Specialization, Steps, UnitGrid, coefficients, joined,
    members, offsets, row_task, start, wide, written_steps,
};

/// Heads whose sums are made together, forward and backward.
const HEADS_AT_ONCE: usize = 4;
const HEADS_AT_ONCE_BACK: usize = 2;

/// Half as many where a unit holds eight pairs of each: what two cubes of a processor have
/// registers for.
fn heads_at_once(most: usize, n: usize) -> usize {
    if n < 8 { most } else { most / 2 }
}

/// How heads are divided among teams.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TeamGrid {
    /// `lanes` are a team's units, not all of which hold channels.
    pub(super) grid: UnitGrid,
    /// Units of a team that hold channels.
    holding: u32,
    teams: u32,
    /// Tokens times groups of heads, and how many of them a team takes.
    rows: u32,
    rounds: u32,
}

/// Constants that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NormShape {
    /// Units of a team and of a cube, powers of two.
    pub(super) team: usize,
    pub(super) cube: usize,
    pub(super) head_dim: usize,
    /// True if the rotated head is normalised, not the head before it is rotated.
    pub(super) after: bool,
    /// True if 1 is added to the weight.
    pub(super) unit_offset: bool,
    pub(super) access: Specialization,
}

/// The channels of a head that a unit holds: N pairs, or N channels and zeros.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Held<A: Float, N: Size> {
    first: Vector<A, N>,
    second: Vector<A, N>,
}

/// The pair of vectors that a sequence holds.
#[cube]
fn kept<A: Float, N: Size>(x: (Vector<A, N>, Vector<A, N>)) -> Held<A, N> {
    Held::<A, N> {
        first: x.0,
        second: x.1,
    }
}

/// Where a unit's channels lie in a head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Part {
    first: usize,
    second: usize,
    rotates: bool,
    holds: bool,
}

#[cube]
fn part(row: &RowParts, lane: u32, holding: u32, #[comptime] zipped: bool) -> Part {
    let rotates = lane < row.rotating;
    let pairs = offsets(row, select(rotates, lane, 0u32), zipped);
    // Channels before the rotated part, then those after it.
    let unit = select(rotates, 0u32, lane - row.rotating);
    let skipped = select(unit >= row.offset, 2 * row.rotating, 0u32);
    let single = (unit + skipped) as usize;
    Part {
        first: select(rotates, pairs.0, single),
        second: pairs.1,
        rotates,
        holds: lane < holding,
    }
}

/// A unit's channels of the head at `at`.
#[cube]
fn load<E: Numeric, A: Float, N: Size>(
    from: &[Vector<E, N>],
    at: usize,
    part: Part,
    #[comptime] zipped: bool,
) -> Held<A, N> {
    let mut first = Vector::<A, N>::zeroed();
    let mut second = Vector::<A, N>::zeroed();
    if part.rotates {
        let (a, b) = members::<A, N>(
            Vector::cast_from(from[at + part.first]),
            Vector::cast_from(from[at + part.second]),
            zipped,
        );
        first = a;
        second = b;
    } else if part.holds {
        first = Vector::cast_from(from[at + part.first]);
    }
    Held::<A, N> { first, second }
}

#[cube]
fn store<E: Numeric, A: Float, N: Size>(
    to: &mut [Vector<E, N>],
    at: usize,
    part: Part,
    held: Held<A, N>,
    #[comptime] zipped: bool,
) {
    if part.rotates {
        let (a, b) = joined::<A, N>(held.first, held.second, zipped);
        to[at + part.first] = Vector::cast_from(a);
        to[at + part.second] = Vector::cast_from(b);
    } else if part.holds {
        to[at + part.first] = Vector::cast_from(held.first);
    }
}

/// A unit's weights, with the 1 that is added to them.
#[cube]
fn weights<A: Float, N: Size, W: Size>(
    weight: &[Vector<A, W>],
    part: Part,
    #[comptime] zipped: bool,
    #[comptime] unit_offset: bool,
) -> Held<A, N> {
    let (size, width) = (N::value(), W::value());
    let ratio = comptime![size / width];
    let mut first = Vector::<A, N>::zeroed();
    let mut second = Vector::<A, N>::zeroed();
    if part.rotates {
        let (a, b) = members::<A, N>(
            wide::<A, N, W>(weight, part.first * ratio),
            wide::<A, N, W>(weight, part.second * ratio),
            zipped,
        );
        first = a;
        second = b;
    } else if part.holds {
        first = wide::<A, N, W>(weight, part.first * ratio);
    }
    if comptime![unit_offset] {
        first += Vector::new(A::new(1.0));
        second += Vector::new(A::new(1.0));
    }
    Held::<A, N> { first, second }
}

/// The coefficients of a unit's pairs; a channel outside the rotated part is multiplied by 1.
#[cube]
fn turned_by<A: Float, N: Size, W: Size>(
    angles: &[Vector<A, W>],
    row: &RowParts,
    angle_row: usize,
    lane: u32,
    #[comptime] access: Specialization,
) -> Coefficients<A, N> {
    let by = coefficients::<A, N, W>(angles, row, angle_row, lane, access);
    let mut c1 = Vector::<A, N>::new(A::new(1.0));
    let mut s1 = Vector::<A, N>::zeroed();
    if lane < row.rotating {
        c1 = by.c1;
        s1 = by.s1;
    }
    if comptime![access.per_channel] {
        let mut c2 = Vector::<A, N>::zeroed();
        let mut s2 = Vector::<A, N>::zeroed();
        if lane < row.rotating {
            c2 = by.c2;
            s2 = by.s2;
        }
        Coefficients::<A, N> { c1, s1, c2, s2 }
    } else {
        // Outside the rotated part the second members are zeros.
        Coefficients::<A, N> {
            c1,
            s1,
            c2: c1,
            s2: s1,
        }
    }
}

#[cube]
fn rotated<A: Float, N: Size>(x: Held<A, N>, by: Coefficients<A, N>) -> Held<A, N> {
    Held::<A, N> {
        first: by.c1 * x.first - by.s1 * x.second,
        second: by.s2 * x.first + by.c2 * x.second,
    }
}

#[cube]
fn rotated_back<A: Float, N: Size>(y: Held<A, N>, by: Coefficients<A, N>) -> Held<A, N> {
    Held::<A, N> {
        first: by.c1 * y.first + by.s2 * y.second,
        second: by.c2 * y.second - by.s1 * y.first,
    }
}

#[cube]
fn times<A: Float, N: Size>(a: Held<A, N>, b: Held<A, N>) -> Held<A, N> {
    Held::<A, N> {
        first: a.first * b.first,
        second: a.second * b.second,
    }
}

/// The difference, channel by channel.
#[cube]
fn minus<A: Float, N: Size>(a: Held<A, N>, b: Held<A, N>) -> Held<A, N> {
    Held::<A, N> {
        first: a.first - b.first,
        second: a.second - b.second,
    }
}

#[cube]
fn scaled<A: Float, N: Size>(a: Held<A, N>, by: A) -> Held<A, N> {
    Held::<A, N> {
        first: a.first * Vector::new(by),
        second: a.second * Vector::new(by),
    }
}

/// The sum of a unit's channels.
#[cube]
fn total<A: Float, N: Size>(x: Held<A, N>) -> A {
    let sums = x.first + x.second;
    let mut total = sums.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        total += sums.extract(i);
    }
    total
}

/// Adds up `count` numbers of each unit over its team: afterwards `shared[i * cube + first]` is the
/// sum of number i, `first` the team's first unit. Each unit has written its own before.
#[cube]
fn sum_over_team<A: Float>(
    shared: &mut Shared<[A]>,
    lane: u32,
    #[comptime] count: usize,
    #[comptime] shape: NormShape,
) {
    let unit = UNIT_POS as usize;
    sync_cube();
    let steps = comptime![shape.team.trailing_zeros() as usize];
    #[unroll]
    for step in 0..steps {
        let stride = comptime![shape.team >> (step + 1)];
        if (lane as usize) < stride {
            #[unroll]
            for i in 0..count {
                let at = comptime![i * shape.cube] + unit;
                let other = shared[at + stride];
                shared[at] += other;
            }
        }
        sync_cube();
    }
}

/// Number i of the team, summed.
#[cube]
fn summed<A: Float>(
    shared: &Shared<[A]>,
    lane: u32,
    #[comptime] i: usize,
    #[comptime] shape: NormShape,
) -> A {
    shared[comptime![i * shape.cube] + UNIT_POS as usize - lane as usize]
}

/// The mean of a head's channels, by their sum. The divisor is known when the kernel is compiled: a
/// power of two is then a multiplication, which takes fewer registers.
#[cube]
fn mean<A: Float>(sum: A, #[comptime] shape: NormShape) -> A {
    sum / A::new(comptime![shape.head_dim as f32])
}

/// 1 / sqrt(mean of the squares + eps).
#[cube]
fn root<A: Float>(squares: A, eps: A, #[comptime] shape: NormShape) -> A {
    A::new(1.0) / (mean::<A>(squares, shape) + eps).sqrt()
}

/// Normalises the heads of one tensor, before or after it rotates them.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_rotate<E: Numeric, A: Float, N: Size, W: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<A, W>],
    angles: &[Vector<A, W>],
    y: &mut [Vector<E, N>],
    operand: HeadSteps,
    row: RowParts,
    teams: TeamGrid,
    eps: InputScalar,
    #[comptime] shape: NormShape,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let access = comptime![shape.access];
    let size = N::value();
    let at_once = comptime![heads_at_once(HEADS_AT_ONCE, size)];
    let mut shared = Shared::<[A]>::new_slice(comptime![at_once * shape.cube]);
    let unit = UNIT_POS as usize;
    let eps = eps.get::<A>();
    let (team, lane) = teams.grid.lanes.div_mod(ABSOLUTE_POS as u32);
    let read = part(&row, lane, teams.holding, access.zipped_read);
    let write = part(&row, lane, teams.holding, access.zipped_write);
    let (weighted, zipped) = if comptime![shape.after] {
        (write, access.zipped_write)
    } else {
        (read, access.zipped_read)
    };
    let weight = weights::<A, N, W>(weight, weighted, zipped, shape.unit_offset);
    for round in 0..teams.rounds {
        let at = team + round * teams.teams;
        let task = row_task(&teams.grid, lane, min(at, teams.rows - 1), access);
        let by = turned_by::<A, N, W>(angles, &row, task.angle_row, lane, access);
        let heads = min(task.first_head + teams.grid.heads, operand.heads) - task.first_head;
        let heads = select(at < teams.rows, heads, 0u32);
        let written = written_steps(&operand);
        let (from, to) = (start(operand.from, &task), start(written, &task));
        for block in 0..teams.grid.heads.div_ceil(at_once as u32) {
            let first = block * at_once as u32;
            let mut held = Sequence::<(Vector<A, N>, Vector<A, N>)>::new();
            #[unroll]
            for i in 0..at_once {
                let head = task.first_head + first + i as u32;
                let head = min(head, operand.heads - 1) as usize;
                let at = from + head * operand.from.head;
                let loaded = load::<E, A, N>(x, at, read, access.zipped_read);
                let loaded = if comptime![shape.after] {
                    rotated::<A, N>(loaded, by)
                } else {
                    loaded
                };
                shared[comptime![i * shape.cube] + unit] =
                    total::<A, N>(times::<A, N>(loaded, loaded));
                held.push((loaded.first, loaded.second));
            }
            sum_over_team::<A>(&mut shared, lane, at_once, shape);
            #[unroll]
            for i in 0..at_once {
                let squares = summed::<A>(&shared, lane, i, shape);
                let rstd = root::<A>(squares, eps, shape);
                let normalised = times::<A, N>(scaled::<A, N>(kept::<A, N>(held[i]), rstd), weight);
                let result = if comptime![shape.after] {
                    normalised
                } else {
                    rotated::<A, N>(normalised, by)
                };
                if first + (i as u32) < heads {
                    let head = (task.first_head + first) as usize + i;
                    let at = to + head * written.head;
                    store::<E, A, N>(y, at, write, result, access.zipped_write);
                }
            }
            // The sums have been read before they are written again.
            sync_cube();
        }
    }
}

/// The gradient of x, and each cube's part of the weight's: `[cubes, head_dim]`.
///
/// With n = x / root and h = gradient * weight, dx = (h - n * mean(h * n)) / root; before the
/// rotation the gradient is rotated back first, after it x is rotated first, and dx back.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_rotate_back<E: Numeric, A: Float, N: Size, W: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<A, W>],
    angles: &[Vector<A, W>],
    gradient: &[Vector<E, N>],
    dx: &mut [Vector<E, N>],
    sums: &mut [A],
    x_steps: Steps,
    operand: HeadSteps,
    row: RowParts,
    teams: TeamGrid,
    eps: InputScalar,
    #[comptime] shape: NormShape,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let access = comptime![shape.access];
    let size = N::value();
    let at_once = comptime![heads_at_once(HEADS_AT_ONCE_BACK, size)];
    let mut shared = Shared::<[A]>::new_slice(comptime![at_once * shape.cube]);
    let unit = UNIT_POS as usize;
    let eps = eps.get::<A>();
    let (team, lane) = teams.grid.lanes.div_mod(ABSOLUTE_POS as u32);
    let read = part(&row, lane, teams.holding, access.zipped_read);
    let write = part(&row, lane, teams.holding, access.zipped_write);
    let (weighted, zipped) = if comptime![shape.after] {
        (write, access.zipped_write)
    } else {
        (read, access.zipped_read)
    };
    let weight = weights::<A, N, W>(weight, weighted, zipped, shape.unit_offset);
    let mut first_sum = Vector::<A, N>::zeroed();
    let mut second_sum = Vector::<A, N>::zeroed();
    for round in 0..teams.rounds {
        let at = team + round * teams.teams;
        let task = row_task(&teams.grid, lane, min(at, teams.rows - 1), access);
        let by = turned_by::<A, N, W>(angles, &row, task.angle_row, lane, access);
        let heads = min(task.first_head + teams.grid.heads, operand.heads) - task.first_head;
        let heads = select(at < teams.rows, heads, 0u32);
        let x_row = task.sample * x_steps.batch + task.token * x_steps.seq;
        let written = written_steps(&operand);
        let (from, to) = (start(operand.from, &task), start(written, &task));
        for block in 0..teams.grid.heads.div_ceil(at_once as u32) {
            let first = block * at_once as u32;
            let mut held = Sequence::<(Vector<A, N>, Vector<A, N>)>::new();
            let mut gradients = Sequence::<(Vector<A, N>, Vector<A, N>)>::new();
            #[unroll]
            for i in 0..at_once {
                let head = task.first_head + first + i as u32;
                let head = min(head, operand.heads - 1) as usize;
                let x_at = x_row + head * x_steps.head;
                let loaded = load::<E, A, N>(x, x_at, read, access.zipped_read);
                let at = from + head * operand.from.head;
                let incoming = load::<E, A, N>(gradient, at, write, access.zipped_write);
                let (loaded, incoming) = if comptime![shape.after] {
                    (rotated::<A, N>(loaded, by), incoming)
                } else {
                    (loaded, rotated_back::<A, N>(incoming, by))
                };
                shared[comptime![i * shape.cube] + unit] =
                    total::<A, N>(times::<A, N>(loaded, loaded));
                held.push((loaded.first, loaded.second));
                gradients.push((incoming.first, incoming.second));
            }
            sum_over_team::<A>(&mut shared, lane, at_once, shape);
            let mut roots = Sequence::<A>::new();
            #[unroll]
            for i in 0..at_once {
                let squares = summed::<A>(&shared, lane, i, shape);
                roots.push(root::<A>(squares, eps, shape));
            }
            sync_cube();
            // The products of numbers that are normalised: those of x could overflow.
            #[unroll]
            for i in 0..at_once {
                let n = scaled::<A, N>(kept::<A, N>(held[i]), roots[i]);
                let h = times::<A, N>(kept::<A, N>(gradients[i]), weight);
                let products = times::<A, N>(h, n);
                shared[comptime![i * shape.cube] + unit] = total::<A, N>(products);
            }
            sum_over_team::<A>(&mut shared, lane, at_once, shape);
            #[unroll]
            for i in 0..at_once {
                let mean = mean::<A>(summed::<A>(&shared, lane, i, shape), shape);
                let n = scaled::<A, N>(kept::<A, N>(held[i]), roots[i]);
                let incoming = kept::<A, N>(gradients[i]);
                let h = times::<A, N>(incoming, weight);
                let result = scaled::<A, N>(minus::<A, N>(h, scaled::<A, N>(n, mean)), roots[i]);
                let result = if comptime![shape.after] {
                    rotated_back::<A, N>(result, by)
                } else {
                    result
                };
                if first + (i as u32) < heads {
                    let head = (task.first_head + first) as usize + i;
                    let at = to + head * written.head;
                    store::<E, A, N>(dx, at, read, result, access.zipped_read);
                    let weight_part = times::<A, N>(incoming, n);
                    first_sum += weight_part.first;
                    second_sum += weight_part.second;
                }
            }
            sync_cube();
        }
    }
    let held = Held::<A, N> {
        first: first_sum,
        second: second_sum,
    };
    write_sums::<A, N>(sums, held, weighted, lane, zipped, shape);
}

/// Writes a cube's part of the weight's gradient, the sum of the units' parts.
#[cube]
fn write_sums<A: Float, N: Size>(
    sums: &mut [A],
    held: Held<A, N>,
    part: Part,
    lane: u32,
    #[comptime] zipped: bool,
    #[comptime] shape: NormShape,
) {
    let unit = UNIT_POS as usize;
    let mut channels = Shared::<[A]>::new_slice(shape.head_dim);
    // One team after another adds its units' parts.
    let team_of_cube = (unit - lane as usize) / comptime![shape.team];
    let (a, b) = joined::<A, N>(held.first, held.second, zipped);
    for turn in 0..comptime![shape.cube / shape.team] {
        if turn == team_of_cube {
            let set = turn == 0;
            if part.rotates {
                add::<A, N>(&mut channels, part.first, a, set);
                add::<A, N>(&mut channels, part.second, b, set);
            } else if part.holds {
                add::<A, N>(&mut channels, part.first, held.first, set);
            }
        }
        sync_cube();
    }
    let mut channel = unit;
    while channel < comptime![shape.head_dim] {
        sums[CUBE_POS * comptime![shape.head_dim] + channel] = channels[channel];
        channel += comptime![shape.cube];
    }
}

/// Adds N numbers to vector `at` of the sums, or sets them.
#[cube]
fn add<A: Float, N: Size>(sums: &mut Shared<[A]>, at: usize, values: Vector<A, N>, set: bool) {
    #[unroll]
    for i in 0..N::value() {
        let channel = at * N::value() + i;
        let value = values.extract(i);
        if set {
            sums[channel] = value;
        } else {
            sums[channel] += value;
        }
    }
}
