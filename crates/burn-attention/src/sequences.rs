//! The division of tokens into independent sequences.

use std::ops::Range;
use std::sync::Arc;

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

    /// Returns the sequence of each token, unless there is only one.
    pub fn token_sequences(&self) -> Option<&[u32]> {
        self.token_sequences.as_deref()
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
