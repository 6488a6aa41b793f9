//! ApplyRotaryPosEmb and its second version.

use half::f16;

use super::dtype::{DataType, FLT};
use super::rotary::{Mode, rotate};
use super::{Kernel, Operand, Tensor, kernel, refuse};
use crate::codes::{ACLNN_TILING_ERROR, Failure, Outcome};
use crate::state::sim;

const HEAD_DIMS: &[usize] = &[64, 128];
const RANK: usize = 4;

/// The heads axis of a layout number: 1 BSND, 2 SBND, 3 BNSD. A later release has 4, TND; what runs
/// here is to run on all of them.
fn heads_axis(layout: i64, architecture: u32) -> Outcome<usize> {
    match layout {
        2 | 3 if architecture == 2201 => refuse(format!(
            "layout {layout} needs an Ascend 950, dav-2201 takes only 1 BSND"
        )),
        1 | 2 => Ok(2),
        3 => Ok(1),
        _ => refuse(format!(
            "layout {layout} does not exist: 1 BSND, 2 SBND, 3 BNSD"
        )),
    }
}

/// For each row of `x`, the row of an angle tensor that has one head.
fn rows_without_heads(x: &Tensor, heads_axis: usize) -> Vec<usize> {
    let last = x.rank() - 1;
    let inner: usize = x.dims[heads_axis + 1..last].iter().product();
    let rows: usize = x.dims[..last].iter().product();
    let heads = x.dims[heads_axis];
    (0..rows)
        .map(|row| row / (heads * inner) * inner + row % inner)
        .collect()
}

fn expect_angles(x: &Tensor, angles: &Operand, heads_axis: usize) -> Outcome {
    let mut expected = x.dims.clone();
    expected[heads_axis] = 1;
    if angles.dims != expected || angles.dtype != x.dtype {
        return refuse(format!(
            "{} is {:?} {:?}, {:?} {expected:?} is expected",
            angles.name, angles.dtype, angles.dims, x.dtype
        ));
    }
    Ok(())
}

/// Unified buffer of A2, as its tiling counts it.
const A2_UB_BYTES: usize = 192 * 1024;

/// `ub_required` of the operator's documentation, for this many heads of query and key.
fn ub_required(heads: usize, x: &Tensor) -> usize {
    let width = x.dims[RANK - 1];
    let stored = x.dtype.bytes() as usize;
    let cast = usize::from(x.dtype == DataType::Bf16);
    let computed = if cast == 1 { 4 } else { stored };
    heads * width * computed * 2
        + width * stored * 4
        + heads * width * computed
        + heads * width * computed * 2
        + cast * (width * 4 * 2)
}

/// On A2 f16 is computed in f16: both products and their sum are rounded.
fn rotate_in_half(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    rows: &[usize],
    terms: &[(usize, usize, f32)],
) -> Vec<f32> {
    let round = |value: f32| f16::from_f32(value).to_f32();
    let width = terms.len();
    let row = |(row, angle): (usize, &usize)| {
        let (row, angle) = (row * width, angle * width);
        let channel = move |(i, (by_cos, by_sin, sign)): (usize, &(usize, usize, f32))| {
            let straight = round(x[row + by_cos] * cos[angle + i]);
            round(straight + round(sign * x[row + by_sin] * sin[angle + i]))
        };
        terms.iter().enumerate().map(channel)
    };
    rows.iter().enumerate().flat_map(row).collect()
}

/// On A2 bf16 is computed in f32 and rounded by CAST_ROUND: to nearest, ties away from zero.
fn ties_away(value: f32) -> f32 {
    let bits = value.to_bits();
    if !value.is_finite() {
        return value;
    }
    f32::from_bits((bits + 0x8000) & 0xffff_0000)
}

/// ApplyRotaryPosEmb and its second version: rotates query and key in place.
pub(crate) fn apply(
    query: Operand,
    key: Operand,
    cos: Operand,
    sin: Operand,
    layout: i64,
    rotary_mode: &str,
) -> Outcome<Kernel> {
    let heads = heads_axis(layout, sim().machine.architecture)?;
    let mode = match rotary_mode {
        "half" => Mode::Half,
        "interleave" => Mode::Interleave,
        "quarter" => Mode::Quarter,
        other => {
            return refuse(format!(
                "rotaryMode `{other}` does not exist: half, interleave, quarter"
            ));
        }
    };
    if mode != Mode::Half && sim().machine.architecture == 2201 {
        return refuse(format!(
            "rotaryMode `{rotary_mode}` needs an Ascend 950, dav-2201 takes only `half`"
        ));
    }
    let pair = [query, key];
    for tensor in &pair {
        let width = tensor.dims.last().copied().unwrap_or(0);
        if tensor.rank() != RANK || !FLT.has(tensor.dtype) || !HEAD_DIMS.contains(&width) {
            return refuse(format!(
                "{} of {:?}: layout {layout} has {RANK} axes and D of {HEAD_DIMS:?}",
                tensor.name, tensor.dims
            ));
        }
        if tensor.is_empty() {
            return refuse(format!("{} is empty, which is not taken", tensor.name));
        }
        expect_angles(tensor, &cos, heads)?;
        expect_angles(tensor, &sin, heads)?;
    }
    let architecture = sim().machine.architecture;
    if architecture == 2201 {
        let count = pair[0].dims[heads] + pair[1].dims[heads];
        let needed = ub_required(count, &pair[0]);
        if needed > A2_UB_BYTES {
            let message = format!(
                "{count} heads of query and key take {needed} bytes of unified buffer, there are \
                 {A2_UB_BYTES}"
            );
            return Err(Failure::new(ACLNN_TILING_ERROR, message));
        }
    }
    kernel(move |data| {
        let (c, s) = (data.read(&cos)?, data.read(&sin)?);
        for tensor in &pair {
            let terms = mode.terms(tensor.dims[RANK - 1]);
            let x = data.read(tensor)?;
            let rows = rows_without_heads(tensor, heads);
            let y = match (architecture, tensor.dtype) {
                (2201, DataType::Float16) => rotate_in_half(&x, &c, &s, &rows, &terms),
                (2201, DataType::Bf16) => rotate(&x, &c, &s, &rows, &terms)
                    .into_iter()
                    .map(ties_away)
                    .collect(),
                _ => rotate(&x, &c, &s, &rows, &terms),
            };
            data.write(tensor, &y)?;
        }
        Ok(())
    })
}
