//! The lane map: axis and frequency of each lane, compiled from an axis layout. Kernels know nothing else.

use crate::error::{Result, RopeError};
use crate::spec::{AxisLayout, MAX_AXES};

/// What drives one lane: angle = positions\[axis\] * inv_freq\[frequency\].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Index of the position axis.
    pub axis: u8,
    /// Index into [`RotarySpec::inv_freq`](crate::RotarySpec::inv_freq), a column of a table.
    pub frequency: u32,
}

/// The lanes of a rotation: one per pair, or two per pair (all first members, then all second members) where
/// the members of a pair follow different axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneMap {
    lanes: Vec<Lane>,
    axes: usize,
    frequency_dims: Vec<usize>,
}

impl LaneMap {
    pub(crate) fn new(layout: &AxisLayout, pairs: usize) -> Result<Self> {
        let sections = layout.sections();
        check_sections(layout, sections, pairs)?;
        let frequency_dims = match layout {
            AxisLayout::PerAxis(_) | AxisLayout::PerAxisStriped(_) => {
                let mut dims: Vec<usize> = sections.iter().map(|s| 2 * s).collect();
                dims.sort_unstable();
                dims.dedup();
                dims
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
        let lanes = match layout {
            AxisLayout::Single => (0..pairs).map(|j| lane(0, j)).collect(),
            AxisLayout::Contiguous(_) => (0..pairs)
                .map(|j| lane(contiguous(j, 1).unwrap_or(0), j))
                .collect(),
            AxisLayout::Striped(_) => {
                let n = sections.len();
                (0..pairs)
                    .map(|j| {
                        if j < n * sections[j % n] {
                            lane(j % n, j)
                        } else {
                            lane(0, j)
                        }
                    })
                    .collect()
            }
            AxisLayout::Ernie(_) => {
                let alternating = sections[0] + sections[1];
                (0..pairs)
                    .map(|j| lane(if j < alternating { 1 + j % 2 } else { 0 }, j))
                    .collect()
            }
            AxisLayout::Balanced(_) => {
                let axes = balanced(sections);
                axes.into_iter()
                    .enumerate()
                    .map(|(j, axis)| lane(axis, j))
                    .collect()
            }
            AxisLayout::PerAxisStriped(_) => {
                let n = sections.len();
                (0..pairs).map(|j| lane(n - 1 - j % n, j / n)).collect()
            }
            AxisLayout::PerAxis(_) => {
                let column = |dims: usize| {
                    frequency_dims
                        .iter()
                        .take_while(|d| **d < dims)
                        .map(|d| d / 2)
                        .sum::<usize>()
                };
                let of_axis = |(axis, s): (usize, &usize)| {
                    let start = column(2 * s);
                    (0..*s).map(move |i| lane(axis, start + i))
                };
                sections.iter().enumerate().flat_map(of_axis).collect()
            }
            AxisLayout::PerChannel(_) => (0..2 * pairs)
                .map(|c| lane(contiguous(c, 2).unwrap_or(0), c % pairs))
                .collect(),
        };
        let map = Self {
            lanes,
            axes: layout.axes(),
            frequency_dims,
        };
        map.check_realised(layout, pairs)?;
        Ok(map)
    }

    /// A layout states its sections; the arrangement must give each axis as many lanes. Hugging Face's
    /// striping never reads `sections[0]`, so a wrong list goes unnoticed there.
    fn check_realised(&self, layout: &AxisLayout, pairs: usize) -> Result<()> {
        let lanes_per_pair = self.lanes.len() / pairs;
        let order: &[usize] = if matches!(layout, AxisLayout::Ernie(_)) {
            &[1, 2, 0]
        } else {
            &[0, 1, 2, 3]
        };
        for (section, axis) in layout.sections().iter().zip(order) {
            let found = self
                .lanes
                .iter()
                .filter(|l| usize::from(l.axis) == *axis)
                .count();
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

    /// All lanes: `pairs` of them, or twice as many when per channel.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The number of position axes.
    pub fn axes(&self) -> usize {
        self.axes
    }

    /// The number of distinct frequencies, the columns of a table.
    pub fn frequencies(&self) -> usize {
        self.frequency_dims.iter().sum::<usize>() / 2
    }

    /// The channel counts over which frequencies are spread, one per run of columns.
    pub(crate) fn frequency_dims(&self) -> &[usize] {
        &self.frequency_dims
    }
}

/// The axes of the lanes of [`AxisLayout::Balanced`]: at each lane the axis with the smallest placed share of its
/// section, among those that have lanes left and did not take the lane before.
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
        let behind =
            |a: &usize, b: &usize| (placed[*a] * wanted[*b]).cmp(&(placed[*b] * wanted[*a]));
        let next = (0..sections.len())
            .filter(left)
            .filter(fresh)
            .min_by(behind);
        let Some(axis) = next.or_else(|| (0..sections.len()).find(left)) else {
            break;
        };
        placed[axis] += 1;
        axes.push(axis);
    }
    axes.extend(last.map(|()| 0));
    axes
}

fn check_sections(layout: &AxisLayout, sections: &[usize], pairs: usize) -> Result<()> {
    if matches!(layout, AxisLayout::Single) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(layout: AxisLayout, pairs: usize) -> String {
        let map = LaneMap::new(&layout, pairs).expect("valid layout");
        map.lanes()
            .iter()
            .map(|l| char::from(b"THWX"[usize::from(l.axis)]))
            .collect()
    }

    #[test]
    fn arrangements_written_out_by_hand() {
        assert_eq!(axes(AxisLayout::Contiguous(vec![2, 3, 3]), 8), "TTHHHWWW");
        assert_eq!(axes(AxisLayout::Striped(vec![4, 2, 2]), 8), "THWTHWTT");
        assert_eq!(axes(AxisLayout::Striped(vec![3, 3, 2]), 8), "THWTHWTH");
        assert_eq!(axes(AxisLayout::Ernie(vec![3, 3, 2]), 8), "HWHWHWTT");
        assert_eq!(axes(AxisLayout::PerAxis(vec![4, 4]), 8), "TTTTHHHH");
        assert_eq!(axes(AxisLayout::PerAxisStriped(vec![4, 4]), 8), "HTHTHTHT");
        // The two that vLLM's users pin.
        assert_eq!(axes(AxisLayout::Balanced(vec![2, 2]), 4), "THTH");
        assert_eq!(axes(AxisLayout::Balanced(vec![2, 3, 3]), 8), "THWHWHWT");
        assert_eq!(
            axes(AxisLayout::PerChannel(vec![1, 1, 1, 1]), 4),
            "TTHHWWXX"
        );
    }

    #[test]
    fn frequencies_restart_per_axis_and_equal_axes_share_columns() {
        let map = LaneMap::new(&AxisLayout::PerAxis(vec![2, 3, 3]), 8).expect("valid layout");
        assert_eq!(map.frequency_dims(), [4, 6]);
        let columns: Vec<u32> = map.lanes().iter().map(|l| l.frequency).collect();
        assert_eq!(columns, [0, 1, 2, 3, 4, 2, 3, 4]);
        assert_eq!(map.frequencies(), 5);
        let map = LaneMap::new(&AxisLayout::PerAxisStriped(vec![3, 3]), 6).expect("valid layout");
        let columns: Vec<u32> = map.lanes().iter().map(|l| l.frequency).collect();
        assert_eq!(columns, [0, 0, 1, 1, 2, 2]);
        let uneven = AxisLayout::PerAxisStriped(vec![2, 4]);
        assert!(matches!(
            LaneMap::new(&uneven, 6),
            Err(RopeError::SectionsNotRealisable { .. })
        ));
    }

    #[test]
    fn sections_that_sum_right_but_cannot_be_arranged_are_refused() {
        let striped = AxisLayout::Striped(vec![2, 20, 10]);
        assert!(matches!(
            LaneMap::new(&striped, 32),
            Err(RopeError::SectionsNotRealisable { pairs: 32, .. })
        ));
        let ernie = AxisLayout::Ernie(vec![2, 4, 2]);
        assert!(matches!(
            LaneMap::new(&ernie, 8),
            Err(RopeError::SectionsNotRealisable { .. })
        ));
    }
}
