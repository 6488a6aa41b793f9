//! Converts a prompt to tensors.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, MaskRules, Sequences};
use rope_burn::RotaryAngles;
use rope_core::position_ids::{PositionIds, Prompt, Rows};

use crate::decoder::Deepstack;
use crate::delta::Recurrence;
use crate::error::{Result, VlmError};
use crate::layers::Common;
use crate::model::Vlm;
use crate::random::Draws;
use crate::vision::VisionInputs;

/// The input of a step.
///
/// # Shapes
/// patches `[patches, colours * frames * rows * columns]`, in the order of the Hugging Face image
/// processor: images in reading order over all rows, and within an image the patches of one merged
/// token next to each other
#[derive(Clone, Debug, Default)]
pub struct Inputs<'a> {
    /// Tokens, grids, masks; rows of a batch or packed sequences.
    pub prompt: Prompt<'a>,
    /// Patches of the images, if any.
    pub image_patches: Option<Tensor<2>>,
    /// Patches of the videos, if any.
    pub video_patches: Option<Tensor<2>>,
}

/// A step's tokens with the data that all layers share: position ids, angles, masks. [`Vlm::batch`]
/// computes it once per step.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) input_ids: Tensor<2, Int>,
    pub(crate) angles: RotaryAngles,
    pub(crate) attention: Attention,
    recurrence: Option<Recurrence>,
    pub(crate) vision: Option<VisionBatch>,
    pub(crate) attended: Vec<bool>,
    pub(crate) sequences: Vec<Range<usize>>,
    pub(crate) packed: bool,
    position_ids: PositionIds,
}

/// Patches and their placeholder tokens.
#[derive(Clone, Debug)]
pub(crate) struct VisionBatch {
    pub(crate) inputs: VisionInputs,
    /// The token of each merged patch, in the order of the tower's blocks.
    pub(crate) order: Vec<usize>,
    /// Patches that are merged into one.
    pub(crate) group: u64,
    /// Indices of the placeholders among the flat tokens, in the order of the merged patches.
    pub(crate) placeholders: Tensor<1, Int>,
    /// For every flat token, its row in the concatenation of word embeddings and merged patches.
    pub(crate) sources: Tensor<1, Int>,
}

impl Batch {
    /// The position ids of the tokens, with their divergences from the rule.
    pub fn position_ids(&self) -> &PositionIds {
        &self.position_ids
    }

    /// The inputs that all layers of the decoder share.
    pub(crate) fn common<'a>(&'a self, draws: Option<&'a Draws>) -> Common<'a> {
        Common {
            angles: &self.angles,
            attention: &self.attention,
            recurrence: self.recurrence.as_ref(),
            draw: draws.map(|draws| &draws.tokens[..]),
        }
    }

    /// Features with the tokens that they are added to.
    pub(crate) fn deepstack(&self, features: Vec<Tensor<2>>) -> Option<Deepstack<'_>> {
        let vision = self.vision.as_ref()?;
        Some(Deepstack {
            placeholders: &vision.placeholders,
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

impl Vlm {
    /// Converts the input of a step to tensors on this model's device.
    ///
    /// # Errors
    /// [`VlmError::NoTokens`], [`VlmError::Token`], [`VlmError::Patches`],
    /// [`VlmError::Placeholders`]; [`VlmError::Rope`] if tokens, grids, masks and lengths are
    /// inconsistent.
    pub fn batch(&self, inputs: &Inputs) -> Result<Batch> {
        let device = self.device();
        let prompt = &inputs.prompt;
        let position_ids = self.position_rules.position_ids(prompt)?;
        let tokens = prompt.input_ids.len();
        if tokens == 0 {
            return Err(VlmError::NoTokens);
        }
        self.expect_tokens(prompt.input_ids.iter().copied().enumerate())?;
        let sequences = sequences(prompt);
        let rows = match prompt.rows {
            Rows::Batch(rows) => rows,
            Rows::Packed(_) => 1,
        };
        let attended = match prompt.attention_mask {
            Some(mask) => mask.to_vec(),
            None => vec![true; tokens],
        };
        // A token attends to itself and to those before it in its sequence, except padding.
        let seq = tokens / rows;
        let rules = MaskRules {
            causal: true,
            cu_seqlens: match prompt.rows {
                Rows::Packed(cu_seqlens) => Some(cu_seqlens),
                Rows::Batch(_) => None,
            },
            attended: Some(&attended),
            ..Default::default()
        };
        let recurrence = match self.language_model.taps {
            Some(taps) => {
                let sequences = match rules.cu_seqlens {
                    Some(cu_seqlens) => Sequences::packed(cu_seqlens, seq)?,
                    None => Sequences::whole(seq),
                };
                Some(Recurrence::new(sequences, &attended, taps, &device))
            }
            None => None,
        };
        Ok(Batch {
            recurrence,
            input_ids: ints(prompt.input_ids.iter().copied(), &device).reshape([rows, seq]),
            angles: self
                .language_model
                .angles(&position_ids.positions()?, &device)?,
            attention: Attention::new(AttentionMask::new(&rules, rows, seq, seq)?),
            vision: self.vision_batch(inputs, &device)?,
            attended,
            sequences,
            packed: matches!(prompt.rows, Rows::Packed(_)),
            position_ids,
        })
    }

    /// Rejects ids beyond the vocabulary; each comes with the index of its token.
    pub(crate) fn expect_tokens(&self, ids: impl Iterator<Item = (usize, i64)>) -> Result<()> {
        let vocabulary = 0..self.vocab_size as i64;
        let mut ids = ids;
        match ids.find(|(_, id)| !vocabulary.contains(id)) {
            None => Ok(()),
            Some((token, found)) => Err(VlmError::Token {
                token,
                found,
                vocab_size: self.vocab_size,
            }),
        }
    }

    fn vision_batch(&self, inputs: &Inputs, device: &Device) -> Result<Option<VisionBatch>> {
        let prompt = &inputs.prompt;
        let (images, videos) = (&inputs.image_patches, &inputs.video_patches);
        let kinds = [
            ("image", prompt.image_grids, images),
            ("video", prompt.video_grids, videos),
        ];
        let video_tokens = self.position_rules.video_tokens(prompt)?;
        let (mut patches, mut grids, mut placeholders) = (Vec::new(), Vec::new(), Vec::new());
        for (kind, its_grids, its_patches) in kinds {
            let sizes = its_grids.iter().map(|grid| grid.iter().product::<usize>());
            let count: usize = sizes.sum();
            let expected = [count, self.patch_elems];
            let found = its_patches
                .as_ref()
                .map_or([0, self.patch_elems], |x| x.dims());
            if found != expected {
                return Err(VlmError::Patches {
                    kind,
                    grids: its_grids.to_vec(),
                    expected,
                    found,
                });
            }
            let before = placeholders.len();
            let is_kind = |(index, id): (usize, &i64)| {
                let is_placeholder = [self.image_token, self.video_token].contains(id);
                (is_placeholder && video_tokens[index] == (kind == "video")).then_some(index)
            };
            placeholders.extend(prompt.input_ids.iter().enumerate().filter_map(is_kind));
            let (expected, found) = (count / self.merged_patches, placeholders.len() - before);
            if expected != found {
                return Err(VlmError::Placeholders {
                    kind,
                    grids: its_grids.to_vec(),
                    expected,
                    found,
                });
            }
            patches.extend(its_patches.clone());
            grids.extend_from_slice(its_grids);
        }
        if placeholders.is_empty() {
            return Ok(None);
        }
        let tokens = prompt.input_ids.len();
        let mut sources: Vec<i64> = (0..tokens as i64).collect();
        for (merged, token) in placeholders.iter().enumerate() {
            sources[*token] = (tokens + merged) as i64;
        }
        let patches = Tensor::cat(patches, 0).to_device(device).cast(self.dtype());
        let inputs = self.visual.inputs(patches, &grids)?;
        Ok(Some(VisionBatch {
            order: inputs.in_order(&placeholders),
            group: self.merged_patches as u64,
            inputs,
            placeholders: indices(placeholders, device),
            sources: ints(sources.into_iter(), device),
        }))
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

pub(crate) fn ints(values: impl Iterator<Item = i64>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = values.collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

pub(crate) fn indices(values: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    ints(values.into_iter().map(|value| value as i64), device)
}
