//! Why a file differs: known mistakes, tried on its inputs until one makes its results.
//!
//! A mistake is a whole case, so that it is rotated by the same kernel and held to the same
//! tolerance as the metadata's. Gradients are tried with the mistake that explains the forward.

use std::collections::BTreeMap;

use rope_core::{
    AxisLayout, Direction, InstructionSet, Pairing, Parallelism, Positions, RotarySpecBuilder,
};

use super::error::GoldenError;
use super::rotation::Bound;
use super::row::Row;
use super::tensors::largest;
use super::vectors::{GoldenVectors, Mapping};
use crate::buffer::{Buffer, DType};
use crate::engine::{AngleSource, Case, Cpu, Engine};
use crate::names::{axes_name, pairing_name};
use crate::tolerance::unit;

/// Bases of frequencies that models state.
const THETAS: [f64; 4] = [1e4, 5e5, 1e6, 5e6];

/// A rotation that is not the metadata's.
struct Mistake {
    /// What of it differs, as "pairing adjacent, not half".
    what: String,
    case: Case,
    operation: Direction,
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
            let found = forward.of_forward();
            let mistake = found.as_ref().and_then(|(_, mistake)| mistake.as_ref());
            let gradient = format!("d{}", forward.mapping.input.name);
            let mut adjoints = self.adjoint.iter();
            if let Some(adjoint) = adjoints.find(|adjoint| adjoint.truth.name == gradient) {
                let adjoint = Suspect::new(self, adjoint)?;
                reasons.insert(gradient, adjoint.of_gradient(mistake));
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

    /// Mistakes in the order in which they are tried: those that change one thing first.
    fn mistakes(&self) -> Vec<Mistake> {
        let base = Mistake {
            what: String::new(),
            case: self.case.clone(),
            operation: self.operation,
        };
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
            case: self.case.clone(),
            operation: self.operation.transposed(),
        };
        single.push(opposite);
        let axes = base.of_axes();
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
            single.extend(base.of_frequencies());
            single.extend(base.of_channels());
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
        let what = match &self.what[..] {
            "" => what,
            other => format!("{other}, and {what}"),
        };
        fits.then(|| Self {
            what,
            case: Case {
                spec,
                ..self.case.clone()
            },
            operation: self.operation,
        })
    }

    fn with_axes_from(&self, what: String, order: &[usize]) -> Option<Self> {
        let positions = &self.case.positions;
        let of_axis = |axis: &usize| {
            let axis = *axis;
            (0..positions.tokens()).map(move |token| positions.value(axis, token))
        };
        let values: Vec<f64> = order.iter().flat_map(of_axis).collect();
        let positions = Positions::real(order.len(), &values).ok()?;
        Some(Self {
            what,
            case: Case {
                positions,
                ..self.case.clone()
            },
            operation: self.operation,
        })
    }

    /// Other lanes for the axes, and other positions on them.
    fn of_axes(&self) -> Vec<Self> {
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
                self.with_spec(what, |spec| spec.axes(other))
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

    fn of_frequencies(&self) -> Vec<Self> {
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

    fn of_channels(&self) -> Vec<Self> {
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
            let what = format!("channels {offset} to {} turned", offset + rotary_dim);
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
}

impl<'a> Suspect<'a> {
    fn new(vectors: &'a GoldenVectors, mapping: &'a Mapping) -> Result<Self, GoldenError> {
        let input = Buffer::from_f64(DType::F64, &mapping.input.values);
        let bounds = vectors.bounds(DType::F64, DType::F64, mapping, &input)?;
        Ok(Self {
            vectors,
            mapping,
            bounds,
        })
    }

    fn name(&self) -> String {
        self.mapping.truth.name.clone()
    }

    /// What a rotation makes of the input.
    fn image(&self, case: &Case, direction: Direction) -> Option<Vec<f64>> {
        let case = Case {
            heads: self.mapping.heads,
            kv_heads: 0,
            ..case.clone()
        };
        let engine = Cpu {
            instructions: InstructionSet::PORTABLE,
            parallelism: Parallelism::SERIAL,
            angles: AngleSource::Tokens,
        };
        let input = Buffer::from_f64(DType::F64, &self.mapping.input.values);
        let (image, _) = engine.apply(&case, direction, &input, None).ok()?;
        Some(image.to_f64())
    }

    /// Whether the values are the file's, in the rows (heads of tokens) that `of` takes.
    fn fits_where(&self, values: &[f64], of: impl Fn(usize) -> bool) -> bool {
        let head_dim = self.vectors.case.spec.head_dim();
        let truth = &self.mapping.truth.values;
        values
            .iter()
            .zip(truth)
            .enumerate()
            .all(|(i, (value, exact))| {
                let row = i / head_dim;
                !of(row) || (value - exact).abs() <= self.bounds[row].allowed(DType::F64, *exact)
            })
    }

    fn fits(&self, values: &[f64]) -> bool {
        self.fits_where(values, |_| true)
    }

    fn is(&self, case: &Case, direction: Direction) -> bool {
        self.image(case, direction)
            .is_some_and(|image| self.fits(&image))
    }

    fn is_zero(&self) -> bool {
        self.mapping.truth.values.iter().all(|x| *x == 0.0)
    }

    /// What the file did instead of the metadata's rotation.
    fn of_forward(&self) -> Option<(String, Option<Mistake>)> {
        let (name, input) = (self.name(), &self.mapping.input);
        let expected = self.image(&self.vectors.case, self.vectors.operation)?;
        if self.fits(&expected) {
            return None;
        }
        if self.is_zero() {
            return Some((format!("{name} is zero"), None));
        }
        if self.fits(&input.values) {
            return Some((format!("{name} is {}: nothing is turned", input.name), None));
        }
        let mut mistakes = self.vectors.mistakes().into_iter();
        if let Some(mistake) = mistakes.find(|mistake| self.is(&mistake.case, mistake.operation)) {
            let reason = format!("{name} was made with {}", mistake.what);
            return Some((reason, Some(mistake)));
        }
        self.of_rounding(&expected).map(|reason| (reason, None))
    }

    /// What the file has in the place of the gradient of a rotation, which may be a mistaken one.
    fn of_gradient(&self, mistake: Option<&Mistake>) -> Option<String> {
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
        let (case, operation) = match mistake {
            Some(mistake) => (&mistake.case, mistake.operation),
            None => (&vectors.case, vectors.operation),
        };
        let adjoint = self.image(case, operation.transposed())?;
        if let Some(mistake) = mistake.filter(|_| self.fits(&adjoint)) {
            return Some(format!(
                "{name} is right for a rotation with {}",
                mistake.what
            ));
        }
        if self.fits(&upstream.values) {
            return Some(format!(
                "{name} is {}: the backward turns nothing",
                upstream.name
            ));
        }
        let forward = self.image(case, operation)?;
        if self.fits(&forward) {
            return Some(format!(
                "{name} is {} turned forward: the gradient turns the other way, with -sin",
                upstream.name
            ));
        }
        let halves: Vec<f64> = forward
            .iter()
            .zip(&adjoint)
            .map(|(x, y)| (x + y) / 2.0)
            .collect();
        if !case.spec.geometry().per_channel() && self.fits(&halves) {
            return Some(format!(
                "{name} has the products with cos alone: the gradient through those with sin (the \
                 rotated half) is lost"
            ));
        }
        if let Some(reason) = self.of_conjugate(case, operation) {
            return Some(reason);
        }
        if let Some(reason) = self.of_lost_rows(&adjoint) {
            return Some(reason);
        }
        let mut mistakes = vectors.mistakes().into_iter();
        let other = mistakes.find(|other| self.is(&other.case, other.operation.transposed()));
        match other {
            Some(other) => Some(format!(
                "{name} is the gradient of a rotation with {}, which is not that of {of}_out",
                other.what
            )),
            None => self.of_rounding(&expected),
        }
    }

    /// The forward with -sin, which is the adjoint of a rotation only.
    fn of_conjugate(&self, case: &Case, operation: Direction) -> Option<String> {
        if !case.spec.geometry().per_channel() {
            return None;
        }
        let positions = &case.positions;
        let of_axis =
            |axis| (0..positions.tokens()).map(move |token| -positions.value(axis, token));
        let values: Vec<f64> = (0..positions.axis_count()).flat_map(of_axis).collect();
        let positions = Positions::real(positions.axis_count(), &values).ok()?;
        let case = Case {
            positions,
            ..case.clone()
        };
        self.is(&case, operation).then(|| {
            format!(
                "{} is {} turned with -sin, which is the gradient only where the members of a pair \
                 share an angle",
                self.name(),
                self.mapping.input.name
            )
        })
    }

    /// Heads of tokens whose gradient is zero while the others have the right one.
    fn of_lost_rows(&self, adjoint: &[f64]) -> Option<String> {
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

    /// Differences that 16 bits make.
    fn of_rounding(&self, expected: &[f64]) -> Option<String> {
        let truth = &self.mapping.truth.values;
        let worst = largest(expected.iter().zip(truth).map(|(x, y)| x - y));
        let of_16_bits = 4.0 * unit(DType::Bf16) * largest(truth.iter().copied());
        (worst <= of_16_bits).then(|| {
            format!(
                "{} differs by {worst:.0e}, as roundings to 16 bits do: run it in f64 or f32, \
                 angles too",
                self.name()
            )
        })
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
