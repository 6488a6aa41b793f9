//! The convolution as custom operations. The numbers are those of the sequences.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{Reader, WireOp, Writer, like, send};

use super::op::{ShortConvolutionOp, ShortConvolutionOps};
use crate::error::{AttentionError, Result};
use crate::sequences::Sequences;

/// The custom operations.
const FORWARD: &str = "short_convolution.forward";
const BACKWARD: &str = "short_convolution.backward";

impl WireOp for ShortConvolutionOp {
    const VERSION: u64 = 1;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        self.sequences.write(numbers);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let sequences = Sequences::read(numbers)?;
        Ok(Self { sequences })
    }
}

impl ShortConvolutionOps for Remote {
    fn short_convolution_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: ShortConvolutionOp,
    ) -> FloatTensor<Self> {
        let output = like(&x);
        let [out] = send(FORWARD, &op, vec![x, weight], [output]);
        out
    }

    fn short_convolution_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: ShortConvolutionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&x), like(&weight)];
        send(BACKWARD, &op, vec![x, weight, gradient], outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::{TensorMetadata, ir::BackendIr};
    use burn_fused::{expect_rank, expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// Lets a server convolve by its backend.
    pub(crate) fn register<B: BackendIr + ShortConvolutionOps>(
        operations: &mut CustomOpRegistry<B>,
    ) {
        handle(
            operations,
            FORWARD,
            |op: &ShortConvolutionOp, [x, weight]: &[_; 2]| check(op, x, weight),
            |op, [x, weight]| [B::short_convolution_forward(x, weight, op)],
        );
        handle(
            operations,
            BACKWARD,
            |op: &ShortConvolutionOp, [x, weight, gradient]: &[_; 3]| {
                check(op, x, weight)?;
                let shape = x.shape();
                let shape = (&shape[..], x.dtype());
                Ok(expect_shape("the gradient", gradient, shape, x)?)
            },
            |op, [x, weight, gradient]| {
                <[_; 2]>::from(B::short_convolution_backward(x, weight, gradient, op))
            },
        );
    }

    fn check<T: TensorMetadata>(op: &ShortConvolutionOp, x: &T, weight: &T) -> Result<()> {
        expect_rank("x", x, 3)?;
        expect_rank("the weight", weight, 2)?;
        op.check(x, weight)
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn::tensor::Shape;
    use burn_fused::{decode, encode};

    use super::*;

    fn op(cu_seqlens: &[usize], tokens: usize) -> ShortConvolutionOp {
        let sequences = Sequences::packed(cu_seqlens, tokens).expect("valid lengths");
        ShortConvolutionOp { sequences }
    }

    fn read(numbers: &[u64], [tokens, channels]: [usize; 2]) -> Result<ShortConvolutionOp> {
        let numbers: Vec<_> = numbers.iter().copied().map(ScalarIr::UInt).collect();
        decode(&numbers, &[Shape::new([2, tokens, channels])])
    }

    #[test]
    fn sequences_come_back() {
        for (sent, numbers) in [
            (op(&[0, 7], 7), &[1, 0][..]),
            (op(&[0, 1, 1, 4, 7], 7), &[1, 2, 1, 4]),
        ] {
            let expected: Vec<_> = numbers.iter().copied().map(ScalarIr::UInt).collect();
            assert_eq!(encode(&sent), expected);
            assert_eq!(read(numbers, [7, 8]), Ok(sent));
        }
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let sizes = [7, 8];
        for (numbers, sizes, part) in [
            (&[2, 0][..], sizes, "the version"),
            (&[1, 8], sizes, "the sequences after the first"),
            (&[1, u64::MAX], sizes, "the sequences after the first"),
            (&[1, 1, 8], sizes, "the first token of a sequence"),
            (&[1, 2, 4], sizes, "the first token of a sequence"),
            (
                &[1, 2, 4, 3],
                sizes,
                "cu_seqlens[2] is 3, expected at least 4",
            ),
            // Nothing is allocated for a tensor without elements.
            (&[1, 1, 4], [usize::MAX, 0], "the sequences after the first"),
        ] {
            let error = read(numbers, sizes).expect_err(part).to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        }
        assert!(read(&[1, 1, 4, 4], sizes).is_err());
        assert!(read(&[1, 0], [usize::MAX, 0]).is_ok());
    }
}
