//! A forward and a backward pass over a model without elements: `vlm-models`' `backward`.

use vlm_models::{Block, Interpolation, VisionConfig, VlmConfig};

use super::MicroShape;
use super::dry::{Ghost, Run, Var};
use super::layers::{Block as TowerBlock, Layer, Merger, Trained};
use super::ops::{self, Linear, RmsNorm};

/// The limit on logits and weight elements, and the minimum number of words, of a block in
/// `burn-attention`.
const ELEMENTS_OF_BLOCK: usize = 1 << 23;

/// A model without elements.
pub(super) struct Model {
    layers: Vec<Layer>,
    norm: RmsNorm,
    vocab_size: usize,
    is_tied: bool,
    trains_words: bool,
    trains_head: bool,
    hidden: usize,
    rotary_dim: usize,
    tower: Option<Tower>,
}

struct Tower {
    blocks: Vec<TowerBlock>,
    merger: Merger,
    /// The block that each feature of the decoder is computed from, and its layers.
    features: Vec<(usize, Merger)>,
    embedding: Linear,
    norm: Option<RmsNorm>,
    /// Groups of four cells that a learned position is interpolated from, and the cells of the grid.
    learned: Option<(usize, usize)>,
    has_windows: bool,
    trains_first: bool,
    hidden: usize,
    square: usize,
    rotary_dim: usize,
}

/// The tensors that a pass through the tower keeps.
struct Seen {
    inputs: Vec<Ghost>,
    merged: Ghost,
    features: Vec<Ghost>,
}

impl Model {
    pub(super) fn new(config: &VlmConfig, trained: &Trained<'_>) -> Self {
        let text = &config.text;
        let layer = |index| Layer::new(text, index, trained);
        let trains_words = trained.below("language_model.embed_tokens.");
        Self {
            layers: (0..text.layers).map(layer).collect(),
            norm: RmsNorm {
                channels: text.hidden_size,
                is_trained: trained.below("language_model.norm."),
                unit_offset: text.unit_offset,
            },
            vocab_size: text.vocab_size,
            is_tied: config.tied,
            trains_words,
            trains_head: trained.below("lm_head."),
            hidden: text.hidden_size,
            rotary_dim: text.rotation.head_dim(),
            tower: config
                .vision
                .as_ref()
                .map(|vision| Tower::new(vision, trained)),
        }
    }

    /// Runs a micro-batch, with the memory of each phase.
    pub(super) fn micro(&self, run: &Run, shape: &MicroShape, recomputes: bool) {
        let _data = self.data(run, shape);
        let seen = self.seen(run, shape);
        if recomputes {
            self.by_layer(run, shape, seen.as_ref());
        } else {
            self.at_once(run, shape, seen.as_ref());
        }
    }

    /// Runs a forward pass without gradients and its loss.
    pub(super) fn loss(&self, run: &Run, shape: &MicroShape) {
        run.be_quiet(true);
        let _data = self.data(run, shape);
        let seen = self.seen(run, shape);
        self.at_once(run, shape, seen.as_ref());
    }

    /// The tower and the patches of a micro-batch, if it has any.
    fn seen(&self, run: &Run, shape: &MicroShape) -> Option<(&Tower, Ghost)> {
        let tower = self.tower.as_ref().filter(|_| shape.patches > 0)?;
        Some((tower, tower.data(run, shape.patches)))
    }

    /// Ids, position ids, masks, cos and sin of the tokens.
    fn data(&self, run: &Run, shape: &MicroShape) -> [Ghost; 2] {
        let angles = run.tensor(shape.tokens * self.rotary_dim, run.types.wide);
        [angles, run.tensor(shape.tokens, OF_TOKEN)]
    }

    fn embeddings(&self, run: &Run, table: &Var, merged: Option<Var>, tokens: usize) -> Var {
        let elems = tokens * self.hidden;
        let words = ops::embedding(run, table, elems);
        match merged {
            Some(merged) => {
                let both = ops::cat(run, words, merged);
                ops::select(run, both, elems)
            }
            None => words,
        }
    }

    fn table(&self, run: &Run) -> Var {
        let elems = self.vocab_size * self.hidden;
        let table = run.held(elems, run.types.narrow);
        if self.trains_words && !run.is_quiet() {
            run.leaf(table)
        } else {
            run.constant(table)
        }
    }

    /// The loss of normalised hidden states; `table` is that of the words, which a tied head shares.
    fn head(&self, run: &Run, hidden: Var, table: &Var, labelled: usize) -> Var {
        let chosen = ops::select(run, hidden, labelled * self.hidden);
        let head = if self.is_tied {
            table.clone()
        } else {
            let elems = self.vocab_size * self.hidden;
            let weight = run.weight(elems, run.types.narrow, self.trains_head);
            weight.seen_as(|weight| weight.view(elems))
        };
        let words = ELEMENTS_OF_BLOCK / labelled.max(self.hidden);
        let words = (words / ops::STRETCH).max(1) * ops::STRETCH;
        ops::cross_entropy(run, [chosen, head], self.hidden, words)
    }

    /// With one graph.
    fn at_once(&self, run: &Run, shape: &MicroShape, seen: Option<&(&Tower, Ghost)>) {
        let tokens = shape.tokens;
        let (mut features, mut merged) = (Vec::new(), None);
        if let Some((tower, patches)) = seen {
            let count = shape.patches;
            let mut hidden = tower.first(run, patches, count);
            for (index, block) in tower.blocks.iter().enumerate() {
                hidden = block.forward(run, hidden, count);
                if let Some(feature) = tower.feature_of(index) {
                    features.push(feature.forward(run, hidden.clone()));
                }
            }
            merged = Some(tower.merged(run, hidden));
            run.phase(TOWER_FORWARD);
        }
        let table = self.table(run);
        let mut hidden = self.embeddings(run, &table, merged, tokens);
        let mut features = features.into_iter();
        for layer in &self.layers {
            hidden = layer.forward(run, hidden, shape);
            if let Some(feature) = features.next() {
                hidden = ops::select_add(run, hidden, feature);
            }
        }
        run.phase(DECODER_FORWARD);
        let last = self.norm.forward(run, hidden);
        let loss = self.head(run, last, &table, shape.labelled);
        run.phase(HEAD);
        let mut gradients = run.backward(loss, run.tensor(1, run.types.wide));
        run.phase(GRAPH);
        if let Some(gradient) = Run::take(&table, &mut gradients) {
            run.add(gradient);
        }
        run.collect(&mut gradients);
        run.phase(GRAPH);
    }

    /// With one layer's graph at a time.
    fn by_layer(&self, run: &Run, shape: &MicroShape, of_tower: Option<&(&Tower, Ghost)>) {
        let tower_wanted = of_tower.is_some_and(|(tower, _)| tower.trains());
        let mut wanted = vec![tower_wanted || self.trains_words];
        for layer in &self.layers {
            wanted.push(wanted[wanted.len() - 1] || layer.trains());
        }
        self.will_enter(run, of_tower.map(|(tower, _)| *tower), &wanted);
        run.be_quiet(true);
        let seen =
            of_tower.map(|(tower, patches)| tower.see(run, patches, shape.patches, tower_wanted));
        run.phase(TOWER_FORWARD);
        let words = run.enter();
        let merged = seen.as_ref().map(|seen| seen.merged.clone());
        let features = seen.as_ref().map_or(0, |seen| seen.features.len());
        let table = self.table(run);
        let constant = |value: Ghost| run.constant(value);
        let embedded = merged.clone().map(constant);
        let mut hidden = self.embeddings(run, &table, embedded, shape.tokens);
        drop(words);
        let mut inputs = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let _weights = run.enter();
            inputs.push(hidden.value.clone());
            hidden = layer.forward(run, hidden, shape);
            if let Some(feature) = seen.as_ref().and_then(|seen| seen.features.get(index)) {
                hidden = ops::select_add(run, hidden, run.constant(feature.clone()));
            }
        }
        run.phase(DECODER_FORWARD);
        run.be_quiet(false);
        let head = [run.enter(), self.is_tied.then(|| run.enter()).flatten()];
        let table = self.table(run);
        let leaf = |value: Ghost, wanted: bool| match wanted {
            true => run.leaf(value),
            false => run.constant(value),
        };
        let input = leaf(hidden.value, wanted[self.layers.len()]);
        let last = self.norm.forward(run, input.clone());
        let loss = self.head(run, last, &table, shape.labelled);
        let mut gradients = run.backward(loss, run.tensor(1, run.types.wide));
        let table_gradient = Run::take(&table, &mut gradients);
        run.collect(&mut gradients);
        let mut gradient = Run::take(&input, &mut gradients);
        drop((input, gradients, head));
        run.complete(Block::Head);
        run.phase(HEAD);

        let mut feature_gradients = Vec::new();
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let (Some(output_gradient), Some(input)) = (gradient.take(), inputs.pop()) else {
                break;
            };
            if let Some((tower, _)) = of_tower.filter(|_| index < features && tower_wanted) {
                let elems = tower.merged_elems(shape.patches, self.hidden);
                feature_gradients.push(output_gradient.reduced(elems));
            }
            let input = leaf(input, wanted[index]);
            let weights = run.enter();
            let output = layer.forward(run, input.clone(), shape);
            let mut gradients = run.against(output, output_gradient);
            run.collect(&mut gradients);
            gradient = Run::take(&input, &mut gradients);
            drop((gradients, weights));
            run.complete(Block::Layer(index));
            run.phase(LAYER);
        }
        let Some(gradient) = gradient else {
            return;
        };
        let merged = merged.map(|merged| leaf(merged, tower_wanted));
        let embeddings = self.embeddings(run, &table, merged.clone(), shape.tokens);
        let mut gradients = run.against(embeddings, gradient);
        let merged_gradient = merged.and_then(|merged| Run::take(&merged, &mut gradients));
        let words = Run::take(&table, &mut gradients);
        drop(gradients);
        let sum = match (table_gradient, words) {
            (Some(head), Some(words)) => Some(head.zip(words)),
            (head, words) => head.or(words),
        };
        if let Some(sum) = sum {
            run.add(sum);
        }
        run.complete(Block::Words);
        run.phase(WORDS);
        if let (Some((tower, patches)), Some(seen), Some(merged)) =
            (of_tower, seen, merged_gradient)
        {
            let output = (merged, feature_gradients);
            tower.backward(run, (patches, shape.patches), seen.inputs, output);
        }
    }
}

impl Model {
    /// States the blocks that a pass with recomputation enters. `wanted`: for each layer's input,
    /// and the head's, true if its gradient is needed.
    fn will_enter(&self, run: &Run, tower: Option<&Tower>, wanted: &[bool]) {
        let blocks = tower.map_or(0, |tower| tower.blocks.len());
        let see = tower.map(|_| Block::Tower).into_iter();
        let see = see.chain((0..blocks).map(Block::TowerBlock));
        let layers = (0..self.layers.len()).map(Block::Layer);
        let head = [Block::Head].into_iter();
        let head = head.chain(self.is_tied.then_some(Block::Words));
        let rerun = layers.clone().rev().filter(|block| match block {
            Block::Layer(index) => wanted[index + 1],
            _ => true,
        });
        let trained = tower.filter(|tower| tower.trains());
        let inputs = trained.map(Tower::wanted).unwrap_or_default();
        let again = trained.map(|_| Block::Tower).into_iter().chain(
            (0..blocks)
                .rev()
                .filter(move |index| inputs.get(index + 1) == Some(&true))
                .map(Block::TowerBlock),
        );
        let forward = see.chain([Block::Words]).chain(layers).chain(head);
        run.will_enter(forward.chain(rerun).chain(again));
    }
}

impl Tower {
    fn new(config: &VisionConfig, trained: &Trained<'_>) -> Self {
        let trains_first = trained.below("visual.patch_embed.");
        let feature =
            |(index, block): (usize, &usize)| (*block, Merger::of_feature(config, index, trained));
        let groups = match config.interpolation {
            Interpolation::Bilinear => 1,
            Interpolation::Bicubic => 4,
        };
        Self {
            blocks: (0..config.depth)
                .map(|index| TowerBlock::new(config, index, trained))
                .collect(),
            merger: Merger::new(config, trained),
            features: config.deepstack.iter().enumerate().map(feature).collect(),
            embedding: Linear {
                inputs: config.patch.iter().product(),
                outputs: config.hidden_size,
                has_bias: config.patch_bias,
                is_trained: trains_first,
                adapter: None,
            },
            norm: config.downsamples.then_some(RmsNorm {
                channels: config.hidden_size,
                is_trained: trains_first,
                unit_offset: false,
            }),
            learned: config.position_grid.map(|side| (groups, side * side)),
            has_windows: config.windows.is_some(),
            trains_first,
            hidden: config.hidden_size,
            square: config.spatial_merge * config.spatial_merge,
            rotary_dim: config.rotation.head_dim(),
        }
    }

    fn trains(&self) -> bool {
        let mut features = self.features.iter();
        self.trains_first
            || self.merger.trains()
            || self.blocks.iter().any(TowerBlock::trains)
            || features.any(|(_, feature)| feature.trains())
    }

    /// True for each block's input, and the merger's, if its gradient is needed.
    fn wanted(&self) -> Vec<bool> {
        let mut wanted = vec![self.trains_first];
        for block in &self.blocks {
            wanted.push(wanted[wanted.len() - 1] || block.trains());
        }
        wanted
    }

    fn feature_of(&self, block: usize) -> Option<&Merger> {
        let mut features = self.features.iter();
        features.find(|(at, _)| *at == block).map(|(_, of)| of)
    }

    fn merged_elems(&self, patches: usize, outputs: usize) -> usize {
        patches / self.square * outputs
    }

    /// The patches, and what is computed from their grids.
    fn data(&self, run: &Run, patches: usize) -> Ghost {
        let mut of_patch = self.embedding.inputs * run.types.narrow;
        of_patch += self.rotary_dim * run.types.wide + OF_PATCH;
        if let Some((groups, _)) = self.learned {
            of_patch += groups * OF_FOUR_CELLS;
        }
        run.phase(PATCHES);
        // They come in f32.
        let _before = (run.types.narrow < run.types.wide)
            .then(|| run.tensor(patches * self.embedding.inputs, run.types.wide));
        let data = run.tensor(patches, of_patch);
        run.phase(PATCHES);
        data
    }

    fn first(&self, run: &Run, patches: &Ghost, count: usize) -> Var {
        let elems = count * self.embedding.inputs;
        let narrow = run.types.narrow;
        let patches = patches.read_as(elems, narrow);
        let mut hidden = self.embedding.forward(run, run.constant(patches));
        if let Some(norm) = &self.norm {
            hidden = norm.forward(run, hidden);
        }
        if let Some((groups, cells)) = self.learned {
            let table = run.weight(cells * self.hidden, narrow, self.trains_first);
            for _ in 0..groups {
                let elems = 4 * count * self.hidden;
                let four = ops::embedding(run, &table, elems);
                let four = ops::scaled(run, four);
                let one = ops::mean(run, four, count * self.hidden);
                hidden = ops::add(run, hidden, one);
            }
        }
        if self.has_windows {
            let elems = hidden.value.elems;
            hidden = ops::select(run, hidden, elems);
        }
        hidden
    }

    fn merged(&self, run: &Run, hidden: Var) -> Var {
        let merged = self.merger.forward(run, hidden);
        if self.has_windows {
            let elems = merged.value.elems;
            return ops::select(run, merged, elems);
        }
        merged
    }

    fn see(&self, run: &Run, patches: &Ghost, count: usize, keeps: bool) -> Seen {
        let (mut inputs, mut features) = (Vec::new(), Vec::new());
        let _weights = run.enter();
        let mut hidden = self.first(run, patches, count);
        for (index, block) in self.blocks.iter().enumerate() {
            let _weights = run.enter();
            if keeps {
                inputs.push(hidden.value.clone());
            }
            hidden = block.forward(run, hidden, count);
            if let Some(feature) = self.feature_of(index) {
                features.push(feature.forward(run, hidden.clone()).value);
            }
        }
        if keeps {
            inputs.push(hidden.value.clone());
        }
        Seen {
            inputs,
            merged: self.merged(run, hidden).value,
            features,
        }
    }

    fn backward(
        &self,
        run: &Run,
        (patches, count): (&Ghost, usize),
        mut kept: Vec<Ghost>,
        (merged, mut features): (Ghost, Vec<Ghost>),
    ) {
        let wanted = self.wanted();
        let _weights = run.enter();
        let mut gradient = Some(merged);
        // Those of the last block were pushed first.
        for index in (0..=self.blocks.len()).rev() {
            let Some(input) = kept.pop() else {
                break;
            };
            let input = match wanted[index] {
                true => run.leaf(input),
                false => run.constant(input),
            };
            let feature = index
                .checked_sub(1)
                .and_then(|block| self.feature_of(block));
            let feature = feature.filter(|_| !features.is_empty());
            let mut terms = Vec::new();
            let mut read = input.clone();
            if let Some(feature) = feature {
                let output = feature.forward(run, input.clone());
                terms.push((output, features.remove(0)));
                if input.is_tracked() {
                    read = ops::scaled(run, read);
                }
            }
            let mut weights = None;
            if let Some(output_gradient) = gradient.take() {
                let output = if index == self.blocks.len() {
                    self.merged(run, read)
                } else {
                    weights = run.enter();
                    self.blocks[index].forward(run, read, count)
                };
                terms.push((output, output_gradient));
            }
            let mut gradients = run.against_all(terms);
            run.collect(&mut gradients);
            gradient = Run::take(&input, &mut gradients);
            drop((gradients, weights));
            if index < self.blocks.len() {
                run.complete(Block::TowerBlock(index));
            }
            run.phase(TOWER_BLOCK);
        }
        if let Some(gradient) = gradient {
            let output = self.first(run, patches, count);
            let mut gradients = run.against(output, gradient);
            run.collect(&mut gradients);
        }
        run.complete(Block::Tower);
        run.phase(TOWER_BLOCK);
    }
}

/// Bytes of a token's id, position ids, and the keys that it sees; of a patch's positions and keys;
/// of four cells of the learned grid with their weights.
const OF_TOKEN: usize = 64;
const OF_PATCH: usize = 24;
const OF_FOUR_CELLS: usize = 48;

const PATCHES: &str = "the patches, converted";
const TOWER_FORWARD: &str = "the vision tower, forward";
const DECODER_FORWARD: &str = "the decoder, forward";
const HEAD: &str = "the head's block of logits";
const LAYER: &str = "a decoder layer and its graph";
const GRAPH: &str = "the graph of all layers, backward";
const WORDS: &str = "the gradients of the words";
const TOWER_BLOCK: &str = "a tower block and its graph";
