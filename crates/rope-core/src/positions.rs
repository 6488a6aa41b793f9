//! Positions: ids, exact and up to 2^31, or real numbers.

use std::sync::Arc;

use crate::error::{Result, RopeError};
use crate::position_ids::reserved;

/// The highest position id, 2^31.
pub(crate) const MAX_POSITION: u32 = 1 << 31;

/// The positions of tokens, `[axes, tokens]` row by row: ids, or real numbers. Cloning is cheap.
///
/// Tokens are counted over the batch: token = sample * seq + index, whatever the layout of q and k.
/// Positions for one sequence apply to every sample of a batch. A token at position 0 on every axis
/// does not rotate (class and register tokens of a vision tower).
#[derive(Clone, Debug, PartialEq)]
pub struct Positions {
    values: Values,
    axes: usize,
    highest: u32,
}

#[derive(Clone, Debug, PartialEq)]
enum Values {
    /// Rows of a table.
    Ids(Arc<[u32]>),
    /// Positions of which at least one is not an id.
    Real(Arc<[f64]>),
}

impl Positions {
    /// Creates positions from ids in the order `[axes, tokens]`.
    ///
    /// # Errors
    /// [`RopeError::PositionShape`] if the ids do not divide into axes;
    /// [`RopeError::PositionOutOfRange`] if an id is negative or above 2^31.
    pub fn new(axes: usize, ids: &[i64]) -> Result<Self> {
        let tokens = tokens(axes, ids.len())?.max(1);
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
            values: Values::Ids(ids.into()),
            axes,
            highest,
        })
    }

    /// Creates real positions in the order `[axes, tokens]`: negative (centred images), fractional
    /// (seconds of a video) or both.
    ///
    /// Angles are position * inv_freq in f64. If all positions are ids, this is [`Positions::new`].
    ///
    /// # Units
    /// the units of the frequencies' denominators: tokens, seconds, or halves of an image
    /// # Errors
    /// [`RopeError::PositionShape`] if the values do not divide into axes;
    /// [`RopeError::RealPositionOutOfRange`] if a position is NaN or its magnitude exceeds 2^31.
    pub fn real(axes: usize, values: &[f64]) -> Result<Self> {
        let tokens = tokens(axes, values.len())?.max(1);
        let limit = f64::from(MAX_POSITION);
        let refused = |value: &f64| !(-limit..=limit).contains(value);
        if let Some(i) = values.iter().position(refused) {
            return Err(RopeError::RealPositionOutOfRange {
                found: values[i],
                axis: i / tokens,
                token: i % tokens,
            });
        }
        if values.iter().all(|value| is_id(*value)) {
            let ids: Vec<i64> = values.iter().map(|value| *value as i64).collect();
            return Self::new(axes, &ids);
        }
        let highest = values.iter().fold(0.0, |most: f64, value| most.max(*value));
        Ok(Self {
            values: Values::Real(values.into()),
            axes,
            highest: highest.ceil() as u32,
        })
    }

    /// Creates the ids of text: `start..start + tokens`, equal on each of `axes` axes.
    ///
    /// # Errors
    /// [`RopeError::PositionShape`] if `axes` is 0; [`RopeError::PositionOutOfRange`] if the last
    /// id is above 2^31; [`RopeError::PositionIds`] if the ids do not fit into memory.
    pub fn text(axes: usize, start: u32, tokens: usize) -> Result<Self> {
        let last_token = tokens.saturating_sub(1);
        let last = u64::from(start).saturating_add(last_token as u64);
        if last > u64::from(MAX_POSITION) {
            return Err(RopeError::PositionOutOfRange {
                found: i64::try_from(last).unwrap_or(i64::MAX),
                axis: 0,
                token: last_token,
            });
        }
        let mut ids = reserved("positions", axes.saturating_mul(tokens))?;
        for _ in 0..axes {
            ids.extend((start..).take(tokens));
        }
        self::tokens(axes, ids.len())?;
        Ok(Self {
            highest: ids.last().copied().unwrap_or(0),
            values: Values::Ids(ids.into()),
            axes,
        })
    }

    /// The number of axes.
    pub fn axis_count(&self) -> usize {
        self.axes
    }
    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        let values = match &self.values {
            Values::Ids(ids) => ids.len(),
            Values::Real(values) => values.len(),
        };
        values / self.axes
    }
    /// True if all positions are ids, as tables require.
    pub fn are_ids(&self) -> bool {
        matches!(self.values, Values::Ids(_))
    }
    /// The ids of one axis, a row of `[axes, tokens]`.
    ///
    /// # Errors
    /// [`RopeError::PositionNotId`] if the positions are not ids.
    ///
    /// # Panics
    /// If `axis` is not below [`axis_count`](Self::axis_count).
    pub fn axis(&self, axis: usize) -> Result<&[u32]> {
        match &self.values {
            Values::Ids(ids) => Ok(self.row(ids, axis)),
            Values::Real(values) => {
                let no_id = values.iter().position(|value| !is_id(*value));
                let no_id = no_id.unwrap_or_default();
                Err(RopeError::PositionNotId {
                    found: values[no_id],
                    axis: no_id / self.tokens(),
                    token: no_id % self.tokens(),
                })
            }
        }
    }
    /// The position of a token on an axis, id or real.
    ///
    /// # Panics
    /// If the axis or the token does not exist.
    pub fn value(&self, axis: usize, token: usize) -> f64 {
        match &self.values {
            Values::Ids(ids) => f64::from(self.row(ids, axis)[token]),
            Values::Real(values) => self.row(values, axis)[token],
        }
    }
    /// The highest position on any axis, rounded up, and at least 0.
    pub fn highest(&self) -> u32 {
        self.highest
    }

    /// Applies `ids` or `real` to the rows of all axes.
    pub(crate) fn with_rows<T>(
        &self,
        ids: impl FnOnce(&[&[u32]]) -> T,
        real: impl FnOnce(&[&[f64]]) -> T,
    ) -> T {
        fn rows<'a, P>(of: &Positions, values: &'a [P]) -> Vec<&'a [P]> {
            (0..of.axes).map(|axis| of.row(values, axis)).collect()
        }
        match &self.values {
            Values::Ids(values) => ids(&rows(self, values)),
            Values::Real(values) => real(&rows(self, values)),
        }
    }

    fn row<'a, P>(&self, values: &'a [P], axis: usize) -> &'a [P] {
        let tokens = values.len() / self.axes;
        &values[axis * tokens..(axis + 1) * tokens]
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

fn tokens(axes: usize, values: usize) -> Result<usize> {
    if axes == 0 || !values.is_multiple_of(axes) {
        return Err(RopeError::PositionShape { ids: values, axes });
    }
    Ok(values / axes)
}

fn is_id(value: f64) -> bool {
    (0.0..=f64::from(MAX_POSITION)).contains(&value) && value.fract() == 0.0
}
