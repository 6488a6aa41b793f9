//! Device memory as a running operator sees it.

use std::sync::Arc;

use super::call::{Operand, Slot};
use super::element::{Lane, Strided, dense_strides, gather, scatter};
use crate::abi::sys::{Engine, SharedBytes};
use crate::codes::{Failure, Outcome, RT_AICORE_EXCEPTION};
use crate::state::sim;
use crate::stream::TaskContext;
use crate::trace::Violation;

/// A part of a tensor: its own shape and strides, from an element of the tensor.
pub(crate) struct Part<'a> {
    pub(crate) dims: &'a [usize],
    pub(crate) strides: &'a [i64],
    pub(crate) start: i64,
}

/// The memory of an operator's tensors.
pub(crate) struct Data<'a, 'e> {
    engine: &'a mut Engine<'e>,
    context: &'a TaskContext,
    operator: &'static str,
    device: u32,
    slots: &'a [Slot],
}

impl<'a, 'e> Data<'a, 'e> {
    pub(crate) fn new(
        engine: &'a mut Engine<'e>,
        context: &'a TaskContext,
        operator: &'static str,
        device: u32,
        slots: &'a [Slot],
    ) -> Self {
        Self {
            engine,
            context,
            operator,
            device,
            slots,
        }
    }

    /// An exception of the device: reported, and the end of the stream.
    pub(crate) fn exception(&self, message: impl std::fmt::Display) -> Failure {
        let message = format!("{}: {message}", self.operator);
        sim().violate(Violation::host("operator", &message));
        Failure::new(RT_AICORE_EXCEPTION, message)
    }

    /// The allocation behind a part of a tensor, and where in it the part begins.
    fn locate(
        &self,
        of: &Operand,
        start: i64,
        at: &Strided,
        write: bool,
    ) -> Outcome<(Arc<SharedBytes>, usize, usize)> {
        let view = &self.slots[of.slot].view;
        let size = view.dtype.bytes();
        let address = view
            .address()
            .wrapping_add((start as u64).wrapping_mul(size));
        let len = (at.last() as u64 + 1) * size;
        let mut state = sim();
        let found = state
            .memory
            .find(address, len)
            .map_err(|failure| failure.message)
            .and_then(|allocation| {
                if allocation.device == self.device {
                    Ok((
                        Arc::clone(&allocation.bytes),
                        (address - allocation.start) as usize,
                        len as usize,
                    ))
                } else {
                    Err(format!(
                        "memory of device {}, the operator was planned on device {}",
                        allocation.device, self.device
                    ))
                }
            });
        if found.is_ok() {
            state.task_touch(address, len, write, self.context, self.operator);
        }
        drop(state);
        found.map_err(|message| self.exception(format!("{}: {message}", of.name)))
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
        self.read_part(of, &whole(of))
    }

    /// Writes all elements.
    pub(crate) fn write<L: Lane>(&mut self, of: &Operand, values: &[L]) -> Outcome {
        self.write_part(of, &whole(of), values)
    }

    /// All elements, spread over a shape that the tensor broadcasts to.
    pub(crate) fn read_as<L: Lane>(&self, of: &Operand, dims: &[usize]) -> Outcome<Vec<L>> {
        let strides = spread(&of.dims, &of.strides, dims);
        self.read_part(
            of,
            &Part {
                dims,
                strides: &strides,
                start: 0,
            },
        )
    }

    /// All elements with the axes in another order.
    pub(crate) fn read_order<L: Lane>(&self, of: &Operand, order: &[usize]) -> Outcome<Vec<L>> {
        let (dims, strides) = reordered(of, order);
        self.read_part(
            of,
            &Part {
                dims: &dims,
                strides: &strides,
                start: 0,
            },
        )
    }

    /// Writes all elements, given with the axes in another order.
    pub(crate) fn write_order<L: Lane>(
        &mut self,
        of: &Operand,
        order: &[usize],
        values: &[L],
    ) -> Outcome {
        let (dims, strides) = reordered(of, order);
        self.write_part(
            of,
            &Part {
                dims: &dims,
                strides: &strides,
                start: 0,
            },
            values,
        )
    }

    /// The elements as if the view were dense: what an operator does that ignores strides.
    pub(crate) fn read_ignoring_strides<L: Lane>(&self, of: &Operand) -> Outcome<Vec<L>> {
        let strides = dense_strides(&of.dims);
        self.read_part(
            of,
            &Part {
                dims: &of.dims,
                strides: &strides,
                start: 0,
            },
        )
    }
}

fn whole(of: &Operand) -> Part<'_> {
    Part {
        dims: &of.dims,
        strides: &of.strides,
        start: 0,
    }
}

fn reordered(of: &Operand, order: &[usize]) -> (Vec<usize>, Vec<i64>) {
    order
        .iter()
        .map(|axis| (of.dims[*axis], of.strides[*axis]))
        .unzip()
}

/// Strides that step through `dims`, to which a view of shape `from` broadcasts.
pub(crate) fn spread(from: &[usize], strides: &[i64], dims: &[usize]) -> Vec<i64> {
    let lead = dims.len() - from.len();
    (0..dims.len())
        .map(|axis| {
            if axis < lead || from[axis - lead] == 1 {
                0
            } else {
                strides[axis - lead]
            }
        })
        .collect()
}
