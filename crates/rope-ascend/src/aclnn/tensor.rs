//! Tensor descriptors.

use super::call::meta;
use crate::error::{AscendError, Result};
use crate::result::recent_message;
use crate::safe::{DeviceBuffer, Element, Stream};
use crate::sys::{AclMeta, aclDataType, aclFormat, aclIntArray, aclTensor};
use half::{bf16, f16};
use std::ffi::c_void;

/// Element types that the rotary operators take.
pub trait OperatorElement: Element {
    /// The vendor's number of the type.
    const DATA_TYPE: aclDataType;
    /// Rounds a table value to the type.
    fn from_f32(value: f32) -> Self;
}

impl OperatorElement for f32 {
    const DATA_TYPE: aclDataType = aclDataType::FLOAT;
    fn from_f32(value: f32) -> Self {
        value
    }
}
impl OperatorElement for f16 {
    const DATA_TYPE: aclDataType = aclDataType::FLOAT16;
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}
impl OperatorElement for bf16 {
    const DATA_TYPE: aclDataType = aclDataType::BF16;
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// A view of a buffer, as the operators see it. Strides and offset count elements.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    pub(super) dims: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    pub(super) dtype: aclDataType,
    storage: i64,
    address: *mut c_void,
    pub(super) stream: &'a Stream,
}

impl<'a> Tensor<'a> {
    /// A contiguous tensor over a whole buffer.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the dimensions do not fill the buffer.
    pub fn new<T: OperatorElement>(buffer: &'a DeviceBuffer<T>, dims: &[u64]) -> Result<Self> {
        Self::typed(buffer, dims, T::DATA_TYPE)
    }

    pub(super) fn typed<T: Element>(
        buffer: &'a DeviceBuffer<T>,
        dims: &[u64],
        dtype: aclDataType,
    ) -> Result<Self> {
        let count = dims.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim));
        if dims.is_empty() || count != Some(buffer.len() as u64) {
            let expected = format!("dimensions of {} elements", buffer.len());
            return Err(AscendError::argument(
                "operator tensor",
                "dims",
                expected,
                format!("{dims:?}"),
            ));
        }
        let dims: Vec<i64> = dims.iter().map(|&dim| dim as i64).collect();
        let mut strides = vec![1; dims.len()];
        for axis in (0..dims.len() - 1).rev() {
            strides[axis] = strides[axis + 1] * dims[axis + 1];
        }
        Ok(Self {
            dims,
            strides,
            offset: 0,
            dtype,
            storage: buffer.len() as i64,
            address: buffer.pointer(),
            stream: buffer.stream(),
        })
    }

    /// The same elements with an axis of length 1 before the others.
    pub(super) fn batch_of_one(&self) -> Self {
        let mut batched = self.clone();
        batched.dims.insert(0, 1);
        batched.strides.insert(0, self.storage);
        batched
    }

    /// A tensor of this shape and type over other memory, which has as many bytes.
    pub(super) fn like<'b>(&self, memory: &'b DeviceBuffer<u8>) -> Tensor<'b> {
        Tensor {
            dims: self.dims.clone(),
            strides: self.strides.clone(),
            address: memory.pointer(),
            stream: memory.stream(),
            ..*self
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.storage as usize
    }

    pub(super) fn dim(&self, axis: usize) -> i64 {
        self.dims.get(axis).copied().unwrap_or(0)
    }

    pub(super) fn last_dim(&self) -> i64 {
        self.dims.last().copied().unwrap_or(0)
    }
}

/// A tensor that an operator writes.
#[derive(Debug)]
pub struct Output<'a>(pub(super) Tensor<'a>);

impl<'a> Output<'a> {
    /// A contiguous output over a whole buffer.
    ///
    /// # Errors
    /// As [`Tensor::new`].
    pub fn new<T: OperatorElement>(buffer: &'a mut DeviceBuffer<T>, dims: &[u64]) -> Result<Self> {
        Tensor::new(buffer, dims).map(Self)
    }
}

/// The error of a constructor that returned null.
fn refused(stream: &Stream, function: &'static str) -> AscendError {
    let code = crate::sys::code::OPERATOR_PARAM_INVALID;
    AscendError::Call {
        function,
        code,
        meaning: crate::sys::code::meaning(code),
        detail: recent_message(&stream.device().runtime().api().rt),
    }
}

/// A descriptor in the operator library.
#[derive(Debug)]
pub(super) struct Descriptor<'m> {
    pub(super) raw: *mut aclTensor,
    meta: &'m AclMeta,
}

impl<'m> Descriptor<'m> {
    /// Describes a tensor of `stream`.
    pub(super) fn new(stream: &'m Stream, tensor: &Tensor<'_>) -> Result<Self> {
        let meta = meta(stream)?;
        if !stream.is(tensor.stream) {
            return Err(AscendError::argument(
                "operator",
                "tensors",
                "all made by one stream",
                "another stream's",
            ));
        }
        let rank = tensor.dims.len() as u64;
        // SAFETY: dims and strides have `rank` entries and the storage one; the library copies
        // them. Offset precedes format. The device address is only recorded.
        let raw = unsafe {
            (meta.aclCreateTensor)(
                tensor.dims.as_ptr(),
                rank,
                tensor.dtype,
                tensor.strides.as_ptr(),
                tensor.offset,
                aclFormat::ND,
                &raw const tensor.storage,
                1,
                tensor.address,
            )
        };
        if raw.is_null() {
            return Err(refused(stream, "aclCreateTensor"));
        }
        Ok(Self { raw, meta })
    }
}

impl Drop for Descriptor<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this value and destroyed once. Only its address was handed to a
        // planned call, which has run or was given up. A failure here leaks a host object; there
        // is nothing to do about it.
        let _ = unsafe { (self.meta.aclDestroyTensor)(self.raw) };
    }
}

/// A list of integers in the operator library.
#[derive(Debug)]
pub(super) struct IntArray<'m> {
    pub(super) raw: *mut aclIntArray,
    meta: &'m AclMeta,
}

impl<'m> IntArray<'m> {
    pub(super) fn new(stream: &'m Stream, values: &[i64]) -> Result<Self> {
        let meta = meta(stream)?;
        // SAFETY: the list is as long as said; the library copies it.
        let raw = unsafe { (meta.aclCreateIntArray)(values.as_ptr(), values.len() as u64) };
        if raw.is_null() {
            return Err(refused(stream, "aclCreateIntArray"));
        }
        Ok(Self { raw, meta })
    }
}

impl Drop for IntArray<'_> {
    fn drop(&mut self) {
        // SAFETY: as for descriptors.
        let _ = unsafe { (self.meta.aclDestroyIntArray)(self.raw) };
    }
}
