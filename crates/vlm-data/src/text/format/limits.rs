//! The keys by which qwen-vl-utils sizes a picture or video and chooses a video's frames.

use super::media::wrong;
use crate::text::error::RecordProblem;
use crate::text::json::Json;

type Result<T> = std::result::Result<T, RecordProblem>;

/// Sizes of a picture or of a video's frames, as a part states them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PictureLimits {
    /// The least area of the resized picture in pixels.
    pub min_pixels: Option<u64>,
    /// The largest area of the resized picture in pixels.
    pub max_pixels: Option<u64>,
    /// The largest area of a video's frames together, in pixels.
    pub total_pixels: Option<u64>,
    /// Height and width of the resized picture in pixels, before they are rounded.
    pub resized: Option<[u64; 2]>,
}

/// The frames of a video file, as a part states them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FrameChoice {
    /// The number of frames.
    pub frames: Option<f64>,
    /// The least number of frames, if the number follows from a rate.
    pub min_frames: Option<f64>,
    /// The largest number of frames, if the number follows from a rate.
    pub max_frames: Option<f64>,
    /// Where the frames begin, in seconds.
    pub start: Option<f64>,
    /// Where the frames end, in seconds.
    pub end: Option<f64>,
}

impl PictureLimits {
    pub(super) fn read(value: &Json, key: &str) -> Result<Self> {
        let area = |name: &str| match value.get(name) {
            None => Ok(None),
            Some(&Json::Int(area)) if area > 0 => Ok(Some(area as u64)),
            Some(&Json::Float(area)) if (1.0..9e15).contains(&area) => Ok(Some(area as u64)),
            Some(other) => {
                let key = format!("{key}.{name}");
                Err(wrong(&key, "a number of pixels above 0", other))
            }
        };
        let resized = match [area("resized_height")?, area("resized_width")?] {
            [None, None] => None,
            [Some(height), Some(width)] => Some([height, width]),
            _ => {
                return Err(RecordProblem::NotApplied {
                    key: format!("{key}.resized_height or resized_width"),
                    remedy: "state both",
                });
            }
        };
        Ok(Self {
            min_pixels: area("min_pixels")?,
            max_pixels: area("max_pixels")?,
            total_pixels: area("total_pixels")?,
            resized,
        })
    }
}

impl FrameChoice {
    /// Its keys, in the order of its fields.
    pub(super) const KEYS: [&str; 5] = [
        "nframes",
        "min_frames",
        "max_frames",
        "video_start",
        "video_end",
    ];

    pub(super) fn read(value: &Json, key: &str) -> Result<Self> {
        let number = |name: &str| {
            let Some(found) = value.get(name) else {
                return Ok(None);
            };
            let number = found.as_f64().filter(|number| number.is_finite());
            let error = || wrong(&format!("{key}.{name}"), "a number", found);
            number.map(Some).ok_or_else(error)
        };
        let [frames, min_frames, max_frames, start, end] = Self::KEYS.map(number);
        let read = Self {
            frames: frames?,
            min_frames: min_frames?,
            max_frames: max_frames?,
            start: start?,
            end: end?,
        };
        if read.frames.is_some() && value.get("fps").is_some() {
            return Err(RecordProblem::NotApplied {
                key: format!("{key}.nframes"),
                remedy: "state either \"fps\" or \"nframes\"",
            });
        }
        Ok(read)
    }
}
