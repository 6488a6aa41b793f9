//! docs/benchmarks.md: the hand-written template with tables in place of its marks.

use std::fmt::Write as _;

use rope_benches::bars::{self, Bar, names};
use rope_benches::cases::{DType, Group, Way};
use rope_benches::rows::{MemoryRow, Source, SpeedRow, bytes, time};

use super::environment::Environment;
use super::{BenchmarkError, Result, Results};

/// The page.
pub(super) fn page(results: &Results) -> Result<String> {
    let marks = [
        ("environment", environment(&results.environments)),
        ("bars", bar_list(results)),
        ("large", large(results)),
        ("rare", rare(results)),
        ("other", times(&results.speed, Group::Other)),
        ("length", length(results)),
        ("decode", times(&results.speed, Group::Decode)),
        ("burn", implementations(&results.speed, Group::Burn)),
        ("peers", implementations(&results.peers, Group::Peers)),
        ("memory", memory(&results.memory)),
        ("memory_npu", memory(&results.memory_npu)),
        ("layers", layers(&results.memory)),
        ("calculated", calculated(&results.memory)),
        ("step", step(results)),
        ("tuning", results.tuning.trim_end().to_owned()),
    ];
    let mut text = results.template.clone();
    for (mark, table) in marks {
        let mark = format!("{{{{{mark}}}}}");
        if !text.contains(&mark) {
            return Err(template(format!("has no {mark}")));
        }
        text = text.replace(&mark, table.trim_end());
    }
    if let Some((_, rest)) = text.split_once("{{") {
        let mark = rest.split("}}").next().unwrap_or_default();
        return Err(template(format!(
            "has {{{{{mark}}}}}, for which there is no table"
        )));
    }
    Ok(format!(
        "<!-- Made by `cargo xtask benchmarks` of benchmarks/template.md, benchmarks/tuning.md and benchmarks/*.csv. -->\n\n{text}"
    ))
}

fn template(problem: String) -> BenchmarkError {
    BenchmarkError::Template { problem }
}

/// A table in Markdown.
struct Table {
    text: String,
}

impl Table {
    fn new<T: AsRef<str>>(heading: &[T]) -> Self {
        let mut table = Self {
            text: String::new(),
        };
        table.row(heading);
        let rule: Vec<&str> = heading.iter().map(|_| "---").collect();
        let _ = writeln!(table.text, "|{}|", rule.join("|"));
        table
    }

    fn row<T: AsRef<str>>(&mut self, cells: &[T]) {
        let cells: Vec<&str> = cells.iter().map(AsRef::as_ref).collect();
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "| {} |", cells.join(" | "));
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
        std::iter::once(name.to_owned()).chain(values).collect()
    };
    let heading = columns.iter().map(|(heading, _)| heading.clone());
    let mut table = Table::new(
        &std::iter::once(String::new())
            .chain(heading)
            .collect::<Vec<_>>(),
    );
    table.row(&line("date, commit", &|of| {
        format!("{}, {}", of.date, of.commit)
    }));
    table.row(&line("processor", &|of| {
        format!("{}, {} cores", of.processor, of.cores)
    }));
    table.row(&line("vector instructions", &|of| {
        let features = of.features.join(", ");
        format!("{} chosen; has {features}", of.instructions)
    }));
    table.row(&line("memory", &|of| {
        format!("{} GiB; large pages: {}", of.memory_gib, of.large_pages)
    }));
    table.row(&line("system, compiler", &|of| {
        format!("{}; {}", of.system, of.rustc)
    }));
    table.row(&line("load before", &|of| of.load.clone()));
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
    let mut table = Table::new(&["claim", "found", ""]);
    for bar in all {
        let verdict = if bar.met { "met" } else { "**not met**" };
        table.row(&[&bar.claim, &bar.found, verdict]);
    }
    table.text
}

fn ratio(row: &SpeedRow) -> String {
    format!("{:.2}", row.copy_ratio)
}

/// Ratios of the kernels: a line for each of `key`, a column for each type and way.
fn ratios<'a>(
    rows: impl Iterator<Item = &'a SpeedRow>,
    key: impl Fn(&SpeedRow) -> String,
) -> String {
    let rows: Vec<&SpeedRow> = rows.collect();
    let columns: Vec<(DType, Way)> = DType::ALL
        .into_iter()
        .flat_map(|dtype| [Way::Forward, Way::Backward].map(|way| (dtype, way)))
        .collect();
    let headings = columns
        .iter()
        .map(|(dtype, way)| format!("{} {}", dtype.name(), way.name()));
    let mut table = Table::new(
        &std::iter::once(String::new())
            .chain(headings)
            .collect::<Vec<_>>(),
    );
    let mut seen: Vec<String> = Vec::new();
    for row in &rows {
        if !seen.contains(&key(row)) {
            seen.push(key(row));
        }
    }
    for line in seen {
        let cells = columns.iter().map(|column| {
            let row = rows
                .iter()
                .find(|row| key(row) == line && (row.dtype, row.direction) == *column);
            row.map_or_else(|| "-".to_owned(), |row| ratio(row))
        });
        table.row(
            &std::iter::once(line.clone())
                .chain(cells)
                .collect::<Vec<_>>(),
        );
    }
    table.text
}

fn how(row: &SpeedRow) -> &'static str {
    if row.in_place { "in place" } else { "into" }
}

fn large(results: &Results) -> String {
    let rows = results.speed.iter().filter(|row| row.group == Group::Large);
    ratios(rows, |row| {
        format!(
            "{}, {} {}",
            how(row),
            row.pairing,
            row.layout.to_uppercase()
        )
    })
}

fn rare(results: &Results) -> String {
    let rows = results.speed.iter().filter(|row| row.group == Group::Rare);
    ratios(rows, |row| {
        let angles = if row.axes == "single" {
            ""
        } else {
            ", two angles a pair"
        };
        format!(
            "{}, {}{angles} {}",
            how(row),
            row.pairing,
            row.layout.to_uppercase()
        )
    })
}

fn spread(row: &SpeedRow) -> String {
    format!(
        "{} to {}",
        time(row.lower_quartile_ns),
        time(row.upper_quartile_ns)
    )
}

fn times(rows: &[SpeedRow], group: Group) -> String {
    let mut table = Table::new(&["case", "median", "quartiles", "baseline", "ratio"]);
    for row in rows.iter().filter(|row| row.group == group) {
        table.row(&[
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
    let mut table = Table::new(&["tokens", "type, layout", "median", "a token", "of a copy"]);
    for row in results
        .speed
        .iter()
        .filter(|row| row.group == Group::Length)
    {
        table.row(&[
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
    let mut table = Table::new(&[
        "implementation",
        "way",
        "pairing",
        "type",
        "median",
        "quartiles",
        "of a copy",
    ]);
    for row in rows.iter().filter(|row| row.group == group) {
        table.row(&[
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

fn size(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), bytes)
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
    let mut table = Table::new(&[
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
        table.row(&[
            format!("{}, {}", subject(row), bytes(row.gradient_bytes as f64)),
            row.implementation.clone(),
            size(row.retained_data_bytes.map(|bytes| bytes as f64)),
            size(row.retained_bytes.map(|bytes| bytes as f64)),
            size(row.forward_peak_bytes.map(|bytes| bytes as f64)),
            size(row.backward_peak_bytes.map(|bytes| bytes as f64)),
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
    let mut table = Table::new(&[
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
        table.row(&[
            row.implementation.clone(),
            row.layers.to_string(),
            size(row.retained_bytes.map(|bytes| bytes as f64)),
            size(row.step_peak_bytes.map(|bytes| bytes as f64)),
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
    let mut table = Table::new(&[
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
        let kept = |row: &MemoryRow| row.retained_bytes.map(|bytes| bytes as f64);
        table.row(&[
            format!("{}, {}", subject(row), bytes(row.gradient_bytes as f64)),
            row.implementation.clone(),
            size(kept(row)),
            size(row.forward_peak_bytes.map(|bytes| bytes as f64)),
            size(fused.and_then(kept)),
        ]);
    }
    format!("{most} layers; calculated.\n\n{}", table.text)
}

fn step(results: &Results) -> String {
    let mut table = Table::new(&[
        "step",
        "rotation",
        "rotations of q and k",
        "step takes",
        "they take",
        "share",
    ]);
    for row in &results.step {
        table.row(&[
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
