//! `rope_parameters` (transformers 5) and `rope_scaling` (transformers 4): the object that states
//! theta and its scaling.

use serde_json::Value;

use super::error::{ConfigError, Stated};
use super::fields::Fields;
use super::json::{is_object, parse};
use crate::error::Result;
use crate::frequencies::{Frequencies, Llama3Scaling, LongRopeScaling, Scaling, YarnScaling};

/// Names of scalings in configurations, and their rope types.
///
/// `mrope` and `axial` describe the axis layout, `su` is an early name of LongRoPE, `xdrope` is
/// Hunyuan's name and `deepseek_yarn` Sarvam's.
const ROPE_TYPES: [(&str, &str); 12] = [
    ("default", "default"),
    ("linear", "linear"),
    ("dynamic", "dynamic"),
    ("yarn", "yarn"),
    ("longrope", "longrope"),
    ("llama3", "llama3"),
    ("proportional", "proportional"),
    ("mrope", "default"),
    ("axial", "default"),
    ("su", "longrope"),
    ("xdrope", "dynamic"),
    ("deepseek_yarn", "yarn"),
];

const KNOWN_ROPE_TYPES: [&str; ROPE_TYPES.len()] = {
    let mut names = [""; ROPE_TYPES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = ROPE_TYPES[index].0;
        index += 1;
    }
    names
};

/// Keys that state only the amount of scaling.
const SCALING_KEYS: [&str; 7] = [
    "factor",
    "alpha",
    "attention_factor",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
];
/// Values of these keys that have no effect; templates leave them in place.
const NEUTRAL: [Option<f64>; 2] = [Some(0.0), Some(1.0)];

/// The keys of the surrounding configuration that complete the rope parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RopeContext {
    /// `rope_theta`, if the object does not state it.
    pub theta: Option<f64>,
    /// The model's `max_position_embeddings`, in tokens.
    pub max_position_embeddings: Option<u64>,
    /// `original_max_position_embeddings` in tokens, if the object does not state it.
    pub original_max_position_embeddings: Option<u64>,
}

/// The contents of `rope_parameters`, or of `rope_scaling`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParameters {
    /// Theta and its scaling.
    pub frequencies: Frequencies,
    /// Share of the head's channels that rotate, if stated. Under [`Scaling::Proportional`] this is
    /// `None`: the rotation covers the whole head, and the scaling holds the share.
    pub partial_rotary_factor: Option<f64>,
    /// Pairs per position axis, if stated.
    pub mrope_section: Option<Vec<usize>>,
    /// True if the axes are striped over the frequencies; `None` if not stated.
    pub mrope_interleaved: Option<bool>,
}

impl RopeParameters {
    /// Reads the JSON text of `rope_parameters` or `rope_scaling`.
    ///
    /// Under the rope type `dynamic`, `alpha` is read as HunYuan's code does. In the configuration
    /// of another model, it is ignored.
    ///
    /// # Errors
    /// [`ConfigError`] if the text is not a JSON object or maps layer types to parameters, if a key
    /// has the wrong type, or if the rope type is unknown or lacks a key; the errors of
    /// [`Frequencies`] if a value is out of range.
    pub fn from_json(json: &str, context: RopeContext) -> Result<Self> {
        let value = parse(json)?;
        Self::read(&Fields::new("rope_parameters", &value)?, context, true)
    }

    /// Rotated channels in a head of `head_dim` channels: `partial_rotary_factor` of them, rounded
    /// down.
    ///
    /// # Errors
    /// [`ConfigError::PartialRotary`] if the share is not in (0, 1\], or gives no channels or an
    /// odd number.
    pub fn rotary_dim(&self, head_dim: usize) -> Result<usize> {
        let share = self.partial_rotary_factor.unwrap_or(1.0);
        let rotary_dim = (head_dim as f64 * share) as usize;
        if !(share > 0.0 && share <= 1.0) || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(ConfigError::PartialRotary {
                share,
                head_dim,
                rotary_dim,
            }
            .into());
        }
        Ok(rotary_dim)
    }

    pub(super) fn theta(&self) -> f64 {
        // No configuration lists its frequencies.
        self.frequencies.theta().unwrap_or(f64::NAN)
    }

    /// Parameters of a configuration without such an object.
    pub(super) fn unscaled(
        theta: Option<f64>,
        context: RopeContext,
        config: &Fields,
    ) -> Result<Self> {
        let theta = theta.or(context.theta);
        let theta = theta.ok_or_else(|| missing_theta(config))?;
        Ok(Self {
            frequencies: Frequencies::new(theta)?,
            partial_rotary_factor: None,
            mrope_section: None,
            mrope_interleaved: None,
        })
    }

    /// If `reads_alpha`, `dynamic` scales by `alpha`, which only HunYuan's code reads.
    pub(super) fn read(fields: &Fields, context: RopeContext, reads_alpha: bool) -> Result<Self> {
        if fields
            .keys()
            .any(|key| fields.get(key).is_some_and(is_object))
        {
            return Err(ConfigError::PerLayerParameters {
                stated: fields.stated(),
            }
            .into());
        }
        let theta = fields.number("rope_theta")?.or(context.theta);
        let theta = theta.ok_or_else(|| missing_theta(fields))?;
        let stated = fields.count("max_position_embeddings")?;
        let context = RopeContext {
            max_position_embeddings: stated.or(context.max_position_embeddings),
            ..context
        };
        let scaling = read_scaling(fields, context, reads_alpha)?;
        let partial_rotary_factor = match scaling {
            Scaling::Proportional { .. } => None,
            _ => fields.number("partial_rotary_factor")?,
        };
        let mrope_section = match fields.sizes("mrope_section")? {
            Some(sections) => Some(sections),
            None => fields.sizes("xdrope_section")?,
        };
        Ok(Self {
            frequencies: Frequencies::new(theta)?.with_scaling(scaling)?,
            partial_rotary_factor,
            mrope_section,
            mrope_interleaved: fields.flag("mrope_interleaved")?,
        })
    }
}

fn missing_theta(fields: &Fields) -> ConfigError {
    fields.missing("rope_theta", "every rotation")
}

/// The rope type that the object names, under `rope_type` or the older `type`.
fn rope_type(fields: &Fields) -> Result<&'static str, ConfigError> {
    let named = |key: &str| -> Result<Option<(Stated, &'static str)>, ConfigError> {
        let Some(name) = fields.text(key)? else {
            return Ok(None);
        };
        let known = ROPE_TYPES.iter().find(|(known, _)| *known == name);
        let (_, meaning) = known.ok_or_else(|| ConfigError::UnknownRopeType {
            key: fields.path_of(key),
            found: name.to_owned(),
            known: &KNOWN_ROPE_TYPES,
        })?;
        Ok(Some((fields.says(key, format!("{name:?}")), meaning)))
    };
    let stated = match (named("rope_type")?, named("type")?) {
        (Some((left, new)), Some((right, old))) if new != old => {
            let remedy = "two spellings of one key: keep the one that the model was trained with";
            return Err(ConfigError::contradiction(left, right, remedy));
        }
        (new, old) => new.or(old),
    };
    // A scaling under the type `default` would be ignored: the published code reads no factor
    // there.
    let scales = |key: &&&str| {
        let neutral = |value: &Value| NEUTRAL.contains(&value.as_f64());
        fields.get(key).is_some_and(|value| !neutral(value))
    };
    match (&stated, SCALING_KEYS.iter().find(scales)) {
        (None, Some(key)) => Err(fields.missing("rope_type", fields.path_of(key))),
        (Some((left, "default")), Some(key)) => Err(ConfigError::contradiction(
            left.clone(),
            fields.says(key, fields.get(key).cloned().unwrap_or_default()),
            "this rope type does not scale: name the one that the model was trained with, \
             or remove the keys of a scaling",
        )),
        (stated, _) => Ok(stated.as_ref().map_or("default", |(_, meaning)| *meaning)),
    }
}

/// A scaling as its object states it.
struct ScalingFields<'a> {
    fields: &'a Fields<'a>,
    context: RopeContext,
    rope_type: &'static str,
}

impl ScalingFields<'_> {
    fn needed_by(&self) -> String {
        format!("rope type {}", self.rope_type)
    }

    fn number(&self, key: &'static str) -> Result<f64, ConfigError> {
        let found = self.fields.number(key);
        self.fields.require(key, found, self.needed_by())
    }

    fn original(&self) -> Result<u64, ConfigError> {
        let key = "original_max_position_embeddings";
        let stated = self.fields.count(key)?;
        stated
            .or(self.context.original_max_position_embeddings)
            .or(self.context.max_position_embeddings)
            .ok_or_else(|| self.fields.missing(key, self.needed_by()))
    }

    fn dynamic(&self, reads_alpha: bool) -> Result<Scaling, ConfigError> {
        let alpha = self.fields.number("alpha")?;
        if let Some(alpha) = alpha.filter(|alpha| reads_alpha && *alpha != 0.0) {
            return Ok(Scaling::NtkAlpha { alpha });
        }
        let max = self.context.max_position_embeddings;
        Ok(Scaling::Dynamic {
            factor: self.number("factor")?,
            max_position_embeddings: max.ok_or_else(|| ConfigError::MissingKey {
                key: "max_position_embeddings".to_owned(),
                needed_by: self.needed_by(),
            })?,
        })
    }

    fn yarn(&self) -> Result<Scaling, ConfigError> {
        let fields = self.fields;
        // A null asks for the ratio of the two context lengths; a missing key does not.
        let max = self.context.max_position_embeddings;
        let factor = match max.filter(|_| fields.is_null("factor")) {
            Some(max) => max as f64 / self.original()? as f64,
            None => self.number("factor")?,
        };
        let mut yarn = YarnScaling::new(factor, self.original()?);
        // The published code reads a zero as "not stated".
        let turns = |key| {
            let turns = fields.number(key);
            turns.map(|turns| turns.filter(|turns| *turns != 0.0))
        };
        yarn.beta_fast = turns("beta_fast")?.unwrap_or(yarn.beta_fast);
        yarn.beta_slow = turns("beta_slow")?.unwrap_or(yarn.beta_slow);
        yarn.truncate = fields.flag("truncate")?.unwrap_or(yarn.truncate);
        yarn.attention_factor = fields.number("attention_factor")?;
        yarn.mscale = fields.number("mscale")?;
        yarn.mscale_all_dim = fields.number("mscale_all_dim")?;
        Ok(Scaling::Yarn(yarn))
    }

    fn longrope(&self) -> Result<Scaling, ConfigError> {
        let fields = self.fields;
        let list = |key| fields.require(key, fields.numbers(key), self.needed_by());
        let original = self.original()?;
        // A scaling may leave out `factor` where it follows from the two context lengths.
        let max = self.context.max_position_embeddings;
        let implied = max.filter(|max| *max > original);
        let implied = implied.map(|max| max as f64 / original as f64);
        let factor = fields.number("factor")?.or(implied).unwrap_or(1.0);
        // Phi-3.5-MoE states the factors on cos and sin, short and long.
        let (short, long) = (
            fields.number("short_mscale")?,
            fields.number("long_mscale")?,
        );
        if let (Some(short), Some(long)) = (short, long)
            && short != long
        {
            let left = fields.says("short_mscale", short);
            let right = fields.says("long_mscale", long);
            let remedy = "one attention scaling for all lengths is supported: give both";
            return Err(ConfigError::contradiction(left, right, remedy));
        }
        Ok(Scaling::LongRope(LongRopeScaling {
            short_factor: list("short_factor")?,
            long_factor: list("long_factor")?,
            original_max_position_embeddings: original,
            factor,
            attention_factor: fields.number("attention_factor")?.or(short).or(long),
        }))
    }
}

fn read_scaling(
    fields: &Fields,
    context: RopeContext,
    reads_alpha: bool,
) -> Result<Scaling, ConfigError> {
    let scaling = ScalingFields {
        fields,
        context,
        rope_type: rope_type(fields)?,
    };
    Ok(match scaling.rope_type {
        "linear" => Scaling::Linear {
            factor: scaling.number("factor")?,
        },
        "dynamic" => scaling.dynamic(reads_alpha)?,
        "yarn" => scaling.yarn()?,
        "longrope" => scaling.longrope()?,
        "llama3" => Scaling::Llama3(Llama3Scaling {
            factor: scaling.number("factor")?,
            low_freq_factor: scaling.number("low_freq_factor")?,
            high_freq_factor: scaling.number("high_freq_factor")?,
            original_max_position_embeddings: scaling.original()?,
        }),
        "proportional" => Scaling::Proportional {
            partial_rotary_factor: fields.number("partial_rotary_factor")?.unwrap_or(1.0),
            factor: fields.number("factor")?.unwrap_or(1.0),
        },
        _ => Scaling::Default,
    })
}
