//! Loss and optimiser.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::Data;
use super::dtype::{DataType, FLT, Types};
use super::refuse;
use crate::codes::Outcome;

/// How a loss is reduced, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    None,
    Mean,
    Sum,
}

pub(crate) fn reduction(code: i64) -> Outcome<Reduction> {
    match code {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        _ => refuse(format!(
            "reduction is {code}, 0 (none), 1 (mean) or 2 (sum) is expected"
        )),
    }
}

/// Log-probabilities, classes and class weights.
#[derive(Clone)]
pub(crate) struct Loss {
    pub(crate) x: Operand,
    pub(crate) target: Operand,
    pub(crate) weight: Operand,
    pub(crate) reduction: Reduction,
    pub(crate) ignored: i64,
}

impl Loss {
    /// Rows and classes.
    fn sizes(&self) -> (usize, usize) {
        match self.x.dims[..] {
            [rows, classes] => (rows, classes),
            _ => (1, self.x.elements()),
        }
    }

    fn check(&self) -> Outcome {
        use DataType::*;
        self.x.expect_type(FLT)?;
        self.x.expect_rank(1..=2)?;
        self.target.expect_type(Types::of(&[Int64, Int32, Uint8]))?;
        let (rows, classes) = self.sizes();
        if self.target.elements() != rows || self.target.rank() > 1 {
            self.target.expect_dims(&[rows])?;
        }
        self.weight.expect_dtype(self.x.dtype)?;
        self.weight.expect_dims(&[classes])
    }

    /// For each row its class and the weight of it; nothing for rows that are ignored.
    fn rows(&self, data: &Data<'_, '_>) -> Outcome<Vec<Option<(usize, f32)>>> {
        let (_, classes) = self.sizes();
        let weight = data.read::<f32>(&self.weight)?;
        let class = |class: i64| match class {
            _ if class == self.ignored => Ok(None),
            _ if (0..classes as i64).contains(&class) => {
                Ok(Some((class as usize, weight[class as usize])))
            }
            _ => Err(data.exception(format!(
                "target {class} is outside of 0..{classes} and not ignoreIndex {}",
                self.ignored
            ))),
        };
        data.read::<i64>(&self.target)?
            .into_iter()
            .map(class)
            .collect()
    }

    fn expect_loss(&self, out: &Operand) -> Outcome {
        out.expect_dtype(self.x.dtype)?;
        if self.reduction == Reduction::None {
            return out.expect_dims(&[self.sizes().0]);
        }
        if out.elements() == 1 {
            return Ok(());
        }
        out.expect_dims(&[1])
    }
}

/// -weight·x\[target\] of each row, summed and divided by the weights as asked for.
pub(crate) fn nll_loss(loss: Loss, out: &Operand, total: &Operand) -> Outcome<Kernel> {
    loss.check()?;
    loss.expect_loss(out)?;
    total.expect_dtype(loss.x.dtype)?;
    if total.elements() != 1 {
        total.expect_dims(&[1])?;
    }
    let (out, total) = (out.clone(), total.clone());
    kernel(move |data| {
        let (_, classes) = loss.sizes();
        let x = data.read::<f32>(&loss.x)?;
        let rows = loss.rows(data)?;
        let losses: Vec<f64> = rows
            .iter()
            .enumerate()
            .map(|(row, class)| {
                class.map_or(0.0, |(class, weight)| {
                    -f64::from(weight) * f64::from(x[row * classes + class])
                })
            })
            .collect();
        let weights: f64 = rows
            .iter()
            .flatten()
            .map(|(_, weight)| f64::from(*weight))
            .sum();
        let sum: f64 = losses.iter().sum();
        match loss.reduction {
            Reduction::None => data.write(&out, &losses)?,
            Reduction::Mean => data.write(&out, &[sum / weights])?,
            Reduction::Sum => data.write(&out, &[sum])?,
        }
        data.write(&total, &[weights])
    })
}

/// -weight·gradOutput at each row's class, divided by the total weight for the mean; zeros elsewhere.
pub(crate) fn nll_loss_backward(
    loss: Loss,
    gradient: &Operand,
    total: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    loss.check()?;
    loss.expect_loss(gradient)?;
    total.expect_dtype(loss.x.dtype)?;
    out.expect_dtype(loss.x.dtype)?;
    out.expect_dims(&loss.x.dims)?;
    let (gradient, total, out) = (gradient.clone(), total.clone(), out.clone());
    kernel(move |data| {
        let (rows, classes) = loss.sizes();
        let g = data.read::<f32>(&gradient)?;
        let share = match loss.reduction {
            Reduction::Mean => 1.0 / data.read::<f32>(&total)?[0],
            _ => 1.0,
        };
        let mut dx = vec![0.0_f32; rows * classes];
        for (row, class) in loss.rows(data)?.into_iter().enumerate() {
            if let Some((class, weight)) = class {
                let g = if loss.reduction == Reduction::None {
                    g[row]
                } else {
                    g[0]
                };
                dx[row * classes + class] = -weight * g * share;
            }
        }
        data.write(&out, &dx)
    })
}

/// The tensors of one parameter in AdamW.
pub(crate) struct AdamW {
    pub(crate) parameter: Operand,
    pub(crate) first: Operand,
    pub(crate) second: Operand,
    pub(crate) largest: Option<Operand>,
    pub(crate) gradient: Operand,
    pub(crate) step: Operand,
    pub(crate) lr: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) weight_decay: f32,
    pub(crate) eps: f32,
    pub(crate) amsgrad: bool,
    pub(crate) maximize: bool,
}

/// One step of AdamW with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
/// The kernels add 1 to `step` before the bias correction, whatever the documentation says.
pub(crate) fn adam_w(call: &mut Call, p: AdamW) -> Outcome<Kernel> {
    call.distinct();
    p.parameter.expect_type(FLT)?;
    let moments = [&p.first, &p.second, &p.gradient];
    for tensor in moments.into_iter().chain(p.largest.as_ref()) {
        tensor.expect_dtype(p.parameter.dtype)?;
        tensor.expect_dims(&p.parameter.dims)?;
    }
    p.step
        .expect_type(Types::of(&[DataType::Int64, DataType::Float]))?;
    if p.step.elements() != 1 {
        p.step.expect_dims(&[1])?;
    }
    if p.amsgrad != p.largest.is_some() {
        return refuse(format!(
            "amsgrad is {} and maxGradNormOptionalRef is {}: it is given exactly when amsgrad is true",
            p.amsgrad,
            if p.largest.is_some() { "given" } else { "null" }
        ));
    }
    kernel(move |data| {
        let mut x = data.read::<f32>(&p.parameter)?;
        let (mut m, mut v) = (data.read::<f32>(&p.first)?, data.read::<f32>(&p.second)?);
        let mut largest = match &p.largest {
            Some(largest) => Some(data.read::<f32>(largest)?),
            None => None,
        };
        let g = data.read::<f32>(&p.gradient)?;
        let t = data.read::<f64>(&p.step)?[0] + 1.0;
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(t)) as f32;
        let (first, second) = (correction(p.beta1), correction(p.beta2));
        for i in 0..x.len() {
            let g = if p.maximize { -g[i] } else { g[i] };
            x[i] *= 1.0 - p.lr * p.weight_decay;
            m[i] = p.beta1 * m[i] + (1.0 - p.beta1) * g;
            v[i] = p.beta2 * v[i] + (1.0 - p.beta2) * g * g;
            let square = match &mut largest {
                Some(largest) => {
                    largest[i] = largest[i].max(v[i]);
                    largest[i]
                }
                None => v[i],
            };
            x[i] -= p.lr * (m[i] / first) / ((square / second).sqrt() + p.eps);
        }
        data.write(&p.parameter, &x)?;
        data.write(&p.first, &m)?;
        data.write(&p.second, &v)?;
        match (&p.largest, largest) {
            (Some(tensor), Some(values)) => data.write(tensor, &values),
            _ => Ok(()),
        }
    })
}
