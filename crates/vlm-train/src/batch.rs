//! Micro-batches as the model's input.

use burn::tensor::{Device, Tensor, TensorData};
use vlm_data::{Fingerprint, MicroBatch, SampleRows};
use vlm_models::rope_core::position_ids::{Prompt, Rows};
use vlm_models::{Inputs, TokenShare};

/// The tokens with the data that determines their positions.
pub(crate) fn prompt(micro: &MicroBatch) -> Prompt<'_> {
    let (rows, attention_mask) = match &micro.rows {
        SampleRows::Packed { cu_seqlens } => (Rows::Packed(cu_seqlens), None),
        SampleRows::Padded {
            rows,
            attention_mask,
        } => (Rows::Batch(*rows), Some(&attention_mask[..])),
    };
    let seconds = &micro.seconds_per_grid[..];
    Prompt {
        input_ids: &micro.input_ids,
        rows,
        attention_mask,
        mm_token_type_ids: None,
        image_grids: &micro.image_grids,
        video_grids: &micro.video_grids,
        seconds_per_grid: (!seconds.is_empty()).then_some(seconds),
    }
}

/// Converts a micro-batch to the model's input, with its patches on a device.
pub fn inputs<'a>(micro: &'a MicroBatch, device: &Device) -> Inputs<'a> {
    let [images, videos] = micro.patch_rows();
    let patches = |patches: &[f32], rows: usize| {
        (rows > 0).then(|| {
            // The model reports a length that does not divide.
            let columns = patches.len() / rows;
            let data = patches[..rows * columns].to_vec();
            Tensor::from_data(TensorData::new(data, [rows, columns]), device)
        })
    };
    Inputs {
        prompt: prompt(micro),
        image_patches: patches(&micro.image_patches, images),
        video_patches: patches(&micro.video_patches, videos),
        shown: micro
            .shown
            .as_ref()
            .map(|[images, videos]| [&images[..], videos]),
    }
}

/// True if a micro-batch has pictures or videos.
pub(crate) fn sees(micro: &MicroBatch) -> bool {
    micro.patch_rows() != [0, 0]
}

/// Tokens of a share, without padding.
pub(crate) fn tokens(micro: &MicroBatch, share: TokenShare) -> usize {
    let all = micro.input_ids.len();
    match &micro.rows {
        SampleRows::Packed { .. } => share.own(1, all).len(),
        SampleRows::Padded {
            rows,
            attention_mask,
        } => {
            let own = share.own(*rows, all / (*rows).max(1)).into_iter();
            own.filter(|token| attention_mask[*token]).count()
        }
    }
}

/// The lines of micro-batches' samples in the data file.
pub(crate) fn lines(batch: &[MicroBatch]) -> String {
    let lines: Vec<u64> = batch.iter().flat_map(MicroBatch::sample_lines).collect();
    listed(&lines)
}

/// Lines, separated by commas.
pub(crate) fn listed(lines: &[u64]) -> String {
    let lines: Vec<String> = lines.iter().map(u64::to_string).collect();
    lines.join(", ")
}

/// Dropout seeds for the samples of a micro-batch in a step. They depend on the sample, not on its
/// place.
pub(crate) fn seeds(micro: &MicroBatch, seed: u64, step: usize) -> Vec<u64> {
    let tokens: Vec<&[i64]> = match &micro.rows {
        SampleRows::Packed { cu_seqlens } => {
            let pairs = cu_seqlens.windows(2);
            pairs
                .map(|pair| &micro.input_ids[pair[0]..pair[1]])
                .collect()
        }
        SampleRows::Padded {
            rows,
            attention_mask,
        } => {
            let length = micro.input_ids.len() / (*rows).max(1);
            let rows = micro.input_ids.chunks(length.max(1));
            let masks = attention_mask.chunks(length.max(1));
            // Padding is at the right.
            let count = |mask: &[bool]| mask.iter().filter(|token| **token).count();
            rows.zip(masks)
                .map(|(row, mask)| &row[..count(mask)])
                .collect()
        }
    };
    let lines = tokens.iter().zip(&micro.lines);
    let sample_seed = |(tokens, line): (&&[i64], &u64)| {
        let mut hash = Fingerprint::default();
        for number in [seed, step as u64, *line] {
            hash.add(&number.to_le_bytes());
        }
        tokens
            .iter()
            .for_each(|token| hash.add(&token.to_le_bytes()));
        hash.value()
    };
    lines.map(sample_seed).collect()
}
