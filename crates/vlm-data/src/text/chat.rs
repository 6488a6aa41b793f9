//! The marks of the assistant's turns in a rendered text.

use std::ops::Range;

use vlm_family::MediaStyle;

use super::error::{RecordProblem, Result, TextError};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;

/// The marks that a chat template writes around an answer.
#[derive(Debug)]
pub(super) struct Chat {
    /// The texts after which an answer begins.
    starts: &'static [&'static str],
    /// The texts that end it.
    ends: &'static [&'static str],
    /// The number of tokens after an answer that are trained on: its end, and what the template
    /// always writes after it. 0 if the end is the beginning of the next turn.
    pub(super) trained_after: usize,
}

/// Qwen's: `<|im_start|>assistant`, a line break, the answer, `<|im_end|>` and a line break.
static CHATML: Chat = Chat {
    starts: &["<|im_start|>assistant\n"],
    ends: &["<|im_end|>"],
    trained_after: 2,
};
/// GLM's. Only the role token of the next turn ends a turn.
static GLM: Chat = Chat {
    starts: &["<|assistant|>"],
    ends: &["<|user|>", "<|system|>", "<|assistant|>", "<|observation|>"],
    trained_after: 0,
};
/// Llama 3's. A call of a tool that the model runs itself ends with `<|eom_id|>`.
static LLAMA3: Chat = Chat {
    starts: &["<|start_header_id|>assistant<|end_header_id|>\n\n"],
    ends: &["<|eot_id|>", "<|eom_id|>"],
    trained_after: 1,
};
/// Mistral's and Llama 2's. The system text is part of a question.
static INSTRUCTION: Chat = Chat {
    starts: &["[/INST]", "[/TOOL_RESULTS]"],
    ends: &["</s>"],
    trained_after: 1,
};

/// The chats of models of text alone, each with the text in a template by which it is recognised.
static KNOWN: [(&str, &Chat); 3] = [
    ("<|im_start|>", &CHATML),
    ("<|start_header_id|>", &LLAMA3),
    ("[/INST]", &INSTRUCTION),
];

/// The strings that a tokenizer reads as marks of turns or pictures. Marks of boxes and thoughts
/// are not among them, since answers may contain them.
const RESERVED: [&str; 27] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "[INST]",
];

/// A turn of the assistant in a text, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The answer, without its end marks.
    pub(super) answer: Range<usize>,
    /// The end of the header; in GLM, before the line break that precedes the answer.
    pub(super) header_end: usize,
}

impl Chat {
    /// The chat of a family's pictures, or for text alone the one that a template writes, if known.
    pub(super) fn of(style: Option<MediaStyle>, template: &ChatTemplate) -> Option<&'static Self> {
        let is_written = |(mark, _): &&(&str, &Self)| template.source().contains(mark);
        match style {
            Some(MediaStyle::Qwen2 | MediaStyle::Qwen3) => Some(&CHATML),
            Some(MediaStyle::Glm) => Some(&GLM),
            None => KNOWN.iter().find(is_written).map(|(_, chat)| *chat),
        }
    }

    /// True if an answer ends with the beginning of the next turn, which the last one lacks.
    pub(super) fn is_open(&self) -> bool {
        self.trained_after == 0
    }

    /// The id of the first text that ends an answer.
    ///
    /// # Errors
    /// [`TextError::MissingToken`] if the tokenizer lacks it, or the first token of a turn.
    pub(super) fn end(&self, tokenizer: &Tokenizer) -> Result<u32> {
        let first = self.starts[0];
        let first = &first[..first.find(['>', ']']).map_or(first.len(), |end| end + 1)];
        // Older tokenizers of Mistral write it in letters.
        if first.starts_with('<') {
            added(tokenizer, first, "begins a turn")?;
        }
        added(tokenizer, self.ends[0], "ends a turn")
    }

    /// The strings that no text of a message may contain.
    pub(super) fn reserved(chat: Option<&Self>, tokenizer: &Tokenizer) -> Vec<String> {
        let own = chat.map_or(&[][..], |chat| chat.starts).iter();
        // Those in letters are no tokens.
        let own = own.filter(|mark| mark.starts_with('['));
        let added = RESERVED.iter().filter(|token| tokenizer.is_added(token));
        // Some folders name an ordinary character as the token of padding.
        let named = tokenizer.named_tokens().iter();
        let named = named.map(|(_, token)| token.as_str());
        let named = named.filter(|token| token.len() > 2);
        let all = own.chain(added).copied().chain(named);
        let mut reserved: Vec<_> = all.map(str::to_owned).collect();
        reserved.sort_unstable();
        reserved.dedup();
        reserved
    }

    /// The assistant's turns in a rendered text.
    pub(super) fn turns(&self, text: &str) -> Result<Vec<Turn>, RecordProblem> {
        let (mut turns, mut from) = (Vec::new(), 0);
        while let Some(header_end) = after_first(self.starts, text, from) {
            let rest = &text[header_end..];
            let ends = self.ends.iter().filter_map(|end| rest.find(end));
            let end = match ends.min() {
                Some(end) => end,
                None if self.is_open() => rest.len(),
                // A question at the end, or a result before another one.
                None if rest.is_empty() => break,
                None => {
                    let found = turns.len();
                    return Err(RecordProblem::Turns {
                        expected: found + 1,
                        found,
                    });
                }
            };
            from = header_end + end;
            // Results of several calls stand one after another.
            if after_first(self.starts, &text[..from], header_end).is_some() {
                from = header_end;
                continue;
            }
            let start = usize::from(self.is_open() && rest[..end].starts_with('\n'));
            turns.push(Turn {
                answer: header_end + start..from,
                header_end,
            });
        }
        Ok(turns)
    }
}

/// The end of the first of some marks in a text from a place on.
fn after_first(marks: &[&str], text: &str, from: usize) -> Option<usize> {
    let rest = &text[from..];
    let found = marks
        .iter()
        .filter_map(|mark| Some((rest.find(mark)?, mark.len())));
    found.min().map(|(at, length)| from + at + length)
}

/// The id of an added token.
///
/// # Errors
/// [`TextError::MissingToken`]
pub(super) fn added(
    tokenizer: &Tokenizer,
    token: &'static str,
    purpose: &'static str,
) -> Result<u32> {
    let id = tokenizer
        .token_id(token)
        .filter(|_| tokenizer.is_added(token));
    id.ok_or(TextError::MissingToken { token, purpose })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers<'a>(chat: &Chat, text: &'a str) -> Vec<&'a str> {
        let turns = chat.turns(text).expect("turns");
        turns
            .iter()
            .map(|turn| &text[turn.answer.clone()])
            .collect()
    }

    #[test]
    fn answers_stand_between_the_marks_of_their_template() {
        let chatml = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n";
        assert_eq!(answers(&CHATML, chatml), ["b"]);
        let glm = "[gMASK]<sop><|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd";
        assert_eq!(answers(&GLM, glm), ["b", "d"]);
        let header = "<|start_header_id|>assistant<|end_header_id|>\n\n";
        let llama = format!("{header}call<|eom_id|>{header}b<|eot_id|>");
        assert_eq!(answers(&LLAMA3, &llama), ["call", "b"]);
    }

    #[test]
    fn results_of_tools_and_a_last_question_are_no_answers_of_mistral() {
        let calls = "<s>[INST] a[/INST][TOOL_CALLS] [..]</s>";
        let results = "[TOOL_RESULTS] 1[/TOOL_RESULTS][TOOL_RESULTS] 2[/TOOL_RESULTS] b</s>";
        let text = format!("{calls}{results}[INST] c[/INST]");
        assert_eq!(answers(&INSTRUCTION, &text), ["[TOOL_CALLS] [..]", " b"]);
        let open = INSTRUCTION.turns("[INST] a[/INST] without an end");
        assert!(matches!(
            open,
            Err(RecordProblem::Turns { expected: 1, .. })
        ));
    }
}
