//! Operations on served devices, through burn-remote: each is sent as one custom operation, typed
//! numbers beside its tensors, and runs on the server's backend. The tensors stay on their device.
//!
//! Tensors move into the operation. If the client has no other handle of a tensor, the server's
//! handle is the only one, and its backend may overwrite the tensor.

use std::fmt;
use std::marker::PhantomData;

use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr};
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::remote::CustomOpClient;
use burn::tensor::{DType, Shape};

use crate::{OpError, expect};

/// An operation in its transmitted form, sent with its tensors.
pub trait WireOp: Sized {
    /// The version of its numbers. A change in the meaning of a number requires a new version.
    const VERSION: u64;
    /// The error for numbers that do not encode such an operation.
    type Error: From<OpError> + fmt::Display;

    /// Writes the numbers after the version.
    fn write(&self, numbers: &mut Writer);

    /// Reads the output of [`write`](Self::write).
    ///
    /// # Errors
    /// For invalid numbers, before anything larger than the tensors ([`Reader::shapes`]) is
    /// allocated.
    fn read(numbers: &mut Reader<'_>) -> Result<Self, Self::Error>;
}

/// An operation without numbers, for the shapes of its tensors say everything.
#[derive(Debug)]
pub struct NoNumbers<E, const VERSION: u64 = 1>(PhantomData<fn() -> E>);

impl<E, const VERSION: u64> Default for NoNumbers<E, VERSION> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E: From<OpError> + fmt::Display, const VERSION: u64> WireOp for NoNumbers<E, VERSION> {
    const VERSION: u64 = VERSION;
    type Error = E;

    fn write(&self, _: &mut Writer) {}

    fn read(_: &mut Reader<'_>) -> Result<Self, E> {
        Ok(Self::default())
    }
}

/// Writes the numbers of an operation.
#[derive(Debug)]
pub struct Writer(Vec<ScalarIr>);

impl Writer {
    /// Writes a count, or an index.
    pub fn size(&mut self, number: usize) {
        self.0.push(ScalarIr::UInt(number as u64));
    }

    /// Writes a flag.
    pub fn flag(&mut self, flag: bool) {
        self.size(usize::from(flag));
    }

    /// Writes a real number.
    pub fn float(&mut self, number: f64) {
        self.0.push(ScalarIr::Float(number));
    }

    /// Writes the index of a value in a list that contains it. Such lists may only grow at their
    /// ends.
    pub fn one_of<T: PartialEq>(&mut self, list: &[T], value: &T) {
        self.size(list.iter().take_while(|other| *other != value).count());
    }
}

/// Reads the numbers of an operation, in order.
#[derive(Debug)]
pub struct Reader<'a> {
    scalars: &'a [ScalarIr],
    shapes: &'a [Shape],
    next: usize,
}

impl<'a> Reader<'a> {
    /// The shapes of the operation's tensors, which bound the values of its numbers.
    pub fn shapes(&self) -> &'a [Shape] {
        self.shapes
    }

    /// Reads a count of at most `most`.
    ///
    /// # Errors
    /// [`OpError::Wire`], as for each number.
    pub fn size(&mut self, what: &'static str, most: usize) -> Result<usize, OpError> {
        match self.take() {
            Some(ScalarIr::UInt(number)) if *number <= most as u64 => Ok(*number as usize),
            found => Err(wrong(what, format!("a number of at most {most}"), found)),
        }
    }

    /// Reads a flag.
    ///
    /// # Errors
    /// [`OpError::Wire`].
    pub fn flag(&mut self, what: &'static str) -> Result<bool, OpError> {
        Ok(self.size(what, 1)? == 1)
    }

    /// Reads a real number.
    ///
    /// # Errors
    /// [`OpError::Wire`].
    pub fn float(&mut self, what: &'static str) -> Result<f64, OpError> {
        match self.take() {
            Some(ScalarIr::Float(number)) => Ok(*number),
            found => Err(wrong(what, "a float".to_owned(), found)),
        }
    }

    /// Reads an element of a list by its index.
    ///
    /// # Errors
    /// [`OpError::Wire`].
    pub fn one_of<T: Copy>(&mut self, what: &'static str, list: &[T]) -> Result<T, OpError> {
        Ok(list[self.size(what, list.len() - 1)?])
    }

    fn take(&mut self) -> Option<&'a ScalarIr> {
        self.next += 1;
        self.scalars.get(self.next - 1)
    }
}

fn wrong(what: &'static str, expected: String, found: Option<&ScalarIr>) -> OpError {
    OpError::Wire {
        what,
        expected,
        found: match found {
            Some(ScalarIr::UInt(number)) => number.to_string(),
            Some(other) => format!("{other:?}"),
            None => "missing".to_owned(),
        },
    }
}

/// Encodes an operation as its version followed by its numbers.
pub fn encode<O: WireOp>(op: &O) -> Vec<ScalarIr> {
    let mut numbers = Writer(vec![ScalarIr::UInt(O::VERSION)]);
    op.write(&mut numbers);
    numbers.0
}

/// Decodes an operation received with tensors of these shapes; the inverse of [`encode`].
///
/// # Errors
/// [`OpError::Wire`] if the version or the count of numbers differs; those of [`WireOp::read`].
pub fn decode<O: WireOp>(scalars: &[ScalarIr], shapes: &[Shape]) -> Result<O, O::Error> {
    // The version is checked first: other versions may interpret the numbers differently.
    match scalars.first() {
        Some(ScalarIr::UInt(version)) if *version == O::VERSION => {}
        found => return Err(wrong("the version", O::VERSION.to_string(), found).into()),
    }
    let mut numbers = Reader {
        scalars,
        shapes,
        next: 1,
    };
    let op = O::read(&mut numbers)?;
    if scalars.len() > numbers.next {
        return Err(OpError::Wire {
            what: "the number of numbers",
            expected: numbers.next.to_string(),
            found: scalars.len().to_string(),
        }
        .into());
    }
    Ok(op)
}

/// Checks the shape, type and device of a tensor from a client: backends derive the number of
/// elements to read from the first tensors of an operation.
///
/// # Errors
/// [`OpError::Wire`]; those of [`expect`].
pub fn expect_shape<T: TensorMetadata>(
    what: &'static str,
    tensor: &T,
    (shape, dtype): (&[usize], DType),
    first: &T,
) -> Result<(), OpError> {
    expect(what, tensor, dtype, first)?;
    let found = tensor.shape();
    if found[..] == *shape {
        return Ok(());
    }
    Err(OpError::Wire {
        what,
        expected: format!("a tensor of shape {shape:?}"),
        found: format!("one of {:?}", &found[..]),
    })
}

/// Checks the dimensions of a tensor from a client, none of which may be 0.
///
/// # Errors
/// [`OpError::Wire`].
pub fn expect_rank<T: TensorMetadata>(
    what: &'static str,
    x: &T,
    rank: usize,
) -> Result<(), OpError> {
    let shape = x.shape();
    if shape.num_dims() == rank && !shape.contains(&0) {
        return Ok(());
    }
    Err(OpError::Wire {
        what,
        expected: format!("{rank} dimensions with elements"),
        found: format!("a tensor of shape {:?}", &shape[..]),
    })
}

/// Describes an output with the shape and type of a tensor.
pub fn like<T: TensorMetadata>(tensor: &T) -> (Shape, DType) {
    (tensor.shape(), tensor.dtype())
}

/// Sends an operation to the server of its tensors. Outputs are given by shape and type.
pub fn send<O: WireOp, const N: usize>(
    id: &'static str,
    op: &O,
    inputs: Vec<FloatTensor<Remote>>,
    outputs: [(Shape, DType); N],
) -> [FloatTensor<Remote>; N] {
    let sent = send_all(id, op, inputs, outputs.into());
    let count = sent.len();
    sent.try_into()
        .unwrap_or_else(|_| panic!("{id} has {N} outputs, the client registered {count}"))
}

/// As [`send`], of a number of outputs known only at run time.
pub fn send_all<O: WireOp>(
    id: &'static str,
    op: &O,
    inputs: Vec<FloatTensor<Remote>>,
    outputs: Vec<(Shape, DType)>,
) -> Vec<FloatTensor<Remote>> {
    let client = CustomOpClient::new(&inputs[0].device());
    let outputs = outputs.into_iter();
    let outputs: Vec<TensorIr> = outputs
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let inputs: Vec<TensorIr> = inputs.into_iter().map(|tensor| tensor.into_ir()).collect();
    client.register(CustomOpIr::with_scalars(id, &inputs, &outputs, encode(op)))
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn::backend::tensor::IntTensor;
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// The tensors of an operation: an array, an array and one that may be absent, or any number.
    pub trait Operands<T>: Sized {
        /// Splits the list of an operation's tensors.
        ///
        /// # Errors
        /// [`OpError::Wire`] if the number of tensors is wrong.
        fn divide(tensors: Vec<T>) -> Result<Self, OpError>;
    }

    impl<T, const N: usize> Operands<T> for [T; N] {
        fn divide(tensors: Vec<T>) -> Result<Self, OpError> {
            tensors.try_into().map_err(|tensors: Vec<T>| OpError::Wire {
                what: "the number of tensors",
                expected: N.to_string(),
                found: tensors.len().to_string(),
            })
        }
    }

    impl<T> Operands<T> for Vec<T> {
        fn divide(tensors: Vec<T>) -> Result<Self, OpError> {
            Ok(tensors)
        }
    }

    impl<T, const N: usize> Operands<T> for ([T; N], Option<T>) {
        fn divide(mut tensors: Vec<T>) -> Result<Self, OpError> {
            let last = if tensors.len() > N {
                tensors.pop()
            } else {
                None
            };
            Ok((Operands::divide(tensors)?, last))
        }
    }

    /// Registers an operation with a server. `check` validates it against its tensors before `run`
    /// computes the outputs.
    ///
    /// An operation that the server cannot read, or that fails its check, ends the client's
    /// session, like other failures in burn-remote. The server logs the reason, and the client's
    /// next read is an error.
    pub fn handle<B, O, I, R>(
        operations: &mut CustomOpRegistry<B>,
        id: &'static str,
        check: impl Fn(&O, &I) -> Result<(), O::Error> + Send + Sync + 'static,
        run: impl Fn(O, I) -> R + Send + Sync + 'static,
    ) where
        B: BackendIr,
        O: WireOp,
        I: Operands<FloatTensor<B>>,
        R: IntoIterator<Item = FloatTensor<B>>,
    {
        register(
            operations,
            id,
            move |op: &O, (floats, _): &(I, [IntTensor<B>; 0])| check(op, floats),
            move |op, (floats, _)| run(op, floats),
        );
    }

    /// As [`handle`], for an operation whose last tensor has indices in i32.
    pub fn handle_with_indices<B, O, I, R>(
        operations: &mut CustomOpRegistry<B>,
        id: &'static str,
        check: impl Fn(&O, &I, &IntTensor<B>) -> Result<(), O::Error> + Send + Sync + 'static,
        run: impl Fn(O, I, IntTensor<B>) -> R + Send + Sync + 'static,
    ) where
        B: BackendIr,
        O: WireOp,
        I: Operands<FloatTensor<B>>,
        R: IntoIterator<Item = FloatTensor<B>>,
    {
        register(
            operations,
            id,
            move |op: &O, (floats, [indices]): &(I, [IntTensor<B>; 1])| check(op, floats, indices),
            move |op, (floats, [indices])| run(op, floats, indices),
        );
    }

    /// The tensors of an operation, and those of indices after them.
    type Given<B, I, const N: usize> = (I, [IntTensor<B>; N]);

    /// As [`handle`], of operations with `N` tensors of indices.
    fn register<B, O, I, R, const N: usize>(
        operations: &mut CustomOpRegistry<B>,
        id: &'static str,
        check: impl Fn(&O, &Given<B, I, N>) -> Result<(), O::Error> + Send + Sync + 'static,
        run: impl Fn(O, Given<B, I, N>) -> R + Send + Sync + 'static,
    ) where
        B: BackendIr,
        O: WireOp,
        I: Operands<FloatTensor<B>>,
        R: IntoIterator<Item = FloatTensor<B>>,
    {
        operations.register(id, move |handles, ir, _| {
            let mut read = || -> Result<(O, Given<B, I, N>), O::Error> {
                let count = ir.inputs.len();
                let (floats, indices) = ir.inputs.split_at(count.saturating_sub(N));
                let of_floats = floats.iter().map(|x| (x, x.dtype.is_float(), "a float"));
                let of_indices = indices.iter().map(|x| (x, x.dtype == DType::I32, "I32"));
                for (tensor, fits, expected) in of_floats.chain(of_indices) {
                    if !fits {
                        return Err(OpError::Wire {
                            what: "the type of a tensor",
                            expected: expected.to_owned(),
                            found: format!("{:?}", tensor.dtype),
                        }
                        .into());
                    }
                }
                let floats = floats.iter().map(|x| handles.get_float_tensor::<B>(x));
                let floats: Vec<_> = floats.collect();
                let indices = indices.iter().map(|x| handles.get_int_tensor::<B>(x));
                let indices = <[_; N]>::divide(indices.collect())?;
                let shapes: Vec<Shape> = floats.iter().map(TensorMetadata::shape).collect();
                let operands = (I::divide(floats)?, indices);
                let op = decode::<O>(&ir.scalars, &shapes)?;
                check(&op, &operands)?;
                Ok((op, operands))
            };
            let (op, operands) = read().unwrap_or_else(|error| panic!("{id}: {error}"));
            for (output, tensor) in ir.outputs.iter().zip(run(op, operands)) {
                handles.register_float_tensor::<B>(&output.id, tensor);
            }
        });
    }
}

#[cfg(feature = "remote-server")]
pub use server::{Operands, handle, handle_with_indices};

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Sample {
        size: usize,
        letter: char,
        scale: f64,
    }

    impl WireOp for Sample {
        const VERSION: u64 = 7;
        type Error = OpError;

        fn write(&self, numbers: &mut Writer) {
            numbers.size(self.size);
            numbers.one_of(&['a', 'b', 'c'], &self.letter);
            numbers.float(self.scale);
        }

        fn read(numbers: &mut Reader<'_>) -> Result<Self, OpError> {
            let most = numbers.shapes()[0][0];
            Ok(Self {
                size: numbers.size("the size", most)?,
                letter: numbers.one_of("the letter", &['a', 'b', 'c'])?,
                scale: numbers.float("the scale")?,
            })
        }
    }

    #[test]
    fn numbers_come_back_and_foreign_ones_are_refused_by_name() {
        let sample = Sample {
            size: 5,
            letter: 'b',
            scale: 0.5,
        };
        let (numbers, shapes) = (encode(&sample), [Shape::new([5])]);
        let read = |numbers: &[ScalarIr]| decode::<Sample>(numbers, &shapes);
        assert_eq!(read(&numbers), Ok(sample));
        let longer = [&numbers[..], &numbers[..1]].concat();
        for (other, error) in [
            (&numbers[..0], "the version is missing, expected 7"),
            (&numbers[..3], "the scale is missing, expected a float"),
            (&longer, "the number of numbers is 5, expected 4"),
        ] {
            let found = read(other).expect_err(error).to_string();
            assert!(found.contains(error), "{found}");
        }
        for (index, number, error) in [
            (0, ScalarIr::UInt(6), "the version is 6, expected 7"),
            (0, ScalarIr::Int(7), "the version is Int(7)"),
            (
                1,
                ScalarIr::UInt(6),
                "the size is 6, expected a number of at most 5",
            ),
            (2, ScalarIr::UInt(3), "the letter is 3"),
            (3, ScalarIr::UInt(0), "the scale is 0, expected a float"),
        ] {
            let mut other = numbers.clone();
            other[index] = number;
            let found = read(&other).expect_err(error).to_string();
            assert!(found.contains(error), "{found}");
        }
    }
}
