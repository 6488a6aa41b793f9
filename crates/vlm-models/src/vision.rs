//! The vision tower: converts patches to the embeddings that replace the placeholders.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, GradientSource, MaskRules, gelu, linear};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_core::position_ids::{vision_cu_seqlens, vision_positions, vision_windows};
use rope_core::{Layout, Positions};

use crate::config::{Interpolation, VisionConfig, VisionWindows};
use crate::error::Result;
use crate::layers::{
    Activation, FeedForward, FeedForwardConfig, Gate, LayerNorm, Norm, OF_CONVOLUTION, RmsNorm,
    attend,
};
use crate::linear::{Draw, Linear};
use crate::random::Draws;
use crate::step::Common;
use crate::tensors::{indices, trains, wanted_inputs};
use crate::trace::Trace;

/// Converts patches to embeddings, one for each square of merged patches.
#[derive(Module, Debug)]
pub(crate) struct VisionTower {
    patch_embed: PatchEmbed,
    post_conv_layernorm: Option<RmsNorm>,
    pos_embed: Option<Embedding>,
    blocks: Vec<Block>,
    merger: Merger,
    deepstack_merger_list: Vec<SquareMerger>,
    rotary: Rotary,
    #[module(skip)]
    layout: TowerLayout,
}

/// The part of the configuration that determines the order of the patches.
#[derive(Clone, Debug)]
struct TowerLayout {
    placeholders: [i64; 2],
    patch_elems: usize,
    merge: usize,
    windows: Option<VisionWindows>,
    position_grid: Option<usize>,
    interpolation: Interpolation,
    deepstack: Vec<usize>,
}

/// The patches of a step with the data derived from their grids.
#[derive(Clone, Debug)]
pub(crate) struct VisionInputs {
    patches: Tensor<2>,
    angles: RotaryAngles,
    /// Attention within each frame.
    frames: Attention,
    windows: Option<WindowOrder>,
    learned: Vec<LearnedPositions>,
}

/// The order of the merged tokens window by window, and its inverse.
#[derive(Clone, Debug)]
struct WindowOrder {
    order: Tensor<1, Int>,
    index: Vec<usize>,
    inverse: Tensor<1, Int>,
    /// Attention within each window.
    attention: Attention,
}

/// Four neighbours of each patch on the learned grid, `[4, patches]`, and their weights, `[4,
/// patches, 1]`: all cells from which a patch is interpolated, or one row of them.
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
            post_conv_layernorm: self
                .downsamples
                .then(|| RmsNorm::new(self.hidden_size, self.norm_eps, device)),
            pos_embed: self
                .position_grid
                .map(|side| EmbeddingConfig::new(side * side, self.hidden_size).init(device)),
            blocks: (0..self.depth)
                .map(|_| Block::new(self, &rotary, device))
                .collect(),
            merger: if self.downsamples {
                Merger::Downsampling(DownsamplingMerger::new(self, device))
            } else {
                Merger::Square(SquareMerger::new(self, false, device))
            },
            deepstack_merger_list: self
                .deepstack
                .iter()
                .map(|_| SquareMerger::new(self, true, device))
                .collect(),
            rotary,
            layout: TowerLayout {
                placeholders: [self.image_token, self.video_token],
                patch_elems: self.patch_elems(),
                merge: self.spatial_merge,
                windows: self.windows.clone(),
                position_grid: self.position_grid,
                interpolation: self.interpolation,
                deepstack: self.deepstack.clone(),
            },
        })
    }
}

impl VisionInputs {
    /// The values of the merged patches, in the order of the blocks.
    pub(crate) fn in_order(&self, merged_values: &[usize]) -> Vec<usize> {
        match &self.windows {
            Some(windows) => windows
                .index
                .iter()
                .map(|merged| merged_values[*merged])
                .collect(),
            None => merged_values.to_vec(),
        }
    }
}

impl VisionTower {
    /// The placeholder tokens of a merged patch of a picture and of a video.
    pub(crate) fn placeholders(&self) -> [i64; 2] {
        self.layout.placeholders
    }

    /// Numbers in a patch.
    pub(crate) fn patch_elems(&self) -> usize {
        self.layout.patch_elems
    }

    /// Patches that become one token.
    pub(crate) fn merged_patches(&self) -> usize {
        self.layout.merge * self.layout.merge
    }

    /// Prepares the patches of a step.
    pub(crate) fn inputs(&self, patches: Tensor<2>, grids: &[[usize; 3]]) -> Result<VisionInputs> {
        let device = patches.device();
        let merge = self.layout.merge;
        let mut positions = vision_positions(grids, merge)?;
        let learned = self.layout.position_grid.map(|side| {
            let patches = positions.tokens();
            let neighbours = neighbours(self.layout.interpolation, side, grids, &positions);
            let neighbours = neighbours.into_iter().map(|(cells, weights)| {
                let weights = TensorData::new(weights, [4, patches, 1]);
                LearnedPositions {
                    cells: indices(cells, &device).reshape([4, patches]),
                    weights: Tensor::from_data(weights, &device),
                }
            });
            neighbours.collect()
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
                    order: indices(windows.window_index.clone(), &device),
                    index: windows.window_index,
                    inverse: indices(inverse, &device),
                    attention: within(&windows.cu_window_seqlens)?,
                })
            }
            None => None,
        };
        Ok(VisionInputs {
            angles: self
                .rotary
                .try_angles_for(patches.dtype(), &positions, &device)?,
            patches,
            frames: within(&vision_cu_seqlens(grids)?)?,
            windows,
            learned: learned.unwrap_or_default(),
        })
    }

    pub(crate) fn forward(
        &self,
        inputs: &VisionInputs,
        draws: Option<&Draws>,
        trace: &mut Trace,
    ) -> Result<VisionOutput> {
        let mut hidden = self.first(inputs, trace)?;
        let mut deepstack = Vec::new();
        for index in 0..self.depth() {
            hidden = self.block(index, hidden, inputs, draws)?;
            trace.record(|| format!("vision.block.{index}.out"), &hidden);
            if let Some(which) = self.feature_of(index) {
                let feature = self.feature(which, hidden.clone(), draws)?;
                trace.record(|| format!("vision.deepstack.{which}"), &feature);
                deepstack.push(feature);
                hidden = onward(hidden);
            }
        }
        let merged = self.merged(hidden, inputs, draws)?;
        trace.record(|| "vision.merged".into(), &merged);
        Ok(VisionOutput { merged, deepstack })
    }

    /// The number of blocks.
    pub(crate) fn depth(&self) -> usize {
        self.blocks.len()
    }

    /// For each block and for the merger, true if the gradient of its input is needed.
    pub(crate) fn wanted(&self) -> Vec<bool> {
        wanted_inputs(self.first_trains(), self.blocks.iter().map(trains))
    }

    /// True if a parameter of [`first`](Self::first) is trained.
    fn first_trains(&self) -> bool {
        trains(&self.patch_embed)
            || self.post_conv_layernorm.as_ref().is_some_and(trains)
            || self.pos_embed.as_ref().is_some_and(trains)
    }

    /// Embeds the patches, in the order of the blocks.
    pub(crate) fn first(&self, inputs: &VisionInputs, trace: &mut Trace) -> Result<Tensor<2>> {
        let mut hidden = self.patch_embed.forward(inputs.patches.clone())?;
        trace.record(|| "vision.patch_embed".into(), &hidden);
        if let Some(norm) = &self.post_conv_layernorm {
            hidden = norm.forward(hidden)?;
        }
        if let Some(embedding) = &self.pos_embed {
            for learned in &inputs.learned {
                let cells = embedding.forward(learned.cells.clone());
                let weights = learned.weights.clone().cast(cells.dtype());
                hidden = hidden + (cells * weights).sum_dim(0).squeeze_dim::<2>(0);
            }
        }
        Ok(match &inputs.windows {
            Some(windows) => self.reorder(hidden, windows.order.clone()),
            None => hidden,
        })
    }

    /// Runs a block.
    pub(crate) fn block(
        &self,
        index: usize,
        hidden: Tensor<2>,
        inputs: &VisionInputs,
        draws: Option<&Draws>,
    ) -> Result<Tensor<2>> {
        self.blocks[index].forward(hidden, self.common(index, inputs, draws))
    }

    /// The source of the backward from the gradient of a block's output, which is not computed.
    pub(crate) fn block_source(
        &self,
        index: usize,
        hidden: Tensor<2>,
        inputs: &VisionInputs,
        draws: Option<&Draws>,
        gradient: Tensor<2>,
    ) -> Result<GradientSource> {
        self.blocks[index].source(hidden, self.common(index, inputs, draws), gradient)
    }

    fn common<'a>(
        &self,
        index: usize,
        inputs: &'a VisionInputs,
        draws: Option<&'a Draws>,
    ) -> Common<'a> {
        let attention = match (&self.layout.windows, &inputs.windows) {
            (Some(layout), Some(windows)) if !layout.full_attention_blocks.contains(&index) => {
                &windows.attention
            }
            _ => &inputs.frames,
        };
        Common {
            angles: &inputs.angles,
            attention,
            window: None,
            recurrence: None,
            draw: draws.map(|draws| &draws.patches[..]),
            attended: None,
            part: None,
            balance: None,
        }
    }

    /// The index of the decoder feature computed from a block's output, if any.
    pub(crate) fn feature_of(&self, block: usize) -> Option<usize> {
        self.layout.deepstack.iter().position(|at| *at == block)
    }

    /// A feature of the decoder, from the output of its block.
    pub(crate) fn feature(
        &self,
        which: usize,
        hidden: Tensor<2>,
        draws: Option<&Draws>,
    ) -> Result<Tensor<2>> {
        let draw = draws.map(|draws| &draws.merged[..]);
        self.deepstack_merger_list[which].forward(hidden, draw)
    }

    /// The embeddings of the merged patches, from the output of the last block.
    pub(crate) fn merged(
        &self,
        hidden: Tensor<2>,
        inputs: &VisionInputs,
        draws: Option<&Draws>,
    ) -> Result<Tensor<2>> {
        let draw = draws.map(|draws| &draws.merged[..]);
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
        let (proj, mlp) = match &mut self.merger {
            Merger::Square(merger) => (None, &mut merger.mlp),
            Merger::Downsampling(merger) => (Some(&mut merger.proj), &mut merger.mlp),
        };
        let proj = proj.map(|proj| ("merger.proj".to_owned(), proj));
        let list = self.deepstack_merger_list.iter_mut().enumerate();
        let list =
            list.map(|(index, merger)| (format!("deepstack_merger_list.{index}"), &mut merger.mlp));
        let mergers = std::iter::once(("merger".to_owned(), mlp)).chain(list);
        let mergers = mergers.flat_map(|(of, mlp)| {
            let linears = mlp.linears().into_iter();
            linears.map(move |(name, linear)| (format!("{of}.mlp.{name}"), linear))
        });
        blocks.chain(proj).chain(mergers)
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

/// The handle of a tensor for one of two parts of the graph that read it: the part's gradients are
/// summed before they are added to the other's. Otherwise the order of the sum, and its last bit,
/// would depend on the order in which autodiff visits the uses.
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

/// Interpolates a `side` x `side` grid to each image. Returns for every patch the cells of the grid
/// and their weights, in groups of four; within a group, neighbour by neighbour.
fn neighbours(
    interpolation: Interpolation,
    side: usize,
    grids: &[[usize; 3]],
    positions: &Positions,
) -> Vec<(Vec<usize>, Vec<f32>)> {
    let sizes = grids
        .iter()
        .flat_map(|[frames, height, width]| {
            std::iter::repeat_n([*height, *width], frames * height * width)
        })
        .enumerate();
    let mut fours = Vec::new();
    for (patch, [height, width]) in sizes {
        let rows = along(interpolation, side, positions.value(0, patch), height);
        let columns = along(interpolation, side, positions.value(1, patch), width);
        let cells = rows.iter().flat_map(|(row, down)| {
            let cell = move |(column, across): &(usize, f64)| (row * side + column, down * across);
            columns.iter().map(cell)
        });
        let patches = positions.tokens();
        for (index, (cell, weight)) in cells.enumerate() {
            if index / 4 == fours.len() {
                fours.push((vec![0; 4 * patches], vec![0.0; 4 * patches]));
            }
            let (cells, weights) = &mut fours[index / 4];
            cells[index % 4 * patches + patch] = cell;
            weights[index % 4 * patches + patch] = weight as f32;
        }
    }
    fours
}

/// The cells along one side of a grid from which a patch's embedding is interpolated, with their
/// weights. The patch has index `id` of `size`.
fn along(interpolation: Interpolation, side: usize, id: f64, size: usize) -> Vec<(usize, f64)> {
    match interpolation {
        // The first and the last patch are at the first and the last cell.
        Interpolation::Bilinear => {
            let at = id * (side - 1) as f64 / (size.max(2) - 1) as f64;
            let before = at.floor();
            let after = (before as usize + 1).min(side - 1);
            vec![(before as usize, 1.0 - (at - before)), (after, at - before)]
        }
        // The edges of the grid are those of the image, and cells beyond repeat the edge.
        Interpolation::Bicubic => {
            let at = (id + 0.5) / size as f64 * side as f64 - 0.5;
            let before = at.floor();
            let taps = (-1..3).map(|offset| {
                let cell = before + f64::from(offset);
                let inside = cell.clamp(0.0, (side - 1) as f64);
                (inside as usize, cubic(at - cell))
            });
            taps.collect()
        }
    }
}

/// The weight of a cell at a distance of up to 2 cells.
///
/// # Source
/// Keys, Cubic Convolution Interpolation for Digital Image Processing, 1981, equation 4 with a =
/// -0.75, as torch's `grid_sample` has it
fn cubic(distance: f64) -> f64 {
    const A: f64 = -0.75;
    let x = distance.abs();
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    }
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

/// The default epsilon of torch's layer norm.
const TORCH_LAYER_NORM_EPS: f64 = 1e-5;
impl PatchEmbed {
    fn new(config: &VisionConfig, device: &Device) -> Self {
        let (channels, fan_in) = (config.hidden_size, config.patch_elems());
        let uniform = OF_CONVOLUTION;
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

    fn forward(&self, patches: Tensor<2>) -> Result<Tensor<2>> {
        let weight = self.proj.weight.val();
        let [channels, ..] = weight.dims();
        let weight = weight.reshape([channels as i32, -1]);
        let bias = self.proj.bias.as_ref().map(Param::val);
        Ok(linear(patches, weight.transpose(), bias, None)?)
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
            norm1: Norm::new(channels, config.rms_norm, config.norm_eps, device),
            attn: SelfAttention {
                qkv: Linear::new(channels, 3 * channels, config.qkv_bias, device),
                proj: Linear::new(channels, channels, config.bias, device),
                rotary: rotary.clone(),
                heads: config.heads,
            },
            norm2: Norm::new(channels, config.rms_norm, config.norm_eps, device),
            mlp: FeedForwardConfig {
                input: channels,
                hidden: config.intermediate_size,
                output: channels,
                gate: if config.gated { Gate::Own } else { Gate::None },
                bias: config.bias,
                activation: config.activation,
            }
            .init(device),
        }
    }

    fn forward(&self, hidden: Tensor<2>, common: Common) -> Result<Tensor<2>> {
        let (hidden, normalised) = self.attended(hidden, common)?;
        Ok(hidden + self.mlp.forward(normalised, common.draw)?)
    }

    /// The source of the backward from the gradient of the output, which is not computed.
    fn source(
        &self,
        hidden: Tensor<2>,
        common: Common,
        gradient: Tensor<2>,
    ) -> Result<GradientSource> {
        let (hidden, normalised) = self.attended(hidden, common)?;
        let source = self.mlp.source(normalised, common.draw, gradient.clone())?;
        Ok(source.with(hidden, gradient)?)
    }

    /// The sum with attention's output, and the input of the feed-forward network.
    fn attended(&self, hidden: Tensor<2>, common: Common) -> Result<(Tensor<2>, Tensor<2>)> {
        let attended = self
            .attn
            .forward(self.norm1.forward(hidden.clone())?, common)?;
        let hidden = hidden + attended;
        let normalised = self.norm2.forward(hidden.clone())?;
        Ok((hidden, normalised))
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
            .forward(hidden, common.draw)?
            .reshape([patches, 3, self.heads, head_dim]);
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part, 1).squeeze_dim::<3>(1));
        drop(qkv);
        let (q, k) = self.rotary.try_forward(q, k, common.angles)?;

        let heads_first = |x: Tensor<3>| x.unsqueeze_dim::<4>(0).swap_dims(1, 2);
        let [q, k, v] = [q, k, v].map(heads_first);
        let attended = attend(common.attention, q, k, v)?.squeeze_dim::<2>(0);
        self.proj.forward(attended, common.draw)
    }
}

/// Converts the output of the blocks to embeddings.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has one")]
enum Merger {
    Square(SquareMerger),
    Downsampling(DownsamplingMerger),
}

impl Merger {
    fn forward(&self, hidden: Tensor<2>, draw: Draw) -> Result<Tensor<2>> {
        match self {
            Self::Square(merger) => merger.forward(hidden, draw),
            Self::Downsampling(merger) => merger.forward(hidden, draw),
        }
    }
}

/// Merges a square of patches into one embedding by a feed-forward network.
#[derive(Module, Debug)]
struct SquareMerger {
    norm: Norm,
    mlp: FeedForward,
    merged_channels: usize,
    normalises_merged: bool,
}

impl SquareMerger {
    fn new(config: &VisionConfig, normalises_merged: bool, device: &Device) -> Self {
        let merged_channels = config.hidden_size * config.merged_patches();
        let normalised = if normalises_merged {
            merged_channels
        } else {
            config.hidden_size
        };
        Self {
            norm: Norm::new(normalised, config.rms_norm, config.norm_eps, device),
            mlp: FeedForwardConfig {
                input: merged_channels,
                hidden: config.merger_size,
                output: config.out_hidden_size,
                gate: Gate::None,
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

/// Merges a square of patches into one embedding by a convolution; a gated feed-forward network
/// follows.
#[derive(Module, Debug)]
struct DownsamplingMerger {
    post_layernorm: RmsNorm,
    downsample: Downsample,
    proj: Linear,
    post_projection_norm: LayerNorm,
    mlp: FeedForward,
}

/// A convolution whose kernel is a whole square of patches, computed as one matrix product.
#[derive(Module, Debug)]
struct Downsample {
    /// `[outputs, channels, rows, columns]`
    weight: Param<Tensor<4>>,
    bias: Param<Tensor<1>>,
}

impl DownsamplingMerger {
    fn new(config: &VisionConfig, device: &Device) -> Self {
        let (channels, outputs) = (config.hidden_size, config.out_hidden_size);
        let side = config.spatial_merge;
        let fan_in = channels * config.merged_patches();
        let (fan_in, fan_out) = (Some(fan_in), Some(outputs));
        let kernel = [outputs, channels, side, side];
        Self {
            post_layernorm: RmsNorm::new(channels, config.norm_eps, device),
            downsample: Downsample {
                weight: OF_CONVOLUTION.init_with(kernel, fan_in, fan_out, device),
                bias: OF_CONVOLUTION.init_with([outputs], fan_in, fan_out, device),
            },
            proj: Linear::new(outputs, outputs, false, device),
            post_projection_norm: LayerNorm::new(outputs, TORCH_LAYER_NORM_EPS, device),
            mlp: FeedForwardConfig {
                input: outputs,
                hidden: config.merger_size,
                output: outputs,
                gate: Gate::Own,
                bias: false,
                activation: config.activation,
            }
            .init(device),
        }
    }

    fn forward(&self, hidden: Tensor<2>, draw: Draw) -> Result<Tensor<2>> {
        let weight = self.downsample.weight.val();
        let [outputs, channels, rows, columns] = weight.dims();
        let square = rows * columns;
        let hidden = self.post_layernorm.forward(hidden)?;
        let hidden = hidden
            .reshape([-1, square as i32, channels as i32])
            .swap_dims(1, 2)
            .reshape([-1, (channels * square) as i32]);
        let weight = weight.reshape([outputs, channels * square]);
        let bias = Some(self.downsample.bias.val());
        let hidden = linear(hidden, weight.transpose(), bias, None)?;
        let hidden = self.proj.forward(hidden, draw)?;
        let hidden = gelu(self.post_projection_norm.forward(hidden)?);
        self.mlp.forward(hidden, draw)
    }
}
