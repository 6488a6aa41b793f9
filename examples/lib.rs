//! An attention layer of a vision-language model, which the examples train, decode with, and give
//! packed prompts.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_attention::Attention;
use rope_burn::rope_core::{AxisLayout, Layout, RotarySpec};
use rope_burn::{Result, Rotary, RotaryAngles};

/// Channels of a token.
pub const WIDTH: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;

/// Attention with grouped queries, whose only source of positions is MRoPE.
#[derive(Module, Debug)]
pub struct AttentionLayer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Has no parameters. Records do not contain it: save the configuration beside them.
    pub rotary: Rotary,
}

/// Rotated keys and values of earlier tokens, `[batch, kv_heads, tokens, head_dim]`.
pub type Cache = Option<(Tensor<4>, Tensor<4>)>;

impl AttentionLayer {
    /// A layer with random weights. Its 8 pairs of channels follow time, height and width in turn.
    /// theta is small because the grids of the examples are: long prompts take 10,000 and more.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn new(device: &Device) -> Result<Self> {
        let axes = AxisLayout::Striped(vec![3, 3, 2]);
        let spec = RotarySpec::builder(HEAD_DIM)
            .axis_layout(axes)
            .theta(2.0)
            .build()?;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Ok(Self {
            query: linear(WIDTH, HEADS * HEAD_DIM),
            key: linear(WIDTH, KV_HEADS * HEAD_DIM),
            value: linear(WIDTH, KV_HEADS * HEAD_DIM),
            output: linear(HEADS * HEAD_DIM, WIDTH),
            rotary: Rotary::new(spec, Layout::Bnsd),
        })
    }

    /// Attends over `hidden`, `[batch, tokens, WIDTH]`, and over the tokens in the cache, to which
    /// it adds its own.
    pub fn forward(
        &self,
        hidden: Tensor<3>,
        angles: &RotaryAngles,
        attention: &Attention,
        cache: &mut Cache,
    ) -> Tensor<3> {
        let [batch, tokens, _] = hidden.dims();
        let heads =
            |x: Tensor<3>, heads| x.reshape([batch, tokens, heads, HEAD_DIM]).swap_dims(1, 2);
        let q = heads(self.query.forward(hidden.clone()), HEADS);
        let k = heads(self.key.forward(hidden.clone()), KV_HEADS);
        let v = heads(self.value.forward(hidden), KV_HEADS);
        let (q, k) = self.rotary.forward(q, k, angles);
        let (k, v) = match cache.take() {
            Some((keys, values)) => (
                Tensor::cat(vec![keys, k], 2),
                Tensor::cat(vec![values, v], 2),
            ),
            None => (k, v),
        };
        *cache = Some((k.clone(), v.clone()));
        let out = attention.forward(q, k, v).swap_dims(1, 2);
        self.output
            .forward(out.reshape([batch, tokens, HEADS * HEAD_DIM]))
    }
}
