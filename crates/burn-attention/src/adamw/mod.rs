//! The AdamW update as one operation, and the sums of squares that clipping needs.

pub mod composed;
#[cfg(feature = "flex")]
mod flex;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, FloatDType, Tensor};
#[cfg(feature = "remote-server")]
use burn_fused::expect_shape;
use burn_fused::{OpError, accumulator, expect};

use crate::backends;
use crate::error::{AttentionError, Result, same_shape};

pub use op::{AdamWFactors, AdamWOp, AdamWOps, AdamWRounded};

/// Elements whose squares are summed together: in a longer f32 sum, the last terms would be lost.
pub const SQUARES: usize = 4096;

/// The results of an update.
#[derive(Clone, Debug)]
pub struct AdamWUpdate<const D: usize> {
    /// The new values.
    pub value: Tensor<D>,
    /// The new values in the requested type.
    pub rounded: Tensor<D>,
    /// The new moments.
    pub moments: [Tensor<D>; 2],
}

/// Computes one AdamW update. Its moments are moving averages of the gradients and of their
/// squares.
///
/// For each element, after t updates, with g = gradient scale:
///
/// ```text
/// first  = first + (g - first) (1 - beta_1)
/// second = second beta_2 + g² (1 - beta_2)
/// root   = √second / √(1 - beta_2^t) + epsilon
/// value  = value (1 - rate decay) - first / root (rate / (1 - beta_1^t))
/// ```
///
/// # Shapes
/// All tensors have the same shape and type, f32 or f64; the moments are 0 before the first update.
/// The new values are also returned in `dtype`, for a parameter in 16 bits.
///
/// # Numerics
/// Computed in the type of the tensors and in this order, which is torch's. The scalar factors are
/// computed in f64 and rounded once.
///
/// # Memory
/// On the CPU and on NPUs the update is one pass, in the memory of moments that nothing else holds.
/// The new values take the memory of the old ones if nothing else holds it, and otherwise, on the
/// CPU, the gradient's. Other devices run ordinary operations.
///
/// # Errors
/// [`Shapes`](AttentionError::Shapes), [`Update`](AttentionError::Update),
/// [`Op`](AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_attention::{AdamWOp, adamw};
///
/// let device = Device::flex();
/// let value = Tensor::<1>::from_floats([1.0, -1.0], &device);
/// let gradient = Tensor::from_floats([3.0, 0.0], &device);
/// let op = AdamWOp {
///     rate: 0.1,
///     decay: 0.5,
///     betas: [0.9, 0.999],
///     epsilon: 1e-8,
///     steps: 1,
///     scale: 1.0,
/// };
/// let moments = [value.zeros_like(), value.zeros_like()];
/// let updated = adamw(value, gradient, moments, op, DType::BF16.into())?;
/// // The first step has the size of the rate; both elements decay by a twentieth.
/// for (found, expected) in updated.value.into_data().iter::<f32>().zip([0.85, -0.95]) {
///     assert!((found - expected).abs() < 1e-6);
/// }
/// assert_eq!(updated.rounded.dtype(), DType::BF16);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
///
/// # Source
/// Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2, in the
/// order of operations of torch 2.15 `torch.optim.AdamW` for one tensor
pub fn adamw<const D: usize>(
    value: Tensor<D>,
    gradient: Tensor<D>,
    moments: [Tensor<D>; 2],
    op: AdamWOp,
    dtype: FloatDType,
) -> Result<AdamWUpdate<D>> {
    let [first, second] = moments;
    let [value, gradient, first, second] =
        [value, gradient, first, second].map(Tensor::into_dispatch);
    check([&value, &gradient, &first, &second], op)?;
    let (value, rounded, first, second) = if backends::reaches(&value.device()) {
        Dispatch::adamw_rounded(value, gradient, first, second, op, dtype)
    } else {
        let updated = composed::update::<Dispatch>(value, gradient, first, second, op);
        op::rounded::<Dispatch>(updated, dtype)
    };
    Ok(AdamWUpdate {
        value: Tensor::from_dispatch(value),
        rounded: Tensor::from_dispatch(rounded),
        moments: [first, second].map(Tensor::from_dispatch),
    })
}

/// Computes the sums of the squares of each [`SQUARES`] elements, for the norm of a gradient. The
/// last sum is that of the remaining elements.
///
/// # Shapes
/// `x`: `[n]`; returns `[n / SQUARES]`, rounded up.
///
/// # Numerics
/// 16-bit types are summed in f32, others in their own. The order of the additions differs between
/// devices.
///
/// # Memory
/// On the CPU and on NPUs one pass over f32, without a tensor of squares.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::square_sums;
///
/// let x = Tensor::from_floats([3.0, 4.0], &Device::flex());
/// assert_eq!(square_sums(x).into_scalar::<f32>(), 25.0);
/// ```
pub fn square_sums(x: Tensor<1>) -> Tensor<1> {
    let x = match accumulator(x.dtype()) {
        Ok(wide) => x.cast(wide),
        Err(_) => x,
    };
    let x = x.into_dispatch();
    let sums = if backends::reaches(&x.device()) {
        Dispatch::square_sums(x)
    } else {
        composed::square_sums::<Dispatch>(x)
    };
    Tensor::from_dispatch(sums)
}

/// # Errors
/// [`AttentionError::Op`] for x of other types than f32 and f64.
#[cfg(feature = "remote-server")]
pub(crate) fn check_squares<T: TensorMetadata>(x: &T) -> Result<()> {
    let flat = [x.shape().num_elements()];
    let wide = accumulator(x.dtype())?;
    Ok(expect_shape("x", x, (&flat, wide.into()), x)?)
}

pub(crate) fn check<T: TensorMetadata>(tensors: [&T; 4], op: AdamWOp) -> Result<()> {
    let [value, others @ ..] = tensors;
    let dtype = value.dtype();
    if !matches!(dtype, DType::F32 | DType::F64) {
        return Err(AttentionError::Op(OpError::MixedDTypes {
            what: "the value",
            found: dtype,
            expected: DType::F32,
        }));
    }
    let names = ["the gradient", "the first moment", "the second moment"];
    for (name, tensor) in names.into_iter().zip(others) {
        expect(name, tensor, dtype, value)?;
        let (left, right) = (value.shape(), tensor.shape());
        same_shape(["the value", name], left.as_slice(), right.as_slice())?;
    }
    op.check()
}
