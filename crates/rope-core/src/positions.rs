//! Position ids.

use std::sync::Arc;

use crate::error::{Result, RopeError};

/// The highest position id, 2^31.
pub(crate) const MAX_POSITION: u32 = 1 << 31;

/// Integer position ids, `[axes, tokens]` row by row. Cloning is cheap.
///
/// Tokens are counted over the batch: token = sample * seq + index, whatever the layout of q and k.
/// Positions for one sequence serve every sample of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positions {
    ids: Arc<[u32]>,
    axes: usize,
    highest: u32,
}

impl Positions {
    /// Checks and keeps ids laid out as `[axes, tokens]`.
    ///
    /// # Errors
    /// [`RopeError::PositionShape`] if the ids do not divide into axes;
    /// [`RopeError::PositionOutOfRange`] if one is negative or above 2^31.
    pub fn new(axes: usize, ids: &[i64]) -> Result<Self> {
        if axes == 0 || !ids.len().is_multiple_of(axes) {
            return Err(RopeError::PositionShape {
                ids: ids.len(),
                axes,
            });
        }
        let tokens = (ids.len() / axes).max(1);
        let mut highest = 0;
        let ids = ids
            .iter()
            .enumerate()
            .map(|(i, &found)| {
                let id = u32::try_from(found).ok().filter(|id| *id <= MAX_POSITION);
                let out_of_range = RopeError::PositionOutOfRange {
                    found,
                    axis: i / tokens,
                    token: i % tokens,
                };
                let id = id.ok_or(out_of_range)?;
                highest = highest.max(id);
                Ok(id)
            })
            .collect::<Result<Vec<u32>>>()?;
        Ok(Self {
            ids: ids.into(),
            axes,
            highest,
        })
    }

    /// The ids of text: `start..start + tokens`, the same on each of `axes` axes.
    ///
    /// # Errors
    /// [`RopeError::PositionOutOfRange`] if the last id is above 2^31.
    pub fn text(axes: usize, start: u32, tokens: usize) -> Result<Self> {
        let ids: Vec<i64> = (0..axes)
            .flat_map(|_| (0..tokens).map(|i| i64::from(start) + i as i64))
            .collect();
        Self::new(axes, &ids)
    }

    /// The number of axes.
    pub fn axis_count(&self) -> usize {
        self.axes
    }
    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.axes
    }
    /// The ids of one axis, a row of `[axes, tokens]`.
    ///
    /// # Panics
    /// If `axis` is not below [`axis_count`](Self::axis_count).
    pub fn axis(&self, axis: usize) -> &[u32] {
        let tokens = self.tokens();
        &self.ids[axis * tokens..(axis + 1) * tokens]
    }
    /// The highest id on any axis; 0 without tokens.
    pub fn highest(&self) -> u32 {
        self.highest
    }

    pub(crate) fn expect_axes(&self, expected: usize) -> Result<()> {
        if self.axes == expected {
            Ok(())
        } else {
            Err(RopeError::PositionAxes {
                expected,
                found: self.axes,
            })
        }
    }
}
