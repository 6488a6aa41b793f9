//! The vision tower: from patches to the embeddings that replace the placeholders.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Initializer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, MaskRules};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_core::position_ids::{vision_cu_seqlens, vision_positions, vision_windows};
use rope_core::{Layout, Positions};

use crate::backward::trains;
use crate::batch::indices;
use crate::config::{VisionConfig, VisionWindows};
use crate::error::Result;
use crate::layers::{Activation, Common, FeedForward, FeedForwardConfig, Norm, attend};
use crate::linear::{Draw, Linear};
use crate::trace::Trace;

/// Turns patches into embeddings, one for each square of merged patches.
#[derive(Module, Debug)]
pub(crate) struct VisionTower {
    patch_embed: PatchEmbed,
    pos_embed: Option<Embedding>,
    blocks: Vec<Block>,
    merger: Merger,
    deepstack_merger_list: Vec<Merger>,
    rotary: Rotary,
    #[module(skip)]
    layout: TowerLayout,
}

/// The part of the configuration that decides the order of the patches.
#[derive(Clone, Debug)]
struct TowerLayout {
    merge: usize,
    windows: Option<VisionWindows>,
    position_grid: Option<usize>,
    deepstack: Vec<usize>,
}

/// Patches of a step and what is derived from their grids.
#[derive(Clone, Debug)]
pub(crate) struct VisionInputs {
    patches: Tensor<2>,
    angles: RotaryAngles,
    /// Attention within each frame.
    frames: Attention,
    windows: Option<WindowOrder>,
    learned: Option<LearnedPositions>,
}

/// The order of the merged tokens window by window, and its inverse.
#[derive(Clone, Debug)]
struct WindowOrder {
    order: Tensor<1, Int>,
    inverse: Tensor<1, Int>,
    /// Attention within each window.
    attention: Attention,
}

/// The four neighbours of each patch on the learned grid, `[4, patches]`, and their weights,
/// `[4, patches, 1]`.
#[derive(Clone, Debug)]
struct LearnedPositions {
    cells: Tensor<2, Int>,
    weights: Tensor<3>,
}

/// The output of the tower.
pub(crate) struct VisionOutput {
    /// `[merged, out_hidden_size]`: the embeddings that replace the placeholders.
    pub(crate) merged: Tensor<2>,
    /// Of the same shape: the features that are added in the decoder's first layers.
    pub(crate) deepstack: Vec<Tensor<2>>,
}

impl VisionConfig {
    pub(crate) fn init(
        &self,
        implementation: Implementation,
        device: &Device,
    ) -> Result<VisionTower> {
        // The patches of all images are packed: [patches, heads, head_dim].
        let rotary = RotaryConfig::new(self.rotation.clone())
            .with_layout(Layout::Tnd)
            .with_implementation(implementation)
            .try_init()?;
        Ok(VisionTower {
            patch_embed: PatchEmbed::new(self, device),
            pos_embed: self
                .position_grid
                .map(|side| EmbeddingConfig::new(side * side, self.hidden_size).init(device)),
            blocks: (0..self.depth)
                .map(|_| Block::new(self, &rotary, device))
                .collect(),
            merger: Merger::new(self, false, device),
            deepstack_merger_list: self
                .deepstack
                .iter()
                .map(|_| Merger::new(self, true, device))
                .collect(),
            rotary,
            layout: TowerLayout {
                merge: self.spatial_merge,
                windows: self.windows.clone(),
                position_grid: self.position_grid,
                deepstack: self.deepstack.clone(),
            },
        })
    }
}

impl VisionTower {
    /// Prepares the patches of a step.
    pub(crate) fn inputs(&self, patches: Tensor<2>, grids: &[[usize; 3]]) -> Result<VisionInputs> {
        let device = patches.device();
        let merge = self.layout.merge;
        let mut positions = vision_positions(grids, merge)?;
        let learned = self.layout.position_grid.map(|side| {
            let (cells, weights) = interpolate(side, grids, &positions);
            let patches = positions.tokens();
            LearnedPositions {
                cells: indices(cells, &device).reshape([4, patches]),
                weights: Tensor::<1>::from_data(TensorData::new(weights, [4 * patches]), &device)
                    .reshape([4, patches, 1]),
            }
        });
        let windows = match &self.layout.windows {
            Some(windows) => {
                let windows = vision_windows(grids, merge, windows.side)?;
                let group = merge * merge;
                let patches = |merged: &usize| merged * group..(merged + 1) * group;
                let order: Vec<usize> = windows.window_index.iter().flat_map(patches).collect();
                let mut ids: Vec<i64> = Vec::with_capacity(order.len() * positions.axis_count());
                for axis in 0..positions.axis_count() {
                    let axis_ids = positions.axis(axis)?;
                    ids.extend(order.iter().map(|patch| i64::from(axis_ids[*patch])));
                }
                positions = Positions::new(positions.axis_count(), &ids)?;

                let mut inverse = vec![0; windows.window_index.len()];
                for (index, merged) in windows.window_index.iter().enumerate() {
                    inverse[*merged] = index;
                }
                Some(WindowOrder {
                    order: indices(windows.window_index, &device),
                    inverse: indices(inverse, &device),
                    attention: within(&windows.cu_window_seqlens)?,
                })
            }
            None => None,
        };
        Ok(VisionInputs {
            patches,
            angles: self.rotary.try_angles(&positions, &device)?,
            frames: within(&vision_cu_seqlens(grids)?)?,
            windows,
            learned,
        })
    }

    pub(crate) fn forward(
        &self,
        inputs: &VisionInputs,
        draw: Draw,
        trace: &mut Trace,
    ) -> Result<VisionOutput> {
        let mut hidden = self.first(inputs, trace);
        let mut deepstack = Vec::new();
        for index in 0..self.depth() {
            hidden = self.block(index, hidden, inputs, draw)?;
            trace.record(|| format!("vision.block.{index}.out"), &hidden);
            if let Some(which) = self.feature_of(index) {
                let feature = self.feature(which, hidden.clone(), draw)?;
                trace.record(|| format!("vision.deepstack.{which}"), &feature);
                deepstack.push(feature);
                hidden = onward(hidden);
            }
        }
        let merged = self.merged(hidden, inputs, draw)?;
        trace.record(|| "vision.merged".into(), &merged);
        Ok(VisionOutput { merged, deepstack })
    }

    /// The number of blocks.
    pub(crate) fn depth(&self) -> usize {
        self.blocks.len()
    }

    /// A block as a module.
    pub(crate) fn block_at(&self, index: usize) -> &impl Module {
        &self.blocks[index]
    }

    /// Whether a parameter of [`first`](Self::first) is trained.
    pub(crate) fn first_trains(&self) -> bool {
        trains(&self.patch_embed) || self.pos_embed.as_ref().is_some_and(trains)
    }

    /// Embeds the patches, in the order of the blocks.
    pub(crate) fn first(&self, inputs: &VisionInputs, trace: &mut Trace) -> Tensor<2> {
        let mut hidden = self.patch_embed.forward(inputs.patches.clone());
        trace.record(|| "vision.patch_embed".into(), &hidden);
        if let (Some(embedding), Some(learned)) = (&self.pos_embed, &inputs.learned) {
            let corners = embedding.forward(learned.cells.clone());
            let weights = learned.weights.clone().cast(corners.dtype());
            hidden = hidden + (corners * weights).sum_dim(0).squeeze_dim::<2>(0);
        }
        match &inputs.windows {
            Some(windows) => self.reorder(hidden, windows.order.clone()),
            None => hidden,
        }
    }

    /// Runs a block.
    pub(crate) fn block(
        &self,
        index: usize,
        hidden: Tensor<2>,
        inputs: &VisionInputs,
        draw: Draw,
    ) -> Result<Tensor<2>> {
        let attention = match (&self.layout.windows, &inputs.windows) {
            (Some(layout), Some(windows)) if !layout.full_attention_blocks.contains(&index) => {
                &windows.attention
            }
            _ => &inputs.frames,
        };
        let common = Common {
            angles: &inputs.angles,
            attention,
            draw,
        };
        self.blocks[index].forward(hidden, common)
    }

    /// Which of the decoder's features a block's output makes, if any.
    pub(crate) fn feature_of(&self, block: usize) -> Option<usize> {
        self.layout.deepstack.iter().position(|at| *at == block)
    }

    /// A feature of the decoder, from the output of its block.
    pub(crate) fn feature(&self, which: usize, hidden: Tensor<2>, draw: Draw) -> Result<Tensor<2>> {
        self.deepstack_merger_list[which].forward(hidden, draw)
    }

    /// The embeddings of the merged patches, from the output of the last block.
    pub(crate) fn merged(
        &self,
        hidden: Tensor<2>,
        inputs: &VisionInputs,
        draw: Draw,
    ) -> Result<Tensor<2>> {
        let merged = self.merger.forward(hidden, draw)?;
        Ok(match &inputs.windows {
            Some(windows) => merged.select(0, windows.inverse.clone()),
            None => merged,
        })
    }

    /// The linear layers by name.
    pub(crate) fn linears(&mut self) -> impl Iterator<Item = (String, &mut Linear)> {
        let blocks = self
            .blocks
            .iter_mut()
            .enumerate()
            .flat_map(|(index, block)| {
                let attention = [
                    ("attn.qkv", &mut block.attn.qkv),
                    ("attn.proj", &mut block.attn.proj),
                ];
                let attention = attention
                    .into_iter()
                    .map(|(name, linear)| (name.to_owned(), linear));
                let mlp = block.mlp.linears().into_iter();
                attention
                    .chain(mlp.map(|(name, linear)| (format!("mlp.{name}"), linear)))
                    .map(move |(name, linear)| (format!("blocks.{index}.{name}"), linear))
            });
        let list = self.deepstack_merger_list.iter_mut().enumerate();
        let list = list.map(|(index, merger)| (format!("deepstack_merger_list.{index}"), merger));
        let mergers = std::iter::once(("merger".to_owned(), &mut self.merger)).chain(list);
        blocks.chain(mergers.flat_map(|(of, merger)| {
            let mlp = merger.mlp.linears().into_iter();
            mlp.map(move |(name, linear)| (format!("{of}.mlp.{name}"), linear))
        }))
    }

    /// Reorders the squares of merged patches.
    fn reorder(&self, hidden: Tensor<2>, order: Tensor<1, Int>) -> Tensor<2> {
        let [patches, channels] = hidden.dims();
        let group = self.layout.merge * self.layout.merge;
        hidden
            .reshape([patches / group, group, channels])
            .select(0, order)
            .reshape([patches, channels])
    }
}

/// A tensor that one part of the graph reads beside another, for that part: its gradients are
/// summed before they are added to the other's. Else the order of the sum, and its last bit, would
/// be that in which autodiff happens to visit the uses.
pub(crate) fn onward(hidden: Tensor<2>) -> Tensor<2> {
    if hidden.is_tracked() {
        hidden * 1.0
    } else {
        hidden
    }
}

/// Full attention within each segment of packed patches.
fn within(cu_seqlens: &[usize]) -> Result<Attention> {
    let patches = cu_seqlens.last().copied().unwrap_or(0);
    let rules = MaskRules {
        cu_seqlens: Some(cu_seqlens),
        ..Default::default()
    };
    Ok(Attention::new(AttentionMask::new(
        &rules, 1, patches, patches,
    )?))
}

/// Bilinear interpolation of a `side` x `side` grid to each image: for every patch the cells above
/// left, above right, below left and below right, corner by corner, and their weights.
fn interpolate(side: usize, grids: &[[usize; 3]], positions: &Positions) -> (Vec<usize>, Vec<f32>) {
    let sizes = grids
        .iter()
        .flat_map(|[frames, height, width]| {
            std::iter::repeat_n([*height, *width], frames * height * width)
        })
        .enumerate();
    // The first and the last patch are at the first and the last cell. The cells before and after a
    // patch, and its distance from the first of them.
    let neighbours = |id: f64, size: usize| {
        let at = id * (side - 1) as f64 / (size.max(2) - 1) as f64;
        let before = at.floor();
        let after = (before as usize + 1).min(side - 1);
        (before as usize, after, at - before)
    };
    let (mut cells, mut weights) = (vec![Vec::new(); 4], vec![Vec::new(); 4]);
    for (patch, [height, width]) in sizes {
        let (top, bottom, down) = neighbours(positions.value(0, patch), height);
        let (left, right, across) = neighbours(positions.value(1, patch), width);
        let corners = [
            (top, left, (1.0 - down) * (1.0 - across)),
            (top, right, (1.0 - down) * across),
            (bottom, left, down * (1.0 - across)),
            (bottom, right, down * across),
        ];
        for (corner, (row, column, weight)) in corners.into_iter().enumerate() {
            cells[corner].push(row * side + column);
            weights[corner].push(weight as f32);
        }
    }
    (cells.concat(), weights.concat())
}

/// A convolution whose kernel is a whole patch, computed as one matrix product.
#[derive(Module, Debug)]
struct PatchEmbed {
    proj: PatchProjection,
}

#[derive(Module, Debug)]
struct PatchProjection {
    /// `[channels, colours, frames, rows, columns]`
    weight: Param<Tensor<5>>,
    bias: Option<Param<Tensor<1>>>,
}

impl PatchEmbed {
    fn new(config: &VisionConfig, device: &Device) -> Self {
        let (channels, fan_in) = (config.hidden_size, config.patch_elems());
        let uniform = Initializer::KaimingUniform {
            gain: 1.0 / 3f64.sqrt(),
            fan_out_only: false,
        };
        let [colours, frames, rows, columns] = config.patch;
        let shape = [channels, colours, frames, rows, columns];
        Self {
            proj: PatchProjection {
                weight: uniform.init_with(shape, Some(fan_in), Some(channels), device),
                bias: config
                    .patch_bias
                    .then(|| uniform.init_with([channels], Some(fan_in), Some(channels), device)),
            },
        }
    }

    fn forward(&self, patches: Tensor<2>) -> Tensor<2> {
        let weight = self.proj.weight.val();
        let [channels, ..] = weight.dims();
        let weight = weight.reshape([channels as i32, -1]);
        let hidden = patches.matmul(weight.transpose());
        match &self.proj.bias {
            Some(bias) => hidden + bias.val().unsqueeze(),
            None => hidden,
        }
    }
}

#[derive(Module, Debug)]
struct Block {
    norm1: Norm,
    attn: SelfAttention,
    norm2: Norm,
    mlp: FeedForward,
}

impl Block {
    fn new(config: &VisionConfig, rotary: &Rotary, device: &Device) -> Self {
        let channels = config.hidden_size;
        Self {
            norm1: Norm::new(channels, config.rms_norm, device),
            attn: SelfAttention {
                qkv: Linear::new(channels, 3 * channels, true, device),
                proj: Linear::new(channels, channels, true, device),
                rotary: rotary.clone(),
                heads: config.heads,
            },
            norm2: Norm::new(channels, config.rms_norm, device),
            mlp: FeedForwardConfig {
                input: channels,
                hidden: config.intermediate_size,
                output: channels,
                gated: config.gated,
                bias: true,
                activation: config.activation,
            }
            .init(device),
        }
    }

    fn forward(&self, hidden: Tensor<2>, common: Common) -> Result<Tensor<2>> {
        let attended = self
            .attn
            .forward(self.norm1.forward(hidden.clone())?, common)?;
        let hidden = hidden + attended;
        let normalised = self.norm2.forward(hidden.clone())?;
        Ok(hidden + self.mlp.forward(normalised, common.draw)?)
    }
}

#[derive(Module, Debug)]
struct SelfAttention {
    qkv: Linear,
    proj: Linear,
    rotary: Rotary,
    heads: usize,
}

impl SelfAttention {
    fn forward(&self, hidden: Tensor<2>, common: Common) -> Result<Tensor<2>> {
        let [patches, channels] = hidden.dims();
        let head_dim = channels / self.heads;
        let qkv = self
            .qkv
            .forward(hidden, common.draw)
            .reshape([patches, 3, self.heads, head_dim]);
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part, 1).squeeze_dim::<3>(1));
        drop(qkv);
        let (q, k) = self.rotary.try_forward(q, k, common.angles)?;

        let heads_first = |x: Tensor<3>| x.unsqueeze_dim::<4>(0).swap_dims(1, 2);
        let [q, k, v] = [q, k, v].map(heads_first);
        let attended = attend(common.attention, q, k, v)?.squeeze_dim::<2>(0);
        Ok(self.proj.forward(attended, common.draw))
    }
}

/// Merges a square of patches into one embedding.
#[derive(Module, Debug)]
struct Merger {
    norm: Norm,
    mlp: FeedForward,
    merged_channels: usize,
    normalises_merged: bool,
}

impl Merger {
    fn new(config: &VisionConfig, normalises_merged: bool, device: &Device) -> Self {
        let merged_channels = config.hidden_size * config.merged_patches();
        let normalised = if normalises_merged {
            merged_channels
        } else {
            config.hidden_size
        };
        Self {
            norm: Norm::new(normalised, config.rms_norm, device),
            mlp: FeedForwardConfig {
                input: merged_channels,
                hidden: merged_channels,
                output: config.out_hidden_size,
                gated: false,
                bias: true,
                activation: Activation::Gelu,
            }
            .init(device),
            merged_channels,
            normalises_merged,
        }
    }

    fn forward(&self, hidden: Tensor<2>, draw: Draw) -> Result<Tensor<2>> {
        let merge = |x: Tensor<2>| x.reshape([-1, self.merged_channels as i32]);
        let normalised = if self.normalises_merged {
            self.norm.forward(merge(hidden))?
        } else {
            merge(self.norm.forward(hidden)?)
        };
        self.mlp.forward(normalised, draw)
    }
}
