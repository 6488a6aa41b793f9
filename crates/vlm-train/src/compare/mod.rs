//! Compares two recorded steps: their first difference, and a suspected cause.
//!
//! Items are compared in causal order: inputs, weights, the forward pass, the backward pass, the
//! update. The first item whose difference exceeds the rounding of the coarser type decides: its
//! inputs are equal, so the operation that computes it is at fault.

mod facts;
mod parts;
mod ranks;
mod suspect;

use std::fmt;

use serde::{Deserialize, Serialize};

use self::facts::Facts;
pub(crate) use self::facts::parsed;
use crate::record::StepRecord;

/// The part of a step that an item belongs to, in causal order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Tokens, labels, position ids, pictures.
    Input,
    /// Parameters before the step.
    Weight,
    /// Activations.
    Forward,
    /// Gradients of activations and parameters.
    Backward,
    /// The changes of parameters in the step.
    Update,
}

impl Stage {
    /// All stages, in causal order.
    pub const ALL: [Self; 5] = [
        Self::Input,
        Self::Weight,
        Self::Forward,
        Self::Backward,
        Self::Update,
    ];
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

/// An item in both records, over all samples of the batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its stage.
    pub stage: Stage,
    /// Its name, without the sample's line.
    pub name: String,
    /// The layer of the decoder or the block of the tower, if it belongs to one.
    pub layer: Option<usize>,
    /// The norm of the difference relative to the norm; infinite if shapes differ, or if only one
    /// side has an infinite element or NaN at some place.
    pub difference: f64,
    /// The largest difference explained by the types' rounding.
    #[serde(rename = "rounding")]
    pub allowed: f64,
    /// The rank with the largest difference, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
}

impl Row {
    /// True if rounding does not explain the difference.
    pub fn exceeds(&self) -> bool {
        self.difference > self.allowed
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Fault {
    /// Samples or tokens that several ranks have, or none.
    Division,
    /// A different number of labelled tokens in the divisor of the loss.
    Count,
    /// Replicas with different weights.
    Replicas,
    /// A part of a tensor on the wrong rank.
    Part,
    /// Parts gathered in another order.
    Order,
    /// Gathered weights that the ranks do not hold.
    StaleGather,
    /// Gradients of ranks that are not summed once each.
    Sum,
    /// A gradient norm that is not of all ranks.
    GradientNorm,
    /// A part that was not updated.
    MissedUpdate,
    /// A label that a token does not predict, as the next token is on another rank.
    Border,
    /// Packed sequences whose states a rank does not tell from each other.
    Sequences,
    /// Tokens of the rank before that a convolution reads.
    Halo,
    /// The state before a rank's tokens.
    State,
    /// What ranks exchange in a layer, or their masks.
    Exchange,
    /// Different tokens, labels or pictures.
    Data,
    /// Different position ids for the same tokens.
    PositionIds,
    /// An adapter that one side lacks or does not apply.
    AdapterMissing,
    /// An output head tied to the word embeddings only on one side.
    UntiedHead,
    /// Different weights.
    Weights,
    /// The tower's input or one of its blocks.
    Vision,
    /// Word embeddings or merged patches in different places.
    Embeddings,
    /// The norm's epsilon.
    Epsilon,
    /// The norm.
    Norm,
    /// Dropout.
    Dropout,
    /// A different scale of an adapter.
    AdapterScale,
    /// A product with a weight.
    Projection,
    /// Position axes exchanged in a rotation.
    Axes,
    /// The pairing of channels or the frequencies of a rotation.
    Pairing,
    /// A short convolution.
    Convolution,
    /// The gated delta rule.
    DeltaRule,
    /// The attention mask.
    Mask,
    /// The scale of attention scores.
    AttentionScale,
    /// Sums or products in 16 bits.
    Accumulation,
    /// The feed-forward network.
    FeedForward,
    /// The output head.
    Head,
    /// The divisor of the loss, or the labels.
    Loss,
    /// A gradient that overflowed on one side alone, in f16.
    Overflow,
    /// A gradient that is 0 only on one side.
    LostGradient,
    /// A gradient scaled by a factor.
    GradientScale,
    /// A different gradient.
    Gradient,
    /// The optimizer or its hyperparameters.
    Optimizer,
}

impl Fault {
    /// The description of the fault.
    pub fn text(self) -> &'static str {
        match self {
            Self::Division => {
                "the division of the batch: samples or tokens are on several ranks, or on none"
            }
            Self::Count => "the count of labelled tokens, by which the loss is divided",
            Self::Replicas => "replicas that have grown apart",
            Self::Part => "a part on the wrong rank",
            Self::Order => "the order of ranks: parts are gathered in another one",
            Self::StaleGather => "a stale gather: the weights are not those that the ranks hold",
            Self::Sum => "the sum of gradients over ranks",
            Self::GradientNorm => "the gradient norm: it is not that of all ranks' gradients",
            Self::MissedUpdate => "a part without an update",
            Self::Border => "labels at the border of a rank's tokens",
            Self::Sequences => "the borders of packed sequences, on a rank with some of the tokens",
            Self::Halo => "the halo: the tokens before a rank's own that its convolution reads",
            Self::State => "the state before a rank's tokens",
            Self::Exchange => {
                "attention over divided tokens: the exchange of heads, or the mask of a rank's queries"
            }
            Self::Data => "other data: tokens, labels or pictures differ before the model",
            Self::PositionIds => "position ids: the same tokens have other ids",
            Self::AdapterMissing => "an adapter that one side does not apply",
            Self::UntiedHead => "a tied head that is untied on one side",
            Self::Weights => "other weights: one that was not loaded, or another checkpoint",
            Self::Vision => "the vision tower: its weights and patches are equal",
            Self::Embeddings => "word embeddings, or the places of merged patches among them",
            Self::Epsilon => "the epsilon of the norm",
            Self::Norm => "the norm: its input and weight are equal",
            Self::Dropout => "dropout on one side only",
            Self::AdapterScale => "the adapter: its scale, or dropout before it",
            Self::Projection => "the product with a weight that is equal",
            Self::Axes => "axes exchanged in the rotation: tokens of pictures alone differ",
            Self::Pairing => "the pairing of channels, or the frequencies, of the rotation",
            Self::Convolution => "the short convolution, or the product before it",
            Self::DeltaRule => "the gated delta rule: the output of its convolution is equal",
            Self::Mask => "the attention mask",
            Self::AttentionScale => "the scale of attention's scores",
            Self::Accumulation => "sums in 16 bits",
            Self::FeedForward => "the feed-forward network: its input and weights are equal",
            Self::Head => "the output head",
            Self::Loss => "the loss: its labels, or its divisor",
            Self::Overflow => {
                "gradients that overflow in f16 on one side, whose step is skipped: record a later step"
            }
            Self::LostGradient => "a gradient that is lost: 0 on one side alone",
            Self::GradientScale => {
                "a gradient of another size: the rule of the loss, or accumulation"
            }
            Self::Gradient => "the backward of an operation with an equal forward",
            Self::Optimizer => "the optimizer: epsilon, betas, decay, clipping or rate",
        }
    }
}

/// The suspected cause of the difference between two steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suspicion {
    /// The kind of fault.
    pub fault: Fault,
    /// The place, such as `layer 1, q_proj`.
    pub place: String,
    /// The evidence.
    pub because: String,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The common items, in causal order.
    pub rows: Vec<Row>,
    /// Names in only one of the two records.
    pub only: [Vec<String>; 2],
    /// Settings that differ: the name and both values, or a dash.
    pub settings: Vec<[String; 3]>,
    /// The losses.
    pub losses: [f64; 2],
    /// `None` if rounding explains all differences.
    pub suspicion: Option<Suspicion>,
}

impl Comparison {
    /// The first row that exceeds rounding.
    pub fn first(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.exceeds())
    }
}

/// Compares two steps, the second with the first: each is one record, or those of all ranks in
/// their order. Of ranks, each is compared with the whole other step.
pub fn compare(left: &[StepRecord], right: &[StepRecord]) -> Comparison {
    match (left, right) {
        ([left], [right]) => {
            let facts = Facts::of(left, right);
            let mut comparison = facts.comparison();
            comparison.suspicion = facts.suspect(&comparison);
            comparison
        }
        _ => ranks::compare(left, right),
    }
}
