//! Gradient checks of a device. It has no f64, so differences of its own forward would show
//! rounding, not gradients:
//! - its forward and its adjoint, each against the matrix oracle;
//! - the adjoint identity <R x, y> = <x, R' y>, between its forward and its adjoint alone;
//! - its gradients of cos and sin against differences of the rotation in f64, written out here.

use rope_ascend::rope::{Npu, Unit};
use rope_core::{Direction, reference::pair_channels};

use super::{Kernels, Path, engines};
use crate::buffer::{Buffer, DType};
use crate::cases::{self, NamedCase};
use crate::engine::{Case, Engine, EngineError};
use crate::gradcheck::{Depth, Part, Row, Rows, Worst, angle_gradients, parts};
use crate::tolerance::{self, Operation};

/// All checks over one case: in f32, f16 and bf16 at full depth, else in f32; by the cube unit in
/// the 16-bit types. What an engine is known not to take is a row that says so.
pub fn check(npu: &Npu, path: Path, named: &NamedCase, depth: Depth) -> Vec<Row> {
    let dtypes: &[DType] = match (path, depth) {
        (Path::Matrix, _) => &[DType::F16, DType::Bf16],
        (_, Depth::Full) => &[DType::F32, DType::F16, DType::Bf16],
        (_, Depth::Kernels) => &[DType::F32],
    };
    let mut rows = Rows::new(named);
    for engine in engines(npu, path) {
        for dtype in dtypes {
            let checked = rotations(engine.as_ref(), &named.case, *dtype);
            let [forward, adjoint, identity] = match checked {
                Ok(worst) => worst.map(Ok),
                // Said once: it is one refusal.
                Err(error) => {
                    rows.push("forward", engine.name(), *dtype, Err(error));
                    continue;
                }
            };
            rows.push("forward", engine.name(), *dtype, forward);
            rows.push("x", engine.name(), *dtype, adjoint);
            rows.push("adjoint identity", engine.name(), *dtype, identity);
        }
    }
    if path == Path::Kernels {
        let kernels = Kernels::new(npu, Unit::Vector);
        for dtype in dtypes {
            let found = cos_sin(&kernels, &named.case, *dtype);
            rows.push("cos_sin", kernels.name(), *dtype, found);
        }
    }
    rows.into_rows()
}

/// q or k, and the gradient of what becomes of it, exact in the type.
fn rounded(case: &Case, dtype: DType) -> Vec<Part> {
    let mut parts = parts(case);
    for part in &mut parts {
        part.x = Buffer::from_f64(dtype, &part.x).to_f64();
        // A linear loss: its gradient is v, without rounding.
        part.loss.w.fill(0.0);
        part.loss.v = Buffer::from_f64(dtype, &part.loss.v).to_f64();
    }
    parts
}

/// The forward, the adjoint, and both together.
fn rotations(engine: &dyn Engine, case: &Case, dtype: DType) -> Result<[Worst; 3], EngineError> {
    let parts = rounded(case, dtype);
    let apply = |direction, x: Vec<Buffer>| -> Result<Vec<Vec<f64>>, EngineError> {
        let (q, k) = engine.apply(case, direction, &x[0], x.get(1))?;
        Ok(std::iter::once(q).chain(k).map(|y| y.to_f64()).collect())
    };
    let of = |values: fn(&Part) -> &[f64]| {
        let parts = parts.iter();
        parts
            .map(|part| Buffer::from_f64(dtype, values(part)))
            .collect()
    };
    let found = [
        apply(Direction::Forward, of(|part| &part.x))?,
        apply(Direction::Adjoint, of(|part| &part.loss.v))?,
    ];
    let allowed = |exact: f64| {
        let rotation = Operation::RotationBy {
            angles: engine.angle_dtype(dtype),
            scaling: case.spec.attention_scaling(),
        };
        tolerance::allowed(rotation, dtype, exact)
    };
    let mut worst = [Worst::NONE; 3];
    let (mut left, mut right, mut slack) = (0.0, 0.0, 0.0);
    for (i, part) in parts.iter().enumerate() {
        for (direction, input, output) in [
            (Direction::Forward, &part.x, 0),
            (Direction::Adjoint, &part.loss.v, 1),
        ] {
            let exact = cases::exact(case, direction, part.heads, input)?;
            worst[output].see_all(&found[output][i], &exact, allowed);
        }
        let (y, dx) = (&found[0][i], &found[1][i]);
        left += dot(y, &part.loss.v);
        right += dot(&part.x, dx);
        slack += y
            .iter()
            .zip(&part.loss.v)
            .map(|(y, v)| allowed(*y) * v.abs())
            .sum::<f64>();
        slack += dx
            .iter()
            .zip(&part.x)
            .map(|(dx, x)| allowed(*dx) * x.abs())
            .sum::<f64>();
    }
    worst[2].see(left, right, slack);
    Ok(worst)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn cos_sin(kernels: &Kernels, case: &Case, dtype: DType) -> Result<Worst, EngineError> {
    let parts = rounded(case, dtype);
    let forward = |cos: &[f64], sin: &[f64]| {
        let rotated = parts.iter().map(|part| rotated(case, part, cos, sin));
        Ok(rotated.collect())
    };
    let analytic = |_: &[f64], _: &[f64]| {
        let buffers: Vec<[Buffer; 2]> = parts
            .iter()
            .map(|part| [&part.x, &part.loss.v].map(|x| Buffer::from_f64(dtype, x)))
            .collect();
        let pair = |buffers: &'_ [Buffer; 2]| -> [Buffer; 2] { buffers.clone() };
        let (q, k) = (pair(&buffers[0]), buffers.get(1).map(pair));
        let k = k.as_ref().map(|[x, dy]| [x, dy]);
        kernels.angle_gradients(case, [&q[0], &q[1]], k)
    };
    // A lane's gradient is a sum of two products of order 1 for each head of its token, in f32.
    let heads = case.heads + case.kv_heads;
    let shared = (case.batch * case.seq) / case.positions.tokens().max(1);
    let terms = (2 * heads * shared) as f64;
    let rounding = terms * terms * tolerance::unit(DType::F32);
    angle_gradients(case, &parts, forward, analytic, rounding)
}

/// The rotation in f64 from given cos and sin, by the formula of a pair.
fn rotated(case: &Case, part: &Part, cos: &[f64], sin: &[f64]) -> Vec<f64> {
    let geometry = case.spec.geometry();
    let (lanes, pairs) = (geometry.lane_count(), geometry.pairs());
    let mut y = part.x.clone();
    for (row, start) in &part.rows {
        let start = start + geometry.rotary_offset();
        for pair in 0..pairs {
            let ([in1, in2], [out1, out2]) =
                pair_channels(geometry.pairing(), geometry.rotary_dim(), pair);
            let first = row * lanes + pair;
            let second = if geometry.per_channel() {
                first + pairs
            } else {
                first
            };
            let (x1, x2) = (part.x[start + in1], part.x[start + in2]);
            y[start + out1] = cos[first] * x1 - sin[first] * x2;
            y[start + out2] = sin[second] * x1 + cos[second] * x2;
        }
    }
    y
}
