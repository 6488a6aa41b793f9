//! The operation as backends implement it.

use burn::backend::{Backend, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_fused::{accumulator, expect, expect_device};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, RopeError};

use super::composed;
use crate::error::{Result, RotaryError};

/// One rotation: the pairing of channels, the order of dimensions, and the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotaryOp {
    /// The rotated channels of a head and their pairing.
    pub geometry: Geometry,
    /// The order of the dimensions of q and k.
    pub layout: Layout,
    /// The rotation, or its adjoint.
    pub direction: Direction,
}

impl RotaryOp {
    /// Returns the operation that the backward of this one applies to the incoming gradient.
    pub fn transposed(self) -> Self {
        Self {
            direction: self.direction.transposed(),
            ..self
        }
    }

    /// Returns the layout of a contiguous tensor for the kernels.
    pub(crate) fn heads(&self, what: &'static str, shape: &Shape) -> Result<HeadsLayout> {
        let (layout, dims) = (self.layout, shape.as_slice());
        let Some([batch, seq, heads, head_dim]) = sizes(layout, dims) else {
            let (expected, found) = (if layout == Layout::Tnd { 3 } else { 4 }, dims.len());
            return Err(RotaryError::Rank {
                what,
                layout,
                expected,
                found,
            });
        };
        Ok(HeadsLayout::contiguous(layout, batch, seq, heads, head_dim))
    }

    /// Checks the shapes and types of a rotation's tensors, for every backend.
    ///
    /// [`Rotary`](crate::Rotary) calls it before a backend. A backend whose kernels take untyped
    /// bytes calls it too, for tensors from other callers.
    ///
    /// # Errors
    /// Those of [`Rotary::try_forward`](crate::Rotary::try_forward).
    pub fn check<T: TensorMetadata>(&self, q: &T, k: Option<&T>, angles: &T) -> Result<()> {
        self.check_named(["q", "k"], q, k, angles, false)
            .map_err(|error| match error {
                // Often tensors of another order: the sizes as they are read show it.
                RotaryError::Rope(
                    source @ (RopeError::PositionTokens { .. }
                    | RopeError::ShapeMismatch {
                        dimension: "batch" | "seq",
                        ..
                    }),
                ) => {
                    let (q, k) = (q.shape(), k.map(T::shape));
                    let k = k.as_ref().map(|k| k.as_slice());
                    RotaryError::Layout {
                        source: source.into(),
                        reading: reading(self.layout, q.as_slice(), k),
                    }
                }
                other => other,
            })
    }

    /// Checks, like [`RotaryOp::check`], a tensor and the gradient of its rotation, which have the
    /// same shape.
    ///
    /// # Errors
    /// As [`RotaryOp::check`].
    pub fn check_gradient<T: TensorMetadata>(&self, x: &T, gradient: &T, angles: &T) -> Result<()> {
        self.check_named(["x", "its gradient"], x, Some(gradient), angles, true)
    }

    fn check_named<T: TensorMetadata>(
        &self,
        names: [&'static str; 2],
        q: &T,
        k: Option<&T>,
        angles: &T,
        heads_too: bool,
    ) -> Result<()> {
        let expected = DType::from(accumulator(q.dtype())?);
        if let Some(k) = k {
            expect(names[1], k, q.dtype(), q)?;
        }
        expect_device("the tensor of angles", angles, q)?;
        let heads = self.heads(names[0], &q.shape())?;
        let head_dim = self.geometry.head_dim();
        if heads.head_dim != head_dim {
            return Err(RopeError::ShapeMismatch {
                left: "the rotation",
                right: names[0],
                dimension: "head_dim",
                left_size: head_dim,
                right_size: heads.head_dim,
            }
            .into());
        }
        if let Some(k) = k {
            let k = self.heads(names[1], &k.shape())?;
            heads.check_same(&k, names[0], names[1], heads_too)?;
        }
        let (found, shape) = (angles.dtype(), angles.shape());
        let what = "the angles";
        if found != expected {
            return Err(RotaryError::AngleDType {
                what,
                found,
                expected,
            });
        }
        let (batch, seq, width) = (heads.batch, heads.seq, 2 * self.geometry.lane_count());
        let tokens = shape.as_slice().first().copied().unwrap_or(0);
        if shape.as_slice() != [tokens, width] {
            let (found, expected) = (shape.num_elements(), tokens * width);
            return Err(RopeError::AngleShape {
                what,
                found,
                expected,
                tokens,
                width,
            }
            .into());
        }
        if tokens != seq && tokens != batch * seq {
            let found = tokens;
            return Err(RopeError::PositionTokens { batch, seq, found }.into());
        }
        Ok(())
    }
}

/// Returns the batch, tokens, heads and channels that a layout implies for a shape of its rank.
fn sizes(layout: Layout, dims: &[usize]) -> Option<[usize; 4]> {
    match (layout, dims) {
        (Layout::Bsnd, &[batch, seq, heads, head_dim])
        | (Layout::Bnsd, &[batch, heads, seq, head_dim])
        | (Layout::Sbnd, &[seq, batch, heads, head_dim]) => Some([batch, seq, heads, head_dim]),
        (Layout::Tnd, &[seq, heads, head_dim]) => Some([1, seq, heads, head_dim]),
        _ => None,
    }
}

/// States the heads and tokens that a layout implies for the shapes of q and k, and the layout for
/// the other usual order.
fn reading(layout: Layout, q: &[usize], k: Option<&[usize]>) -> String {
    let read = |name: &str, shape: &[usize]| match sizes(layout, shape) {
        Some([_, seq, heads, _]) => format!("{name} {shape:?} as {heads} heads of {seq} tokens"),
        None => format!("{name} {shape:?}"),
    };
    let k = k.map_or_else(String::new, |k| format!(", {}", read("k", k)));
    let other = match layout {
        Layout::Bnsd | Layout::Sbnd => "; for [batch, seq, heads, head_dim] use Layout::Bsnd",
        Layout::Bsnd => "; for [batch, heads, seq, head_dim] use Layout::Bnsd",
        Layout::Tnd => "",
    };
    format!("layout {layout:?} reads {}{k}{other}", read("q", q))
}

// The backends of the traits below and of `NormRotaryOps`.
burn_fused::reaches!(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
);

/// Rotation of q and k, as a backend implements it.
///
/// Every method has a default body composed of ordinary operations; a backend with kernels
/// overrides it. The implementation for [`Autodiff`](burn::backend::Autodiff) adds the hand-written
/// backward.
///
/// # Shapes
/// - q, k: in the order of `op.layout`; their head counts may differ
/// - angles: `[tokens, 2 * lanes]`, each token's cosines, then its sines, as in
///   [`RotaryAngles`](crate::RotaryAngles); tokens are those of the batch, or of one sequence that
///   serves all samples
///
/// # Panics
/// If shapes or types disagree. [`RotaryOp::check`] reports the reason; [`Rotary`](crate::Rotary)
/// calls it before a backend.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Fusion: cfg(feature = "fusion"),
    Autodiff
)]
pub trait RotaryOps: Backend {
    /// Rotates q and k in one pass over memory.
    #[fusion(meta = |q, k, _, _| (q.clone(), k.clone()))]
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let k = composed::rotate::<Self>(k, angles.clone(), op);
        (composed::rotate::<Self>(q, angles, op), k)
    }

    /// Rotates one tensor.
    #[fusion(dtype = x, shape = x)]
    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        composed::rotate::<Self>(x, angles, op)
    }

    /// Computes the gradient of the angles, in their shape, from x and the gradient of the rotated
    /// x.
    #[fusion(dtype = angles, shape = angles)]
    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        composed::angle_gradients::<Self>(x, gradient, angles, op)
    }
}
