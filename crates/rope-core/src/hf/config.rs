//! Converts a `config.json` to a specification: the entry points, the head width, the rotated part,
//! and the axes.

use serde_json::Value;

use super::Component;
use super::defaults::complete;
use super::error::{ConfigError, Stated};
use super::family::{Axes, FULL, Family, Share};
use super::fields::{Fields, HEADS, TEXT, VISION, WHOLE, nested};
use super::find::{
    check_condition, check_position_embedding, find_family, model_type, without_row,
};
use super::json::parse;
use super::layers::{LayerSpecs, layers};
use super::parameters::{RopeContext, RopeParameters};
use super::rotations::{ALL, KEEP_INSIDE, Rotation, agree_with_outer, rotations};
use crate::error::Result;
use crate::frequencies::{Frequencies, Scaling};
use crate::lanes::AxisLayout;
use crate::spec::{Pairing, RotarySpec};

impl RotarySpec {
    /// Reads the rotation of a model's language decoder from the text of its `config.json`.
    ///
    /// Reads the spellings of transformers 4 (`rope_scaling`, `type`) and 5 (`rope_parameters`,
    /// `rope_type`), nested configurations (`text_config`, `thinker_config`), and the diffusers
    /// configurations of Flux, Wan and HunyuanVideo.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is invalid, incomplete or contradicts itself, if the
    /// model is unknown, or if its layers rotate differently ([`ConfigError::SeveralRotations`]:
    /// use [`LayerSpecs::from_hf_config`]); the errors of [`Frequencies`](crate::Frequencies) and
    /// of the specification if a value is out of range.
    ///
    /// # Examples
    /// ```
    /// use rope_core::{AxisLayout, RotarySpec};
    ///
    /// let spec = RotarySpec::from_hf_config(
    ///     r#"{
    ///         "model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12,
    ///         "rope_theta": 1000000.0,
    ///         "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}
    ///     }"#,
    /// )?;
    /// assert_eq!(spec.axis_layout(), &AxisLayout::Contiguous(vec![16, 24, 24]));
    /// # Ok::<(), rope_core::RopeError>(())
    /// ```
    pub fn from_hf_config(json: &str) -> Result<Self> {
        LayerSpecs::from_hf_config(json)?.into_single()
    }

    /// Reads the rotation of a model's vision tower from the text of its `config.json`, or of the
    /// `vision_config` in it.
    ///
    /// # Errors
    /// As [`from_hf_config`](Self::from_hf_config); [`ConfigError::UnknownModelType`] also if the
    /// tower does not rotate.
    pub fn from_hf_vision_config(json: &str) -> Result<Self> {
        let value = parse_config(json)?;
        let levels = nested(&value, &[WHOLE[0], WHOLE[1], VISION])?;
        let family = find_family(Component::Vision, &levels)?;
        let config = &levels[levels.len() - 1];
        let stated_theta = config.number("rope_theta")?;
        let context = RopeContext {
            theta: stated_theta.or(family.theta),
            ..RopeContext::default()
        };
        let head_dim = head_dim(
            family,
            config,
            &["embed_dim", "hidden_size", "vt_hidden_size"],
        )?;
        let rope = config.object("rope_parameters")?;
        let parameters = match &rope {
            Some(rope) => RopeParameters::read(rope, context, family.reads_alpha)?,
            None => RopeParameters::unscaled(None, context, config)?,
        };
        if let (Some(theta), Some(rope)) = (stated_theta, &rope)
            && theta != parameters.theta()
        {
            let left = config.says("rope_theta", theta);
            let right = rope.says("rope_theta", parameters.theta());
            return Err(ConfigError::contradiction(left, right, KEEP_INSIDE).into());
        }
        let share = family.share(ALL, rope.is_some());
        build(family, config, config, &parameters, head_dim, share)
    }

    /// Reads the rotation of one component of a model from its `rope_parameters`, as golden vectors
    /// and dumps record them.
    ///
    /// `model_type` is the Hugging Face model type of the model or of the component (`qwen3_vl`,
    /// `qwen3_vl_text`).
    ///
    /// # Errors
    /// As [`from_hf_config`](Self::from_hf_config).
    ///
    /// # Examples
    /// ```
    /// use rope_core::RotarySpec;
    /// use rope_core::hf::Component;
    ///
    /// let parameters =
    ///     r#"{"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}"#;
    /// let spec = RotarySpec::from_rope_parameters("glm4v", Component::Text, parameters, 128)?;
    /// assert_eq!((spec.rotary_dim(), spec.axis_count()), (64, 3));
    /// # Ok::<(), rope_core::RopeError>(())
    /// ```
    pub fn from_rope_parameters(
        model_type: &str,
        component: Component,
        rope_parameters: &str,
        head_dim: usize,
    ) -> Result<Self> {
        let family = Family::find(component, model_type)
            .ok_or_else(|| without_row(component, vec![model_type.to_owned()]))?;
        let value = parse(rope_parameters)?;
        let rope = Fields::new("rope_parameters", &value)?;
        let context = RopeContext {
            theta: family.theta,
            ..RopeContext::default()
        };
        let parameters = RopeParameters::read(&rope, context, family.reads_alpha)?;
        let config = serde_json::json!({ "model_type": model_type });
        let config = Fields::new("", &config)?;
        let share = family.share(ALL, true);
        build(family, &config, &rope, &parameters, head_dim, share)
    }
}

impl LayerSpecs {
    /// Reads the rotation of each layer of a model's language decoder from the text of its
    /// `config.json`.
    ///
    /// Gemma 3 and 4 and OLMo 3 rotate local and global layers by different frequencies. Llama 4,
    /// SmolLM3, Command R7B and linear-attention hybrids leave some layers unrotated.
    ///
    /// # Errors
    /// As [`RotarySpec::from_hf_config`], except [`ConfigError::SeveralRotations`].
    pub fn from_hf_config(json: &str) -> Result<Self> {
        let value = parse_config(json)?;
        let levels = nested(&value, &[WHOLE[0], WHOLE[1], TEXT])?;
        let family = find_family(Component::Text, &levels)?;
        let config = &levels[levels.len() - 1];
        for level in &levels {
            check_position_embedding(family, level)?;
        }
        check_condition(family, config)?;

        let has_object =
            config.get("rope_parameters").is_some() || config.get("rope_scaling").is_some();
        if family.needs_object && !has_object {
            let needed_by = format!(
                "{}, which otherwise falls back to a scaling of its class,",
                model_type(family, config, "").value
            );
            return Err(config.missing("rope_parameters", needed_by).into());
        }

        let theta_keys = family.theta_keys(has_object);
        let stated_theta = config.first(theta_keys, Fields::number)?;
        let context = RopeContext {
            theta: stated_theta.map(|(_, theta)| theta).or(family.theta),
            max_position_embeddings: config.count("max_position_embeddings")?,
            original_max_position_embeddings: config.count("original_max_position_embeddings")?,
        };
        let head_dim = head_dim(family, config, &["hidden_size", "n_embd", "d_model"])?;
        let full_head_dim = full_head_dim(family, config)?;
        let rotations = rotations(family, config, theta_keys, context)?;
        agree_with_outer(family, &levels, config, theta_keys, context, &rotations)?;
        let spec = |rotation: Rotation| -> Result<(String, RotarySpec)> {
            let head_dim = match full_head_dim {
                Some(full) if rotation.name == FULL => full,
                _ => head_dim,
            };
            let share = family.share(&rotation.name, rotation.at.is_some());
            let at = rotation.at.as_ref().unwrap_or(config);
            let spec = build(family, config, at, &rotation.parameters, head_dim, share)?;
            Ok((rotation.name, spec))
        };
        let specs: Vec<_> = rotations.into_iter().map(spec).collect::<Result<_>>()?;
        let layers = layers(family, config, &specs)?;
        Ok(Self::new(specs, layers))
    }
}

/// Parses the text of a `config.json`.
///
/// It is read as transformers reads it. Python's `Infinity`, `-Infinity` and `NaN`, which are not
/// JSON, become the objects that transformers 5 writes for them (`{"__float__": "Infinity"}`).
/// Nested configurations are completed by the defaults of their classes.
///
/// # Errors
/// [`ConfigError::Json`] if the text is neither JSON nor Python's extension of it.
///
/// # Examples
/// ```
/// let config = rope_core::hf::parse_config(
///     r#"{"model_type": "llava", "text_config": {"model_type": "llama"}, "limit": Infinity}"#,
/// )?;
/// assert_eq!(config["text_config"]["hidden_size"], 4096);
/// # Ok::<(), rope_core::hf::ConfigError>(())
/// ```
pub fn parse_config(text: &str) -> Result<Value, ConfigError> {
    let mut config = parse(text)?;
    if let Value::Object(config) = &mut config {
        complete(config);
    }
    Ok(config)
}

/// Channels of the heads of full layers, if they differ from those of other layers: one number for
/// all full layers.
fn full_head_dim(family: &Family, config: &Fields) -> Result<Option<usize>> {
    let Some(layers) = config.object("per_layer_config")? else {
        return Ok(config.size("global_head_dim")?.or(family.full_head_dim));
    };
    let mut stated: Option<(Stated, usize)> = None;
    for name in layers.keys() {
        let Some(layer) = layers.object(name)? else {
            continue;
        };
        let Some(found) = layer.size("head_dim")? else {
            continue;
        };
        let says = layer.says("head_dim", found);
        match &stated {
            Some((first, head_dim)) if *head_dim != found => {
                let remedy = "full layers must have heads of one width";
                return Err(ConfigError::contradiction(first.clone(), says, remedy).into());
            }
            Some(_) => {}
            None => stated = Some((says, found)),
        }
    }
    Ok(stated.map(|(_, head_dim)| head_dim))
}

fn head_dim(family: &Family, config: &Fields, widths: &[&str]) -> Result<usize, ConfigError> {
    let keys = [
        "qk_rope_head_dim",
        "head_dim",
        "attention_head_dim",
        "kv_channels",
    ];
    if let Some((_, head_dim)) = config.first(&keys, Fields::size)? {
        return Ok(head_dim);
    }
    // A null asks for the division in the configuration classes that allow one; only a missing key
    // takes the default.
    let is_null = config.keys().any(|key| keys.contains(&key));
    if let Some(head_dim) = family.head_dim.filter(|_| !is_null) {
        return Ok(head_dim);
    }
    let needed_by = "head_dim, which is not stated,";
    let first = |keys: &[_]| {
        let stated = config.first(keys, Fields::size);
        config.require(keys[0], stated, needed_by)
    };
    let (width_key, width) = first(widths)?;
    let (heads_key, heads) = first(HEADS)?;
    if heads == 0 || !width.is_multiple_of(heads) {
        let (left, right) = (config.says(width_key, width), config.says(heads_key, heads));
        let remedy = "the width does not divide into that many heads: state head_dim";
        return Err(ConfigError::contradiction(left, right, remedy));
    }
    Ok(width / heads)
}

/// Rotated channels of the head, from the key of `share` that states them.
fn rotary_dim(
    family: &Family,
    config: &Fields,
    rope: &Fields,
    parameters: &RopeParameters,
    head_dim: usize,
    share: Share,
) -> Result<usize> {
    let scaling = parameters.frequencies.scaling();
    let (key, channels_key) = ("partial_rotary_factor", "rotary_dim");
    if matches!(scaling, Scaling::Proportional { .. }) {
        return match config.get(key).is_some() && rope.get(key).is_none() {
            true => Err(ConfigError::MisplacedKey {
                key: config.path_of(key),
                belongs_in: rope.path_of(key),
            }
            .into()),
            false => Ok(head_dim),
        };
    }
    let read_keys: &[&str] = share.keys.unwrap_or(&["partial_rotary_factor"]);
    let mut stated: Vec<(Stated, f64)> = Vec::new();
    if let Some(share) = parameters.partial_rotary_factor {
        stated.push((rope.says(key, share), share));
    }
    for key in read_keys.iter().filter(|key| **key != channels_key) {
        if let Some(share) = config.number(key)? {
            stated.push((config.says(key, share), share));
        }
    }
    // Where the model has a separate rotary head, that head is the rotated part.
    let channels = config.size(channels_key)?;
    if let Some(channels) = channels.filter(|_| read_keys.contains(&channels_key)) {
        let share = channels as f64 / head_dim as f64;
        let shown = format!("{channels} of head_dim {head_dim}");
        stated.push((config.says(channels_key, shown), share));
    }
    // Where a separate part of the head rotates, the share refers to the whole head.
    if let (Some(part), [(_, stated_share), ..]) = (config.size("qk_rope_head_dim")?, &stated[..]) {
        let beside = config.size("qk_nope_head_dim")?;
        let beside = beside.filter(|_| share.keys.is_none());
        let whole = config
            .size("head_dim")?
            .or(beside.map(|beside| beside + part));
        if whole.is_some_and(|whole| (whole as f64 * stated_share) as usize == part) {
            return Ok(head_dim);
        }
    }
    let whole_heads = || model_type(family, config, " (whole heads)");
    if share.keys.is_none() {
        // Only custom modelling code reads the key of channels, and it then differs.
        if let Some(channels) = channels.filter(|channels| *channels != head_dim) {
            let left = config.says(channels_key, format!("{channels} of head_dim {head_dim}"));
            let remedy = "transformers rotates whole heads of this model type: remove it if the \
                          model was trained so, or build the rotation with RotarySpec::builder";
            return Err(ConfigError::contradiction(left, whole_heads(), remedy).into());
        }
        // Without a scaling, the modelling code does not read a share; with one, it computes
        // frequencies that do not fit the heads.
        let is_part = |stated: &&(Stated, f64)| stated.1 != 1.0;
        return match stated.iter().find(is_part) {
            Some((left, _)) if *scaling != Scaling::Default => {
                let remedy = "under a scaling a share has to fit the model type: remove it";
                Err(ConfigError::contradiction(left.clone(), whole_heads(), remedy).into())
            }
            _ => Ok(head_dim),
        };
    }
    if let [(left, first), .., (right, last)] = &stated[..]
        && first != last
    {
        let remedy = "keep the one that the model was trained with";
        return Err(ConfigError::contradiction(left.clone(), right.clone(), remedy).into());
    }
    if stated.is_empty() && family.rotary_dim > 0 {
        return Ok(family.rotary_dim);
    }
    let share = stated.first().map_or(share.unstated, |(_, share)| *share);
    let partial_rotary_factor = Some(share);
    RopeParameters {
        partial_rotary_factor,
        ..parameters.clone()
    }
    .rotary_dim(head_dim)
}

/// The pairing of a family. DeepSeek-V3 states with a flag whether it reads adjacent channels; null
/// means that it does not.
fn pairing(family: &Family, config: &Fields) -> Result<Pairing, ConfigError> {
    let key = "rope_interleave";
    let interleaves = config.flag(key)?.unwrap_or(!config.is_null(key));
    Ok(match family.reads_interleave && !interleaves {
        true => Pairing::Half,
        false => family.pairing,
    })
}

/// The frequencies of a family that rotates in the opposite direction.
fn reversed(family: &Family, frequencies: &Frequencies, rotary_dim: usize) -> Result<Frequencies> {
    if frequencies.depends_on_seq_len() {
        let reason = "it rotates the other way, which is said of scaled frequencies only where \
                      they do not depend on the length";
        return Err(ConfigError::UnsupportedModelType {
            model_type: family.first_model_type().to_owned(),
            reason,
        }
        .into());
    }
    let inv_freq = frequencies.inv_freq(rotary_dim, None)?;
    Frequencies::listed(inv_freq.iter().map(|value| -value).collect())
}

/// Pairs of each axis, from its channels.
fn pairs_of(channels: &[usize]) -> Result<Vec<usize>, ConfigError> {
    match channels.iter().find(|channels| !channels.is_multiple_of(2)) {
        None => Ok(channels.iter().map(|channels| channels / 2).collect()),
        Some(odd) => Err(ConfigError::OddAxis {
            channels: channels.to_vec(),
            odd: *odd,
        }),
    }
}

/// Rejects sizes other than those for which a model type's lanes were written.
fn expect_sizes(config: &Fields, key: &str, meant: &[usize]) -> Result<(), ConfigError> {
    match config.sizes(key)? {
        Some(found) if found != meant => {
            let left = config.says(key, format!("{found:?}"));
            let right = Stated::new("model_type", format!("of {meant:?}"));
            let remedy = "build it with RotarySpec::builder and AxisLayout::Lanes";
            Err(ConfigError::contradiction(left, right, remedy))
        }
        _ => Ok(()),
    }
}

/// The sections of ERNIE's own configuration, which states the frequencies of time; height and width
/// share the others.
fn allocated(config: &Fields, rotary_dim: usize) -> Result<Option<Vec<usize>>, ConfigError> {
    let time = config.size("freq_allocation")?;
    Ok(time.map(|time| {
        let plane = (rotary_dim / 2).saturating_sub(time) / 2;
        vec![plane, plane, time]
    }))
}

/// Returns `found`, which must hold one section for each of the `axes`.
fn sections(
    found: Option<Vec<usize>>,
    axes: usize,
    rope: &Fields,
    model_type: impl Fn() -> Stated,
) -> Result<Vec<usize>, ConfigError> {
    let (key, model_type) = (rope.path_of("mrope_section"), model_type());
    match found {
        Some(found) if found.len() == axes => Ok(found),
        Some(found) => Err(ConfigError::SectionAxes {
            key,
            found,
            model_type,
            axes,
        }),
        None => Err(ConfigError::MissingSections {
            key,
            model_type,
            axes,
        }),
    }
}

/// Combines a family, its configuration and the width of its heads.
fn build(
    family: &Family,
    config: &Fields,
    rope: &Fields,
    parameters: &RopeParameters,
    head_dim: usize,
    share: Share,
) -> Result<RotarySpec> {
    let model_type = || model_type(family, config, "");
    let mut rotary_dim = rotary_dim(family, config, rope, parameters, head_dim, share)?;
    let mut frequencies = parameters.frequencies.clone();
    let stated = parameters.mrope_section.clone();
    let axes = match &family.axes {
        Axes::Single | Axes::PerAxis { .. } | Axes::Lanes { .. } if stated.is_some() => {
            return Err(ConfigError::SectionsOnPlainModel {
                sections: rope.says("mrope_section", format!("{stated:?}")),
                model_type: model_type(),
                axes: family.axes.count(),
            }
            .into());
        }
        Axes::Single => AxisLayout::Single,
        Axes::PerAxis {
            layout,
            key,
            channels,
        } => {
            let listed = match key {
                Some(key) => rope.sizes(key)?.or(config.sizes(key)?),
                None => None,
            };
            let channels = listed.unwrap_or_else(|| {
                let channels = channels(head_dim);
                rotary_dim = channels.iter().sum();
                channels
            });
            layout(pairs_of(&channels)?)
        }
        Axes::Lanes {
            rotary_dim: of,
            frequency_dims,
            lanes,
            stated,
            ..
        } => {
            if let Some((key, meant)) = stated {
                expect_sizes(config, key, meant)?;
            }
            rotary_dim = of(rotary_dim);
            let dims = frequency_dims(rotary_dim);
            if dims != [rotary_dim] {
                let lists = dims.iter().map(|dims| frequencies.inv_freq(*dims, None));
                let listed: Vec<Vec<f64>> = lists.collect::<Result<_>>()?;
                frequencies = Frequencies::listed(listed.concat())?;
            }
            AxisLayout::Lanes(lanes(rotary_dim))
        }
        Axes::Sections {
            layout,
            count,
            default,
            interleaved,
        } => {
            let fallback = (!default.is_empty()).then(|| default.to_vec());
            let stated = stated.or(allocated(config, rotary_dim)?).or(fallback);
            let sections = sections(stated, *count, rope, model_type)?;
            if let (Some(stated), Some(meant)) = (parameters.mrope_interleaved, interleaved)
                && stated != *meant
            {
                let left = rope.says("mrope_interleaved", stated);
                let remedy = "the model type decides how the axes share the frequencies: \
                              remove mrope_interleaved, or take the right model type";
                return Err(ConfigError::contradiction(left, model_type(), remedy).into());
            }
            layout(sections)
        }
    };
    let attention_scaling = parameters.frequencies.attention_scaling();
    if family.reversed {
        frequencies = reversed(family, &frequencies, rotary_dim)?;
    }
    RotarySpec::builder(head_dim)
        .rotary_dim(rotary_dim)
        .pairing(pairing(family, config)?)
        .axis_layout(axes)
        .frequencies(frequencies)
        .attention_scaling(attention_scaling)
        .build()
}
