//! Softmax and the normalisations. All work on rows and accumulate in f64.

use super::call::{Call, Kernel, Operand, kernel};
use super::dtype::{DataType, FLOATS, FLT};
use super::element::{Lane, with_real};
use super::reduce::{axis_alone, rows_last};
use super::{refuse, tiling};
use crate::codes::Outcome;

/// exp(x - max) / Σ exp(x - max), or its logarithm.
pub(crate) fn softmax(x: Operand, dim: i64, logarithm: bool, out: Operand) -> Outcome<Kernel> {
    x.expect_type(FLOATS)?;
    x.expect_rank(usize::from(logarithm)..=8)?;
    out.expect_dims(&x.dims)?;
    out.expect_type(FLOATS)?;
    let (_, axes) = axis_alone(&x, dim)?;
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_real!(x.dtype.class(), R => {
            let mut values = data.read_order::<R>(&x, &order)?;
            for row in values.chunks_exact_mut(row.max(1)) {
                let most = row.iter().copied().reduce(Lane::larger).unwrap_or_default();
                row.iter_mut().for_each(|x| *x -= most);
                let total: f64 = row.iter().map(|x| Lane::to_f64(x.exp())).sum();
                let log = <R as Lane>::from_f64(total.ln());
                let total = <R as Lane>::from_f64(total);
                for x in row {
                    *x = if logarithm { *x - log } else { x.exp() / total };
                }
            }
            data.write_order(&out, &order, &values)
        })
    })
}

/// The shape of the statistics: the leading axes, and 1 for each that is normalised; and the
/// length of a row.
fn statistics_dims(x: &Operand, normalized: &[usize]) -> (Vec<usize>, usize) {
    let mut dims = x.dims[..x.rank() - normalized.len()].to_vec();
    dims.resize(x.rank(), 1);
    (dims, normalized.iter().product())
}

/// The trailing axes of a tensor, given as a list of sizes.
fn normalized_dims(x: &Operand, shape: &[i64]) -> Outcome<Vec<usize>> {
    let dims: Vec<usize> = shape.iter().map(|dim| *dim as usize).collect();
    if dims.is_empty() || !x.dims.ends_with(&dims) {
        return refuse(format!(
            "normalizedShape is {shape:?}, trailing axes of {:?} of {} are expected",
            x.dims, x.name
        ));
    }
    Ok(dims)
}

/// The parameters of a layer norm besides its input and output.
pub(crate) struct LayerNorm {
    pub(crate) normalized: Vec<i64>,
    pub(crate) weight: Option<Operand>,
    pub(crate) bias: Option<Operand>,
    pub(crate) eps: f64,
    pub(crate) mean: Option<Operand>,
    pub(crate) rstd: Option<Operand>,
}

/// y = (x - mean)·rstd·weight + bias, rstd = 1/sqrt(variance + eps).
pub(crate) fn layer_norm(
    call: &mut Call,
    x: Operand,
    p: LayerNorm,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(FLT)?;
    let normalized = normalized_dims(&x, &p.normalized)?;
    // Weight and bias are of the input's type or f32, both of one.
    for tensor in p.weight.iter().chain(&p.bias) {
        tensor.expect_dims(&normalized)?;
        if tensor.dtype != x.dtype {
            tensor.expect_dtype(DataType::Float)?;
        }
    }
    if let (Some(weight), Some(bias)) = (&p.weight, &p.bias) {
        bias.expect_dtype(weight.dtype)?;
    }
    out.expect_like(&x, &x.dims)?;
    let (dims, row) = statistics_dims(&x, &normalized);
    let statistics = || p.mean.iter().chain(&p.rstd);
    for tensor in statistics() {
        tensor.expect_type(FLT)?;
    }
    for tensor in statistics() {
        // The vendor checks their shape where it copies them.
        tensor.expect_copy_of(&x, tensor.dtype, &dims)?;
    }
    kernel(move |data| {
        let mut values = data.read::<f32>(&x)?;
        let read = |tensor: &Option<Operand>, neutral: f32| match tensor {
            Some(tensor) => data.read::<f32>(tensor),
            None => Ok(vec![neutral; row]),
        };
        let (w, b) = (read(&p.weight, 1.0)?, read(&p.bias, 0.0)?);
        let (mut means, mut rstds) = (Vec::new(), Vec::new());
        for row in values.chunks_exact_mut(row.max(1)) {
            let count = row.len() as f64;
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
            let squares = row.iter().map(|x| (f64::from(*x) - mean).powi(2));
            let variance = squares.sum::<f64>() / count;
            let (mean, rstd) = (mean as f32, (1.0 / (variance + p.eps).sqrt()) as f32);
            for (x, (w, b)) in row.iter_mut().zip(w.iter().zip(&b)) {
                *x = (*x - mean) * rstd * w + b;
            }
            means.push(mean);
            rstds.push(rstd);
        }
        data.write(&out, &values)?;
        for (tensor, values) in [(&p.mean, means), (&p.rstd, rstds)] {
            if let Some(tensor) = tensor {
                data.write(tensor, &values)?;
            }
        }
        Ok(())
    })
}

/// The shape of gamma: the trailing axes of `x`, of its type or f32.
fn expect_gamma(x: &Operand, gamma: &Operand) -> Outcome<Vec<usize>> {
    x.expect_type(FLT)?;
    if gamma.dtype != x.dtype {
        gamma.expect_dtype(DataType::Float)?;
    }
    if gamma.rank() == 0 || gamma.is_empty() || !x.dims.ends_with(&gamma.dims) {
        return tiling(refuse(format!(
            "gamma has shape {:?}, trailing axes of {:?} of {} are expected",
            gamma.dims, x.dims, x.name
        )));
    }
    Ok(gamma.dims.clone())
}

/// y = x·rstd·gamma, rstd = 1/sqrt(mean(x²) + epsilon).
pub(crate) fn rms_norm(
    call: &mut Call,
    x: Operand,
    gamma: Operand,
    epsilon: f64,
    y: Operand,
    rstd: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    y.expect_dtype(x.dtype)?;
    rstd.expect_dtype(DataType::Float)?;
    let normalized = expect_gamma(&x, &gamma)?;
    let (dims, row) = statistics_dims(&x, &normalized);
    tiling(y.expect_dims(&x.dims))?;
    tiling(rstd.expect_dims(&dims))?;
    kernel(move |data| {
        let (mut values, w) = (data.read::<f32>(&x)?, data.read::<f32>(&gamma)?);
        let mut rstds = Vec::new();
        for row in values.chunks_exact_mut(row) {
            let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let scale = (1.0 / (squares / row.len() as f64 + epsilon).sqrt()) as f32;
            for (x, w) in row.iter_mut().zip(&w) {
                *x = *x * scale * w;
            }
            rstds.push(scale);
        }
        data.write(&y, &values)?;
        data.write(&rstd, &rstds)
    })
}

/// The inputs of the gradient of an RMS norm.
pub(crate) struct RmsNormSaved {
    pub(crate) dy: Operand,
    pub(crate) x: Operand,
    pub(crate) rstd: Operand,
    pub(crate) gamma: Operand,
}

/// dx = rstd·(dy·gamma - x̂·mean(dy·gamma·x̂)), dgamma = Σ dy·x̂, with x̂ = x·rstd.
pub(crate) fn rms_norm_backward(
    call: &mut Call,
    saved: RmsNormSaved,
    dx: Operand,
    dgamma: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let RmsNormSaved { dy, x, rstd, gamma } = saved;
    dy.expect_rank(2..=8)?;
    dy.expect_dtype(x.dtype)?;
    dx.expect_dtype(x.dtype)?;
    for tensor in [&rstd, &dgamma] {
        tensor.expect_dtype(DataType::Float)?;
    }
    let normalized = expect_gamma(&x, &gamma)?;
    let (dims, row) = statistics_dims(&x, &normalized);
    tiling(dy.expect_dims(&x.dims))?;
    tiling(dx.expect_dims(&x.dims))?;
    tiling(dgamma.expect_dims(&normalized))?;
    // The documentation gives rstd the leading axes only, the forward gives it all of them.
    if rstd.dims[..] != dims[..x.rank() - normalized.len()] {
        tiling(rstd.expect_dims(&dims))?;
    }
    kernel(move |data| {
        let (g, x) = (data.read::<f32>(&dy)?, data.read::<f32>(&x)?);
        let (rstd, w) = (data.read::<f32>(&rstd)?, data.read::<f32>(&gamma)?);
        let (mut to_x, mut to_gamma) = (vec![0.0_f32; x.len()], vec![0.0_f64; row]);
        for (r, to_x) in to_x.chunks_exact_mut(row).enumerate() {
            let (g, x) = (&g[r * row..][..row], &x[r * row..][..row]);
            let scale = f64::from(rstd[r]);
            let hat: Vec<f64> = x.iter().map(|x| f64::from(*x) * scale).collect();
            let scaled: Vec<f64> = g.iter().zip(&w).map(|(g, w)| f64::from(g * w)).collect();
            let mean = scaled.iter().zip(&hat).map(|(s, h)| s * h).sum::<f64>() / row as f64;
            for i in 0..row {
                to_x[i] = (scale * (scaled[i] - hat[i] * mean)) as f32;
                to_gamma[i] += f64::from(g[i]) * hat[i];
            }
        }
        data.write(&dx, &to_x)?;
        data.write(&dgamma, &to_gamma)
    })
}
