//! The common items of two records, by stage and name, in causal order.

use std::collections::{BTreeMap, BTreeSet};

use vlm_models::sampled_elements;

use super::{Comparison, Row, Stage};
use crate::record::StepRecord;

/// Largest relative differences explained by rounding in weights, forward, backward and update, for
/// each type. In f32 they are the differences between CPUs, GPUs and torch, with a margin of 10.
/// AdamW divides by the gradient, so rounding flips the sign of the smallest updates.
/// The last number is the factor of a model with states, which amplify rounding from token to token;
/// in f16, whose small values have fewer bits, torch itself is 2.9e-2 and 0.11 from its f32.
const ALLOWED: [(&str, [f64; 4], f64); 3] = [
    ("f32", [1e-6, 2e-5, 3e-4, 5e-2], 4.0),
    ("f16", [1e-3, 5e-3, 2e-2, 0.5], 16.0),
    ("bf16", [8e-3, 4e-2, 0.12, 0.5], 4.0),
];
/// The factor of a model with experts: rounding sends a token to others. In bf16, torch's own
/// activations are 8e-2 from its f32.
const EXPERTS: f64 = 4.0;
/// Gradients with a larger relative difference explain that of their updates.
const ROUNDED: f32 = 1e-2;
/// Norms below this share of the median of their stage are rounding of larger ones.
const FLOOR: f64 = 1e-4;

/// An item of one sample in both records.
pub(super) struct Pair<'a> {
    pub(super) shape: &'a [usize],
    /// The places of elements in both records, with both values; `None` if shapes differ.
    pub(super) elements: Option<Vec<(usize, f32, f32)>>,
}

impl<'a> Pair<'a> {
    /// Returns `None` if the records have no element in common.
    fn new(name: &str, left: &'a StepRecord, right: &StepRecord) -> Option<Self> {
        let shape = left.header.shapes.get(name)?;
        if right.header.shapes.get(name) != Some(shape) {
            let elements = None;
            return Some(Self { shape, elements });
        }
        let all: usize = shape.iter().product();
        let kept = |record: &StepRecord| {
            let values = record.items.get(name)?;
            // Inputs are whole.
            let count = match values.len() == all {
                true => all,
                false => record.header.samples,
            };
            let places = sampled_elements(all, count).zip(values.iter().copied());
            let Some(owners) = record.owners_of(name) else {
                return Some(places.collect::<Vec<_>>());
            };
            let own = record.header.rank.as_ref().map(|rank| rank.rank as f32);
            let places = places.zip(owners.iter());
            let own = places.filter(|(_, owner)| Some(**owner) == own);
            Some(own.map(|(place, _)| place).collect())
        };
        let (left, right) = (kept(left)?, kept(right)?);
        let (mut elements, mut others) = (Vec::with_capacity(left.len()), right.iter().peekable());
        for (place, value) in &left {
            while others.next_if(|(other, _)| other < place).is_some() {}
            if let Some((_, other)) = others.next_if(|(other, _)| other == place) {
                elements.push((*place, *value, *other));
            }
        }
        (all == 0 || !elements.is_empty()).then_some(Self {
            shape,
            elements: Some(elements),
        })
    }

    pub(super) fn elements(&self) -> impl Iterator<Item = (usize, f32, f32)> {
        self.elements.iter().flatten().copied()
    }

    /// The squares of the difference and of the left side.
    fn squares(&self) -> (f64, f64) {
        if self.elements.is_none() {
            return (f64::INFINITY, 1.0);
        }
        self.elements()
            .fold((0.0, 0.0), |(apart, size), (_, left, right)| {
                let (left, right) = (f64::from(left), f64::from(right));
                let same = left == right || (left.is_nan() && right.is_nan());
                let next = if same { 0.0 } else { (left - right).powi(2) };
                let next = if next.is_nan() { f64::INFINITY } else { next };
                let left = if left.is_finite() { left * left } else { 0.0 };
                (apart + next, size + left)
            })
    }
}

/// Both records by stage and name.
pub(super) struct Facts<'a> {
    pub(super) left: &'a StepRecord,
    right: &'a StepRecord,
    /// By stage and name, of each sample.
    pub(super) pairs: BTreeMap<(Stage, String), BTreeMap<String, Pair<'a>>>,
    pub(super) only: [Vec<String>; 2],
}

/// The stage of an item, the line of its sample, and its name.
pub(crate) fn parsed(name: &str) -> Option<(Stage, &str, &str)> {
    let (stage, rest) = name.split_once('/')?;
    let line_item = |stage| rest.split_once('/').map(|(line, name)| (stage, line, name));
    match stage {
        "input" => line_item(Stage::Input),
        "forward" => line_item(Stage::Forward),
        "weight" => Some((Stage::Weight, "", rest)),
        "update" => Some((Stage::Update, "", rest)),
        "backward" if rest.contains('/') => line_item(Stage::Backward),
        "backward" => Some((Stage::Backward, "", rest)),
        _ => None,
    }
}

/// The number after a word in a name.
fn number_after(name: &str, word: &str) -> Option<usize> {
    let rest = &name[name.find(word)? + word.len()..];
    rest.split('.').next()?.parse().ok()
}

/// The layer or block of an item.
pub(super) fn layer(stage: Stage, name: &str) -> Option<usize> {
    let words: &[&str] = match stage {
        Stage::Forward => &["block.", "hidden.", "norm.", "attn.", "mixed.", "conv."],
        Stage::Backward if name.starts_with("hidden.") => &["hidden."],
        _ => &["layers.", "blocks."],
    };
    let found = words.iter().find_map(|word| number_after(name, word));
    let end = || name.rsplit('.').next()?.parse().ok();
    found.or_else(|| if stage == Stage::Forward { end() } else { None })
}

/// Activations of a decoder layer in the order of their causes.
const ORDER: [(&str, usize); 12] = [
    (".in", 0),
    (".attn", 1),
    ("q_pre", 2),
    ("k_pre", 2),
    ("v.", 2),
    ("q_post", 3),
    ("k_post", 3),
    ("conv", 3),
    ("mixed", 4),
    ("attn.", 5),
    (".mlp", 6),
    (".out", 7),
];
/// Those before and after the layers.
const GROUPS: [(&str, usize); 7] = [
    ("vision.patch_embed", 0),
    ("vision.block.", 1),
    ("vision.deepstack.", 2),
    ("vision.merged", 3),
    ("inputs_embeds", 4),
    ("hidden.final_norm", 6),
    ("logits", 7),
];

/// The place of an item in the order of causes.
pub(super) fn rank(stage: Stage, name: &str) -> (usize, usize, usize) {
    let depth = layer(stage, name).unwrap_or(0);
    match stage {
        Stage::Input => (usize::from(name == "position_ids"), 0, 0),
        Stage::Forward => match GROUPS.iter().find(|(start, _)| name.starts_with(start)) {
            Some((_, group)) => (*group, depth, 0),
            None => {
                let part = |(text, _): &&(&str, usize)| match text.strip_prefix('.') {
                    Some(_) => name.ends_with(text) && !name.starts_with("attn."),
                    None => name.starts_with(text),
                };
                (
                    5,
                    depth,
                    ORDER.iter().find(part).map_or(8, |(_, part)| *part),
                )
            }
        },
        // From the head to the first layer, the gradient of an output before those in its layer.
        Stage::Backward => {
            let group = match name {
                name if name.contains("lm_head") => 0,
                name if name.contains("visual.") => 4,
                name if name.contains("embed_tokens") => 3,
                name if layer(stage, name).is_some() => 2,
                _ => 1,
            };
            let inner = usize::from(!name.starts_with("hidden."));
            (group, usize::MAX - depth, inner)
        }
        Stage::Weight | Stage::Update => (0, depth, 0),
    }
}

/// Leaves out elements of updates whose gradients differ by as much: AdamW divides by the gradient,
/// so rounding of a small one is all of its update.
fn explain_updates(pairs: &mut BTreeMap<(Stage, String), BTreeMap<String, Pair<'_>>>) {
    let mut rounded: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for ((_, name), lines) in pairs
        .iter()
        .filter(|((stage, _), _)| *stage == Stage::Backward)
    {
        let elements = lines.get("").into_iter().flat_map(Pair::elements);
        let elements =
            elements.filter(|(_, left, right)| (left - right).abs() > ROUNDED * left.abs());
        rounded.insert(name.clone(), elements.map(|(place, ..)| place).collect());
    }
    for ((stage, name), lines) in pairs.iter_mut() {
        let Some(rounded) = rounded.get(name).filter(|_| *stage == Stage::Update) else {
            continue;
        };
        let elements = lines.get_mut("").and_then(|pair| pair.elements.as_mut());
        if let Some(elements) = elements {
            elements.retain(|(place, ..)| !rounded.contains(place));
        }
    }
}

impl<'a> Facts<'a> {
    pub(super) fn of(left: &'a StepRecord, right: &'a StepRecord) -> Self {
        let mut pairs: BTreeMap<(Stage, String), BTreeMap<String, Pair<'a>>> = BTreeMap::new();
        for name in left
            .items
            .keys()
            .filter(|name| right.items.contains_key(*name))
        {
            if let Some((stage, line, item)) = parsed(name)
                && let Some(pair) = Pair::new(name, left, right)
            {
                let name_pairs = pairs.entry((stage, item.to_owned())).or_default();
                name_pairs.insert(line.to_owned(), pair);
            }
        }
        explain_updates(&mut pairs);
        let only = [(left, right), (right, left)].map(|(one, other)| {
            let missing = one
                .items
                .keys()
                .filter(|name| parsed(name).is_some() && !other.items.contains_key(*name));
            missing.cloned().collect()
        });
        Self {
            left,
            right,
            pairs,
            only,
        }
    }

    pub(super) fn allowed(&self, stage: Stage) -> f64 {
        let of = |record: &StepRecord| {
            let known = ALLOWED
                .iter()
                .position(|(name, ..)| *name == record.header.precision);
            known.unwrap_or(0)
        };
        let (_, [weight, forward, backward, update], states) =
            ALLOWED[of(self.left).max(of(self.right))];
        let has = |part: &str| self.pairs.keys().any(|(_, name)| name.contains(part));
        let states = match (has("linear_attn."), has(".experts.")) {
            (true, _) => states,
            (false, true) => EXPERTS,
            (false, false) => 1.0,
        };
        match stage {
            Stage::Input => 0.0,
            Stage::Weight => weight,
            Stage::Forward => forward * states,
            Stage::Backward => backward * states,
            Stage::Update => update,
        }
    }

    /// True if a gradient has an element that is not finite, on a side that is in f16.
    pub(super) fn overflows(&self, name: &str) -> bool {
        let [left_narrow, right_narrow] =
            [self.left, self.right].map(|record| record.header.precision == "f16");
        let pairs = self.pairs.get(&(Stage::Backward, name.to_owned()));
        let pairs = pairs.into_iter().flat_map(BTreeMap::values);
        let mut elements = pairs.flat_map(Pair::elements);
        elements.any(|(_, left, right)| {
            (left_narrow && !left.is_finite()) || (right_narrow && !right.is_finite())
        })
    }

    /// All that rules need, without a suspicion.
    pub(super) fn comparison(&self) -> Comparison {
        let mut sizes: BTreeMap<Stage, Vec<f64>> = BTreeMap::new();
        let mut found = Vec::new();
        for ((stage, name), pairs) in &self.pairs {
            let squares = pairs.values().map(Pair::squares);
            let (apart, size) = squares.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
            let counts = pairs.values().map(|pair| pair.elements().count());
            let count = counts.sum::<usize>().max(1);
            sizes.entry(*stage).or_default().push(size / count as f64);
            found.push((*stage, name, apart, size, count));
        }
        for sizes in sizes.values_mut() {
            sizes.sort_by(f64::total_cmp);
        }
        let mut rows: Vec<Row> = Vec::with_capacity(found.len());
        for (stage, name, apart, size, count) in found {
            let sizes = &sizes[&stage];
            let median = sizes[sizes.len() / 2] * count as f64;
            let size = size.max(median * FLOOR * FLOOR).sqrt();
            let difference = match apart {
                0.0 => 0.0,
                apart => apart.sqrt() / size.max(f64::MIN_POSITIVE),
            };
            rows.push(Row {
                stage,
                name: name.clone(),
                layer: layer(stage, name),
                difference,
                allowed: self.allowed(stage),
                rank: None,
            });
        }
        rows.sort_by_key(|row| (row.stage, rank(row.stage, &row.name), row.name.clone()));
        Comparison {
            rows,
            only: self.only.clone(),
            settings: self.settings(),
            losses: [self.left.header.loss, self.right.header.loss],
            suspicion: None,
        }
    }

    fn settings(&self) -> Vec<[String; 3]> {
        let [left, right] = [self.left, self.right].map(|record| &record.header.settings);
        let names: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
        let value = |of: &BTreeMap<String, String>, name: &String| {
            of.get(name).cloned().unwrap_or_else(|| "-".to_owned())
        };
        let rows = names
            .into_iter()
            .map(|name| [name.clone(), value(left, name), value(right, name)]);
        rows.filter(|[_, left, right]| left != right).collect()
    }

    /// A setting that both sides have, with other values.
    pub(super) fn differs(&self, comparison: &Comparison, word: &str) -> bool {
        let known = |value: &String| value != "-";
        let mut rows = comparison.settings.iter();
        rows.any(|[name, left, right]| name.contains(word) && known(left) && known(right))
    }
}

impl Facts<'_> {
    /// The first gradient with a word in its name that is 0 only on one side.
    pub(super) fn lost(&self, word: &str) -> Option<&str> {
        let names = self.pairs.keys();
        let mut gradients =
            names.filter(|(stage, name)| *stage == Stage::Backward && name.contains(word));
        let (_, name) = gradients.find(|(_, name)| self.zeros(name).is_some())?;
        Some(name)
    }

    /// The share of a gradient's elements that are 0 only on one side, and their heads, if they are
    /// all elements of some heads.
    pub(super) fn zeros(&self, name: &str) -> Option<(f64, Option<String>)> {
        let pairs = self.pairs.get(&(Stage::Backward, name.to_owned()))?;
        let (mut zero, mut all) = (0_usize, 0_usize);
        let (mut with, mut without) = (BTreeSet::new(), BTreeSet::new());
        let head_dim = self.head_dim();
        for pair in pairs.values() {
            let columns: usize = pair.shape.iter().skip(1).product();
            for (place, left, right) in pair.elements() {
                let head = head_dim.map(|dim| place / columns.max(1) / dim);
                let is_lost = (left == 0.0) != (right == 0.0);
                all += 1;
                zero += usize::from(is_lost);
                _ = if is_lost {
                    with.insert(head)
                } else {
                    without.insert(head)
                };
            }
        }
        // Single zeros may be rounding.
        if zero * 20 < all || zero == 0 {
            return None;
        }
        let whole: Vec<String> = with
            .difference(&without)
            .flatten()
            .map(usize::to_string)
            .collect();
        let is_of_heads =
            with.is_disjoint(&without) && !without.is_empty() && name.contains("_proj");
        let heads =
            (is_of_heads && !whole.is_empty()).then(|| format!("head {}", whole.join(", ")));
        Some((zero as f64 / all as f64, heads))
    }

    /// Channels of a head, from q of the first layer.
    fn head_dim(&self) -> Option<usize> {
        let pairs = self.pairs.get(&(Stage::Forward, "q_pre.0".to_owned()))?;
        pairs
            .values()
            .next()?
            .shape
            .last()
            .copied()
            .filter(|dim| *dim > 0)
    }

    /// The factor between a gradient's sides, if it is equal for all elements.
    pub(super) fn factor(&self, name: &str) -> Option<f64> {
        let pairs = self.pairs.get(&(Stage::Backward, name.to_owned()))?;
        let sum = |of: fn(f64, f64) -> f64| -> f64 {
            let elements = pairs.values().flat_map(Pair::elements);
            let terms = elements.map(|(_, left, right)| of(f64::from(left), f64::from(right)));
            terms.sum()
        };
        let (left, both) = (sum(|left, _| left * left), sum(|left, right| left * right));
        let right = sum(|_, right| right * right);
        let factor = both / left;
        let rest = (right - factor * both).max(0.0);
        (factor.is_finite() && rest <= 1e-6 * right && (factor - 1.0).abs() > 1e-3)
            .then_some(factor)
    }

    /// Calls `each` with line, token and both sides of the elements of an activation.
    pub(super) fn each_by_token(&self, name: &str, mut each: impl FnMut(&str, usize, f32, f32)) {
        let Some(pairs) = self.pairs.get(&(Stage::Forward, name.to_owned())) else {
            return;
        };
        for (line, pair) in pairs {
            let width: usize = pair.shape.iter().skip(1).product();
            for (place, left, right) in pair.elements() {
                each(line, place / width.max(1), left, right);
            }
        }
    }

    /// True if the sides of an activation differ by a factor that is equal for all channels of a
    /// token.
    pub(super) fn is_constant_by_token(&self, name: &str) -> bool {
        let mut ranges: BTreeMap<(String, usize), (f64, f64, usize)> = BTreeMap::new();
        let mut largest = 0.0_f32;
        self.each_by_token(name, |_, _, left, _| largest = largest.max(left.abs()));
        self.each_by_token(name, |line, token, left, right| {
            // The quotient of small elements is dominated by rounding.
            if left.abs() > 0.05 * largest {
                let factor = f64::from(right) / f64::from(left);
                let range = ranges
                    .entry((line.to_owned(), token))
                    .or_insert((factor, factor, 0));
                *range = (range.0.min(factor), range.1.max(factor), range.2 + 1);
            }
        });
        let several = ranges.values().filter(|(_, _, count)| *count > 1);
        let several: Vec<&(f64, f64, usize)> = several.collect();
        let apart =
            |(least, most, _): &&(f64, f64, usize)| (most - 1.0).abs().max((least - 1.0).abs());
        let largest = several.iter().map(apart).fold(0.0, f64::max);
        !several.is_empty()
            && largest > 0.0
            && several
                .iter()
                .all(|(least, most, _)| most - least < 0.02 * largest + 1e-6)
    }
}
