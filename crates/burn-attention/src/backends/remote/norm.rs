//! RMSNorm as a custom operation.

use burn::backend::ir::ScalarIr;
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;

use super::wire::{Reader, next, send};
use crate::error::Result;
use crate::norm::RmsNormOps;
use crate::ops::accumulator;

/// The version of the numbers that an operation travels as.
const VERSION: u64 = 1;

/// The custom operations.
const FORWARD: &str = "rms_norm.forward";
const BACKWARD: &str = "rms_norm.backward";

/// The inverse of what the forward sends: the version and the bits of epsilon.
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn decode(scalars: &[ScalarIr]) -> Result<f64> {
    let mut reader = Reader::new(scalars, VERSION)?;
    let epsilon = f64::from_bits(reader.number("epsilon", u64::MAX)?);
    reader.end()?;
    Ok(epsilon)
}

impl RmsNormOps for Remote {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let shape = x.shape();
        let mut of_rows = shape.clone();
        if let Some(channels) = of_rows.last_mut() {
            *channels = 1;
        }
        let wide = accumulator(x.dtype()).map_or(DType::F32, DType::from);
        let outputs = vec![(shape, x.dtype()), (of_rows, wide)];
        let numbers = vec![VERSION, epsilon.to_bits()];
        let mut outputs = send(FORWARD, vec![x, weight], outputs, numbers);
        (next(&mut outputs), next(&mut outputs))
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [&x, &weight].map(|x| (x.shape(), x.dtype())).into();
        let inputs = vec![x, weight, rstd, gradient];
        let mut outputs = send(BACKWARD, inputs, outputs, vec![VERSION]);
        (next(&mut outputs), next(&mut outputs))
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::backends::remote::wire::server::{expect_shape, numbers, tensors, write};
    use crate::norm::check;

    /// Lets a server normalise by its backend.
    pub(crate) fn register<B: BackendIr + RmsNormOps>(operations: &mut CustomOpRegistry<B>) {
        operations.register(FORWARD, |handles, ir, _| {
            let ([x, weight], _) = tensors::<B, 2>(handles, ir, false);
            let epsilon = numbers(ir, |scalars| {
                let epsilon = decode(scalars)?;
                check_inputs::<B>(&x, &weight, epsilon)?;
                Ok(epsilon)
            });
            let (out, rstd) = B::rms_norm_forward(x, weight, epsilon);
            write::<B>(handles, ir, [out, rstd]);
        });
        operations.register(BACKWARD, |handles, ir, _| {
            let ([x, weight, rstd, gradient], _) = tensors::<B, 4>(handles, ir, false);
            numbers(ir, |scalars| {
                Reader::new(scalars, VERSION)?.end()?;
                // The backward has no epsilon: it is in rstd.
                check_inputs::<B>(&x, &weight, 0.0)?;
                let (shape, mut rows) = (x.shape(), x.shape());
                if let Some(channels) = rows.last_mut() {
                    *channels = 1;
                }
                let wide = accumulator(x.dtype())?.into();
                expect_shape("rstd", &rstd, &rows[..], wide, &x)?;
                expect_shape("the gradient", &gradient, &shape[..], x.dtype(), &x)
            });
            let (dx, dweight) = B::rms_norm_backward(x, weight, rstd, gradient);
            write::<B>(handles, ir, [dx, dweight]);
        });
    }

    fn check_inputs<B: BackendIr>(
        x: &FloatTensor<B>,
        weight: &FloatTensor<B>,
        epsilon: f64,
    ) -> Result<()> {
        let channels = x.shape().last().copied().unwrap_or(1);
        expect_shape("weight", weight, &[channels], x.dtype(), x)?;
        check(x, weight, epsilon)
    }
}

#[cfg(feature = "remote-server")]
pub(super) use server::register;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::remote::wire::scalars;

    #[test]
    fn epsilon_comes_back_and_foreign_numbers_are_refused() {
        let bits = 1e-6_f64.to_bits();
        assert_eq!(decode(&scalars(vec![1, bits])), Ok(1e-6));
        for foreign in [vec![2, bits], vec![1], vec![1, bits, 0], vec![]] {
            assert!(decode(&scalars(foreign)).is_err());
        }
    }
}
