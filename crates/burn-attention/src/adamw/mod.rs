//! The AdamW update as one operation, and the sums of squares that clipping needs.

pub mod composed;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
#[cfg(any(feature = "cube", feature = "remote"))]
use burn::tensor::Shape;
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
/// All tensors have the same shape and type, f32 or f64; beside f32, the gradient may have 16 bits.
/// The moments are 0 before the first update. The new values are also returned in `dtype`, for a
/// parameter in 16 bits.
///
/// # Numerics
/// Computed in the type of the values and in this order, which is torch's. The scalar factors are
/// computed in f64 and rounded once.
///
/// # Memory
/// On the CPU and on NPUs the update is one pass, in the memory of moments that nothing else holds.
/// The new values take the memory of the old ones if nothing else holds it, and otherwise, on the
/// CPU, that of a gradient in f32. Other devices run ordinary operations.
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

/// Computes the sums of the squares of each [`SQUARES`] elements of tensors, for the norm of
/// gradients. The last sum of a tensor is that of its remaining elements. Returns none for no tensor.
///
/// # Shapes
/// tensors: `[n]` each, on one device; returns n / [`SQUARES`] sums of each, rounded up, in the order
/// of the tensors
///
/// # Numerics
/// f64 is summed in f64 if all tensors have it, all others in f32. The order of the additions
/// differs between devices.
///
/// # Memory
/// On CPUs, NPUs and CubeCL's devices one pass, without a tensor of squares.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::square_sums;
///
/// let x = Tensor::<1>::from_floats([3.0, 4.0], &Device::flex());
/// let sums = square_sums(vec![x.clone(), x * 2.0]).expect("of two tensors").into_data();
/// assert_eq!(sums.iter::<f32>().collect::<Vec<_>>(), [25.0, 100.0]);
/// ```
pub fn square_sums(tensors: Vec<Tensor<1>>) -> Option<Tensor<1>> {
    let device = tensors.first()?.device();
    let reaches = backends::reaches(device.as_dispatch());
    let is_wide = tensors.iter().all(|x| x.dtype() == DType::F64);
    let dtype = if is_wide { DType::F64 } else { DType::F32 };
    if !backends::copies_parts(device.as_dispatch()) {
        let sums = tensors.into_iter().map(|x| {
            let x = x.into_dispatch();
            let sums = if reaches {
                Dispatch::square_sums(x)
            } else {
                composed::square_sums::<Dispatch>(x)
            };
            Tensor::<1>::from_dispatch(sums).cast(dtype)
        });
        return Some(Tensor::cat(sums.collect(), 0));
    }
    // Each is written where it belongs: a concatenation would launch a copy of each.
    let counts = tensors.iter().map(|x| x.dims()[0].div_ceil(SQUARES));
    let all = counts.sum::<usize>();
    let mut sums = Tensor::<1>::zeros([all], (&device, dtype)).into_dispatch();
    let mut start = 0;
    for x in tensors {
        let (count, x) = (x.dims()[0].div_ceil(SQUARES), x.into_dispatch());
        sums = Dispatch::square_sums_into(sums, x, start);
        start += count;
    }
    Some(Tensor::from_dispatch(sums))
}

/// # Errors
/// [`AttentionError::Op`] for x of other types than floats.
#[cfg(feature = "remote-server")]
pub(crate) fn check_squares<T: TensorMetadata>(x: &T) -> Result<()> {
    accumulator(x.dtype())?;
    let flat = [x.shape().num_elements()];
    Ok(expect_shape("x", x, (&flat, x.dtype()), x)?)
}

/// The type of the sums of squares.
#[cfg(any(feature = "cube", feature = "remote"))]
pub(crate) fn type_of_sums(dtype: DType) -> DType {
    accumulator(dtype).map_or(dtype, DType::from)
}

/// Their shape.
#[cfg(any(feature = "cube", feature = "remote"))]
pub(crate) fn shape_of_sums(x: &Shape) -> Shape {
    [x.num_elements().div_ceil(SQUARES)].into()
}

pub(crate) fn check<T: TensorMetadata>(tensors: [&T; 4], op: AdamWOp) -> Result<()> {
    let [value, gradient, first, second] = tensors;
    let dtype = value.dtype();
    if !matches!(dtype, DType::F32 | DType::F64) {
        return Err(AttentionError::Op(OpError::MixedDTypes {
            what: "the value",
            found: dtype,
            expected: DType::F32,
        }));
    }
    let of_gradient = match accumulator(gradient.dtype()) {
        Ok(wide) if dtype == wide.into() => gradient.dtype(),
        _ => dtype,
    };
    for (name, tensor, dtype) in [
        ("the gradient", gradient, of_gradient),
        ("the first moment", first, dtype),
        ("the second moment", second, dtype),
    ] {
        expect(name, tensor, dtype, value)?;
        let (left, right) = (value.shape(), tensor.shape());
        same_shape(["the value", name], left.as_slice(), right.as_slice())?;
    }
    op.check()
}
