//! RMSNorm and LayerNorm by the vendor's operators, and by ordinary operations beyond their limits.

use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, Shape, TensorMetadata};
use burn_attention::composed::{layer_norm, rms_norm};
use burn_attention::{LayerNormOps, RmsNormOps};
use burn_fused::like;

use super::{Outputs, Refusal};
use crate::Ascend;
use crate::ops::launch::{self, Types};
use crate::tensor::AscendTensor;

impl RmsNormOps for Ascend {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&x, [like(&x), of_rows(&x)]);
        let outcome = forward(&x, &weight, epsilon).map_err(|refusal| (refusal, ()));
        let outputs = outputs.or_composed(outcome, |()| {
            rms_norm::forward::<Self>(x, weight, epsilon).into()
        });
        outputs.into()
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let of_weight = (weight.shape(), DType::F32);
        let outputs = Outputs::new(&x, [like(&x), of_weight]);
        let outcome = backward(&x, &weight, &rstd, &gradient).map_err(|refusal| (refusal, ()));
        let gradients = outputs.or_composed(outcome, |()| {
            rms_norm::backward::<Self>(x, weight, rstd, gradient).into()
        });
        gradients.into()
    }
}

impl LayerNormOps for Ascend {
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&x, [like(&x), of_rows(&x), of_rows(&x)]);
        let outcome = centred(&x, [&weight, &bias], epsilon).map_err(|refusal| (refusal, ()));
        let outputs = outputs.or_composed(outcome, |()| {
            layer_norm::forward::<Self>(x, weight, bias, epsilon).into()
        });
        outputs.into()
    }
}

/// The operators' limits: at least two axes, and the types of training.
fn within(x: &AscendTensor) -> Result<(), Refusal> {
    let fits = (2..=8).contains(&x.dims().len()) && Types::FLOAT.contains(x.dtype());
    if fits { Ok(()) } else { Err(Refusal::Limit) }
}

/// A number for each row of x.
fn of_rows(x: &AscendTensor) -> (Shape, DType) {
    let mut dims = x.dims().to_vec();
    if let Some(channels) = dims.last_mut() {
        *channels = 1;
    }
    (Shape::from(dims), DType::F32)
}

fn forward(
    x: &AscendTensor,
    weight: &AscendTensor,
    epsilon: f64,
) -> Result<[AscendTensor; 2], Refusal> {
    within(x)?;
    let context = x.context()?;
    let out = AscendTensor::empty_in(context, x.shape(), x.dtype());
    let (shape, dtype) = of_rows(x);
    let rstd = AscendTensor::empty_in(context, shape, dtype);
    let [x, weight, out_view, rstd_view] = launch::views([x, weight, &out, &rstd])?;
    let operators = context.operators();
    let done = operators.rms_norm(x, weight, epsilon, out_view, rstd_view);
    done.map_err(Refusal::operator)?;
    Ok([out, rstd])
}

/// By LayerNorm.
fn centred(
    x: &AscendTensor,
    [weight, bias]: [&AscendTensor; 2],
    epsilon: f64,
) -> Result<[AscendTensor; 3], Refusal> {
    within(x)?;
    let context = x.context()?;
    let outputs = [(x.shape(), x.dtype()), of_rows(x), of_rows(x)];
    let outputs = outputs.map(|(shape, dtype)| AscendTensor::empty_in(context, shape, dtype));
    let [out, mean, rstd] = outputs.each_ref();
    let [x, weight, bias, out, mean, rstd] = launch::views([x, weight, bias, out, mean, rstd])?;
    let width = [*x.dims.last().unwrap_or(&1) as i64];
    let [weight, bias, mean, rstd] = [weight, bias, mean, rstd].map(Some);
    let operators = context.operators();
    let done = operators.layer_norm(x, &width, weight, bias, epsilon, out, mean, rstd);
    done.map_err(Refusal::operator)?;
    Ok(outputs)
}

fn backward(
    x: &AscendTensor,
    weight: &AscendTensor,
    rstd: &AscendTensor,
    gradient: &AscendTensor,
) -> Result<[AscendTensor; 2], Refusal> {
    within(x)?;
    let context = x.context()?;
    let dx = AscendTensor::empty_in(context, x.shape(), x.dtype());
    let dweight = AscendTensor::empty_in(context, weight.shape(), DType::F32);
    // Its documentation gives rstd only the axes that are not normalised.
    let rows = rstd.dims().len() - 1;
    let dims = Shape::from(rstd.dims()[..rows].to_vec());
    let rstd = rstd.view(dims, rstd.strides()[..rows].to_vec(), rstd.offset());
    let [dy, x, rstd, weight_view, dx_view, dweight_view] =
        launch::views([gradient, x, &rstd, weight, &dx, &dweight])?;
    let operators = context.operators();
    let done = operators.rms_norm_grad(dy, x, rstd, weight_view, dx_view, dweight_view);
    done.map_err(Refusal::operator)?;
    Ok([dx, dweight])
}
