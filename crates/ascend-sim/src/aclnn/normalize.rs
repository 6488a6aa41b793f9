//! Softmax and the normalisations, with their gradients. All work on rows and accumulate in f64.

use super::call::{Call, Kernel, Operand, kernel};
use super::dtype::{DataType, FLOATS, FLT};
use super::element::{Lane, with_real};
use super::reduce::rows_last;
use super::refuse;
use crate::codes::{ACLNN_NULLPTR, ACLNN_TILING_ERROR, Failure, Outcome};

fn axis_list(x: &Operand, dim: i64) -> Outcome<Vec<usize>> {
    let axis = x.axis(dim, "dim")?;
    Ok((0..x.rank()).filter(|other| *other == axis).collect())
}

/// exp(x - max) / Σ exp(x - max), or its logarithm.
pub(crate) fn softmax(x: &Operand, dim: i64, logarithm: bool, out: &Operand) -> Outcome<Kernel> {
    x.expect_type(FLOATS)?;
    x.expect_rank(usize::from(logarithm)..=8)?;
    out.expect_dims(&x.dims)?;
    if logarithm {
        out.expect_dtype(x.dtype)?;
    } else {
        out.expect_type(FLOATS)?;
    }
    let axes = axis_list(x, dim)?;
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_real!(x.dtype.class(), R => {
            let mut values = data.read_order::<R>(&x, &order)?;
            for row in values.chunks_exact_mut(row.max(1)) {
                let most = row.iter().copied().reduce(Lane::larger).unwrap_or_default();
                row.iter_mut().for_each(|x| *x -= most);
                let total: f64 = row.iter().map(|x| Lane::to_f64(x.exp())).sum();
                let (total, log) = (<R as Lane>::from_f64(total), <R as Lane>::from_f64(total.ln()));
                row.iter_mut().for_each(|x| *x = if logarithm { *x - log } else { x.exp() / total });
            }
            data.write_order(&out, &order, &values)
        })
    })
}

/// Of softmax y(g - Σ g·y), of its logarithm g - exp(y)·Σ g; y is the forward's output.
pub(crate) fn softmax_backward(
    gradient: &Operand,
    output: &Operand,
    dim: i64,
    logarithm: bool,
    out: &Operand,
) -> Outcome<Kernel> {
    gradient.expect_type(FLT)?;
    for tensor in [output, out] {
        tensor.expect_dtype(gradient.dtype)?;
        tensor.expect_dims(&gradient.dims)?;
    }
    let axes = axis_list(gradient, dim)?;
    let (gradient, output, out) = (gradient.clone(), output.clone(), out.clone());
    kernel(move |data| {
        let (order, row) = rows_last(&gradient, &axes);
        let mut g = data.read_order::<f32>(&gradient, &order)?;
        let y = data.read_order::<f32>(&output, &order)?;
        for (g, y) in g
            .chunks_exact_mut(row.max(1))
            .zip(y.chunks_exact(row.max(1)))
        {
            if logarithm {
                let total = f32::sum(g);
                g.iter_mut().zip(y).for_each(|(g, y)| *g -= y.exp() * total);
            } else {
                let total = dot(g, y) as f32;
                g.iter_mut().zip(y).for_each(|(g, y)| *g = y * (*g - total));
            }
        }
        data.write_order(&out, &order, &g)
    })
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

/// The leading axes with 1 in the place of those that are normalised; how long a row is.
fn statistics_dims(x: &Operand, normalized: &[usize]) -> (Vec<usize>, usize) {
    let kept = x.rank() - normalized.len();
    let mut dims = x.dims[..kept].to_vec();
    dims.resize(x.rank(), 1);
    (dims, normalized.iter().product())
}

/// The trailing axes of a tensor, which a list of sizes names.
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

/// Weight and bias of a layer norm: absent, or of the input's type or f32, both of one.
fn expect_affine(
    x: &Operand,
    normalized: &[usize],
    weight: Option<&Operand>,
    bias: Option<&Operand>,
) -> Outcome {
    for tensor in weight.iter().chain(&bias) {
        tensor.expect_dims(normalized)?;
        if tensor.dtype != x.dtype {
            tensor.expect_dtype(DataType::Float)?;
        }
    }
    match (weight, bias) {
        (Some(weight), Some(bias)) => bias.expect_dtype(weight.dtype),
        _ => Ok(()),
    }
}

/// What a layer norm is called with besides its input and output.
pub(crate) struct LayerNorm<'a> {
    pub(crate) normalized: &'a [i64],
    pub(crate) weight: Option<Operand>,
    pub(crate) bias: Option<Operand>,
}

/// y = (x - mean)·rstd·weight + bias, rstd = 1/sqrt(variance + eps).
pub(crate) fn layer_norm(
    call: &mut Call,
    x: &Operand,
    parameters: LayerNorm<'_>,
    eps: f64,
    out: &Operand,
    mean: Option<Operand>,
    rstd: Option<Operand>,
) -> Outcome<Kernel> {
    call.distinct();
    let LayerNorm {
        normalized,
        weight,
        bias,
    } = parameters;
    x.expect_type(FLT)?;
    let normalized = normalized_dims(x, normalized)?;
    expect_affine(x, &normalized, weight.as_ref(), bias.as_ref())?;
    out.expect_dims(&x.dims)?;
    out.expect_dtype(x.dtype)?;
    let (dims, row) = statistics_dims(x, &normalized);
    for tensor in mean.iter().chain(&rstd) {
        tensor.expect_dims(&dims)?;
        tensor.expect_type(FLT)?;
    }
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let mut values = data.read::<f32>(&x)?;
        let read = |tensor: &Option<Operand>, neutral: f32| match tensor {
            Some(tensor) => data.read::<f32>(tensor),
            None => Ok(vec![neutral; row]),
        };
        let (w, b) = (read(&weight, 1.0)?, read(&bias, 0.0)?);
        let (mut means, mut rstds) = (Vec::new(), Vec::new());
        for row in values.chunks_exact_mut(row.max(1)) {
            let count = row.len() as f64;
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
            let variance = row
                .iter()
                .map(|x| (f64::from(*x) - mean).powi(2))
                .sum::<f64>()
                / count;
            let (mean, rstd) = (mean as f32, (1.0 / (variance + eps).sqrt()) as f32);
            for (x, (w, b)) in row.iter_mut().zip(w.iter().zip(&b)) {
                *x = (*x - mean) * rstd * w + b;
            }
            means.push(mean);
            rstds.push(rstd);
        }
        data.write(&out, &values)?;
        for (tensor, values) in [(&mean, means), (&rstd, rstds)] {
            if let Some(tensor) = tensor {
                data.write(tensor, &values)?;
            }
        }
        Ok(())
    })
}

/// Outputs that a mask asks for: one that is asked for and missing is an error, others are dropped.
pub(crate) fn masked_outputs<const N: usize>(
    mask: &[bool],
    outputs: [(Option<Operand>, &str); N],
) -> Outcome<[Option<Operand>; N]> {
    if mask.len() != N {
        return refuse(format!(
            "outputMask has {} flags, {N} are expected",
            mask.len()
        ));
    }
    let mut wanted = Vec::with_capacity(N);
    for ((output, name), flag) in outputs.into_iter().zip(mask) {
        match (output, flag) {
            (None, true) => {
                return Err(Failure::new(
                    ACLNN_NULLPTR,
                    format!("{name} is null and outputMask asks for it"),
                ));
            }
            (output, flag) => wanted.push(output.filter(|_| *flag)),
        }
    }
    wanted
        .try_into()
        .or_else(|_| refuse("outputMask does not fit the outputs"))
}

/// What a gradient of layer norm takes besides its parameters.
pub(crate) struct LayerNormSaved<'a> {
    pub(crate) gradient: &'a Operand,
    pub(crate) x: &'a Operand,
    pub(crate) mean: &'a Operand,
    pub(crate) rstd: &'a Operand,
}

/// The gradients of input, weight and bias.
pub(crate) fn layer_norm_backward(
    call: &mut Call,
    saved: LayerNormSaved<'_>,
    parameters: LayerNorm<'_>,
    outputs: [Option<Operand>; 3],
) -> Outcome<Kernel> {
    call.distinct();
    let LayerNormSaved {
        gradient,
        x,
        mean,
        rstd,
    } = saved;
    let LayerNorm {
        normalized,
        weight,
        bias,
    } = parameters;
    x.expect_type(FLT)?;
    gradient.expect_dtype(x.dtype)?;
    gradient.expect_dims(&x.dims)?;
    if x.is_empty() {
        return refuse(format!(
            "input has shape {:?}, empty tensors are not offered",
            x.dims
        ));
    }
    let normalized = normalized_dims(x, normalized)?;
    expect_affine(x, &normalized, weight.as_ref(), bias.as_ref())?;
    let (dims, row) = statistics_dims(x, &normalized);
    rstd.expect_dtype(mean.dtype)?;
    for tensor in [mean, rstd] {
        tensor.expect_dims(&dims)?;
        if tensor.dtype != x.dtype {
            tensor.expect_dtype(DataType::Float)?;
        }
    }
    let [to_x, to_weight, to_bias] = &outputs;
    if let Some(out) = to_x {
        out.expect_dims(&x.dims)?;
        out.expect_dtype(x.dtype)?;
    }
    for out in to_weight.iter().chain(to_bias) {
        out.expect_dims(&normalized)?;
        out.expect_dtype(weight.as_ref().map_or(out.dtype, |weight| weight.dtype))?;
    }
    let operands = [gradient, x, mean, rstd].map(Operand::clone);
    kernel(move |data| {
        let [gradient, x, mean, rstd] = &operands;
        let (g, x) = (data.read::<f32>(gradient)?, data.read::<f32>(x)?);
        let (mean, rstd) = (data.read::<f32>(mean)?, data.read::<f32>(rstd)?);
        let w = match &weight {
            Some(weight) => data.read::<f32>(weight)?,
            None => vec![1.0; row],
        };
        let (mut dx, mut dw, mut db) = (vec![0.0_f32; x.len()], vec![0.0; row], vec![0.0; row]);
        for (r, dx) in dx.chunks_exact_mut(row).enumerate() {
            let (g, x) = (&g[r * row..][..row], &x[r * row..][..row]);
            let hat: Vec<f64> = x
                .iter()
                .map(|x| f64::from((x - mean[r]) * rstd[r]))
                .collect();
            let scaled: Vec<f64> = g.iter().zip(&w).map(|(g, w)| f64::from(g * w)).collect();
            let first = scaled.iter().sum::<f64>() / row as f64;
            let second = scaled.iter().zip(&hat).map(|(s, h)| s * h).sum::<f64>() / row as f64;
            for i in 0..row {
                dx[i] = (f64::from(rstd[r]) * (scaled[i] - first - hat[i] * second)) as f32;
                dw[i] += f64::from(g[i]) * hat[i];
                db[i] += f64::from(g[i]);
            }
        }
        let [to_x, to_weight, to_bias] = &outputs;
        if let Some(out) = to_x {
            data.write(out, &dx)?;
        }
        for (out, values) in [(to_weight, dw), (to_bias, db)] {
            if let Some(out) = out {
                data.write(out, &values)?;
            }
        }
        Ok(())
    })
}

/// Shape errors of the operators with generated wrappers come from the tiling.
fn tiling<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| Failure::new(ACLNN_TILING_ERROR, failure.message))
}

/// gamma, which has the trailing axes of `x`.
fn expect_gamma(x: &Operand, gamma: &Operand) -> Outcome<Vec<usize>> {
    gamma.expect_type(FLT)?;
    tiling(
        if gamma.rank() == 0 || gamma.is_empty() || !x.dims.ends_with(&gamma.dims) {
            refuse(format!(
                "gamma has shape {:?}, trailing axes of {:?} of {} are expected",
                gamma.dims, x.dims, x.name
            ))
        } else {
            Ok(gamma.dims.clone())
        },
    )
}

/// y = x·rstd·gamma, rstd = 1/sqrt(mean(x²) + epsilon).
pub(crate) fn rms_norm(
    call: &mut Call,
    x: &Operand,
    gamma: &Operand,
    epsilon: f64,
    y: &Operand,
    rstd: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(FLT)?;
    if gamma.dtype != x.dtype {
        gamma.expect_dtype(DataType::Float)?;
    }
    y.expect_dtype(x.dtype)?;
    rstd.expect_dtype(DataType::Float)?;
    let normalized = expect_gamma(x, gamma)?;
    let (dims, row) = statistics_dims(x, &normalized);
    tiling(y.expect_dims(&x.dims))?;
    tiling(rstd.expect_dims(&dims))?;
    let (x, gamma, y, rstd) = (x.clone(), gamma.clone(), y.clone(), rstd.clone());
    kernel(move |data| {
        let (mut values, w) = (data.read::<f32>(&x)?, data.read::<f32>(&gamma)?);
        let mut rstds = Vec::new();
        for row in values.chunks_exact_mut(row) {
            let square = dot(row, row) / row.len() as f64;
            let scale = (1.0 / (square + epsilon).sqrt()) as f32;
            row.iter_mut()
                .zip(&w)
                .for_each(|(x, w)| *x = *x * scale * w);
            rstds.push(scale);
        }
        data.write(&y, &values)?;
        data.write(&rstd, &rstds)
    })
}

/// What the gradient of an RMS norm takes.
pub(crate) struct RmsNormSaved<'a> {
    pub(crate) dy: &'a Operand,
    pub(crate) x: &'a Operand,
    pub(crate) rstd: &'a Operand,
    pub(crate) gamma: &'a Operand,
}

/// dx = rstd·(dy·gamma - x̂·mean(dy·gamma·x̂)), dgamma = Σ dy·x̂, with x̂ = x·rstd.
pub(crate) fn rms_norm_backward(
    call: &mut Call,
    saved: RmsNormSaved<'_>,
    dx: &Operand,
    dgamma: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let RmsNormSaved { dy, x, rstd, gamma } = saved;
    dy.expect_rank(2..=8)?;
    x.expect_type(FLT)?;
    dy.expect_dtype(x.dtype)?;
    dx.expect_dtype(x.dtype)?;
    if gamma.dtype != x.dtype {
        gamma.expect_dtype(DataType::Float)?;
    }
    for tensor in [rstd, dgamma] {
        tensor.expect_dtype(DataType::Float)?;
    }
    let normalized = expect_gamma(x, gamma)?;
    let (dims, row) = statistics_dims(x, &normalized);
    tiling(dy.expect_dims(&x.dims))?;
    tiling(dx.expect_dims(&x.dims))?;
    tiling(dgamma.expect_dims(&normalized))?;
    // The documentation gives rstd the leading axes only, the forward gives it all of them.
    if rstd.dims[..] != dims[..x.rank() - normalized.len()] {
        tiling(rstd.expect_dims(&dims))?;
    }
    let operands = [dy, x, rstd, gamma, dx, dgamma].map(Operand::clone);
    kernel(move |data| {
        let [dy, x, rstd, gamma, dx, dgamma] = &operands;
        let (g, x) = (data.read::<f32>(dy)?, data.read::<f32>(x)?);
        let (rstd, w) = (data.read::<f32>(rstd)?, data.read::<f32>(gamma)?);
        let (mut to_x, mut to_gamma) = (vec![0.0_f32; x.len()], vec![0.0_f64; row]);
        for (r, to_x) in to_x.chunks_exact_mut(row).enumerate() {
            let (g, x, scale) = (
                &g[r * row..][..row],
                &x[r * row..][..row],
                f64::from(rstd[r]),
            );
            let hat: Vec<f64> = x.iter().map(|x| f64::from(*x) * scale).collect();
            let scaled: Vec<f64> = g.iter().zip(&w).map(|(g, w)| f64::from(g * w)).collect();
            let mean = scaled.iter().zip(&hat).map(|(s, h)| s * h).sum::<f64>() / row as f64;
            for i in 0..row {
                to_x[i] = (scale * (scaled[i] - hat[i] * mean)) as f32;
                to_gamma[i] += f64::from(g[i]) * hat[i];
            }
        }
        data.write(dx, &to_x)?;
        data.write(dgamma, &to_gamma)
    })
}
