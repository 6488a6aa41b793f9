//! Linear layers of groups of rows as one operation.

mod backward;
pub mod composed;
#[cfg(feature = "flex")]
mod flex;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use burn_fused::primitive::zeros_from;

use crate::backends;
use crate::error::Result;

pub use op::{GroupedLinearOp, GroupedLinearOps};

/// Computes x(i) weight(g)^T for each row i of group g: the experts of a mixture, whose rows are
/// sorted by expert.
///
/// Of a group without rows, no element of the weight is read, and its gradient is 0.
///
/// # Shapes
/// - x: `[rows, inputs]`, the rows of a group together, in the order of groups
/// - weight: `[groups, outputs, inputs]`, in the type of x
/// - rows: of each group
/// - out: `[rows, outputs]`
///
/// # Numerics
/// 16-bit tensors are summed in f32 and each result is rounded once. On the CPU, but for f16, the
/// bits of a row do not depend on the other rows; a kernel for bf16 treats elements below 1.2e-38
/// as 0.
///
/// # Memory
/// The autodiff graph keeps x and the weight.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`NoChannels`](crate::AttentionError::NoChannels) without
/// inputs, [`Op`](crate::AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device);
/// let weight = Tensor::<3>::from_floats([[[1.0, 0.0]], [[9.0, 9.0]], [[0.0, 10.0]]], &device);
/// let y = burn_attention::grouped_linear(x, weight, &[1, 0, 1])?;
/// assert_eq!(y.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 40.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn grouped_linear(x: Tensor<2>, weight: Tensor<3>, rows: &[usize]) -> Result<Tensor<2>> {
    let op = GroupedLinearOp {
        rows: rows.to_vec(),
    };
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    op.check(&x, &weight)?;
    let [count, _] = x.shape().dims();
    let [_, outputs, _] = weight.shape().dims();
    let out = if count == 0 || outputs == 0 {
        let (shape, dtype) = (Shape::new([count, outputs]), x.dtype().into());
        zeros_from::<Dispatch>(shape, dtype, vec![x, weight])
    } else if backends::reaches(&x.device()) {
        Dispatch::grouped_linear_forward(x, weight, op)
    } else {
        composed::forward::<Dispatch>(x, weight, &op)
    };
    Ok(Tensor::from_dispatch(out))
}
