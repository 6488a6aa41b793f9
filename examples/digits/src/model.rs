//! A small vision-language decoder: patch and word embeddings, a few blocks of RMSNorm,
//! grouped-query attention with MRoPE and SwiGLU, and a linear layer that reads the last token.

use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu,
    SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::activation::softmax;
use rope_burn::{Rotary, RotaryAngles};

use crate::clip::{Clip, QUESTION_WORDS};
use crate::data::{CLASSES, PIXELS};

/// Standard deviation of the word embeddings at the start. Small, so that the embedding of `?` does
/// not outweigh what attention gathers for it from the question.
const EMBEDDING_STD: f64 = 0.02;

/// The sizes of a [`Model`].
#[derive(Config, Debug)]
pub(crate) struct ModelConfig {
    /// Words and numbers.
    pub vocabulary: usize,
    /// Channels of the residual stream.
    #[config(default = 64)]
    pub width: usize,
    /// Blocks.
    #[config(default = 2)]
    pub layers: usize,
    /// Heads of q.
    #[config(default = 4)]
    pub heads: usize,
    /// Heads of k and v.
    #[config(default = 2)]
    pub kv_heads: usize,
    /// Channels of a head.
    #[config(default = 32)]
    pub head_dim: usize,
    /// Hidden channels of the feed-forward network.
    #[config(default = 128)]
    pub hidden: usize,
}

/// Answers a question about a clip.
#[derive(Module, Debug)]
pub struct Model {
    patch: Linear,
    word: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

/// The result of a forward pass.
pub struct Output {
    /// `[batch, classes]`, read at the last token.
    pub logits: Tensor<2>,
    /// Of each layer, `[batch, heads, seq, seq]`; rows sum to one.
    pub attention: Vec<Tensor<4>>,
}

impl ModelConfig {
    /// Draws the weights. `rotary` rotates q and k in every layer; without it attention knows no
    /// positions.
    pub(crate) fn init(&self, rotary: Option<Rotary>, device: &Device) -> Model {
        Model {
            patch: LinearConfig::new(PIXELS, self.width).init(device),
            word: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: EMBEDDING_STD,
                })
                .init(device),
            blocks: (0..self.layers)
                .map(|_| self.block(rotary.clone(), device))
                .collect(),
            norm: RmsNormConfig::new(self.width).init(device),
            head: LinearConfig::new(self.width, CLASSES)
                .with_bias(false)
                .init(device),
        }
    }

    fn block(&self, rotary: Option<Rotary>, device: &Device) -> Block {
        let linear =
            |from: usize, to: usize| LinearConfig::new(from, to).with_bias(false).init(device);
        let biased = |from: usize, to: usize| LinearConfig::new(from, to).init(device);
        Block {
            attention_norm: RmsNormConfig::new(self.width).init(device),
            attention: Attention {
                query: biased(self.width, self.heads * self.head_dim),
                key: biased(self.width, self.kv_heads * self.head_dim),
                value: biased(self.width, self.kv_heads * self.head_dim),
                output: linear(self.heads * self.head_dim, self.width),
                rotary,
                query_norm: RmsNormConfig::new(self.head_dim).init(device),
                key_norm: RmsNormConfig::new(self.head_dim).init(device),
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            },
            feed_forward_norm: RmsNormConfig::new(self.width).init(device),
            feed_forward: FeedForward {
                gate: SwiGluConfig::new(self.width, self.hidden).init(device),
                down: linear(self.hidden, self.width),
            },
        }
    }
}

impl Model {
    /// Reads clips and questions.
    ///
    /// # Shapes
    /// - `patches`: `[batch, cells, pixels]`
    /// - `words`: `[batch, 1 + question words]`, `<start>` first
    /// - `mask`: `[1, 1, seq, seq]`, added to the attention scores
    pub fn forward(
        &self,
        patches: Tensor<3>,
        words: Tensor<2, Int>,
        mask: &Tensor<4>,
        angles: Option<&RotaryAngles>,
    ) -> Output {
        let words = self.word.forward(words);
        let start = words.clone().narrow(1, 0, 1);
        let question = words.narrow(1, 1, QUESTION_WORDS);
        let mut hidden = Tensor::cat(vec![start, self.patch.forward(patches), question], 1);

        let mut attention = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let weights;
            (hidden, weights) = block.forward(hidden, mask, angles);
            attention.push(weights);
        }

        let [_, tokens, _] = hidden.dims();
        let last = hidden.narrow(1, tokens - 1, 1).squeeze_dim::<2>(1);
        let logits = self.head.forward(self.norm.forward(last));
        Output { logits, attention }
    }
}

/// `hidden + attention(norm(hidden))`, then the same with the feed-forward network.
#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    feed_forward: FeedForward,
}

impl Block {
    fn forward(
        &self,
        hidden: Tensor<3>,
        mask: &Tensor<4>,
        angles: Option<&RotaryAngles>,
    ) -> (Tensor<3>, Tensor<4>) {
        let (attended, weights) =
            self.attention
                .forward(self.attention_norm.forward(hidden.clone()), mask, angles);
        let hidden = hidden + attended;
        let fed = self
            .feed_forward
            .forward(self.feed_forward_norm.forward(hidden.clone()));
        (hidden + fed, weights)
    }
}

/// Grouped-query attention; q and k are normalised by head before they are rotated, as in Qwen3.
#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: RmsNorm,
    key_norm: RmsNorm,
    rotary: Option<Rotary>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn forward(
        &self,
        hidden: Tensor<3>,
        mask: &Tensor<4>,
        angles: Option<&RotaryAngles>,
    ) -> (Tensor<3>, Tensor<4>) {
        let [batch, seq, _] = hidden.dims();
        let split = |x: Tensor<3>, heads: usize| x.reshape([batch, seq, heads, self.head_dim]);
        let q = split(self.query.forward(hidden.clone()), self.heads);
        let k = split(self.key.forward(hidden.clone()), self.kv_heads);
        let v = split(self.value.forward(hidden), self.kv_heads);
        let (q, k) = (self.query_norm.forward(q), self.key_norm.forward(k));
        let (q, k) = match (&self.rotary, angles) {
            (Some(rotary), Some(angles)) => rotary.forward(q, k, angles),
            _ => (q, k),
        };

        let q = q.swap_dims(1, 2);
        let k = self.share(k.swap_dims(1, 2));
        let v = self.share(v.swap_dims(1, 2));
        let scores = q.matmul(k.swap_dims(2, 3)) / (self.head_dim as f64).sqrt();
        let weights = softmax(scores + mask.clone(), 3);
        let mixed = weights.clone().matmul(v).swap_dims(1, 2).reshape([
            batch,
            seq,
            self.heads * self.head_dim,
        ]);
        (self.output.forward(mixed), weights)
    }

    /// Repeats each key or value head for its group of query heads: `[batch, kv_heads, ..]` to
    /// `[batch, heads, ..]`.
    fn share(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, kv_heads, seq, head_dim] = x.dims();
        x.unsqueeze_dim::<5>(2)
            .repeat_dim(2, self.heads / kv_heads)
            .reshape([batch, self.heads, seq, head_dim])
    }
}

/// SwiGLU and the projection back to the residual stream.
#[derive(Module, Debug)]
struct FeedForward {
    gate: SwiGlu,
    down: Linear,
}

impl FeedForward {
    fn forward(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gate.forward(hidden))
    }
}

/// The attention mask, `[1, 1, seq, seq]`: zero where a token sees another, else a large negative
/// number.
///
/// The cells of the clip see one another and `<start>`; the words of the question see the text up
/// to themselves; only `?` sees everything. This has two effects:
/// - Only the rotary embedding distinguishes the cells. Under a causal mask each cell would see a
///   different number of earlier cells, which reveals its position. (Attention in both directions
///   over the image follows PaliGemma, Beyer et al. 2024.)
/// - Only `?` searches. If words saw the clip, `row 0` would gather the digits of its row, `column
///   1` those of its column, and `?` would take the digit that both contain.
pub(crate) fn attention_mask(clip: Clip, device: &Device) -> Tensor<4> {
    let seq = clip.tokens();
    let is_cell = |token: usize| (1..=clip.cells()).contains(&token);
    let sees = |query: usize, key: usize| {
        let both_cells = is_cell(query) && is_cell(key);
        let word_and_cell = !is_cell(query) && is_cell(key) && query + 1 < seq;
        both_cells || (key <= query && !word_and_cell)
    };
    let values: Vec<f32> = (0..seq)
        .flat_map(|query| (0..seq).map(move |key| (query, key)))
        .map(|(query, key)| if sees(query, key) { 0.0 } else { -1e9 })
        .collect();
    Tensor::<1>::from_data(TensorData::new(values, [seq * seq]), device).reshape([1, 1, seq, seq])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_see_each_other_words_see_text_and_the_last_sees_all() {
        let clip = Clip {
            frames: 1,
            rows: 1,
            columns: 2,
        };
        let mask = attention_mask(clip, &Device::flex());
        let seen: Vec<bool> = mask.into_data().iter::<f32>().map(|m| m == 0.0).collect();
        // <start>, two cells, then frame, row, column, ?
        let expected = [
            "1000000", "1110000", "1110000", "1001000", "1001100", "1001110", "1111111",
        ];
        let expected: Vec<bool> = expected.concat().chars().map(|c| c == '1').collect();
        assert_eq!(seen, expected);
    }
}
