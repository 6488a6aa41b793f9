//! The file of a trained model.

use std::path::Path;

use burn_store::{ModuleSnapshot, SafetensorsStore};
use plain_files::FileError;
use safetensors::SafeTensors;
use serde::Serialize;
use serde_json::Value;

use crate::Trainer;

/// More than the model of any run takes.
const MOST_BYTES: u64 = 1 << 28;
/// An option that every run has.
const OPTION: &str = "rotary";

impl Trainer {
    /// Writes the model, with the options of the run beside its weights.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path, options: &impl Serialize) -> Result<(), FileError> {
        let mut store = SafetensorsStore::from_file(path).overwrite(true);
        if let Ok(Value::Object(options)) = serde_json::to_value(options) {
            for (option, value) in options {
                store = store.metadata(option, value.to_string());
            }
        }
        let saved = self.model().save_into(&mut store);
        saved.map_err(FileError::during("write", path))?;
        plain_files::share(path)
    }
}

/// True for a model that [`Trainer::save`] has written, by the options in its file.
pub fn is_model(path: &Path) -> bool {
    let Ok(bytes) = plain_files::read(path, MOST_BYTES) else {
        return false;
    };
    let header = SafeTensors::read_metadata(&bytes);
    let options = header
        .ok()
        .and_then(|(_, header)| header.metadata().clone());
    options.is_some_and(|options| options.contains_key(OPTION))
}
