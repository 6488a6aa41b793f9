//! The loss with all logits, composed of ordinary operations: the baseline.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, TensorData};
use burn_fused::accumulator;
use burn_fused::primitive::cast;

use super::blocks::product_dtype;
use super::op::CrossEntropyOp;

/// Mean cross-entropy, `[1]`, or that of each row, by log_softmax of the logits in f32, or in f64 for f64. Autodiff
/// keeps several tensors of rows x vocabulary.
pub(super) fn cross_entropy<B: Backend>(
    hidden: FloatTensor<B>,
    weight: FloatTensor<B>,
    op: &CrossEntropyOp,
) -> FloatTensor<B> {
    let (rows, device) = (op.rows(), hidden.device());
    let wide = accumulator(hidden.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let factors = product_dtype(hidden.dtype());
    let [hidden, weight] = [hidden, weight].map(|x| cast::<B>(x, factors));
    let logits = B::float_matmul(hidden, B::float_swap_dims(weight, 0, 1));
    let log_probabilities = B::log_softmax(cast::<B>(logits, wide), 1);
    let mut targets = vec![0; rows];
    for &(target, row) in op.targets.iter() {
        targets[row] = target as i64;
    }
    let settings = burn::backend::get_or_init_device_settings::<B>(&device);
    let targets = TensorData::new(targets, [rows, 1]).convert_dtype(settings.int_dtype.into());
    let targets = B::int_from_data(targets, &device);
    let target_logs = B::float_gather(1, log_probabilities, targets);
    let target_logs = B::float_reshape(target_logs, Shape::new([rows]));
    B::float_neg(match op.by_row {
        true => target_logs,
        false => B::float_mean(target_logs),
    })
}
