//! The orientation of a picture, as written by its camera.

/// Orientations 1 to 8 of EXIF, as the map from a pixel of the upright picture to the stored one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orientation {
    /// True if rows of the upright picture are columns of the stored one.
    swap: bool,
    /// True if columns of the stored picture count from its right.
    mirror_x: bool,
    /// True if rows of the stored picture count from below.
    mirror_y: bool,
}

/// Rows of [`Orientation`], from 1.
const ORIENTATIONS: [[bool; 3]; 8] = [
    [false, false, false],
    [false, true, false],
    [false, true, true],
    [false, false, true],
    [true, false, false],
    [true, false, true],
    [true, true, true],
    [true, true, false],
];

/// The tag of the orientation in EXIF.
const TAG: u16 = 0x0112;

impl Orientation {
    /// The orientation of an EXIF number, or `None` if pixels do not move.
    fn from_number(number: u32) -> Option<Self> {
        let [swap, mirror_x, mirror_y] =
            *ORIENTATIONS.get(usize::try_from(number).ok()?.checked_sub(1)?)?;
        (swap || mirror_x || mirror_y).then_some(Self {
            swap,
            mirror_x,
            mirror_y,
        })
    }

    /// Finds the orientation in EXIF data, or else in XMP data, as PIL does.
    pub(super) fn find(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Option<Self> {
        let number = exif
            .and_then(from_exif)
            .or_else(|| xmp.and_then(from_xmp))?;
        Self::from_number(number)
    }

    /// Width and height of the upright picture, from those of the stored one.
    pub(super) fn turn(self, [width, height]: [usize; 2]) -> [usize; 2] {
        if self.swap {
            [height, width]
        } else {
            [width, height]
        }
    }

    /// Rotates RGB pixels upright and returns them with the new width and height.
    pub(super) fn apply(
        self,
        pixels: &[u8],
        [width, height]: [usize; 2],
        mut upright: Vec<u8>,
    ) -> (Vec<u8>, [usize; 2]) {
        let size = self.turn([width, height]);
        for y in 0..size[1] {
            for x in 0..size[0] {
                let (mut column, mut row) = if self.swap { (y, x) } else { (x, y) };
                if self.mirror_x {
                    column = width - 1 - column;
                }
                if self.mirror_y {
                    row = height - 1 - row;
                }
                let at = 3 * (row * width + column);
                upright.extend_from_slice(&pixels[at..at + 3]);
            }
        }
        (upright, size)
    }
}

/// The number of the orientation in the first directory of EXIF data.
fn from_exif(exif: &[u8]) -> Option<u32> {
    let mut data = exif;
    // Some writers add the prefix of JPEG segments, once or twice.
    for _ in 0..2 {
        data = data.strip_prefix(b"Exif\0\0").unwrap_or(data);
    }
    let little = match data.get(..4)? {
        [b'I', b'I', 42, 0] => true,
        [b'M', b'M', 0, 42] => false,
        _ => return None,
    };
    let u16_at = |at: usize| -> Option<u16> {
        let bytes = data.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little {
            u16::from_le_bytes(bytes)
        } else {
            u16::from_be_bytes(bytes)
        })
    };
    let u32_at = |at: usize| -> Option<u32> {
        let bytes = data.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(if little {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        })
    };
    let start = usize::try_from(u32_at(4)?).ok()?;
    let entries = start.checked_add(2)?;
    for entry in 0..usize::from(u16_at(start)?) {
        let at = entries.checked_add(12 * entry)?;
        if u16_at(at)? != TAG {
            continue;
        }
        return match (u16_at(at + 2)?, u32_at(at + 4)?) {
            // One SHORT, or one LONG.
            (3, 1) => u16_at(at + 8).map(u32::from),
            (4, 1) => u32_at(at + 8),
            _ => None,
        };
    }
    None
}

/// The digit after `tiff:Orientation="` or `tiff:Orientation>`.
fn from_xmp(xmp: &[u8]) -> Option<u32> {
    const KEY: &[u8] = b"tiff:Orientation";
    xmp.windows(KEY.len())
        .enumerate()
        .filter(|(_, window)| *window == KEY)
        .find_map(|(at, _)| {
            let rest = &xmp[at + KEY.len()..];
            let rest = rest
                .strip_prefix(b"=\"")
                .or_else(|| rest.strip_prefix(b">"))?;
            rest.first()
                .filter(|digit| digit.is_ascii_digit())
                .map(|digit| u32::from(digit - b'0'))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_metadata_is_no_orientation() {
        for exif in [
            &b""[..],
            b"II",
            b"II*\0\xff\xff\xff\xff",
            b"MM\0*\0\0\0\x08\xff\xff",
        ] {
            assert_eq!(from_exif(exif), None);
        }
        assert_eq!(from_xmp(b"tiff:Orientation"), None);
        assert_eq!(
            from_xmp(b"tiff:Orientation=\"x\" tiff:Orientation>6<"),
            Some(6)
        );
        assert_eq!(Orientation::from_number(0), None);
        assert_eq!(Orientation::from_number(9), None);
    }
}
