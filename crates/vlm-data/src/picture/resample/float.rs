//! Antialiased bicubic resizing in f32, as torchvision's older functions do with frames of bytes.
//!
//! Rows are resized first, and levels are rounded and clamped once, after both axes. Products and
//! sums are fused: each is computed in f64 and rounded to f32.
//!
//! # Source
//! torchvision 0.29.2, transforms/functional.py (`resize` of a tensor); pytorch
//! aten/src/ATen/native/cpu/UpSampleKernel.cpp (`_compute_indices_min_size_weights_aa`)

use super::COLOURS;
use crate::Result;
use crate::memory::reserve;

/// The first input of an output, and the weights from it on.
type Weights = (usize, Vec<f32>);

/// Resizes RGB from one width and height to another.
///
/// # Errors
/// [`crate::VlmDataError::Memory`] if an allocation fails
pub(in crate::picture) fn resize_in_floats(
    rgb: &[u8],
    [width, height]: [usize; 2],
    [new_width, new_height]: [usize; 2],
) -> Result<Vec<u8>> {
    let stride = new_width * COLOURS;
    let mut narrow = reserve::<f32>("the resized rows", height as u128 * stride as u128)?;
    let weights = weights(width, new_width);
    for row in rgb.chunks_exact(width * COLOURS) {
        for (first, weights) in &weights {
            let pixels = row[first * COLOURS..].chunks_exact(COLOURS);
            let sums = weights
                .iter()
                .zip(pixels)
                .fold([0.0; COLOURS], |sums, (weight, pixel)| {
                    std::array::from_fn(|c| fused(*weight, f32::from(pixel[c]), sums[c]))
                });
            narrow.extend(sums);
        }
    }
    let mut resized = reserve::<u8>("the resized picture", new_height as u128 * stride as u128)?;
    for (first, weights) in self::weights(height, new_height) {
        let mut sums = vec![0.0; stride];
        for (weight, row) in weights
            .iter()
            .zip(narrow[first * stride..].chunks_exact(stride))
        {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum = fused(*weight, *value, *sum);
            }
        }
        let levels = sums
            .iter()
            .map(|sum| sum.clamp(0.0, 255.0).round_ties_even() as u8);
        resized.extend(levels);
    }
    Ok(resized)
}

/// The weights of each output of an axis.
fn weights(inputs: usize, outputs: usize) -> Vec<Weights> {
    let scale = inputs as f32 / outputs as f32;
    let (support, inverse) = match scale >= 1.0 {
        true => (2.0 * scale, 1.0 / scale),
        false => (2.0, 1.0),
    };
    let output = |output: usize| {
        let centre = (f64::from(scale) * (output as f64 + 0.5)) as f32;
        let first = (f64::from(centre - support) + 0.5).max(0.0) as usize;
        let end = ((f64::from(centre + support) + 0.5) as usize).min(inputs);
        let weight = |input: usize| {
            let at = f64::from(input as f32 - centre) + 0.5;
            cubic((at * f64::from(inverse)) as f32)
        };
        let mut weights: Vec<f32> = (first..end).map(weight).collect();
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
        weights.iter_mut().for_each(|weight| *weight /= sum);
        (first, weights)
    };
    (0..outputs).map(output).collect()
}

/// Keys' cubic with a = -1/2.
fn cubic(x: f32) -> f32 {
    const A: f32 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        fused(fused(A + 2.0, x, -(A + 3.0)) * x, x, 1.0)
    } else if x < 2.0 {
        fused(fused(fused(A, x, -5.0 * A), x, 8.0 * A), x, -4.0 * A)
    } else {
        0.0
    }
}

fn fused(factor: f32, value: f32, sum: f32) -> f32 {
    (f64::from(factor) * f64::from(value) + f64::from(sum)) as f32
}
