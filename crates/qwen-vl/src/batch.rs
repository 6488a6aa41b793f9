//! From a prompt to tensors.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use rope_burn::RotaryAngles;
use rope_core::position_ids::{PositionIds, Prompt, Rows};

use crate::error::{QwenVlError, Result};
use crate::model::QwenVl;
use crate::vision::VisionInputs;

/// Added to the score of a token that must not be seen: no score survives it in f32.
const HIDDEN: f32 = -1e30;

/// What a step works on.
///
/// # Shapes
/// patches `[patches, colours * frames * rows * columns]`, in the order of the Hugging Face image processor: images in
/// reading order over all rows, and in each the patches of one merged token one after the other
#[derive(Clone, Debug, Default)]
pub struct Inputs<'a> {
    /// Tokens, grids, masks; rows of a batch or packed sequences.
    pub prompt: Prompt<'a>,
    /// Patches of the images, where there are any.
    pub image_patches: Option<Tensor<2>>,
    /// Patches of the videos, where there are any.
    pub video_patches: Option<Tensor<2>>,
}

/// A step's tokens with what all layers share: position ids, angles, masks. Made once a step by [`QwenVl::batch`].
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) input_ids: Tensor<2, Int>,
    pub(crate) angles: RotaryAngles,
    pub(crate) mask: Tensor<4>,
    pub(crate) vision: Option<VisionBatch>,
    pub(crate) attended: Vec<bool>,
    pub(crate) sequences: Vec<Range<usize>>,
    pub(crate) packed: bool,
    position_ids: PositionIds,
}

/// Patches, and which tokens they stand for.
#[derive(Clone, Debug)]
pub(crate) struct VisionBatch {
    pub(crate) inputs: VisionInputs,
    /// The placeholders among the flat tokens, in the order of the merged patches.
    pub(crate) places: Tensor<1, Int>,
    /// For every flat token, its row in (word embeddings, merged patches).
    pub(crate) sources: Tensor<1, Int>,
}

impl Batch {
    /// The position ids of the tokens, and where they depart from the default.
    pub fn position_ids(&self) -> &PositionIds {
        &self.position_ids
    }

    /// Rows and tokens per row; one row where sequences are packed.
    pub fn shape(&self) -> [usize; 2] {
        self.input_ids.dims()
    }
}

impl QwenVl {
    /// Lays out a step on this model's device.
    ///
    /// # Errors
    /// [`QwenVlError::Token`], [`QwenVlError::Patches`], [`QwenVlError::Placeholders`];
    /// [`QwenVlError::Rope`] where tokens, grids, masks and lengths do not fit together.
    pub fn batch(&self, inputs: &Inputs) -> Result<Batch> {
        let device = self.device();
        let prompt = &inputs.prompt;
        let position_ids = self.position_rules.position_ids(prompt)?;
        let tokens = prompt.input_ids.len();
        let out_of_range = |id: &&i64| !(0..self.vocab_size as i64).contains(*id);
        if let Some(found) = prompt.input_ids.iter().find(out_of_range) {
            return Err(QwenVlError::Token {
                token: prompt
                    .input_ids
                    .iter()
                    .position(|id| id == found)
                    .unwrap_or(0),
                found: *found,
                vocab_size: self.vocab_size,
            });
        }
        let (rows, sequences): (usize, Vec<Range<usize>>) = match prompt.rows {
            Rows::Batch(rows) => {
                let len = tokens / rows.max(1);
                (
                    rows,
                    (0..rows).map(|row| row * len..(row + 1) * len).collect(),
                )
            }
            Rows::Packed(cu_seqlens) => (
                1,
                cu_seqlens.windows(2).map(|pair| pair[0]..pair[1]).collect(),
            ),
        };
        let attended = match prompt.attention_mask {
            Some(mask) => mask.to_vec(),
            None => vec![true; tokens],
        };
        Ok(Batch {
            input_ids: ints(prompt.input_ids.iter().copied(), &device)
                .reshape([rows, tokens / rows.max(1)]),
            angles: self
                .language_model
                .angles(&position_ids.positions()?, &device)?,
            mask: causal_mask(rows, &sequences, &attended, &device),
            vision: self.vision_batch(inputs, &device)?,
            attended,
            sequences,
            packed: matches!(prompt.rows, Rows::Packed(_)),
            position_ids,
        })
    }

    fn vision_batch(&self, inputs: &Inputs, device: &Device) -> Result<Option<VisionBatch>> {
        let prompt = &inputs.prompt;
        let kinds = [
            (
                "image",
                prompt.image_grids,
                &inputs.image_patches,
                self.image_token,
            ),
            (
                "video",
                prompt.video_grids,
                &inputs.video_patches,
                self.video_token,
            ),
        ];
        let (mut patches, mut grids, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (kind, its_grids, its_patches, token) in kinds {
            let count: usize = its_grids
                .iter()
                .map(|grid| grid.iter().product::<usize>())
                .sum();
            let found = its_patches
                .as_ref()
                .map_or([0, self.patch_elems], |x| x.dims());
            if found != [count, self.patch_elems] {
                return Err(QwenVlError::Patches {
                    kind,
                    grids: its_grids.to_vec(),
                    expected: [count, self.patch_elems],
                    found,
                });
            }
            let before = places.len();
            let is_kind = |(place, id): (usize, &i64)| (*id == token).then_some(place);
            places.extend(prompt.input_ids.iter().enumerate().filter_map(is_kind));
            let (expected, found) = (count / self.merged_patches, places.len() - before);
            if expected != found {
                return Err(QwenVlError::Placeholders {
                    kind,
                    grids: its_grids.to_vec(),
                    expected,
                    found,
                });
            }
            patches.extend(its_patches.clone());
            grids.extend_from_slice(its_grids);
        }
        if places.is_empty() {
            return Ok(None);
        }
        let tokens = prompt.input_ids.len();
        let mut sources: Vec<i64> = (0..tokens as i64).collect();
        for (merged, place) in places.iter().enumerate() {
            sources[*place] = (tokens + merged) as i64;
        }
        let patches = Tensor::cat(patches, 0)
            .to_device(device)
            .cast(self.float_dtype());
        Ok(Some(VisionBatch {
            inputs: self.visual.inputs(patches, &grids)?,
            places: indices(places, device),
            sources: ints(sources.into_iter(), device),
        }))
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

/// `[rows, 1, seq, seq]`: a token sees what came before it in its own sequence, padding excepted.
fn causal_mask(
    rows: usize,
    sequences: &[Range<usize>],
    attended: &[bool],
    device: &Device,
) -> Tensor<4> {
    let seq = attended.len() / rows.max(1);
    let mut mask = vec![HIDDEN; rows * seq * seq];
    for range in sequences {
        for query in range.clone() {
            let keys = (query / seq) * seq;
            for key in range.start..=query {
                if attended[key] {
                    mask[query * seq + key - keys] = 0.0;
                }
            }
        }
    }
    additive(mask, [rows, 1, seq, seq], device)
}

/// `[rows, 1, 1, keys]`: one new token per row sees all keys that are no padding.
pub(crate) fn key_mask(attended: &[Vec<bool>], device: &Device) -> Tensor<4> {
    let shape = [attended.len(), 1, 1, attended.first().map_or(0, Vec::len)];
    let value = |attended: &bool| if *attended { 0.0 } else { HIDDEN };
    additive(
        attended.iter().flatten().map(value).collect(),
        shape,
        device,
    )
}

fn additive(values: Vec<f32>, shape: [usize; 4], device: &Device) -> Tensor<4> {
    let data = TensorData::new(values, shape);
    // Scores are masked in f32, whatever the model's type.
    Tensor::from_data(data, (device, burn::tensor::DType::F32))
}
