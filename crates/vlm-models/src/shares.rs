//! The tokens and the heads of a rank, where ranks divide them.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_attention::{Attention, AttentionMask, Sequences};
use rope_core::Positions;

use crate::error::Result;
use crate::tensors::indices;

/// The tokens of a rank: part `index` of `count` parts of each row, which differ by one token at
/// most. The parts of a packed row do not depend on its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenShare {
    /// The part, from 0.
    pub index: usize,
    /// The number of parts.
    pub count: usize,
}

impl TokenShare {
    /// All tokens.
    pub const ALL: Self = Self { index: 0, count: 1 };

    /// The number of groups of heads, of equally many each, that `count` ranks divide among them: the
    /// most that also divide the ranks.
    pub fn head_groups(count: usize, heads: usize) -> usize {
        let divides =
            |groups: &usize| count.is_multiple_of(*groups) && heads.is_multiple_of(*groups);
        (1..=count.min(heads)).rev().find(divides).unwrap_or(1)
    }

    /// The indices of its tokens among those of rows of `tokens` tokens.
    pub fn own(self, rows: usize, tokens: usize) -> Vec<usize> {
        let part = part(self.index, self.count, tokens);
        let rows = (0..rows).map(|row| row * tokens);
        rows.flat_map(|first| part.clone().map(move |token| first + token))
            .collect()
    }
}

/// One of `count` parts of some adjacent things.
fn part(index: usize, count: usize, things: usize) -> Range<usize> {
    let (whole, rest) = (things / count, things % count);
    let end = |parts: usize| parts * whole + parts.min(rest);
    end(index)..end(index + 1)
}

/// A rank's part of a batch.
#[derive(Clone, Debug)]
pub(crate) struct TokenPart {
    pub(crate) share: TokenShare,
    pub(crate) rows: usize,
    /// The tokens of a row, on all ranks.
    pub(crate) tokens: usize,
    /// The indices of its tokens among those of all ranks.
    pub(crate) own: Vec<usize>,
    /// False for each of its tokens that is padding.
    pub(crate) attended: Vec<bool>,
    /// The positions of its tokens.
    pub(crate) positions: Positions,
    /// True if the batch has pictures, though maybe none at these tokens.
    pub(crate) sees: bool,
    /// The queries whose attention this rank computes.
    pub(crate) queries: Vec<Queries>,
    /// The sequences, if they are packed.
    pub(crate) sequences: Option<Vec<Range<usize>>>,
}

/// Adjacent queries, and the keys that they see.
#[derive(Clone, Debug)]
pub(crate) struct Queries {
    pub(crate) attention: MaskedKeys,
    /// Of layers with a window, if it hides a token.
    pub(crate) window: Option<MaskedKeys>,
}

/// Attention over some of the keys.
#[derive(Clone, Debug)]
pub(crate) struct MaskedKeys {
    pub(crate) attention: Attention,
    pub(crate) keys: Range<usize>,
}

impl MaskedKeys {
    fn new(mask: &AttentionMask, queries: Range<usize>) -> Self {
        let (mask, keys) = mask.part(queries);
        Self {
            attention: Attention::new(mask),
            keys,
        }
    }
}

impl Queries {
    /// Those of a rank.
    pub(crate) fn of(
        part: &HeadPart,
        tokens: usize,
        mask: &AttentionMask,
        window: Option<&AttentionMask>,
    ) -> Vec<Self> {
        let of = |queries: Range<usize>| Self {
            attention: MaskedKeys::new(mask, queries.clone()),
            window: window.map(|window| MaskedKeys::new(window, queries)),
        };
        part.queries(tokens).into_iter().map(of).collect()
    }
}

impl TokenPart {
    /// The tokens of a rank in each row.
    pub(crate) fn of_rank(&self, rank: usize) -> Range<usize> {
        part(rank, self.share.count, self.tokens)
    }

    /// The sequences of some adjacent tokens of a row, with `before` more tokens in the sequence
    /// before them and `after` more in that of the last.
    ///
    /// # Errors
    /// Those of [`Sequences::packed`].
    pub(crate) fn sequences_of(
        &self,
        window: &Range<usize>,
        [before, after]: [usize; 2],
    ) -> Result<Sequences> {
        debug_assert!(before == 0 || window.start > 0, "nothing is before a row");
        let all = before + window.len() + after;
        let Some(sequences) = &self.sequences else {
            return Ok(Sequences::whole(all));
        };
        let mut ends = vec![0];
        let previous = window.start.checked_sub(1);
        for sequence in sequences {
            let own = overlap(sequence, window).len();
            let is_before = previous.is_some_and(|token| sequence.contains(&token));
            let count = own + if is_before { before } else { 0 };
            ends.push(ends[ends.len() - 1] + count);
        }
        // The sequences after the last token have none.
        let last = ends[ends.len() - 1];
        ends.iter_mut()
            .filter(|end| **end == last && last > 0)
            .for_each(|end| *end = all);
        Ok(Sequences::packed(&ends, all)?)
    }

    /// The number of tokens of each rank.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        (0..self.share.count).map(|rank| self.of_rank(rank).len())
    }
}

/// The common part of two ranges.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The elements of tensors `[rows, tokens, channels]`, one after the other.
pub(crate) fn joined(parts: impl IntoIterator<Item = Tensor<3>>, like: &Tensor<3>) -> Tensor<1> {
    let parts = parts.into_iter().map(|part| {
        let elements = part.dims().iter().product::<usize>();
        part.reshape([elements])
    });
    let parts: Vec<_> = parts.filter(|part| part.dims() != [0]).collect();
    match parts.is_empty() {
        true => Tensor::zeros([0], (&like.device(), like.dtype())),
        false => Tensor::cat(parts, 0),
    }
}

/// Tensors from their elements, one after the other.
pub(crate) struct Cut<'a> {
    flat: &'a Tensor<1>,
    start: usize,
}

impl<'a> Cut<'a> {
    pub(crate) fn new(flat: &'a Tensor<1>) -> Self {
        Self { flat, start: 0 }
    }

    /// The next tensor; `None` if it has no element.
    pub(crate) fn next(&mut self, size: [usize; 3]) -> Option<Tensor<3>> {
        let elements = size.iter().product::<usize>();
        let start = self.start;
        self.start += elements;
        (elements > 0).then(|| self.flat.clone().narrow(0, start, elements).reshape(size))
    }
}

/// The heads of a rank where tokens are mixed, and the queries whose output it computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeadPart {
    /// The heads of queries, or of values where these are more.
    pub(crate) heads: Range<usize>,
    /// The heads of keys that these read: each once if they divide evenly among them, and else one
    /// for each.
    pub(crate) key_heads: Vec<usize>,
    /// The part of the queries, and the number of parts.
    queries: [usize; 2],
}

impl HeadPart {
    /// The heads and queries of each of `count` ranks: all have equally many heads, and those with
    /// the same heads different queries.
    pub(crate) fn of_ranks(count: usize, heads: usize, key_heads: usize) -> Vec<Self> {
        let groups = TokenShare::head_groups(count, heads);
        let parts = count / groups;
        let rank = |rank| Self {
            queries: [rank % parts, parts],
            ..Self::new(part(rank / parts, groups, heads), heads, key_heads)
        };
        (0..count).map(rank).collect()
    }

    fn new(own: Range<usize>, heads: usize, key_heads: usize) -> Self {
        let group = heads / key_heads.max(1);
        let each: Vec<usize> = own.clone().map(|head| head / group).collect();
        let mut once = each.clone();
        once.dedup();
        let even = each.len() / once.len().max(1);
        let is_even = once.len() * even == each.len()
            && each
                .iter()
                .enumerate()
                .all(|(at, key)| once[at / even] == *key);
        Self {
            heads: own,
            key_heads: if is_even { once } else { each },
            queries: [0, 1],
        }
    }

    /// Its queries among those of a row: of twice as many parts as ranks have, one from the start
    /// and one from the end, so that causal attention costs each the same.
    pub(crate) fn queries(&self, tokens: usize) -> Vec<Range<usize>> {
        let [index, parts] = self.queries;
        let chunks = [index, 2 * parts - 1 - index].map(|chunk| part(chunk, 2 * parts, tokens));
        let [first, second] = chunks;
        let chunks = match first.end == second.start {
            true => [first.start..second.end, second.end..second.end],
            false => [first, second],
        };
        let chunks = chunks.into_iter();
        chunks.filter(|chunk| !chunk.is_empty()).collect()
    }
}

/// Some heads of a tensor `[rows, tokens, heads, width]`, as channels of its tokens.
pub(crate) fn pick(x: &Tensor<4>, heads: &[usize]) -> Tensor<3> {
    let [rows, tokens, _, width] = x.dims();
    let first = heads.first().copied().unwrap_or(0);
    let are_adjacent = heads
        .iter()
        .enumerate()
        .all(|(at, head)| *head == first + at);
    let picked = match are_adjacent {
        true => x.clone().narrow(2, first, heads.len()),
        false => x.clone().select(2, indices(heads.to_vec(), &x.device())),
    };
    picked.reshape([rows, tokens, heads.len() * width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_adjacent_and_cover_each_row_once() {
        for (count, tokens) in [(1, 5), (2, 5), (3, 7), (4, 4), (8, 1000), (8, 1003)] {
            let shares = (0..count).map(|index| TokenShare { index, count });
            let own: Vec<Vec<usize>> = shares.map(|share| share.own(2, tokens)).collect();
            let lengths: Vec<usize> = own.iter().map(|own| own.len() / 2).collect();
            let (least, most) = (lengths.iter().min().unwrap(), lengths.iter().max().unwrap());
            assert!(most - least <= 1, "{lengths:?}");
            let mut all = own.concat();
            all.sort_unstable();
            assert_eq!(all, (0..2 * tokens).collect::<Vec<_>>());
        }
        let share = TokenShare { index: 1, count: 3 };
        assert_eq!(share.own(2, 7), [3, 4, 10, 11]);
    }

    /// The heads, key heads and part of the queries of each rank.
    fn said(parts: Vec<HeadPart>) -> Vec<(Range<usize>, Vec<usize>, [usize; 2])> {
        let said = |part: HeadPart| (part.heads, part.key_heads, part.queries);
        parts.into_iter().map(said).collect()
    }

    #[test]
    fn heads_read_the_keys_of_their_group() {
        let (all, of) = ([0, 1], HeadPart::of_ranks);
        // Eight heads of two keys.
        let two = [(0..4, vec![0], all), (4..8, vec![1], all)];
        assert_eq!(said(of(2, 8, 2)), two);
        let four = [(0..2, 0), (2..4, 0), (4..6, 1), (6..8, 1)];
        let four = four.map(|(heads, key)| (heads, vec![key], all));
        assert_eq!(said(of(4, 8, 2)), four);
        assert_eq!(said(of(1, 4, 2)), [(0..4, vec![0, 1], all)]);
        let each = [(0..2, vec![0, 1], all), (2..4, vec![2, 3], all)];
        assert_eq!(said(of(2, 4, 4)), each);
        // Three heads of the first key and one of the second; then two of each.
        assert_eq!(said(of(3, 12, 4))[0], (0..4, vec![0, 0, 0, 1], all));
        assert_eq!(said(of(3, 12, 4))[1], (4..8, vec![1, 2], all));
    }

    #[test]
    fn tokens_beside_a_window_are_of_its_first_and_last_sequence() {
        let part = |sequences| TokenPart {
            share: TokenShare::ALL,
            rows: 1,
            tokens: 10,
            own: Vec::new(),
            attended: Vec::new(),
            positions: Positions::new(1, &[]).expect("no positions"),
            sees: false,
            queries: Vec::new(),
            sequences,
        };
        let packed = part(Some(vec![0..3, 3..3, 3..8, 8..10]));
        for (window, beside, ends) in [
            (0..5, [0, 2], &[0, 3, 7][..]),
            (5..10, [2, 0], &[0, 5, 7]),
            // A sequence begins with the window, and ends with it.
            (3..8, [2, 1], &[0, 2, 8]),
            (4..6, [1, 1], &[0, 4]),
        ] {
            let found = packed.sequences_of(&window, beside).expect("sequences");
            let all = beside[0] + window.len() + beside[1];
            let expected = Sequences::packed(ends, all).expect("sequences");
            assert_eq!(found, expected, "{window:?}, {beside:?}");
        }
        let whole = part(None).sequences_of(&(2..4), [1, 1]).expect("one");
        assert_eq!(whole, Sequences::whole(4));
    }

    #[test]
    fn ranks_with_the_same_heads_divide_the_queries() {
        // Qwen2.5-VL-7B on eight ranks: seven heads of one key each, and half of the queries.
        let parts = HeadPart::of_ranks(8, 28, 4);
        for (rank, part) in parts.iter().enumerate() {
            let group = rank / 2;
            assert_eq!(part.heads, 7 * group..7 * (group + 1));
            assert_eq!(
                (&part.key_heads[..], part.queries),
                (&[group][..], [rank % 2, 2])
            );
        }
        assert_eq!(parts[0].queries(8), [0..2, 6..8]);
        assert_eq!(parts[1].queries(8), vec![2..6; 1]);
        assert_eq!(HeadPart::of_ranks(1, 2, 1)[0].queries(7), vec![0..7; 1]);
        // Of more ranks than queries, some have none.
        let parts = HeadPart::of_ranks(8, 1, 1);
        let counts = parts.iter().map(|part| part.queries(3).len());
        assert_eq!(counts.collect::<Vec<_>>(), [1, 1, 1, 0, 0, 0, 0, 0]);
        for tokens in [3, 7, 100] {
            let all = HeadPart::of_ranks(6, 3, 3);
            let all = all.iter().filter(|part| part.heads == (1..2));
            let mut all: Vec<usize> = all
                .flat_map(|part| part.queries(tokens))
                .flatten()
                .collect();
            all.sort_unstable();
            assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }
    }
}
