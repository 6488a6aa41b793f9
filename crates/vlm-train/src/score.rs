//! The log-probabilities of given answers, and of the same answers in other ways.

use std::fmt;

use burn::module::Module;
use serde::Serialize;
use vlm_data::text::IGNORED;
use vlm_data::{Cut, MicroBatch, SampleRows, TrainingSample};
use vlm_models::{Backward, GenerateOptions, Trace, Vlm};

use crate::answer::{MOST, Questions, data_error, padded};
use crate::batch::inputs;
use crate::error::Result;
use crate::trainer::Trainer;

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
pub fn score(model: &Vlm, micro: &MicroBatch) -> vlm_models::Result<Vec<Score>> {
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

/// The differences between log-probabilities of the same tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreDifference {
    /// Tokens.
    pub tokens: usize,
    /// Those whose log-probabilities have other bits.
    pub differing: usize,
    /// The largest difference.
    pub largest: f64,
}

impl ScoreDifference {
    fn add(&mut self, one: &[f32], other: &[f32]) {
        for (a, b) in one.iter().zip(other) {
            self.tokens += 1;
            self.differing += usize::from(a.to_bits() != b.to_bits());
            // Of one that is no number, the difference is none either.
            let apart = f64::from((a - b).abs());
            self.largest = if apart > self.largest || apart.is_nan() {
                apart
            } else {
                self.largest
            };
        }
    }
}

impl fmt::Display for ScoreDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tokens,
            differing,
            largest,
        } = self;
        write!(
            f,
            "{differing} of {tokens} tokens differ, by at most {largest:.1e}"
        )
    }
}

/// The differences between the ways in which a run computes the log-probabilities of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SameProof {
    /// Of those that a generator has as it chooses, from caches, to those of given answers.
    pub generated: ScoreDifference,
    /// Of those of given answers, packed, to those of a training step over each answer alone.
    pub trained: ScoreDifference,
}

impl Trainer {
    /// Answers questions greedily, in batches of four, and compares the log-probabilities of the
    /// answers' tokens as they are generated, [scored](score) and trained on, without dropout and an
    /// update.
    ///
    /// # Errors
    /// Those of [`Vlm::generate`], [`score`] and [`Vlm::backward`].
    pub fn prove_same(&self, questions: &Questions) -> Result<SameProof> {
        let (prompts, stop) = questions.prompts();
        let model = self.model.valid();
        let mut proof = SameProof::default();
        for prompts in prompts.chunks(AT_ONCE) {
            let micro = padded(prompts.to_vec())?.padded_left();
            let batch = model.batch(&inputs(&micro, &model.device()))?;
            let options = GenerateOptions {
                count: MOST,
                stop: stop.to_vec(),
                likeliest: Some(0),
                ..GenerateOptions::default()
            };
            let mut generated = vec![Vec::new(); prompts.len()];
            let rows = model.generate_with(&batch, &options, &mut |choice| {
                let log_probability = choice.log_probabilities.map(|of| of.chosen);
                generated[choice.row].extend(log_probability);
            })?;
            let answered = prompts.iter().zip(&rows).zip(generated);
            let answered = answered.filter_map(|((prompt, row), generated)| {
                let (mut sample, row) = (prompt.clone(), questions.before_media(row));
                sample.text.input_ids.extend(row);
                sample.text.labels.extend(row);
                (!row.is_empty()).then_some((sample, generated))
            });
            let (answered, generated): (Vec<TrainingSample>, Vec<_>) = answered.unzip();
            if answered.is_empty() {
                continue;
            }
            let tokens = usize::MAX;
            let packed = MicroBatch::new(answered.clone(), Cut::Packed { tokens });
            let scores = score(&model, &packed.map_err(data_error)?)?;
            for ((score, generated), sample) in scores.iter().zip(&generated).zip(answered) {
                let scored = &score.log_probabilities;
                proof.generated.add(generated, scored);
                proof.trained.add(scored, &self.trained_on(sample)?);
            }
        }
        Ok(proof)
    }

    /// The log-probabilities of a sample's labelled tokens in a step over it alone.
    fn trained_on(&self, sample: TrainingSample) -> Result<Vec<f32>> {
        let micro = padded(vec![sample])?;
        let batch = self.model.batch(&inputs(&micro, &self.model.device()))?;
        let how = Backward {
            recompute: self.recipe.recompute,
            ..Backward::default()
        };
        let mut found = Vec::new();
        let weigh = &mut |losses: &[f32]| {
            found = losses.iter().map(|loss| -loss).collect();
            vec![0.0; losses.len()]
        };
        let (labels, trace) = (&micro.labels, &mut Trace::off());
        self.model
            .backward_weighed(&batch, labels, how, weigh, trace, &mut |_, _| ())?;
        Ok(found)
    }
}

/// Answers in a batch.
const AT_ONCE: usize = 4;
