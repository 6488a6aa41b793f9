//! The input of `mrope verify`: a safetensors file or a JSON of cases is compared or refused, also
//! when its header, its shapes or its numbers are wrong.

#![no_main]

use std::path::Path;

use rope_check::buffer::DType;
use rope_check::engine::host_engines;
use rope_check::golden::{Artifact, GoldenVectors};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(vectors) = GoldenVectors::read(bytes) {
        let _ = vectors.compare_angles();
        let engines = host_engines();
        for dtype in [DType::F64, DType::F32, DType::Bf16] {
            for engine in [&engines[0], &engines[1]] {
                let _ = vectors.compare(&**engine, dtype);
            }
        }
    }
    if bytes.first() == Some(&b'{') {
        let _ = json(bytes);
    }
});

/// As the program reads it, from a file.
fn json(bytes: &[u8]) -> Option<()> {
    let path = format!("/dev/shm/mrope-fuzz-{}.json", std::process::id());
    let path = Path::new(&path);
    std::fs::write(path, bytes).ok()?;
    match Artifact::open(path).ok()? {
        Artifact::Tables(tables) => drop(tables.compare()),
        Artifact::Prompts(prompts) => drop(prompts.compare()),
        _ => {}
    }
    Some(())
}
