//! The sizes and frames of qwen-vl-utils, for the keys of a part.
//!
//! # Source
//! qwen-vl-utils 0.0.14, vision_process.py

use crate::picture::{PictureConfig, PictureProcessor, ResizeRule};
use crate::text::format::{FrameChoice, PictureLimits};
use crate::{Result, VlmDataError};

/// Frames per second of a file, if nothing states them.
pub(crate) const DEFAULT_FPS: f64 = 2.0;
/// The number of frames is a multiple of this.
const FRAME_FACTOR: f64 = 2.0;
/// The least and the largest number of frames that follow from a rate.
const FRAMES: [f64; 2] = [4.0, 768.0];
/// The least and the largest area of a picture, and of a frame, in tokens.
const PICTURE_TOKENS: [f64; 2] = [4.0, 16_384.0];
const FRAME_TOKENS: [f64; 2] = [128.0, 768.0];
/// The largest area of a video's frames together, in tokens: nine tenths of the model's context.
const VIDEO_TOKENS: f64 = 0.9 * 128_000.0;
const MAX_RATIO: u32 = 200;

/// Height and width.
pub(crate) type Sides = [usize; 2];

/// Height and width that the keys of a picture resize it to; `None` without keys.
///
/// Areas are also within the folder's. Stated sides must be as the folder's processor keeps them.
///
/// # Errors
/// [`VlmDataError::Config`] if the least area is above the largest; [`VlmDataError::AspectRatio`];
/// [`VlmDataError::Restated`]
pub(crate) fn picture(
    processor: &PictureProcessor,
    limits: &PictureLimits,
    sides: Sides,
) -> Result<Option<Sides>> {
    if *limits == PictureLimits::default() {
        return Ok(None);
    }
    let config = processor.config();
    let factor = factor(config);
    if let Some(stated) = limits.resized {
        let size = resize(
            stated.map(|side| side as f64),
            factor,
            areas(factor, PICTURE_TOKENS),
        )?;
        processor.grid_of_resized(config.temporal_patch_size, size)?;
        return Ok(Some(size));
    }
    // GLM's rule counts all frames of a patch.
    let frames = match config.rule {
        ResizeRule::Qwen => 1,
        ResizeRule::Glm => config.temporal_patch_size as u64,
    };
    let [least, largest] = [config.min_pixels, config.max_pixels].map(|area| area / frames);
    let max = limits.max_pixels.map_or(largest, |max| max.min(largest));
    let min = limits.min_pixels.unwrap_or(least.min(max));
    let limits = [min, max].map(|area| area as f64);
    resize(sides.map(|side| side as f64), factor, limits).map(Some)
}

/// The sizes of a video's frames: of each picture of a list before the frames become a video, and
/// of the frames. `None` without keys.
///
/// # Errors
/// as [`picture`]
pub(crate) fn video(
    processor: &PictureProcessor,
    limits: &PictureLimits,
    [frames, height, width]: [usize; 3],
    is_list: bool,
) -> Result<Option<[Sides; 2]>> {
    if *limits == PictureLimits::default() {
        return Ok(None);
    }
    let factor = factor(processor.config());
    let stated = |area: Option<u64>| area.map(|area| area as f64);
    let [min, max] = [limits.min_pixels, limits.max_pixels].map(stated);
    let sides = [height, width].map(|side| side as f64);
    let resized = limits.resized.map(|sides| sides.map(|side| side as f64));
    // A list's pictures are resized with a token's side for a patch's.
    let first = if is_list {
        let [least, largest] = areas(2 * factor, PICTURE_TOKENS);
        let areas = match resized {
            Some(_) => [least, largest],
            None => [min.unwrap_or(least), max.unwrap_or(largest)],
        };
        resize(resized.unwrap_or(sides), 2 * factor, areas)?
    } else {
        [height, width]
    };
    let size = match resized {
        Some(sides) => resize(sides, factor, areas(factor, PICTURE_TOKENS))?,
        None => {
            let [least, largest] = areas(factor, FRAME_TOKENS);
            let min = min.unwrap_or(least);
            let total =
                stated(limits.total_pixels).unwrap_or((factor * factor) as f64 * VIDEO_TOKENS);
            let even = frames.next_multiple_of(FRAME_FACTOR as usize) as f64;
            let most = largest
                .min(total / even * FRAME_FACTOR)
                .max((min * 1.05).trunc());
            let max = max.map_or(most, |max| max.min(most));
            resize(first.map(|side| side as f64), factor, [min, max])?
        }
    };
    processor.grid_of_resized(frames, size)?;
    Ok(Some([first, size]))
}

/// The numbers of the frames that are taken of a video file's `total` frames at `rate` frames per
/// second, from 0, and the number of frames that they are spread over. `fps` is the rate of
/// sampling.
///
/// # Errors
/// a text with what the video has, and what its keys state
pub(crate) fn frames(
    choice: &FrameChoice,
    fps: Option<f64>,
    total: usize,
    rate: f64,
) -> Result<(Vec<usize>, usize), String> {
    let last = total.saturating_sub(1);
    let duration = total as f64 / rate;
    let frame_at = |second: f64| second.min(duration).max(0.0) * rate;
    let start = choice
        .start
        .map_or(0, |second| frame_at(second).ceil() as usize);
    let end = choice
        .end
        .map_or(last, |second| (frame_at(second).floor() as usize).min(last));
    let is_cut = choice.start.or(choice.end).is_some();
    if total == 0 || is_cut && start >= end {
        return Err(format!(
            "its keys state the frames {start} to {end} of {total}, which are {duration:.2} s; \
             expected video_start before video_end"
        ));
    }
    let total = end - start + 1;
    let whole = |number: f64, round: fn(f64) -> f64| round(number / FRAME_FACTOR) * FRAME_FACTOR;
    let count = match choice.frames {
        Some(frames) => whole(frames, f64::round_ties_even),
        None => {
            let least = whole(choice.min_frames.unwrap_or(FRAMES[0]), f64::ceil);
            let most = choice.max_frames.unwrap_or(FRAMES[1].min(total as f64));
            let count = total as f64 / rate * fps.unwrap_or(DEFAULT_FPS);
            let count = count
                .max(least)
                .min(whole(most, f64::floor))
                .min(total as f64);
            whole(count, f64::floor)
        }
    };
    if !(FRAME_FACTOR..=total as f64).contains(&count) {
        return Err(format!(
            "its keys state {count} frames, expected from {FRAME_FACTOR} to the {total} that it has"
        ));
    }
    if count > FRAMES[1] {
        return Err(format!(
            "its keys state {count} frames, at most {} are read; write a lower \"nframes\" or \
             \"max_frames\"",
            FRAMES[1]
        ));
    }
    Ok((spread(start, end, count as usize), total))
}

/// Whole numbers from `start` to `end` in `count` steps as even as possible: PyTorch's `linspace`,
/// in f32 from both ends, rounded.
fn spread(start: usize, end: usize, count: usize) -> Vec<usize> {
    let [first, last] = [start, end].map(|number| number as f32);
    let step = (last - first) / (count - 1) as f32;
    // Each product and sum is rounded once.
    let number = |index: usize| match index < count / 2 {
        true => step.mul_add(index as f32, first),
        false => (-step).mul_add((count - index - 1) as f32, last),
    };
    (0..count)
        .map(|index| number(index).round_ties_even() as usize)
        .collect()
}

/// The side of a token in pixels.
fn factor(config: &PictureConfig) -> usize {
    config.patch_size * config.merge_size
}

fn areas(factor: usize, tokens: [f64; 2]) -> [f64; 2] {
    tokens.map(|tokens| tokens * (factor * factor) as f64)
}

/// The multiples of `factor` nearest to height and width whose area is within the limits.
fn resize([height, width]: [f64; 2], factor: usize, [min, max]: [f64; 2]) -> Result<Sides> {
    if max < min {
        return Err(VlmDataError::Config {
            key: "min_pixels",
            expected: "at most max_pixels",
            found: format!("{min} and max_pixels {max}"),
        });
    }
    let ratio = || VlmDataError::AspectRatio {
        width: width as u64,
        height: height as u64,
        limit: MAX_RATIO,
    };
    if height.max(width) / height.min(width) > f64::from(MAX_RATIO) {
        return Err(ratio());
    }
    let f = factor as f64;
    let nearest = [height, width].map(|side| ((side / f).round_ties_even() * f).max(f));
    let area = nearest[0] * nearest[1];
    let resized = if area > max {
        let beta = (height * width / max).sqrt();
        [height, width].map(|side| (side / beta / f).floor() * f)
    } else if area < min {
        let beta = (min / (height * width)).sqrt();
        [height, width].map(|side| (side * beta / f).ceil() * f)
    } else {
        nearest
    };
    // A thin picture within a small area has no room for a token.
    match resized.iter().all(|&side| side >= f) {
        true => Ok(resized.map(|side| side as usize)),
        false => Err(ratio()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::picture::Family;
    use crate::text::FileOptions;
    use crate::text::format::{Conversations, Video};

    /// What qwen-vl-utils gives; see `tests/fixtures/generate/formats.py`.
    fn rows(name: &str) -> Vec<Value> {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/text/formats.json"
        );
        let file = std::fs::read(path).expect("a file");
        let mut file: Value = serde_json::from_slice(&file).expect("JSON");
        match file[name].take() {
            Value::Array(rows) => rows,
            other => panic!("{name}: {other}"),
        }
    }

    fn number(row: &Value, name: &str) -> usize {
        row[name].as_u64().expect(name) as usize
    }

    /// The video of a part with the keys of a row.
    fn video_of(row: &Value, video: Value) -> Video {
        let mut part = row["part"].clone();
        part["type"] = "video".into();
        part["video"] = video;
        let record = serde_json::json!({"messages": [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": "a"},
        ]})
        .to_string();
        let mut read = Conversations::new(record.as_bytes(), "", &FileOptions::default());
        let read = read.next().expect("a record").expect("a conversation");
        read.videos.into_iter().next().expect("a video")
    }

    #[test]
    fn frames_of_files_are_those_of_qwen_vl_utils() {
        let rows = rows("samplings");
        assert_eq!(rows.len(), 207);
        for row in rows {
            let video = video_of(&row, "a.mp4".into());
            let (total, rate) = (
                number(&row, "frames"),
                row["rate"].as_f64().expect("a rate"),
            );
            let found = frames(&video.choice, video.fps, total, rate);
            let Ok((found, spread_over)) = found else {
                assert_eq!(row["refused"], true, "{row}: {found:?}");
                continue;
            };
            let fps = found.len() as f64 / spread_over as f64 * rate;
            assert_eq!(row["fps"].as_f64(), Some(fps), "{row}");
            let text = serde_json::to_string(&found).expect("JSON");
            let hash = Sha256::digest(&text);
            let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(
                row["indices"] == hash || row["indices"] == serde_json::json!(found),
                "{row}: {text}"
            );
        }
    }

    #[test]
    fn frames_have_the_sizes_of_qwen_vl_utils() {
        let rows = rows("video_sizes");
        assert_eq!(rows.len(), 560);
        let processors = ["qwen2_vl", "qwen3_vl"].map(|family| {
            let family = Family::of(family).expect("a family");
            let mut config = PictureConfig::of_family(family).expect("pictures");
            (config.min_pixels, config.max_pixels) = (1, 1 << 40);
            PictureProcessor::new(config).expect("a processor")
        });
        for row in rows {
            let processor = &processors[usize::from(row["patch"] == 16)];
            let count = number(&row, "frames");
            let is_list = row["list"] == true;
            let frames = match is_list {
                true => vec!["a.png"; count].into(),
                false => "a.mp4".into(),
            };
            let limits = video_of(&row, frames).limits;
            let sides = [0, 1].map(|at| row["sides"][at].as_u64().expect("a side") as usize);
            let found = video(processor, &limits, [count, sides[0], sides[1]], is_list);
            match found {
                Ok(found) => {
                    let [_, size] = found.expect("keys");
                    assert_eq!(row["resized"], serde_json::json!(size), "{row}");
                }
                Err(error) => assert_eq!(row["refused"], true, "{row}: {error}"),
            }
        }
    }

    #[test]
    fn sizes_that_the_folder_changes_are_refused() {
        let family = Family::of("qwen2_vl").expect("a family");
        let mut config = PictureConfig::of_family(family).expect("pictures");
        config.max_pixels = 100_000;
        let processor = PictureProcessor::new(config).expect("a processor");
        let stated = |height, width| PictureLimits {
            resized: Some([height, width]),
            ..PictureLimits::default()
        };
        let sides = |height, width| picture(&processor, &stated(height, width), [9, 9]);
        assert_eq!(sides(280, 140).expect("within"), Some([280, 140]));
        let error = sides(560, 280).expect_err("above").to_string();
        assert!(
            error.contains("280 x 560 pixels, which the folder's processor changes to 196 x 420"),
            "{error}"
        );
        let found = video(&processor, &stated(560, 280), [2, 9, 9], false);
        assert!(
            matches!(found, Err(VlmDataError::Restated { .. })),
            "{found:?}"
        );
        let limits = PictureLimits {
            min_pixels: Some(200_000),
            ..PictureLimits::default()
        };
        let found = picture(&processor, &limits, [9, 9]);
        assert!(
            matches!(found, Err(VlmDataError::Config { .. })),
            "{found:?}"
        );
    }
}
