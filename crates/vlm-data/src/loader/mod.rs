//! Batches of a data file in an order determined by a seed, prepared ahead by threads.

mod order;
mod workers;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::batch::{Cut, MicroBatch};
use crate::dataset::DataSet;
use crate::sample::{SampleEncoder, TrainingSample};
use crate::text::TextError;
use crate::{Result, VlmDataError};
pub(crate) use order::shuffled;
use order::{Plan, Turn};
use workers::{Made, Workers};

/// The size of the batch of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchSize {
    /// A number of samples, over all ranks.
    Samples(usize),
    /// A token limit over all ranks: the batch takes the next samples up to this limit, at least
    /// one. Every rank then builds all samples to know their lengths, and keeps its own.
    Tokens(usize),
}

impl BatchSize {
    fn size(self) -> usize {
        match self {
            Self::Samples(size) | Self::Tokens(size) => size,
        }
    }
}

/// The treatment of a record that gives no sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Its error ends the loader.
    #[default]
    Stop,
    /// Its batch is one sample smaller and holds the error.
    Skip,
}

/// Options of a [`Loader`].
#[derive(Clone, Debug, PartialEq)]
pub struct LoaderOptions {
    /// The size of a global batch.
    pub batch: BatchSize,
    /// The division into micro-batches. It does not affect the contents of a global batch.
    pub cut: Cut,
    /// True to give each sample a micro-batch of its own.
    pub is_alone: bool,
    /// The seed of the order. Together with the epoch's number, it determines the order of each
    /// epoch; `None` keeps the file order.
    pub seed: Option<u64>,
    /// The number of passes over the data.
    pub epochs: u64,
    /// This rank, from 0.
    pub rank: usize,
    /// The number of ranks that share each global batch. Rank r takes every `ranks`-th sample,
    /// starting with sample r.
    pub ranks: usize,
    /// Threads that build samples ahead.
    pub threads: usize,
    /// The limit on bytes of samples built ahead; above it, no further sample is started. Memory
    /// also holds one sample per thread and the current batch.
    pub ahead_bytes: usize,
    /// The treatment of a record that gives no sample.
    pub on_error: OnError,
}

impl LoaderOptions {
    /// Creates options for one rank, one epoch in file order, one thread per core, 1 GiB ahead, and
    /// errors that end the loader.
    pub fn new(batch: BatchSize, cut: Cut) -> Self {
        Self {
            batch,
            cut,
            is_alone: false,
            seed: None,
            epochs: 1,
            rank: 0,
            ranks: 1,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            ahead_bytes: 1 << 30,
            on_error: OnError::default(),
        }
    }

    /// Computes the number of global batches of all epochs for samples of these lengths, given in
    /// file order. It equals the number of batches of a [`Loader`] that skips no record.
    pub fn batches(&self, lengths: &[usize]) -> u64 {
        let first = Turn {
            epoch: 0,
            before: 0,
        };
        if let BatchSize::Samples(samples) = self.batch {
            let of_epoch = lengths.len().div_ceil(samples.max(1)) as u64;
            return of_epoch.saturating_mul(self.epochs);
        }
        let (mut batches, mut epoch, mut tokens) = (0, None, 0_usize);
        for (turn, record) in Plan::new(lengths.len(), self, first) {
            tokens = tokens.saturating_add(lengths[record]);
            if epoch != Some(turn.epoch) || tokens > self.batch.size() {
                (batches, epoch, tokens) = (batches + 1, Some(turn.epoch), lengths[record]);
            }
        }
        batches
    }

    fn check(&self, max_tokens: Option<usize>) -> Result<()> {
        let positive = [
            ("batch", self.batch.size()),
            ("cut.tokens", self.cut.tokens()),
            ("ranks", self.ranks),
            ("threads", self.threads),
        ];
        let wrong = |key, expected, found: String| {
            Err(VlmDataError::Config {
                key,
                expected,
                found,
            })
        };
        if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return wrong(key, "at least 1", "0".to_owned());
        }
        if self.rank >= self.ranks {
            let found = format!("{} of {}", self.rank, self.ranks);
            return wrong("rank", "less than ranks", found);
        }
        if max_tokens.is_none_or(|most| most > self.cut.tokens()) {
            let found = max_tokens.map_or("absent".to_owned(), |most| most.to_string());
            let expected = "at most the tokens of a micro-batch, cut.tokens";
            return wrong("max_tokens", expected, found);
        }
        Ok(())
    }
}

/// The position in a data file, as a checkpoint stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// The data, by [`DataSet::fingerprint`].
    pub fingerprint: u64,
    /// The seed of the order.
    pub seed: Option<u64>,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of samples already taken in the epoch, over all ranks.
    pub samples: u64,
}

/// This rank's shard of the batch of one weight update.
#[derive(Debug)]
pub struct GlobalBatch {
    /// The micro-batches, which go through the model one by one; empty if this rank has no sample
    /// of the batch.
    pub micro_batches: Vec<MicroBatch>,
    /// The records of the samples, in their order in the batch.
    pub records: Vec<usize>,
    /// The number of trained labels in this rank's shard. A mean over tokens divides by its sum
    /// over all ranks.
    pub trained_tokens: usize,
    /// The number of tokens in this rank's shard, without padding.
    pub tokens: usize,
    /// The errors of skipped records.
    pub skipped: Vec<VlmDataError>,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The position after this batch.
    pub next: DataPosition,
}

/// Iterator over the global batches of a data file, in order. Threads build samples ahead; the
/// batches do not depend on their number.
///
/// The contents of a global batch, over all ranks, depend on neither the cut nor the number of
/// ranks. The last batch of an epoch may be smaller.
#[derive(Debug)]
pub struct Loader {
    options: LoaderOptions,
    records: u64,
    fingerprint: u64,
    next: Turn,
    workers: Workers,
    /// A sample taken from the workers and kept for the next batch.
    held: Option<Made>,
    is_done: bool,
}

/// A sample with its record.
type Recorded = (usize, TrainingSample);

impl Loader {
    /// Starts the threads at a position, or at the start.
    ///
    /// # Errors
    /// [`VlmDataError::Config`] if options contradict each other or the encoder's `max_tokens`;
    /// [`TextError::Changed`] if the position belongs to different data; [`VlmDataError::Thread`].
    pub fn new(
        encoder: Arc<SampleEncoder>,
        set: Arc<DataSet>,
        options: LoaderOptions,
        position: Option<DataPosition>,
    ) -> Result<Self> {
        options.check(encoder.options().encode.max_tokens)?;
        let wrong = |key, expected, found: String| VlmDataError::Config {
            key,
            expected,
            found,
        };
        let Some(path) = set.path(0) else {
            return Err(wrong("records", "at least 1", "0".to_owned()));
        };
        let (records, fingerprint) = (set.len() as u64, set.fingerprint());
        let mut next = Turn {
            epoch: 0,
            before: 0,
        };
        if let Some(position) = position {
            if position.fingerprint != fingerprint {
                let changed = TextError::Changed {
                    path: path.to_owned(),
                    expected: format!("fingerprint {:016x}", position.fingerprint),
                    found: format!("{fingerprint:016x}"),
                };
                return Err(changed.into());
            }
            if position.seed != options.seed {
                let found = format!("{:?}", options.seed);
                let expected = "the seed of the position, or the samples would be others";
                return Err(wrong("seed", expected, found));
            }
            if position.samples >= records {
                let expected = "fewer than the records of the file";
                let found = position.samples.to_string();
                return Err(wrong("samples of the position", expected, found));
            }
            next = Turn {
                epoch: position.epoch,
                before: position.samples,
            };
        }
        let plan = Plan::new(set.len(), &options, next);
        let (threads, bytes) = (options.threads, options.ahead_bytes);
        Ok(Self {
            workers: Workers::new(encoder, set, plan, threads, bytes)?,
            options,
            records,
            fingerprint,
            next,
            held: None,
            is_done: false,
        })
    }

    /// The share of time spent waiting for samples since the first batch was requested.
    pub fn waiting_share(&self) -> f64 {
        self.workers.waiting_share()
    }

    /// The samples of this rank in the next batch with their records, and the errors of skipped
    /// ones.
    fn samples(&mut self) -> Result<(Vec<Recorded>, Vec<VlmDataError>)> {
        let (mut samples, mut skipped) = (Vec::new(), Vec::new());
        let start = self.next;
        let mut end = self.records;
        // The number of samples to take; with a token limit, until one does not fit.
        let mut own = u64::MAX;
        if let BatchSize::Samples(count) = self.options.batch {
            end = end.min(start.before.saturating_add(count as u64));
            let (rank, ranks) = (self.options.rank as u64, self.options.ranks as u64);
            own = (end - start.before).saturating_sub(rank).div_ceil(ranks);
        }
        let (mut tokens, mut count) = (0, 0);
        while own > 0 {
            let Some((turn, record, sample)) = self.held.take().or_else(|| self.workers.take())
            else {
                break;
            };
            if turn.epoch != start.epoch {
                self.held = Some((turn, record, sample));
                break;
            }
            let sample = match (sample, self.options.on_error) {
                (Ok(sample), _) => sample,
                (Err(error), OnError::Stop) => return Err(error),
                (Err(error), OnError::Skip) => {
                    skipped.push(error);
                    own -= 1;
                    continue;
                }
            };
            if let BatchSize::Tokens(most) = self.options.batch {
                if count > 0 && tokens + sample.tokens() > most {
                    end = turn.before;
                    self.held = Some((turn, record, Ok(sample)));
                    break;
                }
                tokens += sample.tokens();
                count += 1;
                if (count - 1) % self.options.ranks != self.options.rank {
                    continue;
                }
            }
            samples.push((record, sample));
            own -= 1;
        }
        self.next = match end == self.records {
            true => Turn {
                epoch: start.epoch + 1,
                before: 0,
            },
            false => Turn {
                before: end,
                ..start
            },
        };
        Ok((samples, skipped))
    }

    fn batch(&mut self) -> Result<GlobalBatch> {
        let epoch = self.next.epoch;
        let (samples, skipped) = self.samples()?;
        let (records, samples): (Vec<usize>, Vec<_>) = samples.into_iter().unzip();
        let tokens = samples.iter().map(TrainingSample::tokens).sum();
        let cut = self.options.cut;
        let lengths: Vec<usize> = samples.iter().map(|sample| sample.room(cut)).collect();
        // Each sample is freed as soon as it is copied.
        let mut samples: Vec<_> = samples.into_iter().map(Some).collect();
        let parts = match self.options.is_alone {
            true => (0..lengths.len()).map(|sample| vec![sample]).collect(),
            false => cut.divide(&lengths),
        };
        let micro_batches = parts.into_iter().map(|part| {
            let part = part.into_iter().filter_map(|index| samples[index].take());
            MicroBatch::new(part.collect(), cut)
        });
        let micro_batches = micro_batches.collect::<Result<Vec<_>>>()?;
        Ok(GlobalBatch {
            trained_tokens: micro_batches.iter().map(|part| part.trained_tokens).sum(),
            micro_batches,
            records,
            tokens,
            skipped,
            epoch,
            next: DataPosition {
                fingerprint: self.fingerprint,
                seed: self.options.seed,
                epoch: self.next.epoch,
                samples: self.next.before,
            },
        })
    }
}

impl Iterator for Loader {
    type Item = Result<GlobalBatch>;

    /// Nothing follows an error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done || self.next.epoch >= self.options.epochs {
            return None;
        }
        let batch = self.batch();
        self.is_done = batch.is_err();
        Some(batch)
    }
}
