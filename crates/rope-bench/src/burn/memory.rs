//! Counting the bytes of rotations that really run.

use std::error::Error;

use crate::memory::Subject;
use crate::rotation::{positions, values};
use crate::rows::MemoryRow;
use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use rope_check::alloc::Usage;
use rope_core::Layout;

use super::norm_scheme::NormScheme;
use super::scheme::Scheme;
use super::{Meter, Sizes, float};

/// A function from q and k to those of the next layer.
type Pair = Box<dyn Fn(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>)>;
/// By name; none where it cannot rotate the shape.
type NamedPair = (&'static str, Option<Pair>);

/// The rotations, or with `norm` those with the norm of the heads.
fn schemes(
    subject: &Subject,
    norm: bool,
    device: &Device,
) -> Result<Vec<NamedPair>, Box<dyn Error>> {
    let Subject { spec, dtype, .. } = subject;
    let positions = positions(spec.axis_count(), subject.shape.seq)?;
    if norm {
        let schemes = NormScheme::all(spec, Layout::Bnsd, &positions, *dtype, device)?;
        let pair = |scheme: NormScheme| -> Pair { Box::new(move |q, k| scheme.pair(q, k)) };
        return Ok(schemes
            .map(|(name, scheme)| (name, Some(pair(scheme))))
            .into());
    }
    let pair = |scheme: Scheme| -> Pair { Box::new(move |q, k| scheme.pair(q, k)) };
    let schemes = Scheme::all(spec, &positions, device)?.into_iter();
    Ok(schemes
        .map(|(name, scheme)| (name, scheme.map(pair)))
        .collect())
}

/// A row for every scheme on the device and every number of layers.
pub fn count(
    subject: &Subject,
    norm: bool,
    meter: &dyn Meter,
    checkpointing: bool,
    layers: &[usize],
) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
    let mut device = meter.device().autodiff();
    if checkpointing {
        device = device.gradient_checkpointing();
    }
    let mut rows = Vec::new();
    for (name, pair) in schemes(subject, norm, &device)? {
        let row = |layers| MemoryRow {
            checkpointing,
            ..subject.row(meter.name(), name, layers, meter.source())
        };
        let Some(pair) = pair else {
            rows.extend(layers.iter().map(|&layers| MemoryRow {
                note: "rotates whole heads only".into(),
                ..row(layers)
            }));
            continue;
        };
        // Memory pools, tables and what kernels look up are made on first use.
        step(subject, 1, &device, &pair, meter)?;
        for &layers in layers {
            let usage = step(subject, layers, &device, &pair, meter)?;
            rows.push(counted(row(layers), usage, meter.counts_allocations()));
        }
    }
    Ok(rows)
}

/// One forward and one backward through `layers` rotations, each counted by itself.
fn step(
    subject: &Subject,
    layers: usize,
    device: &Device,
    pair: &Pair,
    meter: &dyn Meter,
) -> Result<[Usage; 2], Box<dyn Error>> {
    let sizes = Sizes {
        data_bytes: subject.data_bytes(),
        large_bytes: subject.smaller_bytes(),
    };
    let [(q, k), start] = inputs(subject, device);
    let mut state = Some(start);
    let forward = meter.count(sizes, &mut || {
        for _ in 0..layers {
            state = state.take().map(|(q, k)| pair(q, k));
        }
    })?;
    let (q_rotated, k_rotated) = state.ok_or("nothing was rotated")?;
    let loss = q_rotated.sum() + k_rotated.sum();
    let mut gradients = None;
    let backward = meter.count(sizes, &mut || gradients = Some(loss.backward()))?;
    let reached = gradients
        .is_some_and(|gradients| q.grad(&gradients).is_some() && k.grad(&gradients).is_some());
    if !reached {
        return Err("the backward did not reach q and k".into());
    }
    Ok([forward, backward])
}

/// The leaves q and k, and tensors computed from them that nobody else holds, as projections leave
/// them.
fn inputs(subject: &Subject, device: &Device) -> [(Tensor<4>, Tensor<4>); 2] {
    let dtype = BurnDType::from(float(subject.dtype));
    let leaf = |heads: usize| {
        let shape = [1, heads, subject.shape.seq, subject.shape.head_dim];
        let values: Vec<f32> = values(shape.iter().product());
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        Tensor::<4>::from_data(data, (device, dtype)).require_grad()
    };
    let (q, k) = (leaf(subject.shape.heads), leaf(subject.shape.kv_heads));
    let start = (q.clone() * 2.0, k.clone() * 2.0);
    [(q, k), start]
}

/// `row` with what forward and backward did. Not every device counts allocations.
fn counted(row: MemoryRow, [forward, backward]: [Usage; 2], counts_allocations: bool) -> MemoryRow {
    let peak = (forward.retained_bytes + backward.peak_bytes.cast_signed()).max(0);
    let allocations = |count: usize| counts_allocations.then_some(count);
    MemoryRow {
        retained_bytes: Some(forward.retained_bytes),
        retained_data_bytes: Some(forward.retained_data_bytes),
        forward_peak_bytes: Some(forward.peak_bytes),
        backward_peak_bytes: Some(backward.peak_bytes),
        backward_large_peak_bytes: allocations(backward.large_peak_bytes),
        step_peak_bytes: Some(forward.peak_bytes.max(peak.cast_unsigned())),
        forward_allocations: allocations(forward.allocations),
        forward_large_allocations: allocations(forward.large_allocations),
        backward_allocations: allocations(backward.allocations),
        backward_large_allocations: allocations(backward.large_allocations),
        ..row
    }
}
