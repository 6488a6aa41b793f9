//! Engines against a file's truth, and how far they may be from it.

use rope_core::{Angles, Direction, Geometry, HeadsRef, Pairing, Real, RopeError, Rotator};

use super::error::GoldenError;
use super::row::Row;
use super::tables::ENGINE as FREQUENCIES;
use super::tensors::{Values, largest};
use super::vectors::{FrequencyGradient, GoldenVectors, Mapping};
use crate::buffer::{Buffer, DType};
use crate::engine::Engine;
use crate::tolerance::{Operation, allowed, unit};

/// The engine's name in rows of cos and sin, where rows of rotations name the engine.
const ANGLES: &str = "angles";
/// Roundings between theta and an f64 angle, in the truth and here together: each divides an
/// exponent, takes a power (of at most one unit, so two halves) and multiplies by the position.
const ANGLE_ROUNDINGS: f64 = 8.0;
/// Roundings between cos and sin and a rotated value: the table's, the product's and the sum's.
const ROUNDINGS: f64 = 3.0;

impl GoldenVectors {
    /// Rotates q and k, and takes their gradients back, with one engine on one element type. One
    /// row per tensor.
    ///
    /// Inputs are rounded to the element type first, as a user's would be; the tolerance grows by
    /// what that rounding can do to the result. It is nothing for the vectors of Hugging Face in
    /// f64, f32 and bf16, and some 1e-8 in f16, where tiny values are subnormal.
    ///
    /// # Errors
    /// [`GoldenError::Engine`] if the engine fails; [`GoldenError::Overflow`] for values that the
    /// type cannot hold; [`GoldenError::Unbounded`].
    pub fn compare(&self, engine: &dyn Engine, dtype: DType) -> Result<Vec<Row>, GoldenError> {
        let mut rows = self.run(engine, dtype, self.operation, &self.forward)?;
        let transposed = self.operation.transposed();
        rows.extend(self.run(engine, dtype, transposed, &self.adjoint)?);
        Ok(rows)
    }

    /// Compares what precedes the rotation: frequencies, attention scaling, cos and sin, as far as
    /// the file holds them.
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
                |_, expected| allowed(Operation::Frequency, DType::F64, expected),
                |_| "metadata".to_owned(),
            ));
        }
        if let Some(gradient) = &self.frequencies {
            rows.push(self.compare_frequency_gradient(gradient)?);
        }
        rows.extend(self.compare_cos_sin::<f64>(DType::F64)?);
        rows.extend(self.compare_cos_sin::<f32>(DType::F32)?);
        Ok(rows)
    }

    fn run(
        &self,
        engine: &dyn Engine,
        dtype: DType,
        direction: Direction,
        mappings: &[Mapping],
    ) -> Result<Vec<Row>, GoldenError> {
        let Some(first) = mappings.first() else {
            return Ok(Vec::new());
        };
        let mut case = self.case.clone();
        // Where q has no gradient, k goes in its place.
        case.heads = first.heads;
        case.kv_heads = mappings.get(1).map_or(0, |second| second.heads);
        let name = engine.name();
        let (mut inputs, mut bounds) = (Vec::new(), Vec::new());
        for mapping in mappings {
            mapping.input.fits(dtype)?;
            mapping.truth.fits(dtype)?;
            let input = Buffer::from_f64(dtype, &mapping.input.values);
            bounds.push(self.bounds(dtype, engine.angle_dtype(dtype), mapping, &input)?);
            inputs.push(input);
        }
        let (q, k) = engine
            .apply(&case, direction, &inputs[0], inputs.get(1))
            .map_err(|source| GoldenError::Engine {
                engine: name.clone(),
                source: Box::new(source),
            })?;
        let found = [Some(q), k].map(|found| found.map_or_else(Vec::new, |found| found.to_f64()));
        let compared = mappings.iter().zip(&bounds).zip(&found);
        let row = |((mapping, bounds), found): ((&Mapping, &Vec<Bound>), &Vec<f64>)| {
            let truth = &mapping.truth;
            Row::compare(
                &truth.name,
                dtype.name(),
                &name,
                found,
                &truth.values,
                |i, exact| bounds[i / case.spec.head_dim()].allowed(dtype, exact),
                |i| truth.index(i),
            )
        };
        Ok(compared.map(row).collect())
    }

    /// The largest angle of an f64 table, in radians, times the roundings in it.
    fn angle_error(&self) -> Result<f64, RopeError> {
        let fastest = match &self.case.head_frequencies {
            None => largest(self.case.spec.inv_freq(self.case.seq_len)?.into_iter()),
            // A sum over axes.
            Some(own) => {
                let axes = self.case.positions.axis_count() as f64;
                axes * largest(own.iter().copied())
            }
        };
        let positions = &self.case.positions;
        let axis_values =
            |axis| (0..positions.tokens()).map(move |token| positions.value(axis, token));
        let farthest = largest((0..positions.axis_count()).flat_map(axis_values));
        Ok(ANGLE_ROUNDINGS * unit(DType::F64) * farthest * fastest)
    }

    /// The bound of each row (head of a token) of a tensor.
    ///
    /// |c x1| + |s x2| is at most twice the largest input of the row times the attention scaling,
    /// also where the members of a pair have angles of their own. Infinite inputs are left out:
    /// what they make is infinite or NaN, for which [`Row::compare`] has no tolerance.
    pub(super) fn bounds(
        &self,
        dtype: DType,
        angles: DType,
        mapping: &Mapping,
        input: &Buffer,
    ) -> Result<Vec<Bound>, GoldenError> {
        let truth_unit = unit(DType::F64);
        // The truth was rounded in f64 as often.
        let arithmetic = (ROUNDINGS - 1.0) * unit(dtype.computed_in()) + unit(angles);
        let relative = arithmetic + ROUNDINGS * truth_unit + self.angle_error()?;
        let (exact, rounded) = (&mapping.input.values, input.to_f64());
        let (head_dim, scaling) = (
            self.case.spec.head_dim(),
            self.case.spec.attention_scaling(),
        );
        let rows = exact.chunks(head_dim).zip(rounded.chunks(head_dim));
        rows.map(|(exact, rounded)| {
            let reach = 2.0 * scaling * largest(exact.iter().copied());
            if !reach.is_finite() {
                let name = mapping.input.name.clone();
                return Err(GoldenError::Unbounded { name, scaling });
            }
            let errors = exact.iter().zip(rounded).map(|(x, rounded)| x - rounded);
            Ok(Bound {
                computed: from_truth(&mapping.truth, reach * relative),
                input: 2.0 * scaling * largest(errors),
            })
        })
        .collect()
    }

    /// angle = sum over axes of position * frequency, so a frequency's gradient is the sum over
    /// tokens of position times the angle's gradient, which is cos dL/dsin - sin dL/dcos.
    fn compare_frequency_gradient(&self, gradient: &FrequencyGradient) -> Result<Row, GoldenError> {
        let (case, truth) = (&self.case, &gradient.truth);
        let (heads, layout) = (case.heads, case.contiguous(case.heads));
        let lanes = case.spec.geometry().lane_count();
        let rotator = Rotator::new(case.spec.geometry(), Angles::Heads { rows: &[], heads })?;
        let mut views = Vec::new();
        for [x, dy] in &gradient.passes {
            // <dy, R' x> = <R dy, x>
            let [x, dy] = match self.operation {
                Direction::Forward => [x, dy],
                Direction::Adjoint => [dy, x],
            };
            views.push((
                HeadsRef::new(&x.values, layout)?,
                HeadsRef::new(&dy.values, layout)?,
            ));
        }
        let angles = case.angles::<f64>()?.into_rows();
        let mut angle_terms = vec![0.0; angles.len()];
        rotator.angle_gradients(views[0], views.get(1).copied(), &mut angle_terms)?;
        let axes = case.positions.axis_count();
        let mut found = vec![0.0; axes * heads * lanes];
        let rows = angles.chunks(2 * lanes).zip(angle_terms.chunks(2 * lanes));
        for (row, (angles, gradients)) in rows.enumerate() {
            let (token, head) = (row / heads, row % heads);
            for lane in 0..lanes {
                let (cos, sin) = (angles[lane], angles[lanes + lane]);
                let angle_term = cos * gradients[lanes + lane] - sin * gradients[lane];
                for axis in 0..axes {
                    let at = (axis * heads + head) * lanes + lane;
                    found[at] += case.positions.value(axis, token) * angle_term;
                }
            }
        }
        let reach = |values: &Values| largest(values.values.iter().copied());
        let products = gradient.passes.iter().map(|[x, dy]| reach(x) * reach(dy));
        // A pair has four products, in each sample.
        let position_term = 4.0 * case.batch as f64 * products.sum::<f64>();
        let terms = (case.batch * case.positions.tokens() * gradient.passes.len()) as f64;
        let dtype = if truth.is_f64() {
            DType::F64
        } else {
            DType::F32
        };
        let relative = (4.0 * ROUNDINGS + terms) * unit(dtype) + self.angle_error()?;
        let tolerance = |i: usize, _| {
            let axis = i / (heads * lanes);
            let tokens = 0..case.positions.tokens();
            let positions = tokens.map(|token| case.positions.value(axis, token).abs());
            from_truth(truth, position_term * positions.sum::<f64>() * relative)
        };
        let at = |i| truth.index(i);
        let (name, dtype) = (&truth.name, DType::F64.name());
        Ok(Row::compare(
            name,
            dtype,
            ANGLES,
            &found,
            &truth.values,
            tolerance,
            at,
        ))
    }

    /// Sorted, for the order of this buffer is the module's own affair (ERNIE keeps it permuted);
    /// cos and sin show it.
    fn compare_frequencies(&self, expected: &Values) -> Result<Row, GoldenError> {
        let magnitudes = |values: Vec<f64>| -> Vec<f64> {
            match self.turns_backwards() && expected.values.iter().all(|x| *x >= 0.0) {
                true => values.iter().map(|x| -x).collect(),
                false => values,
            }
        };
        let sorted = |mut values: Vec<f64>| {
            values.sort_by(|a, b| b.total_cmp(a));
            values
        };
        let computed_in = if expected.is_f64() {
            DType::F64
        } else {
            DType::F32
        };
        Ok(Row::compare(
            "inv_freq",
            DType::F64.name(),
            FREQUENCIES,
            &sorted(magnitudes(self.case.spec.inv_freq(self.case.seq_len)?)),
            &sorted(expected.values.clone()),
            |_, expected| allowed(Operation::Frequency, computed_in, expected),
            |i| format!("frequency {i} in falling order"),
        ))
    }

    /// True if all lanes turn by negative frequencies. Modules keep positive ones then, and the
    /// sines of these, and have the sign in what applies them (nanochat).
    fn turns_backwards(&self) -> bool {
        let Ok(inv_freq) = self.case.spec.inv_freq(self.case.seq_len) else {
            return false;
        };
        self.case.head_frequencies.is_none() && inv_freq.iter().all(|x| *x <= 0.0)
    }

    fn compare_cos_sin<A: Real>(&self, dtype: DType) -> Result<Vec<Row>, GoldenError> {
        let case = &self.case;
        let angles = case.angles::<A>()?;
        let relative = unit(dtype) + 2.0 * unit(DType::F64) + self.angle_error()?;
        let computed = case.spec.attention_scaling() * relative;
        let mut rows = Vec::new();
        let signs: [&[f64]; 2] = match self.turns_backwards() {
            true => [&[1.0], &[1.0, -1.0]],
            false => [&[1.0]; 2],
        };
        let tables = [&self.cos, &self.sin].into_iter().zip(angles.cos_sin());
        for ((truth, lanes), signs) in tables.zip(signs) {
            let Some(truth) = truth else { continue };
            let orders = orders(truth, case.angle_rows(), case.spec.geometry())?;
            let with_signs = orders
                .iter()
                .flat_map(|order| signs.iter().map(move |sign| (order, sign)));
            let compared = with_signs.map(|(order, sign)| {
                let value = |lane: &usize| sign * lanes[*lane].to_f64();
                let found: Vec<f64> = order.iter().map(value).collect();
                Row::compare(
                    &truth.name,
                    dtype.name(),
                    ANGLES,
                    &found,
                    &truth.values,
                    |_, _| from_truth(truth, computed),
                    |i| truth.index(i),
                )
            });
            rows.extend(compared.min_by(|a, b| a.ratio.total_cmp(&b.ratio)));
        }
        Ok(rows)
    }
}

/// For each element of a cos or sin table, its lane. A module keeps one value per lane, or one per
/// channel: pairs in two halves, members side by side, or halves of each of two blocks where that
/// is how they pair. Which of them follows from the values, as its apply function undoes it.
fn orders(
    truth: &Values,
    tokens: usize,
    geometry: Geometry,
) -> Result<Vec<Vec<usize>>, GoldenError> {
    let lanes = geometry.lane_count();
    let width = truth.shape.last().copied().unwrap_or(0);
    let rows = truth.values.len().checked_div(width).unwrap_or(0);
    let halves = |channel: usize, lanes: usize| channel % lanes;
    let side_by_side = |channel: usize, _: usize| channel / 2;
    let halves_of_blocks = |channel: usize, lanes: usize| {
        let block_lanes = lanes / 2;
        channel / lanes * block_lanes + channel % block_lanes
    };
    let lane_of: &[fn(usize, usize) -> usize] = match width {
        width if width == lanes => &[|channel, _| channel],
        width if width == 2 * lanes && geometry.pairing() == Pairing::Quarter => {
            &[halves, side_by_side, halves_of_blocks]
        }
        width if width == 2 * lanes => &[halves, side_by_side],
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

/// The error by roundings here, at least that of a truth whose angles were rounded.
fn from_truth(truth: &Values, computed: f64) -> f64 {
    if truth.is_f64() {
        computed
    } else {
        computed.max(allowed(Operation::RoundedAngles, DType::F32, 0.0))
    }
}

/// How far the values of one row of a tensor may be from the truth.
pub(super) struct Bound {
    /// By the roundings before the last, in the engine and in the truth.
    computed: f64,
    /// By the rounding of the inputs to the element type.
    input: f64,
}

impl Bound {
    /// [`Operation::Rotation`], which allows for inputs of order 1, widened where these inputs,
    /// positions or this truth need more.
    pub(super) fn allowed(&self, dtype: DType, exact: f64) -> f64 {
        let granted = allowed(Operation::Rotation, dtype.computed_in(), exact);
        let rotated = allowed(Operation::Rotation, dtype, exact);
        rotated + (self.computed - granted).max(0.0) + self.input
    }
}
