//! Errors of prompts.

use std::fmt;

/// The kind of a placeholder token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Text,
    Image,
    Video,
    Audio,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
        }
    }
}

/// A prompt with inconsistent tokens, grids, masks or lengths.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PositionIdsError {
    /// A family with position ids unknown to this crate.
    #[error(
        "no position ids are known for model type {}; known are the families with mrope_section",
        found.join(" / ")
    )]
    UnknownModelType {
        /// The model types found, innermost first.
        found: Vec<String>,
    },
    /// A rule's parameter outside its range.
    #[error("{parameter} must be {expected}, found {found}")]
    Parameter {
        /// The parameter.
        parameter: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value found.
        found: f64,
    },
    /// A list of a length that does not match the tokens.
    #[error("{what} has {found} entries, expected {expected}, one per {per}")]
    Length {
        /// The list.
        what: &'static str,
        /// The unit of the list: each has one entry.
        per: &'static str,
        /// Entries expected.
        expected: usize,
        /// Entries found.
        found: usize,
    },
    /// Tokens that do not divide into the rows of a batch.
    #[error("{tokens} tokens do not divide into {rows} rows of one length")]
    Batch {
        /// Tokens given.
        tokens: usize,
        /// Rows requested.
        rows: usize,
    },
    /// Cumulative lengths that do not describe a packing of the tokens.
    #[error(
        "cu_seqlens {cu_seqlens:?} must begin with 0, never fall and end with the {tokens} tokens"
    )]
    CuSeqlens {
        /// The lengths found.
        cu_seqlens: Vec<usize>,
        /// Tokens packed.
        tokens: usize,
    },
    /// A token type other than 0 to 3.
    #[error(
        "token type {found} of token {token} is unknown; expected 0 text, 1 image, 2 video, 3 audio"
    )]
    TokenType {
        /// The type found.
        found: i64,
        /// Index of the token.
        token: usize,
    },
    /// A grid that the patch merger does not divide.
    #[error(
        "{kind} grid {grid:?} is empty or does not divide into merged patches of {merge:?} \
         (T, H, W)"
    )]
    Grid {
        /// `image` or `video`.
        kind: &'static str,
        /// The grid, T, H and W in patches.
        grid: [usize; 3],
        /// Patches that merge into one token along T, H and W.
        merge: [usize; 3],
    },
    /// A placeholder without a remaining grid.
    #[error(
        "token {token} of row {row} is a placeholder of {kind}, but \
         all {given} {kind} grids are used up; pass one grid per {kind}, in reading order"
    )]
    MissingGrid {
        /// `image` or `video`.
        kind: &'static str,
        /// Row of the batch or segment of the packing.
        row: usize,
        /// Index of the token in its row.
        token: usize,
        /// Grids given.
        given: usize,
    },
    /// Grids without placeholders.
    #[error("{given} {kind} grids were given, but the prompt has placeholders for {used}")]
    UnusedGrid {
        /// `image` or `video`.
        kind: &'static str,
        /// Grids given.
        given: usize,
        /// Grids that the placeholders use.
        used: usize,
    },
    /// A run of placeholders shorter than its grid, or an audio-in-video span longer than its grid.
    #[error(
        "the {kind} at token {token} of row {row} takes {expected} placeholder tokens for \
         its grid {grid:?}, found {found}"
    )]
    GridTokens {
        /// `image` or `video`.
        kind: &'static str,
        /// Row of the batch or segment of the packing.
        row: usize,
        /// Index of its first token in the row.
        token: usize,
        /// The grid, T, H and W in patches.
        grid: [usize; 3],
        /// Placeholders that the grid takes.
        expected: usize,
        /// Placeholders found.
        found: usize,
    },
    /// A sequence that does not divide into the chunks of a zigzag split.
    #[error(
        "sequence {sequence} has {len} tokens, which do not divide into 2 x {ranks} chunks; \
         pad it to a multiple of {}",
        ranks.saturating_mul(2)
    )]
    Zigzag {
        /// Index of the sequence.
        sequence: usize,
        /// Its tokens.
        len: usize,
        /// Ranks of the split.
        ranks: usize,
    },
    /// More tokens or patches than fit into memory.
    #[error("{found} {what} or more do not fit in memory; expected fewer")]
    TooMany {
        /// The things counted.
        what: &'static str,
        /// Their number, saturating at the largest `usize`.
        found: usize,
    },
    /// A rank beyond the split, or a token beyond the prompt.
    #[error("{what} {found} does not exist; there are {count}")]
    Index {
        /// The things counted.
        what: &'static str,
        /// The index.
        found: usize,
        /// The number of ranks or tokens.
        count: usize,
    },
}
