//! `mrope compare`: the first difference between two recorded steps, each of one device or of ranks.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use plotters::style::RGBColor;
use serde_json::json;
use vlm_train::StepRecord;
use vlm_train::compare::{Comparison, Row, Stage, compare};

use crate::stdio::{plain, stdout};
use crate::svg::{self, Area, Drawn, GREY};
use crate::table::Table;

/// Options of `mrope compare`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    /// A record of a step; that of a rank stands for all ranks, whose records are beside it
    #[arg(value_name = "A", value_hint = ValueHint::FilePath)]
    left: PathBuf,

    /// Another record of the same step, to compare with A
    #[arg(value_name = "B", value_hint = ValueHint::FilePath)]
    right: PathBuf,

    /// File for a plot of the relative differences by layer and part
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,

    /// Print every item, not only the sum of each stage
    #[arg(long)]
    all: bool,

    /// Print one JSON object: equal, suspicion (fault, place, because), first, losses, settings,
    /// items
    #[arg(long, conflicts_with = "all")]
    json: bool,
}

/// Compares, prints and draws.
///
/// # Errors
/// Those of the records; for records without an item in common; if a result cannot be written.
pub(crate) fn run(args: &CompareArgs) -> Result<ExitCode, Box<dyn Error>> {
    let [left, right] = [
        StepRecord::read_ranks(&args.left)?,
        StepRecord::read_ranks(&args.right)?,
    ];
    let found = compare(&left, &right);
    if !found.rows.iter().any(|row| row.stage == Stage::Forward) {
        return Err(format!(
            "{} and {} have no activation in common; expected records of one step over the same \
             lines of the data, of models of one family",
            args.left.display(),
            args.right.display()
        )
        .into());
    }
    if let Some(path) = &args.picture {
        let drawn = picture(path, &found);
        drawn.map_err(|error| format!("cannot draw {}: {error}", path.display()))?;
    }
    if args.json {
        writeln!(stdout(), "{}", as_json(&found))?;
    } else {
        print(args, [&left, &right], &found)?;
    }
    Ok(match found.suspicion {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    })
}

fn print(
    args: &CompareArgs,
    [left, right]: [&[StepRecord]; 2],
    found: &Comparison,
) -> Result<(), Box<dyn Error>> {
    let mut out = stdout();
    let mut sides = Table::new(&["record", "of", "ranks", "type"], &["step", "loss"]);
    for (path, records) in [(&args.left, left), (&args.right, right)] {
        let header = &records[0].header;
        sides.row([
            path.display().to_string(),
            plain(&header.source),
            header
                .rank
                .as_ref()
                .map_or(String::new(), |rank| rank.to_string()),
            plain(&header.precision),
            header.step.to_string(),
            format!("{:.6}", header.loss),
        ]);
    }
    writeln!(out, "{sides}")?;
    if !found.settings.is_empty() {
        let mut settings = Table::new(&["setting", "A", "B"], &[]);
        for row in &found.settings {
            settings.row(row.iter().map(plain));
        }
        writeln!(out, "{settings}")?;
    }
    let columns = ["difference", "rounding"];
    if args.all {
        let mut table = Table::new(&["stage", "item", ""], &columns);
        for row in &found.rows {
            let mark = if row.exceeds() { "differs" } else { "" };
            table.row([
                row.stage.to_string(),
                plain(&row.name),
                mark.to_owned(),
                format!("{:.1e}", row.difference),
                format!("{:.1e}", row.allowed),
            ]);
        }
        writeln!(out, "{table}")?;
    } else {
        let columns = ["items", "differ", "largest", "rounding"];
        let mut table = Table::new(&["stage", "largest in"], &columns);
        for stage in Stage::ALL {
            let stage_rows = || found.rows.iter().filter(|row| row.stage == stage);
            let worst = stage_rows().max_by(|a, b| a.difference.total_cmp(&b.difference));
            if let Some(worst) = worst {
                table.row([
                    stage.to_string(),
                    plain(&worst.name),
                    stage_rows().count().to_string(),
                    stage_rows().filter(|row| row.exceeds()).count().to_string(),
                    format!("{:.1e}", worst.difference),
                    format!("{:.1e}", worst.allowed),
                ]);
            }
        }
        writeln!(out, "{table}")?;
    }
    for (side, only) in [("A", &found.only[0]), ("B", &found.only[1])] {
        if let Some(first) = only.first() {
            writeln!(
                out,
                "{side} alone has {} items, as {}",
                only.len(),
                plain(first)
            )?;
        }
    }
    if let Some(first) = found.first() {
        writeln!(
            out,
            "first difference: {}, by {:.1e}; rounding explains {:.1e}",
            described(first),
            first.difference,
            first.allowed
        )?;
    }
    match &found.suspicion {
        None => writeln!(out, "equal apart from rounding")?,
        Some(suspicion) => writeln!(
            out,
            "suspicion: {}\n  at {}: {}",
            suspicion.fault.text(),
            plain(&suspicion.place),
            plain(&suspicion.because)
        )?,
    }
    Ok(())
}

fn described(row: &Row) -> String {
    let name = plain(&row.name);
    let rank = row
        .rank
        .map_or(String::new(), |rank| format!(", rank {rank}"));
    match row.layer {
        Some(layer) => format!("{name} ({}, layer {layer}{rank})", row.stage),
        None => format!("{name} ({}{rank})", row.stage),
    }
}

fn as_json(found: &Comparison) -> serde_json::Value {
    json!({
        "equal": found.suspicion.is_none(),
        "suspicion": found.suspicion,
        "first": found.first(),
        "losses": found.losses,
        "settings": found.settings,
        "only": found.only,
        "items": found.rows,
    })
}

/// Pixels: of a square, of the names on the left, and above.
const SQUARE: i32 = 14;
const LEFT: i32 = 330;
const TOP: i32 = 60;

/// The part of the model that a row is of, without its layer.
fn part(row: &Row) -> String {
    let Some(layer) = row.layer else {
        return row.name.clone();
    };
    let number = layer.to_string();
    let words = row.name.split('.').filter(|word| *word != number);
    let words: Vec<&str> = words.collect();
    let from = words
        .iter()
        .position(|word| matches!(*word, "layers" | "blocks"));
    words[from.map_or(0, |at| at + 1)..].join(".")
}

/// A square for each item: parts from above, layers from the left.
fn picture(path: &std::path::Path, found: &Comparison) -> Drawn {
    let mut parts: Vec<(Stage, String)> = Vec::new();
    let mut cells: BTreeMap<(usize, usize), &Row> = BTreeMap::new();
    let mut layers = 0;
    for row in &found.rows {
        let part = (row.stage, part(row));
        let at = parts.iter().position(|known| *known == part);
        let at = at.unwrap_or_else(|| {
            parts.push(part);
            parts.len() - 1
        });
        let layer = row.layer.unwrap_or(0);
        layers = layers.max(layer + 1);
        let cell = cells.entry((at, layer)).or_insert(row);
        if row.difference > cell.difference {
            *cell = row;
        }
    }
    let width = LEFT + SQUARE * layers.max(20) as i32 + 20;
    let height = TOP + (SQUARE + 2) * parts.len() as i32 + 20;
    svg::draw(path, (width, height), |area| {
        let title = "relative differences: white none, grey rounding, orange to red beyond it";
        svg::text(area, title, (10, 10), 15, GREY)?;
        for layer in (0..layers).step_by(if layers > 12 { 4 } else { 1 }) {
            let x = LEFT + SQUARE * layer as i32;
            svg::text(area, layer.to_string(), (x, TOP - 16), 11, GREY)?;
        }
        for (at, (stage, name)) in parts.iter().enumerate() {
            let y = TOP + (SQUARE + 2) * at as i32;
            let shown: String = name.chars().take(48).collect();
            svg::text(area, format!("{stage} {shown}"), (10, y), 11, GREY)?;
        }
        cells
            .iter()
            .try_for_each(|((at, layer), row)| cell(area, (*at, *layer), row))
    })
}

fn cell(area: &Area<'_>, (at, layer): (usize, usize), row: &Row) -> Drawn {
    use plotters::style::Color;
    let (x, y) = (LEFT + SQUARE * layer as i32, TOP + (SQUARE + 2) * at as i32);
    let color = colour(row);
    svg::square(area, (x, y), SQUARE - 2, color.filled())?;
    svg::square(
        area,
        (x, y),
        SQUARE - 2,
        RGBColor(200, 200, 200).stroke_width(1),
    )
}

/// White to grey below rounding, orange to red above it, by powers of ten.
fn colour(row: &Row) -> RGBColor {
    if row.difference == 0.0 {
        return RGBColor(255, 255, 255);
    }
    let beyond = (row.difference / row.allowed.max(1e-12)).log10();
    if row.exceeds() {
        let depth = (beyond / 4.0).clamp(0.0, 1.0);
        return RGBColor(
            230 - (60.0 * depth) as u8,
            (150.0 * (1.0 - depth)) as u8,
            20,
        );
    }
    let depth = (1.0 + beyond / 3.0).clamp(0.0, 1.0);
    let grey = 245 - (75.0 * depth) as u8;
    RGBColor(grey, grey, grey)
}
