//! Prompts, and the pass over them that assigns position ids.

use std::ops::Range;

use super::audio_video::AudioVideo;
use super::error::{Kind, PositionIdsError};
use super::rules::{Compatibility, Divergence, PositionRules};
use super::split::reserved;
use crate::error::{Result, RopeError};
use crate::positions::{MAX_POSITION, Positions};

/// Time, height and width.
pub(super) const AXES: usize = 3;
/// The highest id that a rotation accepts.
const MAX_ID: f64 = MAX_POSITION as f64;
/// The limit on empty rows, since 0 tokens divide into any number of rows.
const MOST_EMPTY_ROWS: usize = 1 << 20;
/// One position: its id on each axis.
pub(super) type Ids = [f64; AXES];

/// The arithmetic of ids: exact, or f32 where a version of transformers keeps fractions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) in_f32: bool,
}

impl Sums {
    pub(super) fn add(self, a: f64, b: f64) -> f64 {
        let sum = a + b;
        if self.in_f32 {
            f64::from(sum as f32)
        } else {
            sum
        }
    }

    /// `start` and the ids after it, one for each of `tokens`.
    pub(super) fn run(self, start: f64, tokens: &[usize]) -> impl Iterator<Item = (usize, f64)> {
        let offsets = (0..).map(f64::from);
        let ids = offsets.map(move |offset| self.add(start, offset));
        tokens.iter().copied().zip(ids)
    }
}

/// The division of the tokens into sequences. Positions start at 0 in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows<'a> {
    /// A number of rows of equal length.
    Batch(usize),
    /// One buffer; sequence i is `cu_seqlens[i]..cu_seqlens[i + 1]`.
    Packed(&'a [usize]),
}

/// The parts of a prompt that determine its position ids.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids, row after row.
    pub input_ids: &'a [i64],
    /// The division into sequences.
    pub rows: Rows<'a>,
    /// True for tokens, false for padding; without it, no token is padding.
    pub attention_mask: Option<&'a [bool]>,
    /// Modality of each token: 0 text, 1 image, 2 video, 3 audio. If absent, it is derived from the
    /// token ids. Required if videos use the placeholder of images: GLM prompts without a video
    /// start token, and ERNIE's own configuration (`im_patch_id`).
    pub mm_token_type_ids: Option<&'a [i64]>,
    /// T, H and W of each image in patches, before the merge, in reading order over all rows.
    pub image_grids: &'a [[usize; 3]],
    /// T, H and W of each video in patches, before the merge, in reading order over all rows.
    pub video_grids: &'a [[usize; 3]],
    /// Seconds per temporal patch of each video; 1 if absent. Families without absolute time ignore
    /// it.
    pub seconds_per_grid: Option<&'a [f64]>,
}

impl Default for Prompt<'_> {
    fn default() -> Self {
        Self {
            input_ids: &[],
            rows: Rows::Batch(1),
            attention_mask: None,
            mm_token_type_ids: None,
            image_grids: &[],
            video_grids: &[],
            seconds_per_grid: None,
        }
    }
}

/// Position ids of a prompt: T, H and W for each token. They are whole numbers, except with a
/// [`Compatibility`] that has [`Divergence::Fractions`].
#[derive(Clone, Debug, PartialEq)]
pub struct PositionIds {
    /// The axes of the rotation: one if the model sees nothing.
    axes: usize,
    ids: Vec<f64>,
    next: Vec<f64>,
    rope_deltas: Vec<f64>,
    divergences: Vec<Divergence>,
}

impl PositionIds {
    /// The number of tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.ids.len() / AXES
    }

    /// The ids of one axis (0 time, 1 height, 2 width), row after row.
    ///
    /// # Panics
    /// If `axis` is not below 3.
    pub fn axis(&self, axis: usize) -> &[f64] {
        let tokens = self.tokens();
        &self.ids[axis * tokens..(axis + 1) * tokens]
    }

    /// For each row, the first id after it minus its number of tokens, without padding
    /// (transformers 4.57 counts padding). A decoder adds this delta to a token's index to get its
    /// id.
    pub fn rope_deltas(&self) -> &[f64] {
        &self.rope_deltas
    }

    /// Computes the ids of the `count` tokens that follow the prompt in row `row`, equal on all
    /// axes.
    ///
    /// # Errors
    /// [`PositionIdsError::Index`] if there is no such row;
    /// [`RopeError::PositionOutOfRange`](crate::RopeError::PositionOutOfRange) beyond 2^31.
    pub fn continuation(&self, row: usize, count: usize) -> Result<Positions> {
        let index = PositionIdsError::Index {
            what: "row",
            found: row,
            count: self.next.len(),
        };
        let next = self.next.get(row).ok_or(index)?;
        let last_token = count.saturating_sub(1);
        let last = next + last_token as f64;
        if count > 0 && last > MAX_ID {
            return Err(RopeError::PositionOutOfRange {
                found: last as i64,
                axis: 0,
                token: last_token,
            });
        }
        let mut ids = reserved("position ids", self.axes.saturating_mul(count))?;
        ids.extend((0..self.axes).flat_map(|_| (0..count).map(|offset| next + offset as f64)));
        checked(self.axes, &ids)
    }

    /// The differences of these ids from the rule: empty unless a [`Compatibility`] was selected
    /// and changes the ids of this prompt.
    pub fn divergences(&self) -> &[Divergence] {
        &self.divergences
    }

    /// Returns all ids as [`Positions`] for the rotation: of one axis for a model of text alone, of
    /// three for others.
    ///
    /// # Errors
    /// [`RopeError::PositionOutOfRange`](crate::RopeError::PositionOutOfRange) beyond 2^31.
    pub fn positions(&self) -> Result<Positions> {
        checked(self.axes, &self.ids[..self.axes * self.tokens()])
    }

    /// Returns the ids of the tokens at `indices`, such as the shard of a context-parallel rank.
    ///
    /// # Errors
    /// [`PositionIdsError::Index`] if a token does not exist; those of
    /// [`positions`](Self::positions).
    pub fn select(&self, indices: &[usize]) -> Result<Positions> {
        let count = self.tokens();
        if let Some(found) = indices.iter().find(|index| **index >= count) {
            return Err(PositionIdsError::Index {
                what: "token",
                found: *found,
                count,
            }
            .into());
        }
        let axis_ids = |axis| indices.iter().map(move |index| self.axis(axis)[*index]);
        let ids: Vec<f64> = (0..self.axes).flat_map(axis_ids).collect();
        checked(self.axes, &ids)
    }
}

/// Converts whole numbers to ids, so that errors refer to ids, and others to real positions.
fn checked(axes: usize, ids: &[f64]) -> Result<Positions> {
    if ids.iter().any(|id| id.fract() != 0.0) {
        return Positions::real(axes, ids);
    }
    let whole: Vec<i64> = ids.iter().map(|id| *id as i64).collect();
    Positions::new(axes, &whole)
}

impl PositionRules {
    /// Computes the position ids of a prompt. Padding gets 0.
    ///
    /// # Shapes
    /// all per-token lists: `[rows, tokens]`, flat; grids: one per image and video
    /// # Units
    /// grids in patches before the merge; time in seconds
    /// # Errors
    /// [`PositionIdsError`] if tokens, grids, masks and lengths are inconsistent, or if the seconds
    /// of one video put its ids beyond 2^31; [`RopeError::PositionOutOfRange`] if several videos
    /// together do.
    pub fn position_ids(&self, prompt: &Prompt) -> Result<PositionIds> {
        let tokens = prompt.input_ids.len();
        let videos = prompt.video_grids.len();
        let mask = prompt.attention_mask.map(<[_]>::len);
        let types = prompt.mm_token_type_ids.map(<[_]>::len);
        let seconds = prompt.seconds_per_grid.map(<[_]>::len);
        check_length("attention_mask", "token", tokens, mask)?;
        check_length("mm_token_type_ids", "token", tokens, types)?;
        check_length("seconds_per_grid", "video", videos, seconds)?;

        let kinds = self.kinds(prompt)?;
        let padding = match self.compatibility {
            Compatibility::Transformers4_57 => 1.0,
            Compatibility::Exact | Compatibility::Transformers5_23 => 0.0,
        };
        let audio = self.family.audio_in_video;
        let keeps_fractions = self.compatibility != Compatibility::Exact
            && audio.is_some_and(|audio| audio.fractional);
        let sums = Sums {
            in_f32: keeps_fractions,
        };
        let mut walk = Walk {
            rules: self,
            prompt,
            kinds: &kinds,
            sums,
            images: 0,
            videos: 0,
            frame: 0,
            ids: vec![padding; AXES * tokens],
            divergences: Vec::new(),
        };
        let mut next = Vec::new();
        let mut rope_deltas = Vec::new();
        for (row, range) in row_ranges(prompt.rows, tokens)?.into_iter().enumerate() {
            let len = range.len();
            let (attended, divergence) = self.numbered(prompt, range);
            walk.divergences.extend(divergence);
            let first_free = walk.row(row, &attended)?;
            let subtracted = match self.compatibility {
                Compatibility::Transformers4_57 if self.family.audio_in_video.is_none() => len,
                _ => attended.len(),
            };
            if subtracted != attended.len() {
                walk.divergences.push(Divergence::PaddedDelta);
            }
            next.push(first_free);
            rope_deltas.push(sums.add(first_free, -(subtracted as f64)));
        }
        let grids = [
            (Kind::Image, prompt.image_grids.len(), walk.images),
            (Kind::Video, videos, walk.videos),
        ];
        for (kind, given, used) in grids {
            if given != used {
                return Err(PositionIdsError::UnusedGrid {
                    kind: kind.name(),
                    given,
                    used,
                }
                .into());
            }
        }
        if let Some(at) = walk.ids.iter().position(|id| *id > MAX_ID) {
            return Err(RopeError::PositionOutOfRange {
                found: walk.ids[at] as i64,
                axis: at / tokens,
                token: at % tokens,
            });
        }
        walk.divergences.sort_unstable();
        walk.divergences.dedup();
        Ok(PositionIds {
            axes: if self.family.text_alone { 1 } else { AXES },
            ids: walk.ids,
            next,
            rope_deltas,
            divergences: walk.divergences,
        })
    }

    /// The tokens of a row that take ids: all but padding, unless a version numbers it.
    fn numbered(&self, prompt: &Prompt, row: Range<usize>) -> (Vec<usize>, Option<Divergence>) {
        let attended = |token: &usize| prompt.attention_mask.is_none_or(|mask| mask[*token]);
        if self.family.text_alone && self.compatibility != Compatibility::Exact {
            let has_padding = !row.clone().all(|token| attended(&token));
            let divergence = has_padding.then_some(Divergence::NumberedPadding);
            return (row.collect(), divergence);
        }
        (row.filter(attended).collect(), None)
    }

    /// Returns true for each placeholder of a video. It is recognised by the modalities, else by
    /// its id, and, if videos use the placeholder of images, by the surrounding tokens.
    ///
    /// # Errors
    /// [`PositionIdsError::TokenType`]
    pub fn video_tokens(&self, prompt: &Prompt) -> Result<Vec<bool>> {
        let kinds = self.kinds(prompt)?.into_iter();
        Ok(kinds.map(|kind| kind == Kind::Video).collect())
    }

    /// The modality of each token.
    fn kinds(&self, prompt: &Prompt) -> Result<Vec<Kind>, PositionIdsError> {
        if self.family.text_alone {
            return Ok(vec![Kind::Text; prompt.input_ids.len()]);
        }
        if let Some(types) = prompt.mm_token_type_ids {
            let kind = |(token, &found): (usize, &i64)| match found {
                0 => Ok(Kind::Text),
                1 => Ok(Kind::Image),
                2 => Ok(Kind::Video),
                3 => Ok(Kind::Audio),
                _ => Err(PositionIdsError::TokenType { found, token }),
            };
            return types.iter().enumerate().map(kind).collect();
        }
        let mut in_video = false;
        let kind = |id: &i64| {
            let id = Some(*id);
            in_video = (in_video || id == self.tokens.video_start) && id != self.tokens.video_end;
            if id == Some(self.tokens.image) {
                if in_video { Kind::Video } else { Kind::Image }
            } else if id == Some(self.tokens.video) {
                Kind::Video
            } else if id == self.tokens.audio {
                Kind::Audio
            } else {
                Kind::Text
            }
        };
        Ok(prompt.input_ids.iter().map(kind).collect())
    }
}

fn check_length(
    what: &'static str,
    per: &'static str,
    expected: usize,
    found: Option<usize>,
) -> Result<(), PositionIdsError> {
    match found {
        Some(found) if found != expected => Err(PositionIdsError::Length {
            what,
            per,
            expected,
            found,
        }),
        _ => Ok(()),
    }
}

fn row_ranges(rows: Rows, tokens: usize) -> Result<Vec<std::ops::Range<usize>>, PositionIdsError> {
    match rows {
        Rows::Batch(rows) => {
            let divides = rows > 0 && tokens.is_multiple_of(rows);
            if !divides || rows > tokens.max(MOST_EMPTY_ROWS) {
                return Err(PositionIdsError::Batch { tokens, rows });
            }
            let len = tokens / rows;
            Ok((0..rows).map(|row| row * len..(row + 1) * len).collect())
        }
        Rows::Packed(cu_seqlens) => super::split::sequences(cu_seqlens, tokens),
    }
}

/// A block of vision tokens: its start and its extent on each axis.
pub(super) struct Block {
    pub(super) grid: [usize; 3],
    /// Merged patches along T, H and W.
    pub(super) merged: [usize; 3],
    /// Id of each temporal patch, counted from the start of the block.
    pub(super) time: Vec<f32>,
}

impl Block {
    pub(super) fn tokens(&self) -> usize {
        // A grid that overflows also exceeds the tokens of any prompt and is rejected for that.
        self.merged
            .iter()
            .fold(1, |tokens: usize, size| tokens.saturating_mul(*size))
    }

    /// The position of the block's `token`-th token.
    pub(super) fn ids(&self, start: f64, token: usize, sums: Sums) -> Ids {
        let [_, height, width] = self.merged;
        let frame = token / (height * width);
        let (row, column) = (token / width % height, token % width);
        let after_start = [f64::from(self.time[frame]), row as f64, column as f64];
        after_start.map(|id| sums.add(start, id))
    }
}

/// The state of the pass: the inputs consumed and the ids assigned.
pub(super) struct Walk<'a> {
    pub(super) rules: &'a PositionRules,
    prompt: &'a Prompt<'a>,
    pub(super) kinds: &'a [Kind],
    pub(super) sums: Sums,
    images: usize,
    videos: usize,
    /// Frames of the current video with assigned ids, if each frame is a separate block.
    frame: usize,
    ids: Vec<f64>,
    pub(super) divergences: Vec<Divergence>,
}

impl Walk<'_> {
    /// Assigns the ids of one row's tokens and returns the first id that is free on every axis.
    fn row(&mut self, row: usize, tokens: &[usize]) -> Result<f64> {
        let sums = self.sums;
        let mut next = 0.0;
        let mut first_free: f64 = 0.0;
        let mut at = 0;
        while at < tokens.len() {
            if let Some(audio) = self.opens_audio_in_video(&tokens[at..]) {
                let span = AudioVideo {
                    walk: self,
                    audio,
                    row,
                    at,
                    tokens: &tokens[at..],
                };
                let placed = span.place(next)?;
                (at, next) = (at + placed.tokens, placed.next);
                first_free = first_free.max(placed.first_free);
                continue;
            }
            match self.kinds[tokens[at]] {
                kind @ (Kind::Text | Kind::Audio) => {
                    let run = self.run(kind, tokens, at);
                    let (start, mut last) = (next, next);
                    for (token, id) in sums.run(start, run) {
                        self.place(token, [id; AXES]);
                        last = id;
                    }
                    at += run.len();
                    next = sums.add(last, 1.0);
                    first_free = first_free.max(next);
                    if self.opens_audio_in_video(&tokens[at..]).is_some() {
                        next = sums.add(start, run.len() as f64);
                    }
                }
                kind @ (Kind::Image | Kind::Video) => {
                    let block = self.block(kind, row, at)?;
                    let run = tokens[at..].iter().take(block.tokens());
                    let run = run.take_while(|token| self.kinds[**token] == kind).count();
                    if run != block.tokens() {
                        return Err(self.grid_tokens(kind, row, at, &block, run).into());
                    }
                    let mut highest = next;
                    for (index, token) in tokens[at..at + run].iter().enumerate() {
                        let ids = block.ids(next, index, sums);
                        highest = ids.into_iter().fold(highest, f64::max);
                        self.place(*token, ids);
                    }
                    let past_all = sums.add(highest, 1.0);
                    first_free = first_free.max(past_all);
                    let plane = block.merged[1].max(block.merged[2]) as f64;
                    next = self.after_block(sums.add(next, plane), past_all);
                    at += run;
                }
            }
        }
        Ok(first_free)
    }

    /// The next id after a block: past all of it, or past its plane only, under a compatibility.
    fn after_block(&mut self, past_plane: f64, past_all: f64) -> f64 {
        let forgets = self.rules.compatibility == Compatibility::Transformers5_23
            && self.rules.family.forgets_time
            && past_plane != past_all;
        if forgets {
            self.divergences.push(Divergence::TimeForgotten);
            past_plane
        } else {
            past_all
        }
    }

    pub(super) fn place(&mut self, token: usize, ids: Ids) {
        let tokens = self.prompt.input_ids.len();
        for (axis, id) in ids.into_iter().enumerate() {
            self.ids[axis * tokens + token] = id;
        }
    }

    /// The tokens of `kind` from `at` on that transformers numbers together: the end token after a
    /// block is numbered alone. This matters where sums are rounded.
    fn run<'t>(&self, kind: Kind, tokens: &'t [usize], at: usize) -> &'t [usize] {
        let kind_of = |index: usize| Some(self.kinds[*tokens.get(index)?]);
        let opens = |index: usize| self.opens_audio_in_video(&tokens[index..]).is_some();
        let mut end = at + 1;
        let ends_block = kind == Kind::Text && at > 0 && kind_of(at - 1) != Some(kind);
        while !ends_block && kind_of(end) == Some(kind) && !opens(end) {
            end += 1;
        }
        &tokens[at..end]
    }

    fn opens_audio_in_video(&self, tokens: &[usize]) -> Option<super::rules::AudioInVideo> {
        let audio = self.rules.family.audio_in_video?;
        let markers = self.rules.tokens;
        let starts = [markers.vision_start?, markers.audio_start?];
        let found = [*tokens.first()?, *tokens.get(1)?].map(|token| self.prompt.input_ids[token]);
        (starts == found).then_some(audio)
    }

    /// Takes the next block off the grids.
    pub(super) fn block(&mut self, kind: Kind, row: usize, at: usize) -> Result<Block> {
        let (grids, used) = match kind {
            Kind::Video => (self.prompt.video_grids, self.videos),
            _ => (self.prompt.image_grids, self.images),
        };
        let missing = PositionIdsError::MissingGrid {
            kind: kind.name(),
            row,
            token: at,
            given: grids.len(),
        };
        let grid = *grids.get(used).ok_or(missing)?;
        let mut merge = self.rules.video_merge();
        if kind != Kind::Video {
            merge[0] = 1;
        }
        let fits = |(size, merge): (&usize, usize)| *size > 0 && size.is_multiple_of(merge);
        if !grid.iter().zip(merge).all(fits) {
            return Err(PositionIdsError::Grid {
                kind: kind.name(),
                grid,
                merge,
            }
            .into());
        }
        let mut merged = [grid[0] / merge[0], grid[1] / merge[1], grid[2] / merge[2]];
        // The caller counts frames and rejects those without tokens; laying them out here would
        // only take memory.
        let frames = merged[0].min(self.prompt.input_ids.len());
        let time = if kind == Kind::Video && self.rules.family.block_per_frame {
            self.frame = (self.frame + 1) % merged[0];
            self.videos += usize::from(self.frame == 0);
            merged[0] = 1;
            vec![0.0]
        } else if kind == Kind::Video {
            self.videos += 1;
            self.time(used, frames)?
        } else {
            self.images += 1;
            (0..frames).map(|frame| frame as f32).collect()
        };
        Ok(Block { grid, merged, time })
    }

    /// Ids of a video's frames, counted from its start.
    fn time(&mut self, video: usize, frames: usize) -> Result<Vec<f32>> {
        let Some(per_second) = self.rules.ids_per_second else {
            return Ok((0..frames).map(|frame| frame as f32).collect());
        };
        let seconds = self.prompt.seconds_per_grid;
        let stated = seconds.map_or(1.0, |seconds| seconds[video]);
        let refused = |expected| PositionIdsError::Parameter {
            parameter: "seconds_per_grid",
            expected,
            found: stated,
        };
        if !(stated.is_finite() && stated >= 0.0) {
            return Err(refused("a finite number, 0 or more").into());
        }
        // f32 and this order of products, as in the checkpoints' preprocessing: rounding decides
        // whether 10 x 0.7 reaches 7.
        let mut seconds = stated as f32;
        let audio = self.rules.family.audio_in_video;
        if self.rules.compatibility == Compatibility::Transformers4_57
            && audio.is_none()
            && seconds.fract() != 0.0
        {
            self.divergences.push(Divergence::WholeSeconds);
            seconds = seconds.trunc();
        }
        let keeps_fractions = self.sums.in_f32;
        let mut fractions = false;
        let id = |frame: usize| {
            let found = frame as f32 * seconds * per_second as f32;
            fractions |= keeps_fractions && found.fract() != 0.0;
            // Infinite seconds in f32, times frame 0, are NaN.
            if found.is_nan() || found > MAX_POSITION as f32 {
                return Err(refused(
                    "so few that, times ids per second and frames, ids stay within 2147483648",
                )
                .into());
            }
            Ok(if keeps_fractions {
                found
            } else {
                found.trunc()
            })
        };
        let time = (0..frames).map(id).collect();
        self.divergences
            .extend(fractions.then_some(Divergence::Fractions));
        time
    }

    pub(super) fn grid_tokens(
        &self,
        kind: Kind,
        row: usize,
        at: usize,
        block: &Block,
        found: usize,
    ) -> PositionIdsError {
        PositionIdsError::GridTokens {
            kind: kind.name(),
            row,
            token: at,
            grid: block.grid,
            expected: block.tokens(),
            found,
        }
    }
}
