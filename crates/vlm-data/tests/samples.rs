//! Records to samples and batches, against transformers and against each other.
//!
//! The expected values are in `fixtures/samples`, written by `fixtures/generate/samples.py`.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod folder;

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use folder::{Folder, family_folder, json, workspace};
use serde_json::Value;
use sha2::{Digest, Sha256};
use vlm_data::picture::Picture;
use vlm_data::text::format::Conversations;
use vlm_data::text::{DataIndex, FileOptions, IGNORED, TextError};
use vlm_data::{
    BatchSize, Cut, DataPosition, DataSet, GlobalBatch, Loader, LoaderOptions, MicroBatch, OnError,
    SampleEncoder, SampleOptions, SampleRows, TrainingSample, VlmDataError,
};

const FAMILIES: [&str; 4] = ["qwen2", "qwen2_5", "qwen3", "glm"];
const RECORDS: usize = 8;
/// More tokens than any sample has.
const ROOM: usize = 160;
const PACKED: Cut = Cut::Packed { tokens: ROOM };

fn expected() -> Value {
    json("../samples/samples.json")
}

fn options() -> SampleOptions {
    let mut options = SampleOptions::default();
    options.encode.max_tokens = Some(ROOM);
    options
}

/// An encoder of a family, as transformers saved its processor.
fn encoder(family: &str, test: &str) -> Arc<SampleEncoder> {
    let folder = family_folder(family, test);
    let processor = &expected()[family]["processor_config"];
    folder.write("processor_config.json", processor.to_string());
    let encoder = SampleEncoder::from_folder(&folder.0, options());
    Arc::new(encoder.expect("an encoder"))
}

fn file_options() -> FileOptions {
    let mut options = FileOptions::default();
    options.media_folder = Some(workspace().join("tests/fixtures/pictures"));
    options
}

fn set() -> Arc<DataSet> {
    set_of(index())
}

fn set_of(index: Arc<DataIndex>) -> Arc<DataSet> {
    Arc::new(DataSet::from(index))
}

fn index() -> Arc<DataIndex> {
    let path = folder::fixture("../samples/samples.jsonl");
    Arc::new(DataIndex::open(path, file_options()).expect("an index"))
}

fn digest(values: &[f32]) -> String {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let hash = Sha256::digest(bytes);
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Ids, where runs are `[id, count]`.
fn ids(packed: &Value) -> Vec<i64> {
    let run = |entry: &Value| match entry.as_array() {
        None => vec![entry.as_i64().expect("an id")],
        Some(run) => {
            let count = run[1].as_u64().expect("a count") as usize;
            vec![run[0].as_i64().expect("an id"); count]
        }
    };
    packed
        .as_array()
        .expect("ids")
        .iter()
        .flat_map(run)
        .collect()
}

#[test]
fn samples_are_those_of_transformers() {
    let (file, index) = (expected(), index());
    let mut reader = index.reader().expect("a reader");
    for family in FAMILIES {
        let encoder = encoder(family, "transformers");
        let rows = file[family]["rows"].as_array().expect("rows");
        assert_eq!((rows.len(), index.len()), (RECORDS, RECORDS));
        for (record, row) in rows.iter().enumerate() {
            let name = format!("{family} {record}");
            let conversation = reader.read(record).expect("a record");
            let sample = encoder.encode(&conversation).expect("a sample");
            // The fixture is the processor's text; GLM's answers then end with the next turn.
            let found = match family {
                "glm" => &sample.text.input_ids[..sample.tokens() - 1],
                _ => &sample.text.input_ids,
            };
            assert_eq!(found, ids(&row["ids"]), "{name}");
            for (kind, grids, patches) in [
                ("images", &sample.image_grids, &sample.image_patches),
                ("videos", &sample.video_grids, &sample.video_patches),
            ] {
                let expected = &row[kind];
                let Some(expected_grids) = expected["grids"].as_array() else {
                    assert!(grids.is_empty() && patches.is_empty(), "{name}");
                    continue;
                };
                let found: Vec<Value> = grids.iter().map(|grid| grid.to_vec().into()).collect();
                assert_eq!(&found, expected_grids, "{name}");
                assert_eq!(digest(patches), expected["patches"], "{name}: {kind}");
            }
            if let Some(seconds) = row["seconds_per_grid"].as_array() {
                let seconds: Vec<f64> = seconds.iter().filter_map(Value::as_f64).collect();
                assert_eq!(sample.seconds_per_grid, seconds, "{name}");
            }
            let measured = TrainingSample {
                image_patches: Vec::new(),
                video_patches: Vec::new(),
                ..sample
            };
            assert_eq!(
                encoder.measure(&conversation).expect("fits"),
                measured,
                "{name}"
            );
        }
    }
}

fn load(encoder: &Arc<SampleEncoder>, options: LoaderOptions) -> Vec<GlobalBatch> {
    load_from(encoder, options, None)
}

fn load_from(
    encoder: &Arc<SampleEncoder>,
    options: LoaderOptions,
    position: Option<DataPosition>,
) -> Vec<GlobalBatch> {
    let loader = Loader::new(Arc::clone(encoder), set(), options, position);
    let batches: Result<Vec<_>, _> = loader.expect("a loader").collect();
    batches.expect("batches")
}

fn shuffled(batch: BatchSize) -> LoaderOptions {
    LoaderOptions {
        seed: Some(5),
        epochs: 3,
        threads: 3,
        ..LoaderOptions::new(batch, PACKED)
    }
}

fn micro(batches: &[GlobalBatch]) -> Vec<&MicroBatch> {
    batches
        .iter()
        .flat_map(|batch| &batch.micro_batches)
        .collect()
}

/// The lines of each global batch, sorted.
fn lines(batches: &[GlobalBatch]) -> Vec<Vec<u64>> {
    let of = |batch: &GlobalBatch| {
        let lines = batch.micro_batches.iter().flat_map(|part| &part.lines);
        let mut lines: Vec<u64> = lines.copied().collect();
        lines.sort_unstable();
        lines
    };
    batches.iter().map(of).collect()
}

#[test]
fn batches_hold_their_samples() {
    let encoder = encoder("qwen3", "hold");
    let index = index();
    let mut reader = index.reader().expect("a reader");
    let samples: Vec<TrainingSample> = (0..RECORDS)
        .map(|record| reader.read(record).expect("a record"))
        .map(|conversation| encoder.encode(&conversation).expect("a sample"))
        .collect();
    let padded = Cut::Padded { tokens: ROOM };
    for cut in [PACKED, padded] {
        let options = LoaderOptions::new(BatchSize::Samples(5), cut);
        let batches = load(&encoder, options);
        assert_eq!(lines(&batches), [vec![1, 2, 3, 4, 5], vec![6, 7, 8]]);
        let mut several = 0;
        for part in micro(&batches) {
            assert!(part.input_ids.len() <= ROOM);
            several += usize::from(part.lines.len() > 1);
            let [mut images, mut videos] = [0, 0];
            let mut trained = 0;
            for (row, line) in part.lines.iter().enumerate() {
                let sample = &samples[*line as usize - 1];
                let tokens = sample.tokens();
                let start = match &part.rows {
                    SampleRows::Packed { cu_seqlens } => {
                        assert_eq!(cu_seqlens[row + 1] - cu_seqlens[row], tokens);
                        cu_seqlens[row]
                    }
                    SampleRows::Padded {
                        rows,
                        attention_mask,
                    } => {
                        assert_eq!(*rows, part.lines.len());
                        let length = part.input_ids.len() / rows;
                        let row = row * length..(row + 1) * length;
                        let expected = (0..length).map(|token| token < tokens);
                        assert!(attention_mask[row.clone()].iter().copied().eq(expected));
                        let padding = row.start + tokens..row.end;
                        assert!(part.input_ids[padding.clone()].iter().all(|id| *id == 0));
                        assert!(part.labels[padding].iter().all(|id| *id == IGNORED));
                        row.start
                    }
                };
                let range = start..start + tokens;
                assert_eq!(part.input_ids[range.clone()], sample.text.input_ids);
                assert_eq!(part.labels[range.start], IGNORED);
                assert_eq!(
                    part.labels[range.start + 1..range.end],
                    sample.text.labels[1..]
                );
                trained += sample
                    .text
                    .labels
                    .iter()
                    .filter(|id| **id != IGNORED)
                    .count();
                let patches = &sample.image_patches;
                assert_eq!(&part.image_patches[images..][..patches.len()], patches);
                images += patches.len();
                let patches = &sample.video_patches;
                assert_eq!(&part.video_patches[videos..][..patches.len()], patches);
                videos += patches.len();
            }
            assert_eq!(
                [images, videos],
                [part.image_patches.len(), part.video_patches.len()]
            );
            assert_eq!(part.trained_tokens, trained);
        }
        assert!(several > 0, "some samples share a micro-batch");
    }
}

#[test]
fn the_first_token_of_a_sample_is_never_a_target() {
    let sample = |line| {
        let mut sample = TrainingSample {
            line,
            ..TrainingSample::default()
        };
        sample.text.input_ids = vec![1, 2, 3];
        sample.text.labels = vec![1, 2, 3];
        sample
    };
    let batch = MicroBatch::new(vec![sample(1), sample(2)], PACKED).expect("it fits");
    assert_eq!(batch.labels, [IGNORED, 2, 3, IGNORED, 2, 3]);
    assert_eq!(batch.trained_tokens, 4);
    assert!(MicroBatch::new(Vec::new(), PACKED).is_err());
    let narrow = Cut::Packed { tokens: 5 };
    assert!(MicroBatch::new(vec![sample(1), sample(2)], narrow).is_err());
}

#[test]
fn what_a_global_batch_holds_depends_on_neither_cut_nor_threads_nor_memory() {
    let encoder = encoder("qwen2", "cut");
    for batch in [BatchSize::Samples(3), BatchSize::Tokens(200)] {
        let first = load(&encoder, shuffled(batch));
        let all: usize = first.iter().map(|batch| batch.trained_tokens).sum();
        // Every record once an epoch, in another order each.
        let epoch = |epoch| {
            let of = |batch: &&GlobalBatch| batch.epoch == epoch;
            let parts: Vec<_> = first
                .iter()
                .filter(of)
                .flat_map(|b| &b.micro_batches)
                .collect();
            let lines: Vec<u64> = parts.iter().flat_map(|part| &part.lines).copied().collect();
            let mut sorted = lines.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(1..=RECORDS as u64), "{lines:?}");
            lines
        };
        assert!(epoch(0) != epoch(1) && epoch(1) != epoch(2));
        for cut in [Cut::Packed { tokens: 500 }, Cut::Padded { tokens: ROOM }] {
            let other = load(
                &encoder,
                LoaderOptions {
                    cut,
                    ..shuffled(batch)
                },
            );
            assert_eq!(lines(&other), lines(&first));
            let trained = other.iter().map(|batch| batch.trained_tokens);
            assert_eq!(trained.sum::<usize>(), all);
        }
        for (threads, ahead_bytes) in [(1, 1 << 30), (1, 0), (4, 0)] {
            let options = LoaderOptions {
                threads,
                ahead_bytes,
                ..shuffled(batch)
            };
            assert_eq!(micro(&load(&encoder, options)), micro(&first));
        }
    }
}

#[test]
fn a_position_goes_on_with_the_next_batch() {
    let encoder = encoder("qwen2", "position");
    for batch in [BatchSize::Samples(3), BatchSize::Tokens(200)] {
        let all = load(&encoder, shuffled(batch));
        for done in 0..all.len() {
            // As a checkpoint keeps it.
            let kept = serde_json::to_string(&all[done].next).expect("JSON");
            let position = serde_json::from_str(&kept).expect("a position");
            let rest = load_from(&encoder, shuffled(batch), Some(position));
            assert_eq!(micro(&rest), micro(&all[done + 1..]), "{kept}");
        }
        let (index, mut lengths) = (index(), Vec::new());
        let mut reader = index.reader().expect("a reader");
        for record in 0..index.len() {
            let conversation = reader.read(record).expect("a record");
            lengths.push(encoder.measure(&conversation).expect("a sample").tokens());
        }
        assert_eq!(shuffled(batch).batches(&lengths), all.len() as u64);
    }
}

#[test]
fn ranks_share_each_batch() {
    let encoder = encoder("qwen2", "ranks");
    for batch in [BatchSize::Samples(5), BatchSize::Tokens(300)] {
        let whole = load(&encoder, shuffled(batch));
        for ranks in [2, 7] {
            let parts: Vec<_> = (0..ranks)
                .map(|rank| LoaderOptions {
                    rank,
                    ranks,
                    ..shuffled(batch)
                })
                .map(|options| load(&encoder, options))
                .collect();
            for (step, batch) in whole.iter().enumerate() {
                let mut lines: Vec<u64> = (parts.iter())
                    .flat_map(|part| self::lines(&part[step..=step]).remove(0))
                    .collect();
                lines.sort_unstable();
                assert_eq!(lines, self::lines(&whole[step..=step])[0]);
                let trained = parts.iter().map(|part| part[step].trained_tokens);
                assert_eq!(trained.sum::<usize>(), batch.trained_tokens);
                assert!(parts.iter().all(|part| part[step].next == batch.next));
            }
            assert!(parts.iter().all(|part| part.len() == whole.len()));
        }
    }
}

/// The last of them, over epochs without end, for the size of the batch and that of the file.
#[test]
fn a_rank_that_no_batch_has_a_sample_for_is_given_empty_ones() {
    let encoder = encoder("qwen2", "idle");
    for (samples, ranks) in [(2, 3), (100, RECORDS + 1)] {
        let (sender, receiver) = channel();
        for rank in [0, ranks - 1] {
            let options = LoaderOptions {
                rank,
                ranks,
                epochs: u64::MAX,
                ..shuffled(BatchSize::Samples(samples))
            };
            let (encoder, sender) = (Arc::clone(&encoder), sender.clone());
            thread::spawn(move || {
                let mut loader = Loader::new(encoder, set(), options, None).expect("a loader");
                // Its threads have begun.
                thread::sleep(Duration::from_millis(100));
                let batches = loader.by_ref().take(9).map(|batch| batch.expect("a batch"));
                let found: Vec<_> = batches.map(|b| (b.micro_batches.len(), b.next)).collect();
                drop(loader);
                sender.send((rank, found))
            });
        }
        let end = || receiver.recv_timeout(Duration::from_secs(30));
        let mut ended = [end(), end()].map(|end| end.expect("a loader ends"));
        ended.sort_by_key(|(rank, _)| *rank);
        let [(_, first), (_, idle)] = ended;
        assert_eq!(idle.len(), 9);
        for ((own, next), (none, idle_next)) in first.into_iter().zip(idle) {
            assert!(own > 0 && none == 0);
            assert_eq!(idle_next, next);
        }
    }
}

/// A record without an answer, one of a picture that is not there, and one that is too long.
fn faulty(folder: &Folder) -> Arc<DataIndex> {
    let good = fs::read_to_string(folder::fixture("../samples/samples.jsonl")).expect("a file");
    let mut lines: Vec<String> = good.lines().map(str::to_owned).collect();
    lines[1] = lines[1].replace("rgb_8.png", "missing.png");
    lines[4] = "{\"messages\": []}".to_owned();
    lines[5] = lines[5].replace("3 3 3", &"3 ".repeat(200));
    folder.write("data.jsonl", lines.join("\n"));
    let index = DataIndex::open(folder.0.join("data.jsonl"), file_options());
    Arc::new(index.expect("an index"))
}

#[test]
fn faulty_records_end_the_loader_or_are_reported() {
    let encoder = encoder("qwen2", "faulty");
    let folder = Folder::new("faulty_data");
    let start = |options: LoaderOptions| {
        let loader = Loader::new(Arc::clone(&encoder), set_of(faulty(&folder)), options, None);
        loader.expect("a loader")
    };
    let mut options = LoaderOptions::new(BatchSize::Samples(3), PACKED);
    let mut loader = start(options.clone());
    let error = loader
        .next()
        .expect("a batch")
        .expect_err("a missing picture");
    assert!(
        matches!(&error, VlmDataError::InRecord { line: 2, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("missing.png"), "{error}");
    assert!(loader.next().is_none());

    options.on_error = OnError::Skip;
    let batches: Vec<_> = start(options)
        .map(|batch| batch.expect("a batch"))
        .collect();
    assert_eq!(lines(&batches), [vec![1, 3], vec![4], vec![7, 8]]);
    let skipped: Vec<String> = batches
        .iter()
        .flat_map(|batch| &batch.skipped)
        .map(ToString::to_string)
        .collect();
    let begins = |(error, line): (&String, u64)| error.starts_with(&format!("line {line}: "));
    assert!(skipped.iter().zip([2, 5, 6]).all(begins), "{skipped:?}");
    assert_eq!(skipped.len(), 3);
}

#[test]
fn data_that_changed_are_refused() {
    let encoder = encoder("qwen2", "changed");
    let folder = Folder::new("changed_data");
    let index = faulty(&folder);
    let options = || LoaderOptions {
        seed: Some(1),
        ..LoaderOptions::new(BatchSize::Samples(2), PACKED)
    };
    let position = DataPosition {
        fingerprint: index.fingerprint(),
        seed: Some(1),
        epoch: 0,
        samples: 2,
    };
    let start = |options, position| {
        Loader::new(
            Arc::clone(&encoder),
            set_of(Arc::clone(&index)),
            options,
            Some(position),
        )
    };
    assert!(start(options(), position).is_ok());
    let other = LoaderOptions {
        seed: Some(2),
        ..options()
    };
    assert!(matches!(
        start(other, position),
        Err(VlmDataError::Config { key: "seed", .. })
    ));
    let far = DataPosition {
        samples: 8,
        ..position
    };
    assert!(matches!(
        start(options(), far),
        Err(VlmDataError::Config { .. })
    ));

    // One byte of the file, and nothing of its length.
    let text = fs::read_to_string(index.path()).expect("a file");
    folder.write(
        "data.jsonl",
        text.replacen("four", "five", 1).replacen("Four", "Five", 1),
    );
    let changed = DataIndex::open(index.path(), file_options()).expect("an index");
    assert_ne!(changed.fingerprint(), index.fingerprint());
    let error = Loader::new(
        Arc::clone(&encoder),
        set_of(Arc::new(changed)),
        options(),
        Some(position),
    );
    let error = error.expect_err("other data");
    assert!(
        matches!(error, VlmDataError::Text(TextError::Changed { .. })),
        "{error}"
    );
    // And under a reader.
    folder.write("data.jsonl", format!("{text}\n"));
    assert!(matches!(index.reader(), Err(TextError::Changed { .. })));
}

#[test]
fn records_of_an_array_are_found_as_those_of_lines() {
    let index = index();
    let text = fs::read_to_string(index.path()).expect("a file");
    let lines: Vec<&str> = text.lines().collect();
    let folder = Folder::new("array");
    folder.write(
        "data.json",
        format!("\u{feff}[\n{}\n] \n", lines.join(" ,\n\n")),
    );
    let array = DataIndex::open(folder.0.join("data.json"), file_options()).expect("an index");
    assert_eq!(array.len(), RECORDS);
    let (mut lines, mut items) = (
        index.reader().expect("opens"),
        array.reader().expect("opens"),
    );
    for record in [5, 0, 7, 7, 3, 1, 2, 4, 6] {
        let line = lines.read(record).expect("a record");
        let mut item = items.read(record).expect("a record");
        assert_eq!(
            (line.line, item.line),
            (1 + record as u64, 2 + 2 * record as u64)
        );
        item.line = line.line;
        assert_eq!(item, line);
    }
    assert!(items.read(RECORDS).is_err());
    folder.write("data.json", "[{}, {}");
    let cut_off = DataIndex::open(folder.0.join("data.json"), file_options());
    assert!(matches!(cut_off, Err(TextError::Stream { .. })));
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let encoder = encoder("qwen2", "options");
    let good = LoaderOptions::new(BatchSize::Samples(2), PACKED);
    let narrow = Cut::Packed { tokens: ROOM - 1 };
    let wrong: [(&str, LoaderOptions); 6] = [
        (
            "batch",
            LoaderOptions {
                batch: BatchSize::Tokens(0),
                ..good.clone()
            },
        ),
        (
            "ranks",
            LoaderOptions {
                ranks: 0,
                ..good.clone()
            },
        ),
        (
            "rank",
            LoaderOptions {
                rank: 1,
                ..good.clone()
            },
        ),
        (
            "threads",
            LoaderOptions {
                threads: 0,
                ..good.clone()
            },
        ),
        (
            "cut.tokens",
            LoaderOptions {
                cut: Cut::Packed { tokens: 0 },
                ..good.clone()
            },
        ),
        (
            "max_tokens",
            LoaderOptions {
                cut: narrow,
                ..good
            },
        ),
    ];
    for (expected, options) in wrong {
        let error = Loader::new(Arc::clone(&encoder), set(), options, None);
        match error.expect_err(expected) {
            VlmDataError::Config { key, .. } => assert_eq!(key, expected),
            other => panic!("{expected}: {other}"),
        }
    }
}

/// The sample of one record and its text, or the error.
fn encode(
    encoder: &SampleEncoder,
    record: &Value,
) -> Result<(TrainingSample, String), VlmDataError> {
    let file = record.to_string();
    let mut read = Conversations::new(file.as_bytes(), "", &file_options());
    let conversation = read.next().expect("a record")?;
    let sample = encoder.encode(&conversation)?;
    let ids = sample.text.input_ids.iter().map(|id| *id as u32);
    let text = encoder
        .text()
        .tokenizer()
        .decode(&ids.collect::<Vec<_>>())?;
    Ok((sample, text))
}

/// Bytes that this thread has read from files, by the system's count.
#[cfg(target_os = "linux")]
fn bytes_read() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/io").expect("Linux counts");
    let count = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
    count.and_then(|count| count.parse().ok()).expect("a count")
}

/// The system's report of files that are opened in a folder.
#[cfg(target_os = "linux")]
struct Opens(rustix::fd::OwnedFd);

#[cfg(target_os = "linux")]
impl Opens {
    fn of(folder: &std::path::Path) -> Self {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        let watch = init(CreateFlags::NONBLOCK).expect("Linux watches");
        add_watch(&watch, folder, WatchFlags::OPEN).expect("a watch");
        Self(watch)
    }

    /// Opens since the last call. Those of one file in a row are one report.
    fn count(&self) -> usize {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reports = rustix::fs::inotify::Reader::new(&self.0, &mut buffer);
        std::iter::from_fn(|| reports.next().ok().map(drop)).count()
    }
}

/// Each file is long after its pixels, and its header is short. Of the larger ones, both do not fit
/// the memory of files that are kept.
#[cfg(target_os = "linux")]
#[test]
fn each_picture_is_opened_once() {
    let folder = Folder::new("read_once");
    let paths = ["a.png", "b.png"].map(|name| folder.0.join(name));
    let turns = |mark: &str| {
        serde_json::json!([
            {"role": "user", "content": format!("{mark}What?")},
            {"role": "assistant", "content": "That."},
        ])
    };
    let pictures = serde_json::json!({"messages": turns("<image><image>"), "images": paths});
    let video = serde_json::json!({"messages": turns("<video>"), "videos": [paths], "fps": 2.0});
    let encoder = encoder("qwen3", "read_once");
    let opens = Opens::of(&folder.0);
    let picture = workspace().join("tests/fixtures/pictures/rgb_8.png");
    for length in [4 << 20, 40 << 20] {
        for path in &paths {
            fs::copy(&picture, path).expect("a copy");
            let file = fs::OpenOptions::new().write(true).open(path);
            file.expect("a file").set_len(length).expect("a length");
        }
        for record in [&pictures, &video] {
            let record = record.to_string();
            let mut read = Conversations::new(record.as_bytes(), "", &file_options());
            let conversation = read.next().expect("a record").expect("a conversation");
            let before = bytes_read();
            encoder.measure(&conversation).expect("a sample");
            opens.count();
            let measured = bytes_read();
            encoder.encode(&conversation).expect("a sample");
            // A file opened for its header and again for its pixels would be reported twice: the
            // other picture's header is between.
            assert_eq!(opens.count(), 2, "{record}");
            let (measured, encoded) = (measured - before, bytes_read() - measured);
            assert!(measured < length / 4, "{measured} bytes to measure");
            assert!(encoded >= 2 * length, "{encoded} bytes: both are read here");
            assert!(encoded < 5 * length / 2, "{encoded} bytes to encode");
        }
    }
}

/// Of a picture of 48 x 36 pixels that becomes one of 56 x 28 or 64 x 32.
#[test]
fn boxes_are_scaled_as_the_family_writes_them() {
    let record = |image: &str, numbers: [u32; 4]| {
        serde_json::json!({
            "messages": [
                {"role": "user", "content": "<image>Where is <ref-object>?"},
                {"role": "assistant", "content": "<bbox>"},
            ],
            "images": [image],
            "objects": {"ref": ["it"], "bbox": [numbers]},
        })
    };
    for (family, expected) in [
        ("qwen2", "<|box_start|>(500,0),(1000,250)<|box_end|>"),
        ("qwen2_5", "[28, 0, 56, 7]"),
        ("qwen3", "[500, 0, 1000, 250]"),
        ("glm", "[500, 0, 1000, 250]"),
    ] {
        let encoder = encoder(family, "boxes");
        let (_, text) = encode(&encoder, &record("rgb_8.png", [24, 0, 48, 9])).expect("a sample");
        assert!(text.contains(expected), "{family}: {text}");
        let marked = text.contains("<|object_ref_start|>it<|object_ref_end|>?");
        assert_eq!(marked, family == "qwen2", "{text}");
        // The same picture, turned by its EXIF, is 36 pixels wide.
        let turned = encode(&encoder, &record("exif_6.png", [24, 0, 48, 9]));
        let error = turned.expect_err("it is outside").to_string();
        assert!(error.contains("36 x 48"), "{error}");
    }
}

#[test]
fn frames_of_a_folder_are_in_order_of_their_numbers_and_of_one_size() {
    let encoder = encoder("qwen3", "frames");
    let folder = Folder::new("frames_of_a_clip");
    let pictures = workspace().join("tests/fixtures/pictures");
    let read = |name: &str| fs::read(pictures.join(name)).expect("a picture");
    for (name, picture) in [
        ("f1.png", "exif_1.png"),
        ("f2.png", "exif_2.png"),
        ("f10.png", "exif_3.png"),
        (".hidden", "grey.gif"),
    ] {
        folder.write(name, read(picture));
    }
    let record = |video: Value| {
        serde_json::json!({
            "messages": [
                {"role": "user", "content": "<video>What?"},
                {"role": "assistant", "content": "That."},
            ],
            "videos": [video],
        })
    };
    let path = folder.0.to_str().expect("a name");
    let found = encode(
        &encoder,
        &record(serde_json::json!({"video": path, "fps": 2})),
    );
    let list = serde_json::json!(["exif_1.png", "exif_2.png", "exif_3.png"]);
    let expected = serde_json::json!({"frames": list, "fps": 2});
    let expected = encode(&encoder, &record(expected)).expect("a sample");
    assert_eq!(found.expect("a sample"), expected);
    assert!(expected.1.contains("<0.2 seconds>") && expected.1.contains("<1.0 seconds>"));

    let error = encode(&encoder, &record(list))
        .expect_err("no speed")
        .to_string();
    assert!(error.contains("fps"), "{error}");
    folder.write("f3.png", read("exif_6.png"));
    let error = encode(
        &encoder,
        &record(serde_json::json!({"video": path, "fps": 2})),
    );
    let error = error.expect_err("a turned frame").to_string();
    assert!(
        error.contains("video 1, frame 3") && error.contains("36 x 48"),
        "{error}"
    );
    let single = serde_json::json!({"frames": ["exif_1.png"], "fps": 2});
    let error = encode(&encoder, &record(single))
        .expect_err("one frame")
        .to_string();
    assert!(error.contains("is it a picture"), "{error}");
}

/// Of many numbers of frames and sides, with the limits of the fixture's folders and the classes'.
#[test]
fn videos_have_the_grids_of_transformers() {
    let grids = json("../samples/video_grids.json");
    let file = expected();
    for family in FAMILIES {
        let encoders = [true, false].map(|has_limits| {
            let folder = family_folder(family, "grids");
            let mut processor = file[family]["processor_config"].clone();
            if !has_limits {
                let videos = processor["video_processor"].as_object_mut();
                videos.expect("an object").remove("size");
            }
            folder.write("processor_config.json", processor.to_string());
            SampleEncoder::from_folder(&folder.0, options()).expect("an encoder")
        });
        let mut refused = 0;
        for (index, row) in grids[family].as_array().expect("rows").iter().enumerate() {
            let [frames, height, width] =
                [0, 1, 2].map(|at| row[at].as_u64().expect("a number") as usize);
            let videos = &encoders[(index + 1) % 2].media().expect("pictures").videos;
            let found = videos.video_grid(frames, height, width).ok();
            let found: Value = found.map_or(Value::Null, |grid| grid.to_vec().into());
            assert_eq!(found, row[3], "{family}: {row}");
            refused += usize::from(row[3].is_null());
        }
        assert!((1..60).contains(&refused), "{family}: {refused}");
    }
}

/// The frames of a video as its patches have them, and its text.
fn frames_of(
    encoder: &SampleEncoder,
    record: &Value,
) -> vlm_data::Result<(Vec<Picture>, String, f64)> {
    let record = record.to_string();
    let mut read = Conversations::new(record.as_bytes(), "", &file_options());
    let conversation = read.next().expect("a record")?;
    let sample = encoder.encode(&conversation)?;
    let (values, grid) = (&sample.video_patches, sample.video_grids[0]);
    let frames = encoder
        .media()
        .expect("pictures")
        .videos
        .pictures(values, grid)?;
    let ids: Vec<u32> = sample.text.input_ids.iter().map(|&id| id as u32).collect();
    let text = encoder.text().tokenizer().decode(&ids).expect("a text");
    Ok((frames, text, sample.seconds_per_grid[0]))
}

fn of_video(mut part: Value, path: &std::path::Path) -> Value {
    part["type"] = "video".into();
    part["video"] = path.display().to_string().into();
    serde_json::json!({"messages": [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "That."},
    ]})
}

/// Frame N of a file has the luma 16 + 2 N; see `fixtures/generate/videos.py`.
#[test]
#[ignore = "needs the program ffmpeg"]
fn frames_of_files_are_those_that_qwen_vl_utils_takes() {
    let folder = Folder::new("frames_of_files");
    let [qwen2_5, qwen3] = ["qwen2_5", "qwen3"].map(|family| encoder(family, "videos"));
    let rows = json("videos.json");
    let rows = rows.as_array().expect("rows");
    assert_eq!(rows.len(), 63);
    let mut wrong = Vec::new();
    for row in rows {
        let path = folder.0.join(row["file"].as_str().expect("a name"));
        if !path.exists() {
            let arguments = row["make"].as_array().expect("arguments").iter();
            let made = Command::new("ffmpeg")
                .current_dir(&folder.0)
                .args(arguments.map(|argument| argument.as_str().expect("a text")))
                .status();
            assert!(made.expect("ffmpeg starts").success());
        }
        let record = of_video(row["part"].clone(), &path);
        let (frames, text, _) = frames_of(&qwen3, &record).expect("a sample");
        let number = |frame: &Picture| {
            let sum: u64 = frame.rgb().iter().map(|&level| u64::from(level)).sum();
            (sum as f64 / frame.rgb().len() as f64 / (2.0 * 255.0 / 219.0)).round() as u64
        };
        let found: Vec<u64> = frames.iter().map(number).collect();
        let seconds = row["seconds"].as_array().expect("times").iter();
        let seconds: Vec<f64> = seconds
            .map(|second| second.as_f64().expect("a time"))
            .collect();
        let times = text
            .split('<')
            .filter_map(|piece| piece.split_once(" seconds>"));
        let times: Vec<&str> = times.map(|(time, _)| time).collect();
        let expected: Vec<String> = seconds
            .iter()
            .map(|second| format!("{second:.1}"))
            .collect();
        let (_, _, per_grid) = frames_of(&qwen2_5, &record).expect("a sample");
        if serde_json::json!(found) != row["indices"]
            || times != expected
            || Some(per_grid) != row["fps"].as_f64().map(|fps| 2.0 / fps)
        {
            wrong.push(format!("{found:?} {times:?} {per_grid}: {row}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A lossless file has the pixels of the frames that it was made of.
#[test]
#[ignore = "needs the program ffmpeg"]
fn frames_of_a_file_are_those_that_it_was_made_of() {
    let folder = Folder::new("frames_of_a_file");
    let mut names = Vec::new();
    for frame in 0..8 {
        let level = |index: usize| ((index * (7 + 2 * frame) + index / 192 * 11) % 251) as u8;
        let picture = Picture::from_rgb(64, 48, (0..64 * 48 * 3).map(level).collect());
        let name = format!("{frame}.png");
        folder.write(&name, picture.expect("sizes").to_png().expect("a file"));
        names.push(folder.0.join(name));
    }
    let made = Command::new("ffmpeg")
        .current_dir(&folder.0)
        .args("-v error -framerate 4 -i %d.png -c:v ffv1 -pix_fmt bgr0 clip.mkv".split(' '))
        .status();
    assert!(made.expect("ffmpeg starts").success());
    for family in ["qwen2_5", "qwen3", "glm"] {
        let encoder = encoder(family, "file");
        let fps = serde_json::json!({"fps": 4});
        let mut list = of_video(fps.clone(), &names[0]);
        list["messages"][0]["content"][0]["video"] = serde_json::json!(names);
        let expected = encode(&encoder, &list).expect("a sample");
        let found = encode(&encoder, &of_video(fps, &folder.0.join("clip.mkv")));
        assert_eq!(found.expect("a sample"), expected);
    }
    let encoder = encoder("qwen3", "wrong_file");
    folder.write("text.mp4", "no video");
    folder.write(
        "list.mp4",
        "#EXTM3U\n#EXTINF:2,\nclip.mkv\n#EXT-X-ENDLIST\n",
    );
    for (name, keys, expected) in [
        ("text.mp4", "{}", "ffmpeg: "),
        ("list.mp4", "{}", "ffmpeg: "),
        (
            "clip.mkv",
            r#"{"nframes": 10}"#,
            "10 frames, expected from 2 to the 8",
        ),
        (
            "clip.mkv",
            r#"{"video_start": 2.0}"#,
            "the frames 8 to 7 of 8, which are 2.00 s",
        ),
        ("none.mp4", "{}", "none.mp4: No such file"),
    ] {
        let keys = serde_json::from_str(keys).expect("JSON");
        let error = encode(&encoder, &of_video(keys, &folder.0.join(name)))
            .expect_err(name)
            .to_string();
        assert!(
            error.contains("video 1: ") && error.contains(expected),
            "{error}"
        );
    }
}
