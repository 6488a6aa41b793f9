//! The first frame of a GIF, decoded like PIL.

use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, DecodingError, MemoryLimit};

use crate::memory::{reserve, zeros};
use crate::{Result, VlmDataError};

use super::read::{Alpha, ReadOptions, Wanted, checked_pixels};

/// Decodes the first frame on the GIF's canvas: RGB, empty unless requested, with width and height.
///
/// Pixels not covered by the frame have the colour of the transparent index, or of index 0 if there
/// is none. Without a palette, or with one that maps each index to grey of the same level, pixels
/// are grey.
pub(super) fn decode(
    file: &[u8],
    options: &ReadOptions,
    wanted: Wanted,
) -> Result<(Vec<u8>, [usize; 2])> {
    let error = |error: DecodingError| VlmDataError::Decode {
        format: "GIF",
        reason: error.to_string(),
    };
    let mut settings = DecodeOptions::new();
    settings.set_color_output(ColorOutput::Indexed);
    let bytes = NonZeroU64::new(options.max_pixels).unwrap_or(NonZeroU64::MIN);
    settings.set_memory_limit(MemoryLimit::Bytes(bytes));
    let mut decoder = settings.read_info(file).map_err(error)?;
    let screen = [decoder.width(), decoder.height()].map(usize::from);
    let info = decoder
        .next_frame_info()
        .map_err(error)?
        .ok_or(VlmDataError::Decode {
            format: "GIF",
            reason: "it has no frame".to_owned(),
        })?;
    let [left, top] = [info.left, info.top].map(usize::from);
    let [frame_width, frame_height] = [info.width, info.height].map(usize::from);
    let transparent = info.transparent;
    let local = info.palette.clone();
    // A frame that is larger than the screen enlarges it.
    let [width, height] = [
        screen[0].max(left + frame_width),
        screen[1].max(top + frame_height),
    ];
    let pixels = checked_pixels(width as u64, height as u64, options)?;
    if wanted == Wanted::Sides {
        return Ok((Vec::new(), [width, height]));
    }
    let table = colours(
        local.as_deref().or(decoder.global_palette()),
        transparent,
        options.alpha,
    );

    let mut indices = zeros::<u8>("the frame", frame_width as u128 * frame_height as u128)?;
    decoder.read_into_buffer(&mut indices).map_err(error)?;
    let mut rgb = reserve::<u8>("the picture", 3 * pixels as u128)?;
    let uncovered = table[usize::from(transparent.unwrap_or(0))];
    for y in 0..height {
        let row = y.checked_sub(top).filter(|&row| row < frame_height);
        for x in 0..width {
            let column = x.checked_sub(left).filter(|&column| column < frame_width);
            let index = row
                .zip(column)
                .map(|(row, column)| indices[row * frame_width + column]);
            rgb.extend_from_slice(&index.map_or(uncovered, |index| table[usize::from(index)]));
        }
    }
    Ok((rgb, [width, height]))
}

/// The colour of each index.
fn colours(palette: Option<&[u8]>, transparent: Option<u8>, alpha: Alpha) -> [[u8; 3]; 256] {
    let grey: [[u8; 3]; 256] = std::array::from_fn(|index| [index as u8; 3]);
    let palette = palette.unwrap_or(&[]);
    let is_grey = palette
        .chunks_exact(3)
        .zip(&grey)
        .all(|(colour, grey)| colour == grey);
    let mut table = if is_grey { grey } else { [[0; 3]; 256] };
    for (entry, colour) in table.iter_mut().zip(palette.as_chunks::<3>().0) {
        *entry = *colour;
    }
    if let Some(index) = transparent.map(usize::from) {
        match alpha {
            Alpha::Dropped => {}
            Alpha::OnWhite => table[index] = [255; 3],
            // `load_image` remembers the colour, not the index.
            Alpha::Loaded => {
                let colour = table[index];
                for entry in table.iter_mut().filter(|entry| **entry == colour) {
                    *entry = [255; 3];
                }
            }
        }
    }
    table
}
