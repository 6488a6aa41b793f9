//! cos and sin as tensors.

use burn::tensor::{DType, Tensor};

/// cos and sin for the tokens of a step, made once and shared by all layers.
///
/// `[tokens, lanes]` each, in f32 (f64 to rotate f64 tensors), attention scaling included. Lanes are the pairs, or for
/// a per-channel axis layout all first members, then all second members. Cloning shares the tensors.
///
/// From [`Rotary::angles`](crate::Rotary::angles), or from tensors of one's own: where those require gradients, the
/// backward makes them, and keeps q and k for it.
#[derive(Clone, Debug)]
pub struct RotaryAngles {
    /// Cosines.
    pub cos: Tensor<2>,
    /// Sines.
    pub sin: Tensor<2>,
}

impl RotaryAngles {
    /// The number of tokens served.
    pub fn tokens(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The type that cos and sin are kept in.
    pub fn dtype(&self) -> DType {
        self.cos.dtype()
    }
}
