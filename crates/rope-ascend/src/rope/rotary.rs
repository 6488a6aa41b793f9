//! What is rotated, and how its channels pair up.

use crate::error::{AscendError, Result};

/// Which channels of the rotated part form a pair; `pairs = rotary_dim / 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Channel j with j + pairs (GPT-NeoX, Llama, Qwen).
    Half,
    /// Channel 2j with 2j + 1 (GPT-J, GLM, Cohere).
    Adjacent,
    /// Half pairing within each half: j with j + rotary_dim/4.
    Quarter,
    /// Reads channels 2j and 2j + 1, writes them to j and j + pairs.
    InterleaveHalf,
}

/// Forward, or the gradient with respect to x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// y1 = c1·x1 − s1·x2, y2 = s2·x1 + c2·x2.
    Forward,
    /// dx1 = c1·g1 + s2·g2, dx2 = c2·g2 − s1·g1.
    Adjoint,
}

/// Where one angle of a table row comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Position axis whose id selects the table's row.
    pub axis: u32,
    /// Column of the table.
    pub column: u32,
}

/// For each angle of a token, its position axis and table column.
///
/// Every axis layout compiles to one, so the kernels know none of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LaneMap {
    lanes: Vec<Lane>,
    axes: u32,
    width: u32,
}

impl LaneMap {
    /// Most position axes.
    pub const MAX_AXES: u32 = 4;

    /// A map of `lanes` onto a table of `width` columns and positions on `axes` axes.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if a lane names an axis or a column that does not exist.
    pub fn new(lanes: Vec<Lane>, axes: u32, width: u32) -> Result<Self> {
        const OP: &str = "lane map";
        if !(1..=Self::MAX_AXES).contains(&axes) {
            return Err(AscendError::argument(OP, "axes", "1 to 4", axes));
        }
        for lane in &lanes {
            if lane.axis >= axes {
                return Err(AscendError::argument(
                    OP,
                    "axis",
                    format!("below {axes}"),
                    lane.axis,
                ));
            }
            if lane.column >= width {
                return Err(AscendError::argument(
                    OP,
                    "column",
                    format!("below {width}"),
                    lane.column,
                ));
            }
        }
        Ok(Self { lanes, axes, width })
    }

    /// The lanes in order.
    #[must_use]
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Number of position axes.
    #[must_use]
    pub fn axes(&self) -> u32 {
        self.axes
    }

    /// Columns of the table.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.width
    }

    /// The columns that an axis uses, from the first to one past the last.
    #[must_use]
    pub fn columns_of(&self, axis: u32) -> std::ops::Range<u32> {
        let columns = || {
            self.lanes
                .iter()
                .filter(|lane| lane.axis == axis)
                .map(|lane| lane.column)
        };
        match (columns().min(), columns().max()) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Reorders the table's columns so that each axis uses neighbouring ones, and the kernel then
    /// fetches no column that it does not need. Returns the map onto the new table, and for each
    /// new column the old one.
    #[must_use]
    pub fn packed(&self) -> (Self, Vec<u32>) {
        let mut old_columns: Vec<u32> = Vec::new();
        let mut lanes = self.lanes.clone();
        for axis in 0..self.axes {
            let mut used: Vec<u32> = self
                .lanes
                .iter()
                .filter(|lane| lane.axis == axis)
                .map(|lane| lane.column)
                .collect();
            used.sort_unstable();
            used.dedup();
            let start = old_columns.len();
            for (lane, old) in lanes
                .iter_mut()
                .zip(&self.lanes)
                .filter(|(_, old)| old.axis == axis)
            {
                if let Ok(place) = used.binary_search(&old.column) {
                    lane.column = (start + place) as u32;
                }
            }
            old_columns.extend(used);
        }
        let width = old_columns.len() as u32;
        (
            Self {
                lanes,
                axes: self.axes,
                width,
            },
            old_columns,
        )
    }
}

/// Which channels of a head are rotated, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    head_dim: u32,
    rotary_dim: u32,
    rotary_offset: u32,
    pairing: Pairing,
    per_channel: bool,
    lanes: Option<LaneMap>,
}

impl Rotary {
    /// Rotates all `head_dim` channels, a pair sharing its angle.
    ///
    /// # Errors
    /// As [`Self::partial`].
    pub fn new(head_dim: u32, pairing: Pairing) -> Result<Self> {
        Self::partial(head_dim, 0..head_dim, pairing)
    }

    /// Rotates `channels` of each head; the others pass through bit for bit.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the channels do not lie in the head, or their number is
    /// odd, or not divisible by 4 for [`Pairing::Quarter`].
    pub fn partial(
        head_dim: u32,
        channels: std::ops::Range<u32>,
        pairing: Pairing,
    ) -> Result<Self> {
        const OP: &str = "rotary";
        if channels.is_empty() || channels.end > head_dim {
            let found = format!("{}..{}", channels.start, channels.end);
            return Err(AscendError::argument(
                OP,
                "channels",
                format!("within 0..{head_dim}, not empty"),
                found,
            ));
        }
        let rotary_dim = channels.end - channels.start;
        let unit = if pairing == Pairing::Quarter { 4 } else { 2 };
        if !rotary_dim.is_multiple_of(unit) {
            return Err(AscendError::argument(
                OP,
                "rotary_dim",
                format!("a multiple of {unit}"),
                rotary_dim,
            ));
        }
        if head_dim > Self::MAX_HEAD_DIM {
            return Err(AscendError::argument(
                OP,
                "head_dim",
                "at most 1024",
                head_dim,
            ));
        }
        Ok(Self {
            head_dim,
            rotary_dim,
            rotary_offset: channels.start,
            pairing,
            per_channel: false,
            lanes: None,
        })
    }

    /// Longest head that a vector instruction's strides reach over.
    pub const MAX_HEAD_DIM: u32 = 1024;

    /// Gives the two members of a pair angles of their own: angle rows are `2 * pairs` wide, those
    /// of the first members before those of the second.
    #[must_use]
    pub fn per_channel(mut self) -> Self {
        self.per_channel = true;
        self.lanes = None;
        self
    }

    /// Adds the lane map, for angles from a table.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if it has another number of lanes than the rows of angles.
    pub fn with_lanes(mut self, lanes: LaneMap) -> Result<Self> {
        if lanes.lanes().len() != self.angle_width() as usize {
            let expected = format!("{} lanes, one for each angle", self.angle_width());
            return Err(AscendError::argument(
                "rotary",
                "lane map",
                expected,
                lanes.lanes().len(),
            ));
        }
        self.lanes = Some(lanes);
        Ok(self)
    }

    /// Channels of a head.
    #[must_use]
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Channels that are rotated.
    #[must_use]
    pub fn rotary_dim(&self) -> u32 {
        self.rotary_dim
    }

    /// First channel that is rotated.
    #[must_use]
    pub fn rotary_offset(&self) -> u32 {
        self.rotary_offset
    }

    /// Number of pairs.
    #[must_use]
    pub fn pairs(&self) -> u32 {
        self.rotary_dim / 2
    }

    /// Which channels form a pair.
    #[must_use]
    pub fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// Whether the two members of a pair have angles of their own.
    #[must_use]
    pub fn is_per_channel(&self) -> bool {
        self.per_channel
    }

    /// Angles of a token: `pairs`, or twice as many per channel.
    #[must_use]
    pub fn angle_width(&self) -> u32 {
        if self.per_channel {
            self.rotary_dim
        } else {
            self.pairs()
        }
    }

    /// The lane map, if there is one.
    #[must_use]
    pub fn lanes(&self) -> Option<&LaneMap> {
        self.lanes.as_ref()
    }
}
