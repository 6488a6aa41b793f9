//! The log-probabilities of given answers.

use serde::Serialize;
use vlm_data::text::IGNORED;
use vlm_data::{MicroBatch, SampleRows};
use vlm_models::{Vlm, VlmError};

use crate::batch::inputs;

/// The log-probabilities of a sample's labelled tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// The line of the sample in its file.
    pub line: u64,
    /// The labelled tokens, in order.
    pub tokens: Vec<i64>,
    /// The natural logarithm of each one's probability.
    pub log_probabilities: Vec<f32>,
}

impl Score {
    /// The log-probability of all tokens together.
    pub fn sum(&self) -> f64 {
        self.log_probabilities.iter().copied().map(f64::from).sum()
    }
}

/// Computes the log-probabilities of the labelled tokens of a micro-batch, for each of its sequences:
/// the negative losses of [`Vlm::token_losses`]. Call it on a model without autodiff.
///
/// # Errors
/// Those of [`Vlm::batch`] and [`Vlm::token_losses`]; a sequence may have no labelled token.
pub fn score(model: &Vlm, micro: &MicroBatch) -> Result<Vec<Score>, VlmError> {
    let lengths: Vec<usize> = match &micro.rows {
        SampleRows::Packed { cu_seqlens } => {
            let pairs = cu_seqlens.windows(2);
            pairs.map(|pair| pair[1] - pair[0]).collect()
        }
        SampleRows::Padded { rows, .. } => {
            vec![micro.labels.len() / (*rows).max(1); *rows]
        }
    };
    let losses = match micro.trained_tokens {
        0 => Vec::new(),
        _ => {
            let batch = model.batch(&inputs(micro, &model.device()))?;
            model.token_losses(&batch, &micro.labels)?
        }
    };
    let (mut labels, mut losses) = (&micro.labels[..], losses.into_iter());
    let scores = lengths.iter().zip(&micro.lines).map(|(length, line)| {
        let (own, rest) = labels.split_at(*length);
        labels = rest;
        let tokens = own.iter().copied().filter(|label| *label != IGNORED);
        let tokens: Vec<i64> = tokens.collect();
        let log_probabilities = losses.by_ref().take(tokens.len()).map(|loss| -loss);
        Score {
            line: *line,
            log_probabilities: log_probabilities.collect(),
            tokens,
        }
    });
    Ok(scores.collect())
}
