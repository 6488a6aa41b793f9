//! A file's pixels as RGB.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Cursor, Read as _, Seek as _};
use std::path::Path;

use image::codecs::png::PngEncoder;
use image::codecs::{bmp::BmpDecoder, webp::WebPDecoder};
use image::{ColorType, ExtendedColorType, ImageDecoder, ImageEncoder, ImageError, Limits};

use crate::memory::{reserve, zeros};
use crate::{Result, VlmDataError};

use super::bmp;
use super::colour::Samples;
use super::gif;
use super::jpeg;
use super::orientation::Orientation;
use super::png;

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
    /// As `load_image` of transformers followed by a processor: an alpha channel is dropped and the
    /// stored colours appear, but a colour that stands for transparency (GIF, `tRNS`) becomes
    /// white.
    #[default]
    Loaded,
    /// All transparency is dropped and the stored colours appear.
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
    /// Bytes of memory for decoding a picture, its file included, at most. The default of 960 MiB
    /// suffices for 83 million pixels of any kind, and for those of `max_pixels` in most files.
    pub max_memory: u64,
    /// True if the camera's orientation is applied, as in `load_image` of transformers.
    /// qwen-vl-utils, LLaMA-Factory and ms-swift use pictures as stored.
    pub upright: bool,
    /// The treatment of transparency.
    pub alpha: Alpha,
    /// True if a JPEG that ends too early is read as if its last marker followed, as by Pillow with
    /// `LOAD_TRUNCATED_IMAGES`. By default it is refused; other formats always are.
    pub allow_truncated: bool,
}

/// The fault of a file that is cut off, and that of a JPEG.
pub(super) const CUT: &str = "it is truncated; copy it again";
pub(super) const TRUNCATED: &str =
    "it is truncated; copy it again, or read its first part with `allow_truncated`";

/// Bytes that are read for a header, and the factor if they do not suffice.
const HEADER_BYTES: u64 = 16 << 10;
const HEADER_GROWTH: u64 = 8;
/// The start of a PNG file.
const PNG: &[u8] = b"\x89PNG";

/// Twice a quarter of a gibibyte, in pixels of 3 bytes: `2 * Image.MAX_IMAGE_PIXELS` of PIL.
const PIL_MAX_PIXELS: u64 = 178_956_970;
/// So that a process that decodes one picture stays below a gibibyte.
const MAX_MEMORY: u64 = 960 << 20;
/// Bytes of RGB, and of RGB with a rotated copy.
pub(super) const RGB: u64 = 3;
const TURNED: u64 = 6;
/// Bytes of a pixel while `image` decodes a WebP or BMP file. A WebP file with alpha has its pixels
/// and its opacity as RGBA each, its luma and its colours.
const WEBP: u64 = 8;
const WEBP_EXTENDED: u64 = 12;

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            max_pixels: PIL_MAX_PIXELS,
            max_memory: MAX_MEMORY,
            upright: true,
            alpha: Alpha::default(),
            allow_truncated: false,
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
    /// The pixels are bit-identical to those of `load_image` of transformers with PIL. Two
    /// conversions may be unexpected: 16-bit grey is clipped at 255, so that such a picture is
    /// almost entirely white, and a pixel that is transparent by alpha gets its stored colour.
    ///
    /// # Errors
    /// [`VlmDataError::File`] if the path is not a regular file or cannot be read;
    /// [`VlmDataError::InFile`] around the errors of [`Picture::decode`]
    pub fn open(path: impl AsRef<Path>, options: &ReadOptions) -> Result<Self> {
        let path = path.as_ref();
        let file = plain_files::read(path, options.max_memory)?;
        Self::decode(&file, options).map_err(|source| in_file(path, source))
    }

    /// Decodes the contents of a file; see [`Picture::open`].
    ///
    /// # Errors
    /// - [`VlmDataError::UnknownFormat`]: the bytes have an unsupported format
    /// - [`VlmDataError::TooManyPixels`]: the header states more pixels than allowed; none was
    ///   decoded
    /// - [`VlmDataError::TooMuchMemory`]: the header states a picture of too much memory, as above
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

    /// The levels, out of the picture if it is owned.
    pub(super) fn into_levels(picture: Cow<'_, Self>) -> Cow<'_, [u8]> {
        match picture {
            Cow::Borrowed(picture) => Cow::Borrowed(&picture.rgb),
            Cow::Owned(picture) => Cow::Owned(picture.rgb),
        }
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

/// An error if decoding takes more memory than the options allow: `decoding` bytes besides the
/// file's, and then perhaps those of a rotated picture.
pub(super) fn check_memory(
    file: Input<'_>,
    decoding: u64,
    contents: &Contents,
    options: &ReadOptions,
) -> Result<()> {
    let pixels: u64 = contents.stored.iter().map(|&side| side as u64).product();
    let turned = if contents.is_turned() { TURNED } else { RGB };
    let bytes = decoding.max(pixels.saturating_mul(turned));
    let bytes = bytes.saturating_add(file.length);
    let limit = options.max_memory;
    if bytes > limit {
        return Err(VlmDataError::TooMuchMemory { bytes, limit });
    }
    Ok(())
}

/// Limits on a decoder's allocations, besides the buffer for pixels.
fn limits(options: &ReadOptions) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(options.max_memory);
    limits
}

/// The contents of a file.
pub(crate) struct Contents {
    /// RGB as stored, empty unless requested.
    pub(crate) rgb: Vec<u8>,
    /// Width and height as stored.
    stored: [usize; 2],
    /// The orientation of the pixels.
    pub(super) orientation: Option<Orientation>,
    /// True if a pixel is transparent by its alpha; known only if pixels were decoded.
    pub(crate) is_transparent: bool,
    /// True if levels of grey above 255 are clipped; known only if pixels were decoded.
    pub(crate) is_clipped: bool,
}

impl Contents {
    /// A file of which only the size is known so far.
    pub(super) fn new(stored: [usize; 2]) -> Self {
        Self {
            rgb: Vec::new(),
            stored,
            orientation: None,
            is_transparent: false,
            is_clipped: false,
        }
    }

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

/// A file, or the part of one that suffices for its header.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes of the whole file.
    length: u64,
}

/// Reads a file as [`Picture::decode`] does, without rotating it upright.
pub(crate) fn contents(file: &[u8], options: &ReadOptions, wanted: Wanted) -> Result<Contents> {
    let length = file.len() as u64;
    contents_of(
        Input {
            bytes: file,
            length,
        },
        options,
        wanted,
    )
}

/// A picture's file that has been opened.
pub(crate) enum KeptFile {
    /// Its bytes.
    Bytes(Vec<u8>),
    /// The file, for those that are too large to be kept.
    Open(File),
}

impl KeptFile {
    /// Opens a file, and reads it if it fits the room that is left.
    pub(crate) fn open(path: &Path, options: &ReadOptions, room: &mut u64) -> Result<Self> {
        let file = plain_files::open(path)?;
        let length = file.metadata().map_err(|error| unread(path, &error))?.len();
        if length > *room {
            return Ok(Self::Open(file));
        }
        let bytes = plain_files::read_opened(&file, path, options.max_memory)?;
        *room = room.saturating_sub(bytes.len() as u64);
        Ok(Self::Bytes(bytes))
    }

    /// Reads its header.
    pub(crate) fn header(&mut self, path: &Path, options: &ReadOptions) -> Result<Contents> {
        match self {
            Self::Bytes(file) => {
                contents(file, options, Wanted::Sides).map_err(|source| in_file(path, source))
            }
            Self::Open(file) => header(file, path, options),
        }
    }

    /// Decodes it.
    pub(crate) fn picture(self, path: &Path, options: &ReadOptions) -> Result<Picture> {
        let bytes = match self {
            Self::Bytes(bytes) => bytes,
            Self::Open(mut file) => {
                file.rewind().map_err(|error| unread(path, &error))?;
                plain_files::read_opened(&file, path, options.max_memory)?
            }
        };
        Picture::decode(&bytes, options).map_err(|source| in_file(path, source))
    }
}

fn unread(path: &Path, error: &std::io::Error) -> VlmDataError {
    VlmDataError::File {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

/// Reads the header of a file, and little of what follows.
fn header(file: &mut File, path: &Path, options: &ReadOptions) -> Result<Contents> {
    let failed = |error: std::io::Error| unread(path, &error);
    let length = file.metadata().map_err(failed)?.len();
    let mut bytes = Vec::new();
    let mut most = HEADER_BYTES;
    loop {
        let more = most.saturating_sub(bytes.len() as u64);
        file.by_ref()
            .take(more)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        let is_whole = (bytes.len() as u64) < most || bytes.len() as u64 >= length;
        if !is_whole && bytes.starts_with(PNG) {
            bytes = png::without_pixels(file).map_err(failed)?;
        }
        let is_last = is_whole || bytes.starts_with(PNG) || most > options.max_memory;
        let input = Input {
            bytes: &bytes,
            length,
        };
        match contents_of(input, options, Wanted::Sides) {
            Err(_) if !is_last => most = most.saturating_mul(HEADER_GROWTH),
            read => return read.map_err(|source| in_file(path, source)),
        }
    }
}

fn contents_of(file: Input<'_>, options: &ReadOptions, wanted: Wanted) -> Result<Contents> {
    match file.bytes {
        [b'G', b'I', b'F', b'8', ..] => {
            let (rgb, stored) = gif::decode(file, options, wanted)?;
            Ok(Contents {
                rgb,
                ..Contents::new(stored)
            })
        }
        [0xff, 0xd8, 0xff, ..] => jpeg_contents(file, options, wanted),
        [0x89, b'P', b'N', b'G', ..] => png::contents(file, options, wanted),
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
            // Only its decoder of single pictures would notice.
            if is_cut_webp(file) {
                return Err(truncated("WebP"));
            }
            let decoder = WebPDecoder::new(Cursor::new(file.bytes));
            pixels("WebP", decoder, file, options, wanted)
        }
        [b'B', b'M', ..] => {
            // The header first, which may state too much.
            let header = BmpDecoder::new(Cursor::new(file.bytes));
            let header = pixels("BMP", header, file, options, Wanted::Sides)?;
            if wanted == Wanted::Sides {
                return Ok(header);
            }
            let whole = bmp::completed(file.bytes)?;
            let decoder = BmpDecoder::new(Cursor::new(&whole[..]));
            pixels("BMP", decoder, file, options, wanted)
        }
        _ => Err(VlmDataError::UnknownFormat {
            start: file.bytes[..file.bytes.len().min(12)].to_vec(),
        }),
    }
}

/// True if a WebP file or one of its chunks is shorter than its header says.
fn is_cut_webp(file: Input<'_>) -> bool {
    let size = |at: usize| -> Option<u64> {
        let size = file.bytes.get(at..)?.first_chunk()?;
        Some(u32::from_le_bytes(*size).into())
    };
    let Some(end) = size(4)
        .map(|size| 8 + size)
        .filter(|&end| end <= file.length)
    else {
        return true;
    };
    let mut at = 12;
    while let Some(size) = usize::try_from(at).ok().and_then(|at| size(at + 4)) {
        at += 8 + size;
        if at > end {
            return true;
        }
        at += size % 2;
    }
    // A file with metadata behind its pixels is read whole.
    file.bytes.get(12..16) == Some(b"VP8X") && (file.bytes.len() as u64) < end
}

pub(super) fn truncated(format: &'static str) -> VlmDataError {
    VlmDataError::Decode {
        format,
        reason: CUT.to_owned(),
    }
}

/// [`contents`] of a JPEG.
fn jpeg_contents(file: Input<'_>, options: &ReadOptions, wanted: Wanted) -> Result<Contents> {
    let header = jpeg::Header::read(file.bytes)?;
    let stored = header.sides();
    checked_pixels(stored[0] as u64, stored[1] as u64, options)?;
    let mut contents = Contents::new(stored);
    if options.upright {
        contents.orientation = Orientation::find(header.exif(), header.xmp());
    }
    check_memory(file, header.memory(), &contents, options)?;
    if wanted == Wanted::Pixels {
        contents.rgb = jpeg::decode(header, options)?;
    }
    Ok(contents)
}

/// [`contents`] by a decoder of `image`.
fn pixels<D: ImageDecoder>(
    format: &'static str,
    decoder: Result<D, ImageError>,
    file: Input<'_>,
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
    let samples = samples(format, decoder.color_type())?;
    let mut contents = Contents::new(size);
    if options.upright {
        let exif = decoder.exif_metadata().ok().flatten();
        let xmp = decoder.xmp_metadata().ok().flatten();
        contents.orientation = Orientation::find(exif.as_deref(), xmp.as_deref());
    }
    let pixel_bytes = match format {
        "WebP" if file.bytes.get(12..16) == Some(b"VP8X") => WEBP_EXTENDED,
        "WebP" => WEBP,
        _ => samples.pixel_bytes() as u64 + if samples.channels == 3 { 0 } else { RGB },
    };
    check_memory(file, pixels.saturating_mul(pixel_bytes), &contents, options)?;
    if wanted == Wanted::Sides {
        return Ok(contents);
    }
    let bytes = u128::from(pixels) * samples.pixel_bytes() as u128;
    let mut decoded = zeros::<u8>("the decoded picture", bytes)?;
    decoder.read_image(&mut decoded).map_err(error)?;
    if format == "BMP" {
        bmp::truncate_levels(file.bytes, &mut decoded);
    }
    let plain = Samples {
        channels: 3,
        wide: false,
        clipped: false,
        alpha: false,
    };
    if samples == plain {
        contents.rgb = decoded;
        return Ok(contents);
    }
    (contents.is_transparent, contents.is_clipped) = samples.surprises(&decoded);
    let mut rgb = reserve::<u8>("the picture", 3 * u128::from(pixels))?;
    samples.append_rgb(&decoded, options.alpha, &mut rgb);
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
