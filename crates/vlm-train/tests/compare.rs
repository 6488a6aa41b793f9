//! Faults in steps of torch, seeded by tests/fixtures/generate/faults.py, and our own records.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use vlm_data::TrainingSample;
use vlm_train::compare::{Comparison, Fault, Stage, compare as compare_ranks};
use vlm_train::{StepRecord, TrainedParts, Trainer};

use crate::common::{ALL, FAMILIES, fixtures, load, lora, packed, padded, recipe, samples};

fn fault(name: &str) -> StepRecord {
    let path = fixtures()
        .join("faults")
        .join(format!("{name}.safetensors"));
    StepRecord::read(&path).unwrap()
}

/// The fixture, the kind that is named, and a part of the place.
const FAULTS: [(&str, Fault, &str); 12] = [
    ("axes", Fault::Axes, "layer 1, "),
    ("pairing", Fault::Pairing, "layer 1, "),
    ("head", Fault::LostGradient, "layer 1, "),
    ("mask", Fault::Mask, "layer 1, mixed"),
    ("scale", Fault::AttentionScale, "layer 1, mixed"),
    ("accumulation", Fault::Accumulation, "layer 1, mixed"),
    ("weight", Fault::Weights, "layer 1, "),
    ("dropout", Fault::Dropout, "layer 0, "),
    ("epsilon", Fault::Epsilon, "layer 0, norm"),
    ("untied", Fault::UntiedHead, "lm_head"),
    ("old_ids", Fault::PositionIds, "position_ids"),
    ("unapplied", Fault::AdapterMissing, "layer 0, "),
];

/// Compares steps of one device each.
fn compare(left: &StepRecord, right: &StepRecord) -> Comparison {
    compare_ranks(std::slice::from_ref(left), std::slice::from_ref(right))
}

fn shown(comparison: &Comparison) -> String {
    let first = comparison.first();
    format!("{:?}, first {first:?}", comparison.suspicion)
}

#[test]
fn seeded_faults_are_found_with_layer_and_kind() {
    let right = fault("right");
    let same = compare(&right, &right);
    assert!(
        same.suspicion.is_none() && same.first().is_none(),
        "{}",
        shown(&same)
    );
    let mut wrong = Vec::new();
    for (name, expected, place) in FAULTS {
        // Whichever side has it.
        for other in [false, true] {
            let faulty = fault(name);
            let found = match other {
                false => compare(&right, &faulty),
                true => compare(&faulty, &right),
            };
            let named = found.suspicion.as_ref();
            let is_named = named.is_some_and(|s| s.fault == expected && s.place.contains(place));
            println!("{name}: {}", shown(&found));
            if !is_named {
                wrong.push(format!("{name}: {}", shown(&found)));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let head = compare(&right, &fault("head")).suspicion.unwrap();
    assert!(head.because.contains("head 1"), "{head:?}");
}

/// An overflow is of f16: in f32 the same gradient is a fault of the backward.
#[test]
fn gradients_that_overflow_in_f16_are_named() {
    let right = fault("right");
    let mut other = fault("right");
    for (name, values) in &mut other.items {
        if name.starts_with("backward/") && name.contains("layers.1.") {
            values[0] = f32::INFINITY;
        }
    }
    for (precision, expected) in [("f16", Fault::Overflow), ("f32", Fault::Gradient)] {
        other.header.precision = precision.to_owned();
        for found in [compare(&right, &other), compare(&other, &right)] {
            let named = found.suspicion.as_ref().map(|suspicion| suspicion.fault);
            assert_eq!(named, Some(expected), "{}", shown(&found));
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

type Cut = fn(Vec<TrainingSample>) -> Vec<vlm_data::MicroBatch>;

/// The second step of a trainer, recorded or not: its record, and the parameters after it.
fn second_step(
    family: &str,
    trained: TrainedParts,
    cut: Cut,
    record: Option<&Path>,
) -> (f64, Vec<(String, TensorData)>) {
    let (config, model) = load(family);
    let mut trainer = Trainer::new(model, recipe(trained)).unwrap();
    trainer.step(&cut(samples(0, &config))).unwrap();
    let batch = cut(samples(1, &config));
    let report = match record {
        Some(path) => trainer.record_step(&batch, path).unwrap(),
        None => trainer.step(&batch).unwrap(),
    };
    let tensors = trainer.model().checkpoint_tensors().unwrap();
    (report.loss, tensors.into_iter().collect())
}

#[test]
fn recording_changes_no_bit_and_cuts_are_equal() {
    for (family, trained) in [
        (FAMILIES[1], lora()),
        (FAMILIES[2], TrainedParts::Full(ALL.to_vec().into())),
    ] {
        let folder = folder("compare-cuts");
        let [one, two] = ["packed", "padded"].map(|name| folder.join(format!("{family}-{name}")));
        let all: Cut = |samples| vec![packed(samples)];
        let each: Cut = |samples| {
            samples
                .into_iter()
                .map(|sample| padded(vec![sample]))
                .collect()
        };
        let straight = second_step(family, trained.clone(), all, None);
        let recorded = second_step(family, trained.clone(), all, Some(&one));
        assert!(straight == recorded, "{family}: the step is another one");
        second_step(family, trained, each, Some(&two));
        let [one, two] = [one, two].map(|path| StepRecord::read(&path).unwrap());
        let found = compare(&one, &two);
        assert!(found.suspicion.is_none(), "{family}: {}", shown(&found));
        assert_eq!(found.only, [Vec::<String>::new(), Vec::new()], "{family}");
        let has = |stage| found.rows.iter().filter(|row| row.stage == stage).count();
        for stage in [
            Stage::Input,
            Stage::Weight,
            Stage::Forward,
            Stage::Backward,
            Stage::Update,
        ] {
            assert!(has(stage) >= 5, "{family}: {} of {stage}", has(stage));
        }
        let differs = found.rows.iter().filter(|row| row.difference > 0.0).count();
        assert!(differs > 0, "{family}: cuts differ in rounding");
    }
}

#[test]
fn a_step_of_torch_is_equal() {
    let folder = folder("compare-torch");
    let (family, path) = (FAMILIES[1], folder.join("first"));
    let (config, model) = load(family);
    let mut trainer = Trainer::new(model, recipe(TrainedParts::Full(ALL.to_vec().into()))).unwrap();
    trainer
        .record_step(&[padded(samples(0, &config))], &path)
        .unwrap();
    // It has 32 elements of a tensor, ours 1024.
    let found = compare(&fault("whole"), &StepRecord::read(&path).unwrap());
    let stages = [Stage::Input, Stage::Forward, Stage::Backward];
    let counts = stages.map(|stage| found.rows.iter().filter(|row| row.stage == stage).count());
    println!("{counts:?} items");
    for row in &found.rows {
        assert!(!row.exceeds(), "{row:?}");
    }
    assert!(
        counts[0] >= 4 && counts[1] >= 20 && counts[2] >= 10,
        "{counts:?}"
    );
    let [torch, ours] = found.losses;
    assert!((torch - ours).abs() < 1e-5 * torch, "{torch} {ours}");
}

#[test]
fn files_that_are_no_records_are_refused() {
    let model = fixtures()
        .join("models")
        .join(FAMILIES[0])
        .join("model.safetensors");
    for (path, expected) in [
        (model.as_path(), "mrope_record"),
        (Path::new("none"), "none"),
    ] {
        let error = StepRecord::read(path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
