//! Token ids, rendered texts and labels against transformers, and what is refused.
//!
//! The expected values are in `fixtures/text`, written by `fixtures/generate/text.py`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vlm_data::text::format::{Conversations, Format, Frames, Part, Role, Source};
use vlm_data::text::{
    ChatTemplate, Conversation, EncodeOptions, Grid, Grids, IGNORED, LabelRule, MediaStyle,
    Overlong, ReadOptions, RecordProblem, RenderOptions, Result, Sample, TextEncoder, TextError,
    Tokenizer, Trained, VideoGrid, read,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/text")
        .join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).expect("fixture")).expect("JSON")
}

/// A folder of the test's own, which is removed behind it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.0.join(name), content).expect("a file");
        self
    }

    fn copy(&self, name: &str) -> &Self {
        self.write(name, fs::read(fixture(name)).expect("fixture"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// A checkpoint folder of a family, its template where that family has it.
fn family_folder(family: &str, test: &str) -> Folder {
    let folder = Folder::new(&format!("{test}_{family}"));
    let row = &json("families.json")[family];
    let template = fs::read_to_string(fixture(&format!("{family}.jinja"))).expect("template");
    let mut config = json("tokenizer_config.json");
    config["eos_token"] = row["eos_token"].clone();
    let place = row["template"].as_str().expect("a name");
    match place {
        "tokenizer_config.json" => config["chat_template"] = template.into(),
        "chat_template.json" => {
            let file = serde_json::json!({ "chat_template": template });
            folder.write(place, file.to_string());
            // Weaker than the other file, and not to be read.
            config["chat_template"] = "wrong".into();
        }
        _ => _ = folder.write(place, template),
    }
    let model = serde_json::json!({
        "model_type": row["model_type"],
        "vision_config": { "spatial_merge_size": 2 },
    });
    folder.write("config.json", model.to_string());
    folder
        .write("tokenizer_config.json", config.to_string())
        .copy("tokenizer.json");
    folder
}

fn compare_strings(tokenizer: &Tokenizer, file: &Value) -> (usize, usize) {
    let strings = file["strings"].as_array().expect("strings");
    let ids = file["ids"].as_array().expect("ids");
    assert_eq!(strings.len(), ids.len());
    let (mut total, mut wrong) = (0, Vec::new());
    for (text, expected) in strings.iter().zip(ids) {
        let text = text.as_str().expect("a string");
        let expected: Vec<u64> = expected
            .as_array()
            .expect("ids")
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        let (found, starts) = tokenizer.encode_with_starts(text).expect("ids");
        total += found.len();
        assert_eq!(found.len(), starts.len());
        assert!(starts.is_sorted() && starts.iter().all(|&start| text.is_char_boundary(start)));
        if !found
            .iter()
            .map(|&id| u64::from(id))
            .eq(expected.iter().copied())
        {
            wrong.push((text, found, expected));
        }
    }
    let shown: Vec<_> = wrong.iter().take(3).collect();
    assert!(
        wrong.is_empty(),
        "{} of {} strings differ: {shown:?}",
        wrong.len(),
        strings.len()
    );
    (strings.len(), total)
}

#[test]
fn strings_have_the_ids_of_transformers() {
    let file = json("strings.json");
    let folder = Folder::new("tokenizer_json");
    folder.copy("tokenizer.json").copy("tokenizer_config.json");
    let tokenizer = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    assert_eq!(compare_strings(&tokenizer, &file).0, 2000);
    assert_eq!(tokenizer.vocab_size(), 256 + 420 + 34);
}

/// The same tokenizer from vocab.json and merges.txt, its added tokens from tokenizer_config.json,
/// and from the older added_tokens.json.
#[test]
fn vocabulary_and_merges_are_the_same_tokenizer() {
    let file = json("strings.json");
    let folder = Folder::new("vocabulary");
    folder
        .copy("vocab.json")
        .copy("merges.txt")
        .copy("tokenizer_config.json");
    let tokenizer = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    compare_strings(&tokenizer, &file);

    let config = json("tokenizer_config.json");
    let added = config["added_tokens_decoder"]
        .as_object()
        .expect("tokens")
        .iter();
    let added: serde_json::Map<_, _> = added
        .map(|(id, token)| {
            let id: u32 = id.parse().expect("an id");
            (
                token["content"].as_str().expect("a token").to_owned(),
                id.into(),
            )
        })
        .collect();
    folder.write("added_tokens.json", Value::Object(added).to_string());
    folder.write("tokenizer_config.json", r#"{"eos_token": "<|im_end|>"}"#);
    let tokenizer = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    compare_strings(&tokenizer, &file);
}

/// `VLM_DATA_QWEN` is the folder that `text.py --qwen FOLDER` writes.
#[test]
#[ignore = "needs the tokenizer of Qwen2, which text.py rebuilds; set VLM_DATA_QWEN to its folder"]
fn the_tokenizer_of_qwen_has_the_ids_of_transformers() {
    let folder = PathBuf::from(std::env::var_os("VLM_DATA_QWEN").expect("VLM_DATA_QWEN"));
    let tokenizer = Tokenizer::from_folder(&folder).expect("a tokenizer");
    let bytes = fs::read(folder.join("strings.json")).expect("strings.json");
    let (strings, ids) =
        compare_strings(&tokenizer, &serde_json::from_slice(&bytes).expect("JSON"));
    println!("{strings} strings, {ids} ids");
    assert_eq!(tokenizer.token_id("<|im_start|>"), Some(151_644));
    assert_eq!(tokenizer.encode("assistant").expect("ids"), [77_091]);
}

/// `[[id, count], id, ...]` as ids.
fn unpacked(packed: &Value) -> Vec<i64> {
    let mut ids = Vec::new();
    for item in packed.as_array().expect("ids") {
        match item {
            Value::Array(run) => {
                let count = run[1].as_u64().expect("a count") as usize;
                ids.extend(std::iter::repeat_n(run[0].as_i64().expect("an id"), count));
            }
            id => ids.push(id.as_i64().expect("an id")),
        }
    }
    ids
}

/// Grids of a row: pictures and videos.
fn grids(row: &Value) -> (Vec<Grid>, Vec<VideoGrid>) {
    let grid = |value: &Value| {
        let side = |index: usize| value[index].as_u64().expect("a side") as u32;
        Grid {
            time: side(0),
            height: side(1),
            width: side(2),
        }
    };
    let video = |value: &Value| VideoGrid {
        grid: grid(&value["grid"]),
        seconds: value["seconds"]
            .as_array()
            .expect("times")
            .iter()
            .filter_map(Value::as_f64)
            .collect(),
    };
    let list = |key: &str| row["grids"][key].as_array().expect("grids").clone();
    (
        list("images").iter().map(grid).collect(),
        list("videos").iter().map(video).collect(),
    )
}

fn options(rule: LabelRule, last: bool) -> EncodeOptions {
    let mut options = EncodeOptions::default();
    options.rule = rule;
    options.trained = if last {
        Trained::LastTurn
    } else {
        Trained::AllTurns
    };
    options
}

#[test]
fn conversations_have_the_ids_and_labels_of_transformers() {
    let rows = json("conversations.json");
    let rows = rows.as_array().expect("rows");
    let conversations: Vec<Conversation> =
        read(fixture("conversations.jsonl"), &ReadOptions::default())
            .expect("the file")
            .collect::<Result<_>>()
            .expect("conversations");
    assert_eq!((rows.len(), conversations.len()), (40, 40));
    let (mut compared, mut refused) = (0, 0);
    let (mut encoder, mut family) = (None, String::new());
    for (row, conversation) in rows.iter().zip(&conversations) {
        let name = row["family"].as_str().expect("a family");
        if family != name {
            let folder = family_folder(name, "conversations");
            encoder = Some(TextEncoder::from_folder(&folder.0).expect("an encoder"));
            name.clone_into(&mut family);
        }
        let encoder = encoder.as_ref().expect("an encoder");
        let at = format!("line {} ({family})", conversation.line);
        let named = encoder.tokenizer().named_tokens();
        let rendered = encoder
            .template()
            .render_conversation(conversation, named, &RenderOptions::default())
            .expect("a text");
        assert_eq!(rendered.text, row["text"].as_str().expect("a text"), "{at}");
        let (images, videos) = grids(row);
        let grids = Grids {
            images: &images,
            videos: &videos,
        };
        let ids = unpacked(&row["ids"]);
        for (rule, expected) in row["rules"].as_object().expect("rules") {
            let known = match rule.as_str() {
                "qwen" => LabelRule::Qwen,
                "llama_factory" => LabelRule::LlamaFactory,
                "swift" => LabelRule::Swift,
                _ => LabelRule::Generation,
            };
            let last = row["last"].as_bool().expect("a choice");
            let found = encoder.encode(conversation, grids, &options(known, last));
            // GLM's rules in this crate end the last answer, the processor does not.
            let ids = expected.get("ids").map_or(ids.clone(), unpacked);
            let labels = expected_labels(&ids, expected);
            if labels.iter().all(|&label| label == IGNORED) {
                assert!(
                    matches!(problem(found), RecordProblem::NothingToTrain { .. }),
                    "{at}"
                );
                refused += 1;
                continue;
            }
            let found = found.unwrap_or_else(|error| panic!("{at} {rule}: {error}"));
            assert_eq!(found.input_ids, ids, "ids of {at}, {rule}");
            assert_eq!(found.labels, labels, "labels of {at}, {rule}");
            compared += 1;
        }
    }
    // Three rules of each conversation, and the tag of Qwen2.5's ten. In one the last answer is
    // masked, and three of the rules train on nothing.
    assert_eq!((compared, refused), (127, 3));
}

fn expected_labels(ids: &[i64], expected: &Value) -> Vec<i64> {
    let mut labels = vec![IGNORED; ids.len()];
    let bounds = expected["trained"].as_array().expect("spans");
    let bounds: Vec<usize> = bounds
        .iter()
        .filter_map(|at| Some(at.as_u64()? as usize))
        .collect();
    for span in bounds.chunks(2) {
        labels[span[0]..span[1]].copy_from_slice(&ids[span[0]..span[1]]);
    }
    for pair in expected
        .get("other_labels")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        labels[pair[0].as_u64().expect("a place") as usize] = pair[1].as_i64().expect("a label");
    }
    labels
}

fn problem<T: std::fmt::Debug>(result: Result<T>) -> RecordProblem {
    match result {
        Err(TextError::Record { problem, .. }) => *problem,
        other => panic!("expected a record's problem, found {other:?}"),
    }
}
