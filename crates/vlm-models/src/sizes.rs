//! The sizes of a configuration: the range of each, and their consistency.

use std::ops::RangeInclusive;

use crate::config::{ExpertConfig, MAX_LAYERS, TextConfig, VisionConfig, VlmConfig};
use crate::error::{Result, VlmError};

// Limits make a wrong number an error rather than a panic or an excessive allocation.
const LAYERS: Range = (1..=MAX_LAYERS, "1 to 65536");
const SIZE: Range = (1..=1 << 24, "1 to 16777216");
/// The limit on colours, frames, rows and columns of a patch: their product fits a `usize`.
const OF_PATCH: Range = (1..=4096, "1 to 4096");
/// The limits on experts and on channels inside one: with two other sizes, the product fits a
/// `usize`.
const EXPERTS: Range = (1..=1 << 16, "1 to 65536");
const OF_EXPERT: Range = (1..=1 << 20, "1 to 1048576");
/// Width in tokens of a convolution.
const TAPS: Range = (2..=4096, "2 to 4096");

/// A condition on a size, with its text in messages.
type Range = (RangeInclusive<usize>, &'static str);
/// A key, or the name of a derived size, and its value.
type Size = (&'static str, usize);

/// A relation between two sizes, with its reason.
struct Rule {
    left: Size,
    relation: Relation,
    right: Size,
    reason: &'static str,
}

#[derive(Clone, Copy)]
enum Relation {
    IsMultipleOf,
    Equals,
    IsBelow,
    IsAtMost,
}

impl Relation {
    fn holds(self, left: usize, right: usize) -> bool {
        match self {
            Self::IsMultipleOf => right > 0 && left.is_multiple_of(right),
            Self::Equals => left == right,
            Self::IsBelow => left < right,
            Self::IsAtMost => left <= right,
        }
    }
}

impl VlmConfig {
    /// Checks that each size is allowed and that they fit together.
    pub(crate) fn check(&self) -> Result<()> {
        for ((key, found), (allowed, expected)) in self.ranges() {
            if !allowed.contains(&found) {
                let found = found.to_string();
                return Err(VlmError::Unsupported {
                    key,
                    found,
                    expected,
                });
            }
        }
        let of_tower = self.vision.as_ref().map(|vision| vision.norm_eps);
        for epsilon in of_tower.into_iter().chain([self.text.rms_norm_eps]) {
            if !(epsilon.is_finite() && epsilon > 0.0) {
                return Err(VlmError::Unsupported {
                    key: "rms_norm_eps",
                    found: epsilon.to_string(),
                    expected: "a finite number above 0",
                });
            }
        }
        let groups = self
            .text
            .experts
            .as_ref()
            .and_then(|experts| experts.groups);
        if let Some(groups) = groups.filter(|groups| !groups.scale.is_finite()) {
            return Err(VlmError::Unsupported {
                key: "routed_scaling_factor",
                found: groups.scale.to_string(),
                expected: "a finite number",
            });
        }
        let rules = self.rules().into_iter();
        let mut broken = rules.filter(|rule| !rule.relation.holds(rule.left.1, rule.right.1));
        match broken.next() {
            Some(rule) => {
                let ((left, left_value), (right, right_value)) = (rule.left, rule.right);
                Err(VlmError::Sizes {
                    left,
                    left_value,
                    right,
                    right_value,
                    rule: rule.reason,
                })
            }
            None => Ok(()),
        }
    }

    fn ranges(&self) -> Vec<(Size, Range)> {
        let text = &self.text;
        let mut ranges = vec![
            (("vocab_size", text.vocab_size), SIZE),
            (("hidden_size", text.hidden_size), SIZE),
            (("intermediate_size", text.intermediate_size), SIZE),
            (("num_hidden_layers", text.layers), LAYERS),
            (("num_attention_heads", text.heads), SIZE),
        ];
        if let Some(experts) = &text.experts {
            ranges.extend([
                (("num_experts", experts.experts), EXPERTS),
                (("num_experts_per_tok", experts.per_token), EXPERTS),
                (
                    ("moe_intermediate_size", experts.intermediate_size),
                    OF_EXPERT,
                ),
            ]);
            let shared = experts.shared_size;
            let shared = shared.map(|size| (("shared_expert_intermediate_size", size), SIZE));
            ranges.extend(shared);
            if let Some(groups) = &experts.groups {
                ranges.extend([
                    (("n_group", groups.groups), EXPERTS),
                    (("topk_group", groups.per_token), EXPERTS),
                ]);
            }
        }
        if let Some(window) = &text.window {
            ranges.push((("sliding_window", window.tokens), SIZE));
        }
        ranges.extend(self.vision.iter().flat_map(VisionConfig::ranges));
        if let Some(delta) = &text.delta {
            ranges.extend([
                (("linear_num_key_heads", delta.key_heads), SIZE),
                (("linear_num_value_heads", delta.heads), SIZE),
                (("linear_key_head_dim", delta.key_dim), SIZE),
                (("linear_value_head_dim", delta.value_dim), SIZE),
                (("linear_conv_kernel_dim", delta.taps), TAPS),
            ]);
        }
        ranges
    }

    fn rules(&self) -> Vec<Rule> {
        use Relation::IsMultipleOf;
        let text = &self.text;
        let mut rules = vec![Rule {
            left: ("num_attention_heads", text.heads),
            relation: IsMultipleOf,
            right: ("num_key_value_heads", text.kv_heads),
            reason: "each key head serves the same number of query heads",
        }];
        rules.extend(text.experts.iter().flat_map(ExpertConfig::rules));
        if let Some(vision) = &self.vision {
            rules.extend(vision.rules(text));
        }
        if let Some(delta) = &text.delta {
            rules.push(Rule {
                left: ("linear_num_value_heads", delta.heads),
                relation: IsMultipleOf,
                right: ("linear_num_key_heads", delta.key_heads),
                reason: "each key head serves the same number of value heads",
            });
        }
        rules
    }
}

impl ExpertConfig {
    fn rules(&self) -> Vec<Rule> {
        use Relation::{IsAtMost, IsMultipleOf};
        let rule = |left, relation, right, reason| Rule {
            left,
            relation,
            right,
            reason,
        };
        let per_token = ("num_experts_per_tok", self.per_token);
        let experts = ("num_experts", self.experts);
        let different = "a token passes different experts";
        let mut rules = vec![rule(per_token, IsAtMost, experts, different)];
        if let Some(of) = &self.groups {
            let groups = ("n_group", of.groups);
            let chosen = of.per_token.saturating_mul(self.experts / of.groups.max(1));
            let chosen = ("experts of topk_group groups", chosen);
            rules.extend([
                rule(experts, IsMultipleOf, groups, "groups are equally large"),
                rule(
                    ("twice n_group", of.groups.saturating_mul(2)),
                    IsAtMost,
                    experts,
                    "the two best experts of a group are its score",
                ),
                rule(
                    ("topk_group", of.per_token),
                    IsAtMost,
                    groups,
                    "a token passes different groups",
                ),
                rule(per_token, IsAtMost, chosen, different),
            ]);
        }
        rules
    }
}

impl VisionConfig {
    fn ranges(&self) -> Vec<(Size, Range)> {
        let mut ranges = vec![
            (("vision depth", self.depth), LAYERS),
            (("vision hidden_size", self.hidden_size), SIZE),
            (("vision intermediate_size", self.intermediate_size), SIZE),
            (("vision intermediate_size", self.merger_size), SIZE),
            (("num_heads", self.heads), SIZE),
            (("in_channels", self.patch[0]), OF_PATCH),
            (("temporal_patch_size", self.patch[1]), OF_PATCH),
            (("patch_size", self.patch[2]), OF_PATCH),
            (("spatial_merge_size", self.spatial_merge), OF_PATCH),
        ];
        if let Some(side) = self.position_grid {
            let cells = side.saturating_mul(side);
            ranges.push((("num_position_embeddings", cells), SIZE));
        }
        ranges
    }

    /// The relations of the tower's sizes to each other and to those of the decoder.
    fn rules(&self, text: &TextConfig) -> Vec<Rule> {
        use Relation::{Equals, IsAtMost, IsBelow, IsMultipleOf};
        let rule = |left, relation, right, reason| Rule {
            left,
            relation,
            right,
            reason,
        };
        let mut rules = vec![
            rule(
                ("vision hidden_size", self.hidden_size),
                IsMultipleOf,
                ("num_heads", self.heads),
                "channels divide into heads",
            ),
            rule(
                ("out_hidden_size", self.out_hidden_size),
                Equals,
                ("text hidden_size", text.hidden_size),
                "merged patches take the place of word embeddings",
            ),
            rule(
                ("deepstack_visual_indexes", self.deepstack.len()),
                IsAtMost,
                ("num_hidden_layers", text.layers),
                "each feature joins a layer",
            ),
        ];
        let full = self.windows.as_ref();
        let full = full.map_or(&[][..], |windows| &windows.full_attention_blocks);
        for (key, blocks) in [
            ("deepstack_visual_indexes", &self.deepstack[..]),
            ("fullatt_block_indexes", full),
        ] {
            let depth = ("depth", self.depth);
            let blocks = blocks.iter().map(|block| (key, *block));
            rules.extend(blocks.map(|block| rule(block, IsBelow, depth, "blocks count from 0")));
        }
        rules
    }
}
