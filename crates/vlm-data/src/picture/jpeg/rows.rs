//! Rows of pixels from the samples of the components: upsampling and colours.
//!
//! Samples are kept for the rows of a unit, and a few above. A row of pixels needs the row of
//! samples below, too, so that the last rows of a unit wait for the next one.
//!
//! # Source
//! libjpeg-turbo's documentation of "fancy upsampling", and jdsample.c for its rounding: a sample is
//! weighted 3 to 1 with the nearer neighbour, along rows and columns, and the rounding alternates;
//! ITU-T T.871 (JFIF) for the colours, with 16 fractional bits; Pillow 13.0.0, `cmyk2rgb` of
//! Convert.c

use std::ops::Range;

use crate::Result;
use crate::memory::zeros;

use super::fault;
use super::segments::{Colours, Frame};

/// How a component becomes as large as the picture.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Upsampling {
    /// Each sample is repeated so often, across and down.
    Repeated([usize; 2]),
    /// Triangle filter along rows.
    Wide,
    /// Triangle filter along columns.
    High,
    /// Both.
    Both,
}

impl Upsampling {
    fn of(factors: [usize; 2], largest: [usize; 2], width: usize) -> Result<Self> {
        let ratio = [0, 1].map(|axis| {
            largest[axis]
                .is_multiple_of(factors[axis])
                .then(|| largest[axis] / factors[axis])
        });
        let [Some(across), Some(down)] = ratio else {
            return Err(fault(format!(
                "its sampling of {factors:?} to {largest:?} is not a whole ratio"
            )));
        };
        Ok(match [across, down] {
            [2, 1] if width > 2 => Self::Wide,
            [1, 2] => Self::High,
            [2, 2] if width > 2 => Self::Both,
            _ => Self::Repeated([across, down]),
        })
    }
}

/// Samples of a component: a part of its rows.
struct Plane {
    samples: Vec<u8>,
    /// The row that the samples begin with.
    first: usize,
    stride: usize,
    /// Width and height of the component.
    size: [usize; 2],
    /// Rows for each unit of the largest factor.
    factor: usize,
    upsampling: Upsampling,
    /// The upsampled row.
    wide: Vec<u8>,
    /// Weighted sums of two rows, with one sample more at both ends.
    sums: Vec<u16>,
}

impl Plane {
    /// The samples of a row, or of the nearest one that the component has.
    fn row(&self, row: usize) -> &[u8] {
        let row = row.min(self.size[1] - 1).saturating_sub(self.first);
        &self.samples[row * self.stride..][..self.size[0]]
    }

    /// The two rows that row `y` of twice as many lies between, the nearer one first.
    fn pair(&self, y: usize) -> [&[u8]; 2] {
        let near = y / 2;
        let far = if y.is_multiple_of(2) {
            near.saturating_sub(1)
        } else {
            near + 1
        };
        [self.row(near), self.row(far)]
    }
}

/// The picture under construction.
pub(super) struct Rows {
    width: usize,
    height: usize,
    /// The largest vertical factor.
    largest: usize,
    planes: Vec<Plane>,
    colours: Colours,
    rgb: Vec<u8>,
    /// Rows of pixels that are complete.
    done: usize,
}

impl Rows {
    pub(super) fn new(frame: &Frame, colours: Colours) -> Result<Self> {
        let mut planes = Vec::new();
        for component in &frame.components {
            let factor = component.factors[1];
            let stride = 8 * component.padded[0];
            let upsampling = Upsampling::of(component.factors, frame.largest, component.size[0])?;
            // The rows of a unit, those that wait, and one above.
            let rows = 8 * factor + factor + 1;
            planes.push(Plane {
                samples: zeros("rows of a picture", rows as u128 * stride as u128)?,
                first: 0,
                stride,
                size: component.size,
                factor,
                upsampling,
                wide: vec![0; stride * frame.largest[0]],
                sums: vec![0; stride + 2],
            });
        }
        let pixels = frame.width as u128 * frame.height as u128;
        Ok(Self {
            width: frame.width,
            height: frame.height,
            largest: frame.largest[1],
            planes,
            colours,
            rgb: zeros("the picture", 3 * pixels)?,
            done: 0,
        })
    }

    /// Writes a block of samples at `column` and `row` of a component's blocks.
    #[inline]
    pub(super) fn write(
        &mut self,
        component: usize,
        [column, row]: [usize; 2],
        block: &[[u8; 8]; 8],
    ) {
        let plane = &mut self.planes[component];
        let start = (8 * row - plane.first) * plane.stride + 8 * column;
        let rows = plane.samples[start..].chunks_mut(plane.stride);
        for (out, row) in rows.zip(block) {
            out[..8].copy_from_slice(row);
        }
    }

    /// Makes pixels of a row of units, whose samples are complete.
    pub(super) fn finish_units(&mut self, row: usize) {
        let end = 8 * (row + 1) * self.largest;
        let end = if end >= self.height {
            self.height
        } else {
            end - self.largest
        };
        self.finish_rows(self.done..end);
        self.done = end;
        for plane in &mut self.planes {
            let keep = (end / self.largest * plane.factor).saturating_sub(1);
            let start = (keep - plane.first) * plane.stride;
            let start = start.min(plane.samples.len());
            plane.samples.copy_within(start.., 0);
            plane.first = keep;
        }
    }

    #[allow(unsafe_code, reason = "a function is compiled for AVX2")]
    fn finish_rows(&mut self, rows: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was detected, the only condition of `finish_rows_avx2`.
            return unsafe { self.finish_rows_avx2(rows) };
        }
        rows.for_each(|y| self.finish_row(y));
    }

    /// The same, compiled for AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn finish_rows_avx2(&mut self, rows: Range<usize>) {
        for y in rows {
            self.finish_row(y);
        }
    }

    #[inline(always)]
    fn finish_row(&mut self, y: usize) {
        for plane in &mut self.planes {
            upsample(plane, y);
        }
        let mut rows: [&[u8]; 4] = [&[]; 4];
        for (row, plane) in rows.iter_mut().zip(&self.planes) {
            let whole = match plane.upsampling {
                Upsampling::Repeated([1, 1]) => plane.row(y),
                Upsampling::Repeated([1, down]) => plane.row(y / down),
                _ => &plane.wide,
            };
            *row = &whole[..self.width];
        }
        let pixels = self.rgb.as_chunks_mut::<3>().0;
        let out = &mut pixels[y * self.width..][..self.width];
        write_colours(rows, self.colours, out);
    }

    /// The pixels, `[height, width, 3]`.
    pub(super) fn into_rgb(self) -> Vec<u8> {
        self.rgb
    }
}

/// Computes the upsampled row `y` of a component.
#[inline(always)]
fn upsample(plane: &mut Plane, y: usize) {
    let mut wide = std::mem::take(&mut plane.wide);
    let mut sums = std::mem::take(&mut plane.sums);
    let width = plane.size[0];
    match plane.upsampling {
        Upsampling::Repeated([1, _]) => {}
        Upsampling::Repeated([across, down]) => {
            let row = plane.row(y / down);
            for (out, &sample) in wide.chunks_exact_mut(across).zip(row) {
                out.fill(sample);
            }
        }
        Upsampling::High => {
            let [near, far] = plane.pair(y);
            // Rounded down above a sample, and up below.
            let half = 1 + (y % 2) as u16;
            for ((out, &near), &far) in wide.iter_mut().zip(near).zip(far) {
                *out = ((3 * u16::from(near) + u16::from(far) + half) >> 2) as u8;
            }
        }
        Upsampling::Wide => {
            for (sum, &sample) in sums[1..].iter_mut().zip(plane.row(y)) {
                *sum = u16::from(sample);
            }
            widen::<2>(&mut sums[..width + 2], [1, 2], &mut wide);
        }
        Upsampling::Both => {
            let [near, far] = plane.pair(y);
            for ((sum, &near), &far) in sums[1..].iter_mut().zip(near).zip(far) {
                *sum = 3 * u16::from(near) + u16::from(far);
            }
            widen::<4>(&mut sums[..width + 2], [8, 7], &mut wide);
        }
    }
    plane.wide = wide;
    plane.sums = sums;
}

/// Doubles a row by the triangle filter. The first and the last of `sums` are set here.
#[inline(always)]
fn widen<const SHIFT: u32>(sums: &mut [u16], half: [u16; 2], out: &mut [u8]) {
    let last = sums.len() - 1;
    sums[0] = sums[1];
    sums[last] = sums[last - 1];
    let (left, centre, right) = (&sums[..last - 1], &sums[1..last], &sums[2..]);
    let pairs = out.as_chunks_mut::<2>().0;
    for (((out, &left), &centre), &right) in pairs.iter_mut().zip(left).zip(centre).zip(right) {
        *out = [
            ((3 * centre + left + half[0]) >> SHIFT) as u8,
            ((3 * centre + right + half[1]) >> SHIFT) as u8,
        ];
    }
}

/// Factors of the colours with 16 fractional bits.
const RED: i32 = 91_881; // 1.402
const GREEN: [i32; 2] = [22_554, 46_802]; // 0.344136, 0.714136
const BLUE: i32 = 116_130; // 1.772

/// RGB of luma and two colour differences.
#[inline(always)]
fn rgb([luma, blue, red]: [u8; 3]) -> [u8; 3] {
    const HALF: i32 = 1 << 15;
    let (luma, blue, red) = (i32::from(luma), i32::from(blue) - 128, i32::from(red) - 128);
    let parts = [
        RED * red + HALF,
        HALF - GREEN[0] * blue - GREEN[1] * red,
        BLUE * blue + HALF,
    ];
    let level = |part: i32| (luma + (part >> 16)).clamp(0, 255) as u8;
    [level(parts[0]), level(parts[1]), level(parts[2])]
}

/// RGB of inks, of which Adobe's files and thus Pillow have the complement: `paper` is the
/// complement of black.
fn on_paper(inks: [u8; 3], paper: u8) -> [u8; 3] {
    inks.map(|ink| {
        let product = u32::from(ink) * u32::from(paper) + 128;
        paper.saturating_sub((((product >> 8) + product) >> 8) as u8)
    })
}

/// Writes a row of pixels.
#[inline(always)]
fn write_colours([a, b, c, d]: [&[u8]; 4], colours: Colours, out: &mut [[u8; 3]]) {
    let three = || a.iter().zip(b).zip(c).map(|((&a, &b), &c)| [a, b, c]);
    match colours {
        Colours::Grey => {
            for (out, &level) in out.iter_mut().zip(a) {
                *out = [level; 3];
            }
        }
        Colours::Rgb | Colours::Cmyk => {
            for (out, three) in out.iter_mut().zip(three()) {
                *out = three;
            }
        }
        Colours::Ycc | Colours::Ycck => {
            for (out, three) in out.iter_mut().zip(three()) {
                *out = rgb(three);
            }
        }
    }
    if matches!(colours, Colours::Cmyk | Colours::Ycck) {
        for (out, &paper) in out.iter_mut().zip(d) {
            let inks = if colours == Colours::Cmyk {
                out.map(|ink| 255 - ink)
            } else {
                *out
            };
            *out = on_paper(inks, paper);
        }
    }
}
