//! Transfers tensors of any size to and from a device, in chunks.

use std::fmt;
use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::error::{Result, VlmError};

/// Bytes of a chunk: large relative to the overhead of a message, and far below the 1 GiB at which
/// burn-remote rejects a message. A client holds up to seven copies of a chunk in transit.
const PIECE_BYTES: usize = 64 << 20;

/// The progress of a checkpoint's transfer.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor in transfer, by its name in the checkpoint.
    pub tensor: &'a str,
    /// Bytes transferred so far.
    pub bytes: u64,
    /// Bytes of the checkpoint.
    pub total: u64,
}

/// The transfer of a checkpoint to or from a device, in chunks, so that neither host memory nor a
/// connection's message limit bounds the size of a tensor.
///
/// # Examples
/// ```no_run
/// use burn::tensor::Device;
/// use vlm_models::{VlmConfig, Transfer};
///
/// let config = VlmConfig::from_folder("Qwen3-VL-8B-Instruct")?;
/// let transfer = Transfer::default().on_progress(|progress| {
///     eprintln!("{} of {} bytes, {}", progress.bytes, progress.total, progress.tensor);
/// });
/// let model = config.load_with("Qwen3-VL-8B-Instruct", &Device::flex(), transfer)?;
/// # Ok::<(), vlm_models::VlmError>(())
/// ```
pub struct Transfer<'a> {
    bytes: usize,
    report: Box<dyn FnMut(Progress<'_>) + 'a>,
    moved: u64,
    total: u64,
    /// Bytes sent since the device's last confirmation.
    unconfirmed: usize,
}

impl Default for Transfer<'_> {
    /// Transfers chunks of 64 MiB, without a report.
    fn default() -> Self {
        Self {
            bytes: PIECE_BYTES,
            report: Box::new(|_| {}),
            moved: 0,
            total: 0,
            unconfirmed: 0,
        }
    }
}

impl fmt::Debug for Transfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bytes,
            moved,
            total,
            ..
        } = self;
        write!(
            f,
            "Transfer {{ bytes: {bytes}, moved: {moved} of {total} }}"
        )
    }
}

impl<'a> Transfer<'a> {
    /// Sets the chunk size to `bytes`, or to one row of a matrix stored transposed if that is
    /// longer.
    #[must_use]
    pub fn piece_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// Calls `report` after each chunk.
    #[must_use]
    pub fn on_progress(mut self, report: impl FnMut(Progress<'_>) + 'a) -> Self {
        self.report = Box::new(report);
        self
    }

    pub(crate) fn begin(&mut self, total: u64) {
        (self.moved, self.total) = (0, total);
    }

    /// The element ranges of a tensor's chunks, in order, in whole units of `unit` elements.
    fn ranges(&self, elements: usize, unit: usize, dtype: DType) -> Vec<Range<usize>> {
        let unit = unit.max(1);
        let step = (self.bytes / dtype.size() / unit).max(1) * unit;
        let starts = (0..elements).step_by(step);
        starts
            .map(|start| start..(start + step).min(elements))
            .collect()
    }

    fn done(&mut self, tensor: &str, bytes: usize) {
        self.moved += bytes as u64;
        (self.report)(Progress {
            tensor,
            bytes: self.moved,
            total: self.total,
        });
    }

    fn lost(&self, tensor: &str, reason: impl ToString) -> VlmError {
        VlmError::Transfer {
            tensor: tensor.to_owned(),
            moved: self.moved,
            total: self.total,
            reason: reason.to_string(),
        }
    }

    /// Waits until the device has received all chunks sent.
    ///
    /// # Errors
    /// [`VlmError::Transfer`]
    pub(crate) fn confirm(&mut self, tensor: &str, device: &Device) -> Result<()> {
        self.unconfirmed = 0;
        device.sync().map_err(|error| self.lost(tensor, error))
    }

    /// Sends a chunk, once the device has the previous ones.
    fn send(
        &mut self,
        tensor: &str,
        data: TensorData,
        (device, dtype): (&Device, DType),
    ) -> Result<Tensor<1>> {
        if self.unconfirmed >= self.bytes {
            self.confirm(tensor, device)?;
        }
        let bytes = data.bytes().len();
        self.unconfirmed += bytes;
        let piece = Tensor::from_data(data.convert_dtype(dtype), (device, dtype));
        self.done(tensor, bytes);
        Ok(piece)
    }

    /// Uploads a tensor of shape `dims`; `read` returns ranges of its elements.
    ///
    /// The device's memory is written in place: it holds the tensor and one chunk.
    ///
    /// # Errors
    /// [`VlmError::Transfer`]; those of `read`.
    pub(crate) fn upload<const D: usize>(
        &mut self,
        tensor: &str,
        dims: [usize; D],
        (device, dtype): (&Device, DType),
        mut read: impl FnMut(Range<usize>) -> Result<TensorData>,
    ) -> Result<Tensor<D>> {
        let elements = dims.iter().product();
        let to = (device, dtype);
        let parts = self.ranges(elements, 1, dtype);
        if let [all] = &parts[..] {
            return Ok(self.send(tensor, read(all.clone())?, to)?.reshape(dims));
        }
        let mut whole = Tensor::<1>::empty([elements], to);
        for part in parts {
            let piece = self.send(tensor, read(part.clone())?, to)?;
            whole = whole.slice_assign([part], piece);
        }
        Ok(whole.reshape(dims))
    }

    /// As [`upload`](Self::upload), for a matrix of shape `dims`; `read` returns its transpose.
    ///
    /// # Errors
    /// Those of [`upload`](Self::upload).
    pub(crate) fn upload_transposed(
        &mut self,
        tensor: &str,
        [columns, rows]: [usize; 2],
        (device, dtype): (&Device, DType),
        mut read: impl FnMut(Range<usize>) -> Result<TensorData>,
    ) -> Result<Tensor<2>> {
        let to = (device, dtype);
        let mut whole = Tensor::<2>::empty([columns, rows], to);
        for part in self.ranges(rows * columns, columns, dtype) {
            let [first, end] = [part.start, part.end].map(|element| element / columns);
            let piece = self.send(tensor, read(part)?, to)?;
            let piece = piece.reshape([end - first, columns]).transpose();
            whole = whole.slice_assign([0..columns, first..end], piece);
        }
        Ok(whole)
    }

    /// Reads a tensor from its device and passes each chunk to `write`, in order.
    ///
    /// # Errors
    /// [`VlmError::Transfer`]; those of `write`.
    pub(crate) fn download<const D: usize>(
        &mut self,
        name: &str,
        tensor: Tensor<D>,
        mut write: impl FnMut(TensorData) -> Result<()>,
    ) -> Result<()> {
        let elements = tensor.dims().iter().product();
        let dtype = tensor.dtype();
        let flat = tensor.inner().reshape([elements]);
        for part in self.ranges(elements, 1, dtype) {
            self.receive(name, flat.clone().slice([part]), &mut write)?;
        }
        Ok(())
    }

    /// As [`download`](Self::download), for the transpose of a matrix.
    ///
    /// # Errors
    /// Those of [`download`](Self::download).
    pub(crate) fn download_transposed(
        &mut self,
        name: &str,
        tensor: Tensor<2>,
        mut write: impl FnMut(TensorData) -> Result<()>,
    ) -> Result<()> {
        let [columns, rows] = tensor.dims();
        let tensor = tensor.inner();
        for part in self.ranges(rows * columns, columns, tensor.dtype()) {
            let [first, end] = [part.start, part.end].map(|element| element / columns);
            let part = tensor.clone().slice([0..columns, first..end]);
            self.receive(name, part.transpose(), &mut write)?;
        }
        Ok(())
    }

    fn receive<const D: usize>(
        &mut self,
        name: &str,
        piece: Tensor<D>,
        write: &mut impl FnMut(TensorData) -> Result<()>,
    ) -> Result<()> {
        let data = piece.try_into_data();
        let data = data.map_err(|error| self.lost(name, error))?;
        let bytes = data.bytes().len();
        write(data)?;
        self.done(name, bytes);
        Ok(())
    }
}
