//! The error type of the text half.

use std::path::PathBuf;

/// The result of this module's functions.
pub type Result<T, E = TextError> = std::result::Result<T, E>;

/// An error in a data file, tokenizer or chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The message of the system or the parser.
        reason: String,
    },
    /// The stream of a data file failed; nothing after it was read.
    #[error("line {line}: cannot read the data: {reason}")]
    Stream {
        /// The line, from 1.
        line: u64,
        /// The message of the system, or the missing part of the file.
        reason: String,
    },
    /// A data file that changed after it was first read.
    #[error(
        "{} has changed: expected {expected}, found {found}; \
         a position is valid for the same data only: restore the file, or start again",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its earlier size and time.
        expected: String,
        /// Its current size and time.
        found: String,
    },
    /// A record that cannot be trained on. The records after it can still be read.
    #[error("line {line}: {problem}")]
    Record {
        /// The line where the record begins, from 1.
        line: u64,
        /// The problem.
        problem: Box<RecordProblem>,
    },
    /// A folder without a tokenizer.
    #[error(
        "{} has neither tokenizer.json nor vocab.json with merges.txt; \
         copy the tokenizer's files from the checkpoint",
        folder.display()
    )]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
    },
    /// A tokenizer with contradictory files or of an unsupported kind.
    #[error("the tokenizer of {} cannot be built: {reason}", path.display())]
    Tokenizer {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// A text that the tokenizer rejected.
    #[error("a text of {bytes} bytes cannot be encoded: {reason}")]
    Encode {
        /// The length of the text.
        bytes: usize,
        /// The message of the tokenizer.
        reason: String,
    },
    /// A folder without a chat template.
    #[error(
        "{} has no chat template: expected chat_template.json, chat_template.jinja or the key \
         chat_template of tokenizer_config.json; a base model has none, so take the file of its \
         Instruct version",
        folder.display()
    )]
    NoTemplate {
        /// The folder.
        folder: PathBuf,
    },
    /// A chat template that is not Jinja or uses unsupported features.
    #[error("the chat template cannot be compiled: {reason}")]
    Template {
        /// The message of the template engine.
        reason: String,
    },
    /// A tokenizer without the tokens that mark turns or pictures.
    #[error(
        "the tokenizer has no token {token:?}, which {purpose}; take all files from one folder"
    )]
    MissingToken {
        /// The token.
        token: &'static str,
        /// The purpose of the token.
        purpose: &'static str,
    },
}

impl From<plain_files::FileError> for TextError {
    fn from(error: plain_files::FileError) -> Self {
        Self::File {
            path: error.path,
            reason: error.cause.to_string(),
        }
    }
}

/// A problem of one record. The message states the expectation, the finding and the remedy.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordProblem {
    /// Not JSON.
    #[error("expected one JSON object, found {detail}; each line of a JSONL file is one record")]
    Json {
        /// The message of the parser.
        detail: String,
    },
    /// A record above the limit.
    #[error(
        "the record has more than {max_bytes} bytes; name its pictures by path, or raise the limit"
    )]
    TooLarge {
        /// The limit.
        max_bytes: usize,
    },
    /// Keys that match no format.
    #[error(
        "expected one of the keys \"messages\", \"conversations\", \"instruction\", \"response\", \
         \"answer\", \"completion\" or \"text\", found {}; rename the columns",
        list(found)
    )]
    UnknownFormat {
        /// The keys found.
        found: Vec<String>,
    },
    /// Data of another kind than answers to imitate.
    #[error("{key} means {what}, which cannot be trained; remove such records")]
    OtherData {
        /// The path of the key.
        key: String,
        /// The kind of data.
        what: &'static str,
    },
    /// Answers of another kind than the loss trains on.
    #[error(
        "expected {expected}, found {found}; choose a loss that trains on it (--loss), or remove \
         such records"
    )]
    Answers {
        /// The answers that the loss trains on.
        expected: &'static str,
        /// The answers found.
        found: String,
    },
    /// Two answers of which one has other pictures or videos.
    #[error("the answers are to different pictures or videos; both must be to those of the prompt")]
    PairMedia,
    /// Two answers to different prompts.
    #[error(
        "both answers must follow one prompt; the conversations have no common start, or one ends \
         with it"
    )]
    NoSharedPrompt,
    /// A key that changes the sample and is not supported.
    #[error("{key} is not applied; {remedy}")]
    NotApplied {
        /// The path of the key.
        key: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A system text beside a system message, or beside a text without messages.
    #[error("the record has \"system\" beside a system message or a plain text; keep one")]
    SystemTwice,
    /// Content that the chat template does not print.
    #[error(
        "{what} of message {message} is not in the rendered text: {text:?}; the folder's chat \
         template does not write it, so take a template that does, or remove it"
    )]
    NotRendered {
        /// The message, from 1; 0 for the tools.
        message: usize,
        /// The kind of content.
        what: &'static str,
        /// The start of the content.
        text: String,
    },
    /// A missing value, or one of the wrong type.
    #[error("expected {key} to be {expected}, found {found}")]
    Value {
        /// The path of the key, such as `messages[2].content`.
        key: String,
        /// The type expected.
        expected: &'static str,
        /// The type found.
        found: String,
    },
    /// A role unknown to the format.
    #[error("message {message} has the role {found:?}; expected one of {}", known.join(", "))]
    UnknownRole {
        /// The message, from 1.
        message: usize,
        /// The role found.
        found: String,
        /// The roles of the format.
        known: &'static [&'static str],
    },
    /// A system message after other messages.
    #[error("message {message} is a system message; only the first may be one, so merge them")]
    SystemNotFirst {
        /// The message, from 1.
        message: usize,
    },
    /// Different numbers of marks and files.
    #[error(
        "the text has {}, the record lists {}; write one {mark} for each file, in order, or \
         remove the files",
        counted(*marks, &format!("{mark} placeholder")),
        counted(*files, mark.trim_matches(['<', '>']))
    )]
    MarkCount {
        /// `<image>` or `<video>`.
        mark: &'static str,
        /// The marks.
        marks: usize,
        /// The files.
        files: usize,
    },
    /// A picture or video mark in an answer or in the system's text.
    #[error(
        "message {message} ({role}) contains a picture or video; only user and tool messages may"
    )]
    MediaNotFromUser {
        /// The message, from 1.
        message: usize,
        /// Its role.
        role: &'static str,
    },
    /// An answer without text.
    #[error("the answer in message {message} is empty; write one, or remove the turn")]
    EmptyAnswer {
        /// The message, from 1.
        message: usize,
    },
    /// A conversation that does not end with an answer.
    #[error(
        "expected the last of {messages} messages to be the assistant's, found {last}; \
         nothing after the last answer can be trained on, so remove it"
    )]
    NoAnswer {
        /// The number of messages.
        messages: usize,
        /// The role of the last message.
        last: &'static str,
    },
    /// A conversation that consists of an answer only.
    #[error("nothing comes before the answer; expected a question to continue")]
    NoPrompt,
    /// Text that the tokenizer would read as a mark of turns or pictures.
    #[error(
        "message {message} contains {token:?}, which the tokenizer reads as a mark of the chat \
         template; remove it from the text, and name pictures by {}",
        "<image>"
    )]
    SpecialToken {
        /// The message, from 1; 0 for the tools.
        message: usize,
        /// The token.
        token: String,
    },
    /// A picture given by a network address.
    #[error("{address:?} is an address; download the file and name its path")]
    Address {
        /// The address.
        address: String,
    },
    /// A picture whose text is not valid base64.
    #[error("{key} is not base64: {detail}")]
    Base64 {
        /// The path of the key.
        key: String,
        /// The cause.
        detail: &'static str,
    },
    /// A video's frame rate out of range.
    #[error("expected fps to be a positive number of frames per second, found {found}")]
    Fps {
        /// The value.
        found: f64,
    },
    /// A video of unknown speed.
    #[error("video {video} has no fps; write \"fps\" into the record, or state one for the file")]
    NoFps {
        /// The video, from 1.
        video: usize,
    },
    /// Different numbers of marks and values of boxes or names.
    #[error(
        "the text has {}, objects.{key} has {}",
        counted(*marks, &format!("{mark} placeholder")),
        counted(*values, "value")
    )]
    ObjectCount {
        /// `<bbox>` or `<ref-object>`.
        mark: &'static str,
        /// The key in `objects`.
        key: &'static str,
        /// The marks.
        marks: usize,
        /// The values.
        values: usize,
    },
    /// A box or point with invalid numbers.
    #[error("box {index} is {found:?}; expected 2 or 4 finite numbers with x1 <= x2 and y1 <= y2")]
    Box {
        /// Its index, from 0.
        index: usize,
        /// Its numbers.
        found: Vec<f64>,
    },
    /// A box that extends beyond its picture.
    #[error(
        "box {index} is {found:?} in a picture of {} x {} pixels; boxes are in pixels of the \
         picture as it is read, after the rotation by EXIF",
        size[0], size[1]
    )]
    BoxOutside {
        /// Its index, from 0.
        index: usize,
        /// Its numbers.
        found: Vec<f64>,
        /// Width and height.
        size: [usize; 2],
    },
    /// A box in a picture that the record does not have.
    #[error("box {index} belongs to picture {image}, the record has {images}")]
    BoxImage {
        /// Its index, from 0.
        index: usize,
        /// The picture, from 0.
        image: usize,
        /// The number of pictures.
        images: usize,
    },
    /// A conversation that the template rejected, or a rendering that exceeded its limits.
    #[error("the chat template failed: {detail}")]
    Render {
        /// The message of the template engine.
        detail: String,
    },
    /// A template that prints a different number of answers than the conversation has.
    #[error(
        "the rendered text has {found} assistant turns, the conversation {expected}; \
         the template drops or merges turns, so labels cannot be placed"
    )]
    Turns {
        /// The assistant's messages.
        expected: usize,
        /// The turns found in the text.
        found: usize,
    },
    /// A template that prints a different number of pads than the conversation has pictures or
    /// videos.
    #[error(
        "the rendered text has {found} placeholders {pad} for {expected} pictures or videos; \
         the template is of a model without them, or of another family"
    )]
    Pads {
        /// The pad.
        pad: &'static str,
        /// The pictures or videos.
        expected: usize,
        /// The pads found.
        found: usize,
    },
    /// Different numbers of grids and of pictures or videos.
    #[error("{grids} grids were given for {media} {kind}")]
    Grids {
        /// `images` or `videos`.
        kind: &'static str,
        /// The pictures or videos.
        media: usize,
        /// The grids.
        grids: usize,
    },
    /// A grid that does not divide into merged tokens.
    #[error(
        "grid [{}, {}, {}] does not divide by merge size {merge}; resize to whole tokens",
        grid[0], grid[1], grid[2]
    )]
    Grid {
        /// Time, height and width in patches.
        grid: [u32; 3],
        /// The merge size.
        merge: u32,
    },
    /// Different numbers of times and temporal patches.
    #[error("{times} times were given for {frames} temporal patches of a video")]
    Times {
        /// The temporal patches.
        frames: u32,
        /// The times.
        times: usize,
    },
    /// A conversation longer than the token limit.
    #[error(
        "the sample has {tokens} tokens{}, the limit is {max_tokens} (`max_tokens`); raise it, or \
         give the pictures fewer pixels",
        match dropped {
            0 => String::new(),
            _ => format!(" even without {}", counted(*dropped, "dropped turn")),
        }
    )]
    TooLong {
        /// The tokens of the shortest form.
        tokens: usize,
        /// The limit.
        max_tokens: usize,
        /// The number of turns dropped for it.
        dropped: usize,
    },
    /// Labels that are all masked.
    #[error("no token is trained on: {reason}")]
    NothingToTrain {
        /// The reason.
        reason: &'static str,
    },
    /// A template without `generation` tags, which the label rule requires.
    #[error(
        "the chat template has no {} tags, which this rule of labels needs; use another rule",
        "{% generation %}"
    )]
    NoGenerationTag,
    /// A chat template whose turns are not known.
    #[error(
        "the chat template writes no known marks of turns: expected those of ChatML, Llama 3 or \
         Mistral; mark the answers by {{% generation %}} and {{% endgeneration %}}, and choose the \
         labels of these tags"
    )]
    UnknownChat,
    /// A record with pictures or videos for a model of text alone.
    #[error(
        "the record has {images} pictures and {videos} videos, but the model reads text alone; \
         remove them, or take a vision-language model"
    )]
    TextAlone {
        /// The record's pictures.
        images: usize,
        /// Its videos.
        videos: usize,
    },
}

impl TextError {
    /// True for a conversation longer than the token limit.
    pub fn is_too_long(&self) -> bool {
        match self {
            Self::Record { problem, .. } => matches!(**problem, RecordProblem::TooLong { .. }),
            _ => false,
        }
    }
}

fn counted(number: usize, name: &str) -> String {
    format!("{number} {name}{}", if number == 1 { "" } else { "s" })
}

/// At most eight names.
fn list(names: &[String]) -> String {
    let shown: Vec<_> = names
        .iter()
        .take(8)
        .map(|name| format!("{name:?}"))
        .collect();
    match names.len() {
        0 => "none".to_owned(),
        1..=8 => shown.join(", "),
        more => format!("{} and {} more", shown.join(", "), more - 8),
    }
}
