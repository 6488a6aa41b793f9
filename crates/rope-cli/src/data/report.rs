//! The result of a check, as text and as JSON.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use vlm_data::check::{DataReport, Findings, Histogram, Packing, SampleCounts, Severity, Spread};

use super::CheckArgs;
use crate::arguments::complaint;
use crate::table::Table;

/// Tokens of a row where no limit is given, unless a sample is longer.
const ROW_TOKENS: usize = 4096;
/// Ranges of lines that are listed of a kind.
const RANGES: usize = 8;
/// Messages that are printed of a kind.
const EXAMPLES: usize = 3;
/// Bars of a histogram, and the longest of them.
const BARS: usize = 12;
const LONGEST_BAR: u64 = 40;

/// A name and how a sample is counted by it.
type Count = (&'static str, fn(&SampleCounts) -> u32);

/// The counts of each sample.
pub(super) const COUNTED: [Count; 4] = [
    ("tokens", |sample| sample.tokens),
    ("of pictures", |sample| sample.vision),
    ("trained on", |sample| sample.trained),
    ("pictures", |sample| sample.pictures),
];

/// A finished check.
pub(super) struct Checked<'a> {
    pub(super) args: &'a CheckArgs,
    pub(super) report: &'a DataReport,
    pub(super) seconds: f64,
    /// The file of the picture that was drawn.
    pub(super) picture: &'a Path,
}

/// Rows of the limit; without one of 4,096 tokens, or of the longest sample.
pub(super) fn row_tokens(report: &DataReport) -> usize {
    let longest = report.samples.iter().map(|sample| sample.tokens as usize);
    let longest = longest.max().unwrap_or(0);
    report.max_tokens.unwrap_or(ROW_TOKENS.max(longest))
}

fn spread(report: &DataReport, of: fn(&SampleCounts) -> u32) -> Option<Spread> {
    Spread::of(report.samples.iter().map(of))
}

fn trained_share(report: &DataReport) -> f64 {
    let sum = |of: fn(&SampleCounts) -> u32| -> u64 {
        report
            .samples
            .iter()
            .map(|sample| u64::from(of(sample)))
            .sum()
    };
    sum(|sample| sample.trained) as f64 / sum(|sample| sample.tokens).max(1) as f64
}

/// Lines as ranges of those that follow each other.
fn ranges(lines: &[u64]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = lines;
    while let Some(&first) = rest.first() {
        let run = rest
            .iter()
            .zip(first..)
            .take_while(|(line, next)| **line == *next);
        let length = run.count();
        if parts.len() == RANGES {
            parts.push(format!("and {} more", rest.len()));
            break;
        }
        parts.push(match length {
            1 => first.to_string(),
            _ => format!("{first}-{}", first + length as u64 - 1),
        });
        rest = &rest[length..];
    }
    let name = if lines.len() == 1 { "line" } else { "lines" };
    format!("{name} {}", parts.join(", "))
}

#[derive(Serialize)]
struct Json<'a> {
    file: String,
    model: String,
    records: u64,
    bad_records: u64,
    findings: &'a [Findings],
    samples: usize,
    tokens: Option<Spread>,
    vision_tokens: Option<Spread>,
    trained_tokens: Option<Spread>,
    pictures: Option<Spread>,
    trained_share: f64,
    packing: Packing,
    seconds: f64,
    picture: String,
}

impl Checked<'_> {
    pub(super) fn json(&self) -> serde_json::Result<String> {
        let report = self.report;
        let [tokens, vision_tokens, trained_tokens, pictures] =
            COUNTED.map(|(_, of)| spread(report, of));
        serde_json::to_string(&Json {
            file: self.args.file.display().to_string(),
            model: self.args.model.display().to_string(),
            records: report.records,
            bad_records: report.bad_records,
            findings: &report.findings,
            samples: report.samples.len(),
            tokens,
            vision_tokens,
            trained_tokens,
            pictures,
            trained_share: trained_share(report),
            packing: report.packing(row_tokens(report)),
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
        ranges(&findings.lines)
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
    for (name, of) in COUNTED {
        let Some(spread) = spread(report, of) else {
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

    let packing = report.packing(row_tokens(report));
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    writeln!(
        out,
        "\n{} of all tokens are trained on",
        percent(trained_share(report))
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

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn ten_thousand_lines_are_a_few_ranges() {
        assert_eq!(ranges(&[4]), "line 4");
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "lines 1-3, 7, 9-10");
        let odd: Vec<u64> = (0..10_000).map(|line| 2 * line + 1).collect();
        assert_eq!(
            ranges(&odd),
            "lines 1, 3, 5, 7, 9, 11, 13, 15, and 9992 more"
        );
    }
}
