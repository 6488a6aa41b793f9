//! The shape of a clip, its tokens, and their position ids.
//!
//! A sequence is `<start>`, one token per cell of the clip, then `frame f row r column c ?`.

use super::options::Axes;

/// Words after the clip.
pub(crate) const QUESTION_WORDS: usize = 4;

/// Frames of rows of columns; a cell holds one digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clip {
    pub(crate) frames: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Clip {
    /// Digits in a clip.
    pub(crate) fn cells(self) -> usize {
        self.frames * self.rows * self.columns
    }

    /// Tokens in a sequence.
    pub(crate) fn tokens(self) -> usize {
        1 + self.cells() + QUESTION_WORDS
    }

    /// Frame, row and column of a cell.
    pub(crate) fn place(self, cell: usize) -> [usize; 3] {
        let (frame, rest) = (
            cell / (self.rows * self.columns),
            cell % (self.rows * self.columns),
        );
        [frame, rest / self.columns, rest % self.columns]
    }

    /// Position ids, row-major `[axes, tokens]`.
    ///
    /// With three axes as in Qwen2-VL (Wang et al. 2024, section 2.1): text counts up alike on T, H and W; a
    /// cell is at its (frame, row, column) from the start of the clip; text goes on one past the largest id.
    pub(crate) fn position_ids(self, axes: Axes) -> Vec<i64> {
        match axes {
            Axes::OneD => (0..self.tokens() as i64).collect(),
            Axes::Mrope => {
                let start = 1;
                let resume = start + self.frames.max(self.rows).max(self.columns);
                (0..3)
                    .flat_map(|axis| {
                        let cells = (0..self.cells()).map(move |c| start + self.place(c)[axis]);
                        (0..start)
                            .chain(cells)
                            .chain(resume..resume + QUESTION_WORDS)
                    })
                    .map(|id| id as i64)
                    .collect()
            }
        }
    }

    /// The size of the vocabulary: five words, then the numerals.
    pub(crate) fn vocabulary(self) -> usize {
        WORDS.len() + 3* self.frames.max(self.rows).max(self.columns)
    }

    /// The text tokens of a sequence that asks for `cell`: `<start>`, then the question.
    pub(crate) fn words(self, cell: usize) -> [i64; 1 + QUESTION_WORDS] {
        let numeral = |n: usize| (WORDS.len() + n) as i64;
        let m = self.frames.max(self.rows).max(self.columns) as i64;
        let [frame, row, column] = self.place(cell).map(numeral);
        [START, frame, m+row, m*2+column, ASK]
    }

    /// The question as a person reads it.
    pub(crate) fn question(self, cell: usize) -> String {
        let word = |token: i64| {
            let token = token as usize;
            WORDS
                .get(token)
                .map_or_else(|| (token - WORDS.len()).to_string(), |w| (*w).to_owned())
        };
        self.words(cell)[1..]
            .iter()
            .map(|&token| word(token))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

const WORDS: [&str; 5] = ["<start>", "frame", "row", "column", "?"];
const START: i64 = 0;
const FRAME: i64 = 1;
const ROW: i64 = 2;
const COLUMN: i64 = 3;
const ASK: i64 = 4;
