//! ApplyRotaryPosEmb, its second version, and InterleaveRope.

use super::dtype::FLT;
use super::rotary::{Mode, rotate};
use super::{Kernel, Operand, Tensor, kernel, refuse};
use crate::codes::Outcome;
use crate::state::sim;

const HEAD_DIMS: &[usize] = &[64, 128];
const RANK: usize = 4;
const INTERLEAVE_HEAD_DIM: usize = 64;

/// The heads axis of a layout number: 1 BSND, 2 SBND, 3 BNSD. A later release has 4, TND; what runs here is to run on all.
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
    let inner: usize = x.dims[heads_axis + 1..x.dims.len() - 1].iter().product();
    let rows: usize = x.dims[..x.dims.len() - 1].iter().product();
    let heads = x.dims[heads_axis];
    (0..rows)
        .map(|row| row / (heads * inner) * inner + row % inner)
        .collect()
}

fn expect_angles(x: &Tensor, angles: &Tensor, heads_axis: usize, name: &str) -> Outcome {
    let mut expected = x.dims.clone();
    expected[heads_axis] = 1;
    if angles.dims != expected || angles.dtype != x.dtype {
        return refuse(format!(
            "{name} is {:?} {:?}, {:?} {expected:?} is expected",
            angles.dtype, angles.dims, x.dtype
        ));
    }
    Ok(())
}

pub(crate) fn apply(
    query: &Operand,
    key: &Operand,
    cos: &Operand,
    sin: &Operand,
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
    for (tensor, name) in [(query, "query"), (key, "key")] {
        let width = tensor.dims.last().copied().unwrap_or(0);
        if tensor.dims.len() != RANK || !FLT.has(tensor.dtype) || !HEAD_DIMS.contains(&width) {
            return refuse(format!(
                "{name} of {:?}: layout {layout} has {RANK} axes and D of {HEAD_DIMS:?}",
                tensor.dims
            ));
        }
        expect_angles(tensor, cos, heads, "cos")?;
        expect_angles(tensor, sin, heads, "sin")?;
    }
    let (pair, cos, sin) = ([query.clone(), key.clone()], cos.clone(), sin.clone());
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

pub(crate) fn interleave(
    x: &Operand,
    cos: &Operand,
    sin: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    if x.dims.len() != 4
        || x.dims[3] != INTERLEAVE_HEAD_DIM
        || out.dims != x.dims
        || out.dtype != x.dtype
        || !FLT.has(x.dtype)
    {
        return refuse(format!(
            "x of {:?} and out of {:?}: BNSD with D = {INTERLEAVE_HEAD_DIM} is expected",
            x.dims, out.dims
        ));
    }
    expect_angles(x, cos, 1, "cos")?;
    expect_angles(x, sin, 1, "sin")?;
    let (x, cos, sin, out) = (x.clone(), cos.clone(), sin.clone(), out.clone());
    kernel(move |data| {
        let y = rotate(
            &data.read(&x)?,
            &data.read(&cos)?,
            &data.read(&sin)?,
            &rows_without_heads(&x, 1),
            &Mode::InterleaveHalf.terms(INTERLEAVE_HEAD_DIM),
        );
        data.write(&out, &y)
    })
}
