//! Real digit scans, and questions about clips made of them.

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use safetensors::SafeTensors;

use crate::clip::Clip;
use crate::error::{DigitsError, Result};

/// Pixels of one scan: 8 rows of 8, values in `[0, 1]`.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// Rows of a scan, and columns.
pub const SIDE: usize = 8;
/// The answers: the ten digits.
pub const CLASSES: usize = 10;

/// One digit of this number is kept for the test, by its index in the data set.
const TEST_EVERY: usize = 5;

const FILE: &[u8] = include_bytes!("../data/digits.safetensors");

/// The part of the scans that a question is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    Train,
    Test,
}

/// The scans (`data/README.md` names their source), split before any sampling.
pub struct Digits {
    images: Vec<[f32; PIXELS]>,
    labels: Vec<u8>,
    train: Vec<usize>,
    test: Vec<usize>,
}

impl Digits {
    /// Reads the scans that are built into the program.
    ///
    /// # Errors
    /// [`DigitsError::Digits`] if they do not have the expected shape.
    pub fn load() -> Result<Self> {
        let file =
            SafeTensors::deserialize(FILE).map_err(|e| DigitsError::Digits(e.to_string()))?;
        let tensor = |name: &str| {
            file.tensor(name)
                .map(|t| t.data())
                .map_err(|e| DigitsError::Digits(e.to_string()))
        };
        let (pixels, labels) = (tensor("images")?, tensor("labels")?.to_vec());
        let (images, rest) = pixels.as_chunks::<PIXELS>();
        if images.len() != labels.len() || !rest.is_empty() {
            return Err(DigitsError::Digits(format!(
                "{} labels for {} pixels",
                labels.len(),
                pixels.len()
            )));
        }
        let images: Vec<_> = images
            .iter()
            .map(|image| image.map(|p| f32::from(p) / 16.0))
            .collect();
        let (test, train) = (0..images.len()).partition(|i| i % TEST_EVERY == TEST_EVERY - 1);
        Ok(Self {
            images,
            labels,
            train,
            test,
        })
    }

    /// The indices of the scans in one part.
    pub fn indices(&self, split: Split) -> &[usize] {
        match split {
            Split::Train => &self.train,
            Split::Test => &self.test,
        }
    }

    /// Draws `count` questions about clips whose digits all come from `split`.
    pub fn questions(
        &self,
        split: Split,
        clip: Clip,
        count: usize,
        rng: &mut impl Rng,
    ) -> Vec<Question> {
        let indices = self.indices(split);
        (0..count)
            .map(|_| {
                let digits = (0..clip.cells())
                    .map(|_| indices[rng.random_range(0..indices.len())])
                    .collect();
                let nudges = match split {
                    Split::Train => NUDGES.len(),
                    Split::Test => 1,
                };
                Question {
                    digits,
                    nudges: (0..clip.cells())
                        .map(|_| NUDGES[rng.random_range(0..nudges)])
                        .collect(),
                    cell: rng.random_range(0..clip.cells()),
                }
            })
            .collect()
    }

    /// The pixels of one cell, as the model receives them.
    pub fn cell(&self, question: &Question, cell: usize) -> [f32; PIXELS] {
        let image = self.image(question.digits[cell]);
        let [down, right] = question.nudges[cell];
        std::array::from_fn(|pixel| {
            let row = (pixel / SIDE).checked_add_signed(-down);
            let column = (pixel % SIDE).checked_add_signed(-right);
            match (row, column) {
                (Some(row), Some(column)) if row < SIDE && column < SIDE => {
                    image[row * SIDE + column]
                }
                _ => 0.0,
            }
        })
    }

    /// The pixels of one scan.
    pub fn image(&self, digit: usize) -> &[f32; PIXELS] {
        &self.images[digit]
    }

    /// The digit that one scan shows.
    pub fn label(&self, digit: usize) -> u8 {
        self.labels[digit]
    }

    /// The right answer to a question.
    pub fn answer(&self, question: &Question) -> u8 {
        self.label(question.digits[question.cell])
    }

    /// The best accuracy on `questions` of a reader who does not know where a digit is: it names
    /// the most frequent digit of the clip, and reads without error.
    pub fn accuracy_without_position(&self, questions: &[Question]) -> f64 {
        let expected: f64 = questions
            .iter()
            .map(|q| {
                let mut count = [0usize; CLASSES];
                q.digits
                    .iter()
                    .for_each(|&d| count[usize::from(self.label(d))] += 1);
                count.iter().copied().max().unwrap_or(0) as f64 / q.digits.len() as f64
            })
            .sum();
        expected / questions.len() as f64
    }
}

/// A clip, as the index of the scan in each cell (frames, then rows, then columns), and the cell
/// that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The scan in each cell.
    pub digits: Vec<usize>,
    /// Pixels by which each scan is moved, down and right: none in a test.
    pub nudges: Vec<[isize; 2]>,
    /// The cell that is asked for.
    pub cell: usize,
}

/// How a scan of the training part may be moved, so that the model learns digits and not these
/// scans.
const NUDGES: [[isize; 2]; 5] = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]];

/// The use of random numbers; each use has its own stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Draw {
    /// The questions of one training step.
    Step(usize),
    /// The fixed questions of the test.
    Test,
}

/// The generator for one use. It depends on nothing drawn before, so a resumed run draws the same
/// as an uninterrupted one.
pub(crate) fn rng(seed: u64, draw: Draw) -> StdRng {
    let (stream, step) = match draw {
        Draw::Step(step) => (0u64, step as u64),
        Draw::Test => (1, 0),
    };
    let mut key = [0u8; 32];
    for (bytes, word) in key
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip([seed, stream, step])
    {
        *bytes = word.to_le_bytes();
    }
    StdRng::from_seed(key)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const CUBE: Clip = Clip {
        frames: 2,
        rows: 2,
        columns: 2,
    };

    #[test]
    fn training_and_test_share_no_digit() {
        let digits = Digits::load().unwrap();
        let of = |split| {
            digits
                .indices(split)
                .iter()
                .copied()
                .collect::<HashSet<_>>()
        };
        let (train, test) = (of(Split::Train), of(Split::Test));
        assert!(train.is_disjoint(&test));
        assert_eq!((train.len(), test.len()), (1438, 359));
        for (split, allowed) in [(Split::Train, train), (Split::Test, test)] {
            let questions = digits.questions(split, CUBE, 500, &mut rng(7, Draw::Step(3)));
            assert!(
                questions
                    .iter()
                    .flat_map(|q| &q.digits)
                    .all(|d| allowed.contains(d))
            );
            let cells: HashSet<_> = questions.iter().map(|q| q.cell).collect();
            assert_eq!(cells.len(), CUBE.cells(), "every cell is asked for");
        }
    }

    #[test]
    fn scans_and_labels_are_those_of_the_data_set() {
        let digits = Digits::load().unwrap();
        let labels: Vec<u8> = (0..10).map(|i| digits.label(i)).collect();
        assert_eq!(labels, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        // The second row of the first scan in the published file reads 0 0 13 15 10 15 5 0.
        let row = &digits.image(0)[8..16];
        assert_eq!(row, [0., 0., 13., 15., 10., 15., 5., 0.].map(|p| p / 16.0));
    }

    #[test]
    fn a_nudge_moves_a_scan_and_fills_with_white() {
        let digits = Digits::load().unwrap();
        let question = Question {
            digits: vec![0; 3],
            nudges: vec![[0, 0], [1, 0], [0, -1]],
            cell: 0,
        };
        let [still, down, left] = [0, 1, 2].map(|cell| digits.cell(&question, cell));
        assert_eq!(&still, digits.image(0));
        assert_eq!(down[8..], still[..56]);
        assert_eq!(down[..8], [0.0; 8]);
        for row in 0..8 {
            assert_eq!(left[8 * row..8 * row + 7], still[8 * row + 1..8 * row + 8]);
            assert_eq!(left[8 * row + 7], 0.0);
        }
        let nudged = |split| {
            let questions = digits.questions(split, CUBE, 50, &mut rng(0, Draw::Step(0)));
            questions
                .iter()
                .flat_map(|q| &q.nudges)
                .any(|n| *n != [0, 0])
        };
        assert!(nudged(Split::Train) && !nudged(Split::Test));
    }

    #[test]
    fn a_draw_depends_on_seed_and_step_alone() {
        let digits = Digits::load().unwrap();
        let draw = |seed, draw| digits.questions(Split::Train, CUBE, 4, &mut rng(seed, draw));
        assert_eq!(draw(1, Draw::Step(5)), draw(1, Draw::Step(5)));
        assert_ne!(draw(1, Draw::Step(5)), draw(1, Draw::Step(6)));
        assert_ne!(draw(1, Draw::Step(5)), draw(2, Draw::Step(5)));
        assert_ne!(draw(1, Draw::Step(0)), draw(1, Draw::Test));
    }

    #[test]
    fn questions_drawn_in_parts_are_those_drawn_at_once() {
        let digits = Digits::load().unwrap();
        let (mut once, mut parts) = (rng(0, Draw::Test), rng(0, Draw::Test));
        let mut draw = |count| digits.questions(Split::Test, CUBE, count, &mut parts);
        let found = [draw(3), draw(1), draw(4)].concat();
        assert_eq!(found, digits.questions(Split::Test, CUBE, 8, &mut once));
    }

    #[test]
    fn without_position_the_most_frequent_digit_is_the_best_answer() {
        let digits = Digits::load().unwrap();
        // The first scan shows 0, the second 1.
        let question = |digits: [usize; 4]| Question {
            digits: digits.to_vec(),
            nudges: vec![[0, 0]; 4],
            cell: 0,
        };
        let questions = [question([0, 0, 0, 1]), question([0, 1, 2, 3])];
        assert_eq!(digits.accuracy_without_position(&questions), 0.5);
    }
}
