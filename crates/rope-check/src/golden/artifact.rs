//! The kind of file at a path.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use plain_files::{Cause, FileError};

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
        /// The reason why it is none of these.
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
        match plain_files::open(path) {
            Err(FileError {
                cause: Cause::Irregular,
                ..
            }) => return other("it is not a regular file"),
            opened => opened?,
        };
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => {
                if !is_claimed(&header(path)?) {
                    return other(
                        "its metadata has no model_type, rope_parameters or rotation, and none of \
                         its tensors is q_out, k_out or head_frequencies",
                    );
                }
                let vectors = GoldenVectors::read(&plain_files::read(path, MAX_BYTES)?)?;
                Ok(Self::Vectors(Box::new(vectors)))
            }
            Some("json") => {
                let text = plain_files::read_text(path, MAX_BYTES)?;
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
            _ => other("expected .safetensors or .json"),
        }
    }
}

/// True if a header is that of golden vectors, be they complete or not: what is passed over has to
/// be something else.
fn is_claimed(header: &HashMap<String, serde_json::Value>) -> bool {
    let stated = ["model_type", "rope_parameters", "rotation"];
    let metadata = header.get("__metadata__");
    let held = ["q_out", "k_out", "head_frequencies"];
    let is_held = |name: &String| {
        let stem = name.split_once('.').map_or(&name[..], |(stem, _)| stem);
        held.contains(&stem)
    };
    metadata.is_some_and(|metadata| stated.iter().any(|key| metadata.get(key).is_some()))
        || header.keys().any(is_held)
}

/// The size limit of a file that is read whole.
pub(crate) const MAX_BYTES: u64 = 64 << 30;

/// Longest header that is read: the safetensors library's own limit.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// The header of a safetensors file, without reading its tensors: a folder may hold whole
/// checkpoints.
fn header(path: &Path) -> Result<HashMap<String, serde_json::Value>, GoldenError> {
    let broken = |detail: &str| GoldenError::Container {
        detail: detail.to_owned(),
    };
    let mut file = plain_files::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)
        .map_err(|_| broken("no header length in it"))?;
    let length = u64::from_le_bytes(length);
    if length > MOST_HEADER_BYTES {
        let detail = format!("a header of {length} bytes, expected {MOST_HEADER_BYTES} at most");
        return Err(broken(&detail));
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    if (header.len() as u64) < length {
        return Err(broken("the header ends early"));
    }
    serde_json::from_slice(&header).map_err(|error| broken(&error.to_string()))
}
