//! Attention in blocks of queries, composed of ordinary tensor operations, for every backend.
//!
//! A block has the most queries whose scores fit 128 MiB, and the keys that any of them sees.
//! Nothing larger than a block of scores is ever live, in either direction. The heads of a group
//! are stacked as rows of one product, so k and v are not repeated. Windows of one length, as in
//! vision towers, are computed as one batch.
//!
//! Everything is computed in f32, or in f64 for f64: a block's rows of 16-bit tensors are converted
//! when they are sliced, and results are rounded once. A product of 16-bit tensors would be rounded
//! before the scale or the sum divides it: f16 would overflow, and bf16 would keep 8 bits of a
//! score.
//!
//! The backward recomputes the largest score and the sum of each row like the forward, and needs no
//! logarithm, which would lose the sum beside a large score.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, TensorData};
use burn_fused::accumulator;
use burn_fused::primitive::{cast, not, slice, whole};

use super::mask::AttentionMask;
use super::op::{AttentionGradients, AttentionOp, Kept, Sizes};

/// The most scores of a block, unless a few queries of one have more: 128 MiB in f32.
const BLOCK_ELEMS: usize = 1 << 25;
/// The fewest queries of a block, unless fewer are left: below that, products are inefficient.
const BLOCK_QUERIES: usize = 16;
/// The score of what is hidden, whatever it was: finite, so that differences of two are numbers.
pub(crate) const HIDDEN: f64 = -1e30;
/// A score below this is hidden. A row without any other has the output 0 and the gradient 0.
pub(crate) const FLOOR: f64 = -1e20;
/// Less than any sum over a row that sees a key, whose largest term is 1; no less than needed, for
/// the gradient divides by it.
pub(crate) const LEAST_SUM: f64 = 0.5;

/// Queries that are computed together, and the keys that they see.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Windows of one length that this block consists of; queries and keys divide by it.
    windows: usize,
    /// True if a query of the block does not see one of its keys, padding apart.
    hides: bool,
}

/// Divides the queries into blocks of at most `limit` scores, each with `matrices` of them: one for
/// every sample and head. `joins` allows several windows in a block.
fn blocks(mask: &AttentionMask, matrices: usize, limit: usize, joins: bool) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut start = 0;
    while start < mask.queries() {
        // The keys of fewer queries are unknown until they are fewer, so the limit is approached.
        let rows =
            |keys: &Range<usize>| (limit / (matrices * keys.len()).max(1)).max(BLOCK_QUERIES);
        let first = mask.span(start);
        let mut end = mask.queries().min(start.saturating_add(rows(&first)));
        // A block ends with its window: beyond it, it would compute what is hidden.
        let is_window = first.start == start && first.end > start && first.end < end;
        if joins && is_window && mask.span(first.end).start >= first.end {
            end = first.end;
        }
        let mut keys = mask.hull(start..end);
        while end - start > rows(&keys) {
            end = start + rows(&keys).max((end - start) / 2);
            keys = mask.hull(start..end);
        }
        let hides = !mask.covers(start..end, &keys);
        let block = Block {
            queries: start..end,
            windows: 1,
            hides,
            keys,
        };
        start = end;
        match blocks.last_mut() {
            Some(last) if joins && last.takes(&block, matrices, limit) => {
                last.queries.end = block.queries.end;
                last.keys.end = block.keys.end;
                last.windows += 1;
            }
            _ => blocks.push(block),
        }
    }
    blocks
}

impl Block {
    fn rows(&self) -> usize {
        self.queries.len() / self.windows
    }

    fn columns(&self) -> usize {
        self.keys.len() / self.windows
    }

    /// True if the next block is one more window of this one.
    fn takes(&self, next: &Self, matrices: usize, limit: usize) -> bool {
        let squares = |block: &Self| !block.hides && block.queries == block.keys;
        squares(self)
            && squares(next)
            && self.rows() == next.queries.len()
            && matrices * self.rows() * self.columns() * (self.windows + 1) <= limit
    }
}

/// Computes the output and the softmax of [`AttentionOps`](crate::AttentionOps).
pub fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    op: &AttentionOp,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let run = Run::<B>::new(&q, &k, &v, bias, op);
    let (mut outs, mut softmaxes) = (Vec::new(), Vec::new());
    for block in run.blocks() {
        let q = run.scaled(run.queries(&q, &block));
        let scores = run.scores(q, run.keys(&k, &block), &block);
        let largest = B::float_clamp_min(B::float_max_dim(scores.clone(), 2), FLOOR.into());
        let weights = B::float_exp(B::float_sub(scores, largest.clone()));
        let sum = B::float_clamp_min(B::float_sum_dim(weights.clone(), 2), LEAST_SUM.into());
        let mixed = B::float_matmul(weights, run.keys(&v, &block));
        let mixed = B::float_div(mixed, sum.clone());
        outs.push(run.narrow(run.unfold(mixed, &block, run.sizes.heads)));
        let softmax = run.side_by_side(largest, sum);
        softmaxes.push(run.unfold(softmax, &block, run.sizes.heads));
    }
    (join::<B>(outs), join::<B>(softmaxes))
}

/// Computes the gradients of q, k, v and the bias, as in [`AttentionOps`](crate::AttentionOps).
pub fn backward<B: Backend>(
    kept: Kept<B>,
    gradient: FloatTensor<B>,
    bias_wanted: bool,
    op: &AttentionOp,
) -> AttentionGradients<B> {
    let Kept {
        q,
        k,
        v,
        bias,
        out,
        softmax,
    } = kept;
    let run = Run::<B>::new(&q, &k, &v, bias.into_option(), op);
    let heads = run.sizes.heads;
    let mut dqs = Vec::new();
    let mut dk = Sum::<B>::new(k.shape());
    let mut dv = Sum::<B>::new(v.shape());
    let bias_shape = run.bias.as_ref().filter(|_| bias_wanted).map(|x| x.shape());
    let mut dbias = bias_shape.map(Sum::<B>::new);
    for block in run.blocks() {
        let (q, k) = (run.scaled(run.queries(&q, &block)), run.keys(&k, &block));
        let scores = run.scores(q.clone(), k.clone(), &block);
        let [largest, sum] = run.softmax(&softmax, &block);
        let weights = B::float_exp(B::float_sub(scores, largest));
        // The sum divides the rows of dy instead of the weights, which are more.
        let dy = B::float_div(run.queries(&gradient, &block), sum);
        let weighed = B::float_matmul(transpose::<B>(weights.clone()), dy.clone());
        dv.add(run.unfold_keys(weighed, &block), 2, &block.keys);

        // sum_j p_j dp_j = sum_j p_j <dy, v_j> = <dy, y>
        let out = run.queries(&out, &block);
        let delta = B::float_sum_dim(B::float_mul(dy.clone(), out), 2);
        let dweights = B::float_matmul(dy, transpose::<B>(run.keys(&v, &block)));
        let dscores = B::float_mul(weights, B::float_sub(dweights, delta));
        if let Some(dbias) = &mut dbias {
            run.add_bias_gradient(dbias, dscores.clone(), &block);
        }
        let dq = run.scaled(B::float_matmul(dscores.clone(), k));
        dqs.push(run.narrow(run.unfold(dq, &block, heads)));
        let part = B::float_matmul(transpose::<B>(dscores), q);
        dk.add(run.unfold_keys(part, &block), 2, &block.keys);
    }
    let kv = |sum: Sum<B>| run.narrow(sum.total(&run));
    let dbias = dbias.map(|dbias| dbias.total(&run));
    (join::<B>(dqs), kv(dk), kv(dv), dbias)
}

/// State that the blocks of an operation share.
struct Run<'a, B: Backend> {
    op: &'a AttentionOp,
    sizes: Sizes,
    /// The type of q, k and v.
    dtype: FloatDType,
    /// The type of scores and sums.
    wide: FloatDType,
    device: B::Device,
    bias: Option<FloatTensor<B>>,
    /// The middle of the keys that each query sees and the distance of its last from it,
    /// `[queries, 1]`, and the indices of the keys, `[1, keys]`, unless all queries see all keys.
    spans: Option<[FloatTensor<B>; 3]>,
    /// `[batch, 1, 1, 1, keys]`: where padding is.
    padding: Option<BoolTensor<B>>,
    /// `[samples, 1, keys, 1]`: the keys that no query sees, if there are any.
    unseen: Option<BoolTensor<B>>,
    /// `[samples, 1, queries, 1]`: the queries that see no key, if there are any.
    blind: Option<BoolTensor<B>>,
}

impl<'a, B: Backend> Run<'a, B> {
    fn new(
        q: &FloatTensor<B>,
        k: &FloatTensor<B>,
        v: &FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        op: &'a AttentionOp,
    ) -> Self {
        let sizes = Sizes::of(q, k, v);
        let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
        let device = q.device();
        let upload = |values: Vec<f64>, shape: &[usize]| {
            let data = TensorData::new(values, shape.to_vec()).convert_dtype(wide.into());
            B::float_from_data(data, &device)
        };
        let mask = &op.mask;
        let (queries, keys) = (sizes.queries, sizes.keys);
        let spans = (!mask.covers(0..queries, &(0..keys))).then(|| {
            // Halves of integers, which f32 holds exactly up to 2^23 tokens. A query that sees no key
            // has a negative distance.
            let of_spans = |number: fn(f64, f64) -> f64| {
                let spans = (0..queries).map(|query| mask.span(query));
                let numbers = spans.map(|span| number(span.start as f64, span.end as f64));
                upload(numbers.collect(), &[queries, 1])
            };
            let indices = (0..keys).map(|key| key as f64).collect();
            [
                of_spans(|start, end| (start + end - 1.0) / 2.0),
                of_spans(|start, end| (end - start - 1.0) / 2.0),
                upload(indices, &[1, keys]),
            ]
        });
        let padding = mask.padding();
        let padding = padding.map(|flags| not::<B>(flags, [sizes.batch, 1, 1, 1, keys], &device));
        let rows = |flags: Option<&[bool]>, tokens: usize| {
            let flags = flags?;
            Some(not::<B>(
                flags,
                [flags.len() / tokens, 1, tokens, 1],
                &device,
            ))
        };
        Self {
            op,
            sizes,
            dtype: q.dtype().into(),
            wide,
            bias,
            unseen: rows(mask.seen(), keys),
            blind: rows(mask.seeing(), queries),
            spans,
            padding,
            device,
        }
    }

    fn blocks(&self) -> Vec<Block> {
        let joins = self.bias.is_none() && self.padding.is_none();
        let matrices = self.sizes.batch * self.sizes.heads;
        let limit = self.op.blocks.unwrap_or(BLOCK_ELEMS);
        blocks(&self.op.mask, matrices, limit, joins)
    }

    fn narrow(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        cast::<B>(x, self.dtype)
    }

    fn scaled(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mul_scalar(x, self.op.scale.into())
    }

    /// The scores of a block, `[matrices, group * rows, columns]`, from its scaled queries and its
    /// keys.
    fn scores(&self, q: FloatTensor<B>, k: FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        let mut scores = B::float_matmul(q, transpose::<B>(k));
        let flat = scores.shape();
        if let Some(bias) = self.bias_of(block) {
            scores = B::float_add(B::float_reshape(scores, self.grouped(block)), bias);
        }
        // Replaced, not added to: no bias shows what is hidden.
        let hidden = [self.hidden_of(block), self.padding_of(block)];
        for hidden in hidden.into_iter().flatten() {
            scores = B::float_reshape(scores, self.grouped(block));
            scores = B::float_mask_fill(scores, hidden, HIDDEN.into());
        }
        B::float_reshape(scores, flat)
    }

    /// The largest score and the sum of each row of a block, `[matrices, group * rows, 1]` each.
    fn softmax(&self, kept: &FloatTensor<B>, block: &Block) -> [FloatTensor<B>; 2] {
        let rows = self.rows(kept, &block.queries, None);
        let rows = self.fold(rows, self.sizes.group(), block.windows);
        [0..1, 1..2].map(|range| slice::<B>(rows.clone(), 2, range))
    }

    /// Two columns as one tensor, `[matrices, group * rows, 2]`. On GPUs a concatenation would copy
    /// each by itself.
    fn side_by_side(&self, first: FloatTensor<B>, second: FloatTensor<B>) -> FloatTensor<B> {
        let [matrices, rows, _] = first.shape().dims();
        let shape = Shape::new([matrices, rows, 2]);
        let bools = burn::backend::get_or_init_device_settings::<B>(&self.device).bool_dtype;
        let is_second = TensorData::new(vec![false, true], [1, 1, 2]).convert_dtype(bools.into());
        let is_second = B::bool_from_data(is_second, &self.device);
        let is_second = B::bool_expand(is_second, shape.clone());
        let [first, second] = [first, second].map(|x| B::float_expand(x, shape.clone()));
        B::float_mask_where(first, is_second, second)
    }

    /// The shape of a block's scores with heads and queries apart.
    fn grouped(&self, block: &Block) -> Shape {
        let Sizes {
            batch, kv_heads, ..
        } = self.sizes;
        let group = self.sizes.group();
        Shape::new([batch, kv_heads, group, block.rows(), block.columns()])
    }

    /// The bias of a block, to be broadcast to [`grouped`](Self::grouped).
    fn bias_of(&self, block: &Block) -> Option<FloatTensor<B>> {
        let mut bias = self.bias.clone()?;
        for (dim, range) in [(2, &block.queries), (3, &block.keys)] {
            if bias.shape()[dim] > 1 {
                bias = slice::<B>(bias, dim, range.clone());
            }
        }
        let [batch, heads, rows, columns] = bias.shape().dims();
        let (kv_heads, group) = if heads == 1 {
            (1, 1)
        } else {
            (self.sizes.kv_heads, self.sizes.group())
        };
        let shape = Shape::new([batch, kv_heads, group, rows, columns]);
        Some(B::float_reshape(bias, shape))
    }

    /// Adds a block's gradient of the scores to that of the bias, summed over what shares it.
    fn add_bias_gradient(&self, sum: &mut Sum<B>, dscores: FloatTensor<B>, block: &Block) {
        let Sizes { batch, heads, .. } = self.sizes;
        let (rows, columns) = (block.rows(), block.columns());
        let mut part = B::float_reshape(dscores, Shape::new([batch, heads, rows, columns]));
        let shape = sum.shape.clone();
        for dim in 0..4 {
            if shape[dim] == 1 && part.shape()[dim] > 1 {
                part = B::float_sum_dim(part, dim);
            }
        }
        // The block's part of the bias: all of it along a dimension that is shared.
        let range = |dim: usize, range: &Range<usize>| {
            if shape[dim] == 1 { 0..1 } else { range.clone() }
        };
        let (rows, columns) = (range(2, &block.queries), range(3, &block.keys));
        sum.add_within(part, [(2, rows), (3, columns)]);
    }

    /// Where padding is in a block, to be broadcast to [`grouped`](Self::grouped).
    fn padding_of(&self, block: &Block) -> Option<BoolTensor<B>> {
        let padding = self.padding.clone()?;
        Some(cut::<B>(padding, 4, &block.keys))
    }

    /// True where a key is hidden from a query of a block, padding apart.
    fn hidden_of(&self, block: &Block) -> Option<BoolTensor<B>> {
        let [middles, distances, indices] = self.spans.as_ref().filter(|_| block.hides)?;
        let rows = |x: &FloatTensor<B>| slice::<B>(x.clone(), 0, block.queries.clone());
        let indices = slice::<B>(indices.clone(), 1, block.keys.clone());
        let shape = Shape::new([block.rows(), block.columns()]);
        let expand = |x| B::float_expand(x, shape.clone());
        let (middles, distances) = (expand(rows(middles)), expand(rows(distances)));
        let apart = B::float_abs(B::float_sub(expand(indices), middles));
        let bools = burn::backend::get_or_init_device_settings::<B>(&self.device).bool_dtype;
        let hidden = B::float_greater(apart, distances, bools);
        let shape = Shape::new([1, 1, 1, block.rows(), block.columns()]);
        Some(B::bool_reshape(hidden, shape))
    }

    /// A block's part of a tensor with the dimensions of q, `[matrices, group * rows, channels]`,
    /// with zeros for the queries that see no key.
    fn queries(&self, x: &FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        let x = self.rows(x, &block.queries, self.blind.as_ref());
        self.fold(x, self.sizes.group(), block.windows)
    }

    /// A block's part of a tensor with the dimensions of k, `[matrices, columns, channels]`, with
    /// zeros for the keys that no query sees.
    fn keys(&self, x: &FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        let x = self.rows(x, &block.keys, self.unseen.as_ref());
        self.fold(x, 1, block.windows)
    }

    /// Some tokens of a tensor, in the type that is computed in, with zeros where `hidden`: a weight
    /// of 0 would not hide a NaN.
    fn rows(
        &self,
        x: &FloatTensor<B>,
        tokens: &Range<usize>,
        hidden: Option<&BoolTensor<B>>,
    ) -> FloatTensor<B> {
        let x = cast::<B>(slice::<B>(x.clone(), 2, tokens.clone()), self.wide);
        let Some(hidden) = hidden else { return x };
        B::float_mask_fill(x, cut::<B>(hidden.clone(), 2, tokens), 0.0.into())
    }

    /// `[batch, kv_heads * group, windows * rows, channels]` to
    /// `[batch * kv_heads * windows, group * rows, channels]`.
    fn fold(&self, x: FloatTensor<B>, group: usize, windows: usize) -> FloatTensor<B> {
        let [batch, heads, tokens, channels] = x.shape().dims();
        let (kv_heads, rows) = (heads / group, tokens / windows);
        let mut x = x;
        if windows > 1 && group > 1 {
            let shape = Shape::new([batch * kv_heads, group, windows, rows, channels]);
            x = B::float_swap_dims(B::float_reshape(x, shape), 1, 2);
        }
        let shape = [batch * kv_heads * windows, group * rows, channels];
        B::float_reshape(x, Shape::new(shape))
    }

    /// The inverse of [`fold`](Self::fold) for a tensor with `heads`.
    fn unfold(&self, x: FloatTensor<B>, block: &Block, heads: usize) -> FloatTensor<B> {
        let [_, tokens, channels] = x.shape().dims();
        let Sizes {
            batch, kv_heads, ..
        } = self.sizes;
        let (group, windows) = (heads / kv_heads, block.windows);
        let rows = tokens / group;
        let mut x = x;
        if windows > 1 && group > 1 {
            let shape = Shape::new([batch * kv_heads, windows, group, rows, channels]);
            x = B::float_swap_dims(B::float_reshape(x, shape), 1, 2);
        }
        B::float_reshape(x, Shape::new([batch, heads, windows * rows, channels]))
    }

    fn unfold_keys(&self, x: FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        self.unfold(x, block, self.sizes.kv_heads)
    }
}

/// A sum of parts over ranges of a tensor.
struct Sum<B: Backend> {
    shape: Shape,
    total: Option<FloatTensor<B>>,
}

impl<B: Backend> Sum<B> {
    fn new(shape: Shape) -> Self {
        Self { shape, total: None }
    }

    /// Adds a part that lies in `range` of a dimension.
    fn add(&mut self, part: FloatTensor<B>, dim: usize, range: &Range<usize>) {
        self.add_within(part, [(dim, range.clone())]);
    }

    fn add_within<const N: usize>(
        &mut self,
        part: FloatTensor<B>,
        ranges: [(usize, Range<usize>); N],
    ) {
        let is_whole = part.shape() == self.shape;
        self.total = Some(match (self.total.take(), is_whole) {
            (None, true) => part,
            (Some(total), true) => B::float_add(total, part),
            (total, false) => {
                let total = total.unwrap_or_else(|| {
                    let dtype = part.dtype().into();
                    B::float_zeros(self.shape.clone(), &part.device(), dtype)
                });
                let mut slices = whole(&self.shape);
                for (dim, range) in ranges {
                    slices[dim] = range.into();
                }
                let earlier = B::float_slice(total.clone(), &slices);
                B::float_slice_assign(total, &slices, B::float_add(earlier, part))
            }
        });
    }

    fn total(self, run: &Run<B>) -> FloatTensor<B> {
        let zeros = || B::float_zeros(self.shape, &run.device, run.wide);
        self.total.unwrap_or_else(zeros)
    }
}

/// A range of one dimension of flags.
fn cut<B: Backend>(x: BoolTensor<B>, dim: usize, range: &Range<usize>) -> BoolTensor<B> {
    let mut slices = whole(&x.shape());
    slices[dim] = range.clone().into();
    B::bool_slice(x, &slices)
}

fn transpose<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_swap_dims(x, 1, 2)
}

/// Joins the blocks of queries.
fn join<B: Backend>(mut parts: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if parts.len() == 1 {
        parts.remove(0)
    } else {
        B::float_cat(parts, 2)
    }
}
