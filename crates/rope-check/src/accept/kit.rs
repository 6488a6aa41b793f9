//! Files that the program brings along: golden vectors of transformers, and a tiny model with
//! conversations about pictures.

use std::io;
use std::path::Path;

macro_rules! files {
    ($($folder:literal from $source:literal: $($name:literal)*;)*) => {
        &[$($((
            concat!($folder, "/", $name),
            include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../", $source, "/", $name)),
        ),)*)*]
    };
}

/// Each with its path in the kit.
const FILES: &[(&str, &[u8])] = files! {
    // A file for each pairing, several axes, a part of a head, and given angles.
    "golden" from "tests/fixtures":
        "deepseek_v4_trailing.safetensors" "ernie_image_per_channel.safetensors"
        "flux2_four_axes.safetensors" "gemma4_vision_quarter.safetensors"
        "glm46v_mrope_8_12_12_partial.safetensors" "kimi_k25_vision_wh.safetensors"
        "ltx2_split.safetensors" "qwen2_5_omni_fractional.safetensors"
        "qwen_image_centred.safetensors" "z_image_32_48_48.safetensors";
    "model" from "examples/shapes/model":
        "chat_template.jinja" "config.json" "preprocessor_config.json" "tokenizer.json"
        "tokenizer_config.json";
    "." from "examples/shapes": "train.jsonl";
    "pictures" from "examples/shapes/pictures":
        "train_01.png" "train_02.png" "train_03.png" "train_04.png" "train_05.png" "train_06.png"
        "train_07.png" "train_08.png" "train_09.png" "train_10.png" "train_11.png" "train_12.png";
};

/// Lines of the kit's conversations: the first of the example's, whose pictures it has.
const CONVERSATIONS: usize = 8;

/// Writes the kit into a folder.
///
/// # Errors
/// If a file cannot be written.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    for (name, bytes) in FILES {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        if name.ends_with(".jsonl") {
            let lines = bytes.split_inclusive(|byte| *byte == b'\n');
            let lines: Vec<&[u8]> = lines.take(CONVERSATIONS).collect();
            std::fs::write(path, lines.concat())?;
        } else {
            std::fs::write(path, bytes)?;
        }
    }
    Ok(())
}
