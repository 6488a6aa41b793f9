//! The records of one or several data files that a run takes, in order.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::loader::shuffled;
use crate::picture::in_file;
use crate::text::json::Json;
use crate::text::{Conversation, DataIndex, DataReader, TextError};
use crate::{Result, VlmDataError};
use plain_files::Fingerprint;

/// Records of data files. A record may be absent, or occur several times.
#[derive(Clone, Debug)]
pub struct DataSet {
    files: Vec<Arc<DataIndex>>,
    /// File and record in it.
    records: Vec<[u32; 2]>,
    fingerprint: u64,
}

/// The records that a run takes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Share {
    /// Each record once.
    #[default]
    Whole,
    /// The first records, at most this many.
    First(usize),
    /// Each record this many times. The records of the fraction are drawn.
    Times(f64),
}

/// The records that are held out of training for validation, drawn from all files together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldOut {
    /// A share of all records.
    Share(f64),
    /// A number of records.
    Records(usize),
}

/// Epochs beyond those of any run, whose orders are those of draws.
const DRAWS: u64 = 1 << 62;

impl DataSet {
    /// Joins files end to end.
    ///
    /// # Errors
    /// [`VlmDataError::Config`] for more than 2^32 - 1 records.
    pub fn new(files: Vec<Arc<DataIndex>>) -> Result<Self> {
        let count: usize = files.iter().map(|file| file.len()).sum();
        if u32::try_from(count).is_err() {
            return Err(VlmDataError::Config {
                key: "records",
                expected: "fewer than 2^32",
                found: count.to_string(),
            });
        }
        let records = files
            .iter()
            .zip(0..)
            .flat_map(|(file, number)| (0..file.len() as u32).map(move |record| [number, record]));
        let records = records.collect();
        Ok(Self::of(files, records))
    }

    fn of(files: Vec<Arc<DataIndex>>, records: Vec<[u32; 2]>) -> Self {
        let whole = |file: &Arc<DataIndex>| {
            file.len() == records.len()
                && records
                    .iter()
                    .zip(0..)
                    .all(|(record, number)| *record == [0, number])
        };
        let fingerprint = match &files[..] {
            [file] if whole(file) => file.fingerprint(),
            _ => {
                let mut hash = Fingerprint::default();
                for file in &files {
                    hash.add(&file.fingerprint().to_le_bytes());
                }
                for number in records.as_flattened() {
                    hash.add(&number.to_le_bytes());
                }
                hash.value()
            }
        };
        Self {
            files,
            records,
            fingerprint,
        }
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if there is no record.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// A hash of the files and of the records taken; of a whole file, the file's.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The file of a record.
    pub fn path(&self, record: usize) -> Option<&Path> {
        let [file, _] = self.records.get(record)?;
        Some(self.files[*file as usize].path())
    }

    /// The line in its file where a record begins, from 1; 0 if there is no such record.
    pub fn line(&self, record: usize) -> u64 {
        let place = self.records.get(record);
        place.map_or(0, |[file, record]| {
            self.files[*file as usize].line(*record as usize)
        })
    }

    /// The set of some of the records, by number, in this order.
    #[must_use]
    pub fn choose(&self, records: &[usize]) -> Self {
        let chosen = records
            .iter()
            .filter_map(|record| self.records.get(*record));
        Self::of(self.files.clone(), chosen.copied().collect())
    }

    /// The records to train on and those held out of it: a share of each file, in the order of the
    /// files. No record is in both.
    #[must_use]
    pub fn divide(&self, shares: &[Share], held_out: Option<HeldOut>, seed: u64) -> [Self; 2] {
        let mut of_files = vec![Vec::new(); self.files.len()];
        for (record, [file, _]) in self.records.iter().enumerate() {
            of_files[*file as usize].push(record);
        }
        for (records, share) in of_files.iter_mut().zip(shares) {
            if let Share::First(most) = share {
                records.truncate(*most);
            }
        }
        let all: Vec<usize> = of_files.concat();
        let count = match held_out {
            None => 0,
            Some(HeldOut::Share(share)) => (share * all.len() as f64).round() as usize,
            Some(HeldOut::Records(count)) => count,
        };
        let drawn = shuffled(all.len() as u32, seed, DRAWS);
        let mut held: Vec<usize> = drawn
            .iter()
            .take(count)
            .map(|place| all[*place as usize])
            .collect();
        held.sort_unstable();
        let is_held: HashSet<usize> = held.iter().copied().collect();
        let mut trained = Vec::new();
        for (file, mut records) in of_files.into_iter().enumerate() {
            records.retain(|record| !is_held.contains(record));
            let times = match shares.get(file) {
                Some(Share::Times(times)) => *times,
                _ => 1.0,
            };
            for _ in 0..times as usize {
                trained.extend(&records);
            }
            let rest = (times.fract() * records.len() as f64).round() as usize;
            let drawn = shuffled(records.len() as u32, seed, DRAWS + 1 + file as u64);
            let mut rest: Vec<usize> = drawn
                .iter()
                .take(rest)
                .map(|place| records[*place as usize])
                .collect();
            rest.sort_unstable();
            trained.extend(rest);
        }
        [self.choose(&trained), self.choose(&held)]
    }

    /// Opens the files for reading records in any order.
    pub fn reader(&self) -> DataSetReader<'_> {
        DataSetReader {
            set: self,
            readers: self.files.iter().map(|_| None).collect(),
        }
    }
}

impl From<Arc<DataIndex>> for DataSet {
    fn from(file: Arc<DataIndex>) -> Self {
        let records = (0..file.len()).map_while(|record| Some([0, u32::try_from(record).ok()?]));
        let records = records.collect();
        Self::of(vec![file], records)
    }
}

/// Reads the records of a [`DataSet`]. A file is opened with its first record.
#[derive(Debug)]
pub struct DataSetReader<'a> {
    set: &'a DataSet,
    readers: Vec<Option<DataReader<'a>>>,
}

impl DataSetReader<'_> {
    /// The number of records.
    pub(crate) fn len(&self) -> usize {
        self.set.len()
    }

    /// Reads a record. Of several files, an error names the file.
    ///
    /// # Errors
    /// Those of [`DataIndex::reader`] and [`DataReader::read`].
    pub fn read(&mut self, record: usize) -> Result<Conversation> {
        self.read_by(record, |reader, record| reader.read(record))
    }

    /// Reads a record as the object that it is in its file.
    ///
    /// # Errors
    /// Those of [`DataIndex::reader`] and [`DataReader::json`].
    pub fn json(&mut self, record: usize) -> Result<Json> {
        self.read_by(record, |reader, record| reader.json(record))
    }

    fn read_by<T>(
        &mut self,
        record: usize,
        read: fn(&mut DataReader<'_>, usize) -> crate::text::Result<T>,
    ) -> Result<T> {
        let set = self.set;
        let Some(&[file, place]) = set.records.get(record) else {
            let reason = format!("record {record} of {} was requested", set.len());
            return Err(TextError::Stream { line: 0, reason }.into());
        };
        let (index, reader) = (&set.files[file as usize], &mut self.readers[file as usize]);
        let reader = match reader {
            Some(reader) => reader,
            None => reader.insert(index.reader()?),
        };
        let read = read(reader, place as usize);
        read.map_err(|error| set.named(record, error.into()))
    }
}

impl DataSet {
    /// An error of a record; of several files, with the record's file.
    pub(crate) fn named(&self, record: usize, error: VlmDataError) -> VlmDataError {
        match self.path(record) {
            Some(path) if self.files.len() > 1 => in_file(path, error),
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::FileOptions;

    fn set(lengths: &[usize]) -> DataSet {
        let folder = std::env::temp_dir().join(format!("vlm-data-sets-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let open = |(number, length): (usize, &usize)| {
            let path = folder.join(format!("{number}-{length}.jsonl"));
            std::fs::write(&path, format!("{{\"file\": {number}}}\n").repeat(*length))
                .expect("a file");
            Arc::new(DataIndex::open(&path, FileOptions::default()).expect("an index"))
        };
        DataSet::new(lengths.iter().enumerate().map(open).collect()).expect("few records")
    }

    #[test]
    fn shares_are_counts_and_nothing_is_held_out_and_trained() {
        let both = set(&[100, 40]);
        for (shares, held_out, trained, held) in [
            ([Share::Whole, Share::Whole], None, [100, 40], 0),
            ([Share::First(7), Share::Times(2.5)], None, [7, 100], 0),
            ([Share::Times(0.25), Share::Whole], None, [25, 40], 0),
            ([Share::Times(0.0), Share::First(1000)], None, [0, 40], 0),
            (
                [Share::First(60), Share::Times(3.0)],
                Some(HeldOut::Records(100)),
                [0, 0],
                100,
            ),
            (
                [Share::Times(2.0), Share::Whole],
                Some(HeldOut::Share(0.1)),
                [0, 0],
                14,
            ),
        ] {
            let [train, validation] = both.divide(&shares, held_out, 3);
            assert_eq!(validation.len(), held, "{shares:?}");
            let of_file = |file| {
                train
                    .records
                    .iter()
                    .filter(|record| record[0] == file)
                    .count()
            };
            if held == 0 {
                assert_eq!([of_file(0), of_file(1)], trained, "{shares:?}");
            }
            assert!(
                validation
                    .records
                    .iter()
                    .all(|record| !train.records.contains(record))
            );
            let [again, _] = both.divide(&shares, held_out, 3);
            assert_eq!(again.records, train.records);
            assert_eq!(again.fingerprint(), train.fingerprint());
        }
        let [other, _] = both.divide(&[Share::Times(0.5); 2], None, 4);
        let [half, _] = both.divide(&[Share::Times(0.5); 2], None, 3);
        assert_ne!(half.records, other.records, "the seed draws");
        assert_ne!(half.fingerprint(), other.fingerprint());
    }

    #[test]
    fn a_whole_file_has_its_own_fingerprint_and_several_files_name_theirs_in_errors() {
        let one = set(&[3]);
        assert_eq!(one.fingerprint(), one.files[0].fingerprint());
        assert_ne!(one.choose(&[0, 1]).fingerprint(), one.fingerprint());
        let error = one.reader().read(2).expect_err("no data").to_string();
        assert!(error.starts_with("line 3"), "{error}");
        let two = set(&[3, 2]);
        assert_eq!((two.line(4), two.line(5)), (2, 0));
        let error = two.reader().read(4).expect_err("no data").to_string();
        assert!(error.contains("1-2.jsonl: line 2"), "{error}");
    }
}
