//! Checks a data file against a model folder, before weights are loaded.
//!
//! [`check_data`] builds a sample of each record, without its patches: it renders the text, counts
//! its tokens, decodes each picture, and collects faults as [`Findings`] of one kind each, with
//! their lines. The other counts of a [`DataReport`] are from the samples that can be trained on.

mod budget;
mod findings;
mod media;
mod page;
mod report;
mod texts;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use parking_lot::Mutex;

pub use findings::{Findings, FoundAt, Severity};
pub use page::{PageSample, SamplePage};
pub use report::{DataFigures, DataReport, Histogram, Packing, SampleCounts, Spread};

use crate::sample::{Opened, SampleEncoder};
use crate::text::format::{Frames, MediaSource};
use crate::text::{self, Conversation, IGNORED, TextError};
use budget::Budget;
use findings::{Collector, Found};
use media::Use;

/// Bytes of pixels decoded at a time by all threads together. A larger picture is decoded alone.
const DECODED_BYTES: u64 = 128 << 20;
/// Number of records and of pictures remembered to detect duplicates.
const REMEMBERED: usize = 1 << 22;

/// Options of [`check_data`].
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// The number of threads; all cores by default.
    pub threads: usize,
    /// True if pictures are decoded. Without decoding, headers give the sizes but do not reveal
    /// damaged pixels.
    pub pixels: bool,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            pixels: true,
        }
    }
}

/// Checks all records of a stream, such as that of [`text::read`]. It calls `on_record` after each
/// record, from any thread, with the numbers of records and errors so far.
///
/// Memory is bounded by a record and a picture per thread, 128 MiB of decoded pixels or one larger
/// picture, and about 80 bytes per record. A record longer than the encoder's `max_tokens` is a
/// warning if its [`Overlong`](text::Overlong) rule can shorten it, otherwise an error.
pub fn check_data<R: Iterator<Item = text::Result<Conversation>> + Send>(
    conversations: R,
    encoder: &SampleEncoder,
    options: CheckOptions,
    on_record: &(dyn Fn(u64, u64) + Sync),
) -> DataReport {
    let check = Check {
        reader: Mutex::new(Reader {
            conversations,
            records: 0,
            seen: HashMap::new(),
        }),
        collector: Mutex::new(Collector::default()),
        sound: Mutex::new(HashMap::new()),
        budget: Budget::new(DECODED_BYTES),
        encoder,
        options,
        on_record,
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads {
            scope.spawn(|| check.work());
        }
        check.work();
    });
    let mut collector = check.collector.into_inner();
    if collector.records == 0 {
        collector.add(1, [Found::new("no-records", "the file has no records")]);
    }
    collector.report(encoder.options().encode.max_tokens)
}

struct Check<'a, R> {
    reader: Mutex<Reader<R>>,
    collector: Mutex<Collector>,
    /// Width and height of pictures without findings, by the hash of their path.
    sound: Mutex<HashMap<u64, [usize; 2]>>,
    budget: Budget,
    encoder: &'a SampleEncoder,
    options: CheckOptions,
    on_record: &'a (dyn Fn(u64, u64) + Sync),
}

struct Reader<R> {
    conversations: R,
    records: u64,
    /// The line of each record by its hash.
    seen: HashMap<u64, u64>,
}

impl<R: Iterator<Item = text::Result<Conversation>> + Send> Check<'_, R> {
    /// Checks records until none is left.
    fn work(&self) {
        while let Some((record, line, found, conversation)) = self.next() {
            let mut found: Vec<Found> = found.into_iter().collect();
            let counts = conversation.and_then(|conversation| {
                texts::check(&conversation, &mut found);
                self.check_keys(&conversation, &mut found);
                self.measure(record, &conversation, &mut found)
            });
            let (records, errors) = {
                let mut collector = self.collector.lock();
                collector.records += 1;
                collector.samples.extend(counts);
                collector.add(line, found);
                (collector.records, collector.bad_records)
            };
            (self.on_record)(records, errors);
        }
    }

    /// The next record: its number, its line, the finding of reading it, and the conversation.
    fn next(&self) -> Option<(u64, u64, Option<Found>, Option<Conversation>)> {
        let mut reader = self.reader.lock();
        let read = reader.conversations.next()?;
        let record = reader.records;
        reader.records += 1;
        let conversation = match read {
            Ok(conversation) => conversation,
            Err(error) => {
                let line = match error {
                    TextError::Record { line, .. } | TextError::Stream { line, .. } => line,
                    _ => 0,
                };
                return Some((record, line, Some(Found::of(&error.into())), None));
            }
        };
        let line = conversation.line;
        let is_full = reader.seen.len() >= REMEMBERED;
        let hash = hash_of(&conversation);
        let earlier = match reader.seen.get(&hash) {
            Some(earlier) => Some(*earlier),
            None if is_full => None,
            None => reader.seen.insert(hash, line),
        };
        let found = earlier.map(|earlier| {
            Found::new(
                "duplicate",
                format!("it repeats line {earlier}, which then counts twice"),
            )
        });
        Some((record, line, found, Some(conversation)))
    }

    /// Reports keys that nobody reads, the template included.
    fn check_keys(&self, conversation: &Conversation, found: &mut Vec<Found>) {
        let source = self.encoder.text().template().source();
        for key in &conversation.unread {
            let name = key.rsplit('.').next().unwrap_or(key);
            if key.contains("[].") && !key.contains(".content") && source.contains(name) {
                continue;
            }
            found.push(Found::new(
                "unread-key",
                format!(
                    "the key {key:?} is not read; is it a misspelling, or of another kind of data?"
                ),
            ));
        }
    }

    /// Checks the pictures and counts the sample, if the record gives one.
    fn measure(
        &self,
        record: u64,
        conversation: &Conversation,
        found: &mut Vec<Found>,
    ) -> Option<SampleCounts> {
        let before = found.len();
        let mut opened = Opened::default();
        // A model of text alone has one error for them all.
        let sees = self.encoder.media().is_some();
        for (index, source) in conversation.images.iter().filter(|_| sees).enumerate() {
            let place = format!("picture {}", index + 1);
            let sides = self.look_at(source, Use::Picture, &place, found);
            opened.images.extend(sides);
        }
        for (index, video) in conversation.videos.iter().filter(|_| sees).enumerate() {
            opened.frames.push(self.look_at_video(video, index, found));
        }
        if found[before..].iter().any(Found::is_error) {
            return None;
        }
        let sample = match self.encoder.measure_opened(conversation, opened) {
            Ok(sample) => sample,
            Err(error) => {
                found.push(Found::of(&error));
                return None;
            }
        };
        texts::check_boxes(conversation, &sample, self.encoder, found);
        if sample.text.dropped_turns > 0 {
            let pictures = conversation.images.len() - sample.text.images.len();
            let videos = conversation.videos.len() - sample.text.videos.len();
            found.push(Found::new(
                "shortened",
                format!(
                    "its oldest {} turns are left out, with {pictures} pictures and {videos} \
                     videos, so that {} tokens stay",
                    sample.text.dropped_turns,
                    sample.tokens()
                ),
            ));
        }
        if sample.text.dropped_thoughts > 0 {
            found.push(Found::new(
                "dropped-thought",
                format!(
                    "the template leaves the reasoning out of {} earlier answers",
                    sample.text.dropped_thoughts
                ),
            ));
        }
        let square = (self.encoder.text().merge() as usize).pow(2);
        let merged = |grids: &[[usize; 3]]| -> usize {
            grids
                .iter()
                .map(|grid| grid.iter().product::<usize>() / square)
                .sum()
        };
        let labels = sample.text.labels.iter();
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(SampleCounts {
            record,
            tokens: small(sample.tokens()),
            vision: small(merged(&sample.image_grids) + merged(&sample.video_grids)),
            trained: small(labels.filter(|&&label| label != IGNORED).count()),
            pictures: small(sample.image_grids.len()),
            videos: small(sample.video_grids.len()),
        })
    }
}

/// A hash of all of a record that changes its sample. Records with equal hashes are duplicates.
fn hash_of(conversation: &Conversation) -> u64 {
    let mut hasher = DefaultHasher::new();
    for message in &conversation.messages {
        message.role.name().hash(&mut hasher);
        format!("{:?}", message.parts).hash(&mut hasher);
        message.loss.hash(&mut hasher);
        format!("{:?}", message.extra).hash(&mut hasher);
    }
    (&conversation.image_limits, conversation.plain).hash(&mut hasher);
    format!("{:?}", (&conversation.other, conversation.is_good)).hash(&mut hasher);
    format!("{:?}", conversation.tools).hash(&mut hasher);
    let mut media: Vec<&MediaSource> = conversation.images.iter().collect();
    for video in &conversation.videos {
        let keys = format!("{:?}", (video.fps, video.choice, video.limits));
        keys.hash(&mut hasher);
        match &video.frames {
            Frames::Folder(path) | Frames::File(path) => path.hash(&mut hasher),
            Frames::List(frames) => media.extend(frames),
        }
    }
    for source in media {
        match source {
            MediaSource::Path(path) => path.hash(&mut hasher),
            MediaSource::Bytes(bytes) => bytes.hash(&mut hasher),
        }
    }
    format!("{:?}", conversation.objects).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::hash_of;
    use crate::text::FileOptions;
    use crate::text::format::Conversations;

    /// Records that are not duplicates: each differs from the first in one value.
    #[test]
    fn records_with_one_difference_are_no_duplicates() {
        let first = r#"{"messages": [{"role": "user", "content": "<image><video>What?"}, {"role": "assistant", "content": "A cat."}], "images": ["a.png"], "videos": [{"frames": ["f.png"], "fps": 2}]}"#;
        let hash = |record: &str| {
            let mut read = Conversations::new(record.as_bytes(), "", &FileOptions::default());
            hash_of(&read.next().expect("a record").expect("a conversation"))
        };
        assert_eq!(hash(first), hash(&first.replace(": ", ":")));
        for [old, new] in [
            ["A cat.", "A dog."],
            [r#""A cat.""#, r#""A cat.", "loss": false"#],
            [r#""A cat.""#, r#""A cat.", "weight": 0"#],
            [r#""A cat.""#, r#""A cat.", "reasoning_content": "hm""#],
            ["<image><video>What?", "<video>What?<image>"],
            ["a.png", "b.png"],
            ["f.png", "g.png"],
            [r#""fps": 2"#, r#""fps": 4"#],
            [r#""fps": 2"#, r#""fps": 2, "max_pixels": 9999"#],
            [r#""videos""#, r#""tools": [{"name": "f"}], "videos""#],
        ] {
            let other = first.replace(old, new);
            assert_ne!(other, first);
            assert_ne!(hash(&other), hash(first), "{other}");
        }
    }
}
