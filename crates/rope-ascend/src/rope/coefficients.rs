//! The place of each rotation coefficient in a token's angles.
//!
//! The kernel computes `y[k] = a[k]·x[k] ± b[k]·x[partner(k)]` over channel segments. Pairing,
//! direction and shared or separate angles differ only in these tables.

use rope_core::{Direction, Geometry, MatrixForm, Pairing};

use crate::error::{AscendError, Result};

/// f32 values in the 32 bytes to which the unified buffer is aligned.
const F32_UNIT: u32 = 8;

/// The longest head within the strides of a vector instruction.
const MAX_HEAD_DIM: usize = 1024;

/// A [`Geometry`] in the kernels' 32 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channels {
    pub(super) geometry: Geometry,
    pub(super) pairing: Pairing,
    pub(super) per_channel: bool,
    pub(super) head_dim: u32,
    pub(super) rotary_dim: u32,
    pub(super) rotary_offset: u32,
    pub(super) pairs: u32,
    pub(super) lanes: u32,
}

impl Channels {
    /// # Errors
    /// [`AscendError::KernelLimit`] for heads of more than 1024 channels.
    pub(super) fn new(geometry: Geometry) -> Result<Self> {
        let head_dim = geometry.head_dim();
        if head_dim > MAX_HEAD_DIM {
            return Err(AscendError::KernelLimit {
                what: "channels of a head",
                limit: MAX_HEAD_DIM,
                found: head_dim,
            });
        }
        // The other numbers count channels of the head, so they fit as well.
        let narrow = |channels: usize| channels as u32;
        Ok(Self {
            geometry,
            pairing: geometry.pairing(),
            per_channel: geometry.per_channel(),
            head_dim: narrow(head_dim),
            rotary_dim: narrow(geometry.rotary_dim()),
            rotary_offset: narrow(geometry.rotary_offset()),
            pairs: narrow(geometry.pairs()),
            lanes: narrow(geometry.lane_count()),
        })
    }

    /// Lane of the second member of pair `j`; that of the first is `j`.
    fn second_lane(self, j: u32) -> u32 {
        if self.per_channel { self.pairs + j } else { j }
    }
}

/// The division of a rotated row into segments of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segments {
    pub(super) count: u32,
    pub(super) length: u32,
    /// Distance of the segments: a row in a slot, and a segment in f32, is a multiple of 32 bytes.
    pub(super) pitch: u32,
}

impl Segments {
    /// `apart`: whether the arithmetic sees two segments, the first members of the pairs and the
    /// second ones, where a row in a slot has one or four.
    pub(super) fn of(channels: Channels, element_bytes: u32, apart: bool) -> Self {
        let unit = 32 / element_bytes;
        let count = match channels.pairing {
            Pairing::Half | Pairing::InterleaveHalf => 2,
            Pairing::Quarter => 4,
            Pairing::Adjacent => 1,
        };
        let length = channels.rotary_dim / count;
        let pitch = length.next_multiple_of(unit);
        if apart {
            return Self {
                count: 2,
                length: channels.pairs,
                pitch: count * pitch / 2,
            };
        }
        Self {
            count,
            length,
            pitch,
        }
    }

    pub(super) fn row_pitch(self) -> u32 {
        self.count * self.pitch
    }

    /// Offset of each member of pair `j` in a row: first member, second member.
    fn members(self, j: u32) -> [u32; 2] {
        if self.count == 1 {
            return [2 * j, 2 * j + 1];
        }
        let (block, offset) = (j / self.length, j % self.length);
        [2 * block, 2 * block + 1].map(|segment| segment * self.pitch + offset)
    }
}

/// Byte offsets of values to gather, and their signs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gathered {
    offsets: Vec<u32>,
    signs: Vec<f32>,
}

impl Gathered {
    fn new(len: u32, sign: f32) -> Self {
        Self {
            offsets: vec![0; len as usize],
            signs: vec![sign; len as usize],
        }
    }

    /// Value `at` comes from f32 number `from`.
    fn set(&mut self, at: u32, from: u32, sign: f32) {
        self.offsets[at as usize] = 4 * from;
        self.signs[at as usize] = sign;
    }

    /// The byte offsets alone.
    pub(super) fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The words of the kernel's map: offsets, then signs.
    pub(super) fn words(&self) -> impl Iterator<Item = u32> + '_ {
        let signs = self.signs.iter().map(|sign| sign.to_bits());
        self.offsets.iter().copied().chain(signs)
    }
}

/// The coefficients of one token: their place and the way they are loaded.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Coefficients {
    /// f32 of one token's angles in the unified buffer.
    pub(super) raw_pitch: u32,
    /// Runs of a token's row of angles, and their length.
    pub(super) pieces: u32,
    pub(super) length: u32,
    /// f32 of one token's coefficients.
    pub(super) pitch: u32,
    /// Offsets and signs, if the loaded angles are not the coefficients already.
    pub(super) gather: Option<Gathered>,
    pub(super) a_offset: [u32; 4],
    pub(super) b_offset: [u32; 4],
    pub(super) b_negative: u32,
}

impl Coefficients {
    pub(super) fn of(channels: Channels, segments: Segments, direction: Direction) -> Self {
        if segments.count == 1 {
            Self::adjacent(channels, direction)
        } else {
            Self::split(channels, segments, direction)
        }
    }

    /// A row of `2 * lanes` angles, cut into runs of `run` that start aligned.
    fn cut(lanes: u32, run: u32) -> Self {
        let (pieces, length) = if run.is_multiple_of(F32_UNIT) {
            (1, 2 * lanes)
        } else {
            (2 * lanes / run, run)
        };
        let pitch = pieces * length.next_multiple_of(F32_UNIT);
        Self {
            raw_pitch: pitch,
            pieces,
            length,
            pitch,
            gather: None,
            a_offset: [0; 4],
            b_offset: [0; 4],
            b_negative: 0,
        }
    }

    /// Each segment's coefficients are a run of the angles.
    fn split(channels: Channels, segments: Segments, direction: Direction) -> Self {
        let mut coefficients = Self::cut(channels.lanes, segments.length);
        let padded = segments.length.next_multiple_of(F32_UNIT);
        let groups = channels.lanes / segments.length;
        let blocks = segments.count / 2;
        let separate = if channels.per_channel { blocks } else { 0 };
        for segment in 0..segments.count {
            let (block, member) = (segment / 2, segment % 2);
            // Forward, each channel uses its own sine; adjoint, its partner's.
            let sine_of = match direction {
                Direction::Forward => member,
                Direction::Adjoint => 1 - member,
            };
            let k = segment as usize;
            coefficients.a_offset[k] = padded * (block + member * separate);
            coefficients.b_offset[k] = padded * (groups + block + sine_of * separate);
            coefficients.b_negative |= u32::from(sine_of == 0) << k;
        }
        coefficients
    }

    /// A cosine and a sine for each channel, without signs: those are in the matrix.
    pub(super) fn wide(channels: Channels, form: &MatrixForm) -> Self {
        let half = channels.rotary_dim.next_multiple_of(F32_UNIT);
        let mut gather = Gathered::new(2 * half, 1.0);
        let lanes = form.cos_lanes().iter().zip(form.sin_lanes());
        for (channel, (cos, sin)) in (0..).zip(lanes) {
            gather.set(channel, *cos, 1.0);
            gather.set(half + channel, channels.lanes + sin, 1.0);
        }
        Self {
            pitch: 2 * half,
            gather: Some(gather),
            b_offset: [half, 0, 0, 0],
            ..Self::cut(channels.lanes, 2 * channels.lanes)
        }
    }

    /// Neighbouring channels share a row: a Gather spreads the angles over them.
    fn adjacent(channels: Channels, direction: Direction) -> Self {
        let half = channels.rotary_dim.next_multiple_of(F32_UNIT);
        let mut gather = Gathered::new(2 * half, 1.0);
        for j in 0..channels.pairs {
            let lanes = [j, channels.second_lane(j)];
            // b of the first and the second channel: which member's sine, which sign.
            let b = match direction {
                Direction::Forward => [(lanes[0], -1.0), (lanes[1], 1.0)],
                Direction::Adjoint => [(lanes[1], 1.0), (lanes[0], -1.0)],
            };
            for (member, (sine, sign)) in b.into_iter().enumerate() {
                let channel = 2 * j + member as u32;
                gather.set(channel, lanes[member], 1.0);
                gather.set(half + channel, channels.lanes + sine, sign);
            }
        }
        Self {
            pitch: 2 * half,
            gather: Some(gather),
            b_offset: [half, 0, 0, 0],
            ..Self::cut(channels.lanes, 2 * channels.lanes)
        }
    }
}

/// The source channel of each f32 of a row, in bytes; `None` where rows keep their order.
///
/// `incoming` permutes on the way into the rotation, otherwise on the way out.
pub(super) fn permutation(
    channels: Channels,
    segments: Segments,
    incoming: bool,
) -> Option<Vec<u32>> {
    const BYTES: u32 = size_of::<f32>() as u32;
    let mut offsets = vec![0; segments.row_pitch() as usize];
    match channels.pairing {
        Pairing::Adjacent => {
            for channel in 0..channels.rotary_dim {
                offsets[channel as usize] = BYTES * (channel ^ 1);
            }
        }
        Pairing::InterleaveHalf => {
            for j in 0..channels.pairs {
                for (member, offset) in segments.members(j).into_iter().enumerate() {
                    let interleaved = 2 * j + member as u32;
                    let (to, from) = if incoming {
                        (offset, interleaved)
                    } else {
                        (interleaved, offset)
                    };
                    offsets[to as usize] = BYTES * from;
                }
            }
        }
        Pairing::Half | Pairing::Quarter => return None,
    }
    Some(offsets)
}

/// Terms of the angle gradient, taken from the channel sums A | B, and the f32 of a term.
pub(super) fn angle_gradient_terms(channels: Channels, segments: Segments) -> (Vec<Gathered>, u32) {
    let pitch = (2 * channels.lanes).next_multiple_of(F32_UNIT);
    let sums_b = segments.row_pitch();
    let terms = if channels.per_channel { 1 } else { 2 };
    let mut terms = vec![Gathered::new(pitch, 0.0); terms];
    for j in 0..channels.pairs {
        for (member, channel) in segments.members(j).into_iter().enumerate() {
            let (term, lane) = if channels.per_channel {
                (0, member as u32 * channels.pairs + j)
            } else {
                (member, j)
            };
            let sign = if member == 0 { -1.0 } else { 1.0 };
            terms[term].set(lane, channel, 1.0);
            terms[term].set(channels.lanes + lane, sums_b + channel, sign);
        }
    }
    (terms, pitch)
}
