//! RotaryPositionEmbedding and its gradient.

use super::dtype::FLT;
use super::{Kernel, Operand, Tensor, kernel, refuse};
use crate::codes::Outcome;
use crate::machine::Machine;
use crate::state::sim;

const MAX_HEAD_DIM: usize = 896;
const MAX_BATCH_HEADS: usize = 1000;
const MAX_BATCH_HEADS_FOR_ANGLE_GRAD: usize = 1024;

/// How channels pair, by the operator's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Half,
    Interleave,
    Quarter,
    InterleaveHalf,
}

impl Mode {
    pub(crate) fn from_code(code: i64) -> Outcome<Self> {
        match code {
            0 => Ok(Self::Half),
            1 => Ok(Self::Interleave),
            2 => Ok(Self::Quarter),
            3 => Ok(Self::InterleaveHalf),
            _ => refuse(format!(
                "mode {code} does not exist: 0 half, 1 interleave, 2 quarter, 3 interleave-half"
            )),
        }
    }

    /// For each output channel: the input channel times cos, and the signed input channel times sin.
    pub(crate) fn terms(self, width: usize) -> Vec<(usize, usize, f32)> {
        let half = |i: usize, width: usize, base: usize| {
            let middle = width / 2;
            if i < middle {
                (base + i, base + i + middle, -1.0)
            } else {
                (base + i, base + i - middle, 1.0)
            }
        };
        (0..width)
            .map(|i| match self {
                Self::Half => half(i, width, 0),
                Self::Interleave if i % 2 == 0 => (i, i + 1, -1.0),
                Self::Interleave => (i, i - 1, 1.0),
                Self::Quarter => {
                    let middle = width / 2;
                    half(i % middle, middle, i / middle * middle)
                }
                Self::InterleaveHalf if i < width / 2 => (2 * i, 2 * i + 1, -1.0),
                Self::InterleaveHalf => {
                    let pair = i - width / 2;
                    (2 * pair + 1, 2 * pair, 1.0)
                }
            })
            .collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Gradient,
}

/// A memory order that the operator knows: where batch, heads and sequence lie, and which of the
/// first axes cos and sin may spread over in half mode. The first of those is the only one that
/// interleave mode takes.
struct Order {
    name: &'static str,
    batch: usize,
    heads: usize,
    seq: usize,
    angle_axes: &'static [&'static [bool]],
}

const ORDERS: &[Order] = &[
    Order {
        name: "BNSD",
        batch: 0,
        heads: 1,
        seq: 2,
        angle_axes: &[
            &[false, false, true],
            &[true, false, true],
            &[true, true, true],
        ],
    },
    Order {
        name: "BSND",
        batch: 0,
        heads: 2,
        seq: 1,
        angle_axes: &[
            &[false, true, false],
            &[true, true, false],
            &[true, true, true],
        ],
    },
    Order {
        name: "SBND",
        batch: 1,
        heads: 2,
        seq: 0,
        angle_axes: &[
            &[true, false, false],
            &[true, true, false],
            &[true, true, true],
        ],
    },
];
/// Whether the operator takes this order; otherwise its limit.
fn accepts(
    order: &Order,
    x: &Tensor,
    cos: &Tensor,
    mode: Mode,
    pass: Pass,
    cores: usize,
) -> Result<(), String> {
    let width = x.dims[x.dims.len() - 1];
    let spreads = |axes: &&&[bool]| {
        axes.iter()
            .enumerate()
            .all(|(axis, full)| cos.dims[axis] == if *full { x.dims[axis] } else { 1 })
    };
    let allowed = if mode == Mode::Half || mode == Mode::Quarter {
        order.angle_axes
    } else {
        &order.angle_axes[..1]
    };
    let Some(spread) = allowed.iter().find(spreads) else {
        return Err(format!(
            "{}: cos and sin of shape {:?} do not fit x of {:?} in {mode:?} mode",
            order.name, cos.dims, x.dims
        ));
    };
    let [batch, heads, seq] = [order.batch, order.heads, order.seq].map(|axis| x.dims[axis]);
    if mode == Mode::Half && (batch >= MAX_BATCH_HEADS || heads >= MAX_BATCH_HEADS) {
        return Err(format!(
            "{}: batch {batch} and heads {heads} must both be below {MAX_BATCH_HEADS}",
            order.name
        ));
    }
    if mode == Mode::Interleave && batch * heads >= MAX_BATCH_HEADS {
        return Err(format!(
            "{}: batch {batch} times heads {heads} must be below {MAX_BATCH_HEADS} in interleave mode",
            order.name
        ));
    }
    let whole = spread.iter().all(|full| *full);
    let per_batch = batch > 1 && spread[order.batch] && !spread[order.heads];
    if pass == Pass::Gradient && order.name != "SBND" && per_batch && batch >= seq {
        return Err(format!(
            "{}: with angles of each batch, batch {batch} must be below the sequence {seq}",
            order.name
        ));
    }
    if mode == Mode::Half && order.name == "BNSD" && !whole {
        let aligned = (width / 2).is_multiple_of(32 / x.dtype.bytes() as usize);
        if aligned && batch * heads > 8 * seq {
            return Err(format!(
                "BNSD: batch times heads {} must be at most 8 times the sequence {seq}",
                batch * heads
            ));
        }
        if !aligned && 2 * batch * heads > seq.div_ceil(cores) && width < 80 {
            return Err(format!(
                "BNSD: D of {width} is unaligned, below 80, and twice batch times heads {} is above the sequence per core",
                batch * heads
            ));
        }
    }
    Ok(())
}

fn check(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    out: &Tensor,
    mode: Mode,
    pass: Pass,
    machine: &Machine,
) -> Outcome {
    if !FLT.has(x.dtype) || [cos, sin, out].iter().any(|t| t.dtype != x.dtype) {
        return refuse(format!(
            "x is {:?}, cos {:?}, sin {:?}, out {:?}: all must be one of FLOAT, FLOAT16, BF16",
            x.dtype, cos.dtype, sin.dtype, out.dtype
        ));
    }
    // Later releases take TND too; what runs here is to run on all of them.
    if x.dims.len() != 4 {
        return refuse(format!("x has {} dimensions, 4 are expected", x.dims.len()));
    }
    if out.dims != x.dims || cos.dims != sin.dims || cos.dims.len() != x.dims.len() {
        return refuse(format!(
            "x {:?} and out {:?} must agree, cos {:?} and sin {:?} too, with as many axes as x",
            x.dims, out.dims, cos.dims, sin.dims
        ));
    }
    let width = x.dims[x.dims.len() - 1];
    if cos.dims[cos.dims.len() - 1] != width {
        return refuse(format!(
            "cos has width {}, x has {width}",
            cos.dims[cos.dims.len() - 1]
        ));
    }
    let part = if mode == Mode::Quarter { 4 } else { 2 };
    if width == 0 || width >= MAX_HEAD_DIM || !width.is_multiple_of(part) {
        return refuse(format!(
            "D is {width}: a positive multiple of {part} below {MAX_HEAD_DIM} is expected"
        ));
    }
    if machine.architecture == 2201 && matches!(mode, Mode::Quarter | Mode::InterleaveHalf) {
        return refuse(format!(
            "mode {mode:?} needs an Ascend 950, the device is dav-2201"
        ));
    }
    let refusals: Vec<String> = ORDERS
        .iter()
        .map(|order| accepts(order, x, cos, mode, pass, machine.vector_cores as usize))
        .filter_map(Result::err)
        .collect();
    if refusals.len() == ORDERS.len() {
        refuse(refusals.join("; "))
    } else {
        Ok(())
    }
}

/// For each row of `x`, the row of cos and sin that it uses.
fn angle_rows(x: &Tensor, cos: &Tensor) -> Vec<usize> {
    let axes = x.dims.len() - 1;
    let mut rows = vec![0];
    for axis in 0..axes {
        let repeat = cos.dims[axis] == 1;
        rows = rows
            .into_iter()
            .flat_map(|row| {
                (0..x.dims[axis]).map(move |i| {
                    if repeat {
                        row
                    } else {
                        row * cos.dims[axis] + i
                    }
                })
            })
            .collect();
    }
    rows
}

/// y = x*cos + rotate(x)*sin, computed in f32.
pub(crate) fn rotate(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    rows: &[usize],
    terms: &[(usize, usize, f32)],
) -> Vec<f32> {
    let width = terms.len();
    let mut y = vec![0.0; x.len()];
    for (row, angle) in rows.iter().enumerate() {
        for (i, (straight, turned, sign)) in terms.iter().enumerate() {
            let (c, s) = (cos[angle * width + i], sin[angle * width + i]);
            y[row * width + i] = x[row * width + straight] * c + sign * x[row * width + turned] * s;
        }
    }
    y
}

pub(crate) fn forward(
    x: &Operand,
    cos: &Operand,
    sin: &Operand,
    mode: i64,
    out: &Operand,
) -> Outcome<Kernel> {
    let mode = Mode::from_code(mode)?;
    check(
        x,
        cos,
        sin,
        out,
        mode,
        Pass::Forward,
        &sim().machine.clone(),
    )?;
    let (x, cos, sin, out) = (x.clone(), cos.clone(), sin.clone(), out.clone());
    kernel(move |data| {
        let terms = mode.terms(x.dims[x.rank() - 1]);
        let rows = angle_rows(&x, &cos);
        let (values, c, s) = (data.read(&x)?, data.read(&cos)?, data.read(&sin)?);
        data.write(&out, &rotate(&values, &c, &s, &rows, &terms))
    })
}

/// What the gradient operator takes and gives. dcos and dsin are mandatory, and without x nothing is written to them: here
/// they come only together with x.
pub(crate) struct GradTensors {
    pub(crate) dy: Operand,
    pub(crate) cos: Operand,
    pub(crate) sin: Operand,
    pub(crate) x: Option<Operand>,
    pub(crate) dx: Operand,
    pub(crate) angles: Option<(Operand, Operand)>,
}

pub(crate) fn gradient(tensors: GradTensors, mode: i64) -> Outcome<Kernel> {
    let mode = Mode::from_code(mode)?;
    let GradTensors {
        dy,
        cos,
        sin,
        x,
        dx,
        angles,
    } = tensors;
    check(
        &dy,
        &cos,
        &sin,
        &dx,
        mode,
        Pass::Gradient,
        &sim().machine.clone(),
    )?;
    if x.is_some() != angles.is_some() {
        return refuse("dcos and dsin come exactly when x is given");
    }
    if let (Some(x), Some((dcos, dsin))) = (&x, &angles) {
        if x.dims != dy.dims || dcos.dims != cos.dims || dsin.dims != sin.dims {
            return refuse(format!(
                "x {:?}, dcos {:?} and dsin {:?} must have the shapes of dy, cos and sin",
                x.dims, dcos.dims, dsin.dims
            ));
        }
        let shared: usize = dy
            .dims
            .iter()
            .zip(&cos.dims)
            .take(dy.dims.len() - 1)
            .filter(|(a, b)| a != b)
            .map(|(a, _)| *a)
            .product();
        if shared > MAX_BATCH_HEADS_FOR_ANGLE_GRAD {
            return refuse(format!(
                "dcos and dsin sum over {shared} rows, at most {MAX_BATCH_HEADS_FOR_ANGLE_GRAD} (batch times heads) are taken"
            ));
        }
    }
    kernel(move |data| {
        let terms = mode.terms(dy.dims[dy.rank() - 1]);
        let width = terms.len();
        let rows = angle_rows(&dy, &cos);
        let (g, c, s): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (data.read(&dy)?, data.read(&cos)?, data.read(&sin)?);
        let mut grad = vec![0.0; g.len()];
        for (row, angle) in rows.iter().enumerate() {
            for (i, (straight, turned, sign)) in terms.iter().enumerate() {
                grad[row * width + straight] += g[row * width + i] * c[angle * width + i];
                grad[row * width + turned] += sign * g[row * width + i] * s[angle * width + i];
            }
        }
        if let (Some(x), Some((dcos, dsin))) = (&x, &angles) {
            let x: Vec<f32> = data.read(x)?;
            let (mut to_cos, mut to_sin) = (vec![0.0; c.len()], vec![0.0; s.len()]);
            for (row, angle) in rows.iter().enumerate() {
                for (i, (straight, turned, sign)) in terms.iter().enumerate() {
                    to_cos[angle * width + i] += g[row * width + i] * x[row * width + straight];
                    to_sin[angle * width + i] +=
                        g[row * width + i] * sign * x[row * width + turned];
                }
            }
            data.write(dcos, &to_cos)?;
            data.write(dsin, &to_sin)?;
        }
        data.write(&dx, &grad)
    })
}
