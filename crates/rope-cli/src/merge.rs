//! `mrope merge`: a thin user of [`vlm_models::Merge`].

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

use burn::tensor::Device;
use clap::{Args, ValueHint};
use indicatif::{ProgressBar, ProgressStyle};
use vlm_models::{Merge, MergedTensor};

use crate::stdio::{note, stdout};
use crate::table::Table;

/// Weights that are listed.
const LISTED: usize = 10;
/// Above it more than this share of an adapter's effect on a weight is lost, which is said.
const MUCH: f64 = 0.5;

/// Options of `mrope merge`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MergeArgs {
    /// Folder of the adapter's base model
    #[arg(value_hint = ValueHint::DirPath)]
    folder: PathBuf,

    /// Adapter folder: adapter_config.json and adapter_model.safetensors. Repeat it for several
    /// adapters, which are added in this order
    #[arg(long, value_name = "DIR", required = true, value_hint = ValueHint::DirPath)]
    adapter: Vec<PathBuf>,

    /// Factors of the adapters' effects, separated by commas [default: 1 for each]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = factor)]
    weights: Vec<f64>,

    /// Folder for the merged model, which must not exist yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Accept an adapter that records another checkpoint; its names and shapes must still fit
    #[arg(long)]
    any_base: bool,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor != 0.0 => Ok(factor),
        _ => Err("expected a finite number other than 0".to_owned()),
    }
}

/// Merges, checks and reports.
///
/// # Errors
/// Those of [`Merge`]; weights that are not one for each adapter.
pub(crate) fn run(args: &MergeArgs) -> Result<(), Box<dyn Error>> {
    let (adapters, weights) = (args.adapter.len(), args.weights.len());
    if weights != 0 && weights != adapters {
        return Err(format!(
            "--weights has {weights} numbers for {adapters} adapters; give one for each --adapter"
        )
        .into());
    }
    let weights = args.weights.iter().copied().chain(std::iter::repeat(1.0));
    let adapters: Vec<(PathBuf, f64)> = args.adapter.iter().cloned().zip(weights).collect();
    let merge = Merge::open(&args.folder, &adapters, args.any_base, &Device::flex())?;
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} weights merged, {wide_msg}") {
        bar.set_style(style);
    }
    let mut merged: Vec<MergedTensor> = Vec::new();
    let check = merge.write(&args.out, &mut |tensor| {
        bar.inc(1);
        bar.set_message(tensor.name.clone());
        merged.push(tensor.clone());
    })?;
    bar.finish_and_clear();

    let mut out = stdout();
    merged.sort_by(|left, right| right.lost.total_cmp(&left.lost));
    let columns = ["rms change", "largest rounding", "lost to rounding"];
    let mut table = Table::new(&["weight", "type"], &columns);
    for tensor in merged.iter().take(LISTED) {
        table.row([
            tensor.name.clone(),
            format!("{:?}", tensor.dtype).to_lowercase(),
            format!("{:.2e}", tensor.change),
            format!("{:.2e}", tensor.rounding),
            format!("{:.2e}", tensor.lost),
        ]);
    }
    write!(out, "{table}")?;
    if merged.len() > LISTED {
        writeln!(out, "  and {} with less", merged.len() - LISTED)?;
    }
    writeln!(
        out,
        "logits of a prompt with a picture: largest {:.3}, the adapter changes one by {:.2e}, \
         merging by {:.2e}",
        check.largest, check.effect, check.difference
    )?;
    writeln!(out, "{}", args.out.display())?;
    if check.effect == 0.0 {
        note("warning: the adapter changes no logit; has it been trained?");
    }
    if merged.iter().any(|tensor| tensor.lost > MUCH) {
        note(format_args!(
            "warning: rounding takes more than {:.0} % of the effect on some weights; the adapter \
             beside the base keeps it",
            100.0 * MUCH
        ));
    }
    Ok(())
}
