//! The operation as backends see it.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, RopeError};

use crate::composed;
use crate::error::{Result, RotaryError};

/// What one application does: which channels pair, how the dimensions are ordered, and which way it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotaryOp {
    /// Where the rotated channels lie in a head and how they pair.
    pub geometry: Geometry,
    /// The order of the dimensions of q and k.
    pub layout: Layout,
    /// The rotation, or its adjoint.
    pub direction: Direction,
}

impl RotaryOp {
    /// The operation that the backward of this one applies to the incoming gradient.
    pub fn transposed(self) -> Self {
        Self {
            direction: self.direction.transposed(),
            ..self
        }
    }

    /// Shape of a contiguous tensor as the kernels see it.
    pub(crate) fn heads(&self, what: &'static str, shape: &Shape) -> Result<HeadsLayout> {
        let (dims, expected) = (
            shape.as_slice(),
            if self.layout == Layout::Tnd { 3 } else { 4 },
        );
        if dims.len() != expected {
            let (layout, found) = (self.layout, dims.len());
            return Err(RotaryError::Rank {
                what,
                layout,
                expected,
                found,
            });
        }
        let [batch, seq, heads] = match self.layout {
            Layout::Bsnd => [dims[0], dims[1], dims[2]],
            Layout::Bnsd => [dims[0], dims[2], dims[1]],
            Layout::Sbnd => [dims[1], dims[0], dims[2]],
            Layout::Tnd => [1, dims[0], dims[1]],
        };
        Ok(HeadsLayout::contiguous(
            self.layout,
            batch,
            seq,
            heads,
            dims[expected - 1],
        ))
    }

    /// Refuses what the backends' kernels could not run; each tensor is given by shape and type.
    ///
    /// # Errors
    /// Those of [`Rotary::try_forward`](crate::Rotary::try_forward).
    pub fn check(
        &self,
        q: (&Shape, DType),
        k: Option<(&Shape, DType)>,
        cos: (&Shape, DType),
        sin: (&Shape, DType),
    ) -> Result<()> {
        let expected = angle_dtype(q.1)?;
        if let Some((_, dtype)) = k
            && dtype != q.1
        {
            return Err(RotaryError::MixedDTypes { q: q.1, k: dtype });
        }
        for (what, found) in [("cos", cos.1), ("sin", sin.1)] {
            if found != expected {
                return Err(RotaryError::AngleDType {
                    what,
                    found,
                    expected,
                });
            }
        }
        let shape_mismatch = |left, right, dimension, left_size, right_size| {
            Err(RopeError::ShapeMismatch {
                left,
                right,
                dimension,
                left_size,
                right_size,
            }
            .into())
        };
        let heads = self.heads("q", q.0)?;
        if heads.head_dim != self.geometry.head_dim() {
            return shape_mismatch(
                "the rotation",
                "q",
                "head_dim",
                self.geometry.head_dim(),
                heads.head_dim,
            );
        }
        if let Some((shape, _)) = k {
            let other = self.heads("k", shape)?;
            for (dimension, left, right) in [
                ("batch", heads.batch, other.batch),
                ("seq", heads.seq, other.seq),
                ("head_dim", heads.head_dim, other.head_dim),
            ] {
                if left != right {
                    return shape_mismatch("q", "k", dimension, left, right);
                }
            }
        }
        let lanes = self.geometry.lanes();
        for (what, shape) in [("cos", cos.0), ("sin", sin.0)] {
            let tokens = shape.as_slice().first().copied().unwrap_or(0);
            let expected = tokens * lanes;
            if shape.as_slice() != [tokens, lanes] {
                let found = shape.num_elements();
                return Err(RopeError::AngleShape {
                    what,
                    found,
                    expected,
                    tokens,
                    lanes,
                }
                .into());
            }
            if tokens != heads.seq && tokens != heads.batch * heads.seq {
                let (batch, seq, found) = (heads.batch, heads.seq, tokens);
                return Err(RopeError::PositionTokens { batch, seq, found }.into());
            }
        }
        if cos.0 != sin.0 {
            return shape_mismatch(
                "cos",
                "sin",
                "tokens",
                cos.0.as_slice()[0],
                sin.0.as_slice()[0],
            );
        }
        Ok(())
    }
}

/// The type that cos and sin have for tensors of a type.
pub(crate) fn angle_dtype(x: DType) -> Result<DType> {
    match x {
        DType::F32 | DType::F16 | DType::BF16 => Ok(DType::F32),
        DType::F64 => Ok(DType::F64),
        found => Err(RotaryError::UnsupportedDType { found }),
    }
}

/// Rotation of q and k on a backend.
///
/// Every method has a body composed from ordinary operations; a backend overrides what it has kernels for. The
/// implementation for [`Autodiff`](burn::backend::Autodiff) adds the hand-written backward.
///
/// # Shapes
/// - q, k: as `op.layout` says; they may differ in heads
/// - cos, sin: `[tokens, lanes]`, attention scaling included, in f32 (f64 for f64 tensors); tokens count over the batch,
///   or over one sequence that serves all samples
///
/// # Panics
/// With the message of a [`RotaryError`] if shapes or types disagree. [`Rotary`](crate::Rotary) has `try_` twins that
/// check before calling.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait RotaryOps: Backend {
    /// Rotates q and k in one pass over memory.
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let k = composed::rotate::<Self>(k, cos.clone(), sin.clone(), op);
        (composed::rotate::<Self>(q, cos, sin, op), k)
    }

    /// Rotates one tensor.
    fn rotary_single(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        composed::rotate::<Self>(x, cos, sin, op)
    }

    /// The gradients of cos and sin, shaped as `cos`, from x and the gradient of the rotated x.
    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::angle_gradients::<Self>(x, gradient, cos, op)
    }
}
