//! The paths of a record's pictures and frames.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use data_encoding::{Encoding, Specification};

use super::limits::{FrameChoice, PictureLimits};
use crate::text::error::RecordProblem;
use crate::text::json::Json;

/// A picture or frame: a file, or the bytes of one.
#[derive(Clone, PartialEq)]
pub enum MediaSource {
    /// A path, already joined to the media folder.
    Path(PathBuf),
    /// An encoded picture (PNG, JPEG, ...) from base64.
    Bytes(Vec<u8>),
}

/// Prints the number of bytes rather than the bytes.
impl std::fmt::Debug for MediaSource {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => write!(out, "Path({})", path.display()),
            Self::Bytes(bytes) => write!(out, "Bytes({} bytes)", bytes.len()),
        }
    }
}

/// A video.
#[derive(Clone, Debug, PartialEq)]
pub struct Video {
    /// The frames, in order of time.
    pub frames: Frames,
    /// Frames per second, if the record states it; for a video file, the rate of sampling.
    pub fps: Option<f64>,
    /// The frames that are taken of a video file.
    pub choice: FrameChoice,
    /// The sizes of frames.
    pub limits: PictureLimits,
}

/// The frames of a video.
#[derive(Clone, Debug, PartialEq)]
pub enum Frames {
    /// All files of a folder, in order of the numbers in their names: `2.png` before `10.png`.
    Folder(PathBuf),
    /// A list of frames, in order.
    List(Vec<MediaSource>),
    /// A video file, decoded by the program ffmpeg.
    File(PathBuf),
}

/// The extensions of video files.
const VIDEO_ENDINGS: [&str; 9] = [
    "mp4", "avi", "mov", "mkv", "webm", "m4v", "flv", "wmv", "mpg",
];

/// First decoded bytes that distinguish a raw base64 string from a path.
const SIGNATURES: [&[u8]; 5] = [b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM"];

/// Reads a picture: a path, a `data:` address, base64, or an object that holds one of them.
pub(super) fn source(value: &Json, key: &str, folder: &Path) -> Result<MediaSource, RecordProblem> {
    match value {
        Json::String(text) => from_text(text, key, folder),
        Json::Object(_) => {
            // ms-swift's {"bytes", "path"}, OpenAI's {"url"}.
            for name in ["bytes", "base64", "data"] {
                if let Some(text) = value.get(name) {
                    let text = text
                        .as_str()
                        .ok_or_else(|| wrong(key, "base64 text", text))?;
                    return Ok(MediaSource::Bytes(decode_base64(text, key)?));
                }
            }
            for name in ["path", "url", "image", "image_url"] {
                if let Some(inner) = value.get(name) {
                    let text = inner.as_str().ok_or_else(|| wrong(key, "a path", inner))?;
                    return from_text(text, key, folder);
                }
            }
            Err(wrong(
                key,
                "an object with \"path\", \"url\" or \"bytes\"",
                value,
            ))
        }
        _ => Err(wrong(key, "a path or base64", value)),
    }
}

fn from_text(text: &str, key: &str, folder: &Path) -> Result<MediaSource, RecordProblem> {
    if let Some(data) = text.strip_prefix("data:") {
        let Some((_, data)) = data.split_once(";base64,") else {
            let detail = "expected data:image/...;base64,...";
            return Err(RecordProblem::Base64 {
                key: key.to_owned(),
                detail,
            });
        };
        return Ok(MediaSource::Bytes(decode_base64(data, key)?));
    }
    let path = text.strip_prefix("file://").unwrap_or(text);
    if path.contains("://") {
        return Err(RecordProblem::Address {
            address: shortened(path),
        });
    }
    if path.is_empty() {
        let key = key.to_owned();
        let found = "an empty one".to_owned();
        return Err(RecordProblem::Value {
            key,
            expected: "a path",
            found,
        });
    }
    if path.len() >= 64
        && let Some(head) = path.get(..8)
        && let Ok(start) = decode_base64(head, key)
        && SIGNATURES
            .iter()
            .any(|signature| start.starts_with(signature))
        && let Ok(bytes) = decode_base64(path, key)
    {
        return Ok(MediaSource::Bytes(bytes));
    }
    Ok(MediaSource::Path(folder.join(path)))
}

/// Reads a video: a folder, a list of frames, a file, or an object with one of them and `fps`.
pub(super) fn video(value: &Json, key: &str, folder: &Path) -> Result<Video, RecordProblem> {
    match value {
        Json::String(text) => {
            let MediaSource::Path(path) = from_text(text, key, folder)? else {
                return Err(wrong(key, "a folder, a list of frames or a file", value));
            };
            let ending = path
                .extension()
                .and_then(|ending| ending.to_str())
                .unwrap_or("");
            let is_file = VIDEO_ENDINGS.contains(&ending.to_ascii_lowercase().as_str());
            let frames = if is_file {
                Frames::File
            } else {
                Frames::Folder
            };
            Ok(Video::new(frames(path)))
        }
        Json::Array(items) => {
            let frame =
                |(index, item): (usize, &Json)| source(item, &format!("{key}[{index}]"), folder);
            let frames = items
                .iter()
                .enumerate()
                .map(frame)
                .collect::<Result<Vec<_>, _>>()?;
            if frames.is_empty() {
                let (key, found) = (key.to_owned(), "an empty list".to_owned());
                return Err(RecordProblem::Value {
                    key,
                    expected: "frames",
                    found,
                });
            }
            Ok(Video::new(Frames::List(frames)))
        }
        Json::Object(_) => {
            let inner = ["frames", "video", "path", "folder", "url"]
                .iter()
                .find_map(|k| value.get(k));
            let Some(inner @ (Json::String(_) | Json::Array(_))) = inner else {
                return Err(wrong(key, "an object with \"frames\" or \"video\"", value));
            };
            let mut video = video(inner, key, folder)?;
            video.read_keys(value, key)?;
            Ok(video)
        }
        _ => Err(wrong(key, "a folder, a list of frames or a file", value)),
    }
}

impl Video {
    fn new(frames: Frames) -> Self {
        Self {
            frames,
            fps: None,
            choice: FrameChoice::default(),
            limits: PictureLimits::default(),
        }
    }

    /// Reads the keys beside the frames.
    pub(super) fn read_keys(&mut self, value: &Json, key: &str) -> Result<(), RecordProblem> {
        for name in ["fps", "sample_fps"] {
            if let Some(fps) = value.get(name) {
                self.fps = Some(self::fps(fps, key)?);
            }
        }
        let choice = FrameChoice::read(value, key)?;
        if choice != FrameChoice::default() {
            if !matches!(self.frames, Frames::File(_)) {
                let is_stated = |name: &&&str| value.get(name).is_some();
                let name = FrameChoice::KEYS.iter().find(is_stated);
                return Err(RecordProblem::NotApplied {
                    key: format!("{key}.{}", name.unwrap_or(&"")),
                    remedy: "it is for video files, so list the frames that are wanted",
                });
            }
            self.choice = choice;
        }
        let limits = PictureLimits::read(value, key)?;
        if limits != PictureLimits::default() {
            self.limits = limits;
        }
        Ok(())
    }
}

/// Reads a frame rate.
pub(super) fn fps(value: &Json, key: &str) -> Result<f64, RecordProblem> {
    let found = value
        .as_f64()
        .ok_or_else(|| wrong(&format!("{key}.fps"), "a number", value))?;
    if !(found.is_finite() && found > 0.0) {
        return Err(RecordProblem::Fps { found });
    }
    Ok(found)
}

/// A value of the wrong type.
pub(super) fn wrong(key: &str, expected: &'static str, found: &Json) -> RecordProblem {
    RecordProblem::Value {
        key: key.to_owned(),
        expected,
        found: found.kind().to_owned(),
    }
}

/// At most 80 characters of a text, for an error message.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Decodes standard or URL-safe base64, with or without padding; line breaks are skipped.
fn decode_base64(text: &str, key: &str) -> Result<Vec<u8>, RecordProblem> {
    let error = |detail| RecordProblem::Base64 {
        key: key.to_owned(),
        detail,
    };
    let bare = text.trim_end_matches(['=', '\r', '\n']);
    let padding = text[bare.len()..].matches('=').count();
    let is_outside = |byte: u8| !byte.is_ascii_alphanumeric() && !b"+/-_\r\n".contains(&byte);
    let bytes = BASE64.decode(bare.as_bytes()).map_err(|_| {
        error(match bare.bytes().any(is_outside) {
            true => "a character outside its alphabet",
            false => "it is cut off",
        })
    })?;
    match (padding, bytes.is_empty()) {
        (3.., _) => Err(error("it is cut off")),
        (_, true) => Err(error("it is empty")),
        _ => Ok(bytes),
    }
}

/// Both alphabets of base64, with line breaks anywhere.
static BASE64: LazyLock<Encoding> = LazyLock::new(|| {
    let mut both = Specification::new();
    both.symbols += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    (both.translate.from, both.translate.to) = ("-_".to_owned(), "+/".to_owned());
    both.ignore += "\r\n";
    let fixed = |error| unreachable!("the alphabet is fixed: {error}");
    both.encoding().unwrap_or_else(fixed)
});

#[cfg(test)]
mod tests {
    use super::decode_base64;

    #[test]
    fn base64_is_decoded_or_refused() {
        let decode = |text| decode_base64(text, "image").ok();
        for (text, bytes) in [
            ("TQ==", b"M".as_slice()),
            ("TWE=", b"Ma"),
            ("TWFu", b"Man"),
            ("TWFu\nTWFu", b"ManMan"),
            ("TWE", b"Ma"),
            ("-_8=", b"\xfb\xff"),
        ] {
            assert_eq!(decode(text).as_deref(), Some(bytes), "{text}");
        }
        for text in ["", "T", "TWFuT", "TQ=Q", "T!==", "TQ===", "TR=="] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
