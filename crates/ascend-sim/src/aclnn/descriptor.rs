//! The parameters of operators: views of device memory, scalars, lists.

use std::sync::Arc;

use super::dtype::DataType;
use super::element::{Lane, Strided, dense_strides, gather, stored};
use super::executor::Executor;
use super::refuse;
use crate::codes::Outcome;
use crate::registry::{Kind, Registry};

/// Dimensions that a descriptor can hold.
const MAX_DIMS: usize = 25;

/// Neighbouring elements from which on the AI Core writes runs with any gaps between them.
const LONG_RUN: i64 = 32;

/// The format without a meaning of the axes.
const FORMAT_ND: i32 = 2;

/// A view: dimensions and strides in elements from an offset in elements.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: i64,
    pub(crate) dtype: DataType,
    pub(crate) data: u64,
}

/// The arguments of `aclCreateTensor`.
pub(crate) struct Description {
    pub(crate) dims: Vec<i64>,
    pub(crate) dtype: i32,
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) offset: i64,
    pub(crate) format: i32,
    pub(crate) storage: Vec<i64>,
    pub(crate) data: u64,
}

impl Tensor {
    /// A descriptor, if it describes a view inside its storage.
    pub(crate) fn new(given: Description) -> Outcome<Self> {
        let dtype = data_type(given.dtype)?;
        let (format, rank) = (given.format, given.dims.len());
        if format != FORMAT_ND {
            return refuse(format!(
                "format {format}: only ND ({FORMAT_ND}) is modelled; \
                 offset comes before format in the parameters"
            ));
        }
        if rank > MAX_DIMS {
            return refuse(format!("{rank} axes, a descriptor holds {MAX_DIMS}"));
        }
        let dims = given
            .dims
            .iter()
            .map(|dim| {
                usize::try_from(*dim).or_else(|_| refuse(format!("dimension {dim} is negative")))
            })
            .collect::<Outcome<Vec<_>>>()?;
        let strides = given.strides.unwrap_or_else(|| dense_strides(&dims));
        if let Some(stride) = strides.iter().find(|stride| **stride < 0) {
            return refuse(format!("stride {stride} is negative"));
        }
        let view = Self {
            dims,
            strides,
            offset: given.offset,
            dtype,
            data: given.data,
        };
        let elements: i64 = given.storage.iter().product();
        if let Some(at) = Strided::new(&view.dims, &view.strides) {
            let last = view.offset + at.last() as i64;
            if view.offset < 0 || last >= elements {
                return refuse(format!(
                    "the view reaches element {last} (offset {}) of a storage of {elements}",
                    view.offset
                ));
            }
        }
        Ok(view)
    }

    pub(crate) fn rank(&self) -> usize {
        self.dims.len()
    }

    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.is_empty()
            || self
                .dims
                .iter()
                .zip(self.strides.iter().zip(dense_strides(&self.dims)))
                .all(|(dim, (stride, dense))| *dim == 1 || *stride == dense)
    }

    /// True if the last two axes are a dense matrix stored transposed, or the whole is dense.
    pub(crate) fn is_matrix(&self) -> bool {
        let rank = self.rank();
        if rank < 2 || self.is_contiguous() {
            return self.is_contiguous();
        }
        let mut transposed = self.clone();
        transposed.dims.swap(rank - 2, rank - 1);
        transposed.strides.swap(rank - 2, rank - 1);
        transposed.is_contiguous()
    }

    /// True if the elements fill their span, in whichever order of the axes.
    pub(crate) fn is_dense(&self) -> bool {
        let axes = self.dims.iter().zip(&self.strides);
        let mut axes: Vec<_> = axes.filter(|(dim, _)| **dim != 1).collect();
        axes.sort_by_key(|(_, stride)| **stride);
        let mut span = 1;
        axes.into_iter().all(|(dim, stride)| {
            let fits = *stride == span;
            span *= *dim as i64;
            fits
        })
    }

    /// True if the AI Core's kernel writes a view with these strides, which are not dense; the AI
    /// CPU's writes the others.
    pub(crate) fn is_written_by_ai_core(&self) -> bool {
        // Axes that one stride steps through count as one, of a length and a stride.
        let (mut axes, mut length, mut step, mut innermost) = (1, 1, 1, 0);
        for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
            if *stride == step * length {
                length *= *dim as i64;
                continue;
            }
            if axes == 1 {
                innermost = length;
            }
            if *stride < innermost {
                return false;
            }
            axes += 1;
            (length, step) = (*dim as i64, *stride);
        }
        if (3..=4).contains(&axes) && innermost >= LONG_RUN {
            return true;
        }
        // Else the gaps of the axes outside of the innermost one with a gap have to be its alone.
        let dense = dense_strides(&self.dims);
        let gaps = self
            .strides
            .iter()
            .zip(&dense)
            .map(|(stride, dense)| stride - dense);
        let mut outward = gaps.zip(&self.dims).rev().skip_while(|(gap, _)| *gap == 0);
        let Some((mut gap, mut dim)) = outward.next() else {
            return true;
        };
        outward.all(|(outer, length)| {
            gap *= *dim as i64;
            dim = length;
            outer == gap
        })
    }

    /// The address of the first element.
    pub(crate) fn address(&self) -> u64 {
        self.data
            .wrapping_add((self.offset as u64).wrapping_mul(self.dtype.bytes()))
    }

    /// An axis that may be counted from the end.
    pub(crate) fn axis(&self, axis: i64, name: &str) -> Outcome<usize> {
        let rank = self.rank().max(1) as i64;
        if !(-rank..rank).contains(&axis) {
            return refuse(format!(
                "{name} is {axis}, one of {}..{rank} is expected",
                -rank
            ));
        }
        Ok(axis.rem_euclid(rank) as usize)
    }

    /// Axes as a list that may count from the end; none stand for all. Sorted, each once.
    pub(crate) fn axes(&self, axes: &[i64], name: &str) -> Outcome<Vec<usize>> {
        if axes.is_empty() {
            return Ok((0..self.rank()).collect());
        }
        let mut found = axes
            .iter()
            .map(|axis| self.axis(*axis, name))
            .collect::<Outcome<Vec<_>>>()?;
        found.sort_unstable();
        if let Some(twice) = found.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!("{name} {axes:?} names axis {} twice", twice[0]));
        }
        // A tensor of rank 0 takes axis 0, which it does not have.
        found.retain(|axis| *axis < self.rank());
        Ok(found)
    }
}

/// An element type by its number.
pub(crate) fn data_type(code: i32) -> Outcome<DataType> {
    DataType::from_code(code).map_or_else(|| refuse(format!("data type {code} does not exist")), Ok)
}

/// A host scalar, kept as the number it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar {
    pub(crate) dtype: DataType,
    real: f64,
    integer: i64,
}

impl Scalar {
    pub(crate) fn new(dtype: DataType, bytes: &[u8]) -> Self {
        let one = Strided::new(&[], &[]);
        let one = one.as_ref();
        Self {
            dtype,
            real: one.map_or(0.0, |at| gather(bytes, dtype, at, 1)[0]),
            integer: one.map_or(0, |at| gather(bytes, dtype, at, 1)[0]),
        }
    }

    /// The number as an operator computes with it, which makes a tensor of the given type of it.
    pub(crate) fn lane<L: Lane>(&self, dtype: DataType) -> L {
        if self.dtype.is_float() {
            L::from_f64(stored(self.real, dtype))
        } else {
            stored(L::from_i64(self.integer), dtype)
        }
    }

    pub(crate) fn real(&self) -> f64 {
        if self.dtype.is_float() {
            self.real
        } else {
            self.integer as f64
        }
    }
}

impl std::fmt::Display for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.dtype.is_float() {
            self.real.fmt(f)
        } else {
            self.integer.fmt(f)
        }
    }
}

/// The live objects that operators are called with.
#[derive(Default)]
pub(crate) struct Descriptors {
    pub(crate) tensors: Registry<Arc<Tensor>>,
    pub(crate) ints: Registry<Vec<i64>>,
    pub(crate) scalars: Registry<Scalar>,
    pub(crate) lists: Registry<Vec<u64>>,
    pub(crate) executors: Registry<Executor>,
}

impl Descriptors {
    pub(crate) fn live(&self) -> usize {
        self.tensors.len()
            + self.ints.len()
            + self.scalars.len()
            + self.lists.len()
            + self.executors.len()
    }

    /// Refuses the handle of a descriptor that was destroyed.
    pub(crate) fn expect_alive(&self, handle: u64) -> Outcome {
        match Kind::of(handle) {
            Some(Kind::IntArray) => self.ints.get(handle).map(drop),
            Some(Kind::Scalar) => self.scalars.get(handle).map(drop),
            Some(Kind::TensorList) => self.lists.get(handle).map(drop),
            _ => self.tensors.get(handle).map(drop),
        }
    }
}
