//! The layers of both towers: attention, feed-forward network, norm.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{gelu, gelu_approximate, sigmoid, silu};
use burn::tensor::{Device, Tensor};
use burn_attention::{Attention, swiglu};
use rope_burn::RotaryAngles;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::linear::{Draw, Linear};

/// Added to the variance in the vision tower's norms.
const VISION_NORM_EPS: f64 = 1e-6;

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
            Self::GeluTanh => gelu_approximate(x),
        }
    }
}

/// `down(activation(up(x)))`, or gated `down(activation(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub(crate) struct FeedForward {
    gate_proj: Option<Linear>,
    up_proj: Linear,
    down_proj: Linear,
    #[module(skip)]
    activation: Activation,
}

/// The sizes of a [`FeedForward`].
pub(crate) struct FeedForwardConfig {
    pub(crate) input: usize,
    pub(crate) hidden: usize,
    pub(crate) output: usize,
    pub(crate) gated: bool,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
}

impl FeedForwardConfig {
    pub(crate) fn init(&self, device: &Device) -> FeedForward {
        let linear = |from, to| Linear::new(from, to, self.bias, device);
        FeedForward {
            gate_proj: self.gated.then(|| linear(self.input, self.hidden)),
            up_proj: linear(self.input, self.hidden),
            down_proj: linear(self.hidden, self.output),
            activation: self.activation,
        }
    }
}

impl FeedForward {
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>, draw: Draw) -> Result<Tensor<D>> {
        let up = |x| self.up_proj.forward(x, draw);
        let hidden = match (&self.gate_proj, self.activation) {
            (Some(gate), Activation::Silu) => swiglu(gate.forward(x.clone(), draw), up(x))?,
            (Some(gate), activation) => activation.apply(gate.forward(x.clone(), draw)) * up(x),
            (None, activation) => activation.apply(up(x)),
        };
        Ok(self.down_proj.forward(hidden, draw))
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

/// The vision tower's norm.
#[derive(Module, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub(crate) fn new(channels: usize, rms: bool, device: &Device) -> Self {
        if rms {
            let config = RmsNormConfig::new(channels).with_epsilon(VISION_NORM_EPS);
            Self::Rms(config.init(device))
        } else {
            let config = LayerNormConfig::new(channels).with_epsilon(VISION_NORM_EPS);
            Self::Layer(config.init(device))
        }
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        match self {
            Self::Layer(norm) => Ok(norm.forward(x)),
            Self::Rms(norm) => rms_norm(norm, x),
        }
    }
}

/// The norm as one operation, which keeps its input alone.
pub(crate) fn rms_norm<const D: usize>(norm: &RmsNorm, x: Tensor<D>) -> Result<Tensor<D>> {
    let weight = norm.gamma.val();
    Ok(burn_attention::rms_norm(x, weight, norm.epsilon)?)
}

/// What all layers of a pass share.
#[derive(Clone, Copy)]
pub(crate) struct Common<'a> {
    pub(crate) angles: &'a RotaryAngles,
    pub(crate) attention: &'a Attention,
    pub(crate) draw: Draw,
}

/// Attends, and joins the heads of each token.
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
    let mixed = attention.try_forward(q, k, v, None)?;
    Ok(mixed
        .swap_dims(1, 2)
        .reshape([batch, queries, heads * head_dim]))
}
