//! The gate and the linear layer behind it as one operation. The backward computes the layer's input
//! again beside the gradients of gate and up, so that neither the graph nor a recomputation has it.

use burn::backend::AutodiffBackend;
use burn::backend::Dispatch;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use burn_fused::{Gradients, node, parts};

use super::{SwiGluOps, check};
use crate::adapter::{AdapterOps, base_of, check_linear, rows_of};
use crate::attention::Bias;
use crate::error::Result;
use crate::gradients::{GradientSource, any_number, expect_gradient};

operation! {
    Fusion;
    /// silu(gate) up weight, as a backend implements it.
    ///
    /// # Shapes
    /// gate, up: `[rows, hidden]`; weight: `[hidden, outputs]`; y, gradient: `[rows, outputs]`
    pub trait GatedLinearOps: SwiGluOps + AdapterOps {
        /// Computes the product, or its sum with y.
        #[fusion(default)]
        fn gated_linear(
            gate: FloatTensor<Self>,
            up: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] y: Bias<Self>,
        ) -> FloatTensor<Self> {
            let x = Self::swiglu_forward(gate, up);
            match y.into_option() {
                Some(y) => Self::product_add(y, x, weight),
                None => Self::linear(x, weight, None),
            }
        }

        /// Returns any number in the place of the product; its backward starts from the output's
        /// gradient.
        #[fusion(default)]
        fn gated_linear_source(
            gate: FloatTensor<Self>,
            up: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (up, weight, gradient);
            any_number::<Self>(&gate)
        }
    }
}

/// By the operations of both parts.
#[cfg(feature = "flex")]
impl GatedLinearOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl GatedLinearOps for burn::backend::Cube {}

#[cfg(feature = "remote")]
impl GatedLinearOps for burn::backend::Remote {}

/// The gradients of gate, up and the weight.
fn gradients<B: GatedLinearOps>(
    [gate, up, weight]: [FloatTensor<B>; 3],
    gradient: FloatTensor<B>,
    [_, _, wants_weight]: [bool; 3],
) -> Gradients<B, 3> {
    let dx = B::linear_x_backward(weight, gradient.clone());
    if !wants_weight {
        let (dgate, dup) = B::swiglu_backward(gate, up, dx);
        return [Some(dgate), Some(dup), None];
    }
    let (dgate, dup, x) = B::swiglu_backward_with_output(gate, up, dx);
    let dweight = B::adapter_gradient(B::float_transpose(x), gradient);
    [Some(dgate), Some(dup), Some(dweight)]
}

impl<B: GatedLinearOps, C: CheckpointStrategy> GatedLinearOps for Autodiff<B, C> {
    fn gated_linear(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        y: Bias<Self>,
    ) -> FloatTensor<Self> {
        let ([gate, up, weight], [gate_node, up_node, weight_node]) = parts([gate, up, weight]);
        let kept = [gate, up, weight];
        match y.into_option().map(|y| y.into_parts()) {
            None => node::<B, C, _, 3>(
                [gate_node, up_node, weight_node],
                kept,
                |[gate, up, weight]| B::gated_linear(gate, up, weight, Bias::Absent),
                gradients::<B>,
            ),
            Some((y, y_node)) => node::<B, C, _, 4>(
                [y_node, gate_node, up_node, weight_node],
                kept,
                |[gate, up, weight]| B::gated_linear(gate, up, weight, Bias::Added(y)),
                |kept, gradient, [_, gate, up, weight]| {
                    let of_y = gradient.clone();
                    let [dgate, dup, dweight] = gradients::<B>(kept, gradient, [gate, up, weight]);
                    [Some(of_y), dgate, dup, dweight]
                },
            ),
        }
    }

    fn gated_linear_source(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (kept, nodes) = parts([gate, up, weight]);
        let number = any_number::<B>(&kept[0]);
        node::<B, C, _, 3>(
            nodes,
            (kept, Self::inner(gradient)),
            |_| number,
            |(kept, gradient), _, wanted| gradients::<B>(kept, gradient, wanted),
        )
    }
}

/// Computes silu(gate) * up and its product with a weight, or y and that product: the last layer of
/// a gated feed-forward network, and its residual sum. Gradients are those of
/// [`wide_linear`](crate::wide_linear).
///
/// # Shapes
/// gate, up: `[.., hidden]`; weight: `[hidden, outputs]`; y, out: `[.., outputs]`, all of one type
///
/// # Numerics
/// 16-bit tensors are computed in f32. The gated values are rounded, and the product; its sum with y
/// is rounded instead of it where the device can.
///
/// # Memory
/// The autodiff graph keeps gate and up, and not the gated values, which the backward computes again.
///
/// # Errors
/// [`Shapes`](crate::AttentionError::Shapes), [`Op`](crate::AttentionError::Op),
/// [`Size`](crate::AttentionError::Size), [`NoChannels`](crate::AttentionError::NoChannels) without
/// rows or channels.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let of = |x| Tensor::<2>::from_floats([[x]], &device);
/// let [gate, up, weight, y] = [100.0, 0.02, 3.0, 1.0].map(of);
/// let sum = burn_attention::gated_linear(gate, up, weight, Some(y))?;
/// assert_eq!(sum.into_scalar::<f32>(), 7.0);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn gated_linear<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    weight: Tensor<2>,
    y: Option<Tensor<D>>,
) -> Result<Tensor<D>> {
    let mut shape = gate.dims();
    shape[D - 1] = weight.dims()[1];
    let [gate, up] = rows(gate, up, &weight)?;
    let y = y.map(|y| base_of(y, shape, &gate)).transpose()?;
    let y = Bias::from(y.map(Tensor::into_dispatch));
    let [gate, up, weight] = [gate, up, weight].map(Tensor::into_dispatch);
    let out = Dispatch::gated_linear(gate, up, weight, y);
    Ok(Tensor::<2>::from_dispatch(out).reshape(shape))
}

/// As [`linear_source`](crate::linear_source), of a [`gated_linear`] layer without y.
///
/// # Errors
/// Those of [`gated_linear`].
pub fn gated_linear_source<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    weight: Tensor<2>,
    gradient: Tensor<D>,
) -> Result<GradientSource> {
    let mut shape = gate.dims();
    shape[D - 1] = weight.dims()[1];
    expect_gradient(shape, gate.dtype(), &gradient)?;
    let [gate, up] = rows(gate, up, &weight)?;
    let gradient = rows_of(Tensor::from_inner(gradient))?;
    let [gate, up, weight, gradient] = [gate, up, weight, gradient].map(Tensor::into_dispatch);
    let source = Dispatch::gated_linear_source(gate, up, weight, gradient);
    Ok(GradientSource(Tensor::from_dispatch(source)))
}

/// Gate and up as rows that fit the weight.
fn rows<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    weight: &Tensor<2>,
) -> Result<[Tensor<2>; 2]> {
    check(&gate.clone().into_dispatch(), &up.clone().into_dispatch())?;
    let [gate, up] = [rows_of(gate)?, rows_of(up)?];
    check_linear(&gate, weight, None)?;
    Ok([gate, up])
}
