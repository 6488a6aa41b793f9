//! A linear layer with a low-rank adapter, by products with narrow factors.

mod backward;
pub mod composed;
#[cfg(feature = "cube")]
mod cube;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Tensor};
use burn_fused::{accumulator, expect};

use crate::attention::Bias;
use crate::backends;
use crate::error::{AttentionError, Result, equal};
use crate::gradients::{GradientSource, expect_gradient};

pub use op::AdapterOps;

/// The matrices of a low-rank adapter.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// `[rank, inputs]`, in f32, or f64 for f64 tensors.
    pub a: Tensor<2>,
    /// `[rank, outputs]`, in the type of a.
    pub b: Tensor<2>,
    /// s a and s b as [`scaled_parts`] of them, `[parts * rank, ..]`.
    pub factors: [Tensor<2>; 2],
}

/// Returns s x in a type, as rows of one part, or of two whose sum has twice the digits if the type
/// has 16 bits: `[parts * rank, channels]`.
///
/// # Shapes
/// x: `[rank, channels]`
pub fn scaled_parts(x: Tensor<2>, scale: f64, dtype: DType) -> Tensor<2> {
    let wide = x.dtype();
    let x = if scale == 1.0 { x } else { x * scale };
    if dtype == wide {
        return x;
    }
    let upper = x.clone().cast(dtype);
    let lower = (x - upper.clone().cast(wide)).cast(dtype);
    Tensor::cat(vec![upper, lower], 0)
}

/// Returns true if [`adapted_linears`] is the way to compute layers with adapters on a device: on
/// CubeCL's, and where a server runs the operations by its kernels.
pub fn has_adapter_kernels(device: &Device) -> bool {
    let device = device.as_dispatch();
    is_remote(device) || backends::copies_parts(device)
}

/// Returns true if a device concatenates tensors in one launch, so that operations on many small
/// tensors cost less on one of all: where a server runs the operations.
pub fn concatenates_at_once(device: &Device) -> bool {
    is_remote(device.as_dispatch())
}

fn is_remote(device: &DispatchDevice) -> bool {
    match device {
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => true,
        DispatchDevice::Autodiff(device) => is_remote(device),
        _ => false,
    }
}

/// Computes x weight + bias + s (x a^T) b of several layers with adapters and one input.
///
/// # Shapes
/// - x: `[.., inputs]`; weights: `[inputs, outputs]`; biases: `[outputs]`, all of one type
/// - out: `[.., outputs]` of each layer
///
/// # Numerics
/// 16-bit tensors are computed in f32. A layer's product is rounded once, and so is its sum with
/// the adapter's term, which has an error of 2^-16 of itself in bf16. In the gradients of a and b,
/// the inner products are rounded to the type of x, as x is.
///
/// # Memory
/// The autodiff graph keeps x, and of each layer the inner product `[rank, rows]`.
///
/// # Errors
/// [`Size`](AttentionError::Size), [`NoChannels`](AttentionError::NoChannels) without layers,
/// rows, channels or ranks, [`Op`](AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{Adapter, adapted_linears, scaled_parts};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[1.0, 2.0]], &device);
/// let weight = Tensor::<2>::from_floats([[3.0], [0.0]], &device);
/// let a = Tensor::<2>::from_floats([[1.0, 1.0]], &device).require_grad();
/// let b = Tensor::<2>::from_floats([[5.0]], &device).require_grad();
/// let factors = [&a, &b].map(|x| scaled_parts(x.clone().detach(), 2.0, x.dtype()));
/// let adapter = Adapter { a: a.clone(), b, factors };
/// let [y] = adapted_linears(x, [(weight, None, adapter)])?;
/// assert_eq!(y.clone().inner().into_scalar::<f32>(), 33.0);
/// let gradient = a.grad(&y.backward()).unwrap();
/// assert_eq!(gradient.into_data().iter::<f32>().collect::<Vec<_>>(), [10.0, 20.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn adapted_linears<const D: usize, const N: usize>(
    x: Tensor<D>,
    layers: [(Tensor<2>, Option<Tensor<1>>, Adapter); N],
) -> Result<[Tensor<D>; N]> {
    let shape = x.dims();
    let x = rows_of(x)?;
    for (weight, bias, adapter) in &layers {
        check(&x, weight, bias.as_ref(), adapter)?;
    }
    let factors = layers
        .each_ref()
        .map(|(.., adapter)| adapter.factors[0].clone());
    let ranks = factors.each_ref().map(|factor| factor.dims()[0]);
    if N == 0 {
        return Err(AttentionError::NoChannels);
    }
    let is_joined = N > 1 && concatenates_at_once(&x.device());
    let mark = mark_of(N, &x);
    let x = x.into_dispatch();
    let product = |factor: Tensor<2>| {
        let inner = Dispatch::adapter_inner(factor.into_dispatch(), x.clone());
        Tensor::<2>::from_dispatch(inner)
    };
    let inner = if is_joined {
        let inner = product(Tensor::cat(factors.to_vec(), 0));
        inner.split_with_sizes(ranks.to_vec(), 0)
    } else {
        factors.into_iter().map(product).collect()
    };
    let mut layers = layers.into_iter().zip(inner);
    Ok(std::array::from_fn(|_| {
        let ((weight, bias, adapter), h) = layers.next().expect("N layers");
        let mut out = shape;
        out[D - 1] = weight.dims()[1];
        let [_, factor] = adapter.factors;
        let [weight, h, a, b, factor] =
            [weight, h, adapter.a, adapter.b, factor].map(Tensor::into_dispatch);
        let bias = Bias::from(bias.map(Tensor::into_dispatch));
        let mark = Bias::from(mark.clone());
        let y = Dispatch::adapted_linear(x.clone(), weight, bias, h, a, b, factor, mark);
        Tensor::<2>::from_dispatch(y).reshape(out)
    }))
}

/// Computes x weight + bias, where the gradient of a 16-bit weight is not rounded: it is in f32.
///
/// # Shapes
/// x: `[.., inputs]`; weight: `[inputs, outputs]`; bias: `[outputs]`, all of one type; out:
/// `[.., outputs]`
///
/// # Errors
/// Those of [`adapted_linears`].
pub fn wide_linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Result<Tensor<D>> {
    let [y] = wide_linears(x, [(weight, bias)])?;
    Ok(y)
}

/// Computes several [`wide_linear`] layers with one x. Where the device can, a product adds its part
/// of the gradient of x to that of another, and the sum is rounded once.
///
/// # Shapes
/// As [`wide_linear`].
///
/// # Errors
/// Those of [`wide_linear`].
pub fn wide_linears<const D: usize, const N: usize>(
    x: Tensor<D>,
    layers: [(Tensor<2>, Option<Tensor<1>>); N],
) -> Result<[Tensor<D>; N]> {
    let shape = x.dims();
    let x = rows_of(x)?;
    for (weight, bias) in &layers {
        check_linear(&x, weight, bias.as_ref())?;
    }
    let mark = mark_of(N, &x);
    let x = x.into_dispatch();
    Ok(layers.map(|(weight, bias)| {
        let mut out = shape;
        out[D - 1] = weight.dims()[1];
        let [bias, mark] = [bias.map(Tensor::into_dispatch), mark.clone()].map(Bias::from);
        let y = Dispatch::wide_linear(x.clone(), weight.into_dispatch(), bias, mark);
        Tensor::<2>::from_dispatch(y).reshape(out)
    }))
}

/// Computes y + x weight, with the gradients of [`wide_linear`]. Where the device can, the sum is
/// rounded once.
///
/// # Shapes
/// x: `[.., inputs]`; weight: `[inputs, outputs]`; y, out: `[.., outputs]`, all of one type
///
/// # Errors
/// Those of [`wide_linear`]; [`Shapes`](AttentionError::Shapes).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let [y, x, weight] = [1.0, 2.0, 3.0].map(|x| Tensor::<2>::from_floats([[x]], &device));
/// let sum = burn_attention::wide_linear_onto(y, x, weight)?;
/// assert_eq!(sum.into_scalar::<f32>(), 7.0);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn wide_linear_onto<const D: usize>(
    y: Tensor<D>,
    x: Tensor<D>,
    weight: Tensor<2>,
) -> Result<Tensor<D>> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    let x = rows_of(x)?;
    check_linear(&x, &weight, None)?;
    let y = base_of(y, shape, &x)?;
    let [y, x, weight] = [y, x, weight].map(Tensor::into_dispatch);
    let sum = Dispatch::wide_linear_onto(y, x, weight);
    Ok(Tensor::<2>::from_dispatch(sum).reshape(shape))
}

/// A tensor that a product is added to, as rows. `shape` is that of the product.
///
/// # Errors
/// [`AttentionError::Shapes`], [`AttentionError::Op`].
pub(crate) fn base_of<const D: usize>(
    y: Tensor<D>,
    shape: [usize; D],
    x: &Tensor<2>,
) -> Result<Tensor<2>> {
    let first = x.clone().into_dispatch();
    expect("y", &y.clone().into_dispatch(), x.dtype(), &first)?;
    if y.dims() != shape {
        return Err(AttentionError::Shapes {
            left: "y",
            right: "the product",
            left_shape: y.dims().to_vec(),
            right_shape: shape.to_vec(),
        });
    }
    rows_of(y)
}

/// The mark of several layers with one x: [`AdapterOps::wide_linear`].
fn mark_of(layers: usize, x: &Tensor<2>) -> Option<DispatchTensor> {
    let mark = || Tensor::<1>::empty([1], (&x.device(), x.dtype())).into_dispatch();
    (layers > 1 && x.is_autodiff()).then(mark)
}

/// As [`linear_source`](crate::linear_source), of a [`wide_linear`] layer.
///
/// # Errors
/// Those of [`wide_linear`]; [`Shapes`](AttentionError::Shapes).
pub fn wide_linear_source<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    gradient: Tensor<D>,
) -> Result<GradientSource> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    expect_gradient(shape, x.dtype(), &gradient)?;
    let (x, gradient) = (rows_of(x)?, rows_of(Tensor::from_inner(gradient))?);
    check_linear(&x, &weight, bias.as_ref())?;
    let bias = Bias::from(bias.map(Tensor::into_dispatch));
    let [x, weight, gradient] = [x, weight, gradient].map(Tensor::into_dispatch);
    let source = Dispatch::wide_linear_source(x, weight, bias, gradient);
    Ok(GradientSource(Tensor::from_dispatch(source)))
}

/// As [`linear_source`](crate::linear_source), of one of [`adapted_linears`].
///
/// # Errors
/// Those of [`adapted_linears`]; [`Shapes`](AttentionError::Shapes).
pub fn adapted_linear_source<const D: usize>(
    x: Tensor<D>,
    (weight, bias, adapter): (Tensor<2>, Option<Tensor<1>>, Adapter),
    gradient: Tensor<D>,
) -> Result<GradientSource> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    expect_gradient(shape, x.dtype(), &gradient)?;
    let (x, gradient) = (rows_of(x)?, rows_of(Tensor::from_inner(gradient))?);
    check(&x, &weight, bias.as_ref(), &adapter)?;
    let bias = Bias::from(bias.map(Tensor::into_dispatch));
    let [inner_factor, factor] = adapter.factors;
    let [x, weight, a, b, inner_factor, factor, gradient] = [
        x,
        weight,
        adapter.a,
        adapter.b,
        inner_factor,
        factor,
        gradient,
    ]
    .map(Tensor::into_dispatch);
    let h = Dispatch::adapter_inner(inner_factor, x.clone());
    let source = Dispatch::adapted_linear_source(x, weight, bias, h, a, b, factor, gradient);
    Ok(GradientSource(Tensor::from_dispatch(source)))
}

/// Reshapes x to rows.
///
/// # Errors
/// [`AttentionError::NoChannels`].
pub(crate) fn rows_of<const D: usize>(x: Tensor<D>) -> Result<Tensor<2>> {
    let shape = x.dims();
    let rows = shape[..D - 1].iter().product();
    if rows == 0 || shape[D - 1] == 0 {
        return Err(AttentionError::NoChannels);
    }
    // Without a node in the graph, several passes may go back to a leaf.
    if D == 2 {
        return Ok(Tensor::from_dispatch(x.into_dispatch()));
    }
    Ok(x.reshape([rows, shape[D - 1]]))
}

fn check(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    adapter: &Adapter,
) -> Result<()> {
    let wide = DType::from(accumulator(x.dtype())?);
    let [inputs, outputs] = weight.dims();
    let Adapter { a, b, factors } = adapter;
    let [rank, _] = a.dims();
    if rank == 0 {
        return Err(AttentionError::NoChannels);
    }
    check_linear(x, weight, bias)?;
    let parts = if x.dtype() == wide { 1 } else { 2 };
    let [factor_a, factor_b] = factors;
    for (name, matrix, dtype, dims) in [
        ("a", a, wide, [rank, inputs]),
        ("b", b, wide, [rank, outputs]),
        (
            "the factor of a",
            factor_a,
            x.dtype(),
            [parts * rank, inputs],
        ),
        (
            "the factor of b",
            factor_b,
            x.dtype(),
            [parts * rank, outputs],
        ),
    ] {
        expect_matrix(name, matrix, dtype, dims, x)?;
    }
    Ok(())
}

fn expect_matrix(
    name: &'static str,
    matrix: &Tensor<2>,
    dtype: DType,
    dims: [usize; 2],
    first: &Tensor<2>,
) -> Result<()> {
    let first = first.clone().into_dispatch();
    expect(name, &matrix.clone().into_dispatch(), dtype, &first)?;
    let sizes = matrix.dims().into_iter().zip(dims);
    for (dimension, (left_size, right_size)) in ["rows", "columns"].into_iter().zip(sizes) {
        equal([name, "the layer"], dimension, left_size, right_size)?;
    }
    Ok(())
}

pub(crate) fn check_linear(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
) -> Result<()> {
    let outputs = weight.dims()[1];
    if outputs == 0 {
        return Err(AttentionError::NoChannels);
    }
    expect_matrix("weight", weight, x.dtype(), [x.dims()[1], outputs], x)?;
    if let Some(bias) = bias {
        let first = x.clone().into_dispatch();
        let bias = bias.clone().into_dispatch();
        expect("bias", &bias, x.dtype(), &first)?;
        let found = bias.shape()[0];
        equal(["bias", "the layer"], "columns", found, outputs)?;
    }
    Ok(())
}
