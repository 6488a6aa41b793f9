//! Attention with the whole score matrix, composed of ordinary operations: the baseline.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use burn_fused::accumulator;
use burn_fused::primitive::{cast, not};

use super::blocks::{FLOOR, HIDDEN, LEAST_SUM};
use super::op::{AttentionOp, Sizes};

/// Computes softmax(scale * q k^T + bias) v over the keys that each query sees, in f32, or in f64
/// for f64, with k and v repeated for the query heads that share them. Autodiff keeps the matrices
/// of every operation.
///
/// # Panics
/// If shapes or types disagree; [`AttentionOp::check`] reports the reason.
pub(super) fn attention<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    op: &AttentionOp,
) -> FloatTensor<B> {
    let sizes = Sizes::of(&q, &k, &v);
    let (dtype, device) = (q.dtype().into(), q.device());
    let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let rows = |flags: Option<&[bool]>, tokens: usize| {
        let flags = flags?;
        Some(not::<B>(
            flags,
            [flags.len() / tokens, 1, tokens, 1],
            &device,
        ))
    };
    let unseen = rows(op.mask.seen(), sizes.keys);
    let blind = rows(op.mask.seeing(), sizes.queries);
    let q = clear::<B>(cast::<B>(q, wide), blind.as_ref());
    let k = clear::<B>(cast::<B>(k, wide), unseen.as_ref());
    let v = clear::<B>(cast::<B>(v, wide), unseen.as_ref());
    let (k, v) = (repeat::<B>(k, &sizes), repeat::<B>(v, &sizes));
    let q = B::float_mul_scalar(q, op.scale.into());
    let mut scores = B::float_matmul(q, B::float_swap_dims(k, 2, 3));
    if let Some(bias) = bias {
        scores = B::float_add(scores, bias);
    }
    if let Some((seen, shape)) = seen(op, &sizes) {
        scores = B::float_mask_fill(scores, not::<B>(&seen, shape, &device), HIDDEN.into());
    }
    // The weights do not depend on what is subtracted: no gradient goes that way.
    let largest = B::float_max_dim(B::float_detach(scores.clone()), 3);
    let largest = B::float_clamp_min(largest, FLOOR.into());
    let weights = B::float_exp(B::float_sub(scores, largest));
    let sum = B::float_clamp_min(B::float_sum_dim(weights.clone(), 3), LEAST_SUM.into());
    let out = B::float_matmul(B::float_div(weights, sum), v);
    // Backward, this hides the gradient of a query that sees no key.
    cast::<B>(clear::<B>(out, blind.as_ref()), dtype)
}

/// Sets rows to 0, whatever they hold.
fn clear<B: Backend>(x: FloatTensor<B>, rows: Option<&BoolTensor<B>>) -> FloatTensor<B> {
    match rows {
        Some(rows) => B::float_mask_fill(x, rows.clone(), 0.0.into()),
        None => x,
    }
}

/// True where a query sees a key, and the shape of the flags, unless all see all.
fn seen(op: &AttentionOp, sizes: &Sizes) -> Option<(Vec<bool>, [usize; 4])> {
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
    let mut seen = Vec::with_capacity(samples * queries * keys);
    for sample in 0..samples {
        for query in 0..queries {
            seen.extend((0..keys).map(|key| mask.sees(sample, query, key)));
        }
    }
    Some((seen, [samples, 1, queries, keys]))
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
