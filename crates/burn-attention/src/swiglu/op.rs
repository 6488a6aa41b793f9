//! The operation as backends implement it.

use burn::backend::tensor::FloatTensor;

use super::composed;

operation! {
    Fusion;
    /// silu(gate) * up, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations. The implementation for
    /// [`Autodiff`](burn::backend::Autodiff) adds the backward.
    pub trait SwiGluOps {
        /// Computes the output, in the shape and type of both inputs.
        #[fusion(dtype = gate, shape = gate)]
        fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::forward::<Self>(gate, up)
        }

        /// Computes the gradients of gate and up from the output's gradient.
        #[fusion(meta = |gate, up, _| (gate.clone(), up.clone()))]
        fn swiglu_backward(
            gate: FloatTensor<Self>,
            up: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::backward::<Self>(gate, up, gradient)
        }

        /// Computes the gradients of gate and up, and the output again.
        #[fusion(default)]
        fn swiglu_backward_with_output(
            gate: FloatTensor<Self>,
            up: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
            let out = Self::swiglu_forward(gate.clone(), up.clone());
            let (dgate, dup) = Self::swiglu_backward(gate, up, gradient);
            (dgate, dup, out)
        }
    }
}
