//! Antialiased bicubic resizing of 8-bit images in integers, like torchvision and PIL.
//!
//! Each output is a sum of inputs times weights, rounded and clamped to 0 and 255. Rows and columns
//! are resized in sequence, with 8 bits between. The weights are computed in f64 and rounded to
//! integers:
//!
//! | | weights | fractional bits |
//! |---|---|---|
//! | torchvision | 16 bits | the most, up to 22, that fit the largest weight of the axis |
//! | PIL | 32 bits | 22 |
//!
//! For output i of `outputs` of an axis: scale = inputs / outputs, stretch = max(scale, 1), centre
//! = (i + 0.5) scale, first = max(0, trunc(centre - 2 stretch + 0.5)), end = min(inputs,
//! trunc(centre + 2 stretch + 0.5)), and input j in first..end has the weight cubic((j - centre +
//! 0.5) / stretch), divided by the sum of all weights.
//!
//! # Source
//! pytorch aten/src/ATen/native/cpu/UpSampleKernel.cpp (`_compute_index_ranges_int16_weights`) and
//! UpSampleKernelAVXAntialias.h; Pillow src/libImaging/Resample.c

#[cfg(target_arch = "x86_64")]
mod avx2;
mod float;
mod portable;

use crate::Result;

use super::config::Backend;
use crate::memory::reserve;

pub(super) use float::resize_in_floats;

/// Bytes of a pixel.
pub(super) const COLOURS: usize = 3;
/// The number of taps is rounded up to this, so that registers are full.
const GROUP: usize = 4;
/// Fractional bits of PIL's weights, and the most that torchvision's have.
const MAX_PRECISION: u32 = 22;
/// Bits of the lower part of a weight of PIL, whose upper part then fits 16 bits.
const LOW_BITS: u32 = 12;

/// The resizing of one axis.
pub(super) struct Axis {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// The first input of each output. `first + taps <= inputs`.
    first: Vec<usize>,
    /// Inputs per output; some weights may be 0.
    taps: usize,
    /// `[outputs, taps]`: the weights, or the lower parts of PIL's.
    low: Vec<i16>,
    /// `[outputs, taps]`: PIL's weight / 2^12, rounded down; empty for torchvision.
    high: Vec<i16>,
    /// Fractional bits of the weights.
    precision: u32,
}

impl Axis {
    /// Computes the weights; `None` if the size and thus all pixels are unchanged.
    ///
    /// # Errors
    /// [`crate::VlmDataError::Memory`] if an allocation fails
    pub(super) fn new(inputs: usize, outputs: usize, backend: Backend) -> Result<Option<Self>> {
        if inputs == outputs {
            return Ok(None);
        }
        let scale = inputs as f64 / outputs as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let most = (support.ceil() as usize)
            .saturating_mul(2)
            .saturating_add(1);
        // The last input that an output has is within `inputs`.
        let span = |output: usize| {
            let centre = (output as f64 + 0.5) * scale;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(inputs);
            (centre, first, end.saturating_sub(first).min(most))
        };
        let used = (0..outputs).map(|output| span(output).2).max().unwrap_or(0);
        let taps = used.next_multiple_of(GROUP).min(inputs);

        let elements = outputs as u128 * taps as u128;
        let mut first = reserve("the weights", outputs as u128)?;
        let mut weights = reserve::<f64>("the weights", elements)?;
        weights.resize(outputs * taps, 0.0);
        let mut largest = 0.0_f64;
        for (output, row) in weights.chunks_exact_mut(taps).enumerate() {
            let (centre, start, count) = span(output);
            // Taps of weight 0 come first where too few inputs follow.
            let shifted = start.min(inputs - taps);
            first.push(shifted);
            let row = &mut row[start - shifted..][..count];
            for (tap, weight) in row.iter_mut().enumerate() {
                let at = (tap + start) as f64 - centre + 0.5;
                *weight = cubic(at * (1.0 / stretch), backend);
            }
            let sum = row.iter().sum::<f64>();
            for weight in row {
                if sum != 0.0 {
                    *weight /= sum;
                }
                largest = largest.max(*weight);
            }
        }
        let precision = match backend {
            Backend::Pil | Backend::Pil12_2 | Backend::PilBefore12_2 => MAX_PRECISION,
            Backend::Torchvision => (0..MAX_PRECISION)
                .find(|bits| (0.5 + largest * f64::from(1 << (bits + 1))) as i32 >= 1 << 15)
                .unwrap_or(MAX_PRECISION),
        };
        let mut low = reserve::<i16>("the weights", elements)?;
        let mut high = Vec::new();
        let integers = weights.iter().map(|weight| {
            let scaled = weight * f64::from(1 << precision);
            (if scaled < 0.0 {
                scaled - 0.5
            } else {
                scaled + 0.5
            }) as i32
        });
        match backend {
            Backend::Torchvision => low.extend(integers.map(|weight| weight as i16)),
            Backend::Pil | Backend::Pil12_2 | Backend::PilBefore12_2 => {
                high = reserve::<i16>("the weights", elements)?;
                for weight in integers {
                    low.push((weight & ((1 << LOW_BITS) - 1)) as i16);
                    high.push((weight >> LOW_BITS) as i16);
                }
            }
        }
        Ok(Some(Self {
            inputs,
            outputs,
            first,
            taps,
            low,
            high,
            precision,
        }))
    }

    /// The weights of an output: their lower or only parts, then their upper parts.
    fn weights(&self, output: usize) -> [&[i16]; 2] {
        let range = output * self.taps..(output + 1) * self.taps;
        [
            &self.low[range.clone()],
            self.high.get(range).unwrap_or(&[]),
        ]
    }

    /// Resizes rows of pixels, `[rows, inputs, 3]`, to `[rows, outputs, 3]`.
    ///
    /// `input` may extend beyond the last row; the extra bytes are read but not used.
    pub(super) fn resize_rows(&self, input: &[u8], output: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if avx2::resize_rows(self, input, output) {
            return;
        }
        portable::resize_rows(self, input, output);
    }

    /// Computes row `row` of the output from the rows of `input`, `[inputs, output.len()]`.
    pub(super) fn resize_columns(&self, input: &[u8], row: usize, output: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if avx2::resize_columns(self, input, row, output) {
            return;
        }
        portable::resize_columns(self, input, row, output);
    }
}

/// True if columns are resized before rows. Versions of Pillow choose the order by different rules.
///
/// # Source
/// `ImagingResampleInner` of src/libImaging/Resample.c in Pillow 13.0.0; `resize` of Image.py in
/// 12.2.0
pub(super) fn columns_first(rows: &Axis, columns: &Axis, backend: Backend) -> bool {
    let taken = |axis: &Axis| axis.inputs as i128 - axis.outputs as i128;
    taken(columns) > 0
        && match backend {
            Backend::Torchvision | Backend::PilBefore12_2 => false,
            Backend::Pil12_2 => columns.inputs > rows.inputs.saturating_mul(100),
            Backend::Pil => taken(columns) > 2 * taken(rows),
        }
}

/// Keys' cubic with a = -0.5, in the order of operations of each library.
fn cubic(x: f64, backend: Backend) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        match backend {
            Backend::Torchvision => ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A,
            Backend::Pil | Backend::Pil12_2 | Backend::PilBefore12_2 => {
                (((x - 5.0) * x + 8.0) * x - 4.0) * A
            }
        }
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes without a pattern that a shift could hide.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1_u32;
        std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(len)
        .collect()
    }

    #[test]
    fn kernels_agree_with_the_portable_one() {
        let sides = [
            1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 28, 29, 56, 64, 100, 333, 1000,
        ];
        for backend in [Backend::Torchvision, Backend::Pil] {
            for (inputs, outputs) in sides.iter().flat_map(|&a| sides.map(|b| (a, b))) {
                let Some(axis) = Axis::new(inputs, outputs, backend).expect("little memory") else {
                    continue;
                };
                let rows = 6;
                let input = noise(rows * inputs * COLOURS);
                let mut found = vec![0; rows * outputs * COLOURS];
                let mut expected = found.clone();
                axis.resize_rows(&input, &mut found);
                portable::resize_rows(&axis, &input, &mut expected);
                assert!(
                    found == expected,
                    "rows from {inputs} to {outputs}, {backend:?}"
                );

                let input = noise(inputs * 77);
                for row in 0..outputs {
                    let (mut found, mut expected) = ([0; 77], [0; 77]);
                    axis.resize_columns(&input, row, &mut found);
                    portable::resize_columns(&axis, &input, row, &mut expected);
                    assert!(
                        found == expected,
                        "columns from {inputs} to {outputs}, {backend:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_flat_picture_stays_flat() {
        for backend in [Backend::Torchvision, Backend::Pil] {
            let axis = Axis::new(100, 37, backend)
                .expect("little memory")
                .expect("it resizes");
            let mut output = [0; 37 * COLOURS];
            axis.resize_rows(&[255; 300], &mut output);
            assert_eq!(output, [255; 37 * COLOURS]);
        }
    }
}
