//! Expands pads: the single pad that a template prints for a picture is repeated for each token of
//! the picture's grid.

use std::ops::Range;

use vlm_family::MediaStyle;

use super::error::RecordProblem;

type Result<T> = std::result::Result<T, RecordProblem>;

/// The patches of a picture or video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Temporal patches; 1 for a picture.
    pub time: u32,
    /// Patches from top to bottom, before merging.
    pub height: u32,
    /// Patches from left to right, before merging.
    pub width: u32,
}

impl Grid {
    /// The tokens of one temporal patch: height · width / `merge`².
    ///
    /// # Errors
    /// [`RecordProblem::Grid`] if a side is 0 or not divisible by `merge`.
    pub fn frame_tokens(self, merge: u32) -> Result<usize> {
        let Self {
            time,
            height,
            width,
        } = self;
        let whole = |side: u32| side > 0 && merge > 0 && side.is_multiple_of(merge);
        if time == 0 || !whole(height) || !whole(width) {
            return Err(RecordProblem::Grid {
                grid: [time, height, width],
                merge,
            });
        }
        Ok((height / merge) as usize * (width / merge) as usize)
    }

    /// The tokens of all temporal patches: time · height · width / `merge`².
    ///
    /// # Errors
    /// As [`Grid::frame_tokens`].
    pub fn tokens(self, merge: u32) -> Result<usize> {
        Ok(self.frame_tokens(merge)?.saturating_mul(self.time as usize))
    }
}

/// The grid of a video and the times of its temporal patches.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoGrid {
    /// The patches.
    pub grid: Grid,
    /// The time of each temporal patch, in seconds; empty for Qwen2-VL and Qwen2.5-VL, which do not
    /// write it. Qwen3-VL takes the mean of the patch's two frames, GLM-4.1V the first frame.
    pub seconds: Vec<f64>,
}

/// The grids of a conversation, in the order of its pictures and videos.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grids<'a> {
    /// One for each picture.
    pub images: &'a [Grid],
    /// One for each video.
    pub videos: &'a [VideoGrid],
}

/// A text with one pad for each run of pads.
#[derive(Debug, PartialEq)]
pub(super) struct Padded {
    pub(super) text: String,
    /// The length of each run, in order.
    pub(super) runs: Vec<usize>,
    /// The ranges of the original text, shifted.
    pub(super) ranges: Vec<Range<usize>>,
}

impl Padded {
    /// The tokens of the runs beyond the pad of each.
    pub(super) fn added_tokens(&self) -> usize {
        let added = |sum: usize, run: &usize| sum.saturating_add(run - 1);
        self.runs.iter().fold(0, added)
    }
}

/// Writes videos in the family's notation and counts the pads of each run. `ranges` refer to `text`
/// and contain no pad.
///
/// # Source
/// transformers 5.24.0: `replace_image_token` and `replace_video_token` of the processors
pub(super) fn pad(
    text: &str,
    style: Option<MediaStyle>,
    merge: u32,
    images: &[Grid],
    videos: &[&VideoGrid],
    ranges: Vec<Range<usize>>,
) -> Result<Padded> {
    let Some(style) = style else {
        return Ok(Padded {
            text: text.to_owned(),
            runs: Vec::new(),
            ranges,
        });
    };
    let (image_pad, video_pad) = (style.image_pad(), style.video_pad());
    let mut out = String::with_capacity(text.len());
    let (mut runs, mut moved) = (Vec::new(), ranges);
    let (mut next_image, mut next_video) = (0, 0);
    let mut rest = text;
    loop {
        let image = rest.find(image_pad);
        let video = rest.find(video_pad);
        let (at, is_image) = match (image, video) {
            (Some(image), video) if video.is_none_or(|video| image < video) => (image, true),
            (_, Some(video)) => (video, false),
            _ => break,
        };
        out.push_str(&rest[..at]);
        if is_image {
            if let Some(grid) = images.get(next_image) {
                out.push_str(image_pad);
                runs.push(grid.tokens(merge)?);
            }
            next_image += 1;
            rest = &rest[at + image_pad.len()..];
            continue;
        }
        let before = out.len();
        if let Some(video) = videos.get(next_video) {
            write_video(&mut out, &mut runs, style, merge, video)?;
        }
        next_video += 1;
        rest = &rest[at + video_pad.len()..];
        // Ranges after the pad; `before` is where it lies, earlier videos being written out.
        for range in moved.iter_mut().filter(|range| range.start > before) {
            let by = |place: usize| place + (out.len() - before) - video_pad.len();
            *range = by(range.start)..by(range.end);
        }
    }
    out.push_str(rest);
    for (pad, found, expected) in [
        (image_pad, next_image, images.len()),
        (video_pad, next_video, videos.len()),
    ] {
        if found != expected {
            return Err(RecordProblem::Pads {
                pad,
                expected,
                found,
            });
        }
    }
    Ok(Padded {
        text: out,
        runs,
        ranges: moved,
    })
}

fn write_video(
    out: &mut String,
    runs: &mut Vec<usize>,
    style: MediaStyle,
    merge: u32,
    video: &VideoGrid,
) -> Result<()> {
    let grid = video.grid;
    if style == MediaStyle::Qwen2 {
        out.push_str(style.video_pad());
        runs.push(grid.tokens(merge)?);
        return Ok(());
    }
    let (frames, times) = (grid.time, video.seconds.len());
    if frames as usize != times {
        return Err(RecordProblem::Times { frames, times });
    }
    let tokens = grid.frame_tokens(merge)?;
    for &seconds in &video.seconds {
        let pad = match style {
            MediaStyle::Glm => style.image_pad(),
            MediaStyle::Qwen2 | MediaStyle::Qwen3 => style.video_pad(),
        };
        out.push_str(&match style {
            // Python's int() cuts off.
            MediaStyle::Glm => {
                format!(
                    "<|begin_of_image|>{pad}<|end_of_image|>{}",
                    seconds.trunc() as i64
                )
            }
            MediaStyle::Qwen2 | MediaStyle::Qwen3 => {
                format!("<{seconds:.1} seconds><|vision_start|>{pad}<|vision_end|>")
            }
        });
        runs.push(tokens);
    }
    Ok(())
}
