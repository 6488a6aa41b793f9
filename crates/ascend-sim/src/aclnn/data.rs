//! Device memory as a running operator sees it.

use std::sync::Arc;

use super::call::Operand;
use super::dtype::DataType;
use super::element::{Lane, Strided, dense_strides, gather, scatter, stored};
use super::executor::Launch;
use crate::abi::sys::{Engine, SharedBytes};
use crate::codes::{Failure, Outcome, RT_AICORE_EXCEPTION};
use crate::state::sim;
use crate::stream::TaskContext;
use crate::trace::Violation;

/// A part of a tensor: its own shape and strides, from an element of the tensor.
pub(crate) struct Part<'a> {
    dims: &'a [usize],
    strides: &'a [i64],
    start: i64,
}

impl<'a> Part<'a> {
    pub(crate) fn new(dims: &'a [usize], strides: &'a [i64], start: i64) -> Self {
        Self {
            dims,
            strides,
            start,
        }
    }
}

/// The memory of an operator's tensors.
pub(crate) struct Data<'a, 'e> {
    engine: &'a mut Engine<'e>,
    context: &'a TaskContext,
    launch: &'a Launch,
}

impl<'a, 'e> Data<'a, 'e> {
    pub(crate) fn new(
        engine: &'a mut Engine<'e>,
        context: &'a TaskContext,
        launch: &'a Launch,
    ) -> Self {
        Self {
            engine,
            context,
            launch,
        }
    }

    /// Reports an exception of the device, which ends the stream.
    pub(crate) fn exception(&self, message: impl std::fmt::Display) -> Failure {
        let message = format!("{}: {message}", self.launch.operator);
        sim().violate(Violation::host("operator", &message));
        Failure::new(RT_AICORE_EXCEPTION, message)
    }

    /// The bytes that hold a part of a tensor: allocation, offset in it, length.
    fn locate(
        &self,
        of: &Operand,
        start: i64,
        at: &Strided,
        write: bool,
    ) -> Outcome<(Arc<SharedBytes>, usize, usize)> {
        let view = &self.launch.slots[of.slot].view;
        let size = view.dtype.bytes();
        let offset_bytes = (start as u64).wrapping_mul(size);
        let address = view.address().wrapping_add(offset_bytes);
        let len = (at.last() as u64 + 1) * size;
        let planned = self.launch.device;
        let mut state = sim();
        let found = match state.memory.find(address, len) {
            Err(failure) => Err(failure.message),
            Ok(allocation) if allocation.device != planned => Err(format!(
                "memory of device {}, the operator was planned on device {planned}",
                allocation.device
            )),
            Ok(allocation) => Ok((allocation.share(), (address - allocation.start) as usize)),
        };
        if found.is_ok() {
            state.task_touch(address, len, write, self.context, self.launch.operator);
        }
        drop(state);
        let (bytes, offset) =
            found.map_err(|message| self.exception(format!("{}: {message}", of.name)))?;
        Ok((bytes, offset, len as usize))
    }

    /// The elements of a part, in its order.
    pub(crate) fn read_part<L: Lane>(&self, of: &Operand, part: &Part<'_>) -> Outcome<Vec<L>> {
        let Some(at) = Strided::new(part.dims, part.strides) else {
            return Ok(Vec::new());
        };
        let (bytes, offset, len) = self.locate(of, part.start, &at, false)?;
        let bytes = bytes.slice(self.engine, offset, len);
        let count = part.dims.iter().product();
        Ok(gather(bytes, of.dtype, &at, count))
    }

    /// Writes the elements of a part, each rounded to the tensor's type once.
    pub(crate) fn write_part<L: Lane>(
        &mut self,
        of: &Operand,
        part: &Part<'_>,
        values: &[L],
    ) -> Outcome {
        let Some(at) = Strided::new(part.dims, part.strides) else {
            return Ok(());
        };
        let (bytes, offset, len) = self.locate(of, part.start, &at, true)?;
        let bytes = bytes.slice_mut(self.engine, offset, len);
        scatter(bytes, of.dtype, &at, values);
        Ok(())
    }

    /// All elements, the last axis fastest.
    pub(crate) fn read<L: Lane>(&self, of: &Operand) -> Outcome<Vec<L>> {
        self.read_part(of, &Part::new(&of.dims, &of.strides, 0))
    }

    /// Writes all elements.
    pub(crate) fn write<L: Lane>(&mut self, of: &Operand, values: &[L]) -> Outcome {
        self.write_part(of, &Part::new(&of.dims, &of.strides, 0), values)
    }

    /// All elements, spread over a shape that the tensor broadcasts to.
    pub(crate) fn read_as<L: Lane>(&self, of: &Operand, dims: &[usize]) -> Outcome<Vec<L>> {
        let lead = dims.len() - of.rank();
        let stride = |axis: usize| match axis.checked_sub(lead) {
            Some(own) if of.dims[own] != 1 => of.strides[own],
            _ => 0,
        };
        let strides: Vec<i64> = (0..dims.len()).map(stride).collect();
        self.read_part(of, &Part::new(dims, &strides, 0))
    }

    /// As [`read_as`](Self::read_as), converted to the type that an operator computes in.
    pub(crate) fn read_cast<L: Lane>(
        &self,
        of: &Operand,
        dims: &[usize],
        computed: DataType,
    ) -> Outcome<Vec<L>> {
        Ok(cast(self.read_as(of, dims)?, of.dtype, computed))
    }

    /// Writes results that were computed in a type.
    pub(crate) fn write_cast<L: Lane>(
        &mut self,
        of: &Operand,
        values: Vec<L>,
        computed: DataType,
    ) -> Outcome {
        self.write(of, &cast(values, of.dtype, computed))
    }

    /// All elements with the axes in another order.
    pub(crate) fn read_order<L: Lane>(&self, of: &Operand, order: &[usize]) -> Outcome<Vec<L>> {
        let (dims, strides) = reordered(of, order);
        self.read_part(of, &Part::new(&dims, &strides, 0))
    }

    /// Writes all elements, given with the axes in another order.
    pub(crate) fn write_order<L: Lane>(
        &mut self,
        of: &Operand,
        order: &[usize],
        values: &[L],
    ) -> Outcome {
        let (dims, strides) = reordered(of, order);
        self.write_part(of, &Part::new(&dims, &strides, 0), values)
    }

    /// The elements as if the view were dense: what an operator does that ignores strides.
    pub(crate) fn read_ignoring_strides<L: Lane>(&self, of: &Operand) -> Outcome<Vec<L>> {
        self.read_part(of, &Part::new(&of.dims, &dense_strides(&of.dims), 0))
    }
}

/// Stores numbers of one type as another, if that can change them.
pub(crate) fn cast<L: Lane>(mut values: Vec<L>, from: DataType, to: DataType) -> Vec<L> {
    if from != to && !matches!(to, DataType::Float | DataType::Double | DataType::Int64) {
        values.iter_mut().for_each(|x| *x = stored(*x, to));
    }
    values
}

fn reordered(of: &Operand, order: &[usize]) -> (Vec<usize>, Vec<i64>) {
    order
        .iter()
        .map(|axis| (of.dims[*axis], of.strides[*axis]))
        .unzip()
}
