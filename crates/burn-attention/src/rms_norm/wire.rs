//! RMSNorm as a custom operation.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn_fused::{NoNumbers, Reader, WireOp, Writer, like, send};

use crate::error::{AttentionError, Result};
use crate::rms_norm::{RmsNormOps, rows};

/// The custom operations.
const FORWARD: &str = "rms_norm.forward";
const BACKWARD: &str = "rms_norm.backward";

pub(crate) struct Forward {
    pub(crate) epsilon: f64,
}

/// It has no epsilon: that is in rstd.
pub(crate) type Backward = NoNumbers<AttentionError, 3>;

impl WireOp for Forward {
    const VERSION: u64 = 2;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        numbers.float(self.epsilon);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let epsilon = numbers.float("epsilon")?;
        Ok(Self { epsilon })
    }
}

impl RmsNormOps for Remote {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&x), rows(&x.shape(), x.dtype())];
        send(FORWARD, &Forward { epsilon }, vec![x, weight], outputs).into()
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&x), (weight.shape(), rstd.dtype())];
        send(
            BACKWARD,
            &Backward::default(),
            vec![x, weight, rstd, gradient],
            outputs,
        )
        .into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn::tensor::DType;
    use burn_fused::{expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::rms_norm::{check, weight_type};

    /// Lets a server normalise by its backend.
    pub(crate) fn register<B: BackendIr + RmsNormOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |op: &Forward, [x, weight]: &[_; 2]| {
                check_inputs(x, &[("weight", weight)], weight_type(x, weight), op.epsilon)
            },
            |op, [x, weight]| <[_; 2]>::from(B::rms_norm_forward(x, weight, op.epsilon)),
        );
        handle(
            operations,
            BACKWARD,
            |_: &Backward, [x, weight, rstd, gradient]: &[_; 4]| {
                check_inputs(x, &[("weight", weight)], weight_type(x, weight), 0.0)?;
                let (shape, wide) = rows(&x.shape(), x.dtype());
                expect_shape("rstd", rstd, (&shape[..], wide), x)?;
                let (shape, dtype) = like(x);
                Ok(expect_shape(
                    "the gradient",
                    gradient,
                    (&shape[..], dtype),
                    x,
                )?)
            },
            |_, [x, weight, rstd, gradient]| {
                <[_; 2]>::from(B::rms_norm_backward(x, weight, rstd, gradient))
            },
        );
    }

    pub(crate) fn check_inputs<T: TensorMetadata>(
        x: &T,
        weights: &[(&'static str, &T)],
        of_weights: DType,
        epsilon: f64,
    ) -> Result<()> {
        let channels = x.shape().last().copied().unwrap_or(1);
        for (name, weight) in weights {
            expect_shape(name, *weight, (&[channels], of_weights), x)?;
        }
        check(x, weights, of_weights, epsilon)
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::{check_inputs, register};

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn_fused::{decode, encode};

    use super::*;

    #[test]
    fn epsilon_travels_as_it_is_and_an_older_release_is_refused() {
        let numbers = encode(&Forward { epsilon: 1e-6 });
        assert_eq!(numbers, [ScalarIr::UInt(2), ScalarIr::Float(1e-6)]);
        let found = decode::<Forward>(&numbers, &[]).map(|op| op.epsilon);
        assert_eq!(found, Ok(1e-6));
        let older = [ScalarIr::UInt(1), ScalarIr::UInt(1e-6_f64.to_bits())];
        let error = decode::<Forward>(&older, &[]).err().expect("refused");
        let expected = "the version is 1, expected 2; client and server must be of one release";
        assert_eq!(error.to_string(), expected);
        assert!(decode::<Backward>(&older[..1], &[]).is_err());
    }
}
