//! Runs that stop and continue.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use vlm_data::{DataPosition, GlobalBatch, MicroBatch, VlmDataError};
use vlm_models::{LoraConfig, VlmConfig};
use vlm_train::{
    Batches, Checkpoints, Ending, Event, Identity, Recipe, RunFolder, RunOptions, Schedule,
    TrainedParts, Trainer, VlmTrainError, run,
};

use crate::common::{
    ALL, FAMILIES, Folder, SAMPLES, beside, load, lora, packed, recipe, samples, timeless_log,
};

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
            records: Vec::new(),
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

fn identity() -> Identity {
    BTreeMap::from([("data".to_owned(), "8 samples".into())])
}

/// Checkpoints every two steps.
fn options<'a>(
    folder: &'a RunFolder,
    identity: &'a Identity,
    stop: &'a AtomicBool,
) -> RunOptions<'a> {
    RunOptions {
        folder,
        identity,
        base: Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/models/qwen2_5_vl_tiny"
        )),
        records: SAMPLES,
        checkpoints: Checkpoints {
            every: 2,
            interval: Duration::from_secs(3600),
            keep: 1,
        },
        validation: None,
        rollouts: None,
        patience: None,
        questions: None,
        validate_every: 0,
        record_step: None,
        memory: &|| None,
        stop,
    }
}

/// Runs until the end, or until `steps` steps are done in all.
fn go(
    trainer: &mut Trainer,
    folder: &Path,
    until: usize,
    fails: Option<usize>,
) -> Result<Ending, VlmTrainError> {
    let (config, _) = load(FAMILY);
    let stop = AtomicBool::new(false);
    let validation =
        || -> vlm_data::Result<Batches<'_>> { Ok(Box::new(batches(&config, 1, None).take(1))) };
    let (run_folder, identity) = (RunFolder::own(folder).unwrap(), identity());
    let options = RunOptions {
        validation: Some(&validation),
        validate_every: 3,
        ..options(&run_folder, &identity, &stop)
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

/// The files of the last checkpoint, and the log without the fields of the clock.
fn contents(folder: &Path) -> [Vec<u8>; 3] {
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let last = "checkpoint-00000006";
    [
        timeless_log(folder).into_bytes(),
        read(&format!("{last}/state.safetensors")),
        read(&format!("{last}/run.json")),
    ]
}

#[test]
fn a_run_that_was_stopped_ends_with_the_files_of_one_that_was_not() {
    for (name, trained) in [
        ("lora", lora()),
        ("full", TrainedParts::Full(ALL.to_vec().into())),
        ("beside", beside()),
    ] {
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
            3,
            "one checkpoint, the best result and the log"
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
    let identity = BTreeMap::from([("data".to_owned(), "9 samples".into())]);
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

/// Each value of a checkpoint's `run.json`, changed alone.
#[test]
fn a_changed_run_is_damaged() {
    let folder = Folder::new("changed");
    let recipe = short(lora());
    go(&mut new(&recipe), &folder.0, 3, None).unwrap();
    let path = folder.0.join("checkpoint-00000003/run.json");
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut pointers = Vec::new();
    fn leaves(of: &serde_json::Value, at: String, found: &mut Vec<String>) {
        match of {
            serde_json::Value::Object(map) if !map.is_empty() => {
                map.iter().for_each(|(key, value)| {
                    leaves(value, format!("{at}/{}", key.replace('/', "~1")), found)
                })
            }
            serde_json::Value::Array(list) if !list.is_empty() => list
                .iter()
                .enumerate()
                .for_each(|(index, value)| leaves(value, format!("{at}/{index}"), found)),
            _ => found.push(at),
        }
    }
    leaves(&good, String::new(), &mut pointers);
    assert!(pointers.len() > 40, "{pointers:?}");
    for pointer in pointers {
        for new in [
            4_u64.into(),
            1_000_000_u64.into(),
            (1_u64 << 63).into(),
            serde_json::json!({}),
        ] {
            let mut changed = good.clone();
            let value = changed.pointer_mut(&pointer).unwrap();
            if *value == new {
                continue;
            }
            *value = new.clone();
            std::fs::write(&path, changed.to_string()).unwrap();
            // The names of parameters are compared before values are.
            let error = resume(&recipe, &folder.0)
                .map(drop)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("run.json is damaged"),
                "{pointer} = {new}: {error}"
            );
        }
    }
    // Written anew, in another order, nothing is changed.
    std::fs::write(&path, format!("{good:#}")).unwrap();
    resume(&recipe, &folder.0).unwrap();
    std::fs::rename(
        folder.0.join("checkpoint-00000003"),
        folder.0.join("checkpoint-00000005"),
    )
    .unwrap();
    let error = resume(&recipe, &folder.0)
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(error.contains("its folder of step 5"), "{error}");
}

/// Transposes the first matrices of the adapters, as they were stored up to version 1, and returns
/// the checksum of the tensors.
fn transpose_adapters(path: &Path) -> u64 {
    let TrainedParts::Lora(config) = lora() else {
        unreachable!("adapters");
    };
    let mut bytes = std::fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let mut transposed = 0;
    for (name, tensor) in header.as_object().unwrap() {
        if !name.ends_with(".lora_A.weight") {
            continue;
        }
        let offset =
            |index: usize| start + tensor["data_offsets"][index].as_u64().unwrap() as usize;
        let place = &mut bytes[offset(0)..offset(1)];
        let rows: Vec<f32> = place
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes(x.try_into().unwrap()))
            .collect();
        let inputs = rows.len() / config.rank;
        let columns = (0..inputs).flat_map(|i| rows.iter().skip(i).step_by(inputs));
        for (to, from) in place.chunks_exact_mut(4).zip(columns) {
            to.copy_from_slice(&from.to_le_bytes());
        }
        transposed += 1;
    }
    assert!(transposed > 3, "values and moments");
    std::fs::write(path, &bytes).unwrap();
    let mut checksum = vlm_data::Fingerprint::default();
    checksum.add(&bytes[start..]);
    checksum.value()
}

/// As the release before wrote it.
#[test]
fn a_checkpoint_of_version_0_is_continued() {
    let folder = Folder::new("version-0");
    let recipe = short(lora());
    go(&mut new(&recipe), &folder.0, 3, None).unwrap();
    let path = folder.0.join("checkpoint-00000003/run.json");
    let text = std::fs::read(&path).unwrap();
    let mut run: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let object = run.as_object_mut().unwrap();
    for added in ["version", "digest", "validations"] {
        object.remove(added).unwrap();
    }
    for added in ["decay_steps", "least_share"] {
        object["recipe"]
            .as_object_mut()
            .unwrap()
            .remove(added)
            .unwrap();
    }
    object["identity"] = serde_json::json!({
        "data": "8 samples", "model": "/somewhere/else", "precision": "F32", "pixels": "None",
        "batch": "Samples(8)", "cut": "Packed { tokens: 4096 }", "weights": "0123456789abcdef"
    });
    let today = resume(&recipe, &folder.0).unwrap();
    let state = folder.0.join("checkpoint-00000003/state.safetensors");
    run["checksum"] = transpose_adapters(&state).into();
    std::fs::write(&path, run.to_string()).unwrap();
    let trainer = Trainer::new(load(FAMILY).1, recipe.clone()).unwrap();
    let mut now = identity();
    now.insert("batch".to_owned(), 8.into());
    now.insert("precision".to_owned(), "f32".into());
    now.insert("an option of today".to_owned(), true.into());
    let before = trainer.clone().resume(&folder.0, &now).unwrap();
    assert_eq!(before.steps(), 3);
    let config = load(FAMILY).0;
    let mut trainers = [today, before];
    for trainer in &mut trainers {
        trainer.step(&singles(3, &config)).unwrap();
    }
    let [today, before] = trainers.map(|x| x.model().sample_parameters(64, true).unwrap());
    assert_eq!(today, before, "moments and values of the adapters");
    now.insert("batch".to_owned(), 9.into());
    let error = trainer
        .clone()
        .resume(&folder.0, &now)
        .map(drop)
        .unwrap_err();
    assert!(
        error.to_string().contains("batch was 8 and is 9"),
        "{error}"
    );
    run["steps"] = 5.into();
    std::fs::write(&path, run.to_string()).unwrap();
    let error = trainer
        .resume(&folder.0, &identity())
        .map(drop)
        .unwrap_err();
    assert!(
        error.to_string().contains("its folder of step 3"),
        "{error}"
    );
}

#[test]
fn more_steps_are_taken_if_the_rates_so_far_do_not_depend_on_them() {
    for (schedule, more, is_continued) in [
        (Schedule::Constant, 9, true),
        (Schedule::Constant, 2, false),
        (Schedule::Wsd, 9, true),
        (Schedule::Cosine, 9, false),
        (Schedule::Linear, 9, false),
    ] {
        let folder = Folder::new(&format!("more-{schedule:?}-{more}"));
        let recipe = Recipe {
            schedule,
            decay_steps: 2,
            ..short(lora())
        };
        go(&mut new(&recipe), &folder.0, 3, None).unwrap();
        let longer = Recipe {
            steps: more,
            ..recipe
        };
        let resumed = resume(&longer, &folder.0);
        if is_continued {
            let mut trainer = resumed.unwrap();
            assert_eq!(
                go(&mut trainer, &folder.0, 99, None).unwrap(),
                Ending::Finished
            );
            let straight = Folder::new(&format!("straight-{schedule:?}"));
            go(&mut new(&longer), &straight.0, 99, None).unwrap();
            let state = |folder: &Folder| {
                std::fs::read(folder.0.join("checkpoint-00000009/state.safetensors")).unwrap()
            };
            assert!(state(&folder) == state(&straight), "{schedule:?}");
        } else {
            let error = resumed.map(drop).unwrap_err();
            assert!(
                matches!(error, VlmTrainError::OtherRates { .. }),
                "{schedule:?} {error}"
            );
        }
    }
}

#[test]
fn checkpoints_are_adapters_some_are_kept_and_a_settled_loss_ends_a_run() {
    let folder = Folder::new("kept");
    let mut recipe = short(lora());
    recipe.rates = vlm_train::Rates::all(1e-12);
    let (config, _) = load(FAMILY);
    let stop = AtomicBool::new(false);
    let (run_folder, identity) = (RunFolder::own(&folder.0).unwrap(), identity());
    let opened = AtomicUsize::new(0);
    // The validation data get harder.
    let validation = || -> vlm_data::Result<Batches<'_>> {
        let from = opened.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(
            batches(&config, usize::from(from > 1), None).take(1),
        ))
    };
    let mut every_two = options(&run_folder, &identity, &stop);
    every_two.checkpoints.every = 1;
    every_two.checkpoints.keep = 3;
    every_two.validation = Some(&validation);
    every_two.validate_every = 1;
    every_two.patience = Some(3);
    let mut trainer = new(&recipe);
    let mut losses = Vec::new();
    let ending = run(
        &mut trainer,
        &mut batches(&config, 0, None),
        every_two,
        &mut |event| {
            if let Event::Validation { loss, .. } = event {
                losses.push(loss);
            }
        },
    )
    .unwrap();
    let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let best = 1 + losses.iter().position(|loss| *loss == least).unwrap();
    assert_eq!(ending, Ending::Settled { best }, "{losses:?}");
    assert_eq!(losses.len(), best + 3);
    let names = std::fs::read_dir(&folder.0).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let kept = names.filter(|name| name.starts_with("checkpoint-")).count();
    assert_eq!(kept, 3);
    let last = format!("checkpoint-{:08}", losses.len());
    for adapter in ["best", &last] {
        load(FAMILY).1.load_adapter(folder.0.join(adapter)).unwrap();
    }
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
    let error = trainer
        .save_adapter(&folder.0, Path::new(FAMILY), probe)
        .unwrap_err();
    assert!(matches!(error, VlmTrainError::NoEffect { .. }), "{error}");
    for _ in 0..2 {
        trainer.step(&singles(0, &config)).unwrap();
    }
    trainer
        .save_adapter(&folder.0, Path::new(FAMILY), probe)
        .unwrap();
    let text = std::fs::read_to_string(folder.0.join("adapter_config.json")).unwrap();
    assert!(
        text.contains("\"r\": 4") && text.contains("language_model"),
        "{text}"
    );
}

/// PEFT adapts each module whose name ends with a target, whatever its type: also the convolution
/// of the tower's patches, whose name ends as a linear layer's.
#[test]
fn no_target_of_a_saved_adapter_matches_a_module_without_one() {
    for family in FAMILIES {
        let folder = Folder::new(&format!("targets-{family}"));
        let all = LoraConfig {
            parts: ALL.to_vec(),
            ..LoraConfig::default()
        };
        let (_, model) = load(family);
        let model = model.with_lora(&all, 0).unwrap();
        std::fs::create_dir_all(&folder.0).unwrap();
        model.save_adapter(&folder.0, "base").unwrap();
        let text = std::fs::read_to_string(folder.0.join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let targets = config["target_modules"].as_array().unwrap();
        let adapted = model.parameters();
        let adapted = adapted.iter().map(|p| p.name.as_str());
        let adapted: std::collections::HashSet<&str> = adapted
            .filter_map(|name| {
                name.strip_prefix("base_model.model.")?
                    .strip_suffix(".lora_A.weight")
            })
            .collect();
        assert!(!adapted.is_empty());
        for name in model.checkpoint_tensors().unwrap().keys() {
            let module = name.rsplit_once('.').unwrap().0;
            let is_target = targets.iter().any(|target| {
                let target = target.as_str().unwrap();
                module == target || module.ends_with(&format!(".{target}"))
            });
            assert_eq!(is_target, adapted.contains(module), "{family}: {module}");
        }
    }
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
        TrainedParts::Full(ALL.to_vec().into()),
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
