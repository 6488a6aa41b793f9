//! Coefficients that a progressive file lacks, predicted from the mean levels of the blocks around.
//!
//! A prediction is (first quant / own quant) x the sum of weights times the first coefficients of 5
//! x 5 blocks / 256, rounded, and within the bits that the file has not sent. Where the file has no
//! coefficient but the first, the first is smoothed, too.
//!
//! # Source
//! ITU-T T.81 (1992), K.8, with the larger window of libjpeg-turbo 2.1 and its weights

use super::segments::{BLOCK, Frame, ORDER};

/// Coefficients whose progress is followed: the first, and those that are predicted.
pub(super) const FOLLOWED: usize = 10;

/// Weights of 5 x 5 blocks.
type Window = [[i16; 5]; 5];

const NONE: [i16; 5] = [0; 5];

/// Coefficients 1 to 9, in the order of the file, if the file has the first alone.
const ALONE: [Window; FOLLOWED - 1] = [
    [
        [-1, -1, 0, 1, 1],
        [-3, 13, 0, -13, 3],
        [-3, 38, 0, -38, 3],
        [-3, 13, 0, -13, 3],
        [-1, -1, 0, 1, 1],
    ],
    [
        [-1, -3, -3, -3, -1],
        [-1, 13, 38, 13, -1],
        NONE,
        [1, -13, -38, -13, 1],
        [1, 3, 3, 3, 1],
    ],
    [
        [0, 0, 1, 0, 0],
        [0, 2, 7, 2, 0],
        [0, -5, -14, -5, 0],
        [0, 2, 7, 2, 0],
        [0, 0, 1, 0, 0],
    ],
    [
        [-1, 0, 0, 0, 1],
        [0, 9, 0, -9, 0],
        NONE,
        [0, -9, 0, 9, 0],
        [1, 0, 0, 0, -1],
    ],
    [
        NONE,
        [0, 2, -5, 2, 0],
        [1, 7, -14, 7, 1],
        [0, 2, -5, 2, 0],
        NONE,
    ],
    [
        NONE,
        [0, 1, 0, -1, 0],
        [0, 2, 0, -2, 0],
        [0, 1, 0, -1, 0],
        NONE,
    ],
    [NONE, [0, 1, -3, 1, 0], NONE, [0, -1, 3, -1, 0], NONE],
    [
        NONE,
        [0, 1, 0, -1, 0],
        [0, -3, 0, 3, 0],
        [0, 1, 0, -1, 0],
        NONE,
    ],
    [NONE, [0, 1, 2, 1, 0], NONE, [0, -1, -2, -1, 0], NONE],
];

/// The first coefficient, if the file has it alone.
const FIRST: Window = [
    [-2, -6, -8, -6, -2],
    [-6, 6, 42, 6, -6],
    [-8, 42, 152, 42, -8],
    [-6, 6, 42, 6, -6],
    [-2, -6, -8, -6, -2],
];

/// Coefficients 1 to 5, if the file has others.
const AMONG: [Window; 5] = [
    [NONE, NONE, [-7, 50, 0, -50, 7], NONE, NONE],
    [
        [0, 0, -7, 0, 0],
        [0, 0, 50, 0, 0],
        NONE,
        [0, 0, -50, 0, 0],
        [0, 0, 7, 0, 0],
    ],
    [
        [0, 0, -1, 0, 0],
        [0, 0, 13, 0, 0],
        [0, 0, -24, 0, 0],
        [0, 0, 13, 0, 0],
        [0, 0, -1, 0, 0],
    ],
    [
        [0, -1, 0, 1, 0],
        [-1, 10, 0, -10, 1],
        NONE,
        [1, -10, 0, 10, -1],
        [0, 1, 0, -1, 0],
    ],
    [NONE, NONE, [-1, 13, -24, 13, -1], NONE, NONE],
];

/// The lowest bit of each coefficient that the scans have sent, or -1.
#[derive(Clone)]
pub(super) struct Progress {
    pub(super) bits: [i32; BLOCK],
    /// Those before the last scan.
    before: [i32; FOLLOWED],
    scans: usize,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            bits: [-1; BLOCK],
            before: [-1; FOLLOWED],
            scans: 0,
        }
    }

    /// Notes a scan, the `number`-th of the file from 1, of a band down to a bit.
    pub(super) fn note(&mut self, number: usize, [first, last]: [usize; 2], low: u32) {
        for (place, before) in self.before.iter_mut().enumerate().skip(first.min(1)) {
            *before = if number > 1 { self.bits[place] } else { 0 };
        }
        self.bits[first..=last].fill(low as i32);
        self.scans = number;
    }
}

/// The components' prediction.
pub(super) struct Smoothing {
    progress: Vec<[[i32; FOLLOWED]; 2]>,
    /// The last row of units that the last scan sent.
    last_good: usize,
}

impl Smoothing {
    /// `None` if all coefficients are known, or the quantization of one is not.
    pub(super) fn new(
        frame: &Frame,
        progress: &[Progress],
        scans: usize,
        last_good: usize,
    ) -> Option<Self> {
        let followed = || ORDER[..FOLLOWED].iter().map(|&place| usize::from(place));
        let is_known = frame.components.iter().all(|component| {
            component
                .quant
                .is_some_and(|quant| followed().all(|place| quant[place] != 0))
        });
        let is_useful = progress
            .iter()
            .any(|one| one.bits[1..FOLLOWED].iter().any(|&bits| bits != 0));
        if !is_known || !is_useful || progress.iter().any(|one| one.bits[0] < 0) {
            return None;
        }
        let latched = progress.iter().map(|one| {
            let now = std::array::from_fn(|k| one.bits[k]);
            [
                now,
                if scans > 1 {
                    one.before
                } else {
                    [-1; FOLLOWED]
                },
            ]
        });
        Some(Self {
            progress: latched.collect(),
            last_good,
        })
    }

    /// Predicts the coefficients of a block at `column` and `row` of a component's `blocks`.
    pub(super) fn predict(
        &self,
        frame: &Frame,
        index: usize,
        blocks: &[[i16; BLOCK]],
        [column, row]: [usize; 2],
    ) -> [i16; BLOCK] {
        let component = &frame.components[index];
        let width = component.padded[0];
        let mut block = blocks[row * width + column];
        let Some(quant) = component.quant else {
            return block;
        };
        let unit_row = row / component.factors[1];
        let bits = self.progress[index][usize::from(unit_row > self.last_good)];
        let is_alone = bits[1..].iter().all(|&bits| bits == -1);

        let rows = neighbours(frame, index, row);
        let columns = |offset: usize| {
            (column + offset)
                .saturating_sub(2)
                .min(component.blocks[0] - 1)
        };
        let window: [[i64; 5]; 5] = rows.map(|row| {
            std::array::from_fn(|offset| i64::from(blocks[row * width + columns(offset)][0]))
        });
        let first_quant = i64::from(quant[0]);
        let predicted = |weights: &Window, place: usize, bits: i32| {
            let products = weights.iter().flatten().zip(window.iter().flatten());
            let sum: i64 = products
                .map(|(&weight, level)| i64::from(weight) * level)
                .sum();
            let (sum, own) = (first_quant * sum, i64::from(quant[place]));
            let mut size = ((own << 7) + sum.abs()) / (own << 8);
            if bits > 0 {
                size = size.min((1 << bits) - 1);
            }
            (size * sum.signum()) as i16
        };
        let windows: &[Window] = if is_alone { &ALONE } else { &AMONG };
        for (k, weights) in (1..).zip(windows) {
            let place = usize::from(ORDER[k]);
            if bits[k] != 0 && block[place] == 0 {
                block[place] = predicted(weights, place, bits[k]);
            }
        }
        if is_alone {
            block[0] = predicted(&FIRST, 0, -1);
        }
        block
    }
}

/// The rows of blocks around a row, which is repeated at the edges.
///
/// In the last row of units, rows are counted as if all units had as few blocks as the last; that
/// is libjpeg-turbo's count, and near the top of a low picture it repeats a row that need not be.
fn neighbours(frame: &Frame, index: usize, row: usize) -> [usize; 5] {
    let component = &frame.components[index];
    let factor = component.factors[1];
    let (unit, within) = (row / factor, row % factor);
    let is_last = unit + 1 == frame.units[1];
    let in_unit = match component.blocks[1] % factor {
        remainder @ 1.. if is_last => remainder,
        _ => factor,
    };
    let counted = unit * in_unit + within;
    let count = in_unit * frame.units[1];
    let above = if counted > 0 { row - 1 } else { row };
    let below = if counted + 1 < count { row + 1 } else { row };
    [
        if counted > 1 { row - 2 } else { above },
        above,
        row,
        below,
        if counted + 2 < count { row + 2 } else { below },
    ]
}
