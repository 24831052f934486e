//! Text for a terminal or a pipe.

use comfy_table::{presets, CellAlignment, Table};
use std::fmt::Display;

/// A table of plain columns. `right`: the indexes of columns with numbers, which are aligned to
/// the right.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    // No colours and no wrapping: a pipe and a terminal get the same text.
    table.load_preset(presets::NOTHING).force_no_tty().set_header(header);
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Prints `text` without trailing blanks on each line.
pub fn print(text: impl Display) {
    for line in text.to_string().lines() {
        anstream::println!("{}", line.trim_end());
    }
}
