//! `mrope bench`: what a rotation costs in bytes and in time, compared with other implementations.

mod memory;
mod meter;
mod speed;

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use rope_bench::rows::write_json_lines;
use serde::Serialize;

use crate::stdio::stdout;

/// Measure memory and time of rotations against a copy, composed operations and burn's rotation
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    Memory(memory::MemoryArgs),
    Speed(speed::SpeedArgs),
}

/// Runs a benchmark.
///
/// # Errors
/// If a result is wrong, in which case it is not timed, or an output cannot be written.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Box<dyn Error>> {
    match &args.what {
        What::Memory(args) => memory::run(args),
        What::Speed(args) => speed::run(args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the rows as JSON lines, or as a table.
///
/// # Errors
/// If standard output cannot be written.
fn print<R: Serialize>(
    rows: &[R],
    as_json: bool,
    table: impl FnOnce(&[R]) -> String,
) -> Result<(), Box<dyn Error>> {
    let mut out = stdout();
    if as_json {
        write_json_lines(rows, &mut out)?;
    } else {
        write!(out, "{}", table(rows))?;
    }
    Ok(out.flush()?)
}

/// A progress bar on standard error.
///
/// # Errors
/// None; the template is valid.
fn progress(steps: usize) -> Result<ProgressBar, Box<dyn Error>> {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {wide_msg}")?;
    Ok(ProgressBar::new(steps as u64).with_style(style))
}
