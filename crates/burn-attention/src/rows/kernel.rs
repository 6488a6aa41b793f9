//! Products on burn's CPU backend, in gemm's order of additions, and mostly faster.
//!
//! An element of the output is a sum of sums: over each stretch of inputs, a chain of fused
//! multiply-adds in the order of the inputs. A task computes some outputs of some rows; for more than
//! a few rows it packs their part of the weight first. Rows in tiles are packed too, once for all
//! outputs.

use std::borrow::Cow;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use burn_fused::zeros;
use half::bf16;
use rayon::prelude::*;

use super::STRETCH;
use super::target::Target;

/// Outputs and rows of a task.
const COLUMNS: usize = 64;
const TASK_ROWS: usize = 256;
/// Rows whose sums are in registers together, of few.
const ROWS: usize = 4;
/// Rows of a tile, and its outputs: their sums are in twelve registers of AVX2.
const TILE_ROWS: usize = 6;
const TILE_COLUMNS: usize = 16;
/// Up to these rows, packing x takes longer than it saves.
const FEW_ROWS: usize = 16;

/// The inputs of one sum, but for the last.
fn stretch(inputs: usize) -> usize {
    inputs.div_ceil(inputs.div_ceil(STRETCH).max(1)).max(1)
}

/// The product of matrices of f32 or bf16, or `None` for other types, and for processors without
/// fused multiply-adds.
pub(super) fn product(x: &FlexTensor, weight: &FlexTensor) -> Option<FlexTensor> {
    match x.dtype() {
        DType::F32 if has_instructions() => Some(computed::<f32>(x, weight)),
        DType::BF16 if has_instructions() => Some(computed::<bf16>(x, weight)),
        _ => None,
    }
}

/// Computes x weight, the strides of which are given, or returns false on a processor without fused
/// multiply-adds.
pub(crate) fn write(
    x: &[f32],
    [rows, inputs, outputs]: [usize; 3],
    (data, strides): (&[f32], [usize; 2]),
    out: &mut [f32],
) -> bool {
    let is_able = has_instructions() && strides.contains(&1);
    if is_able {
        debug_assert!(x.len() >= rows * inputs && out.len() == rows * outputs);
        write_all(
            &x[..rows * inputs],
            [inputs, outputs],
            &Weight { data, strides },
            out,
        );
    }
    is_able
}

/// True for a processor that the kernel is for.
pub(crate) fn has_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    cfg!(target_arch = "aarch64")
}

/// An element of a matrix that is computed in f32.
trait Number: burn::backend::Element + bytemuck::Pod + Send + Sync {
    fn widen(self) -> f32;
    fn round(sum: f32) -> Self;

    fn widened(x: &[Self]) -> Cow<'_, [f32]> {
        x.iter().map(|x| x.widen()).collect()
    }

    /// Writes eight rows of eight elements as columns, in rows of [`COLUMNS`].
    fn transpose(block: [&[Self]; SIDE], to: &mut [f32]) {
        for (column, row) in block.into_iter().enumerate() {
            for (input, x) in row.iter().enumerate() {
                to[input * COLUMNS + column] = x.widen();
            }
        }
    }

    /// Adds the products of rows of x and of [`COLUMNS`] outputs from `first`, an input and an
    /// output, where the inputs of each output are contiguous; false if it needs a packed weight.
    fn add_transposed<const R: usize>(
        _x: [&[f32]; R],
        _weight: &Weight<'_, Self>,
        _first: [usize; 2],
        _sums: &mut [f32],
    ) -> bool {
        false
    }
}

impl Number for f32 {
    fn widen(self) -> f32 {
        self
    }

    fn round(sum: f32) -> Self {
        sum
    }

    fn widened(x: &[Self]) -> Cow<'_, [f32]> {
        Cow::Borrowed(x)
    }

    #[cfg(target_arch = "x86_64")]
    fn transpose(block: [&[Self]; SIDE], to: &mut [f32]) {
        #[allow(unsafe_code, reason = "the function is compiled with AVX2")]
        // SAFETY: the processor has AVX2 by `has_instructions`, without which nothing is computed
        // here.
        unsafe {
            avx2::transpose(block, to);
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn add_transposed<const R: usize>(
        x: [&[f32]; R],
        weight: &Weight<'_, f32>,
        first: [usize; 2],
        sums: &mut [f32],
    ) -> bool {
        #[allow(unsafe_code, reason = "the function is compiled with AVX2")]
        // SAFETY: as in `transpose`, fused multiply-adds too.
        unsafe {
            avx2::add_transposed(x, weight, first, sums);
        }
        true
    }
}

impl Number for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(sum: f32) -> Self {
        Self::from_f32(sum)
    }
}

fn computed<E: Number>(x: &FlexTensor, weight: &FlexTensor) -> FlexTensor {
    let [rows, inputs] = x.shape().dims();
    let [_, outputs] = weight.shape().dims();
    let x = x.to_contiguous();
    let x = &x.storage::<E>()[x.layout().start_offset()..][..rows * inputs];
    let is_readable = |strides: &[isize]| strides[0].min(strides[1]) == 1;
    let weight = match is_readable(weight.layout().strides()) {
        true => weight.clone(),
        false => weight.to_contiguous(),
    };
    let strides = weight.layout().strides();
    let weight = Weight {
        data: &weight.storage::<E>()[weight.layout().start_offset()..],
        strides: [strides[0].unsigned_abs(), strides[1].unsigned_abs()],
    };
    let mut out = zeros(Shape::new([rows, outputs]), E::dtype());
    write_all(x, [inputs, outputs], &weight, out.storage_mut::<E>());
    out
}

fn write_all<E: Number>(
    x: &[E],
    [inputs, outputs]: [usize; 2],
    weight: &Weight<'_, E>,
    out: &mut [E],
) {
    let outs = out.par_chunks_mut(TASK_ROWS * outputs);
    outs.zip(x.par_chunks(TASK_ROWS * inputs))
        .for_each(|(out, x)| {
            let (x, rows) = (E::widened(x), out.len() / outputs);
            let tiles = Tiles::new(&x, [rows, inputs]);
            let target = Target::new(out, outputs);
            let starts = (0..outputs).into_par_iter().step_by(COLUMNS);
            starts.for_each(|first| {
                let columns = COLUMNS.min(outputs - first);
                let sums = sums((&x, &tiles), [rows, inputs], weight, [first, columns]);
                for (row, sums) in sums.chunks_exact(COLUMNS).enumerate() {
                    #[allow(unsafe_code, reason = "tasks write columns of the same rows")]
                    // SAFETY: each task has columns of its own, and writes one row at a time.
                    let out = unsafe { target.part(row, first..first + columns) };
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = E::round(*sum);
                    }
                }
            });
        });
}

/// Rows of x in tiles, of which the elements for an input are side by side.
struct Tiles {
    inputs: usize,
    packed: Vec<f32>,
}

impl Tiles {
    fn new(x: &[f32], [rows, inputs]: [usize; 2]) -> Self {
        let count = match rows > FEW_ROWS {
            true => rows / TILE_ROWS,
            false => 0,
        };
        let elements = TILE_ROWS * inputs;
        let mut packed = vec![0.0; count * elements];
        let tiles = packed.par_chunks_exact_mut(elements);
        tiles
            .zip(x.par_chunks_exact(elements))
            .for_each(|(tile, x)| {
                for (row, x) in x.chunks_exact(inputs).enumerate() {
                    for (to, x) in tile[row..].iter_mut().step_by(TILE_ROWS).zip(x) {
                        *to = *x;
                    }
                }
            });
        Self { inputs, packed }
    }

    fn rows(&self) -> usize {
        self.packed.len() / self.inputs
    }

    /// Adds the products of a packed part of the weight, of the inputs from `start`, to the sums of
    /// all tiles.
    fn add(&self, start: usize, weight: &[f32], sums: &mut [f32]) {
        let inputs = start..start + weight.len() / COLUMNS;
        let tiles = self.packed.chunks_exact(TILE_ROWS * self.inputs);
        for (tile, sums) in tiles.zip(sums.chunks_exact_mut(TILE_ROWS * COLUMNS)) {
            let x = &tile[inputs.start * TILE_ROWS..inputs.end * TILE_ROWS];
            #[cfg(target_arch = "x86_64")]
            {
                #[allow(
                    unsafe_code,
                    reason = "the functions are compiled with wider instructions"
                )]
                // SAFETY: the processor has the instructions: AVX-512 was just detected, AVX2 and
                // fused multiply-adds by `has_instructions`, without which nothing is computed here.
                unsafe {
                    if is_x86_feature_detected!("avx512f") {
                        avx512::add_tile(x, weight, sums);
                    } else {
                        add_tile_avx2(x, weight, sums);
                    }
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            add_tile(x, weight, sums);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_tile_avx2(x: &[f32], weight: &[f32], sums: &mut [f32]) {
    add_tile(x, weight, sums);
}

#[inline(always)]
fn add_tile(x: &[f32], weight: &[f32], sums: &mut [f32]) {
    let (x, _) = x.as_chunks::<TILE_ROWS>();
    let (weight, _) = weight.as_chunks::<COLUMNS>();
    for first in (0..COLUMNS).step_by(TILE_COLUMNS) {
        let mut chains = [[0.0_f32; TILE_COLUMNS]; TILE_ROWS];
        for (x, weight) in x.iter().zip(weight) {
            let weight = &weight[first..first + TILE_COLUMNS];
            for (chain, x) in chains.iter_mut().zip(x) {
                for (sum, weight) in chain.iter_mut().zip(weight) {
                    *sum = x.mul_add(*weight, *sum);
                }
            }
        }
        for (chain, sums) in chains.iter().zip(sums.chunks_exact_mut(COLUMNS)) {
            for (sum, of_stretch) in sums[first..].iter_mut().zip(chain) {
                *sum += of_stretch;
            }
        }
    }
}

/// A matrix `[inputs, outputs]` by its strides.
struct Weight<'a, E> {
    data: &'a [E],
    strides: [usize; 2],
}

impl<E: Number> Weight<'_, E> {
    /// Packs a part, `[inputs, COLUMNS]`.
    fn pack(&self, first_input: usize, first: usize, columns: usize, packed: &mut [f32]) {
        let [of_inputs, of_outputs] = self.strides;
        let data = &self.data[first_input * of_inputs + first * of_outputs..];
        if of_outputs == 1 {
            for (input, packed) in packed.chunks_exact_mut(COLUMNS).enumerate() {
                let row = &data[input * of_inputs..][..columns];
                packed
                    .iter_mut()
                    .zip(row)
                    .for_each(|(to, x)| *to = x.widen());
            }
            return;
        }
        let inputs = packed.len() / COLUMNS;
        let (whole, groups) = (inputs / SIDE * SIDE, columns / SIDE);
        for group in 0..groups {
            for input in (0..whole).step_by(SIDE) {
                let block: [&[E]; SIDE] = std::array::from_fn(|column| {
                    let start = (group * SIDE + column) * of_outputs + input;
                    &data[start..start + SIDE]
                });
                E::transpose(block, &mut packed[input * COLUMNS + group * SIDE..]);
            }
        }
        let rest = |column| if column < groups * SIDE { whole } else { 0 };
        for column in 0..columns {
            for input in rest(column)..inputs {
                let x = data[input * of_inputs + column * of_outputs];
                packed[input * COLUMNS + column] = x.widen();
            }
        }
    }
}

/// Sides of the blocks that are transposed at once.
const SIDE: usize = 8;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{COLUMNS, SIDE, Weight};

    /// The columns of eight rows of eight elements.
    // Loops, not closures: a function of the standard library that calls a closure would not be
    // compiled with the instructions.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn columns(rows: [__m256; SIDE]) -> [__m256; SIDE] {
        let [mut pairs, mut fours, mut columns] = [rows; 3];
        for i in 0..SIDE / 2 {
            let [a, b] = [rows[2 * i], rows[2 * i + 1]];
            pairs[2 * i] = _mm256_unpacklo_ps(a, b);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(a, b);
        }
        // Of rows 0 to 3, then of rows 4 to 7.
        for i in 0..SIDE / 2 {
            let first = i / 2 * 4 + i % 2;
            let [a, b] = [pairs[first], pairs[first + 2]];
            fours[2 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
            fours[2 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
        }
        for i in 0..SIDE / 2 {
            let [low, high] = [fours[i], fours[i + 4]];
            columns[i] = _mm256_permute2f128_ps::<0x20>(low, high);
            columns[i + 4] = _mm256_permute2f128_ps::<0x31>(low, high);
        }
        columns
    }

    #[allow(unsafe_code, reason = "a vector is loaded by a pointer")]
    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(from: &[f32]) -> __m256 {
        let from = &from[..SIDE];
        // SAFETY: eight elements are there.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[allow(unsafe_code, reason = "a vector is stored by a pointer")]
    #[inline]
    #[target_feature(enable = "avx2")]
    fn store(to: &mut [f32], x: __m256) {
        let to = &mut to[..SIDE];
        // SAFETY: the target has eight elements.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
    }

    /// Writes eight rows of eight elements as columns, in rows of [`COLUMNS`].
    #[target_feature(enable = "avx2")]
    pub(super) fn transpose(block: [&[f32]; SIDE], to: &mut [f32]) {
        let mut rows = [_mm256_setzero_ps(); SIDE];
        for (row, from) in rows.iter_mut().zip(block) {
            *row = load(from);
        }
        for (index, column) in columns(rows).into_iter().enumerate() {
            store(&mut to[index * COLUMNS..], column);
        }
    }

    /// Adds the products of rows of x and outputs whose inputs are contiguous, without a packed
    /// weight.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_transposed<const R: usize>(
        x: [&[f32]; R],
        weight: &Weight<'_, f32>,
        [first_input, first]: [usize; 2],
        sums: &mut [f32],
    ) {
        /// Blocks side by side: one alone would wait for its sums.
        const BLOCKS: usize = 2;
        let inputs = x[0].len();
        let whole = inputs / SIDE * SIDE;
        for start in (0..COLUMNS).step_by(BLOCKS * SIDE) {
            let mut outputs = [[&weight.data[..0]; SIDE]; BLOCKS];
            for (index, output) in outputs.as_flattened_mut().iter_mut().enumerate() {
                let begin = (first + start + index) * weight.strides[1] + first_input;
                *output = &weight.data[begin..begin + inputs];
            }
            let mut chains = [[_mm256_setzero_ps(); R]; BLOCKS];
            for input in (0..whole).step_by(SIDE) {
                for (chains, outputs) in chains.iter_mut().zip(&outputs) {
                    let mut rows = [_mm256_setzero_ps(); SIDE];
                    for (row, of) in rows.iter_mut().zip(outputs) {
                        *row = load(&of[input..]);
                    }
                    for (index, column) in columns(rows).into_iter().enumerate() {
                        for (chain, x) in chains.iter_mut().zip(&x) {
                            let factor = _mm256_set1_ps(x[input + index]);
                            *chain = _mm256_fmadd_ps(factor, column, *chain);
                        }
                    }
                }
            }
            for (block, (chains, outputs)) in chains.iter().zip(&outputs).enumerate() {
                for (row, (chain, x)) in chains.iter().zip(&x).enumerate() {
                    let mut chain_of = [0.0; SIDE];
                    store(&mut chain_of, *chain);
                    let sums = &mut sums[row * COLUMNS + start + block * SIDE..];
                    for ((sum, of), mut chain) in sums.iter_mut().zip(outputs).zip(chain_of) {
                        for input in whole..inputs {
                            chain = x[input].mul_add(of[input], chain);
                        }
                        *sum += chain;
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{COLUMNS, TILE_ROWS};

    const LANES: usize = 16;
    const VECTORS: usize = COLUMNS / LANES;

    #[allow(unsafe_code, reason = "a vector is loaded by a pointer")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(from: &[f32; COLUMNS], vector: usize) -> __m512 {
        let from = &from[vector * LANES..][..LANES];
        // SAFETY: sixteen elements are there.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    /// As [`add_tile`](super::add_tile), with the chains of all columns in 24 registers.
    #[target_feature(enable = "avx512f")]
    pub(super) fn add_tile(x: &[f32], weight: &[f32], sums: &mut [f32]) {
        let (x, _) = x.as_chunks::<TILE_ROWS>();
        let (weight, _) = weight.as_chunks::<COLUMNS>();
        let mut chains = [[_mm512_setzero_ps(); VECTORS]; TILE_ROWS];
        // Loops, not closures, which would not be compiled with the instructions.
        for (x, weight) in x.iter().zip(weight) {
            let mut columns = [_mm512_setzero_ps(); VECTORS];
            for (vector, column) in columns.iter_mut().enumerate() {
                *column = load(weight, vector);
            }
            for (chain, x) in chains.iter_mut().zip(x) {
                let factor = _mm512_set1_ps(*x);
                for (sum, column) in chain.iter_mut().zip(&columns) {
                    *sum = _mm512_fmadd_ps(factor, *column, *sum);
                }
            }
        }
        let (sums, _) = sums.as_chunks_mut::<COLUMNS>();
        for (chain, sums) in chains.iter().zip(sums) {
            for (vector, of_stretch) in chain.iter().enumerate() {
                let sum = _mm512_add_ps(load(sums, vector), *of_stretch);
                let to = &mut sums[vector * LANES..][..LANES];
                #[allow(unsafe_code, reason = "a vector is stored by a pointer")]
                // SAFETY: the target has sixteen elements.
                unsafe {
                    _mm512_storeu_ps(to.as_mut_ptr(), sum);
                }
            }
        }
    }
}

/// All rows of some outputs, in rows of [`COLUMNS`].
fn sums<E: Number>(
    (x, tiles): (&[f32], &Tiles),
    [rows, inputs]: [usize; 2],
    weight: &Weight<'_, E>,
    [first, columns]: [usize; 2],
) -> Vec<f32> {
    let mut sums = vec![0.0; rows * COLUMNS];
    let stretch = stretch(inputs);
    let stands_alone = rows <= ROWS && columns == COLUMNS && weight.strides[0] == 1;
    let mut packed = Vec::new();
    for start in (0..inputs).step_by(stretch) {
        let count = stretch.min(inputs - start);
        let x = |row: usize| &x[row * inputs + start..][..count];
        if stands_alone {
            let from = [start, first];
            let is_done = match rows {
                1 => E::add_transposed([x(0)], weight, from, &mut sums),
                2 => E::add_transposed([x(0), x(1)], weight, from, &mut sums),
                3 => E::add_transposed([x(0), x(1), x(2)], weight, from, &mut sums),
                _ => E::add_transposed([x(0), x(1), x(2), x(3)], weight, from, &mut sums),
            };
            if is_done {
                continue;
            }
        }
        packed.resize(stretch * COLUMNS, 0.0);
        let packed = &mut packed[..count * COLUMNS];
        weight.pack(start, first, columns, packed);
        let (of_tiles, rest) = sums.split_at_mut(tiles.rows() * COLUMNS);
        tiles.add(start, packed, of_tiles);
        for (group, sums) in rest.chunks_mut(ROWS * COLUMNS).enumerate() {
            let x = |row: usize| x(tiles.rows() + group * ROWS + row);
            match sums.len() / COLUMNS {
                1 => add([x(0)], packed, sums),
                2 => add([x(0), x(1)], packed, sums),
                3 => add([x(0), x(1), x(2)], packed, sums),
                _ => add([x(0), x(1), x(2), x(3)], packed, sums),
            }
        }
    }
    sums
}

/// Adds the products of rows of x and a packed part of the weight.
fn add<const R: usize>(x: [&[f32]; R], packed: &[f32], sums: &mut [f32]) {
    debug_assert!(x.iter().all(|x| x.len() * COLUMNS == packed.len()));
    debug_assert!(sums.len() == R * COLUMNS);
    #[cfg(target_arch = "x86_64")]
    {
        #[allow(
            unsafe_code,
            reason = "the functions are compiled with wider instructions"
        )]
        // SAFETY: the processor has the instructions: AVX-512 was just detected, AVX2 and fused
        // multiply-adds by `has_instructions`, without which nothing is computed here.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                add_avx512(x, packed, sums);
            } else {
                add_avx2(x, packed, sums);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    add_chains::<R, COLUMNS>(x, packed, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_avx512<const R: usize>(x: [&[f32]; R], packed: &[f32], sums: &mut [f32]) {
    add_chains::<R, COLUMNS>(x, packed, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_avx2<const R: usize>(x: [&[f32]; R], packed: &[f32], sums: &mut [f32]) {
    add_chains::<R, 16>(x, packed, sums);
}

/// `C` columns at a time: their chains stay in registers.
#[inline(always)]
fn add_chains<const R: usize, const C: usize>(x: [&[f32]; R], packed: &[f32], sums: &mut [f32]) {
    let inputs = packed.len() / COLUMNS;
    let x = x.map(|x| &x[..inputs]);
    for first in (0..COLUMNS).step_by(C) {
        let mut chains = [[0.0_f32; C]; R];
        for input in 0..inputs {
            let weights = &packed[input * COLUMNS + first..][..C];
            for (chain, x) in chains.iter_mut().zip(&x) {
                let factor = x[input];
                for (sum, weight) in chain.iter_mut().zip(weights) {
                    *sum = factor.mul_add(*weight, *sum);
                }
            }
        }
        for (chain, sums) in chains.iter().zip(sums.chunks_exact_mut(COLUMNS)) {
            for (sum, of_stretch) in sums[first..].iter_mut().zip(chain) {
                *sum += of_stretch;
            }
        }
    }
}
