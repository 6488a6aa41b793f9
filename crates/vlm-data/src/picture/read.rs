//! A file's pixels as RGB.

use std::io::Cursor;
use std::path::Path;

use image::codecs::png::{PngDecoder, PngEncoder};
use image::codecs::{bmp::BmpDecoder, jpeg::JpegDecoder, webp::WebPDecoder};
use image::{ColorType, ExtendedColorType, ImageDecoder, ImageEncoder, ImageError, Limits};

use crate::memory::{reserve, zeros};
use crate::{Result, VlmDataError};

use super::colour::Samples;
use super::gif;
use super::orientation::Orientation;

/// A picture with 8 bits each of red, green and blue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

/// The treatment of transparency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Alpha {
    /// Alpha is dropped and the stored colours appear, as with `load_image` of transformers, and
    /// thus with every path given to a processor.
    #[default]
    Dropped,
    /// The picture is composited on white, as by a processor of transformers 5.24 with a picture
    /// opened by PIL, and by qwen-vl-utils with RGBA.
    OnWhite,
}

/// Options for reading pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// The largest number of pixels decoded. The default is PIL's, 178,956,970.
    pub max_pixels: u64,
    /// True if the camera's orientation is applied, as in `load_image` of transformers.
    /// qwen-vl-utils, LLaMA-Factory and ms-swift use pictures as stored.
    pub upright: bool,
    /// The treatment of transparency.
    pub alpha: Alpha,
}

/// Twice a quarter of a gibibyte, in pixels of 3 bytes: `2 * Image.MAX_IMAGE_PIXELS` of PIL.
const PIL_MAX_PIXELS: u64 = 178_956_970;
/// Bytes of a file besides its pixels: metadata, palettes, unread frames.
const EXTRA_FILE_BYTES: u64 = 256 << 20;

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            max_pixels: PIL_MAX_PIXELS,
            upright: true,
            alpha: Alpha::default(),
        }
    }
}

impl Picture {
    /// Creates a picture from RGB bytes, row by row from the top.
    ///
    /// # Errors
    /// [`VlmDataError::NoPixels`] if a side is 0; [`VlmDataError::PixelBytes`] if the length of
    /// `rgb` is not `3 * width * height`
    pub fn from_rgb(width: usize, height: usize, rgb: Vec<u8>) -> Result<Self> {
        if width == 0 || height == 0 {
            return Err(VlmDataError::NoPixels {
                width: width as u64,
                height: height as u64,
            });
        }
        let expected = (width as u128 * height as u128).saturating_mul(3);
        if rgb.len() as u128 != expected {
            return Err(VlmDataError::PixelBytes {
                width,
                height,
                expected,
                found: rgb.len(),
            });
        }
        Ok(Self { width, height, rgb })
    }

    /// Reads a file: JPEG, PNG, WebP, BMP or the first frame of a GIF, whatever its name.
    ///
    /// The pixels are bit-identical to those of `load_image` of transformers with PIL, except for
    /// JPEG, whose decoders differ. Two conversions may be unexpected: 16-bit grey is clipped at
    /// 255, so that such a picture is almost entirely white, and a transparent pixel gets its
    /// stored colour.
    ///
    /// # Errors
    /// [`VlmDataError::File`] if the path is not a regular file or cannot be read;
    /// [`VlmDataError::InFile`] around the errors of [`Picture::decode`]
    pub fn open(path: impl AsRef<Path>, options: &ReadOptions) -> Result<Self> {
        let path = path.as_ref();
        Self::decode(&read_file(path, options)?, options).map_err(|source| in_file(path, source))
    }

    /// Decodes the contents of a file; see [`Picture::open`].
    ///
    /// # Errors
    /// - [`VlmDataError::UnknownFormat`]: the bytes have an unsupported format
    /// - [`VlmDataError::TooManyPixels`]: the header states more pixels than allowed; none was
    ///   decoded
    /// - [`VlmDataError::NoPixels`], [`VlmDataError::Decode`]: the file is damaged or truncated
    /// - [`VlmDataError::Memory`]: an allocation failed
    /// # Source
    /// transformers 5.24.0, `load_image` of image_utils.py; Pillow 13.0.0, `exif_transpose` of
    /// ImageOps.py and `convert` of Image.py
    pub fn decode(file: &[u8], options: &ReadOptions) -> Result<Self> {
        let Contents {
            rgb,
            stored: [width, height],
            orientation,
            ..
        } = contents(file, options, Wanted::Pixels)?;
        let (rgb, [width, height]) = match orientation {
            Some(orientation) => {
                let upright = reserve::<u8>("the picture", rgb.len() as u128)?;
                orientation.apply(&rgb, [width, height], upright)
            }
            None => (rgb, [width, height]),
        };
        Ok(Self { width, height, rgb })
    }

    /// Reads the width and height of the picture that [`Picture::decode`] would return, from the
    /// header alone.
    ///
    /// # Errors
    /// those of [`Picture::decode`] that the header reveals
    pub fn sides(file: &[u8], options: &ReadOptions) -> Result<[usize; 2]> {
        Ok(contents(file, options, Wanted::Sides)?.sides())
    }

    /// Encodes the picture as a PNG file.
    ///
    /// # Errors
    /// [`VlmDataError::Memory`]
    pub fn to_png(&self) -> Result<Vec<u8>> {
        let mut file = Vec::new();
        let [width, height] = [self.width, self.height].map(u32::try_from);
        if let (Ok(width), Ok(height)) = (width, height) {
            let encoder = PngEncoder::new(&mut file);
            let written = encoder.write_image(&self.rgb, width, height, ExtendedColorType::Rgb8);
            if written.is_ok() {
                return Ok(file);
            }
        }
        Err(VlmDataError::Memory {
            what: "the PNG file",
            bytes: self.rgb.len() as u128,
        })
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The levels of red, green and blue, `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// The part of a file that is read.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Wanted {
    Pixels,
    /// Width, height and orientation.
    Sides,
}

/// The bytes of a picture's file.
pub(crate) fn read_file(path: &Path, options: &ReadOptions) -> Result<Vec<u8>> {
    // 16 bits of RGBA, uncompressed.
    let limit = options
        .max_pixels
        .saturating_mul(8)
        .saturating_add(EXTRA_FILE_BYTES);
    Ok(plain_files::read(path, limit)?)
}

pub(crate) fn in_file(path: &Path, source: VlmDataError) -> VlmDataError {
    VlmDataError::InFile {
        path: path.to_owned(),
        source: Box::new(source),
    }
}

/// Width times height, if positive and within the limit of the options.
pub(super) fn checked_pixels(width: u64, height: u64, options: &ReadOptions) -> Result<u64> {
    if width == 0 || height == 0 {
        return Err(VlmDataError::NoPixels { width, height });
    }
    match width.checked_mul(height) {
        Some(pixels) if pixels <= options.max_pixels => Ok(pixels),
        _ => Err(VlmDataError::TooManyPixels {
            width,
            height,
            limit: options.max_pixels,
        }),
    }
}

/// Limits on a decoder's allocations, besides the buffer for pixels.
fn limits(options: &ReadOptions) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(
        options
            .max_pixels
            .saturating_mul(8)
            .saturating_add(EXTRA_FILE_BYTES),
    );
    limits
}

/// The contents of a file.
pub(crate) struct Contents {
    /// RGB as stored, empty unless requested.
    pub(crate) rgb: Vec<u8>,
    /// Width and height as stored.
    stored: [usize; 2],
    /// The orientation of the pixels.
    orientation: Option<Orientation>,
    /// True if a pixel is transparent by its alpha; known only if pixels were decoded.
    pub(crate) is_transparent: bool,
    /// True if levels of grey above 255 are clipped; known only if pixels were decoded.
    pub(crate) is_clipped: bool,
}

impl Contents {
    /// True if the pixels are rotated or mirrored.
    pub(crate) fn is_turned(&self) -> bool {
        self.orientation.is_some()
    }

    /// Width and height of the upright picture.
    pub(crate) fn sides(&self) -> [usize; 2] {
        self.orientation
            .map_or(self.stored, |orientation| orientation.turn(self.stored))
    }
}

/// Reads a file as [`Picture::decode`] does, without rotating it upright.
pub(crate) fn contents(file: &[u8], options: &ReadOptions, wanted: Wanted) -> Result<Contents> {
    match file {
        [b'G', b'I', b'F', b'8', ..] => {
            let (rgb, stored) = gif::decode(file, options, wanted)?;
            Ok(Contents {
                rgb,
                stored,
                orientation: None,
                is_transparent: false,
                is_clipped: false,
            })
        }
        [0xff, 0xd8, 0xff, ..] => {
            let decoder = JpegDecoder::new(Cursor::new(file));
            pixels("JPEG", decoder, file, options, wanted)
        }
        [0x89, b'P', b'N', b'G', ..] => {
            let decoder = PngDecoder::with_limits(Cursor::new(file), limits(options));
            pixels("PNG", decoder, file, options, wanted)
        }
        [
            b'R',
            b'I',
            b'F',
            b'F',
            _,
            _,
            _,
            _,
            b'W',
            b'E',
            b'B',
            b'P',
            ..,
        ] => {
            let decoder = WebPDecoder::new(Cursor::new(file));
            pixels("WebP", decoder, file, options, wanted)
        }
        [b'B', b'M', ..] => {
            let decoder = BmpDecoder::new(Cursor::new(file));
            pixels("BMP", decoder, file, options, wanted)
        }
        _ => Err(VlmDataError::UnknownFormat {
            start: file[..file.len().min(12)].to_vec(),
        }),
    }
}

/// [`contents`] by a decoder of `image`.
fn pixels<D: ImageDecoder>(
    format: &'static str,
    decoder: Result<D, ImageError>,
    file: &[u8],
    options: &ReadOptions,
    wanted: Wanted,
) -> Result<Contents> {
    let error = |error: ImageError| VlmDataError::Decode {
        format,
        reason: error.to_string(),
    };
    let mut decoder = decoder.map_err(error)?;
    let (width, height) = decoder.dimensions();
    let pixels = checked_pixels(width.into(), height.into(), options)?;
    let size = [width, height].map(|side| usize::try_from(side).unwrap_or(usize::MAX));
    decoder.set_limits(limits(options)).map_err(error)?;
    let mut samples = samples(format, decoder.color_type())?;
    let mut orientation = None;
    if options.upright {
        let exif = match format {
            "PNG" => png_chunk(file, b"eXIf").map(<[u8]>::to_vec),
            _ => decoder.exif_metadata().ok().flatten(),
        };
        let xmp = decoder.xmp_metadata().ok().flatten();
        orientation = Orientation::find(exif.as_deref(), xmp.as_deref());
    }
    let mut contents = Contents {
        rgb: Vec::new(),
        stored: size,
        orientation,
        is_transparent: false,
        is_clipped: false,
    };
    if wanted == Wanted::Sides {
        return Ok(contents);
    }
    // The colour that stands for transparency.
    let mut key = None;
    if format == "PNG" {
        let colour = file.get(PNG_COLOUR).copied();
        samples.clipped = samples.wide && colour == Some(PNG_GREY);
        if matches!(colour, Some(PNG_GREY | PNG_RGB)) {
            samples.alpha = false;
            key = png_key(file);
        }
    }

    let bytes = u128::from(pixels) * samples.pixel_bytes() as u128;
    let mut decoded = zeros::<u8>("the decoded picture", bytes)?;
    decoder.read_image(&mut decoded).map_err(error)?;
    if format == "BMP" {
        truncate_levels(file, &mut decoded);
    }
    let plain = Samples {
        channels: 3,
        wide: false,
        clipped: false,
        alpha: false,
    };
    if samples == plain && key.is_none() {
        contents.rgb = decoded;
        return Ok(contents);
    }
    (contents.is_transparent, contents.is_clipped) = samples.surprises(&decoded);
    let mut rgb = reserve::<u8>("the picture", 3 * u128::from(pixels))?;
    samples.append_rgb(&decoded, options.alpha, &mut rgb);
    if let (Alpha::OnWhite, Some(key)) = (options.alpha, key) {
        for pixel in rgb.chunks_exact_mut(3).filter(|pixel| *pixel == key) {
            pixel.fill(255);
        }
    }
    contents.rgb = rgb;
    Ok(contents)
}

fn samples(format: &'static str, colour: ColorType) -> Result<Samples> {
    let (channels, wide) = match colour {
        ColorType::L8 => (1, false),
        ColorType::La8 => (2, false),
        ColorType::Rgb8 => (3, false),
        ColorType::Rgba8 => (4, false),
        ColorType::L16 => (1, true),
        ColorType::La16 => (2, true),
        ColorType::Rgb16 => (3, true),
        ColorType::Rgba16 => (4, true),
        other => {
            let reason = format!("its colours are {other:?}");
            return Err(VlmDataError::Decode { format, reason });
        }
    };
    Ok(Samples {
        channels,
        wide,
        clipped: false,
        alpha: channels % 2 == 0,
    })
}

/// The offset of the colour type in a PNG file, and two colour types.
const PNG_COLOUR: usize = 25;
const PNG_GREY: u8 = 0;
const PNG_RGB: u8 = 2;

/// The contents of the first chunk of a kind in a PNG file. `eXIf` may also follow the pixels.
fn png_chunk<'a>(file: &'a [u8], kind: &[u8; 4]) -> Option<&'a [u8]> {
    let mut rest = file.get(8..)?;
    loop {
        let length = u32::from_be_bytes(*rest.first_chunk()?);
        let end = usize::try_from(length).ok()?.checked_add(8)?;
        if rest.get(4..8)? == kind {
            return rest.get(8..end);
        }
        rest = rest.get(end.checked_add(4)?..)?;
    }
}

/// The transparent colour of a grey or RGB PNG file, as PIL compares it: the lower bytes of its one
/// or three samples, whatever the bit depth, against 8-bit levels.
fn png_key(file: &[u8]) -> Option<[u8; 3]> {
    match *png_chunk(file, b"tRNS")? {
        [_, grey] => Some([grey; 3]),
        [_, red, _, green, _, blue] => Some([red, green, blue]),
        _ => None,
    }
}

/// Levels of 5 and 6 bits in a BMP of 16 bits, which PIL truncates and `image` rounds.
fn truncate_levels(file: &[u8], rgb: &mut [u8]) {
    let u16_at = |at: usize| {
        file.get(at..at + 2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    let header = u16_at(14);
    let bits = u16_at(if header == Some(12) { 24 } else { 28 });
    if bits != Some(16) {
        return;
    }
    // Bit fields, with six bits of green in the mask that follows that of red.
    let six = header != Some(12) && u16_at(30) == Some(3) && u16_at(58) == Some(0x7e0);
    let maxima = [31, if six { 63 } else { 31 }, 31];
    for pixel in rgb.chunks_exact_mut(3) {
        for (level, maximum) in pixel.iter_mut().zip(maxima) {
            let small = (u32::from(*level) * maximum + 127) / 255;
            *level = (small * 255 / maximum) as u8;
        }
    }
}
