//! Runs that stop and continue.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use vlm_data::{DataPosition, GlobalBatch, MicroBatch, VlmDataError};
use vlm_models::{LoraConfig, VlmConfig};
use vlm_train::{Ending, Event, Recipe, RunOptions, TrainedParts, Trainer, VlmTrainError, run};

use crate::common::{ALL, load, lora, packed, recipe, samples};

const FAMILY: &str = "qwen2_5_vl_tiny";

/// Batches from a step on, of which one may be an error.
fn batches(
    config: &VlmConfig,
    from: usize,
    fails: Option<usize>,
) -> impl Iterator<Item = vlm_data::Result<GlobalBatch>> {
    (from..).map(move |step| {
        if fails == Some(step) {
            let reason = "it is gone".to_owned();
            let path = PathBuf::from("data.jsonl");
            return Err(VlmDataError::File { path, reason });
        }
        let next = DataPosition {
            fingerprint: 7,
            seed: None,
            epoch: 0,
            samples: 4 * (step as u64 + 1),
        };
        Ok(GlobalBatch {
            micro_batches: singles(step, config),
            trained_tokens: 0,
            tokens: 0,
            skipped: Vec::new(),
            epoch: 0,
            next,
        })
    })
}

/// The samples of a step, each by itself.
fn singles(step: usize, config: &VlmConfig) -> Vec<MicroBatch> {
    let samples = samples(step, config).into_iter();
    samples.map(|sample| packed(vec![sample])).collect()
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("vlm-train-{name}-{}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        let _none = std::fs::remove_dir_all(&folder.0);
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn short(trained: TrainedParts) -> Recipe {
    let mut recipe = Recipe {
        steps: 6,
        warmup_steps: 1,
        ..recipe(trained)
    };
    if let TrainedParts::Lora(config) = &mut recipe.trained {
        config.dropout = 0.2;
    }
    recipe
}

fn identity() -> BTreeMap<String, String> {
    BTreeMap::from([("data".to_owned(), "8 samples".to_owned())])
}

/// Runs until the end, or until `steps` steps are done in all.
fn go(
    trainer: &mut Trainer,
    folder: &Path,
    until: usize,
    fails: Option<usize>,
) -> Result<Ending, VlmTrainError> {
    let (config, _) = load(FAMILY);
    let validation = singles(1, &config);
    let stop = AtomicBool::new(false);
    let options = RunOptions {
        record_step: None,
        folder,
        identity: &identity(),
        checkpoint_every: 2,
        validation: &validation,
        questions: None,
        validate_every: 3,
        stop: &stop,
    };
    let from = trainer
        .position()
        .map_or(0, |position| position.samples as usize / 4);
    let mut batches = batches(&config, from, fails);
    run(trainer, &mut batches, options, &mut |event| {
        if matches!(event, Event::Step(done) if done.step == until) {
            stop.store(true, Ordering::Relaxed);
        }
    })
}

fn new(recipe: &Recipe) -> Trainer {
    Trainer::new(load(FAMILY).1, recipe.clone()).unwrap()
}

fn resume(recipe: &Recipe, folder: &Path) -> Result<Trainer, VlmTrainError> {
    Trainer::new(load(FAMILY).1, recipe.clone())?.resume(folder, &identity())
}

/// The files of the last checkpoint, and the log.
fn contents(folder: &Path) -> [Vec<u8>; 3] {
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let last = "checkpoint-00000006";
    [
        read("log.jsonl"),
        read(&format!("{last}/state.safetensors")),
        read(&format!("{last}/run.json")),
    ]
}

#[test]
fn a_run_that_was_stopped_ends_with_the_files_of_one_that_was_not() {
    for (name, trained) in [("lora", lora()), ("full", TrainedParts::Full(ALL.to_vec()))] {
        let recipe = short(trained);
        let (straight, broken) = (
            Folder::new(&format!("{name}-1")),
            Folder::new(&format!("{name}-2")),
        );
        let ending = go(&mut new(&recipe), &straight.0, 99, None).unwrap();
        assert_eq!(ending, Ending::Finished);

        let ending = go(&mut new(&recipe), &broken.0, 1, None).unwrap();
        assert_eq!(ending, Ending::Stopped);
        // One that fails between checkpoints, as a kill would end it.
        let mut trainer = resume(&recipe, &broken.0).unwrap();
        assert_eq!(trainer.steps(), 1);
        let error = go(&mut trainer, &broken.0, 99, Some(5)).unwrap_err();
        assert!(error.to_string().contains("data.jsonl"), "{error}");
        let mut trainer = resume(&recipe, &broken.0).unwrap();
        assert_eq!(trainer.steps(), 4);
        go(&mut trainer, &broken.0, 99, None).unwrap();
        assert!(contents(&straight.0) == contents(&broken.0), "{name}");
        assert_eq!(
            std::fs::read_dir(&broken.0).unwrap().count(),
            2,
            "one checkpoint and the log"
        );
    }
}

#[test]
fn another_run_does_not_continue_or_replace_one() {
    let folder = Folder::new("other");
    let recipe = short(lora());
    go(&mut new(&recipe), &folder.0, 2, None).unwrap();
    let error = go(&mut new(&recipe), &folder.0, 2, None).unwrap_err();
    assert!(matches!(error, VlmTrainError::Taken { .. }), "{error}");

    let other = Recipe {
        epsilon: 1e-6,
        ..recipe.clone()
    };
    let error = resume(&other, &folder.0).unwrap_err();
    let expected = "epsilon was 1e-8 and is 1e-6 now";
    assert!(error.to_string().contains(expected), "{error}");
    let identity = BTreeMap::from([("data".to_owned(), "9 samples".to_owned())]);
    let trainer = Trainer::new(load(FAMILY).1, recipe.clone()).unwrap();
    let error = trainer.resume(&folder.0, &identity).unwrap_err();
    assert!(
        error.to_string().contains("data was \"8 samples\""),
        "{error}"
    );

    let state = folder.0.join("checkpoint-00000002/state.safetensors");
    let mut bytes = std::fs::read(&state).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&state, bytes).unwrap();
    let error = resume(&recipe, &folder.0).unwrap_err();
    assert!(matches!(error, VlmTrainError::Damaged { .. }), "{error}");
    std::fs::remove_file(folder.0.join("checkpoint-00000002/run.json")).unwrap();
    let error = resume(&recipe, &folder.0).unwrap_err();
    assert!(
        matches!(error, VlmTrainError::NoCheckpoint { .. }),
        "{error}"
    );
}

#[test]
fn a_loss_that_is_none_names_the_lines_of_its_samples() {
    let (config, model) = load(FAMILY);
    let mut trainer = Trainer::new(model, short(lora())).unwrap();
    let mut batch = singles(0, &config);
    batch[1].image_patches[3] = f32::NAN;
    let error = trainer.step(&batch).unwrap_err().to_string();
    let expected =
        "the loss is NaN in step 1, over the samples at line 2 (first in vision.patch_embed)";
    assert!(error.contains(expected), "{error}");
    assert_eq!(trainer.steps(), 0);
    for micro in &mut batch {
        micro.labels.fill(-100);
    }
    let error = trainer.step(&batch).unwrap_err();
    assert!(matches!(error, VlmTrainError::NoLabels { .. }), "{error}");
}

#[test]
fn an_adapter_that_changes_nothing_is_refused() {
    let folder = Folder::new("effect");
    let (config, model) = load(FAMILY);
    let mut trainer = Trainer::new(model, short(lora())).unwrap();
    let probe = &singles(0, &config)[0];
    let error = trainer.save_adapter(&folder.0, FAMILY, probe).unwrap_err();
    assert!(matches!(error, VlmTrainError::NoEffect { .. }), "{error}");
    for _ in 0..2 {
        trainer.step(&singles(0, &config)).unwrap();
    }
    trainer.save_adapter(&folder.0, FAMILY, probe).unwrap();
    let text = std::fs::read_to_string(folder.0.join("adapter_config.json")).unwrap();
    assert!(
        text.contains("\"r\": 4") && text.contains("language_model"),
        "{text}"
    );
}

#[test]
fn the_cut_of_a_batch_makes_no_difference() {
    let dropped = LoraConfig {
        dropout: 0.3,
        parts: ALL.to_vec(),
        ..LoraConfig::default()
    };
    for trained in [
        lora(),
        TrainedParts::Lora(dropped),
        TrainedParts::Full(ALL.to_vec()),
    ] {
        let (config, model) = load(FAMILY);
        let trainer = Trainer::new(model, recipe(trained)).unwrap();
        let found = trainer.prove_cut(&samples(0, &config)).unwrap();
        println!("{found:?}");
        assert!(
            found.loss < 1e-6 && found.gradient_norm < 1e-6 && found.gradient < 1e-5,
            "{found:?}"
        );
    }
}
