//! How results reach the terminal or the script: tables, pages, JSON and YAML, bare names.

pub mod colour;
mod conditions;
mod list;
pub mod page;
mod table;
pub mod words;

use std::io::{self, Write as _};

use clap::{Args, ValueEnum};
use serde::Serialize;

pub use conditions::{ConditionView, conditions, is_telling};
pub use page::Page;
pub use table::Table;

use crate::errors::Result;

/// How a command that answers with objects shows them.
#[derive(Args, Clone, Debug, Default)]
pub struct OutputArgs {
    /// Form of the result
    #[arg(short, long, value_enum, value_name = "FORM", help_heading = "Output")]
    output: Option<Output>,
    /// Shorthand for -o json: {"result": …} with field names in snake_case
    #[arg(long, conflicts_with = "output", help_heading = "Output")]
    json: bool,
    /// Shorthand for -o wide: more columns or lines
    #[arg(long, conflicts_with_all = ["output", "json"], help_heading = "Output")]
    wide: bool,
    /// Print only ids (Workspaces) or names
    #[arg(short, long, conflicts_with_all = ["output", "json", "wide"], help_heading = "Output")]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// More columns or lines
    Wide,
    /// {"result": …} with field names in snake_case
    Json,
    /// The same as YAML
    Yaml,
    /// Only ids (Workspaces) or names
    Name,
}

/// The one form that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Text { wide: bool },
    Json,
    Yaml,
    Name,
}

impl OutputArgs {
    pub fn form(&self) -> Form {
        match self.output {
            Some(Output::Json) => Form::Json,
            Some(Output::Yaml) => Form::Yaml,
            Some(Output::Name) => Form::Name,
            Some(Output::Wide) => Form::Text { wide: true },
            None if self.json => Form::Json,
            None if self.quiet => Form::Name,
            None => Form::Text { wide: self.wide },
        }
    }
}

/// Something with a result in every form.
pub trait Present {
    /// The value of `result`.
    fn view(&self) -> impl Serialize;
    /// One id or name for each object.
    fn names(&self) -> Vec<String>;
    /// For people; ends with a line feed unless it is empty.
    fn text(&self, wide: bool) -> String;
}

/// Prints a result to standard output.
pub fn present(form: Form, result: &impl Present) -> Result<()> {
    let text = match form {
        Form::Text { wide } => result.text(wide),
        Form::Json => json(&result.view())?,
        Form::Yaml => serde_yaml::to_string(&Envelope { result: result.view() }).map_err(io::Error::other)?,
        Form::Name => result.names().into_iter().flat_map(|name| [name, "\n".to_owned()]).collect(),
    };
    print(&text)
}

#[derive(Serialize)]
struct Envelope<T> {
    result: T,
}

fn json(view: &impl Serialize) -> Result<String> {
    let mut text = serde_json::to_string_pretty(&Envelope { result: view }).map_err(io::Error::other)?;
    text.push('\n');
    Ok(text)
}

/// Writes to standard output; a reader that has gone is an error, not a panic.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// A remark beside the result, on standard error, which nobody reads when it cannot be written.
pub fn remark(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stands_in_an_envelope() {
        assert_eq!(json(&serde_json::json!({ "a": 1 })).unwrap(), "{\n  \"result\": {\n    \"a\": 1\n  }\n}\n");
    }

    #[test]
    fn one_form_is_chosen() {
        let form = |output, json, wide, quiet| OutputArgs { output, json, wide, quiet }.form();
        assert_eq!(form(None, false, false, false), Form::Text { wide: false });
        assert_eq!(form(None, false, true, false), Form::Text { wide: true });
        assert_eq!(form(Some(Output::Wide), false, false, false), Form::Text { wide: true });
        assert_eq!(form(None, true, false, false), Form::Json);
        assert_eq!(form(Some(Output::Yaml), false, false, false), Form::Yaml);
        assert_eq!(form(None, false, false, true), Form::Name);
    }
}
