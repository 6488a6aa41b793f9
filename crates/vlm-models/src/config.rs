//! The contents of a `config.json`, and the differences between the families.

use std::cell::Cell;
use std::path::Path;

use rope_burn::Implementation;
use rope_core::RotarySpec;
use rope_core::hf::parse_config;
use rope_core::position_ids::{Compatibility, PositionRules};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde::de::value::MapDeserializer;
use serde_json::Value;
use vlm_family::{
    AttentionBias, ExpertParts, Family, RouterRule, SharedRule, TowerParts, VisionParts,
    WindowedLayers,
};

use crate::error::{Result, VlmError};
use crate::file;
use crate::layers::Activation;

/// The limit on layers of a decoder and blocks of a tower.
pub(crate) const MAX_LAYERS: usize = 65_536;
/// The factor on the auxiliary loss of routers, if a configuration asks for it and states none.
const DEFAULT_ROUTER_LOSS: f64 = 1e-3;
/// The epsilon of a tower's norms, if its configuration does not state it.
const VISION_NORM_EPS: f64 = 1e-6;

/// Adds the defaults of keys that an object and its nested objects omit.
fn complete(config: &mut Value, defaults: &Value) {
    let (Value::Object(config), Value::Object(defaults)) = (config, defaults) else {
        return; // an error of whoever reads the value
    };
    for (key, default) in defaults {
        match config.get_mut(key) {
            Some(stated) => complete(stated, default),
            // The decoder's keys may be at the top, and the model has a separate tower.
            None if default.is_object() => {}
            None => {
                config.insert(key.clone(), default.clone());
            }
        }
    }
}

/// Replaces a family's model type, also as the beginning of a nested one, by the type of the family
/// with the same rotations and position ids.
fn set_rotation(config: &mut Value, family: &Family) {
    let parts = [
        "/model_type",
        "/text_config/model_type",
        "/vision_config/model_type",
    ];
    for part in parts {
        if let Some(Value::String(stated)) = config.pointer_mut(part)
            && let Some(rest) = stated.strip_prefix(family.model_type)
        {
            *stated = format!("{}{rest}", family.rotation);
        }
    }
}

/// A model of one of the families: sizes, rotations and rules, validated once.
///
/// # Examples
/// ```no_run
/// use burn::tensor::Device;
/// use vlm_models::VlmConfig;
///
/// let config = VlmConfig::from_folder("Qwen2.5-VL-3B-Instruct")?;
/// let model = config.load("Qwen2.5-VL-3B-Instruct", &Device::flex().autodiff())?;
/// # Ok::<(), vlm_models::VlmError>(())
/// ```
#[derive(Clone, Debug)]
pub struct VlmConfig {
    pub(crate) family: &'static Family,
    /// The language decoder.
    pub text: TextConfig,
    /// The vision tower; `None` for a model of text alone.
    pub vision: Option<VisionConfig>,
    /// The rules that compute position ids from a prompt.
    pub position_rules: PositionRules,
    /// The implementation of the rotation.
    pub implementation: Implementation,
    /// True if the word embeddings are also the matrix of the output head.
    pub tied: bool,
    /// True if padding predicts the first token of its row and has labels, as in transformers.
    /// Otherwise the loss does not depend on the side of the padding.
    pub padding_predicts: bool,
}

/// The language decoder.
#[derive(Clone, Debug)]
pub struct TextConfig {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Channels inside the feed-forward network.
    pub intermediate_size: usize,
    /// Layers.
    pub layers: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// The epsilon of RMS norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// True if q, k and v have a bias.
    pub attention_bias: bool,
    /// True if the output of attention has a bias.
    pub output_bias: bool,
    /// True if each head of q and k is normalised before the rotation.
    pub qk_norm: bool,
    /// True if the outputs of attention and feed-forward network are normalised before they are
    /// added to the residual stream.
    pub output_norms: bool,
    /// True if one matrix computes both the gate of the feed-forward network and the gated value.
    pub joined_gate: bool,
    /// True if norms of the residual stream and of q and k multiply by 1 + weight (unit offset).
    pub unit_offset: bool,
    /// True if the output of attention is gated, by additional outputs of q's matrix.
    pub output_gate: bool,
    /// True if the linear layers of the feed-forward networks have a bias.
    pub mlp_bias: bool,
    /// Feed-forward networks of experts, if any layer has them.
    pub experts: Option<ExpertConfig>,
    /// The layers with a state, if any.
    pub delta: Option<DeltaConfig>,
    /// Attention over the last tokens, if any layer has it.
    pub window: Option<SlidingWindow>,
    /// The rotation of q and k.
    pub rotation: RotarySpec,
}

/// Feed-forward networks of several experts, of which each token passes some.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertConfig {
    /// Experts.
    pub experts: usize,
    /// Experts that a token passes.
    pub per_token: usize,
    /// Channels inside an expert.
    pub intermediate_size: usize,
    /// Channels inside the expert that every token passes, if there is one.
    pub shared_size: Option<usize>,
    /// True if its output is multiplied by the sigmoid of a gate.
    pub has_shared_gate: bool,
    /// True if the factors of a token's experts sum to 1, before they are scaled.
    pub is_normalised: bool,
    /// The choice by sigmoids in groups; `None` for the likeliest by a softmax.
    pub groups: Option<ExpertGroups>,
    /// Layers with an ordinary feed-forward network.
    pub dense_layers: Vec<usize>,
    /// The factor on the auxiliary loss of routers in training, if the configuration asks for it.
    pub router_loss: Option<f64>,
}

/// The choice of experts by sigmoids plus a correction, among those of the best groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertGroups {
    /// Groups of equally many experts.
    pub groups: usize,
    /// Groups whose experts a token may pass: those with the highest sum of their two best.
    pub per_token: usize,
    /// The scale of the factors.
    pub scale: f64,
}

/// Layers of a decoder whose queries see only the last tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// The number of visible tokens, with the query's own.
    pub tokens: usize,
    /// Layers that attend to all earlier tokens.
    pub full_attention_layers: Vec<usize>,
}

/// The layers of a decoder that have a state. Each token reads and writes it by the gated delta
/// rule, instead of attending to earlier tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaConfig {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v.
    pub heads: usize,
    /// Channels of a head of q and k.
    pub key_dim: usize,
    /// Channels of a head of v.
    pub value_dim: usize,
    /// Width in tokens of the convolution before the rule.
    pub taps: usize,
    /// Layers that attend, without a state.
    pub full_attention_layers: Vec<usize>,
}

/// The vision tower.
#[derive(Clone, Debug)]
pub struct VisionConfig {
    /// The placeholder token of a merged patch of an image.
    pub image_token: i64,
    /// The placeholder token of a merged patch of a video.
    pub video_token: i64,
    /// Blocks.
    pub depth: usize,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Channels inside the feed-forward networks of the blocks.
    pub intermediate_size: usize,
    /// Channels inside the feed-forward network of the merger.
    pub merger_size: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of the merged patches: the decoder's.
    pub out_hidden_size: usize,
    /// Colours, frames, rows and columns of a patch.
    pub patch: [usize; 4],
    /// Patches along each side of the square that becomes one token.
    pub spatial_merge: usize,
    /// Root-mean-square norms instead of layer norms.
    pub rms_norm: bool,
    /// The epsilon of norms, added to the mean square or the variance.
    pub norm_eps: f64,
    /// Gated feed-forward networks.
    pub gated: bool,
    /// True if the patch embedding has a bias.
    pub patch_bias: bool,
    /// True if q, k and v have a bias.
    pub qkv_bias: bool,
    /// True if the other linear layers of the blocks have a bias.
    pub bias: bool,
    /// True if a convolution merges the patches, between two norms, and a gated network follows.
    pub downsamples: bool,
    /// The activation of the feed-forward networks.
    pub activation: Activation,
    /// Windowed attention.
    pub windows: Option<VisionWindows>,
    /// Side of the square grid of learned positions, interpolated to each image.
    pub position_grid: Option<usize>,
    /// The interpolation of that grid.
    pub interpolation: Interpolation,
    /// Blocks with outputs that are added in the decoder's first layers.
    pub deepstack: Vec<usize>,
    /// The rotation of q and k.
    pub rotation: RotarySpec,
}

/// The interpolation of learned positions between the cells of their grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// Bilinear, with the first and the last patch at the first and the last cell.
    Bilinear,
    /// Bicubic, with the edges of the grid at those of the image.
    Bicubic,
}

/// Windowed attention.
#[derive(Clone, Debug)]
pub struct VisionWindows {
    /// Side of a window, in merged tokens.
    pub side: usize,
    /// Blocks that attend over whole frames.
    pub full_attention_blocks: Vec<usize>,
}

#[derive(Deserialize)]
struct RawFamily {
    model_type: String,
}

#[derive(Deserialize)]
struct RawTop {
    tie_word_embeddings: Option<bool>,
}

#[derive(Deserialize)]
struct RawPlaceholders {
    image_token_id: i64,
    video_token_id: i64,
}

#[derive(Deserialize)]
struct RawText {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    rms_norm_eps: f64,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    attention_dropout: Option<f64>,
    tie_word_embeddings: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LayerType {
    FullAttention,
    LinearAttention,
}

/// The tokens that a layer attends to.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
enum Reach {
    #[serde(rename = "full_attention")]
    All,
    #[serde(rename = "sliding_attention")]
    Window,
}

/// The keys of a decoder with windows.
#[derive(Deserialize)]
struct RawWindow {
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<Reach>>,
}

/// The keys of a decoder with experts.
#[derive(Deserialize)]
struct RawExperts {
    #[serde(alias = "n_routed_experts")]
    num_experts: usize,
    /// As transformers 5 names the same number.
    num_local_experts: Option<usize>,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    output_router_logits: Option<bool>,
    router_aux_loss_coef: Option<f64>,
    // GLM's.
    n_shared_experts: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    routed_scaling_factor: Option<f64>,
    first_k_dense_replace: Option<usize>,
}

/// The keys of a decoder with states.
#[derive(Deserialize)]
struct RawStates {
    layer_types: Option<Vec<LayerType>>,
    full_attention_interval: usize,
    linear_conv_kernel_dim: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
}

#[derive(Deserialize)]
struct RawVision {
    depth: usize,
    /// Qwen2-VL's channels; its `hidden_size` is the `out_hidden_size` of the others.
    embed_dim: Option<usize>,
    hidden_size: usize,
    out_hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    mlp_ratio: Option<f64>,
    num_heads: usize,
    in_channels: usize,
    patch_size: usize,
    temporal_patch_size: usize,
    spatial_merge_size: usize,
    hidden_act: Activation,
    window_size: Option<usize>,
    fullatt_block_indexes: Option<Vec<usize>>,
    num_position_embeddings: Option<usize>,
    deepstack_visual_indexes: Option<Vec<usize>>,
    // GLM-4.1V's.
    image_size: Option<usize>,
    rms_norm_eps: Option<f64>,
    attention_bias: Option<bool>,
}

fn read<T: DeserializeOwned>(part: &'static str, value: &Value) -> Result<T> {
    // serde's messages about a value do not name its key, which is the last key read.
    let reading = Cell::new(None);
    let read = match value {
        Value::Object(object) => {
            let entries = object.iter().map(|(key, value)| {
                reading.set(Some(key));
                (key.as_str(), value)
            });
            let end = std::iter::from_fn(|| {
                reading.set(None);
                None
            });
            T::deserialize(MapDeserializer::new(entries.chain(end)))
        }
        other => T::deserialize(other),
    };
    read.map_err(|error: serde_json::Error| VlmError::Config {
        part,
        detail: match reading.get() {
            Some(key) => format!("{key}: {error}"),
            None => error.to_string(),
        },
    })
}

impl VlmConfig {
    /// Reads the `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// [`VlmError::File`]; those of [`from_hf_config`](Self::from_hf_config).
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        Self::from_hf_config(&file::text(&folder.as_ref().join("config.json"))?)
    }

    /// Reads the text of a `config.json`, of transformers 4 (the decoder's keys at the top) or 5
    /// (in `text_config`). Omitted keys have the defaults of their class in transformers 5.24.0.
    ///
    /// # Errors
    /// [`VlmError::Config`], [`VlmError::UnknownFamily`], [`VlmError::Unsupported`],
    /// [`VlmError::Sizes`]; [`VlmError::Rope`] if the keys of the rotation are wrong.
    pub fn from_hf_config(json: &str) -> Result<Self> {
        let mut value = parse_config(json).map_err(|error| VlmError::Config {
            part: "config.json",
            detail: error.to_string(),
        })?;
        let RawFamily { model_type: found } = read("config.json", &value)?;
        let family = Family::built(&found)?;
        let defaults = (family.defaults)();
        complete(&mut value, &defaults);
        if value.get("text_config").is_none() {
            complete(&mut value, &defaults["text_config"]);
        }
        set_rotation(&mut value, family);
        let json = &value.to_string();
        let top: RawTop = read("config.json", &value)?;
        let (text_part, text) = match value.get("text_config") {
            Some(text) => ("text_config", text),
            None => ("config.json", &value),
        };
        let raw_text: RawText = read(text_part, text)?;
        let states = family.text.has_states.then(|| read(text_part, text));
        let states: Option<RawStates> = states.transpose()?;
        let experts = match &family.text.experts {
            Some(parts) => {
                let raw: RawExperts = read(text_part, text)?;
                Some(ExpertConfig::new(parts, raw, raw_text.num_hidden_layers)?)
            }
            None => None,
        };
        let window = match family.text.windows {
            WindowedLayers::None => None,
            which => SlidingWindow::new(which, read(text_part, text)?, raw_text.num_hidden_layers),
        };
        let parts = family.vision.as_ref();
        let vision = parts.map(|parts| VisionConfig::read(family, parts, &value, json));
        let tied = top.tie_word_embeddings.or(raw_text.tie_word_embeddings);
        let rotation = RotarySpec::from_hf_config(json)?;
        let config = Self {
            family,
            text: TextConfig {
                experts,
                ..TextConfig::new(family, raw_text, states, window, rotation)?
            },
            vision: vision.transpose()?,
            position_rules: PositionRules::from_hf_config(json)?,
            implementation: Implementation::Fused,
            tied: tied.unwrap_or(false),
            padding_predicts: false,
        };
        config.check()?;
        Ok(config)
    }

    /// Sets the implementation of the rotation.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Selects the program that started a run, to reproduce its position ids and its loss of padded
    /// rows.
    #[must_use]
    pub fn with_compatibility(mut self, compatibility: Compatibility) -> Self {
        self.position_rules = self.position_rules.with_compatibility(compatibility);
        self.padding_predicts = compatibility != Compatibility::Exact;
        self
    }

    /// The family, as in `model_type`.
    pub fn model_type(&self) -> &'static str {
        self.family.model_type
    }
}

impl TextConfig {
    fn new(
        family: &Family,
        raw: RawText,
        states: Option<RawStates>,
        window: Option<SlidingWindow>,
        rotation: RotarySpec,
    ) -> Result<Self> {
        if let Some(found) = raw.hidden_act.filter(|act| act != "silu") {
            return Err(VlmError::Unsupported {
                key: "text hidden_act",
                found: format!("{found:?}"),
                expected: "\"silu\"",
            });
        }
        if let Some(found) = raw.attention_dropout.filter(|share| *share != 0.0) {
            return Err(VlmError::Unsupported {
                key: "attention_dropout",
                found: found.to_string(),
                expected: "0, as in the published checkpoints",
            });
        }
        let states_bias = raw.attention_bias == Some(true);
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            rms_norm_eps: raw.rms_norm_eps,
            attention_bias: family.text.bias == AttentionBias::OfInputs || states_bias,
            output_bias: family.text.bias == AttentionBias::IfStated && states_bias,
            qk_norm: family.text.qk_norm,
            layers: raw.num_hidden_layers,
            output_norms: family.text.output_norms,
            joined_gate: family.text.joined_gate,
            unit_offset: family.text.has_states,
            output_gate: family.text.has_states,
            mlp_bias: raw.mlp_bias == Some(true),
            experts: None,
            window,
            delta: states
                .map(|states| DeltaConfig::new(states, raw.num_hidden_layers))
                .transpose()?,
            rotation,
        })
    }
}

impl ExpertConfig {
    fn new(parts: &ExpertParts, raw: RawExperts, layers: usize) -> Result<Self> {
        let step = raw.decoder_sparse_step.unwrap_or(1);
        if step == 0 {
            return Err(VlmError::Unsupported {
                key: "decoder_sparse_step",
                found: "0".to_owned(),
                expected: "1 or more",
            });
        }
        let dense = raw.mlp_only_layers.unwrap_or_default();
        let first = raw.first_k_dense_replace.unwrap_or(0);
        let is_dense = |layer: &usize| {
            *layer < first || dense.contains(layer) || !(layer + 1).is_multiple_of(step)
        };
        let inner = raw.moe_intermediate_size;
        let shared_size = parts.shared.and_then(|shared| match shared {
            SharedRule::Gated => raw.shared_expert_intermediate_size,
            SharedRule::Plain => Some(raw.n_shared_experts.unwrap_or(1).saturating_mul(inner)),
        });
        let (is_normalised, groups) = match parts.router {
            RouterRule::Softmax { is_normalised } => (is_normalised, None),
            RouterRule::Sigmoid => {
                let groups = ExpertGroups {
                    groups: raw.n_group.unwrap_or(1),
                    per_token: raw.topk_group.unwrap_or(1),
                    scale: raw.routed_scaling_factor.unwrap_or(1.0),
                };
                (false, Some(groups))
            }
        };
        Ok(Self {
            experts: raw.num_local_experts.unwrap_or(raw.num_experts),
            per_token: raw.num_experts_per_tok,
            intermediate_size: inner,
            shared_size,
            has_shared_gate: parts.shared == Some(SharedRule::Gated),
            is_normalised: is_normalised || raw.norm_topk_prob == Some(true),
            groups,
            router_loss: (raw.output_router_logits == Some(true))
                .then(|| raw.router_aux_loss_coef.unwrap_or(DEFAULT_ROUTER_LOSS)),
            // More layers are refused with the other sizes.
            dense_layers: (0..layers.min(MAX_LAYERS)).filter(is_dense).collect(),
        })
    }
}

impl SlidingWindow {
    /// The layers with a window, if any.
    fn new(which: WindowedLayers, raw: RawWindow, layers: usize) -> Option<Self> {
        let is_listed = which == WindowedLayers::Listed;
        let tokens = raw.sliding_window;
        let tokens = tokens.filter(|_| !is_listed || raw.use_sliding_window == Some(true))?;
        // The rotation has already checked that each layer has a type.
        let attends_to_all = |index: &usize| match &raw.layer_types {
            _ if !is_listed => false,
            Some(stated) => stated.get(*index) != Some(&Reach::Window),
            None => raw.max_window_layers.is_some_and(|first| *index < first),
        };
        // More layers are refused with the other sizes.
        let layers = 0..layers.min(MAX_LAYERS);
        let has_any = !layers.clone().all(|index| attends_to_all(&index));
        has_any.then(|| Self {
            tokens,
            full_attention_layers: layers.filter(attends_to_all).collect(),
        })
    }
}

impl DeltaConfig {
    fn new(raw: RawStates, layers: usize) -> Result<Self> {
        let interval = raw.full_attention_interval;
        // The rotation has already checked that each layer has a type.
        let attends = |index: &usize| match &raw.layer_types {
            Some(stated) => stated.get(*index) == Some(&LayerType::FullAttention),
            None => (index + 1).is_multiple_of(interval),
        };
        if raw.layer_types.is_none() && interval == 0 {
            return Err(VlmError::Unsupported {
                key: "full_attention_interval",
                found: "0".to_owned(),
                expected: "1 or more",
            });
        }
        // More layers are refused with the other sizes.
        let layers = 0..layers.min(MAX_LAYERS);
        Ok(Self {
            key_heads: raw.linear_num_key_heads,
            heads: raw.linear_num_value_heads,
            key_dim: raw.linear_key_head_dim,
            value_dim: raw.linear_value_head_dim,
            taps: raw.linear_conv_kernel_dim,
            full_attention_layers: layers.filter(attends).collect(),
        })
    }
}

fn missing(key: &str) -> VlmError {
    VlmError::Config {
        part: "vision_config",
        detail: format!("missing field `{key}`"),
    }
}

impl RawVision {
    /// Channels of the residual stream, and those of the merged patches.
    fn channels(&self) -> Result<(usize, usize)> {
        match (self.embed_dim, self.out_hidden_size) {
            (Some(embed_dim), _) => Ok((embed_dim, self.hidden_size)),
            (None, Some(out)) => Ok((self.hidden_size, out)),
            (None, None) => Err(missing("out_hidden_size")),
        }
    }

    /// Channels inside the feed-forward networks of the blocks, and inside that of the merger.
    fn inner_channels(&self, tower: &TowerParts) -> Result<(usize, usize)> {
        let (hidden_size, out_hidden_size) = self.channels()?;
        let stated = match (self.intermediate_size, self.mlp_ratio) {
            (Some(size), _) => size,
            (None, Some(ratio)) => (hidden_size as f64 * ratio) as usize,
            (None, None) => return Err(missing("intermediate_size")),
        };
        // GLM-4.1V has the same number of channels inside the blocks as after them.
        if tower.downsamples {
            return Ok((out_hidden_size, stated));
        }
        let side = self.spatial_merge_size;
        let merged = hidden_size.saturating_mul(side.saturating_mul(side));
        Ok((stated, merged))
    }

    fn windows(&self) -> Result<Option<VisionWindows>> {
        let (window, full_attention_blocks) =
            match (self.window_size, self.fullatt_block_indexes.clone()) {
                (Some(window), Some(blocks)) => (window, blocks),
                (None, None) => return Ok(None),
                (Some(_), None) => return Err(missing("fullatt_block_indexes")),
                (None, Some(_)) => return Err(missing("window_size")),
            };
        let side = window / self.spatial_merge_size.max(1) / self.patch_size.max(1);
        if side == 0 {
            return Err(VlmError::Sizes {
                left: "window_size",
                left_value: window,
                right: "patch_size",
                right_value: self.patch_size,
                rule: "a window holds at least one merged token",
            });
        }
        Ok(Some(VisionWindows {
            side,
            full_attention_blocks,
        }))
    }

    /// The side of the grid of learned positions.
    fn position_grid(&self, tower: &TowerParts) -> Result<Option<usize>> {
        match (self.num_position_embeddings, self.image_size) {
            (Some(count), _) if count == 0 || count.isqrt().pow(2) != count => {
                Err(VlmError::Unsupported {
                    key: "num_position_embeddings",
                    found: count.to_string(),
                    expected: "a square number",
                })
            }
            (Some(count), _) => Ok(Some(count.isqrt())),
            (None, Some(size)) if tower.downsamples => Ok(Some(size / self.patch_size.max(1))),
            (None, _) => Ok(None),
        }
    }
}

impl VisionConfig {
    /// Reads the tower of a whole configuration, which is also given as text.
    fn read(family: &Family, parts: &VisionParts, whole: &Value, json: &str) -> Result<Self> {
        let tower = &parts.tower;
        let placeholders: RawPlaceholders = read("config.json", whole)?;
        let raw = whole.get("vision_config").unwrap_or(&Value::Null);
        let raw: RawVision = read("vision_config", raw)?;
        let rotation = RotarySpec::from_hf_vision_config(json)?;
        let (hidden_size, out_hidden_size) = raw.channels()?;
        let (intermediate_size, merger_size) = raw.inner_channels(tower)?;
        let norm_eps = raw.rms_norm_eps.filter(|_| tower.downsamples);
        let qkv_bias = raw.attention_bias.filter(|_| tower.downsamples);
        Ok(Self {
            image_token: placeholders.image_token_id,
            video_token: placeholders.video_token_id,
            depth: raw.depth,
            hidden_size,
            intermediate_size,
            merger_size,
            heads: raw.num_heads,
            out_hidden_size,
            patch: [
                raw.in_channels,
                raw.temporal_patch_size,
                raw.patch_size,
                raw.patch_size,
            ],
            spatial_merge: raw.spatial_merge_size,
            rms_norm: tower.rms_norm,
            norm_eps: norm_eps.unwrap_or(VISION_NORM_EPS),
            gated: tower.gated,
            patch_bias: tower.patch_bias,
            qkv_bias: qkv_bias.unwrap_or(tower.bias),
            bias: tower.bias,
            downsamples: tower.downsamples,
            activation: raw.hidden_act,
            windows: raw.windows()?,
            position_grid: raw.position_grid(tower)?,
            interpolation: if tower.downsamples {
                Interpolation::Bicubic
            } else {
                Interpolation::Bilinear
            },
            deepstack: match raw.deepstack_visual_indexes {
                Some(blocks) if !family.text.has_states => blocks,
                _ => Vec::new(),
            },
            rotation,
        })
    }

    /// Numbers in a patch.
    pub fn patch_elems(&self) -> usize {
        self.patch.iter().product()
    }

    /// Patches that become one token.
    pub fn merged_patches(&self) -> usize {
        self.spatial_merge * self.spatial_merge
    }
}
