//! The language decoder.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, Tensor};
use burn_attention::{Attention, GradientSource, has_adapter_kernels, stand_in};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_core::{HeadNorm, Layout, Positions};

use crate::config::{DeltaConfig, SlidingWindow, TextConfig};
use crate::delta::DeltaAttention;
use crate::error::{Result, VlmError};
use crate::experts::ExpertNetwork;
use crate::layers::{
    Activation, FeedForward, FeedForwardConfig, Gate, LayerCache, RmsNorm, append, attend,
};
use crate::linear::{Adaptable, Draw, Linear};
use crate::shares::{Cut, HeadPart, MaskedKeys, TokenPart, joined, overlap, pick};
use crate::stages::{Mixing, Stage};
use crate::step::{Common, Deepstack};
use crate::trace::Trace;

/// Layers of causal attention and feed-forward networks, from embeddings to hidden states.
#[derive(Module, Debug)]
pub(crate) struct Decoder {
    pub(crate) embed_tokens: Embedding,
    pub(crate) layers: Vec<Layer>,
    norm: RmsNorm,
    rotary: Rotary,
    /// The width of the convolutions of its layers with a state, if any.
    #[module(skip)]
    pub(crate) taps: Option<usize>,
    /// The visible tokens of layers with a window, if any.
    #[module(skip)]
    pub(crate) window: Option<usize>,
}

impl TextConfig {
    pub(crate) fn init(&self, implementation: Implementation, device: &Device) -> Result<Decoder> {
        let rotary = RotaryConfig::new(self.rotation.clone())
            .with_layout(Layout::Bsnd)
            .with_implementation(implementation)
            .try_init()?;
        Ok(Decoder {
            embed_tokens: EmbeddingConfig::new(self.vocab_size, self.hidden_size).init(device),
            layers: (0..self.layers)
                .map(|index| Layer::new(self, index, &rotary, device))
                .collect(),
            norm: self.norm(self.hidden_size, device),
            rotary,
            taps: self.delta.as_ref().map(|delta| delta.taps),
            window: self.window.as_ref().map(|window| window.tokens),
        })
    }

    fn norm(&self, channels: usize, device: &Device) -> RmsNorm {
        let new = if self.unit_offset {
            RmsNorm::with_unit_offset
        } else {
            RmsNorm::new
        };
        new(channels, self.rms_norm_eps, device)
    }
}

impl Decoder {
    /// cos and sin of a step's tokens, for all layers.
    pub(crate) fn angles(&self, positions: &Positions, device: &Device) -> Result<RotaryAngles> {
        let dtype = self.embed_tokens.weight.val().dtype();
        Ok(self.rotary.try_angles_for(dtype, positions, device)?)
    }

    /// The axes of its positions.
    pub(crate) fn axes(&self) -> usize {
        self.rotary.spec().axis_count()
    }

    /// Prepares the norms of heads for a pass: their weights become f32 together. With wide
    /// gradients, trained ones too, and their gradients are f32.
    pub(crate) fn prepare(&mut self, wide_gradients: bool) {
        let attention = self
            .layers
            .iter_mut()
            .filter_map(|layer| layer.self_attn.as_mut());
        let mut found: Vec<(&mut SelfAttention, [Tensor<1>; 2])> = attention
            .filter(|attention| attention.wide_norms.is_none())
            .filter_map(|attention| {
                let norms = [attention.q_norm.as_ref()?, attention.k_norm.as_ref()?];
                let weights = norms.map(|norm| norm.weight.val());
                let is_frozen = weights.iter().all(|weight| !weight.is_require_grad());
                (is_frozen || wide_gradients).then_some((attention, weights))
            })
            .collect();
        let is_narrow = found.first().is_some_and(|(_, [weight, _])| {
            has_adapter_kernels(&weight.device()) && weight.dtype().size() < size_of::<f32>()
        });
        if !is_narrow {
            return;
        }
        let weights: Vec<_> = found
            .iter()
            .flat_map(|(_, weights)| weights.clone())
            .map(Tensor::detach)
            .collect();
        let lengths: Vec<usize> = weights.iter().map(|weight| weight.dims()[0]).collect();
        let weights = Tensor::cat(weights, 0).cast(DType::F32);
        let mut weights = weights.split_with_sizes(lengths, 0).into_iter();
        for (attention, _) in &mut found {
            attention.wide_norms = weights.next().zip(weights.next()).map(<[_; 2]>::from);
        }
    }

    /// The heads and queries whose attention each of some ranks computes, if a layer has attention.
    pub(crate) fn attention_parts(&self, count: usize) -> Option<Vec<HeadPart>> {
        let mut attention = self
            .layers
            .iter()
            .filter_map(|layer| layer.self_attn.as_ref());
        attention.next().map(|attention| attention.parts(count))
    }

    /// The number of layers and of caches.
    pub(crate) fn depth(&self) -> usize {
        self.layers.len()
    }

    /// Runs all layers. `hidden`: `[batch, seq, hidden_size]`; `common.attention`: of `seq` queries
    /// to all keys; `caches`: one per layer, or empty to cache nothing.
    pub(crate) fn forward(
        &self,
        mut hidden: Tensor<3>,
        common: Common,
        deepstack: Option<Deepstack>,
        caches: &mut [LayerCache],
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        for (index, layer) in self.layers.iter().enumerate() {
            trace.record(|| format!("hidden.{index}.in"), &hidden);
            hidden = layer.forward(hidden, common, caches.get_mut(index), index, trace)?;
            trace.record(|| format!("hidden.{index}.out"), &hidden);
            if let Some(deepstack) = &deepstack {
                hidden = deepstack.add(index, hidden);
            }
        }
        trace.record(|| "hidden.last_pre_norm".into(), &hidden);
        let hidden = self.last(hidden)?;
        trace.record(|| "hidden.final_norm".into(), &hidden);
        Ok(hidden)
    }

    /// The norm after the last layer.
    pub(crate) fn last(&self, hidden: Tensor<3>) -> Result<Tensor<3>> {
        self.norm.forward(hidden)
    }
}

/// Attention and a feed-forward network, each with a residual connection.
#[derive(Module, Debug)]
pub(crate) struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Option<SelfAttention>,
    /// Replaces attention.
    linear_attn: Option<DeltaAttention>,
    post_self_attn_layernorm: Option<RmsNorm>,
    post_attention_layernorm: RmsNorm,
    mlp: Network,
    post_mlp_layernorm: Option<RmsNorm>,
    /// True if adapters may be beside the matrices of a feed-forward network without experts. In a
    /// model with experts, PEFT takes their names for those of experts.
    #[module(skip)]
    adapts_dense: bool,
}

/// What mixes tokens, and the input of its last product.
#[derive(Clone)]
enum Mixed<'a> {
    Attention(&'a SelfAttention, (Tensor<3>, Option<Tensor<3>>)),
    Delta(&'a DeltaAttention, (Tensor<4>, Tensor<3>)),
}

impl Mixed<'_> {
    /// The output, or its sum with y.
    fn output(self, y: Option<Tensor<3>>, draw: Draw) -> Result<Tensor<3>> {
        match self {
            Self::Attention(attention, parts) => attention.output(y, parts, draw),
            Self::Delta(delta, parts) => delta.output(y, parts, draw),
        }
    }
}

/// The feed-forward network of a layer.
#[derive(Module, Debug)]
enum Network {
    Dense(FeedForward),
    Experts(ExpertNetwork),
}

impl Network {
    fn new(config: &TextConfig, index: usize, device: &Device) -> Self {
        let experts = config.experts.as_ref();
        match experts.filter(|experts| !experts.dense_layers.contains(&index)) {
            Some(experts) => Self::Experts(ExpertNetwork::new(config, experts, device)),
            None => Self::Dense(
                FeedForwardConfig {
                    input: config.hidden_size,
                    hidden: config.intermediate_size,
                    output: config.hidden_size,
                    gate: if config.joined_gate {
                        Gate::Joined
                    } else {
                        Gate::Own
                    },
                    bias: config.mlp_bias,
                    activation: Activation::Silu,
                }
                .init(device),
            ),
        }
    }

    fn forward(&self, x: Tensor<3>, common: Common) -> Result<Tensor<3>> {
        match self {
            Self::Dense(network) => network.forward(x, common.draw),
            Self::Experts(network) => network.forward(x, common),
        }
    }

    /// y and the output for x.
    fn forward_onto(&self, y: Tensor<3>, x: Tensor<3>, common: Common) -> Result<Tensor<3>> {
        match self {
            Self::Dense(network) => network.forward_onto(y, x, common.draw),
            Self::Experts(network) => Ok(y + network.forward(x, common)?),
        }
    }

    /// As [`Linear::source`].
    fn source(&self, x: Tensor<3>, common: Common, gradient: Tensor<3>) -> Result<GradientSource> {
        match self {
            Self::Dense(network) => network.source(x, common.draw, gradient),
            Self::Experts(network) => {
                let output = network.forward(x, common)?;
                Ok(GradientSource::new(output, gradient)?)
            }
        }
    }

    /// The layers that adapters may be beside, by name.
    fn adaptable(&mut self) -> Vec<(&'static str, Adaptable<'_>)> {
        match self {
            Self::Dense(network) => {
                let linears = network.linears().into_iter();
                let linears = linears.map(|(name, linear)| (name, Adaptable::Linear(linear)));
                linears.collect()
            }
            Self::Experts(network) => network.adaptable(),
        }
    }
}

impl Layer {
    fn new(config: &TextConfig, index: usize, rotary: &Rotary, device: &Device) -> Self {
        let hidden_size = config.hidden_size;
        let has_state = |delta: &&DeltaConfig| !delta.full_attention_layers.contains(&index);
        let delta = config.delta.as_ref().filter(has_state);
        let linear_attn =
            delta.map(|delta| DeltaAttention::new(hidden_size, delta, config.rms_norm_eps, device));
        let norm = || config.norm(hidden_size, device);
        let output_norm = || config.output_norms.then(norm);
        Self {
            input_layernorm: norm(),
            self_attn: linear_attn
                .is_none()
                .then(|| SelfAttention::new(config, index, rotary, device)),
            linear_attn,
            post_self_attn_layernorm: output_norm(),
            post_attention_layernorm: norm(),
            mlp: Network::new(config, index, device),
            post_mlp_layernorm: output_norm(),
            adapts_dense: config.experts.is_none(),
        }
    }

    pub(crate) fn has_experts(&self) -> bool {
        matches!(self.mlp, Network::Experts(_))
    }

    /// The network of experts, if it has one.
    pub(crate) fn experts(&self) -> Option<&ExpertNetwork> {
        match &self.mlp {
            Network::Experts(network) => Some(network),
            Network::Dense(_) => None,
        }
    }

    /// True if other ranks have some of its experts.
    pub(crate) fn is_divided(&self) -> bool {
        self.experts().is_some_and(ExpertNetwork::is_divided)
    }

    pub(crate) fn forward(
        &self,
        hidden: Tensor<3>,
        common: Common,
        cache: Option<&mut LayerCache>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        let (hidden, normalised) = self.summed(hidden, common, cache, index, trace)?;
        self.after_sum(hidden, normalised, common, index, trace)
    }

    /// The output, from the input and what was mixed of it.
    pub(crate) fn after_mixing(
        &self,
        hidden: Tensor<3>,
        mixed: Tensor<3>,
        common: Common,
        index: usize,
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        let (hidden, normalised) = self.added(hidden, mixed, index, trace)?;
        self.after_sum(hidden, normalised, common, index, trace)
    }

    /// The output, from the sum with what was mixed, and from the input of the feed-forward network.
    fn after_sum(
        &self,
        hidden: Tensor<3>,
        normalised: Tensor<3>,
        common: Common,
        index: usize,
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        trace.record(|| format!("norm.{index}.mlp"), &normalised);
        match self.post_mlp_layernorm {
            None => self.mlp.forward_onto(hidden, normalised, common),
            Some(_) => Ok(hidden + self.changed(self.mlp.forward(normalised, common)?)?),
        }
    }

    /// What the feed-forward network adds, from its output.
    pub(crate) fn changed(&self, output: Tensor<3>) -> Result<Tensor<3>> {
        normalised_by(self.post_mlp_layernorm.as_ref(), output)
    }

    /// The source of the backward from the gradient of the output, which is not computed where
    /// nothing needs its last product.
    pub(crate) fn source(
        &self,
        hidden: Tensor<3>,
        common: Common,
        index: usize,
        gradient: Tensor<3>,
    ) -> Result<GradientSource> {
        let trace = &mut Trace::off();
        let (hidden, normalised) = self.summed(hidden, common, None, index, trace)?;
        self.source_after_sum(hidden, normalised, common, gradient)
    }

    /// As [`source`](Self::source), from the input and what was mixed of it.
    pub(crate) fn source_after(
        &self,
        hidden: Tensor<3>,
        mixed: Tensor<3>,
        common: Common,
        gradient: Tensor<3>,
    ) -> Result<GradientSource> {
        let (hidden, normalised) = self.added(hidden, mixed, 0, &mut Trace::off())?;
        self.source_after_sum(hidden, normalised, common, gradient)
    }

    fn source_after_sum(
        &self,
        hidden: Tensor<3>,
        normalised: Tensor<3>,
        common: Common,
        gradient: Tensor<3>,
    ) -> Result<GradientSource> {
        if self.post_mlp_layernorm.is_some() {
            let output = self.after_sum(hidden, normalised, common, 0, &mut Trace::off())?;
            return Ok(GradientSource::new(output, gradient)?);
        }
        let source = self.mlp.source(normalised, common, gradient.clone())?;
        Ok(source.with(hidden, gradient)?)
    }

    /// The normalised input, of what mixes tokens.
    pub(crate) fn input(
        &self,
        hidden: Tensor<3>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        let normalised = self.input_layernorm.forward(hidden)?;
        trace.record(|| format!("norm.{index}.attn"), &normalised);
        Ok(normalised)
    }

    /// The sum with what is mixed of the input, and the input of the feed-forward network.
    pub(crate) fn summed(
        &self,
        hidden: Tensor<3>,
        common: Common,
        cache: Option<&mut LayerCache>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<(Tensor<3>, Tensor<3>)> {
        let normalised = self.input(hidden.clone(), index, trace)?;
        let mixed = match (&self.self_attn, &self.linear_attn) {
            (_, Some(delta)) => Mixed::Delta(
                delta,
                delta.forward(normalised, common, cache, index, trace)?,
            ),
            (Some(attention), None) => Mixed::Attention(
                attention,
                attention.forward(normalised, common, cache, index, trace)?,
            ),
            (None, None) => return self.added(hidden, normalised, index, trace),
        };
        if self.post_self_attn_layernorm.is_some() {
            return self.added(hidden, mixed.output(None, common.draw)?, index, trace);
        }
        if trace.is_recording() {
            // The output without the sum exists in no other pass.
            let output = mixed.clone().output(None, common.draw)?;
            trace.record(|| format!("attn.{index}.out"), &output);
        }
        let sum = mixed.output(Some(hidden), common.draw)?;
        let normalised = self.post_attention_layernorm.forward(sum.clone())?;
        Ok((sum, normalised))
    }

    /// The sum of the input and what was mixed of it, and the input of the feed-forward network.
    fn added(
        &self,
        hidden: Tensor<3>,
        mixed: Tensor<3>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<(Tensor<3>, Tensor<3>)> {
        trace.record(|| format!("attn.{index}.out"), &mixed);
        let hidden = hidden + normalised_by(self.post_self_attn_layernorm.as_ref(), mixed)?;
        let normalised = self.post_attention_layernorm.forward(hidden.clone())?;
        Ok((hidden, normalised))
    }

    /// The part that mixes tokens.
    pub(crate) fn mixing(&self) -> Option<&dyn Mixing> {
        match (&self.self_attn, &self.linear_attn) {
            (_, Some(linear)) => Some(linear),
            (Some(attention), None) => Some(attention),
            (None, None) => None,
        }
    }

    /// The layers that adapters may be beside, by name.
    pub(crate) fn adaptable(&mut self) -> impl Iterator<Item = (String, Adaptable<'_>)> {
        let attention = self.self_attn.iter_mut().flat_map(|attention| {
            [
                ("self_attn.q_proj", &mut attention.q_proj),
                ("self_attn.k_proj", &mut attention.k_proj),
                ("self_attn.v_proj", &mut attention.v_proj),
                ("self_attn.o_proj", &mut attention.o_proj),
            ]
        });
        let delta = self.linear_attn.iter_mut();
        let delta = delta.flat_map(DeltaAttention::linears);
        let mixing = attention
            .chain(delta)
            .map(|(name, linear)| (name.to_owned(), Adaptable::Linear(linear)));
        let is_dense = matches!(self.mlp, Network::Dense(_));
        let mlp = (!is_dense || self.adapts_dense).then(|| self.mlp.adaptable());
        let mlp = mlp.into_iter().flatten();
        mixing.chain(mlp.map(|(name, layer)| (format!("mlp.{name}"), layer)))
    }

    /// The linear layers that adapters are beside by default.
    pub(crate) fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.adaptable().filter_map(|(_, layer)| match layer {
            Adaptable::Linear(linear) => Some(linear),
            _ => None,
        })
    }
}

fn normalised_by(norm: Option<&RmsNorm>, x: Tensor<3>) -> Result<Tensor<3>> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x),
    }
}

/// `[batch, seq, channels]` as `[batch, seq, heads, channels / heads]`.
fn heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, seq, channels] = x.dims();
    x.reshape([batch, seq, heads, channels / heads])
}

fn record_both(trace: &mut Trace, when: &str, index: usize, q: &Tensor<4>, k: &Tensor<4>) {
    for (name, x) in [("q", q), ("k", k)] {
        trace.record(|| format!("{name}_{when}.{index}"), x);
    }
}

/// Grouped-query attention.
#[derive(Module, Debug)]
struct SelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    /// The weights of both norms in f32, during a pass.
    #[module(skip)]
    wide_norms: Option<[Tensor<1>; 2]>,
    rotary: Rotary,
    heads: usize,
    kv_heads: usize,
    /// True if `q_proj` also computes a gate on the output, after q in each head.
    output_gate: bool,
    /// True if queries see only the last tokens.
    has_window: bool,
}

impl SelfAttention {
    fn new(config: &TextConfig, index: usize, rotary: &Rotary, device: &Device) -> Self {
        let head_dim = config.rotation.head_dim();
        let (hidden_size, bias) = (config.hidden_size, config.attention_bias);
        let biased = |heads: usize| Linear::new(hidden_size, heads * head_dim, bias, device);
        let head_norm = || config.qk_norm.then(|| config.norm(head_dim, device));
        let has_window = |window: &SlidingWindow| !window.full_attention_layers.contains(&index);
        let q_parts = if config.output_gate { 2 } else { 1 };
        Self {
            q_proj: biased(q_parts * config.heads),
            k_proj: biased(config.kv_heads),
            v_proj: biased(config.kv_heads),
            o_proj: Linear::new(
                config.heads * head_dim,
                hidden_size,
                config.output_bias,
                device,
            ),
            q_norm: head_norm(),
            k_norm: head_norm(),
            wide_norms: None,
            rotary: rotary.clone(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            output_gate: config.output_gate,
            has_window: config.window.as_ref().is_some_and(has_window),
        }
    }

    fn head_dim(&self) -> usize {
        self.rotary.spec().head_dim()
    }

    /// The heads' outputs, and the gate on them.
    fn forward(
        &self,
        hidden: Tensor<3>,
        common: Common,
        cache: Option<&mut LayerCache>,
        index: usize,
        trace: &mut Trace,
    ) -> Result<(Tensor<3>, Option<Tensor<3>>)> {
        let ([q, k, v], gate) = self.project(hidden, common, index, trace)?;
        let [q, mut k, mut v] = [q, k, v].map(|x| x.swap_dims(1, 2));
        if let Some(cache) = cache {
            (k, v) = append(cache, k, v);
        }
        let attended = attend(self.mask(common), q, k, v)?;
        trace.record(|| format!("mixed.{index}"), &attended);
        Ok((attended, gate))
    }

    /// q and k, rotated, and v, `[batch, seq, heads, head_dim]`, and the gate on the output.
    fn project(
        &self,
        hidden: Tensor<3>,
        common: Common,
        index: usize,
        trace: &mut Trace,
    ) -> Result<([Tensor<4>; 3], Option<Tensor<3>>)> {
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q, k, v] = Linear::forward_together(layers, hidden, common.draw)?;
        let (q, gate) = self.split_gate(heads(q, self.heads));
        let [k, v] = [k, v].map(|x| heads(x, self.kv_heads));
        let (q, k) = self.rotate(q, k, common.angles, index, trace)?;
        record_both(trace, "post", index, &q, &k);
        trace.record(|| format!("v.{index}"), &v);
        Ok(([q, k, v], gate))
    }

    fn mask<'a>(&self, common: Common<'a>) -> &'a Attention {
        let window = common.window.filter(|_| self.has_window);
        window.unwrap_or(common.attention)
    }

    /// The output of the heads' outputs, or its sum with y.
    fn output(
        &self,
        y: Option<Tensor<3>>,
        (attended, gate): (Tensor<3>, Option<Tensor<3>>),
        draw: Draw,
    ) -> Result<Tensor<3>> {
        let attended = match gate {
            Some(gate) => attended * sigmoid(gate),
            None => attended,
        };
        match y {
            Some(y) => self.o_proj.forward_onto(y, attended, draw),
            None => self.o_proj.forward(attended, draw),
        }
    }

    /// The halves of `q_proj`'s heads if it also computes a gate, `[batch, seq, channels]`.
    fn split_gate(&self, q: Tensor<4>) -> (Tensor<4>, Option<Tensor<3>>) {
        if !self.output_gate {
            return (q, None);
        }
        let [batch, seq, heads, both] = q.dims();
        let half = |start| q.clone().narrow(3, start, both / 2);
        let gate = half(both / 2).reshape([batch, seq, heads * both / 2]);
        (half(0), Some(gate))
    }

    /// Normalises, if the model does, and rotates.
    fn rotate(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        angles: &RotaryAngles,
        index: usize,
        trace: &mut Trace,
    ) -> Result<(Tensor<4>, Tensor<4>)> {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else {
            record_both(trace, "pre", index, &q, &k);
            return Ok(self.rotary.try_forward(q, k, angles)?);
        };
        if trace.is_recording() {
            // The tensors between norm and rotation exist in no other pass.
            let (q, k) = (q_norm.forward(q.clone())?, k_norm.forward(k.clone())?);
            record_both(trace, "pre", index, &q, &k);
        }
        let weights = [q_norm, k_norm].map(|norm| norm.weight.val());
        let weights = match self.wide_norms.clone() {
            Some([q, k]) => {
                let [q_weight, k_weight] = weights;
                [stand_in(q_weight, q)?, stand_in(k_weight, k)?]
            }
            None => weights,
        };
        let norm = HeadNorm::new(q_norm.epsilon)?.with_unit_offset(q_norm.unit_offset);
        Ok(self.rotary.try_forward_norm(q, k, weights, norm, angles)?)
    }
}

impl SelfAttention {
    /// The heads and queries of each rank, where `count` divide the tokens.
    fn parts(&self, count: usize) -> Vec<HeadPart> {
        HeadPart::of_ranks(count, self.heads, self.kv_heads)
    }

    /// The queries of a rank's tokens whose output another computes.
    fn queries(part: &TokenPart, of: usize, by: &HeadPart) -> Vec<Range<usize>> {
        let own = part.of_rank(of);
        let queries = by.queries(part.tokens).into_iter();
        let queries = queries.map(|queries| overlap(&own, &queries));
        queries.filter(|queries| !queries.is_empty()).collect()
    }
}

/// The number of tokens of ranges.
fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Attention by heads: q, k and v to the ranks of their heads, and outputs back to tokens.
impl Mixing for SelfAttention {
    fn exchanges(&self) -> &'static [&'static [bool]] {
        &[&[false], &[false]]
    }

    fn elements(&self, stage: usize, part: &TokenPart, [from, to]: [usize; 2]) -> Vec<usize> {
        let parts = self.parts(part.share.count);
        let head = part.rows * self.head_dim();
        let of_queries =
            |of: usize, by: &HeadPart| count(&Self::queries(part, of, by)) * by.heads.len() * head;
        if stage > 0 {
            return vec![of_queries(to, &parts[from])];
        }
        let by = &parts[to];
        let keys = part.of_rank(from).len() * by.key_heads.len() * head;
        vec![of_queries(from, by) + 2 * keys]
    }

    fn run(
        &self,
        stage: usize,
        from: Stage,
        common: Common,
        part: &TokenPart,
        at: (usize, &mut Trace),
    ) -> Result<Stage> {
        match (stage, &from.flats[..]) {
            (0, _) => self.give(from.output()?, common, part, at),
            (1, [given]) => Ok(Stage {
                flats: vec![self.attend_heads(given, part)?],
                kept: from.kept,
            }),
            (_, [mixed]) => {
                let attended = self.of_tokens(mixed, part);
                let (index, trace) = at;
                trace.record(|| format!("mixed.{index}"), &attended);
                let gate = from.kept.first().cloned();
                let output = self.output(None, (attended, gate), common.draw)?;
                Ok(Stage::of(vec![output]))
            }
            _ => Err(VlmError::Walk(
                "a stage of attention has no input".to_owned(),
            )),
        }
    }
}

impl SelfAttention {
    /// q, k and v of this rank's tokens for the ranks of their heads; the gate stays.
    fn give(
        &self,
        normalised: Tensor<3>,
        common: Common,
        part: &TokenPart,
        (index, trace): (usize, &mut Trace),
    ) -> Result<Stage> {
        let like = normalised.clone();
        let ([q, k, v], gate) = self.project(normalised, common, index, trace)?;
        let own = part.of_rank(part.share.index);
        let parts = self.parts(part.share.count);
        let of_rank = |by: &HeadPart| {
            let heads: Vec<usize> = by.heads.clone().collect();
            let of_head = pick(&q, &heads);
            let first = own.start;
            let queries = Self::queries(part, part.share.index, by).into_iter();
            let queries = queries.map(move |queries| {
                let start = queries.start - first;
                of_head.clone().narrow(1, start, queries.len())
            });
            let [k, v] = [&k, &v].map(|x| pick(x, &by.key_heads));
            queries.chain([Tensor::cat(vec![k, v], 2)])
        };
        Ok(Stage {
            flats: vec![joined(parts.iter().flat_map(of_rank), &like)],
            kept: gate.into_iter().collect(),
        })
    }

    /// The outputs of this rank's heads and queries, for each rank in turn.
    fn attend_heads(&self, given: &Tensor<1>, part: &TokenPart) -> Result<Tensor<1>> {
        let parts = self.parts(part.share.count);
        let own = &parts[part.share.index];
        let [q_width, kv_width] =
            [own.heads.len(), 2 * own.key_heads.len()].map(|heads| heads * self.head_dim());
        let mut cut = Cut::new(given);
        let (mut q, mut kv) = (Vec::new(), Vec::new());
        for (rank, length) in part.lengths().enumerate() {
            for queries in Self::queries(part, rank, own) {
                q.extend(cut.next([part.rows, queries.len(), q_width]));
            }
            kv.extend(cut.next([part.rows, length, kv_width]));
        }
        let kv = Tensor::cat(kv, 1);
        let [k, v] = [0, 1].map(|which| {
            let x = kv.clone().narrow(2, which * kv_width / 2, kv_width / 2);
            heads(x, own.key_heads.len()).swap_dims(1, 2)
        });
        let mut mixed = Vec::new();
        if !q.is_empty() {
            let q = heads(Tensor::cat(q, 1), own.heads.len()).swap_dims(1, 2);
            let mut start = 0;
            for queries in &part.queries {
                let window = queries.window.as_ref().filter(|_| self.has_window);
                let MaskedKeys { attention, keys } = window.unwrap_or(&queries.attention);
                let length = attention.queries();
                let q = q.clone().narrow(2, start, length);
                let [k, v] = [&k, &v].map(|x| x.clone().narrow(2, keys.start, keys.len()));
                mixed.push(attend(attention, q, k, v)?);
                start += length;
            }
        }
        if mixed.is_empty() {
            return Ok(joined([], &kv));
        }
        // Queries ascend, and so do those of ranks.
        let mixed = Tensor::cat(mixed, 1);
        let lengths = (0..parts.len()).map(|rank| count(&Self::queries(part, rank, own)));
        let mut start = 0;
        let of_rank = |length: usize| {
            start += length;
            mixed.clone().narrow(1, start - length, length)
        };
        let lengths = lengths.filter(|length| *length > 0);
        Ok(joined(lengths.map(of_rank), &mixed))
    }

    /// The outputs of all heads for this rank's tokens.
    fn of_tokens(&self, mixed: &Tensor<1>, part: &TokenPart) -> Tensor<3> {
        let mut cut = Cut::new(mixed);
        // Ranks with the same heads follow each other.
        let parts = self.parts(part.share.count);
        let groups = parts.chunk_by(|a, b| a.heads == b.heads).map(|group| {
            let width = group[0].heads.len() * self.head_dim();
            let mut pieces = Vec::new();
            for by in group {
                for queries in Self::queries(part, part.share.index, by) {
                    let size = [part.rows, queries.len(), width];
                    pieces.extend(cut.next(size).map(|piece| (queries.start, piece)));
                }
            }
            pieces.sort_by_key(|(start, _)| *start);
            Tensor::cat(pieces.into_iter().map(|(_, piece)| piece).collect(), 1)
        });
        Tensor::cat(groups.collect(), 2)
    }
}
