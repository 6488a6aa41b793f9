//! `mrope score`: the log-probabilities of a file's answers.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use vlm_data::text::Answers;
use vlm_data::{Cut, MicroBatch, SampleEncoder};
use vlm_train::job::{CutChoice, LabelOptions, RecordOptions};
use vlm_train::score;

use crate::arguments::{complaint, count_in};
use crate::model::ModelArgs;
use crate::stdio::{note, stdout};

/// Options of `mrope score`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Conversations whose answers to score
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    data: PathBuf,

    /// Number of conversations to score, from the first [default: all]
    #[arg(long, value_parser = count_in(1..=usize::MAX))]
    limit: Option<usize>,

    /// Conversations per batch
    #[arg(long, default_value_t = 4, value_parser = count_in(1..=65_536))]
    batch: usize,

    /// Pack conversations into one row, or pad them
    #[arg(long, value_name = "BATCHING", value_enum, default_value_t = CutChoice::Packed)]
    batching: CutChoice,

    #[command(flatten)]
    records: RecordOptions,

    #[command(flatten)]
    labels: LabelOptions,

    /// Print one JSON object per line: line, tokens, log_probabilities
    #[arg(long)]
    json: bool,
}

/// Scores the answers, and prints the mean of all tokens.
///
/// # Errors
/// Those of the folder, the adapter, the data, and the device, each with what to do.
pub(crate) fn run(args: &ScoreArgs) -> Result<(), Box<dyn Error>> {
    let samples = args.records.samples(Some(&args.labels));
    let encoder = SampleEncoder::from_folder(&args.model.folder, samples)?;
    let index = args.records.open(&args.data, Answers::One)?;
    let mut reader = index.reader()?;
    let (_held, model) = args.model.load()?;
    let count = args.limit.unwrap_or(usize::MAX).min(index.len());
    let (mut answers, mut tokens, mut sum) = (0_usize, 0_usize, 0.0);
    for batch in (0..count).collect::<Vec<_>>().chunks(args.batch) {
        let mut samples = Vec::with_capacity(batch.len());
        for record in batch {
            let sample: Result<_, Box<dyn Error>> = match reader.read(*record) {
                Ok(conversation) => encoder.encode(&conversation).map_err(Into::into),
                Err(error) => Err(error.into()),
            };
            match sample {
                Ok(sample) => samples.push(sample),
                Err(error) if args.records.leaves_out(&*error) => {
                    note(format_args!("warning: left out: {}", complaint(&error)));
                }
                Err(error) => return Err(error),
            }
        }
        if samples.is_empty() {
            continue;
        }
        // All are one batch, however long.
        let most = usize::MAX;
        let cut = match args.batching {
            CutChoice::Packed => Cut::Packed { tokens: most },
            CutChoice::Padded => Cut::Padded { tokens: most },
        };
        let mut out = stdout();
        for of_answer in score(&model, &MicroBatch::new(samples, cut)?)? {
            let all = of_answer.sum();
            (answers, tokens, sum) = (answers + 1, tokens + of_answer.tokens.len(), sum + all);
            if args.json {
                writeln!(out, "{}", serde_json::to_string(&of_answer)?)?;
            } else {
                let count = of_answer.tokens.len();
                let (line, mean) = (of_answer.line, all / count.max(1) as f64);
                writeln!(
                    out,
                    "line {line}: {count} tokens, mean {mean:.4}, sum {all:.4}"
                )?;
            }
        }
    }
    let mean = sum / tokens.max(1) as f64;
    note(format_args!(
        "{tokens} tokens of {answers} conversations: mean log-probability {mean:.4}, perplexity \
         {:.4}",
        (-mean).exp()
    ));
    Ok(())
}
