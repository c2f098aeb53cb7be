//! A recorded session with a command line: what was typed, and what came back.
//!
//! The record is the script of its own repetition. `## heading` begins a part, `$ command` is run and what it
//! prints stands below it (with `^C` at the end: until it has printed a line), `% command` is run without being
//! shown, `# remark` is for who reads the record.
//! What differs from run to run is replaced by what is always the same ([`Normalizer`]).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// One entry of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A heading or a remark, as it stands.
    Text(String),
    /// A command whose output is not shown; it must succeed.
    Silent(String),
    /// A command with what it printed and its exit status.
    Shown { command: String, output: String },
}

/// Reads a record.
pub fn parse(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    for line in text.lines() {
        if line.starts_with("# ") || line.starts_with("## ") {
            entries.push(Entry::Text(line.to_owned()));
        } else if let Some(command) = line.strip_prefix("% ") {
            entries.push(Entry::Silent(command.to_owned()));
        } else if let Some(command) = line.strip_prefix("$ ") {
            entries.push(Entry::Shown { command: command.to_owned(), output: String::new() });
        } else if let Some(Entry::Shown { output, .. }) = entries.last_mut() {
            output.push_str(line);
            output.push('\n');
        }
    }
    for entry in &mut entries {
        if let Entry::Shown { output, .. } = entry {
            *output = ended(output);
        }
    }
    entries
}

/// The line for a shell that does what the command does, both outputs in one, as a terminal shows them.
pub fn script(command: &str) -> String {
    match command.strip_suffix(" ^C") {
        Some(command) => format!(
            "coproc {{ exec 2>&1; exec {command}; }}; pid=$COPROC_PID; read -r line <&\"${{COPROC[0]}}\"; echo \"$line\"; kill -INT \"$pid\"; wait \"$pid\""
        ),
        None => format!("exec 2>&1; {command}"),
    }
}

/// The inverse of [`parse`].
pub fn render(entries: &[Entry]) -> String {
    let mut text = String::new();
    for entry in entries {
        let _ = match entry {
            Entry::Text(line) if line.starts_with("## ") => writeln!(text, "\n{line}"),
            Entry::Text(line) => writeln!(text, "{line}"),
            Entry::Silent(command) => writeln!(text, "% {command}"),
            Entry::Shown { command, output } => write!(text, "$ {command}\n{output}"),
        };
    }
    text
}

/// Without blank lines at the end, and with a line feed unless it is empty.
pub fn ended(output: &str) -> String {
    let output = output.trim_end();
    if output.is_empty() { String::new() } else { format!("{output}\n") }
}

/// Replaces what differs from run to run. Ids keep their identity within one record.
#[derive(Default)]
pub struct Normalizer {
    /// Replaced as they stand.
    names: Vec<(String, String)>,
    ids: BTreeMap<String, usize>,
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a pattern of our own is right")
}

static ID: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b(ws|inst|kibo)-([0-9a-hjkmnp-tv-z]{26})\b"));
static TIME: LazyLock<Regex> = LazyLock::new(|| pattern(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"));
static AGO: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b(\d+[smhdy])+ ago\b"));
static LASTING: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b([A-Z]+|yes,) for (\d+[smhdy])+"));
static TOKEN: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bkibo-enroll-v1\.[\w.-]+"));
static PORT: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b127\.0\.0\.1:\d+"));
static ADDRESS: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^(Address: +)[\d.]+$"));
static CAPACITY: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^(Capacity: +)[\d.]+[KMGTP]i$"));
static CLOCK: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^( +Clock +)[-+]\d.*$"));
static UNCERTAINTY: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^( +Clock uncertainty +)\d+ ms$"));
static KERNEL: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^( +Kernel clock +)(not )?synchronized$"));
static VERSION: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bregistration_version is \d+"));
static POLICY_VERSION: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^(Version: +)\d+$"));
static IDLE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^( +CPU idle +)\S.*$"));
static FREE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^(Free: +)[\d.]+[KMGTP]i$"));
static USED: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^(Used: +)[\d.]+[KMGTP]i$"));
static HEADER: LazyLock<Regex> = LazyLock::new(|| pattern(r"^ *[A-Z][A-Z_/]*( {3,}[A-Z][A-Z_/]*)+$"));
static GAP: LazyLock<Regex> = LazyLock::new(|| pattern(" {3,}"));

impl Normalizer {
    /// Replaces a name too, such as the namespace of a test.
    #[must_use]
    pub fn replacing(mut self, from: &str, to: &str) -> Self {
        self.names.push((from.to_owned(), to.to_owned()));
        self
    }

    pub fn normalized(&mut self, output: &str) -> String {
        let mut text = output.to_owned();
        for (from, to) in &self.names {
            text = text.replace(from, to);
        }
        let text = ID.replace_all(&text, |found: &Captures<'_>| self.id(&found[1], &found[2]));
        let text = TIME.replace_all(&text, "2026-01-02T03:04:05Z");
        let text = AGO.replace_all(&text, "5s ago");
        let text = LASTING.replace_all(&text, "$1 for 5s");
        let text = TOKEN.replace_all(&text, "kibo-enroll-v1.bm9kZS0y.c2VjcmV0.Y2EtaGFzaA");
        let text = PORT.replace_all(&text, "127.0.0.1:8080");
        let text = ADDRESS.replace_all(&text, "${1}10.77.12.9");
        let text = CAPACITY.replace_all(&text, "${1}100.0Gi");
        let text = IDLE.replace_all(&text, "${1}97.31 %");
        let text = FREE.replace_all(&text, "${1}60.0Gi");
        let text = USED.replace_all(&text, "${1}40.0Gi");
        let text = CLOCK.replace_all(&text, "${1}+0.0s");
        let text = UNCERTAINTY.replace_all(&text, "${1}1 ms");
        let text = KERNEL.replace_all(&text, "${1}synchronized");
        let text = VERSION.replace_all(&text, "registration_version is 77");
        let text = POLICY_VERSION.replace_all(&text, "${1}77");
        tables(&text)
    }

    /// Of the same length, counted in the order of appearance.
    fn id(&mut self, kind: &str, ulid: &str) -> String {
        let next = self.ids.len() + 1;
        let number = *self.ids.entry(ulid.to_owned()).or_insert(next);
        format!("{kind}-01kb8z4w3w{number:016}")
    }
}

/// What stands in a column whose cells differ from run to run.
fn fixed_cell(header: &str) -> Option<&'static str> {
    match header {
        "AGE" | "SAMPLE_AGE" => Some("5s"),
        "CLOCK" => Some("+0.0s"),
        "CPU_IDLE" => Some("97.31%"),
        "CAPACITY" => Some("100.0Gi"),
        "FREE" => Some("60.0Gi"),
        "USED" => Some("40.0Gi"),
        "FREE/CAPACITY" => Some("60.0Gi/100.0Gi"),
        "REG_VERSION" => Some("77"),
        "CPU_USED/ALLOC" => Some("0.125/1"),
        "MEM_USED/ALLOC" => Some("104.2Mi/192.0Mi"),
        _ => None,
    }
}

/// Lays every table out anew with its changed cells.
fn tables(text: &str) -> String {
    let mut lines = text.lines().peekable();
    let mut done = String::new();
    while let Some(line) = lines.next() {
        if !HEADER.is_match(line) {
            done.push_str(line);
            done.push('\n');
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let split = |line: &str| -> Vec<String> { GAP.split(line.trim()).map(str::to_owned).collect() };
        let headers = split(line);
        // What runs only now may not be in a sample yet.
        let is_of_use = headers.iter().any(|header| header == "MEM_USED/ALLOC");
        let mut rows = vec![headers.clone()];
        while let Some(row) = lines.next_if(|line| split(line).len() == headers.len()) {
            let fixed = |(cell, header): (String, &String)| match fixed_cell(header) {
                Some(fixed) if cell != "-" || is_of_use => fixed.to_owned(),
                _ => cell,
            };
            rows.push(split(row).into_iter().zip(&headers).map(fixed).collect());
        }
        done.push_str(&laid_out(&rows, indent));
    }
    done
}

fn laid_out(rows: &[Vec<String>], indent: usize) -> String {
    let columns = rows[0].len();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0) + 3;
    let mut text = String::new();
    for row in rows {
        let cells: Vec<_> = (0..columns).map(|column| format!("{:1$}", row[column], width(column))).collect();
        let _ = writeln!(text, "{:indent$}{}", "", cells.concat().trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = "\
# A remark.

## kibo node list
% kubectl get nodes
$ kibo node list
NODE     AGE
node-1   5s

$ kibo node get x
error: no

## kibo node get
$ true
";

    #[test]
    fn a_record_is_its_own_script() {
        let entries = parse(RECORD);
        assert_eq!(entries[2], Entry::Silent("kubectl get nodes".to_owned()));
        let Entry::Shown { output, .. } = &entries[3] else { panic!("{entries:?}") };
        assert_eq!(output, "NODE     AGE\nnode-1   5s\n");
        assert_eq!(parse(&render(&entries)), entries);
    }

    #[test]
    fn what_differs_from_run_to_run_is_replaced() {
        let mut normalizer = Normalizer::default().replacing("e2e-1", "default");
        let output = "\
ID:      ws-01m8mnx8defng6svk02dsdg91p
Other:   ws-01m8mpbd9psmcxg4jwt396m0hf
Again:   ws-01m8mnx8defng6svk02dsdg91p in e2e-1
State:   AVAILABLE for 12s
Free:    31.7Gi

Events:
  AGE     TYPE     MESSAGE
  2m15s   Normal   it is there
";
        let expected = "\
ID:      ws-01kb8z4w3w0000000000000001
Other:   ws-01kb8z4w3w0000000000000002
Again:   ws-01kb8z4w3w0000000000000001 in default
State:   AVAILABLE for 5s
Free:    60.0Gi

Events:
  AGE   TYPE     MESSAGE
  5s    Normal   it is there
";
        assert_eq!(normalizer.normalized(output), expected);
        assert_eq!(Normalizer::default().normalized(expected), expected, "what is normal stays");
    }

    #[test]
    fn a_clock_that_is_not_known_stays_unknown() {
        let page = |clock: &str, uncertainty: &str, kernel: &str| {
            let items = [("Clock", clock), ("Clock uncertainty", uncertainty), ("Kernel clock", kernel)];
            items.map(|(item, value)| format!("  {item:<17}   {value}\n")).concat()
        };
        let known = page("-1.2s", "14 ms", "not synchronized");
        assert_eq!(Normalizer::default().normalized(&known), page("+0.0s", "1 ms", "synchronized"));
        let unknown = page("-", "-", "-");
        assert_eq!(Normalizer::default().normalized(&unknown), unknown);
    }

    #[test]
    fn amounts_of_another_kind_stay() {
        let same = "Capacity:   2 CPU, 1.0Gi memory\ntimed out after 1s waiting\n";
        assert_eq!(Normalizer::default().normalized(same), same);
    }
}
