//! The memory of a step, from shapes alone.
//!
//! A plan runs the step on tensors without elements ([`dry`]): layer by layer as `vlm-models` does,
//! with the operations that the CPU backend runs, and counts the bytes that are held. Some tensors
//! exist during the whole step, others only during one phase. The peak is the sum of the former and
//! the largest phase. GPUs and NPUs round sizes up and keep pools; plans do not count these.

mod delta;
mod dry;
mod layers;
mod model;
mod ops;
mod packing;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use clap::ValueEnum as _;
use vlm_data::{MicroBatch, SampleRows, TrainingSample};
use vlm_models::{Block, ModelPart, VisionConfig, VlmConfig, has_linear_kernel};

use self::dry::{Blocks, Earlier, Run, Types};
use self::layers::Trained;
use self::model::Model;
use crate::error::Result;
use crate::recipe::{Recipe, TrainedParts};
use crate::record::SAMPLES;
use crate::shards::{self, Sharding};

/// The sizes of a micro-batch that determine its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MicroShape {
    /// Tokens, padding included.
    pub tokens: usize,
    /// Patches of pictures and videos.
    pub patches: usize,
    /// Tokens with a label.
    pub labelled: usize,
    /// Rows of a padded batch; 0 or 1 if sequences are packed.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
}

impl MicroShape {
    /// Returns the sizes of a micro-batch.
    pub fn of(micro: &MicroBatch) -> Self {
        let (rows, sequences) = match &micro.rows {
            SampleRows::Packed { cu_seqlens } => (1, cu_seqlens.len().saturating_sub(1)),
            SampleRows::Padded { rows, .. } => (*rows, *rows),
        };
        Self {
            tokens: micro.input_ids.len(),
            patches: micro.patch_rows().iter().sum(),
            labelled: micro.trained_tokens,
            rows,
            sequences,
        }
    }

    /// Returns the sizes of a sample in a micro-batch of its own.
    pub fn of_sample(sample: &TrainingSample) -> Self {
        let grids = sample.image_grids.iter().chain(&sample.video_grids);
        let labels = sample.text.labels.iter().skip(1);
        Self {
            tokens: sample.tokens(),
            patches: grids.map(|grid| grid.iter().product::<usize>()).sum(),
            labelled: labels.filter(|label| **label >= 0).count(),
            rows: 1,
            sequences: 1 + usize::from(sample.text.pair.is_some()),
        }
    }

    /// The sizes of the largest part, of `count` of equally many tokens. All its tokens may be of
    /// pictures, and have labels.
    fn part(self, count: usize) -> Self {
        if count <= 1 {
            return self;
        }
        let tokens = self.tokens.div_ceil(count);
        Self {
            tokens,
            patches: self.patches.min(PATCHES_OF_TOKEN * tokens),
            labelled: self.labelled.min(tokens),
            ..self
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
            rows: share(self.rows).min(self.rows),
            sequences: share(self.sequences),
        }
    }
}

/// The memory of a step in bytes, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Memory held during the whole step. A name that ends in "at most" states a bound: a thread
    /// that leaves its products to others keeps no buffer for them.
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
#[derive(Clone)]
pub struct MemoryPlan {
    types: Types,
    weights: usize,
    adapters: usize,
    /// Elements trained whole.
    whole: usize,
    /// The number of tensors of the model, with trained ones counted twice.
    tensors: usize,
    /// Elements of the trained parameters, with their parts.
    trained: Vec<(ModelPart, usize)>,
    /// True if the data has pictures or videos: without, tower and merger have no gradients.
    sees: bool,
    has_masters: bool,
    /// Bytes of the weights that a reference has besides those of the model.
    reference: usize,
    /// Number of devices that sum their gradients.
    ranks: usize,
    sharding: Sharding,
    /// Number of devices that divide the tokens of a micro-batch.
    context: usize,
    blocks_of_ranks: Arc<Blocks>,
    recomputes: bool,
    layers: usize,
    blocks: usize,
    patch_elems: usize,
    model: Arc<Model>,
}

impl fmt::Debug for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut plan = f.debug_struct("MemoryPlan");
        plan.field("types", &self.types)
            .field("weights", &self.weights)
            .field("trained", &self.trained)
            .finish_non_exhaustive()
    }
}

impl MemoryPlan {
    /// Plans the memory of a recipe's steps for a model in a type.
    ///
    /// # Errors
    /// Those of [`Trainer::new`](crate::Trainer::new).
    pub fn new(config: &VlmConfig, recipe: &Recipe, dtype: DType) -> Result<Self> {
        Self::with_expert_parallel(config, recipe, dtype, 1)
    }

    /// As [`new`](Self::new), on one of the devices that divide the experts, whose number divides
    /// that of the experts. Each expert is taken to have equally many tokens.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_expert_parallel(
        config: &VlmConfig,
        recipe: &Recipe,
        dtype: DType,
        expert_parallel: usize,
    ) -> Result<Self> {
        recipe.check()?;
        // Initialises no weights.
        let mut model = config.init(&Device::flex())?;
        let sizes = model.weight_sizes();
        let weights = sizes.iter().map(|(_, elements)| elements).sum::<usize>();
        let expert_parallel = expert_parallel.max(1);
        let axes = model.expert_axes();
        let of_experts: usize = axes.values().map(|axis| axis.elements()).sum();
        let weights = weights - of_experts + of_experts / expert_parallel;
        let share = |path: &str, elements: usize| match path.contains(".mlp.experts.") {
            true => elements / expert_parallel,
            false => elements,
        };
        let mut blocks: BTreeMap<Block, [usize; 2]> = BTreeMap::new();
        for (block, elements) in &sizes {
            blocks.entry(*block).or_default()[0] += elements * dtype.size();
        }
        let mut adapted = HashMap::new();
        let (drops, whole) = match &recipe.trained {
            TrainedParts::Lora(config) => {
                let layers = model.adapters(config)?.into_iter();
                adapted.extend(layers.map(|layer| (layer.path.clone(), layer)));
                (config.dropout > 0.0, model.whole_paths(&config.whole)?)
            }
            TrainedParts::Full(weights) => (false, model.whole_paths(weights)?),
        };
        let wide = types(dtype).wide;
        let mut trained: Vec<(ModelPart, usize)> = Vec::new();
        for (path, layer) in &adapted {
            let rows = share(path, layer.rank * layer.matrices);
            let halves = [layer.inputs, layer.outputs].map(|columns| columns * rows);
            trained.extend(halves.map(|elements| (ModelPart::of(path), elements)));
            let elements: usize = halves.iter().sum();
            let [weights, of_block] = blocks.entry(Block::of(path)).or_default();
            *weights += elements * wide;
            *of_block += elements;
        }
        let in_adapters: usize = trained.iter().map(|(_, elements)| elements).sum();
        let of_rank = |(path, elements): (String, usize)| {
            let own = share(&path, elements);
            (path, own)
        };
        let whole: BTreeMap<String, usize> = whole.into_iter().map(of_rank).collect();
        for (path, elements) in &whole {
            trained.push((ModelPart::of(path), *elements));
            blocks.entry(Block::of(path)).or_default()[1] += elements;
        }
        let parts = Trained {
            drops,
            whole: &whole,
            adapted: &adapted,
            expert_parallel,
        };
        Ok(Self {
            types: types(dtype),
            weights: weights * dtype.size(),
            adapters: in_adapters * wide,
            whole: whole.values().sum(),
            tensors: sizes.len() + trained.len(),
            trained,
            sees: true,
            has_masters: recipe.masters && !whole.is_empty() && dtype.size() < wide,
            reference: match recipe.keeps_reference() {
                true => whole.values().sum::<usize>() * dtype.size(),
                false => 0,
            },
            ranks: 1,
            sharding: Sharding::None,
            context: 1,
            blocks_of_ranks: Arc::new(Blocks {
                ranks: 1,
                sizes: blocks,
                has_weights: false,
            }),
            recomputes: recipe.recompute,
            layers: config.text.layers,
            blocks: config.vision.as_ref().map_or(0, |vision| vision.depth),
            patch_elems: config.vision.as_ref().map_or(0, VisionConfig::patch_elems),
            model: Arc::new(Model::new(config, &parts)),
        })
    }

    /// States if the data has pictures or videos. Without, parameters of the tower and the merger
    /// have no gradients, and so neither sums nor moments.
    #[must_use]
    pub fn with_pictures(mut self, sees: bool) -> Self {
        self.sees = sees;
        self
    }

    /// States that the reference is another model of this one's size.
    #[must_use]
    pub fn with_other_reference(mut self) -> Self {
        self.reference = self.weights;
        self
    }

    /// Elements of the parameters that get gradients, and of the largest of them.
    fn trained(&self) -> [usize; 2] {
        let trained = self.trained.iter();
        let trained = trained.filter(|(part, _)| self.sees || *part == ModelPart::Decoder);
        let trained = trained.map(|(_, elements)| *elements);
        [trained.clone().sum(), trained.max().unwrap_or(0)]
    }

    /// Sets the number of devices and the tensors in shards; the plan is per
    /// device.
    #[must_use]
    pub fn with_ranks(mut self, ranks: usize, sharding: Sharding) -> Self {
        (self.ranks, self.sharding) = (ranks.max(1), sharding);
        let blocks = Arc::make_mut(&mut self.blocks_of_ranks);
        (blocks.ranks, blocks.has_weights) = (self.ranks, sharding == Sharding::All);
        self
    }

    /// Sets the number of devices that divide the tokens of each micro-batch; shapes remain those of
    /// all of its tokens.
    #[must_use]
    pub fn with_context(mut self, context: usize) -> Self {
        self.context = context.max(1);
        self
    }

    /// Elements with optimizer state on one device.
    fn updated(&self) -> usize {
        let [trained, _] = self.trained();
        match self.sharding {
            Sharding::None => trained,
            _ => shards::part(trained, self.ranks),
        }
    }

    /// The blocks that ranks divide within a pass.
    fn divided(&self) -> Option<Arc<Blocks>> {
        (self.sharding >= Sharding::Gradients).then(|| self.blocks_of_ranks.clone())
    }

    /// Computes the memory of a step whose largest micro-batch has this shape and follows others.
    pub fn step(&self, shape: MicroShape) -> StepMemory {
        self.micro(shape, Earlier::More)
    }

    /// Computes the peak in bytes of a step over these micro-batches.
    pub fn peak(&self, batch: &[MicroShape]) -> usize {
        let labelled = batch.iter().filter(|shape| shape.labelled > 0);
        let micro = |(index, shape): (usize, &MicroShape)| {
            let is_alone = self.ranks == 1;
            let earlier = match index {
                0 => Earlier::None { is_alone },
                1 if is_alone => Earlier::One,
                _ => Earlier::More,
            };
            self.micro(*shape, earlier).peak()
        };
        labelled.enumerate().map(micro).max().unwrap_or(0)
    }

    /// Memory during the whole step, but the sums of gradients.
    fn held(&self) -> Vec<(&'static str, usize)> {
        let (wide, updated) = (self.types.wide, self.updated());
        let [trained, _] = self.trained();
        // In shards, masters are the weights.
        let (mut weights, in_shards) = (self.weights, self.sharding == Sharding::All);
        let masters = if self.has_masters && in_shards {
            weights -= self.whole * self.types.narrow;
            shards::part(self.whole, self.ranks) * wide
        } else if self.has_masters {
            // Products of elements are beyond 64 bits.
            let share = self.whole.min(trained) as f64 / trained.max(1) as f64;
            (updated as f64 * share) as usize * wide
        } else {
            0
        };
        let of_rank = |bytes: usize| match in_shards {
            true => bytes.div_ceil(self.ranks),
            false => bytes,
        };
        let mut held = vec![
            ("weights", of_rank(weights)),
            ("the reference", self.reference),
            ("adapters", of_rank(self.adapters)),
            ("masters", masters),
            ("moments", 2 * updated * wide),
            ("names and shapes, at most", self.tensors * OF_TENSOR),
            ("the products' buffer, at most", packing::of_thread()),
        ];
        held.retain(|(_, bytes)| *bytes > 0);
        held
    }

    /// The memory of a micro-batch, the first of its step or a later one, and of the update.
    fn micro(&self, shape: MicroShape, earlier: Earlier) -> StepMemory {
        let [trained, largest] = self.trained();
        let wide = self.types.wide;
        let divided = self.divided();
        let (sums, largest) = match divided {
            Some(_) => (self.updated() * wide, largest.div_ceil(self.ranks)),
            None => (trained * wide, largest),
        };
        let mut held = self.held();
        let run = Run::new(self.types, earlier).divided(divided);
        let (run, shape) = (run.in_parts(self.context), shape.part(self.context));
        // Layers that run again are those of a copy of the model, with the same weights.
        let copies = if self.recomputes { self.tensors } else { 0 };
        let _copy = run.tensor(copies * OF_COPY, 1);
        self.model.micro(&run, &shape, self.recomputes);
        let mut moments = run.phases();
        let (of_earlier, beside) = match earlier {
            // Without the loss scale they are in f32.
            Earlier::None { is_alone: true } if !self.types.is_f16 => (0, self.first_gradients()),
            Earlier::None { .. } => (0, sums),
            Earlier::One => (self.first_gradients(), sums - self.first_gradients()),
            Earlier::More => (sums, 0),
        };
        if of_earlier > 0 {
            held.push(("sums of gradients", of_earlier));
        }
        moments.push(("the norm of the gradients", beside + largest * wide));
        moments.push(("the update", beside + self.update()));
        if self.ranks > 1 && self.sharding < Sharding::Gradients {
            moments.push(("the gradients, end to end", beside + self.exchange()));
        }
        StepMemory { held, moments }
    }

    /// The gradients of a micro-batch in their types.
    fn first_gradients(&self) -> usize {
        let [trained, _] = self.trained();
        let whole = self.whole.min(trained);
        whole * self.types.narrow + (trained - whole) * self.types.wide
    }

    /// Computes the memory of a validation, whose largest micro-batch has this shape: a forward pass
    /// without a graph, one micro-batch at a time.
    pub fn validation(&self, shape: MicroShape) -> StepMemory {
        let run = Run::new(self.types, Earlier::More).in_parts(self.context);
        self.model.loss(&run, &shape.part(self.context));
        let mut held = self.held();
        if self.sharding == Sharding::All {
            held.push(("gathered weights, at most", self.blocks_of_ranks.most()));
        }
        StepMemory {
            held,
            moments: run.phases(),
        }
    }

    /// Computes the additional bytes for recording a step over `samples` samples with `patches`
    /// patches: sampled weights before and after the step, gradients and activations, and a copy of
    /// the patches.
    pub fn record(&self, patches: usize, samples: usize) -> usize {
        let activations = self.layers * OF_LAYER + self.blocks + 4;
        let tensors = self.tensors + 2 * self.trained.len() + samples * activations;
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

    /// The least sharding, from that of this plan on, with which a step whose largest micro-batch
    /// has this shape fits into `bytes`; `None` if no sharding suffices, or with one device.
    pub fn least_sharding(&self, shape: MicroShape, bytes: usize) -> Option<Sharding> {
        let all = Sharding::value_variants().iter().copied();
        let mut all = all.filter(|sharding| *sharding >= self.sharding && self.ranks > 1);
        all.find(|sharding| {
            let plan = self.clone().with_ranks(self.ranks, *sharding);
            plan.step(shape).peak() <= bytes
        })
    }

    /// New values reuse the memory of masters or of gradients that nothing else holds. 16-bit
    /// values take additional memory; without a master, so does the old value in f32.
    fn update(&self) -> usize {
        let of_value = if self.whole == 0 {
            self.types.wide
        } else {
            self.types.narrow
        };
        let [trained, largest] = self.trained();
        let (values, part) = (trained * of_value, self.updated());
        let (largest, sums) = (largest.min(part), trained * self.types.wide);
        let is_narrow = of_value < self.types.wide;
        let beside = match (self.ranks, self.sharding) {
            // Sums are freed one by one.
            (1, _) if is_narrow => largest * of_value,
            (1, _) => 0,
            // They are views of one tensor until the end.
            (_, Sharding::None) => values,
            // A shard of them remains, with the values of that shard separate.
            (_, Sharding::Optimizer) => {
                (values + part * (of_value + self.types.wide)).saturating_sub(sums)
            }
            // The values of a block at a time are gathered.
            (_, Sharding::Gradients) => part * of_value + self.blocks_of_ranks.most(),
            // New masters take the place of the gradients, one parameter at a time.
            (_, Sharding::All) if self.has_masters => {
                2 * largest.div_ceil(self.ranks) * self.types.wide
            }
            (_, Sharding::All) => part * of_value,
        };
        if is_narrow && !self.has_masters {
            beside + largest * self.types.wide
        } else {
            beside
        }
    }

    /// The gradients for the other devices are concatenated beside their sums over micro-batches,
    /// which are gone when a shard of the sums over devices comes.
    fn exchange(&self) -> usize {
        self.trained()[0] * self.types.wide
    }
}

/// The sizes of a type's elements, and of sums.
fn types(dtype: DType) -> Types {
    Types {
        narrow: dtype.size(),
        wide: DType::F32.size().max(dtype.size()),
        widens: dtype == DType::BF16,
        has_kernel: has_linear_kernel(&Device::flex(), dtype),
        is_f16: dtype == DType::F16,
    }
}

/// The most bytes that burn keeps per tensor besides its elements, as measured: 0.2 to 4 KiB. They
/// matter for tiny models.
const OF_TENSOR: usize = 4 << 10;
/// Bytes of a tensor's second name and shape.
const OF_COPY: usize = 2 << 10;
/// The number of recorded activations and gradients of a layer, and the bytes of the samples of
/// one.
const OF_LAYER: usize = 14;
const OF_SAMPLED: usize = SAMPLES * DType::F32.size() + 256;
/// The patches of a placeholder, in every family.
const PATCHES_OF_TOKEN: usize = 4;
/// More tokens than any micro-batch has.
const MOST_TOKENS: usize = 1 << 24;
