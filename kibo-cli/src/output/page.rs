//! What `get` prints: facts under each other, then tables under headings.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU16, Ordering},
};

use super::{Table, colour, words::ABSENT};

/// Columns of the terminal; 0: standard output is none, and in tests.
static WIDTH: AtomicU16 = AtomicU16::new(0);

/// Finds out how wide a page may be. On a terminal that is too narrow for columns it is left to the terminal.
pub fn measure_terminal() {
    const USABLE: u16 = 60;
    let width = comfy_table::Table::new().width().filter(|width| *width >= USABLE);
    WIDTH.store(width.unwrap_or(0), Ordering::Relaxed);
}

/// A page about one object.
#[derive(Debug, Default)]
pub struct Page {
    facts: Vec<(&'static str, String)>,
    /// The fact whose first word is a state.
    state: Option<&'static str>,
    sections: Vec<(&'static str, Table)>,
}

impl Page {
    /// A fact; absent ones are shown as such, since a reader looks for them.
    pub fn fact(&mut self, name: &'static str, value: impl Into<String>) {
        let value = value.into();
        self.facts.push((name, if value.is_empty() { ABSENT.to_owned() } else { value }));
    }

    /// A fact that is left out when there is nothing to say.
    pub fn fact_if(&mut self, name: &'static str, value: Option<impl Into<String>>) {
        if let Some(value) = value.map(Into::into).filter(|value: &String| !value.is_empty()) {
            self.fact(name, value);
        }
    }

    /// The fact that begins with a state.
    pub fn state(&mut self, name: &'static str, value: impl Into<String>) {
        self.fact(name, value);
        self.state = Some(name);
    }

    /// A table under a heading, left out without rows.
    pub fn section(&mut self, heading: &'static str, table: Table) {
        if !table.is_empty() {
            self.sections.push((heading, table));
        }
    }

    pub fn render(&self) -> String {
        let width = WIDTH.load(Ordering::Relaxed);
        self.render_within((width > 0).then_some(width))
    }

    fn render_within(&self, width: Option<u16>) -> String {
        const INDENT: u16 = 2;
        let mut text = self.facts(width);
        for (heading, table) in &self.sections {
            let _ = writeln!(text, "\n{heading}:");
            for line in table.render_within(width.map(|width| width - INDENT)).lines() {
                let _ = writeln!(text, "{:INDENT$}{line}", "", INDENT = usize::from(INDENT));
            }
        }
        text
    }

    fn facts(&self, width: Option<u16>) -> String {
        let mut table = Table::new(["", ""]);
        let longest = self.facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in &self.facts {
            // Further lines of a value stand under its first.
            for (i, line) in value.trim_end().lines().enumerate() {
                let name = if i == 0 { format!("{name}:") } else { " ".to_owned() };
                table.row(vec![format!("{name:0$}", longest), line.to_owned()]);
            }
        }
        let text = table.render_within(width);
        let Some((name, value)) = self.facts.iter().find(|(name, _)| Some(*name) == self.state) else { return text };
        let (begin, word) = (format!("{name}:"), value.split_whitespace().next().unwrap_or_default());
        let coloured = |line: &str| {
            let line = if line.starts_with(&begin) { colour::state_in(line, word) } else { line.to_owned() };
            line + "\n"
        };
        text.lines().map(coloured).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::default();
        page.fact("Name", "dev");
        page.state("State", "FAILED (NOT_STARTED)\nthe node that was asked did not take it");
        page.fact("Writable layer", "1Gi\nin pool local-a");
        page.fact("Node", "");
        page.fact_if("Reason", None::<String>);
        let mut table = Table::new(["A", "B"]);
        table.row(vec!["1".into(), "2".into()]);
        page.section("Events", table);
        page.section("Nothing", Table::new(["A"]));
        page
    }

    #[test]
    fn facts_are_aligned_and_sections_stand_apart() {
        let expected = "\
Name:             dev
State:            FAILED (NOT_STARTED)
                  the node that was asked did not take it
Writable layer:   1Gi
                  in pool local-a
Node:             -

Events:
  A   B
  1   2
";
        assert_eq!(page().render(), expected);
    }

    #[test]
    fn on_a_narrow_terminal_values_are_wrapped_under_each_other() {
        let text = page().render_within(Some(40));
        let wrapped = "\
State:            FAILED (NOT_STARTED)
                  the node that was
                  asked did not take it
";
        assert!(text.contains(wrapped), "{text}");
    }
}
