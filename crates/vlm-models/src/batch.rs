//! A prompt as tensors.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use burn_attention::Attention;
use rope_burn::RotaryAngles;
use rope_core::Positions;
use rope_core::position_ids::{PositionIds, Prompt, Rows};

use crate::error::{Result, VlmError};
use crate::random::{Draws, Stream};
use crate::recurrence::Recurrence;
use crate::shares::TokenPart;
use crate::step::{Common, Deepstack};
use crate::vision::VisionInputs;

/// A step's tokens with the data that all layers share: position ids, angles, masks. [`Vlm::batch`](crate::Vlm::batch)
/// computes it once per step.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) input_ids: Tensor<2, Int>,
    pub(crate) angles: RotaryAngles,
    pub(crate) attention: Attention,
    /// Attention of layers with a window, if it hides a token.
    pub(crate) window: Option<Attention>,
    pub(crate) recurrence: Option<Recurrence>,
    pub(crate) vision: Option<VisionBatch>,
    pub(crate) attended: Vec<bool>,
    pub(crate) sequences: Vec<Range<usize>>,
    pub(crate) packed: bool,
    pub(crate) position_ids: PositionIds,
    /// The part of the tokens that this rank has, if ranks divide them. `attended`, `sequences`,
    /// `position_ids` and masks are those of all tokens.
    pub(crate) part: Option<TokenPart>,
}

/// Patches and their placeholder tokens.
#[derive(Clone, Debug)]
pub(crate) struct VisionBatch {
    pub(crate) inputs: VisionInputs,
    /// The first token of each merged patch, among those of all ranks, in the order of the tower's
    /// blocks.
    pub(crate) order: Vec<usize>,
    /// Patches that are merged into one.
    pub(crate) group: u64,
    /// Indices of the placeholders among the flat tokens; unless `merged` is given, in the order of
    /// the merged patches.
    pub(crate) placeholders: Tensor<1, Int>,
    /// The merged patch of each placeholder, if some have several.
    pub(crate) merged: Option<Tensor<1, Int>>,
    /// For every flat token, its row in the concatenation of word embeddings and merged patches.
    pub(crate) sources: Tensor<1, Int>,
}

impl Batch {
    /// The position ids of the tokens, with their divergences from the rule.
    pub fn position_ids(&self) -> &PositionIds {
        &self.position_ids
    }

    /// The indices of this rank's tokens among those of all ranks, and the positions that they are
    /// rotated by, if ranks divide them.
    pub fn own_tokens(&self) -> Option<(&[usize], &Positions)> {
        let part = self.part.as_ref();
        part.map(|part| (&part.own[..], &part.positions))
    }

    /// The inputs that all layers of the decoder share.
    pub(crate) fn common<'a>(&'a self, draws: Option<&'a Draws>) -> Common<'a> {
        let attended = self.own_attended();
        Common {
            angles: &self.angles,
            attention: &self.attention,
            window: self.window.as_ref(),
            recurrence: self.recurrence.as_ref(),
            draw: draws.map(|draws| &draws.tokens[..]),
            attended: (attended.contains(&false) && attended.contains(&true)).then_some(attended),
            part: self.part.as_ref(),
            balance: None,
        }
    }

    /// False for each token of this rank that is padding.
    pub(crate) fn own_attended(&self) -> &[bool] {
        let part = self.part.as_ref();
        part.map_or(&self.attended, |part| &part.attended)
    }

    /// Values of this rank's tokens, from those of all.
    pub(crate) fn own<T: Copy>(&self, values: Vec<T>) -> Vec<T> {
        match &self.part {
            Some(part) => part.own.iter().map(|token| values[*token]).collect(),
            None => values,
        }
    }

    /// True if it has pictures or videos, maybe on other ranks alone.
    pub(crate) fn sees(&self) -> bool {
        let part = self.part.as_ref();
        part.map_or(self.vision.is_some(), |part| part.sees)
    }

    /// Derives the streams of random numbers from each sequence's seed and a token's place in the sequence, so that
    /// they do not depend on other sequences.
    ///
    /// # Errors
    /// [`VlmError::SeedCount`]
    pub(crate) fn draws(&self, seeds: &[u64]) -> Result<Draws> {
        let sequences = &self.sequences;
        if seeds.len() != sequences.len() {
            return Err(VlmError::SeedCount {
                expected: sequences.len(),
                found: seeds.len(),
            });
        }
        let mut tokens = vec![Stream::new(0); self.attended.len()];
        for (range, seed) in sequences.iter().zip(seeds) {
            for (place, token) in range.clone().enumerate() {
                tokens[token] = Stream::new(*seed).part(place as u64);
            }
        }
        let merged: Vec<Stream> = match &self.vision {
            Some(vision) => {
                let order = vision.order.iter();
                order.map(|token| tokens[*token]).collect()
            }
            None => Vec::new(),
        };
        let group = self.vision.as_ref().map_or(0, |vision| vision.group);
        let patches = merged.iter();
        let patches = patches.flat_map(|token| (0..group).map(|patch| token.part(patch)));
        Ok(Draws {
            patches: patches.collect(),
            tokens: self.own(tokens),
            merged,
        })
    }

    /// Features with the tokens that they are added to.
    pub(crate) fn deepstack(&self, features: Vec<Tensor<2>>) -> Option<Deepstack<'_>> {
        let vision = self.vision.as_ref()?;
        Some(Deepstack {
            placeholders: &vision.placeholders,
            merged: vision.merged.as_ref(),
            features,
        })
    }

    /// The index, among the flat tokens, of the last token of each sequence that is not padding.
    ///
    /// # Errors
    /// [`VlmError::NotContinuable`]
    pub(crate) fn last_tokens(&self) -> Result<Vec<usize>> {
        let last = self.sequences.iter().map(|tokens| {
            let last = tokens.clone().rev().find(|token| self.attended[*token]);
            let reason = "a row is all padding";
            last.ok_or(VlmError::NotContinuable { reason })
        });
        last.collect()
    }

    /// Rows and tokens per row; one row if sequences are packed.
    pub fn shape(&self) -> [usize; 2] {
        self.input_ids.dims()
    }
}

/// The tokens of each sequence. Each token must belong to a sequence, as checked by
/// [`PositionRules::position_ids`] or the caller.
///
/// [`PositionRules::position_ids`]: rope_core::position_ids::PositionRules::position_ids
pub(crate) fn sequences(prompt: &Prompt) -> Vec<Range<usize>> {
    match prompt.rows {
        Rows::Batch(rows) => {
            let len = prompt.input_ids.len() / rows.max(1);
            (0..rows).map(|row| row * len..(row + 1) * len).collect()
        }
        Rows::Packed(cu_seqlens) => cu_seqlens.windows(2).map(|pair| pair[0]..pair[1]).collect(),
    }
}

/// The rows of a prompt; one if sequences are packed.
pub(crate) fn rows(prompt: &Prompt) -> usize {
    match prompt.rows {
        Rows::Batch(rows) => rows,
        Rows::Packed(_) => 1,
    }
}
