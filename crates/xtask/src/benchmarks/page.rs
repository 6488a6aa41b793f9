//! The pages of benchmarks: hand-written templates with tables in place of their marks.

use std::fmt::Write as _;
use std::iter::once;

use rope_bench::bars::{self, Bar, names};
use rope_bench::cases::{DTYPES, Group, Way};
use rope_bench::rows::{MemoryRow, Source, SpeedRow, bytes, time};
use rope_check::buffer::DType;

use super::environment::Environment;
use super::{BenchmarkError, Result, Results};

/// First line of each page.
const MADE_BY: &str =
    "<!-- Made by `cargo xtask benchmarks` of the templates and results in docs/benchmarks. -->";

/// The model on the page of results; the page of tables has all of them.
const MODEL: &str = "Qwen3-VL-8B";

/// A page for each template of `results`, in their order. Every table is on at least one of them.
pub(super) fn pages(results: &Results) -> Result<Vec<String>> {
    let of_model = results.memory.iter().filter(|row| row.shape == MODEL);
    let tables = [
        ("environment", environment(&results.environments)),
        ("bars", bar_list(results)),
        ("large", ratios(&results.speed, Group::Large)),
        ("rare", ratios(&results.speed, Group::Rare)),
        ("other", times(&results.speed, Group::Other)),
        ("length", length(results)),
        ("decode", times(&results.speed, Group::Decode)),
        ("burn", implementations(&results.speed, Group::Burn)),
        ("peers", implementations(&results.peers, Group::Peers)),
        ("memory", memory(&of_model.cloned().collect::<Vec<_>>())),
        ("memory_all", memory(&results.memory)),
        ("memory_npu", memory(&results.memory_npu)),
        ("layers", layers(&results.memory)),
        ("calculated", calculated(&results.memory)),
        ("step", step(results)),
    ]
    .map(|(name, table)| (format!("{{{{{name}}}}}"), table));
    let templates = results.templates.concat();
    if let Some((mark, _)) = tables.iter().find(|(mark, _)| !templates.contains(mark)) {
        return Err(template(format!("lacks {mark}")));
    }
    let page = |text: &String| {
        let page = tables.iter().fold(text.clone(), |page, (mark, table)| {
            page.replace(mark, table.trim_end())
        });
        match page.split_once("{{") {
            Some((_, rest)) => {
                let mark = rest.split("}}").next().unwrap_or_default();
                Err(template(format!(
                    "has {{{{{mark}}}}}, for which there is no table"
                )))
            }
            None => Ok(format!("{MADE_BY}\n\n{page}")),
        }
    };
    results.templates.iter().map(page).collect()
}

fn template(problem: String) -> BenchmarkError {
    BenchmarkError::Template { problem }
}

/// A table in Markdown.
struct Table {
    text: String,
}

impl Table {
    fn new<T: Into<String>>(heading: impl IntoIterator<Item = T>) -> Self {
        let mut table = Self {
            text: String::new(),
        };
        let columns = table.row(heading);
        table.text += &format!("|{}\n", "---|".repeat(columns));
        table
    }

    /// Returns the number of cells.
    fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) -> usize {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        self.text += &format!("| {} |\n", cells.join(" | "));
        cells.len()
    }
}

/// A column for each environment, headed by the parts that were measured on it.
fn environment(parts: &[(&'static str, Environment)]) -> String {
    let mut columns: Vec<(String, &Environment)> = Vec::new();
    for (part, environment) in parts {
        match columns.iter_mut().find(|(_, other)| *other == environment) {
            Some((heading, _)) => {
                let _ = write!(heading, ", {part}");
            }
            None => columns.push(((*part).to_owned(), environment)),
        }
    }
    let line = |name: &str, value: &dyn Fn(&Environment) -> String| -> Vec<String> {
        let values = columns.iter().map(|(_, environment)| value(environment));
        once(name.to_owned()).chain(values).collect()
    };
    let heading = columns.iter().map(|(heading, _)| heading.clone());
    let mut table = Table::new(once(String::new()).chain(heading));
    table.row(line("date, commit", &|of| {
        format!("{}, {}", of.date, of.commit)
    }));
    table.row(line("processor", &|of| {
        format!("{}, {} cores", of.processor, of.cores)
    }));
    table.row(line("vector instructions", &|of| {
        let features = of.features.join(", ");
        format!("{} chosen; has {features}", of.instructions)
    }));
    table.row(line("memory", &|of| {
        format!("{} GiB; large pages: {}", of.memory_gib, of.large_pages)
    }));
    table.row(line("system, compiler", &|of| {
        format!("{}; {}", of.system, of.rustc)
    }));
    table.row(line("load before", &|of| of.load.clone()));
    table.text
}

fn bar_list(results: &Results) -> String {
    let speed = [&results.speed[..], &results.peers[..]].concat();
    let memory = [&results.memory[..], &results.memory_npu[..]].concat();
    let all: Vec<Bar> = [
        bars::speed(&speed),
        bars::memory(&memory),
        bars::step(&results.step),
    ]
    .concat();
    let mut table = Table::new(["claim", "found", ""]);
    for bar in all {
        let verdict = if bar.met { "met" } else { "**not met**" };
        table.row([bar.claim, bar.found, verdict.to_owned()]);
    }
    table.text
}

fn ratio(row: &SpeedRow) -> String {
    format!("{:.2}", row.copy_ratio)
}

/// Ratios of the kernels: a line for each way to rotate, a column for each type and direction.
fn ratios(rows: &[SpeedRow], group: Group) -> String {
    let columns: Vec<(DType, Way)> = DTYPES
        .into_iter()
        .flat_map(|dtype| [Way::Forward, Way::Backward].map(|way| (dtype, way)))
        .collect();
    let headings = columns
        .iter()
        .map(|(dtype, way)| format!("{} {}", dtype.name(), way.name()));
    let mut table = Table::new(once(String::new()).chain(headings));
    let mut lines: Vec<(String, Vec<&SpeedRow>)> = Vec::new();
    for row in rows.iter().filter(|row| row.group == group) {
        let place = if row.in_place { "in place" } else { "into" };
        let angles = if row.axes == "single" {
            ""
        } else {
            ", two angles a pair"
        };
        let layout = row.layout.to_uppercase();
        let line = format!("{place}, {}{angles} {layout}", row.pairing);
        match lines.iter_mut().find(|(other, _)| *other == line) {
            Some((_, rows)) => rows.push(row),
            None => lines.push((line, vec![row])),
        }
    }
    for (line, rows) in lines {
        let cells = columns.iter().map(|column| {
            let mut rows = rows.iter();
            let row = rows.find(|row| (row.dtype, row.direction) == *column);
            row.map_or_else(|| "-".to_owned(), |row| ratio(row))
        });
        table.row(once(line).chain(cells));
    }
    table.text
}

fn spread(row: &SpeedRow) -> String {
    format!(
        "{} to {}",
        time(row.lower_quartile_ns),
        time(row.upper_quartile_ns)
    )
}

fn times(rows: &[SpeedRow], group: Group) -> String {
    let mut table = Table::new(["case", "median", "quartiles", "baseline", "ratio"]);
    for row in rows.iter().filter(|row| row.group == group) {
        table.row([
            format!("`{}`", row.case),
            time(row.median_ns),
            spread(row),
            time(row.baseline_ns),
            ratio(row),
        ]);
    }
    table.text
}

fn length(results: &Results) -> String {
    let mut table = Table::new(["tokens", "type, layout", "median", "a token", "of a copy"]);
    for row in results
        .speed
        .iter()
        .filter(|row| row.group == Group::Length)
    {
        table.row([
            row.tokens.to_string(),
            format!("{} {}", row.dtype.name(), row.layout.to_uppercase()),
            time(row.median_ns),
            time(row.median_ns / row.tokens as f64),
            ratio(row),
        ]);
    }
    table.text
}

fn implementations(rows: &[SpeedRow], group: Group) -> String {
    let mut table = Table::new([
        "implementation",
        "way",
        "pairing",
        "type",
        "median",
        "quartiles",
        "of a copy",
    ]);
    for row in rows.iter().filter(|row| row.group == group) {
        table.row([
            row.implementation.clone(),
            row.direction.name().to_owned(),
            row.pairing.clone(),
            row.dtype.name().to_owned(),
            time(row.median_ns),
            spread(row),
            ratio(row),
        ]);
    }
    table.text
}

fn size(value: Option<impl TryInto<i64>>) -> String {
    let value = value.and_then(|value| value.try_into().ok());
    value.map_or_else(|| "-".to_owned(), |value| bytes(value as f64))
}

fn subject(row: &MemoryRow) -> String {
    let checkpointing = if row.checkpointing {
        ", checkpointing"
    } else {
        ""
    };
    format!("{} {}{checkpointing}", row.shape, row.dtype.name())
}

fn most_layers(rows: &[MemoryRow]) -> usize {
    rows.iter().map(|row| row.layers).max().unwrap_or(1)
}

/// What was counted at the largest number of layers.
fn memory(rows: &[MemoryRow]) -> String {
    let most = most_layers(rows);
    let mut table = Table::new([
        "q and k",
        "implementation",
        "tensor data kept",
        "all kept",
        "forward peak",
        "backward peak",
        "of the gradients",
        "peak of composed",
        "of RotaryEncoding",
    ]);
    let counted = rows.iter().filter(|row| {
        row.layers == most && row.source != Source::Calculated && row.retained_bytes.is_some()
    });
    for row in counted {
        let of = |value: Option<f64>, unit: &str| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}{unit}"))
        };
        table.row([
            format!("{}, {}", subject(row), bytes(row.gradient_bytes as f64)),
            row.implementation.clone(),
            size(row.retained_data_bytes),
            size(row.retained_bytes),
            size(row.forward_peak_bytes),
            size(row.backward_peak_bytes),
            of(
                row.backward_peak_bytes
                    .map(|peak| peak as f64 / row.gradient_bytes as f64),
                "",
            ),
            of(row.composed_ratio, "x"),
            of(row.rotary_encoding_ratio, "x"),
        ]);
    }
    let tokens = rows.first().map_or(0, |row| row.tokens);
    let source = rows.first().map_or("", |row| row.source.label());
    format!(
        "{most} rotations at {tokens} tokens; {source}.\n\n{}",
        table.text
    )
}

/// What is kept and allocated by number of layers, for the first model.
fn layers(rows: &[MemoryRow]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let mut table = Table::new([
        "implementation",
        "layers",
        "all kept",
        "peak of the step",
        "allocations, forward + backward",
        "as large as k",
    ]);
    let rows = rows.iter().filter(|row| {
        subject(row) == subject(first)
            && row.source == Source::Measured
            && row.retained_bytes.is_some()
    });
    for row in rows {
        let both = |forward: Option<usize>, backward: Option<usize>| {
            forward
                .zip(backward)
                .map_or_else(|| "-".to_owned(), |(f, b)| format!("{f} + {b}"))
        };
        table.row([
            row.implementation.clone(),
            row.layers.to_string(),
            size(row.retained_bytes),
            size(row.step_peak_bytes),
            both(row.forward_allocations, row.backward_allocations),
            both(
                row.forward_large_allocations,
                row.backward_large_allocations,
            ),
        ]);
    }
    format!("{}:\n\n{}", subject(first), table.text)
}

fn calculated(rows: &[MemoryRow]) -> String {
    let most = most_layers(rows);
    let mut table = Table::new([
        "q and k",
        "scheme",
        "kept",
        "forward peak",
        "fused keeps, measured",
    ]);
    let of_scheme = |row: &&MemoryRow| row.layers == most && row.source == Source::Calculated;
    for row in rows.iter().filter(of_scheme) {
        let fused = rows.iter().find(|other| {
            (&other.shape, other.dtype, other.layers, other.checkpointing)
                == (&row.shape, row.dtype, most, false)
                && other.implementation == names::FUSED
        });
        table.row([
            format!("{}, {}", subject(row), bytes(row.gradient_bytes as f64)),
            row.implementation.clone(),
            size(row.retained_bytes),
            size(row.forward_peak_bytes),
            size(fused.and_then(|row| row.retained_bytes)),
        ]);
    }
    format!("{most} layers; calculated.\n\n{}", table.text)
}

fn step(results: &Results) -> String {
    let mut table = Table::new([
        "step",
        "rotation",
        "rotations of q and k",
        "step takes",
        "they take",
        "share",
    ]);
    for row in &results.step {
        table.row([
            row.step.clone(),
            row.implementation.clone(),
            row.layers.to_string(),
            time(row.step_ns),
            time(row.rotation_ns),
            format!("{:.2} %", 100.0 * row.share),
        ]);
    }
    table.text
}
