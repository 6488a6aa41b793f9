//! The whole model: both towers.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::linear;
use burn::tensor::{DType, Device, Tensor};
use rope_core::position_ids::PositionRules;
use vlm_family::Family;

use crate::batch::Batch;
use crate::config::VlmConfig;
use crate::decoder::{Decoder, Layer};
use crate::error::{Result, VlmError};
use crate::layers::LayerCache;
use crate::random::Draws;
use crate::step::Common;
use crate::tensors::indices;
use crate::trace::Trace;
use crate::trained::LoraConfig;
use crate::vision::VisionTower;

/// The word embeddings and the output head, by name in the module.
pub(crate) const TABLE: &str = "language_model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// A vision-language model of one of the families that a configuration names.
///
/// [`VlmConfig::load`] creates it with a checkpoint's weights, [`VlmConfig::init`] with random
/// weights.
#[derive(Module, Debug)]
pub struct Vlm {
    /// The vision tower; `None` for a model of text alone.
    pub(crate) visual: Option<VisionTower>,
    pub(crate) language_model: Decoder,
    /// The output head; `None` if it shares the matrix of the word embeddings.
    pub(crate) lm_head: Option<Linear>,
    pub(crate) vocab_size: usize,
    #[module(skip)]
    pub(crate) position_rules: PositionRules,
    #[module(skip)]
    pub(crate) padding_predicts: bool,
    #[module(skip)]
    pub(crate) family: &'static Family,
    /// The configuration of the adapters, if any.
    #[module(skip)]
    pub(crate) lora: Option<LoraConfig>,
    /// The fingerprint of the checkpoint of the weights.
    #[module(skip)]
    pub(crate) fingerprint: Option<u64>,
}

impl VlmConfig {
    /// Creates a model with random weights, which are drawn on first use.
    ///
    /// # Errors
    /// [`VlmError::Sizes`](crate::VlmError::Sizes) if sizes were changed and contradict each other;
    /// [`VlmError::Rotary`](crate::VlmError::Rotary) if the rotation is invalid.
    pub fn init(&self, device: &Device) -> Result<Vlm> {
        self.check()?;
        let text = &self.text;
        let head = || {
            LinearConfig::new(text.hidden_size, text.vocab_size)
                .with_bias(false)
                .init(device)
        };
        let tower = self.vision.as_ref();
        let tower = tower.map(|tower| tower.init(self.implementation, device));
        Ok(Vlm {
            visual: tower.transpose()?,
            language_model: text.init(self.implementation, device)?,
            lm_head: (!self.tied).then(head),
            vocab_size: text.vocab_size,
            position_rules: self.position_rules,
            padding_predicts: self.padding_predicts,
            family: self.family,
            lora: None,
            fingerprint: None,
        })
    }
}

impl Vlm {
    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.language_model.embed_tokens.weight.device()
    }

    /// True if a layer of the decoder has experts.
    pub fn has_experts(&self) -> bool {
        self.language_model.layers.iter().any(Layer::has_experts)
    }

    /// The placeholder tokens of a merged patch of a picture and of a video; none for a model of
    /// text alone.
    pub fn placeholders(&self) -> Option<[i64; 2]> {
        self.visual.as_ref().map(VisionTower::placeholders)
    }

    /// True for each placeholder of a video in a prompt.
    ///
    /// # Errors
    /// If the prompt contradicts itself.
    pub fn video_tokens(&self, prompt: &rope_core::position_ids::Prompt) -> Result<Vec<bool>> {
        Ok(self.position_rules.video_tokens(prompt)?)
    }

    /// The type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.language_model.embed_tokens.weight.dtype()
    }

    /// Computes the logits of each token's successor, `[rows, tokens, vocab_size]`.
    ///
    /// # Errors
    /// [`VlmError::Rotary`](crate::VlmError::Rotary) if the batch was prepared by a different
    /// model.
    pub fn forward(&self, batch: &Batch) -> Result<Tensor<3>> {
        self.forward_traced(batch, &mut Trace::off())
    }

    /// As [`forward`](Self::forward), but also records activations in `trace`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_traced(&self, batch: &Batch, trace: &mut Trace) -> Result<Tensor<3>> {
        let hidden = self.hidden(batch, None, &mut [], trace)?;
        let logits = self.logits(hidden);
        trace.record(|| "logits".into(), &logits);
        Ok(logits)
    }

    /// The decoder's last hidden states, normalised.
    pub(crate) fn hidden(
        &self,
        batch: &Batch,
        draws: Option<&Draws>,
        caches: &mut [LayerCache],
        trace: &mut Trace,
    ) -> Result<Tensor<3>> {
        self.hidden_of(batch, batch.common(draws), caches, (draws, trace))
    }

    /// As [`hidden`](Self::hidden), with what the decoder's layers share.
    pub(crate) fn hidden_of(
        &self,
        batch: &Batch,
        common: Common,
        caches: &mut [LayerCache],
        (draws, trace): (Option<&Draws>, &mut Trace),
    ) -> Result<Tensor<3>> {
        if batch.part.is_some() {
            let reason = "ranks divide the tokens of a batch in backward alone, with recomputation";
            return Err(VlmError::Walk(reason.to_owned()));
        }
        let model = self.for_pass(false);
        let seen = match (&model.visual, &batch.vision) {
            (Some(tower), Some(vision)) => Some(tower.forward(&vision.inputs, draws, trace)?),
            _ => None,
        };
        let (merged, features) = seen.map(|seen| (seen.merged, seen.deepstack)).unzip();
        let embeddings = self.embeddings(batch, merged);
        trace.record(|| "inputs_embeds".into(), &embeddings);
        let deepstack = batch.deepstack(features.unwrap_or_default());
        model
            .language_model
            .forward(embeddings, common, deepstack, caches, trace)
    }

    /// The input of the decoder: word embeddings, with merged patches in place of their
    /// placeholders.
    pub(crate) fn embeddings(&self, batch: &Batch, merged: Option<Tensor<2>>) -> Tensor<3> {
        let words = self
            .language_model
            .embed_tokens
            .forward(batch.input_ids.clone());
        let (Some(vision), Some(merged)) = (&batch.vision, merged) else {
            return words;
        };
        let [rows, seq, channels] = words.dims();
        let both = Tensor::cat(vec![words.reshape([rows * seq, channels]), merged], 0);
        both.select(0, vision.sources.clone())
            .reshape([rows, seq, channels])
    }

    /// The matrix of the output head, `[vocab_size, hidden_size]`.
    pub(crate) fn head(&self) -> Tensor<2> {
        match &self.lm_head {
            Some(head) => head.weight.val().transpose(),
            None => self.language_model.embed_tokens.weight.val(),
        }
    }

    /// Computes the logits of the successor of each sequence's last token, `[sequences,
    /// vocab_size]`: a small sample of the model's output for a large batch.
    ///
    /// # Errors
    /// [`VlmError::NotContinuable`](crate::VlmError::NotContinuable) if a sequence consists of
    /// padding; those of [`forward`](Self::forward).
    pub fn last_logits(&self, batch: &Batch) -> Result<Tensor<2>> {
        let last = batch.last_tokens()?;
        let hidden = self.hidden(batch, None, &mut [], &mut Trace::off())?;
        let [rows, seq, channels] = hidden.dims();
        let flat = hidden.reshape([rows * seq, channels]);
        let last = indices(last, &flat.device());
        Ok(logits_by_blocks(&flat.select(0, last), self.head()))
    }

    /// Logits from normalised hidden states.
    pub(crate) fn logits<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        linear(hidden, self.head().transpose(), None)
    }
}

/// Logits from a few normalised hidden states, `[tokens, hidden_size]`, and the output head's matrix.
///
/// Where a backend widens 16 bits for a product, it does so for a block of the vocabulary at a time.
pub(crate) fn logits_by_blocks(few: &Tensor<2>, head: Tensor<2>) -> Tensor<2> {
    const WORDS: usize = 1 << 13;
    let blocks = head.split(WORDS, 0).into_iter();
    let logits = blocks.map(|block| linear(few.clone(), block.transpose(), None));
    Tensor::cat(logits.collect(), 1)
}
