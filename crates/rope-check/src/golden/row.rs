//! One comparison.

use serde::Serialize;

/// How far a tensor is from its truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The tensor that was compared.
    pub tensor: String,
    /// The element type that the engine worked on, as `f32`; `i64` for position ids, `-` for a
    /// tensor that is missing.
    pub dtype: &'static str,
    /// The engine that computed it.
    pub engine: String,
    /// The largest absolute difference; infinite for a NaN, and for a tensor that is missing.
    pub max_abs: f64,
    /// The difference allowed at that element.
    pub tolerance: f64,
    /// The largest share of its tolerance that any element uses.
    pub ratio: f64,
    /// True if every element is within its tolerance.
    pub pass: bool,
    /// The element furthest beyond its tolerance, where one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<Worst>,
    /// The known mistake that makes the file's values, where the file is at fault and one is found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<String>,
    /// A note for the reader, though it passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// An element out of tolerance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Its index, or its name.
    pub at: String,
    /// The value that the engine computed.
    pub found: f64,
    /// The value in the file.
    pub expected: f64,
    /// The difference allowed there.
    pub tolerance: f64,
}

impl Row {
    /// The failing row of a tensor that should be there, and why it is not.
    pub(super) fn missing(tensor: &str, reason: String) -> Self {
        Self {
            tensor: tensor.to_owned(),
            dtype: "-",
            engine: "the file".to_owned(),
            max_abs: f64::INFINITY,
            tolerance: 0.0,
            ratio: f64::INFINITY,
            pass: false,
            worst: None,
            diagnosis: Some(reason),
            note: None,
        }
    }

    /// Compares element by element; `tolerance` takes an index and what is expected there, `at` an
    /// index.
    ///
    /// An expected infinity equals itself alone, whatever the tolerance. A NaN, a missing element
    /// and an element without a finite tolerance fail.
    pub fn compare(
        tensor: &str,
        dtype: &'static str,
        engine: &str,
        found: &[f64],
        expected: &[f64],
        tolerance: impl Fn(usize, f64) -> f64,
        at: impl Fn(usize) -> String,
    ) -> Self {
        let difference = |i: usize| match (found.get(i), expected.get(i)) {
            (Some(found), Some(expected)) if found == expected => 0.0,
            (Some(found), Some(expected)) if !(found - expected).is_nan() => {
                (found - expected).abs()
            }
            _ => f64::INFINITY,
        };
        let tolerance = |i: usize| match expected.get(i) {
            Some(expected) if expected.is_finite() => tolerance(i, *expected),
            _ => 0.0,
        };
        let share = |i: usize| match (difference(i), tolerance(i)) {
            (_, tolerance) if !tolerance.is_finite() => f64::INFINITY,
            (0.0, _) => 0.0,
            (difference, tolerance) => difference / tolerance,
        };
        let indices = 0..found.len().max(expected.len());
        let largest = indices
            .clone()
            .max_by(|a, b| difference(*a).total_cmp(&difference(*b)));
        let worst = indices.max_by(|a, b| share(*a).total_cmp(&share(*b)));
        let ratio = worst.map_or(0.0, share);
        let pass = ratio <= 1.0;
        let nan = f64::NAN;
        Self {
            tensor: tensor.to_owned(),
            dtype,
            engine: engine.to_owned(),
            max_abs: largest.map_or(0.0, difference),
            tolerance: largest.map_or(0.0, tolerance),
            ratio,
            pass,
            worst: worst.filter(|_| !pass).map(|i| Worst {
                at: at(i),
                found: found.get(i).copied().unwrap_or(nan),
                expected: expected.get(i).copied().unwrap_or(nan),
                tolerance: tolerance(i),
            }),
            diagnosis: None,
            note: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(found: &[f64], expected: &[f64]) -> Row {
        let label = |i: usize| i.to_string();
        let allowed = |i: usize, _| if i == 0 { 1.0 } else { 0.1 };
        Row::compare("x", "f32", "e", found, expected, allowed, label)
    }

    #[test]
    fn the_largest_difference_need_not_be_the_worst() {
        let row = compare(&[0.5, 2.0], &[0.0, 2.2]);
        assert_eq!((row.max_abs, row.tolerance, row.pass), (0.5, 1.0, false));
        assert_eq!(row.worst.map(|worst| worst.at), Some("1".to_owned()));
    }

    #[test]
    fn nan_and_missing_elements_fail() {
        for row in [
            compare(&[f64::NAN], &[0.0]),
            compare(&[0.0], &[f64::NAN]),
            compare(&[0.0], &[0.0, 0.0]),
            compare(&[0.0, 0.0], &[0.0]),
            compare(&[f64::NAN], &[f64::NAN]),
        ] {
            assert!(!row.pass, "{row:?}");
        }
        assert!(compare(&[], &[]).pass);
    }

    #[test]
    fn an_infinity_equals_itself_alone() {
        let inf = f64::INFINITY;
        assert!(compare(&[inf, -inf], &[inf, -inf]).pass);
        for (found, expected) in [(inf, -inf), (inf, 0.0), (0.0, inf), (f64::MAX, inf)] {
            let row = compare(&[found], &[expected]);
            assert!(!row.pass && row.tolerance.is_finite(), "{row:?}");
        }
    }

    #[test]
    fn without_a_finite_tolerance_nothing_passes() {
        for tolerance in [f64::INFINITY, f64::NAN] {
            let label = |i: usize| i.to_string();
            for found in [0.0, 1.0] {
                let row = Row::compare("x", "f32", "e", &[found], &[0.0], |_, _| tolerance, label);
                assert!(!row.pass, "{row:?}");
            }
        }
    }
}
