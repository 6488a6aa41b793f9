//! Where results go.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rope_bench::bars::Bar;
use rope_bench::chart::BarChart;
use rope_bench::rows::{write_csv, write_json_lines};
use serde::Serialize;

use crate::files;
use crate::stdio::{note, stdout};

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
    /// Opens the files before anything is measured for them. Their content stays until there is
    /// something to write.
    ///
    /// # Errors
    /// If one cannot be written, or both are one file.
    pub(crate) fn open(&self) -> Result<Output<'_>, Box<dyn Error>> {
        if let (Some(csv), Some(svg)) = (&self.csv, &self.svg)
            && files::is_same(csv, svg)
        {
            return Err(format!(
                "--csv and --svg both name {}; expected two files",
                csv.display()
            )
            .into());
        }
        Ok(Output {
            args: self,
            csv: self.csv.as_deref().map(OutputFile::open).transpose()?,
            svg: self.svg.as_deref().map(OutputFile::open).transpose()?,
        })
    }
}

/// Where results can go.
pub(crate) struct Output<'a> {
    args: &'a OutputArgs,
    csv: Option<OutputFile<'a>>,
    svg: Option<OutputFile<'a>>,
}

impl Output<'_> {
    /// Writes the rows in every form that was asked for, and as `table` unless JSON was. If one
    /// output fails, the others are still written: the measurement is not lost.
    ///
    /// # Errors
    /// If an output cannot be written.
    pub(crate) fn write<R: Serialize>(
        self,
        rows: &[R],
        chart: impl FnOnce() -> BarChart,
        table: impl FnOnce() -> String,
        bars: &[Bar],
    ) -> Result<ExitCode, Box<dyn Error>> {
        let printed = self.args.print(rows, table, bars);
        let tabled = self.csv.map_or(Ok(()), |file| {
            let mut text = Vec::new();
            write_csv(rows, &mut text)?;
            file.write(&text)
        });
        let drawn = self
            .svg
            .map_or(Ok(()), |file| file.write(chart().svg()?.as_bytes()));
        tabled.and(drawn).and(printed)?;
        let failed = self.args.check && bars.iter().any(|bar| !bar.met);
        if failed && self.args.json {
            for bar in bars.iter().filter(|bar| !bar.met) {
                note(format_args!("{bar}"));
            }
        }
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

impl OutputArgs {
    fn print<R: Serialize>(
        &self,
        rows: &[R],
        table: impl FnOnce() -> String,
        bars: &[Bar],
    ) -> Result<(), Box<dyn Error>> {
        let mut out = stdout();
        if self.json {
            write_json_lines(rows, &mut out)?;
        } else {
            write!(out, "{}", table())?;
            for bar in bars {
                writeln!(out, "{bar}")?;
            }
        }
        Ok(out.flush()?)
    }
}

struct OutputFile<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> OutputFile<'a> {
    fn open(path: &'a Path) -> Result<Self, Box<dyn Error>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let file = options.open(path).map_err(cannot_write(path))?;
        Ok(Self { path, file })
    }

    fn write(mut self, text: &[u8]) -> Result<(), Box<dyn Error>> {
        let is_kept = self.file.metadata().is_ok_and(|found| found.is_file());
        let written = if is_kept {
            files::replace(self.path, text)
        } else {
            // A pipe that was opened again would be another to its reader.
            self.file.write_all(text)
        };
        Ok(written.map_err(cannot_write(self.path))?)
    }
}

fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> String {
    move |error| format!("cannot write {}: {error}", path.display())
}

/// A progress bar on standard error.
///
/// # Errors
/// None; the template is valid.
pub(crate) fn progress(steps: usize) -> Result<ProgressBar, Box<dyn Error>> {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {msg}")?;
    Ok(ProgressBar::new(steps as u64).with_style(style))
}
