//! Frequency tables: `inv_freq_tables.json`.

use rope_core::hf::{RopeContext, RopeParameters};
use serde::Deserialize;

use super::error::GoldenError;
use super::row::Row;
use crate::buffer::DType;
use crate::tolerance::{Operation, allowed};

/// The engine's name in rows of frequencies, where rows of rotations name the engine.
pub(super) const ENGINE: &str = "frequencies";

/// Frequencies and attention scaling of named rope parameters.
#[derive(Clone, Debug, Deserialize)]
pub struct FrequencyTables {
    cases: Vec<Case>,
}

#[derive(Clone, Debug, Deserialize)]
struct Case {
    name: String,
    seq_len: Option<u64>,
    head_dim: usize,
    max_position_embeddings: Option<u64>,
    rope_parameters: serde_json::Value,
    attention_scaling: f64,
    inv_freq_f64: Vec<f64>,
}

impl FrequencyTables {
    pub(super) fn read(json: serde_json::Value) -> Result<Self, GoldenError> {
        serde_json::from_value(json).map_err(|error| GoldenError::Json {
            detail: error.to_string(),
        })
    }

    /// One row per case: its frequencies, then its attention scaling.
    ///
    /// # Errors
    /// [`GoldenError::Rope`] for parameters that make no frequencies.
    pub fn compare(&self) -> Result<Vec<Row>, GoldenError> {
        self.cases.iter().map(Case::compare).collect()
    }
}

impl Case {
    fn compare(&self) -> Result<Row, GoldenError> {
        let context = RopeContext {
            max_position_embeddings: self.max_position_embeddings,
            ..RopeContext::default()
        };
        let parameters = RopeParameters::from_json(&self.rope_parameters.to_string(), context)?;
        let dims = parameters.rotary_dim(self.head_dim)?;
        let frequencies = parameters.frequencies;
        let mut found = frequencies.inv_freq(dims, self.seq_len)?;
        found.push(frequencies.attention_scaling());
        let mut expected = self.inv_freq_f64.clone();
        expected.push(self.attention_scaling);
        let name = match self.seq_len {
            Some(seq_len) => format!("{} @{seq_len}", self.name),
            None => self.name.clone(),
        };
        let last = self.inv_freq_f64.len();
        Ok(Row::compare(
            &name,
            DType::F64.name(),
            ENGINE,
            &found,
            &expected,
            |_, expected| allowed(Operation::Frequency, DType::F64, expected),
            |i| {
                if i == last {
                    "attention_scaling".to_owned()
                } else {
                    format!("inv_freq[{i}]")
                }
            },
        ))
    }
}
