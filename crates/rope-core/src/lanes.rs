//! The lane map: axis and frequency of each lane, compiled from an axis layout. Kernels know
//! nothing else about axes.

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};
use crate::limits::MAX_AXES;

/// The axis and the frequency of one lane: angle = positions\[axis\] * inv_freq\[frequency\].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lane {
    /// Index of the position axis.
    pub axis: u8,
    /// Index into [`RotarySpec::inv_freq`](crate::RotarySpec::inv_freq), a column of a table.
    pub frequency: u32,
}

/// The position axis (T, H, W, ...) of each lane. Sections count pairs and sum to P, the number of
/// pairs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AxisLayout {
    /// One axis drives all lanes: text.
    Single,
    /// The first `sections[0]` lanes belong to axis 0, the next to axis 1, ... (Qwen2-VL
    /// `[16, 24, 24]`).
    Contiguous(Vec<usize>),
    /// Of n axes, lane j belongs to axis a = j mod n where 0 < a and j < n * sections\[a\], else to
    /// axis 0 (Qwen3-VL `[24, 20, 20]`, Qwen3.5 `[11, 11, 10]`).
    Striped(Vec<usize>),
    /// Sections in the order H, W, T: H and W alternate over the first lanes, T takes the rest,
    /// while positions keep the order T, H, W (ERNIE-4.5-VL `[22, 22, 20]`).
    Ernie(Vec<usize>),
    /// Each axis is spread over the lanes as evenly as its section allows, never twice in a row
    /// while another axis has lanes left. Of two axes that have used the same share, the lower one
    /// goes first. Of three axes, axis 0 also takes the last lane (openPangu's
    /// `mrope_interleaved`). Two or three sections.
    Balanced(Vec<usize>),
    /// Contiguous, and the frequencies restart on each axis: lane i of a section with s lanes has
    /// frequency theta^(-i/s) (vision towers, Flux, Wan).
    PerAxis(Vec<usize>),
    /// The axes alternate, the last one first, and the frequencies restart on each: lane j of n
    /// axes belongs to axis n - 1 - j mod n and has frequency theta^(-(j / n)/s), where s is the
    /// section of that axis (Kimi's vision tower: W, H, W, H, ... of positions H, W).
    PerAxisStriped(Vec<usize>),
    /// Sections, doubled, divide the R channels of (first members, second members), so the two
    /// members of a pair may follow different axes, and the map is then not a rotation (HunyuanVL
    /// `[16, 16, 16, 16]`).
    PerChannel(Vec<usize>),
    /// An explicit list of lanes: one per pair, or one per channel with all first members of the
    /// pairs before all second ones (a rotation only if the two agree). Lanes may take any
    /// frequency and may share one (Pixtral, V-JEPA 2).
    Lanes(Vec<Lane>),
}

impl AxisLayout {
    /// The sections; empty for [`AxisLayout::Single`] and [`AxisLayout::Lanes`].
    pub fn sections(&self) -> &[usize] {
        match self {
            Self::Single | Self::Lanes(_) => &[],
            Self::Contiguous(s)
            | Self::Striped(s)
            | Self::Ernie(s)
            | Self::Balanced(s)
            | Self::PerAxis(s)
            | Self::PerAxisStriped(s)
            | Self::PerChannel(s) => s,
        }
    }

    /// The number of position axes.
    pub fn axis_count(&self) -> usize {
        match self {
            Self::Lanes(lanes) => {
                let highest = lanes.iter().map(|lane| lane.axis).max();
                usize::from(highest.unwrap_or(0)) + 1
            }
            _ => self.sections().len().max(1),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Single => "AxisLayout::Single",
            Self::Contiguous(_) => "AxisLayout::Contiguous",
            Self::Striped(_) => "AxisLayout::Striped",
            Self::Ernie(_) => "AxisLayout::Ernie",
            Self::Balanced(_) => "AxisLayout::Balanced",
            Self::PerAxis(_) => "AxisLayout::PerAxis",
            Self::PerAxisStriped(_) => "AxisLayout::PerAxisStriped",
            Self::PerChannel(_) => "AxisLayout::PerChannel",
            Self::Lanes(_) => "AxisLayout::Lanes",
        }
    }
}

/// The lanes of a rotation: one per pair, or two per pair (all first members, then all second
/// members) if the members of a pair follow different axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneMap {
    lanes: Vec<Lane>,
    axes: usize,
    frequency_dims: Vec<usize>,
}

impl LaneMap {
    /// Compiles a layout; `listed` is the number of frequencies if they are a list.
    pub(crate) fn new(layout: &AxisLayout, pairs: usize, listed: Option<usize>) -> Result<Self> {
        let sections = layout.sections();
        check_sections(layout, sections, pairs)?;
        let frequency_dims = match layout {
            AxisLayout::PerAxis(_) | AxisLayout::PerAxisStriped(_) => {
                let mut dims: Vec<usize> = sections.iter().map(|s| 2 * s).collect();
                dims.sort_unstable();
                dims.dedup();
                dims
            }
            AxisLayout::Lanes(lanes) => {
                let frequencies = listed.unwrap_or(pairs);
                check_lanes(lanes, pairs, frequencies)?;
                vec![2 * frequencies]
            }
            _ => vec![2 * pairs],
        };
        let lane = |axis: usize, frequency: usize| Lane {
            axis: axis as u8,
            frequency: frequency as u32,
        };
        // The axis of channel c where each section takes `width` channels per unit.
        let contiguous = |c: usize, width: usize| {
            let mut end = 0;
            sections.iter().position(|s| {
                end += s * width;
                c < end
            })
        };
        // Where frequencies restart per axis, axes with equal sections share their columns.
        let first_column = |axis: usize| -> usize {
            let narrower = frequency_dims
                .iter()
                .take_while(|dims| **dims < 2 * sections[axis]);
            narrower.map(|dims| dims / 2).sum()
        };
        let n = sections.len();
        let lanes = match layout {
            AxisLayout::Lanes(lanes) => lanes.clone(),
            AxisLayout::Single => (0..pairs).map(|j| lane(0, j)).collect(),
            AxisLayout::Contiguous(_) => (0..pairs)
                .map(|j| lane(contiguous(j, 1).unwrap_or(0), j))
                .collect(),
            AxisLayout::Striped(_) => {
                let axis = |j: usize| if j < n * sections[j % n] { j % n } else { 0 };
                (0..pairs).map(|j| lane(axis(j), j)).collect()
            }
            AxisLayout::Ernie(_) => {
                let alternating = sections[0] + sections[1];
                let axis = |j: usize| if j < alternating { 1 + j % 2 } else { 0 };
                (0..pairs).map(|j| lane(axis(j), j)).collect()
            }
            AxisLayout::Balanced(_) => {
                let axes = balanced(sections).into_iter().zip(0..);
                axes.map(|(axis, j)| lane(axis, j)).collect()
            }
            AxisLayout::PerAxisStriped(_) => {
                let axis = |j: usize| n - 1 - j % n;
                let column = |j: usize| first_column(axis(j)) + j / n;
                (0..pairs).map(|j| lane(axis(j), column(j))).collect()
            }
            AxisLayout::PerAxis(_) => {
                let axis_lanes = |(axis, s): (usize, &usize)| {
                    let start = first_column(axis);
                    (0..*s).map(move |i| lane(axis, start + i))
                };
                sections.iter().enumerate().flat_map(axis_lanes).collect()
            }
            AxisLayout::PerChannel(_) => (0..2 * pairs)
                .map(|c| lane(contiguous(c, 2).unwrap_or(0), c % pairs))
                .collect(),
        };
        let map = Self {
            lanes,
            axes: layout.axis_count(),
            frequency_dims,
        };
        map.check_realised(layout, pairs)?;
        Ok(map)
    }

    /// Rejects sections that differ from the number of lanes that the arrangement gives an axis.
    /// Hugging Face's striping never reads `sections[0]` and so does not detect a wrong list.
    fn check_realised(&self, layout: &AxisLayout, pairs: usize) -> Result<()> {
        let lanes_per_pair = self.lanes.len() / pairs;
        let order: &[usize] = if matches!(layout, AxisLayout::Ernie(_)) {
            &[1, 2, 0]
        } else {
            &[0, 1, 2, 3]
        };
        for (section, axis) in layout.sections().iter().zip(order) {
            let axis_lanes = |lane: &&Lane| usize::from(lane.axis) == *axis;
            let found = self.lanes.iter().filter(axis_lanes).count();
            if found != section * lanes_per_pair {
                return Err(RopeError::SectionsNotRealisable {
                    layout: layout.clone(),
                    pairs,
                    reason: format!(
                        "axis {axis} would drive {found} lanes, its section says {section}"
                    ),
                });
            }
        }
        Ok(())
    }

    /// All lanes: one per pair, or one per rotated channel.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The number of position axes.
    pub fn axis_count(&self) -> usize {
        self.axes
    }

    /// The number of distinct frequencies, the columns of a table.
    pub fn frequency_count(&self) -> usize {
        self.frequency_dims.iter().sum::<usize>() / 2
    }

    /// The numbers of channels over which frequencies are spread, one per run of columns.
    pub(crate) fn frequency_dims(&self) -> &[usize] {
        &self.frequency_dims
    }
}

/// The axes of the lanes of [`AxisLayout::Balanced`]: for each lane, of the axes that have lanes
/// left and did not take the lane before, the one that has used the smallest share of its section.
///
/// # Source
/// vLLM, `vllm/model_executor/layers/rotary_embedding/mrope_interleaved.py`
fn balanced(sections: &[usize]) -> Vec<usize> {
    let mut wanted = sections.to_vec();
    let last = (sections.len() == 3 && sections[0] > 0).then(|| wanted[0] -= 1);
    let mut placed = vec![0; sections.len()];
    let mut axes: Vec<usize> = Vec::new();
    for _ in 0..wanted.iter().sum() {
        let left = |axis: &usize| placed[*axis] < wanted[*axis];
        let fresh = |axis: &usize| axes.last() != Some(axis);
        // Shares are compared as products, so that equal ones are equal.
        let by_share =
            |a: &usize, b: &usize| (placed[*a] * wanted[*b]).cmp(&(placed[*b] * wanted[*a]));
        let next = (0..sections.len())
            .filter(left)
            .filter(fresh)
            .min_by(by_share);
        let Some(axis) = next.or_else(|| (0..sections.len()).find(left)) else {
            break;
        };
        placed[axis] += 1;
        axes.push(axis);
    }
    axes.extend(last.map(|()| 0));
    axes
}

fn check_lanes(lanes: &[Lane], pairs: usize, frequencies: usize) -> Result<()> {
    if ![pairs, 2 * pairs].contains(&lanes.len()) {
        let found = lanes.len();
        return Err(RopeError::LaneCount { found, pairs });
    }
    for (lane, entry) in lanes.iter().enumerate() {
        let (axis, frequency) = (usize::from(entry.axis), entry.frequency as usize);
        for (what, found, limit) in [
            ("axis", axis, MAX_AXES),
            ("frequency", frequency, frequencies),
        ] {
            if found >= limit {
                return Err(RopeError::LaneOutOfRange {
                    lane,
                    what,
                    found,
                    limit,
                });
            }
        }
    }
    Ok(())
}

fn check_sections(layout: &AxisLayout, sections: &[usize], pairs: usize) -> Result<()> {
    if matches!(layout, AxisLayout::Single | AxisLayout::Lanes(_)) {
        return Ok(());
    }
    let (fits, expected) = match layout {
        AxisLayout::Ernie(_) => (sections.len() == 3, "3"),
        AxisLayout::Balanced(_) => ((2..=3).contains(&sections.len()), "2 or 3"),
        _ => ((1..=MAX_AXES).contains(&sections.len()), "1 to 4"),
    };
    if !fits {
        return Err(RopeError::SectionCount {
            layout: layout.name(),
            expected,
            found: sections.len(),
        });
    }
    let sum = sections
        .iter()
        .fold(0usize, |sum, s| sum.saturating_add(*s));
    if sum != pairs {
        return Err(RopeError::SectionSum {
            sections: sections.to_vec(),
            sum,
            expected: pairs,
        });
    }
    Ok(())
}
