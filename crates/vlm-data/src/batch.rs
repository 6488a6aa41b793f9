//! Combines samples into micro-batches: packed end to end, or padded to similar lengths.

use std::ops::Range;

use crate::memory::reserve;
use crate::sample::TrainingSample;
use crate::text::{AnswerPair, IGNORED};
use crate::{Result, VlmDataError};

/// The padding token. No token attends to it.
const PADDING: i64 = 0;

/// The division of a global batch into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Samples packed end to end into one row of at most `tokens` tokens, by first fit decreasing.
    Packed {
        /// The token limit of a micro-batch.
        tokens: usize,
    },
    /// Rows of similar lengths, padded on the right to the longest; rows x longest is at most
    /// `tokens`.
    Padded {
        /// The token limit of a micro-batch, padding included.
        tokens: usize,
    },
}

impl Cut {
    /// The token limit of a micro-batch, padding included.
    pub fn tokens(self) -> usize {
        match self {
            Self::Packed { tokens } | Self::Padded { tokens } => tokens,
        }
    }

    /// Divides samples of these lengths into micro-batches, each a list of ascending sample
    /// indices.
    ///
    /// The order of the samples matters only between equal lengths. A sample longer than
    /// [`Cut::tokens`] gets a separate micro-batch.
    pub fn divide(self, lengths: &[usize]) -> Vec<Vec<usize>> {
        // The sort is stable.
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&sample| std::cmp::Reverse(lengths[sample]));
        let mut batches: Vec<(Vec<usize>, usize)> = Vec::new();
        for sample in order {
            let length = lengths[sample];
            let room = match self {
                Self::Packed { tokens } => batches
                    .iter_mut()
                    .find(|(_, used)| used.saturating_add(length) <= tokens),
                // The first of a batch is its longest.
                Self::Padded { tokens } => batches
                    .last_mut()
                    .filter(|(rows, _)| lengths[rows[0]].saturating_mul(rows.len() + 1) <= tokens),
            };
            match room {
                Some((samples, used)) => {
                    samples.push(sample);
                    *used += length;
                }
                None => batches.push((vec![sample], length)),
            }
        }
        let sorted = |(mut samples, _): (Vec<usize>, usize)| {
            samples.sort_unstable();
            samples
        };
        batches.into_iter().map(sorted).collect()
    }
}

/// The division of a micro-batch's tokens into samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleRows {
    /// One row; sample i is `cu_seqlens[i]..cu_seqlens[i + 1]`.
    Packed {
        /// The start of each sample and the end of the last, \[samples + 1\].
        cu_seqlens: Vec<usize>,
    },
    /// One sample per row, all rows of equal length.
    Padded {
        /// The number of rows.
        rows: usize,
        /// True for a token, false for padding, \[rows x length\].
        attention_mask: Vec<bool>,
    },
}

/// The samples of one forward and backward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatch {
    /// Token ids, row after row; 0 for padding.
    pub input_ids: Vec<i64>,
    /// The token's id if the previous token is trained to predict it, otherwise [`IGNORED`]: at
    /// untrained tokens, at padding, and at the first token of each sample, which has no
    /// predecessor.
    pub labels: Vec<i64>,
    /// The division of the tokens into samples.
    pub rows: SampleRows,
    /// The line of each sequence's record in the data file, from 1.
    pub lines: Vec<u64>,
    /// Time, height and width in patches of each picture, in order of the samples.
    pub image_grids: Vec<[usize; 3]>,
    /// Patches of the pictures, `[patches, channels]`.
    pub image_patches: Vec<f32>,
    /// Time, height and width in patches of each video, in order of the samples.
    pub video_grids: Vec<[usize; 3]>,
    /// Patches of the videos, `[patches, channels]`.
    pub video_patches: Vec<f32>,
    /// Seconds per temporal patch of each video.
    pub seconds_per_grid: Vec<f64>,
    /// The number of labels other than [`IGNORED`].
    pub trained_tokens: usize,
    /// The answers of samples of two sequences, which follow each other and show the same pictures
    /// and videos: their grids are listed for each sequence, their patches once.
    pub pairs: Vec<AnswerPair>,
    /// For each grid of pictures, and of videos, the number of its picture or video, if there are
    /// pairs.
    pub shown: Option<[Vec<usize>; 2]>,
}

impl MicroBatch {
    /// Joins samples in order.
    ///
    /// # Errors
    /// [`VlmDataError::Config`] if there are no samples, or if they exceed the token limit of the
    /// cut; [`VlmDataError::Memory`].
    pub fn new(mut samples: Vec<TrainingSample>, cut: Cut) -> Result<Self> {
        let sequences: Vec<_> = samples.iter().map(TrainingSample::sequences).collect();
        let rows = sequences.iter().map(Vec::len).sum();
        let longest = sequences.iter().flatten().map(Range::len).max();
        let longest = longest.unwrap_or(0);
        let tokens = match cut {
            Cut::Packed { .. } => samples.iter().map(TrainingSample::tokens).sum(),
            Cut::Padded { .. } => rows * longest,
        };
        if tokens == 0 || tokens > cut.tokens() {
            return Err(VlmDataError::Config {
                key: "the tokens of a micro-batch",
                expected: "samples that fit",
                found: format!("{} for {tokens} tokens", cut.tokens()),
            });
        }
        let mut batch = Self {
            input_ids: Vec::with_capacity(tokens),
            labels: Vec::with_capacity(tokens),
            rows: match cut {
                Cut::Packed { .. } => SampleRows::Packed {
                    cu_seqlens: vec![0],
                },
                Cut::Padded { .. } => SampleRows::Padded {
                    rows,
                    attention_mask: Vec::with_capacity(tokens),
                },
            },
            lines: Vec::with_capacity(rows),
            image_grids: Vec::new(),
            image_patches: join(&mut samples, |sample| &mut sample.image_patches)?,
            video_grids: Vec::new(),
            video_patches: join(&mut samples, |sample| &mut sample.video_patches)?,
            seconds_per_grid: Vec::new(),
            trained_tokens: 0,
            pairs: Vec::new(),
            shown: None,
        };
        for (sample, sequences) in samples.iter().zip(sequences) {
            batch.show(sample);
            let mut starts = Vec::with_capacity(sequences.len());
            for sequence in sequences {
                starts.push(batch.input_ids.len());
                batch.add(sample, sequence, longest);
            }
            if let (Some(pair), [first, second]) = (&sample.text.pair, &starts[..]) {
                let [chosen, rejected] = pair.answers;
                batch.pairs.push(AnswerPair {
                    second: *second,
                    answers: [first + chosen, second + rejected - pair.second],
                    is_good: pair.is_good,
                });
            }
        }
        let trained = batch.labels.iter().filter(|&&label| label != IGNORED);
        batch.trained_tokens = trained.count();
        Ok(batch)
    }

    /// Moves the padding of rows to the left, for prompts that a generator continues: an answer
    /// follows its prompt as in training. For a batch without pairs.
    pub fn padded_left(mut self) -> Self {
        if let SampleRows::Padded {
            rows,
            attention_mask,
        } = &mut self.rows
        {
            let len = attention_mask.len() / *rows;
            let ids = self.input_ids.chunks_exact_mut(len);
            let rows = ids.zip(self.labels.chunks_exact_mut(len));
            for ((ids, labels), mask) in rows.zip(attention_mask.chunks_exact_mut(len)) {
                let padding = mask.iter().filter(|attended| !**attended).count();
                ids.rotate_right(padding);
                labels.rotate_right(padding);
                mask.rotate_right(padding);
            }
        }
        self
    }

    /// Adds a sequence of a sample.
    fn add(&mut self, sample: &TrainingSample, sequence: Range<usize>, longest: usize) {
        let start = self.input_ids.len();
        let text = &sample.text;
        self.input_ids.extend(&text.input_ids[sequence.clone()]);
        self.labels.extend(&text.labels[sequence]);
        self.labels[start] = IGNORED;
        match &mut self.rows {
            SampleRows::Packed { cu_seqlens } => cu_seqlens.push(self.input_ids.len()),
            SampleRows::Padded { attention_mask, .. } => {
                let end = start + longest;
                attention_mask.resize(self.input_ids.len(), true);
                attention_mask.resize(end, false);
                self.input_ids.resize(end, PADDING);
                self.labels.resize(end, IGNORED);
            }
        }
        self.lines.push(sample.line);
        self.image_grids.extend(&sample.image_grids);
        self.video_grids.extend(&sample.video_grids);
        self.seconds_per_grid.extend(&sample.seconds_per_grid);
    }

    /// Numbers the pictures and videos of a pair, which both sequences show.
    fn show(&mut self, sample: &TrainingSample) {
        if sample.text.pair.is_none() {
            return;
        }
        let shown = self.shown.get_or_insert_default();
        for (shown, grids) in shown
            .iter_mut()
            .zip([&sample.image_grids, &sample.video_grids])
        {
            let first = shown.last().map_or(0, |last| last + 1);
            for _sequence in 0..2 {
                shown.extend(first..first + grids.len());
            }
        }
    }

    /// The rows of patches of pictures and of videos.
    pub fn patch_rows(&self) -> [usize; 2] {
        let grids = [&self.image_grids, &self.video_grids];
        let rows = |kind: usize| {
            let shown = self.shown.as_ref().map(|shown| &shown[kind]);
            let mut counted = 0;
            let is_new = |(index, grid): (usize, &[usize; 3])| {
                let is_new = shown.is_none_or(|shown| shown[index] == counted);
                counted += usize::from(is_new);
                is_new.then(|| grid.iter().product::<usize>())
            };
            grids[kind].iter().enumerate().filter_map(is_new).sum()
        };
        [rows(0), rows(1)]
    }

    /// The line of each sample in the data file, from 1.
    pub fn sample_lines(&self) -> impl Iterator<Item = u64> + '_ {
        let sequences = if self.pairs.is_empty() { 1 } else { 2 };
        self.lines.iter().step_by(sequences).copied()
    }
}

/// Joins patches end to end; moves those of a single sample.
fn join(
    samples: &mut [TrainingSample],
    of: fn(&mut TrainingSample) -> &mut Vec<f32>,
) -> Result<Vec<f32>> {
    if let [only] = samples {
        return Ok(std::mem::take(of(only)));
    }
    let elements = samples.iter_mut().map(|sample| of(sample).len() as u128);
    let mut all = reserve("the patches of a micro-batch", elements.sum())?;
    for sample in samples {
        all.append(&mut std::mem::take(of(sample)));
    }
    Ok(all)
}
