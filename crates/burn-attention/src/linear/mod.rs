//! A linear layer with a low-rank adapter beside its weight.

#[cfg(all(feature = "flex", target_arch = "x86_64"))]
pub(crate) mod avx512;
mod backward;
#[cfg(all(feature = "flex", target_arch = "x86_64"))]
mod flex;
mod op;

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::module::linear as linear_of_burn;
use burn::tensor::{DType, Device, Tensor};
use burn_fused::primitive::zeros_from;
use burn_fused::{accumulator, expect};

use crate::error::{AttentionError, Result, equal};
use crate::gradients::{GradientSource, expect_gradient};
use crate::rows::{self, ProductOps};

pub use op::LinearOps;

burn_fused::reaches!(Flex: cfg(all(feature = "flex", target_arch = "x86_64")));

/// Computes x weight + bias + (x a) b, the last term if there is an adapter `[a, b]`.
///
/// On the CPU backend, processors with AVX-512 for bf16 multiply bf16 directly; burn's own product
/// widens the whole weight first. Other devices run ordinary operations.
///
/// # Shapes
/// - x: `[.., inputs]`; weight: `[inputs, outputs]`; bias: `[outputs]`, all of one type
/// - a: `[inputs, rank]`; b: `[rank, outputs]`, in f32, or f64 for f64 tensors
/// - out: `[.., outputs]`
///
/// # Numerics
/// 16-bit tensors are computed in f32. The sum of the product and the adapter's term is rounded
/// once. The kernel rounds the whole output once, and treats bf16 elements below 1.2e-38 as 0. On
/// the CPU, but for f16, the bits of a row do not depend on the other rows.
///
/// # Memory
/// With the kernel, the autodiff graph keeps x if weight or adapter are tracked, and nothing in
/// f32. With ordinary operations it keeps the inputs of a and b, in their type.
///
/// # Errors
/// [`Size`](AttentionError::Size), [`NoChannels`](AttentionError::NoChannels) without inputs or
/// with an adapter of rank 0, [`Op`](AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{DType, Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_data([[1.0, 2.0]], (&device, DType::BF16));
/// let weight = Tensor::<2>::from_data([[3.0, 0.0], [0.0, 3.0]], (&device, DType::BF16));
/// let a = Tensor::<2>::from_data([[1.0], [1.0]], &device).require_grad();
/// let b = Tensor::<2>::from_data([[1.0, -1.0]], &device).require_grad();
/// let y = burn_attention::linear(x, weight, None, Some([a.clone(), b]))?;
/// assert_eq!(y.clone().inner().into_data().iter::<f32>().collect::<Vec<_>>(), [6.0, 3.0]);
/// let gradients = y.sum().backward();
/// assert_eq!(a.grad(&gradients).unwrap().into_data().iter::<f32>().collect::<Vec<_>>(), [0.0, 0.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    adapter: Option<[Tensor<2>; 2]>,
) -> Result<Tensor<D>> {
    check(&x, &weight, bias.as_ref(), adapter.as_ref())?;
    let outputs = weight.dims()[1];
    let elements: usize = x.dims().iter().product();
    let mut shape = x.dims();
    shape[D - 1] = outputs;
    if elements == 0 || outputs == 0 {
        let to = x.dtype().into();
        let adapter = adapter.into_iter().flatten().map(Tensor::into_dispatch);
        let bias = bias.map(Tensor::into_dispatch);
        let inputs = [x.into_dispatch(), weight.into_dispatch()].into_iter();
        let inputs = inputs.chain(bias).chain(adapter).collect();
        let zeros = zeros_from::<Dispatch>(shape.into(), to, inputs);
        return Ok(Tensor::from_dispatch(zeros));
    }
    if takes_kernel(&x, &weight) {
        let [x, weight, bias, a, b] = kernel_tensors(x, weight, bias, adapter);
        let out = Dispatch::linear_forward(x, weight, bias, a, b);
        return Ok(Tensor::<2>::from_dispatch(out).reshape(shape));
    }
    if rows::is_cpu(x.device().as_dispatch()) && D > 2 {
        let [inputs, _] = weight.dims();
        let rows = x.reshape([elements / inputs, inputs]);
        return Ok(linear(rows, weight, bias, adapter)?.reshape(shape));
    }
    let Some([a, b]) = adapter else {
        return Ok(product(x, weight, bias));
    };
    let dtype = x.dtype();
    let y = product(x.clone(), weight, bias);
    // One rounding of the sum, not two of its terms.
    let term = product(product(x.cast(a.dtype()), a, None), b, None);
    Ok((y.cast(term.dtype()) + term).cast(dtype))
}

/// The source of the backward of a [`linear`] layer whose output nothing reads, from the output's
/// gradient. The output is not computed.
///
/// # Shapes
/// As [`linear`]; the gradient is that of the output, in the type of x, and not tracked.
///
/// # Errors
/// Those of [`linear`]; [`Shapes`](AttentionError::Shapes).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{backward_from, linear_source};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[1.0, 2.0]], &device).require_grad();
/// let weight = Tensor::<2>::from_floats([[3.0], [5.0]], &device);
/// let of_output = Tensor::<2>::from_floats([[10.0]], &device.clone().inner());
/// let gradients = backward_from([linear_source(x.clone(), weight, None, None, of_output)?]);
/// let gradient = x.grad(&gradients).unwrap().into_data();
/// assert_eq!(gradient.iter::<f32>().collect::<Vec<_>>(), [30.0, 50.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn linear_source<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    adapter: Option<[Tensor<2>; 2]>,
    gradient: Tensor<D>,
) -> Result<GradientSource> {
    check(&x, &weight, bias.as_ref(), adapter.as_ref())?;
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    expect_gradient(shape, x.dtype(), &gradient)?;
    if x.dims().contains(&0) || gradient.dims().contains(&0) {
        return GradientSource::new(linear(x, weight, bias, adapter)?, gradient);
    }
    if takes_kernel(&x, &weight) {
        let outputs = weight.dims()[1];
        let rows = gradient.shape().num_elements() / outputs;
        let gradient = Tensor::from_inner(gradient.reshape([rows, outputs])).into_dispatch();
        let [x, weight, bias, a, b] = kernel_tensors(x, weight, bias, adapter);
        let source = Dispatch::linear_source(x, weight, bias, a, b, gradient);
        return Ok(GradientSource(Tensor::from_dispatch(source)));
    }
    let Some([a, b]) = adapter else {
        return GradientSource::of_product(x, weight, bias, gradient);
    };
    let wide = a.dtype();
    let inner = product(x.clone().cast(wide), a, None);
    let of_term = GradientSource::of_product(inner, b, None, gradient.clone().cast(wide))?;
    Ok(GradientSource::of_product(x, weight, bias, gradient)?.and(of_term))
}

/// x weight + bias by ordinary operations.
fn product<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    if D != 2 || !rows::is_cpu(x.device().as_dispatch()) {
        return linear_of_burn(x, weight, bias);
    }
    let out = Dispatch::product(x.into_dispatch(), weight.into_dispatch());
    let out = Tensor::<D>::from_dispatch(out);
    match bias {
        Some(bias) => out + bias.unsqueeze(),
        None => out,
    }
}

/// True if a kernel computes the layer. It reads pairs of elements.
fn takes_kernel<const D: usize>(x: &Tensor<D>, weight: &Tensor<2>) -> bool {
    let is_even = weight.dims().iter().all(|size| size.is_multiple_of(2));
    is_even && has_linear_kernel(&x.device(), x.dtype())
}

/// The tensors of the kernel: x as rows, the weight, a bias, and an adapter, of rank 0 for none.
fn kernel_tensors<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    adapter: Option<[Tensor<2>; 2]>,
) -> [DispatchTensor; 5] {
    let (device, dtype) = (x.device(), x.dtype());
    let [inputs, outputs] = weight.dims();
    let bias = bias.unwrap_or_else(|| Tensor::zeros([outputs], (&device, dtype)));
    let [a, b] = adapter.unwrap_or_else(|| {
        let empty = |shape| Tensor::<2>::empty(shape, (&device, DType::F32));
        [empty([inputs, 0]), empty([0, outputs])]
    });
    let rows = x.shape().num_elements() / inputs;
    let [weight, a, b] = [weight, a, b].map(Tensor::into_dispatch);
    let x = x.reshape([rows, inputs]).into_dispatch();
    [x, weight, bias.into_dispatch(), a, b]
}

/// Returns true if [`linear`] has a kernel for a type on a device.
pub fn has_linear_kernel(device: &Device, dtype: DType) -> bool {
    dtype == DType::BF16 && reaches(device.as_dispatch()) && has_instructions()
}

fn has_instructions() -> bool {
    #[cfg(all(feature = "flex", target_arch = "x86_64"))]
    return avx512::is_available();
    #[cfg(not(all(feature = "flex", target_arch = "x86_64")))]
    false
}

fn check<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    adapter: Option<&[Tensor<2>; 2]>,
) -> Result<()> {
    let wide = DType::from(accumulator(x.dtype())?);
    let first = x.clone().into_dispatch();
    let [inputs, outputs] = weight.dims();
    expect("weight", &weight.clone().into_dispatch(), x.dtype(), &first)?;
    equal(["x", "weight"], "inputs", x.dims()[D - 1], inputs)?;
    if let Some(bias) = bias {
        expect("bias", &bias.clone().into_dispatch(), x.dtype(), &first)?;
        equal(["bias", "weight"], "outputs", bias.dims()[0], outputs)?;
    }
    if let Some([a, b]) = adapter {
        expect("a", &a.clone().into_dispatch(), wide, &first)?;
        expect("b", &b.clone().into_dispatch(), wide, &first)?;
        equal(["a", "weight"], "inputs", a.dims()[0], inputs)?;
        equal(["b", "weight"], "outputs", b.dims()[1], outputs)?;
        equal(["a", "b"], "rank", a.dims()[1], b.dims()[0])?;
    }
    // burn-flex 0.22.1 reads beyond its memory in a product without elements.
    let rank = adapter.map_or(1, |[a, _]| a.dims()[1]);
    if inputs == 0 || rank == 0 {
        return Err(AttentionError::NoChannels);
    }
    Ok(())
}
