//! What all operations over the wire share: numbers beside tensors, sending, and the server's side.

use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr};
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::remote::CustomOpClient;
use burn::tensor::{DType, Shape};

use crate::error::{AttentionError, Result};

/// Numbers as they travel.
pub(super) fn scalars(numbers: Vec<u64>) -> Vec<ScalarIr> {
    numbers.into_iter().map(ScalarIr::UInt).collect()
}

/// Numbers from the wire, in order.
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
pub(super) struct Reader<'a> {
    scalars: &'a [ScalarIr],
    next: usize,
}

#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
impl<'a> Reader<'a> {
    /// Of the numbers after their version.
    pub(super) fn new(scalars: &'a [ScalarIr], version: u64) -> Result<Self> {
        // The version first: in another version the numbers mean something else.
        match scalars.first() {
            Some(ScalarIr::UInt(found)) if *found == version => Ok(Self { scalars, next: 1 }),
            found => Err(AttentionError::Wire {
                what: "the version",
                expected: version.to_string(),
                found: format!("{found:?}"),
            }),
        }
    }

    /// Refuses numbers that nothing has read.
    pub(super) fn end(self) -> Result<()> {
        if self.scalars.len() > self.next {
            return Err(AttentionError::Wire {
                what: "the number of numbers",
                expected: self.next.to_string(),
                found: self.scalars.len().to_string(),
            });
        }
        Ok(())
    }

    /// The next number, which is at most `most`.
    pub(super) fn number(&mut self, what: &'static str, most: u64) -> Result<u64> {
        let found = self.scalars.get(self.next);
        self.next += 1;
        match found {
            Some(ScalarIr::UInt(number)) if *number <= most => Ok(*number),
            found => Err(AttentionError::Wire {
                what,
                expected: format!("a number of at most {most}"),
                found: match found {
                    Some(ScalarIr::UInt(number)) => number.to_string(),
                    Some(other) => format!("{other:?}"),
                    None => "missing".into(),
                },
            }),
        }
    }

    pub(super) fn size(&mut self, what: &'static str, most: usize) -> Result<usize> {
        Ok(self.number(what, most as u64)? as usize)
    }

    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool> {
        Ok(self.number(what, 1)? == 1)
    }
}

/// Sends an operation with its numbers. Outputs are given by shape and type.
pub(super) fn send(
    id: &'static str,
    inputs: Vec<FloatTensor<Remote>>,
    outputs: Vec<(Shape, DType)>,
    numbers: Vec<u64>,
) -> impl Iterator<Item = FloatTensor<Remote>> {
    let client = CustomOpClient::new(&inputs[0].device());
    let outputs = outputs
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let outputs: Vec<TensorIr> = outputs.collect();
    let inputs: Vec<TensorIr> = inputs.into_iter().map(|tensor| tensor.into_ir()).collect();
    let ir = CustomOpIr::with_scalars(id, &inputs, &outputs, scalars(numbers));
    client.register(ir).into_iter()
}

/// An operation's next output.
pub(super) fn next(outputs: &mut impl Iterator<Item = FloatTensor<Remote>>) -> FloatTensor<Remote> {
    outputs
        .next()
        .unwrap_or_else(|| unreachable!("the client registers the outputs that were named"))
}

#[cfg(feature = "remote-server")]
pub(super) mod server {
    use burn::backend::ir::{BackendIr, HandleContainer};

    use super::*;
    use crate::ops::expect;

    /// Checks the shape, type and device of a tensor that a client named: backends read as much of
    /// each tensor of an operation as the first ones make them expect.
    pub(crate) fn expect_shape<T: TensorMetadata>(
        what: &'static str,
        tensor: &T,
        shape: &[usize],
        dtype: DType,
        first: &T,
    ) -> Result<()> {
        expect(what, tensor, dtype, first)?;
        let found = tensor.shape();
        if found[..] == *shape {
            return Ok(());
        }
        Err(AttentionError::Wire {
            what,
            expected: format!("a tensor of shape {shape:?}"),
            found: format!("one of {:?}", &found[..]),
        })
    }

    /// What an operation is called with, as `decode` reads its numbers: how many tensors it has is
    /// for the caller to compare.
    pub(crate) fn numbers<C>(ir: &CustomOpIr, decode: impl FnOnce(&[ScalarIr]) -> Result<C>) -> C {
        // How an operation fails in burn-remote: the session ends, and the client's next read is an
        // error.
        decode(&ir.scalars).unwrap_or_else(|error| panic!("{}: {error}", ir.id))
    }

    /// The tensors of an operation: `N` of them, and one more if `optional`.
    pub(crate) fn tensors<B: BackendIr, const N: usize>(
        handles: &mut HandleContainer<B::Handle>,
        ir: &CustomOpIr,
        optional: bool,
    ) -> ([FloatTensor<B>; N], Option<FloatTensor<B>>) {
        let (expected, found) = (N + usize::from(optional), ir.inputs.len());
        assert!(
            found == expected,
            "{}: it has {found} tensors, expected {expected}",
            ir.id
        );
        if let Some(other) = ir.inputs.iter().find(|tensor| !tensor.dtype.is_float()) {
            panic!(
                "{}: a tensor has type {:?}, expected a float",
                ir.id, other.dtype
            );
        }
        let mut tensors = ir.inputs.iter();
        let mut tensor = || {
            let tensor = tensors.next();
            tensor.map(|tensor| handles.get_float_tensor::<B>(tensor))
        };
        let first = [(); N].map(|()| {
            tensor().unwrap_or_else(|| unreachable!("the number of tensors was compared"))
        });
        (first, tensor())
    }

    pub(crate) fn write<B: BackendIr>(
        handles: &mut HandleContainer<B::Handle>,
        ir: &CustomOpIr,
        tensors: impl IntoIterator<Item = FloatTensor<B>>,
    ) {
        for (output, tensor) in ir.outputs.iter().zip(tensors) {
            handles.register_float_tensor::<B>(&output.id, tensor);
        }
    }
}
