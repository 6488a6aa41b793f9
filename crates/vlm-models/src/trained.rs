//! What is trained: parts of the model, whole weights, or low-rank adapters.

use std::collections::BTreeMap;

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::error::{Result, VlmError};

/// A part of the model that is trained or frozen separately, with a separate learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelPart {
    /// The vision tower: patch embedding, learned positions and blocks.
    Tower,
    /// The layers from the tower's output to the decoder's embeddings and features.
    Merger,
    /// The language decoder with word embeddings and output head.
    Decoder,
}

impl ModelPart {
    /// The part of a parameter or layer, by its name in the module.
    pub fn of(path: &str) -> Self {
        match path.strip_prefix("visual.") {
            Some(path) if path.starts_with("merger.") => Self::Merger,
            Some(path) if path.starts_with("deepstack_merger_list.") => Self::Merger,
            Some(_) => Self::Tower,
            None => Self::Decoder,
        }
    }
}

/// The weights that are trained whole, rather than through adapters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Form")]
pub struct TrainedWeights {
    /// All weights of these parts.
    pub parts: Vec<ModelPart>,
    /// All weights of these modules. As in [`LoraConfig::targets`](crate::LoraConfig::targets), each
    /// is the end of a module's name in transformers, such as `embed_tokens` or
    /// `language_model.layers.3`, or a regular expression for the whole name.
    pub modules: Vec<String>,
}

impl TrainedWeights {
    /// The modules of the word embeddings and the output head. A tied head has the weight of the
    /// embeddings.
    pub const EMBEDDINGS: [&str; 2] = ["embed_tokens", "lm_head"];

    /// The modules of some layers of the decoder, by index.
    pub fn decoder_layers(layers: impl IntoIterator<Item = usize>) -> Vec<String> {
        let layers = layers.into_iter();
        layers.map(|layer| format!("layers.{layer}")).collect()
    }

    /// True if none are named.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.modules.is_empty()
    }
}

impl From<Vec<ModelPart>> for TrainedWeights {
    fn from(parts: Vec<ModelPart>) -> Self {
        Self {
            parts,
            modules: Vec::new(),
        }
    }
}

/// Its forms in files: earlier checkpoints of training list parts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Parts(Vec<ModelPart>),
    Both {
        parts: Vec<ModelPart>,
        #[serde(default)]
        modules: Vec<String>,
    },
}

impl From<Form> for TrainedWeights {
    fn from(form: Form) -> Self {
        match form {
            Form::Parts(parts) => parts.into(),
            Form::Both { parts, modules } => {
                // Checkpoints from before models of text alone name decoder layers in full.
                let short = |name: String| match name.strip_prefix("model.language_model.") {
                    Some(layer) if layer.starts_with("layers.") => layer.to_owned(),
                    _ => name,
                };
                let modules = modules.into_iter().map(short).collect();
                Self { parts, modules }
            }
        }
    }
}

/// Low-rank adapters: y = x W + b + s (x A^T) B with frozen W and b. Each expert of a mixture has A
/// and B of its own.
///
/// # Source
/// Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022; with `rslora`,
/// Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rows of A and of B.
    pub rank: usize,
    /// s = alpha / rank, or with `rslora` alpha / sqrt(rank).
    pub alpha: f64,
    /// The dropout probability of the inputs of A in training.
    pub dropout: f64,
    /// True for the scale of rank-stabilised LoRA.
    pub rslora: bool,
    /// The parts of the model that have adapters.
    pub parts: Vec<ModelPart>,
    /// The layers of these parts that have adapters; empty means all linear ones. Each target is the
    /// end of a layer's name in transformers, such as `q_proj`, `attn.qkv` or, for experts,
    /// `experts.down_proj`, or a regular expression for the whole name, such as
    /// `model\.language_model\.layers\.[0-3]\..*`.
    pub targets: Vec<String>,
    /// The layers of the decoder that have adapters, by index; empty means all.
    #[serde(default)]
    pub layers: Vec<usize>,
    /// The ranks of layers with one of their own. As in PEFT, each key is a regular expression for
    /// the end of a layer's name in transformers, from a dot on.
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// As `rank_pattern`, for alpha.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// The weights trained whole beside the adapters, as PEFT's `modules_to_save`. They have the
    /// type of the model.
    #[serde(default)]
    pub whole: TrainedWeights,
}

impl Default for LoraConfig {
    /// Rank 8, alpha 16, no dropout, all linear layers of the decoder.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            dropout: 0.0,
            rslora: false,
            parts: vec![ModelPart::Decoder],
            targets: Vec::new(),
            layers: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            whole: TrainedWeights::default(),
        }
    }
}

/// A pattern for the end of a name, from a dot on, as PEFT reads it.
fn end_pattern(pattern: &str) -> Option<Regex> {
    Target::new(&format!(r"(?:.*\.)?(?:{pattern})")).pattern
}

/// The values of the patterns that match a name.
fn matched<V: Copy>(patterns: &BTreeMap<String, V>, name: &str) -> impl Iterator<Item = V> {
    let is_match = |pattern: &str| end_pattern(pattern).is_some_and(|whole| whole.is_match(name));
    let matching = patterns
        .iter()
        .filter(move |(pattern, _)| is_match(pattern));
    matching.map(|(_, value)| *value)
}

impl LoraConfig {
    /// The rank and the scale s of the adapter beside a layer, by its name in transformers.
    pub fn of(&self, layer: &str) -> (usize, f64) {
        let (mut ranks, mut alphas) = (
            matched(&self.rank_pattern, layer),
            matched(&self.alpha_pattern, layer),
        );
        let rank = ranks.next().unwrap_or(self.rank);
        let alpha = alphas.next().unwrap_or(self.alpha);
        let divisor = match self.rslora {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        (rank, alpha / divisor)
    }

    /// Rejects patterns that give a layer several values, of which PEFT takes the first in its file.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`]
    pub(crate) fn expect_one(&self, layer: &str) -> Result<()> {
        let ranks: Vec<usize> = matched(&self.rank_pattern, layer).collect();
        let alphas: Vec<f64> = matched(&self.alpha_pattern, layer).collect();
        let is_one = |key, is_one: bool| match is_one {
            true => Ok(()),
            false => Err(VlmError::Unsupported {
                key,
                found: format!("several values for {layer}"),
                expected: "one pattern for each layer",
            }),
        };
        is_one(
            "rank_pattern",
            ranks.windows(2).all(|pair| pair[0] == pair[1]),
        )?;
        is_one(
            "alpha_pattern",
            alphas.windows(2).all(|pair| pair[0] == pair[1]),
        )
    }

    /// # Errors
    /// [`VlmError::Unsupported`]
    pub(crate) fn check(&self) -> Result<()> {
        let unsupported = |key, found: String, expected| {
            Err(VlmError::Unsupported {
                key,
                found,
                expected,
            })
        };
        let mut patterns = self.rank_pattern.keys().chain(self.alpha_pattern.keys());
        if let Some(pattern) = patterns.find(|pattern| end_pattern(pattern).is_none()) {
            let expected = "a regular expression without look-around";
            return unsupported("rank_pattern or alpha_pattern", pattern.clone(), expected);
        }
        for rank in self.rank_pattern.values().chain([&self.rank]) {
            if !(1..=1 << 16).contains(rank) {
                return unsupported("rank", rank.to_string(), "1 to 65536");
            }
        }
        for alpha in self.alpha_pattern.values().chain([&self.alpha]) {
            if !(alpha.is_finite() && *alpha > 0.0) {
                return unsupported("alpha", alpha.to_string(), "a finite number above 0");
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let expected = "a probability below 1";
            return unsupported("dropout", self.dropout.to_string(), expected);
        }
        Ok(())
    }
}

/// One entry of [`LoraConfig::targets`].
pub(crate) struct Target<'a> {
    pub(crate) text: &'a str,
    /// A pattern for the whole name.
    pattern: Option<Regex>,
}

impl<'a> Target<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        // A size limit, since the text may come from an untrusted file.
        let pattern = regex::RegexBuilder::new(&format!("^(?:{text})$"))
            .size_limit(1 << 20)
            .build();
        Self {
            text,
            pattern: pattern.ok(),
        }
    }

    pub(crate) fn matches(&self, name: &str) -> bool {
        let rest = name.strip_suffix(self.text);
        let is_end = rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        is_end || self.pattern.as_ref().is_some_and(|p| p.is_match(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_of_before_name_the_same_layers() {
        let of_before = r#"{"parts": [], "modules": ["model.language_model.layers.1", "lm_head"]}"#;
        let read: TrainedWeights = serde_json::from_str(of_before).expect("of that form");
        let mut expected = TrainedWeights::decoder_layers([1]);
        expected.push("lm_head".to_owned());
        assert_eq!(read.modules, expected);
    }

    #[test]
    fn targets_are_ends_of_names_or_patterns_of_whole_names() {
        let name = "model.language_model.layers.1.self_attn.q_proj";
        for (text, expected) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            ("proj", false),
            (name, true),
            (r".*layers\.[01]\..*", true),
            (r"layers\.1", false),
            ("(", false),
        ] {
            assert_eq!(Target::new(text).matches(name), expected, "{text}");
        }
    }
}
