//! The shape of a clip, its tokens, and their position ids.
//!
//! A sequence is `<start>`, one token per cell of the clip, then the question: `frame 1`, `row 0`,
//! `column 1`, `?`.

/// Words of a question.
pub(crate) const QUESTION_WORDS: usize = 4;
/// Text tokens of a sequence: `<start>` and the question.
pub(crate) const TEXT_TOKENS: usize = 1 + QUESTION_WORDS;

/// The axes of a clip, in the words of a question.
const AXIS_NAMES: [&str; 3] = ["frame", "row", "column"];
/// Index of the word before a clip, `<start>`.
const START: usize = 0;
/// Index of the word at which the answer is read, `?`.
const ASK: usize = 1;
/// Index of the first word that names a coordinate.
const COORDINATES: usize = 2;

/// The axes of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// Time, height and width.
    Mrope,
    /// The index in the sequence.
    OneD,
}

/// Frames of rows of columns; a cell holds one digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clip {
    /// Frames of a clip.
    pub frames: usize,
    /// Rows of a frame.
    pub rows: usize,
    /// Columns of a frame.
    pub columns: usize,
}

impl Clip {
    /// Digits in a clip.
    pub fn cells(self) -> usize {
        self.frames * self.rows * self.columns
    }

    /// Tokens in a sequence.
    pub fn tokens(self) -> usize {
        self.cells() + TEXT_TOKENS
    }

    /// Frame, row and column of a cell.
    pub fn coordinates(self, cell: usize) -> [usize; 3] {
        let row = cell / self.columns;
        [row / self.rows, row % self.rows, cell % self.columns]
    }

    /// The longest side.
    fn longest(self) -> usize {
        self.frames.max(self.rows).max(self.columns)
    }

    /// Position ids, row-major `[axes, tokens]`.
    ///
    /// With three axes as in Qwen2-VL (Wang et al. 2024, section 2.1): a text token has the same id
    /// on T, H and W; a cell has its (frame, row, column), counted from the start of the clip; text
    /// continues one past the largest id.
    pub fn position_ids(self, axes: Axes) -> Vec<i64> {
        let ids = |axis: usize| {
            let start = 1;
            let question = start + self.longest();
            (0..start)
                .chain((0..self.cells()).map(move |cell| start + self.coordinates(cell)[axis]))
                .chain(question..question + QUESTION_WORDS)
                .map(|id| id as i64)
        };
        match axes {
            Axes::OneD => (0..self.tokens() as i64).collect(),
            Axes::Mrope => (0..AXIS_NAMES.len()).flat_map(ids).collect(),
        }
    }

    /// Words in the vocabulary.
    pub fn vocabulary(self) -> usize {
        COORDINATES + AXIS_NAMES.len() * self.longest()
    }

    /// The text tokens of a sequence that asks for `cell`.
    pub fn words(self, cell: usize) -> [i64; TEXT_TOKENS] {
        let [frame, row, column] = self.coordinates(cell);
        let word = |axis: usize, number: usize| COORDINATES + axis * self.longest() + number;
        [START, word(0, frame), word(1, row), word(2, column), ASK].map(|word| word as i64)
    }

    /// The question in words.
    pub fn question(self, cell: usize) -> String {
        let words: Vec<String> = AXIS_NAMES
            .iter()
            .zip(self.coordinates(cell))
            .map(|(name, number)| format!("{name} {number}"))
            .collect();
        format!("{} ?", words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUBE: Clip = Clip {
        frames: 2,
        rows: 2,
        columns: 2,
    };

    #[test]
    fn position_ids_of_a_cube_are_those_written_out_by_hand() {
        #[rustfmt::skip]
        let expected = [
            // start | frame 0     | frame 1     | question
            0,         1, 1, 1, 1,   2, 2, 2, 2,   3, 4, 5, 6,
            0,         1, 1, 2, 2,   1, 1, 2, 2,   3, 4, 5, 6,
            0,         1, 2, 1, 2,   1, 2, 1, 2,   3, 4, 5, 6,
        ];
        assert_eq!(CUBE.position_ids(Axes::Mrope), expected);
        assert_eq!(CUBE.position_ids(Axes::OneD), (0..13).collect::<Vec<i64>>());
    }

    #[test]
    fn text_goes_on_past_the_longest_side() {
        let wide = Clip {
            frames: 1,
            rows: 2,
            columns: 3,
        };
        #[rustfmt::skip]
        let expected = [
            0,   1, 1, 1, 1, 1, 1,   4, 5, 6, 7,
            0,   1, 1, 1, 2, 2, 2,   4, 5, 6, 7,
            0,   1, 2, 3, 1, 2, 3,   4, 5, 6, 7,
        ];
        assert_eq!(wide.position_ids(Axes::Mrope), expected);
    }

    #[test]
    fn each_cell_has_a_question_of_its_own() {
        assert_eq!(CUBE.question(5), "frame 1 row 0 column 1 ?");
        let mut questions: Vec<_> = (0..CUBE.cells()).map(|cell| CUBE.words(cell)).collect();
        questions.sort_unstable();
        questions.dedup();
        assert_eq!(questions.len(), CUBE.cells());
        let vocabulary = CUBE.vocabulary() as i64;
        assert!(
            questions
                .iter()
                .flatten()
                .all(|&w| (0..vocabulary).contains(&w))
        );
    }
}
