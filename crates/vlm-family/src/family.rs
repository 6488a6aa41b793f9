//! The columns of the table of families.

use serde_json::Value;

use crate::FAMILIES;

/// A family of models: a row of [`FAMILIES`].
#[derive(Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// The `model_type` of configurations of which models are built.
    pub model_type: &'static str,
    /// Other `model_type`s, with the same pictures and texts, of which no model is built.
    pub other_types: &'static [&'static str],
    /// The `model_type` of `rope-core` with the same rotations and position ids.
    pub rotation: &'static str,

    /// Pictures and videos, and the tower that sees them; `None` for a model of text alone.
    pub vision: Option<VisionParts>,

    /// The names of parameters in checkpoints.
    pub names: Names,
    /// The decoder.
    pub text: TextParts,
    /// The values of keys that a `config.json` omits: the defaults of the configuration classes in
    /// transformers 5.24.0. Until 4.51, transformers saved nested configurations as their
    /// differences from the class, so files leave any of these out.
    pub defaults: fn() -> Value,
}

/// The pictures and videos of a family: how they are prepared, written and seen.
#[derive(Clone, Copy, Debug)]
pub struct VisionParts {
    /// Side of a patch in pixels, in the published files.
    pub patch_size: usize,
    /// The least and the largest area of a picture in pixels, in the published files.
    pub limits: [u64; 2],
    /// Mean and standard deviation of each colour in units of levels from 0 to 1, in the published
    /// files.
    pub colours: [[f64; 3]; 2],
    /// The class that processes pictures.
    pub pictures: ProcessorClass,
    /// The class that processes videos.
    pub videos: ProcessorClass,
    /// The notation of places in pictures.
    pub boxes: BoxForm,
    /// The notation of pictures and videos.
    pub style: MediaStyle,
    /// The vision tower.
    pub tower: TowerParts,
}

/// A model type that is not in the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model type {found:?} is not supported; expected {}", known.join(", "))]
pub struct UnknownModelType {
    /// The model type found.
    pub found: String,
    /// The known model types.
    pub known: Vec<&'static str>,
}

impl Family {
    /// Returns the family of a `model_type`, whether or not models of it are built.
    ///
    /// # Errors
    /// [`UnknownModelType`]
    pub fn of(model_type: &str) -> Result<&'static Self, UnknownModelType> {
        Self::find(model_type, Self::model_types)
    }

    /// Returns the family whose models are built of a `model_type`.
    ///
    /// # Errors
    /// [`UnknownModelType`]
    pub fn built(model_type: &str) -> Result<&'static Self, UnknownModelType> {
        Self::find(model_type, |family| std::iter::once(family.model_type))
    }

    /// The `model_type`s of its configurations.
    pub fn model_types(&self) -> impl Iterator<Item = &'static str> + use<> {
        let others = self.other_types.iter().copied();
        std::iter::once(self.model_type).chain(others)
    }

    fn find<I: Iterator<Item = &'static str>>(
        model_type: &str,
        types: impl Fn(&'static Self) -> I,
    ) -> Result<&'static Self, UnknownModelType> {
        let mut families = FAMILIES.iter();
        let found = families.find(|family| types(family).any(|known| known == model_type));
        found.ok_or_else(|| UnknownModelType {
            found: model_type.to_owned(),
            known: FAMILIES.iter().flat_map(types).collect(),
        })
    }
}

/// A processor class of transformers, with the defaults of keys that a file omits.
#[derive(Clone, Copy, Debug)]
pub struct ProcessorClass {
    /// Its names, without the suffixes `Fast` and `Pil`.
    pub names: &'static [&'static str],
    /// The rule for the size of a resized picture.
    pub rule: ResizeRule,
    /// `size.shortest_edge` and `size.longest_edge`, which are areas in pixels.
    pub limits: [u64; 2],
    /// True if it reads `min_pixels` and `max_pixels`.
    pub reads_pixels: bool,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Mean and standard deviation of each colour, in units of levels from 0 to 1.
    pub colours: [[f64; 3]; 2],
}

/// The rule for the size of a resized picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeRule {
    /// Qwen2-VL to Qwen3.5.
    Qwen,
    /// GLM-4.1V and GLM-4.6V.
    Glm,
}

/// The notation of places in pictures in a family's texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoxForm {
    /// `<|box_start|>(x1,y1),(x2,y2)<|box_end|>`, from 0 to 1000 of the picture's sides, and names
    /// as `<|object_ref_start|>cat<|object_ref_end|>`.
    Marked,
    /// `[x1, y1, x2, y2]`, pixels of the resized picture.
    Pixels,
    /// `[x1, y1, x2, y2]`, from 0 to 1000 of the picture's sides.
    Thousandths,
}

/// The notation of pictures and videos in a family's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaStyle {
    /// Qwen2-VL and Qwen2.5-VL: one run of pads for a picture, and one for a video.
    Qwen2,
    /// Qwen3-VL and Qwen3.5: a video is, for each temporal patch, its time and a separate run of
    /// pads between vision start and vision end.
    Qwen3,
    /// GLM-4.1V: a video is, for each temporal patch, a picture and its second.
    Glm,
}

impl MediaStyle {
    /// The token of a merged patch of a picture.
    pub fn image_pad(self) -> &'static str {
        match self {
            Self::Qwen2 | Self::Qwen3 => "<|image_pad|>",
            Self::Glm => "<|image|>",
        }
    }

    /// The token of a merged patch of a video.
    pub fn video_pad(self) -> &'static str {
        match self {
            Self::Qwen2 | Self::Qwen3 => "<|video_pad|>",
            Self::Glm => "<|video|>",
        }
    }
}

/// The names in checkpoints that differ from those of the modules of `vlm-models`.
///
/// Modules have the names of Qwen3-VL's checkpoints, except that a feed-forward network has the
/// same names in every family: `gate_proj` (if it is gated), `up_proj` and `down_proj`. Everything
/// after a tower's blocks is its merger.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Prefix of the vision tower, if there is one.
    pub visual: Option<&'static str>,
    /// Prefix of the language decoder.
    pub text: &'static str,
    /// Names inside the modules.
    pub parts: &'static [Rename],
    /// The prefix of names that no module reads, if any.
    pub unread: Option<&'static str>,
}

/// The beginning of a name inside a module.
#[derive(Clone, Copy, Debug)]
pub struct Rename {
    /// A pattern of the module's own name.
    pub within: &'static str,
    /// The beginning in checkpoints.
    pub checkpoint: &'static str,
    /// The beginning in the module.
    pub module: &'static str,
}

impl Rename {
    pub(crate) const TOWER: &str = r"visual\.";
    pub(crate) const BLOCKS: &str = r"visual\.blocks\.";
    /// The merger, and those of DeepStack.
    pub(crate) const MERGERS: &str = r"visual\.\w*merger\w*\.";
    pub(crate) const LAYERS: &str = r"language_model\.layers\.";

    pub(crate) const fn new(
        within: &'static str,
        checkpoint: &'static str,
        module: &'static str,
    ) -> Self {
        Self {
            within,
            checkpoint,
            module,
        }
    }
}

/// The facts about a decoder that its configuration does not state.
#[derive(Clone, Copy, Debug)]
pub struct TextParts {
    /// The biases of attention's linear layers.
    pub bias: AttentionBias,
    /// The layers whose attention has a window, if any may have one.
    pub windows: WindowedLayers,
    /// True if q and k are normalised head by head.
    pub qk_norm: bool,
    /// True if the output of attention and feed-forward network is normalised too.
    pub output_norms: bool,
    /// True if one matrix computes both the gate and the gated value.
    pub joined_gate: bool,
    /// The experts of feed-forward networks, if some layers have any.
    pub experts: Option<ExpertParts>,
    /// True if there are layers with a state, norms that multiply by 1 + weight, and a gate on the
    /// output of attention, as in Qwen3.5.
    pub has_states: bool,
}

/// The facts about experts, of which each token passes some, that a configuration does not state.
#[derive(Clone, Copy, Debug)]
pub struct ExpertParts {
    /// The choice of a token's experts.
    pub router: RouterRule,
    /// The expert that every token passes too, if there is one.
    pub shared: Option<SharedRule>,
}

/// The choice of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterRule {
    /// The likeliest by a softmax.
    Softmax {
        /// True if their factors sum to 1, whatever the configuration states; otherwise its key
        /// decides.
        is_normalised: bool,
    },
    /// Those of the highest sigmoid plus a correction, of the best groups. The router is in f32.
    Sigmoid,
}

/// The output of the expert that every token passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedRule {
    /// Times the sigmoid of a gate.
    Gated,
    /// As it is: as wide as several experts.
    Plain,
}

/// The biases of attention's linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBias {
    /// q, k and v have one, whatever the configuration states.
    OfInputs,
    /// q, k and v have one if the configuration states `attention_bias`.
    OfInputsIfStated,
    /// All have one if the configuration states `attention_bias`.
    IfStated,
}

/// The layers of a decoder whose queries see only the last `sliding_window` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowedLayers {
    /// None, whatever the configuration states.
    None,
    /// All, unless the number is null.
    All,
    /// With `use_sliding_window`, those that `layer_types` calls `sliding_attention`, by default the
    /// layers from `max_window_layers` on.
    Listed,
}

/// The facts about a vision tower that its configuration does not state.
#[derive(Clone, Copy, Debug)]
pub struct TowerParts {
    /// Root-mean-square norms instead of layer norms.
    pub rms_norm: bool,
    /// Gated feed-forward networks.
    pub gated: bool,
    /// True if the patch embedding has a bias.
    pub patch_bias: bool,
    /// True if the linear layers of the blocks have a bias.
    pub bias: bool,
    /// True if a convolution merges the patches: the tower of GLM-4.1V.
    pub downsamples: bool,
}

/// Mean and standard deviation of CLIP's training pictures.
pub(crate) const CLIP: [[f64; 3]; 2] = [
    [0.48145466, 0.4578275, 0.40821073],
    [0.26862954, 0.26130258, 0.27577711],
];
pub(crate) const HALF: [[f64; 3]; 2] = [[0.5; 3]; 2];
