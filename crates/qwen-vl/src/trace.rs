//! Activations by name.

use std::collections::BTreeMap;

use burn::backend::ExecutionError;
use burn::tensor::{Tensor, TensorData};

use crate::error::{QwenVlError, Result};

/// Activations that a forward pass records, by the names of `docs/models.md`; nothing unless asked
/// for.
#[derive(Debug, Default)]
pub struct Trace {
    activations: Option<BTreeMap<String, Result<TensorData, ExecutionError>>>,
}

impl Trace {
    /// Records nothing and costs nothing.
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
    ///
    /// # Errors
    /// [`QwenVlError::TensorUnreadable`] if the device did not give it back.
    pub fn get(&self, name: &str) -> Result<Option<&TensorData>> {
        let found = self.activations.as_ref().and_then(|found| found.get(name));
        found
            .map(|found| found.as_ref())
            .transpose()
            .map_err(|error| QwenVlError::TensorUnreadable {
                name: name.to_owned(),
                reason: error.reason().to_owned(),
            })
    }

    /// True if activations are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.activations.is_some()
    }

    /// The recorded names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.activations.iter().flatten().map(|(name, _)| &name[..])
    }

    pub(crate) fn record<const D: usize>(&mut self, name: impl FnOnce() -> String, x: &Tensor<D>) {
        if let Some(activations) = &mut self.activations {
            let copied = x.clone().try_into_data();
            if let Ok(data) = &copied {
                // CubeCL copies on first access, when later operations may have written in place.
                let _ = data.as_bytes();
            }
            activations.insert(name(), copied);
        }
    }
}
