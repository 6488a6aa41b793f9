//! The rules of each family, as data.

use super::error::PositionIdsError;
use crate::error::Result;
use crate::hf::fields::{Fields, WHOLE, nested};
use crate::hf::{ConfigError, parse_config};

/// The source of position ids: the rule, or a release of transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compatibility {
    /// The rule for which the models were designed.
    #[default]
    Exact,
    /// The ids of transformers 4.57.6, to continue a run started with it.
    Transformers4_57,
    /// The ids of transformers 5.23.0, to continue a run started with it.
    Transformers5_23,
}

/// A difference of a version of transformers from the rule that affects a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum Divergence {
    /// After a video, the next id ignores time.
    #[error(
        "after a video, the next id is its start plus max(height, width): time is forgotten, \
         and text repeats ids of the video's later frames"
    )]
    TimeForgotten,
    /// Seconds per temporal patch are truncated to whole seconds before use.
    #[error("seconds per temporal patch are cut to whole seconds before they scale time")]
    WholeSeconds,
    /// The rope delta counts padding.
    #[error("the rope delta subtracts the padded length instead of the number of tokens")]
    PaddedDelta,
    /// Audio in video takes positions in chunk order, whatever the order of the tokens.
    #[error(
        "positions of audio in video are dealt out in the order of time, to tokens that are in \
         another order: video tokens get audio positions"
    )]
    AudioVideoOrder,
    /// Times of a video are not rounded to ids.
    #[error("frames of a video and the tokens after it have fractional ids")]
    Fractions,
    /// After audio in video, the next id follows the last piece only.
    #[error("after audio in video, the next id follows the last piece, not the highest id")]
    LastPieceOnly,
    /// In a model of text alone, padding takes ids.
    #[error("padding takes ids like any token")]
    NumberedPadding,
}

/// The token ids that stand for other modalities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenIds {
    /// Placeholder of an image patch.
    pub image: i64,
    /// Placeholder of a video patch.
    pub video: i64,
    /// Placeholder of an audio frame, for models with audio input.
    pub audio: Option<i64>,
    /// Start of an image or video; directly before `audio_start` it opens audio in video.
    pub vision_start: Option<i64>,
    /// Start of audio.
    pub audio_start: Option<i64>,
    /// Start of a video whose frames are image placeholders (GLM).
    pub video_start: Option<i64>,
    /// End of a video whose frames are image placeholders (GLM).
    pub video_end: Option<i64>,
}

impl TokenIds {
    /// Creates the token ids of a model with image and video input.
    pub fn new(image: i64, video: i64) -> Self {
        Self {
            image,
            video,
            audio: None,
            vision_start: None,
            audio_start: None,
            video_start: None,
            video_end: None,
        }
    }
}

/// The differences between families.
#[derive(Debug)]
pub(super) struct Family {
    model_types: &'static [&'static str],
    /// True if the model sees nothing: each token takes the next id.
    pub(super) text_alone: bool,
    /// A video is a block per frame, with text between, rather than one block.
    pub(super) block_per_frame: bool,
    /// Temporal patches that merge into one token.
    temporal_merge: usize,
    /// Ids per second of video; if `None`, a temporal patch takes one id.
    ids_per_second: Option<PerSecond>,
    /// Transformers 5.23 ignores time after a video.
    pub(super) forgets_time: bool,
    pub(super) audio_in_video: Option<AudioInVideo>,
}

/// Ids per second of video.
#[derive(Clone, Copy, Debug)]
struct PerSecond {
    /// The value of the published checkpoints.
    published: f64,
    /// The value if the configuration does not state it: the default of the class.
    unstated: f64,
    /// The key that states the value.
    key: &'static str,
    /// True if that key is one of `vision_config`.
    in_vision: bool,
}

/// Ids per second of the omni models. They do not read `tokens_per_second`, although their
/// `vision_config` has it.
const OF_THINKER: PerSecond = PerSecond {
    published: 25.0,
    unstated: 25.0,
    key: "position_id_per_seconds",
    in_vision: false,
};

/// The layout of audio in video in a family with audio input.
#[derive(Clone, Copy, Debug)]
pub(super) struct AudioInVideo {
    /// The two start tokens share one id, and so do the two end tokens.
    pub(super) markers_share: bool,
    /// Seconds per chunk in which transformers assigns positions; if `None`, it merges by time.
    pub(super) seconds_per_chunk: Option<f64>,
    /// Transformers keeps fractions of an id.
    pub(super) fractional: bool,
}

const ONE_BLOCK: Family = Family {
    model_types: &[],
    text_alone: false,
    block_per_frame: false,
    temporal_merge: 1,
    ids_per_second: None,
    forgets_time: true,
    audio_in_video: None,
};

static FAMILIES: [Family; 8] = [
    Family {
        model_types: &["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"],
        text_alone: true,
        ..ONE_BLOCK
    },
    Family {
        model_types: &["qwen2_vl", "paddleocr_vl"],
        ..ONE_BLOCK
    },
    Family {
        model_types: &["qwen2_5_vl"],
        ids_per_second: Some(PerSecond {
            published: 2.0,
            unstated: 4.0,
            key: "tokens_per_second",
            in_vision: true,
        }),
        ..ONE_BLOCK
    },
    Family {
        model_types: &["ernie4_5_vl_moe", "ernie4_5_moe_vl"],
        temporal_merge: 2,
        ..ONE_BLOCK
    },
    Family {
        model_types: &[
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "cohere_compass",
            "cosmos3_omni",
            "qwen4_exp",
        ],
        block_per_frame: true,
        ..ONE_BLOCK
    },
    Family {
        model_types: &["glm4v", "glm4v_moe", "glm46v", "glm_ocr"],
        block_per_frame: true,
        ..ONE_BLOCK
    },
    Family {
        model_types: &["qwen2_5_omni", "qwen2_5_omni_thinker"],
        ids_per_second: Some(OF_THINKER),
        forgets_time: false,
        audio_in_video: Some(AudioInVideo {
            markers_share: true,
            seconds_per_chunk: Some(2.0),
            fractional: false,
        }),
        ..ONE_BLOCK
    },
    Family {
        model_types: &["qwen3_omni_moe", "qwen3_omni_moe_thinker"],
        ids_per_second: Some(PerSecond {
            published: 13.0,
            ..OF_THINKER
        }),
        forgets_time: false,
        audio_in_video: Some(AudioInVideo {
            markers_share: false,
            seconds_per_chunk: None,
            fractional: true,
        }),
        ..ONE_BLOCK
    },
];

/// The rules by which one model computes position ids from prompts.
///
/// # Examples
/// ```
/// use rope_core::position_ids::{PositionRules, Prompt, Rows, TokenIds};
///
/// let rules = PositionRules::new("qwen2_vl", TokenIds::new(7, 8))?;
/// let prompt = Prompt {
///     input_ids: &[1, 7, 7, 7, 7, 7, 7, 2], // text, an image of 2 x 3 merged patches, text
///     image_grids: &[[1, 4, 6]],
///     ..Prompt::default()
/// };
/// let ids = rules.position_ids(&prompt)?;
/// assert_eq!(ids.axis(0), [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]);
/// assert_eq!(ids.axis(1), [0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0]);
/// assert_eq!(ids.axis(2), [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
///
/// # Source
/// Wang et al. 2024 (Qwen2-VL), section 2.1, <https://arxiv.org/abs/2409.12191>; absolute time: Bai
/// et al. 2025 (Qwen2.5-VL), <https://arxiv.org/abs/2502.13923>; audio in video: Xu et al. 2025
/// (Qwen2.5-Omni, TMRoPE), <https://arxiv.org/abs/2503.20215>
#[derive(Clone, Copy, Debug)]
pub struct PositionRules {
    pub(super) family: &'static Family,
    pub(super) tokens: TokenIds,
    pub(super) spatial_merge: usize,
    pub(super) temporal_merge: usize,
    pub(super) ids_per_second: Option<f64>,
    pub(super) seconds_per_chunk: Option<f64>,
    pub(super) compatibility: Compatibility,
}

impl PositionRules {
    /// Creates the rules of a family with the constants of its published checkpoints: 2 x 2 patches
    /// merge.
    ///
    /// # Errors
    /// [`PositionIdsError::UnknownModelType`]
    pub fn new(model_type: &str, tokens: TokenIds) -> Result<Self> {
        let is_named = |family: &&Family| family.model_types.contains(&model_type);
        let found = vec![model_type.to_owned()];
        let family = FAMILIES.iter().find(is_named);
        let family = family.ok_or(PositionIdsError::UnknownModelType { found })?;
        Ok(Self {
            family,
            tokens,
            spatial_merge: 2,
            temporal_merge: family.temporal_merge,
            ids_per_second: family.ids_per_second.map(|ids| ids.published),
            seconds_per_chunk: family
                .audio_in_video
                .and_then(|audio| audio.seconds_per_chunk),
            compatibility: Compatibility::Exact,
        })
    }

    /// Reads the rules and token ids from a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] if the text is not JSON, or a key is missing or has the wrong type;
    /// [`PositionIdsError::UnknownModelType`].
    pub fn from_hf_config(json: &str) -> Result<Self> {
        let value = parse_config(json)?;
        let levels = nested(&value, &WHOLE)?;
        // The language side of an omni model, which states the tokens.
        let config = &levels[levels.len() - 1];
        let mut found = Vec::new();
        for level in levels.iter().rev() {
            found.extend(level.text("model_type")?.map(str::to_owned));
        }
        let named = |name: &String| Self::new(name, TokenIds::new(0, 0)).ok();
        let known = found.iter().find_map(named);
        let rules = known.ok_or(PositionIdsError::UnknownModelType { found })?;
        if rules.family.text_alone {
            return Ok(rules);
        }
        let vision = config.object("vision_config")?;
        let vision = config.require("vision_config", Ok(vision), "the patch merger")?;

        let token = |kind: &str| -> Result<Option<i64>, ConfigError> {
            let keys = [format!("{kind}_id"), format!("{kind}_index")];
            let stated = config.first(&keys.each_ref().map(String::as_str), Fields::integer)?;
            Ok(stated.map(|(_, id)| id))
        };
        // ERNIE's own configuration has one placeholder for images and videos.
        let shared = config.integer("im_patch_id")?;
        let placeholder = |kind: &str| {
            config.require(
                &format!("{kind}_id"),
                token(kind).map(|own| own.or(shared)),
                "the search for placeholders",
            )
        };
        let tokens = TokenIds {
            image: placeholder("image_token")?,
            video: placeholder("video_token")?,
            audio: token("audio_token")?,
            vision_start: token("vision_start_token")?,
            audio_start: token("audio_start_token")?,
            video_start: token("video_start_token")?,
            video_end: token("video_end_token")?,
        };
        // ERNIE's own configuration states the merger beside the tower, and that value applies.
        let merge = |key: &str, beside: &str| -> Result<Option<usize>, ConfigError> {
            Ok(config.size(beside)?.or(vision.size(key)?))
        };
        // Families without absolute time do not read the key, although some checkpoints contain it.
        let ids_per_second = match rules.family.ids_per_second {
            Some(ids) => {
                let level = if ids.in_vision { &vision } else { config };
                Some(level.number(ids.key)?.unwrap_or(ids.unstated))
            }
            None => None,
        };
        Self {
            tokens,
            ids_per_second,
            seconds_per_chunk: match rules.seconds_per_chunk {
                Some(default) => Some(config.number("seconds_per_chunk")?.unwrap_or(default)),
                None => None,
            },
            temporal_merge: merge("temporal_merge_size", "temporal_conv_size")?
                .unwrap_or(rules.temporal_merge),
            spatial_merge: merge("spatial_merge_size", "spatial_conv_size")?
                .unwrap_or(rules.spatial_merge),
            ..rules
        }
        .checked()
    }

    /// Sets the number of ids per second of video.
    ///
    /// # Errors
    /// [`PositionIdsError::Parameter`] if it is not finite and above 0.
    pub fn with_ids_per_second(self, ids_per_second: f64) -> Result<Self> {
        Self {
            ids_per_second: Some(ids_per_second),
            ..self
        }
        .checked()
    }

    /// Patches that merge into one token along T, H and W in videos, and along H and W in images.
    pub fn video_merge(&self) -> [usize; 3] {
        [self.temporal_merge, self.spatial_merge, self.spatial_merge]
    }

    /// True if each temporal patch of a video is a separate block, with text between blocks.
    pub fn block_per_frame(&self) -> bool {
        self.family.block_per_frame
    }

    /// Applies the rules as a version of transformers does.
    pub fn with_compatibility(self, compatibility: Compatibility) -> Self {
        Self {
            compatibility,
            ..self
        }
    }

    fn checked(self) -> Result<Self> {
        let constants = [
            ("spatial_merge_size", Some(self.spatial_merge as f64)),
            ("temporal_merge_size", Some(self.temporal_merge as f64)),
            ("ids per second", self.ids_per_second),
            ("seconds_per_chunk", self.seconds_per_chunk),
        ];
        for (parameter, value) in constants {
            if let Some(found) = value
                && !((found as f32).is_finite() && found > 0.0)
            {
                let expected = "a finite number above 0, also in f32";
                return Err(PositionIdsError::Parameter {
                    parameter,
                    expected,
                    found,
                }
                .into());
            }
        }
        Ok(self)
    }
}
