//! Each family, in each precision, through each command from data to merged weights: one table.
//!
//! A cell runs `mrope` and compares its result with transformers, PEFT and torch
//! (tests/fixtures/generate/workflow.py), with the labels of the data, or with a count. Continuous
//! integration runs cells with all pairs of family, precision, command and data; `cargo xtask deep
//! training` runs all.

mod commands;
mod families;
mod reference;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

/// Families with a folder in tests/fixtures/models and one in tests/fixtures/workflow.
const FAMILIES: [&str; 8] = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
];
/// Those of text alone.
const OF_TEXT: [&str; 5] = ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"];
const PRECISIONS: [&str; 3] = ["f32", "bf16", "f16"];
/// Files of tests/fixtures/workflow.
const ALL_DATA: [&str; 4] = ["text", "pictures", "video", "mixed"];
static COMMANDS: [Command; 9] = [
    Command::new("train adapters", &ALL_DATA, commands::train_adapters),
    Command::new("train whole", &ALL_DATA, commands::train_whole),
    Command::new("plan", &ALL_DATA, commands::plan),
    Command::new("samples", &ALL_DATA, commands::samples),
    Command::new("generate", &ALL_DATA, commands::generate),
    Command::new("score", &ALL_DATA, commands::score),
    // The record of transformers has text, a picture and a video.
    Command::new("record, compare", &["mixed"], commands::compare),
    Command::new("merge", &["none"], commands::merge),
    Command::new("resume", &ALL_DATA, commands::resume),
];
/// Cells that cannot be: family, precision, command, data (`*`: any), and the reason.
const IMPOSSIBLE: [[&str; 5]; 13] = [
    ["glm4v_moe", "bf16", "record, compare", "*", GROUPS],
    ["qwen3_5_moe", "bf16", "train adapters", "*", ROUTES],
    ["qwen3_5_moe", "bf16", "train whole", "*", ROUTES],
    ["qwen3_5_moe", "bf16", "generate", "*", ROUTES],
    ["qwen3_5_moe", "bf16", "score", "*", ROUTES],
    ["qwen3_5_moe", "bf16", "record, compare", "*", ROUTES],
    ["qwen3_5_moe", "f16", "train adapters", "*", ROUTES],
    ["qwen3_5_moe", "f16", "train whole", "*", ROUTES],
    ["qwen3_5_moe", "f16", "generate", "*", ROUTES],
    ["qwen3_5_moe", "f16", "score", "*", ROUTES],
    ["qwen3_5_moe", "f16", "record, compare", "*", ROUTES],
    ["qwen3_5_moe", "f16", "plan", "*", ROUTES],
    ["qwen3_5_moe", "f16", "resume", "*", ROUTES],
];
/// A tiny model with states and experts is too far from itself.
const ROUTES: &str = "torch's own first norm is 0.2 from its f32 in bf16, and 0.5 in f16";
/// As of a tiny model whose tokens rounding sends to other groups of experts.
const GROUPS: &str = "compare finds torch's own record in bf16 apart from its f32";
/// Programs at a time: the CPUs of continuous integration.
const AT_ONCE: usize = 2;

/// A column of the table's cells.
struct Command {
    name: &'static str,
    data: &'static [&'static str],
    run: fn(&Cell) -> Result<Outcome, String>,
}

impl Command {
    const fn new(
        name: &'static str,
        data: &'static [&'static str],
        run: fn(&Cell) -> Result<Outcome, String>,
    ) -> Self {
        Self { name, data, run }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    family: &'static str,
    precision: &'static str,
    command: &'static str,
    data: &'static str,
}

/// The result of a cell beside its reference.
struct Outcome {
    value: String,
    reference: &'static str,
    bound: String,
    holds: bool,
}

impl Cell {
    fn all() -> Vec<Self> {
        Self::of(&FAMILIES, |command| command.data)
    }

    /// The cells of families of text alone.
    fn all_of_text() -> Vec<Self> {
        Self::of(&OF_TEXT, |command| match command.data {
            ["none"] => command.data,
            _ => &["text"],
        })
    }

    fn of(
        families: &[&'static str],
        data_of: fn(&'static Command) -> &'static [&'static str],
    ) -> Vec<Self> {
        let mut cells = Vec::new();
        for &family in families {
            for precision in PRECISIONS {
                for command in &COMMANDS {
                    cells.extend(data_of(command).iter().map(|data| Self {
                        family,
                        precision,
                        command: command.name,
                        data,
                    }));
                }
            }
        }
        cells
    }

    /// True for a family that sees.
    fn sees(&self) -> bool {
        FAMILIES.contains(&self.family)
    }

    const fn values(&self) -> [&'static str; 4] {
        [self.family, self.precision, self.command, self.data]
    }

    /// Its pairs of values.
    fn pairs(&self) -> impl Iterator<Item = [&'static str; 2]> {
        let values = self.values();
        let pairs = (0..4).flat_map(|i| (i + 1..4).map(move |j| (i, j)));
        pairs.map(move |(i, j)| [values[i], values[j]])
    }

    /// The reason why there is no such cell.
    fn impossible(&self) -> Option<&'static str> {
        let is_here = |row: &&[&str; 5]| {
            let mut places = self.values().into_iter().zip(row.iter());
            places.all(|(value, of)| *of == "*" || *of == value)
        };
        IMPOSSIBLE.iter().find(is_here).map(|row| row[4])
    }

    /// A folder of this cell that does not exist yet.
    fn fresh(&self, name: &str) -> PathBuf {
        let [family, precision, command, data] = self.values();
        let command = command.replace([' ', ','], "");
        let name = format!("workflow/{family}-{precision}-{command}-{data}-{name}");
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::remove_dir_all(&path).ok();
        path
    }

    fn run(&self) -> Result<Outcome, String> {
        let command = COMMANDS.iter().find(|row| row.name == self.command);
        (command.expect("a command of the table").run)(self)
    }

    /// A line of the table, and whether it holds.
    fn line(&self) -> (String, bool) {
        let [family, precision, command, data] = self.values();
        let (rest, holds) = match self.impossible() {
            Some(reason) => (format!("| | | | cannot be: {reason} |"), true),
            None => match self.run() {
                Ok(found) => {
                    let verdict = if found.holds { "holds" } else { "FAILS" };
                    let (value, reference, bound) = (found.value, found.reference, found.bound);
                    (
                        format!("| {value} | {reference} | {bound} | {verdict} |"),
                        found.holds,
                    )
                }
                Err(message) => (
                    format!("| {} | | | FAILS |", message.replace('\n', " ")),
                    false,
                ),
            },
        };
        (
            format!("| {family} | {precision} | {command} | {data} {rest}"),
            holds,
        )
    }
}

/// Few cells with all pairs of values that any cell has: the next one is always of those with the
/// most new pairs.
fn pairwise(cells: &[Cell]) -> Vec<Cell> {
    let mut open: BTreeSet<_> = cells.iter().flat_map(Cell::pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let new = |cell: &&Cell| cell.pairs().filter(|pair| open.contains(pair)).count();
        // The last of equals.
        let best = *cells.iter().max_by_key(new).expect("a cell");
        best.pairs().for_each(|pair| {
            open.remove(&pair);
        });
        chosen.push(best);
    }
    chosen.sort();
    chosen
}

/// Runs the cells, prints the table and fails if one of them does.
fn check(cells: &[Cell]) {
    let started = Instant::now();
    let (next, lines) = (Mutex::new(0..cells.len()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(at) = next.lock().expect("no worker panicked").next() else {
                        break;
                    };
                    let line = cells[at].line();
                    println!("{}", line.0);
                    lines.lock().expect("no worker panicked").push((at, line));
                }
            });
        }
    });
    let mut lines = lines.into_inner().expect("no worker panicked");
    lines.sort_by_key(|(at, _)| *at);
    let mut table = String::from(
        "| family | precision | command | data | value | reference | bound | verdict |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for (_, (line, _)) in &lines {
        writeln!(table, "{line}").expect("a string");
    }
    println!(
        "{} cells in {:.0} s",
        lines.len(),
        started.elapsed().as_secs_f64()
    );
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("workflow.md");
    std::fs::write(path, &table).expect("the table can be written");
    assert_eq!(lines.len(), cells.len(), "a cell is missing");
    let failed: Vec<&str> = lines
        .iter()
        .filter(|(_, (_, holds))| !holds)
        .map(|(_, (line, _))| line.as_str())
        .collect();
    assert!(
        failed.is_empty(),
        "{} cells fail:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

#[test]
fn each_pair_of_family_precision_command_and_data() {
    let mut cells = Cell::all();
    // Answers to pictures and videos take long to learn: `daily::learned_answers_are_right`.
    cells.retain(|cell| cell.command != "samples" || cell.data == "text");
    check(&pairwise(&cells));
}

#[test]
fn families_of_text_alone_in_f32() {
    const OTHERS: [&str; 2] = ["samples", "resume"];
    let mut cells = Cell::all_of_text();
    cells.retain(|cell| cell.precision == "f32" && !OTHERS.contains(&cell.command));
    check(&cells);
}

/// With MROPE_CELLS, cells whose line has all of its words: `MROPE_CELLS="glm4v bf16 merge"`.
#[test]
#[ignore = "half an hour: a part of `cargo xtask deep training`"]
fn all_cells() {
    let mut cells = Cell::all();
    assert_eq!(cells.len(), FAMILIES.len() * PRECISIONS.len() * 30);
    cells.extend(Cell::all_of_text());
    if let Ok(words) = std::env::var("MROPE_CELLS") {
        let fits = |cell: &Cell| {
            let text = cell.values().join(" ");
            words
                .split_whitespace()
                .all(|word| text.split([' ', ',']).any(|of| of == word))
        };
        cells.retain(fits);
        assert!(!cells.is_empty(), "no cell has {words:?}");
    }
    check(&cells);
}

#[test]
fn few_cells_have_all_pairs() {
    let all = Cell::all();
    let chosen = pairwise(&all);
    let pairs = |cells: &[Cell]| cells.iter().flat_map(Cell::pairs).collect::<BTreeSet<_>>();
    assert_eq!(pairs(&all), pairs(&chosen));
    println!("{} of {} cells", chosen.len(), all.len());
    assert!(chosen.len() * 6 < all.len());
}

/// Each family that the program trains has its row.
#[test]
fn each_family_with_a_model_has_cells() {
    let families = vlm_family::FAMILIES.iter();
    let found: BTreeSet<&str> = families.map(families::fixtures).collect();
    let with_cells = FAMILIES.into_iter().chain(OF_TEXT);
    assert_eq!(found, with_cells.collect());
}
