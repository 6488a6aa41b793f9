//! The gate of a feed-forward network by rope-ascend's kernels.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn_attention::SwiGluOps;
use burn_attention::composed::swiglu as composed;
use burn_fused::like;
use rope_ascend::rope::{Gate, GateBackward};

use super::{Outputs, Refusal, kernel_type, layer_kernels, read, write};
use crate::Ascend;
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
}

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
    let element = kernel_type(gate.dtype())?;
    let context = gate.context()?;
    let kernels = layer_kernels(context)?;
    let [gate, up, gradient] = [gate, up, gradient].map(|x| x.clone().contiguous());
    let empty = || AscendTensor::empty_in(context, gate.shape(), gate.dtype());
    let [mut gate_gradient, mut up_gradient] = [empty(), empty()];
    kernels.gate_backward(GateBackward {
        element,
        elements: gate.len(),
        gate: read(&gate)?,
        up: read(&up)?,
        gradient: read(&gradient)?,
        gate_gradient: write(&mut gate_gradient)?,
        up_gradient: write(&mut up_gradient)?,
    })?;
    Ok([gate_gradient, up_gradient])
}
