//! Flex, burn's CPU backend: one pass over rows, on all threads of rayon's pool.

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Shape};
use burn_fused::{elements, for_dtype, is_free, least, zeros};
use rayon::prelude::*;

use super::op::RmsNormOps;
use super::rows;
use crate::attention::flex::number::{Number, Real};

/// Elements of a task, and its rows where each task has sums for the weight's gradient.
const TASK: usize = 1 << 15;
const ROWS: usize = 128;
/// Sums are computed side by side.
const LANES: usize = 16;

impl RmsNormOps for Flex {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let x = x.to_contiguous();
        for_dtype!(x.dtype(), E => forward::<E>(&x, &wide::<E>(&weight), epsilon))
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x, rstd, gradient] = [x, rstd, gradient].map(|x| x.to_contiguous());
        for_dtype!(x.dtype(), E => {
            let dweight = weight_gradient::<E>(&x, &rstd, &gradient);
            (input_gradient::<E>(&x, &wide::<E>(&weight), &rstd, gradient), dweight)
        })
    }

    fn rms_norm_input_gradient(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [x, rstd, gradient] = [x, rstd, gradient].map(|x| x.to_contiguous());
        for_dtype!(x.dtype(), E => input_gradient::<E>(&x, &wide::<E>(&weight), &rstd, gradient))
    }
}

/// The numbers of a weight in the type of x or in the one that x is computed in.
fn wide<E: Number>(weight: &FlexTensor) -> Vec<E::Wide> {
    let weight = weight.to_contiguous();
    if weight.dtype() == E::dtype() {
        let weight = elements::<E>(&weight);
        weight.iter().map(|x| x.widen()).collect()
    } else {
        elements::<E::Wide>(&weight).to_vec()
    }
}

/// The sum of products of the elements of rows, each the product that a function makes of them.
fn sum<E: Number>(
    left: &[E],
    right: &[E],
    weight: &[E::Wide],
    product: impl Fn(E::Wide, E::Wide, E::Wide) -> E::Wide,
) -> E::Wide {
    let mut lanes = [E::Wide::ZERO; LANES];
    let (left, left_rest) = left.as_chunks::<LANES>();
    let (right, right_rest) = right.as_chunks::<LANES>();
    let (weight, weight_rest) = weight.as_chunks::<LANES>();
    for ((left, right), weight) in left.iter().zip(right).zip(weight) {
        for i in 0..LANES {
            lanes[i] += product(left[i].widen(), right[i].widen(), weight[i]);
        }
    }
    let rest = left_rest.iter().zip(right_rest).zip(weight_rest);
    for (lane, ((left, right), weight)) in lanes.iter_mut().zip(rest) {
        *lane += product(left.widen(), right.widen(), *weight);
    }
    lanes
        .into_iter()
        .fold(E::Wide::ZERO, |sum, lane| sum + lane)
}

fn forward<E: Number>(
    x: &FlexTensor,
    weight: &[E::Wide],
    epsilon: f64,
) -> (FlexTensor, FlexTensor) {
    let channels = weight.len().max(1);
    let (shape, dtype) = rows(&x.shape(), x.dtype());
    let most = if epsilon == 0.0 {
        1.0 / least(FloatDType::from(dtype)).sqrt()
    } else {
        f64::INFINITY
    };
    let [of_channels, epsilon, most] = [channels as f64, epsilon, most].map(E::Wide::of);
    let (mut out, mut rstd) = (zeros(x.shape(), x.dtype()), zeros(shape, dtype));
    let tasks = out
        .storage_mut::<E>()
        .par_chunks_mut(task_rows(channels) * channels);
    let roots = rstd
        .storage_mut::<E::Wide>()
        .par_chunks_mut(task_rows(channels));
    let inputs = elements::<E>(x).par_chunks(task_rows(channels) * channels);
    tasks.zip(roots).zip(inputs).for_each(|((out, roots), x)| {
        let rows = out.chunks_exact_mut(channels).zip(x.chunks_exact(channels));
        for ((out, x), root) in rows.zip(roots) {
            let squares = sum(x, x, weight, |x, _, _| x * x);
            *root = E::Wide::ONE / (squares / of_channels + epsilon).sqrt();
            // A row whose squares leave the type would silently be 0, or has lost digits.
            if *root == E::Wide::ZERO || *root > most {
                *root = E::Wide::of(f64::NAN);
            }
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = E::round(x.widen() * *root * *weight);
            }
        }
    });
    (out, rstd)
}

/// With n = x rstd and h = gradient weight, (h - n mean(h n)) rstd; in the memory of the gradient if
/// nothing else holds it.
fn input_gradient<E: Number>(
    x: &FlexTensor,
    weight: &[E::Wide],
    rstd: &FlexTensor,
    gradient: FlexTensor,
) -> FlexTensor {
    let channels = weight.len().max(1);
    let of_channels = E::Wide::of(channels as f64);
    let mut out = gradient;
    if !is_free::<E>(&out) {
        let mut copy = zeros(x.shape(), x.dtype());
        copy.storage_mut::<E>().copy_from_slice(elements(&out));
        out = copy;
    }
    let step = task_rows(channels);
    let tasks = out.storage_mut::<E>().par_chunks_mut(step * channels);
    let inputs = elements::<E>(x).par_chunks(step * channels);
    let roots = elements::<E::Wide>(rstd).par_chunks(step);
    tasks.zip(inputs).zip(roots).for_each(|((out, x), roots)| {
        let rows = out.chunks_exact_mut(channels).zip(x.chunks_exact(channels));
        for ((gradient, x), root) in rows.zip(roots) {
            let root = *root;
            let products = sum(x, gradient, weight, |x, gradient, weight| {
                gradient * (x * root) * weight
            });
            let mean = products / of_channels;
            for ((gradient, x), weight) in gradient.iter_mut().zip(x).zip(weight) {
                let h = gradient.widen() * *weight;
                *gradient = E::round((h - x.widen() * root * mean) * root);
            }
        }
    });
    out
}

/// The sum of gradient x rstd over the rows, of parts of them that depend only on their number.
fn weight_gradient<E: Number>(
    x: &FlexTensor,
    rstd: &FlexTensor,
    gradient: &FlexTensor,
) -> FlexTensor {
    let channels = x.shape().last().copied().unwrap_or(1).max(1);
    let parts = elements::<E>(x).par_chunks(ROWS * channels);
    let parts = parts.zip(elements::<E>(gradient).par_chunks(ROWS * channels));
    let parts = parts.zip(elements::<E::Wide>(rstd).par_chunks(ROWS));
    let sums: Vec<Vec<E::Wide>> = parts
        .map(|((x, gradient), roots)| {
            let mut sums = vec![E::Wide::ZERO; channels];
            let rows = x
                .chunks_exact(channels)
                .zip(gradient.chunks_exact(channels));
            for ((x, gradient), root) in rows.zip(roots) {
                for ((sum, x), gradient) in sums.iter_mut().zip(x).zip(gradient) {
                    *sum += gradient.widen() * (x.widen() * *root);
                }
            }
            sums
        })
        .collect();
    let mut out = zeros(Shape::new([channels]), rstd.dtype());
    for sums in sums {
        for (out, sum) in out.storage_mut::<E::Wide>().iter_mut().zip(sums) {
            *out += sum;
        }
    }
    out
}

/// Rows of a task.
fn task_rows(channels: usize) -> usize {
    (TASK / channels).max(1)
}
