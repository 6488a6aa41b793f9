//! Tokenizers: a damaged tokenizer.json is read or refused, and any text has ids that begin at its
//! characters, in order.

#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use vlm_data::text::Tokenizer;

static FIXTURES: LazyLock<PathBuf> = LazyLock::new(|| {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/vlm-data/tests/fixtures/text")
});
static WHOLE: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_folder(&*FIXTURES).expect("a tokenizer"));
static FILE: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read(FIXTURES.join("tokenizer.json")).expect("a file"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    match bytes {
        // Bytes of the file are replaced: a place of two bytes and the new one.
        [0, changes @ ..] => {
            let mut file = FILE.clone();
            for change in changes.chunks_exact(3) {
                let place = usize::from(u16::from_le_bytes([change[0], change[1]]));
                let count = file.len();
                file[place % count] = change[2];
            }
            damaged(&file);
        }
        [1, file @ ..] => damaged(file),
        [_, text @ ..] => {
            if let Ok(text) = std::str::from_utf8(text) {
                encode(&WHOLE, text);
            }
        }
        [] => {}
    }
});

fn damaged(file: &[u8]) {
    let folder = PathBuf::from(format!("/dev/shm/vlm-data-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("tokenizer.json"), file).expect("a file");
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder) {
        encode(
            &tokenizer,
            "It's 12\u{301} <|im_start|>user\n\n  größer\u{3000}",
        );
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) {
    let Ok((ids, starts)) = tokenizer.encode_with_starts(text) else {
        return;
    };
    assert_eq!(ids.len(), starts.len());
    assert!(starts.is_sorted());
    assert!(starts.iter().all(|start| text.is_char_boundary(*start)));
    let _ = tokenizer.decode(&ids);
}
