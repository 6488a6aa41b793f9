//! Where results go.

use std::error::Error;
use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rope_benches::bars::Bar;
use rope_benches::chart::BarChart;
use rope_benches::rows::{write_csv, write_json_lines};
use serde::Serialize;

/// Forms of the results.
#[derive(Args, Clone, Debug)]
pub(crate) struct OutputArgs {
    /// One JSON object per row and line on standard output, and nothing else there.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write the rows to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also draw them, as bars.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Exit with 1 if a bar is not met.
    #[arg(long)]
    check: bool,
}

impl OutputArgs {
    /// Writes the rows in every form that was asked for, `table` where JSON was not.
    ///
    /// # Errors
    /// If an output cannot be written.
    pub(crate) fn write<R: Serialize>(
        &self,
        rows: &[R],
        chart: impl FnOnce() -> BarChart,
        table: impl FnOnce() -> String,
        bars: &[Bar],
    ) -> Result<ExitCode, Box<dyn Error>> {
        if let Some(path) = &self.csv {
            let mut text = Vec::new();
            write_csv(rows, &mut text)?;
            write_file(path, &text)?;
        }
        if let Some(path) = &self.svg {
            write_file(path, chart().svg()?.as_bytes())?;
        }
        let mut out = stdout().lock();
        if self.json {
            write_json_lines(rows, &mut out)?;
        } else {
            write!(out, "{}", table())?;
            for bar in bars {
                writeln!(out, "{bar}")?;
            }
        }
        out.flush()?;
        let failed = self.check && bars.iter().any(|bar| !bar.met);
        if failed && self.json {
            for bar in bars.iter().filter(|bar| !bar.met) {
                eprintln!("{bar}");
            }
        }
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

fn write_file(path: &PathBuf, text: &[u8]) -> Result<(), Box<dyn Error>> {
    fs::write(path, text)
        .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}

/// A bar on standard error.
///
/// # Errors
/// None; the template is valid.
pub(crate) fn progress(steps: usize) -> Result<ProgressBar, Box<dyn Error>> {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {msg}")?;
    Ok(ProgressBar::new(steps as u64).with_style(style))
}
