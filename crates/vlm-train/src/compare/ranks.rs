//! A step of several ranks beside a whole one: each rank's items, and what ranks do together.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::facts::{Facts, parsed};
use super::{Comparison, Fault, Row, Stage, Suspicion};
use crate::record::StepRecord;

/// Relative differences below it are rounding of sums over ranks.
const EQUAL: f64 = 1e-3;

/// Compares ranks with a whole step. If both are of ranks, the first is compared as a whole.
pub(super) fn compare(left: &[StepRecord], right: &[StepRecord]) -> Comparison {
    let is_swapped = right.len() == 1;
    let (whole, ranks) = if is_swapped {
        (right, left)
    } else {
        (left, right)
    };
    let whole = joined(whole);
    let facts: Vec<Facts<'_>> = ranks
        .iter()
        .map(|rank| match is_swapped {
            true => Facts::of(rank, &whole),
            false => Facts::of(&whole, rank),
        })
        .collect();
    let found: Vec<Comparison> = facts.iter().map(Facts::comparison).collect();
    let run = Run {
        whole: &whole,
        ranks,
        held: joined(ranks),
        facts,
        found,
        is_swapped,
    };
    let mut comparison = run.comparison();
    comparison.suspicion = run.suspect();
    comparison
}

/// The records of ranks as one: of elements in parts, those of the rank that has them.
fn joined(ranks: &[StepRecord]) -> Cow<'_, StepRecord> {
    let [first, others @ ..] = ranks else {
        return Cow::Owned(StepRecord::default());
    };
    if others.is_empty() {
        return Cow::Borrowed(first);
    }
    let mut whole = StepRecord {
        header: first.header.clone(),
        items: BTreeMap::new(),
    };
    whole.header.rank = None;
    for record in ranks {
        for (name, values) in &record.items {
            if parsed(name).is_none() {
                continue;
            }
            if let Some(shape) = record.header.shapes.get(name) {
                whole.header.shapes.insert(name.clone(), shape.clone());
            }
            let joined = whole.items.entry(name.clone());
            let joined = joined.or_insert_with(|| values.clone());
            if let Some(owners) = record.owners_of(name) {
                let own = record.header.rank.as_ref().map(|rank| rank.rank as f32);
                let places = joined.iter_mut().zip(values).zip(&*owners);
                for ((joined, value), owner) in places {
                    if Some(*owner) == own {
                        *joined = *value;
                    }
                }
            }
        }
    }
    Cow::Owned(whole)
}

/// Ranks beside a whole step.
pub(super) struct Run<'a> {
    whole: &'a StepRecord,
    pub(super) ranks: &'a [StepRecord],
    /// The ranks' records as one.
    held: Cow<'a, StepRecord>,
    pub(super) facts: Vec<Facts<'a>>,
    pub(super) found: Vec<Comparison>,
    is_swapped: bool,
}

/// The norm of a difference relative to the norm of the first.
fn apart<'a>(pairs: impl Iterator<Item = (f64, f64)> + 'a) -> Option<f64> {
    let (mut squares, mut size, mut count) = (0.0, 0.0, 0);
    for (expected, found) in pairs {
        count += 1;
        let is_same = expected == found || (expected.is_nan() && found.is_nan());
        if !is_same {
            squares += (expected - found).powi(2);
        }
        if expected.is_finite() {
            size += expected * expected;
        }
    }
    let relative = squares.sqrt() / size.sqrt().max(f64::MIN_POSITIVE);
    // NaN is apart.
    let relative = if relative.is_nan() {
        f64::INFINITY
    } else {
        relative
    };
    (count > 0 && (size > 0.0 || squares > 0.0)).then_some(relative)
}

impl Run<'_> {
    /// Of each item, the row of the rank with the largest difference.
    fn comparison(&self) -> Comparison {
        let mut rows: Vec<Row> = Vec::new();
        let mut places: BTreeMap<(Stage, &str), usize> = BTreeMap::new();
        for (rank, found) in self.found.iter().enumerate() {
            for row in &found.rows {
                let row_of = || Row {
                    rank: Some(rank),
                    ..row.clone()
                };
                match places.get(&(row.stage, &row.name[..])) {
                    Some(at) if rows[*at].difference < row.difference => rows[*at] = row_of(),
                    Some(_) => {}
                    None => {
                        places.insert((row.stage, &row.name), rows.len());
                        rows.push(row_of());
                    }
                }
            }
        }
        rows.sort_by_key(|row| {
            (
                row.stage,
                super::facts::rank(row.stage, &row.name),
                row.name.clone(),
            )
        });
        let mut losses = [self.whole.header.loss, self.held.header.loss];
        if self.is_swapped {
            losses.reverse();
        }
        Comparison {
            rows,
            only: self.only(),
            settings: self
                .found
                .first()
                .map_or_else(Vec::new, |found| found.settings.clone()),
            losses,
            suspicion: None,
        }
    }

    /// The names of items in only one of the two steps.
    fn only(&self) -> [Vec<String>; 2] {
        let missing = |one: &StepRecord, other: &StepRecord| {
            let names = one.items.keys();
            let names =
                names.filter(|name| parsed(name).is_some() && !other.items.contains_key(*name));
            names.cloned().collect()
        };
        let (whole, held) = (self.whole, &*self.held);
        match self.is_swapped {
            false => [missing(whole, held), missing(held, whole)],
            true => [missing(held, whole), missing(whole, held)],
        }
    }

    /// The suspected cause, if a rank's step differs from the whole one.
    fn suspect(&self) -> Option<Suspicion> {
        let first = |found: &Comparison| found.first().map(|row| row.stage);
        let stage = self.found.iter().filter_map(first).min();
        // Differences of a stage explain those of later ones. What a rank receives is compared with
        // what others gave, whatever their values.
        let before = |limit| stage.is_none_or(|stage| stage >= limit);
        let at = |limit, check: &dyn Fn() -> Option<Suspicion>| before(limit).then(check)?;
        let together = self
            .division()
            .or_else(|| at(Stage::Weight, &|| self.counts()));
        let together = together.or_else(|| self.gathers()).or_else(|| self.sums());
        let together = together.or_else(|| at(Stage::Weight, &|| self.weights()));
        let together = together.or_else(|| at(Stage::Update, &|| self.norms()));
        let together = together.or_else(|| at(Stage::Update, &|| self.updates()));
        let together = together.or_else(|| self.between_parts());
        together.or_else(|| self.alone())
    }

    /// The ranks that divide the tokens of a rank's samples.
    pub(super) fn group_of(&self, rank: usize) -> Range<usize> {
        let of = self.ranks[rank].header.rank.as_ref();
        let size = of.map_or(1, |of| of.context.clamp(1, self.ranks.len()));
        let first = rank / size * size;
        first..(first + size).min(self.ranks.len())
    }

    /// The suspicion that the first rank with a difference raises by itself.
    fn alone(&self) -> Option<Suspicion> {
        let place = |found: &Comparison| {
            let row = found.first()?;
            Some((row.stage, super::facts::rank(row.stage, &row.name)))
        };
        // Samples of other ranks are missing in each.
        let only = self.only();
        let suspicions = self.found.iter().zip(&self.facts).enumerate();
        let suspicions = suspicions.filter_map(|(rank, (found, facts))| {
            let found = Comparison {
                only: only.clone(),
                ..found.clone()
            };
            let suspicion = facts.suspect(&found)?;
            let at = place(&found).unwrap_or((Stage::Update, (usize::MAX, 0, 0)));
            Some((at, rank, suspicion))
        });
        let all: Vec<_> = suspicions.collect();
        let (at, rank, mut suspicion) =
            all.iter().min_by_key(|(at, rank, _)| (*at, *rank))?.clone();
        let is_of_all = all.len() == self.ranks.len() && all.iter().all(|(other, ..)| *other == at);
        suspicion.place = match is_of_all {
            true => format!("all ranks, {}", suspicion.place),
            false => format!("rank {rank}, {}", suspicion.place),
        };
        Some(suspicion)
    }

    /// A sample that is on more or fewer ranks than in the whole batch.
    fn division(&self) -> Option<Suspicion> {
        let lines = |record: &StepRecord| {
            let mut lines: BTreeMap<String, usize> = BTreeMap::new();
            for name in record.items.keys() {
                if let Some((Stage::Input, label, "input_ids")) = parsed(name) {
                    let line = label.split('-').next().unwrap_or(label);
                    *lines.entry(line.to_owned()).or_default() += 1;
                }
            }
            lines
        };
        let expected = lines(self.whole);
        let mut of_ranks: Vec<_> = self.ranks.iter().map(lines).collect();
        // Ranks that divide tokens have the same samples, and the first of them speaks for all.
        for rank in (0..of_ranks.len()).rev() {
            let first = self.group_of(rank).start;
            if of_ranks[rank] != of_ranks[first] {
                return Some(Suspicion {
                    fault: Fault::Division,
                    place: format!("ranks {first} and {rank}"),
                    because: "they divide the same tokens, and have other samples".to_owned(),
                });
            }
            let other = self.ranks[rank].items.iter().find(|(name, values)| {
                let is_owners = name.starts_with("part/") && name.ends_with("/tokens");
                is_owners && self.ranks[first].items.get(*name) != Some(*values)
            });
            if let Some((name, _)) = other {
                let line = name.split('/').nth(1).unwrap_or_default();
                return Some(Suspicion {
                    fault: Fault::Division,
                    place: format!("ranks {first} and {rank}"),
                    because: format!("in line {line}, each takes other tokens for its own"),
                });
            }
            if rank != first {
                of_ranks[rank].clear();
            }
        }
        let mut all: BTreeMap<&String, usize> = BTreeMap::new();
        for (line, count) in of_ranks.iter().flatten() {
            *all.entry(line).or_default() += count;
        }
        // Steps over other lines have other data.
        if !all.keys().any(|line| expected.contains_key(*line)) {
            return None;
        }
        let having = |line: &String| {
            let ranks = of_ranks.iter().enumerate();
            let ranks = ranks.filter(|(_, lines)| lines.contains_key(line));
            listed(ranks.map(|(rank, _)| rank))
        };
        let lines: BTreeSet<&String> = expected.keys().chain(all.keys().copied()).collect();
        let differs = |line: &String| {
            let (expected, found) = (expected.get(line), all.get(line));
            (expected != found).then(|| [expected, found].map(|count| count.copied().unwrap_or(0)))
        };
        // One that is there twice tells where; one that is missing does not.
        let mut found = lines
            .into_iter()
            .filter_map(|line| Some((line, differs(line)?)));
        let found: Vec<_> = found.by_ref().collect();
        let twice = found.iter().find(|(_, [expected, found])| found > expected);
        let (line, [expected, times]) = twice.or(found.first())?;
        let place = match times {
            0 => "no rank".to_owned(),
            _ => having(line),
        };
        Some(Suspicion {
            fault: Fault::Division,
            place,
            because: format!(
                "line {line} is {times} times in the ranks' batch, and {expected} times in the whole"
            ),
        })
    }

    /// A divisor of the loss that is not the number of the batch's labelled tokens.
    fn counts(&self) -> Option<Suspicion> {
        let expected = self.whole.header.labelled?;
        let counts = self.ranks.iter().map(|record| record.header.labelled);
        let (rank, found) = counts
            .enumerate()
            .find(|(_, count)| *count != Some(expected))?;
        let labelled = |record: &StepRecord| {
            let own = record.header.rank.as_ref().map(|rank| rank.rank as f32);
            let of_item = |(name, values): (&String, &Vec<f32>)| {
                let Some((Stage::Input, line, item)) = parsed(name) else {
                    return 0;
                };
                let knows = record.items.contains_key(&format!("input/{line}/targets"));
                let owners = record.owners_of(name);
                let is_own = |token: usize| match &owners {
                    Some(owners) => owners.get(token).copied() == own,
                    None => true,
                };
                let counted = values.iter().enumerate();
                let counted = counted.filter(|(token, label)| **label >= 0.0 && is_own(*token));
                match (item, knows) {
                    ("targets", true) => counted.count(),
                    // The first token is not predicted.
                    ("labels", false) => counted.filter(|(token, _)| *token > 0).count(),
                    _ => 0,
                }
            };
            record.items.iter().map(of_item).sum::<usize>()
        };
        let counted = |record: &StepRecord| record.header.rank.as_ref().map(|rank| rank.labelled);
        let wrong = self.ranks.iter().enumerate();
        let wrong = wrong.filter(|(_, record)| counted(record) != Some(labelled(record)));
        let wrong: Vec<usize> = wrong.map(|(rank, _)| rank).collect();
        let (place, reason) = match &wrong[..] {
            [] if self.group_of(rank).len() > 1 => (
                format!("rank {rank}"),
                "the counts of ranks that divide tokens are not summed, or each counts all of them",
            ),
            [] => (format!("rank {rank}"), "the ranks' counts are not summed"),
            wrong => (
                listed(wrong.iter().copied()),
                "it counts tokens without a label, such as padding",
            ),
        };
        Some(Suspicion {
            fault: Fault::Count,
            place,
            because: format!(
                "the loss is divided by {} tokens, {expected} are labelled: {reason}",
                found.unwrap_or(0)
            ),
        })
    }

    /// Weights that differ on some ranks.
    fn weights(&self) -> Option<Suspicion> {
        let (rank, name) = self.first_of(Stage::Weight)?;
        if let Some(part) = self.other_part(Stage::Weight, rank, self.whole) {
            return Some(part);
        }
        let differs = |found: &&Comparison| {
            let mut rows = found.rows.iter();
            rows.any(|row| row.stage == Stage::Weight && row.exceeds())
        };
        let (wrong, all) = (self.found.iter().filter(differs).count(), self.ranks.len());
        if self.ranks[rank].owners(Stage::Weight, &name).is_some() {
            return None;
        }
        if wrong < all {
            return Some(Suspicion {
                fault: Fault::Replicas,
                place: format!("rank {rank}, {name}"),
                because: format!("{wrong} of {all} ranks have other weights"),
            });
        }
        // With the optimizer's state in shards, the others receive what one rank updates.
        let of = |record: &StepRecord| record.items.get(&format!("weight/{name}")).cloned();
        let (expected, found) = (of(self.whole)?, of(&self.ranks[rank])?);
        let owners = self.ranks[rank].items.get(&format!("part/{name}"))?;
        let is_equal = |place: usize| {
            let elements = pairs(&expected, &found).zip(owners);
            let own = elements.filter(|(_, owner)| **owner == place as f32);
            let distance = apart(own.map(|(pair, _)| pair));
            distance.map(|distance| distance <= EQUAL * EQUAL)
        };
        let wrong: Vec<usize> = (0..all)
            .filter(|place| is_equal(*place) == Some(false))
            .collect();
        let is_part = (0..all).any(|place| is_equal(place) == Some(true)) || wrong.len() < all;
        (is_part && !wrong.is_empty()).then(|| Suspicion {
            fault: Fault::Replicas,
            place: format!("{}, {name}", listed(wrong.iter().copied())),
            because: "the elements that it updates differ on all ranks".to_owned(),
        })
    }

    /// The rank and name of the first difference of a stage.
    fn first_of(&self, stage: Stage) -> Option<(usize, String)> {
        let found = self.found.iter().enumerate();
        let mut rows = found.filter_map(|(rank, found)| {
            let row = found.first()?;
            (row.stage == stage).then(|| (super::facts::rank(stage, &row.name), rank, &row.name))
        });
        let first = rows.by_ref().min()?;
        Some((first.1, first.2.clone()))
    }

    /// A rank whose parts are those of another rank.
    fn other_part(&self, stage: Stage, rank: usize, expected: &StepRecord) -> Option<Suspicion> {
        let record = &self.ranks[rank];
        let word = stage.to_string();
        let names = record.items.keys().filter_map(|name| match parsed(name)? {
            (of, "", item) if of == stage => Some(item.to_owned()),
            _ => None,
        });
        let names: Vec<String> = names.collect();
        // The share of equal elements if the part was that of a rank. Gaps between parameters are
        // not kept.
        let as_part = |other: usize| {
            let pairs = names.iter().flat_map(|name| {
                let values = record.items.get(&format!("{word}/{name}"));
                let expected = expected.items.get(&format!("{word}/{name}"));
                let owners = record.owners(stage, name).unwrap_or_default();
                let pairs = values
                    .into_iter()
                    .flatten()
                    .zip(expected.into_iter().flatten());
                let pairs = pairs
                    .zip(owners)
                    .filter(move |(_, owner)| **owner == other as f32);
                pairs.map(|((value, expected), _)| (f64::from(*value), f64::from(*expected)))
            });
            let pairs = pairs.filter(|pair| *pair != (0.0, 0.0));
            let (mut equal, mut all) = (0_u32, 0_u32);
            for (value, expected) in pairs {
                all += 1;
                equal += u32::from((value - expected).abs() <= EQUAL * expected.abs());
            }
            (all > 0).then(|| f64::from(equal) / f64::from(all))
        };
        let own = as_part(rank)?;
        let others = (0..self.ranks.len()).filter(|other| *other != rank);
        let others = others.filter_map(|other| Some((as_part(other)?, other)));
        let (most, other) = others.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (most > 0.7 && own < 0.5).then(|| Suspicion {
            fault: Fault::Part,
            place: format!("rank {rank}"),
            because: format!(
                "its part of {} is that of rank {other}",
                match stage {
                    Stage::Backward => "the summed gradients",
                    Stage::Update => "the updates",
                    _ => "the weights",
                }
            ),
        })
    }

    /// Weights that a rank received and that are not those of the ranks that have them.
    fn gathers(&self) -> Option<Suspicion> {
        for (word, pass) in [("received", "forward"), ("received-again", "backward")] {
            for (rank, record) in self.ranks.iter().enumerate() {
                let mut wrong = record.items.iter().filter_map(|(name, values)| {
                    let name = name.strip_prefix(&format!("{word}/"))?;
                    let held = self.held.items.get(&format!("weight/{name}"))?;
                    let relative = apart(pairs(held, values))?;
                    (relative > 0.0).then_some((name, values, relative))
                });
                if let Some((name, values, relative)) = wrong.next() {
                    let layer = super::facts::layer(Stage::Weight, name);
                    let layer = layer.map_or(String::new(), |layer| format!("layer {layer}, "));
                    let (fault, because) = self.gathered(name, values, relative);
                    return Some(Suspicion {
                        fault,
                        place: format!("rank {rank}, {layer}{name}, for the {pass} pass"),
                        because,
                    });
                }
            }
        }
        None
    }

    /// The fault of gathered weights, and the evidence.
    fn gathered(&self, name: &str, values: &[f32], relative: f64) -> (Fault, String) {
        let weight = |name: &str| self.held.items.get(&format!("weight/{name}"));
        let owners = self.ranks[0]
            .owners(Stage::Weight, name)
            .unwrap_or_default();
        for place in 0..self.ranks.len() {
            // The elements of one part, as they are in the parts of each rank.
            let of_place = |all: &[f32]| -> Vec<f32> {
                let own = all
                    .iter()
                    .zip(owners)
                    .filter(|(_, owner)| **owner == place as f32);
                own.map(|(value, _)| *value).collect()
            };
            let found = of_place(values);
            let is_of = |rank: usize| {
                let all = self.ranks[rank].items.get(&format!("weight/{name}"));
                all.is_some_and(|all| !found.is_empty() && of_place(all) == found)
            };
            let other = (0..self.ranks.len()).find(|rank| *rank != place && is_of(*rank));
            if let Some(other) = other.filter(|_| !is_of(place)) {
                let because = format!("the part at place {place} is that of rank {other}");
                return (Fault::Order, because);
            }
        }
        let layer = super::facts::layer(Stage::Weight, name);
        let others = self.held.items.iter().filter_map(|(other, held)| {
            let other = other.strip_prefix("weight/")?;
            let of_other = super::facts::layer(Stage::Weight, other)?;
            let renamed = other.replacen(&format!(".{of_other}."), &format!(".{}.", layer?), 1);
            (other != name && renamed == name && held == values).then_some(of_other)
        });
        if let Some(other) = others.min() {
            let because = format!("they are those of layer {other}");
            return (Fault::StaleGather, because);
        }
        let because = match weight(name) {
            Some(_) if relative < 0.1 => {
                format!("they differ by {relative:.1e} of the norm, as those of an earlier step do")
            }
            _ => format!("they differ by {relative:.1e} of the norm"),
        };
        (Fault::StaleGather, because)
    }

    /// Sums that are not those of the gradients that the ranks gave.
    fn sums(&self) -> Option<Suspicion> {
        let sums = self.given_sums();
        for (&name, all) in &sums {
            let given = |rank: usize| self.ranks[rank].items.get(&format!("given/{name}"));
            let count = all.len();
            for (rank, record) in self.ranks.iter().enumerate() {
                let Some(summed) = record.items.get(&format!("backward/{name}")) else {
                    continue;
                };
                let owners = record.owners(Stage::Backward, name);
                let is_own = |owner: Option<&f32>| owner == Some(&(rank as f32));
                let own = |at: usize| owners.is_none_or(|owners| is_own(owners.get(at)));
                let against = |expected: &dyn Fn(usize) -> f64| {
                    let places = (0..count.min(summed.len())).filter(|at| own(*at));
                    let pairs = places.map(|at| (expected(at), f64::from(summed[at])));
                    apart(pairs.collect::<Vec<_>>().into_iter())
                };
                let wrong = against(&|at| all[at]).filter(|apart| *apart > EQUAL);
                let Some(wrong) = wrong else {
                    continue;
                };
                let value = |other: usize, at: usize| {
                    let values = given(other).and_then(|values| values.get(at));
                    values.map_or(0.0, |value| f64::from(*value))
                };
                let ranks = self.ranks.len();
                let mut causes = vec![
                    (
                        against(&|at| all[at] / ranks as f64),
                        "it is the mean".to_owned(),
                    ),
                    (
                        against(&|at| value(rank, at)),
                        format!("it is rank {rank}'s alone"),
                    ),
                ];
                for other in 0..ranks {
                    let lacks = against(&|at| all[at] - value(other, at));
                    causes.push((lacks, format!("rank {other}'s gradient is not in it")));
                    let twice = against(&|at| all[at] + value(other, at));
                    causes.push((twice, format!("rank {other}'s gradient is in it twice")));
                }
                let named = causes.into_iter().find(|(apart, _)| {
                    apart.is_some_and(|apart| apart < EQUAL && apart < 0.1 * wrong)
                });
                if let Some((_, because)) = named {
                    return Some(Suspicion {
                        fault: Fault::Sum,
                        place: format!("rank {rank}, {name}"),
                        because,
                    });
                }
                let of_sum = |(name, sum): (&&str, &Vec<f64>)| {
                    let sum = sum.iter().map(|value| *value as f32).collect();
                    (format!("backward/{name}"), sum)
                };
                let expected = StepRecord {
                    header: self.held.header.clone(),
                    items: sums.iter().map(of_sum).collect(),
                };
                if let Some(part) = self.other_part(Stage::Backward, rank, &expected) {
                    return Some(part);
                }
                return Some(Suspicion {
                    fault: Fault::Sum,
                    place: format!("rank {rank}, {name}"),
                    because: format!(
                        "it differs by {wrong:.1e} of its norm from the sum of what ranks gave"
                    ),
                });
            }
        }
        None
    }

    /// The sums of the gradients that the ranks gave, by name.
    fn given_sums(&self) -> BTreeMap<&str, Vec<f64>> {
        let given = self.ranks.iter().flat_map(|record| &record.items);
        let given = given.filter_map(|(name, values)| Some((name.strip_prefix("given/")?, values)));
        let mut sums: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, values) in given {
            let sum = sums.entry(name).or_default();
            sum.resize(sum.len().max(values.len()), 0.0);
            let pairs = sum.iter_mut().zip(values);
            pairs.for_each(|(sum, value)| *sum += f64::from(*value));
        }
        sums
    }

    /// A norm that differs although the gradients do not.
    fn norms(&self) -> Option<Suspicion> {
        let expected = self.whole.header.gradient_norm?;
        let allowed = self.facts.first()?.allowed(Stage::Backward);
        let norms = self.ranks.iter().map(|record| record.header.gradient_norm);
        let (rank, found) = norms.enumerate().find(|(_, norm)| {
            norm.is_some_and(|norm| (norm - expected).abs() > allowed * expected.abs())
        })?;
        Some(Suspicion {
            fault: Fault::GradientNorm,
            place: format!("rank {rank}"),
            because: format!(
                "the gradients are equal, their norm is {:.6} and not {expected:.6}",
                found.unwrap_or(f64::NAN)
            ),
        })
    }

    /// Parts that keep their values on a rank.
    fn updates(&self) -> Option<Suspicion> {
        let (rank, name) = self.first_of(Stage::Update)?;
        let key = format!("update/{name}");
        let (found, expected) = (
            self.ranks[rank].items.get(&key)?,
            self.whole.items.get(&key)?,
        );
        let part = self.ranks[rank].items.get(&format!("part/{name}"));
        // With the optimizer's state in shards, a rank may lack the update of another's part.
        for place in 0..self.ranks.len() {
            let is_of = |at: usize| part.is_none_or(|part| part.get(at) == Some(&(place as f32)));
            let places = (0..found.len().min(expected.len())).filter(|at| is_of(*at));
            let places: Vec<usize> = places.collect();
            let is_zero = places.iter().all(|at| found[*at] == 0.0);
            if is_zero && places.iter().any(|at| expected[*at] != 0.0) {
                let because = match part {
                    Some(_) => format!("the elements of rank {place} have their earlier values"),
                    None => "it has its earlier value".to_owned(),
                };
                return Some(Suspicion {
                    fault: Fault::MissedUpdate,
                    place: format!("rank {rank}, {name}"),
                    because,
                });
            }
        }
        self.other_part(Stage::Update, rank, self.whole)
    }
}

fn pairs<'a>(left: &'a [f32], right: &'a [f32]) -> impl Iterator<Item = (f64, f64)> + 'a {
    let both = left.iter().zip(right);
    both.map(|(left, right)| (f64::from(*left), f64::from(*right)))
}

/// Names ranks.
pub(super) fn listed(ranks: impl Iterator<Item = usize>) -> String {
    let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    match &ranks[..] {
        [one] => format!("rank {one}"),
        [first @ .., last] => format!("ranks {} and {last}", first.join(", ")),
        [] => "no rank".to_owned(),
    }
}
