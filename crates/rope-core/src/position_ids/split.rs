//! Sequences packed into one buffer, and their split over context-parallel ranks.

use std::ops::Range;

use super::error::PositionIdsError;
use crate::error::Result;

/// The sequences of a packed buffer.
pub(super) fn sequences(
    cu_seqlens: &[usize],
    tokens: usize,
) -> Result<Vec<Range<usize>>, PositionIdsError> {
    let valid = cu_seqlens.first() == Some(&0)
        && cu_seqlens.last() == Some(&tokens)
        && cu_seqlens.is_sorted();
    if !valid {
        return Err(PositionIdsError::CuSeqlens {
            cu_seqlens: cu_seqlens.to_vec(),
            tokens,
        });
    }
    Ok(cu_seqlens.windows(2).map(|ends| ends[0]..ends[1]).collect())
}

/// An empty list with room for `count` entries.
///
/// # Errors
/// [`PositionIdsError::TooMany`] if they do not fit into memory.
pub(crate) fn reserved<T>(what: &'static str, count: usize) -> Result<Vec<T>, PositionIdsError> {
    let mut list = Vec::new();
    let found = count;
    list.try_reserve_exact(count)
        .map_err(|_| PositionIdsError::TooMany { what, found })?;
    Ok(list)
}

/// Returns the tokens of a packed buffer in the shard of rank `rank` of `ranks`, in shard order.
///
/// Each sequence is cut into `2 * ranks` chunks; a rank holds the chunks `rank` and `2 * ranks - 1
/// - rank`, so that causal attention costs every rank the same. A single rank holds all tokens, and
///   its sequences may have any length. One row of a batch is the packing `[0, len]`.
///
/// # Errors
/// [`PositionIdsError::Zigzag`] if a sequence does not divide into the chunks,
/// [`PositionIdsError::Index`] if there is no such rank, [`PositionIdsError::CuSeqlens`] if the
/// lengths do not describe a packing, [`PositionIdsError::TooMany`] if the result does not fit into
/// memory.
///
/// # Examples
/// ```
/// use rope_core::position_ids::zigzag;
///
/// assert_eq!(zigzag(&[0, 8], 2, 0)?, [0, 1, 6, 7]);
/// assert_eq!(zigzag(&[0, 8], 2, 1)?, [2, 3, 4, 5]);
/// assert_eq!(zigzag(&[0, 5], 1, 0)?, [0, 1, 2, 3, 4]);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
///
/// # Source
/// Megatron-LM, `get_batch_on_this_cp_rank`; Brandon et al. 2023 (striped attention),
/// <https://arxiv.org/abs/2311.09431>
pub fn zigzag(cu_seqlens: &[usize], ranks: usize, rank: usize) -> Result<Vec<usize>> {
    if rank >= ranks {
        return Err(PositionIdsError::Index {
            what: "rank",
            found: rank,
            count: ranks,
        }
        .into());
    }
    let tokens = cu_seqlens.last().copied().unwrap_or(0);
    let chunks = ranks.saturating_mul(2);
    let sequences = sequences(cu_seqlens, tokens)?;
    // Without a split, any length is valid.
    if ranks == 1 {
        let mut held = reserved("tokens", tokens)?;
        held.extend(0..tokens);
        return Ok(held);
    }
    let lens = sequences.iter().map(Range::len);
    if let Some((sequence, len)) = lens.enumerate().find(|(_, n)| !n.is_multiple_of(chunks)) {
        return Err(PositionIdsError::Zigzag {
            sequence,
            len,
            ranks,
        }
        .into());
    }
    let mut held = reserved("tokens", tokens / ranks)?;
    for range in sequences {
        let chunk_len = range.len() / chunks;
        for chunk in [rank, chunks - 1 - rank] {
            let start = range.start + chunk * chunk_len;
            held.extend(start..start + chunk_len);
        }
    }
    Ok(held)
}
