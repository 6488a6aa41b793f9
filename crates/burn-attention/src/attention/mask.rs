//! The keys that each query sees.

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "remote")]
use burn_fused::OpError;

use crate::error::{AttentionError, Result, equal};
use crate::sequences;

/// The distance that a query sees from its index, in tokens; with 0 and 0 it sees only its own
/// token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Visible tokens before the query.
    pub before: usize,
    /// Visible tokens after the query.
    pub after: usize,
}

/// Rules that hide keys from queries. They combine: a query sees the keys that no rule hides.
///
/// Queries are numbered from the end of the keys: the last query has the index of the last key, as
/// if the earlier keys came from a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaskRules<'a> {
    /// If true, a query does not see the keys after it.
    pub causal: bool,
    /// If set, a query sees only the keys near it.
    pub window: Option<Window>,
    /// Packed sequences, or windows of an image: the index of each first token, then the number of
    /// tokens. A query sees only its own sequence.
    pub cu_seqlens: Option<&'a [usize]>,
    /// `[batch, keys]`: false for padding, which no query sees. burn's `mask_pad` has the opposite
    /// meaning; it is a tensor, to read back once per step.
    pub attended: Option<&'a [bool]>,
}

/// [`MaskRules`] checked and resolved for a number of queries and keys. Build it once per step for
/// all layers. It takes 12 bytes per query on the host, and with padding, in each sample, up to 2
/// bytes per key and one per query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionMask {
    keys: usize,
    /// The keys that each query sees, in all samples.
    spans: Arc<[Span]>,
    /// The first key of each query's sequence, which a window may hide.
    #[cfg(any(feature = "flex", test))]
    origins: Arc<[u32]>,
    /// `[batch, keys]`, unless all keys are attended to.
    attended: Option<Arc<[bool]>>,
    /// `[samples, keys]`: the keys that some query sees, unless all are; one sample stands for all
    /// if there is no padding.
    seen: Option<Arc<[bool]>>,
    /// `[samples, queries]`: the queries that see some key, unless all do.
    seeing: Option<Arc<[bool]>>,
}

/// The pattern of the keys that the queries of a mask see, except for padding, for kernels with
/// fixed patterns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// All keys.
    All,
    /// The keys from `before` tokens before the query's index to `after` tokens after it.
    Band(Window),
    /// The keys of the query's own sequence; with `causal`, those up to the query's index.
    Packed {
        /// The index after each sequence's last token.
        ends: Vec<usize>,
        /// True if keys after the query are hidden.
        causal: bool,
    },
    /// Any other pattern.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: u32,
    end: u32,
}

/// Consecutive queries whose spans of keys, at either end, stand still or advance by one key per
/// query.
#[cfg(feature = "remote")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) queries: usize,
    /// The first query's first key, and the one after its last.
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) start_advances: bool,
    pub(crate) end_advances: bool,
}

#[cfg(feature = "remote")]
impl Run {
    /// The first key of its query at an index, and the one after its last.
    fn ends(&self, query: usize) -> [u128; 2] {
        let both = [
            (self.start, self.start_advances),
            (self.end, self.end_advances),
        ];
        both.map(|(key, advances)| key as u128 + if advances { query as u128 } else { 0 })
    }

    /// The span of its query at an index.
    fn span(&self, query: usize) -> Span {
        let advanced = |key: usize, advances: bool| (key + query * usize::from(advances)) as u32;
        Span {
            start: advanced(self.start, self.start_advances),
            end: advanced(self.end, self.end_advances),
        }
    }
}

#[cfg(feature = "remote")]
impl AttentionMask {
    /// The spans as few runs.
    pub(crate) fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for span in self.spans.iter() {
            if let Some(run) = runs.last_mut() {
                if run.queries == 1 {
                    // The second query decides what advances.
                    let before = run.span(0);
                    run.start_advances = span.start == before.start + 1;
                    run.end_advances = span.end == before.end + 1;
                }
                if run.span(run.queries) == *span {
                    run.queries += 1;
                    continue;
                }
                if run.queries == 1 {
                    (run.start_advances, run.end_advances) = (false, false);
                }
            }
            runs.push(Run {
                queries: 1,
                start: span.start as usize,
                end: span.end as usize,
                start_advances: false,
                end_advances: false,
            });
        }
        runs
    }

    /// The mask of [`runs`](Self::runs) and of the padding flags of all samples, or of none.
    ///
    /// # Errors
    /// [`OpError::Wire`] for a span beyond the keys, and for flags that do not fit them.
    pub(crate) fn from_runs(
        keys: usize,
        runs: &[Run],
        attended: Vec<bool>,
    ) -> Result<Self, OpError> {
        let mut spans = Vec::new();
        for run in runs {
            let wrong = |what, expected: String, found: u128| {
                let found = found.to_string();
                OpError::Wire {
                    what,
                    expected,
                    found,
                }
            };
            // The other queries' spans are between the first query's and the last one's.
            for query in [0, run.queries.saturating_sub(1)] {
                let [start, end] = run.ends(query);
                if end > keys as u128 {
                    let most = format!("at most {keys} keys");
                    return Err(wrong("the end of a run", most, end));
                }
                if start > end {
                    let most = format!("at most its end, {end}");
                    return Err(wrong("the first key of a run", most, start));
                }
            }
            spans.extend((0..run.queries).map(|query| run.span(query)));
        }
        if !attended.is_empty() && (keys == 0 || !attended.len().is_multiple_of(keys)) {
            return Err(OpError::Wire {
                what: "the padding",
                expected: format!("a flag for each of {keys} keys of a sample"),
                found: attended.len().to_string(),
            });
        }
        let attended = (!attended.is_empty()).then(|| attended.into());
        Ok(Self::of(keys, spans.into(), attended))
    }
}

impl AttentionMask {
    /// Resolves rules for `batch` samples of `queries` and `keys` tokens.
    ///
    /// # Errors
    /// [`AttentionError::TooManyKeys`], [`AttentionError::TooManyQueries`],
    /// [`AttentionError::MoreQueries`], [`AttentionError::CuSeqlens`],
    /// [`AttentionError::Attended`]; [`AttentionError::Size`] for packed sequences whose queries
    /// are not the keys.
    pub fn new(rules: &MaskRules, batch: usize, queries: usize, keys: usize) -> Result<Self> {
        if u32::try_from(queries).is_err() {
            return Err(AttentionError::TooManyQueries { queries });
        }
        // Spans are kept in 32 bits.
        let too_many = AttentionError::TooManyKeys { batch, keys };
        let flags = u32::try_from(keys)
            .ok()
            .and_then(|_| batch.checked_mul(keys));
        let flags = flags.ok_or(too_many)?;
        let indexed = [("causal", rules.causal), ("window", rules.window.is_some())];
        if let Some((rule, _)) = indexed.iter().find(|(_, on)| *on && queries > keys) {
            return Err(AttentionError::MoreQueries {
                rule,
                queries,
                keys,
            });
        }
        let sequences = match rules.cu_seqlens {
            Some(cu_seqlens) => Some(sequence_keys(cu_seqlens, queries, keys)?),
            None => None,
        };
        let spans = (0..queries).map(|query| {
            let own = |sequences: &Vec<Range<usize>>| sequences[query].clone();
            let mut seen = sequences.as_ref().map_or(0..keys, own);
            // Only rules that need it use the index, and they have been checked against `keys`.
            let index = (keys + query).saturating_sub(queries);
            if rules.causal {
                seen.end = seen.end.min(index + 1);
            }
            if let Some(Window { before, after }) = rules.window {
                seen.start = seen.start.max(index.saturating_sub(before));
                seen.end = seen.end.min(index.saturating_add(after).saturating_add(1));
            }
            // A span that was narrowed to nothing is empty at its end.
            Span {
                start: seen.start.min(seen.end) as u32,
                end: seen.end as u32,
            }
        });
        let found = rules.attended.map_or(flags, <[bool]>::len);
        if found != flags {
            return Err(AttentionError::Attended { batch, keys, found });
        }
        let padded = rules.attended.filter(|flags| flags.contains(&false));
        Ok(Self::of(keys, spans.collect(), padded.map(Arc::from)))
    }

    /// The mask of spans and padding flags that fit each other.
    fn of(keys: usize, spans: Arc<[Span]>, attended: Option<Arc<[bool]>>) -> Self {
        let seen = match (&attended, covered(keys, &spans)) {
            (Some(attended), None) => Some(attended.clone()),
            (None, covered) => covered.map(Arc::from),
            (Some(attended), Some(covered)) => {
                let both = attended.iter().zip(covered.iter().cycle());
                Some(
                    both.map(|(attended, covered)| *attended && *covered)
                        .collect(),
                )
            }
        };
        let seeing: Arc<[bool]> = match &attended {
            None => spans.iter().map(|span| span.start < span.end).collect(),
            Some(attended) => {
                let samples = attended.chunks(keys.max(1));
                samples.flat_map(|flags| seeing(flags, &spans)).collect()
            }
        };
        Self {
            keys,
            #[cfg(any(feature = "flex", test))]
            origins: origins(keys, &spans),
            spans,
            attended,
            seen,
            seeing: seeing.contains(&false).then_some(seeing),
        }
    }

    /// The mask of some adjacent queries, over the keys from the first to the last that they see,
    /// and these keys: at least one, if there is one.
    ///
    /// # Panics
    /// If there are no such queries.
    #[must_use]
    pub fn part(&self, queries: Range<usize>) -> (Self, Range<usize>) {
        let seen = self.hull(queries.clone());
        let keys = seen.start..seen.end.max(self.keys.min(seen.start + 1));
        let spans = self.spans[queries].iter().map(|span| {
            let cut = |key: u32| (key as usize).clamp(keys.start, keys.end) - keys.start;
            Span {
                start: cut(span.start) as u32,
                end: cut(span.end) as u32,
            }
        });
        let attended = self.attended.as_ref().map(|attended| {
            let rows = attended.chunks(self.keys.max(1));
            let attended = rows.flat_map(|row| &row[keys.clone()]);
            attended.copied().collect::<Arc<[bool]>>()
        });
        let attended = attended.filter(|attended| attended.contains(&false));
        (Self::of(keys.len(), spans.collect(), attended), keys)
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.spans.len()
    }

    /// Returns the number of keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// True if a query sees a key in a sample.
    pub fn sees(&self, sample: usize, query: usize, key: usize) -> bool {
        let attended = self.attended(sample);
        self.span(query).contains(&key) && attended.is_none_or(|attended| attended[key])
    }

    /// Returns the pattern of the keys that the queries see, except for padding.
    pub fn pattern(&self) -> Pattern {
        let (queries, keys) = (self.queries(), self.keys);
        if self.covers(0..queries, &(0..keys)) {
            return Pattern::All;
        }
        let band = self.band();
        band.map(Pattern::Band)
            .or_else(|| self.sequences())
            .unwrap_or(Pattern::Other)
    }

    /// The window that gives the spans; a side that hides nothing reaches over all keys.
    fn band(&self) -> Option<Window> {
        let shift = self.keys.checked_sub(self.queries())?;
        let (mut before, mut after) = (None, None);
        for (query, span) in self.spans.iter().enumerate() {
            let index = query + shift;
            if span.start > 0 {
                before.get_or_insert(index.checked_sub(span.start as usize)?);
            }
            if (span.end as usize) < self.keys {
                after.get_or_insert((span.end as usize).checked_sub(index + 1)?);
            }
        }
        let window = Window {
            before: before.unwrap_or(self.keys),
            after: after.unwrap_or(self.keys),
        };
        let fits = self.spans.iter().enumerate().all(|(query, span)| {
            let index = query + shift;
            let start = index.saturating_sub(window.before);
            let end = (index + window.after + 1).min(self.keys);
            (span.start as usize, span.end as usize) == (start, end)
        });
        fits.then_some(window)
    }

    /// The packed sequences that give the spans.
    fn sequences(&self) -> Option<Pattern> {
        if self.queries() != self.keys {
            return None;
        }
        let mut ends = Vec::new();
        let mut first = 0;
        // One that holds for every sequence; one of a single token has both.
        let (mut whole, mut causal) = (true, true);
        while first < self.keys {
            let own = |span: &&Span| span.start as usize == first;
            let count = self.spans[first..].iter().take_while(own).count();
            let end = first + count;
            for (index, span) in (first..end).zip(&self.spans[first..end]) {
                whole &= span.end as usize == end;
                causal &= span.end as usize == index + 1;
            }
            if count == 0 || !(whole || causal) {
                return None;
            }
            ends.push(end);
            first = end;
        }
        let causal = !whole;
        Some(Pattern::Packed { ends, causal })
    }

    /// The keys that a query sees, but for padding.
    pub(crate) fn span(&self, query: usize) -> Range<usize> {
        let Span { start, end } = self.spans[query];
        start as usize..end as usize
    }

    /// Divides queries by sequence: the first key of each that is no padding, and the least range
    /// of such keys that holds all that its queries see, if there are any. From the first key to
    /// the end of the range, no two have a key in common.
    #[cfg(any(feature = "flex", test))]
    pub(crate) fn hulls(&self, sample: usize, queries: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut hulls = Vec::new();
        let mut first = queries.start;
        for own in self.origins[queries].chunk_by(|a, b| a == b) {
            let hull = self.hull(first..first + own.len());
            first += own.len();
            // Spans need not be those of sequences.
            let origin = hull.start.min(own[0] as usize);
            let padding = self.attended(sample).map_or(0, |attended| {
                let flags = attended[origin..].iter();
                flags.take_while(|attended| !**attended).count()
            });
            let origin = origin + padding;
            hulls.push((origin, hull.start.max(origin)..hull.end));
        }
        hulls.retain(|(_, hull)| !hull.is_empty());
        hulls.sort_by_key(|(origin, _)| *origin);
        hulls.dedup_by(|(origin, next), (_, hull)| {
            let meets = *origin < hull.end;
            if meets {
                *hull = hull.start.min(next.start)..hull.end.max(next.end);
            }
            meets
        });
        hulls
    }

    /// The least range that holds what any of the queries sees.
    pub(crate) fn hull(&self, queries: Range<usize>) -> Range<usize> {
        let seen = queries.map(|query| self.span(query));
        let hull = seen.filter(|span| !span.is_empty());
        hull.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .unwrap_or(0..0)
    }

    /// True if any of the queries sees any of the keys, but for padding.
    #[cfg(any(feature = "flex", test))]
    pub(crate) fn meets(&self, mut queries: Range<usize>, keys: &Range<usize>) -> bool {
        queries.any(|query| {
            let span = self.span(query);
            span.start.max(keys.start) < span.end.min(keys.end)
        })
    }

    /// True if each of the queries sees each of the keys, but for padding.
    pub(crate) fn covers(&self, mut queries: Range<usize>, keys: &Range<usize>) -> bool {
        queries.all(|query| {
            let span = self.span(query);
            span.start <= keys.start && keys.end <= span.end
        })
    }

    /// The padding flags of a sample, if any key is padding.
    pub(crate) fn attended(&self, sample: usize) -> Option<&[bool]> {
        let flags = self.attended.as_deref()?;
        Some(&flags[sample * self.keys..(sample + 1) * self.keys])
    }

    /// Returns the padding flags of all samples, `[batch, keys]`, if any key is padding.
    pub fn padding(&self) -> Option<&[bool]> {
        self.attended.as_deref()
    }

    /// The keys that some query sees, `[samples, keys]` of all samples or of one that stands for
    /// all, unless every key is seen. What the others hold must reach nothing.
    pub(crate) fn seen(&self) -> Option<&[bool]> {
        self.seen.as_deref()
    }

    /// The queries that see some key, as [`seen`](Self::seen), unless every query does.
    pub(crate) fn seeing(&self) -> Option<&[bool]> {
        self.seeing.as_deref()
    }
}

/// The flags of a sample, of `len` each, where one sample may stand for all.
#[cfg(feature = "flex")]
pub(crate) fn sample_flags(flags: Option<&[bool]>, sample: usize, len: usize) -> Option<&[bool]> {
    let flags = flags?;
    let start = if flags.len() > len { sample * len } else { 0 };
    Some(&flags[start..start + len])
}

/// The first key of each query's sequence: the index of its first query, which sees nothing before
/// it; or the first key of all, for queries that continue a cache.
#[cfg(any(feature = "flex", test))]
fn origins(keys: usize, spans: &[Span]) -> Arc<[u32]> {
    let mut origin = 0;
    let own = spans.iter().enumerate().map(|(query, span)| {
        let index = (keys + query).saturating_sub(spans.len());
        if span.start as usize == index {
            origin = span.start;
        }
        origin
    });
    own.collect()
}

/// The keys that lie in a span, unless all do.
fn covered(keys: usize, spans: &[Span]) -> Option<Vec<bool>> {
    let mut spans: Vec<Span> = spans.to_vec();
    spans.retain(|span| span.start < span.end);
    spans.sort_unstable_by_key(|span| span.start);
    let mut end = 0;
    let gapless = spans.iter().all(|span| {
        let joins = span.start <= end;
        end = end.max(span.end);
        joins
    });
    if gapless && end as usize == keys {
        return None;
    }
    let mut covered = vec![false; keys];
    let mut end = 0;
    for span in spans {
        let (start, last) = (span.start.max(end) as usize, span.end.max(end) as usize);
        covered[start..last].fill(true);
        end = end.max(span.end);
    }
    Some(covered)
}

/// True for each query that sees a key that is no padding.
fn seeing(attended: &[bool], spans: &[Span]) -> Vec<bool> {
    let mut count = 0_u32;
    let counts = attended.iter().map(|attended| {
        count += u32::from(*attended);
        count
    });
    let counts: Vec<u32> = std::iter::once(0).chain(counts).collect();
    let sees = |span: &Span| counts[span.start as usize] < counts[span.end as usize];
    spans.iter().map(sees).collect()
}

/// The sequence of each token.
fn sequence_keys(cu_seqlens: &[usize], queries: usize, keys: usize) -> Result<Vec<Range<usize>>> {
    equal(["q of packed sequences", "k"], "tokens", queries, keys)?;
    let all = sequences::ranges(cu_seqlens, keys)?;
    Ok(all
        .flat_map(|range| vec![range.clone(); range.len()])
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys that each query of a mask sees, as rows.
    fn seen(rules: &MaskRules, queries: usize, keys: usize) -> Vec<String> {
        let mask = AttentionMask::new(rules, 1, queries, keys).expect("valid rules");
        let mark = |query, key| if mask.sees(0, query, key) { 'x' } else { '.' };
        (0..queries)
            .map(|query| (0..keys).map(|key| mark(query, key)).collect())
            .collect()
    }

    #[test]
    fn rules_hide_what_they_say() {
        let all = MaskRules::default();
        assert_eq!(seen(&all, 2, 3), ["xxx", "xxx"]);
        let causal = MaskRules {
            causal: true,
            ..all
        };
        assert_eq!(seen(&causal, 3, 3), ["x..", "xx.", "xxx"]);
        // The first key comes from a cache.
        assert_eq!(seen(&causal, 2, 3), ["xx.", "xxx"]);
        let window = |before, after| MaskRules {
            window: Some(Window { before, after }),
            ..all
        };
        assert_eq!(seen(&window(1, 0), 3, 3), ["x..", "xx.", ".xx"]);
        assert_eq!(seen(&window(0, 1), 3, 3), ["xx.", ".xx", "..x"]);
        let far = usize::MAX;
        assert_eq!(seen(&window(far, far), 2, 2), ["xx", "xx"]);
        let packed = MaskRules {
            cu_seqlens: Some(&[0, 1, 1, 3]),
            ..all
        };
        assert_eq!(seen(&packed, 3, 3), ["x..", ".xx", ".xx"]);
        let packed_causal = MaskRules {
            causal: true,
            ..packed
        };
        assert_eq!(seen(&packed_causal, 3, 3), ["x..", ".x.", ".xx"]);
        let padded = MaskRules {
            attended: Some(&[false, true, true]),
            ..causal
        };
        assert_eq!(seen(&padded, 3, 3), ["...", ".x.", ".xx"]);
    }

    /// The flags that `new` keeps of each key and query, against `sees` of each pair.
    #[test]
    fn keys_that_nobody_sees_and_queries_that_see_nothing_are_known() {
        let attended = [
            false, true, true, false, true, true, true, false, true, true,
        ];
        let all = MaskRules::default();
        let window = |before, after| MaskRules {
            window: Some(Window { before, after }),
            ..all
        };
        let causal = MaskRules {
            causal: true,
            ..all
        };
        let padded = |rules| MaskRules {
            attended: Some(&attended),
            ..rules
        };
        let (mut unseen, mut blind) = (0, 0);
        for rules in [all, causal, window(1, 0), window(0, 1)] {
            for rules in [rules, padded(rules)] {
                for queries in [1, 2, 5] {
                    let mask = AttentionMask::new(&rules, 2, queries, 5).expect("valid rules");
                    for sample in 0..2 {
                        let of = |flags: Option<&[bool]>, len, index| {
                            flags.is_none_or(|flags| flags[(sample * len + index) % flags.len()])
                        };
                        for key in 0..5 {
                            let seen = (0..queries).any(|query| mask.sees(sample, query, key));
                            assert_eq!(of(mask.seen(), 5, key), seen, "{rules:?}, {queries}");
                            unseen += usize::from(!seen);
                        }
                        for query in 0..queries {
                            let sees = (0..5).any(|key| mask.sees(sample, query, key));
                            assert_eq!(of(mask.seeing(), queries, query), sees, "{rules:?}");
                            blind += usize::from(!sees);
                        }
                    }
                }
            }
        }
        assert!(unseen > 10 && blind > 1, "{unseen}, {blind}");
    }

    #[test]
    fn a_part_sees_what_the_whole_sees() {
        let attended = [true, true, true, false, true, true, true, true, true, false];
        let causal = MaskRules {
            causal: true,
            ..MaskRules::default()
        };
        let window = Some(Window {
            before: 1,
            after: 0,
        });
        let cu_seqlens = Some(&[0, 2, 5][..]);
        let mut cut = 0;
        for rules in [
            causal,
            MaskRules { window, ..causal },
            MaskRules {
                cu_seqlens,
                ..causal
            },
            MaskRules {
                attended: Some(&attended),
                ..causal
            },
        ] {
            let whole = AttentionMask::new(&rules, 2, 5, 5).expect("valid rules");
            for queries in [0..1, 0..3, 2..4, 3..5, 4..5] {
                let (part, keys) = whole.part(queries.clone());
                assert_eq!((part.queries(), part.keys()), (queries.len(), keys.len()));
                cut += 5 - keys.len();
                for (sample, key) in (0..2).flat_map(|sample| (0..5).map(move |key| (sample, key)))
                {
                    for (at, query) in queries.clone().enumerate() {
                        let sees = keys.contains(&key) && part.sees(sample, at, key - keys.start);
                        assert_eq!(sees, whole.sees(sample, query, key), "{rules:?}, {query}");
                    }
                }
            }
        }
        assert!(cut > 20, "{cut}");
    }

    /// Whatever the spans, one hull of a tile, from its origin on, holds a key that a query sees.
    #[test]
    fn hulls_hold_all_that_is_seen() {
        let mut state = 7_u32;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as usize % bound
        };
        let mut seen = 0;
        for _ in 0..500 {
            let (queries, keys) = (1 + next(9), 1 + next(9));
            let spans: Arc<[Span]> = (0..queries)
                .map(|_| {
                    let (a, b) = (next(keys + 1), next(keys + 1));
                    Span {
                        start: a.min(b) as u32,
                        end: a.max(b) as u32,
                    }
                })
                .collect();
            let attended: Vec<bool> = (0..keys).map(|_| next(3) > 0).collect();
            let mask = AttentionMask::of(keys, spans, Some(attended.into()));
            let (first, last) = (next(queries), next(queries));
            let tile = first.min(last)..first.max(last) + 1;
            let hulls = mask.hulls(0, tile.clone());
            for query in tile {
                for key in (0..keys).filter(|key| mask.sees(0, query, *key)) {
                    seen += 1;
                    let places = hulls
                        .iter()
                        .map(|(origin, hull)| [*origin, hull.start, hull.end]);
                    let of_tile = |[origin, start, end]: &[usize; 3]| {
                        assert!(origin <= start, "{mask:?}");
                        (*origin..*end).contains(&key)
                    };
                    let holding: Vec<_> = places.filter(of_tile).collect();
                    assert!(
                        holding.len() == 1 && holding[0][1] <= key,
                        "{mask:?}: {query} sees {key}, {holding:?}"
                    );
                }
            }
        }
        assert!(seen > 500, "{seen}");
    }

    #[test]
    fn masks_are_recognised() {
        let pattern = |rules: &MaskRules, queries, keys| {
            let mask = AttentionMask::new(rules, 1, queries, keys).expect("valid rules");
            mask.pattern()
        };
        let all = MaskRules::default();
        assert_eq!(pattern(&all, 2, 3), Pattern::All);
        let causal = MaskRules {
            causal: true,
            ..all
        };
        let band = |before, after| Pattern::Band(Window { before, after });
        assert_eq!(pattern(&causal, 5, 5), band(5, 0));
        assert_eq!(pattern(&causal, 2, 5), band(5, 0));
        // The last query sees all keys.
        assert_eq!(pattern(&causal, 1, 5), Pattern::All);
        let window = |before, after| MaskRules {
            window: Some(Window { before, after }),
            ..all
        };
        assert_eq!(pattern(&window(1, 0), 5, 5), band(1, 0));
        assert_eq!(pattern(&window(1, 2), 5, 5), band(1, 2));
        assert_eq!(pattern(&window(1, 0), 2, 5), band(1, 0));
        let packed = |causal| MaskRules {
            causal,
            cu_seqlens: Some(&[0, 2, 2, 5]),
            ..all
        };
        for causal in [false, true] {
            let ends = vec![2, 5];
            let expected = Pattern::Packed { ends, causal };
            assert_eq!(pattern(&packed(causal), 5, 5), expected);
        }
        let both = MaskRules {
            window: window(1, 0).window,
            ..packed(true)
        };
        assert_eq!(pattern(&both, 5, 5), Pattern::Other);
    }

    #[test]
    fn blocks_are_met_and_covered() {
        let rules = MaskRules {
            causal: true,
            ..Default::default()
        };
        let mask = AttentionMask::new(&rules, 1, 8, 8).expect("valid");
        assert_eq!(mask.hull(2..5), 0..5);
        assert!(mask.covers(4..8, &(0..5)) && !mask.covers(4..8, &(0..6)));
        assert!(mask.meets(0..4, &(3..8)) && !mask.meets(0..4, &(4..8)));
    }
}
