//! The pages: their length by reader, avoided words, and the README's chart.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Set to write the chart instead of comparing it.
const WRITE: &str = "MROPE_WRITE_CHART";

/// Folders and files of pages, the most words they may have together, and their reader.
/// `docs/tables` is generated or measured, and read by looking up: it has no limit.
const LIMITS: [(&[&str], usize, &str); 2] = [
    (&["README.md", "docs"], 25_000, "users"),
    (&["CONTRIBUTING.md", "docs/dev"], 15_000, "makers"),
];

/// Lines of the README.
const README_LINES: usize = 100;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The pages of a folder, without those of its subfolders, or the page itself.
fn pages(path: &str) -> Vec<(String, String)> {
    if path.ends_with(".md") {
        return vec![(path.to_owned(), read(path))];
    }
    let entries = fs::read_dir(root().join(path)).expect("a readable folder");
    let names = entries.map(|entry| entry.expect("a readable entry").file_name());
    let names = names.map(|name| format!("{path}/{}", name.display()));
    let mut pages: Vec<_> = names
        .filter(|path| path.ends_with(".md"))
        .map(|path| (path.clone(), read(&path)))
        .collect();
    pages.sort();
    pages
}

#[test]
fn pages_are_short() {
    for (paths, limit, reader) in LIMITS {
        let pages = paths.iter().flat_map(|path| pages(path));
        // The contents list pages, and the changelog only grows.
        let pages =
            pages.filter(|(path, _)| !["docs/SUMMARY.md", "docs/CHANGELOG.md"].contains(&&**path));
        let counts: Vec<_> = pages
            .map(|(path, text)| (text.split_whitespace().count(), path))
            .collect();
        let words: usize = counts.iter().map(|(words, _)| words).sum();
        let list: String = counts
            .iter()
            .fold(String::new(), |mut list, (words, path)| {
                let _ = writeln!(list, "{words:6} {path}");
                list
            });
        println!("{list}{words:6} words for {reader}, of at most {limit}\n");
        assert!(
            words <= limit,
            "{words} words for {reader}, expected at most {limit}:\n{list}"
        );
    }
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
}

/// `cargo xtask deep` refuses a step that its page does not name.
#[test]
fn the_page_of_the_deep_checks_names_each_step() {
    let (steps, page) = (
        read("crates/xtask/scripts/deep.txt"),
        read("docs/dev/deep.md"),
    );
    let names = steps.lines().filter_map(|line| line.split_once(": "));
    let names: Vec<&str> = names
        .map(|(name, _)| name)
        .filter(|name| !name.starts_with(['#', ' ']))
        .collect();
    assert!(names.len() >= 20, "{names:?}");
    for name in names {
        assert!(
            page.contains(&format!("| `{name}` |")),
            "docs/dev/deep.md has no row for {name:?}"
        );
    }
}

/// The sources of a crate.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// The literals of a source, and its documentation of options: messages, and texts of `--help`.
fn texts(source: &str, documents_options: bool) -> String {
    let mut texts = String::new();
    let mut rest = source;
    while let Some(at) = rest.find(['/', '"', '\'']) {
        rest = &rest[at..];
        let comment = rest
            .split('\n')
            .next()
            .filter(|line| line.starts_with("//"));
        if let Some(comment) = comment {
            if let Some(line) = comment.strip_prefix("///").filter(|_| documents_options) {
                texts.push_str(line);
            }
            rest = &rest[comment.len()..];
        } else if let Some(text) = rest.strip_prefix('"') {
            let is_end = |(at, _): &(usize, &str)| {
                let escapes = text[..*at].chars().rev().take_while(|c| *c == '\\');
                escapes.count().is_multiple_of(2)
            };
            let end = text.match_indices('"').find(is_end).expect("an end").0;
            texts.push_str(" \n");
            texts.push_str(&text[..end].replace("\\\n", " "));
            texts.push('\n');
            rest = &text[end + 1..];
        } else {
            // A character of its own, or a lifetime.
            let letter = rest.starts_with("'\"'") || rest.starts_with("'\\\"'");
            rest = &rest[if letter { 3 } else { 1 }..];
        }
    }
    texts
}

/// Pages, messages and `--help` hold none of the phrases in quotation marks in CONTRIBUTING.md's
/// table of words.
#[test]
fn pages_and_messages_avoid_the_listed_words() {
    let contributing = read("CONTRIBUTING.md");
    let (_, table) = contributing
        .split_once("\n| instead of |")
        .expect("CONTRIBUTING.md has the table");
    let rows = table.split("\n\n").next().unwrap_or_default().lines();
    let cells = rows.filter_map(|row| row.strip_prefix("| ")?.split(" | ").next());
    let avoided: Vec<&str> = cells
        .flat_map(|cell| cell.split('"').skip(1).step_by(2))
        .collect();
    assert!(avoided.len() >= 10, "{avoided:?}");
    let folders = ["README.md", "docs", "docs/dev", "docs/tables"];
    let mut faults = Vec::new();
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join("crates")).expect("a readable folder") {
        sources(
            &entry.expect("a readable entry").path().join("src"),
            &mut files,
        );
    }
    let messages = files.iter().map(|path| {
        let path = path.display().to_string();
        let is_program = ["rope-cli/src", "vlm-train/src/job"]
            .iter()
            .any(|part| path.contains(part));
        let text = texts(&read(&path), is_program);
        (path, text)
    });
    let pages = folders.iter().flat_map(|path| pages(path));
    for (path, text) in pages.chain(messages) {
        // Paragraphs, so that a line's end hides nothing.
        let text = text
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase();
        let found = avoided
            .iter()
            .filter(|words| text.contains(&format!(" {words}")));
        faults.extend(found.map(|words| format!("{path}: {words:?}")));
    }
    assert!(
        faults.is_empty(),
        "CONTRIBUTING.md has other words for:\n{}",
        faults.join("\n")
    );
}

/// A bar: its label, the length that decides its width, and the figure written beside it.
struct Bar {
    label: &'static str,
    length: f64,
    figure: String,
}

impl Bar {
    /// The figure in the given column of the one row that starts with these cells.
    fn from_page(label: &'static str, path: &str, cells: &str, column: usize) -> Self {
        let text = read(path);
        let mut rows = text.lines().filter(|line| line.starts_with(cells));
        let row = rows
            .next()
            .unwrap_or_else(|| panic!("{path}: no row {cells}"));
        assert!(rows.next().is_none(), "{path}: two rows {cells}");
        let figure = row
            .split('|')
            .nth(column)
            .expect("a column")
            .trim()
            .to_owned();
        let (number, unit) = figure.split_once(' ').expect("a number and its unit");
        let scale = match unit {
            "MiB" | "ms" => 1.0,
            "s" => 1000.0,
            other => panic!("{path}: unit {other}"),
        };
        let length = scale * number.parse::<f64>().expect("a number");
        Self {
            label,
            length,
            figure,
        }
    }
}

/// Two groups of bars, one below the other.
fn chart(groups: &[(&str, Vec<Bar>)]) -> String {
    const LEFT: f64 = 250.0;
    const WIDEST: f64 = 370.0;
    let mut y = 0.0;
    let mut body = String::new();
    for (title, bars) in groups {
        y += 26.0;
        let _ = writeln!(
            body,
            r#"<text x="12" y="{y}" font-weight="bold">{title}</text>"#
        );
        y += 10.0;
        let longest = bars.iter().map(|bar| bar.length).fold(0.0, f64::max);
        for (
            number,
            Bar {
                label,
                length,
                figure,
            },
        ) in bars.iter().enumerate()
        {
            let width = WIDEST * length / longest;
            let colour = if number == 0 { "#1f6feb" } else { "#9aa4b0" };
            let text = y + 15.0;
            let (end, after) = (LEFT - 10.0, LEFT + width + 8.0);
            let _ = writeln!(
                body,
                "<text x=\"{end}\" y=\"{text}\" text-anchor=\"end\">{label}</text>\n\
                 <rect x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"20\" fill=\"{colour}\"/>\n\
                 <text x=\"{after:.1}\" y=\"{text}\">{figure}</text>"
            );
            y += 26.0;
        }
    }
    let height = y + 8.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 {height}\" \
         font-family=\"sans-serif\" font-size=\"13\" fill=\"#1f2328\">\n\
         <!-- Written by crates/xtask/tests/pages.rs from the pages' tables. -->\n\
         <rect width=\"720\" height=\"{height}\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

#[test]
fn the_chart_shows_the_figures_of_the_tables() {
    const OURS: &str = "this project, fused";
    let page = "docs/tables/benchmarks.md";
    let kept = "| bf16 | 36 | 90.1 MiB |";
    let groups = [
        (
            "Memory that the graph keeps: norm and rotation of q and k, Qwen3-VL-8B, 256 tokens, bf16",
            vec![
                Bar::from_page(OURS, page, &format!("{kept} 92.7 MiB | 363"), 3),
                Bar::from_page(
                    "burn's RmsNorm, fused rotation",
                    page,
                    &format!("{kept} 92.7 MiB | 363"),
                    5,
                ),
                Bar::from_page(
                    "ordinary burn operations",
                    page,
                    &format!("{kept} 92.7 MiB | 363"),
                    7,
                ),
            ],
        ),
        (
            "Time of forward and backward: rotation of [1, 24, 14400, 128] in f32, 2 CPU cores",
            vec![
                Bar::from_page(OURS, page, "| fused | both | adjacent | f32 |", 5),
                Bar::from_page(
                    "burn::nn::RotaryEncoding",
                    page,
                    "| burn::nn::RotaryEncoding | both |",
                    5,
                ),
                Bar::from_page("ordinary burn operations", page, "| composed | both |", 5),
            ],
        ),
    ];
    let (path, expected) = (root().join("docs/pictures/chart.svg"), chart(&groups));
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, expected).expect("the chart can be written");
    } else {
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == expected,
            "docs/pictures/chart.svg: run this test with {WRITE}=1"
        );
    }
}
