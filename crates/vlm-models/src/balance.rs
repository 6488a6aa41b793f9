//! The auxiliary loss of routers, which wants experts to be chosen equally often.

use std::cell::RefCell;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::GradientSource;
use serde::{Deserialize, Serialize};

use crate::error::{Result, VlmError};

/// The tokens of experts in a batch: of all layers with experts together, without padding.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterLoads {
    /// For each expert, the tokens for which it is among the likeliest by a softmax.
    counts: Vec<f64>,
    /// For each expert, the sum of its probabilities over tokens.
    probabilities: Vec<f64>,
    /// Tokens, once for each layer.
    rows: f64,
}

impl RouterLoads {
    /// The auxiliary loss: the number of experts times the sum, over experts, of the share of
    /// tokens times the mean probability. It is the number of experts of a token if all are chosen
    /// equally often.
    ///
    /// # Source
    /// Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6; `load_balancing_loss_func` of
    /// transformers 5.24.0
    pub fn loss(&self) -> f64 {
        let products = self.counts.iter().zip(&self.probabilities);
        let sum: f64 = products.map(|(count, sum)| count * sum).sum();
        self.scale() * sum
    }

    /// Adds those of another part of the batch.
    pub fn add(&mut self, other: &Self) {
        let add = |sums: &mut Vec<f64>, numbers: &[f64]| {
            sums.resize(sums.len().max(numbers.len()), 0.0);
            sums.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x);
        };
        add(&mut self.counts, &other.counts);
        add(&mut self.probabilities, &other.probabilities);
        self.rows += other.rows;
    }

    /// The gradient of the loss with respect to the probabilities of a token.
    fn gradient(&self) -> impl Iterator<Item = f64> {
        let scale = self.scale();
        self.counts.iter().map(move |count| scale * count)
    }

    fn scale(&self) -> f64 {
        match self.rows > 0.0 {
            true => self.counts.len() as f64 / (self.rows * self.rows),
            false => 0.0,
        }
    }
}

/// The auxiliary loss in a pass over a part of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLoss<'a> {
    /// The tokens of the whole batch, from [`Vlm::router_loads`](crate::Vlm::router_loads).
    pub loads: &'a RouterLoads,
    /// The factor on the loss.
    pub factor: f64,
}

/// Follows the routers of a pass: counts their tokens, or keeps what the auxiliary loss depends on.
pub(crate) struct Balance<'a> {
    /// False for padding.
    attended: &'a [bool],
    /// The gradient of the probabilities, `[tokens, experts]`; `None` to count.
    gradient: Option<Tensor<2>>,
    loads: RefCell<RouterLoads>,
    probabilities: RefCell<Vec<Tensor<2>>>,
}

impl<'a> Balance<'a> {
    pub(crate) fn counting(attended: &'a [bool]) -> Self {
        Self {
            attended,
            gradient: None,
            loads: RefCell::default(),
            probabilities: RefCell::default(),
        }
    }

    /// Of a loss, in the type of probabilities on a device without autodiff.
    pub(crate) fn learning(
        attended: &'a [bool],
        loss: RouterLoss<'_>,
        (device, dtype): (&Device, DType),
    ) -> Self {
        let column = |numbers: Vec<f64>, shape: [usize; 2]| {
            Tensor::<2>::from_data(TensorData::new(numbers, shape), (device, dtype))
        };
        let of_experts: Vec<f64> = loss.loads.gradient().map(|x| x * loss.factor).collect();
        let of_tokens: Vec<f64> = attended.iter().map(|at| f64::from(u8::from(*at))).collect();
        let (tokens, experts) = (of_tokens.len(), of_experts.len());
        let gradient = column(of_tokens, [tokens, 1]) * column(of_experts, [1, experts]);
        Self {
            gradient: Some(gradient),
            ..Self::counting(attended)
        }
    }

    /// True if it counts, in a forward pass.
    pub(crate) fn counts(&self) -> bool {
        self.gradient.is_none()
    }

    pub(crate) fn into_loads(self) -> RouterLoads {
        self.loads.into_inner()
    }

    /// Follows a layer's router: its probabilities by a softmax, `[tokens, experts]`, and the
    /// likeliest experts of each token, from the probabilities on the host.
    pub(crate) fn see(
        &self,
        probabilities: Tensor<2>,
        likeliest: impl FnOnce(&[f32]) -> Vec<usize>,
    ) -> Result<()> {
        if !self.counts() {
            self.probabilities.borrow_mut().push(probabilities);
            return Ok(());
        }
        let [_, experts] = probabilities.dims();
        let numbers = on_host(probabilities)?;
        let chosen = likeliest(&numbers);
        let per_token = chosen.len() / self.attended.len().max(1);
        let mut loads = RouterLoads {
            counts: vec![0.0; experts],
            probabilities: vec![0.0; experts],
            rows: 0.0,
        };
        let tokens = numbers.chunks(experts).zip(chosen.chunks(per_token.max(1)));
        for ((of_token, chosen), _) in tokens.zip(self.attended).filter(|(_, attended)| **attended)
        {
            chosen
                .iter()
                .for_each(|expert| loads.counts[*expert] += 1.0);
            let sums = loads.probabilities.iter_mut();
            sums.zip(of_token)
                .for_each(|(sum, x)| *sum += f64::from(*x));
            loads.rows += 1.0;
        }
        self.loads.borrow_mut().add(&loads);
        Ok(())
    }

    /// Adds the auxiliary loss of the layers since the last call to the source of a backward.
    pub(crate) fn join(&self, mut source: GradientSource) -> Result<GradientSource> {
        if let Some(gradient) = &self.gradient {
            for probabilities in self.probabilities.take() {
                source = source.with(probabilities, gradient.clone())?;
            }
        }
        Ok(source)
    }
}

/// A router's numbers.
pub(crate) fn on_host(numbers: Tensor<2>) -> Result<Vec<f32>> {
    let read = numbers.detach().cast(DType::F32).try_into_data();
    let read = read.map_err(|error| VlmError::TensorUnreadable {
        name: "the router's scores".to_owned(),
        reason: error.reason().to_owned(),
    })?;
    Ok(read.iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_has_no_load() {
        let attended = [true, false, true];
        let balance = Balance::counting(&attended);
        let numbers = [[0.75, 0.25], [0.0, 1.0], [0.5, 0.5]];
        let probabilities = Tensor::from_floats(numbers, &Device::flex());
        balance.see(probabilities, |_| vec![0, 1, 0]).expect("read");
        let loads = balance.into_loads();
        assert_eq!(loads.counts, [2.0, 0.0]);
        assert_eq!(
            (&loads.probabilities[..], loads.rows),
            (&[1.25, 0.75][..], 2.0)
        );
        // Two experts, all tokens of the first, whose mean probability is 0.625.
        assert_eq!(loads.loss(), 2.0 * 0.625);
        assert_eq!(loads.gradient().collect::<Vec<_>>(), [1.0, 0.0]);
        assert_eq!(RouterLoads::default().loss(), 0.0);
    }
}
