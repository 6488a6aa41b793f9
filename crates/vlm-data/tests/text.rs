//! Token ids, rendered texts and labels against transformers, and refused records.
//!
//! The expected values are in `fixtures/text`, written by `fixtures/generate/text.py`.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod folder;

use std::fs;
use std::path::{Path, PathBuf};

use folder::{Folder, family_folder, fixture, json};
use serde_json::Value;
use vlm_data::text::format::{Conversations, Format, Frames, MediaSource, Part, Role};
use vlm_data::text::{
    ChatTemplate, Conversation, EncodeOptions, FileOptions, Grid, Grids, IGNORED, LabelRule,
    MediaStyle, Overlong, RecordProblem, RenderOptions, Result, Sample, TextEncoder, TextError,
    Tokenizer, Trained, VideoGrid, read,
};

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

/// Llama's tokenizer begins a text that is no chat, as TRL lets it.
#[test]
fn a_text_begins_as_its_tokenizer_says() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/workflow");
    for (family, expected) in [("llama", Some("<|begin_of_text|>")), ("qwen2", None)] {
        let tokenizer = Tokenizer::from_folder(fixtures.join(family)).expect("a tokenizer");
        let expected = expected.and_then(|token| tokenizer.token_id(token));
        assert_eq!(tokenizer.begin(), expected.as_slice(), "{family}");
    }
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
        read(fixture("conversations.jsonl"), &FileOptions::default())
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

fn parse(records: &str, format: Format) -> Vec<Result<Conversation>> {
    let mut options = FileOptions::default();
    options.format = format;
    Conversations::new(records.as_bytes(), "base", &options).collect()
}

fn one(record: &str) -> Result<Conversation> {
    let mut all = parse(record, Format::Recognised);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn path(name: &str) -> MediaSource {
    MediaSource::Path(Path::new("base").join(name))
}

/// All tokens but those of pictures, videos and answers that are not trained on.
#[test]
fn everything_is_trained_on_but_pads_and_masked_answers() {
    let rows = json("conversations.json");
    let conversations = read(fixture("conversations.jsonl"), &FileOptions::default());
    let conversations = conversations
        .expect("the file")
        .map(|one| one.expect("one"));
    let (mut pictures, mut masked) = (0, 0);
    for (row, mut conversation) in rows.as_array().expect("rows").iter().zip(conversations) {
        let folder = family_folder(row["family"].as_str().expect("a family"), "conversations");
        let encoder = TextEncoder::from_folder(&folder.0).expect("an encoder");
        let (images, videos) = grids(row);
        let grids = Grids {
            images: &images,
            videos: &videos,
        };
        let mut everything = options(LabelRule::Qwen, false);
        everything.trained = Trained::Everything;
        for message in &mut conversation.messages {
            message.loss = None;
        }
        let Ok(answers) = encoder.encode(&conversation, grids, &options(LabelRule::Qwen, false))
        else {
            continue;
        };
        let sample = encoder
            .encode(&conversation, grids, &everything)
            .expect("a sample");
        for (id, label) in sample.input_ids.iter().zip(&sample.labels) {
            let is_pad = encoder.pads().contains(id);
            pictures += usize::from(is_pad);
            assert_eq!(*label, if is_pad { IGNORED } else { *id });
        }
        // Only the answers are masked.
        for message in &mut conversation.messages {
            message.loss = (message.role == Role::Assistant).then_some(false);
        }
        let sample = encoder
            .encode(&conversation, grids, &everything)
            .expect("a sample");
        for ((id, label), answer) in sample
            .input_ids
            .iter()
            .zip(&sample.labels)
            .zip(&answers.labels)
        {
            let is_pad = encoder.pads().contains(id);
            masked += usize::from(*answer != IGNORED);
            assert_eq!(
                *label,
                if is_pad || *answer != IGNORED {
                    IGNORED
                } else {
                    *id
                }
            );
        }
    }
    assert!(pictures > 0 && masked > 100, "{pictures} {masked}");
}

#[test]
fn formats_become_the_same_conversation() {
    let expected = one(
        r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
           {"type": "text", "text": "What?"}]}, {"role": "assistant", "content": "A cat."}]}"#
            .replace('\n', " ")
            .as_str(),
    )
    .expect("messages");
    assert_eq!(expected.images, [path("a.png")]);
    let user = &expected.messages[0];
    assert_eq!(
        (user.role, &user.parts[..]),
        (
            Role::User,
            &[Part::Image(0), Part::Text("What?".into())][..]
        )
    );
    for record in [
        r#"{"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}], "images": ["a.png"]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "image"}, "What?"]}, {"role": "assistant", "content": "A cat."}], "images": [{"path": "a.png"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://a.png"}}, {"type": "text", "text": "What?"}]}, {"role": "assistant", "content": "A cat."}]}"#,
        r#"{"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}], "images": "a.png"}"#,
        r#"{"conversations": [{"from": "human", "value": " <image>\n What?\n"}, {"from": "gpt", "value": "A cat."}], "image": "a.png"}"#,
        r#"{"instruction": "<image>What?", "input": "", "output": "A cat.", "images": ["a.png"]}"#,
    ] {
        assert_eq!(one(record).expect(record), expected, "{record}");
    }
}

#[test]
fn a_stated_format_is_taken() {
    let record = r#"{"conversations": [{"from": "human", "value": " a "}, {"from": "gpt", "value": " b "}]}"#;
    for (format, text) in [
        (Format::Recognised, " a "),
        (Format::ShareGpt, " a "),
        (Format::Llava, "a"),
    ] {
        let conversation = parse(record, format).remove(0).expect("a conversation");
        assert_eq!(conversation.messages[0].text(), text, "{format:?}");
        assert_eq!(conversation.messages[1].text(), " b ");
    }
    let error = parse(record, Format::Messages)
        .remove(0)
        .expect_err("no messages");
    assert_eq!(
        error.to_string(),
        "line 1: expected messages to be a list of messages, found null"
    );
}

#[test]
fn arrays_and_lines_are_streams_with_lines() {
    let record =
        |text: &str| format!(r#"{{"instruction": "{text}", "output": "[1, \"]}}\", 2]"}}"#);
    let (a, b) = (record("a"), record("b"));
    let bad = r#"{"instruction": 1, "output": "x"}"#;
    for (file, lines) in [
        (format!("{a}\n\n{bad}\r\n  {b}"), [1, 3, 4]),
        (format!("\u{feff}{a}\n{bad}\n\n{b}\n"), [1, 2, 4]),
        (format!("[{a},\n{bad}\n,\n\n{b}]"), [1, 2, 5]),
        (format!(" \n[\n{a}, {bad}, {b}\n]\n"), [3, 3, 3]),
    ] {
        let all = parse(&file, Format::Recognised);
        assert_eq!(all.len(), 3, "{file}: {all:?}");
        for (place, (result, line)) in all.iter().zip(lines).enumerate() {
            match result {
                Ok(conversation) => assert_eq!(conversation.line, line, "{file}"),
                Err(TextError::Record {
                    line: found,
                    problem,
                }) => {
                    assert_eq!((place, *found), (1, line), "{file}");
                    assert!(
                        matches!(**problem, RecordProblem::Value { .. }),
                        "{problem:?}"
                    );
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    for (file, before) in [
        (format!("[{a}, {b}"), 1),
        (format!("[{a} {b}]"), 1),
        (format!("[{a}] {b}"), 1),
        ("[".to_owned(), 0),
    ] {
        let mut all = parse(&file, Format::Recognised);
        let last = all.pop().expect("an error");
        assert!(
            matches!(last, Err(TextError::Stream { .. })),
            "{file}: {last:?}"
        );
        assert!(all.len() <= before + 1, "{file}: {all:?}");
    }
    assert!(parse("", Format::Recognised).is_empty());
    assert!(parse("[]", Format::Recognised).is_empty());
    assert!(matches!(
        problem(one("{\"a\": ")),
        RecordProblem::Json { .. }
    ));
    assert!(matches!(problem(one("3")), RecordProblem::Json { .. }));
}

#[test]
fn a_record_above_the_limit_is_skipped() {
    let long = format!(
        r#"{{"instruction": "{}", "output": "x"}}"#,
        "a".repeat(1000)
    );
    let short = r#"{"instruction": "a", "output": "x"}"#;
    let mut options = FileOptions::default();
    options.max_record_bytes = 100;
    for file in [format!("{long}\n{short}"), format!("[{long}, {short}]")] {
        let all: Vec<_> = Conversations::new(file.as_bytes(), "", &options).collect();
        assert_eq!(all.len(), 2);
        let [first, second] = <[_; 2]>::try_from(all).expect("two");
        assert_eq!(problem(first), RecordProblem::TooLarge { max_bytes: 100 });
        assert!(second.is_ok());
    }
}

#[test]
fn media_are_paths_bytes_and_frames() {
    let png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==";
    let record = format!(
        r#"{{"messages": [{{"role": "user", "content": "<image><image><image><video><video><video><video>"}},
        {{"role": "assistant", "content": "x"}}],
        "images": ["data:image/png;base64,{png}", "{png}", "/abs/a.png"],
        "videos": ["clip", ["1.png", "2.png"], {{"video": "clip2/", "fps": 12.5}}, "c.MP4"], "fps": 4}}"#
    )
    .replace('\n', " ");
    let conversation = one(&record).expect("a conversation");
    let MediaSource::Bytes(bytes) = &conversation.images[0] else {
        panic!("{conversation:?}");
    };
    assert!(bytes.starts_with(b"\x89PNG\r\n") && bytes.ends_with(b"IEND\xaeB`\x82"));
    assert_eq!(conversation.images[1], conversation.images[0]);
    assert_eq!(
        conversation.images[2],
        MediaSource::Path("/abs/a.png".into())
    );
    let videos: Vec<_> = conversation
        .videos
        .iter()
        .map(|video| (video.frames.clone(), video.fps))
        .collect();
    let folder = |name| Frames::Folder(Path::new("base").join(name));
    let list = Frames::List(vec![path("1.png"), path("2.png")]);
    assert_eq!(
        videos,
        [
            (folder("clip"), Some(4.0)),
            (list, Some(4.0)),
            (folder("clip2/"), Some(12.5)),
            (Frames::File(Path::new("base").join("c.MP4")), Some(4.0)),
        ]
    );
    let mut options = FileOptions::default();
    options.media_folder = Some("media".into());
    let record = r#"{"instruction": "<image>", "output": "x", "images": ["a.png"]}"#;
    let conversation = Conversations::new(record.as_bytes(), "base", &options)
        .next()
        .expect("one")
        .expect("one");
    assert_eq!(
        conversation.images,
        [MediaSource::Path("media/a.png".into())]
    );
}

/// Each problem of a record, by a record that has it, and the words of its message.
#[test]
fn each_wrong_record_says_what_is_wrong() {
    let ask = |messages: &str, more: &str| format!(r#"{{"messages": [{messages}]{more}}}"#);
    let user = r#"{"role": "user", "content": "q"}"#;
    let bot = r#"{"role": "assistant", "content": "a"}"#;
    let with = |content: &str, more: &str| {
        ask(
            &format!(r#"{{"role": "user", "content": "{content}"}}, {bot}"#),
            more,
        )
    };
    for (record, words) in [
        (
            r#"{"texts": "a", "b": 1}"#.to_owned(),
            r#"found "texts", "b"; rename"#,
        ),
        (
            ask(&format!(r#"{{"role": "boss", "content": "q"}}, {bot}"#), ""),
            r#"message 1 has the role "boss"; expected one of system, user"#,
        ),
        (
            r#"{"conversations": [{"from": "boss", "value": "q"}]}"#.to_owned(),
            r#"role "boss"; expected one of system, human"#,
        ),
        (
            ask(
                &format!(r#"{user}, {{"role": "system", "content": "s"}}, {bot}"#),
                "",
            ),
            "message 2 is a system message",
        ),
        (
            with("<image>", ""),
            "1 <image> placeholder, the record lists 0 images",
        ),
        (
            with("q", r#", "images": ["a"]"#),
            "0 <image> placeholders, the record lists 1 image;",
        ),
        (
            with("<image><video>", r#", "images": ["a"]"#),
            "1 <video> placeholder, the record lists 0 videos",
        ),
        (
            ask(
                &format!(r#"{user}, {{"role": "assistant", "content": "<image>a"}}"#),
                r#", "images": ["a"]"#,
            ),
            "message 2 (assistant) contains a picture or video",
        ),
        (
            ask(
                &format!(r#"{user}, {{"role": "assistant", "content": " \n"}}"#),
                "",
            ),
            "the answer in message 2 is empty",
        ),
        (
            ask(user, ""),
            "expected the last of 1 messages to be the assistant's, found user",
        ),
        (
            ask(&format!("{user}, {bot}, {user}"), ""),
            "last of 3 messages",
        ),
        (
            ask("", ""),
            "last of 0 messages to be the assistant's, found none",
        ),
        (
            ask(r#"{"role": "user"}"#, ""),
            "expected messages[0].content to be a text or a list of parts, found null",
        ),
        (
            ask(r#"{"content": "q"}"#, ""),
            "expected messages[0].role to be a text, found null",
        ),
        (ask("7", ""), "expected messages[0].role to be a text"),
        (
            ask(r#"{"role": "user", "content": [{"type": "smell"}]}"#, ""),
            r#"expected messages[0].content[0].type to be "text", "image", "image_url", "video", "tool_use" in an answer, or "tool_result" at the start of a question, found "smell""#,
        ),
        (
            ask(r#"{"role": "user", "content": [{}]}"#, ""),
            "a part with \"type\"",
        ),
        (
            ask(
                &format!(r#"{user}, {{"role": "assistant", "content": "a", "loss": "no"}}"#),
                "",
            ),
            "expected messages[1].loss to be true or false, found a string",
        ),
        (
            with("<image>", r#", "images": ["https://x.y/z.png"]"#),
            r#""https://x.y/z.png" is an address; download"#,
        ),
        (
            with("<image>", r#", "images": ["data:image/png;base64,!"]"#),
            "images[0] is not base64: a character outside",
        ),
        (
            with("<image>", r#", "images": ["data:image/png,x"]"#),
            "expected data:image/...;base64,...",
        ),
        (
            with("<image>", r#", "images": [""]"#),
            "expected images[0] to be a path, found an empty one",
        ),
        (
            with("<image>", r#", "images": [3]"#),
            "expected images[0] to be a path or base64, found a number",
        ),
        (
            with("<video>", r#", "videos": [[]]"#),
            "expected videos[0] to be frames, found an empty list",
        ),
        (
            with("<video>", r#", "videos": [{"frames": ["a"], "fps": 0}]"#),
            "expected fps to be a positive number of frames per second, found 0",
        ),
        (
            with(
                "<image>",
                r#", "images": ["a"], "objects": {"bbox": [[3, 1, 2, 4]]}"#,
            ),
            "box 0 is [3.0, 1.0, 2.0, 4.0]; expected",
        ),
        (
            with(
                "<image>",
                r#", "images": ["a"], "objects": {"bbox": [[1, 1, 2, 4]], "image_id": [1]}"#,
            ),
            "box 0 belongs to picture 1, the record has 1",
        ),
        (
            with("q", r#", "objects": 5"#),
            "expected objects to be an object",
        ),
        (
            with(
                "<image>",
                r#", "images": ["a"], "objects": {"bbox_type": "norm2", "bbox": []}"#,
            ),
            "objects.bbox_type",
        ),
        (
            with("q", r#", "tools": "[1""#),
            "expected tools to be a list of tools, found text that is not JSON",
        ),
        (
            r#"{"instruction": "q", "output": "a", "history": [["x"]]}"#.to_owned(),
            "expected history[0] to be a pair of texts",
        ),
        (
            r#"{"conversations": [{"from": "function_call", "value": "look()"}]}"#.to_owned(),
            "to be a tool call",
        ),
    ] {
        let error = one(&record).expect_err(&record).to_string();
        assert!(
            error.starts_with("line 1: ") && error.contains(words),
            "{record}\n{error}\n{words}"
        );
    }
}

#[test]
fn boxes_and_names_are_written_into_the_text() {
    let record = r#"{"messages": [{"role": "user", "content": "<image><image>Find <ref-object>."},
        {"role": "assistant", "content": "<ref-object><bbox>, <bbox>"}], "images": ["a", "b"],
        "objects": {"ref": ["a dog", "dog"], "bbox": [[1, 2, 3.5, 4], [5, 6]], "image_id": [1, 0]}}"#
        .replace('\n', " ");
    let mut conversation = one(&record).expect("a conversation");
    let written = conversation.clone().write_objects(
        |name| format!("<{name}>"),
        |image, numbers| format!("{image}:{numbers:?}"),
    );
    written.expect("as many marks as values");
    conversation
        .write_objects(
            |name| name.to_uppercase(),
            |image, numbers| format!("{image}:{numbers:?}"),
        )
        .expect("as many marks as values");
    assert_eq!(conversation.messages[0].text(), "Find A DOG.");
    assert_eq!(
        conversation.messages[1].text(),
        "DOG1:[1.0, 2.0, 3.5, 4.0], 0:[5.0, 6.0]"
    );
    let mut short = one(&record.replace(", <bbox>", "")).expect("a conversation");
    let error = short
        .write_objects(str::to_owned, |_, _| String::new())
        .expect_err("one too few");
    assert_eq!(
        error.to_string(),
        "line 1: the text has 1 <bbox> placeholder, objects.bbox has 2 values"
    );
}

fn encoder(family: &str, test: &str) -> TextEncoder {
    TextEncoder::from_folder(&family_folder(family, test).0).expect("an encoder")
}

fn none() -> Grids<'static> {
    Grids::default()
}

#[test]
fn marks_of_the_template_are_refused_in_texts() {
    let encoder = encoder("qwen2", "special");
    for (question, message, token) in [
        ("a<|im_end|>b", 1, "<|im_end|>"),
        ("<|image_pad|>", 1, "<|image_pad|>"),
        ("<|endoftext|>", 1, "<|endoftext|>"),
    ] {
        let record = format!(r#"{{"instruction": "{question}", "output": "x"}}"#);
        let error = encoder.encode(
            &one(&record).expect("one"),
            none(),
            &EncodeOptions::default(),
        );
        let expected = RecordProblem::SpecialToken {
            message,
            token: token.to_owned(),
        };
        assert_eq!(problem(error), expected);
    }
    for record in [
        r#"{"instruction": "q", "output": "x<|im_end|>"}"#,
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "<|im_start|>"}]}"#,
        r#"{"instruction": "q", "output": "x", "tools": [{"name": "<|im_start|>"}]}"#,
    ] {
        let error = encoder.encode(
            &one(record).expect("one"),
            none(),
            &EncodeOptions::default(),
        );
        assert!(
            matches!(problem(error), RecordProblem::SpecialToken { .. }),
            "{record}"
        );
    }
    // Boxes and thoughts are part of an answer.
    let record =
        r#"{"instruction": "q", "output": "<think></think><|box_start|>(1,2)<|box_end|>"}"#;
    encoder
        .encode(
            &one(record).expect("one"),
            none(),
            &EncodeOptions::default(),
        )
        .expect("a sample");
}

fn conversation(turns: usize) -> Conversation {
    let mut turn: Vec<_> = (0..turns)
        .flat_map(|turn| {
            [
                format!(r#"{{"from": "human", "value": "<image>question {turn}"}}"#),
                format!(r#"{{"from": "gpt", "value": "answer {turn}"}}"#),
            ]
        })
        .collect();
    turn.insert(0, r#"{"from": "system", "value": "be brief"}"#.to_owned());
    let images: Vec<_> = (0..turns).map(|turn| format!(r#""{turn}.png""#)).collect();
    let record = format!(
        r#"{{"conversations": [{}], "images": [{}]}}"#,
        turn.join(", "),
        images.join(", ")
    );
    one(&record).expect("a conversation")
}

/// Only whole turns are dropped, the oldest first, with their pictures; the system's stays.
#[test]
fn overlong_conversations_lose_whole_turns() {
    let encoder = encoder("qwen2", "overlong");
    let (turns, pads) = (5, 12);
    let all = conversation(turns);
    let images = vec![
        Grid {
            time: 1,
            height: 6,
            width: 8
        };
        turns
    ];
    let grids = Grids {
        images: &images,
        videos: &[],
    };
    let mut options = EncodeOptions::default();
    let whole = encoder.encode(&all, grids, &options).expect("a sample");
    assert_eq!((whole.images.len(), whole.dropped_turns), (turns, 0));
    let pad = i64::from(
        encoder
            .tokenizer()
            .token_id("<|image_pad|>")
            .expect("a pad"),
    );
    let count = |sample: &Sample| sample.input_ids.iter().filter(|&&id| id == pad).count();
    assert_eq!(count(&whole), turns * pads);

    // The expected lengths, without dropping: those of conversations of the last turns alone.
    let mut shorter = vec![whole.input_ids.len()];
    for dropped in 1..turns {
        let mut rest = all.clone();
        rest.messages.drain(1..1 + 2 * dropped);
        let sample = encoder.encode(&rest, grids, &options).expect("a sample");
        shorter.push(sample.input_ids.len());
    }
    for limit in 1..=whole.input_ids.len() + 1 {
        options.max_tokens = Some(limit);
        options.overlong = Overlong::Refuse;
        let refused = encoder.encode(&all, grids, &options);
        assert_eq!(refused.is_ok(), limit >= shorter[0], "{limit}");
        options.overlong = Overlong::DropOldestTurns;
        let found = encoder.encode(&all, grids, &options);
        let Some(dropped) = shorter.iter().position(|&tokens| tokens <= limit) else {
            let (tokens, dropped) = (shorter[turns - 1], turns - 1);
            let expected = RecordProblem::TooLong {
                tokens,
                max_tokens: limit,
                dropped,
            };
            assert_eq!(problem(found), expected);
            continue;
        };
        let found = found.expect("a sample");
        assert_eq!(
            (found.input_ids.len(), found.dropped_turns),
            (shorter[dropped], dropped)
        );
        assert_eq!(found.images, (dropped..turns).collect::<Vec<_>>());
        assert_eq!(count(&found), (turns - dropped) * pads);
        let text = encoder.tokenizer().decode(
            &found
                .input_ids
                .iter()
                .map(|&id| id as u32)
                .collect::<Vec<_>>(),
        );
        let text = text.expect("a text");
        assert!(text.starts_with("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"));
        assert!(
            text.contains(&format!("question {dropped}")) && text.ends_with("answer 4<|im_end|>\n")
        );
    }
}

#[test]
fn grids_that_do_not_fit_are_refused() {
    let encoder = encoder("qwen3", "grids");
    let all = conversation(1);
    let grid = |time, height, width| Grid {
        time,
        height,
        width,
    };
    let options = EncodeOptions::default();
    for (images, expected) in [
        (
            vec![],
            RecordProblem::Grids {
                kind: "images",
                media: 1,
                grids: 0,
            },
        ),
        (
            vec![grid(1, 2, 3)],
            RecordProblem::Grid {
                grid: [1, 2, 3],
                merge: 2,
            },
        ),
        (
            vec![grid(0, 2, 2)],
            RecordProblem::Grid {
                grid: [0, 2, 2],
                merge: 2,
            },
        ),
    ] {
        let found = encoder.encode(
            &all,
            Grids {
                images: &images,
                videos: &[],
            },
            &options,
        );
        assert_eq!(problem(found), expected);
    }
    // Refused before memory is taken for them.
    let huge = [grid(u32::MAX, u32::MAX - 1, u32::MAX - 1)];
    let found = encoder.encode(
        &all,
        Grids {
            images: &huge,
            videos: &[],
        },
        &options,
    );
    assert!(matches!(problem(found), RecordProblem::TooLong { .. }));
    let video = one(
        r#"{"messages": [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "x"}], "videos": ["v"]}"#,
    );
    let videos = [VideoGrid {
        grid: grid(3, 2, 2),
        seconds: vec![0.0, 1.0],
    }];
    let found = encoder.encode(
        &video.expect("one"),
        Grids {
            images: &[],
            videos: &videos,
        },
        &options,
    );
    assert_eq!(
        problem(found),
        RecordProblem::Times {
            frames: 3,
            times: 2
        }
    );
}

/// A template, two messages and a picture.
fn render(template: &str) -> std::result::Result<String, String> {
    let template = ChatTemplate::new(template).map_err(|error| error.to_string())?;
    let record = r#"{"conversations": [{"from": "human", "value": "hi <image>"}, {"from": "gpt", "value": "A 'b'\n"}], "images": ["a"],
        "tools": [{"z": 1.0, "a": [null, true, "<é\n>"]}]}"#;
    let conversation = one(&record.replace('\n', " ")).expect("a conversation");
    let rendered = template.render_conversation(&conversation, &[], &RenderOptions::default());
    rendered
        .map(|rendered| rendered.text)
        .map_err(|error| error.to_string())
}

/// Expected: the output of Jinja2 in transformers' environment.
#[test]
fn templates_print_what_python_prints() {
    for (template, text) in [
        (
            "{{ tools | tojson }}",
            r#"[{"z": 1.0, "a": [null, true, "<é\n>"]}]"#,
        ),
        (
            "{{ tools[0] | tojson(indent=2) }}",
            "{\n  \"z\": 1.0,\n  \"a\": [\n    null,\n    true,\n    \"<é\\n>\"\n  ]\n}",
        ),
        (
            "{{ tools | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
            r#"[{"a":[null,true,"<\u00e9\n>"],"z":1.0}]"#,
        ),
        ("{{ tools[0] }}", r"{'z': 1.0, 'a': [None, True, '<é\n>']}"),
        (
            "{{ none }} {{ true }} {{ 1e-5 }} {{ 3 }} {{ nothing }}|",
            "None True 1e-05 3 |",
        ),
        (
            "{{ messages[1].content.strip().split(' ')[-1].strip(\"'\") }}",
            "b",
        ),
        (
            "{{ messages[1].content.startswith('A') }}{{ 'abc'.removeprefix('a').upper() }}",
            "TrueBC",
        ),
        (
            "{% for k, v in tools[0].items() %}{{ k }}{% endfor %}",
            "za",
        ),
        (
            "{%- for m in messages[::-1] %}{{ m.role }}{% if loop.previtem is defined %}<{{ loop.previtem.role }}{% endif %} {% endfor %}",
            "assistant user<assistant ",
        ),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        (
            "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
            "3",
        ),
        (
            "{{ messages[0].content[0].type }}{{ 'image' in messages[0].content[1] }}",
            "textTrue",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        (
            "{{ strftime_now('%Y-%m-%d %d %B %Y %a %H:%M') }}",
            "1970-01-01 01 January 1970 Thu 00:00",
        ),
        ("{{ messages[1].content | trim | length }}", "5"),
        (
            r#"{% set a = "%}" %}{% set b, c = 1, a == '%}' %}{{ a }}{{ b }}{{ c }}"#,
            "%}1True",
        ),
        ("{# {% set x = #}{{ '{% set y = %}' }}{", "{% set y = %}{"),
        (
            "{%- macro m(a, b='(,', c=[1, 2]) -%}\n x{{ a }}{{ b }}{{ c[1] }}{{ d is defined }}\n{%- endmacro %}{{ m('p') }}{{ m('q', c='rs') }}",
            "xp(,2Falsexq(,sFalse",
        ),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x }}{%set y=2%}{{y}}",
            "a12",
        ),
        ("{{ '<&>' }}{{ '\\u00e9' }}", "<&>é"),
        (
            "x{% raw %}{% generation %}{% endraw %}",
            "x{% generation %}",
        ),
    ] {
        assert_eq!(render(template).as_deref(), Ok(text), "{template}");
    }
}

#[test]
fn generation_tags_mark_the_assistant() {
    let source = "{% for m in messages %}\n{{ m.role }}:\n{% if m.role == 'assistant' %}\n  {%- generation -%}\n  {{ m.content }}é{% endgeneration %}\n{% endif %}\n{% endfor %}";
    let template = ChatTemplate::new(source).expect("a template");
    assert!(template.has_generation());
    let record = r#"{"instruction": "\ufdd0", "output": "yes\ufdd1"}"#;
    let conversation = one(record).expect("one");
    let rendered = template
        .render_conversation(&conversation, &[], &RenderOptions::default())
        .expect("a text");
    assert_eq!(rendered.text, "user:\nassistant:\nyes\u{fdd1}é");
    let range = rendered.generated[0].clone();
    assert_eq!(
        (rendered.generated.len(), &rendered.text[range]),
        (1, "yes\u{fdd1}é")
    );
    let mut options = EncodeOptions::default();
    options.rule = LabelRule::Generation;
    let found = encoder("qwen2", "generation").encode(&conversation, none(), &options);
    assert_eq!(problem(found), RecordProblem::NoGenerationTag);
}

#[test]
fn templates_are_stopped_and_say_why() {
    for (template, words) in [
        (
            "{{ raise_exception('no ' ~ messages[0].role) }}",
            "it says: no user",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1000000 steps",
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "steps, or as much memory",
        ),
        ("{{ 'a' * 9999999999 }}", ""),
        ("{{ ('a' * 1000000) | replace('a', 'b' * 100000) }}", ""),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ""),
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
            "more than 1000000 steps",
        ),
        (
            "{% macro m(a, l=[1, ')']) %}{{ m(1, l + l) }}{% endmacro %}{{ m(1, [1]) }}",
            "more than 1000000 steps",
        ),
        (
            "{% for i in range(90) %}{{ 'a' * 1000000 }}{% endfor %}",
            "",
        ),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ strftime_now('%Q') }}", "does not know %Q"),
        ("{{ messages | tojson(indent=9999) }}", "indent"),
        ("{{ range | tojson }}", ""),
        ("{% if %}", "syntax error"),
        ("{% generation %}{% endgeneration", ""),
        ("{% endgeneration %}", "syntax"),
        ("{% include 'other' %}", ""),
    ] {
        let begun = std::time::Instant::now();
        let error = render(template).expect_err(template);
        assert!(error.contains(words), "{template}: {error}");
        assert!(
            begun.elapsed().as_secs() < 20,
            "{template} took {:?}",
            begun.elapsed()
        );
    }
}

#[test]
fn templates_that_drop_turns_or_pictures_are_refused() {
    let folder = family_folder("qwen2", "drops");
    let encode = |template: &str| {
        let tokenizer = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
        let template = ChatTemplate::new(template).expect("a template");
        let encoder =
            TextEncoder::new(tokenizer, template, MediaStyle::Qwen2, 2).expect("an encoder");
        let images = [Grid {
            time: 1,
            height: 2,
            width: 2,
        }; 2];
        let grids = Grids {
            images: &images,
            videos: &[],
        };
        problem(encoder.encode(&conversation(2), grids, &EncodeOptions::default()))
    };
    let last = "{% set m = messages[-1] %}<|image_pad|><|image_pad|><|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n";
    assert_eq!(
        encode(last),
        RecordProblem::Turns {
            expected: 2,
            found: 1
        }
    );
    let found = encode("{{ messages[0].content }}<|image_pad|>");
    assert_eq!(
        found,
        RecordProblem::Pads {
            pad: "<|image_pad|>",
            expected: 2,
            found: 1
        }
    );
    let open = "<|image_pad|><|image_pad|>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}";
    assert_eq!(
        encode(open),
        RecordProblem::Turns {
            expected: 1,
            found: 0
        }
    );
}

#[test]
fn folders_that_are_not_whole_are_refused() {
    let error = |folder: &Folder| {
        Tokenizer::from_folder(&folder.0)
            .expect_err("no tokenizer")
            .to_string()
    };
    let folder = Folder::new("broken");
    assert!(error(&folder).contains("has neither tokenizer.json nor vocab.json with merges.txt"));
    folder.copy("vocab.json");
    assert!(error(&folder).contains("has neither"));
    folder.write("merges.txt", "#version: 0.2\na");
    assert!(error(&folder).contains("line 2: expected two tokens"));
    // The two longest tokens have no merge: the tokenizers crate would panic.
    let mut tokens: Vec<_> = json("vocab.json")
        .as_object()
        .expect("tokens")
        .keys()
        .cloned()
        .collect();
    tokens.sort_by_key(|token| std::cmp::Reverse(token.len()));
    folder.write("merges.txt", format!("{} {}", tokens[0], tokens[1]));
    assert!(error(&folder).contains("which is not a token"));
    folder.copy("merges.txt").write(
        "tokenizer_config.json",
        r#"{"tokenizer_class": "LlamaTokenizer"}"#,
    );
    assert!(error(&folder).contains("expected tokenizer.json for the class LlamaTokenizer"));
    folder.write(
        "tokenizer_config.json",
        r#"{"added_tokens_decoder": {"5": {"content": "<|x|>"}}}"#,
    );
    assert!(error(&folder).contains("expected added token \"<|x|>\" to have id 5, found 676"));
    folder.write(
        "tokenizer_config.json",
        r#"{"added_tokens_decoder": {"x": {}}}"#,
    );
    assert!(error(&folder).contains("expected a token at \"x\""));
    folder.write("tokenizer_config.json", "{");
    assert!(error(&folder).contains("tokenizer_config.json: EOF"));
    folder.copy("tokenizer_config.json").write(
        "tokenizer.json",
        r#"{"model": {"type": "Unigram", "vocab": {}}}"#,
    );
    assert!(error(&folder).contains("type BPE"));

    let template = ChatTemplate::from_folder(&folder.0)
        .expect_err("no template")
        .to_string();
    assert!(template.contains("has no chat template"), "{template}");
    folder.write("chat_template.jinja", "a");
    assert_eq!(
        ChatTemplate::from_folder(&folder.0)
            .expect("a template")
            .source(),
        "a"
    );
    folder.write("chat_template.json", r#"{"chat_template": [{"name": "x", "template": "b"}, {"name": "default", "template": "c"}]}"#);
    assert_eq!(
        ChatTemplate::from_folder(&folder.0)
            .expect("a template")
            .source(),
        "c"
    );
    let encoder = |folder: &Folder| {
        TextEncoder::from_folder(&folder.0)
            .expect_err("no encoder")
            .to_string()
    };
    assert!(encoder(&folder).contains("config.json: it does not exist"));
    folder.write("config.json", r#"{"model_type": "llava"}"#);
    assert!(encoder(&folder).contains("model type \"llava\" is not supported"));
    folder
        .write("config.json", r#"{"model_type": "qwen2_vl"}"#)
        .copy("vocab.json");
    _ = fs::remove_file(folder.0.join("tokenizer.json"));
    folder.write("tokenizer_config.json", "{}");
    assert!(
        encoder(&folder)
            .contains("the tokenizer has no token \"<|im_start|>\", which begins a turn")
    );
}

/// The pattern looks ahead in white space, at which the engine gives up after a million steps.
#[test]
fn long_runs_of_spaces_are_cut_right_or_refused() {
    let tokenizer =
        Tokenizer::from_folder(family_folder("qwen2", "spaces").0.as_path()).expect("one");
    for space in [" ", "\t", "\u{3000}"] {
        let text = format!("a{}b", space.repeat(99_999));
        let (_, starts) = tokenizer.encode_with_starts(&text).expect("ids");
        // The last space belongs to the word after it, or is a token of its own.
        assert!(
            starts.contains(&(text.len() - 1 - space.len())),
            "{space:?}"
        );
    }
    let error = tokenizer
        .encode(&" ".repeat(100_001))
        .expect_err("too many")
        .to_string();
    assert!(
        error.contains("more than 100000 spaces in a row"),
        "{error}"
    );
}

/// Bytes of any kind are records or errors.
#[test]
fn no_bytes_make_the_reader_panic() {
    let file = fs::read(fixture("conversations.jsonl")).expect("fixture");
    let lines: Vec<&[u8]> = file
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .collect();
    let encoder = encoder("qwen3", "fuzz");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let pieces: [&[u8]; 12] = [
        b"\"", b"\\", b"{", b"}", b"[", b"]", b",", b"null", b"\xff", b"<image>", b"<video>",
        b"\\ud800",
    ];
    let mut options = EncodeOptions::default();
    options.overlong = Overlong::DropOldestTurns;
    let (mut read, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut bytes = lines[draw(lines.len())].to_vec();
        for _ in 0..=draw(2) {
            let at = draw(bytes.len() + 1);
            // Half of the changes take nothing away.
            let most = if draw(2) == 0 {
                0
            } else {
                (bytes.len() - at).min(30)
            };
            let end = at + draw(1 + most);
            bytes.splice(at..end, pieces[draw(pieces.len())].iter().copied());
        }
        if draw(4) == 0 {
            bytes.insert(0, b'[');
        }
        for result in Conversations::new(&bytes[..], "", &FileOptions::default()) {
            let Ok(conversation) = result else {
                refused += 1;
                continue;
            };
            read += 1;
            let images = vec![
                Grid {
                    time: 1,
                    height: 2,
                    width: 4
                };
                conversation.images.len()
            ];
            let grid = Grid {
                time: 2,
                height: 2,
                width: 2,
            };
            let videos = vec![
                VideoGrid {
                    grid,
                    seconds: vec![0.25, 1.25]
                };
                conversation.videos.len()
            ];
            options.max_tokens = Some(20 + draw(200));
            _ = encoder.encode(
                &conversation,
                Grids {
                    images: &images,
                    videos: &videos,
                },
                &options,
            );
        }
    }
    assert!(
        read > 100 && refused > 1000,
        "{read} read, {refused} refused"
    );
}

/// A video of Qwen3-VL is written with its times, which moves the text after it.
#[test]
fn generated_text_after_a_video_is_found() {
    let folder = family_folder("qwen3", "after");
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}<|video_pad|>{% endif %}<|im_end|>\n{% endfor %}";
    let tokenizer = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    let template = ChatTemplate::new(template).expect("a template");
    let encoder = TextEncoder::new(tokenizer, template, MediaStyle::Qwen3, 2).expect("an encoder");
    let turn =
        r#"{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "seen"}"#;
    let record = format!(r#"{{"messages": [{turn}, {turn}], "videos": ["a", "b"]}}"#);
    let grid = Grid {
        time: 2,
        height: 2,
        width: 4,
    };
    // Python writes 0.25 and 0.75 as 0.2 and 0.8, halves to even.
    let videos = vec![
        VideoGrid {
            grid,
            seconds: vec![0.25, 0.75]
        };
        2
    ];
    let grids = Grids {
        images: &[],
        videos: &videos,
    };
    let sample = encoder.encode(
        &one(&record).expect("one"),
        grids,
        &options(LabelRule::Generation, false),
    );
    let sample = sample.expect("a sample");
    let text = |ids: Vec<i64>| {
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        encoder.tokenizer().decode(&ids).expect("a text")
    };
    let trained = sample
        .labels
        .iter()
        .copied()
        .filter(|&label| label != IGNORED)
        .collect();
    assert_eq!(text(trained), "seenseen");
    let pads = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>";
    let turn = format!(
        "<|im_start|>user\n<0.2 seconds>{pads}<0.8 seconds>{pads}<|im_end|>\n<|im_start|>assistant\nseen<|im_end|>\n"
    );
    assert_eq!(text(sample.input_ids), turn.repeat(2));
}

/// A post-processor of bytes moves offsets after spaces; the labelled text begins before them.
#[test]
fn a_post_processor_does_not_move_tokens() {
    let plain = Tokenizer::from_folder(&family_folder("qwen2", "plain").0).expect("a tokenizer");
    let folder = family_folder("qwen2", "trimmed");
    let mut file = json("tokenizer.json");
    let post = r#"{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}"#;
    file["post_processor"] = serde_json::from_str(post).expect("JSON");
    file["truncation"] = serde_json::from_str(
        r#"{"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}"#,
    )
    .expect("JSON");
    folder.write("tokenizer.json", file.to_string());
    let trimmed = Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    for text in ["a  third one", "\n answer", " x"] {
        let (expected, found) = (
            plain.encode_with_starts(text),
            trimmed.encode_with_starts(text),
        );
        assert_eq!(found.expect("ids"), expected.expect("ids"), "{text:?}");
    }
}

/// The limit of steps is far above that of long conversations.
#[test]
fn a_conversation_of_a_thousand_turns_is_rendered() {
    let encoder = encoder("qwen3", "thousand");
    let images = vec![
        Grid {
            time: 1,
            height: 2,
            width: 2
        };
        1000
    ];
    let grids = Grids {
        images: &images,
        videos: &[],
    };
    let mut options = EncodeOptions::default();
    let sample = encoder
        .encode(&conversation(1000), grids, &options)
        .expect("a sample");
    assert_eq!(sample.images.len(), 1000);
    options.max_tokens = Some(1000);
    options.overlong = Overlong::DropOldestTurns;
    let sample = encoder
        .encode(&conversation(1000), grids, &options)
        .expect("a sample");
    assert!(
        sample.input_ids.len() > 900 && sample.dropped_turns > 900,
        "{}",
        sample.dropped_turns
    );
}

/// A tokenizer's file of any content gives a tokenizer or an error, and so does its encoding.
#[test]
fn no_tokenizer_file_makes_the_reader_panic() {
    let folder = Folder::new("mutated");
    let file = json("tokenizer.json");
    let mut places = Vec::new();
    pointers(&file, "", &mut places);
    // All that is not the vocabulary, and some of it.
    let is_entry =
        |place: &&String| place.starts_with("/model/vocab/") || place.starts_with("/model/merges/");
    let mut chosen: Vec<String> = places
        .iter()
        .filter(|place| !is_entry(place))
        .cloned()
        .collect();
    chosen.extend(places.iter().filter(is_entry).step_by(9).cloned());
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let values = [
        "0",
        "-1",
        "99999999999",
        "676",
        "4294967295",
        "1e9",
        "null",
        "true",
        "[]",
        "{}",
        "\"\"",
        "\"a\"",
        "\"é\"",
        "\"(\"",
        "\"a b\"",
        "[\"a\", \"b\"]",
        "{\"type\": \"NFKC\"}",
        "{\"type\": \"Whitespace\"}",
    ];
    let (mut built, mut refused) = (0, 0);
    for _ in 0..500 {
        let mut mutated = file.clone();
        for _ in 0..=draw(2) {
            // An earlier change may have taken the place away.
            if let Some(place) = mutated.pointer_mut(&chosen[draw(chosen.len())]) {
                let value = serde_json::from_str(values[draw(values.len())]).expect("JSON");
                // Mostly of the same type, so that some files are read.
                *place = match place {
                    Value::Bool(flag) if draw(4) > 0 => Value::Bool(!*flag),
                    Value::String(text) if draw(4) > 0 => {
                        Value::String(format!("{text}{}", draw(3)))
                    }
                    Value::Number(_) if draw(4) > 0 => draw(800).into(),
                    _ => value,
                };
            }
        }
        folder.write("tokenizer.json", mutated.to_string());
        match Tokenizer::from_folder(&folder.0) {
            Ok(tokenizer) => {
                built += 1;
                _ = tokenizer.encode("a <|im_end|> text é 12\n\n");
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        built > 20 && refused > 200,
        "{built} built, {refused} refused"
    );
}

/// The places of all values inside `value`.
fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
    let mut inner = |key: &str, value: &Value| {
        let place = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
        pointers(value, &place, out);
        out.push(place);
    };
    match value {
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| inner(&index.to_string(), item));
        }
        Value::Object(pairs) => pairs.iter().for_each(|(key, value)| inner(key, value)),
        _ => {}
    }
}

const TALK: &str =
    r#"{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}"#;

/// Keys that mean other data, and keys that would change the sample if they were ignored.
#[test]
fn keys_of_other_data_are_refused() {
    for (key, word) in [
        (r#""label": false"#, "preference"),
        (r#""label": 1"#, "classifier"),
        (r#""kto_tag": true"#, "preference"),
        (r#""rejected_response": "No.""#, "preference"),
        (
            r#""rejected_messages": [{"role": "assistant", "content": "No."}]"#,
            "preference",
        ),
        (r#""chosen": "a", "rejected": "b""#, "preference"),
        (r#""score_chosen": 0.5"#, "preference"),
        (r#""rewards": [1, 2]"#, "scores"),
        (r#""audios": ["a.mp3"]"#, "sound"),
        (r#""audio": "a.mp3""#, "sound"),
        (r#""loss_scale": 0.5"#, "not applied"),
        (r#""max_pixels": 50176"#, "not applied"),
        (
            r#""chat_template_kwargs": {"max_pixels": 50176}"#,
            "not applied",
        ),
    ] {
        let error = one(&format!(r#"{{"messages": [{TALK}], {key}}}"#)).expect_err(key);
        assert!(error.to_string().contains(word), "{key}: {error}");
    }
    for part in [
        r#"{"type": "input_audio", "input_audio": {"data": "x"}}"#,
        r#"{"type": "audio_url", "value": "a.mp3"}"#,
        r#"{"type": "image", "image": "a", "resized_height": 28}"#,
        r#"{"type": "video", "video": ["a", "b"], "video_start": 1.0}"#,
        r#"{"type": "video", "video": "a.mp4", "nframes": 8, "fps": 1}"#,
        r#"{"type": "video", "video": "a.mp4", "raw_fps": 30}"#,
    ] {
        let record = format!(
            r#"{{"messages": [{{"role": "user", "content": [{part}]}}, {{"role": "assistant", "content": "a"}}]}}"#
        );
        let found = problem(one(&record));
        let is_refused = matches!(
            found,
            RecordProblem::OtherData { .. } | RecordProblem::NotApplied { .. }
        );
        assert!(is_refused, "{part}: {found}");
    }
}

#[test]
fn keys_without_a_reader_are_listed() {
    let unread = |more: &str| {
        let record = one(&format!(r#"{{"messages": [{TALK}]{more}}}"#)).expect(more);
        record.unread
    };
    assert_eq!(unread(r#", "imgs": ["a"], "note": 1"#), ["imgs", "note"]);
    for key in ["text", "prompt", "history", "query", "output"] {
        assert_eq!(unread(&format!(r#", "{key}": "all of it""#)), [key]);
    }
    assert_eq!(unread(r#", "score": NaN"#), ["score"]);
    let none: [&str; 0] = [];
    assert_eq!(
        unread(r#", "id": 7, "source": "x", "audios": [], "label": null"#),
        none
    );
    let record = one(
        r#"{"messages": [{"role": "user", "content": "q", "mood": 1}, {"role": "assistant",
            "content": "a", "mood": 2}]}"#
            .replace('\n', "")
            .as_str(),
    );
    assert_eq!(record.expect("a record").unread, ["messages[].mood"]);
    // A part is of one kind.
    for (part, unread) in [
        (
            r#"{"type": "text", "text": "q", "image": "a.png"}"#,
            vec!["messages[].content[].image"],
        ),
        (
            r#"{"type": "image", "image": "a.png", "text": "q"}"#,
            vec!["messages[].content[].text"],
        ),
        (
            r#"{"type": "image", "image": "a.png", "text": "", "video": null}"#,
            vec![],
        ),
    ] {
        let record = one(&format!(
            r#"{{"messages": [{{"role": "user", "content": [{part}]}}, {{"role": "assistant", "content": "a"}}]}}"#
        ));
        assert_eq!(record.expect(part).unread, unread, "{part}");
    }
}

/// Each spelling of "not trained", in both spellings of a message.
#[test]
fn each_spelling_of_loss_is_read() {
    for [role, text, list, user, bot] in [
        ["role", "content", "messages", "user", "assistant"],
        ["from", "value", "conversations", "human", "gpt"],
    ] {
        for (key, loss) in [
            (r#""loss": false"#, Some(false)),
            (r#""loss": 0"#, Some(false)),
            (r#""loss": 1.0"#, Some(true)),
            (r#""train": false"#, Some(false)),
            (r#""training": true"#, Some(true)),
            (r#""weight": 0"#, Some(false)),
            (r#""loss_scale": 0.0"#, Some(false)),
            (r#""loss_weight": 0.0"#, Some(false)),
            (r#""loss": null"#, None),
            (r#""id": 3"#, None),
        ] {
            let record = format!(
                r#"{{"{list}": [{{"{role}": "{user}", "{text}": "q"}}, {{"{role}": "{bot}", "{text}": "a", {key}}}]}}"#
            );
            let read = one(&record).expect(key);
            assert_eq!(read.messages[1].loss, loss, "{record}");
        }
        for key in [
            r#""loss_scale": 2.0"#,
            r#""weight": 0.5"#,
            r#""loss": true, "weight": 0"#,
        ] {
            let record = format!(
                r#"{{"{list}": [{{"{role}": "{user}", "{text}": "q"}}, {{"{role}": "{bot}", "{text}": "a", {key}}}]}}"#
            );
            assert!(one(&record).is_err(), "{record}");
        }
    }
}

/// Records of one conversation in the formats of other projects.
#[test]
fn formats_of_other_projects_are_read() {
    let expected = one(
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
    )
    .expect("messages");
    for record in [
        r#"{"system": "s", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
        r#"{"system": "s", "query": "q", "response": "a"}"#,
        r#"{"system": "s", "conversation": [{"human": "q", "assistant": "a"}]}"#,
        r#"{"image": "", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#,
        r#"{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}"#,
        r#"{"messages": [{"role": "system", "content": [{"type": "text", "value": "s"}]}, {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0}, {"role": "assistant", "content": [{"type": "text", "value": "a"}]}]}"#,
    ] {
        let read = one(record).expect(record);
        let said = |conversation: &Conversation| -> Vec<_> {
            let messages = conversation.messages.iter();
            messages
                .map(|message| (message.role, message.text()))
                .collect()
        };
        assert_eq!(said(&read), said(&expected), "{record}");
    }
    let v1 = one(
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "q"}]}, {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}, {"type": "tool_call", "value": "{\"name\": \"f\", \"arguments\": {}}"}]}]}"#,
    )
    .expect("LLaMA-Factory v1");
    assert_eq!(v1.images, [path("a.png")]);
    let keys: Vec<_> = v1.messages[1]
        .extra
        .iter()
        .map(|(key, _)| key.as_str())
        .collect();
    assert_eq!(keys, ["reasoning_content", "tool_calls"]);
    let moved = one(
        r#"{"data_path": "d", "image": "a.png", "conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]}"#,
    );
    assert_eq!(moved.expect("data_path").images, [path("d/a.png")]);
    for record in [
        r#"{"system": "s", "messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
        r#"{"text": 5}"#,
    ] {
        assert!(one(record).is_err(), "{record}");
    }
}

/// ms-swift's documentation: calls in a row, and a thought before a call, are one answer.
#[test]
fn calls_in_a_row_are_one_turn() {
    let call = |city: &str| {
        format!(
            r#"{{"role": "tool_call", "content": "{{\"name\": \"air\", \"arguments\": {{\"city\": \"{city}\"}}}}"}}"#
        )
    };
    let (first, second) = (call("B"), call("S"));
    let rest = r#"{"role": "tool_response", "content": "10"}, {"role": "tool_response", "content": "72"}, {"role": "assistant", "content": "Good."}"#;
    for (before, turns) in [
        ("", 5),
        (
            r#"{"role": "assistant", "content": "<think>x</think>"}, "#,
            5,
        ),
    ] {
        let record = format!(
            r#"{{"messages": [{{"role": "user", "content": "Air?"}}, {before}{first}, {second}, {rest}]}}"#
        );
        let read = one(&record).expect("a record");
        assert_eq!(read.messages.len(), turns);
        let (_, calls) = &read.messages[1].extra[0];
        assert_eq!(calls.as_array().map(<[_]>::len), Some(2));
    }
}

#[test]
fn an_object_over_lines_is_one_error() {
    let text = "{\n  \"a\": {\n    \"b\": 1\n  },\n  \"c\": 2\n}\n";
    let found = parse(text, Format::Recognised);
    assert_eq!(found.len(), 1, "{found:?}");
    let error = found[0].as_ref().expect_err("no data").to_string();
    assert!(error.contains("over several lines"), "{error}");
}

/// Content that the template leaves out is named; it would be trained as an empty answer.
#[test]
fn content_that_is_not_rendered_is_named() {
    let folder = family_folder("qwen2", "unrendered");
    let tokenizer = || Tokenizer::from_folder(&folder.0).expect("a tokenizer");
    let encode = |template: &str, record: &str| {
        let template = ChatTemplate::new(template).expect("a template");
        let encoder = TextEncoder::new(tokenizer(), template, MediaStyle::Qwen2, 2);
        let encoder = encoder.expect("an encoder");
        encoder.encode(
            &one(record).expect(record),
            none(),
            &EncodeOptions::default(),
        )
    };
    let plain =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let user = r#"{"role": "user", "content": "Air?"}"#;
    let call = r#"{"role": "tool_call", "content": "{\"name\": \"air\", \"arguments\": {\"city\": \"B\"}}"}"#;
    let answer = r#"{"role": "assistant", "content": "Good."}"#;
    let thought = r#"{"role": "assistant", "content": "Good.", "reasoning_content": "hm, wind"}"#;
    let tools =
        r#", "tools": [{"type": "function", "function": {"name": "air", "parameters": {}}}]"#;
    let name = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}";
    for (template, messages, more, what) in [
        (
            plain,
            format!("{user}, {call}, {user}, {answer}"),
            "",
            "the answer",
        ),
        (
            name,
            format!("{user}, {call}, {user}, {answer}"),
            "",
            "an argument",
        ),
        (plain, format!("{user}, {thought}"), "", "the reasoning"),
        (plain, format!("{user}, {answer}"), tools, "the tool"),
        (
            &plain.replace("m.content", "m.content[:2]"),
            format!("{user}, {answer}"),
            "",
            "the text",
        ),
    ] {
        let record = format!(r#"{{"messages": [{messages}]{more}}}"#);
        match problem(encode(template, &record)) {
            RecordProblem::NotRendered { what: found, .. } => assert_eq!(found, what, "{record}"),
            other => panic!("{record}: {other}"),
        }
    }
    // Reasoning of an earlier turn is dropped on purpose, and counted.
    let record = format!(r#"{{"messages": [{user}, {thought}, {user}, {answer}]}}"#);
    assert_eq!(
        encode(plain, &record).expect("a sample").dropped_thoughts,
        1
    );
}

/// TRL tokenizes `text`, and `prompt` with `completion`, without a template, and ends with eos.
#[test]
fn plain_texts_are_trained_without_a_template() {
    let encoder = encoder("qwen2", "plain");
    let encode = |record: &str| {
        let conversation = one(record).expect(record);
        encoder
            .encode(&conversation, none(), &EncodeOptions::default())
            .expect(record)
    };
    let ids = |text: &str| -> Vec<i64> {
        let ids = encoder.tokenizer().encode(text).expect("ids");
        ids.into_iter().map(i64::from).collect()
    };
    let sample = encode(r#"{"text": "The cat sat."}"#);
    assert_eq!(sample.input_ids, ids("The cat sat.<|im_end|>"));
    assert_eq!(sample.labels, sample.input_ids);
    let sample = encode(r#"{"prompt": "The cat", "completion": " sat."}"#);
    assert_eq!(sample.input_ids, ids("The cat sat.<|im_end|>"));
    let prompt = ids("The cat").len();
    assert!(sample.labels[..prompt].iter().all(|&label| label == -100));
    assert_eq!(sample.labels[prompt..], sample.input_ids[prompt..]);
}

/// The bounds of a template made to do harm: 1 GiB, and 5 s, or 20 s where tests are not optimized.
const HARM_KIB: u64 = 1 << 20;
const HARM_SECONDS: f64 = if cfg!(debug_assertions) { 20.0 } else { 5.0 };

/// Templates made to do harm: each ends with an error of one line, or prints something small, and
/// none takes much time or memory. They run in a process of their own, whose memory is theirs.
#[test]
fn hostile_templates_end() {
    const CHILD: &str = "VLM_DATA_HOSTILE";
    let templates = json("hostile_templates.json");
    let templates = templates.as_array().expect("a list");
    assert!(templates.len() >= 100, "{} templates", templates.len());
    if std::env::var_os(CHILD).is_none() {
        let program = std::env::current_exe().expect("this program");
        let mut child = std::process::Command::new(program);
        child
            .args(["--exact", "hostile_templates_end", "--nocapture"])
            .env(CHILD, "1");
        let out = child.output().expect("a child");
        let (text, error) = (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr),
        );
        let ended = text.matches("template ended").count();
        assert!(
            out.status.success() && ended == templates.len(),
            "{text}\n{error}"
        );
        return;
    }
    // Elsewhere there is no such file, and only the time is bounded.
    let most_kib = || -> u64 {
        if !cfg!(target_os = "linux") {
            return 0;
        }
        let status = fs::read_to_string("/proc/self/status").expect("the status");
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM:"))
            .expect("VmHWM");
        line.split_whitespace()
            .nth(1)
            .and_then(|kib| kib.parse().ok())
            .expect("a number")
    };
    for (index, template) in templates.iter().enumerate() {
        let template = template.as_str().expect("a template");
        // The most memory from here on; of all templates so far where this is not allowed.
        _ = fs::write("/proc/self/clear_refs", "5");
        let begun = std::time::Instant::now();
        match render(template) {
            Ok(text) => assert!(text.len() < 1 << 20, "{index}: {} bytes", text.len()),
            Err(error) => {
                let is_line = !error.contains('\n') && error.len() < 1000;
                assert!(is_line, "{index} {template}: {error}");
            }
        }
        let (seconds, kib) = (begun.elapsed().as_secs_f64(), most_kib());
        println!("{index}: template ended after {seconds:.2} s, {kib} KiB");
        assert!(
            seconds < HARM_SECONDS,
            "{index} {template} took {seconds} s"
        );
        assert!(kib < HARM_KIB, "{index} {template} took {kib} KiB");
    }
}
