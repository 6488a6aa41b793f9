//! Records in the formats of other projects, against what their own loaders read.
//!
//! The expected values are in `fixtures/text/formats.json`, written by
//! `fixtures/generate/formats.py`, which runs the loaders.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod folder;

use std::collections::BTreeMap;
use std::sync::Arc;

use folder::{Folder, family_folder, fixture, json};
use serde_json::Value;
use sha2::{Digest, Sha256};
use vlm_data::text::format::{Conversations, MediaSource};
use vlm_data::text::{
    Conversation, DataIndex, EncodeOptions, FileOptions, Grid, Grids, IGNORED, LabelRule, Result,
    TextEncoder, Trained,
};
use vlm_data::{DataSet, SampleEncoder, SampleOptions};

/// A folder whose template prints the texts of the projects' own templates.
fn chatml(test: &str) -> Folder {
    let folder = family_folder("qwen3", test);
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
    let folders = [chatml("formats"), family_folder("glm", "formats")];
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
                wrong.push(format!(
                    "{project} {record} {}\n  ids {}: {:?}, expected {:?}\n  labels: {:?}, expected {:?}",
                    row["options"],
                    if sample.input_ids == ids { "equal" } else { "differ" },
                    sample.input_ids,
                    ids,
                    trained(encoder, &sample.labels),
                    trained(encoder, &expected),
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
        ("swift", 43),
        ("trl", 11),
    ];
    assert_eq!(compared, BTreeMap::from(expected));
}

/// A record of one question, of these parts, and an answer.
fn asked(parts: &str) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": [{parts}]}}, {{"role": "assistant", "content": "a"}}]}}"#
    )
}

fn white(folder: &Folder, name: &str, [height, width]: [u32; 2]) {
    let picture = image::RgbImage::from_pixel(width, height, image::Rgb([255; 3]));
    picture.save(folder.0.join(name)).expect("a picture");
}

/// An encoder of whole samples with the limits of the family's published processor.
fn samples(folder: &Folder, patch: usize) -> SampleEncoder {
    let token = (2 * patch).pow(2);
    let config = format!(
        r#"{{"patch_size": {patch}, "merge_size": 2, "temporal_patch_size": 2, "size": {{"shortest_edge": {}, "longest_edge": {}}}}}"#,
        4 * token,
        16384 * token
    );
    folder.write("preprocessor_config.json", config);
    SampleEncoder::from_folder(&folder.0, SampleOptions::default()).expect("an encoder")
}

fn in_folder(record: &str, folder: &Folder) -> Conversation {
    let mut read = Conversations::new(record.as_bytes(), &folder.0, &FileOptions::default());
    read.next().expect("a record").expect("a conversation")
}

/// A picture that formats.py draws, too.
fn drawn([height, width]: [u64; 2]) -> image::RgbImage {
    image::RgbImage::from_fn(width as u32, height as u32, |x, y| {
        image::Rgb([0, 29, 58].map(|c| ((7 * y + 13 * x + c + x * y / 16 * 3) % 256) as u8))
    })
}

fn hash_of(values: &[f32]) -> String {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let hash = Sha256::digest(bytes);
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sides(row: &Value) -> [u64; 2] {
    numbers(&row["sides"]).try_into().expect("two sides")
}

/// The keys of a part, against qwen-vl-utils' `fetch_image` followed by transformers' processor.
#[test]
fn limits_of_a_part_resize_its_picture_as_qwen_vl_utils_does() {
    let folders = [("qwen2", 14), ("qwen3", 16)].map(|(family, patch)| {
        let folder = family_folder(family, "limits");
        let encoder = samples(&folder, patch);
        (folder, encoder, patch as u64)
    });
    let file = json("formats.json");
    let rows = file["pictures"].as_array().expect("rows");
    assert_eq!(rows.len(), 80);
    let mut wrong = Vec::new();
    for row in rows {
        let known = folders.iter().find(|(_, _, patch)| row["patch"] == *patch);
        let (folder, encoder, patch) = known.expect("a family");
        let name = format!("{}.png", row["sides"]);
        if !folder.0.join(&name).exists() {
            let saved = drawn(sides(row)).save(folder.0.join(&name));
            saved.expect("a picture");
        }
        let mut part = row["part"].clone();
        part["type"] = "image".into();
        part["image"] = name.into();
        let conversation = in_folder(&asked(&part.to_string()), folder);
        let sample = encoder.encode(&conversation).expect("a sample");
        let [_, height, width] = sample.image_grids[0];
        let resized = [height as u64 * patch, width as u64 * patch];
        // Without keys, the folder's processor alone resizes, in its own arithmetic and by its own
        // rule for thin pictures.
        let has_keys = row["part"].as_object().is_some_and(|part| !part.is_empty());
        let is_equal = resized[..] == numbers(&row["resized"])
            && (!has_keys || row["patches"] == hash_of(&sample.image_patches));
        if !is_equal && (has_keys || sides(row)[0] > 20) {
            wrong.push(format!("{resized:?}: {row}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The keys of a list of frames, against qwen-vl-utils' `fetch_video` followed by transformers'
/// processor.
#[test]
fn limits_of_a_list_resize_its_frames_as_qwen_vl_utils_does() {
    let folder = family_folder("qwen2", "lists");
    let class = r#"{"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 1, "longest_edge": 1099511627776}}"#;
    folder.write("video_preprocessor_config.json", class);
    let encoder = samples(&folder, 14);
    let file = json("formats.json");
    let rows = file["lists"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    let (mut equal, mut all, mut differ) = (0, 0, 0);
    for row in rows {
        let [height, width] = sides(row);
        let names = (0..row["frames"].as_u64().expect("a number")).map(|frame| {
            let name = format!("{frame}-{height}.png");
            let picture = drawn([height, width + frame]);
            let (x, y) = (frame as u32, 0);
            let frame = image::imageops::crop_imm(&picture, x, y, width as u32, height as u32);
            let saved = frame.to_image().save(folder.0.join(&name));
            saved.expect("a picture");
            name
        });
        let mut part = row["part"].clone();
        part["type"] = "video".into();
        part["fps"] = 2.into();
        part["video"] = names.collect::<Vec<_>>().into();
        let conversation = in_folder(&asked(&part.to_string()), &folder);
        let sample = encoder.encode(&conversation).expect("a sample");
        assert_eq!(
            row["grid"],
            serde_json::json!(sample.video_grids[0]),
            "{row}"
        );
        equal += usize::from(row["patches"] == hash_of(&sample.video_patches));
        let frames = encoder
            .media()
            .expect("pictures")
            .videos
            .pictures(&sample.video_patches, sample.video_grids[0]);
        let frames = frames.expect("frames");
        let levels = frames.iter().flat_map(|frame| frame.rgb()).step_by(499);
        // The last frame may be repeated.
        for (level, expected) in levels.zip(numbers(&row["levels"])) {
            let off = (i64::from(*level) - expected as i64).abs();
            assert!(off <= 1, "{level} for {expected}: {row}");
            (all, differ) = (all + 1, differ + off);
        }
    }
    assert!(equal >= 3 && all > 5000, "{equal} of {all}");
    assert!(1000 * differ <= all, "{differ} of {all} levels");
}

/// The key `sample_fps` of a list of frames, and an odd number of them, against qwen-vl-utils'
/// `fetch_video`.
#[test]
fn lists_of_frames_have_the_rate_and_number_of_qwen_vl_utils() {
    let folder = family_folder("qwen3", "frames");
    let encoder = samples(&folder, 16);
    let file = json("formats.json");
    let rows = file["videos"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    white(&folder, "p.png", [64, 64]);
    for row in rows {
        let mut part = row["part"].clone();
        part["type"] = "video".into();
        part["video"] = vec!["p.png"; row["frames"].as_u64().expect("a number") as usize].into();
        let conversation = in_folder(&asked(&part.to_string()), &folder);
        assert_eq!(conversation.videos[0].fps, row["fps"].as_f64(), "{row}");
        let sample = encoder.measure(&conversation).expect("a sample");
        // Two frames are one patch in time.
        assert_eq!(2 * sample.video_grids[0][0], row["taken"], "{row}");
    }
}

/// A completion of several messages is trained as a whole in GLM's template, too.
#[test]
fn completions_are_trained_as_a_whole_in_glm() {
    let folder = family_folder("glm", "completions");
    let encoder = TextEncoder::from_folder(&folder.0).expect("an encoder");
    let record = r#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        "completion": [{"role": "assistant", "content": "d"}, {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f"}]}"#;
    let conversation = one(&record.replace('\n', " ")).expect("a record");
    for (rule, choice, expected) in [
        (
            LabelRule::Qwen,
            Trained::AllTurns,
            "d<|observation|>\ne<|assistant|>\nf<|user|>",
        ),
        // LLaMA-Factory's label of the next role is the end of the text.
        (
            LabelRule::LlamaFactory,
            Trained::AllTurns,
            "\nd<|endoftext|>\ne<|assistant|>\nf<|endoftext|>",
        ),
        (LabelRule::Qwen, Trained::LastTurn, "f<|user|>"),
    ] {
        let mut options = EncodeOptions::default();
        (options.rule, options.trained) = (rule, choice);
        let sample = encoder
            .encode(&conversation, Grids::default(), &options)
            .expect("a sample");
        assert_eq!(
            trained(&encoder, &sample.labels),
            expected,
            "{rule:?} {choice:?}"
        );
    }
}

/// Boxes in pixels and from 0 to 1, against ms-swift's `normalize_bbox`.
#[test]
fn boxes_of_both_kinds_are_written_as_ms_swift_does() {
    let folder = family_folder("qwen3", "boxes");
    let encoder = samples(&folder, 16);
    let file = json("formats.json");
    let rows = file["boxes"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for row in rows {
        let sides = numbers(&row["sides"]);
        white(&folder, "p.png", [sides[0] as u32, sides[1] as u32]);
        let record = serde_json::json!({
            "messages": [
                {"role": "user", "content": "<image>Where?"},
                {"role": "assistant", "content": "<bbox>, <bbox>, <bbox>"},
            ],
            "images": ["p.png"],
            "objects": {"bbox": row["bbox"], "bbox_type": row["bbox_type"]},
        });
        let sample = encoder
            .measure(&in_folder(&record.to_string(), &folder))
            .expect("a sample");
        let written = row["written"].as_array().expect("boxes").iter();
        let written: Vec<String> = written
            .map(|numbers| numbers.to_string().replace(',', ", "))
            .collect();
        let expected = format!("{}<|im_end|>\n", written.join(", "));
        assert_eq!(
            trained(encoder.text(), &sample.text.labels),
            expected,
            "{row}"
        );
    }
}

/// The text of the labelled tokens.
fn trained(encoder: &TextEncoder, labels: &[i64]) -> String {
    let kept: Vec<u32> = labels
        .iter()
        .filter(|&&label| label != IGNORED)
        .map(|&label| label as u32)
        .collect();
    encoder.tokenizer().decode(&kept).expect("a text")
}

/// Each key that docs/tables/record-keys.md says is refused is refused by its name. The page is
/// compared with the crate's table by a test of that table.
#[test]
fn each_refused_key_is_named() {
    let page = folder::workspace().join("docs/tables/record-keys.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let mut refused = 0;
    for row in page.lines().filter(|line| line.contains("| refused")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        for key in cells[2].split(", ").map(|key| key.trim_matches('`')) {
            // Weights are refused unless 1; others with any value but an empty one.
            let stated = if cells[3].contains("a number") {
                "false"
            } else {
                "0.5"
            };
            let stated = format!(r#""{key}": {stated}"#);
            let question = r#""role": "user", "content""#;
            let (record, name) = match cells[1] {
                "record" => (
                    format!(
                        r#"{{"messages": [{{{question}: "q"}}, {{"role": "assistant", "content": "a"}}], {stated}}}"#
                    ),
                    key.to_owned(),
                ),
                "message" => (
                    format!(
                        r#"{{"messages": [{{{question}: "q"}}, {{"role": "assistant", "content": "a", {stated}}}]}}"#
                    ),
                    format!("messages[1].{key}"),
                ),
                _ => (
                    asked(&format!(
                        r#"{{"type": "video", "video": ["a.png"], "fps": 1, {stated}}}"#
                    )),
                    format!("messages[0].content[0].{key}"),
                ),
            };
            let error = one(&record).expect_err(&record).to_string();
            assert!(
                error.contains(&name) && !error.contains('\n'),
                "{record}: {error}"
            );
            refused += 1;
        }
    }
    assert!(refused >= 60, "{refused} keys");
}

/// Anthropic's parts: a picture in `source` is read or refused by name, and so are other parts.
#[test]
fn parts_of_anthropic_are_read_or_named() {
    let image = |source: &str| asked(&format!(r#"{{"type": "image", "source": {source}}}"#));
    let read = one(&image(
        r#"{"type": "base64", "media_type": "image/png", "data": "TWFu"}"#,
    ));
    assert_eq!(
        read.expect("a picture").images,
        [MediaSource::Bytes(b"Man".to_vec())]
    );
    for (record, named) in [
        (
            image(r#"{"type": "url", "url": "https://a.b/c.png"}"#),
            "https://a.b/c.png",
        ),
        (
            image(r#"{"type": "file", "file_id": "f"}"#),
            "messages[0].content[0]",
        ),
        (
            image(r#"{"type": "base64", "data": 5}"#),
            "messages[0].content[0]",
        ),
        (
            asked(r#"{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "t", "content": "10"}"#),
            "messages[0].content[1].type",
        ),
        (
            asked(r#"{"type": "tool_use", "name": "f"}"#),
            "messages[0].content[0].type",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}, {"type": "text", "text": "t"}]}]}"#.to_owned(),
            "messages[1].content[1]",
        ),
        (
            r#"{"question": "q", "answer": "a", "solution": "b"}"#.to_owned(),
            "\"solution\"",
        ),
    ] {
        let error = one(&record).expect_err(&record).to_string();
        assert!(error.contains(named), "{record}: {error}");
    }
}

/// Keys of two names of one thing: the format's own counts, and the other is a warning.
#[test]
fn the_own_name_of_a_question_or_answer_counts() {
    let talk = |record: &str| {
        let read = one(record).expect(record);
        let texts: Vec<String> = read.messages.iter().map(|message| message.text()).collect();
        (texts.join("|"), read.unread.join(" "))
    };
    for (record, expected) in [
        // The columns of tatsu-lab/alpaca.
        (
            r#"{"instruction": "q", "input": "", "output": "a", "text": "q a"}"#,
            ("q|a", "text"),
        ),
        (
            r#"{"query": "q", "question": "p", "response": "a", "answer": "b"}"#,
            ("q|a", "question answer"),
        ),
        (r#"{"input": "q", "answers": ["a"]}"#, ("q|a", "")),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "solution": "b"}"#,
            ("q|a", "solution"),
        ),
        (
            r#"{"images": [{"path": "p.png", "width": 3, "hight": 4}], "messages": [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}]}"#,
            ("q|a", "images[].hight"),
        ),
    ] {
        let (texts, unread) = talk(record);
        assert_eq!((&*texts, &*unread), expected, "{record}");
    }
    for (record, named) in [
        (r#"{"query": "q", "response": ""}"#, "empty"),
        (r#"{"question": "q", "answers": ["a", "b"]}"#, "answers"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "10"}]}, {"role": "assistant", "content": []}]}"#,
            "empty",
        ),
    ] {
        let error = one(record).expect_err(record).to_string();
        assert!(error.contains(named), "{record}: {error}");
    }
}

/// Records that earlier releases read wrongly without a word, and what is right.
#[test]
fn records_that_were_read_wrongly_are_read_rightly() {
    let folder = chatml("wrongly");
    white(&folder, "wide.png", [720, 1280]);
    let encoder = samples(&folder, 16);
    let encode = |record: &str| encoder.measure(&in_folder(record, &folder)).expect(record);
    // Row by row: what the project's own rule trains on.
    for (record, expected) in [
        (
            r#"{"conversations":[{"from":"human","value":"One?"},{"from":"gpt","value":"Wrong.","loss":false},{"from":"human","value":"Two?"},{"from":"gpt","value":"Right."}]}"#,
            "Right.<|im_end|>\n",
        ),
        (
            r#"{"messages":[{"role":"user","content":"One?"},{"role":"assistant","content":"Wrong.","loss_scale":0.0},{"role":"user","content":"Two?"},{"role":"assistant","content":"Right."}]}"#,
            "Right.<|im_end|>\n",
        ),
        (
            r#"{"messages":[{"role":"user","content":"One?"},{"role":"assistant","content":"Wrong.","weight":0},{"role":"user","content":"Two?"},{"role":"assistant","content":"Right.","weight":1}]}"#,
            "Right.<|im_end|>\n",
        ),
        (
            r#"{"image":"","conversations":[{"from":"human","value":"Capital of Peru?"},{"from":"gpt","value":"Lima."}]}"#,
            "Lima.<|im_end|>\n",
        ),
        (
            r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"score":NaN}"#,
            "a<|im_end|>\n",
        ),
    ] {
        assert_eq!(
            trained(encoder.text(), &encode(record).text.labels),
            expected,
            "{record}"
        );
    }
    let calls = encode(
        r#"{"messages":[{"role":"user","content":"Air?"},{"role":"tool_call","content":"{\"name\":\"air\",\"arguments\":{\"city\":\"B\"}}"},{"role":"tool_call","content":"{\"name\":\"air\",\"arguments\":{\"city\":\"S\"}}"},{"role":"tool_response","content":"10"},{"role":"tool_response","content":"72"},{"role":"assistant","content":"Good and fair."}]}"#,
    );
    let call = |city: &str| {
        format!(
            "<tool_call>\n{{\"name\": \"air\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>"
        )
    };
    let expected = format!(
        "{}\n{}<|im_end|>\nGood and fair.<|im_end|>\n",
        call("B"),
        call("S")
    );
    assert_eq!(trained(encoder.text(), &calls.text.labels), expected);
    // 320 x 576 pixels, where a part's max_pixels was ignored.
    let wide = encode(&asked(
        r#"{"type":"image","image":"wide.png","max_pixels":200704}"#,
    ));
    assert_eq!(wide.image_grids, [[1, 20, 36]]);
    let pads = wide
        .text
        .input_ids
        .iter()
        .filter(|id| encoder.text().pads().contains(id));
    assert_eq!(pads.count(), 180);

    for (record, named) in [
        (
            r#"{"messages":[{"role":"user","content":"<audio>Which bird?"},{"role":"assistant","content":"A wren."}],"audios":["bird.mp3"]}"#,
            "audios",
        ),
        (
            r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"label":false}"#,
            "label",
        ),
        (
            r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"chat_template_kwargs":{"max_pixels":1}}"#,
            "chat_template_kwargs",
        ),
        (
            r#"{"messages":[{"role":"user","content":"<video>q"},{"role":"assistant","content":"a"}],"videos":[{"frames":["a","b"],"fps":0}]}"#,
            "fps",
        ),
        (
            r#"{"system":"s","messages":[{"role":"system","content":"t"},{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#,
            "system",
        ),
        (
            r#"{"prompt":[{"role":"user","content":"q"}],"completion":[{"role":"tool","content":"10"},{"role":"assistant","content":"a"}]}"#,
            "completion[0].role",
        ),
    ] {
        let error = one(record).expect_err(record).to_string();
        assert!(error.contains(named), "{record}: {error}");
    }
    // A file of one indented object, such as dataset_info.json, is one error.
    let text = "{\n  \"alpaca\": {\n    \"file_name\": \"a.json\",\n    \"columns\": {}\n  },\n  \"b\": {}\n}\n";
    let found: Vec<_> = Conversations::new(text.as_bytes(), "", &FileOptions::default()).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].is_err());
}

/// A file of another kind is one error that names the kind, in a stream and in an index.
#[test]
fn binary_files_are_named() {
    let folder = Folder::new("binary");
    for (magic, name) in [
        (b"PAR1".as_slice(), "Parquet"),
        (b"ARROW1\0\0", "Arrow"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
    ] {
        let bytes = [magic, b"\x15\n\x15\n{\n".as_slice()].concat();
        let found: Vec<_> = Conversations::new(&bytes[..], "", &FileOptions::default()).collect();
        let [Err(error)] = &found[..] else {
            panic!("{name}: {found:?}");
        };
        assert!(error.to_string().contains(name), "{error}");
        folder.write(name, &bytes);
        let error = DataIndex::open(folder.0.join(name), FileOptions::default()).expect_err(name);
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// Paths are the user's, as SECURITY.md says: relative to each file or to the media folder, and
/// `..`, `data_path` and absolute ones are followed. Of several files, each has its own folder.
#[test]
fn paths_may_leave_the_folder_and_each_file_has_its_own() {
    let folder = family_folder("qwen3", "paths");
    let encoder = samples(&folder, 16);
    for (name, side) in [("a", 64), ("b", 96), ("media", 128)] {
        std::fs::create_dir_all(folder.0.join(name)).expect("a folder");
        white(&folder, &format!("{name}/p.png"), [side, side]);
    }
    white(&folder, "out.png", [160, 160]);
    let record = |path: &str, more: &str| {
        format!(
            r#"{{"conversations": [{{"from": "human", "value": "<image>q"}}, {{"from": "gpt", "value": "a"}}], "image": "{path}"{more}}}"#
        )
    };
    let absolute = folder.0.join("out.png").display().to_string();
    let lines = [
        record("p.png", ""),
        record("../out.png", ""),
        record(&absolute, ""),
        record("p.png", r#", "data_path": "../b""#),
    ];
    let open = |name: &str, media: Option<&str>| {
        let path = folder
            .0
            .join(name)
            .join(format!("{}.jsonl", media.unwrap_or("train")));
        std::fs::write(&path, lines.join("\n")).expect("a file");
        let mut options = FileOptions::default();
        options.media_folder = media.map(|media| folder.0.join(media));
        Arc::new(DataIndex::open(&path, options).expect("an index"))
    };
    let files = vec![open("a", None), open("b", None), open("b", Some("media"))];
    let set = DataSet::new(files).expect("a set");
    let mut reader = set.reader();
    let sides: Vec<usize> = (0..set.len())
        .map(|number| {
            let conversation = reader.read(number).expect("a record");
            let sample = encoder.measure(&conversation).expect("a sample");
            16 * sample.image_grids[0][1]
        })
        .collect();
    assert_eq!(
        sides,
        [64, 160, 160, 96, 96, 160, 160, 96, 128, 160, 160, 96]
    );
    let promise = std::fs::read_to_string(folder::workspace().join("SECURITY.md")).expect("a page");
    assert!(
        promise.contains("absolute ones and `..` are followed"),
        "the test holds this promise"
    );
}

/// All fixtures are listed with their hashes, so that none changes unnoticed.
#[test]
fn each_fixture_is_in_the_manifest() {
    let fixtures = fixture("..");
    let manifest = std::fs::read_to_string(fixtures.join("MANIFEST")).expect("MANIFEST");
    let mut listed = BTreeMap::new();
    for line in manifest.lines().skip(1) {
        let [file, hash, version, origin] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("{line}: expected four columns");
        };
        assert!(!version.is_empty() && !origin.is_empty(), "{line}");
        listed.insert(file.to_owned(), hash.to_owned());
    }
    let mut found = BTreeMap::new();
    for folder in ["parquet", "samples", "text"] {
        for entry in std::fs::read_dir(fixtures.join(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .expect("a name");
            let hash = Sha256::digest(std::fs::read(&path).expect("a file"));
            let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            found.insert(format!("{folder}/{name}"), hash);
        }
    }
    assert_eq!(
        listed, found,
        "write the hash into crates/vlm-data/tests/fixtures/MANIFEST"
    );
}
