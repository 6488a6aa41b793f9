//! The end of an audit.

use serde::Serialize;

/// The tables of a report, or its JSON; with failures, prints them and fails.
pub(crate) fn judge<R: Serialize>(
    report: &R,
    tables: Option<String>,
    failures: &[String],
) -> Result<String, String> {
    let json = || serde_json::to_string_pretty(report).map_err(|error| error.to_string());
    let text = tables.map_or_else(json, Ok)?;
    if failures.is_empty() {
        return Ok(text);
    }
    println!("{text}");
    Err(failures.join("; "))
}
