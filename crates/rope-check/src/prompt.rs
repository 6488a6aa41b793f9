//! A prompt described by its parts, and the tokens that a family's processor would make of them.

use std::ops::Range;
use std::path::Path;

use rope_core::position_ids::{PositionIds, PositionRules, Prompt, Rows};
use serde::{Deserialize, Serialize};
use serde_json::Number;

/// Longest prompt: more than any model reads, and less than memory holds.
pub const MAX_TOKENS: usize = 1 << 24;

/// Sequences of parts.
///
/// # Examples
/// ```
/// use rope_check::prompt::PromptDescription;
/// use rope_core::position_ids::{PositionRules, TokenIds};
///
/// let parts = ["text:2", "image:4x4"].map(str::to_owned);
/// let rules = PositionRules::new("qwen2_vl", TokenIds::new(-1, -1)).expect("a family");
/// let prompt = PromptDescription::read(&parts)?.lay_out(&rules, 6)?;
/// // Two tokens of text, and four merged patches between two marks.
/// assert_eq!(prompt.kinds, [0, 0, 0, 1, 1, 1, 1, 0]);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptDescription {
    /// Hugging Face's model type.
    pub model: Option<String>,
    sequences: Vec<Vec<PromptPart>>,
}

/// A part of a prompt. Grids are T, H and W in patches.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RawPart")]
pub enum PromptPart {
    /// Tokens.
    Text(usize),
    /// A picture.
    Image([usize; 3]),
    /// With the seconds that a temporal patch takes.
    Video([usize; 3], f64),
    /// Frames.
    Audio(usize),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPart {
    text: Option<usize>,
    image: Option<[usize; 3]>,
    video: Option<[usize; 3]>,
    seconds_per_grid: Option<f64>,
    audio: Option<usize>,
}

impl TryFrom<RawPart> for PromptPart {
    type Error = &'static str;

    fn try_from(raw: RawPart) -> Result<Self, Self::Error> {
        match (
            raw.text,
            raw.image,
            raw.video,
            raw.audio,
            raw.seconds_per_grid,
        ) {
            (Some(tokens), None, None, None, None) => Ok(Self::Text(tokens)),
            (None, Some(grid), None, None, None) => Ok(Self::Image(grid)),
            (None, None, Some(grid), None, seconds) => {
                Ok(Self::Video(grid, seconds.unwrap_or(1.0)))
            }
            (None, None, None, Some(frames), None) => Ok(Self::Audio(frames)),
            _ => Err("expected one of text, image, video (with seconds_per_grid) and audio"),
        }
    }
}

impl PromptPart {
    fn parse(text: &str) -> Option<Self> {
        let (kind, what) = text.split_once(':')?;
        let grid = |what: &str| {
            let sizes: Vec<usize> = what
                .split('x')
                .map(|n| n.parse().ok())
                .collect::<Option<_>>()?;
            match sizes[..] {
                [height, width] => Some([1, height, width]),
                [frames, height, width] => Some([frames, height, width]),
                _ => None,
            }
        };
        match kind {
            "text" => Some(Self::Text(what.parse().ok()?)),
            "audio" => Some(Self::Audio(what.parse().ok()?)),
            "image" => Some(Self::Image(grid(what)?)),
            "video" => {
                let (sizes, seconds) = what.split_once('@').unwrap_or((what, "1"));
                Some(Self::Video(
                    grid(sizes)?,
                    seconds.trim_end_matches('s').parse().ok()?,
                ))
            }
            _ => None,
        }
    }
}

impl PromptDescription {
    /// Reads parts, such as `text:7`, or one file of JSON.
    ///
    /// # Errors
    /// A message, if an argument is no part, or the file cannot be read or describes no prompt.
    pub fn read(arguments: &[String]) -> Result<Self, String> {
        let parsed: Vec<Option<PromptPart>> = arguments
            .iter()
            .map(|argument| PromptPart::parse(argument))
            .collect();
        if let ([path], [None]) = (arguments, &parsed[..])
            && (path.ends_with(".json") || Path::new(path).is_file())
        {
            let text = plain_files::read_text(Path::new(path), plain_files::MAX_TEXT_BYTES)
                .map_err(|error| error.to_string())?;
            return serde_json::from_str(&text)
                .map_err(|error| format!("{path} does not describe a prompt: {error}"));
        }
        let segment = |(parsed, argument): (Option<PromptPart>, &String)| {
            parsed.ok_or_else(|| {
                format!(
                    "{argument:?} is not a segment; expected text:7, image:8x12, video:4x8x8, \
                     video:4x8x8@0.5, audio:25, or one .json file"
                )
            })
        };
        let segments = parsed.into_iter().zip(arguments).map(segment);
        Ok(Self {
            model: None,
            sequences: vec![segments.collect::<Result<_, _>>()?],
        })
    }

    /// The tokens that a family's processor would make, with `timestamp_tokens` of text before each
    /// frame of a video in a family with a block per frame.
    ///
    /// # Errors
    /// A message, if a grid does not divide into merged patches, or there are no or too many tokens.
    pub fn lay_out(
        &self,
        rules: &PositionRules,
        timestamp_tokens: usize,
    ) -> Result<ExpandedPrompt, String> {
        let mut prompt = ExpandedPrompt {
            cu_seqlens: vec![0],
            ..ExpandedPrompt::default()
        };
        for sequence in &self.sequences {
            for segment in sequence {
                prompt.add(*segment, rules, timestamp_tokens)?;
            }
            prompt.cu_seqlens.push(prompt.kinds.len());
        }
        if prompt.kinds.is_empty() {
            return Err("the prompt has no tokens".to_owned());
        }
        prompt.input_ids = vec![0; prompt.kinds.len()];
        Ok(prompt)
    }
}

/// The tokens of a prompt.
#[derive(Debug, Default)]
pub struct ExpandedPrompt {
    input_ids: Vec<i64>,
    /// Token types: 0 text, 1 image, 2 video, 3 audio.
    pub kinds: Vec<i64>,
    /// The first token of each sequence, and the number of all tokens.
    pub cu_seqlens: Vec<usize>,
    /// The tokens of each part that has any.
    pub spans: Vec<PartTokens>,
    image_grids: Vec<[usize; 3]>,
    video_grids: Vec<[usize; 3]>,
    seconds_per_grid: Vec<f64>,
}

/// The tokens of one part, including its start and end tokens.
#[derive(Clone, Debug)]
pub struct PartTokens {
    /// The part.
    pub part: PromptPart,
    /// Its tokens.
    pub tokens: Range<usize>,
    /// Merged patches along T, H and W; zeros where there is no grid.
    pub merged: [usize; 3],
    /// From 1, among the segments of its kind.
    index: usize,
}

impl PartTokens {
    /// The kind of the part and its number.
    pub fn name(&self) -> String {
        let kind = match self.part {
            PromptPart::Text(_) => return "text".to_owned(),
            PromptPart::Image(_) => "image",
            PromptPart::Video(..) => "video",
            PromptPart::Audio(_) => "audio",
        };
        format!("{kind} {}", self.index)
    }
}

impl ExpandedPrompt {
    /// The prompt, for the rules of position ids.
    pub fn prompt(&self) -> Prompt<'_> {
        Prompt {
            input_ids: &self.input_ids,
            rows: Rows::Packed(&self.cu_seqlens),
            mm_token_type_ids: Some(&self.kinds),
            image_grids: &self.image_grids,
            video_grids: &self.video_grids,
            seconds_per_grid: Some(&self.seconds_per_grid),
            ..Prompt::default()
        }
    }

    /// The placeholders of a span, or its text.
    pub fn shown(&self, span: &PartTokens) -> Vec<usize> {
        let is_text = matches!(span.part, PromptPart::Text(_));
        let tokens = span.tokens.clone();
        tokens
            .filter(|token| is_text || self.kinds[*token] != 0)
            .collect()
    }

    /// Adds the tokens of a segment.
    ///
    /// # Errors
    /// If its grid does not divide into merged patches, or the prompt would be too long.
    fn add(
        &mut self,
        segment: PromptPart,
        rules: &PositionRules,
        timestamp_tokens: usize,
    ) -> Result<(), String> {
        let start = self.kinds.len();
        let [temporal, height_merge, width_merge] = rules.video_merge();
        let merge = |grid: [usize; 3], temporal: usize| {
            let merge = [temporal, height_merge, width_merge];
            let fits = grid
                .iter()
                .zip(merge)
                .all(|(n, by)| *n > 0 && n.is_multiple_of(by));
            if fits {
                Ok([grid[0] / merge[0], grid[1] / merge[1], grid[2] / merge[2]])
            } else {
                Err(format!(
                    "grid {grid:?} is empty or does not divide into merged patches of {merge:?} \
                     (T, H, W)"
                ))
            }
        };
        let mut merged = [0; 3];
        match segment {
            PromptPart::Text(tokens) => self.push(0, tokens)?,
            PromptPart::Audio(frames) => self.between_markers(3, &[frames])?,
            PromptPart::Image(grid) => {
                merged = merge(grid, 1)?;
                self.image_grids.push(grid);
                self.between_markers(1, &merged)?;
            }
            PromptPart::Video(grid, seconds) => {
                merged = merge(grid, temporal)?;
                self.video_grids.push(grid);
                self.seconds_per_grid.push(seconds);
                if rules.block_per_frame() {
                    for _ in 0..merged[0] {
                        self.push(0, timestamp_tokens)?;
                        self.between_markers(2, &merged[1..])?;
                    }
                } else {
                    self.between_markers(2, &merged)?;
                }
            }
        }
        let same_kind = |span: &&PartTokens| {
            std::mem::discriminant(&span.part) == std::mem::discriminant(&segment)
        };
        if self.kinds.len() > start {
            self.spans.push(PartTokens {
                part: segment,
                tokens: start..self.kinds.len(),
                merged,
                index: self.spans.iter().filter(same_kind).count() + 1,
            });
        }
        Ok(())
    }

    fn push(&mut self, kind: i64, tokens: usize) -> Result<(), String> {
        let total = self.kinds.len().saturating_add(tokens);
        if total > MAX_TOKENS {
            return Err(format!(
                "the prompt is too long: expected at most {MAX_TOKENS} tokens, found {total} or \
                 more"
            ));
        }
        self.kinds.resize(total, kind);
        Ok(())
    }

    /// Adds a grid of tokens between a start and an end token.
    fn between_markers(&mut self, kind: i64, grid: &[usize]) -> Result<(), String> {
        self.push(0, 1)?;
        self.push(
            kind,
            grid.iter().fold(1, |tokens, n| tokens.saturating_mul(*n)),
        )?;
        self.push(0, 1)
    }
}

/// Writes an id to four decimals, as PyTorch prints it.
pub fn id_text(id: f64) -> String {
    ((id * 1e4).round() / 1e4).to_string()
}

/// Writes the range of some tokens' ids on one axis.
pub fn id_range(ids: &[f64]) -> String {
    let low = ids.iter().copied().reduce(f64::min);
    let high = ids.iter().copied().reduce(f64::max);
    match (low, high) {
        (Some(low), Some(high)) if low == high => id_text(low),
        (Some(low), Some(high)) => format!("{}..{}", id_text(low), id_text(high)),
        _ => "-".to_owned(),
    }
}

/// A prompt with its position ids, for a program that reads them.
#[derive(Debug, Serialize)]
pub struct PromptReport<'a> {
    model: &'a str,
    position_ids: [Vec<Number>; 3],
    kinds: &'a [i64],
    cu_seqlens: &'a [usize],
    rope_deltas: Vec<Number>,
    departures: Vec<String>,
    parts: Vec<PartReport>,
}

#[derive(Debug, Serialize)]
struct PartReport {
    name: String,
    start: usize,
    end: usize,
    merged_grid: [usize; 3],
}

impl<'a> PromptReport<'a> {
    /// The report on a prompt of a model type.
    pub fn new(model: &'a str, prompt: &'a ExpandedPrompt, found: &PositionIds) -> Self {
        let part = |span: &PartTokens| PartReport {
            name: span.name(),
            start: span.tokens.start,
            end: span.tokens.end,
            merged_grid: span.merged,
        };
        let departures = found.divergences().iter();
        Self {
            model,
            position_ids: [0, 1, 2].map(|axis| numbers(found.axis(axis))),
            kinds: &prompt.kinds,
            cu_seqlens: &prompt.cu_seqlens,
            rope_deltas: numbers(found.rope_deltas()),
            departures: departures.map(ToString::to_string).collect(),
            parts: prompt.spans.iter().map(part).collect(),
        }
    }
}

/// Whole ids as whole numbers, which JSON tells from `6.0`.
fn numbers(ids: &[f64]) -> Vec<Number> {
    let number = |id: &f64| match Number::from_f64(*id) {
        Some(fraction) if id.fract() != 0.0 => fraction,
        _ => Number::from(*id as i64),
    };
    ids.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use rope_core::position_ids::TokenIds;

    use super::*;

    fn prompt(model: &str, segments: &[&str]) -> ExpandedPrompt {
        let rules = PositionRules::new(model, TokenIds::new(-1, -1)).expect("family is known");
        let segments: Vec<String> = segments.iter().map(|s| s.to_string()).collect();
        let description = PromptDescription::read(&segments).expect("segments parse");
        description.lay_out(&rules, 3).expect("grids divide")
    }

    #[test]
    fn a_video_is_one_block_or_a_block_per_frame() {
        let one = prompt("qwen2_vl", &["text:2", "video:2x4x4"]);
        assert_eq!(one.kinds, [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 0]);
        let framewise = prompt("qwen3_vl", &["video:2x2x2"]);
        assert_eq!(framewise.kinds, [0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 0]);
        let merged = prompt("ernie4_5_vl_moe", &["video:2x4x4"]);
        assert_eq!(merged.spans[0].merged, [1, 2, 2]);
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        for wrong in [
            "text",
            "image:8",
            "image:8xtwo",
            "video:2x4x4@fast",
            "smell:3",
        ] {
            let error = PromptDescription::read(&[wrong.to_owned()]).expect_err(wrong);
            assert!(error.contains(wrong), "{error}");
        }
        for huge in [
            "text:99999999999",
            "image:4294967296x4294967296",
            "audio:16777216",
        ] {
            let rules = PositionRules::new("qwen2_vl", TokenIds::new(-1, -1)).expect("known");
            let description = PromptDescription::read(&[huge.to_owned()]).expect("a segment");
            let error = description.lay_out(&rules, 6).expect_err(huge);
            assert!(error.contains("at most 16777216 tokens"), "{error}");
        }
        let both = r#"{"sequences": [[{"text": 1, "image": [1, 2, 2]}]]}"#;
        assert!(serde_json::from_str::<PromptDescription>(both).is_err());
    }
}
