//! The offsets of a data file's records, so that they can be read in any order.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use plain_files::Fingerprint;

use super::records::{Place, Records, State};
use super::{Conversation, Conversations, FileOptions};
use crate::text::error::{Result, TextError};
use crate::text::json::Json;

/// The offsets of a data file's records, 16 bytes of memory each. Each record is read from the file
/// on request.
#[derive(Debug)]
pub struct DataIndex {
    path: PathBuf,
    options: FileOptions,
    places: Vec<Place>,
    /// True if records are the items of an array.
    is_array: bool,
    stamp: Stamp,
    fingerprint: u64,
}

/// The attributes by which a change of a file is detected without reading it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl DataIndex {
    /// Reads a data file once and stores the offsets of its records.
    ///
    /// Records are not parsed: a faulty record gives an error when it is read.
    ///
    /// # Errors
    /// [`TextError::File`] if the file cannot be opened; [`TextError::Stream`] if it cannot be
    /// read, or its array is truncated.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<Self> {
        let path = path.as_ref();
        let file = plain_files::open(path)?;
        let stamp = Stamp::of(path, &file)?;
        let hashed = Hashed {
            inner: file,
            hash: Fingerprint::default(),
        };
        let input = BufReader::with_capacity(1 << 16, hashed);
        let mut records = Records::new(input, options.max_record_bytes);
        let mut places = Vec::new();
        let mut state = State::Lines;
        while let Some(place) = records.next_place()? {
            places.push(place);
            state = records.state();
        }
        Ok(Self {
            path: path.to_owned(),
            options,
            places,
            is_array: state != State::Lines,
            stamp,
            fingerprint: records.into_input().into_inner().hash.value(),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// True if there is no record.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The 64-bit FNV-1a hash of the file.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The line where a record begins, from 1; 0 if there is no such record.
    pub fn line(&self, record: usize) -> u64 {
        self.places.get(record).map_or(0, |place| place.line)
    }

    /// Opens the file for reading records in any order.
    ///
    /// # Errors
    /// [`TextError::File`] if the file cannot be opened; [`TextError::Changed`] if it has changed
    /// since it was indexed.
    pub fn reader(&self) -> Result<DataReader<'_>> {
        let file = plain_files::open(&self.path)?;
        self.check(&file)?;
        Ok(DataReader {
            index: self,
            input: BufReader::with_capacity(1 << 16, file),
        })
    }

    fn check(&self, file: &File) -> Result<()> {
        let found = Stamp::of(&self.path, file)?;
        if found == self.stamp {
            return Ok(());
        }
        let describe = |stamp: Stamp| {
            let since = stamp
                .modified
                .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            let seconds = since.map_or("an unknown time".to_owned(), |since| {
                format!("{:.3} s after 1970", since.as_secs_f64())
            });
            format!("{} bytes written {seconds}", stamp.bytes)
        };
        Err(TextError::Changed {
            path: self.path.clone(),
            expected: describe(self.stamp),
            found: describe(found),
        })
    }
}

/// Reads the records of a [`DataIndex`] in any order.
#[derive(Debug)]
pub struct DataReader<'a> {
    index: &'a DataIndex,
    input: BufReader<File>,
}

impl DataReader<'_> {
    /// Reads a record.
    ///
    /// # Errors
    /// [`TextError::Record`] if the record cannot be trained on; [`TextError::Changed`] if the file
    /// was modified; [`TextError::Stream`] if the file cannot be read, or has no such record.
    pub fn read(&mut self, record: usize) -> Result<Conversation> {
        let index = self.index;
        let folder = index.path.parent().unwrap_or(Path::new(""));
        let (line, records) = self.from(record)?;
        let found = Conversations::from_records(records, folder, &index.options).next();
        found.unwrap_or_else(|| Err(gone(line)))
    }

    /// Reads a record as the object that it is in the file.
    ///
    /// # Errors
    /// [`TextError::Record`] if it is no object; otherwise as [`read`](Self::read).
    pub fn json(&mut self, record: usize) -> Result<Json> {
        let (line, mut records) = self.from(record)?;
        let found = records.next().unwrap_or_else(|| Err(gone(line)));
        found.map(|(_, json)| json)
    }

    /// The line of a record, and the records from it on.
    fn from(&mut self, record: usize) -> Result<(u64, Records<&mut dyn BufRead>)> {
        let index = self.index;
        index.check(self.input.get_ref())?;
        let stream = |line, reason| TextError::Stream { line, reason };
        let Some(&place) = index.places.get(record) else {
            let reason = format!("record {record} of {} was requested", index.len());
            return Err(stream(0, reason));
        };
        let sought = self.input.seek(SeekFrom::Start(place.offset));
        sought.map_err(|error| stream(place.line, error.to_string()))?;
        let state = if index.is_array {
            State::FirstItem
        } else {
            State::Lines
        };
        let most = index.options.max_record_bytes;
        let input: &mut dyn BufRead = &mut self.input;
        Ok((place.line, Records::starting_at(input, most, place, state)))
    }
}

fn gone(line: u64) -> TextError {
    let reason = "the record is gone".to_owned();
    TextError::Stream { line, reason }
}

impl Stamp {
    fn of(path: &Path, file: &File) -> Result<Self> {
        let data = file.metadata().map_err(|error| refused(path, &error))?;
        Ok(Self {
            bytes: data.len(),
            modified: data.modified().ok(),
        })
    }
}

fn refused(path: &Path, error: &std::io::Error) -> TextError {
    TextError::File {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// A stream with the FNV-1a hash of all bytes read.
struct Hashed<R> {
    inner: R,
    hash: Fingerprint,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hash.add(&buffer[..length]);
        Ok(length)
    }
}
