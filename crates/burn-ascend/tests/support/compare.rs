//! The criterion of equal results.

use burn::backend::{DType, TensorData};

use super::input::unravel;

/// How far a result may lie from the reference, in units of the last place of the result's type.
///
/// A device may add in another order and evaluate functions by another approximation; it may not
/// move, select, compare or count differently.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tolerance {
    /// The same value; NaN equals NaN, and the zeros equal each other.
    Exact,
    /// Units of each value: for arithmetic and functions of single elements.
    Ulps(u32),
    /// Units of the largest value of the result, or of 1 if that is larger: for sums, where terms
    /// cancel.
    Scaled(u32),
}

fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F64 => 2f64.powi(-52),
        _ => 2f64.powi(-23),
    }
}

/// Below this a type has no more relative precision.
fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-14),
        DType::F64 => f64::MIN_POSITIVE,
        _ => 2f64.powi(-126),
    }
}

/// Compares one output with the reference; the error names the first place where they differ.
pub(crate) fn compare(
    expected: &TensorData,
    found: &TensorData,
    tolerance: Tolerance,
) -> Result<(), String> {
    if expected.dtype() != found.dtype() {
        return Err(format!(
            "expected {}, found {}",
            expected.dtype().name(),
            found.dtype().name()
        ));
    }
    if expected.shape() != found.shape() {
        return Err(format!(
            "expected shape {:?}, found {:?}",
            expected.shape(),
            found.shape()
        ));
    }
    let bytes = expected.num_elements() * expected.dtype().size();
    if found.as_bytes().len() != bytes {
        return Err(format!(
            "expected {bytes} bytes, found {}",
            found.as_bytes().len()
        ));
    }
    if expected.as_bytes() == found.as_bytes() {
        return Ok(());
    }
    let dtype = expected.dtype();
    let differs = if dtype.is_float() {
        let expected: Vec<f64> = expected.iter::<f64>().collect();
        let finite = expected.iter().filter(|v| v.is_finite());
        let largest = finite.fold(1f64, |largest, v| largest.max(v.abs()));
        let close = |e: f64, f: f64| {
            let scale = match tolerance {
                Tolerance::Exact => 0.0,
                Tolerance::Ulps(units) => f64::from(units) * e.abs().max(smallest_normal(dtype)),
                Tolerance::Scaled(units) => f64::from(units) * largest,
            };
            e == f || (e.is_nan() && f.is_nan()) || (e - f).abs() <= scale * unit(dtype)
        };
        first_difference(expected.into_iter(), found.iter::<f64>(), close)
    } else {
        first_difference(expected.iter::<i64>(), found.iter::<i64>(), |e, f| e == f)
    };
    match differs {
        None if dtype.is_float() => Ok(()),
        // Whole numbers and flags are the same only if their bytes are.
        None => Err("same values in other bytes".into()),
        Some((at, count, values)) => Err(format!(
            "{count} of {} differ, first at {:?}: {values}",
            expected.num_elements(),
            unravel(at, expected.shape()),
        )),
    }
}

type Difference = (usize, usize, String);

fn first_difference<T: Copy + std::fmt::Display>(
    expected: impl Iterator<Item = T>,
    found: impl Iterator<Item = T>,
    same: impl Fn(T, T) -> bool,
) -> Option<Difference> {
    let mut differing = expected
        .zip(found)
        .enumerate()
        .filter(|(_, (e, f))| !same(*e, *f));
    let (at, (e, f)) = differing.next()?;
    Some((
        at,
        1 + differing.count(),
        format!("expected {e}, found {f}"),
    ))
}

#[test]
fn differences_are_seen() {
    let data =
        |values: &[f64], shape: &[usize], dtype| super::input::tensor_data(dtype, values, shape);
    let check = |expected: &[f64], found: &[f64], dtype, tolerance| {
        compare(
            &data(expected, &[2], dtype),
            &data(found, &[2], dtype),
            tolerance,
        )
    };
    let nan = f64::NAN;
    let infinity = f64::INFINITY;
    use Tolerance::*;
    check(&[1.0, nan], &[1.0, nan], DType::F32, Exact).expect("NaN equals NaN");
    check(&[1.0, 0.0], &[1.0, -0.0], DType::F32, Exact).expect("the zeros are equal");
    check(&[1.0, 8.0], &[1.0, 8.007], DType::F16, Ulps(1)).expect("one unit of 8");
    check(&[0.01, 8.0], &[0.012, 8.0], DType::F16, Scaled(1)).expect("one unit of the largest");
    let refused = [
        check(&[1.0, nan], &[1.0, 2.0], DType::F32, Scaled(1000)),
        check(&[1.0, infinity], &[1.0, 65504.0], DType::F16, Scaled(1000)),
        check(&[1.0, 65504.0], &[1.0, infinity], DType::F16, Scaled(1000)),
        check(&[1.0, 2.0], &[1.0, 2.0 + 1e-6], DType::F32, Exact),
        check(&[1.0, 8.0], &[1.0, 8.02], DType::F16, Ulps(1)),
        check(&[0.01, 8.0], &[0.03, 8.0], DType::F16, Scaled(1)),
        check(&[1.0, 2.0], &[1.0, 3.0], DType::I64, Scaled(1000)),
        compare(
            &data(&[1.0], &[1], DType::F32),
            &data(&[1.0], &[1], DType::F16),
            Scaled(1000),
        ),
        compare(
            &data(&[1.0], &[1], DType::F32),
            &data(&[1.0], &[1, 1], DType::F32),
            Exact,
        ),
    ];
    for (k, result) in refused.iter().enumerate() {
        assert!(result.is_err(), "difference {k} passed");
    }
}
