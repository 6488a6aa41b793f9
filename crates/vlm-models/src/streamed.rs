//! Logits of a checkpoint that is never wholly in memory: each layer is read, run and dropped.
//!
//! Word embeddings and head are cut to a few tokens of the vocabulary; everything else keeps its
//! size. A checkpoint of any depth can thus be checked in the memory of its largest layer.

use std::collections::BTreeMap;

use burn::module::Param;
use burn::tensor::{DType, Device, Tensor, TensorData};
use rope_core::position_ids::Prompt;

use crate::batch::VisionBatch;
use crate::config::VlmConfig;
use crate::error::{Result, VlmError};
use crate::inputs::Inputs;
use crate::linear::Adapter;
use crate::load::{Found, Kind, Load, Part, Weights};
use crate::model::{HEAD, TABLE, Vlm};
use crate::random::Stream;
use crate::trace::Trace;
use crate::transfer::Transfer;

/// Number of vocabulary tokens kept.
const KEPT: usize = 64;
/// Tokens of text before and after the picture.
const TEXT: [usize; 2] = [5, 7];
const SEED: u64 = 45;

/// The largest difference, relative to the largest logit, between logits of a sum that is rounded
/// to a type and those of its terms: a few dozen roundings of weights in a row, and in f32 those of
/// the sums of the logits themselves.
pub(crate) fn logits_allowed(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 0.125,
        DType::F16 => 0.016,
        _ => 1e-4,
    }
}

/// An adapter whose names and shapes fit.
#[derive(Debug)]
pub(crate) struct OpenAdapter {
    /// A and B of each layer, and the factor of their product B A, by the layer's name in the
    /// module.
    pub(crate) layers: BTreeMap<String, ([Found; 2], f64)>,
}

impl OpenAdapter {
    /// A, `[rank, inputs]`, B, `[outputs, rank]`, and their factor for an adapted layer.
    pub(crate) fn halves(
        &self,
        layer: &str,
        files: &[Weights],
        (device, dtype): (&Device, DType),
    ) -> Option<Result<(Tensor<2>, Tensor<2>, f64)>> {
        let ([a, b], scale) = self.layers.get(layer)?;
        let read = |half: &Found| {
            let stored = &half.stored;
            let data = half.read(files, half.float()?, 0..stored.elements())?;
            let flat = Tensor::<1>::from_data(data.convert_dtype(dtype), (device, dtype));
            Ok(flat.reshape([stored.shape[0], stored.shape[1]]))
        };
        Some(read(a).and_then(|a| Ok((a, read(b)?, *scale))))
    }
}

/// A checkpoint with only a few vocabulary tokens in memory.
pub(crate) struct Streamed<'a> {
    /// With a small vocabulary.
    config: VlmConfig,
    device: &'a Device,
    dtype: DType,
    files: &'a [Weights],
    uses: BTreeMap<String, Part<'a>>,
    /// Word embeddings of the kept tokens, and the head's rows if not tied.
    table: Tensor<2>,
    head: Option<Tensor<2>>,
}

impl<'a> Streamed<'a> {
    pub(crate) fn new(
        config: &VlmConfig,
        files: &'a [Weights],
        found: &'a BTreeMap<String, Found>,
        device: &'a Device,
    ) -> Result<Self> {
        let uses = config.init(device)?.plan(Kind::Base, found)?;
        let dtype = DType::from(device.settings().float_dtype);
        let rows = |name: &str| -> Result<Tensor<2>> {
            let part = uses[name];
            let [tokens, channels] = [part.found.stored.shape[0], part.found.stored.shape[1]];
            let mut rows = Vec::with_capacity(KEPT);
            for kept in 0..KEPT {
                let row = kept * tokens / KEPT;
                let source = &files[part.found.file].source;
                let elements = row * channels..(row + 1) * channels;
                let row = source.read(&part.found.stored, part.dtype, elements)?;
                let row = Tensor::<1>::from_data(row.convert_dtype(dtype), (device, dtype));
                rows.push(row.unsqueeze::<2>());
            }
            Ok(Tensor::cat(rows, 0))
        };
        let (table, head) = (rows(TABLE)?, (!config.tied).then(|| rows(HEAD)));
        let mut small = config.clone();
        small.text.vocab_size = KEPT;
        if let Some(vision) = &mut small.vision {
            // Their embeddings are replaced by the picture's.
            (vision.image_token, vision.video_token) = (KEPT as i64 - 2, KEPT as i64 - 1);
        }
        Ok(Self {
            config: small,
            device,
            dtype,
            files,
            table,
            head: head.transpose()?,
            uses,
        })
    }

    /// Logits of a prompt, with a picture if the model sees, with unmerged adapters.
    pub(crate) fn logits(&self, adapters: &[OpenAdapter]) -> Result<Vec<f64>> {
        let part = |prefix: &str| self.part(prefix, adapters);
        let none = part("none.")?;
        let vision = self.config.vision.as_ref();
        let side = vision.map_or(0, |vision| 2 * vision.spatial_merge);
        let grids = vision.map(|_| [1, side, side]);
        let patches = vision.map(|vision| {
            let elements = vision.patch_elems();
            let patches = Stream::new(SEED).symmetric(side * side * elements, 2.0);
            let patches = TensorData::new(patches, [side * side, elements]);
            Tensor::from_data(patches, (self.device, DType::F32))
        });
        let words = |count: usize| (0..count).map(|token| (7 * token % (KEPT - 2)) as i64);
        let placeholder = vision.map(|vision| vision.image_token);
        let picture = placeholder.into_iter().flat_map(|token| [token; 4]);
        let input_ids: Vec<i64> = words(TEXT[0])
            .chain(picture)
            .chain(words(TEXT[1]))
            .collect();
        let kinds: Vec<i64> = input_ids
            .iter()
            .map(|id| i64::from(Some(*id) == placeholder))
            .collect();
        let batch = none.batch(&Inputs {
            prompt: Prompt {
                input_ids: &input_ids,
                mm_token_type_ids: Some(&kinds),
                image_grids: grids.as_slice(),
                ..Prompt::default()
            },
            image_patches: patches,
            video_patches: None,
            shown: None,
        })?;
        let (merged, features) = match &batch.vision {
            Some(vision) => self.see(vision, adapters)?,
            None => (None, Vec::new()),
        };
        let mut hidden = none.embeddings(&batch, merged);
        let deepstack = batch.deepstack(features);
        for index in 0..none.language_model.depth() {
            let model = part(&format!("language_model.layers.{index}."))?;
            let layer = &model.language_model.layers[index];
            hidden = layer.forward(hidden, batch.common(None), None, index, &mut Trace::off())?;
            if let Some(deepstack) = &deepstack {
                hidden = deepstack.add(index, hidden);
            }
        }
        let last = part("language_model.norm.")?;
        let logits = last.logits(last.language_model.last(hidden)?);
        let data = logits.try_into_data().map_err(|error| {
            let name = "logits".to_owned();
            let reason = error.to_string();
            VlmError::TensorUnreadable { name, reason }
        })?;
        Ok(data.iter::<f64>().collect())
    }

    /// The embeddings of a picture, and the features of the decoder's first layers.
    fn see(
        &self,
        vision: &VisionBatch,
        adapters: &[OpenAdapter],
    ) -> Result<(Option<Tensor<2>>, Vec<Tensor<2>>)> {
        let part = |prefix: &str| Ok::<_, VlmError>(self.part(prefix, adapters)?.visual);
        let inputs = &vision.inputs;
        let mut features = Vec::new();
        let Some(first) = part("visual.p")? else {
            return Ok((None, features));
        };
        let mut hidden = first.first(inputs, &mut Trace::off())?;
        for index in 0..first.depth() {
            if let Some(tower) = part(&format!("visual.blocks.{index}."))? {
                hidden = tower.block(index, hidden, inputs, None)?;
            }
            let Some(which) = first.feature_of(index) else {
                continue;
            };
            if let Some(tower) = part(&format!("visual.deepstack_merger_list.{which}."))? {
                features.push(tower.feature(which, hidden.clone(), None)?);
            }
        }
        let merged = part("visual.merger.")?.map(|tower| tower.merged(hidden, inputs, None));
        Ok((merged.transpose()?, features))
    }

    /// The model with the parameters whose names begin with `prefix`, and those of the kept tokens.
    fn part(&self, prefix: &str, adapters: &[OpenAdapter]) -> Result<Vlm> {
        let mut model = self.config.init(self.device)?;
        model.language_model.embed_tokens.weight = Param::from_tensor(self.table.clone());
        if let (Some(head), Some(rows)) = (&mut model.lm_head, &self.head) {
            head.weight = Param::from_tensor(rows.clone().transpose());
        }
        let uses = self
            .uses
            .iter()
            .filter(|(path, _)| path.starts_with(prefix));
        let uses = uses.map(|(path, part)| (path.clone(), *part)).collect();
        let load = Load::new(self.files, uses, self.dtype, Transfer::default(), None);
        let (mut model, _) = model.fill_with(load)?;
        for (path, mut layer) in model.adaptable() {
            if !path.starts_with(prefix) {
                continue;
            }
            let (experts, [inputs, _]) = (layer.count(), layer.sizes());
            let (mut all_a, mut all_b) = (Vec::new(), Vec::new());
            for adapter in adapters {
                if let Some(halves) = adapter.halves(&path, self.files, (self.device, self.dtype)) {
                    let (a, b, scale) = halves?;
                    let rank = a.dims()[0] / experts;
                    all_a.push(a.reshape([experts, rank, inputs]));
                    all_b.push(b.transpose() * scale);
                }
            }
            if !all_a.is_empty() {
                let a = Tensor::cat(all_a, 1);
                let rows = experts * a.dims()[1];
                let (a, b) = (a.reshape([rows, inputs]), Tensor::cat(all_b, 0));
                *layer.adapter() = Some(Adapter::of(a, b));
            }
        }
        Ok(model)
    }
}
