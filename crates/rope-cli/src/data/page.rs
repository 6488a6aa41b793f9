//! One sample as a page: what is trained on, the pictures as the model sees them, and each token.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use rope_core::position_ids::{PositionIds, PositionRules, Prompt, Rows};
use vlm_data::check::{DataReport, Severity};
use vlm_data::picture::{Picture, PictureProcessor};
use vlm_data::text::{Conversation, IGNORED, MediaStyle, Part};
use vlm_data::{SampleEncoder, TrainingSample};

use super::CheckArgs;
use crate::files;

const STYLE: &str = include_str!("page.css");
/// A picture's longer side, and a frame's: smaller ones are drawn larger, and larger ones smaller.
const SHOWN_SIDE: f64 = 380.0;
const FRAME_SIDE: f64 = 190.0;
/// Cells of a picture that react to the pointer; of more, none is drawn.
const CELLS: usize = 4096;
/// Ids that are read together as one character, at most.
const IDS_OF_CHARACTER: usize = 8;

/// Writes the page of a record.
pub(super) fn write(
    path: &Path,
    args: &CheckArgs,
    encoder: &SampleEncoder,
    conversation: Option<&Conversation>,
    line: u64,
    report: &DataReport,
) -> Result<(), Box<dyn Error>> {
    let mut html = String::new();
    let name = format!("{}, line {line}", args.file.display());
    // Nothing is loaded and nothing runs, whatever the record says.
    write!(
        html,
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{0}</title>\n<style>{STYLE}</style>\n<h1>{0}</h1>\n\
         <div class=\"faint\">for {1}</div>\n",
        escaped(&name),
        escaped(&args.model.display().to_string())
    )?;
    let sample = conversation.map(|conversation| encoder.encode(conversation));
    if let (Some(conversation), Some(Ok(sample))) = (conversation, &sample) {
        let shown = Shown::new(args, encoder, conversation, sample)?;
        shown.facts(&mut html)?;
        found(&mut html, report)?;
        shown.text(&mut html)?;
        shown.pictures(&mut html)?;
        shown.tokens(&mut html)?;
    } else {
        found(&mut html, report)?;
        for message in conversation.into_iter().flat_map(|c| &c.messages) {
            let (role, text) = (message.role.name(), escaped(&message.text()));
            write!(html, "<h2>{role}</h2>\n<div class=\"text\">{text}</div>\n")?;
        }
    }
    html.push_str("</html>\n");
    Ok(files::replace(path, html.as_bytes())?)
}

/// The findings of the check.
fn found(html: &mut String, report: &DataReport) -> std::fmt::Result {
    for findings in &report.findings {
        let class = match findings.severity {
            Severity::Error => "found error",
            Severity::Warning => "found",
        };
        for example in &findings.examples {
            let (kind, message) = (findings.kind, escaped(&example.message));
            writeln!(html, "<div class=\"{class}\"><b>{kind}</b> {message}</div>")?;
        }
    }
    Ok(())
}

/// A sample, and what is shown beside it.
struct Shown<'a> {
    encoder: &'a SampleEncoder,
    sample: &'a TrainingSample,
    ids: PositionIds,
    pieces: Vec<Piece>,
    media: Vec<Media>,
}

/// Tokens that are shown together.
enum Piece {
    /// A character, or a few that one token has.
    Text {
        first: usize,
        end: usize,
        text: String,
    },
    /// The pads of a picture, or of a part of a video.
    Pads {
        first: usize,
        end: usize,
        run: usize,
    },
}

/// A picture or video of the sample.
struct Media {
    name: String,
    /// About the file.
    note: String,
    grid: [usize; 3],
    /// Its runs of pads, and where the first begins.
    runs: usize,
    first: usize,
    frames: Vec<Picture>,
    /// Boxes in pixels of the resized picture.
    boxes: Vec<[f64; 4]>,
}

impl<'a> Shown<'a> {
    fn new(
        args: &CheckArgs,
        encoder: &'a SampleEncoder,
        conversation: &Conversation,
        sample: &'a TrainingSample,
    ) -> Result<Self, Box<dyn Error>> {
        let config =
            plain_files::read_text(&args.model.join("config.json"), plain_files::MAX_TEXT_BYTES)?;
        let ids = PositionRules::from_hf_config(&config)?.position_ids(&Prompt {
            input_ids: &sample.text.input_ids,
            rows: Rows::Batch(1),
            image_grids: &sample.image_grids,
            video_grids: &sample.video_grids,
            seconds_per_grid: Some(&sample.seconds_per_grid),
            ..Prompt::default()
        })?;
        let mut shown = Self {
            encoder,
            sample,
            ids,
            pieces: Vec::new(),
            media: media(encoder, conversation, sample)?,
        };
        shown.cut()?;
        Ok(shown)
    }

    /// Cuts the tokens into pieces, and finds where the pads of each picture begin.
    fn cut(&mut self) -> Result<(), Box<dyn Error>> {
        let ids = &self.sample.text.input_ids;
        let is_pad = |token: usize| self.encoder.text().pads().contains(&ids[token]);
        let (mut token, mut runs) = (0, 0);
        while token < ids.len() {
            let first = token;
            if is_pad(token) {
                while token < ids.len() && is_pad(token) {
                    token += 1;
                }
                let (end, run) = (token, runs);
                self.pieces.push(Piece::Pads { first, end, run });
                runs += 1;
                continue;
            }
            let mut text;
            loop {
                token += 1;
                let part: Vec<u32> = ids[first..token].iter().map(|&id| id as u32).collect();
                text = self.encoder.text().tokenizer().decode(&part)?;
                let is_whole = !text.contains('\u{fffd}') || token - first == IDS_OF_CHARACTER;
                let goes_on =
                    token < ids.len() && !is_pad(token) && self.is_on(token) == self.is_on(first);
                if is_whole || !goes_on {
                    break;
                }
            }
            let end = token;
            self.pieces.push(Piece::Text { first, end, text });
        }
        let starts = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Pads { first, .. } => Some(*first),
            Piece::Text { .. } => None,
        });
        let starts: Vec<usize> = starts.collect();
        let mut run = 0;
        for media in &mut self.media {
            media.first = starts.get(run).copied().unwrap_or(0);
            run += media.runs;
        }
        Ok(())
    }

    fn is_on(&self, token: usize) -> bool {
        self.sample.text.labels[token] != IGNORED
    }

    /// The picture or video of a run of pads.
    fn name_of_run(&self, run: usize) -> String {
        let mut before = 0;
        for media in &self.media {
            let part = run - before;
            before += media.runs;
            if run < before {
                return match media.runs {
                    1 => media.name.clone(),
                    _ => format!("{}, part {}", media.name, part + 1),
                };
            }
        }
        "pads".to_owned()
    }

    /// Position ids of some tokens on an axis.
    fn range(&self, axis: usize, tokens: std::ops::Range<usize>) -> String {
        crate::positions::range(&self.ids.axis(axis)[tokens])
    }

    fn facts(&self, html: &mut String) -> std::fmt::Result {
        let tokens = self.sample.tokens();
        let on = (0..tokens).filter(|&token| self.is_on(token)).count();
        let seen: usize = self
            .pieces
            .iter()
            .map(|piece| match piece {
                Piece::Pads { first, end, .. } => end - first,
                Piece::Text { .. } => 0,
            })
            .sum();
        let highest = (0..3)
            .flat_map(|axis| self.ids.axis(axis))
            .fold(0.0, |high: f64, id| high.max(*id));
        writeln!(
            html,
            "<ul class=\"facts\"><li><b>{tokens}</b>tokens<li><b>{on}</b>trained on\
             <li><b>{seen}</b>of pictures<li><b>{highest}</b>highest position id</ul>"
        )
    }

    fn text(&self, html: &mut String) -> std::fmt::Result {
        html.push_str(
            "<h2>Trained text</h2>\n<p class=\"key\"><span class=\"t on\">trained on</span>\
             <span class=\"t\">read</span><span class=\"t mark\">marks of the template</span>\
             <span class=\"t seen\">pictures</span></p>\n<div class=\"text\">",
        );
        for piece in &self.pieces {
            match piece {
                Piece::Pads { first, end, run } => {
                    let name = self.name_of_run(*run);
                    let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, *first..*end));
                    let tokens = end - first;
                    write!(
                        html,
                        "<span class=\"t seen\" \
                         title=\"tokens {first} to {}: T {t}, H {h}, W {w}\">\
                         {name}, {tokens} tokens</span>",
                        end - 1
                    )?;
                }
                Piece::Text { first, end, text } => {
                    let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, *first..*end));
                    let ids = &self.sample.text.input_ids[*first..*end];
                    let class = match (self.is_on(*first), self.is_mark(text)) {
                        (true, _) => "t on",
                        (false, true) => "t mark",
                        (false, false) => "t",
                    };
                    write!(
                        html,
                        "<span class=\"{class}\" \
                         title=\"token {first}: id {ids:?}, T {t}, H {h}, W {w}\">\
                         {}</span>",
                        escaped(text).replace('\n', "\u{21b5}\n")
                    )?;
                }
            }
        }
        html.push_str("</div>\n");
        Ok(())
    }

    fn is_mark(&self, text: &str) -> bool {
        self.encoder.text().tokenizer().is_added(text)
    }

    fn pictures(&self, html: &mut String) -> Result<(), Box<dyn Error>> {
        if self.media.is_empty() {
            return Ok(());
        }
        html.push_str("<h2>Pictures as the model sees them</h2>\n<div class=\"pictures\">\n");
        let merge = self.encoder.text().merge() as usize;
        for media in &self.media {
            let [time, rows, columns] = media.grid;
            let (rows, columns) = (rows / merge, columns / merge);
            for (frame, picture) in media.frames.iter().enumerate() {
                let (width, height) = (picture.width(), picture.height());
                let side = if media.frames.len() == 1 {
                    SHOWN_SIDE
                } else {
                    FRAME_SIDE
                };
                let larger = side / width.max(height) as f64;
                let png = base64(&picture.to_png()?);
                write!(
                    html,
                    "<figure><svg width=\"{:.0}\" viewBox=\"0 0 {width} {height}\">\
                     <image width=\"{width}\" height=\"{height}\" \
                     href=\"data:image/png;base64,{png}\"/>",
                    width as f64 * larger
                )?;
                let patch_in_time = frame * time / media.frames.len();
                let first = self.token_of(media, patch_in_time * rows * columns);
                if rows * columns <= CELLS {
                    self.cells(html, [rows, columns], [width, height], first)?;
                }
                for [x1, y1, x2, y2] in &media.boxes {
                    let (wide, high) = (x2 - x1, y2 - y1);
                    write!(
                        html,
                        "<rect class=\"box\" x=\"{x1:.2}\" y=\"{y1:.2}\" width=\"{wide:.2}\" \
                         height=\"{high:.2}\"/>"
                    )?;
                }
                let name = match media.frames.len() {
                    1 => media.name.clone(),
                    _ => format!("{}, frame {}", media.name, frame + 1),
                };
                let tokens = first..first + rows * columns;
                let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, tokens.clone()));
                writeln!(
                    html,
                    "</svg><figcaption><b>{name}</b>, {}{width} x {height} pixels, {rows} rows of \
                     {columns} tokens; T {t}, H {h}, W {w}</figcaption></figure>",
                    escaped(&media.note)
                )?;
            }
        }
        html.push_str("</div>\n");
        Ok(())
    }

    /// The token of a place in a picture's or video's grid, whose runs have text between them.
    fn token_of(&self, media: &Media, place: usize) -> usize {
        let mut left = place;
        let pads = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Pads { first, end, .. } if *first >= media.first => Some((*first, *end)),
            _ => None,
        });
        for (first, end) in pads {
            if left < end - first {
                return first + left;
            }
            left -= end - first;
        }
        media.first
    }

    /// A cell for each token, which tells its ids.
    fn cells(
        &self,
        html: &mut String,
        [rows, columns]: [usize; 2],
        [width, height]: [usize; 2],
        first: usize,
    ) -> std::fmt::Result {
        let (wide, high) = (width / columns.max(1), height / rows.max(1));
        for cell in 0..rows * columns {
            let (x, y) = (cell % columns * wide, cell / columns * high);
            let token = first + cell;
            let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, token..token + 1));
            write!(
                html,
                "<rect class=\"cell\" x=\"{x}\" y=\"{y}\" width=\"{wide}\" height=\"{high}\">\
                 <title>token {token}: T {t}, H {h}, W {w}</title></rect>"
            )?;
        }
        Ok(())
    }

    fn tokens(&self, html: &mut String) -> std::fmt::Result {
        html.push_str(
            "<h2>Token by token</h2>\n<p class=\"faint\">A label is the id that the \
                       token before it is trained to predict; \u{2013} is \u{2212}100, not \
                       trained on.</p>\n",
        );
        html.push_str("<table><tr><th>token<th>text<th>id<th>label<th>T<th>H<th>W</tr>\n");
        for piece in &self.pieces {
            match piece {
                Piece::Text { first, end, text } => {
                    self.row(html, *first, &visible(text))?;
                    for token in first + 1..*end {
                        self.row(html, token, "(the same character)")?;
                    }
                }
                Piece::Pads { first, end, run } => {
                    let name = self.name_of_run(*run);
                    let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, *first..*end));
                    write!(
                        html,
                        "</table><details><summary>{first} to {}: {name}; T {t}, H {h}, W {w}</summary>\
                         <table>",
                        end - 1
                    )?;
                    for token in *first..*end {
                        self.row(html, token, &name)?;
                    }
                    writeln!(html, "</table></details><table>")?;
                }
            }
        }
        html.push_str("</table>\n");
        Ok(())
    }

    fn row(&self, html: &mut String, token: usize, text: &str) -> std::fmt::Result {
        let (class, label) = match self.sample.text.labels[token] {
            IGNORED => ("", "\u{2013}".to_owned()),
            label => (" class=\"on\"", label.to_string()),
        };
        let id = self.sample.text.input_ids[token];
        let [t, h, w] = [0, 1, 2].map(|axis| self.range(axis, token..token + 1));
        writeln!(
            html,
            "<tr{class}><td>{token}<td>{text}<td>{id}<td>{label}<td>{t}<td>{h}<td>{w}</tr>"
        )
    }
}

/// The pictures and videos that are left, in order of the text.
fn media(
    encoder: &SampleEncoder,
    conversation: &Conversation,
    sample: &TrainingSample,
) -> Result<Vec<Media>, Box<dyn Error>> {
    let mut all = Vec::new();
    let (mut image_patches, mut video_patches) =
        (&sample.image_patches[..], &sample.video_patches[..]);
    let parts = conversation
        .messages
        .iter()
        .flat_map(|message| &message.parts);
    for part in parts {
        let place = |kept: &[usize], index: usize| kept.iter().position(|&kept| kept == index);
        match part {
            Part::Text(_) => {}
            Part::Image(index) => {
                let Some(place) = place(&sample.text.images, *index) else {
                    continue;
                };
                let grid = sample.image_grids[place];
                let mut frames = taken(encoder.pictures(), &mut image_patches, grid)?;
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
                    [x1, y1, x2, y2] if image == index => {
                        Some([x1 * scale[0], y1 * scale[1], x2 * scale[0], y2 * scale[1]])
                    }
                    _ => None,
                });
                let from = match source {
                    vlm_data::text::format::MediaSource::Path(path) => {
                        format!("{}: ", path.display())
                    }
                    vlm_data::text::format::MediaSource::Bytes(_) => String::new(),
                };
                all.push(Media {
                    name: format!("picture {}", index + 1),
                    note: format!("{from}{} x {} pixels, seen as ", stored[0], stored[1]),
                    grid,
                    runs: 1,
                    first: 0,
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
                    MediaStyle::Qwen2 => 1,
                    MediaStyle::Qwen3 | MediaStyle::Glm => grid[0],
                };
                all.push(Media {
                    name: format!("video {}", index + 1),
                    note: format!(
                        "{} s in each part in time, seen as ",
                        sample.seconds_per_grid[place]
                    ),
                    grid,
                    runs,
                    first: 0,
                    frames: taken(encoder.videos(), &mut video_patches, grid)?,
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
) -> Result<Vec<Picture>, Box<dyn Error>> {
    let length = grid.iter().product::<usize>() * processor.channels();
    let (first, rest) = patches.split_at(length.min(patches.len()));
    *patches = rest;
    Ok(processor.pictures(first, grid)?)
}

/// A text for a table: with visible white space.
fn visible(text: &str) -> String {
    let visible = |c| match c {
        ' ' => '\u{b7}',
        '\n' => '\u{21b5}',
        '\t' => '\u{2192}',
        other => other,
    };
    escaped(&text.chars().map(visible).collect::<String>())
}

/// A text in HTML. Characters that control, or that turn the direction of what follows, are named.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
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

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk
            .iter()
            .fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte));
        let bits = bits << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let index = bits >> (18 - 6 * place) & 63;
            out.push(if place > chunk.len() {
                '='
            } else {
                char::from(ALPHABET[index as usize])
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{base64, escaped};

    #[test]
    fn nothing_of_a_record_is_markup() {
        let text = "<script>alert('1')</script> & \"\u{202e}\u{1b}";
        assert_eq!(
            escaped(text),
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &quot;\\u{202e}\\u{1b}"
        );
    }

    #[test]
    fn bytes_are_base64() {
        let cases = [
            ("", ""),
            ("M", "TQ=="),
            ("Ma", "TWE="),
            ("Man", "TWFu"),
            ("Man?", "TWFuPw=="),
        ];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
