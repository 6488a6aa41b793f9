//! Accounts for the keys of a record: one row per key and place.
//!
//! A key that is in no row is reported with its lines; nothing is ignored without a word.

use crate::text::error::RecordProblem;
use crate::text::json::Json;

/// Where a key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A record.
    Record,
    /// An item of `messages` or `conversations`.
    Message,
    /// A part of a message's `content`.
    Part,
    /// `objects`.
    Objects,
}

/// What becomes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is read.
    Read,
    /// It is ignored, for this reason.
    Harmless(&'static str),
    /// The record is refused: the key means data of this kind, which cannot be trained.
    OtherData(&'static str),
    /// It is read, and the record refused unless the loss compares two answers.
    Pair,
    /// It is read, and the record refused unless the loss is of marked answers.
    Mark,
    /// The record is refused unless the weight is 1.
    Weight,
    /// The record is refused, with this remedy: ignoring the key would change the sample.
    NotApplied(&'static str),
}

/// A row: the names of a key in a place.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) place: Place,
    pub(crate) names: &'static [&'static str],
    pub(crate) fate: Fate,
    /// The project or document that defines the key.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "printed by the table of the page")
    )]
    pub(crate) source: &'static str,
}

const fn key(
    place: Place,
    names: &'static [&'static str],
    fate: Fate,
    source: &'static str,
) -> Key {
    Key {
        place,
        names,
        fate,
        source,
    }
}

const PREFERENCES: &str = "preference data under other keys than \"chosen\" and \"rejected\"";
const SOUND: &str = "sound";
const SCORES: &str = "scores of answers";

use Fate::{Harmless, Mark, NotApplied, OtherData, Pair, Read, Weight};
use Place::{Message, Objects, Part, Record};

/// All keys that are known.
#[rustfmt::skip]
pub(crate) const KEYS: &[Key] = &[
    key(Record, &["messages"], Read, "OpenAI fine-tuning format; ms-swift Custom-dataset; TRL dataset_formats"),
    key(Record, &["conversations"], Read, "LLaMA-Factory data/README (sharegpt); LLaVA Finetune_Custom_Data"),
    key(Record, &["conversation"], Read, "ms-swift Custom-dataset"),
    key(Record, &["instruction", "input", "output", "history"], Read, "LLaMA-Factory data/README (alpaca)"),
    key(Record, &["query", "response"], Read, "ms-swift Custom-dataset"),
    key(Record, &["prompt", "completion"], Read, "TRL dataset_formats (prompt-completion)"),
    key(Record, &["text"], Read, "TRL dataset_formats (language modeling); ms-swift ResponsePreprocessor"),
    key(Record, &["question", "problem", "answer", "targets", "target", "answer_key", "answers", "solution", "content"], Read, "ms-swift ResponsePreprocessor"),
    key(Record, &["system"], Read, "LLaMA-Factory data/README; ms-swift Custom-dataset"),
    key(Record, &["system_prompt"], Read, "ms-swift ResponsePreprocessor"),
    key(Record, &["images", "image"], Read, "LLaMA-Factory data/README; ms-swift; TRL; LLaVA"),
    key(Record, &["videos", "video"], Read, "LLaMA-Factory data/README; ms-swift; Qwen qwen-vl-finetune"),
    key(Record, &["fps"], Read, "this project's docs/data-text.md"),
    key(Record, &["tools"], Read, "OpenAI; LLaMA-Factory data/README; ms-swift; TRL"),
    key(Record, &["objects"], Read, "ms-swift Custom-dataset (grounding)"),
    key(Record, &["data_path"], Read, "Qwen qwen-vl-finetune data_processor.py"),
    key(Record, &["id", "_id", "idx", "index", "uid", "uuid", "question_id", "sample_id", "conversation_id", "prompt_id", "image_id", "video_id"], Harmless("names the record"), "LLaVA; InternVL; Hugging Face datasets"),
    key(Record, &["source", "dataset", "dataset_name", "data_source", "origin", "license", "url", "split", "file_name", "created", "timestamp", "model", "version"], Harmless("says where the record is from"), "Hugging Face datasets; LLaMA-Factory v1 (_dataset_name)"),
    key(Record, &["_dataset_name", "channel"], Harmless("groups records in logs"), "LLaMA-Factory v1; ms-swift (channel loss)"),
    key(Record, &["lang", "language", "category", "categories", "task", "task_type", "type", "domain", "difficulty", "tag", "tags", "num_turns"], Harmless("describes the record"), "Hugging Face datasets; InternVL"),
    key(Record, &["width", "height", "width_list", "height_list", "image_size"], Harmless("is read from the picture itself"), "InternVL chat data format"),
    key(Record, &["parallel_tool_calls"], Harmless("is a setting of a service"), "OpenAI fine-tuning format"),
    key(Record, &["extra_info", "meta", "metadata"], Harmless("describes the record"), "LLaMA-Factory v1; Hugging Face datasets"),
    key(Record, &["chosen", "rejected"], Pair, "TRL dataset_formats; LLaMA-Factory data/README"),
    key(Record, &["chosen_messages", "chosen_response", "chosen_msg", "rejected_msg", "chosen_prompt", "rejected_prompt"], OtherData(PREFERENCES), "LLaMA-Factory v1; ms-swift"),
    key(Record, &["rejected_response", "rejected_messages", "rejected_images", "rejected_videos", "rejected_tools", "rejected_objects"], Pair, "ms-swift Custom-dataset (RLHF)"),
    key(Record, &["rejected_audios"], OtherData(SOUND), "ms-swift Custom-dataset (RLHF)"),
    key(Record, &["preferred_output", "non_preferred_output"], OtherData(PREFERENCES), "OpenAI preference format"),
    key(Record, &["label"], Mark, "TRL dataset_formats; ms-swift Custom-dataset"),
    key(Record, &["kto_tag"], Mark, "LLaMA-Factory data/README"),
    key(Record, &["score_chosen", "score_rejected"], Pair, "TRL reward trainer; UltraFeedback"),
    key(Record, &["margin"], OtherData("the margin of a reward model's preference data"), "TRL reward trainer; ms-swift"),
    key(Record, &["labels", "completions"], OtherData("stepwise supervision"), "TRL dataset_formats"),
    key(Record, &["positive", "negative", "positive_messages", "negative_messages", "positive_images", "negative_images", "positive_videos", "negative_videos", "positive_audios", "negative_audios", "positive_tools", "negative_tools", "positive_objects", "negative_objects"], OtherData("pairs for an embedding"), "ms-swift Custom-dataset (embedding)"),
    key(Record, &["scores", "reward", "rewards"], OtherData(SCORES), "TRL; ms-swift (GRPO)"),
    key(Record, &["audios", "audio", "sound", "speech", "ref_audios", "audio_codes"], OtherData(SOUND), "LLaMA-Factory data/README; ms-swift"),
    key(Record, &["teacher_prompt", "teacher_images"], OtherData("distillation"), "ms-swift RowPreprocessor"),
    key(Record, &["target_probs", "omnijev_column_keys", "omnijev_video"], OtherData("scores of decisions"), "ms-swift RowPreprocessor"),
    key(Record, &["questions", "kinds", "options", "state", "question_ids", "criteria"], Harmless("says what \"target_probs\" is of"), "ms-swift RowPreprocessor"),
    key(Record, &["weight", "loss", "loss_scale", "loss_weight"], Weight, "ms-swift; LLaMA-Factory v1"),
    key(Record, &["chat_template_kwargs"], NotApplied("set the template's variables for the whole data set"), "TRL dataset_formats; ms-swift"),
    key(Record, &["functions"], NotApplied("rename it to \"tools\""), "OpenAI fine-tuning format (before tools)"),
    key(Record, &["min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels", "nframes", "min_frames", "max_frames", "video_start", "video_end"], NotApplied("write it into the part of the picture or video"), "qwen-vl-utils vision_process.py"),

    key(Message, &["role", "content"], Read, "OpenAI; ms-swift; TRL"),
    key(Message, &["from", "value"], Read, "LLaMA-Factory data/README (sharegpt); LLaVA"),
    key(Message, &["human", "user", "assistant", "gpt", "bot", "system"], Read, "ms-swift MessagesPreprocessor (pairs)"),
    key(Message, &["loss", "loss_scale"], Read, "ms-swift Custom-dataset"),
    key(Message, &["loss_weight"], Read, "LLaMA-Factory v1 rendering.py"),
    key(Message, &["weight"], Read, "OpenAI fine-tuning format"),
    key(Message, &["train", "training"], Read, "axolotl chat_template (message_field_training)"),
    key(Message, &["tool_calls", "function_call"], Read, "OpenAI"),
    key(Message, &["reasoning_content", "reasoning", "thinking"], Read, "transformers chat templates; TRL"),
    key(Message, &["name", "tool_call_id"], Harmless("is for the template, if it prints it"), "OpenAI"),
    key(Message, &["id", "index", "timestamp", "refusal"], Harmless("is not the message's text"), "Hugging Face datasets; OpenAI"),
    key(Message, &["train_detail", "training_detail"], NotApplied("split the message, or use \"loss\""), "axolotl chat_template (message_field_training_detail)"),
    key(Message, &["audio", "audios"], OtherData(SOUND), "OpenAI"),

    key(Part, &["type"], Read, "OpenAI; Hugging Face; ms-swift"),
    key(Part, &["text", "value", "reasoning", "thinking"], Read, "OpenAI; LLaMA-Factory v1 types.py"),
    key(Part, &["image", "image_url", "path", "url", "base64", "source"], Read, "OpenAI; Hugging Face; Anthropic"),
    key(Part, &["video", "video_url", "frames", "fps", "sample_fps"], Read, "Hugging Face; qwen-vl-utils"),
    key(Part, &["name", "input", "tool_use_id", "content"], Read, "Anthropic (tool_use, tool_result)"),
    key(Part, &["width", "height"], Harmless("is read from the picture itself"), "InternVL chat data format"),
    key(Part, &["is_error", "signature"], Harmless("is not the part's text"), "Anthropic"),
    key(Part, &["bytes", "data", "folder"], Read, "ms-swift; Hugging Face datasets; this project's docs/data-text.md"),
    key(Part, &["min_pixels", "max_pixels", "resized_height", "resized_width"], Read, "qwen-vl-utils vision_process.py"),
    key(Part, &["total_pixels"], Read, "qwen-vl-utils vision_process.py (videos)"),
    key(Part, &["nframes", "min_frames", "max_frames", "video_start", "video_end"], Read, "qwen-vl-utils vision_process.py (video files)"),
    key(Part, &["cache_control", "detail", "id", "index"], Harmless("is a setting of a service"), "OpenAI; Anthropic"),
    key(Part, &["raw_fps"], NotApplied("write \"sample_fps\""), "qwen-vl-utils vision_process.py"),
    key(Part, &["audio", "audio_url", "input_audio"], OtherData(SOUND), "OpenAI; LLaMA-Factory v1 types.py"),

    key(Objects, &["ref", "bbox", "image_id", "bbox_type"], Read, "ms-swift Custom-dataset (grounding)"),
    key(Objects, &["width", "height", "id"], Harmless("is read from the picture itself"), "ms-swift"),
];

/// True for values that are no values.
pub(super) fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::String(text) => text.is_empty(),
        Json::Array(items) => items.is_empty(),
        Json::Object(pairs) => pairs.is_empty(),
        _ => false,
    }
}

/// Checks each key of `value` against the table; keys without a row are added to `unread`.
pub(super) fn account(
    place: Place,
    value: &Json,
    at: &str,
    unread: &mut Vec<String>,
) -> Result<(), RecordProblem> {
    let Json::Object(pairs) = value else {
        return Ok(());
    };
    for (name, value) in pairs.iter().filter(|(_, value)| !is_empty(value)) {
        let is_named = |key: &&Key| key.place == place && key.names.contains(&name.as_str());
        let path = || match at {
            "" => name.clone(),
            at => format!("{at}.{name}"),
        };
        match KEYS.iter().find(is_named).map(|key| key.fate) {
            Some(Read | Harmless(_) | Pair | Mark) => {}
            Some(Weight) if value.as_f64() == Some(1.0) || *value == Json::Bool(true) => {}
            Some(Weight) => {
                return Err(RecordProblem::NotApplied {
                    key: path(),
                    remedy: "write it into the answers, as \"loss\": false, or remove the record",
                });
            }
            Some(OtherData(what)) => return Err(RecordProblem::OtherData { key: path(), what }),
            Some(NotApplied(remedy)) => {
                return Err(RecordProblem::NotApplied {
                    key: path(),
                    remedy,
                });
            }
            None => note(path(), unread),
        }
    }
    Ok(())
}

/// Adds a key to the unread ones, once for all items of a list.
pub(super) fn note(path: String, unread: &mut Vec<String>) {
    let mut general = String::with_capacity(path.len());
    let mut in_brackets = false;
    for c in path.chars() {
        in_brackets &= c != ']';
        if !in_brackets {
            general.push(c);
        }
        in_brackets |= c == '[';
    }
    if !unread.contains(&general) {
        unread.push(general);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: &str = "MROPE_WRITE_TABLES";

    #[test]
    fn each_key_has_one_row() {
        let mut seen = std::collections::BTreeSet::new();
        for key in KEYS {
            for name in key.names {
                assert!(seen.insert(format!("{:?} {name}", key.place)), "{name}");
            }
        }
    }

    /// The keys that ms-swift reads; see `tests/fixtures/generate/formats.py`.
    #[test]
    fn each_key_of_ms_swift_has_a_row() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/text/formats.json"
        );
        let file = std::fs::read(path).expect("a file");
        let file = Json::parse(&file).expect("JSON");
        let names = file.get("swift_keys").and_then(Json::as_array);
        let names = names.expect("names");
        assert!(names.len() > 60, "{}", names.len());
        for name in names {
            let is_named =
                |key: &&Key| key.place == Record && key.names.contains(&name.as_str().unwrap());
            assert!(KEYS.iter().any(|key| is_named(&key)), "{name:?}");
        }
    }

    #[test]
    fn the_page_lists_the_keys() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/tables/record-keys.md"
        );
        let mut rows = String::from(
            "# Keys of a record\n\nAll keys that `vlm-data` knows, and what becomes of each. A key \
             without a row is the warning\n`unread-key` of [the check](../data-check.md). Empty \
             values are no values.\n\n| place | key | what becomes of it | defined by |\n|---|---|---|---|\n",
        );
        for key in KEYS {
            let names: Vec<_> = key.names.iter().map(|name| format!("`{name}`")).collect();
            let fate = match key.fate {
                Read => "read".to_owned(),
                Harmless(reason) => format!("ignored: {reason}"),
                OtherData(what) => format!("refused: {what}"),
                Pair => "read with a loss of pairs, otherwise refused: preference data".to_owned(),
                Mark => {
                    "read with the loss `kto`, otherwise refused: preference data or data of a \
                         classifier"
                        .to_owned()
                }
                Weight => "refused unless 1".to_owned(),
                NotApplied(remedy) => format!("refused: {remedy}"),
            };
            let place = format!("{:?}", key.place).to_lowercase();
            rows += &format!(
                "| {place} | {} | {fate} | {} |\n",
                names.join(", "),
                key.source
            );
        }
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(path, rows).expect("the page can be written");
        } else {
            let page = std::fs::read_to_string(path).expect("the page is there");
            assert!(
                page == rows,
                "docs/tables/record-keys.md: run this test with {WRITE}=1"
            );
        }
    }
}
