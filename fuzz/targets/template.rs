//! Chat templates: compiled and run to an end, or refused, whatever they loop over or allocate.

#![no_main]

use std::sync::LazyLock;

use vlm_data::text::format::Conversations;
use vlm_data::text::{ChatTemplate, Conversation, FileOptions, RenderOptions};

static CONVERSATION: LazyLock<Conversation> = LazyLock::new(|| {
    let record = br#"{"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>What is 1 + 1? <video>"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
        {"role": "user", "content": [{"type": "text", "text": "Call it."}]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function",
            "function": {"name": "f", "arguments": {"a": [1, 2.5, null, true, "x"]}}}]},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "done"}],
        "images": ["a.png"], "videos": [["a.png", "b.png"]], "tools": [{"name": "f"}]}"#;
    let record: Vec<u8> = record
        .iter()
        .copied()
        .filter(|byte| *byte != b'\n')
        .collect();
    let mut read = Conversations::new(&record[..], "", &FileOptions::default());
    read.next().expect("a record").expect("it is good")
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(source) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(template) = ChatTemplate::new(source) else {
        return;
    };
    let tokens = [("eos_token".to_owned(), "<|im_end|>".to_owned())];
    let Conversation {
        messages, tools, ..
    } = &*CONVERSATION;
    let rendered = template.render(messages, tools.as_ref(), &tokens, &RenderOptions::default());
    if let Ok(rendered) = rendered {
        assert!(rendered.text.len() <= 64 << 20);
        for range in rendered.generated {
            assert!(rendered.text.get(range).is_some());
        }
    }
});
