//! The memory of a step, from shapes alone.
//!
//! Some tensors exist during the whole step, others only during one phase. The peak is the sum of
//! the former and the largest phase. The numbers per token that a layer's graph keeps follow from
//! the layers of `vlm-models` and their backward on the CPU backend. GPUs and NPUs round sizes up
//! and keep pools; plans do not count these.

use burn::tensor::{DType, Device};
use vlm_data::MicroBatch;
use vlm_models::{LoraConfig, ModelPart, VlmConfig, has_linear_kernel};

use crate::error::Result;
use crate::recipe::{Recipe, TrainedParts};
use crate::record::SAMPLES;
use crate::shards::{self, OptimizerState};

/// The sizes of a micro-batch that determine its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MicroShape {
    /// Tokens, padding included.
    pub tokens: usize,
    /// Patches of pictures and videos.
    pub patches: usize,
    /// Tokens with a label.
    pub labelled: usize,
}

impl MicroShape {
    /// Returns the sizes of a micro-batch.
    pub fn of(micro: &MicroBatch) -> Self {
        let grids = micro.image_grids.iter().chain(&micro.video_grids);
        Self {
            tokens: micro.input_ids.len(),
            patches: grids.map(|grid| grid.iter().product::<usize>()).sum(),
            labelled: micro.trained_tokens,
        }
    }

    /// Returns sizes with `tokens` tokens and the same shares of patches and labels.
    #[must_use]
    pub fn with_tokens(self, tokens: usize) -> Self {
        let share = |of: usize| (of * tokens).div_ceil(self.tokens.max(1));
        Self {
            tokens,
            patches: share(self.patches),
            labelled: share(self.labelled),
        }
    }
}

/// The memory of a step in bytes, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Memory held during the whole step.
    pub held: Vec<(&'static str, usize)>,
    /// Additional memory of each phase, one at a time.
    pub moments: Vec<(&'static str, usize)>,
}

impl StepMemory {
    /// The peak in bytes.
    pub fn peak(&self) -> usize {
        let held: usize = self.held.iter().map(|(_, bytes)| bytes).sum();
        let largest = self.moments.iter().map(|(_, bytes)| *bytes).max();
        held + largest.unwrap_or(0)
    }
}

/// The memory of the steps of a recipe.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    types: Types,
    weights: usize,
    adapters: usize,
    /// Elements trained whole.
    whole: usize,
    /// The number of tensors of the model, with trained ones counted twice, and the number of
    /// trained ones.
    tensors: usize,
    trained_tensors: usize,
    /// Trained elements, and those of the largest trained parameter.
    trained: usize,
    largest: usize,
    has_masters: bool,
    /// Number of devices that sum their gradients.
    ranks: usize,
    optimizer: OptimizerState,
    recomputes: bool,
    decoder: Layer,
    layers: usize,
    tower: Layer,
    blocks: usize,
    vocab_size: usize,
    words_trained: bool,
    patch_elems: usize,
    out_hidden_size: usize,
    merged_patches: usize,
    features: usize,
}

/// Bytes of the types of a step.
#[derive(Clone, Copy, Debug)]
struct Types {
    /// Bytes of an element of weights and activations.
    narrow: usize,
    /// Bytes of an element computed in f32.
    wide: usize,
    /// True if products convert both factors to f32 first.
    widens: bool,
}

/// The channels of a layer, and its trained parts.
#[derive(Clone, Copy, Debug)]
struct Layer {
    hidden: usize,
    q: usize,
    kv: usize,
    heads: usize,
    inner: usize,
    /// Adapters' rank; 0 without.
    rank: usize,
    is_trained: bool,
    dropout: bool,
}

impl MemoryPlan {
    /// Plans the memory of a recipe's steps for a model in a type.
    ///
    /// # Errors
    /// Those of [`Trainer::new`](crate::Trainer::new).
    pub fn new(config: &VlmConfig, recipe: &Recipe, dtype: DType) -> Result<Self> {
        recipe.check()?;
        // Initialises no weights.
        let mut model = config.init(&Device::flex())?;
        let sizes = model.weight_sizes();
        let weights = sizes.iter().map(|(_, elements)| elements).sum::<usize>();
        let (adapters, whole): (Vec<usize>, _) = match &recipe.trained {
            TrainedParts::Lora(config) => {
                let sizes = model.adapted_sizes(config)?;
                let both = sizes.iter().flatten();
                let adapters = both.map(|channels| channels * config.rank).collect();
                (adapters, model.whole_weights(&config.whole)?)
            }
            TrainedParts::Full(weights) => (Vec::new(), model.whole_weights(weights)?),
        };
        let whole_elements = whole.iter().map(|(_, elements)| elements);
        let trained: Vec<usize> = adapters.iter().chain(whole_elements).copied().collect();
        let (text, vision) = (&config.text, &config.vision);
        let has = |within: &str| whole.iter().any(|(name, _)| name.contains(within));
        let trains = |part| match part {
            ModelPart::Tower => has("visual.blocks."),
            ModelPart::Merger => has("merger."),
            ModelPart::Decoder => has("language_model.layers."),
        };
        let lora = |part| match &recipe.trained {
            TrainedParts::Lora(LoraConfig {
                parts,
                rank,
                dropout,
                ..
            }) if parts.contains(&part) => (*rank, *dropout > 0.0),
            _ => (0, false),
        };
        let head_dim = text.rotation.head_dim();
        let layer = |part, hidden, [q, kv]: [usize; 2], heads, inner| Layer {
            hidden,
            q,
            kv,
            heads,
            inner,
            rank: lora(part).0,
            is_trained: trains(part),
            dropout: lora(part).1,
        };
        let adapters: usize = adapters.iter().sum();
        let wide = DType::F32.size().max(dtype.size());
        let all: usize = trained.iter().sum();
        Ok(Self {
            types: Types {
                narrow: dtype.size(),
                wide,
                widens: dtype.size() < wide && !has_linear_kernel(&Device::flex(), dtype),
            },
            weights: weights * dtype.size(),
            adapters: adapters * wide,
            whole: all - adapters,
            tensors: sizes.len() + trained.len(),
            trained_tensors: trained.len(),
            trained: all,
            largest: trained.iter().copied().max().unwrap_or(0),
            has_masters: recipe.masters && all > adapters && dtype.size() < wide,
            ranks: 1,
            optimizer: OptimizerState::Replicated,
            recomputes: recipe.recompute,
            decoder: layer(
                ModelPart::Decoder,
                text.hidden_size,
                [text.heads * head_dim, text.kv_heads * head_dim],
                text.heads,
                text.intermediate_size,
            ),
            layers: text.layers,
            tower: layer(
                ModelPart::Tower,
                vision.hidden_size,
                [vision.hidden_size; 2],
                vision.heads,
                vision.intermediate_size,
            ),
            blocks: vision.depth,
            vocab_size: text.vocab_size,
            words_trained: has("embed_tokens.") || has("lm_head."),
            patch_elems: vision.patch.iter().product(),
            out_hidden_size: vision.out_hidden_size,
            merged_patches: vision.spatial_merge * vision.spatial_merge,
            features: vision.deepstack.len(),
        })
    }

    /// Sets the number of devices and the placement of the optimizer's state; the plan is per
    /// device.
    #[must_use]
    pub fn with_ranks(mut self, ranks: usize, optimizer: OptimizerState) -> Self {
        (self.ranks, self.optimizer) = (ranks.max(1), optimizer);
        self
    }

    /// Elements with optimizer state on one device.
    fn updated(&self) -> usize {
        match self.optimizer {
            OptimizerState::Replicated => self.trained,
            OptimizerState::Sharded => shards::part(self.trained, self.ranks),
        }
    }

    /// Computes the memory of a step whose largest micro-batch has this shape and follows others.
    pub fn step(&self, shape: MicroShape) -> StepMemory {
        let MicroShape {
            tokens,
            patches,
            labelled,
        } = shape;
        let Types { narrow, wide, .. } = self.types;
        let merged = patches / self.merged_patches * self.out_hidden_size;
        let mut held = vec![
            ("weights", self.weights),
            ("adapters", self.adapters),
            (
                "masters",
                if self.has_masters {
                    self.updated() * self.whole / self.trained.max(1) * wide
                } else {
                    0
                },
            ),
            ("moments", 2 * self.updated() * wide),
            ("sums of gradients", self.trained * wide),
            ("patches", patches * self.patch_elems * narrow),
            ("names, shapes, graph", self.tensors * OF_TENSOR),
        ];
        held.retain(|(_, bytes)| *bytes > 0);
        let inputs = tokens * self.decoder.hidden * self.layers * narrow
            + merged * (1 + self.features) * narrow;
        let copies = if self.recomputes { 1 } else { self.layers };
        let kept = self.decoder.kept(tokens, self.types) * copies;
        let layer = inputs + kept + self.decoder.passing(tokens, self.types);
        let mut moments = vec![
            (
                "the vision tower, forward",
                self.tower.forward(patches, self.types),
            ),
            ("the head's block of logits", inputs + self.head(labelled)),
            ("a decoder layer and its graph", layer),
            ("the update", self.update()),
        ];
        if self.ranks > 1 {
            moments.push(("the gradients, end to end", self.exchange()));
        }
        let tower = &self.tower;
        if patches > 0 && (tower.rank > 0 || tower.is_trained) {
            let copies = if self.recomputes { 1 } else { self.blocks };
            let inputs = patches * tower.hidden * (self.blocks + 1) * narrow;
            let graph = tower.kept(patches, self.types) * copies;
            let passing = tower.passing(patches, self.types);
            moments.push(("a tower block and its graph", inputs + graph + passing));
        }
        StepMemory { held, moments }
    }

    /// Computes the additional bytes for recording a step over `samples` samples with `patches`
    /// patches: sampled weights before and after the step, gradients and activations, and a copy of
    /// the patches.
    pub fn record(&self, patches: usize, samples: usize) -> usize {
        let activations = self.layers * OF_LAYER + self.blocks + 4;
        let tensors = self.tensors + 2 * self.trained_tensors + samples * activations;
        // Patches are written from a copy.
        2 * patches * self.patch_elems * DType::F32.size() + tensors * OF_SAMPLED
    }

    /// Computes the largest number of tokens, in a micro-batch with the proportions of `shape`, for
    /// which a step fits into `bytes`; `None` if one token does not fit.
    pub fn most_tokens(&self, shape: MicroShape, bytes: usize) -> Option<usize> {
        let fits = |tokens: usize| self.step(shape.with_tokens(tokens)).peak() <= bytes;
        let (mut most, mut beyond) = (0, MOST_TOKENS);
        while beyond - most > 1 {
            let middle = most.midpoint(beyond);
            if fits(middle) {
                most = middle;
            } else {
                beyond = middle;
            }
        }
        (most > 0).then_some(most)
    }

    /// Logits exist in blocks of the vocabulary: the logits of a block, their softmax, and the word
    /// embeddings.
    fn head(&self, rows: usize) -> usize {
        let channels = self.decoder.hidden;
        let words = (ELEMENTS_OF_BLOCK / rows.max(channels)).max(LEAST_WORDS);
        let words = words.min(self.vocab_size);
        // Products of 16 bits take both factors in f32.
        let Types { narrow, wide, .. } = self.types;
        let copies = if narrow < wide { narrow + wide } else { 0 };
        let table = self.vocab_size * channels;
        let gradient = if self.words_trained {
            table * narrow
        } else {
            0
        };
        3 * rows * words * wide + words * channels * copies + gradient
    }

    /// New values reuse the memory of masters or of gradients that nothing else holds. 16-bit
    /// values take additional memory; without a master, so does the old value in f32.
    fn update(&self) -> usize {
        let of_value = if self.whole == 0 {
            self.types.wide
        } else {
            self.types.narrow
        };
        let (values, part) = (self.trained * of_value, self.updated());
        let (largest, sums) = (self.largest.min(part), self.trained * self.types.wide);
        let is_narrow = of_value < self.types.wide;
        let beside = match (self.ranks, self.optimizer) {
            // Sums are freed one by one.
            (1, _) if is_narrow => largest * of_value,
            (1, _) => 0,
            // They are views of one tensor until the end.
            (_, OptimizerState::Replicated) => values,
            // A shard of them remains, with the values of that shard separate.
            (_, OptimizerState::Sharded) => {
                (values + part * (of_value + self.types.wide)).saturating_sub(sums)
            }
        };
        if is_narrow && !self.has_masters {
            beside + largest * self.types.wide
        } else {
            beside
        }
    }

    /// The gradients for the other devices are concatenated beside their sums over micro-batches;
    /// with a sharded state, also a shard of those of all devices.
    fn exchange(&self) -> usize {
        let part = match self.optimizer {
            OptimizerState::Replicated => 0,
            OptimizerState::Sharded => self.updated(),
        };
        (self.trained + part) * self.types.wide
    }
}

/// Bytes that burn keeps per tensor besides its elements, as measured; they matter for tiny models.
const OF_TENSOR: usize = 4 << 10;
/// The number of recorded activations and gradients of a layer, and the bytes of the samples of
/// one.
const OF_LAYER: usize = 14;
const OF_SAMPLED: usize = SAMPLES * DType::F32.size() + 256;
/// The limit on logits and weight elements, and the minimum number of words, of a block in
/// `burn-attention`.
const ELEMENTS_OF_BLOCK: usize = 1 << 23;
const LEAST_WORDS: usize = 128;
/// More tokens than any micro-batch has.
const MOST_TOKENS: usize = 1 << 24;

impl Layer {
    /// Bytes that the graph of a layer keeps.
    fn kept(&self, tokens: usize, types: Types) -> usize {
        let Self {
            hidden,
            q,
            kv,
            heads,
            inner,
            rank,
            ..
        } = *self;
        let Types {
            narrow,
            wide,
            widens,
        } = types;
        // q, k, v and the output of attention; the input of the second norm; gate and up.
        let always = 2 * q + 2 * kv + hidden + 2 * inner;
        // The inputs of linear layers, for the gradients of their weights or adapters.
        let shared = 2 * hidden + q + inner;
        let each = 5 * hidden + q + inner;
        let reads = match (self.is_trained, rank > 0) {
            (true, _) => shared * narrow,
            (false, true) if narrow == wide || (!widens && !self.dropout) => shared * narrow,
            (false, true) => each * wide,
            (false, false) => 0,
        };
        // A mask and the masked values of each.
        let dropped = if self.dropout { 2 * each * wide } else { 0 };
        // The largest score and the sum of each row, roots of the norms; x A of adapters, which the
        // kernel of bf16 computes again.
        let products = if narrow == wide || widens {
            7 * rank
        } else {
            0
        };
        let rest = (2 * heads + 2 + products) * wide;
        tokens * (always * narrow + reads + dropped + rest)
    }

    /// Bytes of the backward of a layer besides its graph: gradients in progress.
    fn passing(&self, tokens: usize, types: Types) -> usize {
        let Self { hidden, inner, .. } = *self;
        let Types {
            narrow,
            wide,
            widens,
        } = types;
        // Of the product of gate and up, of both of them, and of the layer's output.
        let on_the_way = tokens * (hidden + 3 * inner) * narrow;
        // Of the largest matrix: the gradient of the weight, or the factors of a product in f32.
        let matrix = hidden * inner;
        let gradient = if self.is_trained {
            matrix * (narrow + wide)
        } else {
            0
        };
        let factors = if widens {
            matrix * (narrow + wide) + tokens * (hidden + 2 * inner) * wide
        } else {
            0
        };
        on_the_way + gradient.max(factors)
    }

    /// Bytes of a forward pass without a graph.
    fn forward(&self, tokens: usize, types: Types) -> usize {
        let Self { hidden, inner, .. } = *self;
        let Types {
            narrow,
            wide,
            widens,
        } = types;
        let factors = if widens {
            hidden * inner * wide + tokens * (hidden + inner) * wide
        } else {
            0
        };
        tokens * (2 * hidden + (6 * hidden).max(hidden + 2 * inner)) * narrow + factors
    }
}
