//! PNG, read row by row like PIL.
//!
//! As in PIL, a file whose pixels are complete may lack what follows them. Its rows become RGB one
//! by one, so that memory holds the picture alone, whatever its depth.

use std::io::{BufReader, Cursor, Read, Seek, SeekFrom};

use png::{BitDepth, ColorType, Decoder, DecodingError, InterlaceInfo, Limits, Transformations};

use crate::memory::zeros;
use crate::{Result, VlmDataError};

use super::colour::Samples;
use super::orientation::Orientation;
use super::read::{
    Alpha, CUT, Contents, Input, RGB, ReadOptions, Wanted, check_memory, checked_pixels,
};

/// Bytes of a chunk's length and kind, and of its checksum.
const CHUNK_HEAD: usize = 8;
const CHECKSUM: usize = 4;
/// Bytes before the first chunk.
pub(super) const SIGNATURE: usize = 8;
/// Bytes of a chunk and of all texts, at most; PIL has the same limit on texts.
const MAX_CHUNK_BYTES: usize = 64 << 20;
const XMP: &str = "XML:com.adobe.xmp";

fn fault(reason: impl ToString) -> VlmDataError {
    VlmDataError::Decode {
        format: "PNG",
        reason: reason.to_string(),
    }
}

fn error(error: DecodingError) -> VlmDataError {
    match error {
        DecodingError::IoError(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
            fault(CUT)
        }
        other => fault(other),
    }
}

/// [`Contents`] of a PNG file.
pub(super) fn contents(
    input: Input<'_>,
    options: &ReadOptions,
    wanted: Wanted,
) -> Result<Contents> {
    let file = input.bytes;
    let limits = Limits {
        bytes: MAX_CHUNK_BYTES,
    };
    let mut decoder = Decoder::new_with_limits(Cursor::new(file), limits);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::EXPAND);
    let (width, height) = decoder.read_header_info().map_err(error)?.size();
    let pixels = checked_pixels(width.into(), height.into(), options)?;
    let mut reader = decoder.read_info().map_err(error)?;
    let stored = [width, height].map(|side| usize::try_from(side).unwrap_or(usize::MAX));
    let mut contents = Contents::new(stored);
    if options.upright {
        let texts = &mut reader.info().utf8_text.iter();
        let xmp = texts.find(|text| text.keyword == XMP).cloned();
        let xmp = xmp.and_then(|mut text| {
            text.decompress_text().ok()?;
            text.get_text().ok()
        });
        let exif = chunk(file, b"eXIf");
        contents.orientation = Orientation::find(exif, xmp.as_deref().map(str::as_bytes));
    }
    check_memory(input, RGB * pixels, &contents, options)?;
    if wanted == Wanted::Sides {
        return Ok(contents);
    }

    let colour = reader.info().color_type;
    let (samples, key) = samples(file, colour, reader.output_color_type(), options)?;
    let mut rgb = zeros::<u8>("the picture", u128::from(RGB * pixels))?;
    let mut next = 0;
    let mut row_rgb = Vec::new();
    // The file need not go on after the last of them.
    let mut left = pixels;
    while left > 0 {
        let row = reader.next_interlaced_row().map_err(error)?;
        let row = row.ok_or_else(|| fault("it has too few rows"))?;
        left = left.saturating_sub((row.data().len() / samples.pixel_bytes()) as u64);
        let (is_transparent, is_clipped) = samples.surprises(row.data());
        contents.is_transparent |= is_transparent;
        contents.is_clipped |= is_clipped;
        row_rgb.clear();
        samples.append_rgb(row.data(), options.alpha, &mut row_rgb);
        if let Some(key) = key {
            for pixel in row_rgb.chunks_exact_mut(3).filter(|pixel| *pixel == key) {
                pixel.fill(255);
            }
        }
        match row.interlace() {
            InterlaceInfo::Null(_) => {
                let place = rgb.get_mut(next..).unwrap_or_default();
                for (pixel, &level) in place.iter_mut().zip(&row_rgb) {
                    *pixel = level;
                }
                next += row_rgb.len();
            }
            InterlaceInfo::Adam7(place) => {
                png::expand_interlaced_row(&mut rgb, 3 * stored[0], &row_rgb, place, 24);
            }
        }
    }
    if is_cut_after_pixels(file) {
        return Err(fault(CUT));
    }
    contents.rgb = rgb;
    Ok(contents)
}

/// A file without its pixels: its other chunks, and an empty one for them.
pub(super) fn without_pixels(file: &mut (impl Read + Seek)) -> std::io::Result<Vec<u8>> {
    const EMPTY: &[u8] = b"\0\0\0\0IDAT\x35\xaf\x06\x1e";
    file.seek(SeekFrom::Start(0))?;
    let mut file = BufReader::with_capacity(1 << 10, file);
    let mut kept = Vec::new();
    file.by_ref()
        .take(SIGNATURE as u64)
        .read_to_end(&mut kept)?;
    let mut has_pixels = false;
    loop {
        let start = kept.len();
        file.by_ref()
            .take(CHUNK_HEAD as u64)
            .read_to_end(&mut kept)?;
        let Some((length, kind)) = kept[start..].split_first_chunk::<4>() else {
            return Ok(kept);
        };
        let length = u64::from(u32::from_be_bytes(*length)) + CHECKSUM as u64;
        let is_pixels = matches!(kind, b"IDAT" | b"fdAT");
        if kind.len() < 4 || (!is_pixels && length > MAX_CHUNK_BYTES as u64) {
            return Ok(kept);
        }
        if is_pixels {
            let is_first = kind == b"IDAT" && !std::mem::replace(&mut has_pixels, true);
            kept.truncate(start);
            kept.extend_from_slice(if is_first { EMPTY } else { &[] });
            file.seek_relative(length.cast_signed())?;
        } else {
            let is_end = kind == b"IEND";
            file.by_ref().take(length).read_to_end(&mut kept)?;
            if is_end || kept.len() > 2 * MAX_CHUNK_BYTES {
                return Ok(kept);
            }
        }
    }
}

/// The format of the rows, and the colour that becomes white.
fn samples(
    file: &[u8],
    colour: ColorType,
    (expanded, depth): (ColorType, BitDepth),
    options: &ReadOptions,
) -> Result<(Samples, Option<[u8; 3]>)> {
    let channels = match expanded {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err(fault("it has no palette")),
    };
    let wide = depth == BitDepth::Sixteen;
    let mut samples = Samples {
        channels,
        wide,
        clipped: wide && colour == ColorType::Grayscale,
        alpha: channels % 2 == 0,
    };
    let mut key = None;
    if matches!(colour, ColorType::Grayscale | ColorType::Rgb) {
        samples.alpha = false;
        // `load_image` forgets the transparent level of 16-bit grey.
        let is_forgotten = samples.clipped && options.alpha == Alpha::Loaded;
        key = level_key(file).filter(|_| !is_forgotten);
    } else if colour == ColorType::Indexed && options.alpha == Alpha::Loaded {
        key = palette_key(file);
    }
    Ok((samples, key.filter(|_| options.alpha != Alpha::Dropped)))
}

/// The chunks of a file, up to the first one whose head is cut off or damaged: kind, and contents
/// with `None` if they are cut off.
fn chunks(file: &[u8]) -> impl Iterator<Item = ([u8; 4], Option<&[u8]>)> {
    let mut rest = file.get(SIGNATURE..);
    std::iter::from_fn(move || {
        let now = rest.take()?;
        let length = usize::try_from(u32::from_be_bytes(*now.first_chunk()?)).ok()?;
        let kind = *now.get(4..)?.first_chunk::<4>()?;
        let is_kind = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        if !kind.iter().all(is_kind) {
            return None;
        }
        let end = CHUNK_HEAD.checked_add(length)?;
        rest = end.checked_add(CHECKSUM).and_then(|next| now.get(next..));
        Some((kind, now.get(CHUNK_HEAD..end)))
    })
}

/// The contents of the first chunk of a kind. `eXIf` may also follow the pixels.
fn chunk<'a>(file: &'a [u8], kind: &[u8; 4]) -> Option<&'a [u8]> {
    chunks(file).find(|(found, _)| found == kind)?.1
}

/// True if a chunk after the pixels is cut off in its contents. PIL refuses such a file, though it
/// reads one that ends in a chunk's head or checksum.
fn is_cut_after_pixels(file: &[u8]) -> bool {
    chunks(file)
        .take_while(|(kind, _)| kind != b"IEND")
        .any(|(kind, contents)| contents.is_none() && kind != *b"IDAT")
}

/// The transparent colour of a grey or RGB file, as PIL compares it: the lower bytes of its one or
/// three samples, whatever the bit depth, against 8-bit levels.
fn level_key(file: &[u8]) -> Option<[u8; 3]> {
    match *chunk(file, b"tRNS")? {
        [_, grey] => Some([grey; 3]),
        [_, red, _, green, _, blue] => Some([red, green, blue]),
        _ => None,
    }
}

/// The transparent colour of a file with a palette, if one entry is transparent and all others are
/// opaque. PIL then makes all pixels of this colour transparent, whatever their entry.
fn palette_key(file: &[u8]) -> Option<[u8; 3]> {
    let mut entries = chunk(file, b"tRNS")?.iter().enumerate();
    let (index, &first) = entries.find(|(_, opacity)| **opacity < 255)?;
    let is_simple = first == 0 && entries.all(|(_, &opacity)| opacity == 255);
    let palette = chunk(file, b"PLTE").filter(|_| is_simple)?;
    palette.as_chunks::<3>().0.get(index).copied()
}
