//! Damaged and hostile files: an error that names the fault, never a panic.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::path::{Path, PathBuf};

use vlm_data::VlmDataError;
use vlm_data::picture::{
    Alpha, Backend, FAMILIES, Family, Picture, PictureConfig, PictureProcessor, ReadOptions,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/pictures")
}

/// The fixture's pictures, by name.
fn pictures() -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(folder())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            let end = path.extension().and_then(|end| end.to_str());
            matches!(end, Some("bmp" | "gif" | "jpg" | "png" | "webp"))
        })
        .map(|path| {
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .expect("a name");
            (name.to_owned(), std::fs::read(&path).expect("a file"))
        })
        .collect();
    files.sort();
    files
}

/// Pseudo-random numbers below a bound.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Few pixels, so that a size that a changed byte makes is refused soon.
fn options() -> ReadOptions {
    ReadOptions {
        max_pixels: 1 << 16,
        alpha: Alpha::OnWhite,
        ..ReadOptions::default()
    }
}

#[test]
fn files_that_are_cut_off_are_refused_or_read() {
    let mut refused = 0;
    for (name, bytes) in pictures() {
        for end in (0..bytes.len()).step_by(1 + bytes.len() / 97) {
            match Picture::decode(&bytes[..end], &options()) {
                Ok(picture) => assert!(picture.width() * picture.height() <= 1 << 16, "{name}"),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 3000, "only {refused} are refused");
}

/// As by Pillow, which reads PNG up to its last pixel and GIF up to its last row.
#[test]
fn png_gif_and_webp_that_are_cut_off_are_refused_before_their_last_pixels() {
    for (name, bytes) in pictures() {
        let tail = match name.rsplit_once('.') {
            // The checksum, the end of the compressed data, and the last chunk.
            Some((_, "png")) => 24,
            Some((_, "gif")) => 8,
            Some((_, "webp")) => 1,
            _ => continue,
        };
        // A second frame and metadata may lack.
        let pixels = match name.as_str() {
            "animated.gif" | "exif_after.png" => bytes.len() / 3,
            _ => bytes.len() - tail,
        };
        for allow_truncated in [false, true] {
            let options = ReadOptions {
                allow_truncated,
                ..options()
            };
            Picture::decode(&bytes, &options).expect(&name);
            for end in (0..pixels).step_by(5).chain(pixels - 9..pixels) {
                let error = Picture::decode(&bytes[..end], &options).expect_err(&name);
                let told = error.to_string();
                assert!(told.lines().count() == 1, "{name}, {end}: {told}");
                assert!(
                    end < 12 || told.contains("cannot be decoded"),
                    "{name}, {end}: {told}"
                );
            }
        }
    }
}

/// Each file is read with the memory that its header states, and refused by the header with less.
#[test]
fn max_memory_bounds_each_picture() {
    for (name, bytes) in pictures() {
        let with = |max_memory: u64| ReadOptions {
            max_memory,
            ..options()
        };
        let needed = match Picture::decode(&bytes, &with(0)) {
            Err(VlmDataError::TooMuchMemory { bytes, limit: 0 }) => bytes,
            other => panic!("{name}: {other:?}"),
        };
        let pixels = Picture::decode(&bytes, &with(needed)).expect(&name);
        let least = bytes.len() + pixels.rgb().len();
        assert!(needed >= least as u64, "{name}: {needed} of {least}");
        for less in [needed - 1, 1] {
            for error in [
                Picture::decode(&bytes, &with(less)).map(drop),
                Picture::sides(&bytes, &with(less)).map(drop),
            ] {
                let error = error.expect_err(&name).to_string();
                let expected = format!("takes {needed} bytes of memory, at most {less} are used");
                assert!(error.contains(&expected), "{name}: {error}");
            }
        }
    }
    let path = folder().join("rgb_8.png");
    let options = ReadOptions {
        max_memory: 100,
        ..options()
    };
    let error = Picture::open(&path, &options)
        .expect_err("a larger file")
        .to_string();
    assert!(
        error.contains("rgb_8.png") && error.contains("100"),
        "{error}"
    );
}

#[test]
fn a_jpeg_that_is_cut_off_is_refused_unless_allowed() {
    let lenient = ReadOptions {
        allow_truncated: true,
        ..options()
    };
    let is_start_of_scan = |two: &[u8]| two == [0xff, 0xda];
    for (name, bytes) in pictures().iter().filter(|(name, _)| name.ends_with(".jpg")) {
        let whole = Picture::decode(bytes, &options()).expect("it is read");
        let scan = bytes.windows(2).position(is_start_of_scan).expect("a scan");
        for end in (3..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
            let error = Picture::decode(&bytes[..end], &options()).expect_err(name);
            assert!(
                error.to_string().contains("truncated"),
                "{name}, {end}: {error}"
            );
            let read = Picture::decode(&bytes[..end], &lenient);
            if end > scan + 20 {
                let read = read.expect("there is a scan");
                assert_eq!(read.rgb().len(), whole.rgb().len(), "{name}, {end}");
            }
        }
        // All but the last marker.
        let read = Picture::decode(&bytes[..bytes.len() - 2], &lenient);
        assert_eq!(read.expect("it has all pixels"), whole, "{name}");
    }
}

/// A progressive JPEG whose scans are repeated thousands of times.
#[test]
fn too_many_scans_are_refused_in_time() {
    let (_, bytes) = pictures()
        .into_iter()
        .find(|(name, _)| name == "progressive.jpg")
        .expect("a fixture");
    let frame = bytes
        .windows(2)
        .position(|two| two == [0xff, 0xc2])
        .expect("a frame");
    let scan = bytes
        .windows(2)
        .position(|two| two == [0xff, 0xda])
        .expect("a scan");
    let tables = bytes[..scan].to_vec();
    let mut bomb = tables;
    bomb[frame + 5..frame + 9].copy_from_slice(&[0x10, 0, 0x10, 0]);
    for _ in 0..100_000 {
        // One more bit of the first coefficients of a component, of which the file has none.
        bomb.extend_from_slice(&[0xff, 0xda, 0, 8, 1, 1, 0, 0, 0, 0x10]);
    }
    bomb.extend_from_slice(&[0xff, 0xd9]);
    let start = std::time::Instant::now();
    let error = Picture::decode(&bomb, &ReadOptions::default()).expect_err("a bomb");
    assert!(error.to_string().contains("scans"), "{error}");
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn files_with_changed_bytes_are_refused_or_read() {
    let rounds = std::env::var("VLM_DATA_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(60);
    let seed = std::env::var("VLM_DATA_SEED")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
    let processor = PictureProcessor::new(glm_defaults()).expect("a sound configuration");
    for (name, bytes) in pictures() {
        for _ in 0..rounds {
            let mut changed = bytes.clone();
            for _ in 0..=random.below(4) {
                // Headers matter most.
                let reach = if random.below(2) == 0 {
                    changed.len().min(64)
                } else {
                    changed.len()
                };
                changed[random.below(reach)] = random.below(256) as u8;
            }
            let read = Picture::decode(&changed, &options());
            if let Ok(picture) = read
                && picture.width() < 100
                && let Err(error) = processor.patches(&picture)
            {
                assert!(
                    matches!(error, VlmDataError::AspectRatio { .. }),
                    "{name}: {error}"
                );
            }
        }
    }
}

/// A file whose header states `width` x `height` pixels of a format, and little more.
fn bomb(format: &str, width: u32, height: u32) -> Vec<u8> {
    let find = |name: &str| {
        pictures()
            .into_iter()
            .find(|(found, _)| found == name)
            .expect("a fixture")
            .1
    };
    let [w16, h16] = [width, height].map(|side| side.min(0xffff) as u16);
    match format {
        "png" => {
            let mut file = find("rgb_8.png");
            file[16..20].copy_from_slice(&width.to_be_bytes());
            file[20..24].copy_from_slice(&height.to_be_bytes());
            // The checksum of the header, bit by bit.
            let checksum = !file[12..29].iter().fold(!0_u32, |sum, byte| {
                (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                    (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 }
                })
            });
            file[29..33].copy_from_slice(&checksum.to_be_bytes());
            file
        }
        "jpg" => {
            let mut file = find("444.jpg");
            let frame = file
                .windows(2)
                .position(|two| two == [0xff, 0xc0])
                .expect("a frame");
            file[frame + 5..frame + 7].copy_from_slice(&h16.to_be_bytes());
            file[frame + 7..frame + 9].copy_from_slice(&w16.to_be_bytes());
            file
        }
        "gif" => {
            let mut file = find("palette.gif");
            file[6..8].copy_from_slice(&w16.to_le_bytes());
            file[8..10].copy_from_slice(&h16.to_le_bytes());
            file
        }
        "bmp" => {
            let mut file = find("rgb_24.bmp");
            // Beyond these its decoder refuses, too, and says so.
            file[18..22].copy_from_slice(&u32::from(w16).to_le_bytes());
            file[22..26].copy_from_slice(&u32::from(h16).to_le_bytes());
            file
        }
        // 14 bits each of width and height, less 1, in a lossless picture.
        _ => {
            let mut file = find("lossless.webp");
            let at = file
                .windows(4)
                .position(|four| four == b"VP8L")
                .expect("a picture")
                + 9;
            let sides = width.min(0x3ffe) | (height.min(0x3ffe) << 14);
            file[at..at + 4].copy_from_slice(&sides.to_le_bytes());
            file
        }
    }
}

#[test]
fn a_bomb_is_refused_by_its_header() {
    for format in ["png", "jpg", "gif", "bmp", "webp"] {
        let file = bomb(format, 100_000, 100_000);
        let error = Picture::decode(&file, &ReadOptions::default()).expect_err("it is too large");
        let VlmDataError::TooManyPixels {
            width,
            height,
            limit,
        } = error
        else {
            panic!("{format}: {error}");
        };
        assert!(
            width * height > limit && limit == 178_956_970,
            "{format}: {width} x {height}"
        );
    }
    // The limit is the caller's, and includes itself.
    let path = folder().join("rgb_8.png");
    let limit = |max_pixels| ReadOptions {
        max_pixels,
        ..ReadOptions::default()
    };
    assert!(Picture::open(&path, &limit(48 * 36)).is_ok());
    let error = Picture::open(&path, &limit(48 * 36 - 1)).expect_err("one pixel too many");
    assert!(
        error
            .to_string()
            .contains("rgb_8.png: the picture has 48 x 36 pixels"),
        "{error}"
    );
}

#[test]
fn what_is_no_picture_is_refused() {
    let decode = |bytes: &[u8]| Picture::decode(bytes, &ReadOptions::default());
    assert!(matches!(
        decode(b""),
        Err(VlmDataError::UnknownFormat { .. })
    ));
    assert!(matches!(
        decode(b"%PDF-1.7"),
        Err(VlmDataError::UnknownFormat { .. })
    ));
    assert!(matches!(
        decode(b"BM"),
        Err(VlmDataError::Decode { format: "BMP", .. })
    ));
    let open = |path: PathBuf| Picture::open(path, &ReadOptions::default());
    assert!(matches!(open(folder()), Err(VlmDataError::File { .. })));
    assert!(matches!(
        open(folder().join("none.png")),
        Err(VlmDataError::File { .. })
    ));
    assert!(matches!(
        open("/dev/zero".into()),
        Err(VlmDataError::File { .. })
    ));
    assert!(matches!(
        Picture::from_rgb(2, 2, vec![0; 11]),
        Err(VlmDataError::PixelBytes { .. })
    ));
    assert!(matches!(
        Picture::from_rgb(0, 2, vec![]),
        Err(VlmDataError::NoPixels { .. })
    ));
    let huge = Picture::from_rgb(usize::MAX, usize::MAX, vec![]);
    assert!(matches!(huge, Err(VlmDataError::PixelBytes { .. })));
}

#[test]
fn unsound_configurations_are_refused() {
    let sound = PictureConfig::of_family(&FAMILIES[0]).expect("pictures");
    let unsound = [
        PictureConfig {
            patch_size: 0,
            ..sound.clone()
        },
        PictureConfig {
            merge_size: usize::MAX,
            ..sound.clone()
        },
        PictureConfig {
            patch_size: 4096,
            merge_size: 4096,
            ..sound.clone()
        },
        PictureConfig {
            min_pixels: 0,
            ..sound.clone()
        },
        PictureConfig {
            max_pixels: u64::MAX,
            ..sound.clone()
        },
        PictureConfig {
            min_pixels: 9,
            max_pixels: 8,
            ..sound.clone()
        },
        PictureConfig {
            rescale: Some(f64::NAN),
            ..sound.clone()
        },
        PictureConfig {
            normalize: Some([[0.0; 3], [0.0; 3]]),
            ..sound.clone()
        },
    ];
    for config in unsound {
        let error = PictureProcessor::new(config.clone()).expect_err("it is unsound");
        assert!(
            matches!(error, VlmDataError::Config { .. }),
            "{config:?}: {error}"
        );
    }
    let picture = Picture::from_rgb(30, 28, vec![0; 3 * 30 * 28]).expect("a picture");
    let fixed = PictureConfig {
        resize: false,
        ..sound.clone()
    };
    let processor = PictureProcessor::new(fixed).expect("a sound configuration");
    let error = processor
        .patches(&picture)
        .expect_err("30 is no multiple of 28");
    assert!(
        matches!(
            error,
            VlmDataError::NotDivisible {
                width: 30,
                factor: 28,
                ..
            }
        ),
        "{error}"
    );
    let processor = PictureProcessor::new(sound.clone()).expect("a sound configuration");
    let error = processor
        .write_patches(&picture, &mut [0.0; 5])
        .expect_err("a short buffer");
    assert!(
        matches!(error, VlmDataError::BufferLength { found: 5, .. }),
        "{error}"
    );
    // More memory than any machine has.
    let vast = PictureConfig {
        min_pixels: 1 << 52,
        max_pixels: 1 << 53,
        ..sound
    };
    let error = PictureProcessor::new(vast)
        .expect("sound in itself")
        .patches(&picture);
    assert!(matches!(error, Err(VlmDataError::Memory { .. })));
}

#[test]
fn a_folder_says_how_pictures_are_processed() {
    let folder = std::env::temp_dir().join(format!("vlm-data-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("a file");
    let read = || PictureConfig::from_folder(&folder);
    assert!(matches!(read(), Err(VlmDataError::NoProcessorFile { .. })));
    write("preprocessor_config.json", r#"{"max_pixels": 70000}"#);
    assert!(matches!(read(), Err(VlmDataError::InFile { .. })));
    write("config.json", r#"{"model_type": "qwen3_vl"}"#);
    assert_eq!(read().expect("it is read").max_pixels, 70_000);
    write(
        "processor_config.json",
        r#"{"processor_class": "Qwen3VLProcessor"}"#,
    );
    assert_eq!(read().expect("it is read").max_pixels, 70_000);
    let nested = r#"{"image_processor": {"image_processor_type": "Glm46VImageProcessor"}}"#;
    write("processor_config.json", nested);
    let config = read().expect("it is read");
    assert_eq!(
        config,
        PictureConfig {
            backend: Backend::Torchvision,
            ..glm_defaults()
        }
    );
    write("processor_config.json", "{");
    let error = read().expect_err("no JSON").to_string();
    assert!(
        error.contains("processor_config.json: invalid JSON"),
        "{error}"
    );
    std::fs::remove_dir_all(&folder).expect("the folder goes");
}

/// The class defaults of GLM are the published values.
fn glm_defaults() -> PictureConfig {
    PictureConfig::of_family(Family::of("glm4v").expect("a family")).expect("pictures")
}
