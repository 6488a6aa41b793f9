//! Measures pictures per second: `speed FAMILY SECONDS FILE...`, with a line of JSON per file.
//!
//! Medians in seconds: `kept` is the time from pixels to patches in a reused buffer, `patches` in a
//! new buffer, and `file` the time from the file. benches/pictures.py compares them with
//! transformers.

use std::error::Error;
use std::time::{Duration, Instant};

use vlm_data::picture::{Family, Picture, PictureConfig, PictureProcessor, ReadOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [family, seconds, files @ ..] = &arguments[..] else {
        return Err("usage: speed FAMILY SECONDS FILE...".into());
    };
    let family = Family::of(family)?;
    let config = PictureConfig::of_family(family).ok_or("a family of text alone")?;
    let processor = PictureProcessor::new(config)?;
    let budget = Duration::from_secs_f64(seconds.parse()?);
    let options = ReadOptions::default();
    for path in files {
        let picture = Picture::open(path, &options)?;
        let patches = median(budget, || processor.patches(&picture).map(drop))?;
        let mut buffer = processor.patches(&picture)?.values;
        let kept = median(budget, || {
            processor.write_patches(&picture, &mut buffer).map(drop)
        })?;
        let file = median(budget, || {
            processor.patches(&Picture::open(path, &options)?).map(drop)
        })?;
        println!(
            "{}",
            serde_json::json!({ "kept": kept, "patches": patches, "file": file })
        );
    }
    Ok(())
}

/// The median time of repeated calls within a budget, after one uncounted call.
fn median<E>(budget: Duration, mut call: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    call()?;
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || start.elapsed() < budget {
        let before = Instant::now();
        call()?;
        times.push(before.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
