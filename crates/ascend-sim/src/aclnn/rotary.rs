//! RotaryPositionEmbedding and its gradient, and ApplyRotaryPosEmbGrad.

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

    /// For each output channel: the input channel times cos, and the signed input channel times
    /// sin.
    pub(crate) fn terms(self, width: usize) -> Vec<(usize, usize, f32)> {
        let half = |i: usize, width: usize, first: usize| {
            let middle = width / 2;
            if i < middle {
                (first + i, first + i + middle, -1.0)
            } else {
                (first + i, first + i - middle, 1.0)
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

/// A memory order that the operator knows.
struct Order {
    name: &'static str,
    batch: usize,
    heads: usize,
    seq: usize,
    /// Choices of the first axes that cos and sin may have at full length in half mode; interleave
    /// mode takes the first row only.
    angle_axes: [[bool; 3]; 3],
}

const fn order(
    name: &'static str,
    [batch, heads, seq]: [usize; 3],
    angle_axes: [[bool; 3]; 3],
) -> Order {
    Order {
        name,
        batch,
        heads,
        seq,
        angle_axes,
    }
}

const ORDERS: [Order; 3] = [
    order(
        "BNSD",
        [0, 1, 2],
        [[false, false, true], [true, false, true], [true; 3]],
    ),
    order(
        "BSND",
        [0, 2, 1],
        [[false, true, false], [true, true, false], [true; 3]],
    ),
    order(
        "SBND",
        [1, 2, 0],
        [[true, false, false], [true, true, false], [true; 3]],
    ),
];

/// The limit that keeps the operator from taking this order.
fn refusal(
    order: &Order,
    x: &Tensor,
    cos: &Tensor,
    mode: Mode,
    pass: Pass,
    cores: usize,
) -> Option<String> {
    let fits = |axes: &&[bool; 3]| {
        let mut axes = axes.iter().enumerate();
        axes.all(|(axis, full)| cos.dims[axis] == if *full { x.dims[axis] } else { 1 })
    };
    let allowed = match mode {
        Mode::Half | Mode::Quarter => &order.angle_axes[..],
        Mode::Interleave | Mode::InterleaveHalf => &order.angle_axes[..1],
    };
    let refuse = |limit: String| Some(format!("{}: {limit}", order.name));
    let Some(full) = allowed.iter().find(fits) else {
        return refuse(format!(
            "cos and sin of shape {:?} do not fit x of {:?} in {mode:?} mode",
            cos.dims, x.dims
        ));
    };
    let [batch, heads, seq] = [order.batch, order.heads, order.seq].map(|axis| x.dims[axis]);
    if mode == Mode::Half && (batch >= MAX_BATCH_HEADS || heads >= MAX_BATCH_HEADS) {
        return refuse(format!(
            "batch {batch} and heads {heads} must both be below {MAX_BATCH_HEADS}"
        ));
    }
    if mode == Mode::Interleave && batch * heads >= MAX_BATCH_HEADS {
        return refuse(format!(
            "batch {batch} times heads {heads} must be below {MAX_BATCH_HEADS} in interleave mode"
        ));
    }
    let per_batch = batch > 1 && full[order.batch] && !full[order.heads];
    if pass == Pass::Gradient && order.name != "SBND" && per_batch && batch >= seq {
        return refuse(format!(
            "with angles of each batch, batch {batch} must be below the sequence {seq}"
        ));
    }
    if mode == Mode::Half && order.name == "BNSD" && *full != [true; 3] {
        let width = x.dims[x.rank() - 1];
        let aligned = (width / 2).is_multiple_of(32 / x.dtype.bytes() as usize);
        if aligned && batch * heads > 8 * seq {
            return refuse(format!(
                "batch times heads {} must be at most 8 times the sequence {seq}",
                batch * heads
            ));
        }
        if !aligned && 2 * batch * heads > seq.div_ceil(cores) && width < 80 {
            return refuse(format!(
                "D of {width} is unaligned, below 80, and twice batch times heads {} is above \
                 the sequence per core",
                batch * heads
            ));
        }
    }
    None
}

/// Checks the limits that forward and gradient share; `out` is the output of x's shape.
fn check([x, cos, sin, out]: [&Tensor; 4], mode: Mode, pass: Pass, machine: &Machine) -> Outcome {
    if !FLT.has(x.dtype) || [cos, sin, out].iter().any(|t| t.dtype != x.dtype) {
        return refuse(format!(
            "x is {:?}, cos {:?}, sin {:?}, out {:?}: all must be one of FLOAT, FLOAT16, BF16",
            x.dtype, cos.dtype, sin.dtype, out.dtype
        ));
    }
    // Later releases take TND too; what runs here is to run on all of them.
    if x.rank() != 4 {
        return refuse(format!("x has {} dimensions, 4 are expected", x.rank()));
    }
    if out.dims != x.dims || cos.dims != sin.dims || cos.rank() != x.rank() {
        return refuse(format!(
            "x {:?} and out {:?} must agree, cos {:?} and sin {:?} too, with as many axes as x",
            x.dims, out.dims, cos.dims, sin.dims
        ));
    }
    let (width, angle_width) = (x.dims[3], cos.dims[3]);
    if angle_width != width {
        return refuse(format!("cos has width {angle_width}, x has {width}"));
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
    let cores = machine.vector_cores as usize;
    let refusals = ORDERS.map(|order| refusal(&order, x, cos, mode, pass, cores));
    match refusals {
        [Some(first), Some(second), Some(third)] => refuse(format!("{first}; {second}; {third}")),
        _ => Ok(()),
    }
}

/// For each row of `x`, the row of cos and sin that it uses.
fn angle_rows(x: &Tensor, cos: &Tensor) -> Vec<usize> {
    let mut rows = vec![0];
    for (dim, angle_dim) in x.dims.iter().zip(&cos.dims).take(x.rank() - 1) {
        let inner = |row: usize| {
            let step = usize::from(*angle_dim != 1);
            (0..*dim).map(move |i| row * angle_dim + i * step)
        };
        rows = rows.into_iter().flat_map(inner).collect();
    }
    rows
}

/// y = x·cos + rotate(x)·sin, computed in f32.
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
        for (i, (by_cos, by_sin, sign)) in terms.iter().enumerate() {
            let (c, s) = (cos[angle * width + i], sin[angle * width + i]);
            y[row * width + i] = x[row * width + by_cos] * c + sign * x[row * width + by_sin] * s;
        }
    }
    y
}

pub(crate) fn forward(
    x: Operand,
    cos: Operand,
    sin: Operand,
    mode: i64,
    out: Operand,
) -> Outcome<Kernel> {
    let mode = Mode::from_code(mode)?;
    check([&x, &cos, &sin, &out], mode, Pass::Forward, &sim().machine)?;
    out.expect_contiguous()?;
    kernel(move |data| {
        let terms = mode.terms(x.dims[x.rank() - 1]);
        let rows = angle_rows(&x, &cos);
        let (values, c, s) = (data.read(&x)?, data.read(&cos)?, data.read(&sin)?);
        data.write(&out, &rotate(&values, &c, &s, &rows, &terms))
    })
}

/// The inputs and outputs of the gradient operator. dcos and dsin are mandatory, but without x
/// nothing is written to them.
pub(crate) struct GradTensors {
    pub(crate) dy: Operand,
    pub(crate) cos: Operand,
    pub(crate) sin: Operand,
    pub(crate) x: Option<Operand>,
    pub(crate) dx: Operand,
    pub(crate) dcos: Operand,
    pub(crate) dsin: Operand,
}

pub(crate) fn gradient(tensors: GradTensors, mode: i64) -> Outcome<Kernel> {
    let mode = Mode::from_code(mode)?;
    let GradTensors {
        dy,
        cos,
        sin,
        x,
        dx,
        dcos,
        dsin,
    } = tensors;
    check([&dy, &cos, &sin, &dx], mode, Pass::Gradient, &sim().machine)?;
    for output in [&dx, &dcos, &dsin] {
        output.expect_contiguous()?;
    }
    if let Some(x) = &x {
        if x.dims != dy.dims || dcos.dims != cos.dims || dsin.dims != sin.dims {
            return refuse(format!(
                "x {:?}, dcos {:?} and dsin {:?} must have the shapes of dy, cos and sin",
                x.dims, dcos.dims, dsin.dims
            ));
        }
        let leading = dy.dims.iter().zip(&cos.dims).take(dy.rank() - 1);
        let summed: usize = leading.filter(|(a, b)| a != b).map(|(a, _)| *a).product();
        if summed > MAX_BATCH_HEADS_FOR_ANGLE_GRAD {
            return refuse(format!(
                "dcos and dsin sum over {summed} rows, at most {MAX_BATCH_HEADS_FOR_ANGLE_GRAD} \
                 (batch times heads) are taken"
            ));
        }
    }
    kernel(move |data| {
        let terms = mode.terms(dy.dims[dy.rank() - 1]);
        let rows = angle_rows(&dy, &cos);
        let g: Vec<f32> = data.read(&dy)?;
        let (c, s): (Vec<f32>, Vec<f32>) = (data.read(&cos)?, data.read(&sin)?);
        if let Some(x) = &x {
            let x: Vec<f32> = data.read(x)?;
            let mut sums = [vec![0.0; c.len()], vec![0.0; s.len()]];
            add_angle_gradients(&mut sums, &g, &x, &rows, &terms);
            data.write(&dcos, &sums[0])?;
            data.write(&dsin, &sums[1])?;
        }
        data.write(&dx, &adjoint(&g, &c, &s, &rows, &terms))
    })
}

/// dx of y = x·cos + rotate(x)·sin, computed in f32.
fn adjoint(
    g: &[f32],
    cos: &[f32],
    sin: &[f32],
    rows: &[usize],
    terms: &[(usize, usize, f32)],
) -> Vec<f32> {
    let width = terms.len();
    let mut dx = vec![0.0; g.len()];
    for (row, angle) in rows.iter().enumerate() {
        for (i, (by_cos, by_sin, sign)) in terms.iter().enumerate() {
            dx[row * width + by_cos] += g[row * width + i] * cos[angle * width + i];
            dx[row * width + by_sin] += sign * g[row * width + i] * sin[angle * width + i];
        }
    }
    dx
}

/// Adds the gradients of cos and sin that the rows of `x` have.
fn add_angle_gradients(
    [dcos, dsin]: &mut [Vec<f32>; 2],
    g: &[f32],
    x: &[f32],
    rows: &[usize],
    terms: &[(usize, usize, f32)],
) {
    let width = terms.len();
    for (row, angle) in rows.iter().enumerate() {
        for (i, (by_cos, by_sin, sign)) in terms.iter().enumerate() {
            let g = g[row * width + i];
            dcos[angle * width + i] += g * x[row * width + by_cos];
            dsin[angle * width + i] += g * sign * x[row * width + by_sin];
        }
    }
}

/// ApplyRotaryPosEmbGrad's layouts: number, name, axes, and the axis of the batch.
const LAYOUTS: [(i64, &str, usize, Option<usize>); 3] = [
    (1, "BSND", 4, Some(0)),
    (2, "SBND", 4, Some(1)),
    (4, "TND", 3, None),
];
const MAX_HEAD_DIM_OF_BOTH: usize = 1024;

/// ApplyRotaryPosEmbGrad: gradients of q and k, each given as dy and perhaps x, by halves; with
/// both x also those of cos and sin. Source: its document and the checks of its tiling
/// (ops-transformer at 22c58ba39bca).
pub(crate) fn both_gradients(
    given: [(Operand, Option<Operand>); 2],
    [cos, sin]: [Operand; 2],
    mode: &str,
    layout: i64,
    written: [Operand; 4],
) -> Outcome<Kernel> {
    let architecture = sim().machine.architecture;
    if architecture != 3510 {
        return refuse(format!(
            "ApplyRotaryPosEmbGrad needs an Ascend 950, the device is dav-{architecture}"
        ));
    }
    if mode != "half" {
        return refuse(format!("rotaryMode is {mode:?}, only \"half\" is taken"));
    }
    let Some((_, name, rank, batch)) = LAYOUTS.iter().find(|row| row.0 == layout) else {
        return refuse(format!(
            "layout is {layout}: 1 BSND, 2 SBND and 4 TND are taken"
        ));
    };
    let [(dq, q), (dk, k)] = given;
    let [dq_out, dk_out, dcos, dsin] = written;
    if q.is_some() != k.is_some() {
        return refuse("query and key must both be given, or neither".to_owned());
    }
    let heads = rank - 2;
    for tensor in [&dq, &dk, &cos, &sin, &dq_out, &dk_out] {
        if tensor.rank() != *rank || tensor.dtype != dq.dtype || !FLT.has(tensor.dtype) {
            return refuse(format!(
                "{name} takes {rank} axes and one of FLOAT, FLOAT16, BF16: found {:?} of {:?}",
                tensor.dims, tensor.dtype
            ));
        }
        if tensor.dims.contains(&0) {
            return refuse(format!("empty tensor {:?}", tensor.dims));
        }
        // All axes but the heads; cos and sin may have one batch.
        let is_angle = std::ptr::eq(tensor, &raw const cos) || std::ptr::eq(tensor, &raw const sin);
        for (axis, size) in tensor.dims.iter().enumerate() {
            let fits = match axis {
                _ if axis == heads => !is_angle || *size == 1,
                _ if is_angle && Some(axis) == *batch => *size == 1 || *size == dq.dims[axis],
                _ => *size == dq.dims[axis],
            };
            if !fits {
                return refuse(format!(
                    "{name}: {:?} does not fit gradQueryEmbed of {:?}",
                    tensor.dims, dq.dims
                ));
            }
        }
    }
    let width = dq.dims[rank - 1];
    if width > MAX_HEAD_DIM_OF_BOTH || !width.is_multiple_of(2) {
        return refuse(format!(
            "D is {width}: an even number of at most {MAX_HEAD_DIM_OF_BOTH} is expected"
        ));
    }
    let alike = |x: &Option<Operand>, dy: &Operand| {
        x.as_ref()
            .is_none_or(|x| x.dims == dy.dims && x.dtype == dy.dtype)
    };
    let angle_outputs = [&dcos, &dsin]
        .iter()
        .all(|out| q.is_none() || (out.dims == cos.dims && out.dtype == cos.dtype));
    if cos.dims != sin.dims
        || dq_out.dims != dq.dims
        || dk_out.dims != dk.dims
        || !alike(&q, &dq)
        || !alike(&k, &dk)
        || !angle_outputs
    {
        return refuse(format!(
            "cos {:?} and sin {:?} must agree, and the outputs, query and key with their inputs",
            cos.dims, sin.dims
        ));
    }
    for output in [&dq_out, &dk_out, &dcos, &dsin] {
        output.expect_contiguous()?;
    }
    kernel(move |data| {
        let terms = Mode::Half.terms(width);
        let (c, s): (Vec<f32>, Vec<f32>) = (data.read(&cos)?, data.read(&sin)?);
        let mut sums = [vec![0.0; c.len()], vec![0.0; s.len()]];
        for (dy, x, dx) in [(&dq, &q, &dq_out), (&dk, &k, &dk_out)] {
            let rows = angle_rows(dy, &cos);
            let g: Vec<f32> = data.read(dy)?;
            if let Some(x) = x {
                let x: Vec<f32> = data.read(x)?;
                add_angle_gradients(&mut sums, &g, &x, &rows, &terms);
            }
            data.write(dx, &adjoint(&g, &c, &s, &rows, &terms))?;
        }
        if q.is_some() {
            data.write(&dcos, &sums[0])?;
            data.write(&dsin, &sums[1])?;
        }
        Ok(())
    })
}
