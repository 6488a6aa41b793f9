//! A conversation as a training sample: token ids, labels, and the patches of its pictures and
//! videos.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::batch::Cut;
use crate::dataset::DataSetReader;
use crate::fetch::{self, Sides};
use crate::memory::zeros;
use crate::picture::{
    Backend, BoxForm, KeptFile, Picture, PictureConfig, PictureProcessor, ReadOptions, family_of,
};
use crate::text::Result as TextResult;
use crate::text::format::{Frames, MediaSource, Video};
use crate::text::{
    Conversation, EncodeOptions, Grid, Grids, MediaStyle, RecordProblem, Sample, TextEncoder,
    VideoGrid,
};
use crate::video::{VideoCounts, VideoFile};
use crate::{Result, VlmDataError};

/// Options of a [`SampleEncoder`].
#[derive(Clone, Debug, Default)]
pub struct SampleOptions {
    /// Labels and lengths.
    pub encode: EncodeOptions,
    /// Options for reading pictures and frames.
    pub read: ReadOptions,
    /// The largest area of a resized picture in pixels; `None` takes the folder's.
    pub max_pixels: Option<u64>,
    /// The largest area of a resized frame in pixels, or of all frames together for Qwen3-VL,
    /// Qwen3.5 and GLM-4.1V; `None` takes the folder's.
    pub video_max_pixels: Option<u64>,
    /// Frames per second of videos whose record states no rate; `None` means 2 for video files.
    pub fps: Option<f64>,
}

/// The training data from one record.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainingSample {
    /// The line where the record begins, from 1.
    pub line: u64,
    /// Token ids, labels, and the remaining parts of the record.
    pub text: Sample,
    /// Time, height and width in patches of each remaining picture.
    pub image_grids: Vec<[usize; 3]>,
    /// The patches of the pictures, `[patches, channels]`.
    pub image_patches: Vec<f32>,
    /// Time, height and width in patches of each remaining video.
    pub video_grids: Vec<[usize; 3]>,
    /// The patches of the videos, `[patches, channels]`.
    pub video_patches: Vec<f32>,
    /// Seconds per temporal patch of each remaining video.
    pub seconds_per_grid: Vec<f64>,
}

impl TrainingSample {
    /// The number of tokens, pads included.
    pub fn tokens(&self) -> usize {
        self.text.input_ids.len()
    }

    /// The tokens of its sequences.
    pub(crate) fn sequences(&self) -> Vec<Range<usize>> {
        let (second, end) = (self.text.pair.map(|pair| pair.second), self.tokens());
        let first = std::iter::once(0..second.unwrap_or(end));
        first.chain(second.map(|second| second..end)).collect()
    }

    /// The number of tokens in a micro-batch of this cut, padding included.
    pub fn room(&self, cut: Cut) -> usize {
        match (cut, &self.text.pair) {
            (Cut::Padded { .. }, Some(pair)) => 2 * pair.second.max(self.tokens() - pair.second),
            _ => self.tokens(),
        }
    }

    /// Bytes of ids, labels and patches.
    pub fn bytes(&self) -> usize {
        let floats = self.image_patches.len() + self.video_patches.len();
        16 * self.tokens() + 4 * floats
    }
}

/// Encoder of conversations to training samples, for text, pictures and videos of one model folder.
#[derive(Debug)]
pub struct SampleEncoder {
    text: TextEncoder,
    /// `None` for a model of text alone.
    media: Option<MediaEncoder>,
    options: SampleOptions,
    video_counts: VideoCounts,
}

/// The encoder of the pictures and videos of one model folder.
#[derive(Debug)]
pub struct MediaEncoder {
    /// The processor of pictures.
    pub pictures: PictureProcessor,
    /// The processor of video frames.
    pub videos: PictureProcessor,
    /// The notation of places in pictures in the family's texts.
    pub boxes: BoxForm,
}

impl MediaEncoder {
    /// Reads the files of a folder, if its model sees.
    fn from_folder(folder: &Path, merge: u32, options: &SampleOptions) -> Result<Option<Self>> {
        let Some(vision) = &family_of(folder)?.vision else {
            return Ok(None);
        };
        let mut pictures = PictureConfig::from_folder(folder)?;
        let mut videos = PictureConfig::videos_from_folder(folder)?;
        pictures.max_pixels = options.max_pixels.unwrap_or(pictures.max_pixels);
        videos.max_pixels = options.video_max_pixels.unwrap_or(videos.max_pixels);
        for config in [&pictures, &videos] {
            if config.merge_size != merge as usize {
                return Err(VlmDataError::Config {
                    key: "merge_size",
                    expected: "spatial_merge_size of config.json",
                    found: format!("{}, and that {merge}", config.merge_size),
                });
            }
        }
        Ok(Some(Self {
            pictures: PictureProcessor::new(pictures)?,
            videos: PictureProcessor::new(videos)?,
            boxes: vision.boxes,
        }))
    }
}

/// A method of [`TextEncoder`].
type EncodeText = fn(&TextEncoder, &Conversation, Grids<'_>, &EncodeOptions) -> TextResult<Sample>;

/// The encoding of all answers of a conversation.
fn encoding(conversation: &Conversation) -> EncodeText {
    match conversation.other {
        Some(_) => TextEncoder::encode_pair,
        None => TextEncoder::encode,
    }
}

/// Bytes of a sample's files that stay in memory between their headers and their pixels.
const KEPT_BYTES: u64 = 64 << 20;
/// Files beyond them that stay open meanwhile: few, since a process may open about a thousand. The
/// others are opened again.
const KEPT_OPEN: usize = 64;

/// Media of a conversation that need not be opened again.
#[derive(Default)]
pub(crate) struct Opened {
    /// Width and height of each picture, and of the first frame of each video that has pictures.
    pub(crate) images: Vec<[usize; 2]>,
    pub(crate) frames: Vec<Option<[usize; 2]>>,
    /// The files of the pictures.
    files: Vec<Option<KeptFile>>,
    /// Bytes that files kept from now on may have.
    bytes: u64,
    /// Files that may stay open from now on.
    open: usize,
}

impl Opened {
    /// None, but to be kept for their pixels.
    fn to_keep() -> Self {
        Self {
            bytes: KEPT_BYTES,
            open: KEPT_OPEN,
            ..Self::default()
        }
    }

    /// Width and height of a picture, and its file if it is kept.
    fn sides(
        &mut self,
        source: &MediaSource,
        options: &ReadOptions,
    ) -> Result<([usize; 2], Option<KeptFile>)> {
        let path = match source {
            MediaSource::Path(path) => path,
            MediaSource::Bytes(bytes) => return Ok((Picture::sides(bytes, options)?, None)),
        };
        let mut file = KeptFile::open(path, options, &mut self.bytes)?;
        let sides = file.header(path, options)?.sides();
        if let KeptFile::Open(_) = file {
            let Some(rest) = self.open.checked_sub(1) else {
                return Ok((sides, None));
            };
            self.open = rest;
        }
        Ok((sides, Some(file)))
    }
}

/// A video before its frames are read.
struct Clip<'a> {
    frames: ClipFrames<'a>,
    /// The file of its first picture, if kept.
    first: Option<KeptFile>,
    /// Width and height of a frame.
    size: [usize; 2],
    /// The sizes of [`fetch::video`].
    resized: Option<[Sides; 2]>,
    grid: [usize; 3],
    fps: f64,
    /// The time of each frame in seconds.
    times: Vec<f64>,
}

enum ClipFrames<'a> {
    Pictures(Vec<Cow<'a, MediaSource>>),
    File(VideoFile<'a>),
}

impl SampleEncoder {
    /// Reads tokenizer, chat template, and picture and video configurations from a folder.
    ///
    /// # Errors
    /// Those of [`TextEncoder::from_folder`], [`PictureConfig::from_folder`],
    /// [`PictureConfig::videos_from_folder`] and [`PictureProcessor::new`];
    /// [`VlmDataError::Config`] if text and pictures merge patches differently.
    pub fn from_folder(folder: impl AsRef<Path>, options: SampleOptions) -> Result<Self> {
        let folder = folder.as_ref();
        let text = TextEncoder::from_folder(folder)?;
        let media = MediaEncoder::from_folder(folder, text.merge(), &options)?;
        Ok(Self {
            text,
            media,
            options,
            video_counts: VideoCounts::default(),
        })
    }

    /// The encoder of the text.
    pub fn text(&self) -> &TextEncoder {
        &self.text
    }

    /// The encoder of pictures and videos; `None` for a model of text alone.
    pub fn media(&self) -> Option<&MediaEncoder> {
        self.media.as_ref()
    }

    /// The encoder of a record's pictures and videos.
    ///
    /// # Errors
    /// [`RecordProblem::TextAlone`] for a model of text alone.
    fn media_of(&self, conversation: &Conversation) -> Result<&MediaEncoder> {
        self.media.as_ref().ok_or_else(|| {
            let problem = RecordProblem::TextAlone {
                images: conversation.images.len(),
                videos: conversation.videos.len(),
            };
            problem.at(conversation.line).into()
        })
    }

    /// The options.
    pub fn options(&self) -> &SampleOptions {
        &self.options
    }

    /// Encodes a conversation.
    ///
    /// Pictures are decoded one at a time, after the text is known to fit, so memory is bounded by
    /// the largest picture and the token limit. Boxes are written in the family's notation; see
    /// [`BoxForm`].
    ///
    /// # Errors
    /// [`VlmDataError::Text`] around those of [`TextEncoder::encode`],
    /// [`RecordProblem::BoxOutside`] and [`RecordProblem::NoFps`]; [`VlmDataError::InRecord`] around
    /// those of a picture, video or frame.
    pub fn encode(&self, conversation: &Conversation) -> Result<TrainingSample> {
        self.with_patches(conversation, encoding(conversation))
    }

    /// Encodes a conversation with the first of its answers alone.
    ///
    /// # Errors
    /// Those of [`SampleEncoder::encode`].
    pub fn encode_first(&self, conversation: &Conversation) -> Result<TrainingSample> {
        self.with_patches(conversation, TextEncoder::encode)
    }

    /// Encodes a record, or with `pixels` false measures it. To a marked answer it adds, as the
    /// second sequence, the prompt with the answer of the record before it, or of the last.
    ///
    /// # Errors
    /// Those of [`SampleEncoder::encode`] and [`DataSetReader::read`].
    pub fn encode_record(
        &self,
        reader: &mut DataSetReader<'_>,
        record: usize,
        pixels: bool,
    ) -> Result<TrainingSample> {
        let mut conversation = reader.read(record)?;
        if conversation.is_good.is_some() {
            let before = record.checked_sub(1).unwrap_or(reader.len() - 1);
            conversation.borrow_answer(&reader.read(before)?);
        }
        match pixels {
            true => self.encode(&conversation),
            false => self.measure(&conversation),
        }
    }

    /// Encodes a prompt for generation: the conversation without a final assistant message,
    /// followed by the start of an answer. No token has a label.
    ///
    /// # Errors
    /// Those of [`SampleEncoder::encode`], with [`TextEncoder::encode_prompt`] in place of
    /// [`TextEncoder::encode`].
    pub fn encode_prompt(&self, conversation: &Conversation) -> Result<TrainingSample> {
        self.with_patches(conversation, TextEncoder::encode_prompt)
    }

    /// The sample with its patches.
    fn with_patches(
        &self,
        conversation: &Conversation,
        encode: EncodeText,
    ) -> Result<TrainingSample> {
        let mut opened = Opened::to_keep();
        let (mut sample, mut clips) = self.measure_by(conversation, encode, &mut opened)?;
        let Some(media) = &self.media else {
            return Ok(sample);
        };
        let mut values = room(&sample.image_grids, media.pictures.channels())?;
        let mut rest = &mut values[..];
        for (&index, &grid) in sample.text.images.iter().zip(&sample.image_grids) {
            let length = grid.iter().product::<usize>() * media.pictures.channels();
            let (part, after) = rest.split_at_mut(length);
            let place =
                |source| in_record(conversation.line, format!("picture {}", index + 1), source);
            let source = &conversation.images[index];
            let file = opened.files.get_mut(index).and_then(Option::take);
            let mut picture = self.open(source, file).map_err(place)?;
            let sides = [picture.width(), picture.height()];
            let (found, resized) = self.image_grid(conversation, index, sides).map_err(place)?;
            if found != grid {
                return Err(place(changed(source)));
            }
            if let Some(resized) = resized {
                picture = picture.resized(resized, Backend::Pil).map_err(place)?;
            }
            let written = media
                .pictures
                .write(Cow::Owned(picture), [0, 1], grid, part);
            written.map_err(place)?;
            rest = after;
        }
        sample.image_patches = values;
        let mut values = room(&sample.video_grids, media.videos.channels())?;
        let mut rest = &mut values[..];
        for (&index, &grid) in sample.text.videos.iter().zip(&sample.video_grids) {
            let length = grid.iter().product::<usize>() * media.videos.channels();
            let (part, after) = rest.split_at_mut(length);
            let place =
                |source| in_record(conversation.line, format!("video {}", index + 1), source);
            let clip = &mut clips[index];
            let first = clip.first.take();
            let pictures = self.pictures_of(&clip.frames, first).map_err(place)?;
            for (frame, picture) in pictures.enumerate() {
                let place = |source| {
                    let place = format!("video {}, frame {}", index + 1, frame + 1);
                    in_record(conversation.line, place, source)
                };
                let mut picture = picture.map_err(place)?;
                let found = [picture.width(), picture.height()];
                if found != clip.size {
                    let first = clip.size;
                    return Err(place(VlmDataError::FrameSize { first, found }));
                }
                if let Some([first, size]) = clip.resized {
                    let resized = picture.resized(first, Backend::Pil);
                    let resized = resized.and_then(|picture| picture.resized_in_floats(size));
                    picture = resized.map_err(place)?;
                }
                let which = [frame, clip.times.len()];
                let written = media.videos.write(Cow::Owned(picture), which, grid, part);
                written.map_err(place)?;
            }
            rest = after;
        }
        sample.video_patches = values;
        Ok(sample)
    }

    /// Encodes a conversation without patches, which stay empty. It reads only the headers of
    /// pictures and of the first frames of videos.
    ///
    /// # Errors
    /// Those of [`SampleEncoder::encode`], except errors in decoding pixels.
    pub fn measure(&self, conversation: &Conversation) -> Result<TrainingSample> {
        self.measure_opened(conversation, Opened::default())
    }

    /// As [`SampleEncoder::measure`], of media whose sizes are known.
    pub(crate) fn measure_opened(
        &self,
        conversation: &Conversation,
        mut opened: Opened,
    ) -> Result<TrainingSample> {
        let measured = self.measure_by(conversation, encoding(conversation), &mut opened);
        measured.map(|(sample, _)| sample)
    }

    fn measure_by<'a>(
        &self,
        conversation: &'a Conversation,
        encode: EncodeText,
        opened: &mut Opened,
    ) -> Result<(TrainingSample, Vec<Clip<'a>>)> {
        let line = conversation.line;
        if !conversation.images.is_empty() || !conversation.videos.is_empty() {
            self.media_of(conversation)?;
        }
        let mut sizes = Vec::with_capacity(conversation.images.len());
        let mut image_grids = Vec::with_capacity(sizes.capacity());
        for (index, source) in conversation.images.iter().enumerate() {
            let place = |source| in_record(line, format!("picture {}", index + 1), source);
            let size = match opened.images.get(index) {
                Some(&known) => known,
                None => {
                    let (size, file) = opened.sides(source, &self.options.read).map_err(place)?;
                    opened.files.push(file);
                    size
                }
            };
            let (grid, _) = self.image_grid(conversation, index, size).map_err(place)?;
            image_grids.push(grid);
            sizes.push(size);
        }
        let clips =
            (0..conversation.videos.len()).map(|index| self.clip(conversation, index, opened));
        let clips = clips.collect::<Result<Vec<_>>>()?;
        let conversation = self.with_objects(conversation, &sizes, &image_grids)?;

        let images: Vec<Grid> = image_grids.iter().map(|&grid| text_grid(grid)).collect();
        let media = self.media.as_ref();
        let depth = media.map_or(1, |media| media.videos.config().temporal_patch_size);
        let style = self.text.style();
        let videos = clips.iter().map(|clip| VideoGrid {
            grid: text_grid(clip.grid),
            seconds: style.map_or_else(Vec::new, |style| seconds(style, &clip.times, depth)),
        });
        let videos: Vec<VideoGrid> = videos.collect();
        let grids = Grids {
            images: &images,
            videos: &videos,
        };
        let text = encode(&self.text, &conversation, grids, &self.options.encode)?;
        let kept = || text.videos.iter().map(|&index| &clips[index]);
        let sample = TrainingSample {
            line,
            image_grids: text
                .images
                .iter()
                .map(|&index| image_grids[index])
                .collect(),
            image_patches: Vec::new(),
            video_grids: kept().map(|clip| clip.grid).collect(),
            video_patches: Vec::new(),
            seconds_per_grid: kept().map(|clip| depth as f64 / clip.fps).collect(),
            text,
        };
        Ok((sample, clips))
    }

    /// The grid of a picture, and the height and width that its keys resize it to.
    fn image_grid(
        &self,
        conversation: &Conversation,
        picture: usize,
        [width, height]: [usize; 2],
    ) -> Result<([usize; 3], Option<Sides>)> {
        let limits = conversation.image_limits.get(picture);
        let limits = limits.copied().unwrap_or_default();
        let processor = &self.media_of(conversation)?.pictures;
        let resized = fetch::picture(processor, &limits, [height, width])?;
        let patch = processor.config().patch_size;
        let grid = match resized {
            Some([height, width]) => [1, height / patch, width / patch],
            None => processor.grid(height, width)?,
        };
        Ok((grid, resized))
    }

    /// The picture of a source, whose file may have been opened before.
    fn open(&self, source: &MediaSource, file: Option<KeptFile>) -> Result<Picture> {
        let options = &self.options.read;
        match (source, file) {
            (MediaSource::Path(path), None) => Picture::open(path, options),
            (MediaSource::Path(path), Some(file)) => file.picture(path, options),
            (MediaSource::Bytes(bytes), _) => Picture::decode(bytes, options),
        }
    }

    /// Reads width and height of the upright picture in pixels from its header.
    ///
    /// # Errors
    /// Those of [`Picture::sides`]; [`VlmDataError::File`]
    pub fn sides(&self, source: &MediaSource) -> Result<[usize; 2]> {
        let (sides, _) = Opened::default().sides(source, &self.options.read)?;
        Ok(sides)
    }

    fn clip<'a>(
        &self,
        conversation: &'a Conversation,
        index: usize,
        opened: &mut Opened,
    ) -> Result<Clip<'a>> {
        let (line, video) = (conversation.line, &conversation.videos[index]);
        let place = |source| in_record(line, format!("video {}", index + 1), source);
        let stated = video.fps.or(self.options.fps);
        let options = &self.options.read;
        let mut first = None;
        let (frames, size, fps, times) = if let Frames::File(path) = &video.frames {
            let counts = &self.video_counts;
            let file = VideoFile::open(path, &video.choice, stated, options, counts);
            let mut file = file.map_err(place)?;
            let times = std::mem::take(&mut file.times);
            let (size, fps) = (file.size, file.fps);
            (ClipFrames::File(file), size, fps, times)
        } else {
            let frames = frames(video).map_err(place)?.unwrap_or_default();
            let none = || place(VlmDataError::TooFewFrames { least: 1, found: 0 });
            let source = frames.first().ok_or_else(none)?;
            let size = match opened.frames.get(index).copied().flatten() {
                Some(known) => known,
                None => {
                    let size;
                    (size, first) = opened.sides(source, options).map_err(place)?;
                    size
                }
            };
            let fps = stated.ok_or_else(|| RecordProblem::NoFps { video: index + 1 }.at(line))?;
            let times = (0..frames.len()).map(|frame| frame as f64 / fps).collect();
            (ClipFrames::Pictures(frames), size, fps, times)
        };
        let is_list = matches!(frames, ClipFrames::Pictures(_));
        let sides = [times.len(), size[1], size[0]];
        let processor = &self.media_of(conversation)?.videos;
        let resized = fetch::video(processor, &video.limits, sides, is_list).map_err(place)?;
        let [_, height, width] = match resized {
            Some([_, [height, width]]) => [times.len(), height, width],
            None => sides,
        };
        let grid = processor.video_grid(times.len(), height, width);
        Ok(Clip {
            grid: grid.map_err(place)?,
            frames,
            first,
            size,
            resized,
            fps,
            times,
        })
    }

    /// The frames of a clip, one at a time.
    fn pictures_of<'a>(
        &'a self,
        frames: &'a ClipFrames<'_>,
        mut first: Option<KeptFile>,
    ) -> Result<Box<dyn Iterator<Item = Result<Picture>> + 'a>> {
        Ok(match frames {
            ClipFrames::Pictures(frames) => Box::new(
                frames
                    .iter()
                    .map(move |frame| self.open(frame, first.take())),
            ),
            ClipFrames::File(file) => Box::new(file.pictures(&self.options.read)?),
        })
    }

    /// The conversation with its boxes written into its text.
    fn with_objects<'a>(
        &self,
        conversation: &'a Conversation,
        sizes: &[[usize; 2]],
        grids: &[[usize; 3]],
    ) -> Result<Cow<'a, Conversation>> {
        let Some(objects) = &conversation.objects else {
            return Ok(Cow::Borrowed(conversation));
        };
        let media = self.media_of(conversation)?;
        for (index, (found, &image)) in objects.boxes.iter().zip(&objects.images).enumerate() {
            let size = sizes
                .get(image)
                .map(|&size| if objects.is_norm1 { [1, 1] } else { size });
            let Some(size) = size else {
                let images = sizes.len();
                let problem = RecordProblem::BoxImage {
                    index,
                    image,
                    images,
                };
                return Err(problem.at(conversation.line).into());
            };
            let inside =
                |(axis, number): (usize, &f64)| (0.0..=size[axis % 2] as f64).contains(number);
            if !found.iter().enumerate().all(inside) {
                let found = found.clone();
                let problem = RecordProblem::BoxOutside { index, found, size };
                return Err(problem.at(conversation.line).into());
            }
        }
        let patch = media.pictures.config().patch_size;
        let mut written = conversation.clone();
        written.write_objects(
            |name| match media.boxes {
                BoxForm::Marked => format!("<|object_ref_start|>{name}<|object_ref_end|>"),
                BoxForm::Pixels | BoxForm::Thousandths => name.to_owned(),
            },
            |image, numbers| {
                let full = match media.boxes {
                    BoxForm::Pixels => [grids[image][2] * patch, grids[image][1] * patch],
                    BoxForm::Marked | BoxForm::Thousandths => [1000, 1000],
                };
                let size = if objects.is_norm1 {
                    [1, 1]
                } else {
                    sizes[image]
                };
                write_box(media.boxes, numbers, size, full)
            },
        )?;
        Ok(Cow::Owned(written))
    }
}

/// A box or point whose picture has `size`, as text in a picture of `full` width and height.
fn write_box(form: BoxForm, numbers: &[f64], size: [usize; 2], full: [usize; 2]) -> String {
    let scaled: Vec<String> = numbers
        .iter()
        .enumerate()
        .map(|(axis, number)| {
            let scaled = number / size[axis % 2] as f64 * full[axis % 2] as f64;
            format!("{}", scaled.round_ties_even())
        })
        .collect();
    match form {
        BoxForm::Marked => {
            let points: Vec<String> = scaled
                .chunks(2)
                .map(|point| format!("({})", point.join(",")))
                .collect();
            format!("<|box_start|>{}<|box_end|>", points.join(","))
        }
        BoxForm::Pixels | BoxForm::Thousandths => format!("[{}]", scaled.join(", ")),
    }
}

/// The boxes in a text of a family, as [`SampleEncoder::encode`] writes them: left, top, right and
/// bottom. Points and other lists are left out.
pub fn read_boxes(form: BoxForm, text: &str) -> Vec<[f64; 4]> {
    let (open, close) = match form {
        BoxForm::Marked => ("<|box_start|>", "<|box_end|>"),
        BoxForm::Pixels | BoxForm::Thousandths => ("[", "]"),
    };
    let mut pieces: Vec<&str> = text.split(close).collect();
    // After the last end.
    pieces.pop();
    let numbers = |piece: &str| {
        let (_, inside) = piece.rsplit_once(open)?;
        let bare = inside.replace(['(', ')'], "");
        let numbers = bare.split(',').map(|number| number.trim().parse::<f64>());
        let numbers: Vec<f64> = numbers.collect::<std::result::Result<_, _>>().ok()?;
        let is_finite = numbers.iter().all(|number| number.is_finite());
        <[f64; 4]>::try_from(numbers).ok().filter(|_| is_finite)
    };
    pieces.into_iter().filter_map(numbers).collect()
}

/// The time of each temporal patch; see [`VideoGrid::seconds`].
fn seconds(style: MediaStyle, times: &[f64], depth: usize) -> Vec<f64> {
    let second = |frame: usize| times[frame.min(times.len() - 1)];
    let patches = (0..times.len()).step_by(depth);
    match style {
        MediaStyle::Qwen2 => Vec::new(),
        MediaStyle::Qwen3 => patches
            .map(|frame| f64::midpoint(second(frame), second(frame + depth - 1)))
            .collect(),
        MediaStyle::Glm => patches.map(second).collect(),
    }
}

/// The frames of a video in order of time; `None` for a video file.
pub(crate) fn frames(video: &Video) -> Result<Option<Vec<Cow<'_, MediaSource>>>> {
    let folder = match &video.frames {
        Frames::List(frames) => return Ok(Some(frames.iter().map(Cow::Borrowed).collect())),
        Frames::Folder(folder) => folder,
        Frames::File(_) => return Ok(None),
    };
    let error = |error: std::io::Error| VlmDataError::File {
        path: folder.clone(),
        reason: error.to_string(),
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(error)? {
        let entry = entry.map_err(error)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && entry.path().is_file() {
            paths.push((in_numbers(&name), entry.path()));
        }
    }
    paths.sort();
    let source = |(_, path)| Cow::Owned(MediaSource::Path(path));
    Ok(Some(paths.into_iter().map(source).collect()))
}

/// A sort key that orders names by the numbers in them: the count of digits first, then the digits,
/// without leading zeros.
fn in_numbers(name: &str) -> Vec<(String, usize, String)> {
    let (mut parts, mut rest) = (Vec::new(), name);
    while !rest.is_empty() {
        let digits = |c: char| c.is_ascii_digit();
        let start = rest.find(digits).unwrap_or(rest.len());
        let (text, number) = rest.split_at(start);
        let end = number.find(|c| !digits(c)).unwrap_or(number.len());
        let (number, after) = number.split_at(end);
        let number = number.trim_start_matches('0');
        parts.push((text.to_owned(), number.len(), number.to_owned()));
        rest = after;
    }
    parts
}

fn in_record(line: u64, place: String, source: VlmDataError) -> VlmDataError {
    VlmDataError::InRecord {
        line,
        place,
        source: Box::new(source),
    }
}

/// The error of a picture whose size no longer matches its header.
fn changed(source: &MediaSource) -> VlmDataError {
    VlmDataError::File {
        path: PathBuf::from(format!("{source:?}")),
        reason: "it was changed while it was read".to_owned(),
    }
}

fn room(grids: &[[usize; 3]], channels: usize) -> Result<Vec<f32>> {
    let patches = |grid: &[usize; 3]| grid.iter().map(|&side| side as u128).product::<u128>();
    let patches: u128 = grids.iter().map(patches).sum();
    zeros("the patches", patches.saturating_mul(channels as u128))
}

/// Converts a grid, saturating: a side of more than 2^32 patches exceeds any token limit either
/// way.
fn text_grid(grid: [usize; 3]) -> Grid {
    let [time, height, width] = grid.map(|side| u32::try_from(side).unwrap_or(u32::MAX - 63));
    Grid {
        time,
        height,
        width,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_order_of_their_numbers() {
        let mut names = ["f10.png", "f2.png", "f002b.png", "f1.png", "a3"];
        names.sort_by_key(|name| in_numbers(name));
        assert_eq!(names, ["a3", "f1.png", "f2.png", "f002b.png", "f10.png"]);
    }

    #[test]
    fn patches_in_time_have_the_seconds_of_their_frames() {
        let times = [0.0, 0.5, 1.0, 1.5, 2.0];
        assert_eq!(seconds(MediaStyle::Qwen3, &times, 2), [0.25, 1.25, 2.0]);
        assert_eq!(seconds(MediaStyle::Glm, &times, 2), [0.0, 1.0, 2.0]);
    }

    #[test]
    fn boxes_are_written_as_each_family_does() {
        let write = |form, full| write_box(form, &[10.0, 20.0, 200.0, 100.0], [200, 100], full);
        assert_eq!(
            write(BoxForm::Marked, [1000; 2]),
            "<|box_start|>(50,200),(1000,1000)<|box_end|>"
        );
        assert_eq!(
            write(BoxForm::Thousandths, [1000; 2]),
            "[50, 200, 1000, 1000]"
        );
        assert_eq!(write(BoxForm::Pixels, [196, 112]), "[10, 22, 196, 112]");
    }

    #[test]
    fn boxes_that_are_written_are_read() {
        for form in [BoxForm::Marked, BoxForm::Pixels, BoxForm::Thousandths] {
            let write = |numbers: &[f64]| write_box(form, numbers, [200, 100], [1000; 2]);
            let one = write(&[10.0, 20.0, 100.0, 50.0]);
            let two = write(&[0.0, 0.0, 200.0, 100.0]);
            let point = write(&[10.0, 20.0]);
            let text = format!("a {point}, {{\"bbox_2d\": {one}}} and [1, b, 3, 4] {two}.");
            let expected = [[50.0, 200.0, 500.0, 500.0], [0.0, 0.0, 1000.0, 1000.0]];
            assert_eq!(read_boxes(form, &text), expected, "{text}");
            let end = one.len() - 1;
            assert_eq!(read_boxes(form, &one[..end]), [[0.0; 4]; 0], "an open box");
        }
    }

    /// The picture's size, the resized one's, a box or point, and the numbers in thousandths and in
    /// pixels.
    type Scaled = ([usize; 2], [usize; 2], Vec<f64>, Vec<u32>, Vec<u32>);

    #[test]
    fn boxes_are_scaled_as_ms_swift_does() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/samples/boxes.json"
        );
        let rows = std::fs::read_to_string(path).expect("a file");
        let rows: Vec<Scaled> = serde_json::from_str(&rows).expect("rows");
        assert_eq!(rows.len(), 200);
        for (size, resized, numbers, thousandths, pixels) in rows {
            for (form, full, expected) in [
                (BoxForm::Thousandths, [1000; 2], thousandths),
                (BoxForm::Pixels, resized, pixels),
            ] {
                let written = write_box(form, &numbers, size, full);
                assert_eq!(written, format!("{expected:?}"), "{numbers:?} of {size:?}");
            }
        }
    }
}
