//! How a rotation is cut into tiles: pure functions of shapes and the machine.
//!
//! A core takes an even share of the tokens. A tile is some of them with all their heads, as many
//! as fill the unified buffer `slots` times beside the work area; in head-major tensors, many
//! tokens of a few heads. `docs/kernels.md` works an example in numbers.

use super::args::{KTensors, Route, Span, TensorLayout, Tiling};
use super::coefficients::{Coefficients, Segments, angle_gradient_terms, permutation};
use super::rotary::{Direction, Pairing, Rotary};
use crate::error::{AscendError, Result};

/// Architecture of the vector cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Atlas A2 and A3 (910B, 910C).
    Dav2201,
    /// Ascend 950.
    Dav3510,
}

impl Architecture {
    /// The compiler's name of the architecture.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dav2201 => "dav-2201",
            Self::Dav3510 => "dav-3510",
        }
    }

    /// Unified buffer that a kernel may use by default: 192 KiB less 256 bytes and the compiler's
    /// 8 KiB, and 256 KiB less 8 KiB.
    const fn usable_ub_bytes(self) -> u32 {
        match self {
            Self::Dav2201 => 192 * 1024 - 256 - 8 * 1024,
            Self::Dav3510 => 256 * 1024 - 8 * 1024,
        }
    }
}

/// What tiling needs to know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Vector cores.
    pub vector_cores: u32,
    /// Bytes of unified buffer that a kernel may use on each.
    pub ub_bytes: u32,
    /// Architecture.
    pub architecture: Architecture,
}

impl Machine {
    /// A machine from the device's attributes. The unified buffer is the architecture's, or what
    /// the device says if that is less. Without an architecture number that size decides: only
    /// Ascend 950 tells it.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for an architecture that the kernels do not support, or
    /// sizes that make no sense.
    pub fn new(
        vector_cores: i64,
        ub_bytes: Option<i64>,
        architecture: Option<i64>,
    ) -> Result<Self> {
        const OP: &str = "machine";
        const LARGEST_2201: i64 = 192 * 1024;
        let architecture = match architecture {
            Some(2201) => Architecture::Dav2201,
            Some(3510) => Architecture::Dav3510,
            None if ub_bytes.is_some_and(|n| n > LARGEST_2201) => Architecture::Dav3510,
            None => Architecture::Dav2201,
            Some(other) => {
                return Err(AscendError::argument(
                    OP,
                    "architecture",
                    "2201 or 3510",
                    other,
                ));
            }
        };
        let cores = u32::try_from(vector_cores)
            .ok()
            .filter(|n| (1..=65_535).contains(n));
        let cores = cores
            .ok_or_else(|| AscendError::argument(OP, "vector cores", "1 to 65535", vector_cores))?;
        let usable = architecture.usable_ub_bytes();
        let told = ub_bytes.map_or(Ok(usable), |bytes| {
            let told = u32::try_from(bytes).ok().filter(|&n| n >= 16 * 1024);
            told.ok_or_else(|| {
                AscendError::argument(OP, "unified buffer", "at least 16 KiB", bytes)
            })
        })?;
        Ok(Self {
            vector_cores: cores,
            ub_bytes: told.min(usable),
            architecture,
        })
    }
}

/// Where the angles come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AngleSource {
    /// A row of cosines and sines for each token.
    PerToken,
    /// Gathered in the kernel from a table of so many positions.
    Table {
        /// Rows of the table.
        rows: u64,
    },
}

/// One launch in numbers.
#[derive(Clone, Debug)]
pub struct Problem<'a> {
    /// What is rotated.
    pub rotary: &'a Rotary,
    /// Forward or adjoint.
    pub direction: Direction,
    /// Bytes of an element: 4 or 2.
    pub element_bytes: u32,
    /// Batches.
    pub batch: u32,
    /// Tokens of a batch.
    pub seq: u32,
    /// Heads of q and k; 0 without k.
    pub heads: KTensors<u32>,
    /// How x lies.
    pub input: KTensors<TensorLayout>,
    /// How y lies (for the angle gradient, the gradient of y).
    pub output: KTensors<TensorLayout>,
    /// Whether y replaces x.
    pub in_place: bool,
    /// Where the angles come from.
    pub angles: AngleSource,
    /// Whether all batches share the angles of the first.
    pub shared_over_batch: bool,
}

/// A launch, ready but for the addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the kernel.
    pub kernel: String,
    /// Blocks to launch.
    pub blocks: u32,
    /// Its tiling.
    pub tiling: Tiling,
    /// The lane map, in words.
    pub map: Vec<u32>,
    /// Bytes of unified buffer that a block claims.
    pub ub_bytes: u32,
}

/// Runs that one transfer can have.
const MAX_RUNS: u32 = 4095;
/// Tiles that are in flight: one loaded, one rotated, one stored.
const SLOTS: u32 = 3;
/// Bytes that stay unused behind buffers and between the parts of the work area: 256 each (see
/// `kSlackBytes` in the kernels), for 13 of them at most.
const SLACK_BYTES: u32 = 13 * 256;
/// Units of work a core should have at least, so that shares differ by a sixteenth at most.
const UNITS_PER_CORE: u64 = 16;
/// Positions fetched by one transfer.
const POSITIONS_PER_LOAD: u32 = 512;
/// Tokens of a head-major tile: at 256 bytes a row, a run of 16 KiB, where a transfer reaches its
/// full rate.
const HEAD_MAJOR_TOKENS: u32 = 64;

fn kernel_name(family: &str, pairing: Pairing, direction: Direction, dtype: &str) -> String {
    let pairs = match (pairing, direction) {
        (Pairing::Half | Pairing::Quarter, _) => "split",
        (Pairing::Adjacent, _) => "adjacent",
        (Pairing::InterleaveHalf, Direction::Forward) => "deinterleave",
        (Pairing::InterleaveHalf, Direction::Adjoint) => "interleave",
    };
    format!("{family}_{pairs}_{dtype}")
}

/// Batches and tokens, after merging what lies in one stride.
#[derive(Clone, Copy)]
struct Grid {
    batch: u64,
    seq: u64,
    angle_batch_stride: u64,
    input: KTensors<TensorLayout>,
    output: KTensors<TensorLayout>,
}

impl Grid {
    fn of(problem: &Problem<'_>) -> Self {
        let (batch, seq) = (u64::from(problem.batch), u64::from(problem.seq));
        let angle_batch_stride = if problem.shared_over_batch { 0 } else { seq };
        let mut grid = Self {
            batch,
            seq,
            angle_batch_stride,
            input: problem.input,
            output: problem.output,
        };
        let present = |i: usize| problem.heads[i] > 0;
        let all = |test: &dyn Fn(&TensorLayout) -> bool| {
            (0..2)
                .filter(|&i| present(i))
                .all(|i| test(&problem.input[i]) && test(&problem.output[i]))
        };
        if angle_batch_stride != seq || batch == 1 {
            return grid;
        }
        if seq == 1 {
            for layout in grid.input.iter_mut().chain(&mut grid.output) {
                layout.token_stride = layout.batch_stride;
            }
        } else if !all(&|layout| layout.batch_stride == seq * layout.token_stride) {
            return grid;
        }
        grid.seq = batch * seq;
        grid.batch = 1;
        grid
    }

    /// Whether the heads of a tile lie outside its tokens, as in BNSD.
    fn head_major(&self, heads: KTensors<u32>) -> bool {
        (0..2)
            .filter(|&i| heads[i] > 0)
            .flat_map(|i| [self.input[i], self.output[i]])
            .all(|layout| layout.head_stride > layout.token_stride)
            && heads.iter().sum::<u32>() > 1
    }
}

/// How the rows of `span` become transfers in a tile of so many heads and tokens.
fn route(
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
    if dense && !head_major && layout.head_stride == run {
        let whole = run * u64::from(heads);
        if fits(layout.token_stride, whole, tokens) {
            return Route {
                fold: Route::FOLD_HEADS,
                count: Route::COUNT_TOKENS,
            };
        }
    }
    if dense && head_major && layout.token_stride == run {
        let whole = run * u64::from(tokens);
        if fits(layout.head_stride, whole, heads) {
            return Route {
                fold: Route::FOLD_TOKENS,
                count: Route::COUNT_HEADS,
            };
        }
    }
    let pieces_wide = u64::from(span.pieces) * run;
    let padded_row = span.pieces * span.length.next_multiple_of(unit);
    if span.pieces > 1 && !head_major && layout.head_stride == pieces_wide && padded_row == row {
        return Route {
            fold: Route::FOLD_PIECES,
            count: Route::COUNT_HEADS,
        };
    }
    let heads_fit = fits(layout.head_stride, run, heads);
    let tokens_fit = fits(layout.token_stride, run, tokens);
    let count = match (
        heads_fit && heads <= MAX_RUNS,
        tokens_fit && tokens <= MAX_RUNS,
    ) {
        (true, false) => Route::COUNT_HEADS,
        (true, true) if heads >= tokens => Route::COUNT_HEADS,
        (_, true) => Route::COUNT_TOKENS,
        (false, false) => Route::COUNT_PIECES,
    };
    Route {
        fold: Route::FOLD_NONE,
        count,
    }
}

/// Channels that move together: the rotated ones as loaded and as stored, then those that pass.
fn spans(
    rotary: &Rotary,
    segments: Segments,
    direction: Direction,
    element_bytes: u32,
    in_place: bool,
) -> ([Span; 3], [Span; 3]) {
    let channel = rotary.rotary_offset();
    let whole = Span {
        channel,
        length: rotary.rotary_dim(),
        pieces: 1,
    };
    let cut = if segments.length == segments.pitch {
        whole
    } else {
        Span {
            channel,
            length: segments.length,
            pieces: segments.count,
        }
    };
    let _ = element_bytes;
    let (load, store) = match (rotary.pairing(), direction) {
        (Pairing::InterleaveHalf, Direction::Forward) => (whole, cut),
        (Pairing::InterleaveHalf, Direction::Adjoint) => (cut, whole),
        _ => (cut, cut),
    };
    let pass = |start: u32, end: u32| {
        if in_place || start == end {
            Span::default()
        } else {
            Span {
                channel: start,
                length: end - start,
                pieces: 1,
            }
        }
    };
    let before = pass(0, channel);
    let after = pass(channel + rotary.rotary_dim(), rotary.head_dim());
    ([load, before, after], [store, before, after])
}

fn tile_row(span: usize, spans: &[Span; 3], row_pitch: u32, element_bytes: u32) -> u32 {
    if span == 0 {
        row_pitch
    } else {
        spans[span].length.next_multiple_of(32 / element_bytes)
    }
}

/// The parts of the tiling that both kernels share.
fn common(
    problem: &Problem<'_>,
    grid: &Grid,
    segments: Segments,
    coefficients: &Coefficients,
    direction: Direction,
) -> Tiling {
    let (load, store) = spans(
        problem.rotary,
        segments,
        direction,
        problem.element_bytes,
        problem.in_place,
    );
    let rows = if problem.shared_over_batch {
        u64::from(problem.seq)
    } else {
        u64::from(problem.seq) * u64::from(problem.batch)
    };
    Tiling {
        input: grid.input,
        output: grid.output,
        tokens: grid.batch * grid.seq,
        seq: grid.seq,
        angle_batch_stride: grid.angle_batch_stride,
        angle_rows: rows,
        heads: problem.heads,
        segments: segments.count,
        segment_length: segments.length,
        segment_pitch: segments.pitch,
        row_pitch: segments.row_pitch(),
        load,
        store,
        a_offset: coefficients.a_offset,
        b_offset: coefficients.b_offset,
        b_negative: coefficients.b_negative,
        angle_width: problem.rotary.angle_width(),
        angle_pieces: coefficients.raw.pieces,
        angle_length: coefficients.raw.length,
        raw_pitch: coefficients.raw.pitch,
        coef_pitch: coefficients.pitch,
        ..Tiling::default()
    }
}

fn set_routes(tiling: &mut Tiling, element_bytes: u32) {
    let head_major = tiling.head_major != 0;
    for span in 0..3 {
        for i in 0..2 {
            let heads = tiling.heads[i].min(tiling.heads_per_tile);
            let row = |spans: &[Span; 3]| tile_row(span, spans, tiling.row_pitch, element_bytes);
            let tokens = tiling.tokens_per_tile;
            tiling.load_route[span][i] = route(
                &tiling.input[i],
                tiling.load[span],
                row(&tiling.load),
                element_bytes,
                head_major,
                heads,
                tokens,
            );
            tiling.store_route[span][i] = route(
                &tiling.output[i],
                tiling.store[span],
                row(&tiling.store),
                element_bytes,
                head_major,
                heads,
                tokens,
            );
        }
    }
}

/// Splits `n` into equal parts of at most `most`.
fn even(n: u32, most: u32) -> u32 {
    n.div_ceil(n.div_ceil(most.max(1)))
}

fn words(values: &[f32]) -> impl Iterator<Item = u32> + '_ {
    values.iter().map(|value| value.to_bits())
}

fn check_shape(problem: &Problem<'_>) -> Result<u32> {
    let heads = problem.heads[0] + problem.heads[1];
    let most = MAX_RUNS / 4;
    if problem.heads[0] == 0 || heads > most {
        return Err(AscendError::argument(
            "rotate",
            "heads",
            format!("1 to {most} of q and k together"),
            heads,
        ));
    }
    Ok(heads)
}

/// Cuts a rotation into tiles.
///
/// # Errors
/// [`AscendError::TileTooLarge`] if not even one head of one token fits;
/// [`AscendError::InvalidArgument`] for a table without a lane map or too many heads.
pub fn plan_rotation(problem: &Problem<'_>, machine: Machine, dtype: &str) -> Result<Plan> {
    let heads = check_shape(problem)?;
    let rotary = problem.rotary;
    let element_bytes = problem.element_bytes;
    let segments = Segments::of(rotary, element_bytes);
    let table = match problem.angles {
        AngleSource::PerToken => None,
        AngleSource::Table { .. } => Some(rotary.lanes().ok_or_else(|| {
            AscendError::argument(
                "rotate",
                "lane map",
                "given with the rotary, as angles come from a table",
                "none",
            )
        })?),
    };
    let coefficients = Coefficients::of(rotary, segments, problem.direction, table);
    let incoming = problem.direction == Direction::Forward || rotary.pairing() == Pairing::Adjacent;
    let permutation = permutation(
        rotary.pairing(),
        segments,
        rotary.rotary_dim(),
        element_bytes,
        incoming,
    );
    let grid = Grid::of(problem);
    let mut tiling = common(problem, &grid, segments, &coefficients, problem.direction);
    let mut map = Vec::new();
    if let Some((offsets, signs)) = &coefficients.gather {
        tiling.expand = 1;
        map.extend_from_slice(offsets);
        map.extend(words(signs));
    }
    map.extend(permutation.iter().flatten());
    tiling.map_words = map.len() as u32;
    if let (AngleSource::Table { rows }, Some(lanes)) = (problem.angles, table) {
        tiling.table_rows = rows;
        tiling.axes = lanes.axes();
        tiling.axis_start = coefficients.raw.axis_start;
        tiling.axis_length = coefficients.raw.axis_length;
        tiling.table_width = lanes.width();
        tiling.positions_per_load =
            POSITIONS_PER_LOAD.min(tiling.angle_rows.try_into().unwrap_or(u32::MAX));
    }
    tiling.slots = SLOTS;
    tiling.head_major = u32::from(grid.head_major(problem.heads));

    // Few tokens: share out their heads as well.
    let cores = u64::from(machine.vector_cores);
    let wanted = (UNITS_PER_CORE * cores).div_ceil(tiling.tokens);
    tiling.head_groups = wanted.clamp(1, u64::from(heads)) as u32;
    let units = tiling.tokens * u64::from(tiling.head_groups);
    let blocks = units.min(cores) as u32;

    let copies_of_x = if element_bytes == 4 && rotary.pairing() != Pairing::InterleaveHalf {
        1
    } else {
        2
    };
    let work_row = segments.row_pitch() * 4 * (copies_of_x + u32::from(permutation.is_some()));
    let slot_row = (0..3)
        .map(|span| tile_row(span, &tiling.load, tiling.row_pitch, element_bytes) * element_bytes)
        .max()
        .unwrap_or(0);
    let token_bytes = 4 * (2 * tiling.raw_pitch + tiling.expand * tiling.coef_pitch);
    let fixed = SLACK_BYTES
        + 4 * tiling.map_words.next_multiple_of(8)
        + 4 * tiling.axes * tiling.positions_per_load.next_multiple_of(8);
    let longest = (tiling.tokens.div_ceil(u64::from(blocks)))
        .min(tiling.seq)
        .min(u64::from(MAX_RUNS));
    let runs = coefficients.raw.pieces.max(1);
    let longest = (longest as u32).min(MAX_RUNS / runs).max(1);
    let choice = Fit {
        ub: machine.ub_bytes,
        fixed,
        token_bytes,
        slot_row,
        work_row,
        heads,
        longest,
        slots: SLOTS,
    };
    let fit = if tiling.head_major == 0 {
        choice.token_major()
    } else {
        choice.head_major()
    }?;
    tiling.tokens_per_tile = fit.tokens;
    tiling.heads_per_tile = fit.heads;
    tiling.work_rows = fit.work_rows;
    set_routes(&mut tiling, element_bytes);
    let ub_bytes = fixed
        + fit.tokens * token_bytes
        + SLOTS * fit.tokens * fit.heads * slot_row
        + fit.work_rows * work_row;
    Ok(Plan {
        kernel: kernel_name("rope_rotate", rotary.pairing(), problem.direction, dtype),
        blocks,
        tiling,
        map,
        ub_bytes,
    })
}

/// What competes for the unified buffer, in bytes.
struct Fit {
    ub: u32,
    fixed: u32,
    /// Angles of one token.
    token_bytes: u32,
    /// One row in a slot.
    slot_row: u32,
    /// One row in the work area.
    work_row: u32,
    heads: u32,
    /// Most tokens of a tile.
    longest: u32,
    slots: u32,
}

struct Fitted {
    tokens: u32,
    heads: u32,
    work_rows: u32,
}

impl Fit {
    /// A quarter of the buffer for arithmetic, in whole lines of `line` rows where one fits.
    fn work_rows(&self, line: u32) -> u32 {
        let rows = (self.ub / 4 / self.work_row).max(1);
        if rows >= line {
            rows / line * line
        } else {
            rows
        }
    }

    fn too_large(&self) -> AscendError {
        AscendError::TileTooLarge {
            needed_bytes: (self.fixed
                + self.token_bytes
                + self.work_row
                + self.slots * self.slot_row) as usize,
            available_bytes: self.ub as usize,
        }
    }

    /// All heads of as many tokens as fit; where one token does not, some of its heads.
    fn token_major(&self) -> Result<Fitted> {
        let mut work_rows = self.work_rows(self.heads);
        let room = |work_rows: u32| {
            self.ub
                .checked_sub(self.fixed + work_rows * self.work_row)
                .ok_or_else(|| self.too_large())
        };
        let token = self.token_bytes + self.slots * self.heads * self.slot_row;
        let tokens = (room(work_rows)? / token).min(self.longest);
        if tokens > 0 {
            return Ok(Fitted {
                tokens,
                heads: self.heads,
                work_rows: work_rows.min(tokens * self.heads),
            });
        }
        let heads = loop {
            let fitting =
                room(work_rows)?.saturating_sub(self.token_bytes) / (self.slots * self.slot_row);
            if fitting > 0 {
                break fitting;
            }
            if work_rows == 1 {
                return Err(self.too_large());
            }
            work_rows /= 2;
        };
        let heads = even(self.heads, heads);
        Ok(Fitted {
            tokens: 1,
            heads,
            work_rows: work_rows.min(heads),
        })
    }

    /// Long runs of tokens, of as many heads as fit.
    fn head_major(&self) -> Result<Fitted> {
        let mut tokens = self
            .longest
            .min(HEAD_MAJOR_TOKENS)
            .min((self.ub / 6 / self.token_bytes).max(1));
        loop {
            let work_rows = self.work_rows(tokens);
            let used = self.fixed + tokens * self.token_bytes + work_rows * self.work_row;
            let heads = self.ub.saturating_sub(used) / (self.slots * tokens * self.slot_row);
            if heads > 0 {
                let heads = even(self.heads, heads);
                return Ok(Fitted {
                    tokens,
                    heads,
                    work_rows: work_rows.min(tokens * heads),
                });
            }
            if tokens == 1 {
                return self.token_major();
            }
            tokens /= 2;
        }
    }
}

/// Cuts the gradient of the angles into tiles: each core sums all heads of its tokens.
///
/// # Errors
/// As [`plan_rotation`]; [`AscendError::InvalidArgument`] if batches share their angles, since
/// their gradients would have to be summed across cores.
pub fn plan_angle_gradient(problem: &Problem<'_>, machine: Machine, dtype: &str) -> Result<Plan> {
    let heads = check_shape(problem)?;
    if problem.shared_over_batch && problem.batch > 1 {
        let expected = "one row for each token (sum over the batch yourself)";
        return Err(AscendError::argument(
            "angle gradient",
            "angles",
            expected,
            "rows shared over the batch",
        ));
    }
    let rotary = problem.rotary;
    let element_bytes = problem.element_bytes;
    let segments = Segments::of(rotary, element_bytes);
    let coefficients = Coefficients::of(rotary, segments, Direction::Forward, None);
    let grid = Grid::of(problem);
    let mut tiling = common(problem, &grid, segments, &coefficients, Direction::Forward);
    let (terms, pitch) = angle_gradient_terms(rotary, segments);
    let permutation = permutation(
        rotary.pairing(),
        segments,
        rotary.rotary_dim(),
        element_bytes,
        true,
    );
    let mut map = Vec::new();
    for (offsets, signs) in &terms {
        map.extend_from_slice(offsets);
        map.extend(words(signs));
    }
    map.extend(permutation.iter().flatten());
    tiling.map_words = map.len() as u32;
    tiling.angle_pieces = terms.len() as u32;
    tiling.coef_pitch = pitch;
    tiling.head_groups = 1;
    tiling.load[1..].fill(Span::default());
    tiling.store[1..].fill(Span::default());
    let blocks = tiling.tokens.min(u64::from(machine.vector_cores)) as u32;

    let row_pitch = segments.row_pitch();
    let f32_copies = match (element_bytes, permutation.is_some()) {
        (2, _) => 3,
        (_, true) => 2,
        (_, false) => 1,
    };
    let work_row = row_pitch * 4 * (f32_copies + u32::from(permutation.is_some()));
    let slot_row = 2 * row_pitch * element_bytes;
    const OUT_TOKENS: u64 = 16;
    let tokens = tiling
        .tokens
        .div_ceil(u64::from(blocks))
        .min(tiling.seq)
        .min(OUT_TOKENS) as u32;
    let fixed = SLACK_BYTES
        + 4 * tiling.map_words.next_multiple_of(8)
        + 4 * 2 * row_pitch
        + 4 * pitch
        + 2 * tokens * 4 * pitch;
    // Tiles of one token: the tokens of the output are in `fixed`.
    let fit = Fit {
        ub: machine.ub_bytes,
        fixed,
        token_bytes: 0,
        slot_row,
        work_row,
        heads,
        longest: 1,
        slots: SLOTS,
    };
    let fit = fit.token_major()?;
    tiling.tokens_per_tile = tokens;
    tiling.heads_per_tile = fit.heads;
    tiling.work_rows = fit.work_rows;
    tiling.slots = SLOTS;
    set_routes(&mut tiling, element_bytes);
    let ub_bytes = fixed + SLOTS * fit.heads * slot_row + fit.work_rows * work_row;
    Ok(Plan {
        kernel: kernel_name(
            "rope_angle_grad",
            rotary.pairing(),
            Direction::Forward,
            dtype,
        ),
        blocks,
        tiling,
        map,
        ub_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::super::view::{Layout, View};
    use super::*;

    fn machine() -> Machine {
        Machine::new(40, None, Some(2201)).expect("a 910B")
    }

    fn plan(layout: Layout, seq: u32, heads: [u32; 2], head_dim: u32, element_bytes: u32) -> Plan {
        let rotary = Rotary::new(head_dim, Pairing::Half).expect("rotary");
        let layouts = heads.map(|heads| {
            let view = View::contiguous(layout, 1, seq, heads.max(1), head_dim);
            view.check("q", 1, seq, head_dim, usize::MAX).expect("view")
        });
        let problem = Problem {
            rotary: &rotary,
            direction: Direction::Forward,
            element_bytes,
            batch: 1,
            seq,
            heads,
            input: layouts,
            output: layouts,
            in_place: true,
            angles: AngleSource::PerToken,
            shared_over_batch: false,
        };
        plan_rotation(&problem, machine(), "bf16").expect("plan")
    }

    #[test]
    fn qwen3_vl_tiles_hold_four_tokens_with_all_heads() {
        let plan = plan(Layout::Tnd, 8192, [32, 8], 128, 2);
        assert_eq!(
            (plan.tiling.tokens_per_tile, plan.tiling.heads_per_tile),
            (4, 40)
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
                        for bytes in [2, 4] {
                            let plan = plan(layout, seq, heads, head_dim, bytes);
                            let t = &plan.tiling;
                            assert!(plan.ub_bytes <= machine().ub_bytes, "{plan:?}");
                            assert!(
                                t.tokens_per_tile >= 1 && t.heads_per_tile >= 1 && t.work_rows >= 1
                            );
                            assert!(u64::from(plan.blocks) <= t.tokens * u64::from(t.head_groups));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn fewer_tokens_than_cores_share_out_their_heads() {
        let plan = plan(Layout::Tnd, 3, [32, 8], 128, 2);
        assert_eq!(plan.blocks, 40);
        assert_eq!(plan.tiling.head_groups, 40);
    }

    #[test]
    fn unknown_architectures_are_refused() {
        assert!(Machine::new(40, None, Some(1001)).is_err());
        assert!(Machine::new(0, None, Some(2201)).is_err());
    }

    #[test]
    fn the_unified_buffer_is_the_architectures_unless_the_device_has_less() {
        let of = |ub, architecture| {
            let machine = Machine::new(64, ub, architecture).expect("valid");
            (machine.architecture, machine.ub_bytes)
        };
        let (a2, a5) = (Architecture::Dav2201, Architecture::Dav3510);
        assert_eq!(of(None, Some(2201)), (a2, 184 * 1024 - 256));
        assert_eq!(of(None, None), (a2, 184 * 1024 - 256));
        assert_eq!(of(Some(216 * 1024), Some(3510)), (a5, 216 * 1024));
        assert_eq!(of(Some(216 * 1024), None), (a5, 216 * 1024));
        assert_eq!(of(None, Some(3510)), (a5, 248 * 1024));
        assert!(Machine::new(64, Some(1), Some(3510)).is_err());
    }
}
