//! The crate's error type.

use crate::hf::ConfigError;
use crate::position_ids::PositionIdsError;
use crate::{AxisLayout, Pairing};

/// The result of this crate's functions.
pub type Result<T, E = RopeError> = std::result::Result<T, E>;

/// An error of a specification, its positions, its tables or the tensors to rotate.
///
/// Each message states the expectation, the value found and, unless obvious, the remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RopeError {
    /// A head without channels, or wider than kernels can index.
    #[error("head_dim must be between 1 and {max}, found {found}")]
    HeadDim {
        /// Channels per head requested.
        found: usize,
        /// The widest head supported.
        max: usize,
    },
    /// The number of rotated channels is odd or 0: channels rotate in pairs.
    #[error(
        "rotary_dim must be even and at least 2, found {found}; it counts channels, not pairs, and \
         is head_dim unless you set it"
    )]
    OddRotaryDim {
        /// Rotated channels requested.
        found: usize,
    },
    /// The rotated channels do not fit into the head.
    #[error(
        "rotary_dim {rotary_dim} at offset {offset} does not fit into head_dim {head_dim}; \
         lower rotary_dim (partial_rotary_factor) or the offset"
    )]
    RotaryOutsideHead {
        /// Rotated channels.
        rotary_dim: usize,
        /// First rotated channel.
        offset: usize,
        /// Channels per head.
        head_dim: usize,
    },
    /// A `rotary_dim` that the pairing cannot divide.
    #[error("pairing {pairing:?} needs rotary_dim divisible by {divisor}, found {found}")]
    PairingDivisibility {
        /// The pairing.
        pairing: Pairing,
        /// The number that rotary_dim must be divisible by.
        divisor: usize,
        /// The rotary_dim found.
        found: usize,
    },
    /// Sections that do not sum to the number of pairs.
    #[error(
        "the sections {sections:?} sum to {sum}, expected rotary_dim/2 = {expected}; \
         sections count pairs of channels"
    )]
    SectionSum {
        /// The sections.
        sections: Vec<usize>,
        /// Their sum.
        sum: usize,
        /// Half of rotary_dim.
        expected: usize,
    },
    /// More axes than the kernels support, or a layout for a different number of axes.
    #[error("{layout} takes {expected} sections (one per position axis), found {found}")]
    SectionCount {
        /// The axis layout's name.
        layout: &'static str,
        /// The numbers of sections that it accepts.
        expected: &'static str,
        /// The number found.
        found: usize,
    },
    /// Sections with the right sum that the axis layout cannot arrange.
    #[error("{layout:?} cannot be arranged over {pairs} pairs: {reason}")]
    SectionsNotRealisable {
        /// The axis layout.
        layout: AxisLayout,
        /// Pairs of channels.
        pairs: usize,
        /// The reason.
        reason: String,
    },
    /// theta is NaN, infinite or not positive.
    #[error("rope theta must be a positive finite number, found {found}")]
    Theta {
        /// The value found.
        found: f64,
    },
    /// A list of frequencies of the wrong length.
    #[error(
        "expected {expected} frequencies, one per lane of the rotation, found a list of {found}; \
         a list that lanes share goes with AxisLayout::Lanes"
    )]
    FrequencyCount {
        /// Frequencies that the axis layout uses.
        expected: usize,
        /// Frequencies listed.
        found: usize,
    },
    /// A scaling for listed frequencies.
    #[error("a list of frequencies cannot be scaled by {rope_type}: list the scaled ones")]
    ListScaled {
        /// The scaling, as a configuration names it.
        rope_type: &'static str,
    },
    /// A frequency, listed or computed from theta and its scaling, that is NaN or so large that
    /// angles may be infinite.
    #[error(
        "frequency {index} must be a number of at most 1e280 either way, found {found:e}; change \
         the list, or theta and the parameters of its scaling"
    )]
    Frequency {
        /// Its index.
        index: usize,
        /// The value found.
        found: f64,
    },
    /// A lane list that fits neither the pairs nor the rotated channels.
    #[error(
        "found {found} lanes, expected {pairs} (one per pair) or {} (all first members of the \
         pairs, then all second ones)",
        2 * pairs
    )]
    LaneCount {
        /// Lanes found.
        found: usize,
        /// Pairs of rotated channels.
        pairs: usize,
    },
    /// A lane with an axis or frequency index out of range.
    #[error("lane {lane} names {what} {found}, expected one below {limit}")]
    LaneOutOfRange {
        /// The lane.
        lane: usize,
        /// The kind of index: "axis" or "frequency".
        what: &'static str,
        /// The index found.
        found: usize,
        /// The number of axes or frequencies.
        limit: usize,
    },
    /// The factor on cos and sin is NaN, infinite or not positive.
    #[error("attention scaling must be a positive finite number, found {found}")]
    AttentionScaling {
        /// The value found.
        found: f64,
    },
    /// Positions with a different number of axes than the specification.
    #[error(
        "this rotation is driven by {expected} position axes, the positions have {found}; {}",
        if *expected == 1 { "pass one id per token, or use an MRoPE axis layout" }
        else {
            "an MRoPE model needs one id per axis (T, H, W, ...) and token; \
             for text, repeat the position on every axis (Positions::text)"
        }
    )]
    PositionAxes {
        /// Axes of the specification.
        expected: usize,
        /// Axes of the positions.
        found: usize,
    },
    /// Positions for a different number of tokens than the tensors have.
    #[error(
        "expected positions for {batch} x {seq} tokens (or {seq}, shared by the batch), \
         found {found}; lay them out as [axes, batch * seq]"
    )]
    PositionTokens {
        /// Batch of the tensors.
        batch: usize,
        /// Sequence length of the tensors.
        seq: usize,
        /// Tokens of the positions.
        found: usize,
    },
    /// A flat list of ids that does not divide into axes.
    #[error(
        "{ids} position ids do not divide into {axes} axes; expected [axes, tokens] row by row"
    )]
    PositionShape {
        /// Ids given.
        ids: usize,
        /// Axes requested.
        axes: usize,
    },
    /// A negative id, or one beyond 2^31.
    #[error(
        "position id {found} (axis {axis}, token {token}) is outside 0..=2147483648; \
         ids are absolute and not negative (positions that are: Positions::real)"
    )]
    PositionOutOfRange {
        /// The id.
        found: i64,
        /// Its axis.
        axis: usize,
        /// Its token.
        token: usize,
    },
    /// A real position that is NaN, or beyond 2^31 either way.
    #[error(
        "position {found} (axis {axis}, token {token}) must be a finite number between \
         -2147483648 and 2147483648"
    )]
    RealPositionOutOfRange {
        /// The position.
        found: f64,
        /// Its axis.
        axis: usize,
        /// Its token.
        token: usize,
    },
    /// A real position where an id is required.
    #[error(
        "position {found} (axis {axis}, token {token}) is no id: expected whole numbers from 0, \
         as tables have rows for; compute angles for these tokens only (TokenAngles::new)"
    )]
    PositionNotId {
        /// The position.
        found: f64,
        /// Its axis.
        axis: usize,
        /// Its token.
        token: usize,
    },
    /// A position beyond the rows of a table.
    #[error(
        "position {position} is not among the cos/sin table's {rows} rows; \
         grow it first (CosSinTable::grow_to)"
    )]
    TableTooShort {
        /// The position.
        position: u32,
        /// Rows of the table.
        rows: usize,
    },
    /// A table larger than its budget.
    #[error(
        "a table up to position {position} takes {needed_bytes} bytes, over its budget of \
         {budget_bytes}; raise the budget or compute angles for the step's tokens only \
         (TokenAngles::new)"
    )]
    TableBudget {
        /// The highest position.
        position: u32,
        /// Bytes that the table would take.
        needed_bytes: u128,
        /// Bytes allowed.
        budget_bytes: usize,
    },
    /// Angles of a size that does not match the tokens and lanes.
    #[error(
        "{what}: expected {expected} values = {tokens} tokens x {width}, found {found} \
         (the cosines of a token's lanes, then their sines{})",
        if *found == 2 * expected {
            "; cos and sin as wide as the head, as in Hugging Face, repeat each value: pass one half"
        } else { "" }
    )]
    AngleShape {
        /// The buffer.
        what: &'static str,
        /// Values found.
        found: usize,
        /// Values expected.
        expected: usize,
        /// Tokens.
        tokens: usize,
        /// Values per token: its cosines, then its sines.
        width: usize,
    },
    /// Frequencies of heads that do not divide into axes and heads.
    #[error(
        "found {found} frequencies, expected [axes, heads, lanes] with {axes} axes (as in the \
         positions), {heads} heads and at least one lane"
    )]
    HeadFrequencies {
        /// Axes of the positions.
        axes: usize,
        /// Heads requested.
        heads: usize,
        /// Frequencies given.
        found: usize,
    },
    /// A tensor whose last axis is not contiguous.
    #[error(
        "{what} has stride {found} on its last axis, expected 1: \
         the channels of a head must be contiguous; copy the tensor first"
    )]
    LastStride {
        /// The tensor.
        what: &'static str,
        /// The stride, in elements.
        found: usize,
    },
    /// A view that reaches beyond its buffer.
    #[error("{what} needs {needed} elements for its shape and strides, its buffer holds {found}")]
    BufferTooSmall {
        /// The tensor.
        what: &'static str,
        /// Elements reached.
        needed: u128,
        /// Elements present.
        found: usize,
    },
    /// An output tensor with elements that alias each other, or that overlaps another tensor.
    #[error(
        "{what}: elements overlap in memory; \
         an output must own each of its elements once (make it contiguous first)"
    )]
    Overlap {
        /// The tensor, or the two.
        what: &'static str,
    },
    /// Two tensors that must agree in a dimension do not.
    #[error("{left} has {dimension} {left_size}, {right} has {right_size}; they must agree")]
    ShapeMismatch {
        /// First tensor.
        left: &'static str,
        /// Second tensor.
        right: &'static str,
        /// The dimension's name.
        dimension: &'static str,
        /// Its size in the first.
        left_size: usize,
        /// Its size in the second.
        right_size: usize,
    },
    /// The eps of a norm is neither 0 nor a normal number of f32.
    #[error("eps of the norm must be 0 or from 1.2e-38 to 3.4e38, as f32 holds it, found {found}")]
    NormEps {
        /// The value found.
        found: f64,
    },
    /// A norm's weight or weight gradient with a different number of channels than a head.
    #[error(
        "{what} holds {found} values, expected head_dim = {expected}, one per channel of a head"
    )]
    NormWeight {
        /// The weight.
        what: &'static str,
        /// Values found.
        found: usize,
        /// Channels of a head.
        expected: usize,
    },
    /// A parameter of a frequency scaling outside its range.
    #[error("{parameter} of rope type {rope_type} must be {expected}, found {found}")]
    ScalingParameter {
        /// The scaling, as a configuration names it.
        rope_type: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value found.
        found: f64,
    },
    /// A list of LongRoPE factors that does not match the number of rotated pairs.
    #[error(
        "{list} holds {found} factors, expected {expected}, one per pair of rotated channels; \
         check head_dim and partial_rotary_factor"
    )]
    FactorCount {
        /// The list.
        list: &'static str,
        /// Pairs of rotated channels.
        expected: usize,
        /// Factors found.
        found: usize,
    },
    /// A configuration that is invalid, incomplete or contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A prompt with inconsistent tokens, grids, masks or lengths.
    #[error(transparent)]
    PositionIds(#[from] PositionIdsError),
}
