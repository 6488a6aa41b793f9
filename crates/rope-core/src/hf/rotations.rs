//! The rotations that a configuration states or implies, which must agree with each other.

use serde_json::Value;

use super::error::ConfigError;
use super::family::{FULL, Family, OneObject, SLIDING};
use super::fields::Fields;
use super::find::model_type;
use super::json::is_object;
use super::parameters::{RopeContext, RopeParameters};
use crate::error::Result;
use crate::frequencies::Scaling;

/// The name of the one rotation of a model whose layers are alike.
pub(super) const ALL: &str = "attention";
/// The remedy for one quantity that is stated inside and outside the rope object.
pub(super) const KEEP_INSIDE: &str =
    "keep the one that the model was trained with, inside rope_parameters";

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
    // Transformers does not read keys beside layer types: they may only repeat a value of a layer
    // type.
    let is_said = |(key, value): &(&str, &Value)| {
        let says_nothing = ["rope_type", "type"].contains(key) && **value == "default";
        let said = types
            .iter()
            .filter_map(|(_, type_object)| type_object.get(key));
        says_nothing || { said }.any(|said| is_same(said, value))
    };
    if !types.is_empty() && !beside.iter().all(is_said) {
        return Err(ConfigError::MixedParameters {
            key: rope.path_of("").trim_end_matches('.').to_owned(),
        });
    }
    Ok(types.into_iter().map(|(name, _)| name).collect())
}

/// True if two values are the same, 1 and 1.0 included.
fn is_same(left: &Value, right: &Value) -> bool {
    left == right || left.is_number() && left.as_f64() == right.as_f64()
}

/// True if the object maps layer types to parameters rather than stating parameters.
fn is_per_layer(rope: &Fields) -> Result<bool, ConfigError> {
    Ok(!layer_types(rope)?.is_empty())
}

/// One rotation of a decoder.
pub(super) struct Rotation<'a> {
    /// The layer type that takes it, or [`ALL`].
    pub(super) name: String,
    /// The object that states it, where one does.
    pub(super) at: Option<Fields<'a>>,
    pub(super) parameters: RopeParameters,
}

/// The rotations that a configuration states or implies, full layers before sliding ones.
pub(super) fn rotations<'a>(
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
        let remedy = "its class reads parameters by layer type alone: state parameters \
                      for full_attention and sliding_attention";
        return Err(ConfigError::contradiction(rope.stated(), right, remedy).into());
    }
    if let Some(rope) = rope.as_ref().filter(|_| !per_layer) {
        check_original_length(family, config, rope, context)?;
    }
    // The class does not read the theta of sliding layers if one object covers all layers.
    let reads_local = rope.is_none() || family.one_object != OneObject::All;
    let local = family.local.filter(|_| reads_local);
    let names: Vec<&str> = match (&rope, local) {
        (Some(rope), local) if per_layer => {
            // The modelling code replaces a null by the default of the layer type, if it has one.
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
            let full_theta = rotations.first().map(|full| full.parameters.theta());
            context.theta = theta.or(full_theta).or(context.theta);
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

/// The context for the rope object of one layer type or of all layers. Transformers does not read
/// the original length for layer types.
fn context_of(layer_type: Option<&str>, context: RopeContext) -> RopeContext {
    let common_length = context.original_max_position_embeddings;
    RopeContext {
        original_max_position_embeddings: common_length.filter(|_| layer_type.is_none()),
        ..context
    }
}

/// Checks that the original length inside the rope object equals the one beside it, which
/// transformers uses.
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

/// Checks that statements outside the rope objects agree with those inside.
pub(super) fn agree_with_outer(
    family: &Family,
    levels: &[Fields],
    config: &Fields,
    theta_keys: &[&str],
    context: RopeContext,
    rotations: &[Rotation],
) -> Result<()> {
    // A statement without a layer type is meant for the full layers where sliding ones have a
    // separate key, and otherwise for the layers that do not state it themselves.
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
            let type_object = |name| Ok(rope.object(name)?.map(|stated| (Some(name), stated)));
            let typed: Result<Vec<_>> = layer_types(&rope)?.into_iter().map(type_object).collect();
            let mut statements: Vec<_> = typed?.into_iter().flatten().collect();
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

/// Checks that a rope object agrees with one of the rotations that it applies to. Missing keys
/// agree with any value.
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
                  keep the values used in training there";
    Err(ConfigError::contradiction(stated.stated(), right, remedy).into())
}

/// True if nothing is stated, or the stated value is the one in effect.
fn meets<T: PartialEq>(stated: &Option<T>, holds: &Option<T>) -> bool {
    stated.is_none() || stated == holds
}
