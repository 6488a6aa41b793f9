//! Attention in tiles of queries and keys, on the CPU.
//!
//! # Problem
//! y = softmax(scale q k^T + bias) v without the score matrix, and its gradients.
//!
//! # Data
//! A tile is up to [`ROWS`] rows of queries, with all heads of a group stacked, and up to
//! [`COLUMNS`] keys of their common head. Tiles in which no query sees a key are skipped. 16-bit
//! elements are converted when a tile is loaded; others are read in place. Keys that no query sees,
//! and queries that see no key, are loaded as zeros: a weight of 0 would not hide a NaN.
//!
//! # Forward
//! For each tile of queries, over its tiles of keys: s = q k^T; m' = max(m, s);
//! p = e^(s - m'); l = l e^(m - m') + sum p; y = y e^(m - m') + p v. The results are y / l and the
//! kept m + ln l.
//!
//! # Backward
//! p = e^(s - kept); dv += p^T dy; ds = p (dy v^T - <dy, y>); dk += ds^T q; dq += ds k.
//!
//! Where the kept number is so large that ln l is lost in it, m and l are recomputed and kept
//! separate: p becomes e^(s - m), and dy becomes dy / l.
//!
//! A thread takes a head with all its tiles, because dk and dv sum over queries and dq sums over
//! keys. If that leaves threads idle, tiles of queries are divided among the threads for dq, and
//! then tiles of keys for dk and dv, which computes the scores twice. A tile of queries has a
//! separate part of the bias's gradient. Both ways sum in the same order, so the bits do not depend
//! on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

use super::matrix::{Matrix, Write, product};
use super::number::{Number, Real};
use crate::attention::blocks::{FLOOR, LEAST_SUM};
use crate::attention::mask::{AttentionMask, sample_flags};
use crate::attention::op::Sizes;

/// Rows of a tile, unless a group has more heads.
const ROWS: usize = 128;
/// Keys of a tile.
const COLUMNS: usize = 256;
/// Rows and keys, with zeros below, with which gemm adds in the same order as with more.
const LEAST_ROWS: usize = 16;
const LEAST_KEYS: usize = 17;

/// `[batch, heads, tokens, channels]` in memory, by its strides; channels are contiguous.
#[derive(Clone, Copy)]
pub(super) struct HeadsView<'a, E> {
    pub(super) data: &'a [E],
    /// Of batch, heads and tokens, in elements.
    pub(super) strides: [usize; 3],
    pub(super) channels: usize,
}

impl<'a, E> HeadsView<'a, E> {
    fn row(&self, sample: usize, head: usize, token: usize) -> &'a [E] {
        let [batch, heads, tokens] = self.strides;
        let start = sample * batch + head * heads + token * tokens;
        &self.data[start..start + self.channels]
    }
}

impl<'a, E: Number> HeadsView<'a, E> {
    /// Some tokens of a head, with zeros for those that are not `seen` and for up to `least`;
    /// `converted` takes them if they are not computed in as they are.
    fn tokens<'b>(
        &self,
        sample: usize,
        head: usize,
        tokens: Range<usize>,
        seen: Option<&[bool]>,
        least: usize,
        converted: &'b mut Vec<E::Wide>,
    ) -> Matrix<'b, E::Wide>
    where
        'a: 'b,
    {
        let (len, channels) = (tokens.len(), self.channels);
        let hides = seen.is_some_and(|seen| seen[tokens.clone()].contains(&false));
        if let Some(data) = E::as_wide(self.data).filter(|_| !hides && len >= least) {
            let [batch, heads, stride] = self.strides;
            let start = sample * batch + head * heads + tokens.start * stride;
            return Matrix::new(&data[start..], len, channels, stride);
        }
        converted.clear();
        for token in tokens {
            if seen.is_none_or(|seen| seen[token]) {
                let row = self.row(sample, head, token);
                converted.extend(row.iter().map(|x| x.widen()));
            } else {
                converted.resize(converted.len() + channels, E::Wide::ZERO);
            }
        }
        let rows = len.max(least);
        converted.resize(rows * channels, E::Wide::ZERO);
        Matrix::new(converted, rows, channels, channels)
    }
}

/// A bias by its strides, 0 along what shares it.
#[derive(Clone, Copy)]
pub(super) struct BiasView<'a, R> {
    pub(super) data: &'a [R],
    /// Of batch, heads, queries and keys, in elements.
    pub(super) strides: [usize; 4],
}

impl<R: Real> BiasView<'_, R> {
    /// Adds the bias of a row to its scores of some keys.
    fn add_to(&self, scores: &mut [R], sample: usize, head: usize, query: usize, key: usize) {
        let [batch, heads, queries, keys] = self.strides;
        let start = sample * batch + head * heads + query * queries + key * keys;
        if keys == 1 {
            for (score, bias) in scores.iter_mut().zip(&self.data[start..]) {
                *score += *bias;
            }
        } else {
            for (index, score) in scores.iter_mut().enumerate() {
                *score += self.data[start + index * keys];
            }
        }
    }
}

/// An attention of tensors in host memory.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a, E: Number> {
    pub(super) sizes: Sizes,
    pub(super) mask: &'a AttentionMask,
    pub(super) scale: E::Wide,
    pub(super) q: HeadsView<'a, E>,
    pub(super) k: HeadsView<'a, E>,
    pub(super) v: HeadsView<'a, E>,
    pub(super) bias: Option<BiasView<'a, E::Wide>>,
}

/// Memory of a thread, for one tile at a time.
struct Scratch<R> {
    q: Vec<R>,
    dy: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    scores: Vec<R>,
    dscores: Vec<R>,
}

impl<R> Scratch<R> {
    fn new() -> Self {
        Self {
            q: Vec::new(),
            dy: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            scores: Vec::new(),
            dscores: Vec::new(),
        }
    }
}

/// The largest score of a row so far, and the sum of the exponentials of the scores less it.
#[derive(Clone, Copy)]
struct Softmax<R> {
    largest: R,
    sum: R,
}

impl<R: Real> Softmax<R> {
    /// Of no score.
    fn new() -> Self {
        Self {
            largest: R::of(FLOOR),
            sum: R::ZERO,
        }
    }

    /// The sum, or what stands for that of a row that sees no key.
    fn sum(&self) -> R {
        let least = R::of(LEAST_SUM);
        if self.sum < least { least } else { self.sum }
    }
}

/// Consecutive ranges of at most `len`.
fn tiles(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = range.end;
    let starts = range.step_by(len);
    starts.map(move |start| start..end.min(start + len))
}

impl<E: Number> Problem<'_, E> {
    fn group(&self) -> usize {
        self.sizes.group()
    }

    fn tile_queries(&self) -> usize {
        (ROWS / self.group()).max(1)
    }

    /// The rows of a tile of queries: for each head of the group, each query.
    fn rows(&self, queries: &Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<E> {
        let queries = queries.clone();
        (0..self.group()).flat_map(move |head| queries.clone().map(move |query| (head, query)))
    }

    /// Copies the rows of a tile from a tensor with the dimensions of q.
    fn load(
        &self,
        x: &HeadsView<E>,
        sample: usize,
        kv_head: usize,
        queries: &Range<usize>,
        rows: &mut Vec<E::Wide>,
    ) {
        rows.clear();
        let seeing = self.seeing(sample);
        for (head, query) in self.rows(queries) {
            if seeing.is_none_or(|seeing| seeing[query]) {
                let row = x.row(sample, kv_head * self.group() + head, query);
                rows.extend(row.iter().map(|x| x.widen()));
            } else {
                rows.resize(rows.len() + x.channels, E::Wide::ZERO);
            }
        }
    }

    /// Some keys or values of a head, and zeros if they are fewer than `least`.
    fn tokens<'b>(
        &'b self,
        x: &HeadsView<'b, E>,
        sample: usize,
        kv_head: usize,
        keys: &Range<usize>,
        least: usize,
        converted: &'b mut Vec<E::Wide>,
    ) -> Matrix<'b, E::Wide> {
        let seen = sample_flags(self.mask.seen(), sample, self.sizes.keys);
        x.tokens(sample, kv_head, keys.clone(), seen, least, converted)
    }

    /// The queries of a sample that see some key, unless all do.
    fn seeing(&self, sample: usize) -> Option<&[bool]> {
        sample_flags(self.mask.seeing(), sample, self.sizes.queries)
    }

    /// The tiles of keys that some of the queries see: of each sequence apart, and from its first
    /// key on, so that the sums of a row do not depend on where its sequence lies.
    fn key_tiles(
        &self,
        sample: usize,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        let hulls = self.mask.hulls(sample, queries.clone()).into_iter();
        hulls.flat_map(|(origin, hull)| {
            let hidden = (hull.start - origin) / COLUMNS * COLUMNS;
            tiles(origin + hidden..hull.end, COLUMNS)
        })
    }

    /// The scores of a tile, in rows of [`COLUMNS`], from the rows of q; before bias and mask.
    fn scores(&self, q: &[E::Wide], k: Matrix<E::Wide>, scores: &mut Vec<E::Wide>) {
        let channels = self.sizes.head_dim;
        let rows = q.len() / channels.max(1);
        scores.resize(rows * COLUMNS, E::Wide::ZERO);
        let q = Matrix::new(q, rows, channels, channels);
        product(
            scores,
            COLUMNS,
            Write::Replace,
            self.scale,
            q,
            k.transposed(),
        );
    }

    /// The columns of a tile of keys that a query sees, padding apart.
    fn seen(&self, query: usize, keys: &Range<usize>) -> Range<usize> {
        let span = self.mask.span(query);
        let (start, end) = (span.start.max(keys.start), span.end.min(keys.end));
        if start < end {
            start - keys.start..end - keys.start
        } else {
            0..0
        }
    }

    /// Adds the bias to the scores of a row that are seen, and hides padding.
    fn add_bias(
        &self,
        scores: &mut [E::Wide],
        sample: usize,
        head: usize,
        query: usize,
        first_key: usize,
    ) {
        if let Some(bias) = &self.bias {
            bias.add_to(scores, sample, head, query, first_key);
        }
        if let Some(attended) = self.mask.attended(sample) {
            for (score, attended) in scores.iter_mut().zip(&attended[first_key..]) {
                if !attended {
                    *score = E::Wide::HIDDEN;
                }
            }
        }
    }

    /// Replaces a row of a tile's scores by e^(score - largest), where it is the largest so far, and
    /// returns what multiplies the sums over earlier tiles.
    fn weigh(
        &self,
        scores: &mut [E::Wide],
        softmax: &mut Softmax<E::Wide>,
        [sample, head, query]: [usize; 3],
        keys: &Range<usize>,
    ) -> E::Wide {
        let seen = self.seen(query, keys);
        scores[..seen.start].fill(E::Wide::ZERO);
        scores[seen.end..].fill(E::Wide::ZERO);
        let first_key = keys.start + seen.start;
        let scores = &mut scores[seen];
        self.add_bias(scores, sample, head, query, first_key);
        let here = E::Wide::largest(scores);
        let mut factor = E::Wide::ONE;
        if here > softmax.largest {
            factor = (softmax.largest - here).exp();
            softmax.sum *= factor;
            softmax.largest = here;
        }
        softmax.sum += E::Wide::exponentials(scores, softmax.largest);
        factor
    }

    /// Writes the output, `[batch, queries, heads, value_dim]` in memory, and the largest score and
    /// the sum of each row, `[batch, queries, heads, 2]`.
    pub(super) fn forward(&self, out: &mut [E], sums: &mut [E::Wide]) {
        let Sizes {
            heads,
            queries,
            value_dim,
            ..
        } = self.sizes;
        let len = self.tile_queries();
        let outs = out.par_chunks_mut((queries * heads * value_dim).max(1));
        let sums = sums.par_chunks_mut((queries * heads * 2).max(1));
        // Without channels of v there are sums, and no output to divide among threads.
        if value_dim == 0 {
            return;
        }
        outs.zip(sums)
            .enumerate()
            .for_each(|(sample, (out, sums))| {
                let outs = out.par_chunks_mut(len * heads * value_dim);
                let sums = sums.par_chunks_mut(len * heads * 2);
                outs.zip(sums).enumerate().for_each_init(
                    Scratch::new,
                    |scratch, (tile, (out, sums))| {
                        let start = tile * len;
                        let queries = start..start + sums.len() / (heads * 2);
                        for kv_head in 0..self.sizes.kv_heads {
                            self.forward_tile(sample, kv_head, &queries, out, sums, scratch);
                        }
                    },
                );
            });
    }

    fn forward_tile(
        &self,
        sample: usize,
        kv_head: usize,
        queries: &Range<usize>,
        out: &mut [E],
        sums: &mut [E::Wide],
        scratch: &mut Scratch<E::Wide>,
    ) {
        let (heads, channels) = (self.sizes.heads, self.sizes.value_dim);
        let rows = (self.group() * queries.len()).max(LEAST_ROWS);
        let Scratch {
            q,
            k,
            v,
            scores,
            dy: mixed,
            ..
        } = scratch;
        self.load(&self.q, sample, kv_head, queries, q);
        q.resize(rows * self.sizes.head_dim, E::Wide::ZERO);
        mixed.clear();
        mixed.resize(rows * channels, E::Wide::ZERO);
        let mut softmaxes = vec![Softmax::new(); rows];
        for keys in self.key_tiles(sample, queries) {
            let k = self.tokens(&self.k, sample, kv_head, &keys, LEAST_KEYS, k);
            self.scores(q, k, scores);
            for (row, (head, query)) in self.rows(queries).enumerate() {
                let scores = &mut scores[row * COLUMNS..][..keys.len()];
                let index = [sample, kv_head * self.group() + head, query];
                let factor = self.weigh(scores, &mut softmaxes[row], index, &keys);
                if factor != E::Wide::ONE {
                    for x in &mut mixed[row * channels..][..channels] {
                        *x *= factor;
                    }
                }
            }
            // A score of zeros is 0, as a weight.
            let weights = Matrix::new(scores, rows, keys.len().max(LEAST_KEYS), COLUMNS);
            let v = self.tokens(&self.v, sample, kv_head, &keys, LEAST_KEYS, v);
            product(mixed, channels, Write::Add, E::Wide::ONE, weights, v);
        }
        for (row, (head, query)) in self.rows(queries).enumerate() {
            let sum = softmaxes[row].sum();
            let index = (query - queries.start) * heads + kv_head * self.group() + head;
            sums[2 * index..][..2].copy_from_slice(&[softmaxes[row].largest, sum]);
            let factor = E::Wide::ONE / sum;
            let mixed = &mixed[row * channels..][..channels];
            for (out, x) in out[index * channels..].iter_mut().zip(mixed) {
                *out = E::round(*x * factor);
            }
        }
    }
}

/// The gradients that [`Backward::run`] writes, each contiguous with the dimensions of its tensor.
pub(super) struct Gradients<'a, E: Number> {
    pub(super) dq: &'a mut [E],
    pub(super) dk: &'a mut [E],
    pub(super) dv: &'a mut [E],
    /// With the strides of a contiguous bias.
    pub(super) dbias: Option<(&'a mut [E::Wide], [usize; 4])>,
}

/// The backward of a [`Problem`].
pub(super) struct Backward<'a, E: Number> {
    pub(super) problem: Problem<'a, E>,
    pub(super) dy: HeadsView<'a, E>,
    /// `[batch, heads, queries]`, contiguous.
    rows: Vec<Row<E::Wide>>,
}

/// A row in the backward: p = e^(score - largest) * factor.
#[derive(Clone, Copy)]
struct Row<R> {
    largest: R,
    factor: R,
    /// <dy, y> * factor.
    delta: R,
}

/// The sums that a tile adds to.
struct Sums<'a, R> {
    /// The rows of the tile's queries.
    dq: Option<&'a mut [R]>,
    /// The tile's keys.
    dk_dv: Option<(&'a mut [R], &'a mut [R])>,
    /// The gradient of the bias of the tile's queries, in heads of the group, queries and keys by
    /// these strides.
    dbias: Option<(&'a mut [R], [usize; 3])>,
}

/// The gradient of a group's bias: a part for each tile of queries.
struct BiasParts<R> {
    data: Vec<R>,
    /// Of a part.
    len: usize,
    /// Of heads, queries and keys in a part; 0 along what shares the bias.
    strides: [usize; 3],
    /// Heads, queries of a part and keys, as the bias has them: 1 along what shares it.
    sizes: [usize; 3],
    /// Of all parts.
    queries: usize,
}

impl<R: Real> BiasParts<R> {
    /// Zeros, for a bias with these strides of its batch, heads, queries and keys.
    fn new<E: Number>(problem: &Problem<E>, [_, heads, queries, keys]: [usize; 4]) -> Self {
        let all = problem.sizes.queries;
        let tile = problem.tile_queries().min(all);
        let size = |stride: usize, size: usize| if stride == 0 { 1 } else { size };
        let sizes @ [_, tile_queries, tile_keys] = [
            size(heads, problem.group()),
            size(queries, tile),
            size(keys, problem.sizes.keys),
        ];
        let len: usize = sizes.iter().product();
        let stride = |bias_size: usize, stride: usize| if bias_size == 0 { 0 } else { stride };
        Self {
            data: vec![R::ZERO; all.div_ceil(tile.max(1)) * len],
            len: len.max(1),
            strides: [
                stride(heads, tile_queries * tile_keys),
                stride(queries, tile_keys),
                stride(keys, 1),
            ],
            sizes,
            queries: size(queries, all),
        }
    }

    /// Adds all parts to the gradient of a bias, from its first head of the group.
    fn add_to(&self, dbias: &mut [R], [_, head_stride, query_stride, _]: [usize; 4]) {
        let [heads, queries, keys] = self.sizes;
        for (tile, part) in self.data.chunks_exact(self.len).enumerate() {
            let first = if query_stride == 0 { 0 } else { tile * queries };
            for (row, part) in part.chunks_exact(keys).enumerate() {
                let (head, query) = (row / queries, first + row % queries);
                if query < self.queries && head < heads {
                    let sums = &mut dbias[head * head_stride + query * query_stride..][..keys];
                    for (sum, x) in sums.iter_mut().zip(part) {
                        *sum += *x;
                    }
                }
            }
        }
    }
}

impl<'a, E: Number> Backward<'a, E> {
    pub(super) fn new(
        problem: Problem<'a, E>,
        out: &HeadsView<E>,
        dy: HeadsView<'a, E>,
        softmax: &HeadsView<E::Wide>,
    ) -> Self {
        let Sizes {
            batch,
            heads,
            queries,
            ..
        } = problem.sizes;
        let row = |index: usize| {
            let (sample, head, query) = (
                index / (heads * queries),
                index / queries % heads,
                index % queries,
            );
            let pairs = out.row(sample, head, query).iter();
            let pairs = pairs.zip(dy.row(sample, head, query));
            let product = || pairs.fold(E::Wide::ZERO, |sum, (y, dy)| sum + y.widen() * dy.widen());
            let sees = problem.seeing(sample).is_none_or(|seeing| seeing[query]);
            let softmax = softmax.row(sample, head, query);
            let factor = E::Wide::ONE / softmax[1];
            Row {
                largest: softmax[0],
                factor,
                delta: if sees {
                    product() * factor
                } else {
                    E::Wide::ZERO
                },
            }
        };
        let rows = (0..batch * heads * queries).into_par_iter().map(row);
        Self {
            problem,
            dy,
            rows: rows.collect(),
        }
    }

    /// The rows of a tile, in the order of [`Problem::rows`].
    fn rows(
        &self,
        sample: usize,
        kv_head: usize,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = Row<E::Wide>> {
        let Sizes {
            kv_heads,
            queries: all,
            ..
        } = self.problem.sizes;
        let first = (sample * kv_heads + kv_head) * self.problem.group() * all;
        let rows = self.problem.rows(queries);
        rows.map(move |(head, query)| self.rows[first + head * all + query])
    }

    /// Computes all gradients.
    pub(super) fn run(&self, gradients: Gradients<E>) {
        let Sizes {
            batch,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim,
            ..
        } = self.problem.sizes;
        let group = self.problem.group();
        let Gradients { dq, dk, dv, dbias } = gradients;
        // A group of query heads and its key head; without channels there is nothing to compute.
        let chunk = |len: usize| len.max(1);
        let dqs = dq.par_chunks_mut(chunk(group * queries * head_dim));
        let dks = dk.par_chunks_mut(chunk(keys * head_dim));
        let dvs = dv.par_chunks_mut(chunk(keys * value_dim));
        if head_dim * value_dim == 0 {
            return;
        }
        let heads = dqs.zip(dks).zip(dvs).enumerate();
        let (count, threads) = (batch * kv_heads, rayon::current_num_threads());
        let head = |index: usize| (index / kv_heads, index % kv_heads);
        let each_has_a_thread = count.is_multiple_of(threads) || count >= 4 * threads;
        let Some((dbias, strides)) = dbias else {
            if each_has_a_thread {
                heads.for_each(|(index, ((dq, dk), dv))| {
                    let (sample, kv_head) = head(index);
                    self.head(sample, kv_head, [dq, dk, dv], None);
                });
            } else {
                let heads: Vec<_> = heads.collect();
                for (index, ((dq, dk), dv)) in heads {
                    let (sample, kv_head) = head(index);
                    self.head_on_all_threads(sample, kv_head, [dq, dk, dv], None);
                }
            }
            return;
        };
        // Heads may share a bias: their parts of its gradient are added in order, and at most one
        // for each thread exists at a time.
        let mut heads: Vec<_> = heads.collect();
        let wave = if each_has_a_thread { threads } else { 1 };
        for wave in heads.chunks_mut(wave) {
            let parts = wave.par_iter_mut().map(|(index, ((dq, dk), dv))| {
                let (sample, kv_head) = head(*index);
                let mut parts = BiasParts::new(&self.problem, strides);
                let gradients = [&mut **dq, &mut **dk, &mut **dv];
                if each_has_a_thread {
                    self.head(sample, kv_head, gradients, Some(&mut parts));
                } else {
                    self.head_on_all_threads(sample, kv_head, gradients, Some(&mut parts));
                }
                parts
            });
            let parts: Vec<_> = parts.collect();
            for ((index, _), parts) in wave.iter().zip(parts) {
                let (sample, kv_head) = head(*index);
                let start = sample * strides[0] + kv_head * group * strides[1];
                parts.add_to(&mut dbias[start..], strides);
            }
        }
    }

    /// The gradients dq of a group of query heads, dk and dv of their key head.
    fn head(
        &self,
        sample: usize,
        kv_head: usize,
        [dq, dk, dv]: [&mut [E]; 3],
        mut dbias: Option<&mut BiasParts<E::Wide>>,
    ) {
        let problem = &self.problem;
        let Sizes {
            queries,
            head_dim,
            value_dim,
            ..
        } = problem.sizes;
        let row = problem.group() * head_dim;
        let mut scratch = Scratch::new();
        // Tile by tile, each with its rows in the order of `Problem::rows`.
        let mut dq_sum = vec![E::Wide::ZERO; queries * row];
        let (mut dk_sum, mut dv_sum) = (Vec::new(), Vec::new());
        for keys in tiles(0..problem.sizes.keys, COLUMNS) {
            clear(&mut dk_sum, keys.len() * head_dim);
            clear(&mut dv_sum, keys.len() * value_dim);
            for (index, queries) in tiles(0..queries, problem.tile_queries()).enumerate() {
                let sums = Sums {
                    dq: Some(&mut dq_sum[queries.start * row..queries.end * row]),
                    dk_dv: Some((&mut dk_sum, &mut dv_sum)),
                    dbias: dbias.as_mut().map(|dbias| {
                        let part = &mut dbias.data[index * dbias.len..][..dbias.len];
                        (part, dbias.strides)
                    }),
                };
                self.tile(sample, kv_head, &queries, &keys, sums, &mut scratch);
            }
            round(&dk_sum, &mut dk[keys.start * head_dim..]);
            round(&dv_sum, &mut dv[keys.start * value_dim..]);
        }
        for queries in tiles(0..queries, problem.tile_queries()) {
            let rows = &dq_sum[queries.start * row..queries.end * row];
            self.write_dq(&queries, rows, dq);
        }
    }

    /// As [`head`](Self::head), on all threads: the scores are computed once for dq and once for dk
    /// and dv.
    fn head_on_all_threads(
        &self,
        sample: usize,
        kv_head: usize,
        [dq, dk, dv]: [&mut [E]; 3],
        dbias: Option<&mut BiasParts<E::Wide>>,
    ) {
        let problem = &self.problem;
        let Sizes {
            queries,
            keys,
            head_dim,
            value_dim,
            ..
        } = problem.sizes;
        let query_tiles = tiles(0..queries, problem.tile_queries());
        let key_tiles = tiles(0..keys, COLUMNS);
        let mut parts: Vec<_> = query_tiles.clone().map(|queries| (queries, None)).collect();
        if let Some(dbias) = dbias {
            let strides = dbias.strides;
            let dbias_tiles = dbias.data.chunks_mut(dbias.len);
            for ((_, part), dbias_tile) in parts.iter_mut().zip(dbias_tiles) {
                *part = Some((dbias_tile, strides));
            }
        }
        let rows: Vec<_> = parts
            .into_par_iter()
            .map_init(Scratch::new, |scratch, (queries, mut dbias)| {
                let len = queries.len() * problem.group() * head_dim;
                let mut rows = vec![E::Wide::ZERO; len];
                for keys in key_tiles.clone() {
                    let sums = Sums {
                        dq: Some(&mut rows),
                        dk_dv: None,
                        dbias: dbias
                            .as_mut()
                            .map(|(part, strides)| (&mut **part, *strides)),
                    };
                    self.tile(sample, kv_head, &queries, &keys, sums, scratch);
                }
                (queries, rows)
            })
            .collect();
        for (queries, rows) in rows {
            self.write_dq(&queries, &rows, dq);
        }
        let dks = dk.par_chunks_mut(COLUMNS * head_dim);
        let dvs = dv.par_chunks_mut(COLUMNS * value_dim);
        dks.zip(dvs)
            .enumerate()
            .for_each_init(Scratch::new, |scratch, (tile, (dk, dv))| {
                let start = tile * COLUMNS;
                let keys = start..start + dk.len() / head_dim;
                let (mut dk_sum, mut dv_sum) = (Vec::new(), Vec::new());
                clear(&mut dk_sum, dk.len());
                clear(&mut dv_sum, dv.len());
                for queries in query_tiles.clone() {
                    let sums = Sums {
                        dq: None,
                        dk_dv: Some((&mut dk_sum, &mut dv_sum)),
                        dbias: None,
                    };
                    self.tile(sample, kv_head, &queries, &keys, sums, scratch);
                }
                round(&dk_sum, dk);
                round(&dv_sum, dv);
            });
    }

    /// Writes the rows of a tile to dq, `[group, queries, head_dim]`.
    fn write_dq(&self, queries: &Range<usize>, rows: &[E::Wide], dq: &mut [E]) {
        let Sizes {
            queries: all,
            head_dim,
            ..
        } = self.problem.sizes;
        let rows = rows.chunks_exact(head_dim);
        for ((head, query), row) in self.problem.rows(queries).zip(rows) {
            round(row, &mut dq[(head * all + query) * head_dim..]);
        }
    }

    /// Adds what a tile of queries and keys contributes.
    fn tile(
        &self,
        sample: usize,
        kv_head: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        sums: Sums<E::Wide>,
        scratch: &mut Scratch<E::Wide>,
    ) {
        let problem = &self.problem;
        if !problem.mask.meets(queries.clone(), keys) {
            return;
        }
        let (head_dim, value_dim) = (problem.sizes.head_dim, problem.sizes.value_dim);
        let Scratch {
            q,
            dy,
            k,
            v,
            scores,
            dscores,
        } = scratch;
        problem.load(&problem.q, sample, kv_head, queries, q);
        problem.load(&self.dy, sample, kv_head, queries, dy);
        let known = self.rows(sample, kv_head, queries);
        for (row, dy) in known.zip(dy.chunks_exact_mut(value_dim)) {
            for x in dy {
                *x *= row.factor;
            }
        }
        let k = problem.tokens(&problem.k, sample, kv_head, keys, 0, k);
        let v = problem.tokens(&problem.v, sample, kv_head, keys, 0, v);
        let (rows, columns) = (problem.group() * queries.len(), keys.len());
        problem.scores(q, k, scores);
        dscores.resize(rows * COLUMNS, E::Wide::ZERO);
        let dy = Matrix::new(dy, rows, value_dim, value_dim);
        product(
            dscores,
            COLUMNS,
            Write::Replace,
            E::Wide::ONE,
            dy,
            v.transposed(),
        );

        let Sums {
            dq,
            dk_dv,
            mut dbias,
        } = sums;
        let known = self.rows(sample, kv_head, queries);
        for (row, ((head, query), known)) in problem.rows(queries).zip(known).enumerate() {
            let scores = &mut scores[row * COLUMNS..][..columns];
            let dscores = &mut dscores[row * COLUMNS..][..columns];
            let seen = problem.seen(query, keys);
            for row in [&mut *scores, &mut *dscores] {
                row[..seen.start].fill(E::Wide::ZERO);
                row[seen.end..].fill(E::Wide::ZERO);
            }
            let first_key = keys.start + seen.start;
            let (scores, dscores) = (&mut scores[seen.clone()], &mut dscores[seen]);
            let in_all = kv_head * problem.group() + head;
            problem.add_bias(scores, sample, in_all, query, first_key);
            E::Wide::exponentials(scores, known.largest);
            for (dscore, weight) in dscores.iter_mut().zip(&*scores) {
                *dscore = *weight * (*dscore - known.delta);
            }
            if let Some((dbias, [head_stride, query_stride, key_stride])) = &mut dbias {
                let in_tile = query - queries.start;
                let start = head * *head_stride + in_tile * *query_stride + first_key * *key_stride;
                for (index, dscore) in dscores.iter().enumerate() {
                    dbias[start + index * *key_stride] += *dscore;
                }
            }
        }
        let weights = Matrix::new(scores, rows, columns, COLUMNS);
        let dscores = Matrix::new(dscores, rows, columns, COLUMNS);
        let q = Matrix::new(q, rows, head_dim, head_dim);
        let (scale, one) = (problem.scale, E::Wide::ONE);
        if let Some((dk, dv)) = dk_dv {
            product(dv, value_dim, Write::Add, one, weights.transposed(), dy);
            product(dk, head_dim, Write::Add, scale, dscores.transposed(), q);
        }
        if let Some(dq) = dq {
            product(dq, head_dim, Write::Add, scale, dscores, k);
        }
    }
}

fn clear<R: Real>(sum: &mut Vec<R>, len: usize) {
    sum.clear();
    sum.resize(len, R::ZERO);
}

fn round<E: Number>(from: &[E::Wide], to: &mut [E]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::round(*from);
    }
}
