//! The layers of both towers: attention, feed-forward network, norm.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{DType, Device, Tensor};
use burn_attention::{Attention, GradientSource, gelu, gelu_tanh};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::linear::{Draw, Linear};

/// The initialisation of weights and biases of convolutions in torch.
pub(crate) const OF_CONVOLUTION: Initializer = Initializer::KaimingUniform {
    gain: 0.577_350_269_189_625_8, // 1 / sqrt 3
    fan_out_only: false,
};

/// The function between the two matrices of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x sigmoid(x)
    #[serde(alias = "swish")]
    Silu,
    /// x sigmoid(1.702 x)
    QuickGelu,
    /// x times the standard normal distribution function of x
    Gelu,
    /// Gelu in its tanh approximation
    #[serde(rename = "gelu_pytorch_tanh")]
    GeluTanh,
}

impl Activation {
    pub(crate) fn apply<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Silu => silu(x),
            Self::QuickGelu => x.clone() * sigmoid(x * 1.702),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
        }
    }
}

/// `down(activation(up(x)))`, or gated `down(activation(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub(crate) struct FeedForward {
    gate_proj: Option<Linear>,
    /// If gate and up are joined, the matrix of both, gate first.
    up_proj: Linear,
    down_proj: Linear,
    #[module(skip)]
    gate: Gate,
    #[module(skip)]
    activation: Activation,
}

/// The source of a feed-forward network's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    None,
    /// A separate matrix.
    Own,
    /// The matrix that also computes the gated value.
    Joined,
}

/// The sizes of a [`FeedForward`].
pub(crate) struct FeedForwardConfig {
    pub(crate) input: usize,
    pub(crate) hidden: usize,
    pub(crate) output: usize,
    pub(crate) gate: Gate,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
}

impl FeedForwardConfig {
    pub(crate) fn init(&self, device: &Device) -> FeedForward {
        let linear = |from, to| Linear::new(from, to, self.bias, device);
        let up = match self.gate {
            Gate::Joined => 2 * self.hidden,
            Gate::None | Gate::Own => self.hidden,
        };
        FeedForward {
            gate_proj: (self.gate == Gate::Own).then(|| linear(self.input, self.hidden)),
            up_proj: linear(self.input, up),
            down_proj: linear(self.hidden, self.output),
            gate: self.gate,
            activation: self.activation,
        }
    }
}

impl FeedForward {
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>, draw: Draw) -> Result<Tensor<D>> {
        match self.hidden(x, draw)? {
            (Some(gate), up) => self.down_proj.forward_gated([gate, up], None, draw),
            (None, hidden) => self.down_proj.forward(hidden, draw),
        }
    }

    /// y and the output for x.
    pub(crate) fn forward_onto<const D: usize>(
        &self,
        y: Tensor<D>,
        x: Tensor<D>,
        draw: Draw,
    ) -> Result<Tensor<D>> {
        match self.hidden(x, draw)? {
            (Some(gate), up) => self.down_proj.forward_gated([gate, up], Some(y), draw),
            (None, hidden) => self.down_proj.forward_onto(y, hidden, draw),
        }
    }

    /// As [`Linear::source`].
    pub(crate) fn source<const D: usize>(
        &self,
        x: Tensor<D>,
        draw: Draw,
        gradient: Tensor<D>,
    ) -> Result<GradientSource> {
        match self.hidden(x, draw)? {
            (Some(gate), up) => self.down_proj.source_gated([gate, up], draw, gradient),
            (None, hidden) => self.down_proj.source(hidden, draw, gradient),
        }
    }

    /// The input of the last layer: the second tensor, times silu of the first if there is one.
    fn hidden<const D: usize>(
        &self,
        x: Tensor<D>,
        draw: Draw,
    ) -> Result<(Option<Tensor<D>>, Tensor<D>)> {
        let (gate, up) = match (&self.gate_proj, self.gate) {
            (Some(gate), _) => {
                let layers = [gate, &self.up_proj];
                let [gate, up] = Linear::forward_together(layers, x, draw)?;
                (Some(gate), up)
            }
            (None, Gate::Joined) => {
                let both = self.up_proj.forward(x, draw)?;
                let hidden = both.dims()[D - 1] / 2;
                let gate = both.clone().narrow(D - 1, 0, hidden);
                (Some(gate), both.narrow(D - 1, hidden, hidden))
            }
            (None, _) => (None, self.up_proj.forward(x, draw)?),
        };
        Ok(match (gate, self.activation) {
            (Some(gate), Activation::Silu) => (Some(gate), up),
            (Some(gate), activation) => (None, activation.apply(gate) * up),
            (None, activation) => (None, activation.apply(up)),
        })
    }

    /// The linear layers by name.
    pub(crate) fn linears(&mut self) -> Vec<(&'static str, &mut Linear)> {
        let gate = self.gate_proj.iter_mut().map(|gate| ("gate_proj", gate));
        gate.chain([
            ("up_proj", &mut self.up_proj),
            ("down_proj", &mut self.down_proj),
        ])
        .collect()
    }
}

/// A norm of the vision tower.
#[derive(Module, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub(crate) fn new(channels: usize, rms: bool, epsilon: f64, device: &Device) -> Self {
        if rms {
            Self::Rms(RmsNorm::new(channels, epsilon, device))
        } else {
            Self::Layer(LayerNorm::new(channels, epsilon, device))
        }
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
        }
    }
}

/// A layer norm as one operation that keeps only its input.
#[derive(Module, Debug)]
pub(crate) struct LayerNorm {
    weight: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl LayerNorm {
    pub(crate) fn new(channels: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: Initializer::Ones.init([channels], device),
            bias: Initializer::Zeros.init([channels], device),
            epsilon,
        }
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        let (weight, bias) = (self.weight.val(), self.bias.val());
        Ok(burn_attention::layer_norm(x, weight, bias, self.epsilon)?)
    }
}

/// x / sqrt(mean(x^2) + epsilon) * weight, or * (1 + weight), as one operation that keeps only its
/// input.
#[derive(Module, Debug)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Param<Tensor<1>>,
    #[module(skip)]
    pub(crate) epsilon: f64,
    /// True if 1 is added to the weight.
    #[module(skip)]
    pub(crate) unit_offset: bool,
}

impl RmsNorm {
    pub(crate) fn new(channels: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: Initializer::Ones.init([channels], device),
            epsilon,
            unit_offset: false,
        }
    }

    /// Creates a norm that multiplies by 1 + weight.
    pub(crate) fn with_unit_offset(channels: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: Initializer::Zeros.init([channels], device),
            epsilon,
            unit_offset: true,
        }
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        let mut weight = self.weight.val();
        if self.unit_offset {
            // 1 + weight is too imprecise in 16 bits.
            let wide = match x.dtype() {
                DType::F64 => DType::F64,
                _ => DType::F32,
            };
            weight = weight.cast(wide) + 1.0;
        }
        Ok(burn_attention::rms_norm(x, weight, self.epsilon)?)
    }
}

/// The rotated k and v of the tokens so far, `[batch, kv_heads, tokens, head_dim]`. For a layer
/// with a state: the last inputs of its convolution, `[batch, 1, taps - 1, channels]`, and the
/// state, `[batch, heads, key_dim, value_dim]`.
pub(crate) type LayerCache = Option<(Tensor<4>, Tensor<4>)>;

/// Appends k and v of new tokens to those of the cache; returns all, which the cache keeps.
pub(crate) fn append(
    cache: &mut LayerCache,
    mut k: Tensor<4>,
    mut v: Tensor<4>,
) -> (Tensor<4>, Tensor<4>) {
    if let Some((earlier_k, earlier_v)) = cache.take() {
        k = Tensor::cat(vec![earlier_k, k], 2);
        v = Tensor::cat(vec![earlier_v, v], 2);
    }
    *cache = Some((k.clone(), v.clone()));
    (k, v)
}

/// Computes attention and concatenates the heads of each token.
///
/// # Shapes
/// - q: `[batch, heads, queries, head_dim]`; k, v: `[batch, kv_heads, keys, head_dim]`
/// - out: `[batch, queries, heads * head_dim]`
pub(crate) fn attend(
    attention: &Attention,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
) -> Result<Tensor<3>> {
    let [batch, heads, queries, head_dim] = q.dims();
    let mixed = attention.try_forward(q, k, v)?;
    Ok(mixed
        .swap_dims(1, 2)
        .reshape([batch, queries, heads * head_dim]))
}
