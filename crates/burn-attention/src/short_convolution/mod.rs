//! A short causal convolution of each channel, and SiLU, as one operation.

mod backward;
pub mod composed;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::Tensor;
use burn_fused::primitive::zeros_from;

use crate::backends;
use crate::error::Result;
use crate::sequences::Sequences;

pub use op::{ShortConvolutionOp, ShortConvolutionOps};

/// Computes silu(z) with z(t) = sum over j of weight(j) x(t - taps + 1 + j), separately for each
/// channel, over the tokens of t's sequence.
///
/// # Shapes
/// - x, out: `[batch, tokens, channels]`; weight: `[channels, taps]`, in the type of x
///
/// # Numerics
/// 16-bit tensors are computed in f32 and each result is rounded once; f64 is computed in f64.
///
/// # Memory
/// The autodiff graph keeps x and the weight.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`NoChannels`](crate::AttentionError::NoChannels) without
/// taps, [`Op`](crate::AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{Sequences, short_convolution};
///
/// let device = Device::flex();
/// let x = Tensor::<3>::from_floats([[[1.0], [2.0], [3.0]]], &device);
/// // The token before counts ten times, but not across the border of the sequences.
/// let weight = Tensor::<2>::from_floats([[10.0, 1.0]], &device);
/// let y = short_convolution(x, weight, &Sequences::packed(&[0, 1, 3], 3)?)?;
/// let y: Vec<f32> = y.into_data().iter().collect();
/// let silu = |z: f32| z / (1.0 + (-z).exp());
/// assert!((y[1] - silu(2.0)).abs() < 1e-6 && (y[2] - silu(23.0)).abs() < 1e-5);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn short_convolution(
    x: Tensor<3>,
    weight: Tensor<2>,
    sequences: &Sequences,
) -> Result<Tensor<3>> {
    let op = ShortConvolutionOp {
        sequences: sequences.clone(),
    };
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    op.check(&x, &weight)?;
    let out = if x.shape().num_elements() == 0 {
        zeros_from::<Dispatch>(x.shape(), x.dtype().into(), vec![x, weight])
    } else if backends::reaches(&x.device()) {
        Dispatch::short_convolution_forward(x, weight, op)
    } else {
        composed::forward::<Dispatch>(x, weight, &op)
    };
    Ok(Tensor::from_dispatch(out))
}
