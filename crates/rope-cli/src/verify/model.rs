//! A folder with a tiny model of Hugging Face transformers: its inputs, activations, gradients and first steps of training
//! against the same model in burn.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use qwen_vl::{Batch, Inputs, QwenVl, QwenVlConfig, QwenVlError, Trace};
use rope_burn::{Implementation, Rotary};
use rope_check::golden::{GoldenError, Row, Worst, version_of};
use rope_core::position_ids::{
    Compatibility, PositionIds, PositionRules, Prompt, Rows, vision_cu_seqlens, vision_positions,
    vision_windows,
};
use rope_core::{Layout, Pairing, Positions, RotarySpec, TokenAngles};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::device::Compute;

/// Of activations, logits and losses, whose values are of order 1.
const ACTIVATION: f64 = 1e-4;
/// Of a gradient, relative to its norm.
const GRADIENT: f64 = 1e-3;
/// Of a gradient that is zero but for rounding, absolute.
const ZERO_GRADIENT: f64 = 1e-6;
/// Of cos, sin and rotated values at position 0.
const ROTATION: f64 = 2e-6;
/// The largest rounding of an angle in f32, relative to it; angles of the other implementation are such.
const F32_ANGLE: f64 = f32::EPSILON as f64;

const CONFIG: &str = "config.json";
const INPUTS: &str = "inputs.safetensors";
const EXPECTED: &str = "expected.safetensors";
const LEGACY: &str = "legacy.safetensors";
const TRAIN: &str = "train.json";

/// What a folder came to.
pub(super) struct Report {
    pub(super) rows: Vec<Row>,
    /// How many of them the device computed.
    pub(super) computed: usize,
    /// Why the model itself was not compared, where it was not.
    pub(super) skipped: Option<String>,
}

/// Whether a folder is one of these.
pub(super) fn is_model_folder(folder: &Path) -> bool {
    [CONFIG, INPUTS, EXPECTED]
        .iter()
        .all(|file| folder.join(file).is_file())
}

/// Where models compute, and how.
pub(super) struct Models {
    device: Device,
    implementation: Implementation,
    engine: String,
    /// Times the tolerances of the CPU: other devices sum in other orders.
    slack: f64,
}

impl Models {
    pub(super) fn new(
        compute: &Compute,
        device: &crate::device::Device,
        implementation: Implementation,
    ) -> Self {
        let (place, slack) = match device {
            crate::device::Device::Cpu => ("burn".to_owned(), 1.0),
            crate::device::Device::Remote { .. } => ("remote".to_owned(), 2.0),
            npu => (npu.to_string(), 2.0),
        };
        let rotary = match implementation {
            Implementation::Fused => "fused",
            Implementation::Composed => "composed",
        };
        Self {
            device: compute.device().clone(),
            implementation,
            engine: format!("{place}/{rotary}"),
            slack,
        }
    }

    /// Compares everything that a folder holds.
    ///
    /// Position ids and rotation of any family; activations, gradients and training of those that `qwen-vl` builds.
    ///
    /// # Errors
    /// If a file cannot be read or does not fit the others.
    pub(super) fn compare(&self, folder: &Path) -> Result<Report, Box<dyn Error>> {
        let json = std::fs::read_to_string(folder.join(CONFIG))?;
        let fixture = Fixture {
            version: version_of(
                serde_json::from_str::<Stated>(&json)?
                    .transformers_version
                    .as_deref(),
            ),
            inputs: Tensors::read(&folder.join(INPUTS))?,
            expected: Tensors::read(&folder.join(EXPECTED))?,
            json,
            models: self,
        };
        let mut rows = fixture.compare_positions()?;
        rows.extend(fixture.compare_rotation()?);
        let mut skipped = None;
        match QwenVlConfig::from_hf_config(&fixture.json) {
            Ok(config) => {
                let config = config.with_implementation(self.implementation);
                rows.extend(fixture.compare_tower(&config)?);
                rows.extend(fixture.compare_model(&config, folder)?);
            }
            Err(error @ QwenVlError::UnknownFamily { .. }) => {
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
    version: Compatibility,
    inputs: Tensors,
    expected: Tensors,
    models: &'a Models,
}

impl Fixture<'_> {
    fn engine(&self) -> &str {
        &self.models.engine
    }

    /// A tolerance of the CPU's, for the device.
    fn within(&self, tolerance: f64) -> f64 {
        tolerance * self.models.slack
    }

    fn compare_positions(&self) -> Result<Vec<Row>, Box<dyn Error>> {
        let rules = PositionRules::from_hf_config(&self.json)?;
        let prompt = OwnedPrompt::read(&self.inputs)?;
        let found = rules
            .with_compatibility(self.version)
            .position_ids(&prompt.prompt())?;
        let mut rows = self.position_rows(&prompt, &found, &self.expected, "")?;
        if !found.divergences().is_empty() {
            let reasons: Vec<String> = found
                .divergences()
                .iter()
                .map(ToString::to_string)
                .collect();
            rows[0].note = Some(reasons.join("; "));
        }
        Ok(rows)
    }

    /// Ids of all tokens but padding, and rope deltas.
    fn position_rows(
        &self,
        prompt: &OwnedPrompt,
        found: &PositionIds,
        expected: &Tensors,
        prefix: &str,
    ) -> Result<Vec<Row>, Box<dyn Error>> {
        let ids: Vec<f64> = (0..3)
            .flat_map(|axis| found.axis(axis).iter().map(|id| *id as f64))
            .collect();
        let deltas: Vec<f64> = found
            .rope_deltas()
            .iter()
            .map(|delta| *delta as f64)
            .collect();
        let tokens = prompt.attended.len();
        let exact = |name: &str, found: &[f64], keep: &dyn Fn(usize) -> bool| {
            let row = compare_where(
                &format!("{prefix}{name}"),
                ("i64", "positions"),
                found,
                expected.get(name)?,
                0.0,
                keep,
            );
            Ok::<_, GoldenError>(row)
        };
        Ok(vec![
            exact("position_ids", &ids, &|i| prompt.attended[i % tokens])?,
            exact("rope_deltas", &deltas, &|_| true)?,
        ])
    }

    /// The rotation alone: cos and sin, q and k forward, their gradients back.
    fn compare_rotation(&self) -> Result<Vec<Row>, Box<dyn Error>> {
        let spec = RotarySpec::from_hf_config(&self.json)?;
        let ids: Vec<i64> = self.expected.integers("position_ids")?;
        let positions = Positions::new(3, &ids)?;
        let fastest = spec.inv_freq(None)?.into_iter().fold(0.0, f64::max);
        let angle = F32_ANGLE * f64::from(positions.highest()) * fastest;
        let prompt = OwnedPrompt::read(&self.inputs)?;
        let attended = &prompt.attended;

        let angles = TokenAngles::<f32>::new(&spec, &positions, None)?;
        let mut rows = Vec::new();
        for (name, lanes) in [("cos", angles.cos()), ("sin", angles.sin())] {
            let expected = self.expected.get(name)?;
            let width = expected.shape.last().copied().unwrap_or(1).max(1);
            let keep = |i: usize| attended[i / width % attended.len()];
            let found = per_channel(&spec, lanes);
            let by = ("f32", "angles");
            rows.push(compare_where(
                name,
                by,
                &found,
                expected,
                ROTATION + angle,
                keep,
            ));
        }

        let rotary =
            Rotary::new(spec, Layout::Bnsd).with_implementation(self.models.implementation);
        let device = self.models.device.clone();
        let angles = rotary.try_angles(&positions, &device)?;
        for (q_in, k_in, q_out, k_out, forward) in [
            ("q_pre", "k_pre", "q_post", "k_post", true),
            (
                "grad_act.q_post",
                "grad_act.k_post",
                "grad_act.q_pre",
                "grad_act.k_pre",
                false,
            ),
        ] {
            let q = self.expected.tensor::<4>(q_in, &device)?;
            let k = self.expected.tensor::<4>(k_in, &device)?;
            let (q, k) = if forward {
                rotary.try_forward(q, k, &angles)?
            } else {
                rotary.try_adjoint(q, k, &angles)?
            };
            for (input, output, found) in [(q_in, q_out, q), (k_in, k_out, k)] {
                let expected = self.expected.get(output)?;
                let reach = 2.0
                    * expected
                        .values
                        .iter()
                        .fold(0.0, |most: f64, x| most.max(x.abs()));
                let tolerance = self.within(ROTATION + reach * (angle + F32_ANGLE));
                let keep = prompt.attended_elements(&self.expected, output, 2)?;
                rows.push(compare_where(
                    &format!("{output} of {input}"),
                    ("f32", self.engine()),
                    &values(&found.into_data()),
                    expected,
                    tolerance,
                    keep,
                ));
            }
        }
        Ok(rows)
    }

    /// The order in which the tower's patches attend, and its cos and sin.
    fn compare_tower(&self, config: &QwenVlConfig) -> Result<Vec<Row>, Box<dyn Error>> {
        let vision = &config.vision;
        let prompt = OwnedPrompt::read(&self.inputs)?;
        let mut rows = Vec::new();
        for (kind, grids) in [
            ("image", &prompt.image_grids),
            ("video", &prompt.video_grids),
        ] {
            if grids.is_empty() {
                continue;
            }
            let positions = vision_positions(grids, vision.spatial_merge)?;
            let interleaved = (0..positions.tokens())
                .flat_map(|token| [0, 1].map(|axis| positions.axis(axis)[token] as usize));
            let mut orders = vec![
                ("position_ids", interleaved.collect()),
                ("cu_seqlens", vision_cu_seqlens(grids)?),
            ];
            if let Some(windows) = &vision.windows {
                let windows = vision_windows(grids, vision.spatial_merge, windows.side)?;
                orders.push(("window_index", windows.window_index));
                orders.push(("cu_window_seqlens", windows.cu_window_seqlens));
            }
            for (name, found) in orders {
                let name = format!("vision.{kind}.{name}");
                let found: Vec<f64> = found.iter().map(|value| *value as f64).collect();
                let expected = self.expected.get(&name)?;
                let by = ("i64", "positions");
                rows.push(compare_where(&name, by, &found, expected, 0.0, |_| true));
            }
            let angle = F32_ANGLE * f64::from(positions.highest());
            let angles = TokenAngles::<f32>::new(&vision.rotation, &positions, None)?;
            for (name, lanes) in [("cos", angles.cos()), ("sin", angles.sin())] {
                let name = format!("vision.{kind}.{name}");
                let (found, expected) = (
                    per_channel(&vision.rotation, lanes),
                    self.expected.get(&name)?,
                );
                let by = ("f32", "angles");
                rows.push(compare_where(
                    &name,
                    by,
                    &found,
                    expected,
                    ROTATION + angle,
                    |_| true,
                ));
            }
        }
        Ok(rows)
    }

    /// Activations, logits, loss, gradients and training.
    fn compare_model(
        &self,
        config: &QwenVlConfig,
        folder: &Path,
    ) -> Result<Vec<Row>, Box<dyn Error>> {
        let device = self.models.device.clone().autodiff();
        let prompt = OwnedPrompt::read(&self.inputs)?;
        let labels = self.inputs.integers("labels")?;
        let load = |version| {
            config
                .clone()
                .with_compatibility(version)
                .load(folder, &device)
        };
        let model = load(self.version)?;
        let batch = self.batch(&model, &prompt)?;

        let mut trace = Trace::recording();
        model.forward_traced(&batch, &mut trace)?;
        let mut rows = self.activation_rows(&trace, config, &prompt)?;

        let loss = model.loss(&batch, &labels)?;
        let mut scalar = |name: &str, found: f64, expected: f64| {
            let expected = Values::list(vec![expected]);
            let by = ("f32", self.engine());
            rows.push(compare_where(
                name,
                by,
                &[found],
                &expected,
                self.within(ACTIVATION),
                |_| true,
            ));
        };
        let expected_loss = self.expected.get("loss")?;
        let [expected_loss] = expected_loss.values[..] else {
            return Err(self.expected.misshapen("loss", "[1]", expected_loss).into());
        };
        scalar(
            "loss",
            f64::from(loss.clone().into_scalar::<f32>()),
            expected_loss,
        );

        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = model.checkpoint_gradients(gradients)?;
        for (name, expected) in self.expected.with_prefix("grad.") {
            let parameter = name.trim_start_matches("grad.");
            let found = gradients.get(parameter).map(values).unwrap_or_default();
            rows.push(gradient_row(
                name,
                self.engine(),
                &found,
                expected,
                self.models.slack,
            ));
        }

        if folder.join(LEGACY).is_file() {
            let legacy = Tensors::read(&folder.join(LEGACY))?;
            let model = load(Compatibility::Transformers4_57)?;
            let batch = self.batch(&model, &prompt)?;
            rows.extend(self.position_rows(&prompt, batch.position_ids(), &legacy, "legacy.")?);
            let logits = values(&model.forward(&batch)?.into_data());
            let expected = legacy.get("logits")?;
            let keep = prompt.attended_elements(&legacy, "logits", 1)?;
            let by = ("f32", self.engine());
            rows.push(compare_where(
                "legacy.logits",
                by,
                &logits,
                expected,
                self.within(ACTIVATION),
                keep,
            ));
        }
        if folder.join(TRAIN).is_file() {
            let training: Training =
                serde_json::from_str(&std::fs::read_to_string(folder.join(TRAIN))?)?;
            rows.push(self.training_row(model, &batch, &labels, training)?);
        }
        Ok(rows)
    }

    fn batch(&self, model: &QwenVl, prompt: &OwnedPrompt) -> Result<Batch, Box<dyn Error>> {
        let device = model.device();
        let patches = |name: &str, grids: &[[usize; 3]]| {
            let tensor = || self.inputs.tensor::<2>(name, &device);
            (!grids.is_empty()).then(tensor).transpose()
        };
        Ok(model.batch(&Inputs {
            prompt: prompt.prompt(),
            image_patches: patches("pixel_values", &prompt.image_grids)?,
            video_patches: patches("pixel_values_videos", &prompt.video_grids)?,
        })?)
    }

    fn activation_rows(
        &self,
        trace: &Trace,
        config: &QwenVlConfig,
        prompt: &OwnedPrompt,
    ) -> Result<Vec<Row>, Box<dyn Error>> {
        let by = ("f32", self.engine());
        let mut rows = Vec::new();
        // The tower ran on images, then videos; a merged token is several patches.
        let patches = |grids: &[[usize; 3]]| -> usize {
            grids
                .iter()
                .map(|grid| grid.iter().product::<usize>())
                .sum()
        };
        let images = patches(&prompt.image_grids);
        for (kind, start, count) in [
            ("image", 0, images),
            ("video", images, patches(&prompt.video_grids)),
        ] {
            let kind = format!("vision.{kind}.");
            for (name, expected) in self.expected.with_prefix(&kind) {
                let of_both = format!("vision.{}", name.trim_start_matches(&kind));
                let Some(found) = trace.get(&of_both) else {
                    continue; // positions and tables, which are compared elsewhere
                };
                let [height, width] = expected.shape[..] else {
                    let shape = "[patches, channels]";
                    return Err(self.expected.misshapen(name, shape, expected).into());
                };
                let per_row = if height == count {
                    1
                } else {
                    config.vision.merged_patches()
                };
                let range = start / per_row * width..(start + count) / per_row * width;
                let found = values(found).get(range).unwrap_or_default().to_vec();
                rows.push(compare_where(
                    name,
                    by,
                    &found,
                    expected,
                    self.within(ACTIVATION),
                    |_| true,
                ));
            }
        }
        for (name, expected) in &self.expected.entries {
            let seq_axis = if name.ends_with("_pre") || name.ends_with("_post") {
                2
            } else {
                1
            };
            let found = match trace.get(name) {
                Some(found) => values(found),
                // Of the first layer, [batch, seq, heads, head_dim] here.
                None => match trace.get(&format!("{name}.0")) {
                    Some(found) => heads_first(found),
                    None => continue,
                },
            };
            let keep = prompt.attended_elements(&self.expected, name, seq_axis)?;
            rows.push(compare_where(
                name,
                by,
                &found,
                expected,
                self.within(ACTIVATION),
                keep,
            ));
        }
        Ok(rows)
    }

    /// Losses before each step of AdamW, and after the last.
    fn training_row(
        &self,
        mut model: QwenVl,
        batch: &Batch,
        labels: &[i64],
        training: Training,
    ) -> Result<Row, Box<dyn Error>> {
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
        losses.push(f64::from(model.loss(batch, labels)?.into_scalar::<f32>()));
        let mut expected = training.loss_before_each_step;
        expected.push(training.loss_after_last_step);
        let (by, expected) = (("f32", self.engine()), Values::list(expected));
        Ok(compare_where(
            "train.loss",
            by,
            &losses,
            &expected,
            self.within(ACTIVATION),
            |_| true,
        ))
    }
}

/// A prompt's lists.
struct OwnedPrompt {
    input_ids: Vec<i64>,
    rows: usize,
    /// Of each row.
    tokens: usize,
    attended: Vec<bool>,
    types: Option<Vec<i64>>,
    image_grids: Vec<[usize; 3]>,
    video_grids: Vec<[usize; 3]>,
    seconds_per_grid: Option<Vec<f64>>,
}

impl OwnedPrompt {
    fn read(inputs: &Tensors) -> Result<Self, GoldenError> {
        let grids = |name: &str| {
            let values = match inputs.entries.get(name) {
                Some(tensor) => &tensor.values[..],
                None => &[],
            };
            let grid = |grid: &[f64]| [0, 1, 2].map(|axis| grid[axis] as usize);
            values.chunks_exact(3).map(grid).collect()
        };
        let input_ids = inputs.integers("input_ids")?;
        let ids = inputs.get("input_ids")?;
        let [rows @ (1..), tokens @ (1..)] = ids.shape[..] else {
            let shape = "[B,S], samples of one token or more";
            return Err(inputs.misshapen("input_ids", shape, ids));
        };
        let attended = match inputs.entries.get("attention_mask") {
            None => vec![true; input_ids.len()],
            Some(mask) if mask.shape == ids.shape => {
                mask.values.iter().map(|x| *x == 1.0).collect()
            }
            Some(mask) => {
                let shape = format!("[{rows},{tokens}], as input_ids");
                return Err(inputs.misshapen("attention_mask", &shape, mask));
            }
        };
        Ok(Self {
            rows,
            tokens,
            attended,
            types: inputs.integers("mm_token_type_ids").ok(),
            image_grids: grids("image_grid_thw"),
            video_grids: grids("video_grid_thw"),
            seconds_per_grid: inputs
                .entries
                .get("second_per_grid_ts")
                .map(|tensor| tensor.values.clone()),
            input_ids,
        })
    }

    /// Which elements of a tensor belong to tokens that are attended to.
    ///
    /// # Errors
    /// If it is not `[B,S,..]` (`seq_axis` 1) or `[B,H,S,..]` (2) of this prompt.
    fn attended_elements(
        &self,
        tensors: &Tensors,
        name: &str,
        seq_axis: usize,
    ) -> Result<impl Fn(usize) -> bool, GoldenError> {
        let (rows, tokens) = (self.rows, self.tokens);
        let found = tensors.get(name)?;
        let shape = &found.shape;
        if shape.first() != Some(&rows) || shape.get(seq_axis) != Some(&tokens) {
            let heads = if seq_axis == 2 { "H," } else { "" };
            let expected =
                format!("[{rows},{heads}{tokens},..], of the samples and tokens of input_ids");
            return Err(tensors.misshapen(name, &expected, found));
        }
        let row: usize = shape[1..].iter().product();
        let inner: usize = shape[seq_axis + 1..].iter().product();
        Ok(move |i: usize| self.attended[i / row * tokens + i / inner % tokens])
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt {
            input_ids: &self.input_ids,
            rows: Rows::Batch(self.rows),
            attention_mask: Some(&self.attended),
            mm_token_type_ids: self.types.as_deref(),
            image_grids: &self.image_grids,
            video_grids: &self.video_grids,
            seconds_per_grid: self.seconds_per_grid.as_deref(),
        }
    }
}

/// A file of tensors, all values exact in f64.
struct Tensors {
    file: String,
    entries: BTreeMap<String, Values>,
}

struct Values {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Values {
    fn list(values: Vec<f64>) -> Self {
        Self {
            shape: vec![values.len()],
            values,
        }
    }
}

impl Tensors {
    fn read(path: &Path) -> Result<Self, GoldenError> {
        let broken = |error: safetensors::SafeTensorError| GoldenError::Container {
            detail: format!("{}: {error}", path.display()),
        };
        let bytes = std::fs::read(path)?;
        let file = SafeTensors::deserialize(&bytes).map_err(broken)?;
        let mut entries = BTreeMap::new();
        for (name, view) in file.tensors() {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::I64 => read_values(data, |x| i64::from_le_bytes(x) as f64),
                Dtype::I32 => read_values(data, |x| f64::from(i32::from_le_bytes(x))),
                Dtype::F64 => read_values(data, f64::from_le_bytes),
                Dtype::F32 => read_values(data, |x| f64::from(f32::from_le_bytes(x))),
                Dtype::BF16 => read_values(data, |x| half::bf16::from_le_bytes(x).to_f64()),
                Dtype::F16 => read_values(data, |x| half::f16::from_le_bytes(x).to_f64()),
                other => {
                    return Err(GoldenError::TensorType {
                        name,
                        expected: "I64, I32, F64, F32, BF16 or F16",
                        found: format!("{other:?}"),
                    });
                }
            };
            let shape = view.shape().to_vec();
            entries.insert(name, Values { shape, values });
        }
        let name = path.file_name().unwrap_or_default();
        Ok(Self {
            file: name.to_string_lossy().into_owned(),
            entries,
        })
    }

    fn get(&self, name: &str) -> Result<&Values, GoldenError> {
        self.entries
            .get(name)
            .ok_or_else(|| GoldenError::MissingTensor {
                name: name.to_owned(),
                needed_by: "the comparison of a model folder".to_owned(),
                found: self.entries.keys().cloned().collect::<Vec<_>>().join(", "),
            })
    }

    fn misshapen(&self, name: &str, expected: &str, found: &Values) -> GoldenError {
        GoldenError::TensorShape {
            name: format!("{name} of {}", self.file),
            expected: expected.to_owned(),
            found: found.shape.clone(),
        }
    }

    fn integers(&self, name: &str) -> Result<Vec<i64>, GoldenError> {
        Ok(self
            .get(name)?
            .values
            .iter()
            .map(|value| *value as i64)
            .collect())
    }

    fn with_prefix<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a String, &'a Values)> {
        self.entries
            .iter()
            .filter(move |(name, _)| name.starts_with(prefix))
    }

    fn tensor<const D: usize>(
        &self,
        name: &str,
        device: &Device,
    ) -> Result<Tensor<D>, GoldenError> {
        let found = self.get(name)?;
        if found.shape.len() != D {
            return Err(self.misshapen(name, &format!("{D} dimensions"), found));
        }
        let values: Vec<f32> = found.values.iter().map(|value| *value as f32).collect();
        Ok(Tensor::from_data(
            TensorData::new(values, found.shape.clone()),
            device,
        ))
    }
}

fn read_values<const N: usize>(data: &[u8], read: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (values, _) = data.as_chunks::<N>();
    values.iter().map(|bytes| read(*bytes)).collect()
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
                let at = ((row * seq + token) * heads + head) * head_dim;
                out.extend_from_slice(&flat[at..at + head_dim]);
            }
        }
    }
    out
}

/// cos or sin per channel, as transformers keeps them, from cos or sin per lane.
fn per_channel(spec: &RotarySpec, lanes: &[f32]) -> Vec<f64> {
    let pairs = spec.rotary_dim() / 2;
    let per_token = spec.geometry().lanes();
    let lane = |channel: usize| match spec.pairing() {
        _ if per_token != pairs => channel,
        Pairing::Adjacent => channel / 2,
        _ => channel % pairs,
    };
    let token = |lanes: &[f32]| -> Vec<f64> {
        (0..2 * pairs)
            .map(|channel| f64::from(lanes[lane(channel)]))
            .collect()
    };
    lanes.chunks_exact(per_token).flat_map(token).collect()
}

/// Compares the elements that `keep` names by their flat index.
fn compare_where(
    name: &str,
    (dtype, engine): (&'static str, &str),
    found: &[f64],
    expected: &Values,
    tolerance: f64,
    keep: impl Fn(usize) -> bool,
) -> Row {
    let kept: Vec<usize> = (0..expected.values.len()).filter(|i| keep(*i)).collect();
    // A length that differs leaves an element without a partner, which fails.
    let pick = |values: &[f64]| -> Vec<f64> {
        if values.len() == expected.values.len() {
            kept.iter().map(|i| values[*i]).collect()
        } else {
            Vec::new()
        }
    };
    Row::compare(
        name,
        dtype,
        engine,
        &pick(found),
        &pick(&expected.values),
        |_| tolerance,
        |i| index(kept.get(i).copied().unwrap_or(0), &expected.shape),
    )
}

/// Compares a gradient by the norm of the difference.
fn gradient_row(name: &str, engine: &str, found: &[f64], expected: &Values, slack: f64) -> Row {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let largest = expected
        .values
        .iter()
        .fold(0.0, |most: f64, x| most.max(x.abs()));
    if largest <= ZERO_GRADIENT {
        return compare_where(
            name,
            ("f32", engine),
            found,
            expected,
            slack * ZERO_GRADIENT,
            |_| true,
        );
    }
    let allowed = slack * GRADIENT * norm(&mut expected.values.iter().copied());
    let mut row = compare_where(name, ("f32", engine), found, expected, allowed, |_| true);
    if row.pass {
        let difference = norm(&mut found.iter().zip(&expected.values).map(|(a, b)| a - b));
        row.ratio = difference / allowed;
        row.pass = row.ratio <= 1.0;
        row.worst = (!row.pass).then(|| Worst {
            at: "the norm of the difference".to_owned(),
            found: difference,
            expected: 0.0,
            tolerance: allowed,
        });
    }
    row
}

fn index(mut flat: usize, shape: &[usize]) -> String {
    let mut parts: Vec<usize> = Vec::new();
    for size in shape.iter().rev() {
        parts.push(flat % (*size).max(1));
        flat /= (*size).max(1);
    }
    parts.reverse();
    format!("{parts:?}")
}
