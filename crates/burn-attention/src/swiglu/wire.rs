//! The gate as custom operations, without numbers.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{NoNumbers, like, send};

use super::op::SwiGluOps;
use crate::error::AttentionError;

/// The custom operations.
const FORWARD: &str = "swiglu.forward";
const BACKWARD: &str = "swiglu.backward";
const BACKWARD_WITH_OUTPUT: &str = "swiglu.backward_with_output";

type Plain = NoNumbers<AttentionError>;

impl SwiGluOps for Remote {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = like(&gate);
        let [out] = send(FORWARD, &Plain::default(), vec![gate, up], [output]);
        out
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&gate), like(&up)];
        send(
            BACKWARD,
            &Plain::default(),
            vec![gate, up, gradient],
            outputs,
        )
        .into()
    }

    fn swiglu_backward_with_output(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [&gate, &up, &gate].map(like);
        let inputs = vec![gate, up, gradient];
        send(BACKWARD_WITH_OUTPUT, &Plain::default(), inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::TensorMetadata;
    use burn::backend::ir::BackendIr;
    use burn_fused::handle;
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::swiglu::check;

    fn check_backward<T: TensorMetadata>(
        _: &Plain,
        [gate, up, gradient]: &[T; 3],
    ) -> Result<(), AttentionError> {
        check(gate, up)?;
        check(gate, gradient)
    }

    /// Lets a server compute the gate by its backend.
    pub(crate) fn register<B: BackendIr + SwiGluOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |_: &Plain, [gate, up]: &[_; 2]| check(gate, up),
            |_, [gate, up]| [B::swiglu_forward(gate, up)],
        );
        handle(
            operations,
            BACKWARD,
            check_backward,
            |_, [gate, up, gradient]| <[_; 2]>::from(B::swiglu_backward(gate, up, gradient)),
        );
        handle(
            operations,
            BACKWARD_WITH_OUTPUT,
            check_backward,
            |_, [gate, up, gradient]| {
                <[_; 3]>::from(B::swiglu_backward_with_output(gate, up, gradient))
            },
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;
