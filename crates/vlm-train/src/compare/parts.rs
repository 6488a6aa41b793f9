//! A step of ranks that divide tokens beside a whole one: the tokens at which it differs tell where
//! ranks went wrong together.

use std::collections::{BTreeMap, BTreeSet};

use super::facts::{Pair, rank};
use super::ranks::{Run, listed};
use super::{Fault, Row, Stage, Suspicion};

/// A rank's token of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Token<'a> {
    rank: usize,
    line: &'a str,
    token: usize,
}

/// The recorded tokens of an item, and if they differ.
type Tokens<'a> = BTreeMap<Token<'a>, bool>;

impl Run<'_> {
    /// The suspicion that the first difference raises, if ranks divide tokens.
    pub(super) fn between_parts(&self) -> Option<Suspicion> {
        let is_divided = (0..self.ranks.len()).any(|rank| self.group_of(rank).len() > 1);
        let first = self.first().filter(|_| is_divided)?;
        let name = &first.name[..];
        let tokens = self.tokens(first);
        let place = |fault, because: String| {
            let ranks: BTreeSet<usize> = differing(&tokens).map(|token| token.rank).collect();
            let layer = first
                .layer
                .map_or(String::new(), |n| format!("layer {n}, "));
            Some(Suspicion {
                fault,
                place: format!("{}, {layer}{name}", listed(ranks.into_iter())),
                because,
            })
        };
        let at = differing(&tokens).next();
        match (first.stage, rank(first.stage, name)) {
            (Stage::Input, _) if name == "position_ids" => {
                let because = format!("the tokens are equal; {}", self.ids_at(at?));
                place(Fault::PositionIds, because)
            }
            (Stage::Input, _) if name == "input_ids" => {
                let because = "tokens are not those of their places in the whole batch";
                place(Fault::Division, because.to_owned())
            }
            (Stage::Input, _) if name == "targets" => {
                let because = "the tokens and labels are equal, what is predicted is not";
                place(Fault::Border, because.to_owned())
            }
            (Stage::Forward, (5, _, part @ (3 | 4))) if self.is_of_state(first) => {
                let begins = |token: &Token<'_>| self.begins_on_its_rank(token);
                let inner = differing(&tokens).any(begins);
                match (part, inner) {
                    (_, true) => {
                        let because = "tokens differ whose sequence begins on their rank";
                        place(Fault::Sequences, because.to_owned())
                    }
                    (3, false) => {
                        let because = "the first tokens of a rank differ, which read the last ones \
                                       of the rank before";
                        place(Fault::Halo, because.to_owned())
                    }
                    _ => {
                        let because = "tokens alone differ whose sequence begins on an earlier rank, \
                                       and what the rule reads of them is equal";
                        place(Fault::State, because.to_owned())
                    }
                }
            }
            (Stage::Forward, (5, _, 4)) => {
                let because = match differing(&tokens).find(|token| token.token == 0) {
                    Some(Token { line, .. }) => format!(
                        "q, k and v are equal on all ranks; even the first token of line {line} \
                         differs, which sees itself alone"
                    ),
                    None => "q, k and v are equal on all ranks, and what is mixed of them is not"
                        .to_owned(),
                };
                place(Fault::Exchange, because)
            }
            (Stage::Backward, _) => self.lost_on_the_way(first),
            _ => None,
        }
    }

    /// The first row that differs, of any rank.
    fn first(&self) -> Option<&Row> {
        let rows = self.found.iter().filter_map(|found| found.first());
        rows.min_by_key(|row| (row.stage, rank(row.stage, &row.name)))
    }

    fn pairs<'a>(
        &'a self,
        rank: usize,
        row: &Row,
    ) -> impl Iterator<Item = (&'a str, &'a Pair<'a>)> {
        let pairs = self.facts[rank].pairs.get(&(row.stage, row.name.clone()));
        let pairs = pairs.into_iter().flatten();
        pairs.map(|(line, pair)| (&line[..], pair))
    }

    /// The tokens of an item.
    fn tokens(&self, row: &Row) -> Tokens<'_> {
        let mut sizes: BTreeMap<Token<'_>, [f64; 2]> = BTreeMap::new();
        for rank in 0..self.ranks.len() {
            for (line, pair) in self.pairs(rank, row) {
                let ids = row.stage == Stage::Input && row.name == "position_ids";
                let columns = pair.shape.iter().skip(1).product::<usize>().max(1);
                for (at, left, right) in pair.elements() {
                    let token = if ids { at % columns } else { at / columns };
                    let token = Token { rank, line, token };
                    let [apart, size] = sizes.entry(token).or_default();
                    let (left, right) = (f64::from(left), f64::from(right));
                    let squared = (left - right).powi(2);
                    *apart += if squared.is_finite() {
                        squared
                    } else {
                        f64::INFINITY
                    };
                    *size += left * left;
                }
            }
        }
        let mean = sizes.values().map(|[_, size]| size).sum::<f64>() / sizes.len().max(1) as f64;
        let differs = |[apart, size]: [f64; 2]| apart > row.allowed.powi(2) * size.max(mean);
        let tokens = sizes.into_iter();
        tokens
            .map(|(token, sizes)| (token, differs(sizes)))
            .collect()
    }

    /// True if no earlier rank has a token of its sequence.
    fn begins_on_its_rank(&self, token: &Token<'_>) -> bool {
        let owners = format!("part/{}/tokens", token.line);
        let owners = self.ranks[token.rank].items.get(&owners);
        owners.is_none_or(|owners| owners.first() == Some(&(token.rank as f32)))
    }

    fn is_of_state(&self, row: &Row) -> bool {
        self.facts.iter().any(|facts| facts.is_of_state(row.layer))
    }

    /// The ids of a token on both sides.
    fn ids_at(&self, at: &Token<'_>) -> String {
        let name = (Stage::Input, "position_ids".to_owned());
        let pair = self.facts[at.rank].pairs.get(&name);
        let pair = pair.and_then(|lines| lines.get(at.line));
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        for (place, left, right) in pair.into_iter().flat_map(Pair::elements) {
            let columns = pair.map_or(1, |pair| pair.shape.iter().skip(1).product());
            if place % columns.max(1) == at.token {
                expected.push(left);
                found.push(right);
            }
        }
        let Token { line, token, .. } = at;
        format!("token {token} of line {line} has ids {found:?}, expected {expected:?}")
    }

    /// Gradients that end at an exchange: those of the product after it are equal.
    fn lost_on_the_way(&self, first: &Row) -> Option<Suspicion> {
        let layer = first.layer?;
        let is_in = |name: &str| {
            ["q_proj", "k_proj", "v_proj", "in_proj"]
                .iter()
                .any(|p| name.contains(p))
        };
        let is_out = |name: &str| name.contains("o_proj") || name.contains("out_proj");
        let rows = |is: &dyn Fn(&str) -> bool| {
            let rows = self.found.iter().flat_map(|found| &found.rows);
            let rows = rows.filter(|row| row.stage == Stage::Backward && row.layer == Some(layer));
            let rows = rows.filter(|row| is(&row.name));
            rows.map(Row::exceeds).collect::<Vec<bool>>()
        };
        let (inner, outer) = (rows(&is_in), rows(&is_out));
        let ends = !outer.is_empty() && !outer.contains(&true) && inner.contains(&true);
        (ends && first.name.contains("layers.")).then(|| Suspicion {
            fault: Fault::Exchange,
            place: format!("layer {layer}, {}", first.name),
            because:
                "the gradient of the product after the exchange is equal, those of the products \
                      before it are not"
                    .to_owned(),
        })
    }
}

fn differing<'a, 'b>(tokens: &'b Tokens<'a>) -> impl Iterator<Item = &'b Token<'a>> {
    let tokens = tokens.iter().filter(|(_, differs)| **differs);
    tokens.map(|(token, _)| token)
}
