//! What `get` prints: facts under each other, then tables under headings.

use std::fmt::Write as _;

use super::{Table, words::ABSENT};

/// A page about one object.
#[derive(Debug, Default)]
pub struct Page {
    facts: Vec<(&'static str, String)>,
    sections: Vec<(&'static str, String)>,
}

impl Page {
    /// A fact; absent ones are shown as such, since a reader looks for them.
    pub fn fact(&mut self, name: &'static str, value: impl Into<String>) {
        let value = value.into();
        self.facts.push((name, if value.is_empty() { ABSENT.to_owned() } else { value }));
    }

    /// A fact that is left out when there is nothing to say.
    pub fn fact_if(&mut self, name: &'static str, value: Option<impl Into<String>>) {
        if let Some(value) = value {
            self.fact(name, value);
        }
    }

    /// A table under a heading, left out without rows.
    pub fn section(&mut self, heading: &'static str, table: &Table) {
        if !table.is_empty() {
            self.sections.push((heading, table.render()));
        }
    }

    pub fn render(&self) -> String {
        let width = self.facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 3;
        let mut text = String::new();
        for (name, value) in &self.facts {
            // Further lines of a value stand under its first.
            let value = value.trim_end().replace('\n', &format!("\n{:width$}", ""));
            let _ = writeln!(text, "{:width$}{value}", format!("{name}:"));
        }
        for (heading, table) in &self.sections {
            let _ = writeln!(text, "\n{heading}:");
            for line in table.lines() {
                let _ = writeln!(text, "  {line}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_aligned_and_sections_stand_apart() {
        let mut page = Page::default();
        page.fact("Name", "dev");
        page.fact("Writable layer", "1Gi\nin pool local-a");
        page.fact("Node", "");
        page.fact_if("Reason", None::<String>);
        let mut table = Table::new(["A", "B"]);
        table.row(vec!["1".into(), "2".into()]);
        page.section("Events", &table);
        page.section("Nothing", &Table::new(["A"]));
        let expected = "\
Name:            dev
Writable layer:  1Gi
                 in pool local-a
Node:            -

Events:
  A   B
  1   2
";
        assert_eq!(page.render(), expected);
    }
}
