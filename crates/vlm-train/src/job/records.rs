//! Options about records and media, which all that reads data files shares.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum, ValueHint};
use serde::{Serialize, Serializer};
use vlm_data::text::{
    Answers, DataIndex, FileOptions, Format, LabelRule, Overlong, TextError, Trained,
};
use vlm_data::{SampleOptions, Share, VlmDataError};

use super::parse::{MAX_TOKENS, above_0, count_in, one_of};

/// Options about records and media.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RecordOptions {
    /// Base folder of relative paths of pictures and videos [default: the folder of the data file]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub media: Option<PathBuf>,

    /// Format of the records; any recognises each record by its keys
    #[arg(long, default_value = "any", value_parser = one_of(&FORMATS, format_name))]
    #[serde(serialize_with = "format_text")]
    pub format: Format,

    /// Maximum tokens per conversation
    #[arg(long, value_name = "N", value_parser = count_in(1..=MAX_TOKENS))]
    pub max_tokens: Option<usize>,

    /// Treatment of conversations above --max-tokens
    #[arg(long, value_enum, default_value_t = TooLong::Refuse)]
    pub too_long: TooLong,

    /// Treatment of records that give no sample
    #[arg(long, value_enum, default_value_t = Faulty::Stop)]
    #[serde(skip)]
    pub on_error: Faulty,

    /// Read truncated JPEGs as far as they go, as Pillow can
    #[arg(long)]
    pub allow_truncated: bool,

    /// Maximum pixels of a resized picture [default: the folder's]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub max_pixels: Option<u64>,

    /// Maximum pixels of a resized video frame; for Qwen3-VL, Qwen3.5 and GLM-4.1V of all frames
    /// together [default: the folder's]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub video_max_pixels: Option<u64>,

    /// Frames per second of videos whose record states none [default: 2 for video files]
    #[arg(long, value_parser = above_0)]
    pub fps: Option<f64>,
}

/// Options about labels.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LabelOptions {
    /// Trained turns; `loss` of a message overrides it
    #[arg(long, value_enum, default_value_t = Turns::All)]
    train_turns: Turns,

    /// Trainer whose rule chooses the trained tokens of a turn
    #[arg(long, value_enum, default_value_t = Rule::Qwen)]
    label_rule: Rule,
}

/// The treatment of conversations with too many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum TooLong {
    /// A fault of the record, see --on-error
    Refuse,
    /// Drop its oldest turns with their pictures
    DropTurns,
    /// Leave it out
    Skip,
}

/// The treatment of records that give no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Faulty {
    /// Name them and do nothing
    Stop,
    /// Name them and leave them out
    Skip,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Turns {
    /// Those of the assistant
    All,
    /// The assistant's last one
    Last,
    /// Prompts as well: all tokens but those of pictures and videos
    Everything,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Rule {
    /// Qwen's fine-tuning code
    Qwen,
    LlamaFactory,
    Swift,
    /// The template's generation tags, as TRL's assistant_only_loss
    Generation,
}

const FORMATS: [Format; 10] = [
    Format::Recognised,
    Format::Messages,
    Format::ShareGpt,
    Format::Llava,
    Format::Alpaca,
    Format::Query,
    Format::Pairs,
    Format::Completion,
    Format::Text,
    Format::Preference,
];

fn format_name(format: Format) -> &'static str {
    match format {
        Format::Recognised => "any",
        Format::Messages => "messages",
        Format::ShareGpt => "sharegpt",
        Format::Llava => "llava",
        Format::Alpaca => "alpaca",
        Format::Query => "query",
        Format::Pairs => "pairs",
        Format::Completion => "completion",
        Format::Text => "text",
        Format::Preference => "preference",
    }
}

fn format_text<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format_name(*format))
}

impl RecordOptions {
    /// The options of an encoder, with the labels of `labels`.
    pub fn samples(&self, labels: Option<&LabelOptions>) -> SampleOptions {
        let mut options = SampleOptions {
            max_pixels: self.max_pixels,
            video_max_pixels: self.video_max_pixels,
            fps: self.fps,
            ..SampleOptions::default()
        };
        options.read.allow_truncated = self.allow_truncated;
        options.encode.max_tokens = self.max_tokens;
        if self.too_long == TooLong::DropTurns {
            options.encode.overlong = Overlong::DropOldestTurns;
        }
        if let Some(labels) = labels {
            options.encode.trained = match labels.train_turns {
                Turns::All => Trained::AllTurns,
                Turns::Last => Trained::LastTurn,
                Turns::Everything => Trained::Everything,
            };
            options.encode.rule = match labels.label_rule {
                Rule::Qwen => LabelRule::Qwen,
                Rule::LlamaFactory => LabelRule::LlamaFactory,
                Rule::Swift => LabelRule::Swift,
                Rule::Generation => LabelRule::Generation,
            };
        }
        options
    }

    /// The options for opening a data file of records with these answers.
    pub fn file_options(&self, answers: Answers) -> FileOptions {
        let mut options = FileOptions::default();
        (options.format, options.answers) = (self.format, answers);
        options.media_folder.clone_from(&self.media);
        options
    }

    /// True if a record with this error is left out.
    pub fn leaves_out(&self, error: &(dyn Error + 'static)) -> bool {
        let problem = match error.downcast_ref::<TextError>() {
            Some(error) => Some(error.is_too_long()),
            None => error
                .downcast_ref::<VlmDataError>()
                .map(VlmDataError::is_too_long),
        };
        problem.is_some_and(|is_too_long| {
            self.on_error == Faulty::Skip || (is_too_long && self.too_long == TooLong::Skip)
        })
    }

    /// Indexes a data file.
    ///
    /// # Errors
    /// Those of [`DataIndex::open`].
    pub fn open(&self, path: &Path, answers: Answers) -> vlm_data::text::Result<DataIndex> {
        DataIndex::open(path, self.file_options(answers))
    }
}

/// A data file and the share of its records to take: FILE, FILE#500 or FILE#0.5x.
#[derive(Clone, Debug, PartialEq)]
pub struct DataFile {
    /// The file.
    pub path: PathBuf,
    /// The share of its records.
    pub share: Share,
}

/// More copies of a file's records than any mixture has.
const MOST_TIMES: f64 = 1000.0;

impl FromStr for DataFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let whole = || Self {
            path: text.into(),
            share: Share::Whole,
        };
        let Some((path, share)) = text.rsplit_once('#') else {
            return Ok(whole());
        };
        if Path::new(text).exists() {
            return Ok(whole());
        }
        let share = if let Ok(count) = share.parse::<usize>() {
            (count > 0).then_some(Share::First(count))
        } else {
            let times = share
                .strip_suffix('x')
                .and_then(|times| times.parse::<f64>().ok());
            times
                .filter(|times| *times > 0.0 && *times <= MOST_TIMES)
                .map(Share::Times)
        };
        let share = share.ok_or_else(|| {
            format!(
                "expected FILE, FILE#500 (its first 500 records) or FILE#0.5x (half of them; up to \
                 {MOST_TIMES}x), found {text:?}"
            )
        })?;
        Ok(Self {
            path: path.into(),
            share,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_follows_the_last_mark() {
        for (text, path, share) in [
            ("a.jsonl", "a.jsonl", Share::Whole),
            ("a#b.jsonl#12", "a#b.jsonl", Share::First(12)),
            ("a.jsonl#0.25x", "a.jsonl", Share::Times(0.25)),
            ("a.jsonl#3x", "a.jsonl", Share::Times(3.0)),
        ] {
            let file: DataFile = text.parse().expect(text);
            assert_eq!(
                file,
                DataFile {
                    path: path.into(),
                    share
                }
            );
        }
        for text in [
            "a.jsonl#0",
            "a.jsonl#x",
            "a.jsonl#-1x",
            "a.jsonl#NaNx",
            "a.jsonl#2000x",
            "a#b",
        ] {
            let error = text.parse::<DataFile>().expect_err(text);
            assert!(error.contains("expected FILE, FILE#500"), "{error}");
        }
    }
}
