//! Records of two answers, or of a marked one, in each project's format.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vlm_data::check::{CheckOptions, check_data};
use vlm_data::text::format::{Answers, Conversations};
use vlm_data::text::{Conversation, DataIndex, FileOptions, IGNORED, Result, Role};
use vlm_data::{Cut, DataSet, MicroBatch, SampleEncoder, SampleOptions, SampleRows};

const USER: &str = r#"{"role": "user", "content": "What colour is it?"}"#;
const RED: &str = r#"{"role": "assistant", "content": "red"}"#;
const BLUE: &str = r#"{"role": "assistant", "content": "blue"}"#;

fn read(record: &str, answers: Answers) -> Result<Conversation> {
    let mut options = FileOptions::default();
    options.answers = answers;
    let mut read = Conversations::new(record.as_bytes(), "", &options);
    read.next().expect("a record")
}

fn expect_pair(record: &str) -> Conversation {
    read(record, Answers::Pair).unwrap_or_else(|error| panic!("{record}: {error}"))
}

/// TRL with and without a prompt, ms-swift, LLaMA-Factory's alpaca and sharegpt, UltraFeedback.
#[test]
fn each_format_gives_the_same_pair() {
    let sharegpt = r#"[{"from": "human", "value": "What colour is it?"}]"#;
    for record in [
        format!(r#"{{"prompt": [{USER}], "chosen": [{RED}], "rejected": [{BLUE}]}}"#),
        format!(r#"{{"chosen": [{USER}, {RED}], "rejected": [{USER}, {BLUE}]}}"#),
        format!(
            r#"{{"prompt": "What colour is it?", "chosen": [{USER}, {RED}], "rejected": [{USER}, {BLUE}], "score_chosen": 8, "score_rejected": 2}}"#
        ),
        format!(r#"{{"messages": [{USER}, {RED}], "rejected_response": "blue"}}"#),
        format!(r#"{{"messages": [{USER}, {RED}], "rejected_messages": [{USER}, {BLUE}]}}"#),
        format!(r#"{{"messages": [{USER}], "chosen": {RED}, "rejected": {BLUE}}}"#),
        r#"{"query": "What colour is it?", "response": "red", "rejected_response": "blue"}"#
            .to_owned(),
        r#"{"instruction": "What colour is it?", "input": "", "chosen": "red", "rejected": "blue"}"#
            .to_owned(),
        format!(
            r#"{{"conversations": {sharegpt}, "chosen": {{"from": "gpt", "value": "red"}}, "rejected": {{"from": "gpt", "value": "blue"}}}}"#
        ),
    ] {
        let found = expect_pair(&record);
        let other = found.other.expect("a second answer");
        let texts = [
            found.messages[..other.prompt].iter().map(|m| m.text()).collect::<String>(),
            found.messages[other.prompt..].iter().map(|m| m.text()).collect(),
            other.messages.iter().map(|m| m.text()).collect(),
        ];
        assert_eq!(texts, ["What colour is it?", "red", "blue"], "{record}");
        assert!(!found.plain && found.unread.is_empty(), "{record}: {:?}", found.unread);
        assert_eq!(other.messages[0].role, Role::Assistant);
    }
}

#[test]
fn texts_without_a_template_share_their_start() {
    for (record, expected) in [
        (
            r#"{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}"#,
            ["The sky is", " blue.", " green."],
        ),
        (
            r#"{"chosen": "The sky is blue.", "rejected": "The sky is green."}"#,
            ["The sky is", " blue.", " green."],
        ),
        (
            r#"{"chosen": "The sky is blue", "rejected": "The sky is black"}"#,
            ["The sky is bl", "ue", "ack"],
        ),
        (
            r#"{"chosen": "It is.", "rejected": "It is."}"#,
            ["It is", ".", "."],
        ),
    ] {
        let found = expect_pair(record);
        let other = found.other.expect("a second answer");
        let [prompt, chosen] = &found.messages[..] else {
            panic!("{record}");
        };
        let texts = [prompt.text(), chosen.text(), other.messages[0].text()];
        assert_eq!(texts, expected, "{record}");
        assert!(found.plain);
    }
}

#[test]
fn wrong_pairs_are_refused() {
    let asked = r#"{"role": "user", "content": "<image>What colour is it?"}"#;
    for (record, answers, expected) in [
        (
            format!(r#"{{"messages": [{USER}, {RED}]}}"#),
            Answers::Pair,
            "expected two answers, found one answer",
        ),
        (
            format!(r#"{{"messages": [{USER}, {RED}]}}"#),
            Answers::Marked,
            "found no \"label\"",
        ),
        (
            format!(r#"{{"messages": [{USER}, {RED}], "rejected_response": "blue"}}"#),
            Answers::Marked,
            "found two answers",
        ),
        (
            format!(r#"{{"messages": [{USER}, {RED}], "rejected_response": "blue"}}"#),
            Answers::One,
            "preference data",
        ),
        (
            format!(r#"{{"messages": [{USER}, {RED}], "label": 3}}"#),
            Answers::Any,
            "true or false",
        ),
        (
            format!(
                r#"{{"chosen": [{USER}, {RED}], "rejected": [{{"role": "user", "content": "Why?"}}, {BLUE}]}}"#
            ),
            Answers::Pair,
            "both answers must follow one prompt",
        ),
        (
            r#"{"chosen": "Yes.", "rejected": "No."}"#.to_owned(),
            Answers::Pair,
            "both answers must follow one prompt",
        ),
        (
            format!(
                r#"{{"messages": [{asked}, {RED}], "images": ["a.png"], "rejected_response": "blue", "rejected_images": ["b.png"]}}"#
            ),
            Answers::Pair,
            "rejected_images",
        ),
        (
            format!(
                r#"{{"prompt": [{USER}], "chosen": [{RED}], "rejected": [{{"role": "user", "content": "blue"}}]}}"#
            ),
            Answers::Pair,
            "the last of 1 messages to be the assistant's",
        ),
        (
            r#"{"text": "a", "rejected": "b"}"#.to_owned(),
            Answers::Pair,
            "one prompt",
        ),
    ] {
        let error = read(&record, answers).expect_err(&record).to_string();
        assert!(error.contains(expected), "{record}: {error}");
    }
}

fn shapes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes")
}

fn encoder(max_tokens: usize) -> SampleEncoder {
    let mut options = SampleOptions::default();
    options.encode.max_tokens = Some(max_tokens);
    SampleEncoder::from_folder(shapes().join("model"), options).expect("a folder")
}

fn set(answers: Answers, name: &str, records: &str) -> DataSet {
    let mut options = FileOptions::default();
    options.answers = answers;
    options.media_folder = Some(shapes());
    let path = std::env::temp_dir().join(format!("{name}-{}.jsonl", std::process::id()));
    std::fs::write(&path, records).expect("a file");
    Arc::new(DataIndex::open(&path, options).expect("an index")).into()
}

/// Both sequences have the prompt, its pictures once, and labels of their answers alone, with the
/// end of the turn.
#[test]
fn a_pair_is_one_sample_of_two_sequences() {
    let asked = r#"{"role": "user", "content": "<image>What colour is the figure?"}"#;
    let image = r#""images": ["pictures/colour_01.png"]"#;
    let record = format!(
        "{{\"prompt\": [{asked}], \"chosen\": [{RED}], \"rejected\": [{BLUE}], {image}}}\n"
    );
    let encoder = encoder(512);
    let set = set(Answers::Pair, "pair", &record.repeat(2));
    let sample = encoder
        .encode_record(&mut set.reader(), 0, true)
        .expect("a sample");
    let pair = sample.text.pair.expect("a pair");
    let ids = &sample.text.input_ids;
    let (first, second) = ids.split_at(pair.second);
    let starts = [pair.answers[0], pair.answers[1] - pair.second];
    assert_eq!(first[..starts[0]], second[..starts[1]], "one prompt");
    let tokenizer = encoder.text().tokenizer();
    for (answer, text) in pair.answers.iter().zip(["red", "blue"]) {
        let labels = sample.text.labels[*answer..].iter();
        let labels: Vec<u32> = labels
            .take_while(|label| **label != IGNORED)
            .map(|label| *label as u32)
            .collect();
        let found = tokenizer.decode(&labels).expect("a text");
        assert_eq!(found.trim_end(), format!("{text}<|im_end|>"));
    }
    let [[_, height, width]] = sample.image_grids[..] else {
        panic!("one picture, {:?}", sample.image_grids);
    };
    let channels = encoder.media().expect("it sees").pictures.channels();
    assert_eq!(sample.image_patches.len(), height * width * channels);

    let cut = Cut::Padded {
        tokens: 2 * sample.room(Cut::Padded { tokens: 0 }),
    };
    let micro = MicroBatch::new(vec![sample.clone(), sample.clone()], cut).expect("it fits");
    assert!(matches!(micro.rows, SampleRows::Padded { rows: 4, .. }));
    assert_eq!(micro.shown, Some([vec![0, 0, 1, 1], Vec::new()]));
    assert_eq!(micro.image_grids.len(), 4);
    assert_eq!(micro.patch_rows(), [2 * height * width, 0]);
    assert_eq!(micro.lines, [1; 4]);
    assert_eq!(micro.sample_lines().collect::<Vec<_>>(), [1, 1]);
    let row = micro.input_ids.len() / 4;
    for (index, pair) in micro.pairs.iter().enumerate() {
        assert_eq!(pair.second, (2 * index + 1) * row);
        assert_eq!(
            pair.answers,
            [2 * index * row + starts[0], pair.second + starts[1]]
        );
    }
    let error = self::encoder(2 * first.len() - 1);
    let error = error
        .encode_record(&mut set.reader(), 0, false)
        .expect_err("too long");
    assert!(error.is_too_long(), "{error}");
}

/// The second sequence of a marked answer is its prompt with the answer of the record before.
#[test]
fn a_marked_answer_borrows_that_of_the_record_before() {
    let records = format!(
        "{{\"prompt\": [{USER}], \"completion\": [{RED}], \"label\": true}}\n\
         {{\"messages\": [{USER}, {BLUE}], \"label\": false}}\n\
         {{\"instruction\": \"Why?\", \"output\": \"one\", \"kto_tag\": true}}\n"
    );
    let (encoder, set) = (encoder(512), set(Answers::Marked, "marked", &records));
    let tokenizer = encoder.text().tokenizer();
    let mut reader = set.reader();
    for (record, is_good, answers) in [
        (0, true, ["red", "one"]),
        (1, false, ["blue", "red"]),
        (2, true, ["one", "blue"]),
    ] {
        let sample = encoder
            .encode_record(&mut reader, record, true)
            .expect("a sample");
        let pair = sample.text.pair.expect("two sequences");
        assert_eq!(pair.is_good, Some(is_good));
        for (start, text) in pair.answers.into_iter().zip(answers) {
            let id = sample.text.labels[start] as u32;
            assert_eq!(tokenizer.decode(&[id]).expect("a text"), text);
        }
    }
}

#[test]
fn the_check_reports_pairs() {
    let records = format!(
        "{{\"prompt\": [{USER}], \"chosen\": [{RED}], \"rejected\": [{BLUE}]}}\n\
         {{\"prompt\": [{USER}], \"chosen\": [{RED}], \"rejected\": [{RED}]}}\n\
         {{\"chosen\": [{USER}, {RED}], \"rejected\": [{BLUE}]}}\n"
    );
    let mut options = FileOptions::default();
    options.answers = Answers::Any;
    let read = Conversations::new(records.as_bytes(), "", &options);
    let report = check_data(read, &encoder(512), CheckOptions::default(), &|_, _| {});
    let found: Vec<_> = report
        .findings
        .iter()
        .map(|findings| (findings.kind, findings.lines.clone()))
        .collect();
    assert_eq!(
        found,
        [("pair-prompt", vec![3]), ("equal-answers", vec![2])]
    );
    assert_eq!(report.samples.len(), 2);
}
