//! The report: Markdown for people, JSON for programs, without names of hosts, users or folders.

use std::fmt::{self, Write as _};
use std::io;
use std::path::Path;

use plain_files::{MAX_TEXT_BYTES, read_text};
use serde::Serialize;

use super::{PartReport, Verdict};

/// A line for the part, and one for each failure.
impl fmt::Display for PartReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, verdict, seconds) = (self.name, said(self.verdict), self.seconds);
        write!(f, "{name:<16} {verdict:<10} {seconds:>4.0} s")?;
        let failed = self.rows.iter().filter(|row| row.verdict.is_failure());
        failed
            .into_iter()
            .try_for_each(|row| write!(f, "\n  {}: {}", row.name, row.detail))
    }
}

/// The parts of an acceptance.
#[derive(Clone, Debug, Serialize)]
pub struct AcceptanceReport {
    /// The version of the program.
    pub version: &'static str,
    /// The name of the device.
    pub device: String,
    /// One line.
    pub verdict: String,
    /// All parts so far.
    pub parts: Vec<PartReport>,
}

impl AcceptanceReport {
    pub(super) fn new(device: &str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            device: device.to_owned(),
            verdict: String::new(),
            parts: Vec::new(),
        }
    }

    /// True if no part failed.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        !self.parts.iter().any(|part| part.verdict.is_failure())
    }

    /// The number in a row of this name.
    pub(super) fn figure(&self, name: &str) -> Option<u64> {
        let mut rows = self.parts.iter().flat_map(|part| &part.rows);
        rows.find(|row| row.name == name)?.detail.parse().ok()
    }

    pub(super) fn add(&mut self, mut part: PartReport) {
        let private = private_names();
        for row in &mut part.rows {
            row.name = without(&row.name, &private);
            row.detail = without(&row.detail, &private);
        }
        self.parts.push(part);
        self.verdict = self.line();
    }

    fn line(&self) -> String {
        let run: Vec<_> = self
            .parts
            .iter()
            .filter(|part| part.verdict != Verdict::Skipped)
            .collect();
        let failed: Vec<&str> = run
            .iter()
            .filter(|part| part.verdict.is_failure())
            .map(|part| part.name)
            .collect();
        match failed.is_empty() {
            true => format!("accepted: {} of {} parts", run.len(), run.len()),
            false => format!(
                "not accepted: {} of {} parts failed: {}",
                failed.len(),
                run.len(),
                failed.join("; ")
            ),
        }
    }

    /// Writes both files.
    pub(super) fn write(&self, out: &Path) -> io::Result<()> {
        let json = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        std::fs::write(out.join("report.json"), json + "\n")?;
        std::fs::write(out.join("report.md"), self.markdown())
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "# Acceptance of {} by mrope {}\n\n{}\n\n| part | verdict | seconds | looks at |\n\
             |---|---|---:|---|\n",
            self.device, self.version, self.verdict
        );
        for part in &self.parts {
            let _ = writeln!(
                text,
                "| {} | {} | {:.0} | {} |",
                part.name,
                said(part.verdict),
                part.seconds,
                part.about
            );
        }
        for part in &self.parts {
            let _ = write!(
                text,
                "\n## {}\n\n| row | verdict | figure or reason |\n|---|---|---|\n",
                part.name
            );
            for row in &part.rows {
                let detail = row.detail.replace('|', "\\|").replace('\n', " ");
                let _ = writeln!(text, "| {} | {} | {detail} |", row.name, said(row.verdict));
            }
        }
        text
    }
}

fn said(verdict: Verdict) -> String {
    let name = format!("{verdict:?}").to_lowercase();
    if verdict.is_failure() {
        format!("**{name}**")
    } else {
        name
    }
}

/// The names of this host and user.
fn private_names() -> Vec<String> {
    let host = read_text(Path::new("/proc/sys/kernel/hostname"), MAX_TEXT_BYTES).ok();
    let variables = ["HOSTNAME", "USER", "LOGNAME"].into_iter();
    let names = host
        .into_iter()
        .chain(variables.filter_map(|name| std::env::var(name).ok()));
    let names = names.map(|name| name.trim().to_owned());
    // A short one is a word of many texts.
    names.filter(|name| name.len() > 4).collect()
}

/// A text with the last two parts of each path, and without names.
fn without(text: &str, private: &[String]) -> String {
    let ends = |c: char| c.is_whitespace() || "\"'`,;()[]".contains(c);
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(ends) {
        let end = word.trim_end_matches(ends).len();
        let (path, after) = word.split_at(end);
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if path.starts_with('/') && parts.len() > 2 {
            let _ = write!(out, ".../{}", parts[parts.len() - 2..].join("/"));
        } else {
            out.push_str(path);
        }
        out.push_str(after);
    }
    for name in private {
        out = out.replace(name.as_str(), "...");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::without;

    #[test]
    fn folders_and_names_are_left_out() {
        let private = ["machine17".to_owned()];
        let text = "cannot read \"/home/somebody/kit/golden/a.safetensors\" of machine17, 3/4";
        let expected = "cannot read \".../golden/a.safetensors\" of ..., 3/4";
        assert_eq!(without(text, &private), expected);
    }
}
