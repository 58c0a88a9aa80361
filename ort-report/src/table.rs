//! Text tables: aligned columns without borders, whose cells act on no terminal.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use comfy_table::{CellAlignment, presets};
use ort_core::shown;

/// The most bytes of a cell.
const CELL_BYTES: usize = 1024;

/// Returns a text from a model for use within a line: newlines are escaped, and a long text is
/// truncated.
pub fn in_line(text: &str) -> Cow<'_, str> {
    shown(text, CELL_BYTES)
}

/// A table of results: aligned columns without borders.
pub struct Table(comfy_table::Table);

impl Table {
    /// Returns an empty table with this header.
    pub fn new(header: &[&str]) -> Table {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(header.iter().map(|cell| in_line(cell)));
        Table(table)
    }

    /// Adds a row. Its cells are escaped and truncated.
    pub fn add_row<C: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = C>) {
        let cells = cells.into_iter().map(|cell| in_line(cell.as_ref()).into_owned());
        self.0.add_row(cells.collect::<Vec<String>>());
    }

    /// Right-aligns these columns.
    pub fn align_right(mut self, columns: Range<usize>) -> Table {
        for column in self.0.column_iter_mut().skip(columns.start).take(columns.len()) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        self
    }
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use ort_core::steers;

    use super::*;

    #[test]
    fn tables_and_lines_steer_no_terminal() {
        let mut rows = Table::new(&["na\x1bme", ""]);
        rows.add_row(["\x1b]0;title\x07\n\u{202e}", &"x".repeat(100_000)]);
        let text = rows.to_string();
        assert!(!text.chars().any(|character| character != '\n' && steers(character)), "{text:?}");
        assert!(text.len() < 8 * CELL_BYTES && text.lines().count() == 2, "{} bytes", text.len());
    }
}
