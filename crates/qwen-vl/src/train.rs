//! Training: the loss and a step.

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor};

use crate::batch::{Batch, ints};
use crate::error::{QwenVlError, Result};
use crate::model::QwenVl;
use crate::trace::Trace;

/// A label that is not predicted.
const IGNORED: i64 = -100;

impl QwenVl {
    /// Mean cross entropy in nats of each token's successor, within its own sequence.
    ///
    /// `labels` has one entry per token, in the order of the prompt: a token's own label is what
    /// its predecessor predicts; -100 is ignored.
    ///
    /// # Errors
    /// [`QwenVlError::LabelCount`], [`QwenVlError::Token`] for a label beyond the vocabulary,
    /// [`QwenVlError::NoTargets`]; those of [`forward`](Self::forward).
    pub fn loss(&self, batch: &Batch, labels: &[i64]) -> Result<Tensor<1>> {
        let hidden = self.hidden(batch, &mut [], &mut Trace::off())?;
        let [rows, seq, channels] = hidden.dims();
        if labels.len() != rows * seq {
            return Err(QwenVlError::LabelCount {
                expected: rows * seq,
                found: labels.len(),
            });
        }
        let predicted = batch
            .sequences
            .iter()
            .flat_map(|range| range.clone().skip(1));
        let counted: Vec<usize> = predicted
            .filter(|token| labels[*token] != IGNORED)
            .collect();
        if counted.is_empty() {
            return Err(QwenVlError::NoTargets);
        }
        self.expect_tokens(counted.iter().map(|token| (*token, labels[*token])))?;

        // Logits are computed for the tokens with a label only: over a real vocabulary they are the
        // largest tensor of a step.
        let device = hidden.device();
        let predictors = ints(counted.iter().map(|token| *token as i64 - 1), &device);
        let targets: Tensor<1, Int> = ints(counted.iter().map(|token| labels[*token]), &device);
        let hidden = hidden.reshape([rows * seq, channels]).select(0, predictors);
        let log_probabilities = log_softmax(self.logits(hidden).cast(DType::F32), 1);
        Ok(-log_probabilities.gather(1, targets.unsqueeze_dim(1)).mean())
    }

    /// One step: loss, gradients of every parameter, update. Returns the updated model and the loss
    /// before the update.
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss); [`QwenVlError::TensorUnreadable`] if the device does not give
    /// the loss back.
    pub fn train_step(
        self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: f64,
        batch: &Batch,
        labels: &[i64],
    ) -> Result<(Self, f32)> {
        let loss = self.loss(batch, labels)?;
        let gradients = GradientsParams::from_grads(loss.backward(), &self);
        let model = optimizer.step(learning_rate, self, gradients);
        let loss = loss.try_into_scalar::<f32>();
        let loss = loss.map_err(|error| QwenVlError::TensorUnreadable {
            name: "loss".to_owned(),
            reason: error.to_string(),
        })?;
        Ok((model, loss))
    }
}
