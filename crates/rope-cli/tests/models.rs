//! The models against Hugging Face transformers, generation against the whole forward, packing,
//! context parallelism, and every kind of wrong checkpoint, prompt or labels.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::program::{self, mrope, objects, says};
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use plain_files::FileError;
use rope_burn::Rotary;
use rope_check::assert_is;
use rope_core::position_ids::{PositionIds, PositionRules, Prompt, Rows, TokenIds, zigzag};
use rope_core::{AxisLayout, Layout, Positions, RotarySpec};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use vlm_models::{Batch, Inputs, Vlm, VlmConfig, VlmError};

const FOLDERS: [&str; 8] = [
    "qwen2_vl_tiny",
    "qwen2_5_vl_tiny",
    "qwen3_vl_tiny",
    "qwen3_vl_moe_tiny",
    "qwen3_5_moe_tiny",
    "glm4v_tiny",
    "glm4v_moe_tiny",
    "qwen3_5_tiny",
];
const OF_TEXT: [&str; 5] = [
    "qwen2_tiny",
    "qwen3_tiny",
    "qwen3_moe_tiny",
    "llama_tiny",
    "mistral_tiny",
];
const VOCABULARY: i64 = 300;
const IMAGE: i64 = 290;
const VIDEO: i64 = 291;
/// Two ways of one computation in f32, on values of order 1.
const SAME: f32 = 2e-5;

fn fixtures() -> PathBuf {
    rope_check::fixtures().expect("the test runs in the workspace")
}

fn folder(name: &str) -> PathBuf {
    fixtures().join("models").join(name)
}

fn text(output: &Output) -> String {
    program::text(&output.stdout)
}

fn rows(arguments: &[&str]) -> Vec<Value> {
    objects(&mrope(&[&["verify", "--json"], arguments].concat()).stdout)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("path is text")
}

/// A copy of a model folder, to be altered.
fn copy(name: &str, label: &str) -> PathBuf {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(label);
    std::fs::create_dir_all(&to).expect("folder is made");
    for file in folder(name).read_dir().expect("folder reads") {
        let file = file.expect("entry reads");
        std::fs::copy(file.path(), to.join(file.file_name())).expect("file copies");
    }
    to
}

/// Shape and bytes by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// Rewrites a file of tensors.
fn rewrite(file: &Path, change: impl Fn(&mut Tensors)) {
    let bytes = std::fs::read(file).expect("file reads");
    let old = SafeTensors::deserialize(&bytes).expect("file parses");
    let dtypes: BTreeMap<String, _> = old
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype()))
        .collect();
    let mut tensors: Tensors = old
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (shape, data))| {
        let dtype = dtypes.get(name).copied().unwrap_or(safetensors::Dtype::F32);
        let view = TensorView::new(dtype, shape.clone(), data).expect("tensor is whole");
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, file).expect("file is written");
}

fn config(name: &str) -> VlmConfig {
    VlmConfig::from_folder(folder(name)).expect("configuration reads")
}

fn model(name: &str) -> Vlm {
    config(name)
        .load(folder(name), &Device::flex())
        .expect("weights load")
}

/// Random patches of some grids.
fn patches(model: &Vlm, grids: &[[usize; 3]], elems: usize) -> Option<Tensor<2>> {
    let count: usize = grids
        .iter()
        .map(|grid| grid.iter().product::<usize>())
        .sum();
    // The same in each run: after some pictures, a model of random weights generates a placeholder.
    let values: Vec<f32> = (0..count * elems)
        .map(|i| (i * 7919 % 997) as f32 / 997.0)
        .collect();
    let values = TensorData::new(values, [count, elems]);
    (count > 0).then(|| Tensor::from_data(values, &model.device()))
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

fn bits<const D: usize>(x: Tensor<D>) -> Vec<u32> {
    floats(x).into_iter().map(f32::to_bits).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn every_folder_passes_fused_and_composed() {
    let all: Vec<&str> = FOLDERS.into_iter().chain(OF_TEXT).collect();
    // The composed rotation is the same operations in each family.
    for (rotary, names) in [("fused", &all[..]), ("composed", &all[..3])] {
        let folders: Vec<PathBuf> = names.iter().map(|name| folder(name)).collect();
        let mut arguments = vec!["--rotary", rotary];
        arguments.extend(folders.iter().map(|folder| path(folder)));
        let rows = rows(&arguments);
        for row in &rows {
            assert_eq!(row["pass"], true, "{rotary}: {row}");
        }
        for name in names {
            let names: Vec<&str> = rows
                .iter()
                .filter(|row| row["file"].as_str().expect("a path").ends_with(name))
                .map(|row| row["tensor"].as_str().expect("a name"))
                .collect();
            for needed in [
                "position_ids",
                "rope_deltas",
                "q_post of q_pre",
                "grad_act.k_pre of grad_act.k_post",
                "q_post",
                "k_post",
                "vision.image.block.1.out",
                "vision.video.merged",
                "hidden.1.in",
                "hidden.final_norm",
                "logits",
                "loss",
                "train.loss",
            ] {
                let of_pictures = needed.starts_with("vision.") || needed == "rope_deltas";
                if of_pictures && OF_TEXT.contains(name) {
                    continue;
                }
                assert!(
                    names.contains(&needed),
                    "{name} {rotary}: {needed} of {names:?}"
                );
            }
            let bytes =
                std::fs::read(folder(name).join("model.safetensors")).expect("weights read");
            let weights = SafeTensors::deserialize(&bytes).expect("weights parse");
            let names_of_trained = weights.names().into_iter();
            let is_trained = |name: &&str| !name.ends_with(".e_score_correction_bias");
            for parameter in names_of_trained.filter(is_trained) {
                // The matrices of single experts are one parameter.
                let parameter = match parameter.split_once(".experts.") {
                    Some((network, expert)) if expert.ends_with(".down_proj.weight") => {
                        format!("{network}.experts.down_proj")
                    }
                    Some((network, expert)) if expert.ends_with("_proj.weight") => {
                        format!("{network}.experts.gate_up_proj")
                    }
                    _ => parameter.to_string(),
                };
                let gradient = format!("grad.{parameter}");
                assert!(
                    names.contains(&&gradient[..]),
                    "{name} {rotary}: {gradient}"
                );
            }
            let engine = format!("burn/{rotary}");
            let is_logits = |row: &&Value| row["tensor"] == "logits";
            assert!(
                rows.iter()
                    .filter(is_logits)
                    .all(|row| row["engine"] == engine[..])
            );
        }
    }
}

/// A family that `vlm-models` does not build: what needs no model is compared, and the rest is said to
/// be skipped.
#[test]
fn other_families_are_compared_in_positions_and_rotation() {
    let other = copy("qwen3_vl_tiny", "other_family");
    let file = other.join("config.json");
    let config = std::fs::read_to_string(&file).expect("config reads");
    let config = config.replace("\"qwen3_vl", "\"qwen4_exp");
    std::fs::write(&file, config).expect("config is written");
    let output = mrope(&["verify", path(&other)]);
    let table = text(&output);
    assert_eq!(output.status.code(), Some(0), "{table}");
    says(&table, "8 rows of 1 file: 0 out of tolerance");
    says(&table, "skipped");
    says(&table, "model type \"qwen4_exp\"");
}

#[test]
fn what_is_wrong_fails_and_is_named() {
    // 2 % of one parameter's gradient.
    let altered = copy("qwen3_vl_tiny", "altered_gradient");
    let name = "grad.model.visual.pos_embed.weight";
    rewrite(&altered.join("expected.safetensors"), |tensors| {
        let (_, data) = tensors.get_mut(name).expect("gradient is there");
        let values: Vec<u8> = data
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")) * 1.02)
            .flat_map(f32::to_le_bytes)
            .collect();
        *data = values;
    });
    let failed = |folder: &Path| -> Vec<String> {
        rows(&[path(folder)])
            .iter()
            .filter(|row| row["pass"] == false)
            .map(|row| row["tensor"].as_str().expect("a name").to_owned())
            .collect()
    };
    assert_eq!(failed(&altered), [name]);
    assert_eq!(mrope(&["verify", path(&altered)]).status.code(), Some(1));

    // Sections moved from width to time: cos, and all that follows.
    let altered = copy("qwen2_vl_tiny", "altered_sections");
    let file = altered.join("config.json");
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("config reads")).expect("JSON");
    config["text_config"]["rope_parameters"]["mrope_section"] = json!([6, 6, 4]);
    std::fs::write(&file, config.to_string()).expect("config is written");
    let failed = failed(&altered);
    for name in [
        "cos",
        "q_post of q_pre",
        "q_post",
        "hidden.0.out",
        "logits",
        "loss",
        "train.loss",
    ] {
        assert!(
            failed.iter().any(|failed| failed == name),
            "{name} of {failed:?}"
        );
    }
    assert!(
        !failed
            .iter()
            .any(|name| ["position_ids", "inputs_embeds", "q_pre"].contains(&&name[..]))
    );
}

/// A case, and a part of the reason why the default differs.
type Differing = (&'static str, &'static str);

#[test]
fn position_id_files_pass_for_their_version_and_name_where_the_default_differs() {
    let expected: [(&str, usize, &[Differing]); 4] = [
        (
            "rope_index_4.57.6.json",
            26,
            &[
                ("qwen2_vl/text_only_b2_rightpad", "padded length"),
                ("qwen2_vl/batch2_rightpad_mixed", "padded length"),
                ("qwen2_vl/batch2_one_text_only_row", "padded length"),
                ("qwen2_5_vl/video_2_5_seconds", "whole seconds"),
                ("qwen2_5_vl/batch2_leftpad_mixed", "padded length"),
                ("qwen3_vl/text_only_b2_rightpad", "padded length"),
                ("qwen3_vl/batch2_rightpad_mixed", "padded length"),
                ("qwen3_vl/batch2_one_text_only_row", "padded length"),
                ("glm4v/batch2_leftpad_mixed", "padded length"),
            ],
        ),
        (
            "rope_index_5.23.0.json",
            45,
            &[
                ("qwen2_vl/one_video_3x4x4", "time is forgotten"),
                ("qwen2_5_vl/long_video_12x4x4", "time is forgotten"),
                ("qwen2_5_vl/video_2_5_seconds", "time is forgotten"),
                ("qwen2_5_vl/batch2_leftpad_mixed", "time is forgotten"),
                ("paddleocr_vl/long_video_12x4x4", "time is forgotten"),
                ("ernie4_5_vl_moe/long_video_12x4x4", "time is forgotten"),
            ],
        ),
        (
            "rope_index_omni_5.23.0.json",
            5,
            &[("qwen2_5_omni/audio_in_video", "order of time")],
        ),
        (
            "rope_index_omni_fractional_5.23.0.json",
            9,
            &[
                ("qwen3_omni_moe/half_second", "fractional"),
                ("qwen3_omni_moe/no_exact_time", "fractional"),
                ("qwen3_omni_moe/two_videos", "fractional"),
                ("qwen3_omni_moe/image_and_audio_after", "fractional"),
                ("qwen3_omni_moe/padded_rows", "fractional"),
                ("qwen3_omni_moe/audio_in_video", "fractional"),
                (
                    "qwen3_omni_moe/audio_in_video_after_a_fraction",
                    "fractional",
                ),
                ("qwen3_omni_moe/rounded_after_an_end", "fractional"),
                ("qwen3_omni_moe/rounded_before_a_start", "fractional"),
            ],
        ),
    ];
    for (file, cases, differing) in expected {
        let file = fixtures().join(file);
        let rows = rows(&[path(&file)]);
        assert_eq!(rows.len(), cases);
        assert!(
            rows.iter()
                .all(|row| row["pass"] == true && row["max_abs"] == 0.0)
        );
        let noted: Vec<(&str, &str)> = rows
            .iter()
            .filter_map(|row| Some((row["tensor"].as_str()?, row["note"].as_str()?)))
            .collect();
        assert_eq!(noted.len(), differing.len(), "{noted:?}");
        for ((case, note), (expected, reason)) in noted.iter().zip(differing) {
            assert_eq!(case, expected);
            assert!(note.contains(reason), "{case}: {note}");
        }
        let output = text(&mrope(&["verify", path(&file)]));
        says(&output, format!("in {} of {cases}:", differing.len()));

        let mut altered: Value =
            serde_json::from_str(&std::fs::read_to_string(&file).expect("file reads"))
                .expect("JSON");
        let ids = &mut altered["cases"][1]["position_ids"][2][0];
        let last = ids.as_array().expect("ids").len() - 1;
        ids[last] = (ids[last].as_f64().expect("a number") + 1.0).into();
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("altered_ids.json");
        std::fs::write(&scratch, altered.to_string()).expect("file is written");
        let failed: Vec<Value> = self::rows(&[path(&scratch)])
            .into_iter()
            .filter(|row| row["pass"] == false)
            .collect();
        assert_eq!(failed.len(), 1, "{failed:?}");
        assert_eq!(
            failed[0]["worst"]["at"],
            format!("axis 2, row 0, token {last}")
        );
    }
}

/// Two rows with an image each, and a video in the second; padded on one side.
struct Example {
    input_ids: Vec<i64>,
    mask: Vec<bool>,
    image_grids: Vec<[usize; 3]>,
    video_grids: Vec<[usize; 3]>,
}

impl Example {
    fn new(model_type: &str, pad_left: bool) -> Self {
        let text = |count: i64, seed: i64| (0..count).map(move |i| 1 + (seed * 37 + i * 53) % 250);
        let vision = |token: i64, count: usize| {
            let placeholders = std::iter::repeat_n(token, count);
            std::iter::once(292).chain(placeholders).chain([293])
        };
        let video: Vec<i64> = if ["qwen3_vl", "glm4v", "glm4v_moe", "qwen3_5"].contains(&model_type)
        {
            (0..2)
                .flat_map(|frame| text(3, 20 + frame).chain(vision(VIDEO, 4)))
                .collect()
        } else {
            vision(VIDEO, 8).collect()
        };
        let first: Vec<i64> = text(4, 1)
            .chain(vision(IMAGE, 15))
            .chain(text(5, 2))
            .collect();
        let second: Vec<i64> = text(3, 3)
            .chain(vision(IMAGE, 4))
            .chain(video)
            .chain(text(4, 4))
            .collect();
        let len = first.len().max(second.len());
        let (mut input_ids, mut mask) = (Vec::new(), Vec::new());
        for row in [first, second] {
            let (pad, tokens) = (len - row.len(), row.len());
            let before = if pad_left { pad } else { 0 };
            input_ids.extend(std::iter::repeat_n(0, before));
            mask.extend(std::iter::repeat_n(false, before));
            input_ids.extend(row);
            mask.extend(std::iter::repeat_n(true, tokens));
            input_ids.extend(std::iter::repeat_n(0, pad - before));
            mask.extend(std::iter::repeat_n(false, pad - before));
        }
        Self {
            input_ids,
            mask,
            image_grids: vec![[1, 6, 10], [1, 4, 4]],
            video_grids: vec![[2, 4, 4]],
        }
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt {
            input_ids: &self.input_ids,
            rows: Rows::Batch(2),
            attention_mask: Some(&self.mask),
            image_grids: &self.image_grids,
            video_grids: &self.video_grids,
            ..Prompt::default()
        }
    }

    /// The tokens of each row, padding left out, each with more after it.
    fn extended(&self, more: &[Vec<i64>]) -> Vec<Vec<i64>> {
        let seq = self.input_ids.len() / 2;
        let row = |row: usize| {
            let range = row * seq..(row + 1) * seq;
            let tokens = range
                .filter(|token| self.mask[*token])
                .map(|token| self.input_ids[token]);
            tokens.chain(more[row].iter().copied()).collect()
        };
        vec![row(0), row(1)]
    }
}

/// Each token of a greedy continuation, and the logits it was chosen from, as the whole forward
/// gives them: of one row at a time, without padding and without a cache.
#[test]
fn generation_with_a_cache_equals_the_whole_forward() {
    const NEW: usize = 6;
    for (name, pad_left) in [
        (FOLDERS[0], false),
        (FOLDERS[1], true),
        (FOLDERS[2], true),
        (FOLDERS[2], false),
        (FOLDERS[3], true),
        (FOLDERS[4], true),
        (FOLDERS[4], false),
    ] {
        let model = model(name);
        let vision = config(name).vision.expect("a tower");
        let example = Example::new(config(name).model_type(), pad_left);
        let images = patches(&model, &example.image_grids, vision.patch_elems());
        let videos = patches(&model, &example.video_grids, vision.patch_elems());
        let batch = model
            .batch(&Inputs {
                prompt: example.prompt(),
                image_patches: images.clone(),
                video_patches: videos.clone(),
                shown: None,
            })
            .expect("prompt fits");
        let generated = model.generate(&batch, NEW, &[]).expect("generates");

        // The same tokens again, for the logits of each.
        let (first, mut cache) = model.prefill(&batch).expect("prompt reads");
        let mut stepped = vec![first];
        for step in 0..NEW - 1 {
            let tokens: Vec<i64> = generated.iter().map(|row| row[step]).collect();
            stepped.push(model.decode(&tokens, &mut cache).expect("token reads"));
        }

        let row_patches = [(0..60, 0..0), (60..76, 0..32)];
        for (row, tokens) in example.extended(&generated).into_iter().enumerate() {
            let (image_range, video_range) = row_patches[row].clone();
            let part = |patches: &Option<Tensor<2>>, range: std::ops::Range<usize>| {
                let patches = patches.clone().expect("patches are there");
                (!range.is_empty()).then(|| patches.narrow(0, range.start, range.len()))
            };
            let whole = model
                .batch(&Inputs {
                    prompt: Prompt {
                        input_ids: &tokens,
                        image_grids: &example.image_grids[row..=row],
                        video_grids: &example.video_grids[..row],
                        ..Prompt::default()
                    },
                    image_patches: part(&images, image_range),
                    video_patches: part(&videos, video_range),
                    shown: None,
                })
                .expect("row fits");
            let logits = model.forward(&whole).expect("runs").squeeze_dim::<2>(0);
            let prompt_len = tokens.len() - NEW;
            for (step, stepped) in stepped.iter().enumerate() {
                let at_once = logits.clone().narrow(0, prompt_len + step - 1, 1);
                let chosen = at_once.clone().argmax(1).into_scalar::<i64>();
                assert_eq!(
                    chosen, generated[row][step],
                    "{name} row {row} token {step}"
                );
                let difference = largest_difference(
                    &floats(at_once),
                    &floats(stepped.clone().narrow(0, row, 1)),
                );
                assert!(
                    difference < SAME,
                    "{name} row {row} token {step}: {difference}"
                );
            }
        }
        let stop = generated[0][1];
        let stopped = model.generate(&batch, NEW, &[stop]).expect("generates");
        let end = generated[0]
            .iter()
            .position(|token| *token == stop)
            .expect("it occurs");
        assert_eq!(stopped[0], generated[0][..=end]);
    }
}

#[test]
fn a_packed_prompt_gives_the_logits_of_its_parts() {
    for name in ["qwen2_vl_tiny", "qwen3_5_tiny"] {
        packed_gives_the_logits_of_its_parts(name);
    }
}

fn packed_gives_the_logits_of_its_parts(name: &str) {
    let model = model(name);
    let elems = config(name).vision.expect("a tower").patch_elems();
    let example = Example::new(config(name).model_type(), false);
    let parts = example.extended(&[Vec::new(), Vec::new()]);
    let images = patches(&model, &example.image_grids, elems).expect("patches");
    let videos = patches(&model, &example.video_grids, elems);
    let packed = model
        .batch(&Inputs {
            prompt: Prompt {
                input_ids: &parts.concat(),
                rows: Rows::Packed(&[0, parts[0].len(), parts[0].len() + parts[1].len()]),
                image_grids: &example.image_grids,
                video_grids: &example.video_grids,
                ..Prompt::default()
            },
            image_patches: Some(images.clone()),
            video_patches: videos.clone(),
            shown: None,
        })
        .expect("prompt fits");
    let whole = floats(model.forward(&packed).expect("runs"));
    let mut at = 0;
    for (row, tokens) in parts.iter().enumerate() {
        let first_patch = [0, 60][row];
        let batch = model
            .batch(&Inputs {
                prompt: Prompt {
                    input_ids: tokens,
                    image_grids: &example.image_grids[row..=row],
                    video_grids: &example.video_grids[..row],
                    ..Prompt::default()
                },
                image_patches: Some(images.clone().narrow(0, first_patch, [60, 16][row])),
                video_patches: videos.clone().filter(|_| row == 1),
                shown: None,
            })
            .expect("part fits");
        let alone = floats(model.forward(&batch).expect("runs"));
        let difference = largest_difference(&alone, &whole[at..at + alone.len()]);
        assert!(difference < SAME, "part {row}: {difference}");
        at += alone.len();
    }
    let error = model
        .prefill(&packed)
        .expect_err("packed sequences are not continued");
    assert_is!(error => VlmError::NotContinuable { .. });
}

/// Position ids of three packed prompts with images, lengths divisible by 16.
fn packed_positions() -> (PositionIds, Vec<usize>) {
    let rules = PositionRules::new("qwen2_vl", TokenIds::new(IMAGE, VIDEO)).expect("family");
    let mut input_ids = Vec::new();
    let mut cu_seqlens = vec![0];
    for (before, after) in [(5, 3), (10, 14), (1, 7)] {
        input_ids.extend(std::iter::repeat_n(1, before));
        input_ids.extend(std::iter::repeat_n(IMAGE, 24));
        input_ids.extend(std::iter::repeat_n(1, after));
        cu_seqlens.push(input_ids.len());
    }
    let ids = rules
        .position_ids(&Prompt {
            input_ids: &input_ids,
            rows: Rows::Packed(&cu_seqlens),
            image_grids: &[[1, 8, 12]; 3],
            ..Prompt::default()
        })
        .expect("prompt fits");
    (ids, cu_seqlens)
}

fn spec() -> RotarySpec {
    RotarySpec::builder(32)
        .axis_layout(AxisLayout::Contiguous(vec![4, 6, 6]))
        .theta(1e6)
        .build()
        .expect("specification holds")
}

/// q and k rotated, and their gradients for fixed upstream ones, as bits: `[tokens, heads,
/// head_dim]` each.
fn rotated(rotary: &Rotary, positions: &Positions, inputs: &[Tensor<3>; 4]) -> [Vec<u32>; 4] {
    let [q, k, gq, gk] = inputs.clone();
    let (q, k) = (q.require_grad(), k.require_grad());
    let angles = rotary.angles(positions, &q.device());
    let (q_out, k_out) = rotary.forward(q.clone(), k.clone(), &angles);
    let loss = (q_out.clone() * gq).sum() + (k_out.clone() * gk).sum();
    let gradients = loss.backward();
    let gradient = |x: &Tensor<3>| x.grad(&gradients).expect("gradient is there");
    [
        bits(q_out),
        bits(k_out),
        bits(gradient(&q)),
        bits(gradient(&k)),
    ]
}

fn inputs(tokens: usize) -> [Tensor<3>; 4] {
    let device = Device::flex().autodiff();
    [4, 2, 4, 2].map(|heads| Tensor::random([tokens, heads, 32], Distribution::Default, &device))
}

#[test]
fn rotating_packed_sequences_equals_rotating_each_bit_for_bit() {
    let (ids, cu_seqlens) = packed_positions();
    let rotary = Rotary::new(spec(), Layout::Tnd);
    let inputs = inputs(ids.tokens());
    let whole = rotated(&rotary, &ids.positions().expect("in range"), &inputs);
    let rules = PositionRules::new("qwen2_vl", TokenIds::new(IMAGE, VIDEO)).expect("family");
    let mut parts: [Vec<u32>; 4] = Default::default();
    for (range, (before, after)) in cu_seqlens.windows(2).zip([(5, 3), (10, 14), (1, 7)]) {
        // From its own prompt, not from the packed ids.
        let input_ids = [vec![1; before], vec![IMAGE; 24], vec![1; after]].concat();
        let own = rules
            .position_ids(&Prompt {
                input_ids: &input_ids,
                image_grids: &[[1, 8, 12]],
                ..Prompt::default()
            })
            .expect("prompt fits");
        let part = inputs
            .clone()
            .map(|x| x.narrow(0, range[0], range[1] - range[0]).detach());
        let rotated = rotated(&rotary, &own.positions().expect("in range"), &part);
        for (parts, part) in parts.iter_mut().zip(rotated) {
            parts.extend(part);
        }
    }
    assert_eq!(whole, parts);
}

#[test]
fn a_zigzag_split_gathered_equals_the_whole_bit_for_bit() {
    let (ids, cu_seqlens) = packed_positions();
    let rotary = Rotary::new(spec(), Layout::Tnd);
    let inputs = inputs(ids.tokens());
    let whole = rotated(&rotary, &ids.positions().expect("in range"), &inputs);
    for ranks in [2, 4, 8] {
        let mut gathered = whole.clone().map(|values| vec![0; values.len()]);
        for rank in 0..ranks {
            let held = zigzag(&cu_seqlens, ranks, rank).expect("lengths divide");
            assert_eq!(held.len(), ids.tokens() / ranks);
            let device = Device::flex().autodiff();
            let indices: Vec<i64> = held.iter().map(|token| *token as i64).collect();
            let indices = Tensor::<1, burn::tensor::Int>::from_data(&indices[..], &device);
            let part = inputs
                .clone()
                .map(|x| x.select(0, indices.clone()).detach());
            let rotated = rotated(&rotary, &ids.select(&held).expect("tokens exist"), &part);
            for (gathered, part) in gathered.iter_mut().zip(rotated) {
                let width = part.len() / held.len();
                for (values, token) in part.chunks_exact(width).zip(&held) {
                    gathered[token * width..(token + 1) * width].copy_from_slice(values);
                }
            }
        }
        assert_eq!(whole, gathered, "{ranks} ranks");
    }
}

/// As the image processor of transformers cuts them, of a picture whose values are their indices.
#[test]
fn patches_are_cut_as_the_image_processor_cuts_them() {
    let bytes = std::fs::read(fixtures().join("models/patches.safetensors")).expect("reads");
    let file = SafeTensors::deserialize(&bytes).expect("parses");
    let expected: Vec<f32> = file
        .tensor("pixel_values")
        .expect("is there")
        .data()
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect();
    let picture = Tensor::<1, burn::tensor::Int>::arange(0..3 * 56 * 84, &Device::flex());
    let picture = picture.float().reshape([1, 3, 56, 84]);
    let vision = config("qwen2_vl_tiny").vision.expect("a tower");
    let (patches, grid) = vision.patches(picture.clone()).expect("divides");
    assert_eq!(grid, [1, 4, 6]);
    assert_eq!(floats(patches.clone()), expected);

    // Of three frames the last fills the second temporal patch.
    let frames = picture.clone().repeat_dim(0, 3);
    let (longer, grid) = vision.patches(frames).expect("divides");
    assert_eq!(grid, [2, 4, 6]);
    assert_eq!(floats(longer.narrow(0, 24, 24)), expected);
    let error = vision
        .patches(picture.narrow(2, 0, 42))
        .expect_err("does not divide");
    assert_is!(error => VlmError::Frames { side: 28, .. });
}

#[test]
fn checkpoints_are_written_as_they_were_read() {
    // Experts that a file has one by one are saved together.
    for name in FOLDERS
        .into_iter()
        .filter(|name| !["qwen3_5_moe_tiny", "glm4v_moe_tiny"].contains(name))
    {
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("saved_{name}"));
        std::fs::create_dir_all(&to).expect("folder is made");
        let model = model(name);
        model.save(&to).expect("saves");
        model.save(&to).expect("replaces");
        let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).expect("reads");
        let (old, new) = (read(&folder(name)), read(&to));
        let old = SafeTensors::deserialize(&old).expect("parses");
        let new = SafeTensors::deserialize(&new).expect("parses");
        assert_eq!(old.len(), new.len());
        for (tensor, view) in old.tensors() {
            let found = new.tensor(&tensor).expect("same names");
            assert_eq!(
                (view.shape(), view.data()),
                (found.shape(), found.data()),
                "{tensor}"
            );
        }
    }
}

#[test]
fn shards_and_either_prefix_are_read() {
    let split = copy("qwen2_vl_tiny", "sharded");
    let whole = split.join("model.safetensors");
    let names: Vec<String> = {
        let bytes = std::fs::read(&whole).expect("reads");
        let tensors = SafeTensors::deserialize(&bytes).expect("parses");
        tensors
            .names()
            .iter()
            .map(|name| name.to_string())
            .collect()
    };
    // As transformers 5 names modules, in two files.
    let renamed = |name: &str| match name.split_once('.') {
        Some(("visual", rest)) => format!("model.visual.{rest}"),
        Some(("model", rest)) => format!("model.language_model.{rest}"),
        _ => name.to_owned(),
    };
    let shard = |name: &str| ["a.safetensors", "b.safetensors"][name.len() % 2];
    for file in ["a.safetensors", "b.safetensors"] {
        std::fs::copy(&whole, split.join(file)).expect("copies");
        rewrite(&split.join(file), |tensors| {
            tensors.retain(|name, _| shard(name) == file);
            *tensors = std::mem::take(tensors)
                .into_iter()
                .map(|(name, tensor)| (renamed(&name), tensor))
                .collect();
        });
    }
    let map: BTreeMap<String, &str> = names
        .iter()
        .map(|name| (renamed(name), shard(name)))
        .collect();
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    std::fs::write(split.join("model.safetensors.index.json"), index).expect("index is written");
    std::fs::remove_file(&whole).expect("the single file goes");
    let found = config("qwen2_vl_tiny")
        .load(&split, &Device::flex())
        .expect("shards load");
    let expected = model("qwen2_vl_tiny").checkpoint_tensors().expect("reads");
    assert_eq!(found.checkpoint_tensors().expect("reads"), expected);
}

#[test]
fn wrong_checkpoints_have_their_own_errors() {
    let load = |label: &str, change: &dyn Fn(&mut Tensors)| {
        let altered = copy("qwen3_vl_tiny", label);
        rewrite(&altered.join("model.safetensors"), change);
        config("qwen3_vl_tiny")
            .load(&altered, &Device::flex())
            .map(|_| ())
            .expect_err("is refused")
    };
    let missing = "model.visual.merger.norm.weight";
    let error = load("missing", &|tensors| {
        tensors.remove(missing);
    });
    assert_is!(&error => VlmError::MissingTensors { names } if names[..] == [missing]);
    let error = load("unused", &|tensors| {
        let norm = tensors[missing].clone();
        tensors.insert("model.visual.blocks.7.norm1.weight".to_owned(), norm);
    });
    assert_is!(
        &error => VlmError::UnusedTensors { names }
            if names[..] == ["model.visual.blocks.7.norm1.weight"]
    );
    let wide = "model.language_model.layers.1.mlp.up_proj.weight";
    let error = load("misshapen", &|tensors| {
        let (shape, data) = tensors.get_mut(wide).expect("is there");
        *shape = vec![48, 64];
        data.truncate(48 * 64 * 4);
    });
    assert_is!(
        &error => VlmError::TensorShape { name, expected, found }
            if name == wide && expected[..] == [96, 64] && found[..] == [48, 64]
    );
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let error = config("qwen3_vl_tiny")
        .load(empty, &Device::flex())
        .expect_err("no weights");
    assert_is!(error => VlmError::File(FileError { action: "read", .. }));
    let error = VlmConfig::from_folder(empty).expect_err("no configuration");
    assert_is!(error => VlmError::File(FileError { action: "read", .. }));
}

/// Checkpoints of Qwen3.5 have one that predicts several tokens.
#[test]
fn a_layer_that_no_module_reads_is_left_out() {
    let name = "qwen3_5_tiny";
    let with_more = copy(name, "several_tokens");
    rewrite(&with_more.join("model.safetensors"), |tensors| {
        let norm = tensors["model.language_model.norm.weight"].clone();
        tensors.insert("mtp.norm.weight".to_owned(), norm);
    });
    let found = config(name)
        .load(&with_more, &Device::flex())
        .expect("loads");
    let expected = model(name).checkpoint_tensors().expect("reads");
    assert_eq!(found.checkpoint_tensors().expect("reads"), expected);
}

#[test]
fn wrong_configurations_have_their_own_errors() {
    let read = |name: &str| -> Value {
        let text = std::fs::read_to_string(folder(name).join("config.json")).expect("reads");
        serde_json::from_str(&text).expect("JSON")
    };
    let refuse = |name: &str, pointer: &str, value: Value| {
        let mut config = read(name);
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        let parent = config
            .pointer_mut(parent)
            .expect("is there")
            .as_object_mut()
            .expect("object");
        match value {
            Value::Null => parent.remove(key),
            value => parent.insert(key.to_owned(), value),
        };
        VlmConfig::from_hf_config(&config.to_string()).expect_err(pointer)
    };
    let two = |pointer, value| refuse("qwen2_vl_tiny", pointer, value);
    let two_five = |pointer, value| refuse("qwen2_5_vl_tiny", pointer, value);
    let three = |pointer, value| refuse("qwen3_vl_tiny", pointer, value);
    let states = |pointer, value| refuse("qwen3_5_tiny", pointer, value);

    let error = two("/model_type", json!("glm46v"));
    assert_is!(&error => VlmError::UnknownFamily(unknown) if unknown.found == "glm46v");
    assert!(error.to_string().contains("qwen2_5_vl"));
    for (error, what) in [
        (two("/model_type", Value::Null), "model_type"),
        (two("/text_config/vocab_size", json!("x")), "vocab_size"),
        (two("/vision_config", Value::Null), "invalid type"),
        (three("/vision_config/hidden_act", json!("relu")), "relu"),
        (
            states("/text_config/layer_types", json!(["x"])),
            "layer_types",
        ),
    ] {
        assert!(matches!(error, VlmError::Config { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    for (error, what) in [
        (
            two("/text_config/hidden_act", json!("gelu")),
            "text hidden_act",
        ),
        (
            refuse("mistral_tiny", "/sliding_window", json!(0)),
            "sliding_window",
        ),
        (
            two("/text_config/attention_dropout", json!(0.5)),
            "attention_dropout",
        ),
        (
            three("/vision_config/num_position_embeddings", json!(35)),
            "num_position_embeddings",
        ),
        (
            two("/vision_config/depth", json!(1_u64 << 62)),
            "vision depth",
        ),
        (two("/text_config/rms_norm_eps", json!(0)), "rms_norm_eps"),
        (
            three("/text_config/rms_norm_eps", json!(-1e-6)),
            "rms_norm_eps",
        ),
        (
            two("/text_config/vocab_size", json!(u64::MAX)),
            "vocab_size",
        ),
        (
            three("/vision_config/patch_size", json!(1_u64 << 32)),
            "patch_size",
        ),
    ] {
        assert_is!(&error => VlmError::Unsupported { key, .. } if *key == what);
    }
    for (error, what) in [
        (
            two("/text_config/num_key_value_heads", json!(3)),
            "num_attention_heads",
        ),
        (
            two("/vision_config/hidden_size", json!(64)),
            "out_hidden_size",
        ),
        (
            three("/vision_config/deepstack_visual_indexes", json!([2])),
            "deepstack_visual_indexes",
        ),
        (
            two_five("/vision_config/fullatt_block_indexes", json!([9])),
            "fullatt_block_indexes",
        ),
        // The classes' defaults are those of large models.
        (
            two_five("/vision_config/fullatt_block_indexes", Value::Null),
            "fullatt_block_indexes",
        ),
        (
            three("/vision_config/out_hidden_size", Value::Null),
            "out_hidden_size",
        ),
        (
            two_five("/vision_config/window_size", json!(14)),
            "window_size",
        ),
        (
            states("/text_config/linear_num_value_heads", json!(5)),
            "linear_num_value_heads",
        ),
    ] {
        assert_is!(&error => VlmError::Sizes { left, .. } if *left == what);
    }
    let error = two(
        "/text_config/rope_parameters/mrope_section",
        json!([4, 6, 5]),
    );
    assert!(matches!(error, VlmError::Rope(_)), "{error}");
}

/// Each value of each configuration in turn becomes each of these: an error or a configuration,
/// never a panic.
#[test]
fn no_value_of_a_configuration_ends_the_program() {
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(1_u64 << 32),
        json!(1_u64 << 62),
        json!(u64::MAX),
        json!(1e-320),
        json!(1e300),
        json!("x"),
        json!([]),
        json!([0, u64::MAX]),
        json!({}),
    ];
    let (mut read, mut refused) = (0, 0);
    for name in FOLDERS {
        let text = std::fs::read_to_string(folder(name).join("config.json")).expect("reads");
        let config: Value = serde_json::from_str(&text).expect("JSON");
        let mut paths = Vec::new();
        pointers(&config, String::new(), &mut paths);
        for path in paths {
            for value in &values {
                let mut config = config.clone();
                *config.pointer_mut(&path).expect("one of its own") = value.clone();
                match VlmConfig::from_hf_config(&config.to_string()) {
                    Ok(_) => read += 1,
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(
        read > 500 && refused > 500,
        "{read} read, {refused} refused"
    );
}

/// The JSON pointers of all values in a value.
fn pointers(value: &Value, at: String, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(of) => of.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(of) => (0..).map(|i: usize| i.to_string()).zip(of).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        pointers(child, format!("{at}/{key}"), found);
    }
    found.push(at);
}

/// Transformers 4: the decoder's keys at the top, other names in the tower.
#[test]
fn configurations_of_transformers_4_are_read() {
    let config = VlmConfig::from_hf_config(
        &json!({
            "model_type": "qwen2_5_vl", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": true,
            "use_sliding_window": false, "image_token_id": 151655, "video_token_id": 151656,
            "vision_start_token_id": 151652,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2, "temporal_patch_size": 2
            }
        })
        .to_string(),
    )
    .expect("the published configuration reads");
    assert_eq!(config.model_type(), "qwen2_5_vl");
    let vision = config.vision.expect("a tower");
    assert_eq!(vision.windows.as_ref().map(|windows| windows.side), Some(4));
    assert_eq!(config.text.rotation.axis_layout().sections(), [16, 24, 24]);
    assert_eq!(vision.patch_elems(), 1176);
}

/// As transformers 4.45 to 4.49 saved fine-tunes: towers without the defaults of their class.
#[test]
fn towers_without_the_defaults_of_their_class_are_read() {
    let read = |model_type: &str, width: usize, heads: usize, vision: Value| {
        let config = json!({
            "model_type": model_type, "hidden_size": width, "num_attention_heads": heads,
            "num_key_value_heads": 2, "num_hidden_layers": 28, "intermediate_size": 8960,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 152064,
            "max_position_embeddings": 32768, "image_token_id": 151655, "video_token_id": 151656,
            "vision_start_token_id": 151652, "rope_theta": 1000000.0,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default",
                "type": "default"},
            "use_sliding_window": false, "tie_word_embeddings": true, "vision_config": vision
        });
        VlmConfig::from_hf_config(&config.to_string())
    };
    let two = json!({"hidden_size": 1536, "in_chans": 3, "model_type": "qwen2_vl",
        "spatial_patch_size": 14});
    let two_five = json!({"hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl",
        "spatial_patch_size": 14, "tokens_per_second": 2});
    let two = read("qwen2_vl", 1536, 12, two)
        .expect("reads")
        .vision
        .expect("a tower");
    let two_five = read("qwen2_5_vl", 3584, 28, two_five)
        .expect("reads")
        .vision
        .expect("a tower");
    assert_eq!((two.intermediate_size, two.out_hidden_size), (5120, 1536));
    let sizes = (two_five.intermediate_size, two_five.out_hidden_size);
    assert_eq!(sizes, (3420, 3584));
    let windows = two_five.windows.as_ref().expect("has windows");
    assert_eq!(
        (windows.side, &windows.full_attention_blocks[..]),
        (4, &[7, 15, 23, 31][..])
    );
    assert!(two.windows.is_none());
    for tower in [two, two_five] {
        assert_eq!(
            (tower.depth, tower.hidden_size, tower.heads),
            (32, 1280, 16)
        );
        assert_eq!((tower.patch, tower.spatial_merge), ([3, 2, 14, 14], 2));
        assert_eq!(tower.rotation.head_dim(), 80);
    }
}

#[test]
fn wrong_prompts_and_labels_have_their_own_errors() {
    let model = model("qwen2_vl_tiny");
    let elems = config("qwen2_vl_tiny")
        .vision
        .expect("a tower")
        .patch_elems();
    let image =
        |patches: usize, elems: usize| Some(Tensor::<2>::zeros([patches, elems], &model.device()));
    let tokens = [5, IMAGE, IMAGE, 6];
    let grids = [[1, 2, 4]];
    let prompt = Prompt {
        input_ids: &tokens,
        image_grids: &grids,
        ..Prompt::default()
    };
    let batch = |prompt: Prompt, image_patches: Option<Tensor<2>>| -> Result<Batch, VlmError> {
        model.batch(&Inputs {
            prompt,
            image_patches,
            video_patches: None,
            shown: None,
        })
    };
    for patches in [None, image(7, elems), image(8, elems - 1)] {
        let error = batch(prompt, patches).expect_err("patches do not fit");
        assert_is!(error => VlmError::Patches { kind: "image", .. });
    }
    let error = model
        .batch(&Inputs {
            prompt,
            image_patches: image(8, elems),
            video_patches: image(8, elems),
            shown: None,
        })
        .expect_err("no video");
    assert_is!(error => VlmError::Patches { kind: "video", .. });
    let error = batch(Prompt::default(), None).expect_err("no tokens");
    assert!(matches!(error, VlmError::NoTokens), "{error}");
    let unknown = Prompt {
        input_ids: &[5, VOCABULARY],
        ..Prompt::default()
    };
    let error = batch(unknown, None).expect_err("beyond the vocabulary");
    assert_is!(error => VlmError::Token { token: 1, found: 300, .. });
    // The types call one text token part of the image, whose grid then fits.
    let mistyped = Prompt {
        input_ids: &[5, IMAGE, 7, 6],
        mm_token_type_ids: Some(&[0, 1, 1, 0]),
        image_grids: &grids,
        ..Prompt::default()
    };
    let error = batch(mistyped, image(8, elems)).expect_err("a placeholder short");
    assert_is!(error => VlmError::Placeholders { expected: 2, found: 1, .. });
    let error = batch(
        Prompt {
            image_grids: &[],
            ..prompt
        },
        None,
    )
    .expect_err("no grid");
    assert!(matches!(error, VlmError::Rope(_)), "{error}");

    let whole = batch(prompt, image(8, elems)).expect("fits");
    let loss = |labels: &[i64]| model.loss(&whole, labels).map(|_| ());
    assert!(loss(&[-100, -100, -100, 6]).is_ok());
    let error = loss(&[5, 6]).expect_err("too few");
    assert_is!(error => VlmError::LabelCount { expected: 4, found: 2 });
    let error = loss(&[5, -100, -100, -100]).expect_err("the first token follows nothing");
    assert!(matches!(error, VlmError::NoTargets), "{error}");
    let error = loss(&[-100, -100, 300, -100]).expect_err("beyond the vocabulary");
    assert_is!(error => VlmError::Token { token: 2, found: 300, .. });

    let padding = Prompt {
        input_ids: &[0, 0],
        attention_mask: Some(&[false, false]),
        ..Prompt::default()
    };
    let padding = batch(padding, None).expect("padding alone is a batch");
    let error = model.prefill(&padding).expect_err("nothing to continue");
    assert_is!(error => VlmError::NotContinuable { .. });
    let (_, mut cache) = model.prefill(&whole).expect("reads");
    let error = model
        .decode(&[1, 2], &mut cache)
        .expect_err("two tokens for one row");
    assert_is!(error => VlmError::NotContinuable { .. });
    let error = model
        .decode(&[-1], &mut cache)
        .expect_err("beyond the vocabulary");
    assert!(matches!(error, VlmError::Token { .. }), "{error}");
}

/// A model with random weights, trained and then used without autodiff.
#[test]
fn a_fresh_model_learns() {
    let device = Device::flex().autodiff();
    device.seed(7);
    let mut model = config("qwen3_vl_tiny")
        .init(&device)
        .expect("makes a model");
    let tokens: Vec<i64> = (1..13).collect();
    let prompt = || Inputs {
        prompt: Prompt {
            input_ids: &tokens,
            ..Prompt::default()
        },
        ..Inputs::default()
    };
    let batch = model.batch(&prompt()).expect("fits");
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..30 {
        let loss;
        (model, loss) = model
            .train_step(&mut optimizer, 1e-2, &batch, &tokens)
            .expect("steps");
        losses.push(loss);
    }
    assert!(losses[29] < 0.1 * losses[0], "{losses:?}");
    let model = model.valid();
    let start = Inputs {
        prompt: Prompt {
            input_ids: &tokens[..4],
            ..Prompt::default()
        },
        ..Inputs::default()
    };
    let batch = model.batch(&start).expect("fits");
    assert_eq!(
        model.generate(&batch, 8, &[]).expect("generates"),
        [tokens[4..].to_vec()]
    );
}

#[test]
fn positions_are_printed_and_drawn() {
    let output = mrope(&["positions", "text:2", "image:4x6", "text:2", "--json"]);
    let json: Value = serde_json::from_str(&text(&output)).expect("one object");
    assert_eq!(
        json["position_ids"][0],
        json!([0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8])
    );
    assert_eq!(
        json["position_ids"][1],
        json!([0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8])
    );
    assert_eq!(
        json["position_ids"][2],
        json!([0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8])
    );
    assert_eq!(json["rope_deltas"], json!([-3]));

    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let prompt = scratch.join("prompt.json");
    let sequences =
        json!([[{"text": 2}, {"image": [1, 4, 4]}], [{"video": [2, 4, 4]}, {"text": 3}]]);
    let description = json!({ "model": "qwen3_vl", "sequences": sequences });
    std::fs::write(&prompt, description.to_string()).expect("prompt is written");
    let svg = scratch.join("positions.svg");
    let output = mrope(&["positions", path(&prompt), "--tokens", "--svg", path(&svg)]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let table = text(&output);
    says(&table, "sequence 1");
    says(&table, "2 x 2 x 2");
    let svg = std::fs::read_to_string(&svg).expect("picture is drawn");
    assert!(svg.starts_with("<svg") && svg.contains("video 1: 2 frames of 2 x 2 tokens"));

    let wrong = mrope(&["positions", "text:2", "image:5x4"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("does not divide into merged patches"));
    let departing = text(&mrope(&[
        "positions",
        "video:6x4x4",
        "text:2",
        "--version",
        "5.23",
    ]));
    says(&departing, "departs from the rule: after a video");
    let omni = |more: &[&str]| {
        let prompt = [
            "positions",
            "--model",
            "qwen3_omni_moe",
            "text:3",
            "video:3x4x4@0.7",
        ];
        text(&mrope(&[&prompt[..], more].concat()))
    };
    let fractional = omni(&["--version", "5.23.0"]);
    for expected in [
        "4..22.2",
        "23.2",
        "highest position 23.2",
        "have fractional ids",
    ] {
        assert!(fractional.contains(expected), "{expected}: {fractional}");
    }
    let ids = |json: &str| -> Vec<Value> {
        let json: Value = serde_json::from_str(json).expect("JSON");
        let axes = json["position_ids"].as_array().expect("axes");
        axes[0].as_array().expect("ids").clone()
    };
    let (fractional, whole) = (
        ids(&omni(&["--version", "5.23.0", "--json"])),
        ids(&omni(&["--json"])),
    );
    // Token 8 as transformers has it in f32, in the fixture of fractional ids.
    assert_eq!(fractional[3], 3);
    assert_eq!(fractional[8], 13.099_999_427_795_41);
    assert!(
        whole.iter().all(Value::is_i64) && whole[8] == 13,
        "{whole:?}"
    );
}
