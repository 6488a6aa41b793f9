//! Layers of linear attention: a short convolution, the gated delta rule, a gated norm.

use burn::module::{Module, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::activation::{sigmoid, silu, softplus};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_attention::{GatedDelta, Sequences, gated_delta_step, short_convolution, swiglu};

use crate::config::DeltaConfig;
use crate::error::Result;
use crate::layers::{LayerCache, OF_CONVOLUTION, RmsNorm};
use crate::linear::{Draw, Linear};
use crate::tensors::indices;

/// The sequence structure of a step's tokens, for layers with a state.
#[derive(Clone, Debug)]
pub(crate) struct Recurrence {
    sequences: Sequences,
    rule: GatedDelta,
    /// `[rows, tokens, 1]`: 1 for tokens and 0 for padding, if there is padding.
    attended: Option<Tensor<3>>,
    /// For each row the indices of the last inputs of a convolution among the flat tokens; one past
    /// them stands for zeros.
    window: Tensor<1, Int>,
}

impl Recurrence {
    /// Creates the structure of rows of `tokens` tokens, or of one row of packed sequences, for a
    /// convolution of `taps`.
    pub(crate) fn new(
        sequences: Sequences,
        attended: &[bool],
        taps: usize,
        device: &Device,
    ) -> Self {
        let tokens = sequences.tokens();
        let rows = attended.len() / tokens.max(1);
        let zeros = attended.len();
        let mut window = Vec::with_capacity(rows * (taps - 1));
        for (row, flags) in attended.chunks(tokens.max(1)).enumerate() {
            let end = flags
                .iter()
                .rposition(|flag| *flag)
                .map_or(0, |last| last + 1);
            let back = (1..taps).rev();
            window.extend(back.map(|back| match end.checked_sub(back) {
                Some(token) => row * tokens + token,
                None => zeros,
            }));
        }
        let mask = attended.contains(&false).then(|| {
            let mask: Vec<f32> = attended
                .iter()
                .map(|flag| f32::from(u8::from(*flag)))
                .collect();
            let data = TensorData::new(mask, [rows, tokens, 1]);
            Tensor::from_data(data, (device, DType::F32))
        });
        Self {
            rule: GatedDelta::new(sequences.clone()),
            sequences,
            attended: mask,
            window: indices(window, device),
        }
    }

    /// Sets padding to zero.
    fn masked(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.attended {
            Some(attended) => {
                let attended = attended.clone().cast(x.dtype());
                x * attended
            }
            None => x,
        }
    }

    /// The last inputs of the convolution in each row, `[rows, 1, taps - 1, channels]`.
    fn last(&self, x: &Tensor<3>) -> Tensor<4> {
        let [rows, tokens, channels] = x.dims();
        let zeros = Tensor::zeros([1, channels], (&x.device(), x.dtype()));
        let flat = x.clone().reshape([rows * tokens, channels]);
        let [inputs] = self.window.dims();
        Tensor::cat(vec![flat, zeros], 0)
            .select(0, self.window.clone())
            .reshape([rows, 1, inputs / rows.max(1), channels])
    }
}

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

    /// Attends. `recurrence` is that of the tokens of a prompt or step; `None` means one more token
    /// in each row, whose cache has the convolution's last inputs and the state.
    pub(crate) fn forward(
        &self,
        hidden: Tensor<3>,
        recurrence: Option<&Recurrence>,
        cache: Option<&mut LayerCache>,
        draw: Draw,
    ) -> Result<Tensor<3>> {
        let config = &self.config;
        let hidden = match recurrence {
            Some(recurrence) => recurrence.masked(hidden),
            None => hidden,
        };
        let [rows, tokens, _] = hidden.dims();
        let layers = [
            &self.in_proj_qkv,
            &self.in_proj_z,
            &self.in_proj_b,
            &self.in_proj_a,
        ];
        let [mixed, z, b, a] = Linear::forward_together(layers, hidden, draw)?;
        let [mut g, mut beta] = self.rates(a, b);

        let weight = self.conv1d.weight.val();
        let weight = weight.reshape([config.channels(), config.taps]);
        let out = match (recurrence, cache) {
            (Some(recurrence), cache) => {
                // Padding leaves the state unchanged.
                [g, beta] = [g, beta].map(|x| recurrence.masked(x));
                let window = cache.is_some().then(|| recurrence.last(&mixed));
                let mixed = short_convolution(mixed, weight, &recurrence.sequences)?;
                let [q, k, v] = config.divided(mixed);
                let (out, state) = recurrence.rule.try_forward(q, k, v, g, beta)?;
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
                let inputs = Tensor::cat(vec![window, mixed.unsqueeze_dim::<4>(1)], 2);
                let taps = weight.transpose().unsqueeze::<4>();
                let convolved = silu((inputs.clone() * taps).sum_dim(2)).squeeze_dim::<3>(1);
                let one_token = |x: Tensor<4>| x.squeeze_dim::<3>(1);
                let token = config.divided(convolved).map(one_token);
                let rates = [g, beta].map(|x| x.squeeze_dim::<2>(1));
                let (out, state) = gated_delta_step(token, rates, state)?;
                if let Some(cache) = cache {
                    let window = inputs.narrow(2, 1, config.taps - 1);
                    *cache = Some((window, state));
                }
                out.unsqueeze_dim::<4>(1)
            }
        };
        let z = z.reshape([rows, tokens, config.heads, config.value_dim]);
        let gated = swiglu(z, self.norm.forward(out)?)?;
        let gated = gated.reshape([rows, tokens, config.heads * config.value_dim]);
        self.out_proj.forward(gated, draw)
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
