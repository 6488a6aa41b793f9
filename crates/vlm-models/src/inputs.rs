//! Converts a prompt to tensors.

use burn::tensor::{Device, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules, Sequences, Window};
use rope_core::position_ids::{Prompt, Rows};

use crate::batch::{Batch, VisionBatch, rows, sequences};
use crate::error::{Result, VlmError};
use crate::model::Vlm;
use crate::recurrence::Recurrence;
use crate::shares::{Queries, TokenPart, TokenShare};
use crate::tensors::{indices, ints};

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
    /// For each grid of images, and of videos, the number of its picture or video, if several grids
    /// show the same one: its patches are then given, and pass the tower, once. New numbers ascend
    /// from 0.
    pub shown: Option<[&'a [usize]; 2]>,
}

impl Vlm {
    /// Converts the input of a step to tensors on this model's device.
    ///
    /// # Errors
    /// [`VlmError::NoTokens`], [`VlmError::Token`], [`VlmError::Patches`],
    /// [`VlmError::Placeholders`]; [`VlmError::Rope`] if tokens, grids, masks and lengths are
    /// inconsistent.
    pub fn batch(&self, inputs: &Inputs) -> Result<Batch> {
        self.batch_of(inputs, None)
    }

    /// As [`batch`](Self::batch), for a rank that has a share of the tokens, and the pictures that
    /// these show. It is for [`backward`](Self::backward) with recomputation, whose walk exchanges
    /// tokens with the ranks of the other shares.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`] if the rows have fewer tokens than shares; those of
    /// [`batch`](Self::batch).
    pub fn batch_part(&self, inputs: &Inputs, share: TokenShare) -> Result<Batch> {
        let seq = inputs.prompt.input_ids.len() / rows(&inputs.prompt).max(1);
        if share.index >= share.count || seq < share.count {
            return Err(VlmError::Unsupported {
                key: "the tokens of a row",
                found: format!("{seq}, for {} ranks", share.count),
                expected: "at least one for each rank that divides them",
            });
        }
        self.batch_of(inputs, Some(share))
    }

    fn batch_of(&self, inputs: &Inputs, share: Option<TokenShare>) -> Result<Batch> {
        let device = self.device();
        let prompt = &inputs.prompt;
        let position_ids = self.position_rules.position_ids(prompt)?;
        let tokens = prompt.input_ids.len();
        if tokens == 0 {
            return Err(VlmError::NoTokens);
        }
        self.expect_tokens(prompt.input_ids.iter().copied().enumerate())?;
        let sequences = sequences(prompt);
        let rows = rows(prompt);
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
        // No other window hides anything.
        let window = self.language_model.window;
        let window = window.filter(|tokens| sequences.iter().any(|row| row.len() > *tokens));
        let window = window.map(|tokens| {
            let window = Some(Window {
                before: tokens - 1,
                after: 0,
            });
            let rules = MaskRules { window, ..rules };
            AttentionMask::new(&rules, rows, seq, seq)
        });
        let window = window.transpose()?;
        let mask = AttentionMask::new(&rules, rows, seq, seq)?;
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
        let part = share.map(|share| -> Result<TokenPart> {
            let own = share.own(rows, seq);
            let parts = self.language_model.attention_parts(share.count);
            let queries =
                parts.map(|parts| Queries::of(&parts[share.index], seq, &mask, window.as_ref()));
            Ok(TokenPart {
                share,
                rows,
                tokens: seq,
                queries: queries.unwrap_or_default(),
                sequences: rules.cu_seqlens.map(|_| sequences.clone()),
                attended: own.iter().map(|token| attended[*token]).collect(),
                positions: position_ids.select(&own)?,
                own,
                sees: !(prompt.image_grids.is_empty() && prompt.video_grids.is_empty()),
            })
        });
        let part = part.transpose()?;
        let positions = match &part {
            Some(part) => part.positions.clone(),
            None => position_ids.positions()?,
        };
        let mut ids = ints(prompt.input_ids.iter().copied(), &device);
        let mut own_recurrence = recurrence;
        if let Some(TokenPart { own, .. }) = &part {
            ids = ints(own.iter().map(|token| prompt.input_ids[*token]), &device);
            own_recurrence = own_recurrence.map(|recurrence| recurrence.of_part(own));
        }
        let [own] = ids.dims();
        Ok(Batch {
            recurrence: own_recurrence,
            input_ids: ids.reshape([rows, own / rows.max(1)]),
            angles: self.language_model.angles(&positions, &device)?,
            attention: Attention::new(mask),
            window: window.map(Attention::new),
            vision: self.vision_batch(inputs, part.as_ref(), &device)?,
            attended,
            sequences,
            packed: matches!(prompt.rows, Rows::Packed(_)),
            position_ids,
            part,
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

    /// The pictures that the tokens show, or those of a part of them.
    fn vision_batch(
        &self,
        inputs: &Inputs,
        part: Option<&TokenPart>,
        device: &Device,
    ) -> Result<Option<VisionBatch>> {
        let prompt = &inputs.prompt;
        let [patch_elems, merged_patches] = match &self.visual {
            Some(tower) => [tower.patch_elems(), tower.merged_patches()],
            None => [0, 1],
        };
        let (images, videos) = (&inputs.image_patches, &inputs.video_patches);
        let kinds = [
            ("image", prompt.image_grids, images),
            ("video", prompt.video_grids, videos),
        ];
        let known = self.placeholders();
        let video_tokens = self.position_rules.video_tokens(prompt)?;
        let (mut patches, mut grids, mut placeholders) = (Vec::new(), Vec::new(), Vec::new());
        // The merged patch of each placeholder.
        let mut merged = Vec::new();
        for (index, (kind, all_grids, its_patches)) in kinds.into_iter().enumerate() {
            let shown = inputs.shown.map(|shown| shown[index]);
            let its_grids = distinct(kind, all_grids, shown)?;
            let expected = [patches_of(&its_grids), patch_elems];
            let found = its_patches.as_ref().map_or([0, patch_elems], |x| x.dims());
            if found != expected {
                return Err(VlmError::Patches {
                    kind,
                    grids: its_grids,
                    expected,
                    found,
                });
            }
            let before = placeholders.len();
            let is_kind = |(index, id): (usize, &i64)| {
                let is_placeholder = known.is_some_and(|known| known.contains(id));
                (is_placeholder && video_tokens[index] == (kind == "video")).then_some(index)
            };
            placeholders.extend(prompt.input_ids.iter().enumerate().filter_map(is_kind));
            let (expected, found) = (
                patches_of(all_grids) / merged_patches,
                placeholders.len() - before,
            );
            if expected != found {
                return Err(VlmError::Placeholders {
                    kind,
                    grids: all_grids.to_vec(),
                    expected,
                    found,
                });
            }
            let start = patches_of(&grids) / merged_patches;
            for (grid, number) in (0..all_grids.len()).map(|grid| (grid, shown_by(shown, grid))) {
                let first = start + patches_of(&its_grids[..number]) / merged_patches;
                let count = patches_of(&all_grids[grid..=grid]) / merged_patches;
                merged.extend(first..first + count);
            }
            patches.extend(its_patches.clone());
            grids.extend(its_grids);
        }
        let tokens = prompt.input_ids.len();
        let own = part.map_or_else(|| (0..tokens).collect(), |part| part.own.clone());
        let mut places = vec![None; tokens];
        for (place, token) in own.iter().enumerate() {
            places[*token] = Some(place);
        }
        let shown = placeholders.iter().zip(&merged);
        let shown = shown.filter_map(|(token, merged)| Some((places[*token]?, *merged)));
        let (placeholders_here, merged_here): (Vec<usize>, Vec<usize>) = shown.unzip();
        let Some(tower) = self
            .visual
            .as_ref()
            .filter(|_| !placeholders_here.is_empty())
        else {
            return Ok(None);
        };
        let mut first_tokens = vec![0; patches_of(&grids) / merged_patches];
        for (token, merged) in placeholders.iter().zip(&merged).rev() {
            first_tokens[*merged] = *token;
        }
        let patches = Tensor::cat(patches, 0);
        let seen = Seen::new(&grids, merged_patches, &merged_here);
        let patches = seen.cut(patches, merged_patches);
        let patches = patches.to_device(device).cast(self.dtype());
        let tower_inputs = tower.inputs(patches, &seen.grids)?;
        let first_tokens: Vec<usize> = seen.merged.iter().map(|old| first_tokens[*old]).collect();
        let merged_here: Vec<usize> = merged_here.iter().map(|old| seen.places[*old]).collect();
        let mut sources: Vec<i64> = (0..own.len() as i64).collect();
        for (token, merged) in placeholders_here.iter().zip(&merged_here) {
            sources[*token] = (own.len() + merged) as i64;
        }
        let is_one_to_one = merged_here.iter().copied().eq(0..first_tokens.len());
        Ok(Some(VisionBatch {
            order: tower_inputs.in_order(&first_tokens),
            group: merged_patches as u64,
            inputs: tower_inputs,
            placeholders: indices(placeholders_here, device),
            merged: (!is_one_to_one).then(|| indices(merged_here, device)),
            sources: ints(sources.into_iter(), device),
        }))
    }
}

/// The grids of which some merged patches are read.
struct Seen {
    grids: Vec<[usize; 3]>,
    /// Their merged patches, among those of all grids.
    merged: Vec<usize>,
    /// The place among them of each merged patch of all grids, if it is there.
    places: Vec<usize>,
}

impl Seen {
    fn new(all: &[[usize; 3]], merged_patches: usize, read: &[usize]) -> Self {
        let count = patches_of(all) / merged_patches;
        let mut is_read = vec![false; count];
        read.iter().for_each(|merged| is_read[*merged] = true);
        let (mut grids, mut merged) = (Vec::new(), Vec::new());
        let mut places = Vec::with_capacity(count);
        for grid in all {
            let start = places.len();
            let end = start + patches_of(std::slice::from_ref(grid)) / merged_patches;
            let is_kept = is_read[start..end].contains(&true);
            grids.extend(is_kept.then_some(*grid));
            for old in start..end {
                places.push(merged.len());
                merged.extend(is_kept.then_some(old));
            }
        }
        Self {
            grids,
            merged,
            places,
        }
    }

    /// Their patches, from those of all grids.
    fn cut(&self, patches: Tensor<2>, merged_patches: usize) -> Tensor<2> {
        if self.merged.len() == self.places.len() {
            return patches;
        }
        let runs = self.merged.chunk_by(|a, b| a + 1 == *b);
        let runs = runs.map(|run| {
            let [first, count] = [run[0], run.len()].map(|merged| merged * merged_patches);
            patches.clone().narrow(0, first, count)
        });
        Tensor::cat(runs.collect(), 0)
    }
}

/// The number of patches of grids.
fn patches_of(grids: &[[usize; 3]]) -> usize {
    grids
        .iter()
        .map(|grid| grid.iter().product::<usize>())
        .sum()
}

/// The number of the picture that a grid of the prompt shows.
fn shown_by(shown: Option<&[usize]>, grid: usize) -> usize {
    shown.map_or(grid, |shown| shown[grid])
}

/// The grids of the distinct pictures or videos of a prompt.
///
/// # Errors
/// [`VlmError::Shown`]
fn distinct(
    kind: &'static str,
    grids: &[[usize; 3]],
    shown: Option<&[usize]>,
) -> Result<Vec<[usize; 3]>> {
    let wrong = |reason| Err(VlmError::Shown { kind, reason });
    if shown.is_some_and(|shown| shown.len() != grids.len()) {
        return wrong("there is not one for each grid of the prompt");
    }
    let mut distinct: Vec<[usize; 3]> = Vec::new();
    for (index, grid) in grids.iter().enumerate() {
        let number = shown_by(shown, index);
        match distinct.get(number) {
            Some(first) if first != grid => return wrong("one has two grids"),
            Some(_) => {}
            None if number == distinct.len() => distinct.push(*grid),
            None => return wrong("new ones do not ascend from 0"),
        }
    }
    Ok(distinct)
}
