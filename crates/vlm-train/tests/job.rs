//! A run as a library call.

use std::fs;
use std::path::PathBuf;

use vlm_models::VlmConfig;
use vlm_train::VlmTrainError;
use vlm_train::job::{Finetune, FinetuneConfig};

use crate::common::fixtures;

#[path = "../examples/finetune.rs"]
#[allow(dead_code, reason = "the program around the function")]
mod example;

/// A model's folder with a tokenizer and a template, 8 conversations, and a folder that is gone
/// when this is dropped.
struct Run {
    model: PathBuf,
    data: PathBuf,
    folder: tempfile::TempDir,
}

fn run() -> Run {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for part in ["models/qwen3_vl_tiny", "workflow/qwen3_vl"] {
        for file in fs::read_dir(fixtures().join(part)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), model.join(file.file_name())).unwrap();
        }
    }
    let data = fixtures().join("workflow/text.jsonl");
    Run {
        model,
        data,
        folder,
    }
}

#[test]
fn the_example_fine_tunes_a_folder() {
    let run = run();
    let out = run.folder.path().join("out");
    let [model, data, out] = [&run.model, &run.data, &out].map(|path| path.to_str().unwrap());
    let adapter = example::finetune(model, data, out).unwrap();
    let config = VlmConfig::from_folder(&run.model).unwrap();
    assert_eq!(config.adapter_config(&adapter).unwrap().rank, 16);
    let log = fs::read_to_string(format!("{out}/log.jsonl")).unwrap();
    let losses: Vec<f64> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64())
        .map(Option::unwrap)
        .collect();
    assert!(
        losses.len() > 1 && losses[losses.len() - 1] < losses[0],
        "{losses:?}"
    );
}

#[test]
fn options_that_make_no_run_are_refused_before_it() {
    let run = run();
    let config = FinetuneConfig::new(&run.model, &run.data, run.folder.path().join("out"));
    let config = config.unwrap();
    type Change = fn(&mut FinetuneConfig);
    let cases: [(&str, Change); 5] = [
        ("--max-tokens 5000 is above", |config| {
            config.data.records.max_tokens = Some(5000);
        }),
        ("--patience needs validation data", |config| {
            config.output.patience = Some(1);
        }),
        ("those of the decoder are 0 to", |config| {
            config.trained.layers = vec!["2-99".parse().unwrap()];
        }),
        ("--full-parts has a part of --parts", |config| {
            config.trained.full_parts = vec![vlm_train::job::PartChoice::Decoder];
        }),
        ("--betas has two numbers", |config| {
            config.optimizer.betas.pop();
        }),
    ];
    for (says, change) in cases {
        let mut config = config.clone();
        change(&mut config);
        match Finetune::open(config) {
            Err(VlmTrainError::Options(text)) => assert!(text.contains(says), "{text}"),
            other => panic!("{says}: {other:?}"),
        }
    }
    // A share that no file can have.
    let name = format!("{}#2000x", run.data.display());
    let error = FinetuneConfig::new(&run.model, name, "out").unwrap_err();
    assert!(
        error.to_string().contains("expected FILE, FILE#500"),
        "{error}"
    );
}
