//! Audio in video (TMRoPE): a video and its sound start at the same id and share the time axis.

use super::error::Kind;
use super::prompt::{AXES, Block, Ids, Sums, Walk};
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

/// The tokens and positions used by a span.
pub(super) struct Placed {
    pub(super) tokens: usize,
    pub(super) next: f64,
    pub(super) first_free: f64,
}

impl AudioVideo<'_, '_, '_> {
    pub(super) fn place(mut self, next: f64) -> Result<Placed> {
        let sums = self.walk.sums;
        let markers = 2.min(self.tokens.len());
        let count = self.markers(&self.tokens[..markers], next);
        let start = sums.add(next, count as f64);

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
        let before = sums.add(start, -1.0);
        let mut highest = deal(&exact, &block, start, sums)
            .flatten()
            .fold(before, f64::max);
        let mut next = sums.add(highest, 1.0);
        let mut order = exact;
        if self.walk.rules.compatibility != Compatibility::Exact {
            let dealt = self.dealt_by_transformers(&block, start, content.len() - video_tokens);
            if dealt.order != order {
                self.walk.divergences.push(Divergence::AudioVideoOrder);
            }
            let last_piece = deal(&dealt.order, &block, start, sums).skip(dealt.last_piece);
            let last = last_piece.flatten().fold(before, f64::max);
            if last != highest {
                self.walk.divergences.push(Divergence::LastPieceOnly);
            }
            next = sums.add(last, 1.0);
            order = dealt.order;
        }
        for (token, ids) in content.iter().zip(deal(&order, &block, start, sums)) {
            self.walk.place(*token, ids);
        }

        let end = 2 + content.len();
        let ends = &self.tokens[end..(end + 2).min(self.tokens.len())];
        let count = self.markers(ends, next);
        let last = sums.add(next, count as f64 - 1.0);
        highest = highest.max(last);
        Ok(Placed {
            tokens: end + ends.len(),
            next: sums.add(last, 1.0),
            first_free: sums.add(highest, 1.0),
        })
    }

    /// Places start or end tokens and returns the number of ids they take.
    fn markers(&mut self, tokens: &[usize], next: f64) -> usize {
        let share = self.audio.markers_share;
        for (token, id) in self.walk.sums.run(next, tokens) {
            self.walk
                .place(token, [if share { next } else { id }; AXES]);
        }
        tokens.len().min(if share { 1 } else { tokens.len() })
    }

    /// The order in which transformers assigns the positions, whatever the tokens are.
    fn dealt_by_transformers(&self, block: &Block, start: f64, audio_tokens: usize) -> Dealt {
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
            None => {
                // Compared as ids, which may be equal in f32 although the times differ.
                let sums = self.walk.sums;
                let ids = |time: &f32| sums.add(start, f64::from(*time));
                let [video, audio] = [video, audio].map(|times| times.iter().map(ids).collect());
                by_time(video, audio)
            }
        }
    }
}

/// For each token, in order, true if it takes a video position; and the start of the last piece.
struct Dealt {
    order: Vec<bool>,
    last_piece: usize,
}

/// Positions for tokens that are video or audio in this order.
fn deal(order: &[bool], block: &Block, start: f64, sums: Sums) -> impl Iterator<Item = Ids> {
    let mut used = [0, 0];
    order.iter().map(move |is_video| {
        let used = &mut used[usize::from(*is_video)];
        *used += 1;
        if *is_video {
            block.ids(start, *used - 1, sums)
        } else {
            [sums.add(start, *used as f64 - 1.0); AXES]
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

/// Lengths of the chunks: each ends where time reaches the next multiple, one chunk at a time.
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
fn by_time(video: Vec<f64>, audio: Vec<f64>) -> Dealt {
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
