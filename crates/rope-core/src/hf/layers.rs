//! The rotations of a model whose layers do not all rotate alike.

use super::error::ConfigError;
use crate::error::Result;
use crate::spec::RotarySpec;

/// The named rotations of a model and which layer takes which.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpecs {
    specs: Vec<(String, RotarySpec)>,
    layers: Vec<Option<usize>>,
}

impl LayerSpecs {
    pub(super) fn new(specs: Vec<(String, RotarySpec)>, layers: Vec<Option<usize>>) -> Self {
        Self { specs, layers }
    }

    /// The rotations by name: the layer types of the configuration, as `sliding_attention` and
    /// `full_attention`, or `attention` where all rotating layers are alike.
    pub fn specs(&self) -> impl Iterator<Item = (&str, &RotarySpec)> {
        self.specs.iter().map(|(name, spec)| (&name[..], spec))
    }

    /// The rotation of that name.
    pub fn named(&self, name: &str) -> Option<&RotarySpec> {
        self.specs()
            .find_map(|(found, spec)| (found == name).then_some(spec))
    }

    /// The number of layers; 0 where the configuration does not state it.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The rotation of layer `layer`; `None` if it does not rotate, or there is no such layer.
    pub fn of_layer(&self, layer: usize) -> Option<&RotarySpec> {
        self.layers
            .get(layer)
            .copied()
            .flatten()
            .map(|spec| &self.specs[spec].1)
    }

    /// The rotation of all layers that rotate.
    ///
    /// # Errors
    /// [`ConfigError::SeveralRotations`] if there are more than one.
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
