//! The short convolution by rope-ascend's kernels.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, Shape, TensorData, TensorMetadata};
use burn_attention::composed::short_convolution as composed;
use burn_attention::{Sequences, ShortConvolutionOp, ShortConvolutionOps};
use burn_fused::like;
use rope_ascend::rope::{ShortConvolution, ShortConvolutionGradients};

use super::{Outputs, Refusal, kernel_type, layer_kernels, read, write};
use crate::Ascend;
use crate::ops::views;
use crate::tensor::AscendTensor;

impl ShortConvolutionOps for Ascend {
    fn short_convolution_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: ShortConvolutionOp,
    ) -> FloatTensor<Self> {
        let outputs = Outputs::new(&x, [like(&x)]);
        let outcome = forward(&x, &weight, &op.sequences).map_err(|refusal| (refusal, ()));
        let [y] = outputs.or_composed(outcome, |()| [composed::forward::<Self>(x, weight, &op)]);
        y
    }

    fn short_convolution_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: ShortConvolutionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&x, [like(&x), like(&weight)]);
        let outcome = backward([&x, &weight, &gradient], &op.sequences);
        let outcome = outcome.map_err(|refusal| (refusal, ()));
        let gradients = outputs.or_composed(outcome, |()| {
            composed::backward::<Self>(x, weight, gradient, &op).into()
        });
        gradients.into()
    }
}

/// The dense tensors of a convolution that kernels read.
struct Inputs {
    x: AscendTensor,
    /// `[taps, channels]`
    weight: AscendTensor,
    /// Of the sequences of all rows, in i32.
    starts: AscendTensor,
}

impl Inputs {
    fn new(
        x: &AscendTensor,
        weight: &AscendTensor,
        sequences: &Sequences,
    ) -> Result<Self, Refusal> {
        kernel_type(x.dtype())?;
        let [batch, tokens, _] = x.shape().dims();
        if batch.saturating_mul(tokens) > i32::MAX as usize {
            return Err(Refusal::Limit);
        }
        let mut starts = Vec::new();
        for first in (0..batch).map(|row| row * tokens) {
            starts.extend(
                sequences
                    .starts()
                    .iter()
                    .map(|start| (first + start) as i32),
            );
        }
        let shape = [starts.len()];
        Ok(Self {
            x: x.clone().contiguous(),
            weight: views::swap(weight, 0, 1).contiguous(),
            starts: Ascend::int_from_data(TensorData::new(starts, shape), &x.device()),
        })
    }

    fn request(&self) -> Result<ShortConvolution<'_>, Refusal> {
        let [batch, tokens, channels] = self.x.shape().dims();
        Ok(ShortConvolution {
            element: kernel_type(self.x.dtype())?,
            size: [batch * tokens, channels],
            taps: self.weight.dims()[0],
            sequences: self.starts.len(),
            x: read(&self.x)?,
            weight: read(&self.weight)?,
            starts: read(&self.starts)?,
        })
    }
}

fn forward(
    x: &AscendTensor,
    weight: &AscendTensor,
    sequences: &Sequences,
) -> Result<[AscendTensor; 1], Refusal> {
    let inputs = Inputs::new(x, weight, sequences)?;
    let context = x.context()?;
    let mut y = AscendTensor::empty_in(context, x.shape(), x.dtype());
    layer_kernels(context)?.short_convolution(inputs.request()?, write(&mut y)?)?;
    Ok([y])
}

fn backward(
    [x, weight, gradient]: [&AscendTensor; 3],
    sequences: &Sequences,
) -> Result<[AscendTensor; 2], Refusal> {
    let inputs = Inputs::new(x, weight, sequences)?;
    let gradient = gradient.clone().contiguous();
    let context = x.context()?;
    let kernels = layer_kernels(context)?;
    let request = inputs.request()?;
    let [parts, taps, channels] = [
        kernels.short_convolution_parts(request)?,
        request.taps,
        request.size[1],
    ];
    let mut dx = AscendTensor::empty_in(context, x.shape(), x.dtype());
    let sums = Shape::from([parts, taps, channels]);
    let mut sums = AscendTensor::empty_in(context, sums, DType::F32);
    let gradients = ShortConvolutionGradients {
        gradient: read(&gradient)?,
        x_gradient: write(&mut dx)?,
        weight_sums: write(&mut sums)?,
    };
    kernels.short_convolution_backward(request, gradients)?;
    let sum = Ascend::float_sum_dim(sums, 0);
    let sum = views::reshape(sum, &Shape::from([taps, channels]));
    let dweight = Ascend::float_cast(views::swap(&sum, 0, 1), weight.dtype().into());
    Ok([dx, dweight])
}

#[cfg(test)]
mod tests {
    use ascend_sim::control;
    use burn::backend::Backend;

    use super::*;
    use crate::faults::{Alone, values};

    /// The kernels that ran, and the number of operators.
    fn ran() -> (Vec<String>, usize) {
        let kernels = control::launches().into_iter().map(|launch| launch.kernel);
        let kernels = kernels.filter(|kernel| kernel.starts_with("rope_"));
        let calls = control::calls().into_iter();
        let operators = calls.filter(|call| {
            call.function.starts_with("aclnn") && !call.function.ends_with("GetWorkspaceSize")
        });
        (kernels.collect(), operators.count())
    }

    fn clear(alone: &Alone) {
        Ascend::sync(&alone.0).expect("nothing failed");
        control::clear_calls();
        control::clear_launches();
    }

    /// The weight is brought into the kernel's order, and the sums of the parts are added; ordinary
    /// operations compute beyond the limit on taps.
    #[test]
    fn each_direction_is_one_kernel_and_one_or_two_operators() {
        let alone = Alone::new();
        let tensor = |dims: &[usize], step: usize| {
            let count = dims.iter().product();
            let number = |index: usize| ((index * step + 3) % 17) as f32 / 8.0 - 1.0;
            let numbers: Vec<f32> = (0..count).map(number).collect();
            Ascend::float_from_data(TensorData::new(numbers, dims.to_vec()), &alone.0)
        };
        for taps in [4, 8, 9] {
            let (x, weight) = (tensor(&[2, 5, 3], 5), tensor(&[3, taps], 7));
            let gradient = tensor(&[2, 5, 3], 11);
            let sequences = Sequences::packed(&[0, 2, 5], 5).expect("valid lengths");
            let op = ShortConvolutionOp { sequences };
            clear(&alone);
            let y = Ascend::short_convolution_forward(x.clone(), weight.clone(), op.clone());
            Ascend::sync(&alone.0).expect("computed");
            let forward = ran();
            clear(&alone);
            let (dx, dweight) = Ascend::short_convolution_backward(
                x.clone(),
                weight.clone(),
                gradient.clone(),
                op.clone(),
            );
            Ascend::sync(&alone.0).expect("computed");
            let backward = ran();
            if taps > 8 {
                assert_eq!([forward.0, backward.0].concat(), Vec::<String>::new());
            } else {
                let kernel = |name: &str| vec![format!("rope_short_convolution{name}_f32")];
                assert_eq!(forward, (kernel(""), 1));
                assert_eq!(backward, (kernel("_grad"), 2));
            }
            let expected = composed::forward::<Ascend>(x.clone(), weight.clone(), &op);
            let (edx, edweight) = composed::backward::<Ascend>(x, weight, gradient, &op);
            for (found, expected) in [(y, expected), (dx, edx), (dweight, edweight)] {
                let [found, expected] = [found, expected].map(|x| values(x).expect("computed"));
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-5, "{found}, {expected}");
                }
            }
        }
    }
}
