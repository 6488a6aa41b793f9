//! The operation as backends implement it.

use burn::backend::{TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_fused::{accumulator, expect};
use rope_core::{Direction, Geometry, HeadNorm, Layout, RopeError};

use super::composed;
use crate::error::Result;
use crate::rotary::{RotaryOp, RotaryOps};

/// A norm of each head with its rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormRotaryOp {
    /// The rotated channels of a head and their pairing.
    pub geometry: Geometry,
    /// The order of the dimensions of q and k.
    pub layout: Layout,
    /// The norm, and its order relative to the rotation.
    pub norm: HeadNorm,
    /// True if nothing reads the weight's gradient of a backward, whose numbers may be any.
    pub skips_weight: bool,
}

impl NormRotaryOp {
    /// Returns the rotation alone.
    pub(crate) fn rotary(&self, direction: Direction) -> RotaryOp {
        RotaryOp {
            geometry: self.geometry,
            layout: self.layout,
            direction,
        }
    }

    /// Checks the shape and type of a weight for tensors like `x`; [`RotaryOp::check`] checks the
    /// rest.
    ///
    /// # Errors
    /// [`RopeError::NormWeight`], [`OpError`](burn_fused::OpError).
    pub fn check_weight<T: TensorMetadata>(
        &self,
        what: &'static str,
        weight: &T,
        x: &T,
    ) -> Result<()> {
        let (found, expected) = (weight.shape().num_elements(), self.geometry.head_dim());
        if weight.shape().as_slice() != [expected] {
            return Err(RopeError::NormWeight {
                what,
                found,
                expected,
            }
            .into());
        }
        Ok(expect(what, weight, accumulator(x.dtype())?.into(), x)?)
    }
}

/// RMSNorm of each head with its rotation, as a backend implements it.
///
/// Every method has a default body, composed of ordinary operations and the backend's rotation; a
/// backend with kernels overrides it. The implementation for [`Autodiff`](burn::backend::Autodiff)
/// adds the hand-written backward.
///
/// # Shapes
/// - q, k, x: in the order of `op.layout`; the head counts of q and k may differ
/// - weights: `[head_dim]`, in the type of the angles
/// - angles: as for [`RotaryOps`](crate::RotaryOps)
///
/// # Panics
/// If shapes or types disagree; [`RotaryOp::check`] and [`NormRotaryOp::check_weight`] report the
/// reason.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Fusion: cfg(feature = "fusion"),
    Autodiff
)]
pub trait NormRotaryOps: RotaryOps {
    /// Normalises each head of q and k, before or after the rotation as `op.norm` states, and
    /// rotates them, in one pass over memory.
    #[fusion(meta = |q, k, _, _, _, _| (q.clone(), k.clone()))]
    fn norm_rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let k = Self::norm_rotary(k, k_weight, angles.clone(), op);
        (Self::norm_rotary(q, q_weight, angles, op), k)
    }

    /// Normalises each head of x, before or after the rotation as `op.norm` states, and rotates it.
    #[fusion(dtype = x, shape = x)]
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        composed::norm_rotate::<Self>(x, weight, angles, op, Self::rotary_single)
    }

    /// Computes the gradients of x and the weight from x and the gradient of the result.
    #[fusion(meta = |x, weight, _, _, _| (x.clone(), weight.clone()))]
    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let rotate = Self::rotary_single;
        composed::norm_rotate_backward::<Self>(x, weight, angles, gradient, op, rotate)
    }
}
