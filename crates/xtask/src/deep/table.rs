//! The table of the page: a row for each step that was run or left out, the last of its kind.

use super::steps::STEPS;
use super::{DeepError, Result};

const HEADER: &str = "| step | date | commit | machine | seconds | result |";
const RULE: &str = "|---|---|---|---|---:|---|";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    /// Not run, because it was not given what it reads.
    LeftOut,
}

impl Outcome {
    const ALL: [Self; 3] = [Self::Passed, Self::Failed, Self::LeftOut];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::LeftOut => "left out",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) step: &'static str,
    /// The day on which it ended, UTC.
    pub(super) date: String,
    /// The commit, with [`CHANGED`] if the tree differed from it.
    pub(super) commit: String,
    pub(super) machine: String,
    pub(super) seconds: u64,
    pub(super) outcome: Outcome,
}

/// What follows the commit of a tree with changes.
pub(super) const CHANGED: char = '+';

impl Row {
    fn parse(line: &str) -> Result<Self, String> {
        let cells = line.strip_prefix("| ").and_then(|l| l.strip_suffix(" |"));
        let cells: Vec<&str> = cells
            .unwrap_or_default()
            .split('|')
            .map(str::trim)
            .collect();
        let [step, date, commit, machine, seconds, result] = cells[..] else {
            return Err(format!("{} cells, expected 6", cells.len()));
        };
        let known = STEPS.iter().find(|known| known.name == step);
        let is_date = |text: &str| {
            let shape = text.bytes().map(|byte| match byte {
                b'0'..=b'9' => b'0',
                other => other,
            });
            shape.eq(*b"0000-00-00")
        };
        let hash = commit.strip_suffix(CHANGED).unwrap_or(commit);
        let is_hash = hash.len() >= 7 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        let outcome = Outcome::ALL.into_iter().find(|o| o.word() == result);
        Ok(Self {
            step: known.ok_or(format!("no step {step:?}"))?.name,
            date: is_date(date)
                .then(|| date.to_owned())
                .ok_or(format!("no date {date:?}"))?,
            commit: is_hash
                .then(|| commit.to_owned())
                .ok_or(format!("no commit {commit:?}"))?,
            machine: (!machine.is_empty())
                .then(|| machine.to_owned())
                .ok_or("no machine")?,
            seconds: (seconds.parse()).map_err(|_| format!("no number of seconds {seconds:?}"))?,
            outcome: outcome.ok_or(format!("no result {result:?}"))?,
        })
    }

    fn line(&self) -> String {
        let Self {
            step,
            date,
            commit,
            machine,
            seconds,
            outcome,
        } = self;
        let word = outcome.word();
        format!("| {step} | {date} | {commit} | {machine} | {seconds} | {word} |")
    }
}

/// Where the table lies in the page, in lines: after its rule, and where it ends.
fn place(page: &str) -> Result<std::ops::Range<usize>> {
    let mut lines = page.lines();
    let start = lines.position(|line| line == HEADER);
    let start = start.ok_or(DeepError::NoTable(HEADER))?;
    if lines.next() != Some(RULE) {
        return Err(DeepError::NoTable(RULE));
    }
    let rows = lines.take_while(|line| line.starts_with('|')).count();
    Ok(start + 2..start + 2 + rows)
}

/// The rows of the page.
pub(super) fn read(page: &str) -> Result<Vec<Row>> {
    let place = place(page)?;
    let mut rows: Vec<Row> = Vec::new();
    for (index, text) in page.lines().enumerate().take(place.end).skip(place.start) {
        let unreadable = |reason| DeepError::Row {
            line: index + 1,
            text: text.to_owned(),
            reason,
        };
        let row = Row::parse(text).map_err(unreadable)?;
        if rows.iter().any(|other| other.step == row.step) {
            return Err(unreadable("a second row of the step".to_owned()));
        }
        rows.push(row);
    }
    Ok(rows)
}

/// The page with `row` in place of the step's earlier one. Rows have the order of the steps; all
/// else stays.
pub(super) fn with(page: &str, row: Row) -> Result<String> {
    let place = place(page)?;
    let mut rows = read(page)?;
    rows.retain(|other| other.step != row.step);
    rows.push(row);
    rows.sort_by_key(|row| STEPS.iter().position(|step| step.name == row.step));
    let lines: Vec<&str> = page.lines().collect();
    let before = lines[..place.start].iter().map(|line| (*line).to_owned());
    let after = lines[place.end..].iter().map(|line| (*line).to_owned());
    let all: Vec<String> = before
        .chain(rows.iter().map(Row::line))
        .chain(after)
        .collect();
    Ok(all.join("\n") + "\n")
}

/// Whether a step need not be run again: it passed with a tree that `is_present` finds to be the
/// present one.
pub(super) fn is_done(row: Option<&Row>, is_present: impl Fn(&str) -> bool) -> bool {
    row.is_some_and(|row| {
        row.outcome == Outcome::Passed && !row.commit.ends_with(CHANGED) && is_present(&row.commit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: &'static str, outcome: Outcome) -> Row {
        Row {
            step,
            date: "2026-11-25".to_owned(),
            commit: "ad2f87e01234".to_owned(),
            machine: "A processor, 2 cores".to_owned(),
            seconds: 61,
            outcome,
        }
    }

    fn page(rows: &[&str]) -> String {
        let before = "# Title\n\n| other | table |\n|---|---|\n| a | b |\n\n";
        let rows: String = rows.iter().flat_map(|row| [*row, "\n"]).collect();
        format!("{before}{HEADER}\n{RULE}\n{rows}\nText after it.\n")
    }

    #[test]
    fn what_is_written_is_read_and_other_rows_and_text_stay() {
        let rows = [
            row("fuzz", Outcome::Passed),
            row("readme", Outcome::Failed),
            row("vendor-headers", Outcome::LeftOut),
        ];
        let mut text = page(&[]);
        for row in &rows {
            text = with(&text, row.clone()).expect("a page");
        }
        let [fuzz, readme, vendor] = rows;
        assert_eq!(
            read(&text).expect("rows"),
            [readme.clone(), fuzz.clone(), vendor.clone()]
        );
        let lines = [readme.line(), fuzz.line(), vendor.line()];
        assert_eq!(text, page(&lines.each_ref().map(String::as_str)));

        let mended = row("readme", Outcome::Passed);
        let text = with(&text, mended.clone()).expect("a page");
        assert_eq!(read(&text).expect("rows"), [mended, fuzz, vendor]);
    }

    #[test]
    fn unreadable_rows_are_errors_that_name_the_line() {
        let good = "| fuzz | 2026-11-25 | ad2f87e+ | A processor | 61 | passed |";
        assert_eq!(read(&page(&[good])).expect("rows").len(), 1);
        for (wrong, reason) in [
            ("| fuzz | 2026-11-25 |", "2 cells"),
            (&good.replace("fuzz", "fuss"), "no step \"fuss\""),
            (&good.replace("2026-11-25", "25.11.2026"), "no date"),
            (&good.replace("ad2f87e+", "main"), "no commit"),
            (&good.replace("A processor", ""), "no machine"),
            (&good.replace("61", "-1"), "no number of seconds"),
            (&good.replace("passed", "skipped"), "no result"),
            (good, "a second row"),
        ] {
            let error = read(&page(&[good, wrong])).expect_err(wrong).to_string();
            assert!(error.contains(reason), "{error}");
            assert!(error.contains("docs/deep.md:10: "), "{error}");
            assert!(with(&page(&[good, wrong]), row("abi", Outcome::Passed)).is_err());
        }
        assert!(read("# Title\n").is_err());
        assert!(read(&format!("{HEADER}\n")).is_err());
    }

    #[test]
    fn only_what_passed_with_the_present_tree_is_done() {
        let present = |commit: &str| commit == "ad2f87e01234";
        let passed = row("fuzz", Outcome::Passed);
        assert!(is_done(Some(&passed), present));
        assert!(!is_done(Some(&passed), |_| false));
        assert!(!is_done(None, |_| true));
        for outcome in [Outcome::Failed, Outcome::LeftOut] {
            assert!(!is_done(Some(&row("fuzz", outcome)), present));
        }
        let changed = Row {
            commit: "ad2f87e01234+".to_owned(),
            ..passed
        };
        assert!(!is_done(Some(&changed), |_| true));
    }

    #[test]
    fn the_page_is_readable_and_names_each_step() {
        let page = include_str!("../../../../docs/deep.md");
        read(page).expect("rows");
        for step in &STEPS {
            assert!(page.contains(&format!("`{}`", step.name)), "{}", step.name);
        }
    }
}
