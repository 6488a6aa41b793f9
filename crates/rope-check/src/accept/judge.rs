//! The rows of a part, from the output of its processes.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::child::{End, Ended};
use super::{Row, Verdict};

/// Failed checks that a part lists.
const FAILURES_LISTED: usize = 20;
/// A device's refusal of an element type, which it may lack.
const NO_SUCH_TYPE: &str = "the device computes nothing in";
/// The row with the number of devices.
pub(super) const DEVICES: &str = "devices";
/// An operation that takes this long is slow: it is a launch of some elements.
const SLOW: Duration = Duration::from_secs(2);

/// The objects of a process's output.
fn objects(ended: &Ended) -> impl Iterator<Item = Value> {
    let lines = ended.lines.iter();
    lines.filter_map(|line| {
        serde_json::from_str::<Value>(line)
            .ok()
            .filter(Value::is_object)
    })
}

fn text<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object.get(key).and_then(Value::as_str)
}

/// The step that a process began and did not end, if it crashed or hung there.
pub(super) fn begun_at_end(ended: &[Ended]) -> Option<u64> {
    let last = ended.last()?;
    if !matches!(last.end, End::Hang(_) | End::Killed(_)) {
        return None;
    }
    objects(last).last()?.get("begin")?.as_u64()
}

/// A row for a process that did not exit by itself, or failed without saying where.
fn end(ended: &Ended, explained: bool) -> Option<Row> {
    let during = objects(ended).last();
    let during = during.as_ref().and_then(|object| {
        object.get("begin")?;
        text(object, "case")
    });
    let name = during.unwrap_or("the process");
    let said = ended.messages.join("; ");
    match &ended.end {
        End::Exit(0) => None,
        End::Exit(_) if explained => None,
        End::Exit(_) if said.contains(NO_SUCH_TYPE) => Some(Row::new(name, Verdict::Skipped, said)),
        End::Exit(code) => {
            let said = if said.is_empty() {
                "it says nothing"
            } else {
                &said
            };
            Some(Row::new(
                name,
                Verdict::Fail,
                format!("exit code {code}: {said}"),
            ))
        }
        End::Killed(signal) => {
            let detail = format!("{signal}: {said}");
            Some(Row::new(
                name,
                Verdict::Crash,
                detail.trim_end_matches(": "),
            ))
        }
        End::Hang(limit) => {
            let detail = format!("nothing came for {} s", limit.as_secs());
            Some(Row::new(name, Verdict::Hang, detail))
        }
        End::Unstarted(reason) => Some(Row::new(name, Verdict::Fail, reason)),
    }
}

/// Facts: one object of names and values.
pub(super) fn machine(_: &Path, ended: &[Ended]) -> Vec<Row> {
    let mut rows = Vec::new();
    for ended in ended {
        for object in objects(ended) {
            let facts = object.as_object().into_iter().flatten();
            rows.extend(facts.map(|(name, value)| {
                let value = value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned);
                Row::new(name, Verdict::Found, value)
            }));
        }
        rows.extend(end(ended, false));
    }
    rows
}

/// What `mrope doctor` found: a missing runtime, function, device or launch is a failure. Libraries
/// and paths may be missing, for the parts that need one fail, but one path of our kernels is needed.
pub(super) fn doctor(_: &Path, ended: &[Ended]) -> Vec<Row> {
    let mut rows = Vec::new();
    for ended in ended {
        for found in objects(ended) {
            let list = |key: &str| {
                found
                    .get(key)
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
            };
            for installed in list("installed") {
                let name = text(installed, "file").unwrap_or_default();
                let version = text(installed, "version").unwrap_or_default();
                rows.push(Row::new(name, Verdict::Found, version));
            }
            for symbol in list("missing_symbols") {
                let name = text(symbol, "symbol").unwrap_or_default();
                let needed = text(symbol, "needed_for").unwrap_or_default();
                rows.push(Row::new(
                    name,
                    Verdict::Fail,
                    format!("missing; for {needed}"),
                ));
            }
            let ready = |row: &&Value| row.get("ready").and_then(Value::as_bool) == Some(true);
            let count = list("devices").filter(ready).count();
            rows.push(Row::new(DEVICES, Verdict::Found, count.to_string()));
            let runtime = found
                .get("runtime")
                .map(|runtime| ("Ascend runtime", runtime));
            let named = |key| list(key).map(|row| (text(row, "name").unwrap_or_default(), row));
            let needed = runtime
                .into_iter()
                .chain(named("devices"))
                .chain(named("launches"));
            rows.extend(needed.map(|(name, row)| finding(name, row, Verdict::Fail)));
            let is_ours = |(name, _): &(&str, &Value)| name.starts_with("our kernels");
            let has_kernels = named("paths").filter(is_ours).any(|(_, row)| ready(&row));
            for (name, row) in named("libraries").chain(named("paths")) {
                let missing = match is_ours(&(name, row)) && !has_kernels {
                    true => Verdict::Fail,
                    false => Verdict::Found,
                };
                rows.push(finding(name, row, missing));
            }
        }
        rows.extend(end(ended, false));
    }
    if rows.is_empty() {
        rows.push(Row::new("doctor", Verdict::Fail, "no findings"));
    }
    rows
}

fn finding(name: &str, row: &Value, missing: Verdict) -> Row {
    if row.get("ready").and_then(Value::as_bool) == Some(true) {
        return Row::new(name, Verdict::Pass, text(row, "found").unwrap_or_default());
    }
    let reason = text(row, "reason").unwrap_or_default();
    Row::new(name, missing, format!("missing: {reason}"))
}

/// Checks of `verify`, `gradcheck` and the operations: an object with `pass` for each. Rows are
/// their sum, the failures and the slow ones.
pub(super) fn checks(_: &Path, ended: &[Ended]) -> Vec<Row> {
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    let (mut passed, mut skipped, mut worst) = (0usize, 0usize, 0f64);
    for ended in ended {
        let before = failures.len();
        for object in objects(ended) {
            let Some(pass) = object.get("pass").and_then(Value::as_bool) else {
                continue;
            };
            let number = |key: &str| object.get(key).and_then(Value::as_f64);
            let error = number("max_error").or_else(|| number("max_abs"));
            let ratio = error
                .zip(number("tolerance"))
                .map(|(error, bound)| error / bound);
            let seconds = number("seconds").unwrap_or_default();
            match (pass, text(&object, "skipped")) {
                (true, _) if seconds > SLOW.as_secs_f64() => {
                    let detail = format!("{seconds:.1} s");
                    failures.push(Row::new(name(&object), Verdict::Slow, detail));
                }
                (true, _) => {
                    passed += 1;
                    worst = worst.max(ratio.unwrap_or_default());
                }
                (false, Some(_)) => skipped += 1,
                (false, None) => {
                    let problem = text(&object, "problem").or_else(|| text(&object, "error"));
                    let problem = problem.map(cause);
                    let detail = problem.unwrap_or_else(|| match error.zip(number("tolerance")) {
                        Some((error, bound)) => format!("error {error:.1e}, tolerance {bound:.1e}"),
                        None => "the result is not a number".to_owned(),
                    });
                    failures.push(Row::new(name(&object), Verdict::Fail, detail));
                }
            }
        }
        let explained = failures.len() > before;
        failures.extend(end(ended, explained));
    }
    let detail = format!(
        "{passed} passed, {} did not, {skipped} skipped; largest error {worst:.2} of its tolerance",
        failures.len()
    );
    let verdict = if passed == 0 {
        Verdict::Fail
    } else {
        Verdict::Pass
    };
    rows.push(Row::new("checks", verdict, detail));
    let more = failures.len().saturating_sub(FAILURES_LISTED);
    rows.extend(failures.into_iter().take(FAILURES_LISTED));
    if more > 0 {
        rows.push(Row::new(
            "more",
            Verdict::Fail,
            format!("{more} more did not pass"),
        ));
    }
    rows
}

/// The cause of an error, without burn's words before it.
fn cause(problem: &str) -> String {
    let cause = problem.split("Caused by:").last().unwrap_or(problem);
    cause.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The name of a check, from the fields that say which one it is.
fn name(object: &Value) -> String {
    let file = text(object, "file").map(|file| file.rsplit('/').next().unwrap_or(file));
    let fields = ["case", "check", "tensor", "engine", "dtype"];
    let fields = fields.iter().filter_map(|key| text(object, key));
    file.into_iter().chain(fields).collect::<Vec<_>>().join(" ")
}

/// The losses and norms of a run on the device against those of the CPU.
pub(super) fn losses(runs: &Path, ended: &[Ended], name: &str, tolerance: f64) -> Vec<Row> {
    let mut rows: Vec<Row> = ended.iter().filter_map(|ended| end(ended, false)).collect();
    let read = |side: &str| {
        let log = runs.join(format!("{name}-{side}")).join("log.jsonl");
        let text = plain_files::read_text(&log, plain_files::MAX_TEXT_BYTES).unwrap_or_default();
        let steps = text.lines().filter_map(|line| {
            let step: Value = serde_json::from_str(line).ok()?;
            Some([
                step.get("loss")?.as_f64()?,
                step.get("gradient_norm")?.as_f64()?,
            ])
        });
        steps.collect::<Vec<_>>()
    };
    if !rows.is_empty() {
        return rows;
    }
    let (device, cpu) = (read("device"), read("cpu"));
    if device.is_empty() || device.len() != cpu.len() {
        let detail = format!(
            "{} steps on the device, {} on the CPU",
            device.len(),
            cpu.len()
        );
        rows.push(Row::new("losses", Verdict::Fail, detail));
        return rows;
    }
    for (at, name) in ["losses", "norms of gradients"].into_iter().enumerate() {
        let pairs = device
            .iter()
            .zip(&cpu)
            .map(|(one, other)| (one[at], other[at]));
        let difference = |(one, other): (f64, f64)| (one - other).abs() / other.abs();
        // NaN is no agreement.
        let worst = pairs
            .map(difference)
            .fold(0f64, |worst, one| match one.is_nan() {
                true => f64::INFINITY,
                false => worst.max(one),
            });
        // A norm sums the errors of all parameters.
        let tolerance = if at == 0 { tolerance } else { 10.0 * tolerance };
        let verdict = match worst <= tolerance {
            true => Verdict::Pass,
            false => Verdict::Fail,
        };
        let detail = format!(
            "{} steps, largest difference {worst:.1e} of the CPU's, tolerance {tolerance:.0e}",
            device.len()
        );
        rows.push(Row::new(name, verdict, detail));
    }
    rows
}

/// Measurements: objects with `name` and `found`.
pub(super) fn measurements(_: &Path, ended: &[Ended]) -> Vec<Row> {
    let mut rows = Vec::new();
    for ended in ended {
        rows.extend(objects(ended).filter_map(|object| {
            Some(Row::new(
                text(&object, "name")?,
                Verdict::Found,
                text(&object, "found")?,
            ))
        }));
        rows.extend(end(ended, false));
    }
    if rows.is_empty() {
        rows.push(Row::new("measurements", Verdict::Fail, "none"));
    }
    rows
}

/// The bytes of `bench memory`.
pub(super) fn memory(_: &Path, ended: &[Ended]) -> Vec<Row> {
    let mut rows = Vec::new();
    for ended in ended {
        rows.extend(objects(ended).filter_map(|object| {
            let named = ["shape", "implementation"].map(|key| text(&object, key));
            let layers = object.get("layers")?.as_u64()?;
            let name = format!("{} {}, {layers} rotations", named[0]?, named[1]?);
            let bytes = |key: &str| object.get(key).and_then(Value::as_u64);
            let (kept, peak) = (bytes("retained_bytes")?, bytes("step_peak_bytes")?);
            let recomputes = object.get("checkpointing")?.as_bool()?;
            let detail = format!("{kept} bytes kept, {peak} at the peak of a step");
            (!recomputes).then(|| Row::new(name, Verdict::Found, detail))
        }));
        rows.extend(end(ended, false));
    }
    if rows.is_empty() {
        rows.push(Row::new("memory", Verdict::Fail, "no figures"));
    }
    rows
}
