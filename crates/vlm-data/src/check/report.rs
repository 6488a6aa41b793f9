//! The counts of a check.

use std::ops::Range;

use serde::Serialize;

use super::findings::{Findings, Severity};
use crate::batch::Cut;

/// Samples packed together: those available to a trainer at one time.
const WINDOW: usize = 1024;
/// Tokens of a row where no limit is given, unless a sample is longer.
const ROW_TOKENS: usize = 4096;

/// The result of a check.
#[derive(Clone, Debug)]
pub struct DataReport {
    /// Records of the file.
    pub records: u64,
    /// Records with an error.
    pub bad_records: u64,
    /// The findings, errors first, in order of their first lines.
    pub findings: Vec<Findings>,
    /// The trainable samples, in file order.
    pub samples: Vec<SampleCounts>,
    /// The token limit of the check.
    pub max_tokens: Option<usize>,
}

/// The counts of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleCounts {
    /// The number of its record in the file, from 0.
    pub record: u64,
    /// Tokens.
    pub tokens: u32,
    /// Placeholder tokens of pictures and videos.
    pub vision: u32,
    /// Tokens that are trained on.
    pub trained: u32,
    /// Pictures.
    pub pictures: u32,
    /// Videos.
    pub videos: u32,
}

/// The distribution of a set of numbers, with percentiles by nearest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The smallest number.
    pub least: u32,
    /// The 5th percentile.
    pub p5: u32,
    /// The 25th percentile.
    pub p25: u32,
    /// The median.
    pub median: u32,
    /// The 75th percentile.
    pub p75: u32,
    /// The 95th percentile.
    pub p95: u32,
    /// The 99th percentile.
    pub p99: u32,
    /// The largest number.
    pub most: u32,
    /// The mean.
    pub mean: f64,
    /// The sum.
    pub total: u64,
}

/// The utilisation of rows of tokens; see [`DataReport::packing`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Packing {
    /// The token limit of a row and of a padded batch.
    pub row_tokens: usize,
    /// The number of rows of packed samples.
    pub packed_rows: usize,
    /// The share of positions in packed rows that hold tokens; the rest is empty.
    pub packed_filled: f64,
    /// The number of padded batches of similar lengths.
    pub padded_batches: usize,
    /// The share of positions in padded batches that hold tokens; the rest is padding or empty.
    pub padded_filled: f64,
}

/// The figures of a report, for a program that reads them.
#[derive(Clone, Debug, Serialize)]
pub struct DataFigures<'a> {
    /// Records of the file.
    pub records: u64,
    /// Records with an error.
    pub bad_records: u64,
    /// The findings, errors first.
    pub findings: &'a [Findings],
    /// The number of trainable samples.
    pub samples: usize,
    /// Tokens per sample.
    pub tokens: Option<Spread>,
    /// Placeholder tokens of pictures and videos per sample.
    pub vision_tokens: Option<Spread>,
    /// Trained tokens per sample.
    pub trained_tokens: Option<Spread>,
    /// Pictures per sample.
    pub pictures: Option<Spread>,
    /// The share of all tokens that is trained on.
    pub trained_share: f64,
    /// The utilisation of rows of [`DataReport::row_tokens`].
    pub packing: Packing,
}

impl DataReport {
    /// Computes the figures.
    pub fn figures(&self) -> DataFigures<'_> {
        let spread = |of: fn(&SampleCounts) -> u32| Spread::of(self.samples.iter().map(of));
        DataFigures {
            records: self.records,
            bad_records: self.bad_records,
            findings: &self.findings,
            samples: self.samples.len(),
            tokens: spread(|sample| sample.tokens),
            vision_tokens: spread(|sample| sample.vision),
            trained_tokens: spread(|sample| sample.trained),
            pictures: spread(|sample| sample.pictures),
            trained_share: self.trained_share(),
            packing: self.packing(self.row_tokens()),
        }
    }

    /// Returns the tokens of a row: the limit of the check; without one 4,096, or the longest
    /// sample.
    pub fn row_tokens(&self) -> usize {
        let longest = self.samples.iter().map(|sample| sample.tokens as usize);
        let longest = longest.max().unwrap_or(0);
        self.max_tokens.unwrap_or(ROW_TOKENS.max(longest))
    }

    fn trained_share(&self) -> f64 {
        let sum = |of: fn(&SampleCounts) -> u32| -> u64 {
            self.samples
                .iter()
                .map(|sample| u64::from(of(sample)))
                .sum()
        };
        sum(|sample| sample.trained) as f64 / sum(|sample| sample.tokens).max(1) as f64
    }

    /// True if any record has an error.
    pub fn has_errors(&self) -> bool {
        self.of(Severity::Error).next().is_some()
    }

    /// The findings of one severity.
    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Findings> {
        self.findings
            .iter()
            .filter(move |found| found.severity == severity)
    }

    /// Computes the utilisation of rows of `row_tokens` packed by first fit decreasing, and of
    /// padded batches of similar lengths. Both combine samples within windows of 1,024, in file
    /// order. A sample longer than a row gets a separate row.
    pub fn packing(&self, row_tokens: usize) -> Packing {
        let lengths: Vec<usize> = self.samples.iter().map(|s| s.tokens as usize).collect();
        let total: usize = lengths.iter().sum();
        let (packed, padded) = (
            Cut::Packed { tokens: row_tokens },
            Cut::Padded { tokens: row_tokens },
        );
        let (mut rows, mut batches, mut room, mut padded_room) = (0, 0, 0, 0);
        for window in lengths.chunks(WINDOW) {
            for row in packed.divide(window) {
                let used: usize = row.iter().map(|&sample| window[sample]).sum();
                rows += 1;
                room += used.max(row_tokens);
            }
            for batch in padded.divide(window) {
                let longest = batch.iter().map(|&sample| window[sample]).max();
                batches += 1;
                padded_room += (longest.unwrap_or(0) * batch.len()).max(row_tokens);
            }
        }
        let share = |room: usize| total as f64 / room.max(1) as f64;
        Packing {
            row_tokens,
            packed_rows: rows,
            packed_filled: share(room),
            padded_batches: batches,
            padded_filled: share(padded_room),
        }
    }
}

impl Spread {
    /// Computes the distribution of the numbers; `None` without numbers.
    pub fn of(numbers: impl IntoIterator<Item = u32>) -> Option<Self> {
        let mut sorted: Vec<u32> = numbers.into_iter().collect();
        sorted.sort_unstable();
        let most = *sorted.last()?;
        let total: u64 = sorted.iter().map(|&number| u64::from(number)).sum();
        let reached_by = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        Some(Self {
            least: sorted[0],
            p5: reached_by(5),
            p25: reached_by(25),
            median: reached_by(50),
            p75: reached_by(75),
            p95: reached_by(95),
            p99: reached_by(99),
            most,
            mean: total as f64 / sorted.len() as f64,
            total,
        })
    }
}

/// A histogram: counts of numbers in ranges of equal width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// The start of the first range, a multiple of the width.
    pub start: u32,
    /// The width of a range: 1, 2 or 5 times a power of ten.
    pub width: u32,
    /// The count of each range; empty without numbers.
    pub counts: Vec<u64>,
}

impl Histogram {
    /// Counts the numbers in at most `most` ranges.
    pub fn of(numbers: impl IntoIterator<Item = u32>, most: usize) -> Self {
        let numbers: Vec<u32> = numbers.into_iter().collect();
        let (Some(&least), Some(&largest)) = (numbers.iter().min(), numbers.iter().max()) else {
            return Self {
                start: 0,
                width: 1,
                counts: Vec::new(),
            };
        };
        let ranges = |width: u32| (largest / width - least / width) as usize + 1;
        let steps = (0..10).flat_map(|power| [1, 2, 5].map(|step| step * 10_u64.pow(power)));
        let widths = steps.map(|width| u32::try_from(width).unwrap_or(u32::MAX));
        let width = widths
            .into_iter()
            .find(|&width| ranges(width) <= most)
            .unwrap_or(u32::MAX);
        let first = least / width;
        let mut counts = vec![0; ranges(width)];
        for number in numbers {
            counts[(number / width - first) as usize] += 1;
        }
        Self {
            start: first * width,
            width,
            counts,
        }
    }

    /// Iterates over the ranges with their counts.
    pub fn bars(&self) -> impl Iterator<Item = (Range<u32>, u64)> {
        self.counts.iter().enumerate().map(|(index, &count)| {
            let start = self.start + index as u32 * self.width;
            (start..start.saturating_add(self.width), count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_reached_by_its_share() {
        let spread = Spread::of((1..=200).rev()).expect("numbers");
        let found = [
            spread.least,
            spread.p5,
            spread.p25,
            spread.median,
            spread.p75,
            spread.p95,
            spread.p99,
            spread.most,
        ];
        assert_eq!(found, [1, 10, 50, 100, 150, 190, 198, 200]);
        assert_eq!((spread.mean, spread.total), (100.5, 20_100));
        assert_eq!(Spread::of([7]).expect("a number").p5, 7);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn ranges_are_of_a_round_width() {
        let histogram = Histogram::of([17, 21, 39, 22], 12);
        assert_eq!((histogram.start, histogram.width), (16, 2));
        assert_eq!(histogram.counts.iter().sum::<u64>(), 4);
        assert_eq!(histogram.bars().next(), Some((16..18, 1)));
        assert_eq!(histogram.bars().last(), Some((38..40, 1)));
        assert!(Histogram::of([0, u32::MAX], 3).counts.len() <= 3);
        assert!(Histogram::of([], 3).counts.is_empty());
    }

    #[test]
    fn rows_are_filled_and_batches_padded() {
        let sample = |tokens| SampleCounts {
            record: 0,
            tokens,
            vision: 0,
            trained: 1,
            pictures: 0,
            videos: 0,
        };
        let report = DataReport {
            records: 4,
            bad_records: 0,
            findings: Vec::new(),
            samples: [6, 4, 5, 3].map(sample).to_vec(),
            max_tokens: None,
        };
        let packing = report.packing(10);
        // 6 + 4 and 5 + 3; batches of 6, of 5 and 4, and of 3; all of 10.
        assert_eq!((packing.packed_rows, packing.packed_filled), (2, 0.9));
        assert_eq!((packing.padded_batches, packing.padded_filled), (3, 0.6));
        // A sample longer than a row.
        assert_eq!(report.packing(4).packed_rows, 4);
    }
}
