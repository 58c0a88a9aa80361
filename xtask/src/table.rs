//! Tables on standard output, in Markdown's format.

use comfy_table::{Table, presets};

/// An empty table with these column names.
pub(crate) fn new(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(columns);
    table
}
