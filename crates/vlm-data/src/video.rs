//! Video files, decoded by the program `ffmpeg`.
//!
//! A file is decoded twice: for the number and size of its frames, and for their pixels, one frame
//! at a time. Both passes use ffmpeg's filter `fps`: frame k is the one nearest to k / fps seconds.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

use crate::memory::zeros;
use crate::picture::{Picture, ReadOptions};
use crate::{Result, VlmDataError};

/// The default sampling rate of video files in frames per second, as in transformers.
pub(crate) const DEFAULT_FPS: f64 = 2.0;
/// The frame limit of a file, as in transformers.
const MAX_FRAMES: usize = 768;
/// Seconds of processor time after which ffmpeg ends itself.
const MAX_SECONDS: &str = "900";
const PROGRAM: &str = "ffmpeg";
/// Containers. None of them opens another file, as playlists do.
const CONTAINERS: &str = "asf,avi,flv,matroska,mov,mpeg,mpegts,mpegvideo";
/// Bytes kept of ffmpeg's messages.
const MESSAGE_BYTES: u64 = 4096;
const RGB: usize = 3;

/// A video file with a known number of frames.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VideoFile<'a> {
    path: &'a Path,
    fps: f64,
    /// Frames.
    pub(crate) count: usize,
    /// Width and height of a frame, upright.
    pub(crate) size: [usize; 2],
}

impl<'a> VideoFile<'a> {
    /// Counts the frames of a file sampled at `fps` frames per second.
    ///
    /// # Errors
    /// [`VlmDataError::VideoFile`] if the file or ffmpeg is missing, ffmpeg cannot decode the file,
    /// or it has more than 768 frames at this rate; [`VlmDataError::TooManyPixels`]
    pub(crate) fn open(path: &'a Path, fps: f64, options: &ReadOptions) -> Result<Self> {
        if let Err(error) = plain_files::open(path) {
            return Err(undecodable(path, error.cause.to_string()));
        }
        let mut decoder = Decoder::start(PROGRAM, path, fps, options, "framecrc")?;
        let counted = count(decoder.output()?);
        decoder.finish()?;
        let (count, size) = counted.map_err(|reason| undecodable(path, reason))?;
        let [width, height] = size.map(|side| side as u64);
        if width.saturating_mul(height) > options.max_pixels {
            return Err(VlmDataError::TooManyPixels {
                width,
                height,
                limit: options.max_pixels,
            });
        }
        if count > MAX_FRAMES {
            let reason = format!(
                "at {fps} frames per second it has more than {MAX_FRAMES} frames; cut it, or write \
                 a lower \"fps\""
            );
            return Err(undecodable(path, reason));
        }
        Ok(Self {
            path,
            fps,
            count,
            size,
        })
    }

    /// The frames, decoded one at a time.
    pub(crate) fn pictures(
        &self,
        options: &ReadOptions,
    ) -> Result<impl Iterator<Item = Result<Picture>>> {
        let [width, height] = self.size;
        let mut decoder = Decoder::start(PROGRAM, self.path, self.fps, options, "rawvideo")?;
        let mut rest = self.count;
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
    /// Starts ffmpeg, whose output has all frames as RGB in a `format`.
    fn start(
        program: &str,
        path: &Path,
        fps: f64,
        options: &ReadOptions,
        format: &str,
    ) -> Result<Self> {
        // A name that cannot be mistaken for an option or an address.
        let mut input = std::ffi::OsString::from("file:");
        input.push(path);
        let pixels = options.max_pixels.min(i32::MAX as u64).to_string();
        let one_too_many = (MAX_FRAMES + 1).to_string();
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
        command.arg("-i").arg(input).args(["-map", "0:v:0"]);
        command.args(["-vf", &format!("fps={fps}"), "-frames:v", &one_too_many]);
        command.args(["-c:v", "rawvideo", "-pix_fmt", "rgb24", "-f", format, "-"]);
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = command.spawn().map_err(|error| {
            let reason = format!(
                "the program {program} does not start: {error}; install it, or cut the video into \
                 frames elsewhere, as ffmpeg -i FILE -vf fps={fps} FOLDER/%05d.png does"
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

/// Number and size of the frames of ffmpeg's format `framecrc`: comments that begin with `#`, of
/// which one has the size, and a line for each frame, whose fifth column has its bytes.
fn count(output: &mut impl BufRead) -> Result<(usize, [usize; 2]), String> {
    let (mut count, mut size) = (0, None);
    for line in output.lines() {
        let line = line.map_err(|error| error.to_string())?;
        if let Some(comment) = line.strip_prefix('#') {
            if let Some(sides) = comment.strip_prefix("dimensions 0: ") {
                let sides = sides.split_once('x');
                let number = |text: &str| text.trim().parse::<usize>().ok();
                size = sides.and_then(|(width, height)| Some([number(width)?, number(height)?]));
            }
            continue;
        }
        let bytes = line
            .split(',')
            .nth(4)
            .and_then(|text| text.trim().parse::<u128>().ok());
        let expected = size
            .map(|[width, height]| (width as u128 * height as u128).saturating_mul(RGB as u128));
        if bytes.is_none() || bytes != expected {
            return Err(format!(
                "its frames differ in size, or ffmpeg's output is new: `{line}`"
            ));
        }
        count += 1;
    }
    size.filter(|_| count > 0)
        .map(|size| (count, size))
        .ok_or_else(|| "it has no frame".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "#software: Lavf61\n#tb 0: 1/2\n#dimensions 0: 64x48\n\
                       0,          0,          0,        1,     9216, 0x5d2b\n\
                       0,          1,          1,        1,     9216, 0x1b2c\n";

    #[test]
    fn frames_are_counted_and_have_one_size() {
        let counted = |text: &str| count(&mut text.as_bytes());
        assert_eq!(counted(TWO), Ok((2, [64, 48])));
        for (from, to) in [
            ("9216, 0x1b2c", "9217, 0x1b2c"),
            (
                "0,          1,          1,        1,     9216, 0x1b2c",
                "odd",
            ),
            ("64x48", "64 by 48"),
        ] {
            let error = counted(&TWO.replace(from, to)).expect_err(to);
            assert!(error.contains("differ in size"), "{error}");
        }
        let none = counted("#dimensions 0: 64x48\n").expect_err("no frame");
        assert_eq!(none, "it has no frame");
    }

    #[test]
    fn a_missing_program_is_told() {
        let options = ReadOptions::default();
        let started = Decoder::start("no-such-ffmpeg", Path::new("a.mp4"), 2.0, &options, "null");
        let error = started.err().expect("no program").to_string();
        assert!(error.contains("no-such-ffmpeg does not start"), "{error}");
        assert!(error.contains("fps=2 FOLDER"), "{error}");
    }
}
