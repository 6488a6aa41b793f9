//! The gate of a feed-forward network by rope-ascend's kernels.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn_attention::composed::swiglu as composed;
use burn_attention::{GatedLinearOps, SwiGluOps};
use burn_fused::like;
use rope_ascend::rope::{Gate, GateBackward, OutputGradient};

use super::{Outcome, Outputs, Refusal, kernel_type, layer_kernels, read, write};
use crate::Ascend;
use crate::ops::launch;
use crate::ops::movement::copy;
use crate::tensor::AscendTensor;

impl SwiGluOps for Ascend {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let outputs = Outputs::new(&gate, [like(&gate)]);
        let outcome = forward(&gate, &up).map_err(|refusal| (refusal, ()));
        let [y] = outputs.or_composed(outcome, |()| [composed::forward::<Self>(gate, up)]);
        y
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&gate, [like(&gate), like(&up)]);
        let outcome = backward(&gate, &up, &gradient).map_err(|refusal| (refusal, ()));
        let gradients = outputs.or_composed(outcome, |()| {
            composed::backward::<Self>(gate, up, gradient).into()
        });
        gradients.into()
    }

    fn swiglu_backward_with_output(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&gate, [&gate, &up, &gate].map(like));
        let outcome = backward_with_output(&gate, &up, gradient);
        let results = outputs.or_composed(outcome, |[gradient]: [AscendTensor; 1]| {
            let y = composed::forward::<Self>(gate.clone(), up.clone());
            let (dgate, dup) = composed::backward::<Self>(gate, up, gradient);
            [dgate, dup, y]
        });
        results.into()
    }
}

impl GatedLinearOps for Ascend {}

fn forward(gate: &AscendTensor, up: &AscendTensor) -> Result<[AscendTensor; 1], Refusal> {
    let element = kernel_type(gate.dtype())?;
    let context = gate.context()?;
    let kernels = layer_kernels(context)?;
    let [gate, up] = [gate, up].map(|x| x.clone().contiguous());
    let mut y = AscendTensor::empty_in(context, gate.shape(), gate.dtype());
    kernels.gate(Gate {
        element,
        elements: gate.len(),
        gate: read(&gate)?,
        up: read(&up)?,
        y: write(&mut y)?,
    })?;
    Ok([y])
}

fn backward(
    gate: &AscendTensor,
    up: &AscendTensor,
    gradient: &AscendTensor,
) -> Result<[AscendTensor; 2], Refusal> {
    let gradient = gradient.clone().contiguous();
    gradients(gate, up, OutputGradient::Kept(read(&gradient)?))
}

/// The output takes the memory of its gradient, or of a copy if something else holds that.
#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the input back to be composed"
)]
fn backward_with_output(
    gate: &AscendTensor,
    up: &AscendTensor,
    gradient: AscendTensor,
) -> Outcome<[AscendTensor; 1], 3> {
    let free = launch::is_free(&gradient);
    let mut y = if free { gradient } else { copy(&gradient) };
    let done = write(&mut y).map(OutputGradient::Replaced);
    match done.and_then(|replaced| gradients(gate, up, replaced)) {
        Ok([dgate, dup]) => Ok([dgate, dup, y]),
        Err(refusal) => Err((refusal, [y])),
    }
}

fn gradients(
    gate: &AscendTensor,
    up: &AscendTensor,
    gradient: OutputGradient,
) -> Result<[AscendTensor; 2], Refusal> {
    let element = kernel_type(gate.dtype())?;
    let context = gate.context()?;
    let kernels = layer_kernels(context)?;
    let [gate, up] = [gate, up].map(|x| x.clone().contiguous());
    let empty = || AscendTensor::empty_in(context, gate.shape(), gate.dtype());
    let [mut gate_gradient, mut up_gradient] = [empty(), empty()];
    kernels.gate_backward(GateBackward {
        element,
        elements: gate.len(),
        gate: read(&gate)?,
        up: read(&up)?,
        gradient,
        gate_gradient: write(&mut gate_gradient)?,
        up_gradient: write(&mut up_gradient)?,
    })?;
    Ok([gate_gradient, up_gradient])
}
