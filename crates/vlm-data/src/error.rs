//! The crate's error type.

use std::path::PathBuf;

use crate::text::TextError;

/// The result of this crate's functions.
pub type Result<T, E = VlmDataError> = std::result::Result<T, E>;

/// An error in training data, pictures, videos or their configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VlmDataError {
    /// A file could not be read.
    #[error("cannot read {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The message of the system.
        reason: String,
    },
    /// A file could not be written.
    #[error("cannot write {}: {reason}; choose another folder", path.display())]
    Unwritten {
        /// The file.
        path: PathBuf,
        /// The message of the system.
        reason: String,
    },
    /// An error in the contents of a file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error.
        source: Box<VlmDataError>,
    },
    /// Bytes of an unsupported picture format.
    #[error(
        "the first bytes are {start:02x?}, no JPEG, PNG, WebP, BMP or GIF; \
         convert the picture to one of them"
    )]
    UnknownFormat {
        /// The first bytes, at most 12.
        start: Vec<u8>,
    },
    /// A picture that is damaged, truncated, or of a variant that its decoder does not support.
    #[error("the {format} picture cannot be decoded: {reason}")]
    Decode {
        /// The format.
        format: &'static str,
        /// The message of the decoder.
        reason: String,
    },
    /// A picture above the pixel limit, which protects against decompression bombs. No pixel was
    /// decoded.
    #[error(
        "the picture has {width} x {height} pixels, at most {limit} are read; \
         scale it down"
    )]
    TooManyPixels {
        /// Width in pixels.
        width: u64,
        /// Height in pixels.
        height: u64,
        /// The limit in pixels.
        limit: u64,
    },
    /// A picture whose header states that its decoding takes more memory than allowed.
    #[error(
        "decoding the picture takes {bytes} bytes of memory, at most {limit} are used; \
         scale it down"
    )]
    TooMuchMemory {
        /// Bytes for the file, its pixels, and what its decoder holds besides.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A pixel buffer whose length does not match the picture's size.
    #[error("a picture of {width} x {height} has {expected} bytes of RGB, found {found}")]
    PixelBytes {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Bytes expected.
        expected: u128,
        /// Bytes found.
        found: usize,
    },
    /// A picture without pixels.
    #[error("the picture has {width} x {height} pixels, expected at least 1 x 1")]
    NoPixels {
        /// Width in pixels.
        width: u64,
        /// Height in pixels.
        height: u64,
    },
    /// A picture with an aspect ratio beyond the limit of its family.
    #[error(
        "the picture has {width} x {height} pixels, the longer side may be {limit} times the \
         shorter; crop or pad it"
    )]
    AspectRatio {
        /// Width in pixels, after GLM's scaling of small pictures.
        width: u64,
        /// Height in pixels, after GLM's scaling of small pictures.
        height: u64,
        /// The largest ratio allowed.
        limit: u32,
    },
    /// A picture that is not resized and does not divide into merged patches evenly.
    #[error(
        "the picture has {width} x {height} pixels, expected multiples of {factor} \
         since do_resize is false"
    )]
    NotDivisible {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Side of a square of merged patches, in pixels.
        factor: usize,
    },
    /// A size stated for a picture or video that the folder's processor would change.
    #[error(
        "its keys resize it to {} x {} pixels, which the folder's processor changes to {} x {}; \
         state a size within that processor's limits, {} to {} pixels",
        stated[1], stated[0], found[1], found[0], limits[0], limits[1]
    )]
    Restated {
        /// Height and width by the keys.
        stated: [usize; 2],
        /// Height and width by the processor.
        found: [usize; 2],
        /// The least and the largest area of the processor.
        limits: [u64; 2],
    },
    /// A video with fewer frames than its family requires.
    #[error("the video has {found} frames, expected at least {least}; is it a picture?")]
    TooFewFrames {
        /// The number of frames required.
        least: u64,
        /// The frames found.
        found: u64,
    },
    /// A video file that ffmpeg cannot decode.
    #[error("cannot decode the video {}: {reason}", path.display())]
    VideoFile {
        /// The file.
        path: PathBuf,
        /// The cause, with the remedy.
        reason: String,
    },
    /// Frames of one video that differ in size.
    #[error(
        "it has {} x {} pixels, the first frame {} x {}; cut all frames of a video alike",
        found[0], found[1], first[0], first[1]
    )]
    FrameSize {
        /// Width and height of the first frame.
        first: [usize; 2],
        /// Width and height of this one.
        found: [usize; 2],
    },
    /// A failed allocation, or a size beyond the address space.
    #[error("cannot allocate {bytes} bytes for {what}; are the limits on pixels too high?")]
    Memory {
        /// The purpose of the memory.
        what: &'static str,
        /// Bytes.
        bytes: u128,
    },
    /// A buffer whose length differs from that of the patches.
    #[error("the buffer has {found} elements, the patches {expected}")]
    BufferLength {
        /// Elements expected.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// A text that is not JSON.
    #[error("invalid JSON: {reason}")]
    Json {
        /// The message of the parser.
        reason: String,
    },
    /// An invalid value in a configuration.
    #[error("{key} is {found}, expected {expected}")]
    Config {
        /// The key.
        key: &'static str,
        /// A description of the valid values.
        expected: &'static str,
        /// The value found, as JSON, or `absent`.
        found: String,
    },
    /// A picture or video processor of an unsupported family.
    #[error(
        "processor {found} is not supported; expected one of {}", known.join(", ")
    )]
    UnknownProcessor {
        /// The name found, or the model type if there is no name.
        found: String,
        /// The supported names.
        known: Vec<&'static str>,
    },
    /// An error in a data file, tokenizer or chat template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// An error in a picture or video of a record.
    #[error("line {line}: {place}: {source}")]
    InRecord {
        /// The line where the record begins, from 1.
        line: u64,
        /// The picture or video, counted from 1.
        place: String,
        /// The error.
        source: Box<VlmDataError>,
    },
    /// A thread that the system failed to start.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The message of the system.
        reason: String,
    },
    /// A panic: a bug in this crate or in a dependency.
    #[error("line {line}: encoding the record panicked: {reason}; please report it")]
    Panic {
        /// The line where the record begins, from 1.
        line: u64,
        /// The message.
        reason: String,
    },
    /// A folder without a file that configures the processing of pictures.
    #[error(
        "{} has neither a preprocessor_config.json nor a processor_config.json that says how \
         pictures are processed; copy it from the model's page",
        folder.display()
    )]
    NoProcessorFile {
        /// The folder.
        folder: PathBuf,
    },
}

impl VlmDataError {
    /// True for a conversation longer than the token limit.
    pub fn is_too_long(&self) -> bool {
        match self {
            Self::InFile { source, .. } => source.is_too_long(),
            Self::Text(error) => error.is_too_long(),
            _ => false,
        }
    }
}

impl From<plain_files::FileError> for VlmDataError {
    fn from(error: plain_files::FileError) -> Self {
        Self::File {
            path: error.path,
            reason: error.cause.to_string(),
        }
    }
}
