//! Reading a `config.json`: which object speaks for which component, and what it must agree with.

use serde_json::Value;

use super::error::{ConfigError, Stated};
use super::family::{
    Axes, Component, FULL, Family, LINEAR, OneObject, Pattern, SLIDING, Share, WithoutWindow,
};
use super::fields::{Fields, HEADS, TEXT, VISION, WHOLE, nested};
use super::json::{is_object, parse, parse_config};
use super::layers::LayerSpecs;
use super::parameters::{RopeContext, RopeParameters};
use crate::error::Result;
use crate::frequencies::{Frequencies, Scaling};
use crate::spec::{AxisLayout, Pairing, RotarySpec};

/// Layers that do not attend, and so do not rotate. Dory lists the two halves of a layer, attention
/// and `mlp`, one by one.
const UNROTATED_LAYERS: [&str; 5] = [LINEAR, "mamba", "conv", "recurrent", "mlp"];
/// Full layers that attend to chosen tokens only.
const INDEXED: &str = "indexed_attention";
/// The most layers of a model, so that a wrong number is an error rather than gigabytes.
const MAX_LAYERS: usize = 65_536;
/// The name of the one rotation of a model whose layers are alike.
const ALL: &str = "attention";
/// What to do about one quantity that is stated inside and outside the rope object.
const KEEP_INSIDE: &str = "keep the one that the model was trained with, inside rope_parameters";

impl RotarySpec {
    /// The rotation of a model's language decoder, from the text of its `config.json`.
    ///
    /// Reads the spellings of transformers 4 (`rope_scaling`, `type`) and 5 (`rope_parameters`,
    /// `rope_type`), nested configurations (`text_config`, `thinker_config`), and the diffusers
    /// configurations of Flux, Wan and HunyuanVideo.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is broken, incomplete or contradicts itself, if the
    /// model is unknown, or if its layers rotate differently ([`ConfigError::SeveralRotations`]:
    /// use [`LayerSpecs::from_hf_config`]); the errors of [`Frequencies`](crate::Frequencies) and
    /// of the specification for values out of range.
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

    /// The rotation of a model's vision tower, from the text of its `config.json` or of the
    /// `vision_config` in it.
    ///
    /// # Errors
    /// As [`from_hf_config`](Self::from_hf_config); [`ConfigError::UnknownModelType`] also for a
    /// tower that does not rotate.
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

    /// The rotation that `rope_parameters` state for one component of a model, as golden vectors
    /// and dumps record it.
    ///
    /// `model_type` is Hugging Face's, of the model or of the component (`qwen3_vl`,
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
    /// The rotations of a model's language decoder, layer by layer, from the text of its
    /// `config.json`.
    ///
    /// Gemma 3 and 4 and OLMo 3 turn local and global layers by different frequencies; Llama 4,
    /// SmolLM3 and Command R7B leave some layers unrotated, and so do linear-attention hybrids.
    ///
    /// # Errors
    /// As [`RotarySpec::from_hf_config`], [`ConfigError::SeveralRotations`] excepted.
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

/// The family that the innermost known `model_type` names; the levels must not name two.
fn find_family(component: Component, levels: &[Fields]) -> Result<&'static Family, ConfigError> {
    let mut found = Vec::new();
    let mut known: Option<(&'static Family, Stated)> = None;
    for level in levels.iter().rev() {
        let named = level.first(&["model_type", "_class_name"], Fields::text)?;
        let Some((key, model_type)) = named else {
            continue;
        };
        found.push(model_type.to_owned());
        let Some(family) = Family::find(component, model_type) else {
            continue;
        };
        let stated = level.says(key, format!("{model_type:?}"));
        match &known {
            Some((inner, left)) if !std::ptr::eq(*inner, family) => {
                let remedy = "they rotate differently: give both the checkpoint's model type";
                return Err(ConfigError::contradiction(left.clone(), stated, remedy));
            }
            Some(_) => {}
            None => known = Some((family, stated)),
        }
    }
    match known {
        Some((family, _)) => Ok(family),
        None if found.is_empty() => {
            Err(levels[0].missing("model_type", "the choice of pairing and axis layout"))
        }
        None => Err(without_row(component, found)),
    }
}

/// The error that no row names any of these model types, with the reason if there is one.
fn without_row(component: Component, found: Vec<String>) -> ConfigError {
    let refusal = |name: &String| {
        let reason = Family::refusal(name)?;
        Some((name.clone(), reason))
    };
    match found.iter().find_map(refusal) {
        Some((model_type, reason)) => ConfigError::UnsupportedModelType { model_type, reason },
        None => ConfigError::UnknownModelType { found, component },
    }
}

/// `position_embedding_type` must not send a model of several axes down the plain path, nor a plain
/// one down the other.
fn check_position_embedding(family: &Family, level: &Fields) -> Result<(), ConfigError> {
    let key = "position_embedding_type";
    let Some(found) = level.text(key)? else {
        return Ok(());
    };
    let stated = level.says(key, format!("{found:?}"));
    let (axes, model_type) = (family.axes.count(), family.first_model_type());
    match found {
        "rope" | "rotary" | "yarn" if axes > 1 => Err(ConfigError::PlainPath {
            model_type,
            axes,
            plain: stated,
        }),
        "mrope" | "xdrope" if axes == 1 => Err(ConfigError::contradiction(
            stated,
            Stated::new("model_type", format!("{model_type:?} (1 position axis)")),
            "set position_embedding_type to \"rope\", \
             or take the model type of the multimodal model",
        )),
        "rope" | "rotary" | "yarn" | "mrope" | "xdrope" => Ok(()),
        _ => Err(ConfigError::NotRotary { stated }),
    }
}

/// The row must hold for this configuration.
fn check_condition(family: &Family, config: &Fields) -> Result<(), ConfigError> {
    let Some(condition) = &family.condition else {
        return Ok(());
    };
    let (key, reason) = (condition.key, condition.otherwise);
    match condition.flag {
        None if config.get(key).is_none() => Err(config.missing(key, reason)),
        Some(flag) if config.flag(key)?.unwrap_or(false) != flag => {
            Err(ConfigError::UnsupportedModelType {
                model_type: family.first_model_type().to_owned(),
                reason,
            })
        }
        _ => Ok(()),
    }
}

/// Channels of the heads of full layers, where they are others: one number for all of them.
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

/// The object that states the scaling, under its new or its old name.
fn rope_object<'a>(
    family: &Family,
    config: &Fields<'a>,
    context: RopeContext,
) -> Result<Option<Fields<'a>>> {
    let read = |rope: &Fields| RopeParameters::read(rope, context, family.reads_alpha);
    let (new, old) = (
        config.object("rope_parameters")?,
        config.object("rope_scaling")?,
    );
    if let (Some(new), Some(old)) = (&new, &old)
        && !is_per_layer(new)?
        && read(new)? != read(old)?
    {
        let remedy = "they are two spellings of one object: keep rope_parameters";
        return Err(ConfigError::contradiction(new.stated(), old.stated(), remedy).into());
    }
    Ok(new.or(old))
}

/// The layer types that the object maps to parameters; none if it states parameters.
fn layer_types<'a>(rope: &Fields<'a>) -> Result<Vec<&'a str>, ConfigError> {
    let stated = rope.keys().filter_map(|key| Some((key, rope.get(key)?)));
    let (types, beside): (Vec<_>, Vec<_>) = stated.partition(|(_, value)| is_object(value));
    // Transformers does not read what stands beside layer types: it may say nothing, or what one of
    // them says.
    let is_said = |(key, value): &(&str, &Value)| {
        let says_nothing = ["rope_type", "type"].contains(key) && **value == "default";
        let said = types.iter().filter_map(|(_, of_type)| of_type.get(key));
        says_nothing || { said }.any(|said| is_same(said, value))
    };
    if !types.is_empty() && !beside.iter().all(is_said) {
        return Err(ConfigError::MixedParameters {
            key: rope.path_of("").trim_end_matches('.').to_owned(),
        });
    }
    Ok(types.into_iter().map(|(name, _)| name).collect())
}

/// Whether two values are the same, 1 and 1.0 included.
fn is_same(left: &Value, right: &Value) -> bool {
    left == right || left.is_number() && left.as_f64() == right.as_f64()
}

/// Whether the object maps layer types to parameters rather than stating parameters.
fn is_per_layer(rope: &Fields) -> Result<bool, ConfigError> {
    Ok(!layer_types(rope)?.is_empty())
}

/// One rotation of a decoder.
struct Rotation<'a> {
    /// The layer type that takes it, or [`ALL`].
    name: String,
    /// The object that states it, where one does.
    at: Option<Fields<'a>>,
    parameters: RopeParameters,
}

/// The rotations that a configuration states or implies, full layers before sliding ones.
fn rotations<'a>(
    family: &Family,
    config: &Fields<'a>,
    theta_keys: &[&str],
    context: RopeContext,
) -> Result<Vec<Rotation<'a>>> {
    let rope = rope_object(family, config, context)?;
    let types = match &rope {
        Some(rope) => layer_types(rope)?,
        None => Vec::new(),
    };
    let per_layer = !types.is_empty();
    if let Some(rope) = rope.as_ref().filter(|rope| rope.keys().next().is_some())
        && !per_layer
        && match family.one_object {
            OneObject::All => false,
            OneObject::Full => config.get("rope_parameters").is_some(),
            OneObject::Refused => true,
        }
    {
        let right = model_type(family, config, "");
        let remedy = "its class reads parameters by layer type alone: state those of \
                      full_attention and sliding_attention";
        return Err(ConfigError::contradiction(rope.stated(), right, remedy).into());
    }
    if let Some(rope) = rope.as_ref().filter(|_| !per_layer) {
        check_original_length(family, config, rope, context)?;
    }
    // The class does not read the theta of sliding layers where there is an object for all.
    let reads_local = rope.is_none() || family.one_object != OneObject::All;
    let local = family.local.filter(|_| reads_local);
    let names: Vec<&str> = match (&rope, local) {
        (Some(rope), local) if per_layer => {
            // The modelling code fills in a null where it knows what the layer type falls back to.
            let falls_back = |name: &&str| {
                local.is_some() && [FULL, SLIDING].contains(name) && rope.is_null(name)
            };
            let known = types.iter().copied().chain(rope.keys().filter(falls_back));
            let (full, others): (Vec<_>, Vec<_>) = known.partition(|name| *name == FULL);
            [full, others].concat()
        }
        (_, Some(_)) => vec![FULL, SLIDING],
        _ => vec![ALL],
    };
    let mut rotations: Vec<Rotation> = Vec::new();
    for name in names {
        let mut context = context_of(per_layer.then_some(name), context);
        let mut at = rope.clone();
        if per_layer && theta_keys.is_empty() {
            // The thetas of the class are those of its own objects alone.
            context.theta = None;
        } else if let Some(local) = local.filter(|_| name == SLIDING) {
            let stated = match local.key.filter(|_| !theta_keys.is_empty()) {
                Some(key) => config.number(key)?,
                None => None,
            };
            let theta = stated.or(local.theta);
            let of_full = rotations.first().map(|full| full.parameters.theta());
            context.theta = theta.or(of_full).or(context.theta);
            // One object for all layers means the full ones.
            at = None;
        }
        if let Some(rope) = rope.as_ref().filter(|_| per_layer) {
            at = rope.object(name)?;
        }
        let parameters = match &at {
            Some(at) => RopeParameters::read(at, context, family.reads_alpha)?,
            None => RopeParameters::unscaled(None, context, config)?,
        };
        rotations.push(Rotation {
            name: name.to_owned(),
            at,
            parameters,
        });
    }
    Ok(rotations)
}

/// What completes the rope object of one layer type, or the one of all layers: transformers does
/// not read the original length for layer types.
fn context_of(layer_type: Option<&str>, context: RopeContext) -> RopeContext {
    let of_all = context.original_max_position_embeddings;
    RopeContext {
        original_max_position_embeddings: of_all.filter(|_| layer_type.is_none()),
        ..context
    }
}

/// The original length inside the rope object must be the one beside it, which transformers takes.
fn check_original_length(
    family: &Family,
    config: &Fields,
    rope: &Fields,
    context: RopeContext,
) -> Result<()> {
    let key = "original_max_position_embeddings";
    let (Some(outer), Some(inner)) = (config.count(key)?, rope.count(key)?) else {
        return Ok(());
    };
    let parameters = RopeParameters::read(rope, context, family.reads_alpha)?;
    let is_read = matches!(
        parameters.frequencies.scaling(),
        Scaling::Llama3(_) | Scaling::Yarn(_) | Scaling::LongRope(_)
    );
    if is_read && outer != inner {
        let (left, right) = (config.says(key, outer), rope.says(key, inner));
        return Err(ConfigError::contradiction(left, right, KEEP_INSIDE).into());
    }
    Ok(())
}

/// What the configuration says outside the rope objects must agree with what it says inside.
fn agree_with_outer(
    family: &Family,
    levels: &[Fields],
    config: &Fields,
    theta_keys: &[&str],
    context: RopeContext,
    rotations: &[Rotation],
) -> Result<()> {
    // What is said without a layer type is meant for the full layers where sliding ones have a key
    // of their own, and otherwise for whichever layers do not say it themselves.
    let meant_for = |name: Option<&str>| -> Vec<&Rotation> {
        let is_meant = |rotation: &&Rotation| match name {
            Some(name) => rotation.name == name || rotation.name == ALL,
            None => family.local.is_none() || [FULL, ALL].contains(&&rotation.name[..]),
        };
        rotations.iter().filter(is_meant).collect()
    };
    let others = ["rope_theta", "rotary_emb_base"].into_iter();
    let others = others.filter(|key| !theta_keys.contains(key));
    let thetas = theta_keys.iter().copied().chain(others);
    let thetas: Vec<_> = thetas.map(|key| (key, None)).collect();
    let local = family.local.and_then(|local| local.key);
    let local = local.map(|key| (key, Some(SLIDING)));
    for level in levels {
        for (key, name) in thetas.iter().copied().chain(local) {
            let Some(stated) = level.number(key)? else {
                continue;
            };
            let meant = meant_for(name);
            let differs = |rotation: &&Rotation| rotation.parameters.theta() != stated;
            if let Some(rotation) = meant.first().filter(|_| meant.iter().all(differs)) {
                let theta = rotation.parameters.theta();
                let inside = rotation.at.as_ref();
                let inside = inside.filter(|at| at.get("rope_theta").is_some());
                let right = match inside {
                    Some(at) => at.says("rope_theta", theta),
                    None => match config.first(theta_keys, Fields::number)? {
                        Some((key, _)) => config.says(key, theta),
                        None => model_type(family, config, &format!(" (theta {theta})")),
                    },
                };
                let left = level.says(key, stated);
                return Err(ConfigError::contradiction(left, right, KEEP_INSIDE).into());
            }
        }
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = level.object(key)? else {
                continue;
            };
            let of_type = |name| Ok(rope.object(name)?.map(|stated| (Some(name), stated)));
            let of_types: Result<Vec<_>> = layer_types(&rope)?.into_iter().map(of_type).collect();
            let mut statements: Vec<_> = of_types?.into_iter().flatten().collect();
            if statements.is_empty() {
                statements.push((None, rope));
            }
            for (name, stated) in statements {
                let context = context_of(name, context);
                agree(family, &stated, &meant_for(name), config, context)?;
            }
        }
        if level.get("mrope_section").is_some() {
            return Err(ConfigError::MisplacedKey {
                key: level.path_of("mrope_section"),
                belongs_in: config.path_of("rope_parameters.mrope_section"),
            }
            .into());
        }
    }
    Ok(())
}

/// A rope object must mean what one of the rotations says that it is meant for. What it leaves out
/// it does not deny.
fn agree(
    family: &Family,
    stated: &Fields,
    rotations: &[&Rotation],
    config: &Fields,
    context: RopeContext,
) -> Result<()> {
    let mut refused = None;
    for rotation in rotations {
        let inner = &rotation.parameters;
        let theta = Some(inner.theta());
        let context = RopeContext { theta, ..context };
        let outer = RopeParameters::read(stated, context, family.reads_alpha)?;
        let names_scaling = stated.get("rope_type").or(stated.get("type")).is_some();
        let is_met = outer.theta() == inner.theta()
            && (!names_scaling || outer.frequencies.scaling() == inner.frequencies.scaling())
            && meets(&outer.partial_rotary_factor, &inner.partial_rotary_factor)
            && meets(&outer.mrope_section, &inner.mrope_section)
            && meets(&outer.mrope_interleaved, &inner.mrope_interleaved);
        if is_met {
            return Ok(());
        }
        refused.get_or_insert(rotation);
    }
    let Some(rotation) = refused else {
        return Ok(());
    };
    let unstated = || config.says("rope_parameters", "(not stated)");
    let right = rotation.at.as_ref().map_or_else(unstated, Fields::stated);
    let remedy = "only the innermost rope object is read: \
                  keep what the model was trained with there";
    Err(ConfigError::contradiction(stated.stated(), right, remedy).into())
}

/// Whether what is stated, if it is, is what holds.
fn meets<T: PartialEq>(stated: &Option<T>, holds: &Option<T>) -> bool {
    stated.is_none() || stated == holds
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

/// The model type of a configuration, and what it means.
fn model_type(family: &Family, config: &Fields, meaning: &str) -> Stated {
    let named = config.first(&["model_type", "_class_name"], Fields::text);
    let named = named.ok().flatten().map(|(_, name)| name);
    let named = named.unwrap_or(family.first_model_type());
    Stated::new("model_type", format!("{named:?}{meaning}"))
}

/// Channels of the head that rotate, from whichever key of `share` states them.
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
    // The head is already the rotated part where the model has a head of its own for it.
    let channels = config.size(channels_key)?;
    if let Some(channels) = channels.filter(|_| read_keys.contains(&channels_key)) {
        let share = channels as f64 / head_dim as f64;
        let shown = format!("{channels} of head_dim {head_dim}");
        stated.push((config.says(channels_key, shown), share));
    }
    // Where a part of the head of its own rotates, the share is of the whole head.
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
        // The key of channels is read by models' own code only, which then differs.
        if let Some(channels) = channels.filter(|channels| *channels != head_dim) {
            let left = config.says(channels_key, format!("{channels} of head_dim {head_dim}"));
            let remedy = "transformers rotates whole heads of this model type: remove it if the \
                          model was trained so, or build the rotation with RotarySpec::builder";
            return Err(ConfigError::contradiction(left, whole_heads(), remedy).into());
        }
        // Without a scaling the modelling code does not read a share; under one it makes
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

/// Puts a family, what its configuration states and the width of its heads together.
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
            if let Some(odd) = channels.iter().find(|channels| !channels.is_multiple_of(2)) {
                return Err(ConfigError::OddAxis {
                    channels: channels.clone(),
                    odd: *odd,
                }
                .into());
            }
            layout(channels.iter().map(|channels| channels / 2).collect())
        }
        Axes::Lanes {
            rotary_dim: of,
            frequency_dims,
            lanes,
            stated,
            ..
        } => {
            if let Some((key, meant)) = stated
                && let Some(found) = config.sizes(key)?
                && found != *meant
            {
                let left = config.says(key, format!("{found:?}"));
                let right = Stated::new("model_type", format!("of {meant:?}"));
                let remedy = "build it with RotarySpec::builder and AxisLayout::Lanes";
                return Err(ConfigError::contradiction(left, right, remedy).into());
            }
            rotary_dim = of(rotary_dim);
            let dims = frequency_dims(rotary_dim);
            if dims != [rotary_dim] {
                let of_dims = dims.iter().map(|dims| frequencies.inv_freq(*dims, None));
                let listed: Vec<Vec<f64>> = of_dims.collect::<Result<_>>()?;
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
            let allocated = match config.size("freq_allocation")? {
                // ERNIE's own configuration states the frequencies of time; height and width share
                // the others.
                Some(time) => {
                    let plane = (rotary_dim / 2).saturating_sub(time) / 2;
                    Some(vec![plane, plane, time])
                }
                None => None,
            };
            let fallback = || (!default.is_empty()).then(|| default.to_vec());
            let sections = stated.or(allocated).or_else(fallback).ok_or_else(|| {
                ConfigError::MissingSections {
                    key: rope.path_of("mrope_section"),
                    model_type: model_type(),
                    axes: *count,
                }
            })?;
            if sections.len() != *count {
                return Err(ConfigError::SectionAxes {
                    key: rope.path_of("mrope_section"),
                    found: sections,
                    model_type: model_type(),
                    axes: *count,
                }
                .into());
            }
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
    // DeepSeek-V3 states with this flag whether it reads adjacent channels; null means that it does
    // not.
    let key = "rope_interleave";
    let interleaves = config.flag(key)?.unwrap_or(!config.is_null(key));
    let pairing = if family.reads_interleave && !interleaves {
        Pairing::Half
    } else {
        family.pairing
    };
    let attention_scaling = parameters.frequencies.attention_scaling();
    if family.reversed {
        if frequencies.depends_on_seq_len() {
            let reason = "it turns the other way, which is said of scaled frequencies only where \
                          they do not depend on the length";
            return Err(ConfigError::UnsupportedModelType {
                model_type: family.first_model_type().to_owned(),
                reason,
            }
            .into());
        }
        let inv_freq = frequencies.inv_freq(rotary_dim, None)?;
        frequencies = Frequencies::listed(inv_freq.iter().map(|value| -value).collect())?;
    }
    RotarySpec::builder(head_dim)
        .rotary_dim(rotary_dim)
        .pairing(pairing)
        .axes(axes)
        .frequencies(frequencies)
        .attention_scaling(attention_scaling)
        .build()
}

/// For each layer, 1 if its theta is that of the model, and 0 if it is 0: the layer does not turn.
fn layer_thetas(
    config: &Fields,
    specs: &[(String, RotarySpec)],
) -> Result<Option<Vec<usize>>, ConfigError> {
    let key = "layer_rope_theta";
    let Some(thetas) = config.numbers(key)? else {
        return Ok(None);
    };
    let of_model = specs
        .first()
        .and_then(|(_, spec)| spec.frequencies().theta());
    let other = |theta: &&f64| **theta != 0.0 && Some(**theta) != of_model;
    if let Some(theta) = thetas.iter().find(other) {
        let shown = of_model.unwrap_or_default();
        let (left, right) = (config.says(key, theta), config.says("rope_theta", shown));
        let remedy = "one theta for all layers that turn is supported: build the others with \
                      RotarySpec::builder";
        return Err(ConfigError::contradiction(left, right, remedy));
    }
    let turns = |theta: &f64| usize::from(*theta != 0.0);
    Ok(Some(thetas.iter().map(turns).collect()))
}

/// For each layer, the index of its rotation among `specs`, or none where it does not rotate. Empty
/// where the configuration does not state the number of layers.
fn layers(
    family: &Family,
    config: &Fields,
    specs: &[(String, RotarySpec)],
) -> Result<Vec<Option<usize>>, ConfigError> {
    let keys = [Some("num_hidden_layers"), family.layers_key];
    let keys: Vec<&str> = keys.into_iter().flatten().collect();
    let stated = config.first(&keys, Fields::size)?;
    let (layers_key, count) = stated.map_or((keys[0], None), |(key, count)| (key, Some(count)));
    if let Some(count) = count.filter(|count| *count > MAX_LAYERS) {
        return Err(ConfigError::WrongType {
            key: config.path_of(layers_key),
            expected: "a number of layers, at most 65536",
            found: count.to_string(),
        });
    }
    let types_key = match family.pattern {
        Some(Pattern::Listed(key)) if config.get("layer_types").is_none() => key,
        _ => "layer_types",
    };
    let types = config.texts(types_key)?;
    let flags = config
        .sizes("no_rope_layers")?
        .filter(|flags| !flags.is_empty());
    let flags = match layer_thetas(config, specs)? {
        Some(turning) => Some(turning),
        None => flags,
    };
    let cross = config.sizes("cross_attention_layers")?.unwrap_or_default();
    let mut unrotated_types = family.unrotated.to_vec();
    match family
        .without_window
        .filter(|_| config.is_null("sliding_window"))
    {
        Some(WithoutWindow::All) => unrotated_types.clear(),
        Some(WithoutWindow::None) => unrotated_types.push(SLIDING),
        None => {}
    }
    if family.null_is_unrotated
        && let Some(rope) = config.object("rope_parameters")?
    {
        unrotated_types.extend(rope.keys().filter(|name| rope.get(name).is_none()));
    }
    let lens = [
        (layers_key, count),
        (types_key, types.as_ref().map(Vec::len)),
        ("no_rope_layers", flags.as_ref().map(Vec::len)),
    ];
    let says = |(key, len): (&str, usize)| {
        if key == layers_key {
            config.says(key, len)
        } else {
            config.says(key, format!("a list of {len}"))
        }
    };
    for (left, right) in [(1, 0), (2, 0), (1, 2)] {
        if let ((left, Some(found)), (right, Some(expected))) = (lens[left], lens[right])
            && found != expected
        {
            let (left, right) = (says((left, found)), says((right, expected)));
            let remedy = "list one entry per layer";
            return Err(ConfigError::contradiction(left, right, remedy));
        }
    }
    let count = lens.into_iter().find_map(|(_, len)| len);
    // The interval that the configuration states, or the family's own.
    let interval = |keys: &[&str], own: usize| -> Result<usize, ConfigError> {
        match config.first(keys, Fields::size)? {
            Some((key, 0)) => Err(ConfigError::WrongType {
                key: config.path_of(key),
                expected: "a whole number, 1 or more",
                found: "0".to_owned(),
            }),
            stated => Ok(stated.map_or(own, |(_, every)| every)),
        }
    };
    let types = match types {
        Some(types) => Some(types),
        None => pattern_types(family, config, count.unwrap_or(0), interval)?,
    };
    let no_rope = match family.no_rope_every {
        Some(every) => Some(interval(&["no_rope_layer_interval"], every)?),
        None => None,
    };
    let rotation = |layer: usize| {
        let layer_type = types.as_ref().map(|types| types[layer]);
        let is_unrotated =
            |name: &str| UNROTATED_LAYERS.contains(&name) || unrotated_types.contains(&name);
        // A list of the layers that turn goes before what their types imply.
        let unrotated = match (&flags, no_rope) {
            (Some(flags), _) => flags[layer] == 0,
            (None, Some(every)) => (layer + 1).is_multiple_of(every),
            (None, None) => layer_type.is_some_and(is_unrotated),
        };
        if unrotated || cross.contains(&layer) {
            return Ok(None);
        }
        let is_full = |name: &str| [FULL, INDEXED].contains(&name);
        let named = |(name, _): &(String, RotarySpec)| {
            let same = |found: &str| name == found || is_full(name) && is_full(found);
            name == ALL || layer_type.is_some_and(same)
        };
        match specs.iter().position(named) {
            Some(spec) => Ok(Some(spec)),
            None => Err(ConfigError::LayerWithoutParameters {
                layer,
                layer_type: layer_type.unwrap_or("(not stated)").to_owned(),
                known: specs.iter().map(|(name, _)| name.clone()).collect(),
            }),
        }
    };
    (0..count.unwrap_or(0)).map(rotation).collect()
}

/// The types of `count` layers, as a family derives them that does not list them.
fn pattern_types<'a>(
    family: &Family,
    config: &Fields<'a>,
    count: usize,
    interval: impl Fn(&[&str], usize) -> Result<usize, ConfigError>,
) -> Result<Option<Vec<&'a str>>, ConfigError> {
    let Some(pattern) = &family.pattern else {
        return Ok(None);
    };
    Ok(Some(match pattern {
        Pattern::Every(full) => {
            let every = interval(full.keys, full.every)?;
            let of_layer = |layer| full.layer_type(layer, count, every);
            (0..count).map(of_layer).collect()
        }
        Pattern::Cycle { key, default } => {
            let stated = match key {
                Some(key) => config.texts(key)?,
                None => None,
            };
            let kinds = stated.unwrap_or_else(|| default.to_vec());
            if let (Some(key), true) = (key, kinds.is_empty()) {
                return Err(ConfigError::WrongType {
                    key: config.path_of(key),
                    expected: "a list of at least one layer type",
                    found: "[]".to_owned(),
                });
            }
            kinds.into_iter().cycle().take(count).collect()
        }
        Pattern::Indices(key) => {
            let full = config.sizes(key)?.unwrap_or_default();
            let of_layer = |layer| if full.contains(&layer) { FULL } else { LINEAR };
            (0..count).map(of_layer).collect()
        }
        Pattern::Listed(key) if count > 0 => {
            return Err(config.missing(key, "the choice of the layers that rotate"));
        }
        Pattern::Listed(_) => return Ok(None),
    }))
}
