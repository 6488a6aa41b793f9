//! Flash attention and its gradient, in the layouts BSND and BNSD, and TND with lengths.
//!
//! Not modelled: realShift (pse), dropout, prefixes, the layouts BSH and SBH, the sparse modes of
//! sequences cut across devices; calls with them are refused. Scores and sums are in f64, and the
//! probabilities are not rounded to the tensors' type before they are multiplied with v.
//!
//! Stricter than the vendor, who leaves these to the caller: a mask that contradicts its mode and a
//! gradient from another forward's statistics are exceptions of the device, and a row that is
//! hidden as a whole is NaN unless `innerPrecise` is 2.

use super::call::{Call, Kernel, MAX_RANK, Operand, kernel};
use super::data::Data;
use super::dtype::{BOOL, DataType, FLT, Types};
use super::refuse;
use crate::codes::{ACLNN_NULLPTR, ACLNN_TILING_ERROR, Failure, Outcome};

/// Columns of the statistics, all alike.
const STATISTICS: usize = 8;
/// Rows and columns of the mask that stands for a triangle of any size.
const COMPRESSED: usize = 2048;
const MAX_HEADS: usize = 256;
const MAX_HEAD_DIM: usize = 768;
/// The largest number of lengths.
const MAX_SEQUENCES: usize = 2048;

/// The inputs that forward and gradient share.
pub(crate) struct Inputs {
    pub(crate) q: Operand,
    pub(crate) k: Operand,
    pub(crate) v: Operand,
    /// realShift, dropMask and paddingMask, which are not modelled.
    pub(crate) unmodelled: [Option<Operand>; 3],
    pub(crate) mask: Option<Operand>,
    pub(crate) prefix: Vec<i64>,
    /// Running totals of the lengths of q and of k; none without the layout TND.
    pub(crate) lengths: Option<[Vec<i64>; 2]>,
}

/// The attributes.
pub(crate) struct Options {
    pub(crate) scale: f64,
    pub(crate) keep: f64,
    /// preTokens, nextTokens.
    pub(crate) tokens: [i64; 2],
    pub(crate) heads: i64,
    pub(crate) layout: String,
    pub(crate) precise: i64,
    pub(crate) sparse: i64,
}

/// The outputs of the forward.
pub(crate) struct Forward {
    pub(crate) max: Operand,
    pub(crate) sum: Operand,
    pub(crate) out: Operand,
}

/// The tensors of the gradient besides the inputs.
pub(crate) struct Gradient {
    pub(crate) dy: Operand,
    pub(crate) max: Option<Operand>,
    pub(crate) sum: Option<Operand>,
    pub(crate) out: Operand,
    pub(crate) dq: Operand,
    pub(crate) dk: Operand,
    pub(crate) dv: Operand,
    pub(crate) dpse: Option<Operand>,
}

/// A refusal of the tiling, which the vendor runs after the checks of the first phase.
fn tiling<T>(message: impl std::fmt::Display) -> Outcome<T> {
    Err(Failure::new(
        ACLNN_TILING_ERROR,
        format!("tiling: {message}"),
    ))
}

fn in_tiling(outcome: Outcome) -> Outcome {
    outcome.or_else(|failure| tiling(failure.message))
}

/// The refusal of an output, which the vendor finds where the result is copied to it and reports
/// like a null.
fn copied(outcome: Outcome) -> Outcome {
    outcome.map_err(|failure| Failure::new(ACLNN_NULLPTR, failure.message))
}

/// Refuses fewer axes. More are found elsewhere.
fn expect_axes(tensor: &Operand, least: usize) -> Outcome {
    if tensor.rank() >= least {
        return Ok(());
    }
    let (name, rank) = (tensor.name, tensor.rank());
    refuse(format!(
        "{name} has rank {rank}, at least {least} is expected"
    ))
}

/// Steps of a tensor between samples, heads and tokens, in elements.
#[derive(Clone, Copy)]
struct Steps {
    sample: usize,
    head: usize,
    token: usize,
}

/// Tokens of q and of k that attend to each other.
#[derive(Clone, Copy)]
struct Sequence {
    sample: usize,
    first: [usize; 2],
    queries: usize,
    keys: usize,
}

/// A checked call.
struct Problem {
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    value_dim: usize,
    /// Tokens of q in a sample, or in all sequences.
    queries: usize,
    sequences: Vec<Sequence>,
    layout: Layout,
    options: Options,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    Bsnd,
    Bnsd,
    Tnd,
}

impl Layout {
    /// The layout of a call, as far as the vendor's first phases check it: of the shapes only the
    /// channels. The gradient's does not mind more axes than the layout has.
    fn of(inputs: &Inputs, options: &Options, is_gradient: bool) -> Outcome<Self> {
        let layout = match (options.layout.as_str(), inputs.lengths.is_some()) {
            ("BSND", false) => Self::Bsnd,
            ("BNSD", false) => Self::Bnsd,
            ("TND", true) => Self::Tnd,
            (layout @ ("BSH" | "SBH" | "TND"), false) => {
                return refuse(format!("inputLayout {layout} is not modelled"));
            }
            (other, false) => {
                return refuse(format!("inputLayout is {other:?}; expected BSND or BNSD"));
            }
            (other, true) => {
                return refuse(format!("inputLayout is {other:?}; TND is expected"));
            }
        };
        if options.heads <= 0 {
            return refuse(format!(
                "headNum is {}, more than 0 is expected",
                options.heads
            ));
        }
        let rank = layout.rank();
        let most = if is_gradient { MAX_RANK } else { rank };
        inputs.q.expect_rank(rank..=most)?;
        expect_axes(&inputs.v, rank)?;
        let of = |tensor: &Operand| tensor.dims.get(rank - 1).copied();
        let [dim, k_dim, v_dim] = [&inputs.q, &inputs.k, &inputs.v].map(of);
        if dim != k_dim || dim < v_dim || (dim > Some(MAX_HEAD_DIM) && !is_gradient) {
            let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| &tensor.dims);
            return refuse(format!(
                "q, k and v have shapes {q:?}, {k:?} and {v:?}; expected as many channels of k as \
                 of q, of v no more, and at most {MAX_HEAD_DIM}"
            ));
        }
        Ok(layout)
    }

    /// Axes of a tensor.
    fn rank(self) -> usize {
        if self == Self::Tnd { 3 } else { 4 }
    }

    /// The shape of a row's statistics, by the number of heads that a call states.
    fn statistics(self, q: &[usize], heads: i64) -> Vec<usize> {
        let [batch, queries, ..] = self.sizes(q);
        let heads = heads as usize;
        match self {
            Self::Tnd => vec![queries, heads, STATISTICS],
            _ => vec![batch, heads, queries, STATISTICS],
        }
    }

    /// Samples, tokens, heads and channels of a tensor.
    fn sizes(self, dims: &[usize]) -> [usize; 4] {
        match (self, dims) {
            (Self::Bsnd, &[b, s, n, d]) | (Self::Bnsd, &[b, n, s, d]) => [b, s, n, d],
            (_, dims) => [1, dims[0], dims[1], dims[2]],
        }
    }

    fn steps(self, dims: &[usize]) -> Steps {
        let [_, s, n, d] = self.sizes(dims);
        let (head, token) = match self {
            Self::Bnsd => (s * d, d),
            Self::Bsnd | Self::Tnd => (d, n * d),
        };
        Steps {
            sample: s * n * d,
            head,
            token,
        }
    }
}

impl Problem {
    /// Refuses calls that pass the first phase but not the tiling, or that are not modelled.
    fn new(inputs: Inputs, options: Options, layout: Layout) -> Outcome<Self> {
        let Inputs {
            q,
            k,
            v,
            unmodelled,
            mask,
            prefix,
            lengths,
        } = inputs;
        q.expect_type(FLT)?;
        for tensor in [&k, &v] {
            tensor.expect_dtype(q.dtype)?;
        }
        if let Some(tensor) = unmodelled.iter().flatten().next() {
            return refuse(format!("{} is not modelled; pass null", tensor.name));
        }
        if !prefix.is_empty() {
            return refuse("prefixOptional is not modelled; pass null");
        }
        let rank = layout.rank();
        for tensor in [&q, &k, &v] {
            in_tiling(tensor.expect_rank(rank..=rank))?;
        }
        let [batch, queries, heads, dim] = layout.sizes(&q.dims);
        let [k_batch, keys, kv_heads, _] = layout.sizes(&k.dims);
        let [v_batch, v_keys, v_heads, value_dim] = layout.sizes(&v.dims);
        if dim > MAX_HEAD_DIM {
            return tiling(format!(
                "the heads have {dim} channels, at most {MAX_HEAD_DIM} expected"
            ));
        }
        if options.heads as usize != heads || heads > MAX_HEADS {
            return tiling(format!(
                "headNum is {} and q has {heads} heads; the same and at most {MAX_HEADS} expected",
                options.heads
            ));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return tiling(format!(
                "{heads} heads of q do not divide by {kv_heads} of k"
            ));
        }
        if [k_batch, v_batch] != [batch; 2] || v_keys != keys || v_heads != kv_heads {
            return tiling(format!(
                "q of {:?}, k of {:?} and v of {:?} do not fit",
                q.dims, k.dims, v.dims
            ));
        }
        if !(options.keep > 0.0 && options.keep <= 1.0) {
            return tiling(format!("keepProb is {}, not in (0, 1]", options.keep));
        }
        if options.keep < 1.0 {
            return refuse("dropout is not modelled; keepProb 1 is expected");
        }
        let sequences = match lengths {
            None => (0..batch)
                .map(|sample| Sequence {
                    sample,
                    first: [0; 2],
                    queries,
                    keys,
                })
                .collect(),
            Some(lengths) => sequences(&lengths, [queries, keys])?,
        };
        let problem = Self {
            q,
            k,
            v,
            mask,
            heads,
            kv_heads,
            dim,
            value_dim,
            queries,
            sequences,
            layout,
            options,
        };
        problem.expect_mask(batch)?;
        Ok(problem)
    }

    /// True if the mask is the triangle that stands for one of any size.
    fn is_compressed(&self) -> bool {
        matches!(self.options.sparse, 2..=4)
    }

    fn expect_mask(&self, batch: usize) -> Outcome {
        let Some(mask) = &self.mask else {
            return Ok(());
        };
        let sparse = self.options.sparse;
        if !(0..=4).contains(&sparse) {
            return tiling(format!("sparseMode is {sparse}; 0 to 4 are modelled"));
        }
        if !BOOL.and(Types::of(&[DataType::Uint8])).has(mask.dtype) {
            return tiling(format!(
                "{} is {:?}, bool or u8 expected",
                mask.name, mask.dtype
            ));
        }
        let most = |of: fn(&Sequence) -> usize| self.sequences.iter().map(of).max().unwrap_or(0);
        let (queries, keys) = (most(|s| s.queries), most(|s| s.keys));
        if self.is_compressed() {
            if !mask.dims.ends_with(&[COMPRESSED; 2]) || !matches!(mask.rank(), 2 | 4) {
                return tiling(format!(
                    "{} has shape {:?}; sparseMode {sparse} takes [{COMPRESSED}, {COMPRESSED}]",
                    mask.name, mask.dims
                ));
            }
        } else {
            let fits = match &mask.dims[..] {
                [rows, columns] => [*rows, *columns] == [queries, keys],
                [samples, heads, rows, columns] if self.layout != Layout::Tnd => {
                    [*rows, *columns] == [queries, keys]
                        && ([*samples, *heads] == [1, 1]
                            || [*samples, *heads] == [batch, 1]
                            || [*samples, *heads] == [batch, self.heads])
                }
                _ => false,
            };
            if !fits {
                return tiling(format!(
                    "{} has shape {:?}, which does not fit {queries} queries and {keys} keys",
                    mask.name, mask.dims
                ));
            }
        }
        if sparse == 3 && self.layout == Layout::Tnd {
            let longer = self.sequences.iter().find(|s| s.queries > s.keys);
            if let Some(sequence) = longer {
                return tiling(format!(
                    "a sequence has {} queries and {} keys; sparseMode 3 takes no more queries \
                     than keys",
                    sequence.queries, sequence.keys
                ));
            }
        }
        if matches!(sparse, 0 | 4) {
            for sequence in &self.sequences {
                let [before, after] = self.band(sequence);
                let (far, near) = (sequence.keys as i64, sequence.queries as i64);
                let valid = match (before >= 0, after >= 0) {
                    (true, true) => true,
                    (false, false) => false,
                    (false, true) => after >= -before && -before < far,
                    (true, false) => -after <= before && -after < near,
                };
                if !valid {
                    return tiling(format!(
                        "preTokens {} and nextTokens {} leave nothing to compute",
                        self.options.tokens[0], self.options.tokens[1]
                    ));
                }
            }
        }
        Ok(())
    }

    /// preTokens and nextTokens, from the upper left corner of a sequence's scores.
    fn band(&self, sequence: &Sequence) -> [i64; 2] {
        let [before, after] = self.options.tokens;
        let shift = sequence.keys as i64 - sequence.queries as i64;
        if self.options.sparse == 4 {
            [before - shift, after + shift]
        } else {
            [before, after]
        }
    }

    /// True if the mode and its numbers hide a key from a query.
    fn hides(&self, sequence: &Sequence, query: usize, key: usize) -> bool {
        let (query, key) = (query as i64, key as i64);
        let shift = sequence.keys as i64 - sequence.queries as i64;
        match self.options.sparse {
            2 => key > query,
            3 => key > query + shift,
            4 => {
                let [before, after] = self.band(sequence);
                key < query - before || key > query + after
            }
            _ => false,
        }
    }

    /// The mask's flags, checked against its mode.
    fn flags(&self, data: &Data<'_, '_>) -> Outcome<Option<Vec<i64>>> {
        let Some(mask) = &self.mask else {
            return Ok(None);
        };
        let flags = data.read_as::<i64>(mask, &mask.dims)?;
        if self.is_compressed() {
            let wrong = flags.iter().enumerate().any(|(i, flag)| {
                let (row, column) = (i / COMPRESSED % COMPRESSED, i % COMPRESSED);
                (*flag != 0) != (column > row)
            });
            if wrong {
                return Err(data.exception(format!(
                    "{} is not the triangle that sparseMode {} takes",
                    mask.name, self.options.sparse
                )));
            }
        } else if self.options.sparse == 0 {
            let sequence = &self.sequences[0];
            let (rows, columns) = (sequence.queries, sequence.keys);
            let [before, after] = self.band(sequence);
            let outside = flags.iter().enumerate().any(|(i, flag)| {
                let query = (i / columns % rows) as i64;
                let key = (i % columns) as i64;
                *flag == 0 && (key < query - before || key > query + after)
            });
            if outside && self.layout != Layout::Tnd {
                return Err(data.exception(format!(
                    "{} shows keys that preTokens {} and nextTokens {} hide",
                    mask.name, self.options.tokens[0], self.options.tokens[1]
                )));
            }
        }
        Ok(Some(flags))
    }

    /// True if a key is hidden from a query of a head.
    fn is_hidden(
        &self,
        flags: Option<&[i64]>,
        sequence: &Sequence,
        head: usize,
        [query, key]: [usize; 2],
    ) -> bool {
        let (Some(mask), Some(flags)) = (&self.mask, flags) else {
            return false;
        };
        if self.is_compressed() {
            return self.hides(sequence, query, key);
        }
        let (rows, columns) = (mask.dims[mask.rank() - 2], mask.dims[mask.rank() - 1]);
        let matrix = match mask.dims[..] {
            [1, 1, ..] | [_, _] => 0,
            [_, 1, ..] => sequence.sample,
            _ => sequence.sample * self.heads + head,
        };
        flags[(matrix * rows + query) * columns + key] != 0
    }

    /// Scores of one query; hidden ones are none.
    fn scores(
        &self,
        [q, k]: [&[f32]; 2],
        flags: Option<&[i64]>,
        sequence: &Sequence,
        head: usize,
        query: usize,
    ) -> Vec<Option<f64>> {
        let row = self.row(&self.q, sequence, 0, head, query);
        let row = &q[row..row + self.dim];
        let group = self.heads / self.kv_heads;
        (0..sequence.keys)
            .map(|key| {
                if self.is_hidden(flags, sequence, head, [query, key]) {
                    return None;
                }
                let at = self.row(&self.k, sequence, 1, head / group, key);
                let terms = row.iter().zip(&k[at..at + self.dim]);
                let product: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                Some(self.options.scale * product)
            })
            .collect()
    }

    /// The rows of scores: sequence, head and query.
    fn rows(&self) -> impl Iterator<Item = (&Sequence, usize, usize)> {
        self.sequences.iter().flat_map(move |sequence| {
            let heads = 0..self.heads;
            let row = move |head| (0..sequence.queries).map(move |query| (sequence, head, query));
            heads.flat_map(row)
        })
    }

    /// The gradients of q, k and v, of the saved dy, out, maxima and sums; `out` as its tensor.
    fn gradients(
        &self,
        data: &Data<'_, '_>,
        [g, y, most, total]: &[Vec<f32>; 4],
        out: &Operand,
    ) -> Outcome<[Vec<f64>; 3]> {
        let read = |x: &Operand| data.read::<f32>(x);
        let (q, k, v) = (read(&self.q)?, read(&self.k)?, read(&self.v)?);
        let flags = self.flags(data)?;
        let mut to_q = vec![0.0_f64; q.len()];
        let mut to_k = vec![0.0_f64; k.len()];
        let mut to_v = vec![0.0_f64; v.len()];
        let group = self.heads / self.kv_heads;
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        for (sequence, head, query) in self.rows() {
            let scores = self.scores([&q, &k], flags.as_deref(), sequence, head, query);
            let at = self.statistics(sequence, head, query);
            let (most, total) = (f64::from(most[at]), f64::from(total[at]));
            if scores.iter().all(Option::is_none) {
                continue;
            }
            let at = self.row(out, sequence, 0, head, query);
            let g = wide(&g[at..at + self.value_dim]);
            let y = wide(&y[at..at + self.value_dim]);
            let delta: f64 = g.iter().zip(&y).map(|(g, y)| g * y).sum();
            let q_row = self.row(&self.q, sequence, 0, head, query);
            let mut whole = 0.0;
            for (key, score) in scores.iter().enumerate() {
                let Some(score) = score else { continue };
                let weight = (score - most).exp() / total;
                whole += weight;
                let v_row = self.row(&self.v, sequence, 1, head / group, key);
                let k_row = self.row(&self.k, sequence, 1, head / group, key);
                let mut dweight = 0.0;
                for (channel, g) in g.iter().enumerate() {
                    dweight += g * f64::from(v[v_row + channel]);
                    to_v[v_row + channel] += weight * g;
                }
                let dscore = weight * (dweight - delta) * self.options.scale;
                for channel in 0..self.dim {
                    to_q[q_row + channel] += dscore * f64::from(k[k_row + channel]);
                    to_k[k_row + channel] += dscore * f64::from(q[q_row + channel]);
                }
            }
            if (whole - 1.0).abs() > 0.02 {
                return Err(data.exception(format!(
                    "softmaxMax and softmaxSum of query {query} of head {head} give probabilities \
                     that add up to {whole}: they are of another forward"
                )));
            }
        }
        Ok([to_q, to_k, to_v])
    }

    /// Index of the first channel of a token's head; `side` 0 for q and what is shaped like it.
    fn row(
        &self,
        tensor: &Operand,
        sequence: &Sequence,
        side: usize,
        head: usize,
        token: usize,
    ) -> usize {
        let steps = self.layout.steps(&tensor.dims);
        let token = sequence.first[side] + token;
        sequence.sample * steps.sample + head * steps.head + token * steps.token
    }

    /// Index of a row's statistics.
    fn statistics(&self, sequence: &Sequence, head: usize, query: usize) -> usize {
        let row = match self.layout {
            Layout::Tnd => (sequence.first[0] + query) * self.heads + head,
            _ => (sequence.sample * self.heads + head) * self.queries + query,
        };
        row * STATISTICS
    }
}

/// The shape of the output: that of q, with the channels of v.
fn out_dims(q: &Operand, v: &Operand) -> Vec<usize> {
    let mut dims = q.dims.clone();
    if let Some(last) = dims.last_mut() {
        *last = v.dims.get(q.rank() - 1).copied().unwrap_or(0);
    }
    dims
}

/// The sequences of running totals.
fn sequences(lengths: &[Vec<i64>; 2], tokens: [usize; 2]) -> Outcome<Vec<Sequence>> {
    let [q, k] = lengths;
    if q.len() != k.len() || q.is_empty() || q.len() > MAX_SEQUENCES {
        return tiling(format!(
            "actualSeqQLen and actualSeqKvLen have {} and {} entries; the same number, 1 to \
             {MAX_SEQUENCES}, expected",
            q.len(),
            k.len()
        ));
    }
    let mut first = [0; 2];
    let mut found = Vec::new();
    for ends in q.iter().zip(k) {
        let ends = [*ends.0, *ends.1].map(|end| usize::try_from(end).unwrap_or(0));
        if ends[0] < first[0] || ends[1] < first[1] {
            return tiling(format!("the running totals {lengths:?} fall"));
        }
        found.push(Sequence {
            sample: 0,
            first,
            queries: ends[0] - first[0],
            keys: ends[1] - first[1],
        });
        first = ends;
    }
    // Fewer than the tensors have would leave tokens that nothing writes.
    if first != tokens {
        return tiling(format!(
            "the running totals end at {first:?}, q and k have {tokens:?} tokens"
        ));
    }
    Ok(found)
}

/// out = softmax(scale·q kᵀ) v over the keys that the mask shows, and each row's maximum and sum.
pub(crate) fn forward(
    call: &mut Call,
    inputs: Inputs,
    options: Options,
    outputs: Forward,
) -> Outcome<Kernel> {
    call.distinct();
    let Forward { max, sum, out } = outputs;
    if [&max, &sum, &out].iter().all(|tensor| tensor.is_empty()) {
        return kernel(|_| Ok(()));
    }
    if inputs.lengths.is_none() {
        for tensor in [&inputs.k, &inputs.v] {
            tensor.expect_dtype(inputs.q.dtype)?;
        }
    }
    let layout = Layout::of(&inputs, &options, false)?;
    let dims = layout.statistics(&inputs.q.dims, options.heads);
    for tensor in [&max, &sum] {
        copied(tensor.expect_dtype(DataType::Float))?;
        copied(tensor.expect_dims(&dims))?;
    }
    copied(out.expect_like(&inputs.q, &out_dims(&inputs.q, &inputs.v)))?;
    let problem = Problem::new(inputs, options, layout)?;
    kernel(move |data| {
        let problem = &problem;
        let [q, k, v] = [&problem.q, &problem.k, &problem.v].map(|x| data.read::<f32>(x));
        let (q, k, v) = (q?, k?, v?);
        let flags = problem.flags(data)?;
        let count = dims.iter().product();
        let (mut most, mut total) = (vec![0.0_f32; count], vec![0.0_f32; count]);
        let mut mixed = vec![0.0_f32; out.elements()];
        let group = problem.heads / problem.kv_heads;
        for (sequence, head, query) in problem.rows() {
            let scores = problem.scores([&q, &k], flags.as_deref(), sequence, head, query);
            let largest = scores.iter().flatten().copied().reduce(f64::max);
            let at = problem.row(&out, sequence, 0, head, query);
            let row = &mut mixed[at..at + problem.value_dim];
            let at = problem.statistics(sequence, head, query);
            let statistics = at..at + STATISTICS;
            let Some(largest) = largest else {
                let value = if problem.options.precise == 2 {
                    0.0
                } else {
                    f32::NAN
                };
                row.fill(value);
                most[statistics.clone()].fill(f32::NAN);
                total[statistics].fill(f32::NAN);
                continue;
            };
            let mut sums = vec![0.0_f64; problem.value_dim];
            let mut whole = 0.0;
            for (key, score) in scores.iter().enumerate() {
                let Some(score) = score else { continue };
                let weight = (score - largest).exp();
                whole += weight;
                let at = problem.row(&problem.v, sequence, 1, head / group, key);
                let values = &v[at..at + problem.value_dim];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += weight * f64::from(*value);
                }
            }
            for (to, sum) in row.iter_mut().zip(sums) {
                *to = (sum / whole) as f32;
            }
            most[statistics.clone()].fill(largest as f32);
            total[statistics].fill(whole as f32);
        }
        data.write(&max, &most)?;
        data.write(&sum, &total)?;
        data.write(&out, &mixed)
    })
}

/// The gradients of q, k and v: with p = exp(s - max) / sum and ds = p (dy·v - dy·out),
/// dq = scale·ds k, dk = scale·dsᵀ q, dv = pᵀ dy.
pub(crate) fn backward(
    call: &mut Call,
    inputs: Inputs,
    options: Options,
    tensors: Gradient,
) -> Outcome<Kernel> {
    call.distinct();
    let Gradient {
        dy,
        max,
        sum,
        out,
        dq,
        dk,
        dv,
        dpse,
    } = tensors;
    if [&dq, &dk, &dv].iter().all(|tensor| tensor.is_empty())
        && dpse.as_ref().is_none_or(|tensor| tensor.is_empty())
    {
        return kernel(|_| Ok(()));
    }
    let layout = Layout::of(&inputs, &options, true)?;
    let Inputs { q, k, v, .. } = &inputs;
    for tensor in [q, k, v, &dy, &out, &dq, &dk, &dv] {
        expect_axes(tensor, 3)?;
    }
    for (tensor, like) in [(&dq, q), (&dk, k), (&dv, v)] {
        copied(tensor.expect_like(q, &like.dims))?;
    }
    if let Some(dpse) = &dpse {
        let pse = inputs.unmodelled[0].as_ref();
        let dims = pse.map_or(vec![0], |pse| pse.dims.clone());
        // One of f32 is not written.
        if dpse.dtype != DataType::Float {
            copied(dpse.expect_like(q, &dims))?;
        }
        return refuse(format!("{} is not modelled; pass null", dpse.name));
    }
    let (dims, out_dims) = (layout.statistics(&q.dims, options.heads), out_dims(q, v));
    let problem = Problem::new(inputs, options, layout)?;
    let (Some(max), Some(sum)) = (max, sum) else {
        return tiling("softmaxMaxOptional or softmaxSumOptional is null");
    };
    for tensor in [&max, &sum] {
        in_tiling(tensor.expect_dtype(DataType::Float))?;
        in_tiling(tensor.expect_dims(&dims))?;
    }
    for tensor in [&dy, &out] {
        in_tiling(tensor.expect_like(&problem.q, &out_dims))?;
    }
    kernel(move |data| {
        let problem = &problem;
        let read = |x: &Operand| data.read::<f32>(x);
        let saved = [read(&dy)?, read(&out)?, read(&max)?, read(&sum)?];
        let [to_q, to_k, to_v] = problem.gradients(data, &saved, &out)?;
        for (tensor, values) in [(&dq, to_q), (&dk, to_k), (&dv, to_v)] {
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            data.write(tensor, &values)?;
        }
        Ok(())
    })
}
