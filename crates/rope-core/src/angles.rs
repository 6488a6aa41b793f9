//! cos and sin: computed in f64, rounded once, kept in the type that the kernels compute in.

use std::sync::Arc;

use crate::element::Real;
use crate::error::{Result, RopeError};
use crate::frequencies::expect_finite_angles;
use crate::lanes::LaneMap;
use crate::parallel::for_each_block;
use crate::positions::Positions;
use crate::spec::RotarySpec;

/// The default byte limit of a table, 256 MiB: positions up to 2^19 at 64 frequencies in f32.
pub const DEFAULT_TABLE_BUDGET_BYTES: usize = 256 << 20;

/// Tokens whose cos and sin one task computes, in about 50 us.
const BLOCK_TOKENS: usize = 32;

/// Table of cos and sin of every position from 0, with one column per frequency. It grows to the
/// positions in use.
///
/// A row holds the cosines, then the sines, each times the attention scaling.
///
/// # Numerics
/// angle = position * inv_freq in f64; cos and sin in f64; one rounding to `A`. Up to position
/// 2^22, the error against exact arithmetic is the rounding error; at position 2^31, it is at most
/// 3e-7.
#[derive(Clone)]
pub struct CosSinTable<A: Real = f32> {
    rows: Vec<A>,
    inv_freq: Vec<f64>,
    attention_scaling: f64,
    lane_map: Arc<LaneMap>,
    budget_bytes: usize,
}

/// Prints its size, not its millions of values: modules that hold a table are printed.
impl<A: Real> std::fmt::Debug for CosSinTable<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CosSinTable")
            .field("positions", &self.rows())
            .field("frequencies", &self.inv_freq.len())
            .field("budget_bytes", &self.budget_bytes)
            .finish_non_exhaustive()
    }
}

impl<A: Real> CosSinTable<A> {
    /// Creates an empty table for a rotation; `seq_len` is as in [`RotarySpec::inv_freq`].
    ///
    /// # Errors
    /// Those of [`RotarySpec::inv_freq`].
    pub fn new(spec: &RotarySpec, seq_len: Option<u64>) -> Result<Self> {
        Ok(Self {
            rows: Vec::new(),
            inv_freq: spec.inv_freq(seq_len)?,
            attention_scaling: spec.attention_scaling(),
            lane_map: Arc::clone(spec.lane_map()),
            budget_bytes: DEFAULT_TABLE_BUDGET_BYTES,
        })
    }

    /// Limits the table to `budget_bytes`.
    pub fn with_budget_bytes(mut self, budget_bytes: usize) -> Self {
        self.budget_bytes = budget_bytes;
        self
    }

    /// The number of positions in the table, counted from 0.
    pub fn rows(&self) -> usize {
        self.rows.len() / (2 * self.inv_freq.len())
    }

    /// The cosines, then the sines, of one position; one value per frequency each.
    pub fn row(&self, position: usize) -> Option<&[A]> {
        // Products with a row beyond the table may overflow.
        self.rows
            .chunks_exact(2 * self.inv_freq.len())
            .nth(position)
    }

    /// The lane map by which its rows are gathered.
    pub fn lane_map(&self) -> &Arc<LaneMap> {
        &self.lane_map
    }

    /// Computes the rows up to and including `position`.
    ///
    /// The table at least doubles, within its budget, so that decoding token by token rarely grows
    /// it.
    ///
    /// # Errors
    /// [`RopeError::TableBudget`] if the rows do not fit into the budget; the table is then
    /// unchanged.
    pub fn grow_to(&mut self, position: u32) -> Result<()> {
        let width = 2 * self.inv_freq.len();
        let (have, need) = (self.rows(), position as usize + 1);
        if need <= have {
            return Ok(());
        }
        let row_bytes = width * size_of::<A>();
        let needed_bytes = need as u128 * row_bytes as u128;
        if needed_bytes > self.budget_bytes as u128 {
            let budget_bytes = self.budget_bytes;
            return Err(RopeError::TableBudget {
                position,
                needed_bytes,
                budget_bytes,
            });
        }
        let rows = need.max((2 * have).min(self.budget_bytes / row_bytes));
        // Moved out of the table while rows are filled: if a thread panics, the table holds no
        // unfilled row.
        let mut values = std::mem::take(&mut self.rows);
        values.reserve_exact((rows - have) * width);
        values.resize(rows * width, A::ZERO);
        let (inv_freq, scaling) = (&self.inv_freq, self.attention_scaling);
        let blocks = values[have * width..].chunks_mut(BLOCK_TOKENS * width);
        for_each_block(blocks.enumerate().collect(), |(block, rows)| {
            let first = have + block * BLOCK_TOKENS;
            for (row, to) in rows.chunks_exact_mut(width).enumerate() {
                let position = (first + row) as f64;
                let (cos, sin) = to.split_at_mut(inv_freq.len());
                for ((inv, cos), sin) in inv_freq.iter().zip(cos).zip(sin) {
                    let (s, c) = (position * inv).sin_cos();
                    (*cos, *sin) = (A::from_f64(c * scaling), A::from_f64(s * scaling));
                }
            }
        });
        self.rows = values;
        Ok(())
    }
}

/// cos and sin for the tokens of one step, shared by all layers. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct TokenAngles<A: Real = f32> {
    /// The `Vec` as filled: for long contexts, copying it would take as long as computing its
    /// values.
    rows: Arc<Vec<A>>,
    lanes: usize,
    heads: Option<usize>,
}

impl<A: Real> TokenAngles<A> {
    /// Computes cos and sin for `positions` directly, however high. It builds no table and takes
    /// memory for the step's tokens only.
    ///
    /// # Errors
    /// [`RopeError::PositionAxes`]; those of [`RotarySpec::inv_freq`].
    pub fn new(spec: &RotarySpec, positions: &Positions, seq_len: Option<u64>) -> Result<Self> {
        positions.expect_axes(spec.axis_count())?;
        let inv_freq = spec.inv_freq(seq_len)?;
        let scaling = spec.attention_scaling();
        let (map, tokens) = (spec.lane_map(), positions.tokens());
        let cos_sin = |position: f64, frequency: usize| {
            let (sin, cos) = (position * inv_freq[frequency]).sin_cos();
            (A::from_f64(cos * scaling), A::from_f64(sin * scaling))
        };
        let id_cos_sin = |id: u32, frequency| cos_sin(f64::from(id), frequency);
        Ok(positions.with_rows(
            |ids| Self::collect(map, ids, tokens, id_cos_sin),
            |values| Self::collect(map, values, tokens, cos_sin),
        ))
    }

    /// Gathers cos and sin for `positions` from a table.
    ///
    /// # Errors
    /// [`RopeError::PositionAxes`]; [`RopeError::PositionNotId`]; [`RopeError::TableTooShort`].
    pub fn gather(table: &CosSinTable<A>, positions: &Positions) -> Result<Self> {
        positions.expect_axes(table.lane_map.axis_count())?;
        let ids = (0..positions.axis_count()).map(|axis| positions.axis(axis));
        let ids: Vec<&[u32]> = ids.collect::<Result<_>>()?;
        if positions.tokens() > 0 && positions.highest() as usize >= table.rows() {
            let (position, rows) = (positions.highest(), table.rows());
            return Err(RopeError::TableTooShort { position, rows });
        }
        let (columns, width) = (table.inv_freq.len(), 2 * table.inv_freq.len());
        let cos_sin = |id: u32, frequency| {
            let at = id as usize * width + frequency;
            (table.rows[at], table.rows[at + columns])
        };
        let tokens = positions.tokens();
        Ok(Self::collect(&table.lane_map, &ids, tokens, cos_sin))
    }

    /// Computes cos and sin with separate frequencies for each head, which may mix the axes (Mochi,
    /// RoPE-Mixed) or differ between heads (LTX-2, MHRoPE):
    ///
    /// angle\[token, head, lane\] = sum over axes of position\[axis, token\] *
    /// frequency\[axis, head, lane\], in f64; cos and sin are rounded once.
    ///
    /// # Shapes
    /// `frequencies`: `[axes, heads, lanes]`, with the axes of `positions`. Lanes are the pairs of
    /// a head, or all first members and then all second members. The result takes `heads` times the
    /// memory of shared angles, and a rotation reads all of it.
    ///
    /// # Units
    /// frequencies in radians per unit of the positions
    ///
    /// # Errors
    /// [`RopeError::HeadFrequencies`] if the list is empty or does not divide into axes and heads;
    /// [`RopeError::Frequency`] if a frequency is NaN or too large for finite angles.
    ///
    /// # Source
    /// Heo, Park, Han and Yun, 2024, Rotary Position Embedding for Vision Transformer, RoPE-Mixed.
    pub fn per_head(positions: &Positions, frequencies: &[f64], heads: usize) -> Result<Self> {
        let (axes, found) = (positions.axis_count(), frequencies.len());
        let rows = axes.saturating_mul(heads);
        if rows == 0 || found == 0 || !found.is_multiple_of(rows) {
            return Err(RopeError::HeadFrequencies { axes, heads, found });
        }
        let axis_frequencies = found / axes;
        expect_finite_angles(frequencies)?;
        let lanes = axis_frequencies / heads;
        let mut rows = vec![A::ZERO; positions.tokens() * 2 * axis_frequencies];
        let blocks = rows.chunks_mut(BLOCK_TOKENS * 2 * axis_frequencies);
        for_each_block(blocks.enumerate().collect(), |(block, rows)| {
            for (row, values) in rows.chunks_exact_mut(2 * lanes).enumerate() {
                let (token, head) = (block * BLOCK_TOKENS + row / heads, row % heads);
                let (cos, sin) = values.split_at_mut(lanes);
                for (lane, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
                    let at = head * lanes + lane;
                    let angle = |axis| {
                        positions.value(axis, token) * frequencies[axis * axis_frequencies + at]
                    };
                    let (s, c) = (0..axes).map(angle).sum::<f64>().sin_cos();
                    (*cos, *sin) = (A::from_f64(c), A::from_f64(s));
                }
            }
        });
        Ok(Self {
            rows: Arc::new(rows),
            lanes,
            heads: Some(heads),
        })
    }

    fn collect<P: Copy + Sync>(
        map: &LaneMap,
        positions: &[&[P]],
        tokens: usize,
        cos_sin: impl Fn(P, usize) -> (A, A) + Sync + Send,
    ) -> Self {
        let lanes = map.lanes().len();
        let mut rows = vec![A::ZERO; tokens * 2 * lanes];
        let blocks = rows.chunks_mut(BLOCK_TOKENS * 2 * lanes);
        for_each_block(blocks.enumerate().collect(), |(block, rows)| {
            for (row, values) in rows.chunks_exact_mut(2 * lanes).enumerate() {
                let token = block * BLOCK_TOKENS + row;
                let (cos, sin) = values.split_at_mut(lanes);
                for ((lane, cos), sin) in map.lanes().iter().zip(cos).zip(sin) {
                    let position = positions[usize::from(lane.axis)][token];
                    (*cos, *sin) = cos_sin(position, lane.frequency as usize);
                }
            }
        });
        Self {
            rows: Arc::new(rows),
            lanes,
            heads: None,
        }
    }

    /// The rows, `[tokens, 2 * lanes]`: each token's cosines, then its sines. With angles per head,
    /// `[tokens, heads, 2 * lanes]`.
    pub fn rows(&self) -> &[A] {
        &self.rows
    }

    /// The number of heads with separate angles; `None` if all heads share them.
    pub fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// The number of angles per token, or per head of a token if heads have separate angles.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Returns the [`rows`](Self::rows); copies them only if a clone shares them.
    pub fn into_rows(self) -> Vec<A> {
        Arc::unwrap_or_clone(self.rows)
    }

    /// Copies all cosines and all sines, `[tokens, lanes]` each; with angles per head, `[tokens,
    /// heads, lanes]`.
    pub fn cos_sin(&self) -> [Vec<A>; 2] {
        let half = |start| {
            let rows = self.rows.chunks_exact(2 * self.lanes);
            rows.flat_map(move |row| &row[start..start + self.lanes])
        };
        [0, self.lanes].map(|start| half(start).copied().collect())
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.rows.len() / (2 * self.lanes * self.heads.unwrap_or(1))
    }

    /// Borrows the angles in the form that the kernels take.
    pub fn angles(&self) -> Angles<'_, A> {
        let rows = &self.rows;
        match self.heads {
            None => Angles::Tokens(rows),
            Some(heads) => Angles::Heads { rows, heads },
        }
    }
}

/// The cos and sin of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Angles<'a, A: Real = f32> {
    /// One row per token, `[tokens, 2 * lanes]`: its cosines, then its sines, with the attention
    /// scaling applied. They are gathered once for all layers of a step, or learned.
    Tokens(&'a [A]),
    /// One row per token and head, `[tokens, heads, 2 * lanes]`. q, and k if rotated in the same
    /// call, must have this number of heads. If k has a different number of heads or different
    /// tokens, use a separate [`Rotator`](crate::Rotator) for each.
    ///
    /// Each row is read for one head only. With all channels rotated and one angle per pair, a
    /// rotation moves 1.5 times the bytes of f32 tensors and twice those of 16-bit tensors.
    Heads {
        /// Each head's cosines, then its sines.
        rows: &'a [A],
        /// Heads of a token.
        heads: usize,
    },
}

impl<'a, A: Real> Angles<'a, A> {
    /// The rows, one per token or per head of a token.
    pub(crate) fn rows(&self) -> &'a [A] {
        match *self {
            Self::Tokens(rows) | Self::Heads { rows, .. } => rows,
        }
    }

    /// The number of heads with separate angles; `None` if all heads share them.
    pub(crate) fn own_heads(&self) -> Option<usize> {
        match self {
            Self::Heads { heads, .. } => Some(*heads),
            Self::Tokens(_) => None,
        }
    }
}
