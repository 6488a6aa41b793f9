//! Converts data files to conversations.
//!
//! A record is one JSON object, in a JSONL file or a JSON array. The formats below are read; all become
//! [`Conversation`]s:
//!
//! | format | recognised by | source |
//! |---|---|---|
//! | [`Format::Messages`] | `messages` | OpenAI, ms-swift, TRL |
//! | [`Format::Llava`] | `conversations` with `image` or `video` | Qwen's own fine-tuning code |
//! | [`Format::ShareGpt`] | `conversations` | LLaMA-Factory |
//! | [`Format::Pairs`] | `conversation` | ms-swift |
//! | [`Format::Alpaca`] | `instruction` | LLaMA-Factory |
//! | [`Format::Query`] | `response`, `answer` and other names of an answer | ms-swift |
//! | [`Format::Completion`] | `prompt` and `completion` | TRL |
//! | [`Format::Preference`] | `chosen` and `rejected` | TRL |
//! | [`Format::Text`] | `text` | TRL |
//!
//! LLaVA and sharegpt differ in white space. Qwen's own code strips the user's text around a mark,
//! so `<image>\nWhat?` is a picture and `What?`; LLaMA-Factory keeps the line break.

mod answers;
mod index;
pub(crate) mod keys;
mod limits;
mod media;
mod objects;
mod parse;
mod records;
mod turns;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

pub use answers::{Answers, OtherAnswer};
pub use index::{DataIndex, DataReader};
pub use limits::{FrameChoice, PictureLimits};
pub use media::{Frames, MediaSource, Video};
pub use objects::Objects;

use super::error::{RecordProblem, Result, TextError};
use super::json::Json;
use records::Records;

/// The layout of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Recognised by the keys of each record.
    #[default]
    Recognised,
    /// `messages` of `role` and `content`, a text with marks or a list of parts.
    Messages,
    /// `conversations` of `from` and `value`, as LLaMA-Factory reads them.
    ShareGpt,
    /// `conversations` of `from` and `value`, as Qwen's own fine-tuning code reads them.
    Llava,
    /// `instruction`, `input`, `output`, and optionally `history`.
    Alpaca,
    /// `query`, `response`, and optionally `history`, or ms-swift's other names of the first two.
    Query,
    /// `conversation` of pairs of `human` and `assistant`, or of messages.
    Pairs,
    /// `prompt` and `completion`: lists of messages, or texts without a template.
    Completion,
    /// `text` without a template, trained on as a whole.
    Text,
    /// `chosen` and `rejected`, two answers to `prompt`, or two conversations or texts that begin
    /// with it.
    Preference,
}

/// Options of [`read`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileOptions {
    /// The layout of each record.
    pub format: Format,
    /// The answers of each record.
    pub answers: Answers,
    /// The folder of relative paths; `None` means the folder of the file.
    pub media_folder: Option<PathBuf>,
    /// The longest record in bytes, base64 pictures included.
    pub max_record_bytes: usize,
}

impl Default for FileOptions {
    /// Recognises the format, resolves paths relative to the file, and limits records to 64 MiB.
    fn default() -> Self {
        Self {
            format: Format::Recognised,
            answers: Answers::One,
            media_folder: None,
            max_record_bytes: 64 << 20,
        }
    }
}

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The system's text, allowed only as the first message.
    System,
    /// The user.
    User,
    /// The model, whose text is trained on.
    Assistant,
    /// The answer of a tool.
    Tool,
}

impl Role {
    /// The name used in chat templates.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A piece of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// A picture, as an index into [`Conversation::images`].
    Image(usize),
    /// A video, as an index into [`Conversation::videos`].
    Video(usize),
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The speaker of a message.
    pub role: Role,
    /// The parts of its content, in order.
    pub parts: Vec<Part>,
    /// True if the message is trained on; `None` if the record does not state it.
    pub loss: Option<bool>,
    /// All other keys, such as `reasoning_content` and `tool_calls`, for the chat template.
    pub extra: Vec<(String, Json)>,
}

impl Message {
    /// The text of all parts, without pictures.
    #[must_use]
    pub fn text(&self) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => Some(text.clone()),
            Part::Image(_) | Part::Video(_) => None,
        };
        self.parts.iter().filter_map(text).collect()
    }
}

/// One record, independent of its format.
///
/// Pictures and videos are numbered in the order of their mentions in the messages, so part
/// `Image(k)` is the k-th picture of the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The line where the record begins, from 1.
    pub line: u64,
    /// The messages. The last is the assistant's, and only the first may be the system's.
    pub messages: Vec<Message>,
    /// The pictures.
    pub images: Vec<MediaSource>,
    /// The limits of the first pictures; the others have none of their own.
    pub image_limits: Vec<PictureLimits>,
    /// The videos.
    pub videos: Vec<Video>,
    /// Boxes and names, if the record has `objects`.
    pub objects: Option<Objects>,
    /// The tools that the model may call, for the chat template.
    pub tools: Option<Json>,
    /// The second of two answers; the first is at the end of the messages, and preferred.
    pub other: Option<OtherAnswer>,
    /// The mark of the answer: good or bad.
    pub is_good: Option<bool>,
    /// True if the texts are tokenized one after the other, without the chat template.
    pub plain: bool,
    /// The keys that are neither read nor known to be harmless, such as `messages[].mood`.
    pub unread: Vec<String>,
}

/// The conversations of a data file, in order.
///
/// An unreadable record gives an error, and iteration continues with the next record. A stream
/// error ([`TextError::Stream`]) ends the iteration.
pub struct Conversations<R> {
    records: Records<R>,
    format: Format,
    answers: Answers,
    folder: PathBuf,
}

/// Opens a data file.
///
/// Memory is bounded by one record.
///
/// # Errors
/// [`TextError::File`] if the file cannot be opened. The iterator returns errors of records.
pub fn read(
    path: impl AsRef<Path>,
    options: &FileOptions,
) -> Result<Conversations<BufReader<File>>> {
    let path = path.as_ref();
    let file = plain_files::open(path)?;
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    Ok(Conversations::new(
        BufReader::with_capacity(1 << 16, file),
        folder,
        options,
    ))
}

impl<R: BufRead> Conversations<R> {
    /// Reads conversations from any stream. Relative paths start from `folder`, unless the options
    /// name a media folder.
    pub fn new(input: R, folder: impl Into<PathBuf>, options: &FileOptions) -> Self {
        let records = Records::new(input, options.max_record_bytes);
        Self::from_records(records, folder, options)
    }

    fn from_records(
        records: Records<R>,
        folder: impl Into<PathBuf>,
        options: &FileOptions,
    ) -> Self {
        Self {
            records,
            format: options.format,
            answers: options.answers,
            folder: options
                .media_folder
                .clone()
                .unwrap_or_else(|| folder.into()),
        }
    }

    /// Reads up to the record that a line belongs to, and returns its first line and the record.
    ///
    /// # Errors
    /// The first line of the file's first record, which begins later; `None` without records.
    pub fn at_line(
        self,
        line: u64,
    ) -> std::result::Result<(u64, Result<Conversation>), Option<u64>> {
        let (mut found, mut first) = (None, None);
        for record in self {
            let begins = match &record {
                Ok(conversation) => conversation.line,
                Err(TextError::Record { line, .. } | TextError::Stream { line, .. }) => *line,
                Err(_) => 0,
            };
            first.get_or_insert(begins);
            if begins > line {
                break;
            }
            found = Some((begins, record));
        }
        found.ok_or(first)
    }
}

impl<R: BufRead> Iterator for Conversations<R> {
    type Item = Result<Conversation>;

    fn next(&mut self) -> Option<Self::Item> {
        let (line, record) = match self.records.next()? {
            Ok(record) => record,
            Err(error) => return Some(Err(error)),
        };
        let conversation =
            parse::conversation(line, &record, (self.format, self.answers), &self.folder);
        Some(conversation.map_err(|problem| problem.at(line)))
    }
}

impl RecordProblem {
    /// The error of the record that begins at `line`.
    pub(crate) fn at(self, line: u64) -> TextError {
        TextError::Record {
            line,
            problem: Box::new(self),
        }
    }
}
