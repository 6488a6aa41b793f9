//! Why a file differs: known mistakes, tried on its inputs until one makes its results.
//!
//! A mistake is a whole case, so that it is rotated by the same kernel and held to the same
//! tolerance as the metadata's. Gradients are tried with the mistake that explains the forward.

use std::collections::BTreeMap;
use std::sync::Arc;

use rope_core::{
    Angles, AxisLayout, Direction, HeadsMut, HeadsRef, InstructionSet, MatrixForm, Pairing,
    Parallelism, Positions, RotarySpecBuilder, Rotator,
};

use super::error::GoldenError;
use super::rotation::Bound;
use super::rounding::{Rounding, SHIFTS};
use super::row::Row;
use super::tensors::largest;
use super::vectors::{GoldenVectors, Mapping};
use crate::buffer::{Buffer, DType};
use crate::engine::Case;
use crate::names::{axes_name, pairing_name};
use crate::tolerance::unit;

/// Bases of frequencies that models state.
const THETAS: [f64; 4] = [1e4, 5e5, 1e6, 5e6];

/// A rotation that is not the metadata's.
struct Mistake {
    /// The difference, as "pairing adjacent, not half".
    what: String,
    case: Case,
    operation: Direction,
    /// Rows of cos and sin that are not the case's: those of a program that rounds on the way to
    /// them. They are held to the tolerance of f32.
    angles: Option<Arc<[f64]>>,
}

impl GoldenVectors {
    /// Says of each failing row of a rotated tensor, or of a gradient, which known mistake makes
    /// the file's values; nothing where none does, or where the engine of the row is at fault.
    pub fn explain(&self, rows: &mut [Row]) {
        if rows.iter().all(|row| row.pass) {
            return;
        }
        let mut reasons = BTreeMap::new();
        let mut explain = |forward: &Mapping| {
            let forward = Suspect::new(self, forward)?;
            let found = forward.diagnose_forward();
            let mistake = found.as_ref().and_then(|(_, mistake)| mistake.as_ref());
            let gradient = format!("d{}", forward.mapping.input.name);
            let mut adjoints = self.adjoint.iter();
            if let Some(adjoint) = adjoints.find(|adjoint| adjoint.truth.name == gradient) {
                let adjoint = Suspect::new(self, adjoint)?;
                reasons.insert(gradient, adjoint.diagnose_gradient(mistake));
            }
            reasons.insert(forward.name(), found.map(|(reason, _)| reason));
            Ok::<_, GoldenError>(())
        };
        for forward in &self.forward {
            // A tensor without finite tolerances is not explained.
            let _ = explain(forward);
        }
        for row in rows.iter_mut().filter(|row| !row.pass) {
            if let Some(reason) = reasons.get(&row.tensor).cloned().flatten() {
                row.diagnosis = Some(reason);
            }
        }
    }

    /// The metadata's rotation, as a mistake in which nothing differs.
    fn stated(&self) -> Mistake {
        Mistake {
            what: String::new(),
            case: self.case.clone(),
            operation: self.operation,
            angles: None,
        }
    }

    /// Mistakes in the order in which they are tried: those that change one thing first. Of two
    /// that change, one is the pairing or theta.
    fn mistakes(&self) -> Vec<Mistake> {
        let base = self.stated();
        let spec = &self.case.spec;
        let pairing = |pairing: Pairing| {
            let what = format!(
                "pairing {}, not {}",
                pairing_name(pairing),
                pairing_name(spec.pairing())
            );
            move |other: &Mistake| other.with_spec(what.clone(), |spec| spec.pairing(pairing))
        };
        let pairings = || {
            Pairing::ALL
                .into_iter()
                .filter(|other| *other != spec.pairing())
                .map(pairing)
        };
        let mut single: Vec<Mistake> = pairings().filter_map(|change| change(&base)).collect();
        let opposite = Mistake {
            what: "the angles of the opposite sign".to_owned(),
            operation: self.operation.transposed(),
            ..self.stated()
        };
        single.push(opposite);
        let axes = base.axis_variants();
        let with_pairings = |others: &[Mistake]| -> Vec<Mistake> {
            others
                .iter()
                .flat_map(|other| pairings().filter_map(|change| change(other)))
                .collect()
        };
        let mut double = with_pairings(&axes);
        double.extend(with_pairings(&single[single.len() - 1..]));
        single.extend(axes);
        if self.case.head_frequencies.is_none() {
            let channels = base.channel_variants();
            let others = single.iter().chain(&channels);
            double.extend(others.flat_map(Mistake::frequency_variants));
            single.extend(base.frequency_variants());
            single.extend(channels);
        }
        single.extend(double);
        single
    }
}

impl Mistake {
    fn with_spec(
        &self,
        what: String,
        change: impl FnOnce(RotarySpecBuilder) -> RotarySpecBuilder,
    ) -> Option<Self> {
        let spec = change(RotarySpecBuilder::from(self.case.spec.clone()))
            .build()
            .ok()?;
        let fits = self.case.head_frequencies.is_some()
            || spec.axis_count() == self.case.positions.axis_count();
        fits.then(|| Self {
            what: self.and(what),
            case: Case {
                spec,
                ..self.case.clone()
            },
            operation: self.operation,
            angles: None,
        })
    }

    /// The difference with one thing more.
    fn and(&self, what: String) -> String {
        match &self.what[..] {
            "" => what,
            other => format!("{other}, and {what}"),
        }
    }

    fn with_axes_from(&self, what: String, order: &[usize]) -> Option<Self> {
        let positions = &self.case.positions;
        let axis_ids = |axis: &usize| {
            let axis = *axis;
            (0..positions.tokens()).map(move |token| positions.value(axis, token))
        };
        let values: Vec<f64> = order.iter().flat_map(axis_ids).collect();
        let positions = Positions::real(order.len(), &values).ok()?;
        Some(Self {
            what,
            case: Case {
                positions,
                ..self.case.clone()
            },
            operation: self.operation,
            angles: None,
        })
    }

    /// Other lanes for the axes, and other positions on them.
    fn axis_variants(&self) -> Vec<Self> {
        let axes = self.case.positions.axis_count();
        if axes < 2 {
            return Vec::new();
        }
        let stated = self.case.spec.axis_layout();
        let sections = stated.sections();
        let layouts: [fn(Vec<usize>) -> AxisLayout; 7] = [
            AxisLayout::Contiguous,
            AxisLayout::Striped,
            AxisLayout::Ernie,
            AxisLayout::Balanced,
            AxisLayout::PerAxis,
            AxisLayout::PerAxisStriped,
            AxisLayout::PerChannel,
        ];
        let mut found = Vec::new();
        if self.case.head_frequencies.is_none() {
            let others = layouts.iter().map(|layout| layout(sections.to_vec()));
            found.extend(others.filter(|other| other != stated).filter_map(|other| {
                let what = format!("axes {}, not {}", axes_name(&other), axes_name(stated));
                self.with_spec(what, |spec| spec.axis_layout(other))
            }));
        }
        found.extend((0..axes).filter_map(|axis| {
            let what = format!("the positions of axis {axis} on all axes");
            self.with_axes_from(what, &vec![axis; axes])
        }));
        found.extend(permutations(axes).iter().filter_map(|order| {
            self.with_axes_from(
                format!("the axes of the positions in the order {order:?}"),
                order,
            )
        }));
        found
    }

    fn frequency_variants(&self) -> Vec<Self> {
        let spec = &self.case.spec;
        let stated = spec.frequencies().theta();
        let mut found = Vec::new();
        if let Some(theta) = stated {
            found.extend(
                self.with_spec("frequencies without their scaling".to_owned(), |spec| {
                    spec.theta(theta).attention_scaling(1.0)
                }),
            );
        }
        found.extend(
            THETAS
                .iter()
                .filter(|theta| stated != Some(**theta))
                .filter_map(|theta| {
                    self.with_spec(format!("theta {theta}"), |spec| spec.theta(*theta))
                }),
        );
        if spec.attention_scaling() != 1.0 {
            let what = "no attention scaling".to_owned();
            found.extend(self.with_spec(what, |spec| spec.attention_scaling(1.0)));
        }
        found
    }

    fn channel_variants(&self) -> Vec<Self> {
        let spec = &self.case.spec;
        let (head_dim, rotary_dim) = (spec.head_dim(), spec.rotary_dim());
        let ranges = [
            (head_dim, 0),
            (rotary_dim, 0),
            (rotary_dim, head_dim - rotary_dim),
            (head_dim / 2, 0),
            (head_dim / 4, 0),
        ];
        let others = ranges
            .iter()
            .filter(|range| **range != (rotary_dim, spec.rotary_offset()));
        let change = |(rotary_dim, offset): &(usize, usize)| {
            let what = format!("channels {offset} to {} rotated", offset + rotary_dim);
            self.with_spec(what, |spec| {
                spec.rotary_dim(*rotary_dim).rotary_offset(*offset)
            })
        };
        others.filter_map(change).collect()
    }
}

/// A tensor of the file, and what it should be.
struct Suspect<'a> {
    vectors: &'a GoldenVectors,
    mapping: &'a Mapping,
    bounds: Vec<Bound>,
    /// The largest error of f32 arithmetic with given angles, for a value of each row.
    f32_limits: Vec<f64>,
}

impl<'a> Suspect<'a> {
    fn new(vectors: &'a GoldenVectors, mapping: &'a Mapping) -> Result<Self, GoldenError> {
        let input = Buffer::from_f64(DType::F64, &mapping.input.values);
        let bounds = vectors.bounds(DType::F64, DType::F64, mapping, &input)?;
        let spec = &vectors.case.spec;
        let reach = |row: &[f64]| spec.attention_scaling() * largest(row.iter().copied());
        let rows = mapping.input.values.chunks(spec.head_dim());
        Ok(Self {
            vectors,
            mapping,
            bounds,
            f32_limits: rows
                .map(|row| 16.0 * unit(DType::F32) * reach(row))
                .collect(),
        })
    }

    fn name(&self) -> String {
        self.mapping.truth.name.clone()
    }

    /// The input after a rotation.
    fn image(&self, case: &Case, direction: Direction) -> Option<Vec<f64>> {
        self.image_by(case, case.angles().ok()?.rows(), direction)
    }

    /// The same by given rows of cos and sin.
    fn image_by(&self, case: &Case, rows: &[f64], direction: Direction) -> Option<Vec<f64>> {
        let heads = case.heads;
        let angles = match case.head_frequencies {
            None => Angles::Tokens(rows),
            Some(_) => Angles::Heads { rows, heads },
        };
        let rotator = Rotator::new(case.spec.geometry(), angles)
            .ok()?
            .with_instructions(InstructionSet::PORTABLE)
            .with_parallelism(Parallelism::SERIAL);
        let (layout, input) = (case.contiguous(self.mapping.heads), &self.mapping.input);
        let mut image = vec![0.0; input.values.len()];
        let from = HeadsRef::new(&input.values, layout).ok()?;
        let to = HeadsMut::new(&mut image, layout).ok()?;
        rotator.apply(direction, (from, to), None).ok()?;
        Some(image)
    }

    /// The input after a mistaken rotation, or its adjoint.
    fn image_of(&self, mistake: &Mistake, direction: Direction) -> Option<Vec<f64>> {
        match &mistake.angles {
            None => self.image(&mistake.case, direction),
            Some(rows) => self.image_by(&mistake.case, rows, direction),
        }
    }

    /// True if the values are the file's to a tolerance of each row (head of a token) and value.
    fn is_within(&self, values: &[f64], tolerance: impl Fn(usize, f64) -> f64) -> bool {
        let head_dim = self.vectors.case.spec.head_dim();
        let pairs = values.iter().zip(&self.mapping.truth.values).enumerate();
        let mut pairs = pairs;
        pairs.all(|(i, (value, exact))| (value - exact).abs() <= tolerance(i / head_dim, *exact))
    }

    /// True if the values are the file's, in the rows that `of` takes.
    fn fits_where(&self, values: &[f64], of: impl Fn(usize) -> bool) -> bool {
        self.is_within(values, |row, exact| match of(row) {
            true => self.bounds[row].allowed(DType::F64, exact),
            false => f64::INFINITY,
        })
    }

    fn fits(&self, values: &[f64]) -> bool {
        self.fits_where(values, |_| true)
    }

    /// True if the values, made with a mistake or without, are the file's.
    fn fits_by(&self, mistake: &Mistake, values: &[f64]) -> bool {
        match mistake.angles {
            None => self.fits(values),
            Some(_) => self.is_within(values, |row, _| self.f32_limits[row]),
        }
    }

    fn is(&self, case: &Case, direction: Direction) -> bool {
        self.image(case, direction)
            .is_some_and(|image| self.fits(&image))
    }

    /// How far the values are from the file's.
    fn farthest(&self, values: &[f64]) -> f64 {
        let pairs = values.iter().zip(&self.mapping.truth.values);
        largest(pairs.map(|(x, y)| x - y))
    }

    fn is_zero(&self) -> bool {
        self.mapping.truth.values.iter().all(|x| *x == 0.0)
    }

    /// The operation that the file has instead of the metadata's rotation.
    fn diagnose_forward(&self) -> Option<(String, Option<Mistake>)> {
        let (name, input) = (self.name(), &self.mapping.input);
        let expected = self.image(&self.vectors.case, self.vectors.operation)?;
        if self.fits(&expected) {
            return None;
        }
        if self.is_zero() {
            return Some((format!("{name} is zero"), None));
        }
        if self.fits(&input.values) {
            return Some((
                format!("{name} is {}: nothing is rotated", input.name),
                None,
            ));
        }
        let mut mistakes = self.vectors.mistakes();
        let made_it = |mistake: &Mistake| self.is(&mistake.case, mistake.operation);
        let found = match mistakes.iter().position(made_it) {
            Some(at) => Some(mistakes.swap_remove(at)),
            None => self.diagnose_angles(&self.vectors.stated(), &mistakes, &expected),
        };
        match found {
            Some(mistake) => {
                let reason = format!("{name} was computed with {}", mistake.what);
                Some((reason, Some(mistake)))
            }
            None => self
                .diagnose_rounding(&expected)
                .map(|reason| (reason, None)),
        }
    }

    /// The angles of a program that rounds on the way to them; then those of one that makes a
    /// mistake, too, and computes its angles in f32.
    fn diagnose_angles(
        &self,
        stated: &Mistake,
        mistakes: &[Mistake],
        expected: &[f64],
    ) -> Option<Mistake> {
        let mut roundings = Rounding::all().into_iter();
        let found = roundings.find_map(|rounding| self.rounded(stated, &rounding, expected));
        found.or_else(|| {
            let in_f32 = Rounding::in_f32();
            let mut mistakes = mistakes.iter();
            mistakes.find_map(|mistake| self.rounded(mistake, &in_f32, expected))
        })
    }

    /// A mistake with angles that are rounded, too, where that makes the file's values: nearer
    /// than angles without the rounding by more than chance. A frequency in f32 may be
    /// some units off, by the powers and quotients that it is made of: for each lane, the one of
    /// [`SHIFTS`] is taken that comes nearest.
    fn rounded(&self, mistake: &Mistake, rounding: &Rounding, expected: &[f64]) -> Option<Mistake> {
        let case = &mistake.case;
        let lanes = rounding.lanes(case).ok()?;
        let with_shifts = |shifts: &[i32]| {
            let rows = rounding.rows(case, &lanes, shifts);
            let image = self.image_by(case, &rows, mistake.operation)?;
            Some((rows, image))
        };
        let mut nearest = vec![(f64::INFINITY, 0); lanes.len()];
        if rounding.shifts_frequencies() {
            for shift in SHIFTS {
                let (_, image) = with_shifts(&vec![*shift; lanes.len()])?;
                let errors = self.errors_of_lanes(case, mistake.operation, &image, lanes.len());
                for (nearest, error) in nearest.iter_mut().zip(errors) {
                    if error < nearest.0 {
                        *nearest = (error, *shift);
                    }
                }
                // Most frequencies are the nearest ones: of another rotation, few lanes fit.
                let fitting = nearest.iter().filter(|(error, _)| *error <= 1.0);
                if 4 * fitting.count() < lanes.len() {
                    return None;
                }
            }
        }
        let shifts: Vec<i32> = nearest.iter().map(|(_, shift)| *shift).collect();
        let (rows, image) = with_shifts(&shifts)?;
        let found = Mistake {
            what: mistake.and(rounding.what.clone()),
            case: case.clone(),
            operation: mistake.operation,
            angles: Some(rows.into()),
        };
        let explains = self.farthest(&image) <= self.farthest(expected) / 4.0;
        (explains && self.fits_by(&found, &image)).then_some(found)
    }

    /// For each lane, the largest error of the channels that it rotates, in units of their tolerance.
    fn errors_of_lanes(
        &self,
        case: &Case,
        direction: Direction,
        image: &[f64],
        count: usize,
    ) -> Vec<f64> {
        let form = MatrixForm::new(case.spec.geometry(), direction);
        let (lanes, head_dim) = (case.spec.geometry().lane_count(), case.spec.head_dim());
        let mut errors = vec![0.0; count];
        for (row, start) in case.rows(self.mapping.heads) {
            // Without frequencies of heads' own, lanes are those of any row.
            let first = row * lanes % count;
            for (channel, lane) in form.cos_lanes().iter().enumerate() {
                let at = start + case.spec.rotary_offset() + channel;
                let error = (image[at] - self.mapping.truth.values[at]).abs();
                let error = error / self.f32_limits[at / head_dim];
                let lane_error: &mut f64 = &mut errors[first + *lane as usize];
                *lane_error = lane_error.max(error);
            }
        }
        errors
    }

    /// The values that the file has in the place of the gradient of a rotation, which may be a
    /// mistaken one.
    fn diagnose_gradient(&self, mistake: Option<&Mistake>) -> Option<String> {
        let vectors = self.vectors;
        let (name, upstream) = (self.name(), &self.mapping.input);
        let of = name.strip_prefix('d').unwrap_or(&name);
        let expected = self.image(&vectors.case, vectors.operation.transposed())?;
        if self.fits(&expected) {
            return None;
        }
        if self.is_zero() {
            return Some(format!("{name} is zero: the gradient of {of} is lost"));
        }
        let stated = vectors.stated();
        let forward_by = mistake.unwrap_or(&stated);
        let (case, operation) = (&forward_by.case, forward_by.operation);
        let fits = |values: &[f64]| self.fits_by(forward_by, values);
        let adjoint = self.image_of(forward_by, operation.transposed())?;
        if let Some(mistake) = mistake.filter(|_| fits(&adjoint)) {
            return Some(format!(
                "{name} is right for a rotation with {}",
                mistake.what
            ));
        }
        if self.fits(&upstream.values) {
            return Some(format!(
                "{name} is {}: the backward rotates nothing",
                upstream.name
            ));
        }
        let forward = self.image_of(forward_by, operation)?;
        if fits(&forward) {
            return Some(format!(
                "{name} is {} rotated forward: the gradient rotates backwards, with -sin",
                upstream.name
            ));
        }
        let halves: Vec<f64> = forward
            .iter()
            .zip(&adjoint)
            .map(|(x, y)| (x + y) / 2.0)
            .collect();
        if !case.spec.geometry().per_channel() && fits(&halves) {
            return Some(format!(
                "{name} has the products with cos alone: the gradient through those with sin (the \
                 rotated half) is lost"
            ));
        }
        if let Some(reason) = self.diagnose_conjugate(case, operation) {
            return Some(reason);
        }
        if let Some(reason) = self.diagnose_lost_rows(&adjoint) {
            return Some(reason);
        }
        let mut mistakes = vectors.mistakes().into_iter();
        let other = mistakes.find(|other| self.is(&other.case, other.operation.transposed()));
        if let Some(other) = other {
            return Some(format!(
                "{name} is the gradient of a rotation with {}; {of}_out was rotated otherwise",
                other.what
            ));
        }
        let stated = Mistake {
            operation: vectors.operation.transposed(),
            ..vectors.stated()
        };
        match self.diagnose_angles(&stated, &[], &expected) {
            Some(rounded) => Some(format!("{name} was computed with {}", rounded.what)),
            None => self.diagnose_rounding(&expected),
        }
    }

    /// The forward with -sin, which is the adjoint of a rotation only.
    fn diagnose_conjugate(&self, case: &Case, operation: Direction) -> Option<String> {
        if !case.spec.geometry().per_channel() {
            return None;
        }
        let positions = &case.positions;
        let axis_ids =
            |axis| (0..positions.tokens()).map(move |token| -positions.value(axis, token));
        let values: Vec<f64> = (0..positions.axis_count()).flat_map(axis_ids).collect();
        let positions = Positions::real(positions.axis_count(), &values).ok()?;
        let case = Case {
            positions,
            ..case.clone()
        };
        self.is(&case, operation).then(|| {
            format!(
                "{} is {} rotated with -sin, which is the gradient only where the members of a pair \
                 share an angle",
                self.name(),
                self.mapping.input.name
            )
        })
    }

    /// Heads of tokens whose gradient is zero while the others have the right one.
    fn diagnose_lost_rows(&self, adjoint: &[f64]) -> Option<String> {
        let head_dim = self.vectors.case.spec.head_dim();
        let is_zero = |row: &[f64]| row.iter().all(|x| *x == 0.0);
        let truth = self.mapping.truth.values.chunks(head_dim);
        let lost: Vec<bool> = truth.map(is_zero).collect();
        let count = lost.iter().filter(|lost| **lost).count();
        (count > 0 && self.fits_where(adjoint, |row| !lost[row])).then(|| {
            format!(
                "{} is zero in {count} of {} heads of tokens, and right in the others",
                self.name(),
                lost.len()
            )
        })
    }

    /// Differences that 16 bits, or f32, make: none larger, and as many as roundings leave.
    fn diagnose_rounding(&self, expected: &[f64]) -> Option<String> {
        let (input, truth) = (&self.mapping.input.values, &self.mapping.truth.values);
        let (worst, most) = (self.farthest(expected), largest(truth.iter().copied()));
        let turned = || (0..truth.len()).filter(|i| expected[*i] != input[*i]);
        let count = turned().count();
        // Of roundings to nearest, seven in eight are above an eighth of the largest of their
        // binade. Tokens at position 0 have none.
        let is_rounded = |finest: DType, coarsest: DType| {
            let least = unit(finest) / 16.0;
            let differs = |i: &usize| (expected[*i] - truth[*i]).abs() > least * expected[*i].abs();
            let some = count > 0 && 4 * turned().filter(differs).count() >= count;
            some && worst <= 8.0 * unit(coarsest) * most
        };
        let (to, remedy) = if is_rounded(DType::F16, DType::Bf16) {
            ("16 bits", "run it in f64 or f32, angles too")
        } else if self.mapping.truth.is_f64() && is_rounded(DType::F32, DType::F32) {
            ("f32", "dump it in f32, or compute its angles in f64")
        } else {
            return None;
        };
        Some(format!(
            "{} differs by {worst:.0e}, as roundings to {to} do: {remedy}",
            self.name()
        ))
    }
}

/// The orders of `0..count` except the given one.
fn permutations(count: usize) -> Vec<Vec<usize>> {
    let mut found = vec![vec![]];
    for _ in 0..count {
        let longer = |order: Vec<usize>| {
            let rest = (0..count)
                .filter(|axis| !order.contains(axis))
                .collect::<Vec<_>>();
            rest.into_iter()
                .map(move |axis| [&order[..], &[axis]].concat())
        };
        found = found.into_iter().flat_map(longer).collect();
    }
    found.remove(0);
    found
}
