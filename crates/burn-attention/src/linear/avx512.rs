//! The product of bf16 matrices with AVX-512's dot products of pairs, summed in f32.
//!
//! A task computes a block of the output. It packs a block of the weight with pairs of rows
//! interleaved, and processes twelve rows of x at a time: twelve by 32 sums stay in registers over
//! a range of channels.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

/// Rows and columns of the sums in registers.
const ROWS: usize = 12;
const COLUMNS: usize = 2 * LANES;
const LANES: usize = 16;
/// Channels of a stretch: its packed columns stay in the first cache, and those of a block in the
/// second.
const CHANNELS: usize = 384;
/// The output of a task.
const BLOCK_COLUMNS: usize = 256;
const BLOCK_ROWS: usize = 1020;

/// True if the processor has the instructions.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// A matrix of which either rows or columns are contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Weight<'a> {
    pub(crate) data: &'a [bf16],
    /// Elements between two rows and two columns, of which one is 1.
    pub(crate) strides: [usize; 2],
}

/// out = x weight + bias + u b.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) rows: usize,
    /// Even.
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) rank: usize,
    /// `[rows, inputs]`
    pub(crate) x: &'a [bf16],
    /// `[inputs, outputs]`
    pub(crate) weight: Weight<'a>,
    /// `[outputs]`, or empty.
    pub(crate) bias: &'a [bf16],
    /// `[rows, rank]`
    pub(crate) u: &'a [f32],
    /// `[rank, outputs]`
    pub(crate) b: &'a [f32],
}

/// The output, of which each task writes a block of its own.
struct Output(*mut bf16);

#[allow(unsafe_code, reason = "tasks write to one matrix")]
// SAFETY: tasks write to disjoint blocks.
unsafe impl Sync for Output {}

impl Product<'_> {
    /// Writes `[rows, outputs]`.
    ///
    /// # Panics
    /// If sizes and slices do not fit, or the processor lacks the instructions.
    pub(crate) fn write(&self, out: &mut [bf16]) {
        let Self {
            rows,
            inputs,
            outputs,
            rank,
            ..
        } = *self;
        let strides = self.weight.strides;
        assert!(is_available(), "a processor without AVX-512 for bf16");
        assert!(inputs.is_multiple_of(2) && inputs > 0 && strides.contains(&1));
        let last = (inputs - 1) * strides[0] + outputs.saturating_sub(1) * strides[1];
        assert!(last < self.weight.data.len(), "a weight beyond its memory");
        assert!(self.x.len() == rows * inputs && out.len() == rows * outputs);
        assert!(self.u.len() == rows * rank && self.b.len() == rank * outputs);
        assert!(self.bias.is_empty() || self.bias.len() == outputs);
        let output = Output(out.as_mut_ptr());
        let blocks = |size: usize, step: usize| {
            let starts = (0..size).step_by(step);
            starts.map(move |start| start..size.min(start + step))
        };
        let tasks: Vec<_> = blocks(rows, BLOCK_ROWS)
            .flat_map(|rows| blocks(outputs, BLOCK_COLUMNS).map(move |of| (rows.clone(), of)))
            .collect();
        tasks.into_par_iter().for_each(|(rows, columns)| {
            let output = &output;
            let sums = self.sums(&rows, &columns);
            let sums = sums.chunks_exact(BLOCK_COLUMNS);
            for (row, sums) in rows.zip(sums) {
                let first = row * outputs + columns.start;
                #[allow(unsafe_code, reason = "a part of a row of the output")]
                // SAFETY: the row and the columns are within `out`, whose length is asserted above
                // and which is borrowed until all tasks are done; no other task has both.
                let part =
                    unsafe { std::slice::from_raw_parts_mut(output.0.add(first), columns.len()) };
                for (out, sum) in part.iter_mut().zip(sums) {
                    *out = bf16::from_f32(*sum);
                }
            }
        });
    }

    /// The sums of a block, in rows of [`BLOCK_COLUMNS`].
    fn sums(&self, rows: &Range<usize>, columns: &Range<usize>) -> Vec<f32> {
        let mut sums = vec![0.0; rows.len() * BLOCK_COLUMNS];
        self.begin(rows, columns, &mut sums);
        let mut packed = vec![0; BLOCK_COLUMNS * CHANNELS / 2];
        for start in (0..self.inputs).step_by(CHANNELS) {
            let channels = start..self.inputs.min(start + CHANNELS);
            let pairs = channels.len() / 2;
            self.pack(&channels, columns, &mut packed);
            for first in (0..rows.len()).step_by(ROWS) {
                let count = ROWS.min(rows.len() - first);
                let x = &self.x[(rows.start + first) * self.inputs + start..];
                for panel in 0..columns.len().div_ceil(COLUMNS) {
                    let packed = &packed[panel * pairs * COLUMNS..][..pairs * COLUMNS];
                    let sums = &mut sums[first * BLOCK_COLUMNS + panel * COLUMNS..];
                    add(count, pairs, (x, self.inputs), packed, sums);
                }
            }
        }
        sums
    }

    /// Starts sums with the bias and the adapter's part.
    fn begin(&self, rows: &Range<usize>, columns: &Range<usize>, sums: &mut [f32]) {
        let bias = match self.bias {
            [] => vec![0.0; columns.len()],
            bias => bias[columns.clone()].iter().map(|x| x.to_f32()).collect(),
        };
        for (row, sums) in rows.clone().zip(sums.chunks_exact_mut(BLOCK_COLUMNS)) {
            let sums = &mut sums[..columns.len()];
            sums.copy_from_slice(&bias);
            for (k, factor) in self.u[row * self.rank..][..self.rank].iter().enumerate() {
                let b = &self.b[k * self.outputs..][columns.clone()];
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += factor * b;
                }
            }
        }
    }

    /// Packs a stretch of channels of some columns: panels of [`COLUMNS`], in each the pairs of its
    /// channels, of a pair all columns. Columns beyond the last are 0.
    fn pack(&self, channels: &Range<usize>, columns: &Range<usize>, packed: &mut [u32]) {
        let [row_stride, column_stride] = self.weight.strides;
        let data = self.weight.data;
        let pairs = channels.len() / 2;
        let pair =
            |low: bf16, high: bf16| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
        let panels = packed.chunks_exact_mut(pairs * COLUMNS);
        for (first, panel) in columns.clone().step_by(COLUMNS).zip(panels) {
            let count = COLUMNS.min(columns.end - first);
            if count < COLUMNS {
                panel.fill(0);
            }
            if column_stride == 1 {
                for (index, panel) in panel.chunks_exact_mut(COLUMNS).enumerate() {
                    let low = (channels.start + 2 * index) * row_stride + first;
                    let (low, high) = (&data[low..][..count], &data[low + row_stride..][..count]);
                    for (packed, (low, high)) in panel.iter_mut().zip(low.iter().zip(high)) {
                        *packed = pair(*low, *high);
                    }
                }
            } else {
                for column in 0..count {
                    let start = (first + column) * column_stride + channels.start;
                    let (both, _) = data[start..][..channels.len()].as_chunks::<2>();
                    let places = panel[column..].iter_mut().step_by(COLUMNS);
                    for (packed, [low, high]) in places.zip(both) {
                        *packed = pair(*low, *high);
                    }
                }
            }
        }
    }
}

/// Adds the products of `count` rows of x, `stride` apart, with a packed panel to sums in rows of
/// [`BLOCK_COLUMNS`].
fn add(
    count: usize,
    pairs: usize,
    (x, stride): (&[bf16], usize),
    packed: &[u32],
    sums: &mut [f32],
) {
    assert!(count > 0 && packed.len() >= pairs * COLUMNS);
    assert!(x.len() >= (count - 1) * stride + 2 * pairs);
    assert!(sums.len() >= (count - 1) * BLOCK_COLUMNS + COLUMNS);
    macro_rules! match_rows {
        ($($rows:literal)*) => {
            match count {
                $(
                    #[allow(unsafe_code, reason = "the function takes pointers")]
                    // SAFETY: the elements that it reads and writes are within the slices, as
                    // asserted above; `Product::write` has asked for the instructions.
                    $rows => unsafe {
                        add_rows::<$rows>(pairs, x.as_ptr(), stride, packed.as_ptr(), sums.as_mut_ptr());
                    },
                )*
                _ => unreachable!("at most {ROWS} rows"),
            }
        };
    }
    match_rows!(1 2 3 4 5 6 7 8 9 10 11 12);
}

/// # Safety
/// The processor has the instructions. `x` has N rows of 2 * `pairs` elements, `stride` apart;
/// `packed` has `pairs` times [`COLUMNS`] elements; `sums` has N rows of [`COLUMNS`] elements,
/// [`BLOCK_COLUMNS`] apart, that nothing else reads or writes.
#[allow(unsafe_code, reason = "instructions on pointers")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn add_rows<const N: usize>(
    pairs: usize,
    x: *const bf16,
    stride: usize,
    packed: *const u32,
    sums: *mut f32,
) {
    // SAFETY: the caller guarantees the elements. A register of 32 bf16 and one of 16 pairs in u32
    // have the same bits.
    unsafe {
        let mut held = [[_mm512_setzero_ps(); 2]; N];
        for (row, held) in held.iter_mut().enumerate() {
            let sums = sums.add(row * BLOCK_COLUMNS);
            *held = [_mm512_loadu_ps(sums), _mm512_loadu_ps(sums.add(LANES))];
        }
        for pair in 0..pairs {
            let packed = packed.add(pair * COLUMNS);
            let load = |lane| -> __m512bh {
                std::mem::transmute(_mm512_loadu_si512(packed.add(lane).cast()))
            };
            let weights = [load(0), load(LANES)];
            for (row, held) in held.iter_mut().enumerate() {
                let both = x
                    .add(row * stride + 2 * pair)
                    .cast::<i32>()
                    .read_unaligned();
                let both: __m512bh = std::mem::transmute(_mm512_set1_epi32(both));
                held[0] = _mm512_dpbf16_ps(held[0], both, weights[0]);
                held[1] = _mm512_dpbf16_ps(held[1], both, weights[1]);
            }
        }
        for (row, held) in held.iter().enumerate() {
            let sums = sums.add(row * BLOCK_COLUMNS);
            _mm512_storeu_ps(sums, held[0]);
            _mm512_storeu_ps(sums.add(LANES), held[1]);
        }
    }
}
