//! Activations by name.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};

/// Activations that a forward pass leaves, by the names of `docs/models.md`; nothing unless asked for.
#[derive(Debug, Default)]
pub struct Trace {
    activations: Option<BTreeMap<String, TensorData>>,
}

impl Trace {
    /// Keeps nothing and costs nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Copies every named activation to the host.
    pub fn recording() -> Self {
        Self {
            activations: Some(BTreeMap::new()),
        }
    }

    /// The activation of that name.
    pub fn get(&self, name: &str) -> Option<&TensorData> {
        self.activations.as_ref()?.get(name)
    }

    /// The names recorded.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.activations.iter().flatten().map(|(name, _)| &name[..])
    }

    pub(crate) fn record<const D: usize>(&mut self, name: impl FnOnce() -> String, x: &Tensor<D>) {
        if let Some(activations) = &mut self.activations {
            activations.insert(name(), x.to_data());
        }
    }
}
