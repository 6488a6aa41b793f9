//! Cuts a rotation into tiles: pure functions of shapes and the machine.
//!
//! A core takes an even share of the tokens. A tile has all heads of the most tokens that fit the
//! unified buffer `slots` times and once more as f32; in head-major tensors, many tokens of a few
//! heads. `docs/dev/kernels.md` has a worked example.

use rope_core::{Direction, Pairing};

use super::args::{KernelType, Route, Span, TensorLayout, Tiling};
use super::coefficients::{
    Channels, Coefficients, Gathered, Segments, angle_gradient_terms, permutation,
};
use crate::error::{AscendError, Result};
use crate::safe::Machine;

mod matrix;

pub(super) use matrix::{MatrixPlan, plan_matrix};

/// One launch in numbers. Arrays of two are of q and k.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    pub(super) channels: Channels,
    pub(super) direction: Direction,
    pub(super) element: KernelType,
    pub(super) batch: u32,
    /// Tokens of a batch.
    pub(super) seq: u32,
    /// 0 without k.
    pub(super) heads: [u32; 2],
    /// x.
    pub(super) input: [TensorLayout; 2],
    /// y; for the angle gradient, the gradient of y.
    pub(super) output: [TensorLayout; 2],
    /// True if y replaces x.
    pub(super) in_place: bool,
    /// True if all batches share the angles of the first.
    pub(super) shared_over_batch: bool,
}

impl Problem {
    fn element_bytes(&self) -> u32 {
        self.element.bytes() as u32
    }

    /// The source of each f32 of a row, where a Gather reorders them.
    fn permutation(&self, segments: Segments, incoming: bool) -> Option<Vec<u32>> {
        (self.element == KernelType::F32)
            .then(|| permutation(self.channels, segments, incoming))
            .flatten()
    }
}

/// A launch, ready except for the addresses.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan<T = Tiling> {
    /// Name of the kernel.
    pub(super) kernel: String,
    /// Blocks to launch.
    pub(super) blocks: u32,
    pub(super) tiling: T,
    /// The kernel's map, in words.
    pub(super) map: Vec<u32>,
    /// Bytes of unified buffer that a block claims.
    pub(super) ub_bytes: u32,
}

/// Runs that one transfer can have.
const MAX_RUNS: u32 = 4095;
/// Tiles in flight: one loaded, one rotated, one stored.
const SLOTS: u32 = 3;
/// Bytes that stay unused after buffers and between the parts of the work area: 256 each (see
/// `kSlackBytes` in the kernels), for 13 of them at most.
const SLACK_BYTES: u32 = 13 * 256;
/// Units of work a core should have at least, so that shares differ by a sixteenth at most.
const UNITS_PER_CORE: u64 = 16;
/// Tokens of a head-major tile: at 256 bytes per row, a run of 16 KiB, at which a transfer reaches
/// its full rate.
const HEAD_MAJOR_TOKENS: u32 = 64;

pub(super) fn kernel_name(
    family: &str,
    pairing: Pairing,
    direction: Direction,
    element: KernelType,
) -> String {
    let pairs = match (pairing, direction) {
        (Pairing::Half | Pairing::Quarter, _) => "split",
        (Pairing::Adjacent, _) => "adjacent",
        (Pairing::InterleaveHalf, Direction::Forward) => "deinterleave",
        (Pairing::InterleaveHalf, Direction::Adjoint) => "interleave",
    };
    format!("{family}_{pairs}_{}", element.name())
}

/// Batches and tokens, after merging axes with a common stride.
#[derive(Clone, Copy)]
pub(super) struct Grid<const N: usize> {
    pub(super) batch: u64,
    pub(super) seq: u64,
    pub(super) angle_batch_stride: u64,
    /// Layouts of q and k: of x, of y, and of further tensors.
    pub(super) sides: [[TensorLayout; 2]; N],
}

impl<const N: usize> Grid<N> {
    pub(super) fn of(problem: &Problem, sides: [[TensorLayout; 2]; N]) -> Self {
        let (batch, seq) = (u64::from(problem.batch), u64::from(problem.seq));
        let angle_batch_stride = if problem.shared_over_batch { 0 } else { seq };
        let mut grid = Self {
            batch,
            seq,
            angle_batch_stride,
            sides,
        };
        if angle_batch_stride != seq || batch == 1 {
            return grid;
        }
        if seq == 1 {
            for layout in grid.sides.as_flattened_mut() {
                layout.token_stride = layout.batch_stride;
            }
        } else if !grid.all(problem.heads, |layout| {
            layout.batch_stride == seq * layout.token_stride
        }) {
            return grid;
        }
        grid.seq = batch * seq;
        grid.batch = 1;
        grid
    }

    /// True if `test` holds for every tensor that has heads.
    fn all(&self, heads: [u32; 2], test: impl Fn(&TensorLayout) -> bool) -> bool {
        (0..2)
            .filter(|&i| heads[i] > 0)
            .flat_map(|i| self.sides.iter().map(move |side| &side[i]))
            .all(test)
    }

    /// True if the heads of a tile lie outside its tokens, as in BNSD.
    pub(super) fn head_major(&self, heads: [u32; 2]) -> bool {
        self.all(heads, |layout| layout.head_stride > layout.token_stride)
            && heads.iter().sum::<u32>() > 1
    }
}

/// The mapping of the rows of `span` to transfers in a tile of `heads` heads and `tokens` tokens.
pub(super) fn route(
    layout: &TensorLayout,
    span: Span,
    row: u32,
    element_bytes: u32,
    head_major: bool,
    heads: u32,
    tokens: u32,
) -> Route {
    let unit = 32 / element_bytes;
    let run = u64::from(span.length);
    let dense = span.pieces == 1 && span.length.is_multiple_of(unit) && span.length == row;
    let fits = |stride: u64, run: u64, n: u32| {
        n <= 1
            || (stride >= run && (stride - run) * u64::from(element_bytes) <= u64::from(u32::MAX))
    };
    let by = |fold, count| Route { fold, count };
    if dense
        && !head_major
        && layout.head_stride == run
        && fits(layout.token_stride, run * u64::from(heads), tokens)
    {
        return by(Route::FOLD_HEADS, Route::COUNT_TOKENS);
    }
    if dense
        && head_major
        && layout.token_stride == run
        && fits(layout.head_stride, run * u64::from(tokens), heads)
    {
        return by(Route::FOLD_TOKENS, Route::COUNT_HEADS);
    }
    let whole = u64::from(span.pieces) * run;
    let padded_row = span.pieces * span.length.next_multiple_of(unit);
    if span.pieces > 1 && !head_major && layout.head_stride == whole && padded_row == row {
        return by(Route::FOLD_PIECES, Route::COUNT_HEADS);
    }
    let heads_fit = fits(layout.head_stride, run, heads) && heads <= MAX_RUNS;
    let tokens_fit = fits(layout.token_stride, run, tokens) && tokens <= MAX_RUNS;
    let count = match (heads_fit, tokens_fit) {
        (true, false) => Route::COUNT_HEADS,
        (true, true) if heads >= tokens => Route::COUNT_HEADS,
        (_, true) => Route::COUNT_TOKENS,
        (false, false) => Route::COUNT_PIECES,
    };
    by(Route::FOLD_NONE, count)
}

/// Channels that move together: the rotated ones as loaded and as stored, then those that pass
/// through.
fn spans(problem: &Problem, segments: Segments) -> ([Span; 3], [Span; 3]) {
    let channels = problem.channels;
    let run = |channel, length, pieces| Span {
        channel,
        length,
        pieces,
    };
    let first = channels.rotary_offset;
    let whole = run(first, channels.rotary_dim, 1);
    let cut = if segments.length == segments.pitch {
        whole
    } else {
        run(first, segments.length, segments.count)
    };
    let (load, store) = match (channels.pairing, problem.direction) {
        (Pairing::InterleaveHalf, Direction::Forward) => (whole, cut),
        (Pairing::InterleaveHalf, Direction::Adjoint) => (cut, whole),
        _ => (cut, cut),
    };
    let pass = |start: u32, end: u32| {
        if problem.in_place || start == end {
            Span::default()
        } else {
            run(start, end - start, 1)
        }
    };
    let before = pass(0, first);
    let after = pass(first + channels.rotary_dim, channels.head_dim);
    ([load, before, after], [store, before, after])
}

/// Elements of a row of `span` in a tile.
fn tile_row(span: usize, spans: &[Span; 3], row_pitch: u32, element_bytes: u32) -> u32 {
    if span == 0 {
        row_pitch
    } else {
        spans[span].length.next_multiple_of(32 / element_bytes)
    }
}

/// # Errors
/// [`AscendError::KernelLimit`] for more heads than the kernels take.
pub(super) fn check_heads(heads: [u32; 2]) -> Result<()> {
    const MOST_HEADS: u32 = MAX_RUNS / 4;
    let found = heads[0].saturating_add(heads[1]);
    if found > MOST_HEADS {
        return Err(AscendError::KernelLimit {
            what: "heads of q and k together",
            limit: MOST_HEADS as usize,
            found: found as usize,
        });
    }
    Ok(())
}

/// The parts of the tiling that the kernels of the vector cores share. `apart`: see
/// [`Segments::of`].
fn common(problem: &Problem, apart: bool) -> Result<(Segments, Coefficients, Grid<2>, Tiling)> {
    let in_slot = Segments::of(problem.channels, problem.element_bytes(), false);
    let segments = Segments::of(problem.channels, problem.element_bytes(), apart);
    let coefficients = Coefficients::of(problem.channels, segments, problem.direction);
    let (grid, tiling) = tiling_of(problem, in_slot, segments, &coefficients)?;
    Ok((segments, coefficients, grid, tiling))
}

/// All but the size of tiles: `in_slot` is the cut of a row as it is loaded, `segments` as the
/// arithmetic sees it.
fn tiling_of(
    problem: &Problem,
    in_slot: Segments,
    segments: Segments,
    coefficients: &Coefficients,
) -> Result<(Grid<2>, Tiling)> {
    check_heads(problem.heads)?;
    let grid = Grid::of(problem, [problem.input, problem.output]);
    let (load, store) = spans(problem, in_slot);
    let [quarter_length, quarter_pitch] = if in_slot.count > segments.count {
        [in_slot.length, in_slot.pitch]
    } else {
        [0; 2]
    };
    let tiling = Tiling {
        quarter_length,
        quarter_pitch,
        row_pitch: segments.row_pitch(),
        load,
        store,
        ..untiled(problem, &grid, segments, coefficients)
    };
    Ok((grid, tiling))
}

/// The part of a tiling that depends neither on rows in the unified buffer nor on the size of
/// tiles.
pub(super) fn untiled<const N: usize>(
    problem: &Problem,
    grid: &Grid<N>,
    segments: Segments,
    coefficients: &Coefficients,
) -> Tiling {
    let batches = if problem.shared_over_batch {
        1
    } else {
        u64::from(problem.batch)
    };
    Tiling {
        input: grid.sides[0],
        output: grid.sides[1],
        tokens: grid.batch * grid.seq,
        seq: grid.seq,
        angle_batch_stride: grid.angle_batch_stride,
        angle_rows: u64::from(problem.seq) * batches,
        heads: problem.heads,
        slots: SLOTS,
        segments: segments.count,
        segment_length: segments.length,
        a_offset: coefficients.a_offset,
        b_offset: coefficients.b_offset,
        b_negative: coefficients.b_negative,
        angle_width: problem.channels.lanes,
        angle_pieces: coefficients.pieces,
        angle_length: coefficients.length,
        raw_pitch: coefficients.raw_pitch,
        coef_pitch: coefficients.pitch,
        ..Tiling::default()
    }
}

fn set_routes(tiling: &mut Tiling, element_bytes: u32) {
    let head_major = tiling.head_major != 0;
    let tokens = tiling.tokens_per_tile;
    for span in 0..3 {
        for i in 0..2 {
            let heads = tiling.heads[i].min(tiling.heads_per_tile);
            let of = |layout: &TensorLayout, spans: &[Span; 3]| {
                let row = tile_row(span, spans, tiling.row_pitch, element_bytes);
                let span = spans[span];
                route(layout, span, row, element_bytes, head_major, heads, tokens)
            };
            let load = of(&tiling.input[i], &tiling.load);
            let store = of(&tiling.output[i], &tiling.store);
            tiling.load_route[span][i] = load;
            tiling.store_route[span][i] = store;
        }
    }
}

/// Splits `n` into equal parts of at most `most`.
fn even(n: u32, most: u32) -> u32 {
    n.div_ceil(n.div_ceil(most.max(1)))
}

/// Cuts a rotation into tiles.
///
/// # Errors
/// [`AscendError::TileTooLarge`] if not even one head of one token fits;
/// [`AscendError::KernelLimit`] for too many heads.
pub(super) fn plan_rotation(problem: &Problem, machine: Machine) -> Result<Plan> {
    let apart = match problem.channels.pairing {
        // Adjacent halves are exchanged instead.
        Pairing::Adjacent => problem.element == KernelType::Bf16,
        // Conversions put quarters where f32 can start.
        Pairing::Quarter => {
            problem.element_bytes() == 2 && problem.channels.rotary_dim.is_multiple_of(32)
        }
        Pairing::Half | Pairing::InterleaveHalf => false,
    };
    let (segments, coefficients, grid, mut tiling) = common(problem, apart)?;
    let (pairing, direction) = (problem.channels.pairing, problem.direction);
    let element_bytes = problem.element_bytes();
    let heads = problem.heads[0] + problem.heads[1];
    let incoming = direction == Direction::Forward || pairing == Pairing::Adjacent;
    let permutation = problem.permutation(segments, incoming);
    let map = words(coefficients.gather.as_slice(), permutation.as_deref());
    tiling.expand = u32::from(coefficients.gather.is_some());
    tiling.map_words = map.len() as u32;
    tiling.head_major = u32::from(grid.head_major(problem.heads));

    let blocks = share_out(&mut tiling, machine);

    let copies_of_x = if element_bytes == 4 && pairing != Pairing::InterleaveHalf {
        1
    } else {
        2
    };
    let slot_row = (0..3)
        .map(|span| tile_row(span, &tiling.load, tiling.row_pitch, element_bytes) * element_bytes)
        .max()
        .unwrap_or(0);
    let fit = Fit {
        ub: machine.ub_bytes,
        fixed: SLACK_BYTES + 4 * tiling.map_words.next_multiple_of(8),
        token_bytes: 4 * (2 * tiling.raw_pitch + tiling.expand * tiling.coef_pitch),
        slot_row,
        work_row: segments.row_pitch() * 4 * (copies_of_x + u32::from(permutation.is_some())),
        heads,
        longest: longest_run(&tiling, blocks),
    };
    let fitted = if tiling.head_major == 0 {
        fit.token_major()
    } else {
        fit.head_major()
    }?;
    tiling.tokens_per_tile = fitted.tokens;
    tiling.heads_per_tile = fitted.heads;
    set_routes(&mut tiling, element_bytes);
    Ok(Plan {
        kernel: kernel_name("rope_rotate", pairing, direction, problem.element),
        blocks,
        tiling,
        map,
        ub_bytes: fit.used(&fitted),
    })
}

/// Divides the tokens among the cores, and also their heads if tokens are few; returns the blocks
/// to launch.
pub(super) fn share_out(tiling: &mut Tiling, machine: Machine) -> u32 {
    let cores = u64::from(machine.vector_cores);
    let heads = u64::from(tiling.heads[0] + tiling.heads[1]);
    let wanted = (UNITS_PER_CORE * cores).div_ceil(tiling.tokens);
    tiling.head_groups = wanted.clamp(1, heads) as u32;
    (tiling.tokens * u64::from(tiling.head_groups)).min(cores) as u32
}

/// The largest number of tokens of a tile: a block's share of one batch, with angles of one
/// transfer.
pub(super) fn longest_run(tiling: &Tiling, blocks: u32) -> u32 {
    let share = tiling.tokens.div_ceil(u64::from(blocks)).min(tiling.seq);
    (share.min(u64::from(MAX_RUNS)) as u32)
        .min(MAX_RUNS / tiling.angle_pieces)
        .max(1)
}

/// The words of a kernel's map.
fn words(gathered: &[Gathered], permutation: Option<&[u32]>) -> Vec<u32> {
    let gathered = gathered.iter().flat_map(Gathered::words);
    gathered
        .chain(permutation.into_iter().flatten().copied())
        .collect()
}

/// Sizes that compete for the unified buffer, in bytes.
pub(super) struct Fit {
    pub(super) ub: u32,
    pub(super) fixed: u32,
    /// Angles of one token.
    pub(super) token_bytes: u32,
    /// One row in a slot.
    pub(super) slot_row: u32,
    /// One row in the work area.
    pub(super) work_row: u32,
    pub(super) heads: u32,
    /// Most tokens of a tile.
    pub(super) longest: u32,
}

pub(super) struct Fitted {
    pub(super) tokens: u32,
    pub(super) heads: u32,
}

impl Fit {
    /// One row in all slots and in the work area.
    fn row(&self) -> u32 {
        SLOTS * self.slot_row + self.work_row
    }

    pub(super) fn used(&self, fitted: &Fitted) -> u32 {
        self.fixed + fitted.tokens * (self.token_bytes + fitted.heads * self.row())
    }

    fn room(&self) -> u32 {
        self.ub.saturating_sub(self.fixed)
    }

    /// All heads of the largest number of tokens that fits; if one token does not fit, some of its
    /// heads.
    pub(super) fn token_major(&self) -> Result<Fitted> {
        let token = self.token_bytes + self.heads * self.row();
        let tokens = (self.room() / token).min(self.longest);
        if tokens > 0 {
            return Ok(Fitted {
                tokens,
                heads: self.heads,
            });
        }
        let heads = self.room().saturating_sub(self.token_bytes) / self.row();
        if heads == 0 {
            let one = Fitted {
                tokens: 1,
                heads: 1,
            };
            return Err(AscendError::TileTooLarge {
                needed_bytes: self.used(&one) as usize,
                available_bytes: self.ub as usize,
            });
        }
        Ok(Fitted {
            tokens: 1,
            heads: even(self.heads, heads),
        })
    }

    /// Long runs of tokens, of the largest number of heads that fits.
    pub(super) fn head_major(&self) -> Result<Fitted> {
        let mut tokens = self
            .longest
            .min(HEAD_MAJOR_TOKENS)
            .min((self.ub / 6 / self.token_bytes).max(1));
        loop {
            let left = self.room().saturating_sub(tokens * self.token_bytes);
            let heads = left / (tokens * self.row());
            if heads > 0 {
                return Ok(Fitted {
                    tokens,
                    heads: even(self.heads, heads),
                });
            }
            if tokens == 1 {
                return self.token_major();
            }
            tokens /= 2;
        }
    }
}

/// Divides the gradient of the angles into tiles: each core sums all heads of its tokens. The
/// problem's direction is forward.
///
/// # Errors
/// As [`plan_rotation`].
pub(super) fn plan_angle_gradient(problem: &Problem, machine: Machine) -> Result<Plan> {
    const OUT_TOKENS: u64 = 16;
    let element_bytes = problem.element_bytes();
    let apart = element_bytes == 2 && problem.channels.pairing == Pairing::Adjacent;
    let (segments, _, _, mut tiling) = common(problem, apart)?;
    let (terms, pitch) = angle_gradient_terms(problem.channels, segments);
    let permutation = problem.permutation(segments, true);
    let map = words(&terms, permutation.as_deref());
    tiling.map_words = map.len() as u32;
    tiling.angle_pieces = terms.len() as u32;
    tiling.coef_pitch = pitch;
    tiling.head_groups = 1;
    tiling.load[1..].fill(Span::default());
    tiling.store[1..].fill(Span::default());
    let blocks = tiling.tokens.min(u64::from(machine.vector_cores)) as u32;
    let tokens = tiling
        .tokens
        .div_ceil(u64::from(blocks))
        .min(tiling.seq)
        .min(OUT_TOKENS) as u32;

    let row_pitch = segments.row_pitch();
    let f32_copies = match (element_bytes, permutation.is_some()) {
        (2, _) => 4,
        (_, true) => 3,
        (_, false) => 2,
    };
    let fit = Fit {
        ub: machine.ub_bytes,
        fixed: SLACK_BYTES
            + 4 * tiling.map_words.next_multiple_of(8)
            + 4 * 2 * row_pitch
            + 4 * pitch
            + 2 * tokens * 4 * pitch,
        // Tiles of one token: the tokens of the output are in `fixed`.
        token_bytes: 0,
        slot_row: 2 * row_pitch * element_bytes,
        work_row: row_pitch * 4 * (f32_copies + u32::from(permutation.is_some())),
        heads: problem.heads[0] + problem.heads[1],
        longest: 1,
    };
    let fitted = fit.token_major()?;
    tiling.tokens_per_tile = tokens;
    tiling.heads_per_tile = fitted.heads;
    set_routes(&mut tiling, element_bytes);
    let pairing = problem.channels.pairing;
    Ok(Plan {
        kernel: kernel_name(
            "rope_angle_grad",
            pairing,
            Direction::Forward,
            problem.element,
        ),
        blocks,
        tiling,
        map,
        ub_bytes: fit.used(&fitted),
    })
}

#[cfg(test)]
mod tests {
    use rope_core::{Geometry, HeadsLayout, Layout, Strides};

    use super::super::rotator::tensor_layout;
    use super::*;

    fn machine() -> Machine {
        Machine::new(40, None, Some(2201)).expect("a 910B")
    }

    fn plan(
        layout: Layout,
        seq: usize,
        heads: [u32; 2],
        head_dim: usize,
        element: KernelType,
    ) -> Plan {
        let geometry = Geometry::new(head_dim, head_dim, 0, Pairing::Half, false);
        let layouts = heads.map(|heads| {
            let heads = heads.max(1) as usize;
            tensor_layout(&HeadsLayout::contiguous(layout, 1, seq, heads, head_dim))
        });
        let problem = Problem {
            channels: Channels::new(geometry.expect("a geometry")).expect("a short head"),
            direction: Direction::Forward,
            element,
            batch: 1,
            seq: seq as u32,
            heads,
            input: layouts,
            output: layouts,
            in_place: true,
            shared_over_batch: false,
        };
        plan_rotation(&problem, machine()).expect("plan")
    }

    #[test]
    fn qwen3_vl_tiles_hold_two_tokens_with_all_heads() {
        let plan = plan(Layout::Tnd, 8192, [32, 8], 128, KernelType::Bf16);
        assert_eq!(
            (plan.tiling.tokens_per_tile, plan.tiling.heads_per_tile),
            (2, 40)
        );
        assert_eq!(
            plan.tiling.load_route[0],
            [Route {
                fold: Route::FOLD_HEADS,
                count: Route::COUNT_TOKENS
            }; 2]
        );
        assert!(
            plan.ub_bytes * 4 >= machine().ub_bytes * 3,
            "{} bytes of unified buffer",
            plan.ub_bytes
        );
        assert_eq!(plan.blocks, 40);
    }

    #[test]
    fn every_plan_fits_the_unified_buffer() {
        for layout in [Layout::Tnd, Layout::Bnsd] {
            for seq in [1, 2, 7, 100, 100_000] {
                for heads in [[1, 0], [1, 1], [32, 8], [128, 128]] {
                    for head_dim in [32, 72, 80, 128, 256, 512] {
                        for element in [KernelType::Bf16, KernelType::F32] {
                            let plan = plan(layout, seq, heads, head_dim, element);
                            let t = &plan.tiling;
                            assert!(plan.ub_bytes <= machine().ub_bytes, "{plan:?}");
                            assert!(t.tokens_per_tile >= 1 && t.heads_per_tile >= 1);
                            assert!(u64::from(plan.blocks) <= t.tokens * u64::from(t.head_groups));
                        }
                    }
                }
            }
        }
    }

    /// A transfer's stride has 32 bits, in bytes from the end of a run; an offset has 64.
    #[test]
    fn strides_beyond_32_bits_are_taken_one_by_one() {
        let gap = |bytes: usize| Strides {
            batch: 1 << 40,
            seq: (2 * 64 * 2 + bytes) / 2,
            head: 64,
        };
        let layout = |strides| HeadsLayout {
            strides,
            ..HeadsLayout::contiguous(Layout::Bsnd, 2, 200, 2, 64)
        };
        for (bytes, count) in [
            (u32::MAX as usize - 1, Route::COUNT_TOKENS),
            (u32::MAX as usize + 1, Route::COUNT_HEADS),
        ] {
            let layout = tensor_layout(&layout(gap(bytes)));
            let geometry = Geometry::new(64, 64, 0, Pairing::Half, false);
            let problem = Problem {
                channels: Channels::new(geometry.expect("a geometry")).expect("a short head"),
                direction: Direction::Forward,
                element: KernelType::Bf16,
                batch: 2,
                seq: 200,
                heads: [2, 0],
                input: [layout; 2],
                output: [layout; 2],
                in_place: true,
                shared_over_batch: false,
            };
            let plan = plan_rotation(&problem, machine()).expect("plan");
            assert!(plan.tiling.tokens_per_tile > 1, "a tile has several tokens");
            assert_eq!(plan.tiling.load_route[0][0].count, count, "{bytes} bytes");
            assert_eq!(plan.tiling.input[0].batch_stride, 1 << 40);
            assert_eq!(plan.tiling.input[0].token_stride, layout.token_stride);
        }
    }

    #[test]
    fn fewer_tokens_than_cores_share_out_their_heads() {
        let plan = plan(Layout::Tnd, 3, [32, 8], 128, KernelType::Bf16);
        assert_eq!(plan.blocks, 40);
        assert_eq!(plan.tiling.head_groups, 40);
    }
}
