//! JPEG, decoded to the bits of Pillow on x86-64, that is of libjpeg-turbo 3 with its defaults.
//!
//! The standard leaves a decoder free in its arithmetic, so two decoders give two pictures. These
//! are the choices of libjpeg-turbo: the accurate integer transform, the triangle filter for colours
//! at half the size, colours by 16 fractional bits, and predicted coefficients for a progressive
//! file without its last scans.
//!
//! Damage that libjpeg-turbo only warns of is decoded as it does: unknown codes are zeros, a segment
//! that a marker cuts off is completed by zeros, and a lost restart marker is resynchronised. A file
//! that ends before its last marker is truncated, and refused unless the options allow it.
//!
//! | module | contents |
//! |---|---|
//! | `segments` | markers, tables, the frame and its geometry |
//! | `bits` | bits of a scan, and Huffman codes |
//! | `scans` | coefficients of sequential and progressive scans |
//! | `transform` | inverse cosine transform of a block |
//! | `smooth` | coefficients that a progressive file lacks |
//! | `rows` | rows of pixels from samples: upsampling and colours |
//!
//! Not read: arithmetic coding, lossless and hierarchical frames, samples of other than 8 bits.
//!
//! # Source
//! ITU-T T.81 (1992) for the format; the documentation and sources of libjpeg-turbo 3.2 for its
//! choices; Pillow 13.0.0, `JpegDecode.c` and `JpegImagePlugin.py`

mod bits;
mod rows;
mod scans;
mod segments;
mod smooth;
mod transform;

use crate::{Result, VlmDataError};

use super::read::ReadOptions;

pub(super) use segments::Header;

/// The error for a picture that cannot be decoded.
fn fault(reason: impl Into<String>) -> VlmDataError {
    VlmDataError::Decode {
        format: "JPEG",
        reason: reason.into(),
    }
}

/// Decodes the picture that follows a header to RGB, `[height, width, 3]`.
///
/// # Errors
/// [`VlmDataError::Decode`] for damage that libjpeg-turbo does not accept, and for a truncated file
/// unless `options.allow_truncated`; [`VlmDataError::Memory`]
pub(super) fn decode(mut header: Header<'_>, options: &ReadOptions) -> Result<Vec<u8>> {
    header.lenient = options.allow_truncated;
    scans::decode(header)
}
