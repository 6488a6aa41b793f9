//! The data of a run, known whole before its first step.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use vlm_data::{
    DataSet, Fingerprint, MicroBatch, NoSample, SampleEncoder, Share, Survey, SurveyOptions,
};
use vlm_models::ModelPart;
use vlm_train::{Recipe, TrainedParts};

use super::options::{FinetuneArgs, Survey as Reading};
use crate::data::options::{OnFault, TooLong};
use crate::stdio::note;

/// The surveys of a folder's runs, by what they depend on.
const SURVEYS: &str = "survey.json";
/// More than the surveys of 2^32 records take.
const MOST_SURVEY: u64 = 1 << 38;
/// Files of a model's folder beyond this many bytes hold weights.
const MOST_BYTES: u64 = 64 << 20;
/// Faults that are listed.
const LISTED: usize = 10;
/// Between two lines of progress, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The records of a run that give samples.
pub(super) struct RunData {
    pub(super) train: Arc<DataSet>,
    pub(super) validation: Option<Arc<DataSet>>,
    /// Tokens of the training samples.
    pub(super) lengths: Vec<usize>,
    /// The training record that shows the effect of what is trained.
    probe: usize,
}

/// The files of a run, before their records are read.
pub(super) struct Files {
    pub(super) train: DataSet,
    pub(super) validation: Option<DataSet>,
}

impl Files {
    /// Indexes the files, and divides their records.
    ///
    /// # Errors
    /// Those of the files; if no record is left for one of both purposes.
    pub(super) fn open(args: &FinetuneArgs) -> Result<Self, Box<dyn Error>> {
        let mut files = Vec::new();
        for file in &args.data {
            files.push(Arc::new(args.records.open(&file.path)?));
        }
        let shares: Vec<Share> = args.data.iter().map(|file| file.share).collect();
        let all = DataSet::new(files)?;
        let count = all.len();
        let [train, held] = all.divide(&shares, args.split_validation, args.seed);
        if train.is_empty() && count > 0 {
            let held = held.len();
            return Err(format!(
                "of {count} records, {held} are held out and none is left to train on; lower \
                 --split-validation, or raise the shares of --data"
            )
            .into());
        }
        let mut validation = None;
        if args.split_validation.is_some() {
            if held.is_empty() {
                return Err(format!(
                    "--split-validation holds out none of {count} records; raise it"
                )
                .into());
            }
            validation = Some(held);
        } else if !args.val.is_empty() {
            let mut files = Vec::new();
            for path in &args.val {
                files.push(Arc::new(args.records.open(path)?));
            }
            validation = Some(DataSet::new(files)?);
        }
        Ok(Self { train, validation })
    }

    /// Reads every record once, and leaves out those that give no sample, if the options say so.
    /// `None` once `stop` is true.
    ///
    /// # Errors
    /// For records that give no sample; if nothing that is trained is reached by any record.
    pub(super) fn survey(
        self,
        args: &FinetuneArgs,
        encoder: &SampleEncoder,
        recipe: &Recipe,
        stop: &AtomicBool,
    ) -> Result<Option<RunData>, Box<dyn Error>> {
        let mut surveys = Surveys::of(args, encoder)?;
        let mut sound = |set: DataSet, name: &str| -> Result<Option<_>, Box<dyn Error>> {
            let Some(survey) = surveys.get(&set, name, args, encoder, stop) else {
                return Ok(None);
            };
            expect_sound(&set, &survey, args)?;
            let set = set.choose(&survey.samples());
            if set.is_empty() {
                return Err(format!("no record of the {name} data gives a sample").into());
            }
            Ok(Some((Arc::new(set), survey)))
        };
        let Some((train, survey)) = sound(self.train, "training")? else {
            return Ok(None);
        };
        let mut validation = None;
        if let Some(set) = self.validation {
            let Some((set, _)) = sound(set, "validation")? else {
                return Ok(None);
            };
            validation = Some(set);
        }
        surveys.write(args)?;
        let records = survey.samples();
        let with_patches = survey.first_with_patches();
        let parts = recipe.trained.parts();
        let sees = parts.iter().any(|part| *part != ModelPart::Decoder);
        if sees && with_patches.is_none() {
            let text = "no record has a picture or video, so tower and merger get no gradient";
            if !parts.contains(&ModelPart::Decoder) {
                return Err(format!("{text}; train the decoder (--parts)").into());
            }
            note(format_args!("warning: {text} and stay as they are"));
        }
        let probe = with_patches
            .filter(|_| sees)
            .and_then(|record| records.binary_search(&record).ok());
        let lengths = survey.lengths().into_iter().filter(|tokens| *tokens > 0);
        Ok(Some(RunData {
            train,
            validation,
            lengths: lengths.collect(),
            probe: probe.unwrap_or(0),
        }))
    }
}

impl RunData {
    /// A micro-batch that shows the effect of what is trained.
    ///
    /// # Errors
    /// Those of the record.
    pub(super) fn probe(
        &self,
        args: &FinetuneArgs,
        encoder: &SampleEncoder,
    ) -> vlm_data::Result<MicroBatch> {
        let sample = encoder.encode(&self.train.reader().read(self.probe)?)?;
        MicroBatch::new(vec![sample], args.loader_options().cut)
    }
}

/// Names the records that give no sample.
///
/// # Errors
/// Unless the options leave them out.
fn expect_sound(set: &DataSet, survey: &Survey, args: &FinetuneArgs) -> Result<(), Box<dyn Error>> {
    let is_left_out = |fault: &NoSample| match args.records.on_error {
        OnFault::Skip => true,
        OnFault::Stop => fault.is_too_long && args.records.too_long == TooLong::Skip,
    };
    let list = |faults: &[(usize, &NoSample)]| {
        let lines = faults.iter().take(LISTED);
        let mut lines: Vec<String> = lines
            .map(|(_, fault)| format!("  {}", fault.message))
            .collect();
        if faults.len() > LISTED {
            lines.push(format!("  and {} more", faults.len() - LISTED));
        }
        lines.join("\n")
    };
    let (left_out, wrong): (Vec<_>, Vec<_>) =
        survey.faults().partition(|(_, fault)| is_left_out(fault));
    let records = set.len();
    if !left_out.is_empty() {
        let count = left_out.len();
        note(format_args!(
            "warning: {count} of {records} records are left out\n{}",
            list(&left_out)
        ));
    }
    if !wrong.is_empty() {
        let long = wrong.iter().any(|(_, fault)| fault.is_too_long);
        let advice = if long {
            "mend them, or leave them out with --on-error skip; for long ones, raise --micro-tokens \
             and --max-tokens, or use --too-long drop-turns or skip"
        } else {
            "mend them, or leave them out with --on-error skip"
        };
        let count = wrong.len();
        return Err(format!(
            "{count} of {records} records give no sample; {advice}\n{}",
            list(&wrong)
        )
        .into());
    }
    Ok(())
}

/// Surveys by the fingerprints of data, folder and options.
struct Surveys {
    folder: String,
    known: BTreeMap<String, Survey>,
    used: BTreeMap<String, Survey>,
}

impl Surveys {
    fn of(args: &FinetuneArgs, encoder: &SampleEncoder) -> Result<Self, Box<dyn Error>> {
        let mut hash = Fingerprint::default();
        hash.add(format!("{:?} {:?}", encoder.options(), args.records.file_options()).as_bytes());
        hash.add(&others(&args.folder)?.to_le_bytes());
        let text = plain_files::read_text(&args.out.join(SURVEYS), MOST_SURVEY).unwrap_or_default();
        Ok(Self {
            folder: format!("{:016x}", hash.value()),
            // A file that cannot be read only costs the reading of the data.
            known: serde_json::from_str(&text).unwrap_or_default(),
            used: BTreeMap::new(),
        })
    }

    fn get(
        &mut self,
        set: &DataSet,
        name: &str,
        args: &FinetuneArgs,
        encoder: &SampleEncoder,
        stop: &AtomicBool,
    ) -> Option<Survey> {
        let pixels = args.survey == Reading::Pixels;
        let key = |pixels: bool| {
            let part = if pixels { "pixels" } else { "headers" };
            format!("{} {:016x} {part}", self.folder, set.fingerprint())
        };
        let known = [key(pixels), key(true)].into_iter().find_map(|key| {
            let survey = self
                .known
                .get(&key)
                .filter(|survey| survey.records.len() == set.len());
            Some((key, survey?.clone()))
        });
        let (key, survey) = match known {
            Some(known) => known,
            None => (key(pixels), read(set, name, args, encoder, stop)?),
        };
        self.used.insert(key, survey.clone());
        Some(survey)
    }

    fn write(&self, args: &FinetuneArgs) -> Result<(), Box<dyn Error>> {
        if args.host == 0 && !args.prove_cut && self.used != self.known {
            let text = serde_json::to_vec(&self.used)?;
            plain_files::write_whole(&args.out.join(SURVEYS), &text)?;
        }
        Ok(())
    }
}

/// Reads all records and shows progress.
fn read(
    set: &DataSet,
    name: &str,
    args: &FinetuneArgs,
    encoder: &SampleEncoder,
    stop: &AtomicBool,
) -> Option<Survey> {
    let bar = ProgressBar::new(set.len() as u64);
    if args.quiet {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let template = "{bar:24} {pos}/{len} {eta} left  {wide_msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(format!("reading the {name} data"));
    let last = Mutex::new(Instant::now());
    let show = |records: usize| {
        let Ok(mut last) = last.try_lock() else {
            return;
        };
        bar.set_position(records as u64);
        if bar.is_hidden() && !args.quiet && last.elapsed() >= LINE_EVERY {
            *last = Instant::now();
            note(format_args!(
                "read {records} of {} {name} records",
                set.len()
            ));
        }
    };
    let options = SurveyOptions {
        threads: args.loader_options().threads,
        pixels: args.survey == Reading::Pixels,
    };
    let survey = Survey::take(set, encoder, options, stop, &show);
    bar.finish_and_clear();
    survey.filter(|_| !stop.load(Ordering::Relaxed))
}

/// A number that changes with the files of a model's folder besides its weights.
fn others(folder: &Path) -> Result<u64, Box<dyn Error>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let data = fs::metadata(entry.path())?;
        let is_weights = entry
            .path()
            .extension()
            .is_some_and(|end| end == "safetensors" || end == "bin");
        if data.is_file() && data.len() <= MOST_BYTES && !is_weights {
            names.push(entry.file_name());
        }
    }
    names.sort();
    let mut hash = Fingerprint::default();
    for name in names {
        hash.add(name.as_encoded_bytes());
        let path = folder.join(name);
        hash.add(&plain_files::read(&path, MOST_BYTES).map_err(|error| error.cause)?);
    }
    Ok(hash.value())
}

/// The parts that a recipe trains.
trait Parts {
    fn parts(&self) -> Vec<ModelPart>;
}

impl Parts for TrainedParts {
    fn parts(&self) -> Vec<ModelPart> {
        let (adapted, whole) = match self {
            Self::Lora(config) => (&config.parts[..], &config.whole),
            Self::Full(weights) => (&[][..], weights),
        };
        // Tower and merger see the same records.
        let of_module = |module: &String| match module.contains("visual") {
            true => ModelPart::Tower,
            false => ModelPart::Decoder,
        };
        let modules = whole.modules.iter().map(of_module);
        let parts = adapted.iter().chain(&whole.parts).copied();
        parts.chain(modules).collect()
    }
}
