//! `exec`: a command in the guest, with or without a terminal.

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, open_stream};

use super::{GuestStream, channels::Carries, request::Subresource, status::ApiError};

/// What the query of an exec request says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a parameter of the query")]
pub struct ExecOptions {
    pub command: Vec<String>,
    /// The user's login shell in place of a command.
    pub shell: bool,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub terminal: Option<Terminal>,
}

/// What a program finds at its terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminal {
    pub columns: u16,
    pub rows: u16,
    /// TERM
    pub term: String,
}

impl Default for Terminal {
    /// Until the client says its size, that of old.
    fn default() -> Self {
        Self { columns: 80, rows: 24, term: String::new() }
    }
}

impl GuestStream for ExecOptions {
    /// Reads the parameters that `pods/exec` has, and ours: `shell`, and `term`, `columns` and `rows` of a terminal.
    /// A Workspace has one guest, so `container` means nothing.
    fn from_query(query: &str) -> Result<Self, ApiError> {
        let mut options = Self::default();
        let (mut is_terminal, mut terminal) = (false, Terminal::default());
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "command" => options.command.push(value.into_owned()),
                "shell" => options.shell = is_true(&value),
                "stdin" => options.stdin = is_true(&value),
                "stdout" => options.stdout = is_true(&value),
                "stderr" => options.stderr = is_true(&value),
                "tty" => is_terminal = is_true(&value),
                "term" => terminal.term = term(&value)?,
                "columns" => terminal.columns = size("columns", &value)?,
                "rows" => terminal.rows = size("rows", &value)?,
                _ => {}
            }
        }
        options.terminal = is_terminal.then_some(terminal);
        if options.shell && !options.command.is_empty() {
            return Err(bad("give a command or shell=true, not both"));
        }
        if !options.shell && options.command.first().is_none_or(String::is_empty) {
            return Err(bad(
                "no command: give command=PROGRAM, and command= once more for each argument, or shell=true",
            ));
        }
        if !(options.stdin || options.stdout || options.stderr) {
            return Err(bad("at least one of stdin, stdout and stderr must be true"));
        }
        Ok(options)
    }

    fn subresource(&self) -> Subresource {
        Subresource::Exec
    }

    fn kind(&self, instance: InstanceId) -> open_stream::Kind {
        let terminal = self.terminal.clone().map(|terminal| v1::Terminal {
            columns: terminal.columns.into(),
            rows: terminal.rows.into(),
            term: terminal.term,
        });
        open_stream::Kind::Exec(v1::ExecRequest {
            instance_id: instance.to_string(),
            command: self.command.clone(),
            stdin: self.stdin,
            terminal,
            shell: self.shell,
            ..v1::ExecRequest::default()
        })
    }

    fn carries(&self) -> Carries {
        Carries {
            input: self.stdin,
            stdout: self.stdout,
            // A terminal has one output.
            stderr: self.stderr && self.terminal.is_none(),
            terminal: self.terminal.is_some(),
            signals: true,
            patience: None,
            when_leader_changes: "the command was ended, run it again",
        }
    }
}

fn bad(message: &str) -> ApiError {
    ApiError::BadRequest(message.to_owned())
}

/// It becomes a variable of the command's environment.
fn term(value: &str) -> Result<String, ApiError> {
    let is_name = value.len() <= 64 && value.bytes().all(|byte| byte.is_ascii_graphic());
    is_name.then(|| value.to_owned()).ok_or_else(|| bad("term must be the name of a terminal, such as xterm-256color"))
}

fn size(key: &str, value: &str) -> Result<u16, ApiError> {
    value.parse().map_err(|_| bad(&format!("{key} must be a whole number from 0 to 65535, not {value:?}")))
}

/// As Kubernetes reads a boolean parameter: its presence says yes.
pub fn is_true(value: &str) -> bool {
    !value.eq_ignore_ascii_case("false") && value != "0"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_pods_exec_is_understood() {
        let query = "command=sh&command=-c&command=echo%20%22a+b%22&stdin=1&stdout=true&stderr=false&container=x";
        let expected = ExecOptions {
            command: ["sh", "-c", "echo \"a b\""].map(str::to_owned).into(),
            stdin: true,
            stdout: true,
            ..ExecOptions::default()
        };
        assert_eq!(ExecOptions::from_query(query).unwrap(), expected);
    }

    #[test]
    fn a_terminal_has_a_size_a_name_and_one_output() {
        let options = ExecOptions::from_query("command=sh&stdin=true&stdout=true&stderr=true&tty=true").unwrap();
        assert_eq!(options.terminal, Some(Terminal { columns: 80, rows: 24, term: String::new() }));
        assert!(!options.carries().stderr && options.carries().terminal);
        let query = "shell=true&stdin=true&stdout=true&tty=true&term=xterm-256color&columns=132&rows=43";
        let options = ExecOptions::from_query(query).unwrap();
        let terminal = Terminal { columns: 132, rows: 43, term: "xterm-256color".to_owned() };
        assert_eq!(options.terminal, Some(terminal));
        match options.kind(InstanceId::generate()) {
            open_stream::Kind::Exec(request) => assert!(request.shell && request.command.is_empty()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_what_to_write() {
        for (query, word) in [
            ("stdout=true", "command=PROGRAM"),
            ("command=&stdout=true", "command=PROGRAM"),
            ("command=ls", "at least one"),
            ("command=ls&shell=true&stdout=true", "not both"),
            ("command=sh&stdout=true&tty=true&term=a%0Ab", "term"),
            ("command=sh&stdout=true&tty=true&columns=x", "columns"),
        ] {
            let error = ExecOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400));
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(ExecOptions::from_query("command=sh&stdout=true&tty=false").is_ok());
    }
}
