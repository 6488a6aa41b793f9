//! Cuts the norm with the rotation into tiles: whole heads of one tensor, in a row of lanes with
//! the members of pairs in segments.

use rope_core::{Direction, HeadNorm, NormOrder, Pairing};

use super::args::{KernelType, NormTiling, Route, Span, TensorLayout, Tiling};
use super::coefficients::{Channels, Coefficients, Segments};
use super::tiling::{
    Fit, Grid, Plan, Problem, check_heads, kernel_name, longest_run, route, share_out, untiled,
};
use crate::error::Result;
use crate::safe::Machine;

/// Bytes that stay unused after the kernels' buffers and between the parts of their work area: 256
/// each, for 18 of them at most.
const SLACK_BYTES: u32 = 18 * 256;

/// f32 of a block.
const F32_UNIT: u32 = 8;

/// Lanes that one repeat of an instruction adds up.
const LANES: u32 = 64;

/// One side of the kernel: x, or y. They differ if pairs move to other channels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    X,
    Y,
}

/// A row of a tile: the channels before the rotated ones, the segments, the channels after them,
/// each from a multiple of 32 bytes on.
#[derive(Clone, Copy)]
struct Row {
    channels: Channels,
    segments: Segments,
    /// Elements in 32 bytes.
    unit: u32,
}

impl Row {
    fn of(channels: Channels, element: KernelType) -> Self {
        let unit = 32 / element.bytes() as u32;
        let segments = match channels.pairing {
            // Taken apart into the first members and the second ones.
            Pairing::Adjacent => Segments {
                count: 2,
                length: channels.pairs,
                pitch: channels.pairs.next_multiple_of(F32_UNIT),
            },
            _ => Segments::of(channels, element.bytes() as u32, false),
        };
        Self {
            channels,
            segments,
            unit,
        }
    }

    fn segment_start(&self) -> u32 {
        self.channels.rotary_offset.next_multiple_of(self.unit)
    }

    fn after_start(&self) -> u32 {
        self.segment_start() + self.segments.row_pitch()
    }

    fn after(&self) -> u32 {
        self.channels.head_dim - self.channels.rotary_offset - self.channels.rotary_dim
    }

    fn pitch(&self) -> u32 {
        self.after_start() + self.after().next_multiple_of(self.unit)
    }

    /// True if the members of a pair are neighbours in memory.
    fn neighbours(&self, side: Side) -> bool {
        match self.channels.pairing {
            Pairing::Adjacent => true,
            Pairing::InterleaveHalf => side == Side::X,
            Pairing::Half | Pairing::Quarter => false,
        }
    }

    /// Channels that move together, with their starts in a row: the whole head if it has no gap,
    /// otherwise the rotated channels, those before and those after them.
    fn spans(&self, side: Side) -> ([Span; 3], [u32; 3]) {
        let channels = self.channels;
        let run = |channel, length, pieces| Span {
            channel,
            length,
            pieces,
        };
        let rotated = if self.neighbours(side) {
            run(channels.rotary_offset, channels.rotary_dim, 1)
        } else {
            run(
                channels.rotary_offset,
                self.segments.length,
                self.segments.count,
            )
        };
        let filled = rotated.length * rotated.pieces == self.segments.row_pitch();
        let last = rotated.pieces == 1 && self.after() == 0;
        if channels.rotary_offset == self.segment_start() && (filled || last) {
            let whole = run(0, channels.head_dim, 1);
            return ([whole, Span::default(), Span::default()], [0; 3]);
        }
        let part = |channel, length| {
            if length == 0 {
                Span::default()
            } else {
                run(channel, length, 1)
            }
        };
        let before = part(0, channels.rotary_offset);
        let after = part(channels.rotary_offset + channels.rotary_dim, self.after());
        (
            [rotated, before, after],
            [self.segment_start(), 0, self.after_start()],
        )
    }

    /// Runs of lanes that hold channels: first lane and length.
    fn runs(&self) -> Vec<[u32; 2]> {
        let Segments {
            count,
            length,
            pitch,
        } = self.segments;
        let segments = (0..count).map(|k| [self.segment_start() + k * pitch, length]);
        let before = [0, self.channels.rotary_offset];
        let after = [self.after_start(), self.after()];
        let mut runs: Vec<[u32; 2]> = Vec::new();
        for [start, length] in std::iter::once(before).chain(segments).chain([after]) {
            match runs.last_mut() {
                _ if length == 0 => {}
                Some(last) if last[0] + last[1] == start => last[1] += length,
                _ => runs.push([start, length]),
            }
        }
        runs
    }

    /// The channel of each lane, in x or y; `None` for a padding lane.
    fn channels(&self, side: Side) -> Vec<Option<u32>> {
        let channels = self.channels;
        let mut lane_channels = vec![None; self.pitch() as usize];
        let first = channels.rotary_offset;
        for channel in 0..first {
            lane_channels[channel as usize] = Some(channel);
        }
        for i in 0..self.after() {
            lane_channels[(self.after_start() + i) as usize] =
                Some(first + channels.rotary_dim + i);
        }
        for segment in 0..self.segments.count {
            for i in 0..self.segments.length {
                let lane = self.segment_start() + segment * self.segments.pitch + i;
                let channel = if self.neighbours(side) {
                    2 * i + segment
                } else {
                    segment * self.segments.length + i
                };
                lane_channels[lane as usize] = Some(first + channel);
            }
        }
        lane_channels
    }

    /// Where a channel lies in a row as it is loaded or stored.
    fn slot_lane(&self, side: Side, channel: u32) -> u32 {
        let channels = self.channels;
        if channel < channels.rotary_offset {
            return channel;
        }
        let rotated = channel - channels.rotary_offset;
        if rotated >= channels.rotary_dim {
            return self.after_start() + rotated - channels.rotary_dim;
        }
        if self.neighbours(side) {
            return self.segment_start() + rotated;
        }
        let (segment, i) = (
            rotated / self.segments.length,
            rotated % self.segments.length,
        );
        self.segment_start() + segment * self.segments.pitch + i
    }

    /// The kernel's map: byte offsets, as `rope_norm.h` describes them.
    fn map(&self, norm: &HeadNorm, element: KernelType) -> Vec<u32> {
        const BYTES: u32 = size_of::<f32>() as u32;
        let normalised = match norm.order() {
            NormOrder::BeforeRotation => Side::X,
            NormOrder::AfterRotation => Side::Y,
        };
        let weights = self.channels(normalised);
        let mut sums = vec![0; self.channels.head_dim.next_multiple_of(F32_UNIT) as usize];
        for (lane, channel) in (0..).zip(&weights) {
            if let Some(channel) = channel {
                sums[*channel as usize] = BYTES * lane;
            }
        }
        let mut map: Vec<u32> = weights.iter().map(|c| BYTES * c.unwrap_or(0)).collect();
        map.extend(sums);
        if element == KernelType::F32 && self.neighbours(Side::X) {
            let [x, y] = [Side::X, Side::Y].map(|side| {
                let slot = |channel| self.slot_lane(side, channel);
                let lane_channels = self.channels(side);
                let incoming = lane_channels.iter().map(|c| BYTES * c.map_or(0, slot));
                let mut outgoing = vec![0; lane_channels.len()];
                for (lane, channel) in (0..).zip(&lane_channels) {
                    if let Some(channel) = channel {
                        outgoing[slot(*channel) as usize] = BYTES * lane;
                    }
                }
                (incoming.collect::<Vec<u32>>(), outgoing)
            });
            [x.0, y.0, x.1, y.1]
                .iter()
                .for_each(|offsets| map.extend(offsets));
        }
        map
    }
}

/// The unified buffer required by a tile of these rows.
fn fit(
    problem: &Problem,
    row: &Row,
    tiling: &Tiling,
    machine: Machine,
    backward: bool,
    blocks: u32,
) -> Fit {
    let (channels, element_bytes) = (problem.channels, problem.element.bytes() as u32);
    let tensors = if problem.heads[1] > 0 { 2 } else { 1 };
    let copies = u32::from(element_bytes == 2 || row.neighbours(Side::X));
    // f32 of a row: t, the copies, the sums; the sum of each chunk, and a block or two.
    let runs = row.runs();
    let chunks: u32 = runs.iter().map(|[_, length]| length.div_ceil(LANES)).sum();
    let (rows_in_slot, work_lanes) = if backward {
        let lanes = row.pitch() * (1 + 2 * copies + tensors);
        (2, lanes + chunks + 2 * F32_UNIT)
    } else {
        (1, row.pitch() * (1 + copies) + chunks + F32_UNIT)
    };
    // Rows are rounded up to eight in the buffers of each chunk and row.
    let rounding = 4 * (F32_UNIT - 1) * (chunks + 2 * F32_UNIT);
    let channels_padded = channels.head_dim.next_multiple_of(F32_UNIT);
    Fit {
        ub: machine.ub_bytes,
        fixed: SLACK_BYTES
            + rounding
            + 4 * (tiling.map_words.next_multiple_of(F32_UNIT)
                + 3 * channels_padded
                + 2 * row.pitch()),
        token_bytes: 4 * 2 * tiling.raw_pitch,
        slot_row: rows_in_slot * row.pitch() * element_bytes,
        work_row: 4 * work_lanes,
        // A tile has heads of one tensor.
        heads: problem.heads[0].max(problem.heads[1]),
        longest: longest_run(tiling, blocks),
    }
}

/// The route of each span of q and of k, in the tiles that `tiling` has been fitted to.
fn routes(
    layouts: &[TensorLayout; 2],
    spans: &[Span; 3],
    tiling: &Tiling,
    element_bytes: u32,
) -> [[Route; 2]; 3] {
    let mut routes = [[Route::default(); 2]; 3];
    for (span_routes, span) in routes.iter_mut().zip(spans) {
        for ((to, layout), heads) in span_routes.iter_mut().zip(layouts).zip(tiling.heads) {
            *to = route(
                layout,
                *span,
                tiling.row_pitch,
                element_bytes,
                tiling.head_major != 0,
                heads.min(tiling.heads_per_tile),
                tiling.tokens_per_tile,
            );
        }
    }
    routes
}

/// Divides a norm with its rotation into tiles. With the layouts of the gradient of y, it plans the
/// backward, with the gradient of x as output. The problem's direction is not used.
///
/// # Errors
/// [`AscendError::TileTooLarge`](crate::AscendError::TileTooLarge) if not even one head fits;
/// [`AscendError::KernelLimit`](crate::AscendError::KernelLimit) for too many heads.
pub(super) fn plan_norm(
    problem: &Problem,
    gradient: Option<[TensorLayout; 2]>,
    norm: &HeadNorm,
    machine: Machine,
) -> Result<Plan<NormTiling>> {
    check_heads(problem.heads)?;
    let (channels, element) = (problem.channels, problem.element);
    let element_bytes = element.bytes() as u32;
    let row = Row::of(channels, element);
    let [forward, adjoint] = [Direction::Forward, Direction::Adjoint]
        .map(|direction| Coefficients::of(channels, row.segments, direction));
    let sides = [
        problem.input,
        problem.output,
        gradient.unwrap_or(problem.input),
    ];
    let grid = Grid::of(problem, sides);
    let backward = gradient.is_some();
    let (x_spans, y_spans) = (row.spans(Side::X), row.spans(Side::Y));
    let output = if backward { x_spans } else { y_spans };
    let map = row.map(norm, element);
    let mut tiling = Tiling {
        head_major: u32::from(grid.head_major(problem.heads)),
        row_pitch: row.pitch(),
        load: x_spans.0,
        store: output.0,
        map_words: map.len() as u32,
        ..untiled(problem, &grid, row.segments, &forward)
    };
    let blocks = share_out(&mut tiling, machine);

    let runs = row.runs();
    let fit = fit(problem, &row, &tiling, machine, backward, blocks);
    let fitted = if tiling.head_major == 0 {
        fit.token_major()
    } else {
        fit.head_major()
    }?;
    tiling.tokens_per_tile = fitted.tokens;
    tiling.heads_per_tile = fitted.heads;

    let routes = |side: usize, spans| routes(&grid.sides[side], spans, &tiling, element_bytes);
    let load_route = routes(0, &x_spans.0);
    let store_route = routes(1, &output.0);
    let gradient_route = routes(2, &y_spans.0);
    (tiling.load_route, tiling.store_route) = (load_route, store_route);
    let (mut run_start, mut run_length) = ([0; 6], [0; 6]);
    for (i, [start, length]) in runs.iter().enumerate() {
        (run_start[i], run_length[i]) = (*start, *length);
    }
    let family = if backward {
        "rope_norm_grad"
    } else {
        "rope_norm"
    };
    Ok(Plan {
        kernel: kernel_name(family, channels.pairing, Direction::Forward, element),
        blocks,
        tiling: NormTiling {
            rope: tiling,
            gradient: grid.sides[2],
            gradient_load: y_spans.0,
            gradient_route,
            load_start: x_spans.1,
            store_start: output.1,
            gradient_start: y_spans.1,
            segment_start: row.segment_start(),
            segment_pitch: row.segments.pitch,
            rotary_offset: channels.rotary_offset,
            runs: runs.len() as u32,
            run_start,
            run_length,
            adjoint_a_offset: adjoint.a_offset,
            adjoint_b_offset: adjoint.b_offset,
            adjoint_b_negative: adjoint.b_negative,
            head_dim: channels.head_dim,
            after: u32::from(norm.order() == NormOrder::AfterRotation),
            inv_head_dim: 1.0 / channels.head_dim as f32,
            eps: norm.eps() as f32,
            weight_offset: if norm.unit_offset() { 1.0 } else { 0.0 },
            reserved: 0,
        },
        map,
        ub_bytes: fit.used(&fitted),
    })
}
