//! The division of tokens into independent sequences.

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "remote")]
use burn_fused::{Reader, Writer};

use crate::error::{AttentionError, Result};

/// The division of each row's tokens into sequences. Build it once per step for all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences {
    tokens: usize,
    /// The sequence of each token, unless there is only one.
    token_sequences: Option<Arc<[u32]>>,
}

impl Sequences {
    /// Creates rows of `tokens` tokens with one sequence each.
    pub fn whole(tokens: usize) -> Self {
        Self {
            tokens,
            token_sequences: None,
        }
    }

    /// Creates rows of packed sequences from the index of each first token, then the number of
    /// tokens.
    ///
    /// # Errors
    /// [`AttentionError::CuSeqlens`]
    pub fn packed(cu_seqlens: &[usize], tokens: usize) -> Result<Self> {
        let sequences = ranges(cu_seqlens, tokens)?.filter(|range| !range.is_empty());
        let token_sequences: Arc<[u32]> = (0..)
            .zip(sequences)
            .flat_map(|(sequence, range)| std::iter::repeat_n(sequence, range.len()))
            .collect();
        let divides = token_sequences.last().is_some_and(|last| *last > 0);
        Ok(Self {
            tokens,
            token_sequences: divides.then_some(token_sequences),
        })
    }

    /// Returns the number of tokens per row.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the index of each sequence's first token.
    pub fn starts(&self) -> Vec<usize> {
        let sequences = self.token_sequences.as_deref().unwrap_or_default();
        let begins = (1..sequences.len()).filter(|token| sequences[*token] != sequences[token - 1]);
        std::iter::once(0).chain(begins).collect()
    }

    /// The sequence of each token, unless there is only one.
    pub(crate) fn token_sequences(&self) -> Option<&[u32]> {
        self.token_sequences.as_deref()
    }
}

/// On the wire: the number of sequences after the first, and the index of each one's first token.
#[cfg(feature = "remote")]
impl Sequences {
    pub(crate) fn write(&self, numbers: &mut Writer) {
        let starts = self.starts();
        numbers.size(starts.len() - 1);
        starts[1..].iter().for_each(|start| numbers.size(*start));
    }

    /// Reads those of an operation whose first tensor is `[batch, tokens, ..]`.
    pub(crate) fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let first = numbers.shapes().first();
        let tokens = first.and_then(|shape| shape.get(1).copied()).unwrap_or(0);
        // A tensor without elements may state any number of tokens.
        let is_empty = first.is_none_or(|shape| shape.contains(&0));
        let most = if is_empty { 0 } else { tokens };
        let count = numbers.size("the sequences after the first", most)?;
        if count == 0 {
            return Ok(Self::whole(tokens));
        }
        let mut cu_seqlens = vec![0];
        for _ in 0..count {
            cu_seqlens.push(numbers.size("the first token of a sequence", tokens)?);
        }
        cu_seqlens.push(tokens);
        Self::packed(&cu_seqlens, tokens)
    }
}

/// The tokens of each sequence.
///
/// # Errors
/// [`AttentionError::CuSeqlens`]
pub(crate) fn ranges(
    cu_seqlens: &[usize],
    tokens: usize,
) -> Result<impl Iterator<Item = Range<usize>>> {
    let wrong = |index: usize, expected: String| AttentionError::CuSeqlens {
        index,
        expected,
        found: cu_seqlens
            .get(index)
            .map_or("missing".into(), usize::to_string),
    };
    if cu_seqlens.first() != Some(&0) {
        return Err(wrong(0, "0".into()));
    }
    let falls = cu_seqlens.windows(2).position(|pair| pair[0] > pair[1]);
    if let Some(index) = falls {
        return Err(wrong(index + 1, format!("at least {}", cu_seqlens[index])));
    }
    if cu_seqlens.last() != Some(&tokens) {
        return Err(wrong(cu_seqlens.len() - 1, tokens.to_string()));
    }
    Ok(cu_seqlens.windows(2).map(|pair| pair[0]..pair[1]))
}
