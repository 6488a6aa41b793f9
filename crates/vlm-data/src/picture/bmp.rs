//! What PIL makes of a BMP file other than `image`: the end of a file, and levels of 16 bits.

use std::borrow::Cow;

use crate::Result;
use crate::memory::reserve;

use super::read::truncated;

/// Codings by runs, of 8 and of 4 bits.
const RUNS_8: u32 = 1;
const RUNS_4: u32 = 2;
/// The end of a row, and that of the picture.
const RUNS_END: [u8; 4] = [0, 0, 0, 1];
/// Bytes that complete a row to words of 32 bits, at most.
const PADDING: [u8; 3] = [0; 3];

/// The file with what may lack at its end: the padding of the last row, or the marks after the last
/// run.
///
/// # Errors
/// `VlmDataError::Decode` if pixels lack
pub(super) fn completed(file: &[u8]) -> Result<Cow<'_, [u8]>> {
    let Some(layout) = Layout::read(file) else {
        return Ok(Cow::Borrowed(file)); // Its decoder names the fault.
    };
    let missing = layout.missing(file).ok_or_else(|| truncated("BMP"))?;
    if missing.is_empty() {
        return Ok(Cow::Borrowed(file));
    }
    let mut whole = reserve("the file", (file.len() + missing.len()) as u128)?;
    whole.extend_from_slice(file);
    whole.extend_from_slice(missing);
    Ok(Cow::Owned(whole))
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*file.get(at..)?.first_chunk()?))
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?))
}

/// Where a file has its pixels.
struct Layout {
    start: usize,
    width: u64,
    height: u64,
    bits: u64,
    coding: u32,
}

impl Layout {
    fn read(file: &[u8]) -> Option<Self> {
        let start = usize::try_from(u32_at(file, 10)?).ok()?;
        let (width, height, bits, coding) = if u32_at(file, 14)? == 12 {
            let [width, height] = [u16_at(file, 18)?, u16_at(file, 20)?].map(u64::from);
            (width, height, u16_at(file, 24)?, 0)
        } else {
            // The height is negative if the first row is the uppermost.
            let height = u32_at(file, 22)?.cast_signed().unsigned_abs();
            let width = u64::from(u32_at(file, 18)?);
            (
                width,
                u64::from(height),
                u16_at(file, 28)?,
                u32_at(file, 30)?,
            )
        };
        Some(Self {
            start,
            width,
            height,
            bits: u64::from(bits),
            coding,
        })
    }

    /// What to append to a file that has all pixels, or `None` for another.
    fn missing(&self, file: &[u8]) -> Option<&'static [u8]> {
        if matches!(self.coding, RUNS_8 | RUNS_4) {
            return self.has_all_runs(file).then_some(&RUNS_END);
        }
        let row_bits = self.width.checked_mul(self.bits)?;
        let padded = row_bits.div_ceil(32) * 4;
        let padding = padded - row_bits.div_ceil(8);
        let end = padded.checked_mul(self.height)?;
        let end = end.checked_add(self.start as u64)?;
        let lack = end.saturating_sub(file.len() as u64);
        if lack > padding {
            return None;
        }
        PADDING.get(..usize::try_from(lack).ok()?)
    }

    /// True if the runs have all pixels, counted as by PIL.
    fn has_all_runs(&self, file: &[u8]) -> bool {
        let Some(pixels) = self
            .width
            .checked_mul(self.height)
            .filter(|&count| count > 0)
        else {
            return false;
        };
        let (mut at, mut count, mut x) = (self.start, 0, 0);
        while count < pixels {
            let Some(&[length, code]) = file.get(at..).and_then(<[u8]>::first_chunk) else {
                return false;
            };
            at += 2;
            match (length, code) {
                (0, 0) => {
                    count = count.next_multiple_of(self.width);
                    x = 0;
                }
                (0, 1) => return false,
                (0, 2) => {
                    let Some(&[right, up]) = file.get(at..).and_then(<[u8]>::first_chunk) else {
                        return false;
                    };
                    at += 2;
                    count += u64::from(right) + u64::from(up) * self.width;
                    x = count % self.width;
                }
                (0, length) => {
                    let taken = u64::from(length).min(pixels - count);
                    let bytes = match self.coding {
                        RUNS_4 => taken.div_ceil(2),
                        _ => taken,
                    };
                    at += bytes as usize;
                    if at > file.len() {
                        return false;
                    }
                    at += at % 2;
                    count += taken;
                    x += u64::from(length);
                }
                (length, _) => {
                    let taken = u64::from(length).min(self.width.saturating_sub(x));
                    count += taken;
                    x += taken;
                }
            }
        }
        true
    }
}

/// Levels of 5 and 6 bits in a BMP of 16 bits, which PIL truncates and `image` rounds.
pub(super) fn truncate_levels(file: &[u8], rgb: &mut [u8]) {
    let u16_at = |at: usize| u16_at(file, at);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of 3 x 2 pixels of 8 bits.
    fn file(coding: u32, pixels: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 54];
        file[10] = 54;
        file[14] = 40;
        file[18] = 3;
        file[22] = 2;
        file[28] = 8;
        file[30..34].copy_from_slice(&coding.to_le_bytes());
        file.extend_from_slice(pixels);
        file
    }

    #[test]
    fn only_the_padding_of_the_last_row_may_lack() {
        let whole = file(0, &[1, 2, 3, 0, 4, 5, 6, 0]);
        for end in 58..=whole.len() {
            let read = completed(&whole[..end]);
            assert_eq!(read.is_ok(), end >= 61, "{end}");
            assert!(read.is_ok_and(|read| *read == whole) == (end >= 61));
        }
    }

    #[test]
    fn only_the_marks_after_the_last_run_may_lack() {
        let runs = [3, 7, 0, 0, 1, 8, 0, 3, 1, 2, 3, 0];
        let is_read = |runs: &[u8]| completed(&file(RUNS_8, runs)).is_ok();
        assert!(is_read(&runs));
        assert!(is_read(&runs[..10]));
        assert!(!is_read(&runs[..9]));
        assert!(!is_read(&runs[..6]));
        assert!(!is_read(&[3, 7, 0, 1]));
        assert!(is_read(&[9, 7, 0, 0, 9, 8]));
    }
}
