//! All that the data of a run say before its first step: the length of each sample, its pictures,
//! and the records that give none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::dataset::DataSet;
use crate::sample::{SampleEncoder, TrainingSample};
use crate::text::IGNORED;
use crate::{Result, VlmDataError};

/// Options of a [`Survey`].
#[derive(Clone, Copy, Debug)]
pub struct SurveyOptions {
    /// The number of threads.
    pub threads: usize,
    /// True if pictures are decoded, as in a step. Their headers alone do not reveal damaged pixels.
    pub pixels: bool,
}

/// The records of a data set, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Survey {
    /// What each record gives.
    pub records: Vec<Surveyed>,
}

/// What a record gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Surveyed {
    /// A sample: its tokens, trained tokens, patches of pictures and patches of videos.
    Sample([u32; 4]),
    /// No sample.
    NoSample(NoSample),
}

/// The reason why a record gives no sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoSample {
    /// The error.
    pub message: String,
    /// True if it is longer than the encoder's limit.
    pub is_too_long: bool,
}

impl Survey {
    /// Builds the sample of each record once. It calls `on_record` after each record, from any
    /// thread, with the number of records so far; `None` once `stop` is true.
    pub fn take(
        set: &DataSet,
        encoder: &SampleEncoder,
        options: SurveyOptions,
        stop: &AtomicBool,
        on_record: &(dyn Fn(usize) + Sync),
    ) -> Option<Self> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let found: Mutex<Vec<Option<Surveyed>>> = Mutex::new(vec![None; set.len()]);
        let work = || {
            let mut reader = set.reader();
            loop {
                let record = next.fetch_add(1, Ordering::Relaxed);
                if record >= set.len() || stop.load(Ordering::Relaxed) {
                    break;
                }
                let build = || -> Result<TrainingSample> {
                    let sample = encoder.encode_record(&mut reader, record, options.pixels);
                    sample.map_err(|error| set.named(record, error))
                };
                let built = catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|_| {
                    let line = set.line(record);
                    let reason = "without a message".to_owned();
                    Err(VlmDataError::Panic { line, reason })
                });
                let surveyed = Surveyed::of(&built);
                found.lock()[record] = Some(surveyed);
                on_record(1 + done.fetch_add(1, Ordering::Relaxed));
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..options.threads).map(|_| scope.spawn(work)).collect();
            work();
            drop(others);
        });
        let found = found.into_inner();
        let records = found.into_iter().collect::<Option<Vec<_>>>()?;
        Some(Self { records })
    }

    /// The tokens of the samples, in order; 0 for a record without one.
    pub fn lengths(&self) -> Vec<usize> {
        self.records.iter().map(|record| record.tokens()).collect()
    }

    /// The faults with the numbers of their records.
    pub fn faults(&self) -> impl Iterator<Item = (usize, &NoSample)> {
        let faults = self.records.iter().enumerate();
        faults.filter_map(|(number, record)| match record {
            Surveyed::NoSample(fault) => Some((number, fault)),
            Surveyed::Sample(_) => None,
        })
    }

    /// The records that give a sample.
    pub fn samples(&self) -> Vec<usize> {
        let records = self.records.iter().enumerate();
        records
            .filter_map(|(number, record)| (record.tokens() > 0).then_some(number))
            .collect()
    }

    /// The first record whose sample has a picture or video.
    pub fn first_with_patches(&self) -> Option<usize> {
        self.records.iter().position(|record| record.patches() > 0)
    }
}

impl Surveyed {
    fn of(built: &Result<TrainingSample>) -> Self {
        match built {
            Ok(sample) => {
                let trained = sample.text.labels.iter().filter(|label| **label != IGNORED);
                let patches = |grids: &[[usize; 3]]| -> usize {
                    grids
                        .iter()
                        .map(|grid| grid.iter().product::<usize>())
                        .sum()
                };
                let counts = [
                    sample.tokens(),
                    trained.count(),
                    patches(&sample.image_grids),
                    patches(&sample.video_grids),
                ];
                Self::Sample(counts.map(|count| u32::try_from(count).unwrap_or(u32::MAX)))
            }
            Err(error) => Self::NoSample(NoSample {
                message: error.to_string(),
                is_too_long: error.is_too_long(),
            }),
        }
    }

    /// The tokens of its sample; 0 without one.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Sample([tokens, ..]) => *tokens as usize,
            Self::NoSample(_) => 0,
        }
    }

    /// The patches of its pictures and videos.
    pub fn patches(&self) -> usize {
        match self {
            Self::Sample([_, _, pictures, videos]) => *pictures as usize + *videos as usize,
            Self::NoSample(_) => 0,
        }
    }
}
