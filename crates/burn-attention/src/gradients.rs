//! Backward passes that start from a gradient, and tensors that stand for others.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{AutodiffBackend, Backend, Dispatch, TensorMetadata, tensor::FloatTensor};
use burn::tensor::module::linear;
use burn::tensor::{DType, Gradients, Shape, Tensor};
use burn_fused::{OpError, node, parts};

use crate::attention::Bias;
use crate::backends;
use crate::error::{Result, same_shape};
use crate::rows;

operation! {
    /// Scalars whose backward starts from a gradient, and a tensor that stands for another.
    trait SourceOps {
        /// Returns any number; for the backward it is (output * gradient).sum().
        fn gradient_source(
            output: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = gradient;
            any_number::<Self>(&output)
        }

        /// As the source of an output beside another source; the output's gradient is the first of
        /// any sum of gradients.
        fn source_with(
            source: FloatTensor<Self>,
            output: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (output, gradient);
            source
        }

        /// As the source of x weight + bias, which is not computed.
        fn product_source(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (weight, bias, gradient);
            any_number::<Self>(&x)
        }

        /// Returns one of two numbers; for the backward it is their sum.
        fn both_sources(first: FloatTensor<Self>, second: FloatTensor<Self>) -> FloatTensor<Self> {
            let _of_backward = second;
            first
        }

        /// Returns the value; its gradient becomes that of x.
        fn stand_in(x: FloatTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> {
            let _of_backward = x;
            value
        }
    }
}

/// A number in the type of a tensor that nothing reads.
pub(crate) fn any_number<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_empty(Shape::new([1]), &like.device(), like.dtype().into())
}

#[cfg(feature = "flex")]
impl SourceOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl SourceOps for burn::backend::Cube {}

#[cfg(feature = "remote")]
impl SourceOps for burn::backend::Remote {}

// A source is the last of its graph, so that the gradient of its number is 1.
impl<B: SourceOps, C: CheckpointStrategy> SourceOps for Autodiff<B, C> {
    fn gradient_source(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let gradient = Self::inner(gradient);
        let ([output], nodes) = parts([output]);
        node::<B, C, _, 1>(
            nodes,
            gradient.clone(),
            |_| B::gradient_source(output, gradient),
            |gradient, _, _| [Some(gradient)],
        )
    }

    fn source_with(
        source: FloatTensor<Self>,
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([source, _], nodes) = parts([source, output]);
        node::<B, C, _, 2>(
            nodes,
            Self::inner(gradient),
            |_| source,
            |gradient, one, _| [Some(one), Some(gradient)],
        )
    }

    fn product_source(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let keeps_x = weight.is_tracked();
        let bias_node = bias.into_option().map(|bias| bias.into_parts().1);
        let ([x, weight], [x_node, weight_node]) = parts([x, weight]);
        let number = any_number::<B>(&x);
        let kept = (keeps_x.then_some(x), weight, Self::inner(gradient));
        match bias_node {
            Some(bias_node) => node::<B, C, _, 3>(
                [x_node, weight_node, bias_node],
                kept,
                |_| number,
                |kept, _, wanted| product_gradients::<B>(kept, wanted),
            ),
            None => node::<B, C, _, 2>(
                [x_node, weight_node],
                kept,
                |_| number,
                |kept, _, [wants_x, wants_weight]| {
                    let wanted = [wants_x, wants_weight, false];
                    let [dx, dweight, _] = product_gradients::<B>(kept, wanted);
                    [dx, dweight]
                },
            ),
        }
    }

    fn both_sources(first: FloatTensor<Self>, second: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([first, _], nodes) = parts([first, second]);
        node::<B, C, _, 2>(
            nodes,
            (),
            |()| first,
            |(), one, _| [Some(one.clone()), Some(one)],
        )
    }

    fn stand_in(x: FloatTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([_], nodes) = parts([x]);
        let value = Self::inner(value);
        node::<B, C, _, 1>(nodes, (), |()| value, |(), gradient, _| [Some(gradient)])
    }
}

/// The gradients of x, the weight and the bias. x is kept where that of the weight is computed.
fn product_gradients<B: Backend>(
    (x, weight, gradient): (Option<FloatTensor<B>>, FloatTensor<B>, FloatTensor<B>),
    [wants_x, _, wants_bias]: [bool; 3],
) -> burn_fused::Gradients<B, 3> {
    [
        wants_x.then(|| rows::x_gradient::<B>(weight, gradient.clone())),
        x.map(|x| B::linear_weight_backward(x, gradient.clone())),
        wants_bias.then(|| B::linear_bias_backward(gradient)),
    ]
}

/// Returns a value in the place of x: it has the data of the value, and its gradient becomes that
/// of x as it is, also in another type. So an f32 copy of a 16-bit parameter gives it a gradient in
/// f32. On backends without the operation, x itself is converted to the type of the value.
///
/// # Shapes
/// `value` has the shape of x, and is not tracked.
///
/// # Errors
/// [`Shapes`](crate::AttentionError::Shapes).
///
/// # Example
/// ```
/// use burn::tensor::{DType, Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([1.0, 2.0], &device).cast(DType::BF16).detach().require_grad();
/// let wide = x.clone().detach().cast(DType::F32);
/// let gradients = (burn_attention::stand_in(x.clone(), wide)? * 1.001).sum().backward();
/// let gradient = x.grad(&gradients).unwrap().into_data();
/// assert_eq!(gradient.iter::<f32>().collect::<Vec<_>>(), [1.001, 1.001]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn stand_in<const D: usize>(x: Tensor<D>, value: Tensor<D>) -> Result<Tensor<D>> {
    same_shape(["x", "the value"], &x.dims(), &value.dims())?;
    if !backends::reaches(x.device().as_dispatch()) {
        return Ok(x.cast(value.dtype()));
    }
    let (x, value) = (x.into_dispatch(), value.into_dispatch());
    Ok(Tensor::from_dispatch(Dispatch::stand_in(x, value)))
}

/// # Errors
/// [`AttentionError::Shapes`](crate::AttentionError::Shapes),
/// [`AttentionError::Op`](crate::AttentionError::Op): the gradient is not that of an output of this
/// shape and type.
pub(crate) fn expect_gradient<const D: usize>(
    shape: [usize; D],
    dtype: DType,
    gradient: &Tensor<D>,
) -> Result<()> {
    same_shape(["the output", "its gradient"], &shape, &gradient.dims())?;
    let found = gradient.dtype();
    if found == dtype {
        return Ok(());
    }
    Err(OpError::MixedDTypes {
        what: "the gradient",
        found,
        expected: dtype,
    }
    .into())
}

/// An output with its gradient, from which a backward starts.
#[derive(Clone, Debug)]
pub struct GradientSource(pub(crate) Tensor<1>);

impl GradientSource {
    /// Starts from the gradient of an output.
    ///
    /// # Shapes
    /// The gradient has the shape and type of the output, and is not tracked.
    ///
    /// # Errors
    /// [`Shapes`](crate::AttentionError::Shapes), [`Op`](crate::AttentionError::Op).
    pub fn new<const D: usize>(output: Tensor<D>, gradient: Tensor<D>) -> Result<Self> {
        expect_gradient(output.dims(), output.dtype(), &gradient)?;
        let gradient = Tensor::from_inner(gradient);
        if !backends::reaches(output.device().as_dispatch()) {
            return Ok(Self((output * gradient).sum()));
        }
        let (output, gradient) = (output.into_dispatch(), gradient.into_dispatch());
        let source = Dispatch::gradient_source(output, gradient);
        Ok(Self(Tensor::from_dispatch(source)))
    }

    /// Starts from the gradient of x weight + bias. The product is not computed where the backend
    /// is one of this crate's.
    pub(crate) fn of_product<const D: usize>(
        x: Tensor<D>,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
        gradient: Tensor<D>,
    ) -> Result<Self> {
        if !backends::reaches(x.device().as_dispatch()) {
            return Self::new(linear(x, weight, bias), gradient);
        }
        let gradient = Tensor::from_inner(gradient).into_dispatch();
        let bias = Bias::from(bias.map(Tensor::into_dispatch));
        let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
        let source = Dispatch::product_source(x, weight, bias, gradient);
        Ok(Self(Tensor::from_dispatch(source)))
    }

    /// True if a gradient of a tensor depends on it.
    pub fn is_tracked(&self) -> bool {
        self.0.is_tracked()
    }

    /// Starts from the gradient of another output as well. In the gradients of tensors that both
    /// depend on, it is the first term, as if the last operation had added the outputs.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with<const D: usize>(self, output: Tensor<D>, gradient: Tensor<D>) -> Result<Self> {
        if !backends::reaches(output.device().as_dispatch()) {
            return Ok(self.and(Self::new(output, gradient)?));
        }
        expect_gradient(output.dims(), output.dtype(), &gradient)?;
        let gradient = Tensor::from_inner(gradient).into_dispatch();
        let (source, output) = (self.0.into_dispatch(), output.into_dispatch());
        let source = Dispatch::source_with(source, output, gradient);
        Ok(Self(Tensor::from_dispatch(source)))
    }

    /// Starts from both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if !backends::reaches(self.0.device().as_dispatch()) {
            return Self(self.0 + other.0);
        }
        let (first, second) = (self.0.into_dispatch(), other.0.into_dispatch());
        Self(Tensor::from_dispatch(Dispatch::both_sources(first, second)))
    }
}

/// Computes the gradients of all tensors from those of some outputs.
///
/// # Panics
/// If no output is tracked, as [`Tensor::backward`].
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{GradientSource, backward_from};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();
/// let of_square = Tensor::from_floats([10.0, 100.0], &device.clone().inner());
/// let gradients = backward_from([GradientSource::new(x.clone() * x.clone(), of_square)?]);
/// let gradient = x.grad(&gradients).unwrap().into_data();
/// assert_eq!(gradient.iter::<f32>().collect::<Vec<_>>(), [20.0, 400.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn backward_from(sources: impl IntoIterator<Item = GradientSource>) -> Gradients {
    let all = sources.into_iter().reduce(GradientSource::and);
    all.expect("at least one output").0.backward()
}
