//! Converts all colour modes to 8-bit RGB like PIL.

use super::read::Alpha;

/// The format of a decoded picture's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Samples {
    /// 1 is grey, 2 grey and alpha, 3 RGB, 4 RGBA.
    pub(super) channels: usize,
    /// True if a sample has 16 bits, the higher ones first.
    pub(super) wide: bool,
    /// True if 16-bit grey is clipped at 255 rather than divided by 256.
    ///
    /// PIL keeps 16 bits only for grey, and clips them when it converts; it reads all other kinds
    /// as 8 bits.
    pub(super) clipped: bool,
    /// True if the last channel is the picture's alpha.
    pub(super) alpha: bool,
}

impl Samples {
    /// Bytes of a pixel.
    pub(super) fn pixel_bytes(self) -> usize {
        self.channels * if self.wide { 2 } else { 1 }
    }

    /// Returns two flags: true if a pixel is not opaque, and true if a level is clipped.
    pub(super) fn surprises(self, bytes: &[u8]) -> (bool, bool) {
        let level = |sample: &[u8]| match *sample {
            [first, second] => u16::from_be_bytes([first, second]),
            [value] => u16::from(value),
            _ => 0,
        };
        let sample_bytes = if self.wide { 2 } else { 1 };
        let opaque = if self.wide { u16::MAX } else { 255 };
        let mut pixels = bytes.chunks_exact(self.pixel_bytes());
        let is_transparent = |pixel: &[u8]| level(&pixel[pixel.len() - sample_bytes..]) < opaque;
        let is_clipped = |pixel: &[u8]| level(&pixel[..sample_bytes]) > 255;
        (
            self.alpha && pixels.clone().any(is_transparent),
            self.clipped && pixels.any(is_clipped),
        )
    }

    /// Appends RGB of the pixels in `bytes`.
    pub(super) fn append_rgb(self, bytes: &[u8], alpha: Alpha, rgb: &mut Vec<u8>) {
        let narrow = |sample: &[u8]| -> u8 {
            match *sample {
                [first, second] => {
                    let value = u16::from_be_bytes([first, second]);
                    if self.clipped {
                        value.min(255) as u8
                    } else {
                        (value >> 8) as u8
                    }
                }
                [value] => value,
                _ => 0,
            }
        };
        if (self.channels, self.wide) == (3, false) {
            rgb.extend_from_slice(bytes);
            return;
        }
        let sample_bytes = if self.wide { 2 } else { 1 };
        for pixel in bytes.chunks_exact(self.pixel_bytes()) {
            let mut samples = [0; 4];
            for (sample, bytes) in samples.iter_mut().zip(pixel.chunks_exact(sample_bytes)) {
                *sample = narrow(bytes);
            }
            let [first, second, third, fourth] = samples;
            let (colour, opacity) = match self.channels {
                1 => ([first; 3], 255),
                2 => ([first; 3], second),
                3 => ([first, second, third], 255),
                _ => ([first, second, third], fourth),
            };
            let opacity = if self.alpha { opacity } else { 255 };
            rgb.extend_from_slice(&match alpha {
                Alpha::Loaded | Alpha::Dropped => colour,
                Alpha::OnWhite => colour.map(|level| on_white(level, opacity)),
            });
        }
    }
}

/// Composites a colour level with an opacity on white.
///
/// # Source
/// Pillow 13.0.0, `ImagingAlphaComposite` with an opaque background: 7 fractional bits, and a
/// division by 255 that rounds to the nearest.
pub(super) fn on_white(level: u8, opacity: u8) -> u8 {
    if opacity == 0 {
        return 255;
    }
    let (level, opacity) = (u32::from(level), u32::from(opacity));
    let sum = (level * opacity + 255 * (255 - opacity)) << 7;
    let rounded = sum + (128 << 7);
    // At most 255 for all levels and opacities.
    ((((rounded >> 8) + rounded) >> 8) >> 7) as u8
}
