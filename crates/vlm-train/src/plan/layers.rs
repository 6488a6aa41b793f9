//! The layers of the models on tensors without elements: `vlm-models`, layer by layer.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use vlm_models::{AdaptedLayer, DeltaConfig, ExpertConfig, TextConfig, TokenShare, VisionConfig};

use super::MicroShape;
use super::delta::{Rule, convolution};
use super::dry::{Ghost, Run, Var};
use super::ops::{self, Adapter, GroupedLinear, LayerNorm, Linear, RmsNorm};

/// The parameters that a recipe trains, by name in the module.
pub(super) struct Trained<'a> {
    /// True if adapters drop some of their inputs.
    pub(super) drops: bool,
    /// The weights trained whole.
    pub(super) whole: &'a BTreeMap<String, usize>,
    /// The layers with adapters, by name in the module.
    pub(super) adapted: &'a HashMap<String, AdaptedLayer>,
    /// The devices that divide the experts.
    pub(super) expert_parallel: usize,
}

impl Trained<'_> {
    /// True if a weight below a name is trained whole.
    pub(super) fn below(&self, path: &str) -> bool {
        let mut from = self
            .whole
            .range::<str, _>((Bound::Included(path), Bound::Unbounded));
        from.next().is_some_and(|(name, _)| name.starts_with(path))
    }

    fn adapter(&self, path: &str) -> Option<Adapter> {
        let layer = self.adapted.get(path)?;
        Some(Adapter {
            rank: layer.rank,
            is_scaled: layer.scale != 1.0,
            drops: self.drops,
        })
    }
}

/// The layers below a name, all of one part.
struct Scope<'a> {
    trained: &'a Trained<'a>,
    path: String,
    is_trained: bool,
}

impl<'a> Scope<'a> {
    fn new(trained: &'a Trained<'a>, path: String) -> Self {
        Self {
            trained,
            is_trained: trained.below(&format!("{path}.")),
            path,
        }
    }

    fn linear(&self, name: &str, [inputs, outputs]: [usize; 2], has_bias: bool) -> Linear {
        Linear {
            inputs,
            outputs,
            has_bias,
            is_trained: self.is_trained,
            adapter: self.trained.adapter(&format!("{}.{name}", self.path)),
        }
    }
}

/// Gate, up and down.
#[derive(Clone, Debug)]
pub(super) struct FeedForward {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    /// Channels between up and down if one matrix computes gate and up.
    joined: Option<usize>,
    activation: Act,
}

/// An activation, by what it allocates.
#[derive(Clone, Copy, Debug)]
enum Act {
    Silu,
    QuickGelu,
    Gelu,
    GeluTanh,
}

impl FeedForward {
    fn forward(&self, run: &Run, x: Var) -> Var {
        let (gate, up) = match (&self.gate, self.joined) {
            (Some(gate), _) => {
                let gate = gate.forward(run, x.clone());
                (Some(gate), self.up.forward(run, x))
            }
            (None, Some(_)) => {
                let both = self.up.forward(run, x);
                let half = both.value.elems / 2;
                let gate = ops::narrowed(run, both.clone(), half);
                (Some(gate), ops::narrowed(run, both, half))
            }
            (None, None) => (None, self.up.forward(run, x)),
        };
        let hidden = match (gate, self.activation) {
            (Some(gate), Act::Silu) => ops::swiglu(run, gate, up),
            (Some(gate), activation) => {
                let gate = activation.apply(run, gate);
                ops::multiply(run, gate, up)
            }
            (None, activation) => activation.apply(run, up),
        };
        self.down.forward(run, hidden)
    }
}

impl Act {
    fn of(config: &VisionConfig) -> Self {
        match config.activation {
            vlm_models::Activation::Silu => Self::Silu,
            vlm_models::Activation::QuickGelu => Self::QuickGelu,
            vlm_models::Activation::Gelu => Self::Gelu,
            vlm_models::Activation::GeluTanh => Self::GeluTanh,
        }
    }

    fn apply(self, run: &Run, x: Var) -> Var {
        match self {
            Self::Silu => {
                let sigmoid = ops::function(run, x.clone());
                ops::multiply(run, x, sigmoid)
            }
            Self::QuickGelu => ops::quick_gelu(run, x),
            Self::Gelu => ops::function(run, x),
            Self::GeluTanh => ops::gelu_tanh(run, x),
        }
    }
}

/// A router, and experts that have equally many tokens, on all ranks that divide them.
struct Experts {
    /// In f32 if it chooses by sigmoids.
    router: Linear,
    is_wide: bool,
    gate_up: GroupedLinear,
    down: GroupedLinear,
    per_token: usize,
    is_normalised: bool,
    /// True if ranks exchange the rows of experts.
    is_divided: bool,
    /// The expert of all tokens, and its gate.
    shared: Option<(FeedForward, Option<Linear>)>,
}

impl Experts {
    fn new(scope: &Scope<'_>, channels: usize, config: &ExpertConfig) -> Self {
        let (hidden, is_trained) = (config.intermediate_size, scope.is_trained);
        let matrices = |name: &str, [inputs, outputs]: [usize; 2]| {
            let path = format!("{}.mlp.experts.{name}", scope.path);
            GroupedLinear {
                groups: config.experts / scope.trained.expert_parallel,
                inputs,
                outputs,
                is_trained,
                adapter: scope.trained.adapter(&path),
            }
        };
        let linear = |name: &str, sizes| scope.linear(&format!("mlp.{name}"), sizes, false);
        let shared = config.shared_size.map(|size| {
            let network = FeedForward {
                gate: Some(linear("shared_expert.gate_proj", [channels, size])),
                up: linear("shared_expert.up_proj", [channels, size]),
                down: linear("shared_expert.down_proj", [size, channels]),
                joined: None,
                activation: Act::Silu,
            };
            let has_gate = config.has_shared_gate;
            (
                network,
                has_gate.then(|| linear("shared_expert_gate.0", [channels, 1])),
            )
        });
        Self {
            router: linear("gate", [channels, config.experts]),
            is_wide: config.groups.is_some(),
            gate_up: matrices("gate_up_proj", [channels, 2 * hidden]),
            down: matrices("down_proj", [hidden, channels]),
            per_token: config.per_token,
            is_normalised: config.is_normalised,
            is_divided: scope.trained.expert_parallel > 1,
            shared,
        }
    }

    fn forward(&self, run: &Run, x: Var) -> Var {
        let (channels, wide) = (self.gate_up.inputs, run.types.wide);
        let tokens = x.value.elems / channels;
        let rows = tokens * self.per_token;
        let logits = match self.is_wide {
            true => {
                let x = ops::cast(run, x.clone(), wide);
                self.router.forward(run, x)
            }
            false => self.router.forward(run, x.clone()),
        };
        let logits = ops::cast(run, logits, wide);
        let probabilities = ops::function(run, logits);
        let mut shares = ops::select(run, probabilities, rows);
        if self.is_normalised {
            shares = ops::function(run, shares);
        }
        // Received in the order of ranks, then sorted by expert; and back.
        let exchanged = |rows: Var| match self.is_divided {
            true => {
                let elements = rows.value.elems;
                let received = ops::select(run, rows, elements);
                ops::select(run, received, elements)
            }
            false => rows,
        };
        let sorted = exchanged(ops::routed_rows(run, x.clone(), rows * channels));
        let both = self.gate_up.forward(run, sorted);
        let gated = ops::swiglu_halves(run, both);
        let outputs = exchanged(self.down.forward(run, gated));
        let sum = ops::routed_sum(run, [outputs, shares], tokens * channels);
        match &self.shared {
            Some((network, Some(gate))) => {
                let open = gate.forward(run, x.clone());
                let open = ops::function(run, open);
                let shared = network.forward(run, x);
                let shared = ops::weighted_sum(run, [shared, open], tokens * channels);
                ops::add(run, sum, shared)
            }
            Some((network, None)) => {
                let shared = network.forward(run, x);
                ops::add(run, sum, shared)
            }
            None => sum,
        }
    }
}

/// The feed-forward network of a layer.
enum Network {
    Dense(FeedForward),
    Experts(Experts),
}

impl Network {
    fn forward(&self, run: &Run, x: Var) -> Var {
        match self {
            Self::Dense(network) => network.forward(run, x),
            Self::Experts(network) => network.forward(run, x),
        }
    }
}

/// A layer of the decoder.
pub(super) struct Layer {
    input_norm: RmsNorm,
    mixing: Mixing,
    /// The norms of outputs, and of the network's input.
    mixed_norm: Option<RmsNorm>,
    network_norm: RmsNorm,
    network: Network,
    output_norm: Option<RmsNorm>,
}

enum Mixing {
    Attention(SelfAttention),
    Delta(DeltaAttention),
}

struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    has_norms: bool,
    has_gate: bool,
}

struct DeltaAttention {
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    out: Linear,
    norm: RmsNorm,
    config: DeltaConfig,
    channels: usize,
    is_trained: bool,
}

impl Layer {
    pub(super) fn new(config: &TextConfig, index: usize, trained: &Trained<'_>) -> Self {
        let path = format!("language_model.layers.{index}");
        let scope = Scope::new(trained, path);
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let norm = || RmsNorm {
            channels: hidden,
            is_trained: scope.is_trained,
            unit_offset: config.unit_offset,
        };
        let has_state = |delta: &&DeltaConfig| !delta.full_attention_layers.contains(&index);
        let mixing = match config.delta.as_ref().filter(has_state) {
            Some(delta) => Mixing::Delta(DeltaAttention::new(&scope, hidden, delta)),
            None => Mixing::Attention(SelfAttention::new(&scope, config)),
        };
        let (own_gate, bias) = (!config.joined_gate, config.mlp_bias);
        let up = if own_gate { inner } else { 2 * inner };
        let experts = config.experts.as_ref();
        let network = match experts.filter(|experts| !experts.dense_layers.contains(&index)) {
            Some(experts) => Network::Experts(Experts::new(&scope, hidden, experts)),
            None => Network::Dense(FeedForward {
                gate: own_gate.then(|| scope.linear("mlp.gate_proj", [hidden, inner], bias)),
                up: scope.linear("mlp.up_proj", [hidden, up], bias),
                down: scope.linear("mlp.down_proj", [inner, hidden], bias),
                joined: config.joined_gate.then_some(inner),
                activation: Act::Silu,
            }),
        };
        Self {
            input_norm: norm(),
            mixing,
            mixed_norm: config.output_norms.then(norm),
            network_norm: norm(),
            network,
            output_norm: config.output_norms.then(norm),
        }
    }

    pub(super) fn trains(&self) -> bool {
        let mut linears: Vec<&Linear> = Vec::new();
        if let Network::Dense(network) = &self.network {
            linears.extend([&network.up, &network.down]);
            linears.extend(&network.gate);
        }
        match &self.mixing {
            Mixing::Attention(of) => linears.extend([&of.q, &of.k, &of.v, &of.o]),
            Mixing::Delta(of) => linears.extend([&of.qkv, &of.z, &of.b, &of.a, &of.out]),
        }
        self.input_norm.is_trained || linears.iter().any(|linear| linear.adapter.is_some())
    }

    pub(super) fn forward(&self, run: &Run, hidden: Var, shape: &MicroShape) -> Var {
        let normalised = self.input_norm.forward(run, hidden.clone());
        let mixed = match &self.mixing {
            Mixing::Attention(attention) => attention.forward(run, normalised, shape.tokens),
            Mixing::Delta(delta) => delta.forward(run, normalised, shape),
        };
        let mixed = normalised_by(run, self.mixed_norm.as_ref(), mixed);
        let hidden = ops::add(run, hidden, mixed);
        let normalised = self.network_norm.forward(run, hidden.clone());
        let changed = self.network.forward(run, normalised);
        let changed = normalised_by(run, self.output_norm.as_ref(), changed);
        ops::add(run, hidden, changed)
    }
}

fn normalised_by(run: &Run, norm: Option<&RmsNorm>, x: Var) -> Var {
    match norm {
        Some(norm) => norm.forward(run, x),
        None => x,
    }
}

impl SelfAttention {
    fn new(scope: &Scope<'_>, config: &TextConfig) -> Self {
        let head_dim = config.rotation.head_dim();
        let hidden = config.hidden_size;
        let from_hidden = |name: &str, heads: usize| {
            scope.linear(name, [hidden, heads * head_dim], config.attention_bias)
        };
        let q_parts = if config.output_gate { 2 } else { 1 };
        let channels = config.heads * head_dim;
        Self {
            q: from_hidden("self_attn.q_proj", q_parts * config.heads),
            k: from_hidden("self_attn.k_proj", config.kv_heads),
            v: from_hidden("self_attn.v_proj", config.kv_heads),
            o: scope.linear("self_attn.o_proj", [channels, hidden], config.output_bias),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
            has_norms: config.qk_norm,
            has_gate: config.output_gate,
        }
    }

    fn forward(&self, run: &Run, hidden: Var, tokens: usize) -> Var {
        let q = self.q.forward(run, hidden.clone());
        let k = self.k.forward(run, hidden.clone());
        let v = self.v.forward(run, hidden);
        let (q, gate) = if self.has_gate {
            let half = q.value.elems / 2;
            let gate = ops::narrowed(run, q.clone(), half);
            let q = ops::narrowed(run, q, half);
            (q, Some(gate.seen_as(Ghost::copied)))
        } else {
            (q, None)
        };
        let [q, k] = [q, k].map(|x| {
            if self.has_norms {
                ops::normed_and_rotated(run, x, self.head_dim, self.q.is_trained)
            } else {
                ops::rotated(run, x)
            }
        });
        let attended = match run.context {
            1 => ops::attention(run, [q, k, v], [tokens, self.heads]),
            _ => self.attend_in_parts(run, [q, k, v], tokens),
        };
        let attended = match gate {
            Some(gate) => {
                let sigmoid = ops::function(run, gate);
                ops::multiply(run, attended, sigmoid)
            }
            None => attended,
        };
        self.o.forward(run, attended)
    }
}

impl SelfAttention {
    /// Attention of heads that ranks divide, from and to a rank's tokens.
    fn attend_in_parts(&self, run: &Run, [q, k, v]: [Var; 3], tokens: usize) -> Var {
        let count = run.context;
        let groups = TokenShare::head_groups(count, self.heads);
        let (all, heads) = (tokens * count, self.heads / groups);
        let of_keys = (self.kv_heads / groups).max(1) * self.head_dim;
        let queries = all * groups / count * heads * self.head_dim;
        let given = {
            let q = ops::select(run, q, queries);
            let both = ops::cat(run, k, v);
            let both = ops::select(run, both, 2 * tokens * count * of_keys);
            ops::cat(run, q, both)
        };
        let received = ops::exchanged(run, given, queries + 2 * all * of_keys);
        let q = ops::select(run, received.clone(), queries);
        let both = ops::select(run, received, 2 * all * of_keys);
        let [k, v] = [(); 2].map(|()| {
            let x = ops::narrowed(run, both.clone(), all * of_keys);
            x.seen_as(Ghost::copied)
        });
        drop(both);
        let mixed = ops::attention(run, [q, k, v], [all * groups / count, heads]);
        let mixed = mixed.seen_as(Ghost::copied);
        let back = ops::exchanged(run, mixed, queries);
        ops::select(run, back, queries)
    }
}

impl DeltaAttention {
    fn new(scope: &Scope<'_>, hidden: usize, config: &DeltaConfig) -> Self {
        let values = config.heads * config.value_dim;
        let channels = 2 * config.key_heads * config.key_dim + values;
        let linear = |name: &str, sizes| scope.linear(&format!("linear_attn.{name}"), sizes, false);
        Self {
            qkv: linear("in_proj_qkv", [hidden, channels]),
            z: linear("in_proj_z", [hidden, values]),
            b: linear("in_proj_b", [hidden, config.heads]),
            a: linear("in_proj_a", [hidden, config.heads]),
            out: linear("out_proj", [values, hidden]),
            norm: RmsNorm {
                channels: config.value_dim,
                is_trained: scope.is_trained,
                unit_offset: false,
            },
            config: config.clone(),
            channels,
            is_trained: scope.is_trained,
        }
    }

    fn forward(&self, run: &Run, hidden: Var, shape: &MicroShape) -> Var {
        let config = &self.config;
        let (narrow, tokens) = (run.types.narrow, shape.tokens);
        let hidden = if shape.rows > 1 {
            ops::scaled(run, hidden)
        } else {
            hidden
        };
        let mixed = self.qkv.forward(run, hidden.clone());
        let z = self.z.forward(run, hidden.clone());
        let b = self.b.forward(run, hidden.clone());
        let a = self.a.forward(run, hidden);
        let [g, beta] = self.rates(run, a, b);
        let weight = run.weight(self.channels * config.taps, narrow, self.is_trained);
        let is_masked = shape.rows <= 1 && shape.sequences > 1;
        let mixed = convolution(run, mixed, weight, config.taps, is_masked);
        let keys = tokens * config.key_heads * config.key_dim;
        let parts = [keys, keys, tokens * config.heads * config.value_dim];
        let [q, k, v] = parts.map(|elems| {
            let part = ops::narrowed(run, mixed.clone(), elems);
            part.seen_as(Ghost::copied)
        });
        drop(mixed);
        let rows = shape.rows.max(1);
        let rule = Rule {
            rows,
            tokens: tokens / rows,
            key_heads: config.key_heads,
            heads: config.heads,
            key_dim: config.key_dim,
            value_dim: config.value_dim,
        };
        let out = match run.context {
            1 => rule.forward(run, [q, k, v, g, beta]),
            _ => rule.forward_part(run, [q, k, v, g, beta]),
        };
        let out = self.norm.forward(run, out);
        let gated = ops::swiglu(run, z, out);
        self.out.forward(run, gated)
    }

    /// The logarithm of each token's decay, and its rate of writing.
    fn rates(&self, run: &Run, a: Var, b: Var) -> [Var; 2] {
        let wide = run.types.wide;
        let heads = self.config.heads;
        let [bias, rate] = [(); 2].map(|()| run.weight(heads, wide, self.is_trained));
        let a = ops::add(run, ops::cast(run, a, wide), bias.detached());
        let power = ops::function(run, ops::scaled(run, a.clone()));
        let softplus = ops::function(run, power);
        drop(a);
        let g = ops::multiply(run, softplus, rate.detached());
        [g, ops::function(run, ops::cast(run, b, wide))]
    }
}

/// A norm of the tower.
#[derive(Clone, Copy)]
enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn new(channels: usize, is_rms: bool, is_trained: bool) -> Self {
        if is_rms {
            return Self::Rms(RmsNorm {
                channels,
                is_trained,
                unit_offset: false,
            });
        }
        Self::Layer(LayerNorm {
            channels,
            is_trained,
        })
    }

    fn forward(&self, run: &Run, x: Var) -> Var {
        match self {
            Self::Layer(norm) => norm.forward(run, x),
            Self::Rms(norm) => norm.forward(run, x),
        }
    }
}

/// A block of the tower.
pub(super) struct Block {
    norms: [Norm; 2],
    qkv: Linear,
    proj: Linear,
    heads: usize,
    network: FeedForward,
    is_trained: bool,
}

impl Block {
    pub(super) fn new(config: &VisionConfig, index: usize, trained: &Trained<'_>) -> Self {
        let path = format!("visual.blocks.{index}");
        let scope = Scope::new(trained, path);
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.bias);
        let gate = || scope.linear("mlp.gate_proj", [hidden, inner], bias);
        Self {
            norms: [Norm::new(hidden, config.rms_norm, scope.is_trained); 2],
            qkv: scope.linear("attn.qkv", [hidden, 3 * hidden], config.qkv_bias),
            proj: scope.linear("attn.proj", [hidden, hidden], bias),
            heads: config.heads,
            network: FeedForward {
                gate: config.gated.then(gate),
                up: scope.linear("mlp.up_proj", [hidden, inner], bias),
                down: scope.linear("mlp.down_proj", [inner, hidden], bias),
                joined: None,
                activation: Act::of(config),
            },
            is_trained: scope.is_trained,
        }
    }

    pub(super) fn trains(&self) -> bool {
        let network = &self.network;
        let mut linears = vec![&self.qkv, &self.proj, &network.up, &network.down];
        linears.extend(&network.gate);
        self.is_trained || linears.iter().any(|linear| linear.adapter.is_some())
    }

    pub(super) fn forward(&self, run: &Run, hidden: Var, patches: usize) -> Var {
        let normalised = self.norms[0].forward(run, hidden.clone());
        let mixed = self.attend(run, normalised, patches);
        let hidden = ops::add(run, hidden, mixed);
        let normalised = self.norms[1].forward(run, hidden.clone());
        let changed = self.network.forward(run, normalised);
        ops::add(run, hidden, changed)
    }

    fn attend(&self, run: &Run, hidden: Var, patches: usize) -> Var {
        let qkv = self.qkv.forward(run, hidden);
        let third = qkv.value.elems / 3;
        let [q, k, v] = [(); 3].map(|()| {
            let part = ops::narrowed(run, qkv.clone(), third);
            part.seen_as(Ghost::copied)
        });
        drop(qkv);
        let [q, k] = [q, k].map(|x| ops::rotated(run, x));
        let attended = ops::attention(run, [q, k, v], [patches, self.heads]);
        self.proj.forward(run, attended)
    }
}

/// The layers between the tower and the decoder.
pub(super) enum Merger {
    Square(Box<Square>),
    Downsampling(Box<Downsampling>),
}

pub(super) struct Square {
    norm: Norm,
    network: FeedForward,
}

pub(super) struct Downsampling {
    before: RmsNorm,
    convolution: Linear,
    proj: Linear,
    after: LayerNorm,
    network: FeedForward,
}

impl Merger {
    pub(super) fn new(config: &VisionConfig, trained: &Trained<'_>) -> Self {
        let scope = Scope::new(trained, "visual.merger".to_owned());
        if !config.downsamples {
            return Self::square(config, &scope, false);
        }
        let (hidden, outputs) = (config.hidden_size, config.out_hidden_size);
        let square = config.spatial_merge * config.spatial_merge;
        let inner = config.merger_size;
        Self::Downsampling(Box::new(Downsampling {
            before: RmsNorm {
                channels: hidden,
                is_trained: scope.is_trained,
                unit_offset: false,
            },
            convolution: Linear {
                inputs: hidden * square,
                outputs,
                has_bias: true,
                is_trained: scope.is_trained,
                adapter: None,
            },
            proj: scope.linear("proj", [outputs, outputs], false),
            after: LayerNorm {
                channels: outputs,
                is_trained: scope.is_trained,
            },
            network: FeedForward {
                gate: Some(scope.linear("mlp.gate_proj", [outputs, inner], false)),
                up: scope.linear("mlp.up_proj", [outputs, inner], false),
                down: scope.linear("mlp.down_proj", [inner, outputs], false),
                joined: None,
                activation: Act::of(config),
            },
        }))
    }

    /// That of a feature of the decoder.
    pub(super) fn of_feature(config: &VisionConfig, index: usize, trained: &Trained<'_>) -> Self {
        let path = format!("visual.deepstack_merger_list.{index}");
        Self::square(config, &Scope::new(trained, path), true)
    }

    fn square(config: &VisionConfig, scope: &Scope<'_>, normalises_merged: bool) -> Self {
        let merged = config.hidden_size * config.spatial_merge * config.spatial_merge;
        let channels = if normalises_merged {
            merged
        } else {
            config.hidden_size
        };
        let (inner, outputs) = (config.merger_size, config.out_hidden_size);
        Self::Square(Box::new(Square {
            norm: Norm::new(channels, config.rms_norm, scope.is_trained),
            network: FeedForward {
                gate: None,
                up: scope.linear("mlp.up_proj", [merged, inner], true),
                down: scope.linear("mlp.down_proj", [inner, outputs], true),
                joined: None,
                activation: Act::Gelu,
            },
        }))
    }

    pub(super) fn trains(&self) -> bool {
        let (network, others, is_trained) = match self {
            Self::Square(of) => (&of.network, None, of.network.up.is_trained),
            Self::Downsampling(of) => (&of.network, Some(&of.proj), of.proj.is_trained),
        };
        let linears = [&network.up, &network.down].into_iter();
        let mut linears = linears.chain(&network.gate).chain(others);
        is_trained || linears.any(|linear| linear.adapter.is_some())
    }

    pub(super) fn forward(&self, run: &Run, hidden: Var) -> Var {
        match self {
            Self::Square(of) => {
                let normalised = of.norm.forward(run, hidden);
                of.network.forward(run, normalised)
            }
            Self::Downsampling(of) => {
                let hidden = of.before.forward(run, hidden);
                let hidden = hidden.seen_as(Ghost::copied);
                let hidden = of.convolution.forward(run, hidden);
                let hidden = of.proj.forward(run, hidden);
                let hidden = of.after.forward(run, hidden);
                let hidden = ops::function(run, hidden);
                of.network.forward(run, hidden)
            }
        }
    }
}
