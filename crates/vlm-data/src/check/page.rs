//! One sample as a page: its trained text, the pictures as the model sees them, and each token.

use std::ops::Range;

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use super::{DataReport, Severity};
use crate::error::Result;
use crate::picture::{Picture, PictureProcessor};
use crate::sample::{MediaEncoder, SampleEncoder, TrainingSample};
use crate::text::format::MediaSource;
use crate::text::{Conversation, IGNORED, MediaStyle, Part, TextError};

const STYLE: &str = include_str!("page.css");
const TEMPLATE: &str = include_str!("page.html");
/// A picture's longer side, and a frame's: smaller ones are drawn larger, and larger ones smaller.
const SHOWN_SIDE: f64 = 380.0;
const FRAME_SIDE: f64 = 190.0;
/// Cells of a picture that react to the pointer; of more, none is drawn.
const CELLS: usize = 4096;
/// Ids that are read together as one character, at most.
const IDS_OF_CHARACTER: usize = 8;

/// A sample as a page of HTML, which loads nothing and runs nothing.
#[derive(Clone, Copy, Debug)]
pub struct SamplePage<'a> {
    /// The title.
    pub title: &'a str,
    /// The name of the model.
    pub model: &'a str,
    /// The findings about the record.
    pub report: &'a DataReport,
    /// The record, if it could be read.
    pub conversation: Option<&'a Conversation>,
    /// The sample that it gives, if it gives one.
    pub sample: Option<PageSample<'a>>,
}

/// A sample with its position ids.
#[derive(Clone, Copy, Debug)]
pub struct PageSample<'a> {
    /// The sample.
    pub sample: &'a TrainingSample,
    /// Position ids of its tokens: time, height, width.
    pub ids: &'a [Vec<f64>; 3],
    /// Writes the ids of some tokens on an axis.
    pub range: fn(&[f64]) -> String,
}

#[derive(Default, Serialize)]
struct Content {
    title: String,
    model: String,
    style: &'static str,
    facts: Option<Facts>,
    findings: Vec<Finding>,
    /// Of a record that gives no sample.
    messages: Vec<Message>,
    pieces: Vec<Piece>,
    figures: Vec<Figure>,
}

#[derive(Serialize)]
struct Facts {
    tokens: usize,
    trained: usize,
    seen: usize,
    highest: String,
}

#[derive(Serialize)]
struct Finding {
    class: &'static str,
    kind: &'static str,
    message: String,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    text: String,
}

/// Tokens that are shown together: a character, or a few that one token has; the pads of a picture,
/// or of a part of a video.
#[derive(Serialize)]
struct Piece {
    class: &'static str,
    title: String,
    text: String,
    /// Of pads.
    summary: Option<String>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    trained: bool,
    token: usize,
    text: String,
    id: i64,
    label: String,
    ids: [String; 3],
}

#[derive(Serialize)]
struct Figure {
    /// The width as shown.
    shown: String,
    width: usize,
    height: usize,
    png: String,
    cells: Vec<Cell>,
    /// Left, top, width and height.
    boxes: Vec<[String; 4]>,
    name: String,
    note: String,
    rows: usize,
    columns: usize,
    ids: String,
}

#[derive(Serialize)]
struct Cell {
    x: usize,
    y: usize,
    width: usize,
    height: usize,
    title: String,
}

impl SamplePage<'_> {
    /// Renders the page.
    ///
    /// # Errors
    /// Those of the tokenizer and of the sample's pictures.
    pub fn render(&self, encoder: &SampleEncoder) -> Result<String> {
        let mut content = Content {
            title: named(self.title),
            model: named(self.model),
            style: STYLE,
            findings: self.findings(),
            ..Content::default()
        };
        match (self.conversation, self.sample) {
            (Some(conversation), Some(sample)) => {
                sample.fill(&mut content, encoder, conversation)?;
            }
            (conversation, _) => {
                let messages = conversation.into_iter().flat_map(|one| &one.messages);
                content.messages.extend(messages.map(|message| Message {
                    role: message.role.name(),
                    text: named(&message.text()),
                }));
            }
        }
        let mut engine = Environment::new();
        engine.set_auto_escape_callback(|_| AutoEscape::Html);
        let page = engine.render_str(TEMPLATE, Serde(&content));
        page.map_err(|error| {
            let reason = error.to_string();
            TextError::Template { reason }.into()
        })
    }

    fn findings(&self) -> Vec<Finding> {
        let of_kind = |findings: &super::Findings| {
            let kind = findings.kind;
            let class = match findings.severity {
                Severity::Error => "found error",
                Severity::Warning => "found",
            };
            let examples = findings.examples.iter();
            let found = examples.map(move |example| Finding {
                class,
                kind,
                message: named(&example.message),
            });
            found.collect::<Vec<_>>()
        };
        self.report.findings.iter().flat_map(of_kind).collect()
    }
}

/// Consecutive tokens, pads or not.
struct Run {
    tokens: Range<usize>,
    /// The characters, of tokens that are not pads.
    text: Option<String>,
}

impl PageSample<'_> {
    fn fill(
        &self,
        content: &mut Content,
        encoder: &SampleEncoder,
        conversation: &Conversation,
    ) -> Result<()> {
        let runs = self.runs(encoder)?;
        let pads: Vec<Range<usize>> = runs
            .iter()
            .filter(|run| run.text.is_none())
            .map(|run| run.tokens.clone())
            .collect();
        let processors = encoder.media();
        let media = processors.map(|of| media((encoder, of), conversation, self.sample));
        let media = media.transpose()?.unwrap_or_default();
        let mut names = media.iter().flat_map(Media::names_of_runs);
        for run in &runs {
            content.pieces.push(match &run.text {
                Some(text) => self.text(encoder, &run.tokens, text),
                None => {
                    let name = names.next().unwrap_or_else(|| "pads".to_owned());
                    self.pads(&run.tokens, &name)
                }
            });
        }
        drop(names);
        let mut first_run = 0;
        for media in &media {
            let of_media = pads.get(first_run..).unwrap_or_default();
            self.draw(content, encoder, media, of_media)?;
            first_run += media.runs;
        }
        let tokens = self.sample.tokens();
        let highest = self.ids.iter().flatten().copied().fold(0.0, f64::max);
        content.facts = Some(Facts {
            tokens,
            trained: (0..tokens).filter(|&token| self.is_trained(token)).count(),
            seen: pads.iter().map(Range::len).sum(),
            highest: highest.to_string(),
        });
        Ok(())
    }

    /// Cuts the tokens into characters and runs of pads.
    fn runs(&self, encoder: &SampleEncoder) -> Result<Vec<Run>> {
        let ids = &self.sample.text.input_ids;
        let is_pad = |token: usize| encoder.text().pads().contains(&ids[token]);
        let (mut runs, mut end) = (Vec::new(), 0);
        while end < ids.len() {
            let first = end;
            if is_pad(first) {
                while end < ids.len() && is_pad(end) {
                    end += 1;
                }
                let tokens = first..end;
                runs.push(Run { tokens, text: None });
                continue;
            }
            let mut text;
            loop {
                end += 1;
                let part: Vec<u32> = ids[first..end].iter().map(|&id| id as u32).collect();
                text = encoder.text().tokenizer().decode(&part)?;
                let is_whole = !text.contains('\u{fffd}') || end - first == IDS_OF_CHARACTER;
                let goes_on = end < ids.len()
                    && !is_pad(end)
                    && self.is_trained(end) == self.is_trained(first);
                if is_whole || !goes_on {
                    break;
                }
            }
            runs.push(Run {
                tokens: first..end,
                text: Some(text),
            });
        }
        Ok(runs)
    }

    fn is_trained(&self, token: usize) -> bool {
        self.sample.text.labels[token] != IGNORED
    }

    /// Position ids of some tokens, by axis.
    fn axes(&self, tokens: Range<usize>) -> [String; 3] {
        let ids = self.ids.each_ref();
        ids.map(|ids| (self.range)(&ids[tokens.clone()]))
    }

    fn axes_in_words(&self, tokens: Range<usize>) -> String {
        let [time, height, width] = self.axes(tokens);
        format!("T {time}, H {height}, W {width}")
    }

    fn text(&self, encoder: &SampleEncoder, tokens: &Range<usize>, text: &str) -> Piece {
        let first = tokens.start;
        let is_mark = encoder.text().tokenizer().is_added(text);
        let ids = &self.sample.text.input_ids[tokens.clone()];
        let place = self.axes_in_words(tokens.clone());
        let shown = |token: usize| match token == first {
            true => visible(text),
            false => "(the same character)".to_owned(),
        };
        Piece {
            class: match (self.is_trained(first), is_mark) {
                (true, _) => "t on",
                (false, true) => "t mark",
                (false, false) => "t",
            },
            title: format!("token {first}: id {ids:?}, {place}"),
            text: named(text).replace('\n', "\u{21b5}\n"),
            summary: None,
            rows: tokens
                .clone()
                .map(|token| self.row(token, shown(token)))
                .collect(),
        }
    }

    fn pads(&self, tokens: &Range<usize>, name: &str) -> Piece {
        let place = self.axes_in_words(tokens.clone());
        let (first, last, count) = (tokens.start, tokens.end - 1, tokens.len());
        Piece {
            class: "t seen",
            title: format!("tokens {first} to {last}: {place}"),
            text: format!("{name}, {count} tokens"),
            summary: Some(format!("{first} to {last}: {name}; {place}")),
            rows: tokens
                .clone()
                .map(|token| self.row(token, name.to_owned()))
                .collect(),
        }
    }

    fn row(&self, token: usize, text: String) -> Row {
        let label = self.sample.text.labels[token];
        Row {
            trained: self.is_trained(token),
            token,
            text,
            id: self.sample.text.input_ids[token],
            label: match label {
                IGNORED => "\u{2013}".to_owned(),
                label => label.to_string(),
            },
            ids: self.axes(token..token + 1),
        }
    }

    /// Draws the frames of a picture or video, whose runs of pads begin `pads`.
    fn draw(
        &self,
        content: &mut Content,
        encoder: &SampleEncoder,
        media: &Media,
        pads: &[Range<usize>],
    ) -> Result<()> {
        let merge = encoder.text().merge() as usize;
        let [time, rows, columns] = media.grid;
        let (rows, columns) = (rows / merge, columns / merge);
        let frames = media.frames.len();
        for (frame, picture) in media.frames.iter().enumerate() {
            let (width, height) = (picture.width(), picture.height());
            let side = if frames == 1 { SHOWN_SIDE } else { FRAME_SIDE };
            let larger = side / width.max(height) as f64;
            let patch_in_time = frame * time / frames;
            let first = token_of(pads, patch_in_time * rows * columns);
            let cell = |cell: usize| {
                let (wide, high) = (width / columns.max(1), height / rows.max(1));
                let token = first + cell;
                Cell {
                    x: cell % columns * wide,
                    y: cell / columns * high,
                    width: wide,
                    height: high,
                    title: format!("token {token}: {}", self.axes_in_words(token..token + 1)),
                }
            };
            let cells = if rows * columns <= CELLS {
                rows * columns
            } else {
                0
            };
            content.figures.push(Figure {
                shown: format!("{:.0}", width as f64 * larger),
                width,
                height,
                png: data_encoding::BASE64.encode(&picture.to_png()?),
                cells: (0..cells).map(cell).collect(),
                boxes: media.boxes.clone(),
                name: match frames {
                    1 => media.name.clone(),
                    _ => format!("{}, frame {}", media.name, frame + 1),
                },
                note: named(&media.note),
                rows,
                columns,
                ids: self.axes_in_words(first..first + rows * columns),
            });
        }
        Ok(())
    }
}

/// The token of a place in a grid, whose runs of pads have text between them.
fn token_of(pads: &[Range<usize>], place: usize) -> usize {
    let mut left = place;
    for run in pads {
        if left < run.len() {
            return run.start + left;
        }
        left -= run.len();
    }
    pads.first().map_or(0, |run| run.start)
}

/// A picture or video of the sample.
struct Media {
    name: String,
    /// About the file.
    note: String,
    grid: [usize; 3],
    /// The number of its runs of pads.
    runs: usize,
    frames: Vec<Picture>,
    /// Boxes in pixels of the resized picture: left, top, width and height.
    boxes: Vec<[String; 4]>,
}

impl Media {
    fn names_of_runs(&self) -> impl Iterator<Item = String> {
        (0..self.runs).map(|part| match self.runs {
            1 => self.name.clone(),
            _ => format!("{}, part {}", self.name, part + 1),
        })
    }
}

/// The pictures and videos that are left, in order of the text.
fn media(
    (encoder, processors): (&SampleEncoder, &MediaEncoder),
    conversation: &Conversation,
    sample: &TrainingSample,
) -> Result<Vec<Media>> {
    let mut all = Vec::new();
    let (mut image_patches, mut video_patches) =
        (&sample.image_patches[..], &sample.video_patches[..]);
    let place = |kept: &[usize], index: usize| kept.iter().position(|&kept| kept == index);
    let messages = conversation.messages.iter();
    for part in messages.flat_map(|message| &message.parts) {
        match part {
            Part::Text(_) => {}
            Part::Image(index) => {
                let Some(place) = place(&sample.text.images, *index) else {
                    continue;
                };
                let grid = sample.image_grids[place];
                let mut frames = taken(&processors.pictures, &mut image_patches, grid)?;
                frames.truncate(1);
                let source = &conversation.images[*index];
                let stored = encoder.sides(source)?;
                let seen = frames
                    .first()
                    .map_or(stored, |frame| [frame.width(), frame.height()]);
                let scale = [0, 1].map(|axis| seen[axis] as f64 / stored[axis] as f64);
                let objects = conversation.objects.iter();
                let boxes = objects.flat_map(|objects| objects.boxes.iter().zip(&objects.images));
                let boxes = boxes.filter_map(|(found, image)| match found[..] {
                    [x1, y1, x2, y2] if image == index => Some(
                        [
                            x1 * scale[0],
                            y1 * scale[1],
                            (x2 - x1) * scale[0],
                            (y2 - y1) * scale[1],
                        ]
                        .map(|side| format!("{side:.2}")),
                    ),
                    _ => None,
                });
                let from = match source {
                    MediaSource::Path(path) => format!("{}: ", path.display()),
                    MediaSource::Bytes(_) => String::new(),
                };
                all.push(Media {
                    name: format!("picture {}", index + 1),
                    note: format!("{from}{} x {} pixels, seen as ", stored[0], stored[1]),
                    grid,
                    runs: 1,
                    frames,
                    boxes: boxes.collect(),
                });
            }
            Part::Video(index) => {
                let Some(place) = place(&sample.text.videos, *index) else {
                    continue;
                };
                let grid = sample.video_grids[place];
                let runs = match encoder.text().style() {
                    None | Some(MediaStyle::Qwen2) => 1,
                    Some(MediaStyle::Qwen3 | MediaStyle::Glm) => grid[0],
                };
                all.push(Media {
                    name: format!("video {}", index + 1),
                    note: format!(
                        "{} s in each part in time, seen as ",
                        sample.seconds_per_grid[place]
                    ),
                    grid,
                    runs,
                    frames: taken(&processors.videos, &mut video_patches, grid)?,
                    boxes: Vec::new(),
                });
            }
        }
    }
    Ok(all)
}

/// The frames of a grid, whose patches are taken from the front.
fn taken(
    processor: &PictureProcessor,
    patches: &mut &[f32],
    grid: [usize; 3],
) -> Result<Vec<Picture>> {
    let length = grid.iter().product::<usize>() * processor.channels();
    let (first, rest) = patches.split_at(length.min(patches.len()));
    *patches = rest;
    processor.pictures(first, grid)
}

/// A text for a table: with visible white space.
fn visible(text: &str) -> String {
    let visible = |c| match c {
        ' ' => '\u{b7}',
        '\n' => '\u{21b5}',
        '\t' => '\u{2192}',
        other => other,
    };
    named(&text.chars().map(visible).collect::<String>())
}

/// A text whose characters that control, or turn the direction of text after them, are named.
fn named(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                out.extend(c.escape_unicode());
            }
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}
