//! `mrope verify`: golden files and model folders against the engines of this machine.

use std::cell::LazyCell;
use std::error::Error;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use rope_burn::Implementation;
use rope_check::ascend;
use rope_check::engine::{burn_engines, host_engines};
use rope_check::golden::Row;
use rope_check::model::{GPU_SLACK, ModelError, Models};
use rope_check::verify::{Engines, Outcome, Tally, files, verify};
use serde::Serialize;

use crate::device::{Compute, Device, DeviceArgs, Place, explained};
use crate::stdio::{note, plain, stdout};
use crate::table::Table;

/// The page of the format, and the script that writes such files.
const FORMAT: [&str; 2] = [
    include_str!("../../../docs/dump-format.md"),
    include_str!("../python/dump.py"),
];

const EXAMPLES: &str = "\
Examples:
  mrope verify mine.safetensors              a dump of your own rotation
  mrope verify tests/fixtures                files of Hugging Face transformers
  mrope verify tests/fixtures/models         whole models
  mrope verify --engine all FILE             every kernel of this machine
  mrope verify --format                      the format, and dump.py for PyTorch";

/// Check another program's rotations, frequencies, position ids and models against this one
///
/// Rotates the q and k of each file, computes their gradients, and compares both with the values in
/// the file: one row per tensor and element type. A folder with config.json, inputs.safetensors and
/// expected.safetensors is a model; its activations, logits, gradients and training losses are
/// compared. If values differ, the command tries known mistakes and names the one that explains
/// them. The exit code is 1 if anything is out of tolerance or cannot be read.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct VerifyArgs {
    /// Golden files, frequency tables, or folders of them (searched to any depth).
    #[arg(required_unless_present = "format", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Print the format of the files, and dump.py, which writes them from PyTorch.
    #[arg(long, exclusive = true)]
    format: bool,
    /// Implementation to check: best (the widest CPU kernel; all on a device), all, or a name or
    /// part of one, such as cpu, portable, avx2, burn-fused, burn-composed, kernels, npu_mrope.
    #[arg(long, default_value = "best", value_name = "NAME")]
    engine: String,
    /// Rotation in model folders, which compute on the device.
    #[arg(long, value_enum, default_value_t = RotaryChoice::Fused)]
    rotary: RotaryChoice,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print every row. Without it, a file with many rows prints those that fail and the largest
    /// others.
    #[arg(long, conflicts_with = "json")]
    verbose: bool,
    /// Print one JSON object per row and line, with the fields that --format lists.
    #[arg(long)]
    json: bool,
}

/// The implementation that rotates in a model.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RotaryChoice {
    Fused,
    Composed,
}

impl From<RotaryChoice> for Implementation {
    fn from(choice: RotaryChoice) -> Self {
        match choice {
            RotaryChoice::Fused => Self::Fused,
            RotaryChoice::Composed => Self::Composed,
        }
    }
}

/// Compares every file.
///
/// # Errors
/// If no engine has that name, there is nothing to verify, or standard output cannot be written.
pub(crate) fn run(args: &VerifyArgs) -> Result<ExitCode, Box<dyn Error>> {
    if args.format {
        let mut out = stdout();
        for part in FORMAT {
            writeln!(out, "{part}")?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let place = args.device.place()?;
    // Opened for the first model: rotations by themselves need less of an NPU.
    let on_device = LazyCell::new(|| OnDevice::open(args, &place).map_err(|e| e.to_string()));
    let on_device = || on_device.as_ref().map_err(String::clone);
    let (engines, is_host) = match &place {
        Place::Npu(npu) => (ascend::engines(npu, args.device.path()), false),
        Place::Gpu | Place::Served => {
            let device = on_device()?.compute.device();
            (burn_engines(device).collect(), false)
        }
        Place::Host => (host_engines(), true),
    };
    let engines = match &args.engine[..] {
        "best" if !is_host => Engines::Named(engines),
        name => Engines::named(engines, name)?,
    };
    let compare_model = |folder: &Path| {
        let compared = on_device()?.models.compare(folder);
        compared.map_err(|error| match error {
            ModelError::Device(error) => explained(&error).into(),
            other => Box::<dyn Error>::from(other),
        })
    };
    let mut out = BufWriter::new(stdout());
    let mut tally = Tally::default();
    for path in &args.paths {
        for file in files(path) {
            let outcome = match file {
                Ok(file) => verify(&file, &engines, &compare_model, file != *path),
                Err((path, error)) => Outcome::unreadable(&path, error),
            };
            tally.add(&outcome);
            if args.json {
                print_json(&mut out, &outcome)?;
            } else {
                print_table(&mut out, &outcome, args.verbose)?;
            }
        }
    }
    if !args.json {
        writeln!(out, "\n{}", Summary(tally))?;
    }
    out.flush()?;
    if tally.rows + tally.unreadable == 0 {
        return Err(
            "nothing to verify in these paths; mrope verify --format prints the format".into(),
        );
    }
    if matches!(place, Place::Npu(_)) && tally.rotated == 0 && tally.unreadable == 0 {
        return Err(
            "nothing ran on the device: every comparison is beyond the limits of its operators"
                .into(),
        );
    }
    Ok(if tally.failed + tally.unreadable == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Models on the device.
struct OnDevice {
    compute: Compute,
    models: Models,
}

impl OnDevice {
    fn open(args: &VerifyArgs, place: &Place) -> Result<Self, Box<dyn Error>> {
        let compute = args.device.compute()?;
        let other = match args.device.device() {
            Device::Cpu => None,
            Device::Remote { .. } => Some("remote".to_owned()),
            other => Some(other.to_string()),
        };
        let mut models = Models::new(compute.device().clone(), other, args.rotary.into());
        if matches!(place, Place::Gpu) {
            models = models.with_slack(GPU_SLACK);
        }
        Ok(Self { compute, models })
    }
}

/// The last line.
struct Summary(Tally);

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(tally) = self;
        write!(
            f,
            "{} of {}: {} out of tolerance; {} cannot be verified, {} skipped",
            counted(tally.rows, "row"),
            counted(tally.files, "file"),
            tally.failed,
            counted(tally.unreadable, "file"),
            tally.skipped
        )?;
        if tally.refused > 0 {
            write!(
                f,
                "; {} skipped, beyond the limits of an operator or an element type",
                counted(tally.refused, "comparison")
            )?;
        }
        Ok(())
    }
}

/// A number of things, in words.
pub(crate) fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[derive(Serialize)]
struct JsonRow<'a, R> {
    file: &'a str,
    #[serde(flatten)]
    row: &'a R,
}

#[derive(Serialize)]
struct JsonError<'a> {
    file: &'a str,
    error: String,
    pass: bool,
}

fn print_json(out: &mut impl Write, outcome: &Outcome) -> Result<(), Box<dyn Error>> {
    let file = &outcome.file[..];
    let mut line = |json: String| writeln!(out, "{json}");
    match &outcome.result {
        Err(error) => line(serde_json::to_string(&JsonError {
            file,
            error: error.to_string(),
            pass: false,
        })?)?,
        Ok(rows) => {
            for row in rows {
                line(serde_json::to_string(&JsonRow { file, row })?)?;
            }
        }
    }
    for row in &outcome.refused {
        line(serde_json::to_string(&JsonRow { file, row })?)?;
    }
    if let Some(reason) = &outcome.skipped {
        note(format_args!("skipped {file}: {}", plain(reason)));
    }
    Ok(())
}

/// Rows of a file that are within tolerance and printed without `--verbose`.
const ROWS_WITHIN: usize = 24;

fn print_table(out: &mut impl Write, outcome: &Outcome, verbose: bool) -> io::Result<()> {
    let file = &outcome.file;
    if let Some(reason) = &outcome.skipped {
        writeln!(out, "skipped {file}: {}", plain(reason))?;
    }
    let rows = match &outcome.result {
        Ok(rows) if rows.is_empty() && outcome.refused.is_empty() => return Ok(()),
        Ok(rows) => rows,
        Err(error) => return writeln!(out, "\n{file}\n  FAIL {}", plain(error)),
    };
    writeln!(out, "\n{file}")?;
    print_diagnoses(out, rows)?;
    let headings = ["", "tensor", "dtype", "engine"];
    let mut table = Table::new(&headings, &["max abs", "tolerance", "ratio"]);
    let mut ratios: Vec<f64> = rows
        .iter()
        .filter(|row| row.pass)
        .map(|row| row.ratio)
        .collect();
    ratios.sort_by(|a, b| b.total_cmp(a));
    let least = if verbose {
        None
    } else {
        ratios.get(ROWS_WITHIN)
    };
    let is_shown = |row: &Row| !row.pass || least.is_none_or(|least| row.ratio > *least);
    for row in rows.iter().filter(|row| is_shown(row)) {
        table.row(cells(row));
    }
    write!(out, "{table}")?;
    let hidden = rows.iter().filter(|row| !is_shown(row)).count();
    if hidden > 0 {
        let rows = counted(hidden, "more row");
        writeln!(
            out,
            "  ok  {rows} with a smaller ratio to the tolerance; --verbose lists them"
        )?;
    }
    for row in &outcome.refused {
        let (dtype, engine) = (row.dtype.name(), &row.engine);
        writeln!(out, "  skipped {dtype} {engine}: {}", row.skipped)?;
    }
    print_worst(out, rows)?;
    print_notes(out, file, rows)
}

/// The diagnoses, each once: before the table, for a reader looks for them.
fn print_diagnoses(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let mut reasons: Vec<&String> = Vec::new();
    for reason in rows.iter().filter_map(|row| row.diagnosis.as_ref()) {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    for reason in reasons {
        writeln!(out, "  diagnosis: {}", plain(reason))?;
    }
    Ok(())
}

/// A row of the table.
fn cells(row: &Row) -> [String; 7] {
    let is_missing = row.dtype == "-";
    let [max_abs, tolerance, ratio] = if is_missing {
        ["missing", "-", "-"].map(str::to_owned)
    } else {
        let [max_abs, tolerance] = [row.max_abs, row.tolerance].map(|x| format!("{x:.2e}"));
        [max_abs, tolerance, share(row.ratio)]
    };
    [
        if row.pass { "ok" } else { "FAIL" }.to_owned(),
        elided(&plain(&row.tensor)),
        row.dtype.to_string(),
        row.engine.to_string(),
        max_abs,
        tolerance,
        ratio,
    ]
}

/// The worst element of each tensor that fails: the table has the errors of its other rows.
fn print_worst(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let mut named: Vec<&String> = Vec::new();
    for (row, worst) in rows
        .iter()
        .filter_map(|row| Some((row, row.worst.as_ref()?)))
    {
        if named.contains(&&row.tensor) {
            continue;
        }
        named.push(&row.tensor);
        writeln!(
            out,
            "  {} at {}: computed {:e}, the file says {:e}, {:.2e} allowed",
            plain(&row.tensor),
            worst.at,
            worst.found,
            worst.expected,
            worst.tolerance
        )?;
    }
    Ok(())
}

/// Where the default rule differs from a version's.
fn print_notes(out: &mut impl Write, file: &str, rows: &[Row]) -> io::Result<()> {
    let noted: Vec<(&Row, &String)> = rows
        .iter()
        .filter_map(|row| Some((row, row.note.as_ref()?)))
        .collect();
    if !noted.is_empty() {
        writeln!(
            out,
            "\nthe default differs from {file} in {} of {}:",
            noted.len(),
            rows.len()
        )?;
        for (row, note) in noted {
            writeln!(out, "- {}: {note}", plain(&row.tensor))?;
        }
    }
    Ok(())
}

/// The share of a tolerance that is used, as far as its digits say anything.
fn share(ratio: f64) -> String {
    if ratio <= 1e6 {
        format!("{ratio:.3}")
    } else {
        ">1e6".to_owned()
    }
}

/// A name that fits its column: head and tail of a longer one.
fn elided(name: &str) -> String {
    const WIDTH: usize = 39;
    const HEAD: usize = 4;
    if name.len() <= WIDTH || !name.is_ascii() {
        return name.to_owned();
    }
    let tail = name.len() - (WIDTH - HEAD - 3);
    format!("{}...{}", &name[..HEAD], &name[tail..])
}
