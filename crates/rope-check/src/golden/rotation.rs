//! Engines against a file's truth, and how far they may be from it.

use rope_core::{Direction, Real, RopeError, TokenAngles};

use super::error::GoldenError;
use super::row::Row;
use super::tables::{ENGINE as FREQUENCIES, RELATIVE};
use super::vectors::{GoldenVectors, Mapping, Pass, Values};
use crate::buffer::{Buffer, DType};
use crate::engine::Engine;
use crate::tolerance;

/// What makes cos and sin, in the place where rows of rotations name the engine.
const ANGLES: &str = "angles";
/// How far a truth that was itself computed in f32 may be from exact: its angles were rounded to f32.
const F32_TRUTH: f64 = 1e-3;
/// How far an f32 frequency may be, relative to it: powers, wavelengths and Llama 3's blend of two frequencies, in f32.
const F32_FREQUENCY: f64 = 1e-6;
const F64_UNIT: f64 = f64::EPSILON / 2.0;
const F32_UNIT: f64 = f32::EPSILON as f64 / 2.0;
/// Roundings between theta and an f64 angle, in the truth and here together: each divides an exponent, takes a power (of at most one unit,
/// so two halves) and multiplies by the position.
const ANGLE_ROUNDINGS: f64 = 8.0;
/// Roundings between cos and sin and a rotated value: the table's, the product's and the sum's.
const ROUNDINGS: f64 = 3.0;

impl GoldenVectors {
    /// Rotates q and k, and takes their gradients back, with one engine on one element type. One row per tensor.
    ///
    /// Inputs are rounded to the element type first, as a user's would be; the tolerance grows by what that rounding can do to the result.
    /// It is nothing for the vectors of Hugging Face in f64, f32 and bf16, and some 1e-8 in f16, where tiny values are subnormal.
    ///
    /// # Errors
    /// [`GoldenError::Engine`] if the engine fails.
    pub fn compare(&self, engine: &dyn Engine, dtype: DType) -> Result<Vec<Row>, GoldenError> {
        let mut rows = self.run(engine, dtype, Direction::Forward, &self.forward)?;
        if let Some(adjoint) = &self.adjoint {
            rows.extend(self.run(engine, dtype, Direction::Adjoint, adjoint)?);
        }
        Ok(rows)
    }

    /// Compares what precedes the rotation: frequencies, attention scaling, cos and sin, as far as the file holds them.
    ///
    /// # Errors
    /// [`GoldenError::TensorShape`] for tables of another size; [`GoldenError::Rope`].
    pub fn compare_angles(&self) -> Result<Vec<Row>, GoldenError> {
        let mut rows = Vec::new();
        if let Some(expected) = &self.inv_freq {
            rows.push(self.compare_frequencies(expected)?);
        }
        if let Some(expected) = self.attention_scaling {
            rows.push(Row::compare(
                "attention_scaling",
                DType::F64.name(),
                FREQUENCIES,
                &[self.case.spec.attention_scaling()],
                &[expected],
                |_| RELATIVE * expected.abs(),
                |_| "metadata".to_owned(),
            ));
        }
        rows.extend(self.compare_cos_sin::<f64>(DType::F64, F64_UNIT)?);
        rows.extend(self.compare_cos_sin::<f32>(DType::F32, F32_UNIT)?);
        Ok(rows)
    }

    fn run(
        &self,
        engine: &dyn Engine,
        dtype: DType,
        direction: Direction,
        pass: &Pass,
    ) -> Result<Vec<Row>, GoldenError> {
        let mut case = self.case.clone();
        case.kv_heads = pass.k.as_ref().map_or(0, |_| case.kv_heads);
        let rounded = |x: &Mapping| Buffer::from_f64(dtype, &x.input.values);
        let (q, k) = (rounded(&pass.q), pass.k.as_ref().map(rounded));
        let name = engine.name();
        let (q_found, k_found) =
            engine
                .apply(&case, direction, &q, k.as_ref())
                .map_err(|source| GoldenError::Engine {
                    engine: name.clone(),
                    source: Box::new(source),
                })?;
        let k = pass.k.as_ref().zip(k.as_ref());
        let mut rows = Vec::new();
        for ((mapping, input), found) in [Some((&pass.q, &q)), k]
            .into_iter()
            .zip([Some(q_found), k_found])
            .filter_map(|(expected, found)| {
                Some((expected?, found.map_or_else(Vec::new, |x| x.to_f64())))
            })
        {
            let truth = &mapping.truth;
            let bound = self.bound(dtype, engine.angle_dtype(dtype), mapping, input)?;
            rows.push(Row::compare(
                &truth.name,
                dtype.name(),
                &name,
                &found,
                &truth.values,
                |i| bound.allowed(truth.values.get(i).copied().unwrap_or(0.0)),
                |i| index(i, &truth.shape),
            ));
        }
        Ok(rows)
    }

    /// The largest angle of an f64 table, in radians, times the roundings in it.
    fn angle_error(&self) -> Result<f64, RopeError> {
        let inv_freq = self.case.spec.inv_freq(self.case.seq_len)?;
        let fastest = inv_freq.into_iter().fold(0.0, f64::max);
        let highest = f64::from(self.case.positions.highest());
        Ok(ANGLE_ROUNDINGS * F64_UNIT * highest * fastest)
    }

    /// |c x1| + |s x2| is at most twice the largest input times the attention scaling, also where the members of a pair have angles of
    /// their own.
    fn bound(
        &self,
        dtype: DType,
        angles: DType,
        mapping: &Mapping,
        input: &Buffer,
    ) -> Result<Bound, RopeError> {
        let exact = &mapping.input.values;
        let largest = |values: &mut dyn Iterator<Item = f64>| {
            2.0 * self.case.spec.attention_scaling() * values.map(f64::abs).fold(0.0, f64::max)
        };
        let reach = largest(&mut exact.iter().copied());
        let rounded = input.to_f64();
        let unit = if dtype == DType::F64 {
            F64_UNIT
        } else {
            F32_UNIT
        };
        // The truth was rounded in f64 as often.
        let arithmetic = (ROUNDINGS - 1.0) * unit + tolerance::unit(angles);
        let computed = reach * (arithmetic + ROUNDINGS * F64_UNIT + self.angle_error()?);
        Ok(Bound {
            dtype,
            computed: if mapping.truth.is_f64 {
                computed
            } else {
                computed.max(F32_TRUTH)
            },
            input: largest(
                &mut exact
                    .iter()
                    .zip(rounded)
                    .map(|(exact, rounded)| exact - rounded),
            ),
        })
    }

    /// Sorted, for the order of this buffer is the module's own affair (ERNIE keeps it permuted); cos and sin show it.
    fn compare_frequencies(&self, expected: &Values) -> Result<Row, GoldenError> {
        let sorted = |mut values: Vec<f64>| {
            values.sort_by(|a, b| b.total_cmp(a));
            values
        };
        let found = sorted(self.case.spec.inv_freq(self.case.seq_len)?);
        let truth = sorted(expected.values.clone());
        let relative = if expected.is_f64 {
            RELATIVE
        } else {
            F32_FREQUENCY
        };
        Ok(Row::compare(
            "inv_freq",
            DType::F64.name(),
            FREQUENCIES,
            &found,
            &truth,
            |i| relative * truth.get(i).map_or(0.0, |value| value.abs()),
            |i| format!("frequency {i} in falling order"),
        ))
    }

    fn compare_cos_sin<A: Real>(&self, dtype: DType, unit: f64) -> Result<Vec<Row>, GoldenError> {
        let case = &self.case;
        let angles = TokenAngles::<A>::new(&case.spec, &case.positions, case.seq_len)?;
        let computed =
            case.spec.attention_scaling() * (unit + 2.0 * F64_UNIT + self.angle_error()?);
        let mut rows = Vec::new();
        for (truth, lanes) in [(&self.cos, angles.cos()), (&self.sin, angles.sin())] {
            let Some(truth) = truth else { continue };
            let tolerance = if truth.is_f64 {
                computed
            } else {
                computed.max(F32_TRUTH)
            };
            let compared = orders(truth, angles.tokens(), case.spec.geometry().lanes())?
                .into_iter()
                .map(|order| {
                    let found: Vec<f64> = order.iter().map(|lane| lanes[*lane].to_f64()).collect();
                    Row::compare(
                        &truth.name,
                        dtype.name(),
                        ANGLES,
                        &found,
                        &truth.values,
                        |_| tolerance,
                        |i| index(i, &truth.shape),
                    )
                });
            rows.extend(compared.min_by(|a, b| a.ratio.total_cmp(&b.ratio)));
        }
        Ok(rows)
    }
}

/// For each element of a cos or sin table, its lane. A module keeps one value per lane, or one per channel: pairs in two halves, or members
/// side by side. Which of them follows from the values, as its apply function undoes it.
fn orders(truth: &Values, tokens: usize, lanes: usize) -> Result<Vec<Vec<usize>>, GoldenError> {
    let width = truth.shape.last().copied().unwrap_or(0);
    let rows = truth.values.len().checked_div(width).unwrap_or(0);
    let lane_of: &[fn(usize, usize) -> usize] = match width {
        width if width == lanes => &[|channel, _| channel],
        width if width == 2 * lanes => {
            &[|channel, lanes| channel % lanes, |channel, _| channel / 2]
        }
        _ => &[],
    };
    if rows != tokens || lane_of.is_empty() {
        return Err(truth.misshapen(format!(
            "{tokens} tokens x {lanes} lanes, or x {} channels",
            2 * lanes
        )));
    }
    let order = |lane_of: &fn(usize, usize) -> usize| {
        (0..rows * width)
            .map(|i| i / width * lanes + lane_of(i % width, lanes))
            .collect()
    };
    Ok(lane_of.iter().map(order).collect())
}

/// How far the values of one tensor may be from the truth.
struct Bound {
    dtype: DType,
    /// By the roundings before the last, in the engine and in the truth.
    computed: f64,
    /// By the rounding of the inputs to the element type.
    input: f64,
}

impl Bound {
    /// [`tolerance::rotated`], which allows for inputs of order 1, widened where these inputs, positions or this truth need more.
    fn allowed(&self, exact: f64) -> f64 {
        let arithmetic = if self.dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let granted = tolerance::rotated(arithmetic, exact);
        tolerance::rotated(self.dtype, exact) + (self.computed - granted).max(0.0) + self.input
    }
}

pub(super) fn index(flat: usize, shape: &[usize]) -> String {
    let mut rest = flat;
    let mut parts: Vec<usize> = shape
        .iter()
        .rev()
        .map(|size| {
            let at = rest % size.max(&1);
            rest /= size.max(&1);
            at
        })
        .collect();
    parts.reverse();
    format!("{parts:?}")
}
