//! The loss in blocks of the vocabulary, composed of ordinary tensor operations.
//!
//! A block has the most words whose logits and part of the weight (which 16-bit products copy) fit
//! 32 MiB in f32. Blocks divide words, not rows: each word's gradient of the weight is then
//! computed in one piece, and only the gradient of the hidden states is a sum over blocks.
//!
//! # Forward
//! For each block: l = hidden weight^T; s_b = ln sum e^l of each stretch of 512 words; the logit of
//! each target in it. At the end s = ln sum_b e^(s_b), the loss of a row is s - logit, and the loss
//! is their mean. Stretches have one length, so a row's loss does not depend on the other rows.
//!
//! # Backward
//! For each block, with g the gradient of a row's loss: p = (e^(l - s) - 1 at the target)
//! g; dhidden += p weight; dweight = p^T hidden. The 1 is subtracted before p is rounded, because
//! the difference is small where the model is certain.
//!
//! Products of bf16 are computed in bf16, those of f16 in f32: logits overflow in f16, and p
//! divided by the number of rows loses its digits.

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Shape, TensorData};
use burn_fused::accumulator;
use burn_fused::primitive::{cast, slice, whole};

use super::op::CrossEntropyOp;
use crate::rows;

/// The most logits of a block, and the most elements of its weight: 32 MiB in f32.
const BLOCK_ELEMS: usize = 1 << 23;
/// Words of a stretch.
const STRETCH: usize = 512;

/// The loss and log_sum_exp of [`CrossEntropyOps`](super::CrossEntropyOps).
pub(super) fn forward<B: Backend>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    op: &CrossEntropyOp,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let run = Run::<B>::new(hidden, weight, op);
    let (mut sums, mut target_logits) = (Vec::new(), Vec::new());
    for block in run.blocks() {
        let logits = run.logits(&block);
        if let Some(targets) = run.targets(&block) {
            target_logits.push(B::float_select(run.flat(logits.clone()), 0, targets));
        }
        sums.push(run.stretches(logits));
    }
    let sums = run.log_sum_exp(B::float_cat(sums, 1));
    let sums = B::float_reshape(sums, Shape::new([op.rows()]));
    if op.by_row {
        let mut places = vec![0; op.rows()];
        for (place, (_, row)) in op.targets.iter().enumerate() {
            places[*row] = place as i64;
        }
        let targets = B::float_select(B::float_cat(target_logits, 0), 0, run.upload(places));
        return (B::float_sub(sums.clone(), targets), sums);
    }
    // The logits came in the order of the targets.
    let order = op.targets.iter().map(|(_, row)| *row as i64).collect();
    let losses = B::float_sub(
        B::float_select(sums.clone(), 0, run.upload(order)),
        B::float_cat(target_logits, 0),
    );
    (B::float_mean(losses), sums)
}

/// The gradients of [`CrossEntropyOps`](super::CrossEntropyOps), from hidden, weight, log_sum_exp
/// and the gradient of the loss.
pub(super) fn backward<B: Backend>(
    [hidden, weight, log_sum_exp, gradient]: [FloatTensor<B>; 4],
    weight_wanted: bool,
    op: &CrossEntropyOp,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let rows = op.rows();
    let run = Run::<B>::new(hidden, weight, op);
    let log_sum_exp = B::float_reshape(log_sum_exp, Shape::new([rows, 1]));
    let gradient = match op.by_row {
        true => B::float_reshape(gradient, Shape::new([rows, 1])),
        false => {
            let gradient = B::float_mul_scalar(gradient, (1.0 / rows as f64).into());
            B::float_reshape(gradient, Shape::new([1, 1]))
        }
    };
    let shape = run.weight.shape();
    let mut dweight = weight_wanted.then(|| B::float_empty(shape.clone(), &run.device, run.dtype));
    let mut dhidden = None;
    for block in run.blocks() {
        let logits = run.logits(&block);
        let mut dlogits = B::float_exp(B::float_sub(logits, log_sum_exp.clone()));
        if let Some(targets) = run.targets(&block) {
            let shape = dlogits.shape();
            let ones = B::float_full(targets.shape(), (-1.0).into(), &run.device, run.wide);
            let flat = run.flat(dlogits);
            let add = IndexingUpdateOp::Add;
            dlogits = B::float_select_assign(flat, 0, targets, ones, add);
            dlogits = B::float_reshape(dlogits, shape);
        }
        let dlogits = cast::<B>(B::float_mul(dlogits, gradient.clone()), run.factors);
        let part = B::float_matmul(dlogits.clone(), run.words(&block));
        let part = cast::<B>(part, run.wide);
        dhidden = Some(match dhidden {
            Some(earlier) => B::float_add(earlier, part),
            None => part,
        });
        dweight = dweight.map(|dweight| {
            let part = B::float_matmul(B::float_swap_dims(dlogits, 0, 1), run.hidden.clone());
            let part = cast::<B>(part, run.dtype);
            if part.shape() == shape {
                return part;
            }
            let mut slices = whole(&shape);
            slices[0] = block.into();
            B::float_slice_assign(dweight, &slices, part)
        });
    }
    let dhidden =
        dhidden.unwrap_or_else(|| B::float_zeros(run.hidden.shape(), &run.device, run.wide));
    (cast::<B>(dhidden, run.dtype), dweight)
}

/// The type that hidden and weight of a type are multiplied in.
pub(super) fn product_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F16 => FloatDType::F32,
        other => other.into(),
    }
}

/// State that the blocks of an operation share.
struct Run<'a, B: Backend> {
    op: &'a CrossEntropyOp,
    /// In the type of products.
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    /// The type of hidden and weight as they came, and of their gradients.
    dtype: FloatDType,
    /// The type of products.
    factors: FloatDType,
    /// The type of softmax and sums.
    wide: FloatDType,
    device: B::Device,
}

impl<'a, B: Backend> Run<'a, B> {
    fn new(hidden: FloatTensor<B>, weight: FloatTensor<B>, op: &'a CrossEntropyOp) -> Self {
        let wide = accumulator(hidden.dtype()).unwrap_or_else(|error| panic!("{error}"));
        let factors = product_dtype(hidden.dtype());
        Self {
            op,
            dtype: hidden.dtype().into(),
            factors,
            wide,
            device: hidden.device(),
            hidden: cast::<B>(hidden, factors),
            weight,
        }
    }

    /// Ranges of the vocabulary: of whole stretches, and a last one of what is left.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<B> {
        let limit = self.op.blocks.unwrap_or(BLOCK_ELEMS);
        let [vocabulary, channels] = self.weight.shape().dims();
        let words = limit / self.op.rows().max(channels).max(1);
        let words = (words / STRETCH).max(1) * STRETCH;
        let whole = vocabulary / STRETCH * STRETCH;
        let starts = (0..whole).step_by(words);
        let blocks = starts.map(move |start| start..whole.min(start + words));
        blocks.chain((whole < vocabulary).then_some(whole..vocabulary))
    }

    /// The weight of a block.
    fn words(&self, block: &Range<usize>) -> FloatTensor<B> {
        let words = slice::<B>(self.weight.clone(), 0, block.clone());
        cast::<B>(words, self.factors)
    }

    /// ln sum e^x of each row, `[rows, 1]`.
    fn log_sum_exp(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        // All of a block may be -inf, and -inf less itself is no number.
        let lowest = match self.wide {
            FloatDType::F64 => f64::MIN,
            _ => f64::from(f32::MIN),
        };
        let largest = B::float_clamp_min(B::float_max_dim(x.clone(), 1), lowest.into());
        let sum = B::float_sum_dim(B::float_exp(B::float_sub(x, largest.clone())), 1);
        B::float_add(largest, B::float_log(sum))
    }

    /// ln sum e^x of each stretch of a block, `[rows, stretches]`.
    fn stretches(&self, logits: FloatTensor<B>) -> FloatTensor<B> {
        let [rows, words] = logits.shape().dims();
        let stretch = STRETCH.min(words);
        let stretches = words / stretch;
        let x = B::float_reshape(logits, Shape::new([rows * stretches, stretch]));
        B::float_reshape(self.log_sum_exp(x), Shape::new([rows, stretches]))
    }

    /// The logits of a block, `[rows, words]`.
    fn logits(&self, block: &Range<usize>) -> FloatTensor<B> {
        let words = B::float_swap_dims(self.words(block), 0, 1);
        cast::<B>(rows::product::<B>(self.hidden.clone(), words), self.wide)
    }

    fn flat(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let elems = x.shape().num_elements();
        B::float_reshape(x, Shape::new([elems]))
    }

    /// The indices of the targets among the logits of a block, in their order, if it has any.
    fn targets(&self, block: &Range<usize>) -> Option<IntTensor<B>> {
        let targets = &self.op.targets;
        let first = |word| targets.partition_point(|(target, _)| *target < word);
        let within = &targets[first(block.start)..first(block.end)];
        let index = |(word, row): &(usize, usize)| row * block.len() + word - block.start;
        let indices: Vec<_> = within.iter().map(|target| index(target) as i64).collect();
        (!indices.is_empty()).then(|| self.upload(indices))
    }

    fn upload(&self, indices: Vec<i64>) -> IntTensor<B> {
        let settings = burn::backend::get_or_init_device_settings::<B>(&self.device);
        let len = indices.len();
        let data = TensorData::new(indices, [len]).convert_dtype(settings.int_dtype.into());
        B::int_from_data(data, &self.device)
    }
}
