//! Data files to samples: a record of any format is read or refused, and one that is read has
//! labels for all its tokens.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use vlm_data::text::format::{Conversations, Part};
use vlm_data::text::{
    ChatTemplate, EncodeOptions, FileOptions, Format, Grid, Grids, IGNORED, LabelRule, MediaStyle,
    Overlong, TextEncoder, Tokenizer, Trained, VideoGrid,
};

static ENCODER: LazyLock<TextEncoder> = LazyLock::new(|| {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/vlm-data/tests/fixtures/text");
    let tokenizer = Tokenizer::from_folder(&folder).expect("a tokenizer");
    let template = std::fs::read_to_string(folder.join("qwen3.jinja")).expect("a template");
    let template = ChatTemplate::new(&template).expect("a template");
    TextEncoder::new(tokenizer, template, MediaStyle::Qwen3, 2).expect("an encoder")
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [choice, file @ ..] = bytes else { return };
    let mut options = FileOptions::default();
    options.max_record_bytes = 4096;
    options.format = match choice % 8 {
        0 => Format::Messages,
        1 => Format::ShareGpt,
        2 => Format::Llava,
        3 => Format::Alpaca,
        _ => Format::Recognised,
    };
    let mut encode = EncodeOptions::default();
    encode.max_tokens = Some(1 << 12);
    encode.rule = [
        LabelRule::Qwen,
        LabelRule::LlamaFactory,
        LabelRule::Swift,
        LabelRule::Generation,
    ][usize::from(choice >> 3 & 3)];
    if choice >> 5 & 1 == 1 {
        encode.trained = Trained::LastTurn;
    }
    if choice >> 6 == 0 {
        encode.overlong = Overlong::DropOldestTurns;
    }
    let mut line = 1;
    for conversation in Conversations::new(file, "folder", &options) {
        let Ok(mut conversation) = conversation else {
            continue;
        };
        assert!(conversation.line >= line);
        line = conversation.line;
        let (images, videos) = (conversation.images.len(), conversation.videos.len());
        for part in conversation
            .messages
            .iter()
            .flat_map(|message| &message.parts)
        {
            match part {
                Part::Text(_) => {}
                Part::Image(index) => assert!(*index < images),
                Part::Video(index) => assert!(*index < videos),
            }
        }
        let written = conversation.write_objects(str::to_owned, |image, numbers| {
            assert!(image < images);
            format!("{numbers:?}")
        });
        if written.is_err() {
            continue;
        }
        let grid = Grid {
            time: 1,
            height: 2,
            width: 4,
        };
        let video = VideoGrid {
            grid,
            seconds: vec![0.5],
        };
        let (images, videos) = (vec![grid; images], vec![video; videos]);
        let grids = Grids {
            images: &images,
            videos: &videos,
        };
        if let Ok(sample) = ENCODER.encode(&conversation, grids, &encode) {
            assert_eq!(sample.input_ids.len(), sample.labels.len());
            assert!(sample.input_ids.len() <= 1 << 12);
            let pairs = || sample.input_ids.iter().zip(&sample.labels);
            assert!(pairs().all(|(id, label)| *label == IGNORED || label == id));
            assert!(pairs().any(|(_, label)| *label != IGNORED));
        }
    }
});
