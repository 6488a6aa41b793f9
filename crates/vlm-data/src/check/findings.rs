//! Findings in records, by kind.

use std::collections::BTreeMap;

use serde::Serialize;

use super::report::{DataReport, SampleCounts};
use crate::VlmDataError;
use crate::text::{RecordProblem, TextError};

/// Number of lines kept per kind.
const LINES: usize = 100_000;
/// Number of messages kept per kind.
const EXAMPLES: usize = 5;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The record gives no sample.
    Error,
    /// The record gives a sample that may not be intended.
    Warning,
}

/// The kinds that are warnings.
const WARNINGS: [&str; 15] = [
    "answer-space",
    "blank",
    "box-text",
    "clipped",
    "dropped-thought",
    "duplicate",
    "empty-question",
    "enlarged",
    "equal-answers",
    "replacement-character",
    "role-order",
    "rotated",
    "shortened",
    "transparent",
    "unread-key",
];

/// The findings of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Findings {
    /// A short name, such as `marks`.
    pub kind: &'static str,
    /// The severity.
    pub severity: Severity,
    /// The number of findings; a record with two unreadable pictures counts twice.
    pub count: u64,
    /// The first lines of the records, ascending; incomplete above 100,000.
    pub lines: Vec<u64>,
    /// The first five findings, with values and remedies.
    pub examples: Vec<FoundAt>,
}

impl Findings {
    /// Returns the lines as text, with ranges for consecutive lines: at most `most` of them, and
    /// the number of lines left out.
    pub fn line_ranges(&self, most: usize) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut rest = &self.lines[..];
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..);
            let length = run.take_while(|(line, next)| *line == next).count();
            if parts.len() == most {
                parts.push(format!("and {} more", rest.len()));
                break;
            }
            parts.push(match length {
                1 => first.to_string(),
                _ => format!("{first}-{}", first + length as u64 - 1),
            });
            rest = &rest[length..];
        }
        let name = if self.lines.len() == 1 {
            "line"
        } else {
            "lines"
        };
        format!("{name} {}", parts.join(", "))
    }
}

/// One of [`Findings::examples`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FoundAt {
    /// The line where the record begins, from 1.
    pub line: u64,
    /// The finding with its remedy. It may contain any text of the file.
    pub message: String,
}

/// A finding in a record.
pub(super) struct Found {
    kind: &'static str,
    message: String,
}

impl Found {
    pub(super) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    /// An error, without its line.
    pub(super) fn of(error: &VlmDataError) -> Self {
        let message = match error {
            VlmDataError::Text(TextError::Record { problem, .. }) => problem.to_string(),
            VlmDataError::Text(TextError::Stream { reason, .. }) => {
                format!("cannot read the data from here on: {reason}")
            }
            VlmDataError::InRecord { place, source, .. } => format!("{place}: {source}"),
            other => other.to_string(),
        };
        Self::new(kind(error), message)
    }

    /// An error of a picture, video or frame.
    pub(super) fn at(place: &str, error: &VlmDataError) -> Self {
        Self::new(kind(error), format!("{place}: {error}"))
    }

    pub(super) fn is_error(&self) -> bool {
        severity(self.kind) == Severity::Error
    }
}

fn severity(kind: &str) -> Severity {
    match WARNINGS.contains(&kind) {
        true => Severity::Warning,
        false => Severity::Error,
    }
}

fn kind(error: &VlmDataError) -> &'static str {
    match error {
        VlmDataError::Text(TextError::Record { problem, .. }) => kind_of_problem(problem),
        VlmDataError::Text(TextError::Stream { .. }) => "stream",
        VlmDataError::Text(TextError::Encode { .. }) => "text",
        VlmDataError::InRecord { source, .. } | VlmDataError::InFile { source, .. } => kind(source),
        VlmDataError::File { .. } | VlmDataError::Unwritten { .. } => "file",
        VlmDataError::UnknownFormat { .. } => "no-picture",
        VlmDataError::Decode { .. } | VlmDataError::NoPixels { .. } => "damaged",
        VlmDataError::TooManyPixels { .. }
        | VlmDataError::TooMuchMemory { .. }
        | VlmDataError::Memory { .. } => "too-many-pixels",
        VlmDataError::AspectRatio { .. } => "aspect-ratio",
        VlmDataError::NotDivisible { .. } | VlmDataError::Restated { .. } => "size",
        VlmDataError::VideoFile { .. } => "video-file",
        VlmDataError::TooFewFrames { .. } => "frames",
        VlmDataError::FrameSize { .. } => "frame-size",
        _ => "other",
    }
}

fn kind_of_problem(problem: &RecordProblem) -> &'static str {
    match problem {
        RecordProblem::Json { .. } => "json",
        RecordProblem::TooLarge { .. } => "record-size",
        RecordProblem::UnknownFormat { .. } => "format",
        RecordProblem::Value { .. } => "value",
        RecordProblem::OtherData { .. } => "other-data",
        RecordProblem::NotApplied { .. } => "not-applied",
        RecordProblem::Answers { .. } => "answers",
        RecordProblem::PairMedia => "pair-pictures",
        RecordProblem::NoSharedPrompt => "pair-prompt",
        RecordProblem::SystemTwice => "system-not-first",
        RecordProblem::NotRendered { .. } => "not-rendered",
        RecordProblem::UnknownRole { .. } => "role",
        RecordProblem::SystemNotFirst { .. } => "system-not-first",
        RecordProblem::MarkCount { .. } => "marks",
        RecordProblem::MediaNotFromUser { .. } => "picture-in-answer",
        RecordProblem::EmptyAnswer { .. } => "empty-answer",
        RecordProblem::NoAnswer { .. } => "no-answer",
        RecordProblem::NoPrompt => "no-prompt",
        RecordProblem::SpecialToken { .. } => "special-token",
        RecordProblem::Address { .. } => "address",
        RecordProblem::Base64 { .. } => "base64",
        RecordProblem::Fps { .. } | RecordProblem::NoFps { .. } => "fps",
        RecordProblem::ObjectCount { .. } => "objects",
        RecordProblem::Box { .. } => "box",
        RecordProblem::BoxImage { .. } => "box-picture",
        RecordProblem::BoxOutside { .. } => "box-outside",
        RecordProblem::Render { .. }
        | RecordProblem::Turns { .. }
        | RecordProblem::Pads { .. }
        | RecordProblem::UnknownChat => "template",
        RecordProblem::TextAlone { .. } => "text-alone",
        RecordProblem::TooLong { .. } => "too-long",
        RecordProblem::NothingToTrain { .. } | RecordProblem::NoGenerationTag => "nothing-to-train",
        RecordProblem::Grids { .. } | RecordProblem::Grid { .. } | RecordProblem::Times { .. } => {
            "other"
        }
    }
}

/// The findings of all threads so far.
#[derive(Default)]
pub(super) struct Collector {
    pub(super) records: u64,
    /// Records with an error.
    pub(super) bad_records: u64,
    pub(super) samples: Vec<SampleCounts>,
    kinds: BTreeMap<&'static str, Findings>,
}

impl Collector {
    pub(super) fn add(&mut self, line: u64, found: impl IntoIterator<Item = Found>) {
        let mut is_bad = false;
        for found in found {
            is_bad |= found.is_error();
            let kind = found.kind;
            let kind_findings = self.kinds.entry(kind).or_insert_with(|| Findings {
                kind,
                severity: severity(kind),
                count: 0,
                lines: Vec::new(),
                examples: Vec::new(),
            });
            kind_findings.count += 1;
            if kind_findings.lines.len() < LINES && kind_findings.lines.last() != Some(&line) {
                kind_findings.lines.push(line);
            }
            let message = found.message;
            let example = FoundAt { line, message };
            // Threads report in any order; the first lines of the file are kept.
            let after = kind_findings
                .examples
                .partition_point(|other| other.line <= line);
            if after < EXAMPLES {
                kind_findings.examples.insert(after, example);
                kind_findings.examples.truncate(EXAMPLES);
            }
        }
        self.bad_records += u64::from(is_bad);
    }

    pub(super) fn report(mut self, max_tokens: Option<usize>) -> DataReport {
        let mut findings: Vec<Findings> = self.kinds.into_values().collect();
        for kind_findings in &mut findings {
            kind_findings.lines.sort_unstable();
            kind_findings.lines.dedup();
        }
        findings.sort_by_key(|kind_findings| {
            (kind_findings.severity, kind_findings.lines.first().copied())
        });
        self.samples.sort_unstable_by_key(|sample| sample.record);
        DataReport {
            records: self.records,
            bad_records: self.bad_records,
            findings,
            samples: self.samples,
            max_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_lines_are_a_few_ranges() {
        let ranges = |lines: &[u64]| {
            let findings = Findings {
                kind: "blank",
                severity: Severity::Warning,
                count: lines.len() as u64,
                lines: lines.to_vec(),
                examples: Vec::new(),
            };
            findings.line_ranges(8)
        };
        assert_eq!(ranges(&[4]), "line 4");
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "lines 1-3, 7, 9-10");
        let odd: Vec<u64> = (0..10_000).map(|line| 2 * line + 1).collect();
        let expected = "lines 1, 3, 5, 7, 9, 11, 13, 15, and 9992 more";
        assert_eq!(ranges(&odd), expected);
    }
}
