//! ApplyRotaryPosEmb and its second version.

use super::dtype::FLT;
use super::rotary::{Mode, rotate};
use super::{Kernel, Operand, Tensor, kernel, refuse};
use crate::codes::Outcome;
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
        expect_angles(tensor, &cos, heads)?;
        expect_angles(tensor, &sin, heads)?;
    }
    kernel(move |data| {
        let (c, s) = (data.read(&cos)?, data.read(&sin)?);
        for tensor in &pair {
            let terms = mode.terms(tensor.dims[RANK - 1]);
            let x = data.read(tensor)?;
            let y = rotate(&x, &c, &s, &rows_without_heads(tensor, heads), &terms);
            data.write(tensor, &y)?;
        }
        Ok(())
    })
}
