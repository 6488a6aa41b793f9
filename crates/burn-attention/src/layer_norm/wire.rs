//! LayerNorm as a custom operation. Its numbers are those of RMSNorm.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn_fused::{like, send};

use crate::layer_norm::LayerNormOps;
use crate::rms_norm::rows;
use crate::rms_norm::wire::{Backward, Forward};

/// The custom operations.
const FORWARD: &str = "layer_norm.forward";
const BACKWARD: &str = "layer_norm.backward";

impl LayerNormOps for Remote {
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [
            like(&x),
            rows(&x.shape(), x.dtype()),
            rows(&x.shape(), x.dtype()),
        ];
        send(
            FORWARD,
            &Forward { epsilon },
            vec![x, weight, bias],
            outputs,
        )
        .into()
    }

    fn layer_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let of_channels = (weight.shape(), rstd.dtype());
        let outputs = [like(&x), of_channels.clone(), of_channels];
        let inputs = vec![x, weight, mean, rstd, gradient];
        send(BACKWARD, &Backward::default(), inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::rms_norm::wire::check_inputs;

    /// Lets a server normalise by its backend.
    pub(crate) fn register<B: BackendIr + LayerNormOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |op: &Forward, [x, weight, bias]: &[_; 3]| {
                check_inputs(
                    x,
                    &[("weight", weight), ("bias", bias)],
                    x.dtype(),
                    op.epsilon,
                )
            },
            |op, [x, weight, bias]| {
                <[_; 3]>::from(B::layer_norm_forward(x, weight, bias, op.epsilon))
            },
        );
        handle(
            operations,
            BACKWARD,
            |_: &Backward, [x, weight, mean, rstd, gradient]: &[_; 5]| {
                check_inputs(x, &[("weight", weight)], x.dtype(), 0.0)?;
                let (of_rows, of_x) = (rows(&x.shape(), x.dtype()), like(x));
                for (name, tensor, (shape, dtype)) in [
                    ("mean", mean, &of_rows),
                    ("rstd", rstd, &of_rows),
                    ("the gradient", gradient, &of_x),
                ] {
                    expect_shape(name, tensor, (&shape[..], *dtype), x)?;
                }
                Ok(())
            },
            |_, [x, weight, mean, rstd, gradient]| {
                <[_; 3]>::from(B::layer_norm_backward(x, weight, mean, rstd, gradient))
            },
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;
