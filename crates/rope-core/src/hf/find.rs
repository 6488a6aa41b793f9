//! Finds the family of a configuration and checks that its row holds for it.

use super::Component;
use super::error::{ConfigError, Stated};
use super::family::Family;
use super::fields::Fields;

/// The family of the innermost known `model_type`; the levels must not name two families.
pub(super) fn find_family(
    component: Component,
    levels: &[Fields],
) -> Result<&'static Family, ConfigError> {
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
pub(super) fn without_row(component: Component, found: Vec<String>) -> ConfigError {
    let refusal = |name: &String| {
        let reason = Family::refusal(name)?;
        Some((name.clone(), reason))
    };
    match found.iter().find_map(refusal) {
        Some((model_type, reason)) => ConfigError::UnsupportedModelType { model_type, reason },
        None => ConfigError::UnknownModelType { found, component },
    }
}

/// Checks that `position_embedding_type` does not select the one-axis path for a model with several
/// axes, nor the reverse.
pub(super) fn check_position_embedding(family: &Family, level: &Fields) -> Result<(), ConfigError> {
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

/// Checks that the row holds for this configuration.
pub(super) fn check_condition(family: &Family, config: &Fields) -> Result<(), ConfigError> {
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

/// The model type of a configuration, with its meaning.
pub(super) fn model_type(family: &Family, config: &Fields, meaning: &str) -> Stated {
    let named = config.first(&["model_type", "_class_name"], Fields::text);
    let named = named.ok().flatten().map(|(_, name)| name);
    let named = named.unwrap_or(family.first_model_type());
    Stated::new("model_type", format!("{named:?}{meaning}"))
}
