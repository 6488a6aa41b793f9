//! Findings in pictures and frames.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::findings::Found;
use super::{Check, REMEMBERED};
use crate::picture::{Contents, KeptFile, Wanted, contents};
use crate::sample::frames;
use crate::text::format::{MediaSource, Video};
use crate::{Result, VlmDataError};

/// Bytes per pixel while a picture is decoded: RGB, the decoder's, and a rotated copy.
const PIXEL_BYTES: u64 = 9;
/// A picture enlarged by more than this factor of its area is blurred.
const ENLARGED: usize = 16;

/// The use of a picture.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Use {
    Picture,
    Frame,
}

/// Width and height.
type Sides = [usize; 2];

impl<R> Check<'_, R> {
    /// Checks all frames of a video given as pictures, which must have the same size, and returns
    /// it.
    pub(super) fn look_at_video(
        &self,
        video: &Video,
        index: usize,
        found: &mut Vec<Found>,
    ) -> Option<Sides> {
        let place = format!("video {}", index + 1);
        let frames = match frames(video) {
            Ok(frames) => frames.unwrap_or_default(),
            Err(error) => {
                found.push(Found::at(&place, &error));
                return None;
            }
        };
        let mut first = None;
        for (frame, source) in frames.iter().enumerate() {
            let place = format!("{place}, frame {}", frame + 1);
            let Some(sides) = self.look_at(source, Use::Frame, &place, found) else {
                continue;
            };
            let first = *first.get_or_insert(sides);
            if first != sides {
                let error = VlmDataError::FrameSize {
                    first,
                    found: sides,
                };
                found.push(Found::at(&place, &error));
                return None;
            }
        }
        first
    }

    /// Checks a picture and returns its width and height if it is usable.
    pub(super) fn look_at(
        &self,
        source: &MediaSource,
        purpose: Use,
        short: &str,
        found: &mut Vec<Found>,
    ) -> Option<Sides> {
        let (key, place) = match source {
            MediaSource::Path(path) => {
                let mut hasher = DefaultHasher::new();
                (path, purpose == Use::Frame).hash(&mut hasher);
                let place = format!("{short}, {}", path.display());
                (Some(hasher.finish()), Cow::Owned(place))
            }
            MediaSource::Bytes(_) => (None, Cow::Borrowed(short)),
        };
        let known = key.and_then(|key| self.sound.lock().get(&key).copied());
        if known.is_some() {
            return known;
        }
        let (sides, notes) = match self.inspect(source, purpose) {
            Ok(inspected) => inspected,
            Err(error) => {
                // An error of the file contains its path.
                let is_of_file = matches!(error, VlmDataError::File { .. });
                found.push(Found::at(if is_of_file { short } else { &place }, &error));
                return None;
            }
        };
        let mut sound = self.sound.lock();
        if let Some(key) = key.filter(|_| notes.is_empty() && sound.len() < REMEMBERED) {
            sound.insert(key, sides);
        }
        let notes = notes.into_iter();
        found.extend(notes.map(|(kind, note)| Found::new(kind, format!("{place}: {note}"))));
        Some(sides)
    }

    /// Returns width and height of a picture, and adds warnings about its contents.
    fn inspect(
        &self,
        source: &MediaSource,
        purpose: Use,
    ) -> Result<(Sides, Vec<(&'static str, String)>)> {
        let options = &self.encoder.options().read;
        let mut notes = Vec::new();
        let (bytes, header) = match source {
            MediaSource::Path(path) if self.options.pixels => {
                let bytes = plain_files::read(path, options.max_memory)?;
                let header = contents(&bytes, options, Wanted::Sides)?;
                (Cow::Owned(bytes), header)
            }
            MediaSource::Path(path) => {
                let header = KeptFile::open(path, options, &mut 0)?.header(path, options)?;
                (Cow::Borrowed(&[][..]), header)
            }
            MediaSource::Bytes(bytes) => (
                Cow::Borrowed(&bytes[..]),
                contents(bytes, options, Wanted::Sides)?,
            ),
        };
        let sides = header.sides();
        let [width, height] = sides;
        if let (Use::Picture, Some(media)) = (purpose, self.encoder.media()) {
            let processor = &media.pictures;
            let [_, rows, columns] = processor.grid(height, width)?;
            let [rows, columns] = [rows, columns].map(|side| side * processor.config().patch_size);
            if rows * columns > ENLARGED.saturating_mul(width * height) {
                notes.push((
                    "enlarged",
                    format!("its {width} x {height} pixels are enlarged to {columns} x {rows}"),
                ));
            }
        }
        if header.is_turned() {
            notes.push((
                "rotated",
                "EXIF rotates it upright, as transformers does; qwen-vl-utils, LLaMA-Factory and \
                 ms-swift do not. Boxes must refer to the rotated picture"
                    .to_owned(),
            ));
        }
        if !self.options.pixels {
            return Ok((sides, notes));
        }
        let _part = self
            .budget
            .take((width as u64 * height as u64).saturating_mul(PIXEL_BYTES));
        let Contents {
            rgb,
            is_transparent,
            is_clipped,
            ..
        } = contents(&bytes, options, Wanted::Pixels)?;
        if is_transparent {
            notes.push((
                "transparent",
                "parts of it are transparent; the colours below them appear".to_owned(),
            ));
        }
        if is_clipped {
            notes.push((
                "clipped",
                "it has 16 bits of grey; all values above 255 become white, as in PIL".to_owned(),
            ));
        }
        if rgb.chunks_exact(3).all(|pixel| pixel == &rgb[..3]) && rgb.len() > 3 {
            notes.push((
                "blank",
                format!(
                    "all of its pixels are {:?}; is it the right file?",
                    &rgb[..3]
                ),
            ));
        }
        Ok((sides, notes))
    }
}
