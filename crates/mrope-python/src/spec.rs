//! Specifications: JSON in, JSON out. Python keeps them as text, which operators of PyTorch take.
#![allow(
    unsafe_code,
    reason = "views of memory that PyTorch owns; each states what makes it sound"
)]

use pyo3::prelude::*;
use rope_core::hf::Component;
use rope_core::{Geometry, Positions, RotarySpec, TokenAngles};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::pool::with_threads;
use crate::tensor::{Computed, Tensor};

fn written(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(value)?)
}

pub(crate) fn geometry(json: &str) -> Result<Geometry> {
    Ok(serde_json::from_str(json)?)
}

fn spec(json: &str) -> Result<RotarySpec> {
    Ok(serde_json::from_str(json)?)
}

/// The specification in a `config.json`, of the decoder or of the vision tower.
#[pyfunction]
pub(crate) fn spec_from_hf_config(config: &str, vision: bool) -> PyResult<String> {
    let spec = if vision {
        RotarySpec::from_hf_vision_config(config)
    } else {
        RotarySpec::from_hf_config(config)
    };
    Ok(written(&spec.map_err(Error::from)?)?)
}

/// The specification that `rope_parameters` state, as golden vectors record it.
#[pyfunction]
pub(crate) fn spec_from_rope_parameters(
    model_type: &str,
    vision: bool,
    rope_parameters: &str,
    head_dim: usize,
) -> PyResult<String> {
    let component = if vision {
        Component::Vision
    } else {
        Component::Text
    };
    let spec = RotarySpec::from_rope_parameters(model_type, component, rope_parameters, head_dim);
    Ok(written(&spec.map_err(Error::from)?)?)
}

/// The specification, checked and with all of its fields.
#[pyfunction]
pub(crate) fn spec_checked(json: &str) -> PyResult<String> {
    Ok(written(&spec(json)?)?)
}

/// Geometry, number of axes, attention scaling, axis of each lane, frequency of each lane, and the
/// frequencies in radians per token.
type Parts = (String, usize, f64, Vec<usize>, Vec<usize>, Vec<f64>);

#[pyfunction]
#[pyo3(signature = (json, seq_len=None))]
pub(crate) fn spec_parts(json: &str, seq_len: Option<u64>) -> PyResult<Parts> {
    let spec = spec(json)?;
    let lanes = spec.lane_map().lanes();
    Ok((
        written(&spec.geometry())?,
        spec.axis_count(),
        spec.attention_scaling(),
        lanes.iter().map(|lane| usize::from(lane.axis)).collect(),
        lanes.iter().map(|lane| lane.frequency as usize).collect(),
        spec.inv_freq(seq_len).map_err(Error::from)?,
    ))
}

/// Writes cos and sin of each token to `rows`, `[tokens, 2 * lanes]`.
#[pyfunction]
#[pyo3(signature = (json, positions, rows, seq_len=None))]
pub(crate) fn token_angles(
    py: Python<'_>,
    json: &str,
    positions: Tensor,
    rows: Tensor,
    seq_len: Option<u64>,
) -> PyResult<()> {
    let spec = spec(json)?;
    py.detach(|| match &rows.dtype[..] {
        "f64" => write_angles::<f64>(&spec, &positions, &rows, seq_len),
        _ => write_angles::<f32>(&spec, &positions, &rows, seq_len),
    })?;
    Ok(())
}

fn write_angles<A: Computed>(
    spec: &RotarySpec,
    positions: &Tensor,
    rows: &Tensor,
    seq_len: Option<u64>,
) -> Result<()> {
    const WHAT: &str = "positions";
    let &[axes, _] = &positions.shape[..] else {
        return Err(Error::Shape {
            what: WHAT,
            shape: positions.shape.clone(),
            expected: "[axes, tokens]",
        });
    };
    let positions = match &positions.dtype[..] {
        // SAFETY: tensors of the caller (`Tensor`); `rows` is made for this.
        "f64" => Positions::real(axes, unsafe { positions.values::<f64>(WHAT) }?),
        // SAFETY: as above.
        _ => Positions::new(axes, unsafe { positions.values::<i64>(WHAT) }?),
    }?;
    let angles = with_threads(|| TokenAngles::<A>::new(spec, &positions, seq_len))?;
    // SAFETY: as above.
    let to = unsafe { rows.values_mut::<A>("the angles") }?;
    if to.len() != angles.rows().len() {
        return Err(Error::Shape {
            what: "the angles",
            shape: rows.shape.clone(),
            expected: "[tokens, 2 * lanes]",
        });
    }
    to.copy_from_slice(angles.rows());
    Ok(())
}
