//! Each row of `vlm_family` from a data file to an answer, and the model types that no row builds.

use std::path::Path;

use serde_json::{Value, json};
use vlm_family::{FAMILIES, Family};

use super::Cell;
use super::commands::{done, ended, program};
use super::reference::{expected, model};
use crate::program::{objects, says, text};

/// The keys that `vlm-family/src/example.rs` has other defaults of.
const EXAMPLE: [[&str; 2]; 3] = [
    ["text_config", "num_hidden_layers"],
    ["vision_config", "depth"],
    ["vision_config", "num_position_embeddings"],
];

/// The family with the fixtures of a row.
pub(super) fn fixtures(family: &'static Family) -> &'static str {
    match family.model_type {
        "example_vl" => family.rotation,
        own => own,
    }
}

fn cell(family: &'static Family, model_type: &'static str) -> Cell {
    Cell {
        family: fixtures(family),
        precision: "f32",
        command: model_type,
        data: if family.vision.is_some() {
            "mixed"
        } else {
            "text"
        },
    }
}

/// Gives a configuration a model type. One of no family of its own leaves its own numbers out.
fn become_type(config: &mut Value, family: &'static Family, model_type: &str) {
    config["model_type"] = json!(model_type);
    for part in ["text_config", "vision_config"] {
        let Some(part) = config.get_mut(part) else {
            continue;
        };
        let stated = part["model_type"].as_str().expect("a type");
        part["model_type"] = json!(stated.replace(fixtures(family), model_type));
    }
    if model_type == "example_vl" {
        for [part, key] in EXAMPLE {
            let part = config[part].as_object_mut().expect("an object");
            part.remove(key).expect("a stated number");
        }
    }
}

/// Tokens, and the largest difference, of each line that `--prove-same` prints of numbers.
fn differences(said: &str) -> Vec<(usize, f64)> {
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(" of ")?;
        let (tokens, rest) = rest.split_once(" tokens differ, by at most ")?;
        Some((tokens.parse().ok()?, rest.parse().ok()?))
    };
    said.lines().filter_map(of_line).collect()
}

/// Proves a family's ways to be the same on a device over the first questions of a file, with a
/// number of threads, and returns the number of tokens.
fn expect_same(cell: &Cell, data: &str, device: &str, [batch, threads]: [usize; 2]) -> usize {
    let (folder, out) = (model(cell, true, |_| ()), cell.fresh("out"));
    let arguments = format!(
        "finetune {} --data {data} --batch {batch} --out {} --precision {} --device {device} \
         --prove-same",
        folder.display(),
        out.display(),
        cell.precision
    );
    let mut program = program(&arguments);
    program.env("RAYON_NUM_THREADS", threads.to_string());
    let (said, _) =
        ended(&mut program, &arguments).unwrap_or_else(|error| panic!("{}: {error}", cell.family));
    let found = differences(&text(&said));
    let [(generated, one), (trained, other)] = found[..] else {
        panic!("{}: {}", cell.family, text(&said));
    };
    assert!(generated > 0 && generated == trained, "{}", cell.family);
    let name = format!("{}, {}, {device}", cell.family, cell.precision);
    assert!(one == 0.0 && other == 0.0, "{name}: {found:?}");
    assert!(!out.exists(), "a proof writes nothing");
    generated
}

#[test]
fn answers_have_the_same_log_probabilities_in_each_way() {
    for family in FAMILIES.iter().filter(|row| row.model_type != "example_vl") {
        let mut cell = cell(family, "prove");
        let data = format!("{}.jsonl", cell.data);
        expect_same(&cell, &data, "cpu", [3, 2]);
        cell.precision = "bf16";
        expect_same(&cell, &data, "cpu", [3, 3]);
        if family.model_type == "qwen2_vl" {
            expect_same(&cell, &data, NPU, [3, 3]);
        }
    }
}

const NPU: &str = "ascend-sim";

/// Writes questions of random lengths, a third of them with a picture, unless for a model of text
/// alone.
fn write_questions(path: &Path, (count, seed): (usize, u64), has_pictures: bool) {
    const PICTURES: [&str; 4] = ["rgb_8.png", "exif_1.png", "420.jpg", "grey.gif"];
    const WORDS: [&str; 8] = ["how", "many", "sides", "has", "a", "square", "red", "?"];
    let mut state = 88_172_645_463_325_252_u64 ^ seed;
    let mut next = |bound: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize % bound
    };
    let pictures = super::reference::fixtures().join("pictures");
    let mut lines = String::new();
    for _ in 0..count {
        let length = 1 + next(60);
        let words: Vec<&str> = (0..length).map(|_| WORDS[next(WORDS.len())]).collect();
        let shows = has_pictures && next(3) == 0;
        let question = format!("{}{}", if shows { "<image>" } else { "" }, words.join(" "));
        let mut record = json!({"messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "four"},
        ]});
        if shows {
            record["images"] = json!([pictures.join(PICTURES[next(PICTURES.len())])]);
        }
        lines += &format!("{record}\n");
    }
    std::fs::write(path, lines).expect("written");
}

#[test]
#[ignore = "two hours: a part of `cargo xtask deep training`"]
fn a_hundred_thousand_tokens_have_the_same_log_probabilities_in_each_way() {
    /// Each has an answer of up to 64 tokens. In larger batches, each takes longer.
    const QUESTIONS: usize = 600;
    let ways = [
        ("f32", "cpu", 1, 25_000),
        ("bf16", "cpu", 8, 25_000),
        ("f32", "cpu", 8, 25_000),
        ("bf16", "cpu", 1, 25_000),
        ("f32", NPU, 2, 2000),
        ("bf16", NPU, 2, 2000),
    ];
    for family in FAMILIES.iter().filter(|row| row.model_type != "example_vl") {
        let mut cell = cell(family, "prove-many");
        let file = cell.fresh("questions.jsonl");
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        let data = file.display().to_string();
        // A simulated NPU computes states in chunks, as others do.
        let can = |device| device != NPU || !family.text.has_states;
        for (precision, device, threads, least) in ways.into_iter().filter(|way| can(way.1)) {
            cell.precision = precision;
            let (mut tokens, mut seed) = (0, 0);
            while tokens < least {
                seed += 1;
                let questions = QUESTIONS.min(least / 20);
                write_questions(&file, (questions, seed), family.vision.is_some());
                tokens += expect_same(&cell, &data, device, [questions, threads]);
            }
            let name = family.name;
            println!("{name}, {precision}, {device}, {threads} threads: {tokens} tokens");
        }
    }
}

#[test]
fn each_row_goes_from_data_to_an_answer() {
    assert!(FAMILIES.iter().any(|row| row.model_type == "example_vl"));
    for family in FAMILIES {
        let cell = cell(family, family.model_type);
        let folder = model(&cell, true, |config| {
            become_type(config, family, family.model_type);
        });
        let (folder, out) = (folder.display(), cell.fresh("out"));
        let data = cell.data;
        let check = format!(
            "data check {data}.jsonl --model {folder} --out {}",
            out.display()
        );
        done(&check).unwrap_or_else(|error| panic!("{}: {error}", family.name));
        // The page has the position ids.
        done(&format!("{check} --show 1")).unwrap_or_else(|error| panic!("{error}"));
        let generate = format!("generate {folder} --data {data}.jsonl --max-new 12 --json");
        let (given, _) = done(&generate).unwrap_or_else(|error| panic!("{error}"));
        let rows = expected(&cell, "greedy")[data]["plain"].as_array();
        let rows = rows.expect("rows").iter().map(|row| &row["tokens"]);
        let given = objects(&given);
        let given: Vec<_> = given.iter().map(|answer| &answer["tokens"]).collect();
        assert_eq!(given, rows.collect::<Vec<_>>(), "{}", family.name);
    }
}

#[test]
fn records_with_pictures_are_refused_for_a_model_of_text_alone() {
    let family = Family::of("llama").expect("a family");
    let cell = cell(family, "pictures");
    let folder = model(&cell, true, |_| ());
    let arguments = format!(
        "data check pictures.jsonl --model {} --out {}",
        folder.display(),
        cell.fresh("out").display()
    );
    let output = program(&arguments).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1), "{arguments}");
    let said = text(&output.stdout);
    says(&said, "text-alone: 3 in lines 1-3");
    says(&said, "the model reads text alone");
    // Nothing else is wrong with them.
    assert_eq!(said.matches(" in line").count(), 1, "{said}");
}

#[test]
fn a_model_type_that_no_model_is_built_of_is_refused_by_data_check_as_by_training() {
    for family in FAMILIES {
        for other in family.other_types {
            let folder = model(&cell(family, other), false, |config| {
                become_type(config, family, other);
            });
            let unknown = Family::built(other).expect_err("no model");
            for arguments in [
                format!("data check mixed.jsonl --model {}", folder.display()),
                format!(
                    "finetune {} --data mixed.jsonl --out {}",
                    folder.display(),
                    folder.join("out").display()
                ),
            ] {
                let output = program(&arguments).output().expect("the program starts");
                assert_eq!(output.status.code(), Some(1), "{arguments}");
                says(&text(&output.stderr), &unknown);
            }
        }
    }
}
