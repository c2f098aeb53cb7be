//! Tables as kubectl users expect them: aligned columns, no borders, headers in capitals.

use comfy_table::{Cell, ContentArrangement, presets};

use super::{colour, words::ABSENT};

/// Columns with a header each, and rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    headers: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(headers: [&'static str; N]) -> Self {
        Self { headers: headers.to_vec(), rows: Vec::new() }
    }

    /// Adds columns at the right, which the rows must fill.
    pub fn columns<const N: usize>(mut self, headers: [&'static str; N]) -> Self {
        self.headers.extend(headers);
        self
    }

    /// Adds one column at the left.
    pub fn column_before(mut self, header: &'static str) -> Self {
        self.headers.insert(0, header);
        self
    }

    /// Adds a row; an empty cell is shown as absent.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.headers.len(), "a cell for each header");
        let shown = |cell: String| if cell.is_empty() { ABSENT.to_owned() } else { cell };
        self.rows.push(cells.into_iter().map(shown).collect());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The text, each line ended; nothing without rows.
    pub fn render(&self) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let mut table = comfy_table::Table::new();
        // Lines are as long as their content: the terminal wraps or the user scrolls, scripts cut columns.
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if colour::is_on() {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(&self.headers);
        for row in &self.rows {
            table.add_row(row.iter().map(|text| cell(text)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 3));
        }
        let lines: Vec<_> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        lines.join("\n") + "\n"
    }
}

fn cell(text: &str) -> Cell {
    let cell = Cell::new(text);
    match colour::of(text) {
        Some(colour) => cell.fg(colour),
        None => cell,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_last_letter() {
        let mut table = Table::new(["NAME", "STATE", "NODE"]);
        table.row(vec!["dev".into(), "AVAILABLE".into(), "node-1".into()]);
        table.row(vec!["a-longer-name".into(), "STOPPED".into(), String::new()]);
        let expected = "\
NAME            STATE       NODE
dev             AVAILABLE   node-1
a-longer-name   STOPPED     -
";
        assert_eq!(table.render(), expected);
    }

    #[test]
    fn without_rows_there_is_no_header() {
        assert_eq!(Table::new(["NAME"]).render(), "");
    }
}
