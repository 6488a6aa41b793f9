//! Flex, burn's CPU backend: one pass over the tensors' memory, on all threads of rayon's pool.

use std::iter;

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType};
use burn_fused::{elements, is_free, zeros};
use half::{bf16, f16};
use rayon::prelude::*;

use super::SQUARES;
use super::composed;
use super::op::{AdamWFactors, AdamWOp, AdamWOps, AdamWRounded, rounded};
use crate::attention::flex::number::Number;

/// Elements of a task. Its values are rounded while they are in the second cache.
const TASK: usize = 1 << 14;

impl AdamWOps for Flex {
    fn adamw(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        if value.dtype() != DType::F32 {
            return composed::update::<Self>(value, gradient, first, second, op);
        }
        update::<bf16>([value, gradient, first, second], op, None).into()
    }

    fn adamw_rounded(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
        dtype: FloatDType,
    ) -> AdamWRounded<Self> {
        let narrow: DType = dtype.into();
        if value.dtype() != DType::F32 || !matches!(narrow, DType::F16 | DType::BF16) {
            let updated = Self::adamw(value, gradient, first, second, op);
            return rounded::<Self>(updated, dtype);
        }
        let mut out = zeros(value.layout().shape().clone(), narrow);
        let tensors = [value, gradient, first, second];
        let [value, first, second] = if narrow == DType::F16 {
            update(tensors, op, Some(out.storage_mut::<f16>()))
        } else {
            update(tensors, op, Some(out.storage_mut::<bf16>()))
        };
        (value, out, first, second)
    }

    fn square_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match x.dtype() {
            DType::F32 => squares::<f32>(&x),
            DType::BF16 => squares::<bf16>(&x),
            DType::F16 => squares::<f16>(&x),
            _ => composed::square_sums::<Self>(x),
        }
    }
}

fn squares<E: Number<Wide = f32>>(x: &FlexTensor) -> FlexTensor {
    let x = x.to_contiguous();
    let chunks = elements::<E>(&x).par_chunks(SQUARES);
    let mut sums = zeros([chunks.len()].into(), DType::F32);
    let out = sums.storage_mut::<f32>().par_iter_mut();
    out.zip(chunks)
        .for_each(|(sum, chunk)| *sum = sum_of_squares(chunk));
    sums
}

/// The sum of the squares of some elements, by lanes.
fn sum_of_squares<E: Number<Wide = f32>>(x: &[E]) -> f32 {
    const LANES: usize = 16;
    let (rows, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    let add = |(lane, x): (&mut f32, &E)| {
        let x = x.widen();
        *lane += x * x;
    };
    for row in rows {
        lanes.iter_mut().zip(row).for_each(add);
    }
    lanes.iter_mut().zip(rest).for_each(add);
    lanes.iter().sum()
}

/// The factors in f32.
struct Factors {
    scale: f32,
    of_gradient: f32,
    of_square: f32,
    kept: f32,
    correction: f32,
    epsilon: f32,
    stay: f32,
    step: f32,
}

impl Factors {
    fn new(by: AdamWFactors) -> Self {
        Self {
            scale: by.scale as f32,
            of_gradient: by.of_gradient as f32,
            of_square: by.of_square as f32,
            kept: by.kept as f32,
            correction: by.correction as f32,
            epsilon: by.epsilon as f32,
            stay: by.stay as f32,
            step: by.step as f32,
        }
    }

    /// As the composed update of an element, operation by operation.
    #[inline]
    fn update(&self, value: f32, gradient: f32, [first, second]: [&mut f32; 2]) -> f32 {
        let gradient = gradient * self.scale;
        *first += (gradient - *first) * self.of_gradient;
        *second = *second * self.kept + gradient * gradient * self.of_square;
        let root = second.sqrt() / self.correction + self.epsilon;
        value * self.stay - *first / root * self.step
    }
}

/// The new value and moments; the new values are also rounded into memory for them.
fn update<E: Number<Wide = f32>>(
    [value, gradient, first, second]: [FlexTensor; 4],
    op: AdamWOp,
    rounded: Option<&mut [E]>,
) -> [FlexTensor; 3] {
    let by = Factors::new(op.factors());
    let (mut first, mut second) = (owned(first), owned(second));
    let moments = [&mut first, &mut second];
    let update = |value, gradient, moments: [&mut f32; 2]| by.update(value, gradient, moments);
    let value = match gradient.dtype() {
        DType::BF16 => over::<bf16, _>(owned(value), &gradient, moments, rounded, update),
        DType::F16 => over::<f16, _>(owned(value), &gradient, moments, rounded, update),
        _ if !is_free::<f32>(&value) && is_free::<f32>(&gradient) => {
            let swapped =
                |gradient, value, moments: [&mut f32; 2]| update(value, gradient, moments);
            over::<f32, _>(gradient, &value, moments, rounded, swapped)
        }
        _ => over::<f32, _>(owned(value), &gradient, moments, rounded, update),
    };
    [value, first, second]
}

/// Writes over each element of `out` the result of `update` for it, the element of `other` and the
/// moments.
fn over<O: Number<Wide = f32>, E: Number<Wide = f32>>(
    mut out: FlexTensor,
    other: &FlexTensor,
    moments: [&mut FlexTensor; 2],
    rounded: Option<&mut [E]>,
    update: impl Fn(f32, f32, [&mut f32; 2]) -> f32 + Sync,
) -> FlexTensor {
    let other = other.to_contiguous();
    let [first, second] = moments.map(|moment| moment.storage_mut::<f32>().chunks_mut(TASK));
    let inputs = elements::<O>(&other).chunks(TASK).zip(first.zip(second));
    let mut parts = rounded.map(|rounded| rounded.chunks_mut(TASK));
    let rounded = iter::from_fn(|| Some(parts.as_mut().and_then(Iterator::next)));
    let tasks = out.storage_mut::<f32>().chunks_mut(TASK).zip(inputs);
    let tasks: Vec<_> = tasks.zip(rounded).collect();
    tasks.into_par_iter().for_each(|((out, inputs), rounded)| {
        let (other, (first, second)) = inputs;
        let moments = first.iter_mut().zip(second);
        for ((out, other), (first, second)) in out.iter_mut().zip(other).zip(moments) {
            *out = update(*out, other.widen(), [first, second]);
        }
        for (rounded, value) in rounded.into_iter().flatten().zip(out) {
            *rounded = E::round(*value);
        }
    });
    out
}

/// The tensor itself where it is free, else a copy.
fn owned(x: FlexTensor) -> FlexTensor {
    let dense = x.to_contiguous();
    drop(x);
    if is_free::<f32>(&dense) {
        return dense;
    }
    let mut copy = zeros(dense.layout().shape().clone(), DType::F32);
    copy.storage_mut::<f32>()
        .copy_from_slice(elements::<f32>(&dense));
    copy
}
