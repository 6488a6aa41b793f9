//! Tables for people: they fit a terminal, and are plain text anywhere else.

use std::fmt;

use comfy_table::{CellAlignment, ContentArrangement, presets};
use console::Term;

/// A table without lines, indented by two.
///
/// On a terminal it is at most as wide as the terminal, and long cells are broken into several
/// lines. Anywhere else each row is one line, however long.
pub(crate) struct Table {
    cells: comfy_table::Table,
}

impl Table {
    /// Columns of text, aligned left, then columns of numbers, aligned right, by their headings.
    pub(crate) fn new(text: &[&str], numbers: &[&str]) -> Self {
        let mut cells = comfy_table::Table::new();
        cells
            .load_style(presets::NOTHING)
            .set_header(text.iter().chain(numbers));
        let terminal = Term::stdout();
        if let (true, Some((_, width))) = (terminal.is_term(), terminal.size_checked()) {
            cells
                .set_content_arrangement(ContentArrangement::Dynamic)
                .set_width(width);
        }
        for column in cells.column_iter_mut().take(text.len()) {
            column.set_padding((2, 0));
        }
        for column in cells.column_iter_mut().skip(text.len()) {
            column.set_padding((1, 0));
            column.set_cell_alignment(CellAlignment::Right);
        }
        Self { cells }
    }

    /// Adds a row.
    pub(crate) fn row<C: ToString>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.cells.add_row(cells);
    }
}

/// Each line with its end.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.cells.trim_fmt())
    }
}

/// A cell that may be empty.
pub(crate) fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_owned())
}
