//! The operations on tensors in the memory of an Ascend NPU, on a stream that PyTorch owns.
//!
//! Work is queued and returns before it is done, as PyTorch's own is. The first call for a geometry
//! and layout waits for the stream: it uploads what the kernels need to know of them.
#![allow(
    unsafe_code,
    reason = "memory and a stream that PyTorch owns; each states what makes it sound"
)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use rope_ascend::diagnosis::{Diagnosis, Finding};
use rope_ascend::rope::{
    AngleGradient, AngleRows, ChannelWeights, Heads, KernelType, NormBackward, NormBackwardTensor,
    NormRotation, NormTensor, Npu, Operand, Rotation, Rotator,
};
use rope_ascend::safe::{DeviceMemory, Stream};
use rope_core::{Direction, Geometry, Layout};

use crate::cpu::{Norm, NormGradients, NormPair, Pair, head_norm};
use crate::error::{Error, Result};
use crate::spec;
use crate::tensor::{self, Tensor, check_apart};

/// A rotator on a borrowed stream: kept, for its stream keeps device memory and its maps.
struct Kept {
    stream: Stream,
    rotator: Arc<Rotator>,
}

/// By device, address of the stream and geometry.
type Key = (u32, usize, Geometry);

/// Everything that a call needs of the device.
struct Call {
    stream: Stream,
    rotator: Arc<Rotator>,
    layout: Layout,
    element: KernelType,
    element_bytes: usize,
}

impl Call {
    fn new(stream: usize, q: &Tensor, geometry: &str, layout: &str) -> Result<Self> {
        static KEPT: Mutex<Option<HashMap<Key, Kept>>> = Mutex::new(None);
        let (element, element_bytes) = match &q.dtype[..] {
            "f32" => (KernelType::F32, 4),
            "f16" => (KernelType::F16, 2),
            "bf16" => (KernelType::Bf16, 2),
            found => {
                return Err(Error::Dtype {
                    what: "q",
                    found: found.to_owned(),
                    expected: "f32, f16 or bf16",
                });
            }
        };
        let (geometry, layout) = (spec::geometry(geometry)?, tensor::layout(layout)?);
        let npu = current()?;
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (npu.device().ordinal(), stream, geometry);
        let Kept { stream, rotator } = match kept.get_or_insert_default().entry(key) {
            Entry::Occupied(kept) => kept.into_mut(),
            Entry::Vacant(free) => {
                // SAFETY: PyTorch's current stream of its current device (`mrope._ops`). It is used
                // in calls that are given it, while it lives; of a later stream with this address
                // the same holds. What is kept here is never dropped, so none is used at another
                // time.
                let stream = unsafe {
                    Stream::borrowed(npu.device(), std::ptr::with_exposed_provenance_mut(stream))
                };
                let rotator = Arc::new(npu.rotator(&stream, geometry)?);
                free.insert(Kept { stream, rotator })
            }
        };
        Ok(Self {
            stream: stream.clone(),
            rotator: Arc::clone(rotator),
            layout,
            element,
            element_bytes,
        })
    }

    /// The memory that a tensor reaches, from its first element on.
    fn memory(&self, tensor: &Tensor, bytes: usize) -> DeviceMemory {
        let address: *mut c_void = std::ptr::with_exposed_provenance_mut(tensor.address);
        // SAFETY: a tensor that the caller holds (`Tensor`), on the current device. PyTorch's
        // allocator hands memory that is freed on to later work of the same stream only.
        unsafe { DeviceMemory::borrowed(&self.stream, address, bytes) }
    }

    /// q, k, or a gradient of one.
    fn heads(&self, tensor: &Tensor, what: &'static str) -> Result<Heads<DeviceMemory>> {
        tensor.expect_dtype(what, dtype_name(self.element))?;
        let layout = tensor.heads(self.layout)?;
        let bytes = usize::try_from(layout.extent()).unwrap_or(usize::MAX);
        Ok(Heads {
            memory: self.memory(tensor, bytes.saturating_mul(self.element_bytes)),
            offset: 0,
            layout,
        })
    }

    /// A contiguous tensor of f32.
    fn values(&self, tensor: &Tensor, what: &'static str) -> Result<DeviceMemory> {
        tensor.expect_dtype(what, "f32")?;
        tensor.expect_contiguous(what)?;
        let values: usize = tensor.shape.iter().product();
        Ok(self.memory(tensor, 4 * values))
    }

    fn angles(&self, tensor: &Tensor) -> Result<(DeviceMemory, usize)> {
        const WHAT: &str = "the angles";
        let memory = self.values(tensor, WHAT)?;
        match tensor.shape[..] {
            [rows, _] => Ok((memory, rows)),
            _ => Err(Error::Shape {
                what: WHAT,
                shape: tensor.shape.clone(),
                expected: "[tokens, 2 * lanes]; on an NPU all heads share them",
            }),
        }
    }
}

fn dtype_name(element: KernelType) -> &'static str {
    match element {
        KernelType::F32 => "f32",
        KernelType::F16 => "f16",
        KernelType::Bf16 => "bf16",
    }
}

/// The device that the calling thread has set.
fn current() -> Result<Npu> {
    #[cfg(feature = "ascend-sim")]
    if let Ok(npu) = Npu::simulated_current() {
        return Ok(npu);
    }
    Ok(Npu::current()?)
}

/// Both sides of an operand, which borrows them.
type Sides = (Heads<DeviceMemory>, Option<Heads<DeviceMemory>>);

fn sides(call: &Call, (from, to): (&Tensor, &Tensor), what: &'static str) -> Result<Sides> {
    let to_heads = call.heads(to, what)?;
    if from.address == to.address && from.strides == to.strides {
        return Ok((to_heads, None));
    }
    Ok((to_heads, Some(call.heads(from, what)?)))
}

fn operand((to, from): &mut Sides) -> Operand<'_> {
    let (offset, layout) = (to.offset, to.layout);
    let to = Heads {
        memory: &mut to.memory,
        offset,
        layout,
    };
    match from {
        None => Operand::InPlace(to),
        Some(from) => Operand::Into {
            from: shared(from),
            to,
        },
    }
}

fn shared(heads: &Heads<DeviceMemory>) -> Heads<&DeviceMemory> {
    Heads {
        memory: &heads.memory,
        offset: heads.offset,
        layout: heads.layout,
    }
}

/// As [`rotate`](crate::cpu::rotate), on a stream.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an operator's")]
pub(crate) fn npu_rotate(
    py: Python<'_>,
    stream: usize,
    q: Pair,
    k: Option<Pair>,
    angles: Tensor,
    geometry: &str,
    layout: &str,
    adjoint: bool,
) -> PyResult<()> {
    py.detach(|| {
        let call = Call::new(stream, &q.0, geometry, layout)?;
        if let Some((k, to)) = &k
            && k.address == to.address
        {
            check_apart(&q.0, k, call.layout, call.element_bytes)?;
        }
        let mut q = sides(&call, (&q.0, &q.1), "q")?;
        let k = k.as_ref().map(|(k, to)| sides(&call, (k, to), "k"));
        let mut k = k.transpose()?;
        let (memory, rows) = call.angles(&angles)?;
        let direction = if adjoint {
            Direction::Adjoint
        } else {
            Direction::Forward
        };
        call.rotator.rotate(Rotation {
            element: call.element,
            direction,
            q: operand(&mut q),
            k: k.as_mut().map(operand),
            angles: AngleRows {
                memory: &memory,
                offset_bytes: 0,
                rows,
            },
        })?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}

/// As [`angle_gradients`](crate::cpu::angle_gradients), on a stream; `out` has a row for each token
/// of the batch.
#[pyfunction]
pub(crate) fn npu_angle_gradients(
    py: Python<'_>,
    stream: usize,
    q: Pair,
    k: Option<Pair>,
    out: Tensor,
    geometry: &str,
    layout: &str,
) -> PyResult<()> {
    py.detach(|| {
        let call = Call::new(stream, &q.0, geometry, layout)?;
        let both = |(x, gradient): &Pair, what| {
            let gradient = call.heads(gradient, "its gradient")?;
            Ok::<_, Error>([call.heads(x, what)?, gradient])
        };
        let (q, k) = (
            both(&q, "q")?,
            k.as_ref().map(|k| both(k, "k")).transpose()?,
        );
        let mut out = call.values(&out, "the gradient of the angles")?;
        call.rotator.angle_gradient(AngleGradient {
            element: call.element,
            q: q.each_ref().map(shared),
            k: k.as_ref().map(|k| k.each_ref().map(shared)),
            out: &mut out,
        })?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}

/// The weight of a norm, which the kernels always read.
fn weight(call: &Call, weight: Option<&Tensor>) -> Result<(DeviceMemory, usize)> {
    const WHAT: &str = "the weight";
    let Some(weight) = weight else {
        return Err(Error::Shape {
            what: WHAT,
            shape: Vec::new(),
            expected: "[head_dim]",
        });
    };
    Ok((
        call.values(weight, WHAT)?,
        weight.shape.iter().product::<usize>(),
    ))
}

fn channel_weights((memory, channels): &(DeviceMemory, usize)) -> ChannelWeights<'_> {
    ChannelWeights {
        memory,
        offset_bytes: 0,
        channels: *channels,
    }
}

/// As [`norm_rotate`](crate::cpu::norm_rotate), on a stream.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an operator's")]
pub(crate) fn npu_norm_rotate(
    py: Python<'_>,
    stream: usize,
    q: NormPair,
    k: Option<NormPair>,
    angles: Tensor,
    norm: Norm,
    geometry: &str,
    layout: &str,
) -> PyResult<()> {
    py.detach(|| {
        let (call, norm) = (Call::new(stream, &q.0, geometry, layout)?, head_norm(norm)?);
        let both = |(x, y, w): &NormPair, what| {
            Ok::<_, Error>((sides(&call, (x, y), what)?, weight(&call, w.as_ref())?))
        };
        let mut q = both(&q, "q")?;
        let mut k = k.as_ref().map(|k| both(k, "k")).transpose()?;
        let (memory, rows) = call.angles(&angles)?;
        call.rotator.norm_rotate(NormRotation {
            element: call.element,
            norm,
            q: NormTensor {
                x: operand(&mut q.0),
                weight: channel_weights(&q.1),
            },
            k: k.as_mut().map(|k| NormTensor {
                x: operand(&mut k.0),
                weight: channel_weights(&k.1),
            }),
            angles: AngleRows {
                memory: &memory,
                offset_bytes: 0,
                rows,
            },
        })?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}

/// Rows of sums that [`npu_norm_rotate_backward`] writes at most.
#[pyfunction]
pub(crate) fn npu_weight_sums(
    stream: usize,
    q: Tensor,
    geometry: &str,
    layout: &str,
) -> PyResult<usize> {
    let call = Call::new(stream, &q, geometry, layout)?;
    Ok(call.rotator.most_weight_sums())
}

/// The backward of [`npu_norm_rotate`]: writes sums of which the gradients of the weights consist to
/// `sums`, f32 `[rows, tensors, head_dim]`, and returns the rows that it writes.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an operator's")]
pub(crate) fn npu_norm_rotate_backward(
    py: Python<'_>,
    stream: usize,
    q: NormGradients,
    k: Option<NormGradients>,
    sums: Tensor,
    angles: Tensor,
    norm: Norm,
    geometry: &str,
    layout: &str,
) -> PyResult<usize> {
    let rows_written = py.detach(|| {
        let (call, norm) = (Call::new(stream, &q.0, geometry, layout)?, head_norm(norm)?);
        let parts = |(x, dy, dx, w, _): &NormGradients, what| {
            let gradient = sides(&call, (dy, dx), what)?;
            Ok::<_, Error>((call.heads(x, what)?, gradient, weight(&call, w.as_ref())?))
        };
        let mut q = parts(&q, "q")?;
        let mut k = k.as_ref().map(|k| parts(k, "k")).transpose()?;
        let (memory, rows) = call.angles(&angles)?;
        let mut sums = call.values(&sums, "the sums")?;
        let rows_written = call.rotator.norm_rotate_backward(NormBackward {
            element: call.element,
            norm,
            q: NormBackwardTensor {
                x: shared(&q.0),
                gradient: operand(&mut q.1),
                weight: channel_weights(&q.2),
            },
            k: k.as_mut().map(|k| NormBackwardTensor {
                x: shared(&k.0),
                gradient: operand(&mut k.1),
                weight: channel_weights(&k.2),
            }),
            angles: AngleRows {
                memory: &memory,
                offset_bytes: 0,
                rows,
            },
            weight_sums: &mut sums,
        })?;
        Ok::<_, Error>(rows_written)
    })?;
    Ok(rows_written)
}

/// The parts of CANN: name, true if it is ready, and the finding, with the remedy of a missing one.
#[pyfunction]
pub(crate) fn diagnosis(py: Python<'_>) -> Vec<(String, bool, String)> {
    let found = py.detach(Diagnosis::of_installation);
    let libraries = found
        .libraries
        .into_iter()
        .map(|row| (row.role.into(), row.found));
    let runtime = [("Ascend runtime".to_owned(), found.runtime)];
    let devices = found.devices.into_iter().map(|row| (row.name, row.found));
    let launches = found
        .launches
        .into_iter()
        .map(|row| (row.family.into(), row.found));
    let paths = found
        .paths
        .into_iter()
        .map(|row| (row.name.into(), row.found));
    let rows = libraries.chain(runtime).chain(devices);
    rows.chain(launches.chain(paths))
        .map(|(name, found)| match found {
            Finding::Ready(text) => (name, true, text),
            Finding::Missing { reason, remedy } => (name, false, format!("{reason}: {remedy}")),
        })
        .collect()
}

/// The address of a function of the simulator's C interface, 0 if there is none of that name, for
/// tests that act as PyTorch does.
#[cfg(feature = "ascend-sim")]
#[pyfunction]
pub(crate) fn simulator_symbol(name: &str) -> usize {
    let name = std::ffi::CString::new(name).unwrap_or_default();
    ascend_sim::symbol(&name).expose_provenance()
}

/// Takes the violations that the simulator has found, and sets whether streams wait.
#[cfg(feature = "ascend-sim")]
#[pyfunction]
pub(crate) fn simulator_violations(hold_streams: bool) -> Vec<String> {
    let found = ascend_sim::control::take_violations();
    ascend_sim::control::hold_streams(hold_streams);
    found.iter().map(ToString::to_string).collect()
}

/// The functions of the simulator's C interface that were called since the last question.
#[cfg(feature = "ascend-sim")]
#[pyfunction]
pub(crate) fn simulator_calls() -> Vec<&'static str> {
    let calls = ascend_sim::control::calls();
    ascend_sim::control::clear_calls();
    calls.iter().map(|call| call.function).collect()
}
