//! Records with two answers to one prompt, or with a mark on their answer.

use super::Message;
use super::keys::{Fate, KEYS, Place, is_empty, note};
use super::media::wrong;
use crate::text::error::RecordProblem;
use crate::text::json::Json;

type Result<T> = std::result::Result<T, RecordProblem>;

/// The answers that a record must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answers {
    /// One per question, which the model imitates.
    #[default]
    One,
    /// Two to the last question, of which one is preferred.
    Pair,
    /// One with a mark: good or bad.
    Marked,
    /// Any of these.
    Any,
}

/// The second answer of a record to the question of its first.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherAnswer {
    /// The number of messages before either answer.
    pub prompt: usize,
    /// The messages of the answer.
    pub messages: Vec<Message>,
}

/// One of two answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    First,
    Second,
}

impl Side {
    /// The key of an answer that follows a prompt.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::First => "chosen",
            Self::Second => "rejected",
        }
    }
}

/// ms-swift's keys of what the second answer refers to; they must repeat those of the first.
const REPEATED: [[&str; 2]; 4] = [
    ["rejected_images", "images"],
    ["rejected_videos", "videos"],
    ["rejected_tools", "tools"],
    ["rejected_objects", "objects"],
];
/// The keys of a second answer.
const SECOND: [&str; 3] = ["rejected", "rejected_response", "rejected_messages"];
/// The keys of a mark: TRL and ms-swift, LLaMA-Factory.
const MARKS: [&str; 2] = ["label", "kto_tag"];

pub(super) fn has_second(record: &Json) -> bool {
    SECOND.iter().any(|key| has(record, key))
}

/// True for a record of both answers in keys of their own, with the prompt in a third or in both.
pub(super) fn is_pair(record: &Json) -> bool {
    let other = ["messages", "conversations", "instruction"];
    has(record, "chosen") && has(record, "rejected") && !other.iter().any(|key| has(record, key))
}

fn has(record: &Json, key: &str) -> bool {
    record.get(key).is_some_and(|value| !is_empty(value))
}

/// Returns the mark of a record, after a check that its answers are those that are expected.
///
/// # Errors
/// [`RecordProblem::Answers`]; [`RecordProblem::Value`] for pictures, videos, tools or objects of
/// one answer alone.
pub(super) fn check(
    record: &Json,
    expected: Answers,
    unread: &mut Vec<String>,
) -> Result<Option<bool>> {
    let wrong_answers = |expected, found: String| Err(RecordProblem::Answers { expected, found });
    let marked = MARKS.iter().find(|key| has(record, key));
    let mut mark = None;
    if let Some(key) = marked {
        match record.get(key) {
            Some(Json::Bool(is_good)) => mark = Some(*is_good),
            Some(Json::Int(0)) => mark = Some(false),
            Some(Json::Int(1)) => mark = Some(true),
            Some(Json::String(_)) if *key == "label" => note((*key).to_owned(), unread),
            Some(other) => return Err(wrong(key, "true or false", other)),
            None => {}
        }
    }
    let of_preferences = |key: &&super::keys::Key| {
        key.place == Place::Record
            && matches!(key.fate, Fate::Pair)
            && key.names.iter().any(|name| has(record, name))
    };
    let in_pairs = KEYS.iter().find(of_preferences);
    let in_pairs = in_pairs.and_then(|key| key.names.iter().find(|name| has(record, name)));
    match expected {
        Answers::One => {
            if let Some(key) = in_pairs {
                let found = format!("{key:?}, preference data");
                return wrong_answers("one answer to imitate", found);
            }
            if let (Some(key), Some(_)) = (marked, mark) {
                let found = format!("{key:?}, preference data (KTO) or data of a classifier");
                return wrong_answers("one answer to imitate", found);
            }
        }
        Answers::Pair if !has_second(record) => {
            let found = "one answer, without \"rejected\"".to_owned();
            return wrong_answers("two answers", found);
        }
        Answers::Marked if mark.is_none() || has_second(record) => {
            let found = match has_second(record) {
                true => "two answers",
                false => "no \"label\"",
            };
            return wrong_answers("an answer marked as good or bad", found.to_owned());
        }
        Answers::Pair | Answers::Marked | Answers::Any => {}
    }
    if has_second(record) {
        for [key, first] in REPEATED {
            if let Some(value) = record.get(key).filter(|value| !is_empty(value))
                && record.get(first) != Some(value)
            {
                return Err(RecordProblem::Value {
                    key: key.to_owned(),
                    expected: "the same as of the first answer, since both answer one prompt",
                    found: "others".to_owned(),
                });
            }
        }
        mark = None;
    }
    Ok(mark)
}

/// The prompt and one answer of texts without a template.
///
/// # Source
/// TRL 1.16, `data_utils.extract_prompt`: without a prompt, the answers' common start is it.
pub(super) fn plain(record: &Json, side: Side) -> Option<[String; 2]> {
    let text = |key| record.get(key).and_then(Json::as_str);
    let (first, second) = (text("chosen")?, text("rejected")?);
    let answer = match side {
        Side::First => first,
        Side::Second => second,
    };
    if let Some(prompt) = record.get("prompt").filter(|prompt| **prompt != Json::Null) {
        return Some([prompt.as_str()?.to_owned(), answer.to_owned()]);
    }
    let pairs = first.chars().zip(second.chars());
    let most = first.chars().count().min(second.chars().count());
    let same = pairs.take_while(|(one, other)| one == other).count();
    // Of equal texts, the last character is the answer; a space belongs to the word after it.
    let mut shared = same.min(most.saturating_sub(1));
    if shared > 0 && first.chars().nth(shared - 1) == Some(' ') {
        shared -= 1;
    }
    let prompt: String = first.chars().take(shared).collect();
    Some([prompt, answer.chars().skip(shared).collect()])
}

/// The second answer of two conversations.
///
/// # Errors
/// [`RecordProblem::NoSharedPrompt`] if they have no common start, or if one ends there.
pub(super) fn other(
    first: &[Message],
    second: Vec<Message>,
    stated: Option<usize>,
) -> Result<OtherAnswer> {
    let most = first.len().min(second.len()).saturating_sub(1);
    let same = first
        .iter()
        .zip(&second)
        .take_while(|(one, other)| one == other)
        .count();
    let prompt = stated.unwrap_or(same.min(most));
    if prompt == 0 || prompt > same || prompt > most {
        return Err(RecordProblem::NoSharedPrompt);
    }
    Ok(OtherAnswer {
        prompt,
        messages: second.into_iter().skip(prompt).collect(),
    })
}
