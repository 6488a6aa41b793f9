//! Prints what is read of files: `pixels [--allow-truncated] FILE...`, with a line per file of its
//! width, height and the SHA-256 of its RGB, or of the error.
//!
//! tests/fixtures/generate/jpeg.py compares them with Pillow.

use sha2::{Digest, Sha256};
use vlm_data::picture::{Picture, ReadOptions};

fn main() {
    let mut options = ReadOptions::default();
    for argument in std::env::args().skip(1) {
        if argument == "--allow-truncated" {
            options.allow_truncated = true;
            continue;
        }
        match Picture::open(&argument, &options) {
            Ok(picture) => {
                let hash: String = Sha256::digest(picture.rgb())
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect();
                println!("{}x{} {hash}", picture.width(), picture.height());
            }
            Err(error) => println!("error: {error}"),
        }
    }
}
