//! Continues prompts with a cache of keys and values.

use burn::tensor::Tensor;
use burn_attention::{Attention, AttentionMask, MaskRules};
use rope_core::Positions;

use crate::batch::{Batch, ints};
use crate::decoder::LayerCache;
use crate::error::{QwenVlError, Result};
use crate::layers::Common;
use crate::model::QwenVl;
use crate::trace::Trace;

/// Keys and values of the tokens so far, and the position ids of the next ones.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// For each row, whether each cached token is attended to: padding is not.
    attended: Vec<Vec<bool>>,
    /// The next position id of each row.
    next: Vec<i64>,
}

impl QwenVl {
    /// Reads a prompt: the logits of each row's first new token, `[rows, vocab_size]`, and the
    /// cache to continue with.
    ///
    /// # Errors
    /// [`QwenVlError::NotContinuable`] for packed sequences or rows that are all padding; those of
    /// [`forward`](Self::forward).
    pub fn prefill(&self, batch: &Batch) -> Result<(Tensor<2>, KvCache)> {
        if batch.packed {
            let reason = "the sequences are packed";
            return Err(QwenVlError::NotContinuable { reason });
        }
        let last = batch.sequences.iter().map(|row| {
            let last = row.clone().rev().find(|token| batch.attended[*token]);
            let reason = "a row is all padding";
            Ok(last.ok_or(QwenVlError::NotContinuable { reason })? as i64)
        });
        let last = last.collect::<Result<Vec<i64>>>()?;
        let next = (0..batch.sequences.len())
            .map(|row| {
                let first = batch.position_ids().continuation(row, 1)?;
                Ok(i64::from(first.axis(0)?[0]))
            })
            .collect::<Result<Vec<i64>>>()?;

        let mut layers = vec![None; self.language_model.depth()];
        let hidden = self.hidden(batch, None, &mut layers, &mut Trace::off())?;
        let [rows, seq, channels] = hidden.dims();
        let last = ints(last.into_iter(), &hidden.device());
        let hidden = hidden.reshape([rows * seq, channels]).select(0, last);
        let row_attended = |row: &std::ops::Range<usize>| batch.attended[row.clone()].to_vec();
        let cache = KvCache {
            layers,
            attended: batch.sequences.iter().map(row_attended).collect(),
            next,
        };
        Ok((self.logits(hidden), cache))
    }

    /// Reads one more token in each row: the logits of its successor, `[rows, vocab_size]`.
    ///
    /// # Errors
    /// [`QwenVlError::Token`]; [`QwenVlError::NotContinuable`] if there is not one token per row of
    /// the cache.
    pub fn decode(&self, tokens: &[i64], cache: &mut KvCache) -> Result<Tensor<2>> {
        let rows = cache.next.len();
        if tokens.len() != rows {
            let reason = "there is not one token for each row of the cache";
            return Err(QwenVlError::NotContinuable { reason });
        }
        self.expect_tokens(tokens.iter().copied().enumerate())?;
        let device = self.device();
        let axes = 3;
        let positions = Positions::new(axes, &cache.next.repeat(axes))?;
        let angles = self.language_model.angles(&positions, &device)?;
        for (attended, next) in cache.attended.iter_mut().zip(&mut cache.next) {
            attended.push(true);
            *next += 1;
        }
        // The new token of each row attends to all keys except padding.
        let attended = cache.attended.concat();
        let rules = MaskRules {
            attended: Some(&attended),
            ..Default::default()
        };
        let mask = AttentionMask::new(&rules, rows, 1, attended.len() / rows.max(1))?;
        let input_ids = ints(tokens.iter().copied(), &device).reshape([rows, 1]);
        let words = self.language_model.embed_tokens.forward(input_ids);
        let common = Common {
            angles: &angles,
            attention: &Attention::new(mask),
            draw: None,
        };
        let (caches, mut trace) = (&mut cache.layers, Trace::off());
        let hidden = self
            .language_model
            .forward(words, common, None, caches, &mut trace)?;
        Ok(self.logits(hidden.squeeze_dim::<2>(1)))
    }

    /// Continues each row with its most likely tokens, up to `count` of them or one of `stop`,
    /// which ends the row.
    ///
    /// Call it on [`valid()`](burn::module::Module::valid), so that nothing is kept for a backward
    /// pass.
    ///
    /// # Errors
    /// Those of [`prefill`](Self::prefill).
    pub fn generate(&self, batch: &Batch, count: usize, stop: &[i64]) -> Result<Vec<Vec<i64>>> {
        let (mut logits, mut cache) = self.prefill(batch)?;
        let mut rows = vec![Vec::new(); batch.sequences.len()];
        let ended = |row: &Vec<i64>| row.last().is_some_and(|last| stop.contains(last));
        for step in 0..count {
            let tokens: Vec<i64> = logits.argmax(1).into_data().iter::<i64>().collect();
            for (row, token) in rows.iter_mut().zip(&tokens) {
                if !ended(row) {
                    row.push(*token);
                }
            }
            if step + 1 == count || rows.iter().all(ended) {
                break;
            }
            logits = self.decode(&tokens, &mut cache)?;
        }
        Ok(rows)
    }
}
