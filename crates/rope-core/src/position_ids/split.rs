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

/// The tokens that rank `rank` of `ranks` holds of a packed buffer, in the order in which it holds
/// them.
///
/// Each sequence is cut into `2 * ranks` chunks; a rank holds the chunks `rank` and `2 * ranks - 1
/// - rank`, so that causal attention costs every rank the same. One row of a batch is the packing
/// `[0, len]`.
///
/// # Errors
/// [`PositionIdsError::Zigzag`] if a sequence does not divide into the chunks,
/// [`PositionIdsError::Index`] if there is no such rank, [`PositionIdsError::CuSeqlens`] if the
/// lengths are no packing.
///
/// # Examples
/// ```
/// use rope_core::position_ids::zigzag;
///
/// assert_eq!(zigzag(&[0, 8], 2, 0)?, [0, 1, 6, 7]);
/// assert_eq!(zigzag(&[0, 8], 2, 1)?, [2, 3, 4, 5]);
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
    let mut held = Vec::with_capacity(tokens / ranks);
    for (sequence, range) in sequences(cu_seqlens, tokens)?.into_iter().enumerate() {
        let len = range.len();
        if !len.is_multiple_of(2 * ranks) {
            return Err(PositionIdsError::Zigzag {
                sequence,
                len,
                ranks,
            }
            .into());
        }
        let chunk_len = len / (2 * ranks);
        for chunk in [rank, 2 * ranks - 1 - rank] {
            let start = range.start + chunk * chunk_len;
            held.extend(start..start + chunk_len);
        }
    }
    Ok(held)
}
