//! Where each coefficient of the rotation is found in a token's angles.
//!
//! The kernel computes `y[k] = a[k]·x[k] ± b[k]·x[partner(k)]` over channel segments. Pairing,
//! direction and shared or separate angles differ only in these tables.

use super::rotary::{Direction, LaneMap, Pairing, Rotary};

/// f32 values in the 32 bytes to which the unified buffer is aligned.
pub(super) const F32_UNIT: u32 = 8;

/// The cut of a rotated row into segments of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segments {
    pub(super) count: u32,
    pub(super) length: u32,
    /// Length rounded up to 32 bytes of the element type.
    pub(super) pitch: u32,
}

impl Segments {
    pub(super) fn of(rotary: &Rotary, element_bytes: u32) -> Self {
        let count = match rotary.pairing() {
            Pairing::Half | Pairing::InterleaveHalf => 2,
            Pairing::Quarter => 4,
            Pairing::Adjacent => 1,
        };
        let length = rotary.rotary_dim() / count;
        Self {
            count,
            length,
            pitch: length.next_multiple_of(32 / element_bytes),
        }
    }

    pub(super) fn row_pitch(self) -> u32 {
        self.count * self.pitch
    }

    /// Place of each member of pair `j` in a row: first member, second member.
    pub(super) fn members(self, j: u32) -> [u32; 2] {
        if self.count == 1 {
            return [2 * j, 2 * j + 1];
        }
        let (block, place) = (j / self.length, j % self.length);
        [
            2 * block * self.pitch + place,
            (2 * block + 1) * self.pitch + place,
        ]
    }
}

/// The loaded angles of one token in the unified buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RawAngles {
    /// f32 of one token.
    pub(super) pitch: u32,
    /// Runs of a token's row, and their length (per-token angles).
    pub(super) pieces: u32,
    pub(super) length: u32,
    /// Columns of each axis (table): start and length.
    pub(super) axis_start: [u32; 4],
    pub(super) axis_length: [u32; 4],
}

/// Byte offsets of values to gather, and their signs.
pub(super) type Gathered = (Vec<u32>, Vec<f32>);

/// Coefficients of one token: where they are, and how they get there.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Coefficients {
    pub(super) raw: RawAngles,
    pub(super) pitch: u32,
    /// Byte offsets and signs, if the loaded angles are not the coefficients already.
    pub(super) gather: Option<Gathered>,
    pub(super) a_offset: [u32; 4],
    pub(super) b_offset: [u32; 4],
    pub(super) b_negative: u32,
}

impl Coefficients {
    pub(super) fn of(
        rotary: &Rotary,
        segments: Segments,
        direction: Direction,
        table: Option<&LaneMap>,
    ) -> Self {
        let width = rotary.angle_width();
        let adjacent = segments.count == 1;
        // Adjacent pairs gather their angles anyway; others need each segment aligned.
        let run = if adjacent { 2 * width } else { segments.length };
        let raw = table.map_or_else(|| per_token(width, run), from_table);
        let sources = |lane: u32, sine: bool| -> u32 {
            table.map_or(u32::from(sine) * width + lane, |map| {
                table_place(map, &raw, lane, sine)
            })
        };
        let second_lane = |j: u32| {
            if rotary.is_per_channel() {
                rotary.pairs() + j
            } else {
                j
            }
        };
        if adjacent {
            let half = rotary.rotary_dim().next_multiple_of(F32_UNIT);
            let mut offsets = vec![0; 2 * half as usize];
            let mut signs = vec![1.0; 2 * half as usize];
            for j in 0..rotary.pairs() {
                let (cos, sin) = ([j, second_lane(j)], [j, second_lane(j)]);
                // b of the first and the second channel: which member's sine, which sign.
                let b = match direction {
                    Direction::Forward => [(sin[0], -1.0), (sin[1], 1.0)],
                    Direction::Adjoint => [(sin[1], 1.0), (sin[0], -1.0)],
                };
                for member in 0..2 {
                    let channel = (2 * j) as usize + member;
                    offsets[channel] = 4 * sources(cos[member], false);
                    offsets[half as usize + channel] = 4 * sources(b[member].0, true);
                    signs[half as usize + channel] = b[member].1;
                }
            }
            return Self {
                raw,
                pitch: 2 * half,
                gather: Some((offsets, signs)),
                a_offset: [0; 4],
                b_offset: [half, 0, 0, 0],
                b_negative: 0,
            };
        }
        let padded = segments.length.next_multiple_of(F32_UNIT);
        let groups = width / segments.length;
        let gather = table.is_some().then(|| {
            let mut offsets = vec![0; (2 * groups * padded) as usize];
            for lane in 0..width {
                let place = lane / segments.length * padded + lane % segments.length;
                offsets[place as usize] = 4 * sources(lane, false);
                offsets[(groups * padded + place) as usize] = 4 * sources(lane, true);
            }
            let signs = vec![1.0; offsets.len()];
            (offsets, signs)
        });
        let blocks = segments.count / 2;
        let group_of = |block: u32, member: u32| {
            block
                + if rotary.is_per_channel() {
                    member * blocks
                } else {
                    0
                }
        };
        let (mut a_offset, mut b_offset, mut b_negative) = ([0; 4], [0; 4], 0);
        for block in 0..blocks {
            for member in 0..2 {
                let k = (2 * block + member) as usize;
                // Forward, each channel uses its own sine; adjoint, its partner's.
                let sine_of = if direction == Direction::Forward {
                    member
                } else {
                    1 - member
                };
                a_offset[k] = padded * group_of(block, member);
                b_offset[k] = padded * (groups + group_of(block, sine_of));
                if sine_of == 0 {
                    b_negative |= 1 << k;
                }
            }
        }
        let pitch = if table.is_some() {
            2 * groups * padded
        } else {
            raw.pitch
        };
        Self {
            raw,
            pitch,
            gather,
            a_offset,
            b_offset,
            b_negative,
        }
    }
}

/// A row of `2 * width` angles, cut into runs of `run` that start aligned.
fn per_token(width: u32, run: u32) -> RawAngles {
    let (pieces, length) = if run.is_multiple_of(F32_UNIT) {
        (1, 2 * width)
    } else {
        (2 * width / run, run)
    };
    RawAngles {
        pitch: pieces * length.next_multiple_of(F32_UNIT),
        pieces,
        length,
        axis_start: [0; 4],
        axis_length: [0; 4],
    }
}

/// For each axis, the cosines of its columns and then the sines.
fn from_table(map: &LaneMap) -> RawAngles {
    let (mut axis_start, mut axis_length) = ([0; 4], [0; 4]);
    for axis in 0..map.axes() {
        let columns = map.columns_of(axis);
        axis_start[axis as usize] = columns.start;
        axis_length[axis as usize] = columns.end - columns.start;
    }
    let pitch = axis_length
        .iter()
        .map(|length: &u32| 2 * length.next_multiple_of(F32_UNIT))
        .sum();
    RawAngles {
        pitch,
        pieces: 0,
        length: 0,
        axis_start,
        axis_length,
    }
}

fn table_place(map: &LaneMap, raw: &RawAngles, lane: u32, sine: bool) -> u32 {
    let lane = map.lanes()[lane as usize];
    let axis = lane.axis as usize;
    let padded = |length: u32| length.next_multiple_of(F32_UNIT);
    let before: u32 = raw.axis_length[..axis]
        .iter()
        .map(|&length| 2 * padded(length))
        .sum();
    before + u32::from(sine) * padded(raw.axis_length[axis]) + lane.column - raw.axis_start[axis]
}

/// Which source channel each place of a row takes, in bytes; `None` where rows keep their order.
///
/// `incoming` permutes on the way into the rotation, otherwise on the way out.
pub(super) fn permutation(
    pairing: Pairing,
    segments: Segments,
    rotary_dim: u32,
    element_bytes: u32,
    incoming: bool,
) -> Option<Vec<u32>> {
    let mut offsets = vec![0; segments.row_pitch() as usize];
    match pairing {
        Pairing::Adjacent if element_bytes == 4 => {
            for channel in 0..rotary_dim {
                offsets[channel as usize] = element_bytes * (channel ^ 1);
            }
        }
        Pairing::InterleaveHalf => {
            for j in 0..rotary_dim / 2 {
                for (member, place) in segments.members(j).into_iter().enumerate() {
                    let interleaved = 2 * j + member as u32;
                    let (to, from) = if incoming {
                        (place, interleaved)
                    } else {
                        (interleaved, place)
                    };
                    offsets[to as usize] = element_bytes * from;
                }
            }
        }
        _ => return None,
    }
    Some(offsets)
}

/// Terms of the angle gradient: for each, byte offsets into the channel sums A | B, and signs.
pub(super) fn angle_gradient_terms(rotary: &Rotary, segments: Segments) -> (Vec<Gathered>, u32) {
    let width = rotary.angle_width();
    let pitch = (2 * width).next_multiple_of(F32_UNIT);
    let sums_b = segments.row_pitch();
    let blank = || (vec![0; pitch as usize], vec![0.0; pitch as usize]);
    let mut terms = if rotary.is_per_channel() {
        vec![blank()]
    } else {
        vec![blank(), blank()]
    };
    for j in 0..rotary.pairs() {
        let members = segments.members(j);
        for (member, channel) in members.into_iter().enumerate() {
            let (term, lane) = if rotary.is_per_channel() {
                (0, member as u32 * rotary.pairs() + j)
            } else {
                (member, j)
            };
            let (offsets, signs) = &mut terms[term];
            offsets[lane as usize] = 4 * channel;
            signs[lane as usize] = 1.0;
            offsets[(width + lane) as usize] = 4 * (sums_b + channel);
            signs[(width + lane) as usize] = if member == 0 { -1.0 } else { 1.0 };
        }
    }
    (terms, pitch)
}
