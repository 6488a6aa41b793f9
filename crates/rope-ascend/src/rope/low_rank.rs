//! Adds the term of a low-rank adapter to its layer's product.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use std::sync::Arc;

use super::args::{KernelType, LowRankArgs, LowRankTiling};
use super::kernels::Kernels;
use crate::error::{AscendError, Result};
use crate::safe::{DeviceMemory, Machine, Stream};

const OP: &str = "low-rank term";
/// Bytes that the factor of a tile may take.
const FACTOR_BYTES: usize = 64 * 1024;
/// Columns of a tile: runs of 512 bytes in 16 bits.
const COLUMNS: usize = 256;
/// Columns come in whole vectors; rows such that a row of h in 16 bits fills blocks.
const COLUMN_UNIT: usize = 64;
const ROW_UNIT: usize = 16;
/// Rows are the repeats of an instruction.
const MOST_ROWS: usize = 240;
/// As the kernels reserve after each of their buffers.
const SLACK_BYTES: usize = 256;

/// Part of a memory, from one of its elements on.
#[derive(Clone, Copy, Debug)]
pub struct Part<M> {
    /// The memory.
    pub memory: M,
    /// Elements before it.
    pub offset: usize,
}

/// The term of a low-rank adapter: y += h^T b with h summed over its parts.
#[derive(Debug)]
pub struct LowRankTerm<'a> {
    /// The type of y and of the rounded h.
    pub element: KernelType,
    /// Rows and columns of y.
    pub size: [usize; 2],
    /// Rows of b, and of each part of h.
    pub rank: usize,
    /// Elements between the parts of h, one or two.
    pub part_starts: &'a [usize],
    /// The product, `[rows, columns]`.
    pub y: Part<&'a mut DeviceMemory>,
    /// f32, each part `[rank, rows]`.
    pub h: Part<&'a DeviceMemory>,
    /// f32, `[rank, columns]`.
    pub b: Part<&'a DeviceMemory>,
    /// Receives h in the type of y, `[rank, rows]`; of 16-bit types alone.
    pub rounded_h: Option<Part<&'a mut DeviceMemory>>,
}

/// Adds low-rank terms on one stream.
#[derive(Debug)]
pub struct LowRank {
    stream: Stream,
    kernels: Arc<Kernels>,
}

impl LowRank {
    /// Creates one for the work of a stream.
    pub fn new(stream: &Stream, kernels: Arc<Kernels>) -> Self {
        let stream = stream.clone();
        Self { stream, kernels }
    }

    /// Queues an addition, in one pass over y.
    ///
    /// # Numerics
    /// Computed in f32 in the order of the ranks, and rounded once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small; [`AscendError::KernelLimit`]
    /// and [`AscendError::TileTooLarge`] beyond the limits of the kernels. In these cases, nothing
    /// is queued. Otherwise those of the runtime.
    pub fn add(&self, term: LowRankTerm<'_>) -> Result<()> {
        let LowRankTerm {
            element,
            size: [rows, columns],
            rank,
            part_starts,
            y,
            h,
            b,
            rounded_h,
        } = term;
        let inner = product(rank, rows);
        let (parts, part_stride) = match *part_starts {
            [0] => (1, 0),
            [0, second] => (2, second),
            _ => {
                let expected = "one part at 0, or two";
                let found = format!("{part_starts:?}");
                return Err(AscendError::argument(OP, "parts", expected, found));
            }
        };
        let h_elements = inner.saturating_add(part_stride);
        let y = y.address("y", element, product(rows, columns), &self.stream)?;
        let h = h.address("h", KernelType::F32, h_elements, &self.stream)?;
        let b = b.address("b", KernelType::F32, product(rank, columns), &self.stream)?;
        let rounded = match rounded_h {
            Some(_) if element == KernelType::F32 => {
                let expected = "none for f32";
                return Err(AscendError::argument(OP, "the rounded h", expected, "one"));
            }
            Some(part) => part.address("the rounded h", element, inner, &self.stream)?,
            None => 0,
        };
        if [rows, columns, rank].contains(&0) {
            return Ok(());
        }
        let machine = self.kernels.machine();
        let shape = [rows, columns, rank, parts];
        let (mut tiling, blocks) = plan(shape, element, rounded != 0, machine)?;
        tiling.part_stride = part_stride as u64;
        let args = LowRankArgs {
            y,
            h,
            b,
            rounded_h: rounded,
            tiling,
        };
        let kernel = format!("rope_low_rank_{}", element.name());
        // SAFETY: `LowRankArgs` is `repr(C)`: four eight-byte addresses and a tiling of 40 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors. The kernels live until `Drop` has synchronised the stream.
        unsafe { self.kernels.launch(&self.stream, &kernel, blocks, args) }
    }
}

impl Drop for LowRank {
    fn drop(&mut self) {
        // The kernels may be unloaded next; queued launches must be done with them.
        self.stream.finish_quietly();
    }
}

impl<M: std::ops::Deref<Target = DeviceMemory>> Part<M> {
    /// The address of its first element, checked to have `elements` after it.
    fn address(
        &self,
        name: &'static str,
        element: KernelType,
        elements: usize,
        stream: &Stream,
    ) -> Result<u64> {
        stream.owns(OP, &self.memory)?;
        let held = self.memory.bytes() / element.bytes();
        if self.offset > held || elements > held - self.offset {
            return Err(AscendError::argument(
                OP,
                name,
                format!("within its memory of {held} elements"),
                format!("{elements} elements from {}", self.offset),
            ));
        }
        Ok(self.memory.pointer() as u64 + (self.offset * element.bytes()) as u64)
    }
}

/// A product that is too large for any memory where it overflows.
fn product(x: usize, y: usize) -> usize {
    x.checked_mul(y).unwrap_or(usize::MAX)
}

/// The tiling of [rows, columns, rank, parts], and the number of cores.
fn plan(
    [rows, columns, rank, parts]: [usize; 4],
    element: KernelType,
    stores_h: bool,
    machine: Machine,
) -> Result<(LowRankTiling, u32)> {
    let limit = |what, limit: usize, found: usize| {
        if found <= limit {
            return Ok(());
        }
        Err(AscendError::KernelLimit { what, limit, found })
    };
    limit("ranks", FACTOR_BYTES / (COLUMN_UNIT * 4), rank)?;
    limit("columns", u32::MAX as usize / 4, columns)?;
    limit("rows", u32::MAX as usize / 4, rows)?;
    let fitting = FACTOR_BYTES / (rank * 4) / COLUMN_UNIT * COLUMN_UNIT;
    let column_tile = columns
        .next_multiple_of(COLUMN_UNIT)
        .min(fitting.min(COLUMNS));
    let slots = LowRankTiling::SLOTS as usize;
    let is_wide = element == KernelType::F32;
    let element_bytes = slots * element.bytes() + if is_wide { 0 } else { 4 };
    let inner_bytes = 2 * parts * 4 + if stores_h { element.bytes() } else { 0 };
    let spread_bytes = LowRankTiling::CHUNK as usize * 32;
    let row_bytes = column_tile * element_bytes + rank * inner_bytes + spread_bytes;
    // The parts of a small h lie a vector apart.
    let apart_bytes = 2 * COLUMN_UNIT * 4;
    let fixed_bytes = rank * column_tile * 4 + apart_bytes + (slots + 5) * SLACK_BYTES;
    let available = machine.ub_bytes as usize;
    let row_tile = available.saturating_sub(fixed_bytes) / row_bytes / ROW_UNIT * ROW_UNIT;
    if row_tile == 0 {
        return Err(AscendError::TileTooLarge {
            needed_bytes: fixed_bytes + ROW_UNIT * row_bytes,
            available_bytes: available,
        });
    }
    let row_tile = row_tile.min(MOST_ROWS).min(rows.next_multiple_of(ROW_UNIT));
    let tiles = rows.div_ceil(row_tile) * columns.div_ceil(column_tile);
    let tiling = LowRankTiling {
        rows: rows as u64,
        part_stride: 0,
        columns: columns as u32,
        rank: rank as u32,
        parts: parts as u32,
        row_tile: row_tile as u32,
        column_tile: column_tile as u32,
        stores_h: u32::from(stores_h),
    };
    Ok((tiling, tiles.min(machine.vector_cores as usize) as u32))
}
