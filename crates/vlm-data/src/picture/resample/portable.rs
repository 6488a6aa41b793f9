//! The sums in plain loops: for all processors, and as the reference for other kernels.

use super::{Axis, COLOURS, LOW_BITS};

impl Axis {
    /// A sum of `samples` times the weights of an output, rounded to 8 bits.
    fn sum(&self, output: usize, samples: impl Iterator<Item = u8>) -> u8 {
        let [low, high] = self.weights(output);
        let mut sum = 1_i32 << (self.precision - 1);
        for (tap, sample) in samples.enumerate().take(self.taps) {
            let upper = high.get(tap).map_or(0, |&high| i32::from(high) << LOW_BITS);
            sum += (i32::from(low[tap]) + upper) * i32::from(sample);
        }
        (sum >> self.precision).clamp(0, 255) as u8
    }
}

pub(super) fn resize_rows(axis: &Axis, input: &[u8], output: &mut [u8]) {
    let rows = input.chunks_exact(axis.inputs * COLOURS);
    for (from, to) in rows.zip(output.chunks_exact_mut(axis.outputs * COLOURS)) {
        for (x, pixel) in to.chunks_exact_mut(COLOURS).enumerate() {
            for (colour, level) in pixel.iter_mut().enumerate() {
                let samples = &from[axis.first[x] * COLOURS + colour..];
                *level = axis.sum(x, samples.iter().step_by(COLOURS).copied());
            }
        }
    }
}

pub(super) fn resize_columns(axis: &Axis, input: &[u8], row: usize, output: &mut [u8]) {
    let (first, length) = (axis.first[row], output.len());
    for (column, level) in output.iter_mut().enumerate() {
        let samples = &input[first * length + column..];
        *level = axis.sum(row, samples.iter().step_by(length).copied());
    }
}
