//! `mrope data`: training data, before a model is trained on them.

mod lengths;
mod report;

use std::error::Error;
use std::fs;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueHint};
use indicatif::{ProgressBar, ProgressStyle};
use rope_core::position_ids::{Prompt, Rows};
use vlm_data::check::{CheckOptions, DataReport, PageSample, SamplePage, Severity, check_data};
use vlm_data::text::format::Conversations;
use vlm_data::text::{Answers, Conversation};
use vlm_data::{SampleEncoder, TrainingSample};
use vlm_models::VlmConfig;
use vlm_train::job::{Faulty, LabelOptions, RecordOptions, TooLong};

use self::report::Checked;
use crate::arguments::count_in;
use crate::stdio::{note, stdout};

const FORMAT: &str = include_str!("format.txt");
const LENGTHS: &str = "lengths.svg";
/// The kind of finding about conversations above the limit.
const TOO_LONG: &str = "too-long";
/// Between two lines of progress, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Check training data, or convert it from Parquet
#[derive(Args, Clone, Debug)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum DataCommand {
    Check(Box<CheckArgs>),
    Convert(ConvertArgs),
}

/// Convert a Parquet file, as Hugging Face's datasets writes it, to JSON lines
///
/// Embedded pictures become files beside the records. Prints the data file.
#[derive(Args, Clone, Debug)]
struct ConvertArgs {
    /// Parquet, compressed by Snappy or not at all.
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Folder for data.jsonl and pictures/.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Check a data file against a model folder, without its weights
///
/// Renders and counts every sample as in training, and decodes every picture. Lists errors (records
/// that give no sample) and warnings with their lines, then the lengths of samples, the trained
/// share, and the fill of packed rows. The exit code is 1 if there are errors, unless --on-error
/// skip leaves their records out.
#[derive(Args, Clone, Debug)]
#[command(after_help = FORMAT)]
struct CheckArgs {
    /// JSONL, or a JSON array.
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// A Hugging Face model folder: config.json, the tokenizer, the chat template and
    /// preprocessor_config.json. Weights are not read.
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    model: PathBuf,
    #[command(flatten)]
    records: RecordOptions,
    #[command(flatten)]
    labels: LabelOptions,
    /// Read only the headers of pictures: faster, but misses damage after them.
    #[arg(long)]
    headers: bool,
    /// Check only the record at this line, and draw it: each token with its label and position ids,
    /// and the pictures as seen by the model.
    #[arg(long, value_name = "LINE", value_parser = count_in(1..=usize::MAX))]
    show: Option<usize>,
    /// Print one JSON object: file, model, records, bad_records, findings (kind, severity, count,
    /// lines, examples), spreads of tokens, vision_tokens, trained_tokens and pictures,
    /// trained_share, packing, seconds and picture.
    #[arg(long)]
    json: bool,
    /// Folder for the drawings.
    #[arg(long, value_name = "DIR", default_value = "out/data")]
    out: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// If the file or the folder cannot be read, or a result cannot be written.
pub(crate) fn run(args: &DataArgs) -> Result<ExitCode, Box<dyn Error>> {
    let args = match &args.command {
        DataCommand::Check(args) => args,
        DataCommand::Convert(args) => return args.run(),
    };
    let encoder = args.encoder()?;
    fs::create_dir_all(&args.out)
        .map_err(|error| format!("cannot create {}: {error}", args.out.display()))?;
    let start = Instant::now();
    let (report, file) = match args.show {
        Some(line) => args.show(line as u64, &encoder)?,
        None => {
            let report = args.check(&encoder)?;
            let file = args.out.join(LENGTHS);
            lengths::draw(&file, &report)
                .map_err(|error| format!("cannot draw {}: {error}", file.display()))?;
            (report, file)
        }
    };
    let checked = Checked {
        args,
        report: &report,
        seconds: start.elapsed().as_secs_f64(),
        picture: &file,
    };
    let mut out = BufWriter::new(stdout());
    if args.json {
        writeln!(out, "{}", checked.json()?)?;
    } else {
        checked.print(&mut out)?;
    }
    out.flush()?;
    let is_left_out = |kind: &str| {
        let records = &args.records;
        records.on_error == Faulty::Skip || (records.too_long == TooLong::Skip && kind == TOO_LONG)
    };
    Ok(
        match report
            .of(Severity::Error)
            .all(|found| is_left_out(found.kind))
        {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        },
    )
}

impl ConvertArgs {
    #[cfg(feature = "parquet")]
    fn run(&self) -> Result<ExitCode, Box<dyn Error>> {
        let bar = ProgressBar::new(0);
        let converted = vlm_data::parquet::convert(&self.file, &self.out, &|done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        let converted = converted?;
        note(format_args!(
            "{} records, {} pictures in files of their own",
            converted.records, converted.pictures
        ));
        writeln!(stdout(), "{}", converted.data.display())?;
        Ok(ExitCode::SUCCESS)
    }

    #[cfg(not(feature = "parquet"))]
    fn run(&self) -> Result<ExitCode, Box<dyn Error>> {
        Err(crate::device::built_without("Parquet", "parquet").into())
    }
}

impl CheckArgs {
    fn encoder(&self) -> Result<SampleEncoder, Box<dyn Error>> {
        // A folder of which no model is built is refused here, in the words of training.
        VlmConfig::from_folder(&self.model)?;
        let options = self.records.samples(Some(&self.labels));
        Ok(SampleEncoder::from_folder(&self.model, options)?)
    }

    /// The records of the file, read through a bar.
    fn read(
        &self,
        bar: &ProgressBar,
    ) -> Result<Conversations<impl std::io::BufRead + use<>>, String> {
        let file = plain_files::open(&self.file).map_err(|error| error.to_string())?;
        bar.set_length(file.metadata().map_or(0, |data| data.len()));
        let folder = self.file.parent().unwrap_or(Path::new(""));
        let input = BufReader::with_capacity(1 << 16, bar.wrap_read(file));
        Ok(Conversations::new(
            input,
            folder,
            &self.records.file_options(Answers::Any),
        ))
    }

    /// Checks the whole file.
    fn check(&self, encoder: &SampleEncoder) -> Result<DataReport, String> {
        let bar = ProgressBar::new(0);
        let template = "{bar:24} {percent} % {eta} left  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let records = self.read(&bar)?;
        bar.enable_steady_tick(Duration::from_millis(200));
        let options = CheckOptions {
            pixels: !self.headers,
            ..CheckOptions::default()
        };
        let last = Mutex::new(Instant::now());
        let report = check_data(records, encoder, options, &|records, errors| {
            let Ok(mut last) = last.try_lock() else {
                return;
            };
            let message = || format!("{records} records, {errors} with errors");
            if bar.is_hidden() && last.elapsed() >= LINE_EVERY {
                *last = Instant::now();
                note(format_args!("{}", message()));
            } else if !bar.is_hidden() && records.is_multiple_of(16) {
                bar.set_message(message());
            }
        });
        bar.finish_and_clear();
        Ok(report)
    }

    /// Checks the record that a line belongs to, and draws it.
    fn show(
        &self,
        line: u64,
        encoder: &SampleEncoder,
    ) -> Result<(DataReport, PathBuf), Box<dyn Error>> {
        let found = self.read(&ProgressBar::hidden())?.at_line(line);
        let (line, record) = found.map_err(|first| match first {
            Some(first) => format!("the first record begins at line {first}, after line {line}"),
            None => format!("{} has no records", self.file.display()),
        })?;
        let conversation = record.as_ref().ok().cloned();
        let options = CheckOptions {
            threads: 1,
            pixels: true,
        };
        let report = check_data(std::iter::once(record), encoder, options, &|_, _| {});
        let file = self.out.join(format!("line-{line}.html"));
        let page = self.page(line, encoder, conversation.as_ref(), &report)?;
        plain_files::replace(&file, page.as_bytes())?;
        Ok((report, file))
    }

    /// The page of a record.
    fn page(
        &self,
        line: u64,
        encoder: &SampleEncoder,
        conversation: Option<&Conversation>,
        report: &DataReport,
    ) -> Result<String, Box<dyn Error>> {
        // The report has the error of a record that gives no sample.
        let sample = conversation.and_then(|conversation| encoder.encode_first(conversation).ok());
        let ids = sample.as_ref().map(|sample| self.position_ids(sample));
        let ids = ids.transpose()?;
        let page = SamplePage {
            title: &format!("{}, line {line}", self.file.display()),
            model: &self.model.display().to_string(),
            report,
            conversation,
            sample: sample
                .as_ref()
                .zip(ids.as_ref())
                .map(|(sample, ids)| PageSample {
                    sample,
                    ids,
                    range: rope_check::prompt::id_range,
                }),
        };
        Ok(page.render(encoder)?)
    }

    /// Position ids of a sample's tokens: time, height, width.
    fn position_ids(&self, sample: &TrainingSample) -> Result<[Vec<f64>; 3], Box<dyn Error>> {
        let rules = VlmConfig::from_folder(&self.model)?.position_rules;
        let ids = rules.position_ids(&Prompt {
            input_ids: &sample.text.input_ids,
            rows: Rows::Batch(1),
            image_grids: &sample.image_grids,
            video_grids: &sample.video_grids,
            seconds_per_grid: Some(&sample.seconds_per_grid),
            ..Prompt::default()
        })?;
        Ok([0, 1, 2].map(|axis| ids.axis(axis).to_vec()))
    }
}
