//! Kernels around the rotation: the term of a low-rank adapter, the gate of a feed-forward network,
//! the short convolution, and the update of the weights.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use std::sync::Arc;

use super::args::{
    AdamWArgs, AdamWTiling, DenseTiling, KernelType, LowRankArgs, LowRankTiling,
    ShortConvolutionArgs, ShortConvolutionTiling, SquareSumsArgs, SwiGluArgs, UpdateFactors,
};
use super::kernels::Kernels;
use crate::error::{AscendError, Result};
use crate::safe::{DeviceMemory, Machine, Stream};

/// Bytes that the factor of a tile may take.
const FACTOR_BYTES: usize = 64 * 1024;
/// Columns of a tile: runs of 512 bytes in 16 bits.
const COLUMNS: usize = 256;
/// Columns come in whole vectors; rows such that a row of h in 16 bits fills blocks.
const COLUMN_UNIT: usize = 64;
const ROW_UNIT: usize = 16;
/// Rows are the repeats of an instruction.
const MOST_ROWS: usize = 240;
/// Columns of a tile of the short convolution: runs of 256 bytes in 16 bits.
const CONVOLVED_COLUMNS: usize = 128;
/// Few rows are spread over the cores, but a tile loads rows beside its own.
const LEAST_CONVOLVED_ROWS: usize = 8;
/// Parts of the work of a core in the backward, of which each has sums for the weight's gradient.
const PARTS_PER_CORE: usize = 4;
const MOST_TAPS: usize = 8;
/// As the kernels reserve after each of their buffers.
pub(super) const SLACK_BYTES: usize = 256;
const F32_BYTES: usize = size_of::<f32>();

/// A part of a memory: from one of its elements on.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPart<M> {
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
    pub y: MemoryPart<&'a mut DeviceMemory>,
    /// f32, each part `[rank, rows]`.
    pub h: MemoryPart<&'a DeviceMemory>,
    /// f32, `[rank, columns]`.
    pub b: MemoryPart<&'a DeviceMemory>,
    /// Receives h in the type of y, `[rank, rows]`; of 16-bit types alone.
    pub rounded_h: Option<MemoryPart<&'a mut DeviceMemory>>,
}

/// A gate: y = silu(gate) up, over as many elements of each.
#[derive(Debug)]
pub struct Gate<'a> {
    /// The type of all tensors.
    pub element: KernelType,
    /// Elements of each tensor.
    pub elements: usize,
    /// The gate.
    pub gate: MemoryPart<&'a DeviceMemory>,
    /// The gated values.
    pub up: MemoryPart<&'a DeviceMemory>,
    /// Receives the output.
    pub y: MemoryPart<&'a mut DeviceMemory>,
}

/// The backward of a [`Gate`].
#[derive(Debug)]
pub struct GateBackward<'a> {
    /// The type of all tensors.
    pub element: KernelType,
    /// Elements of each tensor.
    pub elements: usize,
    /// The gate.
    pub gate: MemoryPart<&'a DeviceMemory>,
    /// The gated values.
    pub up: MemoryPart<&'a DeviceMemory>,
    /// The gradient of the output.
    pub gradient: OutputGradient<'a>,
    /// Receives the gradient of the gate.
    pub gate_gradient: MemoryPart<&'a mut DeviceMemory>,
    /// Receives the gradient of the gated values.
    pub up_gradient: MemoryPart<&'a mut DeviceMemory>,
}

/// The gradient of a [`Gate`]'s output.
#[derive(Debug)]
pub enum OutputGradient<'a> {
    /// It stays as it is.
    Kept(MemoryPart<&'a DeviceMemory>),
    /// The output, computed again, replaces it.
    Replaced(MemoryPart<&'a mut DeviceMemory>),
}

/// A short causal convolution of each channel with SiLU, or its backward.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvolution<'a> {
    /// The type of all tensors but `starts` and sums.
    pub element: KernelType,
    /// Tokens, and their channels.
    pub size: [usize; 2],
    /// Factors of each channel.
    pub taps: usize,
    /// Sequences that the tokens consist of.
    pub sequences: usize,
    /// The tokens, `[tokens, channels]`.
    pub x: MemoryPart<&'a DeviceMemory>,
    /// `[taps, channels]`; the last factor is that of a token itself.
    pub weight: MemoryPart<&'a DeviceMemory>,
    /// i32, the index of the first token of each sequence, ascending from 0.
    pub starts: MemoryPart<&'a DeviceMemory>,
}

/// The gradients of a [`ShortConvolution`]: one that is read, and two that are written.
#[derive(Debug)]
pub struct ShortConvolutionGradients<'a> {
    /// The gradient of the output.
    pub gradient: MemoryPart<&'a DeviceMemory>,
    /// Receives the gradient of the tokens.
    pub x_gradient: MemoryPart<&'a mut DeviceMemory>,
    /// Receives sums for the gradient of the weight in f32, `[parts, taps, channels]`, with
    /// [`LayerKernels::short_convolution_parts`].
    pub weight_sums: MemoryPart<&'a mut DeviceMemory>,
}

/// An AdamW update of f32 values, in place.
#[derive(Debug)]
pub struct Update<'a> {
    /// Elements of each tensor.
    pub elements: usize,
    /// The numbers of the update.
    pub factors: UpdateFactors,
    /// The values.
    pub value: MemoryPart<&'a mut DeviceMemory>,
    /// Their gradient: in f32, or in the type of the rounded values.
    pub gradient: (KernelType, MemoryPart<&'a DeviceMemory>),
    /// The moments.
    pub moments: [MemoryPart<&'a mut DeviceMemory>; 2],
    /// Receives the new values in a type of 16 bits.
    pub rounded: Option<(KernelType, MemoryPart<&'a mut DeviceMemory>)>,
}

/// Runs the kernels of layers on one stream.
///
/// Work is queued and runs later; the stream's next synchronisation returns its errors.
#[derive(Debug)]
pub struct LayerKernels {
    pub(super) stream: Stream,
    pub(super) kernels: Arc<Kernels>,
}

impl LayerKernels {
    /// Creates them for the work of a stream.
    pub fn new(stream: &Stream, kernels: Arc<Kernels>) -> Self {
        let stream = stream.clone();
        Self { stream, kernels }
    }

    /// Queues the addition of a low-rank term, in one pass over y.
    ///
    /// # Numerics
    /// Computed in f32 in the order of the ranks, and rounded once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small; [`AscendError::KernelLimit`]
    /// and [`AscendError::TileTooLarge`] beyond the limits of the kernels. In these cases, nothing
    /// is queued. Otherwise those of the runtime.
    pub fn add_low_rank(&self, term: LowRankTerm<'_>) -> Result<()> {
        const OP: &str = "low-rank term";
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
        let inner = rank.saturating_mul(rows);
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
        let y = y.address(OP, "y", element, rows.saturating_mul(columns), &self.stream)?;
        let h = h.address(OP, "h", KernelType::F32, h_elements, &self.stream)?;
        let b = b.address(
            OP,
            "b",
            KernelType::F32,
            rank.saturating_mul(columns),
            &self.stream,
        )?;
        let rounded = match rounded_h {
            Some(_) if element == KernelType::F32 => {
                let expected = "none for f32";
                return Err(AscendError::argument(OP, "the rounded h", expected, "one"));
            }
            Some(part) => part.address(OP, "the rounded h", element, inner, &self.stream)?,
            None => 0,
        };
        if [rows, columns, rank].contains(&0) {
            return Ok(());
        }
        let machine = self.kernels.machine();
        let shape = [rows, columns, rank, parts];
        let (mut tiling, blocks) = plan_low_rank(shape, element, rounded != 0, machine)?;
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

    /// Queues a gate.
    ///
    /// # Numerics
    /// Computed in f32, each operation rounded, and rounded once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small; nothing is queued then.
    /// Otherwise those of the runtime.
    pub fn gate(&self, request: Gate<'_>) -> Result<()> {
        const OP: &str = "gate";
        let Gate {
            element, elements, ..
        } = request;
        let args = SwiGluArgs {
            gate: request
                .gate
                .address(OP, "the gate", element, elements, &self.stream)?,
            up: request
                .up
                .address(OP, "up", element, elements, &self.stream)?,
            gradient: 0,
            outputs: [
                request
                    .y
                    .address(OP, "y", element, elements, &self.stream)?,
                0,
                0,
            ],
            tiling: DenseTiling::default(),
        };
        self.launch_gate("swiglu", 2 * element.bytes(), 1, (element, elements), args)
    }

    /// Queues the backward of a gate.
    ///
    /// # Numerics
    /// As [`gate`](Self::gate).
    ///
    /// # Errors
    /// Those of [`gate`](Self::gate).
    pub fn gate_backward(&self, request: GateBackward<'_>) -> Result<()> {
        const OP: &str = "backward of a gate";
        let GateBackward {
            element,
            elements,
            gate,
            up,
            gradient,
            gate_gradient,
            up_gradient,
        } = request;
        let stream = &self.stream;
        let name = "the gradient";
        let (gradient, output) = match gradient {
            OutputGradient::Kept(part) => (part.address(OP, name, element, elements, stream)?, 0),
            OutputGradient::Replaced(part) => {
                let address = part.address(OP, name, element, elements, stream)?;
                (address, address)
            }
        };
        let outputs = [
            gate_gradient.address(OP, "the gate's gradient", element, elements, stream)?,
            up_gradient.address(OP, "up's gradient", element, elements, stream)?,
            output,
        ];
        let args = SwiGluArgs {
            gate: gate.address(OP, "the gate", element, elements, stream)?,
            up: up.address(OP, "up", element, elements, stream)?,
            gradient,
            outputs,
            tiling: DenseTiling::default(),
        };
        self.launch_gate(
            "swiglu_grad",
            3 * element.bytes(),
            3,
            (element, elements),
            args,
        )
    }

    /// Queues a short convolution.
    ///
    /// # Numerics
    /// Computed in f32, from the farthest token to the own, each operation rounded, and rounded
    /// once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small, or no taps or sequences;
    /// [`AscendError::KernelLimit`] and [`AscendError::TileTooLarge`] beyond the limits of the
    /// kernels. In these cases, nothing is queued. Otherwise those of the runtime.
    pub fn short_convolution(
        &self,
        request: ShortConvolution<'_>,
        y: MemoryPart<&mut DeviceMemory>,
    ) -> Result<()> {
        const OP: &str = "short convolution";
        let [tokens, channels] = request.size;
        let elements = tokens.saturating_mul(channels);
        let out = y.address(OP, "y", request.element, elements, &self.stream)?;
        self.launch_convolution(OP, request, [0, out, 0])
    }

    /// The parts of the sums that the backward of a convolution writes.
    ///
    /// # Errors
    /// Those of [`short_convolution`](Self::short_convolution) but for memory.
    pub fn short_convolution_parts(&self, request: ShortConvolution<'_>) -> Result<usize> {
        let (tiling, _) = plan_convolution(&request, true, self.kernels.machine())?;
        Ok(tiling.parts as usize)
    }

    /// Queues the backward of a short convolution.
    ///
    /// # Numerics
    /// As [`short_convolution`](Self::short_convolution); the order of the sums for the gradient of
    /// the weight is fixed by sizes and machine.
    ///
    /// # Errors
    /// Those of [`short_convolution`](Self::short_convolution).
    pub fn short_convolution_backward(
        &self,
        request: ShortConvolution<'_>,
        gradients: ShortConvolutionGradients<'_>,
    ) -> Result<()> {
        const OP: &str = "backward of a short convolution";
        let ShortConvolutionGradients {
            gradient,
            x_gradient,
            weight_sums,
        } = gradients;
        let (element, stream) = (request.element, &self.stream);
        let [tokens, channels] = request.size;
        let elements = tokens.saturating_mul(channels);
        let of_part = request.taps.saturating_mul(channels);
        let sums = self
            .short_convolution_parts(request)?
            .saturating_mul(of_part);
        let addresses = [
            gradient.address(OP, "the gradient", element, elements, stream)?,
            x_gradient.address(OP, "x's gradient", element, elements, stream)?,
            weight_sums.address(OP, "the weight's sums", KernelType::F32, sums, stream)?,
        ];
        self.launch_convolution(OP, request, addresses)
    }

    /// Queues an AdamW update, in one pass.
    ///
    /// # Numerics
    /// Computed in f32 in the order of [`UpdateFactors`], each operation rounded.
    ///
    /// # Errors
    /// Those of [`gate`](Self::gate).
    pub fn update(&self, request: Update<'_>) -> Result<()> {
        const OP: &str = "AdamW update";
        let Update {
            elements,
            factors,
            value,
            gradient: (gradient_type, gradient),
            moments: [first, second],
            rounded,
        } = request;
        let (stream, f32) = (&self.stream, KernelType::F32);
        let (rounded_type, rounded) = match rounded {
            Some((KernelType::F32, _)) => {
                let (expected, found) = ("a type of 16 bits", "f32");
                return Err(AscendError::argument(OP, "rounded", expected, found));
            }
            Some((element, part)) => {
                let address = part.address(OP, "rounded", element, elements, stream)?;
                (element, address)
            }
            None => (f32, 0),
        };
        let moments = [
            first.address(OP, "the first moment", f32, elements, stream)?,
            second.address(OP, "the second moment", f32, elements, stream)?,
        ];
        let value = value.address(OP, "the value", f32, elements, stream)?;
        if gradient_type != f32 && gradient_type != rounded_type {
            let expected = "f32, or the type of the rounded values";
            let found = gradient_type.name();
            return Err(AscendError::argument(OP, "the gradient", expected, found));
        }
        let gradient = gradient.address(OP, "the gradient", gradient_type, elements, stream)?;
        if elements == 0 {
            return Ok(());
        }
        // Two slots for each tensor, and two numbers of work; with a gradient of 16 bits three, and
        // smaller slots.
        let bytes = 10 * F32_BYTES
            + if rounded == 0 {
                0
            } else {
                2 * rounded_type.bytes()
            };
        let (tile, blocks) = plan_dense(elements, bytes, 11, self.kernels.machine())?;
        let args = AdamWArgs {
            value,
            gradient,
            moments,
            rounded,
            tiling: AdamWTiling {
                elements: elements as u64,
                tile,
                factors,
                reserved: 0,
            },
        };
        let narrow = if gradient_type == f32 { "" } else { "narrow_" };
        let kernel = format!("rope_adamw_{narrow}{}", rounded_type.name());
        // SAFETY: `AdamWArgs` is `repr(C)`: five eight-byte addresses and a tiling of 48 bytes whose
        // fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors, or 0 for the rounded values of f32, which the kernel does not use. The kernels
        // live until `Drop` has synchronised the stream.
        unsafe { self.kernels.launch(stream, &kernel, blocks, args) }
    }

    /// Queues the sums of the squares of each `chunk` elements of x, in f32, a tree of additions.
    /// x has any type of the kernels.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory that is too small, or a chunk that is not a power
    /// of two from 128 to 8,192. Otherwise those of the runtime.
    pub fn square_sums(
        &self,
        elements: usize,
        chunk: usize,
        (element, x): (KernelType, MemoryPart<&DeviceMemory>),
        sums: MemoryPart<&mut DeviceMemory>,
    ) -> Result<()> {
        const OP: &str = "sums of squares";
        if !chunk.is_power_of_two() || !(128..=8192).contains(&chunk) {
            let expected = "a power of two from 128 to 8192";
            return Err(AscendError::argument(OP, "the chunk", expected, chunk));
        }
        let (stream, chunks) = (&self.stream, elements.div_ceil(chunk));
        let x = x.address(OP, "x", element, elements, stream)?;
        let sums = sums.address(OP, "the sums", KernelType::F32, chunks, stream)?;
        if elements == 0 {
            return Ok(());
        }
        let blocks = chunks.min(self.kernels.machine().vector_cores as usize) as u32;
        let tiling = DenseTiling {
            elements: elements as u64,
            tile: chunk as u32,
            reserved: 0,
        };
        let args = SquareSumsArgs { x, sums, tiling };
        let kernel = format!("rope_square_sums_{}", element.name());
        // SAFETY: `SquareSumsArgs` is `repr(C)`: two eight-byte addresses and a tiling of 16 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors. The kernels live until `Drop` has synchronised the stream.
        unsafe { self.kernels.launch(stream, &kernel, blocks, args) }
    }

    /// Queues a convolution, or its backward if there is a gradient.
    fn launch_convolution(
        &self,
        op: &'static str,
        request: ShortConvolution<'_>,
        [gradient, out, weight_sums]: [u64; 3],
    ) -> Result<()> {
        let ShortConvolution {
            element,
            size: [tokens, channels],
            taps,
            sequences,
            x,
            weight,
            starts,
        } = request;
        let stream = &self.stream;
        let elements = tokens.saturating_mul(channels);
        let factors = taps.saturating_mul(channels);
        let x = x.address(op, "x", element, elements, stream)?;
        let weight = weight.address(op, "the weight", element, factors, stream)?;
        // As wide as i32.
        let starts = starts.address(op, "the starts", KernelType::F32, sequences, stream)?;
        let is_backward = gradient != 0;
        let (tiling, blocks) = plan_convolution(&request, is_backward, self.kernels.machine())?;
        if elements == 0 {
            return Ok(());
        }
        let args = ShortConvolutionArgs {
            x,
            weight,
            starts,
            gradient,
            out,
            weight_sums,
            tiling,
        };
        let direction = if is_backward { "_grad" } else { "" };
        let kernel = format!("rope_short_convolution{direction}_{}", element.name());
        // SAFETY: `ShortConvolutionArgs` is `repr(C)`: six eight-byte addresses and a tiling of 32
        // bytes whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs
        // and rope_tiling.h). The addresses are those of memory of this stream, checked to hold
        // their tensors, or 0 where the kernel uses none; rows that start sequences are clipped to
        // a tile, whatever their numbers. The kernels live until `Drop` has synchronised the
        // stream.
        unsafe { self.kernels.launch(stream, &kernel, blocks, args) }
    }

    /// Queues a kernel that loads `element_bytes` for each element and has `numbers` f32 of work
    /// for it, beside f32 copies of what it loads.
    fn launch_gate(
        &self,
        kernel: &str,
        element_bytes: usize,
        numbers: usize,
        (element, elements): (KernelType, usize),
        args: SwiGluArgs,
    ) -> Result<()> {
        if elements == 0 {
            return Ok(());
        }
        let copied = match element {
            KernelType::F32 => 0,
            KernelType::F16 | KernelType::Bf16 => element_bytes / element.bytes(),
        };
        let bytes = 2 * element_bytes + (copied + numbers) * F32_BYTES;
        let (tile, blocks) = plan_dense(elements, bytes, 8, self.kernels.machine())?;
        let tiling = DenseTiling {
            elements: elements as u64,
            tile,
            reserved: 0,
        };
        let kernel = format!("rope_{kernel}_{}", element.name());
        // SAFETY: `SwiGluArgs` is `repr(C)`: six eight-byte addresses and a tiling of 16 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors, or 0 where the kernel uses none. The kernels live until `Drop` has synchronised
        // the stream.
        unsafe {
            self.kernels
                .launch(&self.stream, &kernel, blocks, SwiGluArgs { tiling, ..args })
        }
    }
}

/// The elements of a tile of a dense tensor, and the number of cores, for a kernel that has this
/// number of buffers, with `bytes` per element in all of them together.
fn plan_dense(
    elements: usize,
    bytes: usize,
    buffers: usize,
    machine: Machine,
) -> Result<(u32, u32)> {
    let (available, slack) = (machine.ub_bytes as usize, buffers * SLACK_BYTES);
    let tile = available.saturating_sub(slack) / bytes / COLUMN_UNIT * COLUMN_UNIT;
    if tile == 0 {
        return Err(AscendError::TileTooLarge {
            needed_bytes: COLUMN_UNIT * bytes + slack,
            available_bytes: available,
        });
    }
    // Few elements are spread over the cores.
    let cores = machine.vector_cores as usize;
    let share = elements.div_ceil(cores).next_multiple_of(COLUMN_UNIT);
    let tile = tile.min(share);
    Ok((tile as u32, elements.div_ceil(tile).min(cores) as u32))
}

impl Drop for LayerKernels {
    fn drop(&mut self) {
        // The kernels may be unloaded next; queued launches must be done with them.
        self.stream.finish_quietly();
    }
}

impl<M: std::ops::Deref<Target = DeviceMemory>> MemoryPart<M> {
    /// The address of its first element, checked to have `elements` after it.
    pub(super) fn address(
        &self,
        operation: &'static str,
        name: &'static str,
        element: KernelType,
        elements: usize,
        stream: &Stream,
    ) -> Result<u64> {
        stream.owns(operation, &self.memory)?;
        let held = self.memory.bytes() / element.bytes();
        if self.offset > held || elements > held - self.offset {
            return Err(AscendError::argument(
                operation,
                name,
                format!("within its memory of {held} elements"),
                format!("{elements} elements from {}", self.offset),
            ));
        }
        Ok(self.memory.pointer() as u64 + (self.offset * element.bytes()) as u64)
    }
}

/// # Errors
/// [`AscendError::KernelLimit`]
pub(super) fn limit(what: &'static str, limit: usize, found: usize) -> Result<()> {
    if found <= limit {
        return Ok(());
    }
    Err(AscendError::KernelLimit { what, limit, found })
}

/// The tiling of a short convolution, and the number of cores.
fn plan_convolution(
    request: &ShortConvolution<'_>,
    is_backward: bool,
    machine: Machine,
) -> Result<(ShortConvolutionTiling, u32)> {
    let ShortConvolution {
        element,
        size: [tokens, channels],
        taps,
        sequences,
        ..
    } = *request;
    for (name, count) in [("the taps", taps), ("the sequences", sequences)] {
        if count == 0 {
            let op = "short convolution";
            return Err(AscendError::argument(op, name, "at least 1", count));
        }
    }
    limit("taps", MOST_TAPS, taps)?;
    limit("tokens", i32::MAX as usize, tokens)?;
    limit("sequences", i32::MAX as usize, sequences)?;
    limit("channels", u32::MAX as usize / 4, channels)?;
    let is_wide = element == KernelType::F32;
    let column_tile = channels
        .next_multiple_of(COLUMN_UNIT)
        .clamp(COLUMN_UNIT, CONVOLVED_COLUMNS);
    // Slots, two of each; planes; rows beside the tile's; numbers of each factor.
    let (slots, planes, beside, factor_bytes) = match (is_backward, is_wide) {
        (false, true) => (2, 2, taps - 1, 2 * F32_BYTES),
        (false, false) => (2, 3, taps - 1, element.bytes() + F32_BYTES),
        (true, true) => (3, 2, 2 * (taps - 1), 3 * F32_BYTES),
        (true, false) => (3, 5, 2 * (taps - 1), element.bytes() + 2 * F32_BYTES),
    };
    let row_bytes = column_tile * (2 * slots * element.bytes() + planes * F32_BYTES);
    let slack_bytes = (2 * slots + planes + 3) * SLACK_BYTES;
    let fixed_bytes = taps * column_tile * factor_bytes + slack_bytes + beside * row_bytes;
    let available = machine.ub_bytes as usize;
    let fitting = available.saturating_sub(fixed_bytes) / row_bytes;
    if fitting == 0 {
        return Err(AscendError::TileTooLarge {
            needed_bytes: fixed_bytes + row_bytes,
            available_bytes: available,
        });
    }
    let cores = machine.vector_cores as usize;
    let column_tiles = channels.div_ceil(column_tile).max(1);
    let share = tokens.div_ceil(cores.div_ceil(column_tiles));
    let row_tile = fitting.min(share.max(LEAST_CONVOLVED_ROWS));
    let row_tiles = tokens.div_ceil(row_tile);
    let parts = if is_backward {
        row_tiles.min((PARTS_PER_CORE * cores).div_ceil(column_tiles))
    } else {
        row_tiles
    };
    let tiling = ShortConvolutionTiling {
        rows: tokens as u64,
        channels: channels as u32,
        taps: taps as u32,
        sequences: sequences as u32,
        parts: parts as u32,
        row_tile: row_tile as u32,
        column_tile: column_tile as u32,
    };
    Ok((tiling, parts.saturating_mul(column_tiles).min(cores) as u32))
}

/// The tiling of [rows, columns, rank, parts], and the number of cores.
fn plan_low_rank(
    [rows, columns, rank, parts]: [usize; 4],
    element: KernelType,
    stores_h: bool,
    machine: Machine,
) -> Result<(LowRankTiling, u32)> {
    limit("ranks", FACTOR_BYTES / (COLUMN_UNIT * F32_BYTES), rank)?;
    limit("columns", u32::MAX as usize / 4, columns)?;
    limit("rows", u32::MAX as usize / 4, rows)?;
    let fitting = FACTOR_BYTES / (rank * F32_BYTES) / COLUMN_UNIT * COLUMN_UNIT;
    let column_tile = columns
        .next_multiple_of(COLUMN_UNIT)
        .min(fitting.min(COLUMNS));
    let slots = LowRankTiling::SLOTS as usize;
    let is_wide = element == KernelType::F32;
    let wide_tiles = LowRankTiling::PLANES as usize + usize::from(!is_wide);
    let element_bytes = slots * element.bytes() + wide_tiles * F32_BYTES;
    let inner_bytes = 2 * parts * F32_BYTES + if stores_h { element.bytes() } else { 0 };
    let spread_bytes = LowRankTiling::CHUNK as usize * 32;
    let row_bytes = column_tile * element_bytes + rank * inner_bytes + spread_bytes;
    // The parts of a small h lie a vector apart.
    let apart_bytes = 2 * COLUMN_UNIT * F32_BYTES;
    let fixed_bytes = rank * column_tile * F32_BYTES + apart_bytes + (slots + 5) * SLACK_BYTES;
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
