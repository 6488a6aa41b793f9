//! Two recorded steps: where they part, and a suspicion why.
//!
//! Items are compared in the order of their causes: inputs, weights, the forward pass, the backward
//! pass, the update. The first whose difference exceeds the rounding of the coarser type decides:
//! what it is computed from is equal, so the operation between is at fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use qwen_vl::sampled_elements;

use crate::record::StepRecord;

/// The part of a step that an item is of, in the order of causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Tokens, labels, position ids, pictures.
    Input,
    /// Parameters before the step.
    Weight,
    /// Activations.
    Forward,
    /// Gradients of activations and parameters.
    Backward,
    /// What the step added to parameters.
    Update,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Update => "update",
        })
    }
}

/// An item of both records, all samples of the batch together.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its stage.
    pub stage: Stage,
    /// Its name, without the line of a sample.
    pub name: String,
    /// The layer of the decoder or the block of the tower, where it is of one.
    pub layer: Option<usize>,
    /// The norm of the difference relative to the norm; infinite where shapes differ, or one has an
    /// infinite element or NaN where the other has none.
    pub difference: f64,
    /// The largest that the types' rounding explains.
    pub allowed: f64,
}

impl Row {
    /// True if rounding does not explain the difference.
    pub fn exceeds(&self) -> bool {
        self.difference > self.allowed
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Other tokens, labels or pictures.
    Data,
    /// Other position ids of the same tokens.
    PositionIds,
    /// An adapter that one side does not have, or does not apply.
    AdapterMissing,
    /// A head that is the table of words on one side alone.
    UntiedHead,
    /// Other weights.
    Weights,
    /// The tower's input or one of its blocks.
    Vision,
    /// Words or merged patches in other places.
    Embeddings,
    /// The norm's epsilon.
    Epsilon,
    /// The norm.
    Norm,
    /// Dropout.
    Dropout,
    /// Another scale of an adapter.
    AdapterScale,
    /// A product with a weight.
    Projection,
    /// Axes of the position ids exchanged in a rotation.
    Axes,
    /// Pairs of channels, or frequencies, of a rotation.
    Pairing,
    /// Which tokens attend to which.
    Mask,
    /// The factor of attention's scores.
    AttentionScale,
    /// Sums or products in 16 bits.
    Accumulation,
    /// The feed-forward network.
    FeedForward,
    /// The output head.
    Head,
    /// What the losses are divided by, or their labels.
    Loss,
    /// A gradient that is 0 on one side.
    LostGradient,
    /// A gradient of another size.
    GradientScale,
    /// A gradient.
    Gradient,
    /// The optimizer or its numbers.
    Optimizer,
}

impl Fault {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Data => "other data: tokens, labels or pictures differ before the model",
            Self::PositionIds => "position ids: the same tokens have other ids",
            Self::AdapterMissing => "an adapter that one side does not apply",
            Self::UntiedHead => "a tied head that is untied on one side",
            Self::Weights => "other weights: one that was not loaded, or another checkpoint",
            Self::Vision => "the vision tower, whose weights and patches are equal",
            Self::Embeddings => "word embeddings, or the places of merged patches among them",
            Self::Epsilon => "the epsilon of the norm",
            Self::Norm => "the norm, whose input and weight are equal",
            Self::Dropout => "dropout that one side has",
            Self::AdapterScale => "the adapter: its scale, or dropout before it",
            Self::Projection => "the product with a weight that is equal",
            Self::Axes => "axes exchanged in the rotation: tokens of pictures alone differ",
            Self::Pairing => "the pairing of channels, or the frequencies, of the rotation",
            Self::Mask => "the attention mask",
            Self::AttentionScale => "the scale of attention's scores",
            Self::Accumulation => "sums in 16 bits",
            Self::FeedForward => "the feed-forward network, whose input and weights are equal",
            Self::Head => "the output head",
            Self::Loss => "the loss: its labels, or what it is divided by",
            Self::LostGradient => "a gradient that is lost: 0 on one side alone",
            Self::GradientScale => {
                "a gradient of another size: the rule of the loss, or accumulation"
            }
            Self::Gradient => "the backward of an operation whose forward is equal",
            Self::Optimizer => "the optimizer: epsilon, betas, decay, clipping or rate",
        }
    }
}

/// Why two steps part.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspicion {
    /// The kind.
    pub fault: Fault,
    /// Where, as `layer 1, q_proj`.
    pub place: String,
    /// What speaks for it.
    pub because: String,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The items of both, in the order of causes.
    pub rows: Vec<Row>,
    /// Names that one record has and the other does not.
    pub only: [Vec<String>; 2],
    /// Settings that differ: the name and both values, or a dash.
    pub settings: Vec<[String; 3]>,
    /// The losses.
    pub losses: [f64; 2],
    /// None where rounding explains all differences.
    pub suspicion: Option<Suspicion>,
}

impl Comparison {
    /// The first row that exceeds rounding.
    pub fn first(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.exceeds())
    }
}

/// Compares two records, the second with the first.
pub fn compare(left: &StepRecord, right: &StepRecord) -> Comparison {
    Facts::of(left, right).comparison()
}

/// Largest relative differences that rounding explains in weights, forward, backward and update, of
/// each type. In f32 they are what CPUs, GPUs and torch differ by, with a margin of 10; an update by
/// AdamW divides by the gradient, so that rounding turns the smallest ones around.
const ALLOWED: [(&str, [f64; 4]); 3] = [
    ("f32", [1e-6, 2e-5, 3e-4, 5e-2]),
    ("f16", [1e-3, 5e-3, 2e-2, 0.5]),
    ("bf16", [8e-3, 4e-2, 0.12, 0.5]),
];
/// Norms below this share of the median of their stage are rounding of larger ones.
const FLOOR: f64 = 1e-4;
/// Rounding to 16 bits is below it, faults are mostly above.
const NARROW: f64 = 1.0 / 128.0;

/// An item of one sample in both records.
struct Pair<'a> {
    shape: &'a [usize],
    left: &'a [f32],
    right: &'a [f32],
}

impl Pair<'_> {
    /// The squares of the difference and of the left side.
    fn squares(&self) -> (f64, f64) {
        if self.left.len() != self.right.len() {
            return (f64::INFINITY, 1.0);
        }
        let pairs = self.left.iter().zip(self.right);
        pairs.fold((0.0, 0.0), |(apart, size), (left, right)| {
            let (left, right) = (f64::from(*left), f64::from(*right));
            let same = left == right || (left.is_nan() && right.is_nan());
            let next = if same { 0.0 } else { (left - right).powi(2) };
            let next = if next.is_nan() { f64::INFINITY } else { next };
            let left = if left.is_finite() { left * left } else { 0.0 };
            (apart + next, size + left)
        })
    }
}

/// Both records by stage and name.
struct Facts<'a> {
    left: &'a StepRecord,
    right: &'a StepRecord,
    /// By stage and name, of each sample.
    pairs: BTreeMap<(Stage, String), BTreeMap<String, Pair<'a>>>,
    only: [Vec<String>; 2],
    samples: usize,
}

/// The stage of an item, the line of its sample, and its name.
fn parsed(name: &str) -> Option<(Stage, &str, &str)> {
    let (stage, rest) = name.split_once('/')?;
    let of_line = |stage| rest.split_once('/').map(|(line, name)| (stage, line, name));
    match stage {
        "input" => of_line(Stage::Input),
        "forward" => of_line(Stage::Forward),
        "weight" => Some((Stage::Weight, "", rest)),
        "update" => Some((Stage::Update, "", rest)),
        "backward" if rest.contains('/') => of_line(Stage::Backward),
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
fn layer(stage: Stage, name: &str) -> Option<usize> {
    let words: &[&str] = match stage {
        Stage::Forward => &["block.", "hidden.", "norm.", "attn.", "mixed."],
        Stage::Backward if name.starts_with("hidden.") => &["hidden."],
        _ => &["layers.", "blocks."],
    };
    let found = words.iter().find_map(|word| number_after(name, word));
    let end = || name.rsplit('.').next()?.parse().ok();
    found.or_else(|| if stage == Stage::Forward { end() } else { None })
}

/// Activations of a decoder layer in the order of their causes.
const ORDER: [(&str, usize); 11] = [
    (".in", 0),
    (".attn", 1),
    ("q_pre", 2),
    ("k_pre", 2),
    ("v.", 2),
    ("q_post", 3),
    ("k_post", 3),
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
fn rank(stage: Stage, name: &str) -> (usize, usize, usize) {
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

impl<'a> Facts<'a> {
    fn of(left: &'a StepRecord, right: &'a StepRecord) -> Self {
        let mut pairs: BTreeMap<(Stage, String), BTreeMap<String, Pair<'a>>> = BTreeMap::new();
        let none: &[usize] = &[];
        for (name, values) in &left.items {
            let (Some(other), Some((stage, line, item))) = (right.items.get(name), parsed(name))
            else {
                continue;
            };
            let shape = left.header.shapes.get(name).map_or(none, |shape| shape);
            let same = right
                .header
                .shapes
                .get(name)
                .is_some_and(|other| other == shape);
            let pair = Pair {
                shape,
                left: values,
                right: if same { other } else { &[] },
            };
            let of_name = pairs.entry((stage, item.to_owned())).or_default();
            of_name.insert(line.to_owned(), pair);
        }
        let only = [(left, right), (right, left)].map(|(one, other)| {
            let missing = one
                .items
                .keys()
                .filter(|name| !other.items.contains_key(*name));
            missing.cloned().collect()
        });
        Self {
            left,
            right,
            pairs,
            only,
            samples: left.header.samples,
        }
    }

    fn allowed(&self, stage: Stage) -> f64 {
        let of = |record: &StepRecord| {
            let known = ALLOWED
                .iter()
                .position(|(name, _)| *name == record.header.precision);
            known.unwrap_or(0)
        };
        let [weight, forward, backward, update] = ALLOWED[of(self.left).max(of(self.right))].1;
        match stage {
            Stage::Input => 0.0,
            Stage::Weight => weight,
            Stage::Forward => forward,
            Stage::Backward => backward,
            Stage::Update => update,
        }
    }

    fn comparison(self) -> Comparison {
        let mut sizes: BTreeMap<Stage, Vec<f64>> = BTreeMap::new();
        let mut found = Vec::new();
        for ((stage, name), pairs) in &self.pairs {
            let squares = pairs.values().map(Pair::squares);
            let (apart, size) = squares.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
            let count = pairs
                .values()
                .map(|pair| pair.left.len())
                .sum::<usize>()
                .max(1);
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
            });
        }
        rows.sort_by_key(|row| (row.stage, rank(row.stage, &row.name), row.name.clone()));
        let mut comparison = Comparison {
            rows,
            only: self.only.clone(),
            settings: self.settings(),
            losses: [self.left.header.loss, self.right.header.loss],
            suspicion: None,
        };
        comparison.suspicion = self.suspect(&comparison);
        comparison
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
    fn differs(&self, comparison: &Comparison, word: &str) -> bool {
        let known = |value: &String| value != "-";
        let mut rows = comparison.settings.iter();
        rows.any(|[name, left, right]| name.contains(word) && known(left) && known(right))
    }
}

/// A suspicion of an item.
fn suspicion(fault: Fault, row: &Row, because: impl Into<String>) -> Suspicion {
    let part = &row.name;
    let place = match row.layer {
        Some(block) if part.contains("vision") || part.contains("visual") => {
            format!("block {block} of the tower, {part}")
        }
        Some(layer) => format!("layer {layer}, {part}"),
        None => part.clone(),
    };
    Suspicion {
        fault,
        place,
        because: because.into(),
    }
}

impl Facts<'_> {
    fn suspect(&self, comparison: &Comparison) -> Option<Suspicion> {
        let first = comparison.first();
        if let Some(found) = self.missing(comparison, first) {
            return Some(found);
        }
        let Some(first) = first else {
            return self.of_loss(comparison);
        };
        Some(match first.stage {
            Stage::Input if first.name == "position_ids" => {
                let because = "tokens, kinds and pictures are equal, their ids are not";
                suspicion(Fault::PositionIds, first, because)
            }
            Stage::Input => suspicion(Fault::Data, first, "the inputs are not those of one batch"),
            Stage::Weight => {
                let others = comparison.rows.iter();
                let wrong = others.filter(|row| row.stage == Stage::Weight && row.exceeds());
                let because = format!("{} weights differ before the step", wrong.count());
                suspicion(Fault::Weights, first, because)
            }
            Stage::Forward => self.of_forward(comparison, first),
            Stage::Backward => self.of_backward(comparison, first),
            Stage::Update => {
                let because = "all gradients are equal, the update is not";
                suspicion(Fault::Optimizer, first, because)
            }
        })
    }

    /// What one side alone has, if the inputs are equal.
    fn missing(&self, comparison: &Comparison, first: Option<&Row>) -> Option<Suspicion> {
        if first.is_some_and(|first| first.stage == Stage::Input) {
            return None;
        }
        for (side, only) in [("first", &self.only[0]), ("second", &self.only[1])] {
            // One that is there and has no gradient is not applied.
            let of_parameter = |name| {
                let stages = ["weight/", "backward/"];
                stages
                    .iter()
                    .find_map(|stage| str::strip_prefix(name, *stage))
            };
            let weights: Vec<&str> = only.iter().filter_map(|name| of_parameter(name)).collect();
            for (word, fault) in [
                (".lora_", Fault::AdapterMissing),
                ("lm_head", Fault::UntiedHead),
            ] {
                if let Some(name) = weights.iter().find(|name| name.contains(word)) {
                    let because = match first {
                        Some(first) => format!(
                            "the {side} record alone has it, and {} is the first that differs",
                            first.name
                        ),
                        None => format!("the {side} record alone has it"),
                    };
                    let row = Row {
                        stage: Stage::Weight,
                        name: (*name).to_owned(),
                        layer: layer(Stage::Weight, name),
                        difference: f64::INFINITY,
                        allowed: comparison.rows.first().map_or(0.0, |row| row.allowed),
                    };
                    return Some(suspicion(fault, &row, because));
                }
            }
        }
        None
    }

    /// A loss that differs where nothing else does.
    fn of_loss(&self, comparison: &Comparison) -> Option<Suspicion> {
        let [left, right] = comparison.losses;
        let apart = (left - right).abs() / left.abs().max(f64::MIN_POSITIVE);
        (apart > self.allowed(Stage::Forward)).then(|| Suspicion {
            fault: Fault::Loss,
            place: "loss".to_owned(),
            because: format!("all activations and gradients are equal, it is {left} and {right}"),
        })
    }

    fn of_forward(&self, comparison: &Comparison, first: &Row) -> Suspicion {
        let name = &first.name[..];
        let is_narrow = first.difference < NARROW && !self.is_constant_by_token(name);
        let with = |fault, because: &str| suspicion(fault, first, because);
        let narrow = || {
            let because = format!(
                "elements differ by {:.1e} of the whole, as by rounding to 16 bits",
                first.difference
            );
            suspicion(Fault::Accumulation, first, because)
        };
        match rank(Stage::Forward, name) {
            (0..=3, ..) if is_narrow => narrow(),
            (0..=3, ..) => with(Fault::Vision, "what it reads is equal"),
            (4, ..) => with(Fault::Embeddings, "the tower's output is equal"),
            (5, _, 1) | (6, ..) if self.is_constant_by_token(name) => with(
                Fault::Epsilon,
                "all channels of a token differ by one factor",
            ),
            (5, _, 6) if self.is_constant_by_token(name) => with(
                Fault::Epsilon,
                "all channels of a token differ by one factor",
            ),
            (5, _, 1 | 6) | (6, ..) => with(Fault::Norm, "its input is equal"),
            (5, _, 2) => self.of_projection(comparison, first),
            (5, _, 3) => self.of_rotation(first),
            (5, _, 4) if is_narrow => narrow(),
            (5, _, 4) => self.of_attention(first),
            (5, _, 5 | 7) if is_narrow => narrow(),
            (5, _, 5) => self.of_projection(comparison, first),
            (5, _, 7) => with(Fault::FeedForward, "its input is equal"),
            (7, ..) => with(Fault::Head, "the hidden states are equal"),
            _ => with(
                Fault::Embeddings,
                "the layer before is equal, what is added to it is not",
            ),
        }
    }

    /// A projection of equal inputs by equal weights.
    fn of_projection(&self, comparison: &Comparison, first: &Row) -> Suspicion {
        if let Some(name) = self.lost(".lora_") {
            let because = format!("the gradient of {name} is 0 on one side: it is not applied");
            return suspicion(Fault::AdapterMissing, first, because);
        }
        if self.differs(comparison, "dropout") {
            return suspicion(Fault::Dropout, first, "the settings differ in dropout");
        }
        let adapted = self.pairs.keys().any(|(stage, name)| {
            let is_adapter = *stage == Stage::Weight && name.contains(".lora_");
            is_adapter && layer(Stage::Weight, name) == first.layer
        });
        if adapted {
            let because = "its input, its weight and the adapter are equal";
            return suspicion(Fault::AdapterScale, first, because);
        }
        if first.difference < NARROW {
            let because = "elements differ as by rounding to 16 bits";
            return suspicion(Fault::Accumulation, first, because);
        }
        suspicion(
            Fault::Projection,
            first,
            "its input and its weight are equal",
        )
    }

    /// A rotation of equal inputs.
    fn of_rotation(&self, first: &Row) -> Suspicion {
        let [mut text, mut vision] = [0.0_f64; 2];
        self.each_by_token(&first.name, |line, token, left, right| {
            let kinds = self.left.items.get(&format!("input/{line}/kinds"));
            let is_vision = kinds
                .and_then(|kinds| kinds.get(token))
                .is_some_and(|k| *k != 0.0);
            let apart = f64::from((left - right).abs());
            if is_vision {
                vision = vision.max(apart);
            } else {
                text = text.max(apart);
            }
        });
        if vision > 0.0 && text < 1e-3 * vision {
            let because = "tokens of text, whose three ids are one, are equal";
            return suspicion(Fault::Axes, first, because);
        }
        if first.difference < NARROW {
            let because = "elements differ as by rounding to 16 bits";
            return suspicion(Fault::Accumulation, first, because);
        }
        let because = "tokens of text differ too, whose three ids are one";
        suspicion(Fault::Pairing, first, because)
    }

    /// Attention over equal queries, keys and values.
    fn of_attention(&self, first: &Row) -> Suspicion {
        // The first token of a sequence attends to itself alone, whatever the scale.
        let (mut of_first, mut size) = (0.0_f64, 0.0_f64);
        self.each_by_token(&first.name, |_, token, left, right| {
            if token == 0 {
                of_first = of_first.max(f64::from((left - right).abs()));
                size = size.max(f64::from(left.abs()));
            }
        });
        if size > 0.0 && of_first <= 1e-4 * size {
            let because = "the first token, which attends to itself alone, is equal";
            return suspicion(Fault::AttentionScale, first, because);
        }
        suspicion(
            Fault::Mask,
            first,
            "the first token, which attends to itself alone, differs",
        )
    }

    fn of_backward(&self, comparison: &Comparison, first: &Row) -> Suspicion {
        // Of its layer, the gradient that shows most.
        let place = rank(Stage::Backward, &first.name);
        let beside = comparison.rows.iter().filter(|row| {
            row.stage == Stage::Backward && row.exceeds() && rank(row.stage, &row.name) == place
        });
        let mut lost = beside.filter_map(|row| Some((row, self.zeros(&row.name)?)));
        if let Some((row, (share, heads))) = lost.next() {
            let because = match heads {
                Some(heads) => format!("all its elements of {heads} are 0 on one side"),
                None => format!("{:.0} % of its elements are 0 on one side", 100.0 * share),
            };
            return suspicion(Fault::LostGradient, row, because);
        }
        if first.name.contains(".lora_") && self.differs(comparison, "dropout") {
            return suspicion(Fault::Dropout, first, "the settings differ in dropout");
        }
        if let Some(factor) = self.factor(&first.name) {
            let because = format!("it is {factor:.4} times as large, in every element");
            return suspicion(Fault::GradientScale, first, because);
        }
        if first.name.contains(".lora_B") {
            let because = "B is 0 before the first step, so its gradient alone shows the input";
            return suspicion(Fault::Dropout, first, because);
        }
        suspicion(Fault::Gradient, first, "the forward pass is equal")
    }

    /// The first gradient with a word in its name that is 0 on one side alone.
    fn lost(&self, word: &str) -> Option<&str> {
        let names = self.pairs.keys();
        let mut gradients =
            names.filter(|(stage, name)| *stage == Stage::Backward && name.contains(word));
        let (_, name) = gradients.find(|(_, name)| self.zeros(name).is_some())?;
        Some(name)
    }

    /// The share of a gradient's elements that are 0 on one side alone, and the heads that they are
    /// of, if these are all elements of some heads.
    fn zeros(&self, name: &str) -> Option<(f64, Option<String>)> {
        let pairs = self.pairs.get(&(Stage::Backward, name.to_owned()))?;
        let (mut zero, mut all) = (0_usize, 0_usize);
        let (mut with, mut without) = (BTreeSet::new(), BTreeSet::new());
        let head_dim = self.head_dim();
        for pair in pairs.values() {
            let elements: usize = pair.shape.iter().product();
            let columns: usize = pair.shape.iter().skip(1).product();
            let places = sampled_elements(elements, self.samples);
            for ((left, right), place) in pair.left.iter().zip(pair.right).zip(places) {
                let head = head_dim.map(|dim| place / columns.max(1) / dim);
                let is_lost = (*left == 0.0) != (*right == 0.0);
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

    /// The factor between a gradient's sides, if it is one for all elements.
    fn factor(&self, name: &str) -> Option<f64> {
        let pairs = self.pairs.get(&(Stage::Backward, name.to_owned()))?;
        let all = || {
            pairs
                .values()
                .flat_map(|pair| pair.left.iter().zip(pair.right))
        };
        let sum = |of: fn(f64, f64) -> f64| -> f64 {
            all()
                .map(|(left, right)| of(f64::from(*left), f64::from(*right)))
                .sum()
        };
        let (left, both) = (sum(|left, _| left * left), sum(|left, right| left * right));
        let right = sum(|_, right| right * right);
        let factor = both / left;
        let rest = (right - factor * both).max(0.0);
        (factor.is_finite() && rest <= 1e-6 * right && (factor - 1.0).abs() > 1e-3)
            .then_some(factor)
    }

    /// Calls `each` with line, token and both sides of the elements of an activation.
    fn each_by_token(&self, name: &str, mut each: impl FnMut(&str, usize, f32, f32)) {
        let Some(pairs) = self.pairs.get(&(Stage::Forward, name.to_owned())) else {
            return;
        };
        for (line, pair) in pairs {
            let elements: usize = pair.shape.iter().product();
            let width: usize = pair.shape.iter().skip(1).product();
            let places = sampled_elements(elements, self.samples);
            for ((left, right), place) in pair.left.iter().zip(pair.right).zip(places) {
                each(line, place / width.max(1), *left, *right);
            }
        }
    }

    /// Whether the sides of an activation differ by a factor that is one for all channels of a
    /// token.
    fn is_constant_by_token(&self, name: &str) -> bool {
        let mut ranges: BTreeMap<(String, usize), (f64, f64, usize)> = BTreeMap::new();
        let mut largest = 0.0_f32;
        self.each_by_token(name, |_, _, left, _| largest = largest.max(left.abs()));
        self.each_by_token(name, |line, token, left, right| {
            // Of small elements the quotient is rounding.
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
