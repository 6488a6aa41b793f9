//! A folder with a tiny model of Hugging Face transformers: its inputs, activations, gradients and
//! first steps of training against the same model in burn.

mod prompt;

use std::path::Path;

use burn::backend::ExecutionError;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use rope_burn::{Implementation, Rotary, RotaryError};
use rope_core::hf::parse_config;
use rope_core::position_ids::{
    Compatibility, PositionIds, PositionIdsError, PositionRules, vision_cu_seqlens,
    vision_positions, vision_windows,
};
use rope_core::{Layout, Pairing, Positions, RopeError, RotarySpec, TokenAngles};
use serde::Deserialize;
use vlm_models::{Batch, Inputs, Trace, VisionConfig, Vlm, VlmConfig, VlmError};

use self::prompt::OwnedPrompt;
use crate::buffer::DType;
use crate::golden::tensors::{Kind, Tensors, Values, largest};
use crate::golden::{GoldenError, MAX_BYTES, Row, Worst, reasons, version_of};
use crate::tolerance::{Operation, allowed};

/// The largest rounding of an angle in f32, relative to it; angles of transformers are such.
const F32_ANGLE: f64 = f32::EPSILON as f64;

const CONFIG: &str = "config.json";
const INPUTS: &str = "inputs.safetensors";
const EXPECTED: &str = "expected.safetensors";
const LEGACY: &str = "legacy.safetensors";
const TRAIN: &str = "train.json";

/// Times the tolerances of the CPU on another device, which sums in another order.
const SLACK: f64 = 2.0;
/// Times the tolerances of the CPU on a GPU, whose exp, sin and square roots may be off by units in
/// the last place; steps of training amplify them.
pub const GPU_SLACK: f64 = 4.0;

/// The columns `dtype` and `engine` of a row.
type By<'a> = (&'static str, &'a str);
const POSITIONS: By<'_> = ("i64", "positions");
const ANGLES: By<'_> = ("f32", "angles");

/// Why a folder was not compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file cannot be read or does not fit the others.
    #[error(transparent)]
    Golden(#[from] GoldenError),
    /// A folder without one of its files.
    #[error(
        "has no {file}; a model folder holds config.json, inputs.safetensors and \
         expected.safetensors: add it, or move the others elsewhere"
    )]
    Incomplete {
        /// The file.
        file: &'static str,
    },
    /// The operating system refused.
    #[error("{file} cannot be read: {source}")]
    Read {
        /// The file.
        file: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// JSON that does not parse.
    #[error("{file} cannot be read: {source}")]
    Json {
        /// The file.
        file: &'static str,
        /// Why, with line and column.
        source: serde_json::Error,
    },
    /// The rotation was refused.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// The prompt's tokens, grids and masks do not fit together.
    #[error(transparent)]
    PositionIds(#[from] PositionIdsError),
    /// The rotation of tensors was refused.
    #[error(transparent)]
    Rotary(#[from] RotaryError),
    /// The model was refused, or the device failed while it ran.
    #[error(transparent)]
    Model(#[from] VlmError),
    /// The device failed.
    #[error("{}", .0.reason())]
    Device(#[from] ExecutionError),
}

impl ModelError {
    fn json(file: &'static str) -> impl Fn(serde_json::Error) -> Self {
        move |source| Self::Json { file, source }
    }
}

/// The outcome for a folder.
pub struct Report {
    /// One row per tensor.
    pub rows: Vec<Row>,
    /// How many of them the device computed.
    pub computed: usize,
    /// Why the model itself was not compared, where it was not.
    pub skipped: Option<String>,
}

/// The files that every model folder holds.
const REQUIRED: [&str; 3] = [CONFIG, INPUTS, EXPECTED];

/// True if a folder is one of these. One that lacks one of the three files is too: its comparison
/// says which, while its files by themselves would be skipped.
pub fn is_model_folder(folder: &Path) -> bool {
    let found = REQUIRED.iter().filter(|file| folder.join(file).exists());
    found.count() >= 2
}

/// The text of a file of a folder.
fn read_text(folder: &Path, file: &'static str) -> Result<String, ModelError> {
    plain_files::read_text(&folder.join(file), MAX_BYTES).map_err(|error| ModelError::Read {
        file,
        source: error.cause.into(),
    })
}

/// Where models compute, and how.
pub struct Models {
    device: Device,
    implementation: Implementation,
    engine: String,
    /// Times the tolerances of the CPU.
    slack: f64,
}

impl Models {
    /// Models on `device`, without autodiff, which rows call `other` unless it is burn's CPU
    /// backend.
    pub fn new(device: Device, other: Option<String>, implementation: Implementation) -> Self {
        let slack = if other.is_some() { SLACK } else { 1.0 };
        let rotary = match implementation {
            Implementation::Fused => "fused",
            Implementation::Composed => "composed",
        };
        Self {
            device,
            implementation,
            engine: format!("{}/{rotary}", other.as_deref().unwrap_or("burn")),
            slack,
        }
    }

    /// Multiplies the tolerances of the CPU by another factor.
    #[must_use]
    pub fn with_slack(mut self, slack: f64) -> Self {
        self.slack = slack;
        self
    }

    /// Compares everything that a folder holds.
    ///
    /// Position ids and rotation of any family; activations, gradients and training of those that
    /// `vlm-models` builds.
    ///
    /// # Errors
    /// If a file cannot be read or does not fit the others, or the device fails.
    pub fn compare(&self, folder: &Path) -> Result<Report, ModelError> {
        if let Some(file) = REQUIRED.iter().find(|file| !folder.join(file).exists()) {
            return Err(ModelError::Incomplete { file });
        }
        let json = read_text(folder, CONFIG)?;
        let config = parse_config(&json).map_err(RopeError::from)?;
        let stated = Stated::deserialize(config).map_err(ModelError::json(CONFIG))?;
        let inputs = Tensors::read(&folder.join(INPUTS))?;
        let prompt = OwnedPrompt::read(&inputs)?;
        let mut expected = Tensors::read(&folder.join(EXPECTED))?;
        // Models of text alone number one row for all.
        for name in ["position_ids", "cos", "sin"] {
            expected.repeat_row(name, prompt.rows);
        }
        let mut fixture = Fixture {
            version: version_of(stated.transformers_version.as_deref()),
            spec: RotarySpec::from_hf_config(&json)?,
            prompt,
            inputs,
            expected,
            json,
            models: self,
        };
        fixture.expect_callers_ids()?;
        let mut rows = fixture.compare_positions()?;
        rows.extend(fixture.compare_rotation()?);
        let mut skipped = None;
        match VlmConfig::from_hf_config(&fixture.json) {
            Ok(config) => {
                let config = config.with_implementation(self.implementation);
                rows.extend(fixture.compare_tower(&config)?);
                rows.extend(fixture.compare_model(&config, folder)?);
            }
            Err(error @ VlmError::UnknownFamily(_)) => {
                skipped = Some(format!("the model beyond positions and rotation: {error}"));
            }
            Err(error) => return Err(error.into()),
        }
        let computed = rows.iter().filter(|row| row.engine == self.engine);
        Ok(Report {
            computed: computed.count(),
            rows,
            skipped,
        })
    }
}

#[derive(Deserialize)]
struct Stated {
    transformers_version: Option<String>,
}

#[derive(Deserialize)]
struct Training {
    lr: f64,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
    loss_before_each_step: Vec<f64>,
    loss_after_last_step: f64,
}

/// A folder's files.
struct Fixture<'a> {
    json: String,
    spec: RotarySpec,
    version: Compatibility,
    prompt: OwnedPrompt,
    inputs: Tensors,
    expected: Tensors,
    models: &'a Models,
}

impl Fixture<'_> {
    /// A row of what the device computed, in f32.
    fn by(&self) -> By<'_> {
        ("f32", &self.models.engine)
    }

    /// The tolerance of an operation in f32 on the device.
    fn allowed(&self, operation: Operation) -> f64 {
        allowed(operation, DType::F32, 1.0) * self.models.slack
    }

    /// The position ids of a version.
    fn position_ids(&self, version: Compatibility) -> Result<PositionIds, ModelError> {
        let rules = PositionRules::from_hf_config(&self.json)?.with_compatibility(version);
        Ok(rules.position_ids(&self.prompt.prompt())?)
    }

    /// Transformers numbers padding in a model of text alone, unless the caller passes ids, as its
    /// generation does: then the rule holds.
    fn expect_callers_ids(&mut self) -> Result<(), ModelError> {
        if self.spec.axis_count() == 1 {
            let exact = self.position_ids(Compatibility::Exact)?;
            let [row, ..] = &self.position_rows(&exact, &self.expected, "")?[..] else {
                return Ok(());
            };
            if row.pass {
                self.version = Compatibility::Exact;
            }
        }
        Ok(())
    }

    fn compare_positions(&self) -> Result<Vec<Row>, ModelError> {
        let found = self.position_ids(self.version)?;
        let mut rows = self.position_rows(&found, &self.expected, "")?;
        if !found.divergences().is_empty() {
            rows[0].note = Some(reasons(&found));
        }
        Ok(rows)
    }

    /// Ids of all tokens except padding, and rope deltas, which a model of text alone may lack.
    fn position_rows(
        &self,
        found: &PositionIds,
        expected: &Tensors,
        prefix: &str,
    ) -> Result<Vec<Row>, ModelError> {
        let attended = &self.prompt.attended;
        let axes = self.spec.axis_count();
        let ids = (0..axes).flat_map(|axis| found.axis(axis));
        let exact = |name: &str, found: Vec<f64>, keep: &dyn Fn(usize) -> bool| {
            let expected = expected.get(name)?;
            let name = format!("{prefix}{name}");
            Ok::<_, GoldenError>(row(&name, POSITIONS, &found, expected, 0.0, keep))
        };
        let deltas = found.rope_deltas().iter();
        let mut rows = vec![exact("position_ids", ids.copied().collect(), &|i| {
            attended[i % attended.len()]
        })?];
        if axes > 1 || expected.find("rope_deltas", Kind::Numbers)?.is_some() {
            rows.push(exact("rope_deltas", deltas.copied().collect(), &all)?);
        }
        Ok(rows)
    }

    /// The rotation alone: cos and sin, q and k forward, their gradients back.
    fn compare_rotation(&self) -> Result<Vec<Row>, ModelError> {
        let spec = self.spec.clone();
        let ids = &self.expected.get("position_ids")?.values;
        let positions = Positions::real(spec.axis_count(), ids)?;
        let fastest = spec.inv_freq(None)?.into_iter().fold(0.0, f64::max);
        let angle = F32_ANGLE * f64::from(positions.highest()) * fastest;
        let attended = &self.prompt.attended;
        let rotation = allowed(Operation::Rotation, DType::F32, 1.0);

        let angles = TokenAngles::<f32>::new(&spec, &positions, None)?;
        let mut rows = Vec::new();
        for (name, lanes) in ["cos", "sin"].into_iter().zip(angles.cos_sin()) {
            let expected = self.expected.get(name)?;
            let width = expected.shape.last().copied().unwrap_or(1).max(1);
            let keep = |i: usize| attended[i / width % attended.len()];
            let found = per_channel(&spec, &lanes);
            rows.push(row(name, ANGLES, &found, expected, rotation + angle, keep));
        }

        let rotary =
            Rotary::new(spec, Layout::Bnsd).with_implementation(self.models.implementation);
        let device = &self.models.device;
        let angles = rotary.try_angles(&positions, device)?;
        let mut rotated = |inputs: [&str; 2], outputs: [&str; 2], forward: bool| {
            let q = tensor::<4>(self.expected.get(inputs[0])?, device)?;
            let k = tensor::<4>(self.expected.get(inputs[1])?, device)?;
            let (q, k) = if forward {
                rotary.try_forward(q, k, &angles)?
            } else {
                rotary.try_adjoint(q, k, &angles)?
            };
            for ((input, output), found) in inputs.into_iter().zip(outputs).zip([q, k]) {
                let expected = self.expected.get(output)?;
                let reach = 2.0 * largest(expected.values.iter().copied());
                let tolerance = (rotation + reach * (angle + F32_ANGLE)) * self.models.slack;
                let name = format!("{output} of {input}");
                let keep = self.prompt.attended_elements(expected, 2)?;
                let found = values(&found.try_into_data()?);
                rows.push(row(&name, self.by(), &found, expected, tolerance, keep));
            }
            Ok::<_, ModelError>(())
        };
        rotated(["q_pre", "k_pre"], ["q_post", "k_post"], true)?;
        rotated(
            ["grad_act.q_post", "grad_act.k_post"],
            ["grad_act.q_pre", "grad_act.k_pre"],
            false,
        )?;
        Ok(rows)
    }

    /// The order in which the tower's patches attend, and its cos and sin.
    fn compare_tower(&self, config: &VlmConfig) -> Result<Vec<Row>, ModelError> {
        let mut rows = Vec::new();
        let Some(vision) = &config.vision else {
            return Ok(rows);
        };
        for (kind, grids) in [
            ("image", &self.prompt.image_grids),
            ("video", &self.prompt.video_grids),
        ] {
            if grids.is_empty() {
                continue;
            }
            let positions = vision_positions(grids, vision.spatial_merge)?;
            let interleaved = (0..positions.tokens())
                .flat_map(|token| [0, 1].map(|axis| positions.value(axis, token) as usize));
            let mut orders = vec![
                ("position_ids", interleaved.collect()),
                ("cu_seqlens", vision_cu_seqlens(grids)?),
            ];
            if let Some(windows) = &vision.windows {
                let windows = vision_windows(grids, vision.spatial_merge, windows.side)?;
                orders.push(("window_index", windows.window_index));
                orders.push(("cu_window_seqlens", windows.cu_window_seqlens));
            }
            let angles = TokenAngles::<f32>::new(&vision.rotation, &positions, None)?;
            let angle = F32_ANGLE * f64::from(positions.highest());
            let rotation = allowed(Operation::Rotation, DType::F32, 1.0);
            let channels = |lanes: Vec<f32>| per_channel(&vision.rotation, &lanes);
            let orders = orders.into_iter().map(|(name, found)| {
                let found = found.iter().map(|value| *value as f64).collect();
                (name, POSITIONS, found, 0.0)
            });
            let angles = ["cos", "sin"].into_iter().zip(angles.cos_sin());
            let angles =
                angles.map(|(name, lanes)| (name, ANGLES, channels(lanes), rotation + angle));
            for (name, by, found, tolerance) in orders.chain(angles) {
                let name = format!("vision.{kind}.{name}");
                let found: Vec<f64> = found;
                let expected = self.expected.get(&name)?;
                rows.push(row(&name, by, &found, expected, tolerance, all));
            }
        }
        Ok(rows)
    }

    /// Activations, logits, loss, gradients and training.
    fn compare_model(&self, config: &VlmConfig, folder: &Path) -> Result<Vec<Row>, ModelError> {
        let device = self.models.device.clone().autodiff();
        let labels = self.inputs.get("labels")?.integers();
        let load = |version| {
            let mut config = config.clone().with_compatibility(version);
            // Whatever the version, the losses are of transformers.
            config.padding_predicts = true;
            config.load(folder, &device)
        };
        let model = load(self.version)?;
        let batch = self.batch(&model)?;

        let mut trace = Trace::recording();
        model.forward_traced(&batch, &mut trace)?;
        let mut rows = self.activation_rows(&trace, config)?;

        let loss = model.loss(&batch, &labels)?;
        let expected = self.expected.get("loss")?;
        if expected.values.len() != 1 {
            return Err(expected.misshapen("[1]").into());
        }
        let found = values(&loss.clone().try_into_data()?);
        let tolerance = self.allowed(Operation::Activation);
        rows.push(row("loss", self.by(), &found, expected, tolerance, all));

        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = model.checkpoint_gradients(gradients)?;
        for (name, expected) in self.expected.with_prefix("grad.")? {
            let parameter = name.trim_start_matches("grad.");
            let found = gradients.get(parameter).map(values).unwrap_or_default();
            rows.push(self.gradient_row(name, &found, expected));
        }

        if folder.join(LEGACY).exists() {
            let legacy = Tensors::read(&folder.join(LEGACY))?;
            let model = load(Compatibility::Transformers4_57)?;
            let batch = self.batch(&model)?;
            rows.extend(self.position_rows(batch.position_ids(), &legacy, "legacy.")?);
            let found = values(&model.forward(&batch)?.try_into_data()?);
            let expected = legacy.get("logits")?;
            let keep = self.prompt.attended_elements(expected, 1)?;
            let name = "legacy.logits";
            rows.push(row(name, self.by(), &found, expected, tolerance, keep));
        }
        if folder.join(TRAIN).exists() {
            let training = read_text(folder, TRAIN)?;
            let training = serde_json::from_str(&training).map_err(ModelError::json(TRAIN))?;
            rows.push(self.training_row(model, &batch, &labels, training)?);
        }
        Ok(rows)
    }

    fn batch(&self, model: &Vlm) -> Result<Batch, ModelError> {
        let device = model.device();
        let patches = |name: &str, grids: &[[usize; 3]]| {
            let tensor = || tensor::<2>(self.inputs.get(name)?, &device);
            (!grids.is_empty()).then(tensor).transpose()
        };
        Ok(model.batch(&Inputs {
            prompt: self.prompt.prompt(),
            image_patches: patches("pixel_values", &self.prompt.image_grids)?,
            video_patches: patches("pixel_values_videos", &self.prompt.video_grids)?,
            shown: None,
        })?)
    }

    fn activation_rows(&self, trace: &Trace, config: &VlmConfig) -> Result<Vec<Row>, ModelError> {
        let tolerance = self.allowed(Operation::Activation);
        let mut rows = Vec::new();
        // The tower ran on images, then videos; a merged token is several patches.
        let patches = |grids: &[[usize; 3]]| {
            grids
                .iter()
                .map(|grid| grid.iter().product::<usize>())
                .sum()
        };
        let images: usize = patches(&self.prompt.image_grids);
        for (kind, start, count) in [
            ("image", 0, images),
            ("video", images, patches(&self.prompt.video_grids)),
        ] {
            let kind = format!("vision.{kind}.");
            for (name, expected) in self.expected.with_prefix(&kind)? {
                let shared_name = format!("vision.{}", name.trim_start_matches(&kind));
                let Some(found) = trace.get(&shared_name)? else {
                    continue; // positions and tables, which are compared elsewhere
                };
                let [height, width] = expected.shape[..] else {
                    return Err(expected.misshapen("[patches, channels]").into());
                };
                let per_row = if height == count {
                    1
                } else {
                    config
                        .vision
                        .as_ref()
                        .map_or(1, VisionConfig::merged_patches)
                };
                let range = start / per_row * width..(start + count) / per_row * width;
                let found = values(found);
                let found = found.get(range).unwrap_or_default();
                rows.push(row(name, self.by(), found, expected, tolerance, all));
            }
        }
        let mut layers = 0..config.text.layers;
        let rotates =
            layers.find(|layer| trace.names().any(|name| name == format!("q_pre.{layer}")));
        let rotates = rotates.unwrap_or(0);
        for (name, expected) in self.expected.with_prefix("")? {
            let is_rotated = name.ends_with("_pre") || name.ends_with("_post");
            let found = match trace.get(name)? {
                Some(found) => values(found),
                // Of the first layer that rotates, [batch, seq, heads, head_dim] here.
                None => match trace.get(&format!("{name}.{rotates}"))? {
                    Some(found) => heads_first(found),
                    None => continue,
                },
            };
            let seq_axis = if is_rotated { 2 } else { 1 };
            let keep = self.prompt.attended_elements(expected, seq_axis)?;
            rows.push(row(name, self.by(), &found, expected, tolerance, keep));
        }
        Ok(rows)
    }

    /// Losses before each step of AdamW, and after the last.
    fn training_row(
        &self,
        mut model: Vlm,
        batch: &Batch,
        labels: &[i64],
        training: Training,
    ) -> Result<Row, ModelError> {
        let mut optimizer = AdamWConfig::new()
            .with_beta_1(training.betas[0])
            .with_beta_2(training.betas[1])
            .with_epsilon(training.eps)
            .with_weight_decay(training.weight_decay)
            .init();
        let mut losses = Vec::new();
        for _ in &training.loss_before_each_step {
            let loss;
            (model, loss) = model.train_step(&mut optimizer, training.lr, batch, labels)?;
            losses.push(f64::from(loss));
        }
        losses.extend(values(&model.loss(batch, labels)?.try_into_data()?));
        let mut expected = training.loss_before_each_step;
        expected.push(training.loss_after_last_step);
        let expected = Values::list("train.loss", expected);
        let tolerance = self.allowed(Operation::Activation);
        Ok(row(
            "train.loss",
            self.by(),
            &losses,
            &expected,
            tolerance,
            all,
        ))
    }

    /// Compares a gradient by the norm of the difference.
    fn gradient_row(&self, name: &str, found: &[f64], expected: &Values) -> Row {
        // Infinities are compared by element.
        let norm = |values: &mut dyn Iterator<Item = f64>| {
            let finite = values.filter(|x| x.is_finite());
            finite.map(|x| x * x).sum::<f64>().sqrt()
        };
        let zero = allowed(Operation::ZeroGradient, DType::F32, 0.0);
        if largest(expected.values.iter().copied()) <= zero {
            let tolerance = zero * self.models.slack;
            return row(name, self.by(), found, expected, tolerance, all);
        }
        let size = norm(&mut expected.values.iter().copied());
        let tolerance = self.models.slack * allowed(Operation::Gradient, DType::F32, size);
        let mut row = row(name, self.by(), found, expected, tolerance, all);
        if row.pass {
            let difference = norm(&mut found.iter().zip(&expected.values).map(|(a, b)| a - b));
            row.ratio = difference / tolerance;
            row.pass = row.ratio <= 1.0;
            row.worst = (!row.pass).then(|| Worst {
                at: "the norm of the difference".to_owned(),
                found: difference,
                expected: 0.0,
                tolerance,
            });
        }
        row
    }
}

fn tensor<const D: usize>(values: &Values, device: &Device) -> Result<Tensor<D>, ModelError> {
    if values.shape.len() != D {
        return Err(values.misshapen(format!("{D} dimensions")).into());
    }
    let elements: Vec<f32> = values.values.iter().map(|value| *value as f32).collect();
    let data = TensorData::new(elements, values.shape.clone());
    Ok(Tensor::from_data(data, device))
}

fn values(data: &TensorData) -> Vec<f64> {
    data.iter::<f64>().collect()
}

/// `[batch, seq, heads, head_dim]` as `[batch, heads, seq, head_dim]`.
fn heads_first(data: &TensorData) -> Vec<f64> {
    let (shape, flat) = (data.shape().to_vec(), values(data));
    let [batch, seq, heads, head_dim] = [shape[0], shape[1], shape[2], shape[3]];
    let mut out = Vec::with_capacity(flat.len());
    for row in 0..batch {
        for head in 0..heads {
            for token in 0..seq {
                let start = ((row * seq + token) * heads + head) * head_dim;
                out.extend_from_slice(&flat[start..start + head_dim]);
            }
        }
    }
    out
}

/// cos or sin per channel, as transformers keeps them, from cos or sin per lane.
fn per_channel(spec: &RotarySpec, lanes: &[f32]) -> Vec<f64> {
    let pairs = spec.rotary_dim() / 2;
    let per_token = spec.geometry().lane_count();
    let lane = |channel: usize| match spec.pairing() {
        _ if per_token != pairs => channel,
        Pairing::Adjacent => channel / 2,
        _ => channel % pairs,
    };
    let token =
        |lanes: &[f32]| -> Vec<f64> { (0..2 * pairs).map(|c| f64::from(lanes[lane(c)])).collect() };
    lanes.chunks_exact(per_token).flat_map(token).collect()
}

/// Every element.
fn all(_: usize) -> bool {
    true
}

/// Compares the elements that `keep` selects by their flat index.
fn row(
    name: &str,
    (dtype, engine): By<'_>,
    found: &[f64],
    expected: &Values,
    tolerance: f64,
    keep: impl Fn(usize) -> bool,
) -> Row {
    let count = expected.values.len();
    let kept: Vec<usize> = (0..count).filter(|i| keep(*i)).collect();
    // A length that differs leaves an element without a partner, which fails.
    let pick = |values: &[f64]| -> Vec<f64> {
        let kept = kept.iter().filter(|_| values.len() == count);
        kept.map(|i| values[*i]).collect()
    };
    Row::compare(
        name,
        dtype,
        engine,
        &pick(found),
        &pick(&expected.values),
        |_, _| tolerance,
        |i| expected.index(kept.get(i).copied().unwrap_or(0)),
    )
}
