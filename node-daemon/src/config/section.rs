//! Takes the keys out of a TOML table one by one and keeps every problem, so that a person mends
//! a file in one round.

use std::{fmt, path::PathBuf, str::FromStr};

use toml::{Table, Value};

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Full name of the key: `storage_pools[0].path`.
    pub key: String,
    /// What was found; absent when nothing was.
    pub value: Option<String>,
    pub rule: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{} = {value}: {}", self.key, self.rule),
            None => write!(f, "{}: {}", self.key, self.rule),
        }
    }
}

/// Everything that is wrong with the configuration, in the order of the file's sections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    pub fn add(&mut self, key: impl Into<String>, value: Option<String>, rule: impl Into<String>) {
        self.0.push(Problem { key: key.into(), value, rule: rule.into() });
    }

    pub fn into_result(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A table whose keys are taken out; what is left over at the end is unknown.
pub struct Section<'p> {
    name: String,
    table: Table,
    problems: &'p mut Problems,
}

impl<'p> Section<'p> {
    pub fn root(table: Table, problems: &'p mut Problems) -> Self {
        Self { name: String::new(), table, problems }
    }

    fn key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub fn problem(&mut self, key: &str, value: Option<String>, rule: impl Into<String>) {
        let key = self.key(key);
        self.problems.add(key, value, rule);
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.table.remove(key)
    }

    fn required(&mut self, key: &str) -> Option<Value> {
        let value = self.take(key);
        if value.is_none() {
            self.problem(key, None, "is required");
        }
        value
    }

    fn text_of(&mut self, key: &str, value: Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text),
            other => {
                self.problem(key, Some(other.to_string()), "must be a string");
                None
            }
        }
    }

    fn parse_text<T: FromStr<Err: fmt::Display>>(&mut self, key: &str, text: &str) -> Option<T> {
        text.parse().map_err(|error: T::Err| self.problem(key, Some(format!("{text:?}")), error.to_string())).ok()
    }

    /// A string that parses as `T`, whose error is the rule.
    pub fn text<T: FromStr<Err: fmt::Display>>(&mut self, key: &str) -> Option<T> {
        let value = self.required(key)?;
        let text = self.text_of(key, value)?;
        self.parse_text(key, &text)
    }

    pub fn optional_text<T: FromStr<Err: fmt::Display>>(&mut self, key: &str) -> Option<T> {
        let value = self.take(key)?;
        let text = self.text_of(key, value)?;
        self.parse_text(key, &text)
    }

    /// A Kubernetes quantity above zero; a whole number may stand without quotes.
    pub fn quantity<T: FromStr<Err: fmt::Display> + Default + PartialEq>(&mut self, key: &str) -> Option<T> {
        let text = match self.required(key)? {
            Value::Integer(number) => number.to_string(),
            value => self.text_of(key, value)?,
        };
        let amount: T = self.parse_text(key, &text)?;
        if amount == T::default() {
            self.problem(key, Some(format!("{text:?}")), "must be above 0");
            return None;
        }
        Some(amount)
    }

    fn path_of(&mut self, key: &str, value: Value) -> Option<PathBuf> {
        let path = PathBuf::from(self.text_of(key, value)?);
        if path.is_absolute() {
            return Some(path);
        }
        self.problem(key, Some(format!("{:?}", path.display().to_string())), "must be an absolute path");
        None
    }

    pub fn path(&mut self, key: &str) -> Option<PathBuf> {
        let value = self.required(key)?;
        self.path_of(key, value)
    }

    pub fn optional_path(&mut self, key: &str) -> Option<PathBuf> {
        let value = self.take(key)?;
        self.path_of(key, value)
    }

    pub fn optional_number(&mut self, key: &str, min: u32) -> Option<u32> {
        let value = self.take(key)?;
        let number = value.as_integer().and_then(|n| u32::try_from(n).ok()).filter(|n| *n >= min);
        if number.is_none() {
            self.problem(key, Some(value.to_string()), format!("must be a whole number of at least {min}"));
        }
        number
    }

    pub fn flag(&mut self, key: &str) -> bool {
        match self.take(key) {
            None => false,
            Some(Value::Boolean(flag)) => flag,
            Some(other) => {
                self.problem(key, Some(other.to_string()), "must be true or false");
                false
            }
        }
    }

    /// A list of strings with at least one entry.
    pub fn texts<T: FromStr<Err: fmt::Display>>(&mut self, key: &str) -> Vec<T> {
        let Some(value) = self.required(key) else { return Vec::new() };
        if value.as_array().is_some_and(Vec::is_empty) {
            self.problem(key, Some("[]".into()), "must have at least one entry");
        }
        self.texts_of(key, value)
    }

    /// A list of strings, which may be empty.
    pub fn optional_texts<T: FromStr<Err: fmt::Display>>(&mut self, key: &str) -> Option<Vec<T>> {
        let value = self.take(key)?;
        Some(self.texts_of(key, value))
    }

    fn texts_of<T: FromStr<Err: fmt::Display>>(&mut self, key: &str, value: Value) -> Vec<T> {
        let Value::Array(values) = value else {
            self.problem(key, Some(value.to_string()), "must be a list of strings");
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, value) in values.into_iter().enumerate() {
            let key = format!("{key}[{index}]");
            if let Some(text) = self.text_of(&key, value) {
                texts.extend(self.parse_text(&key, &text));
            }
        }
        texts
    }

    /// A table; a missing one is read as empty, so that its required keys are named.
    pub fn section<T>(&mut self, key: &str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
        let table = match self.take(key) {
            None => Table::new(),
            Some(Value::Table(table)) => table,
            Some(other) => {
                self.problem(key, Some(other.to_string()), "must be a table");
                Table::new()
            }
        };
        let name = self.key(key);
        let mut section = Section { name, table, problems: self.problems };
        let result = read(&mut section);
        section.finish();
        result
    }

    /// A table that may be missing.
    pub fn optional_section<T>(&mut self, key: &str, read: impl FnOnce(&mut Section<'_>) -> T) -> Option<T> {
        self.table.contains_key(key).then(|| self.section(key, read))
    }

    /// A list of tables with at least one entry.
    pub fn sections<T>(&mut self, key: &str, mut read: impl FnMut(&mut Section<'_>) -> T) -> Vec<T> {
        let tables = match self.take(key) {
            Some(Value::Array(values)) if values.iter().all(Value::is_table) => values,
            None => Vec::new(),
            Some(other) => {
                self.problem(key, Some(other.to_string()), format!("must be a list of tables: [[{key}]]"));
                return Vec::new();
            }
        };
        if tables.is_empty() {
            self.problem(key, None, "at least one is required");
        }
        let mut results = Vec::new();
        for (index, value) in tables.into_iter().enumerate() {
            if let Value::Table(table) = value {
                let name = self.key(&format!("{key}[{index}]"));
                let mut section = Section { name, table, problems: self.problems };
                results.push(read(&mut section));
                section.finish();
            }
        }
        results
    }

    /// Every key that is left, with its string.
    pub fn rest(&mut self) -> Vec<(String, String)> {
        let table = std::mem::take(&mut self.table);
        table.into_iter().filter_map(|(key, value)| self.text_of(&key, value).map(|text| (key, text))).collect()
    }

    pub fn finish(mut self) {
        for (key, value) in std::mem::take(&mut self.table) {
            self.problem(&key, Some(value.to_string()), "is not a known key");
        }
    }
}
