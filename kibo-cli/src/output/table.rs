//! Tables as kubectl users expect them: aligned columns, no borders, headers in capitals.

use comfy_table::{Cell, ColumnConstraint, ContentArrangement, presets};

use super::{colour, words::ABSENT};

/// Blanks between two columns.
const GAP: u16 = 3;

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

    /// The text, each line ended; nothing without rows. Lines are as long as their content: the terminal
    /// wraps or the user scrolls, scripts cut columns.
    pub fn render(&self) -> String {
        self.laid_out(None)
    }

    /// The same for a page: where the lines would be longer than `width`, the last column is wrapped.
    pub fn render_within(&self, width: Option<u16>) -> String {
        let text = self.laid_out(None);
        match width {
            Some(width) if self.width() > usize::from(width) => self.laid_out(Some(width)),
            _ => text,
        }
    }

    /// The length of the longest line.
    fn width(&self) -> usize {
        let widest = |i: usize| {
            let cells = self.rows.iter().map(|row| row[i].chars().count());
            cells.chain([self.headers[i].chars().count()]).max().unwrap_or(0) + usize::from(GAP)
        };
        (0..self.headers.len()).map(widest).sum::<usize>().saturating_sub(usize::from(GAP))
    }

    fn laid_out(&self, width: Option<u16>) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if colour::is_on() {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        if self.headers.iter().any(|header| !header.is_empty()) {
            table.set_header(&self.headers);
        }
        for row in &self.rows {
            table.add_row(row.iter().map(|text| cell(text)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, GAP));
        }
        if let Some(last) = table.column_iter_mut().last() {
            last.set_padding((0, 0));
        }
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
            for column in table.column_iter_mut().rev().skip(1) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
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
    fn in_a_page_the_last_column_is_wrapped() {
        let mut table = Table::new(["AGE", "REASON", "MESSAGE"]);
        table.row(vec!["5s".into(), "ResourceExhausted".into(), "no node can take it: of 2 connected".into()]);
        let expected = "\
AGE   REASON              MESSAGE
5s    ResourceExhausted   no node can take
                          it: of 2 connected
";
        assert_eq!(table.render_within(Some(45)), expected);
        assert_eq!(table.render_within(Some(80)), table.render());
        assert_eq!(table.render_within(None), table.render());
    }

    #[test]
    fn without_rows_there_is_no_header() {
        assert_eq!(Table::new(["NAME"]).render(), "");
    }
}
