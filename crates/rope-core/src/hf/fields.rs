//! Typed reading of JSON objects: every error names the key by its path from the top of the file.

use serde_json::{Map, Value};

use super::error::{ConfigError, Stated};
use super::json::is_object;

/// Keys of configurations that hold all parts of a model, from the outside in: of retrieval models
/// and policies, and of omni models.
pub(crate) const WHOLE: [&[&str]; 2] = [&["vlm_config"], &["thinker_config"]];
/// Keys of the language model: transformers', DeepSeek-VL's and InternVL's.
pub(super) const TEXT: &[&str] = &["text_config", "language_config", "llm_config"];
/// The key of the vision tower.
pub(super) const VISION: &[&str] = &["vision_config"];
/// Keys of the number of heads.
pub(super) const HEADS: &[&str] = &[
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "decoder_num_attention_heads",
    "vt_num_attention_heads",
];

/// A configuration and its nested configurations, outermost first: each is the value of one of the
/// given keys in the one before.
pub(crate) fn nested<'a>(
    value: &'a Value,
    steps: &[&[&str]],
) -> Result<Vec<Fields<'a>>, ConfigError> {
    let mut levels = vec![Fields::new("", value)?];
    for keys in steps {
        let outer = &levels[levels.len() - 1];
        let mut inner: Option<Fields> = None;
        for key in *keys {
            match (&inner, outer.object(key)?) {
                (Some(first), Some(other)) if first.map != other.map => {
                    let [left, right] = [first, &other].map(|at| Stated::new(&at.path, "{...}"));
                    let remedy = "they are two names of one object: keep the model's own";
                    return Err(ConfigError::contradiction(left, right, remedy));
                }
                (None, found) => inner = found,
                _ => {}
            }
        }
        levels.extend(inner);
    }
    Ok(levels)
}

/// One JSON object and its path in the file.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The object `value`, called `path` in messages; the top of a file has the empty path.
    pub(crate) fn new(path: impl Into<String>, value: &'a Value) -> Result<Self, ConfigError> {
        let path = path.into();
        match value {
            Value::Object(map) if is_object(value) => Ok(Self { path, map }),
            _ => Err(ConfigError::wrong_type(&path, "an object", value)),
        }
    }

    /// The path of one key of this object.
    pub(crate) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// The value of `key`; a null counts as absent, as it does in Hugging Face's configuration
    /// classes.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// True if `key` is present and null, for keys where null and absence differ.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// The keys of this object.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.get(key)
            .map(|value| {
                read(value)
                    .ok_or_else(|| ConfigError::wrong_type(&self.path_of(key), expected, value))
            })
            .transpose()
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.read(key, "a number", Value::as_f64)
    }

    /// A count. Checkpoints also write counts as `4096.0`.
    pub(crate) fn count(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        self.read(key, "a whole number, 0 or more", whole)
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.read(key, "a whole number, 0 or more", |value| {
            usize::try_from(whole(value)?).ok()
        })
    }

    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>, ConfigError> {
        self.read(key, "a whole number", Value::as_i64)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        self.read(key, "a list of numbers", |value| {
            value.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    pub(crate) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        self.read(key, "a list of whole numbers, 0 or more", |value| {
            let size = |value| usize::try_from(whole(value)?).ok();
            value.as_array()?.iter().map(size).collect()
        })
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        self.read(key, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        self.get(key)
            .map(|value| Fields::new(self.path_of(key), value))
            .transpose()
    }

    /// The first of `keys` that is present, and its value as `read` reads it.
    pub(crate) fn first<'k, T>(
        &self,
        keys: &[&'k str],
        read: impl Fn(&Self, &str) -> Result<Option<T>, ConfigError>,
    ) -> Result<Option<(&'k str, T)>, ConfigError> {
        let present = |key: &&'k str| Some(read(self, key).transpose()?.map(|value| (*key, value)));
        keys.iter().find_map(present).transpose()
    }

    /// One key of this object with its value.
    pub(super) fn says(&self, key: &str, value: impl std::fmt::Display) -> Stated {
        Stated::new(self.path_of(key), value)
    }

    /// The error that `key` is missing, with the part that needs it.
    pub(super) fn missing(&self, key: &str, needed_by: impl Into<String>) -> ConfigError {
        ConfigError::MissingKey {
            key: self.path_of(key),
            needed_by: needed_by.into(),
        }
    }

    /// This object as a whole.
    pub(crate) fn stated(&self) -> Stated {
        Stated::new(self.path.clone(), serde_json::Value::from(self.map.clone()))
    }

    /// The value in `found`, or an error that names the part that needs `key`.
    pub(crate) fn require<T>(
        &self,
        key: &str,
        found: Result<Option<T>, ConfigError>,
        needed_by: impl Into<String>,
    ) -> Result<T, ConfigError> {
        found?.ok_or_else(|| self.missing(key, needed_by))
    }
}

fn whole(value: &Value) -> Option<u64> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        ((0.0..=EXACT).contains(&number) && number.fract() == 0.0).then_some(number as u64)
    })
}
