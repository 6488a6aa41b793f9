//! The model families: what a `model_type` says about rotation without the configuration spelling
//! it out.
//!
//! One row per way of rotating. A new model is a new name in a row, or a new row.
//!
//! # Source
//! The modelling and configuration files of transformers 5.23 and diffusers 0.35, by model type;
//! ERNIE's `freq_allocation` from the model's own code.

use std::fmt;
use std::str::FromStr;

use super::error::ConfigError;
use crate::spec::Pairing::{Adjacent, Half, InterleaveHalf};
use crate::spec::{AxisLayout, Pairing};

/// Which part of a model rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// The language decoder, or the one transformer of a diffusion model.
    Text,
    /// The vision tower.
    Vision,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Vision => "vision",
        })
    }
}

impl FromStr for Component {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        [Self::Text, Self::Vision]
            .into_iter()
            .find(|component| component.to_string() == name)
            .ok_or_else(|| ConfigError::UnknownComponent {
                found: name.to_owned(),
            })
    }
}

/// One way of rotating, and the names of the models that rotate so.
#[derive(Debug)]
pub(super) struct Family {
    /// Their names in Hugging Face's configurations, with white space between.
    names: &'static str,
    pub(super) pairing: Pairing,
    pub(super) axes: Axes,
    /// Share of the head that turns where the configuration does not say.
    pub(super) partial_rotary_factor: f64,
    /// Rotated channels where the configuration does not say; 0 where the share decides.
    pub(super) rotary_dim: usize,
    /// Theta where the configuration does not say.
    pub(super) theta: Option<f64>,
    /// Channels per head where the configuration does not name them; without, width over heads.
    pub(super) head_dim: Option<usize>,
    /// Channels per head of full layers where they are others and the configuration does not say.
    pub(super) full_head_dim: Option<usize>,
    /// Which layers attend in full, where the configuration does not list the layer types.
    pub(super) pattern: Option<Pattern>,
    /// How sliding-window layers turn, where not as the full ones do.
    pub(super) local: Option<Local>,
    /// Layer types that do not turn in this family alone.
    pub(super) unrotated: &'static [&'static str],
    /// Every so-many-th layer does not turn, where the configuration does not list them.
    pub(super) no_rope_every: Option<usize>,
}

pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";
pub(super) const LINEAR: &str = "linear_attention";

/// Which position axes a family has and how they share the frequencies.
#[derive(Debug)]
pub(super) enum Axes {
    Single,
    /// `mrope_section` divides the frequencies among the axes.
    Sections {
        layout: fn(Vec<usize>) -> AxisLayout,
        count: usize,
        /// What the modelling code falls back to; empty where it needs the key.
        default: &'static [usize],
        /// The only value of `mrope_interleaved` that the modelling code means.
        interleaved: Option<bool>,
    },
    /// The frequencies restart on each axis.
    PerAxis {
        layout: fn(Vec<usize>) -> AxisLayout,
        /// The key that lists the channels of each axis, where a configuration may.
        key: Option<&'static str>,
        /// The channels of each axis of a head, where it does not.
        channels: fn(usize) -> Vec<usize>,
    },
}

impl Axes {
    /// The number of position axes.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Single => 1,
            Self::Sections { count, .. } => *count,
            Self::PerAxis { channels, .. } => channels(128).len(),
        }
    }
}

/// Full layers at even distances, each after the layers of its group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pattern {
    /// Layers from one full layer to the next, where the configuration does not say.
    pub(super) every: usize,
    /// Keys under which it says.
    pub(super) keys: &'static [&'static str],
    /// The type of the layers between.
    pub(super) between: &'static str,
}

const fn sliding_every(every: usize) -> Pattern {
    Pattern {
        every,
        keys: &["sliding_window_pattern", "_sliding_window_pattern"],
        between: SLIDING,
    }
}

const LINEAR_BETWEEN: Pattern = Pattern {
    every: 4,
    keys: &["full_attention_interval"],
    between: LINEAR,
};

/// Frequencies of sliding-window layers: unscaled unless stated layer type by layer type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    /// The key of their theta.
    pub(super) key: &'static str,
    /// Their theta where the configuration does not say; without, the one of the full layers.
    pub(super) theta: Option<f64>,
}

const LOCAL: Local = Local {
    key: "rope_local_base_freq",
    theta: Some(1e4),
};

impl Family {
    pub(super) fn find(component: Component, model_type: &str) -> Option<&'static Self> {
        let families = match component {
            Component::Text => TEXT,
            Component::Vision => VISION,
        };
        families
            .iter()
            .find(|family| family.model_types().any(|name| name == model_type))
    }

    pub(super) fn model_types(&self) -> impl Iterator<Item = &'static str> {
        self.names.split_ascii_whitespace()
    }

    /// The name that stands for the family in messages.
    pub(super) fn first_model_type(&self) -> &'static str {
        self.model_types().next().unwrap_or_default()
    }
}

/// A row: names, pairing, theta and channels per head of one position axis that turns whole heads.
const fn row(
    names: &'static str,
    pairing: Pairing,
    theta: Option<f64>,
    head_dim: Option<usize>,
) -> Family {
    Family {
        names,
        pairing,
        axes: Axes::Single,
        partial_rotary_factor: 1.0,
        rotary_dim: 0,
        theta,
        head_dim,
        full_head_dim: None,
        pattern: None,
        local: None,
        unrotated: &[],
        no_rope_every: None,
    }
}

const fn sections(
    layout: fn(Vec<usize>) -> AxisLayout,
    count: usize,
    default: &'static [usize],
    interleaved: Option<bool>,
) -> Axes {
    Axes::Sections {
        layout,
        count,
        default,
        interleaved,
    }
}

const fn per_axis(
    layout: fn(Vec<usize>) -> AxisLayout,
    key: Option<&'static str>,
    channels: fn(usize) -> Vec<usize>,
) -> Axes {
    Axes::PerAxis {
        layout,
        key,
        channels,
    }
}

static TEXT: &[Family] = &[
    row(
        "llama mistral qwen2 qwen2_moe qwen3_moe phi3 phi4_multimodal olmo olmo2 starcoder2
         granite hunyuan_v1_dense hunyuan_v1_moe",
        Half,
        Some(1e4),
        None,
    ),
    row("qwen3", Half, Some(1e4), Some(128)),
    row("gemma gemma2", Half, Some(1e4), Some(256)),
    row("mixtral ministral", Half, None, None),
    row("ministral3", Half, None, Some(128)),
    row("gpt_oss", Half, Some(150_000.0), Some(64)),
    Family {
        pattern: Some(sliding_every(6)),
        local: Some(LOCAL),
        ..row("gemma3 gemma3_text", Half, Some(1e6), Some(256))
    },
    Family {
        pattern: Some(sliding_every(5)),
        local: Some(LOCAL),
        ..row("gemma3n gemma3n_text", Half, Some(1e6), Some(256))
    },
    Family {
        full_head_dim: Some(512),
        ..row("gemma4 gemma4_text", Half, None, Some(256))
    },
    // Transformers 4 and 5 fall back to different thetas, so the configuration must state it.
    Family {
        pattern: Some(sliding_every(4)),
        local: Some(Local {
            theta: None,
            ..LOCAL
        }),
        ..row("olmo3", Half, None, None)
    },
    Family {
        no_rope_every: Some(4),
        ..row("smollm3", Half, None, None)
    },
    Family {
        partial_rotary_factor: 0.5,
        ..row("phi persimmon nemotron glm4_moe", Half, Some(1e4), None)
    },
    Family {
        partial_rotary_factor: 0.25,
        ..row("gpt_neox stablelm", Half, Some(1e4), None)
    },
    Family {
        partial_rotary_factor: 0.25,
        pattern: Some(LINEAR_BETWEEN),
        ..row("qwen3_next", Half, None, Some(256))
    },
    row("deepseek_v3 kimi_k2", InterleaveHalf, Some(1e4), Some(64)),
    row("deepseek_v2", Adjacent, Some(1e4), Some(64)),
    // As for OLMo 3: 1e4 in transformers 4, 5e5 in 5.
    row("cohere", Adjacent, None, None),
    Family {
        pattern: Some(sliding_every(4)),
        unrotated: &[FULL],
        ..row("cohere2", Adjacent, Some(1e4), None)
    },
    Family {
        rotary_dim: 64,
        ..row("gptj codegen", Adjacent, Some(1e4), None)
    },
    Family {
        no_rope_every: Some(4),
        ..row("llama4 llama4_text", Adjacent, Some(500_000.0), Some(128))
    },
    Family {
        partial_rotary_factor: 0.5,
        ..row("glm glm4", Adjacent, Some(1e4), Some(128))
    },
    row("ernie4_5", Adjacent, Some(500_000.0), Some(128)),
    row("ernie4_5_moe", Adjacent, Some(500_000.0), None),
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[], Some(false)),
        ..row(
            "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text
             qwen2_5_omni qwen2_5_omni_thinker qwen2_5_omni_text",
            Half,
            Some(1e6),
            None,
        )
    },
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[], Some(false)),
        ..row("qwen2_5_omni_talker", Half, Some(1e6), Some(128))
    },
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[], Some(false)),
        ..row(
            "paddleocr_vl paddleocr_vl_text",
            Half,
            Some(500_000.0),
            Some(128),
        )
    },
    Family {
        axes: sections(AxisLayout::Striped, 3, &[24, 20, 20], Some(true)),
        ..row("qwen3_vl qwen3_vl_text", Half, None, Some(128))
    },
    Family {
        axes: sections(AxisLayout::Striped, 3, &[24, 20, 20], Some(true)),
        ..row(
            "qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe qwen3_omni_moe_thinker
             qwen3_omni_moe_text qwen3_omni_moe_talker_text",
            Half,
            None,
            None,
        )
    },
    Family {
        axes: sections(AxisLayout::Striped, 3, &[11, 11, 10], Some(true)),
        partial_rotary_factor: 0.25,
        pattern: Some(LINEAR_BETWEEN),
        ..row(
            "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
            Half,
            None,
            Some(256),
        )
    },
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[8, 12, 12], Some(false)),
        partial_rotary_factor: 0.5,
        ..row("glm4v glm4v_text", Adjacent, Some(1e4), None)
    },
    // Unlike GLM-4.1V, its text decoder is the one of GLM-4.5, which pairs halves.
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[8, 12, 12], Some(false)),
        partial_rotary_factor: 0.5,
        ..row("glm4v_moe glm4v_moe_text", Half, Some(1e4), None)
    },
    Family {
        axes: sections(AxisLayout::Contiguous, 3, &[16, 24, 24], Some(false)),
        ..row("glm_ocr glm_ocr_text", Adjacent, Some(1e4), None)
    },
    Family {
        axes: sections(AxisLayout::Ernie, 3, &[22, 22, 20], None),
        ..row(
            "ernie4_5_vl_moe ernie4_5_vl_moe_text ernie4_5_moe_vl",
            Adjacent,
            Some(500_000.0),
            None,
        )
    },
    Family {
        axes: sections(AxisLayout::PerChannel, 4, &[], Some(false)),
        ..row(
            "hunyuan_vl hunyuan_vl_text hunyuan_ocr hunyuan_ocr_text",
            Half,
            Some(1e4),
            None,
        )
    },
    Family {
        axes: sections(AxisLayout::Balanced, 3, &[], Some(true)),
        ..row("openpangu_vl openpangu_vl_text", Half, None, None)
    },
    Family {
        axes: per_axis(AxisLayout::PerAxis, Some("axes_dims_rope"), |_| {
            vec![16, 56, 56]
        }),
        ..row("FluxTransformer2DModel flux", Adjacent, Some(1e4), None)
    },
    Family {
        axes: per_axis(AxisLayout::PerAxis, Some("rope_axes_dim"), |_| {
            vec![16, 56, 56]
        }),
        ..row(
            "HunyuanVideoTransformer3DModel hunyuan_video",
            Adjacent,
            Some(256.0),
            None,
        )
    },
    Family {
        axes: per_axis(AxisLayout::PerAxis, None, |head_dim| {
            let plane = 2 * (head_dim / 6);
            vec![head_dim - 2 * plane, plane, plane]
        }),
        ..row("WanTransformer3DModel wan", Adjacent, Some(1e4), None)
    },
];

static VISION: &[Family] = &[
    Family {
        axes: per_axis(AxisLayout::PerAxis, None, |head_dim| vec![head_dim / 2; 2]),
        ..row(
            "qwen2_vl qwen2_vl_vision qwen2_5_vl qwen2_5_vl_vision
             qwen3_vl qwen3_vl_vision qwen3_vl_moe qwen3_vl_moe_vision
             qwen3_5 qwen3_5_vision qwen3_5_moe qwen3_5_moe_vision
             qwen2_5_omni qwen2_5_omni_thinker qwen2_5_omni_vision_encoder
             qwen3_omni_moe qwen3_omni_moe_thinker qwen3_omni_moe_vision_encoder
             glm4v glm4v_vision glm4v_moe glm4v_moe_vision glm_ocr glm_ocr_vision
             ernie4_5_vl_moe ernie4_5_vl_moe_vision ernie4_5_moe_vl DFNRope_vision_transformer
             paddleocr_vl paddleocr_vl_vision",
            Half,
            Some(1e4),
            None,
        )
    },
    // MoonViT: W and H take turns, W first, in adjacent pairs.
    Family {
        axes: per_axis(AxisLayout::PerAxisStriped, None, |head_dim| {
            vec![head_dim / 2; 2]
        }),
        ..row("kimi_vl kimi_vl_vision moonvit", Adjacent, Some(1e4), None)
    },
];
