//! Which kind of file a path is.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::error::GoldenError;
use super::prompts::PromptCases;
use super::tables::FrequencyTables;
use super::vectors::GoldenVectors;

/// A file that holds, or does not hold, something to compare with.
#[derive(Debug)]
pub enum Artifact {
    /// Forward and gradient of one rotary module.
    Vectors(Box<GoldenVectors>),
    /// Frequency tables.
    Tables(FrequencyTables),
    /// Position ids of prompts.
    Prompts(PromptCases),
    /// Something else.
    Other {
        /// What about it says so.
        reason: &'static str,
    },
}

impl Artifact {
    /// Reads a file and decides by its contents; the extension only says how to parse them.
    ///
    /// # Errors
    /// [`GoldenError`] for a file that cannot be read, is truncated, or claims to be golden and is
    /// not complete.
    pub fn open(path: &Path) -> Result<Self, GoldenError> {
        let other = |reason| Ok(Self::Other { reason });
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => {
                let metadata = header_metadata(path)?;
                if !["model_type", "rope_parameters", "rotation"]
                    .iter()
                    .any(|key| metadata.contains_key(*key))
                {
                    return other("its metadata has no model_type, rope_parameters or rotation");
                }
                let vectors = GoldenVectors::read(&std::fs::read(path)?)?;
                Ok(Self::Vectors(Box::new(vectors)))
            }
            Some("json") => {
                let text = std::fs::read_to_string(path)?;
                let value: serde_json::Value =
                    serde_json::from_str(&text).map_err(|error| GoldenError::Json {
                        detail: error.to_string(),
                    })?;
                let case = &value["cases"][0];
                if case.get("rope_parameters").is_some() {
                    Ok(Self::Tables(FrequencyTables::read(value)?))
                } else if case.get("position_ids").is_some() {
                    Ok(Self::Prompts(PromptCases::read(value)?))
                } else {
                    other("no cases with rope_parameters or position_ids in it")
                }
            }
            _ => other("neither .safetensors nor .json"),
        }
    }
}

/// The metadata of a safetensors file, without reading its tensors: a folder may hold whole
/// checkpoints.
fn header_metadata(path: &Path) -> Result<HashMap<String, serde_json::Value>, GoldenError> {
    let broken = |detail: &str| GoldenError::Container {
        detail: detail.to_owned(),
    };
    let mut file = File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)
        .map_err(|_| broken("no header length in it"))?;
    let length = u64::from_le_bytes(length);
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    if (header.len() as u64) < length {
        return Err(broken("the header ends early"));
    }
    let mut header: HashMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|error| broken(&error.to_string()))?;
    Ok(match header.remove("__metadata__") {
        Some(serde_json::Value::Object(metadata)) => metadata.into_iter().collect(),
        _ => HashMap::new(),
    })
}
