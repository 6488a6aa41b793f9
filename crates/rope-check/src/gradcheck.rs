//! Gradient checks: every gradient that the implementations give against one that they do not
//! compute.
//!
//! Four questions, one row each per case, engine and type:
//! - is the adjoint the gradient of the forward? Central differences of the forward in f64, through
//!   the loss L = sum(w y^2 / 2 + v y), against the adjoint of dL/dy = w y + v. No linearity is
//!   assumed.
//! - are the gradients of cos and sin those of the forward? The same, with cos and sin displaced;
//!   and with the frequencies and positions displaced that angles per head are made of.
//! - are the gradients of x and of the weight those of the norm with the rotation? By differences
//!   too, in f64.
//! - does autodiff hand the gradients on as it should? burn's fused op, in the types that models
//!   train in, against the matrix oracle and against the composed op: with and without gradient
//!   checkpointing, each input tracked and not, held elsewhere and not, views, and gradients
//!   without memory of their own. The same of the inverse as an operation of its own.
//!
//! Of another program's rotation, [`check_dump`] asks whether its gradient is that of its forward.
//!
//! Differences are taken for one channel of all rows (heads of tokens) at once. Rows must not mix,
//! so the loss of a row may only answer to its own displacement; each row has a step of its own,
//! and a kernel that lets one row into another shows as a wrong gradient. So all elements are
//! covered at the cost of one row.

mod dump;
mod frequencies;
mod norm;
mod summary;

pub use dump::check_dump;
pub use summary::{CheckGroup, CheckSummary, in_order};

use std::collections::HashSet;
use std::iter::once;

use burn::tensor::{Device, Tensor, TensorData};
use rope_burn::{Implementation, RotaryAngles};
use rope_core::{Angles, Direction, HeadsMut, HeadsRef, Layout, NormOrder, RopeError, Rotator};

use crate::buffer::{Buffer, DType};
use crate::cases::{self, NamedCase};
use crate::engine::{
    self, Burn, Case, Engine, EngineError, Placed, engine_name, expect_dtype, host_engines,
};
use crate::tolerance::{Operation, allowed};

/// One gradient checked.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    /// Name of the case.
    pub case: String,
    /// The check.
    pub check: &'static str,
    /// The engine that computed it.
    pub engine: String,
    /// The type of q and k.
    pub dtype: DType,
    /// The largest error, as far as the tolerance varies the largest in units of it.
    pub max_error: f64,
    /// The error allowed there.
    pub tolerance: f64,
    /// True if all errors were within tolerance.
    pub pass: bool,
    /// Why there is no error to report, or what else went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The engine's limit that kept the check from running; such a row neither passed nor failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// The error that used up most of its tolerance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worst {
    error: f64,
    tolerance: f64,
}

impl Worst {
    pub(crate) const NONE: Self = Self {
        error: 0.0,
        tolerance: 1.0,
    };

    /// An error that is not finite, and one that anything would be allowed for, stays the worst.
    const UNBOUNDED: Self = Self {
        error: f64::INFINITY,
        tolerance: 0.0,
    };

    pub(crate) fn see(&mut self, found: f64, expected: f64, tolerance: f64) {
        let error = (found - expected).abs();
        if !(error.is_finite() && tolerance.is_finite()) {
            *self = Self::UNBOUNDED;
        } else if self.error.is_finite() && error * self.tolerance >= self.error * tolerance {
            *self = Self { error, tolerance };
        }
    }

    pub(crate) fn see_all(
        &mut self,
        found: &[f64],
        expected: &[f64],
        tolerance: impl Fn(f64) -> f64,
    ) {
        if found.len() != expected.len() {
            self.see(f64::NAN, 0.0, 0.0);
        }
        for (found, expected) in found.iter().zip(expected) {
            self.see(*found, *expected, tolerance(*expected));
        }
    }

    fn pass(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// How thoroughly a case is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Everything.
    Full,
    /// The CPU kernels in full; burn's fused op by autodiff in f32 and bf16.
    Kernels,
}

/// The cases in which all pairs of factors occur, the models' and those of angles per head in full,
/// the rest of the matrix for the kernels.
///
/// # Errors
/// Those of [`cases::matrix`]; none are expected.
pub fn suite() -> Result<Vec<(NamedCase, Depth)>, RopeError> {
    let mut full = cases::pairwise()?;
    let known: HashSet<String> = full.iter().map(|named| named.name.clone()).collect();
    full.extend(cases::models()?);
    full.extend(cases::per_head()?);
    let rest = cases::matrix()?.into_iter();
    let rest = rest.filter(|named| !known.contains(&named.name));
    Ok(at(full, Depth::Full)
        .chain(at(rest, Depth::Kernels))
        .collect())
}

/// The cases that are quick enough for an unoptimised build: [`cases::pairwise`] and
/// [`cases::per_head`] in full, [`cases::models`] for the kernels.
///
/// # Errors
/// As [`suite`].
pub fn quick_suite() -> Result<Vec<(NamedCase, Depth)>, RopeError> {
    let models = at(cases::models()?, Depth::Kernels);
    let full = cases::pairwise()?.into_iter().chain(cases::per_head()?);
    Ok(at(full, Depth::Full).chain(models).collect())
}

fn at(
    cases: impl IntoIterator<Item = NamedCase>,
    depth: Depth,
) -> impl Iterator<Item = (NamedCase, Depth)> {
    cases.into_iter().map(move |named| (named, depth))
}

/// All checks over one case; a failure to compute is a row that does not pass.
pub fn check(named: &NamedCase, depth: Depth) -> Vec<Row> {
    let mut rows = Rows::new(named);
    for engine in gradient_engines(depth) {
        let found = input_gradients(engine.as_ref(), &named.case);
        rows.push("x", engine.name(), DType::F64, found);
    }
    rows.push(
        "cos_sin",
        "cpu".into(),
        DType::F64,
        cpu_angle_gradients(&named.case),
    );
    for (check, order) in NORMS {
        let norm = norm::case_norm(&named.name, order);
        let found = norm.and_then(|norm| norm::cpu(&named.case, norm));
        rows.push(check, "cpu".into(), DType::F64, found);
    }
    let implementations = [Implementation::Fused, Implementation::Composed];
    rows.autodiff(&Device::flex(), &implementations, depth);
    rows.into_rows()
}

/// The checks of burn's fused op over one case, on a device without autodiff; types that the device
/// lacks are skipped.
pub fn check_on(device: &Device, named: &NamedCase, depth: Depth) -> Vec<Row> {
    let mut rows = Rows::new(named);
    if depth == Depth::Full {
        let engine = Burn {
            operation: Direction::Forward,
            implementation: Implementation::Fused,
            device: device.clone(),
        };
        let found = input_gradients(&engine, &named.case);
        rows.push("x", engine.name(), DType::F64, found);
    }
    rows.autodiff(device, &[Implementation::Fused], depth);
    rows.into_rows()
}

/// The engines whose forward is differenced: those with f64, instruction sets and angle sources
/// aside (they are equal bit for bit, which the differential tests show).
fn gradient_engines(depth: Depth) -> Vec<Box<dyn Engine>> {
    let wanted: &[&str] = match depth {
        Depth::Full => &["cpu/portable", "burn/fused", "burn/composed"],
        Depth::Kernels => &["cpu/portable"],
    };
    let mut engines = host_engines();
    engines.retain(|engine| wanted.contains(&engine.name().as_str()));
    engines
}

/// The norm with the rotation, in both orders.
const NORMS: [(&str, NormOrder); 2] = [
    ("norm", NormOrder::BeforeRotation),
    ("norm after", NormOrder::AfterRotation),
];

/// The rows of one case.
pub(crate) struct Rows<'c> {
    named: &'c NamedCase,
    rows: Vec<Row>,
}

impl<'c> Rows<'c> {
    pub(crate) fn new(named: &'c NamedCase) -> Self {
        let rows = Vec::new();
        Self { named, rows }
    }

    pub(crate) fn into_rows(self) -> Vec<Row> {
        self.rows
    }

    pub(crate) fn push(
        &mut self,
        check: &'static str,
        engine: String,
        dtype: DType,
        found: Result<Worst, EngineError>,
    ) {
        let skipped = found.as_ref().err().and_then(EngineError::limit);
        let failure = found.as_ref().err().filter(|_| skipped.is_none());
        let problem = failure.map(ToString::to_string);
        let worst = found.unwrap_or(Worst::UNBOUNDED);
        self.rows.push(Row {
            case: self.named.name.clone(),
            check,
            engine,
            dtype,
            max_error: worst.error,
            tolerance: worst.tolerance,
            pass: skipped.is_none() && worst.pass(),
            problem,
            skipped,
        });
    }

    fn autodiff(&mut self, device: &Device, by: &[Implementation], depth: Depth) {
        if self.named.case.layout == Layout::Tnd {
            self.autodiff_of::<3>(device, by, depth);
        } else {
            self.autodiff_of::<4>(device, by, depth);
        }
    }

    fn autodiff_of<const D: usize>(
        &mut self,
        device: &Device,
        by: &[Implementation],
        depth: Depth,
    ) {
        let case = &self.named.case;
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for (check, implementation, from) in Autodiff::ROWS {
                if !by.contains(&implementation) {
                    continue;
                }
                if depth == Depth::Full || (from == depth && dtype != DType::F16) {
                    let found = expect_dtype(device, implementation, dtype)
                        .and_then(|()| check.run::<D>(device, case, implementation, dtype, depth));
                    self.push(check.name(), engine_name(implementation), dtype, found);
                }
            }
        }
        if depth == Depth::Kernels {
            return;
        }
        for &implementation in by {
            let inverse = Burn {
                operation: Direction::Adjoint,
                implementation,
                device: device.clone(),
            };
            let found = input_gradients(&inverse, case);
            self.push(INVERSE, inverse.name(), DType::F64, found);
        }
        for (check, direction) in [
            ("cos_sin", Direction::Forward),
            ("cos_sin of the adjoint", Direction::Adjoint),
        ] {
            for &implementation in by {
                let found = expect_dtype(device, implementation, DType::F64).and_then(|()| {
                    burn_angle_gradients::<D>(device, case, implementation, direction)
                });
                self.push(check, engine_name(implementation), DType::F64, found);
            }
        }
        let burn_order = norm::order_of_burn(&self.named.name);
        for (check, order) in NORMS.into_iter().filter(|(_, order)| *order == burn_order) {
            for &implementation in by {
                let found = expect_dtype(device, implementation, DType::F64)
                    .and_then(|()| norm::case_norm(&self.named.name, order))
                    .and_then(|norm| norm::burn::<D>(device, case, norm, implementation));
                self.push(check, engine_name(implementation), DType::F64, found);
            }
        }
        let Some(frequencies) = &case.head_frequencies else {
            return;
        };
        for (check, shared) in [("frequencies", false), ("frequencies of all heads", true)] {
            for &implementation in by {
                let found = expect_dtype(device, implementation, DType::F64).and_then(|()| {
                    frequencies::gradients::<D>(device, case, frequencies, implementation, shared)
                });
                self.push(check, engine_name(implementation), DType::F64, found);
            }
        }
    }
}

/// L = sum(w y^2 / 2 + v y).
pub(crate) struct Loss {
    pub(crate) w: Vec<f64>,
    pub(crate) v: Vec<f64>,
}

impl Loss {
    fn over(&self, y: &[f64], range: std::ops::Range<usize>) -> f64 {
        range
            .map(|i| (0.5 * self.w[i] * y[i] + self.v[i]) * y[i])
            .sum()
    }

    fn gradient(&self, y: &[f64]) -> Vec<f64> {
        y.iter()
            .zip(self.w.iter().zip(&self.v))
            .map(|(y, (w, v))| w * y + v)
            .collect()
    }
}

/// q or k.
pub(crate) struct Part {
    pub(crate) heads: usize,
    pub(crate) x: Vec<f64>,
    pub(crate) loss: Loss,
    /// `(row of the angles, first element)` of each head of each token.
    pub(crate) rows: Vec<(usize, usize)>,
}

pub(crate) fn parts(case: &Case) -> Vec<Part> {
    [(case.heads, 1), (case.kv_heads, 4)]
        .into_iter()
        .filter(|(heads, _)| *heads > 0)
        .map(|(heads, seed)| {
            let count = case.contiguous(heads).elems();
            Part {
                heads,
                x: cases::values(seed, count),
                loss: Loss {
                    w: cases::values(seed + 1, count),
                    v: cases::values(seed + 2, count),
                },
                rows: case.rows(heads),
            }
        })
        .collect()
}

/// The step of a row is this, times its factor; large, because the loss has no third derivative to
/// keep away from.
const STEP: f64 = 1.0 / 32.0;

/// The largest error of a derivative by rounding: differences of `terms` terms of order 1 over
/// twice the smaller step, weighted 4/3 and 1/3 by Richardson.
fn difference_tolerance(terms: usize) -> f64 {
    let loss = 4.0 * terms as f64;
    f64::EPSILON * loss * 8.0 / STEP
}

/// A factor in [1, 2) for the displacement of row `row`.
fn row_factor(row: usize) -> f64 {
    1.0 + (row * 5 % 16) as f64 / 16.0
}

/// The derivatives at 0 of the values of `f`: central differences at two steps, and Richardson's
/// extrapolation.
fn derivatives(
    mut f: impl FnMut(f64) -> Result<Vec<f64>, EngineError>,
) -> Result<Vec<f64>, EngineError> {
    let mut central = |h: f64| -> Result<Vec<f64>, EngineError> {
        let (up, down) = (f(h)?, f(-h)?);
        Ok(up
            .iter()
            .zip(down)
            .map(|(up, down)| (up - down) / (2.0 * h))
            .collect())
    };
    let (wide, narrow) = (central(STEP)?, central(STEP / 2.0)?);
    Ok(wide
        .iter()
        .zip(narrow)
        .map(|(wide, narrow)| (4.0 * narrow - wide) / 3.0)
        .collect())
}

/// Differences of an engine's forward against its adjoint, for every element of q and k.
fn input_gradients(engine: &dyn Engine, case: &Case) -> Result<Worst, EngineError> {
    let parts = parts(case);
    let apply = |direction, x: &[Vec<f64>]| -> Result<Vec<Vec<f64>>, EngineError> {
        let x: Vec<Buffer> = x.iter().map(|x| Buffer::F64(x.clone())).collect();
        let (q, k) = engine.apply(case, direction, &x[0], x.get(1))?;
        Ok(once(q).chain(k).map(|y| y.to_f64()).collect())
    };
    let x: Vec<Vec<f64>> = parts.iter().map(|part| part.x.clone()).collect();
    let y = apply(Direction::Forward, &x)?;
    let dy: Vec<Vec<f64>> = parts
        .iter()
        .zip(&y)
        .map(|(p, y)| p.loss.gradient(y))
        .collect();
    let dx = apply(Direction::Adjoint, &dy)?;
    if dx.len() != parts.len() {
        return Err(EngineError::Burn("q and k do not come back".into()));
    }
    let head_dim = case.spec.head_dim();
    let mut worst = Worst::NONE;
    for channel in 0..head_dim {
        let mut displaced = x.clone();
        let derivatives = derivatives(|h| {
            for (part, x) in parts.iter().zip(&mut displaced) {
                for (row, (_, start)) in part.rows.iter().enumerate() {
                    x[start + channel] = part.x[start + channel] + h * row_factor(row);
                }
            }
            let y = apply(Direction::Forward, &displaced)?;
            let row_losses = parts.iter().zip(&y).flat_map(|(part, y)| {
                let rows = part.rows.iter();
                rows.map(|(_, start)| part.loss.over(y, *start..start + head_dim))
            });
            Ok(row_losses.collect())
        })?;
        let mut derivatives = derivatives.into_iter();
        for (part, dx) in parts.iter().zip(&dx) {
            for (row, (_, start)) in part.rows.iter().enumerate() {
                let expected = derivatives.next().unwrap_or(f64::NAN) / row_factor(row);
                let tolerance = difference_tolerance(head_dim);
                worst.see(dx[start + channel], expected, tolerance);
            }
        }
    }
    Ok(worst)
}

/// Differences over every lane of cos and sin, against what `analytic` says, which may be off by
/// `rounding`. Rows of angles do not mix.
pub(crate) fn angle_gradients(
    case: &Case,
    parts: &[Part],
    forward: impl Fn(&[f64], &[f64]) -> Result<Vec<Vec<f64>>, EngineError>,
    analytic: impl FnOnce(&[f64], &[f64]) -> Result<[Vec<f64>; 2], EngineError>,
    rounding: f64,
) -> Result<Worst, EngineError> {
    let given = case.angles::<f64>()?.cos_sin();
    let gradients = analytic(&given[0], &given[1])?;
    let (rows, lanes) = (case.angle_rows(), case.spec.geometry().lane_count());
    let head_dim = case.spec.head_dim();
    let heads_per_row: usize = parts.iter().map(|p| p.rows.len()).sum::<usize>() / rows;
    let tolerance = difference_tolerance(heads_per_row * head_dim) + rounding;
    let mut worst = Worst::NONE;
    for (which, gradient) in gradients.iter().enumerate() {
        if gradient.len() != rows * lanes {
            return Err(EngineError::Burn(format!(
                "the gradient of cos or sin has {} values, expected {}",
                gradient.len(),
                rows * lanes
            )));
        }
        for lane in 0..lanes {
            let mut displaced = given.clone();
            let derivatives = derivatives(|h| {
                for row in 0..rows {
                    let at = row * lanes + lane;
                    displaced[which][at] = given[which][at] + h * row_factor(row);
                }
                let y = forward(&displaced[0], &displaced[1])?;
                let mut losses = vec![0.0; rows];
                for (part, y) in parts.iter().zip(&y) {
                    for (row, start) in &part.rows {
                        losses[*row] += part.loss.over(y, *start..start + head_dim);
                    }
                }
                Ok(losses)
            })?;
            for (row, derivative) in derivatives.into_iter().enumerate() {
                let found = gradient[row * lanes + lane];
                worst.see(found, derivative / row_factor(row), tolerance);
            }
        }
    }
    Ok(worst)
}

/// Rows of cos and sin, as many as the case has.
fn angles<'a>(case: &Case, rows: &'a [f64]) -> Angles<'a, f64> {
    match case.head_frequencies {
        None => Angles::Tokens(rows),
        Some(_) => Angles::Heads {
            rows,
            heads: case.heads,
        },
    }
}

/// `Rotator::angle_gradients`, on q and k placed as the case says.
fn cpu_angle_gradients(case: &Case) -> Result<Worst, EngineError> {
    let (parts, lanes) = (parts(case), case.spec.geometry().lane_count());
    let forward = |cos: &[f64], sin: &[f64]| {
        let rows = cos.chunks_exact(lanes).zip(sin.chunks_exact(lanes));
        let rows: Vec<f64> = rows.flat_map(|(cos, sin)| [cos, sin].concat()).collect();
        let rotator = Rotator::new(case.spec.geometry(), angles(case, &rows))?;
        let mut y: Vec<Vec<f64>> = parts.iter().map(|part| part.x.clone()).collect();
        for (part, y) in parts.iter().zip(&mut y) {
            rotator.rotate(HeadsMut::new(y, case.contiguous(part.heads))?, None)?;
        }
        Ok(y)
    };
    let analytic = |cos: &[f64], sin: &[f64]| {
        // The gradients are linear in x and in its gradient: no angles are read.
        let rotator = Rotator::new(case.spec.geometry(), angles(case, &[]))?;
        let y = forward(cos, sin)?;
        let placed: Vec<[Placed<f64>; 2]> = parts
            .iter()
            .zip(&y)
            .map(|(part, y)| {
                [&part.x, &part.loss.gradient(y)].map(|x| Placed::new(case, part.heads, x))
            })
            .collect();
        let views = placed
            .iter()
            .map(|[x, dy]| {
                Ok((
                    HeadsRef::new(&x.source, x.layout)?,
                    HeadsRef::new(&dy.source, dy.layout)?,
                ))
            })
            .collect::<Result<Vec<_>, EngineError>>()?;
        // Overwritten, whatever they hold.
        let mut gradients = vec![f64::NAN; cos.len() + sin.len()];
        rotator.angle_gradients(views[0], views.get(1).copied(), &mut gradients)?;
        let half = |start| {
            let rows = gradients.chunks_exact(2 * lanes);
            rows.flat_map(move |row| row[start..start + lanes].to_vec())
        };
        Ok([half(0).collect(), half(lanes).collect()])
    };
    angle_gradients(case, &parts, forward, analytic, 0.0)
}

fn with_autodiff(device: &Device, checkpointing: bool) -> Device {
    let device = device.clone().autodiff();
    if checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    }
}

fn no_q() -> EngineError {
    EngineError::Burn("there is no q".into())
}

fn f64_tensor<const D: usize>(values: &[f64], dims: Vec<usize>, device: &Device) -> Tensor<D> {
    let data = TensorData::new(values.to_vec(), dims);
    Tensor::from_data(data, (device, burn::tensor::DType::F64))
}

/// burn's gradients of cos and sin that require them.
fn burn_angle_gradients<const D: usize>(
    device: &Device,
    case: &Case,
    implementation: Implementation,
    direction: Direction,
) -> Result<Worst, EngineError> {
    let (device, parts) = (with_autodiff(device, false), parts(case));
    let rotary = engine::rotary(case, implementation)?;
    let lanes = case.spec.geometry().lane_count();
    // One head is one row for all heads.
    let heads = case.head_frequencies.as_ref().map_or(1, |_| case.heads);
    let shape = |x: &[f64]| vec![x.len() / lanes / heads, heads, lanes];
    let tensor = |x: &[f64]| f64_tensor::<3>(x, shape(x), &device);
    let angles = |cos: &Tensor<3>, sin: &Tensor<3>| {
        RotaryAngles::per_head(cos.clone(), sin.clone()).map_err(engine::burn_error)
    };
    let tensors = |part: &Part| -> [Tensor<D>; 3] {
        [&part.x, &part.loss.w, &part.loss.v]
            .map(|x| engine::place(case, &Buffer::F64(x.clone()), part.heads, &device))
    };
    let rotate = |angles: &RotaryAngles| -> Result<_, EngineError> {
        let mut x = parts.iter().map(|part| tensors(part)[0].clone());
        let (q, k) = (x.next().ok_or_else(no_q)?, x.next());
        let (q, k) = engine::rotate(&rotary, direction, q, k, angles)?;
        Ok(once(q).chain(k))
    };
    let forward = |cos: &[f64], sin: &[f64]| {
        let y = rotate(&angles(&tensor(cos), &tensor(sin))?)?;
        y.map(|y| Ok(engine::read(y)?.to_f64())).collect()
    };
    let analytic = |cos: &[f64], sin: &[f64]| {
        let [cos, sin] = [cos, sin].map(|x| tensor(x).require_grad());
        let angles = angles(&cos, &sin)?;
        let losses = parts.iter().zip(rotate(&angles)?).map(|(part, y)| {
            let [_, w, v] = tensors(part);
            engine::sum((w * 0.5 * y.clone() + v) * y)
        });
        let gradients = losses.reduce(|a, b| a + b).ok_or_else(no_q)?.backward();
        let gradient = |x: &Tensor<3>, what| match x.grad(&gradients) {
            Some(gradient) => Ok(engine::read(gradient)?.to_f64()),
            None => Err(EngineError::Burn(format!("no gradient of {what}"))),
        };
        Ok([gradient(&cos, "cos")?, gradient(&sin, "sin")?])
    };
    angle_gradients(case, &parts, forward, analytic, 0.0)
}

/// The check of the inverse as an operation of its own.
const INVERSE: &str = "inverse";

/// A check of training steps through burn's op.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Autodiff {
    /// Outputs and gradients against the oracle, for q and k tracked in every combination.
    Oracle,
    /// Against the composed op: each may be off by its tolerance.
    Composed,
    /// Against the oracle, for the loss sum(y): its gradient arrives as one element, broadcast,
    /// which must be read as such and not written to.
    Sum,
    /// The inverse as an operation of its own, against the oracle.
    Inverse,
}

impl Autodiff {
    /// In the order of the rows; the depth from which each runs.
    const ROWS: [(Self, Implementation, Depth); 6] = [
        (Self::Oracle, Implementation::Fused, Depth::Kernels),
        (Self::Oracle, Implementation::Composed, Depth::Full),
        (Self::Composed, Implementation::Fused, Depth::Kernels),
        (Self::Sum, Implementation::Fused, Depth::Full),
        (Self::Inverse, Implementation::Fused, Depth::Full),
        (Self::Inverse, Implementation::Composed, Depth::Full),
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Oracle => "autodiff",
            Self::Composed => "composed",
            Self::Sum => "sum",
            Self::Inverse => INVERSE,
        }
    }

    /// The operation that the step applies to q and k; its backward applies the transpose.
    fn operation(self) -> Direction {
        match self {
            Self::Inverse => Direction::Adjoint,
            Self::Oracle | Self::Composed | Self::Sum => Direction::Forward,
        }
    }

    fn run<const D: usize>(
        self,
        device: &Device,
        case: &Case,
        implementation: Implementation,
        dtype: DType,
        depth: Depth,
    ) -> Result<Worst, EngineError> {
        const TRACKED: [[bool; 2]; 4] =
            [[true, true], [true, false], [false, true], [false, false]];
        let (tracked, checkpointing): (&[[bool; 2]], &[bool]) = match (self, depth) {
            (Self::Oracle | Self::Inverse, Depth::Full) => (&TRACKED, &[false, true]),
            (Self::Oracle | Self::Inverse, Depth::Kernels) => (&TRACKED, &[false]),
            (Self::Composed, _) => (&TRACKED[..1], &[false, true]),
            (Self::Sum, _) => (&TRACKED[..1], &[false]),
        };
        let mut expected = exact_step(case, dtype, self)?;
        let mut worst = Worst::NONE;
        for checkpointing in checkpointing {
            let device = with_autodiff(device, *checkpointing);
            for tracked in tracked {
                let run = |by| step::<D>(&device, case, by, dtype, *tracked, self);
                let found = run(implementation)?;
                if self == Self::Composed {
                    expected = run(Implementation::Composed)?;
                }
                let times = if self == Self::Composed { 2.0 } else { 1.0 };
                compare_step(&mut worst, &found, &expected, *tracked, |exact| {
                    times * allowed(Operation::Rotation, dtype, exact)
                })?;
            }
        }
        Ok(worst)
    }
}

/// The results of a training step through the op.
struct Step {
    /// y of q, then of k.
    outputs: Vec<Vec<f64>>,
    /// Of the tracked inputs.
    gradients: Vec<Option<Vec<f64>>>,
}

/// Forward and backward through burn, in `dtype`, of the loss sum(v y), or sum(y). The inputs are
/// held by the caller, so they must come out unchanged.
fn step<const D: usize>(
    device: &Device,
    case: &Case,
    implementation: Implementation,
    dtype: DType,
    tracked: [bool; 2],
    check: Autodiff,
) -> Result<Step, EngineError> {
    let rotary = engine::rotary(case, implementation)?;
    let angles = engine::angle_tensors::<f32>(case, device)?;
    let mut leaves = Vec::new();
    let mut weights = Vec::new();
    let mut given = Vec::new();
    for (part, tracked) in parts(case).iter().zip(tracked) {
        let x = Buffer::from_f64(dtype, &part.x);
        let leaf: Tensor<D> = engine::place(case, &x, part.heads, device);
        leaves.push(if tracked { leaf.require_grad() } else { leaf });
        let v = Buffer::from_f64(dtype, &part.loss.v);
        weights.push(engine::place::<D>(case, &v, part.heads, device));
        given.push(x);
    }
    // Only the result of another operation can be overwritten: a leaf is held for its gradient.
    let input: fn(&Tensor<D>) -> Tensor<D> = if case.in_place {
        |x| x.clone() * 1.0
    } else {
        Tensor::clone
    };
    let mut inputs = leaves.iter().map(input);
    let (q, k) = (inputs.next().ok_or_else(no_q)?, inputs.next());
    let (q, k) = engine::rotate(&rotary, check.operation(), q, k, &angles)?;
    let rotated: Vec<Tensor<D>> = once(q).chain(k).collect();
    let mut outputs = Vec::new();
    for y in &rotated {
        outputs.push(engine::read(y.clone())?.to_f64());
    }
    let mut gradients = vec![None; leaves.len()];
    if tracked.iter().zip(&leaves).any(|(tracked, _)| *tracked) {
        let losses = rotated
            .into_iter()
            .zip(weights)
            .map(|(y, v)| engine::sum(if check == Autodiff::Sum { y } else { y * v }));
        let loss = losses.reduce(|a, b| a + b);
        let backward = loss.map(|loss| loss.backward());
        for (leaf, gradient) in leaves.iter().zip(&mut gradients) {
            let found = backward.as_ref().and_then(|all| leaf.grad(all));
            *gradient = match found {
                Some(found) => Some(engine::read(found)?.to_f64()),
                None => None,
            };
        }
    }
    for (leaf, given) in leaves.into_iter().zip(given) {
        if engine::read(leaf)? != given {
            return Err(EngineError::Burn("an input was overwritten".into()));
        }
    }
    Ok(Step { outputs, gradients })
}

/// The exact outputs and gradients of a [`step`] with inputs rounded to `dtype`.
fn exact_step(case: &Case, dtype: DType, check: Autodiff) -> Result<Step, EngineError> {
    let rounded = |x: &[f64]| Buffer::from_f64(dtype, x).to_f64();
    let (mut outputs, mut gradients) = (Vec::new(), Vec::new());
    for part in parts(case) {
        let dy = if check == Autodiff::Sum {
            vec![1.0; part.x.len()]
        } else {
            rounded(&part.loss.v)
        };
        let (x, operation) = (rounded(&part.x), check.operation());
        outputs.push(cases::exact(case, operation, part.heads, &x)?);
        let dx = cases::exact(case, operation.transposed(), part.heads, &dy)?;
        gradients.push(Some(dx));
    }
    Ok(Step { outputs, gradients })
}

fn compare_step(
    worst: &mut Worst,
    found: &Step,
    exact: &Step,
    tracked: [bool; 2],
    tolerance: impl Fn(f64) -> f64,
) -> Result<(), EngineError> {
    for (found, exact) in found.outputs.iter().zip(&exact.outputs) {
        worst.see_all(found, exact, &tolerance);
    }
    let gradients = found.gradients.iter().zip(&exact.gradients);
    for ((found, exact), tracked) in gradients.zip(tracked) {
        match (tracked, found, exact) {
            (true, Some(found), Some(exact)) => worst.see_all(found, exact, &tolerance),
            (true, _, _) => return Err(EngineError::Burn("a gradient was dropped".into())),
            (false, None, _) => {}
            (false, Some(_), _) => {
                let message = "an input that requires no gradient got one";
                return Err(EngineError::Burn(message.into()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_or_a_tolerance_that_is_not_finite_fails_whatever_follows() {
        for (found, tolerance) in [
            (f64::NAN, 1.0),
            (f64::INFINITY, 1.0),
            (f64::INFINITY, f64::INFINITY),
            (2.0, f64::INFINITY),
            (0.0, f64::NAN),
        ] {
            for others in [[false, false], [true, false], [false, true]] {
                let mut worst = Worst::NONE;
                if others[0] {
                    worst.see(0.5, 0.0, 1.0);
                }
                worst.see(found, 0.0, tolerance);
                if others[1] {
                    worst.see(0.5, 0.0, 1.0);
                }
                assert!(!worst.pass(), "{found} {tolerance} {others:?}");
            }
        }
        let mut worst = Worst::NONE;
        worst.see(0.5, 0.0, 1.0);
        worst.see(0.1, 0.0, 0.1);
        assert!(worst.pass() && worst.tolerance == 0.1);
    }
}
