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
    /// Query heads that cannot be divided among the key heads.
    #[error(
        "q has {heads} heads, k and v have {kv_heads}; \
         expected a multiple: each key head serves a group of query heads"
    )]
    HeadGroups {
        /// The number of heads of q.
        heads: usize,
        /// The number of heads of k and v.
        kv_heads: usize,
    },
    /// Value heads that cannot be divided among the key heads.
    #[error(
        "v has {heads} heads, q and k have {key_heads}; \
         expected a multiple: each head of q and k serves a group of value heads"
    )]
    ValueHeads {
        /// The number of heads of v.
        heads: usize,
        /// The number of heads of q and k.
        key_heads: usize,
    },
    /// Types, devices, or numbers from another version.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Channels, taps or a rank of 0: the sum would be empty.
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
        /// The number of samples.
        batch: usize,
        /// Keys per sample.
        keys: usize,
    },
    /// A mask with too many queries.
    #[error(
        "a mask of {queries} queries is too large; expected at most {} queries",
        u32::MAX
    )]
    TooManyQueries {
        /// The number of queries.
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
    /// A scale with which no softmax can be computed.
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
        /// The index of the wrong length, or one past the last if a length is missing.
        index: usize,
        /// The value that fits.
        expected: String,
        /// The value given.
        found: String,
    },
    /// More queries than keys, under a rule that numbers queries from the end of the keys.
    #[error(
        "{rule}: {queries} queries for {keys} keys; expected at most as many: \
         the last query has the index of the last key"
    )]
    MoreQueries {
        /// The rule that needs indices.
        rule: &'static str,
        /// The number of queries.
        queries: usize,
        /// The number of keys.
        keys: usize,
    },
    /// A number of padding flags that does not fit batch and keys.
    #[error("{found} padding flags, expected batch x keys = {batch} x {keys}; give one per key")]
    Attended {
        /// The number of samples.
        batch: usize,
        /// Keys per sample.
        keys: usize,
        /// The number of flags.
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
    /// A number with which no update can be computed.
    #[error("{what} is {found}, expected {expected}")]
    Update {
        /// The number.
        what: &'static str,
        /// The value that fits.
        expected: &'static str,
        /// The value given.
        found: f64,
    },
    /// A target outside the vocabulary.
    #[error(
        "the target of row {row} is {found}, expected a token id below {vocabulary}, or -100 for \
         none"
    )]
    Target {
        /// The row.
        row: usize,
        /// Its target.
        found: i64,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// No row with a target, so the mean is undefined.
    #[error("none of {rows} rows has a target; expected one that is not -100")]
    NoTargets {
        /// The number of rows.
        rows: usize,
    },
}

/// # Errors
/// [`AttentionError::Shapes`] if the shapes differ.
pub(crate) fn same_shape(
    [left, right]: [&'static str; 2],
    left_shape: &[usize],
    right_shape: &[usize],
) -> Result<()> {
    if left_shape == right_shape {
        return Ok(());
    }
    Err(AttentionError::Shapes {
        left,
        right,
        left_shape: left_shape.to_vec(),
        right_shape: right_shape.to_vec(),
    })
}

/// # Errors
/// [`AttentionError::Size`] if the sizes in `dimension` differ.
pub(crate) fn equal(
    [left, right]: [&'static str; 2],
    dimension: &'static str,
    left_size: usize,
    right_size: usize,
) -> Result<()> {
    if left_size == right_size {
        return Ok(());
    }
    Err(AttentionError::Size {
        left,
        right,
        dimension,
        left_size,
        right_size,
    })
}
