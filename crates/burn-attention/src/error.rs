//! The crate's error type.

use burn_fused::OpError;

/// The result of this crate's functions.
pub type Result<T, E = AttentionError> = std::result::Result<T, E>;

/// A mask or tensors that do not fit together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// Two tensors whose sizes must agree.
    #[error("{left} has {left_size} in {dimension}, {right} has {right_size}; they must agree")]
    Size {
        /// One of them.
        left: &'static str,
        /// The other.
        right: &'static str,
        /// The dimension.
        dimension: &'static str,
        /// Its size in `left`.
        left_size: usize,
        /// Its size in `right`.
        right_size: usize,
    },
    /// Two tensors whose shapes must agree.
    #[error("{left} has shape {left_shape:?}, {right} has {right_shape:?}; they must agree")]
    Shapes {
        /// One of them.
        left: &'static str,
        /// The other.
        right: &'static str,
        /// The shape of `left`.
        left_shape: Vec<usize>,
        /// The shape of `right`.
        right_shape: Vec<usize>,
    },
    /// Query heads that cannot be shared out among the key heads.
    #[error(
        "q has {heads} heads, k and v have {kv_heads}; \
         expected a multiple: each key head serves a group of query heads"
    )]
    HeadGroups {
        /// Heads of q.
        heads: usize,
        /// Heads of k and v.
        kv_heads: usize,
    },
    /// Value heads that cannot be shared out among the key heads.
    #[error(
        "v has {heads} heads, q and k have {key_heads}; \
         expected a multiple: each head of q and k serves a group of value heads"
    )]
    ValueHeads {
        /// Heads of v.
        heads: usize,
        /// Heads of q and k.
        key_heads: usize,
    },
    /// Types, devices, or numbers from another version.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Channels, taps or a rank of 0: there is nothing to sum over.
    #[error("the dimension to sum over (channels, taps or a rank) is 0; expected at least 1")]
    NoChannels,
    /// A mask that is too large.
    #[error(
        "a mask of {batch} samples of {keys} keys is too large; expected at most {} keys, \
         and samples times keys below 2^{}",
        u32::MAX,
        usize::BITS
    )]
    TooManyKeys {
        /// Samples.
        batch: usize,
        /// Keys of each.
        keys: usize,
    },
    /// A mask of more queries than spans are kept for.
    #[error(
        "a mask of {queries} queries is too large; expected at most {} queries",
        u32::MAX
    )]
    TooManyQueries {
        /// The queries.
        queries: usize,
    },
    /// A bias that cannot be broadcast to the scores.
    #[error("the bias has shape {found:?}, expected {expected:?}, where any size may be 1")]
    BiasShape {
        /// The shape found.
        found: [usize; 4],
        /// The shape of the scores, `[batch, heads, queries, keys]`.
        expected: [usize; 4],
    },
    /// A factor of the scores with which no softmax can be computed.
    #[error(
        "the scale is {found:?}, expected a number that is finite in the type of the scores: \
         f32, for f64 tensors f64"
    )]
    Scale {
        /// The number found.
        found: f64,
    },
    /// Cumulative lengths that do not divide the tokens into sequences.
    #[error(
        "cu_seqlens[{index}] is {found}, expected {expected}; \
         it starts with 0, never falls and ends with the number of tokens"
    )]
    CuSeqlens {
        /// Index of the wrong one; one past the last if it is missing.
        index: usize,
        /// The value that fits.
        expected: String,
        /// The value given.
        found: String,
    },
    /// More queries than keys, where queries are numbered from the end of the keys.
    #[error(
        "{rule}: {queries} queries for {keys} keys; expected at most as many: \
         the last query has the index of the last key"
    )]
    MoreQueries {
        /// The rule that needs indices.
        rule: &'static str,
        /// The queries.
        queries: usize,
        /// The keys.
        keys: usize,
    },
    /// Padding flags in a number that does not fit batch and keys.
    #[error("{found} padding flags, expected batch x keys = {batch} x {keys}; give one per key")]
    Attended {
        /// Samples.
        batch: usize,
        /// Keys of each.
        keys: usize,
        /// Flags found.
        found: usize,
    },
    /// A number with which no norm can be computed.
    #[error(
        "epsilon is {found:?}, expected 0 or a positive number that is normal in the type of the \
         sums: f32 (1.2e-38 to 3.4e38), for f64 tensors f64"
    )]
    Epsilon {
        /// The number found.
        found: f64,
    },
    /// A number that no update can be computed with.
    #[error("{what} is {found}, expected {expected}")]
    Update {
        /// The number.
        what: &'static str,
        /// The value that fits.
        expected: &'static str,
        /// The value given.
        found: f64,
    },
    /// A target that is no word.
    #[error(
        "the target of row {row} is {found}, expected a token id below {vocabulary}, or -100 for \
         none"
    )]
    Target {
        /// The row.
        row: usize,
        /// Its target.
        found: i64,
        /// Words that there are.
        vocabulary: usize,
    },
    /// Nothing to take the mean of.
    #[error("none of {rows} rows has a target; expected one that is not -100")]
    NoTargets {
        /// The rows.
        rows: usize,
    },
}
