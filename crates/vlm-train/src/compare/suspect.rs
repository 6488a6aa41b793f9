//! Derives a suspected cause from the first item that differs.

use super::facts::{Facts, layer, rank};
use super::{Comparison, Fault, Row, Stage, Suspicion};

/// Rounding to 16 bits is below it, faults are mostly above.
const NARROW: f64 = 1.0 / 128.0;

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
    /// The suspected cause, if the steps differ.
    pub(super) fn suspect(&self, comparison: &Comparison) -> Option<Suspicion> {
        let first = comparison.first();
        if let Some(found) = self.missing(comparison, first) {
            return Some(found);
        }
        let Some(first) = first else {
            return self.loss_suspicion(comparison);
        };
        Some(match first.stage {
            Stage::Input if first.name == "position_ids" => {
                let because = "tokens, kinds and pictures are equal, their ids are not";
                suspicion(Fault::PositionIds, first, because)
            }
            Stage::Input => suspicion(Fault::Data, first, "the inputs are of different batches"),
            Stage::Weight => {
                let others = comparison.rows.iter();
                let wrong = others.filter(|row| row.stage == Stage::Weight && row.exceeds());
                let because = format!("{} weights differ before the step", wrong.count());
                suspicion(Fault::Weights, first, because)
            }
            Stage::Forward => self.forward_suspicion(comparison, first),
            Stage::Backward => self.backward_suspicion(comparison, first),
            Stage::Update => {
                let because = "all gradients are equal, the update is not";
                suspicion(Fault::Optimizer, first, because)
            }
        })
    }

    /// A parameter that only one side has, if the inputs are equal.
    fn missing(&self, comparison: &Comparison, first: Option<&Row>) -> Option<Suspicion> {
        if first.is_some_and(|first| first.stage == Stage::Input) {
            return None;
        }
        for (side, only) in [("first", &self.only[0]), ("second", &self.only[1])] {
            // A parameter that exists without a gradient is not applied.
            let parameter_name = |name| {
                let stages = ["weight/", "backward/"];
                stages
                    .iter()
                    .find_map(|stage| str::strip_prefix(name, *stage))
            };
            let weights: Vec<&str> = only
                .iter()
                .filter_map(|name| parameter_name(name))
                .collect();
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
                        rank: None,
                    };
                    return Some(suspicion(fault, &row, because));
                }
            }
        }
        None
    }

    /// A loss that differs although nothing else does.
    fn loss_suspicion(&self, comparison: &Comparison) -> Option<Suspicion> {
        let [left, right] = comparison.losses;
        let apart = (left - right).abs() / left.abs().max(f64::MIN_POSITIVE);
        (apart > self.allowed(Stage::Forward)).then(|| Suspicion {
            fault: Fault::Loss,
            place: "loss".to_owned(),
            because: format!("all activations and gradients are equal, it is {left} and {right}"),
        })
    }

    fn forward_suspicion(&self, comparison: &Comparison, first: &Row) -> Suspicion {
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
            (0..=3, ..) => with(Fault::Vision, "its inputs are equal"),
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
            (5, _, 2) => self.projection_suspicion(comparison, first),
            (5, _, 3 | 4) if self.is_of_state(first.layer) => {
                let fault = match name.starts_with("conv") {
                    true => Fault::Convolution,
                    false => Fault::DeltaRule,
                };
                with(fault, "what it is computed from is equal")
            }
            (5, _, 3) => self.rotation_suspicion(first),
            (5, _, 4) if is_narrow => narrow(),
            (5, _, 4) => self.attention_suspicion(first),
            (5, _, 5 | 7) if is_narrow => narrow(),
            (5, _, 5) => self.projection_suspicion(comparison, first),
            (5, _, 7) => with(Fault::FeedForward, "its input is equal"),
            (7, ..) => with(Fault::Head, "the hidden states are equal"),
            _ => with(
                Fault::Embeddings,
                "the layer before is equal, the sum added to it differs",
            ),
        }
    }

    /// True for a layer with a state, of which a convolution is recorded.
    pub(super) fn is_of_state(&self, layer: Option<usize>) -> bool {
        let name = layer.map(|layer| (Stage::Forward, format!("conv.{layer}")));
        name.is_some_and(|name| self.pairs.contains_key(&name))
    }

    /// A projection of equal inputs by equal weights.
    fn projection_suspicion(&self, comparison: &Comparison, first: &Row) -> Suspicion {
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
    fn rotation_suspicion(&self, first: &Row) -> Suspicion {
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
            let because = "text tokens, with one id on all axes, are equal";
            return suspicion(Fault::Axes, first, because);
        }
        if first.difference < NARROW {
            let because = "elements differ as by rounding to 16 bits";
            return suspicion(Fault::Accumulation, first, because);
        }
        let because = "text tokens, with one id on all axes, differ too";
        suspicion(Fault::Pairing, first, because)
    }

    /// Attention over equal queries, keys and values.
    fn attention_suspicion(&self, first: &Row) -> Suspicion {
        // The first token of a sequence attends to itself alone, whatever the scale.
        let (mut first_difference, mut size) = (0.0_f64, 0.0_f64);
        self.each_by_token(&first.name, |_, token, left, right| {
            if token == 0 {
                first_difference = first_difference.max(f64::from((left - right).abs()));
                size = size.max(f64::from(left.abs()));
            }
        });
        if size > 0.0 && first_difference <= 1e-4 * size {
            let because = "the first token, which attends to itself alone, is equal";
            return suspicion(Fault::AttentionScale, first, because);
        }
        suspicion(
            Fault::Mask,
            first,
            "the first token, which attends to itself alone, differs",
        )
    }

    fn backward_suspicion(&self, comparison: &Comparison, first: &Row) -> Suspicion {
        if self.overflows(&first.name) {
            let because = "the forward pass is equal, and an element is not finite";
            return suspicion(Fault::Overflow, first, because);
        }
        // The most informative gradient of its layer.
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
}
