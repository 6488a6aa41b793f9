//! Products of matrices.

use burn::backend::{Shape, TensorMetadata};
use rope_ascend::aclnn::Number;
use rope_ascend::sys::CubeMath;

use super::elementwise::broadcast;
use super::launch::{Out, compute};
use super::{movement, views};
use crate::tensor::AscendTensor;

/// x · y over the last two axes, the axes before them repeated where they have length 1.
///
/// A transposed matrix is passed by its strides, without a copy. A weight without batch axes is one
/// product with all rows.
pub(crate) fn matmul(x: AscendTensor, y: AscendTensor) -> AscendTensor {
    let rank = x.dims().len();
    let [m, k] = [x.dims()[rank - 2], x.dims()[rank - 1]];
    let n = y.dims()[rank - 1];
    let batch = broadcast(&x.dims()[..rank - 2], &y.dims()[..rank - 2]);
    let mut dims = batch.to_vec();
    dims.extend([m, n]);
    let (shape, dtype) = (Shape::from(dims), x.dtype());
    if k == 0 && x.failure().is_none() && y.failure().is_none() {
        return movement::zeros(&x.device(), shape, dtype);
    }
    let one_y = y.dims()[..rank - 2].iter().all(|&dim| dim == 1);
    if one_y && x.len() == batch.num_elements() * m * k {
        let rows = Shape::from([batch.num_elements() * m, k]);
        let (x, y) = (
            views::reshape(x, &rows),
            views::reshape(y, &Shape::from([k, n])),
        );
        let out = Out::New(Shape::from([rows[0], n]), dtype);
        let product = compute([&x, &y], out, |ops, [x, y], out| {
            ops.mm(x, y, out, CubeMath::KEEP_DTYPE)
        });
        return views::reshape(product, &shape);
    }
    let count = batch.num_elements();
    let [x, y] =
        [(x, m, k), (y, k, n)].map(|(t, rows, columns)| flat_batch(t, &batch, rows, columns));
    let out = Out::New(Shape::from([count, m, n]), dtype);
    let product = compute([&x, &y], out, |ops, [x, y], out| {
        ops.batch_mm(x, y, out, CubeMath::KEEP_DTYPE)
    });
    views::reshape(product, &shape)
}

/// x · weight + bias over the last axis, the bias added before the result is rounded.
pub(crate) fn linear(
    x: AscendTensor,
    weight: AscendTensor,
    bias: Option<AscendTensor>,
) -> AscendTensor {
    let [inputs, outputs] = [0, 1].map(|axis| weight.dims()[axis]);
    let mut dims = x.dims().to_vec();
    let rows = dims[..dims.len() - 1].iter().product();
    if let Some(last) = dims.last_mut() {
        *last = outputs;
    }
    let shape = Shape::from(dims);
    let x = views::reshape(x, &Shape::from([rows, inputs]));
    let product = match bias {
        // Without inputs the operator would not read the bias.
        Some(bias) if inputs > 0 || bias.failure().is_some() => {
            let out = Out::New(Shape::from([rows, outputs]), x.dtype());
            compute([&bias, &x, &weight], out, |ops, [bias, x, weight], out| {
                let one = Number::Float(1.0);
                ops.add_mm(bias, x, weight, one, one, out, CubeMath::KEEP_DTYPE)
            })
        }
        Some(bias) => {
            let shape = Shape::from([rows, outputs]);
            views::expand(&bias, &shape).contiguous()
        }
        None => matmul(x, weight),
    };
    views::reshape(product, &shape)
}

/// The tensor with one batch axis: of length 1 if all matrices are the same, otherwise of the whole
/// batch.
fn flat_batch(x: AscendTensor, batch: &Shape, rows: usize, columns: usize) -> AscendTensor {
    let own: usize = x.dims()[..batch.len()].iter().product();
    if own == 1 {
        return views::reshape(x, &Shape::from([1, rows, columns]));
    }
    let mut dims = batch.to_vec();
    dims.extend([rows, columns]);
    let x = views::expand(&x, &Shape::from(dims));
    views::reshape(x, &Shape::from([batch.num_elements(), rows, columns]))
}
