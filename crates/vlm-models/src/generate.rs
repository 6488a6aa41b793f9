//! Continues prompts with a cache of keys and values.

use std::collections::HashSet;
use std::path::Path;

use burn::backend::ExecutionError;
use burn::tensor::{Int, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, CrossEntropy, MaskRules};
use rope_core::Positions;
use serde_json::Value;

use crate::batch::Batch;
use crate::error::{Result, VlmError};
use crate::file;
use crate::layers::LayerCache;
use crate::model::Vlm;
use crate::random::Stream;
use crate::step::Common;
use crate::tensors::{indices, ints};
use crate::trace::Trace;

/// Keys and values of the tokens so far, and the position ids of the next tokens.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// For each cached token of each row, true unless it is padding.
    attended: Vec<Vec<bool>>,
    /// The next position id of each row.
    next: Vec<i64>,
}

impl KvCache {
    /// True if a row has more tokens than a window.
    fn exceeds(&self, window: usize) -> bool {
        self.attended.first().is_some_and(|row| row.len() > window)
    }

    /// Attention of the last token of each row to all its tokens, or to as many as a window has.
    /// Padding, which may stand between them, is neither seen nor counted.
    fn attention(&self, window: Option<usize>) -> Result<Attention> {
        let mut attended = self.attended.clone();
        for row in &mut attended {
            let tokens = row.iter_mut().rev().filter(|token| **token);
            tokens
                .skip(window.unwrap_or(usize::MAX))
                .for_each(|token| *token = false);
        }
        let (rows, attended) = (attended.len(), attended.concat());
        let rules = MaskRules {
            attended: Some(&attended),
            ..Default::default()
        };
        let mask = AttentionMask::new(&rules, rows, 1, attended.len() / rows.max(1))?;
        Ok(Attention::new(mask))
    }
}

impl Vlm {
    /// Processes a prompt. Returns the logits of each row's first new token, `[rows, vocab_size]`,
    /// and the cache.
    ///
    /// # Errors
    /// [`VlmError::NotContinuable`] for packed sequences or rows of padding only; those of
    /// [`forward`](Self::forward).
    pub fn prefill(&self, batch: &Batch) -> Result<(Tensor<2>, KvCache)> {
        let (hidden, cache) = self.prefill_hidden(batch)?;
        Ok((self.logits(hidden), cache))
    }

    /// As [`prefill`](Self::prefill), up to the hidden states of each row's last token.
    fn prefill_hidden(&self, batch: &Batch) -> Result<(Tensor<2>, KvCache)> {
        if batch.packed {
            let reason = "the sequences are packed";
            return Err(VlmError::NotContinuable { reason });
        }
        let last = batch.last_tokens()?;
        let next = (0..batch.sequences.len())
            .map(|row| {
                let first = batch.position_ids().continuation(row, 1)?;
                Ok(i64::from(first.axis(0)?[0]))
            })
            .collect::<Result<Vec<i64>>>()?;

        let mut layers = vec![None; self.language_model.depth()];
        let hidden = self.hidden(batch, None, &mut layers, &mut Trace::off())?;
        let [rows, seq, channels] = hidden.dims();
        let last = indices(last, &hidden.device());
        let hidden = hidden.reshape([rows * seq, channels]).select(0, last);
        let row_attended = |row: &std::ops::Range<usize>| batch.attended[row.clone()].to_vec();
        let cache = KvCache {
            layers,
            attended: batch.sequences.iter().map(row_attended).collect(),
            next,
        };
        Ok((hidden, cache))
    }

    /// Processes one more token in each row and returns the logits of the next, `[rows,
    /// vocab_size]`.
    ///
    /// # Errors
    /// [`VlmError::Token`]; [`VlmError::NotContinuable`] unless there is one token per row of the
    /// cache.
    pub fn decode(&self, tokens: &[i64], cache: &mut KvCache) -> Result<Tensor<2>> {
        Ok(self.logits(self.decode_hidden(tokens, cache)?))
    }

    /// As [`decode`](Self::decode), up to the hidden states.
    fn decode_hidden(&self, tokens: &[i64], cache: &mut KvCache) -> Result<Tensor<2>> {
        let rows = cache.next.len();
        if tokens.len() != rows {
            let reason = "there is not one token for each row of the cache";
            return Err(VlmError::NotContinuable { reason });
        }
        self.expect_tokens(tokens.iter().copied().enumerate())?;
        let device = self.device();
        let axes = self.language_model.axes();
        let positions = Positions::new(axes, &cache.next.repeat(axes))?;
        let angles = self.language_model.angles(&positions, &device)?;
        for (attended, next) in cache.attended.iter_mut().zip(&mut cache.next) {
            attended.push(true);
            *next += 1;
        }
        let attention = cache.attention(None)?;
        let window = self
            .language_model
            .window
            .filter(|tokens| cache.exceeds(*tokens));
        let window = window.map(|tokens| cache.attention(Some(tokens)));
        let window = window.transpose()?;
        let input_ids = ints(tokens.iter().copied(), &device).reshape([rows, 1]);
        let words = self.language_model.embed_tokens.forward(input_ids);
        let common = Common {
            angles: &angles,
            attention: &attention,
            window: window.as_ref(),
            recurrence: None,
            draw: None,
            attended: None,
            part: None,
            balance: None,
        };
        let (caches, mut trace) = (&mut cache.layers, Trace::off());
        let hidden = self
            .language_model
            .forward(words, common, None, caches, &mut trace)?;
        Ok(hidden.squeeze_dim::<2>(1))
    }

    /// Continues each row with its most likely tokens, up to `count` tokens or a token in `stop`,
    /// which ends the row.
    ///
    /// Call it on [`valid()`](burn::module::Module::valid), so that nothing is kept for a backward
    /// pass.
    ///
    /// # Errors
    /// Those of [`generate_with`](Self::generate_with).
    pub fn generate(&self, batch: &Batch, count: usize, stop: &[i64]) -> Result<Vec<Vec<i64>>> {
        let options = GenerateOptions {
            count,
            stop: stop.to_vec(),
            ..GenerateOptions::default()
        };
        self.generate_with(batch, &options, &mut |_| ())
    }

    /// Continues each row and calls `each` with each token as soon as it is chosen.
    /// Rows are independent: each gets the same tokens as it would alone, unless rounding changes
    /// the order of their probabilities.
    ///
    /// # Errors
    /// Those of [`prefill`](Self::prefill); [`VlmError::Unsupported`] if an option is out of range;
    /// [`VlmError::Logits`], [`VlmError::TensorUnreadable`].
    pub fn generate_with(
        &self,
        batch: &Batch,
        options: &GenerateOptions,
        each: &mut dyn FnMut(Choice),
    ) -> Result<Vec<Vec<i64>>> {
        options.check()?;
        let model = self.for_pass(false);
        let (mut hidden, mut cache) = model.prefill_hidden(batch)?;
        let mut rows = vec![Vec::new(); batch.sequences.len()];
        let mut seen = vec![HashSet::new(); rows.len()];
        if options.repetition_penalty != 1.0 {
            let ids = integers(batch.input_ids.clone(), "input_ids")?;
            for (seen, row) in seen.iter_mut().zip(&batch.sequences) {
                let tokens = row.clone().filter(|token| batch.attended[*token]);
                seen.extend(tokens.map(|token| ids[token]));
            }
        }
        let ended = |row: &Vec<i64>| row.last().is_some_and(|last| options.stop.contains(last));
        for step in 0..options.count {
            let logits = model.logits(hidden.clone());
            let tokens = options.choose(logits.clone(), &seen, step)?;
            let mut log_probabilities = match options.likeliest {
                Some(count) => model.log_probabilities(hidden, logits, &tokens, count)?,
                None => Vec::new(),
            }
            .into_iter();
            for (row, token) in tokens.iter().copied().enumerate() {
                let log_probabilities = log_probabilities.next();
                if !ended(&rows[row]) {
                    rows[row].push(token);
                    seen[row].insert(token);
                    each(Choice {
                        row,
                        token,
                        log_probabilities,
                    });
                }
            }
            if step + 1 == options.count || rows.iter().all(ended) {
                break;
            }
            hidden = model.decode_hidden(&tokens, &mut cache)?;
        }
        Ok(rows)
    }

    /// The log-probabilities of the next tokens, from hidden states and logits. Those of the chosen
    /// ones are computed as losses are.
    fn log_probabilities(
        &self,
        hidden: Tensor<2>,
        logits: Tensor<2>,
        tokens: &[i64],
        count: usize,
    ) -> Result<Vec<LogProbabilities>> {
        let losses = CrossEntropy::new(tokens, self.vocab_size)?;
        let losses = floats(losses.by_row(hidden, self.head())?)?;
        let [_, vocabulary] = logits.dims();
        let logits: Vec<f64> = match count {
            0 => Vec::new(),
            _ => floats(logits)?.iter::<f64>().collect(),
        };
        let mut rows = logits.chunks(vocabulary.max(1));
        let of_row = |loss: f32| LogProbabilities {
            chosen: -loss,
            likeliest: rows
                .next()
                .map_or_else(Vec::new, |row| likeliest(row, count)),
        };
        Ok(losses.iter::<f32>().map(of_row).collect())
    }
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The row that it continues.
    pub row: usize,
    /// The token.
    pub token: i64,
    /// Its log-probability and those of others, if [`GenerateOptions::likeliest`] asks for them.
    pub log_probabilities: Option<LogProbabilities>,
}

/// Natural logarithms of a model's probabilities, before temperature and penalty.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// Of the chosen token, computed as [`Vlm::token_losses`].
    pub chosen: f32,
    /// The likeliest tokens with theirs, from the likeliest on.
    pub likeliest: Vec<(i64, f32)>,
}

/// The likeliest tokens and their log-probabilities.
fn likeliest(logits: &[f64], count: usize) -> Vec<(i64, f32)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, likelier);
        order.truncate(count);
    }
    order.sort_unstable_by(likelier);
    let most = order.first().map_or(0.0, |first| logits[*first]);
    let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
    let of = |token: usize| (token as i64, (logits[token] - most - sum.ln()) as f32);
    order.into_iter().map(of).collect()
}

/// Options of [`Vlm::generate_with`].
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The limit of new tokens per row.
    pub count: usize,
    /// Tokens that end a row. They are part of the result.
    pub stop: Vec<i64>,
    /// The repetition penalty: of tokens already in the row, positive logits are divided by it and
    /// others multiplied; 1 has no effect.
    pub repetition_penalty: f64,
    /// Sampling of tokens; `None` takes the most likely token.
    pub sampling: Option<Sampling>,
    /// The number of likeliest tokens whose log-probabilities are given beside that of each chosen
    /// one; `None` gives none.
    pub likeliest: Option<usize>,
}

/// The parameters of sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits, finite and above 0.
    pub temperature: f64,
    /// The number of most likely tokens to sample from; `None` means all.
    pub top_k: Option<usize>,
    /// The probability mass of the most likely tokens to sample from, above 0; 1 means all tokens.
    pub top_p: f64,
    /// The seed of the random numbers.
    pub seed: u64,
    /// A number per row that, with the seed, determines its random numbers, so that a row draws the
    /// same tokens in any batch; rows without one use their index.
    pub rows: Vec<u64>,
}

impl Default for GenerateOptions {
    /// Takes the most likely tokens, at most 256.
    fn default() -> Self {
        Self {
            count: 256,
            stop: Vec::new(),
            repetition_penalty: 1.0,
            sampling: None,
            likeliest: None,
        }
    }
}

impl GenerateOptions {
    /// # Errors
    /// [`VlmError::Unsupported`]
    fn check(&self) -> Result<()> {
        let mut numbers = vec![("repetition_penalty", self.repetition_penalty, f64::MAX)];
        if let Some(sampling) = &self.sampling {
            numbers.push(("temperature", sampling.temperature, f64::MAX));
            numbers.push(("top_p", sampling.top_p, 1.0));
            let top_k = sampling.top_k.map_or(1.0, |top_k| top_k as f64);
            numbers.push(("top_k", top_k, f64::MAX));
        }
        let is_wrong = |(_, number, most): &&(_, f64, f64)| !(*number > 0.0 && number <= most);
        match numbers.iter().find(is_wrong) {
            None => Ok(()),
            Some((key, found, _)) => Err(VlmError::Unsupported {
                key,
                found: found.to_string(),
                expected: "a finite number above 0, of top_p at most 1",
            }),
        }
    }

    /// The next token of each row.
    fn choose(&self, logits: Tensor<2>, seen: &[HashSet<i64>], step: usize) -> Result<Vec<i64>> {
        if self.sampling.is_none() && self.repetition_penalty == 1.0 {
            let (largest, tokens) = logits.max_dim_with_indices(1);
            let largest: Vec<f64> = floats(largest)?.iter::<f64>().collect();
            if let Some(row) = largest.iter().position(|logit| !logit.is_finite()) {
                return Err(VlmError::Logits { row, step });
            }
            return integers(tokens, "tokens");
        }
        let [_, vocabulary] = logits.dims();
        let logits: Vec<f64> = floats(logits)?.iter::<f64>().collect();
        let rows = logits.chunks(vocabulary.max(1)).zip(seen).enumerate();
        rows.map(|(row, (logits, seen))| {
            let mut logits = logits.to_vec();
            for token in seen {
                let logit = &mut logits[*token as usize];
                let penalty = self.repetition_penalty;
                *logit = if *logit > 0.0 {
                    *logit / penalty
                } else {
                    *logit * penalty
                };
            }
            if logits
                .iter()
                .any(|logit| logit.is_nan() || *logit == f64::INFINITY)
            {
                return Err(VlmError::Logits { row, step });
            }
            Ok(match &self.sampling {
                Some(sampling) => sampling.draw(&logits, row, step),
                None => largest(&logits),
            })
        })
        .collect()
    }
}

impl Sampling {
    /// Draws a token.
    fn draw(&self, logits: &[f64], row: usize, step: usize) -> i64 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Equal logits by index, so that the order is unique.
        order.sort_by(|left, right| {
            logits[*right]
                .total_cmp(&logits[*left])
                .then(left.cmp(right))
        });
        order.truncate(self.top_k.unwrap_or(usize::MAX));
        let first = logits[order[0]];
        let weight = |token: &usize| ((logits[*token] - first) / self.temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        let (mut kept, mut sum) = (0, 0.0);
        while kept < weights.len() && (kept == 0 || sum < self.top_p * all) {
            sum += weights[kept];
            kept += 1;
        }
        let part = self.rows.get(row).copied().unwrap_or(row as u64);
        let mut left = Stream::new(self.seed).part(part).unit(step) * sum;
        let chosen = weights[..kept].iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave no token chosen.
        order[chosen.unwrap_or(kept - 1)] as i64
    }
}

/// The index of the largest logit; the first if several are equal.
fn largest(logits: &[f64]) -> i64 {
    let better = |best: usize, next: usize| {
        if logits[next] > logits[best] {
            next
        } else {
            best
        }
    };
    (0..logits.len()).reduce(better).unwrap_or(0) as i64
}

fn floats<const D: usize>(x: Tensor<D>) -> Result<TensorData> {
    x.try_into_data().map_err(unreadable("logits"))
}

fn integers<const D: usize>(x: Tensor<D, Int>, name: &str) -> Result<Vec<i64>> {
    let data = x.try_into_data().map_err(unreadable(name))?;
    Ok(data.iter::<i64>().collect())
}

fn unreadable(name: &str) -> impl FnOnce(ExecutionError) -> VlmError {
    let name = name.to_owned();
    move |error| VlmError::TensorUnreadable {
        name,
        reason: error.to_string(),
    }
}

/// The generation settings of a checkpoint folder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end an answer.
    pub stop: Vec<i64>,
    /// See [`GenerateOptions::repetition_penalty`].
    pub repetition_penalty: Option<f64>,
    /// Keys that change greedy generation in transformers but are ignored here.
    pub ignored: Vec<String>,
}

/// Keys that change greedy generation, with the values other than null that have no effect.
const IGNORED: [(&str, &str); 15] = [
    ("num_beams", "1"),
    ("no_repeat_ngram_size", "0"),
    ("encoder_no_repeat_ngram_size", "0"),
    ("encoder_repetition_penalty", "1.0"),
    ("min_length", "0"),
    ("min_new_tokens", "0"),
    ("bad_words_ids", "[]"),
    ("suppress_tokens", "[]"),
    ("begin_suppress_tokens", "[]"),
    ("forced_bos_token_id", "null"),
    ("forced_eos_token_id", "null"),
    ("sequence_bias", "null"),
    ("stop_strings", "[]"),
    ("exponential_decay_length_penalty", "null"),
    ("guidance_scale", "1.0"),
];

impl GenerationConfig {
    /// Reads `generation_config.json`, or if it does not exist, the stop tokens of `config.json`.
    ///
    /// # Errors
    /// [`VlmError::File`]; [`VlmError::Config`] if the text is not JSON, or a token is not a
    /// number.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        const FILES: [&str; 2] = ["generation_config.json", "config.json"];
        let folder = folder.as_ref();
        let own = folder.join(FILES[0]).exists();
        let part = FILES[usize::from(!own)];
        let failed = |detail: String| VlmError::Config { part, detail };
        let text = file::text(&folder.join(part))?;
        let config: Value = serde_json::from_str(&text).map_err(|e| failed(e.to_string()))?;
        let nested = config.get("text_config").unwrap_or(&Value::Null);
        let eos = config.get("eos_token_id").filter(|eos| !eos.is_null());
        let eos = eos.or_else(|| nested.get("eos_token_id"));
        let stop: Vec<&Value> = match eos {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(tokens)) => tokens.iter().collect(),
            Some(token) => vec![token],
        };
        let token = |token: &Value| {
            let wrong = || failed(format!("eos_token_id is {token}, expected tokens"));
            token.as_i64().ok_or_else(wrong)
        };
        let differs = |(key, none): &&(&str, &str)| {
            let found = config.get(*key).filter(|found| !found.is_null());
            found
                .map(Value::to_string)
                .is_some_and(|found| found != *none)
        };
        Ok(Self {
            stop: stop.into_iter().map(token).collect::<Result<_>>()?,
            repetition_penalty: config.get("repetition_penalty").and_then(Value::as_f64),
            ignored: IGNORED
                .iter()
                .filter(differs)
                .map(|(key, _)| (*key).to_owned())
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: Option<usize>, top_p: f64) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: 3,
            rows: vec![7],
        }
    }

    /// How often each token is drawn.
    fn shares(sampling: &Sampling, logits: &[f64]) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for step in 0..DRAWS {
            counts[sampling.draw(logits, 0, step) as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        let logits = [0.1_f64, 0.4, 0.2, 0.3].map(f64::ln);
        for (drawn, expected) in [
            (sampling(1.0, None, 1.0), [0.1, 0.4, 0.2, 0.3]),
            (
                sampling(1.0, Some(2), 1.0),
                [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
            ),
            (sampling(1.0, None, 0.65), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]),
            (
                sampling(1.0, None, 0.71),
                [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0],
            ),
            (
                sampling(0.5, None, 1.0),
                [1.0, 16.0, 4.0, 9.0].map(|x| x / 30.0),
            ),
            (sampling(1e-6, None, 1.0), [0.0, 1.0, 0.0, 0.0]),
        ] {
            let found = shares(&drawn, &logits);
            let near = found.iter().zip(expected).all(|(found, expected)| {
                (found - expected).abs() < 0.012 && (expected > 0.0 || *found == 0.0)
            });
            assert!(near, "{drawn:?}: {found:?}");
        }
    }

    #[test]
    fn draws_depend_on_seed_and_row_alone() {
        let logits = [0.0; 50];
        let first = sampling(1.0, None, 1.0);
        let drawn = |sampling: &Sampling, row| -> Vec<i64> {
            (0..20)
                .map(|step| sampling.draw(&logits, row, step))
                .collect()
        };
        let elsewhere = Sampling {
            rows: vec![1, 7],
            ..first.clone()
        };
        assert_eq!(drawn(&first, 0), drawn(&elsewhere, 1));
        assert_ne!(drawn(&first, 0), drawn(&elsewhere, 0));
        let other = Sampling {
            seed: 4,
            ..first.clone()
        };
        assert_ne!(drawn(&first, 0), drawn(&other, 0));
    }
}
