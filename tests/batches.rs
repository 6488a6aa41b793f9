//! Batches of training data: position ids against transformers' ids of each sample alone, losses
//! and gradients against the samples computed one by one.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::folder::{self, Folder, family_folder, json, workspace};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use serde_json::Value;
use vlm_data::text::{DataIndex, FileOptions};
use vlm_data::{
    BatchSize, Cut, DataSet, Loader, LoaderOptions, MicroBatch, SampleEncoder, SampleOptions,
    SampleRows,
};
use vlm_models::rope_core::position_ids::{Compatibility, PositionRules, Prompt, Rows, TokenIds};
use vlm_models::{Inputs, Vlm, VlmConfig};

/// Of the small tokenizer.
const TOKENS: TokenIds = TokenIds {
    image: 688,
    video: 689,
    audio: None,
    vision_start: Some(685),
    audio_start: None,
    video_start: None,
    video_end: None,
};
const GLM_TOKENS: TokenIds = TokenIds {
    image: 702,
    video: 703,
    vision_start: Some(698),
    video_start: Some(700),
    video_end: Some(701),
    ..TOKENS
};
const RECORDS: usize = 8;
/// Rows of several samples.
const CUTS: [Cut; 2] = [Cut::Packed { tokens: 400 }, Cut::Padded { tokens: 1000 }];

fn expected() -> Value {
    json("../samples/samples.json")
}

fn model_folder(family: &str, test: &str) -> Folder {
    let folder = family_folder(family, test);
    let processor = &expected()[family]["processor_config"];
    folder.write("processor_config.json", processor.to_string());
    folder
}

/// The records of the fixture in global batches of `samples`, cut.
fn load(folder: &Folder, samples: usize, cut: Cut) -> Vec<MicroBatch> {
    let mut options = SampleOptions::default();
    options.encode.max_tokens = Some(160);
    let encoder = SampleEncoder::from_folder(&folder.0, options).expect("an encoder");
    let mut options = FileOptions::default();
    options.media_folder = Some(workspace().join("tests/fixtures/pictures"));
    let index = DataIndex::open(folder::fixture("../samples/samples.jsonl"), options);
    let set = Arc::new(DataSet::from(Arc::new(index.expect("an index"))));
    let options = LoaderOptions::new(BatchSize::Samples(samples), cut);
    let loader = Loader::new(Arc::new(encoder), set, options, None).expect("a loader");
    loader
        .flat_map(|batch| batch.expect("samples").micro_batches)
        .collect()
}

fn prompt(batch: &MicroBatch) -> Prompt<'_> {
    let (rows, attention_mask) = match &batch.rows {
        SampleRows::Packed { cu_seqlens } => (Rows::Packed(cu_seqlens), None),
        SampleRows::Padded {
            rows,
            attention_mask,
        } => (Rows::Batch(*rows), Some(&attention_mask[..])),
    };
    Prompt {
        input_ids: &batch.input_ids,
        rows,
        attention_mask,
        image_grids: &batch.image_grids,
        video_grids: &batch.video_grids,
        seconds_per_grid: Some(&batch.seconds_per_grid),
        ..Prompt::default()
    }
}

/// Where each sample begins in the tokens of a batch.
fn starts(batch: &MicroBatch) -> Vec<usize> {
    match &batch.rows {
        SampleRows::Packed { cu_seqlens } => cu_seqlens.clone(),
        SampleRows::Padded { rows, .. } => {
            let length = batch.input_ids.len() / rows;
            (0..=*rows).map(|row| row * length).collect()
        }
    }
}

/// T, H and W of each token: `[first, count]` where all count up together, else the three.
fn positions(packed: &Value) -> Vec<[f64; 3]> {
    let run = |entry: &Value| {
        let numbers: Vec<u32> = serde_json::from_value(entry.clone()).expect("numbers");
        match numbers[..] {
            [first, count] => (first..first + count)
                .map(|id| [f64::from(id); 3])
                .collect(),
            [t, h, w] => vec![[t, h, w].map(f64::from)],
            _ => panic!("{entry}"),
        }
    };
    packed
        .as_array()
        .expect("ids")
        .iter()
        .flat_map(run)
        .collect()
}

#[test]
fn samples_of_a_batch_have_the_position_ids_that_transformers_gives_each_alone() {
    let file = expected();
    for (family, model, tokens) in [
        ("qwen2", "qwen2_vl", TOKENS),
        ("qwen2_5", "qwen2_5_vl", TOKENS),
        ("qwen3", "qwen3_vl", TOKENS),
        ("glm", "glm4v", GLM_TOKENS),
    ] {
        let folder = model_folder(family, "batch_positions");
        let rules = PositionRules::new(model, tokens).expect(model);
        let rules = rules.with_compatibility(Compatibility::Transformers5_23);
        for cut in CUTS {
            let mut seen = Vec::new();
            for batch in load(&folder, RECORDS, cut) {
                let found = rules.position_ids(&prompt(&batch)).expect("ids");
                for (line, start) in batch.lines.iter().zip(starts(&batch)) {
                    let row = &file[family]["rows"][*line as usize - 1];
                    for (token, ids) in positions(&row["positions"]).into_iter().enumerate() {
                        let found = [0, 1, 2].map(|axis| found.axis(axis)[start + token]);
                        assert_eq!(found, ids, "{family}, line {line}, token {token}, {cut:?}");
                    }
                    seen.push(*line);
                }
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(1..=RECORDS as u64));
        }
    }
}

/// The sum of a loss over its targets, and the gradients of the sum.
struct Sums {
    targets: usize,
    loss: f64,
    gradients: BTreeMap<String, Vec<f64>>,
}

fn floats(data: &TensorData) -> Vec<f64> {
    data.iter::<f64>().collect()
}

fn sums(model: &Vlm, batch: &MicroBatch) -> Sums {
    let patches = |values: &[f32], grids: &[[usize; 3]]| {
        let count: usize = grids
            .iter()
            .map(|grid| grid.iter().product::<usize>())
            .sum();
        let data = || TensorData::new(values.to_vec(), [count, values.len() / count]);
        (count > 0).then(|| Tensor::from_data(data(), &model.device()))
    };
    let inputs = Inputs {
        prompt: prompt(batch),
        image_patches: patches(&batch.image_patches, &batch.image_grids),
        video_patches: patches(&batch.video_patches, &batch.video_grids),
        shown: None,
    };
    let prepared = model.batch(&inputs).expect("a batch");
    let loss = model.loss(&prepared, &batch.labels).expect("targets");
    let gradients = GradientsParams::from_grads(loss.backward(), model);
    let gradients = model.checkpoint_gradients(gradients).expect("gradients");
    let targets = batch.trained_tokens;
    let scaled = |data: TensorData| floats(&data).iter().map(|g| g * targets as f64).collect();
    Sums {
        targets,
        loss: f64::from(loss.into_scalar::<f32>()) * targets as f64,
        gradients: (gradients
            .into_iter()
            .map(|(name, data)| (name, scaled(data))))
        .collect(),
    }
}

fn add(all: Vec<Sums>) -> Sums {
    let mut all = all.into_iter();
    let mut total = all.next().expect("at least one");
    for part in all {
        total.targets += part.targets;
        total.loss += part.loss;
        for (name, gradient) in part.gradients {
            let sum = total.gradients.get_mut(&name).expect("of one model");
            sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
    }
    total
}

/// The length of the difference of all gradients, relative to the length of the gradients; and that
/// of the parameter where it is largest.
fn differences(found: &Sums, expected: &Sums) -> (f64, f64) {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let (mut all, mut worst) = ([0.0; 2], 0.0_f64);
    for (name, gradient) in &expected.gradients {
        let pairs = gradient.iter().zip(&found.gradients[name]);
        let off = square(&mut pairs.map(|(a, b)| a - b));
        let length = square(&mut gradient.iter().copied());
        assert!(length > 0.0, "{name} has a gradient");
        worst = worst.max((off / length).sqrt());
        all = [all[0] + off, all[1] + length];
    }
    ((all[0] / all[1]).sqrt(), worst)
}

/// The configuration of a tiny model with the tokens of the small tokenizer and the patches of the
/// family's processor.
fn tiny_config(family: &str, name: &str) -> Value {
    let path = workspace().join("tests/fixtures/models").join(name);
    let text = std::fs::read_to_string(path.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    let tokens: &[(&str, i64)] = match family {
        "glm" => &[
            ("image_token_id", 702),
            ("video_token_id", 703),
            ("image_start_token_id", 698),
            ("image_end_token_id", 699),
            ("video_start_token_id", 700),
            ("video_end_token_id", 701),
        ],
        _ => &[
            ("image_token_id", 688),
            ("video_token_id", 689),
            ("vision_start_token_id", 685),
            ("vision_end_token_id", 686),
        ],
    };
    for (key, id) in tokens {
        config[*key] = (*id).into();
    }
    config["text_config"]["vocab_size"] = 710.into();
    let side = &expected()[family]["processor_config"]["image_processor"]["patch_size"];
    let vision = &mut config["vision_config"];
    vision["patch_size"] = side.clone();
    if family == "glm" {
        // 5 x 5 learned positions.
        vision["image_size"] = (5 * side.as_u64().expect("a number")).into();
    }
    config
}

#[test]
fn a_batch_has_the_loss_and_the_gradients_of_its_samples_one_by_one() {
    let alone = Cut::Packed { tokens: 160 };
    // Sums in f32 are rounded in another order, which biases and norms feel most, and decays, whose
    // gradients cancel.
    for (family, name, worst_allowed) in [
        ("qwen2", "qwen2_vl_tiny", 4e-6),
        ("qwen2_5", "qwen2_5_vl_tiny", 4e-6),
        ("qwen3", "qwen3_vl_tiny", 4e-6),
        ("qwen3", "qwen3_5_tiny", 1e-5),
        ("glm", "glm4v_tiny", 4e-6),
    ] {
        let folder = model_folder(family, &format!("batch_gradients_{name}"));
        folder.write("config.json", tiny_config(family, name).to_string());
        let config = VlmConfig::from_folder(&folder.0).expect("a configuration");
        let device = Device::flex().autodiff();
        device.seed(40);
        let model = config.init(&device).expect("a model");

        let single = load(&folder, 1, alone);
        assert_eq!(single.len(), RECORDS);
        let expected = add(single.iter().map(|batch| sums(&model, batch)).collect());
        for cut in CUTS {
            let batches = load(&folder, RECORDS, cut);
            let found = add(batches.iter().map(|batch| sums(&model, batch)).collect());
            assert_eq!(found.targets, expected.targets);
            let loss = (found.loss / expected.loss - 1.0).abs();
            let (gradient, worst) = differences(&found, &expected);
            println!("{name} {cut:?}: loss {loss:.1e}, gradient {gradient:.1e}, worst {worst:.1e}");
            assert!(
                loss < 1e-6 && gradient < 1e-6 && worst < worst_allowed,
                "{name} {cut:?}"
            );
        }
    }
}
