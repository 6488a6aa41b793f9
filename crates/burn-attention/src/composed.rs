//! Attention with its whole matrix of scores, of ordinary operations: the baseline.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{FloatDType, Shape, TensorData};

use crate::ops::{AttentionOp, Sizes, accumulator};

/// softmax(scale * q k^T + bias + mask) v, with k and v repeated for the query heads that share
/// them, and softmax in f32, or in f64 for f64. Autodiff keeps the matrices of every step.
///
/// # Panics
/// If shapes or types disagree: [`AttentionOp::check`] reports that.
pub fn attention<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    op: &AttentionOp,
) -> FloatTensor<B> {
    let sizes = Sizes::of(&q, &k, &v);
    let (dtype, device) = (FloatDType::from(q.dtype()), q.device());
    let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let (k, v) = (repeat::<B>(k, &sizes), repeat::<B>(v, &sizes));
    let scores = B::float_matmul(q, B::float_swap_dims(k, 2, 3));
    let mut scores = B::float_mul_scalar(B::float_cast(scores, wide), op.scale.into());
    if let Some(bias) = bias {
        scores = B::float_add(scores, bias);
    }
    if let Some((hidden, shape)) = hidden(op, &sizes) {
        let data = TensorData::new(hidden, shape).convert_dtype(wide.into());
        scores = B::float_add(scores, B::float_from_data(data, &device));
    }
    let weights = B::float_cast(B::softmax(scores, 3), dtype);
    B::float_matmul(weights, v)
}

/// What is added to the scores to hide keys, and its shape; a finite number, so that a query that
/// sees no key has an output.
fn hidden(op: &AttentionOp, sizes: &Sizes) -> Option<(Vec<f32>, [usize; 4])> {
    let mask = &op.mask;
    let (queries, keys) = (sizes.queries, sizes.keys);
    if mask.padding().is_none() && mask.covers(0..queries, &(0..keys)) {
        return None;
    }
    let samples = if mask.padding().is_some() {
        sizes.batch
    } else {
        1
    };
    let mut hidden = Vec::with_capacity(samples * queries * keys);
    for sample in 0..samples {
        for query in 0..queries {
            let sees = |key| mask.sees(sample, query, key);
            hidden.extend((0..keys).map(|key| if sees(key) { 0.0 } else { -1e30 }));
        }
    }
    Some((hidden, [samples, 1, queries, keys]))
}

/// Gives each query head its key or value head.
fn repeat<B: Backend>(x: FloatTensor<B>, sizes: &Sizes) -> FloatTensor<B> {
    let [batch, kv_heads, tokens, channels] = x.shape().dims();
    if sizes.group() == 1 {
        return x;
    }
    let x = B::float_reshape(x, Shape::new([batch, kv_heads, 1, tokens, channels]));
    let x = B::float_repeat_dim(x, 2, sizes.group());
    B::float_reshape(x, Shape::new([batch, sizes.heads, tokens, channels]))
}
