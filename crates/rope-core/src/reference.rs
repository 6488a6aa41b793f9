//! The oracle: rotation and norm as matrices, in f64, from the formulas alone. It shares nothing
//! with the kernels, not even the lane map, and is simple rather than fast.

use crate::error::Result;
use crate::lanes::AxisLayout;
use crate::positions::Positions;
use crate::spec::{Pairing, RotarySpec};

/// A square matrix over the channels of a head, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadMatrix {
    head_dim: usize,
    values: Vec<f64>,
}

impl HeadMatrix {
    /// Computes the matrix M with y = M x for one token. It is the identity outside the rotated
    /// channels.
    ///
    /// # Errors
    /// Those of [`RotarySpec::inv_freq`]; [`PositionAxes`](crate::RopeError::PositionAxes) if the
    /// positions have a different number of axes.
    ///
    /// # Panics
    /// If `token` is beyond the tokens of the positions.
    pub fn new(
        spec: &RotarySpec,
        positions: &Positions,
        token: usize,
        seq_len: Option<u64>,
    ) -> Result<Self> {
        positions.expect_axes(spec.axis_count())?;
        Self::with_angles(spec, |j, member| {
            let (axis, inv_freq) = lane(spec, j, member, seq_len)?;
            Ok(positions.value(axis, token) * inv_freq)
        })
    }

    /// Computes the matrix for one head of one token with frequencies per head, as
    /// [`TokenAngles::per_head`](crate::TokenAngles::per_head) takes them.
    ///
    /// # Errors
    /// None.
    ///
    /// # Panics
    /// If the token or head does not exist, or the number of frequencies is wrong.
    pub fn per_head(
        spec: &RotarySpec,
        positions: &Positions,
        token: usize,
        (frequencies, heads, head): (&[f64], usize, usize),
    ) -> Result<Self> {
        let axes = positions.axis_count();
        let (lanes, pairs) = (frequencies.len() / axes / heads, spec.rotary_dim() / 2);
        Self::with_angles(spec, |j, member| {
            let lane = if lanes == pairs {
                j
            } else {
                j + member * pairs
            };
            let mut angle = 0.0;
            for axis in 0..axes {
                let frequency = frequencies[(axis * heads + head) * lanes + lane];
                angle += positions.value(axis, token) * frequency;
            }
            Ok(angle)
        })
    }

    /// Computes the matrix that rotates the members (0 and 1) of pair `j` by the given angles, in
    /// radians.
    fn with_angles(spec: &RotarySpec, angle: impl Fn(usize, usize) -> Result<f64>) -> Result<Self> {
        let (head_dim, rotary_dim) = (spec.head_dim(), spec.rotary_dim());
        let pairs = rotary_dim / 2;
        let mut matrix = Self {
            head_dim,
            values: vec![0.0; head_dim * head_dim],
        };
        for channel in 0..head_dim {
            let rotated = spec.rotary_offset()..spec.rotary_offset() + rotary_dim;
            if !rotated.contains(&channel) {
                matrix.set(channel, channel, 1.0);
            }
        }
        for j in 0..pairs {
            let (first, second) = (angle(j, 0)?, angle(j, 1)?);
            let ([in1, in2], [out1, out2]) = pair_channels(spec.pairing(), rotary_dim, j);
            let o = spec.rotary_offset();
            let scaling = spec.attention_scaling();
            matrix.set(o + out1, o + in1, scaling * first.cos());
            matrix.set(o + out1, o + in2, -scaling * first.sin());
            matrix.set(o + out2, o + in1, scaling * second.sin());
            matrix.set(o + out2, o + in2, scaling * second.cos());
        }
        Ok(matrix)
    }

    fn set(&mut self, row: usize, column: usize, value: f64) {
        self.values[row * self.head_dim + column] = value;
    }

    /// The entry at a row and a column.
    pub fn get(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.head_dim + column]
    }

    /// Computes M x.
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        (0..self.head_dim)
            .map(|row| (0..self.head_dim).map(|c| self.get(row, c) * x[c]).sum())
            .collect()
    }

    /// Computes the transpose of M times g: the gradient of x, given that of y.
    pub fn apply_adjoint(&self, g: &[f64]) -> Vec<f64> {
        let column = |c| (0..self.head_dim).map(move |row| self.get(row, c) * g[row]);
        (0..self.head_dim).map(|c| column(c).sum()).collect()
    }
}

/// RMSNorm of a head, x_i * rstd * weight_i with rstd = 1 / sqrt(mean(x^2) + eps).
#[derive(Clone, Copy, Debug)]
pub struct HeadRmsNorm<'a> {
    /// The factor of each channel, `[head_dim]`.
    pub weight: &'a [f64],
    /// The number added to the mean of the squares.
    pub eps: f64,
}

impl HeadRmsNorm<'_> {
    fn rstd(&self, x: &[f64]) -> f64 {
        let squares: f64 = x.iter().map(|x| x * x).sum();
        1.0 / (squares / x.len() as f64 + self.eps).sqrt()
    }

    /// Normalises one head.
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        let rstd = self.rstd(x);
        x.iter()
            .zip(self.weight)
            .map(|(x, w)| x * rstd * w)
            .collect()
    }

    /// Computes the gradients of x and of the weight from the gradient of the result, with the full
    /// Jacobian dy_i/dx_j = weight_i * (rstd * \[i = j\] - x_i * x_j * rstd^3 / head_dim).
    pub fn apply_adjoint(&self, x: &[f64], g: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let rstd = self.rstd(x);
        let derivative = |i: usize, j: usize| {
            let own = if i == j { rstd } else { 0.0 };
            self.weight[i] * (own - x[i] * x[j] * rstd.powi(3) / x.len() as f64)
        };
        let channels = 0..x.len();
        let column = |j: usize| channels.clone().map(|i| g[i] * derivative(i, j)).sum();
        let dx = channels.clone().map(column).collect();
        (dx, channels.clone().map(|i| g[i] * x[i] * rstd).collect())
    }
}

/// The channels that pair `j` is read from and written to, counted within the rotated part.
pub fn pair_channels(pairing: Pairing, rotary_dim: usize, j: usize) -> ([usize; 2], [usize; 2]) {
    let (half, quarter) = (rotary_dim / 2, rotary_dim / 4);
    match pairing {
        Pairing::Half => ([j, j + half], [j, j + half]),
        Pairing::Adjacent => ([2 * j, 2 * j + 1], [2 * j, 2 * j + 1]),
        Pairing::Quarter => {
            let first = if j < quarter { j } else { half + (j - quarter) };
            ([first, first + quarter], [first, first + quarter])
        }
        Pairing::InterleaveHalf => ([2 * j, 2 * j + 1], [j, j + half]),
    }
}

/// The axis and the inverse frequency of a pair's first (0) or second (1) member.
fn lane(spec: &RotarySpec, j: usize, member: usize, seq_len: Option<u64>) -> Result<(usize, f64)> {
    let pairs = spec.rotary_dim() / 2;
    let whole = |axis: usize| -> Result<(usize, f64)> {
        Ok((axis, spec.frequencies().inv_freq(2 * pairs, seq_len)?[j]))
    };
    let section_of = |sections: &[usize], mut at: usize, width: usize| {
        for (axis, section) in sections.iter().enumerate() {
            if at < section * width {
                return (axis, at);
            }
            at -= section * width;
        }
        (0, at)
    };
    match spec.axis_layout() {
        AxisLayout::Single => whole(0),
        AxisLayout::Contiguous(sections) => whole(section_of(sections, j, 1).0),
        AxisLayout::Striped(sections) => {
            let mut axis = 0;
            for (candidate, section) in sections.iter().enumerate().skip(1) {
                let stripe = (candidate..sections.len() * section).step_by(sections.len());
                if stripe.into_iter().any(|lane| lane == j) {
                    axis = candidate;
                }
            }
            whole(axis)
        }
        AxisLayout::Ernie(sections) => {
            let (height, width) = (sections[0], sections[1]);
            whole(if j >= height + width {
                0
            } else if j.is_multiple_of(2) {
                1
            } else {
                2
            })
        }
        AxisLayout::Balanced(sections) => whole(balanced_axis(sections, j)),
        AxisLayout::PerAxisStriped(sections) => {
            let axis = sections.len() - 1 - j % sections.len();
            let axis_inv_freq = spec.frequencies().inv_freq(2 * sections[axis], seq_len)?;
            Ok((axis, axis_inv_freq[j / sections.len()]))
        }
        AxisLayout::PerAxis(sections) => {
            let (axis, i) = section_of(sections, j, 1);
            let axis_inv_freq = spec.frequencies().inv_freq(2 * sections[axis], seq_len)?;
            Ok((axis, axis_inv_freq[i]))
        }
        AxisLayout::Lanes(lanes) => {
            let lane = lanes[(j + member * pairs) % lanes.len()];
            let inv_freq = spec.inv_freq(seq_len)?[lane.frequency as usize];
            Ok((usize::from(lane.axis), inv_freq))
        }
        AxisLayout::PerChannel(sections) => whole(section_of(sections, j + member * pairs, 2).0),
    }
}

/// The axis of lane `j` in openPangu's arrangement, by replaying it from the first lane.
fn balanced_axis(sections: &[usize], j: usize) -> usize {
    let pairs: usize = sections.iter().sum();
    // An axis without a section has no lane to be the last one.
    let three = sections.len() == 3 && sections[0] > 0;
    if three && j == pairs - 1 {
        return 0;
    }
    let share = |axis: usize, placed: usize| {
        let section = if three && axis == 0 {
            sections[0] - 1
        } else {
            sections[axis]
        };
        if placed < section {
            placed as f64 / section as f64
        } else {
            f64::INFINITY
        }
    };
    let mut placed = [0; 3];
    let mut previous = usize::MAX;
    for _ in 0..=j {
        let mut best = previous;
        let mut best_share = f64::INFINITY;
        for (axis, count) in placed.iter().enumerate().take(sections.len()) {
            if axis != previous && share(axis, *count) < best_share {
                (best, best_share) = (axis, share(axis, *count));
            }
        }
        placed[best] += 1;
        previous = best;
    }
    previous
}
