//! Gradients of a dump, checked without knowing its rotation.
//!
//! A rotation R is linear, so <gq, R q> = <R' gq, q> for every q and gq: of each head of a token,
//! q_out and dq have to agree in one number. With random q and gq a wrong dq agrees by chance only.

use std::path::Path;

use super::{Row, Worst};
use crate::buffer::DType;
use crate::golden::tensors::{Kind, Tensors, Values, largest};
use crate::golden::{GoldenError, MAX_BYTES, lost_gradient};
use crate::tolerance::unit;

/// The element types of tensors, most exact first.
const TYPES: [&str; 4] = ["f64", "f32", "f16", "bf16"];
/// Roundings of a rotated value: two products, their sum, cos and sin (the same in both
/// directions), and the store.
const ROUNDINGS: f64 = 6.0;
/// The same in 16 bits, in which cos and sin need no allowance: whatever they are rounded to, both
/// directions turn by it.
const NARROW_ROUNDINGS: f64 = 3.0;

/// Checks q_out against dq, and k_out against dk, in a `.safetensors` file whose tensors are named
/// as `mrope verify` wants them. It reads q, q_out, gq and dq (k, k_out, gk and dk), channels in
/// the last dimension, and nothing else. What was computed in 16 bits has a tolerance for that.
///
/// # Errors
/// [`GoldenError`]: a file that cannot be read, tensors missing, of other types or of different
/// shapes; [`GoldenError::NotFinite`] for an infinity or a NaN, which any gradient would agree
/// with. An upstream gradient without the gradient is a row that fails.
pub fn check_dump(path: &Path) -> Result<Vec<Row>, GoldenError> {
    let file = Tensors::parse(&plain_files::read(path, MAX_BYTES)?)?;
    let mut rows = Vec::new();
    for of in ["q", "k"] {
        let has = |name: String| Ok::<_, GoldenError>(find(&file, &name)?.is_some());
        if of == "q" || has(format!("g{of}"))? || has(format!("d{of}"))? {
            rows.push(check(&file, of, path)?);
        }
    }
    Ok(rows)
}

fn check(file: &Tensors, of: &'static str, path: &Path) -> Result<Row, GoldenError> {
    let need = |name: &str| {
        let missing = || file.missing(&format!("{name}.{{f64,f32}}"), "the check of the gradient");
        find(file, name)?.ok_or_else(missing)
    };
    let (name, out) = (format!("d{of}"), format!("{of}_out"));
    let (x, y, upstream) = (need(of)?, need(&out)?, need(&format!("g{of}"))?);
    let row = |dtype, worst: Worst, problem| Row {
        case: path.display().to_string(),
        check: if of == "q" {
            "<gq, q_out> = <dq, q>"
        } else {
            "<gk, k_out> = <dk, k>"
        },
        engine: "the dump".to_owned(),
        dtype,
        max_error: worst.error,
        tolerance: worst.tolerance,
        pass: worst.pass(),
        problem,
        skipped: None,
    };
    let Some(gradient) = find(file, &name)? else {
        let dtype = if y.is_f64() { DType::F64 } else { DType::F32 };
        return Ok(row(dtype, Worst::UNBOUNDED, Some(lost_gradient(of))));
    };
    let head_dim = x.shape.last().copied().unwrap_or(0);
    if x.values.is_empty() {
        return Err(x.misshapen("at least one head"));
    }
    for other in [y, upstream, gradient] {
        if other.shape != x.shape {
            return Err(other.misshapen(format!("{:?}, as {of} has", x.shape)));
        }
    }
    for values in [x, y, upstream, gradient] {
        values.expect_finite()?;
    }
    let narrow = narrow_type([y, gradient]);
    let is_f64 = y.is_f64() && gradient.is_f64();
    let wide = if is_f64 { DType::F64 } else { DType::F32 };
    let dtype = narrow.unwrap_or(wide);
    let mut worst = Worst::NONE;
    for start in (0..x.values.len()).step_by(head_dim) {
        let head = |values: &'_ Values| values.values[start..start + head_dim].to_vec();
        let (x, y, upstream, gradient) = (head(x), head(y), head(upstream), head(gradient));
        let allowed = match narrow {
            None => {
                let reach = |a: &[f64], b: &[f64]| largest(a.iter().chain(b).copied());
                let forward_error = reach(&x, &y) * sum(upstream.iter().map(|x| x.abs()));
                let gradient_error = reach(&upstream, &gradient) * sum(x.iter().map(|x| x.abs()));
                ROUNDINGS * (forward_error + gradient_error)
            }
            // All roundings in one direction would come to as much as the product itself. They are
            // independent: their sum is that of their squares, and a head's pairs twice its own.
            Some(_) => {
                let error = |weights: &[f64], rounded: &[f64]| {
                    let squares = sum(rounded.iter().map(|x| x * x));
                    largest(weights.iter().copied()) * (2.0 * squares).sqrt()
                };
                NARROW_ROUNDINGS * (error(&upstream, &y) + error(&x, &gradient))
            }
        };
        worst.see(
            sum(gradient.iter().zip(&x).map(|(g, x)| g * x)),
            sum(upstream.iter().zip(&y).map(|(g, y)| g * y)),
            unit(dtype) * allowed,
        );
    }
    let values = [&y.values[..], &upstream.values, &gradient.values];
    let problem = (!worst.pass()).then(|| problem(of, head_dim, values, narrow));
    Ok(row(dtype, worst, problem))
}

/// The 16-bit type that a program ran in: the one that holds its results, whatever type they were
/// dumped in. Not so in f64, which nobody dumps such a program in: it rounds on the way there.
fn narrow_type(results: [&Values; 2]) -> Option<DType> {
    let is_exact = |dtype: DType, values: &Values| {
        let holds = |x: &f64| dtype.round(*x) == *x;
        !values.is_f64() && values.values.iter().all(holds)
    };
    let mut narrow = [DType::Bf16, DType::F16].into_iter();
    narrow.find(|dtype| results.iter().all(|values| is_exact(*dtype, values)))
}

fn sum(terms: impl Iterator<Item = f64>) -> f64 {
    terms.sum()
}

/// The description of a wrong gradient.
fn problem(
    of: &str,
    head_dim: usize,
    [y, upstream, gradient]: [&[f64]; 3],
    narrow: Option<DType>,
) -> String {
    let is_zero = |row: &[f64]| row.iter().all(|x| *x == 0.0);
    let lost = gradient.chunks(head_dim).filter(|row| is_zero(row)).count();
    let rows = gradient.len() / head_dim;
    if lost == rows {
        return format!("d{of} is zero: the gradient of {of} is lost");
    }
    if lost > 0 {
        return format!("d{of} is zero in {lost} of {rows} heads of tokens");
    }
    if gradient == upstream {
        return format!("d{of} is g{of}: the backward rotates nothing");
    }
    if is_zero(y) {
        return format!("{of}_out is zero");
    }
    for dtype in [DType::Bf16, DType::F16] {
        if narrow.is_none() && y.iter().all(|x| dtype.round(*x) == *x) {
            return format!(
                "{of}_out was rounded to {}: run it in f64 or f32",
                dtype.name()
            );
        }
    }
    format!("d{of} is not the gradient of {of}_out; mrope verify names some mistakes")
}

/// The tensor `name.X` for the most exact X that is there.
fn find<'a>(file: &'a Tensors, name: &str) -> Result<Option<&'a Values>, GoldenError> {
    for dtype in TYPES {
        if let Some(found) = file.find(&format!("{name}.{dtype}"), Kind::Floats)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}
