//! `mrope gradcheck`.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufWriter, Write as _};
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rope_check::ascend;
use rope_check::cases::NamedCase;
use rope_check::gradcheck::{
    CheckSummary, Depth, Row, check, check_dump, check_on, in_order, suite,
};

use crate::device::{DeviceArgs, Place};
use crate::stdio::{plain, stdout};
use crate::table::{Table, or_dash};
use crate::verify::counted;

/// The checks to run, and the form of their report.
#[derive(Args, Clone, Debug)]
pub(crate) struct GradcheckArgs {
    /// Check these dumps of another program's rotation instead, without a device: files of q, q_out,
    /// gq and dq, and of k, named as in mrope verify --format. Any rotation is accepted.
    #[arg(value_name = "DUMP")]
    #[arg(conflicts_with_all = ["filter", "list", "device", "path", "token_file"])]
    dumps: Vec<PathBuf>,
    /// Only cases whose name contains this, such as `quarter/` or `/in_place`.
    #[arg(long, value_name = "SUBSTRING")]
    filter: Option<String>,
    /// Print the names of the cases and stop.
    #[arg(long, conflicts_with = "json")]
    list: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print a line per check instead of a summary.
    #[arg(long)]
    verbose: bool,
    /// Print one JSON object per check and line: case, check, engine, dtype, max_error, tolerance,
    /// pass; skipped if a stock operator lacks the case, or a GPU the element type.
    #[arg(long)]
    json: bool,
}

/// Runs the checks; exit code 1 if one fails.
///
/// # Errors
/// If no case matches the filter, or standard output cannot be written.
pub(crate) fn run(args: &GradcheckArgs) -> Result<ExitCode, Box<dyn Error>> {
    if !args.dumps.is_empty() {
        return run_dumps(args);
    }
    let cases = cases(args.filter.as_deref())?;
    if args.list {
        let mut out = BufWriter::new(stdout());
        for (named, _) in &cases {
            writeln!(out, "{}", named.name)?;
        }
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    let place = args.device.place()?;
    let compute = match place {
        Place::Gpu => Some(args.device.compute()?),
        Place::Host | Place::Npu(_) => None,
        Place::Served => {
            let device = args.device.device();
            return Err(format!(
                "{device} is not a device of this machine; expected cpu, gpu, gpu:N, ascend, ascend:N \
                 or ascend-sim (mrope train and mrope verify also take a served device)"
            )
            .into());
        }
    };
    let started = Instant::now();
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} cases  {elapsed}  {wide_msg}")?;
    let bar = ProgressBar::new(cases.len() as u64).with_style(style);
    let mut out = BufWriter::new(stdout());
    let mut summary = CheckSummary::default();
    let mut failures = Vec::new();
    let gpu = compute.as_ref().map(|compute| compute.device().clone());
    let check = |(named, depth): &(NamedCase, Depth)| match (&place, &gpu) {
        (Place::Npu(npu), _) => ascend::check(npu, args.device.path(), named, *depth),
        (_, Some(gpu)) => check_on(gpu, named, *depth),
        (_, None) => check(named, *depth),
    };
    let threads = match place {
        Place::Host => std::thread::available_parallelism().map_or(1, NonZero::get),
        // Cases queue for the one device anyway.
        _ => 1,
    };
    in_order(&cases, threads, check, |(named, _), rows| {
        for row in rows {
            summary.add(named, &row);
            if args.json {
                serde_json::to_writer(&mut out, &row)?;
                writeln!(out)?;
            } else if args.verbose {
                writeln!(out, "{}", line(&row))?;
            }
            if !row.pass && row.skipped.is_none() {
                failures.push(row);
            }
        }
        if !failures.is_empty() {
            bar.set_message(format!("{} failed", failures.len()));
        }
        bar.inc(1);
        Ok::<_, Box<dyn Error>>(())
    })?;
    bar.finish_and_clear();
    if !args.json {
        write!(out, "{}", table(&summary))?;
        if !args.verbose {
            write_failures(&mut out, &failures)?;
        }
        let (cases, failed) = (counted(cases.len(), "case"), failures.len());
        let seconds = started.elapsed().as_secs_f64();
        writeln!(out, "{}", totals(&summary, &cases, failed, seconds))?;
    }
    out.flush()?;
    if summary.checks() == 0 {
        return Err("nothing was checked: every case is beyond the limits of the operators".into());
    }
    Ok(if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The cases whose names contain the filter.
///
/// # Errors
/// If there is none.
fn cases(filter: Option<&str>) -> Result<Vec<(NamedCase, Depth)>, Box<dyn Error>> {
    let mut cases = suite()?;
    if let Some(filter) = filter {
        cases.retain(|(named, _)| named.name.contains(filter));
        if cases.is_empty() {
            let message = format!("no case has {filter:?} in its name; --list prints the names");
            return Err(message.into());
        }
    }
    Ok(cases)
}

fn write_failures(out: &mut impl std::io::Write, failures: &[Row]) -> std::io::Result<()> {
    for row in failures.iter().take(SHOWN_FAILURES) {
        writeln!(out, "{}", line(row))?;
    }
    match failures.len().checked_sub(SHOWN_FAILURES) {
        Some(more @ 1..) => writeln!(out, "... and {more} more; --verbose shows all"),
        _ => Ok(()),
    }
}

/// Checks files; exit code 1 if one fails or cannot be read.
fn run_dumps(args: &GradcheckArgs) -> Result<ExitCode, Box<dyn Error>> {
    let mut out = BufWriter::new(stdout());
    let mut all_pass = true;
    for path in &args.dumps {
        match check_dump(path) {
            Ok(rows) => {
                for row in rows {
                    all_pass &= row.pass;
                    if args.json {
                        serde_json::to_writer(&mut out, &row)?;
                        writeln!(out)?;
                    } else {
                        writeln!(out, "{}", line(&row))?;
                    }
                }
            }
            Err(error) => {
                all_pass = false;
                let path = path.display();
                if args.json {
                    let row = serde_json::json!({
                        "case": path.to_string(), "problem": error.to_string(), "pass": false,
                    });
                    writeln!(out, "{row}")?;
                } else {
                    writeln!(out, "FAIL  {path} {}", plain(&error))?;
                }
            }
        }
    }
    out.flush()?;
    Ok(if all_pass {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Failures that are listed under a summary.
const SHOWN_FAILURES: usize = 20;

fn line(row: &Row) -> String {
    let mut line = format!(
        "{}  {:<22} {:<13} {:<4}  error {:.1e}  tolerance {:.1e}  {}",
        match (row.pass, &row.skipped) {
            (true, _) => "ok  ",
            (false, None) => "FAIL",
            (false, Some(_)) => "skip",
        },
        row.check,
        row.engine,
        row.dtype.name(),
        row.max_error,
        row.tolerance,
        row.case,
    );
    if let Some(problem) = row.problem.as_ref().or(row.skipped.as_ref()) {
        let _ = write!(line, ": {problem}");
    }
    line
}

fn totals(summary: &CheckSummary, cases: &str, failed: usize, seconds: f64) -> String {
    let skipped = match summary.skipped {
        0 => String::new(),
        skipped => format!("{skipped} skipped, beyond the limits of an operator, "),
    };
    let checks = summary.checks();
    format!("{checks} checks, {cases}, {failed} failed, {skipped}{seconds:.1} s")
}

fn table(summary: &CheckSummary) -> Table {
    let numbers = ["checks", "failed", "worst in f64", "worst in f32"];
    let mut table = Table::new(&["pairing", "axis layout"], &numbers);
    for group in summary.groups() {
        let [f64, f32] = group
            .worst
            .map(|worst| or_dash(worst.map(|worst| format!("{worst:.1e}"))));
        table.row([
            group.pairing.clone(),
            group.axis_layout.clone(),
            group.checks.to_string(),
            group.failed.to_string(),
            f64,
            f32,
        ]);
    }
    table
}
