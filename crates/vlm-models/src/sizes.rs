//! The sizes of a configuration: the range of each, and their consistency.

use std::ops::RangeInclusive;

use crate::config::{MAX_LAYERS, VlmConfig};
use crate::error::{Result, VlmError};

// Limits make a wrong number an error rather than a panic or an excessive allocation.
const LAYERS: Range = (1..=MAX_LAYERS, "1 to 65536");
const SIZE: Range = (1..=1 << 24, "1 to 16777216");
/// The limit on colours, frames, rows and columns of a patch: their product fits a `usize`.
const OF_PATCH: Range = (1..=4096, "1 to 4096");
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
        for epsilon in [self.text.rms_norm_eps, self.vision.norm_eps] {
            if !(epsilon.is_finite() && epsilon > 0.0) {
                return Err(VlmError::Unsupported {
                    key: "rms_norm_eps",
                    found: epsilon.to_string(),
                    expected: "a finite number above 0",
                });
            }
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
        let (text, vision) = (&self.text, &self.vision);
        let mut ranges = vec![
            (("vocab_size", text.vocab_size), SIZE),
            (("hidden_size", text.hidden_size), SIZE),
            (("intermediate_size", text.intermediate_size), SIZE),
            (("num_hidden_layers", text.layers), LAYERS),
            (("num_attention_heads", text.heads), SIZE),
            (("vision depth", vision.depth), LAYERS),
            (("vision hidden_size", vision.hidden_size), SIZE),
            (("vision intermediate_size", vision.intermediate_size), SIZE),
            (("vision intermediate_size", vision.merger_size), SIZE),
            (("num_heads", vision.heads), SIZE),
            (("in_channels", vision.patch[0]), OF_PATCH),
            (("temporal_patch_size", vision.patch[1]), OF_PATCH),
            (("patch_size", vision.patch[2]), OF_PATCH),
            (("spatial_merge_size", vision.spatial_merge), OF_PATCH),
        ];
        if let Some(side) = vision.position_grid {
            let cells = side.saturating_mul(side);
            ranges.push((("num_position_embeddings", cells), SIZE));
        }
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
        use Relation::{Equals, IsAtMost, IsBelow, IsMultipleOf};
        let (text, vision) = (&self.text, &self.vision);
        let rule = |left, relation, right, reason| Rule {
            left,
            relation,
            right,
            reason,
        };
        let mut rules = vec![
            rule(
                ("num_attention_heads", text.heads),
                IsMultipleOf,
                ("num_key_value_heads", text.kv_heads),
                "each key head serves the same number of query heads",
            ),
            rule(
                ("vision hidden_size", vision.hidden_size),
                IsMultipleOf,
                ("num_heads", vision.heads),
                "channels divide into heads",
            ),
            rule(
                ("out_hidden_size", vision.out_hidden_size),
                Equals,
                ("text hidden_size", text.hidden_size),
                "merged patches take the place of word embeddings",
            ),
            rule(
                ("deepstack_visual_indexes", vision.deepstack.len()),
                IsAtMost,
                ("num_hidden_layers", text.layers),
                "each feature joins a layer",
            ),
        ];
        let full = vision.windows.as_ref();
        let full = full.map_or(&[][..], |windows| &windows.full_attention_blocks);
        for (key, blocks) in [
            ("deepstack_visual_indexes", &vision.deepstack[..]),
            ("fullatt_block_indexes", full),
        ] {
            let depth = ("depth", vision.depth);
            let blocks = blocks.iter().map(|block| (key, *block));
            rules.extend(blocks.map(|block| rule(block, IsBelow, depth, "blocks count from 0")));
        }
        if let Some(delta) = &text.delta {
            rules.push(rule(
                ("linear_num_value_heads", delta.heads),
                IsMultipleOf,
                ("linear_num_key_heads", delta.key_heads),
                "each key head serves the same number of value heads",
            ));
        }
        rules
    }
}
