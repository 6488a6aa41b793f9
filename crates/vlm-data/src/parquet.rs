//! Parquet files, as Hugging Face's `datasets` writes them, as JSON lines with pictures in files.
//!
//! A run reads records in any order, and Parquet is compressed in groups of many, so a file is
//! converted once.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use data_encoding::BASE64;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use crate::error::{Result, VlmDataError};

/// The records, their name until all are there, and the folder of the pictures.
const RECORDS: &str = "data.jsonl";
const PARTIAL: &str = "data.jsonl.partial";
const PICTURES: &str = "pictures";
/// The depth of lists and structures beyond which no record goes.
const MAX_DEPTH: usize = 64;
/// Starts of encoded pictures, and the ends of their files' names.
const KINDS: [(&[u8], &str); 5] = [
    (b"\x89PNG", "png"),
    (b"\xff\xd8", "jpg"),
    (b"RIFF", "webp"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
];

/// The files of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The data file.
    pub data: PathBuf,
    /// The number of its records.
    pub records: usize,
    /// The number of pictures in files of their own.
    pub pictures: usize,
}

/// Converts a Parquet file to JSON lines in `data.jsonl` of `folder`. Embedded pictures become files in
/// `folder/pictures`, and paths stay as they are. Nulls are left out: Arrow fills structures with them.
/// `progress` receives the records done, and all. At most a page of each column is in memory.
///
/// # Errors
/// [`VlmDataError::File`] for a file that is not Parquet, is damaged or has a column that JSON cannot
/// state; [`VlmDataError::Unwritten`] for a folder that has the files already or cannot be written.
pub fn convert(file: &Path, folder: &Path, progress: &dyn Fn(usize, usize)) -> Result<Converted> {
    let unread = |reason: String| VlmDataError::File {
        path: file.to_owned(),
        reason,
    };
    let input = plain_files::open(file).map_err(|error| unread(error.cause.to_string()))?;
    let reader = SerializedFileReader::new(input).map_err(|error| unread(error.to_string()))?;
    let all = reader.metadata().file_metadata().num_rows().max(0) as usize;
    let pictures = folder.join(PICTURES);
    fs::create_dir_all(&pictures).map_err(unwritten(&pictures))?;
    let data = folder.join(RECORDS);
    if data.exists() {
        return Err(unwritten(&data)(ErrorKind::AlreadyExists.into()));
    }
    let partial = folder.join(PARTIAL);
    let out = fs::File::create(&partial).map_err(unwritten(&partial))?;
    let mut out = std::io::BufWriter::new(out);
    let mut writer = Writer {
        folder,
        record: 0,
        pictures: 0,
    };
    let rows = reader.get_row_iter(None);
    for row in rows.map_err(|error| unread(error.to_string()))? {
        let row = row.map_err(|error| unread(error.to_string()))?;
        writer.record += 1;
        let record = writer.row(&row, 0)?.map_err(|reason| {
            let record = writer.record;
            unread(format!("record {record}: {reason}"))
        })?;
        writeln!(out, "{record}").map_err(unwritten(&partial))?;
        progress(writer.record, all);
    }
    out.flush().map_err(unwritten(&partial))?;
    fs::rename(&partial, &data).map_err(unwritten(&data))?;
    Ok(Converted {
        data,
        records: writer.record,
        pictures: writer.pictures,
    })
}

fn unwritten(path: &Path) -> impl FnOnce(std::io::Error) -> VlmDataError + '_ {
    move |error| VlmDataError::Unwritten {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Writes the pictures of records.
struct Writer<'a> {
    folder: &'a Path,
    record: usize,
    pictures: usize,
}

/// A value, or the reason why JSON cannot state it.
type Stated = std::result::Result<Value, String>;

impl Writer<'_> {
    fn row(&mut self, row: &Row, depth: usize) -> Result<Stated> {
        if depth > MAX_DEPTH {
            return Ok(Err(format!("structures are deeper than {MAX_DEPTH}")));
        }
        let mut object = Map::new();
        for (name, field) in row.get_column_iter() {
            if matches!(field, Field::Null) {
                continue;
            }
            match self.value(field, depth + 1)? {
                Ok(value) => object.insert(name.clone(), value),
                Err(reason) => return Ok(Err(format!("{name}: {reason}"))),
            };
        }
        // Of a picture with both, the bytes are those that the record was made with.
        let is_picture = depth > 0 && object.keys().all(|key| key == "bytes" || key == "path");
        Ok(Ok(match (object.remove("bytes"), object.remove("path")) {
            (Some(picture), _) if is_picture => picture,
            (None, Some(path)) if is_picture => path,
            (bytes, path) => {
                object.extend(bytes.map(|value| ("bytes".to_owned(), value)));
                object.extend(path.map(|value| ("path".to_owned(), value)));
                Value::Object(object)
            }
        }))
    }

    fn value(&mut self, field: &Field, depth: usize) -> Result<Stated> {
        let float = |value: f64| {
            let number = Number::from_f64(value).map(Value::Number);
            number.ok_or_else(|| format!("{value} is not a number of JSON"))
        };
        Ok(match field {
            Field::Null => Ok(Value::Null),
            Field::Bool(value) => Ok((*value).into()),
            Field::Byte(value) => Ok((*value).into()),
            Field::Short(value) => Ok((*value).into()),
            Field::Int(value) => Ok((*value).into()),
            Field::Long(value) => Ok((*value).into()),
            Field::UByte(value) => Ok((*value).into()),
            Field::UShort(value) => Ok((*value).into()),
            Field::UInt(value) => Ok((*value).into()),
            Field::ULong(value) => Ok((*value).into()),
            Field::Float(value) => float((*value).into()),
            Field::Double(value) => float(*value),
            Field::Str(text) => Ok(text.as_str().into()),
            Field::Bytes(bytes) => return self.bytes(bytes.data()).map(Ok),
            Field::Group(row) => return self.row(row, depth),
            Field::ListInternal(list) => {
                let mut values = Vec::new();
                for field in list.elements() {
                    match self.value(field, depth + 1)? {
                        Ok(value) => values.push(value),
                        Err(reason) => return Ok(Err(reason)),
                    }
                }
                Ok(Value::Array(values))
            }
            Field::MapInternal(_)
            | Field::Float16(_)
            | Field::Decimal(_)
            | Field::Date(_)
            | Field::TimeMillis(_)
            | Field::TimeMicros(_)
            | Field::TimestampMillis(_)
            | Field::TimestampMicros(_) => Err(format!(
                "{field} is of a type that no format of records has; remove the column"
            )),
        })
    }

    /// The path of a new file of a picture; other bytes as base64.
    fn bytes(&mut self, bytes: &[u8]) -> Result<Value> {
        let kind = KINDS.iter().find(|(start, _)| bytes.starts_with(start));
        let Some((_, end)) = kind else {
            return Ok(BASE64.encode(bytes).into());
        };
        let name = format!("{PICTURES}/{}-{}.{end}", self.record, self.pictures);
        let path = self.folder.join(&name);
        let mut file = fs::File::create_new(&path).map_err(unwritten(&path))?;
        file.write_all(bytes).map_err(unwritten(&path))?;
        self.pictures += 1;
        Ok(name.into())
    }
}
