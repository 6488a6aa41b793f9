//! The rotations of a model whose layers rotate differently.

use super::error::ConfigError;
use super::family::{FULL, Family, LINEAR, Pattern, SLIDING, WithoutWindow};
use super::fields::Fields;
use super::rotations::ALL;
use crate::error::Result;
use crate::spec::RotarySpec;

/// Layers that do not attend, and so do not rotate. Dory lists the two halves of a layer, attention
/// and `mlp`, one by one.
const UNROTATED_LAYERS: [&str; 5] = [LINEAR, "mamba", "conv", "recurrent", "mlp"];
/// Full layers that attend only to selected tokens.
const INDEXED: &str = "indexed_attention";
/// The most layers of a model, so that a wrong number is an error rather than gigabytes.
const MAX_LAYERS: usize = 65_536;

/// The named rotations of a model and the rotation of each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpecs {
    specs: Vec<(String, RotarySpec)>,
    layers: Vec<Option<usize>>,
}

impl LayerSpecs {
    pub(super) fn new(specs: Vec<(String, RotarySpec)>, layers: Vec<Option<usize>>) -> Self {
        Self { specs, layers }
    }

    /// The rotations by name. Names are the layer types of the configuration, such as
    /// `sliding_attention` and `full_attention`, or `attention` if all rotating layers are alike.
    pub fn specs(&self) -> impl Iterator<Item = (&str, &RotarySpec)> {
        self.specs.iter().map(|(name, spec)| (&name[..], spec))
    }

    /// The rotation called `name`.
    pub fn named(&self, name: &str) -> Option<&RotarySpec> {
        self.specs()
            .find_map(|(found, spec)| (found == name).then_some(spec))
    }

    /// The number of layers; 0 if the configuration does not state it.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The rotation of layer `layer`; `None` if the layer does not rotate or does not exist.
    pub fn layer(&self, layer: usize) -> Option<&RotarySpec> {
        self.layers
            .get(layer)
            .copied()
            .flatten()
            .map(|spec| &self.specs[spec].1)
    }

    /// Returns the one rotation of all rotating layers.
    ///
    /// # Errors
    /// [`ConfigError::SeveralRotations`] if there is more than one.
    pub fn into_single(mut self) -> Result<RotarySpec> {
        let alike = self.specs.windows(2).all(|pair| pair[0].1 == pair[1].1);
        match self.specs.pop() {
            Some((_, spec)) if alike => Ok(spec),
            last => {
                let names = self
                    .specs
                    .into_iter()
                    .chain(last)
                    .map(|(name, _)| name)
                    .collect();
                Err(ConfigError::SeveralRotations { names }.into())
            }
        }
    }
}

/// For each layer, 1 if its theta is that of the model, and 0 if it is 0 (no rotation).
fn layer_thetas(
    config: &Fields,
    specs: &[(String, RotarySpec)],
) -> Result<Option<Vec<usize>>, ConfigError> {
    let key = "layer_rope_theta";
    let Some(thetas) = config.numbers(key)? else {
        return Ok(None);
    };
    let model_theta = specs
        .first()
        .and_then(|(_, spec)| spec.frequencies().theta());
    let other = |theta: &&f64| **theta != 0.0 && Some(**theta) != model_theta;
    if let Some(theta) = thetas.iter().find(other) {
        let shown = model_theta.unwrap_or_default();
        let (left, right) = (config.says(key, theta), config.says("rope_theta", shown));
        let remedy = "one theta for all layers that rotate is supported: build the others with \
                      RotarySpec::builder";
        return Err(ConfigError::contradiction(left, right, remedy));
    }
    let turns = |theta: &f64| usize::from(*theta != 0.0);
    Ok(Some(thetas.iter().map(turns).collect()))
}

/// For each layer, the index of its rotation among `specs`, or none if it does not rotate. Empty if
/// the configuration does not state the number of layers.
pub(super) fn layers(
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
    let unrotated_types = unrotated_types(family, config)?;
    let lens = [
        (layers_key, count),
        (types_key, types.as_ref().map(Vec::len)),
        ("no_rope_layers", flags.as_ref().map(Vec::len)),
    ];
    expect_equal(config, &lens)?;
    let count = lens.into_iter().find_map(|(_, len)| len);
    let types = match types {
        Some(types) => Some(types),
        None => pattern_types(family, config, count.unwrap_or(0))?,
    };
    let no_rope = match family.no_rope_every {
        Some(every) => Some(interval(config, &["no_rope_layer_interval"], every)?),
        None => None,
    };
    let rotation = |layer: usize| {
        let layer_type = types.as_ref().map(|types| types[layer]);
        let is_unrotated =
            |name: &str| UNROTATED_LAYERS.contains(&name) || unrotated_types.contains(&name);
        // A list of rotating layers overrides the layer types.
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

/// Layer types that do not rotate, besides those of every family.
fn unrotated_types<'a>(family: &Family, config: &Fields<'a>) -> Result<Vec<&'a str>, ConfigError> {
    let mut types = family.unrotated.to_vec();
    let without_window = family.without_window;
    match without_window.filter(|_| config.is_null("sliding_window")) {
        Some(WithoutWindow::All) => types.clear(),
        Some(WithoutWindow::None) => types.push(SLIDING),
        None => {}
    }
    if family.null_is_unrotated
        && let Some(rope) = config.object("rope_parameters")?
    {
        types.extend(rope.keys().filter(|name| rope.get(name).is_none()));
    }
    Ok(types)
}

/// Rejects lists of layers with different lengths. The number of layers comes first in `lens`.
fn expect_equal(config: &Fields, lens: &[(&str, Option<usize>); 3]) -> Result<(), ConfigError> {
    let says = |(key, len): (&str, usize)| match key == lens[0].0 {
        true => config.says(key, len),
        false => config.says(key, format!("a list of {len}")),
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
    Ok(())
}

/// The interval that the configuration states, or the family's default.
fn interval(config: &Fields, keys: &[&str], own: usize) -> Result<usize, ConfigError> {
    match config.first(keys, Fields::size)? {
        Some((key, 0)) => Err(ConfigError::WrongType {
            key: config.path_of(key),
            expected: "a whole number, 1 or more",
            found: "0".to_owned(),
        }),
        stated => Ok(stated.map_or(own, |(_, every)| every)),
    }
}

/// The types of `count` layers, as a family without a list derives them.
fn pattern_types<'a>(
    family: &Family,
    config: &Fields<'a>,
    count: usize,
) -> Result<Option<Vec<&'a str>>, ConfigError> {
    let Some(pattern) = &family.pattern else {
        return Ok(None);
    };
    Ok(Some(match pattern {
        Pattern::Every(full) => {
            let every = interval(config, full.keys, full.every)?;
            let layer_type = |layer| full.layer_type(layer, count, every);
            (0..count).map(layer_type).collect()
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
            let layer_type = |layer| if full.contains(&layer) { FULL } else { LINEAR };
            (0..count).map(layer_type).collect()
        }
        Pattern::Listed(key) if count > 0 => {
            return Err(config.missing(key, "the choice of the layers that rotate"));
        }
        Pattern::Listed(_) => return Ok(None),
    }))
}
