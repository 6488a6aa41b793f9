//! Video files, decoded by the program `ffmpeg`.
//!
//! A file is decoded at most twice: once for the number, rate and size of its frames, and then for
//! the pixels of the frames that are taken, one at a time.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::SystemTime;

use parking_lot::Mutex;

use crate::fetch;
use crate::memory::zeros;
use crate::picture::{Picture, ReadOptions};
use crate::text::format::FrameChoice;
use crate::{Result, VlmDataError};

/// Seconds of processor time after which ffmpeg ends itself.
const MAX_SECONDS: &str = "900";
const PROGRAM: &str = "ffmpeg";
/// Containers. None of them opens another file, as playlists do.
const CONTAINERS: &str = "asf,avi,flv,matroska,mov,mpeg,mpegts,mpegvideo";
/// Two counts of the same frames: in the units of the container's rate, and in finer ones.
const TWO_COUNTS: [&str; 10] = [
    "-map",
    "0:v:0",
    "-c:v",
    "rawvideo",
    "-fps_mode",
    "passthrough",
    "-enc_time_base:v:1",
    "1/90000",
    "-f",
    "framecrc",
];
const FINE: f64 = 90_000.0;
/// Bytes kept of ffmpeg's messages.
const MESSAGE_BYTES: u64 = 4096;
const RGB: usize = 3;

/// What a file has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counted {
    frames: usize,
    /// Frames per second, as the container states it.
    rate: f64,
    /// Width and height of a frame, upright.
    size: [usize; 2],
}

/// The counts of files, so that none is decoded again for another record, epoch or purpose.
#[derive(Debug, Default)]
pub(crate) struct VideoCounts(Mutex<HashMap<Stamp, Arc<Mutex<Option<Counted>>>>>);

/// A file, its bytes, and the time of its last change.
type Stamp = (PathBuf, u64, Option<SystemTime>);

impl VideoCounts {
    /// The count of a file. Others that ask for it meanwhile wait.
    fn of(&self, path: &Path, options: &ReadOptions) -> Result<Counted> {
        let opened = plain_files::open(path);
        let data = opened.map_err(|error| undecodable(path, error.cause.to_string()))?;
        let data = data.metadata();
        let data = data.map_err(|error| undecodable(path, error.to_string()))?;
        let stamp = (path.to_owned(), data.len(), data.modified().ok());
        let known = {
            let mut known = self.0.lock();
            Arc::clone(known.entry(stamp).or_default())
        };
        let mut known = known.lock();
        match *known {
            Some(counted) => Ok(counted),
            None => Ok(*known.insert(count_file(path, options)?)),
        }
    }
}

fn count_file(path: &Path, options: &ReadOptions) -> Result<Counted> {
    let arguments = ["-map", "0:v:0"].iter().chain(&TWO_COUNTS);
    let mut decoder = Decoder::start(PROGRAM, path, options, arguments)?;
    let counted = count(decoder.output()?);
    decoder.finish()?;
    let counted = counted.map_err(|reason| undecodable(path, reason))?;
    let [width, height] = counted.size.map(|side| side as u64);
    if width.saturating_mul(height) > options.max_pixels {
        return Err(VlmDataError::TooManyPixels {
            width,
            height,
            limit: options.max_pixels,
        });
    }
    Ok(counted)
}

/// The frames that are taken of a video file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VideoFile<'a> {
    path: &'a Path,
    /// Their numbers in the file.
    frames: Vec<usize>,
    /// The time of each in seconds.
    pub(crate) times: Vec<f64>,
    /// Frames per second among those taken.
    pub(crate) fps: f64,
    /// Width and height of a frame, upright.
    pub(crate) size: [usize; 2],
}

impl<'a> VideoFile<'a> {
    /// Chooses the frames of a file.
    ///
    /// # Errors
    /// [`VlmDataError::VideoFile`] if the file or ffmpeg is missing, ffmpeg cannot decode the file,
    /// or it does not have the frames; [`VlmDataError::TooManyPixels`]
    pub(crate) fn open(
        path: &'a Path,
        choice: &FrameChoice,
        fps: Option<f64>,
        options: &ReadOptions,
        counts: &VideoCounts,
    ) -> Result<Self> {
        let Counted { frames, rate, size } = counts.of(path, options)?;
        let chosen = fetch::frames(choice, fps, frames, rate);
        let (frames, total) = chosen.map_err(|reason| undecodable(path, reason))?;
        Ok(Self {
            path,
            times: frames.iter().map(|&frame| frame as f64 / rate).collect(),
            fps: frames.len() as f64 / total as f64 * rate,
            frames,
            size,
        })
    }

    /// The frames, decoded one at a time.
    pub(crate) fn pictures(
        &self,
        options: &ReadOptions,
    ) -> Result<impl Iterator<Item = Result<Picture>>> {
        let [width, height] = self.size;
        let terms = self.frames.iter().map(|frame| format!("eq(n\\,{frame})"));
        let select = format!("select={}", terms.collect::<Vec<_>>().join("+"));
        let count = self.frames.len().to_string();
        let arguments = [
            "-map",
            "0:v:0",
            "-vf",
            &select,
            "-fps_mode",
            "passthrough",
            "-frames:v",
            &count,
            "-c:v",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-f",
            "rawvideo",
        ];
        let mut decoder = Decoder::start(PROGRAM, self.path, options, &arguments)?;
        let mut rest = self.frames.len();
        Ok(std::iter::from_fn(move || {
            rest = rest.checked_sub(1)?;
            Some(decoder.picture(width, height))
        }))
    }
}

/// A running ffmpeg process, ended on drop.
struct Decoder {
    path: PathBuf,
    child: Child,
    output: Option<BufReader<ChildStdout>>,
    messages: Option<JoinHandle<String>>,
}

impl Decoder {
    /// Starts ffmpeg with arguments for its output.
    fn start<'a>(
        program: &str,
        path: &Path,
        options: &ReadOptions,
        output: impl IntoIterator<Item = &'a &'a str>,
    ) -> Result<Self> {
        // A name that cannot be mistaken for an option or an address.
        let mut input = std::ffi::OsString::from("file:");
        input.push(path);
        let pixels = options.max_pixels.min(i32::MAX as u64).to_string();
        let mut command = Command::new(program);
        command.args([
            "-nostdin",
            "-v",
            "error",
            "-xerror",
            "-timelimit",
            MAX_SECONDS,
        ]);
        command.args([
            "-protocol_whitelist",
            "file",
            "-format_whitelist",
            CONTAINERS,
        ]);
        command.args(["-threads", "1", "-max_pixels", &pixels]);
        command.args((!options.upright).then_some("-noautorotate"));
        command.arg("-i").arg(input).args(output).arg("-");
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = command.spawn().map_err(|error| {
            let reason = format!(
                "the program {program} does not start: {error}; install it, or cut the video into \
                 frames elsewhere, as ffmpeg -i FILE -vf fps=2 FOLDER/%05d.png does"
            );
            undecodable(path, reason)
        });
        let mut child = spawned?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let mut decoder = Self {
            path: path.to_owned(),
            child,
            output: output.map(|output| BufReader::with_capacity(1 << 16, output)),
            messages: None,
        };
        // Messages are read as they arrive, so that ffmpeg never waits for a reader.
        let keep = move || {
            let Some(mut errors) = errors else {
                return String::new();
            };
            let mut text = Vec::new();
            let _read = errors.by_ref().take(MESSAGE_BYTES).read_to_end(&mut text);
            let _rest = std::io::copy(&mut errors, &mut std::io::sink());
            String::from_utf8_lossy(&text).trim().to_owned()
        };
        let thread = std::thread::Builder::new().spawn(keep);
        decoder.messages = Some(thread.map_err(|error| VlmDataError::Thread {
            reason: error.to_string(),
        })?);
        Ok(decoder)
    }

    fn output(&mut self) -> Result<&mut BufReader<ChildStdout>> {
        let none = || undecodable(&self.path, "ffmpeg has no output".to_owned());
        self.output.as_mut().ok_or_else(none)
    }

    /// The next frame.
    fn picture(&mut self, width: usize, height: usize) -> Result<Picture> {
        let bytes = (width as u128 * height as u128).saturating_mul(RGB as u128);
        let mut rgb = zeros("a frame", bytes)?;
        if self.output()?.read_exact(&mut rgb).is_err() {
            self.finish()?;
            let reason = "it was changed while it was read".to_owned();
            return Err(undecodable(&self.path, reason));
        }
        Picture::from_rgb(width, height, rgb)
    }

    /// Waits for the end.
    fn finish(&mut self) -> Result<()> {
        let ended = std::io::copy(self.output()?, &mut std::io::sink());
        let status = ended.and_then(|_| self.child.wait());
        let messages = self.messages.take().map(JoinHandle::join);
        let messages = messages.and_then(std::result::Result::ok);
        let reason = match status {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => format!("ffmpeg: {} ({status})", messages.unwrap_or_default()),
            Err(error) => error.to_string(),
        };
        Err(undecodable(&self.path, reason))
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // Neither call fails for a process that has ended.
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn undecodable(path: &Path, reason: String) -> VlmDataError {
    VlmDataError::VideoFile {
        path: path.to_owned(),
        reason,
    }
}

/// Reads ffmpeg's format `framecrc` of two streams with the same frames: comments that begin with
/// `#`, some with a stream's unit of time and size, and a line for each frame, with its stream, two
/// times, its duration and its bytes.
///
/// The rate is that of the container for frames of equal durations, and else their mean.
fn count(output: &mut impl BufRead) -> Result<Counted, String> {
    let (mut unit, mut size, mut bytes) = (None, None, None);
    let (mut frames, mut before) = (0_usize, None);
    let (mut is_even, mut durations, mut duration) = ([true; 2], 0_u64, None);
    for line in output.lines() {
        let line = line.map_err(|error| error.to_string())?;
        let numbers = |text: &str, by: char| {
            let (first, second) = text.split_once(by)?;
            Some([first.trim().parse().ok()?, second.trim().parse().ok()?])
        };
        if let Some(comment) = line.strip_prefix('#') {
            if let Some(sides) = comment.strip_prefix("dimensions 0: ") {
                size = numbers(sides, 'x');
            } else if let Some(seconds) = comment.strip_prefix("tb 0: ") {
                unit = numbers(seconds, '/');
            }
            continue;
        }
        let columns = line.split(',').take(5).map(|text| text.trim().parse().ok());
        let columns: Option<Vec<i64>> = columns.collect();
        let columns = columns.and_then(|columns| <[i64; 5]>::try_from(columns).ok());
        let row = columns.filter(|row| *bytes.get_or_insert(row[4]) == row[4]);
        let Some([stream, _, time, lasts, _]) = row else {
            return Err(format!(
                "its frames differ in size, or ffmpeg's output is new: `{line}`"
            ));
        };
        if stream == 0 {
            is_even[0] &= before.is_none_or(|before| time == before + 1);
            before = Some(time);
            frames += 1;
        } else {
            is_even[1] &= *duration.get_or_insert(lasts) == lasts;
            durations += u64::try_from(lasts).unwrap_or(0);
        }
    }
    let (Some([above, below]), Some(size), 1..) = (unit, size, frames) else {
        return Err("it has no frame".to_owned());
    };
    let rate = if is_even.contains(&true) {
        below as f64 / above as f64
    } else {
        frames as f64 * FINE / durations as f64
    };
    match rate.is_finite() && rate > 0.0 {
        true => Ok(Counted { frames, rate, size }),
        false => Err(format!("it has {rate} frames per second")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "#software: Lavf61\n#tb 0: 1/2\n#dimensions 0: 64x48\n#tb 1: 1/90000\n\
                       0,          0,          0,        1,     9216, 0x5d2b\n\
                       1,          0,          0,    45000,     9216, 0x5d2b\n\
                       0,          1,          1,        1,     9216, 0x1b2c\n\
                       1,      45000,      45000,    45000,     9216, 0x1b2c\n";

    #[test]
    fn frames_are_counted_and_have_one_size() {
        let counted = |text: &str| count(&mut text.as_bytes());
        let rate = |rate| {
            Ok(Counted {
                frames: 2,
                rate,
                size: [64, 48],
            })
        };
        assert_eq!(counted(TWO), rate(2.0));
        // Frames that are missing do not change the rate; frames of other durations do.
        let late = TWO.replace("0,          1,          1", "0,          4,          4");
        assert_eq!(counted(&late), rate(2.0));
        let slow = late.replace("45000,      45000,    45000", "45000,      45000,    15000");
        assert_eq!(counted(&slow), rate(3.0));
        for (from, to) in [
            ("9216, 0x1b2c", "9217, 0x1b2c"),
            (
                "0,          1,          1,        1,     9216, 0x1b2c",
                "odd",
            ),
        ] {
            let error = counted(&TWO.replace(from, to)).expect_err(to);
            assert!(error.contains("differ in size"), "{error}");
        }
        for none in [
            "#tb 0: 1/2\n#dimensions 0: 64x48\n",
            &TWO.replace("64x48", "64 by 48"),
        ] {
            assert_eq!(counted(none).expect_err("no frame"), "it has no frame");
        }
    }

    #[test]
    fn a_missing_program_is_told() {
        let options = ReadOptions::default();
        let started = Decoder::start("no-such-ffmpeg", Path::new("a.mp4"), &options, &["-"]);
        let error = started.err().expect("no program").to_string();
        assert!(error.contains("no-such-ffmpeg does not start"), "{error}");
        assert!(error.contains("fps=2 FOLDER"), "{error}");
    }
}
