//! The first frame of a GIF, decoded like PIL.

use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, DecodingError, MemoryLimit};

use crate::memory::{reserve, zeros};
use crate::{Result, VlmDataError};

use super::read::{Alpha, Contents, Input, RGB, ReadOptions, Wanted, check_memory, checked_pixels};

/// Decodes the first frame on the GIF's canvas: RGB, empty unless requested, with width and height.
///
/// Pixels not covered by the frame have the colour of the transparent index, or of index 0 if there
/// is none. Without a palette, or with one that maps each index to grey of the same level, pixels
/// are grey.
pub(super) fn decode(
    file: Input<'_>,
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
    let bytes = match wanted {
        Wanted::Pixels => whole_blocks(file.bytes),
        Wanted::Sides => file.bytes,
    };
    let mut decoder = settings.read_info(bytes).map_err(error)?;
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
    let frame_pixels = frame_width as u64 * frame_height as u64;
    let contents = Contents::new([width, height]);
    check_memory(file, RGB * pixels + frame_pixels, &contents, options)?;
    if wanted == Wanted::Sides {
        return Ok((Vec::new(), [width, height]));
    }
    let table = colours(
        local.as_deref().or(decoder.global_palette()),
        transparent,
        options.alpha,
    );

    let mut indices = zeros::<u8>("the frame", frame_pixels.into())?;
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

/// The file without a block of pixels whose end is cut off. PIL reads pixels block by block, so that
/// it refuses the file unless the blocks before have them all.
fn whole_blocks(file: &[u8]) -> &[u8] {
    const SCREEN: usize = 13;
    const FRAME: usize = 10;
    let colours = |flags: u8| {
        if flags & 0x80 == 0 {
            0
        } else {
            3 << ((flags & 7) + 1)
        }
    };
    let Some(&flags) = file.get(10) else {
        return file;
    };
    let mut at = SCREEN + colours(flags);
    loop {
        let is_frame = match file.get(at) {
            Some(b'!') => false,
            Some(b',') => true,
            Some(_) => {
                at += 1;
                continue;
            }
            None => return file,
        };
        // An extension's label, or a frame's header, colours and size of codes.
        at += match file.get(at + FRAME - 1) {
            Some(&flags) if is_frame => FRAME + colours(flags) + 1,
            _ => 2,
        };
        loop {
            match file.get(at) {
                Some(0) => break,
                Some(&length) if at + usize::from(length) < file.len() => {
                    at += 1 + usize::from(length);
                }
                Some(_) => return &file[..at],
                None => return file,
            }
        }
        if is_frame {
            return file;
        }
        at += 1;
    }
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
