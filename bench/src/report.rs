//! What was measured, as tables for a terminal and for a page.

use comfy_table::{CellAlignment, Table, presets};

/// What a figure ought to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    AtMost(f64),
    AtLeast(f64),
}

impl Aim {
    /// The aim, and whether it is met: two cells of a row.
    pub fn cells(self, measured: f64, show: impl Fn(f64) -> String) -> [String; 2] {
        let (aim, met, missed) = match self {
            Self::AtMost(aim) => (format!("≤ {}", show(aim)), measured <= aim, "over"),
            Self::AtLeast(aim) => (format!("≥ {}", show(aim)), measured >= aim, "below"),
        };
        [aim, if met { "met" } else { missed }.to_owned()]
    }
}

/// One figure with what stands behind it.
#[derive(Debug)]
pub struct Section {
    pub title: &'static str,
    /// What is measured and how, in whole sentences.
    pub explained: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Section {
    pub fn new<const N: usize>(title: &'static str, explained: impl Into<String>, header: [&str; N]) -> Self {
        Self { title, explained: explained.into(), header: header.map(str::to_owned).into(), rows: Vec::new() }
    }

    /// Shorter rows end with empty cells.
    pub fn row(&mut self, name: &str, cells: impl IntoIterator<Item = String>) {
        let mut row = vec![name.to_owned()];
        row.extend(cells);
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let mut table = self.table(presets::NOTHING);
        table.set_header(self.header.iter().map(|name| name.to_uppercase()));
        format!("{}\n{table}", self.title)
    }

    /// For a page.
    pub fn markdown(&self) -> String {
        let mut table = self.table(presets::ASCII_MARKDOWN);
        table.set_header(&self.header);
        format!("## {}\n\n{}\n\n{table}\n", self.title, self.explained)
    }

    fn table(&self, preset: &str) -> Table {
        let mut table = Table::new();
        table.load_preset(preset);
        for row in &self.rows {
            table.add_row(row);
        }
        let mut named = true;
        for column in table.column_iter_mut() {
            // Names to the left, numbers to the right.
            if !std::mem::take(&mut named) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

pub fn millis(millis: f64) -> String {
    format!("{millis:.0} ms")
}

pub fn seconds(seconds: f64) -> String {
    format!("{seconds:.1} s")
}

pub fn percent(percent: f64) -> String {
    format!("{percent:.1} %")
}

pub fn ratio(ratio: f64) -> String {
    format!("{ratio:.2}")
}

pub fn mib(mib: f64) -> String {
    format!("{mib:.1} MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aim_says_whether_it_is_met() {
        assert_eq!(Aim::AtMost(1.15).cells(1.15, ratio), ["≤ 1.15", "met"]);
        assert_eq!(Aim::AtMost(1.15).cells(1.16, ratio), ["≤ 1.15", "over"]);
        assert_eq!(Aim::AtLeast(0.8).cells(0.7, ratio), ["≥ 0.80", "below"]);
    }

    #[test]
    fn a_section_is_a_table_on_a_page_too() {
        let mut section = Section::new("Starts", "Explained.", ["", "median"]);
        section.row("a start", ["1 ms".to_owned()]);
        let page = section.markdown();
        assert!(page.starts_with("## Starts\n\nExplained.\n\n|"), "{page}");
        assert!(page.contains("| a start |"), "{page}");
    }
}
