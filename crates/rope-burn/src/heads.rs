//! Heads with separate angles, as tokens of one head: every backend's kernels, forward and
//! backward, can then rotate them unchanged.

use burn::tensor::Tensor;
use rope_core::{HeadsLayout, Layout, RopeError};

use crate::angles::RotaryAngles;
use crate::error::Result;
use crate::rotary::RotaryOp;

/// A rotation of tensors whose heads have separate angles.
pub(crate) struct HeadsAsTokens {
    op: RotaryOp,
    heads: HeadsLayout,
}

impl HeadsAsTokens {
    /// Checks the properties that the rotation of the flattened tensors cannot see.
    ///
    /// # Errors
    /// [`RotaryError::Rank`](crate::RotaryError::Rank); [`RopeError::ShapeMismatch`] if q, k and
    /// the angles differ in heads; [`RopeError::PositionTokens`].
    pub(crate) fn new<const D: usize>(
        op: RotaryOp,
        q: &Tensor<D>,
        k: Option<&Tensor<D>>,
        angles: &RotaryAngles,
    ) -> Result<Self> {
        let heads = op.heads("q", &q.shape())?;
        let angle_heads = HeadsLayout {
            heads: angles.heads(),
            ..heads
        };
        angle_heads.check_same(&heads, "the angles", "q", true)?;
        if let Some(k) = k {
            let k = op.heads("k", &k.shape())?;
            heads.check_same(&k, "q", "k", true)?;
        }
        let (batch, seq, found) = (heads.batch, heads.seq, angles.tokens());
        if found != seq && found != batch * seq {
            return Err(RopeError::PositionTokens { batch, seq, found }.into());
        }
        Ok(Self { op, heads })
    }

    /// Returns the rotation of the result of [`flatten`](Self::flatten).
    pub(crate) fn op(&self) -> RotaryOp {
        RotaryOp {
            layout: Layout::Bsnd,
            ..self.op
        }
    }

    /// Reshapes to `[batch, seq * heads, 1, head_dim]`, without a copy if the heads of each token
    /// are adjacent and there are no gaps.
    pub(crate) fn flatten<const D: usize>(&self, x: Tensor<D>) -> Tensor<4> {
        let HeadsLayout {
            batch,
            seq,
            heads,
            head_dim,
            ..
        } = self.heads;
        self.exchange(x).reshape([batch, seq * heads, 1, head_dim])
    }

    /// Inverts [`flatten`](Self::flatten).
    pub(crate) fn restore<const D: usize>(&self, x: Tensor<4>) -> Tensor<D> {
        let sizes = [
            self.heads.batch,
            self.heads.seq,
            self.heads.heads,
            self.heads.head_dim,
        ];
        // Packed tokens have no batch.
        let sizes: [usize; D] = std::array::from_fn(|dim| sizes[dim + 4 - D]);
        self.exchange(x.reshape(sizes))
    }

    /// Permutes the dimensions to samples, tokens, heads and channels, or back.
    fn exchange<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.op.layout {
            Layout::Bsnd | Layout::Tnd => x,
            Layout::Bnsd => x.swap_dims(1, 2),
            Layout::Sbnd => x.swap_dims(0, 1),
        }
    }
}
