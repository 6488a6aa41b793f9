//! Records in the formats of other projects, against what their own loaders read.
//!
//! The expected values are in `fixtures/text/formats.json`, written by
//! `fixtures/generate/formats.py`, which runs the loaders.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod folder;

use std::collections::BTreeMap;

use folder::{Folder, family_folder, fixture, json};
use serde_json::Value;
use vlm_data::text::format::Conversations;
use vlm_data::text::{
    Conversation, EncodeOptions, FileOptions, Grid, Grids, IGNORED, LabelRule, Result, TextEncoder,
    Trained,
};

/// A folder whose template prints the texts of the projects' own templates.
fn chatml() -> Folder {
    let folder = family_folder("qwen3", "formats");
    let template = std::fs::read_to_string(fixture("formats.jinja")).expect("a template");
    folder.write("chat_template.jinja", template);
    folder
}

fn one(record: &str) -> Result<Conversation> {
    let mut found = Conversations::new(record.as_bytes(), "", &FileOptions::default());
    let first = found.next().expect("a record");
    assert!(found.next().is_none(), "one record");
    first
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

fn numbers(value: &Value) -> Vec<u64> {
    let items = value.as_array().expect("a list").iter();
    items.map(|item| item.as_u64().expect("a number")).collect()
}

/// Ids, where runs are `[id, count]`.
fn ids(packed: &Value) -> Vec<i64> {
    let run = |item: &Value| match item.as_i64() {
        Some(id) => vec![id],
        None => {
            let [id, count] = numbers(item)[..] else {
                panic!("{item} is no run");
            };
            vec![id as i64; count as usize]
        }
    };
    let items = packed.as_array().expect("ids").iter();
    items.flat_map(run).collect()
}

fn labels(row: &Value, ids: &[i64]) -> Vec<i64> {
    let mut labels = vec![IGNORED; ids.len()];
    let unlabelled = row["options"]["unlabelled"].as_u64().unwrap_or(0);
    for span in numbers(&row["trained"]).chunks(2) {
        let span = (span[0] + unlabelled) as usize..span[1] as usize;
        labels[span.clone()].copy_from_slice(&ids[span]);
    }
    let other = row["other_labels"].as_array().into_iter().flatten();
    for pair in other.map(numbers) {
        labels[pair[0] as usize] = pair[1] as i64;
    }
    labels
}

fn options(row: &Value) -> EncodeOptions {
    let mut options = EncodeOptions::default();
    options.rule = match text(&row["options"]["rule"]) {
        "qwen" => LabelRule::Qwen,
        "llama_factory" => LabelRule::LlamaFactory,
        "swift" => LabelRule::Swift,
        "generation" => LabelRule::Generation,
        other => panic!("no rule {other}"),
    };
    options.trained = match row["options"]["trained"].as_str() {
        None => Trained::AllTurns,
        Some("last_turn") => Trained::LastTurn,
        Some("everything") => Trained::Everything,
        Some(other) => panic!("no choice {other}"),
    };
    options
}

#[test]
fn records_have_the_ids_and_labels_of_the_projects_that_define_their_format() {
    let folders = [chatml(), family_folder("glm", "formats")];
    let [chatml, glm] = folders
        .each_ref()
        .map(|folder| TextEncoder::from_folder(&folder.0).expect("an encoder"));
    let file = json("formats.json");
    let (mut compared, mut wrong) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for row in file["rows"].as_array().expect("rows") {
        let (project, record) = (text(&row["project"]), row["record"].to_string());
        let encoder = if row["family"] == "glm" {
            &glm
        } else {
            &chatml
        };
        let ids = ids(&row["ids"]);
        let expected = labels(row, &ids);
        let images: Vec<Grid> = row
            .get("grid")
            .map(|grid| {
                let [time, height, width] = numbers(grid)[..] else {
                    panic!("{grid} is no grid");
                };
                let [time, height, width] = [time, height, width].map(|side| side as u32);
                Grid {
                    time,
                    height,
                    width,
                }
            })
            .into_iter()
            .collect();
        let grids = Grids {
            images: &images,
            videos: &[],
        };
        let sample = one(&record)
            .and_then(|conversation| encoder.encode(&conversation, grids, &options(row)));
        *compared.entry(project).or_default() += 1;
        match (sample, row["options"]["refused"].as_str()) {
            (Err(error), Some(key)) if error.to_string().contains(key) => {}
            // No token predicts the first, so its label is of no account.
            (Ok(sample), None)
                if sample.input_ids == ids && sample.labels[1..] == expected[1..] => {}
            (Ok(sample), None) => {
                let shown = |ids: &[i64]| {
                    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
                    encoder.tokenizer().decode(&ids).expect("a text")
                };
                let trained = |labels: &[i64]| {
                    let kept: Vec<i64> = labels
                        .iter()
                        .copied()
                        .filter(|&label| label != IGNORED)
                        .collect();
                    shown(&kept)
                };
                wrong.push(format!(
                    "{project} {record} {}\n  ids {}: {:?}, expected {:?}\n  labels: {:?}, expected {:?}",
                    row["options"],
                    if sample.input_ids == ids { "equal" } else { "differ" },
                    shown(&sample.input_ids),
                    shown(&ids),
                    trained(&sample.labels),
                    trained(&expected),
                ));
            }
            (found, _) => wrong.push(format!("{project} {record}\n  {found:?}")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let expected = [
        ("llama_factory", 14),
        ("llama_factory_v1", 4),
        ("swift", 16),
        ("trl", 11),
    ];
    assert_eq!(compared, BTreeMap::from(expected));
}
