//! The data of a run, known whole before its first step.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vlm_data::{
    DataSet, Fingerprint, MicroBatch, NoSample, SampleEncoder, Share, Survey, SurveyOptions,
    VlmDataError,
};
use vlm_models::ModelPart;

use super::config::{FinetuneConfig, SurveyDepth};
use super::records::{Faulty, TooLong};
use super::{Notice, Notify};
use crate::error::{Result, VlmTrainError};
use crate::recipe::TrainedParts;

/// The surveys of a folder's runs, by what they depend on.
const SURVEYS: &str = "survey.json";
/// More than the surveys of 2^32 records take.
const MOST_SURVEY: u64 = 1 << 38;
/// Files of a model's folder beyond this many bytes hold weights.
const MOST_BYTES: u64 = 64 << 20;
/// Faults that are listed.
const LISTED: usize = 10;

/// The records of a run that give samples.
#[derive(Debug)]
pub(super) struct RunData {
    pub(super) train: Arc<DataSet>,
    pub(super) validation: Option<Arc<DataSet>>,
    /// Tokens of the training samples.
    pub(super) lengths: Vec<usize>,
    /// The training record that shows the effect of what is trained.
    probe: usize,
}

/// The files of a run, before their records are read.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) train: DataSet,
    pub(super) validation: Option<DataSet>,
}

impl Files {
    /// Indexes the files, and divides their records.
    ///
    /// # Errors
    /// Those of the files; if no record is left for one of both purposes.
    pub(super) fn open(options: &FinetuneConfig) -> Result<Self> {
        let mut files = Vec::new();
        for file in &options.data.data {
            files.push(Arc::new(
                options
                    .data
                    .records
                    .open(&file.path, options.loss.loss.answers())
                    .map_err(VlmDataError::from)?,
            ));
        }
        let shares: Vec<Share> = options.data.data.iter().map(|file| file.share).collect();
        let all = DataSet::new(files)?;
        let count = all.len();
        let [train, held] = all.divide(
            &shares,
            options.data.split_validation,
            options.optimizer.seed,
        );
        if train.is_empty() && count > 0 {
            let held = held.len();
            return Err(VlmTrainError::Options(format!(
                "of {count} records, {held} are held out and none is left to train on; lower \
                 --split-validation, or raise the shares of --data"
            )));
        }
        let mut validation = None;
        if options.data.split_validation.is_some() {
            if held.is_empty() {
                return Err(VlmTrainError::Options(format!(
                    "--split-validation holds out none of {count} records; raise it"
                )));
            }
            validation = Some(held);
        } else if !options.data.val.is_empty() {
            let mut files = Vec::new();
            for path in &options.data.val {
                files.push(Arc::new(
                    options
                        .data
                        .records
                        .open(path, options.loss.loss.answers())
                        .map_err(VlmDataError::from)?,
                ));
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
        options: &FinetuneConfig,
        encoder: &SampleEncoder,
        trained: &TrainedParts,
        writes: bool,
        (notify, stop): (Notify<'_>, &AtomicBool),
    ) -> Result<Option<RunData>> {
        let mut surveys = Surveys::of(options, encoder)?;
        let mut sound = |set: DataSet, name: &str| -> Result<Option<_>> {
            let Some(survey) = surveys.get(&set, name, options, encoder, (notify, stop)) else {
                return Ok(None);
            };
            expect_sound(&set, &survey, options, notify)?;
            let set = set.choose(&survey.samples());
            if set.is_empty() {
                let text = format!("no record of the {name} data gives a sample");
                return Err(VlmTrainError::Options(text));
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
        if writes {
            surveys.write(options)?;
        }
        let records = survey.samples();
        let with_patches = survey.first_with_patches();
        let parts = parts_of(trained);
        let sees = parts.iter().any(|part| *part != ModelPart::Decoder);
        if sees && with_patches.is_none() {
            let text = "no record has a picture or video, so tower and merger get no gradient";
            if !parts.contains(&ModelPart::Decoder) {
                let text = format!("{text}; train the decoder (--parts)");
                return Err(VlmTrainError::Options(text));
            }
            notify(Notice::Warning(&format!("{text} and stay as they are")));
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
        options: &FinetuneConfig,
        encoder: &SampleEncoder,
    ) -> vlm_data::Result<MicroBatch> {
        let sample = encoder.encode_record(&mut self.train.reader(), self.probe, true)?;
        MicroBatch::new(vec![sample], options.loader_options().cut)
    }
}

/// Names the records that give no sample.
///
/// # Errors
/// Unless the options leave them out.
fn expect_sound(
    set: &DataSet,
    survey: &Survey,
    options: &FinetuneConfig,
    notify: Notify<'_>,
) -> Result<()> {
    let is_left_out = |fault: &NoSample| match options.data.records.on_error {
        Faulty::Skip => true,
        Faulty::Stop => fault.is_too_long && options.data.records.too_long == TooLong::Skip,
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
        notify(Notice::Warning(&format!(
            "{count} of {records} records are left out\n{}",
            list(&left_out)
        )));
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
        return Err(VlmTrainError::Options(format!(
            "{count} of {records} records give no sample; {advice}\n{}",
            list(&wrong)
        )));
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
    fn of(options: &FinetuneConfig, encoder: &SampleEncoder) -> Result<Self> {
        let mut hash = Fingerprint::default();
        hash.add(
            format!(
                "{:?} {:?}",
                encoder.options(),
                options
                    .data
                    .records
                    .file_options(options.loss.loss.answers())
            )
            .as_bytes(),
        );
        hash.add(&others(&options.folder)?.to_le_bytes());
        let text = plain_files::read_text(&options.output.out.join(SURVEYS), MOST_SURVEY)
            .unwrap_or_default();
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
        options: &FinetuneConfig,
        encoder: &SampleEncoder,
        watch: (Notify<'_>, &AtomicBool),
    ) -> Option<Survey> {
        let pixels = options.data.survey == SurveyDepth::Pixels;
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
            None => (key(pixels), read(set, name, options, encoder, watch)?),
        };
        self.used.insert(key, survey.clone());
        Some(survey)
    }

    fn write(&self, options: &FinetuneConfig) -> Result<()> {
        if self.used == self.known {
            return Ok(());
        }
        let path = options.output.out.join(SURVEYS);
        let text = serde_json::to_vec(&self.used).map_err(VlmTrainError::file("write", &path))?;
        Ok(plain_files::write_whole(&path, &text)?)
    }
}

/// Reads all records. `None` once stopped.
fn read(
    set: &DataSet,
    name: &str,
    options: &FinetuneConfig,
    encoder: &SampleEncoder,
    (notify, stop): (Notify<'_>, &AtomicBool),
) -> Option<Survey> {
    let all = set.len();
    let show = |done: usize| {
        notify(Notice::Reading {
            data: name,
            done,
            all,
        });
    };
    let survey_options = SurveyOptions {
        threads: options.loader_options().threads,
        pixels: options.data.survey == SurveyDepth::Pixels,
    };
    let survey = Survey::take(set, encoder, survey_options, stop, &show);
    show(all);
    survey.filter(|_| !stop.load(Ordering::Relaxed))
}

/// A number that changes with the files of a model's folder besides its weights.
fn others(folder: &Path) -> Result<u64> {
    let mut names = Vec::new();
    let failed = || VlmTrainError::file::<std::io::Error>("read", folder);
    for entry in fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let data = fs::metadata(entry.path()).map_err(failed())?;
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
        hash.add(&plain_files::read(&path, MOST_BYTES)?);
    }
    Ok(hash.value())
}

/// The parts that are trained, or have adapters.
fn parts_of(trained: &TrainedParts) -> Vec<ModelPart> {
    let (adapted, whole) = match trained {
        TrainedParts::Lora(config) => (&config.parts[..], &config.whole),
        TrainedParts::Full(weights) => (&[][..], weights),
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
