//! The result of a check, as text and as JSON.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use vlm_data::check::{DataFigures, DataReport, Findings, Histogram, Severity};

use super::CheckArgs;
use crate::arguments::complaint;
use crate::table::Table;

/// Ranges of lines that are listed of a kind.
const RANGES: usize = 8;
/// Messages that are printed of a kind.
const EXAMPLES: usize = 3;
/// Bars of a histogram, and the longest of them.
const BARS: usize = 12;
const LONGEST_BAR: u64 = 40;

/// A finished check.
pub(super) struct Checked<'a> {
    pub(super) args: &'a CheckArgs,
    pub(super) report: &'a DataReport,
    pub(super) seconds: f64,
    /// The file of the picture that was drawn.
    pub(super) picture: &'a Path,
}

#[derive(Serialize)]
struct Json<'a> {
    file: String,
    model: String,
    #[serde(flatten)]
    figures: DataFigures<'a>,
    seconds: f64,
    picture: String,
}

impl Checked<'_> {
    pub(super) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&Json {
            file: self.args.file.display().to_string(),
            model: self.args.model.display().to_string(),
            figures: self.report.figures(),
            seconds: self.seconds,
            picture: self.picture.display().to_string(),
        })
    }

    pub(super) fn print(&self, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
        let report = self.report;
        for (severity, name) in [(Severity::Error, "errors"), (Severity::Warning, "warnings")] {
            if report.of(severity).next().is_some() {
                writeln!(out, "{name}")?;
            }
            for findings in report.of(severity) {
                print_findings(out, findings)?;
            }
        }
        if self.args.show.is_none() {
            print_lengths(out, report)?;
            let rate = report.records as f64 / self.seconds.max(1e-9);
            let seconds = self.seconds;
            writeln!(
                out,
                "\nchecked in {seconds:.1} s, {rate:.0} records per second"
            )?;
        }
        let bad = match report.bad_records {
            0 => "without errors".to_owned(),
            bad => format!("{bad} with errors"),
        };
        writeln!(
            out,
            "{} of {}: {bad}",
            counted(report.records, "record"),
            self.args.file.display()
        )?;
        writeln!(out, "drawn in {}", self.picture.display())?;
        Ok(())
    }
}

fn counted(count: u64, name: &str) -> String {
    match count {
        1 => format!("1 {name}"),
        _ => format!("{count} {name}s"),
    }
}

fn print_findings(out: &mut impl Write, findings: &Findings) -> io::Result<()> {
    writeln!(
        out,
        "  {}: {} in {}",
        findings.kind,
        findings.count,
        findings.line_ranges(RANGES)
    )?;
    for example in findings.examples.iter().take(EXAMPLES) {
        let message = complaint(&example.message).replace('\n', " ");
        writeln!(out, "    line {}: {message}", example.line)?;
    }
    Ok(())
}

fn print_lengths(out: &mut impl Write, report: &DataReport) -> Result<(), Box<dyn Error>> {
    let samples = report.samples.len() as u64;
    writeln!(out, "{} can be trained on", counted(samples, "sample"))?;
    if samples == 0 {
        return Ok(());
    }
    let heads = [
        "min", "5 %", "25 %", "median", "75 %", "95 %", "99 %", "max", "mean", "sum",
    ];
    let mut table = Table::new(&["per sample"], &heads);
    let figures = report.figures();
    for (name, spread) in [
        ("tokens", figures.tokens),
        ("of pictures", figures.vision_tokens),
        ("trained on", figures.trained_tokens),
        ("pictures", figures.pictures),
    ] {
        let Some(spread) = spread else {
            continue;
        };
        let whole = [
            spread.least,
            spread.p5,
            spread.p25,
            spread.median,
            spread.p75,
            spread.p95,
            spread.p99,
            spread.most,
        ];
        let mut cells = vec![name.to_owned()];
        cells.extend(whole.map(|number| number.to_string()));
        cells.push(format!("{:.1}", spread.mean));
        cells.push(spread.total.to_string());
        table.row(cells);
    }
    write!(out, "{table}")?;

    let histogram = Histogram::of(report.samples.iter().map(|sample| sample.tokens), BARS);
    let most = histogram.counts.iter().copied().max().unwrap_or(1);
    let mut table = Table::new(&["tokens", ""], &["samples"]);
    for (range, count) in histogram.bars() {
        let bar = "#".repeat((count * LONGEST_BAR).div_ceil(most) as usize);
        let range = format!("{}-{}", range.start, range.end - 1);
        table.row([range, bar, count.to_string()]);
    }
    write!(out, "\n{table}")?;

    let packing = figures.packing;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    writeln!(
        out,
        "\n{} of all tokens are trained on",
        percent(figures.trained_share)
    )?;
    writeln!(
        out,
        "rows of {} tokens, packed: {}, {} full",
        packing.row_tokens,
        packing.packed_rows,
        percent(packing.packed_filled)
    )?;
    writeln!(
        out,
        "batches of {} tokens, padded: {}, {} full",
        packing.row_tokens,
        packing.padded_batches,
        percent(packing.padded_filled)
    )?;
    Ok(())
}
