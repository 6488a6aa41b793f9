//! `mrope positions`: position ids of a prompt, as a table, as JSON, and drawn.

mod picture;

use std::error::Error;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use rope_core::position_ids::{PositionIds, PositionRules, TokenIds};
use vlm_train::job::Version;

use crate::arguments::count_in;
use crate::stdio::stdout;
use crate::table::Table;
use rope_check::prompt::{
    ExpandedPrompt, PromptDescription, PromptPart, PromptReport, id_range, id_text,
};

const FORMAT: &str = include_str!("positions/format.txt");

/// Print and draw the position ids (time, height, width) of a prompt
///
/// Prints a table of the prompt's parts with the ids on each axis. `--tokens` prints every token;
/// `--svg` draws the ids over the sequence, and each grid as heat maps.
#[derive(Args, Clone, Debug)]
#[command(after_help = FORMAT)]
pub(crate) struct PositionsArgs {
    /// Segments, or one JSON file.
    #[arg(required = true, value_name = "SEGMENT|FILE")]
    prompt: Vec<String>,
    /// Hugging Face model type whose rules apply. Default: the file's, or `qwen2_vl`.
    #[arg(long, value_name = "MODEL_TYPE")]
    model: Option<String>,
    /// A config.json to take the rules from instead.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Ids as designed, or as computed by a version of transformers (some differ).
    #[arg(long, value_enum, default_value_t = Version::Default)]
    version: Version,
    /// Text tokens before each frame of a video, in families with a block per frame.
    #[arg(long, default_value_t = 6, value_name = "COUNT")]
    #[arg(value_parser = count_in(0..=rope_check::prompt::MAX_TOKENS))]
    timestamp_tokens: usize,
    /// Print a row per token.
    #[arg(long)]
    tokens: bool,
    /// Print one JSON object: model, position_ids as 3 rows of ids (fractions where the version has
    /// them), kinds, cu_seqlens, rope_deltas, departures from the rule, and parts.
    #[arg(long, conflicts_with = "tokens")]
    json: bool,
    /// Draw the ids into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl PositionsArgs {
    /// Refuses a picture that would replace a file that is read.
    fn expect_inputs_kept(&self) -> Result<(), String> {
        let Some(svg) = &self.svg else {
            return Ok(());
        };
        let prompt = self.prompt.iter().map(Path::new);
        let mut read = prompt.chain(self.config.as_deref());
        match read.find(|path| path.is_file() && plain_files::is_same(path, svg)) {
            Some(path) => Err(format!(
                "--svg would replace {}, which this command reads; expected another file",
                path.display()
            )),
            None => Ok(()),
        }
    }
}

/// Prints, and draws where asked.
///
/// # Errors
/// If the prompt or the configuration cannot be read or has no positions, or a file cannot be
/// written.
pub(crate) fn run(args: &PositionsArgs) -> Result<(), Box<dyn Error>> {
    args.expect_inputs_kept()?;
    let description = PromptDescription::read(&args.prompt)?;
    let (model, rules) = rules(args, &description)?;
    let rules = rules.with_compatibility(args.version.into());
    let prompt = description.lay_out(&rules, args.timestamp_tokens)?;
    let found = rules.position_ids(&prompt.prompt())?;

    let mut out = BufWriter::new(stdout());
    if args.json {
        let report = PromptReport::new(&model, &prompt, &found);
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        print_spans(&mut out, &model, &prompt, &found)?;
        if args.tokens {
            print_tokens(&mut out, &prompt, &found)?;
        }
    }
    out.flush()?;
    if let Some(path) = &args.svg {
        picture::draw(path, &model, &prompt, &found)
            .map_err(|error| format!("cannot draw {}: {error}", path.display()))?;
    }
    Ok(())
}

fn rules(
    args: &PositionsArgs,
    description: &PromptDescription,
) -> Result<(String, PositionRules), Box<dyn Error>> {
    if let Some(path) = &args.config {
        let json = plain_files::read_text(path, plain_files::MAX_TEXT_BYTES)?;
        let rules = PositionRules::from_hf_config(&json)?;
        return Ok((path.display().to_string(), rules));
    }
    let model = args.model.clone().or(description.model.clone());
    let model = model.unwrap_or_else(|| "qwen2_vl".to_owned());
    // Token types say what each token is, so no id is looked at.
    let rules = PositionRules::new(&model, TokenIds::new(-1, -1))?;
    Ok((model, rules))
}

fn print_spans(
    out: &mut impl Write,
    model: &str,
    prompt: &ExpandedPrompt,
    found: &PositionIds,
) -> std::io::Result<()> {
    let ids = (0..3).flat_map(|axis| found.axis(axis).iter().copied());
    let (tokens, highest) = (found.tokens(), id_text(ids.fold(0.0, f64::max)));
    writeln!(
        out,
        "{model}: {tokens} tokens, highest position {highest}\n"
    )?;
    let packed = prompt.cu_seqlens.len() > 2;
    let mut table = Table::new(&["part", "merged grid", "tokens", "T", "H", "W"], &[]);
    for span in &prompt.spans {
        // Empty sequences start where the next one does.
        let starts = |sequence: &usize| *sequence == span.tokens.start;
        if packed && let Some(sequence) = prompt.cu_seqlens.iter().rposition(starts) {
            table.row([format!("sequence {sequence}")]);
        }
        // The ids of the placeholders alone, where there are any: start and end tokens are text.
        let shown = prompt.shown(span);
        let ids = |axis| {
            let ids = shown.iter().map(|token| found.axis(axis)[*token]);
            id_range(&ids.collect::<Vec<f64>>())
        };
        let merged = match span.part {
            PromptPart::Image(_) | PromptPart::Video(..) => {
                span.merged.map(|n| n.to_string()).join(" x ")
            }
            PromptPart::Text(_) | PromptPart::Audio(_) => String::new(),
        };
        let tokens = format!("{}..{}", span.tokens.start, span.tokens.end - 1);
        table.row([span.name(), merged, tokens, ids(0), ids(1), ids(2)]);
    }
    write!(out, "{table}")?;
    let deltas: Vec<String> = found.rope_deltas().iter().map(|id| id_text(*id)).collect();
    writeln!(out, "\nrope delta: {}", deltas.join(", "))?;
    for divergence in found.divergences() {
        writeln!(out, "departs from the rule: {divergence}")?;
    }
    Ok(())
}

fn print_tokens(
    out: &mut impl Write,
    prompt: &ExpandedPrompt,
    found: &PositionIds,
) -> std::io::Result<()> {
    let mut table = Table::new(&["part"], &["token", "T", "H", "W"]);
    for span in &prompt.spans {
        for token in span.tokens.clone() {
            let [time, height, width] = [0, 1, 2].map(|axis| id_text(found.axis(axis)[token]));
            let part = if prompt.kinds[token] == 0 {
                "text".to_owned()
            } else {
                span.name()
            };
            table.row([part, token.to_string(), time, height, width]);
        }
    }
    write!(out, "\n{table}")
}
