//! Prints what is read of files: `pixels [OPTIONS] FILE...`, with a line per file of its width,
//! height and the SHA-256 of its RGB, or of the error.
//!
//! | option | effect |
//! |---|---|
//! | `--allow-truncated` | cut-off JPEG files are read |
//! | `--patches FOLDER` | two more lines per file: grid and SHA-256 of the patches of the folder's processor, with torchvision and with PIL; may be repeated |
//! | `--cuts N,N,...` | instead, a line for the first N bytes of each file |
//!
//! tests/fixtures/generate has the scripts that compare these with Pillow and transformers: jpeg.py,
//! processors.py and cuts.py.

use std::error::Error;

use sha2::{Digest, Sha256};
use vlm_data::Result;
use vlm_data::picture::{Backend, Picture, PictureConfig, PictureProcessor, ReadOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = ReadOptions::default();
    let (mut processors, mut cuts) = (Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--allow-truncated" => options.allow_truncated = true,
            "--cuts" => {
                let ends = arguments.next().ok_or("no lengths")?;
                let ends = ends.split(',').map(str::parse::<usize>);
                cuts = Some(ends.collect::<Result<Vec<_>, _>>()?);
            }
            "--patches" => {
                let folder = arguments.next().ok_or("no folder")?;
                for backend in [Backend::Torchvision, Backend::Pil] {
                    let config = PictureConfig {
                        backend,
                        ..PictureConfig::from_folder(&folder)?
                    };
                    processors.push(PictureProcessor::new(config)?);
                }
            }
            file => match &cuts {
                Some(ends) => {
                    let bytes = plain_files::read(file.as_ref(), u64::MAX)?;
                    for &end in ends {
                        let start = bytes.get(..end).ok_or("a file is shorter")?;
                        println!("{}", pixels(&Picture::decode(start, &options)));
                    }
                }
                None => {
                    let picture = Picture::open(file, &options);
                    println!("{}", pixels(&picture));
                    for processor in &processors {
                        println!("{}", patches(&picture, processor));
                    }
                }
            },
        }
    }
    Ok(())
}

fn pixels(read: &Result<Picture>) -> String {
    match read {
        Ok(picture) => {
            let [width, height] = [picture.width(), picture.height()];
            format!("{width}x{height} {}", hash(picture.rgb()))
        }
        Err(error) => format!("error: {error}"),
    }
}

fn patches(read: &Result<Picture>, processor: &PictureProcessor) -> String {
    let Ok(picture) = read else {
        return "error: no picture".to_owned();
    };
    match processor.patches(picture) {
        Ok(patches) => {
            let values = patches.values.iter();
            let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
            let [time, height, width] = patches.grid;
            format!("{time}x{height}x{width} {}", hash(&bytes))
        }
        Err(error) => format!("error: {error}"),
    }
}

fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
