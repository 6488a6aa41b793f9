//! The gated delta rule in chunks of tokens, composed of ordinary tensor operations.
//!
//! In a chunk of L tokens, with the state S before it, c the sum of g from the chunk's first token,
//! P(i, j) = exp(sum of g after j up to i) for j up to i, where P and exp(c) are 0 across the
//! border of sequences:
//!
//! - A(i, j) = beta(i) <k(i), k(j)> P(i, j) for j before i, and T = (1 + A)^-1
//! - X = beta (v - exp(c) k S): the write of each token if it were alone in its chunk
//! - N = T X: its actual write, since it reads the writes of earlier tokens
//! - out = exp(c) q S + (q k^T P) N
//! - the state after the chunk: exp(c(L)) S + sum over i of P(L, i) k(i) N(i)^T
//!
//! All but S is computed for many chunks at once; only the state passes from chunk to chunk, and
//! backward its gradient.
//!
//! Sums of g are computed directly, not as differences of one sum over the chunk: beside a token
//! that forgets nearly everything, a difference would lose the digits of tokens that forget little.
//! T is built from its diagonal blocks by doubling: powers of A would give (1 + A)^-1 faster, but
//! exceed all precision if keys are similar.
//!
//! # Source
//! Yang, Kautz, Hatamizadeh: Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR 2025

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{FloatDType, Shape, TensorData};
use burn_fused::accumulator;
use burn_fused::primitive::{cast, slice};

use super::op::{GatedDeltaOp, Sizes};
use super::{NORM_EPSILON, chunk_tokens};

/// The elements of a block's largest tensors, unless a chunk has more: 16 MiB in f32.
const BLOCK_ELEMS: usize = 1 << 22;
/// The logarithm of a decay of 0: finite, so that no product with it is NaN.
const FORGOTTEN: f64 = -1e30;

/// The output and the states of [`GatedDeltaOps`](super::GatedDeltaOps).
pub fn forward<B: Backend>(
    [q, k, v, g, beta]: [FloatTensor<B>; 5],
    op: &GatedDeltaOp,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let run = Run::<B>::new(&q, &v, op);
    let mut state = run.zeros();
    let (mut outs, mut states) = (Vec::new(), Vec::new());
    for block in run.blocks() {
        let local = run.local(&block, [&q, &k, &v, &g, &beta]);
        let own = B::float_matmul(
            local.inverse.clone(),
            B::float_mul(local.v.clone(), local.beta.clone()),
        );
        let from_start = B::float_mul(local.beta.clone(), local.from_start.clone());
        let reading = B::float_matmul(
            local.inverse.clone(),
            B::float_mul(local.k.clone(), from_start),
        );
        let queries = B::float_mul(local.q.clone(), local.from_start.clone());
        // Both read the state, by one product.
        let reading = B::float_cat(vec![reading, queries], 2);
        let keys = transpose::<B>(B::float_mul(local.k.clone(), local.to_end.clone()));
        let (mut written, mut read) = (Vec::new(), Vec::new());
        for chunk in 0..block.len() {
            if op.keeps_states {
                states.push(state.clone());
            }
            let both = B::float_matmul(at::<B>(&reading, chunk), state.clone());
            let predicted = slice::<B>(both.clone(), 2, 0..run.len);
            read.push(slice::<B>(both, 2, run.len..2 * run.len));
            let new = B::float_sub(at::<B>(&own, chunk), predicted);
            let kept = B::float_mul(state, at::<B>(&local.through, chunk));
            let added = B::float_matmul(at::<B>(&keys, chunk), new.clone());
            state = B::float_add(kept, added);
            written.push(new);
        }
        let (written, read) = (B::float_cat(written, 0), B::float_cat(read, 0));
        let scores = B::float_mul(local.scores, local.decays);
        let out = B::float_add(read, B::float_matmul(scores, written));
        outs.push(run.unfold(out, run.sizes.heads));
    }
    states.push(state);
    let out = slice::<B>(B::float_cat(outs, 1), 1, 0..run.sizes.tokens);
    (cast::<B>(out, q.dtype().into()), B::float_cat(states, 0))
}

/// The output of one token and the state after it, `[1, batch * heads, key_dim, value_dim]`, from
/// that before it, `[batch, heads, ..]`.
pub(super) fn step<B: Backend>(
    [q, k, v, g, beta]: [FloatTensor<B>; 5],
    state: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (sizes, dtype) = (Sizes::of(&q, &v), q.dtype().into());
    let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let matrices = sizes.matrices();
    let shaped = |x, rows, columns| B::float_reshape(x, Shape::new([matrices, rows, columns]));
    let unit = |x: FloatTensor<B>| {
        let x = cast::<B>(x, wide);
        let squares = B::float_sum_dim(B::float_mul(x.clone(), x.clone()), 3);
        let root = B::float_sqrt(B::float_add_scalar(squares, NORM_EPSILON.into()));
        let x = repeat::<B>(B::float_div(x, root), sizes.group());
        shaped(x, sizes.key_dim, 1)
    };
    let q = B::float_mul_scalar(unit(q), scale(sizes.key_dim).into());
    let (k, v) = (unit(k), shaped(cast::<B>(v, wide), 1, sizes.value_dim));
    let decay = shaped(B::float_exp(g), 1, 1);
    let state = shaped(state, sizes.key_dim, sizes.value_dim);
    let state = B::float_mul(state, decay);
    let known = B::float_sum_dim(B::float_mul(state.clone(), k.clone()), 1);
    let written = B::float_mul(B::float_sub(v, known), shaped(beta, 1, 1));
    let state = B::float_add(state, B::float_mul(k, written));
    let out = B::float_sum_dim(B::float_mul(state.clone(), q), 1);
    let shape = Shape::new([sizes.batch, 1, sizes.heads, sizes.value_dim]);
    let out = cast::<B>(B::float_reshape(out, shape), dtype);
    let shape = Shape::new([1, matrices, sizes.key_dim, sizes.value_dim]);
    (out, B::float_reshape(state, shape))
}

/// The ranges of chunks that a pass computes at once, from tensors that [`GatedDeltaOp::check`]
/// accepted.
pub fn blocks_of<T: TensorMetadata>(op: &GatedDeltaOp, q: &T, v: &T) -> Vec<Range<usize>> {
    blocks(op, &Sizes::of(q, v))
}

fn blocks(op: &GatedDeltaOp, sizes: &Sizes) -> Vec<Range<usize>> {
    let len = chunk_tokens(sizes.tokens);
    let chunks = sizes.tokens.div_ceil(len);
    let width = len.max(sizes.key_dim).max(sizes.value_dim);
    let chunk_elems = sizes.matrices() * len * width;
    let limit = op.blocks.unwrap_or(BLOCK_ELEMS);
    let step = (limit / chunk_elems.max(1)).max(1);
    let starts = (0..chunks).step_by(step);
    starts
        .map(|start| start..chunks.min(start + step))
        .collect()
}

/// The sizes and masks that the blocks of a pass share.
pub(super) struct Run<'a, B: Backend> {
    op: &'a GatedDeltaOp,
    pub(super) sizes: Sizes,
    /// Tokens of a chunk.
    len: usize,
    /// The type that is computed in.
    wide: FloatDType,
    device: B::Device,
    /// `[1, 1, len, len]`: 1 where the row's token comes after the column's, else 0.
    pub(super) after: FloatTensor<B>,
    /// The same, and 1 on the diagonal.
    pub(super) up_to: FloatTensor<B>,
    /// Where the row's token comes before the column's.
    before: BoolTensor<B>,
}

/// The tensors computed of a block of chunks without the state, `[chunks, matrices, ..]` each.
pub(super) struct Local<B: Backend> {
    /// `[.., len, key_dim]`, normalised and scaled.
    pub(super) q: FloatTensor<B>,
    /// `[.., len, key_dim]`, normalised.
    pub(super) k: FloatTensor<B>,
    /// `[.., len, value_dim]`
    pub(super) v: FloatTensor<B>,
    /// `[.., len, 1]`
    pub(super) beta: FloatTensor<B>,
    /// P, `[.., len, len]`.
    pub(super) decays: FloatTensor<B>,
    /// exp(c), `[.., len, 1]`: of the state before the chunk, at each token.
    pub(super) from_start: FloatTensor<B>,
    /// `[.., len, 1]`: of what a token writes, after the chunk.
    pub(super) to_end: FloatTensor<B>,
    /// `[.., 1, 1]`: of the state before the chunk, after it.
    pub(super) through: FloatTensor<B>,
    /// q k^T, `[.., len, len]`
    pub(super) scores: FloatTensor<B>,
    /// k k^T, `[.., len, len]`
    pub(super) products: FloatTensor<B>,
    /// T, `[.., len, len]`
    pub(super) inverse: FloatTensor<B>,
    /// q and k of the key heads as they came, `[batch, tokens, key_heads, key_dim]`, and what
    /// normalises them, `[.., 1]`.
    pub(super) raw: [(FloatTensor<B>, FloatTensor<B>); 2],
}

impl<'a, B: Backend> Run<'a, B> {
    pub(super) fn new(q: &FloatTensor<B>, v: &FloatTensor<B>, op: &'a GatedDeltaOp) -> Self {
        let sizes = Sizes::of(q, v);
        let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
        let device = q.device();
        let len = chunk_tokens(sizes.tokens);
        let matrix = |is_one: fn(usize, usize) -> bool| {
            let row = |row| (0..len).map(move |column| f64::from(u8::from(is_one(row, column))));
            upload::<B>(
                (0..len).flat_map(row).collect(),
                [1, 1, len, len],
                wide,
                &device,
            )
        };
        let after = matrix(|row, column| row > column);
        let up_to = matrix(|row, column| row >= column);
        let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
        let before = B::float_equal_elem(up_to.clone(), 0.0.into(), bools);
        Self {
            op,
            sizes,
            len,
            wide,
            device,
            after,
            up_to,
            before,
        }
    }

    pub(super) fn blocks(&self) -> Vec<Range<usize>> {
        blocks(self.op, &self.sizes)
    }

    /// The state before the first token.
    pub(super) fn zeros(&self) -> FloatTensor<B> {
        let Sizes {
            key_dim, value_dim, ..
        } = self.sizes;
        let shape = Shape::new([1, self.sizes.matrices(), key_dim, value_dim]);
        B::float_zeros(shape, &self.device, self.wide)
    }

    /// The tokens of a block, with zeros after the last.
    fn tokens(&self, x: &FloatTensor<B>, block: &Range<usize>) -> FloatTensor<B> {
        let (start, end) = (block.start * self.len, block.end * self.len);
        let inside = start..end.min(self.sizes.tokens);
        let missing = end - inside.end;
        let x = cast::<B>(slice::<B>(x.clone(), 1, inside), self.wide);
        if missing == 0 {
            return x;
        }
        let mut shape = x.shape();
        shape[1] = missing;
        let zeros = B::float_zeros(shape, &self.device, self.wide);
        B::float_cat(vec![x, zeros], 1)
    }

    /// `[batch, tokens, heads, ..]` to `[chunks, batch * heads, len, channels]`.
    fn fold(&self, x: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
        let shape = x.shape();
        let (batch, chunks) = (shape[0], shape[1] / self.len);
        let channels = shape.num_elements() / (batch * shape[1] * heads).max(1);
        let x = B::float_reshape(x, Shape::new([batch, chunks, self.len, heads, channels]));
        let x = B::float_permute(x, &[1, 0, 3, 2, 4]);
        B::float_reshape(x, Shape::new([chunks, batch * heads, self.len, channels]))
    }

    /// The inverse of [`fold`](Self::fold), `[batch, tokens, heads, channels]`.
    pub(super) fn unfold(&self, x: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
        let [chunks, matrices, len, channels] = x.shape().dims();
        let batch = matrices / heads;
        let x = B::float_reshape(x, Shape::new([chunks, batch, heads, len, channels]));
        let x = B::float_permute(x, &[1, 0, 3, 2, 4]);
        B::float_reshape(x, Shape::new([batch, chunks * len, heads, channels]))
    }

    pub(super) fn folded(
        &self,
        x: &FloatTensor<B>,
        block: &Range<usize>,
        heads: usize,
    ) -> FloatTensor<B> {
        self.fold(self.tokens(x, block), heads)
    }

    /// q or k of a block: as it came, and 1 / sqrt(sum of squares + epsilon).
    fn raw(&self, x: &FloatTensor<B>, block: &Range<usize>) -> (FloatTensor<B>, FloatTensor<B>) {
        let x = self.tokens(x, block);
        let squares = B::float_sum_dim(B::float_mul(x.clone(), x.clone()), 3);
        let root = B::float_sqrt(B::float_add_scalar(squares, NORM_EPSILON.into()));
        (x, B::float_recip(root))
    }

    /// The gradient of q or k as it came, from that of the normalised one of each head of v.
    pub(super) fn raw_gradient(
        &self,
        (x, norm): (FloatTensor<B>, FloatTensor<B>),
        gradient: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let gradient = self.unfold(gradient, self.sizes.heads);
        let [batch, tokens, _, channels] = gradient.shape().dims();
        let (heads, group) = (self.sizes.key_heads, self.sizes.group());
        let shape = Shape::new([batch, tokens, heads, group, channels]);
        let gradient = B::float_sum_dim(B::float_reshape(gradient, shape), 3);
        let gradient = B::float_reshape(gradient, x.shape());
        let normalised = B::float_mul(x, norm.clone());
        let along = B::float_sum_dim(B::float_mul(normalised.clone(), gradient.clone()), 3);
        let across = B::float_sub(gradient, B::float_mul(normalised, along));
        B::float_mul(across, norm)
    }

    pub(super) fn scale(&self) -> f64 {
        scale(self.sizes.key_dim)
    }

    pub(super) fn local(
        &self,
        block: &Range<usize>,
        [q, k, v, g, beta]: [&FloatTensor<B>; 5],
    ) -> Local<B> {
        let heads = self.sizes.heads;
        let raw = [q, k].map(|x| self.raw(x, block));
        let [q, k] = raw.clone().map(|(x, norm)| {
            let normalised = B::float_mul(x, norm);
            self.fold(repeat::<B>(normalised, self.sizes.group()), heads)
        });
        let q = B::float_mul_scalar(q, self.scale().into());
        let beta = self.folded(beta, block, heads);
        let g = self.folded(g, block, heads);
        // Column j has g of the tokens after j: their sums up to i are the logarithm of P(i, j).
        let columns = B::float_mul(g.clone(), self.after.clone());
        let mut logs = B::float_matmul(self.up_to.clone(), columns);
        let mut from_start = B::float_matmul(self.up_to.clone(), g);
        logs = B::float_mask_fill(logs, self.before.clone(), FORGOTTEN.into());
        if let Some([others, later]) = self.borders(block) {
            logs = B::float_mask_fill(logs, others, FORGOTTEN.into());
            from_start = B::float_mask_fill(from_start, later, FORGOTTEN.into());
        }
        let (decays, from_start) = (B::float_exp(logs), B::float_exp(from_start));
        let last = self.len - 1..self.len;
        let to_end = transpose::<B>(slice::<B>(decays.clone(), 2, last.clone()));
        let keys = transpose::<B>(k.clone());
        let products = B::float_matmul(k.clone(), keys.clone());
        let a = B::float_mul(products.clone(), decays.clone());
        let a = B::float_mul(B::float_mul(a, beta.clone()), self.after.clone());
        Local {
            scores: B::float_matmul(q.clone(), keys),
            inverse: self.inverse(a),
            through: slice::<B>(from_start.clone(), 2, last),
            v: self.folded(v, block, heads),
            q,
            k,
            beta,
            decays,
            from_start,
            to_end,
            products,
            raw,
        }
    }

    /// Where the tokens of row and column are of two sequences, `[chunks, 1, len, len]`, and where
    /// a token is of another sequence than the last one before the chunk, `[chunks, 1, len, 1]`;
    /// none if no sequence starts in the block.
    fn borders(&self, block: &Range<usize>) -> Option<[BoolTensor<B>; 2]> {
        let sequences = self.op.sequences.token_sequences()?;
        let last = sequences.len() - 1;
        let (start, end) = (block.start * self.len, block.end * self.len);
        let first_before = sequences[start.saturating_sub(1)];
        if first_before == sequences[last.min(end - 1)] {
            return None;
        }
        // Those of a chunk are fewer than this, so that f32 tells them apart.
        let number = |token: usize| f64::from(sequences[token.min(last)] % (1 << 16));
        let upload = |values: Vec<f64>, shape| upload::<B>(values, shape, self.wide, &self.device);
        let chunks = block.len();
        let tokens = upload((start..end).map(number).collect(), [chunks, 1, self.len, 1]);
        let before = (start..end).step_by(self.len);
        let before = before.map(|token| number(token.saturating_sub(1)));
        let before = upload(before.collect(), [chunks, 1, 1, 1]);
        let square = Shape::new([chunks, 1, self.len, self.len]);
        let differ = |x: &FloatTensor<B>, y: FloatTensor<B>, shape: Shape| {
            let bools = get_or_init_device_settings::<B>(&self.device).bool_dtype;
            let x = B::float_expand(x.clone(), shape.clone());
            B::float_not_equal(x, B::float_expand(y, shape), bools)
        };
        let column = tokens.shape();
        Some([
            differ(&tokens, transpose::<B>(tokens.clone()), square),
            differ(&tokens, before, column),
        ])
    }

    /// (1 + a)^-1 of a strictly lower triangular a: of the diagonal blocks of 1, 2, 4, .. rows.
    ///
    /// With the inverses T and U of two neighbouring blocks and what couples them, C, the inverse of
    /// both is that of each, and -U C T.
    fn inverse(&self, a: FloatTensor<B>) -> FloatTensor<B> {
        let len = self.len;
        let shape = [1, 1, len, len];
        let coupled = |size: usize| {
            let is_coupled = |row: usize, column: usize| {
                row / (2 * size) == column / (2 * size) && row / size > column / size
            };
            let row = |row| (0..len).map(move |column| is_coupled(row, column));
            let ones = (0..len).flat_map(row).map(|one| f64::from(u8::from(one)));
            let ones = upload::<B>(ones.collect(), shape, self.wide, &self.device);
            B::float_mul(a.clone(), ones)
        };
        let one = B::float_sub(self.up_to.clone(), self.after.clone());
        let mut inverse = B::float_sub(one.clone(), coupled(1));
        let mut size = 2;
        while size < len {
            let product = B::float_matmul(coupled(size), inverse.clone());
            let product = B::float_matmul(inverse.clone(), product);
            inverse = B::float_sub(inverse, product);
            size *= 2;
        }
        inverse
    }
}

/// Gives each of `group` heads of v its head of q or k.
fn repeat<B: Backend>(x: FloatTensor<B>, group: usize) -> FloatTensor<B> {
    if group == 1 {
        return x;
    }
    let [batch, tokens, heads, channels] = x.shape().dims();
    let x = B::float_reshape(x, Shape::new([batch, tokens, heads, 1, channels]));
    let x = B::float_repeat_dim(x, 3, group);
    B::float_reshape(x, Shape::new([batch, tokens, heads * group, channels]))
}

/// The factor of q.
pub(super) fn scale(key_dim: usize) -> f64 {
    1.0 / (key_dim as f64).sqrt()
}

/// One chunk of a block.
pub(super) fn at<B: Backend>(x: &FloatTensor<B>, chunk: usize) -> FloatTensor<B> {
    slice::<B>(x.clone(), 0, chunk..chunk + 1)
}

pub(super) fn transpose<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_swap_dims(x, 2, 3)
}

fn upload<B: Backend>(
    values: Vec<f64>,
    shape: [usize; 4],
    dtype: FloatDType,
    device: &B::Device,
) -> FloatTensor<B> {
    let data = TensorData::new(values, shape).convert_dtype(dtype.into());
    B::float_from_data(data, device)
}
