//! Updates of optimizers.

use super::call::{Call, Kernel, Operand, kernel};
use super::dtype::{DataType, FLT, Types};
use super::refuse;
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};

/// Types of the count of updates.
const COUNTS: Types = Types::of(&[DataType::Float, DataType::Int64]);

/// The arguments of an update of AdamW.
pub(crate) struct AdamW {
    pub(crate) var: Operand,
    pub(crate) m: Operand,
    pub(crate) v: Operand,
    pub(crate) max_grad_norm: Option<Operand>,
    pub(crate) grad: Operand,
    pub(crate) step: Operand,
    pub(crate) lr: f32,
    pub(crate) betas: [f32; 2],
    pub(crate) weight_decay: f32,
    pub(crate) eps: f32,
    pub(crate) amsgrad: bool,
    pub(crate) maximize: bool,
}

/// The numbers of a kernel: it computes all of them in f32.
struct Numbers {
    keep: f32,
    one_less_beta1: f32,
    one_less_beta2: f32,
    beta2: f32,
    /// By which the root of v is multiplied.
    correction: f32,
    eps: f32,
    step_size: f32,
}

impl AdamW {
    fn check(&self) -> Outcome {
        if self.amsgrad && self.max_grad_norm.is_none() {
            let message = "maxGradNormOptionalRef is null and amsgrad is true";
            return Err(Failure::new(ACLNN_NULLPTR, message));
        }
        let tensors = [&self.var, &self.m, &self.v];
        let others = self.max_grad_norm.iter().chain([&self.grad]);
        for tensor in tensors.into_iter().chain(others.clone()) {
            tensor.expect_type(FLT)?;
        }
        self.step.expect_type(COUNTS)?;
        for tensor in [&self.m, &self.v].into_iter().chain(others) {
            tensor.expect_dims(&self.var.dims)?;
        }
        let count = self.step.elements();
        if count != 1 {
            return refuse(format!("step has {count} elements, 1 is expected"));
        }
        Ok(())
    }

    /// `step` counts the updates before, against the word of the document: the kernels add 1.
    fn numbers(&self, step: f32) -> Numbers {
        let [beta1, beta2] = self.betas;
        let step = step + 1.0;
        Numbers {
            keep: 1.0 - self.lr * self.weight_decay,
            one_less_beta1: 1.0 - beta1,
            one_less_beta2: 1.0 - beta2,
            beta2,
            correction: 1.0 / (1.0 - beta2.powf(step)).sqrt(),
            eps: self.eps,
            step_size: self.lr / (1.0 - beta1.powf(step)),
        }
    }
}

/// With g = ±grad and t = step + 1: m += (g - m)(1 - beta1), v = v·beta2 + g²(1 - beta2), var =
/// var(1 - lr·decay) - m / (√v/√(1 - beta2^t) + eps) · lr/(1 - beta1^t), in place; with amsgrad by the
/// largest v so far. Whatever the types, all is computed in f32.
pub(crate) fn adam_w(call: &mut Call, p: AdamW) -> Outcome<Kernel> {
    call.distinct();
    p.check()?;
    kernel(move |data| {
        if p.var.is_empty() {
            return Ok(());
        }
        let by = p.numbers(data.read::<f32>(&p.step)?[0]);
        let (mut var, grad) = (data.read::<f32>(&p.var)?, data.read::<f32>(&p.grad)?);
        let (mut m, mut v) = (data.read::<f32>(&p.m)?, data.read::<f32>(&p.v)?);
        let mut most = match &p.max_grad_norm {
            Some(most) if p.amsgrad => Some(data.read::<f32>(most)?),
            _ => None,
        };
        for i in 0..var.len() {
            let g = if p.maximize { -grad[i] } else { grad[i] };
            m[i] += (g - m[i]) * by.one_less_beta1;
            v[i] = v[i] * by.beta2 + g * g * by.one_less_beta2;
            let square = match &mut most {
                Some(most) => {
                    most[i] = most[i].max(v[i]);
                    most[i]
                }
                None => v[i],
            };
            let root = square.sqrt() * by.correction + by.eps;
            var[i] = var[i] * by.keep - m[i] / root * by.step_size;
        }
        for (tensor, values) in [(&p.var, var), (&p.m, m), (&p.v, v)] {
            data.write(tensor, &values)?;
        }
        match (&p.max_grad_norm, most) {
            (Some(tensor), Some(values)) => data.write(tensor, &values),
            _ => Ok(()),
        }
    })
}
