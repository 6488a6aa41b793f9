//! Tensors: views of device memory.

use std::fmt;
use std::sync::Arc;

use burn::backend::{BoolStore, Bytes, DType, ExecutionError, Shape, TensorData, TensorMetadata};
use rope_ascend::safe::{DeviceBuffer, Stream};

use crate::context::Context;
use crate::error::execution;
use crate::npu::AscendDevice;

/// The block of memory that holds the elements, or the failure to compute them.
struct Storage {
    device: AscendDevice,
    content: Result<Memory, ExecutionError>,
}

struct Memory {
    // Declared before the context, which owns the stream to which the memory returns.
    buffer: DeviceBuffer<u8>,
    context: Arc<Context>,
}

/// A view of a block of device memory: shape, strides and offset in elements, and the element type.
///
/// Clones and views share the block, which returns to its stream's pool with the last of them.
/// Elements are defined once the stream has passed the work that writes them. The tensor of a
/// failed computation has a shape and a type, but no memory.
#[derive(Clone)]
pub struct AscendTensor {
    storage: Arc<Storage>,
    shape: Shape,
    strides: Vec<usize>,
    offset: usize,
    dtype: DType,
}

/// Strides of a dense tensor, last axis fastest.
pub(crate) fn dense_strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1_usize; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(dims[axis].max(1));
    }
    strides
}

/// Bytes of a dense tensor; `usize::MAX`, which no buffer has, beyond the address space.
pub(crate) fn dense_bytes(dims: &[usize], dtype: DType) -> usize {
    if dims.contains(&0) {
        return 0;
    }
    let bytes = dims
        .iter()
        .try_fold(dtype.size(), |bytes, dim| bytes.checked_mul(*dim));
    bytes.unwrap_or(usize::MAX)
}

impl AscendTensor {
    /// Creates a dense tensor with undefined elements.
    ///
    /// If the device cannot be opened or has no memory left, the tensor carries the failure.
    pub(crate) fn empty(device: &AscendDevice, shape: Shape, dtype: DType) -> Self {
        let bytes = dense_bytes(&shape, dtype);
        Self::allocated(device, shape, dtype, |stream| stream.alloc(bytes))
    }

    /// As [`empty`](Self::empty), on an open device.
    pub(crate) fn empty_in(context: &Arc<Context>, shape: Shape, dtype: DType) -> Self {
        let bytes = dense_bytes(&shape, dtype);
        Self::allocated_in(context, shape, dtype, |stream| stream.alloc(bytes))
    }

    /// Copies host data to the device, after the work queued before.
    pub(crate) fn upload(device: &AscendDevice, data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Self::allocated(device, shape, dtype, |stream| stream.upload_queued(&bytes))
    }

    /// A dense tensor over the buffer that `allocate` returns, or its failure.
    pub(crate) fn allocated(
        device: &AscendDevice,
        shape: Shape,
        dtype: DType,
        allocate: impl FnOnce(&Stream) -> rope_ascend::Result<DeviceBuffer<u8>>,
    ) -> Self {
        match device.context() {
            Ok(context) => Self::allocated_in(&context, shape, dtype, allocate),
            Err(error) => Self::failed(device, shape, dtype, execution(&error)),
        }
    }

    fn allocated_in(
        context: &Arc<Context>,
        shape: Shape,
        dtype: DType,
        allocate: impl FnOnce(&Stream) -> rope_ascend::Result<DeviceBuffer<u8>>,
    ) -> Self {
        match allocate(context.stream()) {
            Ok(buffer) => Self::dense(context.clone(), buffer, shape, dtype),
            Err(error) => {
                let error = execution(&error);
                context.failed(&error);
                Self::failed(&context.device(), shape, dtype, error)
            }
        }
    }

    /// A dense tensor over a whole buffer.
    pub(crate) fn dense(
        context: Arc<Context>,
        buffer: DeviceBuffer<u8>,
        shape: Shape,
        dtype: DType,
    ) -> Self {
        let device = context.device();
        Self::new(device, Ok(Memory { buffer, context }), shape, dtype)
    }

    /// The result of a computation that failed.
    pub(crate) fn failed(
        device: &AscendDevice,
        shape: Shape,
        dtype: DType,
        error: ExecutionError,
    ) -> Self {
        Self::new(*device, Err(error), shape, dtype)
    }

    fn new(
        device: AscendDevice,
        content: Result<Memory, ExecutionError>,
        shape: Shape,
        dtype: DType,
    ) -> Self {
        Self {
            strides: dense_strides(&shape),
            storage: Arc::new(Storage { device, content }),
            shape,
            offset: 0,
            dtype,
        }
    }

    /// Waits for the stream and copies the tensor's elements to the host as a dense tensor.
    ///
    /// # Errors
    /// The failure of the work that wrote the tensor, or of work queued before it.
    pub fn read(self) -> Result<TensorData, ExecutionError> {
        let dense = self.contiguous();
        let size = dense.dtype.size();
        let memory = match dense.memory() {
            Ok(memory) => memory,
            Err(error) => {
                if let Some(context) = dense.storage.device.opened() {
                    context.seen(&error);
                }
                return Err(error);
            }
        };
        let (first, bytes) = (dense.offset * size, dense.len() * size);
        let host = memory.context.read(&memory.buffer, first, bytes)?;
        Ok(TensorData::from_bytes(
            Bytes::from_bytes_vec(host),
            dense.shape.clone(),
            dense.dtype,
        ))
    }

    fn memory(&self) -> Result<&Memory, ExecutionError> {
        self.storage.content.as_ref().map_err(Clone::clone)
    }

    /// The failure of the tensor's computation, if any.
    pub(crate) fn failure(&self) -> Option<&ExecutionError> {
        self.storage.content.as_ref().err()
    }

    /// The tensor's open device.
    pub(crate) fn context(&self) -> Result<&Arc<Context>, ExecutionError> {
        self.memory().map(|memory| &memory.context)
    }

    /// The block of memory behind the view.
    ///
    /// # Errors
    /// The failure that the tensor carries.
    pub(crate) fn buffer(&self) -> Result<&DeviceBuffer<u8>, ExecutionError> {
        self.memory().map(|memory| &memory.buffer)
    }

    /// Device address of the first element.
    ///
    /// # Errors
    /// The failure that the tensor carries.
    pub fn address(&self) -> Result<u64, ExecutionError> {
        let buffer = self.buffer()?;
        Ok(buffer.pointer() as u64 + (self.offset * self.dtype.size()) as u64)
    }

    /// Elements along each axis.
    pub fn dims(&self) -> &[usize] {
        &self.shape
    }

    /// Step along each axis, in elements. A step of 0 repeats one element.
    pub(crate) fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Offset of the first element in the block.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.num_elements()
    }

    /// True if there are no elements.
    pub(crate) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// True if a result may take the place of this tensor: nothing else holds the block, and the
    /// result would keep at most an eighth of it unused.
    pub(crate) fn is_unique(&self) -> bool {
        let own = self.len() * self.dtype.size();
        let fills = |memory: &Memory| own + own / 7 >= memory.buffer.bytes();
        Arc::strong_count(&self.storage) == 1 && self.memory().is_ok_and(fills)
    }

    /// The block, to be overwritten.
    ///
    /// # Errors
    /// The failure that the tensor carries; an error if others hold the block.
    pub(crate) fn buffer_mut(&mut self) -> Result<&mut DeviceBuffer<u8>, ExecutionError> {
        let storage = Arc::get_mut(&mut self.storage)
            .ok_or_else(|| ExecutionError::with_context("a shared block cannot be overwritten"))?;
        match &mut storage.content {
            Ok(memory) => Ok(&mut memory.buffer),
            Err(error) => Err(error.clone()),
        }
    }

    /// True if the elements are dense, last axis fastest.
    pub(crate) fn is_contiguous(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let dense = dense_strides(&self.shape);
        self.shape
            .iter()
            .zip(self.strides.iter().zip(&dense))
            .all(|(&dim, (stride, dense))| dim == 1 || stride == dense)
    }

    /// The same elements, densely: itself, or a copy on the device.
    pub(crate) fn contiguous(self) -> Self {
        if self.is_contiguous() || self.failure().is_some() {
            return self;
        }
        crate::ops::movement::copy(&self)
    }

    /// The same elements on `device`: itself, or a copy through the host.
    pub(crate) fn moved(self, device: &AscendDevice) -> Self {
        if self.storage.device == *device {
            return self;
        }
        let (shape, dtype) = (self.shape.clone(), self.dtype);
        match self.read() {
            Ok(data) => Self::upload(device, data),
            Err(error) => Self::failed(device, shape, dtype, error),
        }
    }

    /// Another view of the same block.
    pub(crate) fn view(&self, shape: Shape, strides: Vec<usize>, offset: usize) -> Self {
        Self {
            storage: self.storage.clone(),
            shape,
            strides,
            offset,
            dtype: self.dtype,
        }
    }

    /// The same block under another name of its element type, of the same size.
    pub(crate) fn reinterpret(mut self, dtype: DType) -> Self {
        debug_assert_eq!(self.dtype.size(), dtype.size());
        self.dtype = dtype;
        self
    }

    /// The same block in elements of half the size: the two halves of each element are a new last
    /// axis, the lower one first.
    pub(crate) fn split(&self, dtype: DType) -> Self {
        debug_assert_eq!(self.dtype.size(), 2 * dtype.size());
        let strides = self.strides.iter().map(|stride| 2 * stride);
        Self {
            storage: self.storage.clone(),
            shape: Shape::from([self.dims(), &[2]].concat()),
            strides: strides.chain([1]).collect(),
            offset: 2 * self.offset,
            dtype,
        }
    }
}

impl fmt::Debug for AscendTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AscendTensor")
            .field("device", &self.storage.device)
            .field("shape", &self.shape)
            .field("strides", &self.strides)
            .field("offset", &self.offset)
            .field("dtype", &self.dtype)
            .field("failure", &self.failure())
            .finish()
    }
}

impl TensorMetadata for AscendTensor {
    type Device = AscendDevice;

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }

    fn rank(&self) -> usize {
        self.shape.num_dims()
    }

    fn device(&self) -> AscendDevice {
        self.storage.device
    }

    fn can_mut(&self) -> bool {
        self.is_unique()
    }
}

/// True if the type is a boolean of one byte.
pub(crate) fn is_byte_bool(dtype: DType) -> bool {
    matches!(dtype, DType::Bool(BoolStore::Native | BoolStore::U8))
}
