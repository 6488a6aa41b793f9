//! The crate's error type.

use std::path::PathBuf;

use crate::text::TextError;

/// The result of this crate's functions.
pub type Result<T, E = VlmDataError> = std::result::Result<T, E>;

/// Data that no sample can be made of.
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
    /// An error in the contents of a file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error.
        source: Box<VlmDataError>,
    },
    /// Bytes of no format that is read.
    #[error(
        "the first bytes are {start:02x?}, no JPEG, PNG, WebP, BMP or GIF; \
         convert the picture to one of them"
    )]
    UnknownFormat {
        /// The first bytes, at most 12.
        start: Vec<u8>,
    },
    /// A picture that is damaged, cut off, or of a kind that its decoder does not know.
    #[error("the {format} picture cannot be decoded: {reason}")]
    Decode {
        /// The format.
        format: &'static str,
        /// The message of the decoder.
        reason: String,
    },
    /// A picture so large that it may be an attack. No pixel was decoded.
    #[error(
        "the picture has {width} x {height} pixels, at most {limit} are read; \
         raise ReadOptions::max_pixels if it is trusted"
    )]
    TooManyPixels {
        /// Pixels in a row.
        width: u64,
        /// Rows.
        height: u64,
        /// Pixels allowed.
        limit: u64,
    },
    /// Pixels whose number does not fit the sides of their picture.
    #[error("a picture of {width} x {height} has {expected} bytes of RGB, found {found}")]
    PixelBytes {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Bytes expected.
        expected: u128,
        /// Bytes found.
        found: usize,
    },
    /// A picture without pixels.
    #[error("the picture has {width} x {height} pixels, expected at least 1 x 1")]
    NoPixels {
        /// Pixels in a row.
        width: u64,
        /// Rows.
        height: u64,
    },
    /// A picture too long for its family.
    #[error(
        "the picture has {width} x {height} pixels, the longer side may be {limit} times the \
         shorter; crop or pad it"
    )]
    AspectRatio {
        /// Pixels in a row, after GLM's scaling of small pictures.
        width: u64,
        /// Rows, after GLM's scaling of small pictures.
        height: u64,
        /// The largest ratio.
        limit: u32,
    },
    /// A picture that is not resized and does not divide into merged patches.
    #[error(
        "the picture has {width} x {height} pixels, expected multiples of {factor} \
         since do_resize is false"
    )]
    NotDivisible {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Pixels along a side of a square of merged patches.
        factor: usize,
    },
    /// A video of fewer frames than its family takes.
    #[error("the video has {found} frames, expected at least {least}; is it a picture?")]
    TooFewFrames {
        /// The least number of frames.
        least: u64,
        /// The frames found.
        found: u64,
    },
    /// A video file that ffmpeg does not decode.
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
    /// Memory that the system does not give, or that no address reaches.
    #[error("cannot allocate {bytes} bytes for {what}; are the limits on pixels too high?")]
    Memory {
        /// For what.
        what: &'static str,
        /// Bytes.
        bytes: u128,
    },
    /// A buffer of another length than the patches.
    #[error("the buffer has {found} elements, the patches {expected}")]
    BufferLength {
        /// Elements expected.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// A text that is no JSON.
    #[error("no JSON: {reason}")]
    Json {
        /// The message of the parser.
        reason: String,
    },
    /// A value of a configuration that cannot be used.
    #[error("{key} is {found}, expected {expected}")]
    Config {
        /// The key.
        key: &'static str,
        /// The values that can be used, in words.
        expected: &'static str,
        /// The value found, as JSON, or `absent`.
        found: String,
    },
    /// A processor of pictures or videos of another family.
    #[error(
        "processor {found} is none that this crate has; it has {}", known.join(", ")
    )]
    UnknownProcessor {
        /// The name found, or the model type without one.
        found: String,
        /// The names known.
        known: Vec<&'static str>,
    },
    /// A data file, tokenizer or template from which no training text can be made.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A picture or video of a record from which no patches can be made.
    #[error("line {line}: {place}: {source}")]
    InRecord {
        /// The line where the record begins, from 1.
        line: u64,
        /// The picture or video, counted from 1.
        place: String,
        /// The error.
        source: Box<VlmDataError>,
    },
    /// A thread that the system does not start.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The message of the system.
        reason: String,
    },
    /// A mistake of this crate or one below it.
    #[error("line {line}: making a sample of the record panicked: {reason}; please report it")]
    Panic {
        /// The line where the record begins, from 1.
        line: u64,
        /// The message.
        reason: String,
    },
    /// A folder without the file that says how pictures are processed.
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
