//! Results, as JSON lines.

use std::io::Write;

use rope_check::buffer::DType;
use rope_check::names::{axes_name, layout_name, pairing_name};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cases::{Group, TimedCase, Way};
use crate::sample::Timing;

/// Why results were not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// As JSON.
    #[error("the results are not the expected JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The reader or writer failed.
    #[error("the results cannot be accessed: {0}")]
    Io(#[from] std::io::Error),
}

/// How a figure came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// It happened and was counted or timed.
    Measured,
    /// Counted on the simulated NPU: bytes that a device would hold, too.
    CountedOnTheSimulator,
}

impl Source {
    /// The label in tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::CountedOnTheSimulator => "counted on the simulator",
        }
    }
}

/// The time of one implementation for one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpeedRow {
    /// The case's name.
    pub case: String,
    /// Who rotated.
    pub implementation: String,
    /// The direction.
    pub direction: Way,
    /// The element type of q and k.
    pub dtype: DType,
    /// The pairing of channels.
    pub pairing: String,
    /// The axis that drives each pair, without sections.
    pub axes: String,
    /// The order of the dimensions.
    pub layout: String,
    /// The part of the results.
    pub group: Group,
    /// The model of the shape.
    pub shape: String,
    /// Tokens.
    pub tokens: usize,
    /// True if q and k are overwritten.
    pub in_place: bool,
    /// Bytes read and written.
    pub bytes: usize,
    /// Median time of a run.
    pub median_ns: f64,
    /// A quarter of the samples is below.
    pub lower_quartile_ns: f64,
    /// A quarter of the samples is above.
    pub upper_quartile_ns: f64,
    /// Samples.
    pub samples: usize,
    /// The baseline: `copy` or `read_modify_write`, of the same bytes, by the same threads, in
    /// turn; for the norm `rotation`, or `read_two_write_one`.
    pub baseline: String,
    /// The baseline's median.
    pub baseline_ns: f64,
    /// `median_ns / baseline_ns`.
    pub copy_ratio: f64,
}

impl SpeedRow {
    /// The row of a case that was timed against a baseline.
    pub fn new(
        case: &TimedCase,
        implementation: &str,
        baseline: (&str, Timing),
        timing: Timing,
    ) -> Self {
        Self {
            case: case.name(),
            implementation: implementation.to_owned(),
            direction: case.way,
            dtype: case.dtype,
            pairing: pairing_name(case.pairing).to_owned(),
            axes: axes_name(&case.axes).to_owned(),
            layout: layout_name(case.layout).to_owned(),
            group: case.group,
            shape: case.shape.name.to_owned(),
            tokens: case.shape.seq,
            in_place: case.in_place,
            bytes: case.moved_bytes(),
            median_ns: timing.median_ns,
            lower_quartile_ns: timing.lower_quartile_ns,
            upper_quartile_ns: timing.upper_quartile_ns,
            samples: timing.samples,
            baseline: baseline.0.to_owned(),
            baseline_ns: baseline.1.median_ns,
            copy_ratio: timing.median_ns / baseline.1.median_ns,
        }
    }
}

/// The memory that one implementation held for a number of layers. Empty where it was not measured
/// or has no formula.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryRow {
    /// The model of the shape.
    pub shape: String,
    /// Tokens.
    pub tokens: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Rotated channels of a head.
    pub rotary_dim: usize,
    /// The element type of q and k.
    pub dtype: DType,
    /// True if autodiff recomputes instead of keeping.
    pub checkpointing: bool,
    /// The device whose memory it is: `flex`, or the NPU.
    pub device: String,
    /// Who rotated.
    pub implementation: String,
    /// Rotations one after another.
    pub layers: usize,
    /// How the figures came about.
    pub source: Source,
    /// Bytes of q and k, and so of their gradients.
    pub gradient_bytes: usize,
    /// Bytes live after the forward, less those live before: what the graph keeps.
    pub retained_bytes: Option<isize>,
    /// Of these, in allocations large enough to hold tensor data.
    pub retained_data_bytes: Option<isize>,
    /// The most bytes live during the forward, less those live before.
    pub forward_peak_bytes: Option<usize>,
    /// The most bytes live during the backward, less those live before.
    pub backward_peak_bytes: Option<usize>,
    /// Of the backward's peak, the most in allocations as large as k or larger: tensors of q's and
    /// k's size.
    pub backward_large_peak_bytes: Option<usize>,
    /// The most bytes live at any time of both, less those live before the forward.
    pub step_peak_bytes: Option<usize>,
    /// Allocations of the forward.
    pub forward_allocations: Option<usize>,
    /// Of these, as large as k or larger.
    pub forward_large_allocations: Option<usize>,
    /// Allocations of the backward.
    pub backward_allocations: Option<usize>,
    /// Of these, as large as k or larger.
    pub backward_large_allocations: Option<usize>,
    /// `step_peak_bytes` of the composed operation over that of this one, in the same run.
    pub composed_ratio: Option<f64>,
    /// The same for `burn::nn::RotaryEncoding`.
    pub rotary_encoding_ratio: Option<f64>,
    /// A remark on the row.
    pub note: String,
}

/// The memory that causal attention held, forward and backward. Empty where it was not run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionRow {
    /// The model of the shape.
    pub shape: String,
    /// Tokens.
    pub tokens: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// The element type of q, k and v.
    pub dtype: DType,
    /// The device whose memory it is: `flex`, or the NPU.
    pub device: String,
    /// Who attended.
    pub implementation: String,
    /// How the figures came about.
    pub source: Source,
    /// Bytes of one matrix of scores in f32.
    pub scores_bytes: usize,
    /// Bytes live after the forward, less those live before: what the graph keeps, beside q, k and
    /// v, and the output.
    pub retained_bytes: Option<isize>,
    /// The most bytes live during the forward, less those live before.
    pub forward_peak_bytes: Option<usize>,
    /// The most bytes live during the backward, less those live before.
    pub backward_peak_bytes: Option<usize>,
    /// The most bytes live at any time of both, less those live before the forward.
    pub step_peak_bytes: Option<usize>,
    /// `step_peak_bytes` of the composed attention over that of this one, in the same run.
    pub composed_ratio: Option<f64>,
}

/// Writes rows as JSON, one object a line.
///
/// # Errors
/// [`RowError`].
pub fn write_json_lines<R: Serialize>(rows: &[R], mut to: impl Write) -> Result<(), RowError> {
    for row in rows {
        serde_json::to_writer(&mut to, row)?;
        writeln!(to)?;
    }
    Ok(())
}

/// Reads JSON lines.
///
/// # Errors
/// [`RowError`].
pub fn read_json_lines<R: DeserializeOwned>(text: &str) -> Result<Vec<R>, RowError> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    Ok(lines.map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// A time in the unit that fits.
pub fn time(ns: f64) -> String {
    let (value, unit) = match ns {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "us"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// A number of bytes in the unit that fits.
pub fn bytes(count: f64) -> String {
    let mut value = count;
    for unit in ["B", "KiB", "MiB"] {
        if value.abs() < 1024.0 {
            return format!("{} {unit}", three_digits(value));
        }
        value /= 1024.0;
    }
    format!("{} GiB", three_digits(value))
}

/// Three digits, or all before the point; no point after a whole number.
fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 99.95 || v.fract() == 0.0 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MODELS;

    #[test]
    fn rows_come_back_from_json() {
        let subject = MODELS[3].at(256, DType::Bf16).unwrap();
        let row = MemoryRow {
            checkpointing: true,
            retained_bytes: Some(-8),
            forward_peak_bytes: Some(0),
            forward_allocations: Some(1),
            composed_ratio: Some(1.5),
            ..subject.row("flex", "fused", 36, Source::CountedOnTheSimulator)
        };
        let rows = [row.clone(), MemoryRow { layers: 1, ..row }];
        let mut text = Vec::new();
        write_json_lines(&rows, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(read_json_lines::<MemoryRow>(&text).unwrap(), rows);
    }

    #[test]
    fn quantities_have_three_digits_and_a_unit() {
        assert_eq!(time(950.0), "950 ns");
        assert_eq!(time(12_345.0), "12.3 us");
        assert_eq!(time(1.5e9), "1.50 s");
        assert_eq!(bytes(0.0), "0 B");
        assert_eq!(bytes(1640.0), "1.60 KiB");
        assert_eq!(bytes(10.0 * 1024.0 * 1024.0), "10 MiB");
    }
}
