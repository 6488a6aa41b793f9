//! Kernels of the gated delta rule: what lies between its products of matrices, in chunks of 64
//! tokens.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use std::ops::Range;

use super::args::{DeltaLocalArgs, DeltaPrepareArgs, DeltaTiling, KernelType};
use super::layer::{LayerKernels, MemoryPart, SLACK_BYTES, limit};
use crate::error::{AscendError, Result};
use crate::safe::{DeviceMemory, Machine};

const CHUNK: usize = DeltaSizes::CHUNK;
/// Rows of the numbers of a chunk's tokens.
const NUMBERS: usize = 6;
/// Channels come in whole blocks of f32; rows, too.
const UNIT: usize = 8;
/// Elements of a tile of rows, and the most channels of a row: a tile has at least a block of rows.
const TILE: usize = 8192;
const MOST_CHANNELS: usize = TILE / UNIT;
const F32_BYTES: usize = size_of::<f32>();

/// Sizes of the rule's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSizes {
    /// Samples.
    pub batch: usize,
    /// Tokens of a sample.
    pub tokens: usize,
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v, a multiple of these.
    pub heads: usize,
    /// Channels of q and k.
    pub key_dim: usize,
    /// Channels of v.
    pub value_dim: usize,
}

impl DeltaSizes {
    /// Tokens of a chunk.
    pub const CHUNK: usize = 64;

    /// Returns the number of states at a time: samples times heads.
    pub fn matrices(&self) -> usize {
        self.batch.saturating_mul(self.heads)
    }

    fn are_empty(&self) -> bool {
        [self.batch, self.tokens, self.key_heads, self.heads].contains(&0)
            || [self.key_dim, self.value_dim].contains(&0)
    }

    /// # Errors
    /// [`AscendError::InvalidArgument`] if the heads or the chunks do not fit;
    /// [`AscendError::KernelLimit`] beyond the kernels' channels.
    fn check(&self, operation: &'static str, chunks: &Range<usize>) -> Result<()> {
        if !self.heads.is_multiple_of(self.key_heads) {
            let expected = format!("a multiple of {}", self.key_heads);
            return Err(AscendError::argument(
                operation,
                "the heads",
                expected,
                self.heads,
            ));
        }
        let all = self.tokens.div_ceil(CHUNK);
        if chunks.end > all {
            let expected = format!("at most {all}");
            let found = chunks.end;
            return Err(AscendError::argument(
                operation,
                "the chunks",
                expected,
                found,
            ));
        }
        limit("channels of k", MOST_CHANNELS, self.key_dim)?;
        limit("channels of v", MOST_CHANNELS, self.value_dim)?;
        // Steps of a transfer between tokens have 32 bits.
        let most = u32::MAX as usize / MOST_CHANNELS / F32_BYTES;
        limit("heads", most, self.heads)?;
        limit("samples times heads", u32::MAX as usize, self.matrices())?;
        limit("chunks", u32::MAX as usize, all)?;
        // A remainder is beyond the limit of none.
        limit("channels of k beyond whole blocks", 0, self.key_dim % UNIT)?;
        limit(
            "channels of v beyond whole blocks",
            0,
            self.value_dim % UNIT,
        )
    }

    fn tiling(&self, chunks: &Range<usize>, row_tile: usize, keeps: bool) -> DeltaTiling {
        DeltaTiling {
            tokens: self.tokens as u64,
            units: (chunks.len() * self.matrices()) as u64,
            matrices: self.matrices() as u32,
            first_chunk: chunks.start as u32,
            key_heads: self.key_heads as u32,
            heads: self.heads as u32,
            key_dim: self.key_dim as u32,
            value_dim: self.value_dim as u32,
            row_tile: row_tile as u32,
            keeps: u32::from(keeps),
            scale: (1.0 / (self.key_dim as f64).sqrt()) as f32,
            epsilon: 0.0,
        }
    }
}

/// The inputs of the products of some chunks: of each chunk, then each sample and head, f32, with
/// zeros after the last token. Numbers of a token are the head's; sums of g are of its chunk.
#[derive(Debug)]
pub struct DeltaPrepare<'a> {
    /// The type of q, k and v.
    pub element: KernelType,
    /// The sizes.
    pub sizes: DeltaSizes,
    /// The chunks.
    pub chunks: Range<usize>,
    /// Added to the sums of squares of q and k.
    pub epsilon: f32,
    /// `[batch, tokens, key_heads, key_dim]`
    pub q: MemoryPart<&'a DeviceMemory>,
    /// As q.
    pub k: MemoryPart<&'a DeviceMemory>,
    /// `[batch, tokens, heads, value_dim]`
    pub v: MemoryPart<&'a DeviceMemory>,
    /// f32, `[batch, tokens, heads]`.
    pub g: MemoryPart<&'a DeviceMemory>,
    /// As g.
    pub beta: MemoryPart<&'a DeviceMemory>,
    /// Receives q, normalised and divided by the root of the channels, then k, normalised:
    /// `[.., 128, key_dim]`.
    pub qk: MemoryPart<&'a mut DeviceMemory>,
    /// Receives beta v, and beta exp(sum of g up to the token) k beside it: `[.., 64, value_dim +
    /// key_dim]`.
    pub driven: MemoryPart<&'a mut DeviceMemory>,
    /// Receives exp(sum of g after the token) k in its first columns: `[.., 64, key_dim + 64]`.
    pub left: MemoryPart<&'a mut DeviceMemory>,
    /// Receives exp(sum of g) times the unit matrix, then exp(sum of g up to the token) q: `[..,
    /// key_dim + 64, key_dim]`.
    pub base: MemoryPart<&'a mut DeviceMemory>,
    /// Receives g, beta, exp(sum of g up to the token), exp(sum of g after it), and what normalises
    /// q and k: `[.., 6, 64]`.
    pub numbers: MemoryPart<&'a mut DeviceMemory>,
    /// Of the backward.
    pub backward: Option<DeltaGradient<'a>>,
}

/// The inputs of the products of a backward; see [`DeltaPrepare`].
#[derive(Debug)]
pub struct DeltaGradient<'a> {
    /// The gradient of the output, as v.
    pub gradient: MemoryPart<&'a DeviceMemory>,
    /// Receives v, `[.., 64, value_dim]`.
    pub values: MemoryPart<&'a mut DeviceMemory>,
    /// Receives the gradient after `key_dim` rows, `[.., key_dim + 128, value_dim]`.
    pub joint: MemoryPart<&'a mut DeviceMemory>,
}

/// The weights of a chunk and the inverse of its writes, from products of its q and k.
#[derive(Debug)]
pub struct DeltaLocal<'a> {
    /// The sizes.
    pub sizes: DeltaSizes,
    /// The chunks.
    pub chunks: Range<usize>,
    /// k times q and k of [`DeltaPrepare`], transposed: `[.., 64, 128]`.
    pub products: MemoryPart<&'a DeviceMemory>,
    /// Of [`DeltaPrepare`].
    pub numbers: MemoryPart<&'a DeviceMemory>,
    /// Receives the products with q times the decays, in the last columns.
    pub left: MemoryPart<&'a mut DeviceMemory>,
    /// Receives (1 + A)^-1, `[.., 64, 64]`.
    pub inverse: MemoryPart<&'a mut DeviceMemory>,
    /// Receives the decays from the row's token to the column's, `[.., 64, 64]`.
    pub decays: Option<MemoryPart<&'a mut DeviceMemory>>,
}

impl LayerKernels {
    /// Queues the computation of the inputs of the rule's products.
    ///
    /// # Numerics
    /// Computed in f32, each operation rounded. Sums of g are added token by token.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small, or chunks that do not exist;
    /// [`AscendError::KernelLimit`] and [`AscendError::TileTooLarge`] beyond the limits of the
    /// kernels. In these cases, nothing is queued. Otherwise those of the runtime.
    pub fn prepare_delta(&self, request: DeltaPrepare<'_>) -> Result<()> {
        const OP: &str = "inputs of the delta rule";
        let DeltaPrepare {
            element,
            sizes,
            chunks,
            epsilon,
            ..
        } = request;
        if sizes.are_empty() || chunks.is_empty() {
            return Ok(());
        }
        sizes.check(OP, &chunks)?;
        let (stream, f32) = (&self.stream, KernelType::F32);
        let rows = sizes.batch.saturating_mul(sizes.tokens);
        let units = chunks.len().saturating_mul(sizes.matrices());
        let [keys, values, numbers] = [
            (sizes.key_heads, sizes.key_dim),
            (sizes.heads, sizes.value_dim),
            (sizes.heads, 1),
        ]
        .map(|(heads, channels)| rows.saturating_mul(heads).saturating_mul(channels));
        let inputs = [
            request.q.address(OP, "q", element, keys, stream)?,
            request.k.address(OP, "k", element, keys, stream)?,
            request.v.address(OP, "v", element, values, stream)?,
            request.g.address(OP, "g", f32, numbers, stream)?,
            request.beta.address(OP, "beta", f32, numbers, stream)?,
        ];
        let of_units = |rows: usize, columns: usize| units.saturating_mul(rows * columns);
        let keys = sizes.key_dim;
        let keeps = request.backward.is_some();
        let [folded, joint] = [CHUNK, keys + 2 * CHUNK].map(|rows| of_units(rows, sizes.value_dim));
        let [gradient, folded, joint] = match request.backward {
            Some(backward) => [
                backward
                    .gradient
                    .address(OP, "the gradient", element, values, stream)?,
                backward
                    .values
                    .address(OP, "the values", f32, folded, stream)?,
                backward.joint.address(OP, "joint", f32, joint, stream)?,
            ],
            None => [0; 3],
        };
        let qk = of_units(2 * CHUNK, keys);
        let driven = of_units(CHUNK, keys + sizes.value_dim);
        let (left, base) = (of_units(CHUNK, keys + CHUNK), of_units(keys + CHUNK, keys));
        let numbers = of_units(NUMBERS, CHUNK);
        let mut args = DeltaPrepareArgs {
            inputs,
            qk: request.qk.address(OP, "q and k", f32, qk, stream)?,
            driven: request
                .driven
                .address(OP, "the driven rows", f32, driven, stream)?,
            left: request
                .left
                .address(OP, "the left factor", f32, left, stream)?,
            base: request.base.address(OP, "the base", f32, base, stream)?,
            numbers: request
                .numbers
                .address(OP, "the numbers", f32, numbers, stream)?,
            values: folded,
            gradient,
            joint,
            tiling: sizes.tiling(&chunks, 0, keeps),
        };
        let machine = self.kernels.machine();
        args.tiling.row_tile = row_tile(&sizes, element, machine)?;
        args.tiling.epsilon = epsilon;
        let kernel = format!("rope_delta_prepare_{}", element.name());
        let blocks = units.min(machine.vector_cores as usize) as u32;
        // SAFETY: `DeltaPrepareArgs` is `repr(C)`: thirteen eight-byte addresses and a tiling of 56
        // bytes whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs
        // and rope_tiling.h). The addresses are those of memory of this stream, checked to hold
        // their tensors, or 0 for those that the tiling says are not kept. The kernels live until
        // `Drop` has synchronised the stream.
        unsafe { self.kernels.launch(stream, &kernel, blocks, args) }
    }

    /// Queues the computation of the triangles of chunks.
    ///
    /// # Numerics
    /// Computed in f32, each operation rounded; the inverse by forward substitution.
    ///
    /// # Errors
    /// Those of [`prepare_delta`](Self::prepare_delta).
    pub fn local_delta(&self, request: DeltaLocal<'_>) -> Result<()> {
        const OP: &str = "chunks of the delta rule";
        let DeltaLocal { sizes, chunks, .. } = request;
        if sizes.are_empty() || chunks.is_empty() {
            return Ok(());
        }
        sizes.check(OP, &chunks)?;
        let (stream, f32) = (&self.stream, KernelType::F32);
        let units = chunks.len().saturating_mul(sizes.matrices());
        let of_units = |rows: usize, columns: usize| units.saturating_mul(rows * columns);
        let square = of_units(CHUNK, CHUNK);
        let keeps = request.decays.is_some();
        let numbers = of_units(NUMBERS, CHUNK);
        let left = of_units(CHUNK, sizes.key_dim + CHUNK);
        let args = DeltaLocalArgs {
            products: request
                .products
                .address(OP, "the products", f32, 2 * square, stream)?,
            numbers: request
                .numbers
                .address(OP, "the numbers", f32, numbers, stream)?,
            left: request
                .left
                .address(OP, "the left factor", f32, left, stream)?,
            inverse: request
                .inverse
                .address(OP, "the inverse", f32, square, stream)?,
            decays: match request.decays {
                Some(part) => part.address(OP, "the decays", f32, square, stream)?,
                None => 0,
            },
            tiling: sizes.tiling(&chunks, CHUNK, keeps),
        };
        let machine = self.kernels.machine();
        // Eleven squares and the numbers of rows, in five buffers and a queue of two.
        let needed = (10 * CHUNK * CHUNK + 4 * CHUNK + 16 * CHUNK) * F32_BYTES + 8 * SLACK_BYTES;
        if needed > machine.ub_bytes as usize {
            return Err(too_large(needed, machine));
        }
        let blocks = units.min(machine.vector_cores as usize) as u32;
        // SAFETY: `DeltaLocalArgs` is `repr(C)`: five eight-byte addresses and a tiling of 56 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors, or 0 for decays that the tiling says are not kept. The kernels live until `Drop`
        // has synchronised the stream.
        unsafe {
            self.kernels
                .launch(stream, "rope_delta_local_f32", blocks, args)
        }
    }
}

fn too_large(needed_bytes: usize, machine: Machine) -> AscendError {
    AscendError::TileTooLarge {
        needed_bytes,
        available_bytes: machine.ub_bytes as usize,
    }
}

/// The rows of a tile: a part of the chunk.
fn row_tile(sizes: &DeltaSizes, element: KernelType, machine: Machine) -> Result<u32> {
    let widest = sizes.key_dim.max(sizes.value_dim);
    let is_wide = element == KernelType::F32;
    // As loaded, twice; as f32, once of 16 bits; as stored, twice.
    let loaded = 2 * (widest * element.bytes()).next_multiple_of(32);
    let row_bytes = loaded + (3 - usize::from(is_wide)) * widest * F32_BYTES;
    // Numbers of a chunk: two loaded and six computed over blocks, and rows of them.
    let fixed = (8 * UNIT + NUMBERS + 1) * CHUNK * F32_BYTES + 9 * SLACK_BYTES;
    let fits = |rows: usize| {
        rows * widest <= TILE && fixed + rows * row_bytes <= machine.ub_bytes as usize
    };
    let rows = [CHUNK, CHUNK / 2, CHUNK / 4, UNIT];
    match rows.into_iter().find(|rows| fits(*rows)) {
        Some(rows) => Ok(rows as u32),
        None => Err(too_large(fixed + UNIT * row_bytes, machine)),
    }
}
