//! Normalisation over the last axis.

use burn::backend::TensorMetadata;

use super::launch::{Out, compute_of_list};
use crate::tensor::AscendTensor;

/// (x - mean) / sqrt(variance + epsilon) · gamma + beta over the last axis.
pub(crate) fn layer_norm(
    x: &AscendTensor,
    gamma: &AscendTensor,
    beta: Option<&AscendTensor>,
    epsilon: f64,
) -> AscendTensor {
    let width = [gamma.len() as i64];
    let inputs: Vec<&AscendTensor> = [x, gamma].into_iter().chain(beta).collect();
    compute_of_list(
        &inputs,
        Out::New(x.shape(), x.dtype()),
        |ops, views, out| {
            let (gamma, beta) = (Some(views[1]), views.get(2).copied());
            ops.layer_norm(views[0], &width, gamma, beta, epsilon, out, None, None)
        },
    )
}
