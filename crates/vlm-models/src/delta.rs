//! Layers of linear attention: a short convolution, the gated delta rule, a gated norm.

use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::activation::{sigmoid, softplus};
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_attention::{GatedDelta, Sequences, gated_delta_step, short_convolution};

use crate::config::DeltaConfig;
use crate::error::{Result, VlmError};
use crate::layers::{LayerCache, OF_CONVOLUTION, RmsNorm};
use crate::linear::{Draw, Linear};
use crate::recurrence::Recurrence;
use crate::shares::{Cut, TokenPart, joined, overlap};
use crate::stages::{Mixing, Stage};
use crate::step::Common;
use crate::trace::Trace;

/// Linear attention by the gated delta rule.
#[derive(Module, Debug)]
pub(crate) struct DeltaAttention {
    in_proj_qkv: Linear,
    in_proj_z: Linear,
    in_proj_b: Linear,
    in_proj_a: Linear,
    conv1d: Convolution,
    /// The logarithm of the slowest decay's rate, of each head.
    a_log: Param<Tensor<1>>,
    dt_bias: Param<Tensor<1>>,
    norm: RmsNorm,
    out_proj: Linear,
    #[module(skip)]
    config: DeltaConfig,
}

#[derive(Module, Debug)]
struct Convolution {
    /// `[channels, 1, taps]`
    weight: Param<Tensor<3>>,
}

impl DeltaAttention {
    pub(crate) fn new(
        hidden_size: usize,
        config: &DeltaConfig,
        epsilon: f64,
        device: &Device,
    ) -> Self {
        let (channels, values) = (config.channels(), config.heads * config.value_dim);
        let from_hidden = |to| Linear::new(hidden_size, to, false, device);
        let (fan_in, fan_out) = (Some(config.taps), Some(channels));
        let kernel = [channels, 1, config.taps];
        Self {
            in_proj_qkv: from_hidden(channels),
            in_proj_z: from_hidden(values),
            in_proj_b: from_hidden(config.heads),
            in_proj_a: from_hidden(config.heads),
            conv1d: Convolution {
                weight: OF_CONVOLUTION.init_with(kernel, fan_in, fan_out, device),
            },
            a_log: slowest_decays(config.heads, device),
            dt_bias: Initializer::Ones.init([config.heads], device),
            norm: RmsNorm::new(config.value_dim, epsilon, device),
            out_proj: Linear::new(values, hidden_size, false, device),
            config: config.clone(),
        }
    }

    /// The outputs of the rule, and the gate on them. `common.recurrence` is that of the tokens of a
    /// prompt or step; `None` means one more token in each row, whose cache has the convolution's
    /// last inputs and the state.
    pub(crate) fn forward(
        &self,
        hidden: Tensor<3>,
        common: Common,
        cache: Option<&mut LayerCache>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<(Tensor<4>, Tensor<3>)> {
        let Common {
            recurrence, draw, ..
        } = common;
        let config = &self.config;
        let (mixed, z, [mut g, mut beta]) = self.project(hidden, recurrence, draw)?;
        let weight = self.taps();
        let out = match (recurrence, cache) {
            (Some(recurrence), cache) => {
                // Padding leaves the state unchanged.
                [g, beta] = [g, beta].map(|x| recurrence.masked(x));
                let window = cache.is_some().then(|| recurrence.last(&mixed));
                let mixed = short_convolution(mixed, weight, &recurrence.sequences)?;
                trace.record(|| format!("conv.{index}"), &mixed);
                let [q, k, v] = config.divided(mixed);
                let (out, state) = recurrence.rule.try_forward(q, k, v, g, beta)?;
                trace.record(|| format!("mixed.{index}"), &out);
                if let (Some(cache), Some(window)) = (cache, window) {
                    *cache = Some((window, state));
                }
                out
            }
            (None, cache) => {
                let (window, state) = cache
                    .as_ref()
                    .and_then(|cache| (*cache).clone())
                    .unwrap_or_else(|| self.fresh(&mixed));
                // The last of as many inputs as taps.
                let [rows, _, before, channels] = window.dims();
                let window = window.reshape([rows, before, channels]);
                let inputs = Tensor::cat(vec![window, mixed], 1);
                let sequences = Sequences::whole(config.taps);
                let convolved = short_convolution(inputs.clone(), weight, &sequences)?;
                let convolved = convolved.narrow(1, before, 1);
                let one_token = |x: Tensor<4>| x.squeeze_dim::<3>(1);
                let token = config.divided(convolved).map(one_token);
                let rates = [g, beta].map(|x| x.squeeze_dim::<2>(1));
                let (out, state) = gated_delta_step(token, rates, state)?;
                if let Some(cache) = cache {
                    let window = inputs.narrow(1, 1, before);
                    *cache = Some((window.unsqueeze_dim::<4>(1), state));
                }
                out.unsqueeze_dim::<4>(1)
            }
        };
        Ok((out, z))
    }

    /// The input of the convolution, the gate on the output, and the rates.
    fn project(
        &self,
        hidden: Tensor<3>,
        recurrence: Option<&Recurrence>,
        draw: Draw,
    ) -> Result<(Tensor<3>, Tensor<3>, [Tensor<3>; 2])> {
        let hidden = match recurrence {
            Some(recurrence) => recurrence.masked(hidden),
            None => hidden,
        };
        let layers = [
            &self.in_proj_qkv,
            &self.in_proj_z,
            &self.in_proj_b,
            &self.in_proj_a,
        ];
        let [mixed, z, b, a] = Linear::forward_together(layers, hidden, draw)?;
        let rates = self.rates(a, b);
        Ok((mixed, z, rates))
    }

    /// The weight of the convolution, `[channels, taps]`.
    fn taps(&self) -> Tensor<2> {
        let weight = self.conv1d.weight.val();
        weight.reshape([self.config.channels(), self.config.taps])
    }

    /// The output, from those of the rule and the gate on them, or its sum with y.
    pub(crate) fn output(
        &self,
        y: Option<Tensor<3>>,
        (out, z): (Tensor<4>, Tensor<3>),
        draw: Draw,
    ) -> Result<Tensor<3>> {
        let normalised = self.norm.forward(out)?.reshape(z.dims());
        self.out_proj.forward_gated([z, normalised], y, draw)
    }

    /// The logarithm of each token's decay, and its rate of writing, at least in f32.
    fn rates(&self, a: Tensor<3>, b: Tensor<3>) -> [Tensor<3>; 2] {
        let wide = match a.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let head_values = |x: &Param<Tensor<1>>| x.val().cast(wide).unsqueeze::<3>();
        let rate = head_values(&self.a_log).exp();
        let g = softplus(a.cast(wide) + head_values(&self.dt_bias), 1.0) * rate.neg();
        [g, sigmoid(b.cast(wide))]
    }

    /// The state of a cache before the first token.
    fn fresh(&self, mixed: &Tensor<3>) -> (Tensor<4>, Tensor<4>) {
        let config = &self.config;
        let [rows, _, channels] = mixed.dims();
        let (device, dtype) = (mixed.device(), mixed.dtype());
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let state = [rows, config.heads, config.key_dim, config.value_dim];
        (
            Tensor::zeros([rows, 1, config.taps - 1, channels], (&device, dtype)),
            Tensor::zeros(state, (&device, wide)),
        )
    }

    /// The linear layers by name.
    pub(crate) fn linears(&mut self) -> [(&'static str, &mut Linear); 5] {
        [
            ("linear_attn.in_proj_qkv", &mut self.in_proj_qkv),
            ("linear_attn.in_proj_z", &mut self.in_proj_z),
            ("linear_attn.in_proj_b", &mut self.in_proj_b),
            ("linear_attn.in_proj_a", &mut self.in_proj_a),
            ("linear_attn.out_proj", &mut self.out_proj),
        ]
    }
}

/// Keys and queries that stand for a state: their norm plus the epsilon under the root is exact in
/// f32.
const UNIT: f64 = 1024.0;

/// A state that passes from rank to rank. After the convolution, of whose inputs a rank gets the last
/// ones of the rank before, each rank computes the state after its tokens as a function of the one
/// before them, which is linear: B + P S. From those of the ranks before, each computes the state S
/// before its tokens, and then its outputs.
impl Mixing for DeltaAttention {
    fn exchanges(&self) -> &'static [&'static [bool]] {
        &[&[false], &[true]]
    }

    fn elements(&self, stage: usize, part: &TokenPart, [from, to]: [usize; 2]) -> Vec<usize> {
        let config = &self.config;
        if stage == 0 {
            let halo = overlap(&part.of_rank(from), &self.halo(part, to));
            return vec![part.rows * halo.len() * config.channels()];
        }
        let width = config.value_dim + config.key_dim;
        let state = part.rows * config.heads * config.key_dim * width;
        vec![if from < to { state } else { 0 }]
    }

    fn run(
        &self,
        stage: usize,
        from: Stage,
        common: Common,
        part: &TokenPart,
        (index, trace): (usize, &mut Trace),
    ) -> Result<Stage> {
        let missing = || VlmError::Walk("a stage of a layer with a state has no input".to_owned());
        let Some(recurrence) = common.recurrence else {
            return Err(missing());
        };
        if stage == 0 {
            return self.give(from.output()?, (recurrence, common.draw), part);
        }
        let Stage { flats, kept } = from;
        let (Ok([received]), Ok([mixed, z, g, beta])) =
            (<[_; 1]>::try_from(flats), <[_; 4]>::try_from(kept))
        else {
            return Err(missing());
        };
        if stage == 1 {
            let mixed = self.convolved(&received, mixed, part)?;
            trace.record(|| format!("conv.{index}"), &mixed);
            let tokens = [mixed.clone(), g.clone(), beta.clone()];
            let later = part.share.count - 1 - part.share.index;
            let state = (later > 0).then(|| self.state(tokens, part));
            let state = state.transpose()?;
            let states = state.iter().flat_map(|state| vec![state.clone(); later]);
            return Ok(Stage {
                flats: vec![joined(states, &g)],
                kept: vec![mixed, z, g, beta],
            });
        }
        let before = self.before(&received, part);
        let dtype = mixed.dtype();
        let out = self
            .rule([mixed, g, beta], before, false, part)?
            .cast(dtype);
        trace.record(|| format!("mixed.{index}"), &out);
        Ok(Stage::of(vec![self.output(None, (out, z), common.draw)?]))
    }
}

impl DeltaAttention {
    /// The tokens before those of a rank that its convolution reads.
    fn halo(&self, part: &TokenPart, rank: usize) -> Range<usize> {
        let first = part.of_rank(rank).start;
        first.saturating_sub(self.config.taps - 1)..first
    }

    /// The inputs of the convolution, of which later ranks get the last; the rest stays.
    fn give(
        &self,
        normalised: Tensor<3>,
        (recurrence, draw): (&Recurrence, Draw),
        part: &TokenPart,
    ) -> Result<Stage> {
        let (mixed, z, rates) = self.project(normalised, Some(recurrence), draw)?;
        // Padding leaves the state unchanged.
        let [g, beta] = rates.map(|x| recurrence.masked(x));
        let own = part.of_rank(part.share.index);
        let of_rank = |rank| {
            let halo = overlap(&own, &self.halo(part, rank));
            let last = || mixed.clone().narrow(1, halo.start - own.start, halo.len());
            (!halo.is_empty()).then(last)
        };
        Ok(Stage {
            flats: vec![joined((0..part.share.count).filter_map(of_rank), &mixed)],
            kept: vec![mixed, z, g, beta],
        })
    }

    /// The output of the convolution.
    fn convolved(
        &self,
        received: &Tensor<1>,
        mixed: Tensor<3>,
        part: &TokenPart,
    ) -> Result<Tensor<3>> {
        let [rows, tokens, channels] = mixed.dims();
        let (own, halo) = (
            part.of_rank(part.share.index),
            self.halo(part, part.share.index),
        );
        let mut cut = Cut::new(received);
        let of_ranks = (0..part.share.index).filter_map(|rank| {
            let halo = overlap(&part.of_rank(rank), &halo);
            cut.next([rows, halo.len(), channels])
        });
        let all = Tensor::cat(of_ranks.chain([mixed]).collect(), 1);
        let sequences = part.sequences_of(&(halo.start..own.end), [0, 0])?;
        let convolved = short_convolution(all, self.taps(), &sequences)?;
        Ok(convolved.narrow(1, halo.len(), tokens))
    }

    /// What this rank's tokens do to a state, `[rows, key_dim, heads * (value_dim + key_dim)]`: in
    /// each head B, then P, which is 0 before the first token.
    fn state(&self, tokens: [Tensor<3>; 3], part: &TokenPart) -> Result<Tensor<3>> {
        let DeltaConfig {
            heads,
            key_dim,
            value_dim,
            ..
        } = self.config;
        let (rows, [_, g, _]) = (part.rows, &tokens);
        let (device, wide) = (g.device(), g.dtype());
        let one = Tensor::<2>::eye(key_dim, &device).cast(wide);
        let one = one.reshape([1, key_dim, 1, key_dim]);
        let one = one.expand([rows, key_dim, heads, key_dim]);
        let zeros = [rows, key_dim, heads, value_dim];
        let zeros = Tensor::zeros(zeros, (&device, wide));
        let before = Tensor::cat(vec![zeros, one], 3);
        let all = self.rule(tokens, Some(before), true, part)?;
        let [_, count, _, width] = all.dims();
        let state = all.narrow(1, count - key_dim, key_dim) * (key_dim as f64).sqrt();
        Ok(state.reshape([rows, key_dim, heads * width]))
    }

    /// The state before this rank's tokens, `[rows, key_dim, heads, value_dim]`; `None` before the
    /// first.
    fn before(&self, received: &Tensor<1>, part: &TokenPart) -> Option<Tensor<4>> {
        let DeltaConfig {
            heads,
            key_dim,
            value_dim,
            ..
        } = self.config;
        let width = value_dim + key_dim;
        let mut cut = Cut::new(received);
        let mut state: Option<Tensor<4>> = None;
        for _ in 0..part.share.index {
            let of_rank = cut.next([part.rows, key_dim, heads * width])?;
            let of_rank = of_rank.reshape([part.rows, key_dim, heads, width]);
            let of_rank = of_rank.swap_dims(1, 2);
            let own = of_rank.clone().narrow(3, 0, value_dim);
            state = Some(match state {
                Some(before) => own + of_rank.narrow(3, value_dim, key_dim).matmul(before),
                None => own,
            });
        }
        state.map(|state| state.swap_dims(1, 2))
    }

    /// The outputs of the rule, `[rows, tokens, heads, width]`, in f32 or f64, from a state before
    /// the tokens, `[rows, key_dim, heads, width]`: values are 0 beyond value_dim. With `reads`, the
    /// state after them follows, divided by the root of key_dim.
    ///
    /// Tokens stand for states: one for each key channel, with a unit key and a row of the state as
    /// the value, writes it; one with a unit query reads it.
    fn rule(
        &self,
        [mixed, g, beta]: [Tensor<3>; 3],
        before: Option<Tensor<4>>,
        reads: bool,
        part: &TokenPart,
    ) -> Result<Tensor<4>> {
        let (device, wide) = (g.device(), g.dtype());
        let DeltaConfig {
            key_heads,
            heads,
            key_dim,
            ..
        } = self.config;
        let rows = part.rows;
        let own = part.of_rank(part.share.index);
        let [q, k, mut v] = self.config.divided(mixed.cast(wide));
        let [_, tokens, _, value_dim] = v.dims();
        let width = before.as_ref().map_or(value_dim, |before| before.dims()[3]);
        if width > value_dim {
            let zeros = [rows, tokens, heads, width - value_dim];
            v = Tensor::cat(vec![v, Tensor::zeros(zeros, (&device, wide))], 3);
        }
        // Nothing is before the first token.
        let before = before.filter(|_| own.start > 0);
        let one = Tensor::<2>::eye(key_dim, &device).cast(wide) * UNIT;
        let one = one.reshape([1, key_dim, 1, key_dim]);
        let one = one.expand([rows, key_dim, key_heads, key_dim]);
        let full = |value: f64| Tensor::<3>::full([rows, key_dim, heads], value, (&device, wide));
        let nothing = || Tensor::zeros([rows, key_dim, heads, width], (&device, wide));
        let beside = [before.is_some(), reads].map(|is_there| if is_there { key_dim } else { 0 });
        let writes = before.is_some();
        let ends = || [writes.then(|| one.clone()), reads.then(|| one.clone())];
        let (q, k) = (between(ends(), q), between(ends(), k));
        let v = between([before, reads.then(nothing)], v);
        let of = |value: f64, is_there: bool| is_there.then(|| full(value));
        let g = between([of(0.0, writes), of(0.0, reads)], g);
        let beta = between([of(1.0, writes), of(0.0, reads)], beta);
        let sequences = part.sequences_of(&own, beside)?;
        let (out, _) = GatedDelta::new(sequences).try_forward(q, k, v, g, beta)?;
        let [_, count, ..] = out.dims();
        Ok(out.narrow(1, beside[0], count - beside[0]))
    }
}

/// Tokens with others before and after them, `[rows, tokens, ..]`.
fn between<const D: usize>(ends: [Option<Tensor<D>>; 2], x: Tensor<D>) -> Tensor<D> {
    let [first, last] = ends;
    Tensor::cat(first.into_iter().chain([x]).chain(last).collect(), 1)
}

/// The logarithms of uniform rates, drawn on first use: a device's type is set until then.
fn slowest_decays(heads: usize, device: &Device) -> Param<Tensor<1>> {
    let draw = move |device: &Device, is_trained: bool| {
        let rates = Distribution::Uniform(0.01, 16.0);
        let rates = Tensor::<1>::random([heads], rates, device).log();
        if is_trained {
            rates.require_grad()
        } else {
            rates
        }
    };
    Param::uninitialized(ParamId::new(), draw, device.clone(), true, [heads].into())
}

impl DeltaConfig {
    /// Channels of q, k and v together.
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    /// Divides `[rows, tokens, channels]` into the heads of q, k and v.
    fn divided(&self, mixed: Tensor<3>) -> [Tensor<4>; 3] {
        let [rows, tokens, _] = mixed.dims();
        let keys = self.key_heads * self.key_dim;
        let part = |start, heads, width| {
            let part = mixed.clone().narrow(2, start, heads * width);
            part.reshape([rows, tokens, heads, width])
        };
        [
            part(0, self.key_heads, self.key_dim),
            part(keys, self.key_heads, self.key_dim),
            part(2 * keys, self.heads, self.value_dim),
        ]
    }
}
