//! Micro-batches as the model reads them.

use burn::tensor::{Device, Tensor, TensorData};
use qwen_vl::Inputs;
use qwen_vl::rope_core::position_ids::{Prompt, Rows};
use vlm_data::{MicroBatch, SampleRows};

/// The tokens with what positions follow from.
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

/// A micro-batch as the model reads it, with its patches on a device.
pub fn inputs<'a>(micro: &'a MicroBatch, device: &Device) -> Inputs<'a> {
    let patches = |patches: &[f32], grids: &[[usize; 3]]| {
        let sizes = grids.iter().map(|grid| grid.iter().product::<usize>());
        let rows: usize = sizes.sum();
        (rows > 0).then(|| {
            // A length that does not divide is an error of the model's.
            let columns = patches.len() / rows;
            let data = patches[..rows * columns].to_vec();
            Tensor::from_data(TensorData::new(data, [rows, columns]), device)
        })
    };
    Inputs {
        prompt: prompt(micro),
        image_patches: patches(&micro.image_patches, &micro.image_grids),
        video_patches: patches(&micro.video_patches, &micro.video_grids),
    }
}

/// Tokens, without padding.
pub(crate) fn tokens(micro: &MicroBatch) -> usize {
    match &micro.rows {
        SampleRows::Packed { .. } => micro.input_ids.len(),
        SampleRows::Padded { attention_mask, .. } => {
            attention_mask.iter().filter(|token| **token).count()
        }
    }
}

/// Where the samples of micro-batches stand in the data file.
pub(crate) fn lines(batch: &[MicroBatch]) -> String {
    let lines = batch.iter().flat_map(|micro| &micro.lines);
    let lines: Vec<String> = lines.map(u64::to_string).collect();
    lines.join(", ")
}
