//! Tensor descriptors: a view of device memory with a type.

use std::sync::Arc;

use half::{bf16, f16};

use crate::abi::sys::Engine;
use crate::codes::{ACLNN_PARAM_INVALID, Failure, Outcome};
use crate::state::sim;
use crate::stream::TaskContext;

/// Element types by their documented values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataType {
    Float = 0,
    Float16 = 1,
    Int8 = 2,
    Int32 = 3,
    Uint8 = 4,
    Int16 = 6,
    Uint16 = 7,
    Uint32 = 8,
    Int64 = 9,
    Uint64 = 10,
    Double = 11,
    Bool = 12,
    Bf16 = 27,
}

impl DataType {
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        use DataType::*;
        [
            Float, Float16, Int8, Int32, Uint8, Int16, Uint16, Uint32, Int64, Uint64, Double, Bool,
            Bf16,
        ]
        .into_iter()
        .find(|t| *t as i32 == code)
    }

    pub(crate) fn bytes(self) -> u64 {
        use DataType::*;
        match self {
            Int8 | Uint8 | Bool => 1,
            Float16 | Bf16 | Int16 | Uint16 => 2,
            Float | Int32 | Uint32 => 4,
            Int64 | Uint64 | Double => 8,
        }
    }

    pub(crate) fn is_rotary(self) -> bool {
        matches!(self, Self::Float | Self::Float16 | Self::Bf16)
    }
}

/// A view: dimensions and strides in elements from an offset in elements.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: i64,
    pub(crate) dtype: DataType,
    pub(crate) data: u64,
}

impl Tensor {
    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims
            .iter()
            .zip(&self.strides)
            .rev()
            .all(|(dim, stride)| {
                let fits = *dim == 1 || *stride == expected;
                expected *= *dim as i64;
                fits
            })
    }

    /// The same memory read as if it were contiguous: what an operator does that ignores strides.
    pub(crate) fn ignoring_strides(&self) -> Self {
        let mut strides = vec![1; self.dims.len()];
        for axis in (1..self.dims.len()).rev() {
            strides[axis - 1] = strides[axis] * self.dims[axis] as i64;
        }
        Self {
            strides,
            ..self.clone()
        }
    }

    /// Element offsets of all elements, the last axis fastest.
    fn offsets(&self) -> Vec<i64> {
        let mut offsets = vec![self.offset];
        for (dim, stride) in self.dims.iter().zip(&self.strides) {
            offsets = offsets
                .into_iter()
                .flat_map(|start| (0..*dim as i64).map(move |i| start + i * stride))
                .collect();
        }
        offsets
    }

    /// The bytes that the view spans, and where each element lies in them.
    fn load(
        &self,
        engine: &Engine<'_>,
        context: &TaskContext,
        write: bool,
        what: &str,
    ) -> Outcome<(u64, Vec<u8>, Vec<usize>)> {
        let offsets = self.offsets();
        let size = self.dtype.bytes();
        let (Some(low), Some(high)) = (offsets.iter().min(), offsets.iter().max()) else {
            return Ok((self.data, Vec::new(), Vec::new()));
        };
        if *low < 0 {
            return Err(Failure::new(
                ACLNN_PARAM_INVALID,
                format!(
                    "{what}: the view begins {} elements before its storage",
                    -low
                ),
            ));
        }
        let start = self.data + *low as u64 * size;
        let len = (high - low + 1) as u64 * size;
        let (bytes, offset) = {
            let mut state = sim();
            state.task_touch(start, len, write, context, what);
            let allocation = state.memory.find(start, len).map_err(|failure| {
                Failure::new(failure.code, format!("{what}: {}", failure.message))
            })?;
            (
                Arc::clone(&allocation.bytes),
                (start - allocation.start) as usize,
            )
        };
        let mut read = vec![0; len as usize];
        bytes.read(engine, offset, &mut read);
        let places = offsets
            .iter()
            .map(|offset| ((offset - low) as u64 * size) as usize)
            .collect();
        Ok((start, read, places))
    }

    /// All elements as f32, the last axis fastest.
    pub(crate) fn read(
        &self,
        engine: &Engine<'_>,
        context: &TaskContext,
        what: &str,
    ) -> Outcome<Vec<f32>> {
        let (_, bytes, places) = self.load(engine, context, false, what)?;
        let at = |place: usize| match self.dtype {
            DataType::Float16 => f16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32(),
            DataType::Bf16 => bf16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32(),
            _ => f32::from_le_bytes([
                bytes[place],
                bytes[place + 1],
                bytes[place + 2],
                bytes[place + 3],
            ]),
        };
        Ok(places.into_iter().map(at).collect())
    }

    /// All elements of an int64 tensor.
    pub(crate) fn read_i64(
        &self,
        engine: &Engine<'_>,
        context: &TaskContext,
        what: &str,
    ) -> Outcome<Vec<i64>> {
        let (_, bytes, places) = self.load(engine, context, false, what)?;
        let at = |place: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[place..place + 8]);
            i64::from_le_bytes(word)
        };
        Ok(places.into_iter().map(at).collect())
    }

    /// Writes all elements, rounded to the tensor's type; bytes between them stay as they are.
    pub(crate) fn write(
        &self,
        engine: &Engine<'_>,
        context: &TaskContext,
        values: &[f32],
        what: &str,
    ) -> Outcome {
        let (start, mut bytes, places) = self.load(engine, context, true, what)?;
        for (place, value) in places.into_iter().zip(values) {
            match self.dtype {
                DataType::Float16 => {
                    bytes[place..place + 2].copy_from_slice(&f16::from_f32(*value).to_le_bytes())
                }
                DataType::Bf16 => {
                    bytes[place..place + 2].copy_from_slice(&bf16::from_f32(*value).to_le_bytes())
                }
                _ => bytes[place..place + 4].copy_from_slice(&value.to_le_bytes()),
            }
        }
        let (target, offset) = {
            let state = sim();
            let allocation = state.memory.find(start, bytes.len() as u64)?;
            (
                Arc::clone(&allocation.bytes),
                (start - allocation.start) as usize,
            )
        };
        target.write(engine, offset, &bytes);
        Ok(())
    }
}
