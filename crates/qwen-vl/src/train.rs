//! Training: the loss and a step.

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_attention::{CrossEntropy, IGNORED};

use crate::batch::Batch;
use crate::error::{QwenVlError, Result};
use crate::model::QwenVl;
use crate::trace::Trace;

impl QwenVl {
    /// Mean cross entropy in nats of each token's successor, within its own sequence.
    ///
    /// `labels` has one entry per token, in the order of the prompt: a token's own label is what
    /// its predecessor predicts; -100 is ignored. Padding predicts nothing and has no label, so the
    /// loss does not depend on its side; [`QwenVlConfig::padding_predicts`] counts it as
    /// transformers does.
    ///
    /// [`QwenVlConfig::padding_predicts`]: crate::QwenVlConfig::padding_predicts
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
        // Each token's label is the target of its predecessor.
        let mut targets = vec![IGNORED; labels.len()];
        let attended = &batch.attended;
        for range in &batch.sequences {
            for token in range.clone().skip(1) {
                if self.padding_predicts || (attended[token - 1] && attended[token]) {
                    targets[token - 1] = labels[token];
                }
            }
        }
        let counted = |(_, target): &(usize, i64)| *target != IGNORED;
        let mut predicted = targets
            .iter()
            .copied()
            .enumerate()
            .filter(counted)
            .peekable();
        if predicted.peek().is_none() {
            return Err(QwenVlError::NoTargets);
        }
        self.expect_tokens(predicted.map(|(row, target)| (row + 1, target)))?;

        let loss = CrossEntropy::new(&targets, self.vocab_size)?;
        let hidden = hidden.reshape([rows * seq, channels]);
        Ok(loss.try_forward(hidden, self.head())?)
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
