//! A step as a file: samples of activations, gradients, weights and update.
//!
//! The file is a safetensors file whose header has a [`RecordHeader`] as JSON. Its tensors are flat
//! and in f32:
//!
//! | name | contents |
//! |---|---|
//! | `input/LINE/NAME` | whole: `input_ids`, `labels`, `targets` (the label that each token predicts), `kinds` (1 for a placeholder of a picture, 2 of a video), `position_ids`, `image_grids`, `image_patches`, `video_grids`, `video_patches`, `video_seconds` (per temporal patch) of the sample at that line of the data |
//! | `weight/NAME` | samples of a parameter before the step |
//! | `forward/LINE/NAME` | samples of an activation |
//! | `backward/LINE/hidden.N.out` | samples of the gradient of a layer's output |
//! | `backward/NAME` | samples of a parameter's gradient, of the whole batch, before clipping |
//! | `update/NAME` | samples of a parameter's change in the step |
//!
//! Of several ranks, each has a file of its own, with its samples, and:
//!
//! | name | contents |
//! |---|---|
//! | `given/NAME` | samples of a parameter's gradient over this rank's samples, before ranks are summed |
//! | `received/NAME` | with all in shards, samples of a weight as gathered for the forward pass |
//! | `received-again/NAME` | and for the backward pass |
//! | `part/NAME` | with anything in shards, the rank that has the element, for each kept one |
//! | `part/LINE/tokens` | with divided tokens, the rank that has each token of the sample |
//!
//! Of a sample whose tokens are divided, each rank has its own: elements of others are 0. Its
//! `input_ids`, `targets` and `position_ids` are those that it computes with. The tower's activations
//! are left out.
//!
//! Samples are at [`sampled_elements`](vlm_models::sampled_elements) of the tensor in the order of
//! files. Except for rounding, a sample's activations do not depend on the cut of the batch.

mod ranks;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vlm_data::{MicroBatch, SampleRows};
use vlm_models::file::{Entry, Sink, TensorFile};
use vlm_models::{Batch, Parameter, Sampled, Segment, TokenShare, Trace, Vlm};

pub use self::ranks::RecordRank;
pub(crate) use self::ranks::{Exchanged, rank_path};
use crate::batch::prompt;
use crate::compare::Stage;
use crate::error::{Result, VlmTrainError};
use crate::shards::{Sharding, Shards};
use crate::sums::GradientSums;
use crate::trainer::{StepReport, Trainer};

/// Number of elements kept per tensor.
pub(crate) const SAMPLES: usize = 1024;
/// The key of the [`RecordHeader`] in the file's header.
const HEADER: &str = "mrope_record";
const VERSION: u32 = 1;
/// The file size limit; a record of 1024 samples of each tensor of a large model has 50 MB.
const MAX_BYTES: u64 = 1 << 30;

/// The description of a record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordHeader {
    /// The version of the format: 1.
    pub version: u32,
    /// The program that computed the step.
    pub source: String,
    /// The type of weights and activations: `f32`, `f16` or `bf16`.
    pub precision: String,
    /// The limit on elements kept per tensor.
    pub samples: usize,
    /// The step, from 1.
    pub step: usize,
    /// The loss before the update.
    pub loss: f64,
    /// The norm of all gradients together, before clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_norm: Option<f64>,
    /// Labelled tokens of the batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labelled: Option<usize>,
    /// The rank, if there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<RecordRank>,
    /// Settings that determine the step, by name.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// The shape of each tensor, by its name in the file.
    pub shapes: BTreeMap<String, Vec<usize>>,
}

/// A recorded step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRecord {
    /// The description.
    pub header: RecordHeader,
    /// The kept elements, by name.
    pub items: BTreeMap<String, Vec<f32>>,
}

impl StepRecord {
    /// Reads a record.
    ///
    /// # Errors
    /// [`VlmTrainError::Model`] if the file cannot be read; [`VlmTrainError::NoRecord`] if it is
    /// not a record, or has a different version.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |reason: String| VlmTrainError::NoRecord {
            path: path.to_owned(),
            reason,
        };
        let source = TensorFile::open(path)?;
        let bytes = path.metadata().map_or(0, |metadata| metadata.len());
        if bytes > MAX_BYTES {
            return Err(refused(format!(
                "it has {bytes} bytes, expected at most {MAX_BYTES}"
            )));
        }
        let text = source
            .metadata(HEADER)
            .ok_or_else(|| refused(format!("its header has no {HEADER}")))?;
        let header: RecordHeader =
            serde_json::from_str(text).map_err(|error| refused(error.to_string()))?;
        if header.version != VERSION {
            let found = header.version;
            return Err(refused(format!(
                "it is of version {found}, expected {VERSION}"
            )));
        }
        if let Some(RecordRank { rank, ranks, .. }) = header.rank
            && rank >= ranks
        {
            return Err(refused(format!(
                "it is of rank {rank}, expected one below its {ranks} ranks"
            )));
        }
        let mut items = BTreeMap::new();
        for (name, stored) in source.tensors() {
            let elements = stored.elements();
            let Some(shape) = header.shapes.get(&name) else {
                return Err(refused(format!("{name} has no shape")));
            };
            let all = shape
                .iter()
                .try_fold(1_usize, |all, size| all.checked_mul(*size));
            if stored.dtype() != Some(DType::F32) || all.is_none_or(|all| elements > all) {
                return Err(refused(format!(
                    "{name} is not a sample in f32 of {shape:?}"
                )));
            }
            let data = source.read(&stored, DType::F32, 0..elements)?;
            items.insert(name, data.iter::<f32>().collect());
        }
        Ok(Self { header, items })
    }

    fn write(&self, path: &Path) -> Result<()> {
        let entry = |(name, values): (&String, &Vec<f32>)| Entry {
            name: name.clone(),
            shape: vec![values.len()],
            dtype: DType::F32,
        };
        let entries: Vec<Entry> = self.items.iter().map(entry).collect();
        let text = serde_json::to_string(&self.header);
        let text = text.map_err(VlmTrainError::file("write", path))?;
        let mut sink = Sink::create_with(path, &entries, &[(HEADER, &text)])?;
        for values in self.items.values() {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            sink.write(&bytes)?;
        }
        Ok(sink.commit()?)
    }
}

/// The items recorded in a step.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    items: BTreeMap<String, Sampled>,
}

impl Recording {
    /// A trace of the samples of a micro-batch, or of a rank's tokens of them. Of videos, the tower's
    /// activations are left out.
    pub(crate) fn trace(
        &self,
        model: &Vlm,
        micro: &MicroBatch,
        share: Option<TokenShare>,
    ) -> Result<Trace> {
        let places = self.places(model, micro)?.into_iter();
        let segments = places.map(|place| Segment {
            patches: match micro.video_grids.is_empty() {
                true => place.images,
                false => 0..0,
            },
            label: place.label,
            tokens: place.tokens,
        });
        let own = share.map(|share| own_tokens(micro, share));
        Ok(Trace::sampling(SAMPLES, segments.collect(), own))
    }

    /// The places of a micro-batch's samples. A repeated line in the batch has a number.
    fn places(&self, model: &Vlm, micro: &MicroBatch) -> Result<Vec<Place>> {
        let mut places: Vec<Place> = Vec::with_capacity(micro.lines.len());
        let kinds = kinds(model, micro)?;
        let count = |tokens: Range<usize>, kind| {
            kinds[tokens].iter().filter(|found| **found == kind).count()
        };
        let all = 0..kinds.len();
        let groups = [(&micro.image_grids, IMAGE), (&micro.video_grids, VIDEO)];
        let groups = groups.map(|(grids, kind)| patches(grids) / count(all.clone(), kind).max(1));
        let mut seen = [0; 2];
        for (index, line) in micro.lines.iter().enumerate() {
            let tokens = match &micro.rows {
                SampleRows::Packed { cu_seqlens } => cu_seqlens[index]..cu_seqlens[index + 1],
                SampleRows::Padded {
                    rows,
                    attention_mask,
                } => {
                    let length = attention_mask.len() / rows;
                    let row = index * length..(index + 1) * length;
                    let attended = attention_mask[row.clone()].iter().filter(|token| **token);
                    row.start..row.start + attended.count()
                }
            };
            let before = seen;
            seen[0] += count(tokens.clone(), IMAGE) * groups[0];
            seen[1] += count(tokens.clone(), VIDEO) * groups[1];
            let is_taken = |label: &String| {
                let input = format!("input/{label}/input_ids");
                self.items.contains_key(&input) || places.iter().any(|p| p.label == *label)
            };
            let labels = (2..).map(|number| format!("{line}-{number}"));
            let mut labels = std::iter::once(line.to_string()).chain(labels);
            places.push(Place {
                label: labels.find(|label| !is_taken(label)).unwrap_or_default(),
                tokens,
                images: before[0]..seen[0],
                videos: before[1]..seen[1],
            });
        }
        Ok(places)
    }

    /// Adds the results of a micro-batch, whose gradients are `scale` times those of the loss.
    /// tokens: with divided ones, this rank's share, and the first rank of its group.
    pub(crate) fn add_pass(
        &mut self,
        model: &Vlm,
        (micro, batch): (&MicroBatch, &Batch),
        tokens: Option<(TokenShare, usize)>,
        (trace, scale): (Trace, f64),
    ) -> Result<()> {
        let kinds = kinds(model, micro)?;
        let of_rank = TokenInputs::new(model, (micro, batch), tokens)?;
        let (mut images, mut videos) = (Media::images(micro), Media::videos(micro));
        let mut seconds = micro.seconds_per_grid.iter();
        for place in self.places(model, micro)? {
            let tokens = place.tokens.clone();
            let id_values = |ids: &[i64]| ids[tokens.clone()].iter().map(|id| *id as f32).collect();
            let length = tokens.len();
            let axes = of_rank.position_ids.iter();
            let axes = axes.flat_map(|axis| axis[tokens.clone()].iter().copied());
            let [image_grids, image_patches] = images.take(place.images);
            let [video_grids, video_patches] = videos.take(place.videos);
            let clips = video_grids.shape[0];
            let seconds: Vec<f32> = seconds.by_ref().take(clips).map(|s| *s as f32).collect();
            let tensor = |values: Vec<f32>, shape: &[usize]| Sampled {
                shape: shape.to_vec(),
                values,
            };
            let inputs = [
                (
                    "input_ids",
                    tensor(id_values(&of_rank.input_ids), &[length]),
                ),
                ("targets", tensor(id_values(&of_rank.targets), &[length])),
                ("labels", tensor(id_values(&micro.labels), &[length])),
                (
                    "kinds",
                    tensor(
                        kinds[tokens.clone()]
                            .iter()
                            .map(|kind| f32::from(*kind))
                            .collect(),
                        &[length],
                    ),
                ),
                ("position_ids", tensor(axes.collect(), &[3, length])),
                ("image_grids", image_grids),
                ("image_patches", image_patches),
                ("video_grids", video_grids),
                ("video_patches", video_patches),
                ("video_seconds", tensor(seconds.clone(), &[seconds.len()])),
            ];
            for (name, sampled) in inputs {
                self.insert(format!("input/{}/{name}", place.label), sampled);
            }
            if let Some(owners) = &of_rank.owners {
                let owners = tensor(owners[tokens.clone()].to_vec(), &[length]);
                self.insert(format!("part/{}/tokens", place.label), owners);
            }
        }
        for ((label, name), mut sampled) in trace.into_samples()? {
            let name = match name.strip_prefix("gradient.") {
                Some(name) => {
                    // A power of 2.
                    let unscale = |value: &mut f32| *value = (f64::from(*value) / scale) as f32;
                    sampled.values.iter_mut().for_each(unscale);
                    format!("backward/{label}/{name}")
                }
                None => format!("forward/{label}/{name}"),
            };
            self.insert(name, sampled);
        }
        Ok(())
    }

    /// Adds the gradients of a batch, over all ranks.
    pub(crate) fn add_gradients(
        &mut self,
        parameters: &[Parameter],
        gradients: &GradientSums,
        shards: Option<(&Shards, &Device)>,
    ) -> Result<()> {
        if let Some(shards) = shards {
            return self.add_parts(parameters, gradients, shards);
        }
        for parameter in parameters {
            if let Some(gradient) = gradients.get(parameter.id) {
                let sampled = parameter.sample(gradient, SAMPLES)?;
                self.insert(format!("backward/{}", parameter.name), sampled);
            }
        }
        Ok(())
    }
}

/// The indices of the tokens of a share among those of a micro-batch.
fn own_tokens(micro: &MicroBatch, share: TokenShare) -> Vec<usize> {
    let rows = match &micro.rows {
        SampleRows::Packed { .. } => 1,
        SampleRows::Padded { rows, .. } => *rows,
    };
    share.own(rows, micro.input_ids.len() / rows.max(1))
}

/// The inputs of a micro-batch by token. With divided tokens, those that this rank computes with are
/// at its places, and 0 at others.
struct TokenInputs {
    input_ids: Vec<i64>,
    targets: Vec<i64>,
    position_ids: [Vec<f32>; 3],
    /// The rank that has each token, if they are divided.
    owners: Option<Vec<f32>>,
}

impl TokenInputs {
    fn new(
        model: &Vlm,
        (micro, batch): (&MicroBatch, &Batch),
        tokens: Option<(TokenShare, usize)>,
    ) -> Result<Self> {
        let targets = model.own_targets(batch, &micro.labels)?;
        let (Some((share, first)), Some((own, positions))) = (tokens, batch.own_tokens()) else {
            let axis = |axis| batch.position_ids().axis(axis).iter();
            return Ok(Self {
                input_ids: micro.input_ids.clone(),
                targets,
                position_ids: [0, 1, 2].map(|of| axis(of).map(|id| *id as f32).collect()),
                owners: None,
            });
        };
        let all = micro.input_ids.len();
        // Places follow from the rule, values from what the batch was made of.
        let places = own_tokens(micro, share);
        let mut inputs = Self {
            input_ids: vec![0; all],
            targets: vec![0; all],
            position_ids: [0, 1, 2].map(|_| vec![0.0; all]),
            owners: None,
        };
        for (at, (place, token)) in places.into_iter().zip(own).enumerate() {
            inputs.input_ids[place] = micro.input_ids[*token];
            inputs.targets[place] = targets.get(at).copied().unwrap_or_default();
            for (axis, ids) in inputs.position_ids.iter_mut().enumerate() {
                let axis = axis.min(positions.axis_count().saturating_sub(1));
                ids[place] = positions.value(axis, at) as f32;
            }
        }
        let mut owners = vec![0.0; all];
        for index in 0..share.count {
            for token in own_tokens(micro, TokenShare { index, ..share }) {
                owners[token] = (first + index) as f32;
            }
        }
        inputs.owners = Some(owners);
        Ok(inputs)
    }
}

/// The kinds of placeholders, as transformers numbers them.
const IMAGE: u8 = 1;
const VIDEO: u8 = 2;

/// The kind of each token: 0 for text.
fn kinds(model: &Vlm, micro: &MicroBatch) -> Result<Vec<u8>> {
    let placeholders = model.placeholders();
    let videos = model.video_tokens(&prompt(micro))?;
    let tokens = micro.input_ids.iter().zip(videos);
    let kind = |(id, is_video): (&i64, bool)| match (
        placeholders.is_some_and(|known| known.contains(id)),
        is_video,
    ) {
        (false, _) => 0,
        (true, false) => IMAGE,
        (true, true) => VIDEO,
    };
    Ok(tokens.map(kind).collect())
}

fn patches(grids: &[[usize; 3]]) -> usize {
    grids
        .iter()
        .map(|grid| grid.iter().product::<usize>())
        .sum()
}

/// The place of a sample in a micro-batch.
#[derive(Debug)]
struct Place {
    label: String,
    tokens: Range<usize>,
    /// Its patches among those of all pictures, and of all videos.
    images: Range<usize>,
    videos: Range<usize>,
}

/// The pictures or videos of a micro-batch, of which samples take theirs in order.
struct Media<'a> {
    grids: std::slice::Iter<'a, [usize; 3]>,
    patches: &'a [f32],
    channels: usize,
}

impl<'a> Media<'a> {
    fn images(micro: &'a MicroBatch) -> Self {
        Self::new(&micro.image_grids, &micro.image_patches)
    }

    fn videos(micro: &'a MicroBatch) -> Self {
        Self::new(&micro.video_grids, &micro.video_patches)
    }

    fn new(grids: &'a [[usize; 3]], all: &'a [f32]) -> Self {
        Self {
            grids: grids.iter(),
            patches: all,
            channels: all.len().checked_div(patches(grids)).unwrap_or(0),
        }
    }

    /// Grids and patches of a sample.
    fn take(&mut self, rows: Range<usize>) -> [Sampled; 2] {
        let (mut grids, mut left) = (Vec::new(), rows.len());
        while left > 0
            && let Some(grid) = self.grids.next()
        {
            grids.extend(grid.iter().map(|size| *size as f32));
            left = left.saturating_sub(grid.iter().product());
        }
        // Independent of the other samples of the micro-batch.
        let columns = if rows.is_empty() { 0 } else { self.channels };
        let values = &self.patches[rows.start * self.channels..rows.end * self.channels];
        let shapes = [vec![grids.len() / 3, 3], vec![rows.len(), columns]];
        let [of_grids, of_patches] = shapes;
        [
            Sampled {
                shape: of_grids,
                values: grids,
            },
            Sampled {
                shape: of_patches,
                values: values.to_vec(),
            },
        ]
    }
}

impl Trainer {
    /// Runs one step, bit-identical to [`step`](Self::step), and writes a record of it to a file,
    /// which replaces an older one. At most 1024 elements per tensor are kept. With several ranks,
    /// all call this; the file of rank R above 0 ends in `.rank-R.safetensors`.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); [`VlmTrainError::Model`] if the file cannot be written; the
    /// step is then already complete.
    pub fn record_step(&mut self, batch: &[MicroBatch], path: &Path) -> Result<StepReport> {
        let mut recording = Recording::default();
        let before = self.sample_weights(false)?;
        let report = self.step_recording(batch, Some(&mut recording))?;
        for (name, mut after) in self.sample_weights(true)? {
            if let Some(before) = before.get(&name) {
                let pairs = after.values.iter_mut().zip(&before.values);
                pairs.for_each(|(after, before)| *after -= before);
            }
            recording.insert(format!("update/{name}"), after);
        }
        for (name, sampled) in before {
            recording.insert(format!("weight/{name}"), sampled);
        }
        let rank = self.peers.as_ref().map(|peers| {
            let [rank, ranks] = peers.place();
            let own = batch.iter().map(|micro| self.labelled_part(micro));
            let own = own.map(|counts| counts.map_or(0, |[_, own]| own));
            let sharding = peers.shards.as_ref().map_or(Sharding::None, |s| s.sharding);
            RecordRank {
                rank,
                ranks,
                sharding,
                context: peers.context,
                labelled: own.sum(),
                in_parts: match sharding {
                    Sharding::None => vec![],
                    Sharding::Optimizer | Sharding::Gradients => vec![Stage::Backward],
                    Sharding::All => vec![Stage::Weight, Stage::Backward, Stage::Update],
                },
            }
        });
        if let Some((shards, _)) = self.shards() {
            let parameters = self.model.all_parameters().into_iter();
            let parameters: Vec<Parameter> = parameters.map(|(parameter, _)| parameter).collect();
            recording.add_ranks(&parameters, shards);
        }
        let mut settings = BTreeMap::new();
        if let Ok(recipe) = serde_json::to_value(&self.recipe) {
            flatten("", &recipe, &mut settings);
        }
        let shapes = recording.items.iter();
        let precision = format!("{:?}", self.model.dtype()).to_lowercase();
        let header = RecordHeader {
            version: VERSION,
            source: format!("mrope {}", env!("CARGO_PKG_VERSION")),
            precision,
            samples: SAMPLES,
            step: report.step,
            loss: report.loss,
            gradient_norm: Some(report.gradient_norm),
            labelled: Some(report.labelled),
            rank,
            settings,
            shapes: shapes
                .map(|(name, s)| (name.clone(), s.shape.clone()))
                .collect(),
        };
        let items = recording.items.into_iter();
        let items = items
            .map(|(name, sampled)| (name, sampled.values))
            .collect();
        let path = rank_path(path, header.rank.as_ref().map_or(0, |rank| rank.rank));
        StepRecord { header, items }.write(&path)?;
        Ok(report)
    }

    /// Samples of all weights, or of all trained ones, by name.
    fn sample_weights(&self, trained_only: bool) -> Result<BTreeMap<String, Sampled>> {
        let Some((shards, _)) = self.shards().filter(|_| self.has_weight_shards()) else {
            return Ok(self.model.sample_parameters(SAMPLES, trained_only)?);
        };
        let parts = shards.all_weights();
        let parameters = self.model.all_parameters().into_iter();
        let parameters = parameters.filter(|(_, is_trained)| *is_trained || !trained_only);
        let sampled = parameters.filter_map(|(parameter, _)| {
            let sampled = shards.sample(&parameter, &parts, SAMPLES).transpose()?;
            Some(sampled.map(|sampled| (parameter.name, sampled)))
        });
        Ok(sampled.collect::<vlm_models::Result<_>>()?)
    }
}

/// The values of a nested object by their paths.
fn flatten(path: &str, value: &Value, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                flatten(&format!("{path}{dot}{key}"), value, found);
            }
        }
        value => _ = found.insert(path.to_owned(), value.to_string()),
    }
}
