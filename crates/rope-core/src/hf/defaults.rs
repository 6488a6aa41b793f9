//! Keys that nested configurations omit because their values are the defaults of the class.
//!
//! Transformers 4.36 to 4.51 wrote a nested configuration (of a language model or a vision tower)
//! as its differences from the class.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::fields::{HEADS, TEXT, VISION, WHOLE};

/// The classes of transformers. `classes` maps a model type to the defaults of its class. For
/// nested configurations, indexed by the outer model type and their keys: `fixed` has the model
/// type that they always have, `unnamed` the model type of configurations that state none, and
/// `held` the defaults of the outer class, which override the nested class's. `class_defaults.py`
/// among the generators of `tests/fixtures` writes the file.
static TABLE: LazyLock<Value> = LazyLock::new(|| {
    // A test reads the file. If it cannot be parsed, no defaults are filled in, and missing keys
    // are errors.
    serde_json::from_str(include_str!("defaults.json")).unwrap_or_default()
});

/// Keys of one quantity: if one is stated, no default applies to any of them. A list of layers also
/// states their number.
const SYNONYMS: [&[&str]; 3] = [
    &["hidden_size", "n_embd", "d_model", "vt_hidden_size"],
    HEADS,
    &[
        "num_hidden_layers",
        "num_layers",
        "layer_types",
        "no_rope_layers",
    ],
];
/// The objects that hold some keys of the surrounding configuration.
const ROPE_OBJECTS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// Fills in the defaults of the classes of the configurations in `config`.
pub(super) fn complete(config: &mut Map<String, Value>) {
    let outer = config.get("model_type").and_then(Value::as_str);
    let outer = outer.unwrap_or_default().to_owned();
    for key in WHOLE.iter().chain([&TEXT, &VISION]).copied().flatten() {
        let Some(Value::Object(inner)) = config.get_mut(*key) else {
            continue;
        };
        let outer_default = |table: &str| TABLE[table][&outer][key].as_str();
        let fixed = outer_default("fixed");
        let stated = inner.get("model_type").filter(|stated| **stated != "");
        if stated.is_none_or(Value::is_null)
            && let Some(name) = fixed.or(outer_default("unnamed"))
        {
            inner.insert("model_type".to_owned(), name.into());
        }
        let name = fixed.or(inner.get("model_type").and_then(Value::as_str));
        let class = name.and_then(|name| TABLE["classes"][name].as_object());
        let held = TABLE["held"][&outer][key].as_object();
        for (key, default) in held.into_iter().chain(class).flatten() {
            if !states(inner, key) {
                inner.insert(key.clone(), default.clone());
            }
        }
        complete(inner);
    }
}

/// True if the configuration states the quantity of `key`, null included.
fn states(config: &Map<String, Value>, key: &str) -> bool {
    let mut objects = ROPE_OBJECTS.iter().filter_map(|object| config.get(*object));
    let synonyms = SYNONYMS.iter().find(|keys| keys.contains(&key));
    let synonyms = synonyms.into_iter().flat_map(|keys| keys.iter().copied());
    synonyms.chain([key]).any(|key| config.contains_key(key))
        || objects.any(|rope| rope.get(key).is_some())
}
