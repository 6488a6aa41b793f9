//! The model families: the facts about rotation that a `model_type` implies and its configuration
//! does not state.
//!
//! There is one row per kind of rotation. A new model is a new name in a row, or a new row.
//!
//! # Source
//! The modelling and configuration files of transformers 5.24.0 and diffusers 0.42.1, by model
//! type; ERNIE's `freq_allocation` and Kimi-VL's pairing from the models' own code.
//! `tests/fixtures/generate/rotations.py` compares the rows with what those modules compute, and
//! lists model types that a newer release adds.

use std::str::FromStr;

use super::Component;
use super::error::ConfigError;
use crate::lanes::{AxisLayout, Lane};
use crate::spec::Pairing::{self, Adjacent, Half, InterleaveHalf, Quarter};

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

/// One kind of rotation, and the names of the models that use it.
#[derive(Debug)]
pub(super) struct Family {
    /// Model types in Hugging Face configurations, separated by white space.
    names: &'static str,
    pub(super) pairing: Pairing,
    pub(super) axes: Axes,
    /// Share of the head that rotates, if the configuration does not state it.
    partial_rotary_factor: f64,
    /// Keys beside the rope object that state the share, or the channels (`rotary_dim`). Without
    /// such keys, the modelling code rotates whole heads, whatever share is stated.
    share_keys: Option<&'static [&'static str]>,
    /// True if the class has a default rope object, with the theta and the share of this row, that
    /// applies if none is stated, whatever keys stand beside it. A stated object without a share
    /// means whole heads.
    pub(super) own_object: bool,
    /// The share of full layers, if it differs and the configuration does not state it.
    full_share: Option<f64>,
    /// Rotated channels, if the configuration does not state them; 0 if the share decides.
    pub(super) rotary_dim: usize,
    /// Theta, if the configuration does not state it.
    pub(super) theta: Option<f64>,
    /// Keys beside the rope object that state theta. The class reads only these, so a different
    /// theta under any other key is an error.
    theta_keys: &'static [&'static str],
    /// The parameters in a rope object that does not name layer types.
    pub(super) one_object: OneObject,
    /// True if the class falls back to a scaling, so that the rope object must be stated.
    pub(super) needs_object: bool,
    /// True if `alpha` is the scale of the rope type `dynamic`; other families do not read it.
    pub(super) reads_alpha: bool,
    /// True if `rope_interleave` states whether q and k hold adjacent pairs; other families always
    /// read adjacent pairs.
    pub(super) reads_interleave: bool,
    /// An alternative key for the number of layers.
    pub(super) layers_key: Option<&'static str>,
    /// Channels per head, if the configuration does not state them; `None` means width over heads.
    pub(super) head_dim: Option<usize>,
    /// Channels per head of full layers, if they differ and the configuration does not state them.
    pub(super) full_head_dim: Option<usize>,
    /// The layer types, if the configuration does not list them.
    pub(super) pattern: Option<Pattern>,
    /// The rotation of sliding-window layers, if it differs from that of full layers.
    pub(super) local: Option<Local>,
    /// Layer types that do not rotate in this family alone.
    pub(super) unrotated: &'static [&'static str],
    /// The layers that rotate if `sliding_window` is null, if they differ from those with a window.
    pub(super) without_window: Option<WithoutWindow>,
    /// True if layer types whose parameters are null do not rotate.
    pub(super) null_is_unrotated: bool,
    /// The condition on the configuration for the row to hold.
    pub(super) condition: Option<Condition>,
    /// Every n-th layer does not rotate, if the configuration does not list unrotated layers.
    pub(super) no_rope_every: Option<usize>,
    /// True if the pairs rotate in the opposite direction.
    pub(super) reversed: bool,
}

/// The location of the rotated share of a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// The share if no key states it.
    pub(super) unstated: f64,
    /// As [`Family::share_keys`].
    pub(super) keys: Option<&'static [&'static str]>,
}

/// A key that decides whether a model rotates, and which layers do.
#[derive(Debug)]
pub(super) struct Condition {
    pub(super) key: &'static str,
    /// The required value of a flag, false if not stated; `None` requires the key to be present.
    pub(super) flag: Option<bool>,
    /// The meaning if the condition does not hold.
    pub(super) otherwise: &'static str,
}

pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";
pub(super) const LINEAR: &str = "linear_attention";

/// The position axes of a family and how they share the frequencies.
#[derive(Debug)]
pub(super) enum Axes {
    Single,
    /// `mrope_section` divides the frequencies among the axes.
    Sections {
        layout: fn(Vec<usize>) -> AxisLayout,
        count: usize,
        /// The default of the modelling code; empty if it requires the key.
        default: &'static [usize],
        /// The only value of `mrope_interleaved` that the modelling code implements.
        interleaved: Option<bool>,
    },
    /// The frequencies restart on each axis.
    PerAxis {
        layout: fn(Vec<usize>) -> AxisLayout,
        /// The key that lists the channels of each axis, if a configuration may state them.
        key: Option<&'static str>,
        /// The channels of each axis of a head, if the configuration does not state them.
        channels: fn(usize) -> Vec<usize>,
    },
    /// Lanes specific to the family.
    Lanes {
        count: usize,
        /// Rotated channels, from the `rotary_dim` of the configuration.
        rotary_dim: fn(usize) -> usize,
        /// The channels over which each run of frequencies is spread, from those rotated channels.
        frequency_dims: fn(usize) -> Vec<usize>,
        /// Axis and frequency of each lane, for a number of rotated channels.
        lanes: fn(usize) -> Vec<Lane>,
        /// The key that lists the channels of each axis, and the only list for which the lanes
        /// hold.
        stated: Option<(&'static str, &'static [usize])>,
    },
}

impl Axes {
    /// The number of position axes.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Single => 1,
            Self::Sections { count, .. } | Self::Lanes { count, .. } => *count,
            Self::PerAxis { channels, .. } => channels(128).len(),
        }
    }
}

/// The rule that derives the types of the layers from their indices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    /// Full layers at regular intervals.
    Every(Every),
    /// A repeating list of layer types.
    Cycle {
        /// The key that lists them.
        key: Option<&'static str>,
        /// The list if the configuration does not state one.
        default: &'static [&'static str],
    },
    /// The key that lists the indices of the full layers; the others are linear.
    Indices(&'static str),
    /// The key that lists the types; they are unknown without it.
    Listed(&'static str),
}

/// Full layers at regular intervals.
#[derive(Clone, Copy, Debug)]
pub(super) struct Every {
    /// Layers from one full layer to the next, if the configuration does not state it.
    pub(super) every: usize,
    /// Keys that state it.
    pub(super) keys: &'static [&'static str],
    /// Index of a full layer within its group; `None` means the last one.
    pub(super) at: Option<usize>,
    /// Layers at the start that are full too.
    pub(super) first: usize,
    /// True if the last layer of the model is full too.
    pub(super) last: bool,
    /// The type of the layers between.
    pub(super) between: &'static str,
}

impl Every {
    /// The type of layer `layer` of `layers`, with one full layer in `every`.
    pub(super) fn layer_type(&self, layer: usize, layers: usize, every: usize) -> &'static str {
        let in_group = layer % every == self.at.unwrap_or(every - 1);
        let at_ends = layer < self.first || self.last && layer + 1 == layers;
        if in_group || at_ends {
            FULL
        } else {
            self.between
        }
    }
}

/// The layers that rotate without a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WithoutWindow {
    All,
    None,
}

const SLIDING_EVERY: Every = Every {
    every: 4,
    keys: &[],
    at: None,
    first: 0,
    last: false,
    between: SLIDING,
};

const fn sliding_every(every: usize) -> Every {
    Every {
        every,
        keys: &["sliding_window_pattern", "_sliding_window_pattern"],
        ..SLIDING_EVERY
    }
}

const LINEAR_BETWEEN: Every = Every {
    keys: &["full_attention_interval"],
    between: LINEAR,
    ..SLIDING_EVERY
};

/// Frequencies of sliding-window layers: unscaled unless stated per layer type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    /// The key of their theta.
    pub(super) key: Option<&'static str>,
    /// Their theta if the configuration does not state it; `None` means the theta of the full
    /// layers.
    pub(super) theta: Option<f64>,
}

/// The parameters in a rope object that does not name layer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OneObject {
    /// Those of all layers, which then share one theta.
    All,
    /// Those of the full layers, under the old name; the class does not read an object under the
    /// new name.
    Full,
    /// The class does not read one.
    Refused,
}

impl Family {
    /// The reason why a model type with a rotation has no row.
    pub(super) fn refusal(model_type: &str) -> Option<&'static str> {
        let named = |names: &str| {
            names
                .split_ascii_whitespace()
                .any(|name| name == model_type)
        };
        let found = REFUSED.iter().find(|(names, _)| named(names));
        found.map(|(_, reason)| *reason)
    }

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

    /// The keys beside a rope object, or without one, that state theta.
    pub(super) fn theta_keys(&self, has_object: bool) -> &'static [&'static str] {
        match self.own_object && !has_object {
            true => &[],
            false => self.theta_keys,
        }
    }

    /// The share of the head that rotates in layers of the type `name`.
    pub(super) fn share(&self, name: &str, has_object: bool) -> Share {
        let layer_share = self.full_share.filter(|_| name == FULL);
        let object_share = (self.own_object && has_object).then_some(1.0);
        Share {
            unstated: layer_share
                .or(object_share)
                .unwrap_or(self.partial_rotary_factor),
            keys: match self.own_object && !has_object {
                true => Some(&[]),
                false => self.share_keys,
            },
        }
    }

    /// The name that stands for the family in messages.
    pub(super) fn first_model_type(&self) -> &'static str {
        self.model_types().next().unwrap_or_default()
    }
}

impl Family {
    /// Creates a row with names and a pairing: one position axis, whole heads rotated.
    const fn new(names: &'static str, pairing: Pairing) -> Self {
        Self {
            names,
            pairing,
            axes: Axes::Single,
            partial_rotary_factor: 1.0,
            share_keys: None,
            own_object: false,
            full_share: None,
            rotary_dim: 0,
            theta: None,
            theta_keys: &["rope_theta"],
            one_object: OneObject::All,
            needs_object: false,
            reads_alpha: false,
            reads_interleave: false,
            layers_key: None,
            head_dim: None,
            full_head_dim: None,
            pattern: None,
            local: None,
            unrotated: &[],
            without_window: None,
            null_is_unrotated: false,
            condition: None,
            no_rope_every: None,
            reversed: false,
        }
    }

    /// A row whose modelling code reads the share of the head that rotates.
    const fn partial(self, share: f64) -> Self {
        self.partial_under(&["partial_rotary_factor"], share)
    }
}

/// Methods that set fields of a row beyond names and pairing from their arguments.
macro_rules! rest_of_rows {
    ($( $(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*)
        { $($field:ident: $value:expr),* } )*) => {
        impl Family {
            $( $(#[$meta])* const fn $name(self, $($argument: $type),*) -> Self {
                Self { $($field: $value,)* ..self }
            } )*
        }
    };
}

type Names = &'static [&'static str];
type Text = &'static str;

rest_of_rows! {
    fn theta(theta: f64) { theta: Some(theta) }
    fn head_dim(channels: usize) { head_dim: Some(channels) }
    fn full_head_dim(channels: usize) { full_head_dim: Some(channels) }
    fn axes(shared: Axes) { axes: shared }
    /// As `partial`, with different keys beside the rope object.
    fn partial_under(keys: Names, share: f64) {
        partial_rotary_factor: share, share_keys: Some(keys)
    }
    fn full_share(share: f64) { full_share: Some(share) }
    fn rotary_dim(channels: usize) { rotary_dim: channels }
    fn theta_under(keys: Names) { theta_keys: keys }
    /// The class takes theta from the rope object alone.
    fn fixed() { theta_keys: &[] }
    /// The class defaults to a scaling, so the rope object must be stated.
    fn scaled() { needs_object: true }
    /// The class reads a rope object for each layer type only.
    fn by_layer_type() { one_object: OneObject::Refused }
    fn one_object(whose: OneObject) { one_object: whose }
    fn own_object() { own_object: true }
    fn reads_alpha() { reads_alpha: true }
    fn reads_interleave() { reads_interleave: true }
    fn layers_key(key: Text) { layers_key: Some(key) }
    fn pattern(types: Pattern) { pattern: Some(types) }
    fn every(every: Every) { pattern: Some(Pattern::Every(every)) }
    fn cycle(key: Option<Text>, types: Names) {
        pattern: Some(Pattern::Cycle { key, default: types })
    }
    fn local(key: Option<Text>, theta: Option<f64>) { local: Some(Local { key, theta }) }
    /// Layers of these types do not rotate.
    fn unrotated(types: Names) { unrotated: types }
    fn without_window(rotate: WithoutWindow) { without_window: Some(rotate) }
    fn null_is_unrotated() { null_is_unrotated: true }
    fn no_rope_every(layers: usize) { no_rope_every: Some(layers) }
    fn reversed() { reversed: true }
    fn when(key: Text, flag: bool, otherwise: Text) {
        condition: Some(Condition { key, flag: Some(flag), otherwise })
    }
    fn stating(key: Text, otherwise: Text) {
        condition: Some(Condition { key, flag: None, otherwise })
    }
}

/// A table of rows: names, pairing, and fields set by the methods above.
macro_rules! families {
    ($( $names:literal: $pairing:ident $(, $method:ident($($argument:tt)*))*; )*) => {
        &[$( Family::new($names, $pairing)$( .$method($($argument)*) )* ),*]
    };
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

fn lane(axis: usize, frequency: usize) -> Lane {
    Lane {
        axis: axis as u8,
        frequency: frequency as u32,
    }
}

/// Two axes with separate frequencies, the second axis first.
const SECOND_AXIS_FIRST: Axes = Axes::Lanes {
    count: 2,
    rotary_dim: |head_dim| head_dim,
    frequency_dims: |rotary_dim| vec![rotary_dim / 2],
    lanes: |rotary_dim| {
        let axis_lanes = |axis| (0..rotary_dim / 4).map(move |i| lane(axis, i));
        axis_lanes(1).chain(axis_lanes(0)).collect()
    },
    stated: None,
};

/// Rows and columns alternate along one progression.
const ALTERNATING_AXES: Axes = Axes::Lanes {
    count: 2,
    rotary_dim: |rotary_dim| rotary_dim,
    frequency_dims: |rotary_dim| vec![rotary_dim],
    lanes: |rotary_dim| (0..rotary_dim / 2).map(|j| lane(j % 2, j)).collect(),
    stated: None,
};

/// The angles are doubled side by side, the halves paired: not a rotation.
const ERNIE_IMAGE: Axes = Axes::Lanes {
    count: 3,
    rotary_dim: |head_dim| head_dim,
    frequency_dims: |_| vec![32, 48],
    lanes: |_| {
        let axis_lanes = |(axis, start, count): (usize, usize, usize)| {
            (0..count).map(move |i| lane(axis, start + i))
        };
        let runs = [(0, 0, 16), (1, 16, 24), (2, 16, 24)].into_iter();
        let twice = |lane| [lane; 2];
        runs.flat_map(axis_lanes).flat_map(twice).collect()
    },
    stated: Some(("rope_axes_dim", &[32, 48, 48])),
};

const WAN: Axes = per_axis(AxisLayout::PerAxis, None, |head_dim| {
    let plane = 2 * (head_dim / 6);
    vec![head_dim - 2 * plane, plane, plane]
});

const HALVES: Axes = per_axis(AxisLayout::PerAxis, None, |head_dim| vec![head_dim / 2; 2]);

const STRIPED_HALVES: Axes = per_axis(AxisLayout::PerAxisStriped, None, |head_dim| {
    vec![head_dim / 2; 2]
});

/// Height takes every other frequency, starting with the first; width takes the frequencies
/// between.
const ALTERNATING_FREQUENCIES: Axes = Axes::Lanes {
    count: 2,
    rotary_dim: |head_dim| head_dim,
    frequency_dims: |rotary_dim| vec![rotary_dim],
    lanes: |rotary_dim| {
        let half = rotary_dim / 4;
        let axis_lanes = |axis| (0..half).map(move |i| lane(axis, 2 * i + axis));
        axis_lanes(0).chain(axis_lanes(1)).collect()
    },
    stated: None,
};

/// Channel c of an axis rotates at frequency c mod half of its channels, so the members of an
/// adjacent pair have separate angles.
const CHANNELS_OF_THEIR_OWN: Axes = Axes::Lanes {
    count: 3,
    rotary_dim: |head_dim| 6 * (head_dim / 6),
    frequency_dims: |rotary_dim| vec![rotary_dim / 3],
    lanes: |rotary_dim| {
        let (pairs, per_axis) = (rotary_dim / 2, rotary_dim / 6);
        let channel = |c: usize| {
            let (pair, member) = (c % pairs, c / pairs);
            lane(pair / per_axis, (2 * (pair % per_axis) + member) % per_axis)
        };
        (0..rotary_dim).map(channel).collect()
    },
    stated: None,
};

static TEXT: &[Family] = families! {
    "llama mistral qwen2 qwen2_moe qwen3_moe olmo olmo2 starcoder2 granite arcee aria_text
     chameleon deepseek_ocr2_encoder deepseek_ocr2_text diffllama doge dots1 esmc eurobert
     falcon_h1 gradium_phonon_tts granite4_vision_text granite_docling_text granitemoe
     granitemoeshared hyperclovax idefics jais2 jetmoe lasr_encoder mimi mimi_decoder
     mimi_encoder moshi kyutai_speech_to_text olmoe pocket_tts pocket_tts_audio_tokenizer
     pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder unlimited_ocr_text":
        Half, theta(1e4);
    "phi3 phi4_multimodal nemotron3_diarization_audio": Half, theta(1e4), partial(1.0);
    "gpt_neox_japanese": Half, theta(1e4), partial_under(&["rotary_pct"], 1.0),
        theta_under(&["rotary_emb_base"]);
    "hunyuan_v1_dense hunyuan_v1_moe": Half, theta(1e4), reads_alpha();
    "qwen3 dia_decoder dia_encoder hrm_text internlm3 iquestcoder molmo2_text
     qwen3_omni_moe_talker_code_predictor seed_oss": Half, theta(1e4), head_dim(128);
    "gemma gemma2 t5_gemma_module vaultgemma": Half, theta(1e4), head_dim(256);
    "neucodec voxtral_realtime_encoder xcodec2 hy_v4": Half, theta(1e4), head_dim(64);
    "timesfm2_5": Half, theta(1e4), head_dim(80);
    "minicpm3": Half, theta(1e4), head_dim(32);
    "nomic_bert": Half, theta(1e3), theta_under(&["rope_theta", "rotary_emb_base"]);
    "jina_embeddings_v3": Half, theta(2e4);
    "gte": Half, theta(1.6e5);
    "bitnet csm csm_depth_decoder_model evolla flex_olmo mllama_text_model": Half, theta(5e5);
    "exaone": Half, theta(5e5), layers_key("num_layers");
    "muse_glimmer_assistant": Half, theta(5e5), head_dim(128);
    "emu3_text_model lfm2 lfm2_moe minimax": Half, theta(1e6);
    "solar_open": Half, theta(1e6), head_dim(128), partial(1.0);
    "minimax_m2": Half, theta(5e6), head_dim(128),
        partial_under(&["partial_rotary_factor", "rotary_dim"], 1.0);
    "hy_v3": Half, theta(11_158_840.0), head_dim(128);
    "sarvam_moe": Half, theta(8e6), head_dim(64), partial(1.0);
    // Thetas must be stated: they are not known from the class alone, or older configurations store
    // them under other names.
    "dbrx olmo_hybrid phimoe voxtral_realtime_text": Half;
    "apertus apertus1p5_text": Half, scaled();
    "ultrabert": Half, by_layer_type(), fixed(), scaled();
    "cwm higgs_audio_v2": Half, head_dim(128), scaled();
    "lfm3": Half, head_dim(128), by_layer_type(), scaled();
    "laguna mellum zaya": Half, head_dim(128), partial_under(&[], 1.0), by_layer_type(), scaled();
    // Its old rope object is that of full layers. All layers are full if no types are listed.
    "step3p5": Half, head_dim(128), partial(1.0), every(Every { every: 1, ..SLIDING_EVERY }),
        local(None, None), one_object(OneObject::Full);
    "beam": Half, head_dim(128), by_layer_type(), scaled(), null_is_unrotated();
    "modernbert modernbert-decoder": Half, theta(1.6e5), by_layer_type(),
        theta_under(&["global_rope_theta"]),
        every(Every {
            every: 3, keys: &["global_attn_every_n_layers"], at: Some(0), ..SLIDING_EVERY
        }),
        local(Some("local_rope_theta"), Some(1e4));
    // The class has default thetas, whatever keys stand beside the rope object.
    "mimo_v2_flash": Half, theta(5e6), head_dim(192), partial_under(&[], 0.334), by_layer_type(),
        fixed(), every(Every { every: 6, first: 1, ..SLIDING_EVERY }),
        local(Some("swa_rope_theta"), Some(1e4));
    "dory": Half, theta(1e7), head_dim(256), by_layer_type(), fixed(),
        every(SLIDING_EVERY), local(None, Some(1e4));
    "lara_mini": Half, theta(1e4), head_dim(128), unrotated(&[FULL]),
        cycle(None, &[LINEAR, SLIDING, LINEAR, FULL, SLIDING]);
    "afmoe": Half, theta(1e4), head_dim(128), unrotated(&[FULL]),
        every(Every { keys: &["global_attn_every_n_layers"], ..SLIDING_EVERY });
    "flint": Half, theta(1e4), head_dim(128), unrotated(&[FULL]),
        every(Every { at: Some(1), first: 2, last: true, ..SLIDING_EVERY }),
        without_window(WithoutWindow::None);
    "exaone4 exaone_moe": Half, theta(1e4), unrotated(&[FULL]), every(sliding_every(4)),
        without_window(WithoutWindow::All);
    "kolibri1": Half, theta(1e4), head_dim(128), unrotated(&[FULL]),
        every(Every { every: 5, ..SLIDING_EVERY }), without_window(WithoutWindow::All);
    "falcon": Half, theta(1e4),
        when("alibi", false, "its attention takes biases instead of rotating");
    "zamba2": Half, theta(1e4), pattern(Pattern::Listed("layers_block_type")),
        when("use_mem_rope", true, "its attention does not rotate");
    "granitemoehybrid esm": Half, theta(1e4),
        stating("position_embedding_type", "the choice of whether its attention rotates");
    // A list of zeros and thetas, one per layer.
    "granite_swa granitemoe_swa": Half, theta(1e4);
    "muse_glimmer_text": Half, theta(1e4), head_dim(128),
        stating("layer_rope_theta", "the choice of the layers that rotate");
    "muse_spark_text": Half, head_dim(64),
        stating("layer_rope_theta", "the choice of the layers that rotate");
    "mixtral ministral": Half;
    "ministral3": Half, head_dim(128), scaled();
    "gpt_oss": Half, theta(1.5e5), head_dim(64), scaled();
    "gemma3 gemma3_text t5gemma2_text t5gemma2_decoder": Half, theta(1e6), head_dim(256),
        every(sliding_every(6)), local(Some("rope_local_base_freq"), Some(1e4)),
        one_object(OneObject::Full);
    "gemma3n gemma3n_text": Half, theta(1e6), head_dim(256), every(sliding_every(5)),
        local(Some("rope_local_base_freq"), Some(1e4)), one_object(OneObject::Full);
    "gemma4 gemma4_text gemma4_unified_text embedding_gemma2_text": Half, head_dim(256),
        by_layer_type(), scaled(), full_head_dim(512);
    "diffusion_gemma_text": Half, head_dim(256), partial(1.0), by_layer_type(), scaled(),
        full_head_dim(512);
    // Transformers 4 and 5 fall back to different thetas, so the configuration must state it.
    "olmo3": Half, every(sliding_every(4)), local(Some("rope_local_base_freq"), None),
        one_object(OneObject::Full);
    "smollm3": Half, no_rope_every(4);
    "phi persimmon nemotron glm4_moe dots3_note_audio_encoder glmasr_encoder": Half, theta(1e4),
        partial(0.5);
    "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp": Half, theta(1e4),
        partial(0.5), own_object();
    "bamba": Half, theta(1e4), partial_under(&[], 0.5),
        pattern(Pattern::Indices("attn_layer_indices"));
    "gpt_neox": Half, theta(1e4), partial_under(&["rotary_pct"], 0.25),
        theta_under(&["rotary_emb_base"]);
    "stablelm": Half, theta(1e4), partial(0.25);
    "qwen3_next": Half, head_dim(256), partial(0.25), every(LINEAR_BETWEEN);
    "recurrent_gemma": Half, theta(1e4), head_dim(256), partial(0.5),
        cycle(Some("block_types"), &["recurrent", "recurrent", "attention"]);
    "deepseek_v3 kimi_k2 axk1 youtu sarvam_mla": InterleaveHalf, theta(1e4), head_dim(64),
        reads_interleave();
    "glm4_moe_lite": InterleaveHalf, theta(1e4), head_dim(64), partial(1.0), reads_interleave();
    "deepseek_v32 glm_moe_dsa": InterleaveHalf, theta(1e4), head_dim(64);
    "axk2": InterleaveHalf, theta(1e4), head_dim(32);
    "longcat_flash": InterleaveHalf, theta(1e7), head_dim(64);
    "bailing_hybrid": InterleaveHalf, head_dim(64);
    "mistral4": InterleaveHalf, head_dim(64), scaled(), reads_interleave();
    "dots3_note_text": InterleaveHalf,
        stating("qk_rope_head_dim", "the choice of the channels that rotate"),
        local(Some("swa_rope_theta"), Some(5e4));
    "deepseek_v2": Adjacent, theta(1e4), head_dim(64);
    // As for OLMo 3: 1e4 in transformers 4, 5e5 in 5.
    "cohere": Adjacent;
    "cohere2": Adjacent, theta(1e4), every(sliding_every(4)), unrotated(&[FULL]),
        without_window(WithoutWindow::None);
    "blt blt_local_encoder blt_local_decoder blt_global_transformer blt_patcher": Adjacent;
    "helium": Adjacent, theta(1e5), head_dim(128);
    "openai_privacy_filter": Adjacent, head_dim(64), scaled();
    "pe_audio_encoder pe_audio_video_encoder pe_video_encoder": Adjacent, theta(2e4), head_dim(128);
    "moonshine": Adjacent, theta(1e4), partial(0.9);
    "moonshine_streaming": Adjacent, theta(1e4), partial(0.8), own_object();
    "roformer": Adjacent, theta(1e4), when("rotary_value", false, "it rotates values too");
    "nanochat": Half, theta(1e4), reversed();
    "gptj codegen": Adjacent, theta(1e4), partial_under(&["rotary_dim"], 1.0), rotary_dim(64);
    "llama4 llama4_text": Adjacent, theta(5e5), head_dim(128), no_rope_every(4);
    "glm glm4": Adjacent, theta(1e4), head_dim(128), partial(0.5);
    "ernie4_5": Adjacent, theta(5e5), head_dim(128);
    "ernie4_5_moe": Adjacent, theta(5e5);
    "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni qwen2_5_omni_thinker
     qwen2_5_omni_text": Half, theta(1e6),
        axes(sections(AxisLayout::Contiguous, 3, &[], Some(false)));
    "qwen2_5_omni_talker": Half, theta(1e6), head_dim(128),
        axes(sections(AxisLayout::Contiguous, 3, &[], Some(false)));
    "paddleocr_vl paddleocr_vl_text": Half, theta(5e5), head_dim(128),
        axes(sections(AxisLayout::Contiguous, 3, &[], Some(false)));
    "qwen3_vl qwen3_vl_text": Half, head_dim(128),
        axes(sections(AxisLayout::Striped, 3, &[24, 20, 20], Some(true)));
    "qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe qwen3_omni_moe_thinker qwen3_omni_moe_text
     qwen3_omni_moe_talker_text": Half,
        axes(sections(AxisLayout::Striped, 3, &[24, 20, 20], Some(true)));
    "cosmos3_edge_text": Half, theta(1e8), head_dim(128),
        axes(sections(AxisLayout::Striped, 3, &[24, 20, 20], None)), own_object();
    "cohere_compass_text": Half, head_dim(128), by_layer_type(),
        axes(sections(AxisLayout::Striped, 3, &[24, 20, 20], None)), null_is_unrotated();
    "qwen4_exp_text": Half, theta(1e4), head_dim(256), partial(1.0),
        axes(sections(AxisLayout::Striped, 3, &[11, 11, 10], None));
    "hy_v4_vl_text": Adjacent, theta(1e4), head_dim(64),
        axes(sections(AxisLayout::Striped, 3, &[12, 10, 10], None));
    "glm_image_text": Half, theta(1e4), partial(1.0),
        axes(sections(AxisLayout::Contiguous, 3, &[8, 12, 12], None));
    "neomme": Half, head_dim(64), partial_under(&[], 1.0), by_layer_type(), scaled(),
        axes(ALTERNATING_AXES), full_share(0.25);
    "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text": Half, head_dim(256), partial(0.25),
        axes(sections(AxisLayout::Striped, 3, &[11, 11, 10], Some(true))), every(LINEAR_BETWEEN);
    "glm4v glm4v_text": Adjacent, theta(1e4), partial(0.5),
        axes(sections(AxisLayout::Contiguous, 3, &[8, 12, 12], Some(false)));
    // Unlike GLM-4.1V, its text decoder is the one of GLM-4.5, which pairs halves.
    "glm4v_moe glm4v_moe_text": Half, theta(1e4), partial(0.5),
        axes(sections(AxisLayout::Contiguous, 3, &[8, 12, 12], Some(false)));
    "glm_ocr glm_ocr_text": Adjacent, theta(1e4), partial(1.0),
        axes(sections(AxisLayout::Contiguous, 3, &[8, 12, 12], Some(false)));
    "ernie4_5_vl_moe ernie4_5_vl_moe_text ernie4_5_moe_vl": Adjacent, theta(5e5),
        axes(sections(AxisLayout::Ernie, 3, &[22, 22, 20], None));
    "hunyuan_vl hunyuan_vl_text hunyuan_ocr hunyuan_ocr_text": Half, theta(1e4),
        axes(sections(AxisLayout::PerChannel, 4, &[], Some(false))), reads_alpha();
    "openpangu_vl openpangu_vl_text": Half,
        axes(sections(AxisLayout::Balanced, 3, &[], Some(true)));
    "FluxTransformer2DModel flux ChromaTransformer2DModel BriaTransformer2DModel
     BriaFiboTransformer2DModel LongCatImageTransformer2DModel OvisImageTransformer2DModel
     QwenImageTransformer2DModel": Adjacent, theta(1e4), head_dim(128),
        axes(per_axis(AxisLayout::PerAxis, Some("axes_dims_rope"), |_| vec![16, 56, 56]));
    "HunyuanVideoTransformer3DModel hunyuan_video HunyuanVideo15Transformer3DModel
     HunyuanVideoFramepackTransformer3DModel": Adjacent, theta(256.0), head_dim(128),
        axes(per_axis(AxisLayout::PerAxis, Some("rope_axes_dim"), |_| vec![16, 56, 56]));
    "Flux2Transformer2DModel": Adjacent, theta(2e3), head_dim(128),
        axes(per_axis(AxisLayout::PerAxis, Some("axes_dims_rope"), |_| vec![32; 4]));
    "ZImageTransformer2DModel": Adjacent, theta(256.0), head_dim(128),
        axes(per_axis(AxisLayout::PerAxis, Some("axes_dims"), |_| vec![32, 48, 48]));
    "ErnieImageTransformer2DModel": Half, theta(256.0), head_dim(128),
        axes(ERNIE_IMAGE);
    "WanTransformer3DModel wan WanVACETransformer3DModel WanAnimateTransformer3DModel": Adjacent,
        theta(1e4), axes(WAN);
};

static VISION: &[Family] = families! {
    "qwen2_vl qwen2_vl_vision qwen2_5_vl qwen2_5_vl_vision qwen3_vl qwen3_vl_vision qwen3_vl_moe
     qwen3_vl_moe_vision qwen3_5 qwen3_5_vision qwen3_5_moe qwen3_5_moe_vision qwen2_5_omni
     qwen2_5_omni_thinker qwen2_5_omni_vision_encoder qwen3_omni_moe qwen3_omni_moe_thinker
     qwen3_omni_moe_vision_encoder glm4v glm4v_vision glm4v_moe glm4v_moe_vision glm46v glm_ocr
     glm_ocr_vision ernie4_5_vl_moe ernie4_5_vl_moe_vision ernie4_5_moe_vl
     DFNRope_vision_transformer paddleocr_vl paddleocr_vl_vision cohere_compass_vision
     dots3_note_vision_encoder exaone4_5_vision glm5_next_vision mlcd_vision_model
     muse_glimmer_vision muse_spark_vision qwen4_exp_vision video_llama_3_vision": Half, theta(1e4),
        axes(HALVES);
    "lfm3_vl_vision": Half, theta(1e6), axes(HALVES);
    // Positions are 2 pi times the centre of a patch in [-1, 1]; prefix tokens are at 0.
    "dinov3_vit eomt_dinov3 sapiens2": Half, theta(100.0), axes(HALVES);
    "gemma4_vision": Quarter, theta(100.0), head_dim(64), axes(HALVES);
    // The first axis is the width; ids count from 1, the class token's is 0.
    "llama4_vision_model": Adjacent, theta(1e4), axes(HALVES);
    "sam3_vit_model": Adjacent, theta(1e4), axes(HALVES);
    "inkling2_vision": Adjacent, theta(1e4), axes(SECOND_AXIS_FIRST);
    "step3p5_vision": Half, theta(1e4), axes(SECOND_AXIS_FIRST);
    "minimax_m3_vl minimax_m3_vl_vision": Half, theta(1e4),
        axes(per_axis(AxisLayout::PerAxis, None, |head_dim| vec![2 * (head_dim / 6); 3]));
    "pixtral": Half, theta(1e4), head_dim(64),
        axes(ALTERNATING_FREQUENCIES);
    "vjepa2": Adjacent, theta(1e4),
        axes(CHANNELS_OF_THEIR_OWN);
    "kimi_k25 kimi_k25_vision": Half, theta(1e4), axes(STRIPED_HALVES);
    // MoonViT: W and H alternate, W first, in adjacent pairs.
    "kimi_vl kimi_vl_vision moonvit": Adjacent, theta(1e4), axes(STRIPED_HALVES);
};

/// Model types with a rotation that no row describes, and the reasons.
static REFUSED: &[(&str, &str)] = &[
    (
        "deepseek_v4",
        "it rotates the output of attention back, and compressed keys by positions of their own",
    ),
    (
        "mistral_large4_text",
        "its frequencies are multiplied by learned factors: RotaryAngles::from_frequencies makes \
         their angles",
    ),
    (
        "cohere2_moe",
        "which of its full layers rotate depends on the kinds of their feed-forward layers",
    ),
    (
        "qwen2_5_omni_dit",
        "it rotates the first head of each layer alone",
    ),
    (
        "sam2_video sam3_tracker_video edgetam_video",
        "its memory attention leaves some keys unturned and repeats the positions of others",
    ),
    (
        "efficientloftr",
        "it rotates hidden channels before they are divided into heads",
    ),
    (
        "lightglue",
        "its frequencies are learned: RotaryAngles::from_frequencies makes their angles",
    ),
    (
        "minimax_m3_vl minimax_m3_vl_text",
        "its configuration rotates rotary_dim channels of a head, its module the whole head",
    ),
    (
        "glm46v",
        "its decoder is glm4v_text or glm4v_moe_text, with different pairings: state one of them",
    ),
    ("jamba nemotron_h", "its attention does not rotate"),
    (
        "MochiTransformer3DModel",
        "its angles are learned, and each head has its own: TokenAngles::per_head makes them",
    ),
    (
        "LTX2VideoTransformer3DModel SanaWMLTX2RefinerTransformer3DModel",
        "each head has angles of its own: TokenAngles::per_head makes them",
    ),
    (
        "AllegroTransformer3DModel AnyFlowTransformer3DModel AnyFlowFARTransformer3DModel
         BriaFibo2Transformer2DModel ChronoEditTransformer3DModel CogView4Transformer2DModel
         CosmosTransformer3DModel Cosmos3OmniTransformer EasyAnimateTransformer3DModel
         Flux3Transformer2DModel GlmImageTransformer2DModel HeliosTransformer3DModel
         HiDreamImageTransformer2DModel HunyuanImageTransformer2DModel Ideogram4Transformer2DModel
         JoyImageEditTransformer3DModel JoyImageEditPlusTransformer3DModel
         Kandinsky5Transformer3DModel Kandinsky6Transformer3DModel Kandinsky6SRTransformer3DModel
         Krea2Transformer2DModel LongCatAudioDiTTransformer LTXVideoTransformer3DModel
         Lumina2Transformer2DModel MiniMaxH3Transformer3DModel MiniMaxMusic3Transformer1DModel
         MotifVideoTransformer3DModel NucleusMoEImageTransformer2DModel OmniGenTransformer2DModel
         PRXTransformer2DModel QwenImage21Transformer2DModel RFD4ProteinaTransformer
         SanaVideoTransformer3DModel SanaWMTransformer3DModel SkyReelsV2Transformer3DModel
         StableAudio3DiTModel WanAnimate2Transformer3DModel",
        "its rotation has not been compared with the code of diffusers: build it with \
         RotarySpec::builder",
    ),
    (
        "musicflamingo",
        "its angles are products of two positions, seconds and windows",
    ),
    (
        "esmfold2 esmfold2_atom_encoder",
        "its atoms have positions in space and an axis of residues, with frequencies of both",
    ),
    ("clvp clvp_encoder", "it rotates values too"),
    (
        "wav2vec2-conformer wav2vec2-bert seamless_m4t",
        "it rotates hidden states before they become q and k",
    ),
    (
        "dia t5gemma t5gemma2 t5gemma2_encoder csm_depth glmasr voxtral_realtime
         nemotron3_diarization deepseek_ocr2_vision",
        "its encoder and decoder have configurations of their own: give the one that is meant",
    ),
];

/// Returns Markdown tables of the supported model types and of those rejected by name.
pub fn model_tables() -> String {
    let mut text = String::from(
        "| component | pairing | axes | theta if unstated | model types |\n|---|---|---|---|---|\n",
    );
    for (component, families) in [(Component::Text, TEXT), (Component::Vision, VISION)] {
        for family in families {
            let names: Vec<&str> = family.model_types().collect();
            let theta = family
                .theta
                .map_or("must be stated".to_owned(), |theta| theta.to_string());
            let reversed = if family.reversed { ", reversed" } else { "" };
            text += &format!(
                "| {component} | {:?}{reversed} | {} | {theta} | {} |\n",
                family.pairing,
                family.axes.count(),
                names.join(", "),
            );
        }
    }
    text += "\n| refused | because |\n|---|---|\n";
    for (names, reason) in REFUSED {
        let names: Vec<&str> = names.split_ascii_whitespace().collect();
        text += &format!("| {} | {reason} |\n", names.join(", "));
    }
    text
}
