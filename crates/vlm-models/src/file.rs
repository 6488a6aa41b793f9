//! Safetensors files, including checkpoints of training runs, read and written in ranges of
//! elements.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use plain_files::NewFile;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::ser::{Serialize, SerializeMap as _, Serializer};

use crate::error::{Result, VlmError};

/// The header size limit in bytes, which is that of the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the text of a file.
///
/// # Errors
/// [`VlmError::File`]
pub(crate) fn text(path: &Path) -> Result<String> {
    Ok(plain_files::read_text(path, plain_files::MAX_TEXT_BYTES)?)
}

/// A file whose header has been read.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// The byte offset of the tensors.
    start: u64,
    metadata: Metadata,
}

/// A tensor of a [`TensorFile`].
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its shape.
    pub shape: Vec<usize>,
    pub(crate) dtype: Dtype,
    /// The byte range of the tensor in the file.
    start: u64,
    end: u64,
}

impl Stored {
    /// burn's type of the elements, if they are floats.
    pub fn dtype(&self) -> Option<DType> {
        float(self.dtype)
    }

    /// The byte range of the tensor in the file.
    pub fn bytes(&self) -> Range<u64> {
        self.start..self.end
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl TensorFile {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`VlmError::File`], also if the header does not match the file.
    pub fn open(path: &Path) -> Result<Self> {
        let read = || -> std::io::Result<Self> {
            let mut file = plain_files::open(path).map_err(|error| error.cause)?;
            let bytes = file.metadata()?.len();
            let whole = |expected: u64| {
                let reason = format!(
                    "it has {bytes} bytes, its header alone takes {expected}; it may be truncated: \
                     copy it again"
                );
                let is_whole = bytes >= expected;
                is_whole
                    .then_some(())
                    .ok_or_else(|| Error::new(ErrorKind::InvalidData, reason))
            };
            let mut length = [0; 8];
            whole(8)?;
            file.read_exact(&mut length)?;
            let length = u64::from_le_bytes(length);
            if length > MAX_HEADER_BYTES {
                let reason = format!("its header of {length} bytes is too long");
                return Err(Error::new(ErrorKind::InvalidData, reason));
            }
            whole(8 + length)?;
            let mut header = vec![0; length as usize];
            file.read_exact(&mut header)?;
            let metadata: Metadata = serde_json::from_slice(&header)?;
            let start = 8 + length;
            let infos = metadata.tensors();
            let ends = infos.values().map(|info| info.data_offsets.1 as u64);
            let expected = start + ends.max().unwrap_or(0);
            if bytes != expected {
                let reason =
                    format!("it has {bytes} bytes, its header describes {expected}; copy it again");
                return Err(Error::new(ErrorKind::InvalidData, reason));
            }
            Ok(Self {
                path: path.to_owned(),
                file,
                start,
                metadata,
            })
        };
        read().map_err(VlmError::file("read", path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The text under a custom key of the header.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        Some(self.metadata.metadata().as_ref()?.get(key)?)
    }

    /// The byte offset of the tensors.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Reads a byte range of the file.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub(crate) fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            (&self.file).seek(SeekFrom::Start(range.start))?;
            (&self.file).read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(VlmError::file("read", &self.path))
    }

    /// True if two tensors have the same type, shape and bytes.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub(crate) fn are_equal(&self, left: &Stored, right: &Stored) -> Result<bool> {
        const PIECE_BYTES: usize = 16 << 20;
        if (left.dtype, &left.shape) != (right.dtype, &right.shape) {
            return Ok(false);
        }
        for start in left.bytes().step_by(PIECE_BYTES) {
            let bytes = (left.end - start).min(PIECE_BYTES as u64);
            let other = right.start + (start - left.start);
            if self.bytes(start..start + bytes)? != self.bytes(other..other + bytes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The tensors by name.
    pub fn tensors(&self) -> BTreeMap<String, Stored> {
        let tensors = self.metadata.tensors().into_iter();
        tensors
            .map(|(name, info)| {
                let stored = Stored {
                    shape: info.shape.clone(),
                    dtype: info.dtype,
                    start: self.start + info.data_offsets.0 as u64,
                    end: self.start + info.data_offsets.1 as u64,
                };
                (name, stored)
            })
            .collect()
    }

    /// Reads elements of a tensor; `dtype` must be its [`Stored::dtype`].
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub fn read(
        &self,
        tensor: &Stored,
        dtype: DType,
        elements: Range<usize>,
    ) -> Result<TensorData> {
        let byte = |element: usize| tensor.start + (element * dtype.size()) as u64;
        let bytes = self.bytes(byte(elements.start)..byte(elements.end))?;
        Ok(TensorData::from_bytes_vec(bytes, [elements.len()], dtype))
    }
}

/// burn's type of stored floats.
pub(crate) fn float(stored: Dtype) -> Option<DType> {
    FLOATS
        .iter()
        .find_map(|(file, burn)| (*file == stored).then_some(*burn))
}

const FLOATS: [(Dtype, DType); 4] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
];

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The type of its elements, a float.
    pub dtype: DType,
}

impl Entry {
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// A file written under a temporary name and renamed when complete.
#[derive(Debug)]
pub struct Sink(BufWriter<NewFile>);

impl Sink {
    /// Starts a file of `entries`, whose bytes must then be written in this order.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub fn create(path: &Path, entries: &[Entry]) -> Result<Self> {
        Self::create_with(path, entries, &[])
    }

    /// As [`create`](Self::create), with named texts in the header.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub fn create_with(path: &Path, entries: &[Entry], texts: &[(&str, &str)]) -> Result<Self> {
        let header = header(entries, texts);
        let header = header.map_err(VlmError::file("write", path))?;
        let mut sink = Self::begin(path)?;
        sink.write(&(header.len() as u64).to_le_bytes())?;
        sink.write(header.as_bytes())?;
        Ok(sink)
    }

    /// Starts an empty file.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub(crate) fn begin(path: &Path) -> Result<Self> {
        let file = NewFile::create(path)?;
        Ok(Self(BufWriter::new(file)))
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.0.write_all(bytes);
        written.map_err(VlmError::file("write", self.0.get_ref().partial()))
    }

    /// Renames the file to its final name, replacing an older one.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub fn commit(self) -> Result<()> {
        let partial = self.0.get_ref().partial().to_owned();
        let file = self.0.into_inner();
        let file = file.map_err(VlmError::file("write", &partial))?;
        Ok(file.commit()?)
    }
}

/// The header of a file, padded to whole words.
fn header(entries: &[Entry], texts: &[(&str, &str)]) -> std::io::Result<String> {
    let mut offset = 0;
    let mut infos = Vec::new();
    for entry in entries {
        let dtype = FLOATS.iter().find(|(_, burn)| *burn == entry.dtype);
        let Some((dtype, _)) = dtype else {
            let reason = format!("{} is {:?}, not a float", entry.name, entry.dtype);
            return Err(Error::new(ErrorKind::InvalidInput, reason));
        };
        let start = offset;
        offset += entry.bytes();
        let info = TensorInfo {
            dtype: *dtype,
            shape: entry.shape.clone(),
            data_offsets: (start, offset),
        };
        infos.push((entry.name.clone(), info));
    }
    // transformers requires the format.
    let texts = texts.iter().chain(&[("format", "pt")]);
    let texts = texts.map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let header = Header {
        texts: texts.collect(),
        tensors: Metadata::new(None, infos).map_err(Error::other)?,
    };
    let mut header = serde_json::to_string(&header)?;
    let padded = header.len().next_multiple_of(8);
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    Ok(header)
}

/// A header with its texts in the order of their names: the library keeps them in a hash map, so
/// that equal files would differ.
struct Header {
    texts: BTreeMap<String, String>,
    tensors: Metadata,
}

impl Serialize for Header {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("__metadata__", &self.texts)?;
        for name in self.tensors.offset_keys() {
            map.serialize_entry(&name, &self.tensors.info(&name))?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hash map would order seven texts alike in 1 of 5,040 files.
    #[test]
    fn equal_files_are_equal_bytes() {
        let entries: Vec<Entry> = [("b", 2), ("a", 3)]
            .map(|(name, elements)| Entry {
                name: name.to_owned(),
                dtype: DType::F32,
                shape: vec![elements],
            })
            .into();
        let mut texts = ["f", "rank", "base", "x", "alpha", "z"].map(|name| (name, "\"1\""));
        let first = header(&entries, &texts).unwrap();
        let start = r#"{"__metadata__":{"alpha":"\"1\"","base":"\"1\"","f":"\"1\"","format":"pt""#;
        assert!(first.starts_with(start), "{first}");
        for _ in 0..100 {
            texts.rotate_left(1);
            assert_eq!(header(&entries, &texts).unwrap(), first);
        }
        let bytes = [
            &(first.len() as u64).to_le_bytes(),
            first.as_bytes(),
            &[0; 20],
        ]
        .concat();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("a").unwrap().shape(), [3]);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let texts = metadata.metadata().as_ref().unwrap();
        assert_eq!((texts.len(), &texts["rank"][..]), (7, "\"1\""));
    }
}
