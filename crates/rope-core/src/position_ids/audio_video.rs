//! Audio in video (TMRoPE): a video and its sound start at the same id and run through time
//! together.

use super::error::Kind;
use super::prompt::{AXES, Block, Ids, Walk};
use super::rules::{AudioInVideo, Compatibility, Divergence};
use crate::error::Result;

/// A span: two start tokens, video and audio placeholders in any order, two end tokens.
pub(super) struct AudioVideo<'w, 'a, 't> {
    pub(super) walk: &'w mut Walk<'a>,
    pub(super) audio: AudioInVideo,
    pub(super) row: usize,
    /// Index of the span's first token in its row.
    pub(super) at: usize,
    /// The tokens of the row from there on.
    pub(super) tokens: &'t [usize],
}

/// What a span took.
pub(super) struct Placed {
    pub(super) tokens: usize,
    pub(super) next: i64,
    pub(super) first_free: i64,
}

impl AudioVideo<'_, '_, '_> {
    pub(super) fn place(mut self, next: i64) -> Result<Placed> {
        let markers = 2.min(self.tokens.len());
        let start = self.markers(&self.tokens[..markers], next);

        let placeholder =
            |token: &&usize| matches!(self.walk.kinds[**token], Kind::Video | Kind::Audio);
        let content = self.tokens[2..].iter().take_while(placeholder).count();
        let content = &self.tokens[2..2 + content];
        let is_video = |token: &usize| self.walk.kinds[*token] == Kind::Video;
        let video_tokens = content.iter().filter(|token| is_video(token)).count();

        let block = self.walk.block(Kind::Video, self.row, self.at)?;
        if video_tokens != block.tokens() {
            let Self { walk, row, at, .. } = self;
            let refused = walk.grid_tokens(Kind::Video, row, at, &block, video_tokens);
            return Err(refused.into());
        }
        let exact: Vec<bool> = content.iter().map(is_video).collect();
        let mut highest = deal(&exact, &block, start)
            .fold(start - 1, |high, ids| ids.into_iter().fold(high, i64::max));
        let mut next = highest + 1;
        let mut order = exact;
        if self.walk.rules.compatibility != Compatibility::Exact {
            let dealt = self.dealt_by_transformers(&block, content.len() - video_tokens);
            if dealt.order != order {
                self.walk.divergences.push(Divergence::AudioVideoOrder);
            }
            let last_piece = deal(&dealt.order, &block, start).skip(dealt.last_piece);
            let last = last_piece.flatten().fold(start - 1, i64::max);
            if last != highest {
                self.walk.divergences.push(Divergence::LastPieceOnly);
            }
            next = last + 1;
            order = dealt.order;
        }
        for (token, ids) in content.iter().zip(deal(&order, &block, start)) {
            self.walk.place(*token, ids);
        }

        let end = 2 + content.len();
        let ends = &self.tokens[end..(end + 2).min(self.tokens.len())];
        next = self.markers(ends, next);
        highest = highest.max(next - 1);
        Ok(Placed {
            tokens: end + ends.len(),
            next,
            first_free: highest + 1,
        })
    }

    /// Places start or end tokens; returns the next id.
    fn markers(&mut self, tokens: &[usize], next: i64) -> i64 {
        let step = i64::from(!self.audio.markers_share);
        for (token, index) in tokens.iter().zip(0..) {
            self.walk.place(*token, [next + step * index; AXES]);
        }
        let most = if self.audio.markers_share {
            1
        } else {
            tokens.len()
        };
        next + tokens.len().min(most) as i64
    }

    /// The order in which transformers deals out the positions, whatever the tokens are.
    fn dealt_by_transformers(&self, block: &Block, audio_tokens: usize) -> Dealt {
        let plane = block.merged[1] * block.merged[2];
        let video: Vec<f32> = (0..block.tokens())
            .map(|token| block.time[token / plane])
            .collect();
        let audio: Vec<f32> = (0..audio_tokens).map(|token| token as f32).collect();
        match self.walk.rules.seconds_per_chunk {
            Some(seconds) => {
                let per_second = self.walk.rules.ids_per_second.unwrap_or(1.0);
                by_chunks(&video, &audio, (per_second * seconds).trunc() as f32)
            }
            None => by_time(&video, &audio),
        }
    }
}

/// For each token in turn, whether it takes a video position, and where the last piece begins.
struct Dealt {
    order: Vec<bool>,
    last_piece: usize,
}

/// Positions for tokens that are video or audio in this order.
fn deal(order: &[bool], block: &Block, start: i64) -> impl Iterator<Item = Ids> {
    let mut used = [0, 0];
    order.iter().map(move |is_video| {
        let used = &mut used[usize::from(*is_video)];
        *used += 1;
        if *is_video {
            block.ids(start, *used - 1)
        } else {
            [start + *used as i64 - 1; AXES]
        }
    })
}

/// Chunk after chunk, video before audio in each (Qwen2.5-Omni).
fn by_chunks(video: &[f32], audio: &[f32], ids_per_chunk: f32) -> Dealt {
    let (video, audio) = (chunks(video, ids_per_chunk), chunks(audio, ids_per_chunk));
    let mut dealt = Dealt {
        order: Vec::new(),
        last_piece: 0,
    };
    for chunk in 0..video.len().max(audio.len()) {
        for (pieces, is_video) in [(&video, true), (&audio, false)] {
            if let Some(len) = pieces.get(chunk) {
                dealt.last_piece = dealt.order.len();
                dealt.order.extend(std::iter::repeat_n(is_video, *len));
            }
        }
    }
    dealt
}

/// Lengths of the chunks: one ends where time reaches the next multiple, and only one at a time.
fn chunks(time: &[f32], ids_per_chunk: f32) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut begin = 0;
    for (token, time) in time.iter().enumerate() {
        if *time >= (lengths.len() + 1) as f32 * ids_per_chunk {
            lengths.push(token - begin);
            begin = token;
        }
    }
    lengths.push(time.len() - begin);
    lengths
}

/// By time, video before audio at the same time (Qwen3-Omni).
fn by_time(video: &[f32], audio: &[f32]) -> Dealt {
    let mut dealt = Dealt {
        order: Vec::new(),
        last_piece: 0,
    };
    let (mut seen, mut heard) = (0, 0);
    while seen < video.len() && heard < audio.len() {
        let is_video = video[seen] <= audio[heard];
        dealt.order.push(is_video);
        if is_video { seen += 1 } else { heard += 1 }
    }
    dealt.last_piece = dealt.order.len();
    dealt
        .order
        .extend(std::iter::repeat_n(true, video.len() - seen));
    dealt
        .order
        .extend(std::iter::repeat_n(false, audio.len() - heard));
    dealt
}
