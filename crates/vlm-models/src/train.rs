//! Training: the loss and a step.

use std::ops::Range;

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_attention::{CrossEntropy, IGNORED};
use rope_core::position_ids::Prompt;

use crate::backward::numbers;
use crate::batch::{Batch, rows, sequences};
use crate::error::{Result, VlmError};
use crate::model::Vlm;
use crate::shares::TokenShare;
use crate::trace::Trace;

impl Vlm {
    /// Computes the mean cross entropy, in nats, of each token's successor within the same
    /// sequence.
    ///
    /// `labels` has one entry per token, in the order of the prompt. A token's label is the target
    /// of the previous token; -100 is ignored. Padding predicts nothing and has no label, so the
    /// loss does not depend on its side; [`VlmConfig::padding_predicts`] counts padding as
    /// transformers does.
    ///
    /// [`VlmConfig::padding_predicts`]: crate::VlmConfig::padding_predicts
    ///
    /// # Errors
    /// [`VlmError::LabelCount`], [`VlmError::Token`] for a label beyond the vocabulary,
    /// [`VlmError::NoTargets`]; those of [`forward`](Self::forward).
    pub fn loss(&self, batch: &Batch, labels: &[i64]) -> Result<Tensor<1>> {
        let hidden = self.hidden(batch, None, &mut [], &mut Trace::off())?;
        self.loss_of(hidden, batch, labels)
    }

    /// The loss from normalised hidden states.
    pub(crate) fn loss_of(
        &self,
        hidden: Tensor<3>,
        batch: &Batch,
        labels: &[i64],
    ) -> Result<Tensor<1>> {
        self.cross_entropy(hidden, batch, labels, CrossEntropy::try_forward)
    }

    /// The loss of each labelled token, from normalised hidden states and logits divided by the
    /// temperature.
    pub(crate) fn losses_of(
        &self,
        hidden: Tensor<3>,
        batch: &Batch,
        labels: &[i64],
        temperature: f64,
    ) -> Result<Tensor<1>> {
        let hidden = match temperature {
            1.0 => hidden,
            // Logits are linear in it.
            _ => hidden / temperature,
        };
        self.cross_entropy(hidden, batch, labels, CrossEntropy::by_row)
    }

    fn cross_entropy(
        &self,
        hidden: Tensor<3>,
        batch: &Batch,
        labels: &[i64],
        reduced: fn(&CrossEntropy, Tensor<2>, Tensor<2>) -> burn_attention::Result<Tensor<1>>,
    ) -> Result<Tensor<1>> {
        let [rows, seq, channels] = hidden.dims();
        let targets = self.own_targets(batch, labels)?;
        let loss = CrossEntropy::new(&targets, self.vocab_size)?;
        let hidden = hidden.reshape([rows * seq, channels]);
        Ok(reduced(&loss, hidden, self.head())?)
    }

    /// For each of this rank's tokens, the label that it predicts, or -100.
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss) about labels.
    pub fn own_targets(&self, batch: &Batch, labels: &[i64]) -> Result<Vec<i64>> {
        let targets = self.targets(&batch.sequences, &batch.attended, labels)?;
        Ok(batch.own(targets))
    }

    /// The labelled tokens of this rank.
    pub(crate) fn own_labelled(&self, batch: &Batch, labels: &[i64]) -> Result<usize> {
        Ok(counted(&self.own_targets(batch, labels)?))
    }

    /// Computes the loss of each labelled token in nats, in the order of the tokens: the terms of
    /// the mean [`loss`](Self::loss).
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss); [`VlmError::TensorUnreadable`].
    pub fn token_losses(&self, batch: &Batch, labels: &[i64]) -> Result<Vec<f32>> {
        self.tempered_losses(batch, labels, 1.0)
    }

    /// As [`token_losses`](Self::token_losses), of logits divided by a temperature.
    ///
    /// # Errors
    /// Those of [`token_losses`](Self::token_losses).
    pub fn tempered_losses(
        &self,
        batch: &Batch,
        labels: &[i64],
        temperature: f64,
    ) -> Result<Vec<f32>> {
        let hidden = self.hidden(batch, None, &mut [], &mut Trace::off())?;
        numbers(self.losses_of(hidden, batch, labels, temperature)?)
    }

    /// Counts the tokens of a prompt over which [`loss`](Self::loss) is the mean.
    ///
    /// # Errors
    /// As [`loss`](Self::loss), except [`VlmError::NoTargets`]: the count may be 0.
    pub fn labelled(&self, prompt: &Prompt, labels: &[i64]) -> Result<usize> {
        let [all, _] = self.labelled_part(prompt, labels, TokenShare::ALL)?;
        Ok(all)
    }

    /// As [`labelled`](Self::labelled): those of all ranks, and of the rank with a share of the
    /// tokens.
    ///
    /// # Errors
    /// Those of [`labelled`](Self::labelled).
    pub fn labelled_part(
        &self,
        prompt: &Prompt,
        labels: &[i64],
        share: TokenShare,
    ) -> Result<[usize; 2]> {
        // Checks that lengths, masks and tokens are consistent.
        self.position_rules.position_ids(prompt)?;
        let sequences = sequences(prompt);
        let tokens = prompt.input_ids.len();
        let attended = prompt.attention_mask.map(<[bool]>::to_vec);
        let attended = attended.unwrap_or_else(|| vec![true; tokens]);
        match self.targets(&sequences, &attended, labels) {
            Ok(targets) => {
                let rows = rows(prompt);
                let own = share.own(rows, tokens / rows.max(1)).into_iter();
                let own: Vec<i64> = own.map(|token| targets[token]).collect();
                Ok([counted(&targets), counted(&own)])
            }
            Err(VlmError::NoTargets) => Ok([0; 2]),
            Err(error) => Err(error),
        }
    }

    /// The target of each token: the label of its successor.
    fn targets(
        &self,
        sequences: &[Range<usize>],
        attended: &[bool],
        labels: &[i64],
    ) -> Result<Vec<i64>> {
        if labels.len() != attended.len() {
            return Err(VlmError::LabelCount {
                expected: attended.len(),
                found: labels.len(),
            });
        }
        let mut targets = vec![IGNORED; labels.len()];
        for range in sequences {
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
            return Err(VlmError::NoTargets);
        }
        self.expect_tokens(predicted.map(|(row, target)| (row + 1, target)))?;
        Ok(targets)
    }

    /// Runs one step: the loss, the gradients of every parameter, and the update. Returns the
    /// updated model and the loss before the update.
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss); [`VlmError::TensorUnreadable`] if the loss cannot be read
    /// from the device.
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
        let loss = loss.map_err(|error| VlmError::TensorUnreadable {
            name: "loss".to_owned(),
            reason: error.to_string(),
        })?;
        Ok((model, loss))
    }
}

/// The number of targets that count.
fn counted(targets: &[i64]) -> usize {
    targets.iter().filter(|target| **target != IGNORED).count()
}
