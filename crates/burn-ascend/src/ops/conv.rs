//! Convolutions as products of matrices.
//!
//! The operator library's convolution does not compute f32 in full precision. Windows of the padded
//! input are a strided view of it; one copy arranges them as rows, and a product with the weight is
//! exactly the convolution. Its two gradients are products with the same rows. Patch embeddings,
//! whose windows do not overlap, cost that one copy.

use burn::backend::ops::ConvOptions;
use burn::backend::{Shape, Slice, TensorMetadata};

use super::elementwise::{binary, plus};
use super::matmul::matmul;
use super::{movement, views};
use crate::tensor::AscendTensor;

/// Sizes of one convolution; spatial axes in order.
struct Plan {
    batch: usize,
    groups: usize,
    /// Input channels of a group.
    channels: usize,
    /// Output channels of a group.
    outputs: usize,
    input: Vec<usize>,
    padded: Vec<usize>,
    before: Vec<usize>,
    kernel: Vec<usize>,
    stride: Vec<usize>,
    dilation: Vec<usize>,
    /// Windows along each axis.
    windows: Vec<usize>,
}

impl Plan {
    fn new<const N: usize>(x: &[usize], weight: &[usize], options: &ConvOptions<N>) -> Self {
        let padded: Vec<usize> = (0..N)
            .map(|axis| x[axis + 2] + options.padding[axis].0 + options.padding[axis].1)
            .collect();
        let windows = (0..N)
            .map(|axis| {
                let span = options.dilation[axis] * (weight[axis + 2] - 1) + 1;
                (padded[axis] + options.stride[axis]).saturating_sub(span) / options.stride[axis]
            })
            .collect();
        Self {
            batch: x[0],
            groups: options.groups,
            channels: weight[1],
            outputs: weight[0] / options.groups,
            input: x[2..].to_vec(),
            padded,
            before: options.padding.iter().map(|pad| pad.0).collect(),
            kernel: weight[2..].to_vec(),
            stride: options.stride.to_vec(),
            dilation: options.dilation.to_vec(),
            windows,
        }
    }

    /// Number of windows in the batch.
    fn rows(&self) -> usize {
        self.batch * self.windows.iter().product::<usize>()
    }

    /// Elements of a window in one group.
    fn columns(&self) -> usize {
        self.channels * self.kernel.iter().product::<usize>()
    }

    fn shape(parts: &[&[usize]]) -> Shape {
        Shape::from(parts.concat())
    }

    /// The part of the padded input that is the input.
    fn inner(&self) -> Vec<Slice> {
        let all = [Slice::new(0, None, 1); 2];
        let spatial = self
            .before
            .iter()
            .zip(&self.input)
            .map(|(&before, &length)| {
                Slice::new(before as isize, Some((before + length) as isize), 1)
            });
        all.into_iter().chain(spatial).collect()
    }

    fn padded_shape(&self) -> Shape {
        Self::shape(&[&[self.batch, self.groups * self.channels], &self.padded])
    }

    /// True if no two windows share an element.
    fn windows_are_apart(&self) -> bool {
        let axes = self.kernel.iter().zip(&self.dilation).zip(&self.stride);
        axes.into_iter()
            .all(|((kernel, dilation), stride)| (kernel - 1) * dilation < *stride)
    }

    /// The windows of `[batch, groups·channels, padded…]` as `[batch, groups, channels, windows…,
    /// kernel…]`.
    fn windows_of(&self, padded: &AscendTensor) -> AscendTensor {
        let strides = padded.strides();
        let channel = strides[1];
        let spatial = &strides[2..];
        let each = |factor: &[usize]| -> Vec<usize> {
            spatial.iter().zip(factor).map(|(s, f)| s * f).collect()
        };
        let shape = Self::shape(&[
            &[self.batch, self.groups, self.channels],
            &self.windows,
            &self.kernel,
        ]);
        let strides = [
            vec![strides[0], channel * self.channels, channel],
            each(&self.stride),
            each(&self.dilation),
        ]
        .concat();
        padded.view(shape, strides, padded.offset())
    }

    /// Axes of the windows in the order of rows: `[groups, batch, windows…, channels, kernel…]`.
    fn row_order(&self) -> Vec<usize> {
        let n = self.windows.len();
        [1, 0]
            .into_iter()
            .chain(3..3 + n)
            .chain([2])
            .chain(3 + n..3 + 2 * n)
            .collect()
    }

    /// The windows as `[groups, rows, columns]`.
    fn rows_of(&self, x: AscendTensor) -> AscendTensor {
        let padded = if self.padded == self.input {
            x
        } else {
            let zeros = movement::zeros(&x.device(), self.padded_shape(), x.dtype());
            movement::slice_assign(zeros, &self.inner(), x)
        };
        let windows = views::permute(&self.windows_of(&padded), &self.row_order());
        views::reshape(
            windows,
            &Shape::from([self.groups, self.rows(), self.columns()]),
        )
    }

    /// `[batch, groups·outputs, windows…]` as `[groups, rows, outputs]`.
    fn outputs_as_rows(&self, y: &AscendTensor) -> AscendTensor {
        let shape = Self::shape(&[&[self.batch, self.groups, self.outputs], &self.windows]);
        let y = views::reshape(y.clone(), &shape);
        let order: Vec<usize> = [1, 0]
            .into_iter()
            .chain(3..3 + self.windows.len())
            .chain([2])
            .collect();
        let y = views::permute(&y, &order);
        views::reshape(y, &Shape::from([self.groups, self.rows(), self.outputs]))
    }

    /// The inverse of [`outputs_as_rows`](Self::outputs_as_rows).
    fn rows_as_outputs(&self, rows: AscendTensor) -> AscendTensor {
        let n = self.windows.len();
        let shape = Self::shape(&[&[self.groups, self.batch], &self.windows, &[self.outputs]]);
        let order: Vec<usize> = [1, 0, n + 2].into_iter().chain(2..n + 2).collect();
        let y = views::permute(&views::reshape(rows, &shape), &order);
        let shape = Self::shape(&[&[self.batch, self.groups * self.outputs], &self.windows]);
        views::reshape(y, &shape)
    }

    /// The weight as `[groups, outputs, columns]`.
    fn weight_as_rows(&self, weight: AscendTensor) -> AscendTensor {
        views::reshape(
            weight,
            &Shape::from([self.groups, self.outputs, self.columns()]),
        )
    }
}

/// x · weight + bias.
pub(crate) fn forward<const N: usize>(
    x: AscendTensor,
    weight: AscendTensor,
    bias: Option<AscendTensor>,
    options: &ConvOptions<N>,
) -> AscendTensor {
    let plan = Plan::new(x.dims(), weight.dims(), options);
    let weight = views::swap(&plan.weight_as_rows(weight), 1, 2);
    let y = plan.rows_as_outputs(matmul(plan.rows_of(x), weight));
    match bias {
        Some(bias) => {
            let mut dims = vec![1; N + 2];
            dims[1] = bias.len();
            binary(plus, y, views::reshape(bias, &Shape::from(dims)))
        }
        None => y,
    }
}

/// Gradient of the weight.
pub(crate) fn weight_backward<const N: usize>(
    x: AscendTensor,
    weight: &AscendTensor,
    grad: &AscendTensor,
    options: &ConvOptions<N>,
) -> AscendTensor {
    let plan = Plan::new(x.dims(), weight.dims(), options);
    let grad = views::swap(&plan.outputs_as_rows(grad), 1, 2);
    views::reshape(matmul(grad, plan.rows_of(x)), &weight.shape())
}

/// Gradient of the input: the windows' gradients, added where windows overlap.
pub(crate) fn input_backward<const N: usize>(
    x: &AscendTensor,
    weight: AscendTensor,
    grad: &AscendTensor,
    options: &ConvOptions<N>,
) -> AscendTensor {
    let plan = Plan::new(x.dims(), weight.dims(), options);
    let rows = matmul(plan.outputs_as_rows(grad), plan.weight_as_rows(weight));
    let order = plan.row_order();
    let shape = Plan::shape(&[
        &[plan.groups, plan.batch],
        &plan.windows,
        &[plan.channels],
        &plan.kernel,
    ]);
    let mut inverse = vec![0; order.len()];
    for (to, &axis) in order.iter().enumerate() {
        inverse[axis] = to;
    }
    let windows = views::permute(&views::reshape(rows, &shape), &inverse);
    let padded = movement::zeros(&x.device(), plan.padded_shape(), x.dtype());
    let target = plan.windows_of(&padded);
    let failure = if plan.windows_are_apart() {
        movement::write(&target, &windows)
    } else {
        // One pass for each element of the kernel: within a pass no two windows share an element.
        (0..plan.kernel.iter().product()).find_map(|index| {
            let [part, sum] = [&windows, &target].map(|t| at_kernel_element(t, 3 + N, index));
            movement::write(&sum, &binary(plus, part, sum.clone()))
        })
    };
    movement::slice(&movement::unless(failure, padded), &plan.inner())
}

/// The view at one element of the kernel, without the kernel's axes.
fn at_kernel_element(x: &AscendTensor, first: usize, index: usize) -> AscendTensor {
    let mut offset = x.offset();
    let mut rest = index;
    for axis in (first..x.dims().len()).rev() {
        offset += rest % x.dims()[axis] * x.strides()[axis];
        rest /= x.dims()[axis];
    }
    let dims = x.dims()[..first].to_vec();
    x.view(Shape::from(dims), x.strides()[..first].to_vec(), offset)
}
